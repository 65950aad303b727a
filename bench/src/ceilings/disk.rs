//! The ceiling of a drive: random direct reads through the node's own engines, and nothing behind them.
//!
//! One thread on one core keeps so many reads under way, each into registered memory of an arena, as a node does for a
//! drive hit, but for the sums and the socket. Nothing is written. Each size and depth is measured with each engine, in blocks
//! whose order is reversed every other round; all blocks are kept; what is printed is the median of the blocks and the
//! merged latencies. Beside them stands what the kernel says it read from a device for this process (`/proc/self/io`), and
//! how many of the ring's helper threads (io-wq) were seen: in steady state there are none.
#![forbid(unsafe_code)]

use super::figures::say;
use crate::clock::now_ns;
use crate::content::{Content, splitmix64};
use crate::environment::Environment;
use crate::processors::{core_busy_seconds, pin, thread_cpu_ns};
use crate::recorder::Metric;
use crate::statistics::median_of;
use crate::units::size_text;
use anyhow::{Context, Result, bail, ensure};
use forebay_dataplane::arena::{Arena, ArenaOptions, Purpose};
use forebay_dataplane::engine::portable::Portable;
use forebay_dataplane::engine::uring::{Registry, Ring};
use forebay_dataplane::engine::{Engine, SendPolicy};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::{Builder, LocalOptions};

/// What sizes and offsets must be multiples of: direct reads of any drive are then aligned.
pub const GRAIN_BYTES: u64 = 4096;
/// The largest read, and so the largest piece of memory, bytes.
pub const SIZE_MAX: u64 = 2 << 20;
/// Most reads under way.
pub const DEPTH_MAX: usize = 256;

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Reader {
    /// The node's ring.
    Uring,
    /// The node's pool of reading threads.
    Portable,
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Device or file; opened for reading only.
    pub path: PathBuf,
    /// Only so many bytes from its begin; `None` is all.
    pub span: Option<u64>,
    /// Bytes of the reads: multiples of [`GRAIN_BYTES`], at most [`SIZE_MAX`].
    pub sizes: Vec<u64>,
    /// Reads under way at a time, at most [`DEPTH_MAX`].
    pub depths: Vec<usize>,
    /// Who reads, in this order.
    pub readers: Vec<Reader>,
    /// How long a block takes.
    pub block: Duration,
    /// Blocks of each size, depth and reader.
    pub rounds: u32,
    /// Where the thread runs.
    pub core: usize,
}

/// One block.
#[derive(Clone, Debug, Default)]
struct Measured {
    latency: Metric,
    bytes: u64,
    seconds: f64,
    cpu_s: Option<f64>,
    core_s: Option<f64>,
    device_bytes: Option<u64>,
    helpers: usize,
}

#[derive(Clone, Debug)]
struct Cell {
    size: u64,
    depth: usize,
    reader: Reader,
    blocks: Vec<Measured>,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Ceiling {
    plan: Plan,
    bytes: u64,
    environment: Environment,
    cells: Vec<Cell>,
}

impl Reader {
    fn word(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Portable => "portable",
        }
    }
}

/// Makes a file of so many bytes to measure on, all of them written: what was only promised is read from no drive.
///
/// # Errors
/// There is something of that name, or no room.
pub fn make(path: &Path, bytes: u64, stop: &AtomicBool) -> Result<()> {
    let name = path.display();
    let mut file =
        File::options().write(true).create_new(true).open(path).with_context(|| format!("making {name}"))?;
    let mut piece = vec![0; 1 << 20];
    let content = Content::new(b"disk", 1);
    let mut start = 0;
    while start < bytes {
        if stop.load(Ordering::Relaxed) {
            bail!("stopped by a signal; {name} is half made");
        }
        let len = (bytes - start).min(piece.len() as u64) as usize;
        content.fill(start, &mut piece[..len]);
        file.write_all(&piece[..len]).with_context(|| format!("writing {name}"))?;
        start += len as u64;
    }
    file.sync_all().with_context(|| format!("writing {name}"))
}

