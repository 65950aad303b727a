//! The monotonic clock in whole nanoseconds.
//!
//! One integer is what the wire loops compare, add and record; a typed instant would only be taken apart
//! again at every use. Everything that decides takes `now` as an argument, so only loops call this.
#![forbid(unsafe_code)]

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Nanoseconds in one millisecond.
pub const MILLISECOND_NS: u64 = 1_000_000;
/// Nanoseconds in one second.
pub const SECOND_NS: u64 = 1_000_000_000;

/// Nanoseconds of `CLOCK_MONOTONIC`. Comparable between processes of one host, until its next boot.
pub fn now_ns() -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::Monotonic);
    tv_sec as u64 * SECOND_NS + tv_nsec as u64
}

/// The span as the kernel wants it for a wait.
pub fn timespec(span_ns: u64) -> Timespec {
    Timespec { tv_sec: (span_ns / SECOND_NS) as i64, tv_nsec: (span_ns % SECOND_NS) as i64 }
}
