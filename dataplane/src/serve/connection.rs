//! HTTP/1.1 on one connection: heads in, answers out, in order.
//!
//! While a slice is on its way, the next one is fetched, so that a drive and a socket work at the same time. A
//! send that is interrupted because its reader pauses gives its leases back and keeps only the offset; the
//! connection ends when nothing has moved for `send_stall`. A body that cannot be finished is cut visibly: the
//! connection closes before its declared length.
//!
//! An answer that comes before its request has ended is followed by a lingering close: a socket that is closed with
//! unread bytes in it is reset, and the client, still sending, may never see the answer.
#![forbid(unsafe_code)]

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::Worker;
use super::body::{Http1Body, RequestBody as _};
use super::forward::Forgetting;
use super::link::{Link, Opened, Sent, Wire};
use super::reply::{Payload, Reply};
use super::request;
use super::stream::ObjectStream;
use super::worker::WatchGuard;
use crate::engine::{Outgoing, SLICES_MAX, Slice, Socket};
use crate::http1::{
    BodyLength, HeadError, HeadLimits, LAST_CHUNK, Method, RequestHead, ResponseHead, take_head,
    write_chunk_head,
};
use crate::metrics::{CloseReason, Counter, Limit, Outcome, StatusClass};
use crate::origin::Body;

/// Room that is made where there is none left: for a body, or for the rest of a head, up to the limit.
const BUFFER_BYTES: usize = 16 << 10;
/// A larger allocation for heads is not kept: a relayed body has been in it.
const HEADER_BYTES_KEPT: usize = 16 << 10;
/// How long, and of how many bytes, the rest of a request is received and thrown away behind an early answer. Two parts
/// of an upload as most clients make them.
const LINGER_MAX: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 16 << 20;

/// Serves a connection until its end, and says why it ended.
pub(super) async fn serve(worker: &Rc<Worker>, socket: Socket, wire: &Wire) -> CloseReason {
    let (link, is_bare) = match Link::open(worker, socket, wire).await {
        Opened::Link(link) => (link, false),
        Opened::Bare(socket) => (Link::Plain(socket), true),
        Opened::Ended(reason) => return reason,
    };
    let mut connection = Connection {
        worker: Rc::clone(worker),
        link,
        lingers: false,
        guard: worker.watch(),
        buffer: Vec::new(),
        header: Vec::new(),
    };
    let Ended(reason) =
        if is_bare { Box::pin(connection.refuse_bare()).await } else { connection.exchanges().await };
    if is_orderly(reason) {
        connection.link.farewell(worker).await;
    }
    connection.linger(reason).await;
    reason
}

/// Whether the client has everything that it was promised.
fn is_orderly(reason: CloseReason) -> bool {
    use CloseReason::{BadRequest, Client, Drain, Finished, HeadTimeout, Idle};
    matches!(reason, Client | Finished | Idle | HeadTimeout | BadRequest | Drain)
}

/// The connection is over.
#[derive(Debug)]
pub(super) struct Ended(pub(super) CloseReason);

pub(super) struct Connection {
    pub(super) worker: Rc<Worker>,
    link: Link,
    /// The client may still be sending behind the last answer.
    lingers: bool,
    guard: WatchGuard,
    /// Bytes received and not yet understood: the rest of a head, a body, or further requests.
    pub(super) buffer: Vec<u8>,
    /// The allocation for heads of answers.
    header: Vec<u8>,
}

impl Connection {
    /// Requests and their answers, to the end.
    async fn exchanges(&mut self) -> Ended {
        loop {
            if let Err(ended) = self.exchange().await {
                return ended;
            }
        }
    }

    /// One request and its answer.
    async fn exchange(&mut self) -> Result<(), Ended> {
        let head = self.read_head().await?;
        let worker = Rc::clone(&self.worker);
        let request_id = worker.request_id();
        let mut body = Http1Body::new(self, head.body);
        let reply = request::answer(&worker, &head, &mut body, &request_id).await?;
        let is_finished = body.is_finished();
        // What is left of a body would be taken for the next request.
        let close = reply.close || !head.keep_alive || !is_finished || worker.node.is_draining();
        self.lingers = !is_finished || close && !self.buffer.is_empty();
        self.answer(&head, reply, close, &request_id).await?;
        if self.buffer.capacity() == 0 {
            self.buffer = head.into_room();
            self.buffer.clear();
        }
        if !close {
            return Ok(());
        }
        let reason = if worker.node.is_draining() { CloseReason::Drain } else { CloseReason::Finished };
        Err(Ended(reason))
    }

