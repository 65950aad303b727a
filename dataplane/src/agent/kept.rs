//! The last state, kept on disk: what a node begins with when the control plane is away.
//!
//! ```text
//!   forebay-node state 1 CRC32C\n        what it is, its form, the sum of the rest in hexadecimal
//!   { "node": ..., "state": { ... } }    JSON
//! ```
//!
//! Written beside its place, made durable and then put there, so that a power cut leaves the old or the new one, whole.
//! It holds the keys' secrets and is readable by its owner alone. What is not ours, or not whole, is refused with the
//! remedy: to begin with less than was known could mean to believe an older placement.
#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_control_api::{FleetState, NodeId};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const MARK: &str = "forebay-node state";
const FORM: &str = "1";
/// How long the agent waits for the disk.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
struct Content {
    node: NodeId,
    state: FleetState,
}

/// Why a kept state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// It cannot be read or written.
    #[error("the kept state {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Another program's.
    #[error("{} is no state of a Forebay node: it is left alone; give another --state-dir", .0.display())]
    Foreign(PathBuf),
    /// A newer program's.
    #[error(
        "the kept state {} has a form that this program does not know: start the newer program, or move the file \
         away and let the control plane say the state anew",
        .0.display()
    )]
    Newer(PathBuf),
    /// Not whole.
    #[error(
        "the kept state {} is damaged ({why}): move it away; the node then begins with what the control plane says",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not hold.
        why: String,
    },
    /// Another node's.
    #[error("the kept state {} belongs to node `{node}`: give --node-id {node}, or another --state-dir", path.display())]
    OtherNode {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        node: NodeId,
    },
}

/// The state that was kept; `None` if there never was one.
///
/// # Errors
/// There is a file that cannot be used.
pub(super) fn read(path: &Path, node: &NodeId) -> Result<Option<FleetState>, KeptError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(KeptError::File { path: path.to_owned(), source }),
    };
    let damaged =
        |why: &dyn std::fmt::Display| KeptError::Damaged { path: path.to_owned(), why: why.to_string() };
    if bytes.is_empty() {
        return Err(damaged(&"it is empty"));
    }
    let Some(rest) = bytes.strip_prefix(MARK.as_bytes()) else {
        return Err(KeptError::Foreign(path.to_owned()));
    };
    let end =
        rest.iter().position(|byte| *byte == b'\n').ok_or_else(|| damaged(&"its first line has no end"))?;
    let (line, body) = (String::from_utf8_lossy(&rest[..end]), &rest[end + 1..]);
    let mut words = line.split_ascii_whitespace();
    if words.next() != Some(FORM) {
        return Err(KeptError::Newer(path.to_owned()));
    }
    if words.next() != Some(sum(body).as_str()) {
        return Err(damaged(&"its sum is wrong"));
    }
    let Content { node: owner, state } = serde_json::from_slice(body).map_err(|error| damaged(&error))?;
    if owner != *node {
        return Err(KeptError::OtherNode { path: path.to_owned(), node: owner });
    }
    Ok(Some(state))
}

/// Keeps a state in the place of the one before. What was done with it need not be done again, so purges and prewarms
/// are left out.
///
/// # Errors
/// The disk's; the old state is still there.
pub(super) fn write(path: &Path, node: &NodeId, state: &FleetState) -> Result<(), KeptError> {
    let state = FleetState { purges: Vec::new(), prewarms: Vec::new(), ..state.clone() };
    let content = Content { node: node.clone(), state };
    let body = serde_json::to_vec_pretty(&content).expect("a state is plain data");
    let head = format!("{MARK} {FORM} {}\n", sum(&body));
    put(path, head.as_bytes(), &body).map_err(|source| KeptError::File { path: path.to_owned(), source })
}

/// The newest state on its way to its place. A disk may hang, and nobody waits for it longer than a moment: what was
/// taken is in force, and is offered to the disk again until it is kept.
#[derive(Debug)]
pub(super) struct Keeper {
    path: PathBuf,
    node: NodeId,
    kept: Option<Stamp>,
    writing: Option<(Stamp, JoinHandle<Result<(), KeptError>>)>,
    /// Why the newest is not kept; empty if it is.
    trouble: String,
}

/// Revision, and last purge: states that share them are the same to begin with.
type Stamp = (u64, u64);

fn stamp(state: &FleetState) -> Stamp {
    (state.revision, state.purges_through)
}

impl Keeper {
    /// `kept` is what [`read`] has found.
    pub(super) fn new(path: &Path, node: &NodeId, kept: Option<&FleetState>) -> Self {
        let kept = kept.map(stamp);
        Self { path: path.to_owned(), node: node.clone(), kept, writing: None, trouble: String::new() }
    }

    /// Why the newest state is not kept; empty if it is.
    pub(super) fn trouble(&self) -> &str {
        &self.trouble
    }

