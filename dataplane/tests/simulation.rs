//! The whole node on an in-memory network, drive and origin, under a paused clock and a seed.
//!
//! Sockets and drive give short counts, errors, delays and completions out of order; the origin refuses, breaks
//! off, stalls, ignores ranges and replaces objects under our hands. Whatever happens, a client gets the bytes
//! of one version, or an error that it can see; nothing hangs; and all memory comes back.
//!
//! A failure names its seed: `FOREBAY_SEED=8412 cargo test -p forebay-dataplane --test simulation`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io::{BufRead, ErrorKind, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_control_api::AcceleratorSpec;
use forebay_dataplane::arena::{Arena, ArenaOptions};
use forebay_dataplane::auth::Keys;
use forebay_dataplane::config::Limits;
use forebay_dataplane::engine::scripted::{Faults, Scripted, ScriptedDrive, ScriptedPeer};
use forebay_dataplane::engine::{Engine, Socket};
use forebay_dataplane::metrics::{CloseReason, Counter, Handshake, Limit, Metrics, Where};
use forebay_dataplane::node::{Drives, Node};
use forebay_dataplane::origin::scripted::{Fault, Faults as OriginFaults, ScriptedOrigin};
use forebay_dataplane::origin::{Origin, OriginLimits, OriginTarget};
use forebay_dataplane::serve::{Order, Peer, Wire, Worker};
use forebay_dataplane::served::{Accelerator, Next, Served};
use forebay_dataplane::tls::{Certificates, TlsFiles};
use rustls::{AlertDescription, ClientConfig, ClientConnection, RootCertStore};
use tokio::runtime::{Builder, LocalOptions};

const MIB: usize = 1 << 20;
/// Longest virtual time that a simulation may take before it counts as a hang.
const PATIENCE: Duration = Duration::from_hours(1);

fn seeds(count: u64) -> std::ops::Range<u64> {
    match std::env::var("FOREBAY_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("FOREBAY_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 1..count + 1,
    }
}

thread_local! {
    /// Arenas are never unmapped, so the simulations of a thread share theirs; each must leave it as it was.
    static ARENAS: RefCell<HashMap<usize, &'static Arena>> = RefCell::default();
}

fn arena(bytes: usize) -> &'static Arena {
    ARENAS.with_borrow_mut(|arenas| {
        *arenas.entry(bytes).or_insert_with(|| {
            let (reads_bytes, fills_bytes) = (bytes / 8, bytes / 8);
            Arena::build(ArenaOptions { bytes, reads_bytes, fills_bytes }).expect("memory")
        })
    })
}

fn limits(arena_bytes: usize) -> Limits {
    let reserve = (arena_bytes / 8) as u64;
    Limits {
        connections_max: 10_000,
        head_bytes_max: 16 << 10,
        headers_max: 100,
        fills_max: 32,
        peer_connections_max: 16,
        origin_connections_max: 64,
        arena_bytes: arena_bytes as u64,
        reads_reserve_bytes: reserve,
        fills_reserve_bytes: reserve,
        ram_reserve_bytes: arena_bytes as u64 - 2 * reserve,
        send_pinned_bytes_per_connection_max: 2 * MIB as u64,
        send_pinned_bytes_max: arena_bytes as u64 / 2,
        send_queue_bytes_per_connection_max: 1 << 20,
        connections_heap_bytes_max: 48 << 20,
        zero_copy_bytes_max: arena_bytes as u64 / 16,
        tls_held_bytes_max: arena_bytes as u64 / 4,
        quic_send_bytes_max: 0,
        quic_handshakes_max: 8,
        quic_send_window_bytes: 2 * MIB as u64,
        quic_receive_window_bytes: 256 << 10,
        quic_streams_max: 100,
        writer_queue_bytes: 8 * MIB as u64,
        objects_max: 10_000,
        metadata_bytes_max: 64 << 20,
        header_timeout: Duration::from_secs(10),
        idle_timeout: Duration::from_mins(1),
        send_stall: Duration::from_secs(30),
        request_deadline: Duration::from_mins(1),
        drain: Duration::from_secs(30),
    }
}

/// A node of one worker in a simulated world.
struct World {
    node: Arc<Node>,
    worker: Rc<Worker>,
    scripted: Rc<Scripted>,
    origin: ScriptedOrigin,
    orders: tokio::sync::mpsc::UnboundedSender<Order>,
}

