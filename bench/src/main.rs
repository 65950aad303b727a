//! The front door: commands to modules, outcomes to exit codes.
//!
//! Exit codes: 0 sound, 1 errors, 2 usage, 3 a wrong byte, 4 the run proves nothing, or a row of `peers` is lost.

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand, ValueEnum as _};
use forebay_bench::ceilings::net::{self, Plan};
#[cfg(feature = "engines")]
use forebay_bench::ceilings::{disk, engines};
use forebay_bench::children::sibling;
use forebay_bench::client::plain::OriginDoor;
use forebay_bench::client::signing::KeySigner;
use forebay_bench::client::{Target, Verify};
use forebay_bench::demo::{DemoArgs, demo, timestamp, write_json};
use forebay_bench::environment::Environment;
use forebay_bench::origin::answer::Origin;
use forebay_bench::origin::catalog::Dataset;
use forebay_bench::origin::model::{Class, Profile};
use forebay_bench::origin::server::Server;
use forebay_bench::own_data::{TryArgs, try_own_data};
use forebay_bench::peers::{self, CELLS, Cell, Peer, State};
use forebay_bench::report::{Run, text};
use forebay_bench::run::{CacheState, Setup, run};
use forebay_bench::stop;
use forebay_bench::units::{Scale, parse_duration, parse_size};
use forebay_bench::workloads::{Changes, Row, Workload};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The honest stopwatch of Forebay: an origin emulator, the document's workloads, a demo, and your own data.
///
/// Exit codes: 0 sound; 1 I/O or HTTP errors; 2 usage; 3 a byte failed verification; 4 the run proves nothing
/// (not warm, client-bound, emulator late), or a row of `peers` does not hold what it must.
#[derive(Parser)]
#[command(version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve an emulated S3 store with generated content and written-down delays
    Origin(OriginArgs),
    /// "Bulk data operations": many objects of 100 KiB, three at once
    Bulk(WorkloadArgs),
    /// "Measuring response latency during downloads": one object of 10 MiB, again and again
    Download(WorkloadArgs),
    /// Both workloads in the document's order, one report
    All(RunArgs),
    /// Emulator, control plane and node on this machine, both tables, in about two minutes
    Demo(DemoArgs),
    /// Your own objects: direct, cold and warm through a node, compared
    Try(TryArgs),
    /// The most that this machine's loopback and this client allow, whoever serves
    Net(NetArgs),
    /// The most that a drive gives to one thread, by random direct reads through the node's engines
    #[cfg(feature = "engines")]
    Disk(DiskArgs),
    /// The most that a drive gives; not in this build (feature `engines`)
    #[cfg(not(feature = "engines"))]
    Disk(NotBuilt),
    /// The node's ring beside tokio-uring and glommio: the same answers from memory and from a drive
    #[cfg(feature = "engines")]
    Engines(EnginesArgs),
    /// The node's ring beside other runtimes; not in this build (feature `engines`)
    #[cfg(not(feature = "engines"))]
    Engines(NotBuilt),
    /// One of its servers
    #[cfg(feature = "engines")]
    #[command(hide = true)]
    EnginesServe(EnginesServeArgs),
    /// A node beside nginx, Varnish, Traffic Server, Caddy, cachey and fio, on this machine
    Peers(PeersArgs),
}

/// Whatever was meant: it is answered with how to get it.
#[cfg(not(feature = "engines"))]
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
struct NotBuilt {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<String>,
}

/// One thread keeps reads under way, into registered memory, as a node does; no sums, no sockets, no file system cache. Nothing
/// is ever written to what is there. Compare `fio --rw=randread --direct=1 --ioengine=io_uring`.
#[cfg(feature = "engines")]
#[derive(clap::Args)]
struct DiskArgs {
    /// A device, or a file on the drive in question
    path: PathBuf,
    /// Make the file first, all of it written; refused if something is there. It stays: remove it yourself
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    make: Option<u64>,
    /// Read only so many bytes from the begin [all]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    span: Option<u64>,
    /// Bytes of the reads: multiples of 4 KiB up to 2 MiB
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_read, default_value = "64KiB,128KiB,1MiB")]
    sizes: Vec<u64>,
    /// Reads under way at a time, 1 to 256
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,16,32", value_parser = clap::value_parser!(u16).range(1..=disk::DEPTH_MAX as i64))]
    depths: Vec<u16>,
    /// Which of the node's engines read
    #[arg(
        long,
        value_name = "READER,...",
        value_delimiter = ',',
        value_enum,
        default_value = "uring,portable"
    )]
    readers: Vec<disk::Reader>,
    /// How long a block takes
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    block: Duration,
    /// Blocks of each size, depth and reader
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The thread's core [the first that this process may use]
    #[arg(long, value_name = "CORE")]
    cpu: Option<usize>,
    /// Write the plan and every block as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A server that does as little as it can in each runtime, on one core, and this client on another: what accept, receive,
