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
//! A slot whose bytes were lent to the network by reference ([`Lease::lend`]) stays out of use until its whole page
//! is empty and renewed ([`chunk`]): a slow peer may read them long after the last hold is gone.
//!
//! What is kept (which object, which extent) is the table's business; the arena only remembers whom to ask
//! to let go ([`Resident`]).

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use self::chunk::Chunk;
pub use self::lease::{Lease, LeaseMut};

mod chunk;
mod lease;

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
    /// Pages that are one huge page each; `None` where memory is in no file, and the kernel does not say.
    pub pages_huge: Option<u64>,
    /// Pages taken from the RAM tier since the start.
    pub pages_evicted: u64,
    /// Pages put in the place of others that the network may still read, since the start.
    pub pages_renewed: u64,
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
    has_spent: Condvar,
    is_lending: AtomicBool,
}

struct State {
    pages: Vec<PageState>,
    pages_free: Vec<u32>,
    /// Empty pages that the network may still read: to be renewed before they are free.
    spent: Vec<u32>,
    partial: [Vec<u32>; CLASS_UNITS.len()],
    used: [u64; 3],
    hand: u32,
    pages_evicted: u64,
    pages_renewed: u64,
}

struct PageState {
    class: u8,
    listed: bool,
    live: u16,
    /// Slots that nobody holds and the network may still read.
    spent: u16,
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
                spent: Vec::new(),
                partial: [const { Vec::new() }; CLASS_UNITS.len()],
                used: [0; 3],
                hand: 0,
                pages_evicted: 0,
                pages_renewed: 0,
            }),
            returned: Notify::new(),
            waiting: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            has_spent: Condvar::new(),
            is_lending: AtomicBool::new(true),
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
        let granted = self.grant_below(purpose, len, self.budget(purpose));
        self.refused.fetch_add(u64::from(granted.is_none()), Ordering::Relaxed);
        granted
    }

    /// As [`Arena::grant`], for what can be done without: only while nobody waits for memory, and of the first half of the
    /// purpose's reserve.
    pub fn grant_spare(&'static self, purpose: Purpose, len: usize) -> Option<LeaseMut> {
        if self.is_awaited() { None } else { self.grant_below(purpose, len, self.budget(purpose) / 2) }
    }

    fn grant_below(&'static self, purpose: Purpose, len: usize, budget: u64) -> Option<LeaseMut> {
        assert!((1..=LEASE_BYTES_MAX).contains(&len), "a lease holds 1 byte to 2 MiB, not {len}");
        let class = class_of(len);
        // Each round frees a page or finds nothing to free; pages that are pinned by the network do not come
        // back at once, hence a few rounds and then a plain refusal.
        for _ in 0..EVICTION_SAMPLE {
            let mut state = self.lock();
            if state.used[purpose as usize] + slot_bytes(class) as u64 > budget {
                break;
            }
            if let Some((page, slot)) = state.take_slot(class, purpose) {
                drop(state);
                return Some(self.lend(page, slot, class));
            }
            // Sooner than to evict more: half a millisecond for a page that is empty already.
            if let Some(page) = state.spent.pop() {
                drop(state);
                self.renew(page);
                continue;
            }
            let evicted = self.evict_page(state);
            if !evicted {
                break;
            }
        }
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
        let page = &mut state.pages[lease.page() as usize];
        let tenant = &mut page.tenants[lease.slot_index()];
        let before = tenant.purpose;
        tenant.purpose = Purpose::Ram;
        tenant.resident = Some((resident, extent));
        state.used[before as usize] -= bytes;
        state.used[Purpose::Ram as usize] += bytes;
        lease.touch();
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

    /// Whether hot bytes may leave by reference now.
    pub fn is_lending(&self) -> bool {
        self.is_lending.load(Ordering::Relaxed)
    }

    /// Lets hot bytes leave by reference, or not for a while: what slow readers hold of pages that were renewed since
    /// comes on top of the arena.
    pub fn set_lending(&self, is_lending: bool) {
        self.is_lending.store(is_lending, Ordering::Relaxed);
    }

    /// Pages renewed since the start: what [`Lease::renewal`] is compared with.
    pub fn renewals(&self) -> u64 {
        self.lock().pages_renewed
    }

    /// Pages of a chunk that were renewed after `renewal`, and all of its pages.
    pub fn renewed_since(&self, chunk: usize, renewal: u64) -> (usize, usize) {
        let chunk = self.chunks[chunk].get().expect("a chunk that has joined");
        (chunk.renewed_since(renewal), chunk.bytes / PAGE_BYTES)
    }

    /// Blocks for at most `patience` until there is a page to renew.
    pub fn wait_spent(&self, patience: Duration) {
        let is_idle = |state: &mut State| state.spent.is_empty();
        let waited = self.has_spent.wait_timeout_while(self.lock(), patience, is_idle);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Renews one page that is empty and was lent to the network. False if there is none. About half a millisecond:
    /// call it off the workers.
    pub fn renew_spent(&self) -> bool {
        let page = self.lock().spent.pop();
        page.inspect(|page| self.renew(*page)).is_some()
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
            pages_huge: self.pages_huge(),
            pages_evicted: state.pages_evicted,
            pages_renewed: state.pages_renewed,
            grants_refused: self.refused.load(Ordering::Relaxed),
        }
    }

    fn pages_huge(&self) -> Option<u64> {
        let chunks = self.chunks.iter().map_while(OnceLock::get);
        chunks.map(|chunk| chunk.file().map(|_| chunk.pages_huge() as u64)).sum()
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
            let class = state.pages[page as usize].class;
            let cooled = self.cool_page(page, class);
            // A page that is mostly out of use goes first, however hot the rest of it is.
            let slots = PAGE_UNITS / usize::from(CLASS_UNITS[class as usize]);
            let is_spent = usize::from(state.pages[page as usize].spent) * 2 >= slots;
            let touched = if is_spent { 0 } else { cooled };
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
        LeaseMut::new(self, page, (slot * usize::from(units)) as u16, units)
    }

    fn take_back(&'static self, lease: &Lease) {
        let meta = lease.meta();
        meta.filled.store(0, Ordering::Release);
        meta.touched.store(0, Ordering::Relaxed);
        let lent = meta.lent.swap(false, Ordering::Relaxed);
        if cfg!(debug_assertions) && !lent {
            lease.poison();
        }
        let mut state = self.lock();
        let bytes = lease.capacity() as u64;
        let is_spent = state.give_slot(lease.page(), lease.slot_index(), bytes, lent);
        drop(state);
        if is_spent {
            self.has_spent.notify_one();
        }
        self.wake();
    }

    /// Brings back a page that is in no list: nobody holds a piece of it, but the network may still read it.
    fn renew(&self, page: u32) {
        let (chunk, unit) = self.unit(page, 0);
        let within = unit / PAGE_UNITS;
        if let Err(error) = chunk.renew(within) {
            // Wrong bytes are worse than 2 MiB less.
            tracing::error!(%error, "a page of memory is lost: the kernel does not take it back");
            return;
        }
        let mut state = self.lock();
        state.pages_renewed += 1;
        chunk.note_renewal(within, state.pages_renewed);
        state.pages_free.push(page);
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

impl PageState {
    fn empty() -> Self {
        Self {
            class: NO_CLASS,
            listed: false,
            live: 0,
            spent: 0,
            free: [0; BITMAP_WORDS],
            tenants: Vec::new(),
        }
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

    /// True if the page is empty now and has to be renewed.
    fn give_slot(&mut self, page: u32, slot: usize, bytes: u64, lent: bool) -> bool {
        let state = &mut self.pages[page as usize];
        let tenant = &mut state.tenants[slot];
        tenant.resident = None;
        self.used[tenant.purpose as usize] -= bytes;
        if lent {
            state.spent += 1;
        } else {
            state.free[slot / 64] |= 1 << (slot % 64);
        }
        state.live -= 1;
        let class = state.class as usize;
        if state.live == 0 {
            let is_spent = state.spent > 0;
            if state.listed {
                self.partial[class].retain(|listed| *listed != page);
            }
            self.pages[page as usize] = PageState::empty();
            if is_spent {
                self.spent.push(page);
                return true;
            }
            self.pages_free.push(page);
        } else if !state.listed && !lent {
            state.listed = true;
            self.partial[class].push(page);
        }
        false
    }
}

fn class_of(len: usize) -> u8 {
    let units = len.div_ceil(UNIT_BYTES);
    CLASS_UNITS.partition_point(|class| usize::from(*class) < units) as u8
}

fn slot_bytes(class: u8) -> usize {
    usize::from(CLASS_UNITS[class as usize]) * UNIT_BYTES
}

#[cfg(test)]
mod tests;