impl World {
    fn new(seed: u64, arena_bytes: usize, accelerator: &str, faults: Faults) -> Self {
        let spec: AcceleratorSpec = accelerator.parse().expect("an accelerator");
        let origin = ScriptedOrigin::new(seed);
        let drive = ScriptedDrive::new((arena_bytes / (2 * MIB)).max(8), 4 * MIB);
        let accelerator = Accelerator::of(&spec).expect("an accelerator");
        let node = Node::new(
            arena(arena_bytes),
            Drives::Scripted(Arc::clone(&drive)),
            Served::new([accelerator], Keys::new(true)),
            limits(arena_bytes),
            Metrics::new(),
        );
        let scripted = Scripted::new(seed, faults, drive);
        let (orders, received) = tokio::sync::mpsc::unbounded_channel();
        let peers = Box::new([Peer { load: Arc::default(), orders: orders.clone() }]);
        let engine = Engine::Scripted(Rc::clone(&scripted));
        let double = origin.clone();
        let open = move |_: &OriginTarget| Ok(Origin::scripted(double.clone(), OriginLimits::default()));
        let worker = Worker::start(Arc::clone(&node), engine, &open, 0, peers).expect("a worker");
        let obeying = Rc::clone(&worker);
        tokio::task::spawn_local(async move { obeying.obey(received, |_| {}, &open).await });
        Self { node, worker, scripted, origin, orders }
    }

    /// Has the worker serve these from now on; what is served no more is forgotten.
    async fn serve_anew(&self, accelerators: &[&str]) {
        let held = self.node.served();
        let wanted = accelerators
            .iter()
            .map(|text| Accelerator::of(&text.parse().expect("a spec")).expect("an accelerator"));
        let Next { served, gone, .. } = held.next(wanted, Arc::clone(&held.keys), None);
        let served = Arc::new(served);
        self.node.serve(Arc::clone(&served));
        let (done, mut all_done) = tokio::sync::mpsc::unbounded_channel();
        self.orders.send(Order::Serve(served, done)).expect("the worker obeys");
        assert!(all_done.recv().await.is_none());
        for index in gone {
            self.node.table.forget_all(index);
        }
    }

    fn connect(&self) -> Client {
        Client { peer: self.open(Wire::Plain), buffer: Vec::new(), session: None, heard_goodbye: false }
    }

    /// The same through TLS.
    fn connect_tls(&self) -> Client {
        let (server, client) = tls();
        let name = "localhost".try_into().expect("a name");
        let session = Box::new(ClientConnection::new(client, name).expect("a session"));
        let session = Some(session);
        let mut client =
            Client { peer: self.open(Wire::Tls(server)), buffer: Vec::new(), session, heard_goodbye: false };
        client.flush();
        client
    }

    fn open(&self, wire: Wire) -> ScriptedPeer {
        let (socket, peer) = self.scripted.connect();
        let worker = Rc::clone(&self.worker);
        tokio::task::spawn_local(async move { worker.serve(Socket::Scripted(socket), wire).await });
        peer
    }
}

/// Both ends' configurations. All clients share theirs, so most of them resume a session.
fn tls() -> (Arc<rustls::ServerConfig>, Arc<ClientConfig>) {
    thread_local! {
        static CONFIGS: (Arc<rustls::ServerConfig>, Arc<ClientConfig>) = {
            let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("both.pem");
            let both = format!("{}{}", made.cert.pem(), made.signing_key.serialize_pem());
            std::fs::write(&path, both).expect("written");
            let certificates =
                Certificates::open(&TlsFiles { cert: path.clone(), key: path }).expect("a pair");
            let mut roots = RootCertStore::empty();
            roots.add(made.cert.der().clone()).expect("a root");
            let client = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
            (certificates.server_config(&[b"http/1.1"]), Arc::new(client))
        };
    }
    CONFIGS.with(Clone::clone)
}

