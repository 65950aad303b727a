//! HTTP/1.1 as bytes: request heads in, response heads out, and the framing of request bodies.
//!
//! Strict where leniency lets two readers of one connection disagree about where a request ends: CRLF only, no
//! folded lines, one length, one host, no space before a colon. A head keeps the memory
//! into which it was received, indexed by offsets: however many headers it has, it costs neither a copy nor an allocation. Nothing here reads a socket, and nothing
//! here knows S3: what a path or header means is left to `dialect` and `auth`.
#![forbid(unsafe_code)]

mod chunked;
mod grammar;
mod response;

use std::fmt;
use std::ops::Range;

use smallvec::SmallVec;

pub use self::chunked::{ChunkError, ChunkedDecoder, Decoded, LAST_CHUNK, write_chunk_head};
use self::grammar::{Cursor, HOST, LINE_END, TARGET, TOKEN, VALUE, is};
pub use self::response::{CONTINUE, CacheOutcome, ContentRange, DateText, ResponseHead, date_text};
use crate::object::Conditions;

/// How large a request head may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    /// Bytes of the whole head with its last CRLF; at most 65,535, larger values count as that.
    pub head_bytes_max: usize,
    /// Bytes of the request target.
    pub target_bytes_max: usize,
    /// Header fields.
    pub headers_max: usize,
}

impl Default for HeadLimits {
    fn default() -> Self {
        // A key of 1,024 bytes is 3 KiB when all of it is encoded; a URL with a session token takes 2 to 4 KiB
        // more. Headers: S3 allows 8 KiB, of which 2 KiB are user metadata.
        Self { head_bytes_max: 32 << 10, target_bytes_max: 16 << 10, headers_max: 100 }
    }
}

/// A request method. Only GET and HEAD may be answered from here; the others are relayed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what they are called")]
pub enum Method {
    Get,
    Head,
    Put,
    Post,
    Delete,
    Options,
    /// Any other token, as sent.
    Other(Box<str>),
}

impl Method {
    /// The method as it stands on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Put => "PUT",
            Self::Post => "POST",
            Self::Delete => "DELETE",
            Self::Options => "OPTIONS",
            Self::Other(name) => name,
        }
    }

    fn parse(token: &[u8]) -> Self {
        match token {
            b"GET" => Self::Get,
            b"HEAD" => Self::Head,
            b"PUT" => Self::Put,
            b"POST" => Self::Post,
            b"DELETE" => Self::Delete,
            b"OPTIONS" => Self::Options,
            other => Self::Other(ascii(other).into()),
        }
    }
}

/// How long a message body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLength {
    /// No framing header: a request without a body; a response that has none or ends with the connection.
    None,
    /// `Content-Length`, in bytes.
    Length(u64),
    /// `Transfer-Encoding: chunked`.
    Chunked,
}

impl BodyLength {
    /// Whether no byte of a body follows.
    pub fn is_empty(self) -> bool {
        matches!(self, Self::None | Self::Length(0))
    }
}

/// One request head, checked.
#[derive(Clone)]
pub struct RequestHead {
    /// The method.
    pub method: Method,
    /// The minor version: HTTP/1.`minor`, 0 or 1.
    pub minor: u8,
    /// What follows the head.
    pub body: BodyLength,
    /// The client waits for `100 Continue` before it sends the body.
    pub expect_continue: bool,
    /// The client wants to send another request on this connection.
    pub keep_alive: bool,
    bytes: Vec<u8>,
    path: Span,
    query: Option<Span>,
    host: Option<Span>,
    fields: SmallVec<[Field; 24]>,
}

/// What a buffer that begins with a request head holds.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "moved once, into the connection; a box would be an allocation"
)]
pub enum HeadProgress {
    /// A good beginning; more bytes are needed.
    Partial,
    /// A whole head, which took the first `used` bytes of the buffer.
    Whole {
        /// The request.
        head: RequestHead,
        /// Bytes of the buffer that belong to the head.
        used: usize,
    },
}

