//! One request, whatever door it came through: who asks, for what, and what is answered.
//!
//! Conditions come before ranges (RFC 9110, 13.2.2), authorisation before anything that is shared. What is not
//! a plain read of an object goes to the origin as it came, and a write makes the node forget the object
//! before and after: before, so that nobody joins an old belief while the write is under way; after, because
//! what was read meanwhile may be older than the write.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tokio::time::{Instant, timeout};

use super::Worker;
use super::body::RequestBody;
use super::connection::Ended;
use super::forward;
use super::reply::{Payload, Reply};
use super::stream::{ObjectStream, StreamFailure};
use crate::auth;
use crate::dialect::changes::{BucketChange, bucket_change};
use crate::dialect::s3::{Address, AddressError, bucket_of};
use crate::http1::{CacheOutcome, ContentRange, Method, RequestHead};
use crate::metrics::{Counter, Limit};
use crate::object::Verdict;
use crate::origin::Relay;
use crate::peer::{self, Caller, Reach};
use crate::range::{ByteRange, RangeAsk, Unsatisfiable, parse_range};
use crate::resolve::{self, Found, Want};
use crate::table::{FillFailure, ObjectEntry, ResolveFailure};

/// How often a read that finds its version gone begins anew, before its head is sent.
const ROUNDS_MAX: u32 = 3;

/// The answer to a request, whatever door it came through.
///
/// # Errors
/// The body of the request broke off: there is nobody to answer.
pub(super) async fn answer(
    worker: &Rc<Worker>,
    head: &RequestHead,
    body: &mut impl RequestBody,
    request_id: &str,
) -> Result<Reply, Ended> {
    match route(worker, head, request_id) {
        Route::Reply(reply) => Ok(reply),
        Route::Read(target) => match read(worker, head, &target, request_id).await {
            Read::Reply(reply) => Ok(reply),
            Read::Bypass => {
                let target = forward::of_read(head, &target);
                // In boxes, here and below: a connection would hold room for the rarest of its answers for ever.
                Box::pin(forward::forward(worker, head, &target, body, request_id)).await
            }
        },
        Route::Forward(target) => Box::pin(forward::forward(worker, head, &target, body, request_id)).await,
    }
}

/// What to do about a request.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "moved once a request; a box would be an allocation")]
enum Route<'a> {
    /// Answer this.
    Reply(Reply),
    /// Read an object: [`read`].
    Read(ReadTarget<'a>),
    /// Hand it to the origin: [`super::forward`].
    Forward(ForwardTarget),
}

/// A read that may be answered from here.
#[derive(Debug)]
pub(crate) struct ReadTarget<'a> {
    pub(crate) accelerator: u16,
    pub(crate) key: Cow<'a, [u8]>,
    /// Who may be asked for what is not here.
    pub(crate) reach: Reach,
}

/// A request for the origin.
#[derive(Debug)]
pub(crate) struct ForwardTarget {
    pub(crate) accelerator: u16,
    /// What it may change there.
    pub(crate) changes: Changes,
    /// The raw path behind the bucket.
    pub(crate) path: Box<[u8]>,
}

/// What a request may change at the origin.
#[derive(Debug)]
pub(crate) enum Changes {
    /// No object.
    Nothing,
    /// This one.
    Object(Box<[u8]>),
    /// Those that its body lists.
    Listed,
    /// Nobody here knows which.
    Anything,
}

