//! S3's words: path-style addresses, and errors.
//!
//! A key is the path percent-decoded exactly once and never touched again: `+` is a plus, `%2F` is a slash,
//! `a//b`, `a/` and `a/../b` are keys of their own. Two spellings of one key meet here and nowhere else, so this is
//! what the cache is keyed by. Keys are not paths: whoever turns one into a file name must look after `..`
//! himself. Listings are the origin's; nothing here reads or writes one.
#![forbid(unsafe_code)]

use std::borrow::Cow;

use crate::http1::{BodyLength, ContentRange, DateText, ResponseHead};

/// Which object a request means. Borrowed from its path where that is not percent-encoded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address<'a> {
    /// Bucket, or the alias that stands for one.
    pub bucket: Cow<'a, str>,
    /// The key, decoded; 1 to 1,024 bytes of any kind.
    pub key: Cow<'a, [u8]>,
}

/// Longest key, in bytes, as S3 has it.
pub const KEY_BYTES_MAX: usize = 1024;

/// Why a path names nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// A `%` without two hexadecimal digits behind it, or no `/` in front.
    #[error("the path is not a valid percent-encoded path")]
    Encoding,
    /// The first part of the path cannot be the name of a bucket.
    #[error("the path must begin with the name of a bucket: 1 to 255 letters, digits, '.', '-' or '_'")]
    Bucket,
    /// The key is longer than [`KEY_BYTES_MAX`].
    #[error("the key is longer than {KEY_BYTES_MAX} bytes")]
    KeyTooLong,
}

impl AddressError {
    /// What S3 calls it.
    pub fn code(self) -> ErrorCode {
        match self {
            Self::Encoding => ErrorCode::InvalidUri,
            Self::Bucket => ErrorCode::InvalidBucketName,
            Self::KeyTooLong => ErrorCode::KeyTooLong,
        }
    }
}

impl<'a> Address<'a> {
    /// Reads the raw path of a path-style request, `/bucket/key`. `None` when there is no key: `/`, `/bucket`
    /// and `/bucket/`.
    ///
    /// # Errors
    /// [`AddressError`] when the path is badly encoded or bucket or key cannot exist.
    pub fn parse(path: &'a [u8]) -> Result<Option<Self>, AddressError> {
        let Some(Self { bucket, key }) = split(path)? else { return Ok(None) };
        if key.is_empty() {
            return Ok(None);
        }
        if key.len() > KEY_BYTES_MAX {
            return Err(AddressError::KeyTooLong);
        }
        Ok(Some(Self { bucket, key }))
    }
}

/// The bucket of a path-style request, with or without a key behind it; `None` for `/`.
///
/// # Errors
/// [`AddressError`] when the path is badly encoded or the bucket cannot exist.
pub fn bucket_of(path: &[u8]) -> Result<Option<Cow<'_, str>>, AddressError> {
    Ok(split(path)?.map(|parts| parts.bucket))
}

/// Bucket and key of a path, the key perhaps empty.
fn split(path: &[u8]) -> Result<Option<Address<'_>>, AddressError> {
    let decoded = percent_decode(path.strip_prefix(b"/").ok_or(AddressError::Encoding)?)
        .ok_or(AddressError::Encoding)?;
    if decoded.is_empty() {
        return Ok(None);
    }
    let end = decoded.iter().position(|&byte| byte == b'/').unwrap_or(decoded.len());
    let behind = decoded.len().min(end + 1);
    Ok(Some(match decoded {
        Cow::Borrowed(decoded) => Address {
            bucket: bucket_name(&decoded[..end]).ok_or(AddressError::Bucket)?.into(),
            key: decoded[behind..].into(),
        },
        Cow::Owned(mut decoded) => Address {
            bucket: bucket_name(&decoded[..end]).ok_or(AddressError::Bucket)?.to_owned().into(),
            key: decoded.split_off(behind).into(),
        },
    }))
}

