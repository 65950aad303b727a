//! What is not HTTP, or not clearly one thing, is refused and the connection ends; the node goes on.
//!
//! A cache that reads a request otherwise than the server behind it can be made to serve one client's answer to
//! another. So there is one reading, and where there could be two there is none: a bare line feed, a folded
//! line, two lengths, a length and chunks.

use forebay_tests::http::{self, Connection};
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine, wait};

on_each_engine!(
    ambiguous_heads_are_refused,
    what_is_too_large_is_refused,
    unknown_buckets_and_methods_are_said_in_s3_words,
    half_a_request_harms_nobody,
    pipelined_requests_are_answered_in_order,
    the_last_answer_before_a_close_is_whole,
    an_early_answer_is_seen_by_a_client_that_is_still_sending,
);

fn ambiguous_heads_are_refused(engine: Engine) {
    let (_origin, node) = start(engine);
    let heads: &[(&str, &[u8])] = &[
        ("a bare line feed", b"GET /data/object HTTP/1.1\nHost: a\n\n"),
        ("a line feed inside", b"GET /data/object HTTP/1.1\r\nHost: a\nX: y\r\n\r\n"),
        ("a folded line", b"GET /data/object HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n"),
        ("a blank before the colon", b"GET /data/object HTTP/1.1\r\nHost : a\r\n\r\n"),
        ("a name with a blank", b"GET /data/object HTTP/1.1\r\nHost: a\r\nX Y: z\r\n\r\n"),
        ("no name", b"GET /data/object HTTP/1.1\r\nHost: a\r\n: z\r\n\r\n"),
        ("no host", b"GET /data/object HTTP/1.1\r\n\r\n"),
        ("two hosts", b"GET /data/object HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        ("two lengths", b"PUT /data/object HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        (
            "length and chunks",
            b"PUT /data/object HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        ("a length with a sign", b"PUT /data/object HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na"),
        ("another coding", b"PUT /data/object HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n"),
        ("no version", b"GET /data/object\r\nHost: a\r\n\r\n"),
        ("another version", b"GET /data/object HTTP/3.0\r\nHost: a\r\n\r\n"),
        ("a blank in the target", b"GET /data/ob ject HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a target without a slash", b"GET object HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a zero byte", b"GET /data/object HTTP/1.1\r\nHost: a\r\nX: y\0z\r\n\r\n"),
        ("an HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    ];
    for (name, head) in heads {
        let mut connection = Connection::open(node.data()).expect("a connection");
        connection.send_raw(head).expect("bytes out");
        let response = connection.receive("GET").unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(
            (400..=599).contains(&response.status) && response.status != 404,
            "{name}: {}",
            response.status
        );
        assert!(
            connection.is_closed_by_peer(),
            "{name}: the connection stays open after {}",
            response.status
        );
        still_serves(&node);
    }
}

fn what_is_too_large_is_refused(engine: Engine) {
    let (_origin, node) = start(engine);
    let long = "x".repeat(1 << 20);
    for head in [
        format!("GET /data/{long} HTTP/1.1\r\nHost: a\r\n\r\n"),
        format!("GET /data/object HTTP/1.1\r\nHost: a\r\nX: {long}\r\n\r\n"),
        format!("GET /data/object HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(10_000)),
    ] {
        let mut connection = Connection::open(node.data()).expect("a connection");
        // The node may answer and close before all of it is out.
        let sent = connection.send_raw(head.as_bytes());
        match connection.receive("GET") {
            Ok(response) => assert!(matches!(response.status, 400 | 414 | 431), "{}", response.status),
            Err(error) => {
                assert!(sent.is_err() || error.kind() == std::io::ErrorKind::NotConnected, "{error}");
            }
        }
        still_serves(&node);
    }
}

fn unknown_buckets_and_methods_are_said_in_s3_words(engine: Engine) {
    let (_origin, node) = start(engine);
    let stranger = http::get(node.data(), "/stranger/object");
    assert_eq!(stranger.status, 404);
    assert!(stranger.text().contains("<Code>NoSuchBucket</Code>"), "{}", stranger.text());
    let method = http::ask(node.data(), "BREW", "/data/object", &[], None).expect("an answer");
    assert!(matches!(method.status, 405 | 501), "{}", method.status);
    assert!(method.text().contains("<Error>"), "{}", method.text());
    still_serves(&node);
}

fn half_a_request_harms_nobody(engine: Engine) {
    let (_origin, node) = start(engine);
    let whole = b"GET /data/object HTTP/1.1\r\nHost: a\r\n\r\n";
    for length in 0..whole.len() {
        let mut connection = Connection::open(node.data()).expect("a connection");
        connection.send_raw(&whole[..length]).expect("bytes out");
    }
    still_serves(&node);
    // And byte by byte it is a request like any other.
    let mut connection = Connection::open(node.data()).expect("a connection");
    for byte in whole {
        connection.send_raw(&[*byte]).expect("a byte out");
    }
    content().must_equal(0, 1000, &connection.receive("GET").expect("an answer").body);
}

fn pipelined_requests_are_answered_in_order(engine: Engine) {
    let (origin, node) = start(engine);
    for number in 0..20_u64 {
        origin.put(&format!("pipe-{number}"), Content::new(number).bytes(0, 3000 * number as usize));
    }
    let mut connection = Connection::open(node.data()).expect("a connection");
    let mut requests = Vec::new();
    for number in 0..20 {
        requests.extend(format!("GET /data/pipe-{number} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes());
    }
    connection.send_raw(&requests).expect("bytes out");
    for number in 0..20_u64 {
        let response = connection.receive("GET").expect("an answer");
        assert_eq!(response.status, 200);
        Content::new(number).must_equal(0, 3000 * number, &response.body);
    }
}

fn the_last_answer_before_a_close_is_whole(engine: Engine) {
    let (origin, node) = start(engine);
    origin.put("large", content().bytes(0, 5 << 20));
    for head in [
        "GET /data/large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        "GET /data/large HTTP/1.0\r\nHost: a\r\n\r\n",
    ] {
        let mut connection = Connection::open(node.data()).expect("a connection");
        connection.send_raw(head.as_bytes()).expect("bytes out");
        content().must_equal(0, 5 << 20, &connection.receive("GET").expect("an answer").body);
        assert!(connection.is_closed_by_peer(), "the connection stays open: {head}");
    }
}

/// Closed with unread bytes in it, a socket is reset: the client fails to send, and never sees why.
fn an_early_answer_is_seen_by_a_client_that_is_still_sending(engine: Engine) {
    const PIECES: usize = 64;
    let (_origin, node) = start(engine);
    let piece = vec![b'x'; 1 << 16];
    let refused = || node.metric_where("forebay_serve_requests_total", "status=\"4xx\"");
    for (head, status) in [
        (
            format!("PUT /stranger/object HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", PIECES << 16),
            404,
        ),
        ("PUT /data/object HTTP/1.1\r\nContent-Length: 9\r\n\r\n".to_owned(), 400),
    ] {
        let before = refused();
        let mut connection = Connection::open(node.data()).expect("a connection");
        connection.send_raw(head.as_bytes()).expect("a head out");
        wait::until("the refusal", || (refused() > before).then_some(()));
        for _ in 0..PIECES {
            connection.send_raw(&piece).expect("the body is taken though it is not wanted");
        }
        assert_eq!(connection.receive("PUT").expect("the answer").status, status);
        assert!(connection.is_closed_by_peer());
    }
    still_serves(&node);
}

fn start(engine: Engine) -> (Origin, Node) {
    let origin = Origin::start();
    origin.put("object", content().bytes(0, 1000));
    let node = Node::start(&NodeSpec::new(engine).accelerator(format!("data={}", origin.url())));
    (origin, node)
}

fn content() -> Content {
    Content::new(11)
}

#[track_caller]
fn still_serves(node: &Node) {
    content().must_equal(0, 1000, &http::get(node.data(), "/data/object").body);
}
