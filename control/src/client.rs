//! One request to the control plane, or to one node's admin door, over TCP or its Unix socket.
//!
//! A connection is made for each request: an operator's command asks once. Whatever is answered is taken with a
//! deadline and a bound, because a wrong address may lead to anything.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use forebay_control_api::{ErrorBody, Problem};
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// Where a node's admin door is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NodeAddress {
    /// `HOST:PORT`.
    Tcp(String),
    /// A socket file.
    Unix(PathBuf),
}

impl FromStr for NodeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let forms = || format!("`{text}` is not a node: write http://HOST:PORT or unix:/path/to/socket");
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(forms()) } else { Ok(Self::Unix(path.into())) };
        }
        if text.starts_with("https://") {
            return Err(format!(
                "`{text}`: the admin door of this version does not speak TLS; use http:// or unix:"
            ));
        }
        Self::tcp(text, ADMIN_PORT, forms)
    }
}

/// Where the control plane is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControlAddress(pub(crate) NodeAddress);

impl FromStr for ControlAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("https://") {
            return Err(format!(
                "`{text}`: the control plane of this version does not speak TLS; use http://"
            ));
        }
        let forms = || format!("`{text}` is not a control plane: write http://HOST:PORT");
        NodeAddress::tcp(text, CONTROL_PORT, forms).map(Self)
    }
}

impl NodeAddress {
    fn tcp(text: &str, port: u16, forms: impl Fn() -> String) -> Result<Self, String> {
        let uri: http::Uri = text.parse().map_err(|_| forms())?;
        let (Some("http"), Some(authority), "" | "/", None) =
            (uri.scheme_str(), uri.authority(), uri.path(), uri.query())
        else {
            return Err(forms());
        };
        if authority.as_str().contains('@') {
            return Err(format!("`{text}`: a token is given with --token-file, not in the URL"));
        }
        let port = authority.port_u16().unwrap_or(port);
        Ok(Self::Tcp(format!("{}:{port}", authority.host())))
    }
}

impl std::fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(authority) => write!(f, "http://{authority}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

const ADMIN_PORT: u16 = 7071;
const CONTROL_PORT: u16 = 7080;
const DEADLINE: Duration = Duration::from_secs(30);
const REPLY_BYTES_MAX: usize = 16 << 20;

/// Sends one request and returns the body of a success.
///
/// # Errors
/// The node cannot be reached, does not answer in time, or refuses; its own words are in the error.
pub(crate) async fn ask(
    node: &NodeAddress,
    token: Option<&str>,
    method: Method,
    path: &str,
    body: Option<String>,
) -> Result<Bytes> {
    let mut request = Request::builder().method(method).uri(path);
    let host = match node {
        NodeAddress::Tcp(authority) => authority,
        NodeAddress::Unix(_) => "node",
    };
    request = request.header(header::HOST, host);
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    if body.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())))?;
    let answer = async {
        match node {
            NodeAddress::Tcp(authority) => converse(TcpStream::connect(authority).await?, request).await,
            NodeAddress::Unix(path) => converse(UnixStream::connect(path).await?, request).await,
        }
    };
    let (status, body) = tokio::time::timeout(DEADLINE, answer)
        .await
        .unwrap_or_else(|_| bail!("no answer in {} seconds", DEADLINE.as_secs()))
        .with_context(|| format!("asking {node}"))?;
    if status.is_success() {
        return Ok(body);
    }
    if let Ok(problem) = serde_json::from_slice::<Problem>(&body) {
        bail!("{node} answered {}: {problem}", status.as_u16());
    }
    match serde_json::from_slice::<ErrorBody>(&body) {
        Ok(refusal) => bail!("{node} answered {}: {}", status.as_u16(), refusal.message),
        Err(_) => bail!("{node} answered {status}, and not as a Forebay node does; is it the right address?"),
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes)> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let reply = sender.send_request(request).await?;
        let status = reply.status();
        let body = Limited::new(reply.into_body(), REPLY_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| anyhow::anyhow!(error))?;
        Ok((status, body.to_bytes()))
    };
    // The connection moves the bytes; what goes wrong on it shows in the exchange.
    let connection = async {
        let _ = connection.await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = exchange => done,
        () = connection => unreachable!("it is pending for ever"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_plane_is_an_address() {
        let tcp = |text: &str| Ok(ControlAddress(NodeAddress::Tcp(text.to_owned())));
        assert_eq!("http://10.0.0.1".parse(), tcp("10.0.0.1:7080"));
        assert_eq!("http://10.0.0.1:80/".parse(), tcp("10.0.0.1:80"));
        for (text, words) in
            [("https://h", "TLS"), ("unix:/a", "http://HOST:PORT"), ("http://t@h", "--token-file")]
        {
            let error = text.parse::<ControlAddress>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_node_is_an_address_or_a_socket() {
        let tcp = |text: &str| Ok(NodeAddress::Tcp(text.to_owned()));
        assert_eq!("http://127.0.0.1:7071".parse(), tcp("127.0.0.1:7071"));
        assert_eq!("http://node.example/".parse(), tcp("node.example:7071"));
        assert_eq!("http://[::1]:80".parse(), tcp("[::1]:80"));
        assert_eq!("unix:/run/f.sock".parse(), Ok(NodeAddress::Unix("/run/f.sock".into())));
        for (text, words) in [
            ("", "http://HOST:PORT"),
            ("unix:", "unix:/path"),
            ("127.0.0.1:7071", "http://HOST:PORT"),
            ("http://h/path", "http://HOST:PORT"),
            ("http://h?x=y", "http://HOST:PORT"),
            ("ftp://h", "http://HOST:PORT"),
            ("https://h", "TLS"),
            ("http://secret@h", "--token-file"),
        ] {
            let error = text.parse::<NodeAddress>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
