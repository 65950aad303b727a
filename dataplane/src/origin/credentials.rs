//! With whose keys we ask the origin.
//!
//! Our own pair of variables first, so that a node can be given keys without touching what else on the host reads
//! AWS_*; then the standard AWS chain, each link by reqsign. When nothing has an answer the origin is asked unsigned, and
//! whoever starts the node says so from `source`. A link that *is* configured and fails is an error at start, not a silent
//! step down to anonymous; the metadata service alone may be absent, since most machines have none.
//!
//! Found once at start and cloned into the workers: clones share one copy and refresh it once. While a refresh fails, the
//! old keys serve as long as they are valid. Keys and tokens appear in no log, error or `Debug` output.
#![forbid(unsafe_code)]

use super::dial::{DialError, Dialer};
use super::error::OriginError;
use crate::engine::task;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use reqsign_aws_v4::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider, EnvCredentialProvider,
    IMDSv2CredentialProvider, ProcessCredentialProvider, ProfileCredentialProvider, RequestSigner,
    SSOCredentialProvider, StaticCredentialProvider,
};
use reqsign_core::time::Timestamp;
use reqsign_core::{
    CommandExecute, CommandOutput, Context, Env, Error, HttpSend, ProvideCredential, ProvideCredentialDyn,
    Signer, SigningCredential,
};
use reqsign_file_read_tokio::TokioFileRead;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// Where keys come from, and the keys while they last. Clones share both.
#[derive(Clone)]
pub struct Credentials {
    /// `None` for anonymous.
    chain: Option<Arc<Chain>>,
    context: Context,
    source: CredentialSource,
}

/// Which link of the chain had the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CredentialSource {
    /// `FOREBAY_ORIGIN_ACCESS_KEY` and `FOREBAY_ORIGIN_SECRET_KEY`.
    ForebayEnvironment,
    /// `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`.
    AwsEnvironment,
    /// `~/.aws/credentials` or `~/.aws/config`.
    ProfileFile,
    /// A cached sign-on token.
    SingleSignOn,
    /// A token file exchanged at STS.
    WebIdentity,
    /// The profile's `credential_process`.
    Process,
    /// The container's credentials endpoint.
    Container,
    /// The metadata service of the instance.
    InstanceMetadata,
    /// The caller, by `Credentials::given`.
    Given,
    /// Nobody: requests go unsigned.
    Anonymous,
}

impl fmt::Display for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ForebayEnvironment => "FOREBAY_ORIGIN_ACCESS_KEY",
            Self::AwsEnvironment => "AWS_ACCESS_KEY_ID",
            Self::ProfileFile => "AWS profile files",
            Self::SingleSignOn => "AWS single sign-on",
            Self::WebIdentity => "web identity token",
            Self::Process => "credential_process",
            Self::Container => "container credentials endpoint",
            Self::InstanceMetadata => "instance metadata",
            Self::Given => "given keys",
            Self::Anonymous => "none: requests to the origin are not signed",
        })
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Walks the chain over this process's environment.
    ///
    /// # Errors
    /// `Credentials`, when a configured source fails or our own pair of variables is half set.
    pub async fn discover() -> Result<Self, OriginError> {
        Self::discover_in(ProcessEnvironment).await
    }

    /// Unsigned, whatever the environment says.
    pub fn anonymous() -> Self {
        Self { chain: None, context: Context::new(), source: CredentialSource::Anonymous }
    }

    /// These keys and no others.
    pub fn given(access_key: &str, secret_key: &str) -> Self {
        let link = StaticCredentialProvider::new(access_key, secret_key);
        let chain = Chain { links: vec![(CredentialSource::Given, Box::new(link))], held: Mutex::default() };
        Self { chain: Some(Arc::new(chain)), context: Context::new(), source: CredentialSource::Given }
    }

    /// Which link of the chain answered at start.
    pub fn source(&self) -> CredentialSource {
        self.source
    }

    pub(super) async fn discover_in(environment: impl Env) -> Result<Self, OriginError> {
        let ca_bundle = environment.var(CA_BUNDLE).map(PathBuf::from);
        let web = CredentialWeb { dialer: Dialer::new(METADATA_CONNECT, ca_bundle) };
        let context = Context::new()
            .with_file_read(TokioFileRead)
            .with_http_send(web)
            .with_command_execute(CredentialCommand)
            .with_env(environment);
        let chain = Chain::standard();
        let mut failures = Vec::new();
        match chain.walk(&context, &mut failures).await {
            Some((source, credential)) => {
                *chain.held.lock().await = Held { credential: Some(credential), quiet_until: None };
                Ok(Self { chain: Some(Arc::new(chain)), context, source })
            }
            None => {
                match failures.into_iter().find(|(source, _)| *source != CredentialSource::InstanceMetadata) {
                    Some((source, error)) => Err(refused(format!("{source}: {error}"), error.is_retryable())),
                    None => Ok(Self::anonymous()),
                }
            }
        }
    }

    /// A signer for S3 in `region`; `None` for anonymous.
    pub(super) fn signer(&self, region: &str) -> Option<Signer<Credential>> {
        let chain = Arc::clone(self.chain.as_ref()?);
        let request_signer = RequestSigner::new("s3", region).with_standard_session_token();
        Some(Signer::new(
            self.context.clone(),
            chain as Arc<dyn ProvideCredentialDyn<Credential = Credential>>,
            request_signer,
        ))
    }
}

