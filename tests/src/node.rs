//! The node under test: the real program, started, asked, killed and cleaned up after.
//!
//! A [`NodeSpec`] says what an operator would say on the command line; [`Node::start`] runs it and returns when
//! `/readyz` agrees. Dropping a node ends exactly that process and waits for it; while a test is panicking its
//! log is printed first. Credentials travel in the environment, as they do in production.

use crate::http;
use crate::wait::{PATIENCE, until};
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Which engine moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring`.
    Uring,
    /// epoll and a pool of preads.
    Portable,
}

impl Engine {
    /// The word for `--engine`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Portable => "portable",
        }
    }
}

/// How a node is to be started. Small by default, so that several fit beside each other.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    engine: Engine,
    memory: String,
    cores: String,
    drives: Vec<String>,
    accelerators: Vec<String>,
    anonymous: bool,
    extra: Vec<String>,
    environment: Vec<(String, String)>,
    ports: Option<(SocketAddr, SocketAddr)>,
}

impl NodeSpec {
    /// An anonymous node without a drive and without accelerators.
    pub fn new(engine: Engine) -> Self {
        Self {
            engine,
            memory: "128MiB".into(),
            cores: "auto".into(),
            drives: Vec::new(),
            accelerators: Vec::new(),
            anonymous: true,
            extra: Vec::new(),
            environment: Vec::new(),
            ports: None,
        }
    }

    /// `--accelerator`, e.g. `data=http://127.0.0.1:9000,freshness=immutable`.
    #[must_use]
    pub fn accelerator(mut self, value: impl Into<String>) -> Self {
        self.accelerators.push(value.into());
        self
    }

    /// `--memory`, e.g. `64MiB`.
    #[must_use]
    pub fn memory(mut self, size: &str) -> Self {
        self.memory = size.into();
        self
    }

    /// `--drive path=…,size=…`.
    #[must_use]
    pub fn drive(mut self, path: &Path, size: &str) -> Self {
        self.drives.push(format!("path={},size={size}", path.display()));
        self
    }

    /// `--drive` with only a path: for what already carries a superblock.
    #[must_use]
    pub fn drive_as_is(mut self, path: &Path) -> Self {
        self.drives.push(path.display().to_string());
        self
    }

    /// `--cores`, e.g. `0,1`.
    #[must_use]
    pub fn cores(mut self, cores: &str) -> Self {
        self.cores = cores.into();
        self
    }

    /// Leaves `--anonymous` out.
    #[must_use]
    pub fn with_keys_only(mut self) -> Self {
        self.anonymous = false;
        self
    }

    /// A further argument, as it is.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        self.extra.push(argument.into());
        self
    }

    /// An environment variable for the process.
    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Starts where `node` listened, as a restarted service does.
    #[must_use]
    pub fn at_the_place_of(mut self, node: &Node) -> Self {
        self.ports = Some((node.data, node.admin));
        self
    }

    /// The `serve` command, listening on the two addresses.
    fn command(&self, data: SocketAddr, admin: SocketAddr) -> Command {
        let mut command = Command::new(program());
        command.args([
            "serve",
            "--engine",
            self.engine.word(),
            "--memory",
            &self.memory,
            "--cores",
            &self.cores,
        ]);
        command.args(["--listen", &data.to_string(), "--admin", &admin.to_string()]);
        for drive in &self.drives {
            command.args(["--drive", drive]);
        }
        for accelerator in &self.accelerators {
            command.args(["--accelerator", accelerator]);
        }
        if self.anonymous {
            command.arg("--anonymous");
        }
        command.args(&self.extra);
        // Whatever the developer's own shell holds must not reach the node.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("AWS_") || text.starts_with("FOREBAY_") {
                command.env_remove(&name);
            }
        }
        command.env("AWS_EC2_METADATA_DISABLED", "true");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }

    /// Runs `serve` for a case in which it must refuse: returns its output once it has ended by itself.
    pub fn run_to_the_end(&self) -> Output {
        let (data, admin) = (free_address(), free_address());
        output_within_patience(self.command(data, admin))
    }
}

