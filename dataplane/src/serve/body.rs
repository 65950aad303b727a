//! The body of a request: what every door delivers, and HTTP/1.1's, out of the bytes of its connection.
#![forbid(unsafe_code)]

use bytes::Bytes;

use super::connection::{Connection, Ended};
use crate::http1::{BodyLength, ChunkedDecoder};
use crate::metrics::CloseReason;

/// The body of a request, as its door delivers it.
pub(super) trait RequestBody {
    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, Ended>;

    /// Says that the body may come.
    async fn send_continue(&mut self) -> Result<(), Ended>;

    /// Whether all of it has been taken.
    fn is_finished(&self) -> bool;
}

/// The body of a request of HTTP/1.1.
pub(super) struct Http1Body<'a> {
    connection: &'a mut Connection,
    reader: BodyReader,
}

impl<'a> Http1Body<'a> {
    /// What follows a head on `connection`.
    pub(super) fn new(connection: &'a mut Connection, length: BodyLength) -> Self {
        Self { connection, reader: BodyReader::new(length) }
    }
}

impl RequestBody for Http1Body<'_> {
    async fn next(&mut self) -> Result<Option<Bytes>, Ended> {
        self.reader.next(self.connection).await
    }

    async fn send_continue(&mut self) -> Result<(), Ended> {
        self.connection.send_continue().await
    }

    fn is_finished(&self) -> bool {
        self.reader.is_finished()
    }
}

/// Where in its framing a request body is.
#[derive(Debug)]
enum BodyReader {
    /// So many bytes are still to come.
    Length(u64),
    /// Chunks are still to come.
    Chunked(ChunkedDecoder),
}

impl BodyReader {
    fn new(length: BodyLength) -> Self {
        match length {
            BodyLength::None => Self::Length(0),
            BodyLength::Length(length) => Self::Length(length),
            BodyLength::Chunked => Self::Chunked(ChunkedDecoder::new()),
        }
    }

    /// Whether the next byte of the connection belongs to the next request.
    fn is_finished(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(decoder) => decoder.is_finished(),
        }
    }

    /// The next bytes of the body; `None` at its end. One copy, out of the connection's buffer.
    async fn next(&mut self, connection: &mut Connection) -> Result<Option<Bytes>, Ended> {
        loop {
            if self.is_finished() {
                return Ok(None);
            }
            if connection.buffer.is_empty() && !connection.receive_body().await? {
                return Err(Ended(CloseReason::Receive));
            }
            let buffer = &mut connection.buffer;
            let bytes = match self {
                Self::Length(left) => {
                    let count = (*left).min(buffer.len() as u64);
                    *left -= count;
                    let bytes = Bytes::copy_from_slice(&buffer[..count as usize]);
                    buffer.drain(..count as usize);
                    bytes
                }
                Self::Chunked(decoder) => {
                    let decoded = decoder.push(buffer).map_err(|_| Ended(CloseReason::BadRequest))?;
                    let bytes = Bytes::copy_from_slice(&buffer[decoded.data]);
                    buffer.drain(..decoded.used);
                    bytes
                }
            };
            if !bytes.is_empty() {
                return Ok(Some(bytes));
            }
        }
    }
}
