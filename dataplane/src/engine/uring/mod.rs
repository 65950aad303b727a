//! io_uring, one ring a worker, inside the worker's tokio runtime.
//!
//! The ring is SINGLE_ISSUER and DEFER_TASKRUN: the kernel posts completions only when this thread enters it.
//! Such a ring's own descriptor never wakes an epoll, so a registered eventfd does; it is edge triggered and
//! never read. The first push since the last flush wakes the ring's task ([`turn`]).
//!
//! What the kernel may touch lives in [`operations`]; what it grants is found out by [`super::probe`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};

use io_uring::types::CloneBuffersFlags;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode, squeue};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use self::operations::{Held, Key, NOBODY, Operations, SendFrame};
use self::pool::Pool;
use super::way::{self, Means, Path, Way};
use super::{Outgoing, SLICES_MAX, SendPolicy, SendWatch, reference};
use crate::arena::{Arena, LeaseMut};

mod operations;
mod pool;
mod turn;

/// Submission entries of one worker's ring; more are queued in user space.
const ENTRIES: u32 = 1024;
/// Completion entries: a full submission queue several times over, so that overflow stays rare.
const COMPLETIONS: u32 = 8 * ENTRIES;
/// A chunk is registered anew when more than this part of it, one in so many pages, has been renewed.
const STALE_SHARE: usize = 16;
/// `IORING_SEND_ZC_REPORT_USAGE` (6.2, and later releases of 6.1), which the crate does not name.
pub(super) const REPORT_USAGE: u16 = 1 << 3;
/// Kernel helper threads that one ring may start, bounded and unbounded work.
const HELPERS_MAX: [u32; 2] = [4, 4];

/// One worker's ring.
pub struct Ring {
    operations: RefCell<Operations>,
    uring: RefCell<IoUring>,
    backlog: RefCell<VecDeque<squeue::Entry>>,
    /// Reads that are done and have not been told: user data, result.
    read: RefCell<VecDeque<(u64, i32)>>,
    eventfd: AsyncFd<OwnedFd>,
    unflushed: Cell<bool>,
    task: RefCell<Option<Waker>>,
    /// The runtime's epoll instance is polled through the ring.
    is_watching: Cell<bool>,
    /// It has become ready.
    watched: Cell<bool>,
    /// For each chunk of the arena that this ring may use as a fixed buffer, the renewal it was registered at.
    fixed: RefCell<Vec<Option<u64>>>,
    enters: Cell<u64>,
    policy: SendPolicy,
    /// Whether the kernel takes zero-copy sends, and says afterwards whether it has copied.
    zero_copy: Cell<bool>,
    reports: Cell<bool>,
}

/// What a ring has counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingCounts {
    /// System calls made to submit and to collect.
    pub enters: u64,
    /// Completions that did not fit and were kept by the kernel.
    pub overflows: u64,
    /// Completions that belonged to no operation.
    pub stale: u64,
    /// Receives whose memory the kernel chose when there was something to receive.
    pub chosen: u64,
    /// Operations in flight now.
    pub in_flight: u64,
    /// Bytes that the network holds now, zero-copy.
    pub lent_bytes: u64,
    /// Bytes sent zero-copy that the kernel has copied all the same.
    pub copied_bytes: u64,
}

/// A socket that is used through a ring; closed by the ring, behind everything queued before.
#[derive(Debug)]
pub struct RingSocket {
    ring: Rc<Ring>,
    fd: RawFd,
    path: Rc<Path>,
}

