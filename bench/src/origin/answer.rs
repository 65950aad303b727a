//! From a request head to what will be sent and when: all of the emulator's thinking, none of its sockets.
//!
//! Path style only (`/bucket/key`). What it does not know it refuses with 501 and says so, because a silent
//! wrong answer would be taken for the store's.
#![forbid(unsafe_code)]

use super::catalog::{Catalog, Dataset, Found, Source};
use super::model::{Bucket, Draw, Kind, Profile};
use super::stats::Stats;
use crate::clock::MILLISECOND_NS;
use crate::content::Content;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::json;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use twox_hash::xxhash3_64::Hasher;

const LIST_KEYS_MAX: usize = 1000;
/// One PUT body, bytes.
pub const PUT_BODY_MAX: u64 = super::catalog::PUT_BYTES_MAX;
// Version 1 is "last modified" at 2026-01-01T00:00:00Z, each later one a minute after.
const EPOCH_SECONDS: u64 = 1_767_225_600;

/// A request head, as far as the emulator cares.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Upper case.
    pub method: String,
    /// Path and query as sent.
    pub target: String,
    /// `Range`.
    pub range: Option<String>,
    /// `If-Match`.
    pub if_match: Option<String>,
    /// `If-None-Match`.
    pub if_none_match: Option<String>,
    /// The body is framed by `aws-chunked`, or its transfer coding, or is a copy: what we do not do.
    pub unsupported: Option<&'static str>,
}

/// What will be sent.
#[derive(Debug)]
pub struct Answer {
    /// Status line and headers, with the empty line.
    pub head: Vec<u8>,
    /// The body.
    pub body: Body,
    /// When; `None` is at once.
    pub draw: Option<Draw>,
    /// How long the cap or the request limit holds it back on top, ns.
    pub qos_ns: u64,
}

/// A body, with its position left to who writes it.
#[derive(Clone, Debug)]
pub enum Body {
    /// Nothing.
    None,
    /// Ready bytes, without pacing (listings, errors, the emulator's own door).
    Plain(Arc<[u8]>),
    /// Bytes of an object: from, to.
    Object {
        /// Where they come from.
        source: Source,
        /// First byte of the object.
        start: u64,
        /// One past the last.
        end: u64,
    },
}

impl Body {
    /// Bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Plain(bytes) => bytes.len() as u64,
            Self::Object { start, end, .. } => end - start,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes body bytes from `position` on into `out`; how many, at most `out.len()`.
    pub fn copy_out(&self, position: u64, out: &mut [u8]) -> usize {
        let take = (self.len() - position).min(out.len() as u64) as usize;
        let out = &mut out[..take];
        match self {
            Self::None => {}
            Self::Plain(bytes) => out.copy_from_slice(&bytes[position as usize..position as usize + take]),
            Self::Object { source: Source::Generated(content), start, .. } => {
                content.fill(start + position, out);
            }
            Self::Object { source: Source::Kept(bytes), start, .. } => {
                let from = (start + position) as usize;
                out.copy_from_slice(&bytes[from..from + take]);
            }
        }
        take
    }
}

/// The emulator's mind.
pub struct Origin {
    seed: u64,
    profile: Profile,
    catalog: Catalog,
    stats: Stats,
    // How often each key was asked, by its hash: the ordinal of the next draw.
    ordinals: HashMap<u64, u32>,
    // Both sides of a pair are one round, so that they meet the same luck.
    round: u32,
    requests: Bucket,
    bytes: Bucket,
}

impl Origin {
    /// An empty store.
    pub fn new(profile: Profile, seed: u64) -> Self {
        let (requests, bytes) = buckets(&profile);
        Self {
            seed,
            profile,
            catalog: Catalog::default(),
            stats: Stats::default(),
            ordinals: HashMap::new(),
            round: 0,
            requests,
            bytes,
        }
    }

    /// Adds objects.
    ///
    /// # Errors
    /// As [`Catalog::declare`].
    pub fn declare(&mut self, dataset: Dataset) -> Result<(), String> {
        self.catalog.declare(dataset)
    }

    /// The parameters in force.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The counters.
    pub fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// Grants body bytes under the cap to who asks at `now_ns`; from when on they may leave.
    pub fn reserve_bytes(&mut self, now_ns: u64, bytes: u64) -> u64 {
        self.bytes.reserve(now_ns, bytes as f64)
    }

