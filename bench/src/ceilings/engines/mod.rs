//! The node's ring beside other io_uring runtimes: the same answers from memory and from a drive by each, in one run.
//!
//! ```text
//!   server (core A), a process for each runtime        client (core B)
//!   head → number of the object → header and body  ══  draws objects, verifies them once, then counts
//! ```
//!
//! A server here does as little as can be done in its runtime: no table, no sums, no policy. What is compared is what a runtime
//! makes of accept, receive, direct read and send, and whether it was right to have our own. Each at its best fair self:
//!
//! * ours: one message for header and body; bodies in registered memory; by reference, or copied as the others do;
//! * tokio-uring: header and body lie side by side, and leave in one write; direct reads into registered buffers;
//! * glommio: the same in memory; direct reads by its `DmaFile`, whose buffers are its own, so header and body leave in two.
//!
//! Every byte of a cell is verified before it is measured; then the client lets the kernel drop bodies, or it would be what is
//! measured. Blocks are counted beforehand and their order is reversed every other round; all are kept.
#![forbid(unsafe_code)]

use super::figures::{Figures, HEADINGS, Measured};
use crate::children::Running;
use crate::client::lanes::{EtagLedger, Job, Part, run as run_lanes};
use crate::client::{Target, Verify};
use crate::content::Content;
use crate::environment::Environment;
use crate::origin::catalog::object_name;
use crate::processors::{core_busy_seconds, pin, usage_of};
use crate::recorder::Block;
use crate::units::size_text;
use anyhow::{Context, Result, bail, ensure};
use memmap2::{Advice, MmapMut};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

mod glommio;
mod head;
mod ours;
mod tokio_uring;

/// What sizes must be multiples of, so that direct reads of any drive are aligned. Bytes.
pub const GRAIN_BYTES: u64 = 4096;
/// The largest body, bytes: what the node keeps in one piece of memory.
pub const SIZE_MAX: u64 = 2 << 20;

const BUCKET: &str = "engines";
const PREFIX: &str = "piece-";
/// Requests by which the rate is found before anything is measured.
const TRIAL_SHARE: f64 = 10.0;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Runtime {
    /// The node's ring; what is in memory leaves by reference.
    Ours,
    /// The node's ring; everything is copied.
    OursCopied,
    /// tokio-uring.
    TokioUring,
    /// glommio.
    Glommio,
}

/// Where the bodies are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum State {
    /// In the server's memory.
    Hot,
    /// In a file, read directly.
    Drive,
}

impl Runtime {
    fn word(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::OursCopied => "ours, copied",
            Self::TokioUring => "tokio-uring 0.5",
            Self::Glommio => "glommio 0.9",
        }
    }

    fn flag(self) -> String {
        clap::ValueEnum::to_possible_value(&self)
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Drive => "drive",
        }
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Who answers, in this order.
    pub runtimes: Vec<Runtime>,
    /// Where the bodies are.
    pub states: Vec<State>,
    /// Bytes of the answers: multiples of [`GRAIN_BYTES`], at most [`SIZE_MAX`].
    pub sizes: Vec<u64>,
    /// Bytes of all bodies in memory; each server has them once.
    pub hot_bytes: u64,
    /// Bytes of all bodies in the file.
    pub drive_bytes: u64,
    /// Where the file is made, and removed afterwards: on the drive in question.
    pub folder: PathBuf,
    /// Connections, each with one request under way.
    pub connections: usize,
    /// About how long a block takes.
    pub block: Duration,
    /// Blocks of each cell.
    pub rounds: u32,
    /// Where the servers run, and where the client; two cores.
    pub cores: (usize, usize),
    /// This program: it is started again as a server.
    pub program: PathBuf,
}

/// What a server is told.
#[derive(Clone, Debug)]
pub struct Service {
    /// Who answers.
    pub runtime: Runtime,
    /// The file with the bodies; `None` if they are in memory.
    pub file: Option<PathBuf>,
    /// Bytes of each body.
    pub size: u64,
    /// How many there are.
    pub objects: u64,
    /// Connections that will come.
    pub connections: usize,
    /// Where it runs.
    pub core: usize,
}

/// All blocks of one state, size and runtime.
#[derive(Clone, Debug)]
struct Cell {
    state: State,
    size: u64,
    runtime: Runtime,
    blocks: Vec<Measured>,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Comparison {
    plan: Plan,
    environment: Environment,
    cells: Vec<Cell>,
}

/// Serves until the process ends; says `http://host:port` on standard output once it listens.
///
/// # Errors
/// A ring, memory or the file is refused.
pub fn serve(service: &Service) -> Result<()> {
    pin(service.core)?;
    match service.runtime {
        Runtime::Ours | Runtime::OursCopied => ours::serve(service),
        Runtime::TokioUring => tokio_uring::serve(service),
        Runtime::Glommio => glommio::serve(service),
    }
}

impl Service {
    /// The head of every answer.
    fn head(&self) -> Vec<u8> {
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", self.size).into_bytes()
    }

