//! The demo: emulator, control plane and node on loopback, both tables at small scale, and three promises kept or an
//! exit code.
//!
//! It needs no rights, no network and no store; it leaves nothing behind.
#![forbid(unsafe_code)]

use crate::children::{NodePlan, Running, sibling, start_node};
use crate::client::plain::OriginDoor;
use crate::client::{Target, Verify};
use crate::control::ControlPlane;
use crate::environment::Environment;
use crate::report::{Ratios, Run, promise, text};
use crate::run::{CacheState, Outcome, Setup, run};
use crate::units::Scale;
use crate::workloads::{Changes, Row, Workload};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const BUCKET: &str = "demo";
const NODE: &str = "demo-node";
const POLICY: &str = "demo-policy";
const BULK_OBJECTS: u64 = 1500;
const DOWNLOADS: u64 = 60;
// All of the data twice over, so that nothing is evicted while it is warm.
const MEMORY: &str = "512MiB";
const DRIVE_BYTES: u64 = 1 << 30;
// Longer than the whole demo: a warm block then has no reason to ask the origin.
const FRESHNESS: &str = "ttl:600s";

/// How the demo is run.
#[derive(clap::Args, Clone, Debug)]
pub struct DemoArgs {
    /// How the node does its I/O: auto, uring or portable
    #[arg(long, default_value = "auto", value_parser = ["auto", "uring", "portable"])]
    pub engine: String,
    /// Keep drive file, store and logs in this folder instead of removing them
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Pairs of blocks; an interval needs 5
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Write the result as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Runs it; the exit code.
///
/// # Errors
/// A part cannot be built, started or reached.
pub fn demo(args: &DemoArgs, stop: &'static AtomicBool, argv: Vec<String>) -> Result<u8> {
    let node_program = sibling("forebay-node", "forebay-dataplane", stop)?;
    let control_program = sibling("forebay-control", "forebay-control", stop)?;
    let own_program = std::env::current_exe().context("finding out where this program is")?;
    let temporary = match &args.keep {
        Some(_) => None,
        None => Some(
            tempfile::Builder::new()
                .prefix("forebay-demo-")
                .tempdir()
                .context("making a folder for the demo")?,
        ),
    };
    let folder = match (&args.keep, &temporary) {
        (Some(folder), _) => {
            std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
            folder.clone()
        }
        (None, Some(folder)) => folder.path().to_path_buf(),
        (None, None) => std::env::temp_dir(),
    };
    // Before anything is pinned: it tells how many cores there are.
    let environment = Environment::look();
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let (node_core, client_core) = match cores[..] {
        [first, second, ..] => (Some(first), Some(second)),
        _ => (None, None),
    };

    let mut origin_command = Command::new(&own_program);
    origin_command.args([
        "origin",
        "--listen",
        "127.0.0.1:0",
        "--profile",
        "tos-intranet-v1",
        "--exit-with-parent",
    ]);
    origin_command.args(["--dataset", &format!("{BUCKET}/,count=0,size=0")]);
    if let Some(core) = client_core {
        origin_command.args(["--cpu", &core.id.to_string()]);
    }
    origin_command.stdout(Stdio::piped());
    let mut origin = Running::start("the origin emulator", &mut origin_command, &folder.join("origin.log"))?;
    let origin_url = origin.first_line()?;

    // As an operator would: what is served, and by which rules, is said to the control plane, not to the node.
    let mut control = ControlPlane::start(&control_program, &folder)?;
    control.tell(&["policy", "set", POLICY, "--rule", &format!("**,freshness={FRESHNESS}")])?;
    control.tell(&["accelerator", "add", &format!("{BUCKET}={origin_url}/{BUCKET}"), "--policy", POLICY])?;
    let plan = NodePlan {
        program: &node_program,
        cores: node_core.map_or("auto".to_owned(), |core| core.id.to_string()),
        memory: MEMORY,
        drive_bytes: DRIVE_BYTES,
        serves: control.admit(NODE)?,
        engine: &args.engine,
        folder: &folder,
    };
    let (mut node, node_url) = start_node(&plan, stop)?;
    control.wait_served(NODE, BUCKET, stop)?;
    eprintln!(
        "control plane {}: told accelerator `{BUCKET}` and policy `{POLICY}`\nnode          {node_url}: registered as \
         `{NODE}`, took both from it\norigin        {origin_url}",
        control.url()
    );
    // All children run; from here on the client has its own core, which the emulator shares.
    let pinned = client_core.filter(|core| core_affinity::set_for_current(*core));

    let setup = Setup {
        direct: Target::parse(&format!("{origin_url}/{BUCKET}")).map_err(anyhow::Error::msg)?,
        accel: Target::parse(&format!("{node_url}/{BUCKET}")).map_err(anyhow::Error::msg)?,
        door: Some(OriginDoor::parse(&origin_url).map_err(anyhow::Error::msg)?),
        rounds: args.rounds,
        verify: Verify::Full,
        cache: CacheState::Warm,
        signer: None,
        timeout: Duration::from_secs(30),
        stop,
        progress: true,
    };
    let workloads = [(Row::Bulk, BULK_OBJECTS), (Row::Download, DOWNLOADS)].map(|(row, count)| {
        let changes = Changes {
            count: Some(count),
            objects: (row == Row::Bulk).then_some(count),
            ..Changes::default()
        };
        Workload::new(row, Scale::Small, changes)
    });
    let workloads = workloads.into_iter().collect::<Result<Vec<_>, _>>().map_err(anyhow::Error::msg)?;
    let expected: f64 = workloads.iter().map(|one| one.direct_seconds() * f64::from(args.rounds + 1)).sum();
    eprintln!(
        "The origin is EMULATED on this machine, with the delays that the document implies. About {expected:.0} seconds."
    );
    let started = timestamp();
    let mut outcomes = Vec::new();
    for workload in workloads {
        outcomes.push(run(&setup, workload)?);
    }
    let report = Run {
        argv,
        started,
        finished: timestamp(),
        seed: 42,
        environment,
        client_core: pinned.map(|core| core.id),
        direct_url: setup.direct.url.clone(),
        accel_url: setup.accel.url.clone(),
        outcomes,
    };
    if let Some(path) = &args.json {
        write_json(path, &report)?;
    }
    print!("{}", text::render(&report));
    println!(
        "\nHow to read it: `doc` is the document's figure and `run` ours, Δ% between them. The first row shows how well \
         the emulated origin\nrepeats the document's store; the second is Forebay on this machine; the ratio is what \
         may be compared, and it is mostly a property\nof the origin's delays. Try your own data: forebay-bench try \
         s3://bucket/prefix"
    );
    let verdict = verdict(&report);
    node.end();
    control.end();
    origin.end();
    if let Some(folder) = &args.keep {
        println!("kept: {}", folder.display());
    }
    Ok(verdict)
}

// The three promises, one line each.
fn verdict(report: &Run) -> u8 {
    let mut kept = true;
    for outcome in &report.outcomes {
        let ratios = Ratios::of(outcome, report.seed);
        let (name, ratio, wanted) = promise(outcome, &ratios);
        let above = ratio.is_some_and(|ratio| ratio > wanted);
        let said = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.1}x"));
        println!("{} {name} ratio {said}, the document's is {wanted:.1}x", mark(above));
        kept &= above;
    }
    let answers: u64 = report.outcomes.iter().flat_map(Outcome::all_blocks).map(|block| block.ops).sum();
    let wrong: u64 = report.outcomes.iter().map(Outcome::verify_failures).sum();
    let errors: u64 = report.outcomes.iter().map(Outcome::errors).sum();
    println!(
        "{} {answers} answers verified byte for byte, {wrong} wrong, {errors} errors",
        mark(wrong + errors == 0)
    );
    let reached: u64 = report
        .outcomes
        .iter()
        .filter_map(|one| one.warm_origin.as_ref())
        .map(crate::run::OriginUse::total)
        .sum();
    println!("{} {reached} requests reached the origin during warm blocks", mark(reached == 0));
    if wrong > 0 {
        3
    } else if errors > 0 {
        1
    } else if kept && reached == 0 {
        0
    } else {
        4
    }
}

fn mark(good: bool) -> &'static str {
    if good { "ok    " } else { "FAILED" }
}

/// Writes a run's JSON.
///
/// # Errors
/// The file cannot be written.
pub fn write_json(path: &std::path::Path, report: &Run) -> Result<()> {
    let text = serde_json::to_string_pretty(&crate::report::json::render(report))?;
    if path.as_os_str() == "-" {
        println!("{text}");
        return Ok(());
    }
    std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
}

/// Now, as RFC 3339 to the second.
pub fn timestamp() -> String {
    let now =
        time::OffsetDateTime::now_utc().replace_nanosecond(0).unwrap_or(time::OffsetDateTime::UNIX_EPOCH);
    now.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}
