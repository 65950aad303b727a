//! Brings bodies onto a drive, in the background and never in anybody's way.
//!
//! One thread a drive. It takes jobs from a queue that is bounded in bytes and in jobs, gives each a spot in the open
//! segment, keeps several writes in flight, and tells who asked when the bytes are on the drive. Whoever offers
//! never waits: a full queue refuses, because a cache may forget but must not stall.
//!
//! The thread runs a tokio-uring runtime. Where the kernel refuses `io_uring` the same loop runs on plain tokio, and
//! each write is a `pwrite` on one of a few helper threads.
//!
//! A drive whose writes keep failing is given up for writing; whether it is still read is for its owner to say.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

use super::body::{Body, Next, Progress};
use super::drive::Drive;
use super::segment::{Appender, Sequences, Spot, Step};
use super::{Refused, Slot, WriteError, WriterEngine};

/// Called once: with the slot when all bytes are on the drive, or with what went wrong.
pub type WriteDone = Box<dyn FnOnce(Result<Slot, WriteError>) + Send>;

/// The bounds of one writer.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriterLimits {
    /// Bytes of bodies held, from the offer to the end of the write.
    pub(super) queue_bytes: u64,
    /// Jobs held.
    pub(super) queue_jobs: u32,
    /// Writes in flight.
    pub(super) depth: u16,
    /// Failed writes in a row after which the drive is given up.
    pub(super) failures_max: u32,
    /// Time for what is queued when the writer is closed.
    pub(super) close_within: Duration,
}

/// What a writer tells about itself; all of it moves.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) queued_bytes: AtomicU64,
    pub(super) queued_jobs: AtomicU32,
    pub(super) written_bytes: AtomicU64,
    pub(super) written_jobs: AtomicU64,
    pub(super) failed_jobs: AtomicU64,
    pub(super) turned: AtomicU64,
    pub(super) is_dead: AtomicBool,
}

/// The handle to one drive's writer.
pub(super) struct Writer {
    shared: Arc<Shared>,
    jobs: mpsc::Sender<Job>,
    closing: watch::Sender<bool>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Mutex<std::sync::mpsc::Receiver<()>>,
    is_uring: bool,
}

struct Shared {
    number: u8,
    drive: Arc<Drive>,
    limits: WriterLimits,
    counts: Counts,
    is_closed: AtomicBool,
}

/// One body on its way, with its share of the queue.
struct Job {
    body: Body,
    done: Done,
    charge: Charge,
}

/// Answers exactly once, also where a job is dropped unwritten.
struct Done(Option<WriteDone>);

impl Done {
    fn tell(mut self, result: Result<Slot, WriteError>) {
        if let Some(done) = self.0.take() {
            done(result);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(WriteError::Closed));
        }
    }
}

