//! From a name to a version that may be believed: the table, or one question to the origin for all who ask.
//!
//! An unknown object is asked for by its first ranged GET, never by HEAD first: the answer brings version,
//! size, headers and the first bytes together, so that they cannot belong to different versions. A known one
//! that may have changed is asked for with If-None-Match, one question at a time. A question that began before
//! a request came in may have been answered before somebody's write, so `strict` shares only later ones.
#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_control_api::Freshness;
use tokio::time::Instant;

use crate::engine::task;
use crate::fill::{Begun, Claim, RUN_BYTES_MAX, Right};
use crate::metrics::{Counter, OriginAsk};
use crate::object::ObjectFacts;
use crate::origin::{Answer, Ask, AskRange, Origin, OriginError, Relay};
use crate::peer::{self, Got, Reach};
use crate::range::{ByteRange, Grid, RangeAsk};
use crate::serve::Worker;
use crate::served::Accelerator;
use crate::table::{Answered, Lookup, ObjectEntry, Resolve, ResolveFailure, Resolved, Validation};

/// Largest answer that is shared between those who asked at the same time, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// How often a question is repeated when the origin fails.
const REPEATS_MAX: u32 = 2;
const REPEAT_PAUSE: Duration = Duration::from_millis(50);
/// How often a version may change under our hands before we stop following.
const ROUNDS_MAX: u32 = 4;

/// What the client wants of the object: how to ask for it if it is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Its headers.
    Head,
    /// Bytes.
    Bytes(Option<RangeAsk>),
}

/// What is known now.
#[derive(Debug)]
pub enum Found {
    /// This version; how old the belief is, if it is by time to live.
    Object(Arc<ObjectEntry>, Option<Duration>),
    /// The same of a version that was not known when we were asked: whatever is here of it now, has just come.
    New(Arc<ObjectEntry>, Option<Duration>),
    /// The origin answered something else.
    Answered(Arc<Answered>),
    /// Ask the origin directly.
    Bypass,
    /// The origin failed.
    Failed(ResolveFailure),
}

/// The version that is known, if the policy lets us believe it at `now` without asking anybody: what most requests are
/// answered with, and they wait for nothing.
pub fn known(
    worker: &Worker,
    accelerator: u16,
    path: &[u8],
    freshness: Freshness,
    now: Instant,
) -> Option<Found> {
    worker.served().at(accelerator)?;
    let entry = worker.node.table.find(accelerator, path).filter(|entry| is_fresh(entry, freshness, now))?;
    let age = age(&entry, freshness, now);
    Some(Found::Object(entry, age))
}

/// Finds a version that the policy lets us believe at `now`.
pub async fn find(
    worker: &Rc<Worker>,
    accelerator: u16,
    path: &[u8],
    want: Want,
    freshness: Freshness,
    reach: Reach,
    now: Instant,
) -> Found {
    for _ in 0..ROUNDS_MAX {
        // Nobody would ever find what is kept under an index that was taken away.
        if worker.served().at(accelerator).is_none() {
            return Found::Failed(ResolveFailure::Removed);
        }
        let is_head = want == Want::Head;
        let asks_node = || asks_node(worker, accelerator, path, want);
        let asks_node = (reach == Reach::Fleet).then_some(&asks_node as &dyn Fn() -> bool);
        let table = &worker.node.table;
        let resolve = match table.find_or_resolve(accelerator, path, is_head, asks_node, Instant::now()) {
            Lookup::Uncacheable => return Found::Bypass,
            Lookup::Known(entry) => match believe(worker, entry, freshness, now).await {
                Some(found) => return found,
                None => continue,
            },
            Lookup::Join(resolve) => resolve,
            Lookup::Lead(resolve) => {
                let leader = Leader(Arc::clone(&resolve), worker.clone());
                task::spawn(lead(Rc::clone(worker), leader, want, reach));
                resolve
            }
        };
        match resolve.outcome().await {
            Resolved::Known(entry) => {
                // Asked before we came, it may be older than a write that we must see.
                if freshness == Freshness::Strict && entry.validated() < now {
                    match believe(worker, entry, freshness, now).await {
                        Some(found) => return found,
                        None => continue,
                    }
                }
                let age = age(&entry, freshness, Instant::now());
                return Found::New(entry, age);
            }
            // Asked before we came, it may be older than a write that we must see.
            Resolved::Answered(answered) if freshness == Freshness::Strict && answered.asked < now => {}
            Resolved::Answered(answered) => return Found::Answered(answered),
            Resolved::Bypass => return Found::Bypass,
            Resolved::Failed(failure) => return Found::Failed(failure),
            Resolved::Lost => {}
        }
    }
    // The object changes faster than we can look.
    Found::Bypass
}

