//! The closed loop: a fixed number of lanes, each a connection with one request under way, on one thread.
//!
//! No runtime and no allocation per request: a request is the same bytes with another key, a body is verified in
//! the receive buffer right after it arrived. Latency runs from just before the first request byte is given to
//! the kernel until the receive that delivered the last body byte returned; connecting is outside of it. Lanes
//! never retry: what failed is counted, and the next object is asked.
#![forbid(unsafe_code)]

use super::{Target, Verify};
use crate::clock::{MILLISECOND_NS, SECOND_NS, now_ns, timespec};
use crate::content::{Content, splitmix64};
use crate::origin::catalog::object_name;
use crate::recorder::{Block, CacheAnswer, SeriesCutter, Window};
use rustix::event::epoll;
use rustix::net::{RecvFlags, recv};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Fits the second-level cache, so that verification reads what the kernel just wrote there.
const RECEIVE_BYTES: usize = 256 * 1024;
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// What is read while the end of a head is looked for: the body behind it is then not copied twice.
const HEAD_READ_BYTES: usize = 4096;
/// After so many failures a block is given up.
const FAILURES_MAX: u64 = 100;
const FAILURES_KEPT: usize = 8;

/// How much of an object a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// So many bytes, at most all, at a multiple of their number that the request's number draws.
    Aligned(u64),
    /// So many bytes, at most all, at a place that the request's number draws.
    Anywhere(u64),
}

/// What one block does.
pub struct Job<'a> {
    /// Whom it asks.
    pub target: &'a Target,
    /// The bucket whose content the objects have: the origin's, whatever the alias that is asked.
    pub content_bucket: &'a str,
    /// What the objects' names begin with.
    pub prefix: &'a str,
    /// How many objects there are; request `i` asks object `i` modulo this.
    pub objects: u64,
    /// The number of the first request.
    pub first: u64,
    /// Whether a request's number draws its object, instead of one coming after the other.
    pub is_drawn: bool,
    /// How many requests.
    pub count: u64,
    /// Bytes of each object.
    pub size: u64,
    /// The version that each must have.
    pub version: u32,
    /// Lanes.
    pub concurrency: usize,
    /// How much is checked.
    pub verify: Verify,
    /// How much of an object each request asks for.
    pub part: Part,
    /// Whether the kernel drops bodies instead of copying them here (`MSG_TRUNC`, tcp(7)): they come through the
    /// connection and are counted, but nobody sees them. Only with [`Verify::Length`].
    pub discard: bool,
    /// Whether an answer without an `ETag` is wrong; where there is one it is checked in any case.
    pub needs_etag: bool,
    /// Headers that every request has, each with the end of its line.
    pub headers: &'a [u8],
    /// Signed headers by object, if requests are signed.
    pub signatures: Option<&'a [Box<[u8]>]>,
    /// The longest a request may take.
    pub timeout: Duration,
}

/// The `ETag` of each object as first seen, on whichever side: later ones must be the same.
#[derive(Default)]
pub struct EtagLedger {
    seen: Vec<u64>,
}

impl EtagLedger {
    fn agrees(&mut self, object: u64, etag: &[u8]) -> bool {
        let place = object as usize;
        if self.seen.len() <= place {
            self.seen.resize(place + 1, 0);
        }
        // 0 means unseen; a hash that is 0 becomes 1.
        let hash = twox_hash::xxhash3_64::Hasher::oneshot(etag).max(1);
        if self.seen[place] == 0 {
            self.seen[place] = hash;
        }
        self.seen[place] == hash
    }
}

