//! What can go wrong between us and the store behind us.
//!
//! One enum, so that the fill can decide by `is_retryable` alone, and so that each failure says what was being
//! done and to whom. A host name is the most that an error tells of a request: no path, no query, no header, hence no
//! key of an object, no signature and no token in a log.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

/// A cause of any type; hyper and its connectors speak in these.
pub(super) type BoxError = Box<dyn Error + Send + Sync>;

/// Why the origin did not answer, or why its answer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OriginError {
    /// The target itself is wrong: a scheme that is not http(s), a URL with a password in it, no trust roots.
    #[error("the origin cannot be used: {reason}")]
    Target {
        /// What is wrong and what to write instead.
        reason: String,
    },
    /// Name look-up, TCP or TLS failed.
    #[error("connecting to {host}")]
    Unreachable {
        /// Host and port.
        host: Box<str>,
        /// What the connector said.
        #[source]
        source: BoxError,
    },
    /// A limit of `OriginLimits` passed.
    #[error("{host}: {stage} took longer than {limit:?}")]
    TimedOut {
        /// Host and port.
        host: Box<str>,
        /// What was being waited for.
        stage: Stage,
        /// How long we waited.
        limit: Duration,
    },
    /// The connection ended, or spoke no HTTP, before a whole answer head.
    #[error("{host} gave no answer")]
    Broken {
        /// Host and port.
        host: Box<str>,
        /// What hyper said.
        #[source]
        source: hyper::Error,
    },
    /// The body ended before its declared length.
    #[error("{host}: the body ended after {received} bytes")]
    Cut {
        /// Host and port.
        host: Box<str>,
        /// Bytes that came.
        received: u64,
        /// What hyper said; `None` when the end looked clean but came too early.
        #[source]
        source: Option<BoxError>,
    },
    /// The answer contradicts the question or itself. Its bytes must not be used.
    #[error("the origin's answer cannot be trusted: {reason}")]
    Invalid {
        /// What was asked and what came.
        reason: String,
    },
    /// No credentials could be had.
    #[error("origin credentials: {reason}")]
    Credentials {
        /// Which source failed, in its own words; never a key or a token.
        reason: String,
        /// Another try may help (a metadata service that did not answer).
        retryable: bool,
    },
    /// The request cannot be written on the wire or signed.
    #[error("the request cannot be sent to the origin: {reason}")]
    Unsendable {
        /// What in the request, and why.
        reason: String,
    },
    /// An upload whose chunks are signed one by one with the client's key, which we do not have. A 501 to the client.
    #[error(
        "uploads with signed chunks ({payload}) cannot be signed again for the origin; \
         let the client send a plain or an unsigned-trailer payload"
    )]
    SignedStream {
        /// The client's x-amz-content-sha256.
        payload: Box<str>,
    },
    /// The client's side of an upload ended early; the origin was told nothing that looks complete.
    #[error("the upload ended before it was whole")]
    UploadCut,
    /// A write was sent and its answer lost: it may or may not have been done.
    #[error("{host}: the write was sent but its answer was lost; it may or may not have been applied")]
    Indeterminate {
        /// Host and port.
        host: Box<str>,
        /// How it was lost.
        #[source]
        source: BoxError,
    },
}

impl OriginError {
    /// Whether the same read may succeed if asked again. A write that may have been applied never says yes.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Broken { .. } | Self::Cut { .. } => true,
            Self::Credentials { retryable, .. } => *retryable,
            Self::Target { .. }
            | Self::Invalid { .. }
            | Self::Unsendable { .. }
            | Self::SignedStream { .. }
            | Self::UploadCut
            | Self::Indeterminate { .. } => false,
        }
    }

    pub(super) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid { reason: reason.into() }
    }

    pub(super) fn unsendable(reason: impl Into<String>) -> Self {
        Self::Unsendable { reason: reason.into() }
    }
}

/// What a time limit was set on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A free connection, all being in use.
    Queue,
    /// Name look-up, TCP and TLS together.
    Connect,
    /// From the request's last byte to the answer's head.
    FirstByte,
    /// From one piece of the body to the next.
    Body,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queue => "waiting for a free connection",
            Self::Connect => "connecting",
            Self::FirstByte => "waiting for the first byte",
            Self::Body => "waiting for the next bytes",
        })
    }
}

/// The error that a body source gives for an end that came too early.
pub(super) fn early_end() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "ended before its declared length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_that_may_succeed_are_retryable() {
        let host = || Box::<str>::from("store:9000");
        let yes = [
            OriginError::Unreachable { host: host(), source: "refused".into() },
            OriginError::TimedOut { host: host(), stage: Stage::Body, limit: Duration::from_secs(1) },
            OriginError::Cut { host: host(), received: 7, source: None },
            OriginError::Credentials { reason: "metadata".into(), retryable: true },
        ];
        let no = [
            OriginError::Target { reason: String::new() },
            OriginError::invalid("x"),
            OriginError::unsendable("x"),
            OriginError::SignedStream { payload: "STREAMING-AWS4-HMAC-SHA256-PAYLOAD".into() },
            OriginError::UploadCut,
            OriginError::Indeterminate { host: host(), source: "reset".into() },
            OriginError::Credentials { reason: "half a key".into(), retryable: false },
        ];
        assert!(yes.iter().all(OriginError::is_retryable));
        assert!(!no.iter().any(OriginError::is_retryable));
    }
}
