//! A worker's HTTP/3 door, asked by quinn and h3 over real sockets, with an origin in memory.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Buf, Bytes};
use h3::client::{RequestStream, SendRequest};
use http::{Request, Response};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint, ReadError, ReadToEndError, TransportConfig, VarInt};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::UdpSocket;

use super::transport::{BothWays, Piece, Transport};
use super::{ALPN, Admission, Door, UNPROVEN_SHARE, bind, serve};
use crate::arena::{Arena, ArenaOptions};
use crate::auth::Keys;
use crate::config::Limits;
use crate::engine::Engine;
use crate::engine::portable::Portable;
use crate::metrics::{Counter, Limit, Metrics, Outcome, StatusClass};
use crate::node::{Drives, Node};
use crate::origin::scripted::ScriptedOrigin;
use crate::origin::{Origin, OriginLimits, OriginTarget};
use crate::serve::{Peer, Worker};
use crate::served::{Accelerator, Served};
use crate::tls::Certificates;

const MIB: usize = 1 << 20;
/// A bound, never a measure.
const PATIENCE: Duration = Duration::from_mins(1);

pub(in crate::serve) fn limits() -> Limits {
    Limits {
        connections_max: 100,
        head_bytes_max: 16 << 10,
        headers_max: 20,
        fills_max: 16,
        peer_connections_max: 16,
        origin_connections_max: 16,
        arena_bytes: 64 * MIB as u64,
        reads_reserve_bytes: 16 * MIB as u64,
        fills_reserve_bytes: 16 * MIB as u64,
        ram_reserve_bytes: 32 * MIB as u64,
        send_pinned_bytes_per_connection_max: 2 * MIB as u64,
        send_pinned_bytes_max: 32 * MIB as u64,
        send_queue_bytes_per_connection_max: 1 << 20,
        connections_heap_bytes_max: 48 << 20,
        zero_copy_bytes_max: 2 * MIB as u64,
        tls_held_bytes_max: 8 * MIB as u64,
        quic_send_bytes_max: 8 * MIB as u64,
        quic_handshakes_max: 8,
        quic_send_window_bytes: MIB as u64,
        quic_receive_window_bytes: 256 << 10,
        quic_streams_max: 100,
        writer_queue_bytes: 0,
        objects_max: 1000,
        metadata_bytes_max: 16 << 20,
        header_timeout: PATIENCE,
        idle_timeout: PATIENCE,
        send_stall: PATIENCE,
        request_deadline: PATIENCE,
        drain: PATIENCE,
    }
}

/// Workers with a door, on one thread.
struct House {
    node: Arc<Node>,
    /// The first.
    worker: Rc<Worker>,
    workers: Vec<Rc<Worker>>,
    loads: Box<[Peer]>,
    admissions: Vec<Rc<Admission>>,
    origin: ScriptedOrigin,
    address: SocketAddr,
}

impl House {
    fn open(limits: &Limits, count: usize) -> Self {
        let (reads_bytes, fills_bytes) = (16 * MIB, 16 * MIB);
        let arena = Arena::build(ArenaOptions { bytes: 64 * MIB, reads_bytes, fills_bytes }).expect("memory");
        let spec: forebay_control_api::AcceleratorSpec = "data=http://origin".parse().expect("a spec");
        let accelerator = Accelerator::of(&spec).expect("an accelerator");
        let keys = Keys::new(true);
        let served = Served::new([accelerator], keys);
        let node = Node::new(arena, Drives::None, served, limits.clone(), Metrics::new());
        let origin = ScriptedOrigin::new(1);
        let double = origin.clone();
        let open = move |_: &OriginTarget| Ok(Origin::scripted(double.clone(), OriginLimits::default()));
        let (orders, _) = tokio::sync::mpsc::unbounded_channel();
        let loads: Box<[Peer]> =
            (0..count).map(|_| Peer { load: Arc::default(), orders: orders.clone() }).collect();
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (addresses, sockets) = bind(&[any], count).expect("bound");
        let certificates = Certificates::self_signed(&addresses).expect("made");
        let door = Door::new(certificates.server_config(&[ALPN]), limits, count).expect("a door");
        let (mut workers, mut admissions) = (Vec::new(), Vec::new());
        for (index, mut sockets) in sockets.into_iter().enumerate() {
            let engine = Engine::Portable(Portable::default());
            let worker =
                Worker::start(Arc::clone(&node), engine, &open, index, loads.clone()).expect("a worker");
            let endpoint = door.open(index, sockets.remove(0)).expect("opened");
            let admission = Admission::new(limits, count);
            tokio::task::spawn_local(serve(Rc::clone(&worker), endpoint, Rc::clone(&admission)));
            workers.push(worker);
            admissions.push(admission);
        }
        let worker = Rc::clone(&workers[0]);
        Self { node, worker, workers, loads, admissions, origin, address: addresses[0] }
    }