/// Runs the block to its end.
///
/// # Errors
/// No connection can be made at the start, or the kernel refuses an epoll. What fails later is counted in the
/// block.
pub fn run(job: &Job, etags: &mut EtagLedger, stop: &AtomicBool) -> io::Result<Block> {
    let mut block = Block::default();
    if job.count == 0 || job.objects == 0 {
        return Ok(block);
    }
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut lanes = Vec::new();
    for place in 0..job.concurrency.min(usize::try_from(job.count).unwrap_or(usize::MAX)) {
        let stream = connect(job.target, job.timeout, &epoll, place, &mut block)?;
        lanes.push(Lane::new(stream));
    }
    let start = now_ns();
    let thread_before = thread_times();
    let mut run = Run {
        job,
        etags,
        epoll,
        series: SeriesCutter::new(start),
        issued: 0,
        failures: 0,
        lanes_done_once: 0,
        steady_from: None,
        steady_until: None,
        last_end: start,
        buffer: vec![0; RECEIVE_BYTES],
        block,
    };
    run.drive(&mut lanes, stop)?;
    let Run { mut block, series, steady_from, steady_until, last_end, .. } = run;
    series.finish(&mut block);
    let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 / SECOND_NS as f64;
    block.transfer_window = Window { seconds: seconds(start, last_end), ops: block.ops, bytes: block.bytes };
    if let (Some(from), Some(until)) = (steady_from, steady_until) {
        block.steady_window = Window {
            seconds: seconds(from.at_ns, until.at_ns),
            ops: until.ops.saturating_sub(from.ops),
            bytes: until.bytes.saturating_sub(from.bytes),
        };
    }
    if let (Some(before), Some(after)) = (thread_before, thread_times()) {
        block.client_cpu_seconds = (after.0 - before.0) as f64 / 1e9;
        block.client_wait_seconds = (after.1 - before.1) as f64 / 1e9;
    }
    Ok(block)
}

#[derive(Clone, Copy)]
struct Mark {
    at_ns: u64,
    ops: u64,
    bytes: u64,
}

struct Run<'a> {
    job: &'a Job<'a>,
    etags: &'a mut EtagLedger,
    epoll: std::os::fd::OwnedFd,
    series: SeriesCutter,
    issued: u64,
    failures: u64,
    lanes_done_once: usize,
    steady_from: Option<Mark>,
    steady_until: Option<Mark>,
    last_end: u64,
    buffer: Vec<u8>,
    block: Block,
}

struct Lane {
    stream: TcpStream,
    busy: bool,
    done_once: bool,
    // The peer sends no more: a short read has not emptied the socket, its end is still to be read.
    hung_up: bool,
    request: Vec<u8>,
    request_sent: usize,
    // `bucket/key`, to compute the content from.
    name: Vec<u8>,
    head: Vec<u8>,
    object: u64,
    // Of the object, which bytes were asked for.
    asked: Range<u64>,
    content: Content,
    // Of the answer under way.
    answer: Option<AnswerHead>,
    received: u64,
    wrong_at: Option<u64>,
    send_ns: u64,
    first_ns: u64,
    body_ns: u64,
}

#[derive(Clone, Copy)]
struct AnswerHead {
    status: u16,
    length: u64,
    close: bool,
    cache: CacheAnswer,
    qos: bool,
    // What is wrong with the facts, before any byte of the body.
    fault: Option<&'static str>,
}

enum Outcome {
    Waiting,
    Ended,
    Lost(String),
}

impl Lane {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            busy: false,
            done_once: false,
            hung_up: false,
            request: Vec::with_capacity(1024),
            request_sent: 0,
            name: Vec::with_capacity(256),
            head: Vec::with_capacity(4096),
            object: 0,
            asked: 0..0,
            content: Content::new(b"", 0),
            answer: None,
            received: 0,
            wrong_at: None,
            send_ns: 0,
            first_ns: 0,
            body_ns: 0,
        }
    }
}