impl RingSocket {
    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

impl Drop for RingSocket {
    fn drop(&mut self) {
        // Not close(2): an entry that is queued but not yet submitted names this number, and the number may
        // be given to another connection at once.
        let close = opcode::Close::new(Fd(self.fd)).build().user_data(NOBODY);
        self.ring.push(close);
    }
}

impl Ring {
    /// Makes a ring for this thread and starts its task on the current runtime.
    ///
    /// # Errors
    /// io_uring is refused here; [`super::probe`] says why and what to do.
    pub fn start(policy: SendPolicy) -> io::Result<Rc<Self>> {
        let uring = build(ENTRIES)?;
        // SAFETY: plain system call; the result is checked before it is owned.
        let eventfd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if eventfd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let eventfd = unsafe { OwnedFd::from_raw_fd(eventfd) };
        uring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        // Older kernels do not know it; the default bound is large, not wrong.
        let _ = uring.submitter().register_iowq_max_workers(&mut HELPERS_MAX.clone());
        let pool = Pool::register(&uring)
            .inspect_err(
                |error| tracing::debug!(%error, "no ring of buffers: idle connections hold their own"),
            )
            .ok();
        let ring = Rc::new(Self {
            operations: RefCell::new(Operations::new(pool)),
            uring: RefCell::new(uring),
            backlog: RefCell::default(),
            read: RefCell::default(),
            // SAFETY: the descriptor is owned by the registration and closed with it.
            eventfd: unsafe { AsyncFd::register_with_interest(eventfd, Interest::READABLE)? },
            unflushed: Cell::new(false),
            task: RefCell::new(None),
            is_watching: Cell::new(false),
            watched: Cell::new(false),
            fixed: RefCell::default(),
            enters: Cell::new(0),
            policy,
            zero_copy: Cell::new(true),
            reports: Cell::new(true),
        });
        tokio::task::spawn_local(turn::Driver::new(Rc::clone(&ring)).run());
        Ok(ring)
    }

    /// Registers the chunks of `arena` as `registry` has them, cloning them from it where the kernel can: cloned
    /// buffers are not charged to the memlock limit again. A place that is empty in the registry would clone well
    /// and read nothing, so nothing beyond `registered` is touched.
    ///
    /// # Errors
    /// The kernel refuses to pin the memory; the ring goes on with ordinary reads.
    pub fn register(&self, arena: &Arena, registered: &Registered) -> io::Result<()> {
        let uring = self.uring.borrow();
        let mut fixed = self.fixed.borrow_mut();
        if fixed.is_empty() {
            uring.submitter().register_buffers_sparse(arena.chunks_max() as u32)?;
            fixed.resize(arena.chunks_max(), None);
        }
        let mut result = Ok(());
        for (index, ((base, bytes), renewal)) in arena.chunks().zip(&registered.renewals).enumerate() {
            if fixed[index] == *renewal {
                continue;
            }
            let place = index as u32;
            let replace = CloneBuffersFlags::DST_REPLACE;
            let registry = registered.registry;
            let registering = if renewal.is_none() {
                forget_chunk(&uring, place)
            } else if uring
                .submitter()
                .register_buffers_clone_offset(registry, place, place, 1, replace)
                .is_ok()
            {
                Ok(())
            } else {
                register_chunk(&uring, place, base, bytes)
            };
            fixed[index] = if registering.is_ok() { *renewal } else { None };
            result = result.and(registering);
        }
        result
    }

    /// What it has counted.
    pub fn counts(&self) -> RingCounts {
        let operations = self.operations.borrow();
        RingCounts {
            enters: self.enters.get(),
            overflows: u64::from(self.uring.borrow_mut().completion().overflow()),
            stale: operations.stale,
            chosen: operations.chosen,
            in_flight: operations.in_flight() as u64,
            lent_bytes: operations.lent_bytes,
            copied_bytes: operations.copied_bytes,
        }
    }

    pub(super) fn adopt(self: &Rc<Self>, fd: OwnedFd) -> RingSocket {
        let path = Rc::new(if is_within_host(&fd) { Path::within_host() } else { Path::default() });
        RingSocket { ring: Rc::clone(self), fd: fd.into_raw_fd(), path }
    }

    pub(super) async fn accept(self: &Rc<Self>, listener: &RingSocket) -> io::Result<OwnedFd> {
        let accept = opcode::Accept::new(Fd(listener.fd), std::ptr::null_mut(), std::ptr::null_mut())
            .flags(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK)
            .build();
        let (result, _) = self.submit(Held::Accept, |_| accept).await;
        count(result).map(|_| operations::accepted(result))
    }

