//! The control plane under test: the real program as a child process, asked over real sockets.
//!
//! Nothing sleeps for a guess: what must happen is asked for until it has, and [`PATIENCE`] is the bound. Dropping a
//! [`Control`] ends exactly its process and shows its log if the test is failing.

#![allow(dead_code, reason = "each test file uses its own part of the house")]
#![allow(clippy::allow_attributes, reason = "an expectation would fail in the file that uses everything")]

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use serde_json::Value;
use tokio::time::Instant;

/// How long a test waits for something that must happen. Never the measure of anything.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// The program.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_forebay-control");

/// Asks again and again until there is an answer.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {} s in vain for: {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A running control plane.
pub(crate) struct Control {
    child: Child,
    pub(crate) url: String,
    pub(crate) admin_file: PathBuf,
    pub(crate) admin: String,
    log: PathBuf,
}

impl Control {
    /// Starts one over `room/store`; more arguments behind.
    pub(crate) fn start(room: &Path, more: &[&str]) -> Self {
        let log = room.join("control.log");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).expect("a log");
        let mut child = Command::new(PROGRAM)
            .args(["serve", "--listen", "127.0.0.1:0", "--store"])
            .arg(format!("embedded:{}", room.join("store").display()))
            .args(more)
            .env("FOREBAY_LOG", "debug")
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let Some(url) = line.trim().strip_prefix("control plane  ") else {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            panic!("it said `{line}` and\n{log}");
        };
        let admin_file = room.join("store.admin-token");
        let admin = std::fs::read_to_string(&admin_file).expect("the admin token").trim().to_owned();
        Self { url: url.to_owned(), child, admin_file, admin, log }
    }

    /// One request as the bearer of `token`.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        body: Option<&Value>,
    ) -> (u16, Value) {
        ask(&self.url, method, path, token, body.map(Value::to_string))
    }

    /// As the administrator; panics unless it succeeds.
    #[track_caller]
    pub(crate) fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, Some(&self.admin), None);
        assert_eq!(status, 200, "GET {path}: {body}");
        body
    }

    /// As the administrator; panics unless it succeeds.
    #[track_caller]
    pub(crate) fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask(method, path, Some(&self.admin), Some(body));
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    /// A new token of a role.
    pub(crate) fn token(&self, role: &str) -> String {
        let issued = self.send("POST", "/v1/tokens", &serde_json::json!({"role": role}));
        issued["token"].as_str().expect("a token").to_owned()
    }

    /// An operator's command as the administrator.
    pub(crate) fn command(&self, arguments: &[&str]) -> Output {
        Command::new(PROGRAM)
            .args(arguments)
            .env("FOREBAY_CONTROL_URL", &self.url)
            .env("FOREBAY_CONTROL_TOKEN_FILE", &self.admin_file)
            .output()
            .expect("the program runs")
    }

    /// The same; panics unless it succeeds. What it printed.
    #[track_caller]
    pub(crate) fn say(&self, arguments: &[&str]) -> String {
        let output = self.command(arguments);
        let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {out}{error}");
        out.into_owned()
    }

    /// Tells it to stop, as an init system does, and waits for it.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
        until("the control plane to stop", || self.child.try_wait().expect("a child"))
    }

    /// Ends it at once.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ended");
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let mut log = String::new();
            let _ = std::fs::File::open(&self.log).and_then(|mut file| file.read_to_string(&mut log));
            eprintln!("---- the control plane's log\n{log}");
        }
    }
}

/// One request; the body as JSON, or as text where it is none.
pub(crate) fn ask(
    url: &str,
    method: &str,
    path: &str,
    token: Option<&str>,
    body: Option<String>,
) -> (u16, Value) {
    let (status, _, body) = ask_with(url, method, path, token, &[], body);
    (status, body)
}

/// The same with more headers, and those of the answer.
pub(crate) fn ask_with(
    url: &str,
    method: &str,
    path: &str,
    token: Option<&str>,
    headers: &[(&str, &str)],
    body: Option<String>,
) -> (u16, http::HeaderMap, Value) {
    let authority = url.strip_prefix("http://").expect("http");
    let mut request = http::Request::builder().method(method).uri(path).header("host", authority);
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(bytes::Bytes::from(body.unwrap_or_default()))).expect("a request");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let exchange = async {
            let stream = tokio::net::TcpStream::connect(authority).await.expect("connected");
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream))
                    .await
                    .expect("http");
            tokio::spawn(connection);
            let answer = sender.send_request(request).await.expect("answered");
            let (head, body) = answer.into_parts();
            let bytes = body.collect().await.expect("whole").to_bytes();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            (head.status.as_u16(), head.headers, value)
        };
        tokio::time::timeout(PATIENCE, exchange).await.expect("an answer in time")
    })
}
