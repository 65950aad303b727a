//! A closed-loop HTTP/1.1 load: as many keep-alive connections as asked, each sending its next request when
//! the answer before is complete, all on one thread, all reading into one reused buffer.
//!
//! It is the measuring side of `tests/run long`: light enough to leave its core some room, and strict about
//! what it counts. An answer with the wrong status or length is an error, never a request served. Bytes are
//! not compared here; the behaviours do that. It prints one line of JSON.

use anyhow::{Context as _, bail, ensure};
use clap::{Parser, ValueEnum};
use rustix::net::RecvFlags;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

#[derive(Parser, Clone)]
struct Options {
    /// Server.
    address: SocketAddr,
    /// Objects are PREFIX0, PREFIX1, … of `--count`; e.g. `/bucket/k/`.
    prefix: String,
    /// How many objects there are.
    #[arg(long)]
    count: u64,
    /// Bytes that every answer must have.
    #[arg(long)]
    bytes: u64,
    /// Connections.
    #[arg(long, default_value_t = 32)]
    connections: u64,
    /// In which order objects are asked for; `once` asks for each exactly once and stops, to warm a cache.
    #[arg(long, value_enum, default_value_t = Order::Random)]
    order: Order,
    /// Measured time in seconds; unused with `--requests` and `--order once`.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Stop after this many measured requests instead of after a time.
    #[arg(long)]
    requests: Option<u64>,
    /// Seconds after which a run that has not ended by itself fails, its connections cut: a server that stops answering
    /// must not stop those who wait for the figures.
    #[arg(long, default_value_t = 600.0)]
    limit: f64,
    /// Seconds of load before measuring begins.
    #[arg(long, default_value_t = 0.0)]
    warm_up: f64,
    /// Seed of the random order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Let the kernel drop the bodies instead of copying them to us (`MSG_TRUNC`): every byte still comes through the
    /// connection and is counted, but this side pays little for it, so that the server is the limit.
    #[arg(long)]
    discard: bool,
    /// Value that `x-forebay-cache` must have on every measured answer.
    #[arg(long)]
    tier: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    Random,
    Sequential,
    Once,
}

/// What all connections share.
struct Load {
    options: Options,
    next: Cell<u64>,
    random: RefCell<fastrand::Rng>,
    buffer: RefCell<Vec<u8>>,
    measuring: Cell<bool>,
    stop: Cell<bool>,
    requests: Cell<u64>,
    bytes: Cell<u64>,
    errors: Cell<u64>,
    first_error: RefCell<Option<String>>,
    latencies_us: RefCell<Vec<u32>>,
    /// The slowest requests, the slowest first.
    worst: RefCell<Vec<Course>>,
}

/// Where the time of a request went, microseconds since it was sent.
#[derive(Clone, Copy, Default)]
struct Course {
    whole: u32,
    /// To the first byte.
    first: u32,
    /// The longest wait between two reads, and how many bytes had come before it.
    gap: u32,
    gap_at: u64,
    reads: u32,
}

/// What is read while the end of the head is looked for: the body behind it is not to be copied twice, or dropped.
const HEAD_READ_BYTES: usize = 1024;
/// How many of the slowest requests are told.
const WORST_TOLD: usize = 8;

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    let limit = options.limit;
    let within = async { tokio::time::timeout(Duration::from_secs_f64(limit), run(options)).await };
    let report = local
        .block_on(&runtime, within)
        .with_context(|| format!("no end after {limit} s; a longer run wants a larger --limit"))??;
    println!("{report}");
    Ok(())
}

