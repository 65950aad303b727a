//! From blocks to a ratio one may believe: paired, with an interval, or with an admission that there is none.
//!
//! Requests inside a block are correlated, so the unit of resampling is the pair of blocks. The bootstrap is
//! seeded: the same blocks give the same interval.
#![forbid(unsafe_code)]

use crate::content::splitmix64;
use crate::recorder::Metric;
use hdrhistogram::Histogram;

/// Below this many pairs there is no interval.
pub const PAIRS_MIN: usize = 5;
const RESAMPLES: usize = 10_000;
// Each resample of a percentile merges histograms; the interval's ends do not need more.
const PERCENTILE_RESAMPLES: usize = 400;

/// How many times A is B.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ratio {
    /// The estimate.
    pub estimate: Option<f64>,
    /// Where it lies with 95 % confidence; absent below five pairs.
    pub interval: Option<[f64; 2]>,
    /// Pairs that it rests on.
    pub pairs: usize,
}

/// The ratio of the first of each pair to the second: the median of the log ratios, and a bootstrap over pairs.
/// Pairs that have no ratio (a side with nothing in it) are left out and not counted.
pub fn paired_ratio(pairs: &[(Option<f64>, Option<f64>)], seed: u64) -> Ratio {
    let logs: Vec<f64> = pairs
        .iter()
        .filter_map(|pair| match *pair {
            (Some(a), Some(b)) if a > 0.0 && b > 0.0 => Some((a / b).ln()),
            _ => None,
        })
        .collect();
    if logs.is_empty() {
        return Ratio::default();
    }
    let mut sample = logs.clone();
    let estimate = Some(median(&mut sample).exp());
    let interval = (logs.len() >= PAIRS_MIN).then(|| {
        let mut draws = Draws { state: seed };
        let mut estimates: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                sample.clear();
                sample.extend((0..logs.len()).map(|_| logs[draws.below(logs.len())]));
                median(&mut sample)
            })
            .collect();
        middle_95(&mut estimates)
    });
    Ratio { estimate, interval, pairs: logs.len() }
}

/// The ratio of one percentile of A to that of B: of the merged histograms, and a bootstrap over pairs of blocks.
pub fn percentile_ratio(a: &[&Metric], b: &[&Metric], q: f64, seed: u64) -> Ratio {
    let pairs = a.len().min(b.len());
    let of = |side: &[&Metric], chosen: &mut dyn Iterator<Item = usize>| {
        let mut merged = Metric::default();
        for at in chosen {
            merged.merge(side[at]);
        }
        merged.percentile_ms(q)
    };
    let (Some(all_a), Some(all_b)) = (of(a, &mut (0..pairs)), of(b, &mut (0..pairs))) else {
        return Ratio { pairs, ..Ratio::default() };
    };
    if all_b <= 0.0 || all_a <= 0.0 {
        return Ratio { pairs, ..Ratio::default() };
    }
    let interval = (pairs >= PAIRS_MIN).then(|| {
        let mut draws = Draws { state: seed };
        let mut estimates = Vec::with_capacity(PERCENTILE_RESAMPLES);
        for _ in 0..PERCENTILE_RESAMPLES {
            let chosen: Vec<usize> = (0..pairs).map(|_| draws.below(pairs)).collect();
            if let (Some(one_a), Some(one_b)) =
                (of(a, &mut chosen.iter().copied()), of(b, &mut chosen.iter().copied()))
                && one_a > 0.0
                && one_b > 0.0
            {
                estimates.push((one_a / one_b).ln());
            }
        }
        middle_95(&mut estimates)
    });
    Ratio { estimate: Some(all_a / all_b), interval, pairs }
}

/// Non-empty bins of a histogram: upper bound in microseconds, count.
pub fn bins(histogram: &Histogram<u64>) -> Vec<(u64, u64)> {
    // Half-octave steps: enough to see modes, few enough to read.
    let mut out = Vec::new();
    let mut edge = 1.0_f64;
    let (mut upper, mut count) = (1_u64, 0_u64);
    for value in histogram.iter_recorded() {
        while value.value_iterated_to() > upper {
            if count > 0 {
                out.push((upper, count));
                count = 0;
            }
            edge *= 1.15;
            upper = edge.ceil() as u64;
        }
        count += value.count_at_value();
    }
    if count > 0 {
        out.push((upper, count));
    }
    out
}