/// A known version, if it may be believed; `None` if it is gone and the table must be asked again.
async fn believe(
    worker: &Rc<Worker>,
    entry: Arc<ObjectEntry>,
    freshness: Freshness,
    now: Instant,
) -> Option<Found> {
    if is_fresh(&entry, freshness, now) {
        let age = age(&entry, freshness, now);
        return Some(Found::Object(entry, age));
    }
    let mut last = entry.validation().await;
    if !entry.is_current() {
        return None;
    }
    // A question that began after we came is ours too, and so is its failure.
    if last.begun >= now
        && let Some(failure) = last.failure
    {
        return Some(Found::Failed(failure));
    }
    let asked_since = last.begun >= now && entry.validated() >= now;
    if asked_since || is_fresh(&entry, freshness, now) {
        drop(last);
        let age = age(&entry, freshness, now);
        return Some(Found::Object(entry, age));
    }
    let asked = Instant::now();
    *last = Validation { begun: asked, failure: None };
    let answer = ask_changed(worker, &entry).await;
    match answer {
        Ok(true) => {
            entry.confirm(asked);
            drop(last);
            let age = age(&entry, freshness, asked);
            Some(Found::Object(entry, age))
        }
        Ok(false) => {
            drop(last);
            worker.node.table.forget_version(&entry);
            None
        }
        Err(failure) => {
            last.failure = Some(failure);
            Some(Found::Failed(failure))
        }
    }
}

fn is_fresh(entry: &ObjectEntry, freshness: Freshness, now: Instant) -> bool {
    match freshness {
        Freshness::Immutable => true,
        Freshness::Ttl(ttl) => now.saturating_duration_since(entry.validated()) < ttl,
        Freshness::Strict => entry.validated() >= now,
    }
}

fn age(entry: &ObjectEntry, freshness: Freshness, now: Instant) -> Option<Duration> {
    matches!(freshness, Freshness::Ttl(_)).then(|| now.saturating_duration_since(entry.validated()))
}

/// An accelerator and its origin.
///
/// # Errors
/// `Removed`, `Unopened`.
pub fn bound(worker: &Worker, accelerator: u16) -> Result<(Arc<Accelerator>, Rc<Origin>), ResolveFailure> {
    let bound = worker.accelerator(accelerator).ok_or(ResolveFailure::Removed)?;
    Ok((bound, worker.origin(accelerator).ok_or(ResolveFailure::Unopened)?))
}

/// Whether the origin still has this version.
async fn ask_changed(worker: &Rc<Worker>, entry: &ObjectEntry) -> Result<bool, ResolveFailure> {
    let one = ByteRange::new(0, 1).expect("one byte");
    let range = if entry.facts.size == 0 { AskRange::Whole } else { AskRange::Bytes(one) };
    let ask = Ask { range, if_match: None, if_none_match: entry.facts.etag.clone() };
    let (_, origin) = bound(worker, entry.key.accelerator)?;
    let mut repeats = 0;
    loop {
        worker.counters.bump(Counter::OriginRequests(OriginAsk::Conditional), 1);
        let failure = match origin.get(&entry.key.path, &ask).await {
            Ok(Answer::NotModified) => return Ok(true),
            // An origin that ignores If-None-Match still says which version it has.
            Ok(Answer::Bytes { facts, .. } | Answer::Empty { facts }) => {
                return Ok(facts.etag == entry.facts.etag && facts.size == entry.facts.size);
            }
            Ok(Answer::Other(relay)) if is_passing(relay.status) => ResolveFailure::Unreachable,
            Ok(_) => return Ok(false),
            Err(error) if error.is_retryable() => failure(&error),
            Err(error) => return Err(failure(&error)),
        };
        if repeats == REPEATS_MAX {
            return Err(failure);
        }
        tokio::time::sleep(REPEAT_PAUSE * (1 << repeats)).await;
        repeats += 1;
    }
}

/// The one who asks, for all. However it ends, those who wait learn it.
struct Leader(Arc<Resolve>, Rc<Worker>);

impl Drop for Leader {
    fn drop(&mut self) {
        if !self.0.is_settled() {
            self.1.node.table.settle(&self.0, Resolved::Lost);
        }
    }
}

