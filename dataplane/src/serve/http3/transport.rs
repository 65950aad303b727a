//! Between h3, which speaks HTTP/3, and quinn, which speaks QUIC: h3's traits over quinn's streams.
//!
//! Ours, for three things. What is written is copied once, when it is handed over, so that the lease it lies in goes
//! back at once: a reader who pauses holds bytes of QUIC's send window and no lease. A stream has ended only when the
//! peer has all of it, so that a connection can be closed without cutting its last answers. And a frame that would
//! have to be held whole is bounded ([`FrameGuard`]).
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::{Pin, pin};
use std::slice;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h3::error::Code;
use h3::quic::{self, ConnectionErrorIncoming, StreamErrorIncoming, StreamId, WriteBuf};
use quinn::{ConnectionError, ReadError, StoppedError, VarInt, WriteError};

use super::frames::FrameGuard;
use crate::engine::Slice;

/// Bytes on their way into a stream.
#[derive(Debug)]
pub(super) enum Piece {
    /// Of an object; holds its lease.
    Kept(Slice),
    /// Of our own, or of the origin's answer.
    Own(Bytes),
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        match self {
            Self::Kept(slice) => slice.len(),
            Self::Own(bytes) => bytes.len(),
        }
    }

    fn chunk(&self) -> &[u8] {
        match self {
            Self::Kept(slice) => slice.bytes(),
            Self::Own(bytes) => bytes,
        }
    }

    fn advance(&mut self, count: usize) {
        match self {
            Self::Kept(slice) => drop(slice.take_front(count)),
            Self::Own(bytes) => bytes.advance(count),
        }
    }
}

/// One QUIC connection, as h3 wants it.
pub(super) struct Transport {
    connection: quinn::Connection,
    frame_bytes_max: u64,
    accepting_bi: Option<Waiting<(quinn::SendStream, quinn::RecvStream)>>,
    accepting_uni: Option<Waiting<quinn::RecvStream>>,
    opening_bi: Option<Waiting<(quinn::SendStream, quinn::RecvStream)>>,
    opening_uni: Option<Waiting<quinn::SendStream>>,
}

type Waiting<T> = Pin<Box<dyn Future<Output = Result<T, ConnectionError>>>>;

impl Transport {
    /// Over `connection`; a frame other than DATA has at most `frame_bytes_max` bytes.
    pub(super) fn new(connection: quinn::Connection, frame_bytes_max: u64) -> Self {
        Self {
            connection,
            frame_bytes_max,
            accepting_bi: None,
            accepting_uni: None,
            opening_bi: None,
            opening_uni: None,
        }
    }

    fn both(&self, (send, recv): (quinn::SendStream, quinn::RecvStream)) -> BothWays {
        let guard = FrameGuard::of_request(self.frame_bytes_max);
        BothWays { send: Outgoing::new(send), recv: Incoming { stream: recv, guard } }
    }
}

/// Polls what is waited for, and begins to wait if that has not been done.
fn poll_waiting<T, F>(
    waiting: &mut Option<Waiting<T>>,
    connection: &quinn::Connection,
    begin: impl FnOnce(quinn::Connection) -> F,
    context: &mut Context<'_>,
) -> Poll<Result<T, ConnectionError>>
where
    F: Future<Output = Result<T, ConnectionError>> + 'static,
{
    let future = waiting.get_or_insert_with(|| Box::pin(begin(connection.clone())));
    let done = ready!(future.as_mut().poll(context));
    *waiting = None;
    Poll::Ready(done)
}

impl quic::Connection<Piece> for Transport {
    type RecvStream = Incoming;
    type OpenStreams = Self;