    fn drain(&self) {
        self.node.set_draining();
        for worker in &self.workers {
            worker.drain();
        }
    }

    /// Connections of a worker.
    fn load(&self, worker: usize) -> usize {
        self.loads[worker].load.load(Ordering::Relaxed)
    }

    fn counted(&self, counter: Counter) -> u64 {
        self.worker.counters.counted(counter)
    }

    async fn client(&self, window: u32) -> Client {
        let connection = self.connect(window).await.expect("a connection");
        let transport = Transport::new(connection.clone(), u64::MAX);
        let (mut driver, requests) =
            h3::client::builder().send_grease(false).build(transport).await.expect("HTTP/3");
        tokio::task::spawn_local(async move { driver.wait_idle().await });
        Client { requests, connection }
    }

    async fn connect(&self, window: u32) -> Result<quinn::Connection, quinn::ConnectionError> {
        begin_at(self.address, window).await
    }
}

/// Begins to connect.
fn begin_at(address: SocketAddr, window: u32) -> quinn::Connecting {
    let mut tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody))
        .with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("for QUIC")));
    let mut transport = TransportConfig::default();
    transport.stream_receive_window(VarInt::from_u32(window));
    config.transport_config(Arc::new(transport));
    let mut endpoint = Endpoint::client(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a socket");
    endpoint.set_default_client_config(config);
    endpoint.connect(address, "localhost").expect("begun")
}

/// Takes any certificate: whose it is, is tested elsewhere.
#[derive(Debug)]
struct Anybody;

impl rustls::client::danger::ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.verify_tls13_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

struct Client {
    requests: SendRequest<Transport, Piece>,
    connection: quinn::Connection,
}

type Stream = RequestStream<BothWays, Piece>;

impl Client {
    async fn begin(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
    ) -> Stream {
        let mut request = Request::builder().method(method).uri(format!("https://node{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut stream =
            self.requests.send_request(request.body(()).expect("a request")).await.expect("sent");
        if let Some(body) = body {
            stream.send_data(Piece::Own(Bytes::copy_from_slice(body))).await.expect("sent");
        }
        // Who answers before the end may not want the rest.
        let _ = poll_finished(&mut stream).await;
        stream
    }

    async fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)]) -> (Response<()>, Vec<u8>) {
        let mut stream = self.begin(method, path, headers, None).await;
        let response = stream.recv_response().await.expect("an answer");
        (response, rest(&mut stream).await.expect("a body"))
    }
}

/// Ends the request; does not wait until it has been received.
async fn poll_finished(stream: &mut Stream) -> Option<()> {
    tokio::select! {
        biased;
        finished = stream.finish() => finished.ok(),
        () = std::future::ready(()) => None,
    }
}

async fn rest(stream: &mut Stream) -> Result<Vec<u8>, h3::error::StreamError> {
    let mut body = Vec::new();
    while let Some(mut data) = stream.recv_data().await? {
        body.extend_from_slice(&data.copy_to_bytes(data.remaining()));
    }
    Ok(body)
}

fn run<F: Future<Output = ()>>(behaviour: impl FnOnce(House) -> F) {
    run_with(&limits(), 1, behaviour);
}

fn run_with<F: Future<Output = ()>>(limits: &Limits, workers: usize, behaviour: impl FnOnce(House) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build_local(tokio::runtime::LocalOptions::default())
        .expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE, behaviour(House::open(limits, workers))).await.expect("nothing hangs");
    });
}

async fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

fn said<'a>(response: &'a Response<()>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().expect("text"))
}

#[test]
fn a_read_has_every_byte_and_says_what_http1_says() {
    run(|house| async move {
        let body = content(3 * MIB + 17);
        let etag = house.origin.put(b"some/key", body.clone());
        let mut client = house.client(8 << 20).await;
        for tier in ["miss", "ram"] {
            let (response, got) = client.ask("GET", "/data/some/key", &[]).await;
            assert_eq!((response.status().as_u16(), said(&response, "x-forebay-cache")), (200, tier));
            assert_eq!(said(&response, "content-length"), body.len().to_string());
            assert_eq!(said(&response, "etag"), &*etag);
            assert_eq!(said(&response, "accept-ranges"), "bytes");
            assert!(said(&response, "date").ends_with("GMT"));
            assert!(got == body, "every byte");
        }
        let (response, got) =
            client.ask("GET", "/data/some/key", &[("range", "bytes=1048570-1048585")]).await;
        assert_eq!(response.status().as_u16(), 206);
        assert_eq!(said(&response, "content-range"), format!("bytes 1048570-1048585/{}", body.len()));
        assert_eq!(got, &body[1_048_570..1_048_586]);
        let (response, got) = client.ask("HEAD", "/data/some/key", &[]).await;
        assert_eq!((response.status().as_u16(), got.len()), (200, 0));
        assert_eq!(said(&response, "content-length"), body.len().to_string());
        let (response, got) = client.ask("GET", "/data/some/key", &[("if-none-match", &etag)]).await;
        assert_eq!((response.status().as_u16(), got.len()), (304, 0));
        let (response, got) = client.ask("GET", "/elsewhere/key", &[]).await;
        assert_eq!((response.status().as_u16(), said(&response, "content-type")), (404, "application/xml"));
        assert!(String::from_utf8(got).expect("text").contains("<Code>NoSuchBucket</Code>"));
        assert!(house.counted(Counter::QuicSendBytes) >= 2 * body.len() as u64);
        assert_eq!(house.node.metrics.total(Counter::HitCopiedBytes), 0);
    });
}

