//! What a run says for itself: once for people, once for programs, from the same figures.

pub mod json;
pub mod text;

use crate::document;
use crate::environment::Environment;
use crate::recorder::Block;
use crate::run::Outcome;
use crate::statistics::{Ratio, paired_ratio, percentile_ratio};
use crate::workloads::Row;

/// Everything a report is made from.
pub struct Run {
    /// The command line.
    pub argv: Vec<String>,
    /// RFC 3339.
    pub started: String,
    /// RFC 3339.
    pub finished: String,
    /// Of the bootstrap.
    pub seed: u64,
    /// The machine.
    pub environment: Environment,
    /// The core of the client's thread, if it was pinned.
    pub client_core: Option<usize>,
    /// The URLs of both sides.
    pub direct_url: String,
    /// The other.
    pub accel_url: String,
    /// What was measured.
    pub outcomes: Vec<Outcome>,
}

impl Run {
    /// Why these figures prove nothing, if they do not.
    pub fn invalid_reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        for outcome in &self.outcomes {
            let name = outcome.workload.row.name();
            if outcome.verify_failures() > 0 {
                reasons.push(format!("{name}: {} answers failed verification", outcome.verify_failures()));
            }
            if outcome.errors() > 0 {
                reasons.push(format!("{name}: {} requests failed", outcome.errors()));
            }
            reasons.extend(outcome.invalid_reasons());
        }
        reasons
    }

    /// 0 sound, 1 errors, 3 wrong bytes, 4 proves nothing.
    pub fn exit_code(&self) -> u8 {
        if self.outcomes.iter().any(|outcome| outcome.verify_failures() > 0) {
            3
        } else if self.outcomes.iter().any(|outcome| outcome.errors() > 0) {
            1
        } else if self.invalid_reasons().is_empty() {
            0
        } else {
            4
        }
    }
}

/// A over B, for each figure.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ratios {
    /// Of exact mean latencies.
    pub latency_mean: Ratio,
    /// Of means of whole milliseconds; none when the accelerated one is 0.
    pub latency_tool: Ratio,
    /// Of medians.
    pub latency_p50: Ratio,
    /// 90th.
    pub latency_p90: Ratio,
    /// 95th.
    pub latency_p95: Ratio,
    /// 99th.
    pub latency_p99: Ratio,
    /// B over A, in the tool's window.
    pub qps: Ratio,
    /// B over A, in the transfer window.
    pub bandwidth: Ratio,
}

impl Ratios {
    /// From the pairs of one workload.
    pub fn of(outcome: &Outcome, seed: u64) -> Self {
        let pairs = |figure: &dyn Fn(&Block) -> Option<f64>| {
            outcome.direct.iter().zip(&outcome.accel).map(|(a, b)| (figure(a), figure(b))).collect::<Vec<_>>()
        };
        let inverse = |figure: &dyn Fn(&Block) -> Option<f64>| {
            pairs(figure).into_iter().map(|(a, b)| (b, a)).collect::<Vec<_>>()
        };
        let direct: Vec<_> = outcome.direct.iter().map(|block| &block.latency).collect();
        let accel: Vec<_> = outcome.accel.iter().map(|block| &block.latency).collect();
        let percentile = |q: f64| percentile_ratio(&direct, &accel, q, seed);
        Self {
            latency_mean: paired_ratio(&pairs(&|block| block.latency.mean_ms()), seed),
            latency_tool: paired_ratio(&pairs(&|block| block.latency.mean_tool_ms()), seed),
            latency_p50: percentile(0.5),
            latency_p90: percentile(0.9),
            latency_p95: percentile(0.95),
            latency_p99: percentile(0.99),
            qps: paired_ratio(&inverse(&|block| block.tool_window().qps()), seed),
            bandwidth: paired_ratio(&inverse(&|block| block.transfer_window.mib_s()), seed),
        }
    }
}

/// Which of the document's oddities must be said beside this workload.
pub fn notes(outcome: &Outcome) -> Vec<&'static str> {
    match outcome.workload.row {
        Row::Bulk => vec!["I1", "I2", "I3", "I14"],
        Row::Download => vec!["I12", "I14"],
    }
}

/// Per cent that `run` lies above `doc`.
pub fn delta_pct(run: Option<f64>, doc: f64) -> Option<f64> {
    run.map(|run| (run / doc - 1.0) * 100.0)
}

/// Whether the demo's promise holds for this workload: the ratio it is judged by, and the document's.
pub fn promise(outcome: &Outcome, ratios: &Ratios) -> (&'static str, Option<f64>, f64) {
    match outcome.workload.row {
        Row::Bulk => ("bulk QPS", ratios.qps.estimate, document::BULK_QPS_RATIO),
        Row::Download => ("download mean", ratios.latency_mean.estimate, document::DOWNLOAD_MEAN_RATIO),
    }
}
