//! The table of operations in flight: it owns what the kernel may still touch.
//!
//! Every operation has a key that is never used twice (a running number beside the slot), so a completion
//! that comes late, twice, or for somebody else's operation settles nothing. A future only holds the key;
//! when it is dropped the entry becomes an orphan and its leases stay here until the completion.
//!
//! A zero-copy send completes twice: with its result, which is what its future waits for, and with a notification when
//! the network has let go of the bytes. Between the two what was sent stays here, also when the connection is closed:
//! whether there will be a notification is told by the flag of the first completion (`IORING_CQE_F_MORE`), never by its
//! result (`io_uring_enter(2)`, `IORING_OP_SENDMSG_ZC`).

use std::os::fd::{FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{Poll, Waker};

use io_uring::cqueue;
use slab::Slab;

use super::super::way::Path;
use super::super::{Outgoing, SLICES_MAX};
use super::pool::Pool;
use crate::arena::LeaseMut;

/// User data of operations whose completion nobody waits for.
pub(super) const NOBODY: u64 = 0;
/// User data of the poll of the runtime's epoll instance; no key is that small.
pub(super) const WATCH: u64 = 1;

/// What a notification says where the kernel has copied (`IORING_NOTIF_USAGE_ZC_COPIED`).
const COPIED: i32 = i32::MIN;
/// Frames and heads kept for the next sends, each.
const SPARES_MAX: usize = 64;
/// A larger head is not kept.
const HEADER_BYTES_KEPT: usize = 16 << 10;

/// Names one operation for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) u64);

impl Key {
    fn index(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }
}

/// What an operation owns while the kernel has it.
#[derive(Debug)]
pub(super) enum Held {
    Accept,
    Poll,
    Recv(Vec<u8>),
    /// Any buffer of the pool; which one, once there is something in it.
    RecvFirst(Option<u16>),
    Send(Box<SendFrame>),
    /// What a zero-copy send has left over, while the rest of it stays with the network.
    Rest(Outgoing),
    Read(LeaseMut),
}

/// A message header and its vectors at a stable address, with the bytes that they point to.
pub(super) struct SendFrame {
    pub(super) message: libc::msghdr,
    pub(super) vectors: [libc::iovec; SLICES_MAX + 1],
    pub(super) outgoing: Outgoing,
    /// Of a zero-copy send: the path, and what it holds of us.
    pub(super) zero_copy: Option<ZeroCopy>,
}

#[derive(Debug)]
pub(super) struct ZeroCopy {
    pub(super) path: Rc<Path>,
    bytes: u64,
    /// Whether the kernel says with the notification if it has copied.
    is_reported: bool,
}

impl std::fmt::Debug for SendFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendFrame({} bytes)", self.outgoing.len())
    }
}

#[derive(Debug)]
enum State {
    Waiting(Option<Waker>),
    /// With a result; and whether a notification is still to come.
    Done(i32, bool),
    /// Its future has the result, and the network still has the bytes.
    Lent,
    Orphan,
}

#[derive(Debug)]
struct Operation {
    key: Key,
    held: Held,
    state: State,
}

/// All operations of one ring.
#[derive(Debug, Default)]
pub(super) struct Operations {
    slots: Slab<Operation>,
    number: u32,
    /// Completions that matched no operation.
    pub(super) stale: u64,
    /// Receives whose buffer the kernel chose.
    pub(super) chosen: u64,
    /// Bytes that the network holds now, zero-copy.
    pub(super) lent_bytes: u64,
    /// Bytes sent zero-copy that the kernel has copied all the same.
    pub(super) copied_bytes: u64,
    #[expect(clippy::vec_box, reason = "the kernel has the address of a frame")]
    frames: Vec<Box<SendFrame>>,
    headers: Vec<Vec<u8>>,
    /// What idle connections receive into, if the kernel has it.
    pub(super) pool: Option<Pool>,
}

