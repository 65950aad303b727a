//! What is on a drive: bodies go in, slots come out, and a slot tells for how long it is good.
//!
//! ```text
//!   body ─► offer ─► writer (one thread a drive) ─► segment ─► slot ─► table
//!             │ full, dead, too large                            │
//!             ▼                                                  ▼ place, holds
//!          refused, counted                              a worker's own read
//! ```
//!
//! The store keeps no index: the table remembers who has which slot and what its sums are. It reads nothing
//! either: it says where a slot lies, and workers read through their own engines. So a body that the store
//! took may be gone a moment later, and everybody who holds a slot is ready for that.
//!
//! A restart begins with an empty store: no slot outlives its run, and no two runs share a segment sequence.
//! The bytes on a drive are drawn in `docs/format.md`.
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "memory that the kernel reads while a write is in flight")]
mod body;
mod drive;
pub mod format;
mod segment;
mod signature;
mod superblock;
#[expect(unsafe_code, reason = "four system calls")]
mod sys;
mod usage;
mod writer;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

pub use body::WriteBody;
pub use drive::{Drive, DriveError, DriveNote, DriveSpec, Opened};
pub use segment::{CAPACITY_MAX, CAPACITY_MIN, Geometry, GeometryError, UNIT_BYTES};
pub use superblock::{Identity, Superblock, SuperblockError};
pub use usage::Usage;
pub use writer::WriteDone;

use body::Body;
use segment::Sequences;
use writer::{Writer, WriterLimits};

/// Where a body lies. Good for as long as [`Store::holds`] says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Which drive, in the order in which they were opened.
    pub drive: u8,
    /// Which segment of it.
    pub segment: u32,
    /// Units of 4 KiB from the start of the segment.
    pub offset: u32,
    /// The sequence under which the segment was being filled.
    pub sequence: u32,
}

// Every extent on a drive has one in memory.
const _: () = assert!(size_of::<Slot>() == 16);

/// Where to read a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The drive's descriptor; open for as long as the [`Store`] lives. Opened for direct I/O unless the drive's
    /// status says otherwise: offset, length and memory are to be multiples of 4,096.
    pub fd: RawFd,
    /// Bytes from the start of the drive.
    pub offset: u64,
}

/// How drives are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriterEngine {
    /// `io_uring`, or `pwrite` where the kernel refuses it, with a warning.
    #[default]
    Auto,
    /// `io_uring`, or an error.
    Uring,
    /// `pwrite` on a few threads.
    Portable,
}

/// Bounds and choices of a [`Store`]; those of the queue are for each drive.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// How drives are written.
    pub engine: WriterEngine,
    /// The largest body that will be offered, in bytes. Drives that cannot take it are refused at start.
    pub body_bytes_max: u32,
    /// Bytes of bodies that wait or are being written; at least `body_bytes_max`.
    pub queue_bytes: u64,
    /// Bodies that wait or are being written, at least 1.
    pub queue_jobs: u32,
    /// Writes in flight, at least 1.
    pub depth: u16,
    /// Failed writes in a row after which a drive is given up for writing, at least 1.
    pub failures_max: u32,
    /// Time that [`Store::close`] gives to what is queued.
    pub close_within: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            engine: WriterEngine::Auto,
            body_bytes_max: 2 << 20,
            // 64 MiB: what a drive of 2 GB/s writes in 32 ms, enough to ride out a flush or a slow write.
            queue_bytes: 64 << 20,
            queue_jobs: 1024,
            // Eight writes of 64 KiB or more keep an NVMe drive at its write speed; more only add latency to reads.
            depth: 8,
            failures_max: 8,
            close_within: Duration::from_secs(5),
        }
    }
}

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// One of the drives could not.
    #[error("opening the drives")]
    Drive {
        /// Why.
        #[source]
        source: DriveError,
    },
    /// Its segments are too small for the bodies to come.
    #[error(
        "drive {path} has segments of {segment_bytes} bytes, too small for pieces of {body_bytes_max}: make it at least {capacity_min} bytes, or choose a smaller extent"
    )]
    SegmentsTooSmall {
        /// The drive.
        path: PathBuf,
        /// Its segments.
        segment_bytes: u32,
        /// The bodies.
        body_bytes_max: u32,
        /// The smallest drive that will do, in bytes.
        capacity_min: u64,
    },
    /// The same drive twice, by two names or as a copy.
    #[error(
        "drives {first} and {second} are the same drive ({identity}): name each drive once, and do not copy drive files"
    )]
    Twice {
        /// The one.
        first: PathBuf,
        /// The other.
        second: PathBuf,
        /// Which it is.
        identity: Identity,
    },
    /// A [`Slot`] counts drives in one byte.
    #[error("{count} drives are too many: a node has at most 256; join some of them")]
    TooManyDrives {
        /// How many there are.
        count: usize,
    },
    /// A bound in [`StoreOptions`] that lets nothing through.
    #[error("{name} is {value}, but has to be at least {least}")]
    Option {
        /// Which.
        name: &'static str,
        /// What it is.
        value: u64,
        /// What it has to be.
        least: u64,
    },
    /// The thread of a drive could not be started.
    #[error("starting the writer of drive {path}{}", if *.is_uring_wanted { " on io_uring (--engine auto does without it where the kernel refuses)" } else { "" })]
    Writer {
        /// The drive.
        path: PathBuf,
        /// Whether `io_uring` was a condition.
        is_uring_wanted: bool,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Why a body was not taken. Nothing is called back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refused {
    /// The queue of every drive is full: drives are slower than fills.
    #[error("the queue is full")]
    QueueFull,
    /// Every drive has been given up for writing.
    #[error("the drive has been given up for writing")]
    DriveDead,
    /// The store is closing.
    #[error("the store is closed")]
    Closed,
    /// The body is larger than a segment, or than the whole queue.
    #[error("the body is larger than a segment or than the whole queue")]
    TooLarge,
    /// The body has no bytes.
    #[error("the body is empty")]
    Empty,
    /// There are no drives.
    #[error("there is no drive")]
    NoDrive,
}

/// Why a body that was taken is not on the drive.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The drive refused.
    #[error("writing to the drive")]
    Drive {
        /// With this.
        #[source]
        source: io::Error,
    },
    /// The drive was given up while the body waited.
    #[error("the drive has been given up for writing")]
    DriveDead,
    /// The store was closed before the write could end.
    #[error("the store was closed")]
    Closed,
}

