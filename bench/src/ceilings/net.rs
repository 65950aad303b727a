//! The ceiling of loopback: our own client against a server that does nothing but answer.
//!
//! Each size is measured both ways in which a server can hand bytes to the kernel, in blocks whose order is reversed
//! every other round. All blocks are kept; what is printed is the median of the blocks and the merged latencies.
#![forbid(unsafe_code)]

use super::figures::{Figures, HEADINGS, Measured};
use super::null::{NullServer, Way};
use crate::client::lanes::{EtagLedger, Job, Part, run as run_lanes};
use crate::client::{Target, Verify};
use crate::environment::Environment;
use crate::processors::{core_busy_seconds, pin, thread_cpu_ns};
use crate::recorder::Block;
use crate::units::size_text;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Requests by which the rate is found before anything is measured.
const TRIAL_REQUESTS: u64 = 200;
/// One part in so many of a block is tried before it, to know how many requests make a block.
const TRIAL_SHARE: f64 = 10.0;
const TIMEOUT: Duration = Duration::from_secs(30);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bytes of the answers.
    pub sizes: Vec<u64>,
    /// Connections, each with one request under way.
    pub connections: usize,
    /// About how long a block takes: its requests are counted beforehand.
    pub block: Duration,
    /// Blocks of each size and way.
    pub rounds: u32,
    /// Where the server runs, and where the client; two cores.
    pub cores: (usize, usize),
}

/// All blocks of one size and way.
#[derive(Clone, Debug)]
pub struct Cell {
    size: u64,
    way: Way,
    blocks: Vec<Measured>,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Ceilings {
    plan: Plan,
    environment: Environment,
    cells: Vec<Cell>,
}

/// Measures, on the calling thread, which stays pinned to the client's core.
///
/// # Errors
/// A core that this process may not use, a signal, or an answer that was not whole: nothing was measured then.
pub fn measure(plan: &Plan, stop: &AtomicBool) -> Result<Ceilings> {
    let environment = Environment::look();
    pin(plan.cores.1)?;
    let mut cells = Vec::new();
    for size in &plan.sizes {
        let mut pair = [Way::Copied, Way::Reference].map(|way| Cell { size: *size, way, blocks: Vec::new() });
        for round in 0..plan.rounds {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for place in order {
                let cell = &mut pair[place];
                cell.blocks.push(block(plan, cell.size, cell.way, stop)?);
            }
        }
        cells.extend(pair);
    }
    Ok(Ceilings { plan: plan.clone(), environment, cells })
}

/// One block against a server of its own.
fn block(plan: &Plan, size: u64, way: Way, stop: &AtomicBool) -> Result<Measured> {
    let server = NullServer::bind(size, way).context("starting the null server")?;
    let address = server.address()?;
    let target = Target::parse(&format!("http://{address}/null")).map_err(anyhow::Error::msg)?;
    let job = |count| Job {
        target: &target,
        content_bucket: "null",
        prefix: "",
        objects: 1,
        count,
        size,
        version: 1,
        concurrency: plan.connections,
        verify: Verify::Length,
        part: Part::Whole,
        first: 0,
        is_drawn: false,
        discard: false,
        needs_etag: true,
        headers: b"",
        signatures: None,
        timeout: TIMEOUT,
    };
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (told, thread) = std::sync::mpsc::channel();
        let (server, ended) = (&server, &ended);
        let core = plan.cores.0;
        let serving = scope.spawn(move || {
            let _ = told.send(pin(core).map(|()| rustix::thread::gettid().as_raw_nonzero().get()));
            server.run(ended)
        });
        let measured = (|| {
            let thread = thread.recv().context("the null server ended")??;
            let seconds = plan.block.as_secs_f64();
            let counted =
                |rate: f64, seconds: f64| (rate * seconds).ceil().max(plan.connections as f64) as u64;
            let rate_of = |count| {
                Ok::<_, anyhow::Error>(asked(&job(count), stop)?.transfer_window.qps().unwrap_or(1.0))
            };
            // The first requests find everything cold; the second trial is long enough to say how fast it goes.
            let rate = rate_of(TRIAL_REQUESTS.max(plan.connections as u64))?;
            let rate = rate_of(counted(rate, seconds / TRIAL_SHARE))?;
            let count = counted(rate, seconds);
            let before = (thread_cpu_ns(thread), core_busy_seconds(core));
            let block = asked(&job(count), stop)?;
            let after = (thread_cpu_ns(thread), core_busy_seconds(core));
            Ok(Measured {
                block,
                server_cpu_s: after.0.zip(before.0).map(|(after, before)| (after - before) as f64 / 1e9),
                server_core_s: after.1.zip(before.1).map(|(after, before)| after - before),
            })
        })();
        ended.store(true, Ordering::Relaxed);
        match serving.join() {
            Ok(served) => served.context("the null server")?,
            Err(_) => bail!("the null server was lost"),
        }
        measured
    })
}

