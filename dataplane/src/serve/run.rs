//! From a configuration to a serving node, and to its orderly end.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use socket2::{Domain, Protocol, Socket as RawSocket, Type};
use tokio::runtime::{Builder, LocalOptions};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::door::Door;
use super::http3;
use super::link::Wire;
use super::worker::{Order, Peer, Worker};
use crate::admin::{AdminDoor, NodeDoor};
use crate::agent::{Agent, House};
use crate::arena::{Arena, ArenaOptions, PAGE_BYTES};
use crate::auth::Keys;
use crate::config::{self, AltSvc, Config, EngineChoice, Limits};
use crate::engine::portable::{Portable, READS_MAX};
use crate::engine::{Engine, SendPolicy, Sends, probe, task, uring};
use crate::metrics::{Counter, EngineKind, Gauge, Metrics, Reload};
use crate::node::{Drives, Node};
use crate::origin::{Connections, Credentials, Origin, OriginLimits, OriginTarget};
use crate::served::{Accelerator, Served};
use crate::store::{DriveSpec, Store, StoreOptions, WriterEngine};
use crate::tls::Certificates;

/// Connections that the kernel keeps for us while we are busy.
const BACKLOG: i32 = 4096;
/// How what is sent to a loopback address is controlled: without pacing, and every kernel has it.
const SAME_HOST_CONGESTION: &[u8] = b"reno";
/// How long a bind is repeated: the ring of a node that was killed holds its port for a moment.
const BIND_PATIENCE: Duration = Duration::from_secs(5);
const BIND_PAUSE: Duration = Duration::from_millis(50);
/// Between two looks at who is still being served.
const DRAIN_PAUSE: Duration = Duration::from_millis(10);
/// Longest pause of the thread that keeps the memory.
const MEMORY_PACE: Duration = Duration::from_secs(1);
/// How long a reader may hold a page that was renewed, as far as it is counted, and how many pages, one in so many, may
/// be renewed in that time before nothing more is lent.
const LENT_FOR: Duration = Duration::from_mins(1);
const LENT_SHARE: u64 = 4;
/// What is registered is looked at when one page in so many has been renewed since.
const REGISTER_SHARE: u64 = 32;
/// What is spoken over TLS at the HTTPS door.
const HTTPS_PROTOCOLS: &[&[u8]] = &[b"http/1.1"];
/// Threads of each worker that look up names.
const LOOK_UPS: usize = 2;

