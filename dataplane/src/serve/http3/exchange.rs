//! One request over HTTP/3 and its answer: only another encoding of what [`request`] decides.
//!
//! The head becomes the text of HTTP/1.1 and is read by the one strict reading there is, and the head of the answer is
//! taken from the text that HTTP/1.1 would send: what is refused, bounded and said is the same through every door.
#![forbid(unsafe_code)]

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use h3::error::{Code, StreamError};
use h3::server::{RequestResolver, RequestStream};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use tokio::time::timeout;

use super::transport::{Incoming, Outgoing, Piece, Transport};
use crate::engine::Slice;
use crate::http1::{
    BodyLength, HeadError, HeadLimits, HeadProgress, Method, RequestHead, ResponseHead, parse_head,
};
use crate::metrics::{CloseReason, Counter, Limit, Outcome, StatusClass};
use crate::origin::Body;
use crate::serve::Worker;
use crate::serve::body::RequestBody;
use crate::serve::connection::Ended;
use crate::serve::forward::Forgetting;
use crate::serve::reply::{Payload, Reply};
use crate::serve::request;
use crate::serve::stream::ObjectStream;

/// Bytes that are copied into QUIC's buffers at once: enough for some GSO batches, few enough for a window.
const PIECE_BYTES: usize = 64 << 10;

type Sending = RequestStream<Outgoing, Piece>;
type Receiving = RequestStream<Incoming, Piece>;

/// Why an answer is not finished.
#[derive(Debug)]
enum Cut {
    /// The client has cancelled it, or is gone.
    Client,
    /// Nothing has moved for `send_stall`.
    Stalled,
    /// The bytes do not come.
    Body,
}

/// Serves a request until its answer has been received, or cannot be.
pub(super) async fn exchange(worker: Rc<Worker>, resolver: RequestResolver<Transport, Piece>) {
    let limits = &worker.node.limits;
    let (request, stream) = match timeout(limits.header_timeout, resolver.resolve_request()).await {
        Ok(Ok(resolved)) => resolved,
        Ok(Err(StreamError::HeaderTooBig { .. })) => {
            // h3 has answered 431.
            worker.counters.bump(Counter::LimitRefusals(Limit::Head), 1);
            worker.counters.bump(Counter::Requests(Outcome::Error, StatusClass::Caller), 1);
            return;
        }
        Ok(Err(error)) => {
            if matches!(error, StreamError::RemoteTerminate { code, .. } if code == Code::H3_EXCESSIVE_LOAD) {
                // A frame that would have had to be held whole; the stream was stopped.
                worker.counters.bump(Counter::LimitRefusals(Limit::Head), 1);
            }
            return;
        }
        Err(_) => {
            // The stream is reset with what held it.
            worker.counters.bump(Counter::Requests(Outcome::Error, StatusClass::Caller), 1);
            return;
        }
    };
    let mut answering = Answering::new(stream.split());
    let Answering { sending, receiving, .. } = &mut answering;
    let request_id = worker.request_id();
    let (parts, ()) = request.into_parts();
    let (reply, is_head, is_finished) = {
        let mut body = Http3Body::new(&worker, sending, receiving, &parts);
        match body.head(&parts).await {
            Err(Failed::Refused(error)) => (refusal(&worker, error, &request_id), false, false),
            Err(Failed::Ended) => return cut(sending, receiving, Code::H3_REQUEST_INCOMPLETE),
            Ok(head) => {
                let is_head = head.method == Method::Head;
                match request::answer(&worker, &head, &mut body, &request_id).await {
                    Ok(reply) => (reply, is_head, body.is_finished()),
                    Err(_) => return cut(sending, receiving, Code::H3_REQUEST_INCOMPLETE),
                }
            }
        }
    };
    match send(&worker, sending, reply, is_head, &request_id).await {
        Ok(()) => {
            if !is_finished {
                // RFC 9114, 4.1: the answer is whole, what is left of the request is not wanted.
                receiving.stop_sending(Code::H3_NO_ERROR);
            }
            answering.is_whole = true;
            // Whoever does not acknowledge leaves the rest to QUIC, which holds no more than its window.
            let _ = timeout(limits.send_stall, answering.sending.finish()).await;
        }
        Err(how) => {
            let code = match how {
                Cut::Client => Code::H3_REQUEST_CANCELLED,
                Cut::Stalled => Code::H3_EXCESSIVE_LOAD,
                Cut::Body => Code::H3_INTERNAL_ERROR,
            };
            cut(sending, receiving, code);
        }
    }
}

/// Both halves of a request's stream. However its task ends, an answer that is not whole does not look so.
struct Answering {
    sending: Sending,
    receiving: Receiving,
    is_whole: bool,
}

