//! A plain HTTP origin that misbehaves on order.
//!
//! Left alone it is a correct origin: ranges, strong `ETags`, conditions, PUT and DELETE, and it counts what it
//! is asked. [`Origin::fault`] makes the next answers for one key wrong in one way, the ways that real stores
//! and the proxies in front of them have been wrong in. It speaks through hyper on a thread of its own, so the
//! bytes on the wire, the truncated ones too, are what a node meets in the world.

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use tokio::sync::{mpsc, watch};

/// One way of being wrong. "Asked" means the range asked for, or the whole object without one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The body ends, and the connection with it, after this many bytes.
    CutAfter(u64),
    /// A ranged GET is answered with 200 and the whole object.
    IgnoreRange,
    /// 206 for a range that starts this many bytes later than asked, and says so.
    ShiftRange(u64),
    /// 206 with Content-Range as asked, but only this many bytes, Content-Length included.
    ShortRange(u64),
    /// 206 whose Content-Range claims a total this much larger than the object.
    WrongTotal(u64),
    /// 206 without any Content-Range.
    NoContentRange,
    /// Status 200 over the asked range, Content-Range and all.
    RangeUnder200,
    /// No `ETag` in the answer.
    NoETag,
    /// A weak `ETag` in the answer.
    WeakETag,
    /// This status with an S3-like XML error body.
    Status(u16),
    /// The body stops after this many bytes, the connection open, until [`Origin::resume`].
    PauseAfter(u64),
    /// The connection is closed without a byte of an answer.
    HangUp,
    /// The answer is made at once, and held back until [`Origin::resume`].
    Hold,
}

/// What an origin has been asked and has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// GET requests, whatever the answer.
    pub gets: u64,
    /// GET requests answered 200 or 206.
    pub bodies: u64,
    /// HEAD requests.
    pub heads: u64,
    /// PUT requests.
    pub puts: u64,
    /// DELETE requests.
    pub deletes: u64,
    /// Answers 304.
    pub not_modified: u64,
    /// Answers 412.
    pub failed_conditions: u64,
    /// Body bytes handed to the socket.
    pub body_bytes: u64,
}

impl Counts {
    /// Requests of any method.
    pub fn requests(&self) -> u64 {
        self.gets + self.heads + self.puts + self.deletes
    }
}