/// Serves until a signal or an order to drain, then finishes what was begun.
///
/// # Errors
/// Anything that keeps the node from starting, with what to do about it.
pub fn run(config: &Config) -> Result<()> {
    let limits = Limits::derive(config)?;
    let certificates = certificates(config)?;
    config::raise_descriptor_limit().context("raising the limit of open files")?;
    let engine = choose_engine(config.engine)?;
    let arena = Arena::build(ArenaOptions {
        bytes: limits.arena_bytes as usize,
        reads_bytes: limits.reads_reserve_bytes as usize,
        fills_bytes: limits.fills_reserve_bytes as usize,
    })
    .with_context(|| format!("taking {} of memory; give a smaller --memory", config.memory))?;
    let registry = (engine == EngineKind::Uring).then(|| register(arena)).flatten();
    let drives = open_drives(config, &limits, engine)?;
    let metrics = Metrics::new();
    metrics.set(Gauge::Engine(engine), 1);
    let agent = config.control.as_ref().map(|control| Agent::new(config, control)).transpose()?;
    let configured = configured(config)?;
    let node = Node::new(
        arena,
        drives.clone().map_or(Drives::None, Drives::Store),
        match &agent {
            Some(agent) => agent.served(configured),
            None => configured,
        },
        limits,
        metrics,
    );
    if let Some(agent) = &agent {
        agent.prepare(&node);
    }
    let credentials =
        if agent.is_some() || node.served().all().any(|(_, accelerator)| accelerator.target.is_signed()) {
            house_runtime()?.block_on(Credentials::discover()).context("origin credentials")?
        } else {
            Credentials::anonymous()
        };
    let admin = AdminDoor::bind(&config.admin, config.admin_token.clone())?;
    let workers = config.cores.workers.len();
    let send_queue_bytes = node.limits.send_queue_bytes_per_connection_max;
    let (addresses, plain) = bind(&config.listen, workers, send_queue_bytes)?;
    let (tls_addresses, encrypted) = bind(&config.listen_tls, workers, send_queue_bytes)?;
    let mut listeners: Vec<Listeners> = plain
        .into_iter()
        .map(|sockets| sockets.into_iter().map(|socket| (socket, Wire::Plain)).collect())
        .collect();
    if let Some(certificates) = &certificates {
        let wire = Wire::Tls(certificates.server_config(HTTPS_PROTOCOLS));
        for (listeners, sockets) in listeners.iter_mut().zip(encrypted) {
            listeners.extend(sockets.into_iter().map(|socket| (socket, wire.clone())));
        }
    }
    let (listen_quic, quic_sockets) = http3::bind(&config.listen_quic, workers)?;
    let quic = certificates
        .as_deref()
        .map(|certificates| quic_door(config, &listen_quic, certificates, &node.limits))
        .transpose()?
        .flatten();
    let shown = Config {
        listen: addresses.clone(),
        listen_tls: tls_addresses.clone(),
        listen_quic,
        admin: admin.address()?,
        ..config.clone()
    };

    let is_registered = registry.is_some();
    let start = Start {
        node: Arc::clone(&node),
        engine,
        registered: registry.as_ref().map(uring::Registry::registered),
        credentials: credentials.clone(),
        quic,
    };
    let sockets = listeners.into_iter().zip(quic_sockets).collect();
    let (peers, _workers) = start_workers(&start, config, sockets)?;
    keep_memory(arena, registry, peers.clone());
    let (drain, drained) = mpsc::unbounded_channel();
    let door: Arc<dyn NodeDoor> = Arc::new(Door {
        node: Arc::clone(&node),
        peers: peers.clone(),
        cores: config.cores.workers.clone(),
        addresses: addresses.clone(),
        tls_addresses: tls_addresses.clone(),
        engine,
        is_registered,
        standing: agent.as_ref().map(Agent::standing),
        store: drives.clone(),
        drain,
        started: now(),
    });
    // Only now: threads inherit where they are pinned and how nice they are.
    config.cores.settle_house_thread();
    let runtime = house_runtime()?;
    // Before anybody hears that the node is there: a signal that found no ear would end it in the middle of what it
    // sends.
    let signals = {
        let _entered = runtime.enter();
        Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: certificates.is_some().then(|| signal(SignalKind::hangup())).transpose()?,
        }
    };
    let door = admin.spawn(door, &config.cores)?;
    println!("{}", config::banner(&shown, certificates.as_deref()));
    let house =
        House { node: Arc::clone(&node), workers: peers.clone(), credentials, addresses, tls_addresses };
    runtime.block_on(async {
        let speaking = async {
            match agent {
                Some(agent) => agent.run(house).await,
                None => pending().await,
            }
        };
        tokio::select! {
            kept = keep_house(config, &node, &peers, drained, certificates.as_deref(), signals) => kept,
            never = speaking => never,
        }
    });
    // A disk that hangs keeps nobody from ending.
    runtime.shutdown_background();
    door.stop();
    if let Some(store) = drives {
        store.close();
    }
    // The workers end with the process: their connections are done or out of time.
    tracing::info!("stopped");
    Ok(())
}

/// The time of day has no part in this: deadlines of a process that is starting or ending.
#[expect(clippy::disallowed_methods, reason = "outside the workers there is no other clock")]
fn now() -> Instant {
    Instant::now()
}

fn choose_engine(choice: EngineChoice) -> Result<EngineKind> {
    let report = probe::report();
    match (choice, report.refusal()) {
        (EngineChoice::Portable, _) => Ok(EngineKind::Portable),
        (_, None) => Ok(EngineKind::Uring),
        (EngineChoice::Uring, Some(refusal)) => {
            bail!("--engine uring: {} is not granted here: {}", refusal.what, refusal.remark)
        }
        (EngineChoice::Auto, Some(refusal)) => {
            tracing::warn!(
                what = refusal.what,
                why = %refusal.remark,
                "io_uring is not granted here: serving with the portable engine, which costs more CPU a byte"
            );
            Ok(EngineKind::Portable)
        }
    }
}