    /// Decides. `body` is the whole request body; `now_ns` the instant when the request was complete.
    pub fn answer(&mut self, request: &Request, body: &[u8], now_ns: u64) -> Answer {
        let (path, query) = match request.target.split_once('?') {
            Some((path, query)) => (path, query),
            None => (request.target.as_str(), ""),
        };
        if let Some(door) = path.strip_prefix("/_emu/") {
            return self.own_door(&request.method, door, body);
        }
        let (name, kind, mut reply) = self.store(request, path, query, body);
        self.stats.count_request(name, reply.status);
        if name == "GET" && matches!(reply.body, Body::Object { .. }) {
            self.stats.counts_mut().gets_with_body += 1;
        }
        if request.if_match.is_some() || request.if_none_match.is_some() {
            self.stats.counts_mut().conditional += 1;
        }
        let key_hash = Hasher::oneshot(path.as_bytes());
        let ordinal = self.ordinals.entry(key_hash).or_default();
        let draw = self.profile.draw(self.seed, key_hash, (self.round, *ordinal), kind);
        *ordinal += 1;
        let mut qos_ns = self.requests.reserve(now_ns, 1.0) - now_ns;
        if !reply.body.is_empty() {
            qos_ns = qos_ns.max(self.bytes.backlog_ns(now_ns + draw.first_byte_ns));
        }
        if qos_ns >= MILLISECOND_NS {
            self.stats.counts_mut().qos_delayed += 1;
            let _ = write!(reply.headers, "x-tos-qos-delay-time: {}\r\n", qos_ns / MILLISECOND_NS);
        }
        reply.finish(Some(draw), qos_ns)
    }

    // What the store answers, and how long that kind of request takes.
    fn store(
        &mut self,
        request: &Request,
        path: &str,
        query: &str,
        body: &[u8],
    ) -> (&'static str, Kind, Reply) {
        let name = match request.method.as_str() {
            "GET" => "GET",
            "HEAD" => "HEAD",
            "PUT" => "PUT",
            "DELETE" => "DELETE",
            "POST" => "POST",
            _ => "OTHER",
        };
        let Some((bucket, key)) = split_path(path) else {
            return (
                name,
                Kind::Head,
                Reply::error(400, "InvalidURI", "the path is not /bucket/key in UTF-8", path),
            );
        };
        if let Some(what) = request.unsupported {
            return (name, Kind::Head, Reply::error(501, "NotImplemented", what, path));
        }
        if !self.catalog.has_bucket(&bucket) {
            let say = "declare a dataset in it first: PUT /_emu/datasets";
            return (name, Kind::Head, Reply::error(404, "NoSuchBucket", say, path));
        }
        let query = Query::parse(query);
        match (name, key.is_empty()) {
            ("HEAD", true) => (name, Kind::Head, Reply::new(200)),
            ("GET", true) if query.has("location") => {
                let say = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<LocationConstraint xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"/>";
                (name, Kind::Head, Reply::new(200).xml(say.to_owned()))
            }
            ("GET", true) if query.get("list-type") == Some("2") => {
                ("LIST", Kind::List, self.list(&bucket, &query, path))
            }
            (_, true) => {
                let say = "of buckets, only HEAD, ?location and ListObjectsV2 (list-type=2)";
                (name, Kind::Head, Reply::error(501, "NotImplemented", say, path))
            }
            ("GET" | "HEAD", false) => {
                let found = self.catalog.find(&bucket, &key);
                let class = found.as_ref().map_or_else(Default::default, |found| found.class);
                let kind = if name == "GET" { Kind::Get(class) } else { Kind::Head };
                (name, kind, read(request, path, found))
            }
            ("PUT", false) if !query.has_subresource() => {
                let reply = match self.catalog.put(&bucket, &key, body) {
                    Some(etag) => Reply::new(200).header("ETag", &etag),
                    None => Reply::error(
                        507,
                        "InsufficientStorage",
                        "64 MiB of PUT bodies are kept at most",
                        path,
                    ),
                };
                (name, Kind::Head, reply)
            }
            ("DELETE", false) if !query.has_subresource() => {
                self.catalog.delete(&bucket, &key);
                (name, Kind::Head, Reply::new(204))
            }
            _ => {
                let say = "of objects, only GET, HEAD, PUT and DELETE without sub-resources";
                (name, Kind::Head, Reply::error(501, "NotImplemented", say, path))
            }
        }
    }

