//! A new version is seen when its freshness says so, and never mixed with the old one.
//!
//! `strict` asks the origin each time, so a change made behind the node's back is in the very next answer. Under
//! `immutable` the operator has said that nothing changes, and nothing is asked. Writes through the node are
//! seen at once under every freshness; a purge forgets every tier.

use forebay_tests::http::{self, Connection, Response};
use forebay_tests::origin::{Fault, Origin};
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine, wait};
use std::net::SocketAddr;

const SIZE: usize = (2 << 20) + 777;

on_each_engine!(
    strict_sees_a_change_behind_the_node,
    strict_asks_without_fetching_what_did_not_change,
    strict_shares_no_absence_that_is_older_than_the_question,
    ttl_sees_a_change_when_it_has_passed,
    immutable_never_asks_again,
    a_put_through_the_node_is_seen_at_once,
    a_delete_through_the_node_is_seen_at_once,
    a_put_during_a_fill_wins,
    a_change_during_a_fill_is_cut_or_whole_but_never_mixed,
    a_purged_object_is_fetched_again,
    if_none_match_of_the_client_is_answered_by_the_node,
);

fn strict_sees_a_change_behind_the_node(engine: Engine) {
    let (origin, node) = start(engine, "strict");
    for version in 0..5 {
        let etag = origin.put("object", body(version));
        for _ in 0..2 {
            must_be(&http::get(node.data(), "/data/object"), version, &etag);
        }
    }
}

fn strict_asks_without_fetching_what_did_not_change(engine: Engine) {
    let (origin, node) = start(engine, "strict");
    let etag = origin.put("object", body(1));
    must_be(&http::get(node.data(), "/data/object"), 1, &etag);
    let before = origin.counts();
    for _ in 0..5 {
        must_be(&http::get(node.data(), "/data/object"), 1, &etag);
    }
    let after = origin.counts();
    assert_eq!(after.bodies, before.bodies, "{after:?}");
    assert!(after.not_modified > before.not_modified, "strict did not ask: {after:?}");
}

/// A reader who waits for a marker to appear was told of its absence by an answer from before it appeared.
fn strict_shares_no_absence_that_is_older_than_the_question(engine: Engine) {
    let (origin, node) = start(engine, "strict");
    let address = node.data();
    let ask = || std::thread::spawn(move || http::get(address, "/data/_SUCCESS"));
    origin.fault("_SUCCESS", Fault::Hold, 1);
    let early = ask();
    wait::until("the origin's answer to be made", || (origin.faults_left("_SUCCESS") == 0).then_some(()));
    let etag = origin.put("_SUCCESS", body(1));
    let late = ask();
    // Time for the late one to find the question of the early one under way.
    std::thread::sleep(std::time::Duration::from_millis(200));
    origin.resume();
    assert_eq!(early.join().expect("the early reader").status, 404);
    must_be(&late.join().expect("the late reader"), 1, &etag);
}

fn ttl_sees_a_change_when_it_has_passed(engine: Engine) {
    let (origin, node) = start(engine, "ttl:1s");
    let etag = origin.put("object", body(1));
    must_be(&http::get(node.data(), "/data/object"), 1, &etag);
    let new = origin.put("object", body(2));
    // Before the second has passed either answer is right, each of them whole; after it only the new one comes.
    wait::until("the new version", || {
        let response = http::get(node.data(), "/data/object");
        let is_new = response.header("etag") == Some(&new);
        if is_new {
            must_be(&response, 2, &new);
        } else {
            must_be(&response, 1, &etag);
        }
        is_new.then_some(())
    });
}

fn immutable_never_asks_again(engine: Engine) {
    let (origin, node) = start(engine, "immutable");
    let etag = origin.put("object", body(1));
    must_be(&http::get(node.data(), "/data/object"), 1, &etag);
    let asked = origin.counts().requests();
    origin.put("object", body(2));
    for _ in 0..5 {
        must_be(&http::get(node.data(), "/data/object"), 1, &etag);
    }
    assert_eq!(origin.counts().requests(), asked);
}

fn a_put_through_the_node_is_seen_at_once(engine: Engine) {
    let (origin, node) = start(engine, "immutable");
    origin.put("object", body(0));
    http::get(node.data(), "/data/object");
    for version in 1..5 {
        let etag = put(node.data(), version);
        must_be(&http::get(node.data(), "/data/object"), version, &etag);
        must_be(&http::get(node.data(), "/data/object"), version, &etag);
    }
    assert_eq!(origin.counts().puts, 4, "each PUT reached the origin once");
}

fn a_delete_through_the_node_is_seen_at_once(engine: Engine) {
    let (origin, node) = start(engine, "immutable");
    origin.put("object", body(1));
    http::get(node.data(), "/data/object");
    let deleted = http::ask(node.data(), "DELETE", "/data/object", &[], None).expect("an answer");
    assert_eq!(deleted.status, 204);
    assert_eq!(origin.counts().deletes, 1);
    assert_eq!(http::get(node.data(), "/data/object").status, 404);
}

