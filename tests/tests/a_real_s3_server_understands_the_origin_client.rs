//! The origin client against a real, signature-checking S3 server.
//!
//! Our own checker of signatures agrees with the specification; this file asks whether somebody else's reading of it
//! does too, for the keys that break signatures, for uploads of every framing and for a key that is not theirs.

use bytes::Bytes;
use forebay_dataplane::origin::{
    Answer, Ask, AskRange, Body, Connections, Credentials, Forward, Origin, OriginKind, OriginLimits,
    OriginTarget, Relay, upload,
};
use forebay_dataplane::range::ByteRange;
use http::{HeaderMap, HeaderName, Method};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use std::net::SocketAddr;

const ACCESS: &str = "forebay-test";
const SECRET: &str = "a secret/with+odd=characters";

async fn server(root: &std::path::Path) -> SocketAddr {
    let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
    builder.set_auth(SimpleAuth::from_single(ACCESS, SECRET));
    let service = builder.build();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let connection = hyper::server::conn::http1::Builder::new();
            tokio::spawn(connection.serve_connection(TokioIo::new(stream), service.clone()));
        }
    });
    address
}

fn origin(address: SocketAddr, secret: &str) -> Origin {
    let endpoint = Some(format!("http://{address}").parse().unwrap());
    let kind = OriginKind::S3 { bucket: "bucket".into(), endpoint, region: "us-east-1".into() };
    Origin::open(
        &OriginTarget { kind },
        &Credentials::given(ACCESS, secret),
        OriginLimits::default(),
        &Connections::new(4),
    )
    .unwrap()
}

fn request(method: Method, path: &str, headers: &[(&'static str, &str)]) -> Forward {
    let headers: HeaderMap =
        headers.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect();
    Forward { method, path: path.as_bytes().into(), query: None, headers, body: None }
}

async fn put(origin: &Origin, mut request: Forward, length: Option<u64>, bytes: &[u8]) -> Relay {
    let (uploader, body) = upload(length);
    request.body = Some(body);
    let bytes = Bytes::copy_from_slice(bytes);
    let feed = async move {
        for piece in bytes.chunks(1000) {
            // An answer may come first; it tells why.
            let _ = uploader.send(Bytes::copy_from_slice(piece)).await;
        }
        uploader.finish().await;
    };
    let (relay, ()) = tokio::join!(origin.forward(request), feed);
    relay.unwrap()
}

async fn all(mut body: Body) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(piece) = body.chunk().await.unwrap() {
        bytes.extend_from_slice(&piece);
    }
    bytes
}

async fn assert_ok(relay: Relay, what: &str) -> Vec<u8> {
    let status = relay.status;
    let body = all(relay.body).await;
    assert!((200..300).contains(&status), "{what}: {status} {}", String::from_utf8_lossy(&body));
    body
}

fn ask(range: AskRange) -> Ask {
    Ask { range, if_match: None, if_none_match: None }
}

fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i * 31 % 251) as u8).collect()
}

