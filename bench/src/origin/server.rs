//! The emulator's sockets: one thread, one epoll, absolute deadlines.
//!
//! A response is a list of deadlines on one virtual time line: the head when the first byte is due, then every
//! 64 KiB of body when its pace and the shared cap allow. Late wake-ups never push later deadlines, so the last
//! byte is due when the model says, however busy the core. Bytes are computed into one reused buffer right
//! before they are written; a connection holds none.
#![forbid(unsafe_code)]

use super::answer::{Answer, Body, Origin, PUT_BODY_MAX, Request};
use crate::clock::{MILLISECOND_NS, now_ns, timespec};
use crate::units::MIB;
use rustix::event::epoll;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Body bytes behind one deadline.
const CHUNK_BYTES: u64 = 64 * 1024;
/// Bytes computed and written at once when nothing is paced.
const WRITE_BYTES: usize = 256 * 1024;
const HEAD_BYTES_MAX: usize = 32 * 1024;
const CONNECTIONS_MAX: usize = 4096;
const LISTENER: u64 = u64::MAX;
// The longest sleep, so that `stop` is seen.
const SLEEP_MAX_NS: u64 = 200 * MILLISECOND_NS;

/// A listening emulator.
pub struct Server {
    listener: TcpListener,
    epoll: OwnedFd,
    origin: Origin,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    timers: BinaryHeap<Reverse<(u64, usize, u64)>>,
    opened: u64,
    scratch: Vec<u8>,
}

struct Connection {
    stream: TcpStream,
    // Tells a timer for this connection from one for an earlier one in the same place.
    serial: u64,
    inbox: Vec<u8>,
    readable: bool,
    // The peer sends no more: a short read has not emptied the socket, its end is still to be read.
    hung_up: bool,
    pending: Option<Pending>,
    sending: Option<Sending>,
    // The deadline that has a timer, so that stray events do not add more.
    armed_ns: u64,
    close_after: bool,
}

// A parsed head whose body is still on its way.
struct Pending {
    request: Request,
    head_bytes: usize,
    body_bytes: usize,
}

struct Sending {
    head: Vec<u8>,
    head_sent: usize,
    body: Body,
    body_sent: u64,
    // Body bytes that may leave once `deadline_ns` has passed.
    granted: u64,
    deadline_ns: u64,
    // Whether the deadline lay ahead when it was set: only such a write can be late.
    timed: bool,
    blocked: bool,
    // The peer held the body up and it has not caught up with its deadlines: what is late now is not our doing.
    behind_peer: bool,
    pace_ns_per_mib: u64,
    plain: bool,
    delay_counted: bool,
}

