//! The emulator seen from a socket: reads, conditions, ranges, listings, writes and its own door.

mod common;

use common::Emulator;
use forebay_bench::client::plain::{OriginDoor, Plain, list_path, parse_page, request};
use forebay_bench::content::Content;
use forebay_bench::origin::catalog::Dataset;
use forebay_bench::origin::model::Class;
use std::io::{Read, Write};
use std::net::TcpStream;

const SIZE: u64 = 300_000;

fn with_objects(count: u64) -> Emulator {
    let emulator = Emulator::start("raw");
    let dataset =
        Dataset { bucket: "b".into(), prefix: "d/".into(), count, size: SIZE, class: Class::Hot, version: 1 };
    door(&emulator).declare(&[dataset]).expect("declared");
    emulator
}

fn door(emulator: &Emulator) -> OriginDoor {
    OriginDoor::parse(&emulator.url).expect("a URL")
}

fn get(emulator: &Emulator, path: &str, headers: &str) -> Plain {
    request(&emulator.target, "GET", path, headers.as_bytes(), b"").expect("answered")
}

// The head and body as they came.
fn raw(emulator: &Emulator, bytes: &str) -> String {
    let mut stream = TcpStream::connect(emulator.target.address).expect("listening");
    stream.write_all(bytes.as_bytes()).expect("sent");
    stream.shutdown(std::net::Shutdown::Write).expect("half closed");
    let mut seen = Vec::new();
    stream.read_to_end(&mut seen).expect("answered");
    String::from_utf8_lossy(&seen).into_owned()
}

#[test]
fn whole_objects_and_ranges_have_the_patterns_bytes() {
    let emulator = with_objects(3);
    let content = Content::new(b"b/d/00000002", 1);
    let whole = get(&emulator, "/b/d/00000002", "");
    assert_eq!((whole.status, whole.body.len() as u64), (200, SIZE));
    assert_eq!(content.first_difference(0, &whole.body), None);
    for (range, start, len) in [
        ("bytes=0-0", 0, 1),
        ("bytes=5000-299999", 5000, 295_000),
        ("bytes=5000-999999999999", 5000, 295_000),
        ("bytes=299999-", 299_999, 1),
        ("bytes=-100", 299_900, 100),
        ("bytes=-999999", 0, 300_000),
    ] {
        let part = get(&emulator, "/b/d/00000002", &format!("Range: {range}\r\n"));
        assert_eq!((part.status, part.body.len()), (206, len), "{range}");
        assert_eq!(content.first_difference(start, &part.body), None, "{range}");
    }
    for ignored in ["bytes=5-2", "bytes=0-1,4-5", "lines=1-2", "bytes=x-"] {
        assert_eq!(
            get(&emulator, "/b/d/00000002", &format!("Range: {ignored}\r\n")).status,
            200,
            "{ignored}"
        );
    }
    let answer = raw(&emulator, "GET /b/d/00000002 HTTP/1.1\r\nHost: h\r\nRange: bytes=300000-\r\n\r\n");
    assert!(
        answer.starts_with("HTTP/1.1 416 ") && answer.contains("\r\nContent-Range: bytes */300000\r\n"),
        "{answer}"
    );
    assert_eq!(get(&emulator, "/b/d/00000003", "").status, 404);
    assert_eq!(get(&emulator, "/c/d/00000000", "").status, 404);
}

#[test]
fn conditions_follow_the_etag_and_the_etag_follows_the_version() {
    let emulator = with_objects(1);
    let head = raw(&emulator, "HEAD /b/d/00000000 HTTP/1.1\r\nHost: h\r\n\r\n");
    let header = |head: &str, name: &str| {
        let line =
            head.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {head}"));
        line[name.len() + 2..].to_owned()
    };
    let etag = header(&head, "ETag");
    assert!(etag.starts_with('"') && etag.ends_with('"') && etag.len() == 34, "{etag}");
    assert_eq!(header(&head, "Content-Length"), SIZE.to_string());
    assert!(head.ends_with("\r\n\r\n"), "a HEAD has no body");
    let matching =
        |name: &str, value: &str| get(&emulator, "/b/d/00000000", &format!("{name}: {value}\r\n")).status;
    assert_eq!((matching("If-Match", &etag), matching("If-Match", "\"x\"")), (200, 412));
    assert_eq!((matching("If-None-Match", &etag), matching("If-None-Match", "\"x\"")), (304, 200));
    assert_eq!((matching("If-None-Match", "*"), matching("If-Match", &format!("\"x\", {etag}"))), (304, 200));
    let dataset = Dataset {
        bucket: "b".into(),
        prefix: "d/".into(),
        count: 1,
        size: SIZE,
        class: Class::Hot,
        version: 2,
    };
    door(&emulator).declare(&[dataset]).expect("declared");
    assert_eq!(matching("If-Match", &etag), 412, "the next version has another");
    let counts = door(&emulator).stats().expect("counted").counts;
    assert_eq!((counts.conditional, counts.not_modified), (7, 2));
}

