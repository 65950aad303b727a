//! Sends by reference: the kernel takes hold of the pages where they lie and copies nothing.
//!
//! sendfile(2) from the arena's file, straight from the worker and never waiting (io_uring's splice would go to a
//! kernel thread). On loopback this saves the one copy that a plain send makes; the reader's own copy remains.
//! What was sent this way is read by the peer at its leisure, so the arena lends such memory only once
//! ([`Lease::lend`](crate::arena::Lease::lend)).
//!
//! Slices that lie one behind the other leave in one call: at the end of each call the kernel sends off what it has,
//! a short segment most of the time.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

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
            send_slices(socket, &outgoing.body)
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

/// Sends the first slices, as many as lie one behind the other. The socket does not block, and the process ignores
/// SIGPIPE as every Rust program does.
fn send_slices(socket: RawFd, body: &[Slice]) -> io::Result<usize> {
    let mut slices = body.iter().filter(|slice| !slice.is_empty()).map(|slice| (slice, place(slice)));
    let Some((first, Some((file, begin)))) = slices.next() else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let mut end = begin + first.len() as u64;
    for (slice, place) in slices {
        match place {
            Some((other, start)) if other.as_raw_fd() == file.as_raw_fd() && start == end => {
                end += slice.len() as u64;
            }
            _ => break,
        }
    }
    let mut offset = begin.cast_signed();
    // SAFETY: `offset` lives on this stack; the bytes are below the watermarks of leases that the slices hold, so
    // nobody writes them, and `lend` keeps their slots out of use for as long as the network may read them.
    count(unsafe { libc::sendfile(socket, file.as_raw_fd(), &raw mut offset, (end - begin) as usize) })
}

/// Where the bytes of a slice are, which is lent from now on.
fn place(slice: &Slice) -> Option<(BorrowedFd<'static>, u64)> {
    let (file, start) = slice.lease.lend()?;
    Some((file, start + u64::from(slice.start)))
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
