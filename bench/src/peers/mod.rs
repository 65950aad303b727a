//! A node beside other servers: the same objects, hot in memory, each server alone on one core, this client on another.
//!
//! ```text
//!  origin (emulator, no delays) ──► caches                 files ──► file servers
//!
//!  for each cell: node started, warmed, every byte verified
//!    for each peer: its ways tried alone, the best of them chosen, warmed, every byte verified
//!      pairs of blocks A B, B A, A B, …: their number fixed beforehand, every block kept
//! ```
//!
//! Warm means that the origin is not asked once in a measured block; a block in which it was, or in which an answer
//! was not whole, ends the run. In measured blocks the kernel drops the bodies on the client's side (`MSG_TRUNC`), unless
//! asked otherwise, so that the server is the limit: they were verified before.
#![forbid(unsafe_code)]

pub mod network;
mod report;
mod servers;

pub use servers::Peer;

use crate::children::Running;
use crate::client::Verify;
use crate::client::lanes::{EtagLedger, Job, run as run_lanes};
use crate::client::plain::OriginDoor;
use crate::content::Content;
use crate::environment::Environment;
use crate::origin::catalog::{Dataset, object_name};
use crate::origin::model::Class;
use crate::processors::{Usage, core_busy_seconds, pin, usage_of};
use crate::recorder::{Block, CacheAnswer};
use anyhow::{Context, Result, bail, ensure};
use report::Ratios;
use servers::{Kind, Server, start};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The bucket that all servers serve.
const BUCKET: &str = "peers";
/// Passes after which a cache must not ask the origin any more.
const WARM_PASSES_MAX: u32 = 5;
/// Blocks by which a way of a peer is judged.
const TRIAL_BLOCKS: usize = 3;
/// Of a block's length, what is measured to find its number of requests.
const RATE_SHARE: f64 = 5.0;
const TIMEOUT: Duration = Duration::from_mins(1);
/// Written at a time.
const WRITE_BYTES: usize = 1 << 20;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// How it is named on the command line and in reports.
    pub name: &'static str,
    /// Bytes of each object.
    pub size: u64,
    /// How many there are.
    pub objects: u64,
    /// Bytes of the ranges that are asked for; `None` asks for whole objects.
    pub range: Option<u64>,
    /// Connections, each with one request under way.
    pub connections: usize,
}

/// All cells. Each set is some 250 MB: beyond what any processor caches, and soon verified.
pub const CELLS: [Cell; 6] = [
    Cell { name: "100KB", size: 100_000, objects: 2500, range: None, connections: 32 },
    Cell { name: "1MiB", size: 1 << 20, objects: 250, range: None, connections: 32 },
    Cell { name: "10MB", size: 10_000_000, objects: 25, range: None, connections: 8 },
    Cell { name: "100MB", size: 100_000_000, objects: 3, range: None, connections: 4 },
    Cell { name: "64KiB-ranges", size: 100_000_000, objects: 3, range: Some(64 << 10), connections: 32 },
    Cell { name: "1MiB-ranges", size: 100_000_000, objects: 3, range: Some(1 << 20), connections: 32 },
];

/// What a server is asked for until it answers.
const READY: Cell = Cell { name: "ready", size: 1, objects: 1, range: None, connections: 1 };

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In this order.
    pub cells: Vec<Cell>,
    /// With whom, in this order.
    pub peers: Vec<Peer>,
    /// Pairs of blocks of each comparison.
    pub pairs: u32,
    /// About how long a block takes; its requests are counted beforehand.
    pub block: Duration,
    /// Where servers run, and where the client; two cores.
    pub cores: (usize, usize),
    /// `forebay-node`.
    pub node: PathBuf,
    /// The node's `--engine`.
    pub engine: String,
    /// Whether the client copies bodies instead of letting the kernel drop them.
    pub copies: bool,
    /// Where files and caches go, in a folder that is removed.
    pub folder: PathBuf,
}

/// One block.
#[derive(Clone, Debug)]
struct Measured {
    block: Block,
    cpu_s: f64,
    core_s: Option<f64>,
}

