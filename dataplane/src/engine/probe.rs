//! What this kernel and this process grant, found out by trying, with the remedy beside each refusal.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use io_uring::types::Fd;
use io_uring::{IoUring, Probe as Opcodes, opcode};

use super::uring;

/// Entries of the ring that is tried.
const ENTRIES: u32 = 8;
/// Operations that the ring engine cannot do without.
const NEEDED: [(u8, &str); 8] = [
    (opcode::Accept::CODE, "accept"),
    (opcode::Recv::CODE, "recv"),
    (opcode::SendMsg::CODE, "sendmsg"),
    (opcode::PollAdd::CODE, "poll"),
    (opcode::Read::CODE, "read"),
    (opcode::ReadFixed::CODE, "read_fixed"),
    (opcode::AsyncCancel::CODE, "async_cancel"),
    (opcode::Close::CODE, "close"),
];

/// What to do about a seccomp profile.
const ALLOW: &str = "allow io_uring_setup, io_uring_enter and io_uring_register, as the profile that deploy/seccomp writes does";

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was tried.
    pub what: &'static str,
    /// Whether the ring engine can run without it.
    pub needed: bool,
    /// What came of it.
    pub granted: bool,
    /// Facts, or why not and what to turn.
    pub remark: String,
}

/// All that was tried, in order.
#[derive(Clone, Debug)]
pub struct Report {
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether the `uring` engine can run here.
    pub fn grants_uring(&self) -> bool {
        self.findings.iter().all(|finding| finding.granted || !finding.needed)
    }

    /// The first refusal that keeps `uring` from running.
    pub fn refusal(&self) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.needed && !finding.granted)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            let word = match (finding.granted, finding.needed) {
                (true, _) => "granted",
                (false, true) => "refused",
                (false, false) => "absent",
            };
            writeln!(f, "{word:8} {:26} {}", finding.what, finding.remark)?;
        }
        writeln!(
            f,
            "engine   {:26} auto chooses it here",
            if self.grants_uring() { "uring" } else { "portable" }
        )
    }
}

/// Tries what the engines need. Leaves nothing behind.
pub fn report() -> Report {
    let mut findings = vec![kernel()];
    match uring::build(ENTRIES) {
        Ok(ring) => {
            findings.push(Finding {
                what: "io_uring",
                needed: true,
                granted: true,
                remark: "single issuer, deferred task work".into(),
            });
            findings.push(operations(&ring));
            findings.push(buffers(&ring));
            findings.push(clones(&ring));
            findings.push(zero_copy());
        }
        Err(error) => {
            findings.push(Finding {
                what: "io_uring",
                needed: true,
                granted: false,
                remark: refusal(&error),
            });
        }
    }
    findings.push(memlock());
    Report { findings }
}

fn kernel() -> Finding {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let remark = match version {
        v if v >= (6, 12) => format!("{release}: all that we use"),
        v if v >= (6, 1) => {
            format!("{release}: registered memory is charged to memlock once a worker; 6.12 shares it")
        }
        _ => format!("{release}: 6.1 is the oldest for the uring engine"),
    };
    Finding { what: "kernel", needed: false, granted: version >= (6, 1), remark }
}

fn refusal(error: &io::Error) -> String {
    let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match error.raw_os_error() {
        Some(libc::EPERM) if matches!(sysctl.trim(), "1" | "2") => format!(
            "the sysctl kernel.io_uring_disabled is {}; set it to 0, or 1 with our group in kernel.io_uring_group",
            sysctl.trim()
        ),
        Some(libc::EPERM) => format!("denied, most likely by the container's seccomp profile: {ALLOW}"),
        // Where the kernel has a switch for it, it has io_uring; docker's profile answers EPERM, podman's ENOSYS.
        Some(libc::ENOSYS) if !sysctl.is_empty() => {
            format!("hidden by the container's seccomp profile: {ALLOW}")
        }
        Some(libc::ENOSYS) => {
            format!(
                "this kernel is built without io_uring, or a container's seccomp profile hides it: {ALLOW}"
            )
        }
        Some(libc::EINVAL) => "this kernel is older than 6.1 and lacks deferred task work".into(),
        Some(libc::ENOMEM) => "no memory for a ring; raise the memlock limit (LimitMEMLOCK=infinity)".into(),
        _ => error.to_string(),
    }
}

