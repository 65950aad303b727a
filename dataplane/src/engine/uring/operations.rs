//! The table of operations in flight: it owns what the kernel may still touch.
//!
//! Every operation has a key that is never used twice (a running number beside the slot), so a completion
//! that comes late, twice, or for somebody else's operation settles nothing. A future only holds the key;
//! when it is dropped the entry becomes an orphan and its leases stay here until the completion.

use std::os::fd::{FromRawFd, OwnedFd};
use std::task::{Poll, Waker};

use slab::Slab;

use super::super::{Outgoing, SLICES_MAX};
use crate::arena::LeaseMut;

/// User data of operations whose completion nobody waits for.
pub(super) const NOBODY: u64 = 0;
/// User data of the poll of the runtime's epoll instance; no key is that small.
pub(super) const WATCH: u64 = 1;

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
    Send(Box<SendFrame>),
    Read(LeaseMut),
}

/// A message header and its vectors at a stable address, with the bytes that they point to.
pub(super) struct SendFrame {
    pub(super) message: libc::msghdr,
    pub(super) vectors: [libc::iovec; SLICES_MAX + 1],
    pub(super) outgoing: Outgoing,
}

impl std::fmt::Debug for SendFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendFrame({} bytes)", self.outgoing.len())
    }
}

#[derive(Debug)]
enum State {
    Waiting(Option<Waker>),
    Done(i32),
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
}

impl Operations {
    pub(super) fn insert(&mut self, held: Held) -> Key {
        // Never zero, so that no key equals NOBODY.
        self.number = self.number.wrapping_add(1).max(1);
        let vacant = self.slots.vacant_entry();
        let key = Key(u64::from(self.number) << 32 | vacant.key() as u64);
        vacant.insert(Operation { key, held, state: State::Waiting(None) });
        key
    }

    pub(super) fn held(&mut self, key: Key) -> &mut Held {
        &mut self.slots[key.index()].held
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.len()
    }

    /// A completion came.
    pub(super) fn complete(&mut self, user_data: u64, result: i32) {
        let key = Key(user_data);
        let Some(operation) = self.slots.get_mut(key.index()).filter(|operation| operation.key == key) else {
            self.stale += u64::from(user_data != NOBODY);
            return;
        };
        match std::mem::replace(&mut operation.state, State::Done(result)) {
            State::Waiting(waker) => {
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            State::Orphan => {
                let operation = self.slots.remove(key.index());
                if matches!(operation.held, Held::Accept) && result >= 0 {
                    drop(accepted(result));
                }
            }
            State::Done(first) => {
                operation.state = State::Done(first);
                self.stale += 1;
            }
        }
    }

    /// The result and what the operation owned, once it is done.
    pub(super) fn poll(&mut self, key: Key, waker: &Waker) -> Poll<(i32, Held)> {
        let operation = &mut self.slots[key.index()];
        debug_assert_eq!(operation.key, key, "a future asks for its own operation");
        match &mut operation.state {
            State::Done(result) => {
                let result = *result;
                Poll::Ready((result, self.slots.remove(key.index()).held))
            }
            State::Waiting(Some(known)) if known.will_wake(waker) => Poll::Pending,
            State::Waiting(known) => {
                *known = Some(waker.clone());
                Poll::Pending
            }
            State::Orphan => unreachable!("an orphan has no future"),
        }
    }

    /// The future is gone. True if the operation must be cancelled.
    pub(super) fn abandon(&mut self, key: Key) -> bool {
        let operation = &mut self.slots[key.index()];
        match operation.state {
            State::Done(result) => {
                let operation = self.slots.remove(key.index());
                if matches!(operation.held, Held::Accept) && result >= 0 {
                    drop(accepted(result));
                }
                false
            }
            State::Waiting(_) => {
                operation.state = State::Orphan;
                true
            }
            State::Orphan => unreachable!("an operation is abandoned once"),
        }
    }
}

impl Drop for Operations {
    fn drop(&mut self) {
        // The ring is closed after this table, and the kernel may finish what it holds later still. Better a
        // few bytes too many at the end of a worker than memory that is given back under the kernel.
        for operation in self.slots.drain() {
            if !matches!(operation.state, State::Done(_)) {
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

    #[test]
    fn a_stale_completion_settles_nothing() {
        let mut operations = Operations::default();
        let first = operations.insert(Held::Poll);
        operations.complete(first.0, 0);
        assert!(operations.poll(first, Waker::noop()).is_ready());
        let second = operations.insert(Held::Poll);
        assert_eq!(first.index(), second.index(), "the slot is used again");
        operations.complete(first.0, 7);
        assert!(operations.poll(second, Waker::noop()).is_pending());
        assert_eq!(operations.stale, 1);
        operations.complete(second.0, 8);
        operations.complete(second.0, 9);
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
        operations.complete(key.0, -libc::ECANCELED);
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
        operations.complete(key.0, theirs.into_raw_fd());
        // The other end sees the close, whatever number `fd` has now.
        let _ = fd;
        mine.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
        assert_eq!(std::io::Read::read(&mut &mine, &mut [0; 1]).unwrap(), 0);
    }
}
