//! What has no strong `ETag` is never kept, and once that is known, a read of it costs one request to the origin.
//!
//! The first read has to ask what the object is before it can pass it by. What was learnt is forgotten by a write or a
//! purge through the node, and after a minute.

use forebay_tests::http;
use forebay_tests::origin::{Fault, Origin};
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine};

const SIZE: usize = 300_000;

on_each_engine!(only_the_first_read_asks_twice, a_write_through_the_node_makes_it_ask_anew);

fn only_the_first_read_asks_twice(engine: Engine) {
    let (origin, node) = start(engine);
    for (number, fault) in [Fault::NoETag, Fault::WeakETag].into_iter().enumerate() {
        let (key, target) = (format!("loose-{number}"), format!("/data/loose-{number}"));
        origin.put(&key, Content::new(1).bytes(0, SIZE));
        origin.fault(&key, fault.clone(), u32::MAX);
        must_pass(&node, &target, 1);
        let first = origin.counts().requests();
        for read in 1..=5 {
            must_pass(&node, &target, 1);
            assert_eq!(origin.counts().requests(), first + read, "{fault:?}: read {read} behind the first");
        }
        let part = http::get_range(node.data(), &target, 100, 199);
        assert_eq!((part.status, part.tier()), (206, "bypass"));
        Content::new(1).must_equal(100, 100, &part.body);
        assert_eq!(origin.counts().requests(), first + 6, "{fault:?}: a range");
        // It is not kept, so a change behind the node's back is in the very next answer.
        origin.put(&key, Content::new(2).bytes(0, SIZE));
        must_pass(&node, &target, 2);
    }
}

fn a_write_through_the_node_makes_it_ask_anew(engine: Engine) {
    let (origin, node) = start(engine);
    origin.put("loose", Content::new(1).bytes(0, SIZE));
    origin.fault("loose", Fault::NoETag, u32::MAX);
    must_pass(&node, "/data/loose", 1);
    origin.fault("loose", Fault::NoETag, 0);
    let body = Content::new(2).bytes(0, SIZE);
    assert_eq!(
        http::ask(node.data(), "PUT", "/data/loose", &[], Some(&body)).expect("an answer").status,
        200
    );
    for tier in ["miss", "ram"] {
        let response = http::get(node.data(), "/data/loose");
        assert_eq!((response.status, response.tier()), (200, tier));
        Content::new(2).must_equal(0, SIZE as u64, &response.body);
    }
}

fn start(engine: Engine) -> (Origin, Node) {
    let origin = Origin::start();
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(&NodeSpec::new(engine).accelerator(accelerator));
    (origin, node)
}

#[track_caller]
fn must_pass(node: &Node, target: &str, version: u64) {
    let response = http::get(node.data(), target);
    assert_eq!((response.status, response.tier()), (200, "bypass"));
    Content::new(version).must_equal(0, SIZE as u64, &response.body);
}