fn register(arena: &'static Arena) -> Option<uring::Registry> {
    match uring::Registry::build(arena) {
        Ok(registry) => Some(registry),
        Err(error) => {
            tracing::warn!(
                %error,
                "memory cannot be registered with the kernel: going on without; raise the memlock limit \
                 (LimitMEMLOCK=infinity) or grant CAP_IPC_LOCK"
            );
            None
        }
    }
}

fn open_drives(config: &Config, limits: &Limits, engine: EngineKind) -> Result<Option<Arc<Store>>> {
    if config.drives.is_empty() {
        return Ok(None);
    }
    let specs: Vec<_> = config
        .drives
        .iter()
        .map(|drive| DriveSpec {
            path: drive.path.clone(),
            size: drive.size.map(forebay_control_api::ByteSize::bytes),
        })
        .collect();
    for drive in config.drives.iter().filter(|drive| !drive.exists) {
        println!("making {} of {} bytes", drive.path.display(), drive.bytes);
    }
    let options = StoreOptions {
        engine: if engine == EngineKind::Uring { WriterEngine::Auto } else { WriterEngine::Portable },
        // The store counts each drive's queue for itself.
        queue_bytes: (limits.writer_queue_bytes / specs.len() as u64)
            .max(u64::from(StoreOptions::default().body_bytes_max)),
        ..StoreOptions::default()
    };
    let store = Store::open(&specs, options)?;
    for note in store.notes() {
        tracing::warn!("{note}");
    }
    Ok(Some(store))
}

/// What the command line and the file say, and nobody else.
fn configured(config: &Config) -> Result<Served> {
    let accelerators = config
        .accelerators
        .iter()
        .map(|spec| Accelerator::of(spec).with_context(|| format!("accelerator {}", spec.name)))
        .collect::<Result<Vec<_>>>()?;
    Ok(Served::new(accelerators, keys(config)?))
}

fn keys(config: &Config) -> Result<Keys> {
    let mut keys = Keys::new(config.anonymous);
    for key in &config.keys {
        keys.add(&key.access_key, key.secret_key.reveal())?;
    }
    Ok(keys)
}

/// The certificate of the doors that show one.
fn certificates(config: &Config) -> Result<Option<Arc<Certificates>>> {
    if config.listen_tls.is_empty() && config.listen_quic.is_empty() {
        return Ok(None);
    }
    if let Some(files) = &config.tls_files {
        return Ok(Some(Certificates::open(files)?));
    }
    let certificates = Certificates::self_signed(&[&*config.listen_tls, &config.listen_quic].concat())?;
    tracing::warn!(
        sha256 = certificates.fingerprint(),
        "a self-signed certificate, a new one with every start: no client trusts it until it is told to; \
         give a real one with --cert PEM --key PEM"
    );
    Ok(Some(certificates))
}

/// A worker's sockets, and what their connections speak.
type Listeners = Vec<(OwnedFd, Wire)>;

/// For each worker its own socket on every address: the kernel spreads connections over them. The addresses as they
/// are, then the sockets of each worker.
fn bind(
    addresses: &[SocketAddr],
    workers: usize,
    send_queue_bytes: u64,
) -> Result<(Vec<SocketAddr>, Vec<Vec<OwnedFd>>)> {
    let mut addresses = addresses.to_vec();
    let mut all = Vec::new();
    for worker in 0..workers {
        let mut sockets = Vec::new();
        for address in &mut addresses {
            // From the second worker on, the port is taken: by us.
            let socket = bind_one(*address, worker == 0)
                .with_context(|| format!("listening on {address}; is another program on that port?"))?;
            // Accepted sockets inherit it.
            socket.set_tcp_notsent_lowat(u32::try_from(send_queue_bytes).unwrap_or(u32::MAX))?;
            // Port 0 means any, but the same for all workers.
            *address = socket.local_addr()?.as_socket().context("an internet address")?;
            sockets.push(socket.into());
        }
        all.push(sockets);
    }
    Ok((addresses, all))
}

