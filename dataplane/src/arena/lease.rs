//! Holds on the arena's memory: one writer, many readers, a watermark between them.

use std::fmt;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::chunk::SlotMeta;
use super::{Arena, LeaseId, PAGE_BYTES, PAGE_UNITS, POISON, UNIT_BYTES};

/// Touches from which a slot counts as hot. To lend it costs a renewal of its page once (about 0.25 ms a MiB), and
/// saves the copy of every send (0.05 to 0.15 ms a MiB).
const HOT_TOUCHES: u8 = 3;

/// A counted, read-only hold on a slot: what was written so far can be read, nothing else.
pub struct Lease {
    arena: &'static Arena,
    page: u32,
    first_unit: u16,
    units: u16,
}

impl Lease {
    /// Bytes that can be read now. Grows while a writer is at work, never shrinks.
    pub fn filled(&self) -> usize {
        self.meta().filled.load(Ordering::Acquire) as usize
    }

    /// Bytes the slot can hold; a multiple of [`UNIT_BYTES`].
    pub fn capacity(&self) -> usize {
        usize::from(self.units) * UNIT_BYTES
    }

    /// The bytes of `range`.
    ///
    /// # Panics
    /// If `range` ends beyond [`Lease::filled`].
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.filled(), "{range:?} is not written yet");
        // SAFETY: the slot lies inside the mapping; bytes below the watermark are written before the release
        // store that moved it and never again while any hold exists, and `self` is a hold.
        unsafe { std::slice::from_raw_parts(self.base().as_ptr().add(range.start), range.len()) }
    }

    /// First byte of the slot; aligned to [`UNIT_BYTES`]. For operations that own this hold.
    pub fn as_ptr(&self) -> *const u8 {
        self.base().as_ptr()
    }

    /// Filled bytes rounded up to [`UNIT_BYTES`]: what a direct write takes. The tail is zeros once the writer
    /// has frozen the lease.
    pub fn padded_len(&self) -> usize {
        self.filled().next_multiple_of(UNIT_BYTES)
    }

    /// Index of the chunk, which is also its index in a ring's table of registered buffers.
    pub fn chunk(&self) -> u16 {
        (self.page as usize * PAGE_BYTES / self.arena.chunk_bytes) as u16
    }

    /// Which slot this is.
    pub fn id(&self) -> LeaseId {
        LeaseId(self.page * PAGE_UNITS as u32 + u32::from(self.first_unit))
    }

    /// When the memory of this slot was last put in the place of other memory, in the arena's count
    /// ([`Arena::renewals`]). Who registered the chunk earlier than that has registered something else.
    pub fn renewal(&self) -> u64 {
        let (chunk, unit) = self.arena.unit(self.page, 0);
        chunk.renewal(unit / PAGE_UNITS)
    }

    /// Notes that the bytes were useful; eviction looks at it. Writes only until they count as hot.
    pub fn touch(&self) {
        let touched = &self.meta().touched;
        let touches = touched.load(Ordering::Relaxed);
        if touches < HOT_TOUCHES {
            // A touch that is lost to another worker's comes again with the next hit.
            touched.store(touches + 1, Ordering::Relaxed);
        }
    }

    /// Whether these bytes may be lent, and are asked for so often that it is worth a new page afterwards.
    pub fn is_lendable(&self) -> bool {
        let (chunk, unit) = self.arena.unit(self.page, usize::from(self.first_unit));
        let meta = &chunk.slots[unit];
        let is_hot = meta.touched.load(Ordering::Relaxed) >= HOT_TOUCHES || meta.lent.load(Ordering::Relaxed);
        is_hot && chunk.file().is_some() && self.arena.is_lending()
    }

    /// Where the kernel finds the bytes to send them by reference: a file and the offset of the slot in it; `None`
    /// where memory is in no file. From now on the slot is not used again before its page has been renewed.
    pub fn lend(&self) -> Option<(BorrowedFd<'static>, u64)> {
        let (chunk, unit) = self.arena.unit(self.page, usize::from(self.first_unit));
        let file = chunk.file()?;
        // Seen by whoever gives back the last hold: dropping a hold publishes what its holder did.
        self.meta().lent.store(true, Ordering::Relaxed);
        Some((file, (unit * UNIT_BYTES) as u64))
    }

    /// The arena it comes from.
    pub fn arena(&self) -> &'static Arena {
        self.arena
    }

    pub(super) fn page(&self) -> u32 {
        self.page
    }

    /// Overwrites the slot, so that who reads it after the last hold is found out.
    pub(super) fn poison(&self) {
        // SAFETY: the last hold is gone (the caller saw the count reach zero), so nobody reads or writes this
        // slot; it lies inside the mapping, which is never unmapped.
        unsafe { self.base().as_ptr().write_bytes(POISON, self.capacity()) };
    }

    fn base(&self) -> NonNull<u8> {
        let (chunk, unit) = self.arena.unit(self.page, usize::from(self.first_unit));
        // SAFETY: `unit` is inside the chunk, so the sum stays inside the one mapping.
        unsafe { chunk.base.add(unit * UNIT_BYTES) }
    }

    pub(super) fn meta(&self) -> &'static SlotMeta {
        let (chunk, unit) = self.arena.unit(self.page, usize::from(self.first_unit));
        &chunk.slots[unit]
    }

    pub(super) fn slot_index(&self) -> usize {
        usize::from(self.first_unit / self.units)
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        let before = self.meta().holds.fetch_add(1, Ordering::Relaxed);
        assert!(before > 0, "a hold is cloned from a hold");
        Self { arena: self.arena, page: self.page, first_unit: self.first_unit, units: self.units }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.meta().holds.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.arena.take_back(self);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({:?}, {} of {})", self.id(), self.filled(), self.capacity())
    }
}