/// direct read and send cost in each. No table, no sums. Each server is a process of its own, with its own bodies in memory; for the
/// drive a file is made, and removed afterwards. As root it goes on in a network namespace of its own, in which nobody
/// paces (reno), unless that is the machine's way anyhow.
#[cfg(feature = "engines")]
#[derive(clap::Args)]
struct EnginesArgs {
    /// Who answers
    #[arg(
        long,
        value_name = "RUNTIME,...",
        value_delimiter = ',',
        value_enum,
        default_value = "ours,ours-copied,tokio-uring,glommio"
    )]
    runtimes: Vec<engines::Runtime>,
    /// Where the bodies are
    #[arg(long, value_name = "STATE,...", value_delimiter = ',', value_enum, default_value = "hot,drive")]
    states: Vec<engines::State>,
    /// Bytes of the answers: multiples of 4 KiB up to 2 MiB
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_read, default_value = "64KiB,1MiB")]
    sizes: Vec<u64>,
    /// Bytes of all bodies in the memory of each server; what fits into the processor's caches measures those
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256MiB")]
    hot_set: u64,
    /// Bytes of all bodies on the drive
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "2GiB")]
    drive_set: u64,
    /// Where the file of the drive's bodies goes
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    folder: PathBuf,
    /// Connections, each with one request under way
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    connections: u16,
    /// About how long a block takes
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    block: Duration,
    /// Blocks of each size, state and runtime
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The servers' core [the first that this process may use]
    #[arg(long, value_name = "CORE")]
    server_cpu: Option<usize>,
    /// The client's core [the last]
    #[arg(long, value_name = "CORE")]
    cpu: Option<usize>,
    /// Write the plan and every block as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// No progress on standard error
    #[arg(long, short)]
    quiet: bool,
}

#[cfg(feature = "engines")]
#[derive(clap::Args)]
struct EnginesServeArgs {
    #[arg(long, value_enum)]
    runtime: engines::Runtime,
    #[arg(long)]
    file: Option<PathBuf>,
    #[arg(long)]
    size: u64,
    #[arg(long)]
    objects: u64,
    #[arg(long)]
    connections: usize,
    #[arg(long)]
    cpu: usize,
}

/// Each server alone on one core, this client on another; every byte verified once, then pairs of blocks A B, B A.
/// Servers are found in PATH: `apt-get install nginx varnish gcc trafficserver caddy fio`; `cargo install cachey`, its program
/// `server` renamed to cachey. One that is not there is a row that says so. As root it
/// goes on in a network namespace of its own, in which nobody paces (reno), unless that is the machine's way anyhow. Exit code 4 if a row does not hold what it must.
#[derive(clap::Args)]
struct PeersArgs {
    /// What is asked for [all]; hot, drive and miss stand for all of that kind
    #[arg(long, value_name = "CELL,...", value_delimiter = ',', value_parser = cell_names())]
    cells: Vec<String>,
    /// Whom the node is compared with [all]
    #[arg(long, value_name = "PEER,...", value_delimiter = ',', value_enum)]
    peers: Vec<Peer>,
    /// At most so many objects of each set; a set that fits into the processor's caches, or a drive's into memory, measures those
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    objects_max: Option<u64>,
    /// Pairs of blocks; an interval needs 5
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// About how long a block takes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    block: Duration,
    /// How the node does its I/O: auto, uring or portable
    #[arg(long, default_value = "auto", value_parser = ["auto", "uring", "portable"])]
    engine: String,
    /// Copy bodies in the client, as an application would, instead of letting the kernel drop them
    #[arg(long)]
    copy: bool,
    /// The servers' core [the first that this process may use]
    #[arg(long, value_name = "CORE")]
    server_cpu: Option<usize>,
    /// The client's core [the last]
    #[arg(long, value_name = "CORE")]
    cpu: Option<usize>,
    /// Where files and caches go, 4 GB, and up to 16 GB with drive or miss, removed afterwards; for drive, on the drive in question
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    folder: PathBuf,
    /// Write the plan and every block as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// No progress on standard error
    #[arg(long, short)]
    quiet: bool,
}