/// A share of the queue; given back when dropped.
struct Charge {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Charge {
    fn take(shared: &Arc<Shared>, bytes: u64) -> Option<Self> {
        let counts = &shared.counts;
        let room = |held: u64| held.checked_add(bytes).filter(|&held| held <= shared.limits.queue_bytes);
        counts.queued_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        // From here on dropping the charge gives both back.
        let jobs = counts.queued_jobs.fetch_add(1, Ordering::Relaxed);
        let charge = Self { shared: Arc::clone(shared), bytes };
        (jobs < shared.limits.queue_jobs).then_some(charge)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shared.counts.queued_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.shared.counts.queued_jobs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Writer {
    /// Starts the thread. `reserved` are the sequences that it may use without asking the drive for more.
    ///
    /// # Errors
    /// If no thread can be had, or if `engine` asks for `io_uring` and the kernel refuses it.
    pub(super) fn start(
        number: u8,
        drive: Arc<Drive>,
        sequences: Arc<Sequences>,
        reserved: std::ops::Range<u32>,
        engine: WriterEngine,
        limits: WriterLimits,
    ) -> io::Result<Self> {
        let appender = Appender::new(drive.geometry(), sequences, reserved);
        let shared = Arc::new(Shared {
            number,
            drive,
            limits,
            counts: Counts::default(),
            is_closed: AtomicBool::new(false),
        });
        // The bounds are those of the charge; the channel only has to be no smaller.
        let (jobs, queue) = mpsc::channel(limits.queue_jobs as usize);
        let (closing, close_asked) = watch::channel(false);
        let (tell_started, started) = std::sync::mpsc::channel();
        let (tell_ended, ended) = std::sync::mpsc::channel();
        let lane =
            Lane { shared: Arc::clone(&shared), appender: RefCell::new(appender), failures: RefCell::new(0) };
        let thread = std::thread::Builder::new().name(format!("drive-{number}")).spawn(move || {
            run_thread(lane, queue, close_asked, engine, &tell_started);
            let _ = tell_ended.send(());
        })?;
        let is_uring =
            started.recv().map_err(|_| io::Error::other("the writer thread ended at its start"))??;
        Ok(Self {
            shared,
            jobs,
            closing,
            thread: Mutex::new(Some(thread)),
            ended: Mutex::new(ended),
            is_uring,
        })
    }

    /// Takes a body to be written, or gives it back with the reason why not. Never blocks.
    pub(super) fn offer(&self, body: Body, done: WriteDone) -> Result<(), (Refused, Body, WriteDone)> {
        let bytes = body.len() as u64;
        let refusal = if self.shared.is_closed.load(Ordering::Relaxed) {
            Some(Refused::Closed)
        } else if self.is_dead() {
            Some(Refused::DriveDead)
        } else if bytes == 0 {
            Some(Refused::Empty)
        } else if bytes > self.body_bytes_max() {
            Some(Refused::TooLarge)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            return Err((refusal, body, done));
        }
        let Some(charge) = Charge::take(&self.shared, bytes) else {
            return Err((Refused::QueueFull, body, done));
        };
        self.jobs.try_send(Job { body, done: Done(Some(done)), charge }).map_err(|error| {
            let refused = match error {
                mpsc::error::TrySendError::Full(_) => Refused::QueueFull,
                mpsc::error::TrySendError::Closed(_) => Refused::Closed,
            };
            let mut job = error.into_inner();
            (refused, job.body, job.done.0.take().expect("not told yet"))
        })
    }

    /// The largest body that this writer can ever take.
    fn body_bytes_max(&self) -> u64 {
        u64::from(self.shared.drive.geometry().segment_bytes()).min(self.shared.limits.queue_bytes)
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    pub(super) fn drive(&self) -> &Drive {
        &self.shared.drive
    }

    pub(super) fn is_dead(&self) -> bool {
        self.shared.counts.is_dead.load(Ordering::Relaxed)
    }

    pub(super) fn is_uring(&self) -> bool {
        self.is_uring
    }

    /// Asks the thread to finish; does not wait. What is offered from here on is refused.
    pub(super) fn begin_close(&self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        self.closing.send_replace(true);
    }

    /// Waits for the thread to end after [`begin_close`](Self::begin_close), for as long as a close may take.
    pub(super) fn end_close(&self) {
        let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        if thread.thread().id() == std::thread::current().id() {
            // The last owner let go inside a `done`; the thread cannot wait for itself, and ends right after.
            return;
        }
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // A kernel that does not give a write back keeps its thread; the program ends all the same.
        let patience = self.shared.limits.close_within + CLOSE_GRACE;
        if ended.recv_timeout(patience) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let drive = self.shared.drive.path().display();
            tracing::error!(%drive, "drive writer did not end: the drive does not answer");
        } else if thread.join().is_err() {
            tracing::error!(drive = %self.shared.drive.path().display(), "drive writer panicked");
        }
    }
}

/// Time for the flush and the last superblock, and for the kernel to cancel what is in flight.
const CLOSE_GRACE: Duration = Duration::from_secs(5);

/// The thread's own side: spots, failures, and the job in hand.
struct Lane {
    shared: Arc<Shared>,
    appender: RefCell<Appender>,
    /// Failed writes in a row.
    failures: RefCell<u32>,
}

fn run_thread(
    lane: Lane,
    queue: mpsc::Receiver<Job>,
    close_asked: watch::Receiver<bool>,
    engine: WriterEngine,
    tell_started: &std::sync::mpsc::Sender<io::Result<bool>>,
) {
    let lane = Rc::new(lane);
    let depth = lane.shared.limits.depth;
    if engine != WriterEngine::Portable {
        let entries = u32::from(depth).next_power_of_two().max(8);
        // tokio-uring closes the descriptor that it is given, so it gets one of its own.
        let ready = tokio_uring::Runtime::new(tokio_uring::builder().entries(entries))
            .and_then(|runtime| Ok((runtime, lane.shared.drive.file().try_clone()?)));
        match ready {
            Ok((runtime, file)) => {
                let _ = tell_started.send(Ok(true));
                runtime.block_on(async {
                    let pen = Pen::Uring(Rc::new(tokio_uring::fs::File::from_std(file)));
                    run_until_closed(&lane, queue, close_asked, pen).await;
                });
                // Waits for the kernel to let go of every body, then the drive is ours alone.
                drop(runtime);
                finish(&lane);
                return;
            }
            Err(refusal) if engine == WriterEngine::Uring => {
                let _ = tell_started.send(Err(refusal));
                return;
            }
            Err(refusal) => {
                let drive = lane.shared.drive.path().display();
                tracing::warn!(%drive, %refusal, "io_uring refused: this drive is written with pwrite");
            }
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .max_blocking_threads(usize::from(depth))
        .thread_name(format!("drive-{}-write", lane.shared.number))
        .build();
    match runtime {
        Ok(runtime) => {
            let _ = tell_started.send(Ok(false));
            let pen = Pen::Portable(Arc::clone(&lane.shared.drive));
            LocalSet::new().block_on(&runtime, run_until_closed(&lane, queue, close_asked, pen));
            drop(runtime);
            finish(&lane);
        }
        Err(error) => {
            let _ = tell_started.send(Err(error));
        }
    }
}

/// Everything written becomes durable, and the sequences that were not used go back.
fn finish(lane: &Lane) {
    let drive = &lane.shared.drive;
    let floor = lane.appender.borrow().sequence_next();
    if let Err(error) = drive.file().sync_data() {
        tracing::warn!(drive = %drive.path().display(), %error, "flushing at close failed");
    } else if let Err(error) = drive.set_floor(floor) {
        tracing::warn!(drive = %drive.path().display(), %error, "writing the last superblock failed");
    }
}

async fn run_until_closed(
    lane: &Rc<Lane>,
    queue: mpsc::Receiver<Job>,
    close_asked: watch::Receiver<bool>,
    pen: Pen,
) {
    let mut deadline_asked = close_asked.clone();
    let deadline = async {
        // An error means that the handle is gone; then the queue ends by itself.
        let _ = deadline_asked.wait_for(|&asked| asked).await;
        sleep(lane.shared.limits.close_within).await;
    };
    tokio::select! {
        () = run(lane, queue, close_asked, pen) => {}
        // What is still queued is dropped, and each job tells its owner so.
        () = deadline => tracing::warn!(drive = %lane.shared.drive.path().display(), "closing took too long: bodies were dropped"),
    }
}

/// The writer's whole life: jobs in, spots, writes, answers out.
async fn run(
    lane: &Rc<Lane>,
    mut queue: mpsc::Receiver<Job>,
    mut close_asked: watch::Receiver<bool>,
    pen: Pen,
) {
    let depth = usize::from(lane.shared.limits.depth);
    let mut flights = JoinSet::new();
    let mut is_closing = false;
    loop {
        while flights.len() >= depth {
            landed(&mut flights).await;
        }
        let job = tokio::select! {
            biased;
            _ = close_asked.wait_for(|&asked| asked), if !is_closing => {
                is_closing = true;
                queue.close();
                continue;
            }
            () = landed(&mut flights), if !flights.is_empty() => continue,
            job = queue.recv() => job,
        };
        let Some(job) = job else { break };
        match lane.find_spot(&job, &mut flights).await {
            Some(spot) => {
                let (lane, pen) = (Rc::clone(lane), pen.clone());
                flights.spawn_local(async move { lane.write(job, spot, pen).await });
            }
            None => job.done.tell(Err(WriteError::DriveDead)),
        }
    }
    while !flights.is_empty() {
        landed(&mut flights).await;
    }
}

/// One write has ended, or a second has passed. The runtime hands operations to the kernel when it goes idle and
/// forgets an error in doing so; waking once a second while any are out means that none can be left lying.
async fn landed(flights: &mut JoinSet<()>) {
    if let Ok(Some(Err(error))) = timeout(Duration::from_secs(1), flights.join_next()).await
        && let Ok(panic) = error.try_into_panic()
    {
        std::panic::resume_unwind(panic);
    }
}

impl Lane {
    /// A spot for the job; `None` once the drive is dead.
    async fn find_spot(&self, job: &Job, flights: &mut JoinSet<()>) -> Option<Spot> {
        // Fits: `offer` compared it with a whole segment, and segments are at most 64 MiB.
        let bytes = u32::try_from(job.body.len()).expect("at most a segment");
        loop {
            if self.shared.counts.is_dead.load(Ordering::Relaxed) {
                return None;
            }
            let step = self.appender.borrow_mut().take(bytes);
            match step {
                Step::Write(spot) => {
                    self.shared.counts.turned.store(self.appender.borrow().turned(), Ordering::Relaxed);
                    return Some(spot);
                }
                Step::Wait => landed(flights).await,
                // Blocks this thread for two small writes and flushes, once in 4,096 segments.
                Step::Reserve => match self.shared.drive.reserve() {
                    Ok(sequences) => self.appender.borrow_mut().extend(sequences),
                    Err(error) => self.give_up(&error),
                },
            }
        }
    }

    async fn write(&self, job: Job, spot: Spot, pen: Pen) {
        let Job { body, done, charge } = job;
        let bytes = body.len() as u64;
        let result = pen.write(body, self.shared.drive.geometry().place(spot.segment, spot.offset)).await;
        // The queue has room again before the owner is told, so that the owner may offer the next body.
        drop(charge);
        let counts = &self.shared.counts;
        match result {
            Ok(()) => {
                self.failures.replace(0);
                counts.written_bytes.fetch_add(bytes, Ordering::Relaxed);
                counts.written_jobs.fetch_add(1, Ordering::Relaxed);
                let Spot { segment, offset, sequence } = spot;
                done.tell(Ok(Slot { drive: self.shared.number, segment, offset, sequence }));
            }
            Err(error) => {
                counts.failed_jobs.fetch_add(1, Ordering::Relaxed);
                let failures = self.failures.replace_with(|failures| *failures + 1) + 1;
                tracing::warn!(drive = %self.shared.drive.path().display(), %error, failures, "drive write failed");
                if failures >= self.shared.limits.failures_max {
                    self.give_up(&error);
                }
                done.tell(Err(WriteError::Drive { source: error }));
            }
        }
        // Only now may the segment come round again: the slot was whole when its owner was told.
        self.appender.borrow_mut().settle(spot);
    }

    fn give_up(&self, why: &dyn std::fmt::Display) {
        if !self.shared.counts.is_dead.swap(true, Ordering::Relaxed) {
            tracing::error!(drive = %self.shared.drive.path().display(), %why, "drive given up for writing");
        }
    }
}

/// What writes.
#[derive(Clone)]
enum Pen {
    Uring(Rc<tokio_uring::fs::File>),
    Portable(Arc<Drive>),
}

impl Pen {
    /// Writes the whole body at byte `at` of the drive. The body is dropped when the kernel is done with it.
    async fn write(self, mut body: Body, at: u64) -> io::Result<()> {
        let mut progress = Progress::new(body.len());
        match self {
            Self::Uring(file) => loop {
                let place = at + body.from() as u64;
                let (result, landed) = file.write_at(body, place).submit().await;
                body = landed;
                match progress.took(result) {
                    Next::From(from) => body.set_from(from),
                    Next::Done => return Ok(()),
                    Next::Failed(error) => return Err(error),
                }
            },
            Self::Portable(drive) => {
                let write = move || loop {
                    let result = body.write_at(drive.file(), at + body.from() as u64);
                    match progress.took(result) {
                        Next::From(from) => body.set_from(from),
                        Next::Done => return Ok(()),
                        Next::Failed(error) => return Err(error),
                    }
                };
                tokio::task::spawn_blocking(write).await.unwrap_or_else(|error| Err(io::Error::other(error)))
            }
        }
    }
}