/// Runs a simulation to its end and checks that nothing is left behind.
fn simulate<F: Future<Output = World>>(seed: u64, arena_bytes: usize, simulation: impl FnOnce() -> F) {
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build_local(LocalOptions::default())
        .expect("a runtime");
    runtime.block_on(async {
        let ended = tokio::time::timeout(PATIENCE, simulation()).await;
        let world = ended.unwrap_or_else(|_| panic!("seed {seed}: the simulation hangs"));
        // What clients left behind ends by itself: fills, idle connections, orphaned operations.
        for _ in 0..PATIENCE.as_secs() {
            if world.scripted.in_flight() == 0 && world.origin.stats().open == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(world.scripted.in_flight(), 0, "seed {seed}: operations hang");
        assert_eq!(world.origin.stats().open, 0, "seed {seed}: origin requests hang");
        assert_eq!(world.node.metrics.total(Counter::HitCopiedBytes), 0);
    });
    drop(runtime);
    let status = arena(arena_bytes).status();
    assert_eq!(status.pages_free * 2 * MIB as u64, status.bytes, "seed {seed}: memory is lost: {status:?}");
}

struct Client {
    peer: ScriptedPeer,
    buffer: Vec<u8>,
    session: Option<Box<ClientConnection>>,
    /// The node has said that nothing more comes, in the words of TLS.
    heard_goodbye: bool,
}

/// A response as it arrived.
#[derive(Debug)]
struct Response {
    status: u16,
    headers: HashMap<String, String>,
    body: Vec<u8>,
    /// Bytes of the body that were announced and did not come.
    missing: u64,
}

impl Client {
    fn ask(&mut self, method: &str, path: &str, headers: &str) {
        self.send(format!("{method} {path} HTTP/1.1\r\nHost: node\r\n{headers}\r\n").as_bytes());
    }

    fn send(&mut self, bytes: &[u8]) {
        if self.session.is_none() {
            return self.peer.send(bytes);
        }
        for piece in bytes.chunks(16 << 10) {
            let session = self.session.as_mut().expect("just seen");
            session.writer().write_all(piece).expect("room, behind a handshake");
            self.flush();
        }
    }

    /// Waits until the handshake, if there is one, is over.
    async fn shake_hands(&mut self) {
        while self.session.as_ref().is_some_and(|session| session.is_handshaking()) {
            let bytes = self.peer.recv(256 << 10).await.expect("a handshake");
            assert!(!bytes.is_empty(), "the node leaves in the middle of a handshake");
            self.take(&bytes);
        }
    }

    /// Sends what the TLS session has to say.
    fn flush(&mut self) {
        let Some(session) = &mut self.session else { return };
        let mut bytes = Vec::new();
        while session.wants_write() {
            session.write_tls(&mut bytes).expect("written");
        }
        if !bytes.is_empty() {
            self.peer.send(&bytes);
        }
    }

    /// `None` if the connection ended before a whole head.
    async fn response(&mut self, is_head: bool, most: u64) -> Option<Response> {
        let end = loop {
            if let Some(end) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            self.more().await?;
        };
        let head = String::from_utf8(self.cut(end)).expect("text");
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers: HashMap<_, _> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let length: u64 = headers.get("content-length").map_or(0, |length| length.parse().expect("a length"));
        let expected = if is_head || status == 304 { 0 } else { length };
        let wanted = expected.min(most);
        while (self.buffer.len() as u64) < wanted {
            if self.more().await.is_none() {
                break;
            }
        }
        let body = self.cut(self.buffer.len().min(expected as usize));
        Some(Response { status, headers, missing: expected - body.len() as u64, body })
    }

    /// The first `count` bytes that are here.
    fn cut(&mut self, count: usize) -> Vec<u8> {
        let rest = self.buffer.split_off(count);
        std::mem::replace(&mut self.buffer, rest)
    }

    async fn more(&mut self) -> Option<()> {
        let before = self.buffer.len();
        while self.buffer.len() == before {
            let bytes = match self.peer.recv(256 << 10).await {
                Ok(bytes) if !bytes.is_empty() => bytes,
                _ => return None,
            };
            self.take(&bytes);
        }
        Some(())
    }

    /// Decrypts, if it has to. Records that are lost, repeated or out of order are found here.
    fn take(&mut self, bytes: &[u8]) {
        let Some(session) = &mut self.session else { return self.buffer.extend_from_slice(bytes) };
        let mut left = bytes;
        while !left.is_empty() && session.read_tls(&mut left).expect("room") > 0 {
            match session.process_new_packets() {
                Ok(state) => self.heard_goodbye |= state.peer_has_closed(),
                Err(error) => panic!("the node speaks TLS wrongly: {error}"),
            }
            let mut reader = session.reader();
            loop {
                let count = match reader.fill_buf() {
                    Ok([]) => break,
                    Ok(bytes) => {
                        self.buffer.extend_from_slice(bytes);
                        bytes.len()
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => panic!("the node speaks TLS wrongly: {error}"),
                };
                reader.consume(count);
            }
        }
        self.flush();
    }
}

fn content(random: &mut fastrand::Rng, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    random.fill(&mut bytes);
    bytes
}

/// The sizes around every edge of a 64 KiB grid, and as much again: more than the RAM tier of these worlds holds.
const SIZES: [usize; 15] = [
    0,
    1,
    65_535,
    65_536,
    65_537,
    131_072,
    200_000,
    MIB + 1,
    2 * MIB + 12_345,
    700_000,
    700_001,
    700_002,
    700_003,
    700_004,
    700_005,
];

fn drawn_faults(random: &mut fastrand::Rng) -> (Faults, OriginFaults) {
    let mut mille = |most: u32| if random.bool() { random.u32(..=most) } else { 0 };
    let sockets = Faults {
        short_per_mille: mille(800),
        reset_per_mille: mille(5),
        drive_per_mille: mille(100),
        rot_per_mille: mille(100),
        delay_max: Duration::from_micros(u64::from(mille(3000))),
        window_bytes: 4096 << mille(6),
    };
    let origin = OriginFaults {
        head_delay_max: Duration::from_millis(u64::from(mille(50))),
        chunk_delay_max: Duration::from_millis(u64::from(mille(5))),
        chunk_bytes_max: if random.bool() { random.usize(1000..200_000) } else { 0 },
        refuse_permille: if random.bool() { random.u16(..50) } else { 0 },
        busy_permille: if random.bool() { random.u16(..50) } else { 0 },
        cut_permille: if random.bool() { random.u16(..150) } else { 0 },
        stall_permille: if random.bool() { random.u16(..20) } else { 0 },
        ignore_range_permille: if random.bool() { random.u16(..100) } else { 0 },
        wrong_range_permille: if random.bool() { random.u16(..30) } else { 0 },
        swap_permille: if random.bool() { random.u16(..50) } else { 0 },
    };
    (sockets, origin)
}

#[test]
fn a_thousand_worlds_give_right_bytes_or_a_visible_error() {
    visit_worlds(1000, World::connect);
}

#[test]
fn worlds_behind_tls_give_right_bytes_or_a_visible_error() {
    visit_worlds(200, World::connect_tls);
}

fn visit_worlds(count: u64, connect: fn(&World) -> Client) {
    const ARENA: usize = 8 * MIB;
    let (mut whole, mut failed, mut cut) = (0_u64, 0_u64, 0_u64);
    let mut bad_blocks = 0;
    for seed in seeds(count) {
        let counted = Rc::new(RefCell::new((0, 0, 0, 0)));
        let counts = Rc::clone(&counted);
        simulate(seed, ARENA, || async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let (faults, origin_faults) = drawn_faults(&mut random);
            let freshness = ["strict", "ttl:1s", "immutable"][random.usize(..3)];
            let spec = format!("bucket=http://origin,freshness={freshness},extent=64KiB");
            let world = World::new(seed, ARENA, &spec, faults);
            for (index, size) in SIZES.into_iter().enumerate() {
                world.origin.put(format!("k{index}").as_bytes(), content(&mut random, size));
            }
            world.origin.set_faults(origin_faults);
            let clients: Vec<_> = (0..10)
                .map(|_| {
                    let (client, origin) = (connect(&world), world.origin.clone());
                    let random = random.fork();
                    tokio::task::spawn_local(visit(seed, client, origin, random))
                })
                .collect();
            for client in clients {
                let (right, refused, broken) =
                    client.await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                let mut counts = counts.borrow_mut();
                counts.0 += right;
                counts.1 += refused;
                counts.2 += broken;
            }
            counts.borrow_mut().3 = world.node.metrics.total(Counter::BlocksBad(Where::Drive));
            world
        });
        let (right, refused, broken, bad) = *counted.borrow();
        whole += right;
        failed += refused;
        cut += broken;
        bad_blocks += bad;
    }
    println!(
        "{whole} whole answers, {failed} refused, {cut} cut or unanswered, {bad_blocks} bad blocks dropped"
    );
    if std::env::var_os("FOREBAY_SEED").is_none() {
        assert!(whole > 10 * failed, "most answers are whole");
        assert!(
            failed > 0 && cut > 0 && bad_blocks > 0,
            "the worlds were unfriendly enough to prove something"
        );
    }
}

#[test]
fn what_is_served_is_replaced_while_it_is_read() {
    const ARENA: usize = 8 * MIB;
    for seed in seeds(50) {
        simulate(seed, ARENA, || async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let (one, two) =
                ("one=http://origin/1,freshness=immutable", "two=http://origin/2,freshness=immutable");
            let faults = Faults { short_per_mille: 300, delay_max: Duration::from_millis(2), ..Faults::NONE };
            let world = World::new(seed, ARENA, one, faults);
            let body = content(&mut random, 2 * MIB + 12_345);
            world.origin.put(b"k", body.clone());
            world.origin.set_faults(OriginFaults {
                chunk_delay_max: Duration::from_millis(5),
                chunk_bytes_max: 100_000,
                ..OriginFaults::default()
            });
            let asked = || world.node.metrics.total(Counter::OriginBytes);

            // The accelerator goes while its bytes are on their way: what has begun ends whole.
            let mut client = world.connect();
            client.ask("GET", "/one/k", "");
            client.more().await.expect("the answer begins");
            world.serve_anew(&[two]).await;
            let begun = client.response(false, u64::MAX).await.expect("an answer");
            assert_eq!((begun.status, begun.missing), (200, 0), "seed {seed}");
            assert!(begun.body == body, "seed {seed}: wrong bytes");
            client.ask("GET", "/one/k", "");
            let gone = client.response(false, u64::MAX).await.expect("an answer");
            assert_eq!(gone.status, 404, "seed {seed}");
            let words = String::from_utf8_lossy(&gone.body).into_owned();
            assert!(
                words.contains("NoSuchBucket") && words.contains("--accelerator one="),
                "seed {seed}: {words}"
            );
            client.ask("GET", "/two/k", "");
            assert_eq!(client.response(false, u64::MAX).await.map(|it| it.status), Some(200), "seed {seed}");

            // It comes back without the objects that it had; another policy keeps them.
            let before = asked();
            world.serve_anew(&[two, one]).await;
            assert!(world.node.table.find(0, b"k").is_none(), "seed {seed}: index 0 means nothing any more");
            client.ask("GET", "/one/k", "");
            assert_eq!(
                client.response(false, u64::MAX).await.map(|it| it.body == body),
                Some(true),
                "seed {seed}"
            );
            assert_eq!(asked() - before, body.len() as u64, "seed {seed}");
            world.serve_anew(&[two, "one=http://origin/1,freshness=ttl:1h"]).await;
            client.ask("GET", "/one/k", "");
            let held = client.response(false, u64::MAX).await.expect("an answer");
            assert_eq!((held.status, asked() - before), (200, body.len() as u64), "seed {seed}");
            assert!(
                held.headers.contains_key("age"),
                "seed {seed}: the rules of now hold: {:?}",
                held.headers
            );
            world
        });
    }
}

