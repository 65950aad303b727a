//! What one block measured: histograms, windows, counts. Filled by the client, read by statistics and reports.
//!
//! Only whole, verified answers enter a histogram; everything else is counted under its own name. Memory is
//! bounded by the histograms and one line a second, however long the run.
#![forbid(unsafe_code)]

use crate::clock::SECOND_NS;
use hdrhistogram::Histogram;
use std::collections::BTreeMap;

/// The longest latency that is told apart, microseconds: two minutes.
pub const LATENCY_US_MAX: u64 = 120_000_000;
const SERIES_SECONDS_MAX: usize = 3600;

/// One measured time: a histogram in microseconds beside the exact sums.
#[derive(Clone, Debug)]
pub struct Metric {
    histogram: Histogram<u64>,
    sum_ns: f64,
    sum_squares_ns: f64,
    sum_floor_ms: u64,
}

impl Default for Metric {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LATENCY_US_MAX, 3).expect("constant bounds");
        Self { histogram, sum_ns: 0.0, sum_squares_ns: 0.0, sum_floor_ms: 0 }
    }
}

impl Metric {
    /// Takes one span in.
    pub fn record(&mut self, span_ns: u64) {
        self.histogram.saturating_record((span_ns + 500) / 1000);
        self.sum_ns += span_ns as f64;
        self.sum_squares_ns += span_ns as f64 * span_ns as f64;
        self.sum_floor_ms += span_ns / 1_000_000;
    }

    /// Adds another's records.
    pub fn merge(&mut self, other: &Self) {
        self.histogram.add(&other.histogram).expect("the same bounds everywhere");
        self.sum_ns += other.sum_ns;
        self.sum_squares_ns += other.sum_squares_ns;
        self.sum_floor_ms += other.sum_floor_ms;
    }

    /// How many spans.
    pub fn n(&self) -> u64 {
        self.histogram.len()
    }

    /// The exact mean, ms.
    pub fn mean_ms(&self) -> Option<f64> {
        (self.n() > 0).then(|| self.sum_ns / self.n() as f64 / 1e6)
    }

    /// The mean of whole milliseconds, as the document's tool family reports it.
    pub fn mean_tool_ms(&self) -> Option<f64> {
        (self.n() > 0).then(|| self.sum_floor_ms as f64 / self.n() as f64)
    }

    /// Standard deviation of the spans, ms; from two on.
    pub fn deviation_ms(&self) -> Option<f64> {
        let n = self.n() as f64;
        (n >= 2.0).then(|| {
            ((self.sum_squares_ns - self.sum_ns * self.sum_ns / n) / (n - 1.0)).max(0.0).sqrt() / 1e6
        })
    }

    /// A percentile in ms, if ten records lie above it: fewer say nothing.
    pub fn percentile_ms(&self, q: f64) -> Option<f64> {
        (self.n() as f64 * (1.0 - q) >= 10.0 - 1e-9)
            .then(|| self.histogram.value_at_quantile(q) as f64 / 1000.0)
    }

    /// The sum of all spans, seconds.
    pub fn sum_s(&self) -> f64 {
        self.sum_ns / 1e9
    }

    /// The records themselves.
    pub fn histogram(&self) -> &Histogram<u64> {
        &self.histogram
    }
}

/// Where the node says a body came from (`x-forebay-cache`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheAnswer {
    /// From memory.
    Ram,
    /// From the drive.
    Drive,
    /// From the origin.
    Miss,
    /// Partly cached.
    Partial,
    /// Not cached on purpose.
    Bypass,
    /// No such header: not a node.
    Unsaid,
    /// A word that we do not know.
    Other,
}

impl CacheAnswer {
    /// Reads the header's value.
    pub fn parse(value: &[u8]) -> Self {
        match value.trim_ascii() {
            b"ram" => Self::Ram,
            b"drive" => Self::Drive,
            b"miss" => Self::Miss,
            b"partial" => Self::Partial,
            b"bypass" => Self::Bypass,
            _ => Self::Other,
        }
    }

    /// As reports write it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Drive => "drive",
            Self::Miss => "miss",
            Self::Partial => "partial",
            Self::Bypass => "bypass",
            Self::Unsaid => "unsaid",
            Self::Other => "other",
        }
    }
}

/// One second of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Second {
    /// Whole answers in it.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Errors and verification failures in it.
    pub errors: u64,
    /// Percentiles of the latency, microseconds; absent when nothing ended in it.
    pub p50_us: Option<u64>,
    /// The 99th.
    pub p99_us: Option<u64>,
}

/// The span in which all workers were busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    /// Seconds.
    pub seconds: f64,
    /// Whole answers.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Window {
    /// Answers a second, if the window has any length.
    pub fn qps(&self) -> Option<f64> {
        (self.seconds > 0.0 && self.ops > 0).then(|| self.ops as f64 / self.seconds)
    }

    /// MiB a second.
    pub fn mib_s(&self) -> Option<f64> {
        (self.seconds > 0.0 && self.bytes > 0).then(|| self.bytes as f64 / crate::units::MIB / self.seconds)
    }
}