impl Run<'_> {
    fn drive(&mut self, lanes: &mut [Lane], stop: &AtomicBool) -> io::Result<()> {
        for lane in lanes.iter_mut() {
            self.next_request(lane);
            if let Outcome::Lost(why) = send(lane) {
                self.lose(lane, &why);
            }
        }
        let mut events = Vec::with_capacity(lanes.len().max(16));
        let timeout_ns = u64::try_from(self.job.timeout.as_nanos()).unwrap_or(u64::MAX);
        let mut next_check = now_ns() + SECOND_NS;
        while lanes.iter().any(|lane| lane.busy) {
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                Some(&timespec(200 * MILLISECOND_NS)),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let place = event.data.u64() as usize;
                let lane = &mut lanes[place];
                let flags = event.flags;
                lane.hung_up |= flags.intersects(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP);
                if lane.busy {
                    self.lane_ready(lane, place);
                }
            }
            if stop.load(Ordering::Relaxed) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "stopped by a signal"));
            }
            if now_ns() >= next_check {
                next_check = now_ns() + SECOND_NS;
                for (place, lane) in lanes.iter_mut().enumerate() {
                    if lane.busy && now_ns().saturating_sub(lane.send_ns) > timeout_ns {
                        self.lose(lane, "timeout");
                        self.reconnect(lane, place);
                    }
                }
            }
        }
        Ok(())
    }

    fn lane_ready(&mut self, lane: &mut Lane, place: usize) {
        match self.receive(lane) {
            Outcome::Waiting => {}
            Outcome::Ended => {
                let close = lane.answer.is_none_or(|answer| answer.close);
                self.end(lane);
                if close && self.issued < self.job.count {
                    self.reconnect(lane, place);
                    return;
                }
                // The answer was read to its last byte and nothing else can be there yet: the next edge tells.
                self.next_request(lane);
                if let Outcome::Lost(why) = send(lane) {
                    self.lose(lane, &why);
                    self.reconnect(lane, place);
                }
            }
            Outcome::Lost(why) => {
                self.lose(lane, &why);
                self.reconnect(lane, place);
            }
        }
    }

    // A new connection and the next request on it. The block ends when no connection can be made any more.
    fn reconnect(&mut self, lane: &mut Lane, place: usize) {
        lane.busy = false;
        while self.issued < self.job.count {
            match connect(self.job.target, self.job.timeout, &self.epoll, place, &mut self.block) {
                Ok(stream) => {
                    lane.stream = stream;
                    lane.hung_up = false;
                    self.next_request(lane);
                    match send(lane) {
                        Outcome::Lost(why) => self.lose(lane, &why),
                        _ => return,
                    }
                }
                Err(error) => {
                    self.fail(&format!("connect: {}", error.kind()));
                    self.issued = self.job.count;
                }
            }
        }
    }

    fn next_request(&mut self, lane: &mut Lane) {
        lane.busy = self.issued < self.job.count && self.failures < FAILURES_MAX;
        if !lane.busy {
            return;
        }
        let number = self.job.first + self.issued;
        // Another draw than that of the place in it.
        let drawn = if self.job.is_drawn { splitmix64(!number) } else { number };
        lane.object = drawn % self.job.objects;
        lane.asked = self.job.asked(number);
        self.issued += 1;
        lane.request.clear();
        lane.request.extend_from_slice(b"GET /");
        lane.request.extend_from_slice(self.job.target.bucket.as_bytes());
        lane.request.push(b'/');
        push_name(&mut lane.request, self.job.prefix, lane.object);
        lane.name.clear();
        lane.name.extend_from_slice(self.job.content_bucket.as_bytes());
        lane.name.push(b'/');
        push_name(&mut lane.name, self.job.prefix, lane.object);
        lane.content = Content::new(&lane.name, self.job.version);
        lane.request.extend_from_slice(b" HTTP/1.1\r\nHost: ");
        lane.request.extend_from_slice(self.job.target.host.as_bytes());
        lane.request.extend_from_slice(b"\r\nUser-Agent: forebay-bench\r\nAccept: */*\r\n");
        if self.job.part != Part::Whole {
            let Range { start, end } = lane.asked;
            // Into memory that is there already: it cannot fail.
            let _ = write!(lane.request, "Range: bytes={start}-{}\r\n", end - 1);
        }
        lane.request.extend_from_slice(self.job.headers);
        if let Some(signatures) = self.job.signatures {
            lane.request.extend_from_slice(&signatures[lane.object as usize]);
        }
        lane.request.extend_from_slice(b"\r\n");
        lane.request_sent = 0;
        lane.head.clear();
        lane.answer = None;
        lane.received = 0;
        lane.wrong_at = None;
        lane.first_ns = 0;
        lane.body_ns = 0;
        if self.issued == self.job.count {
            self.steady_until = Some(self.mark());
        }
        lane.send_ns = now_ns();
    }

    fn mark(&self) -> Mark {
        Mark { at_ns: now_ns(), ops: self.block.ops, bytes: self.block.bytes }
    }

    fn receive(&mut self, lane: &mut Lane) -> Outcome {
        loop {
            let want = if lane.answer.is_none() { HEAD_READ_BYTES } else { self.buffer.len() };
            let buffer = &mut self.buffer[..want];
            let read = if self.job.discard && lane.answer.is_some() {
                // Left as it is: its length is what may be dropped.
                recv(&lane.stream, buffer, RecvFlags::TRUNC).map(|(_, count)| count).map_err(io::Error::from)
            } else {
                lane.stream.read(buffer)
            };
            let count = match read {
                Ok(0) if lane.answer.is_none() && lane.head.is_empty() => {
                    return Outcome::Lost("closed before an answer".to_owned());
                }
                Ok(0) => {
                    // Short: the answer promised more than it held.
                    let answer = lane.answer.get_or_insert(AnswerHead::broken());
                    answer.close = true;
                    answer.fault.get_or_insert("the body is shorter than it says");
                    return Outcome::Ended;
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Outcome::Waiting,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Outcome::Lost(format!("receive: {}", error.kind())),
            };
            let now = now_ns();
            if lane.first_ns == 0 {
                lane.first_ns = now;
            }
            let mut body = 0..count;
            if lane.answer.is_none() {
                let held = lane.head.len();
                lane.head.extend_from_slice(&self.buffer[..count]);
                match parse_head(&lane.head, self.job, self.etags, lane.object, &lane.asked) {
                    Ok(Some((head, used))) => {
                        lane.answer = Some(head);
                        body = used - held..count;
                    }
                    Ok(None) if lane.head.len() < HEAD_BYTES_MAX => {
                        if count < want && !lane.hung_up {
                            return Outcome::Waiting;
                        }
                        continue;
                    }
                    Ok(None) => return Outcome::Lost("a response head above 32 KiB".to_owned()),
                    Err(why) => return Outcome::Lost(why.to_owned()),
                }
            }
            let Some(answer) = &mut lane.answer else { return Outcome::Waiting };
            if !body.is_empty() && lane.body_ns == 0 {
                lane.body_ns = now;
            }
            let bytes = &self.buffer[body];
            if lane.received + bytes.len() as u64 > answer.length {
                answer.fault.get_or_insert("more bytes follow the body than it says");
                answer.close = true;
                lane.received = answer.length;
                return Outcome::Ended;
            }
            if self.job.verify == Verify::Full && answer.is_body() && lane.wrong_at.is_none() {
                lane.wrong_at = lane.content.first_difference(lane.asked.start + lane.received, bytes);
            }
            lane.received += bytes.len() as u64;
            if lane.received == answer.length {
                self.last_end = now;
                return Outcome::Ended;
            }
            if count < want && !lane.hung_up {
                return Outcome::Waiting;
            }
        }
    }

    // An answer came to its end, good or bad.
    fn end(&mut self, lane: &mut Lane) {
        let Some(answer) = lane.answer else { return };
        *self.block.statuses.entry(answer.status).or_default() += 1;
        *self.block.cache.entry(answer.cache).or_default() += 1;
        self.block.qos_delayed += u64::from(answer.qos);
        let wrong = match (answer.fault, lane.wrong_at) {
            (Some(fault), _) => Some(fault.to_owned()),
            (None, Some(at)) => Some(format!("the byte at offset {at} is not the object's")),
            (None, None) => None,
        };
        if let Some(wrong) = wrong {
            self.block.verify_failures += 1;
            self.failures += 1;
            if self.block.failures.len() < FAILURES_KEPT {
                let name = object_name(self.job.prefix, lane.object);
                let sentence =
                    format!("{}/{name} from {}: {wrong}", self.job.target.bucket, self.job.target.host);
                self.block.failures.push(sentence);
            }
            self.series.failure(&mut self.block, now_ns());
        } else if answer.is_body() {
            let latency = self.last_end - lane.send_ns;
            self.block.latency.record(latency);
            self.block.ttfh.record(lane.first_ns - lane.send_ns);
            // An empty object has no body byte; its head is all there is.
            let body_ns = if lane.body_ns == 0 { self.last_end } else { lane.body_ns };
            self.block.ttfb.record(body_ns - lane.send_ns);
            self.block.transfer.record(self.last_end - body_ns);
            self.block.ops += 1;
            self.block.bytes += answer.length;
            self.series.answer(&mut self.block, self.last_end, latency, answer.length);
            if !lane.done_once {
                lane.done_once = true;
                self.lanes_done_once += 1;
                if self.lanes_done_once == self.job.concurrency {
                    self.steady_from = Some(self.mark());
                }
            }
        } else {
            self.fail(&format!("status {}", answer.status));
        }
    }

    fn lose(&mut self, lane: &mut Lane, why: &str) {
        lane.busy = false;
        self.fail(why);
    }

    fn fail(&mut self, why: &str) {
        self.failures += 1;
        *self.block.errors.entry(why.to_owned()).or_default() += 1;
        self.series.failure(&mut self.block, now_ns());
    }
}

