//! What a slow client was lent stays what it was, whatever becomes of the memory afterwards.
//!
//! Hot bytes leave by reference: they lie in the node's memory until the client has read them, long after the node
//! has forgotten the object. Were that memory used again in place, the client would get another object's bytes, all
//! of them and with the right length. So clients here ask for hot objects and do not read, the node is made to throw
//! everything out several times, and then they read.

use forebay_tests::http::{self, Connection};
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine};

const SIZE: u64 = 1 << 20;
const HOT: u64 = 8;
const CLIENTS_EACH: u64 = 3;
/// Several times what the memory holds.
const COLD: u64 = 120;

on_each_engine!(slow_readers_of_hot_objects_get_them);

fn slow_readers_of_hot_objects_get_them(engine: Engine) {
    let origin = Origin::start();
    for object in 0..HOT + COLD {
        origin.put(&object.to_string(), Content::new(object).bytes(0, SIZE as usize));
    }
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(
        &NodeSpec::new(engine).accelerator(accelerator).memory("48MiB").argument("--send-stall=10m"),
    );
    let read = |object: u64| {
        let response = http::get(node.data(), &format!("/data/{object}"));
        assert_eq!(response.status, 200);
        Content::new(object).must_equal(0, SIZE, &response.body);
    };
    for object in (0..HOT).cycle().take(5 * HOT as usize) {
        read(object);
    }
    let by_reference = node.metric("forebay_serve_sent_by_reference_bytes_total");
    assert!(by_reference > 0, "hot objects leave by reference");
    let mut slow: Vec<_> = (0..HOT * CLIENTS_EACH)
        .map(|client| {
            let mut connection = Connection::open(node.data()).expect("a connection");
            connection.send("GET", &format!("/data/{}", client % HOT), &[], None).expect("a request out");
            (client % HOT, connection)
        })
        .collect();
    for _ in 0..3 {
        // Each in its turn becomes hot, is lent, and has to make room.
        for object in HOT..HOT + COLD {
            for _ in 0..4 {
                read(object);
            }
        }
    }
    for (object, connection) in &mut slow {
        let response = connection.receive("GET").expect("an answer");
        assert_eq!(response.status, 200);
        Content::new(*object).must_equal(0, SIZE, &response.body);
    }
    assert!(node.metric("forebay_arena_renewed_pages_total") > 3, "pages that were lent were renewed");
    assert!(node.metric("forebay_serve_sent_by_reference_bytes_total") > by_reference);
}