#[test]
fn a_write_goes_through_with_or_without_its_length() {
    run(|house| async move {
        let body = content(700_000);
        let mut client = house.client(1 << 20).await;
        for (key, headers) in [("measured", vec![("content-length", "700000")]), ("unmeasured", vec![])] {
            let path = format!("/data/{key}");
            let mut stream = client.begin("PUT", &path, &headers, Some(&body)).await;
            let response = stream.recv_response().await.expect("an answer");
            assert_eq!(response.status().as_u16(), 200, "{key}");
            assert!(house.origin.bytes(key.as_bytes()).expect("stored") == body, "{key}");
            let (_, got) = client.ask("GET", &path, &[]).await;
            assert!(got == body, "{key} is read back");
        }
        let mut stream = client.begin("PUT", "/data/cut", &[("content-length", "9")], Some(b"short")).await;
        stream.recv_response().await.expect_err("no answer to half a request");
        assert_eq!(house.origin.bytes(b"cut"), None);
        let (response, _) = client.ask("DELETE", "/data/measured", &[]).await;
        assert!(response.status().is_success(), "{response:?}");
        assert_eq!(house.origin.bytes(b"measured"), None);
    });
}

#[test]
fn a_reader_who_pauses_holds_no_lease_and_gets_the_rest_later() {
    run(|house| async move {
        let body = content(8 * MIB);
        house.origin.put(b"large", body.clone());
        let mut warm = house.client(8 << 20).await;
        let (_, got) = warm.ask("GET", "/data/large", &[]).await;
        assert!(got == body);
        let before = house.counted(Counter::QuicSendBytes);
        let mut client = house.client(128 << 10).await;
        let mut stream = client.begin("GET", "/data/large", &[], None).await;
        let response = stream.recv_response().await.expect("an answer");
        assert_eq!(said(&response, "x-forebay-cache"), "ram");
        until(|| house.counted(Counter::QuicSendBytes) > before).await;
        until(|| house.worker.pinned_bytes() == 0).await;
        let copied = house.counted(Counter::QuicSendBytes) - before;
        assert!(copied <= 256 << 10, "copied ahead of the reader: {copied}");
        assert!(rest(&mut stream).await.expect("a body") == body, "every byte");
    });
}

#[test]
fn what_is_too_large_is_refused_in_words_or_cut() {
    run(|house| async move {
        let mut client = house.client(1 << 20).await;
        let names: Vec<_> = (0..25).map(|number| format!("x-{number}")).collect();
        let many: Vec<_> = names.iter().map(|name| (name.as_str(), "1")).collect();
        let (response, got) = client.ask("GET", "/data/key", &many).await;
        assert_eq!(response.status().as_u16(), 431);
        assert!(String::from_utf8(got).expect("text").contains("more than 20 header fields"));
        let connection = house.connect(1 << 20).await.expect("a connection");
        let (mut send, mut recv) = connection.open_bi().await.expect("a stream");
        // HEADERS of 1 MiB, of which nothing follows.
        send.write_all(&[1, 0x80, 0x10, 0, 0]).await.expect("sent");
        let stopped = send.stopped().await.expect("told");
        assert_eq!(stopped, Some(VarInt::from_u32(0x107)), "H3_EXCESSIVE_LOAD");
        let read = recv.read_to_end(1000).await;
        assert!(matches!(read, Err(ReadToEndError::Read(ReadError::Reset(_)))), "no whole answer: {read:?}");
        assert_eq!(house.counted(Counter::LimitRefusals(Limit::Head)), 2);
    });
}