impl AnswerHead {
    fn broken() -> Self {
        Self {
            status: 0,
            length: 0,
            close: true,
            cache: CacheAnswer::Unsaid,
            qos: false,
            fault: Some("the head is cut off"),
        }
    }

    fn is_body(&self) -> bool {
        matches!(self.status, 200 | 206)
    }
}

fn connect(
    target: &Target,
    timeout: Duration,
    epoll: &std::os::fd::OwnedFd,
    place: usize,
    block: &mut Block,
) -> io::Result<TcpStream> {
    let before = now_ns();
    let stream = TcpStream::connect_timeout(&target.address, timeout)?;
    block.connect.record(now_ns() - before);
    block.connections += 1;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    // IN only: requests are far smaller than any send buffer, and an OUT edge would wake us after each.
    let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
    epoll::add(epoll, &stream, epoll::EventData::new_u64(place as u64), flags)?;
    Ok(stream)
}

fn send(lane: &mut Lane) -> Outcome {
    while lane.busy && lane.request_sent < lane.request.len() {
        match lane.stream.write(&lane.request[lane.request_sent..]) {
            Ok(count) => lane.request_sent += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Outcome::Lost(format!("send: {}", error.kind())),
        }
    }
    Outcome::Waiting
}

fn push_name(out: &mut Vec<u8>, prefix: &str, index: u64) {
    out.extend_from_slice(prefix.as_bytes());
    let mut digits = [b'0'; 8];
    let mut rest = index;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    out.extend_from_slice(&digits);
}

