//! A network of the comparison's own, in which nobody paces.
//!
//! A machine whose default congestion control is BBR spoils a comparison over loopback: BBR takes the pace at which the
//! client's thread reads for the path's, and holds back whoever has no setting against it, up to eight times at 10 MB.
//! A server at its best is one that is not held back, so where this process may, it goes on in a network namespace with
//! a loopback of its own and reno. Nothing of the machine is changed.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

/// Says to the program that takes our place where it is.
const MARK: &str = "FOREBAY_BENCH_OWN_NETWORK";
const ENTER: &str =
    "ip link set lo up && echo reno >/proc/sys/net/ipv4/tcp_congestion_control && exec \"$0\" \"$@\"";

/// Takes this program's place in a network of its own, with the same arguments. Returns where that cannot be done, or has
/// been done.
pub fn enter() {
    if is_own() || congestion() == "reno" || !rustix::process::geteuid().is_root() {
        return;
    }
    let Ok(own) = std::env::current_exe() else { return };
    let unshare = |script: &str, arguments: &[OsString]| {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", script]).arg(&own).args(arguments);
        command
    };
    // Whether it works is seen before there is no way back.
    let trial = ENTER.rsplit_once(" && ").map_or("false", |(prepare, _)| prepare);
    let tried = unshare(trial, &[]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if tried.is_ok_and(|status| status.success()) {
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let error = unshare(ENTER, &arguments).env(MARK, "1").exec();
        eprintln!("going on in the machine's own network: {error}");
    }
}

/// Whether this is such a network.
pub(super) fn is_own() -> bool {
    std::env::var_os(MARK).is_some()
}

/// What new connections here are sent by.
pub(super) fn congestion() -> String {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    text.trim().to_owned()
}
