//! A connection's way to its peer: the bare socket, or TLS over it.
//!
//! A record of TLS leaves once and in order, so what has been encrypted is the link's and no longer the caller's: a
//! send that is interrupted keeps its ciphertext here, at most [`SEALED_BYTES_MAX`] of it, and the next send begins
//! with it. The leases are free by then, for ciphertext is a copy: the one pass over the bytes that encryption is,
//! counted as `forebay_serve_tls_bytes_total`. Idle connections hold no memory for it; a worker's connections share
//! what they encrypt into.
//!
//! A receive or send that is dropped half-way takes bytes along that nobody can ask for again. On a bare socket that
//! is the caller's business; here the session is deaf or mute from then on, and says so.
#![forbid(unsafe_code)]

use std::io::{self, BufRead, Write};
use std::rc::Rc;
use std::sync::Arc;

use rustls::{HandshakeKind, ServerConfig, ServerConnection};
use tokio::time::timeout;

use super::Worker;
use super::spares::Spares;
use super::worker::HeldCiphertext;
use crate::engine::{Outgoing, SendWatch, Socket};
use crate::metrics::{CloseReason, Counter, Handshake};

/// What a listener's connections speak below HTTP.
#[derive(Clone, Debug)]
pub enum Wire {
    /// Nothing: HTTP on the bare socket.
    Plain,
    /// TLS, with this certificate and these protocols.
    Tls(Arc<ServerConfig>),
}

/// Plaintext that rustls encrypts at once: four records of the largest size, small enough to stay in a cache between
/// the two times that they are touched.
const ROUND_BYTES: usize = 64 << 10;
/// The same encrypted: a record adds at most 29 bytes. The rest of the kilobyte is for what the session itself says.
const SEALED_ROUND_BYTES: usize = ROUND_BYTES + (1 << 10);
/// Ciphertext of one send, and so what a connection may have on the way: few system calls for large bodies, and small
/// beside the socket's own buffer.
const SEALED_BYTES_MAX: usize = 4 * SEALED_ROUND_BYTES;
/// Room for what is received and not yet decrypted: requests, or a record of a body.
const INCOMING_BYTES: usize = 16 << 10;
/// Buffers for ciphertext that a worker keeps for its next sends.
const SPARES_MAX: usize = 16;

/// A worker's buffers for ciphertext.
pub(super) fn ciphertext_spares() -> Spares {
    Spares::new(SEALED_BYTES_MAX, SPARES_MAX)
}

/// One connection's way to its peer.
#[derive(Debug)]
pub(super) enum Link {
    Plain(Socket),
    Tls(Box<Tls>),
}

impl Link {
    /// Whether nobody on the way can read or change what is said.
    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self, Self::Tls(_))
    }
}

/// What a send left behind.
pub(super) struct Sent {
    /// What has not been taken.
    pub(super) outgoing: Outgoing,
    /// Whether everything is gone: nothing was left, and nothing waits here.
    pub(super) is_whole: bool,
}

/// What came of the first bytes of a connection.
pub(super) enum Opened {
    /// Requests can be read.
    Link(Link),
    /// The peer speaks HTTP without TLS; what it has sent is thrown away.
    Bare(Socket),
    /// There is nobody to speak with.
    Ended(CloseReason),
}

