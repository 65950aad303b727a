//! What an answer's head means, given what was asked. Pure: a status and headers come in, a judgement goes out.
//!
//! Every reply is checked before a byte of it may be stored: start, end and total of a 206 must be those of the
//! question, a 200 to a ranged question is the whole object and says so, and the size is only ever the total of
//! Content-Range or the length of a 200. `ETag`, size and headers come from the reply that carries the bytes, so they
//! cannot belong to another version. Whatever is not understood is `Other`, to be relayed and never stored.
#![forbid(unsafe_code)]

use super::error::OriginError;
use super::{Ask, AskRange};
use crate::object::ObjectFacts;
use crate::range::ByteRange;
use http::HeaderMap;
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderName, TRANSFER_ENCODING};

/// An `Answer` before its body is attached.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Judgement {
    /// The body is these bytes of the object.
    Bytes { facts: ObjectFacts, range: ByteRange },
    /// An object of no bytes.
    Empty { facts: ObjectFacts },
    /// HEAD found the object.
    Found { facts: ObjectFacts },
    /// The version we named is still the one.
    NotModified,
    /// The version we pinned is gone.
    Changed,
    /// The object ends before the first byte we asked for.
    Unsatisfiable { size: Option<u64> },
    /// For the caller to relay.
    Other,
}

/// Judges the answer to a GET.
///
/// # Errors
/// `Invalid`, when the head contradicts the question or itself.
pub(super) fn judge_get(ask: &Ask, status: u16, headers: &HeaderMap) -> Result<Judgement, OriginError> {
    match status {
        200 => whole(ask, headers),
        206 => part(ask, headers),
        304 if ask.if_none_match.is_some() => Ok(Judgement::NotModified),
        412 if ask.if_match.is_some() => Ok(Judgement::Changed),
        416 => past_the_end(ask.range, headers),
        _ => Ok(Judgement::Other),
    }
}

/// Judges the answer to a HEAD.
///
/// # Errors
/// `Invalid`, when the head contradicts itself.
pub(super) fn judge_head(
    if_none_match: Option<&str>,
    status: u16,
    headers: &HeaderMap,
) -> Result<Judgement, OriginError> {
    match status {
        200 => Ok(match declared_length(headers)? {
            Some(size) => Judgement::Found { facts: ObjectFacts::from_headers(headers, size) },
            None => Judgement::Other,
        }),
        304 if if_none_match.is_some() => Ok(Judgement::NotModified),
        _ => Ok(Judgement::Other),
    }
}

fn whole(ask: &Ask, headers: &HeaderMap) -> Result<Judgement, OriginError> {
    if headers.contains_key(CONTENT_RANGE) {
        return Err(OriginError::invalid("a 200 with a Content-Range"));
    }
    // Without a length nobody can tell a whole body from one cut short, so it is not ours to keep.
    let Some(size) = declared_length(headers)? else { return Ok(Judgement::Other) };
    let facts = ObjectFacts::from_headers(headers, size);
    if !is_pinned_version(ask, &facts)? {
        return Ok(Judgement::Changed);
    }
    let Some(range) = ByteRange::new(0, size) else { return Ok(Judgement::Empty { facts }) };
    match ask.range {
        AskRange::Bytes(asked) if asked.start() >= size => Ok(Judgement::Unsatisfiable { size: Some(size) }),
        _ => Ok(Judgement::Bytes { facts, range }),
    }
}

fn part(ask: &Ask, headers: &HeaderMap) -> Result<Judgement, OriginError> {
    let invalid = |reason: &str| Err(OriginError::invalid(format!("{reason}, when {} was asked", ask.range)));
    let Some(value) = only(headers, &CONTENT_RANGE)? else { return invalid("a 206 without a Content-Range") };
    let Some(ContentRange::Span { first, last, total }) = parse_content_range(value) else {
        return invalid("a 206 whose Content-Range cannot be read");
    };
    let span = ByteRange::new(first, last + 1).expect("parsed as first <= last < total");
    let expected = match ask.range {
        AskRange::Whole => return invalid("a 206"),
        AskRange::Bytes(asked) => ByteRange::new(asked.start(), asked.end().min(total)),
        AskRange::Suffix(length) => ByteRange::new(total.saturating_sub(length), total),
    };
    if expected != Some(span) {
        return invalid(&format!("a 206 with bytes {first}-{last}/{total}"));
    }
    if declared_length(headers)?.is_some_and(|length| length != span.len()) {
        return invalid("a 206 whose Content-Length is not that of its Content-Range");
    }
    let facts = ObjectFacts::from_headers(headers, total);
    if !is_pinned_version(ask, &facts)? {
        return Ok(Judgement::Changed);
    }
    Ok(Judgement::Bytes { facts, range: span })
}

