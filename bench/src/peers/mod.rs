//! A node beside other servers: the same objects, each server alone on one core, this client on another.
//!
//! ```text
//!  origin (emulator, no delays) ──► caches                 files ──► file servers
//!
//!  for each cell: node started, warmed, every byte verified
//!    for each peer: its ways tried alone, the best of them chosen, warmed, every byte verified
//!      pairs of blocks A B, B A, A B, …: their number fixed beforehand, every block kept
//! ```
//!
//! Where the objects are in memory or on a drive the origin is not asked once in a measured block; where they are
//! neither, it is asked for each. A block in which that was not so, or in which an answer was not whole, ends the run.
//! In measured blocks the kernel drops the bodies on the client's side (`MSG_TRUNC`), unless asked otherwise, so that the
//! server is the limit: they were verified before, or, of objects that are asked for once, others like them.
//!
//! Beside a drive the node is also compared with fio, which reads the very file that the node reads, at the same depth, and
//! serves nobody.
#![forbid(unsafe_code)]

mod cells;
mod fio;
pub mod network;
mod report;
mod servers;

pub use cells::{CELLS, Cell, State};
pub use servers::Peer;

use crate::children::Running;
use crate::client::Verify;
use crate::client::lanes::{EtagLedger, Job, Part, run as run_lanes};
use crate::client::plain::OriginDoor;
use crate::environment::Environment;
use crate::origin::catalog::object_name;
use crate::processors::{core_busy_seconds, pin, usage_of};
use crate::recorder::{Block, CacheAnswer};
use crate::statistics::median_of;
use anyhow::{Context, Result, bail, ensure};
use cells::{BUCKET, READY, sets};
use report::Ratios;
use servers::{Kind, Server, start};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Passes after which a cache must not ask the origin any more.
const WARM_PASSES_MAX: u32 = 5;
/// Blocks by which a way of a peer is judged.
const TRIAL_BLOCKS: usize = 3;
/// Of a block's length, what is measured to find its number of requests.
const RATE_SHARE: f64 = 5.0;
const TIMEOUT: Duration = Duration::from_mins(1);
/// Of a set on a drive, the part of the answers that may come from elsewhere: memory holds an eighth of it.
const NOT_FROM_DRIVE_MAX: f64 = 0.25;

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
    /// What the kernel has read from devices for the server, and what a node says it has read, bytes.
    device_bytes: (u64, Option<u64>),
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
    memory_bytes: (u64, Option<u64>),
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
        format!("/{}/{}", self.bucket, object_name(&READY.prefix(), 0))
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
    let sets = sets(&plan.cells);
    door.declare(&sets.iter().map(Cell::dataset).collect::<Vec<_>>()).context("declaring the objects")?;
    let room = Room {
        files: folder.join("files"),
        folder,
        bucket: BUCKET,
        origin_url,
        server_core: plan.cores.0,
        node: plan.node.clone(),
        engine: plan.engine.clone(),
        stop,
    };
    for cell in sets.iter().filter(|cell| cell.state != State::Miss) {
        told(&format!("writing {} files of {} bytes", cell.objects, cell.size));
        cell.write_files(&room.files)?;
    }
    pin(plan.cores.1)?;
    let mut bed = Bed { plan, room: &room, door, told, asked_before: 0 };
    let mut compared = Vec::new();
    let mut pages = None;
    for cell in &plan.cells {
        (bed.told)(&format!("{}: warming the node", cell.name));
        let node = start(Kind::Node, cell, &room)?;
        bed.warm(cell, &node)?;
        for peer in plan.peers.iter().filter(|peer| peer.is_in(cell)) {
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

/// Whom the node's blocks alternate with.
enum Beside {
    Server(Box<Server>),
    Fio(fio::Reader),
}

struct Bed<'a> {
    plan: &'a Plan,
    room: &'a Room<'a>,
    door: OriginDoor,
    told: &'a mut dyn FnMut(&str),
    /// Requests so far, where each must be another.
    asked_before: u64,
}

impl Bed<'_> {
    fn pairs(&mut self, cell: &Cell, peer: Peer, node: &Server) -> Result<Pairs, Trouble> {
        let trouble = |error| Trouble::Peer(format!("{error:#}"));
        let mut tried = Vec::new();
        let mut best: Option<(f64, Server)> = None;
        let mut failed = None;
        let kinds = peer.kinds(cell);
        for kind in &kinds {
            (self.told)(&format!("{}: trying {}", cell.name, kind.word()));
            match self.trial(cell, *kind) {
                Ok((cost, server)) => {
                    tried.push((kind.word(), cost));
                    if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                        best = Some((cost, server));
                    }
                }
                Err(error) if self.room.stop.load(Ordering::Relaxed) => return Err(Trouble::Fatal(error)),
                Err(error) => {
                    (self.told)(&format!("{}: {error:#}", cell.name));
                    failed = Some(error);
                }
            }
        }
        if let (None, Some(error)) = (&best, failed) {
            return Err(trouble(error));
        }
        let beside = match best {
            Some((_, server)) => Beside::Server(Box::new(server)),
            None => Beside::Fio(fio::Reader::new(cell, node, self.room).map_err(trouble)?),
        };
        let way = match &beside {
            Beside::Server(server) => server.kind.word(),
            Beside::Fio(_) => "fio, io_uring".to_owned(),
        };
        (self.told)(&format!("{}: {} pairs with {way}", cell.name, self.plan.pairs));
        let mut blocks = Vec::new();
        for pair in 0..self.plan.pairs {
            let theirs = |bed: &mut Self| {
                let block = match &beside {
                    Beside::Server(server) => bed.block(cell, server),
                    Beside::Fio(fio) => fio.block(bed.plan.block),
                };
                block.map_err(trouble)
            };
            blocks.push(if pair % 2 == 0 {
                let ours = self.block(cell, node)?;
                (ours, theirs(self)?)
            } else {
                let theirs = theirs(self)?;
                (self.block(cell, node)?, theirs)
            });
        }
        let memory = |process| usage_of(process).memory_bytes;
        let memory_bytes = match &beside {
            Beside::Server(server) => (memory(node.running.id()), Some(memory(server.running.id()))),
            Beside::Fio(_) => (memory(node.running.id()), None),
        };
        Ok(Pairs { way, tried, ratios: Ratios::of(&blocks), blocks, memory_bytes })
    }

    /// One way of a peer, warmed, and what it costs, CPU-s/GB.
    fn trial(&mut self, cell: &Cell, kind: Kind) -> Result<(f64, Server)> {
        let server = start(kind, cell, self.room)?;
        self.warm(cell, &server)?;
        let mut costs = Vec::new();
        for _ in 0..TRIAL_BLOCKS {
            let measured = self.block(cell, &server)?;
            costs.push(measured.cpu_s_per_gb().context("a block without bytes")?);
            if cell.state == State::Drive && measured.device_ratio() < Some(1.0 - NOT_FROM_DRIVE_MAX) {
                bail!("{}: the kernel's cache answers, not a drive", kind.word());
            }
        }
        Ok((median_of(costs.into_iter()).context("a trial without blocks")?, server))
    }

    /// Reads until the origin is not asked any more, and verifies every byte of what is then asked for.
    fn warm(&mut self, cell: &Cell, server: &Server) -> Result<()> {
        let once = 2 * cell.connections as u64;
        if cell.state == State::Miss {
            return self.asked(cell, server, once, Verify::Full).map(drop);
        }
        // Each object once, whole or piece by piece: what a range cache keeps is then there whatever is asked.
        let whole = Cell { part: Part::Whole, connections: cell.connections.min(8), ..*cell };
        self.asked_in_turn(&whole, server, cell.objects)?;
        for _ in 0..WARM_PASSES_MAX {
            let before = self.door.stats()?.counts.requests;
            match cell.state {
                // What memory gives up has reached the drive, or comes again.
                State::Drive => self.asked_in_turn(&whole, server, cell.objects)?,
                _ => self.asked(cell, server, 2 * cell.objects.max(once), Verify::Full)?,
            };
            if self.door.stats()?.counts.requests == before {
                return self.asked(cell, server, once, Verify::Full).map(drop);
            }
        }
        bail!("{} still asks the origin after {WARM_PASSES_MAX} passes", server.kind.word())
    }

    fn block(&mut self, cell: &Cell, server: &Server) -> Result<Measured> {
        let seconds = self.plan.block.as_secs_f64();
        let least = 2 * cell.connections as u64;
        let mut rate_of = |count| {
            let block = self.asked(cell, server, count, Verify::Length)?;
            Ok::<_, anyhow::Error>(block.transfer_window.qps().unwrap_or(1.0))
        };
        let counted = |rate: f64, seconds: f64| ((rate * seconds).ceil() as u64).max(least);
        let first_rate = rate_of(least)?;
        let rate = rate_of(counted(first_rate, seconds / RATE_SHARE))?;
        let look = || {
            let (usage, busy) = (usage_of(server.running.id()), core_busy_seconds(self.room.server_core));
            Ok::<_, anyhow::Error>((usage, busy, server.drive_read_bytes()?))
        };
        let requests_before = self.door.stats()?.counts.requests;
        let before = look()?;
        let count = counted(rate, seconds);
        let block = self.asked(cell, server, count, Verify::Length)?;
        let after = look()?;
        let asked = self.door.stats()?.counts.requests - requests_before;
        let name = server.kind.word();
        match cell.state {
            State::Miss => {
                ensure!(asked >= count, "{name}: only {asked} of {count} objects came from the origin");
            }
            _ => ensure!(asked == 0, "{name}: {asked} requests reached the origin in a warm block"),
        }
        if server.kind == Kind::Node {
            let from = |answer| block.cache_count(answer);
            let ram = from(CacheAnswer::Ram);
            match cell.state {
                State::Hot => {
                    ensure!(
                        ram == block.ops,
                        "only {ram} of {} answers came from the node's memory",
                        block.ops
                    );
                }
                State::Drive => ensure!(
                    (ram as f64) < NOT_FROM_DRIVE_MAX * block.ops as f64,
                    "{ram} of {} answers came from the node's memory, not from its drive",
                    block.ops
                ),
                State::Miss => {}
            }
        }
        Ok(Measured {
            block,
            cpu_s: after.0.cpu_s - before.0.cpu_s,
            core_s: after.1.zip(before.1).map(|(after, before)| after - before),
            device_bytes: (
                after.0.device_read_bytes.saturating_sub(before.0.device_read_bytes),
                after.2.zip(before.2).map(|(after, before)| after - before),
            ),
        })
    }

    /// A block in which nothing went wrong, every byte of it verified, and each object asked for in its turn.
    fn asked_in_turn(&mut self, cell: &Cell, server: &Server, count: u64) -> Result<Block> {
        self.asked_from(0, false, cell, server, count, Verify::Full)
    }

    /// A block in which nothing went wrong. From a drive objects are drawn: one after the other, those that are in memory
    /// would come one after the other too.
    fn asked(&mut self, cell: &Cell, server: &Server, count: u64, verify: Verify) -> Result<Block> {
        // What was asked for before would be in memory now.
        let first = if cell.state == State::Hot { 0 } else { self.asked_before };
        self.asked_before += count;
        self.asked_from(first, cell.state == State::Drive, cell, server, count, verify)
    }

    fn asked_from(
        &self,
        first: u64,
        is_drawn: bool,
        cell: &Cell,
        server: &Server,
        count: u64,
        verify: Verify,
    ) -> Result<Block> {
        let part = match cell.part {
            Part::Whole if server.ranges_only => Part::Aligned(cell.size),
            part => part,
        };
        let job = Job {
            target: &server.target,
            content_bucket: BUCKET,
            prefix: &cell.prefix(),
            objects: cell.objects,
            first,
            is_drawn,
            count,
            size: cell.size,
            version: 1,
            concurrency: cell.connections,
            verify,
            part,
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

    /// Bytes read from devices per byte served, the larger of what the kernel and what the server says.
    fn device_ratio(&self) -> Option<f64> {
        let (kernel, own) = self.device_bytes;
        Some(kernel.max(own.unwrap_or(0)) as f64 / 1e9 / self.gigabytes()?)
    }

    fn gb_s(&self) -> Option<f64> {
        Some(self.gigabytes()? / Some(self.block.transfer_window.seconds).filter(|seconds| *seconds > 0.0)?)
    }
}

/// Servers that give up root's rights read it too.
fn readable(folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).context("opening the folder to servers")
}