/// The origin; it stops when dropped.
pub struct Origin {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Origin {
    /// Starts on a free loopback port, without objects.
    pub fn start() -> Self {
        let shared = Arc::new(Shared {
            objects: Mutex::default(),
            faults: Mutex::default(),
            versions: AtomicU64::new(1),
            counts: Counters::default(),
            resumed: watch::channel(0).0,
        });
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free loopback port");
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let address = listener.local_addr().expect("a bound socket has an address");
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let state = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime for the origin");
            runtime.block_on(async move {
                let listener =
                    tokio::net::TcpListener::from_std(listener).expect("a listener tokio can poll");
                tokio::select! {
                    () = accept(listener, state) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { address, shared, stop: Some(stop), thread: Some(thread) }
    }

    /// `http://127.0.0.1:port`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stores a version of `key` (no leading slash) and returns its `ETag`, quotes included.
    pub fn put(&self, key: &str, body: impl Into<Bytes>) -> String {
        self.shared.put(key, body.into())
    }

    /// Removes `key`.
    pub fn remove(&self, key: &str) {
        self.shared.objects.lock().expect("no poisoned lock").remove(key);
    }

    /// Makes the next `times` answers to GETs of `key` wrong; a new fault replaces the one before.
    pub fn fault(&self, key: &str, fault: Fault, times: u32) {
        self.shared.faults.lock().expect("no poisoned lock").insert(key.to_owned(), (fault, times));
    }

    /// How often the fault on `key` has still to strike.
    pub fn faults_left(&self, key: &str) -> u32 {
        self.shared.faults.lock().expect("no poisoned lock").get(key).map_or(0, |(_, times)| *times)
    }

    /// Lets every body paused by [`Fault::PauseAfter`] go on, and every answer held by [`Fault::Hold`] leave.
    pub fn resume(&self) {
        self.shared.resumed.send_modify(|count| *count += 1);
    }

    /// What it has been asked so far.
    pub fn counts(&self) -> Counts {
        self.shared.counts.read()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Atomic twins of [`Counts`], shared with the S3 origin.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) gets: AtomicU64,
    pub(crate) bodies: AtomicU64,
    pub(crate) heads: AtomicU64,
    pub(crate) puts: AtomicU64,
    pub(crate) deletes: AtomicU64,
    pub(crate) not_modified: AtomicU64,
    pub(crate) failed_conditions: AtomicU64,
    pub(crate) body_bytes: AtomicU64,
}

impl Counters {
    /// Counts a request by its method.
    pub(crate) fn asked(&self, method: &Method) {
        let counter = match *method {
            Method::GET => &self.gets,
            Method::HEAD => &self.heads,
            Method::PUT | Method::POST => &self.puts,
            Method::DELETE => &self.deletes,
            _ => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an answer by its status.
    pub(crate) fn answered(&self, method: &Method, status: StatusCode) {
        let counter = match status {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT if method == Method::GET => &self.bodies,
            StatusCode::NOT_MODIFIED => &self.not_modified,
            StatusCode::PRECONDITION_FAILED => &self.failed_conditions,
            _ => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Counts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            gets: load(&self.gets),
            bodies: load(&self.bodies),
            heads: load(&self.heads),
            puts: load(&self.puts),
            deletes: load(&self.deletes),
            not_modified: load(&self.not_modified),
            failed_conditions: load(&self.failed_conditions),
            body_bytes: load(&self.body_bytes),
        }
    }
}

struct Shared {
    objects: Mutex<HashMap<String, Stored>>,
    faults: Mutex<HashMap<String, (Fault, u32)>>,
    versions: AtomicU64,
    counts: Counters,
    resumed: watch::Sender<u64>,
}

#[derive(Clone)]
struct Stored {
    body: Bytes,
    etag: String,
    last_modified: String,
}

type Body = UnsyncBoxBody<Bytes, std::io::Error>;

impl Shared {
    fn put(&self, key: &str, body: Bytes) -> String {
        let version = self.versions.fetch_add(1, Ordering::Relaxed);
        let etag = format!("\"v{version}-{:x}\"", body.len());
        // Each version has a second of its own, from a fixed date on.
        let last_modified = format!(
            "Mon, 02 Nov 2026 {:02}:{:02}:{:02} GMT",
            version / 3600 % 24,
            version / 60 % 60,
            version % 60
        );
        let stored = Stored { body, etag: etag.clone(), last_modified };
        self.objects.lock().expect("no poisoned lock").insert(key.to_owned(), stored);
        etag
    }

    fn is_next(&self, key: &str, fault: &Fault) -> bool {
        let faults = self.faults.lock().expect("no poisoned lock");
        faults.get(key).is_some_and(|(next, times)| next == fault && *times > 0)
    }

    fn take_fault(&self, key: &str) -> Option<Fault> {
        let mut faults = self.faults.lock().expect("no poisoned lock");
        let (fault, times) = faults.get_mut(key)?;
        *times = times.checked_sub(1)?;
        Some(fault.clone())
    }
}

async fn accept(listener: tokio::net::TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        drop(stream.set_nodelay(true));
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = hyper::service::service_fn(move |request| answer(Arc::clone(&shared), request));
            // A failed connection is what several faults are for.
            drop(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await,
            );
        });
    }
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, std::io::Error> {
    let method = request.method().clone();
    shared.counts.asked(&method);
    let key = request.uri().path().trim_start_matches('/').to_owned();
    let response = match method {
        Method::GET if shared.is_next(&key, &Fault::Hold) => {
            let mut resumed = shared.resumed.subscribe();
            let response = read(&shared, &key, &request)?;
            drop(resumed.changed().await);
            response
        }
        Method::GET | Method::HEAD => read(&shared, &key, &request)?,
        Method::PUT => {
            let body = request.into_body().collect().await.map_err(std::io::Error::other)?.to_bytes();
            let etag = shared.put(&key, body);
            plain(StatusCode::OK, &[("etag", &etag)], Bytes::new())
        }
        Method::DELETE => {
            shared.objects.lock().expect("no poisoned lock").remove(&key);
            plain(StatusCode::NO_CONTENT, &[], Bytes::new())
        }
        _ => plain(StatusCode::METHOD_NOT_ALLOWED, &[], Bytes::new()),
    };
    shared.counts.answered(&method, response.status());
    Ok(response)
}

fn read(
    shared: &Arc<Shared>,
    key: &str,
    request: &Request<Incoming>,
) -> Result<Response<Body>, std::io::Error> {
    let fault = if request.method() == Method::GET { shared.take_fault(key) } else { None };
    match fault {
        Some(Fault::HangUp) => return Err(std::io::Error::other("hung up on order")),
        Some(Fault::Status(status)) => return Ok(error(status, "OnOrder")),
        _ => {}
    }
    let stored = shared.objects.lock().expect("no poisoned lock").get(key).cloned();
    let Some(stored) = stored else { return Ok(error(404, "NoSuchKey")) };
    let header = |name: header::HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());

    let listed = |list: &str| list.split(',').map(str::trim).any(|tag| tag == "*" || tag == stored.etag);
    if header(header::IF_MATCH).is_some_and(|list| !listed(list)) {
        return Ok(error(412, "PreconditionFailed"));
    }
    if header(header::IF_NONE_MATCH).is_some_and(listed) {
        return Ok(plain(StatusCode::NOT_MODIFIED, &[("etag", &stored.etag)], Bytes::new()));
    }

    let size = stored.body.len() as u64;
    let asked = match header(header::RANGE).map(|value| resolve(value, size)) {
        None => None,
        Some(Some(range)) => Some(range),
        Some(None) => {
            let mut answer = error(416, "InvalidRange");
            let total = HeaderValue::from_str(&format!("bytes */{size}")).expect("digits are a header value");
            answer.headers_mut().insert(header::CONTENT_RANGE, total);
            return Ok(answer);
        }
    };
    let asked = if fault == Some(Fault::IgnoreRange) { None } else { asked };
    let mut range = asked.clone().unwrap_or(0..size);
    let mut total = size;
    match fault {
        Some(Fault::ShiftRange(by)) => range.start = (range.start + by).min(range.end.saturating_sub(1)),
        Some(Fault::WrongTotal(by)) => total += by,
        _ => {}
    }
    let claim = format!("bytes {}-{}/{total}", range.start, range.end.saturating_sub(1));
    if let Some(Fault::ShortRange(length)) = fault {
        range.end = range.end.min(range.start + length);
    }

    let mut response = Response::builder()
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::CONTENT_TYPE, "application/octet-stream")
        .header(header::LAST_MODIFIED, &stored.last_modified)
        .header(header::CONTENT_LENGTH, range.end - range.start);
    response = match fault {
        Some(Fault::NoETag) => response,
        Some(Fault::WeakETag) => response.header(header::ETAG, format!("W/{}", stored.etag)),
        _ => response.header(header::ETAG, &stored.etag),
    };
    if asked.is_some() {
        let status = if fault == Some(Fault::RangeUnder200) { 200 } else { 206 };
        response = response.status(status);
        if fault != Some(Fault::NoContentRange) {
            response = response.header(header::CONTENT_RANGE, claim);
        }
    }
    let body = stored.body.slice(range.start as usize..range.end as usize);
    let body = if request.method() == Method::HEAD { Bytes::new() } else { body };
    Ok(response.body(stream(shared, body, fault)).expect("headers made of plain text"))
}

/// The body in pieces of 64 KiB, counted as they leave, cut or paused as the fault says.
fn stream(shared: &Arc<Shared>, body: Bytes, fault: Option<Fault>) -> Body {
    const PIECE: usize = 64 * 1024;
    let (sender, receiver) = mpsc::channel(1);
    let shared = Arc::clone(shared);
    let mut resumed = shared.resumed.subscribe();
    tokio::spawn(async move {
        let stop = match fault {
            Some(Fault::CutAfter(bytes) | Fault::PauseAfter(bytes)) => (bytes as usize).min(body.len()),
            _ => body.len(),
        };
        let cut = matches!(fault, Some(Fault::CutAfter(_)));
        for part in [0..stop, stop..body.len()] {
            for piece in pieces(part, PIECE) {
                shared.counts.body_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
                if sender.send(Ok(Frame::data(body.slice(piece)))).await.is_err() {
                    return;
                }
            }
            if cut {
                drop(sender.send(Err(std::io::Error::other("cut on order"))).await);
                return;
            }
            if stop < body.len() && matches!(fault, Some(Fault::PauseAfter(_))) {
                drop(resumed.changed().await);
            }
        }
    });
    Piped(receiver).boxed_unsync()
}

/// A body whose pieces another task sends; its length is the Content-Length that the head claims.
struct Piped(mpsc::Receiver<Result<Frame<Bytes>, std::io::Error>>);

impl hyper::body::Body for Piped {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context)
    }
}

