//! Registered memory, lent in pieces and counted back.
//!
//! A chunk is at most 1 GiB (the kernel's limit for one registered buffer); the unit inside it is the 2 MiB
//! page, and a page lends slots of one size class while any of them is live. When a class runs dry the RAM
//! tier gives way by whole pages, so that memory never stays cut for a size that nobody asks for any more.
//!
//! A [`LeaseMut`] is the only writer of its bytes and moves a watermark; a [`Lease`] is a counted, read-only
//! hold that sees nothing beyond the watermark. Both may be owned by an operation in flight: the slot is free
//! again only when the last hold is gone, and no hold ever exposes bytes that were not written for it.
//! The arena is never unmapped, so that even a bug here cannot become a use after free.
//!
//! What is kept (which object, which extent) is the table's business; the arena only remembers whom to ask
//! to let go ([`Resident`]).

use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use memmap2::{Advice, MmapMut, MmapOptions};
use tokio::sync::Notify;

/// Unit of lending to a size class, bytes. Also the huge page size, so that one page is one translation.
pub const PAGE_BYTES: usize = 2 << 20;
/// Largest chunk, bytes: what the kernel accepts as one registered buffer.
pub const CHUNK_BYTES_MAX: usize = 1 << 30;
/// Alignment of every slot and granule of its capacity, bytes; enough for direct I/O on 4Kn drives.
pub const UNIT_BYTES: usize = 4096;
/// Largest piece one lease can hold, bytes.
pub const LEASE_BYTES_MAX: usize = PAGE_BYTES;

const PAGE_UNITS: usize = PAGE_BYTES / UNIT_BYTES;

/// Slot sizes in units of 4 KiB. From 64 KiB up each is the page divided by a whole number, so that a page
/// of equal objects wastes at most its last sliver; the steps below bound rounding up to one eighth.
const CLASS_UNITS: [u16; 33] = [
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 23, 25, 28, 32, 36, 42, 46, 51, 56, 64, 73, 85, 102, 128,
    170, 256, 341, 426, 512,
];
const NO_CLASS: u8 = u8::MAX;
const BITMAP_WORDS: usize = PAGE_UNITS / 64;

/// Pages looked at for one eviction: the first that nobody touched since the hand last passed goes, or else
/// the least touched.
const EVICTION_SAMPLE: usize = 8;
/// What returned bytes are overwritten with in test builds.
const POISON: u8 = 0xDD;

/// What a grant is for. Each purpose has its own reserve, so that none can starve the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A drive read that feeds a socket.
    Read,
    /// A download from the origin.
    Fill,
    /// Kept in the RAM tier; always yields.
    Ram,
}

/// Someone who keeps leases in the RAM tier and can be asked to let one go.
pub trait Resident: Send + Sync {
    /// Drops the RAM copy of this extent, if it is still the lease named by `lease`.
    fn evict(&self, extent: u32, lease: LeaseId);
}

/// Which slot a lease is; equal for all holds of one grant, reused after the last of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId(u32);

/// Sizes of an arena, bytes. The RAM tier gets what the two reserves leave.
#[derive(Clone, Copy, Debug)]
pub struct ArenaOptions {
    /// All of it; rounded down to whole pages. At least 8 MiB.
    pub bytes: usize,
    /// Most that drive reads may hold at one time.
    pub reads_bytes: usize,
    /// Most that downloads may hold at one time.
    pub fills_bytes: usize,
}

/// How the arena is used, bytes and counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaStatus {
    /// Bytes joined so far.
    pub bytes: u64,
    /// Bytes of slots held for reads.
    pub reads_bytes: u64,
    /// Bytes of slots held by fills.
    pub fills_bytes: u64,
    /// Bytes of slots in the RAM tier.
    pub ram_bytes: u64,
    /// What the RAM tier may hold.
    pub ram_bytes_max: u64,
    /// Pages that belong to no class.
    pub pages_free: u64,
    /// Pages taken from the RAM tier since the start.
    pub pages_evicted: u64,
    /// Grants refused since the start.
    pub grants_refused: u64,
}

/// The memory. One per process, never unmapped.
pub struct Arena {
    chunks: Box<[OnceLock<Chunk>]>,
    chunk_bytes: usize,
    options: ArenaOptions,
    state: Mutex<State>,
    returned: Notify,
    waiting: AtomicUsize,
    refused: AtomicU64,
}

struct Chunk {
    base: NonNull<u8>,
    bytes: usize,
    slots: Box<[SlotMeta]>,
    /// Owns the mapping; `base` points into it.
    _map: MmapMut,
}