/// Measures, on the calling thread, which stays pinned to the plan's core.
///
/// # Errors
/// The file or device cannot be read directly or is too small, an engine is not granted here, a signal, or a failed read.
pub fn measure(plan: &Plan, stop: &AtomicBool) -> Result<Ceiling> {
    let environment = Environment::look();
    let path = plan.path.display();
    let mut file = File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed())
        .open(&plan.path)
        .with_context(|| {
            format!("opening {path} for direct reads; make a file to measure on with --make SIZE, on the drive in question")
        })?;
    // Also the size of a device.
    let there = file.seek(SeekFrom::End(0)).with_context(|| format!("finding the size of {path}"))?;
    let bytes = plan.span.map_or(there, |span| span.min(there));
    let largest = plan.sizes.iter().copied().max().unwrap_or(GRAIN_BYTES);
    let deepest = plan.depths.iter().copied().max().unwrap_or(1);
    ensure!(bytes >= 4 * largest, "{path} has {bytes} bytes: too few for reads of {largest} that differ");
    // A page of 2 MiB holds pieces of one size only.
    let memory = (deepest as u64 * largest).next_multiple_of(SIZE_MAX) as usize + (4 << 20);
    let arena =
        Arena::build(ArenaOptions { bytes: memory + (8 << 20), reads_bytes: memory, fills_bytes: 2 << 20 })
            .context("taking memory")?;
    pin(plan.core)?;
    let mut cells = Vec::new();
    for size in &plan.sizes {
        for depth in &plan.depths {
            let cell =
                |reader: &Reader| Cell { size: *size, depth: *depth, reader: *reader, blocks: Vec::new() };
            let mut group: Vec<Cell> = plan.readers.iter().map(cell).collect();
            for round in 0..plan.rounds {
                let mut order: Vec<usize> = (0..group.len()).collect();
                if round % 2 == 1 {
                    order.reverse();
                }
                for place in order {
                    let cell = &mut group[place];
                    let measured = block(plan, cell, &file, bytes, arena, stop)?;
                    cell.blocks.push(measured);
                }
            }
            cells.extend(group);
        }
    }
    Ok(Ceiling { plan: plan.clone(), bytes, environment, cells })
}

/// One block, with an engine of its own.
fn block(
    plan: &Plan,
    cell: &Cell,
    file: &File,
    bytes: u64,
    arena: &'static Arena,
    stop: &AtomicBool,
) -> Result<Measured> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(cell.depth.max(8))
        .build_local(LocalOptions::default())
        .context("making a runtime")?;
    runtime.block_on(async {
        // The registration lives as long as the registry.
        let (engine, _registry) = match cell.reader {
            Reader::Portable => (Engine::Portable(Portable::default()), None),
            Reader::Uring => {
                let ring = Ring::start(SendPolicy::default()).context(
                    "io_uring is not granted here (forebay-node doctor says why); try --readers portable",
                )?;
                let registry = Registry::build(arena).ok();
                if let Some(registry) = &registry {
                    ring.register(arena, &registry.registered()).context("registering memory")?;
                }
                (Engine::Uring(ring), registry)
            }
        };
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let measured = Rc::new(RefCell::new(Measured::default()));
        let before = (thread_cpu_ns(thread), core_busy_seconds(plan.core), device_bytes());
        let start = now_ns();
        let end = start + u64::try_from(plan.block.as_nanos()).unwrap_or(u64::MAX / 2);
        let reads: Vec<_> = (0..cell.depth)
            .map(|lane| {
                let (engine, measured) = (engine.clone(), Rc::clone(&measured));
                let (size, places, descriptor) = (cell.size, bytes / cell.size, file.as_raw_fd());
                let mut random = splitmix64(start ^ lane as u64);
                tokio::task::spawn_local(async move {
                    while now_ns() < end {
                        let lease = arena
                            .grant(Purpose::Read, size as usize)
                            .context("no memory for a read: this is a mistake of the bench's own")?;
                        let begun = now_ns();
                        random = splitmix64(random);
                        let offset = random % places * size;
                        let (read, lease) = engine.read_at(descriptor, offset, lease, size as usize).await;
                        read.with_context(|| format!("reading {size} bytes at {offset}"))?;
                        drop(lease);
                        let mut measured = measured.borrow_mut();
                        measured.latency.record(now_ns() - begun);
                        measured.bytes += size;
                    }
                    Ok::<_, anyhow::Error>(())
                })
            })
            .collect();
        let watching = tokio::task::spawn_local({
            let measured = Rc::clone(&measured);
            async move {
                loop {
                    tokio::time::sleep(plan_tick(end, start)).await;
                    let seen = helpers();
                    let mut measured = measured.borrow_mut();
                    measured.helpers = measured.helpers.max(seen);
                }
            }
        });
        for read in reads {
            read.await.context("a reader was lost")??;
            if stop.load(Ordering::Relaxed) {
                bail!("stopped by a signal");
            }
        }
        watching.abort();
        let after = (thread_cpu_ns(thread), core_busy_seconds(plan.core), device_bytes());
        let mut measured = measured.take();
        measured.seconds = (now_ns() - start) as f64 / 1e9;
        measured.cpu_s = after.0.zip(before.0).map(|(after, before)| (after - before) as f64 / 1e9);
        measured.core_s = after.1.zip(before.1).map(|(after, before)| after - before);
        measured.device_bytes = after.2.zip(before.2).map(|(after, before)| after - before);
        Ok(measured)
    })
}

