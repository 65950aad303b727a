//! A small blocking HTTP/1.1 client that hides nothing.
//!
//! It never retries, never follows, never pools: a body that ends early, a length that lies or a second answer
//! on the wire is an error that the test sees. Requests can be sent as raw bytes, since half of the behaviours
//! are about requests that no library would let out.

#![expect(
    clippy::missing_errors_doc,
    reason = "every error is the socket's own, or an answer that is no HTTP"
)]

use crate::wait::PATIENCE;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};

/// One answer, whole.
#[derive(Debug)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Header names in lower case with their values, in the order received.
    pub headers: Vec<(String, String)>,
    /// The body, complete: as long as Content-Length says, or as the last chunk or the close ended it.
    pub body: Vec<u8>,
}

impl Response {
    /// The first value of the header `name` (lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(have, _)| have == name).map(|(_, value)| value.as_str())
    }

    /// What `x-forebay-cache` says the answer was planned from; empty if the header is absent.
    pub fn tier(&self) -> &str {
        self.header("x-forebay-cache").unwrap_or("")
    }

    /// The body as text, for messages.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// One keep-alive connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    ahead: Vec<u8>, // received, not yet part of an answer
}

impl Connection {
    /// Connects; reads and writes fail after [`PATIENCE`] instead of hanging a test.
    pub fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream, ahead: Vec::new() })
    }

    /// Sends bytes as they are.
    pub fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a request head, with `Host` added, and `body` with its length if there is one.
    pub fn send(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
    ) -> io::Result<()> {
        let mut head = format!("{method} {target} HTTP/1.1\r\nHost: {}\r\n", self.stream.peer_addr()?);
        for (name, value) in headers {
            head.extend([name, ": ", value, "\r\n"]);
        }
        if let Some(body) = body {
            head.extend(["Content-Length: ", &body.len().to_string(), "\r\n"]);
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body.unwrap_or_default());
        self.send_raw(&bytes)
    }

    /// Receives one answer to a request of `method` (a HEAD has no body whatever its length says).
    ///
    /// # Errors
    /// `NotConnected` when the connection ends before the first byte of an answer, as a server that closes an idle
    /// connection may do; `UnexpectedEof` when it ends before the answer is complete; `InvalidData` when that is
    /// no HTTP.
    pub fn receive(&mut self, method: &str) -> io::Result<Response> {
        let (status, headers) = loop {
            let head = self.receive_head()?;
            if head.0 >= 200 {
                break head;
            }
        };
        let find = |name: &str| headers.iter().find(|(have, _)| have == name).map(|(_, value)| value.clone());
        let body = if method == "HEAD" || status == 204 || status == 304 {
            Vec::new()
        } else if find("transfer-encoding").is_some() {
            self.receive_chunks()?
        } else if let Some(length) = find("content-length") {
            let length = length.parse().map_err(|_| invalid("Content-Length is no number"))?;
            self.take(length)?
        } else {
            self.receive_rest()?
        };
        Ok(Response { status, headers, body })
    }

    /// Status and headers of the next head on the wire, an interim (1xx) one included; the body stays unread.
    pub fn receive_head(&mut self) -> io::Result<(u16, Vec<(String, String)>)> {
        let end = loop {
            if let Some(end) = self.ahead.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            let nothing_yet = self.ahead.is_empty();
            self.more().map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => error, // patience ended
                _ if nothing_yet => io::Error::new(io::ErrorKind::NotConnected, error),
                _ => error,
            })?;
        };
        let head =
            String::from_utf8(self.ahead.drain(..end).collect()).map_err(|_| invalid("head is not text"))?;
        let mut lines = head.split("\r\n");
        let status = lines
            .next()
            .and_then(|line| line.strip_prefix("HTTP/1.1 "))
            .and_then(|rest| rest.get(..3))
            .and_then(|code| code.parse().ok())
            .ok_or_else(|| invalid("no status line"))?;
        let headers = lines
            .filter(|line| !line.is_empty())
            .map(|line| {
                let (name, value) = line.split_once(':').ok_or_else(|| invalid("header without a colon"))?;
                Ok((name.to_ascii_lowercase(), value.trim().to_owned()))
            })
            .collect::<io::Result<_>>()?;
        Ok((status, headers))
    }

    /// Exactly `length` body bytes.
    pub fn take(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let from_ahead = length.min(self.ahead.len());
        let mut body: Vec<u8> = self.ahead.drain(..from_ahead).collect();
        body.resize(length, 0);
        self.stream.read_exact(&mut body[from_ahead..])?;
        Ok(body)
    }

    /// True if the peer has closed and nothing is left to read; waits for the close.
    pub fn is_closed_by_peer(&mut self) -> bool {
        let mut byte = [0];
        self.ahead.is_empty() && matches!(self.stream.read(&mut byte), Ok(0) | Err(_))
    }

    fn receive_chunks(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.line()?;
            let length = usize::from_str_radix(line.split(';').next().unwrap_or(""), 16)
                .map_err(|_| invalid("chunk size is no number"))?;
            if length == 0 {
                while !self.line()?.is_empty() {}
                return Ok(body);
            }
            body.extend(self.take(length)?);
            if !self.line()?.is_empty() {
                return Err(invalid("chunk is longer than its size"));
            }
        }
    }

    fn receive_rest(&mut self) -> io::Result<Vec<u8>> {
        let mut body = std::mem::take(&mut self.ahead);
        self.stream.read_to_end(&mut body)?;
        Ok(body)
    }

    fn line(&mut self) -> io::Result<String> {
        let end = loop {
            if let Some(end) = self.ahead.windows(2).position(|window| window == b"\r\n") {
                break end;
            }
            self.more()?;
        };
        let line = self.ahead.drain(..end + 2).take(end).collect();
        String::from_utf8(line).map_err(|_| invalid("line is not text"))
    }

    fn more(&mut self) -> io::Result<()> {
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer)? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed before the answer was complete")),
            count => {
                self.ahead.extend_from_slice(&buffer[..count]);
                Ok(())
            }
        }
    }
}

/// One request on a connection of its own.
pub fn ask(
    address: SocketAddr,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: Option<&[u8]>,
) -> io::Result<Response> {
    let mut connection = Connection::open(address)?;
    connection.send(method, target, headers, body)?;
    connection.receive(method)
}

/// A GET on a connection of its own; panics if there is no complete answer.
#[track_caller]
pub fn get(address: SocketAddr, target: &str) -> Response {
    ask(address, "GET", target, &[], None).unwrap_or_else(|error| panic!("GET {target}: {error}"))
}

/// A GET of `first-last`, both inclusive, on a connection of its own; panics if there is no complete answer.
#[track_caller]
pub fn get_range(address: SocketAddr, target: &str, first: u64, last: u64) -> Response {
    let range = format!("bytes={first}-{last}");
    ask(address, "GET", target, &[("Range", &range)], None)
        .unwrap_or_else(|error| panic!("GET {target} {range}: {error}"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