async fn lead(worker: Rc<Worker>, leader: Leader, want: Want, reach: Reach) {
    let resolve = Arc::clone(&leader.0);
    let (accelerator, origin) = match bound(&worker, resolve.key.accelerator) {
        Ok(bound) => bound,
        Err(failure) => return worker.node.table.settle(&resolve, Resolved::Failed(failure)),
    };
    let grid = accelerator.grid;
    let mut range = first_ask(want, grid, accelerator.extent_bytes).map(|ask| within_group(&worker, ask));
    let mut repeats = 0;
    // Before the connection: its body may become a run.
    let mut right = None;
    if range.is_some() {
        // The leader has two holds and the table one.
        right = Right::acquire(&worker, reach, || Arc::strong_count(&resolve) > 3).await;
        if right.is_none() {
            return worker.node.table.settle(&resolve, Resolved::Lost);
        }
    }
    let outcome = loop {
        let asked = Instant::now();
        let got = put(&worker, &accelerator, &origin, &resolve, range, reach).await;
        let (answer, peer) = match got {
            Ok(Got { answer, peer }) => (Ok(answer), peer),
            Err(error) => (Err(error), None),
        };
        // What another node believes is as old here as it is there.
        let asked = peer.and_then(|age| asked.checked_sub(age)).unwrap_or(asked);
        match answer {
            Ok(Answer::Bytes { facts, range, body }) => {
                let right = right.take().expect("a GET is asked under a right");
                let begun = Begun { body, start: range.start(), is_of_peer: peer.is_some(), right };
                break keep(
                    &worker,
                    &accelerator,
                    &resolve,
                    facts,
                    asked,
                    (want, reach),
                    Some((range, begun)),
                );
            }
            Ok(Answer::Empty { facts } | Answer::Found { facts }) => {
                break keep(&worker, &accelerator, &resolve, facts, asked, (want, reach), None);
            }
            // An empty object has no first byte, and a short one not the byte that was asked for. Ask for what
            // every object has.
            Ok(Answer::Unsatisfiable { size: Some(0) }) if range != Some(AskRange::Whole) => {
                range = Some(AskRange::Whole);
            }
            Ok(Answer::Unsatisfiable { .. }) if range.is_some() => range = None,
            Ok(Answer::Other(relay)) if is_passing(relay.status) && repeats < REPEATS_MAX => {
                tokio::time::sleep(REPEAT_PAUSE * (1 << repeats)).await;
                repeats += 1;
            }
            // An object without a length: its bytes are nobody's but those who ask for them.
            Ok(Answer::Other(relay)) if relay.status < 300 => break pass_by(&worker, &resolve, asked),
            Ok(Answer::Other(relay)) => break answered(relay, asked).await,
            Ok(Answer::NotModified | Answer::Changed | Answer::Unsatisfiable { .. }) => {
                break Resolved::Failed(ResolveFailure::Invalid);
            }
            Err(error) if error.is_retryable() && repeats < REPEATS_MAX => {
                tokio::time::sleep(REPEAT_PAUSE * (1 << repeats)).await;
                repeats += 1;
            }
            Err(error) => {
                tracing::warn!(%error, "the origin could not be asked");
                break Resolved::Failed(failure(&error));
            }
        }
    };
    worker.node.table.settle(&resolve, outcome);
}

/// Puts the question: a GET of a range, or a HEAD.
async fn put(
    worker: &Worker,
    accelerator: &Accelerator,
    origin: &Origin,
    resolve: &Resolve,
    range: Option<AskRange>,
    reach: Reach,
) -> Result<Got, OriginError> {
    let key = &resolve.key.path;
    if let Some(range) = range {
        let ask = Ask { range, if_match: None, if_none_match: None };
        peer::get(worker, Some(accelerator), origin, key, &ask, offset(range), reach).await
    } else {
        worker.counters.bump(Counter::OriginRequests(OriginAsk::Head), 1);
        Ok(Got { answer: origin.head(key, None).await?, peer: None })
    }
}

/// What to ask for an object of which nothing is known; `None` is a HEAD.
fn first_ask(want: Want, grid: Grid, extent_bytes: u32) -> Option<AskRange> {
    let extent = u64::from(extent_bytes.max(grid.extent_bytes()));
    let aligned = |first: u64, last: u64| {
        let start = first / extent * extent;
        let end = (last / extent * extent).saturating_add(extent).min(start.saturating_add(RUN_BYTES_MAX));
        ByteRange::new(start, end).map(AskRange::Bytes)
    };
    match want {
        Want::Head => None,
        Want::Bytes(None) => aligned(0, u64::MAX),
        Want::Bytes(Some(RangeAsk::FirstLast { first, last })) => aligned(first, last),
        Want::Bytes(Some(RangeAsk::From { first })) => aligned(first, u64::MAX),
        // Enough to reach back over the edge of the extent in which the suffix begins, wherever that is.
        Want::Bytes(Some(RangeAsk::Suffix { length })) if length <= RUN_BYTES_MAX - extent => {
            Some(AskRange::Suffix((length + extent - 1).max(1)))
        }
        // So long a suffix begins anywhere; its first run is asked for when the size is known.
        Want::Bytes(Some(RangeAsk::Suffix { .. })) => aligned(0, 0),
    }
}