/// A fill that began before a write must not publish after it.
fn a_put_during_a_fill_wins(engine: Engine) {
    let (origin, node) = start(engine, "immutable");
    origin.put("object", body(1));
    origin.fault("object", Fault::PauseAfter(300_000), 1);
    let mut early = Connection::open(node.data()).expect("a connection");
    early.send("GET", "/data/object", &[], None).expect("a request out");
    early.receive_head().expect("a head while the fill is paused");
    let etag = put(node.data(), 2);
    origin.resume();
    drop(early);
    for _ in 0..3 {
        must_be(&http::get(node.data(), "/data/object"), 2, &etag);
    }
}

/// The object changes between two extents of one answer. The second extent is asked for under If-Match, so the
/// answer can only be cut, visibly; the next one is the new version, whole.
fn a_change_during_a_fill_is_cut_or_whole_but_never_mixed(engine: Engine) {
    let (origin, node) = start(engine, "strict");
    let old = origin.put("object", body(1));
    origin.fault("object", Fault::PauseAfter(200_000), 1);
    let mut early = Connection::open(node.data()).expect("a connection");
    early.send("GET", "/data/object", &[], None).expect("a request out");
    let (status, headers) = early.receive_head().expect("a head while the fill is paused");
    assert_eq!(status, 200);
    assert!(headers.contains(&("etag".into(), old)), "{headers:?}");
    let new = origin.put("object", body(2));
    origin.resume();
    if let Ok(whole) = early.take(SIZE) {
        Content::new(1).must_equal(0, SIZE as u64, &whole);
    }
    must_be(&http::get(node.data(), "/data/object"), 2, &new);
}

fn a_purged_object_is_fetched_again(engine: Engine) {
    let room = tempfile::tempdir().expect("a temporary directory");
    let token_file = room.path().join("token");
    let token = "a-token-of-more-than-16-characters";
    std::fs::write(&token_file, token).expect("a token file");
    let origin = Origin::start();
    let node = Node::start(
        &NodeSpec::new(engine)
            .accelerator(format!("data={},freshness=immutable", origin.url()))
            .argument("--admin-token-file")
            .argument(&token_file.display().to_string()),
    );
    origin.put("object", body(1));
    http::get(node.data(), "/data/object");
    let new = origin.put("object", body(2));

    let purge = |headers: &[(&str, &str)]| {
        let question = br#"{"accelerator":"data","key":"object"}"#;
        let mut all = vec![("Content-Type", "application/json")];
        all.extend_from_slice(headers);
        http::ask(node.admin(), "POST", "/v1/purge", &all, Some(question)).expect("an answer")
    };
    let without = purge(&[]);
    assert!(matches!(without.status, 401 | 403), "a purge without the token: {}", without.text());
    assert_eq!(http::get(node.data(), "/data/object").header("x-forebay-cache"), Some("ram"));

    let bearer = format!("Bearer {token}");
    let with = purge(&[("Authorization", &bearer)]);
    assert!((200..300).contains(&with.status), "{} {}", with.status, with.text());
    must_be(&http::get(node.data(), "/data/object"), 2, &new);
}

fn if_none_match_of_the_client_is_answered_by_the_node(engine: Engine) {
    let (origin, node) = start(engine, "immutable");
    let etag = origin.put("object", body(1));
    http::get(node.data(), "/data/object");
    let asked = origin.counts().requests();
    let ask = |name: &str, value: &str| {
        http::ask(node.data(), "GET", "/data/object", &[(name, value)], None).expect("an answer")
    };
    let same = ask("If-None-Match", &etag);
    assert_eq!((same.status, same.header("etag"), same.body.len()), (304, Some(etag.as_str()), 0));
    assert_eq!(ask("If-None-Match", "\"other\"").status, 200);
    assert_eq!(ask("If-Match", &etag).status, 200);
    assert_eq!(ask("If-Match", "\"other\"").status, 412);
    assert_eq!(ask("If-Match", &format!("\"other\", {etag}")).status, 200);
    assert_eq!(origin.counts().requests(), asked, "conditions on what is held need no origin");
}

fn start(engine: Engine, freshness: &str) -> (Origin, Node) {
    let origin = Origin::start();
    let accelerator = format!("data={},freshness={freshness}", origin.url());
    let node = Node::start(&NodeSpec::new(engine).accelerator(accelerator));
    (origin, node)
}

fn body(version: u64) -> Vec<u8> {
    Content::new(version).bytes(0, SIZE)
}

/// PUTs a version through the node and returns the `ETag` that the origin gave it.
fn put(node: SocketAddr, version: u64) -> String {
    let written = http::ask(node, "PUT", "/data/object", &[], Some(&body(version))).expect("an answer");
    assert_eq!(written.status, 200, "{}", written.text());
    written.header("etag").expect("the origin's ETag").to_owned()
}

#[track_caller]
fn must_be(response: &Response, version: u64, etag: &str) {
    assert_eq!((response.status, response.header("etag")), (200, Some(etag)), "version {version}");
    Content::new(version).must_equal(0, SIZE as u64, &response.body);
}
