//! `forebay-control node ...`: what an operator asks of, or tells, one node.
//!
//! Each command is one request of the admin door; its reply is shown in words, or with `--json` as it came.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::{Args, Subcommand};
use forebay_control_api::{ByteSize, DrainReply, NodeStatus, PurgeReply, PurgeRequest, Span};
use http::Method;
use serde_json::Value;

use crate::client::{NodeAddress, ask};

/// What can be asked of a node.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// What it is and holds
    Status(Door),
    /// What it knows of one object, and what a read of it would do
    Explain(Object),
    /// Forget one object in memory and on drives; needs the Unix socket or the token
    Purge(Object),
    /// Finish what is under way and take nothing new; needs the Unix socket or the token
    Drain(Door),
}

/// Which node, and how to show its reply.
#[derive(Args, Debug)]
pub(crate) struct Door {
    /// The node's admin door, HTTP or a socket file (unix:PATH)
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:7071")]
    node: NodeAddress,

    /// File with the node's admin token
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Show the reply as it came
    #[arg(long)]
    json: bool,
}

/// One object of one accelerator.
#[derive(Args, Debug)]
pub(crate) struct Object {
    /// The bucket name that clients use
    accelerator: String,

    /// The object's key, as it is, not percent-encoded
    key: String,

    #[command(flatten)]
    door: Door,
}

/// Does it and returns what is to be printed.
///
/// # Errors
/// The node cannot be reached or refuses, or a file cannot be read.
pub(crate) async fn run(command: Command) -> Result<String> {
    match command {
        Command::Status(door) => {
            let reply = door.ask(Method::GET, "/v1/status", None).await?;
            door.show(&reply, |status: &NodeStatus| status_in_words(status))
        }
        Command::Explain(Object { accelerator, key, door }) => {
            let path = format!("/v1/explain?accelerator={}&key={}", encoded(&accelerator), encoded(&key));
            let reply = door.ask(Method::GET, &path, None).await?;
            door.show(&reply, |explanation: &Value| explanation_in_words(explanation))
        }
        Command::Purge(Object { accelerator, key, door }) => {
            let body = serde_json::to_string(&PurgeRequest { accelerator, key })?;
            let reply = door.ask(Method::POST, "/v1/purge", Some(body)).await?;
            door.show(&reply, |purged: &PurgeReply| match purged {
                PurgeReply { found: false, .. } => "the node did not know it; nothing to forget\n".to_owned(),
                PurgeReply { extents, bytes, .. } => {
                    format!("forgotten: {extents} pieces, {:#}\n", ByteSize::new(*bytes))
                }
            })
        }
        Command::Drain(door) => {
            let reply = door.ask(Method::POST, "/v1/drain", None).await?;
            door.show(&reply, |_: &DrainReply| {
                "draining: the node finishes what it has and takes nothing new\n".to_owned()
            })
        }
    }
}

impl Door {
    async fn ask(&self, method: Method, path: &str, body: Option<String>) -> Result<Bytes> {
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        ask(&self.node, token.as_deref(), method, path, body).await
    }

    fn show<T: serde::de::DeserializeOwned>(
        &self,
        reply: &[u8],
        words: impl Fn(&T) -> String,
    ) -> Result<String> {
        let strange = || format!("{} answered something that a Forebay node does not say", self.node);
        let value: Value = serde_json::from_slice(reply).with_context(strange)?;
        if self.json {
            return Ok(format!("{value:#}\n"));
        }
        Ok(words(&serde_json::from_value(value).with_context(strange)?))
    }
}

/// The one line of a token file.
pub(crate) fn read_token(file: &Path) -> Result<String> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("--token-file: reading {}", file.display()))?;
    let token = text.trim_end_matches(['\n', '\r']).to_owned();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("--token-file: {} must hold one line of visible characters", file.display());
    }
    Ok(token)
}

