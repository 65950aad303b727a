//! The engine for hosts that refuse io_uring: readiness from the runtime's epoll, and positioned reads on a
//! bounded pool of threads.
//!
//! A socket call here begins and ends while the future is polled, so nothing is in flight when the future is
//! dropped. A drive read is in flight on a pool thread, which owns the lease and outlives the future.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::{Poll, ready};

use socket2::{MsgHdr, Socket};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;

use super::{Outgoing, SendWatch, Sends, reference, way};
use crate::arena::LeaseMut;

/// Most positioned reads of one file that a worker has on its pool at a time; the others wait. The pool has as many
/// threads for each drive, and more, so that neither another drive nor the look-up of a name waits for a slow one.
pub const READS_MAX: usize = 6;

thread_local! {
    // A worker is a thread, and so is its share of the pool.
    static READS: RefCell<HashMap<RawFd, Arc<Semaphore>>> = RefCell::default();
}

fn reads_of(file: RawFd) -> Arc<Semaphore> {
    let new = || Arc::new(Semaphore::new(READS_MAX));
    READS.with(|reads| Arc::clone(reads.borrow_mut().entry(file).or_insert_with(new)))
}

/// The engine. Its pool is the blocking pool of the worker's runtime, whose size the worker bounds.
#[derive(Clone, Debug, Default)]
pub struct Portable {
    /// Which ways of sending are allowed; there is no zero-copy here.
    pub sends: Sends,
}

/// A non-blocking socket watched by the runtime.
#[derive(Debug)]
pub struct PortableSocket {
    inner: AsyncFd<Socket>,
    sends: Sends,
}

impl Portable {
    pub(super) fn adopt(&self, fd: OwnedFd) -> io::Result<PortableSocket> {
        let socket = Socket::from(fd);
        socket.set_nonblocking(true)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        // SAFETY: the socket owns its descriptor and is never replaced or closed while it is registered.
        let inner = unsafe { AsyncFd::register_with_interest(socket, interest)? };
        Ok(PortableSocket { inner, sends: self.sends })
    }

    pub(super) async fn read_at(
        &self,
        file: RawFd,
        offset: u64,
        mut lease: LeaseMut,
        len: usize,
    ) -> (io::Result<usize>, LeaseMut) {
        let turn = reads_of(file).acquire_owned().await.expect("the semaphore is never closed");
        let read = tokio::task::spawn_blocking(move || {
            // Held by the read, not by who waits for it: an abandoned read still has its thread.
            let _turn = turn;
            let target = &mut lease.spare_mut()[..len];
            // SAFETY: the target is a live, exclusive slice of `len` bytes; the call is synchronous.
            let count = unsafe { libc::pread(file, target.as_mut_ptr().cast(), len, offset.cast_signed()) };
            let result = usize::try_from(count).map_err(|_| io::Error::last_os_error());
            (result, lease)
        });
        // The pool neither cancels nor panics here: the closure is three calls.
        read.await.expect("a positioned read returns")
    }
}

impl PortableSocket {
    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.inner.get_ref().as_raw_fd()
    }

    pub(super) async fn accept(&self) -> io::Result<OwnedFd> {
        let (socket, _) = self.inner.async_io(Interest::READABLE, Socket::accept).await?;
        Ok(socket.into())
    }

    pub(super) async fn recv(&self, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let received = self
            .inner
            .async_io(Interest::READABLE, |socket| {
                let spare: &mut [MaybeUninit<u8>] = buffer.spare_capacity_mut();
                socket.recv(spare)
            })
            .await;
        if let Ok(received) = received {
            let len = buffer.len() + received;
            assert!(len <= buffer.capacity(), "the kernel wrote within the spare capacity");
            // SAFETY: recv(2) initialised `received` bytes of the spare capacity.
            unsafe { buffer.set_len(len) };
        }
        (received, buffer)
    }

    pub(super) async fn recv_first(&self, room: impl FnOnce() -> Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        match self.inner.readable().await {
            Ok(mut guard) => guard.retain_ready(),
            Err(error) => return (Err(error), Vec::new()),
        }
        self.recv(room()).await
    }

    pub(super) async fn send(
        &self,
        mut outgoing: Outgoing,
        watch: &SendWatch,
    ) -> (io::Result<usize>, Outgoing) {
        let mut sent = 0;
        let by_reference = way::by_reference(self.sends, &outgoing);
        loop {
            if outgoing.is_empty() {
                return (Ok(sent), outgoing);
            }
            let result = if by_reference {
                reference::push(self.as_raw_fd(), &mut outgoing)
            } else {
                let vectors = outgoing.io_slices();
                let result =
                    self.inner.get_ref().sendmsg(&MsgHdr::new().with_buffers(&vectors), libc::MSG_NOSIGNAL);
                drop(vectors);
                result.inspect(|count| outgoing.consume(*count))
            };
            match result {
                // By reference, nothing at all is a socket that is full.
                Ok(0) => {}
                Ok(count) => {
                    sent += count;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return (if sent > 0 { Ok(sent) } else { Err(error) }, outgoing),
            }
            let interrupted = std::future::poll_fn(|context| {
                if let Poll::Ready(ready) = self.inner.poll_write_ready(context) {
                    return Poll::Ready(ready.map(|mut guard| {
                        guard.clear_ready();
                        false
                    }));
                }
                ready!(watch.poll_interrupted(context));
                Poll::Ready(Ok(true))
            });
            match interrupted.await {
                Ok(false) => {}
                Ok(true) => return (Ok(sent), outgoing),
                Err(error) => return (if sent > 0 { Ok(sent) } else { Err(error) }, outgoing),
            }
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        self.inner.writable().await.map(|mut guard| guard.retain_ready())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use tokio::runtime::{Builder, LocalOptions};

    use super::*;
    use crate::arena::{Arena, ArenaOptions, Purpose};
    use crate::engine::Engine;

    const MIB: usize = 1 << 20;

    fn file() -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(MIB as u64).expect("space");
        file
    }

    /// Reads of a drive that hung once took every thread, and with them the look-ups of names and another drive's
    /// reads.
    #[test]
    fn reads_of_one_file_leave_threads_for_look_ups_and_other_files() {
        let arena =
            Arena::build(ArenaOptions { bytes: 16 * MIB, reads_bytes: 4 * MIB, fills_bytes: 2 * MIB })
                .expect("memory");
        let (hung, healthy) = (file(), file());
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(READS_MAX + 1)
            .build_local(LocalOptions::default())
            .expect("a runtime");
        runtime.block_on(async {
            let engine = Engine::Portable(Portable::default());
            let read = |file: &File| {
                let lease = arena.grant(Purpose::Read, MIB).expect("memory");
                engine.read_at(file.as_raw_fd(), 0, lease, MIB)
            };
            // As many reads as may be under way, none of which ends.
            let turns = u32::try_from(READS_MAX).expect("a few");
            let hanging = reads_of(hung.as_raw_fd()).acquire_many_owned(turns).await.expect("all turns");
            let mut waiting = pin!(read(&hung));
            let mut context = Context::from_waker(Waker::noop());
            assert!(waiting.as_mut().poll(&mut context).is_pending());
            assert_eq!(tokio::task::spawn_blocking(|| 7).await.expect("a look-up"), 7);
            read(&healthy).await.0.expect("another drive's read");
            assert!(waiting.as_mut().poll(&mut context).is_pending(), "it waits for its turn");
            drop(hanging);
            let (result, lease) = waiting.await;
            result.expect("a read");
            assert_eq!(lease.filled(), MIB);
        });
    }
}