/// Why a request head is refused. The connection must be closed after the answer: where the next request
/// would begin is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The bytes break the grammar of HTTP/1.1.
    #[error("malformed request: {0}")]
    Malformed(&'static str),
    /// The head is longer than the limit.
    #[error("the request head is longer than {0} bytes")]
    HeadTooLarge(usize),
    /// The request target is longer than the limit.
    #[error("the request target is longer than {0} bytes")]
    TargetTooLong(usize),
    /// More header fields than the limit.
    #[error("the request has more than {0} header fields")]
    TooManyHeaders(usize),
    /// Neither HTTP/1.0 nor HTTP/1.1.
    #[error("this port speaks HTTP/1.1 only")]
    Version,
    /// A transfer coding other than chunked.
    #[error("the only transfer coding understood here is chunked")]
    Coding,
    /// An `Expect` other than 100-continue.
    #[error("the only expectation understood here is 100-continue")]
    Expectation,
}

impl HeadError {
    /// The status to answer with.
    pub fn status(self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::TargetTooLong(_) => 414,
            Self::Expectation => 417,
            Self::HeadTooLarge(_) | Self::TooManyHeaders(_) => 431,
            Self::Coding => 501,
            Self::Version => 505,
        }
    }
}

/// Reads one request head from the start of `buffer`. Bytes after it are left alone.
///
/// # Errors
/// [`HeadError`] as soon as the bytes at hand cannot become a good head any more.
pub fn parse_head(buffer: &[u8], limits: &HeadLimits) -> Result<HeadProgress, HeadError> {
    let window = window(buffer, limits);
    Ok(match whole(parse_window(window, limits), buffer, limits)? {
        None => HeadProgress::Partial,
        Some(Parsed { mut head, skipped, used }) => {
            head.bytes = window[skipped..used].to_vec();
            HeadProgress::Whole { head, used }
        }
    })
}

/// Takes a whole head from the start of `buffer`, with the allocation it lies in; what follows stays, in another one.
/// `None` when more bytes are needed. [`RequestHead::into_room`] gives the allocation back.
///
/// # Errors
/// As [`parse_head`].
pub fn take_head(buffer: &mut Vec<u8>, limits: &HeadLimits) -> Result<Option<RequestHead>, HeadError> {
    let parsed = parse_window(window(buffer, limits), limits);
    Ok(whole(parsed, buffer, limits)?.map(|Parsed { mut head, skipped, used }| {
        let rest = buffer.split_off(used);
        head.bytes = std::mem::replace(buffer, rest);
        head.bytes.drain(..skipped);
        head
    }))
}

fn window<'a>(buffer: &'a [u8], limits: &HeadLimits) -> &'a [u8] {
    &buffer[..buffer.len().min(head_bytes_max(limits))]
}

fn head_bytes_max(limits: &HeadLimits) -> usize {
    limits.head_bytes_max.min(usize::from(u16::MAX))
}

/// What is no whole head within the limit never becomes one.
fn whole(
    parsed: Result<Option<Parsed>, HeadError>,
    buffer: &[u8],
    limits: &HeadLimits,
) -> Result<Option<Parsed>, HeadError> {
    match parsed {
        Ok(None) if buffer.len() >= head_bytes_max(limits) => {
            Err(HeadError::HeadTooLarge(head_bytes_max(limits)))
        }
        parsed => parsed,
    }
}

/// A head that was understood and has no bytes yet: `used` of the window are its own, but for the first `skipped`.
struct Parsed {
    head: RequestHead,
    skipped: usize,
    used: usize,
}

impl RequestHead {
    /// The memory it lies in, for the next head.
    pub fn into_room(self) -> Vec<u8> {
        self.bytes
    }

    /// The path as sent, still percent-encoded; begins with `/`, or is `*` for OPTIONS.
    pub fn path(&self) -> &[u8] {
        self.path.of(&self.bytes)
    }

    /// The query as sent, without its `?`; `None` when there was no `?`.
    pub fn query(&self) -> Option<&[u8]> {
        Some(self.query?.of(&self.bytes))
    }

    /// The host and port the client meant, from the absolute target or else the `Host` header. `None` only
    /// for HTTP/1.0.
    pub fn host(&self) -> Option<&str> {
        Some(ascii(self.host?.of(&self.bytes)))
    }

