//! glommio: in memory every header lies in front of its body and leaves with it; a direct read brings a buffer of the
//! runtime's own, so its header leaves by itself.
#![forbid(unsafe_code)]

use super::head::{ROOM_BYTES, asked};
use super::{Service, memory, tell};
use anyhow::{Context, Result, ensure};
use futures_lite::io::{AsyncReadExt as _, AsyncWriteExt as _};
use glommio::io::DmaFile;
use glommio::net::{TcpListener, TcpStream};
use glommio::{LocalExecutorBuilder, Placement};
use std::rc::Rc;

/// What the runtime takes for its own buffers beside those of the reads, bytes: its default.
const OWN_BYTES: usize = 10 << 20;

enum Bodies {
    Memory(&'static [u8]),
    Drive(DmaFile),
}

/// Serves for ever.
///
/// # Errors
/// Memory, the ring, or the file is refused.
pub(super) fn serve(service: &Service) -> Result<()> {
    let reads = service.connections * service.size as usize;
    // The process is tied to its core already.
    let executor = LocalExecutorBuilder::new(Placement::Unbound).io_memory(OWN_BYTES + 2 * reads).make();
    let executor = executor.map_err(|error| anyhow::anyhow!("making an executor: {error}"))?;
    executor.run(async {
        let bodies = match &service.file {
            None => Bodies::Memory(memory(service)?),
            Some(path) => {
                let file = DmaFile::open(path).await;
                Bodies::Drive(file.map_err(|error| anyhow::anyhow!("opening {}: {error}", path.display()))?)
            }
        };
        let bodies = Rc::new((bodies, service.clone(), service.head()));
        let listener = TcpListener::bind("127.0.0.1:0").map_err(said)?;
        tell(listener.local_addr().map_err(said)?)?;
        loop {
            let stream = listener.accept().await.map_err(said).context("accepting")?;
            stream.set_nodelay(true).map_err(said)?;
            let bodies = Rc::clone(&bodies);
            let answering = glommio::spawn_local(async move {
                let (bodies, service, head) = &*bodies;
                if let Err(error) = answer(stream, bodies, service, head).await {
                    eprintln!("{error:#}");
                }
            });
            answering.detach();
        }
    })
}

async fn answer(mut stream: TcpStream, bodies: &Bodies, service: &Service, head: &[u8]) -> Result<()> {
    let mut received: Vec<u8> = Vec::new();
    let mut room = vec![0; ROOM_BYTES];
    loop {
        let Some((object, used)) = asked(&received)? else {
            let count = stream.read(&mut room).await?;
            if count == 0 {
                return Ok(());
            }
            received.extend_from_slice(&room[..count]);
            continue;
        };
        received.drain(..used);
        let size = service.size as usize;
        match bodies {
            Bodies::Memory(bytes) => {
                let stride = head.len() + size;
                let start = (object % service.objects) as usize * stride;
                stream.write_all(&bytes[start..start + stride]).await?;
            }
            Bodies::Drive(file) => {
                let offset = service.offset(object);
                let body = file.read_at_aligned(offset, size).await.map_err(said)?;
                ensure!(body.len() == size, "a short read of {} bytes at {offset}", body.len());
                stream.write_all(head).await?;
                stream.write_all(&body).await?;
            }
        }
    }
}

/// Its errors carry what cannot cross threads; their words can.
fn said(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("{error:#}")
}
