//! What all workers of a node share: memory, table, drives, what is served, limits, numbers.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use forebay_control_api::Freshness;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::arena::{Arena, LEASE_BYTES_MAX, Lease};
use crate::config::Limits;
use crate::engine::scripted::ScriptedDrive;
use crate::metrics::{Counter, Gauge, Metrics, WriteRefusal};
use crate::policy::Decision;
use crate::served::{Accelerator, Served};
use crate::store::{Refused, Slot, Store};
use crate::table::{ObjectEntry, Table, TableLimits};

/// Failed reads in a row after which a drive is retired.
pub const DRIVE_FAILURES_MAX: u32 = 16;
/// Pieces that are remembered because a full queue refused them; those beyond stay in memory only.
const OWED_MAX: usize = 4096;

/// One node.
#[derive(Debug)]
pub struct Node {
    /// Its memory.
    pub arena: &'static Arena,
    /// What it knows.
    pub table: Table,
    /// Where it keeps what does not fit into memory.
    pub drives: Drives,
    /// Bounds of everything that grows.
    pub limits: Limits,
    /// Its numbers.
    pub metrics: Arc<Metrics>,
    /// Rights to download.
    pub fills: Arc<Semaphore>,
    /// Rights to download what may come from another node. Apart from `fills`, and half as many, so that what two nodes
    /// do for each other never waits for what they want of each other.
    pub peer_fills: Arc<Semaphore>,
    /// Objects that prewarms may read at once.
    pub prewarms: Arc<Semaphore>,
    /// When it started.
    pub started: Instant,
    /// What is served. Workers have it at hand and do not ask here.
    served: Mutex<Arc<Served>>,
    /// Reads in a row that each drive has failed.
    drive_failures: Box<[AtomicU32]>,
    /// Reads that each drive may have under way.
    drive_turns: Box<[Arc<Semaphore>]>,
    /// What a full queue of a drive refused, in that order.
    owed: Mutex<VecDeque<(Weak<ObjectEntry>, u32)>>,
    draining: AtomicBool,
    connections: AtomicU64,
    /// When the control plane was last heard, and for how long it may be silent; milliseconds, the first since `started`.
    heard_ms: AtomicU64,
    fence_after_ms: AtomicU64,
    /// The control plane's state that is being taken, and the one that has been taken whole.
    revision_begun: AtomicU64,
    revision_taken: AtomicU64,
}

/// The drives, real or scripted, or none.
#[derive(Clone, Debug)]
pub enum Drives {
    /// Nothing is kept beyond memory.
    None,
    /// Devices and preallocated files.
    Store(Arc<Store>),
    /// The simulation's.
    Scripted(Arc<ScriptedDrive>),
}

impl Drives {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Store(store) => store.drives(),
            Self::Scripted(_) => 1,
        }
    }

    /// Where a slot is, while its drive still holds it: descriptor and offset in bytes.
    pub fn place(&self, slot: Slot) -> Option<(RawFd, u64)> {
        match self {
            Self::None => None,
            Self::Store(store) => store.place(slot).map(|place| (place.fd, place.offset)),
            Self::Scripted(drive) => drive.place(slot).map(|offset| (-1, offset)),
        }
    }

    /// Whether the drive still holds a slot; asked again after a read.
    pub fn holds(&self, slot: Slot) -> bool {
        match self {
            Self::None => false,
            Self::Store(store) => store.holds(slot),
            Self::Scripted(drive) => drive.place(slot).is_some(),
        }
    }
}

