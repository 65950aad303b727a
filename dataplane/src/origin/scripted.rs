//! The double of an origin, for tests that simulate a node: objects in memory, faults by seed or by name.
//!
//! It stands where the wire would: it makes a status, headers and a body, and the same rules judge them as for a real
//! origin. All delays are tokio's, so they cost nothing under a paused clock, and every choice comes from one seed, so a
//! failing run can be replayed. It remembers every version of every object: a test can ask which bytes an `ETag` stood for.
#![forbid(unsafe_code)]

use super::answer::{judge_get, judge_head};
use super::client::relayed;
use super::error::{BoxError, OriginError, Stage, early_end};
use super::{Answer, Ask, AskRange, Body, Forward, OriginLimits, Relay, answered};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, LAST_MODIFIED, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::BodyExt;
use percent_encoding::percent_decode;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// An origin in memory. Clones are handles to the same one, also across threads.
#[derive(Debug, Clone)]
pub struct ScriptedOrigin {
    state: Arc<Mutex<State>>,
}

/// What happens to every request, drawn by seed. The default is a perfect origin.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// The head comes after 0 to this long.
    pub head_delay_max: Duration,
    /// Each piece comes after 0 to this long.
    pub chunk_delay_max: Duration,
    /// Pieces have 1 to this many bytes; 0 for the whole body in one.
    pub chunk_bytes_max: usize,
    /// In a thousand requests: no connection.
    pub refuse_permille: u16,
    /// In a thousand requests: 503 with Retry-After.
    pub busy_permille: u16,
    /// In a thousand requests: a body that breaks off somewhere.
    pub cut_permille: u16,
    /// In a thousand requests: a body that stops somewhere and never goes on.
    pub stall_permille: u16,
    /// In a thousand requests: 200 and the whole object, whatever was asked.
    pub ignore_range_permille: u16,
    /// In a thousand requests: a 206 whose Content-Range is one byte off.
    pub wrong_range_permille: u16,
    /// In a thousand requests: the object is replaced (same length, other bytes) just before.
    pub swap_permille: u16,
}

/// What happens to one request; see `ScriptedOrigin::next`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// No connection.
    Refuse,
    /// The head never comes.
    Silence,
    /// This status, with an empty body.
    Status(u16),
    /// The body breaks off after so many bytes.
    CutAt(u64),
    /// The body stops after so many bytes and never goes on.
    StallAt(u64),
    /// 200 and the whole object.
    IgnoreRange,
    /// A Content-Range one byte off.
    WrongContentRange,
    /// The object is replaced (same length, other bytes) just before.
    Swap,
    /// A write is done, its answer lost.
    LoseAnswer,
}

/// One GET or HEAD as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The object.
    pub key: Vec<u8>,
    /// `None` for a HEAD.
    pub range: Option<AskRange>,
    /// Its If-Match.
    pub if_match: Option<Box<str>>,
}

/// What the origin has seen.
#[derive(Debug, Clone, Default)]
pub struct ScriptedStats {
    /// GETs, those of `forward` included.
    pub gets: u64,
    /// HEADs, those of `forward` included.
    pub heads: u64,
    /// GETs and HEADs with If-Match or If-None-Match.
    pub conditional: u64,
    /// PUTs, DELETEs and everything else.
    pub writes: u64,
    /// Body bytes that left.
    pub bytes: u64,
    /// Requests whose answer is not over.
    pub open: usize,
    /// The most that were open at once.
    pub open_max: usize,
    /// Every GET and HEAD, in order.
    pub asked: Vec<Asked>,
}

#[derive(Debug)]
struct State {
    random: fastrand::Rng,
    faults: Faults,
    queued: VecDeque<Fault>,
    objects: HashMap<Vec<u8>, Version>,
    past: Vec<(Vec<u8>, Version)>,
    versions: u64,
    stats: ScriptedStats,
}

#[derive(Debug, Clone)]
struct Version {
    bytes: Bytes,
    etag: Option<Box<str>>,
    number: u64,
}

