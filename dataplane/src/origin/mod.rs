//! The store behind us: an S3 bucket or a plain HTTP tree.
//!
//! It fetches what it is asked for, checks that the answer is what was asked, and hands the bytes on as they come. It
//! knows nothing of extents, waiters or freshness: when to ask, what to ask again and where the bytes go is decided by the
//! fill. It keeps three promises: nothing that was not asked for is ever called the object's bytes, a body is whole or an
//! error, and a write whose fate is unknown is never sent twice.
//!
//! ```text
//!   fill ── Ask ──► client ── pool ── dial ──► origin
//!                    │ credentials sign         │
//!                    ◄── answer judges the head ◄┘        body: pieces, idle limit, length kept
//! ```
//!
//! `scripted` is the double: an origin in memory with seeded faults, judged by the same rules.
#![forbid(unsafe_code)]

mod answer;
mod body;
mod client;
mod credentials;
mod dial;
mod endpoint;
mod error;
mod pool;
pub mod scripted;

pub(crate) use dial::{DialError, Dialer};

pub use body::{Body, Upload, UploadClosed, Uploader, upload};
pub use credentials::{CredentialSource, Credentials};
pub(crate) use endpoint::encoded;
pub use error::{OriginError, Stage};
pub use pool::Connections;

use crate::object::ObjectFacts;
use crate::range::ByteRange;
use answer::Judgement;
use client::{Client, relayed};
use http::{HeaderMap, Method, Uri};
use scripted::ScriptedOrigin;
use std::fmt;
use std::time::Duration;

/// One origin, as one worker sees it. Needs a tokio runtime with I/O and time around every call.
#[derive(Debug)]
pub struct Origin {
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Live(Box<Client>),
    Scripted(ScriptedOrigin, OriginLimits),
}

/// Which origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginTarget {
    /// Its protocol and address.
    pub kind: OriginKind,
}

/// An origin's protocol and address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OriginKind {
    /// A bucket behind the S3 protocol, signed with `SigV4`.
    S3 {
        /// The bucket.
        bucket: String,
        /// Scheme, host and an optional path prefix; `None` for AWS itself.
        endpoint: Option<Uri>,
        /// The region in the signature and, without an endpoint, in the host name.
        region: String,
    },
    /// A tree of files behind plain HTTP, unsigned.
    Http {
        /// What every key is appended to.
        base: Uri,
    },
}

impl OriginTarget {
    /// Whether requests to it are signed.
    pub fn is_signed(&self) -> bool {
        matches!(self.kind, OriginKind::S3 { .. })
    }
}

impl fmt::Display for OriginKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::S3 { bucket, endpoint: None, region } => write!(f, "s3://{bucket} ({region})"),
            Self::S3 { bucket, endpoint: Some(endpoint), .. } => write!(f, "s3://{bucket} at {endpoint}"),
            Self::Http { base } => write!(f, "{base}"),
        }
    }
}

/// How long one worker waits for one origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginLimits {
    /// Name look-up, TCP and TLS together.
    pub connect: Duration,
    /// From the end of a request to its answer's head.
    pub first_byte: Duration,
    /// From one piece of a body to the next, while somebody waits for it.
    pub idle: Duration,
    /// Waiting for a connection when all are in use.
    pub queue: Duration,
    /// How long an idle connection is kept for the next request.
    pub keep_alive: Duration,
}

impl Default for OriginLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            first_byte: Duration::from_secs(30),
            idle: Duration::from_secs(20),
            queue: Duration::from_secs(10),
            // Below the minute after which most servers hang up first.
            keep_alive: Duration::from_secs(45),
        }
    }
}

/// What to get, and of which version.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// Which bytes.
    pub range: AskRange,
    /// Only this `ETag` (as the origin sent it); otherwise `Answer::Changed`.
    pub if_match: Option<Box<str>>,
    /// Nothing if it is still this `ETag`: `Answer::NotModified`.
    pub if_none_match: Option<Box<str>>,
}

/// Which bytes of an object.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AskRange {
    /// `bytes=first-last`; the end may lie beyond the object's.
    Bytes(ByteRange),
    /// The last bytes; never 0.
    Suffix(u64),
    /// All, without a Range header.
    Whole,
}

impl fmt::Display for AskRange {
    /// As in a Range header, except for `Whole`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(range) => write!(f, "bytes={}-{}", range.start(), range.end() - 1),
            Self::Suffix(length) => write!(f, "bytes=-{length}"),
            Self::Whole => f.write_str("the whole object"),
        }
    }
}

/// What the origin answered, checked.
#[derive(Debug)]
pub enum Answer {
    /// Bytes of the object.
    Bytes {
        /// The version they belong to, from the same head.
        facts: ObjectFacts,
        /// What the body covers. More than was asked when the origin ignored the range: skip to your offset.
        range: ByteRange,
        /// Exactly `range.len()` bytes, or an error.
        body: Body,
    },
    /// The object exists and has no bytes.
    Empty {
        /// Its version; size 0.
        facts: ObjectFacts,
    },
    /// HEAD found the object, of whatever size.
    Found {
        /// Its version.
        facts: ObjectFacts,
    },
    /// It is still the version of `if_none_match`.
    NotModified,
    /// It is no longer the version of `if_match`.
    Changed,
    /// The object ends before the first byte asked for.
    Unsatisfiable {
        /// Its size, where the origin said it.
        size: Option<u64>,
    },
    /// Anything else, to be relayed and never stored: errors, redirects, a 200 without a length.
    Other(Relay),
}

/// An answer as it came.
#[derive(Debug)]
pub struct Relay {
    /// The status.
    pub status: u16,
    /// Its headers without the hop-by-hop ones.
    pub headers: HeaderMap,
    /// Its body; decoded if it was chunked.
    pub body: Body,
}