    fn list(&self, bucket: &str, query: &Query, path: &str) -> Reply {
        if query.get("delimiter").is_some_and(|delimiter| !delimiter.is_empty()) {
            return Reply::error(501, "NotImplemented", "listings with a delimiter", path);
        }
        let prefix = query.get("prefix").unwrap_or("");
        let token = query.get("continuation-token");
        let after =
            match token.map(|token| hex::decode(token).ok().and_then(|raw| String::from_utf8(raw).ok())) {
                Some(Some(after)) => after,
                Some(None) => {
                    return Reply::error(400, "InvalidArgument", "that continuation token is not ours", path);
                }
                None => query.get("start-after").unwrap_or("").to_owned(),
            };
        let max = match query.get("max-keys").map(str::parse::<usize>) {
            Some(Ok(max)) => max.min(LIST_KEYS_MAX),
            Some(Err(_)) => return Reply::error(400, "InvalidArgument", "max-keys is not a number", path),
            None => LIST_KEYS_MAX,
        };
        let url = query.get("encoding-type") == Some("url");
        let shown =
            |text: &str| if url { utf8_percent_encode(text, URL_KEY).to_string() } else { escape(text) };
        let (listed, more) = self.catalog.list(bucket, prefix, &after, max);
        let mut xml = String::with_capacity(300 + listed.len() * 220);
        let _ = write!(
            xml,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
             <Name>{}</Name><Prefix>{}</Prefix><MaxKeys>{max}</MaxKeys><KeyCount>{}</KeyCount><IsTruncated>{more}</IsTruncated>",
            escape(bucket),
            shown(prefix),
            listed.len(),
        );
        if url {
            xml.push_str("<EncodingType>url</EncodingType>");
        }
        if let Some(token) = token {
            let _ = write!(xml, "<ContinuationToken>{token}</ContinuationToken>");
        }
        if more && let Some(last) = listed.last() {
            let next = hex::encode(&last.key);
            let _ = write!(xml, "<NextContinuationToken>{next}</NextContinuationToken>");
        }
        for one in &listed {
            let _ = write!(
                xml,
                "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>",
                shown(&one.key),
                iso_time(one.version),
                escape(&one.etag),
                one.size,
            );
        }
        xml.push_str("</ListBucketResult>");
        Reply::new(200).xml(xml)
    }

    fn own_door(&mut self, method: &str, door: &str, body: &[u8]) -> Answer {
        let outcome = match (method, door) {
            ("GET", "stats") => Ok(json!(self.stats.report())),
            ("POST", "stats/reset") => {
                self.stats.reset();
                Ok(json!({}))
            }
            ("PUT", "round") => parse::<u32>(body).map(|round| {
                self.round = round;
                self.ordinals.clear();
                json!(round)
            }),
            ("GET", "profile") => Ok(self.profile_text()),
            ("PUT", "profile") => parse::<Profile>(body).and_then(|profile| {
                profile.check()?;
                (self.requests, self.bytes) = buckets(&profile);
                self.profile = profile;
                self.ordinals.clear();
                Ok(self.profile_text())
            }),
            ("GET", "datasets") => Ok(json!(self.catalog.datasets())),
            ("PUT", "datasets") => parse::<Vec<Dataset>>(body).and_then(|datasets| {
                for dataset in datasets {
                    self.catalog.declare(dataset)?;
                }
                Ok(json!(self.catalog.datasets()))
            }),
            _ => Err(
                "there are GET stats, POST stats/reset, PUT round, GET and PUT profile, GET and PUT datasets"
                    .to_owned(),
            ),
        };
        let reply = match outcome {
            Ok(value) => Reply::new(200).json(&value),
            Err(error) => Reply::new(400).json(&json!({ "error": error })),
        };
        reply.finish(None, 0)
    }

    fn profile_text(&self) -> serde_json::Value {
        json!({ "name": self.profile.name, "sha256": self.profile.sha256(), "seed": self.seed, "params": self.profile })
    }
}

fn buckets(profile: &Profile) -> (Bucket, Bucket) {
    let mib = crate::units::MIB;
    let requests = Bucket::new(profile.requests_per_s, profile.requests_per_s / 10.0);
    (requests, Bucket::new(profile.cap_mib_s * mib, profile.cap_burst_mib * mib))
}

fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| error.to_string())
}

