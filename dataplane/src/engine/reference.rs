//! Sends by reference: the kernel takes hold of the pages where they lie and copies nothing.
//!
//! sendfile(2) from the arena's file, straight from the worker and never waiting (io_uring's splice would go to a
//! kernel thread). On loopback this saves the one copy that a plain send makes; the reader's own copy remains.
//! What was sent this way is read by the peer at its leisure, so the arena lends such memory only once
//! ([`Lease::lend`](crate::arena::Lease::lend)).

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use super::{Outgoing, Slice};

/// Sends what the socket takes at this moment. It is full if something is left.
///
/// # Errors
/// As sendmsg(2) and sendfile(2), if not one byte has left.
pub(super) fn push(socket: RawFd, outgoing: &mut Outgoing) -> io::Result<usize> {
    let mut sent = 0;
    while !outgoing.is_empty() {
        let of_header = outgoing.header_left().len();
        let result = if of_header > 0 {
            send_header(socket, outgoing.header_left(), outgoing.body.is_empty())
        } else {
            let slice = outgoing.body.iter().find(|slice| !slice.is_empty()).expect("it is not empty");
            send_slice(socket, slice)
        };
        match result {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                outgoing.consume(count);
                sent += count;
                if of_header == 0 {
                    outgoing.by_reference += count as u64;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            // The next send says so.
            Err(_) if sent > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

fn send_header(socket: RawFd, header: &[u8], is_all: bool) -> io::Result<usize> {
    let more = if is_all { 0 } else { libc::MSG_MORE };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | more;
    // SAFETY: the header is a live slice; the call copies from it and returns.
    count(unsafe { libc::send(socket, header.as_ptr().cast(), header.len(), flags) })
}

/// The socket does not block, and the process ignores SIGPIPE as every Rust program does.
fn send_slice(socket: RawFd, slice: &Slice) -> io::Result<usize> {
    let (file, start) = slice.lease.lend().ok_or(io::ErrorKind::Unsupported)?;
    let mut offset = start.cast_signed() + i64::from(slice.start);
    // SAFETY: `offset` lives on this stack; the bytes are below the watermark of a lease that `slice` holds, so
    // nobody writes them, and `lend` keeps the slot out of use for as long as the network may read it.
    count(unsafe { libc::sendfile(socket, file.as_raw_fd(), &raw mut offset, slice.len()) })
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
