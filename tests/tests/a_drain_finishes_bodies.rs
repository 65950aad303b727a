//! SIGTERM breaks no body: what has begun is finished, and then the node ends by itself, with success.
//!
//! A rolling restart happens under load and is noticed by nobody, except that a connection ends between two
//! answers, which every HTTP client expects.

use forebay_tests::http::Connection;
use forebay_tests::origin::{Fault, Origin};
use forebay_tests::{Content, Engine, Node, NodeSpec, http, on_each_engine, wait};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};

const SIZE: u64 = 5 << 20;

on_each_engine!(
    a_drain_under_load_breaks_no_body,
    a_slow_reader_gets_all_of_its_body,
    a_miss_under_way_is_finished,
    an_idle_node_ends_at_once,
);

fn a_drain_under_load_breaks_no_body(engine: Engine) {
    let (_origin, node) = start(engine);
    let answers = AtomicU64::new(0);
    let address = node.data();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..16)
            .map(|_| {
                scope.spawn(|| {
                    let mut connection = Connection::open(address).expect("a connection");
                    loop {
                        // The connection may end between two answers, and a request that is going out then is lost.
                        if connection.send("GET", "/data/object", &[], None).is_err() {
                            return;
                        }
                        let response = match connection.receive("GET") {
                            Ok(response) => response,
                            Err(error) => {
                                assert_eq!(
                                    error.kind(),
                                    ErrorKind::NotConnected,
                                    "a body was broken: {error}"
                                );
                                return;
                            }
                        };
                        assert_eq!(response.status, 200, "{}", response.text());
                        content().must_equal(0, SIZE, &response.body);
                        answers.fetch_add(1, Ordering::SeqCst);
                        if response.header("connection") == Some("close") {
                            return;
                        }
                    }
                })
            })
            .collect();
        wait::until("answers to all", || (answers.load(Ordering::SeqCst) >= 64).then_some(()));
        node.terminate();
        for reader in readers {
            reader.join().expect("a reader without a complaint");
        }
    });
    assert!(node.wait().success());
}

fn a_slow_reader_gets_all_of_its_body(engine: Engine) {
    let (_origin, node) = start(engine);
    let mut connection = Connection::open(node.data()).expect("a connection");
    connection.send("GET", "/data/object", &[], None).expect("a request out");
    connection.receive_head().expect("a head");
    let mut body = connection.take(100_000).expect("the beginning");
    node.terminate();
    wait::until("the drain to begin", || {
        let ready = http::ask(node.admin(), "GET", "/readyz", &[], None);
        ready.map_or(Some(()), |response| (response.status != 200).then_some(()))
    });
    body.extend(connection.take(SIZE as usize - 100_000).expect("the rest, though the node is draining"));
    content().must_equal(0, SIZE, &body);
    assert!(node.wait().success());
}

fn a_miss_under_way_is_finished(engine: Engine) {
    let (origin, node) = start(engine);
    origin.put("cold", content().bytes(0, SIZE as usize));
    origin.fault("cold", Fault::PauseAfter(200_000), 1);
    let mut connection = Connection::open(node.data()).expect("a connection");
    connection.send("GET", "/data/cold", &[], None).expect("a request out");
    connection.receive_head().expect("a head while the origin pauses");
    node.terminate();
    wait::until("the drain to begin", || {
        let ready = http::ask(node.admin(), "GET", "/readyz", &[], None);
        ready.map_or(Some(()), |response| (response.status != 200).then_some(()))
    });
    origin.resume();
    content().must_equal(0, SIZE, &connection.take(SIZE as usize).expect("the whole body"));
    assert!(node.wait().success());
}

fn an_idle_node_ends_at_once(engine: Engine) {
    let (_origin, node) = start(engine);
    let _idle: Vec<_> = (0..10).map(|_| Connection::open(node.data()).expect("a connection")).collect();
    node.terminate();
    assert!(node.wait().success());
}

fn start(engine: Engine) -> (Origin, Node) {
    let origin = Origin::start();
    origin.put("object", content().bytes(0, SIZE as usize));
    let node =
        Node::start(&NodeSpec::new(engine).accelerator(format!("data={},freshness=immutable", origin.url())));
    content().must_equal(0, SIZE, &http::get(node.data(), "/data/object").body);
    (origin, node)
}

fn content() -> Content {
    Content::new(0xD4A1)
}