impl Operations {
    /// None yet; idle connections will receive into `pool`.
    pub(super) fn new(pool: Option<Pool>) -> Self {
        let mut operations = Self::default();
        operations.pool = pool;
        operations
    }

    pub(super) fn insert(&mut self, held: Held) -> Key {
        // Never zero, so that no key equals NOBODY.
        self.number = self.number.wrapping_add(1).max(1);
        let vacant = self.slots.vacant_entry();
        let key = Key(u64::from(self.number) << 32 | vacant.key() as u64);
        vacant.insert(Operation { key, held, state: State::Waiting(None) });
        key
    }

    /// A frame for a send, empty.
    pub(super) fn frame(&mut self) -> Box<SendFrame> {
        self.frames.pop().unwrap_or_else(SendFrame::boxed)
    }

    /// Notes that a frame goes out zero-copy.
    pub(super) fn lend(&mut self, frame: &mut SendFrame, path: Rc<Path>, is_reported: bool) {
        let bytes = frame.outgoing.len() as u64;
        path.hold(bytes);
        self.lent_bytes += bytes;
        frame.zero_copy = Some(ZeroCopy { path, bytes, is_reported });
    }

    /// Takes a frame back, with what was in it.
    pub(super) fn unframe(&mut self, mut frame: Box<SendFrame>) -> Outgoing {
        let outgoing = std::mem::take(&mut frame.outgoing);
        self.end_lending(&mut frame);
        if self.frames.len() < SPARES_MAX {
            self.frames.push(frame);
        }
        outgoing
    }

    pub(super) fn held(&mut self, key: Key) -> &mut Held {
        &mut self.slots[key.index()].held
    }

    /// Whether a completion is of a drive's read, behind which there is much to do.
    pub(super) fn is_read(&self, user_data: u64) -> bool {
        let key = Key(user_data);
        let operation = self.slots.get(key.index()).filter(|operation| operation.key == key);
        operation.is_some_and(|operation| matches!(operation.held, Held::Read(_)))
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.len()
    }

