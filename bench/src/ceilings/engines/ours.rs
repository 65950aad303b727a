//! The node's own engine, used as the node uses it.
#![forbid(unsafe_code)]

use super::head::{ROOM_BYTES, asked};
use super::{Runtime, Service, content, listen, tell};
use anyhow::{Context, Result};
use forebay_dataplane::arena::{Arena, ArenaOptions, Lease, Purpose};
use forebay_dataplane::engine::uring::{Registry, Ring};
use forebay_dataplane::engine::{Engine, Outgoing, SendPolicy, SendWatch, Sends, Slice, Socket, task};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::rc::Rc;
use tokio::runtime::{Builder, LocalOptions};

const PAGE_BYTES: usize = 2 << 20;
/// Up to so many slots a page the arena has a slot size for each number.
const EXACT_MAX: u64 = 12;
/// Touches after which the arena counts bytes as hot.
const TOUCHES: usize = 4;

struct Bodies {
    arena: &'static Arena,
    file: Option<File>,
    memory: Vec<Lease>,
    service: Service,
    head: Vec<u8>,
}

/// Serves for ever.
///
/// # Errors
/// Memory, the ring, or the file is refused.
pub(super) fn serve(service: &Service) -> Result<()> {
    let whole = |pieces: u64| {
        // A page holds slots of one size only, and a slot of the smaller sizes may be an eighth larger than its piece.
        let fitting = PAGE_BYTES as u64 / service.size;
        let slots = if fitting <= EXACT_MAX { fitting } else { fitting * 8 / 9 };
        (pieces.div_ceil(slots) as usize + 1) * PAGE_BYTES
    };
    let set = if service.file.is_some() { PAGE_BYTES } else { whole(service.objects) };
    let reads = whole(service.connections as u64);
    let options = ArenaOptions { bytes: set + reads + 4 * PAGE_BYTES, reads_bytes: reads, fills_bytes: set };
    let arena = Arena::build(options).context("taking memory")?;
    while arena.join_chunk().context("taking memory")?.is_some() {}
    let mut memory = Vec::new();
    if service.file.is_none() {
        let mut body = vec![0; service.size as usize];
        for object in 0..service.objects {
            let mut lease = arena.grant(Purpose::Fill, body.len()).context("no memory for a body")?;
            content(object).fill(0, &mut body);
            lease.append(&body);
            let lease = lease.freeze();
            (0..TOUCHES).for_each(|_| lease.touch());
            memory.push(lease);
        }
    }
    let bodies = Rc::new(Bodies {
        arena,
        file: service.open()?,
        memory,
        service: service.clone(),
        head: service.head(),
    });
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
    runtime.context("making a runtime")?.block_on(async {
        let sends = if service.runtime == Runtime::OursCopied { Sends::Copy } else { Sends::Auto };
        let ring = Ring::start(SendPolicy { sends, ..SendPolicy::default() })
            .context("io_uring is not granted here (forebay-node doctor says why)")?;
        let registry = Registry::build(arena).context("registering memory")?;
        ring.register(arena, &registry.registered()).context("registering memory")?;
        let engine = Engine::Uring(ring);
        let listener = listen()?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let listener = engine.adopt(listener.into())?;
        tell(address)?;
        loop {
            let accepted = engine.accept(&listener).await.context("accepting")?;
            rustix::net::sockopt::set_tcp_nodelay(&accepted, true)?;
            let (engine, bodies) = (engine.clone(), Rc::clone(&bodies));
            let socket = engine.adopt(accepted)?;
            task::spawn(async move {
                if let Err(error) = answer(&engine, &socket, &bodies).await {
                    eprintln!("{error:#}");
                }
            });
        }
    })
}

async fn answer(engine: &Engine, socket: &Socket, bodies: &Bodies) -> Result<()> {
    let watch = SendWatch::default();
    let mut received = Vec::with_capacity(ROOM_BYTES);
    let mut header = Vec::new();
    loop {
        let Some((object, used)) = asked(&received)? else {
            let (count, back) = engine.recv(socket, received).await;
            received = back;
            if count? == 0 {
                return Ok(());
            }
            continue;
        };
        received.drain(..used);
        let size = bodies.service.size as usize;
        let lease = match &bodies.file {
            None => bodies.memory[object as usize % bodies.memory.len()].clone(),
            Some(file) => {
                let lease = bodies.arena.grant(Purpose::Read, size).context("no memory for a read")?;
                let offset = bodies.service.offset(object);
                let (read, lease) = engine.read_at(file.as_raw_fd(), offset, lease, size).await;
                read.with_context(|| format!("reading at {offset}"))?;
                lease.freeze()
            }
        };
        header.extend_from_slice(&bodies.head);
        let mut outgoing = Outgoing::header(header);
        outgoing.push(Slice::new(lease, 0..size));
        while !outgoing.is_empty() {
            let (sent, back) = engine.send(socket, outgoing, &watch).await;
            sent?;
            outgoing = back;
        }
        outgoing.clear();
        header = outgoing.header;
    }
}
