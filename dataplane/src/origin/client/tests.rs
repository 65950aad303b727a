//! The live client against real sockets: servers here say byte for byte what a test wants them to say.

use super::*;
use crate::origin::{Body, Origin, Uploader, upload};
use crate::range::ByteRange;
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use reqsign_core::StaticEnv;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Gives every connection, numbered from 0, to `serve`.
async fn server<F: Future<Output = ()> + 'static>(
    serve: impl Fn(usize, TcpStream) -> F + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::task::spawn_local(async move {
        for number in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::task::spawn_local(serve(number, stream));
        }
    });
    address
}

/// Reads up to the end of a request head; `None` when the client hung up.
async fn head_of(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}

async fn say(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
}

async fn local<T>(test: impl Future<Output = T>) -> T {
    tokio::task::LocalSet::new().run_until(test).await
}

/// Long enough that only what never happens takes so long.
fn patient() -> OriginLimits {
    OriginLimits {
        first_byte: Duration::from_mins(1),
        idle: Duration::from_mins(1),
        ..OriginLimits::default()
    }
}

fn open(kind: OriginKind, credentials: &Credentials, limits: OriginLimits) -> Origin {
    Origin::open(&OriginTarget { kind }, credentials, limits, &Connections::new(64)).unwrap()
}

fn http(address: SocketAddr, limits: OriginLimits) -> Origin {
    let base = format!("http://{address}/").parse().unwrap();
    open(OriginKind::Http { base }, &Credentials::anonymous(), limits)
}

fn s3(address: SocketAddr) -> Origin {
    let endpoint = Some(format!("http://{address}").parse().unwrap());
    let kind = OriginKind::S3 { bucket: "bucket".into(), endpoint, region: "eu-west-1".into() };
    open(kind, &Credentials::given(ACCESS, SECRET), patient())
}

fn range(start: u64, end: u64) -> Ask {
    Ask { range: AskRange::Bytes(ByteRange::new(start, end).unwrap()), if_match: None, if_none_match: None }
}

