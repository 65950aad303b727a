//! What was found, as Markdown for people and JSON for programs. A row that is lost is printed like the others.
#![forbid(unsafe_code)]

use super::{Cell, Compared, Comparison, Measured, Pairs, Peer, State};
use crate::recorder::{Block, Metric};
use crate::statistics::{Ratio, median_of, paired_ratio, percentile_ratio};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A ratio passes if its interval ends below the target times this: CPU a gigabyte, and the 99th percentile.
const CPU_MARGIN: f64 = 1.05;
const P99_MARGIN: f64 = 1.15;
/// Of what fio reads in the same time, what the node must serve; with the margin of a cost.
const FIO_SHARE: f64 = 0.9;
/// Of the bootstrap.
const SEED: u64 = 42;

/// The node's figures over the peer's.
#[derive(Clone, Debug)]
pub(super) struct Ratios {
    cpu: Ratio,
    core: Ratio,
    p99: Ratio,
    rate: Ratio,
}

impl Ratios {
    /// Of pairs of blocks, the node's first.
    pub(super) fn of(blocks: &[(Measured, Measured)]) -> Self {
        let of = |figure: &dyn Fn(&Measured) -> Option<f64>| {
            let pairs: Vec<_> = blocks.iter().map(|(ours, theirs)| (figure(ours), figure(theirs))).collect();
            paired_ratio(&pairs, SEED)
        };
        let (ours, theirs): (Vec<&Metric>, Vec<&Metric>) =
            blocks.iter().map(|(ours, theirs)| (&ours.block.latency, &theirs.block.latency)).unzip();
        Self {
            cpu: of(&Measured::cpu_s_per_gb),
            core: of(&Measured::core_s_per_gb),
            p99: percentile_ratio(&ours, &theirs, 0.99, SEED),
            rate: of(&|one| one.block.transfer_window.qps()),
        }
    }
}

/// What became of that which must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Yes,
    No,
    /// Nothing was set: the row is for information.
    NothingSet,
    /// There is no interval to tell.
    Unknown,
}

impl Held {
    fn of(holds: Option<bool>) -> Self {
        holds.map_or(Self::Unknown, |holds| if holds { Self::Yes } else { Self::No })
    }

    fn word(self) -> &'static str {
        match self {
            Self::Yes => "holds",
            Self::No => "**lost**",
            Self::NothingSet => "–",
            Self::Unknown => "too few pairs",
        }
    }
}

impl Pairs {
    /// Whether what must hold beside this peer does.
    pub(super) fn held(&self, cell: &Cell, peer: Peer) -> Held {
        let Ratios { cpu, p99, rate, .. } = &self.ratios;
        let beside = match (peer, peer.cpu_must(cell.state)) {
            (Peer::Fio, _) => Held::of(rate.interval.map(|[low, _]| low * CPU_MARGIN > FIO_SHARE)),
            (_, None) => Held::NothingSet,
            (_, Some(must)) => {
                let is_cheap = cpu.interval.map(|[_, cpu]| cpu * must < CPU_MARGIN);
                // A latency has a bound only against nginx in memory; too few answers for a percentile tell nothing of it.
                let is_timely = (peer, cell.state) != (Peer::Nginx, State::Hot)
                    || p99.interval.is_none_or(|[_, p99]| p99 < P99_MARGIN);
                Held::of(is_cheap.map(|is_cheap| is_cheap && is_timely))
            }
        };
        match cell.device_max.zip(self.device_ratio()) {
            Some((most, found)) if found > most => Held::No,
            _ => beside,
        }
    }

    /// Bytes that the node read from its drive per byte served, over all blocks.
    fn device_ratio(&self) -> Option<f64> {
        let ours = self.blocks.iter().map(|(ours, _)| ours);
        let (read, served) = ours.fold((0.0, 0.0), |(read, served), one| {
            let bytes = one.block.bytes as f64;
            (read + one.device_ratio().unwrap_or(0.0) * bytes, served + bytes)
        });
        (served > 0.0).then(|| read / served)
    }
}

fn say(figure: Option<f64>, digits: usize) -> String {
    figure.map_or("–".to_owned(), |figure| format!("{figure:.digits$}"))
}

fn say_ratio(ratio: &Ratio) -> String {
    let Some(estimate) = ratio.estimate else { return "–".to_owned() };
    match ratio.interval {
        Some([low, high]) => format!("{estimate:.2}x, {low:.2} to {high:.2}"),
        None => format!("{estimate:.2}x"),
    }
}

fn median(blocks: &[&Measured], figure: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
    median_of(blocks.iter().filter_map(|one| figure(one)))
}

impl Comparison {
    /// How many rows do not hold what they must, and how many could not be compared.
    pub fn lost(&self) -> (usize, usize) {
        let lost = |compared: &&Compared| {
            let Ok(pairs) = &compared.outcome else { return false };
            pairs.held(&compared.cell, compared.peer) == Held::No
        };
        let missing = self.compared.iter().filter(|compared| compared.outcome.is_err()).count();
        (self.compared.iter().filter(lost).count(), missing)
    }

