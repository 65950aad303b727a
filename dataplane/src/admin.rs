//! The side door: health, metrics, and the operator's verbs.
//!
//! ```text
//!   GET  /healthz /readyz /metrics         for machines, always open
//!   GET  /v1/status /v1/explain            open on the Unix socket and on loopback, else with the token
//!   POST /v1/purge /v1/drain               on the Unix socket, or with the token
//! ```
//!
//! It runs on a thread and a runtime of its own, so that it answers when every worker is busy and costs them nothing.
//! Each connection carries one request and has a deadline, and there are few at once: a forgotten client cannot shut
//! the operator out. What the verbs do is the node's business ([`NodeDoor`]).
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use forebay_control_api::{DrainReply, ErrorBody, NodeStatus, PurgeReply, PurgeRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use socket2::{Domain, SockAddr, Socket, Type};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, oneshot};

use crate::config::{AdminAddr, CoreMap, Secret};

/// What the node does when the side door is knocked at. Called on the door's own thread: nothing here may wait for
/// more than a moment.
pub trait NodeDoor: Send + Sync + 'static {
    /// Whether requests are taken.
    fn ready(&self) -> Readiness;
    /// What the node is and holds.
    fn status(&self) -> NodeStatus;
    /// What is known of one object and what a read of it would do; `None` when there is no such accelerator.
    fn explain(&self, accelerator: &str, key: &[u8]) -> Option<serde_json::Value>;
    /// Forgets one object in every tier.
    ///
    /// # Errors
    /// There is no such accelerator, or the node cannot do it now.
    fn purge(&self, accelerator: &str, key: &[u8]) -> Result<PurgeReply, DoorError>;
    /// Begins to drain; returns at once.
    fn drain(&self);
    /// Every number, in Prometheus text format.
    fn metrics(&self) -> String;
}

/// Whether requests are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// They are.
    Ready,
    /// Not yet, or no longer; why, in words.
    NotReady(&'static str),
}

/// Why the node did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorError {
    /// There is no accelerator of this name.
    #[error("there is no accelerator `{0}` on this node")]
    NoAccelerator(String),
    /// It would, but not now; why, in words.
    #[error("{0}; try again in a moment")]
    Unavailable(String),
}

/// Why the door could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address is taken, or not ours.
    #[error("admin: listening on {address}")]
    Listen {
        /// The address.
        address: AdminAddr,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The address can be reached from other machines.
    #[error("admin: {0} can be reached from other machines and needs a token (--admin-token-file)")]
    Open(SocketAddr),
    /// There is something at the path, and it is not a socket.
    #[error("admin: {} is there and is not a socket; it is left alone, name another path", .0.display())]
    NotASocket(PathBuf),
    /// Somebody answers at the path.
    #[error("admin: another process answers on {}; stop it, or name another path", .0.display())]
    InUse(PathBuf),
    /// The door's thread could not be made.
    #[error("admin: starting its thread")]
    Thread(#[source] io::Error),
}

/// The door, bound but not yet answering.
#[derive(Debug)]
pub struct AdminDoor {
    listener: Listener,
    token: Option<Secret>,
}

impl AdminDoor {
    /// Binds the address. A socket file gets mode 0600; a stale one, which nobody answers on, is replaced.
    ///
    /// # Errors
    /// An address that is taken, or one that other machines reach while there is no token.
    pub fn bind(address: &AdminAddr, token: Option<Secret>) -> Result<Self, AdminError> {
        let listen = |source| AdminError::Listen { address: address.clone(), source };
        let listener = match address {
            AdminAddr::Tcp(address) => {
                if !address.ip().is_loopback() && token.is_none() {
                    return Err(AdminError::Open(*address));
                }
                let listener = std::net::TcpListener::bind(address).map_err(listen)?;
                listener.set_nonblocking(true).map_err(listen)?;
                Listener::Tcp(listener)
            }
            AdminAddr::Unix(path) => {
                clear_stale_socket(path, &listen)?;
                let listener = bind_private(path).map_err(listen)?;
                let inode = fs::symlink_metadata(path).map_err(listen)?.ino();
                Listener::Unix { listener, file: SocketFile { path: path.clone(), inode } }
            }
        };
        Ok(Self { listener, token })
    }

    /// Where it is bound: with port 0, the port that the kernel picked.
    ///
    /// # Errors
    /// The kernel's.
    pub fn address(&self) -> io::Result<AdminAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().map(AdminAddr::Tcp),
            Listener::Unix { file, .. } => Ok(AdminAddr::Unix(file.path.clone())),
        }
    }

    /// Answers on a house thread with a runtime of its own until [`AdminThread::stop`].
    ///
    /// # Errors
    /// The thread or its runtime could not be made.
    pub fn spawn(self, node: Arc<dyn NodeDoor>, cores: &CoreMap) -> Result<AdminThread, AdminError> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(AdminError::Thread)?;
        let (stop, stopped) = oneshot::channel();
        let cores = cores.clone();
        let thread = std::thread::Builder::new()
            .name("admin".to_owned())
            .spawn(move || {
                cores.settle_house_thread();
                runtime.block_on(async move {
                    if let Err(error) = self.serve(node, stopped).await {
                        tracing::error!(%error, "admin door closed");
                    }
                });
            })
            .map_err(AdminError::Thread)?;
        Ok(AdminThread { stop, thread })
    }

    /// Answers until `stopped` resolves, on the caller's runtime. Requests under way are let go of.
    ///
    /// # Errors
    /// The listener could not be given to the runtime.
    pub async fn serve(self, node: Arc<dyn NodeDoor>, stopped: oneshot::Receiver<()>) -> io::Result<()> {
        match self.listener {
            Listener::Tcp(listener) => {
                let address = listener.local_addr()?;
                let reach = if address.ip().is_loopback() { Reach::Loopback } else { Reach::Network };
                let router = router(node, reach, self.token);
                let listener = TcpListener::from_std(listener)?;
                tokio::select! {
                    () = answer_all(async || Ok(listener.accept().await?.0), router) => {}
                    _ = stopped => {}
                }
            }
            Listener::Unix { listener, file } => {
                let router = router(node, Reach::Owner, self.token);
                let listener = UnixListener::from_std(listener)?;
                tokio::select! {
                    () = answer_all(async || Ok(listener.accept().await?.0), router) => {}
                    _ = stopped => {}
                }
                drop(file);
            }
        }
        Ok(())
    }
}

