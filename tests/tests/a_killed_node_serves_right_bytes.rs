//! kill -9 at any moment, start again on the same drive file: right bytes, whatever was kept.
//!
//! A writer that dies leaves half-written segments, index pages that name blocks which never arrived, and
//! blocks that no index names. None of it may ever be served. What survives is the node's affair and not asked
//! for here; between two rounds an object is even replaced, so that what the drive remembers is stale.

use forebay_tests::http::Connection;
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, http, on_each_engine};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const ROUNDS: u64 = 10;
const OBJECTS: u64 = 12;
const SIZE: usize = (3 << 20) + 12_345;

on_each_engine!(ten_kills_under_load_leave_no_wrong_byte);

fn ten_kills_under_load_leave_no_wrong_byte(engine: Engine) {
    let room = tempfile::tempdir().expect("a temporary directory");
    let origin = Origin::start();
    let mut seeds: Vec<u64> = (0..OBJECTS).collect();
    for (object, seed) in seeds.iter().enumerate() {
        origin.put(&object.to_string(), Content::new(*seed).bytes(0, SIZE));
    }
    let mut random = fastrand::Rng::with_seed(0x9119);
    // Small RAM, small drive: segments are reclaimed while we kill.
    let spec = NodeSpec::new(engine)
        .memory("64MiB")
        .drive(&room.path().join("drive"), "256MiB")
        .accelerator(format!("data={}", origin.url()));
    let mut node = Node::start(&spec);
    for round in 0..ROUNDS {
        read_under_load_until_killed(node, &seeds, 200 + random.u64(0..400));
        let replaced = random.usize(0..seeds.len());
        seeds[replaced] = 1000 + round;
        origin.put(&replaced.to_string(), Content::new(seeds[replaced]).bytes(0, SIZE));
        node = Node::start(&spec);
        for (object, seed) in seeds.iter().enumerate() {
            let response = http::get(node.data(), &format!("/data/{object}"));
            assert_eq!(response.status, 200, "round {round}, object {object}: {}", response.text());
            Content::new(*seed).must_equal(0, SIZE as u64, &response.body);
        }
    }
}

/// Four readers of random ranges; the node is killed when `kill_after` answers have been checked.
fn read_under_load_until_killed(node: Node, seeds: &[u64], kill_after: u64) {
    let answers = AtomicU64::new(0);
    let killed = AtomicBool::new(false);
    let address = node.data();
    std::thread::scope(|scope| {
        for reader in 0..4 {
            let (answers, killed) = (&answers, &killed);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(reader);
                let mut connection = Connection::open(address).expect("a connection");
                loop {
                    let object = random.usize(0..seeds.len());
                    let first = random.usize(0..SIZE);
                    let last = (first + random.usize(0..400_000)).min(SIZE - 1);
                    let range = format!("bytes={first}-{last}");
                    let sent = connection.send("GET", &format!("/data/{object}"), &[("Range", &range)], None);
                    let Ok(response) = sent.and_then(|()| connection.receive("GET")) else {
                        assert!(killed.load(Ordering::SeqCst), "an answer broke before the kill");
                        return;
                    };
                    assert_eq!(response.status, 206, "{}", response.text());
                    let length = (last + 1 - first) as u64;
                    Content::new(seeds[object]).must_equal(first as u64, length, &response.body);
                    answers.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        forebay_tests::wait::until("enough answers to kill the node among", || {
            (answers.load(Ordering::SeqCst) >= kill_after).then_some(())
        });
        killed.store(true, Ordering::SeqCst);
        node.kill();
    });
}
