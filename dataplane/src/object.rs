//! One version of an object: its identity, the headers we repeat, and what a client's conditions make of it.
//!
//! Everything comes from one origin response, the one that carried the bytes (or the HEAD), never from two.
//! An entity tag is an opaque word: it is repeated as it came and compared without its quotes, because some
//! clients send it back without them. What has no strong tag has no identity and is never kept. Headers are
//! encoded once, when the origin answers, so that a hit only copies them.
#![forbid(unsafe_code)]

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use http::header::{ETAG, LAST_MODIFIED};
use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use crate::range::OBJECT_BYTES_MAX;

/// What we know of one version of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFacts {
    /// The entity tag as the origin sent it, with quotes and a `W/` if there was one.
    pub etag: Option<Box<str>>,
    /// Size of the whole object in bytes.
    pub size: u64,
    /// `Last-Modified` as the origin sent it.
    pub last_modified: Option<Box<str>>,
    /// The headers repeated on every answer about this version.
    pub record: HeaderRecord,
}

impl ObjectFacts {
    /// Facts of an object of `size` bytes from the headers of one origin response. A tag or date that comes
    /// twice, or is not printable ASCII, counts as absent.
    pub fn from_headers(headers: &HeaderMap, size: u64) -> Self {
        Self {
            etag: single(headers, &ETAG),
            size,
            last_modified: single(headers, &LAST_MODIFIED),
            record: HeaderRecord::from_headers(headers),
        }
    }

    /// Whether this version may be kept: it has a strong tag that says something, was not sealed with a
    /// customer's key, and its extents can be numbered.
    pub fn is_cacheable(&self) -> bool {
        let strong = self.etag.as_deref().is_some_and(|tag| {
            let tag = Tag::parse(tag.as_bytes());
            !tag.weak && !tag.opaque.is_empty()
        });
        strong && self.size <= OBJECT_BYTES_MAX && !self.record.has_prefix(CUSTOMER_KEY_PREFIX)
    }

    /// Identity of this version of the object whose key hashes to `key_hash`. The same in every process and
    /// release: it is written to drives.
    pub fn version(&self, key_hash: u64) -> VersionId {
        let mut hash = Sha256::new();
        hash.update(b"forebay version 1\0");
        hash.update(key_hash.to_le_bytes());
        hash.update(self.size.to_le_bytes());
        for text in [&self.etag, &self.last_modified] {
            // Length first, so that no two pairs of texts run together; absent differs from empty.
            let length = text.as_ref().map_or(u64::MAX, |text| text.len() as u64);
            hash.update(length.to_le_bytes());
            hash.update(text.as_deref().unwrap_or_default());
        }
        let digest = hash.finalize();
        VersionId(u64::from_le_bytes(digest[..8].try_into().expect("a digest has 32 bytes")))
    }
}

const CUSTOMER_KEY_PREFIX: &str = "x-amz-server-side-encryption-customer-";

fn single(headers: &HeaderMap, name: &http::HeaderName) -> Option<Box<str>> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    let text = value.to_str().ok()?.trim();
    values.next().is_none().then(|| text.into())
}

/// Names one version of one object, stable over restarts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VersionId(pub u64);

impl fmt::Debug for VersionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Lines `Name: value\r\n`, ready to be sent: what the origin said of the object and we repeat on 200, 206,
/// HEAD and (without its `Content-*` lines) 304.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct HeaderRecord(Box<[u8]>);

impl HeaderRecord {
    /// Takes the lines worth repeating out of an origin response. Lengths, ranges, dates, request ids and
    /// whole-object checksums stay behind: they belong to that response, not to the object.
    pub fn from_headers(headers: &HeaderMap) -> Self {
        let mut lines = Vec::with_capacity(256);
        for (name, value) in headers {
            if let Some(name) = repeated_name(name.as_str()) {
                lines.extend_from_slice(name.as_bytes());
                lines.extend_from_slice(b": ");
                lines.extend_from_slice(value.as_bytes().trim_ascii());
                lines.extend_from_slice(b"\r\n");
            }
        }
        Self(lines.into_boxed_slice())
    }

    /// The encoded lines, each with its CRLF.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Size in bytes, as it counts against the metadata budget.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no line was worth repeating.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The lines one by one, each with its CRLF.
    pub fn lines(&self) -> impl Iterator<Item = &[u8]> {
        // Values hold no line feed: the origin client refuses them in a header.
        self.0.split_inclusive(|&byte| byte == b'\n')
    }

