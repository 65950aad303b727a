//! AWS Signature Version 4 in the Authorization header, as S3 checks it.
//!
//! The path is the one thing clients disagree on: S3 encodes the decoded path anew, some signers sign it just as
//! they send it. Both are tried; a signed path stands for the same key either way, so that gives nothing away.
//! What the body hashes to is only claimed here, see [`PayloadClaim`]; to hold the body against it is left to
//! whoever reads the body.
#![forbid(unsafe_code)]

use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use smallvec::SmallVec;
use subtle::ConstantTimeEq;
use time::{Date, Month, OffsetDateTime, PrimitiveDateTime, Time};

use super::canonical::{canonical_query, fold_spaces, uri_encode};
use super::{Denied, Keys};
use crate::dialect::s3::{ErrorCode, percent_decode};
use crate::http1::RequestHead;

/// What a client claims of its body in `x-amz-content-sha256`. The signature covers the claim, not the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadClaim {
    /// `UNSIGNED-PAYLOAD`: nothing.
    Unsigned,
    /// SHA-256 of the body.
    Hash([u8; 32]),
    /// `STREAMING-AWS4-…`: the body is aws-chunked and every chunk has a signature that builds on the request's
    /// own. It cannot be handed on under another signature unless the chunks are signed anew.
    SignedChunks,
    /// `STREAMING-UNSIGNED-PAYLOAD-TRAILER`: aws-chunked, without signatures. Can be handed on as it is.
    UnsignedChunks,
}

impl PayloadClaim {
    /// Reads the claim; `None` when there is none, more than one, or one that nobody knows.
    pub fn of(head: &RequestHead) -> Option<Self> {
        let mut values = head.header_values("x-amz-content-sha256");
        let value = values.next()?;
        if values.next().is_some() {
            return None;
        }
        match value {
            b"UNSIGNED-PAYLOAD" => Some(Self::Unsigned),
            b"STREAMING-UNSIGNED-PAYLOAD-TRAILER" => Some(Self::UnsignedChunks),
            _ if value.starts_with(b"STREAMING-AWS4-") => Some(Self::SignedChunks),
            _ => parse_hash(value).map(Self::Hash),
        }
    }
}

/// How far a client's clock may be off, in seconds.
const SKEW_MAX_S: u64 = 15 * 60;

/// Checks the one Authorization header of `head`, which begins with `AWS4-HMAC-SHA256`.
pub(super) fn verify(head: &RequestHead, keys: &Keys, now: SystemTime) -> Result<(), Denied> {
    let authorization = head.header("authorization").unwrap_or_default();
    let claim = Claim::parse(authorization)?;
    let stamp = Stamp::of(head)?;
    if claim.date != stamp.text[..8] {
        return Err(malformed("the date of its Credential is not the day of x-amz-date"));
    }
    let secret = keys.secret(claim.access_key).ok_or_else(|| {
        Denied::new(
            ErrorCode::InvalidAccessKeyId,
            "this node does not know the access key of the request: add it to the node's configuration or, where \
             there is a control plane, with `forebay-control key add`; or have the client use one that is there",
        )
    })?;
    let now_s = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if stamp.seconds.abs_diff(now_s) > SKEW_MAX_S {
        return Err(Denied::new(
            ErrorCode::RequestTimeTooSkewed,
            "the request was signed more than 15 minutes before or after now by this node's clock: set the \
             clocks of client and node",
        ));
    }
    if PayloadClaim::of(head).is_none() {
        return Err(Denied::new(
            ErrorCode::InvalidRequest,
            "x-amz-content-sha256 must be there once, with the SHA-256 of the body in hexadecimal, \
             UNSIGNED-PAYLOAD, or one of the STREAMING- values",
        ));
    }
    claim.check_coverage(head, &stamp)?;

    // One string, one derived key; only the path may have to be tried in a second spelling.
    let matches = |path: &[u8]| {
        let signature = secret.sign_v4(claim.date, claim.region, &string_to_sign(head, &claim, &stamp, path));
        bool::from(signature.ct_eq(&claim.signature))
    };
    let raw = head.path();
    let encoded = percent_decode(raw).map(|decoded| {
        let mut encoded = Vec::with_capacity(raw.len());
        uri_encode(&mut encoded, &decoded, true);
        encoded
    });
    let passes = match &encoded {
        Some(encoded) => matches(encoded) || (encoded != raw && matches(raw)),
        None => matches(raw),
    };
    if passes {
        return Ok(());
    }
    Err(Denied::new(
        ErrorCode::SignatureDoesNotMatch,
        "the signature is not the one this node computes: check the secret key, and that nothing between \
         client and node changes the path, the query, the Host or a signed header",
    ))
}

