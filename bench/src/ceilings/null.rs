//! The null server: answers whatever is asked with the same bytes, and does nothing else.
//!
//! One thread and one epoll, as little as a server can do between a request and its answer: no path is looked at, no
//! head is parsed beyond its end. The body leaves copied out of memory, or by reference from a file in memory
//! (sendfile), since these are the two ways in which a server can hand bytes to the kernel.
#![forbid(unsafe_code)]

use crate::clock::{MILLISECOND_NS, timespec};
use rustix::event::epoll;
use rustix::fs::{MemfdFlags, memfd_create, sendfile};
use rustix::net::{SendFlags, send};
use slab::Slab;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// How the body reaches the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// send(2) out of memory.
    Copied,
    /// sendfile(2) from a file in memory.
    Reference,
}

impl Way {
    /// As reports write it.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Copied => "copied",
            Self::Reference => "by reference",
        }
    }
}

const END_OF_HEAD: &[u8] = b"\r\n\r\n";
const LISTENER: u64 = u64::MAX;
/// Longest wait, so that an order to stop is seen.
const WAIT_NS: u64 = 50 * MILLISECOND_NS;

/// A listening null server; [`run`](Self::run) serves.
#[derive(Debug)]
pub(super) struct NullServer {
    listener: TcpListener,
    head: Vec<u8>,
    body: Body,
    size: u64,
}

#[derive(Debug)]
enum Body {
    Memory(Vec<u8>),
    File(File),
}

#[derive(Debug)]
struct Peer {
    stream: TcpStream,
    /// Bytes of the end of a head that were seen last.
    matched: usize,
    /// Requests that are not answered yet.
    owed: u64,
    /// Bytes of the answer under way that have left, its head included.
    sent: u64,
}

impl NullServer {
    /// Listens on a free port of loopback; every answer has a body of `size` bytes.
    ///
    /// # Errors
    /// No port, or no memory for the body.
    pub(super) fn bind(size: u64, way: Way) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        // What compresses well could be a pattern that some hardware likes; counting is neither.
        let bytes: Vec<u8> = (0..size).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        let body = match way {
            Way::Copied => Body::Memory(bytes),
            Way::Reference => {
                let mut file = File::from(memfd_create("null", MemfdFlags::CLOEXEC)?);
                file.write_all(&bytes)?;
                Body::File(file)
            }
        };
        let head =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nETag: \"null\"\r\n\r\n").into_bytes();
        Ok(Self { listener, head, body, size })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop`.
    ///
    /// # Errors
    /// The kernel refuses an epoll. A connection that fails is closed, and whoever has it counts that.
    pub(super) fn run(&self, stop: &AtomicBool) -> io::Result<()> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &self.listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        let mut peers = Slab::new();
        let mut buffer = vec![0; 64 << 10];
        let mut events = Vec::with_capacity(256);
        while !stop.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&timespec(WAIT_NS))) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let name = event.data.u64();
                if name == LISTENER {
                    self.accept(&epoll, &mut peers)?;
                    continue;
                }
                let key = name as usize;
                let Some(peer) = peers.get_mut(key) else { continue };
                if peer.hear(&mut buffer).and_then(|()| self.answer(peer)).is_err() {
                    peers.remove(key);
                }
            }
        }
        Ok(())
    }

    fn accept(&self, epoll: &OwnedFd, peers: &mut Slab<Peer>) -> io::Result<()> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let entry = peers.vacant_entry();
            let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
            epoll::add(epoll, &stream, epoll::EventData::new_u64(entry.key() as u64), flags)?;
            entry.insert(Peer { stream, matched: 0, owed: 0, sent: 0 });
        }
    }

    /// Sends what the socket takes.
    fn answer(&self, peer: &mut Peer) -> io::Result<()> {
        let head_bytes = self.head.len() as u64;
        while peer.owed > 0 {
            let sent = if peer.sent < head_bytes {
                let more = if self.size > 0 { SendFlags::MORE } else { SendFlags::empty() };
                send(&peer.stream, &self.head[peer.sent as usize..], SendFlags::NOSIGNAL | more)
            } else {
                let mut at = peer.sent - head_bytes;
                match &self.body {
                    Body::Memory(bytes) => send(&peer.stream, &bytes[at as usize..], SendFlags::NOSIGNAL),
                    Body::File(file) => {
                        let left = (self.size - at) as usize;
                        sendfile(&peer.stream, file, Some(&mut at), left)
                    }
                }
            };
            match sent {
                Ok(count) => peer.sent += count as u64,
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if peer.sent == head_bytes + self.size {
                peer.sent = 0;
                peer.owed -= 1;
            }
        }
        Ok(())
    }
}

impl Peer {
    /// Reads what has come, and counts the heads in it.
    fn hear(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    for byte in &buffer[..count] {
                        self.count(*byte);
                    }
                    if count < buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn count(&mut self, byte: u8) {
        self.matched = if byte == END_OF_HEAD[self.matched] {
            self.matched + 1
        } else {
            usize::from(byte == END_OF_HEAD[0])
        };
        if self.matched == END_OF_HEAD.len() {
            self.matched = 0;
            self.owed += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange(size: u64, way: Way, asked: &[&[u8]], answers: usize) {
        let server = NullServer::bind(size, way).expect("bound");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| server.run(&stop).expect("served"));
            let mut stream = TcpStream::connect(server.address().expect("bound")).expect("connected");
            let mut reader = stream.try_clone().expect("a clone");
            let whole = (server.head.len() + size as usize) * answers;
            let asking = scope.spawn(move || {
                for piece in asked {
                    stream.write_all(piece).expect("sent");
                }
                stream
            });
            let mut got = vec![0; whole];
            reader.read_exact(&mut got).expect("every answer");
            for answer in got.chunks(whole / answers) {
                let (head, body) = answer.split_at(server.head.len());
                assert_eq!(head, server.head);
                assert!(
                    body.iter()
                        .enumerate()
                        .all(|(at, byte)| { *byte == ((at as u64).wrapping_mul(0x9e37_79b9) >> 24) as u8 })
                );
            }
            drop(asking.join().expect("asked"));
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn each_head_has_one_answer_however_it_comes() {
        for way in [Way::Copied, Way::Reference] {
            exchange(
                1_000_003,
                way,
                &[b"GET / HTTP/1.1\r\n", b"a: \r\r\n", b"\r\nGET / HTTP/1.1\r\n\r", b"\n"],
                2,
            );
            exchange(0, way, &[b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"], 3);
        }
    }
}
