//! The small client, outside any clock but the listing's: an origin's own door, and pages of names.
//!
//! One connection per request, blocking, whole bodies in memory. Whatever it measures is measured by its caller.
#![forbid(unsafe_code)]

use super::Target;
use crate::origin::catalog::Dataset;
use crate::origin::stats::Report;
use serde::Deserialize;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);
const BODY_BYTES_MAX: u64 = 16 << 20;

/// One answer.
#[derive(Debug)]
pub struct Plain {
    /// HTTP status.
    pub status: u16,
    /// Whole body.
    pub body: Vec<u8>,
}

/// Sends one request and reads the answer. `headers` are whole lines with their ends.
///
/// # Errors
/// No connection, a broken answer, or one above 16 MiB.
pub fn request(target: &Target, method: &str, path: &str, headers: &[u8], body: &[u8]) -> io::Result<Plain> {
    let mut stream = TcpStream::connect_timeout(&target.address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.set_nodelay(true)?;
    let mut out = format!(
        "{method} {path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: forebay-bench\r\nConnection: close\r\n",
        target.host
    )
    .into_bytes();
    if !body.is_empty() {
        out.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
    }
    out.extend_from_slice(headers);
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    stream.write_all(&out)?;
    let mut seen = Vec::new();
    let mut piece = vec![0; 64 * 1024];
    loop {
        if let Some(answer) = parse(&seen)? {
            return Ok(answer);
        }
        let count = stream.read(&mut piece)?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer is cut off"));
        }
        seen.extend_from_slice(&piece[..count]);
        if seen.len() as u64 > BODY_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer above 16 MiB"));
        }
    }
}

fn parse(seen: &[u8]) -> io::Result<Option<Plain>> {
    let broken = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let mut slots = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut slots);
    let used = match response.parse(seen) {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(broken(&format!("not an HTTP/1.1 response: {error}"))),
    };
    let status = response.code.unwrap_or(0);
    let find = |name: &str| response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
    if find("transfer-encoding")
        .is_some_and(|header| header.value.trim_ascii().eq_ignore_ascii_case(b"chunked"))
    {
        return dechunk(&seen[used..]).map(|body| body.map(|body| Plain { status, body }));
    }
    let length = match find("content-length") {
        Some(header) => std::str::from_utf8(header.value)
            .ok()
            .and_then(|text| text.trim().parse::<usize>().ok())
            .ok_or_else(|| broken("a Content-Length that is no number"))?,
        None => 0,
    };
    let body = &seen[used..];
    Ok((body.len() >= length).then(|| Plain { status, body: body[..length].to_vec() }))
}

fn dechunk(mut rest: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    loop {
        match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete((used, 0))) => {
                let _ = used;
                return Ok(Some(body));
            }
            Ok(httparse::Status::Complete((used, size))) => {
                let Some(chunk) = rest.get(used..used + size as usize) else { return Ok(None) };
                body.extend_from_slice(chunk);
                let Some(next) = rest.get(used + size as usize + 2..) else { return Ok(None) };
                rest = next;
            }
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "a broken chunk")),
        }
    }
}

/// The emulator's own door.
#[derive(Clone, Debug)]
pub struct OriginDoor {
    target: Target,
}

/// What `GET /_emu/profile` answers.
#[derive(Clone, Debug, Deserialize)]
pub struct ProfileText {
    /// The profile's name.
    pub name: String,
    /// Of its parameters.
    pub sha256: String,
    /// The seed of all draws.
    pub seed: u64,
    /// The parameters.
    pub params: crate::origin::model::Profile,
}

impl OriginDoor {
    /// The door of the emulator at `http://host:port`.
    ///
    /// # Errors
    /// As [`Target::parse_host`].
    pub fn parse(url: &str) -> Result<Self, String> {
        Target::parse_host(url).map(|target| Self { target })
    }

    /// Adds or replaces datasets.
    ///
    /// # Errors
    /// The emulator is away or refuses; the error says its words.
    pub fn declare(&self, datasets: &[Dataset]) -> io::Result<()> {
        let body = serde_json::to_vec(datasets).map_err(io::Error::other)?;
        self.ask("PUT", "/_emu/datasets", &body).map(drop)
    }

    /// The counters.
    ///
    /// # Errors
    /// The emulator is away.
    pub fn stats(&self) -> io::Result<Report> {
        serde_json::from_slice(&self.ask("GET", "/_emu/stats", b"")?).map_err(io::Error::other)
    }

    /// Counters to zero.
    ///
    /// # Errors
    /// The emulator is away.
    pub fn reset(&self) -> io::Result<()> {
        self.ask("POST", "/_emu/stats/reset", b"").map(drop)
    }

    /// Begins the draws of a round anew: two spans of the same round meet the same delays, key by key.
    ///
    /// # Errors
    /// The emulator is away.
    pub fn begin_round(&self, round: u32) -> io::Result<()> {
        self.ask("PUT", "/_emu/round", round.to_string().as_bytes()).map(drop)
    }