/// Wider than S3's own rule, because old buckets, other stores and aliases are; never a path of dots.
fn bucket_name(bytes: &[u8]) -> Option<&str> {
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_".contains(byte);
    let fits = (1..=255).contains(&bytes.len())
        && bytes.iter().all(allowed)
        && !bytes.iter().all(|&byte| byte == b'.');
    fits.then(|| std::str::from_utf8(bytes).ok()).flatten()
}

/// Takes `%XX` apart once; `None` when a `%` lacks its two digits.
pub(crate) fn percent_decode(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    if !text.contains(&b'%') {
        return Some(text.into());
    }
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        if *byte == b'%' {
            let [high, low, tail @ ..] = tail else { return None };
            decoded.push(hex_value(*high)? << 4 | hex_value(*low)?);
            rest = tail;
        } else {
            decoded.push(*byte);
        }
    }
    Some(decoded.into())
}

fn hex_value(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// The errors we say ourselves, with S3's names for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are S3's")]
pub enum ErrorCode {
    AccessDenied,
    AuthorizationHeaderMalformed,
    EntityTooLarge,
    InternalError,
    InvalidAccessKeyId,
    InvalidBucketName,
    InvalidRange,
    InvalidRequest,
    InvalidUri,
    KeyTooLong,
    MethodNotAllowed,
    MissingContentLength,
    NoSuchBucket,
    NoSuchKey,
    NotImplemented,
    PreconditionFailed,
    RequestTimeTooSkewed,
    ServiceUnavailable,
    SignatureDoesNotMatch,
    SlowDown,
}

impl ErrorCode {
    /// The word in the `Code` element.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AccessDenied => "AccessDenied",
            Self::AuthorizationHeaderMalformed => "AuthorizationHeaderMalformed",
            Self::EntityTooLarge => "EntityTooLarge",
            Self::InternalError => "InternalError",
            Self::InvalidAccessKeyId => "InvalidAccessKeyId",
            Self::InvalidBucketName => "InvalidBucketName",
            Self::InvalidRange => "InvalidRange",
            Self::InvalidRequest => "InvalidRequest",
            Self::InvalidUri => "InvalidURI",
            Self::KeyTooLong => "KeyTooLongError",
            Self::MethodNotAllowed => "MethodNotAllowed",
            Self::MissingContentLength => "MissingContentLength",
            Self::NoSuchBucket => "NoSuchBucket",
            Self::NoSuchKey => "NoSuchKey",
            Self::NotImplemented => "NotImplemented",
            Self::PreconditionFailed => "PreconditionFailed",
            Self::RequestTimeTooSkewed => "RequestTimeTooSkewed",
            Self::ServiceUnavailable => "ServiceUnavailable",
            Self::SignatureDoesNotMatch => "SignatureDoesNotMatch",
            Self::SlowDown => "SlowDown",
        }
    }

    /// The status S3 sends with it.
    pub fn status(self) -> u16 {
        match self {
            Self::AuthorizationHeaderMalformed
            | Self::EntityTooLarge
            | Self::InvalidBucketName
            | Self::InvalidRequest
            | Self::InvalidUri
            | Self::KeyTooLong => 400,
            Self::AccessDenied
            | Self::InvalidAccessKeyId
            | Self::RequestTimeTooSkewed
            | Self::SignatureDoesNotMatch => 403,
            Self::NoSuchBucket | Self::NoSuchKey => 404,
            Self::MethodNotAllowed => 405,
            Self::MissingContentLength => 411,
            Self::PreconditionFailed => 412,
            Self::InvalidRange => 416,
            Self::InternalError => 500,
            Self::NotImplemented => 501,
            Self::ServiceUnavailable | Self::SlowDown => 503,
        }
    }
}

