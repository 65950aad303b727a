//! Handing a request on to the origin, signed with our keys, and its answer back.
#![forbid(unsafe_code)]

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::body::BodyReader;
use super::connection::{Connection, Ended};
use super::reply::Reply;
use super::request::{ForwardTarget, ReadTarget, relayed};
use crate::http1::{BodyLength, Method, RequestHead};
use crate::metrics::{Counter, OriginAsk};
use crate::node::Node;
use crate::origin::{Forward, OriginError, Uploader, upload};

/// A read that is not answered from here.
pub(super) fn of_read(head: &RequestHead, target: &ReadTarget) -> ForwardTarget {
    ForwardTarget {
        accelerator: target.accelerator,
        key: Some(target.key.clone()),
        writes: false,
        path: super::request::behind_bucket(head.path()).into(),
    }
}

/// Forwards a request with its body and makes the answer a reply.
pub(super) async fn forward(
    connection: &mut Connection,
    head: &RequestHead,
    target: &ForwardTarget,
    body: &mut BodyReader,
    request_id: &str,
) -> Result<Reply, Ended> {
    let worker = std::rc::Rc::clone(&connection.worker);
    let forgetting = Forgetting::new(&worker.node, target);
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
    let origin = worker.origin(target.accelerator);
    let answering = origin.forward(request);
    let answer = match uploader {
        None => answering.await,
        Some(uploader) => {
            if head.expect_continue && !body.is_finished() {
                connection.send_continue().await?;
            }
            tokio::pin!(answering);
            tokio::select! {
                biased;
                // An answer that comes before the body has ended is the answer; the connection closes behind it.
                answer = &mut answering => answer,
                fed = feed(connection, body, uploader) => {
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

async fn feed(connection: &mut Connection, body: &mut BodyReader, uploader: Uploader) -> Result<(), Ended> {
    while let Some(bytes) = body.next(connection).await? {
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
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value))
        {
            headers.append(name, value);
        }
    }
    headers
}

/// Makes the node forget what a write changes: when it is made and when it is dropped, however the write ends.
/// It goes with the reply, because some writes are done only when the last byte of their answer has come.
#[derive(Debug)]
pub(crate) struct Forgetting {
    node: Arc<Node>,
    accelerator: u16,
    key: Option<Box<[u8]>>,
}

impl Forgetting {
    fn new(node: &Arc<Node>, target: &ForwardTarget) -> Option<Self> {
        if !target.writes {
            return None;
        }
        let forgetting =
            Self { node: Arc::clone(node), accelerator: target.accelerator, key: target.key.clone() };
        forgetting.forget();
        Some(forgetting)
    }

    fn forget(&self) {
        let target = &self.node.accelerators[usize::from(self.accelerator)].target;
        // Two accelerators may stand before one store.
        for (index, accelerator) in self.node.accelerators.iter().enumerate() {
            if accelerator.target != *target {
                continue;
            }
            match &self.key {
                Some(key) => {
                    self.node.table.forget(index as u16, key);
                }
                // A request about the bucket that writes (a deletion of many) names its objects in its body.
                None => self.node.table.forget_all(index as u16),
            }
        }
    }
}

impl Drop for Forgetting {
    fn drop(&mut self) {
        self.forget();
    }
}
