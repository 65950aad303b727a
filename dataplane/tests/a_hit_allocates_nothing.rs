//! A hit out of memory costs no allocation: request head, path, request id, answer and both operations use room that is
//! there already.
//!
//! One worker on a real engine, one connection over loopback, and an allocator that counts for this thread only. Ten times a
//! second the worker's sweep renews the text of the date, so a few allocations for a thousand hits are none for one.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use allocation_counter::measure;
use forebay_control_api::AcceleratorSpec;
use forebay_dataplane::arena::{Arena, ArenaOptions};
use forebay_dataplane::auth::Keys;
use forebay_dataplane::config::{Config, HostFacts, Limits, Settings};
use forebay_dataplane::engine::portable::Portable;
use forebay_dataplane::engine::uring::Ring;
use forebay_dataplane::engine::{Engine, SendPolicy, Sends};
use forebay_dataplane::metrics::Metrics;
use forebay_dataplane::node::{Drives, Node};
use forebay_dataplane::origin::scripted::ScriptedOrigin;
use forebay_dataplane::origin::{Origin, OriginLimits, OriginTarget};
use forebay_dataplane::serve::{Peer, Wire, Worker};
use forebay_dataplane::served::{Accelerator, Served};
use tokio::runtime::{Builder, LocalOptions, LocalRuntime};

const BODY_BYTES: usize = 200_000;
const REQUESTS: u64 = 1000;
/// Of a thousand hits: what the clock and the runtime may need meanwhile.
const ALLOCATIONS_MAX: u64 = REQUESTS / 10;
const PATIENCE: Duration = Duration::from_secs(30);
/// As the SDKs ask, a key with a space in it once, which has to be decoded.
const REQUEST: &str = "GET /data/a%s/object HTTP/1.1\r\nHost: node:7070\r\nUser-Agent: aws-sdk\r\nAccept: */*\r\n\
                       Accept-Encoding: identity\r\nRange: bytes=%r\r\n\r\n";

fn runtime() -> LocalRuntime {
    Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).expect("a runtime")
}

fn engine(name: &str) -> Engine {
    let of = |sends| Ring::start(SendPolicy { sends, ..SendPolicy::default() }).expect("io_uring");
    match name {
        "uring" => Engine::Uring(of(Sends::Auto)),
        "uring, copied" => Engine::Uring(of(Sends::Copy)),
        _ => Engine::Portable(Portable::default()),
    }
}

/// A worker of a node that serves `/data`.
fn worker(engine: Engine) -> Rc<Worker> {
    let spec: AcceleratorSpec = "data=http://origin,freshness=immutable".parse().expect("an accelerator");
    let settings = Settings { accelerator: vec![spec.clone()], ..Settings::default() };
    let config = Config::load(settings, &|_| None, &HostFacts::probe()).expect("a configuration");
    let limits = Limits::derive(&config).expect("limits");
    let arena = Arena::build(ArenaOptions { bytes: 64 << 20, reads_bytes: 8 << 20, fills_bytes: 8 << 20 })
        .expect("memory");
    let served = Served::new([Accelerator::of(&spec).expect("an accelerator")], Keys::new(true));
    let node = Node::new(arena, Drives::None, served, limits, Metrics::new());
    let origin = ScriptedOrigin::new(1);
    for key in ["a/object", "a b/object"] {
        origin.put(key.as_bytes(), vec![7; BODY_BYTES]);
    }
    let open = move |_: &OriginTarget| Ok(Origin::scripted(origin.clone(), OriginLimits::default()));
    let (orders, _) = tokio::sync::mpsc::unbounded_channel();
    let peers = Box::new([Peer { load: Arc::default(), orders }]);
    Worker::start(node, engine, &open, 0, peers).expect("a worker")
}

/// Asks so often, and reads every answer whole; on a thread of its own.
fn ask(mut stream: TcpStream, request: &str, count: u64, length: usize) -> TcpStream {
    let (mut answer, expected) = (vec![0; length + 4096], vec![7; length]);
    for _ in 0..count {
        stream.write_all(request.as_bytes()).expect("sent");
        let mut got = 0;
        let whole = loop {
            got += stream.read(&mut answer[got..]).expect("an answer in time");
            if let Some(end) = answer[..got.min(4096)].windows(4).position(|four| four == b"\r\n\r\n") {
                assert!(answer.starts_with(b"HTTP/1.1 206 "));
                break end + 4 + length;
            }
        };
        stream.read_exact(&mut answer[got..whole]).expect("the rest in time");
        assert!(answer[whole - length..whole] == expected, "wrong bytes");
    }
    stream
}

/// Allocations of the worker's thread for so many hits, each of `length` bytes.
fn allocations_of(name: &str, request: &str, length: usize) -> u64 {
    let runtime = runtime();
    let (listener, stream) = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        (listener, stream)
    };
    let (accepted, _) = listener.accept().expect("accepted");
    accepted.set_nonblocking(true).expect("set");
    accepted.set_nodelay(true).expect("set");
    let worker = runtime.block_on(async { worker(engine(name)) });
    let socket = runtime.block_on(async { worker.engine.adopt(accepted.into()).expect("adopted") });
    let serving = runtime.spawn_local(Rc::clone(&worker).serve(socket, Wire::Plain));
    let asked = |stream: TcpStream, count| {
        let request = request.to_owned();
        runtime.block_on(async {
            tokio::task::spawn_blocking(move || ask(stream, &request, count, length)).await.expect("asked")
        })
    };
    // Until everything is warm: the object, its heat, the spares.
    let stream = asked(stream, 50);
    let mut stream = Some(stream);
    let counted = measure(|| stream = stream.take().map(|stream| asked(stream, REQUESTS)));
    drop(stream);
    runtime.block_on(serving).expect("the connection ends with its client");
    counted.count_total
}

#[test]
fn on_any_engine_and_however_it_is_sent() {
    for name in ["uring", "uring, copied", "portable"] {
        for length in [1000, BODY_BYTES] {
            let request = REQUEST.replace("%s", "").replace("%r", &format!("0-{}", length - 1));
            let count = allocations_of(name, &request, length);
            println!("{name}, {length} bytes: {count} allocations for {REQUESTS} hits");
            assert!(count < ALLOCATIONS_MAX, "{name}, {length} bytes: {count} for {REQUESTS} hits");
        }
    }
}

/// The same measure sees what is there: a path that has to be decoded costs its room.
#[test]
fn what_must_be_decoded_is_counted() {
    let request = REQUEST.replace("%s", "%20b").replace("%r", "0-999");
    let count = allocations_of("uring", &request, 1000);
    println!("{count} allocations for {REQUESTS} hits");
    assert!((REQUESTS..4 * REQUESTS).contains(&count), "{count} for {REQUESTS} hits");
}