impl Link {
    /// Makes the link: for TLS, by a handshake, for which there is as much time as for the head of a request. A drain
    /// ends it, because nothing has been asked yet.
    pub(super) async fn open(worker: &Rc<Worker>, socket: Socket, wire: &Wire) -> Opened {
        let Wire::Tls(config) = wire else { return Opened::Link(Self::Plain(socket)) };
        let session = match ServerConnection::new(Arc::clone(config)) {
            Ok(session) => session,
            Err(error) => {
                tracing::warn!(%error, "no TLS session");
                return Opened::Ended(CloseReason::Handshake);
            }
        };
        let mut tls = Box::new(Tls::new(socket, session));
        let shaken = tokio::select! {
            biased;
            shaken = timeout(worker.node.limits.header_timeout, Box::pin(tls.shake(worker))) => {
                shaken.unwrap_or(Shaken::Not(Handshake::TimedOut))
            }
            () = worker.drained() => return Opened::Ended(CloseReason::Drain),
        };
        let (outcome, opened) = match shaken {
            Shaken::Hands => {
                let is_resumed = tls.session.handshake_kind() == Some(HandshakeKind::Resumed);
                let outcome = if is_resumed { Handshake::Resumed } else { Handshake::Full };
                (outcome, Opened::Link(Self::Tls(tls)))
            }
            Shaken::Not(Handshake::PlainHttp) => (Handshake::PlainHttp, Opened::Bare(tls.socket)),
            Shaken::Not(Handshake::Gone) => (Handshake::Gone, Opened::Ended(CloseReason::Client)),
            Shaken::Not(outcome) => (outcome, Opened::Ended(CloseReason::Handshake)),
        };
        worker.counters.bump(Counter::TlsHandshakes(outcome), 1);
        opened
    }

    /// Receives into the spare capacity of `buffer`; 0 is the end of the stream.
    pub(super) async fn recv(&mut self, worker: &Worker, buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        match self {
            Self::Plain(socket) => worker.engine.recv(socket, buffer).await,
            // Boxed, here and below: bare sockets would carry its state along.
            Self::Tls(tls) => Box::pin(tls.recv(worker, buffer)).await,
        }
    }

    /// Waits for the first bytes of a request, holding no memory on a bare socket; they come in a buffer of the worker's.
    pub(super) async fn recv_first(&mut self, worker: &Worker) -> (io::Result<usize>, Vec<u8>) {
        match self {
            Self::Plain(socket) => worker.engine.recv_first(socket, || worker.rooms.take()).await,
            Self::Tls(tls) => Box::pin(tls.recv(worker, worker.rooms.take())).await,
        }
    }

    /// Receives what nobody will look at, as it is on the wire. Nothing else can be received afterwards.
    pub(super) async fn recv_to_discard(
        &mut self,
        worker: &Worker,
        buffer: Vec<u8>,
    ) -> (io::Result<usize>, Vec<u8>) {
        let socket = match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => {
                tls.is_deaf = true;
                &tls.socket
            }
        };
        worker.engine.recv(socket, buffer).await
    }

    /// Sends, and says how many bytes the kernel took. As [`crate::engine::Engine::send`]; what TLS has encrypted
    /// counts as taken from `outgoing`, also if it still waits here.
    pub(super) async fn send(
        &mut self,
        worker: &Rc<Worker>,
        outgoing: Outgoing,
        watch: &SendWatch,
    ) -> (io::Result<usize>, Sent) {
        match self {
            Self::Plain(socket) => {
                let (result, outgoing) = worker.engine.send(socket, outgoing, watch).await;
                let is_whole = outgoing.is_empty();
                (result, Sent { outgoing, is_whole })
            }
            Self::Tls(tls) => {
                let mut outgoing = outgoing;
                let result = Box::pin(tls.send(worker, &mut outgoing, watch)).await;
                let is_whole = outgoing.is_empty() && tls.is_flushed();
                (result, Sent { outgoing, is_whole })
            }
        }
    }

    /// Waits until the peer has made room.
    pub(super) async fn writable(&self, worker: &Worker) -> io::Result<()> {
        worker.engine.writable(self.socket()).await
    }

    /// Says goodbye, where the protocol below has a word for it: a peer that has heard it knows that nothing is
    /// missing. Not behind a body that was cut.
    pub(super) async fn farewell(&mut self, worker: &Rc<Worker>) {
        if let Self::Tls(tls) = self {
            // Whoever has gone already misses nothing.
            let _ = timeout(worker.node.limits.send_stall, Box::pin(tls.farewell(worker))).await;
        }
    }

    /// Ends the sending half of the connection.
    pub(super) fn shutdown_write(&self, worker: &Worker) -> io::Result<()> {
        worker.engine.shutdown_write(self.socket())
    }

    /// Closing it will throw away what the peer has not taken.
    pub(super) fn abandon(&self, worker: &Worker) {
        worker.engine.abandon(self.socket());
    }

    fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => &tls.socket,
        }
    }
}