/// A server that does nothing but answer, on one core, and this client on another: what is left for a server to lose.
/// Each size both ways in which bytes can be handed to the kernel, copied and by reference (sendfile).
#[derive(clap::Args)]
struct NetArgs {
    /// Bytes of the answers
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, default_value = "100KB,1MiB")]
    sizes: Vec<u64>,
    /// Connections, each with one request under way
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    connections: u16,
    /// About how long a block takes
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    block: Duration,
    /// Blocks of each size and way
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The server's core [the first that this process may use]
    #[arg(long, value_name = "CORE")]
    server_cpu: Option<usize>,
    /// The client's core [the last]
    #[arg(long, value_name = "CORE")]
    cpu: Option<usize>,
    /// Write the plan and every block as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Any signature is accepted, and none: this is a store for measuring and testing, not for keeping secrets.
///
/// Objects are declared, not stored: `--dataset`, or `PUT /_emu/datasets` with a JSON list of bucket, prefix,
/// count, size (bytes), and optionally class (hot, cold) and version. They are named prefix + eight digits.
/// Bodies of PUTs are kept in memory, 64 MiB in all. `GET /_emu/stats`, `POST /_emu/stats/reset`,
/// `PUT /_emu/round` (same round, same draws) and `GET`/`PUT /_emu/profile` show and change the rest.
#[derive(clap::Args)]
struct OriginArgs {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDR")]
    listen: SocketAddr,
    /// Delays: tos-intranet-v1 (fitted to the document's intranet column) or raw (none)
    #[arg(long, default_value = "tos-intranet-v1")]
    profile: String,
    /// Of all draws: the same seed, keys and order give the same delays
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Declare objects: BUCKET/PREFIX,count=N,size=SIZE[,class=cold][,version=N]
    #[arg(long, value_name = "SPEC", value_parser = parse_dataset)]
    dataset: Vec<Dataset>,
    /// Run on this core
    #[arg(long, value_name = "CORE")]
    cpu: Option<usize>,
    #[arg(long, hide = true)]
    exit_with_parent: bool,
}

#[derive(clap::Args)]
struct WorkloadArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Distinct objects [bulk: as many as requests; download: 1]
    #[arg(long, value_name = "N")]
    objects: Option<u64>,
    /// Requests in a block [by --scale]
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Bytes of each object [bulk: 100KiB; download: 10MiB]
    #[arg(long, value_parser = parse_size)]
    size: Option<u64>,
    /// Requests under way at once [bulk: 3; download: 1]
    #[arg(long, value_name = "N")]
    concurrency: Option<usize>,
}

