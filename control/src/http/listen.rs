//! Connections: few, with deadlines, finished before the server ends.
//!
//! A heartbeat is held back for seconds, so a connection may be quiet while a request is under way; it may not be
//! slow in saying what it wants.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// Connections at once. A node needs one.
const CONNECTIONS_MAX: usize = 4_096;
/// How long a request's head may take, also the first one of a connection.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// How long connections get to finish when the server stops.
const FINISH_DEADLINE: Duration = Duration::from_secs(10);

/// Answers until `closing` says so, then finishes what is under way.
pub(crate) async fn serve(listener: TcpListener, router: Router, mut closing: watch::Receiver<bool>) {
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE);
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = async {
            let place = Arc::clone(&room).acquire_owned().await.expect("the room is never closed");
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            _ = closing.wait_for(|closing| *closing) => break,
        };
        let Ok((stream, _)) = accepted else {
            // Out of descriptors, usually: others have to end first.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            // What goes wrong on a connection is its client's affair.
            let _: Result<(), hyper::Error> = connection.await;
            drop(place);
        });
    }
    drop(listener);
    if tokio::time::timeout(FINISH_DEADLINE, graceful.shutdown()).await.is_err() {
        tracing::warn!("connections did not finish in time and are cut");
    }
}

/// Binds the address.
///
/// # Errors
/// The kernel's.
pub(crate) async fn bind(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}