// SAFETY: `base` points into the mapping that the chunk owns for ever; all access to the bytes behind it goes
// through leases, which keep one writer and readers apart by the watermark in `SlotMeta`.
unsafe impl Send for Chunk {}
// SAFETY: as above; the shared parts of `Chunk` itself are atomics.
unsafe impl Sync for Chunk {}

/// One per 4 KiB unit; a slot uses that of its first unit.
#[derive(Default)]
struct SlotMeta {
    holds: AtomicU32,
    filled: AtomicU32,
    touched: AtomicU8,
}

struct State {
    pages: Vec<PageState>,
    pages_free: Vec<u32>,
    partial: [Vec<u32>; CLASS_UNITS.len()],
    used: [u64; 3],
    hand: u32,
    pages_evicted: u64,
}

struct PageState {
    class: u8,
    listed: bool,
    live: u16,
    free: [u64; BITMAP_WORDS],
    tenants: Vec<Tenant>,
}

struct Tenant {
    purpose: Purpose,
    resident: Option<(Weak<dyn Resident>, u32)>,
}

impl Arena {
    /// Maps the first chunk and returns; [`Arena::join_chunk`] brings the others.
    ///
    /// # Errors
    /// The kernel refused the mapping, or the sizes leave less than one page for the RAM tier.
    pub fn build(options: ArenaOptions) -> io::Result<&'static Self> {
        let pages = options.bytes / PAGE_BYTES;
        let bytes = pages * PAGE_BYTES;
        if options.reads_bytes + options.fills_bytes + PAGE_BYTES > bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{bytes} bytes of memory do not hold {} for reads, {} for downloads and at least one \
                     page of {PAGE_BYTES} for the RAM tier",
                    options.reads_bytes, options.fills_bytes
                ),
            ));
        }
        let chunk_bytes = bytes.min(CHUNK_BYTES_MAX);
        let chunks = bytes.div_ceil(chunk_bytes);
        let arena = Self {
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            chunk_bytes,
            options: ArenaOptions { bytes, ..options },
            state: Mutex::new(State {
                pages: Vec::new(),
                pages_free: Vec::new(),
                partial: [const { Vec::new() }; CLASS_UNITS.len()],
                used: [0; 3],
                hand: 0,
                pages_evicted: 0,
            }),
            returned: Notify::new(),
            waiting: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
        };
        let arena: &'static Self = Box::leak(Box::new(arena));
        arena.join_chunk()?;
        Ok(arena)
    }

    /// Maps, populates and adds the next chunk. Returns its index, or `None` when all have joined.
    /// Takes about 0.3 s a GiB: call it off the workers.
    ///
    /// # Errors
    /// The kernel refused the mapping; the arena stays as it was.
    pub fn join_chunk(&'static self) -> io::Result<Option<u16>> {
        let Some(index) = self.chunks.iter().position(|chunk| chunk.get().is_none()) else {
            return Ok(None);
        };
        let bytes = self.chunk_bytes.min(self.options.bytes - index * self.chunk_bytes);
        let chunk = Chunk::map(bytes)?;
        if self.chunks[index].set(chunk).is_err() {
            unreachable!("one thread joins chunks");
        }
        let mut state = self.lock();
        let first = state.pages.len() as u32;
        let count = (bytes / PAGE_BYTES) as u32;
        state.pages.extend((0..count).map(|_| PageState::empty()));
        state.pages_free.extend((first..first + count).rev());
        drop(state);
        self.wake();
        Ok(Some(index as u16))
    }

    /// Chunks that have joined, in the order of their indices: base address and bytes.
    pub fn chunks(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        self.chunks.iter().map_while(|chunk| chunk.get().map(|chunk| (chunk.base, chunk.bytes)))
    }

    /// How many chunks there will be.
    pub fn chunks_max(&self) -> usize {
        self.chunks.len()
    }

    /// A slot of at least `len` bytes (1 to [`LEASE_BYTES_MAX`]), or `None` when the purpose's reserve is used
    /// up or all memory is held. The RAM tier yields first. Never blocks.
    pub fn grant(&'static self, purpose: Purpose, len: usize) -> Option<LeaseMut> {
        assert!((1..=LEASE_BYTES_MAX).contains(&len), "a lease holds 1 byte to 2 MiB, not {len}");
        let class = class_of(len);
        // Each round frees a page or finds nothing to free; pages that are pinned by the network do not come
        // back at once, hence a few rounds and then a plain refusal.
        for _ in 0..EVICTION_SAMPLE {
            let mut state = self.lock();
            if state.used[purpose as usize] + slot_bytes(class) as u64 > self.budget(purpose) {
                break;
            }
            if let Some((page, slot)) = state.take_slot(class, purpose) {
                drop(state);
                return Some(self.lend(page, slot, class));
            }
            let evicted = self.evict_page(state);
            if !evicted {
                break;
            }
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// As [`Arena::grant`], but waits for returned memory up to `patience`.
    ///
    /// # Errors
    /// [`Starved`] after `patience`.
    pub async fn grant_within(
        &'static self,
        purpose: Purpose,
        len: usize,
        patience: Duration,
    ) -> Result<LeaseMut, Starved> {
        if let Some(lease) = self.grant(purpose, len) {
            return Ok(lease);
        }
        let _waiting = Waiting::new(&self.waiting);
        let wait = async {
            loop {
                let returned = self.returned.notified();
                tokio::pin!(returned);
                returned.as_mut().enable();
                if let Some(lease) = self.grant(purpose, len) {
                    return lease;
                }
                returned.await;
            }
        };
        tokio::time::timeout(patience, wait).await.map_err(|_| Starved { purpose, len })
    }

    /// Moves a lease into the RAM tier, where `resident` keeps it as `extent`; other leases of the tier give
    /// way if it is full. The lease may be evicted from this moment on.
    pub fn keep(&'static self, lease: &Lease, resident: Weak<dyn Resident>, extent: u32) {
        let bytes = lease.capacity() as u64;
        let mut state = self.lock();
        let page = &mut state.pages[lease.page as usize];
        let tenant = &mut page.tenants[lease.slot_index()];
        let before = tenant.purpose;
        tenant.purpose = Purpose::Ram;
        tenant.resident = Some((resident, extent));
        state.used[before as usize] -= bytes;
        state.used[Purpose::Ram as usize] += bytes;
        lease.meta().touched.store(1, Ordering::Relaxed);
        let budget = self.budget(Purpose::Ram);
        let mut over = state.used[Purpose::Ram as usize] > budget;
        drop(state);
        for _ in 0..EVICTION_SAMPLE {
            if !over || !self.evict_page(self.lock()) {
                break;
            }
            over = self.lock().used[Purpose::Ram as usize] > budget;
        }
        self.wake();
    }

    /// Whether somebody waits for memory to come back.
    pub fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// How the memory is used now.
    pub fn status(&self) -> ArenaStatus {
        let state = self.lock();
        ArenaStatus {
            bytes: (state.pages.len() * PAGE_BYTES) as u64,
            reads_bytes: state.used[Purpose::Read as usize],
            fills_bytes: state.used[Purpose::Fill as usize],
            ram_bytes: state.used[Purpose::Ram as usize],
            ram_bytes_max: self.budget(Purpose::Ram),
            pages_free: state.pages_free.len() as u64,
            pages_evicted: state.pages_evicted,
            grants_refused: self.refused.load(Ordering::Relaxed),
        }
    }

    fn budget(&self, purpose: Purpose) -> u64 {
        let ArenaOptions { bytes, reads_bytes, fills_bytes } = self.options;
        (match purpose {
            Purpose::Read => reads_bytes,
            Purpose::Fill => fills_bytes,
            Purpose::Ram => bytes - reads_bytes - fills_bytes,
        }) as u64
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent between any two statements that can panic, so a poisoned lock is still good.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the tenants of the least useful page of a small sample to let go. False if there is none to ask.
    fn evict_page(&self, mut state: MutexGuard<'_, State>) -> bool {
        let count = state.pages.len() as u32;
        let mut victim: Option<(u32, u32)> = None;
        let mut seen = 0;
        for _ in 0..count {
            let page = state.hand;
            state.hand = (state.hand + 1) % count;
            if !state.pages[page as usize].tenants.iter().any(|tenant| tenant.resident.is_some()) {
                continue;
            }
            let touched = self.cool_page(page, state.pages[page as usize].class);
            if victim.is_none_or(|(_, least)| touched < least) {
                victim = Some((page, touched));
            }
            seen += 1;
            if touched == 0 || seen == EVICTION_SAMPLE {
                break;
            }
        }
        let Some((page, _)) = victim else { return false };
        state.pages_evicted += 1;
        let class = state.pages[page as usize].class;
        let units = CLASS_UNITS[class as usize];
        let tenants = &mut state.pages[page as usize].tenants;
        let asked: Vec<_> = tenants
            .iter_mut()
            .enumerate()
            .filter_map(|(slot, tenant)| {
                let (resident, extent) = tenant.resident.take()?;
                Some((resident, extent, LeaseId(page * PAGE_UNITS as u32 + slot as u32 * u32::from(units))))
            })
            .collect();
        drop(state);
        for (resident, extent, lease) in asked {
            if let Some(resident) = resident.upgrade() {
                resident.evict(extent, lease);
            }
        }
        true
    }

    /// Sum of the page's touched marks; clears them.
    fn cool_page(&self, page: u32, class: u8) -> u32 {
        let units = usize::from(CLASS_UNITS[class as usize]);
        let (chunk, first) = self.unit(page, 0);
        chunk.slots[first..first + PAGE_UNITS]
            .iter()
            .step_by(units)
            .map(|slot| u32::from(slot.touched.swap(0, Ordering::Relaxed)))
            .sum()
    }

    fn unit(&self, page: u32, unit: usize) -> (&Chunk, usize) {
        let pages_per_chunk = self.chunk_bytes / PAGE_BYTES;
        let chunk =
            self.chunks[page as usize / pages_per_chunk].get().expect("pages belong to joined chunks");
        (chunk, (page as usize % pages_per_chunk) * PAGE_UNITS + unit)
    }

    fn lend(&'static self, page: u32, slot: usize, class: u8) -> LeaseMut {
        let units = CLASS_UNITS[class as usize];
        let (chunk, unit) = self.unit(page, slot * usize::from(units));
        let meta = &chunk.slots[unit];
        assert_eq!(meta.holds.swap(1, Ordering::AcqRel), 0, "a slot is lent once");
        meta.filled.store(0, Ordering::Release);
        LeaseMut(Lease { arena: self, page, first_unit: (slot * usize::from(units)) as u16, units })
    }

    fn take_back(&'static self, lease: &Lease) {
        if cfg!(debug_assertions) {
            // SAFETY: the last hold is gone (the caller saw the count reach zero), so nobody reads or writes
            // this slot; it lies inside the mapping, which is never unmapped.
            unsafe { lease.base().as_ptr().write_bytes(POISON, lease.capacity()) };
        }
        lease.meta().filled.store(0, Ordering::Release);
        let mut state = self.lock();
        state.give_slot(lease.page, lease.slot_index(), u64::from(lease.units) * UNIT_BYTES as u64);
        drop(state);
        self.wake();
    }

    fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.returned.notify_waiters();
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("status", &self.status()).finish_non_exhaustive()
    }
}

/// Counts a waiter for as long as its future lives, however that ends.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::SeqCst);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// No memory came back in time.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "no {len} bytes of memory for {purpose:?} came back in time; give the node more --memory or send it less at once"
)]
pub struct Starved {
    purpose: Purpose,
    len: usize,
}