fn read(request: &Request, path: &str, found: Option<Found>) -> Reply {
    let Some(found) = found else {
        let mut reply =
            Reply::error(404, "NoSuchKey", "no dataset declares this key and nobody put it", path);
        if request.method == "HEAD" {
            reply.body = Body::None;
        }
        return reply;
    };
    if request.if_match.as_ref().is_some_and(|wanted| !names_etag(wanted, &found.etag)) {
        return Reply::error(412, "PreconditionFailed", "If-Match names another version", path)
            .without_body_for(&request.method);
    }
    let facts = |reply: Reply| {
        reply
            .header("ETag", &found.etag)
            .header("Last-Modified", &http_time(found.version))
            .header("Accept-Ranges", "bytes")
    };
    if request.if_none_match.as_ref().is_some_and(|held| names_etag(held, &found.etag)) {
        return facts(Reply::new(304));
    }
    let (start, end) = match request.range.as_deref().map(|range| resolve_range(range, found.size)) {
        None | Some(RangeAnswer::Ignore) => (0, None),
        Some(RangeAnswer::Part(start, end)) => (start, Some(end)),
        Some(RangeAnswer::Unsatisfiable) => {
            return Reply::error(416, "InvalidRange", "the range begins after the object's end", path)
                .header("Content-Range", &format!("bytes */{}", found.size))
                .without_body_for(&request.method);
        }
    };
    let mut reply = facts(Reply::new(if end.is_some() { 206 } else { 200 }))
        .header("Content-Type", "application/octet-stream");
    if let Some(end) = end {
        reply = reply.header("Content-Range", &format!("bytes {start}-{}/{}", end - 1, found.size));
    }
    reply.body = Body::Object { source: found.source, start, end: end.unwrap_or(found.size) };
    reply.without_body_for(&request.method)
}

enum RangeAnswer {
    Ignore,
    Part(u64, u64),
    Unsatisfiable,
}

// One range of bytes; anything else is ignored and the whole object sent, as S3 does.
fn resolve_range(text: &str, size: u64) -> RangeAnswer {
    let Some((first, last)) = text.strip_prefix("bytes=").and_then(|set| set.trim().split_once('-')) else {
        return RangeAnswer::Ignore;
    };
    let number = |digits: &str| {
        (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
            .then(|| digits.parse::<u64>().unwrap_or(u64::MAX))
    };
    match (number(first), number(last)) {
        (Some(first), _)
            if first >= size && (last.is_empty() || number(last).is_some_and(|last| last >= first)) =>
        {
            RangeAnswer::Unsatisfiable
        }
        (Some(first), Some(last)) if first <= last => {
            RangeAnswer::Part(first, last.saturating_add(1).min(size))
        }
        (Some(first), None) if last.is_empty() => RangeAnswer::Part(first, size),
        (None, Some(length)) if first.is_empty() => {
            if length == 0 || size == 0 {
                RangeAnswer::Unsatisfiable
            } else {
                RangeAnswer::Part(size.saturating_sub(length), size)
            }
        }
        _ => RangeAnswer::Ignore,
    }
}

fn names_etag(list: &str, etag: &str) -> bool {
    let bare = etag.trim_matches('"');
    list.split(',')
        .map(str::trim)
        .any(|one| one == "*" || one.trim_start_matches("W/").trim_matches('"') == bare)
}

fn split_path(path: &str) -> Option<(String, String)> {
    let path = path.strip_prefix('/')?;
    let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
    let decoded = |text: &str| percent_decode_str(text).decode_utf8().ok().map(std::borrow::Cow::into_owned);
    let bucket = decoded(bucket)?;
    if bucket.is_empty() { None } else { Some((bucket, decoded(key)?)) }
}

struct Query(Vec<(String, String)>);

impl Query {
    fn parse(text: &str) -> Self {
        let decoded =
            |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(n, v)| (decoded(n), decoded(v)))
                .collect(),
        )
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    // Multipart, tagging, ACLs and the like change what a PUT or DELETE means; a signature in the query does not.
    fn has_subresource(&self) -> bool {
        self.0
            .iter()
            .any(|(name, _)| !name.starts_with("X-Amz-") && !name.starts_with("X-Tos-") && name != "x-id")
    }
}

const URL_KEY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "&#{};", c as u32);
            }
            c => out.push(c),
        }
    }
    out
}

fn modified(version: u32) -> std::time::SystemTime {
    UNIX_EPOCH + Duration::from_secs(EPOCH_SECONDS + 60 * u64::from(version))
}

fn http_time(version: u32) -> String {
    httpdate::fmt_http_date(modified(version))
}

fn iso_time(version: u32) -> String {
    let moment = time::OffsetDateTime::from(modified(version));
    moment.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}