fn past_the_end(range: AskRange, headers: &HeaderMap) -> Result<Judgement, OriginError> {
    let size = match only(headers, &CONTENT_RANGE)?.map(parse_content_range) {
        Some(Some(ContentRange::Unsatisfied { total })) => Some(total),
        _ => None,
    };
    match (range, size) {
        (AskRange::Whole, _) => Ok(Judgement::Other),
        (AskRange::Bytes(asked), Some(total)) if asked.start() < total => {
            Err(OriginError::invalid(format!("a 416 that says {total} bytes, when {range} was asked")))
        }
        _ => Ok(Judgement::Unsatisfiable { size }),
    }
}

/// Some servers ignore If-Match. The `ETag` beside the bytes tells, so we look ourselves.
fn is_pinned_version(ask: &Ask, facts: &ObjectFacts) -> Result<bool, OriginError> {
    let Some(pinned) = ask.if_match.as_deref() else { return Ok(true) };
    match facts.etag.as_deref() {
        Some(found) => Ok(pinned == "*" || unquoted(pinned) == unquoted(found)),
        None => Err(OriginError::invalid("no ETag in an answer to If-Match")),
    }
}

fn unquoted(etag: &str) -> &str {
    etag.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(etag)
}

/// The length that the answer commits itself to; `None` where the body is chunked or ends with the connection.
fn declared_length(headers: &HeaderMap) -> Result<Option<u64>, OriginError> {
    if headers.contains_key(TRANSFER_ENCODING) {
        return Ok(None);
    }
    match only(headers, &CONTENT_LENGTH)? {
        None => Ok(None),
        Some(value) => match parse_number(value) {
            Some(length) => Ok(Some(length)),
            None => Err(OriginError::invalid("a Content-Length that is no number")),
        },
    }
}

fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a [u8]>, OriginError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.any(|other| Some(other) != first) {
        return Err(OriginError::invalid(format!("two different {name} headers")));
    }
    Ok(first.map(http::HeaderValue::as_bytes))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContentRange {
    /// `bytes first-last/total`, with `first <= last < total`.
    Span { first: u64, last: u64, total: u64 },
    /// `bytes */total`
    Unsatisfied { total: u64 },
}

fn parse_content_range(value: &[u8]) -> Option<ContentRange> {
    let (unit, rest) = value.trim_ascii().split_at_checked(5)?;
    if !unit.eq_ignore_ascii_case(b"bytes") || !rest.starts_with(b" ") {
        return None;
    }
    let rest = rest.trim_ascii();
    let slash = rest.iter().position(|&b| b == b'/')?;
    let (span, total) = (&rest[..slash], parse_number(&rest[slash + 1..])?);
    if span == b"*" {
        return Some(ContentRange::Unsatisfied { total });
    }
    let dash = span.iter().position(|&b| b == b'-')?;
    let (first, last) = (parse_number(&span[..dash])?, parse_number(&span[dash + 1..])?);
    (first <= last && last < total).then_some(ContentRange::Span { first, last, total })
}