impl Chunk {
    fn map(bytes: usize) -> io::Result<Self> {
        // One page more than asked, so that the first page can be aligned for a huge page.
        let mut map = MmapOptions::new().len(bytes + PAGE_BYTES).map_anon()?;
        let skip = map.as_ptr().align_offset(PAGE_BYTES);
        let base = NonNull::new(map[skip..].as_mut_ptr()).expect("a mapping is not at address zero");
        // Refused where the kernel has no huge pages: ordinary pages then.
        let _ = map.advise_range(Advice::HugePage, skip, bytes);
        // A child process gets no copy: pages that the kernel has pinned must not be duplicated on write.
        let _ = map.advise_range(Advice::DontFork, skip, bytes);
        if map.advise_range(Advice::PopulateWrite, skip, bytes).is_err() {
            // Before 5.14: touch every page, so that no page fault meets the data path.
            for offset in (skip..skip + bytes).step_by(UNIT_BYTES) {
                map[offset] = 0;
            }
        }
        let slots = (0..bytes / UNIT_BYTES).map(|_| SlotMeta::default()).collect();
        Ok(Self { base, bytes, slots, _map: map })
    }
}

impl PageState {
    fn empty() -> Self {
        Self { class: NO_CLASS, listed: false, live: 0, free: [0; BITMAP_WORDS], tenants: Vec::new() }
    }

