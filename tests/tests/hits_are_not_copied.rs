//! The bytes of a hit go from the cache to the socket without a copy in user space.
//!
//! Every copy of body bytes in the node goes through counted functions, so "no copy" is a number that can be
//! asked for: over ten thousand hits of every shape it stays zero, while the bytes sent are all there.

use forebay_tests::http::Connection;
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, http, on_each_engine};

const HITS: u64 = 10_000;
const OBJECTS: u64 = 50;
const SIZE: u64 = 100_000;

on_each_engine!(ten_thousand_hits_copy_nothing);

fn ten_thousand_hits_copy_nothing(engine: Engine) {
    let origin = Origin::start();
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(&NodeSpec::new(engine).accelerator(accelerator));
    for object in 0..OBJECTS {
        origin.put(&object.to_string(), Content::new(object).bytes(0, SIZE as usize));
        http::get(node.data(), &format!("/data/{object}"));
    }
    let copied = || node.metric("forebay_serve_hit_copied_bytes_total");
    let sent = || node.metric("forebay_serve_sent_bytes_total");
    let by_reference = || node.metric("forebay_serve_sent_by_reference_bytes_total");
    let (copied_before, sent_before, asked_before) = (copied(), sent(), origin.counts().requests());

    let mut connection = Connection::open(node.data()).expect("a connection");
    let mut random = fastrand::Rng::with_seed(3);
    let mut received = 0;
    for hit in 0..HITS {
        let object = random.u64(0..OBJECTS);
        let (first, last) = if hit % 2 == 0 {
            (0, SIZE - 1)
        } else {
            let first = random.u64(0..SIZE);
            (first, random.u64(first..SIZE))
        };
        let range = format!("bytes={first}-{last}");
        connection
            .send("GET", &format!("/data/{object}"), &[("Range", &range)], None)
            .expect("a request out");
        let response = connection.receive("GET").expect("an answer");
        assert_eq!((response.status, response.tier()), (206, "ram"));
        Content::new(object).must_equal(first, last + 1 - first, &response.body);
        received += response.body.len() as u64;
    }
    assert_eq!(copied() - copied_before, 0, "body bytes of hits were copied");
    assert!(sent() - sent_before > received, "the counter of sent bytes lags behind what was received");
    // The kernel copies the first two answers of each object, and none of a hot one that is large enough.
    assert!(by_reference() > received / 2, "{} of {received} left by reference", by_reference());
    assert_eq!(origin.counts().requests(), asked_before);
}