    /// First value of the header `name`, any case, without the white space round it.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let wanted = name.as_bytes();
        let field =
            self.fields.iter().find(|field| field.name.of(&self.bytes).eq_ignore_ascii_case(wanted))?;
        Some(field.value.of(&self.bytes))
    }

    /// All values of the header `name`, any case, in order.
    pub fn header_values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        let wanted = name.as_bytes();
        self.fields.iter().filter_map(move |field| {
            let found = field.name.of(&self.bytes);
            found.eq_ignore_ascii_case(wanted).then(|| field.value.of(&self.bytes))
        })
    }

    /// All header fields in order, names as sent.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields.iter().map(|field| self.name_and_value(*field))
    }

    /// The fields that are meant for whoever answers in the end: without those of this connection, those
    /// that `Connection` names, and the framing, which is written anew.
    pub fn end_to_end_headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.headers().filter(|(name, _)| !is_hop_by_hop(name) && !self.names_in_connection(name))
    }

    /// The conditions of the request.
    pub fn conditions(&self) -> Conditions {
        // Their names all begin with an i; hardly any other does.
        let candidates =
            self.fields.iter().filter(|field| matches!(field.name.of(&self.bytes)[0], b'i' | b'I'));
        Conditions::from_fields(candidates.map(|field| self.name_and_value(*field)))
    }

    fn name_and_value(&self, field: Field) -> (&str, &[u8]) {
        (ascii(field.name.of(&self.bytes)), field.value.of(&self.bytes))
    }

    fn names_in_connection(&self, name: &str) -> bool {
        self.header_values("connection").flat_map(list_members).any(|member| {
            // Host decides where the request goes; no list may take it away.
            member.eq_ignore_ascii_case(name.as_bytes()) && !name.eq_ignore_ascii_case("host")
        })
    }
}

impl fmt::Debug for RequestHead {
    /// Without the query and the headers: both can hold signatures and tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestHead")
            .field("method", &self.method)
            .field("path", &String::from_utf8_lossy(self.path()))
            .field("minor", &self.minor)
            .field("headers", &self.fields.len())
            .field("body", &self.body)
            .field("keep_alive", &self.keep_alive)
            .finish_non_exhaustive()
    }
}

/// Whether a header belongs to one connection, or frames one message, and so must not be relayed.
pub fn is_hop_by_hop(name: &str) -> bool {
    const NAMES: [&str; 11] = [
        "connection",
        "content-length",
        "transfer-encoding",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
    ];
    NAMES.iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// Bytes of a head by position; heads are below 64 KiB.
#[derive(Clone, Copy)]
struct Span {
    start: u16,
    end: u16,
}

impl Span {
    fn new(range: Range<usize>) -> Self {
        Self { start: range.start as u16, end: range.end as u16 }
    }

    fn of(self, bytes: &[u8]) -> &[u8] {
        &bytes[usize::from(self.start)..usize::from(self.end)]
    }
}

#[derive(Clone, Copy)]
struct Field {
    name: Span,
    value: Span,
}

/// What was checked to be ASCII, as text.
fn ascii(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("checked to be ASCII")
}

fn list_members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|member| !member.is_empty())
}

/// Unwraps a step of the walk; leaves the function when the bytes end.
macro_rules! step {
    ($step:expr) => {
        match $step {
            Some(value) => value,
            None => return Ok(None),
        }
    };
}

