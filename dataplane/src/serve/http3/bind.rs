//! The UDP sockets of HTTP/3: one for each worker on every address, and the kernel's choice among them.
#![forbid(unsafe_code)]

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use crate::engine::steer::{STEERED_MAX, steer};

/// Room in the kernel for datagrams of all connections of a worker; it gives as much as `net.core.rmem_max` and
/// `wmem_max` allow.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// The addresses as they are (port 0 means any, but the same for all workers), then the sockets of each worker.
///
/// # Errors
/// A port that is taken, or a kernel that refuses the filter.
pub(in crate::serve) fn bind(
    addresses: &[SocketAddr],
    workers: usize,
) -> Result<(Vec<SocketAddr>, Vec<Vec<UdpSocket>>)> {
    ensure!(
        addresses.is_empty() || workers <= STEERED_MAX,
        "listen-quic: connections can be steered to {STEERED_MAX} workers at most, and there are {workers} cores: give \
         fewer"
    );
    let mut all: Vec<Vec<_>> = (0..workers).map(|_| Vec::new()).collect();
    let mut addresses = addresses.to_vec();
    for address in &mut addresses {
        // The filter counts sockets in the order in which they were bound: the order of the workers.
        for (worker, sockets) in all.iter_mut().enumerate() {
            let socket = bind_one(*address, worker == 0)
                .with_context(|| format!("listening on {address}/udp; is another program on that port?"))?;
            *address = socket.local_addr()?;
            sockets.push(socket);
        }
        let first = all[0].last().expect("there is a worker");
        steer(first.as_fd(), workers).with_context(|| format!("steering the datagrams of {address}/udp"))?;
    }
    Ok((addresses, all))
}

fn bind_one(address: SocketAddr, must_be_free: bool) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if must_be_free && address.port() != 0 {
        // Another process of the same user could share the port without a word; its sockets would come first in the
        // kernel's count.
        Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?.bind(&address.into())?;
    }
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// What `Alt-Svc` says of these addresses (RFC 7838, 3).
pub(in crate::serve) fn alt_svc(addresses: &[SocketAddr]) -> String {
    let mut ports: Vec<_> = addresses.iter().map(SocketAddr::port).collect();
    ports.sort_unstable();
    ports.dedup();
    let one = |port| format!("h3=\":{port}\"; ma={ALT_SVC_AGE_S}");
    ports.into_iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Seconds for which a client may remember it. Whoever finds nobody there goes back to where it came from.
const ALT_SVC_AGE_S: u32 = 3600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_workers_have_one_port_and_a_port_that_is_taken_is_named() {
        let any = ["127.0.0.1:0".parse().expect("an address"); 2];
        let (addresses, bound) = bind(&any, 3).expect("bound");
        assert_eq!(bound.len(), 3);
        for sockets in &bound {
            let their: Vec<_> = sockets.iter().map(|socket| socket.local_addr().expect("bound")).collect();
            assert_eq!(their, addresses);
        }
        let taken = addresses[0];
        let error = format!("{:#}", bind(&[taken], 1).expect_err("taken"));
        assert!(error.contains(&taken.to_string()) && error.contains("another program"), "{error}");
        assert!(bind(&[], 300).expect("nothing to steer").1.iter().all(Vec::is_empty));
        assert!(bind(&any, 300).expect_err("too many").to_string().contains("256"));
    }

    #[test]
    fn alternatives_are_named_once_a_port() {
        let addresses = ["0.0.0.0:7072", "[::]:7072", "10.0.0.1:443"].map(|text| text.parse().expect(text));
        assert_eq!(alt_svc(&addresses), "h3=\":443\"; ma=3600, h3=\":7072\"; ma=3600");
    }
}
