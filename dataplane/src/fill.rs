//! Bringing absent extents from the origin, or from the node that owns them, once for all who wait.
//!
//! Adjacent absent extents make one run: one request to the origin, whose body fills them in order. A run is
//! a task of its own: no client's disconnect or slowness can harm it, and readers follow its watermark. It
//! ends early, at the edge of an extent, only when nobody wants the rest any more.
//!
//! A body that breaks is resumed at its offset under If-Match, up to three times. Another version at the
//! origin ends the run: bytes of two versions never meet in one extent.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::arena::{LeaseMut, Purpose};
use crate::engine::task;
use crate::metrics::{self, Counter};
use crate::origin::{Answer, Ask, AskRange, Body, Origin, OriginError};
use crate::peer::{self, Got, Reach};
use crate::range::ByteRange;
use crate::serve::Worker;
use crate::sums::BlockSums;
use crate::table::{Fill, FillFailure, ObjectEntry};

/// Most bytes that one request to the origin brings.
pub const RUN_BYTES_MAX: u64 = 8 << 20;
/// How often a broken body is resumed.
const RESUMES_MAX: u32 = 3;
/// Pause before the first resume; doubles each time.
const RESUME_PAUSE: Duration = Duration::from_millis(50);
/// How often one who waits for a right looks whether it is still wanted.
const WANTED_PACE: Duration = Duration::from_secs(1);
/// How long a run waits for memory.
const MEMORY_PATIENCE: Duration = Duration::from_secs(10);