struct Reply {
    status: u16,
    headers: String,
    body: Body,
    // HEAD: the length of the body that GET would have.
    length: Option<u64>,
}

impl Reply {
    fn new(status: u16) -> Self {
        Self { status, headers: String::new(), body: Body::None, length: None }
    }

    fn error(status: u16, code: &str, message: &str, resource: &str) -> Self {
        let xml = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{}</Message><Resource>{}</Resource></Error>",
            escape(message),
            escape(resource)
        );
        Self::new(status).xml(xml)
    }

    fn header(mut self, name: &str, value: &str) -> Self {
        let _ = write!(self.headers, "{name}: {value}\r\n");
        self
    }

    fn xml(mut self, text: String) -> Self {
        self.body = Body::Plain(Arc::from(text.into_bytes()));
        self.header("Content-Type", "application/xml")
    }

    fn json(mut self, value: &serde_json::Value) -> Self {
        self.body = Body::Plain(Arc::from(value.to_string().into_bytes()));
        self.header("Content-Type", "application/json")
    }

    fn without_body_for(mut self, method: &str) -> Self {
        if method == "HEAD" {
            self.length = Some(self.body.len());
            self.body = Body::None;
        }
        self
    }

    fn finish(self, draw: Option<Draw>, qos_ns: u64) -> Answer {
        let reason = match self.status {
            200 => "OK",
            204 => "No Content",
            206 => "Partial Content",
            304 => "Not Modified",
            400 => "Bad Request",
            404 => "Not Found",
            412 => "Precondition Failed",
            416 => "Range Not Satisfiable",
            501 => "Not Implemented",
            507 => "Insufficient Storage",
            _ => "Other",
        };
        let mut head =
            format!("HTTP/1.1 {} {reason}\r\nServer: forebay-bench-origin\r\n{}", self.status, self.headers);
        if !matches!(self.status, 204 | 304) {
            let _ = write!(head, "Content-Length: {}\r\n", self.length.unwrap_or(self.body.len()));
        }
        head.push_str("\r\n");
        Answer { head: head.into_bytes(), body: self.body, draw, qos_ns }
    }
}

/// The content of an object with a generated body, for who wants to check it.
pub fn generated(bucket: &str, key: &str, version: u32) -> Content {
    Content::new(format!("{bucket}/{key}").as_bytes(), version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(origin: &mut Origin, method: &str, target: &str, body: &[u8]) -> Answer {
        let request = Request { method: method.into(), target: target.into(), ..Request::default() };
        origin.answer(&request, body, 1_000_000_000)
    }

    #[test]
    fn two_sides_of_a_round_meet_the_same_luck_and_the_next_round_another() {
        let mut origin = Origin::new(Profile::named("tos-intranet-v1").expect("built in"), 7);
        ask(&mut origin, "PUT", "/_emu/datasets", br#"[{"bucket":"b","prefix":"d/","count":9,"size":100}]"#);
        let mut side = |round: &str| {
            ask(&mut origin, "PUT", "/_emu/round", round.as_bytes());
            let mut draws = Vec::new();
            for index in [3, 1, 3] {
                draws.push(
                    ask(&mut origin, "GET", &format!("/b/d/0000000{index}"), b"").draw.expect("delayed"),
                );
            }
            draws
        };
        let first = side("1");
        assert_eq!(first, side("1"));
        assert_ne!(first, side("2"));
        assert_ne!(first[0], first[2], "the second request for a key is another draw");
    }

    #[test]
    fn what_it_does_not_do_it_says() {
        let mut origin = Origin::new(Profile::named("raw").expect("built in"), 7);
        ask(&mut origin, "PUT", "/_emu/datasets", br#"[{"bucket":"b","prefix":"d/","count":1,"size":1}]"#);
        for (method, target) in
            [("POST", "/b/d/00000000?uploads"), ("GET", "/b?acl"), ("OPTIONS", "/b/d/00000000")]
        {
            let answer = ask(&mut origin, method, target, b"");
            assert!(answer.head.starts_with(b"HTTP/1.1 501 "), "{method} {target}");
        }
        assert!(ask(&mut origin, "GET", "/_emu/nothing", b"").head.starts_with(b"HTTP/1.1 400 "));
        let refused = ask(
            &mut origin,
            "PUT",
            "/_emu/datasets",
            br#"[{"bucket":"a/b","prefix":"","count":1,"size":1}]"#,
        );
        assert!(refused.head.starts_with(b"HTTP/1.1 400 "));
    }
}