/// Digits only: no sign, no space, no overflow.
fn parse_number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        }
        map
    }

    /// What was asked, the headers that came, and what they are told as.
    type Case<'a> = (AskRange, &'a [(&'a str, &'a str)], &'a str);

    fn bytes(start: u64, end: u64) -> AskRange {
        AskRange::Bytes(ByteRange::new(start, end).unwrap())
    }

    /// One word for a judgement: `bytes a..b of n`, `empty`, `changed`, ….
    fn told(ask: &Ask, status: u16, pairs: &[(&str, &str)]) -> String {
        match judge_get(ask, status, &headers(pairs)) {
            Ok(Judgement::Bytes { facts, range }) => {
                format!("bytes {}..{} of {}", range.start(), range.end(), facts.size)
            }
            Ok(Judgement::Empty { facts }) => format!("empty of {}", facts.size),
            Ok(Judgement::Found { .. }) => "found".into(),
            Ok(Judgement::NotModified) => "not modified".into(),
            Ok(Judgement::Changed) => "changed".into(),
            Ok(Judgement::Unsatisfiable { size }) => format!("unsatisfiable {size:?}"),
            Ok(Judgement::Other) => "other".into(),
            Err(OriginError::Invalid { .. }) => "invalid".into(),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_part_is_taken_only_as_it_was_asked() {
        let cases: [Case; 30] = [
            (bytes(0, 100), &[("content-range", "bytes 0-99/1000")], "bytes 0..100 of 1000"),
            (
                bytes(0, 100),
                &[("content-range", "bytes 0-99/1000"), ("content-length", "100")],
                "bytes 0..100 of 1000",
            ),
            (bytes(0, 100), &[("content-range", "bytes 0-99/100")], "bytes 0..100 of 100"),
            (bytes(500, 1500), &[("content-range", "bytes 500-999/1000")], "bytes 500..1000 of 1000"),
            (bytes(999, 2000), &[("content-range", "bytes 999-999/1000")], "bytes 999..1000 of 1000"),
            (bytes(0, 100), &[("content-range", "BYTES 0-99/1000")], "bytes 0..100 of 1000"),
            // Short, but not because the object ends.
            (bytes(0, 100), &[("content-range", "bytes 0-98/1000")], "invalid"),
            (bytes(500, 1500), &[("content-range", "bytes 500-998/1000")], "invalid"),
            // Longer, earlier, later than asked.
            (bytes(0, 100), &[("content-range", "bytes 0-100/1000")], "invalid"),
            (bytes(100, 200), &[("content-range", "bytes 0-99/1000")], "invalid"),
            (bytes(100, 200), &[("content-range", "bytes 99-199/1000")], "invalid"),
            (bytes(100, 200), &[("content-range", "bytes 101-199/1000")], "invalid"),
            // Says nothing, or not enough.
            (bytes(0, 100), &[], "invalid"),
            (bytes(0, 100), &[("content-length", "100")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes 0-99/*")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes */1000")], "invalid"),
            (bytes(0, 100), &[("content-range", "items 0-99/1000")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes=0-99/1000")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes 0-99")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes 99-0/1000")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes 0-99/50")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes +0-99/1000")], "invalid"),
            (bytes(0, 100), &[("content-range", "bytes 0-99/18446744073709551616")], "invalid"),
            (
                bytes(0, 100),
                &[("content-range", "bytes 0-99/1000"), ("content-range", "bytes 0-99/1001")],
                "invalid",
            ),
            // The length beside it disagrees.
            (bytes(0, 100), &[("content-range", "bytes 0-99/1000"), ("content-length", "1000")], "invalid"),
            // Suffixes end at the end.
            (AskRange::Suffix(10), &[("content-range", "bytes 990-999/1000")], "bytes 990..1000 of 1000"),
            (AskRange::Suffix(5000), &[("content-range", "bytes 0-999/1000")], "bytes 0..1000 of 1000"),
            (AskRange::Suffix(10), &[("content-range", "bytes 980-999/1000")], "invalid"),
            (AskRange::Suffix(10), &[("content-range", "bytes 980-989/1000")], "invalid"),
            (AskRange::Whole, &[("content-range", "bytes 0-999/1000")], "invalid"),
        ];
        for (range, pairs, expected) in cases {
            let ask = Ask { range, if_match: None, if_none_match: None };
            assert_eq!(told(&ask, 206, pairs), expected, "{range} {pairs:?}");
        }
    }

    #[test]
    fn a_whole_answer_is_the_whole_object_whatever_was_asked() {
        let cases: [Case; 13] = [
            (AskRange::Whole, &[("content-length", "1000")], "bytes 0..1000 of 1000"),
            (bytes(0, 100), &[("content-length", "1000")], "bytes 0..1000 of 1000"),
            (bytes(500, 600), &[("content-length", "1000")], "bytes 0..1000 of 1000"),
            (AskRange::Suffix(1), &[("content-length", "1000")], "bytes 0..1000 of 1000"),
            (bytes(1000, 1100), &[("content-length", "1000")], "unsatisfiable Some(1000)"),
            (AskRange::Whole, &[("content-length", "0")], "empty of 0"),
            (bytes(0, 100), &[("content-length", "0")], "empty of 0"),
            (AskRange::Whole, &[], "other"),
            (bytes(0, 100), &[("transfer-encoding", "chunked")], "other"),
            (
                bytes(0, 100),
                &[("content-length", "1000"), ("content-encoding", "gzip")],
                "bytes 0..1000 of 1000",
            ),
            (bytes(0, 100), &[("content-length", "1000"), ("content-range", "bytes 0-99/1000")], "invalid"),
            (AskRange::Whole, &[("content-length", "1e3")], "invalid"),
            (AskRange::Whole, &[("content-length", "1"), ("content-length", "2")], "invalid"),
        ];
        for (range, pairs, expected) in cases {
            let ask = Ask { range, if_match: None, if_none_match: None };
            assert_eq!(told(&ask, 200, pairs), expected, "{range} {pairs:?}");
        }
    }

    #[test]
    fn past_the_end_must_agree_with_the_question() {
        let cases: [Case; 7] = [
            (bytes(1000, 1100), &[("content-range", "bytes */1000")], "unsatisfiable Some(1000)"),
            (bytes(0, 100), &[("content-range", "bytes */0")], "unsatisfiable Some(0)"),
            (bytes(0, 100), &[], "unsatisfiable None"),
            (bytes(0, 100), &[("content-range", "bytes */x")], "unsatisfiable None"),
            (AskRange::Suffix(5), &[("content-range", "bytes */0")], "unsatisfiable Some(0)"),
            (bytes(0, 100), &[("content-range", "bytes */1000")], "invalid"),
            (AskRange::Whole, &[("content-range", "bytes */0")], "other"),
        ];
        for (range, pairs, expected) in cases {
            let ask = Ask { range, if_match: None, if_none_match: None };
            assert_eq!(told(&ask, 416, pairs), expected, "{range} {pairs:?}");
        }
    }

    #[test]
    fn bytes_of_another_version_are_never_taken() {
        let pinned =
            |etag: &str| Ask { range: bytes(0, 10), if_match: Some(etag.into()), if_none_match: None };
        let part = |etag: &'static str| [("content-range", "bytes 0-9/10"), ("etag", etag)];
        assert_eq!(told(&pinned("\"a\""), 206, &part("\"a\"")), "bytes 0..10 of 10");
        assert_eq!(told(&pinned("a"), 206, &part("\"a\"")), "bytes 0..10 of 10");
        assert_eq!(told(&pinned("*"), 206, &part("\"a\"")), "bytes 0..10 of 10");
        assert_eq!(told(&pinned("\"a\""), 206, &part("\"b\"")), "changed");
        assert_eq!(told(&pinned("\"a\""), 206, &part("W/\"a\"")), "changed");
        assert_eq!(told(&pinned("\"a\""), 206, &part("\"a\"")[..1]), "invalid");
        assert_eq!(told(&pinned("\"a\""), 200, &[("content-length", "10"), ("etag", "\"b\"")]), "changed");
        assert_eq!(told(&pinned("\"a\""), 200, &[("content-length", "0"), ("etag", "\"b\"")]), "changed");
        assert_eq!(told(&pinned("\"a\""), 412, &[]), "changed");
    }

    #[test]
    fn every_other_status_is_relayed() {
        let plain = Ask { range: bytes(0, 10), if_match: None, if_none_match: None };
        for status in [
            100, 201, 202, 204, 301, 302, 304, 307, 308, 400, 401, 403, 404, 405, 409, 412, 429, 500, 501,
            502, 503, 504, 599,
        ] {
            assert_eq!(told(&plain, status, &[("content-length", "10")]), "other", "{status}");
        }
        let conditional = Ask { range: bytes(0, 10), if_match: None, if_none_match: Some("\"a\"".into()) };
        assert_eq!(told(&conditional, 304, &[]), "not modified");
        assert_eq!(told(&conditional, 412, &[]), "other");
    }

    #[test]
    fn a_head_gives_facts_from_its_own_headers() {
        let found = headers(&[
            ("content-length", "42"),
            ("etag", "W/\"weak\""),
            ("last-modified", "Mon, 30 Nov 2026 17:44:00 GMT"),
        ]);
        let Judgement::Found { facts } = judge_head(None, 200, &found).unwrap() else { panic!("not found") };
        assert_eq!((facts.size, facts.etag.as_deref()), (42, Some("W/\"weak\"")));
        assert_eq!(facts.last_modified.as_deref(), Some("Mon, 30 Nov 2026 17:44:00 GMT"));
        assert!(!facts.is_cacheable());
        let empty = headers(&[("content-length", "0")]);
        assert!(
            matches!(judge_head(None, 200, &empty).unwrap(), Judgement::Found { facts } if facts.size == 0)
        );
        assert_eq!(judge_head(None, 200, &HeaderMap::new()).unwrap(), Judgement::Other);
        assert_eq!(judge_head(Some("\"a\""), 304, &HeaderMap::new()).unwrap(), Judgement::NotModified);
        assert_eq!(judge_head(None, 304, &HeaderMap::new()).unwrap(), Judgement::Other);
        assert_eq!(judge_head(None, 404, &found).unwrap(), Judgement::Other);
    }

    proptest::proptest! {
        /// No Content-Range, however written, makes us take bytes that were not asked for.
        #[test]
        fn no_content_range_yields_unasked_bytes(
            start in 0u64..200, length in 1u64..200, value in "(bytes|items)? ?[0-9*]{0,4}-?[0-9]{0,4}/?[0-9*]{0,4}"
        ) {
            let ask = Ask { range: bytes(start, start + length), if_match: None, if_none_match: None };
            if let Ok(Judgement::Bytes { facts, range }) = judge_get(&ask, 206, &headers(&[("content-range", &value)])) {
                assert_eq!(range.start(), start);
                assert_eq!(range.end(), (start + length).min(facts.size));
            }
        }
    }
}
