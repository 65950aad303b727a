//! Who may ask.
//!
//! The door finds out which signature a request carries and hands it to the module that can check it. Without
//! keys and without `--anonymous` everything is refused: a cache that answers whoever comes would lend its own
//! rights on the origin to all of them. Refusals are said in S3's words and say what to do; no secret and no
//! signature is ever in one.
#![forbid(unsafe_code)]

mod canonical;
mod keys;
mod sigv4;

use std::borrow::Cow;
use std::time::SystemTime;

pub use self::keys::{KeyError, Keys};
pub use self::sigv4::PayloadClaim;
use crate::dialect::s3::ErrorCode;
use crate::http1::RequestHead;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Denied {
    /// What S3 calls it; has the status, too.
    pub code: ErrorCode,
    /// What is wrong and what to do about it. Safe to send and to log.
    pub message: Cow<'static, str>,
}

impl Denied {
    fn new(code: ErrorCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Lets a request pass, or says why not.
///
/// # Errors
/// [`Denied`] when the request is not signed by one of `keys` at about `now`, unless `keys` are anonymous.
pub fn verify(head: &RequestHead, keys: &Keys, now: SystemTime) -> Result<(), Denied> {
    if keys.is_anonymous() {
        return Ok(());
    }
    if keys.is_empty() {
        return Err(Denied::new(
            ErrorCode::AccessDenied,
            "this node has no access key for clients: configure one, or start it with --anonymous to serve \
             unsigned requests",
        ));
    }
    match Scheme::of(head)? {
        Scheme::SigV4 => sigv4::verify(head, keys, now),
        Scheme::Unsigned => Err(Denied::new(
            ErrorCode::AccessDenied,
            "the request is not signed: sign it with AWS Signature Version 4, or start the node with --anonymous",
        )),
        Scheme::Other(name) => Err(Denied::new(
            ErrorCode::InvalidRequest,
            format!(
                "{name} is not understood by this node: sign the request in its Authorization header with \
                 AWS4-HMAC-SHA256 (AWS Signature Version 4)"
            ),
        )),
    }
}

/// How a request is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    SigV4,
    Unsigned,
    /// One that cannot be checked here, by the name its users know it by.
    Other(&'static str),
}

impl Scheme {
    fn of(head: &RequestHead) -> Result<Self, Denied> {
        let in_query = head.query().and_then(Self::in_query);
        let mut values = head.header_values("authorization");
        let Some(value) = values.next() else { return Ok(in_query.unwrap_or(Self::Unsigned)) };
        if values.next().is_some() || in_query.is_some() {
            return Err(Denied::new(
                ErrorCode::InvalidRequest,
                "the request carries more than one signature: send one Authorization header, or one signed URL",
            ));
        }
        let word = value.split(|byte| matches!(byte, b' ' | b'\t')).next().unwrap_or_default();
        Ok(match word {
            b"AWS4-HMAC-SHA256" => Self::SigV4,
            b"TOS4-HMAC-SHA256" => Self::Other("the TOS dialect's signature TOS4-HMAC-SHA256"),
            b"AWS4-ECDSA-P256-SHA256" => Self::Other("AWS Signature Version 4A (AWS4-ECDSA-P256-SHA256)"),
            b"AWS" => Self::Other("AWS Signature Version 2"),
            _ => Self::Other("this kind of Authorization header"),
        })
    }

    /// Signed URLs, of whatever dialect.
    fn in_query(query: &[u8]) -> Option<Self> {
        query.split(|&byte| byte == b'&').find_map(|pair| {
            let name = pair.split(|&byte| byte == b'=').next().unwrap_or_default();
            let is = |wanted: &str| name.eq_ignore_ascii_case(wanted.as_bytes());
            if is("X-Amz-Algorithm") || is("X-Amz-Signature") || is("X-Amz-Credential") {
                Some(Self::Other("a presigned URL (X-Amz-Signature in the query)"))
            } else if is("X-Tos-Algorithm") || is("X-Tos-Signature") || is("X-Tos-Credential") {
                Some(Self::Other("the TOS dialect's presigned URL (X-Tos-Signature in the query)"))
            } else if is("X-Tos-Policy") {
                Some(Self::Other("the TOS dialect's policy URL (X-Tos-Policy in the query)"))
            } else if is("AWSAccessKeyId") {
                Some(Self::Other("a presigned URL of AWS Signature Version 2 (AWSAccessKeyId in the query)"))
            } else {
                None
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http1::{HeadLimits, HeadProgress, parse_head};
    use std::time::UNIX_EPOCH;

    fn request(target: &str, headers: &str) -> RequestHead {
        let text = format!("GET {target} HTTP/1.1\r\nHost: h\r\n{headers}\r\n");
        match parse_head(text.as_bytes(), &HeadLimits::default()) {
            Ok(HeadProgress::Whole { head, .. }) => head,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    fn one_key() -> Keys {
        let mut keys = Keys::new(false);
        keys.add("AKTEST", "SKTEST").unwrap();
        keys
    }

    #[test]
    fn anonymous_nodes_let_everybody_pass() {
        let mut keys = Keys::new(true);
        let dummy = "Authorization: AWS4-HMAC-SHA256 nonsense\r\n";
        assert_eq!(verify(&request("/b/k", ""), &keys, UNIX_EPOCH), Ok(()));
        assert_eq!(verify(&request("/b/k", dummy), &keys, UNIX_EPOCH), Ok(()));
        keys.add("AKTEST", "SKTEST").unwrap();
        assert_eq!(verify(&request("/b/k", dummy), &keys, UNIX_EPOCH), Ok(()));
    }

    #[test]
    fn a_node_without_keys_says_what_to_do() {
        let denied = verify(&request("/b/k", ""), &Keys::new(false), UNIX_EPOCH).unwrap_err();
        assert_eq!((denied.code, denied.code.status()), (ErrorCode::AccessDenied, 403));
        assert!(denied.message.contains("--anonymous") && denied.message.contains("configure"), "{denied}");
    }

    #[test]
    fn what_cannot_be_checked_is_named() {
        for (target, headers, code, named) in [
            ("/b/k", "", ErrorCode::AccessDenied, "not signed"),
            ("/b/k", "x-tos-date: 20261130T174432Z\r\n", ErrorCode::AccessDenied, "not signed"),
            ("/b/k", "Authorization: TOS4-HMAC-SHA256 Credential=A\r\n", ErrorCode::InvalidRequest, "TOS4"),
            ("/b/k", "Authorization: AWS AKTEST:SIG\r\n", ErrorCode::InvalidRequest, "Version 2"),
            ("/b/k", "Authorization: AWS4-ECDSA-P256-SHA256 C\r\n", ErrorCode::InvalidRequest, "4A"),
            ("/b/k", "Authorization: Bearer SIG\r\n", ErrorCode::InvalidRequest, "Authorization"),
            ("/b/k", "Authorization:\r\n", ErrorCode::InvalidRequest, "Authorization"),
            (
                "/b/k",
                "Authorization: AWS4-HMAC-SHA256 a\r\nAuthorization: AWS4-HMAC-SHA256 a\r\n",
                ErrorCode::InvalidRequest,
                "more than one",
            ),
            (
                "/b/k?X-Amz-Signature=SIG",
                "Authorization: AWS4-HMAC-SHA256 a\r\n",
                ErrorCode::InvalidRequest,
                "more than one",
            ),
            ("/b/k?X-Amz-Algorithm=A&X-Amz-Signature=SIG", "", ErrorCode::InvalidRequest, "presigned"),
            ("/b/k?a=b&x-amz-signature=SIG", "", ErrorCode::InvalidRequest, "presigned"),
            ("/b/k?X-Tos-Signature=SIG", "", ErrorCode::InvalidRequest, "TOS"),
            ("/b/k?X-Tos-Policy=SIG", "", ErrorCode::InvalidRequest, "TOS"),
            ("/b/k?AWSAccessKeyId=A&Signature=SIG&Expires=1", "", ErrorCode::InvalidRequest, "Version 2"),
        ] {
            let denied = verify(&request(target, headers), &one_key(), UNIX_EPOCH).unwrap_err();
            assert_eq!(denied.code, code, "{target} {headers:?}: {denied}");
            assert!(denied.message.contains(named), "{target} {headers:?}: {denied}");
            assert!(!format!("{denied:?}").contains("SIG"), "{denied:?}");
        }
    }
}