/// One error answer of our own.
#[derive(Clone, Copy, Debug)]
pub struct ErrorReply<'a> {
    /// What S3 calls it.
    pub code: ErrorCode,
    /// The status, where it differs from the usual one of `code`.
    pub status: Option<u16>,
    /// What is wrong and what to do about it.
    pub message: &'a str,
    /// The path that was asked for.
    pub resource: &'a [u8],
    /// Names this request in answers and logs.
    pub request_id: &'a str,
    /// Size of the object in bytes, for a 416.
    pub size: Option<u64>,
    /// When to come again, in seconds.
    pub retry_after_s: Option<u32>,
    /// The connection ends after this.
    pub close: bool,
}

impl<'a> ErrorReply<'a> {
    /// An error with its usual status.
    pub fn new(code: ErrorCode, message: &'a str, resource: &'a [u8], request_id: &'a str) -> Self {
        Self {
            code,
            status: None,
            message,
            resource,
            request_id,
            size: None,
            retry_after_s: None,
            close: false,
        }
    }

    /// Appends head and body to `out`. To a HEAD there is no body and its length is 0: clients take any other
    /// length for the object's.
    pub fn write(&self, out: &mut Vec<u8>, date: &DateText, is_head: bool) {
        let body = if is_head {
            Vec::new()
        } else {
            error_body(self.code.as_str(), self.message, self.resource, self.request_id)
        };
        let head = ResponseHead {
            content_type: (!is_head).then_some("application/xml"),
            body: BodyLength::Length(body.len() as u64),
            content_range: self.size.map(|size| ContentRange::Unsatisfied { size }),
            retry_after_s: self.retry_after_s,
            request_id: Some(self.request_id),
            close: self.close,
            ..ResponseHead::new(self.status.unwrap_or(self.code.status()), date)
        };
        head.write(out);
        out.extend_from_slice(&body);
    }
}

/// The XML body of an error, as every S3 client reads it. `resource` is the raw path.
pub fn error_body(code: &str, message: &str, resource: &[u8], request_id: &str) -> Vec<u8> {
    let mut xml = Vec::with_capacity(192 + message.len() + resource.len());
    xml.extend_from_slice(b"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error>");
    for (name, text) in [
        ("Code", code.as_bytes()),
        ("Message", message.as_bytes()),
        ("Resource", resource),
        ("RequestId", request_id.as_bytes()),
    ] {
        xml.push(b'<');
        xml.extend_from_slice(name.as_bytes());
        xml.push(b'>');
        escape(&mut xml, text);
        xml.extend_from_slice(b"</");
        xml.extend_from_slice(name.as_bytes());
        xml.push(b'>');
    }
    xml.extend_from_slice(b"</Error>");
    xml
}

