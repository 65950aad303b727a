//! What the node knows: one table of object entries, shared by all workers.
//!
//! An entry is one version of one object. Everything kept of it (headers, extents, leases, slots, sums) hangs
//! on the entry, so dropping the entry invalidates every tier at once and bytes of two versions can never
//! meet. A fill works for an entry, not for a key: what it brings after the entry has gone reaches nobody new.
//!
//! An unknown object is resolved once for all who ask ([`Resolve`]); a write or purge that comes in between
//! marks the resolve stale, so that its answer serves those who asked before and is not kept.
//!
//! The table is sharded by key hash; a look-up holds one shard for the time of one probe and never waits for
//! I/O. Metadata has a budget of its own and goes by first in, first out with a second chance.
#![forbid(unsafe_code)]

use std::collections::btree_map::Entry as Place;
use std::collections::{BTreeMap, VecDeque};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use foldhash::quality::RandomState;
use hashbrown::HashTable;
use sha2::{Digest, Sha256};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::arena::{Lease, LeaseId, Resident};
use crate::object::{ObjectFacts, VersionId};
use crate::range::Grid;
use crate::store::Slot;
use crate::sums::BlockSums;

mod fill;
#[cfg(test)]
mod tests;
mod uncacheable;

pub use fill::{Fill, FillFailure};
use uncacheable::Uncacheable;

/// Shards of the table; more than any machine has cores, so that two workers seldom meet.
const SHARDS: usize = 256;
/// What an entry costs beside its texts, and what an extent costs beside its sums, bytes.
const ENTRY_BYTES: usize = size_of::<ObjectEntry>() + 3 * size_of::<usize>() + 64;
const EXTENT_BYTES: usize = size_of::<Extent>() + 16;

/// Places of entries that are gone which a shard's queue may keep.
const QUEUE_SLACK: usize = 16;
/// Most extents that a survey looks at: 4 GiB of 1 MiB each.
pub const SURVEY_EXTENTS_MAX: usize = 4096;

/// Which object of which accelerator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectKey {
    /// Index of the accelerator in the node's list.
    pub accelerator: u16,
    /// The key, decoded once.
    pub path: Box<[u8]>,
}

/// Bounds of the table.
#[derive(Clone, Copy, Debug)]
pub struct TableLimits {
    /// Most entries.
    pub objects_max: u64,
    /// Most bytes of metadata: entries, keys, header records, extents and sums.
    pub metadata_bytes_max: u64,
    /// Bytes of the RAM tier: an extent that comes from a drive twice while no more than these have come from drives
    /// would have been in RAM the second time.
    pub ram_bytes: u64,
}

/// The table.
#[derive(Debug)]
pub struct Table {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    limits: TableLimits,
    meter: Arc<Meter>,
    /// The shard that gives way next.
    hand: AtomicUsize,
}

/// What the table holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStatus {
    /// Entries, those still read by somebody after they were dropped included.
    pub objects: u64,
    /// Extents that are in RAM or on a drive.
    pub extents: u64,
    /// Bytes of metadata.
    pub metadata_bytes: u64,
    /// Entries that gave way to the budget since the start.
    pub objects_evicted: u64,
}

#[derive(Debug, Default)]
struct Meter {
    objects: AtomicU64,
    extents: AtomicU64,
    bytes: AtomicU64,
    evicted: AtomicU64,
    /// The parts of `objects` and `bytes` that the table itself holds, which is what has bounds: entries that were
    /// dropped and are still read by somebody do not come back by dropping others.
    kept_objects: AtomicU64,
    kept_bytes: AtomicU64,
    /// Bytes of all extents that were asked of drives: what is between two uses of one.
    drive_bytes: AtomicU64,
    ram_bytes: u64,
}

/// A reading of [`Meter::drive_bytes`] in units of 64 KiB, as an extent keeps it. Never 0. It begins anew after 280 TB; an
/// extent that takes this for a short while is taken into RAM too early, and no worse.
type DriveTime = u32;

