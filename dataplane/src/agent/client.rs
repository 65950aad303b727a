//! One question to the control plane and its answer, over a connection of its own.
//!
//! A question is asked every ten seconds, so a pool would be idle nearly always. The token's file is read anew for each
//! question: a token that was replaced works from the next one on.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use forebay_control_api::{FleetState, Heartbeat, NodeId, Problem, Registration, Span};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use serde::Serialize;
use tokio::time::timeout;

use crate::config::chain;
use crate::origin::{DialError, Dialer};

/// Name look-up, TCP and TLS together.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How long an answer may take beyond the time for which it may be held back.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// A state of a thousand accelerators, policies of full length and ten thousand purges stays below this.
const STATE_BYTES_MAX: usize = 64 << 20;

/// How to ask.
#[derive(Debug)]
pub(super) struct Client {
    url: Uri,
    token_file: PathBuf,
    dialer: Dialer,
}

/// Why there is no answer, or not the one that was hoped for; in words that say what to do.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// There is no token to show.
    #[error("the token file {}: {why}", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// Nobody answers.
    #[error(
        "the control plane at {url} cannot be reached ({why}); this node serves on with the state it has"
    )]
    Unreachable {
        /// Whom we asked.
        url: Uri,
        /// What went wrong.
        why: String,
    },
    /// It says no.
    #[error("the control plane refuses: {0}{hint}", hint = hint(.0))]
    Refused(Problem),
    /// Somebody else answers.
    #[error("what answers at {url} does not speak as a control plane does ({why}); is --control right?")]
    Strange {
        /// Whom we asked.
        url: Uri,
        /// What it said.
        why: String,
    },
}

impl Failure {
    /// The control plane's word for it.
    pub(super) fn code(&self) -> &str {
        match self {
            Self::Refused(problem) => &problem.code,
            _ => "",
        }
    }
}

fn hint(problem: &Problem) -> &'static str {
    match problem.code.as_str() {
        "wrong_token" | "wrong_role" | "no_token" => {
            "; put the new token into this node's --token-file, it is read again at each try"
        }
        _ => "",
    }
}

impl Client {
    /// Connects to nothing yet.
    pub(super) fn new(url: Uri, token_file: PathBuf) -> Self {
        let ca_bundle = std::env::var_os("AWS_CA_BUNDLE").map(PathBuf::from);
        Self { url, token_file, dialer: Dialer::new(CONNECT_LIMIT, ca_bundle) }
    }

    /// Says that the node has started.
    pub(super) async fn register(&self, id: &NodeId, said: &Registration) -> Result<FleetState, Failure> {
        let (status, body) = self.ask(Method::PUT, &format!("/v1/nodes/{id}"), said, Duration::ZERO).await?;
        if status == StatusCode::OK { self.state(&body) } else { Err(self.refusal(status, &body)) }
    }

    /// Says how the node is; a state if there is a newer one than it holds, within `wait`.
    pub(super) async fn heartbeat(
        &self,
        id: &NodeId,
        said: &Heartbeat,
        wait: Duration,
    ) -> Result<Option<FleetState>, Failure> {
        let span = Span::from_millis(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let path = format!("/v1/nodes/{id}/heartbeat?wait={span}");
        let (status, body) = self.ask(Method::POST, &path, said, wait).await?;
        match status {
            StatusCode::OK => self.state(&body).map(Some),
            StatusCode::NO_CONTENT => Ok(None),
            _ => Err(self.refusal(status, &body)),
        }
    }

    fn state(&self, body: &[u8]) -> Result<FleetState, Failure> {
        serde_json::from_slice(body)
            .map_err(|error| Failure::Strange { url: self.url.clone(), why: error.to_string() })
    }

    fn refusal(&self, status: StatusCode, body: &[u8]) -> Failure {
        match serde_json::from_slice::<Problem>(body) {
            Ok(problem) => Failure::Refused(problem),
            Err(_) => Failure::Strange { url: self.url.clone(), why: format!("status {status}") },
        }
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        said: &impl Serialize,
        wait: Duration,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let token = read_token(&self.token_file)?;
        let path = format!("{}{path}", self.url.path().trim_end_matches('/'));
        let host = self.url.authority().map(ToString::to_string).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, host)
            .header(AUTHORIZATION, format!("Bearer {token}"))
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(serde_json::to_vec(said).expect("what is said is plain data"))))
            .map_err(|error| self.unreachable(&error))?;
        let stream = self.dialer.dial(self.url.clone()).await.map_err(|error| match error {
            DialError::TimedOut => self.unreachable(&"connecting took too long"),
            DialError::Failed(error) => self.unreachable(&chain(&*error)),
        })?;
        let exchange = async {
            let (mut sender, connection) = http1::handshake(stream).await?;
            let connection = tokio::spawn(connection);
            let answer = sender.send_request(request).await?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, STATE_BYTES_MAX).collect().await;
            connection.abort();
            Ok::<_, hyper::Error>((head.status, body))
        };
        match timeout(wait + ANSWER_LIMIT, exchange).await {
            Ok(Ok((status, Ok(body)))) => Ok((status, body.to_bytes())),
            Ok(Ok((_, Err(error)))) => Err(self.unreachable(&chain(&*error))),
            Ok(Err(error)) => Err(self.unreachable(&chain(&error))),
            Err(_) => Err(self.unreachable(&"it did not answer in time")),
        }
    }

    fn unreachable(&self, why: &dyn std::fmt::Display) -> Failure {
        Failure::Unreachable { url: self.url.clone(), why: why.to_string() }
    }
}

/// The one line of the token's file.
fn read_token(path: &Path) -> Result<String, Failure> {
    let failed = |why: String| Failure::Token { path: path.to_owned(), why };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let token = text.trim_end_matches(['\n', '\r']).to_owned();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(failed(
            "it must hold one line of visible characters; `forebay-control token add --role node --out FILE` makes it"
                .into(),
        ));
    }
    Ok(token)
}