impl Answering {
    fn new((sending, receiving): (Sending, Receiving)) -> Self {
        Self { sending, receiving, is_whole: false }
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if !self.is_whole {
            // One that was cut before stays as it was.
            cut(&mut self.sending, &mut self.receiving, Code::H3_INTERNAL_ERROR);
        }
    }
}

/// Ends a stream visibly before its end.
fn cut(sending: &mut Sending, receiving: &mut Receiving, code: Code) {
    sending.stop_stream(code);
    receiving.stop_sending(code);
}

fn refusal(worker: &Worker, error: HeadError, request_id: &str) -> Reply {
    let reply = Reply::error(error.status(), "InvalidRequest", &error.to_string(), b"", request_id);
    if matches!(reply.status, 414 | 431) {
        worker.counters.bump(Counter::LimitRefusals(Limit::Head), 1);
    }
    reply
}

/// Why there is no head.
enum Failed {
    Refused(HeadError),
    Ended,
}

/// The body of a request of HTTP/3.
struct Http3Body<'a> {
    sending: &'a mut Sending,
    receiving: &'a mut Receiving,
    limits: HeadLimits,
    patience: Duration,
    /// Bytes that were said and have not come.
    left: Option<u64>,
    /// What came when it was asked whether there is a body at all.
    first: Option<Bytes>,
    has_ended: bool,
}

impl<'a> Http3Body<'a> {
    fn new(worker: &Worker, sending: &'a mut Sending, receiving: &'a mut Receiving, parts: &Parts) -> Self {
        let limits = HeadLimits {
            head_bytes_max: worker.node.limits.head_bytes_max as usize,
            headers_max: worker.node.limits.headers_max as usize,
            ..HeadLimits::default()
        };
        // Reads are answered without a look at a body that was not announced; it has no meaning (RFC 9110, 9.3.1).
        let has_ended = matches!(parts.method, http::Method::GET | http::Method::HEAD);
        let patience = worker.node.limits.request_deadline;
        Self { sending, receiving, limits, patience, left: None, first: None, has_ended }
    }

    /// The head, once it is known whether a body follows.
    async fn head(&mut self, parts: &Parts) -> Result<RequestHead, Failed> {
        let has_length = parts.headers.contains_key(http::header::CONTENT_LENGTH);
        let waits = parts.headers.contains_key(http::header::EXPECT);
        if !has_length && !self.has_ended && !waits {
            // Only the end of the stream tells a request without a body from one of unknown length.
            self.first = self.receive().await.map_err(|_| Failed::Ended)?;
        }
        let head = head_of(parts, !has_length && !self.has_ended, &self.limits).map_err(Failed::Refused)?;
        if let BodyLength::Length(length) = head.body {
            self.left = Some(length);
            self.has_ended = length == 0;
        }
        Ok(head)
    }

    async fn receive(&mut self) -> Result<Option<Bytes>, Ended> {
        match timeout(self.patience, self.receiving.recv_data()).await {
            Ok(Ok(Some(mut data))) => Ok(Some(data.copy_to_bytes(data.remaining()))),
            Ok(Ok(None)) => {
                self.has_ended = true;
                Ok(None)
            }
            Ok(Err(_)) | Err(_) => Err(Ended(CloseReason::Receive)),
        }
    }
}

impl RequestBody for Http3Body<'_> {
    async fn next(&mut self) -> Result<Option<Bytes>, Ended> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        if self.has_ended {
            return Ok(None);
        }
        let bytes = self.receive().await?;
        if let Some(left) = &mut self.left {
            // RFC 9114, 4.1.2: a body of another length than was said makes the request malformed.
            let count = bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
            *left = left.checked_sub(count).ok_or(Ended(CloseReason::BadRequest))?;
            if self.has_ended && *left > 0 {
                return Err(Ended(CloseReason::Receive));
            }
            self.has_ended |= *left == 0;
        }
        Ok(bytes)
    }

    async fn send_continue(&mut self) -> Result<(), Ended> {
        let mut interim = Response::new(());
        *interim.status_mut() = http::StatusCode::CONTINUE;
        self.sending.send_response(interim).await.map_err(|_| Ended(CloseReason::SendFailed))
    }

    fn is_finished(&self) -> bool {
        self.has_ended && self.first.is_none()
    }
}

