//! The seam between thinking and the kernel: operations that own what they work on.
//!
//! An operation takes its buffers and leases by value and gives them back with its result, so that nobody
//! can touch bytes that the kernel may still read or write. Dropping the future of an operation does not
//! take anything from it: the engine cancels the operation and keeps its leases until the last completion.
//!
//! Three engines stand behind one type: [`uring`] for the data path, [`portable`] (readiness and a bounded
//! pool of positioned reads) for hosts that refuse io_uring, and [`scripted`], an in-memory network and drive
//! whose short counts, errors, delays and reordering come from a seed.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use crate::arena::{Lease, LeaseMut, UNIT_BYTES};

pub mod portable;
pub mod probe;
mod reference;
pub mod scripted;
pub mod steer;
pub mod task;
pub mod uring;
mod way;

pub use way::{SendPolicy, Sends};

/// Most slices that leave in one operation; with the header, one vector of seventeen.
pub const SLICES_MAX: usize = 16;
/// How often an operation that says nothing about the world (interrupted, spuriously cancelled) is repeated.
const REPEATS_MAX: u32 = 8;

/// One worker's way to the kernel. Cheap to clone; stays on its thread.
#[derive(Clone, Debug)]
pub enum Engine {
    /// io_uring.
    Uring(Rc<uring::Ring>),
    /// Readiness and positioned reads.
    Portable(portable::Portable),
    /// The seeded double of the simulation.
    Scripted(Rc<scripted::Scripted>),
}

/// A socket of one engine. Dropping it closes the connection, after the operations that were queued before.
#[derive(Debug)]
pub enum Socket {
    /// Of the ring.
    Uring(uring::RingSocket),
    /// Of the portable engine.
    Portable(portable::PortableSocket),
    /// Of the simulation.
    Scripted(scripted::ScriptedSocket),
}

/// A piece of an object on its way out: a hold on its lease and which bytes.
#[derive(Clone, Debug)]
pub struct Slice {
    lease: Lease,
    start: u32,
    end: u32,
}

impl Slice {
    /// Bytes `range` of `lease`.
    ///
    /// # Panics
    /// If they are not written yet.
    pub fn new(lease: Lease, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= lease.filled(), "{range:?} of {lease:?}");
        Self { lease, start: range.start as u32, end: range.end as u32 }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether nothing is left of it.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The first `count` bytes, with a hold of their own; this slice goes on behind them.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn take_front(&mut self, count: usize) -> Self {
        assert!(count <= self.len(), "{count} of {} bytes", self.len());
        let middle = self.start + count as u32;
        let front = Self { lease: self.lease.clone(), start: self.start, end: middle };
        self.start = middle;
        front
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.lease.bytes(self.start as usize..self.end as usize)
    }
}

/// What one send carries: a header and slices behind it, in one operation.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Response head, or small bytes of our own. Its allocation is meant to be reused.
    pub header: Vec<u8>,
    /// Object bytes.
    pub body: SmallVec<[Slice; 2]>,
    /// Bytes that have left by reference.
    by_reference: u64,
    /// Bytes that have left zero-copy, as far as we are concerned.
    zero_copy: u64,
    /// Bytes of the header that have left already.
    sent: usize,
}

impl Outgoing {
    /// Only a header.
    pub fn header(header: Vec<u8>) -> Self {
        Self { header, ..Self::default() }
    }

    /// Bytes that still have to leave.
    pub fn len(&self) -> usize {
        self.header.len() - self.sent + self.body_len()
    }

    /// Bytes of slices that still have to leave.
    pub fn body_len(&self) -> usize {
        self.body.iter().map(Slice::len).sum()
    }

    /// Whether all has left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a slice; at most [`SLICES_MAX`].
    ///
    /// # Panics
    /// Beyond that.
    pub fn push(&mut self, slice: Slice) {
        assert!(self.body.len() < SLICES_MAX, "one operation carries {SLICES_MAX} slices");
        self.body.push(slice);
    }

    /// Forgets the first `sent` bytes; slices that are gone give their hold back.
    ///
    /// # Panics
    /// If `sent` is more than there was.
    pub fn consume(&mut self, mut sent: usize) {
        let of_header = sent.min(self.header.len() - self.sent);
        self.sent += of_header;
        sent -= of_header;
        let mut gone = 0;
        for slice in &mut self.body {
            let of_slice = sent.min(slice.len());
            slice.start += of_slice as u32;
            sent -= of_slice;
            if !slice.is_empty() {
                break;
            }
            gone += 1;
        }
        assert_eq!(sent, 0, "more was sent than there was");
        self.body.drain(..gone);
    }

    /// Gives every slice back and empties the header, keeping its allocation.
    pub fn clear(&mut self) {
        self.header.clear();
        self.body.clear();
        self.by_reference = 0;
        self.zero_copy = 0;
        self.sent = 0;
    }

    /// Gives back the memory of what has left of a header, because the rest may stay for a while.
    pub fn shrink(&mut self) {
        self.header.drain(..std::mem::take(&mut self.sent));
        self.header.shrink_to_fit();
    }

