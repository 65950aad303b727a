//! Processors and those who use them: pinning, and time as the scheduler accounts it.
//!
//! Times of threads and processes are nanoseconds that the scheduler charged (schedstat), those of a core are ticks of
//! 10 ms that it was not idle, whoever had it. `None` is what the kernel does not tell.
#![forbid(unsafe_code)]

use anyhow::{Result, bail};
use core_affinity::CoreId;
use rustix::param::clock_ticks_per_second;
use std::fs::{read_dir, read_to_string};

/// What a process and all of its descendants have used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    /// Processor time, seconds.
    pub(crate) cpu_s: f64,
    /// Memory, bytes; what several share is counted once (proportional set size).
    pub(crate) memory_bytes: u64,
    /// Read from devices, bytes.
    pub(crate) device_read_bytes: u64,
}

/// Ties the calling thread, and what it starts from now on, to a core.
///
/// # Errors
/// This process may not use it; those that it may use are named.
pub(crate) fn pin(core: usize) -> Result<()> {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    // A thread that is pinned already sees its own core alone; the kernel refuses what the process may not use.
    if !core_affinity::set_for_current(CoreId { id: core }) {
        bail!("core {core}: this process may use {:?}", cores.iter().map(|core| core.id).collect::<Vec<_>>());
    }
    Ok(())
}

/// Runs `start` on a thread that is tied to a core: the processes that it starts are tied to it too.
///
/// # Errors
/// As [`pin`], and those of `start`.
pub(crate) fn on_core<T: Send>(core: usize, start: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let started = std::thread::scope(|scope| scope.spawn(|| pin(core).and_then(|()| start())).join());
    started.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Processor time that a thread of this process has used, ns.
pub(crate) fn thread_cpu_ns(thread: i32) -> Option<u64> {
    first_number(&read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?)
}

/// Seconds that a core has not been idle since it runs.
pub(crate) fn core_busy_seconds(core: usize) -> Option<f64> {
    let text = read_to_string("/proc/stat").ok()?;
    let name = format!("cpu{core}");
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name.as_str()))?;
    // user, nice, system, idle, iowait, irq, softirq
    let ticks: Vec<u64> =
        line.split_whitespace().skip(1).take(7).filter_map(|word| word.parse().ok()).collect();
    let [user, nice, system, _, _, irq, softirq] = ticks[..] else { return None };
    Some((user + nice + system + irq + softirq) as f64 / clock_ticks_per_second() as f64)
}

/// What `process` and its descendants have used; those that have ended are not in it.
pub(crate) fn usage_of(process: u32) -> Usage {
    let mut family = vec![process];
    let mut at = 0;
    while let Some(one) = family.get(at).copied() {
        for task in tasks(one) {
            let children = read_to_string(format!("{task}/children")).unwrap_or_default();
            family.extend(children.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        }
        at += 1;
    }
    let mut usage = Usage::default();
    for one in family {
        let cpu_ns: u64 = tasks(one)
            .iter()
            .filter_map(|task| first_number(&read_to_string(format!("{task}/schedstat")).ok()?))
            .sum();
        usage.cpu_s += cpu_ns as f64 / 1e9;
        usage.memory_bytes += field(&format!("/proc/{one}/smaps_rollup"), "Pss:").unwrap_or(0) * 1024;
        usage.device_read_bytes += field(&format!("/proc/{one}/io"), "read_bytes:").unwrap_or(0);
    }
    usage
}

fn tasks(process: u32) -> Vec<String> {
    let tasks = read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    tasks.map(|task| task.path().display().to_string()).collect()
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

fn field(path: &str, name: &str) -> Option<u64> {
    let text = read_to_string(path).ok()?;
    first_number(text.lines().find_map(|line| line.strip_prefix(name))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_child_s_child_is_counted() {
        // The shell waits for another one, which has done something and waits for its input.
        let script = "sh -c 'i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo done; read line'; true";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut said = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().expect("piped"));
        std::io::BufRead::read_line(&mut output, &mut said).expect("said");
        let all = usage_of(child.id());
        let own: u64 = tasks(child.id())
            .iter()
            .filter_map(|task| first_number(&read_to_string(format!("{task}/schedstat")).ok()?))
            .sum();
        drop(child.stdin.take());
        child.wait().expect("ended");
        assert!(all.cpu_s > own as f64 / 1e9, "{all:?} {own}");
        assert!(all.memory_bytes > 0, "{all:?}");
    }

    #[test]
    fn a_process_that_is_gone_has_used_nothing() {
        assert_eq!(usage_of(u32::MAX), Usage::default());
    }
}
