//! fio, which reads and serves nobody: what a drive gives at a depth, to one thread.
#![forbid(unsafe_code)]

use super::servers::{Kind, Server, find};
use super::{Cell, Measured, Room};
use crate::client::lanes::Part;
use crate::processors::on_core;
use crate::recorder::{Block, Window};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Random direct reads of the file that a node reads, as large as the cell's answers, as many at a time as it has
/// connections, on the servers' core.
pub(super) struct Reader {
    program: PathBuf,
    file: PathBuf,
    answer_bytes: u64,
    span_bytes: u64,
    depth: usize,
    core: usize,
}

impl Reader {
    /// # Errors
    /// fio is not installed, the node has no drive, or the cell's answers do not begin where a direct read may.
    pub(super) fn new(cell: &Cell, node: &Server, room: &Room) -> Result<Self> {
        if matches!(cell.part, Part::Anywhere(_)) {
            bail!("it reads aligned pieces only");
        }
        let file = node.drive.clone().context("the node has no drive")?;
        Ok(Self {
            program: find(Kind::Fio)?,
            file,
            answer_bytes: cell.answer_bytes(),
            // What the node has filled, from the begin of its file on; the rest of the file would be read from nowhere.
            span_bytes: cell.set_bytes() / cell.answer_bytes() * cell.answer_bytes(),
            depth: cell.connections,
            core: room.server_core,
        })
    }

    /// One block of about `length`.
    ///
    /// # Errors
    /// It fails, or says what nobody understands.
    pub(super) fn block(&self, length: Duration) -> Result<Measured> {
        let mut command = Command::new(&self.program);
        command.args(["--name=beside", "--readonly", "--direct=1", "--ioengine=io_uring", "--rw=randread"]);
        command.args(["--fixedbufs", "--registerfiles", "--norandommap", "--randrepeat=0", "--time_based"]);
        command.args(["--output-format=json", &format!("--runtime={}ms", length.as_millis())]);
        command.arg(format!("--filename={}", self.file.display()));
        command.args([format!("--bs={}", self.answer_bytes), format!("--size={}", self.span_bytes)]);
        command.arg(format!("--iodepth={}", self.depth)).stdin(Stdio::null()).stderr(Stdio::piped());
        let done = on_core(self.core, || command.output().context("running fio"))?;
        if !done.status.success() {
            bail!("fio ended with {}: {}", done.status, String::from_utf8_lossy(&done.stderr));
        }
        measured(&done.stdout)
            .with_context(|| format!("what fio says: {}", String::from_utf8_lossy(&done.stdout)))
    }
}

/// What the JSON of one job says.
fn measured(json: &[u8]) -> Result<Measured> {
    let all: Value = serde_json::from_slice(json).context("reading JSON")?;
    let job = &all["jobs"][0];
    let number = |value: &Value, name: &str| value.as_f64().with_context(|| format!("no {name}"));
    let read = &job["read"];
    let seconds = number(&read["runtime"], "runtime")? / 1e3;
    let (bytes, ops) = (number(&read["io_bytes"], "io_bytes")?, number(&read["total_ios"], "total_ios")?);
    let busy = number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?;
    let transfer_window = Window { seconds, ops: ops as u64, bytes: bytes as u64 };
    let block = Block { ops: ops as u64, bytes: bytes as u64, transfer_window, ..Block::default() };
    Ok(Measured { block, cpu_s: busy / 100.0 * seconds, core_s: None, device_bytes: (bytes as u64, None) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fio_says_is_understood() {
        let said = br#"{"jobs": [{"usr_cpu": 1.5, "sys_cpu": 8.5,
            "read": {"runtime": 2000, "io_bytes": 4000000000, "total_ios": 61035}}]}"#;
        let measured = measured(said).expect("understood");
        assert_eq!(measured.gb_s(), Some(2.0));
        assert_eq!(measured.cpu_s_per_gb(), Some(0.05));
        assert_eq!(measured.block.transfer_window.qps(), Some(30517.5));
    }

    #[test]
    fn what_it_leaves_out_is_named() {
        let error =
            measured(br#"{"jobs": [{"read": {"runtime": 2000}}]}"#).map(drop).expect_err("not understood");
        assert!(format!("{error:#}").contains("no io_bytes"), "{error:#}");
    }
}
