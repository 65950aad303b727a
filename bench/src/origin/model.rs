//! How slow the emulated store is, and why: the timing model.
//!
//! A request waits for its first byte (lognormal, by class), then its body comes at one pace drawn for the whole
//! request; all bodies share one cap. Every draw is a pure function of (seed, key, how often that key was asked),
//! so both sides of a comparison meet the same luck. The parameters of `tos-intranet-v1` were fitted to the
//! document's own intranet column: calibration, not validation.
#![forbid(unsafe_code)]

use crate::clock::MILLISECOND_NS;
use crate::content::splitmix64;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// All parameters of the model. What is 0 is off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What reports call it.
    pub name: String,
    /// GET, time to the first byte, data that was used a moment ago.
    pub first_byte_hot: Lognormal,
    /// The same, data that was not.
    pub first_byte_cold: Lognormal,
    /// HEAD; PUT and DELETE use it too, for want of a published figure.
    pub head: Lognormal,
    /// One page of a listing.
    pub list: Lognormal,
    /// The pace of one body; the shares sum to 1. Empty: no pacing.
    pub pace: Vec<PaceMode>,
    /// All bodies together, MiB/s.
    pub cap_mib_s: f64,
    /// What may pass at once after an idle time, MiB.
    pub cap_burst_mib: f64,
    /// All requests together, a second; above it they are delayed, not refused.
    pub requests_per_s: f64,
}

/// A lognormal time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lognormal {
    /// Milliseconds; 0 is no delay at all.
    pub median_ms: f64,
    /// Of the logarithm.
    pub sigma: f64,
}

/// One mode of the mixture that paces bodies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaceMode {
    /// Of all requests, 0 to 1.
    pub share: f64,
    /// Milliseconds for a MiB.
    pub median_ms_per_mib: f64,
    /// Of the logarithm.
    pub sigma: f64,
}

/// Which first byte a dataset gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Recently written or read.
    #[default]
    Hot,
    /// Neither.
    Cold,
}

/// What kind of request is delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A body is read.
    Get(Class),
    /// Only facts are asked, or a write is acknowledged.
    Head,
    /// One page of names.
    List,
}

/// One request's luck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// From the whole request head to the first byte of the answer.
    pub first_byte_ns: u64,
    /// Nanoseconds for each MiB of the body.
    pub pace_ns_per_mib: u64,
}

impl Profile {
    /// A built-in profile.
    ///
    /// # Errors
    /// Names the ones there are.
    pub fn named(name: &str) -> Result<Self, String> {
        match name {
            "tos-intranet-v1" => Ok(Self {
                name: name.to_owned(),
                first_byte_hot: Lognormal { median_ms: 5.9, sigma: 0.50 },
                first_byte_cold: Lognormal { median_ms: 15.3, sigma: 0.58 },
                head: Lognormal { median_ms: 12.0, sigma: 0.40 },
                list: Lognormal { median_ms: 20.0, sigma: 0.0 },
                pace: vec![
                    PaceMode { share: 0.915, median_ms_per_mib: 9.45, sigma: 0.155 },
                    PaceMode { share: 0.085, median_ms_per_mib: 16.3, sigma: 0.36 },
                ],
                cap_mib_s: 1280.0,
                cap_burst_mib: 8.0,
                requests_per_s: 10_000.0,
            }),
            "raw" => {
                let none = Lognormal { median_ms: 0.0, sigma: 0.0 };
                Ok(Self {
                    name: name.to_owned(),
                    first_byte_hot: none,
                    first_byte_cold: none,
                    head: none,
                    list: none,
                    pace: Vec::new(),
                    cap_mib_s: 0.0,
                    cap_burst_mib: 0.0,
                    requests_per_s: 0.0,
                })
            }
            _ => Err(format!("no profile `{name}`; there are tos-intranet-v1 and raw")),
        }
    }