/// The environment variable that names a PEM file of trust roots.
pub(super) const CA_BUNDLE: &str = "AWS_CA_BUNDLE";
const ACCESS_KEY: &str = "FOREBAY_ORIGIN_ACCESS_KEY";
const SECRET_KEY: &str = "FOREBAY_ORIGIN_SECRET_KEY";

// Off AWS nobody answers at the metadata address, and a node should not wait long to learn that.
const METADATA_CONNECT: Duration = Duration::from_secs(1);
const WEB_ANSWER: Duration = Duration::from_secs(10);
const WEB_ANSWER_BYTES: usize = 1 << 20;
const COMMAND: Duration = Duration::from_mins(1);
/// After a failed refresh the old keys serve this long before the next try, lest every request waits for a dead service.
const REFRESH_PAUSE: Duration = Duration::from_secs(10);
/// A request signed with keys that end sooner may arrive too late.
const KEY_MARGIN: Duration = Duration::from_secs(10);

fn refused(reason: String, retryable: bool) -> OriginError {
    OriginError::Credentials { reason, retryable }
}

/// What `Signer` says when there are no keys, in our words.
pub(super) fn signing_failed(error: &Error) -> OriginError {
    use reqsign_core::ErrorKind::{ConfigInvalid, CredentialInvalid, RequestInvalid};
    match error.kind() {
        RequestInvalid => OriginError::unsendable(format!("it cannot be signed: {error}")),
        // The chain answered at start; that it does not now may pass.
        kind => refused(
            error.to_string(),
            error.is_retryable() || matches!(kind, CredentialInvalid | ConfigInvalid),
        ),
    }
}

struct Chain {
    links: Vec<(CredentialSource, Box<dyn ProvideCredentialDyn<Credential = Credential>>)>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    credential: Option<Credential>,
    quiet_until: Option<Instant>,
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.links.iter().map(|(source, _)| source)).finish()
    }
}

impl Chain {
    fn standard() -> Self {
        use CredentialSource as From;
        let links: Vec<(CredentialSource, Box<dyn ProvideCredentialDyn<Credential = Credential>>)> = vec![
            (From::ForebayEnvironment, Box::new(ForebayEnvironment)),
            (From::AwsEnvironment, Box::new(EnvCredentialProvider::new())),
            (From::ProfileFile, Box::new(ProfileCredentialProvider::new())),
            (From::SingleSignOn, Box::new(SSOCredentialProvider::default())),
            (From::WebIdentity, Box::new(AssumeRoleWithWebIdentityCredentialProvider::default())),
            (From::Process, Box::new(ProcessCredentialProvider::default())),
            (From::Container, Box::new(ECSCredentialProvider::default())),
            (From::InstanceMetadata, Box::new(IMDSv2CredentialProvider::new())),
        ];
        Self { links, held: Mutex::default() }
    }