fn bind_one(address: SocketAddr, must_be_free: bool) -> io::Result<RawSocket> {
    let socket = RawSocket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if must_be_free && address.port() != 0 {
        probe_port(address)?;
    }
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    if address.ip().is_loopback() {
        // Between processes of one machine there is no path whose rate could be found out. BBR takes the pace at which
        // the reader was scheduled for one and sends by timers at that pace. Accepted sockets inherit this; told later
        // they would go on pacing. A kernel that does not have it keeps its own.
        let _ = socket.set_tcp_congestion(SAME_HOST_CONGESTION);
    }
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// Another process of the same user could share the port without a word and take half of the connections.
fn probe_port(address: SocketAddr) -> io::Result<()> {
    let until = now() + BIND_PATIENCE;
    loop {
        let probe = RawSocket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        probe.set_reuse_address(true)?;
        match probe.bind(&address.into()) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && now() < until => {
                thread::sleep(BIND_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}

/// HTTP/3, and what answers over HTTP/1.1 say of it.
#[derive(Clone)]
struct Quic {
    door: http3::Door,
    /// And whether also in plain text; `None` if nowhere.
    alt_svc: Option<(Arc<str>, bool)>,
}

fn quic_door(
    config: &Config,
    addresses: &[SocketAddr],
    certificates: &Certificates,
    limits: &Limits,
) -> Result<Option<Quic>> {
    if addresses.is_empty() {
        return Ok(None);
    }
    let tls = certificates.server_config(&[http3::ALPN]);
    let door = http3::Door::new(tls, limits, config.cores.workers.len()).context("listen-quic")?;
    let alt_svc = (config.alt_svc != AltSvc::None)
        .then(|| (http3::alt_svc(addresses).into(), config.alt_svc == AltSvc::All));
    Ok(Some(Quic { door, alt_svc }))
}

/// What a worker listens on.
type Sockets = (Listeners, Vec<UdpSocket>);

struct Start {
    node: Arc<Node>,
    engine: EngineKind,
    registered: Option<uring::Registered>,
    credentials: Credentials,
    quic: Option<Quic>,
}

type Handles = Vec<thread::JoinHandle<()>>;

fn start_workers(start: &Start, config: &Config, sockets: Vec<Sockets>) -> Result<(Box<[Peer]>, Handles)> {
    let (peers, orders): (Vec<_>, Vec<_>) = config
        .cores
        .workers
        .iter()
        .map(|_| {
            let (orders, received) = mpsc::unbounded_channel();
            (Peer { load: Arc::new(AtomicUsize::new(0)), orders }, received)
        })
        .unzip();
    let peers = peers.into_boxed_slice();
    let (report, reports) = std::sync::mpsc::channel();
    let mut handles = Vec::new();
    let parts = config.cores.workers.iter().zip(sockets).zip(orders).enumerate();
    for (index, ((core, sockets), orders)) in parts {
        let setup = Setup {
            node: Arc::clone(&start.node),
            engine: start.engine,
            send: config.send,
            registered: start.registered.clone(),
            credentials: start.credentials.clone(),
            quic: start.quic.clone(),
            peers: peers.clone(),
            index,
            core: *core,
            blocking_threads: LOOK_UPS + READS_MAX * config.drives.len(),
        };
        let report = report.clone();
        let handle = thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
            core_affinity::set_for_current(core_affinity::CoreId { id: setup.core });
            let runtime = Builder::new_current_thread()
                .enable_all()
                .max_blocking_threads(setup.blocking_threads)
                .build_local(LocalOptions::default());
            let served = runtime
                .map_err(anyhow::Error::from)
                .and_then(|runtime| runtime.block_on(setup.serve(sockets, orders, &report)));
            if let Err(error) = served {
                // Nobody listens any more once all workers have started.
                let _ = report.send(Err(error));
            }
        });
        handles.push(handle.context("starting a worker")?);
    }
    drop(report);
    for _ in &handles {
        reports.recv().context("a worker ended while it started")??;
    }
    Ok((peers, handles))
}

struct Setup {
    node: Arc<Node>,
    engine: EngineKind,
    send: Sends,
    registered: Option<uring::Registered>,
    credentials: Credentials,
    quic: Option<Quic>,
    peers: Box<[Peer]>,
    index: usize,
    core: usize,
    blocking_threads: usize,
}

impl Setup {
    async fn serve(
        self,
        (listeners, quic_sockets): Sockets,
        orders: mpsc::UnboundedReceiver<Order>,
        report: &std::sync::mpsc::Sender<Result<()>>,
    ) -> Result<()> {
        let engine = match self.engine {
            EngineKind::Uring => {
                let workers = self.peers.len() as u64;
                let policy = SendPolicy {
                    sends: self.send,
                    zero_copy_bytes_max: self.node.limits.zero_copy_bytes_max / workers,
                    zero_copy_bytes_per_connection_max: self.node.limits.send_pinned_bytes_per_connection_max,
                };
                Engine::Uring(uring::Ring::start(policy).context("starting a ring")?)
            }
            _ => Engine::Portable(Portable { sends: self.send }),
        };
        let limits = &self.node.limits;
        let connections = Connections::new(limits.origin_connections_max as usize / self.peers.len());
        let patience = OriginLimits {
            first_byte: limits.request_deadline,
            idle: limits.request_deadline,
            ..OriginLimits::default()
        };
        let credentials = self.credentials;
        let open = move |target: &OriginTarget| Origin::open(target, &credentials, patience, &connections);
        let arena = self.node.arena;
        let worker = Worker::start(self.node, engine.clone(), &open, self.index, self.peers)?;
        if self.index == 0 {
            for (index, accelerator) in worker.served().all() {
                let origin = worker.origin(index).expect("opened a moment ago");
                tracing::info!(
                    accelerator = &*accelerator.name,
                    origin = origin.describe(),
                    credentials = %origin.credential_source(),
                    "accelerating"
                );
            }
        }
        let register = move |registered: &uring::Registered| {
            if let Engine::Uring(ring) = &engine
                && let Err(error) = ring.register(arena, registered)
            {
                tracing::warn!(%error, "a worker goes on without registered memory");
            }
        };
        if let Some(registered) = &self.registered {
            register(registered);
        }
        for (listener, wire) in listeners {
            let listener = worker.engine.adopt(listener)?;
            task::spawn(Rc::clone(&worker).accept(listener, wire));
        }
        if let Some(Quic { door, alt_svc }) = self.quic {
            let admission = http3::Admission::new(&worker.node.limits, door.workers());
            for socket in quic_sockets {
                let endpoint = door.open(self.index, socket).context("listen-quic")?;
                task::spawn(http3::serve(Rc::clone(&worker), endpoint, Rc::clone(&admission)));
            }
            if let Some((text, in_plain_text)) = alt_svc {
                worker.advertise(text, in_plain_text);
            }
        }
        // The receiver is gone only if the start has failed elsewhere.
        let _ = report.send(Ok(()));
        worker.obey(orders, register, &open).await;
        pending().await
    }
}

/// Brings the other chunks of a large arena while the node serves with its first, and then keeps what is
/// registered the same as what is used.
fn keep_memory(arena: &'static Arena, registry: Option<uring::Registry>, peers: Box<[Peer]>) {
    let keep = move || {
        let mut registry = registry;
        loop {
            match arena.join_chunk() {
                Ok(Some(_)) => register_anew(arena, registry.as_mut(), &peers),
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "the kernel gives no more memory: serving with what there is");
                    break;
                }
            }
        }
        let status = arena.status();
        let pages = status.bytes / PAGE_BYTES as u64;
        if let Some(huge) = status.pages_huge.filter(|huge| huge * 10 < pages * 9) {
            tracing::warn!(
                huge,
                pages,
                "memory is in pieces: the kernel had no huge pages for the rest, and hot bytes cost more to send from there; \
                 echo 1 >/proc/sys/vm/compact_memory, then start the node again"
            );
        }
        // The registry is what the workers' registrations are cloned from: it stays as long as this thread.
        let mut registered = arena.renewals();
        let mut history = VecDeque::from([(now(), registered)]);
        loop {
            arena.wait_spent(MEMORY_PACE);
            while arena.renew_spent() {}
            let renewals = arena.renewals();
            if (renewals - registered) * REGISTER_SHARE >= pages.max(REGISTER_SHARE) {
                registered = renewals;
                register_anew(arena, registry.as_mut(), &peers);
            }
            watch_lending(arena, &mut history, pages, now());
        }
    };
    if let Err(error) = thread::Builder::new().name("memory".into()).spawn(keep) {
        tracing::warn!(%error, "serving with the first chunk of memory only");
    }
}

