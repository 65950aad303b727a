//! Many workers: each has its share of the connections, whoever asks whom for what.
//!
//! A connection stays with its worker for life, so where it is put at first decides for how long a core is busy while
//! others are not. And with more workers than cores every hand-over between threads happens in orders that two workers
//! alone hardly make: what is right with one has to be right with eight.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_tests::http::{self, Connection};
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine, wait};
use serde_json::Value;

const WORKERS: usize = 8;
const CONNECTIONS: usize = 32;
/// Four each would be even; a worker may have one more than the fewest before it hands on.
const SHARE_MAX: u64 = 6;

on_each_engine!(connections_are_shared_out, eight_workers_serve_what_one_would);

/// Eight workers on the first two cores that this process may use.
fn cores() -> String {
    let allowed = std::fs::read_to_string("/proc/self/status").expect("it runs");
    let list = allowed.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("a list");
    let mut cores = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cores.extend(first.parse::<usize>().expect("a core")..=last.parse().expect("a core"));
    }
    cores.truncate(2);
    let chosen = cores.iter().cycle().take(WORKERS).map(ToString::to_string);
    chosen.collect::<Vec<_>>().join(",")
}

fn shares(node: &Node) -> Vec<u64> {
    let status: Value = serde_json::from_slice(&http::get(node.admin(), "/v1/status").body).expect("JSON");
    let workers = status["workers"].as_array().expect("workers");
    workers.iter().map(|worker| worker["connections"].as_u64().expect("a number")).collect()
}

fn connections_are_shared_out(engine: Engine) {
    let origin = Origin::start();
    let content = Content::new(1);
    origin.put("object", content.bytes(0, 100_000));
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(&NodeSpec::new(engine).accelerator(accelerator).cores(&cores()));
    let mut open: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let mut connection = Connection::open(node.data()).expect("a connection");
            connection.send("GET", "/data/object", &[], None).expect("a request out");
            content.must_equal(0, 100_000, &connection.receive("GET").expect("an answer").body);
            connection
        })
        .collect();
    let held = shares(&node);
    assert_eq!((held.len(), held.iter().sum::<u64>()), (WORKERS, CONNECTIONS as u64), "{held:?}");
    assert!(held.iter().all(|share| *share <= SHARE_MAX), "{held:?}");
    // Whoever ends makes room on its worker.
    open.truncate(CONNECTIONS / 2);
    wait::until("half have ended", || {
        (shares(&node).iter().sum::<u64>() == CONNECTIONS as u64 / 2).then_some(())
    });
}

fn eight_workers_serve_what_one_would(engine: Engine) {
    const OBJECTS: u64 = 24;
    const SIZE: u64 = 2_500_000;
    const READS: u64 = 40;
    let folder = tempfile::tempdir().expect("a folder");
    let origin = Origin::start();
    for object in 0..OBJECTS {
        origin.put(&object.to_string(), Content::new(object).bytes(0, SIZE as usize));
    }
    let accelerator = format!("data={},freshness=immutable", origin.url());
    // Half of what there is fits into memory, so that pieces come from everywhere.
    let spec = NodeSpec::new(engine).accelerator(accelerator).memory("88MiB").cores(&cores());
    let node = Node::start(&spec.drive(&folder.path().join("drive"), "512MiB"));
    let received = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client in 0..CONNECTIONS as u64 {
            let (node, received) = (&node, &received);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(client);
                let mut connection = Connection::open(node.data()).expect("a connection");
                for _ in 0..READS {
                    let object = random.u64(0..OBJECTS);
                    let first = random.u64(0..SIZE);
                    let last = random.u64(first..SIZE.min(first + 1_500_000));
                    let range = format!("bytes={first}-{last}");
                    let path = format!("/data/{object}");
                    connection.send("GET", &path, &[("Range", &range)], None).expect("a request out");
                    let response = connection.receive("GET").expect("an answer");
                    assert_eq!(response.status, 206);
                    Content::new(object).must_equal(first, last + 1 - first, &response.body);
                    received.fetch_add(response.body.len() as u64, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(node.metric("forebay_serve_sent_bytes_total") > received.into_inner(), "all of it was counted");
    assert_eq!(node.metric("forebay_store_blocks_bad_total"), 0);
}