fn status_in_words(status: &NodeStatus) -> String {
    let size = |bytes| ByteSize::new(bytes);
    let state = match status {
        NodeStatus { draining: true, .. } => "draining",
        NodeStatus { ready: true, .. } => "ready",
        _ => "not ready",
    };
    let uptime = Span::from_secs(status.uptime_seconds);
    let mut text = format!(
        "{state}, version {}, up {uptime}, engine {}\n{} objects, {} pieces, {} connections\n",
        status.version, status.engine, status.objects, status.extents, status.connections
    );
    for url in &status.listen {
        let _ = writeln!(text, "serving      {url}");
    }
    for worker in &status.workers {
        let _ = writeln!(text, "worker       core {}, {} connections", worker.core, worker.connections);
    }
    let memory = &status.memory;
    let registered = if memory.registered { "registered" } else { "not registered" };
    let _ = writeln!(
        text,
        "memory       {:#}, {registered}: RAM tier {:#}, reads {:#}, downloads {:#}",
        size(memory.total_bytes),
        size(memory.ram_bytes),
        size(memory.reads_bytes),
        size(memory.fills_bytes)
    );
    if let Some(link) = &status.control {
        let contact = match link.contact_seconds_ago {
            Some(seconds) => format!("last contact {} ago", Span::from_secs(seconds)),
            None => "no contact yet".to_owned(),
        };
        let fenced = if link.fenced { ", fenced: ttl is treated as strict" } else { "" };
        let _ = writeln!(
            text,
            "control      {} as {}, revision {}, placement {}, {contact}{fenced}",
            link.url, link.node, link.revision, link.epoch
        );
        for problem in [&link.problem].into_iter().filter(|problem| !problem.is_empty()).chain(&link.refused)
        {
            let _ = writeln!(text, "problem      {problem}");
        }
    }
    for drive in &status.drives {
        let (used, capacity) = (size(drive.used_bytes), size(drive.capacity_bytes));
        let _ = writeln!(text, "drive        {} {}, {used:#} of {capacity:#}", drive.path, drive.state);
    }
    for accelerator in &status.accelerators {
        let _ = writeln!(
            text,
            "accelerator  {} -> {}, {}, pieces of {:#}",
            accelerator.name,
            accelerator.origin,
            accelerator.freshness,
            size(accelerator.extent_bytes)
        );
    }
    text
}

/// One line for each thing the node says; what it says may grow, so the names are its own.
fn explanation_in_words(explanation: &Value) -> String {
    match explanation {
        Value::Object(things) => {
            let mut text = String::new();
            for (name, value) in things {
                let _ = match value {
                    Value::String(value) => writeln!(text, "{name:<20} {value}"),
                    value => writeln!(text, "{name:<20} {value}"),
                };
            }
            text
        }
        other => format!("{other}\n"),
    }
}

