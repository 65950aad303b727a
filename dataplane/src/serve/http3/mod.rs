//! HTTP/3: QUIC endpoints, one for each worker, and the requests that come through them.
//!
//! ```text
//!  datagram -> kernel's filter (engine::steer): which worker -> quinn -> transport -> h3 -> exchange -> request
//!                  ids: ids that it understands             windows: what QUIC may hold    (the same as HTTP/1.1's)
//! ```
//!
//! 0-RTT is off: a request that is sent again by somebody on the way would be served again, and that may be a write.
//! Migration is on: a client that changes its address stays with its worker, because its ids do.
#![forbid(unsafe_code)]

mod bind;
mod exchange;
mod frames;
mod ids;
#[cfg(test)]
pub(super) mod tests;
mod transport;
mod windows;

use std::cell::Cell;
use std::io;
use std::net::UdpSocket;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use h3::error::{Code, ConnectionError};
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{
    AsyncTimer, AsyncUdpSocket, Endpoint, EndpointConfig, Incoming, Runtime, ServerConfig, TokioRuntime,
    TransportConfig, VarInt,
};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

pub(super) use self::bind::{alt_svc, bind};
use self::ids::WorkerIds;
use self::transport::{Transport, number};
use self::windows::{Place, Windows};
use super::Worker;
use crate::config::Limits;
use crate::engine::task;
use crate::metrics::{self, CloseReason, Counter, Limit};

/// The name of HTTP/3 in a handshake (RFC 9114, 3.1).
pub const ALPN: &[u8] = b"h3";

/// Streams of a client's own that are not requests: its control stream and QPACK's two, and some that mean nothing.
const UNIDIRECTIONAL_MAX: u32 = 8;
/// Bytes that a worker holds of what a client sends before its handshake has begun.
const HANDSHAKE_BYTES_MAX: u64 = 32 << 10;
/// From one in so many of the handshakes that there may be, a client has to show that its address is its own.
const UNPROVEN_SHARE: usize = 4;

/// What the endpoints of all workers share: certificate, keys and bounds. A token that one has given out is good at
/// every other, and so is a reset.
#[derive(Clone, Debug)]
pub struct Door {
    server: ServerConfig,
    endpoint: EndpointConfig,
    workers: usize,
}

impl Door {
    /// A door for `workers` workers. `tls` speaks TLS 1.3 and offers [`ALPN`].
    ///
    /// # Errors
    /// `tls` cannot be used for QUIC.
    pub fn new(
        tls: Arc<rustls::ServerConfig>,
        limits: &Limits,
        workers: usize,
    ) -> Result<Self, quinn::crypto::rustls::NoInitialCipherSuite> {
        let mut server = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
        let handshakes_max = handshakes_max(limits, workers);
        server
            .transport_config(Arc::new(transport_config(limits)))
            .migration(true)
            // Of those that have not been looked at; the others are counted by `Admission`.
            .max_incoming(handshakes_max)
            .incoming_buffer_size(HANDSHAKE_BYTES_MAX)
            .incoming_buffer_size_total(handshakes_max as u64 * HANDSHAKE_BYTES_MAX);
        Ok(Self { server, endpoint: EndpointConfig::default(), workers })
    }

    /// For how many workers it is.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// The endpoint of `worker` on its own socket, to be called on its thread.
    ///
    /// # Errors
    /// The kernel refused an option of the socket.
    pub fn open(&self, worker: usize, socket: UdpSocket) -> io::Result<Endpoint> {
        let workers = self.workers;
        let mut endpoint = self.endpoint.clone();
        endpoint.cid_generator(move || Box::new(WorkerIds::new(worker, workers)));
        Endpoint::new(endpoint, Some(self.server.clone()), socket, Arc::new(Marked))
    }
}

/// Tokio as quinn uses it, with its tasks counted like all others of a worker.
#[derive(Debug)]
struct Marked;

impl Runtime for Marked {
    fn new_timer(&self, at: std::time::Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        tokio::spawn(task::counted(future));
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        TokioRuntime.wrap_udp_socket(socket)
    }

    fn now(&self) -> std::time::Instant {
        TokioRuntime.now()
    }
}

fn transport_config(limits: &Limits) -> TransportConfig {
    let mut config = TransportConfig::default();
    let window = VarInt::from_u64(limits.quic_receive_window_bytes).unwrap_or(VarInt::MAX);
    config
        .max_concurrent_bidi_streams(limits.quic_streams_max.into())
        .max_concurrent_uni_streams(UNIDIRECTIONAL_MAX.into())
        .max_idle_timeout(Some(limits.idle_timeout.try_into().expect("a few minutes")))
        .stream_receive_window(window)
        .receive_window(window)
        .send_window(limits.quic_send_window_bytes)
        // Nobody here sends or understands datagrams of HTTP/3.
        .datagram_receive_buffer_size(None)
        .datagram_send_buffer_size(0);
    config
}

/// Serves what comes to an endpoint of a worker, as long as the process lives: while the node drains, new clients are
/// refused. A socket that was closed would leave a gap in the kernel's count of them, and datagrams for other workers,
/// which still finish what was begun, would go astray.
pub(super) async fn serve(worker: Rc<Worker>, endpoint: Endpoint, admission: Rc<Admission>) {
    while let Some(incoming) = endpoint.accept().await {
        admission.admit(&worker, incoming);
    }
}

/// Who is let in at a worker's endpoints, all of them together.
#[derive(Debug)]
pub(super) struct Admission {
    windows: Rc<Windows>,
    handshakes: Rc<Cell<usize>>,
    handshakes_max: usize,
}