/// A client's request to pass through.
#[derive(Debug)]
pub struct Forward {
    /// The method.
    pub method: Method,
    /// What followed the bucket in the client's path, raw: empty, or with its leading slash.
    pub path: Box<[u8]>,
    /// The client's query, raw, without the question mark.
    pub query: Option<Box<[u8]>>,
    /// The client's headers; those that are ours to set are dropped.
    pub headers: HeaderMap,
    /// The body, if it has one, from `upload`.
    pub body: Option<Upload>,
}

impl Origin {
    /// Prepares an origin; connects to nothing yet. `credentials` are not used for plain HTTP. Its connections are some of
    /// `connections`.
    ///
    /// # Errors
    /// `Target`, when the address cannot be used or the trust roots for HTTPS cannot be read.
    pub fn open(
        target: &OriginTarget,
        credentials: &Credentials,
        limits: OriginLimits,
        connections: &Connections,
    ) -> Result<Self, OriginError> {
        let client =
            Client::open(target, credentials, limits, connections, &credentials::ProcessEnvironment)?;
        Ok(Self { inner: Inner::Live(Box::new(client)) })
    }

    /// The double, for tests that simulate a node. Only `limits.idle` and `limits.first_byte` matter to it.
    pub fn scripted(script: ScriptedOrigin, limits: OriginLimits) -> Self {
        Self { inner: Inner::Scripted(script, limits) }
    }

    /// Gets bytes of the object `key` (decoded).
    ///
    /// A connection that was kept from an earlier request and turns out dead is replaced once, without a word. Every
    /// other failure is the caller's to repeat.
    ///
    /// # Errors
    /// As `OriginError` says; `is_retryable` tells whether asking again makes sense.
    pub async fn get(&self, key: &[u8], ask: &Ask) -> Result<Answer, OriginError> {
        match &self.inner {
            Inner::Live(client) => client.get(key, ask).await,
            Inner::Scripted(script, limits) => script.get(key, ask, limits).await,
        }
    }

    /// Another node of the fleet at `base`, `http(s)://host[:port]`, which speaks S3 as a plain server does.
    ///
    /// # Errors
    /// As for [`Origin::open`].
    pub fn open_peer(
        base: &str,
        limits: OriginLimits,
        connections: &Connections,
    ) -> Result<Self, OriginError> {
        let base = base.parse().map_err(|_| OriginError::Target { reason: format!("`{base}` is no URL") })?;
        let target = OriginTarget { kind: OriginKind::Http { base } };
        Self::open(&target, &Credentials::anonymous(), limits, connections)
    }

    /// As [`Origin::get`], with headers of ours, from another node; with the age that it says its belief has.
    ///
    /// # Errors
    /// As for [`Origin::get`].
    pub async fn get_of_peer(
        &self,
        key: &[u8],
        ask: &Ask,
        headers: &HeaderMap,
    ) -> Result<(Answer, Duration), OriginError> {
        match &self.inner {
            Inner::Live(client) => client.get_with(key, ask, headers.clone()).await,
            Inner::Scripted(script, limits) => {
                script.get(key, ask, limits).await.map(|answer| (answer, Duration::ZERO))
            }
        }
    }

    /// Asks for the facts of the object `key` (decoded): `Found`, `NotModified` or `Other`.
    ///
    /// # Errors
    /// As for `get`.
    pub async fn head(&self, key: &[u8], if_none_match: Option<&str>) -> Result<Answer, OriginError> {
        match &self.inner {
            Inner::Live(client) => client.head(key, if_none_match).await,
            Inner::Scripted(script, limits) => script.head(key, if_none_match, limits).await,
        }
    }

    /// Passes a client's request through, signed with our keys. Returns with the answer's head; the body of the request
    /// must be fed meanwhile. A redirect is an answer like any other.
    ///
    /// # Errors
    /// `SignedStream` for uploads that only the client could sign (501), `Unsendable` (400), `UploadCut` when the
    /// client's side ended early, `Indeterminate` when a write's answer was lost, else as for `get`.
    pub async fn forward(&self, request: Forward) -> Result<Relay, OriginError> {
        match &self.inner {
            Inner::Live(client) => client.forward(request).await,
            Inner::Scripted(script, limits) => script.forward(request, limits).await,
        }
    }

    /// Whose keys sign; to be said at start.
    pub fn credential_source(&self) -> CredentialSource {
        match &self.inner {
            Inner::Live(client) => client.credential_source(),
            Inner::Scripted(..) => CredentialSource::Anonymous,
        }
    }

    /// Scheme, host and base path, for logs and status.
    pub fn describe(&self) -> String {
        match &self.inner {
            Inner::Live(client) => client.describe(),
            Inner::Scripted(..) => "scripted:".to_owned(),
        }
    }

    /// Its open connections: in use, and idle.
    pub fn connections(&self) -> (usize, usize) {
        match &self.inner {
            Inner::Live(client) => client.connections(),
            Inner::Scripted(script, _) => (script.stats().open, 0),
        }
    }
}

/// Joins what the head means with the body it announced.
fn answered(judgement: Judgement, status: u16, headers: HeaderMap, body: Body) -> Answer {
    match judgement {
        Judgement::Bytes { facts, range } => {
            Answer::Bytes { facts, range, body: body.expecting(range.len()) }
        }
        Judgement::Empty { facts } => Answer::Empty { facts },
        Judgement::Found { facts } => Answer::Found { facts },
        Judgement::NotModified => Answer::NotModified,
        Judgement::Changed => Answer::Changed,
        Judgement::Unsatisfiable { size } => Answer::Unsatisfiable { size },
        Judgement::Other => Answer::Other(relayed(status, headers, body)),
    }
}