    pub(super) async fn recv(
        self: &Rc<Self>,
        socket: &RingSocket,
        buffer: Vec<u8>,
    ) -> (io::Result<usize>, Vec<u8>) {
        let mut buffer = buffer;
        for repeat in 0.. {
            let operation = self.submit(Held::Recv(buffer), |held| {
                let Held::Recv(buffer) = held else { unreachable!("just made") };
                let spare = buffer.spare_capacity_mut();
                opcode::Recv::new(Fd(socket.fd), spare.as_mut_ptr().cast(), spare.len() as u32).build()
            });
            let (result, held) = operation.await;
            let Held::Recv(mut back) = held else { unreachable!("a receive gives back its buffer") };
            match count(result) {
                Ok(received) => {
                    let len = back.len() + received;
                    assert!(len <= back.capacity(), "the kernel wrote within the spare capacity");
                    // SAFETY: the kernel initialised `received` bytes of the spare capacity.
                    unsafe { back.set_len(len) };
                    return (Ok(received), back);
                }
                Err(error) if super::says_nothing(&error) && repeat < super::REPEATS_MAX => buffer = back,
                Err(error) => return (Err(error), back),
            }
        }
        unreachable!("the loop returns")
    }

    /// The first bytes of something, appended to what `room` makes when they are there.
    pub(super) async fn recv_first(
        self: &Rc<Self>,
        socket: &RingSocket,
        room: impl FnOnce() -> Vec<u8>,
    ) -> (io::Result<usize>, Vec<u8>) {
        for _ in 0..super::REPEATS_MAX {
            if self.operations.borrow().pool.is_none() {
                break;
            }
            let recv = opcode::Recv::new(Fd(socket.fd), std::ptr::null_mut(), 0)
                .buf_group(pool::GROUP)
                .build()
                .flags(squeue::Flags::BUFFER_SELECT);
            let (result, held) = self.submit(Held::RecvFirst(None), |_| recv).await;
            let Held::RecvFirst(buffer) = held else { unreachable!("just made") };
            let received = count(result);
            let Some(buffer) = buffer else {
                match received {
                    // All buffers are in use: there is something to receive.
                    Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => break,
                    Err(error) if super::says_nothing(&error) => continue,
                    received => return (received, Vec::new()),
                }
            };
            let mut bytes = room();
            let len = *received.as_ref().unwrap_or(&0);
            self.operations.borrow_mut().pool.as_mut().expect("just used").take(buffer, len, &mut bytes);
            return (received, bytes);
        }
        self.recv(socket, room()).await
    }

    pub(super) async fn send(
        self: &Rc<Self>,
        socket: &RingSocket,
        outgoing: Outgoing,
        watch: &SendWatch,
    ) -> (io::Result<usize>, Outgoing) {
        let means = Means { zero_copy: self.zero_copy.get(), held: self.operations.borrow().lent_bytes };
        match way::choose(&self.policy, means, &socket.path, &outgoing) {
            Way::Copy => self.send_message(socket, outgoing, watch, Mode::Copied).await,
            Way::Reference => self.send_by_reference(socket, outgoing, watch).await,
            Way::ZeroCopy => self.send_zero_copy(socket, outgoing, watch).await,
        }
    }

    /// Zero-copy, or copied where the kernel does not take it.
    async fn send_zero_copy(
        self: &Rc<Self>,
        socket: &RingSocket,
        mut outgoing: Outgoing,
        watch: &SendWatch,
    ) -> (io::Result<usize>, Outgoing) {
        loop {
            let is_reported = self.reports.get();
            let mode = Mode::ZeroCopy { is_reported };
            let (result, back) = self.send_message(socket, outgoing, watch, mode).await;
            outgoing = back;
            let refusal = match &result {
                Ok(sent) => {
                    outgoing.zero_copy += *sent as u64;
                    return (result, outgoing);
                }
                Err(error) => refusal(error, is_reported),
            };
            match refusal {
                None => return (result, outgoing),
                Some(Refusal::Reports) => {
                    self.reports.set(false);
                    continue;
                }
                Some(Refusal::Socket) => socket.path.learn(true),
                Some(Refusal::Kernel) if self.zero_copy.replace(false) => tracing::warn!(
                    error = %result.expect_err("refused"),
                    "the kernel takes no zero-copy sends: bodies are copied; if it is for want of locked memory, raise \
                     the memlock limit (LimitMEMLOCK=infinity) or grant CAP_IPC_LOCK"
                ),
                Some(Refusal::Kernel) => {}
            }
            return self.send_message(socket, outgoing, watch, Mode::Copied).await;
        }
    }