fn malformed(what: &'static str) -> Denied {
    Denied::new(
        ErrorCode::AuthorizationHeaderMalformed,
        format!(
            "the Authorization header is malformed: {what}; it reads AWS4-HMAC-SHA256 \
             Credential=KEY/yyyymmdd/REGION/s3/aws4_request, SignedHeaders=a;b, Signature=64 hexadecimal digits"
        ),
    )
}

/// What an Authorization header says. Without `Debug`: a signature is a secret while it is fresh.
struct Claim<'a> {
    access_key: &'a [u8],
    date: [u8; 8],
    region: &'a [u8],
    signed_headers: &'a [u8],
    signature: [u8; 32],
}

impl<'a> Claim<'a> {
    fn parse(authorization: &'a [u8]) -> Result<Self, Denied> {
        let (mut credential, mut signed_headers, mut signature) = (None, None, None);
        let parts = authorization.strip_prefix(b"AWS4-HMAC-SHA256").unwrap_or_default();
        // Most clients put ", " between the parts, some only ",".
        for part in parts.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
            let (place, value) = if let Some(value) = part.strip_prefix(b"Credential=") {
                (&mut credential, value)
            } else if let Some(value) = part.strip_prefix(b"SignedHeaders=") {
                (&mut signed_headers, value)
            } else if let Some(value) = part.strip_prefix(b"Signature=") {
                (&mut signature, value)
            } else {
                return Err(malformed("it has a part with an unknown name"));
            };
            if place.replace(value).is_some() {
                return Err(malformed("a part stands twice"));
            }
        }
        let credential = credential.ok_or_else(|| malformed("Credential is missing"))?;
        let signed_headers = signed_headers.ok_or_else(|| malformed("SignedHeaders is missing"))?;
        let signature = signature.ok_or_else(|| malformed("Signature is missing"))?;

        let mut scope = credential.split(|&byte| byte == b'/');
        let (Some(access_key), Some(date), Some(region), Some(service), Some(end), None) =
            (scope.next(), scope.next(), scope.next(), scope.next(), scope.next(), scope.next())
        else {
            return Err(malformed("its Credential does not have five parts"));
        };
        if end != b"aws4_request" {
            return Err(malformed("its Credential does not end with aws4_request"));
        }
        if service != b"s3" {
            return Err(malformed("its Credential is for another service than s3"));
        }
        let lower = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b';');
        if !signed_headers.iter().all(lower) {
            return Err(malformed("SignedHeaders must be lower-case names with ';' between them"));
        }
        // Also a limit: a name that stood there a thousand times would be hashed a thousand times.
        if !signed_headers.split(|&byte| byte == b';').is_sorted_by(|one, next| one < next) {
            return Err(malformed("SignedHeaders must be sorted and name each header once"));
        }
        Ok(Self {
            access_key,
            date: date.try_into().map_err(|_| malformed("the date of its Credential is not yyyymmdd"))?,
            region,
            signed_headers,
            signature: parse_hash(signature)
                .ok_or_else(|| malformed("Signature is not 64 lower-case hexadecimal digits"))?,
        })
    }

    fn signed_names(&self) -> impl Iterator<Item = &'a [u8]> {
        self.signed_headers.split(|&byte| byte == b';')
    }

    /// What must not be changed by anybody in between has to be signed: the host, the time, and everything
    /// that S3 acts on.
    fn check_coverage(&self, head: &RequestHead, stamp: &Stamp) -> Result<(), Denied> {
        let covers =
            |name: &str| self.signed_names().any(|signed| name.as_bytes().eq_ignore_ascii_case(signed));
        let meaningful = head
            .headers()
            .map(|(name, _)| name)
            .filter(|name| name.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("x-amz-")));
        match ["host", stamp.header].into_iter().chain(meaningful).find(|name| !covers(name)) {
            None => Ok(()),
            Some(name) => Err(Denied::new(
                ErrorCode::AccessDenied,
                format!("the header {} is not signed: name it in SignedHeaders", name.to_ascii_lowercase()),
            )),
        }
    }
}