enum Turn {
    Again,
    Wait,
    Close,
}

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// The address cannot be bound, or the kernel refuses an epoll.
    pub fn bind(address: SocketAddr, origin: Origin) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(Self {
            listener,
            epoll,
            origin,
            connections: Vec::new(),
            free: Vec::new(),
            timers: BinaryHeap::new(),
            opened: 0,
            scratch: vec![0; HEAD_BYTES_MAX + WRITE_BYTES],
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` is set; looks at it five times a second.
    ///
    /// # Errors
    /// Only when the epoll itself fails; connections fail alone.
    pub fn run(mut self, stop: &AtomicBool) -> io::Result<()> {
        // The default slack of 50 us would be part of every lateness.
        if let Some(slack) = NonZeroU64::new(1) {
            let _ = rustix::thread::set_current_timer_slack(Some(slack));
        }
        let mut events = Vec::with_capacity(256);
        while !stop.load(Ordering::Relaxed) {
            let now = now_ns();
            let sleep = match self.timers.peek() {
                Some(Reverse((due, _, _))) => due.saturating_sub(now).min(SLEEP_MAX_NS),
                None => SLEEP_MAX_NS,
            };
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                Some(&timespec(sleep)),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            // Deadlines first: they are what the lateness histogram judges.
            self.drive_due();
            for event in &events {
                if event.data.u64() == LISTENER {
                    self.accept();
                    continue;
                }
                let place = event.data.u64() as usize;
                if let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) {
                    let flags = event.flags;
                    connection.hung_up |= flags.intersects(
                        epoll::EventFlags::HUP | epoll::EventFlags::RDHUP | epoll::EventFlags::ERR,
                    );
                    connection.readable |= flags.intersects(
                        epoll::EventFlags::IN
                            | epoll::EventFlags::HUP
                            | epoll::EventFlags::ERR
                            | epoll::EventFlags::RDHUP,
                    );
                    self.drive(place);
                }
                self.drive_due();
            }
        }
        Ok(())
    }

    fn drive_due(&mut self) {
        while let Some(&Reverse((due, place, serial))) = self.timers.peek() {
            if due > now_ns() {
                return;
            }
            self.timers.pop();
            if let Some(connection) = &mut self.connections[place]
                && connection.serial == serial
            {
                if connection.armed_ns == due {
                    connection.armed_ns = 0;
                }
                self.drive(place);
            }
        }
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if self.connections.len() - self.free.len() >= CONNECTIONS_MAX {
                continue; // dropped: the peer sees a reset
            }
            if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
                continue;
            }
            let place = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            let flags = epoll::EventFlags::IN
                | epoll::EventFlags::OUT
                | epoll::EventFlags::RDHUP
                | epoll::EventFlags::ET;
            if epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(place as u64), flags).is_err() {
                self.free.push(place);
                continue;
            }
            self.opened += 1;
            self.origin.stats_mut().counts_mut().connections += 1;
            self.connections[place] = Some(Connection {
                stream,
                serial: self.opened,
                inbox: Vec::new(),
                readable: true,
                hung_up: false,
                pending: None,
                sending: None,
                armed_ns: 0,
                close_after: false,
            });
            self.drive(place);
        }
    }

    // Moves one connection as far as it goes now.
    fn drive(&mut self, place: usize) {
        let Some(mut connection) = self.connections[place].take() else { return };
        loop {
            let turn = if connection.sending.is_some() {
                connection.send(&mut self.origin, &mut self.scratch)
            } else {
                connection.receive(&mut self.origin, &mut self.scratch)
            };
            match turn {
                Turn::Again => {}
                Turn::Wait => break,
                Turn::Close => {
                    self.free.push(place);
                    return; // closing the socket takes it out of the epoll
                }
            }
        }
        if let Some(sending) = &connection.sending
            && !sending.blocked
            && connection.armed_ns != sending.deadline_ns
        {
            connection.armed_ns = sending.deadline_ns;
            self.timers.push(Reverse((sending.deadline_ns, place, connection.serial)));
        }
        self.connections[place] = Some(connection);
    }
}

impl Connection {
    fn receive(&mut self, origin: &mut Origin, scratch: &mut [u8]) -> Turn {
        if self.pending.is_none() {
            match parse(&self.inbox) {
                Ok(Some((pending, expects))) => {
                    if expects && pending.body_bytes > 0 {
                        // A tiny write on an idle socket: it fits, or the peer is gone.
                        if self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").is_err() {
                            return Turn::Close;
                        }
                    }
                    self.close_after |= pending.request.unsupported.is_some();
                    self.pending = Some(pending);
                }
                Ok(None) => {}
                Err(()) => return Turn::Close,
            }
        }
        if let Some(pending) = self.pending.take_if(|p| self.inbox.len() >= p.head_bytes + p.body_bytes) {
            let now = now_ns();
            let end = pending.head_bytes + pending.body_bytes;
            let answer = origin.answer(&pending.request, &self.inbox[pending.head_bytes..end], now);
            self.inbox.drain(..end);
            if self.inbox.capacity() > 1 << 20 && self.inbox.is_empty() {
                self.inbox = Vec::new();
            }
            self.sending = Some(Sending::new(answer, now));
            return Turn::Again;
        }
        if !self.readable {
            return Turn::Wait;
        }
        match self.stream.read(scratch) {
            Ok(0) => Turn::Close,
            Ok(count) => {
                // A short read emptied the socket; the next bytes make a new edge.
                self.readable = count == scratch.len() || self.hung_up;
                self.inbox.extend_from_slice(&scratch[..count]);
                Turn::Again
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Turn::Wait
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Turn::Again,
            Err(_) => Turn::Close,
        }
    }

    fn send(&mut self, origin: &mut Origin, scratch: &mut [u8]) -> Turn {
        let Some(sending) = &mut self.sending else { return Turn::Wait };
        if sending.is_done() {
            self.sending = None;
            return if self.close_after { Turn::Close } else { Turn::Again };
        }
        if now_ns() < sending.deadline_ns {
            return Turn::Wait;
        }
        let head_rest = sending.head.len() - sending.head_sent;
        scratch[..head_rest].copy_from_slice(&sending.head[sending.head_sent..]);
        let body_rest = (sending.granted - sending.body_sent).min(WRITE_BYTES as u64) as usize;
        let filled = sending.body.copy_out(sending.body_sent, &mut scratch[head_rest..head_rest + body_rest]);
        match self.stream.write(&scratch[..head_rest + filled]) {
            Ok(count) => {
                if sending.timed && !sending.blocked {
                    origin.stats_mut().count_lateness(now_ns() - sending.deadline_ns);
                }
                sending.timed = false;
                sending.blocked = false;
                let head_part = count.min(head_rest);
                sending.head_sent += head_part;
                let body_part = (count - head_part) as u64;
                sending.body_sent += body_part;
                if matches!(sending.body, Body::Object { .. }) {
                    origin.stats_mut().counts_mut().bytes_served += body_part;
                }
                if sending.body_sent == sending.granted && sending.head_sent == sending.head.len() {
                    sending.grant(origin);
                }
                Turn::Again
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if sending.timed {
                    origin.stats_mut().counts_mut().peer_blocked += 1;
                }
                sending.timed = false;
                sending.behind_peer = true;
                sending.blocked = true;
                Turn::Wait
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Turn::Again,
            Err(_) => Turn::Close,
        }
    }
}

impl Sending {
    fn new(answer: Answer, now: u64) -> Self {
        let mut sending = Self {
            head: answer.head,
            head_sent: 0,
            body: answer.body,
            body_sent: 0,
            granted: 0,
            deadline_ns: now,
            timed: false,
            blocked: false,
            behind_peer: false,
            pace_ns_per_mib: 0,
            plain: true,
            delay_counted: answer.qos_ns >= MILLISECOND_NS,
        };
        if let Some(draw) = answer.draw {
            sending.deadline_ns = now + draw.first_byte_ns + answer.qos_ns;
            sending.timed = sending.deadline_ns > now;
            sending.pace_ns_per_mib = draw.pace_ns_per_mib;
        }
        sending.plain = !matches!(sending.body, Body::Object { .. });
        if sending.plain {
            sending.granted = sending.body.len();
        }
        sending
    }

    fn is_done(&self) -> bool {
        self.head_sent == self.head.len() && self.body_sent == self.body.len()
    }

    // The next chunk's deadline, on the model's own time line and not from when the last write happened.
    fn grant(&mut self, origin: &mut Origin) {
        let rest = self.body.len() - self.body_sent;
        if rest == 0 {
            return;
        }
        if !origin.profile().is_paced() {
            self.granted += rest;
            return;
        }
        let bytes = rest.min(CHUNK_BYTES);
        let paced = self.deadline_ns + (bytes as f64 / MIB * self.pace_ns_per_mib as f64) as u64;
        let allowed = origin.reserve_bytes(self.deadline_ns, bytes);
        if allowed >= paced + MILLISECOND_NS && !self.delay_counted {
            self.delay_counted = true;
            origin.stats_mut().counts_mut().qos_delayed += 1;
        }
        self.granted += bytes;
        let deadline_ns = paced.max(allowed);
        self.behind_peer &= deadline_ns <= now_ns();
        self.timed = deadline_ns > self.deadline_ns && !self.behind_peer;
        self.deadline_ns = deadline_ns;
    }
}

// A whole head and whether it expects 100-continue; `None` while bytes are missing.
fn parse(inbox: &[u8]) -> Result<Option<(Pending, bool)>, ()> {
    if inbox.is_empty() {
        return Ok(None);
    }
    let mut slots = [httparse::EMPTY_HEADER; 96];
    let mut head = httparse::Request::new(&mut slots);
    let head_bytes = match head.parse(inbox) {
        Ok(httparse::Status::Complete(bytes)) => bytes,
        Ok(httparse::Status::Partial) if inbox.len() < HEAD_BYTES_MAX => return Ok(None),
        _ => return Err(()),
    };
    let mut request = Request {
        method: head.method.unwrap_or_default().to_owned(),
        target: head.path.unwrap_or_default().to_owned(),
        ..Request::default()
    };
    let (mut body_bytes, mut expects) = (0_u64, false);
    for header in head.headers.iter() {
        let text = || String::from_utf8_lossy(header.value).trim().to_owned();
        match header.name {
            name if name.eq_ignore_ascii_case("range") => request.range = Some(text()),
            name if name.eq_ignore_ascii_case("if-match") => request.if_match = Some(text()),
            name if name.eq_ignore_ascii_case("if-none-match") => request.if_none_match = Some(text()),
            name if name.eq_ignore_ascii_case("content-length") => {
                body_bytes = text().parse().map_err(|_| ())?;
            }
            name if name.eq_ignore_ascii_case("expect") => expects = true,
            name if name.eq_ignore_ascii_case("transfer-encoding") => {
                request.unsupported = Some("request bodies with a transfer coding; send a Content-Length");
            }
            name if name.eq_ignore_ascii_case("content-encoding") && text().contains("aws-chunked") => {
                request.unsupported = Some("aws-chunked bodies; send the body as it is");
            }
            name if name.eq_ignore_ascii_case("x-amz-copy-source") => request.unsupported = Some("copies"),
            _ => {}
        }
    }
    if body_bytes > PUT_BODY_MAX {
        request.unsupported = Some("bodies above 64 MiB");
    }
    if request.unsupported.is_some() {
        body_bytes = 0; // answered at once and the connection closed
    }
    Ok(Some((Pending { request, head_bytes, body_bytes: body_bytes as usize }, expects)))
}
