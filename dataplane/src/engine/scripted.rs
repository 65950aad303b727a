//! An in-memory network and drive for the simulation: the same operations, with short counts, errors, delays
//! and reordering drawn from a seed. Time is the runtime's, so a paused clock runs a minute in a blink.
//!
//! An operation here lives in a task of its own and owns its leases, as the kernel does: dropping its future
//! does not stop it at once, and it reads the leases late. Bytes that were given back too early therefore
//! arrive at the peer as poison.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::{Outgoing, SendWatch};
use crate::arena::{Lease, LeaseMut, UNIT_BYTES};
use crate::store::Slot;

/// How unfriendly the world is. Chances are in one thousandth of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// A transfer moves less than it could.
    pub short_per_mille: u32,
    /// A receive or send ends the connection.
    pub reset_per_mille: u32,
    /// A drive read fails or is interrupted.
    pub drive_per_mille: u32,
    /// A drive read brings bytes with a flipped bit.
    pub rot_per_mille: u32,
    /// Longest delay of an operation.
    pub delay_max: Duration,
    /// Bytes a connection holds before its reader must read.
    pub window_bytes: usize,
}

impl Faults {
    /// A friendly world.
    pub const NONE: Self = Self {
        short_per_mille: 0,
        reset_per_mille: 0,
        drive_per_mille: 0,
        rot_per_mille: 0,
        delay_max: Duration::ZERO,
        window_bytes: 64 << 10,
    };
}

/// The double.
#[derive(Debug)]
pub struct Scripted {
    random: RefCell<fastrand::Rng>,
    faults: Faults,
    drive: Arc<ScriptedDrive>,
    in_flight: Cell<usize>,
}

impl Scripted {
    /// A world drawn from `seed`; reads go to `drive`.
    pub fn new(seed: u64, faults: Faults, drive: Arc<ScriptedDrive>) -> Rc<Self> {
        let random = RefCell::new(fastrand::Rng::with_seed(seed));
        Rc::new(Self { random, faults, drive, in_flight: Cell::new(0) })
    }

    /// A connection: the node's end and the client's.
    pub fn connect(self: &Rc<Self>) -> (ScriptedSocket, ScriptedPeer) {
        let pipe = Rc::new(Pipe::default());
        (
            ScriptedSocket { world: Rc::clone(self), pipe: Rc::clone(&pipe) },
            ScriptedPeer { world: Rc::clone(self), pipe },
        )
    }

    /// Operations that have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    pub(super) async fn read_at(
        self: &Rc<Self>,
        offset: u64,
        lease: LeaseMut,
        len: usize,
    ) -> (io::Result<usize>, LeaseMut) {
        let world = Rc::clone(self);
        self.own(async move {
            let mut lease = lease;
            world.delay().await;
            if world.happens(world.faults.drive_per_mille) {
                let code = if world.happens(500) { libc::EINTR } else { libc::EIO };
                return (Err(io::Error::from_raw_os_error(code)), lease);
            }
            let len = world.shorten(len);
            let count = world.drive.read(offset, &mut lease.spare_mut()[..len]);
            if count > 0 && world.happens(world.faults.rot_per_mille) {
                let at = world.random.borrow_mut().usize(..count);
                lease.spare_mut()[at] ^= 1;
            }
            (Ok(count), lease)
        })
        .await
    }

    /// Runs an operation in a task of its own and waits for what it gives back.
    async fn own<T: 'static>(self: &Rc<Self>, operation: impl Future<Output = T> + 'static) -> T {
        let (done, result) = oneshot::channel();
        let world = Rc::clone(self);
        world.in_flight.set(world.in_flight.get() + 1);
        tokio::task::spawn_local(async move {
            let output = operation.await;
            world.in_flight.set(world.in_flight.get() - 1);
            // Nobody may wait any more; what the operation owned is given back here then.
            drop(done.send(output));
        });
        result.await.expect("an operation ends with its result")
    }

    async fn delay(&self) {
        let most = self.faults.delay_max.as_micros() as u64;
        if most > 0 {
            let delay = self.random.borrow_mut().u64(..=most);
            tokio::time::sleep(Duration::from_micros(delay)).await;
        }
    }

    fn happens(&self, per_mille: u32) -> bool {
        per_mille > 0 && self.random.borrow_mut().u32(..1000) < per_mille
    }

    fn shorten(&self, len: usize) -> usize {
        if len > 1 && self.happens(self.faults.short_per_mille) {
            self.random.borrow_mut().usize(1..len)
        } else {
            len
        }
    }
}