/// The head as HTTP/1.1 has it, read as such. `is_unmeasured`: a body of unknown length follows.
fn head_of(parts: &Parts, is_unmeasured: bool, limits: &HeadLimits) -> Result<RequestHead, HeadError> {
    let mut text = Vec::with_capacity(1024);
    let mut line = |pieces: &[&[u8]]| {
        for piece in pieces {
            text.extend_from_slice(piece);
        }
        text.extend_from_slice(b"\r\n");
    };
    let target = parts.uri.path_and_query().map_or("", http::uri::PathAndQuery::as_str);
    line(&[parts.method.as_str().as_bytes(), b" ", target.as_bytes(), b" HTTP/1.1"]);
    let host = parts.uri.authority().map_or("", http::uri::Authority::as_str);
    line(&[b"host: ", host.as_bytes()]);
    for (name, value) in &parts.headers {
        match name.as_str() {
            // The same as the authority, or h3 would have refused it.
            "host" => continue,
            // RFC 9114, 4.2.
            "connection" | "keep-alive" | "proxy-connection" | "transfer-encoding" | "upgrade" => {
                return Err(HeadError::Malformed("HTTP/3 has no header fields about the connection"));
            }
            "te" if value != "trailers" => {
                return Err(HeadError::Malformed("of TE, HTTP/3 has only `trailers`"));
            }
            _ => {}
        }
        line(&[name.as_str().as_bytes(), b": ", value.as_bytes()]);
    }
    if is_unmeasured {
        line(&[b"transfer-encoding: chunked"]);
    }
    line(&[]);
    match parse_head(&text, limits)? {
        HeadProgress::Whole { head, used } if used == text.len() => Ok(head),
        _ => Err(HeadError::Malformed("a header field holds what none may hold")),
    }
}

/// The head of an answer, out of the lines that HTTP/1.1 would send.
fn response_of(head: &ResponseHead<'_>) -> Response<()> {
    let mut text = Vec::with_capacity(1024);
    head.write(&mut text);
    let text = Bytes::from(text);
    let mut headers = HeaderMap::with_capacity(24);
    let lines = text.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    for line in lines.skip(1) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let value = text.slice_ref(line[colon + 1..].trim_ascii_start());
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_maybe_shared(value))
        {
            headers.append(name, value);
        } else {
            tracing::warn!("a header field is left out of an answer: HTTP/3 cannot say it");
        }
    }
    let mut response = Response::new(());
    *response.status_mut() = http::StatusCode::from_u16(head.status).expect("a status of three digits");
    *response.headers_mut() = headers;
    response
}

/// Sends an answer up to its end, which the caller marks.
async fn send(
    worker: &Rc<Worker>,
    sending: &mut Sending,
    mut reply: Reply,
    is_head: bool,
    request_id: &str,
) -> Result<(), Cut> {
    let mut forgetting = reply.forgetting.take();
    if !matches!(reply.payload, Payload::Relay(..)) {
        // Before the answer leaves: whoever has it must not find what was before the write.
        Forgetting::finish(&mut forgetting).await;
    }
    let response = response_of(&reply.head(is_head, &worker.date(), request_id));
    // Counted before the last byte leaves: whoever has it may ask for the numbers at once.
    worker.counters.bump(Counter::Requests(reply.outcome(), StatusClass::of(reply.status)), 1);
    settled(worker, sending.send_response(response)).await?;
    match reply.payload {
        Payload::None | Payload::Length(_) => Ok(()),
        Payload::Own(_) if is_head => Ok(()),
        Payload::Own(body) => send_bytes(worker, sending, body.into()).await,
        Payload::Object(first, stream) => send_object(worker, sending, first, stream).await,
        Payload::Relay(body, length) => send_relay(worker, sending, body, length, forgetting).await,
    }
}

/// Waits until QUIC has taken something, as long as the client makes room.
async fn settled(worker: &Worker, sent: impl Future<Output = Result<(), StreamError>>) -> Result<(), Cut> {
    if let Ok(sent) = timeout(worker.node.limits.send_stall, sent).await {
        return sent.map_err(|_| Cut::Client);
    }
    worker.counters.bump(Counter::SendsStalled, 1);
    Err(Cut::Stalled)
}

async fn send_bytes(worker: &Worker, sending: &mut Sending, mut bytes: Bytes) -> Result<(), Cut> {
    while !bytes.is_empty() {
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        worker.counters.bump(Counter::QuicSendBytes, piece.len() as u64);
        settled(worker, sending.send_data(Piece::Own(piece))).await?;
    }
    Ok(())
}

async fn send_object(
    worker: &Rc<Worker>,
    sending: &mut Sending,
    first: Slice,
    mut stream: ObjectStream,
) -> Result<(), Cut> {
    let mut next = Some(first);
    while let Some(slice) = next {
        let left = send_slice(worker, sending, slice).await?;
        stream.seek(stream.position() - left);
        next = stream.next().await.map_err(|failure| {
            tracing::warn!(?failure, "body cut");
            Cut::Body
        })?;
    }
    Ok(())
}