    /// Refuses what cannot be meant.
    ///
    /// # Errors
    /// Names the field.
    pub fn check(&self) -> Result<(), String> {
        let times = [
            ("first_byte_hot", self.first_byte_hot),
            ("first_byte_cold", self.first_byte_cold),
            ("head", self.head),
            ("list", self.list),
        ];
        for (name, time) in times {
            if !(0.0..=60_000.0).contains(&time.median_ms) || !(0.0..=3.0).contains(&time.sigma) {
                return Err(format!("{name}: median_ms must be 0 to 60000 and sigma 0 to 3"));
            }
        }
        for mode in &self.pace {
            if !(0.0..=60_000.0).contains(&mode.median_ms_per_mib) || !(0.0..=3.0).contains(&mode.sigma) {
                return Err("pace: median_ms_per_mib must be 0 to 60000 and sigma 0 to 3".to_owned());
            }
        }
        let shares: f64 = self.pace.iter().map(|mode| mode.share).sum();
        if !self.pace.is_empty() && (shares - 1.0).abs() > 1e-6 {
            return Err(format!("pace: the shares sum to {shares}, not to 1"));
        }
        for (name, value) in [
            ("cap_mib_s", self.cap_mib_s),
            ("cap_burst_mib", self.cap_burst_mib),
            ("requests_per_s", self.requests_per_s),
        ] {
            if !(0.0..=1e9).contains(&value) {
                return Err(format!("{name}: must be 0 (off) to 1e9"));
            }
        }
        Ok(())
    }

    /// Whether any body of this profile is held back.
    pub fn is_paced(&self) -> bool {
        !self.pace.is_empty() || self.cap_mib_s > 0.0
    }

    /// Of the parameters in their written form: two runs with the same sum met the same store.
    pub fn sha256(&self) -> String {
        let written = serde_json::to_vec(self).expect("plain numbers and names");
        hex::encode(Sha256::digest(written))
    }

    /// The luck of the `ordinal`-th request (from 0) for one key in one round of a comparison.
    pub fn draw(&self, seed: u64, key_hash: u64, (round, ordinal): (u32, u32), kind: Kind) -> Draw {
        let salt = match kind {
            Kind::Get(_) => 0,
            Kind::Head => 1,
            Kind::List => 2,
        };
        let state = splitmix64(
            seed ^ splitmix64(
                key_hash ^ splitmix64((u64::from(round) << 34) | (u64::from(ordinal) << 2) | salt),
            ),
        );
        let mut luck = Luck { state };
        let first = match kind {
            Kind::Get(Class::Hot) => self.first_byte_hot,
            Kind::Get(Class::Cold) => self.first_byte_cold,
            Kind::Head => self.head,
            Kind::List => self.list,
        };
        let first_byte_ms = luck.lognormal(first.median_ms, first.sigma);
        let mut chosen = luck.uniform();
        let mut pace_ms = 0.0;
        for (at, mode) in self.pace.iter().enumerate() {
            if chosen < mode.share || at + 1 == self.pace.len() {
                pace_ms = luck.lognormal(mode.median_ms_per_mib, mode.sigma);
                break;
            }
            chosen -= mode.share;
        }
        Draw {
            first_byte_ns: (first_byte_ms * MILLISECOND_NS as f64) as u64,
            pace_ns_per_mib: (pace_ms * MILLISECOND_NS as f64) as u64,
        }
    }
}

struct Luck {
    state: u64,
}

impl Luck {
    // In (0, 1]: the logarithm below must never see 0.
    fn uniform(&mut self) -> f64 {
        self.state = splitmix64(self.state);
        ((self.state >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    fn lognormal(&mut self, median: f64, sigma: f64) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.uniform()).cos();
        median * (sigma * normal).exp()
    }
}

/// A shared rate, kept as the instant at which all that was granted will have passed. First come, first served.
#[derive(Clone, Debug)]
pub struct Bucket {
    ns_per_unit: f64,
    burst_ns: f64,
    passed_ns: f64,
}

impl Bucket {
    /// `per_second` units, `burst` of them at once after an idle time. A rate of 0 is no limit.
    pub fn new(per_second: f64, burst: f64) -> Self {
        let ns_per_unit = if per_second > 0.0 { 1e9 / per_second } else { 0.0 };
        Self { ns_per_unit, burst_ns: burst * ns_per_unit, passed_ns: 0.0 }
    }

    /// Grants `units` to who asks at `now_ns`; the instant from which they may pass.
    pub fn reserve(&mut self, now_ns: u64, units: f64) -> u64 {
        if self.ns_per_unit == 0.0 {
            return now_ns;
        }
        let now = now_ns as f64;
        self.passed_ns = self.passed_ns.max(now - self.burst_ns) + units * self.ns_per_unit;
        self.passed_ns.max(now) as u64
    }

