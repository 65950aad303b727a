//! Reading a prefix ahead of its readers: listed at the origin, filled as any reader's misses are.
//!
//! A prewarm is a reader without a socket: it resolves, fills and waits like the others, so that there is one way for
//! bytes to come in. All prewarms of a node together read half as many objects at once as there are rights to ask another
//! node; the other half is for clients, and what a large object reads ahead takes rights only while nobody waits for one.
#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{HeaderMap, Method};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::task::{JoinError, JoinSet};
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

/// Objects that one prewarm reads at once.
const OBJECTS_AT_ONCE: usize = 8;
/// Longest page of a listing that is read: a thousand keys of full length, escaped, and what stands beside them.
const PAGE_BYTES_MAX: usize = 8 << 20;
/// How often a page is asked for again when the origin fails, and the pause before the first time; it doubles.
const REPEATS_MAX: u32 = 4;
const REPEAT_PAUSE: Duration = Duration::from_millis(200);
/// How often an object that changes meanwhile is begun anew.
const ROUNDS_MAX: u32 = 3;

/// Does a job to its end, or until it is no longer wanted, or the node stops.
pub(super) async fn prewarm(worker: Rc<Worker>, job: Arc<Job>) {
    let ending = Ending(job);
    let job = &ending.0;
    let ended = tokio::select! {
        ended = read_all(&worker, job) => ended,
        () = job.unwanted() => Err("it is no longer wanted".into()),
        () = worker.drained() => Err("the node is stopping".into()),
    };
    if let Err(why) = &ended {
        tracing::warn!(why, "prewarm failed");
    }
    job.end(ended);
}

/// A job that ends even if its task is lost.
struct Ending(Arc<Job>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end(Err("it was lost by a mistake of the node; see its log".into()));
    }
}

async fn read_all(worker: &Rc<Worker>, job: &Arc<Job>) -> Result<(), String> {
    // Dropped, it ends its readers.
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
            while reading.len() >= OBJECTS_AT_ONCE {
                note_loss(job, reading.join_next().await);
            }
            let turn = Arc::clone(&worker.node.prewarms).acquire_owned().await;
            let turn = turn.expect("the semaphore is never closed");
            let one = read_counted(Rc::clone(worker), Arc::clone(job), key);
            reading.spawn_local(task::counted(async move {
                one.await;
                drop(turn);
            }));
        }
        page = next;
        if page.is_none() {
            break;
        }
    }
    job.listed_all.store(true, Ordering::Relaxed);
    while let Some(ended) = reading.join_next().await {
        note_loss(job, Some(ended));
    }
    Ok(())
}