/// A running node.
pub struct Node {
    child: Child,
    data: SocketAddr,
    admin: SocketAddr,
    log: PathBuf,
    _room: tempfile::TempDir,
}

impl Node {
    /// Starts a node and waits until it is ready; panics with its log if it ends or stays unready.
    #[track_caller]
    pub fn start(spec: &NodeSpec) -> Self {
        let room = tempfile::tempdir().expect("a temporary directory");
        let log = room.path().join("node.log");
        let (data, admin) = spec.ports.unwrap_or_else(|| (free_address(), free_address()));
        let out = File::create(&log).expect("a log file");
        let mut command = spec.command(data, admin);
        command.stdout(out.try_clone().expect("a second handle")).stderr(out);
        let child =
            command.spawn().unwrap_or_else(|error| panic!("starting {}: {error}", program().display()));
        let mut node = Self { child, data, admin, log, _room: room };
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = node.child.try_wait().expect("a child can be waited for") {
                panic!("the node ended with {status} before it was ready; its log:\n{}", node.log());
            }
            if http::ask(admin, "GET", "/readyz", &[], None).is_ok_and(|response| response.status == 200) {
                return node;
            }
            assert!(Instant::now() < deadline, "the node did not become ready; its log:\n{}", node.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where S3 is spoken.
    pub fn data(&self) -> SocketAddr {
        self.data
    }

    /// The admin door.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything the node has printed.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The sum over all label sets of the metric `name`; 0 if the node does not show it.
    #[track_caller]
    pub fn metric(&self, name: &str) -> u64 {
        self.metric_where(name, "")
    }

    /// The sum of the metric `name` over the label sets whose text contains `label`, e.g. `tier="ram"`.
    #[track_caller]
    pub fn metric_where(&self, name: &str, label: &str) -> u64 {
        let text = http::get(self.admin, "/metrics").text();
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.rsplit_once(' '))
            .filter(|(series, _)| series.split('{').next() == Some(name) && series.contains(label))
            .map(|(_, value)| value.parse::<f64>().expect("a number after the series") as u64)
            .sum()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) {
        self.child.kill().expect("a running child can be killed");
        self.child.wait().expect("a child can be waited for");
    }

    /// SIGTERM; the node goes on until its bodies are out.
    pub fn terminate(&self) {
        // Through kill(1): a test has no other reason to call the kernel by hand.
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -TERM {}", self.child.id());
    }

    /// Waits for the node to end by itself; panics when it does not.
    #[track_caller]
    pub fn wait(mut self) -> ExitStatus {
        until("the node to end", || self.child.try_wait().expect("a child can be waited for"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the node at {} ---\n{}---", self.data, self.log());
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Runs `forebay-node` with `arguments` to its end, as an operator does with `format` or `check-config`.
pub fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(program());
    command.args(arguments).stdin(Stdio::null());
    output_within_patience(command)
}

/// Standard output and error of a finished program, for messages and searches.
pub fn words(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The program: `FOREBAY_NODE` if set, else the one beside the test's own binary.
pub fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("FOREBAY_NODE") {
        return path.into();
    }
    let own = std::env::current_exe().expect("a test knows where it is");
    let profile = own.ancestors().nth(2).expect("target/PROFILE/deps/test").to_owned();
    let path = profile.join("forebay-node");
    assert!(
        path.exists(),
        "{} is missing: cargo build -p forebay-dataplane, or use tests/run",
        path.display()
    );
    path
}

fn output_within_patience(mut command: Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child =
        command.spawn().unwrap_or_else(|error| panic!("starting {}: {error}", program().display()));
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().expect("a child can be waited for").is_none() {
        if Instant::now() >= deadline {
            drop(child.kill());
            let output = child.wait_with_output().expect("output of a killed child");
            panic!("the program was expected to end by itself; it printed:\n{}", words(&output));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("output of a finished child")
}

/// A free loopback address, never the same one twice in a process. Below the range that the kernel hands out for
/// outgoing connections, so that no client of another test can take it in between.
fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (std::process::id().wrapping_mul(131).wrapping_add(step)) % 20_000;
        let address = SocketAddr::from(([127, 0, 0, 1], port as u16));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}