fn operations(ring: &IoUring) -> Finding {
    let mut known = Opcodes::new();
    let asked = ring.submitter().register_probe(&mut known);
    let missing: Vec<_> =
        NEEDED.iter().filter(|(code, _)| !known.is_supported(*code)).map(|(_, name)| *name).collect();
    let remark = match (&asked, missing.is_empty()) {
        (Err(error), _) => format!("the kernel does not tell: {error}"),
        (Ok(()), true) => NEEDED.map(|(_, name)| name).join(" "),
        (Ok(()), false) => format!("missing: {}", missing.join(" ")),
    };
    Finding { what: "operations", needed: true, granted: asked.is_ok() && missing.is_empty(), remark }
}

fn buffers(ring: &IoUring) -> Finding {
    const BYTES: usize = 2 << 20;
    let tried = memmap2::MmapMut::map_anon(BYTES).and_then(|mut map| {
        let vector = libc::iovec { iov_base: map.as_mut_ptr().cast(), iov_len: BYTES };
        // SAFETY: the mapping outlives the registration, which is undone before it is dropped.
        unsafe { ring.submitter().register_buffers(&[vector])? };
        ring.submitter().unregister_buffers()
    });
    let remark = match &tried {
        Ok(()) => "2 MiB registered and given back".into(),
        Err(error) => format!("{error}; without registered memory the node goes on with ordinary reads"),
    };
    Finding { what: "registered buffers", needed: false, granted: tried.is_ok(), remark }
}

fn clones(ring: &IoUring) -> Finding {
    let tried = IoUring::new(ENTRIES).and_then(|registry| {
        registry.submitter().register_buffers_sparse(1)?;
        ring.submitter().register_buffers_clone(registry.as_raw_fd())?;
        ring.submitter().unregister_buffers()
    });
    let remark = match &tried {
        Ok(()) => "workers share one registration".into(),
        Err(error) => format!("{error}; each worker registers the memory itself"),
    };
    Finding { what: "shared registration", needed: false, granted: tried.is_ok(), remark }
}

fn zero_copy() -> Finding {
    let (tried, remark) = match send_zero_copy(uring::REPORT_USAGE) {
        Ok(()) => (Ok(()), "the kernel says which paths copy all the same".to_owned()),
        // The flag is younger than the operation.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (
            send_zero_copy(0),
            "this kernel does not say which paths copy all the same (6.2 does): all but this host's own are taken \
             for such that do not"
                .to_owned(),
        ),
        Err(error) => (Err(error), String::new()),
    };
    let remark = match &tried {
        Ok(()) => remark,
        Err(error) => format!("{error}; what is not hot is copied"),
    };
    Finding { what: "zero-copy send", needed: false, granted: tried.is_ok(), remark }
}

/// Sends a word over loopback.
fn send_zero_copy(ways: u16) -> io::Result<()> {
    static WORD: [u8; 4] = *b"word";
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let _peer = TcpStream::connect(listener.local_addr()?)?;
    let (socket, _) = listener.accept()?;
    let mut ring = uring::build(ENTRIES)?;
    let send = opcode::SendZc::new(Fd(socket.as_raw_fd()), WORD.as_ptr(), WORD.len() as u32);
    // SAFETY: the bytes are static, and the socket is open until the ring has answered.
    unsafe { ring.submission().push(&send.zc_flags(ways).build()).map_err(io::Error::other)? };
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().map_or(0, |completion| completion.result());
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

fn memlock() -> Finding {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one structure, which lives on this stack.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    let unlimited = !failed && limit.rlim_cur == libc::RLIM_INFINITY;
    let remark = if unlimited {
        "unlimited".into()
    } else {
        format!(
            "{} KiB; registered memory beyond it needs CAP_IPC_LOCK or LimitMEMLOCK=infinity",
            limit.rlim_cur / 1024
        )
    };
    Finding { what: "memlock", needed: false, granted: unlimited, remark }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Podman's default profile answers so.
    #[test]
    fn a_call_that_is_not_there_may_be_hidden_by_a_profile() {
        let words = refusal(&io::Error::from_raw_os_error(libc::ENOSYS));
        assert!(words.contains("seccomp profile") && words.contains("io_uring_setup"), "{words}");
    }
}
