//! Memory that the kernel receives into when there is something to receive, and that nobody holds until then.
//!
//! A buffer is named by its number. The kernel takes the next one of the ring of buffers when bytes have come for a receive
//! that asked for any (`IOSQE_BUFFER_SELECT`, `io_uring_register_buf_ring(3)`), and its completion says which; it is the
//! kernel's again as soon as its bytes have been copied out. So thousands of idle connections share a few buffers, and
//! where more than there are become busy in one entry the rest receive into memory of their own.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use memmap2::MmapMut;

/// Bytes of a buffer: the head of a signed request, and some more.
pub(super) const BUFFER_BYTES: usize = 4 << 10;
/// Buffers of one ring, a power of two: as many as requests that come in one entry, on a busy worker.
const BUFFERS: u16 = 64;
/// The only group of buffers of a ring.
pub(super) const GROUP: u16 = 0;

/// The buffers of one ring.
#[derive(Debug)]
pub(super) struct Pool {
    /// The entries by which buffers are offered, and behind them the buffers. Never unmapped: a kernel that still closes
    /// the ring may write here.
    base: NonNull<u8>,
    tail: u16,
}

impl Pool {
    /// Maps the buffers and offers all of them.
    ///
    /// # Errors
    /// No memory, or a kernel or its policy that has no such rings.
    pub(super) fn register(uring: &IoUring) -> io::Result<Self> {
        let mut map = MmapMut::map_anon(entries_bytes() + usize::from(BUFFERS) * BUFFER_BYTES)?;
        let base: NonNull<u8> = NonNull::from(map.as_mut()).cast();
        let address = base.as_ptr().addr() as u64;
        // SAFETY: the map is aligned to a page, holds so many entries at its begin, and once it is registered is never
        // unmapped.
        unsafe { uring.submitter().register_buf_ring_with_flags(address, BUFFERS, GROUP, 0)? };
        std::mem::forget(map);
        let mut pool = Self { base, tail: 0 };
        for buffer in 0..BUFFERS {
            pool.give(buffer);
        }
        Ok(pool)
    }

    /// Appends the first `len` bytes of a buffer that the kernel has filled, and gives it back.
    ///
    /// # Panics
    /// If there is no such buffer, or it has not so many bytes.
    pub(super) fn take(&mut self, buffer: u16, len: usize, into: &mut Vec<u8>) {
        assert!(buffer < BUFFERS && len <= BUFFER_BYTES, "{len} bytes of buffer {buffer}");
        // SAFETY: the buffer lies inside the map and is initialised (zeros at first, whatever was received later). The
        // kernel has given it to us with its completion and takes it again only when it is offered, below.
        let bytes = unsafe { std::slice::from_raw_parts(self.at(buffer).as_ptr(), len) };
        into.extend_from_slice(bytes);
        self.give(buffer);
    }

    /// Offers a buffer to the kernel.
    pub(super) fn give(&mut self, buffer: u16) {
        let place = usize::from(self.tail % BUFFERS);
        let entries = self.base.cast::<BufRingEntry>();
        // SAFETY: the place is one of the entries at the begin of the map. The kernel reads an entry when the tail has
        // passed it and not again; with at most as many buffers as places, the buffer that was offered here before has
        // been taken. Fields are written one by one: in the first entry one of the others is the tail.
        unsafe {
            let entry = entries.add(place).as_mut();
            entry.set_addr(self.at(buffer).as_ptr().addr() as u64);
            entry.set_len(BUFFER_BYTES as u32);
            entry.set_bid(buffer);
        }
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: the tail is a word of the first entry, aligned, inside the map, and written by this thread only; the
        // kernel reads it at any time, hence atomically. What was written above is visible before it.
        unsafe {
            let tail = BufRingEntry::tail(entries.as_ptr()).cast_mut();
            AtomicU16::from_ptr(tail).store(self.tail, Ordering::Release);
        }
    }

    fn at(&self, buffer: u16) -> NonNull<u8> {
        let offset = entries_bytes() + usize::from(buffer) * BUFFER_BYTES;
        // SAFETY: inside the map, for every buffer below BUFFERS; all callers have theirs from there.
        unsafe { self.base.add(offset) }
    }
}

/// Bytes of the entries, in whole units of a buffer.
fn entries_bytes() -> usize {
    (usize::from(BUFFERS) * size_of::<BufRingEntry>()).next_multiple_of(BUFFER_BYTES)
}
