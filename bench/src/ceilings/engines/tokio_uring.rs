//! tokio-uring: in memory every header lies in front of its body, from a drive both are put into one registered buffer, so
//! that either way an answer is one write.
#![forbid(unsafe_code)]

use super::head::{ROOM_BYTES, asked};
use super::{GRAIN_BYTES, Service, listen, memory, tell};
use anyhow::{Context, Result};
use std::rc::Rc;
use tokio_uring::buf::BoundedBuf as _;
use tokio_uring::buf::fixed::FixedBufPool;
use tokio_uring::fs::File;
use tokio_uring::net::TcpStream;

const GRAIN: usize = GRAIN_BYTES as usize;
/// Entries of the ring.
const ENTRIES: u32 = 1024;

enum Bodies {
    Memory(&'static [u8]),
    /// A registered buffer has room for a header, up to where the body is aligned.
    Drive(File, FixedBufPool<Vec<u8>>),
}

/// Serves for ever.
///
/// # Errors
/// Memory, the ring, or the file is refused.
pub(super) fn serve(service: &Service) -> Result<()> {
    let file = service.open()?;
    // One thread submits, and only when it enters is anything done for it; no interrupts of the running thread.
    let mut ring = tokio_uring::uring_builder();
    ring.setup_coop_taskrun().setup_single_issuer().setup_taskrun_flag();
    tokio_uring::builder().entries(ENTRIES).uring_builder(&ring).start(async {
        let bodies = match file {
            None => Bodies::Memory(memory(service)?),
            Some(file) => {
                let buffer = || vec![0; service.size as usize + 2 * GRAIN];
                let pool = FixedBufPool::new(std::iter::repeat_with(buffer).take(service.connections + 1));
                pool.register().context("registering buffers; raise the memlock limit (ulimit -l)")?;
                Bodies::Drive(File::from_std(file), pool)
            }
        };
        let bodies = Rc::new((bodies, service.clone(), service.head()));
        let listener = listen()?;
        let address = listener.local_addr()?;
        let listener = tokio_uring::net::TcpListener::from_std(listener);
        tell(address)?;
        loop {
            let (stream, _) = listener.accept().await.context("accepting")?;
            stream.set_nodelay(true)?;
            let bodies = Rc::clone(&bodies);
            tokio_uring::spawn(async move {
                let (bodies, service, head) = &*bodies;
                if let Err(error) = answer(&stream, bodies, service, head).await {
                    eprintln!("{error:#}");
                }
            });
        }
    })
}

async fn answer(stream: &TcpStream, bodies: &Bodies, service: &Service, head: &[u8]) -> Result<()> {
    let mut received: Vec<u8> = Vec::new();
    let mut room = Vec::with_capacity(ROOM_BYTES);
    loop {
        let Some((object, used)) = asked(&received)? else {
            let (count, mut back) = stream.read(room).await;
            if count? == 0 {
                return Ok(());
            }
            received.append(&mut back);
            room = back;
            continue;
        };
        received.drain(..used);
        let size = service.size as usize;
        match bodies {
            Bodies::Memory(bytes) => {
                let stride = head.len() + size;
                let start = (object % service.objects) as usize * stride;
                stream.write_all(&bytes[start..start + stride]).await.0?;
            }
            Bodies::Drive(file, pool) => {
                let mut buffer = pool.next(size + 2 * GRAIN).await;
                let place = buffer.as_ptr().addr();
                let body = (place + head.len()).next_multiple_of(GRAIN) - place;
                buffer[body - head.len()..body].copy_from_slice(head);
                let offset = service.offset(object);
                let (count, slice) = file.read_fixed_at(buffer.slice(body..body + size), offset).await;
                let count = count.with_context(|| format!("reading at {offset}"))?;
                anyhow::ensure!(count == size, "a short read of {count} bytes at {offset}");
                let whole = slice.into_inner().slice(body - head.len()..body + size);
                stream.write_fixed_all(whole).await.0?;
            }
        }
    }
}