/// For a query: everything but unreserved characters as `%XX`.
pub(crate) fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            encoded.push(byte as char);
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use clap::Parser;
    use forebay_control_api::{AcceleratorStatus, ControlLink, DriveStatus, MemoryStatus, WorkerStatus};
    use forebay_dataplane::admin::{AdminDoor, AdminThread, DoorError, NodeDoor, Readiness};
    use forebay_dataplane::config::{AdminAddr, CoreMap, Secret};

    use super::*;

    const KEY: &str = "a key/with &=+% and ü";

    /// Knows one object.
    #[derive(Default)]
    struct SmallNode {
        purged: AtomicBool,
        draining: AtomicBool,
    }

    impl NodeDoor for SmallNode {
        fn ready(&self) -> Readiness {
            Readiness::Ready
        }

        fn status(&self) -> NodeStatus {
            let draining = self.draining.load(Ordering::Relaxed);
            NodeStatus {
                version: "9.9.9".into(),
                uptime_seconds: 120,
                ready: !draining,
                draining,
                engine: "portable".into(),
                listen: vec!["http://127.0.0.1:7070".into()],
                workers: vec![WorkerStatus { core: 3, connections: 5 }],
                accelerators: vec![AcceleratorStatus {
                    name: "abc".into(),
                    origin: "s3://bucket".into(),
                    freshness: "strict".into(),
                    extent_bytes: 1 << 20,
                }],
                memory: MemoryStatus { total_bytes: 1 << 30, ..MemoryStatus::default() },
                control: Some(ControlLink {
                    url: "http://c:7080".into(),
                    node: "node-a".into(),
                    revision: 7,
                    epoch: 5,
                    contact_seconds_ago: Some(2),
                    problem: "what to do".into(),
                    ..ControlLink::default()
                }),
                drives: vec![DriveStatus {
                    path: "/d".into(),
                    state: "serving".into(),
                    ..DriveStatus::default()
                }],
                ..NodeStatus::default()
            }
        }

        fn explain(&self, accelerator: &str, key: &[u8]) -> Option<Value> {
            (accelerator == "abc")
                .then(|| serde_json::json!({ "known": key == KEY.as_bytes(), "freshness": "strict" }))
        }

        fn purge(&self, accelerator: &str, key: &[u8]) -> Result<PurgeReply, DoorError> {
            if accelerator != "abc" {
                return Err(DoorError::NoAccelerator(accelerator.into()));
            }
            let found = key == KEY.as_bytes() && !self.purged.swap(true, Ordering::Relaxed);
            Ok(PurgeReply { found, extents: 3, bytes: 3 << 20 })
        }

        fn drain(&self) {
            self.draining.store(true, Ordering::Relaxed);
        }

        fn metrics(&self) -> String {
            String::new()
        }
    }

    /// A real admin door in front of it.
    struct Opened {
        node: String,
        thread: Option<AdminThread>,
    }

    impl Opened {
        fn new(address: &str, token: Option<&str>) -> Self {
            let door = AdminDoor::bind(&address.parse().expect("an address"), token.map(Secret::new))
                .expect("bound");
            let node = match door.address().expect("an address") {
                AdminAddr::Tcp(address) => format!("http://{address}"),
                unix @ AdminAddr::Unix(_) => unix.to_string(),
            };
            let cores = CoreMap { workers: vec![0], house: None };
            let thread = door.spawn(Arc::new(SmallNode::default()), &cores).expect("a thread");
            Self { node, thread: Some(thread) }
        }

        /// Runs a command line against the door.
        fn run(&self, arguments: &[&str]) -> Result<String, String> {
            let line = [&["forebay-control", "node"], arguments, &["--node", &self.node]].concat();
            let cli = crate::Cli::try_parse_from(line).map_err(|error| error.to_string())?;
            let crate::Command::Node(command) = cli.command else { unreachable!("the line says node") };
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(run(command)).map_err(|error| format!("{error:#}"))
        }
    }

    impl Drop for Opened {
        fn drop(&mut self) {
            if let Some(thread) = self.thread.take() {
                thread.stop();
            }
        }
    }

    #[test]
    fn an_operator_reads_a_node_over_tcp() {
        let node = Opened::new("127.0.0.1:0", None);
        let text = node.run(&["status"]).expect("a status");
        for words in
            ["ready, version 9.9.9, up 2m", "core 3, 5 connections", "abc -> s3://bucket, strict", "1GiB"]
        {
            assert!(text.contains(words), "{words} is not in\n{text}");
        }
        for words in [
            "http://c:7080 as node-a, revision 7, placement 5, last contact 2s ago",
            "problem      what to do",
        ] {
            assert!(text.contains(words), "{words} is not in\n{text}");
        }
        let json: Value =
            serde_json::from_str(&node.run(&["status", "--json"]).expect("a status")).expect("json");
        assert_eq!(json["engine"], "portable");
        let text = node.run(&["explain", "abc", KEY]).expect("an explanation");
        assert!(text.contains("known                true"), "the key arrives as it was written\n{text}");
        let error = node.run(&["explain", "xyz", "k"]).expect_err("no such accelerator");
        assert!(error.contains("404") && error.contains("`xyz`"), "{error}");
    }

    #[test]
    fn changing_a_node_over_tcp_needs_its_token() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("token");
        let file = file.to_str().expect("text");
        let node = Opened::new("127.0.0.1:0", Some("0123456789abcdef"));
        let error = node.run(&["purge", "abc", KEY]).expect_err("no token");
        assert!(error.contains("403") && error.contains("token"), "{error}");
        let error = node.run(&["drain", "--token-file", file]).expect_err("no file");
        assert!(error.contains("--token-file: reading"), "{error}");
        std::fs::write(file, "two words\n").expect("written");
        let error = node.run(&["drain", "--token-file", file]).expect_err("no token in it");
        assert!(error.contains("one line"), "{error}");
        std::fs::write(file, "0123456789abcdef\n").expect("written");
        let text = node.run(&["purge", "abc", KEY, "--token-file", file]).expect("purged");
        assert_eq!(text, "forgotten: 3 pieces, 3MiB\n");
        let text = node.run(&["purge", "abc", KEY, "--token-file", file]).expect("purged before");
        assert!(text.contains("did not know"), "{text}");
    }

    #[test]
    fn on_the_socket_file_no_token_is_needed() {
        let folder = tempfile::tempdir().expect("a folder");
        let node = Opened::new(&format!("unix:{}", folder.path().join("s").display()), None);
        assert!(node.run(&["drain"]).expect("drained").starts_with("draining"));
        assert!(node.run(&["status"]).expect("a status").starts_with("draining"));
    }

    #[test]
    fn a_wrong_address_is_told_apart_from_a_refusal() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = nobody.local_addr().expect("an address");
        drop(nobody);
        let nowhere = Opened { node: format!("http://{address}"), thread: None };
        let error = nowhere.run(&["status"]).expect_err("nobody there");
        assert!(error.contains("asking http://127.0.0.1") && error.contains("refused"), "{error}");

        // Something else answers: a web server without our words.
        let other = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = other.local_addr().expect("an address");
        let answering = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut stream, _) = other.accept().expect("a client");
            let _ = stream.read(&mut [0; 1024]).expect("a request");
            stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nnope\n").expect("answered");
        });
        let elsewhere = Opened { node: format!("http://{address}"), thread: None };
        let error = elsewhere.run(&["status"]).expect_err("not a node");
        answering.join().expect("joined");
        assert!(error.contains("is it the right address?"), "{error}");
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        crate::Cli::command().debug_assert();
        assert!(crate::Cli::try_parse_from(["forebay-control", "node", "purge", "abc"]).is_err());
    }
}