impl Meter {
    /// An extent of `bytes` is asked of a drive, and was before at `last`, if not 0. What the clock says now, and whether
    /// the extent would have stayed in RAM since.
    fn note_drive_use(&self, bytes: u64, last: DriveTime) -> (DriveTime, bool) {
        let now = ((self.drive_bytes.fetch_add(bytes, Ordering::Relaxed) >> 16) as DriveTime).max(1);
        let window = DriveTime::try_from(self.ram_bytes >> 16).unwrap_or(DriveTime::MAX);
        (now, last != 0 && now.wrapping_sub(last) <= window)
    }
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashTable<Arc<ObjectEntry>>,
    /// In the order of their coming. Weak: what is gone from the table must not be kept alive by its place here.
    queue: VecDeque<Weak<ObjectEntry>>,
    resolving: Vec<Arc<Resolve>>,
    uncacheable: Uncacheable,
}

/// What a look-up says.
#[derive(Debug)]
pub enum Lookup {
    /// The object is known.
    Known(Arc<ObjectEntry>),
    /// The origin said lately that it cannot be kept: ask for it each time.
    Uncacheable,
    /// Somebody is asking the origin; wait for the outcome.
    Join(Arc<Resolve>),
    /// The caller asks the origin, for all who come meanwhile, and must settle the resolve.
    Lead(Arc<Resolve>),
}