/// The node and a peer in one cell.
#[derive(Clone, Debug)]
struct Compared {
    cell: Cell,
    peer: Peer,
    /// What could not be compared, and why.
    outcome: Result<Pairs, String>,
}

#[derive(Clone, Debug)]
struct Pairs {
    /// The peer's way, and what its ways cost when they were tried, CPU-s/GB.
    way: String,
    tried: Vec<(String, f64)>,
    /// The node's block and the peer's, in the order of the pairs; in every other one the peer's came first.
    blocks: Vec<(Measured, Measured)>,
    ratios: Ratios,
    memory_bytes: (u64, u64),
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Comparison {
    plan: Plan,
    environment: Environment,
    congestion: String,
    /// Whether the network was one of the comparison's own.
    is_own_network: bool,
    /// The node's pages of 2 MiB that are one huge page each, and all of them.
    pages: Option<(u64, u64)>,
    compared: Vec<Compared>,
}

/// What servers are started with.
struct Room<'a> {
    folder: PathBuf,
    files: PathBuf,
    bucket: &'static str,
    origin_url: String,
    cache_bytes: u64,
    server_core: usize,
    node: PathBuf,
    engine: String,
    stop: &'a AtomicBool,
}

impl Room<'_> {
    /// `host:port`.
    fn origin_address(&self) -> &str {
        self.origin_url.strip_prefix("http://").unwrap_or(&self.origin_url)
    }

    /// The path of a small object that is there.
    fn ready_path(&self) -> String {
        format!("/{}/{}", self.bucket, object_name(&prefix(&READY), 0))
    }
}

/// Measures, on the calling thread, which stays pinned to the client's core. `told` is given a line for each step.
///
/// # Errors
/// No node or origin, no room on the disk, a signal; or a measured block in which something was wrong. A peer that is not
/// installed or does not start is a row that says so.
pub fn compare(plan: &Plan, stop: &AtomicBool, told: &mut dyn FnMut(&str)) -> Result<Comparison> {
    let environment = Environment::look();
    let temporary = tempfile::Builder::new()
        .prefix("forebay-peers-")
        .tempdir_in(&plan.folder)
        .with_context(|| format!("making a folder in {}", plan.folder.display()))?;
    let folder = temporary.path().to_path_buf();
    readable(&folder)?;
    let own_program = std::env::current_exe().context("finding out where this program is")?;
    let mut command = Command::new(own_program);
    command.args(["origin", "--listen", "127.0.0.1:0", "--profile", "raw", "--exit-with-parent", "--cpu"]);
    command.arg(plan.cores.1.to_string()).stdout(Stdio::piped());
    let mut origin = Running::start("the origin emulator", &mut command, &folder.join("origin.log"))?;
    let origin_url = origin.first_line()?;
    let door = OriginDoor::parse(&origin_url).map_err(anyhow::Error::msg)?;
    let mut sets: Vec<Cell> = plan.cells.clone();
    sets.push(READY);
    sets.sort_by_key(|cell| cell.size);
    sets.dedup_by_key(|cell| cell.size);
    door.declare(&sets.iter().map(dataset).collect::<Vec<_>>()).context("declaring the objects")?;
    let room = Room {
        files: folder.join("files"),
        folder,
        bucket: BUCKET,
        origin_url,
        // Twice the largest set, and what a server needs beside it.
        cache_bytes: (2 * sets.iter().map(|cell| cell.size * cell.objects).max().unwrap_or(0)).max(1 << 30),
        server_core: plan.cores.0,
        node: plan.node.clone(),
        engine: plan.engine.clone(),
        stop,
    };
    for cell in &sets {
        told(&format!("writing {} files of {} bytes", cell.objects, cell.size));
        write_files(&room.files, cell)?;
    }
    pin(plan.cores.1)?;
    let mut bed = Bed { plan, room: &room, door, told };
    let mut compared = Vec::new();
    let mut pages = None;
    for cell in &plan.cells {
        (bed.told)(&format!("{}: warming the node", cell.name));
        let node = start(Kind::Node, cell, &room)?;
        bed.warm(cell, &node)?;
        for peer in &plan.peers {
            let outcome = match bed.pairs(cell, *peer, &node) {
                Ok(pairs) => Ok(pairs),
                Err(Trouble::Peer(why)) => {
                    (bed.told)(&format!("{}: {}: {why}", cell.name, peer.word()));
                    Err(why)
                }
                Err(Trouble::Fatal(error)) => return Err(error),
            };
            compared.push(Compared { cell: *cell, peer: *peer, outcome });
        }
        pages = node.pages()?.into_iter().chain(pages).min();
    }
    Ok(Comparison {
        plan: plan.clone(),
        environment,
        congestion: network::congestion(),
        is_own_network: network::is_own(),
        pages,
        compared,
    })
}