/// When a request was signed.
struct Stamp {
    /// Seconds since 1970.
    seconds: u64,
    /// `yyyymmddThhmmssZ`.
    text: [u8; 16],
    /// The header it stood in.
    header: &'static str,
}

impl Stamp {
    fn of(head: &RequestHead) -> Result<Self, Denied> {
        for header in ["x-amz-date", "date"] {
            let mut values = head.header_values(header);
            let Some(value) = values.next() else { continue };
            let seconds = parse_stamp(value).or_else(|| parse_http_date(value));
            let text = seconds.and_then(format_stamp);
            let (Some(seconds), Some(text), None) = (seconds, text, values.next()) else {
                return Err(Denied::new(
                    ErrorCode::AccessDenied,
                    format!("the header {header} must be there once, as yyyymmddThhmmssZ"),
                ));
            };
            return Ok(Self { seconds, text, header });
        }
        Err(Denied::new(ErrorCode::AccessDenied, "a signed request needs the header x-amz-date"))
    }
}

/// `yyyymmddThhmmssZ` to seconds since 1970.
fn parse_stamp(value: &[u8]) -> Option<u64> {
    let [digits_of_date @ .., b'T', h1, h2, m1, m2, s1, s2, b'Z'] = value else { return None };
    let number = |digits: &[u8]| {
        digits.iter().try_fold(0i32, |number, digit| {
            digit.is_ascii_digit().then(|| number * 10 + i32::from(digit - b'0'))
        })
    };
    let [year @ .., o1, o2, d1, d2] = digits_of_date else { return None };
    let year = if year.len() == 4 { number(year)? } else { return None };
    let small = |digits: [&u8; 2]| Some(number(&[*digits[0], *digits[1]])? as u8);
    let date =
        Date::from_calendar_date(year, Month::try_from(small([o1, o2])?).ok()?, small([d1, d2])?).ok()?;
    let time = Time::from_hms(small([h1, h2])?, small([m1, m2])?, small([s1, s2])?).ok()?;
    u64::try_from(PrimitiveDateTime::new(date, time).assume_utc().unix_timestamp()).ok()
}