/// The thread of a door that answers.
#[derive(Debug)]
pub struct AdminThread {
    stop: oneshot::Sender<()>,
    thread: std::thread::JoinHandle<()>,
}

impl AdminThread {
    /// Closes the door and waits for its thread.
    pub fn stop(self) {
        drop(self.stop);
        let _ = self.thread.join();
    }
}

#[derive(Debug)]
enum Listener {
    Tcp(std::net::TcpListener),
    Unix { listener: std::os::unix::net::UnixListener, file: SocketFile },
}

/// Takes the socket file away again, if it is still the one we made.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Who can knock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// The owner of the socket file.
    Owner,
    /// Every user of this machine.
    Loopback,
    /// Every machine.
    Network,
}

/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 64;
/// From the opening of a connection to the end of its one reply.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(30);
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Room for a key of 1,024 bytes, escaped.
const BODY_BYTES_MAX: usize = 16 << 10;

async fn answer_all<S>(mut accept: impl AsyncFnMut() -> io::Result<S>, router: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let permit = Arc::clone(&room).acquire_owned().await.expect("never closed");
        let stream = match accept().await {
            Ok(stream) => stream,
            Err(error) => {
                // Out of descriptors, or a client that left already: the next may fare better.
                tracing::warn!(%error, "admin connection not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            // A client that left, or spoke badly, got its answer or does not want it.
            let _ = tokio::time::timeout(CONNECTION_DEADLINE, connection).await;
            drop(permit);
        });
    }
}

type Node = Arc<dyn NodeDoor>;