// The head and where it ends; `None` while bytes are missing. What breaks the framing is an error, what merely
// contradicts what we asked for is a fault of the answer.
fn parse_head(
    bytes: &[u8],
    job: &Job,
    etags: &mut EtagLedger,
    object: u64,
    asked: &Range<u64>,
) -> Result<Option<(AnswerHead, usize)>, &'static str> {
    let mut slots = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut slots);
    let used = match response.parse(bytes) {
        Ok(httparse::Status::Complete(used)) => used,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err("not an HTTP/1.1 response head"),
    };
    let status = response.code.unwrap_or(0);
    let mut answer = AnswerHead {
        status,
        length: 0,
        close: response.version == Some(0),
        cache: CacheAnswer::Unsaid,
        qos: false,
        fault: None,
    };
    let (mut length, mut etag, mut content_range) = (None, None, None);
    for header in response.headers.iter() {
        let name = header.name;
        if name.eq_ignore_ascii_case("content-length") {
            length = std::str::from_utf8(header.value).ok().and_then(|text| text.trim().parse::<u64>().ok());
        } else if name.eq_ignore_ascii_case("etag") {
            etag = Some(header.value);
        } else if name.eq_ignore_ascii_case("x-forebay-cache") {
            answer.cache = CacheAnswer::parse(header.value);
        } else if name.eq_ignore_ascii_case("x-tos-qos-delay-time") {
            answer.qos = true;
        } else if name.eq_ignore_ascii_case("connection") {
            answer.close |= header.value.trim_ascii().eq_ignore_ascii_case(b"close");
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err("a body with a transfer coding, which this client does not read");
        } else if name.eq_ignore_ascii_case("content-range") {
            content_range = Some(header.value);
        }
    }
    answer.length = match (length, status) {
        (Some(length), _) => length,
        (None, 204 | 304) => 0,
        (None, _) => return Err("a body without Content-Length, which this client does not read"),
    };
    if answer.is_body() {
        let is_range = job.part != Part::Whole;
        let told = content_range.and_then(parse_content_range);
        answer.fault = match (status, content_range.is_some(), etag) {
            (206, _, _) if !is_range => Some("a partial answer to a request without Range"),
            (200, _, _) if is_range => Some("the whole object for a range of it"),
            (200, true, _) => Some("a Content-Range on a whole answer"),
            (206, ..) if told != Some((asked.clone(), job.size)) => {
                Some("Content-Range is not what was asked for")
            }
            _ if answer.length != asked.end - asked.start => {
                Some("Content-Length is not that of what was asked for")
            }
            (_, _, None) if job.needs_etag => Some("no ETag"),
            (_, _, Some(etag)) if !etags.agrees(object, etag) => Some("its ETag is not the one seen before"),
            _ => None,
        };
    }
    Ok(Some((answer, used)))
}