/// Often enough to see a helper thread, which stays for five seconds, and seldom enough to cost nothing.
fn plan_tick(end: u64, start: u64) -> Duration {
    Duration::from_nanos(((end - start) / 4).clamp(1_000_000, 500_000_000))
}

/// What the kernel has fetched from devices for this process.
fn device_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.trim().parse().ok()
}

/// Helper threads of rings in this process.
fn helpers() -> usize {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let names =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.starts_with("iou-wrk")).count()
}

impl Cell {
    fn of(&self, figure: &dyn Fn(&Measured) -> Option<f64>) -> Option<f64> {
        median_of(self.blocks.iter().filter_map(figure))
    }

    fn merged(&self) -> Metric {
        let mut merged = Metric::default();
        for one in &self.blocks {
            merged.merge(&one.latency);
        }
        merged
    }

    /// As people read it: rate, bandwidth, percentiles, what it cost.
    fn row(&self) -> [Option<f64>; 9] {
        let gigabytes = |one: &Measured| Some(one.bytes as f64 / 1e9).filter(|gigabytes| *gigabytes > 0.0);
        let merged = self.merged();
        [
            self.of(&|one| Some(one.latency.n() as f64 / one.seconds)),
            self.of(&|one| Some(gigabytes(one)? / one.seconds)),
            merged.percentile_ms(0.5),
            merged.percentile_ms(0.99),
            merged.percentile_ms(0.999),
            self.of(&|one| Some(one.cpu_s? / gigabytes(one)?)),
            self.of(&|one| Some(one.core_s? / gigabytes(one)?)),
            self.of(&|one| Some(one.device_bytes? as f64 / 1e9 / gigabytes(one)?)),
            self.blocks.iter().map(|one| one.helpers as f64).max_by(f64::total_cmp),
        ]
    }
}

impl Ceiling {
    /// For people.
    pub fn text(&self) -> String {
        let Plan { path, block, rounds, core, .. } = &self.plan;
        let environment = &self.environment;
        let mut out = format!(
            "DRIVE CEILING: {}, {}; {}, kernel {}; random direct reads by one thread on core {core}, {rounds} blocks of \
             {:.1} s each\n",
            path.display(),
            size_text(self.bytes),
            environment.cpu_model.as_deref().unwrap_or("unknown processor"),
            environment.kernel.as_deref().unwrap_or("?"),
            block.as_secs_f64(),
        );
        let _ = writeln!(
            out,
            "{:>15}{:>7}  {:<10}{:>9}{:>8}{:>9}{:>9}{:>9}  {:>10}{:>8}{:>8}{:>8}",
            "size",
            "depth",
            "reader",
            "reads/s",
            "GB/s",
            "P50 ms",
            "P99 ms",
            "P99.9",
            "CPU-s/GB",
            "core",
            "device",
            "helpers"
        );
        for cell in &self.cells {
            let [rate, gb, p50, p99, p999, cpu, core, device, helpers] = cell.row();
            let _ = writeln!(
                out,
                "{:>15}{:>7}  {:<10}{:>9}{:>8}{:>9}{:>9}{:>9}  {:>10}{:>8}{:>8}{:>8}",
                size_text(cell.size),
                cell.depth,
                cell.reader.word(),
                say(rate, 0),
                say(gb, 2),
                say(p50, 3),
                say(p99, 3),
                say(p999, 3),
                say(cpu, 3),
                say(core, 3),
                say(device, 2),
                say(helpers, 0),
            );
        }
        out.push_str(
            "medians of the blocks, percentiles of all. CPU-s/GB: of the thread; core: everything on its core. device: bytes \
             from the device per byte read; 0 is a cache that answered.\nhelpers: most of the ring's helper threads that were \
             seen at once; 0 where reads never wait in the kernel's pool.\n",
        );
        out
    }

