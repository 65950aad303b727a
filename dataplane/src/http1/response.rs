//! Response heads, written straight into the bytes that will be sent.
//!
//! On a hit this runs once a request, so it only copies: the record of the object is encoded already, the date
//! is handed in, numbers are written by hand. The rules of RFC 9110 about 1xx, 204 and 304 live here, so that
//! no caller can send a length where none may stand.
#![forbid(unsafe_code)]

use std::time::SystemTime;

use http::HeaderMap;

use super::{BodyLength, is_hop_by_hop};
use crate::object::HeaderRecord;
use crate::range::ByteRange;

/// The interim answer to `Expect: 100-continue`.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A date as the `Date` header has it; made once a second by the worker.
pub type DateText = [u8; 29];

/// `time` in the form of `Sun, 06 Nov 1994 08:49:37 GMT`.
pub fn date_text(time: SystemTime) -> DateText {
    let text = httpdate::fmt_http_date(time);
    text.as_bytes().try_into().expect("an HTTP date has 29 bytes until the year 9999")
}

/// How an answer came to be; what was planned when its first byte was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheOutcome {
    /// All of it from memory.
    Ram,
    /// All of it from here, some or all from a drive.
    Drive,
    /// None of it was here; the origin gives it, and it is kept.
    Miss,
    /// Some of it was here, the origin gives the rest.
    Partial,
    /// The origin answers and nothing is kept.
    Bypass,
}

impl CacheOutcome {
    /// The word used in `x-forebay-cache` and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Drive => "drive",
            Self::Miss => "miss",
            Self::Partial => "partial",
            Self::Bypass => "bypass",
        }
    }

    /// Our own header, and the one of RFC 9211 beside it.
    fn lines(self) -> &'static [u8] {
        match self {
            Self::Ram => b"x-forebay-cache: ram\r\nCache-Status: forebay; hit\r\n",
            Self::Drive => b"x-forebay-cache: drive\r\nCache-Status: forebay; hit\r\n",
            Self::Miss => b"x-forebay-cache: miss\r\nCache-Status: forebay; fwd=miss; stored\r\n",
            Self::Partial => b"x-forebay-cache: partial\r\nCache-Status: forebay; fwd=partial; stored\r\n",
            Self::Bypass => b"x-forebay-cache: bypass\r\nCache-Status: forebay; fwd=bypass\r\n",
        }
    }
}

/// The value of `Content-Range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentRange {
    /// Of a 206: which bytes of how many.
    Bytes {
        /// The bytes that follow.
        range: ByteRange,
        /// Size of the whole object in bytes.
        size: u64,
    },
    /// Of a 416.
    Unsatisfied {
        /// Size of the whole object in bytes.
        size: u64,
    },
}

/// One response head. Fill in what applies over [`ResponseHead::new`] and write it.
#[derive(Clone, Copy, Debug)]
pub struct ResponseHead<'a> {
    /// Status code, 100 to 999.
    pub status: u16,
    /// Now.
    pub date: &'a DateText,
    /// Headers of the object. On a 304 its `Content-*` lines stay away.
    pub record: Option<&'a HeaderRecord>,
    /// Headers of an origin response that is handed on, without those of its connection, its framing and
    /// its date.
    pub relayed: Option<&'a HeaderMap>,
    /// `Content-Type` of a body of our own.
    pub content_type: Option<&'a str>,
    /// Length of the body; of a HEAD, the length a GET would have had. Ignored where no length may stand.
    pub body: BodyLength,
    /// `Content-Range`.
    pub content_range: Option<ContentRange>,
    /// Say `Accept-Ranges: bytes`.
    pub accept_ranges: bool,
    /// `x-forebay-cache` and `Cache-Status`.
    pub cache: Option<CacheOutcome>,
    /// `Age` in seconds, for answers that are fresh by their time to live.
    pub age_s: Option<u64>,
    /// `Retry-After` in seconds.
    pub retry_after_s: Option<u32>,
    /// `Alt-Svc`.
    pub alt_svc: Option<&'a str>,
    /// `x-amz-request-id`.
    pub request_id: Option<&'a str>,
    /// The version spoken by the client: HTTP/1.`minor`. A 1.0 client must be told that the connection stays.
    pub minor: u8,
    /// The connection ends after this response.
    pub close: bool,
}