    fn poll_accept_recv(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Self::RecvStream, ConnectionErrorIncoming>> {
        let begin = async |connection: quinn::Connection| connection.accept_uni().await;
        let stream = ready!(poll_waiting(&mut self.accepting_uni, &self.connection, begin, context));
        let guard = FrameGuard::of_unidirectional(self.frame_bytes_max);
        Poll::Ready(stream.map(|stream| Incoming { stream, guard }).map_err(lost))
    }

    fn poll_accept_bidi(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Self::BidiStream, ConnectionErrorIncoming>> {
        let begin = async |connection: quinn::Connection| connection.accept_bi().await;
        let streams = ready!(poll_waiting(&mut self.accepting_bi, &self.connection, begin, context));
        Poll::Ready(streams.map(|streams| self.both(streams)).map_err(lost))
    }

    fn opener(&self) -> Self::OpenStreams {
        Self::new(self.connection.clone(), self.frame_bytes_max)
    }
}

impl quic::OpenStreams<Piece> for Transport {
    type BidiStream = BothWays;
    type SendStream = Outgoing;

    fn poll_open_bidi(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Self::BidiStream, StreamErrorIncoming>> {
        let begin = async |connection: quinn::Connection| connection.open_bi().await;
        let streams = ready!(poll_waiting(&mut self.opening_bi, &self.connection, begin, context));
        Poll::Ready(streams.map(|streams| self.both(streams)).map_err(lost_with_stream))
    }

    fn poll_open_send(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Self::SendStream, StreamErrorIncoming>> {
        let begin = async |connection: quinn::Connection| connection.open_uni().await;
        let stream = ready!(poll_waiting(&mut self.opening_uni, &self.connection, begin, context));
        Poll::Ready(stream.map(Outgoing::new).map_err(lost_with_stream))
    }

    fn close(&mut self, code: Code, reason: &[u8]) {
        self.connection.close(number(code.value()), reason);
    }
}

/// Ends when the client has everything, or wants no more.
type Delivery = Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>>>>;

/// The half of a stream that we write. One that is dropped with nothing written is reset: a plain end would look like
/// an answer that is whole and empty.
pub(super) struct Outgoing {
    stream: quinn::SendStream,
    is_begun: bool,
    /// Handed over by h3, not yet taken by QUIC for want of a window.
    unsent: Bytes,
    delivered: Option<Delivery>,
}

impl Outgoing {
    fn new(stream: quinn::SendStream) -> Self {
        Self { stream, is_begun: false, unsent: Bytes::new(), delivered: None }
    }
}

impl quic::SendStream<Piece> for Outgoing {
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        while !self.unsent.is_empty() {
            let write = pin!(self.stream.write_chunks(slice::from_mut(&mut self.unsent)));
            ready!(write.poll(context)).map_err(unwritten)?;
        }
        Poll::Ready(Ok(()))
    }

    /// The one copy of a body in user space before the packets; whoever calls counts it.
    fn send_data<T: Into<WriteBuf<Piece>>>(&mut self, data: T) -> Result<(), StreamErrorIncoming> {
        if !self.unsent.is_empty() {
            let connection_error = ConnectionErrorIncoming::InternalError("two writes at once".to_owned());
            return Err(StreamErrorIncoming::ConnectionErrorIncoming { connection_error });
        }
        let mut data = data.into();
        self.is_begun = true;
        self.unsent = data.copy_to_bytes(data.remaining());
        Ok(())
    }

    /// Ready when the peer has acknowledged the last byte.
    fn poll_finish(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        let stream = &mut self.stream;
        let delivered = self.delivered.get_or_insert_with(|| {
            // A stream that is finished or reset already is what was wanted.
            let _ = stream.finish();
            Box::pin(stream.stopped())
        });
        Poll::Ready(match ready!(delivered.as_mut().poll(context)) {
            Ok(None) => Ok(()),
            Ok(Some(code)) => Err(StreamErrorIncoming::StreamTerminated { error_code: code.into_inner() }),
            Err(error) => Err(unwritten(error.into())),
        })
    }

    fn reset(&mut self, reset_code: u64) {
        self.unsent = Bytes::new();
        // One that has ended already needs no reset.
        let _ = self.stream.reset(number(reset_code));
    }

    fn send_id(&self) -> StreamId {
        id(self.stream.id())
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if !self.is_begun && self.delivered.is_none() {
            quic::SendStream::<Piece>::reset(self, Code::H3_REQUEST_INCOMPLETE.value());
        }
    }
}

/// The half of a stream that the peer writes.
pub(super) struct Incoming {
    stream: quinn::RecvStream,
    guard: FrameGuard,
}

impl quic::RecvStream for Incoming {
    type Buf = Bytes;

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamErrorIncoming>> {
        let chunk = ready!(pin!(self.stream.read_chunk(usize::MAX, true)).poll(context)).map_err(unread)?;
        let Some(chunk) = chunk else { return Poll::Ready(Ok(None)) };
        if self.guard.pass(&chunk.bytes).is_err() {
            let error_code = Code::H3_EXCESSIVE_LOAD.value();
            self.stop_sending(error_code);
            return Poll::Ready(Err(StreamErrorIncoming::StreamTerminated { error_code }));
        }
        Poll::Ready(Ok(Some(chunk.bytes)))
    }

    fn stop_sending(&mut self, error_code: u64) {
        // One that has ended already needs no stop.
        let _ = self.stream.stop(number(error_code));
    }

    fn recv_id(&self) -> StreamId {
        id(self.stream.id())
    }
}

/// A stream of one request and its answer.
pub(super) struct BothWays {
    send: Outgoing,
    recv: Incoming,
}

impl quic::BidiStream<Piece> for BothWays {
    type SendStream = Outgoing;
    type RecvStream = Incoming;

    fn split(self) -> (Outgoing, Incoming) {
        (self.send, self.recv)
    }
}

impl quic::SendStream<Piece> for BothWays {
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        self.send.poll_ready(context)
    }

    fn send_data<T: Into<WriteBuf<Piece>>>(&mut self, data: T) -> Result<(), StreamErrorIncoming> {
        self.send.send_data(data)
    }

    fn poll_finish(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StreamErrorIncoming>> {
        self.send.poll_finish(context)
    }

    fn reset(&mut self, reset_code: u64) {
        self.send.reset(reset_code);
    }

    fn send_id(&self) -> StreamId {
        self.send.send_id()
    }
}

impl quic::RecvStream for BothWays {
    type Buf = Bytes;

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamErrorIncoming>> {
        self.recv.poll_data(context)
    }

    fn stop_sending(&mut self, error_code: u64) {
        self.recv.stop_sending(error_code);
    }

    fn recv_id(&self) -> StreamId {
        self.recv.recv_id()
    }
}

pub(super) fn number(value: u64) -> VarInt {
    VarInt::from_u64(value).unwrap_or(VarInt::MAX)
}

fn id(id: quinn::StreamId) -> StreamId {
    u64::from(id).try_into().expect("both count streams up to 2^62")
}

fn lost(error: ConnectionError) -> ConnectionErrorIncoming {
    match error {
        ConnectionError::ApplicationClosed(close) => {
            ConnectionErrorIncoming::ApplicationClose { error_code: close.error_code.into_inner() }
        }
        ConnectionError::TimedOut => ConnectionErrorIncoming::Timeout,
        error => ConnectionErrorIncoming::Undefined(Arc::new(error)),
    }
}

fn lost_with_stream(error: ConnectionError) -> StreamErrorIncoming {
    StreamErrorIncoming::ConnectionErrorIncoming { connection_error: lost(error) }
}

fn unwritten(error: WriteError) -> StreamErrorIncoming {
    match error {
        WriteError::Stopped(code) => StreamErrorIncoming::StreamTerminated { error_code: code.into_inner() },
        WriteError::ConnectionLost(error) => lost_with_stream(error),
        error => StreamErrorIncoming::Unknown(Box::new(error)),
    }
}

fn unread(error: ReadError) -> StreamErrorIncoming {
    match error {
        ReadError::Reset(code) => StreamErrorIncoming::StreamTerminated { error_code: code.into_inner() },
        ReadError::ConnectionLost(error) => lost_with_stream(error),
        error => StreamErrorIncoming::Unknown(Box::new(error)),
    }
}