    /// The first link that has keys. A link that fails does not hide the ones after it, but a half-set pair of our own
    /// ends the walk: its user meant those keys and no others.
    async fn walk(
        &self,
        context: &Context,
        failures: &mut Vec<(CredentialSource, Error)>,
    ) -> Option<(CredentialSource, Credential)> {
        for (source, link) in &self.links {
            match link.provide_credential_dyn(context).await {
                Ok(Some(credential)) => return Some((*source, credential)),
                Ok(None) => {}
                Err(error) => {
                    failures.push((*source, error));
                    if *source == CredentialSource::ForebayEnvironment {
                        return None;
                    }
                }
            }
        }
        None
    }
}

impl ProvideCredential for Chain {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> reqsign_core::Result<Option<Credential>> {
        let mut held = self.held.lock().await;
        if let Some(credential) = held.credential.as_ref().filter(|credential| credential.is_valid()) {
            return Ok(Some(credential.clone()));
        }
        // Within the two minutes before their end: time to refresh, no need to hurry.
        let last = held.credential.clone().filter(|last| last.is_valid_at(Timestamp::now() + KEY_MARGIN));
        if last.is_some() && held.quiet_until.is_some_and(|until| Instant::now() < until) {
            return Ok(last);
        }
        let mut failures = Vec::new();
        if let Some((source, credential)) = self.walk(context, &mut failures).await {
            tracing::debug!(%source, "origin credentials refreshed");
            *held = Held { credential: Some(credential.clone()), quiet_until: None };
            return Ok(Some(credential));
        }
        for (source, error) in &failures {
            tracing::warn!(%source, reason = %error, "origin credentials not refreshed");
        }
        held.quiet_until = Some(Instant::now() + REFRESH_PAUSE);
        match (last, failures.pop()) {
            (Some(last), _) => Ok(Some(last)),
            (None, Some((_, error))) => Err(error),
            (None, None) => Ok(None),
        }
    }
}

/// The pair of variables that is ours alone.
#[derive(Debug)]
struct ForebayEnvironment;

impl ProvideCredential for ForebayEnvironment {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> reqsign_core::Result<Option<Credential>> {
        let set = |name: &str| context.env_var(name).filter(|value| !value.is_empty());
        match (set(ACCESS_KEY), set(SECRET_KEY)) {
            (Some(access_key_id), Some(secret_access_key)) => Ok(Some(Credential {
                access_key_id,
                secret_access_key,
                session_token: None,
                expires_in: None,
            })),
            (None, None) => Ok(None),
            (Some(_), None) => Err(Error::config_invalid(format!("set {SECRET_KEY} as well"))),
            (None, Some(_)) => Err(Error::config_invalid(format!("set {ACCESS_KEY} as well"))),
        }
    }
}

/// This process's variables. Unlike reqsign's own, it does not panic at a variable that is not UTF-8.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProcessEnvironment;

impl Env for ProcessEnvironment {
    fn var(&self, key: &str) -> Option<String> {
        std::env::var_os(key)?.into_string().ok()
    }

    fn vars(&self) -> HashMap<String, String> {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        std::env::vars_os().filter_map(text).collect()
    }

    fn home_dir(&self) -> Option<PathBuf> {
        std::env::home_dir()
    }
}

/// The few requests that fetching keys takes: a connection each.
#[derive(Debug)]
struct CredentialWeb {
    dialer: Dialer,
}

impl HttpSend for CredentialWeb {
    async fn http_send(&self, request: http::Request<Bytes>) -> reqsign_core::Result<http::Response<Bytes>> {
        match timeout(WEB_ANSWER, exchange(&self.dialer, request)).await {
            Ok(answer) => answer.map_err(|error| Error::unexpected(error).set_retryable(true)),
            Err(_) => Err(Error::unexpected("no answer in time").set_retryable(true)),
        }
    }
}

