//! What the machine itself allows: no server can be measured faster than this.
//!
//! ```text
//!   net     null server (core A) ══ loopback ══ our own client (core B): what is left for a server to lose
//! ```
//!
//! Run before any comparison. A figure near a ceiling says something of the ceiling, not of the server.
#![forbid(unsafe_code)]

pub mod net;
mod null;

use rustix::param::clock_ticks_per_second;

/// Processor time that a thread of this process has used, ns; `None` where the kernel does not tell.
fn thread_cpu_ns(thread: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Seconds that a core has not been idle since it runs, in ticks of 10 ms; `None` where the kernel does not tell.
fn core_busy_seconds(core: usize) -> Option<f64> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let name = format!("cpu{core}");
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name.as_str()))?;
    // user, nice, system, idle, iowait, irq, softirq
    let ticks: Vec<u64> =
        line.split_whitespace().skip(1).take(7).filter_map(|word| word.parse().ok()).collect();
    let [user, nice, system, _, _, irq, softirq] = ticks[..] else { return None };
    Some((user + nice + system + irq + softirq) as f64 / clock_ticks_per_second() as f64)
}