fn pieces(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(step).map(move |start| start..end.min(start + step))
}

fn resolve(value: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) => first..last.saturating_add(1).min(size),
        (Ok(first), Err(_)) => first..size,
        (Err(_), Ok(suffix)) => size.saturating_sub(suffix)..size,
        _ => return None,
    };
    (range.start < range.end).then_some(range)
}

fn error(status: u16, code: &str) -> Response<Body> {
    let body = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code></Error>");
    let status = StatusCode::from_u16(status).expect("a status between 100 and 999");
    plain(status, &[("content-type", "application/xml")], body.into())
}

fn plain(status: StatusCode, headers: &[(&str, &str)], body: Bytes) -> Response<Body> {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    let body = http_body_util::Full::new(body).map_err(|never: Infallible| match never {});
    response.body(body.boxed_unsync()).expect("headers made of plain text")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{ask, get, get_range};

    fn origin() -> Origin {
        let origin = Origin::start();
        origin.put("key", (0..=255).cycle().take(200_000).collect::<Vec<u8>>());
        origin
    }

    #[test]
    fn left_alone_it_is_correct() {
        let origin = origin();
        let whole = get(origin.address, "/key");
        assert_eq!((whole.status, whole.body.len()), (200, 200_000));
        let part = get_range(origin.address, "/key", 255, 257);
        assert_eq!((part.status, part.body.as_slice()), (206, [255, 0, 1].as_slice()));
        assert_eq!(part.header("content-range"), Some("bytes 255-257/200000"));
        assert_eq!(get_range(origin.address, "/key", 200_000, 200_001).status, 416);
        let etag = whole.header("etag").expect("an ETag");
        let unless =
            |value| ask(origin.address, "GET", "/key", &[("If-None-Match", value)], None).expect("an answer");
        assert_eq!((unless(etag).status, unless("\"x\"").status), (304, 200));
        let only =
            |value| ask(origin.address, "GET", "/key", &[("If-Match", value)], None).expect("an answer");
        assert_eq!((only(etag).status, only("\"x\"").status), (200, 412));
        let head = ask(origin.address, "HEAD", "/key", &[], None).expect("an answer");
        assert_eq!((head.status, head.header("content-length")), (200, Some("200000")));
        assert_eq!(ask(origin.address, "PUT", "/new", &[], Some(b"abc")).expect("an answer").status, 200);
        assert_eq!(get(origin.address, "/new").body, b"abc");
        assert_eq!(ask(origin.address, "DELETE", "/new", &[], None).expect("an answer").status, 204);
        assert_eq!(get(origin.address, "/new").status, 404);
        let counts = origin.counts();
        assert_eq!((counts.heads, counts.puts, counts.deletes), (1, 1, 1));
        assert_eq!((counts.bodies, counts.not_modified, counts.failed_conditions), (5, 1, 1));
    }

    #[test]
    fn each_fault_is_on_the_wire_and_ends() {
        let origin = origin();
        let with = |fault| {
            origin.fault("key", fault, 1);
            ask(origin.address, "GET", "/key", &[("Range", "bytes=1000-1999")], None)
        };
        let ranged = |fault| {
            let response = with(fault).expect("an answer");
            (response.status, response.header("content-range").map(str::to_owned), response.body.len())
        };
        let said = |text: &str| Some(text.to_owned());
        assert!(with(Fault::CutAfter(10)).is_err());
        assert!(with(Fault::HangUp).is_err());
        assert_eq!(ranged(Fault::IgnoreRange), (200, None, 200_000));
        assert_eq!(ranged(Fault::ShiftRange(7)), (206, said("bytes 1007-1999/200000"), 993));
        assert_eq!(ranged(Fault::ShortRange(5)), (206, said("bytes 1000-1999/200000"), 5));
        assert_eq!(ranged(Fault::WrongTotal(1)), (206, said("bytes 1000-1999/200001"), 1000));
        assert_eq!(ranged(Fault::NoContentRange), (206, None, 1000));
        assert_eq!(ranged(Fault::RangeUnder200), (200, said("bytes 1000-1999/200000"), 1000));
        assert_eq!(with(Fault::NoETag).expect("an answer").header("etag"), None);
        assert!(
            with(Fault::WeakETag).expect("an answer").header("etag").is_some_and(|tag| tag.starts_with("W/"))
        );
        assert_eq!(with(Fault::Status(503)).expect("an answer").status, 503);
        assert_eq!(origin.faults_left("key"), 0);
        assert_eq!(get_range(origin.address, "/key", 1000, 1999).body.len(), 1000);
    }

    #[test]
    fn a_paused_body_goes_on_when_told() {
        let origin = origin();
        origin.fault("key", Fault::PauseAfter(1000), 1);
        let mut connection = crate::http::Connection::open(origin.address).expect("a connection");
        connection.send("GET", "/key", &[], None).expect("a request out");
        connection.receive_head().expect("a head");
        connection.take(1000).expect("what comes before the pause");
        assert!(origin.counts().body_bytes <= 1000, "the pause did not hold");
        origin.resume();
        connection.take(199_000).expect("the rest");
    }
}