/// One client's visit: some requests on one connection. Counts whole answers, refusals, and broken ones.
async fn visit(
    seed: u64,
    mut client: Client,
    origin: ScriptedOrigin,
    mut random: fastrand::Rng,
) -> (u64, u64, u64) {
    let (mut right, mut refused) = (0, 0);
    for _ in 0..random.u32(1..6) {
        let index = random.usize(..SIZES.len());
        let (key, size) = (format!("k{index}"), SIZES[index] as u64);
        let is_head = random.u32(..10) == 0;
        let range = match random.u32(..4) {
            0 => None,
            1 => Some(format!("bytes=-{}", random.u64(1..=size.max(1)))),
            2 => Some(format!("bytes={}-", random.u64(..=size))),
            _ => {
                let first = random.u64(..=size);
                Some(format!("bytes={first}-{}", first + random.u64(..100_000)))
            }
        };
        let header = range.as_ref().map(|range| format!("Range: {range}\r\n")).unwrap_or_default();
        client.ask(if is_head { "HEAD" } else { "GET" }, &format!("/bucket/{key}"), &header);
        // Some clients leave half-way.
        let most = if random.u32(..12) == 0 { random.u64(..=size) } else { u64::MAX };
        let Some(response) = client.response(is_head, most).await else { return (right, refused, 1) };
        if matches!(response.status, 200 | 206) {
            check(seed, &key, range.as_deref(), is_head, &response, &origin);
        }
        if response.missing > 0 {
            return (right, refused, u64::from(most == u64::MAX));
        }
        match response.status {
            200 | 206 => right += 1,
            416 => {
                let total = format!("bytes */{size}");
                assert_eq!(
                    response.headers.get("content-range"),
                    Some(&total),
                    "seed {seed} {key} {range:?}"
                );
                right += 1;
            }
            500..=599 => refused += 1,
            other => panic!("seed {seed}: {key} {range:?} was answered {other}: {response:?}"),
        }
    }
    (right, refused, 0)
}

