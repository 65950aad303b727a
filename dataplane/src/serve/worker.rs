//! One core's world: its engine, its origins, its connections, its clock.
//!
//! A connection is placed once, after accept and before its first byte, on the worker with the fewest; then it
//! stays for life. The sweep, ten times a second, turns the coarse clock, renews the text of the date, and
//! ends sends that hold leases without moving.
#![forbid(unsafe_code)]

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use slab::Slab;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::link::{Wire, ciphertext_spares};
use super::spares::Spares;
use super::stream::RAM_SAMPLE;
use super::{connection, prewarm};
use crate::agent::Job;
use crate::auth::Keys;
use crate::engine::uring::Registered;
use crate::engine::{Engine, SendWatch, Socket, task};
use crate::http1::{DateText, date_text};
use crate::metrics::{CloseReason, Counter, Door, Gauge, Limit, WorkerCounters};
use crate::node::Node;
use crate::origin::{Connections, Origin, OriginError, OriginTarget};
use crate::peer::Peers;
use crate::policy::Decision;
use crate::served::{Accelerator, Served};

/// Length of a tick.
pub(super) const TICK: Duration = Duration::from_millis(100);
/// Ticks that a send may hold its leases: when memory is asked for, and when it is not.
const HOLD_TICKS_PRESSED: u32 = 2;
const HOLD_TICKS: u32 = 10;
/// Bodies of deletions, of at most [`BODY_BYTES_MAX`](crate::dialect::changes::BODY_BYTES_MAX) each, that a worker holds
/// at a time.
const DELETIONS_HELD_MAX: usize = 4;
/// Room for the head of a request or an answer, bytes. It grows with what is in it, up to the limit of a head.
const ROOM_BYTES: usize = 8 << 10;
/// Rooms that are kept while no connection needs them, two for each that is busy.
const ROOMS_MAX: usize = 128;
/// Pause after an accept that failed, so that a full table of files does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What another thread asks of a worker.
#[derive(Debug)]
pub enum Order {
    /// Serve this connection, which speaks so.
    Connection(OwnedFd, Wire),
    /// The arena has grown, or much of it is new: this can be registered.
    Register(Registered),
    /// Serve this from now on; say what of it cannot be, and drop the sender when it is so.
    Serve(Arc<Served>, mpsc::UnboundedSender<Unopened>),
    /// Read a prefix ahead of its readers.
    Prewarm(Arc<Job>),
    /// Finish what there is.
    Drain,
}

/// An accelerator that a worker cannot serve, because it cannot open its origin.
#[derive(Debug)]
pub struct Unopened {
    /// Its name.
    pub accelerator: Box<str>,
    /// Why not.
    pub error: OriginError,
}

/// A worker as the others see it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its connections.
    pub load: Arc<AtomicUsize>,
    /// How to reach it.
    pub orders: mpsc::UnboundedSender<Order>,
}

/// What a worker serves, at hand: counted by this core alone.
#[derive(Debug)]
pub struct Here {
    served: Arc<Served>,
    /// By index of the accelerator.
    origins: Vec<Place>,
    /// The other nodes of the fleet.
    pub(crate) peers: Rc<Peers>,
}

/// The origin of an index.
#[derive(Clone, Debug)]
enum Place {
    /// It could not be opened, or nothing is left of it.
    None,
    /// An accelerator's.
    Open(Rc<Origin>),
    /// Its accelerator was removed: it is there for as long as what was under way needs it.
    Leaving(Weak<Origin>),
}

impl Place {
    fn origin(&self) -> Option<Rc<Origin>> {
        match self {
            Self::None => None,
            Self::Open(origin) => Some(Rc::clone(origin)),
            Self::Leaving(origin) => origin.upgrade(),
        }
    }

    fn leaving(&self) -> Self {
        match self {
            Self::Open(origin) => Self::Leaving(Rc::downgrade(origin)),
            Self::Leaving(origin) if origin.strong_count() > 0 => self.clone(),
            Self::None | Self::Leaving(_) => Self::None,
        }
    }
}

impl std::ops::Deref for Here {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.served
    }
}

/// How a worker prepares an origin.
pub type OpenOrigin = dyn Fn(&OriginTarget) -> Result<Origin, OriginError>;

