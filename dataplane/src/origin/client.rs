//! One exchange with a live origin: build, sign, send, wait, judge.
//!
//! Only what must be signed is signed: the host, what AWS demands (content-type, content-md5, every x-amz-*), and the
//! headers that choose the bytes. The rest may be rewritten on the way by somebody's proxy (Accept-Encoding is) and would
//! break the signature for nothing. Reqsign signs every header it sees, so it sees a copy with those alone, their spaces
//! folded as the other side folds them.
#![forbid(unsafe_code)]

use super::answer::{judge_get, judge_head};
use super::body::{Body, Outgoing, UploadState};
use super::credentials::{CA_BUNDLE, CredentialSource, Credentials, signing_failed};
use super::dial::Dialer;
use super::endpoint::Endpoint;
use super::error::{OriginError, Stage};
use super::pool::{Connections, Lent, Pool};
use super::{Answer, Ask, AskRange, Forward, OriginKind, OriginLimits, OriginTarget, Relay, answered};
use http::header::{
    ACCEPT_ENCODING, AGE, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, EXPECT, HOST,
    HeaderName, IF_MATCH, IF_NONE_MATCH, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, RANGE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE, USER_AGENT,
};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use hyper::body::Incoming;
use reqsign_aws_v4::{Credential, EMPTY_STRING_SHA256};
use reqsign_core::{Env, Signer};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

#[derive(Debug)]
pub(super) struct Client {
    endpoint: Endpoint,
    host: Rc<str>,
    pool: Rc<Pool>,
    is_s3: bool,
    signer: Option<Signer<Credential>>,
    source: CredentialSource,
    limits: OriginLimits,
}

/// A request without its body, so that it can be sent twice.
struct Head {
    method: Method,
    path: PathAndQuery,
    headers: HeaderMap,
}

impl Client {
    pub(super) fn open(
        target: &OriginTarget,
        credentials: &Credentials,
        limits: OriginLimits,
        connections: &Connections,
        environment: &dyn Env,
    ) -> Result<Self, OriginError> {
        let endpoint = Endpoint::of(target)?;
        let dialer = Dialer::new(limits.connect, environment.var(CA_BUNDLE).map(Into::into));
        if endpoint.is_tls() {
            dialer.prepare_tls().map_err(|error| OriginError::Target { reason: error.to_string() })?;
        }
        let host: Rc<str> = endpoint.host().into();
        let pool = Pool::new(dialer, endpoint.dial_uri(), Rc::clone(&host), limits, connections);
        let (is_s3, signer, source) = match &target.kind {
            OriginKind::S3 { region, .. } => (true, credentials.signer(region), credentials.source()),
            OriginKind::Http { .. } => (false, None, CredentialSource::Anonymous),
        };
        Ok(Self { endpoint, host, pool, is_s3, signer, source, limits })
    }

    pub(super) async fn get(&self, key: &[u8], ask: &Ask) -> Result<Answer, OriginError> {
        self.get_with(key, ask, HeaderMap::new()).await.map(|(answer, _)| answer)
    }

    /// With headers of ours, and with the age that the answer has by its own account: a second more, since it is said in
    /// whole seconds.
    pub(super) async fn get_with(
        &self,
        key: &[u8],
        ask: &Ask,
        mut headers: HeaderMap,
    ) -> Result<(Answer, Duration), OriginError> {
        if ask.range != AskRange::Whole {
            headers.insert(RANGE, header_value(&ask.range.to_string(), "a range")?);
        }
        if let Some(etag) = &ask.if_match {
            headers.insert(IF_MATCH, header_value(etag, "an ETag")?);
        }
        if let Some(etag) = &ask.if_none_match {
            headers.insert(IF_NONE_MATCH, header_value(etag, "an ETag")?);
        }
        let (response, lent) = self.read(Method::GET, key, headers).await?;
        let (parts, incoming) = response.into_parts();
        let judgement = judge_get(ask, parts.status.as_u16(), &parts.headers)?;
        let age = parts.headers.get(AGE).and_then(|age| age.to_str().ok()?.parse().ok());
        let age = age.map_or(Duration::ZERO, |age: u32| Duration::from_secs(u64::from(age) + 1));
        let body = self.body(incoming, lent, None);
        Ok((answered(judgement, parts.status.as_u16(), parts.headers, body), age))
    }

    pub(super) async fn head(&self, key: &[u8], if_none_match: Option<&str>) -> Result<Answer, OriginError> {
        let mut headers = HeaderMap::new();
        if let Some(etag) = if_none_match {
            headers.insert(IF_NONE_MATCH, header_value(etag, "an ETag")?);
        }
        let (response, lent) = self.read(Method::HEAD, key, headers).await?;
        let (parts, incoming) = response.into_parts();
        let judgement = judge_head(if_none_match, parts.status.as_u16(), &parts.headers)?;
        let body = self.body(incoming, lent, None);
        Ok(answered(judgement, parts.status.as_u16(), parts.headers, body))
    }