    /// Bytes that have left by reference since it was last asked.
    pub fn take_by_reference(&mut self) -> u64 {
        std::mem::take(&mut self.by_reference)
    }

    /// Bytes that have left zero-copy since it was last asked; whether the kernel copied them is heard later.
    pub fn take_zero_copy(&mut self) -> u64 {
        std::mem::take(&mut self.zero_copy)
    }

    /// Parts what is left behind the first `sent` bytes from them: they stay here, held, with the whole header, because
    /// the network reads them. `header` is room for what is left of the header.
    ///
    /// # Panics
    /// If `sent` is more than there was.
    fn part_behind(&mut self, sent: usize, mut header: Vec<u8>) -> Self {
        let of_header = sent.min(self.header_left().len());
        header.extend_from_slice(&self.header_left()[of_header..]);
        self.sent += of_header;
        let mut of_body = sent - of_header;
        let mut rest = SmallVec::new();
        let mut kept = 0;
        for slice in &mut self.body {
            if of_body >= slice.len() {
                of_body -= slice.len();
                kept += 1;
                continue;
            }
            let mut behind = slice.clone();
            if of_body > 0 {
                *slice = behind.take_front(of_body);
                of_body = 0;
                kept += 1;
            }
            rest.push(behind);
        }
        assert_eq!(of_body, 0, "more was sent than there was");
        self.body.truncate(kept);
        Self { header, body: rest, by_reference: self.by_reference, zero_copy: self.zero_copy, sent: 0 }
    }

    fn header_left(&self) -> &[u8] {
        &self.header[self.sent..]
    }

    /// What is left, piece by piece.
    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(self.header_left()).chain(self.body.iter().map(Slice::bytes))
    }

    /// What is left, as one vector. Only for what ends in a system call or in encryption.
    pub(crate) fn io_slices(&self) -> SmallVec<[IoSlice<'_>; SLICES_MAX + 1]> {
        self.pieces().filter(|piece| !piece.is_empty()).map(IoSlice::new).collect()
    }
}