/// A reader's interest in a run: while one is held, the run goes on.
#[derive(Clone, Debug)]
pub struct Interest(#[expect(dead_code, reason = "counted, not read")] Arc<()>);

impl Interest {
    /// A reader joins the run that a fill belongs to.
    pub fn join(fill: &Fill) -> Option<Self> {
        fill.run.upgrade().map(Self)
    }
}

/// Absent extents that somebody is going to fill.
#[derive(Debug)]
pub struct Claim {
    fills: VecDeque<Arc<Fill>>,
    run: Arc<()>,
}

impl Claim {
    /// Claims the absent extents from `first` on, without a gap, up to `last` and to the size of one run.
    /// `None` if `first` is here, or on its way, already.
    pub fn make(entry: &ObjectEntry, first: u32, last: u32) -> Option<Self> {
        let extent_bytes = u64::from(entry.grid.extent_bytes());
        let most = (RUN_BYTES_MAX / extent_bytes).max(1) as usize;
        let run = Arc::new(());
        let mut fills = VecDeque::new();
        for extent in (first..=last).take(most) {
            let Some(range) = entry.grid.extent_range(extent, entry.facts.size) else { break };
            match entry.locate_or_fill(extent, range.len() as u32, &run) {
                Err(fill) => fills.push_back(fill),
                Ok(_) => break,
            }
        }
        (!fills.is_empty()).then_some(Self { fills, run })
    }

    /// Starts the run. `begun`, if the origin has been asked already, is what it sends and the right under which it
    /// was asked.
    pub fn start(
        self,
        worker: &Rc<Worker>,
        entry: &Arc<ObjectEntry>,
        begun: Option<Begun>,
        reach: Reach,
    ) -> Interest {
        let Self { fills, run } = self;
        let interest = Interest(Arc::clone(&run));
        worker.counters.bump(Counter::FillsStarted, fills.len() as u64);
        let run = Run {
            worker: Rc::clone(worker),
            entry: Arc::clone(entry),
            fills,
            writer: None,
            interest: run,
            reach,
            is_of_peer: false,
            origin: worker.origin(entry.key.accelerator),
        };
        task::spawn(run.bring(begun));
        interest
    }
}

/// The right to download from an origin; [`Node::fills`](crate::node::Node::fills) has a bounded number of them.
#[derive(Debug)]
pub struct Right(#[expect(dead_code, reason = "held, not read")] OwnedSemaphorePermit);

impl Right {
    /// All of those that whoever asks within `reach` draws from.
    pub fn all(worker: &Worker, reach: Reach) -> &Arc<Semaphore> {
        if reach == Reach::Fleet && peer::is_shared(worker) {
            &worker.node.peer_fills
        } else {
            &worker.node.fills
        }
    }

    /// Waits for one, for as long as somebody wants what it is for; `None` when nobody does any more.
    pub async fn acquire(worker: &Worker, reach: Reach, is_wanted: impl Fn() -> bool) -> Option<Self> {
        let mut acquiring = pin!(Arc::clone(Self::all(worker, reach)).acquire_owned());
        loop {
            match timeout(WANTED_PACE, &mut acquiring).await {
                Ok(right) => {
                    let right = Self(right.expect("the semaphore is never closed"));
                    return is_wanted().then_some(right);
                }
                Err(_) if is_wanted() => {}
                Err(_) => return None,
            }
        }
    }
}

/// An answer of the origin that has begun.
#[derive(Debug)]
pub struct Begun {
    /// Its body.
    pub body: Body,
    /// Which byte of the object it begins with.
    pub start: u64,
    /// Whether another node sends it.
    pub is_of_peer: bool,
    /// The right under which it was asked for.
    pub right: Right,
}

struct Run {
    // The extents that are still to be filled, in order.
    worker: Rc<Worker>,
    entry: Arc<ObjectEntry>,
    fills: VecDeque<Arc<Fill>>,
    writer: Option<LeaseMut>,
    /// Shared with those who are interested.
    interest: Arc<()>,
    reach: Reach,
    /// Whether the bytes that come now are another node's: they are kept in memory only.
    is_of_peer: bool,
    /// `None` if the accelerator was removed and nobody reads from it any more.
    origin: Option<Rc<Origin>>,
}

impl Run {
    async fn bring(mut self, begun: Option<Begun>) {
        let worker = Rc::clone(&self.worker);
        let (mut body, mut right) = match begun {
            Some(Begun { body, start, is_of_peer, right }) => {
                self.is_of_peer = is_of_peer;
                (Some((body, start)), Some(right))
            }
            None => (None, None),
        };
        let mut resumes = 0;
        loop {
            // The right comes before the connection, everywhere, so that neither waits for the other.
            let held = match right.take() {
                Some(held) => held,
                None => match Right::acquire(&worker, self.reach, || self.is_wanted()).await {
                    Some(held) => held,
                    None => return,
                },
            };
            let failure = match self.receive(body.take()).await {
                Ok(()) => return,
                Err(failure) => failure,
            };
            // Whoever broke off or had another version is not asked for the rest.
            if self.is_of_peer {
                self.reach = Reach::Origin;
            }
            match failure {
                Stop::Resume(error) if resumes < RESUMES_MAX => {
                    tracing::debug!(%error, resumes, "fill resumed");
                    // Whoever gets the right next needs memory; who has some keeps the right.
                    right = self.writer.is_some().then_some(held);
                    tokio::time::sleep(RESUME_PAUSE * (1 << resumes)).await;
                    resumes += 1;
                }
                Stop::Resume(error) => {
                    let reason = reason(&error);
                    tracing::warn!(%error, object = %self.entry.name(), "fill failed");
                    return self.fail(FillFailure::Origin, reason);
                }
                Stop::Failed(FillFailure::Gone) => {
                    worker.node.table.forget_version(&self.entry);
                    return self.fail(FillFailure::Gone, metrics::FillFailure::Changed);
                }
                Stop::Failed(failure) => {
                    let reason = match failure {
                        FillFailure::Memory => metrics::FillFailure::Memory,
                        FillFailure::Refused(_) => metrics::FillFailure::Status,
                        _ => metrics::FillFailure::Other,
                    };
                    return self.fail(failure, reason);
                }
                // Nobody wants the rest; what is whole has been kept.
                Stop::Unwanted => return,
            }
        }
    }

    /// Receives until all extents are filled.
    async fn receive(&mut self, begun: Option<(Body, u64)>) -> Result<(), Stop> {
        let position = self.position();
        let (mut body, offset) = match begun {
            Some(begun) => begun,
            None => self.ask(position).await?,
        };
        let mut skip = position - offset;
        while let Some(bytes) = body.chunk().await.map_err(Stop::from)? {
            let counter = if self.is_of_peer { Counter::PeerBytes } else { Counter::OriginBytes };
            self.worker.counters.bump(counter, bytes.len() as u64);
            let skipped = skip.min(bytes.len() as u64);
            skip -= skipped;
            if self.take(bytes.slice(skipped as usize..)).await? {
                return Ok(());
            }
        }
        if self.fills.is_empty() { Ok(()) } else { Err(Stop::Resume(Trouble::Short)) }
    }

    /// Asks the origin for everything that is still missing, of this version only.
    async fn ask(&mut self, position: u64) -> Result<(Body, u64), Stop> {
        let last = self.fills.back().expect("a run has extents").extent;
        let end = self.entry.grid.extent_range(last, self.entry.facts.size).expect("inside the object").end();
        let range = ByteRange::new(position, end).expect("a run that is not whole misses bytes");
        let ask = Ask {
            range: AskRange::Bytes(range),
            if_match: self.entry.facts.etag.clone(),
            if_none_match: None,
        };
        let (key, worker) = (&self.entry.key, &self.worker);
        let accelerator = worker.accelerator(key.accelerator);
        let Some(origin) = &self.origin else { return Err(Stop::Failed(FillFailure::Gone)) };
        let got =
            peer::get(worker, accelerator.as_deref(), origin, &key.path, &ask, position, self.reach).await;
        let Got { answer, peer } = got.map_err(Stop::from)?;
        self.is_of_peer = peer.is_some();
        match answer {
            Answer::Bytes { facts, range, body } => {
                // An origin that ignores If-Match is caught here.
                if facts.etag != self.entry.facts.etag || facts.size != self.entry.facts.size {
                    return Err(Stop::Failed(FillFailure::Gone));
                }
                if range.start() > position {
                    return Err(Stop::Failed(FillFailure::Origin));
                }
                Ok((body, range.start()))
            }
            Answer::Changed | Answer::Empty { .. } | Answer::Unsatisfiable { .. } => {
                Err(Stop::Failed(FillFailure::Gone))
            }
            Answer::Other(relay) if relay.status == 404 => Err(Stop::Failed(FillFailure::Gone)),
            Answer::Other(relay) if relay.status == 429 || relay.status >= 500 => {
                Err(Stop::Resume(Trouble::Status(relay.status)))
            }
            Answer::Other(relay) => Err(Stop::Failed(FillFailure::Refused(relay.status))),
            Answer::NotModified | Answer::Found { .. } => Err(Stop::Failed(FillFailure::Origin)),
        }
    }

    /// Puts bytes where they belong. True when the run is whole.
    async fn take(&mut self, mut bytes: Bytes) -> Result<bool, Stop> {
        while !bytes.is_empty() {
            let Some(fill) = self.fills.front().cloned() else { return Ok(true) };
            let mut writer = match self.writer.take() {
                Some(writer) => writer,
                None => self.open(&fill).await?,
            };
            let room = fill.len as usize - writer.filled();
            let piece = bytes.split_to(room.min(bytes.len()));
            writer.append(&piece);
            self.worker.counters.bump(Counter::FillCopiedBytes, piece.len() as u64);
            if writer.filled() < fill.len as usize {
                self.writer = Some(writer);
                fill.advanced();
                continue;
            }
            self.close(&fill, writer);
            self.fills.pop_front();
            if !self.is_wanted() {
                return Err(Stop::Unwanted);
            }
        }
        Ok(self.fills.is_empty())
    }

    async fn open(&self, fill: &Fill) -> Result<LeaseMut, Stop> {
        let arena = self.worker.node.arena;
        let granted = arena.grant_within(Purpose::Fill, fill.len as usize, MEMORY_PATIENCE).await;
        let writer = granted.map_err(|_| Stop::Failed(FillFailure::Memory))?;
        fill.begin(writer.share());
        Ok(writer)
    }

    fn close(&self, fill: &Arc<Fill>, writer: LeaseMut) {
        let lease = writer.freeze();
        let sums = BlockSums::of(lease.bytes(0..fill.len as usize), self.entry.version, fill.extent);
        if self.entry.keep(fill, &lease, sums) {
            if !self.is_of_peer {
                self.worker.node.offer(&self.entry, fill.extent, &lease);
            }
            self.worker.node.table.grown();
        }
        fill.advanced();
    }

    fn position(&self) -> u64 {
        let extent = self.fills.front().expect("a run has extents").extent;
        let start = u64::from(extent) * u64::from(self.entry.grid.extent_bytes());
        start + self.writer.as_ref().map_or(0, |writer| writer.filled() as u64)
    }

    fn is_wanted(&self) -> bool {
        self.fills.is_empty()
            || Arc::strong_count(&self.interest) > 1
            || self.fills.iter().any(|fill| fill.is_awaited())
    }

    fn fail(&mut self, failure: FillFailure, reason: metrics::FillFailure) {
        let counters = &self.worker.counters;
        counters.bump(Counter::FillsFailed(reason), self.fills.len() as u64);
        self.end(failure);
    }

    fn end(&mut self, failure: FillFailure) {
        for fill in self.fills.drain(..) {
            self.entry.abandon(&fill);
            fill.fail(failure);
        }
    }
}

impl Drop for Run {
    /// However a run ends, nobody waits for it in vain.
    fn drop(&mut self) {
        self.end(FillFailure::Lost);
    }
}

enum Stop {
    /// Ask again from where it broke.
    Resume(Trouble),
    /// Nothing to be done.
    Failed(FillFailure),
    /// Nobody is interested any more.
    Unwanted,
}

#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error(transparent)]
    Origin(OriginError),
    #[error("the origin answered {0}")]
    Status(u16),
    #[error("the origin sent less than it said")]
    Short,
}

impl From<OriginError> for Stop {
    fn from(error: OriginError) -> Self {
        if error.is_retryable() {
            Self::Resume(Trouble::Origin(error))
        } else {
            tracing::warn!(%error, "the origin's answer cannot be used");
            Self::Failed(FillFailure::Origin)
        }
    }
}

fn reason(trouble: &Trouble) -> metrics::FillFailure {
    match trouble {
        Trouble::Origin(OriginError::Unreachable { .. } | OriginError::Broken { .. }) => {
            metrics::FillFailure::Connect
        }
        Trouble::Origin(OriginError::TimedOut { .. }) => metrics::FillFailure::Timeout,
        Trouble::Origin(OriginError::Cut { .. }) | Trouble::Short => metrics::FillFailure::Short,
        Trouble::Status(_) => metrics::FillFailure::Status,
        Trouble::Origin(_) => metrics::FillFailure::Other,
    }
}