    /// Where an object lies in the file, or in memory if nothing stands between bodies.
    fn offset(&self, object: u64) -> u64 {
        object % self.objects * self.size
    }

    /// The file, opened for direct reads.
    fn open(&self) -> Result<Option<File>> {
        let Some(path) = &self.file else { return Ok(None) };
        let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let file =
            std::os::unix::fs::OpenOptionsExt::custom_flags(File::options().read(true), flags).open(path);
        Ok(Some(file.with_context(|| format!("opening {} for direct reads", path.display()))?))
    }
}

/// A port of loopback, for runtimes that take any listener.
fn listen() -> Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listening")
}

/// Says where a server listens, to whoever started it.
fn tell(address: SocketAddr) -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "http://{address}/{BUCKET}").and_then(|()| out.flush()).context("saying where it listens")
}

/// All answers, head and body, one behind the other in memory of large pages, for as long as the process lives.
fn memory(service: &Service) -> Result<&'static [u8]> {
    let head = service.head();
    let stride = head.len() + service.size as usize;
    let mut map = MmapMut::map_anon(stride * service.objects as usize).context("taking memory")?;
    // As the node's own; where there are none it is slower memory.
    let _ = map.advise(Advice::HugePage);
    for (object, answer) in map.chunks_exact_mut(stride).enumerate() {
        let (first, body) = answer.split_at_mut(head.len());
        first.copy_from_slice(&head);
        content(object as u64).fill(0, body);
    }
    Ok(&*Box::leak(Box::new(map)))
}

fn content(object: u64) -> Content {
    Content::new(format!("{BUCKET}/{}", object_name(PREFIX, object)).as_bytes(), 1)
}

/// Measures, on the calling thread, which stays pinned to the client's core.
///
/// # Errors
/// A core that this process may not use, a set too small, a file that cannot be made, a server that does not start, a wrong
/// byte, or a signal: nothing was measured then.
pub fn measure(plan: &Plan, stop: &AtomicBool, say: &mut dyn FnMut(&str)) -> Result<Comparison> {
    let environment = Environment::look();
    pin(plan.cores.1)?;
    let mut cells = Vec::new();
    for state in &plan.states {
        for size in &plan.sizes {
            let (bytes, flag) = match state {
                State::Hot => (plan.hot_bytes, "--hot-set"),
                State::Drive => (plan.drive_bytes, "--drive-set"),
            };
            let objects = bytes / size;
            ensure!(objects >= 2, "{flag}: {bytes} bytes hold no two bodies of {size}");
            let file = match state {
                State::Hot => None,
                State::Drive => Some(make(&plan.folder, *size, objects, stop)?),
            };
            let path = file.as_ref().map(tempfile::NamedTempFile::path);
            cells.extend(cell_group(plan, *state, *size, objects, path, stop, say)?);
        }
    }
    Ok(Comparison { plan: plan.clone(), environment, cells })
}

/// A file with all bodies, one behind the other.
fn make(folder: &Path, size: u64, objects: u64, stop: &AtomicBool) -> Result<tempfile::NamedTempFile> {
    let named = tempfile::Builder::new().prefix("forebay-engines-").tempfile_in(folder);
    let mut file =
        named.with_context(|| format!("making a file in {}; choose --folder", folder.display()))?;
    let mut body = vec![0; size as usize];
    for object in 0..objects {
        if stop.load(Ordering::Relaxed) {
            bail!("stopped by a signal");
        }
        content(object).fill(0, &mut body);
        file.write_all(&body)
            .with_context(|| format!("writing {} bytes in {}", size * objects, folder.display()))?;
    }
    file.as_file().sync_all().context("writing the file")?;
    Ok(file)
}

