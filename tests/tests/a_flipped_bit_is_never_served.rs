//! A drive that returns other bytes than were written is found out before a byte of them leaves.
//!
//! Bits are flipped in the drive file under a running node, over the whole of what it has written. Each read from
//! the drive is then either right or refused by its sum; what is refused is a miss: counted, fetched from the
//! origin, and served right.

use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, http, on_each_engine};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

const OBJECTS: u64 = 96;
const SIZE: usize = 2 << 20;
const FLIP_EVERY: u64 = 48 * 1024;

on_each_engine!(flipped_bits_are_counted_and_fetched_again);

fn flipped_bits_are_counted_and_fetched_again(engine: Engine) {
    let room = tempfile::tempdir().expect("a temporary directory");
    let drive = room.path().join("drive");
    let origin = Origin::start();
    for object in 0..OBJECTS {
        origin.put(&object.to_string(), Content::new(object).bytes(0, SIZE));
    }
    let node = Node::start(
        &NodeSpec::new(engine)
            .memory("64MiB")
            .drive(&drive, "512MiB")
            .accelerator(format!("data={},freshness=immutable", origin.url())),
    );
    fill_until_the_drive_answers(&node);

    flip_bits(&drive);
    let before = origin.counts();
    for object in 0..OBJECTS {
        read(&node, object);
    }
    let sums_failed = node.metric_where("forebay_store_blocks_bad_total", "drive");
    assert!(sums_failed >= 1, "no bad block was counted");
    assert!(origin.counts().bodies > before.bodies, "the origin was not asked for what the drive had lost");
    // And again, now that the good bytes have come back.
    for object in 0..OBJECTS {
        read(&node, object);
    }
}

/// Reads everything until a whole pass is answered without the origin and mostly from the drive.
fn fill_until_the_drive_answers(node: &Node) {
    for _ in 0..20 {
        let from_drive = (0..OBJECTS).filter(|object| read(node, *object) == "drive").count();
        if from_drive as u64 >= OBJECTS / 2 {
            return;
        }
    }
    panic!("after 20 passes over three times the RAM tier, most answers still do not come from the drive");
}

/// The tier that answered; the bytes are checked.
fn read(node: &Node, object: u64) -> String {
    let response = http::get(node.data(), &format!("/data/{object}"));
    assert_eq!(response.status, 200, "{}", response.text());
    Content::new(object).must_equal(0, SIZE as u64, &response.body);
    response.tier().to_owned()
}

/// One bit in every 48 KiB, so that no 64 KiB block is left whole. The first MiB, where the superblocks are, is
/// left alone: a node that no longer knows its drive is another story.
fn flip_bits(drive: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(drive).expect("the drive file");
    let size = file.metadata().expect("its size").len();
    let mut random = fastrand::Rng::with_seed(7);
    let mut place = 1 << 20;
    while place < size {
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).expect("a byte of the drive");
        byte[0] ^= 1 << random.u8(0..8);
        file.write_all_at(&byte, place).expect("a flipped byte");
        place += FLIP_EVERY;
    }
    file.sync_all().expect("the flips on the drive"); // the node reads past the page cache
}