/// What ends a comparison: of one peer, or of all.
enum Trouble {
    Peer(String),
    Fatal(anyhow::Error),
}

impl From<anyhow::Error> for Trouble {
    fn from(error: anyhow::Error) -> Self {
        Self::Fatal(error)
    }
}

struct Bed<'a> {
    plan: &'a Plan,
    room: &'a Room<'a>,
    door: OriginDoor,
    told: &'a mut dyn FnMut(&str),
}

impl Bed<'_> {
    fn pairs(&mut self, cell: &Cell, peer: Peer, node: &Server) -> Result<Pairs, Trouble> {
        let mut tried = Vec::new();
        let mut best: Option<(f64, Server)> = None;
        for kind in peer.kinds(cell) {
            (self.told)(&format!("{}: trying {}", cell.name, kind.word()));
            let server = start(kind, cell, self.room).map_err(|error| Trouble::Peer(format!("{error:#}")))?;
            self.warm(cell, &server).map_err(|error| Trouble::Peer(format!("{error:#}")))?;
            let mut costs = Vec::new();
            for _ in 0..TRIAL_BLOCKS {
                let measured = self.block(cell, &server)?;
                costs.push(measured.cpu_s_per_gb().context("a block without bytes")?);
            }
            costs.sort_by(f64::total_cmp);
            let cost = costs[costs.len() / 2];
            tried.push((kind.word(), cost));
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, server));
            }
        }
        let Some((_, server)) = best else {
            return Err(Trouble::Peer("it has no way to serve this".to_owned()));
        };
        (self.told)(&format!("{}: {} pairs with {}", cell.name, self.plan.pairs, server.kind.word()));
        let mut blocks = Vec::new();
        for pair in 0..self.plan.pairs {
            let (ours, theirs);
            if pair % 2 == 0 {
                ours = self.block(cell, node)?;
                theirs = self.block(cell, &server)?;
            } else {
                theirs = self.block(cell, &server)?;
                ours = self.block(cell, node)?;
            }
            blocks.push((ours, theirs));
        }
        let memory_bytes =
            (usage_of(node.running.id()).memory_bytes, usage_of(server.running.id()).memory_bytes);
        Ok(Pairs { way: server.kind.word(), tried, ratios: Ratios::of(&blocks), blocks, memory_bytes })
    }

    /// Reads until the origin is not asked any more, and verifies every byte of what is then asked for.
    fn warm(&self, cell: &Cell, server: &Server) -> Result<()> {
        // Each object once, whole or piece by piece: what a range cache keeps is then there whatever is asked.
        let whole = Cell { range: None, connections: cell.connections.min(8), ..*cell };
        self.asked(&whole, server, cell.objects, Verify::Full)?;
        for _ in 0..WARM_PASSES_MAX {
            let before = self.door.stats()?.counts.requests;
            let count = 2 * cell.objects.max(cell.connections as u64);
            self.asked(cell, server, count, Verify::Full)?;
            if self.door.stats()?.counts.requests == before {
                return Ok(());
            }
        }
        bail!("{} still asks the origin after {WARM_PASSES_MAX} passes", server.kind.word())
    }

    fn block(&self, cell: &Cell, server: &Server) -> Result<Measured> {
        let seconds = self.plan.block.as_secs_f64();
        let least = 2 * cell.connections as u64;
        let rate_of = |count| {
            let block = self.asked(cell, server, count, Verify::Length)?;
            Ok::<_, anyhow::Error>(block.transfer_window.qps().unwrap_or(1.0))
        };
        let counted = |rate: f64, seconds: f64| ((rate * seconds).ceil() as u64).max(least);
        let rate = rate_of(counted(rate_of(least)?, seconds / RATE_SHARE))?;
        let requests_before = self.door.stats()?.counts.requests;
        let before = (usage_of(server.running.id()), core_busy_seconds(self.room.server_core));
        let block = self.asked(cell, server, counted(rate, seconds), Verify::Length)?;
        let after = (usage_of(server.running.id()), core_busy_seconds(self.room.server_core));
        let asked = self.door.stats()?.counts.requests - requests_before;
        ensure!(asked == 0, "{}: {asked} requests reached the origin in a warm block", server.kind.word());
        if server.kind == Kind::Node {
            let ram = block.cache_count(CacheAnswer::Ram);
            ensure!(ram == block.ops, "only {ram} of {} answers came from the node's memory", block.ops);
        }
        let Usage { cpu_s, .. } = after.0;
        Ok(Measured {
            block,
            cpu_s: cpu_s - before.0.cpu_s,
            core_s: after.1.zip(before.1).map(|(after, before)| after - before),
        })
    }

    /// A block in which nothing went wrong.
    fn asked(&self, cell: &Cell, server: &Server, count: u64, verify: Verify) -> Result<Block> {
        let job = Job {
            target: &server.target,
            content_bucket: BUCKET,
            prefix: &prefix(cell),
            objects: cell.objects,
            count,
            size: cell.size,
            version: 1,
            concurrency: cell.connections,
            verify,
            range: cell.range.or(server.ranges_only.then_some(cell.size)),
            discard: verify == Verify::Length && !self.plan.copies,
            needs_etag: !server.ranges_only,
            headers: &server.headers,
            signatures: None,
            timeout: TIMEOUT,
        };
        let name = server.kind.word();
        let block = run_lanes(&job, &mut EtagLedger::default(), self.room.stop)
            .with_context(|| format!("asking {name}"))?;
        if block.ops != count {
            let first = block.failures.first().cloned().or_else(|| block.errors.keys().next().cloned());
            bail!(
                "{name}: {} of {count} answers were whole and right: {}",
                block.ops,
                first.unwrap_or_default()
            );
        }
        Ok(block)
    }
}