    /// The parameters in force.
    ///
    /// # Errors
    /// The emulator is away.
    pub fn profile(&self) -> io::Result<ProfileText> {
        serde_json::from_slice(&self.ask("GET", "/_emu/profile", b"")?).map_err(io::Error::other)
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> io::Result<Vec<u8>> {
        let answer = request(&self.target, method, path, b"", body)?;
        if answer.status == 200 {
            return Ok(answer.body);
        }
        let said = String::from_utf8_lossy(&answer.body).into_owned();
        Err(io::Error::other(format!(
            "{method} {path} at {} answered {}: {said}",
            self.target.url, answer.status
        )))
    }
}

/// One page of a listing: names and sizes, and where the next page begins.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// Names and sizes.
    pub objects: Vec<(String, u64)>,
    /// The token for the next page.
    pub next: Option<String>,
}

/// Reads a `ListObjectsV2` answer.
///
/// # Errors
/// Says what is not XML, or not a listing.
pub fn parse_page(body: &[u8]) -> Result<Page, String> {
    use quick_xml::events::Event;
    let body = std::str::from_utf8(body).map_err(|error| format!("a listing that is not UTF-8: {error}"))?;
    let mut reader = quick_xml::Reader::from_str(body);
    let (mut page, mut path, mut text) = (Page::default(), Vec::<String>::new(), String::new());
    let (mut key, mut size) = (None, None);
    loop {
        match reader.read_event().map_err(|error| format!("a listing that is not XML: {error}"))? {
            Event::Start(tag) => {
                path.push(tag.local_name().as_ref().to_owned());
                text.clear();
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::GeneralRef(reference) => {
                let resolved = reference.resolve_char_ref().ok().flatten().or(match &*reference {
                    "amp" => Some('&'),
                    "lt" => Some('<'),
                    "gt" => Some('>'),
                    "quot" => Some('"'),
                    "apos" => Some('\''),
                    _ => None,
                });
                text.push(
                    resolved.ok_or_else(|| format!("a listing with an unknown entity &{};", &*reference))?,
                );
            }
            Event::End(_) => {
                match path.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                    ["ListBucketResult", "Contents", "Key"] => key = Some(std::mem::take(&mut text)),
                    ["ListBucketResult", "Contents", "Size"] => size = text.trim().parse().ok(),
                    ["ListBucketResult", "Contents"] => {
                        let (Some(key), Some(size)) = (key.take(), size.take()) else {
                            return Err("a listing with an object without Key or Size".to_owned());
                        };
                        page.objects.push((key, size));
                    }
                    ["ListBucketResult", "NextContinuationToken"] => {
                        page.next = Some(std::mem::take(&mut text));
                    }
                    ["Error", "Code"] => return Err(format!("the store answered {}", text.trim())),
                    _ => {}
                }
                path.pop();
                text.clear();
            }
            Event::Eof => break,
            _ => {}
        }
    }
    if path.is_empty() { Ok(page) } else { Err("a listing that is cut off".to_owned()) }
}

/// The path and query of one listing page.
pub fn list_path(bucket: &str, prefix: &str, token: Option<&str>) -> String {
    let encoded = |text: &str| percent_encoding::utf8_percent_encode(text, LIST_QUERY).to_string();
    // In the order that a signature sorts them in.
    let token = token.map(|token| format!("continuation-token={}&", encoded(token))).unwrap_or_default();
    format!("/{bucket}?{token}list-type=2&prefix={}", encoded(prefix))
}

const LIST_QUERY: &percent_encoding::AsciiSet =
    &percent_encoding::NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read_with_its_entities_and_token() {
        let xml = b"<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"x\"><Name>b</Name><IsTruncated>true</IsTruncated>\
            <Contents><Key>a&amp;b&#x41;</Key><ETag>&quot;e&quot;</ETag><Size>12</Size></Contents>\
            <NextContinuationToken>t==</NextContinuationToken></ListBucketResult>";
        let page = parse_page(xml).expect("a listing");
        assert_eq!(page, Page { objects: vec![("a&bA".into(), 12)], next: Some("t==".into()) });
        assert!(
            parse_page(b"<Error><Code>NoSuchBucket</Code></Error>").unwrap_err().contains("NoSuchBucket")
        );
        assert!(parse_page(&xml[..xml.len() - 30]).is_err());
    }

    #[test]
    fn answers_are_read_with_both_framings() {
        let plain = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab").expect("sound").expect("whole");
        assert_eq!((plain.status, &plain.body[..]), (200, &b"ab"[..]));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n";
        assert_eq!(parse(chunked).expect("sound").expect("whole").body, b"abc");
        assert!(parse(&chunked[..chunked.len() - 8]).expect("sound").is_none());
    }
}