/// The one writer of a slot.
#[derive(Debug)]
pub struct LeaseMut(Lease);

impl LeaseMut {
    /// The first hold on a slot.
    pub(super) fn new(arena: &'static Arena, page: u32, first_unit: u16, units: u16) -> Self {
        Self(Lease { arena, page, first_unit, units })
    }

    /// Appends and moves the watermark: readers see the bytes from here on. One copy; the caller counts it.
    ///
    /// # Panics
    /// If the slot has no room for them.
    pub fn append(&mut self, bytes: &[u8]) {
        let filled = self.0.filled();
        assert!(
            bytes.len() <= self.0.capacity() - filled,
            "{} bytes do not fit behind {filled}",
            bytes.len()
        );
        // SAFETY: the target lies inside the slot (just checked) and above the watermark, where no reader
        // looks and only this one writer writes; source and target cannot overlap, since no `&[u8]` to bytes
        // above the watermark exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.base().as_ptr().add(filled), bytes.len());
        }
        self.0.meta().filled.store((filled + bytes.len()) as u32, Ordering::Release);
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.0.filled()
    }

    /// Bytes the slot can hold.
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Moves the watermark over `len` bytes that an operation wrote behind it at [`LeaseMut::tail`].
    ///
    /// # Panics
    /// If they do not fit.
    pub fn advance(&mut self, len: usize) {
        let filled = self.0.filled();
        assert!(len <= self.0.capacity() - filled, "{len} bytes do not fit behind {filled}");
        self.0.meta().filled.store((filled + len) as u32, Ordering::Release);
    }

    /// The room behind the watermark, for a synchronous read into it; [`LeaseMut::advance`] shows what came.
    pub fn spare_mut(&mut self) -> &mut [u8] {
        let filled = self.0.filled();
        let len = self.0.capacity() - filled;
        // SAFETY: these bytes are mapped and initialised (by the kernel at first, by earlier tenants later),
        // lie above the watermark where no reader looks, and `self` is the only writer.
        unsafe { std::slice::from_raw_parts_mut(self.0.base().as_ptr().add(filled), len) }
    }

    /// Where the next byte goes; valid for `capacity() - filled()` bytes while this writer lives.
    pub fn tail(&self) -> *mut u8 {
        self.0.base().as_ptr().wrapping_add(self.0.filled())
    }

    /// A reader that sees the watermark move.
    pub fn share(&self) -> Lease {
        self.0.clone()
    }

    /// The underlying hold, for its place (chunk, id).
    pub fn lease(&self) -> &Lease {
        &self.0
    }

    /// No more bytes will come. Zeros the rest of the last unit, so that a direct write leaks nothing.
    pub fn freeze(self) -> Lease {
        let filled = self.0.filled();
        let pad = self.0.padded_len() - filled;
        // SAFETY: `padded_len` is at most the capacity, a multiple of the unit; the bytes are above the
        // watermark, so nobody reads them, and `self` is the only writer.
        unsafe { self.0.base().as_ptr().add(filled).write_bytes(0, pad) };
        self.0
    }
}