impl Table {
    /// An empty table.
    pub fn new(limits: TableLimits) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::default(),
            limits,
            meter: Arc::new(Meter { ram_bytes: limits.ram_bytes, ..Meter::default() }),
            hand: AtomicUsize::new(0),
        }
    }

    /// The entry of an object, if it is known.
    pub fn find(&self, accelerator: u16, path: &[u8]) -> Option<Arc<ObjectEntry>> {
        let hash = self.hash(accelerator, path);
        let shard = self.shard(hash);
        let entry = shard.entries.find(hash, |entry| entry.key.is(accelerator, path))?;
        entry.touch();
        Some(Arc::clone(entry))
    }

    /// The entry, or what is known at `now` to be no use asking, or the resolve that will bring the entry, or the
    /// order to make one.
    ///
    /// A HEAD asks less than a GET: who wants bytes does not join a question that brings none. `asks_node` says, when it
    /// comes to a question, whether that will be put to another node; it is `None` for a node that asks, which joins no
    /// such question: two nodes that ask each other for parts of one object would wait for each other.
    pub fn find_or_resolve(
        &self,
        accelerator: u16,
        path: &[u8],
        is_head: bool,
        asks_node: Option<&dyn Fn() -> bool>,
        now: Instant,
    ) -> Lookup {
        let hash = self.hash(accelerator, path);
        let mut shard = self.shard(hash);
        if let Some(entry) = shard.entries.find(hash, |entry| entry.key.is(accelerator, path)) {
            entry.touch();
            return Lookup::Known(Arc::clone(entry));
        }
        if shard.uncacheable.has(hash, accelerator, path, now) {
            return Lookup::Uncacheable;
        }
        let serves = |resolve: &&Arc<Resolve>| {
            resolve.key.is(accelerator, path)
                && (is_head || !resolve.is_head)
                && (asks_node.is_some() || !resolve.asks_node)
        };
        if let Some(resolve) = shard.resolving.iter().find(serves) {
            return Lookup::Join(Arc::clone(resolve));
        }
        let key = ObjectKey { accelerator, path: path.into() };
        let asks_node = asks_node.is_some_and(|asks_node| asks_node());
        let (outcome, settled) = (OnceLock::new(), Notify::new());
        let resolve = Arc::new(Resolve { key, is_head, asks_node, outcome, settled });
        shard.resolving.push(Arc::clone(&resolve));
        Lookup::Lead(resolve)
    }

    /// Keeps the entry for those who come later, unless a write or purge came since `resolve` began. It
    /// replaces whatever was known of the object.
    pub fn publish(&self, resolve: &Arc<Resolve>, entry: &Arc<ObjectEntry>) {
        let hash = self.hash(entry.key.accelerator, &entry.key.path);
        let replaced = {
            let mut shard = self.shard(hash);
            if !shard.resolving.iter().any(|known| Arc::ptr_eq(known, resolve)) {
                entry.is_current.store(false, Ordering::Release);
                return;
            }
            shard.uncacheable.forget(hash, entry.key.accelerator, &entry.key.path, &self.meter);
            let replaced = shard.remove(hash, |known| known.key == entry.key);
            entry.join_table();
            let rehash = |entry: &Arc<ObjectEntry>| self.hash(entry.key.accelerator, &entry.key.path);
            shard.entries.insert_unique(hash, Arc::clone(entry), rehash);
            shard.queue.push_back(Arc::downgrade(entry));
            // Entries that went by a write or purge leave their place behind.
            if shard.queue.len() > 2 * shard.entries.len() + QUEUE_SLACK {
                shard.queue.retain(|queued| queued.upgrade().is_some_and(|queued| queued.is_current()));
            }
            replaced
        };
        if let Some(replaced) = replaced {
            replaced.leave_table();
        }
        self.trim(Some(entry));
    }

    /// Remembers for a while, from `now` on, that the object cannot be kept, unless a write or purge came since
    /// `resolve` began. At most some thousand objects are remembered so; of the others the origin is asked again.
    pub fn publish_uncacheable(&self, resolve: &Arc<Resolve>, now: Instant) {
        let hash = self.hash(resolve.key.accelerator, &resolve.key.path);
        {
            let mut shard = self.shard(hash);
            if !shard.resolving.iter().any(|known| Arc::ptr_eq(known, resolve)) {
                return;
            }
            shard.uncacheable.note(hash, &resolve.key, now, &self.meter);
        }
        self.trim(None);
    }

    /// Ends a resolve: wakes who waits, lets the next one begin.
    pub fn settle(&self, resolve: &Arc<Resolve>, outcome: Resolved) {
        {
            let mut shard = self.shard(self.hash(resolve.key.accelerator, &resolve.key.path));
            shard.resolving.retain(|known| !Arc::ptr_eq(known, resolve));
        }
        // The first outcome stands; a leader that died half-way has settled nothing yet.
        let _ = resolve.outcome.set(outcome);
        resolve.settled.notify_waiters();
    }

    /// Forgets an object in every tier, because it was written or purged. True if something was known.
    pub fn forget(&self, accelerator: u16, path: &[u8]) -> bool {
        let hash = self.hash(accelerator, path);
        let gone = {
            let mut shard = self.shard(hash);
            // Whoever asks from now on asks the origin anew.
            shard.resolving.retain(|resolve| !resolve.key.is(accelerator, path));
            shard.uncacheable.forget(hash, accelerator, path, &self.meter);
            shard.remove(hash, |entry| entry.key.is(accelerator, path))
        };
        gone.inspect(|gone| gone.leave_table()).is_some()
    }

    /// Forgets this version, if it is still the one that is known.
    pub fn forget_version(&self, entry: &Arc<ObjectEntry>) -> bool {
        let hash = self.hash(entry.key.accelerator, &entry.key.path);
        let gone = self.shard(hash).remove(hash, |known| Arc::ptr_eq(known, entry));
        gone.inspect(|gone| gone.leave_table()).is_some()
    }

    /// Forgets all objects of an accelerator, because a request changed an unknown number of them.
    pub fn forget_all(&self, accelerator: u16) {
        self.forget_prefix(accelerator, b"");
    }

    /// Forgets the objects of an accelerator whose keys begin with `prefix`. What cannot be kept is asked for again,
    /// whatever its key.
    pub fn forget_prefix(&self, accelerator: u16, prefix: &[u8]) {
        let is_meant = |key: &ObjectKey| key.accelerator == accelerator && key.path.starts_with(prefix);
        for shard in &self.shards {
            let gone: Vec<_> = {
                let mut shard = lock(shard);
                shard.resolving.retain(|resolve| !is_meant(&resolve.key));
                shard.uncacheable.forget_all(accelerator, &self.meter);
                shard.entries.extract_if(|entry| is_meant(&entry.key)).collect()
            };
            for entry in gone {
                entry.is_current.store(false, Ordering::Release);
                entry.leave_table();
            }
        }
    }

    /// Brings the table back under its bounds. The hand goes from shard to shard, so that no shard pays for all; two
    /// rounds in which nothing can be dropped end it. `newest` stays: it is what the room is made for.
    fn trim(&self, newest: Option<&Arc<ObjectEntry>>) {
        let mut fruitless = 0;
        while fruitless < 2 * SHARDS && (self.has_too_many() || self.is_too_large()) {
            let index = self.hand.fetch_add(1, Ordering::Relaxed) % SHARDS;
            fruitless = if self.drop_oldest(index, newest) { 0 } else { fruitless + 1 };
        }
    }

    fn has_too_many(&self) -> bool {
        self.meter.kept_objects.load(Ordering::Relaxed) > self.limits.objects_max
    }

    fn is_too_large(&self) -> bool {
        self.meter.kept_bytes.load(Ordering::Relaxed) > self.limits.metadata_bytes_max
    }

    /// Drops the oldest of a shard that was not used since the hand was here before. False if there is none; the next
    /// time there may be.
    fn drop_oldest(&self, index: usize, newest: Option<&Arc<ObjectEntry>>) -> bool {
        let gone = {
            let mut shard = lock(&self.shards[index]);
            if self.is_too_large() && shard.uncacheable.drop_oldest(&self.meter) {
                return true;
            }
            let mut chances = shard.queue.len();
            loop {
                if chances == 0 {
                    return false;
                }
                chances -= 1;
                let Some(oldest) = shard.queue.pop_front() else { return false };
                let Some(oldest) = oldest.upgrade().filter(|oldest| oldest.is_current()) else { continue };
                let is_newest = newest.is_some_and(|newest| Arc::ptr_eq(newest, &oldest));
                if is_newest || oldest.touched.swap(false, Ordering::Relaxed) {
                    shard.queue.push_back(Arc::downgrade(&oldest));
                    continue;
                }
                let hash = self.hash(oldest.key.accelerator, &oldest.key.path);
                break shard.remove(hash, |known| Arc::ptr_eq(known, &oldest));
            }
        };
        let Some(gone) = gone else { return false };
        self.meter.evicted.fetch_add(1, Ordering::Relaxed);
        gone.leave_table();
        true
    }

    /// After an entry has grown: keeps the table within its budget.
    pub fn grown(&self) {
        self.trim(None);
    }

    /// What the table holds now.
    pub fn status(&self) -> TableStatus {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TableStatus {
            objects: load(&self.meter.objects),
            extents: load(&self.meter.extents),
            metadata_bytes: load(&self.meter.bytes),
            objects_evicted: load(&self.meter.evicted),
        }
    }

    /// The entry of a version, known to nobody yet.
    pub fn entry(&self, key: ObjectKey, facts: ObjectFacts, grid: Grid, now: Instant) -> Arc<ObjectEntry> {
        // Another hash than that of the shards: an identity must not change with the process.
        let digest =
            Sha256::new().chain_update(key.accelerator.to_le_bytes()).chain_update(&key.path).finalize();
        let identity = u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes"));
        let texts = key.path.len()
            + facts.record.len()
            + facts.etag.as_deref().map_or(0, str::len)
            + facts.last_modified.as_deref().map_or(0, str::len);
        let bytes = (ENTRY_BYTES + texts) as u64;
        self.meter.objects.fetch_add(1, Ordering::Relaxed);
        self.meter.bytes.fetch_add(bytes, Ordering::Relaxed);
        Arc::new(ObjectEntry {
            version: facts.version(identity),
            key,
            facts,
            grid,
            is_current: AtomicBool::new(true),
            touched: AtomicBool::new(false),
            validation: tokio::sync::Mutex::new(Validation { begun: now, failure: None }),
            validated: Mutex::new(now),
            extents: Mutex::default(),
            charged: AtomicU64::new(bytes),
            is_kept: AtomicBool::new(false),
            meter: Arc::clone(&self.meter),
        })
    }

    fn hash(&self, accelerator: u16, path: &[u8]) -> u64 {
        self.hasher.hash_one((accelerator, path))
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The upper bits: the lower ones choose the place inside the shard's own table.
        lock(&self.shards[(hash >> 56) as usize % SHARDS])
    }
}