fn router(node: Node, reach: Reach, token: Option<Secret>) -> Router {
    let guard = Guard { reach, token: token.map(Arc::new) };
    let reading = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/explain", get(explain))
        .layer(middleware::from_fn_with_state((guard.clone(), Verb::Read), guarded));
    let changing = Router::new()
        .route("/v1/purge", post(purge))
        .route("/v1/drain", post(drain))
        .layer(middleware::from_fn_with_state((guard, Verb::Change), guarded));
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .merge(reading)
        .merge(changing)
        .fallback(async || refusal(StatusCode::NOT_FOUND, "not_found", NO_SUCH_PATH))
        .method_not_allowed_fallback(async || {
            refusal(StatusCode::METHOD_NOT_ALLOWED, "method", NO_SUCH_METHOD)
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(node)
}

const NO_SUCH_PATH: &str = "there are /healthz /readyz /metrics /v1/status /v1/explain /v1/purge /v1/drain";
const NO_SUCH_METHOD: &str = "purge and drain are asked for with POST, everything else with GET";

#[derive(Clone)]
struct Guard {
    reach: Reach,
    token: Option<Arc<Secret>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    Read,
    Change,
}

async fn guarded(State((guard, verb)): State<(Guard, Verb)>, request: Request, next: Next) -> Response {
    let open = match guard.reach {
        Reach::Owner => true,
        Reach::Loopback => verb == Verb::Read,
        Reach::Network => false,
    };
    if open {
        return next.run(request).await;
    }
    let Some(token) = &guard.token else {
        return refusal(
            StatusCode::FORBIDDEN,
            "forbidden",
            "this node has no admin token, so this is done on its Unix socket: start it with --admin unix:PATH, or \
             with --admin-token-file FILE",
        );
    };
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let sent = sent
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    match sent {
        Some((_, sent)) if bool::from(sent.trim().as_bytes().ct_eq(token.reveal().as_bytes())) => {
            next.run(request).await
        }
        Some(_) => refusal(StatusCode::FORBIDDEN, "forbidden", "the token is not this node's"),
        None => refusal(
            StatusCode::FORBIDDEN,
            "forbidden",
            "this needs the node's admin token: send Authorization: Bearer TOKEN, or use its Unix socket",
        ),
    }
}

async fn readyz(State(node): State<Node>) -> Response {
    match node.ready() {
        Readiness::Ready => "ready\n".into_response(),
        Readiness::NotReady(why) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")).into_response()
        }
    }
}

async fn metrics(State(node): State<Node>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], node.metrics()).into_response()
}

async fn status(State(node): State<Node>) -> Json<NodeStatus> {
    Json(node.status())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainQuery {
    accelerator: String,
    key: String,
}

async fn explain(State(node): State<Node>, query: Result<Query<ExplainQuery>, QueryRejection>) -> Response {
    let Query(ExplainQuery { accelerator, key }) = match query {
        Ok(query) => query,
        Err(error) => {
            let message = format!("write /v1/explain?accelerator=NAME&key=KEY: {}", error.body_text());
            return refusal(StatusCode::BAD_REQUEST, "bad_request", &message);
        }
    };
    match node.explain(&accelerator, key.as_bytes()) {
        Some(explanation) => Json(explanation).into_response(),
        None => failure(&DoorError::NoAccelerator(accelerator)),
    }
}

async fn purge(State(node): State<Node>, body: Result<Json<PurgeRequest>, JsonRejection>) -> Response {
    let Json(PurgeRequest { accelerator, key }) = match body {
        Ok(body) => body,
        Err(error) => {
            let message =
                format!("send {{\"accelerator\":\"NAME\",\"key\":\"KEY\"}} as JSON: {}", error.body_text());
            return refusal(error.status(), "bad_request", &message);
        }
    };
    match node.purge(&accelerator, key.as_bytes()) {
        Ok(reply) => {
            tracing::info!(accelerator, key, extents = reply.extents, "purged");
            Json(reply).into_response()
        }
        Err(error) => failure(&error),
    }
}

async fn drain(State(node): State<Node>) -> (StatusCode, Json<DrainReply>) {
    tracing::info!("drain asked for");
    node.drain();
    (StatusCode::ACCEPTED, Json(DrainReply { draining: true }))
}

fn failure(error: &DoorError) -> Response {
    match error {
        DoorError::NoAccelerator(_) => refusal(StatusCode::NOT_FOUND, "no_accelerator", &error.to_string()),
        DoorError::Unavailable(_) => {
            refusal(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &error.to_string())
        }
    }
}

fn refusal(status: StatusCode, error: &str, message: &str) -> Response {
    (status, Json(ErrorBody { error: error.to_owned(), message: message.to_owned() })).into_response()
}

/// Removes a socket that nobody answers on; refuses to touch anything else.
fn clear_stale_socket(path: &Path, listen: &impl Fn(io::Error) -> AdminError) -> Result<(), AdminError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(listen(error)),
        Ok(found) if !found.file_type().is_socket() => Err(AdminError::NotASocket(path.to_owned())),
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(listen)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(listen(error)),
            Ok(_) => Err(AdminError::InUse(path.to_owned())),
        },
    }
}