#[derive(Debug, Default)]
struct Pipe {
    to_node: RefCell<VecDeque<u8>>,
    to_peer: RefCell<VecDeque<u8>>,
    node_gone: Cell<bool>,
    /// The node sends no more.
    node_done: Cell<bool>,
    peer_gone: Cell<bool>,
    reset: Cell<bool>,
    moved: Notify,
}

impl Pipe {
    /// Bytes came that nobody will receive: the connection is reset, and what was on its way to the peer is lost, as
    /// a kernel may do.
    fn refuse(&self) {
        self.reset.set(true);
        self.to_peer.borrow_mut().clear();
        self.moved.notify_waiters();
    }

    fn broken(&self) -> Option<io::Error> {
        (self.reset.get() || self.peer_gone.get()).then(|| io::ErrorKind::ConnectionReset.into())
    }
}

/// The node's end of a connection.
#[derive(Debug)]
pub struct ScriptedSocket {
    world: Rc<Scripted>,
    pipe: Rc<Pipe>,
}

impl Drop for ScriptedSocket {
    fn drop(&mut self) {
        self.pipe.node_gone.set(true);
        if self.pipe.to_node.borrow().is_empty() {
            self.pipe.moved.notify_waiters();
        } else {
            self.pipe.refuse();
        }
    }
}

impl ScriptedSocket {
    pub(super) fn shutdown_write(&self) {
        self.pipe.node_done.set(true);
        self.pipe.moved.notify_waiters();
    }

    pub(super) async fn recv(&self, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let (world, pipe) = (Rc::clone(&self.world), Rc::clone(&self.pipe));
        let operation = async move {
            let mut buffer = buffer;
            world.delay().await;
            if world.happens(world.faults.reset_per_mille) {
                pipe.reset.set(true);
                pipe.moved.notify_waiters();
            }
            loop {
                let moved = pipe.moved.notified();
                if pipe.reset.get() {
                    return (Err(io::ErrorKind::ConnectionReset.into()), buffer);
                }
                let waiting = pipe.to_node.borrow().len();
                if waiting > 0 {
                    let room = buffer.capacity() - buffer.len();
                    let count = world.shorten(waiting.min(room));
                    let held = buffer.len();
                    buffer.resize(held + count, 0);
                    let read = pipe.to_node.borrow_mut().read_exact(&mut buffer[held..]);
                    return (read.map(|()| count), buffer);
                }
                if pipe.peer_gone.get() || pipe.node_gone.get() {
                    return (Ok(0), buffer);
                }
                moved.await;
            }
        };
        self.world.own(operation).await
    }

    pub(super) async fn send(&self, outgoing: Outgoing, watch: &SendWatch) -> (io::Result<usize>, Outgoing) {
        let (world, pipe) = (Rc::clone(&self.world), Rc::clone(&self.pipe));
        let cancelled = Rc::new(Cell::new(false));
        let seen = Rc::clone(&cancelled);
        let operation = async move {
            let mut outgoing = outgoing;
            let mut sent = 0;
            while !outgoing.is_empty() {
                world.delay().await;
                if world.happens(world.faults.reset_per_mille) {
                    pipe.reset.set(true);
                    pipe.moved.notify_waiters();
                }
                let moved = pipe.moved.notified();
                if let Some(error) = pipe.broken() {
                    return (if sent > 0 { Ok(sent) } else { Err(error) }, outgoing);
                }
                if seen.get() || pipe.node_gone.get() {
                    break;
                }
                let room = world.faults.window_bytes.saturating_sub(pipe.to_peer.borrow().len());
                if room == 0 {
                    moved.await;
                    continue;
                }
                let count = {
                    let piece = outgoing.pieces().find(|piece| !piece.is_empty()).expect("not empty");
                    let count = world.shorten(piece.len().min(room));
                    pipe.to_peer.borrow_mut().extend(&piece[..count]);
                    count
                };
                outgoing.consume(count);
                sent += count;
                pipe.moved.notify_waiters();
            }
            (Ok(sent), outgoing)
        };
        let running = self.world.own(operation);
        tokio::pin!(running);
        let interrupted = std::future::poll_fn(|context| watch.poll_interrupted(context));
        tokio::select! {
            biased;
            done = &mut running => return done,
            () = interrupted => {}
        }
        cancelled.set(true);
        self.pipe.moved.notify_waiters();
        running.await
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        loop {
            let moved = self.pipe.moved.notified();
            if let Some(error) = self.pipe.broken() {
                return Err(error);
            }
            if self.pipe.to_peer.borrow().len() < self.world.faults.window_bytes {
                return Ok(());
            }
            moved.await;
        }
    }
}