/// How the store is doing, at about this moment.
#[derive(Clone, Debug)]
pub struct StoreStatus {
    /// One entry a drive, in the order of [`Slot::drive`].
    pub drives: Vec<DriveStatus>,
    /// Bodies refused because every queue was full.
    pub refused_queue_full: u64,
    /// Bodies refused because every drive was dead.
    pub refused_drive_dead: u64,
    /// Bodies refused because no queue or segment could take them, or because they were empty.
    pub refused_unfit: u64,
}

/// How one drive is doing.
#[derive(Clone, Debug)]
pub struct DriveStatus {
    /// As the operator named it.
    pub path: PathBuf,
    /// Its name for itself.
    pub identity: Identity,
    /// How it is divided.
    pub geometry: Geometry,
    /// Whether it bypasses the page cache.
    pub is_direct: bool,
    /// Whether it is written by `io_uring`.
    pub is_uring: bool,
    /// Whether it has been given up for writing.
    pub is_dead: bool,
    /// Bytes of bodies that wait or are being written.
    pub queued_bytes: u64,
    /// Bodies that wait or are being written.
    pub queued_jobs: u32,
    /// Bytes written, padding included.
    pub written_bytes: u64,
    /// Bodies written.
    pub written_jobs: u64,
    /// Bodies that could not be written.
    pub failed_jobs: u64,
    /// How often a segment was opened for writing, in this run.
    pub segments_opened: u64,
    /// How often that dropped what an earlier filling of this run had left.
    pub segments_reclaimed: u64,
}

/// All drives of a node.
pub struct Store {
    lanes: Box<[Lane]>,
    notes: Vec<DriveNote>,
    refused_queue_full: AtomicU64,
    refused_drive_dead: AtomicU64,
    refused_unfit: AtomicU64,
}

