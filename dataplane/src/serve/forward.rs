//! Handing a request on to the origin, signed with our keys, and its answer back.
#![forbid(unsafe_code)]

use std::rc::Rc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::Worker;
use super::body::RequestBody;
use super::connection::Ended;
use super::reply::Reply;
use super::request::{Changes, ForwardTarget, ReadTarget, failed, relayed};
use crate::dialect::changes::{BODY_BYTES_MAX, keys_to_delete};
use crate::engine::task;
use crate::http1::{BodyLength, Method, RequestHead};
use crate::metrics::{Counter, OriginAsk};
use crate::node::Node;
use crate::origin::{Forward, OriginError, OriginTarget, Uploader, upload};
use crate::peer::{self, Changed, Forget, OURS};
use crate::resolve;

/// A read that is not answered from here.
pub(super) fn of_read(head: &RequestHead, target: &ReadTarget<'_>) -> ForwardTarget {
    ForwardTarget {
        accelerator: target.accelerator,
        changes: Changes::Nothing,
        path: super::request::behind_bucket(head.path()).into(),
    }
}

/// Forwards a request with its body and makes the answer a reply.
pub(super) async fn forward(
    worker: &Rc<Worker>,
    head: &RequestHead,
    target: &ForwardTarget,
    body: &mut impl RequestBody,
    request_id: &str,
) -> Result<Reply, Ended> {
    let (accelerator, origin) = match resolve::bound(worker, target.accelerator) {
        Ok(bound) => bound,
        Err(failure) => return Ok(failed(failure, head, request_id)),
    };
    let mut expects_continue = head.expect_continue && !body.is_finished();
    let held_deletion = if matches!(target.changes, Changes::Listed) { worker.hold_deletion() } else { None };
    // What has been received of the body before it is clear what it changes.
    let mut held = Vec::new();
    let changed = match &target.changes {
        Changes::Nothing => None,
        Changes::Object(key) => Some(Changed::Objects(vec![key.clone()])),
        Changes::Listed if held_deletion.is_some() && may_be_held(head) => {
            if std::mem::take(&mut expects_continue) {
                body.send_continue().await?;
            }
            let is_whole = hold(body, &mut held).await?;
            let keys = if is_whole { keys_to_delete(&held) } else { None };
            Some(keys.map_or(Changed::Anything, Changed::Objects))
        }
        Changes::Listed | Changes::Anything => Some(Changed::Anything),
    };
    let forgetting = changed.map(|changed| Forgetting::new(worker, &accelerator.target, changed));
    let method =
        http::Method::from_bytes(head.method.as_str().as_bytes()).expect("methods were parsed as tokens");
    let (uploader, upload) = match head.body {
        BodyLength::None => (None, None),
        BodyLength::Length(length) => {
            let (uploader, upload) = upload(Some(length));
            (Some(uploader), Some(upload))
        }
        BodyLength::Chunked => {
            let (uploader, upload) = upload(None);
            (Some(uploader), Some(upload))
        }
    };
    let request = Forward {
        method,
        path: target.path.clone(),
        query: head.query().map(Into::into),
        headers: headers(head),
        body: upload,
    };
    worker.counters.bump(Counter::OriginRequests(OriginAsk::Forward), 1);
    let answering = origin.forward(request);
    let answer = match uploader {
        None => answering.await,
        Some(uploader) => {
            if expects_continue {
                body.send_continue().await?;
            }
            tokio::pin!(answering);
            tokio::select! {
                biased;
                // An answer that comes before the body has ended is the answer; the connection closes behind it.
                answer = &mut answering => answer,
                fed = feed(body, held.into(), uploader) => {
                    fed?;
                    answering.await
                }
            }
        }
    };
    let mut reply = match answer {
        Ok(relay) => relayed(relay, head.method == Method::Head),
        Err(error) => refusal(&error, head, request_id),
    };
    reply.forgetting = forgetting;
    Ok(reply)
}

fn may_be_held(head: &RequestHead) -> bool {
    match head.body {
        BodyLength::Length(length) => length <= BODY_BYTES_MAX as u64,
        BodyLength::None | BodyLength::Chunked => true,
    }
}