/// Who asks, and for what.
fn route<'a>(worker: &Worker, head: &'a RequestHead, request_id: &str) -> Route<'a> {
    let refuse = |status, code: &str, message: &str| {
        Route::Reply(Reply::error(status, code, message, head.path(), request_id))
    };
    let served = worker.served();
    let caller = peer::caller(head, served.cluster.as_deref());
    match caller {
        Caller::Client => {
            if let Err(denied) = auth::verify(head, &served.keys, worker.wall_time()) {
                return refuse(denied.code.status(), denied.code.as_str(), &denied.message);
            }
        }
        Caller::Node { .. } => worker.counters.bump(Counter::PeerServed, 1),
        Caller::Stranger => {
            let message =
                "the request shows a token of a fleet that this node is not in; clients send none, they sign";
            return refuse(403, "AccessDenied", message);
        }
    }
    if let Method::Other(name) = &head.method {
        return refuse(405, "MethodNotAllowed", &format!("the method {name} is not one of S3's"));
    }
    let refuse_address =
        |error: AddressError| refuse(error.code().status(), error.code().as_str(), &error.to_string());
    let (bucket, key) = match Address::parse(head.path()) {
        Ok(Some(address)) => (address.bucket, address.key),
        Ok(None) => match bucket_of(head.path()) {
            Ok(Some(bucket)) => (bucket, Cow::default()),
            Ok(None) => {
                let names: Vec<_> = served.all().map(|(_, known)| &*known.name).collect();
                let message =
                    format!("name a bucket in the path; this node accelerates: {}", names.join(", "));
                return refuse(400, "InvalidRequest", &message);
            }
            Err(error) => return refuse_address(error),
        },
        Err(error) => return refuse_address(error),
    };
    if let Caller::Node { identity, revision, forget } = &caller {
        let found =
            served.find(&bucket).filter(|(_, bound)| **identity == *peer::identity(&bound.target).as_bytes());
        let Some((accelerator, bound)) = found else {
            return refuse(421, "NotHere", "this node does not serve that store under this name");
        };
        return match forget {
            Some(what) => {
                forward::forget_here(&worker.node, &bound.target, *what, key.into());
                Route::Reply(Reply::new(204, Payload::None))
            }
            None if worker.node.revision_taken() < *revision => refuse(
                503,
                "SlowDown",
                "this node has not taken the state of the control plane that yours has",
            ),
            None if head.method == Method::Get && !key.is_empty() => {
                Route::Read(ReadTarget { accelerator, key, reach: Reach::Origin })
            }
            None => refuse(421, "NotHere", "nodes ask each other for objects' bytes and for nothing else"),
        };
    }
    let Some((accelerator, bound)) = served.find(&bucket) else {
        let message = format!(
            "this node has no accelerator named {bucket}; start it with --accelerator {bucket}=ORIGIN, or have its \
             control plane name it: forebay-control accelerator add {bucket}=ORIGIN"
        );
        return refuse(404, "NoSuchBucket", &message);
    };
    let raw_bucket = head.path().strip_prefix(b"/").unwrap_or_default().split(|byte| *byte == b'/').next();
    if raw_bucket != Some(bucket.as_bytes()) {
        // The origin would split such a path elsewhere, and so mean another object.
        return refuse(
            400,
            "InvalidURI",
            "the name of the bucket and the slash behind it must not be percent-encoded",
        );
    }
    let target = &bound.target;
    let climbs = |segment: &[u8]| matches!(segment, b"." | b"..");
    if !target.is_signed() && key.split(|byte| *byte == b'/').any(climbs) {
        let message = "an HTTP origin is a tree of files: `.` and `..` would lead out of its prefix";
        return refuse(400, "InvalidURI", message);
    }
    let is_read = matches!(head.method, Method::Get | Method::Head);
    if is_read && !key.is_empty() && !is_special(head) {
        return Route::Read(ReadTarget { accelerator, key, reach: Reach::Fleet });
    }
    let path = behind_bucket(head.path()).into();
    Route::Forward(ForwardTarget { accelerator, changes: changes(head, key, target.is_signed()), path })
}

fn changes(head: &RequestHead, key: Cow<'_, [u8]>, is_s3: bool) -> Changes {
    if matches!(head.method, Method::Get | Method::Head | Method::Options) {
        return Changes::Nothing;
    }
    if !key.is_empty() {
        return Changes::Object(key.into());
    }
    // Only of S3 is it known what its requests about a bucket do.
    if !is_s3 {
        return Changes::Anything;
    }
    match bucket_change(head) {
        BucketChange::Nothing => Changes::Nothing,
        BucketChange::Listed => Changes::Listed,
        BucketChange::Anything => Changes::Anything,
    }
}

/// The raw path behind the bucket: empty, or with its slash. The name of a bucket has no slash, encoded or not.
pub(super) fn behind_bucket(path: &[u8]) -> &[u8] {
    let slash = path.iter().skip(1).position(|byte| *byte == b'/');
    slash.map_or(&[], |slash| &path[slash + 1..])
}

/// Whether a read asks for something else than the bytes of the object as it is.
fn is_special(head: &RequestHead) -> bool {
    // SDKs add the name of the operation to plain reads.
    let query = head
        .query()
        .filter(|query| !query.is_empty() && *query != b"x-id=GetObject" && *query != b"x-id=HeadObject");
    query.is_some() || head.headers().any(|(name, _)| is_special_header(name))
}