/// What came is what the version of its `ETag` has in this range, as far as it came.
fn check(
    seed: u64,
    key: &str,
    range: Option<&str>,
    is_head: bool,
    response: &Response,
    origin: &ScriptedOrigin,
) {
    let etag =
        response.headers.get("etag").unwrap_or_else(|| panic!("seed {seed}: {key} came without an ETag"));
    let known = origin.bytes_of(key.as_bytes(), etag);
    let bytes = known.unwrap_or_else(|| panic!("seed {seed}: {key} never had the ETag {etag}"));
    let expected = match (response.status, range) {
        (206, Some(range)) => {
            let (first, last) = range.trim_start_matches("bytes=").split_once('-').expect("a range");
            let size = bytes.len();
            let (start, end) = match (first.parse::<usize>(), last.parse::<usize>()) {
                (Ok(first), Ok(last)) => (first, size.min(last + 1)),
                (Ok(first), Err(_)) => (first, size),
                (Err(_), Ok(suffix)) => (size.saturating_sub(suffix), size),
                (Err(_), Err(_)) => unreachable!("the test makes its ranges"),
            };
            let said = format!("bytes {start}-{}/{size}", end - 1);
            assert_eq!(response.headers.get("content-range"), Some(&said), "seed {seed} {key} {range}");
            &bytes[start..end]
        }
        (200, None) => &bytes[..],
        other => panic!("seed {seed}: {key} {other:?}"),
    };
    let length = response.headers["content-length"].parse::<usize>().expect("a length");
    assert_eq!(length, expected.len(), "seed {seed} {key} {range:?}");
    if !is_head {
        assert!(
            response.body == expected[..response.body.len()],
            "seed {seed}: wrong bytes of {key} {range:?}"
        );
    }
}