    /// Tables in Markdown.
    pub fn text(&self) -> String {
        let plan = &self.plan;
        let environment = &self.environment;
        let mut out = format!(
            "{}, kernel {}, loopback{}, congestion control {}; {}every server alone on core {}, the client on core {}, which \
             {}; {} pairs of blocks of {:.1} s (A B, B A, …), engine {}.\n\n",
            environment.cpu_model.as_deref().unwrap_or("unknown processor"),
            environment.kernel.as_deref().unwrap_or("?"),
            if self.is_own_network { " of its own" } else { "" },
            self.congestion,
            self.pages.map_or(String::new(), |(huge, all)| format!(
                "{huge} of {all} pages of the node's memory are huge; "
            )),
            plan.cores.0,
            plan.cores.1,
            if plan.copies { "copies bodies" } else { "lets the kernel drop bodies, once all were verified" },
            plan.pairs,
            plan.block.as_secs_f64(),
            plan.engine,
        );
        out.push_str(
            "| cell | beside | CPU-s/GB | whole core | P99 | requests/s | what must hold |\n\
             |---|---|---|---|---|---|---|\n",
        );
        for compared in &self.compared {
            let (cell, peer) = (compared.cell.name, compared.peer.word());
            match &compared.outcome {
                Err(why) => {
                    let why = why.lines().next().unwrap_or_default();
                    let _ = writeln!(out, "| {cell} | {peer} | not compared: {why} | | | | |");
                }
                Ok(pairs) => {
                    let ratios = &pairs.ratios;
                    let held = pairs.held(&compared.cell, compared.peer).word();
                    let _ = writeln!(
                        out,
                        "| {cell} | {} | {} | {} | {} | {} | {held} |",
                        pairs.way,
                        say_ratio(&ratios.cpu),
                        say_ratio(&ratios.core),
                        say_ratio(&ratios.p99),
                        say_ratio(&ratios.rate),
                    );
                }
            }
        }
        out.push_str(
            "\nRatios are the node's figure over the peer's, of pairs, with 95 % intervals. What must hold in memory: the upper end \
             of CPU-s/GB below 1.05 (nginx) or 0.70 (the others, 1.5 times better), and beside nginx that of P99 below 1.15, where there \
             were answers enough to tell. From a drive: that of CPU-s/GB below 0.75 (nginx, 1.4 times better); the lower end of \
             requests/s above 0.857 (fio, 0.9 times as many); and no more bytes from the device per byte served than 1.02 aligned, 1.10 \
             (1 MiB) and 2.05 (64 KiB) anywhere, by the kernel's count and by the node's own.\n\n",
        );
        out.push_str(
            "| cell | server | req/s | GB/s | P50 ms | P99 ms | P99.9 ms | CPU-s/GB | core s/GB | client busy | device | memory MiB |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        for compared in &self.compared {
            let Ok(pairs) = &compared.outcome else { continue };
            let (ours, theirs): (Vec<&Measured>, Vec<&Measured>) =
                pairs.blocks.iter().map(|(ours, theirs)| (ours, theirs)).unzip();
            for (name, blocks, memory) in [
                ("Forebay", ours, Some(pairs.memory_bytes.0)),
                (pairs.way.as_str(), theirs, pairs.memory_bytes.1),
            ] {
                let mut merged = Block::default();
                for one in &blocks {
                    merged.merge(&one.block);
                }
                let _ = writeln!(
                    out,
                    "| {} | {name} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    compared.cell.name,
                    say(median(&blocks, |one| one.block.transfer_window.qps()), 0),
                    say(median(&blocks, Measured::gb_s), 2),
                    say(merged.latency.percentile_ms(0.5), 2),
                    say(merged.latency.percentile_ms(0.99), 2),
                    say(merged.latency.percentile_ms(0.999), 2),
                    say(median(&blocks, Measured::cpu_s_per_gb), 3),
                    say(median(&blocks, Measured::core_s_per_gb), 3),
                    say(
                        Some(merged.client_cpu_seconds / merged.transfer_window.seconds)
                            .filter(|share| share.is_finite() && *share > 0.0),
                        2
                    ),
                    say(median(&blocks, Measured::device_ratio), 3),
                    say(memory.map(|bytes| (bytes >> 20) as f64), 0),
                );
            }
        }
        out.push_str(
            "\nMedians of blocks; percentiles of all blocks together. Client busy: its share of its core; near 1 it is the limit. \
             Device: bytes read from devices per byte served. A percentile has at least ten answers above it, or is left out.\n",
        );
        out
    }

