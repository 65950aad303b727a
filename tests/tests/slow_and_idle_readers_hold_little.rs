//! What readers who are slow, asleep or idle keep of the node is bounded by limits that have a name.
//!
//! A training cluster opens thousands of connections and reads from few of them; a data loader stops in the middle of an
//! object because its queue is full. None of them may hold memory that others need: between two of its own reads a client
//! holds an offset, the socket holds `send_queue_bytes_per_connection_max`, and the heap of all connections together
//! `connections_heap_bytes_max`.

use std::collections::HashMap;

use forebay_tests::http::{self, Connection};
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine, wait};

const MIB: u64 = 1 << 20;
/// As `check-config` shows them for these nodes.
const HEAP_PER_CONNECTION: u64 = 48 << 10;
const SEND_QUEUE: u64 = MIB;
/// The kernel looks at the bound when it begins a segment, of at most 64 KiB and, on loopback, a header's worth more.
const SEGMENT: u64 = 2 * (64 << 10);

on_each_engine!(
    slow_readers_of_a_hot_object_hold_offsets,
    slow_readers_of_a_drive_hold_offsets_and_read_little_ahead,
    idle_connections_hold_little,
    a_reader_who_sleeps_holds_nothing_and_gets_its_bytes,
);

/// Anonymous memory of the node: its heap, for its arena is a file in memory.
fn heap_bytes(node: &Node) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel says");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// Bytes in the send queues of the node's connections, by their clients: sent and not acknowledged, or not sent. The kernel
/// may show a row twice, or not, while others open and close connections.
fn send_queues(node: &Node) -> HashMap<String, u64> {
    let local = format!(":{:04X}", node.data().port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("a table of connections");
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let ours = rows.filter(|row| row[1].ends_with(&local) && row[3] == "01");
    let queue =
        |row: &[&str]| u64::from_str_radix(row[4].split(':').next().expect("a pair"), 16).expect("a number");
    ours.map(|row| (row[2].to_owned(), queue(&row))).collect()
}

/// Bytes of memory that answers under way hold.
fn held(node: &Node) -> u64 {
    let used = |reserve| node.metric_where("forebay_arena_reserve_used_bytes", &format!("\"{reserve}\""));
    used("reads") + used("fills") + node.metric("forebay_serve_zero_copy_bytes")
}

fn more_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    setrlimit(Resource::Nofile, raised).expect("up to the hard limit");
}

fn slow_readers_of_a_hot_object_hold_offsets(engine: Engine) {
    const READERS: u64 = 256;
    const SIZE: u64 = 100_000_000;
    const STEP: u64 = 64 << 10;
    more_files();
    let origin = Origin::start();
    let content = Content::new(1);
    origin.put("large", content.bytes(0, SIZE as usize));
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(
        &NodeSpec::new(engine).accelerator(accelerator).memory("192MiB").argument("--send-stall=10m"),
    );
    for _ in 0..4 {
        assert_eq!(http::get(node.data(), "/data/large").body.len() as u64, SIZE);
    }
    let before = heap_bytes(&node);
    let mut readers: Vec<_> = (0..READERS)
        .map(|_| {
            let mut connection = Connection::open(node.data()).expect("a connection");
            connection.send("GET", "/data/large", &[], None).expect("a request out");
            assert_eq!(connection.receive_head().expect("an answer").0, 200);
            connection
        })
        .collect();
    for round in 0..4 {
        let start = round * STEP;
        let expected = content.bytes(start, STEP as usize);
        for reader in &mut readers {
            assert!(reader.take(STEP as usize).expect("bytes") == expected, "at {start}");
        }
        let queues = wait::until("each is served", || {
            Some(send_queues(&node)).filter(|queues| queues.len() as u64 == READERS)
        });
        let longest = queues.into_values().max().expect("some");
        assert!(longest <= SEND_QUEUE + SEGMENT, "{longest} bytes in one send queue");
        let heap = heap_bytes(&node).saturating_sub(before);
        assert!(heap <= (READERS + 1) * HEAP_PER_CONNECTION, "{heap} bytes of heap for {READERS} readers");
    }
    // Who does not move is not waited for with memory in hand.
    wait::until("nobody holds memory", || (held(&node) == 0).then_some(()));
    let fast = http::get_range(node.data(), "/data/large", SIZE - 1000, SIZE - 1);
    content.must_equal(SIZE - 1000, 1000, &fast.body);
    drop(readers);
}