#[test]
fn a_herd_on_a_cold_object_makes_few_origin_requests() {
    const ARENA: usize = 64 * MIB;
    for seed in seeds(3) {
        simulate(seed, ARENA, || async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let faults = Faults {
                short_per_mille: 500,
                delay_max: Duration::from_millis(2),
                window_bytes: 64 << 10,
                ..Faults::NONE
            };
            let world = World::new(seed, ARENA, "bucket=http://origin,freshness=ttl:60s", faults);
            let bytes = content(&mut random, 8 * MIB);
            world.origin.put(b"cold", bytes.clone());
            world.origin.set_faults(OriginFaults {
                head_delay_max: Duration::from_millis(30),
                chunk_delay_max: Duration::from_millis(2),
                chunk_bytes_max: 100_000,
                ..OriginFaults::default()
            });
            let bytes = Rc::new(bytes);
            let clients: Vec<_> = (0..256)
                .map(|index| {
                    let (mut client, bytes) = (world.connect(), Rc::clone(&bytes));
                    tokio::task::spawn_local(async move {
                        client.ask("GET", "/bucket/cold", "");
                        // The first leaves half-way; it must not take the others with it.
                        let most = if index == 0 { 4 << 20 } else { u64::MAX };
                        let response = client.response(false, most).await.expect("an answer");
                        assert_eq!(response.status, 200);
                        assert!(response.body == bytes[..response.body.len()], "seed {seed}: wrong bytes");
                        assert!(
                            index == 0 || response.missing == 0,
                            "seed {seed}: {} missing",
                            response.missing
                        );
                    })
                })
                .collect();
            for client in clients {
                client.await.expect("a client");
            }
            let stats = world.origin.stats();
            assert!(stats.gets <= 8, "seed {seed}: {} origin GETs", stats.gets);
            assert_eq!(stats.heads, 0, "seed {seed}");
            world
        });
    }
}

#[test]
fn stopped_readers_do_not_stop_the_others() {
    stop_readers(World::connect, |_| ());
}

/// What is encrypted for readers who stop is kept for them, and bounded: some of them lose their connection.
#[test]
fn stopped_readers_behind_tls_do_not_stop_the_others() {
    stop_readers(World::connect_tls, |world| {
        let metrics = &world.node.metrics;
        assert!(metrics.total(Counter::LimitRefusals(Limit::TlsHeld)) > 0, "the limit was reached");
        assert!(metrics.total(Counter::TlsHandshakes(Handshake::Resumed)) > 0, "sessions are resumed");
        assert_eq!(metrics.total(Counter::TlsHandshakes(Handshake::Failed)), 0);
        assert!(metrics.total(Counter::TlsBytes) > 700 * MIB as u64, "every byte is counted");
    });
}

fn stop_readers(connect: fn(&World) -> Client, check: fn(&World)) {
    const ARENA: usize = 64 * MIB;
    for seed in seeds(2) {
        simulate(seed, ARENA, || async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let faults =
                Faults { delay_max: Duration::from_micros(500), window_bytes: 16 << 10, ..Faults::NONE };
            let world = World::new(seed, ARENA, "bucket=http://origin,freshness=immutable", faults);
            let objects: Rc<Vec<_>> = Rc::new((0..100).map(|_| content(&mut random, MIB)).collect());
            for (index, bytes) in objects.iter().enumerate() {
                world.origin.put(format!("o{index}").as_bytes(), bytes.clone());
            }
            // Each takes a little of an object and then never reads again.
            let mut stopped = Vec::new();
            for index in 0..300 {
                let mut client = connect(&world);
                client.ask("GET", &format!("/bucket/o{}", index % 100), "");
                let response = client.response(false, 1000).await.expect("an answer");
                assert_eq!(response.status, 200);
                stopped.push(client);
            }
            let readers: Vec<_> = (0..700)
                .map(|index| {
                    let (mut client, objects) = (connect(&world), Rc::clone(&objects));
                    tokio::task::spawn_local(async move {
                        let object = (index * 7) % 100;
                        client.ask("GET", &format!("/bucket/o{object}"), "");
                        let response = client.response(false, u64::MAX).await.expect("an answer");
                        assert_eq!(response.status, 200, "seed {seed}");
                        assert!(response.body == objects[object], "seed {seed}: wrong or missing bytes");
                    })
                })
                .collect();
            for reader in readers {
                reader.await.expect("a reader goes on");
            }
            check(&world);
            drop(stopped);
            world
        });
    }
}