impl Measured {
    fn gigabytes(&self) -> Option<f64> {
        Some(self.block.bytes as f64 / 1e9).filter(|gigabytes| *gigabytes > 0.0)
    }

    fn cpu_s_per_gb(&self) -> Option<f64> {
        Some(self.cpu_s / self.gigabytes()?)
    }

    fn core_s_per_gb(&self) -> Option<f64> {
        Some(self.core_s? / self.gigabytes()?)
    }

    fn gb_s(&self) -> Option<f64> {
        Some(self.gigabytes()? / Some(self.block.transfer_window.seconds).filter(|seconds| *seconds > 0.0)?)
    }
}

/// Objects of one size have one set, whatever is asked of it.
fn prefix(cell: &Cell) -> String {
    format!("{}/", cell.size)
}

fn dataset(cell: &Cell) -> Dataset {
    Dataset {
        bucket: BUCKET.to_owned(),
        prefix: prefix(cell),
        count: cell.objects,
        size: cell.size,
        class: Class::Hot,
        version: 1,
    }
}

/// The same bytes as the origin's, for those who serve files.
fn write_files(files: &Path, cell: &Cell) -> Result<()> {
    let folder = files.join(BUCKET).join(prefix(cell));
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let mut buffer = vec![0; WRITE_BYTES];
    for number in 0..cell.objects {
        let key = object_name(&prefix(cell), number);
        let path = files.join(BUCKET).join(&key);
        let content = Content::new(format!("{BUCKET}/{key}").as_bytes(), 1);
        let written = (|| {
            let mut file = fs::File::create(&path)?;
            let mut at = 0;
            while at < cell.size {
                let length = (cell.size - at).min(WRITE_BYTES as u64) as usize;
                content.fill(at, &mut buffer[..length]);
                file.write_all(&buffer[..length])?;
                at += length as u64;
            }
            Ok::<_, std::io::Error>(())
        })();
        written.with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Servers that give up root's rights read it too.
fn readable(folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).context("opening the folder to servers")
}
