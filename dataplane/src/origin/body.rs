//! Bodies: what comes from the origin, and what goes to it.
//!
//! A `Body` hands out the pieces that the connection read, without copying, and counts them against what was promised:
//! an end that comes too early is an error however clean it looks, and asking again after an error never says "done". The
//! idle clock runs only while somebody waits for the next piece, so a slow reader cannot trip it. Dropping a `Body` that
//! has not ended closes its connection; that is how a download is stopped. An upload must be finished in so many words:
//! a client that goes away half-way must not become a short object.
#![forbid(unsafe_code)]

use super::error::{BoxError, OriginError, Stage, early_end};
use super::pool::Lent;
use super::scripted::ScriptedBody;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// The body of an answer, piece by piece.
#[derive(Debug)]
pub struct Body {
    source: Source,
    host: Rc<str>,
    idle: Duration,
    expected: Option<u64>,
    received: u64,
}

#[derive(Debug)]
enum Source {
    Live {
        incoming: Incoming,
        lent: Lent,
        upload: Option<Arc<UploadState>>,
    },
    Scripted(ScriptedBody),
    /// Whole; the connection is back in its pool.
    Ended,
    /// Failed once; every further question fails too.
    Broken,
}

impl Body {
    pub(super) fn live(
        host: Rc<str>,
        idle: Duration,
        incoming: Incoming,
        lent: Lent,
        upload: Option<Arc<UploadState>>,
    ) -> Self {
        let mut body =
            Self { source: Source::Live { incoming, lent, upload }, host, idle, expected: None, received: 0 };
        body.give_back_if_ended();
        body
    }

    pub(super) fn scripted(idle: Duration, body: ScriptedBody) -> Self {
        let source = Source::Scripted(body);
        let mut body = Self { source, host: "scripted".into(), idle, expected: None, received: 0 };
        body.give_back_if_ended();
        body
    }

    /// Sets how many bytes make this body whole.
    pub(super) fn expecting(mut self, bytes: u64) -> Self {
        self.expected = Some(bytes);
        self
    }

    /// The next piece, never empty; `None` after the last. May be dropped and called again without losing bytes.
    ///
    /// # Errors
    /// `TimedOut` when nothing came for the idle limit, `Cut` when the body ended before its length (and on every call
    /// after an error), `Invalid` when it is longer.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, OriginError> {
        loop {
            let next = match &mut self.source {
                Source::Ended if self.expected.is_none_or(|expected| self.received == expected) => {
                    return Ok(None);
                }
                Source::Ended | Source::Broken => return Err(self.cut(None)),
                Source::Live { incoming, .. } => timeout(self.idle, next_of(incoming)).await,
                Source::Scripted(scripted) => timeout(self.idle, scripted.next()).await,
            };
            let Ok(next) = next else {
                self.source = Source::Broken;
                let host = self.host.as_ref().into();
                return Err(OriginError::TimedOut { host, stage: Stage::Body, limit: self.idle });
            };
            match next {
                Some(Ok(piece)) => {
                    self.received += piece.len() as u64;
                    if self.expected.is_some_and(|expected| self.received > expected) {
                        self.source = Source::Broken;
                        return Err(OriginError::invalid("a body longer than its head said"));
                    }
                    self.give_back_if_ended();
                    if !piece.is_empty() {
                        return Ok(Some(piece));
                    }
                }
                Some(Err(source)) => {
                    self.source = Source::Broken;
                    return Err(self.cut(Some(source)));
                }
                None if self.expected.is_some_and(|expected| self.received < expected) => {
                    self.source = Source::Broken;
                    return Err(self.cut(None));
                }
                None => self.end(),
            }
        }
    }

    /// Bytes handed out so far.
    pub fn received(&self) -> u64 {
        self.received
    }

    fn cut(&self, source: Option<BoxError>) -> OriginError {
        OriginError::Cut { host: self.host.as_ref().into(), received: self.received, source }
    }

    /// A reader that has all it wants need not ask once more: the connection is free as soon as the end is known.
    fn give_back_if_ended(&mut self) {
        let is_over = match &self.source {
            Source::Live { incoming, .. } => incoming.is_end_stream(),
            Source::Scripted(scripted) => scripted.is_over(),
            Source::Ended | Source::Broken => false,
        };
        if is_over && self.expected.is_none_or(|expected| self.received == expected) {
            self.end();
        }
    }

    fn end(&mut self) {
        if let Source::Live { lent, upload, .. } = std::mem::replace(&mut self.source, Source::Ended) {
            // An answer that came before the upload ended leaves the rest of it in the pipe.
            if upload.is_none_or(|upload| upload.is_finished()) {
                lent.give_back();
            }
        }
    }
}

async fn next_of(incoming: &mut Incoming) -> Option<Result<Bytes, BoxError>> {
    loop {
        match incoming.frame().await? {
            Ok(frame) => {
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                }
            }
            Err(error) => return Some(Err(error.into())),
        }
    }
}

/// Makes the two ends of an upload. `length` is the client's Content-Length; `None` sends it chunked.
pub fn upload(length: Option<u64>) -> (Uploader, Upload) {
    // Two pieces in flight: one being written, one being received. More would only hold memory.
    let (sender, receiver) = mpsc::channel(2);
    let state = Arc::new(UploadState::default());
    if length == Some(0) {
        state.phase.store(PHASE_FINISHED, Ordering::Relaxed);
    }
    (Uploader { pieces: sender }, Upload { pieces: receiver, length, sent: 0, state })
}