    async fn read_head(&mut self) -> Result<RequestHead, Ended> {
        let limits = &self.worker.node.limits;
        let head_limits = HeadLimits {
            head_bytes_max: limits.head_bytes_max as usize,
            headers_max: limits.headers_max as usize,
            ..HeadLimits::default()
        };
        let (idle, header) = (limits.idle_timeout, limits.header_timeout);
        let mut deadline = Instant::now() + if self.buffer.is_empty() { idle } else { header };
        loop {
            if !self.buffer.is_empty() {
                match take_head(&mut self.buffer, &head_limits) {
                    Ok(Some(head)) => return Ok(head),
                    Ok(None) => {}
                    Err(error) => return Box::pin(self.refuse_head(error)).await,
                }
            }
            let was_empty = self.buffer.is_empty();
            let received = if was_empty {
                self.receive_first(deadline).await?
            } else {
                self.receive_until(deadline).await?
            };
            match received {
                0 if was_empty => return Err(Ended(CloseReason::Client)),
                0 => return Err(Ended(CloseReason::Receive)),
                _ if was_empty => deadline = Instant::now() + header,
                _ => {}
            }
        }
    }

    /// Receives the first bytes of a request; 0 is the end of the stream. Until they come the connection is idle: it holds
    /// no memory, and ends when the worker drains.
    async fn receive_first(&mut self, deadline: Instant) -> Result<usize, Ended> {
        let worker = Rc::clone(&self.worker);
        worker.rooms.give(std::mem::take(&mut self.buffer));
        worker.rooms.give(std::mem::take(&mut self.header));
        let received = timeout_at(deadline, async {
            tokio::select! {
                biased;
                received = self.link.recv_first(&worker) => Some(received),
                () = worker.drained() => None,
            }
        });
        match received.await {
            Ok(Some((result, buffer))) => {
                (self.buffer, self.header) = (buffer, worker.rooms.take());
                result.map_err(|_| Ended(CloseReason::Receive))
            }
            Ok(None) => Err(Ended(CloseReason::Drain)),
            Err(_) => Err(Ended(CloseReason::Idle)),
        }
    }

    /// Receives more, up to the room there is; 0 is the end of the stream.
    async fn receive_until(&mut self, deadline: Instant) -> Result<usize, Ended> {
        if self.buffer.len() == self.buffer.capacity() {
            self.buffer.reserve(BUFFER_BYTES);
        }
        let buffer = std::mem::take(&mut self.buffer);
        let Ok((result, buffer)) = timeout_at(deadline, self.link.recv(&self.worker, buffer)).await else {
            return Err(Ended(CloseReason::HeadTimeout));
        };
        self.buffer = buffer;
        result.map_err(|_| Ended(CloseReason::Receive))
    }

    /// Receives more of a request body; false at the end of the stream.
    pub(super) async fn receive_body(&mut self) -> Result<bool, Ended> {
        let deadline = Instant::now() + self.worker.node.limits.request_deadline;
        if self.buffer.is_empty() {
            self.buffer.reserve(BUFFER_BYTES);
        }
        Ok(self.receive_until(deadline).await? > 0)
    }

    async fn refuse_head(&mut self, error: HeadError) -> Result<RequestHead, Ended> {
        if matches!(error.status(), 414 | 431) {
            self.worker.counters.bump(Counter::LimitRefusals(Limit::Head), 1);
        }
        Err(self.refuse(error.status(), &error.to_string()).await)
    }

    /// Answers a client that came to the door of HTTPS without TLS, in words that it understands.
    async fn refuse_bare(&mut self) -> Ended {
        self.refuse(400, "this port speaks HTTPS only: use https:// in the URL, or the port for plain HTTP")
            .await
    }

    /// Answers what is no request, for the last time on this connection.
    async fn refuse(&mut self, status: u16, message: &str) -> Ended {
        let request_id = self.worker.request_id();
        let date = self.worker.date();
        let reply = Reply::error(status, "InvalidRequest", message, b"", &request_id);
        let outcome = reply.outcome();
        let Payload::Own(body) = reply.payload else { unreachable!("errors have a body of ours") };
        let mut head = ResponseHead::new(reply.status, &date);
        head.content_type = reply.content_type;
        head.request_id = Some(&request_id);
        head.body = BodyLength::Length(body.len() as u64);
        head.close = true;
        let mut bytes = std::mem::take(&mut self.header);
        bytes.clear();
        head.write(&mut bytes);
        bytes.extend_from_slice(&body);
        self.count(outcome, reply.status);
        self.lingers = true;
        match self.send(Outgoing::header(bytes)).await {
            Ok(()) => Ended(CloseReason::BadRequest),
            Err(ended) => ended,
        }
    }