enum Shaken {
    Hands,
    Not(Handshake),
}

/// A TLS session over a socket.
#[derive(Debug)]
pub(super) struct Tls {
    socket: Socket,
    session: ServerConnection,
    /// Ciphertext received, of which the first `decrypted` bytes are the session's already.
    incoming: Vec<u8>,
    decrypted: usize,
    /// Ciphertext that has not left.
    waiting: Outgoing,
    /// Its place under the limit, while nobody sends it.
    held: Option<HeldCiphertext>,
    /// A receive was given up, and took along what it had received.
    is_deaf: bool,
    /// A send was given up, and took along what had not left.
    is_mute: bool,
}

impl Tls {
    fn new(socket: Socket, mut session: ServerConnection) -> Self {
        session.set_buffer_limit(Some(ROUND_BYTES));
        Self {
            socket,
            session,
            incoming: Vec::new(),
            decrypted: 0,
            waiting: Outgoing::default(),
            held: None,
            is_deaf: false,
            is_mute: false,
        }
    }

    async fn shake(&mut self, worker: &Rc<Worker>) -> Shaken {
        let mut is_first = true;
        loop {
            if self.send_own(worker).await.is_err() {
                return Shaken::Not(Handshake::Gone);
            }
            if !self.session.is_handshaking() {
                return Shaken::Hands;
            }
            match self.receive(worker).await {
                Ok(0) if is_first => return Shaken::Not(Handshake::Gone),
                Ok(received) if received > 0 => {}
                _ => return Shaken::Not(Handshake::Failed),
            }
            // A handshake record begins with 22, a request with the name of a method.
            if std::mem::take(&mut is_first) && self.incoming[0].is_ascii_uppercase() {
                return Shaken::Not(Handshake::PlainHttp);
            }
            while self.session.is_handshaking() && self.decrypted < self.incoming.len() {
                if let Err(error) = self.decrypt() {
                    tracing::debug!(%error, "TLS handshake failed");
                    // The alert, for the peer's log.
                    let _ = self.send_own(worker).await;
                    return Shaken::Not(Handshake::Failed);
                }
            }
        }
    }

    async fn recv(&mut self, worker: &Worker, mut buffer: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        loop {
            match self.plaintext(&mut buffer) {
                Ok(None) => {}
                Ok(Some(count)) => return (Ok(count), buffer),
                Err(error) => return (Err(error), buffer),
            }
            if self.decrypted < self.incoming.len() {
                if let Err(error) = self.decrypt() {
                    let _ = self.send_own(worker).await;
                    return (Err(io::Error::other(error)), buffer);
                }
                continue;
            }
            match self.receive(worker).await {
                // Without a goodbye; whether anything is missing, the request's own framing tells.
                Ok(0) => return (Ok(0), buffer),
                Ok(_) => {}
                Err(error) => return (Err(error), buffer),
            }
        }
    }

