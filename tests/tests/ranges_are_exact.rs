//! Every range of every awkward size is answered exactly: status, Content-Range, length and bytes.
//!
//! Off-by-one at the end of a block, an extent or an object is how caches have served a neighbour's byte. Sizes
//! one below, at and one above a boundary, with ranges that touch each of them, cold and again from RAM.

use forebay_tests::http::{self, Response};
use forebay_tests::origin::Origin;
use forebay_tests::{Content, Engine, Node, NodeSpec, on_each_engine};

const BLOCK: u64 = 64 << 10;
const EXTENT: u64 = 1 << 20;

on_each_engine!(
    the_boundary_table_holds,
    odd_range_headers_are_read_as_s3_reads_them,
    empty_objects_are_objects,
    a_head_tells_what_a_get_would,
    small_extents_are_exact_too,
    the_largest_extents_are_fetched_whole,
);

/// B064, B054, B056.
fn the_boundary_table_holds(engine: Engine) {
    let (origin, node) = start(engine, "");
    boundary_table(&origin, &node, &[BLOCK, EXTENT, 2 * EXTENT], EXTENT);
}

fn small_extents_are_exact_too(engine: Engine) {
    let (origin, node) = start(engine, ",extent=64KiB");
    boundary_table(&origin, &node, &[BLOCK, 2 * BLOCK, 3 * BLOCK], BLOCK);
}

/// An extent of 4 MiB lies in two pages, and is one download all the same.
fn the_largest_extents_are_fetched_whole(engine: Engine) {
    const LARGEST: u64 = 4 << 20;
    let (origin, node) = start(engine, ",extent=4MiB,freshness=immutable");
    boundary_table(&origin, &node, &[LARGEST / 2, LARGEST, 2 * LARGEST], LARGEST);
    let size = 5 * LARGEST + 1;
    let content = Content::new(size);
    origin.put("long", content.bytes(0, size as usize));
    let before = origin.counts().requests();
    // The second half of the third extent, then all of it; some bytes across the middle of the fifth, then its end.
    for (first, last, downloads) in [
        (2 * LARGEST + LARGEST / 2 + 7, 3 * LARGEST - 1, 1),
        (2 * LARGEST, 3 * LARGEST - 1, 1),
        (4 * LARGEST + LARGEST / 2 - 5, 4 * LARGEST + LARGEST / 2 + 5, 2),
        (4 * LARGEST + LARGEST / 2 + 6, 5 * LARGEST - 1, 2),
    ] {
        let response = ask(&node, "/data/long", &format!("bytes={first}-{last}"));
        must_be_range(&response, content, first, last, size);
        assert_eq!(origin.counts().requests() - before, downloads, "{first}-{last}");
    }
}

fn boundary_table(origin: &Origin, node: &Node, boundaries: &[u64], extent: u64) {
    for boundary in boundaries {
        for size in [boundary - 1, *boundary, boundary + 1] {
            let key = format!("size-{size}");
            let content = Content::new(size);
            origin.put(&key, content.bytes(0, size as usize));
            let target = format!("/data/{key}");
            let places = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, extent - 1, extent, extent + 1, size - 1];
            let mut asked = Vec::new();
            for first in places.into_iter().filter(|place| *place < size) {
                for last in places.into_iter().filter(|place| *place >= first) {
                    asked.push((format!("bytes={first}-{last}"), first, last.min(size - 1)));
                }
                asked.push((format!("bytes={first}-"), first, size - 1));
                asked.push((format!("bytes=-{}", size - first), first, size - 1));
                asked.push((format!("bytes={first}-{}", u64::MAX), first, size - 1));
            }
            asked.push((format!("bytes=-{}", size + 5), 0, size - 1));
            // Cold, then again with everything in RAM.
            for _ in 0..2 {
                for (range, first, last) in &asked {
                    must_be_range(&ask(node, &target, range), content, *first, *last, size);
                }
            }
            for range in
                [format!("bytes={size}-"), format!("bytes={size}-{}", size + 1), "bytes=-0".to_owned()]
            {
                let response = ask(node, &target, &range);
                assert_eq!(response.status, 416, "{range} of {size}");
                assert_eq!(
                    response.header("content-range"),
                    Some(format!("bytes */{size}").as_str()),
                    "{range}"
                );
            }
        }
    }
}