/// One worker.
#[derive(Debug)]
pub struct Worker {
    /// What it shares with the others.
    pub node: Arc<Node>,
    /// Its way to the kernel.
    pub engine: Engine,
    /// Its counters.
    pub counters: WorkerCounters,
    here: RefCell<Rc<Here>>,
    index: usize,
    peers: Box<[Peer]>,
    tick: Cell<u32>,
    date: Cell<DateText>,
    wall: Cell<SystemTime>,
    requests: Cell<u64>,
    samples: Cell<u64>,
    sends: RefCell<Slab<Rc<SendWatch>>>,
    drain: Notify,
    pinned_bytes: Cell<u64>,
    unpinned: Notify,
    pinning: Cell<usize>,
    deletions: Cell<usize>,
    /// Ciphertext that waits for readers who pause, bytes.
    held_ciphertext: Cell<u64>,
    /// For ciphertext.
    pub(super) spares: Spares,
    /// For heads.
    pub(super) rooms: Spares,
    /// What HTTP/1.1 says in `Alt-Svc`, and whether also in plain text.
    alt_svc: OnceCell<(Arc<str>, bool)>,
}

impl Worker {
    /// A worker of these parts; its sweep runs from now on. `peers` are all workers, this one at `index`.
    ///
    /// # Errors
    /// An origin cannot be opened.
    pub fn start(
        node: Arc<Node>,
        engine: Engine,
        open: &OpenOrigin,
        index: usize,
        peers: Box<[Peer]>,
    ) -> Result<Rc<Self>, OriginError> {
        let share = node.limits.peer_connections_max as usize / peers.len().max(1);
        let nothing = Here {
            served: Arc::new(Served::new([], Keys::new(false))),
            origins: Vec::new(),
            peers: Rc::new(Peers::new(Connections::new(share))),
        };
        let (here, unopened) = nothing.next(node.served(), open);
        if let Some(Unopened { error, .. }) = unopened.into_iter().next() {
            return Err(error);
        }
        let wall = SystemTime::now();
        let worker = Rc::new(Self {
            counters: node.metrics.writer(),
            node,
            engine,
            here: RefCell::new(Rc::new(here)),
            index,
            peers,
            tick: Cell::new(0),
            date: Cell::new(date_text(wall)),
            wall: Cell::new(wall),
            requests: Cell::new(0),
            samples: Cell::new(0),
            sends: RefCell::default(),
            drain: Notify::new(),
            pinned_bytes: Cell::new(0),
            unpinned: Notify::new(),
            pinning: Cell::new(0),
            deletions: Cell::new(0),
            held_ciphertext: Cell::new(0),
            spares: ciphertext_spares(),
            rooms: Spares::new(ROOM_BYTES, ROOMS_MAX),
            alt_svc: OnceCell::new(),
        });
        task::spawn(sweep(Rc::downgrade(&worker)));
        Ok(worker)
    }

    /// What this worker serves now.
    pub fn served(&self) -> Rc<Here> {
        Rc::clone(&self.here.borrow())
    }

    /// What holds for a key of an accelerator at `now`, unless that was removed.
    pub fn decide(&self, accelerator: u16, key: &[u8], now: Instant) -> Option<Decision> {
        self.here.borrow().at(accelerator).map(|accelerator| self.node.decide(accelerator, key, now))
    }

    /// The accelerator of an index, unless it was removed. Counted by all cores: for misses and writes.
    pub fn accelerator(&self, index: u16) -> Option<Arc<Accelerator>> {
        self.here.borrow().at(index).cloned()
    }

    /// The origin of an accelerator; also of one that was removed, for as long as somebody holds it.
    pub fn origin(&self, accelerator: u16) -> Option<Rc<Origin>> {
        self.here.borrow().origins.get(usize::from(accelerator))?.origin()
    }

    /// Serves this from now on. What is under way ends as it began, and origins that stay keep their connections.
    fn serve_anew(&self, served: Arc<Served>, open: &OpenOrigin) -> Vec<Unopened> {
        let (here, unopened) = self.served().next(served, open);
        *self.here.borrow_mut() = Rc::new(here);
        unopened
    }