#[tokio::test]
async fn keys_of_every_kind_come_back_by_range_suffix_and_whole() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("bucket")).unwrap();
    let origin = origin(server(root.path()).await, SECRET);
    let bytes = pattern(5000);
    // What a client writes in its request line, and the key that it means.
    let keys = [
        ("/plain.txt", "plain.txt"),
        ("/a/b/c", "a/b/c"),
        ("/a%20b", "a b"),
        ("/a+b", "a+b"),
        ("/a%2Bc", "a+c"),
        ("/100%25", "100%"),
        ("/a%2520b", "a%20b"),
        ("/(1)*'!~", "(1)*'!~"),
        ("/k=v&x;y,z:@$", "k=v&x;y,z:@$"),
        ("/q%3Fu%23f", "q?u#f"),
        ("/%D0%BA%D0%BB%D1%8E%D1%87/%E6%95%B0", "ключ/数"),
    ];
    for (path, key) in keys {
        let headers = [("content-type", "text/x-test"), ("x-amz-meta-note", "two  spaces  here")];
        let relay = put(&origin, request(Method::PUT, path, &headers), Some(5000), &bytes).await;
        assert_ok(relay, key).await;
        for (range, expected) in [
            (AskRange::Bytes(ByteRange::new(100, 1100).unwrap()), 100..1100),
            (AskRange::Bytes(ByteRange::new(4990, 9000).unwrap()), 4990..5000),
            (AskRange::Suffix(7), 4993..5000),
            (AskRange::Whole, 0..5000),
        ] {
            match origin.get(key.as_bytes(), &ask(range)).await.unwrap() {
                Answer::Bytes { facts, range, body } => {
                    assert_eq!(
                        (facts.size, range.start() as usize..range.end() as usize),
                        (5000, expected.clone())
                    );
                    assert!(facts.is_cacheable(), "{facts:?}");
                    assert_eq!(all(body).await, bytes[expected], "{key}");
                }
                other => panic!("{key} {range}: {other:?}"),
            }
        }
        let Answer::Found { facts } = origin.head(key.as_bytes(), None).await.unwrap() else {
            panic!("{key}")
        };
        assert_eq!(facts.size, 5000);
        let other_version = Ask { if_match: Some("\"another\"".into()), ..ask(AskRange::Suffix(1)) };
        assert!(
            matches!(origin.get(key.as_bytes(), &other_version).await.unwrap(), Answer::Changed),
            "{key}"
        );
        let past =
            origin.get(key.as_bytes(), &ask(AskRange::Bytes(ByteRange::new(5000, 5001).unwrap()))).await;
        assert!(matches!(past.unwrap(), Answer::Unsatisfiable { .. }), "{key}");
        assert_ok(origin.forward(request(Method::DELETE, path, &[])).await.unwrap(), key).await;
        let gone = origin.get(key.as_bytes(), &ask(AskRange::Whole)).await.unwrap();
        assert!(matches!(gone, Answer::Other(Relay { status: 404, .. })), "{key}");
    }
}

#[tokio::test]
async fn uploads_of_every_framing_are_stored_whole() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("bucket")).unwrap();
    let origin = origin(server(root.path()).await, SECRET);
    let hash = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let framed = b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n";
    let trailer = [
        ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
        ("x-amz-decoded-content-length", "5"),
        ("x-amz-trailer", "x-amz-checksum-crc32"),
        ("content-encoding", "aws-chunked"),
    ];
    let hashed = [("x-amz-content-sha256", hash)];
    let cases = [
        ("/unsigned", &[][..], &b"hello"[..]),
        ("/hashed", &hashed[..], &b"hello"[..]),
        ("/trailer", &trailer[..], &framed[..]),
    ];
    for (path, headers, bytes) in cases {
        let relay = put(&origin, request(Method::PUT, path, headers), Some(bytes.len() as u64), bytes).await;
        assert_ok(relay, path).await;
        match origin.get(&path.as_bytes()[1..], &ask(AskRange::Whole)).await.unwrap() {
            Answer::Bytes { body, .. } => assert_eq!(all(body).await, b"hello", "{path}"),
            other => panic!("{path}: {other:?}"),
        }
    }
    // The client's hash still guards its bytes on the second half of their way.
    let relay = put(&origin, request(Method::PUT, "/lie", &hashed), Some(5), b"jello").await;
    assert!(relay.status >= 400, "{}", relay.status);
    let list = Forward {
        query: Some(b"list-type=2&prefix=un&encoding-type=url&delimiter=%2F"[..].into()),
        ..request(Method::GET, "", &[])
    };
    let listing = assert_ok(origin.forward(list).await.unwrap(), "list").await;
    assert!(String::from_utf8_lossy(&listing).contains("<Key>unsigned</Key>"));
    let relay = put(&origin, request(Method::PUT, "/empty", &[]), Some(0), b"").await;
    assert_ok(relay, "empty").await;
    assert!(matches!(origin.get(b"empty", &ask(AskRange::Whole)).await.unwrap(), Answer::Empty { .. }));
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_the_refusal_handed_on() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("bucket")).unwrap();
    let origin = origin(server(root.path()).await, "not the secret");
    let Answer::Other(relay) = origin.get(b"k", &ask(AskRange::Whole)).await.unwrap() else {
        panic!("taken")
    };
    assert_eq!(relay.status, 403);
    assert!(String::from_utf8_lossy(&all(relay.body).await).contains("SignatureDoesNotMatch"));
}