    /// How long who asks at `now_ns` would wait for nothing at all: the queue before them.
    pub fn backlog_ns(&self, now_ns: u64) -> u64 {
        (self.passed_ns - now_ns as f64).max(0.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percentile(values: &mut [f64], q: f64) -> f64 {
        values.sort_by(f64::total_cmp);
        values[((values.len() - 1) as f64 * q) as usize]
    }

    #[test]
    fn a_draw_is_a_pure_function_of_seed_key_and_ordinal() {
        let profile = Profile::named("tos-intranet-v1").expect("built in");
        let draw = profile.draw(42, 7, (0, 3), Kind::Get(Class::Hot));
        assert_eq!(draw, profile.draw(42, 7, (0, 3), Kind::Get(Class::Hot)));
        assert_ne!(draw, profile.draw(43, 7, (0, 3), Kind::Get(Class::Hot)));
        assert_ne!(draw, profile.draw(42, 8, (0, 3), Kind::Get(Class::Hot)));
        assert_ne!(draw, profile.draw(42, 7, (0, 4), Kind::Get(Class::Hot)));
        assert_ne!(draw, profile.draw(42, 7, (1, 3), Kind::Get(Class::Hot)));
        assert_ne!(draw, profile.draw(42, 7, (0, 3), Kind::Head));
    }

    #[test]
    fn draws_have_the_medians_and_tails_that_were_asked_for() {
        let profile = Profile::named("tos-intranet-v1").expect("built in");
        let mut first = Vec::new();
        let mut pace = Vec::new();
        for key in 0..20_000 {
            let draw = profile.draw(1, splitmix64(key), (0, 0), Kind::Get(Class::Hot));
            first.push(draw.first_byte_ns as f64 / 1e6);
            pace.push(draw.pace_ns_per_mib as f64 / 1e6);
        }
        let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
        assert!((mean(&first) - 6.69).abs() < 0.1, "{}", mean(&first));
        assert!((percentile(&mut first, 0.5) - 5.9).abs() < 0.15);
        assert!((mean(&pace) - 10.2).abs() < 0.1, "{}", mean(&pace));
        assert!((percentile(&mut pace, 0.5) - 9.6).abs() < 0.2);
        assert!(percentile(&mut pace, 0.99) > 20.0, "the slow mode is there");
        let list = profile.draw(1, 2, (0, 3), Kind::List);
        assert_eq!(list.first_byte_ns, 20 * MILLISECOND_NS);
    }

    #[test]
    fn raw_never_waits() {
        let profile = Profile::named("raw").expect("built in");
        let draw = profile.draw(1, 2, (0, 3), Kind::Get(Class::Cold));
        assert_eq!(draw, Draw { first_byte_ns: 0, pace_ns_per_mib: 0 });
        assert!(!profile.is_paced());
        assert!(Profile::named("s4").unwrap_err().contains("raw"));
    }

    #[test]
    fn the_bucket_gives_its_rate_and_its_burst_and_no_more() {
        let mut bucket = Bucket::new(1000.0, 10.0);
        let start = 5_000_000_000;
        let mut last = start;
        for _ in 0..10 {
            last = bucket.reserve(start, 1.0);
        }
        assert_eq!(last, start, "the burst passes at once");
        for _ in 0..1000 {
            last = bucket.reserve(start, 1.0);
        }
        assert!((last - start).abs_diff(1_000_000_000) < 1000, "then a thousand take a second");
        assert!(bucket.backlog_ns(start) > 999_000_000);
        assert_eq!(
            bucket.reserve(start + 60_000_000_000, 1.0),
            start + 60_000_000_000,
            "idle time is not saved up"
        );
        let mut free = Bucket::new(0.0, 0.0);
        assert_eq!((free.reserve(9, 1e12), free.backlog_ns(9)), (9, 0));
    }

    #[test]
    fn the_sum_names_the_parameters() {
        let profile = Profile::named("tos-intranet-v1").expect("built in");
        let mut other = profile.clone();
        assert_eq!(profile.sha256(), other.sha256());
        other.cap_mib_s = 128.0;
        assert_ne!(profile.sha256(), other.sha256());
        assert!(other.check().is_ok());
        other.pace[0].share = 0.5;
        assert!(other.check().unwrap_err().contains("shares"));
    }
}
