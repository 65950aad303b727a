//! What is known of one node, and how it speaks with the control plane.
//!
//! ```text
//!   node                                            control plane
//!     PUT  /v1/nodes/{id}            Registration ->
//!                                                <- FleetState                    whole
//!     POST /v1/nodes/{id}/heartbeat  Heartbeat    ->
//!                                                <- FleetState when newer than held, else 204 after `wait`
//! ```
//!
//! The node asks and the control plane answers; nothing is ever sent to a node. An answer is a whole state, so a node
//! that missed ten of them needs only the next. A heartbeat that is answered late (`wait`) is the bell: news arrive
//! within a moment, and a quiet fleet is quiet.

use serde::{Deserialize, Serialize};

use crate::access::{AccessKey, KeySecret};
use crate::errand::{PrewarmProgress, PrewarmTask, Purge};
use crate::fleet::{Accelerator, Policy};
use crate::name::{NodeId, Zone};
use crate::placement::{Epoch, Placement};
use crate::span::Span;
use crate::spec::AcceleratorName;

/// Weight of a node that says none.
pub const WEIGHT_DEFAULT: u32 = 100;
/// Largest weight.
pub const WEIGHT_MAX: u32 = 1_000_000;

/// A node as it introduces itself, after each of its starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Registration {
    /// A text that is new at every start: two processes under one id are told apart by it.
    pub instance: String,
    /// Nodes of one zone fail together.
    #[serde(default)]
    pub zone: Zone,
    /// Its share of extent groups beside the others' weights, 1 to 1,000,000; usually the GiB of its cache.
    #[serde(default = "weight_default")]
    pub weight: u32,
    /// URLs that clients connect to.
    #[serde(default)]
    pub listen: Vec<String>,
    /// URL that other nodes ask for what it owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Version of its program.
    #[serde(default)]
    pub version: String,
    /// The last purge that its cached bytes have seen; absent when it begins with an empty cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purges_applied: Option<u64>,
    /// The newest placement it holds, 0 for none.
    #[serde(default)]
    pub epoch: Epoch,
}

fn weight_default() -> u32 {
    WEIGHT_DEFAULT
}

/// What a node says each few seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Heartbeat {
    /// As in its registration.
    pub instance: String,
    /// The revision of the state it holds, 0 for none.
    pub revision: u64,
    /// The epoch of the placement it holds, 0 for none.
    pub epoch: Epoch,
    /// The last purge that was applied to its cached bytes.
    pub purges_applied: u64,
    /// Accelerators that it serves at this moment.
    #[serde(default)]
    pub serves: Vec<AcceleratorName>,
    /// How it is.
    #[serde(default)]
    pub report: NodeReport,
    /// How its prewarms stand. An ended one is repeated until the state no longer names it.
    #[serde(default)]
    pub prewarms: Vec<PrewarmProgress>,
}

/// How a node is, in a few numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct NodeReport {
    /// Whether it takes requests.
    pub ready: bool,
    /// Objects known.
    pub objects: u64,
    /// Client connections now open.
    pub connections: u64,
    /// Bytes in its RAM tier.
    pub ram_bytes: u64,
    /// Bytes on its drives.
    pub drive_bytes: u64,
    /// Room on its drives, in bytes.
    pub drive_capacity_bytes: u64,
}

/// What a node is to be, whole. A node takes the newest and refuses a placement that is older than the one it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FleetState {
    /// Which state this is. Grows with every change, also over restarts; a placement's epoch and a purge's sequence
    /// are revisions as well.
    pub revision: u64,
    /// Every accelerator, by name.
    pub accelerators: Vec<Accelerator>,
    /// Every policy, by name.
    pub policies: Vec<Policy>,
    /// Every key, with its secret.
    pub keys: Vec<AccessKey>,
    /// What nodes of this fleet show each other. Absent where the control plane is older than this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_token: Option<KeySecret>,
    /// Who owns what.
    pub placement: Placement,
    /// Purges that this node has not yet applied, oldest first.
    pub purges: Vec<Purge>,
    /// `purges` is complete for a node that applied this one. A node that is further behind has to forget every
    /// cached byte.
    pub purges_after: u64,
    /// What the node says it has applied once it has done all of the above.
    pub purges_through: u64,
    /// Prewarms that are this node's to do.
    pub prewarms: Vec<PrewarmTask>,
    /// Whether the node shall own nothing.
    pub draining: bool,
    /// A node without contact for this long treats `ttl` as `strict`.
    pub fence_after: Span,
    /// The longest `wait` that a heartbeat is given.
    pub wait_max: Span,
}

/// Whether a node is heard of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Contact {
    /// Its heartbeats come.
    #[default]
    Live,
    /// None for `fence_after`. It keeps its groups, so that a restart moves nothing.
    Away,
    /// None for `forget_after`. Its groups belong to others.
    Gone,
}

impl Contact {
    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Away => "away",
            Self::Gone => "gone",
        }
    }
}

/// A node as the control plane knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Node {
    /// Which one.
    pub id: NodeId,
    /// The text that its latest start chose.
    pub instance: String,
    /// Nodes of one zone fail together.
    pub zone: Zone,
    /// Its share of extent groups beside the others' weights.
    pub weight: u32,
    /// URLs that clients connect to.
    pub listen: Vec<String>,
    /// URL that other nodes ask for what it owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Version of its program.
    pub version: String,
    /// Whether it is heard of.
    pub contact: Contact,
    /// Whether an operator took its groups away.
    pub draining: bool,
    /// When it was last heard of, RFC 3339.
    pub last_heartbeat: String,
    /// The revision of the state it holds.
    pub revision: u64,
    /// The epoch of the placement it holds.
    pub epoch: Epoch,
    /// The last purge that it applied.
    pub purges_applied: u64,
    /// Accelerators that it serves.
    pub serves: Vec<AcceleratorName>,
    /// How it was at its last heartbeat.
    pub report: NodeReport,
}

impl Node {
    /// Whether extent groups may be its own.
    pub fn owns(&self) -> bool {
        !self.draining && self.contact != Contact::Gone
    }
}

/// What the control plane is and holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ControlStatus {
    /// Version of its program.
    pub version: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// The newest state.
    pub revision: u64,
    /// The placement in force.
    pub epoch: Epoch,
    /// Accelerators.
    pub accelerators: u64,
    /// Policies.
    pub policies: u64,
    /// Keys.
    pub keys: u64,
    /// Nodes by contact.
    pub nodes: NodeCounts,
    /// Live nodes that do not yet hold the newest state.
    pub nodes_behind: u64,
    /// Purges that some node has not yet applied.
    pub purges_open: u64,
    /// Prewarms that have not ended.
    pub prewarms_open: u64,
    /// A node without contact for this long is `away`.
    pub fence_after: Span,
    /// A node without contact for this long loses its groups.
    pub forget_after: Span,
}

/// Nodes by contact.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NodeCounts {
    /// Heard of.
    pub live: u64,
    /// Silent for `fence_after`.
    pub away: u64,
    /// Silent for `forget_after`.
    pub gone: u64,
    /// Drained by an operator, whatever their contact.
    pub draining: u64,
}
