//! What the origin sends is checked before it is believed.
//!
//! Stores and the proxies in front of them have cut bodies, ignored ranges, answered other ranges than asked,
//! and put error pages where bytes belong. For every such answer there are two right outcomes: right bytes,
//! got by asking again, or a visible failure. And when the origin is well again, nothing of it is remembered.

use forebay_tests::http::{self, Response};
use forebay_tests::origin::{Fault, Origin};
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine, wait};

/// Three extents, the last of them short.
const SIZE: usize = (2 << 20) + 345_678;

on_each_engine!(
    a_cut_body_is_resumed,
    an_endlessly_cut_body_is_cut_visibly,
    lies_about_ranges_are_never_served,
    a_lie_about_the_size_is_forgotten,
    an_ignored_range_is_never_taken_for_the_range,
    without_a_strong_etag_nothing_is_kept,
    errors_are_relayed_and_not_kept,
    a_stumble_is_got_over,
);

/// B098: what is cut upstream is asked for again from where it ended, and the client does not notice.
fn a_cut_body_is_resumed(engine: Engine) {
    let (origin, node) = start(engine);
    for after in [0, 1, 65_536, 700_001] {
        let key = format!("cut-{after}");
        let target = format!("/data/{key}");
        origin.put(&key, content().bytes(0, SIZE));
        origin.fault(&key, Fault::CutAfter(after), 1);
        must_be_whole(&http::get(node.data(), &target));
        assert_eq!(origin.faults_left(&key), 0, "the fault did not strike");
        let again = http::get(node.data(), &target);
        must_be_whole(&again);
        assert_eq!(again.tier(), "ram");
    }
}

fn an_endlessly_cut_body_is_cut_visibly(engine: Engine) {
    let (origin, node) = start(engine);
    origin.put("object", content().bytes(0, SIZE));
    origin.fault("object", Fault::CutAfter(10_000), u32::MAX);
    // The head may have left before the origin failed; then the body must end early, on a closed connection.
    match http::ask(node.data(), "GET", "/data/object", &[], None) {
        Err(_) => {}
        Ok(response) => {
            assert!(response.status >= 500, "a body that never came was served: {}", response.status);
        }
    }
    heal_and_check(&origin, &node, "object");
}

/// B061, B062: start, end, total and status of every answer are compared with what was asked.
fn lies_about_ranges_are_never_served(engine: Engine) {
    let (origin, node) = start(engine);
    let lies = [
        Fault::ShiftRange(4096),
        Fault::ShiftRange(1),
        Fault::ShortRange(1000),
        Fault::ShortRange(0),
        Fault::NoContentRange,
        Fault::RangeUnder200,
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let key = format!("lie-{number}");
        let target = format!("/data/{key}");
        origin.put(&key, content().bytes(0, SIZE));
        origin.fault(&key, lie.clone(), u32::MAX);
        right_or_failed(&lie, http::ask(node.data(), "GET", &target, &[], None), 0, SIZE);
        let ask = http::ask(node.data(), "GET", &target, &[("Range", "bytes=1500000-1500999")], None);
        right_or_failed(&lie, ask, 1_500_000, 1000);
        heal_and_check(&origin, &node, &key);
    }
}

/// A total that is too large cannot be known for a lie at first; asking for what lies past the end reveals it.
fn a_lie_about_the_size_is_forgotten(engine: Engine) {
    let (origin, node) = start(engine);
    origin.put("object", content().bytes(0, SIZE));
    origin.fault("object", Fault::WrongTotal(1 << 20), 1);
    let answer = http::ask(node.data(), "GET", "/data/object", &[], None);
    right_or_failed(&Fault::WrongTotal(1 << 20), answer, 0, SIZE);
    wait::until("the true size", || {
        let answer = http::ask(node.data(), "GET", "/data/object", &[], None);
        answer.ok().filter(|response| response.status == 200).map(|response| must_be_whole(&response))
    });
}

