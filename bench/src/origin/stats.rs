//! What the emulator counts, and the proof that it was on time.
//!
//! The direct column is slow because of the model; the lateness histogram shows that it is not slow because the
//! emulator starved: actual write minus deadline, for writes that were ours to make and not held up by the peer.
#![forbid(unsafe_code)]

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counters since the start or the last reset.
pub struct Stats {
    counts: Counts,
    lateness_us: Histogram<u64>,
}

/// The counters as they are shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// All requests for objects and listings, not those of the emulator's own door.
    pub requests: u64,
    /// By method (a listing is LIST), then status.
    pub by_method: BTreeMap<String, BTreeMap<String, u64>>,
    /// GETs answered with a body.
    pub gets_with_body: u64,
    /// Requests that carried If-None-Match or If-Match.
    pub conditional: u64,
    /// Of them, answered 304.
    pub not_modified: u64,
    /// Bytes of object bodies written to sockets.
    pub bytes_served: u64,
    /// Responses that the cap or the request limit delayed by a millisecond or more.
    pub qos_delayed: u64,
    /// Writes that came late only because the peer did not read.
    pub peer_blocked: u64,
    /// Connections accepted.
    pub connections: u64,
}

/// Actual write minus deadline, microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lateness {
    /// How many writes had a deadline.
    pub n: u64,
    /// Percentiles; `null` while there is none.
    pub p50: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
    /// The worst.
    pub max: Option<u64>,
}

/// What `GET /_emu/stats` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The counters.
    #[serde(flatten)]
    pub counts: Counts,
    /// The proof.
    pub lateness_us: Lateness,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            counts: Counts::default(),
            lateness_us: Histogram::new_with_bounds(1, 10_000_000, 3).expect("constant bounds"),
        }
    }
}

impl Stats {
    /// One answered request.
    pub fn count_request(&mut self, method: &str, status: u16) {
        self.counts.requests += 1;
        let statuses = match self.counts.by_method.get_mut(method) {
            Some(statuses) => statuses,
            None => self.counts.by_method.entry(method.to_owned()).or_default(),
        };
        *statuses.entry(status.to_string()).or_default() += 1;
        self.counts.not_modified += u64::from(status == 304);
    }

    /// The counters, to be counted up.
    pub fn counts_mut(&mut self) -> &mut Counts {
        &mut self.counts
    }

    /// One write that had a deadline.
    pub fn count_lateness(&mut self, late_ns: u64) {
        self.lateness_us.saturating_record(late_ns / 1000);
    }

    /// All of it, as shown.
    pub fn report(&self) -> Report {
        let n = self.lateness_us.len();
        let at = |q: f64| (n > 0).then(|| self.lateness_us.value_at_quantile(q));
        Report {
            counts: self.counts.clone(),
            lateness_us: Lateness {
                n,
                p50: at(0.5),
                p99: at(0.99),
                max: (n > 0).then(|| self.lateness_us.max()),
            },
        }
    }

    /// Everything to zero.
    pub fn reset(&mut self) {
        self.counts = Counts::default();
        self.lateness_us.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_counted_is_null_and_not_zero_microseconds() {
        let mut stats = Stats::default();
        assert_eq!(stats.report().lateness_us, Lateness::default());
        stats.count_lateness(250_000);
        stats.count_request("GET", 206);
        stats.count_request("GET", 304);
        let report = stats.report();
        assert_eq!((report.lateness_us.n, report.lateness_us.p99), (1, Some(250)));
        assert_eq!((report.counts.requests, report.counts.not_modified), (2, 1));
        assert_eq!(report.counts.by_method["GET"]["206"], 1);
        let text = serde_json::to_string(&report).expect("plain");
        assert_eq!(serde_json::from_str::<Report>(&text).expect("round trip"), report);
        stats.reset();
        assert_eq!(stats.report().counts, Counts::default());
    }
}