    /// The plan, the machine, every block.
    pub fn to_json(&self) -> Value {
        let one = |measured: &Measured| {
            let block = &measured.block;
            json!({
                "requests": block.ops,
                "bytes": block.bytes,
                "seconds": block.transfer_window.seconds,
                "p50_ms": block.latency.percentile_ms(0.5),
                "p99_ms": block.latency.percentile_ms(0.99),
                "p999_ms": block.latency.percentile_ms(0.999),
                "cpu_s": measured.cpu_s,
                "core_s": measured.core_s,
                "client_cpu_s": block.client_cpu_seconds,
                "device_bytes": measured.device_bytes.0,
                "drive_read_bytes_said": measured.device_bytes.1,
            })
        };
        let ratio = |ratio: &Ratio| json!({"estimate": ratio.estimate, "interval": ratio.interval});
        let rows = self.compared.iter().map(|compared| match &compared.outcome {
            Err(why) => json!({"cell": compared.cell.name, "peer": compared.peer.word(), "missing": why}),
            Ok(pairs) => {
                let ratios = &pairs.ratios;
                let pairs_json: Vec<_> =
                    pairs.blocks.iter().map(|(ours, theirs)| json!([one(ours), one(theirs)])).collect();
                json!({
                    "cell": compared.cell.name,
                    "peer": compared.peer.word(),
                    "way": pairs.way,
                    "tried_cpu_s_per_gb": pairs.tried.iter().map(|(way, cost)| json!([way, cost])).collect::<Vec<_>>(),
                    "memory_bytes": [pairs.memory_bytes.0, pairs.memory_bytes.1],
                    "cpu": ratio(&ratios.cpu),
                    "core": ratio(&ratios.core),
                    "p99": ratio(&ratios.p99),
                    "requests_s": ratio(&ratios.rate),
                    "holds": match pairs.held(&compared.cell, compared.peer) {
                        Held::Yes => Some(true),
                        Held::No => Some(false),
                        Held::NothingSet | Held::Unknown => None,
                    },
                    "pairs": pairs_json,
                })
            }
        });
        json!({
            "schema": "forebay-bench peers 2",
            "environment": self.environment.to_json(),
            "congestion_control": self.congestion,
            "own_network": self.is_own_network,
            "node_pages": self.pages.map(|(huge, all)| json!({"huge": huge, "all": all})),
            "server_core": self.plan.cores.0,
            "client_core": self.plan.cores.1,
            "client_copies": self.plan.copies,
            "engine": self.plan.engine,
            "rows": rows.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CELLS, Pairs, Plan};
    use super::*;
    use crate::environment::Environment;
    use crate::recorder::Window;
    use std::time::Duration;

    fn measured(cpu_s: f64, latency_ns: u64) -> Measured {
        let mut block = Block { ops: 2000, bytes: 1_000_000_000, ..Block::default() };
        block.transfer_window = Window { seconds: 1.0, ops: 2000, bytes: 1_000_000_000 };
        for _ in 0..2000 {
            block.latency.record(latency_ns);
        }
        Measured { block, cpu_s, core_s: Some(cpu_s), device_bytes: (1_030_000_000, Some(1_010_000_000)) }
    }

    fn found(peer: Peer, ours: f64, slower: u64) -> Comparison {
        let blocks: Vec<_> = (0..10)
            .map(|pair| {
                let noise = 1.0 + f64::from(pair) / 1000.0;
                (measured(ours * noise, 1_000_000 * slower), measured(0.2, 1_000_000))
            })
            .collect();
        let pairs = Pairs {
            way: "its way".to_owned(),
            tried: vec![("its way".to_owned(), 0.2)],
            ratios: Ratios::of(&blocks),
            blocks,
            memory_bytes: (1 << 20, Some(2 << 20)),
        };
        Comparison {
            plan: Plan {
                cells: vec![CELLS[0]],
                peers: vec![peer],
                pairs: 10,
                block: Duration::from_secs(1),
                cores: (0, 1),
                node: "forebay-node".into(),
                engine: "uring".to_owned(),
                copies: false,
                folder: "/".into(),
            },
            environment: Environment::default(),
            congestion: "reno".to_owned(),
            is_own_network: true,
            pages: Some((511, 512)),
            compared: vec![
                Compared { cell: CELLS[0], peer, outcome: Ok(pairs) },
                Compared { cell: CELLS[1], peer: Peer::Caddy, outcome: Err("not installed".to_owned()) },
            ],
        }
    }

    #[test]
    fn a_row_is_lost_by_its_cost_and_beside_nginx_by_its_slowest() {
        for (peer, cost, slower, lost) in [
            (Peer::Nginx, 0.2, 1, 0),
            (Peer::Nginx, 0.22, 1, 1),
            (Peer::Nginx, 0.2, 2, 1),
            (Peer::Varnish, 0.2, 1, 1),
            (Peer::Varnish, 0.13, 2, 0),
        ] {
            let found = found(peer, cost, slower);
            assert_eq!(found.lost(), (lost, 1), "{peer:?} {cost} {slower}");
            let text = found.text();
            assert_eq!(text.contains("**lost**"), lost == 1, "{text}");
            assert!(text.contains("not compared: not installed"), "{text}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }

    #[test]
    fn every_block_is_kept() {
        let json = found(Peer::Nginx, 0.2, 1).to_json();
        assert_eq!(json["rows"][0]["pairs"].as_array().map(Vec::len), Some(10));
        assert_eq!(json["rows"][0]["holds"], true);
        assert_eq!(json["rows"][1]["missing"], "not installed");
    }
}