/// Copies a slice into QUIC's buffers as they take it. If the reader pauses, the slice is given up; how many bytes of it
/// were not copied is what comes back.
async fn send_slice(worker: &Worker, sending: &mut Sending, mut slice: Slice) -> Result<u64, Cut> {
    let pinned = worker.pin(slice.len() as u64).await;
    while !slice.is_empty() {
        let piece = slice.take_front(slice.len().min(PIECE_BYTES));
        worker.counters.bump(Counter::QuicSendBytes, piece.len() as u64);
        let mut sent = pin!(sending.send_data(Piece::Kept(piece)));
        if let Ok(sent) = timeout(worker.hold_time(), sent.as_mut()).await {
            sent.map_err(|_| Cut::Client)?;
            continue;
        }
        let left = slice.len() as u64;
        drop((slice, pinned));
        settled(worker, sent).await?;
        return Ok(left);
    }
    Ok(0)
}

async fn send_relay(
    worker: &Worker,
    sending: &mut Sending,
    mut body: Body,
    length: Option<u64>,
    mut forgetting: Option<Forgetting>,
) -> Result<(), Cut> {
    let mut left = length;
    loop {
        let piece = body.chunk().await.map_err(|error| {
            tracing::warn!(%error, "relayed body cut");
            Cut::Body
        })?;
        let Some(piece) = piece else { break };
        if let Some(left) = &mut left {
            *left = left.checked_sub(piece.len() as u64).ok_or(Cut::Body)?;
        }
        if left == Some(0) {
            // The write is done now, and the client does not know it yet.
            Forgetting::finish(&mut forgetting).await;
        }
        send_bytes(worker, sending, piece).await?;
    }
    Forgetting::finish(&mut forgetting).await;
    if left.is_some_and(|left| left > 0) { Err(Cut::Body) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(method: &str, uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request").into_parts().0
    }

    #[test]
    fn a_head_is_read_as_http1_reads_it() {
        let limits = HeadLimits::default();
        let headers = [
            ("host", "node:7072"),
            ("range", "bytes=1-2"),
            ("te", "trailers"),
            ("x-amz-date", "20261201T000000Z"),
        ];
        let parts = parts("GET", "https://node:7072/bucket/a%20b?x-id=GetObject", &headers);
        let head = head_of(&parts, false, &limits).expect("a head");
        assert_eq!((&head.method, head.path()), (&Method::Get, &b"/bucket/a%20b"[..]));
        assert_eq!((head.query(), head.host()), (Some(&b"x-id=GetObject"[..]), Some("node:7072")));
        assert_eq!(head.header("range"), Some(&b"bytes=1-2"[..]));
        assert_eq!(head.body, BodyLength::None);
        assert_eq!(head_of(&parts, true, &limits).expect("a head").body, BodyLength::Chunked);
    }

    #[test]
    fn what_http1_refuses_is_refused_here_with_the_same_status() {
        let long = "x".repeat(20 << 10);
        let limits = HeadLimits { headers_max: 3, ..HeadLimits::default() };
        for (uri, headers, status) in [
            ("https://n/b/k", vec![("content-length", "1"), ("content-length", "1")], 400),
            ("https://n/b/k", vec![("content-length", "-1")], 400),
            ("https://n/b/k", vec![("connection", "close")], 400),
            ("https://n/b/k", vec![("transfer-encoding", "chunked")], 400),
            ("https://n/b/k", vec![("te", "gzip")], 400),
            ("https://n/b/k", vec![("expect", "tea")], 417),
            ("https://n/b/k", vec![("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")], 431),
            ("https://n/b/k", vec![("a", long.as_str()), ("b", long.as_str())], 431),
        ] {
            let error = head_of(&parts("PUT", uri, &headers), false, &limits).expect_err(uri);
            assert_eq!(error.status(), status, "{headers:?}: {error}");
        }
        let far = format!("https://n/b/{}", "k".repeat(17 << 10));
        let error = head_of(&parts("GET", &far, &[]), false, &HeadLimits::default()).expect_err("too long");
        assert_eq!(error.status(), 414);
    }

    #[test]
    fn an_answer_says_what_http1_would_say() {
        let date = b"Sun, 06 Nov 1994 08:49:37 GMT";
        let head = ResponseHead {
            body: BodyLength::Length(10),
            cache: Some(crate::http1::CacheOutcome::Ram),
            request_id: Some("00ff"),
            content_type: Some("text/plain: a"),
            ..ResponseHead::new(206, date)
        };
        let response = response_of(&head);
        assert_eq!(response.status(), 206);
        let said: Vec<_> = response
            .headers()
            .iter()
            .map(|(name, value)| format!("{name}={}", value.to_str().expect("text")))
            .collect();
        assert_eq!(
            said,
            [
                "date=Sun, 06 Nov 1994 08:49:37 GMT",
                "content-type=text/plain: a",
                "content-length=10",
                "x-forebay-cache=ram",
                "cache-status=forebay; hit",
                "x-amz-request-id=00ff",
            ]
        );
    }
}