impl Shard {
    /// Takes an entry out. Outside the lock, the caller makes it [leave](ObjectEntry::leave_table) and drops it.
    #[must_use]
    fn remove(&mut self, hash: u64, is: impl Fn(&Arc<ObjectEntry>) -> bool) -> Option<Arc<ObjectEntry>> {
        let found = self.entries.find_entry(hash, is).ok()?;
        let (entry, _) = found.remove();
        entry.is_current.store(false, Ordering::Release);
        Some(entry)
    }
}

impl ObjectKey {
    fn is(&self, accelerator: u16, path: &[u8]) -> bool {
        self.accelerator == accelerator && *self.path == *path
    }
}

/// One question to the origin about an unknown object, for all who ask.
#[derive(Debug)]
pub struct Resolve {
    /// The object.
    pub key: ObjectKey,
    /// Whether only headers are asked for.
    pub is_head: bool,
    /// Whether another node is asked first.
    pub asks_node: bool,
    outcome: OnceLock<Resolved>,
    settled: Notify,
}

/// What came of it.
#[derive(Clone, Debug)]
pub enum Resolved {
    /// The object is known now.
    Known(Arc<ObjectEntry>),
    /// The origin answered something else that all who asked may see, such as 404.
    Answered(Arc<Answered>),
    /// The object cannot be kept; everybody asks the origin directly.
    Bypass,
    /// The leader was lost; ask again.
    Lost,
    /// The origin failed.
    Failed(ResolveFailure),
}