    async fn read(
        &self,
        method: Method,
        key: &[u8],
        mut headers: HeaderMap,
    ) -> Result<(Response<Incoming>, Lent), OriginError> {
        // The stored bytes, not a form that somebody on the way finds handier.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("forebay/", env!("CARGO_PKG_VERSION"))));
        if self.is_s3 {
            headers.insert(CONTENT_SHA256, HeaderValue::from_static(EMPTY_STRING_SHA256));
        }
        let head = self.signed(method, self.endpoint.object_path(key)?, headers).await?;
        self.exchange(head, Outgoing::Nothing, None).await
    }

    pub(super) async fn forward(&self, request: Forward) -> Result<Relay, OriginError> {
        let Forward { method, path, query, headers, body } = request;
        let path = self.endpoint.forward_path(&path, query.as_deref())?;
        let mut headers = forwarded_headers(headers);
        let payload = payload_of(&headers, body.is_some(), self.is_s3)?;
        if let Some(payload) = payload {
            headers.insert(CONTENT_SHA256, payload);
        }
        match &body {
            Some(upload) => {
                if let Some(length) = upload.length() {
                    headers.insert(CONTENT_LENGTH, length.into());
                }
            }
            None if method == Method::PUT || method == Method::POST => {
                headers.insert(CONTENT_LENGTH, 0.into());
            }
            None => {}
        }
        let head = self.signed(method, path, headers).await?;
        let state = body.as_ref().map(super::Upload::state);
        let outgoing = body.map_or(Outgoing::Nothing, Outgoing::Upload);
        let (response, lent) = self.exchange(head, outgoing, state.as_ref()).await?;
        let (parts, incoming) = response.into_parts();
        let body = self.body(incoming, lent, state);
        Ok(relayed(parts.status.as_u16(), parts.headers, body))
    }

    pub(super) fn credential_source(&self) -> CredentialSource {
        self.source
    }

    pub(super) fn describe(&self) -> String {
        self.endpoint.describe()
    }

    pub(super) fn connections(&self) -> (usize, usize) {
        self.pool.connections()
    }

    fn body(&self, incoming: Incoming, lent: Lent, upload: Option<Arc<UploadState>>) -> Body {
        Body::live(Rc::clone(&self.host), self.limits.idle, incoming, lent, upload)
    }

    /// Completes the headers: host, and the signature if we have keys.
    async fn signed(
        &self,
        method: Method,
        path: PathAndQuery,
        mut headers: HeaderMap,
    ) -> Result<Head, OriginError> {
        headers.insert(HOST, header_value(&self.host, "the host name")?);
        if let Some(signer) = &self.signer {
            let mut request = Request::new(());
            *request.method_mut() = method.clone();
            *request.uri_mut() = self.endpoint.absolute(&path);
            *request.headers_mut() = signed_headers(&headers)?;
            let (mut parts, ()) = request.into_parts();
            signer.sign(&mut parts, None).await.map_err(|error| signing_failed(&error))?;
            for name in [AUTHORIZATION, AMZ_DATE, SECURITY_TOKEN, CONTENT_SHA256] {
                if let Some(value) = parts.headers.remove(&name) {
                    headers.insert(name, value);
                }
            }
        }
        Ok(Head { method, path, headers })
    }

    /// Sends and waits for the answer's head; once more on a new connection if a kept one turns out dead.
    async fn exchange(
        &self,
        head: Head,
        mut outgoing: Outgoing,
        upload: Option<&Arc<UploadState>>,
    ) -> Result<(Response<Incoming>, Lent), OriginError> {
        let is_read = matches!(head.method, Method::GET | Method::HEAD | Method::OPTIONS);
        let mut fresh = false;
        loop {
            let mut lent = self.pool.lend(fresh).await?;
            let has_body = matches!(outgoing, Outgoing::Upload(_));
            let lost = match self.attempt(&mut lent, head.request(outgoing), upload).await {
                Ok(response) => return Ok((response, lent)),
                Err(lost) => lost,
            };
            let (error, unsent) = match lost {
                Lost::TimedOut => (self.pool.timed_out(Stage::FirstByte, self.limits.first_byte), None),
                Lost::Failed { error, .. } if upload.is_some_and(|upload| upload.is_failed()) => {
                    tracing::debug!(%error, "upload cut by its client");
                    return Err(OriginError::UploadCut);
                }
                Lost::Failed { error, unsent } => {
                    let may_repeat = unsent.is_some() || (is_read && !has_body && !error.is_parse());
                    if lent.was_used() && may_repeat {
                        fresh = true;
                        outgoing = unsent.unwrap_or(Outgoing::Nothing);
                        continue;
                    }
                    (OriginError::Broken { host: self.host.as_ref().into(), source: error }, unsent)
                }
            };
            if is_read || unsent.is_some() {
                return Err(error);
            }
            return Err(OriginError::Indeterminate { host: self.host.as_ref().into(), source: error.into() });
        }
    }

