//! What nodes are sent to do: prewarm a prefix, forget a key or a prefix.
//!
//! A prewarm is done once, by one node: it has the origin's credentials, so it lists the prefix itself. A purge is
//! done by every node, in order, each in its own time; its sequence is what a node says to have it done.

use serde::{Deserialize, Serialize};

use crate::name::NodeId;
use crate::spec::AcceleratorName;

/// Bytes of a key or prefix at most.
pub const KEY_BYTES_MAX: usize = 1024;

/// What is sent to have a prefix read ahead of its readers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PrewarmBody {
    /// The bucket name that clients use.
    pub accelerator: AcceleratorName,
    /// Every key that begins with it; empty for the whole bucket.
    #[serde(default)]
    pub prefix: String,
}

/// A prewarm and how it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prewarm {
    /// Which one.
    pub id: u64,
    /// The bucket name that clients use.
    pub accelerator: AcceleratorName,
    /// Every key that begins with it.
    pub prefix: String,
    /// How far it is.
    pub state: PrewarmState,
    /// Whose it is; absent while no node is there for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// How often it was given to a node. A node that goes away loses it, and its counts begin anew.
    pub attempt: u32,
    /// What the node has counted.
    pub progress: Progress,
    /// Why it failed, or what went wrong on the way.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When it was asked for, RFC 3339.
    pub asked: String,
    /// When it ended, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
}

/// How far a prewarm is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum PrewarmState {
    /// No node is there for it.
    Waiting,
    /// A node has it.
    Running,
    /// Every object was read, or counted as failed.
    Done,
    /// It could not be done.
    Failed,
    /// An operator ended it.
    Cancelled,
}

impl PrewarmState {
    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether nothing more comes.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// What a node counts while it prewarms.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct Progress {
    /// Objects listed so far.
    pub listed: u64,
    /// Whether the listing has come to its end.
    pub listed_all: bool,
    /// Objects whose bytes are cached.
    pub done: u64,
    /// Objects that could not be read.
    pub failed: u64,
    /// Bytes that are cached.
    pub bytes: u64,
}

/// A prewarm as the node that does it gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PrewarmTask {
    /// Which one.
    pub id: u64,
    /// To be repeated in its progress.
    pub attempt: u32,
    /// The bucket name that clients use.
    pub accelerator: AcceleratorName,
    /// Every key that begins with it.
    pub prefix: String,
}

/// What a node says of a prewarm in its heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PrewarmProgress {
    /// Which one.
    pub id: u64,
    /// As in the task; what is said of an earlier attempt is not heard.
    pub attempt: u32,
    /// `running`, `done` or `failed`.
    pub state: PrewarmState,
    /// What was counted.
    #[serde(default)]
    pub progress: Progress,
    /// Why it failed, or what went wrong on the way.
    #[serde(default)]
    pub message: String,
}

/// What is sent to have every node forget a key or a prefix: one of the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PurgeBody {
    /// The bucket name that clients use.
    pub accelerator: AcceleratorName,
    /// One object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Every object that begins with it; empty for the whole bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
}

/// What is to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PurgeTarget<'a> {
    /// One object.
    Key(&'a str),
    /// Every object that begins with it.
    Prefix(&'a str),
}

impl PurgeTarget<'_> {
    /// Whether it speaks of this key.
    pub fn covers(self, key: &[u8]) -> bool {
        match self {
            Self::Key(one) => key == one.as_bytes(),
            Self::Prefix(prefix) => key.starts_with(prefix.as_bytes()),
        }
    }
}

/// Why a purge says nothing, or two things.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a purge names either a key or a prefix")]
pub struct PurgeUnclear;

/// A purge as nodes get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Purge {
    /// Its place in the order of all purges.
    pub sequence: u64,
    /// The bucket name that clients use.
    pub accelerator: AcceleratorName,
    /// One object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Every object that begins with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// When it was asked for, RFC 3339.
    pub asked: String,
}

impl Purge {
    /// What is to be forgotten.
    ///
    /// # Errors
    /// Neither or both are named.
    pub fn target(&self) -> Result<PurgeTarget<'_>, PurgeUnclear> {
        target(self.key.as_deref(), self.prefix.as_deref())
    }
}

impl PurgeBody {
    /// What is to be forgotten.
    ///
    /// # Errors
    /// Neither or both are named.
    pub fn target(&self) -> Result<PurgeTarget<'_>, PurgeUnclear> {
        target(self.key.as_deref(), self.prefix.as_deref())
    }
}

fn target<'a>(key: Option<&'a str>, prefix: Option<&'a str>) -> Result<PurgeTarget<'a>, PurgeUnclear> {
    match (key, prefix) {
        (Some(key), None) => Ok(PurgeTarget::Key(key)),
        (None, Some(prefix)) => Ok(PurgeTarget::Prefix(prefix)),
        _ => Err(PurgeUnclear),
    }
}

/// A purge and who has done it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PurgeStatus {
    /// The purge.
    pub purge: Purge,
    /// Nodes that have applied it.
    pub applied: Vec<NodeId>,
    /// Nodes in contact that have not yet.
    pub waiting: Vec<NodeId>,
    /// Nodes without contact. Each applies it before it serves a cached byte to the fleet again.
    pub unreached: Vec<NodeId>,
    /// Whether every node in contact has applied it.
    pub complete: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_purge_names_one_thing() {
        let body = |text: &str| serde_json::from_str::<PurgeBody>(text).expect(text);
        let key = body(r#"{"accelerator":"data","key":"a/b"}"#);
        assert_eq!(key.target(), Ok(PurgeTarget::Key("a/b")));
        let all = body(r#"{"accelerator":"data","prefix":""}"#);
        assert!(all.target().expect("a prefix").covers(b"anything"));
        assert_eq!(body(r#"{"accelerator":"data"}"#).target(), Err(PurgeUnclear));
        assert_eq!(body(r#"{"accelerator":"data","key":"a","prefix":"b"}"#).target(), Err(PurgeUnclear));
    }

    #[test]
    fn a_key_is_itself_and_a_prefix_all_behind_it() {
        assert!(PurgeTarget::Key("a").covers(b"a"));
        assert!(!PurgeTarget::Key("a").covers(b"a/b"));
        assert!(PurgeTarget::Prefix("a/").covers(b"a/b"));
        assert!(!PurgeTarget::Prefix("a/").covers(b"a"));
    }
}
