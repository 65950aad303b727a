//! A control plane of the demo's own: its store in the demo's folder, told what to do as an operator tells it.
//!
//! Everything goes through the commands of `forebay-control`, so that the demo walks the way that the docs describe and
//! knows little of what travels on the wire.
#![forbid(unsafe_code)]

use crate::children::Running;
use anyhow::{Context, Result, bail};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a node may take from its start until it serves what it was told to.
const PATIENCE: Duration = Duration::from_mins(1);
const TICK: Duration = Duration::from_millis(50);

/// A running control plane; ended on drop.
pub struct ControlPlane {
    running: Running,
    program: PathBuf,
    url: String,
    folder: PathBuf,
}

impl ControlPlane {
    /// Starts `program` on a free port of loopback and waits until it answers. Its store is new, in a folder of its own
    /// inside `folder`, which is left there.
    ///
    /// # Errors
    /// It cannot be started, or ended at once; its last words are in the error.
    pub fn start(program: &Path, folder: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("control-plane-")
            .tempdir_in(folder)
            .with_context(|| format!("making a folder in {}", folder.display()))?
            .keep();
        let mut store = OsString::from("embedded:");
        store.push(folder.join("store"));
        let mut command = Command::new(program);
        command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store).stdout(Stdio::piped());
        let mut running = Running::start("forebay-control", &mut command, &folder.join("log"))?;
        let line = running.first_line()?;
        let Some(at) = line.find("http://") else {
            bail!("forebay-control began with `{line}`, where its address should be; is it of this version?");
        };
        let url = line[at..].to_owned();
        Ok(Self { running, program: program.to_path_buf(), url, folder })
    }

    /// `http://host:port`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs one of the operator's commands, as admin; what it printed.
    ///
    /// # Errors
    /// It was refused; its own words are in the error.
    pub fn tell(&self, arguments: &[impl AsRef<OsStr>]) -> Result<String> {
        let done = Command::new(&self.program)
            .args(arguments)
            .env("FOREBAY_CONTROL_URL", &self.url)
            .env("FOREBAY_CONTROL_TOKEN_FILE", self.folder.join("store.admin-token"))
            .stdin(Stdio::null())
            .output()
            .context("starting forebay-control")?;
        if !done.status.success() {
            bail!("{}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    }

    /// A token for a node that will be called `id`; the node's options with which it takes from here what it serves.
    ///
    /// # Errors
    /// The token is refused.
    pub fn admit(&self, id: &str) -> Result<Vec<OsString>> {
        let token = self.folder.join(format!("{id}.token"));
        let words = ["token", "add", "--role", "node", "--note", id, "--out"].map(OsString::from);
        self.tell(&[&words[..], &[token.clone().into()]].concat())?;
        Ok([
            "--control".into(),
            self.url.clone().into(),
            "--node-id".into(),
            id.into(),
            "--token-file".into(),
            token.into(),
            "--state-dir".into(),
            self.folder.clone().into(),
        ]
        .into())
    }

    /// Waits until the node says that it serves `accelerator`.
    ///
    /// # Errors
    /// It does not within a minute, or a signal asked to stop.
    pub fn wait_served(&self, id: &str, accelerator: &str, stop: &AtomicBool) -> Result<()> {
        for _ in 0..PATIENCE.as_millis() / TICK.as_millis() {
            let said = self.tell(&["nodes", "--json"])?;
            let nodes: serde_json::Value =
                serde_json::from_str(&said).context("reading what forebay-control said of its nodes")?;
            let node = nodes.as_array().into_iter().flatten().find(|node| node["id"] == id);
            let served = node.and_then(|node| node["serves"].as_array());
            if served.is_some_and(|names| names.iter().any(|name| name == accelerator)) {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                bail!("stopped by a signal");
            }
            std::thread::sleep(TICK);
        }
        let said = self.tell(&["nodes"])?;
        bail!("node {id} does not serve {accelerator} after {PATIENCE:?}; the control plane knows:\n{said}");
    }

    /// Asks it to leave, and waits.
    pub fn end(&mut self) {
        self.running.end();
    }
}