/// One drive and its writer.
struct Lane {
    geometry: Geometry,
    sequences: Arc<Sequences>,
    writer: Writer,
    /// Bytes taken so far: what decides which drive gets the next body.
    taken_bytes: AtomicU64,
    /// It gets no more bodies: nobody could read them.
    is_retired: AtomicBool,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens the drives, making files where a spec names a new path with a size, and starts a writer for each.
    /// No drives make a store that refuses every body.
    ///
    /// # Errors
    /// If any drive cannot be used as it is. [`notes`](Self::notes) has what is worth telling about the others.
    pub fn open(specs: &[DriveSpec], options: StoreOptions) -> Result<Arc<Self>, StoreError> {
        check(options)?;
        if specs.len() > 256 {
            return Err(StoreError::TooManyDrives { count: specs.len() });
        }
        let mut opened: Vec<Opened> = Vec::with_capacity(specs.len());
        let mut notes = Vec::new();
        for spec in specs {
            if let Some(geometry) = spec.creates().and_then(|size| Geometry::for_capacity(size).ok()) {
                // Said before the file is made.
                check_segments(&spec.path, geometry, options)?;
            }
            let node = opened.first().map(|first| first.drive.superblock().node);
            let next = Drive::open_or_create(spec, node).map_err(|source| StoreError::Drive { source })?;
            check_segments(&spec.path, next.drive.geometry(), options)?;
            let identity = next.drive.superblock().drive;
            if let Some(first) = opened.iter().find(|first| first.drive.superblock().drive == identity) {
                let (first, second) = (first.drive.path().to_owned(), spec.path.clone());
                return Err(StoreError::Twice { first, second, identity });
            }
            notes.extend(next.notes.iter().cloned());
            opened.push(next);
        }
        let lanes = (0..=u8::MAX).zip(opened).map(|(number, opened)| Lane::start(number, opened, options));
        Ok(Arc::new(Self {
            lanes: lanes.collect::<Result<_, _>>()?,
            notes,
            refused_queue_full: AtomicU64::new(0),
            refused_drive_dead: AtomicU64::new(0),
            refused_unfit: AtomicU64::new(0),
        }))
    }

    /// What the operator should read about the drives, once.
    pub fn notes(&self) -> &[DriveNote] {
        &self.notes
    }