/// Headers that change which bytes are answered or who may read them.
fn is_special_header(name: &str) -> bool {
    let prefixes = ["x-amz-server-side-encryption-customer-", "x-tos-server-side-encryption-customer-"];
    let starts = |prefix: &&str| {
        name.len() >= prefix.len() && name.as_bytes()[..prefix.len()].eq_ignore_ascii_case(prefix.as_bytes())
    };
    prefixes.iter().any(starts) || name.eq_ignore_ascii_case("x-tos-trailer")
}

/// What a read leads to.
#[expect(clippy::large_enum_variant, reason = "moved once a request; a box would be an allocation")]
enum Read {
    Reply(Reply),
    /// The object is not kept here: hand the request on.
    Bypass,
}

/// Answers a read.
async fn read(worker: &Rc<Worker>, head: &RequestHead, target: &ReadTarget<'_>, request_id: &str) -> Read {
    let now = Instant::now();
    let Some(decision) = worker.decide(target.accelerator, &target.key, now) else {
        return Read::Reply(failed(ResolveFailure::Removed, head, request_id));
    };
    if !decision.cache {
        return Read::Bypass;
    }
    let is_head = head.method == Method::Head;
    let asked = head.header("range").and_then(parse_range);
    let want = if is_head { Want::Head } else { Want::Bytes(asked) };
    let refuse = |status, code: &str, message: &str| {
        Read::Reply(Reply::error(status, code, message, head.path(), request_id))
    };
    for _ in 0..ROUNDS_MAX {
        let known = resolve::known(worker, target.accelerator, &target.key, decision.freshness, now);
        let found = if let Some(found) = known {
            found
        } else {
            let finding = Box::pin(resolve::find(
                worker,
                target.accelerator,
                &target.key,
                want,
                decision.freshness,
                target.reach,
                now,
            ));
            let Ok(found) = timeout(worker.node.limits.request_deadline, finding).await else {
                let (status, code, message) = interrupted(worker, StreamFailure::Deadline);
                return refuse(status, code, &message);
            };
            found
        };
        let (entry, age, is_new) = match found {
            Found::Object(entry, age) => (entry, age, false),
            Found::New(entry, age) => (entry, age, true),
            Found::Bypass => return Read::Bypass,
            Found::Answered(answered) => {
                let payload = if is_head {
                    Payload::Length(head_length(answered.status, &answered.headers))
                } else {
                    Payload::Own(answered.body.clone())
                };
                let mut reply = Reply::new(answered.status, payload);
                reply.relayed = Some(answered.headers.clone());
                reply.cache = Some(CacheOutcome::Bypass);
                return Read::Reply(reply);
            }
            Found::Failed(failure) => return Read::Reply(failed(failure, head, request_id)),
        };
        match about_version(worker, head, entry, asked, (is_head, target.reach), age).await {
            Ok(mut reply) => {
                if is_new {
                    // A small object may be here whole by now, and came from the origin all the same.
                    reply.cache = Some(CacheOutcome::Miss);
                }
                return Read::Reply(reply);
            }
            // Nothing has been sent yet: look for the version that is there now.
            Err(StreamFailure::Fill(FillFailure::Gone | FillFailure::Lost)) => {}
            Err(failure) => {
                let (status, code, message) = interrupted(worker, failure);
                return refuse(status, code, &message);
            }
        }
    }
    Read::Bypass
}