/// Pages that slow readers may still hold come on top of the arena, and nobody tells when they let go: while too many
/// have been renewed lately, nothing more is lent.
fn watch_lending(arena: &Arena, history: &mut VecDeque<(Instant, u64)>, pages: u64, now: Instant) {
    let renewals = arena.renewals();
    if history.back().is_none_or(|(then, _)| now.duration_since(*then) >= MEMORY_PACE) {
        history.push_back((now, renewals));
    }
    while history.len() > 1 && now.duration_since(history[0].0) > LENT_FOR {
        history.pop_front();
    }
    let lately = renewals - history.front().map_or(renewals, |(_, before)| *before);
    let is_lending = lately * LENT_SHARE <= pages;
    if is_lending != arena.is_lending() {
        tracing::info!(lately, pages, is_lending, "pages of memory that slow readers may still hold");
        arena.set_lending(is_lending);
    }
}

fn register_anew(arena: &Arena, registry: Option<&mut uring::Registry>, peers: &[Peer]) {
    let Some(registry) = registry else { return };
    if let Err(error) = registry.refresh(arena) {
        tracing::warn!(%error, "a chunk of memory stays unregistered");
    }
    for peer in peers {
        // A worker that is gone registers nothing.
        let _ = peer.orders.send(Order::Register(registry.registered()));
    }
}