    /// Accepts for ever; `wire` is what the listener's connections speak.
    pub async fn accept(self: Rc<Self>, listener: Socket, wire: Wire) {
        loop {
            match self.engine.accept(&listener).await {
                Ok(fd) => self.place(fd, &wire),
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Gives a connection to the worker with the fewest.
    fn place(self: &Rc<Self>, fd: OwnedFd, wire: &Wire) {
        if self.node.is_draining() || !self.node.admit_connection() {
            // Closed without a word: whoever comes next may find room, and a reply would need a request.
            self.counters.bump(Counter::LimitRefusals(Limit::Connections), 1);
            return;
        }
        let own = self.peers[self.index].load.load(Ordering::Relaxed);
        let (least, fewest) = self
            .peers
            .iter()
            .map(|peer| peer.load.load(Ordering::Relaxed))
            .enumerate()
            .min_by_key(|(_, load)| *load)
            .unwrap_or((self.index, own));
        let chosen = if fewest + 1 < own { least } else { self.index };
        self.peers[chosen].load.fetch_add(1, Ordering::Relaxed);
        if chosen == self.index {
            self.take(fd, wire.clone());
        } else if self.peers[chosen].orders.send(Order::Connection(fd, wire.clone())).is_err() {
            self.peers[chosen].load.fetch_sub(1, Ordering::Relaxed);
            self.node.release_connection();
        }
    }

    /// Serves a connection that was placed here.
    pub fn take(self: &Rc<Self>, fd: OwnedFd, wire: Wire) {
        let admitted = Admitted(Rc::clone(self));
        // Small answers leave at once; a socket that does not know the option is gone already.
        let _ = socket2::SockRef::from(&fd).set_tcp_nodelay(true);
        match self.engine.adopt(fd) {
            Ok(socket) => {
                task::spawn(async move {
                    Rc::clone(&admitted.0).serve(socket, wire).await;
                    drop(admitted);
                });
            }
            Err(error) => tracing::warn!(%error, "connection not taken"),
        }
    }

    /// Serves a socket until its end.
    pub async fn serve(self: Rc<Self>, socket: Socket, wire: Wire) {
        let door = match wire {
            Wire::Plain => Door::Http,
            Wire::Tls(_) => Door::Https,
        };
        self.count_connection(door, Box::pin(connection::serve(&self, socket, &wire))).await;
    }

    /// Counts a connection while it is served, and why it ended.
    pub(super) async fn count_connection(&self, door: Door, serving: impl Future<Output = CloseReason>) {
        self.counters.bump(Counter::ConnectionsOpened(door), 1);
        self.counters.adjust(Gauge::Connections, 1);
        let _open = Open(self);
        let reason = serving.await;
        self.counters.bump(Counter::ConnectionsClosed(reason), 1);
    }

    /// Whether one more connection might find a place.
    pub(super) fn has_room(&self) -> bool {
        !self.node.is_draining() && self.node.connections() < u64::from(self.node.limits.connections_max)
    }

    /// A place for a connection that came to this worker and stays here; `None` while the node drains or is full.
    pub(super) fn admit(self: &Rc<Self>) -> Option<Admitted> {
        (!self.node.is_draining() && self.node.admit_connection()).then(|| {
            self.peers[self.index].load.fetch_add(1, Ordering::Relaxed);
            Admitted(Rc::clone(self))
        })
    }

    /// From now on answers over HTTPS, and over plain HTTP if `in_plain_text`, name this alternative service (RFC 7838).
    pub(super) fn advertise(&self, alt_svc: Arc<str>, in_plain_text: bool) {
        // Said once, at the start.
        let _ = self.alt_svc.set((alt_svc, in_plain_text));
    }

    /// What an answer over HTTP/1.1 says in `Alt-Svc`.
    pub(super) fn alt_svc(&self, is_encrypted: bool) -> Option<&str> {
        let (text, in_plain_text) = self.alt_svc.get()?;
        (is_encrypted || *in_plain_text).then_some(text)
    }

    /// Carries out orders until the other side is gone. `register` is what to do when the arena has
    /// changed; `open` prepares origins.
    pub async fn obey(
        self: Rc<Self>,
        mut orders: mpsc::UnboundedReceiver<Order>,
        register: impl Fn(&Registered),
        open: &OpenOrigin,
    ) {
        while let Some(order) = orders.recv().await {
            match order {
                Order::Connection(fd, wire) => self.take(fd, wire),
                Order::Register(registered) => register(&registered),
                Order::Serve(served, done) => {
                    for unopened in self.serve_anew(served, open) {
                        // Whoever gave the order may have gone meanwhile.
                        let _ = done.send(unopened);
                    }
                }
                Order::Prewarm(job) => {
                    task::spawn(prewarm::prewarm(Rc::clone(&self), job));
                }
                Order::Drain => self.drain(),
            }
        }
    }

    /// Tells idle connections to end.
    pub fn drain(&self) {
        self.drain.notify_waiters();
    }

    /// Ends when the worker is told to drain.
    pub(super) async fn drained(&self) {
        let told = self.drain.notified();
        if !self.node.is_draining() {
            told.await;
        }
    }

    /// The date as of this tick.
    pub(super) fn date(&self) -> DateText {
        self.date.get()
    }

    /// The time of day as of this tick.
    pub(super) fn wall_time(&self) -> SystemTime {
        self.wall.get()
    }

    pub(super) fn tick(&self) -> u32 {
        self.tick.get()
    }

    /// A name for a request, unique in this process.
    pub(super) fn request_id(&self) -> RequestId {
        let number = self.requests.get() + 1;
        self.requests.set(number);
        RequestId::new(self.index, number)
    }

    /// True once in [`RAM_SAMPLE`] calls.
    pub(super) fn is_sampled(&self) -> bool {
        let sample = self.samples.get() + 1;
        self.samples.set(sample % RAM_SAMPLE);
        sample == RAM_SAMPLE
    }

    /// Watches the sends of a connection until the guard is dropped.
    pub(super) fn watch(self: &Rc<Self>) -> WatchGuard {
        let watch = Rc::new(SendWatch::default());
        let key = self.sends.borrow_mut().insert(Rc::clone(&watch));
        WatchGuard { worker: Rc::clone(self), watch, key }
    }

    /// Waits until the network holds few enough of our bytes to lend it `bytes` more.
    pub(super) async fn pin(&self, bytes: u64) -> Pinned<'_> {
        let share = (self.node.limits.send_pinned_bytes_max / self.peers.len().max(1) as u64).max(1);
        if self.pinned_bytes.get() > 0 && self.pinned_bytes.get() + bytes > share {
            self.counters.bump(Counter::LimitRefusals(Limit::Pinned), 1);
            self.pinning.set(self.pinning.get() + 1);
            let _waiting = Waiting(&self.pinning);
            loop {
                let unpinned = self.unpinned.notified();
                if self.pinned_bytes.get() == 0 || self.pinned_bytes.get() + bytes <= share {
                    break;
                }
                unpinned.await;
            }
        }
        self.pinned_bytes.set(self.pinned_bytes.get() + bytes);
        Pinned { worker: self, bytes }
    }

    /// Bytes that the network holds of ours.
    #[cfg(test)]
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes.get()
    }

    /// The right to hold the body of a deletion while it is read; `None` if enough are held.
    pub(super) fn hold_deletion(&self) -> Option<HeldDeletion<'_>> {
        let held = self.deletions.get();
        (held < DELETIONS_HELD_MAX).then(|| {
            self.deletions.set(held + 1);
            HeldDeletion(&self.deletions)
        })
    }