    /// A completion came.
    pub(super) fn complete(&mut self, user_data: u64, result: i32, flags: u32) {
        let key = Key(user_data);
        let Some(operation) = self.slots.get_mut(key.index()).filter(|operation| operation.key == key) else {
            self.stale += u64::from(user_data != NOBODY);
            return;
        };
        if cqueue::notif(flags) {
            return self.notify(key, result);
        }
        if let Held::RecvFirst(buffer) = &mut operation.held {
            *buffer = cqueue::buffer_select(flags);
            self.chosen += u64::from(buffer.is_some());
        }
        let is_lent = cqueue::more(flags);
        match std::mem::replace(&mut operation.state, State::Done(result, is_lent)) {
            State::Waiting(waker) => {
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            State::Orphan if is_lent => operation.state = State::Orphan,
            State::Orphan => self.forget(key, result),
            state @ (State::Done(..) | State::Lent) => {
                operation.state = state;
                self.stale += 1;
            }
        }
    }

    /// The network has let go of what a zero-copy send gave it.
    fn notify(&mut self, key: Key, usage: i32) {
        let operation = &mut self.slots[key.index()];
        let Held::Send(frame) = &mut operation.held else {
            self.stale += 1;
            return;
        };
        if let Some(ZeroCopy { path, bytes, is_reported: true }) = &frame.zero_copy {
            let is_copied = usage & COPIED != 0;
            path.learn(is_copied);
            // If the future has not looked yet, what was not sent is still among the bytes.
            let sent = match operation.state {
                State::Done(result, _) => u64::try_from(result).unwrap_or(0),
                _ => *bytes,
            };
            self.copied_bytes += if is_copied { sent } else { 0 };
        }
        match &mut operation.state {
            State::Done(_, is_lent @ true) => *is_lent = false,
            State::Lent | State::Orphan => {
                let Held::Send(frame) = self.slots.remove(key.index()).held else {
                    unreachable!("just seen")
                };
                let mut header = self.unframe(frame).header;
                if self.headers.len() < SPARES_MAX && header.capacity() <= HEADER_BYTES_KEPT {
                    header.clear();
                    self.headers.push(header);
                }
            }
            State::Done(_, false) | State::Waiting(_) => self.stale += 1,
        }
    }

    /// The result and what the operation owned, once it is done.
    pub(super) fn poll(&mut self, key: Key, waker: &Waker) -> Poll<(i32, Held)> {
        let operation = &mut self.slots[key.index()];
        debug_assert_eq!(operation.key, key, "a future asks for its own operation");
        match &mut operation.state {
            State::Done(result, false) => {
                let result = *result;
                Poll::Ready((result, self.slots.remove(key.index()).held))
            }
            State::Done(result, true) => {
                let result = *result;
                operation.state = State::Lent;
                let Held::Send(frame) = &mut operation.held else { unreachable!("only sends are notified") };
                let sent = usize::try_from(result).unwrap_or(0);
                let header = self.headers.pop().unwrap_or_default();
                let rest = frame.outgoing.part_behind(sent, header);
                if let Some(lent) = &mut frame.zero_copy {
                    let unsent = lent.bytes - sent as u64;
                    lent.bytes = sent as u64;
                    lent.path.give_back(unsent);
                    self.lent_bytes -= unsent;
                }
                Poll::Ready((result, Held::Rest(rest)))
            }
            State::Waiting(Some(known)) if known.will_wake(waker) => Poll::Pending,
            State::Waiting(known) => {
                *known = Some(waker.clone());
                Poll::Pending
            }
            State::Orphan | State::Lent => unreachable!("no future asks for it any more"),
        }
    }

    /// The future is gone. True if the operation must be cancelled.
    pub(super) fn abandon(&mut self, key: Key) -> bool {
        let operation = &mut self.slots[key.index()];
        match operation.state {
            State::Done(result, false) => {
                self.forget(key, result);
                false
            }
            State::Done(_, true) => {
                operation.state = State::Orphan;
                false
            }
            State::Waiting(_) => {
                operation.state = State::Orphan;
                true
            }
            State::Orphan | State::Lent => unreachable!("an operation is abandoned once"),
        }
    }

    /// Drops what an operation owned, whose result nobody wants.
    fn forget(&mut self, key: Key, result: i32) {
        match self.slots.remove(key.index()).held {
            Held::Accept if result >= 0 => drop(accepted(result)),
            Held::Send(frame) => drop(self.unframe(frame)),
            Held::RecvFirst(Some(buffer)) => self.give_buffer(buffer),
            _ => {}
        }
    }

    /// Gives a buffer of the pool back to the kernel, unread.
    fn give_buffer(&mut self, buffer: u16) {
        self.pool.as_mut().expect("it came from there").give(buffer);
    }

    fn end_lending(&mut self, frame: &mut SendFrame) {
        if let Some(ZeroCopy { path, bytes, .. }) = frame.zero_copy.take() {
            path.give_back(bytes);
            self.lent_bytes -= bytes;
        }
    }
}

impl Drop for Operations {
    fn drop(&mut self) {
        // The ring is closed after this table, and the kernel may finish what it holds later still. Better a
        // few bytes too many at the end of a worker than memory that is given back under the kernel.
        for operation in self.slots.drain() {
            if !matches!(operation.state, State::Done(_, false)) {
                std::mem::forget(operation.held);
            }
        }
    }
}

/// The descriptor of an accept that went well.
pub(super) fn accepted(result: i32) -> OwnedFd {
    // SAFETY: the kernel installed this descriptor for the accept whose result it is, and the result is
    // taken out of the table once, so nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, ArenaOptions, Purpose};
    use crate::engine::Slice;

    #[test]
    fn a_stale_completion_settles_nothing() {
        let mut operations = Operations::default();
        let first = operations.insert(Held::Poll);
        operations.complete(first.0, 0, 0);
        assert!(operations.poll(first, Waker::noop()).is_ready());
        let second = operations.insert(Held::Poll);
        assert_eq!(first.index(), second.index(), "the slot is used again");
        operations.complete(first.0, 7, 0);
        assert!(operations.poll(second, Waker::noop()).is_pending());
        assert_eq!(operations.stale, 1);
        operations.complete(second.0, 8, 0);
        operations.complete(second.0, 9, 0);
        match operations.poll(second, Waker::noop()) {
            Poll::Ready((result, _)) => assert_eq!(result, 8, "the first completion counts"),
            Poll::Pending => panic!("it is done"),
        }
        assert_eq!(operations.stale, 2);
    }

    #[test]
    fn an_orphan_keeps_its_buffer_until_the_completion() {
        let mut operations = Operations::default();
        let key = operations.insert(Held::Recv(vec![0; 16]));
        assert!(operations.abandon(key));
        assert_eq!(operations.in_flight(), 1);
        operations.complete(key.0, -libc::ECANCELED, 0);
        assert_eq!(operations.in_flight(), 0);
    }

    #[test]
    fn an_accept_that_nobody_waits_for_closes_its_connection() {
        use std::os::fd::{AsRawFd, IntoRawFd};
        let (mine, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut operations = Operations::default();
        let key = operations.insert(Held::Accept);
        assert!(operations.abandon(key));
        let fd = theirs.as_raw_fd();
        operations.complete(key.0, theirs.into_raw_fd(), 0);
        // The other end sees the close, whatever number `fd` has now.
        let _ = fd;
        mine.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        assert_eq!(std::io::Read::read(&mut &mine, &mut [0; 1]).unwrap(), 0);
    }

    const MORE: u32 = 1 << 1;
    const NOTIFICATION: u32 = 1 << 3;

    fn arena() -> &'static Arena {
        Arena::build(ArenaOptions { bytes: 16 << 20, reads_bytes: 4 << 20, fills_bytes: 4 << 20 })
            .expect("memory")
    }

    /// A zero-copy send of a head of 5 bytes and two slices of 4,096 each.
    fn lent(operations: &mut Operations, arena: &'static Arena, path: &Rc<Path>) -> Key {
        let mut frame = operations.frame();
        frame.outgoing = Outgoing::header(b"head|".to_vec());
        for _ in 0..2 {
            let mut lease = arena.grant(Purpose::Fill, 4096).expect("memory");
            lease.append(&[7; 4096]);
            frame.outgoing.push(Slice::new(lease.freeze(), 0..4096));
        }
        operations.lend(&mut frame, Rc::clone(path), true);
        operations.insert(Held::Send(frame))
    }

    fn rest(polled: Poll<(i32, Held)>) -> (i32, Outgoing) {
        match polled {
            Poll::Ready((result, Held::Rest(outgoing))) => (result, outgoing),
            other => panic!("{other:?}"),
        }
    }

    /// The result says that the bytes are in the socket's queue, not that nobody reads them any more.
    #[test]
    fn what_was_sent_zero_copy_is_held_until_the_notification() {
        let arena = arena();
        let (mut operations, path) = (Operations::default(), Rc::new(Path::default()));
        let key = lent(&mut operations, arena, &path);
        assert_eq!(operations.lent_bytes, 8197);
        operations.complete(key.0, 8197, MORE);
        let (sent, left) = rest(operations.poll(key, Waker::noop()));
        assert_eq!((sent, left.len()), (8197, 0));
        drop(left);
        assert_eq!(arena.status().fills_bytes, 8192, "the future has nothing, the network everything");
        operations.complete(key.0, 0, NOTIFICATION);
        assert_eq!((arena.status().fills_bytes, operations.lent_bytes, operations.in_flight()), (0, 0, 0));
        operations.complete(key.0, 0, NOTIFICATION);
        assert_eq!(operations.stale, 1, "nobody waits for a second one");
    }

    #[test]
    fn what_was_not_sent_comes_back_at_once() {
        let arena = arena();
        for (sent, header, held) in
            [(3, 2, 0), (5, 0, 0), (5 + 1000, 0, 4096), (5 + 4096, 0, 4096), (5 + 4097, 0, 8192)]
        {
            let (mut operations, path) = (Operations::default(), Rc::new(Path::default()));
            let key = lent(&mut operations, arena, &path);
            operations.complete(key.0, sent, MORE);
            let (result, left) = rest(operations.poll(key, Waker::noop()));
            assert_eq!((result, left.len()), (sent, 8197 - sent as usize));
            assert_eq!(left.header.len(), header);
            assert_eq!(operations.lent_bytes, sent as u64);
            drop(left);
            assert_eq!(arena.status().fills_bytes, held, "{sent} bytes sent");
            operations.complete(key.0, COPIED, NOTIFICATION);
            assert_eq!((arena.status().fills_bytes, operations.lent_bytes), (0, 0));
            assert_eq!(operations.copied_bytes, sent as u64);
        }
    }

    /// An error may be followed by a notification as well, and a result by none.
    #[test]
    fn the_flag_decides_not_the_result() {
        let arena = arena();
        let (mut operations, path) = (Operations::default(), Rc::new(Path::default()));
        let key = lent(&mut operations, arena, &path);
        operations.complete(key.0, -libc::ECONNRESET, MORE);
        let (result, left) = rest(operations.poll(key, Waker::noop()));
        assert_eq!((result, left.len()), (-libc::ECONNRESET, 8197));
        drop(left);
        operations.complete(key.0, 0, NOTIFICATION);
        assert_eq!((arena.status().fills_bytes, operations.in_flight()), (0, 0));

        let key = lent(&mut operations, arena, &path);
        operations.complete(key.0, -libc::EINVAL, 0);
        let Poll::Ready((_, Held::Send(frame))) = operations.poll(key, Waker::noop()) else {
            panic!("it is done")
        };
        assert_eq!(operations.unframe(frame).len(), 8197);
        assert_eq!((arena.status().fills_bytes, operations.lent_bytes, operations.stale), (0, 0, 0));
    }

    /// The notification may be there before the future looks.
    #[test]
    fn a_notification_that_comes_early_keeps_nothing_back() {
        let arena = arena();
        let (mut operations, path) = (Operations::default(), Rc::new(Path::default()));
        let key = lent(&mut operations, arena, &path);
        operations.complete(key.0, 1000, MORE);
        operations.complete(key.0, COPIED, NOTIFICATION);
        assert_eq!(operations.copied_bytes, 1000);
        let Poll::Ready((1000, Held::Send(frame))) = operations.poll(key, Waker::noop()) else {
            panic!("it is done")
        };
        drop(operations.unframe(frame));
        assert_eq!((arena.status().fills_bytes, operations.lent_bytes, operations.in_flight()), (0, 0, 0));
    }

    #[test]
    fn an_abandoned_zero_copy_send_is_held_until_its_last_completion() {
        let arena = arena();
        let (mut operations, path) = (Operations::default(), Rc::new(Path::default()));
        for is_early in [true, false] {
            let key = lent(&mut operations, arena, &path);
            if is_early {
                assert!(operations.abandon(key), "to be cancelled");
                operations.complete(key.0, -libc::ECANCELED, MORE);
            } else {
                operations.complete(key.0, 8197, MORE);
                assert!(!operations.abandon(key), "there is nothing left to cancel");
            }
            assert_eq!(arena.status().fills_bytes, 8192);
            operations.complete(key.0, 0, NOTIFICATION);
            assert_eq!(
                (arena.status().fills_bytes, operations.lent_bytes, operations.in_flight()),
                (0, 0, 0)
            );
        }
        // Cancelled before it began: nothing more will come.
        let key = lent(&mut operations, arena, &path);
        assert!(operations.abandon(key));
        operations.complete(key.0, -libc::ECANCELED, 0);
        assert_eq!((arena.status().fills_bytes, operations.lent_bytes, operations.stale), (0, 0, 0));
    }
}