    async fn send_message(
        self: &Rc<Self>,
        socket: &RingSocket,
        outgoing: Outgoing,
        watch: &SendWatch,
        mode: Mode,
    ) -> (io::Result<usize>, Outgoing) {
        let frame = {
            let mut operations = self.operations.borrow_mut();
            let mut frame = operations.frame();
            frame.outgoing = outgoing;
            if let Mode::ZeroCopy { is_reported } = mode {
                operations.lend(&mut frame, Rc::clone(&socket.path), is_reported);
            }
            frame
        };
        let mut operation = self.submit(Held::Send(frame), |held| {
            let Held::Send(frame) = held else { unreachable!("just made") };
            // WAITALL: the kernel goes on by itself when the socket has room again, so a count short of all
            // is the end of the connection or an interruption.
            let flags = (libc::MSG_WAITALL | libc::MSG_NOSIGNAL) as u32;
            match mode {
                Mode::Copied => opcode::SendMsg::new(Fd(socket.fd), frame.aim()).flags(flags).build(),
                Mode::ZeroCopy { is_reported } => {
                    let ways = if is_reported { REPORT_USAGE } else { 0 };
                    opcode::SendMsgZc::new(Fd(socket.fd), frame.aim()).flags(flags).ioprio(ways).build()
                }
            }
        });
        let mut cancelled = false;
        let (result, held) = poll_fn(|context| {
            if let Poll::Ready(done) = Pin::new(&mut operation).poll(context) {
                return Poll::Ready(done);
            }
            ready!(watch.poll_interrupted(context));
            if !cancelled {
                cancelled = true;
                self.cancel(operation.key);
            }
            Poll::Pending
        })
        .await;
        let result = match count(result) {
            Err(error) if super::says_nothing(&error) => Ok(0),
            result => result,
        };
        let outgoing = match held {
            Held::Send(frame) => {
                let mut outgoing = self.operations.borrow_mut().unframe(frame);
                if let Ok(sent) = result {
                    outgoing.consume(sent);
                }
                outgoing
            }
            Held::Rest(outgoing) => outgoing,
            _ => unreachable!("a send gives back its frame"),
        };
        (result, outgoing)
    }

    async fn send_by_reference(
        self: &Rc<Self>,
        socket: &RingSocket,
        mut outgoing: Outgoing,
        watch: &SendWatch,
    ) -> (io::Result<usize>, Outgoing) {
        let mut sent = 0;
        loop {
            match reference::push(socket.fd, &mut outgoing) {
                Ok(count) => sent += count,
                Err(error) => return (if sent > 0 { Ok(sent) } else { Err(error) }, outgoing),
            }
            if outgoing.is_empty() {
                return (Ok(sent), outgoing);
            }
            let mut room = self.poll_writable(socket);
            let is_interrupted = poll_fn(|context| {
                if Pin::new(&mut room).poll(context).is_ready() {
                    return Poll::Ready(false);
                }
                ready!(watch.poll_interrupted(context));
                Poll::Ready(true)
            });
            if is_interrupted.await {
                return (Ok(sent), outgoing);
            }
        }
    }

    fn poll_writable(self: &Rc<Self>, socket: &RingSocket) -> Submitted {
        let poll = opcode::PollAdd::new(Fd(socket.fd), libc::POLLOUT as u32).build();
        self.submit(Held::Poll, |_| poll)
    }