    /// The right to keep ciphertext for a reader who pauses.
    ///
    /// # Errors
    /// Too much is kept already.
    pub(super) fn hold_ciphertext(self: &Rc<Self>, bytes: usize) -> io::Result<HeldCiphertext> {
        let share = self.node.limits.tls_held_bytes_max / self.peers.len().max(1) as u64;
        let held = self.held_ciphertext.get() + bytes as u64;
        if held > share {
            self.counters.bump(Counter::LimitRefusals(Limit::TlsHeld), 1);
            return Err(io::Error::other("readers who pause hold too much ciphertext"));
        }
        self.held_ciphertext.set(held);
        Ok(HeldCiphertext { worker: Rc::clone(self), bytes: bytes as u64 })
    }

    /// How long a send whose bytes cannot be taken back once they are copied may hold its lease.
    pub(super) fn hold_time(&self) -> Duration {
        TICK * if self.is_pressed() { HOLD_TICKS_PRESSED } else { HOLD_TICKS }
    }

    fn is_pressed(&self) -> bool {
        self.pinning.get() > 0 || self.node.arena.is_awaited()
    }

    fn sweep(&self) {
        self.tick.set(self.tick.get().wrapping_add(1));
        let wall = SystemTime::now();
        self.wall.set(wall);
        self.date.set(date_text(wall));
        self.node.offer_owed();
        let most = if self.is_pressed() { HOLD_TICKS_PRESSED } else { HOLD_TICKS };
        for (_, watch) in self.sends.borrow().iter() {
            if watch.begun().is_some_and(|begun| self.tick.get().wrapping_sub(begun) > most) {
                watch.interrupt();
            }
        }
    }
}