    async fn attempt(
        &self,
        lent: &mut Lent,
        request: Request<Outgoing>,
        upload: Option<&Arc<UploadState>>,
    ) -> Result<Response<Incoming>, Lost> {
        let mut answer = pin!(lent.sender().try_send_request(request));
        loop {
            let moves = upload.map(|upload| upload.moves());
            match timeout(self.limits.first_byte, &mut answer).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(mut error)) => {
                    let unsent = error.take_message().map(Request::into_body);
                    return Err(Lost::Failed { error: error.into_error(), unsent });
                }
                // While a body goes up, the clock for its answer starts again with every piece, and stands still while
                // the client has nothing to give (its own limit is on the other side of the node).
                Err(_) if upload.is_some_and(|up| up.is_starved() || Some(up.moves()) != moves) => {}
                Err(_) => return Err(Lost::TimedOut),
            }
        }
    }
}

/// Why an attempt gave no answer.
enum Lost {
    TimedOut,
    /// `unsent` holds the body of a request of which no byte was written.
    Failed {
        error: hyper::Error,
        unsent: Option<Outgoing>,
    },
}

impl Head {
    fn request(&self, body: Outgoing) -> Request<Outgoing> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.path.clone().into();
        *request.headers_mut() = self.headers.clone();
        request
    }
}

pub(super) fn relayed(status: u16, mut headers: HeaderMap, body: Body) -> Relay {
    drop_hop_by_hop(&mut headers);
    Relay { status, headers, body }
}

const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const AMZ_DATE: HeaderName = HeaderName::from_static("x-amz-date");
const SECURITY_TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");
const CONTENT_MD5: HeaderName = HeaderName::from_static("content-md5");

fn header_value(text: &str, what: &str) -> Result<HeaderValue, OriginError> {
    HeaderValue::from_str(text).map_err(|_| OriginError::unsendable(format!("{what} is no header value")))
}

/// The client's headers without those of its connection to us and of its signature for us.
fn forwarded_headers(mut headers: HeaderMap) -> HeaderMap {
    drop_hop_by_hop(&mut headers);
    for name in [HOST, AUTHORIZATION, AMZ_DATE, SECURITY_TOKEN, DATE, EXPECT, CONTENT_LENGTH] {
        headers.remove(name);
    }
    headers.remove("x-amz-s3session-token");
    let retries: Vec<HeaderName> =
        headers.keys().filter(|n| n.as_str().starts_with("amz-sdk-")).cloned().collect();
    for name in retries {
        headers.remove(name);
    }
    headers
}

fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|&b| b == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect();
    let always =
        [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
    for name in named.into_iter().chain(always) {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
}

/// What the signature says of the body. The client's own hash stands, since the origin checks it against the bytes;
/// without one the body is unsigned, as we stream it and cannot know it beforehand.
fn payload_of(headers: &HeaderMap, has_body: bool, is_s3: bool) -> Result<Option<HeaderValue>, OriginError> {
    let Some(value) = headers.get(CONTENT_SHA256) else {
        let payload = if has_body { "UNSIGNED-PAYLOAD" } else { EMPTY_STRING_SHA256 };
        return Ok(is_s3.then(|| HeaderValue::from_static(payload)));
    };
    let is_hash = value.len() == 64 && value.as_bytes().iter().all(u8::is_ascii_hexdigit);
    match value.as_bytes() {
        _ if is_hash => Ok(Some(value.clone())),
        b"UNSIGNED-PAYLOAD" => Ok(Some(value.clone())),
        // The chunk framing is part of the body: S3 takes it off, a file server would store it.
        b"STREAMING-UNSIGNED-PAYLOAD-TRAILER" if is_s3 => Ok(Some(value.clone())),
        b"STREAMING-UNSIGNED-PAYLOAD-TRAILER" => {
            Err(OriginError::unsendable("a plain HTTP origin cannot take an aws-chunked body"))
        }
        text if text.starts_with(b"STREAMING-") => {
            Err(OriginError::SignedStream { payload: String::from_utf8_lossy(text).into() })
        }
        _ => Err(OriginError::unsendable("x-amz-content-sha256 is neither a hash nor a known word")),
    }
}

/// The headers that go under the signature, in the form in which the other side will see them.
fn signed_headers(headers: &HeaderMap) -> Result<HeaderMap, OriginError> {
    let mut signed = HeaderMap::new();
    for name in headers.keys().filter(|name| must_be_signed(name)) {
        let mut folded = String::new();
        for value in headers.get_all(name) {
            let text = value.to_str().map_err(|_| OriginError::unsendable(format!("{name} is not ASCII")))?;
            if !folded.is_empty() {
                folded.push(',');
            }
            for (index, word) in text.split_ascii_whitespace().enumerate() {
                if index > 0 {
                    folded.push(' ');
                }
                folded.push_str(word);
            }
        }
        signed.insert(name.clone(), header_value(&folded, name.as_str())?);
    }
    Ok(signed)
}

fn must_be_signed(name: &HeaderName) -> bool {
    [HOST, CONTENT_TYPE, CONTENT_MD5, RANGE, IF_MATCH, IF_NONE_MATCH].contains(name)
        || name.as_str().starts_with("x-amz-")
}

#[cfg(test)]
mod tests;