async fn run(options: Options) -> anyhow::Result<serde_json::Value> {
    let load = Rc::new(Load {
        next: Cell::new(0),
        random: RefCell::new(fastrand::Rng::with_seed(options.seed)),
        buffer: RefCell::new(vec![0; 1 << 20]),
        measuring: Cell::new(options.warm_up == 0.0),
        stop: Cell::new(false),
        requests: Cell::new(0),
        bytes: Cell::new(0),
        errors: Cell::new(0),
        first_error: RefCell::new(None),
        latencies_us: RefCell::new(Vec::with_capacity(1 << 20)),
        worst: RefCell::default(),
        options: options.clone(),
    });
    let mut tasks = Vec::new();
    for _ in 0..options.connections {
        let load = Rc::clone(&load);
        tasks.push(tokio::task::spawn_local(async move { connection(&load).await }));
    }
    if options.warm_up > 0.0 {
        tokio::time::sleep(Duration::from_secs_f64(options.warm_up)).await;
        load.measuring.set(true);
    }
    let start = Instant::now();
    if options.order != Order::Once && options.requests.is_none() {
        tokio::time::sleep(Duration::from_secs_f64(options.seconds)).await;
        load.stop.set(true);
    }
    for task in tasks {
        task.await?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let mut sorted = load.latencies_us.borrow().clone();
    sorted.sort_unstable();
    let percentile =
        |share: f64| sorted.get(((sorted.len() as f64 * share) as usize).min(sorted.len().max(1) - 1));
    Ok(serde_json::json!({
        "requests": load.requests.get(),
        "bytes": load.bytes.get(),
        "errors": load.errors.get(),
        "first_error": *load.first_error.borrow(),
        "seconds": seconds,
        "requests_per_second": load.requests.get() as f64 / seconds,
        "p50_us": percentile(0.50),
        "p99_us": percentile(0.99),
        "max_us": sorted.last(),
        "worst": load.worst.borrow().iter().map(|course| serde_json::json!({
            "us": course.whole, "first_us": course.first, "gap_us": course.gap, "gap_at": course.gap_at,
            "reads": course.reads,
        })).collect::<Vec<_>>(),
    }))
}

/// One connection until the load stops; an error ends it, is counted and opens the next one.
async fn connection(load: &Load) {
    while let Err(error) = requests(load).await {
        load.errors.set(load.errors.get() + 1);
        load.first_error.borrow_mut().get_or_insert_with(|| format!("{error:#}"));
        if load.stop.get() || load.errors.get() > 1000 {
            return;
        }
    }
}

async fn requests(load: &Load) -> anyhow::Result<()> {
    let options = &load.options;
    let mut stream = TcpStream::connect(options.address).await.context("connecting")?;
    stream.set_nodelay(true)?;
    while let Some(object) = next_object(load) {
        let request = format!("GET {}{object} HTTP/1.1\r\nHost: {}\r\n\r\n", options.prefix, options.address);
        let measured = load.measuring.get();
        let sent = Instant::now();
        stream.write_all(request.as_bytes()).await.context("sending")?;
        let (length, mut course) =
            answer(load, &mut stream, sent).await.with_context(|| format!("object {object}"))?;
        if measured {
            load.requests.set(load.requests.get() + 1);
            load.bytes.set(load.bytes.get() + length);
            course.whole = sent.elapsed().as_micros() as u32;
            load.latencies_us.borrow_mut().push(course.whole);
            load.keep_worst(course);
        }
    }
    Ok(())
}

impl Load {
    fn keep_worst(&self, course: Course) {
        let mut worst = self.worst.borrow_mut();
        if worst.len() == WORST_TOLD && worst.last().is_some_and(|last| last.whole >= course.whole) {
            return;
        }
        let place = worst.partition_point(|one| one.whole > course.whole);
        worst.insert(place, course);
        worst.truncate(WORST_TOLD);
    }
}

impl Course {
    /// A read that ended now, with `before` bytes read before it; `last` is when the one before it ended.
    fn note(&mut self, sent: Instant, last: &mut Instant, before: u64) {
        let now = Instant::now();
        self.reads += 1;
        let gap = (now - *last).as_micros() as u32;
        if before == 0 {
            self.first = (now - sent).as_micros() as u32;
        } else if gap > self.gap {
            (self.gap, self.gap_at) = (gap, before);
        }
        *last = now;
    }
}

fn next_object(load: &Load) -> Option<u64> {
    let options = &load.options;
    let number = load.next.get();
    let over = match (options.order, options.requests) {
        (Order::Once, _) => number >= options.count,
        (_, Some(requests)) => number >= requests,
        (_, None) => load.stop.get(),
    };
    if over {
        return None;
    }
    load.next.set(number + 1);
    Some(match options.order {
        Order::Random => load.random.borrow_mut().u64(0..options.count),
        Order::Sequential | Order::Once => number % options.count,
    })
}

/// Reads one answer to a request that was sent at `sent`; the length of its body, and its course.
async fn answer(load: &Load, stream: &mut TcpStream, sent: Instant) -> anyhow::Result<(u64, Course)> {
    let mut head = Vec::new();
    let (mut course, mut last) = (Course::default(), sent);
    let (end, received) = loop {
        let before = head.len() as u64;
        let count = receive(load, stream, HEAD_READ_BYTES, |bytes| head.extend_from_slice(bytes)).await?;
        ensure!(count > 0, "closed before the answer");
        course.note(sent, &mut last, before);
        if let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") {
            break (end + 4, head.len());
        }
        ensure!(head.len() < 64 * 1024, "no end of head in 64 KiB");
    };
    let text = std::str::from_utf8(&head[..end]).context("head is not text")?;
    if !text.starts_with("HTTP/1.1 200 ") {
        bail!("{}", text.lines().next().unwrap_or("empty head"));
    }
    let value = |name: &str| {
        text.lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(have, _)| have.eq_ignore_ascii_case(name))
    };
    let length: u64 = value("content-length").context("no Content-Length")?.1.trim().parse()?;
    ensure!(length == load.options.bytes, "{length} bytes instead of {}", load.options.bytes);
    if let Some(tier) = &load.options.tier {
        let have = value("x-forebay-cache").map_or("", |(_, value)| value.trim());
        ensure!(have == tier, "answered from `{have}`, not from `{tier}`");
    }
    let mut left =
        (end as u64 + length).checked_sub(received as u64).context("more bytes than the answer has")?;
    while left > 0 {
        let count = if load.options.discard {
            discard(load, stream, left).await?
        } else {
            receive(load, stream, usize::MAX, |_| ()).await? as u64
        };
        ensure!(count > 0, "closed {left} bytes before the end");
        course.note(sent, &mut last, end as u64 + length - left);
        left = left.checked_sub(count).context("more bytes than the answer has")?;
    }
    Ok((length, course))
}