/// Which byte decides who owns what is asked for. Where a suffix begins is not known yet; most objects that are read so
/// are of one group.
fn offset(range: AskRange) -> u64 {
    match range {
        AskRange::Bytes(bytes) => bytes.start(),
        AskRange::Suffix(_) | AskRange::Whole => 0,
    }
}

/// Whether the first question about an object goes to another node.
fn asks_node(worker: &Worker, accelerator: u16, path: &[u8], want: Want) -> bool {
    let Some(accelerator) = worker.accelerator(accelerator) else { return false };
    let range = first_ask(want, accelerator.grid, accelerator.extent_bytes);
    range.is_some_and(|range| peer::has_other_owner(worker, &accelerator.name, path, offset(range)))
}

/// No more than what one owner has.
fn within_group(worker: &Worker, ask: AskRange) -> AskRange {
    let AskRange::Bytes(bytes) = ask else { return ask };
    let border = peer::border(worker, bytes.start());
    ByteRange::new(bytes.start(), bytes.end().min(border)).map_or(ask, AskRange::Bytes)
}

/// Makes the entry, claims what the body covers, lets everybody know, and starts the run.
fn keep(
    worker: &Rc<Worker>,
    accelerator: &Accelerator,
    resolve: &Arc<Resolve>,
    facts: ObjectFacts,
    asked: Instant,
    (want, reach): (Want, Reach),
    bytes: Option<(ByteRange, Begun)>,
) -> Resolved {
    if !facts.is_cacheable() {
        return pass_by(worker, resolve, asked);
    }
    let table = &worker.node.table;
    let (grid, pieces) = (accelerator.grid, accelerator.pieces());
    let entry = table.entry(resolve.key.clone(), facts, grid, asked);
    let claimed = bytes.and_then(|(range, begun)| {
        // The first extent that the body has from its beginning, or, where the origin ignored the range and
        // sends all, the one that was wanted.
        let wanted = match want {
            Want::Bytes(Some(ask)) => ask.resolve(entry.facts.size).map_or(range.start(), ByteRange::start),
            _ => range.start(),
        };
        let wanted = grid.extent_of(wanted.max(range.start()));
        let covered = |extent| {
            grid.extent_range(extent, entry.facts.size).is_some_and(|piece| piece.start() >= range.start())
        };
        let whole = wanted / pieces * pieces;
        let first = match (covered(whole), covered(wanted)) {
            (true, _) => whole,
            (false, true) => wanted,
            (false, false) => wanted + 1,
        };
        let end = if range.end() == entry.facts.size {
            range.end()
        } else {
            range.end() / u64::from(grid.extent_bytes()) * u64::from(grid.extent_bytes())
        };
        let last = grid.extent_of(end.checked_sub(1)?);
        let claim = (first <= last).then(|| Claim::make(&entry, first, last)).flatten()?;
        Some((claim, begun))
    });
    table.publish(resolve, &entry);
    if let Some((claim, begun)) = claimed {
        // Readers take an interest of their own when they find the fills.
        drop(claim.start(worker, &entry, Some(begun), reach));
    }
    Resolved::Known(entry)
}

/// The object cannot be kept, which is remembered, so that the next reads are not preceded by a question.
fn pass_by(worker: &Worker, resolve: &Arc<Resolve>, asked: Instant) -> Resolved {
    worker.node.table.publish_uncacheable(resolve, asked);
    Resolved::Bypass
}

async fn answered(relay: Relay, asked: Instant) -> Resolved {
    let Relay { status, headers, mut body } = relay;
    let mut whole = Vec::new();
    loop {
        match body.chunk().await {
            Ok(Some(bytes)) if whole.len() + bytes.len() <= ANSWER_BYTES_MAX => {
                whole.extend_from_slice(&bytes);
            }
            Ok(Some(_)) => return Resolved::Bypass,
            Ok(None) => {
                return Resolved::Answered(Arc::new(Answered { status, headers, body: whole, asked }));
            }
            Err(error) => return Resolved::Failed(failure(&error)),
        }
    }
}

/// Whether a status says that the same question may be answered a moment later.
fn is_passing(status: u16) -> bool {
    matches!(status, 429 | 500 | 502 | 503 | 504)
}

fn failure(error: &OriginError) -> ResolveFailure {
    match error {
        OriginError::TimedOut { .. } => ResolveFailure::TimedOut,
        OriginError::Credentials { .. } => ResolveFailure::Credentials,
        OriginError::Invalid { .. } => ResolveFailure::Invalid,
        _ => ResolveFailure::Unreachable,
    }
}