/// A reader that stops while its next piece waits for memory must give up the piece it is being sent: with objects of
/// several extents on a drive, the stopped ones once held all memory for reads and waited for more.
#[test]
fn stopped_readers_of_drive_objects_give_their_memory_back() {
    const ARENA: usize = 64 * MIB;
    const OBJECTS: usize = 36;
    for seed in seeds(1) {
        simulate(seed, ARENA, || async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let faults =
                Faults { delay_max: Duration::from_micros(500), window_bytes: 16 << 10, ..Faults::NONE };
            let world = World::new(seed, ARENA, "bucket=http://origin,freshness=immutable", faults);
            let objects: Rc<Vec<_>> = Rc::new((0..OBJECTS).map(|_| content(&mut random, 3 * MIB)).collect());
            for (index, bytes) in objects.iter().enumerate() {
                world.origin.put(format!("o{index}").as_bytes(), bytes.clone());
            }
            let mut first = world.connect();
            for index in 0..OBJECTS {
                first.ask("GET", &format!("/bucket/o{index}"), "");
                let response = first.response(false, u64::MAX).await.expect("an answer");
                assert!(response.body == objects[index], "seed {seed}: wrong bytes");
            }
            let before = world.node.metrics.total(Counter::DriveReads);
            let mut stopped = Vec::new();
            for index in 0..100 {
                let mut client = world.connect();
                client.ask("GET", &format!("/bucket/o{}", index % OBJECTS), "");
                let response = client.response(false, 1000).await.expect("an answer");
                assert_eq!(response.status, 200, "seed {seed}: reader {index} before the others go on");
                stopped.push(client);
            }
            for index in 0..OBJECTS {
                let mut client = world.connect();
                client.ask("GET", &format!("/bucket/o{index}"), "");
                let response = client.response(false, u64::MAX).await.expect("an answer");
                assert_eq!(response.status, 200, "seed {seed}");
                assert!(response.body == objects[index], "seed {seed}: wrong or missing bytes");
            }
            assert!(world.node.metrics.total(Counter::DriveReads) > before, "the drive was read");
            drop(stopped);
            world
        });
    }
}

/// A refusal comes while the body is still on its way. Closed with unread bytes in it, a socket is reset, and the
/// client would learn nothing.
#[test]
fn an_early_answer_is_seen_by_a_client_that_is_still_sending() {
    answer_early(World::connect);
}

#[test]
fn an_early_answer_is_seen_through_tls() {
    answer_early(World::connect_tls);
}