/// Why nobody knows what the origin has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolveFailure {
    /// It could not be reached, or broke off.
    Unreachable,
    /// It took too long.
    TimedOut,
    /// Its answer contradicts the question or itself.
    Invalid,
    /// We have no keys for it.
    Credentials,
    /// The accelerator is no longer served.
    Removed,
    /// Its origin cannot be opened.
    Unopened,
}

/// A small answer of the origin, shared by those who asked at the same time.
#[derive(Debug)]
pub struct Answered {
    /// Status code.
    pub status: u16,
    /// Headers as they came.
    pub headers: http::HeaderMap,
    /// The whole body.
    pub body: Vec<u8>,
    /// When it was asked for.
    pub asked: Instant,
}

impl Resolve {
    /// Waits for the outcome.
    pub async fn outcome(&self) -> Resolved {
        loop {
            let settled = self.settled.notified();
            if let Some(outcome) = self.outcome.get() {
                return outcome.clone();
            }
            settled.await;
        }
    }

    /// Whether it is settled.
    pub fn is_settled(&self) -> bool {
        self.outcome.get().is_some()
    }
}

/// One version of one object.
#[derive(Debug)]
pub struct ObjectEntry {
    /// Which object.
    pub key: ObjectKey,
    /// Version, size, headers.
    pub facts: ObjectFacts,
    /// Its identity, in sums and on drives.
    pub version: VersionId,
    /// Its grid of extents.
    pub grid: Grid,
    is_current: AtomicBool,
    touched: AtomicBool,
    /// Held while the origin is asked whether this is still the version.
    validation: tokio::sync::Mutex<Validation>,
    validated: Mutex<Instant>,
    extents: Mutex<BTreeMap<u32, Extent>>,
    /// Bytes it costs, and whether they count against the table's budget. Written under the lock of `extents`.
    charged: AtomicU64,
    is_kept: AtomicBool,
    meter: Arc<Meter>,
}

/// The last question to the origin whether a version still holds.
#[derive(Clone, Copy, Debug)]
pub struct Validation {
    /// When it began.
    pub begun: Instant,
    /// Why it was not answered, if it was not.
    pub failure: Option<ResolveFailure>,
}

#[derive(Debug, Default)]
struct Extent {
    ram: Option<Lease>,
    slot: Option<Slot>,
    sums: Option<BlockSums>,
    fill: Option<Arc<Fill>>,
    /// When it was last asked of a drive.
    read: DriveTime,
}