    fn cut(&mut self, class: u8) {
        let slots = PAGE_UNITS / usize::from(CLASS_UNITS[class as usize]);
        self.class = class;
        self.free = [0; BITMAP_WORDS];
        for slot in 0..slots {
            self.free[slot / 64] |= 1 << (slot % 64);
        }
        self.tenants.clear();
        self.tenants.resize_with(slots, || Tenant { purpose: Purpose::Read, resident: None });
    }

    fn first_free(&self) -> Option<usize> {
        self.free
            .iter()
            .position(|word| *word != 0)
            .map(|word| word * 64 + self.free[word].trailing_zeros() as usize)
    }
}

impl State {
    fn take_slot(&mut self, class: u8, purpose: Purpose) -> Option<(u32, usize)> {
        let page = if let Some(page) = self.partial[class as usize].last() {
            *page
        } else {
            let page = self.pages_free.pop()?;
            self.pages[page as usize].cut(class);
            self.pages[page as usize].listed = true;
            self.partial[class as usize].push(page);
            page
        };
        let state = &mut self.pages[page as usize];
        let slot = state.first_free().expect("a listed page has a free slot");
        state.free[slot / 64] &= !(1 << (slot % 64));
        state.live += 1;
        state.tenants[slot].purpose = purpose;
        if state.first_free().is_none() {
            state.listed = false;
            self.partial[class as usize].pop();
        }
        self.used[purpose as usize] += slot_bytes(class) as u64;
        Some((page, slot))
    }