impl Node {
    /// A node of these parts.
    pub fn new(
        arena: &'static Arena,
        drives: Drives,
        served: Served,
        limits: Limits,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        let table = Table::new(TableLimits {
            objects_max: u64::from(limits.objects_max),
            metadata_bytes_max: limits.metadata_bytes_max,
            ram_bytes: limits.ram_reserve_bytes,
        });
        let fills = Arc::new(Semaphore::new(limits.fills_max as usize));
        let peer_fills = Arc::new(Semaphore::new((limits.fills_max as usize / 2).max(1)));
        let prewarms = Arc::new(Semaphore::new((limits.fills_max as usize / 4).max(1)));
        // Smaller pieces come in more of them; what a drive's reads hold is bounded by the largest.
        let reads = limits.reads_reserve_bytes as usize / LEASE_BYTES_MAX;
        let turns = if drives.count() > 1 { (reads / 2).max(1) } else { Semaphore::MAX_PERMITS };
        let drive_turns = (0..drives.count()).map(|_| Arc::new(Semaphore::new(turns))).collect();
        Arc::new(Self {
            arena,
            table,
            drives,
            limits,
            metrics,
            fills,
            peer_fills,
            prewarms,
            started: Instant::now(),
            served: Mutex::new(Arc::new(served)),
            drive_turns,
            drive_failures: (0..=u8::MAX).map(|_| AtomicU32::new(0)).collect(),
            owed: Mutex::default(),
            draining: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            heard_ms: AtomicU64::new(0),
            fence_after_ms: AtomicU64::new(u64::MAX),
            revision_begun: AtomicU64::new(0),
            revision_taken: AtomicU64::new(0),
        })
    }