    /// Has this state kept, unless it is, or the disk is still busy with the one before.
    pub(super) async fn keep(&mut self, state: &FleetState) {
        while self.kept != Some(stamp(state)) {
            let (stamp, writing) = self.writing.get_or_insert_with(|| {
                let (path, node, kept) = (self.path.clone(), self.node.clone(), state.clone());
                (stamp(state), tokio::task::spawn_blocking(move || write(&path, &node, &kept)))
            });
            let stamp = *stamp;
            let why = match timeout(PATIENCE, writing).await {
                Ok(Ok(Ok(()))) => {
                    self.writing = None;
                    self.kept = Some(stamp);
                    self.trouble.clear();
                    continue;
                }
                Ok(Ok(Err(error))) => {
                    self.writing = None;
                    format!("{:#}", anyhow::Error::from(error))
                }
                Ok(Err(error)) => {
                    self.writing = None;
                    format!("the kept state {}: {error}", self.path.display())
                }
                Err(_) => format!("the kept state {}: the disk does not answer", self.path.display()),
            };
            let trouble =
                format!("{why}; the node goes on and tries again, and a restart begins with an older state");
            if self.trouble != trouble {
                tracing::error!("{trouble}");
                self.trouble = trouble;
            }
            return;
        }
    }
}

fn put(path: &Path, head: &[u8], body: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = path.with_extension("new");
    // Made anew, so that it never has the rights of something older.
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    file.write_all(head)?;
    file.write_all(body)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    File::open(folder)?.sync_all()
}

fn sum(body: &[u8]) -> String {
    format!("{:08x}", crc32c::crc32c(body))
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use forebay_control_api::{Placement, Span};

    use super::*;

    pub(in crate::agent) fn state(revision: u64) -> FleetState {
        FleetState {
            revision,
            accelerators: Vec::new(),
            policies: Vec::new(),
            keys: Vec::new(),
            cluster_token: Some("0123456789abcdef".parse().expect("a token")),
            placement: Placement::default(),
            purges: Vec::new(),
            purges_after: 0,
            purges_through: revision,
            prewarms: Vec::new(),
            draining: false,
            fence_after: Span::from_secs(30),
            wait_max: Span::from_secs(10),
        }
    }

    fn id(text: &str) -> NodeId {
        text.parse().expect("an id")
    }

    #[test]
    fn the_newest_state_is_there_whole_and_its_owners_alone() {
        let room = tempfile::tempdir().expect("a folder");
        let path = room.path().join("a.state");
        assert!(read(&path, &id("a")).expect("nothing yet").is_none());
        for revision in [7, 8] {
            write(&path, &id("a"), &state(revision)).expect("written");
            assert_eq!(read(&path, &id("a")).expect("read"), Some(state(revision)));
        }
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(room.path()).expect("a folder").count(), 1);
    }

    #[test]
    fn every_torn_file_is_refused_with_the_remedy() {
        let room = tempfile::tempdir().expect("a folder");
        let path = room.path().join("a.state");
        write(&path, &id("a"), &state(7)).expect("written");
        let whole = fs::read(&path).expect("read");
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).expect("torn");
            let error = read(&path, &id("a")).expect_err("torn").to_string();
            assert!(error.contains("move it away") || error.contains("left alone"), "{length}: {error}");
        }
        for at in 0..whole.len() {
            let mut rotten = whole.clone();
            rotten[at] ^= 1;
            fs::write(&path, &rotten).expect("rotten");
            assert!(read(&path, &id("a")).is_err(), "byte {at}");
        }
    }

    #[test]
    fn strangers_are_refused() {
        let room = tempfile::tempdir().expect("a folder");
        let path = room.path().join("a.state");
        fs::write(&path, "somebody's notes").expect("written");
        assert!(matches!(read(&path, &id("a")), Err(KeptError::Foreign(_))));
        write(&path, &id("a"), &state(7)).expect("written");
        let error = read(&path, &id("b")).expect_err("another node's").to_string();
        assert!(error.contains("--node-id a"), "{error}");
        fs::write(&path, format!("{MARK} 2 0\n{{}}")).expect("written");
        assert!(matches!(read(&path, &id("a")), Err(KeptError::Newer(_))));
        assert!(matches!(read(room.path(), &id("a")), Err(KeptError::File { .. })));
    }

    #[tokio::test]
    async fn a_state_that_could_not_be_kept_is_offered_to_the_disk_again() {
        let room = tempfile::tempdir().expect("a folder");
        let folder = room.path().join("later");
        let path = folder.join("a.state");
        let mut keeper = Keeper::new(&path, &id("a"), None);
        keeper.keep(&state(7)).await;
        assert!(keeper.trouble().contains("a.state") && keeper.trouble().contains("tries again"));
        fs::create_dir(&folder).expect("a folder");
        keeper.keep(&state(7)).await;
        assert_eq!(keeper.trouble(), "");
        assert_eq!(read(&path, &id("a")).expect("read"), Some(state(7)));
        // Whoever begins with it does not write it again.
        fs::remove_file(&path).expect("gone");
        Keeper::new(&path, &id("a"), Some(&state(7))).keep(&state(7)).await;
        assert!(!path.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_holds_nobody_up_and_has_the_newest_in_the_end() {
        let room = tempfile::tempdir().expect("a folder");
        let path = room.path().join("a.state");
        let mut keeper = Keeper::new(&path, &id("a"), None);
        let (release, hung) = tokio::sync::oneshot::channel::<()>();
        let hanging = tokio::spawn(async {
            hung.await.expect("released");
            Ok(())
        });
        keeper.writing = Some((stamp(&state(7)), hanging));
        keeper.keep(&state(8)).await;
        assert!(keeper.trouble().contains("does not answer") && !path.exists());
        release.send(()).expect("it waits");
        while keeper.kept != Some(stamp(&state(8))) {
            keeper.keep(&state(8)).await;
        }
        assert_eq!(read(&path, &id("a")).expect("read"), Some(state(8)));
    }
}