impl Here {
    /// What is served after it: opens what is not open, and says what cannot be. The rest is served all the same, so that
    /// one origin keeps no key or placement of the others back.
    fn next(&self, served: Arc<Served>, open: &OpenOrigin) -> (Self, Vec<Unopened>) {
        let mut origins: Vec<Place> = self.origins.iter().map(Place::leaving).collect();
        let mut unopened = Vec::new();
        for (index, accelerator) in served.all() {
            let index = usize::from(index);
            origins.resize(origins.len().max(index + 1), Place::None);
            origins[index] = match self.origins.get(index) {
                Some(Place::Open(origin)) => Place::Open(Rc::clone(origin)),
                _ => match open(&accelerator.target) {
                    Ok(origin) => Place::Open(Rc::new(origin)),
                    Err(error) => {
                        unopened.push(Unopened { accelerator: accelerator.name.clone(), error });
                        Place::None
                    }
                },
            };
        }
        self.peers.renew(served.cluster.as_deref());
        (Self { served, origins, peers: Rc::clone(&self.peers) }, unopened)
    }
}

/// The name of a request: two hexadecimal digits of its worker, fourteen of its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestId([u8; 16]);

impl RequestId {
    fn new(worker: usize, number: u64) -> Self {
        let word = (worker as u64) << 56 | number & (u64::MAX >> 8);
        let digit = |at: usize| b"0123456789ABCDEF"[(word >> (60 - 4 * at)) as usize & 15];
        Self(std::array::from_fn(digit))
    }
}

impl std::ops::Deref for RequestId {
    type Target = str;

    fn deref(&self) -> &str {
        std::str::from_utf8(&self.0).expect("digits")
    }
}

/// A connection's place on its worker and in the node, given back however its task ends.
pub(super) struct Admitted(Rc<Worker>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.peers[self.0.index].load.fetch_sub(1, Ordering::Relaxed);
        self.0.node.release_connection();
    }
}

struct Open<'a>(&'a Worker);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.counters.adjust(Gauge::Connections, -1);
    }
}

async fn sweep(worker: Weak<Worker>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(worker) = worker.upgrade() else { return };
        worker.sweep();
        if let Engine::Uring(ring) = &worker.engine {
            let counts = ring.counts();
            worker.counters.set(Counter::RingEnters, counts.enters);
            worker.counters.set(Counter::RingOverflows, counts.overflows);
            worker.counters.set(Counter::ZeroCopyCopiedBytes, counts.copied_bytes);
            worker.counters.put(Gauge::ZeroCopyBytes, counts.lent_bytes as i64);
        }
    }
}

/// Keeps a connection's sends watched.
#[derive(Debug)]
pub(super) struct WatchGuard {
    worker: Rc<Worker>,
    pub(super) watch: Rc<SendWatch>,
    key: usize,
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.worker.sends.borrow_mut().remove(self.key);
    }
}

/// Bytes that the network holds.
#[derive(Debug)]
pub(super) struct Pinned<'a> {
    worker: &'a Worker,
    bytes: u64,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.worker.pinned_bytes.set(self.worker.pinned_bytes.get() - self.bytes);
        if self.worker.pinning.get() > 0 {
            self.worker.unpinned.notify_waiters();
        }
    }
}

/// Ciphertext that waits for a reader.
#[derive(Debug)]
pub(super) struct HeldCiphertext {
    worker: Rc<Worker>,
    bytes: u64,
}