/// Of a drive a stream asks for what comes next before it is needed. For a reader who keeps pausing that would be read again
/// and again, and held while it pauses.
fn slow_readers_of_a_drive_hold_offsets_and_read_little_ahead(engine: Engine) {
    const READERS: u64 = 24;
    const SIZE: u64 = 96 * MIB;
    const STEPS: u64 = 4;
    more_files();
    let folder = tempfile::tempdir().expect("a folder");
    let origin = Origin::start();
    let content = Content::new(5);
    origin.put("large", content.bytes(0, SIZE as usize));
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let spec = NodeSpec::new(engine).accelerator(accelerator).memory("64MiB").argument("--send-stall=10m");
    let node = Node::start(&spec.drive(&folder.path().join("drive"), "512MiB"));
    // Until nothing of it is at the origin alone.
    wait::until("all of it is here", || {
        let before = origin.counts().requests();
        assert_eq!(http::get(node.data(), "/data/large").body.len() as u64, SIZE);
        (origin.counts().requests() == before).then_some(())
    });
    let read_before = node.metric("forebay_store_read_bytes_total");
    let ask = |number: u64| {
        let start = number * MIB;
        let mut connection = Connection::open(node.data()).expect("a connection");
        let range = format!("bytes={start}-{}", start + 64 * MIB - 1);
        connection.send("GET", "/data/large", &[("Range", &range)], None).expect("a request out");
        assert_eq!(connection.receive_head().expect("an answer").0, 206);
        connection
    };
    let mut readers: Vec<_> = (0..READERS).map(ask).collect();
    let reserve = node.metric_where("forebay_arena_reserve_bytes", "\"reads\"");
    for step in 0..STEPS {
        for (number, reader) in (0..).zip(&mut readers) {
            let start = number * MIB + step * MIB;
            content.must_equal(start, MIB, &reader.take(MIB as usize).expect("bytes"));
            let used = node.metric_where("forebay_arena_reserve_used_bytes", "\"reads\"");
            assert!(used <= reserve, "{used} bytes of a reserve of {reserve}");
        }
        wait::until("nobody holds memory", || (held(&node) == 0).then_some(()));
    }
    let read = node.metric("forebay_store_read_bytes_total") - read_before;
    let taken = READERS * STEPS * MIB;
    // What is in the socket's two queues has been read too, and what was on its way when a reader paused is read anew.
    assert!(read <= 2 * taken, "{read} bytes read for {taken}");
    content.must_equal(0, SIZE, &http::get(node.data(), "/data/large").body);
    for (number, mut reader) in (0..).zip(readers).take(4) {
        let start = (number + STEPS) * MIB;
        let left = (64 - STEPS) * MIB;
        content.must_equal(start, left, &reader.take(left as usize).expect("bytes"));
    }
}

fn idle_connections_hold_little(engine: Engine) {
    const CONNECTIONS: u64 = 2000;
    more_files();
    let origin = Origin::start();
    let content = Content::new(2);
    origin.put("small", content.bytes(0, 100_000));
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(&NodeSpec::new(engine).accelerator(accelerator));
    http::get(node.data(), "/data/small");
    let before = heap_bytes(&node);
    let mut idle = Vec::new();
    for number in 0..CONNECTIONS {
        let mut connection = Connection::open(node.data()).expect("a connection");
        if number % 2 == 0 {
            connection.send("GET", "/data/small", &[], None).expect("a request out");
            content.must_equal(0, 100_000, &connection.receive("GET").expect("an answer").body);
        }
        idle.push(connection);
    }
    wait::until("all are there", || (node.metric("forebay_serve_connections") >= CONNECTIONS).then_some(()));
    let heap = heap_bytes(&node).saturating_sub(before);
    assert!(heap <= (CONNECTIONS + 1) * HEAP_PER_CONNECTION, "{heap} bytes of heap for {CONNECTIONS}");
    wait::until("nobody holds memory", || (held(&node) == 0).then_some(()));
    let last = idle.last_mut().expect("some");
    last.send("GET", "/data/small", &[], None).expect("a request out");
    content.must_equal(0, 100_000, &last.receive("GET").expect("an answer").body);
}

fn a_reader_who_sleeps_holds_nothing_and_gets_its_bytes(engine: Engine) {
    // By hand with 2048: the object of 2 GiB that is read in the middle of the night.
    let size = std::env::var("FOREBAY_SLEEPER_MIB").map_or(32, |text| text.parse().expect("MiB")) * MIB;
    const OTHERS: u64 = 96;
    let origin = Origin::start();
    let (asleep, other) = (Content::new(3), Content::new(4));
    origin.put("asleep", asleep.bytes(0, size as usize));
    for number in 0..OTHERS {
        origin.put(&format!("other-{number}"), other.bytes(number, MIB as usize));
    }
    let accelerator = format!("data={},freshness=immutable", origin.url());
    let node = Node::start(
        &NodeSpec::new(engine).accelerator(accelerator).memory("64MiB").argument("--send-stall=10m"),
    );
    let mut sleeper = Connection::open(node.data()).expect("a connection");
    sleeper.send("GET", "/data/asleep", &[], None).expect("a request out");
    assert_eq!(sleeper.receive_head().expect("an answer").0, 200);
    let half = size / 2;
    let read_on = |sleeper: &mut Connection, from: u64, to: u64| {
        for start in (from..to).step_by(MIB as usize) {
            let body = sleeper.take(MIB as usize).expect("bytes");
            asleep.must_equal(start, MIB, &body);
        }
    };
    read_on(&mut sleeper, 0, half);
    // What the fill had under way comes to its end; then only an offset is left.
    wait::until("the sleeper holds nothing", || (held(&node) == 0).then_some(()));
    let evicted = node.metric("forebay_arena_pages_evicted_total");
    for round in 0..2 {
        for number in 0..OTHERS {
            let body = http::get(node.data(), &format!("/data/other-{number}")).body;
            other.must_equal(number, MIB, &body);
        }
        assert!(round == 1 || node.metric("forebay_serve_connections") >= 1);
    }
    let evicted = node.metric("forebay_arena_pages_evicted_total") - evicted;
    assert!(evicted > 2 * 24, "the tier of 24 pages is used for others, twice: {evicted}");
    assert_eq!(held(&node), 0, "the sleeper holds nothing");
    read_on(&mut sleeper, half, size);
}