    /// First value of `name`, any case.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.lines().find_map(|line| {
            let (found, rest) = line.split_at_checked(name.len())?;
            let value = rest.strip_prefix(b": ")?;
            found.eq_ignore_ascii_case(name.as_bytes()).then(|| value.trim_ascii_end())
        })
    }

    fn has_prefix(&self, prefix: &str) -> bool {
        self.lines().any(|line| {
            line.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
        })
    }
}

impl fmt::Debug for HeaderRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderRecord({:?})", String::from_utf8_lossy(&self.0))
    }
}

/// The name under which a header of the origin is repeated, or `None` when it is not. `name` is lower case.
fn repeated_name(name: &str) -> Option<&str> {
    // Spelled as most stores spell them, for clients that look with a case-sensitive eye.
    const PLAIN: [&str; 8] = [
        "ETag",
        "Last-Modified",
        "Content-Type",
        "Content-Encoding",
        "Content-Language",
        "Content-Disposition",
        "Cache-Control",
        "Expires",
    ];
    const AMZ: [&str; 11] = [
        "x-amz-version-id",
        "x-amz-storage-class",
        "x-amz-missing-meta",
        "x-amz-tagging-count",
        "x-amz-website-redirect-location",
        "x-amz-replication-status",
        "x-amz-expiration",
        "x-amz-restore",
        "x-amz-object-lock-mode",
        "x-amz-object-lock-retain-until-date",
        "x-amz-object-lock-legal-hold",
    ];
    // Of the response, not of the object.
    const TOS_OF_RESPONSE: [&str; 5] =
        ["x-tos-request-id", "x-tos-id-2", "x-tos-ec", "x-tos-delete-marker", "x-tos-trailer"];

    if name.starts_with("x-amz-") {
        let kept = name.starts_with("x-amz-meta-")
            || name.starts_with("x-amz-server-side-encryption")
            || AMZ.contains(&name);
        return kept.then_some(name);
    }
    if name.starts_with("x-tos-") {
        // `x-tos-hash-crc64ecma` is the whole object's also on a 206, and clients compare it there; a sum
        // over the range belongs to that one response.
        let kept = !TOS_OF_RESPONSE.contains(&name) && !name.starts_with("x-tos-hash-range-");
        return kept.then_some(name);
    }
    PLAIN.into_iter().find(|plain| plain.eq_ignore_ascii_case(name))
}

/// The conditions of a request, read once. A date that cannot be read, or comes twice, is no condition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// `If-Match`.
    pub if_match: Option<TagList>,
    /// `If-None-Match`.
    pub if_none_match: Option<TagList>,
    /// `If-Modified-Since`, seconds since 1970.
    pub if_modified_since: Option<u64>,
    /// `If-Unmodified-Since`, seconds since 1970.
    pub if_unmodified_since: Option<u64>,
    /// `If-Range`.
    pub if_range: Option<IfRange>,
}

/// What becomes of a GET or HEAD after its conditions were judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Answer, with the range that was asked for, if any.
    Proceed,
    /// Answer the whole object: `If-Range` says that the client holds another version.
    ProceedWhole,
    /// 304.
    NotModified,
    /// 412.
    Failed,
}