    /// Behind a whole answer to half a request: says that nothing more will be sent, and receives what is on its way,
    /// within bounds, until the client has seen the answer and closes.
    async fn linger(&mut self, reason: CloseReason) {
        let is_answered =
            matches!(reason, CloseReason::Finished | CloseReason::BadRequest | CloseReason::Drain);
        if !self.lingers || !is_answered {
            return;
        }
        if self.link.shutdown_write(&self.worker).is_err() {
            return;
        }
        let deadline = Instant::now() + LINGER_MAX;
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut left = LINGER_BYTES_MAX;
        while left > 0 {
            buffer.clear();
            buffer.reserve(BUFFER_BYTES);
            match timeout_at(deadline, self.link.recv_to_discard(&self.worker, buffer)).await {
                Ok((Ok(received), back)) if received > 0 => {
                    buffer = back;
                    left = left.saturating_sub(received);
                }
                _ => return,
            }
        }
    }

    /// Says that the body may come.
    pub(super) async fn send_continue(&mut self) -> Result<(), Ended> {
        self.send(Outgoing::header(crate::http1::CONTINUE.to_vec())).await
    }

    async fn answer(
        &mut self,
        head: &RequestHead,
        mut reply: Reply,
        close: bool,
        request_id: &str,
    ) -> Result<(), Ended> {
        let is_head = head.method == Method::Head;
        let mut forgetting = reply.forgetting.take();
        if !matches!(reply.payload, Payload::Relay(..)) {
            // Before the answer leaves: whoever has it must not find what was before the write.
            Forgetting::finish(&mut forgetting).await;
        }
        let date = self.worker.date();
        let mut out = reply.head(is_head, &date, request_id);
        out.minor = head.minor;
        out.alt_svc = self.worker.alt_svc(self.link.is_encrypted());
        let is_unmeasured = matches!(reply.payload, Payload::Relay(_, None));
        let chunked = is_unmeasured && head.minor > 0;
        out.close = close || (is_unmeasured && !chunked);
        if chunked {
            out.body = BodyLength::Chunked;
        }
        let ends = out.close && !close;
        let mut bytes = std::mem::take(&mut self.header);
        bytes.clear();
        out.write(&mut bytes);
        // Counted before the last byte leaves: whoever has it may ask for the numbers at once.
        self.count(reply.outcome(), reply.status);
        match reply.payload {
            Payload::None | Payload::Length(_) => self.send(Outgoing::header(bytes)).await?,
            Payload::Own(_) if is_head => self.send(Outgoing::header(bytes)).await?,
            Payload::Own(body) => {
                bytes.extend_from_slice(&body);
                self.send(Outgoing::header(bytes)).await?;
            }
            Payload::Object(first, stream) => self.send_object(bytes, first, stream).await?,
            Payload::Relay(body, length) => {
                Box::pin(self.send_relay(bytes, body, length, chunked, forgetting)).await?;
            }
        }
        if ends { Err(Ended(CloseReason::Finished)) } else { Ok(()) }
    }

    fn count(&self, outcome: Outcome, status: u16) {
        self.worker.counters.bump(Counter::Requests(outcome, StatusClass::of(status)), 1);
    }

    /// Sends bytes of our own, all of them.
    async fn send(&mut self, mut outgoing: Outgoing) -> Result<(), Ended> {
        loop {
            let sent = self.send_once(outgoing).await?;
            outgoing = sent.outgoing;
            if sent.is_whole {
                outgoing.clear();
                if outgoing.header.capacity() <= HEADER_BYTES_KEPT {
                    self.header = outgoing.header;
                }
                return Ok(());
            }
            self.wait_writable().await?;
        }
    }

    /// One send; what comes back has not left, because the send was interrupted.
    async fn send_once(&mut self, outgoing: Outgoing) -> Result<Sent, Ended> {
        let pinned = outgoing.body_len() as u64;
        let _pinned = if pinned > 0 { Some(self.worker.pin(pinned).await) } else { None };
        let watch = &self.guard.watch;
        watch.begin(self.worker.tick());
        let (result, mut sent) = self.link.send(&self.worker, outgoing, watch).await;
        watch.end();
        match result {
            Ok(count) => {
                self.worker.counters.bump(Counter::SentBytes, count as u64);
                self.worker.counters.bump(Counter::SentByReferenceBytes, sent.outgoing.take_by_reference());
                self.worker.counters.bump(Counter::SentZeroCopyBytes, sent.outgoing.take_zero_copy());
                Ok(sent)
            }
            Err(_) => Err(Ended(CloseReason::SendFailed)),
        }
    }