    pub(super) async fn writable(self: &Rc<Self>, socket: &RingSocket) -> io::Result<()> {
        let (result, _) = self.poll_writable(socket).await;
        let events = count(result)? as i16;
        if events & (libc::POLLERR | libc::POLLHUP) != 0 {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(())
    }

    pub(super) async fn read_at(
        self: &Rc<Self>,
        file: RawFd,
        offset: u64,
        lease: LeaseMut,
        len: usize,
    ) -> (io::Result<usize>, LeaseMut) {
        let chunk = lease.lease().chunk();
        let registered = self.fixed.borrow().get(usize::from(chunk)).copied().flatten();
        // Memory renewed since is not what the kernel has registered under this name.
        let fixed = registered.is_some_and(|renewal| lease.lease().renewal() <= renewal);
        let operation = self.submit(Held::Read(lease), |held| {
            let Held::Read(lease) = held else { unreachable!("just made") };
            if fixed {
                opcode::ReadFixed::new(Fd(file), lease.tail(), len as u32, chunk).offset(offset).build()
            } else {
                opcode::Read::new(Fd(file), lease.tail(), len as u32).offset(offset).build()
            }
        });
        let (result, held) = operation.await;
        let Held::Read(lease) = held else { unreachable!("a read gives back its lease") };
        (count(result), lease)
    }

    fn submit(self: &Rc<Self>, held: Held, aim: impl FnOnce(&mut Held) -> squeue::Entry) -> Submitted {
        let (key, entry) = {
            let mut operations = self.operations.borrow_mut();
            let key = operations.insert(held);
            let entry = aim(operations.held(key)).user_data(key.0);
            (key, entry)
        };
        self.push(entry);
        Submitted { ring: Rc::clone(self), key, taken: false }
    }

    fn cancel(&self, key: Key) {
        self.push(opcode::AsyncCancel::new(key.0).build().user_data(NOBODY));
    }

    fn push(&self, entry: squeue::Entry) {
        let mut backlog = self.backlog.borrow_mut();
        // Behind what waits already: a close must not overtake the operations of its socket.
        if !backlog.is_empty() || !self.try_push(&entry) {
            backlog.push_back(entry);
        }
        if !self.unflushed.replace(true)
            && let Some(task) = self.task.borrow_mut().take()
        {
            task.wake();
        }
    }

    fn try_push(&self, entry: &squeue::Entry) -> bool {
        let mut uring = self.uring.borrow_mut();
        // SAFETY: every pointer in the entry leads into what the table of operations owns until the
        // completion of this entry, or into nothing (close, cancel, poll, accept).
        unsafe { uring.submission().push(entry).is_ok() }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({:?})", self.counts())
    }
}

/// What a [`Registry`] has registered.
#[derive(Clone, Debug)]
pub struct Registered {
    registry: RawFd,
    /// For each chunk from the first on, the arena's count of renewals before it was registered; `None` if it is not.
    renewals: Vec<Option<u64>>,
}

/// A ring that submits nothing: it holds the registration of the arena that the workers' rings clone. It must
/// not be a single-issuer ring, whose buffers no other thread may clone.
pub struct Registry {
    uring: IoUring,
    renewals: Vec<Option<u64>>,
}

impl Registry {
    /// Registers the chunks that have joined.
    ///
    /// # Errors
    /// The kernel refuses to pin the memory: the memlock limit, most likely.
    pub fn build(arena: &Arena) -> io::Result<Self> {
        let uring = IoUring::new(1)?;
        uring.submitter().register_buffers_sparse(arena.chunks_max() as u32)?;
        let mut registry = Self { uring, renewals: Vec::new() };
        registry.refresh(arena)?;
        Ok(registry)
    }

    /// Registers the chunks that have joined since, and those anew of which more than a sixteenth are other pages
    /// by now: until then the kernel keeps the old pages as well. A chunk that cannot be registered is given up: the
    /// rings read into it as into any memory.
    ///
    /// # Errors
    /// As [`Registry::build`]; the other chunks are registered.
    pub fn refresh(&mut self, arena: &Arena) -> io::Result<()> {
        let mut result = Ok(());
        for (index, (base, bytes)) in arena.chunks().enumerate() {
            match self.renewals.get(index) {
                Some(None) => continue,
                Some(Some(registered)) => {
                    let (renewed, pages) = arena.renewed_since(index, *registered);
                    if renewed * STALE_SHARE <= pages {
                        continue;
                    }
                }
                None => self.renewals.push(None),
            }
            // Read before: what is renewed meanwhile counts as not registered.
            let renewals = arena.renewals();
            let registering = register_chunk(&self.uring, index as u32, base, bytes);
            self.renewals[index] = registering.is_ok().then_some(renewals);
            if registering.is_err() {
                // What it was before would keep pages that nobody uses any more.
                let _ = forget_chunk(&self.uring, index as u32);
            }
            result = result.and(registering);
        }
        result
    }