impl Conditions {
    /// Picks the conditions out of a request's header fields, given as name and value, any case.
    pub fn from_fields<'a>(fields: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut conditions = Self::default();
        let (mut modified, mut unmodified, mut range) = (Once::Absent, Once::Absent, Once::Absent);
        for (name, value) in fields {
            // Nearly every header leaves here: two bytes tell.
            if !name.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("if-")) {
                continue;
            }
            if name.eq_ignore_ascii_case("if-match") {
                conditions.if_match.get_or_insert_default().extend(value);
            } else if name.eq_ignore_ascii_case("if-none-match") {
                conditions.if_none_match.get_or_insert_default().extend(value);
            } else if name.eq_ignore_ascii_case("if-modified-since") {
                modified.see(value);
            } else if name.eq_ignore_ascii_case("if-unmodified-since") {
                unmodified.see(value);
            } else if name.eq_ignore_ascii_case("if-range") {
                range.see(value);
            }
        }
        conditions.if_modified_since = modified.value().and_then(parse_date);
        conditions.if_unmodified_since = unmodified.value().and_then(parse_date);
        conditions.if_range = match range {
            Once::Absent => None,
            Once::Value(value) => Some(IfRange::parse(value)),
            // Two validators for one range: neither holds, so the whole object is the safe answer.
            Once::Several => Some(IfRange::Never),
        };
        conditions
    }

    /// Whether the request is unconditional.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Judges a GET or HEAD against the version we hold, in the order of RFC 9110 section 13.2.2. Whether
    /// there is a range at all, and one that can be satisfied, is looked at after this.
    pub fn judge(&self, facts: &ObjectFacts) -> Verdict {
        if self.is_empty() {
            // As nearly every request: nothing to be read out of texts.
            return Verdict::Proceed;
        }
        let tag = facts.etag.as_deref().map(|tag| Tag::parse(tag.as_bytes()));
        let modified = facts.last_modified.as_deref().and_then(|date| parse_date(date.as_bytes()));

        if let Some(list) = &self.if_match {
            if !list.matches(tag, Comparison::Strong) {
                return Verdict::Failed;
            }
        } else if let (Some(limit), Some(modified)) = (self.if_unmodified_since, modified)
            && modified > limit
        {
            return Verdict::Failed;
        }

        if let Some(list) = &self.if_none_match {
            if list.matches(tag, Comparison::Weak) {
                return Verdict::NotModified;
            }
        } else if let (Some(limit), Some(modified)) = (self.if_modified_since, modified)
            && modified <= limit
        {
            return Verdict::NotModified;
        }

        match &self.if_range {
            Some(validator) if !validator.holds(tag, modified) => Verdict::ProceedWhole,
            _ => Verdict::Proceed,
        }
    }
}

/// A header that must not come twice.
enum Once<'a> {
    Absent,
    Value(&'a [u8]),
    Several,
}

impl<'a> Once<'a> {
    fn see(&mut self, value: &'a [u8]) {
        *self = match self {
            Self::Absent => Self::Value(value),
            _ => Self::Several,
        };
    }

    fn value(&self) -> Option<&'a [u8]> {
        if let Self::Value(value) = self { Some(value) } else { None }
    }
}

/// Seconds since 1970 of an HTTP date in any of its three forms.
fn parse_date(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value.trim_ascii()).ok()?;
    let time: SystemTime = httpdate::parse_http_date(text).ok()?;
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// The value of `If-Match` or `If-None-Match`; repeated headers make one list.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TagList {
    // One quoted MD5 has 34 bytes, a multipart tag up to 40: no allocation for what clients really send.
    text: SmallVec<[u8; 40]>,
}

impl TagList {
    /// The list as it would stand in one header.
    pub fn as_bytes(&self) -> &[u8] {
        &self.text
    }

    fn extend(&mut self, value: &[u8]) {
        if !self.text.is_empty() {
            self.text.extend_from_slice(b", ");
        }
        self.text.extend_from_slice(value);
    }

    fn matches(&self, held: Option<Tag<'_>>, comparison: Comparison) -> bool {
        // `*` asks whether there is any current version; that we hold facts says so.
        if self.text.trim_ascii() == b"*" {
            return true;
        }
        held.is_some_and(|held| Tags { rest: &self.text }.any(|tag| tag.equals(held, comparison)))
    }
}

impl fmt::Debug for TagList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", String::from_utf8_lossy(&self.text))
    }
}

/// The value of `If-Range`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IfRange {
    /// An entity tag.
    Tag(TagList),
    /// A date, seconds since 1970; it must be the very one of the object.
    Date(u64),
    /// Something that holds for no version.
    Never,
}

impl IfRange {
    fn parse(value: &[u8]) -> Self {
        match parse_date(value) {
            Some(seconds) => Self::Date(seconds),
            None => Self::Tag(TagList { text: SmallVec::from_slice(value) }),
        }
    }

    fn holds(&self, tag: Option<Tag<'_>>, modified: Option<u64>) -> bool {
        match self {
            // One tag, not a list and not `*`.
            Self::Tag(text) => tag.is_some_and(|tag| Tag::parse(&text.text).equals(tag, Comparison::Strong)),
            Self::Date(seconds) => modified == Some(*seconds),
            Self::Never => false,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Strong,
    Weak,
}

/// An entity tag taken apart.
#[derive(Clone, Copy)]
struct Tag<'a> {
    weak: bool,
    /// Without the quotes.
    opaque: &'a [u8],
}

impl<'a> Tag<'a> {
    fn parse(text: &'a [u8]) -> Self {
        let text = text.trim_ascii();
        let (weak, opaque) = match text.strip_prefix(b"W/") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let bare = opaque.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
        Self { weak, opaque: bare.unwrap_or(opaque) }
    }