impl<'a> ResponseHead<'a> {
    /// A head that says no more than status and date.
    pub fn new(status: u16, date: &'a DateText) -> Self {
        Self {
            status,
            date,
            record: None,
            relayed: None,
            content_type: None,
            body: BodyLength::None,
            content_range: None,
            accept_ranges: false,
            cache: None,
            age_s: None,
            retry_after_s: None,
            alt_svc: None,
            request_id: None,
            minor: 1,
            close: false,
        }
    }

    /// Appends the head with its last empty line to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        assert!((100..=999).contains(&self.status), "status {} does not exist", self.status);
        out.extend_from_slice(b"HTTP/1.1 ");
        write_number(out, u64::from(self.status));
        out.push(b' ');
        out.extend_from_slice(reason(self.status).as_bytes());
        out.extend_from_slice(b"\r\nDate: ");
        out.extend_from_slice(self.date);
        out.extend_from_slice(b"\r\n");

        if let Some(record) = self.record {
            if self.status == 304 {
                for line in record.lines().filter(|line| !is_content_line(line)) {
                    out.extend_from_slice(line);
                }
            } else {
                out.extend_from_slice(record.as_bytes());
            }
        }
        if let Some(headers) = self.relayed {
            for (name, value) in headers {
                if !is_hop_by_hop(name.as_str()) && !self.says_itself(name.as_str()) {
                    write_line(out, name.as_str(), value.as_bytes());
                }
            }
        }
        if let Some(content_type) = self.content_type {
            write_line(out, "Content-Type", content_type.as_bytes());
        }
        self.write_framing(out);
        if let Some(content_range) = self.content_range {
            write_content_range(out, content_range);
        }
        if self.accept_ranges {
            out.extend_from_slice(b"Accept-Ranges: bytes\r\n");
        }
        if let Some(cache) = self.cache {
            out.extend_from_slice(cache.lines());
        }
        if let Some(age_s) = self.age_s {
            write_number_line(out, b"Age: ", age_s);
        }
        if let Some(retry_after_s) = self.retry_after_s {
            write_number_line(out, b"Retry-After: ", u64::from(retry_after_s));
        }
        if let Some(alt_svc) = self.alt_svc {
            write_line(out, "Alt-Svc", alt_svc.as_bytes());
        }
        if let Some(request_id) = self.request_id {
            write_line(out, "x-amz-request-id", request_id.as_bytes());
        }
        if self.close {
            out.extend_from_slice(b"Connection: close\r\n");
        } else if self.minor == 0 {
            out.extend_from_slice(b"Connection: keep-alive\r\n");
        }
        out.extend_from_slice(b"\r\n");
    }

    fn write_framing(&self, out: &mut Vec<u8>) {
        // RFC 9110 8.6, RFC 9112 6.1: no framing in 1xx and 204. In a 304 a length would have to be that of
        // the 200, and says nothing the client does not know.
        if self.status < 200 || self.status == 204 || self.status == 304 {
            return;
        }
        match self.body {
            BodyLength::None => {}
            BodyLength::Length(length) => write_number_line(out, b"Content-Length: ", length),
            BodyLength::Chunked => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        }
    }

    /// Whether a relayed header would stand beside one that is written anyway.
    fn says_itself(&self, name: &str) -> bool {
        match name {
            // The date is said anyway; what came out of this cache is not the origin's to say.
            // What another service of the origin may be is nothing to our clients.
            "date" | "x-forebay-cache" | "alt-svc" => true,
            "content-type" => self.content_type.is_some(),
            "content-range" => self.content_range.is_some(),
            "accept-ranges" => self.accept_ranges,
            "age" => self.age_s.is_some(),
            "retry-after" => self.retry_after_s.is_some(),
            "x-amz-request-id" => self.request_id.is_some(),
            _ => false,
        }
    }
}

