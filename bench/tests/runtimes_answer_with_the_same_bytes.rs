//! Every runtime that `engines` compares answers with the right bytes, from memory and from a file, and the comparison has
//! every cell.
#![cfg(feature = "engines")]

mod common;

use common::{assert_code, bench_command};
use forebay_bench::content::Content;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

const RUNTIMES: [&str; 4] = ["ours", "ours-copied", "tokio-uring", "glommio"];
const SIZE: usize = 64 << 10;

/// A core that this process may use.
fn core() -> String {
    core_affinity::get_core_ids().expect("cores")[0].id.to_string()
}

/// Bodies of these objects as a server gives them, asked for in one go.
fn answers(runtime: &str, file: Option<&std::path::Path>, objects: &[u64]) -> Vec<Vec<u8>> {
    let size = SIZE.to_string();
    let mut command = bench_command(&["engines-serve", "--runtime", runtime, "--size", &size]);
    command.args(["--objects", "4", "--connections", "2", "--cpu", &core()]).stdout(Stdio::piped());
    if let Some(file) = file {
        command.arg("--file").arg(file);
    }
    let mut server = command.spawn().expect("started");
    let mut url = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut url).expect("an address");
    let address = url.trim().strip_prefix("http://").and_then(|rest| rest.strip_suffix("/engines"));
    let mut stream = TcpStream::connect(address.expect("an address")).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
    for object in objects {
        write!(stream, "GET /engines/piece-{object:08} HTTP/1.1\r\nHost: a\r\n\r\n").expect("sent");
    }
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
    let mut bodies = Vec::new();
    for _ in objects {
        let mut answer = vec![0; head.len() + SIZE];
        stream.read_exact(&mut answer).expect("a whole answer");
        let body = answer.split_off(head.len());
        assert_eq!(answer, head.as_bytes(), "{runtime}");
        bodies.push(body);
    }
    server.kill().expect("it is there");
    server.wait().expect("ended");
    bodies
}

fn body(object: u64) -> Vec<u8> {
    let mut body = vec![0; SIZE];
    Content::new(format!("engines/piece-{object:08}").as_bytes(), 1).fill(0, &mut body);
    body
}

#[test]
fn from_memory_and_from_whatever_the_file_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bodies");
    // The last one is somebody else's: a server gives what the file has, and it is the client that finds it out.
    let wrong = vec![0xEE; SIZE];
    std::fs::write(&path, [body(0), body(1), body(2), wrong.clone()].concat()).expect("written");
    for runtime in RUNTIMES {
        let order = [3, 0, 2, 1, 1];
        assert!(answers(runtime, None, &order) == order.map(body), "{runtime}, from memory");
        let expected = [wrong.clone(), body(0), body(2), body(1), body(1)];
        assert!(answers(runtime, Some(&path), &order) == expected, "{runtime}, from the file");
    }
}

#[test]
fn a_short_comparison_has_every_cell_and_no_figure_that_is_none() {
    if std::thread::available_parallelism().map_or(1, std::num::NonZero::get) < 2 {
        return common::skip("comparing runtimes needs two cores");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("found.json");
    let mut command =
        bench_command(&["engines", "--sizes", "64KiB", "--hot-set", "1MiB", "--drive-set", "1MiB"]);
    command.args(["--connections", "4", "--rounds", "2", "--block", "30ms", "--quiet"]);
    let output = command.arg("--folder").arg(folder.path()).arg("--json").arg(&file).output().expect("run");
    assert_code(&output, 0);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("tokio-uring 0.5") && text.contains("glommio 0.9"), "{text}");
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    let json: Value = serde_json::from_slice(&std::fs::read(&file).expect("written")).expect("JSON");
    assert_eq!(json["schema"], "forebay-bench engines 1");
    let cells = json["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 2 * RUNTIMES.len(), "{json:#}");
    for cell in cells {
        let blocks = cell["blocks"].as_array().expect("blocks");
        assert_eq!(blocks.len(), 2, "{cell:#}");
        for block in blocks {
            let requests = block["requests"].as_u64().expect("a number");
            assert!(requests >= 4 && block["bytes"].as_u64() == Some(requests * SIZE as u64), "{cell:#}");
            assert!(block["server_cpu_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{cell:#}");
        }
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("listed").flatten().collect();
    assert_eq!(left.len(), 1, "the file of the drive is removed: {left:?}");
}

/// Pieces of 148 KiB once found no memory: the arena puts twelve of them on a page, where thirteen were counted on.
#[test]
fn sizes_that_divide_no_page_have_their_memory() {
    if std::thread::available_parallelism().map_or(1, std::num::NonZero::get) < 2 {
        return common::skip("comparing runtimes needs two cores");
    }
    for size in ["20KiB", "148KiB", "700KiB", "1100KiB"] {
        let mut command =
            bench_command(&["engines", "--runtimes", "ours", "--states", "hot", "--sizes", size]);
        command.args([
            "--hot-set",
            "64MiB",
            "--connections",
            "4",
            "--rounds",
            "1",
            "--block",
            "20ms",
            "--quiet",
        ]);
        assert_code(&command.output().expect("run"), 0);
    }
}

#[test]
fn a_set_without_two_bodies_is_refused() {
    let output =
        bench_command(&["engines", "--sizes", "2MiB", "--hot-set", "3MiB", "--states", "hot"]).output();
    let output = output.expect("run");
    assert_code(&output, 1);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--hot-set: 3145728 bytes hold no two bodies of 2097152"), "{said}");
}