/// A block in which nothing went wrong.
fn asked(job: &Job, stop: &AtomicBool) -> Result<Block> {
    let block = run_lanes(job, &mut EtagLedger::default(), stop).context("asking the null server")?;
    if block.ops != job.count {
        let first = block.failures.first().cloned().or_else(|| block.errors.keys().next().cloned());
        bail!("{} of {} answers were whole: {}", block.ops, job.count, first.unwrap_or_default());
    }
    Ok(block)
}

impl Ceilings {
    /// For people.
    pub fn text(&self) -> String {
        let Plan { connections, block, rounds, cores, .. } = &self.plan;
        let environment = &self.environment;
        let mut out = format!(
            "LOOPBACK CEILINGS: {}, kernel {}; null server on core {}, client on core {}; {connections} connections, \
             {rounds} blocks of {:.1} s each\n",
            environment.cpu_model.as_deref().unwrap_or("unknown processor"),
            environment.kernel.as_deref().unwrap_or("?"),
            cores.0,
            cores.1,
            block.as_secs_f64(),
        );
        let _ = writeln!(out, "{:>15}  {:<13}{HEADINGS}", "size", "body");
        for cell in &self.cells {
            let figures = Figures::of(&cell.blocks);
            let _ = writeln!(out, "{:>15}  {:<13}{figures}", size_text(cell.size), cell.way.word());
        }
        out.push_str(
            "medians of the blocks, percentiles of all; busy: share of its core that the client used. Where it is near 1 \
             the client is the ceiling.\nA server cannot be measured faster than this; loopback is no network, and shows \
             nothing of NICs or SEND_ZC.\n",
        );
        out
    }

    /// For programs: the plan, the machine, every block.
    pub fn to_json(&self) -> Value {
        let cells = self.cells.iter().map(|cell| {
            let blocks: Vec<Value> = cell.blocks.iter().map(Measured::to_json).collect();
            json!({"size": cell.size, "body": cell.way.word(), "blocks": blocks})
        });
        json!({
            "schema": "forebay-bench net 1",
            "connections": self.plan.connections,
            "server_core": self.plan.cores.0,
            "client_core": self.plan.cores.1,
            "environment": self.environment.to_json(),
            "cells": cells.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_has_every_cell_and_no_figure_that_is_none() {
        let core = core_affinity::get_core_ids().expect("cores")[0].id;
        let plan = Plan {
            sizes: vec![1000, 100_000],
            connections: 3,
            block: Duration::from_millis(20),
            rounds: 2,
            cores: (core, core),
        };
        // Pinned for good, so on a thread of its own.
        let found =
            std::thread::spawn(move || measure(&plan, &AtomicBool::new(false))).join().expect("whole");
        let found = found.expect("measured");
        let shape: Vec<_> = found.cells.iter().map(|cell| (cell.size, cell.way, cell.blocks.len())).collect();
        let (copied, reference) = (Way::Copied, Way::Reference);
        assert_eq!(
            shape,
            [(1000, copied, 2), (1000, reference, 2), (100_000, copied, 2), (100_000, reference, 2)]
        );
        for cell in &found.cells {
            let figures = Figures::of(&cell.blocks);
            assert!(
                figures.requests_s.is_some_and(|rate| rate > 0.0) && figures.gb_s.is_some(),
                "{figures:?}"
            );
            assert!(cell.blocks.iter().all(|one| one.block.bytes == one.block.ops * cell.size));
        }
        let text = found.text();
        assert!(text.contains("100,000 bytes") && text.contains("by reference"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert_eq!(found.to_json()["cells"].as_array().map(Vec::len), Some(4));
    }
}