fn house_runtime() -> Result<tokio::runtime::Runtime> {
    Builder::new_current_thread().enable_all().build().context("starting the house runtime")
}

/// What the operator says by signals.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// Without a door that shows a certificate the node leaves it alone.
    hangup: Option<Signal>,
}

/// Reads the certificate again whenever the operator says so (SIGHUP). Does not end.
async fn reload_at_hangup(node: &Node, certificates: Option<&Certificates>, hangup: Option<Signal>) -> ! {
    if let Some((certificates, mut hangup)) = certificates.zip(hangup) {
        while hangup.recv().await.is_some() {
            let outcome = match certificates.reload() {
                Ok(true) => {
                    tracing::info!(
                        sha256 = certificates.fingerprint(),
                        "certificate and key were read again"
                    );
                    Reload::Loaded
                }
                Ok(false) => {
                    tracing::warn!(
                        "SIGHUP: the certificate is self-signed; there are no files to read again"
                    );
                    continue;
                }
                Err(error) => {
                    tracing::error!(
                        error = format!("{:#}", anyhow::Error::from(error)),
                        sha256 = certificates.fingerprint(),
                        "SIGHUP: the certificate stays as it was"
                    );
                    Reload::Refused
                }
            };
            node.metrics.bump(Counter::CertificateReloads(outcome), 1);
        }
    }
    pending().await
}

/// Waits for the end, then for those who are still being served.
async fn keep_house(
    config: &Config,
    node: &Node,
    peers: &[Peer],
    mut drain: mpsc::UnboundedReceiver<()>,
    certificates: Option<&Certificates>,
    Signals { mut terminate, mut interrupt, hangup }: Signals,
) {
    let why = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = drain.recv() => "an order at the admin door",
        never = reload_at_hangup(node, certificates, hangup) => never,
    };
    tracing::info!(why, connections = node.connections(), "draining");
    node.set_draining();
    for peer in peers {
        // A worker that is gone has nothing to drain.
        let _ = peer.orders.send(Order::Drain);
    }
    let until = now() + config.drain;
    while node.connections() > 0 && now() < until {
        tokio::time::sleep(DRAIN_PAUSE).await;
    }
    if node.connections() > 0 {
        tracing::warn!(connections = node.connections(), "drain ended by its deadline");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The slowest answers of 1 MiB took three times as long as nginx's on a machine whose default is BBR: what is sent
    // to a reader on the same machine must not be paced, from the first segment on.
    #[test]
    fn what_is_accepted_on_loopback_is_not_paced() {
        let listener = bind_one("127.0.0.1:0".parse().expect("an address"), true).expect("bound");
        let address = listener.local_addr().expect("bound").as_socket().expect("an address");
        let _client = std::net::TcpStream::connect(address).expect("connected");
        listener.set_nonblocking(false).expect("told");
        let (accepted, _) = listener.accept().expect("accepted");
        let name = accepted.tcp_congestion().expect("a name");
        assert!(name.starts_with(SAME_HOST_CONGESTION), "{}", String::from_utf8_lossy(&name));
    }

    #[test]
    fn other_addresses_keep_the_machine_s_congestion_control() {
        let any = bind_one("0.0.0.0:0".parse().expect("an address"), true).expect("bound");
        let unbound = RawSocket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).expect("a socket");
        assert_eq!(any.tcp_congestion().expect("a name"), unbound.tcp_congestion().expect("a name"));
    }
}