/// Receives a body as far as it may be held; true if that is all of it.
async fn hold(body: &mut impl RequestBody, held: &mut Vec<u8>) -> Result<bool, Ended> {
    while held.len() <= BODY_BYTES_MAX {
        let Some(bytes) = body.next().await? else { return Ok(true) };
        held.extend_from_slice(&bytes);
    }
    Ok(false)
}

async fn feed(body: &mut impl RequestBody, held: Bytes, uploader: Uploader) -> Result<(), Ended> {
    if !held.is_empty() && uploader.send(held).await.is_err() {
        return Ok(());
    }
    while let Some(bytes) = body.next().await? {
        if uploader.send(bytes).await.is_err() {
            return Ok(());
        }
    }
    uploader.finish().await;
    Ok(())
}

fn refusal(error: &OriginError, head: &RequestHead, request_id: &str) -> Reply {
    let (status, code) = match error {
        OriginError::SignedStream { .. } => (501, "NotImplemented"),
        OriginError::Unsendable { .. } => (400, "InvalidRequest"),
        OriginError::UploadCut => (400, "IncompleteBody"),
        OriginError::TimedOut { .. } => (504, "GatewayTimeout"),
        _ => (502, "BadGateway"),
    };
    tracing::warn!(%error, status, "request not forwarded");
    Reply::error(status, code, &error.to_string(), head.path(), request_id)
}

/// Everything but what belongs to the client's connection.
fn headers(head: &RequestHead) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in head.end_to_end_headers() {
        // What nodes say to each other, a token among it, is not the origin's.
        if name.len() >= OURS.len() && name.as_bytes()[..OURS.len()].eq_ignore_ascii_case(OURS.as_bytes()) {
            continue;
        }
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value))
        {
            headers.append(name, value);
        }
    }
    headers
}

/// Makes the node forget what a write changes: when it is made and when it is dropped, however the write ends.
/// It goes with the reply, because some writes are done only when the last byte of their answer has come. The other nodes
/// of the fleet are told by [`Forgetting::finish`], before the client knows that its write is done.
#[derive(Debug)]
pub(crate) struct Forgetting {
    worker: Rc<Worker>,
    target: OriginTarget,
    changed: Changed,
    are_others_told: bool,
}

impl Forgetting {
    fn new(worker: &Rc<Worker>, target: &OriginTarget, changed: Changed) -> Self {
        forget(&worker.node, target, &changed);
        Self { worker: Rc::clone(worker), target: target.clone(), changed, are_others_told: false }
    }

    /// The write is done: nobody believes what was before it once this returns, as far as the other nodes are reachable.
    ///
    /// This node forgets first, so that those who have forgotten get nothing old from it, and last (when it is dropped),
    /// since it may have got something old from one of them meanwhile.
    pub(crate) async fn finish(forgetting: &mut Option<Self>) {
        let Some(mut it) = forgetting.take() else { return };
        forget(&it.worker.node, &it.target, &it.changed);
        peer::forget(&it.worker, &it.target, &it.changed).await;
        it.are_others_told = true;
    }
}

impl Drop for Forgetting {
    fn drop(&mut self) {
        forget(&self.worker.node, &self.target, &self.changed);
        if !self.are_others_told && peer::is_shared(&self.worker) {
            // Its client is gone, and the write may be done all the same.
            let (worker, target) = (Rc::clone(&self.worker), self.target.clone());
            let changed = std::mem::replace(&mut self.changed, Changed::Anything);
            task::spawn(async move { peer::forget(&worker, &target, &changed).await });
        }
    }
}

/// Another node says what was changed through it.
pub(super) fn forget_here(node: &Node, target: &OriginTarget, what: Forget, key: Box<[u8]>) {
    let changed = match what {
        Forget::Object => Changed::Objects(vec![key]),
        Forget::All => Changed::Anything,
    };
    forget(node, target, &changed);
}

fn forget(node: &Node, target: &OriginTarget, changed: &Changed) {
    // Two accelerators may stand before one store.
    for (index, accelerator) in node.served().all() {
        if accelerator.target != *target {
            continue;
        }
        match changed {
            Changed::Objects(keys) => {
                for key in keys {
                    node.table.forget(index, key);
                }
            }
            Changed::Anything => node.table.forget_all(index),
        }
    }
}
