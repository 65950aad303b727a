//! `forebay-control serve`: the control plane as a process.
//!
//! It opens the store, sees to it that somebody can administer it, listens, and watches the nodes until it is told to
//! stop. On its first start there is no token that could issue tokens, so it makes one and writes it beside the store,
//! readable by its owner alone.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use forebay_control_api::{Role, Span, TokenBody};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::error::ApiError;
use crate::http;
use crate::service::{FileToken, Patience, Service, new_token};
use crate::store::Store;

/// How the control plane is started.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Address to answer on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7080")]
    listen: SocketAddr,

    /// Where everything is kept: embedded:PATH, a file that is made if it is not there
    #[arg(long, value_name = "STORE")]
    store: StorePlace,

    /// File with tokens that hold while this process runs: one `ROLE TOKEN` a line; may be repeated
    #[arg(long, value_name = "FILE")]
    token_file: Vec<PathBuf>,

    /// A node without a heartbeat for this long is away
    #[arg(long, value_name = "TIME", default_value = "30s")]
    fence_after: Span,

    /// A node without a heartbeat for this long loses what it owns
    #[arg(long, value_name = "TIME", default_value = "5m")]
    forget_after: Span,
}

/// `embedded:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StorePlace(PathBuf);

impl FromStr for StorePlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with("etcd:") {
            return Err("etcd stores are not in this version; write embedded:PATH".into());
        }
        match text.strip_prefix("embedded:") {
            Some(path) if !path.is_empty() => Ok(Self(path.into())),
            _ => Err(format!("`{text}` is not a store: write embedded:PATH")),
        }
    }
}

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// It could not be started.
pub(crate) async fn run(options: Options) -> Result<()> {
    let patience = patience(&options)?;
    let mut file_tokens = Vec::new();
    for file in &options.token_file {
        file_tokens.extend(read_tokens(file).with_context(|| format!("--token-file {}", file.display()))?);
    }
    let path = options.store.0.clone();
    let store = tokio::task::spawn_blocking(move || Store::open(&path)).await??;
    let service = Arc::new(Service::new(store, patience, file_tokens, Instant::now()).map_err(words)?);
    let admin_file = admin_file(&options.store.0);
    let fresh = first_admin(&service, &admin_file)
        .with_context(|| format!("the first admin token, {}", admin_file.display()))?;

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener =
        http::bind(options.listen).await.with_context(|| format!("listening on {}", options.listen))?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        tracing::warn!(
            "tokens and keys travel in the clear on {address}: this version has no TLS, keep the network private"
        );
    }
    let (close, closing) = watch::channel(false);
    let watching = tokio::spawn(watch_nodes(Arc::clone(&service), patience));
    let router = http::router(http::House::new(Arc::clone(&service), closing.clone()));
    let serving = tokio::spawn(http::serve(listener, router, closing));
    say(address, fresh.then_some(&admin_file), &options.store.0);

    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping: what is under way is finished");
    close.send_replace(true);
    tokio::select! {
        done = serving => done?,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    watching.abort();
    Ok(())
}

fn patience(options: &Options) -> Result<Patience> {
    let (fence_after, forget_after) = (options.fence_after.duration(), options.forget_after.duration());
    if fence_after < Duration::from_secs(1) {
        bail!("--fence-after {}: at least 1s, or every pause makes a node away", options.fence_after);
    }
    if forget_after < fence_after {
        bail!("--forget-after {} is less than --fence-after {}", options.forget_after, options.fence_after);
    }
    Ok(Patience { fence_after, forget_after })
}

async fn watch_nodes(service: Arc<Service>, patience: Patience) {
    let mut ticks = tokio::time::interval(patience.fence_after / 8);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = ticks.tick().await;
        let service = Arc::clone(&service);
        match tokio::task::spawn_blocking(move || service.tick(now)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("watching nodes: {:#}", words(error)),
            Err(error) => tracing::error!(%error, "watching nodes"),
        }
    }
}