#[derive(clap::Args)]
struct RunArgs {
    /// The store itself: http://host:port/bucket
    #[arg(long, value_name = "URL")]
    direct: String,
    /// The accelerator: http://host:port/bucket
    #[arg(long, value_name = "URL")]
    accel: String,
    /// The emulator's own door, http://host:port: objects are declared and counters read there. Without it the
    /// origin is taken for a real store that already has the objects, with the pattern in them.
    #[arg(long, value_name = "URL")]
    origin_admin: Option<String>,
    /// How much of the document's amount: small, full, or a factor. Never changes speed or concurrency.
    #[arg(long, default_value = "small")]
    scale: Scale,
    /// Pairs of blocks, A B B A; an interval needs 5
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// What is checked of each answer
    #[arg(long, value_enum, default_value = "full")]
    verify: Verify,
    /// Whether the accelerator is warmed first and must then not ask the origin
    #[arg(long, value_enum, default_value = "warm")]
    cache: CacheState,
    /// Sign requests (v4) with the AWS keys of the environment, outside the clock
    #[arg(long, default_value = "none", value_parser = ["none", "v4"])]
    sign: String,
    /// Region that signatures name
    #[arg(long, default_value = "us-east-1")]
    region: String,
    /// The longest a request may take
    #[arg(long, default_value = "30s", value_parser = parse_duration)]
    timeout: Duration,
    /// Of the bootstrap
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Run the client on this core
    #[arg(long, value_name = "CORE")]
    cpu: Option<usize>,
    /// Write the result as JSON; `-` is standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// No progress on standard error
    #[arg(long, short)]
    quiet: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Origin(args) => origin(&args),
        Command::Bulk(args) => measure(&args.run, &[Row::Bulk], changes(&args)),
        Command::Download(args) => measure(&args.run, &[Row::Download], changes(&args)),
        Command::All(args) => measure(&args, &[Row::Bulk, Row::Download], Changes::default()),
        Command::Demo(args) => stop::on_signals().and_then(|stop| demo(&args, stop, argv())),
        Command::Net(args) => net(&args),
        #[cfg(feature = "engines")]
        Command::Disk(args) => read_drive(&args),
        #[cfg(not(feature = "engines"))]
        Command::Disk(_) => Err(usage(
            "disk: this forebay-bench was built without the node's engines: cargo run --release -p forebay-bench --features \
             engines -- disk PATH"
                .to_owned(),
        )),
        #[cfg(feature = "engines")]
        Command::Engines(args) => compare_engines(&args),
        #[cfg(feature = "engines")]
        Command::EnginesServe(args) => serve_engine(&args),
        #[cfg(not(feature = "engines"))]
        Command::Engines(_) => Err(usage(
            "engines: this forebay-bench was built without other runtimes: cargo run --release -p forebay-bench --features \
             engines -- engines"
                .to_owned(),
        )),
        Command::Peers(args) => compare_peers(&args),
        Command::Try(args) => stop::on_signals().and_then(|stop| try_own_data(&args, stop)),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("forebay-bench: {error:#}");
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

/// Ends this process with the one that started it.
fn exit_with_parent() -> Result<()> {
    let signal = Some(rustix::process::Signal::TERM);
    rustix::process::set_parent_process_death_signal(signal).context("tying this process to its parent")
}

fn origin(args: &OriginArgs) -> Result<u8> {
    if args.exit_with_parent {
        exit_with_parent()?;
    }
    pin(args.cpu)?;
    let mut origin = Origin::new(Profile::named(&args.profile).map_err(usage)?, args.seed);
    for dataset in &args.dataset {
        origin.declare(dataset.clone()).map_err(usage)?;
    }
    let stop = stop::on_signals()?;
    let server =
        Server::bind(args.listen, origin).with_context(|| format!("listening on {}", args.listen))?;
    let mut out = std::io::stdout();
    // Read by who started us on port 0; nobody need be reading.
    let _ = writeln!(out, "http://{}", server.local_addr()?).and_then(|()| out.flush());
    server.run(stop).context("serving")?;
    Ok(0)
}

fn measure(args: &RunArgs, rows: &[Row], changes: Changes) -> Result<u8> {
    let workloads = rows.iter().map(|row| Workload::new(*row, args.scale, changes));
    let workloads = workloads.collect::<Result<Vec<_>, _>>().map_err(usage)?;
    let setup = Setup {
        direct: Target::parse(&args.direct).map_err(usage)?,
        accel: Target::parse(&args.accel).map_err(usage)?,
        door: args.origin_admin.as_deref().map(OriginDoor::parse).transpose().map_err(usage)?,
        rounds: args.rounds,
        verify: args.verify,
        cache: args.cache,
        signer: if args.sign == "v4" { Some(KeySigner::from_env(&args.region)?) } else { None },
        timeout: args.timeout,
        stop: stop::on_signals()?,
        progress: !args.quiet,
    };
    // Before anything is pinned: it tells how many cores there are.
    let environment = Environment::look();
    pin(args.cpu)?;
    let started = timestamp();
    let mut outcomes = Vec::new();
    for workload in workloads {
        let outcome = run(&setup, workload)?;
        let failed = outcome.verify_failures() + outcome.errors() > 0;
        outcomes.push(outcome);
        if failed {
            break;
        }
    }
    let report = Run {
        argv: argv(),
        started,
        finished: timestamp(),
        seed: args.seed,
        environment,
        client_core: args.cpu,
        direct_url: args.direct.clone(),
        accel_url: args.accel.clone(),
        outcomes,
    };
    if let Some(path) = &args.json {
        write_json(path, &report)?;
    }
    if args.json.as_deref().is_none_or(|path| path.as_os_str() != "-") {
        print!("{}", text::render(&report));
    }
    Ok(report.exit_code())
}

fn net(args: &NetArgs) -> Result<u8> {
    let chosen = two_cores(args.server_cpu, args.cpu)?;
    let plan = Plan {
        sizes: args.sizes.clone(),
        connections: args.connections.into(),
        block: args.block,
        rounds: args.rounds,
        cores: chosen,
    };
    let found = net::measure(&plan, stop::on_signals()?)?;
    tell(args.json.as_deref(), &found.to_json(), &found.text())?;
    Ok(0)
}

#[cfg(feature = "engines")]
fn parse_read(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes == 0 || bytes > disk::SIZE_MAX || !bytes.is_multiple_of(disk::GRAIN_BYTES) {
        return Err(format!("a read of {bytes} bytes is not one of 4 KiB to 2 MiB in steps of 4 KiB"));
    }
    Ok(bytes)
}

#[cfg(feature = "engines")]
fn read_drive(args: &DiskArgs) -> Result<u8> {
    let cores: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    let Some(core) = args.cpu.or(cores.first().copied()) else { bail!("the kernel names no cores") };
    if !cores.contains(&core) {
        return Err(usage(format!("--cpu {core}: this process may use cores {cores:?}")));
    }
    let stop = stop::on_signals()?;
    if let Some(bytes) = args.make {
        disk::make(&args.path, bytes, stop)?;
    }
    let plan = disk::Plan {
        path: args.path.clone(),
        span: args.span,
        sizes: args.sizes.clone(),
        depths: args.depths.iter().copied().map(usize::from).collect(),
        readers: args.readers.clone(),
        block: args.block,
        rounds: args.rounds,
        core,
    };
    let found = disk::measure(&plan, stop)?;
    tell(args.json.as_deref(), &found.to_json(), &found.text())?;
    Ok(0)
}

#[cfg(feature = "engines")]
fn compare_engines(args: &EnginesArgs) -> Result<u8> {
    let stop = stop::on_signals()?;
    let cores = two_cores(args.server_cpu, args.cpu)?;
    peers::network::enter();
    let plan = engines::Plan {
        runtimes: args.runtimes.clone(),
        states: args.states.clone(),
        sizes: args.sizes.clone(),
        hot_bytes: args.hot_set,
        drive_bytes: args.drive_set,
        folder: args.folder.clone(),
        connections: args.connections.into(),
        block: args.block,
        rounds: args.rounds,
        cores,
        program: std::env::current_exe().context("finding out where this program is")?,
    };
    let quiet = args.quiet;
    let found = engines::measure(&plan, stop, &mut |line| {
        if !quiet {
            eprintln!("{line}");
        }
    })?;
    tell(args.json.as_deref(), &found.to_json(), &found.text())?;
    Ok(0)
}

#[cfg(feature = "engines")]
fn serve_engine(args: &EnginesServeArgs) -> Result<u8> {
    exit_with_parent()?;
    let service = engines::Service {
        runtime: args.runtime,
        file: args.file.clone(),
        size: args.size,
        objects: args.objects,
        connections: args.connections,
        core: args.cpu,
    };
    engines::serve(&service)?;
    Ok(0)
}

/// Words for all cells of a kind.
const KINDS: [(&str, State); 3] = [("hot", State::Hot), ("drive", State::Drive), ("miss", State::Miss)];

fn cell_names() -> clap::builder::PossibleValuesParser {
    let kinds = KINDS.map(|(word, _)| word).into_iter();
    clap::builder::PossibleValuesParser::new(kinds.chain(CELLS.map(|cell| cell.name)))
}

fn compare_peers(args: &PeersArgs) -> Result<u8> {
    let stop = stop::on_signals()?;
    let kind =
        |cell: &Cell| KINDS.iter().find(|(_, state)| *state == cell.state).map_or("", |(word, _)| word);
    let is_chosen = |cell: &Cell| match &args.cells[..] {
        [] => true,
        names => names.iter().any(|name| name == cell.name || name == kind(cell)),
    };
    let objects_max = args.objects_max.unwrap_or(u64::MAX);
    let cells = CELLS.into_iter().filter(is_chosen);
    let cells = cells.map(|cell| Cell { objects: cell.objects.min(objects_max), ..cell }).collect();
    let all = Peer::value_variants();
    let node = sibling("forebay-node", "forebay-dataplane", stop)?;
    peers::network::enter();
    let plan = peers::Plan {
        cells,
        peers: if args.peers.is_empty() { all.to_vec() } else { args.peers.clone() },
        pairs: args.pairs,
        block: args.block,
        cores: two_cores(args.server_cpu, args.cpu)?,
        node,
        engine: args.engine.clone(),
        copies: args.copy,
        folder: args.folder.clone(),
    };
    let quiet = args.quiet;
    let found = peers::compare(&plan, stop, &mut |line| {
        if !quiet {
            eprintln!("{line}");
        }
    })?;
    tell(args.json.as_deref(), &found.to_json(), &found.text())?;
    let (lost, _) = found.lost();
    Ok(if lost > 0 { 4 } else { 0 })
}

/// The server's core and the client's, which must be two.
fn two_cores(server: Option<usize>, client: Option<usize>) -> Result<(usize, usize)> {
    let cores: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    let (Some(first), Some(last)) = (cores.first(), cores.last()) else { bail!("the kernel names no cores") };
    let chosen = (server.unwrap_or(*first), client.unwrap_or(*last));
    for (flag, core) in [("--server-cpu", chosen.0), ("--cpu", chosen.1)] {
        if !cores.contains(&core) {
            return Err(usage(format!("{flag} {core}: this process may use cores {cores:?}")));
        }
    }
    if chosen.0 == chosen.1 {
        return Err(usage(format!(
            "server and client would share core {}, and the figures would be of both; use two cores",
            chosen.0
        )));
    }
    Ok(chosen)
}

/// JSON into its file and the text on standard output, or JSON there instead.
fn tell(file: Option<&Path>, json: &serde_json::Value, text: &str) -> Result<()> {
    let json = format!("{json:#}\n");
    match file {
        Some(path) if path.as_os_str() == "-" => {
            print!("{json}");
            return Ok(());
        }
        Some(path) => {
            std::fs::write(path, json).with_context(|| format!("writing {}", path.display()))?;
        }
        None => {}
    }
    print!("{text}");
    Ok(())
}

fn changes(args: &WorkloadArgs) -> Changes {
    Changes { objects: args.objects, count: args.count, size: args.size, concurrency: args.concurrency }
}

fn argv() -> Vec<String> {
    std::env::args().collect()
}

fn pin(core: Option<usize>) -> Result<()> {
    let Some(id) = core else { return Ok(()) };
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    if !cores.iter().any(|one| one.id == id) || !core_affinity::set_for_current(core_affinity::CoreId { id })
    {
        let allowed: Vec<String> = cores.iter().map(|one| one.id.to_string()).collect();
        return Err(usage(format!("--cpu {id}: this process may use cores {}", allowed.join(", "))));
    }
    Ok(())
}

fn parse_dataset(text: &str) -> Result<Dataset> {
    let mut parts = text.split(',');
    let Some((bucket, prefix)) = parts.next().and_then(|name| name.split_once('/')) else {
        bail!("`{text}` does not begin with BUCKET/PREFIX");
    };
    let mut dataset = Dataset {
        bucket: bucket.to_owned(),
        prefix: prefix.to_owned(),
        count: 0,
        size: 0,
        class: Class::Hot,
        version: 1,
    };
    for part in parts {
        match part.split_once('=') {
            Some(("count", value)) => dataset.count = value.parse().context("count")?,
            Some(("size", value)) => dataset.size = parse_size(value).map_err(anyhow::Error::msg)?,
            Some(("version", value)) => dataset.version = value.parse().context("version")?,
            Some(("class", "hot")) => dataset.class = Class::Hot,
            Some(("class", "cold")) => dataset.class = Class::Cold,
            _ => bail!("`{part}` is none of count=N, size=SIZE, class=hot|cold, version=N"),
        }
    }
    Ok(dataset)
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

fn usage(sentence: String) -> anyhow::Error {
    Usage(sentence).into()
}