/// A reader that is lost has failed.
fn note_loss(job: &Job, ended: Option<Result<(), JoinError>>) {
    if let Some(Err(error)) = ended {
        job.note(|| format!("an object was lost by a mistake of the node: {error}"));
        job.failed.fetch_add(1, Ordering::Relaxed);
    }
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
        if repeats == REPEATS_MAX {
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fmt::Write;

    use forebay_control_api::PrewarmState;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::Semaphore;
    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;
    use crate::arena::{Arena, ArenaOptions};
    use crate::auth::Keys;
    use crate::engine::Engine;
    use crate::engine::portable::Portable;
    use crate::metrics::Metrics;
    use crate::node::{Drives, Node};
    use crate::origin::{Connections, Credentials, Origin, OriginLimits, OriginTarget};
    use crate::serve::Peer;
    use crate::serve::http3::tests::limits;
    use crate::served::{Accelerator, Served};

    const OBJECTS: usize = 12;

    /// A store that says what it has, and sends nothing of it before it is let.
    #[derive(Clone)]
    struct Store {
        /// Objects that are asked for and not sent, now and at most.
        asked: Rc<Cell<usize>>,
        most: Rc<Cell<usize>>,
        may_send: Arc<Semaphore>,
    }

    impl Store {
        async fn serve(self, mut stream: TcpStream) {
            loop {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { return };
                    head.push(byte);
                }
                let head = String::from_utf8(head).expect("ASCII");
                if let Some((_, prefix)) = head.split_once("&prefix=") {
                    let prefix = &prefix[..1];
                    let mut keys = String::new();
                    for number in 0..OBJECTS {
                        let _ = write!(keys, "<Contents><Key>{prefix}{number}</Key></Contents>");
                    }
                    let page = format!(
                        "<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
                    );
                    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{page}", page.len());
                    stream.write_all(answer.as_bytes()).await.expect("sent");
                    continue;
                }
                let _asked = Asked::new(&self);
                tokio::select! {
                    may = self.may_send.acquire() => may.expect("open").forget(),
                    // Whoever asked has left.
                    _ = stream.read_u8() => return,
                }
                let answer = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-3/4\r\nETag: \"e\"\r\n\
                              Content-Length: 4\r\n\r\nabcd";
                stream.write_all(answer.as_bytes()).await.expect("sent");
            }
        }
    }

    struct Asked(Rc<Cell<usize>>);

    impl Asked {
        fn new(store: &Store) -> Self {
            store.asked.set(store.asked.get() + 1);
            store.most.set(store.most.get().max(store.asked.get()));
            Self(Rc::clone(&store.asked))
        }
    }

    impl Drop for Asked {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    async fn bed() -> (Rc<Worker>, Store) {
        let store =
            Store { asked: Rc::default(), most: Rc::default(), may_send: Arc::new(Semaphore::new(0)) };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let spec = format!("data=s3://bucket,endpoint=http://{}", listener.local_addr().expect("bound"));
        let serving = store.clone();
        spawn_local(async move {
            while let Ok((stream, _)) = listener.accept().await {
                spawn_local(serving.clone().serve(stream));
            }
        });
        let accelerator = Accelerator::of(&spec.parse().expect("a spec")).expect("an accelerator");
        let limits = limits();
        let arena = Arena::build(ArenaOptions {
            bytes: limits.arena_bytes as usize,
            reads_bytes: limits.reads_reserve_bytes as usize,
            fills_bytes: limits.fills_reserve_bytes as usize,
        });
        let served = Served::new([accelerator], Keys::new(true));
        let node = Node::new(arena.expect("memory"), Drives::None, served, limits, Metrics::new());
        let connections = Connections::new(64);
        let open = move |target: &OriginTarget| {
            Origin::open(target, &Credentials::anonymous(), OriginLimits::default(), &connections)
        };
        let (orders, _) = tokio::sync::mpsc::unbounded_channel();
        let peers = Box::new([Peer { load: Arc::default(), orders }]);
        (
            Worker::start(node, Engine::Portable(Portable::default()), &open, 0, peers).expect("a worker"),
            store,
        )
    }

    async fn until(condition: impl Fn() -> bool) {
        while !condition() {
            yield_now().await;
        }
    }

    fn begin(worker: &Rc<Worker>, prefix: &str) -> Arc<Job> {
        let job = Arc::new(Job::new(0, prefix));
        spawn_local(prewarm(Rc::clone(worker), Arc::clone(&job)));
        job
    }

    fn state(job: &Job) -> PrewarmState {
        job.progress(1, 1).state
    }

    #[tokio::test]
    async fn all_prewarms_together_leave_rights_to_clients() {
        LocalSet::new()
            .run_until(async {
                let (worker, store) = bed().await;
                let jobs = ["a", "b", "c"].map(|prefix| begin(&worker, prefix));
                let share = worker.node.limits.fills_max as usize / 4;
                until(|| store.asked.get() == share).await;
                store.may_send.add_permits(3 * OBJECTS);
                until(|| jobs.iter().all(|job| state(job) == PrewarmState::Done)).await;
                assert_eq!(store.most.get(), share);
                for job in &jobs {
                    let progress = job.progress(1, 1).progress;
                    assert_eq!((progress.done, progress.failed), (OBJECTS as u64, 0));
                }
            })
            .await;
    }

    #[tokio::test]
    async fn a_prewarm_that_is_cancelled_lets_go_of_what_it_reads() {
        LocalSet::new()
            .run_until(async {
                let (worker, store) = bed().await;
                let job = begin(&worker, "a");
                until(|| store.asked.get() > 0).await;
                job.cancel();
                until(|| state(&job) == PrewarmState::Failed).await;
                assert_eq!(job.progress(1, 1).message, "it is no longer wanted");
                // Its readers are gone and their places free, although the store has not answered one of them.
                let share = worker.node.limits.fills_max as usize / 4;
                until(|| worker.node.prewarms.available_permits() == share).await;
                assert!(store.asked.get() > 0);
            })
            .await;
    }

    #[test]
    fn a_prewarm_whose_task_is_lost_has_failed() {
        let job = Arc::new(Job::new(0, ""));
        drop(Ending(Arc::clone(&job)));
        assert_eq!(state(&job), PrewarmState::Failed);
    }
}
