//! The programs that the bench starts beside itself: the emulator, a control plane, a node. Whoever drops the handle
//! ends them.
#![forbid(unsafe_code)]

use crate::client::Target;
use crate::client::plain;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a child may take to leave after SIGTERM before it is killed.
const LEAVE_TICKS: u32 = 100;
const TICK: Duration = Duration::from_millis(50);

/// A running child with its log; ended on drop.
pub struct Running {
    name: &'static str,
    child: Child,
    log: PathBuf,
    /// Held open: a program whose reader has gone fails at its next line.
    output: Option<BufReader<ChildStdout>>,
}

impl Running {
    /// Starts a program with its error output (and, unless it is read, its output) in `log`.
    ///
    /// # Errors
    /// The program or the log cannot be opened.
    pub fn start(name: &'static str, command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stderr(file)
            .spawn()
            .with_context(|| format!("starting {name} ({})", command.get_program().display()))?;
        Ok(Self { name, child, log: log.to_path_buf(), output: None })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The first line that it prints on its standard output, which must be piped. What follows is not read, and must not
    /// fill a pipe (64 KiB).
    ///
    /// # Errors
    /// It ended without one.
    pub fn first_line(&mut self) -> Result<String> {
        let Some(output) = self.child.stdout.take() else { bail!("{}: its output is not piped", self.name) };
        let mut line = String::new();
        let output = self.output.insert(BufReader::new(output));
        output.read_line(&mut line).with_context(|| format!("reading from {}", self.name))?;
        if line.is_empty() {
            bail!("{} ended at once. {}", self.name, self.last_words());
        }
        Ok(line.trim().to_owned())
    }

    /// Polls `url` until it answers 200.
    ///
    /// # Errors
    /// It ended, did not answer in time, or a signal asked to stop.
    pub fn wait_ready(&mut self, url: &str, timeout: Duration, stop: &AtomicBool) -> Result<()> {
        let (host, path) =
            url.strip_prefix("http://").and_then(|rest| rest.split_once('/')).unwrap_or((url, ""));
        let target = Target::parse_host(&format!("http://{host}")).map_err(anyhow::Error::msg)?;
        let mut last = String::new();
        for _ in 0..timeout.as_millis() / TICK.as_millis() {
            if stop.load(Ordering::Relaxed) {
                bail!("stopped by a signal");
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} before it was ready. {}", self.name, self.last_words());
            }
            match plain::request(&target, "GET", &format!("/{path}"), b"", b"") {
                Ok(answer) if answer.status == 200 => return Ok(()),
                Ok(answer) => last = format!("answered {}", answer.status),
                Err(error) => last = error.to_string(),
            }
            std::thread::sleep(TICK);
        }
        bail!("{} was not ready after {timeout:?} ({url}: {last}). {}", self.name, self.last_words())
    }

    /// Asks it to leave, waits, and kills it only if it does not.
    pub fn end(&mut self) -> Option<ExitStatus> {
        if let Ok(Some(status)) = self.child.try_wait() {
            return Some(status);
        }
        if let Ok(raw) = i32::try_from(self.child.id())
            && let Some(pid) = Pid::from_raw(raw)
        {
            let _ = kill_process(pid, Signal::TERM);
        }
        for _ in 0..LEAVE_TICKS {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(TICK);
        }
        let _ = self.child.kill();
        self.child.wait().ok()
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        if lines.is_empty() {
            return "It said nothing.".to_owned();
        }
        format!("Its last words:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// What a node is started with, beside its addresses.
pub struct NodePlan<'a> {
    /// The program.
    pub program: &'a Path,
    /// `--cores`.
    pub cores: String,
    /// `--memory`.
    pub memory: &'a str,
    /// `--drive`, bytes; a file in `folder`.
    pub drive_bytes: u64,
    /// What it serves: `--accelerator` and its value, or what names a control plane that says it.
    pub serves: Vec<OsString>,
    /// `--engine`.
    pub engine: &'a str,
    /// Where the drive's file and the log go.
    pub folder: &'a Path,
}

/// What every node that the bench starts is told.
pub(crate) struct NodeCommand<'a> {
    /// The program.
    pub(crate) program: &'a Path,
    /// `--listen`, on loopback.
    pub(crate) port: u16,
    /// `--admin`, on loopback.
    pub(crate) admin_port: u16,
    /// `--cores`.
    pub(crate) cores: &'a str,
    /// `--memory`.
    pub(crate) memory: &'a str,
    /// `--engine`.
    pub(crate) engine: &'a str,
}

impl NodeCommand<'_> {
    /// `forebay-node serve` with all of it; what it serves is still to be added.
    pub(crate) fn build(&self) -> Command {
        let mut command = Command::new(self.program);
        command.args(["serve", "--anonymous"]);
        command.arg("--listen").arg(format!("127.0.0.1:{}", self.port));
        command.arg("--admin").arg(format!("127.0.0.1:{}", self.admin_port));
        command.args(["--cores", self.cores, "--memory", self.memory, "--engine", self.engine]);
        command
    }
}