fn handshakes_max(limits: &Limits, workers: usize) -> usize {
    (limits.quic_handshakes_max as usize / workers.max(1)).max(1)
}

impl Admission {
    /// For one of `workers`.
    pub(super) fn new(limits: &Limits, workers: usize) -> Rc<Self> {
        let budget = limits.quic_send_bytes_max / workers.max(1) as u64;
        Rc::new(Self {
            windows: Windows::new(budget, limits.quic_send_window_bytes),
            handshakes: Rc::default(),
            handshakes_max: handshakes_max(limits, workers),
        })
    }

    /// Lets a client begin its handshake. Anybody can send the first datagram in somebody's name, so it takes no place
    /// among the connections, and where many have begun, who does not show that his address is his own has to.
    fn admit(&self, worker: &Rc<Worker>, incoming: Incoming) {
        let refuse = |incoming: Incoming, limit| {
            incoming.refuse();
            worker.counters.bump(Counter::LimitRefusals(limit), 1);
        };
        if !worker.has_room() {
            return refuse(incoming, Limit::Connections);
        }
        let begun = self.handshakes.get();
        if begun >= self.handshakes_max {
            return refuse(incoming, Limit::QuicHandshakes);
        }
        if begun >= self.handshakes_max.div_ceil(UNPROVEN_SHARE) && !incoming.remote_address_validated() {
            worker.counters.bump(Counter::QuicRetries, 1);
            // Whoever has not proven his address may always be asked to (RFC 9000, 8.1.2).
            let _ = incoming.retry();
            return;
        }
        let Some(place) = self.windows.enter() else { return refuse(incoming, Limit::QuicSend) };
        let handshake = Handshake::begin(&self.handshakes);
        let worker = Rc::clone(worker);
        task::spawn(async move {
            worker
                .count_connection(metrics::Door::Http3, serve_connection(&worker, incoming, place, handshake))
                .await;
        });
    }
}

/// A handshake under way.
struct Handshake(Rc<Cell<usize>>);

impl Handshake {
    fn begin(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Requests of one connection that are being served.
#[derive(Default)]
struct Open {
    count: Cell<usize>,
    changed: Notify,
}

/// Serves a connection until its end, and says why it ended.
async fn serve_connection(
    worker: &Rc<Worker>,
    incoming: Incoming,
    place: Place,
    handshake: Handshake,
) -> CloseReason {
    let limits = &worker.node.limits;
    let Ok(connecting) = incoming.accept() else { return CloseReason::Receive };
    let quic = match timeout(limits.header_timeout, connecting).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(_)) => return CloseReason::Handshake,
        Err(_) => return CloseReason::HeadTimeout,
    };
    drop(handshake);
    let Some(admitted) = worker.admit() else {
        worker.counters.bump(Counter::LimitRefusals(Limit::Connections), 1);
        quic.close(number(Code::H3_EXCESSIVE_LOAD.value()), b"no more connections");
        return CloseReason::Limit;
    };
    place.fill(quic.clone());
    let reason = serve_requests(worker, &quic).await;
    // What says that the connection is closed is sent by a task of its own; it comes before the count of open
    // connections, by which the end of a drain is judged.
    tokio::task::yield_now().await;
    drop((place, admitted));
    reason
}

async fn serve_requests(worker: &Rc<Worker>, quic: &quinn::Connection) -> CloseReason {
    let limits = &worker.node.limits;
    let transport = Transport::new(quic.clone(), limits.head_bytes_max.into());
    let built = h3::server::builder()
        .max_field_section_size(limits.head_bytes_max.into())
        .send_grease(false)
        .build(transport)
        .await;
    let mut connection = match built {
        Ok(connection) => connection,
        Err(error) => return reason(quic, &error),
    };
    let open = Rc::new(Open::default());
    let mut is_draining = false;
    loop {
        let idle_until = Instant::now() + limits.idle_timeout;
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Ok(Some(resolver)) => {
                    open.count.set(open.count.get() + 1);
                    let (worker, open) = (Rc::clone(worker), Rc::clone(&open));
                    task::spawn(async move {
                        let _counted = Counted(open);
                        exchange::exchange(worker, resolver).await;
                    });
                }
                // The client has said GOAWAY and has all its answers.
                Ok(None) => return CloseReason::Client,
                Err(error) => return reason(quic, &error),
            },
            () = open.changed.notified() => {}
            () = sleep_until(idle_until), if open.count.get() == 0 => return CloseReason::Idle,
            () = worker.drained(), if !is_draining => {
                is_draining = true;
                // GOAWAY: what was begun is finished, what comes later was not served and may be asked elsewhere.
                if let Err(error) = connection.shutdown(0).await {
                    return reason(quic, &error);
                }
            }
        }
        if is_draining && open.count.get() == 0 {
            return CloseReason::Drain;
        }
    }
}

/// Ends with its request, however that ends.
struct Counted(Rc<Open>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        self.0.changed.notify_one();
    }
}

fn reason(connection: &quinn::Connection, error: &ConnectionError) -> CloseReason {
    use quinn::ConnectionError::{LocallyClosed, TimedOut};
    match connection.close_reason() {
        _ if error.is_h3_no_error() => CloseReason::Client,
        Some(TimedOut) => CloseReason::Idle,
        Some(LocallyClosed) => {
            tracing::debug!(%error, "HTTP/3 connection ended by us");
            CloseReason::BadRequest
        }
        _ => CloseReason::Receive,
    }
}