/// One state and size, all runtimes: each server is started once and idle while others are asked.
fn cell_group(
    plan: &Plan,
    state: State,
    size: u64,
    objects: u64,
    file: Option<&Path>,
    stop: &AtomicBool,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<Cell>> {
    let logs = tempfile::tempdir().context("making a folder")?;
    let mut servers = Vec::new();
    for runtime in &plan.runtimes {
        let what = format!("{}, {}, {}", state.word(), size_text(size), runtime.word());
        let mut command = Command::new(&plan.program);
        command.args(["engines-serve", "--runtime", &runtime.flag()]).stdout(Stdio::piped());
        command.arg("--size").arg(size.to_string()).arg("--objects").arg(objects.to_string());
        command.arg("--connections").arg(plan.connections.to_string());
        command.arg("--cpu").arg(plan.cores.0.to_string());
        if let Some(file) = file {
            command.arg("--file").arg(file);
        }
        let log = logs.path().join(runtime.flag());
        // From this thread, with which it ends.
        let mut running = Running::start("forebay-bench", &mut command, &log).context(what.clone())?;
        let url = running.first_line()?;
        let server =
            Server { running, target: Target::parse(&url).map_err(anyhow::Error::msg)?, size, objects };
        // Each body once, in order.
        server.asked(plan, 0, objects, Verify::Full, stop).with_context(|| format!("verifying {what}"))?;
        let seconds = plan.block.as_secs_f64();
        let trial = server.asked(plan, 0, plan.connections as u64 * 4, Verify::Length, stop)?;
        let counted = |block: &Block, seconds: f64| {
            let rate = block.transfer_window.qps().unwrap_or(1.0);
            (rate * seconds).ceil().max(plan.connections as f64) as u64
        };
        let trial = server.asked(plan, 0, counted(&trial, seconds / TRIAL_SHARE), Verify::Length, stop)?;
        servers.push((server, counted(&trial, seconds)));
        say(&format!("{what}: every byte verified"));
    }
    let mut cells: Vec<Cell> = plan
        .runtimes
        .iter()
        .map(|runtime| Cell { state, size, runtime: *runtime, blocks: Vec::new() })
        .collect();
    let mut first = 0;
    for round in 0..plan.rounds {
        let mut order: Vec<usize> = (0..cells.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for place in order {
            let (server, count) = &servers[place];
            let before = (usage_of(server.running.id()).cpu_s, core_busy_seconds(plan.cores.0));
            // Other objects every time, and for each: what answers last may have been warmed below by the first.
            first += *count;
            let block = server.asked(plan, first, *count, Verify::Length, stop)?;
            let after = (usage_of(server.running.id()).cpu_s, core_busy_seconds(plan.cores.0));
            cells[place].blocks.push(Measured {
                block,
                server_cpu_s: Some(after.0 - before.0),
                server_core_s: after.1.zip(before.1).map(|(after, before)| after - before),
            });
        }
    }
    Ok(cells)
}

struct Server {
    running: Running,
    target: Target,
    size: u64,
    objects: u64,
}

impl Server {
    /// A block in which nothing went wrong.
    fn asked(&self, plan: &Plan, first: u64, count: u64, verify: Verify, stop: &AtomicBool) -> Result<Block> {
        let job = Job {
            target: &self.target,
            content_bucket: BUCKET,
            prefix: PREFIX,
            objects: self.objects,
            first,
            is_drawn: verify == Verify::Length,
            count,
            size: self.size,
            version: 1,
            concurrency: plan.connections,
            verify,
            part: Part::Whole,
            // Or the client would be what is measured.
            discard: verify == Verify::Length,
            needs_etag: false,
            headers: b"",
            signatures: None,
            timeout: TIMEOUT,
        };
        let asked = run_lanes(&job, &mut EtagLedger::default(), stop);
        let block = asked.with_context(|| format!("asking. {}", self.running.last_words()))?;
        if block.ops != job.count || block.verify_failures > 0 {
            let first = block.failures.first().cloned().or_else(|| block.errors.keys().next().cloned());
            bail!("{} of {} answers were right: {}", block.ops, job.count, first.unwrap_or_default());
        }
        Ok(block)
    }
}

impl Comparison {
    /// For people.
    pub fn text(&self) -> String {
        let Plan { connections, block, rounds, cores, hot_bytes, drive_bytes, .. } = &self.plan;
        let environment = &self.environment;
        let mut out = format!(
            "RUNTIMES: {}, kernel {}; servers on core {}, client on core {}; {connections} connections, {rounds} blocks of \
             {:.1} s each; {} in memory, {} on the drive, drawn\n",
            environment.cpu_model.as_deref().unwrap_or("unknown processor"),
            environment.kernel.as_deref().unwrap_or("?"),
            cores.0,
            cores.1,
            block.as_secs_f64(),
            size_text(*hot_bytes),
            size_text(*drive_bytes),
        );
        let _ = writeln!(out, "{:<6}{:>15}  {:<16}{HEADINGS}", "state", "size", "runtime");
        for cell in &self.cells {
            let figures = Figures::of(&cell.blocks);
            let size = size_text(cell.size);
            let _ = writeln!(out, "{:<6}{size:>15}  {:<16}{figures}", cell.state.word(), cell.runtime.word());
        }
        out.push_str(
            "medians of the blocks, percentiles of all; srv: the server's process, core: all that its core did; busy: share \
             of its core that the client used.\nNo sums, no table, no policy: what is compared is the runtime. Loopback is no \
             network, and shows nothing of NICs or SEND_ZC.\n",
        );
        out
    }

    /// For programs: the plan, the machine, every block.
    pub fn to_json(&self) -> Value {
        let cells = self.cells.iter().map(|cell| {
            let blocks: Vec<Value> = cell.blocks.iter().map(Measured::to_json).collect();
            json!({
                "state": cell.state.word(),
                "size": cell.size,
                "runtime": cell.runtime.word(),
                "blocks": blocks,
            })
        });
        json!({
            "schema": "forebay-bench engines 1",
            "connections": self.plan.connections,
            "hot_bytes": self.plan.hot_bytes,
            "drive_bytes": self.plan.drive_bytes,
            "server_core": self.plan.cores.0,
            "client_core": self.plan.cores.1,
            "environment": self.environment.to_json(),
            "cells": cells.collect::<Vec<_>>(),
        })
    }
}