fn parse_window(window: &[u8], limits: &HeadLimits) -> Result<Option<Parsed>, HeadError> {
    let mut cursor = Cursor { bytes: window, at: 0 };
    // Empty lines before a request are the remains of careless clients; RFC 9112 asks to pass over them.
    while cursor.peek() == Some(b'\r') {
        step!(cursor.crlf(LINE_END)?);
    }
    // Offsets count from here, and only from here on bytes are kept.
    let skipped = cursor.at;
    let mut cursor = Cursor { bytes: &window[skipped..], at: 0 };

    if cursor.peek() == Some(0x16) {
        return Err(HeadError::Malformed(
            "this looks like TLS, but this port speaks plain HTTP: use http://",
        ));
    }
    let method = match cursor.run(TOKEN) {
        Some(token) => token,
        None if cursor.at > METHOD_BYTES_MAX => return Err(HeadError::Malformed("the method is too long")),
        None => return Ok(None),
    };
    if method.is_empty() || method.len() > METHOD_BYTES_MAX || step!(cursor.peek()) != b' ' {
        return Err(HeadError::Malformed("a request begins with a method and one space"));
    }
    cursor.at += 1;

    let target_start = cursor.at;
    let target = cursor.run(TARGET);
    if cursor.at - target_start > limits.target_bytes_max {
        return Err(HeadError::TargetTooLong(limits.target_bytes_max));
    }
    let target = step!(target);
    if target.is_empty() || step!(cursor.peek()) != b' ' {
        return Err(HeadError::Malformed("the request target must be one word without control characters"));
    }
    cursor.at += 1;

    let minor = step!(parse_version(&mut cursor)?);
    step!(cursor.crlf(LINE_END)?);

    let mut fields = SmallVec::new();
    loop {
        match step!(cursor.peek()) {
            b'\r' => {
                step!(cursor.crlf(LINE_END)?);
                break;
            }
            b' ' | b'\t' => return Err(HeadError::Malformed("folded header lines are not allowed")),
            _ if fields.len() >= limits.headers_max => {
                return Err(HeadError::TooManyHeaders(limits.headers_max));
            }
            _ => fields.push(step!(parse_field(&mut cursor)?)),
        }
    }

    let used = cursor.at;
    let bytes = &window[skipped..skipped + used];
    let method = Method::parse(&bytes[method]);
    let target = split_target(bytes, target, &method)?;
    let meaning = read_fields(bytes, &fields, minor)?;
    let host = choose_host(bytes, target.authority, meaning.host, minor)?;
    let head = RequestHead {
        method,
        minor,
        body: meaning.body,
        expect_continue: meaning.expect_continue,
        keep_alive: meaning.keep_alive,
        path: target.path,
        query: target.query,
        host,
        fields,
        bytes: Vec::new(),
    };
    Ok(Some(Parsed { head, skipped, used: skipped + used }))
}

const METHOD_BYTES_MAX: usize = 32;

fn parse_version(cursor: &mut Cursor<'_>) -> Result<Option<u8>, HeadError> {
    for wanted in b"HTTP/" {
        match step!(cursor.peek()) {
            byte if byte == *wanted => cursor.at += 1,
            _ => return Err(HeadError::Malformed("the request line must end with HTTP/1.1")),
        }
    }
    let (major, dot, minor) = match &cursor.bytes[cursor.at..] {
        [major, dot, minor, ..] => (*major, *dot, *minor),
        _ => return Ok(None),
    };
    cursor.at += 3;
    if !major.is_ascii_digit() || dot != b'.' || !minor.is_ascii_digit() {
        return Err(HeadError::Malformed("the request line must end with HTTP/1.1"));
    }
    match (major, minor) {
        (b'1', b'0' | b'1') => Ok(Some(minor - b'0')),
        _ => Err(HeadError::Version),
    }
}

fn parse_field(cursor: &mut Cursor<'_>) -> Result<Option<Field>, HeadError> {
    let name = step!(cursor.run(TOKEN));
    if name.is_empty() || step!(cursor.peek()) != b':' {
        return Err(HeadError::Malformed("a header line is a name, a colon at once, and a value"));
    }
    cursor.at += 1;
    let raw = step!(cursor.run(VALUE));
    step!(cursor.crlf(LINE_END)?);
    let value = cursor.bytes[raw.clone()].trim_ascii_start();
    let start = raw.end - value.len();
    Ok(Some(Field { name: Span::new(name), value: Span::new(start..start + value.trim_ascii_end().len()) }))
}

struct Target {
    authority: Option<Span>,
    path: Span,
    query: Option<Span>,
}