impl ScriptedOrigin {
    /// An empty, perfect origin. `seed` decides whatever `Faults` leave open.
    pub fn new(seed: u64) -> Self {
        let state = State {
            random: fastrand::Rng::with_seed(seed),
            faults: Faults::default(),
            queued: VecDeque::new(),
            objects: HashMap::new(),
            past: Vec::new(),
            versions: 0,
            stats: ScriptedStats::default(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Stores an object, or a new version of it, and returns its `ETag` with quotes.
    pub fn put(&self, key: &[u8], bytes: impl Into<Bytes>) -> Box<str> {
        let mut state = self.lock();
        let etag: Box<str> = format!("\"v{}\"", state.versions + 1).into();
        state.store(key, bytes.into(), Some(etag.clone()));
        etag
    }

    /// Stores an object with an `ETag` of one's own, or none.
    pub fn put_as(&self, key: &[u8], bytes: impl Into<Bytes>, etag: Option<&str>) {
        self.lock().store(key, bytes.into(), etag.map(Into::into));
    }

    /// Takes an object away.
    pub fn remove(&self, key: &[u8]) {
        self.lock().objects.remove(key);
    }

    /// What the object is now.
    pub fn bytes(&self, key: &[u8]) -> Option<Bytes> {
        self.lock().objects.get(key).map(|version| version.bytes.clone())
    }

    /// What the object was when it had this `ETag`, also if that was long ago.
    pub fn bytes_of(&self, key: &[u8], etag: &str) -> Option<Bytes> {
        let state = self.lock();
        let mut versions = state.past.iter().filter(|(name, _)| name == key).map(|(_, version)| version);
        versions.find(|version| version.etag.as_deref() == Some(etag)).map(|version| version.bytes.clone())
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// Sets what happens to the next request that has nothing set yet; the drawn faults do not touch it.
    pub fn next(&self, fault: Fault) {
        self.lock().queued.push_back(fault);
    }

    /// A copy of the counters.
    pub fn stats(&self) -> ScriptedStats {
        self.lock().stats.clone()
    }

    /// Sets the counters to nothing, except for what is open.
    pub fn reset_stats(&self) {
        let stats = &mut self.lock().stats;
        *stats = ScriptedStats { open: stats.open, open_max: stats.open, ..ScriptedStats::default() };
    }

    pub(super) async fn get(
        &self,
        key: &[u8],
        ask: &Ask,
        limits: &OriginLimits,
    ) -> Result<Answer, OriginError> {
        let (fault, open) =
            self.begin(key, Some(ask.range), ask.if_match.as_deref(), ask.if_none_match.as_deref());
        self.wait_for_head(&fault, limits).await?;
        let (status, headers, bytes) = self.lock().answer(key, ask, &fault);
        let judgement = judge_get(ask, status, &headers)?;
        let body = Body::scripted(limits.idle, self.body(bytes, &fault, open));
        Ok(answered(judgement, status, headers, body))
    }

    pub(super) async fn head(
        &self,
        key: &[u8],
        if_none_match: Option<&str>,
        limits: &OriginLimits,
    ) -> Result<Answer, OriginError> {
        let (fault, open) = self.begin(key, None, None, if_none_match);
        self.wait_for_head(&fault, limits).await?;
        let ask =
            Ask { range: AskRange::Whole, if_match: None, if_none_match: if_none_match.map(Into::into) };
        let (status, headers, _) = self.lock().answer(key, &ask, &fault);
        let judgement = judge_head(if_none_match, status, &headers)?;
        let body = Body::scripted(limits.idle, self.body(Bytes::new(), &Fault::None, open));
        Ok(answered(judgement, status, headers, body))
    }

    /// GET, HEAD, PUT and DELETE of one object; 501 for the rest.
    pub(super) async fn forward(
        &self,
        request: Forward,
        limits: &OriginLimits,
    ) -> Result<Relay, OriginError> {
        let Forward { method, path, body, .. } = request;
        let key: Vec<u8> = percent_decode(path.strip_prefix(b"/").unwrap_or(&path)).collect();
        let whole = Ask { range: AskRange::Whole, if_match: None, if_none_match: None };
        let is_read = method == Method::GET || method == Method::HEAD;
        let (fault, open) = if is_read {
            self.begin(&key, (method == Method::GET).then_some(AskRange::Whole), None, None)
        } else {
            self.begin_write()
        };
        self.wait_for_head(&fault, limits).await?;
        let (status, headers, bytes) = match method {
            Method::GET => self.lock().answer(&key, &whole, &fault),
            Method::HEAD => {
                let (status, headers, _) = self.lock().answer(&key, &whole, &fault);
                (status, headers, Bytes::new())
            }
            _ if matches!(fault, Fault::Status(_)) => self.lock().answer(&key, &whole, &fault),
            Method::PUT => {
                let bytes = match body {
                    Some(upload) => upload.collect().await.map_err(|_| OriginError::UploadCut)?.to_bytes(),
                    None => Bytes::new(),
                };
                let etag = self.put(&key, bytes);
                let headers =
                    HeaderMap::from_iter([(ETAG, HeaderValue::from_str(&etag).expect("our own ETag"))]);
                (200, headers, Bytes::new())
            }
            Method::DELETE => {
                self.remove(&key);
                (204, HeaderMap::new(), Bytes::new())
            }
            _ => (501, HeaderMap::new(), Bytes::new()),
        };
        if fault == Fault::LoseAnswer && !is_read {
            return Err(OriginError::Indeterminate { host: HOST.into(), source: "scripted".into() });
        }
        let body = Body::scripted(limits.idle, self.body(bytes, &fault, open));
        Ok(relayed(status, headers, body))
    }

    fn begin(
        &self,
        key: &[u8],
        range: Option<AskRange>,
        if_match: Option<&str>,
        if_none_match: Option<&str>,
    ) -> (Fault, Open) {
        let mut state = self.lock();
        if range.is_some() {
            state.stats.gets += 1;
        } else {
            state.stats.heads += 1;
        }
        state.stats.conditional += u64::from(if_match.is_some() || if_none_match.is_some());
        state.stats.asked.push(Asked { key: key.to_vec(), range, if_match: if_match.map(Into::into) });
        let size = state.objects.get(key).map_or(0, |version| version.bytes.len() as u64);
        let fault = state.draw(size);
        if fault == Fault::Swap {
            state.swap(key);
        }
        (fault, self.opened(&mut state))
    }

    fn begin_write(&self) -> (Fault, Open) {
        let mut state = self.lock();
        state.stats.writes += 1;
        (state.draw(0), self.opened(&mut state))
    }

    fn opened(&self, state: &mut State) -> Open {
        state.stats.open += 1;
        state.stats.open_max = state.stats.open_max.max(state.stats.open);
        Open { origin: self.clone() }
    }

    async fn wait_for_head(&self, fault: &Fault, limits: &OriginLimits) -> Result<(), OriginError> {
        if *fault == Fault::Refuse {
            return Err(OriginError::Unreachable {
                host: HOST.into(),
                source: "refused by the script".into(),
            });
        }
        let delay = {
            let mut state = self.lock();
            let longest = state.faults.head_delay_max;
            if *fault == Fault::Silence { Duration::MAX } else { state.up_to(longest) }
        };
        if delay.is_zero() {
            return Ok(());
        }
        timeout(limits.first_byte, sleep(delay)).await.map_err(|_| OriginError::TimedOut {
            host: HOST.into(),
            stage: Stage::FirstByte,
            limit: limits.first_byte,
        })
    }

    fn body(&self, bytes: Bytes, fault: &Fault, open: Open) -> ScriptedBody {
        let mut state = self.lock();
        let (ends_at, then) = match fault {
            Fault::CutAt(at) => (*at, AtEnd::Break),
            Fault::StallAt(at) => (*at, AtEnd::Stall),
            _ => (u64::MAX, AtEnd::Break),
        };
        ScriptedBody {
            left: bytes,
            until_fault: ends_at,
            then,
            due: None,
            random: state.random.fork(),
            faults: state.faults,
            open,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while scripting")
    }
}

const HOST: &str = "scripted";

impl State {
    fn store(&mut self, key: &[u8], bytes: Bytes, etag: Option<Box<str>>) {
        self.versions += 1;
        let version = Version { bytes, etag, number: self.versions };
        self.past.push((key.to_vec(), version.clone()));
        self.objects.insert(key.to_vec(), version);
    }

    fn swap(&mut self, key: &[u8]) {
        if let Some(size) = self.objects.get(key).map(|version| version.bytes.len()) {
            let mut bytes = vec![0; size];
            self.random.fill(&mut bytes);
            let etag = format!("\"v{}\"", self.versions + 1);
            self.store(key, bytes.into(), Some(etag.into()));
        }
    }

    fn draw(&mut self, size: u64) -> Fault {
        if let Some(fault) = self.queued.pop_front() {
            return fault;
        }
        let faults = self.faults;
        let somewhere = self.random.u64(0..size.max(1));
        let mut left = self.random.u16(0..1000);
        for (permille, fault) in [
            (faults.refuse_permille, Fault::Refuse),
            (faults.busy_permille, Fault::Status(503)),
            (faults.cut_permille, Fault::CutAt(somewhere)),
            (faults.stall_permille, Fault::StallAt(somewhere)),
            (faults.ignore_range_permille, Fault::IgnoreRange),
            (faults.wrong_range_permille, Fault::WrongContentRange),
            (faults.swap_permille, Fault::Swap),
        ] {
            if left < permille {
                return fault;
            }
            left -= permille;
        }
        Fault::None
    }

    fn up_to(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.random.f64())
    }

    /// What a correct S3 would say, except for the fault.
    fn answer(&self, key: &[u8], ask: &Ask, fault: &Fault) -> (u16, HeaderMap, Bytes) {
        let mut headers = HeaderMap::new();
        let mut set = |name, value: String| headers.insert(name, value.parse().expect("our own header"));
        if let Fault::Status(status) = fault {
            if *status == 503 {
                set(RETRY_AFTER, "1".to_owned());
            }
            set(CONTENT_LENGTH, "0".to_owned());
            return (*status, headers, Bytes::new());
        }
        let Some(version) = self.objects.get(key) else {
            set(CONTENT_LENGTH, "0".to_owned());
            return (404, headers, Bytes::new());
        };
        if let Some(etag) = &version.etag {
            set(ETAG, etag.to_string());
        }
        let modified = UNIX_EPOCH + Duration::from_secs(1_700_000_000 + version.number);
        set(LAST_MODIFIED, httpdate::fmt_http_date(modified));
        if ask.if_match.is_some() && ask.if_match != version.etag {
            return (412, headers, Bytes::new());
        }
        if ask.if_none_match.is_some() && ask.if_none_match == version.etag {
            return (304, headers, Bytes::new());
        }
        let size = version.bytes.len() as u64;
        let (start, end) = match ask.range {
            AskRange::Bytes(range) => (range.start(), range.end().min(size)),
            AskRange::Suffix(length) => (size.saturating_sub(length), size),
            AskRange::Whole => (0, size),
        };
        if ask.range == AskRange::Whole || *fault == Fault::IgnoreRange {
            set(CONTENT_LENGTH, size.to_string());
            return (200, headers, version.bytes.clone());
        }
        if start >= end {
            set(CONTENT_RANGE, format!("bytes */{size}"));
            set(CONTENT_LENGTH, "0".to_owned());
            return (416, headers, Bytes::new());
        }
        // The total is off by two: off by one, a suffix of an unknown object would look right and be wrong.
        let off = u64::from(*fault == Fault::WrongContentRange);
        set(CONTENT_RANGE, format!("bytes {}-{}/{}", start + off, end - 1 + off, size + 2 * off));
        set(CONTENT_LENGTH, (end - start).to_string());
        (206, headers, version.bytes.slice(start as usize..end as usize))
    }
}

/// Counts as an open request until dropped.
#[derive(Debug)]
struct Open {
    origin: ScriptedOrigin,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.origin.lock().stats.open -= 1;
    }
}

/// The rest of an answer's body.
#[derive(Debug)]
pub(super) struct ScriptedBody {
    left: Bytes,
    until_fault: u64,
    then: AtEnd,
    /// When the next piece comes; kept across calls, so that a caller who gives up waiting does not start it anew.
    due: Option<Instant>,
    random: fastrand::Rng,
    faults: Faults,
    open: Open,
}

#[derive(Debug, Clone, Copy)]
enum AtEnd {
    Break,
    Stall,
}

impl ScriptedBody {
    pub(super) fn is_over(&self) -> bool {
        self.left.is_empty()
    }

    pub(super) async fn next(&mut self) -> Option<Result<Bytes, BoxError>> {
        if self.left.is_empty() {
            return None;
        }
        if self.until_fault == 0 {
            return match self.then {
                AtEnd::Break => Some(Err(early_end().into())),
                AtEnd::Stall => std::future::pending().await,
            };
        }
        if !self.faults.chunk_delay_max.is_zero() {
            if self.due.is_none() {
                let delay = self.faults.chunk_delay_max.mul_f64(self.random.f64());
                self.due = Some(Instant::now() + delay);
            }
            sleep_until(self.due.expect("just set")).await;
            self.due = None;
        }
        let mut size = self.left.len();
        if self.faults.chunk_bytes_max > 0 {
            size = size.min(self.random.usize(1..=self.faults.chunk_bytes_max));
        }
        let size = (size as u64).min(self.until_fault);
        self.until_fault -= size;
        self.open.origin.lock().stats.bytes += size;
        Some(Ok(self.left.split_to(size as usize)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Origin;
    use super::*;
    use crate::range::ByteRange;

    fn pattern(size: usize) -> Vec<u8> {
        (0..size).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn ask(start: u64, end: u64) -> Ask {
        Ask {
            range: AskRange::Bytes(ByteRange::new(start, end).unwrap()),
            if_match: None,
            if_none_match: None,
        }
    }

    async fn collected(mut body: Body) -> Result<Vec<u8>, OriginError> {
        let mut all = Vec::new();
        while let Some(piece) = body.chunk().await? {
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }

    async fn bytes_at(origin: &Origin, start: u64, end: u64) -> Result<Vec<u8>, OriginError> {
        match origin.get(b"k", &ask(start, end)).await? {
            Answer::Bytes { range, body, .. } => {
                let all = collected(body).await?;
                assert_eq!(all.len() as u64, range.len());
                Ok(all)
            }
            other => panic!("{other:?}"),
        }
    }

    fn opened(seed: u64) -> (ScriptedOrigin, Origin) {
        let script = ScriptedOrigin::new(seed);
        (script.clone(), Origin::scripted(script, OriginLimits::default()))
    }

    #[tokio::test(start_paused = true)]
    async fn it_answers_as_an_origin_does() {
        let (script, origin) = opened(1);
        let etag = script.put(b"k", pattern(1000));
        assert_eq!(bytes_at(&origin, 100, 200).await.unwrap(), pattern(1000)[100..200]);
        assert_eq!(bytes_at(&origin, 900, 2000).await.unwrap(), pattern(1000)[900..]);
        let past = origin.get(b"k", &ask(1000, 1001)).await.unwrap();
        assert!(matches!(past, Answer::Unsatisfiable { size: Some(1000) }));
        let missing = origin.get(b"nothing", &ask(0, 1)).await.unwrap();
        assert!(matches!(missing, Answer::Other(Relay { status: 404, .. })));
        assert!(
            matches!(origin.head(b"k", None).await.unwrap(), Answer::Found { facts } if facts.size == 1000)
        );
        assert!(matches!(origin.head(b"k", Some(&etag)).await.unwrap(), Answer::NotModified));
        script.put(b"k", pattern(7));
        let pinned = Ask { if_match: Some(etag.clone()), ..ask(0, 10) };
        assert!(matches!(origin.get(b"k", &pinned).await.unwrap(), Answer::Changed));
        assert_eq!(script.bytes_of(b"k", &etag).unwrap(), pattern(1000));
        script.put(b"none", Vec::new());
        let whole = Ask { range: AskRange::Whole, if_match: None, if_none_match: None };
        assert!(matches!(origin.get(b"none", &whole).await.unwrap(), Answer::Empty { .. }));
        let stats = script.stats();
        assert_eq!((stats.gets, stats.heads, stats.conditional, stats.bytes), (6, 2, 2, 200));
        assert_eq!((stats.open, stats.open_max, stats.asked.len()), (0, 1, 8));
    }

    #[tokio::test(start_paused = true)]
    async fn named_faults_happen_once_and_are_seen_through() {
        let (script, origin) = opened(2);
        script.put(b"k", pattern(1000));
        script.next(Fault::Refuse);
        assert!(matches!(bytes_at(&origin, 0, 10).await, Err(OriginError::Unreachable { .. })));
        script.next(Fault::Silence);
        assert!(matches!(
            bytes_at(&origin, 0, 10).await,
            Err(OriginError::TimedOut { stage: Stage::FirstByte, .. })
        ));
        script.next(Fault::WrongContentRange);
        assert!(matches!(bytes_at(&origin, 0, 10).await, Err(OriginError::Invalid { .. })));
        script.next(Fault::CutAt(3));
        assert!(matches!(bytes_at(&origin, 0, 10).await, Err(OriginError::Cut { received: 3, .. })));
        script.next(Fault::StallAt(3));
        assert!(matches!(
            bytes_at(&origin, 0, 10).await,
            Err(OriginError::TimedOut { stage: Stage::Body, .. })
        ));
        script.next(Fault::IgnoreRange);
        assert_eq!(bytes_at(&origin, 500, 510).await.unwrap(), pattern(1000));
        script.next(Fault::Status(503));
        let busy = origin.get(b"k", &ask(0, 1)).await.unwrap();
        assert!(matches!(busy, Answer::Other(Relay { status: 503, .. })));
        script.next(Fault::Swap);
        assert_ne!(bytes_at(&origin, 0, 1000).await.unwrap(), pattern(1000));
        assert_eq!(bytes_at(&origin, 0, 1000).await.unwrap(), script.bytes(b"k").unwrap());
        drop(busy);
        assert_eq!(script.stats().open, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn writes_arrive_whole_or_not_at_all() {
        let (script, origin) = opened(3);
        let put = |upload| Forward {
            method: Method::PUT,
            path: b"/a%20b"[..].into(),
            query: None,
            headers: HeaderMap::new(),
            body: Some(upload),
        };
        let (uploader, upload) = super::super::upload(None);
        let feed = async {
            uploader.send(Bytes::from_static(b"hel")).await.unwrap();
            uploader.send(Bytes::from_static(b"lo")).await.unwrap();
            uploader.finish().await;
        };
        let (answer, ()) = tokio::join!(origin.forward(put(upload)), feed);
        assert_eq!(answer.unwrap().status, 200);
        assert_eq!(script.bytes(b"a b").unwrap(), "hello");

        let (uploader, upload) = super::super::upload(None);
        let half = async move { uploader.send(Bytes::from_static(b"half")).await.unwrap() };
        let (answer, ()) = tokio::join!(origin.forward(put(upload)), half);
        assert!(matches!(answer, Err(OriginError::UploadCut)));
        assert_eq!(script.bytes(b"a b").unwrap(), "hello");

        let (_, upload) = super::super::upload(Some(0));
        script.next(Fault::LoseAnswer);
        assert!(matches!(origin.forward(put(upload)).await, Err(OriginError::Indeterminate { .. })));
        assert_eq!(script.bytes(b"a b").unwrap(), "");
    }

    #[tokio::test(start_paused = true)]
    async fn a_seed_can_be_replayed_and_no_fault_yields_a_wrong_byte() {
        let faults = Faults {
            head_delay_max: Duration::from_millis(30),
            chunk_delay_max: Duration::from_millis(5),
            chunk_bytes_max: 97,
            refuse_permille: 50,
            busy_permille: 50,
            cut_permille: 100,
            stall_permille: 20,
            ignore_range_permille: 100,
            wrong_range_permille: 50,
            swap_permille: 50,
        };
        let run = async |seed: u64| {
            let (script, origin) = opened(seed);
            script.put(b"k", pattern(1000));
            script.set_faults(faults);
            let mut story = Vec::new();
            for step in 0..50 {
                let (start, end) = (step * 13 % 900, step * 13 % 900 + 100);
                story.push(match origin.get(b"k", &ask(start, end)).await {
                    Ok(Answer::Bytes { facts, range, body }) => match collected(body).await {
                        Ok(all) => {
                            let version = script.bytes_of(b"k", facts.etag.as_deref().unwrap()).unwrap();
                            assert_eq!(
                                all,
                                version[range.start() as usize..range.end() as usize],
                                "seed {seed}"
                            );
                            format!("{all:?}")
                        }
                        Err(error) => error.to_string(),
                    },
                    Ok(other) => format!("{other:?}").chars().take(20).collect(),
                    Err(error) => error.to_string(),
                });
            }
            assert_eq!(script.stats().open, 0, "seed {seed}");
            story
        };
        let mut stories = Vec::new();
        for seed in 0..20 {
            stories.push(run(seed).await);
        }
        assert_eq!(run(7).await, stories[7]);
        stories.dedup();
        assert_eq!(stories.len(), 20);
        assert!(stories.iter().flatten().any(|told| told.contains("ended after")));
        assert!(stories.iter().flatten().any(|told| told.contains("cannot be trusted")));
    }
}