fn answer_early(connect: fn(&World) -> Client) {
    const ARENA: usize = 8 * MIB;
    for seed in seeds(20) {
        simulate(seed, ARENA, || async move {
            let faults = Faults {
                short_per_mille: 300,
                delay_max: Duration::from_millis(2),
                window_bytes: 64 << 10,
                ..Faults::NONE
            };
            let world = World::new(seed, ARENA, "bucket=http://origin,freshness=strict", faults);
            let mut random = fastrand::Rng::with_seed(seed);
            let mut client = connect(&world);
            client.shake_hands().await;
            let pieces: u32 = 20;
            let body = "x".repeat(10_000);
            if seed % 2 == 0 {
                client.ask("PUT", "/stranger/object", &format!("Content-Length: {}\r\n", pieces * 10_000));
            } else {
                client.send(b"PUT /bucket/object HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n");
            }
            for _ in 0..pieces {
                client.send(body.as_bytes());
                tokio::time::sleep(Duration::from_millis(random.u64(..20))).await;
            }
            let answer = client.response(false, u64::MAX).await;
            let answer = answer.unwrap_or_else(|| panic!("seed {seed}: the answer is lost"));
            assert_eq!((answer.status, answer.missing), (if seed % 2 == 0 { 404 } else { 400 }, 0));
            assert!(client.more().await.is_none(), "seed {seed}: nothing comes behind the answer");
            assert_eq!(
                client.heard_goodbye,
                client.session.is_some(),
                "seed {seed}: it is known to be the end"
            );
            // This one never stops. Neither its bytes nor its time are endless.
            let mut other = connect(&world);
            other.shake_hands().await;
            other.ask("PUT", "/stranger/object", "Content-Length: 999999999999\r\n");
            let closed = || world.node.metrics.total(Counter::ConnectionsClosed(CloseReason::Finished));
            let before = closed();
            let mut waited = Duration::ZERO;
            while closed() == before {
                if seed % 2 == 0 {
                    other.send(&vec![b'x'; MIB]);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
                waited += Duration::from_millis(10);
                assert!(waited < Duration::from_secs(10), "seed {seed}: it is received for ever");
            }
            world
        });
    }
}

/// A body without a length ends with the connection. Only a goodbye tells the end of all from the end of what came.
#[test]
fn a_body_that_is_cut_ends_without_a_goodbye() {
    const ARENA: usize = 8 * MIB;
    for seed in seeds(10) {
        simulate(seed, ARENA, || async move {
            let faults = Faults { short_per_mille: 300, delay_max: Duration::from_millis(1), ..Faults::NONE };
            let world = World::new(seed, ARENA, "bucket=http://origin,freshness=immutable", faults);
            let mut random = fastrand::Rng::with_seed(seed);
            world.origin.put(b"object", content(&mut random, 3 * MIB));
            let mut client = world.connect_tls();
            client.ask("GET", "/bucket/object", "Connection: close\r\n");
            let whole = client.response(false, u64::MAX).await.expect("an answer");
            assert_eq!((whole.status, whole.missing), (200, 0), "seed {seed}");
            assert!(client.more().await.is_none());
            assert!(client.heard_goodbye, "seed {seed}: the end of all");
            let mut idle = world.connect_tls();
            idle.ask("HEAD", "/bucket/object", "");
            assert_eq!(idle.response(true, 0).await.expect("an answer").status, 200);
            assert!(idle.more().await.is_none());
            assert!(idle.heard_goodbye, "seed {seed}: an idle connection ends in order");

            world.origin.put(b"broken", content(&mut random, 3 * MIB));
            world.origin.next(Fault::CutAt(300_000));
            for _ in 0..8 {
                world.origin.next(Fault::CutAt(0));
            }
            let mut client = world.connect_tls();
            client.ask("GET", "/bucket/broken", "");
            let cut = client.response(false, u64::MAX).await.expect("an answer");
            assert_eq!((cut.status, cut.missing), (200, 3 * MIB as u64 - 300_000), "seed {seed}");
            assert!(!client.heard_goodbye, "seed {seed}: it looks like the end of all");
            world
        });
    }
}

/// Who speaks HTTP to the port of HTTPS is told so; who says nothing, or not enough, does not stay for ever.
#[test]
fn what_is_no_handshake_is_answered_or_ended() {
    const ARENA: usize = 8 * MIB;
    for seed in seeds(10) {
        simulate(seed, ARENA, || async move {
            let faults = Faults { short_per_mille: 300, delay_max: Duration::from_millis(1), ..Faults::NONE };
            let world = World::new(seed, ARENA, "bucket=http://origin,freshness=immutable", faults);
            let (server, client) = tls();
            let connect = || Client {
                peer: world.open(Wire::Tls(Arc::clone(&server))),
                buffer: Vec::new(),
                session: None,
                heard_goodbye: false,
            };
            let mut bare = connect();
            bare.ask("GET", "/bucket/object", "");
            let told = bare.response(false, u64::MAX).await.expect("an answer");
            assert_eq!((told.status, told.missing), (400, 0), "seed {seed}");
            assert!(String::from_utf8_lossy(&told.body).contains("https://"), "seed {seed}");
            assert!(bare.more().await.is_none(), "seed {seed}: that was all");

            let mut other = ClientConfig::clone(&client);
            other.alpn_protocols = vec![b"h2".to_vec()];
            let name = "localhost".try_into().expect("a name");
            let mut hello = Vec::new();
            let mut session = ClientConnection::new(Arc::new(other), name).expect("a session");
            session.write_tls(&mut hello).expect("written");
            let mut stranger = connect();
            stranger.send(&hello);
            while stranger.more().await.is_some() {}
            session.read_tls(&mut stranger.buffer.as_slice()).expect("room");
            let told = rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol);
            assert_eq!(session.process_new_packets().map(|_| ()), Err(told), "seed {seed}");
            let mut noise = connect();
            noise.send(b"\x16\x03\x01\x00\x05hello");
            while noise.more().await.is_some() {}
            drop(connect());
            let mut silent = connect();
            assert!(silent.more().await.is_none(), "seed {seed}: header_timeout");
            let mut half = connect();
            half.send(b"\x16\x03\x01");
            assert!(half.more().await.is_none(), "seed {seed}: header_timeout");

            let count = |outcome| world.node.metrics.total(Counter::TlsHandshakes(outcome));
            let outcomes =
                [Handshake::PlainHttp, Handshake::Failed, Handshake::Gone, Handshake::TimedOut].map(count);
            assert_eq!(outcomes, [1, 2, 1, 2], "seed {seed}");
            world
        });
    }
}