impl Drop for HeldCiphertext {
    fn drop(&mut self) {
        self.worker.held_ciphertext.set(self.worker.held_ciphertext.get() - self.bytes);
    }
}

/// The body of a deletion that is held.
#[derive(Debug)]
pub(super) struct HeldDeletion<'a>(&'a Cell<usize>);

impl Drop for HeldDeletion<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

struct Waiting<'a>(&'a Cell<usize>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::OriginLimits;
    use crate::origin::scripted::ScriptedOrigin;
    use crate::served::Next;

    fn served(held: &Served, specs: &[&str], keys: Keys) -> Arc<Served> {
        let wanted =
            specs.iter().map(|text| Accelerator::of(&text.parse().expect("a spec")).expect("an accelerator"));
        let Next { served, .. } = held.next(wanted, Arc::new(keys), None);
        Arc::new(served)
    }

    fn nothing() -> Here {
        Here {
            served: Arc::new(Served::new([], Keys::new(false))),
            origins: Vec::new(),
            peers: Rc::new(Peers::new(Connections::new(1))),
        }
    }

    fn scripted() -> Origin {
        Origin::scripted(ScriptedOrigin::new(1), OriginLimits::default())
    }

    fn origin(here: &Here, name: &str) -> Option<Rc<Origin>> {
        here.origins[usize::from(here.find(name).expect("served").0)].origin()
    }

    #[test]
    fn requests_are_named_by_their_worker_and_number() {
        assert_eq!(&*RequestId::new(1, 0x2a), "010000000000002A");
        assert_eq!(&*RequestId::new(0xfe, u64::MAX >> 8), "FEFFFFFFFFFFFFFF");
    }

    #[test]
    fn one_origin_that_cannot_be_opened_keeps_nothing_else_back() {
        let opened = Rc::new(Cell::new(0));
        let is_ill = Rc::new(Cell::new(true));
        let (count, ill) = (Rc::clone(&opened), Rc::clone(&is_ill));
        let open = move |target: &OriginTarget| {
            if ill.get() && target.kind.to_string().contains("bad") {
                return Err(OriginError::Target { reason: "no roots".into() });
            }
            count.set(count.get() + 1);
            Ok(scripted())
        };
        let mut keys = Keys::new(false);
        keys.add("AKGOOD", "a-secret-of-it").expect("a key");
        let wanted = served(&nothing(), &["good=s3://good", "bad=s3://bad"], keys);
        let (here, unopened) = nothing().next(Arc::clone(&wanted), &open);
        assert_eq!(unopened.iter().map(|one| &*one.accelerator).collect::<Vec<_>>(), ["bad"]);
        assert!(Arc::ptr_eq(&here.keys, &wanted.keys));
        let good = origin(&here, "good").expect("opened");
        assert!(origin(&here, "bad").is_none());

        // What is open is not opened again, whatever comes beside it.
        is_ill.set(false);
        let wanted = served(&here, &["good=s3://good", "bad=s3://bad", "new=s3://new"], Keys::new(true));
        let (here, unopened) = here.next(wanted, &open);
        assert!(unopened.is_empty() && origin(&here, "bad").is_some());
        assert!(Rc::ptr_eq(&good, &origin(&here, "good").expect("opened")));
        assert_eq!(opened.get(), 3);
    }

    #[test]
    fn the_origin_of_a_removed_accelerator_goes_with_the_last_who_reads_from_it() {
        let open = |_: &OriginTarget| Ok(scripted());
        let both = served(&nothing(), &["a-data=s3://a-data", "b-data=s3://b-data"], Keys::new(true));
        let (mut here, _) = nothing().next(both, &open);
        let reading = origin(&here, "a-data").expect("opened");
        let one = served(&here, &["b-data=s3://b-data"], Keys::new(true));
        here = here.next(one, &open).0;
        assert!(here.origins[0].origin().is_some_and(|origin| Rc::ptr_eq(&origin, &reading)));
        let again = served(&here, &["b-data=s3://b-data", "c-data=s3://c-data"], Keys::new(true));
        here = here.next(again, &open).0;
        assert!(here.origins[0].origin().is_some());
        drop(reading);
        assert!(here.origins[0].origin().is_none());
    }
}