// `bytes FIRST-LAST/SIZE`, as what it says: a half-open range and the size.
fn parse_content_range(value: &[u8]) -> Option<(Range<u64>, u64)> {
    let (range, size) = std::str::from_utf8(value).ok()?.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((first.parse().ok()?..last.parse::<u64>().ok()?.checked_add(1)?, size.parse().ok()?))
}

impl Job<'_> {
    // Which bytes the request of this number asks for.
    fn asked(&self, number: u64) -> Range<u64> {
        let drawn = splitmix64(number);
        let (start, length) = match self.part {
            Part::Whole => (0, self.size),
            Part::Aligned(length) => {
                let length = length.min(self.size);
                (drawn % self.size.checked_div(length).unwrap_or(1) * length, length)
            }
            Part::Anywhere(length) => {
                let length = length.min(self.size);
                (drawn % (self.size - length + 1), length)
            }
        };
        start..start + length
    }
}

// Processor time and waiting time of this thread, ns; `None` where the kernel does not tell.
fn thread_times() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let mut words = text.split_whitespace().map(str::parse::<u64>);
    Some((words.next()?.ok()?, words.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_catalog() {
        for index in [0, 7, 12_345_678, 99_999_999] {
            let mut out = Vec::new();
            push_name(&mut out, "p/", index);
            assert_eq!(out, object_name("p/", index).into_bytes());
        }
    }

    #[test]
    fn ranges_lie_in_the_object_and_say_where() {
        let target = Target::parse("http://127.0.0.1:1/b").expect("whole");
        let job = |size, part| Job {
            target: &target,
            content_bucket: "b",
            prefix: "",
            objects: 1,
            first: 0,
            is_drawn: false,
            count: 1,
            size,
            version: 1,
            concurrency: 1,
            verify: Verify::Full,
            part,
            discard: false,
            needs_etag: true,
            headers: b"",
            signatures: None,
            timeout: Duration::from_secs(1),
        };
        for part in [Part::Whole, Part::Aligned(1000), Part::Anywhere(1000), Part::Anywhere(2000)] {
            assert_eq!(job(1000, part).asked(7), 0..1000, "{part:?}");
        }
        let starts = |part| {
            let seen = (0..2000).map(|number| job(1000, part).asked(number));
            let checked = seen.inspect(|asked| assert!(asked.end - asked.start == 300 && asked.end <= 1000));
            checked.map(|asked| asked.start).collect::<std::collections::BTreeSet<u64>>()
        };
        assert_eq!(starts(Part::Aligned(300)).into_iter().collect::<Vec<_>>(), [0, 300, 600]);
        let anywhere = starts(Part::Anywhere(300));
        assert!(
            anywhere.len() > 500 && anywhere.first() < Some(&20) && anywhere.last() > Some(&680),
            "{anywhere:?}"
        );
        assert_eq!(parse_content_range(b"bytes 300-599/1000"), Some((300..600, 1000)));
        for wrong in ["bytes */1000", "bytes 300-599", "300-599/1000", "bytes 1-18446744073709551615/2"] {
            assert_eq!(parse_content_range(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn an_etag_may_never_change() {
        let mut ledger = EtagLedger::default();
        assert!(ledger.agrees(3, b"\"a\"") && ledger.agrees(0, b"\"b\""));
        assert!(ledger.agrees(3, b"\"a\"") && !ledger.agrees(3, b"\"b\""));
    }
}