/// One `ROLE TOKEN` a line; empty lines and those that begin with `#` are skipped.
fn read_tokens(file: &Path) -> Result<Vec<FileToken>> {
    check_private(file)?;
    let text = fs::read_to_string(file)?;
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let token = match line.split_once(char::is_whitespace) {
            Some((role, token)) => role
                .parse::<Role>()
                .and_then(|role| FileToken::new(role, token.trim()).map_err(str::to_owned)),
            None => Err("it is not `ROLE TOKEN`".to_owned()),
        };
        tokens.push(token.map_err(|why| anyhow::anyhow!("line {}: {why}", number + 1))?);
    }
    if tokens.is_empty() {
        bail!("it holds no token: write one `ROLE TOKEN` a line");
    }
    Ok(tokens)
}

fn check_private(file: &Path) -> Result<()> {
    let mode = fs::metadata(file)?.permissions().mode();
    if mode & 0o077 != 0 {
        bail!("others can read it (mode {:03o}): chmod 600 {}", mode & 0o777, file.display());
    }
    Ok(())
}

fn admin_file(store: &Path) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(".admin-token");
    name.into()
}

/// Makes the first admin token if there is none; whether it did. The file is written before the store knows the
/// token, and one that is there already is taken up, so that a start that was cut short can be repeated.
fn first_admin(service: &Service, file: &Path) -> Result<bool> {
    if service.has_admin().map_err(words)? {
        return Ok(false);
    }
    let token = match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file) {
        Ok(mut new) => {
            let token = new_token()?;
            new.write_all(format!("{token}\n").as_bytes())?;
            new.sync_all()?;
            token
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            check_private(file)?;
            let token = fs::read_to_string(file)?.trim().to_owned();
            FileToken::new(Role::Admin, &token).map_err(|why| anyhow::anyhow!("{why}; remove the file"))?;
            token
        }
        Err(error) => return Err(error.into()),
    };
    let body = TokenBody { role: Role::Admin, note: "made at the first start".into() };
    service.keep_token(&token, body).map_err(words)?;
    Ok(true)
}

fn words(error: ApiError) -> anyhow::Error {
    error.into_words()
}

/// What a person needs next. Nobody has to listen: a closed pipe stops no control plane.
fn say(address: SocketAddr, fresh: Option<&PathBuf>, store: &Path) {
    let mut text = format!("control plane  http://{address}\nstore          {}\n", store.display());
    if let Some(file) = fresh {
        let _ = writeln!(text, "admin token    in {} (new, readable by its owner alone)", file.display());
    }
    let mut out = io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        tracing::warn!(%error, "standard output");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_a_path_and_says_so() {
        assert_eq!("embedded:/a/b".parse(), Ok(StorePlace("/a/b".into())));
        assert!("/a/b".parse::<StorePlace>().expect_err("no kind").contains("embedded:PATH"));
        assert!("embedded:".parse::<StorePlace>().is_err());
        assert!("etcd:http://h".parse::<StorePlace>().expect_err("later").contains("not in this version"));
    }

    #[test]
    fn token_files_are_private_and_each_line_is_a_role_and_a_token() {
        let room = tempfile::tempdir().expect("room");
        let file = room.path().join("tokens");
        let write = |text: &str, mode| {
            fs::write(&file, text).expect("written");
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("mode");
            read_tokens(&file).map(|tokens| tokens.iter().map(FileToken::role).collect::<Vec<_>>())
        };
        let good = "# ours\nnode 0123456789abcdef\n\nreader  fedcba9876543210\n";
        assert_eq!(write(good, 0o600).expect("good"), [Role::Node, Role::Reader]);
        for (text, mode, words) in [
            (good, 0o644, "chmod 600"),
            ("", 0o600, "no token"),
            ("0123456789abcdef", 0o600, "line 1: it is not `ROLE TOKEN`"),
            ("# x\nnode short", 0o600, "line 2: a token has 16"),
            ("raeder 0123456789abcdef", 0o600, "`reader`?"),
        ] {
            let error = write(text, mode).expect_err(text).to_string();
            assert!(error.contains(words) && !error.contains("0123456789"), "{error}");
        }
    }
}