    /// Moves decrypted bytes into the room of `buffer`; `Some(0)` if the peer has said goodbye, `None` if there are
    /// none yet.
    fn plaintext(&mut self, buffer: &mut Vec<u8>) -> io::Result<Option<usize>> {
        let mut reader = self.session.reader();
        match reader.fill_buf() {
            Ok(bytes) => {
                let count = bytes.len().min(buffer.capacity() - buffer.len());
                buffer.extend_from_slice(&bytes[..count]);
                reader.consume(count);
                Ok(Some(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives the session some of what was received. It takes more only when its plaintext has been taken.
    fn decrypt(&mut self) -> Result<(), rustls::Error> {
        let mut left = &self.incoming[self.decrypted..];
        let taken =
            self.session.read_tls(&mut left).map_err(|error| rustls::Error::General(error.to_string()))?;
        // Behind the peer's goodbye nothing is taken, nor looked at.
        self.decrypted = if taken == 0 { self.incoming.len() } else { self.decrypted + taken };
        self.session.process_new_packets().map(|_| ())
    }

    async fn receive(&mut self, worker: &Worker) -> io::Result<usize> {
        if self.is_deaf {
            return Err(torn());
        }
        let mut incoming = std::mem::take(&mut self.incoming);
        incoming.clear();
        incoming.reserve(INCOMING_BYTES);
        self.is_deaf = true;
        let (result, incoming) = worker.engine.recv(&self.socket, incoming).await;
        self.is_deaf = false;
        (self.incoming, self.decrypted) = (incoming, 0);
        result
    }

    /// What waits, then what the session has to say, then `outgoing`.
    async fn send(
        &mut self,
        worker: &Rc<Worker>,
        outgoing: &mut Outgoing,
        watch: &SendWatch,
    ) -> io::Result<usize> {
        self.held = None;
        let mut sent = 0;
        loop {
            if self.is_mute {
                return Err(torn());
            }
            let mut waiting = std::mem::take(&mut self.waiting);
            if waiting.is_empty() {
                worker.spares.give(std::mem::take(&mut waiting.header));
                if outgoing.is_empty() && !self.session.wants_write() {
                    return Ok(sent);
                }
                let mut sealed = worker.spares.take();
                let before = outgoing.len();
                self.seal(outgoing, &mut sealed)?;
                worker.counters.bump(Counter::TlsBytes, (before - outgoing.len()) as u64);
                waiting = Outgoing::header(sealed);
            }
            self.is_mute = true;
            let (result, back) = worker.engine.send(&self.socket, waiting, watch).await;
            self.is_mute = false;
            self.waiting = back;
            match result {
                Ok(count) => sent += count,
                Err(error) if sent == 0 => return Err(error),
                // The next send says so.
                Err(_) => return Ok(sent),
            }
            if !self.waiting.is_empty() {
                self.waiting.shrink();
                self.held = Some(worker.hold_ciphertext(self.waiting.len())?);
                return Ok(sent);
            }
        }
    }

    /// Encrypts what one send carries: first what the session itself has to say.
    fn seal(&mut self, outgoing: &mut Outgoing, sealed: &mut Vec<u8>) -> io::Result<()> {
        loop {
            while self.session.wants_write() {
                self.session.write_tls(sealed)?;
            }
            if outgoing.is_empty() || sealed.len() + SEALED_ROUND_BYTES > SEALED_BYTES_MAX {
                return Ok(());
            }
            let taken = self.session.writer().write_vectored(&outgoing.io_slices())?;
            outgoing.consume(taken);
        }
    }

    /// Sends what the session itself has to say: the handshake, an alert, an answer to new keys.
    async fn send_own(&mut self, worker: &Worker) -> io::Result<()> {
        while self.session.wants_write() || !self.is_flushed() {
            if self.is_mute {
                return Err(torn());
            }
            let mut waiting = std::mem::take(&mut self.waiting);
            if waiting.is_empty() {
                waiting = Outgoing::default();
                self.seal(&mut Outgoing::default(), &mut waiting.header)?;
            }
            self.is_mute = true;
            let (result, back) = worker.engine.send(&self.socket, waiting, &SendWatch::default()).await;
            self.is_mute = false;
            self.waiting = back;
            result?;
        }
        self.waiting = Outgoing::default();
        Ok(())
    }

    async fn farewell(&mut self, worker: &Worker) -> io::Result<()> {
        self.session.send_close_notify();
        self.send_own(worker).await
    }

    fn is_flushed(&self) -> bool {
        self.waiting.is_empty()
    }
}

fn torn() -> io::Error {
    io::Error::other("an operation of this TLS session was given up half-way")
}