/// The answer about a version: conditions first, then the range.
async fn about_version(
    worker: &Rc<Worker>,
    head: &RequestHead,
    entry: Arc<ObjectEntry>,
    asked: Option<RangeAsk>,
    (is_head, reach): (bool, Reach),
    age: Option<Duration>,
) -> Result<Reply, StreamFailure> {
    let size = entry.facts.size;
    let verdict = head.conditions().judge(&entry.facts);
    let finish = |mut reply: Reply| {
        reply.age_s = age.map(|age| age.as_secs());
        reply
    };
    let about = |status, payload, cache, entry| {
        let mut reply = Reply::new(status, payload);
        reply.cache = Some(cache);
        reply.entry = Some(entry);
        reply
    };
    let asked = match verdict {
        Verdict::NotModified => return Ok(finish(about(304, Payload::None, CacheOutcome::Ram, entry))),
        Verdict::Failed => {
            let message = "at least one of the preconditions does not hold for the object";
            let mut reply = Reply::error(412, "PreconditionFailed", message, head.path(), "");
            reply.cache = Some(CacheOutcome::Ram);
            return Ok(reply);
        }
        Verdict::ProceedWhole => None,
        Verdict::Proceed => asked,
    };
    let (status, range) = match asked.map(|asked| asked.resolve(size)) {
        None => (200, ByteRange::whole(size)),
        Some(Ok(range)) => (206, Some(range)),
        Some(Err(Unsatisfiable { .. })) => {
            let message = format!("the object has {size} bytes");
            let mut reply = Reply::error(416, "InvalidRange", &message, head.path(), "");
            reply.content_range = Some(ContentRange::Unsatisfied { size });
            reply.cache = Some(CacheOutcome::Ram);
            return Ok(reply);
        }
    };
    let content_range =
        (status == 206).then(|| range.map(|range| ContentRange::Bytes { range, size })).flatten();
    let length = range.map_or(0, ByteRange::len);
    let Some(range) = range.filter(|_| !is_head) else {
        let mut reply = about(status, Payload::Length(length), CacheOutcome::Ram, entry);
        reply.content_range = content_range;
        return Ok(finish(reply));
    };
    let mut stream = ObjectStream::new(worker, Arc::clone(&entry), range, reach);
    let cache = stream.outcome();
    let first = stream.next().await?.expect("a range is never empty");
    let mut reply = about(status, Payload::Object(first, stream), cache, entry);
    reply.content_range = content_range;
    Ok(finish(reply))
}

/// The answer where nobody knows what the origin has.
pub(super) fn failed(failure: ResolveFailure, head: &RequestHead, request_id: &str) -> Reply {
    let (status, code, message) = gateway(failure);
    Reply::error(status, code, message, head.path(), request_id)
}

fn gateway(failure: ResolveFailure) -> (u16, &'static str, &'static str) {
    match failure {
        ResolveFailure::Removed => (
            404,
            "NoSuchBucket",
            "the accelerator was removed from this node while the request was under way",
        ),
        ResolveFailure::Unopened => {
            (502, "BadGateway", "the origin cannot be opened by this node, which tries again; see its log")
        }
        ResolveFailure::Unreachable => (502, "BadGateway", "the origin could not be reached, or broke off"),
        ResolveFailure::TimedOut => (504, "GatewayTimeout", "the origin did not answer in time"),
        ResolveFailure::Invalid => {
            (502, "BadGateway", "the origin's answer contradicts the question or itself")
        }
        ResolveFailure::Credentials => {
            (502, "BadGateway", "the node has no working credentials for the origin; see its log")
        }
    }
}

fn interrupted(worker: &Worker, failure: StreamFailure) -> (u16, &'static str, String) {
    match failure {
        StreamFailure::Memory | StreamFailure::Fill(FillFailure::Memory) => {
            let limit = if failure == StreamFailure::Memory { Limit::Reads } else { Limit::FillMemory };
            worker.counters.bump(Counter::LimitRefusals(limit), 1);
            (503, "SlowDown", "no memory was free in time; come again".into())
        }
        StreamFailure::Deadline => {
            worker.counters.bump(Counter::LimitRefusals(Limit::Deadline), 1);
            (504, "GatewayTimeout", "the origin did not deliver in time".into())
        }
        StreamFailure::Fill(FillFailure::Refused(status)) => {
            (502, "BadGateway", format!("the origin refused the object with status {status}"))
        }
        StreamFailure::Fill(failure) => (502, "BadGateway", failure.to_string()),
    }
}

/// The answer of the origin, handed on.
pub(crate) fn relayed(relay: Relay, is_head: bool) -> Reply {
    let Relay { status, headers, body } = relay;
    let length = length_of(&headers);
    let bodiless = is_head || matches!(status, 100..=199 | 204 | 304);
    let payload = match length {
        Some(_) if is_head => Payload::Length(head_length(status, &headers)),
        _ if bodiless => Payload::None,
        length => Payload::Relay(body, length),
    };
    let mut reply = Reply::new(status, payload);
    reply.relayed = Some(headers);
    reply.cache = Some(CacheOutcome::Bypass);
    reply
}

/// What a HEAD says of the length. Some clients take the length of an error's body for the object's.
fn head_length(status: u16, headers: &HeaderMap) -> u64 {
    if status >= 400 { 0 } else { length_of(headers).unwrap_or(0) }
}

fn length_of(headers: &HeaderMap) -> Option<u64> {
    headers.get(http::header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