/// Takes apart `/path?query`, `http://host/path?query` and, for OPTIONS, `*`.
fn split_target(bytes: &[u8], target: Range<usize>, method: &Method) -> Result<Target, HeadError> {
    let text = &bytes[target.clone()];
    if text == b"*" && *method == Method::Options {
        return Ok(Target { authority: None, path: Span::new(target), query: None });
    }
    let (authority, path_start) = if text[0] == b'/' {
        (None, target.start)
    } else {
        let scheme = ["http://", "https://"].into_iter().find(|scheme| {
            text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme.as_bytes()))
        });
        let Some(scheme) = scheme else {
            return Err(HeadError::Malformed("the request target must begin with / or http://"));
        };
        let start = target.start + scheme.len();
        let length = bytes[start..target.end].iter().position(|&byte| byte == b'/');
        // Without a path after the host there is nothing that could be asked for.
        let Some(length) = length else {
            return Err(HeadError::Malformed("an absolute request target needs a path"));
        };
        (Some(Span::new(start..start + length)), start + length)
    };
    let question = bytes[path_start..target.end].iter().position(|&byte| byte == b'?');
    let path_end = question.map_or(target.end, |length| path_start + length);
    let query = question.map(|_| Span::new(path_end + 1..target.end));
    Ok(Target { authority, path: Span::new(path_start..path_end), query })
}

struct Meaning {
    host: Option<Span>,
    body: BodyLength,
    expect_continue: bool,
    keep_alive: bool,
}

/// What the header fields say about the message itself.
fn read_fields(bytes: &[u8], fields: &[Field], minor: u8) -> Result<Meaning, HeadError> {
    let mut host = None;
    let mut length = None;
    let mut chunked = false;
    let mut expect_continue = false;
    let (mut close, mut keep) = (false, false);
    for field in fields {
        let (name, value) = (field.name.of(bytes), field.value.of(bytes));
        // By length first: of the usual dozen fields only a few have one of these.
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"host") => {
                let earlier = host.replace(field.value);
                if earlier.is_some() {
                    return Err(HeadError::Malformed("more than one Host"));
                }
            }
            6 if name.eq_ignore_ascii_case(b"expect") => {
                if !value.eq_ignore_ascii_case(b"100-continue") {
                    return Err(HeadError::Expectation);
                }
                expect_continue = true;
            }
            10 if name.eq_ignore_ascii_case(b"connection") => {
                for member in list_members(value) {
                    close |= member.eq_ignore_ascii_case(b"close");
                    keep |= member.eq_ignore_ascii_case(b"keep-alive");
                }
            }
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                // Equal ones too: two are always a sign that somebody in between did not look.
                let earlier = length.replace(parse_length(value)?);
                if earlier.is_some() {
                    return Err(HeadError::Malformed("more than one Content-Length"));
                }
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                if !value.eq_ignore_ascii_case(b"chunked") {
                    return Err(HeadError::Coding);
                }
                if std::mem::replace(&mut chunked, true) {
                    return Err(HeadError::Malformed("more than one Transfer-Encoding"));
                }
            }
            _ => {}
        }
    }
    let body = match (length, chunked) {
        (Some(_), true) => {
            return Err(HeadError::Malformed("Content-Length beside Transfer-Encoding"));
        }
        (None, true) if minor == 0 => {
            return Err(HeadError::Malformed("HTTP/1.0 has no Transfer-Encoding"));
        }
        (None, true) => BodyLength::Chunked,
        (Some(length), false) => BodyLength::Length(length),
        (None, false) => BodyLength::None,
    };
    Ok(Meaning {
        host,
        body,
        // Whoever speaks 1.0 does not know of 100 and would take it for the answer.
        expect_continue: expect_continue && minor == 1,
        keep_alive: !close && (minor == 1 || keep),
    })
}

fn parse_length(value: &[u8]) -> Result<u64, HeadError> {
    const BAD: HeadError = HeadError::Malformed("Content-Length must be one decimal number below 2^64");
    if value.is_empty() {
        return Err(BAD);
    }
    value.iter().try_fold(0u64, |length, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0')).ok_or(BAD)?;
        length.checked_mul(10).and_then(|length| length.checked_add(digit)).ok_or(BAD)
    })
}

/// The host of an absolute target and the `Host` header must be the same: a signature covers the header,
/// routing would go by the target.
fn choose_host(
    bytes: &[u8],
    authority: Option<Span>,
    host: Option<Span>,
    minor: u8,
) -> Result<Option<Span>, HeadError> {
    if host.is_none() && minor == 1 {
        return Err(HeadError::Malformed("HTTP/1.1 needs a Host"));
    }
    for span in [authority, host].into_iter().flatten() {
        if !span.of(bytes).iter().all(|&byte| is(byte, HOST)) {
            return Err(HeadError::Malformed("the host holds a character that no host has"));
        }
    }
    if let Some(authority) = authority {
        if authority.start == authority.end {
            return Err(HeadError::Malformed("an absolute request target needs a host"));
        }
        let same = |host: Span| {
            let (target, header) = (authority.of(bytes), host.of(bytes));
            without_default_port(target).eq_ignore_ascii_case(without_default_port(header))
        };
        if host.is_some_and(|host| !same(host)) {
            return Err(HeadError::Malformed("the request target and Host name different hosts"));
        }
    }
    Ok(authority.or(host))
}

