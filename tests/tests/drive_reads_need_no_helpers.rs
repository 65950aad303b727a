//! Reads from a drive complete in the ring, and the kernel's helper threads (io-wq) stay away.
//!
//! What io_uring cannot do without waiting it hands to threads of its own. A read that takes that way costs a wake-up of
//! another thread and was seen to take ten times as long; it happens when somebody holds the file's lock, which is why no file
//! that is read is ever extended. In steady state there is not one such thread.

use std::path::Path;

use forebay_tests::http;
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, wait};

const SIZE: u64 = 1 << 20;
const OBJECTS: u64 = 80;

/// Helper threads of rings in the node.
fn helpers(node: &Node) -> Vec<String> {
    let threads = std::fs::read_dir(Path::new("/proc").join(node.id().to_string()).join("task"));
    let names = threads
        .expect("it runs")
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.starts_with("iou-wrk")).collect()
}

#[test]
fn a_thousand_reads_from_a_drive_start_no_helper_thread() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin = Origin::start();
    for object in 0..OBJECTS {
        origin.put(&object.to_string(), Content::new(object).bytes(0, SIZE as usize));
    }
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let spec = NodeSpec::new(Engine::Uring).accelerator(accelerator).memory("48MiB");
    let node = Node::start(&spec.drive(&folder.path().join("drive"), "512MiB"));
    let read = |object: u64, first: u64, last: u64| {
        let response = http::get_range(node.data(), &format!("/data/{object}"), first, last);
        Content::new(object).must_equal(first, last + 1 - first, &response.body);
    };
    for object in 0..OBJECTS {
        read(object, 0, SIZE - 1);
    }
    let written = || node.metric("forebay_store_written_bytes_total");
    // What found a full queue stays in memory.
    let refused = || node.metric("forebay_store_writes_refused_total") * SIZE;
    wait::until("what was taken is on the drive", || (written() + refused() >= OBJECTS * SIZE).then_some(()));
    // A writer may need them, and they stay for some seconds.
    wait::until("the writers' helpers have gone", || helpers(&node).is_empty().then_some(()));
    let (before, written_before) = (node.metric("forebay_store_reads_total"), written());
    let mut random = fastrand::Rng::with_seed(7);
    let mut reads = 0;
    while reads < 1000 {
        for _ in 0..50 {
            let first = random.u64(0..SIZE - 100_000);
            read(random.u64(0..OBJECTS), first, first + 99_999);
        }
        let seen = helpers(&node);
        assert!(seen.is_empty(), "after {reads} reads: {seen:?}");
        reads = node.metric("forebay_store_reads_total") - before;
    }
    assert_eq!(written(), written_before, "nothing was written meanwhile");
}
