//! What blocks of requests say together, and how it is printed.
#![forbid(unsafe_code)]

use crate::recorder::Block;
use crate::statistics::median_of;
use serde_json::{Value, json};
use std::fmt;

/// One block, and what the server had of the processor meanwhile.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) block: Block,
    /// Processor time of the server, seconds.
    pub(super) server_cpu_s: Option<f64>,
    /// Time that its core was busy, seconds.
    pub(super) server_core_s: Option<f64>,
}

impl Measured {
    /// For programs.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "requests": self.block.ops,
            "bytes": self.block.bytes,
            "seconds": self.block.transfer_window.seconds,
            "p50_ms": self.block.latency.percentile_ms(0.5),
            "p99_ms": self.block.latency.percentile_ms(0.99),
            "server_cpu_s": self.server_cpu_s,
            "server_core_s": self.server_core_s,
            "client_cpu_s": self.block.client_cpu_seconds,
        })
    }
}

/// Medians of blocks and percentiles of all of them; `None` is what cannot be said.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) requests_s: Option<f64>,
    pub(super) gb_s: Option<f64>,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    p999_ms: Option<f64>,
    server_cpu_s_per_gb: Option<f64>,
    server_core_s_per_gb: Option<f64>,
    client_cpu_s_per_gb: Option<f64>,
    client_share: Option<f64>,
}

/// Names of the columns in which [`Figures`] are printed.
pub(super) const HEADINGS: &str =
    "    req/s    GB/s   P50 ms   P99 ms    P99.9  srv CPUs/GB    core  cli CPUs/GB   busy";

impl Figures {
    pub(super) fn of(blocks: &[Measured]) -> Self {
        let of = |figure: &dyn Fn(&Measured) -> Option<f64>| median_of(blocks.iter().filter_map(figure));
        let gigabytes =
            |one: &Measured| Some(one.block.bytes as f64 / 1e9).filter(|gigabytes| *gigabytes > 0.0);
        let mut merged = Block::default();
        for one in blocks {
            merged.merge(&one.block);
        }
        Self {
            requests_s: of(&|one| one.block.transfer_window.qps()),
            gb_s: of(&|one| {
                Some(gigabytes(one)? / Some(one.block.transfer_window.seconds).filter(|s| *s > 0.0)?)
            }),
            p50_ms: merged.latency.percentile_ms(0.5),
            p99_ms: merged.latency.percentile_ms(0.99),
            p999_ms: merged.latency.percentile_ms(0.999),
            server_cpu_s_per_gb: of(&|one| Some(one.server_cpu_s? / gigabytes(one)?)),
            server_core_s_per_gb: of(&|one| Some(one.server_core_s? / gigabytes(one)?)),
            client_cpu_s_per_gb: of(&|one| Some(one.block.client_cpu_seconds / gigabytes(one)?)),
            client_share: of(&|one| one.block.client_cpu()),
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>9}{:>8}{:>9}{:>9}{:>9}  {:>11}{:>8}  {:>11}{:>7}",
            say(self.requests_s, 0),
            say(self.gb_s, 2),
            say(self.p50_ms, 2),
            say(self.p99_ms, 2),
            say(self.p999_ms, 2),
            say(self.server_cpu_s_per_gb, 3),
            say(self.server_core_s_per_gb, 3),
            say(self.client_cpu_s_per_gb, 3),
            say(self.client_share, 2),
        )
    }
}

/// A figure with so many digits behind its point; a dash where there is none.
pub(super) fn say(figure: Option<f64>, digits: usize) -> String {
    figure.map_or("-".to_owned(), |figure| format!("{figure:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_measured_is_said_as_nothing() {
        let nothing = Figures::of(&[]);
        assert_eq!(nothing, Figures::default());
        let text = nothing.to_string();
        assert_eq!(text.len(), HEADINGS.len());
        assert!(text.split_whitespace().all(|figure| figure == "-"), "{text}");
    }
}