fn without_default_port(host: &[u8]) -> &[u8] {
    host.strip_suffix(b":80").or_else(|| host.strip_suffix(b":443")).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: impl AsRef<[u8]>) -> Result<(RequestHead, usize), HeadError> {
        match parse_head(text.as_ref(), &HeadLimits::default())? {
            HeadProgress::Whole { head, used } => Ok((head, used)),
            HeadProgress::Partial => panic!("only a part: {:?}", String::from_utf8_lossy(text.as_ref())),
        }
    }

    fn status(text: impl AsRef<[u8]>) -> u16 {
        match parse_head(text.as_ref(), &HeadLimits::default()) {
            Err(error) => error.status(),
            Ok(progress) => {
                panic!("accepted {:?}: {progress:?}", String::from_utf8_lossy(text.as_ref()))
            }
        }
    }

    #[test]
    fn a_real_request_is_read_whole() {
        let text = b"GET /tbkt2/big32m.bin?x=1&y HTTP/1.1\r\nHost: 127.0.0.1:9470\r\n\
            Range:  bytes=0-8388607 \r\nIF-MATCH: \"c7\"\r\nx-empty:\r\n\r\nGET /next";
        let (head, used) = parse(text).unwrap();
        assert_eq!(&text[used..], b"GET /next");
        assert_eq!((&head.method, head.minor, head.body), (&Method::Get, 1, BodyLength::None));
        assert_eq!((head.path(), head.query()), (&b"/tbkt2/big32m.bin"[..], Some(&b"x=1&y"[..])));
        assert_eq!(head.host(), Some("127.0.0.1:9470"));
        assert_eq!(head.header("range"), Some(&b"bytes=0-8388607"[..]));
        assert_eq!(head.header("If-Match"), Some(&b"\"c7\""[..]));
        assert_eq!(head.header("x-empty"), Some(&b""[..]));
        assert_eq!(head.header("absent"), None);
        assert!(head.keep_alive && !head.expect_continue);
        let names: Vec<&str> = head.headers().map(|(name, _)| name).collect();
        assert_eq!(names, ["Host", "Range", "IF-MATCH", "x-empty"]);
        assert!(head.conditions().if_match.is_some());
    }

    #[test]
    fn every_beginning_of_a_request_is_a_part() {
        let text = b"\r\nPUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n";
        for end in 0..text.len() {
            let progress = parse_head(&text[..end], &HeadLimits::default());
            assert!(matches!(progress, Ok(HeadProgress::Partial)), "{end}: {progress:?}");
        }
        let (head, used) = parse(text).unwrap();
        assert_eq!(used, text.len());
        assert_eq!((head.path(), head.body), (&b"/b/k"[..], BodyLength::Length(5)));
        assert!(head.expect_continue);
    }

    #[test]
    fn targets_come_in_their_forms() {
        for (target, path, query, host) in [
            ("/", "/", None, "h"),
            ("/?", "/", Some(""), "h"),
            ("/b//k/", "/b//k/", None, "h"),
            ("/b/k?a?b", "/b/k", Some("a?b"), "h"),
            ("http://h/b/k?q", "/b/k", Some("q"), "h"),
            ("HTTP://H:80/b", "/b", None, "H:80"),
            ("/b/caf\u{e9}", "/b/caf\u{e9}", None, "h"),
            ("/b/{a|b}", "/b/{a|b}", None, "h"),
        ] {
            let (head, _) = parse(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n")).unwrap();
            assert_eq!(head.path(), path.as_bytes(), "{target}");
            assert_eq!(head.query(), query.map(str::as_bytes), "{target}");
            assert_eq!(head.host(), Some(host), "{target}");
        }
        assert_eq!(parse("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n").unwrap().0.path(), b"*");
        for target in [
            "*",
            "b/k",
            "h:80",
            "ftp://h/k",
            "http://h",
            "http:///k",
            "http://h?q",
            "http://u@h/k",
            "http://other/k",
            "http://h:8080/k",
            "/a#b",
            "/a\tb",
            "/a\u{7f}",
        ] {
            assert_eq!(status(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n")), 400, "{target}");
        }
    }

    #[test]
    fn what_two_readers_could_read_differently_is_refused() {
        let table: &[(u16, &str)] = &[
            // Line ends.
            (400, "GET / HTTP/1.1\nHost: h\n\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\n\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\rX: 1\r\n\r\n"),
            (400, "GET / HTTP/1.1\rHost: h\r\n\r\n"),
            (400, "\nGET / HTTP/1.1\r\nHost: h\r\n\r\n"),
            // Request line.
            (400, " GET / HTTP/1.1\r\nHost: h\r\n\r\n"),
            (400, "GET  / HTTP/1.1\r\nHost: h\r\n\r\n"),
            (400, "GET /  HTTP/1.1\r\nHost: h\r\n\r\n"),
            (400, "GET / HTTP/1.1 \r\nHost: h\r\n\r\n"),
            (400, "GET\t/ HTTP/1.1\r\nHost: h\r\n\r\n"),
            (400, "GET /\r\nHost: h\r\n\r\n"),
            (400, "GET / http/1.1\r\nHost: h\r\n\r\n"),
            (400, "GET / HTTP/1.\r\nHost: h\r\n\r\n"),
            (400, "G(T / HTTP/1.1\r\nHost: h\r\n\r\n"),
            (400, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
            (505, "GET / HTTP/2.0\r\nHost: h\r\n\r\n"),
            (505, "GET / HTTP/1.2\r\nHost: h\r\n\r\n"),
            (505, "GET / HTTP/0.9\r\nHost: h\r\n\r\n"),
            (505, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            (400, "\u{16}\u{3}\u{1}"),
            // Field lines.
            (400, "GET / HTTP/1.1\r\nHost : h\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\n Host: h\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\nX\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\n: 1\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\nX Y: 1\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\nX\u{e9}: 1\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\nX: a\u{7f}\r\n\r\n"),
            // Host.
            (400, "GET / HTTP/1.1\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: h/x\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: a b\r\n\r\n"),
            (400, "GET / HTTP/1.1\r\nHost: u@h\r\n\r\n"),
            // Length.
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5, 5\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: +5\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 0x5\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5 5\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length:\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 18446744073709551616\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"),
            (
                400,
                "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            ),
            (400, "PUT / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"),
            (400, "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n"),
            (501, "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"),
            (501, "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n"),
            (501, "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n"),
            (501, "PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding:\r\n\r\n"),
            (417, "PUT / HTTP/1.1\r\nHost: h\r\nExpect: 200-ok\r\n\r\n"),
        ];
        for (expected, text) in table {
            assert_eq!(status(text), *expected, "{text:?}");
        }
        let longest = "PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 18446744073709551615\r\n\r\n";
        assert_eq!(parse(longest).unwrap().0.body, BodyLength::Length(u64::MAX));
    }

    #[test]
    fn connections_are_kept_as_the_version_says() {
        for (version, connection, kept) in [
            ("1.1", "", true),
            ("1.1", "Connection: close\r\n", false),
            ("1.1", "Connection: Keep-Alive, CLOSE\r\n", false),
            ("1.1", "Connection: te\r\nConnection: close\r\n", false),
            ("1.0", "", false),
            ("1.0", "Connection: keep-alive\r\n", true),
            ("1.0", "Connection: keep-alive, close\r\n", false),
        ] {
            let text = format!("GET / HTTP/{version}\r\nHost: h\r\n{connection}\r\n");
            assert_eq!(parse(&text).unwrap().0.keep_alive, kept, "{text:?}");
        }
        let (old, _) = parse("PUT / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n").unwrap();
        assert_eq!((old.host(), old.expect_continue, old.minor), (None, false, 0));
    }

    #[test]
    fn limits_are_kept_before_the_head_is_whole() {
        let limits = HeadLimits { head_bytes_max: 100, target_bytes_max: 20, headers_max: 2 };
        let refused = |text: &str| parse_head(text.as_bytes(), &limits).unwrap_err();
        assert_eq!(refused(&format!("GET /{}", "a".repeat(20))), HeadError::TargetTooLong(20));
        assert_eq!(
            refused(&format!("GET / HTTP/1.1\r\nX: {}", "a".repeat(90))),
            HeadError::HeadTooLarge(100)
        );
        assert_eq!(refused(&"\r\n".repeat(50)), HeadError::HeadTooLarge(100));
        let many = "GET / HTTP/1.1\r\nHost: h\r\na: 1\r\nb";
        assert_eq!(refused(many), HeadError::TooManyHeaders(2));
        assert_eq!(refused(many).status(), 431);
        let exact = format!("GET /{} HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "a".repeat(19), "b".repeat(49));
        assert_eq!(exact.len(), 100);
        assert!(matches!(parse_head(exact.as_bytes(), &limits), Ok(HeadProgress::Whole { used: 100, .. })));
        let followed = exact + "GET /next";
        assert!(matches!(parse_head(followed.as_bytes(), &limits), Ok(HeadProgress::Whole { .. })));
    }

    #[test]
    fn what_belongs_to_the_connection_is_not_handed_on() {
        let (head, _) = parse(
            "PUT /b/k HTTP/1.1\r\nHost: h\r\nConnection: x-hop, Host, close\r\nX-Hop: 1\r\nTE: trailers\r\n\
             Content-Length: 5\r\nExpect: 100-continue\r\nUpgrade: h2c\r\nx-amz-meta-a: 1\r\nKeep-Alive: 5\r\n\r\n",
        )
        .unwrap();
        let names: Vec<&str> = head.end_to_end_headers().map(|(name, _)| name).collect();
        assert_eq!(names, ["Host", "x-amz-meta-a"]);
    }

    #[test]
    fn debug_shows_no_secrets() {
        let (head, _) = parse(
            "GET /b/k?X-Amz-Signature=SECRET HTTP/1.1\r\nHost: h\r\nAuthorization: SECRET\r\nCookie: SECRET\r\n\r\n",
        )
        .unwrap();
        let text = format!("{head:?}");
        assert!(text.contains("/b/k") && !text.contains("SECRET"), "{text}");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>) {
            let _ = parse_head(&bytes, &HeadLimits::default());
        }

        #[test]
        fn nearly_good_heads_never_panic(
            words in prop::collection::vec(prop::sample::select(vec![
                "GET", " ", "/", "http://h/", "?", "HTTP/1.1", "\r\n", "\r\n\r\n", "Host: h", "Host", ":",
                "Content-Length: 5", "Transfer-Encoding: chunked", "\n", "\t", "\0", "\u{e9}", "*", "Connection: a,,b",
            ]), 0..24),
        ) {
            let text = words.concat();
            let limits = HeadLimits { head_bytes_max: 120, target_bytes_max: 30, headers_max: 4 };
            if let Ok(HeadProgress::Whole { head, used }) = parse_head(text.as_bytes(), &limits) {
                prop_assert!(used <= text.len() && head.path().starts_with(b"/"));
                let _ = (head.query(), head.host(), head.headers().count(), head.conditions());
                prop_assert!(head.end_to_end_headers().count() <= 4);
            }
        }

        #[test]
        fn more_bytes_never_change_a_verdict(
            tail in "[ -~\r\n]{0,60}",
            cut in any::<prop::sample::Index>(),
        ) {
            let text = format!("GET /b/k HTTP/1.1\r\nHost: h\r\n{tail}");
            let limits = HeadLimits::default();
            let early = parse_head(&text.as_bytes()[..cut.index(text.len())], &limits);
            let late = parse_head(text.as_bytes(), &limits);
            match (early, late) {
                (Ok(HeadProgress::Partial), _) => {}
                (Err(early), late) => prop_assert_eq!(early.status(), late.unwrap_err().status()),
                (Ok(HeadProgress::Whole { used, .. }), Ok(HeadProgress::Whole { used: late, .. })) => {
                    prop_assert_eq!(used, late);
                }
                (early, late) => prop_assert!(false, "{early:?} became {late:?}"),
            }
        }
    }
}