/// The error is a sentence without the request in it: requests for keys hold tokens.
async fn exchange(dialer: &Dialer, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, String> {
    let (mut parts, body) = request.into_parts();
    let host = parts.uri.authority().ok_or("a request without a host")?.to_string();
    let stream = dialer.dial(parts.uri.clone()).await.map_err(|error| match error {
        DialError::TimedOut => format!("connecting to {host} took too long"),
        DialError::Failed(error) => format!("connecting to {host}: {error}"),
    })?;
    let unanswered = |error: hyper::Error| format!("{host} gave no answer: {error}");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.map_err(unanswered)?;
    tokio::spawn(task::counted(async move { drop(connection.await) }));
    let value = http::HeaderValue::from_str(&host).map_err(|_| "a host that is no header value")?;
    parts.headers.entry(http::header::HOST).or_insert(value);
    parts.uri = parts.uri.path_and_query().map_or_else(http::Uri::default, |path| path.clone().into());
    let answer =
        sender.send_request(http::Request::from_parts(parts, Full::new(body))).await.map_err(unanswered)?;
    let (parts, body) = answer.into_parts();
    let body = Limited::new(body, WEB_ANSWER_BYTES).collect().await;
    let body = body.map_err(|error| format!("the answer of {host}: {error}"))?.to_bytes();
    Ok(http::Response::from_parts(parts, body))
}

/// Runs a profile's `credential_process`.
#[derive(Debug)]
struct CredentialCommand;

impl CommandExecute for CredentialCommand {
    async fn command_execute<'a>(
        &'a self,
        program: &'a str,
        args: &'a [&'a str],
    ) -> reqsign_core::Result<CommandOutput> {
        let mut command = tokio::process::Command::new(program);
        let run = command.args(args).stdin(Stdio::null()).kill_on_drop(true).output();
        match timeout(COMMAND, run).await {
            Ok(Ok(output)) => Ok(CommandOutput {
                status: output.status.code().unwrap_or(-1),
                stdout: output.stdout,
                stderr: output.stderr,
            }),
            Ok(Err(error)) => Err(Error::unexpected(format!("running {program}: {error}"))),
            Err(_) => Err(Error::unexpected(format!("{program} did not end within {COMMAND:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqsign_core::StaticEnv;
    use std::path::Path;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    fn environment(home: &Path, pairs: &[(&str, &str)]) -> StaticEnv {
        let mut envs: HashMap<String, String> =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        // Nobody may answer for the metadata service of the machine that runs the tests.
        envs.entry("AWS_EC2_METADATA_DISABLED".into()).or_insert_with(|| "true".into());
        StaticEnv { home_dir: Some(home.to_owned()), envs }
    }

    async fn key_of(credentials: &Credentials) -> Option<String> {
        let chain = credentials.chain.as_ref()?;
        let credential = chain.provide_credential(&credentials.context).await.unwrap().unwrap();
        Some(credential.access_key_id)
    }

    const OURS: [(&str, &str); 2] = [(ACCESS_KEY, "OURS"), (SECRET_KEY, "s1")];
    const AWS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "AWSENV"), ("AWS_SECRET_ACCESS_KEY", "s2")];

    #[tokio::test]
    async fn our_variables_come_before_those_of_aws_and_those_before_files() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        let file = "[default]\naws_access_key_id = FILE\naws_secret_access_key = s3\n[other]\naws_access_key_id = OTHER\naws_secret_access_key = s4\n";
        std::fs::write(home.path().join(".aws/credentials"), file).unwrap();
        let both: Vec<_> = OURS.into_iter().chain(AWS).collect();
        let cases = [
            (&both[..], CredentialSource::ForebayEnvironment, "OURS"),
            (&AWS, CredentialSource::AwsEnvironment, "AWSENV"),
            (&[], CredentialSource::ProfileFile, "FILE"),
            (&[("AWS_PROFILE", "other")], CredentialSource::ProfileFile, "OTHER"),
        ];
        for (pairs, source, key) in cases {
            let found = Credentials::discover_in(environment(home.path(), pairs)).await.unwrap();
            assert_eq!((found.source(), key_of(&found).await.as_deref()), (source, Some(key)));
        }
    }

    #[tokio::test]
    async fn an_empty_chain_is_anonymous_and_says_so() {
        let home = tempfile::tempdir().unwrap();
        let found = Credentials::discover_in(environment(home.path(), &[])).await.unwrap();
        assert_eq!(found.source(), CredentialSource::Anonymous);
        assert!(found.signer("r").is_none());
        assert!(found.source().to_string().contains("not signed"));
    }

    #[tokio::test]
    async fn half_a_pair_is_refused_even_when_others_have_keys() {
        let home = tempfile::tempdir().unwrap();
        for (half, missing) in [(OURS[0], SECRET_KEY), (OURS[1], ACCESS_KEY)] {
            let pairs = [half, AWS[0], AWS[1]];
            let error = Credentials::discover_in(environment(home.path(), &pairs)).await.unwrap_err();
            assert!(error.to_string().contains(missing) && !error.is_retryable(), "{error}");
        }
    }

    #[tokio::test]
    async fn a_configured_source_that_fails_is_not_silently_anonymous() {
        let home = tempfile::tempdir().unwrap();
        let pairs =
            [("AWS_ROLE_ARN", "arn:aws:iam::1:role/x"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/nowhere/token")];
        let error = Credentials::discover_in(environment(home.path(), &pairs)).await.unwrap_err();
        assert!(error.to_string().contains("web identity"), "{error}");
    }

    #[tokio::test]
    async fn a_credential_process_is_run() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        let script = home.path().join("keys.json");
        std::fs::write(&script, r#"{"Version":1,"AccessKeyId":"PROCESS","SecretAccessKey":"s"}"#).unwrap();
        let config = format!("[default]\ncredential_process = cat {}\n", script.display());
        std::fs::write(home.path().join(".aws/config"), config).unwrap();
        let found = Credentials::discover_in(environment(home.path(), &[])).await.unwrap();
        assert_eq!(
            (found.source(), key_of(&found).await.as_deref()),
            (CredentialSource::Process, Some("PROCESS"))
        );
    }

    /// Answers each request head with the body that `answer` gives for its first line.
    async fn metadata_service(answer: fn(&str) -> &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                let line = String::from_utf8(head).unwrap().lines().next().unwrap().to_owned();
                let body = answer(&line);
                let text = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                stream.write_all(text.as_bytes()).await.unwrap();
            }
        });
        format!("http://{address}")
    }

    #[tokio::test]
    async fn the_metadata_service_is_asked_last_over_our_own_client() {
        let home = tempfile::tempdir().unwrap();
        let endpoint = metadata_service(|line| match line {
            "PUT /latest/api/token HTTP/1.1" => "token",
            "GET /latest/meta-data/iam/security-credentials/ HTTP/1.1" => "role",
            "GET /latest/meta-data/iam/security-credentials/role HTTP/1.1" => {
                r#"{"Code":"Success","AccessKeyId":"METAKEY","SecretAccessKey":"s","Token":"t","Expiration":"2999-01-01T00:00:00Z"}"#
            }
            other => panic!("{other}"),
        })
        .await;
        let pairs = [
            ("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint.as_str()),
            ("AWS_EC2_METADATA_DISABLED", "false"),
        ];
        let found = Credentials::discover_in(environment(home.path(), &pairs)).await.unwrap();
        assert_eq!(
            (found.source(), key_of(&found).await.as_deref()),
            (CredentialSource::InstanceMetadata, Some("METAKEY"))
        );
        let shown = format!("{found:?}");
        assert!(!shown.contains("METAKEY"), "{shown}");
    }

    #[derive(Debug)]
    struct Lease(std::sync::Mutex<Vec<Option<Credential>>>);

    impl ProvideCredential for Lease {
        type Credential = Credential;

        async fn provide_credential(&self, _: &Context) -> reqsign_core::Result<Option<Credential>> {
            let next = self.0.lock().unwrap().pop().expect("asked more often than expected");
            next.map(Some).ok_or_else(|| Error::unexpected("service away"))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn old_keys_serve_while_a_refresh_fails() {
        let key = |name: &str, seconds| Credential {
            access_key_id: name.into(),
            secret_access_key: "s".into(),
            session_token: None,
            expires_in: Some(Timestamp::now() + Duration::from_secs(seconds)),
        };
        // Popped from the end: a key about to expire, a failure, then a fresh one.
        let lease = Lease(std::sync::Mutex::new(vec![Some(key("NEW", 3600)), None, Some(key("OLD", 90))]));
        let chain =
            Chain { links: vec![(CredentialSource::Container, Box::new(lease))], held: Mutex::default() };
        let context = Context::new();
        let ask = async || chain.provide_credential(&context).await.unwrap().unwrap().access_key_id;
        assert_eq!(ask().await, "OLD");
        assert_eq!(ask().await, "OLD"); // the refresh failed
        assert_eq!(ask().await, "OLD"); // and is not tried again at once
        tokio::time::advance(REFRESH_PAUSE).await;
        assert_eq!(ask().await, "NEW");
        assert_eq!(ask().await, "NEW");
    }
}