fn is_content_line(line: &[u8]) -> bool {
    line.get(..8).is_some_and(|start| start.eq_ignore_ascii_case(b"content-"))
}

fn write_line(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    // A line end in a value would let it speak in our name. Everything that comes here was a header value or
    // is our own text, so this is ours to hold.
    assert!(!value.iter().any(|byte| matches!(byte, b'\r' | b'\n')), "a line end in the value of {name}");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

fn write_content_range(out: &mut Vec<u8>, content_range: ContentRange) {
    out.extend_from_slice(b"Content-Range: bytes ");
    let size = match content_range {
        ContentRange::Bytes { range, size } => {
            write_number(out, range.start());
            out.push(b'-');
            write_number(out, range.last());
            size
        }
        ContentRange::Unsatisfied { size } => {
            out.push(b'*');
            size
        }
    };
    out.push(b'/');
    write_number(out, size);
    out.extend_from_slice(b"\r\n");
}

fn write_number_line(out: &mut Vec<u8>, name: &[u8], number: u64) {
    out.extend_from_slice(name);
    write_number(out, number);
    out.extend_from_slice(b"\r\n");
}

fn write_number(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// The phrase after the status; may be empty, nobody acts on it.
fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};
    use std::time::{Duration, UNIX_EPOCH};

    const DATE: &DateText = b"Sun, 06 Nov 1994 08:49:37 GMT";

    fn written(head: &ResponseHead<'_>) -> String {
        let mut out = Vec::new();
        head.write(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn a_hit_is_written_to_the_byte() {
        let record = HeaderRecord::from_headers(&map(&[("etag", "\"a\""), ("content-type", "text/plain")]));
        let head = ResponseHead {
            record: Some(&record),
            body: BodyLength::Length(10),
            content_range: Some(ContentRange::Bytes { range: ByteRange::new(90, 100).unwrap(), size: 100 }),
            accept_ranges: true,
            cache: Some(CacheOutcome::Ram),
            age_s: Some(3),
            request_id: Some("00ff"),
            ..ResponseHead::new(206, DATE)
        };
        assert_eq!(
            written(&head),
            "HTTP/1.1 206 Partial Content\r\n\
             Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\
             ETag: \"a\"\r\n\
             Content-Type: text/plain\r\n\
             Content-Length: 10\r\n\
             Content-Range: bytes 90-99/100\r\n\
             Accept-Ranges: bytes\r\n\
             x-forebay-cache: ram\r\n\
             Cache-Status: forebay; hit\r\n\
             Age: 3\r\n\
             x-amz-request-id: 00ff\r\n\r\n"
        );
    }

    #[test]
    fn a_304_has_neither_length_nor_content_lines() {
        let record = HeaderRecord::from_headers(&map(&[
            ("etag", "\"a\""),
            ("content-type", "text/plain"),
            ("cache-control", "max-age=5"),
        ]));
        let head = ResponseHead {
            record: Some(&record),
            body: BodyLength::Length(100),
            ..ResponseHead::new(304, DATE)
        };
        let text = written(&head);
        assert!(text.starts_with("HTTP/1.1 304 Not Modified\r\n"), "{text}");
        assert!(text.contains("ETag: \"a\"\r\n") && text.contains("Cache-Control: max-age=5\r\n"), "{text}");
        assert!(!text.to_ascii_lowercase().contains("\r\ncontent-"), "{text}");
    }

    #[test]
    fn no_length_stands_where_none_may() {
        for (status, body, expected) in [
            (200, BodyLength::Length(0), "Content-Length: 0\r\n"),
            (200, BodyLength::Length(u64::MAX), "Content-Length: 18446744073709551615\r\n"),
            (200, BodyLength::Chunked, "Transfer-Encoding: chunked\r\n"),
            (200, BodyLength::None, ""),
            (204, BodyLength::Length(0), ""),
            (204, BodyLength::Chunked, ""),
            (304, BodyLength::Chunked, ""),
            (103, BodyLength::Length(5), ""),
            (416, BodyLength::Length(7), "Content-Length: 7\r\n"),
        ] {
            let text = written(&ResponseHead { body, ..ResponseHead::new(status, DATE) });
            let rest = text.split_once("GMT\r\n").unwrap().1;
            assert_eq!(rest, format!("{expected}\r\n"), "{status} {body:?}");
        }
    }

    #[test]
    fn each_outcome_says_it_twice() {
        for (cache, status) in [
            (CacheOutcome::Ram, "forebay; hit"),
            (CacheOutcome::Drive, "forebay; hit"),
            (CacheOutcome::Miss, "forebay; fwd=miss; stored"),
            (CacheOutcome::Partial, "forebay; fwd=partial; stored"),
            (CacheOutcome::Bypass, "forebay; fwd=bypass"),
        ] {
            let text = written(&ResponseHead { cache: Some(cache), ..ResponseHead::new(200, DATE) });
            let lines = format!("x-forebay-cache: {}\r\nCache-Status: {status}\r\n\r\n", cache.as_str());
            assert!(text.ends_with(&lines), "{text}");
        }
    }

    #[test]
    fn refusals_say_when_and_whether_to_come_again() {
        let head = ResponseHead { retry_after_s: Some(2), close: true, ..ResponseHead::new(503, DATE) };
        let text = written(&head);
        assert!(text.ends_with("Retry-After: 2\r\nConnection: close\r\n\r\n"), "{text}");
        let old = written(&ResponseHead { minor: 0, ..ResponseHead::new(200, DATE) });
        assert!(old.ends_with("Connection: keep-alive\r\n\r\n"), "{old}");
        let range = Some(ContentRange::Unsatisfied { size: 0 });
        let text = written(&ResponseHead { content_range: range, ..ResponseHead::new(416, DATE) });
        assert!(text.contains("Content-Range: bytes */0\r\n"), "{text}");
        assert!(written(&ResponseHead::new(799, DATE)).starts_with("HTTP/1.1 799 \r\n"));
    }

    #[test]
    fn a_relayed_response_keeps_its_headers_and_loses_its_connection() {
        let headers = map(&[
            ("date", "Mon, 30 Nov 2026 17:44:00 GMT"),
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("content-length", "77"),
            ("etag", "\"a\""),
            ("x-amz-request-id", "origin"),
            ("x-forebay-cache", "ram"),
            ("alt-svc", "h3=\":443\""),
            ("x-tos-hash-crc64ecma", "17"),
        ]);
        let head = ResponseHead {
            relayed: Some(&headers),
            body: BodyLength::Length(5),
            cache: Some(CacheOutcome::Bypass),
            ..ResponseHead::new(200, DATE)
        };
        let text = written(&head);
        for kept in ["etag: \"a\"\r\n", "x-amz-request-id: origin\r\n", "x-tos-hash-crc64ecma: 17\r\n"] {
            assert!(text.contains(kept), "{text}");
        }
        for dropped in ["2026", "connection:", "transfer-encoding", "77", "cache: ram", "alt-svc"] {
            assert!(!text.contains(dropped), "{dropped} in {text}");
        }
        let ours = written(&ResponseHead { request_id: Some("ours"), ..head });
        assert!(ours.contains("x-amz-request-id: ours\r\n") && !ours.contains("origin"), "{ours}");
    }

    #[test]
    #[should_panic(expected = "a line end in the value of x-amz-request-id")]
    fn a_value_cannot_begin_a_line() {
        written(&ResponseHead { request_id: Some("1\r\nSet-Cookie: a"), ..ResponseHead::new(200, DATE) });
    }

    #[test]
    fn dates_have_the_form_of_the_rfc() {
        assert_eq!(&date_text(UNIX_EPOCH + Duration::from_secs(784_111_777)), DATE);
    }
}