/// The client's end of a connection. Dropping it closes.
#[derive(Debug)]
pub struct ScriptedPeer {
    world: Rc<Scripted>,
    pipe: Rc<Pipe>,
}

impl ScriptedPeer {
    /// Sends all of `bytes`.
    pub fn send(&self, bytes: &[u8]) {
        if self.pipe.node_gone.get() {
            return self.pipe.refuse();
        }
        self.pipe.to_node.borrow_mut().extend(bytes);
        self.pipe.moved.notify_waiters();
    }

    /// Receives at most `most` bytes; empty at the end of the stream.
    ///
    /// # Errors
    /// The script reset the connection.
    pub async fn recv(&self, most: usize) -> io::Result<Vec<u8>> {
        self.world.delay().await;
        loop {
            let moved = self.pipe.moved.notified();
            let waiting = self.pipe.to_peer.borrow().len();
            if waiting > 0 {
                let count = waiting.min(most);
                let mut bytes = vec![0; count];
                self.pipe.to_peer.borrow_mut().read_exact(&mut bytes)?;
                self.pipe.moved.notify_waiters();
                return Ok(bytes);
            }
            if self.pipe.reset.get() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if self.pipe.node_gone.get() || self.pipe.node_done.get() {
                return Ok(Vec::new());
            }
            moved.await;
        }
    }
}

impl Drop for ScriptedPeer {
    fn drop(&mut self) {
        self.pipe.peer_gone.set(true);
        self.pipe.moved.notify_waiters();
    }
}

/// A drive in memory, written in segments and reclaimed oldest first, as the real one is.
#[derive(Debug)]
pub struct ScriptedDrive(Mutex<DriveState>);

#[derive(Debug)]
struct DriveState {
    bytes: Vec<u8>,
    segment_bytes: usize,
    sequences: Vec<u32>,
    open: usize,
    used: usize,
}

impl ScriptedDrive {
    /// `segments` segments of `segment_bytes` (a multiple of [`UNIT_BYTES`]).
    pub fn new(segments: usize, segment_bytes: usize) -> Arc<Self> {
        assert!(segment_bytes.is_multiple_of(UNIT_BYTES));
        Arc::new(Self(Mutex::new(DriveState {
            bytes: vec![0; segments * segment_bytes],
            segment_bytes,
            sequences: vec![1; segments],
            open: 0,
            used: 0,
        })))
    }

    /// Writes a lease; the old tenant of the place is gone from this moment on.
    pub fn write(&self, body: &Lease) -> Option<Slot> {
        let mut state = self.lock();
        let len = body.padded_len();
        if len > state.segment_bytes {
            return None;
        }
        if state.used + len > state.segment_bytes {
            state.open = (state.open + 1) % state.sequences.len();
            let open = state.open;
            state.sequences[open] += 1;
            state.used = 0;
        }
        let at = state.open * state.segment_bytes + state.used;
        let filled = body.filled();
        state.bytes[at..at + filled].copy_from_slice(body.bytes(0..filled));
        let slot = Slot {
            drive: 0,
            segment: state.open as u32,
            offset: (state.used / UNIT_BYTES) as u32,
            sequence: state.sequences[state.open],
        };
        state.used += len;
        Some(slot)
    }

    /// Where the bytes of a slot are, while they are there.
    pub fn place(&self, slot: Slot) -> Option<u64> {
        let state = self.lock();
        (state.sequences[slot.segment as usize] == slot.sequence)
            .then(|| (slot.segment as usize * state.segment_bytes + slot.offset as usize * UNIT_BYTES) as u64)
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> usize {
        let state = self.lock();
        let from = (offset as usize).min(state.bytes.len());
        let count = target.len().min(state.bytes.len() - from);
        target[..count].copy_from_slice(&state.bytes[from..from + count]);
        count
    }

    fn lock(&self) -> MutexGuard<'_, DriveState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