/// Watches one connection's send, so that someone else can end it without losing count of what has left.
#[derive(Debug, Default)]
pub struct SendWatch {
    begun: Cell<Option<u32>>,
    interrupted: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl SendWatch {
    /// Marks the begin of a send, in the caller's ticks.
    pub fn begin(&self, tick: u32) {
        self.begun.set(Some(tick));
        self.interrupted.set(false);
    }

    /// Marks its end.
    pub fn end(&self) {
        self.begun.set(None);
        self.waker.borrow_mut().take();
    }

    /// When the send in flight began.
    pub fn begun(&self) -> Option<u32> {
        self.begun.get()
    }

    /// Ends the send in flight with what has left so far.
    pub fn interrupt(&self) {
        self.interrupted.set(true);
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }

    fn poll_interrupted(&self, context: &Context<'_>) -> Poll<()> {
        if self.interrupted.get() {
            return Poll::Ready(());
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl Engine {
    /// Word for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Uring(_) => "uring",
            Self::Portable(_) => "portable",
            Self::Scripted(_) => "scripted",
        }
    }

    /// Takes over an accepted connection, non-blocking.
    ///
    /// # Errors
    /// The kernel refused to watch it.
    pub fn adopt(&self, fd: OwnedFd) -> io::Result<Socket> {
        match self {
            Self::Uring(ring) => Ok(Socket::Uring(ring.adopt(fd))),
            Self::Portable(portable) => portable.adopt(fd).map(Socket::Portable),
            Self::Scripted(_) => Err(io::Error::other("the simulation makes its own connections")),
        }
    }

    /// The next connection of a listening socket.
    ///
    /// # Errors
    /// As accept(2); a caller goes on after a pause.
    pub async fn accept(&self, listener: &Socket) -> io::Result<OwnedFd> {
        match (self, listener) {
            (Self::Uring(ring), Socket::Uring(listener)) => ring.accept(listener).await,
            (Self::Portable(_), Socket::Portable(listener)) => listener.accept().await,
            _ => Err(foreign()),
        }
    }

    /// Receives into the spare capacity of `buffer`; 0 is the end of the stream.
    ///
    /// # Errors
    /// As recv(2).
    pub async fn recv(&self, socket: &Socket, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        assert!(buffer.len() < buffer.capacity(), "there is room to receive into");
        match (self, socket) {
            (Self::Uring(ring), Socket::Uring(socket)) => ring.recv(socket, buffer).await,
            (Self::Portable(_), Socket::Portable(socket)) => socket.recv(buffer).await,
            (Self::Scripted(_), Socket::Scripted(socket)) => socket.recv(buffer).await,
            _ => (Err(foreign()), buffer),
        }
    }

    /// Waits for bytes, holding no memory, and receives the first of them behind what is in `room`'s buffer, which is made
    /// when they are there and must have room; 0 is the end of the stream, with or without a buffer.
    ///
    /// # Errors
    /// As recv(2).
    pub async fn recv_first(
        &self,
        socket: &Socket,
        room: impl FnOnce() -> Vec<u8>,
    ) -> (io::Result<usize>, Vec<u8>) {
        match (self, socket) {
            (Self::Uring(ring), Socket::Uring(socket)) => ring.recv_first(socket, room).await,
            (Self::Portable(_), Socket::Portable(socket)) => socket.recv_first(room).await,
            (Self::Scripted(_), Socket::Scripted(socket)) => socket.recv(room()).await,
            _ => (Err(foreign()), Vec::new()),
        }
    }

    /// Sends header and slices, by reference where the bytes are hot, and gives back what has not left. Something is
    /// left when `watch` was interrupted or the connection broke half-way; if it broke, the next send says so.
    ///
    /// # Errors
    /// As sendmsg(2), if not one byte has left.
    pub async fn send(
        &self,
        socket: &Socket,
        outgoing: Outgoing,
        watch: &SendWatch,
    ) -> (io::Result<usize>, Outgoing) {
        match (self, socket) {
            (Self::Uring(ring), Socket::Uring(socket)) => ring.send(socket, outgoing, watch).await,
            (Self::Portable(_), Socket::Portable(socket)) => socket.send(outgoing, watch).await,
            (Self::Scripted(_), Socket::Scripted(socket)) => socket.send(outgoing, watch).await,
            _ => (Err(foreign()), outgoing),
        }
    }

    /// Waits, holding nothing, until the peer has made room.
    ///
    /// # Errors
    /// The connection is broken.
    pub async fn writable(&self, socket: &Socket) -> io::Result<()> {
        match (self, socket) {
            (Self::Uring(ring), Socket::Uring(socket)) => ring.writable(socket).await,
            (Self::Portable(_), Socket::Portable(socket)) => socket.writable().await,
            (Self::Scripted(_), Socket::Scripted(socket)) => socket.writable().await,
            _ => Err(foreign()),
        }
    }

    /// Ends the sending half of a connection: behind what was sent the peer sees the end of the stream, and what it
    /// still sends can be received.
    ///
    /// # Errors
    /// The connection is broken already.
    pub fn shutdown_write(&self, socket: &Socket) -> io::Result<()> {
        let fd = match socket {
            Socket::Uring(socket) => socket.as_raw_fd(),
            Socket::Portable(socket) => socket.as_raw_fd(),
            Socket::Scripted(socket) => {
                socket.shutdown_write();
                return Ok(());
            }
        };
        // SAFETY: a system call on a number, which the borrowed socket keeps open; it touches no memory.
        let result = unsafe { libc::shutdown(fd, libc::SHUT_WR) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Closing this socket will throw away what its peer has not taken, and tell it so (RST): nobody who has
    /// stopped reading keeps memory of ours any longer.
    pub fn abandon(&self, socket: &Socket) {
        let fd = match socket {
            Socket::Uring(socket) => socket.as_raw_fd(),
            Socket::Portable(socket) => socket.as_raw_fd(),
            Socket::Scripted(_) => return,
        };
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the number is kept open by the borrowed socket; the call reads one structure of this stack. Refused
        // only for what is no connection any more.
        unsafe {
            libc::setsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            );
        }
    }

    /// Reads `len` bytes (a multiple of [`UNIT_BYTES`], as is `offset`) at `offset` of `file` behind the
    /// watermark of `lease`. Short counts are continued; the watermark covers exactly what was read.
    ///
    /// # Errors
    /// As pread(2); `UnexpectedEof` if the file ends before.
    pub async fn read_at(
        &self,
        file: RawFd,
        offset: u64,
        mut lease: LeaseMut,
        len: usize,
    ) -> (io::Result<()>, LeaseMut) {
        assert!(len.is_multiple_of(UNIT_BYTES) && offset.is_multiple_of(UNIT_BYTES as u64));
        assert!(len <= lease.capacity() - lease.filled());
        let mut done = 0;
        let mut repeats = 0;
        while done < len {
            let at = offset + done as u64;
            let (result, back) = match self {
                Self::Uring(ring) => ring.read_at(file, at, lease, len - done).await,
                Self::Portable(portable) => portable.read_at(file, at, lease, len - done).await,
                Self::Scripted(scripted) => scripted.read_at(at, lease, len - done).await,
            };
            lease = back;
            // A direct read goes on at an aligned place, so the odd tail of a short count is read again.
            match result {
                Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), lease),
                Ok(count) if count >= UNIT_BYTES => {
                    let whole = count.min(len - done) / UNIT_BYTES * UNIT_BYTES;
                    lease.advance(whole);
                    done += whole;
                    repeats = 0;
                }
                Ok(_) if repeats < REPEATS_MAX => repeats += 1,
                Ok(_) => return (Err(io::Error::other("the drive gives less than a unit at a time")), lease),
                Err(error) if says_nothing(&error) && repeats < REPEATS_MAX => repeats += 1,
                Err(error) => return (Err(error), lease),
            }
        }
        (Ok(()), lease)
    }
}

/// Interrupted, try again, or cancelled though nobody asked (seen around signals on kernels before 6.14).
fn says_nothing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
}

fn foreign() -> io::Error {
    io::Error::other("a socket works only with the engine that made it")
}
