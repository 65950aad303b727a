//! What machine this is: said in every report, because a figure without it is worth nothing.
#![forbid(unsafe_code)]

use crate::clock::now_ns;
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// The machine, as far as it tells.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// Kernel release.
    pub kernel: Option<String>,
    /// Host name.
    pub host: Option<String>,
    /// Processor.
    pub cpu_model: Option<String>,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory, bytes.
    pub mem_bytes: Option<u64>,
    /// Transparent huge pages, the chosen word.
    pub huge_pages: Option<String>,
    /// One byte there and back over loopback, microseconds: P50, P99.
    pub loopback_rtt_us: Option<(f64, f64)>,
}

impl Environment {
    /// Looks around; takes some tens of milliseconds.
    pub fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let cpu = read("/proc/cpuinfo").unwrap_or_default();
        let field = |text: &str, name: &str| {
            text.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
        };
        let memory = read("/proc/meminfo").unwrap_or_default();
        let kib = field(&memory, "MemTotal")
            .and_then(|text| text.trim_end_matches(" kB").trim().parse::<u64>().ok());
        let pages = read("/sys/kernel/mm/transparent_hugepage/enabled");
        let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
        Self {
            kernel: read("/proc/sys/kernel/osrelease"),
            host: read("/proc/sys/kernel/hostname"),
            cpu_model: field(&cpu, "model name"),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            mem_bytes: kib.map(|kib| kib * 1024),
            huge_pages: pages.and_then(chosen),
            loopback_rtt_us: loopback_rtt(1000).ok(),
        }
    }

    /// Only what is known.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut out = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                out.insert(name.to_owned(), value);
            }
        };
        put("host", self.host.as_ref().map(|text| json!(text)));
        put("kernel", self.kernel.as_ref().map(|text| json!(text)));
        put("cpu_model", self.cpu_model.as_ref().map(|text| json!(text)));
        put("cores", Some(json!(self.cores)));
        put("mem_bytes", self.mem_bytes.map(|bytes| json!(bytes)));
        put("thp", self.huge_pages.as_ref().map(|text| json!(text)));
        put("loopback_rtt_us", self.loopback_rtt_us.map(|(p50, p99)| json!({ "p50": p50, "p99": p99 })));
        out
    }
}

fn loopback_rtt(rounds: usize) -> std::io::Result<(f64, f64)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut byte = [0];
            while matches!(far.read(&mut byte), Ok(1)) && far.write_all(&byte).is_ok() {}
        });
        let mut spans = Vec::with_capacity(rounds);
        let mut byte = [7];
        for _ in 0..rounds {
            let before = now_ns();
            near.write_all(&byte)?;
            near.read_exact(&mut byte)?;
            spans.push((now_ns() - before) as f64 / 1000.0);
        }
        drop(near);
        spans.sort_by(f64::total_cmp);
        Ok((spans[rounds / 2], spans[rounds * 99 / 100]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_a_core_and_a_loopback() {
        let environment = Environment::look();
        assert!(environment.cores >= 1);
        let (p50, p99) = environment.loopback_rtt_us.expect("a loopback");
        assert!(p50 > 0.0 && p99 >= p50);
        assert!(environment.to_json().contains_key("cores"));
    }
}