/// What is no single byte range is no range at all: the whole object is the answer.
fn odd_range_headers_are_read_as_s3_reads_them(engine: Engine) {
    let (origin, node) = start(engine, "");
    let size = EXTENT + 5;
    origin.put("object", Content::new(size).bytes(0, size as usize));
    for _ in 0..2 {
        for range in
            ["bytes=5-4", "bytes=a-b", "bytes=-", "bytes=0--1", "items=0-5", "bytes 0-5", "bytes=0-1,5-6", ""]
        {
            let response = ask(&node, "/data/object", range);
            assert_eq!(response.status, 200, "`{range}`");
            Content::new(size).must_equal(0, size, &response.body);
        }
    }
}

/// B055, B055b, B084, B088.
fn empty_objects_are_objects(engine: Engine) {
    for freshness in ["strict", "immutable"] {
        let (origin, node) = start(engine, &format!(",freshness={freshness}"));
        origin.put("empty", Vec::new());
        for round in 0..3 {
            let whole = http::get(node.data(), "/data/empty");
            assert_eq!((whole.status, whole.header("content-length")), (200, Some("0")), "round {round}");
            let head = http::ask(node.data(), "HEAD", "/data/empty", &[], None).expect("an answer");
            assert_eq!((head.status, head.header("content-length")), (200, Some("0")), "round {round}");
            let malformed = ask(&node, "/data/empty", "bytes=0--1");
            assert_eq!((malformed.status, malformed.body.len()), (200, 0), "round {round}");
            for range in ["bytes=0-", "bytes=0-0", "bytes=-1"] {
                let response = ask(&node, "/data/empty", range);
                assert_eq!(response.status, 416, "{range}, round {round}");
                assert_eq!(response.header("content-range"), Some("bytes */0"), "{range}, round {round}");
            }
        }
        // A ranged request may also be the first that is ever heard of it.
        origin.put("first-by-range", Vec::new());
        assert_eq!(ask(&node, "/data/first-by-range", "bytes=0-99").status, 416);
        assert_eq!(http::get(node.data(), "/data/first-by-range").status, 200);
    }
}

/// B090, B091: a HEAD never fills the body, and says what the GET says.
fn a_head_tells_what_a_get_would(engine: Engine) {
    let (origin, node) = start(engine, "");
    let etag = origin.put("object", Content::new(1).bytes(0, 100_000));
    for round in 0..2 {
        let head = http::ask(node.data(), "HEAD", "/data/object", &[], None).expect("an answer");
        assert_eq!((head.status, head.header("content-length")), (200, Some("100000")), "round {round}");
        let get = http::get(node.data(), "/data/object");
        Content::new(1).must_equal(0, 100_000, &get.body);
        for name in ["etag", "last-modified", "content-type", "accept-ranges"] {
            assert_eq!(head.header(name), get.header(name), "{name}, round {round}");
        }
        assert_eq!(get.header("etag"), Some(etag.as_str()));
        assert_eq!(get.header("accept-ranges"), Some("bytes"));
    }
    let missing = http::ask(node.data(), "HEAD", "/data/missing", &[], None).expect("an answer");
    assert_eq!((missing.status, missing.body.len()), (404, 0));
}

fn start(engine: Engine, keys: &str) -> (Origin, Node) {
    let origin = Origin::start();
    let node = Node::start(&NodeSpec::new(engine).accelerator(format!("data={}{keys}", origin.url())));
    (origin, node)
}

#[track_caller]
fn ask(node: &Node, target: &str, range: &str) -> Response {
    http::ask(node.data(), "GET", target, &[("Range", range)], None)
        .unwrap_or_else(|error| panic!("{target} {range}: {error}"))
}

#[track_caller]
fn must_be_range(response: &Response, content: Content, first: u64, last: u64, size: u64) {
    assert_eq!(response.status, 206, "{first}-{last} of {size}: {}", response.text());
    assert_eq!(response.header("content-range"), Some(format!("bytes {first}-{last}/{size}").as_str()));
    content.must_equal(first, last + 1 - first, &response.body);
}