fn parse_http_date(value: &[u8]) -> Option<u64> {
    let time = httpdate::parse_http_date(std::str::from_utf8(value).ok()?).ok()?;
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

fn format_stamp(seconds: u64) -> Option<[u8; 16]> {
    let time = OffsetDateTime::from_unix_timestamp(i64::try_from(seconds).ok()?).ok()?;
    let year = u16::try_from(time.year()).ok()?;
    let mut text = *b"yyyymmddThhmmssZ";
    let mut put = |at: usize, number: u8| {
        text[at] = b'0' + number / 10;
        text[at + 1] = b'0' + number % 10;
    };
    put(0, (year / 100) as u8);
    put(2, (year % 100) as u8);
    put(4, time.month().into());
    put(6, time.day());
    put(9, time.hour());
    put(11, time.minute());
    put(13, time.second());
    Some(text)
}

/// 64 lower-case hexadecimal digits.
fn parse_hash(text: &[u8]) -> Option<[u8; 32]> {
    let mut hash = [0; 32];
    hex::decode_to_slice(text, &mut hash).ok()?;
    (!text.iter().any(u8::is_ascii_uppercase)).then_some(hash)
}

//   AWS4-HMAC-SHA256 \n yyyymmddThhmmssZ \n yyyymmdd/region/s3/aws4_request \n hex(sha256(canonical request))
fn string_to_sign(head: &RequestHead, claim: &Claim<'_>, stamp: &Stamp, path: &[u8]) -> SmallVec<[u8; 192]> {
    let mut digest = [0; 64];
    hex::encode_to_slice(canonical_hash(head, claim, path), &mut digest).expect("twice 32 digits");
    let mut text = SmallVec::new();
    for part in [
        b"AWS4-HMAC-SHA256\n",
        &stamp.text[..],
        b"\n",
        &claim.date,
        b"/",
        claim.region,
        b"/s3/aws4_request\n",
        &digest,
    ] {
        text.extend_from_slice(part);
    }
    text
}

//   METHOD \n path \n query \n name:value \n … \n signed;names \n x-amz-content-sha256
fn canonical_hash(head: &RequestHead, claim: &Claim<'_>, path: &[u8]) -> [u8; 32] {
    let mut text = Vec::with_capacity(1024);
    text.extend_from_slice(head.method.as_str().as_bytes());
    text.push(b'\n');
    text.extend_from_slice(path);
    text.push(b'\n');
    canonical_query(&mut text, head.query().unwrap_or_default());
    text.push(b'\n');
    for name in claim.signed_names() {
        text.extend_from_slice(name);
        text.push(b':');
        // Signed names are lower-case ASCII, `Claim::parse` saw to it.
        let name = std::str::from_utf8(name).unwrap_or_default();
        for (at, value) in head.header_values(name).enumerate() {
            if at > 0 {
                text.push(b',');
            }
            fold_spaces(&mut text, value);
        }
        text.push(b'\n');
    }
    text.push(b'\n');
    text.extend_from_slice(claim.signed_headers);
    text.push(b'\n');
    text.extend_from_slice(head.header("x-amz-content-sha256").unwrap_or_default());
    Sha256::digest(&text).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::verify as door;
    use crate::http1::{HeadLimits, HeadProgress, parse_head};
    use proptest::prelude::*;
    use std::fmt::Write;
    use std::time::Duration;

    /// Requests of real clients as they were sent, with the pair that signed them.
    const SIGNED_REQUESTS: &str = include_str!("testdata/signed-requests.jsonl");

    #[derive(Clone, Debug, serde::Deserialize)]
    struct Signed {
        client: String,
        method: String,
        target: String,
        headers: Vec<(String, String)>,
        access_key: String,
        secret_key: String,
    }

    impl Signed {
        fn all() -> Vec<Self> {
            SIGNED_REQUESTS.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        }

        fn of_s3() -> impl Iterator<Item = Self> {
            Self::all().into_iter().filter(|signed| signed.header("authorization").starts_with("AWS4"))
        }

        fn header(&self, name: &str) -> &str {
            let found = self.headers.iter().find(|(found, _)| found.eq_ignore_ascii_case(name));
            found.map_or("", |(_, value)| value)
        }

        fn header_mut(&mut self, name: &str) -> &mut String {
            let found = self.headers.iter_mut().find(|(found, _)| found.eq_ignore_ascii_case(name));
            &mut found.unwrap_or_else(|| panic!("no {name}")).1
        }

        fn head(&self) -> RequestHead {
            let mut text = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
            for (name, value) in &self.headers {
                write!(text, "{name}: {value}\r\n").unwrap();
            }
            text += "\r\n";
            match parse_head(text.as_bytes(), &HeadLimits::default()) {
                Ok(HeadProgress::Whole { head, .. }) => head,
                other => panic!("{text}: {other:?}"),
            }
        }

        fn keys(&self) -> Keys {
            let mut keys = Keys::new(false);
            keys.add(&self.access_key, &self.secret_key).unwrap();
            keys
        }

        fn now(&self) -> SystemTime {
            let stamp = self.header("x-amz-date").as_bytes();
            UNIX_EPOCH + Duration::from_secs(parse_stamp(stamp).unwrap())
        }

        fn check(&self) -> Result<(), Denied> {
            door(&self.head(), &self.keys(), self.now())
        }

        fn refusal(&self) -> ErrorCode {
            self.check().expect_err(&format!("{self:?}")).code
        }
    }

    #[test]
    fn requests_of_real_clients_pass() {
        let mut count = 0;
        for signed in Signed::of_s3() {
            assert_eq!(signed.check(), Ok(()), "{signed:?}");
            count += 1;
        }
        assert!(count >= 30, "{count}");
    }

    #[test]
    fn requests_of_tos_clients_are_refused_by_name() {
        let mut count = 0;
        for signed in Signed::all() {
            if signed.header("authorization").starts_with("AWS4") {
                continue;
            }
            let denied = door(&signed.head(), &signed.keys(), UNIX_EPOCH).unwrap_err();
            assert_eq!(denied.code, ErrorCode::InvalidRequest, "{}: {denied}", signed.client);
            assert!(denied.message.contains("TOS"), "{}: {denied}", signed.client);
            count += 1;
        }
        assert!(count >= 5, "{count}");
    }

    #[test]
    fn published_examples_pass() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        for (method, target, more, payload, signed_headers, signature) in [
            (
                "GET",
                "/test.txt",
                vec![("Range", "bytes=0-9")],
                empty,
                "host;range;x-amz-content-sha256;x-amz-date",
                "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
            (
                "PUT",
                "/test$file.text",
                vec![
                    ("Date", "Fri, 24 May 2013 00:00:00 GMT"),
                    ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
                ],
                "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
                "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
                "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
            ),
            (
                "GET",
                "/?lifecycle",
                vec![],
                empty,
                "host;x-amz-content-sha256;x-amz-date",
                "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
            ),
            (
                "GET",
                "/?prefix=J&max-keys=2",
                vec![],
                empty,
                "host;x-amz-content-sha256;x-amz-date",
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        ] {
            let authorization = format!(
                "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,\
                 SignedHeaders={signed_headers},Signature={signature}"
            );
            let mut headers = vec![
                ("Host", "examplebucket.s3.amazonaws.com"),
                ("x-amz-content-sha256", payload),
                ("x-amz-date", "20130524T000000Z"),
                ("Authorization", &authorization),
            ];
            headers.extend(more);
            let signed = Signed {
                client: "example".into(),
                method: method.into(),
                target: target.into(),
                headers: headers.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
                access_key: "AKIAIOSFODNN7EXAMPLE".into(),
                secret_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            };
            assert_eq!(signed.check(), Ok(()), "{method} {target}");
        }
    }

    #[test]
    fn what_is_signed_cannot_be_changed() {
        use ErrorCode::SignatureDoesNotMatch;
        for signed in Signed::of_s3() {
            let mut other = signed.clone();
            other.method = "PATCH".into();
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let mut other = signed.clone();
            other.target.insert(2, 'x');
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let mut other = signed.clone();
            other.target += if other.target.contains('?') { "&x" } else { "?x" };
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let mut other = signed.clone();
            other.secret_key += "x";
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let mut other = signed.clone();
            let last = other.header_mut("authorization").pop().unwrap();
            other.header_mut("authorization").push(if last == '0' { '1' } else { '0' });
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let names = signed.header("authorization").split("SignedHeaders=").nth(1).unwrap();
            let names = names.split(',').next().unwrap().to_owned();
            for name in names.split(';').filter(|name| !["x-amz-date", "x-amz-content-sha256"].contains(name))
            {
                let mut other = signed.clone();
                let value = other.header_mut(name);
                // A length has to stay a number to get as far as the signature.
                value.push('1');
                assert_eq!(other.refusal(), SignatureDoesNotMatch, "{name} of {}", signed.client);
            }

            let mut other = signed.clone();
            let claim = other.header_mut("x-amz-content-sha256");
            *claim = if claim == "UNSIGNED-PAYLOAD" { "0".repeat(64) } else { "UNSIGNED-PAYLOAD".into() };
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let mut other = signed.clone();
            let date = other.header_mut("x-amz-date");
            *date = date.replace("T18", "T17").replace("T17", "T16");
            assert_eq!(other.refusal(), SignatureDoesNotMatch);

            let mut other = signed.clone();
            other.headers.push(("User-Agent-Note".into(), "not signed".into()));
            assert_eq!(other.check(), Ok(()));
            other.headers.push(("X-Amz-Acl".into(), "public-read".into()));
            assert!(other.check().is_err(), "S3 would act on this header");
        }
    }

    fn first() -> Signed {
        Signed::of_s3().find(|signed| signed.method == "GET").unwrap()
    }

    #[test]
    fn refusals_have_their_names() {
        let signed = first();
        let unknown = Signed { access_key: "AKOTHER".into(), ..signed.clone() };
        assert_eq!(unknown.refusal(), ErrorCode::InvalidAccessKeyId);

        for (seconds, expected) in [(0, true), (900, true), (901, false), (1_000_000, false)] {
            let skew = Duration::from_secs(seconds);
            for now in [signed.now() + skew, signed.now() - skew] {
                let result = door(&signed.head(), &signed.keys(), now);
                let code = result.map_err(|denied| denied.code);
                let wanted = if expected { Ok(()) } else { Err(ErrorCode::RequestTimeTooSkewed) };
                assert_eq!(code, wanted, "{seconds} s");
            }
        }

        let without = |name: &str| {
            let mut other = signed.clone();
            other.headers.retain(|(found, _)| !found.eq_ignore_ascii_case(name));
            door(&other.head(), &other.keys(), signed.now()).unwrap_err().code
        };
        assert_eq!(without("authorization"), ErrorCode::AccessDenied);
        assert_eq!(without("x-amz-date"), ErrorCode::AccessDenied);
        assert_eq!(without("x-amz-content-sha256"), ErrorCode::InvalidRequest);

        let with = |name: &str, value: &str| {
            let mut other = signed.clone();
            *other.header_mut(name) = value.into();
            door(&other.head(), &other.keys(), signed.now()).unwrap_err().code
        };
        assert_eq!(with("x-amz-date", "yesterday"), ErrorCode::AccessDenied);
        assert_eq!(with("x-amz-content-sha256", "abc"), ErrorCode::InvalidRequest);
        assert_eq!(with("x-amz-content-sha256", &"A".repeat(64)), ErrorCode::InvalidRequest);

        let mut twice = signed.clone();
        twice.headers.push(("x-amz-date".into(), signed.header("x-amz-date").into()));
        assert_eq!(twice.refusal(), ErrorCode::AccessDenied);
    }

    #[test]
    fn malformed_authorization_is_told_how_it_should_be() {
        let signed = first();
        let good = signed.header("authorization").to_owned();
        for (from, to) in [
            ("Credential=AKTEST/", "Credential=AKTEST"),
            ("/s3/", "/ec2/"),
            ("/aws4_request", "/aws3_request"),
            ("/aws4_request", "/aws4_request/more"),
            ("Credential=", "Credentials="),
            ("SignedHeaders=", "Signature="),
            ("SignedHeaders=host", "SignedHeaders=Host"),
            ("SignedHeaders=host", "SignedHeaders=host;host"),
            ("SignedHeaders=host", "SignedHeaders=z;host"),
            ("Signature=", "Signature=z"),
            (", Signature=", ", Signature=00, Signature="),
            ("/2026", "/026"),
            ("/2026", "/2025"),
            ("AWS4-HMAC-SHA256 ", "AWS4-HMAC-SHA256 ,"),
        ] {
            assert!(good.contains(from), "{from}");
            let mut other = signed.clone();
            *other.header_mut("authorization") = good.replacen(from, to, 1);
            let denied = other.check().unwrap_err();
            assert_eq!(denied.code, ErrorCode::AuthorizationHeaderMalformed, "{from} -> {to}: {denied}");
            assert!(denied.message.contains("Credential=KEY/yyyymmdd"), "{denied}");
        }
        let mut unsigned_host = signed.clone();
        *unsigned_host.header_mut("authorization") = good.replacen("host;", "", 1);
        let denied = unsigned_host.check().unwrap_err();
        assert_eq!(denied.code, ErrorCode::AccessDenied);
        assert!(denied.message.contains("host"), "{denied}");
    }

    #[test]
    fn no_refusal_holds_a_secret_or_a_signature() {
        let mut signed = first();
        let signature = signed.header("authorization").rsplit_once('=').unwrap().1.to_owned();
        signed.target += "?x";
        let denied = signed.check().unwrap_err();
        let text = format!("{denied} {denied:?} {:?} {:?}", signed.head(), signed.keys());
        assert!(!text.contains(&signature) && !text.contains("SKTEST"), "{text}");
    }

    /// Signs a GET of `wire_path` as a client would that writes `signed_path` into its canonical request.
    fn sign(wire_path: &str, query: (&str, &str), signed_path: &str) -> Signed {
        let canonical = format!(
            "GET\n{signed_path}\n{}\nhost:h:1\nx-amz-content-sha256:UNSIGNED-PAYLOAD\n\
             x-amz-date:20261130T175849Z\nx-amz-meta-note:a b c\n\n\
             host;x-amz-content-sha256;x-amz-date;x-amz-meta-note\nUNSIGNED-PAYLOAD",
            query.1
        );
        let text = format!(
            "AWS4-HMAC-SHA256\n20261130T175849Z\n20261130/r/s3/aws4_request\n{}",
            hex::encode(Sha256::digest(canonical))
        );
        let mut keys = Keys::new(false);
        keys.add("AK", "SK").unwrap();
        let signature = keys.secret(b"AK").unwrap().sign_v4(*b"20261130", b"r", text.as_bytes());
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential=AK/20261130/r/s3/aws4_request,\
             SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-meta-note,Signature={}",
            hex::encode(signature)
        );
        let headers = [
            ("Host", "h:1"),
            ("X-Amz-Date", "20261130T175849Z"),
            ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
            ("x-amz-meta-note", "  a   b \t c "),
            ("Authorization", &authorization),
        ];
        Signed {
            client: "test".into(),
            method: "GET".into(),
            target: wire_path.to_owned() + query.0,
            headers: headers.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
            access_key: "AK".into(),
            secret_key: "SK".into(),
        }
    }

    #[test]
    fn odd_paths_pass_however_they_were_spelled_and_signed() {
        for (wire, signed) in [
            ("/b/a%20b", "/b/a%20b"),
            ("/b/a+b", "/b/a%2Bb"),
            ("/b/a+b", "/b/a+b"),
            ("/b/a%2Bb", "/b/a%2Bb"),
            ("/b/a%2bb", "/b/a%2Bb"),
            ("/b/a%2bb", "/b/a%2bb"),
            ("/b/a%2Fb", "/b/a/b"),
            ("/b/a%2Fb", "/b/a%2Fb"),
            ("/b/~u", "/b/~u"),
            ("/b/%7Eu", "/b/~u"),
            ("/b/%7Eu", "/b/%7Eu"),
            ("/b/caf%C3%A9", "/b/caf%C3%A9"),
            ("/b/caf\u{e9}", "/b/caf%C3%A9"),
            ("/b/caf\u{e9}", "/b/caf\u{e9}"),
            ("/b//a//b/", "/b//a//b/"),
            ("/b/a/../b", "/b/a/../b"),
            ("/b/a(b)*'!", "/b/a%28b%29%2A%27%21"),
            ("/b/a(b)*'!", "/b/a(b)*'!"),
            ("/b/a%2520b", "/b/a%2520b"),
            ("/b/a:b@c,d=e;f&g$h", "/b/a%3Ab%40c%2Cd%3De%3Bf%26g%24h"),
            ("/b/100%", "/b/100%"),
        ] {
            assert_eq!(sign(wire, ("", ""), signed).check(), Ok(()), "{wire} signed as {signed}");
        }
        for (wire, signed) in [
            ("/b/a+b", "/b/a%20b"),
            ("/b/a%20b", "/b/a%2520b"),
            ("/b/a%2520b", "/b/a%20b"),
            ("/b//a", "/b/a"),
            ("/b/a/", "/b/a"),
            ("/b/x/../a", "/b/a"),
            ("/b/A", "/b/a"),
        ] {
            assert_eq!(sign(wire, ("", ""), signed).refusal(), ErrorCode::SignatureDoesNotMatch, "{wire}");
        }
    }

    #[test]
    fn queries_are_sorted_and_encoded_anew() {
        for (wire, canonical) in [
            ("?", ""),
            ("?uploads", "uploads="),
            ("?uploads=", "uploads="),
            ("?b=2&a=1", "a=1&b=2"),
            ("?a=2&a=1", "a=1&a=2"),
            ("?a=1&&b", "a=1&b="),
            ("?prefix=x/y", "prefix=x%2Fy"),
            ("?prefix=x%2fy", "prefix=x%2Fy"),
            ("?prefix=a+b", "prefix=a%20b"),
            ("?prefix=a%2Bb", "prefix=a%2Bb"),
            ("?prefix=~a", "prefix=~a"),
            ("?a=b=c", "a=b%3Dc"),
            ("?a%20b=1&a=2", "a=2&a%20b=1"),
        ] {
            assert_eq!(sign("/b", (wire, canonical), "/b").check(), Ok(()), "{wire}");
        }
    }

    #[test]
    fn stamps_are_read_and_written() {
        for (text, seconds) in [
            ("20130524T000000Z", 1_369_353_600),
            ("19700101T000001Z", 1),
            ("20261130T175849Z", 1_796_061_529),
        ] {
            assert_eq!(parse_stamp(text.as_bytes()), Some(seconds), "{text}");
            assert_eq!(format_stamp(seconds).as_ref().map(|stamp| &stamp[..]), Some(text.as_bytes()));
        }
        for text in [
            "",
            "T000000Z",
            "20131324T000000Z",
            "20130230T000000Z",
            "20130524T240000Z",
            "20130524T000000",
            "20130524 000000Z",
            "020130524T000000Z",
            "2013052aT000000Z",
            "19691231T235959Z",
        ] {
            assert_eq!(parse_stamp(text.as_bytes()), None, "{text}");
        }
        assert_eq!(format_stamp(u64::MAX), None);
    }

    #[test]
    fn payload_claims_are_told_apart() {
        let claim = |value: &str| {
            let mut signed = first();
            *signed.header_mut("x-amz-content-sha256") = value.into();
            PayloadClaim::of(&signed.head())
        };
        assert_eq!(claim("UNSIGNED-PAYLOAD"), Some(PayloadClaim::Unsigned));
        assert_eq!(claim("STREAMING-UNSIGNED-PAYLOAD-TRAILER"), Some(PayloadClaim::UnsignedChunks));
        assert_eq!(claim("STREAMING-AWS4-HMAC-SHA256-PAYLOAD"), Some(PayloadClaim::SignedChunks));
        assert_eq!(claim("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"), Some(PayloadClaim::SignedChunks));
        assert_eq!(claim(&"00".repeat(32)), Some(PayloadClaim::Hash([0; 32])));
        assert_eq!(claim("STREAMING-SOMETHING"), None);
        assert_eq!(claim(""), None);
    }

    proptest! {
        #[test]
        fn no_authorization_panics(
            parts in prop::collection::vec(prop::sample::select(vec![
                "Credential=", "AKTEST", "/", "20261130", "s3", "aws4_request", ",", " ", "SignedHeaders=",
                "host", ";", "x-amz-date", "Signature=", "\u{e9}",
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            ]), 0..20),
        ) {
            let mut signed = first();
            *signed.header_mut("authorization") = format!("AWS4-HMAC-SHA256 {}", parts.concat());
            prop_assert!(signed.check().is_err());
        }
    }
}