    /// What is served now. For cold paths: a worker asks [its own snapshot](crate::serve::Worker::served).
    pub fn served(&self) -> Arc<Served> {
        Arc::clone(&self.served.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on this is served; the workers have to be told.
    pub fn serve(&self, served: Arc<Served>) {
        *self.served.lock().unwrap_or_else(PoisonError::into_inner) = served;
    }

    /// What holds for a key of an accelerator at `now`. Without word from the control plane a purge may have been missed,
    /// so nothing is believed by its age then.
    pub fn decide(&self, accelerator: &Accelerator, key: &[u8], now: Instant) -> Decision {
        let decision = accelerator.policy.decide(key);
        match decision.freshness {
            Freshness::Ttl(_) if self.is_fenced(now) => Decision { freshness: Freshness::Strict, ..decision },
            _ => decision,
        }
    }

    /// A state of the control plane is about to be taken, its purges among it.
    pub fn begin_revision(&self, revision: u64) {
        self.revision_begun.fetch_max(revision, Ordering::SeqCst);
    }

    /// A state has been taken: nothing that its purges speak of is here any more.
    pub fn end_revision(&self, revision: u64) {
        self.begin_revision(revision);
        self.revision_taken.fetch_max(revision, Ordering::SeqCst);
    }

    /// Whoever is asked for bytes must have taken this state: what came from one that has not would outlive its purges here.
    pub fn revision_begun(&self) -> u64 {
        self.revision_begun.load(Ordering::SeqCst)
    }

    /// The newest state that has been taken whole; 0 before the first.
    pub fn revision_taken(&self) -> u64 {
        self.revision_taken.load(Ordering::SeqCst)
    }

    /// The control plane was heard, by an answer to what was asked at `asked`.
    pub fn heard(&self, asked: Instant) {
        self.heard_ms.fetch_max(self.since_start(asked), Ordering::Relaxed);
    }

    /// For how long the control plane may be silent before the node is fenced; `None` without a control plane.
    pub fn fence_after(&self, silence: Option<Duration>) {
        let silence =
            silence.map_or(u64::MAX, |silence| u64::try_from(silence.as_millis()).unwrap_or(u64::MAX));
        self.fence_after_ms.store(silence, Ordering::Relaxed);
    }

    /// Whether the control plane has been silent for too long at `now`. Judged by the reader's clock, not by the agent:
    /// a process that was stopped wakes up fenced.
    pub fn is_fenced(&self, now: Instant) -> bool {
        let silence = self.since_start(now).saturating_sub(self.heard_ms.load(Ordering::Relaxed));
        silence >= self.fence_after_ms.load(Ordering::Relaxed)
    }

    fn since_start(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }

    /// Where to read a slot: descriptor and offset in bytes. `None` if its drive does not hold it any more, or has
    /// been retired.
    pub fn place(&self, slot: Slot) -> Option<(RawFd, u64)> {
        if self.is_retired(slot.drive) { None } else { self.drives.place(slot) }
    }

    /// A read of a drive went well, or failed or did not end. After [`DRIVE_FAILURES_MAX`] failures in a row the drive
    /// is retired: what it holds is asked from the origin until the node starts again.
    pub fn note_drive_read(&self, drive: u8, went_well: bool) {
        let failures = &self.drive_failures[usize::from(drive)];
        if went_well {
            // A retired drive stays so: a late completion says nothing of the next.
            let forget = |failed: u32| (1..DRIVE_FAILURES_MAX).contains(&failed).then_some(0);
            let _ = failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, forget);
        } else if failures.fetch_add(1, Ordering::Relaxed) + 1 == DRIVE_FAILURES_MAX {
            tracing::error!(drive, "a drive is retired: {DRIVE_FAILURES_MAX} reads in a row failed");
            if let Drives::Store(store) = &self.drives {
                store.retire(drive);
            }
        }
    }

    /// Waits until the drive may have one more read under way; hold it until the read has ended.
    pub async fn drive_turn(&self, drive: u8) -> OwnedSemaphorePermit {
        let turns = Arc::clone(&self.drive_turns[usize::from(drive)]);
        turns.acquire_owned().await.expect("the semaphore is never closed")
    }

    /// The same, if nobody has to wait for it.
    pub fn spare_drive_turn(&self, drive: u8) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.drive_turns[usize::from(drive)]).try_acquire_owned().ok()
    }

    /// Whether a drive is no longer read, nor written.
    pub fn is_retired(&self, drive: u8) -> bool {
        self.drive_failures[usize::from(drive)].load(Ordering::Relaxed) >= DRIVE_FAILURES_MAX
    }

    /// Offers an extent in memory to the drives. Never blocks: what a full queue cannot take now is offered again by
    /// [`Node::offer_owed`], while it is in memory.
    pub fn offer(&self, entry: &Arc<ObjectEntry>, extent: u32, lease: &Lease) {
        if !self.try_offer(entry, extent, lease) {
            let mut owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
            if owed.len() < OWED_MAX {
                owed.push_back((Arc::downgrade(entry), extent));
                self.metrics.adjust(Gauge::WritesPending, 1);
            }
        }
    }

    /// Offers once more what a full queue refused, as much as it takes now.
    pub fn offer_owed(&self) {
        let next = || self.owed.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        while let Some((entry, extent)) = next() {
            self.metrics.adjust(Gauge::WritesPending, -1);
            let unwritten = entry.upgrade().and_then(|entry| Some((entry.unwritten(extent)?, entry)));
            if let Some((lease, entry)) = unwritten
                && !self.try_offer(&entry, extent, &lease)
            {
                self.owed
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push_front((Arc::downgrade(&entry), extent));
                self.metrics.adjust(Gauge::WritesPending, 1);
                return;
            }
        }
    }

    /// False if it should be offered again later.
    fn try_offer(&self, entry: &Arc<ObjectEntry>, extent: u32, lease: &Lease) -> bool {
        let hold = {
            let entry = Arc::downgrade(entry);
            move |slot: Slot| {
                if let Some(entry) = entry.upgrade() {
                    entry.hold_on_drive(extent, slot);
                }
            }
        };
        match &self.drives {
            Drives::None => {}
            Drives::Scripted(drive) => {
                if let Some(slot) = drive.write(lease) {
                    hold(slot);
                }
            }
            Drives::Store(store) => {
                self.metrics.bump(Counter::WritesOffered, 1);
                self.metrics.adjust(Gauge::WritesPending, 1);
                let metrics = Arc::clone(&self.metrics);
                let bytes = lease.padded_len() as u64;
                let done = Box::new(move |written: Result<Slot, _>| {
                    match written {
                        Ok(slot) => {
                            metrics.bump(Counter::WrittenBytes, bytes);
                            hold(slot);
                        }
                        Err(_) => metrics.bump(Counter::WritesRefused(WriteRefusal::Failed), 1),
                    }
                    metrics.adjust(Gauge::WritesPending, -1);
                });
                if let Err(refused) = store.offer(lease.clone(), done) {
                    self.metrics.adjust(Gauge::WritesPending, -1);
                    self.metrics.bump(Counter::WritesRefused(refusal(refused)), 1);
                    return refused != Refused::QueueFull;
                }
            }
        }
        true
    }

    /// Whether it finishes what it has and takes nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// From now on it finishes what it has and takes nothing new.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Open client connections.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// One more client connection, unless the limit is reached.
    pub fn admit_connection(&self) -> bool {
        let most = u64::from(self.limits.connections_max);
        let admit = |open: u64| (open < most).then_some(open + 1);
        self.connections.fetch_update(Ordering::AcqRel, Ordering::Relaxed, admit).is_ok()
    }

    /// One client connection less.
    pub fn release_connection(&self) {
        self.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

fn refusal(refused: Refused) -> WriteRefusal {
    match refused {
        Refused::QueueFull => WriteRefusal::QueueFull,
        Refused::Closed => WriteRefusal::Closed,
        _ => WriteRefusal::NoDrive,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{ArenaOptions, Purpose};
    use crate::auth::Keys;
    use crate::config::{Config, HostFacts, Settings};
    use crate::object::{HeaderRecord, ObjectFacts};
    use crate::range::Grid;
    use crate::store::{DriveSpec, StoreOptions, WriterEngine};
    use crate::sums::BlockSums;
    use crate::table::{Fill, ObjectKey, Whereabouts};

    const MIB: usize = 1 << 20;

    /// A piece that a full queue had refused stayed in memory only, however often it was asked for, and was downloaded
    /// again when memory gave it up.
    #[test]
    fn what_a_full_queue_refused_is_written_later() {
        let settings = Settings {
            accelerator: vec!["data=http://origin".parse().expect("a spec")],
            ..Settings::default()
        };
        let config = Config::load(settings, &|_| None, &HostFacts::probe()).expect("a configuration");
        let folder = tempfile::tempdir().expect("a folder");
        let spec = DriveSpec { path: folder.path().join("drive"), size: Some(512 << 20) };
        // Room for one piece at a time.
        let options = StoreOptions {
            engine: WriterEngine::Portable,
            body_bytes_max: MIB as u32,
            queue_bytes: MIB as u64,
            ..StoreOptions::default()
        };
        let store = Arc::new(Store::open(&[spec], options).expect("a drive"));
        let arena =
            Arena::build(ArenaOptions { bytes: 64 * MIB, reads_bytes: 8 * MIB, fills_bytes: 16 * MIB });
        let node = Node::new(
            arena.expect("memory"),
            Drives::Store(Arc::clone(&store)),
            Served::new([], Keys::new(true)),
            Limits::derive(&config).expect("limits"),
            Metrics::new(),
        );
        let facts = ObjectFacts {
            etag: Some("\"a\"".into()),
            size: 8 * MIB as u64,
            last_modified: None,
            record: HeaderRecord::default(),
        };
        let key = ObjectKey { accelerator: 0, path: (*b"object").into() };
        let grid = Grid::new(MIB as u32).expect("a grid");
        let entry = node.table.entry(key, facts, grid, Instant::now());
        let run = Arc::new(());
        for extent in 0..8 {
            let fill: Arc<Fill> = entry.locate_or_fill(extent, MIB as u32, &run).expect_err("absent");
            let mut lease = node.arena.grant(Purpose::Fill, MIB).expect("memory");
            lease.append(&vec![extent as u8; MIB]);
            let lease = lease.freeze();
            let sums = BlockSums::of(lease.bytes(0..MIB), entry.version, extent);
            assert!(entry.keep(&fill, &lease, sums));
            node.offer(&entry, extent, &lease);
        }
        let refused = Counter::WritesRefused(WriteRefusal::QueueFull);
        assert!(node.metrics.total(refused) > 0, "eight at once do not fit");
        while node.metrics.level(Gauge::WritesPending) > 0 {
            node.offer_owed();
            std::thread::yield_now();
        }
        for extent in 0..8 {
            assert!(entry.unwritten(extent).is_none(), "extent {extent} is on the drive too");
            assert!(matches!(entry.locate(extent), Whereabouts::Ram(_)));
        }
        store.close();
    }
}