    /// Takes a body to be written to one of the drives. Never blocks. `done` is called once, on a drive's thread and
    /// shortly: with the slot as soon as the bytes can be read there, or with the reason why they never will.
    ///
    /// # Errors
    /// If no drive takes it; then `done` is dropped uncalled, and the refusal is counted.
    pub fn offer(&self, body: impl WriteBody, done: WriteDone) -> Result<(), Refused> {
        let (mut body, mut done) = (Body::new(body), done);
        let bytes = body.len() as u64;
        let mut refused = if self.lanes.is_empty() { Refused::NoDrive } else { Refused::DriveDead };
        for lane in self.by_share() {
            match lane.writer.offer(body, done) {
                Ok(()) => {
                    lane.taken_bytes.fetch_add(bytes, Ordering::Relaxed);
                    return Ok(());
                }
                Err((why, returned_body, returned_done)) => {
                    (body, done) = (returned_body, returned_done);
                    // Of several reasons the one that may pass is told.
                    if refused != Refused::QueueFull {
                        refused = why;
                    }
                }
            }
        }
        let count = match refused {
            Refused::QueueFull => Some(&self.refused_queue_full),
            Refused::DriveDead => Some(&self.refused_drive_dead),
            Refused::TooLarge | Refused::Empty => Some(&self.refused_unfit),
            Refused::Closed | Refused::NoDrive => None,
        };
        if let Some(count) = count {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Err(refused)
    }

    /// Where to read a slot; `None` if its segment has been reused. Ask [`holds`](Self::holds) again *after* the
    /// read: only if the slot is still held are the bytes those of the slot.
    pub fn place(&self, slot: Slot) -> Option<Place> {
        let lane = self.lane_of(slot)?;
        let offset = lane.geometry.place(slot.segment, slot.offset);
        Some(Place { fd: lane.writer.drive().file().as_raw_fd(), offset })
    }

    /// Whether the slot's bytes are still on the drive.
    pub fn holds(&self, slot: Slot) -> bool {
        self.lane_of(slot).is_some()
    }

    /// Whether the drive bypasses the page cache, so that reads have to be aligned to 4,096 bytes.
    pub fn is_direct(&self, slot: Slot) -> bool {
        self.lanes.get(usize::from(slot.drive)).is_some_and(|lane| lane.writer.drive().is_direct())
    }

    /// Gives a drive no more bodies, because its reads fail. What it has taken it still writes.
    pub fn retire(&self, drive: u8) {
        if let Some(lane) = self.lanes.get(usize::from(drive)) {
            lane.is_retired.store(true, Ordering::Relaxed);
        }
    }

    /// How many drives there are.
    pub fn drives(&self) -> usize {
        self.lanes.len()
    }

    /// Bytes of all segments of all drives: what the store can hold at most.
    pub fn capacity_bytes(&self) -> u64 {
        let bytes = |geometry: Geometry| u64::from(geometry.segments()) * u64::from(geometry.segment_bytes());
        self.lanes.iter().map(|lane| bytes(lane.geometry)).sum()
    }

    /// How the store is doing.
    pub fn status(&self) -> StoreStatus {
        StoreStatus {
            drives: self.lanes.iter().map(Lane::status).collect(),
            refused_queue_full: self.refused_queue_full.load(Ordering::Relaxed),
            refused_drive_dead: self.refused_drive_dead.load(Ordering::Relaxed),
            refused_unfit: self.refused_unfit.load(Ordering::Relaxed),
        }
    }

    /// Takes no more bodies, finishes what is queued within `close_within`, flushes the drives and ends their threads. Slots
    /// can still be read. A second call does nothing.
    pub fn close(&self) {
        self.lanes.iter().for_each(|lane| lane.writer.begin_close());
        self.lanes.iter().for_each(|lane| lane.writer.end_close());
    }

    fn lane_of(&self, slot: Slot) -> Option<&Lane> {
        self.lanes
            .get(usize::from(slot.drive))
            .filter(|lane| lane.sequences.holds(slot.segment, slot.sequence))
    }

    /// The drives, first the one that has taken the least for its size, so that all turn at the same pace.
    fn by_share(&self) -> SmallVec<[&Lane; 8]> {
        let is_used = |lane: &&Lane| !lane.is_retired.load(Ordering::Relaxed);
        let mut lanes: SmallVec<[&Lane; 8]> = self.lanes.iter().filter(is_used).collect();
        let share = |lane: &&Lane| {
            let taken = u128::from(lane.taken_bytes.load(Ordering::Relaxed));
            (taken << 48) / u128::from(lane.geometry.capacity())
        };
        lanes.sort_by_cached_key(share);
        lanes
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

impl Lane {
    fn start(number: u8, opened: Opened, options: StoreOptions) -> Result<Self, StoreError> {
        let limits = WriterLimits {
            queue_bytes: options.queue_bytes,
            queue_jobs: options.queue_jobs,
            depth: options.depth,
            failures_max: options.failures_max,
            close_within: options.close_within,
        };
        let Opened { drive, sequences: reserved, .. } = opened;
        let (path, geometry) = (drive.path().to_owned(), drive.geometry());
        let sequences = Sequences::new(geometry);
        let writer =
            Writer::start(number, Arc::new(drive), Arc::clone(&sequences), reserved, options.engine, limits);
        let is_uring_wanted = options.engine == WriterEngine::Uring;
        let writer = writer.map_err(|source| StoreError::Writer { path, is_uring_wanted, source })?;
        let is_retired = AtomicBool::new(false);
        Ok(Self { geometry, sequences, writer, taken_bytes: AtomicU64::new(0), is_retired })
    }

    fn status(&self) -> DriveStatus {
        let (counts, drive) = (self.writer.counts(), self.writer.drive());
        let segments_opened = counts.turned.load(Ordering::Relaxed);
        DriveStatus {
            path: drive.path().to_owned(),
            identity: drive.superblock().drive,
            geometry: self.geometry,
            is_direct: drive.is_direct(),
            is_uring: self.writer.is_uring(),
            is_dead: self.writer.is_dead(),
            queued_bytes: counts.queued_bytes.load(Ordering::Relaxed),
            queued_jobs: counts.queued_jobs.load(Ordering::Relaxed),
            written_bytes: counts.written_bytes.load(Ordering::Relaxed),
            written_jobs: counts.written_jobs.load(Ordering::Relaxed),
            failed_jobs: counts.failed_jobs.load(Ordering::Relaxed),
            segments_opened,
            segments_reclaimed: segments_opened.saturating_sub(u64::from(self.geometry.segments())),
        }
    }
}

fn check(options: StoreOptions) -> Result<(), StoreError> {
    let least = [
        ("body_bytes_max", u64::from(options.body_bytes_max), u64::from(UNIT_BYTES)),
        ("queue_bytes", options.queue_bytes, u64::from(options.body_bytes_max)),
        ("queue_jobs", u64::from(options.queue_jobs), 1),
        ("depth", u64::from(options.depth), 1),
        ("failures_max", u64::from(options.failures_max), 1),
    ];
    match least.into_iter().find(|(_, value, least)| value < least) {
        Some((name, value, least)) => Err(StoreError::Option { name, value, least }),
        None => Ok(()),
    }
}

fn check_segments(
    path: &std::path::Path,
    geometry: Geometry,
    options: StoreOptions,
) -> Result<(), StoreError> {
    let (segment_bytes, body_bytes_max) = (geometry.segment_bytes(), options.body_bytes_max);
    if segment_bytes >= body_bytes_max {
        return Ok(());
    }
    let capacity_min = Geometry::capacity_for(body_bytes_max);
    Err(StoreError::SegmentsTooSmall { path: path.to_owned(), segment_bytes, body_bytes_max, capacity_min })
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod tests;