/// The middle one, or the mean of the two in the middle; `None` of nothing.
pub fn median_of(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| median(&mut values))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values[middle]
    }
}

fn middle_95(logs: &mut [f64]) -> [f64; 2] {
    logs.sort_by(f64::total_cmp);
    let at = |q: f64| logs[((logs.len() - 1) as f64 * q).round() as usize].exp();
    [at(0.025), at(0.975)]
}

struct Draws {
    state: u64,
}

impl Draws {
    fn below(&mut self, bound: usize) -> usize {
        self.state = splitmix64(self.state);
        (self.state % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(values: &[(f64, f64)]) -> Vec<(Option<f64>, Option<f64>)> {
        values.iter().map(|(a, b)| (Some(*a), Some(*b))).collect()
    }

    #[test]
    fn few_pairs_give_an_estimate_and_no_interval() {
        assert_eq!(paired_ratio(&[], 1), Ratio::default());
        assert_eq!(paired_ratio(&[(None, Some(1.0)), (Some(0.0), Some(1.0))], 1), Ratio::default());
        let ratio = paired_ratio(&pairs(&[(2.0, 1.0), (4.0, 1.0), (3.0, 1.0)]), 1);
        assert!((ratio.estimate.expect("some") - 3.0).abs() < 1e-9);
        assert_eq!((ratio.interval, ratio.pairs), (None, 3));
    }

    #[test]
    fn the_interval_holds_the_estimate_and_is_the_same_twice() {
        let values = pairs(&[(2.0, 1.0), (2.1, 1.0), (1.9, 1.0), (2.05, 1.0), (1.95, 1.0), (2.2, 1.0)]);
        let ratio = paired_ratio(&values, 42);
        let [low, high] = ratio.interval.expect("six pairs");
        let estimate = ratio.estimate.expect("some");
        assert!(low <= estimate && estimate <= high && low >= 1.9 && high <= 2.2 + 1e-9);
        assert_eq!(ratio, paired_ratio(&values, 42));
    }

    #[test]
    fn a_side_against_itself_is_one() {
        let mut metric = Metric::default();
        for i in 1..=2000 {
            metric.record(i * 1000);
        }
        let side = vec![&metric; 6];
        let ratio = percentile_ratio(&side, &side, 0.99, 7);
        assert_eq!((ratio.estimate, ratio.interval), (Some(1.0), Some([1.0, 1.0])));
        let none = Metric::default();
        assert_eq!(percentile_ratio(&[&none], &[&none], 0.5, 7).estimate, None);
    }

    #[test]
    fn a_side_twice_as_slow_is_two() {
        let blocks: Vec<(Metric, Metric)> = (0..6)
            .map(|block| {
                let (mut slow, mut fast) = (Metric::default(), Metric::default());
                for i in 0..500 {
                    let span = 1_000_000 + splitmix64(block * 1000 + i) % 1_000_000;
                    slow.record(2 * span);
                    fast.record(span);
                }
                (slow, fast)
            })
            .collect();
        let slow: Vec<&Metric> = blocks.iter().map(|block| &block.0).collect();
        let fast: Vec<&Metric> = blocks.iter().map(|block| &block.1).collect();
        let [low, high] = percentile_ratio(&slow, &fast, 0.5, 1).interval.expect("six pairs");
        assert!(low < 2.01 && high > 1.99);
        let means: Vec<_> = blocks.iter().map(|block| (block.0.mean_ms(), block.1.mean_ms())).collect();
        let [low, high] = paired_ratio(&means, 1).interval.expect("six pairs");
        assert!(low < 2.001 && high > 1.999);
    }

    #[test]
    fn bins_hold_every_record_once() {
        let mut metric = Metric::default();
        for i in 0..1000 {
            metric.record(splitmix64(i) % 100_000_000);
        }
        let bins = bins(metric.histogram());
        assert_eq!(bins.iter().map(|bin| bin.1).sum::<u64>(), 1000);
        assert!(bins.is_sorted_by(|a, b| a.0 < b.0));
    }
}