/// One block on one side, or several of them merged.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// First request byte to last body byte: the headline.
    pub latency: Metric,
    /// To the first body byte.
    pub ttfb: Metric,
    /// To the first byte of the head.
    pub ttfh: Metric,
    /// First to last body byte.
    pub transfer: Metric,
    /// Making a connection; never part of the headline.
    pub connect: Metric,
    /// The transfer window: first request to last answer.
    pub transfer_window: Window,
    /// All workers busy.
    pub steady_window: Window,
    /// Listing before it, seconds.
    pub list_seconds: f64,
    /// Pages listed.
    pub list_pages: u64,
    /// Whole, verified answers.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
    /// By kind.
    pub errors: BTreeMap<String, u64>,
    /// Answers whose bytes or facts were wrong.
    pub verify_failures: u64,
    /// What was wrong with the first of them.
    pub failures: Vec<String>,
    /// GET answers by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Answers by what the node says.
    pub cache: BTreeMap<CacheAnswer, u64>,
    /// Answers that the origin says it delayed.
    pub qos_delayed: u64,
    /// Connections made.
    pub connections: u64,
    /// One line a second.
    pub series: Vec<Second>,
    /// Processor time of the client's thread in the transfer window, seconds.
    pub client_cpu_seconds: f64,
    /// Time it was runnable and had no processor, seconds.
    pub client_wait_seconds: f64,
}

impl Block {
    /// Adds another block of the same side.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in [
            (&mut self.latency, &other.latency),
            (&mut self.ttfb, &other.ttfb),
            (&mut self.ttfh, &other.ttfh),
            (&mut self.transfer, &other.transfer),
            (&mut self.connect, &other.connect),
        ] {
            mine.merge(theirs);
        }
        for (mine, theirs) in [
            (&mut self.transfer_window, &other.transfer_window),
            (&mut self.steady_window, &other.steady_window),
        ] {
            mine.seconds += theirs.seconds;
            mine.ops += theirs.ops;
            mine.bytes += theirs.bytes;
        }
        self.list_seconds += other.list_seconds;
        self.list_pages += other.list_pages;
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.verify_failures += other.verify_failures;
        self.failures.extend(other.failures.iter().take(8 - self.failures.len().min(8)).cloned());
        self.qos_delayed += other.qos_delayed;
        self.connections += other.connections;
        self.client_cpu_seconds += other.client_cpu_seconds;
        self.client_wait_seconds += other.client_wait_seconds;
        for (kind, count) in &other.errors {
            *self.errors.entry(kind.clone()).or_default() += count;
        }
        for (status, count) in &other.statuses {
            *self.statuses.entry(*status).or_default() += count;
        }
        for (answer, count) in &other.cache {
            *self.cache.entry(*answer).or_default() += count;
        }
    }

    /// The window as the document's tool sees it: listing and transfer.
    pub fn tool_window(&self) -> Window {
        Window { seconds: self.transfer_window.seconds + self.list_seconds, ..self.transfer_window }
    }

    /// Mean number of requests under way (Little's law), if anything was measured.
    pub fn little(&self) -> Option<f64> {
        (self.transfer_window.seconds > 0.0 && self.ops > 0)
            .then(|| self.latency.sum_s() / self.transfer_window.seconds)
    }

    /// Share of one processor that the client used, 0 to 1; a window below a second is too short to say.
    pub fn client_cpu(&self) -> Option<f64> {
        (self.transfer_window.seconds >= 1.0).then(|| self.client_cpu_seconds / self.transfer_window.seconds)
    }

    /// All errors.
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Answers that say ram or drive, of all; `None` when the peer says nothing.
    pub fn hit_share(&self) -> Option<f64> {
        let said: u64 =
            self.cache.iter().filter(|(word, _)| **word != CacheAnswer::Unsaid).map(|(_, n)| n).sum();
        let all: u64 = self.cache.values().sum();
        (said > 0).then(|| {
            (self.cache_count(CacheAnswer::Ram) + self.cache_count(CacheAnswer::Drive)) as f64 / all as f64
        })
    }

    /// Answers that say `word`.
    pub fn cache_count(&self, word: CacheAnswer) -> u64 {
        self.cache.get(&word).copied().unwrap_or(0)
    }

    /// Whether the series of whole seconds has no excursion above 20 % and no slope above 10 % of its mean;
    /// `None` below five whole seconds.
    pub fn is_steady(&self) -> Option<bool> {
        let whole = self.series.len().checked_sub(1).filter(|whole| *whole >= 5)?;
        let ops: Vec<f64> = self.series[..whole].iter().map(|second| second.ops as f64).collect();
        let mean = ops.iter().sum::<f64>() / whole as f64;
        if mean == 0.0 {
            return Some(false);
        }
        let middle = (whole as f64 - 1.0) / 2.0;
        let (mut covariance, mut variance) = (0.0, 0.0);
        for (at, value) in ops.iter().enumerate() {
            covariance += (at as f64 - middle) * (value - mean);
            variance += (at as f64 - middle).powi(2);
        }
        let slope = covariance / variance * whole as f64;
        Some(ops.iter().all(|value| (value - mean).abs() <= 0.2 * mean) && slope.abs() <= 0.1 * mean)
    }
}

