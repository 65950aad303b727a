//! Reading a prefix ahead of its readers: listed at the origin, filled as any reader's misses are.
//!
//! A prewarm is a reader without a socket: it resolves, fills and waits like the others, so that there is one way for
//! bytes to come in. It takes a part of the rights to download and leaves the rest to clients.
#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{HeaderMap, Method};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Worker;
use super::stream::{ObjectStream, StreamFailure};
use crate::agent::Job;
use crate::dialect::listing::{Listing, parse_listing};
use crate::engine::task;
use crate::metrics::{Counter, OriginAsk, PrewarmOutcome};
use crate::origin::Forward;
use crate::peer::Reach;
use crate::range::ByteRange;
use crate::resolve::{self, Found, Want};
use crate::table::{FillFailure, ObjectEntry, Whereabouts};

/// Objects read at once.
const OBJECTS_AT_ONCE: u32 = 8;
/// Longest page of a listing that is read: a thousand keys of full length, escaped, and what stands beside them.
const PAGE_BYTES_MAX: usize = 8 << 20;
/// How often a page is asked for again when the origin fails, and the pause before the first time; it doubles.
const REPEATS_MAX: u32 = 4;
const REPEAT_PAUSE: Duration = Duration::from_millis(200);
/// How often an object that changes meanwhile is begun anew.
const ROUNDS_MAX: u32 = 3;

/// Does a job to its end.
pub(super) async fn prewarm(worker: Rc<Worker>, job: Arc<Job>) {
    let ended = read_all(&worker, &job).await;
    if let Err(why) = &ended {
        tracing::warn!(why, "prewarm failed");
    }
    job.end(ended);
}

async fn read_all(worker: &Rc<Worker>, job: &Arc<Job>) -> Result<(), String> {
    let at_once = (worker.node.limits.fills_max / 2).clamp(1, OBJECTS_AT_ONCE) as usize;
    let mut reading = JoinSet::new();
    let mut page = None;
    loop {
        let Listing { keys, next } = list(worker, job, page.as_deref()).await?;
        for key in keys {
            // What stands for a folder has no bytes that anybody reads.
            if key.ends_with(b"/") {
                continue;
            }
            job.listed.fetch_add(1, Ordering::Relaxed);
            while reading.len() >= at_once {
                reading.join_next().await;
            }
            if !job.is_wanted() {
                return Err("it is no longer wanted".into());
            }
            reading.spawn_local(task::counted(read_counted(Rc::clone(worker), Arc::clone(job), key)));
        }
        page = next;
        if page.is_none() {
            break;
        }
    }
    job.listed_all.store(true, Ordering::Relaxed);
    while reading.join_next().await.is_some() {}
    Ok(())
}

async fn read_counted(worker: Rc<Worker>, job: Arc<Job>, key: Box<[u8]>) {
    let outcome = match read(&worker, &job, &key).await {
        Ok(bytes) => {
            job.bytes.fetch_add(bytes, Ordering::Relaxed);
            job.done.fetch_add(1, Ordering::Relaxed);
            PrewarmOutcome::Done
        }
        Err(why) => {
            job.note(|| format!("{}: {why}", String::from_utf8_lossy(&key)));
            job.failed.fetch_add(1, Ordering::Relaxed);
            PrewarmOutcome::Failed
        }
    };
    worker.counters.bump(Counter::PrewarmedObjects(outcome), 1);
}

/// Has every byte of an object brought here; how many there are.
async fn read(worker: &Rc<Worker>, job: &Job, key: &[u8]) -> Result<u64, String> {
    for _ in 0..ROUNDS_MAX {
        let decision = worker.decide(job.accelerator, key, Instant::now());
        let decision = decision.ok_or("the accelerator was removed")?;
        if !decision.cache {
            return Err("a rule says that it is never kept (admission)".into());
        }
        let want = Want::Bytes(None);
        let entry = match resolve::find(
            worker,
            job.accelerator,
            key,
            want,
            decision.freshness,
            Reach::Fleet,
            Instant::now(),
        )
        .await
        {
            Found::Object(entry, _) | Found::New(entry, _) => entry,
            Found::Bypass => return Err("it cannot be kept: the origin gives it no strong ETag".into()),
            Found::Answered(answered) => return Err(format!("the origin answered {}", answered.status)),
            Found::Failed(failure) => return Err(format!("the origin failed ({failure:?})")),
        };
        match bring(worker, entry).await {
            Ok(bytes) => return Ok(bytes),
            Err(StreamFailure::Fill(FillFailure::Gone | FillFailure::Lost)) => {}
            Err(failure) => return Err(format!("{failure:?}")),
        }
    }
    Err("it changes faster than it can be read".into())
}