async fn all(mut body: Body) -> Result<Vec<u8>, OriginError> {
    let mut bytes = Vec::new();
    while let Some(piece) = body.chunk().await? {
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

async fn got(origin: &Origin, ask: &Ask) -> Result<Vec<u8>, OriginError> {
    match origin.get(b"k", ask).await? {
        Answer::Bytes { body, .. } => all(body).await,
        other => panic!("{other:?}"),
    }
}

const FOUR: &str = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-3/10\r\nContent-Length: 4\r\nETag: \"e\"\r\n\r\nabcd";

#[tokio::test]
async fn one_connection_serves_request_after_request() {
    local(async {
        let accepted = Rc::new(Cell::new(0));
        let count = Rc::clone(&accepted);
        let address = server(move |number, mut stream| {
            count.set(number + 1);
            async move {
                while head_of(&mut stream).await.is_some() {
                    say(&mut stream, FOUR).await;
                }
            }
        })
        .await;
        let origin = http(address, patient());
        for _ in 0..5 {
            assert_eq!(got(&origin, &range(0, 4)).await.unwrap(), b"abcd");
            assert_eq!(origin.connections(), (0, 1));
        }
        // A reader that takes the bytes and never asks for the end leaves the connection usable too.
        let Answer::Bytes { mut body, .. } = origin.get(b"k", &range(0, 4)).await.unwrap() else { panic!() };
        assert_eq!(body.chunk().await.unwrap().unwrap(), "abcd");
        assert_eq!(origin.connections(), (0, 1));
        assert_eq!(accepted.get(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_kept_connection_that_died_is_replaced_without_a_word() {
    local(async {
        // Each connection answers once and hangs up when the second request arrives, as a server does whose keep-alive
        // runs out at that moment.
        let heads = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&heads);
        let address = server(move |number, mut stream| {
            let seen = Rc::clone(&seen);
            async move {
                for turn in 0..2 {
                    let Some(head) = head_of(&mut stream).await else { return };
                    seen.borrow_mut().push((number, head.lines().next().unwrap().to_owned()));
                    if turn == 0 {
                        say(&mut stream, FOUR).await;
                    }
                }
            }
        })
        .await;
        let origin = http(address, patient());
        assert_eq!(got(&origin, &range(0, 4)).await.unwrap(), b"abcd");
        assert_eq!(got(&origin, &range(0, 4)).await.unwrap(), b"abcd");
        let line = "GET /k HTTP/1.1".to_owned();
        assert_eq!(*heads.borrow(), [(0, line.clone()), (0, line.clone()), (1, line)]);
    })
    .await;
}

#[tokio::test]
async fn a_new_connection_that_dies_is_the_callers_to_repeat() {
    local(async {
        let requests = Rc::new(Cell::new(0));
        let count = Rc::clone(&requests);
        let address = server(move |_, mut stream| {
            let count = Rc::clone(&count);
            async move {
                head_of(&mut stream).await;
                count.set(count.get() + 1);
            }
        })
        .await;
        let error = got(&http(address, patient()), &range(0, 4)).await.unwrap_err();
        assert!(matches!(error, OriginError::Broken { .. }) && error.is_retryable(), "{error}");
        assert_eq!(requests.get(), 1);
    })
    .await;
}

#[tokio::test]
async fn a_write_is_never_sent_twice() {
    local(async {
        let requests = Rc::new(Cell::new(0));
        let count = Rc::clone(&requests);
        // Answers the first request, then dies upon the second: on a kept connection, where a read would be repeated.
        let address = server(move |_, mut stream| {
            let count = Rc::clone(&count);
            async move {
                while let Some(head) = head_of(&mut stream).await {
                    count.set(count.get() + 1);
                    if head.starts_with("DELETE") {
                        return;
                    }
                    say(&mut stream, FOUR).await;
                }
            }
        })
        .await;
        let origin = http(address, patient());
        got(&origin, &range(0, 4)).await.unwrap();
        let error = origin.forward(plain_forward(Method::DELETE, "/k")).await.unwrap_err();
        assert!(matches!(error, OriginError::Indeterminate { .. }) && !error.is_retryable(), "{error}");
        assert_eq!(requests.get(), 2);
    })
    .await;
}

#[tokio::test]
async fn a_body_cut_short_is_an_error_and_stays_one() {
    local(async {
        for text in [
            "HTTP/1.1 206 P\r\nContent-Range: bytes 0-3/10\r\nContent-Length: 4\r\n\r\nab",
            "HTTP/1.1 206 P\r\nContent-Range: bytes 0-3/10\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
            // Chunked, cleanly ended, yet not what the Content-Range promised.
            "HTTP/1.1 206 P\r\nContent-Range: bytes 0-3/10\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
            // Ends with the connection, as HTTP/1.0 does.
            "HTTP/1.0 206 P\r\nContent-Range: bytes 0-3/10\r\n\r\nab",
        ] {
            let address = server(move |_, mut stream| async move {
                head_of(&mut stream).await;
                say(&mut stream, text).await;
            })
            .await;
            let Answer::Bytes { mut body, .. } = http(address, patient()).get(b"k", &range(0, 4)).await.unwrap() else {
                panic!("no bytes")
            };
            assert_eq!(body.chunk().await.unwrap().unwrap(), "ab");
            for _ in 0..2 {
                let error = body.chunk().await.unwrap_err();
                assert!(matches!(error, OriginError::Cut { received: 2, .. }) && error.is_retryable(), "{error}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_body_longer_than_promised_is_refused() {
    local(async {
        let address = server(|_, mut stream| async move {
            head_of(&mut stream).await;
            let head = "HTTP/1.1 206 P\r\nContent-Range: bytes 0-3/10\r\nTransfer-Encoding: chunked\r\n\r\n";
            say(&mut stream, &format!("{head}5\r\nabcde\r\n0\r\n\r\n")).await;
        })
        .await;
        let error = got(&http(address, patient()), &range(0, 4)).await.unwrap_err();
        assert!(matches!(error, OriginError::Invalid { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn silence_has_a_limit_at_every_stage() {
    local(async {
        let soon = Duration::from_millis(30);
        let address = server(|_, mut stream| async move {
            let head = head_of(&mut stream).await.unwrap();
            if !head.contains("/silent") {
                say(&mut stream, &FOUR[..FOUR.len() - 1]).await;
            }
            // Holds the line and says no more.
            let _ = stream.read_u8().await;
        })
        .await;
        let stage_of = |error: OriginError| match error {
            OriginError::TimedOut { stage, .. } => stage,
            other => panic!("{other}"),
        };
        let origin = http(address, OriginLimits { first_byte: soon, ..patient() });
        assert_eq!(stage_of(origin.get(b"silent", &range(0, 4)).await.unwrap_err()), Stage::FirstByte);
        let origin = http(address, OriginLimits { idle: soon, ..patient() });
        assert_eq!(stage_of(got(&origin, &range(0, 4)).await.unwrap_err()), Stage::Body);
        let one = Connections::new(1);
        let kind = OriginKind::Http { base: format!("http://{address}/").parse().unwrap() };
        let limits = OriginLimits { queue: soon, ..patient() };
        let origin = Origin::open(&OriginTarget { kind }, &Credentials::anonymous(), limits, &one).unwrap();
        let held = origin.get(b"k", &range(0, 4)).await.unwrap();
        assert_eq!(stage_of(origin.get(b"k", &range(0, 4)).await.unwrap_err()), Stage::Queue);
        drop(held);
        assert!(origin.get(b"k", &range(0, 4)).await.is_ok());
    })
    .await;
}

#[tokio::test]
async fn the_oldest_idle_connection_of_any_origin_makes_room_for_a_new_one() {
    local(async {
        let keeping = || {
            server(|_, mut stream| async move {
                while head_of(&mut stream).await.is_some() {
                    say(&mut stream, FOUR).await;
                }
            })
        };
        let shared = Connections::new(2);
        let open = |address: SocketAddr| {
            let kind = OriginKind::Http { base: format!("http://{address}/").parse().unwrap() };
            Origin::open(&OriginTarget { kind }, &Credentials::anonymous(), patient(), &shared).unwrap()
        };
        let (first, second, third) = (open(keeping().await), open(keeping().await), open(keeping().await));
        for origin in [&first, &second] {
            got(origin, &range(0, 4)).await.unwrap();
        }
        assert_eq!((first.connections(), second.connections()), ((0, 1), (0, 1)));
        got(&third, &range(0, 4)).await.unwrap();
        assert_eq!(
            (first.connections(), second.connections(), third.connections()),
            ((0, 0), (0, 1), (0, 1))
        );
        // An origin that goes takes its connections with it.
        drop(second);
        assert_eq!(shared.open(), (0, 1));
        got(&third, &range(0, 4)).await.unwrap();
        got(&first, &range(0, 4)).await.unwrap();
        assert_eq!((first.connections(), third.connections(), shared.open()), ((0, 1), (0, 1), (0, 2)));
    })
    .await;
}

#[tokio::test]
async fn giving_a_body_up_closes_its_connection() {
    local(async {
        let (closed, was_closed) = tokio::sync::oneshot::channel();
        let closed = Rc::new(Cell::new(Some(closed)));
        let address = server(move |_, mut stream| {
            let closed = Rc::clone(&closed);
            async move {
                head_of(&mut stream).await;
                say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n").await;
                while stream.write_all(&[0; 4096]).await.is_ok() {}
                closed.take().unwrap().send(()).unwrap();
            }
        })
        .await;
        let origin = http(address, patient());
        let Answer::Bytes { mut body, .. } = origin.get(b"k", &range(0, 4)).await.unwrap() else { panic!() };
        body.chunk().await.unwrap();
        assert_eq!(origin.connections(), (1, 0));
        drop(body);
        assert_eq!(origin.connections(), (0, 0));
        was_closed.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn answers_that_have_no_body_leave_the_connection_usable() {
    local(async {
        let address = server(|number, mut stream| async move {
            assert_eq!(number, 0);
            while let Some(head) = head_of(&mut stream).await {
                let conditional = head.to_ascii_lowercase().contains("if-none-match: \"e\"");
                let text = match (head.starts_with("HEAD"), conditional) {
                    (_, true) => "HTTP/1.1 304 Not Modified\r\nETag: \"e\"\r\n\r\n",
                    (true, false) => "HTTP/1.1 200 OK\r\nContent-Length: 77\r\nETag: \"e\"\r\n\r\n",
                    (false, false) => "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: \"e\"\r\n\r\n",
                };
                say(&mut stream, text).await;
            }
        })
        .await;
        let origin = http(address, patient());
        let fresh = Ask { if_none_match: Some("\"e\"".into()), ..range(0, 4) };
        assert!(matches!(origin.get(b"k", &fresh).await.unwrap(), Answer::NotModified));
        assert!(matches!(origin.get(b"k", &range(0, 4)).await.unwrap(), Answer::Empty { .. }));
        assert!(
            matches!(origin.head(b"k", None).await.unwrap(), Answer::Found { facts } if facts.size == 77)
        );
        assert!(matches!(origin.head(b"k", Some("\"e\"")).await.unwrap(), Answer::NotModified));
        assert_eq!(origin.connections(), (0, 1));
    })
    .await;
}

#[tokio::test]
async fn redirects_and_errors_are_handed_on() {
    local(async {
        let address = server(|_, mut stream| async move {
            head_of(&mut stream).await;
            say(&mut stream, "HTTP/1.1 307 T\r\nLocation: http://elsewhere/\r\nConnection: close, x-hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\nno").await;
        })
        .await;
        let Answer::Other(relay) = http(address, patient()).get(b"k", &range(0, 4)).await.unwrap() else { panic!() };
        assert_eq!((relay.status, relay.headers["location"].to_str().unwrap()), (307, "http://elsewhere/"));
        assert!(!relay.headers.contains_key("connection") && !relay.headers.contains_key("x-hop"));
        assert_eq!(all(relay.body).await.unwrap(), b"no");
    })
    .await;
}

#[tokio::test]
async fn nobody_at_the_address_is_unreachable() {
    local(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let error = got(&http(address, patient()), &range(0, 4)).await.unwrap_err();
        assert!(matches!(error, OriginError::Unreachable { .. }) && error.is_retryable(), "{error}");
    })
    .await;
}

// What is sent, and that its signature is right. The signature is checked by a second implementation, written from the
// specification, which itself is checked with the example of that specification.

const ACCESS: &str = "AKIAIOSFODNN7EXAMPLE";
const SECRET: &str = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";

/// Signature of a request as it was seen on the wire.
fn signature_of(head: &str, secret: &str, authorization: &str) -> String {
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap().split(' ');
    let (method, target) = (first.next().unwrap(), first.next().unwrap());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut headers: HashMap<String, Vec<String>> = HashMap::new();
    for line in lines.filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').unwrap();
        let value = value.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        headers.entry(name.to_ascii_lowercase()).or_default().push(value);
    }
    let field = |name: &str| {
        let from = authorization.split_once(&format!("{name}=")).unwrap().1;
        from.split([',', ' ']).next().unwrap().to_owned()
    };
    let names = field("SignedHeaders");
    let scope = field("Credential").split_once('/').unwrap().1.to_owned();
    let mut pairs: Vec<_> = query.split('&').filter(|pair| !pair.is_empty()).collect();
    pairs.sort_unstable();
    let query =
        pairs.iter().map(|pair| if pair.contains('=') { (*pair).to_owned() } else { format!("{pair}=") });
    let query = query.collect::<Vec<_>>().join("&");
    let listed: Vec<_> =
        names.split(';').map(|name| format!("{name}:{}\n", headers[name].join(","))).collect();
    let listed = listed.concat();
    let payload = &headers["x-amz-content-sha256"][0];
    let canonical = format!("{method}\n{path}\n{query}\n{listed}\n{names}\n{payload}");
    let date = &headers["x-amz-date"][0];
    let hash = hex::encode(Sha256::digest(canonical.as_bytes()));
    let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{hash}");
    let mac = |key: &[u8], text: &str| {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        mac.update(text.as_bytes());
        mac.finalize().into_bytes().to_vec()
    };
    let key = scope.split('/').fold(format!("AWS4{secret}").into_bytes(), |key, part| mac(&key, part));
    hex::encode(mac(&key, &text))
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.split("\r\n").find_map(|line| {
        let (found, value) = line.split_once(": ")?;
        found.eq_ignore_ascii_case(name).then_some(value)
    })
}

fn assert_signed(head: &str) {
    let authorization = header(head, "authorization").unwrap_or_else(|| panic!("unsigned: {head}"));
    let sent = authorization.rsplit_once("Signature=").unwrap().1;
    assert_eq!(signature_of(head, SECRET, authorization), sent, "{head}");
    assert!(authorization.contains(&format!("Credential={ACCESS}/")), "{authorization}");
}

#[test]
fn the_checker_agrees_with_the_published_example() {
    let head = "GET /test.txt HTTP/1.1\r\nHost: examplebucket.s3.amazonaws.com\r\nRange: bytes=0-9\r\n\
                x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\r\n\
                x-amz-date: 20130524T000000Z\r\n\r\n";
    let authorization = "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
                         SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,Signature=";
    let expected = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41";
    assert_eq!(signature_of(head, SECRET, authorization), expected);
}

/// A server that keeps every request (head, then body) and answers 200 with nothing.
async fn recorder() -> (SocketAddr, Rc<RefCell<Vec<(String, Vec<u8>)>>>) {
    let kept = Rc::new(RefCell::new(Vec::new()));
    let keep = Rc::clone(&kept);
    let address = server(move |_, mut stream| {
        let keep = Rc::clone(&keep);
        async move {
            while let Some(head) = head_of(&mut stream).await {
                let mut body = Vec::new();
                if let Some(length) = header(&head, "content-length") {
                    body.resize(length.parse().unwrap(), 0);
                    stream.read_exact(&mut body).await.unwrap();
                } else if header(&head, "transfer-encoding") == Some("chunked") {
                    while !body.ends_with(b"0\r\n\r\n") {
                        let Ok(byte) = stream.read_u8().await else { return };
                        body.push(byte);
                    }
                }
                keep.borrow_mut().push((head, body));
                say(&mut stream, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
            }
        }
    })
    .await;
    (address, kept)
}

#[tokio::test]
async fn reads_are_signed_over_what_is_sent() {
    local(async {
        let (address, kept) = recorder().await;
        let origin = s3(address);
        for key in ["plain", "a b+c%d/é/~x", "a//b", "trailing/", "(1)*'!&=?#"] {
            origin.get(key.as_bytes(), &range(10, 20)).await.unwrap();
            let suffix =
                Ask { range: AskRange::Suffix(8), if_match: None, if_none_match: Some("\"e\"".into()) };
            origin.get(key.as_bytes(), &suffix).await.unwrap();
            origin.head(key.as_bytes(), None).await.unwrap();
        }
        let whole = Ask { range: AskRange::Whole, if_match: Some("\"e\"".into()), if_none_match: None };
        let _ = origin.get(b"plain", &whole).await;
        let kept = kept.borrow();
        assert_eq!(kept.len(), 16);
        for (head, _) in kept.iter() {
            assert_signed(head);
            assert_eq!(header(head, "host"), Some(address.to_string().as_str()));
            assert_eq!(header(head, "accept-encoding"), Some("identity"));
        }
        assert!(kept[0].0.starts_with("GET /bucket/plain HTTP/1.1\r\n"));
        assert_eq!(header(&kept[0].0, "range"), Some("bytes=10-19"));
        assert_eq!(header(&kept[1].0, "range"), Some("bytes=-8"));
        assert_eq!(header(&kept[1].0, "if-none-match"), Some("\"e\""));
        assert!(kept[3].0.starts_with("GET /bucket/a%20b%2Bc%25d/%C3%A9/~x HTTP/1.1\r\n"));
        assert_eq!(header(&kept[15].0, "range"), None);
        assert_eq!(header(&kept[15].0, "if-match"), Some("\"e\""));
    })
    .await;
}

fn plain_forward(method: Method, path: &str) -> Forward {
    Forward { method, path: path.as_bytes().into(), query: None, headers: HeaderMap::new(), body: None }
}

fn client_headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

async fn feed(uploader: Uploader, pieces: &[&'static str]) {
    for piece in pieces {
        uploader.send(Bytes::from_static(piece.as_bytes())).await.unwrap();
    }
    uploader.finish().await;
}

#[tokio::test]
async fn forwarded_requests_are_signed_again_and_lose_the_clients_signature() {
    local(async {
        let (address, kept) = recorder().await;
        let origin = s3(address);
        let (uploader, body) = upload(Some(5));
        let put = Forward {
            query: Some(b"partNumber=2&uploadId=x%2Fy"[..].into()),
            headers: client_headers(&[
                ("host", "node:7070"),
                ("authorization", "AWS4-HMAC-SHA256 Credential=CLIENT/…".trim_end_matches('…')),
                ("x-amz-date", "20200101T000000Z"),
                ("x-amz-security-token", "client-token"),
                ("amz-sdk-invocation-id", "1"),
                ("amz-sdk-request", "attempt=1"),
                ("expect", "100-continue"),
                ("connection", "keep-alive, x-private"),
                ("x-private", "1"),
                ("content-type", "text/plain"),
                ("x-amz-meta-note", "two  spaces "),
                ("x-amz-meta-twice", "a"),
                ("x-amz-meta-twice", "b"),
            ]),
            body: Some(body),
            ..plain_forward(Method::PUT, "/dir/a%2fb%20c")
        };
        let (relay, ()) = tokio::join!(origin.forward(put), feed(uploader, &["he", "llo"]));
        assert_eq!(relay.unwrap().status, 200);
        origin.forward(plain_forward(Method::POST, "/k")).await.unwrap();
        let list = Forward {
            query: Some(b"list-type=2&prefix=&delimiter=%2F"[..].into()),
            ..plain_forward(Method::GET, "")
        };
        origin.forward(list).await.unwrap();
        origin.forward(plain_forward(Method::DELETE, "/k")).await.unwrap();
        let kept = kept.borrow();
        kept.iter().for_each(|(head, _)| assert_signed(head));
        let (head, body) = &kept[0];
        assert!(
            head.starts_with("PUT /bucket/dir/a/b%20c?partNumber=2&uploadId=x%2Fy HTTP/1.1\r\n"),
            "{head}"
        );
        assert_eq!(body, b"hello");
        assert_eq!(header(head, "x-amz-content-sha256"), Some("UNSIGNED-PAYLOAD"));
        assert_eq!(header(head, "content-length"), Some("5"));
        for gone in [
            "amz-sdk-invocation-id",
            "amz-sdk-request",
            "expect",
            "connection",
            "x-private",
            "x-amz-security-token",
        ] {
            assert_eq!(header(head, gone), None, "{gone}");
        }
        assert!(!head.contains("CLIENT") && !head.contains("20200101"));
        assert_eq!(header(&kept[1].0, "content-length"), Some("0"));
        assert!(kept[2].0.starts_with("GET /bucket?list-type=2&prefix=&delimiter=%2F HTTP/1.1\r\n"));
        assert!(kept[3].0.starts_with("DELETE /bucket/k HTTP/1.1\r\n"));
    })
    .await;
}

#[tokio::test]
async fn the_clients_word_on_its_payload_stands_where_it_can() {
    local(async {
        let (address, kept) = recorder().await;
        let origin = s3(address);
        let hash = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        let put = |word: &str, body| Forward {
            headers: client_headers(&[("x-amz-content-sha256", word)]),
            body: Some(body),
            ..plain_forward(Method::PUT, "/k")
        };
        for word in [hash, "UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"] {
            let (uploader, body) = upload(None);
            let (relay, ()) = tokio::join!(origin.forward(put(word, body)), feed(uploader, &["hello"]));
            assert_eq!(relay.unwrap().status, 200);
            let (head, body) = kept.borrow_mut().pop().unwrap();
            assert_signed(&head);
            assert_eq!(header(&head, "x-amz-content-sha256"), Some(word));
            assert_eq!(body, b"5\r\nhello\r\n0\r\n\r\n");
        }
        for word in [
            "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
            "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
            "STREAMING-X",
        ] {
            let error = origin.forward(put(word, upload(None).1)).await.unwrap_err();
            assert!(matches!(error, OriginError::SignedStream { .. }), "{error}");
        }
        let error = origin.forward(put("deadbeef", upload(None).1)).await.unwrap_err();
        assert!(matches!(error, OriginError::Unsendable { .. }), "{error}");
        let error =
            http(address, patient()).forward(put("STREAMING-UNSIGNED-PAYLOAD-TRAILER", upload(None).1)).await;
        assert!(matches!(error.unwrap_err(), OriginError::Unsendable { .. }));
        assert!(kept.borrow().is_empty());
    })
    .await;
}

#[tokio::test]
async fn without_keys_nothing_is_signed() {
    local(async {
        let (address, kept) = recorder().await;
        let endpoint = Some(format!("http://{address}/pre").parse().unwrap());
        let kind = OriginKind::S3 { bucket: "bucket".into(), endpoint, region: "r".into() };
        let origin = open(kind, &Credentials::anonymous(), patient());
        assert_eq!(origin.credential_source(), CredentialSource::Anonymous);
        origin.get(b"k", &range(0, 4)).await.unwrap();
        http(address, patient()).forward(plain_forward(Method::GET, "/k")).await.unwrap();
        let kept = kept.borrow();
        assert!(
            kept[0].0.starts_with("GET /pre/bucket/k HTTP/1.1\r\n")
                && kept[1].0.starts_with("GET /k HTTP/1.1\r\n")
        );
        assert!(kept.iter().all(|(head, _)| header(head, "authorization").is_none()));
        assert_eq!(header(&kept[1].0, "x-amz-content-sha256"), None);
    })
    .await;
}

#[tokio::test]
async fn what_cannot_be_signed_is_told_before_it_is_sent() {
    local(async {
        let (address, kept) = recorder().await;
        let origin = s3(address);
        let error = origin.get(b"not \xff utf-8", &range(0, 4)).await.unwrap_err();
        assert!(matches!(error, OriginError::Unsendable { .. }), "{error}");
        let mut headers = HeaderMap::new();
        headers.insert("x-amz-meta-name", HeaderValue::from_bytes("é".as_bytes()).unwrap());
        let error =
            origin.forward(Forward { headers, ..plain_forward(Method::PUT, "/k") }).await.unwrap_err();
        assert!(error.to_string().contains("x-amz-meta-name"), "{error}");
        assert!(kept.borrow().is_empty());
    })
    .await;
}

#[tokio::test]
async fn an_upload_its_client_gave_up_never_looks_whole() {
    local(async {
        let (address, kept) = recorder().await;
        let origin = http(address, patient());
        for length in [None, Some(10)] {
            let (uploader, body) = upload(length);
            let put = Forward { body: Some(body), ..plain_forward(Method::PUT, "/k") };
            let half = async move { uploader.send(Bytes::from_static(b"half")).await.unwrap() };
            let (relay, ()) = tokio::join!(origin.forward(put), half);
            assert!(matches!(relay.unwrap_err(), OriginError::UploadCut), "{length:?}");
        }
        assert!(kept.borrow().is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_slow_client_does_not_trip_the_origins_limit() {
    local(async {
        let (address, kept) = recorder().await;
        let soon = Duration::from_millis(20);
        let origin = http(address, OriginLimits { first_byte: soon, ..patient() });
        let (uploader, body) = upload(Some(10));
        let put = Forward { body: Some(body), ..plain_forward(Method::PUT, "/k") };
        let slow = async move {
            for _ in 0..5 {
                tokio::time::sleep(3 * soon).await;
                uploader.send(Bytes::from_static(b"ab")).await.unwrap();
            }
            uploader.finish().await;
        };
        let (relay, ()) = tokio::join!(origin.forward(put), slow);
        assert_eq!(relay.unwrap().status, 200);
        assert_eq!(kept.borrow()[0].1, b"ababababab");
    })
    .await;
}

#[tokio::test]
async fn errors_name_the_host_and_nothing_of_the_request() {
    local(async {
        let address = server(|_, mut stream| async move {
            head_of(&mut stream).await;
        })
        .await;
        let origin = s3(address);
        let query = b"X-Amz-Signature=cafe&token=hush"[..].into();
        let secret = Forward { query: Some(query), ..plain_forward(Method::PUT, "/private-key-name") };
        let errors = [
            origin.get(b"private-key-name", &range(0, 4)).await.unwrap_err(),
            origin.forward(secret).await.unwrap_err(),
        ];
        for error in errors {
            let told = format!("{error} {error:?}");
            assert!(told.contains(&address.to_string()), "{told}");
            for word in ["private", "cafe", "hush", ACCESS, SECRET] {
                assert!(!told.contains(word), "{told}");
            }
        }
        assert!(!format!("{origin:?}").contains(SECRET));
    })
    .await;
}

#[tokio::test]
async fn an_origin_may_close_the_door_on_an_upload() {
    local(async {
        let address = server(|_, mut stream| async move {
            head_of(&mut stream).await;
            say(&mut stream, "HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await;
            // Reads nothing of the body and keeps the line open.
            std::future::pending::<()>().await;
            drop(stream);
        })
        .await;
        let origin = http(address, patient());
        let (uploader, body) = upload(Some(1 << 30));
        let put = Forward { body: Some(body), ..plain_forward(Method::PUT, "/k") };
        let piece = Bytes::from(vec![0; 1 << 20]);
        let feed =
            tokio::task::spawn_local(async move { while uploader.send(piece.clone()).await.is_ok() {} });
        let relay = origin.forward(put).await.unwrap();
        assert_eq!(relay.status, 403);
        assert_eq!(all(relay.body).await.unwrap(), b"no");
        // The rest of the upload is still in its pipe, so the connection is not used again.
        assert_eq!(origin.connections(), (0, 0));
        feed.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn https_trusts_the_bundle_and_nobody_else() {
    const PEM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/localhost.pem");
    let certificates = CertificateDer::pem_file_iter(PEM).unwrap().collect::<Result<_, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(PEM).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth().with_single_cert(certificates, key).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    local(async {
        let address = server(move |_, stream| {
            let acceptor = acceptor.clone();
            async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                stream.write_all(FOUR.as_bytes()).await.unwrap();
                stream.shutdown().await.unwrap();
            }
        })
        .await;
        let base = format!("https://localhost:{}/", address.port()).parse().unwrap();
        let target = OriginTarget { kind: OriginKind::Http { base } };
        let opened = |bundle: Option<&str>| {
            let envs = bundle.map(|path| (CA_BUNDLE.to_owned(), path.to_owned())).into_iter().collect();
            let environment = StaticEnv { home_dir: None, envs };
            Client::open(&target, &Credentials::anonymous(), patient(), &Connections::new(1), &environment)
        };
        let trusting = opened(Some(PEM)).unwrap();
        let Answer::Bytes { body, .. } = trusting.get(b"k", &range(0, 4)).await.unwrap() else { panic!() };
        assert_eq!(all(body).await.unwrap(), b"abcd");
        // A machine without any roots refuses at once; one with the usual ones does not know this server.
        match opened(None) {
            Ok(strict) => {
                let error = strict.get(b"k", &range(0, 4)).await.unwrap_err();
                assert!(matches!(error, OriginError::Unreachable { .. }), "{error}");
            }
            Err(error) => assert!(matches!(error, OriginError::Target { .. }), "{error}"),
        }
        let missing = opened(Some("/nowhere/roots.pem")).unwrap_err();
        assert!(missing.to_string().contains("/nowhere/roots.pem"), "{missing}");
    })
    .await;
}