/// B060: 200 with the whole object to a ranged GET.
fn an_ignored_range_is_never_taken_for_the_range(engine: Engine) {
    let (origin, node) = start(engine);
    origin.put("object", content().bytes(0, SIZE));
    origin.fault("object", Fault::IgnoreRange, u32::MAX);
    for (first, length) in [(1_500_000, 1000), (0, 10), (SIZE - 5, 5)] {
        let range = format!("bytes={first}-{}", first + length - 1);
        let ask = http::ask(node.data(), "GET", "/data/object", &[("Range", &range)], None);
        right_or_failed(&Fault::IgnoreRange, ask, first as u64, length);
    }
    right_or_failed(&Fault::IgnoreRange, http::ask(node.data(), "GET", "/data/object", &[], None), 0, SIZE);
    heal_and_check(&origin, &node, "object");
}

/// B014: without a strong validator two versions cannot be told apart, so nothing is kept.
fn without_a_strong_etag_nothing_is_kept(engine: Engine) {
    let (origin, node) = start(engine);
    for (number, fault) in [Fault::NoETag, Fault::WeakETag].into_iter().enumerate() {
        let key = format!("validator-{number}");
        let target = format!("/data/{key}");
        origin.put(&key, content().bytes(0, SIZE));
        origin.fault(&key, fault.clone(), u32::MAX);
        for _ in 0..3 {
            let before = origin.counts().gets;
            let response = http::get(node.data(), &target);
            must_be_whole(&response);
            assert!(origin.counts().gets > before, "{fault:?}: an answer that had no strong ETag was kept");
            assert_eq!(response.tier(), "bypass", "{fault:?}");
        }
        let response = http::get_range(node.data(), &target, 100, 199);
        assert_eq!(response.status, 206, "{fault:?}");
        content().must_equal(100, 100, &response.body);
    }
}

/// B099: the XML of an error is an answer, never the object.
fn errors_are_relayed_and_not_kept(engine: Engine) {
    let (origin, node) = start(engine);
    let missing = http::get(node.data(), "/data/object");
    assert_eq!(missing.status, 404);
    assert!(missing.text().contains("NoSuchKey"), "{}", missing.text());
    origin.put("object", content().bytes(0, SIZE));
    must_be_whole(&http::get(node.data(), "/data/object"));

    origin.put("denied", content().bytes(0, SIZE));
    origin.fault("denied", Fault::Status(403), 1);
    let denied = http::get(node.data(), "/data/denied");
    assert_eq!(denied.status, 403);
    assert!(denied.text().contains("OnOrder"), "{}", denied.text());
    must_be_whole(&http::get(node.data(), "/data/denied"));
}

fn a_stumble_is_got_over(engine: Engine) {
    let (origin, node) = start(engine);
    for (number, fault) in [Fault::Status(503), Fault::Status(500), Fault::HangUp].into_iter().enumerate() {
        let key = format!("stumble-{number}");
        origin.put(&key, content().bytes(0, SIZE));
        origin.fault(&key, fault.clone(), 1);
        right_or_failed(&fault, http::ask(node.data(), "GET", &format!("/data/{key}"), &[], None), 0, SIZE);
        heal_and_check(&origin, &node, &key);
    }
}

fn start(engine: Engine) -> (Origin, Node) {
    let origin = Origin::start();
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(&NodeSpec::new(engine).accelerator(accelerator));
    (origin, node)
}

fn content() -> Content {
    Content::new(0xBAD)
}

#[track_caller]
fn must_be_whole(response: &Response) {
    assert_eq!(response.status, 200, "{}", response.text());
    content().must_equal(0, SIZE as u64, &response.body);
}

/// A complete answer must be right; a failure must be visible: a status of 500 and more, or a cut body.
#[track_caller]
fn right_or_failed(fault: &Fault, answer: std::io::Result<Response>, first: u64, length: usize) {
    let Ok(response) = answer else { return };
    match response.status {
        200 | 206 => {
            assert_eq!(response.body.len(), length, "{fault:?}");
            assert_eq!(content().first_wrong_byte(first, &response.body), None, "{fault:?}");
        }
        status => assert!(status >= 500, "{fault:?} became status {status}: {}", response.text()),
    }
}

/// The origin is well again: at once right, and right again from what was kept.
#[track_caller]
fn heal_and_check(origin: &Origin, node: &Node, key: &str) {
    origin.fault(key, Fault::HangUp, 0);
    for _ in 0..2 {
        must_be_whole(&http::get(node.data(), &format!("/data/{key}")));
    }
}
