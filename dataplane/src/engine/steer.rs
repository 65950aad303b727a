//! Which worker gets a datagram: a filter in the kernel that looks at QUIC's connection id.
//!
//! Sockets that share a port are chosen by a hash of both addresses, so a client that changes its address would
//! come to a worker that knows nothing of it. Workers therefore put their number into the first byte of each
//! connection id that they give out, and the kernel chooses by that byte: first byte modulo the number of workers.
//! A client's own first id is random, so new connections spread evenly, and all that a client sends before it has
//! ours comes to one worker.
//!
//! Classic BPF, because it needs no right that an unprivileged process lacks.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{
    BPF_A, BPF_ABS, BPF_ALU, BPF_B, BPF_JA, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_MOD, BPF_RET, sock_filter,
    sock_fprog, socklen_t,
};

/// Most workers that one byte can tell apart.
pub const STEERED_MAX: usize = 256;

/// Set in the first byte of a packet with a long header (RFC 9000, 17.2).
const LONG_HEADER: u32 = 0x80;
/// Where the destination connection id begins (RFC 9000, 17.2 and 17.3): behind flags, version and its length, or
/// behind flags.
const LONG_ID_AT: u32 = 6;
const SHORT_ID_AT: u32 = 1;

/// Chooses among `workers` UDP sockets on one port, which were bound in the order of the workers. `socket` is any of
/// them. A datagram that ends before its connection id begins goes to the first.
///
/// # Errors
/// As setsockopt(2).
///
/// # Panics
/// Unless there are 1 to [`STEERED_MAX`] workers.
pub fn steer(socket: BorrowedFd<'_>, workers: usize) -> io::Result<()> {
    assert!((1..=STEERED_MAX).contains(&workers), "{workers} workers cannot be told apart by a byte");
    let mut program = program(workers as u32);
    let filter = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a system call on a descriptor that is borrowed, with the address and size of `filter`, whose pointer and
    // length are those of `program`; both live until the call returns, and the kernel copies what it keeps.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            size_of::<sock_fprog>() as socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The filter sees the payload of the datagram from its first byte on.
fn program(workers: u32) -> [sock_filter; 7] {
    let load_byte = BPF_LD | BPF_B | BPF_ABS;
    [
        line(load_byte, 0, 0, 0),
        line(BPF_JMP | BPF_JSET | BPF_K, 0, 2, LONG_HEADER),
        line(load_byte, 0, 0, LONG_ID_AT),
        line(BPF_JMP | BPF_JA, 0, 0, 1),
        line(load_byte, 0, 0, SHORT_ID_AT),
        line(BPF_ALU | BPF_MOD | BPF_K, 0, 0, workers),
        line(BPF_RET | BPF_A, 0, 0, 0),
    ]
}

/// An instruction; a jump passes over `if_true` or `if_false` of those behind it.
fn line(code: u32, if_true: u8, if_false: u8, operand: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: if_true, jf: if_false, k: operand }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, UdpSocket};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use socket2::{Domain, Protocol, Socket, Type};

    use super::*;

    /// Sockets on one port, in the order of binding, with the filter on.
    fn group(workers: usize) -> (Vec<UdpSocket>, SocketAddr) {
        let mut address: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let mut sockets = Vec::new();
        for _ in 0..workers {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).expect("a socket");
            socket.set_reuse_port(true).expect("shared");
            socket.bind(&address.into()).expect("bound");
            let socket: UdpSocket = socket.into();
            socket.set_read_timeout(Some(Duration::from_secs(20))).expect("patience");
            address = socket.local_addr().expect("an address");
            sockets.push(socket);
        }
        steer(sockets[0].as_fd(), workers).expect("attached");
        (sockets, address)
    }

    #[test]
    fn a_datagram_comes_to_the_worker_of_its_connection_id_from_wherever_it_is_sent() {
        for workers in [1, 2, 3, 5] {
            let (sockets, address) = group(workers);
            for first in 0..=u8::MAX {
                // Another port each time: the hash of addresses would scatter them.
                let client = UdpSocket::bind("127.0.0.1:0").expect("a client");
                let short = [0x40 | (first & 0x3f), first, 0xff, 1];
                let long = [0xc0, 0, 0, 0, 1, 8, first, 0xff, 2];
                client.send_to(&short, address).expect("sent");
                client.send_to(&long, address).expect("sent");
                let worker = &sockets[usize::from(first) % workers];
                for expected in [&short[..], &long[..]] {
                    let mut buffer = [0; 64];
                    let count = worker.recv(&mut buffer).expect("it comes to its worker");
                    assert_eq!(&buffer[..count], expected, "{workers} workers, first byte {first}");
                }
            }
        }
    }

    #[test]
    fn a_datagram_without_an_id_comes_to_the_first() {
        let (sockets, address) = group(3);
        let client = UdpSocket::bind("127.0.0.1:0").expect("a client");
        for bytes in [&[0x40][..], &[0xc0, 0, 0, 0, 1], &[0xff]] {
            client.send_to(bytes, address).expect("sent");
            let mut buffer = [0; 64];
            let count = sockets[0].recv(&mut buffer).expect("it comes");
            assert_eq!(&buffer[..count], bytes);
        }
    }
}