/// Starts a node on free ports of loopback and waits until it is ready; the node and `http://host:port`.
///
/// # Errors
/// It cannot be started or does not become ready; its last words are in the error.
pub fn start_node(plan: &NodePlan, stop: &AtomicBool) -> Result<(Running, String)> {
    let log = plan.folder.join("node.log");
    let mut tries = 0;
    loop {
        tries += 1;
        let [port, admin_port] = free_ports()?;
        let command = NodeCommand {
            program: plan.program,
            port,
            admin_port,
            cores: &plan.cores,
            memory: plan.memory,
            engine: plan.engine,
        };
        let mut command = command.build();
        let drive = plan.folder.join("drive.forebay");
        command.args(["--drive", &format!("path={},size={}MiB", drive.display(), plan.drive_bytes >> 20)]);
        command.args(&plan.serves).stdout(Stdio::null());
        let mut node = Running::start("forebay-node", &mut command, &log)?;
        match node.wait_ready(&format!("http://127.0.0.1:{admin_port}/readyz"), Duration::from_mins(1), stop)
        {
            Ok(()) => return Ok((node, format!("http://127.0.0.1:{port}"))),
            // Another program took the port between our look and the node's bind.
            Err(_) if tries < 3 && node.last_words().contains("in use") => {}
            Err(error) => return Err(error),
        }
    }
}

// Two different ports of loopback that are free now: both are held until both are known.
pub(crate) fn free_ports() -> Result<[u16; 2]> {
    let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("looking for a free port");
    let (one, two) = (listen()?, listen()?);
    Ok([one.local_addr()?.port(), two.local_addr()?.port()])
}

/// The binary of another of our programs, beside ours; built by cargo, with our own profile, when it is not there.
///
/// # Errors
/// There is no cargo, no source tree, or the build fails.
pub fn sibling(program: &str, package: &str, stop: &AtomicBool) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding out where this program is")?;
    let folder = own.parent().context("finding out where this program is")?;
    let path = folder.join(program);
    if path.is_file() {
        return Ok(path);
    }
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    if !manifest.is_file() {
        bail!(
            "{} is missing, and so are the sources to build it from; put {program} beside forebay-bench",
            path.display()
        );
    }
    let profile = folder.file_name().and_then(|name| name.to_str()).unwrap_or("release");
    let profile = if profile == "debug" { "dev" } else { profile };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&cargo);
    command.args(["build", "--package", package, "--bin", program, "--profile", profile]);
    command.arg("--manifest-path").arg(&manifest);
    if let Some(target) = folder.parent() {
        command.arg("--target-dir").arg(target);
    }
    eprintln!("building {program} (profile {profile}), once …");
    let mut child = match command.stdin(Stdio::null()).spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
            "{} is missing and there is no cargo to build it; install Rust, or run: cargo build --profile {profile} -p {package}",
            path.display()
        ),
        Err(error) => return Err(error).context("starting cargo"),
    };
    let status = loop {
        if let Some(status) = child.try_wait().context("waiting for cargo")? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            let _ = child.kill();
            let _ = child.wait();
            bail!("stopped by a signal");
        }
        std::thread::sleep(TICK);
    };
    if !status.success() || !path.is_file() {
        bail!("building {program} ended with {status} and left no {}", path.display());
    }
    Ok(path)
}