#[test]
fn listings_come_in_pages_of_a_thousand() {
    let emulator = with_objects(2345);
    let (mut names, mut pages, mut token) = (Vec::new(), 0, None::<String>);
    loop {
        let answer = get(&emulator, &list_path("b", "d/", token.as_deref()), "");
        assert_eq!(answer.status, 200);
        let page = parse_page(&answer.body).expect("a listing");
        pages += 1;
        names.extend(page.objects);
        match page.next {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    assert_eq!((pages, names.len()), (3, 2345));
    assert!(names.is_sorted() && names.iter().all(|(_, size)| *size == SIZE));
    assert_eq!(get(&emulator, "/b?list-type=2&continuation-token=zz", "").status, 400);
    assert_eq!(get(&emulator, "/b?list-type=2&delimiter=/", "").status, 501);
    assert_eq!(door(&emulator).stats().expect("counted").counts.by_method["LIST"]["200"], 3);
}

#[test]
fn what_is_put_is_read_back_and_what_is_deleted_is_gone() {
    let emulator = with_objects(2);
    let put =
        |key: &str, body: &[u8]| request(&emulator.target, "PUT", key, b"", body).expect("answered").status;
    let body: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(put("/b/new%20name", &body), 200);
    assert_eq!(get(&emulator, "/b/new%20name", "").body, body);
    assert_eq!(put("/b/d/00000001", b"short"), 200);
    assert_eq!(get(&emulator, "/b/d/00000001", "Range: bytes=1-2\r\n").body, b"ho");
    assert_eq!(request(&emulator.target, "DELETE", "/b/d/00000001", b"", b"").expect("answered").status, 204);
    assert_eq!(get(&emulator, "/b/d/00000001", "").status, 404);
    assert_eq!(put("/b/d/00000000?partNumber=1&uploadId=2", b"part"), 501);
    assert_eq!(put("/nobucket/x", b"y"), 404);
    let waits = "PUT /b/e HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok";
    let answer = raw(&emulator, waits);
    assert!(answer.starts_with("HTTP/1.1 100 ") && answer.contains("HTTP/1.1 200 OK"), "{answer}");
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let emulator = with_objects(9);
    let one = |index: u64| format!("GET /b/d/0000000{index} HTTP/1.1\r\nHost: h\r\nRange: bytes=0-7\r\n\r\n");
    let mut stream = TcpStream::connect(emulator.target.address).expect("listening");
    stream.write_all((0..9).map(one).collect::<String>().as_bytes()).expect("sent");
    stream.shutdown(std::net::Shutdown::Write).expect("half closed");
    let mut seen = Vec::new();
    stream.read_to_end(&mut seen).expect("answered");
    for index in 0..9 {
        let head_end = seen.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
        let body = &seen[head_end..head_end + 8];
        assert_eq!(Content::new(format!("b/d/0000000{index}").as_bytes(), 1).first_difference(0, body), None);
        seen.drain(..head_end + 8);
    }
    assert!(seen.is_empty());
}

#[test]
fn its_own_door_counts_and_changes_the_delays() {
    let emulator = with_objects(1);
    get(&emulator, "/b/d/00000000", "");
    get(&emulator, "/b/d/00000000", "Range: bytes=0-9\r\n");
    let report = door(&emulator).stats().expect("counted");
    assert_eq!((report.counts.requests, report.counts.gets_with_body), (2, 2));
    assert_eq!(report.counts.bytes_served, SIZE + 10);
    assert_eq!(report.lateness_us.n, 0, "without delays nothing can be late");
    door(&emulator).reset().expect("reset");
    assert_eq!(door(&emulator).stats().expect("counted").counts.requests, 0);
    let before = door(&emulator).profile().expect("told");
    assert_eq!(before.name, "raw");
    let mut params = before.params.clone();
    params.first_byte_hot.median_ms = 1.0;
    let body = serde_json::to_vec(&params).expect("plain");
    assert_eq!(request(&emulator.target, "PUT", "/_emu/profile", b"", &body).expect("answered").status, 200);
    let after = door(&emulator).profile().expect("told");
    assert_ne!(after.sha256, before.sha256);
    get(&emulator, "/b/d/00000000", "");
    assert_eq!(door(&emulator).stats().expect("counted").lateness_us.n, 1, "the first byte had a deadline");
    params.cap_mib_s = -1.0;
    let body = serde_json::to_vec(&params).expect("plain");
    assert_eq!(request(&emulator.target, "PUT", "/_emu/profile", b"", &body).expect("answered").status, 400);
}