/// Where the bytes of an extent are.
#[derive(Clone, Debug)]
pub enum Whereabouts {
    /// In the RAM tier.
    Ram(Lease),
    /// On a drive. The third field says that it is asked for so often that it belongs in RAM.
    Drive(Slot, BlockSums, bool),
    /// On their way.
    Filling(Arc<Fill>),
    /// Nowhere here.
    Absent,
}

impl ObjectEntry {
    /// Its key, for people.
    pub fn name(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.key.path)
    }

    /// Notes a use; writes only when it is not noted yet.
    fn touch(&self) {
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
    }

    /// Whether this is still the version that the table knows.
    pub fn is_current(&self) -> bool {
        self.is_current.load(Ordering::Acquire)
    }

    /// When the origin last confirmed this version.
    pub fn validated(&self) -> Instant {
        *lock(&self.validated)
    }

    /// The origin confirmed this version, asked at `asked`.
    pub fn confirm(&self, asked: Instant) {
        let mut validated = lock(&self.validated);
        *validated = asked.max(*validated);
    }

    /// The right to ask the origin about this version, and what is known of the last such question.
    pub async fn validation(&self) -> tokio::sync::MutexGuard<'_, Validation> {
        self.validation.lock().await
    }

    /// Where an extent is. Counts as a use of it.
    pub fn locate(&self, extent: u32) -> Whereabouts {
        let mut extents = lock(&self.extents);
        let Some(state) = extents.get_mut(&extent) else { return Whereabouts::Absent };
        self.whereabouts(extent, state)
    }

    fn whereabouts(&self, extent: u32, state: &mut Extent) -> Whereabouts {
        if let Some(lease) = &state.ram {
            lease.touch();
            return Whereabouts::Ram(lease.clone());
        }
        if let (Some(slot), Some(sums)) = (state.slot, &state.sums) {
            let bytes =
                self.grid.extent_range(extent, self.facts.size).map_or(0, crate::range::ByteRange::len);
            let is_frequent;
            (state.read, is_frequent) = self.meter.note_drive_use(bytes, state.read);
            return Whereabouts::Drive(slot, sums.clone(), is_frequent);
        }
        state.fill.clone().map_or(Whereabouts::Absent, Whereabouts::Filling)
    }

    /// As [`ObjectEntry::locate`], without counting as a use.
    pub fn peek(&self, extent: u32) -> Whereabouts {
        match lock(&self.extents).get(&extent) {
            Some(Extent { ram: Some(lease), .. }) => Whereabouts::Ram(lease.clone()),
            Some(Extent { slot: Some(slot), sums: Some(sums), .. }) => {
                Whereabouts::Drive(*slot, sums.clone(), false)
            }
            Some(Extent { fill: Some(fill), .. }) => Whereabouts::Filling(Arc::clone(fill)),
            _ => Whereabouts::Absent,
        }
    }

    /// Extents that are kept, in whatever tier, and their bytes.
    pub fn kept(&self) -> (u64, u64) {
        let extents = lock(&self.extents);
        let kept = extents.iter().filter(|(_, state)| state.sums.is_some());
        kept.fold((0, 0), |(count, bytes), (extent, _)| {
            let range = self.grid.extent_range(*extent, self.facts.size);
            (count + 1, bytes + range.map_or(0, crate::range::ByteRange::len))
        })
    }

    /// As [`ObjectEntry::locate`], but an absent extent gets a new fill, which the caller must bring to an end.
    ///
    /// # Errors
    /// The new fill, which belongs to `run`.
    pub fn locate_or_fill(&self, extent: u32, len: u32, run: &Arc<()>) -> Result<Whereabouts, Arc<Fill>> {
        let mut extents = lock(&self.extents);
        let state = match extents.entry(extent) {
            Place::Occupied(known) => known.into_mut(),
            Place::Vacant(vacant) => vacant.insert(Extent::default()),
        };
        match self.whereabouts(extent, state) {
            Whereabouts::Absent => {
                let fill = Arc::new(Fill::new(extent, len, Arc::downgrade(run)));
                state.fill = Some(Arc::clone(&fill));
                Err(fill)
            }
            known => Ok(known),
        }
    }

    /// A fill has brought its extent: it is kept in RAM from now on. False, and nothing is kept, if this
    /// version has been dropped meanwhile.
    pub fn keep(self: &Arc<Self>, fill: &Arc<Fill>, lease: &Lease, sums: BlockSums) -> bool {
        let kept = self.is_current();
        {
            let mut extents = lock(&self.extents);
            let Some(state) = extents.get_mut(&fill.extent) else { return false };
            state.fill.take_if(|known| Arc::ptr_eq(known, fill));
            if !kept {
                extents.remove(&fill.extent);
                return false;
            }
            let bytes = (EXTENT_BYTES + sums.memory_bytes()) as u64;
            self.charged.fetch_add(bytes, Ordering::Relaxed);
            self.meter.bytes.fetch_add(bytes, Ordering::Relaxed);
            if self.is_kept.load(Ordering::Relaxed) {
                self.meter.kept_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            self.meter.extents.fetch_add(1, Ordering::Relaxed);
            state.ram = Some(lease.clone());
            state.sums = Some(sums);
            state.read = 0;
        }
        self.hold_in_ram(fill.extent, lease);
        true
    }

    /// An extent was read from a drive as a whole: it joins the RAM tier.
    pub fn promote(self: &Arc<Self>, extent: u32, lease: &Lease) {
        {
            let mut extents = lock(&self.extents);
            match extents.get_mut(&extent) {
                Some(state) if state.ram.is_none() && state.slot.is_some() && self.is_current() => {
                    state.ram = Some(lease.clone());
                }
                _ => return,
            }
        }
        self.hold_in_ram(extent, lease);
    }

    fn hold_in_ram(self: &Arc<Self>, extent: u32, lease: &Lease) {
        let this: Arc<dyn Resident> = Arc::clone(self) as _;
        lease.arena().keep(lease, Arc::downgrade(&this), extent);
        if !self.is_current() {
            // Dropped between the look and the hold: nobody will come for these bytes again.
            self.release_tiers();
        }
    }

    /// An extent has been written to a drive.
    pub fn hold_on_drive(&self, extent: u32, slot: Slot) {
        if !self.is_current() {
            return;
        }
        if let Some(state) = lock(&self.extents).get_mut(&extent)
            && state.sums.is_some()
        {
            state.slot = Some(slot);
        }
    }

    /// The drive no longer has the bytes of this slot, or has them wrong.
    pub fn lose_slot(&self, extent: u32, slot: Slot) {
        let mut extents = lock(&self.extents);
        if let Some(state) = extents.get_mut(&extent) {
            state.slot.take_if(|known| *known == slot);
            self.drop_if_bare(&mut extents, extent);
        }
    }

    /// The RAM copy of an extent is wrong: it goes, and with it whatever was written from it.
    pub fn lose_extent(&self, extent: u32) {
        let mut extents = lock(&self.extents);
        let gone = extents.get_mut(&extent).map(|state| {
            state.slot = None;
            state.ram.take()
        });
        self.drop_if_bare(&mut extents, extent);
        drop(extents);
        drop(gone);
    }

    /// An extent that is in memory and on no drive.
    pub fn unwritten(&self, extent: u32) -> Option<Lease> {
        match lock(&self.extents).get(&extent) {
            Some(Extent { ram: Some(lease), slot: None, .. }) if self.is_current() => Some(lease.clone()),
            _ => None,
        }
    }

    /// A fill has failed; the extent is absent again.
    pub fn abandon(&self, fill: &Arc<Fill>) {
        let mut extents = lock(&self.extents);
        if let Some(state) = extents.get_mut(&fill.extent) {
            state.fill.take_if(|known| Arc::ptr_eq(known, fill));
            self.drop_if_bare(&mut extents, fill.extent);
        }
    }

    /// The sums of an extent that is kept.
    pub fn sums(&self, extent: u32) -> Option<BlockSums> {
        lock(&self.extents).get(&extent)?.sums.clone()
    }

    /// Where the extents `first..=last` are, all together. At most [`SURVEY_EXTENTS_MAX`] of those that are here or on
    /// their way are looked at, and as few as tell it: a gap behind something that is here ends the search.
    pub fn survey(&self, first: u32, last: u32) -> Survey {
        let extents = lock(&self.extents);
        let (mut ram, mut drive, mut absent) = (false, false, false);
        let mut next = u64::from(first);
        for (extent, state) in extents.range(first..=last).take(SURVEY_EXTENTS_MAX) {
            if absent && (ram || drive) {
                break;
            }
            absent |= u64::from(*extent) > next;
            next = u64::from(*extent) + 1;
            match state {
                Extent { ram: Some(_), .. } => ram = true,
                Extent { slot: Some(_), .. } => drive = true,
                _ => absent = true,
            }
        }
        let is_whole = next > u64::from(last) && !absent;
        match (ram || drive, is_whole) {
            (false, _) => Survey::Nothing,
            (true, false) => Survey::Some,
            (true, true) if drive => Survey::Drive,
            (true, true) => Survey::Ram,
        }
    }

    fn drop_if_bare(&self, extents: &mut BTreeMap<u32, Extent>, extent: u32) {
        let bare = |state: &Extent| state.ram.is_none() && state.slot.is_none() && state.fill.is_none();
        if extents.get(&extent).is_some_and(bare)
            && let Some(Extent { sums: Some(sums), .. }) = extents.remove(&extent)
        {
            let bytes = (EXTENT_BYTES + sums.memory_bytes()) as u64;
            self.charged.fetch_sub(bytes, Ordering::Relaxed);
            self.meter.bytes.fetch_sub(bytes, Ordering::Relaxed);
            if self.is_kept.load(Ordering::Relaxed) {
                self.meter.kept_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
            self.meter.extents.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// From now on it counts against the table's budget.
    fn join_table(&self) {
        let _extents = lock(&self.extents);
        self.is_kept.store(true, Ordering::Relaxed);
        self.meter.kept_objects.fetch_add(1, Ordering::Relaxed);
        self.meter.kept_bytes.fetch_add(self.charged.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// It is out of the table. Somebody may still read it; neither the budget nor its leases wait for that.
    fn leave_table(&self) {
        {
            let _extents = lock(&self.extents);
            self.is_kept.store(false, Ordering::Relaxed);
            self.meter.kept_objects.fetch_sub(1, Ordering::Relaxed);
            self.meter.kept_bytes.fetch_sub(self.charged.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.release_tiers();
    }

    /// Gives back what both tiers hold; readers in flight keep their own holds.
    fn release_tiers(&self) {
        let mut gone = Vec::new();
        let mut extents = lock(&self.extents);
        let all: Vec<u32> = extents.keys().copied().collect();
        for extent in all {
            let state = extents.get_mut(&extent).expect("listed above");
            state.slot = None;
            gone.extend(state.ram.take());
            self.drop_if_bare(&mut extents, extent);
        }
        drop(extents);
        drop(gone);
    }
}

impl Resident for ObjectEntry {
    fn evict(&self, extent: u32, lease: LeaseId) {
        let mut extents = lock(&self.extents);
        let gone = extents.get_mut(&extent).and_then(|state| state.ram.take_if(|held| held.id() == lease));
        self.drop_if_bare(&mut extents, extent);
        drop(extents);
        // Outside the lock: the last hold goes back to the arena, which has a lock of its own.
        drop(gone);
    }
}

impl Drop for ObjectEntry {
    fn drop(&mut self) {
        let extents = self.extents.get_mut().unwrap_or_else(PoisonError::into_inner);
        let kept = extents.values().filter(|extent| extent.sums.is_some()).count() as u64;
        self.meter.extents.fetch_sub(kept, Ordering::Relaxed);
        self.meter.objects.fetch_sub(1, Ordering::Relaxed);
        self.meter.bytes.fetch_sub(*self.charged.get_mut(), Ordering::Relaxed);
    }
}

/// Where the extents of a range are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survey {
    /// All in RAM.
    Ram,
    /// All here, and at least one of them on a drive only.
    Drive,
    /// Some are here. The others are not, or were too many to be looked at.
    Some,
    /// None of those that were looked at is here; they may be on their way.
    Nothing,
}

/// Shared state is consistent between any two statements that can panic, so a poisoned lock is still good.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