/// Binds a socket file that only its owner can open. The mode is set on the socket before it has a name, and Linux
/// gives the file the socket's mode: there is no moment in which others could connect.
fn bind_private(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    let file = fs::File::from(std::os::fd::OwnedFd::from(socket));
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    let socket = Socket::from(std::os::fd::OwnedFd::from(file));
    socket.bind(&SockAddr::unix(path)?)?;
    socket.listen(64)?;
    socket.set_nonblocking(true)?;
    Ok(std::os::fd::OwnedFd::from(socket).into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Knows one accelerator, `abc`, with one object, `a key`.
    #[derive(Default)]
    struct SmallNode {
        draining: AtomicBool,
    }

    impl NodeDoor for SmallNode {
        fn ready(&self) -> Readiness {
            if self.draining.load(Ordering::Relaxed) {
                Readiness::NotReady("draining")
            } else {
                Readiness::Ready
            }
        }

        fn status(&self) -> NodeStatus {
            NodeStatus {
                version: "9.9.9".into(),
                draining: self.draining.load(Ordering::Relaxed),
                ..NodeStatus::default()
            }
        }

        fn explain(&self, accelerator: &str, key: &[u8]) -> Option<serde_json::Value> {
            (accelerator == "abc").then(|| serde_json::json!({ "known": key == b"a key" }))
        }

        fn purge(&self, accelerator: &str, key: &[u8]) -> Result<PurgeReply, DoorError> {
            match accelerator {
                "abc" => Ok(PurgeReply { found: key == b"a key", extents: 2, bytes: 7 }),
                "busy" => Err(DoorError::Unavailable("the node is starting".into())),
                other => Err(DoorError::NoAccelerator(other.into())),
            }
        }

        fn drain(&self) {
            self.draining.store(true, Ordering::Relaxed);
        }

        fn metrics(&self) -> String {
            "forebay_x 1\n".into()
        }
    }

    const TOKEN: &str = "0123456789abcdef";
    const PURGE: &str = r#"{"accelerator":"abc","key":"a key"}"#;

    /// A door on a port of the kernel's choice, or on a socket file.
    struct Opened {
        address: AdminAddr,
        thread: Option<AdminThread>,
    }

    impl Opened {
        fn new(address: &str, token: Option<&str>) -> Self {
            let door = AdminDoor::bind(&address.parse().expect("an address"), token.map(Secret::new))
                .expect("bound");
            let address = door.address().expect("an address");
            let cores = CoreMap { workers: vec![0], house: None };
            let thread = door.spawn(Arc::new(SmallNode::default()), &cores).expect("a thread");
            Self { address, thread: Some(thread) }
        }

        fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
            let request = format!(
                "{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}",
                body.len()
            );
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let reply = runtime.block_on(async {
                match &self.address {
                    AdminAddr::Tcp(address) => {
                        converse(tokio::net::TcpStream::connect(address).await.expect("connected"), &request)
                            .await
                    }
                    AdminAddr::Unix(path) => {
                        converse(tokio::net::UnixStream::connect(path).await.expect("connected"), &request)
                            .await
                    }
                }
            });
            let status = reply.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
            let body = reply.split_once("\r\n\r\n").expect("a head").1;
            (status, body.to_owned())
        }

        fn get(&self, path: &str) -> (u16, String) {
            self.ask("GET", path, "", "")
        }

        fn purge(&self, headers: &str, body: &str) -> (u16, String) {
            self.ask("POST", "/v1/purge", &format!("content-type: application/json\r\n{headers}"), body)
        }
    }

    impl Drop for Opened {
        fn drop(&mut self) {
            self.thread.take().expect("running").stop();
        }
    }

    async fn converse(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> String {
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.expect("a reply that ends");
        reply
    }

    #[test]
    fn on_loopback_everybody_reads_and_nobody_changes() {
        let door = Opened::new("127.0.0.1:0", None);
        assert_eq!(door.get("/healthz"), (200, "ok\n".into()));
        assert_eq!(door.get("/readyz"), (200, "ready\n".into()));
        assert_eq!(door.get("/metrics"), (200, "forebay_x 1\n".into()));
        assert!(door.get("/v1/status").1.contains("9.9.9"));
        assert_eq!(door.get("/v1/explain?accelerator=abc&key=a%20key"), (200, r#"{"known":true}"#.into()));
        for path in ["/v1/purge", "/v1/drain"] {
            let (status, body) = door.ask("POST", path, "", "");
            assert_eq!(status, 403);
            assert!(body.contains("unix:PATH"), "{body}");
        }
        assert_eq!(door.get("/readyz").0, 200, "not drained");
    }

    #[test]
    fn the_token_opens_the_changing_verbs() {
        let door = Opened::new("127.0.0.1:0", Some(TOKEN));
        assert_eq!(door.purge("", PURGE).0, 403);
        assert_eq!(door.purge("authorization: Bearer 0123456789abcdeX\r\n", PURGE).0, 403);
        assert_eq!(door.purge("authorization: Bearer 0123456789abcde\r\n", PURGE).0, 403);
        assert_eq!(door.purge("authorization: Basic 0123456789abcdef\r\n", PURGE).0, 403);
        let right = format!("authorization: bearer {TOKEN}\r\n");
        assert_eq!(door.purge(&right, PURGE), (200, r#"{"found":true,"extents":2,"bytes":7}"#.into()));
        assert_eq!(door.ask("POST", "/v1/drain", &right, ""), (202, r#"{"draining":true}"#.into()));
        assert_eq!(door.get("/readyz"), (503, "not ready: draining\n".into()));
    }

    #[test]
    fn to_the_network_even_the_state_needs_the_token() {
        let address: AdminAddr = "0.0.0.0:0".parse().expect("an address");
        assert!(matches!(AdminDoor::bind(&address, None), Err(AdminError::Open(_))));
        let door = Opened::new("0.0.0.0:0", Some(TOKEN));
        assert_eq!(door.get("/healthz").0, 200);
        assert_eq!(door.get("/metrics").0, 200);
        assert_eq!(door.get("/v1/status").0, 403);
        assert_eq!(door.get("/v1/explain?accelerator=abc&key=k").0, 403);
        let right = format!("authorization: Bearer {TOKEN}\r\n");
        assert_eq!(door.ask("GET", "/v1/status", &right, "").0, 200);
    }

    #[test]
    fn the_socket_file_is_its_owners_and_opens_everything() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        let address = format!("unix:{}", path.display());
        let door = Opened::new(&address, Some(TOKEN));
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        assert_eq!(door.purge("", PURGE).0, 200);
        assert_eq!(door.ask("POST", "/v1/drain", "", "").0, 202);
        let second = AdminDoor::bind(&address.parse().expect("an address"), None);
        assert!(matches!(second, Err(AdminError::InUse(_))), "{second:?}");
        drop(door);
        assert!(!path.exists(), "taken away with the door");
    }

    #[test]
    fn a_stale_socket_is_replaced_and_anything_else_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        let address = AdminAddr::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket whose owner goes"));
        assert!(path.exists());
        drop(AdminDoor::bind(&address, None).expect("replaced"));

        fs::write(&path, "precious").expect("written");
        assert!(matches!(AdminDoor::bind(&address, None), Err(AdminError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
        let nowhere = AdminAddr::Unix(folder.path().join("no/such/folder.sock"));
        assert!(matches!(AdminDoor::bind(&nowhere, None), Err(AdminError::Listen { .. })));
    }

    #[test]
    fn mistakes_are_answered_in_words() {
        let folder = tempfile::tempdir().expect("a folder");
        let door = Opened::new(&format!("unix:{}", folder.path().join("s").display()), None);
        for (reply, status, words) in [
            (door.get("/nothing"), 404, "/v1/status"),
            (door.get("/v1/purge"), 405, "POST"),
            (door.get("/v1/explain?accelerator=abc"), 400, "key"),
            (door.get("/v1/explain?accelerator=xyz&key=k"), 404, "`xyz`"),
            (door.purge("", "{}"), 422, "accelerator"),
            (door.purge("", "not json"), 400, "JSON"),
            (door.purge("", r#"{"accelerator":"abc","kee":"k"}"#), 422, "kee"),
            (door.purge("", r#"{"accelerator":"xyz","key":"k"}"#), 404, "`xyz`"),
            (door.purge("", r#"{"accelerator":"busy","key":"k"}"#), 503, "try again"),
            (door.ask("POST", "/v1/purge", "", PURGE), 415, "JSON"),
            (
                door.purge("", &format!(r#"{{"accelerator":"abc","key":"{}"}}"#, "k".repeat(20_000))),
                413,
                "JSON",
            ),
        ] {
            assert_eq!(reply.0, status, "{}", reply.1);
            let body: ErrorBody = serde_json::from_str(&reply.1).expect("an error body");
            assert!(body.message.contains(words), "{}", body.message);
        }
    }
}