/// What XML cannot hold at all, not even escaped, becomes the replacement character.
fn escape(xml: &mut Vec<u8>, text: &[u8]) {
    for character in String::from_utf8_lossy(text).chars() {
        let escaped = match character {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&quot;",
            '\'' => "&apos;",
            '\t' => "&#9;",
            '\n' => "&#10;",
            '\r' => "&#13;",
            '\0'..='\x1f' | '\u{fffe}' | '\u{ffff}' => "\u{fffd}",
            other => {
                xml.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes());
                continue;
            }
        };
        xml.extend_from_slice(escaped.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_decoded_once_and_left_alone() {
        let long = "k".repeat(KEY_BYTES_MAX);
        let long_path = format!("/b/{long}");
        let table: &[(&str, &[u8])] = &[
            ("/b/k", b"k"),
            ("/b/dir/file.bin", b"dir/file.bin"),
            ("/b/a%20b", b"a b"),
            ("/b/a+b", b"a+b"),
            ("/b/a%2Bb", b"a+b"),
            ("/b/a%2bb", b"a+b"),
            ("/b/a%2Fb", b"a/b"),
            ("/b/a%2fb", b"a/b"),
            ("/b%2Fk", b"k"),
            ("/b/%2Fk", b"/k"),
            ("/b/a%252Fb", b"a%2Fb"),
            ("/b/a%2520b", b"a%20b"),
            ("/b/100%25", b"100%"),
            ("/b/~user", b"~user"),
            ("/b/%7Euser", b"~user"),
            ("/b//k", b"/k"),
            ("/b/a//b", b"a//b"),
            ("/b/a/b", b"a/b"),
            ("/b///", b"//"),
            ("/b/a/", b"a/"),
            ("/b/a", b"a"),
            ("/b/.", b"."),
            ("/b/..", b".."),
            ("/b/../c", b"../c"),
            ("/b/a/../b", b"a/../b"),
            ("/b/a/./b", b"a/./b"),
            ("/b/%2E%2E/c", b"../c"),
            ("/b/%2e%2e%2fetc%2fpasswd", b"../etc/passwd"),
            ("/b/caf%C3%A9", "caf\u{e9}".as_bytes()),
            ("/b/caf\u{e9}", "caf\u{e9}".as_bytes()),
            ("/b/cafe%CC%81", "cafe\u{301}".as_bytes()),
            ("/b/%E6%97%A5%E6%9C%AC", "\u{65e5}\u{672c}".as_bytes()),
            ("/b/%F0%9F%98%80", "\u{1f600}".as_bytes()),
            ("/b/dir/a%20b%2Bc%26%25~%C3%A9.bin", "dir/a b+c&%~\u{e9}.bin".as_bytes()),
            ("/b/a&b=c", b"a&b=c"),
            ("/b/a%26b%3Dc", b"a&b=c"),
            ("/b/a;b,c", b"a;b,c"),
            ("/b/a:b@c", b"a:b@c"),
            ("/b/a%3Fb", b"a?b"),
            ("/b/a%23b", b"a#b"),
            ("/b/a(b)", b"a(b)"),
            ("/b/a%28b%29", b"a(b)"),
            ("/b/a'b!c*d", b"a'b!c*d"),
            ("/b/a\"b", b"a\"b"),
            ("/b/a<b>c", b"a<b>c"),
            ("/b/a\\b", b"a\\b"),
            ("/b/a%5Cb", b"a\\b"),
            ("/b/[a]{b}", b"[a]{b}"),
            ("/b/a|b^c`d", b"a|b^c`d"),
            ("/b/$a", b"$a"),
            ("/b/=", b"="),
            ("/b/-", b"-"),
            ("/b/_temporary/0/part-0000", b"_temporary/0/part-0000"),
            ("/b/%00", b"\0"),
            ("/b/%0A", b"\n"),
            ("/b/%7F", b"\x7f"),
            ("/b/%FF%FE", b"\xff\xfe"),
            ("/b/%20", b" "),
            ("/b/%20leading", b" leading"),
            ("/b/trailing%20", b"trailing "),
            ("/b/b", b"b"),
            ("/b/b/b", b"b/b"),
            (&long_path, long.as_bytes()),
        ];
        assert!(table.len() >= 60);
        for (path, key) in table {
            let address = Address::parse(path.as_bytes()).unwrap().unwrap();
            assert_eq!((&*address.bucket, &*address.key), ("b", *key), "{path}");
        }
        // Keys that careless decoding or tidying would make one.
        for (one, other) in [
            ("/b/a+b", "/b/a%20b"),
            ("/b/a//b", "/b/a/b"),
            ("/b/a", "/b/a/"),
            ("/b/a%252Fb", "/b/a%2Fb"),
            ("/b/x/../c", "/b/c"),
            ("/b/%2Fk", "/b/k"),
            ("/b/caf%C3%A9", "/b/cafe%CC%81"),
            ("/b/K", "/b/k"),
            ("/b/k", "/c/k"),
        ] {
            assert_ne!(Address::parse(one.as_bytes()), Address::parse(other.as_bytes()), "{one} and {other}");
        }
    }

    #[test]
    fn what_has_no_key_has_at_most_a_bucket() {
        for (path, bucket) in [
            ("/", None),
            ("/b", Some("b")),
            ("/b/", Some("b")),
            ("/b%2F", Some("b")),
            ("/b-1.x_y/k", Some("b-1.x_y")),
        ] {
            assert_eq!(bucket_of(path.as_bytes()).unwrap().as_deref(), bucket, "{path}");
        }
        for path in ["/", "/b", "/b/", "/b%2F"] {
            assert_eq!(Address::parse(path.as_bytes()), Ok(None), "{path}");
        }
    }

    #[test]
    fn what_cannot_be_an_address_is_refused() {
        let long = format!("/b/{}", "k".repeat(KEY_BYTES_MAX + 1));
        for (path, error) in [
            ("", AddressError::Encoding),
            ("*", AddressError::Encoding),
            ("b/k", AddressError::Encoding),
            ("/b/%", AddressError::Encoding),
            ("/b/%2", AddressError::Encoding),
            ("/b/%zz", AddressError::Encoding),
            ("/b/%+1", AddressError::Encoding),
            ("/b/% 1", AddressError::Encoding),
            ("//k", AddressError::Bucket),
            ("/%2Fb/k", AddressError::Bucket),
            ("/../k", AddressError::Bucket),
            ("/%2E%2E/k", AddressError::Bucket),
            ("/./k", AddressError::Bucket),
            ("/a%00b/k", AddressError::Bucket),
            ("/a%20b/k", AddressError::Bucket),
            ("/caf\u{e9}/k", AddressError::Bucket),
            (&long, AddressError::KeyTooLong),
        ] {
            assert_eq!(Address::parse(path.as_bytes()), Err(error), "{path}");
            assert_eq!(error.code().status(), 400);
        }
        let wide = format!("/{}/k", "b".repeat(256));
        assert_eq!(Address::parse(wide.as_bytes()), Err(AddressError::Bucket));
    }

    #[test]
    fn errors_are_xml_whatever_was_asked_for() {
        let body = error_body("NoSuchKey", "no \"a\" & 'b'", b"/b/<k>\x01\xff\n", "00ff");
        assert_eq!(
            String::from_utf8(body).unwrap(),
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>NoSuchKey</Code>\
             <Message>no &quot;a&quot; &amp; &apos;b&apos;</Message>\
             <Resource>/b/&lt;k&gt;\u{fffd}\u{fffd}&#10;</Resource><RequestId>00ff</RequestId></Error>"
        );
    }

    #[test]
    fn an_error_to_a_head_has_no_body() {
        let date = b"Sun, 06 Nov 1994 08:49:37 GMT";
        let reply = ErrorReply {
            size: Some(0),
            ..ErrorReply::new(ErrorCode::InvalidRange, "outside the object", b"/b/k", "00ff")
        };
        let written = |is_head| {
            let mut out = Vec::new();
            reply.write(&mut out, date, is_head);
            String::from_utf8(out).unwrap()
        };
        let get = written(false);
        let (head, body) = get.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 416 Range Not Satisfiable\r\n"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
        assert!(head.contains("Content-Range: bytes */0\r\n") && head.contains("x-amz-request-id: 00ff"));
        assert!(body.contains("<Code>InvalidRange</Code>"), "{body}");
        let head = written(true);
        assert!(head.ends_with("x-amz-request-id: 00ff\r\n\r\n"), "{head}");
        assert!(head.contains("Content-Length: 0\r\n") && !head.contains("Content-Type"), "{head}");
    }

    proptest! {
        #[test]
        fn no_path_panics(path: Vec<u8>) {
            let _ = Address::parse(&path);
            let _ = bucket_of(&path);
        }

        #[test]
        fn every_key_survives_its_encoding(key in prop::collection::vec(any::<u8>(), 1..200), all: bool) {
            let mut path = b"/b/".to_vec();
            for &byte in &key {
                if all || !(byte.is_ascii_alphanumeric() || b"/+~.-_!*'()".contains(&byte)) {
                    path.extend_from_slice(format!("%{byte:02X}").as_bytes());
                } else {
                    path.push(byte);
                }
            }
            prop_assert_eq!(Address::parse(&path).unwrap().unwrap().key.to_vec(), key);
        }
    }
}