/// The end of an upload that the client's bytes go into. Dropped without `finish`, it aborts the upload.
#[derive(Debug)]
pub struct Uploader {
    pieces: mpsc::Sender<Piece>,
}

/// The origin wants no more of the upload: it answered early or its connection broke. The answer tells which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the origin takes no more of this upload")]
pub struct UploadClosed;

impl Uploader {
    /// Hands over the next bytes; waits while the origin is slower than the client.
    ///
    /// # Errors
    /// `UploadClosed`, when nobody takes them any more.
    pub async fn send(&self, bytes: Bytes) -> Result<(), UploadClosed> {
        self.pieces.send(Piece::Bytes(bytes)).await.map_err(|_| UploadClosed)
    }

    /// Says that these were all bytes. Only this makes the upload whole.
    pub async fn finish(self) {
        // Nobody listening is fine: with a declared length the other end knew already.
        let _ = self.pieces.send(Piece::End).await;
    }
}

#[derive(Debug)]
enum Piece {
    Bytes(Bytes),
    End,
}

/// The end of an upload that is given to `Origin::forward`.
#[derive(Debug)]
pub struct Upload {
    pieces: mpsc::Receiver<Piece>,
    length: Option<u64>,
    sent: u64,
    state: Arc<UploadState>,
}

impl Upload {
    pub(super) fn length(&self) -> Option<u64> {
        self.length
    }

    pub(super) fn state(&self) -> Arc<UploadState> {
        Arc::clone(&self.state)
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.state.is_finished() {
            return Poll::Ready(None);
        }
        let (phase, frame) = match self.pieces.poll_recv(cx) {
            Poll::Pending => {
                self.state.phase.store(PHASE_STARVED, Ordering::Relaxed);
                return Poll::Pending;
            }
            Poll::Ready(Some(Piece::Bytes(bytes))) => {
                self.sent += bytes.len() as u64;
                match self.length {
                    Some(length) if self.sent > length => (PHASE_FAILED, Some(Err(early_end()))),
                    Some(length) if self.sent == length => (PHASE_FINISHED, Some(Ok(Frame::data(bytes)))),
                    _ => (PHASE_SENDING, Some(Ok(Frame::data(bytes)))),
                }
            }
            Poll::Ready(Some(Piece::End)) if self.length.is_none_or(|length| length == self.sent) => {
                (PHASE_FINISHED, None)
            }
            Poll::Ready(Some(Piece::End) | None) => (PHASE_FAILED, Some(Err(early_end()))),
        };
        self.state.phase.store(phase, Ordering::Relaxed);
        self.state.moves.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.state.is_finished()
    }

    fn size_hint(&self) -> SizeHint {
        self.length
            .map_or_else(SizeHint::default, |length| SizeHint::with_exact(length - self.sent.min(length)))
    }
}

/// How far an upload is, as the one who waits for the answer sees it.
#[derive(Debug, Default)]
pub(super) struct UploadState {
    moves: AtomicU64,
    phase: AtomicU8,
}

const PHASE_SENDING: u8 = 0;
const PHASE_STARVED: u8 = 1;
const PHASE_FINISHED: u8 = 2;
const PHASE_FAILED: u8 = 3;

impl UploadState {
    /// Changes whenever a piece was taken.
    pub(super) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// The origin has had everything that the client gave so far: the wait is the client's.
    pub(super) fn is_starved(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == PHASE_STARVED
    }

    pub(super) fn is_finished(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == PHASE_FINISHED
    }

    pub(super) fn is_failed(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == PHASE_FAILED
    }
}

/// What hyper sends as a request's body.
#[derive(Debug)]
pub(super) enum Outgoing {
    Nothing,
    Upload(Upload),
}

impl HttpBody for Outgoing {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Nothing => Poll::Ready(None),
            Self::Upload(upload) => Pin::new(upload).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Upload(upload) => upload.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Nothing => SizeHint::with_exact(0),
            Self::Upload(upload) => upload.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn collected(upload: Upload) -> io::Result<Bytes> {
        Ok(upload.collect().await?.to_bytes())
    }

    #[tokio::test]
    async fn an_upload_is_whole_only_when_it_says_so() {
        for (length, pieces, finish, expected) in [
            (None, vec!["ab", "c"], true, Some("abc")),
            (None, vec!["ab", "c"], false, None),
            (Some(3), vec!["ab", "c"], true, Some("abc")),
            (Some(3), vec!["ab", "c"], false, Some("abc")),
            (Some(3), vec!["ab"], true, None),
            (Some(3), vec!["ab"], false, None),
            (Some(3), vec!["abcd"], true, None),
            (Some(0), vec![], true, Some("")),
            (None, vec![], true, Some("")),
        ] {
            let (uploader, upload) = upload(length);
            let state = upload.state();
            let case = format!("{length:?} {pieces:?} {finish}");
            let feed = async move {
                for piece in pieces {
                    let _ = uploader.send(Bytes::from_static(piece.as_bytes())).await;
                }
                if finish {
                    uploader.finish().await;
                }
            };
            let (got, ()) = tokio::join!(collected(upload), feed);
            assert_eq!(got.ok().as_deref(), expected.map(str::as_bytes), "{case}");
            assert_eq!(state.is_finished(), expected.is_some(), "{case}");
        }
    }

    #[tokio::test]
    async fn an_uploader_learns_that_nobody_listens() {
        let (uploader, upload) = upload(None);
        drop(upload);
        assert_eq!(uploader.send(Bytes::from_static(b"x")).await, Err(UploadClosed));
    }
}