/// As many of the next `left` bytes as there are, dropped by the kernel: tcp(7), `MSG_TRUNC`.
async fn discard(load: &Load, stream: &mut TcpStream, left: u64) -> anyhow::Result<u64> {
    loop {
        let dropped = stream.try_io(tokio::io::Interest::READABLE, || {
            // Nothing is written to it: its length is what may be dropped.
            let mut buffer = load.buffer.borrow_mut();
            let most = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
            Ok(rustix::net::recv(&*stream, &mut buffer[..most], RecvFlags::TRUNC)?)
        });
        match dropped {
            Ok((_, count)) => return Ok(count as u64),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                stream.readable().await.context("waiting")?;
            }
            Err(error) => return Err(error).context("dropping"),
        }
    }
}

/// One read of at most so many bytes into the shared buffer, which is borrowed only while the read runs.
async fn receive(
    load: &Load,
    stream: &mut TcpStream,
    most: usize,
    seen: impl FnOnce(&[u8]),
) -> anyhow::Result<usize> {
    let count = std::future::poll_fn(|context| {
        let mut buffer = load.buffer.borrow_mut();
        let most = most.min(buffer.len());
        let mut target = ReadBuf::new(&mut buffer[..most]);
        Pin::new(&mut *stream).poll_read(context, &mut target).map_ok(|()| target.filled().len())
    })
    .await
    .context("receiving")?;
    seen(&load.buffer.borrow()[..count]);
    Ok(count)
}