async fn bring(worker: &Rc<Worker>, entry: Arc<ObjectEntry>) -> Result<u64, StreamFailure> {
    let size = entry.facts.size;
    let Some(whole) = ByteRange::whole(size) else { return Ok(0) };
    let grid = entry.grid;
    let mut stream = ObjectStream::new(worker, Arc::clone(&entry), whole, Reach::Fleet);
    while stream.position() < whole.end() {
        let extent = grid.extent_of(stream.position());
        // What is here need not be read to be here.
        if matches!(entry.peek(extent), Whereabouts::Ram(_) | Whereabouts::Drive(..)) {
            stream.seek(grid.extent_range(extent, size).map_or(whole.end(), ByteRange::end));
        } else if stream.next().await?.is_none() {
            break;
        }
    }
    Ok(size)
}

/// One page of the prefix.
async fn list(worker: &Rc<Worker>, job: &Job, page: Option<&str>) -> Result<Listing, String> {
    let removed = || "the accelerator was removed".to_owned();
    let accelerator = worker.accelerator(job.accelerator).ok_or_else(removed)?;
    if !accelerator.target.is_signed() {
        return Err("an HTTP origin cannot be listed; a prefix of an s3:// origin can be prewarmed".into());
    }
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC);
    let mut query = format!("list-type=2&encoding-type=url&max-keys=1000&prefix={}", encoded(&job.prefix));
    if let Some(page) = page {
        query.push_str("&continuation-token=");
        query.extend(encoded(page));
    }
    let mut repeats = 0;
    loop {
        let why = match ask(worker, job.accelerator, &query).await {
            Ok(listing) => return Ok(listing),
            Err(Trouble::Final(why)) => return Err(why),
            Err(Trouble::Passing(why)) => why,
        };
        if repeats == REPEATS_MAX || !job.is_wanted() {
            return Err(why);
        }
        tokio::time::sleep(REPEAT_PAUSE * (1 << repeats)).await;
        repeats += 1;
    }
}

enum Trouble {
    Passing(String),
    Final(String),
}

async fn ask(worker: &Worker, accelerator: u16, query: &str) -> Result<Listing, Trouble> {
    let origin =
        worker.origin(accelerator).ok_or_else(|| Trouble::Final("the accelerator was removed".into()))?;
    worker.counters.bump(Counter::OriginRequests(OriginAsk::Forward), 1);
    let request = Forward {
        method: Method::GET,
        path: Box::default(),
        query: Some(query.as_bytes().into()),
        headers: HeaderMap::new(),
        body: None,
    };
    let failed = |error: crate::origin::OriginError| {
        let why = format!("listing the prefix: {error}");
        if error.is_retryable() { Trouble::Passing(why) } else { Trouble::Final(why) }
    };
    let mut relay = origin.forward(request).await.map_err(failed)?;
    if relay.status != 200 {
        let why = format!("the origin answered {} when it was asked to list the prefix", relay.status);
        let is_passing = relay.status == 429 || relay.status >= 500;
        return Err(if is_passing { Trouble::Passing(why) } else { Trouble::Final(why) });
    }
    let mut page = Vec::new();
    while let Some(piece) = relay.body.chunk().await.map_err(failed)? {
        page.extend_from_slice(&piece);
        if page.len() > PAGE_BYTES_MAX {
            return Err(Trouble::Final("a page of the listing is too long".into()));
        }
    }
    parse_listing(&page)
        .ok_or_else(|| Trouble::Final("the origin's listing of the prefix cannot be read".into()))
}