    fn equals(self, other: Self, comparison: Comparison) -> bool {
        let strong_enough = comparison == Comparison::Weak || !(self.weak || other.weak);
        // An empty tag says nothing, so it equals nothing.
        strong_enough && !self.opaque.is_empty() && self.opaque == other.opaque
    }
}

/// Walks a list of tags. A comma inside quotes belongs to the tag; members without quotes end at a comma.
struct Tags<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Tags<'a> {
    type Item = Tag<'a>;

    fn next(&mut self) -> Option<Tag<'a>> {
        let start = self.rest.iter().position(|byte| !matches!(byte, b',' | b' ' | b'\t'))?;
        let text = &self.rest[start..];
        let mut quoted = false;
        let end = text.iter().position(|&byte| {
            quoted ^= byte == b'"';
            byte == b',' && !quoted
        });
        let (member, rest) = text.split_at(end.unwrap_or(text.len()));
        self.rest = rest;
        Some(Tag::parse(member))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};
    use proptest::prelude::*;

    const MODIFIED: &str = "Mon, 30 Nov 2026 17:44:00 GMT";
    const EARLIER: &str = "Mon, 30 Nov 2026 17:43:59 GMT";
    const LATER: &str = "Mon, 30 Nov 2026 17:44:01 GMT";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        map
    }

    fn facts(etag: &str) -> ObjectFacts {
        ObjectFacts::from_headers(&headers(&[("etag", etag), ("last-modified", MODIFIED)]), 100)
    }

    fn conditions(fields: &[(&str, &str)]) -> Conditions {
        Conditions::from_fields(fields.iter().map(|(name, value)| (*name, value.as_bytes())))
    }

    #[test]
    fn conditions_are_judged_in_the_order_of_the_rfc() {
        use Verdict::{Failed, NotModified, Proceed, ProceedWhole};
        let table: &[(&[(&str, &str)], Verdict)] = &[
            (&[], Proceed),
            (&[("if-match", "\"a\"")], Proceed),
            (&[("If-Match", "a")], Proceed),
            (&[("if-match", "\"b\"")], Failed),
            (&[("if-match", "*")], Proceed),
            (&[("if-match", "\"b\", \"a\"")], Proceed),
            (&[("if-match", "\"b\""), ("if-match", "\"a\"")], Proceed),
            (&[("if-match", "\"b\", W/\"a\"")], Failed),
            (&[("if-match", "\"a, b\"")], Failed),
            (&[("if-match", "")], Failed),
            (&[("if-match", "\"\"")], Failed),
            (&[("if-match", "\"A\"")], Failed),
            (&[("if-none-match", "\"a\"")], NotModified),
            (&[("if-none-match", "a")], NotModified),
            (&[("if-none-match", "W/\"a\"")], NotModified),
            (&[("if-none-match", "\"x\" ,\"y\",, W/\"a\"")], NotModified),
            (&[("if-none-match", "*")], NotModified),
            (&[("if-none-match", "\"b\"")], Proceed),
            (&[("if-modified-since", MODIFIED)], NotModified),
            (&[("if-modified-since", LATER)], NotModified),
            (&[("if-modified-since", EARLIER)], Proceed),
            (&[("if-modified-since", "yesterday")], Proceed),
            (&[("if-modified-since", MODIFIED), ("if-modified-since", MODIFIED)], Proceed),
            (&[("if-unmodified-since", MODIFIED)], Proceed),
            (&[("if-unmodified-since", LATER)], Proceed),
            (&[("if-unmodified-since", EARLIER)], Failed),
            (&[("if-unmodified-since", "30/11/2026")], Proceed),
            // The tag decides, the date beside it is not asked.
            (&[("if-match", "\"a\""), ("if-unmodified-since", EARLIER)], Proceed),
            (&[("if-none-match", "\"b\""), ("if-modified-since", MODIFIED)], Proceed),
            // 412 comes before 304.
            (&[("if-match", "\"b\""), ("if-none-match", "\"a\"")], Failed),
            (&[("if-match", "\"a\""), ("if-none-match", "\"a\"")], NotModified),
            (&[("if-unmodified-since", EARLIER), ("if-none-match", "\"a\"")], Failed),
            (&[("if-match", "\"a\""), ("if-modified-since", MODIFIED)], NotModified),
            // If-Range comes last, and only widens.
            (&[("if-range", "\"a\"")], Proceed),
            (&[("if-range", "a")], Proceed),
            (&[("if-range", "\"b\"")], ProceedWhole),
            (&[("if-range", "W/\"a\"")], ProceedWhole),
            (&[("if-range", "*")], ProceedWhole),
            (&[("if-range", "\"a\", \"b\"")], ProceedWhole),
            (&[("if-range", MODIFIED)], Proceed),
            (&[("if-range", EARLIER)], ProceedWhole),
            (&[("if-range", LATER)], ProceedWhole),
            (&[("if-range", "")], ProceedWhole),
            (&[("if-range", "\"a\""), ("if-range", "\"a\"")], ProceedWhole),
            (&[("if-match", "\"b\""), ("if-range", "\"a\"")], Failed),
            (&[("if-none-match", "\"a\""), ("if-range", "\"b\"")], NotModified),
        ];
        for (fields, expected) in table {
            assert_eq!(conditions(fields).judge(&facts("\"a\"")), *expected, "{fields:?}");
        }
    }

    #[test]
    fn a_weak_or_missing_tag_matches_nothing_strongly() {
        let weak = facts("W/\"a\"");
        assert_eq!(conditions(&[("if-match", "\"a\"")]).judge(&weak), Verdict::Failed);
        assert_eq!(conditions(&[("if-match", "W/\"a\"")]).judge(&weak), Verdict::Failed);
        assert_eq!(conditions(&[("if-none-match", "\"a\"")]).judge(&weak), Verdict::NotModified);
        assert_eq!(conditions(&[("if-range", "W/\"a\"")]).judge(&weak), Verdict::ProceedWhole);
        let bare = ObjectFacts::from_headers(&HeaderMap::new(), 1);
        assert_eq!(conditions(&[("if-match", "\"a\"")]).judge(&bare), Verdict::Failed);
        assert_eq!(conditions(&[("if-match", "*")]).judge(&bare), Verdict::Proceed);
        assert_eq!(conditions(&[("if-none-match", "*")]).judge(&bare), Verdict::NotModified);
        assert_eq!(conditions(&[("if-modified-since", MODIFIED)]).judge(&bare), Verdict::Proceed);
        assert_eq!(conditions(&[("if-unmodified-since", EARLIER)]).judge(&bare), Verdict::Proceed);
        assert_eq!(conditions(&[("if-range", MODIFIED)]).judge(&bare), Verdict::ProceedWhole);
    }

    #[test]
    fn tags_are_compared_without_quotes_on_either_side() {
        let unquoted = facts("a");
        assert!(unquoted.is_cacheable());
        assert_eq!(conditions(&[("if-match", "\"a\"")]).judge(&unquoted), Verdict::Proceed);
        assert_eq!(conditions(&[("if-none-match", "a")]).judge(&unquoted), Verdict::NotModified);
    }

    #[test]
    fn dates_are_read_in_their_three_forms() {
        for text in
            ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
        {
            assert_eq!(parse_date(text.as_bytes()), Some(784_111_777), "{text}");
        }
        for text in [
            "",
            "now",
            "2026-11-30T17:44:00Z",
            "20261130T174400Z",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 1994 25:49:37 GMT",
            "Sun, 32 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 CET",
            "Thu, 01 Jan 1903 00:00:00 GMT",
        ] {
            assert_eq!(parse_date(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn nothing_without_a_strong_tag_is_kept() {
        for (etag, kept) in
            [("\"a\"", true), ("W/\"a\"", false), ("\"\"", false), ("", false), ("W/", false), ("a", true)]
        {
            assert_eq!(facts(etag).is_cacheable(), kept, "{etag:?}");
        }
        assert!(!ObjectFacts::from_headers(&HeaderMap::new(), 1).is_cacheable());
        let twice = ObjectFacts::from_headers(&headers(&[("etag", "\"a\""), ("etag", "\"b\"")]), 1);
        assert_eq!((twice.etag.clone(), twice.is_cacheable()), (None, false));
        let huge = ObjectFacts { size: OBJECT_BYTES_MAX + 1, ..facts("\"a\"") };
        assert!(!huge.is_cacheable());
        let sealed = ObjectFacts::from_headers(
            &headers(&[("etag", "\"a\""), ("x-amz-server-side-encryption-customer-algorithm", "AES256")]),
            1,
        );
        assert!(!sealed.is_cacheable());
    }

    #[test]
    fn a_version_changes_with_everything_that_names_it() {
        let base = facts("\"a\"");
        let id = base.version(7);
        assert_eq!(id, base.clone().version(7));
        assert_ne!(id, base.version(8));
        assert_ne!(id, facts("\"b\"").version(7));
        assert_ne!(id, ObjectFacts { size: 101, ..base.clone() }.version(7), "same tag, other size");
        assert_ne!(id, ObjectFacts { last_modified: Some(LATER.into()), ..base.clone() }.version(7));
        let absent = ObjectFacts { last_modified: None, ..base.clone() };
        let empty = ObjectFacts { last_modified: Some("".into()), ..base.clone() };
        assert_ne!(absent.version(7), empty.version(7));
        let other_headers = ObjectFacts { record: HeaderRecord::default(), ..base };
        assert_eq!(id, other_headers.version(7));
        // Written to drives: a change of this number makes every cached byte a stranger.
        assert_eq!(format!("{id:?}"), "e23bd56be0d24a17");
    }

    #[test]
    fn the_record_repeats_the_object_and_not_the_response() {
        let record = HeaderRecord::from_headers(&headers(&[
            ("date", MODIFIED),
            ("server", "store"),
            ("connection", "close"),
            ("content-length", "5"),
            ("content-range", "bytes 0-4/100"),
            ("accept-ranges", "bytes"),
            ("transfer-encoding", "chunked"),
            ("etag", "\"a\""),
            ("last-modified", MODIFIED),
            ("content-type", "text/plain"),
            ("x-amz-meta-mtime", " 1796060673.58 "),
            ("x-amz-meta-name", "caf\u{e9}"),
            ("x-amz-request-id", "1"),
            ("x-amz-id-2", "2"),
            ("x-amz-checksum-crc32", "6LiFlw=="),
            ("x-amz-checksum-type", "FULL_OBJECT"),
            ("x-amz-mp-parts-count", "3"),
            ("x-amz-server-side-encryption", "AES256"),
            ("x-tos-request-id", "3"),
            ("x-tos-id-2", "4"),
            ("x-tos-hash-crc64ecma", "17"),
            ("x-tos-hash-range-crc64ecma", "18"),
            ("set-cookie", "a=b"),
        ]));
        let expected = "ETag: \"a\"\r\nLast-Modified: Mon, 30 Nov 2026 17:44:00 GMT\r\n\
             Content-Type: text/plain\r\nx-amz-meta-mtime: 1796060673.58\r\nx-amz-meta-name: caf\u{e9}\r\n\
             x-amz-server-side-encryption: AES256\r\nx-tos-hash-crc64ecma: 17\r\n";
        let mut found: Vec<&[u8]> = record.lines().collect();
        let mut wanted: Vec<&[u8]> = expected.as_bytes().split_inclusive(|&byte| byte == b'\n').collect();
        found.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(found, wanted, "{record:?}");
        assert_eq!(record.get("etag"), Some(&b"\"a\""[..]));
        assert_eq!(record.get("ETAG"), Some(&b"\"a\""[..]));
        assert_eq!(record.get("x-amz-meta"), None);
        assert_eq!(record.len(), expected.len());
    }

    proptest! {
        #[test]
        fn no_condition_panics(
            name in prop::sample::select(vec![
                "if-match", "if-none-match", "if-range", "if-modified-since", "if-unmodified-since"
            ]),
            value in prop::collection::vec(prop::sample::select(b"\"\"W/,ab *\x80GMT".to_vec()), 0..20),
        ) {
            let _ = Conditions::from_fields([(name, &value[..])]).judge(&facts("\"a\""));
        }

        #[test]
        fn a_tag_in_a_list_is_found(tags in prop::collection::vec("[a-z,0-9-]{1,12}", 1..6), at: prop::sample::Index) {
            let list = tags.iter().map(|tag| format!("\"{tag}\"")).collect::<Vec<_>>().join(", ");
            let held = facts(&format!("\"{}\"", tags[at.index(tags.len())]));
            prop_assert_eq!(conditions(&[("if-match", &list)]).judge(&held), Verdict::Proceed);
            prop_assert_eq!(conditions(&[("if-none-match", &list)]).judge(&held), Verdict::NotModified);
        }
    }
}