    /// What it has registered, for [`Ring::register`]. Good for as long as the registry lives.
    pub fn registered(&self) -> Registered {
        Registered { registry: self.uring.as_raw_fd(), renewals: self.renewals.clone() }
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registry({} chunks)", self.renewals.len())
    }
}

fn register_chunk(uring: &IoUring, index: u32, base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    let vector = libc::iovec { iov_base: base.as_ptr().cast(), iov_len: bytes };
    // SAFETY: chunks of the arena are never unmapped, so the registered range outlives every ring.
    unsafe { uring.submitter().register_buffers_update(index, &[vector], None) }
}

/// Empties a place in the table of registered buffers.
fn forget_chunk(uring: &IoUring, index: u32) -> io::Result<()> {
    let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    // SAFETY: an empty vector names no memory.
    unsafe { uring.submitter().register_buffers_update(index, &[nothing], None) }
}

/// A ring as a worker wants it; used by the probe as well.
pub(super) fn build(entries: u32) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .setup_submit_all()
        .setup_clamp()
        .setup_cqsize(COMPLETIONS.max(entries))
        .build(entries)
}

fn count(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

/// How one message is handed to the kernel.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Copied,
    /// Zero-copy; and whether the kernel is to say if it has copied.
    ZeroCopy {
        is_reported: bool,
    },
}

/// What does not go, where a zero-copy send was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// To be told whether it was copied (before 6.2, or an early 6.1).
    Reports,
    /// Zero-copy on this socket: its protocol has none.
    Socket,
    /// Zero-copy at all: not known, or no more memory may be locked.
    Kernel,
}

/// What an error of a zero-copy send refuses; `None` if it is the connection's.
fn refusal(error: &io::Error, was_reported: bool) -> Option<Refusal> {
    match error.raw_os_error()? {
        libc::EINVAL if was_reported => Some(Refusal::Reports),
        libc::EINVAL | libc::ENOMEM => Some(Refusal::Kernel),
        libc::EOPNOTSUPP => Some(Refusal::Socket),
        _ => None,
    }
}

/// Whether both ends of a connection are on this host, as far as its addresses tell.
fn is_within_host(fd: &OwnedFd) -> bool {
    let socket = socket2::SockRef::from(fd);
    let address =
        |address: io::Result<socket2::SockAddr>| Some(address.ok()?.as_socket()?.ip().to_canonical());
    // A listening socket has no peer, and what is not of the internet does not leave the host.
    let Some(peer) = address(socket.peer_addr()) else { return true };
    peer.is_loopback() || address(socket.local_addr()) == Some(peer)
}

impl SendFrame {
    pub(super) fn boxed() -> Box<Self> {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: a message header of zeros names no address, no vectors and no control data.
        let message = unsafe { std::mem::zeroed() };
        Box::new(Self {
            message,
            vectors: [nothing; SLICES_MAX + 1],
            outgoing: Outgoing::default(),
            zero_copy: None,
        })
    }

    /// Points header and vectors at the bytes that are left; valid while the box stands still.
    fn aim(&mut self) -> *const libc::msghdr {
        let mut used = 0;
        for piece in self.outgoing.pieces().filter(|piece| !piece.is_empty()) {
            self.vectors[used] =
                libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() };
            used += 1;
        }
        self.message.msg_iov = self.vectors.as_mut_ptr();
        self.message.msg_iovlen = used as _;
        &raw const self.message
    }
}

/// The future of an operation. Dropping it cancels.
struct Submitted {
    ring: Rc<Ring>,
    key: Key,
    taken: bool,
}

impl Future for Submitted {
    type Output = (i32, Held);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = self.ring.operations.borrow_mut().poll(self.key, context.waker());
        self.taken = polled.is_ready();
        polled
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        if !self.taken && self.ring.operations.borrow_mut().abandon(self.key) {
            self.ring.cancel(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two first sends at once on a kernel that reports nothing: the second was taken for one that was refused without
    /// asking for a report, and no body left zero-copy any more.
    #[test]
    fn a_refusal_is_judged_by_what_was_asked_then() {
        let of = |code, was_reported| refusal(&io::Error::from_raw_os_error(code), was_reported);
        assert_eq!(of(libc::EINVAL, true), Some(Refusal::Reports));
        assert_eq!(of(libc::EINVAL, false), Some(Refusal::Kernel));
        assert_eq!(of(libc::ENOMEM, true), Some(Refusal::Kernel));
        assert_eq!(of(libc::EOPNOTSUPP, true), Some(Refusal::Socket));
        for code in [libc::ECONNRESET, libc::EPIPE, libc::ECANCELED] {
            assert_eq!(of(code, true), None);
        }
        assert_eq!(refusal(&io::ErrorKind::WriteZero.into(), true), None);
    }
}
