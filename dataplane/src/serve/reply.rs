//! What will be answered, before anybody knows in which encoding.
#![forbid(unsafe_code)]

use std::sync::Arc;

use http::HeaderMap;

use super::forward::Forgetting;
use super::stream::ObjectStream;
use crate::dialect::s3;
use crate::engine::Slice;
use crate::http1::{BodyLength, CacheOutcome, ContentRange, DateText, ResponseHead};
use crate::metrics::Outcome;
use crate::origin::Body;
use crate::table::ObjectEntry;

/// One answer.
#[derive(Debug)]
pub(crate) struct Reply {
    /// Status code.
    pub(crate) status: u16,
    /// The version it is about; its header record is repeated.
    pub(crate) entry: Option<Arc<ObjectEntry>>,
    /// Headers of an origin answer that is handed on.
    pub(crate) relayed: Option<HeaderMap>,
    /// `Content-Type` of a body of our own.
    pub(crate) content_type: Option<&'static str>,
    /// `Content-Range`.
    pub(crate) content_range: Option<ContentRange>,
    /// `x-forebay-cache`.
    pub(crate) cache: Option<CacheOutcome>,
    /// `Age`, seconds.
    pub(crate) age_s: Option<u64>,
    /// `Retry-After`, seconds.
    pub(crate) retry_after_s: Option<u32>,
    /// The body.
    pub(crate) payload: Payload,
    /// The connection cannot go on after it.
    pub(crate) close: bool,
    /// What the node forgets once more before the last byte of this answer leaves.
    pub(crate) forgetting: Option<Forgetting>,
}

/// The body of an answer.
#[derive(Debug)]
pub(crate) enum Payload {
    /// None, and no length is said.
    None,
    /// None, but a GET would have had so many bytes.
    Length(u64),
    /// Bytes of our own.
    Own(Vec<u8>),
    /// A range of an object; the first slice is there.
    Object(Slice, ObjectStream),
    /// The origin's body, with its length where it is known.
    Relay(Body, Option<u64>),
}

impl Reply {
    pub(crate) fn new(status: u16, payload: Payload) -> Self {
        Self {
            status,
            entry: None,
            relayed: None,
            content_type: None,
            content_range: None,
            cache: None,
            age_s: None,
            retry_after_s: None,
            payload,
            close: false,
            forgetting: None,
        }
    }

    /// An error of ours, in the client's words.
    pub(crate) fn error(status: u16, code: &str, message: &str, resource: &[u8], request_id: &str) -> Self {
        let body = s3::error_body(code, message, resource, request_id);
        let mut reply = Self::new(status, Payload::Own(body));
        reply.content_type = Some("application/xml");
        if status == 503 {
            reply.retry_after_s = Some(1);
        }
        reply
    }

    /// Its head as every door says it: with the length of the body where that is known, and without a word about the
    /// connection. To a HEAD, an error of ours has no body and says so.
    pub(crate) fn head<'a>(
        &'a self,
        is_head: bool,
        date: &'a DateText,
        request_id: &'a str,
    ) -> ResponseHead<'a> {
        let mut head = ResponseHead::new(self.status, date);
        head.record = self.entry.as_ref().map(|entry| &entry.facts.record);
        head.relayed = self.relayed.as_ref();
        head.content_type = self.content_type;
        head.content_range = self.content_range;
        head.accept_ranges = self.entry.is_some();
        head.cache = self.cache;
        head.age_s = self.age_s;
        head.retry_after_s = self.retry_after_s;
        head.request_id = Some(request_id);
        head.body = match &self.payload {
            Payload::Own(_) if is_head => BodyLength::Length(0),
            Payload::Length(length) | Payload::Relay(_, Some(length)) => BodyLength::Length(*length),
            Payload::Own(bytes) => BodyLength::Length(bytes.len() as u64),
            Payload::Object(_, stream) => BodyLength::Length(stream.range().len()),
            Payload::None | Payload::Relay(_, None) => BodyLength::None,
        };
        head
    }

    /// How it counts.
    pub(crate) fn outcome(&self) -> Outcome {
        match self.cache {
            _ if self.status >= 500 => Outcome::Error,
            Some(CacheOutcome::Ram) => Outcome::Ram,
            Some(CacheOutcome::Drive) => Outcome::Drive,
            Some(CacheOutcome::Miss) => Outcome::Miss,
            Some(CacheOutcome::Partial) => Outcome::Partial,
            None if self.status >= 400 => Outcome::Error,
            Some(CacheOutcome::Bypass) | None => Outcome::Bypass,
        }
    }
}