    /// For programs: the plan, the machine, every block.
    pub fn to_json(&self) -> Value {
        let cells = self.cells.iter().map(|cell| {
            let blocks = cell.blocks.iter().map(|one| {
                json!({
                    "reads": one.latency.n(),
                    "bytes": one.bytes,
                    "seconds": one.seconds,
                    "p50_ms": one.latency.percentile_ms(0.5),
                    "p99_ms": one.latency.percentile_ms(0.99),
                    "p999_ms": one.latency.percentile_ms(0.999),
                    "cpu_s": one.cpu_s,
                    "core_s": one.core_s,
                    "device_bytes": one.device_bytes,
                    "helper_threads": one.helpers,
                })
            });
            json!({
                "size": cell.size, "depth": cell.depth, "reader": cell.reader.word(), "blocks": blocks.collect::<Vec<_>>(),
            })
        });
        json!({
            "schema": "forebay-bench disk 1",
            "path": self.plan.path.display().to_string(),
            "bytes": self.bytes,
            "core": self.plan.core,
            "environment": self.environment.to_json(),
            "cells": cells.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(path: PathBuf) -> Plan {
        Plan {
            path,
            span: None,
            sizes: vec![4096, 64 << 10],
            depths: vec![1, 9],
            readers: vec![Reader::Uring, Reader::Portable],
            block: Duration::from_millis(30),
            rounds: 2,
            core: core_affinity::get_core_ids().expect("cores")[0].id,
        }
    }

    /// Pinned for good, so on a thread of its own.
    fn measured(plan: Plan) -> Result<Ceiling> {
        std::thread::spawn(move || measure(&plan, &AtomicBool::new(false))).join().expect("whole")
    }

    #[test]
    fn a_short_run_reads_from_the_drive_with_every_engine_and_changes_nothing() {
        let mut file =
            tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file on a drive");
        let content: Vec<u8> = (0..4 << 20).map(|at: u32| (at >> 12) as u8).collect();
        file.write_all(&content).expect("written");
        file.as_file().sync_all().expect("on the drive");
        let found = measured(plan(file.path().to_owned())).expect("measured");
        assert_eq!(found.cells.len(), 8);
        for cell in &found.cells {
            assert_eq!(cell.blocks.len(), 2);
            for one in &cell.blocks {
                assert!(
                    one.latency.n() >= cell.depth as u64 && one.bytes == one.latency.n() * cell.size,
                    "{one:?}"
                );
                // Of a block, since reads that were begun in time are counted at its end.
                assert!(one.device_bytes.is_some_and(|device| device >= one.bytes), "{one:?}");
            }
            let row = cell.row();
            assert!(row.iter().flatten().all(|figure| figure.is_finite()), "{row:?}");
            // Percentiles of so few reads are not said.
            assert!(row[0].is_some_and(|rate| rate > 0.0) && row[1].is_some() && row[7].is_some(), "{row:?}");
        }
        let text = found.text();
        assert!(text.contains("64 KiB") || text.contains("65,536"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert_eq!(found.to_json()["cells"].as_array().map(Vec::len), Some(8));
        assert!(std::fs::read(file.path()).expect("there") == content, "nothing was written");
    }

    #[test]
    fn what_is_not_there_or_too_small_is_said_with_the_remedy() {
        let missing = measured(plan("/nowhere/at/all".into())).expect_err("not there");
        assert!(format!("{missing:#}").contains("--make SIZE"), "{missing:#}");
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        let small = measured(plan(file.path().to_owned())).expect_err("empty");
        assert!(format!("{small:#}").contains("too few"), "{small:#}");
    }
}