    fn give_slot(&mut self, page: u32, slot: usize, bytes: u64) {
        let state = &mut self.pages[page as usize];
        let tenant = &mut state.tenants[slot];
        tenant.resident = None;
        self.used[tenant.purpose as usize] -= bytes;
        state.free[slot / 64] |= 1 << (slot % 64);
        state.live -= 1;
        let class = state.class as usize;
        if state.live == 0 {
            if state.listed {
                self.partial[class].retain(|listed| *listed != page);
            }
            self.pages[page as usize] = PageState::empty();
            self.pages_free.push(page);
        } else if !state.listed {
            state.listed = true;
            self.partial[class].push(page);
        }
    }
}

fn class_of(len: usize) -> u8 {
    let units = len.div_ceil(UNIT_BYTES);
    CLASS_UNITS.partition_point(|class| usize::from(*class) < units) as u8
}

fn slot_bytes(class: u8) -> usize {
    usize::from(CLASS_UNITS[class as usize]) * UNIT_BYTES
}

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

    /// Notes that the bytes were useful; eviction looks at it. Writes only when not yet noted.
    pub fn touch(&self) {
        let touched = &self.meta().touched;
        if touched.load(Ordering::Relaxed) == 0 {
            touched.store(1, Ordering::Relaxed);
        }
    }

    /// The arena it comes from.
    pub fn arena(&self) -> &'static Arena {
        self.arena
    }

    fn base(&self) -> NonNull<u8> {
        let (chunk, unit) = self.arena.unit(self.page, usize::from(self.first_unit));
        // SAFETY: `unit` is inside the chunk, so the sum stays inside the one mapping.
        unsafe { chunk.base.add(unit * UNIT_BYTES) }
    }

    fn meta(&self) -> &'static SlotMeta {
        let (chunk, unit) = self.arena.unit(self.page, usize::from(self.first_unit));
        &chunk.slots[unit]
    }

    fn slot_index(&self) -> usize {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct Keeper(Mutex<Vec<Option<Lease>>>);

    impl Resident for Keeper {
        fn evict(&self, extent: u32, lease: LeaseId) {
            let gone = {
                let mut kept = self.0.lock().unwrap();
                assert_eq!(kept[extent as usize].as_ref().map(Lease::id), Some(lease));
                kept[extent as usize].take()
            };
            drop(gone);
        }
    }

    fn small() -> &'static Arena {
        Arena::build(ArenaOptions { bytes: 64 << 20, reads_bytes: 4 << 20, fills_bytes: 4 << 20 }).unwrap()
    }

    fn fill_ram(arena: &'static Arena, keeper: &Arc<Keeper>, len: usize, total: usize) {
        for _ in 0..total / len {
            let mut lease = arena.grant(Purpose::Fill, len).expect("the RAM tier yields");
            lease.advance(len);
            let lease = lease.freeze();
            let extent = {
                let mut kept = keeper.0.lock().unwrap();
                kept.push(Some(lease.clone()));
                kept.len() as u32 - 1
            };
            let resident: Weak<dyn Resident> = Arc::downgrade(keeper) as _;
            arena.keep(&lease, resident, extent);
        }
    }

    #[test]
    fn a_turned_mix_keeps_85_percent_usable() {
        let arena = small();
        let keeper = Arc::new(Keeper(Mutex::new(Vec::new())));
        for turn in 0..5 {
            for len in [100_000, 1 << 20, 120 << 10] {
                fill_ram(arena, &keeper, len, 3 * (64 << 20));
                let kept: usize = {
                    let kept = keeper.0.lock().unwrap();
                    kept.iter().flatten().map(Lease::filled).filter(|filled| *filled == len).sum()
                };
                let usable = arena.status().ram_bytes_max as usize;
                assert!(kept * 100 >= usable * 85, "turn {turn}: {kept} of {usable} usable with {len}");
            }
        }
        drop(keeper);
        assert_eq!(arena.status().ram_bytes, 0);
        assert_eq!(arena.status().pages_free, 32);
    }

    #[test]
    fn a_pinned_lease_survives_its_eviction_and_returns_later() {
        let arena = small();
        let keeper = Arc::new(Keeper(Mutex::new(Vec::new())));
        fill_ram(arena, &keeper, 1 << 20, 1 << 20);
        let pinned = keeper.0.lock().unwrap()[0].clone().unwrap();
        fill_ram(arena, &keeper, 1 << 20, 200 << 20);
        assert!(keeper.0.lock().unwrap()[0].is_none(), "the tier has let it go");
        assert_eq!(pinned.filled(), 1 << 20);
        drop(pinned);
        drop(keeper);
        assert_eq!(arena.status().pages_free, 32);
    }

    #[test]
    fn returned_bytes_are_poisoned_in_test_builds() {
        let arena = small();
        let mut lease = arena.grant(Purpose::Read, 8192).unwrap();
        lease.append(&[7; 8192]);
        let address = lease.lease().as_ptr() as usize;
        drop(lease);
        let mut again = arena.grant(Purpose::Read, 8192).unwrap();
        assert_eq!(again.lease().as_ptr() as usize, address, "the slot is lent again");
        again.advance(8192);
        assert!(again.freeze().bytes(0..8192).iter().all(|byte| *byte == POISON));
    }

    #[test]
    fn a_reserve_bounds_its_purpose_and_leaves_the_others_alone() {
        let arena = small();
        let held: Vec<_> = std::iter::from_fn(|| arena.grant(Purpose::Read, 1 << 20)).collect();
        assert_eq!(held.len(), 4);
        assert!(arena.grant(Purpose::Fill, 1 << 20).is_some());
        assert_eq!(arena.status().grants_refused, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_gets_what_comes_back() {
        let arena = small();
        let mut held: Vec<_> = std::iter::from_fn(|| arena.grant(Purpose::Read, 2 << 20)).collect();
        let waiter = tokio::spawn(arena.grant_within(Purpose::Read, 1 << 20, Duration::from_secs(1)));
        tokio::task::yield_now().await;
        held.pop();
        assert!(waiter.await.unwrap().is_ok());
        held.push(arena.grant(Purpose::Read, 2 << 20).unwrap());
        assert!(arena.grant_within(Purpose::Read, 1 << 20, Duration::from_secs(1)).await.is_err());
        assert!(!arena.is_awaited());
        // A waiter whose client has gone is dropped in the middle of its wait.
        let dropped = arena.grant_within(Purpose::Read, 1 << 20, Duration::from_secs(9));
        assert!(tokio::time::timeout(Duration::from_secs(1), dropped).await.is_err());
        assert!(!arena.is_awaited(), "nobody waits any more");
    }

    #[test]
    fn readers_see_only_what_was_written() {
        let arena = small();
        let mut writer = arena.grant(Purpose::Fill, 100).unwrap();
        let reader = writer.share();
        writer.append(b"abc");
        assert_eq!(reader.bytes(0..3), b"abc");
        assert!(std::panic::catch_unwind(|| reader.bytes(0..4).len()).is_err());
        let frozen = writer.freeze();
        assert_eq!(frozen.padded_len(), UNIT_BYTES);
        drop(frozen);
        assert_eq!(reader.bytes(1..3), b"bc");
    }

    #[test]
    fn classes_cover_every_length() {
        for len in [1, 4096, 4097, 65536, 65537, 100_000, 102_400, 1 << 20, (1 << 20) + 1, 2 << 20] {
            assert!(slot_bytes(class_of(len)) >= len);
        }
        assert!(CLASS_UNITS.is_sorted());
        assert_eq!(usize::from(CLASS_UNITS[CLASS_UNITS.len() - 1]), PAGE_UNITS);
    }
}