    /// Waits for the reader, holding no lease.
    async fn wait_writable(&self) -> Result<(), Ended> {
        let stall = self.worker.node.limits.send_stall;
        match timeout(stall, self.link.writable(&self.worker)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Ended(CloseReason::SendFailed)),
            Err(_) => {
                self.worker.counters.bump(Counter::SendsStalled, 1);
                self.link.abandon(&self.worker);
                Err(Ended(CloseReason::SendStalled))
            }
        }
    }

    async fn send_object(
        &mut self,
        header: Vec<u8>,
        first: Slice,
        mut stream: ObjectStream,
    ) -> Result<(), Ended> {
        let mut outgoing = Outgoing::header(header);
        let mut next = Some(first);
        loop {
            if let Some(slice) = next.take() {
                outgoing.push(slice);
                self.gather(&mut outgoing, &mut stream);
            }
            let sliced = stream.position();
            let (sent, fetched) = if stream.is_at_end() {
                (self.send_once(outgoing).await?, Some(Ok(None)))
            } else {
                both(pin!(self.send_once(outgoing)), pin!(stream.next())).await?
            };
            outgoing = sent.outgoing;
            if !sent.is_whole {
                // The reader pauses: only the offset is kept.
                let position = sliced - outgoing.body_len() as u64;
                drop(fetched);
                stream.rest();
                outgoing.body.clear();
                self.wait_writable().await?;
                stream.seek(position);
                next = stream.next().await.map_err(|_| Ended(CloseReason::BodyCut))?;
                continue;
            }
            outgoing.clear();
            match fetched.expect("a whole send waits for the fetch") {
                Ok(Some(slice)) => next = Some(slice),
                Ok(None) => {
                    self.header = outgoing.header;
                    return Ok(());
                }
                Err(failure) => {
                    tracing::warn!(?failure, "body cut");
                    return Err(Ended(CloseReason::BodyCut));
                }
            }
        }
    }

    /// Adds what is in memory already, within one operation and the connection's share of pinned bytes.
    fn gather(&self, outgoing: &mut Outgoing, stream: &mut ObjectStream) {
        let most = self.worker.node.limits.send_pinned_bytes_per_connection_max as usize;
        while outgoing.body.len() < SLICES_MAX && outgoing.body_len() + stream.extent_bytes() <= most {
            let Some(slice) = stream.next_in_ram() else { break };
            outgoing.push(slice);
        }
    }

    async fn send_relay(
        &mut self,
        mut bytes: Vec<u8>,
        mut body: Body,
        length: Option<u64>,
        chunked: bool,
        mut forgetting: Option<Forgetting>,
    ) -> Result<(), Ended> {
        let mut left = length;
        while let Some(piece) = body.chunk().await.map_err(|error| cut(&error))? {
            if let Some(left) = &mut left {
                // More than was said would be taken for the next answer.
                *left = left.checked_sub(piece.len() as u64).ok_or(Ended(CloseReason::BodyCut))?;
            }
            if chunked && !piece.is_empty() {
                write_chunk_head(&mut bytes, piece.len());
            }
            bytes.extend_from_slice(&piece);
            if chunked && !piece.is_empty() {
                bytes.extend_from_slice(b"\r\n");
            }
            if left == Some(0) {
                // The write is done now, and the client does not know it yet.
                Forgetting::finish(&mut forgetting).await;
            }
            self.send(Outgoing::header(bytes)).await?;
            bytes = std::mem::take(&mut self.header);
        }
        Forgetting::finish(&mut forgetting).await;
        if left.is_some_and(|left| left > 0) {
            return Err(Ended(CloseReason::BodyCut));
        }
        if chunked {
            bytes.extend_from_slice(LAST_CHUNK);
        }
        // Only the head of an empty body, or the last chunk; nothing else is left.
        if bytes.is_empty() { Ok(()) } else { self.send(Outgoing::header(bytes)).await }
    }
}

fn cut(error: &dyn std::error::Error) -> Ended {
    tracing::warn!(%error, "relayed body cut");
    Ended(CloseReason::BodyCut)
}

/// Both futures. The second is given up if the first ends in an error or with something left.
async fn both<T>(
    mut sending: Pin<&mut impl Future<Output = Result<Sent, Ended>>>,
    mut fetching: Pin<&mut impl Future<Output = T>>,
) -> Result<(Sent, Option<T>), Ended> {
    let (mut sent, mut fetched) = (None, None);
    poll_fn(|context| {
        if sent.is_none()
            && let Poll::Ready(result) = sending.as_mut().poll(context)
        {
            match result {
                Ok(done) => sent = Some(done),
                Err(ended) => return Poll::Ready(Err(ended)),
            }
        }
        if fetched.is_none()
            && let Poll::Ready(result) = fetching.as_mut().poll(context)
        {
            fetched = Some(result);
        }
        match (sent.take(), fetched.take()) {
            // An interrupted send waits for nothing: what it still holds may be what the fetch waits for.
            (Some(sent), result) if result.is_some() || !sent.is_whole => Poll::Ready(Ok((sent, result))),
            (left, right) => {
                (sent, fetched) = (left, right);
                Poll::Pending
            }
        }
    })
    .await
}