/// Cuts the running block into seconds.
pub struct SeriesCutter {
    start_ns: u64,
    now: Second,
    latency_us: Histogram<u64>,
}

impl SeriesCutter {
    /// From `start_ns` on.
    pub fn new(start_ns: u64) -> Self {
        let latency_us = Histogram::new_with_bounds(1, LATENCY_US_MAX, 2).expect("constant bounds");
        Self { start_ns, now: Second { ops: 0, bytes: 0, errors: 0, p50_us: None, p99_us: None }, latency_us }
    }

    /// One whole answer.
    pub fn answer(&mut self, block: &mut Block, now_ns: u64, latency_ns: u64, bytes: u64) {
        self.advance(block, now_ns);
        self.now.ops += 1;
        self.now.bytes += bytes;
        self.latency_us.saturating_record((latency_ns + 500) / 1000);
    }

    /// One failure.
    pub fn failure(&mut self, block: &mut Block, now_ns: u64) {
        self.advance(block, now_ns);
        self.now.errors += 1;
    }

    /// The rest.
    pub fn finish(mut self, block: &mut Block) {
        self.cut(block);
    }

    fn advance(&mut self, block: &mut Block, now_ns: u64) {
        while now_ns.saturating_sub(self.start_ns) >= SECOND_NS && block.series.len() < SERIES_SECONDS_MAX {
            self.cut(block);
            self.start_ns += SECOND_NS;
        }
    }

    fn cut(&mut self, block: &mut Block) {
        if !self.latency_us.is_empty() {
            self.now.p50_us = Some(self.latency_us.value_at_quantile(0.5));
            self.now.p99_us = Some(self.latency_us.value_at_quantile(0.99));
        }
        block.series.push(self.now.clone());
        self.now = Second { ops: 0, bytes: 0, errors: 0, p50_us: None, p99_us: None };
        self.latency_us.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_split_histograms_equals_the_whole() {
        let (mut whole, mut even, mut odd) = (Metric::default(), Metric::default(), Metric::default());
        for i in 0..10_000_u64 {
            let span = crate::content::splitmix64(i) % 50_000_000;
            whole.record(span);
            if i % 2 == 0 { even.record(span) } else { odd.record(span) }
        }
        even.merge(&odd);
        assert_eq!(even.histogram(), whole.histogram());
        assert_eq!(even.mean_tool_ms(), whole.mean_tool_ms());
        assert!((even.mean_ms().expect("some") - whole.mean_ms().expect("some")).abs() < 1e-9);
        for q in [0.5, 0.9, 0.95, 0.99] {
            assert_eq!(even.percentile_ms(q), whole.percentile_ms(q));
        }
    }

    #[test]
    fn a_percentile_needs_ten_records_above_it() {
        let mut metric = Metric::default();
        assert_eq!((metric.mean_ms(), metric.percentile_ms(0.5), metric.deviation_ms()), (None, None, None));
        for _ in 0..999 {
            metric.record(1_500_000);
        }
        assert_eq!(metric.percentile_ms(0.99), None);
        assert!(metric.percentile_ms(0.95).is_some());
        metric.record(1_500_000);
        assert!(metric.percentile_ms(0.99).is_some());
        assert_eq!((metric.mean_ms(), metric.mean_tool_ms()), (Some(1.5), Some(1.0)));
    }

    #[test]
    fn empty_blocks_have_no_rates() {
        let block = Block::default();
        assert_eq!(
            (block.little(), block.client_cpu(), block.hit_share(), block.is_steady()),
            (None, None, None, None)
        );
        assert_eq!((block.tool_window().qps(), block.tool_window().mib_s()), (None, None));
    }

    #[test]
    fn seconds_are_cut_where_they_end() {
        let mut block = Block::default();
        let mut cutter = SeriesCutter::new(0);
        for second in 0..8 {
            for _ in 0..10 {
                cutter.answer(&mut block, second * SECOND_NS + 5, 1_000_000, 100);
            }
        }
        cutter.failure(&mut block, 9 * SECOND_NS + 1);
        cutter.finish(&mut block);
        let ops: Vec<u64> = block.series.iter().map(|second| second.ops).collect();
        assert_eq!(ops, [10, 10, 10, 10, 10, 10, 10, 10, 0, 0]);
        assert_eq!(
            (block.series[9].errors, block.series[0].p50_us.is_some(), block.series[8].p50_us),
            (1, true, None)
        );
        assert_eq!(block.is_steady(), Some(false), "the empty second is an excursion");
        block.series.truncate(8);
        assert_eq!(block.is_steady(), Some(true));
    }

    #[test]
    fn the_node_is_believed_by_its_own_words() {
        let mut block = Block::default();
        block.cache.insert(CacheAnswer::parse(b" ram "), 3);
        block.cache.insert(CacheAnswer::parse(b"miss"), 1);
        assert_eq!(block.hit_share(), Some(0.75));
        let unsaid = Block { cache: [(CacheAnswer::Unsaid, 4)].into(), ..Block::default() };
        assert_eq!(unsaid.hit_share(), None);
    }
}