#[test]
fn a_drain_says_goaway_and_finishes_what_was_begun() {
    run(|house| async move {
        let body = content(4 * MIB);
        house.origin.put(b"large", body.clone());
        let mut client = house.client(64 << 10).await;
        let mut stream = client.begin("GET", "/data/large", &[], None).await;
        stream.recv_response().await.expect("an answer");
        house.drain();
        assert!(rest(&mut stream).await.expect("a body") == body, "every byte");
        let closed = client.connection.closed().await;
        let quinn::ConnectionError::ApplicationClosed(close) = closed else { panic!("{closed:?}") };
        assert_eq!(close.error_code, VarInt::from_u32(0x100), "H3_NO_ERROR");
        until(|| house.node.connections() == 0).await;
        let refused = house.connect(64 << 10).await.expect_err("nobody new is let in");
        assert!(matches!(refused, quinn::ConnectionError::ConnectionClosed(_)), "told at once: {refused:?}");
    });
}

/// The kernel chooses a socket by its place in the order of binding, and puts the last one into the place of one that was
/// closed: were the first worker's closed, half of the last one's clients would have come to the second.
#[test]
fn a_drain_leaves_the_busy_workers_their_datagrams() {
    run_with(&limits(), 3, |house| async move {
        let body = content(MIB);
        house.origin.put(b"large", body.clone());
        let mut clients = Vec::new();
        // Which worker a client comes to is chance.
        while house.load(1) == 0 || house.load(2) < 8 {
            let open = house.node.connections();
            let client = house.client(64 << 10).await;
            until(|| house.node.connections() == open + 1).await;
            if house.load(0) == 0 {
                clients.push(client);
            } else {
                client.connection.close(VarInt::from_u32(0x100), b"");
                until(|| house.load(0) == 0).await;
            }
        }
        let mut streams = Vec::new();
        for client in &mut clients {
            let mut stream = client.begin("GET", "/data/large", &[], None).await;
            stream.recv_response().await.expect("an answer");
            streams.push(stream);
        }
        house.drain();
        // The first worker has nothing left to do.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        for stream in &mut streams {
            assert!(rest(stream).await.expect("a body") == body, "every byte");
        }
    });
}

#[test]
fn first_datagrams_in_somebodys_name_take_no_place_from_others() {
    let limits = Limits { connections_max: 4, ..limits() };
    run_with(&limits, 1, |house| async move {
        let nobody = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a socket");
        let there = nobody.local_addr().expect("bound");
        let forger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a socket");
        let forged: Vec<_> = (0..20).map(|_| begin_at(there, MIB as u32)).collect();
        let mut datagram = [0; 2000];
        let mut seen = HashSet::new();
        while seen.len() < forged.len() {
            let length = nobody.recv(&mut datagram).await.expect("a datagram");
            // By the connection id that the client has chosen.
            if seen.insert(datagram[6..14].to_vec()) {
                forger.send_to(&datagram[..length], house.address).await.expect("sent");
            }
        }
        let begun = || house.admissions[0].handshakes.get();
        let share = limits.quic_handshakes_max as usize / UNPROVEN_SHARE;
        until(|| house.counted(Counter::QuicRetries) > 0).await;
        assert_eq!((begun(), house.node.connections()), (share, 0));

        // Who answers from where he says he is gets in.
        let mut client = house.client(MIB as u32).await;
        let (response, _) = client.ask("GET", "/elsewhere/key", &[]).await;
        assert_eq!((response.status().as_u16(), house.node.connections()), (404, 1));
        assert_eq!(house.counted(Counter::LimitRefusals(Limit::Connections)), 0);
    });
}

#[test]
fn a_node_that_is_full_says_so() {
    let limits = Limits { connections_max: 1, ..limits() };
    run_with(&limits, 1, |house| async move {
        let _held = house.client(MIB as u32).await;
        let refused = house.connect(MIB as u32).await.expect_err("full");
        assert!(matches!(refused, quinn::ConnectionError::ConnectionClosed(_)), "{refused:?}");
        assert_eq!(house.counted(Counter::LimitRefusals(Limit::Connections)), 1);
    });
}

#[test]
fn a_request_that_never_comes_whole_has_no_answer_that_looks_whole() {
    let limits = Limits { header_timeout: Duration::from_secs(2), ..limits() };
    run_with(&limits, 1, |house| async move {
        let connection = house.connect(1 << 20).await.expect("a connection");
        let (mut send, mut recv) = connection.open_bi().await.expect("a stream");
        // HEADERS of 100 bytes, of which one comes.
        send.write_all(&[1, 0x40, 100, 0]).await.expect("sent");
        let read = recv.read_to_end(1000).await;
        let reset = VarInt::from_u32(0x10d);
        assert!(
            matches!(read, Err(ReadToEndError::Read(ReadError::Reset(code))) if code == reset),
            "H3_REQUEST_INCOMPLETE: {read:?}"
        );
        assert_eq!(house.counted(Counter::Requests(Outcome::Error, StatusClass::Caller)), 1);
    });
}
