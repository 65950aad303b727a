//! However many ask at once for what is not there yet, the origin is asked once for each piece.
//!
//! The thundering herd is the first thing a cache in front of object storage meets: a training job starts and
//! every process opens the same file. An 8 MiB object is eight extents, so eight GETs are enough for 256 clients,
//! no HEAD comes first, and nobody's fill depends on the client that happened to start it.

use forebay_tests::http::{self, Connection};
use forebay_tests::origin::{Fault, Origin};
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine, wait};
use std::sync::Barrier;

const SIZE: usize = 8 << 20;
const CLIENTS: usize = 256;
/// Extents of 1 MiB in the object.
const EXTENTS: u64 = 8;

on_each_engine!(
    a_herd_of_256_makes_one_fetch_of_each_extent,
    the_herd_is_served_when_its_first_client_leaves,
    ranges_of_one_extent_share_its_fetch,
    what_was_fetched_is_not_fetched_again,
);

fn a_herd_of_256_makes_one_fetch_of_each_extent(engine: Engine) {
    let (origin, node) = start(engine);
    herd(&node, CLIENTS);
    at_most_one_fetch_of_each_extent(&origin);
}

fn the_herd_is_served_when_its_first_client_leaves(engine: Engine) {
    let (origin, node) = start(engine);
    // The first fetch stops in its middle, so that the first client is certainly inside its body.
    origin.fault("object", Fault::PauseAfter(512 * 1024), 1);
    let mut first = Connection::open(node.data()).expect("a connection");
    first.send("GET", "/data/object", &[], None).expect("a request out");
    let (status, _) = first.receive_head().expect("a head before the body is complete");
    assert_eq!(status, 200);
    first.take(64 * 1024).expect("the beginning of the body");
    drop(first);
    std::thread::scope(|scope| {
        let herd = scope.spawn(|| herd(&node, CLIENTS - 1));
        wait::until("the herd to be connected", || {
            (node.metric("forebay_serve_connections") >= CLIENTS as u64 - 1).then_some(())
        });
        origin.resume();
        herd.join().expect("a herd that is served");
    });
    at_most_one_fetch_of_each_extent(&origin);
}

fn ranges_of_one_extent_share_its_fetch(engine: Engine) {
    let (origin, node) = start(engine);
    let barrier = Barrier::new(64);
    std::thread::scope(|scope| {
        for client in 0..64_u64 {
            let (barrier, node) = (&barrier, &node);
            scope.spawn(move || {
                barrier.wait();
                let first = (3 << 20) + client * 16_000;
                let response = http::get_range(node.data(), "/data/object", first, first + 9_999);
                assert_eq!(response.status, 206, "{}", response.text());
                content().must_equal(first, 10_000, &response.body);
            });
        }
    });
    let counts = origin.counts();
    assert_eq!((counts.bodies, counts.heads), (1, 0), "{counts:?}");
    assert!(counts.body_bytes <= 1 << 20, "more than the one extent was fetched: {counts:?}");
}

fn what_was_fetched_is_not_fetched_again(engine: Engine) {
    let (origin, node) = start(engine);
    assert_eq!(http::get(node.data(), "/data/object").tier(), "miss");
    let bodies = origin.counts().bodies;
    for _ in 0..10 {
        let response = http::get(node.data(), "/data/object");
        assert_eq!(response.tier(), "ram");
        content().must_equal(0, SIZE as u64, &response.body);
    }
    assert_eq!(origin.counts().bodies, bodies);
    assert_eq!(origin.counts().heads, 0);
}

fn start(engine: Engine) -> (Origin, Node) {
    let origin = Origin::start();
    origin.put("object", content().bytes(0, SIZE));
    let node = Node::start(&NodeSpec::new(engine).cores("0,1").accelerator(format!("data={}", origin.url())));
    (origin, node)
}

fn content() -> Content {
    Content::new(0xC01D)
}

/// `clients` at once, each on its own connection, each checking every byte.
fn herd(node: &Node, clients: usize) {
    let barrier = Barrier::new(clients);
    let truth = content().bytes(0, SIZE);
    std::thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                let mut connection = Connection::open(node.data()).expect("a connection");
                barrier.wait();
                connection.send("GET", "/data/object", &[], None).expect("a request out");
                let response = connection.receive("GET").expect("a whole answer");
                assert_eq!(response.status, 200, "{}", response.text());
                assert!(
                    response.body == truth,
                    "wrong bytes; first at {:?}",
                    content().first_wrong_byte(0, &response.body)
                );
            });
        }
    });
}

#[track_caller]
fn at_most_one_fetch_of_each_extent(origin: &Origin) {
    let counts = origin.counts();
    assert!(counts.bodies <= EXTENTS, "{counts:?}");
    assert_eq!(counts.heads, 0, "{counts:?}");
}
