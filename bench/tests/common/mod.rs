//! A store of a few lines that can be told to go wrong, an emulator on a thread, and the bench as a process.

#![allow(dead_code, reason = "each test file uses its own part of this one")]
#![allow(clippy::allow_attributes, reason = "`expect` would fail in the files that use every part")]

use forebay_bench::client::Target;
use forebay_bench::content::Content;
use forebay_bench::origin::answer::Origin;
use forebay_bench::origin::model::Profile;
use forebay_bench::origin::server::Server;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// What a [`HostileStore`] does to its second and later answers on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// One bit of the body differs.
    FlippedBit,
    /// The body is of the version before.
    StaleVersion,
    /// The body is the object's, from the second block on.
    ShiftedRange,
    /// The connection closes before the body is whole.
    ShortBody,
    /// The head announces fewer bytes than the object has, and the body keeps to it.
    TruncatedObject,
    /// The body is of another object.
    WrongObject,
    /// The `ETag` is another one.
    OtherEtag,
    /// There is no `ETag`.
    NoEtag,
    /// A status 503 with a body.
    Unavailable,
    /// The connection closes without an answer.
    Silence,
}

/// Serves every key of bucket `b` with the pattern's bytes, all of one size.
pub(crate) struct HostileStore {
    pub(crate) url: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HostileStore {
    pub(crate) fn start(size: usize, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/b", listener.local_addr().expect("bound"));
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if seen.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::spawn(move || serve(stream, size, fault));
            }
        });
        Self { url, stop, thread: Some(thread) }
    }
}

impl Drop for HostileStore {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(&self.url["http://".len()..self.url.len() - "/b".len()]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut stream: TcpStream, size: usize, fault: Fault) {
    let mut inbox = Vec::new();
    let mut answered = 0;
    loop {
        let end = loop {
            if let Some(at) = inbox.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            let mut piece = [0; 4096];
            match stream.read(&mut piece) {
                Ok(count) if count > 0 => inbox.extend_from_slice(&piece[..count]),
                _ => return,
            }
        };
        let head = String::from_utf8_lossy(&inbox[..end]).into_owned();
        inbox.drain(..end);
        let name = head.split(' ').nth(1).unwrap_or("/").trim_start_matches('/').to_owned();
        let fault = if answered == 0 { Fault::None } else { fault };
        answered += 1;
        let mut body = vec![0; size];
        Content::new(name.as_bytes(), 1).fill(0, &mut body);
        let mut announced = size;
        let mut etag = format!("ETag: \"{name}\"\r\n");
        match fault {
            Fault::None | Fault::Unavailable => {}
            Fault::FlippedBit => body[size / 2] ^= 1,
            Fault::StaleVersion => Content::new(name.as_bytes(), 0).fill(0, &mut body),
            Fault::ShiftedRange => Content::new(name.as_bytes(), 1).fill(4096, &mut body),
            Fault::ShortBody => body.truncate(size - 1),
            Fault::TruncatedObject => {
                body.truncate(size - 1);
                announced = size - 1;
            }
            Fault::WrongObject => Content::new(b"b/another", 1).fill(0, &mut body),
            Fault::OtherEtag => etag = String::from("ETag: \"other\"\r\n"),
            Fault::NoEtag => etag.clear(),
            Fault::Silence => return,
        }
        let status = if fault == Fault::Unavailable { "503 Service Unavailable" } else { "200 OK" };
        let head = format!("HTTP/1.1 {status}\r\n{etag}Content-Length: {announced}\r\n\r\n");
        if stream.write_all(head.as_bytes()).is_err() || stream.write_all(&body).is_err() {
            return;
        }
        if fault == Fault::ShortBody {
            return;
        }
    }
}

/// An emulator on a thread of this process.
pub(crate) struct Emulator {
    pub(crate) url: String,
    pub(crate) target: Target,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Emulator {
    pub(crate) fn start(profile: &str) -> Self {
        let origin = Origin::new(Profile::named(profile).expect("built in"), 42);
        let server = Server::bind("127.0.0.1:0".parse().expect("an address"), origin).expect("a port");
        let url = format!("http://{}", server.local_addr().expect("bound"));
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || server.run(&seen));
        let target = Target::parse_host(&url).expect("a URL");
        Self { url, target, stop, thread: Some(thread) }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let served = thread.join().expect("the emulator does not panic");
            assert!(served.is_ok(), "{served:?}");
        }
    }
}

/// The program itself with these arguments.
pub(crate) fn bench(arguments: &[&str]) -> Output {
    bench_command(arguments).output().expect("the program starts")
}

/// The program with these arguments, not started yet.
pub(crate) fn bench_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-bench"));
    command.args(arguments);
    command
}

/// Its exit code, with everything it said if it is another one.
pub(crate) fn assert_code(output: &Output, code: i32) {
    assert_eq!(
        output.status.code(),
        Some(code),
        "stdout:\n{}\nstderr:\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Said to `tests/run`, which counts what was not run.
pub(crate) fn skip(why: &str) {
    eprintln!("SKIPPED {why}");
    if let Some(path) = std::env::var_os("FOREBAY_SKIPS") {
        let mut file = std::fs::File::options().append(true).open(path).expect("the list of skips");
        writeln!(file, "{why}").expect("written");
    }
}
