//! The bodies of a node's admin door.
//!
//! Requests refuse unknown fields, so that a misspelt one is not silently ignored. Replies do not: an operator's
//! older command must still read a newer node.

use serde::{Deserialize, Serialize};

/// `GET /v1/status`: what one node is and holds at this moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Version of the node's program.
    pub version: String,
    /// Seconds since it started to serve.
    pub uptime_seconds: u64,
    /// Whether it takes requests; `false` while starting and while draining.
    pub ready: bool,
    /// Whether it finishes what it has and takes nothing new.
    pub draining: bool,
    /// The engine in use: `uring` or `portable`.
    pub engine: String,
    /// Addresses that clients connect to, as URLs.
    pub listen: Vec<String>,
    /// Every worker, in the order of the core list.
    pub workers: Vec<WorkerStatus>,
    /// Every accelerator, in the order of the configuration.
    pub accelerators: Vec<AcceleratorStatus>,
    /// Memory lent to requests and the RAM tier.
    pub memory: MemoryStatus,
    /// Every drive, in the order of the configuration.
    pub drives: Vec<DriveStatus>,
    /// Objects known.
    pub objects: u64,
    /// Pieces (extents) that are in memory or on a drive.
    pub extents: u64,
    /// Client connections now open.
    pub connections: u64,
    /// How it stands with its control plane, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control: Option<ControlLink>,
}

/// How a node stands with its control plane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlLink {
    /// Which control plane.
    pub url: String,
    /// What it calls this node.
    pub node: String,
    /// The state held; 0 for none.
    pub revision: u64,
    /// The placement version (epoch) held; 0 for none.
    pub epoch: u64,
    /// The last purge applied.
    pub purges_applied: u64,
    /// Since the last good answer, in seconds; absent if there was none since the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contact_seconds_ago: Option<u64>,
    /// Whether it has been silent for so long that `ttl` is treated as `strict`.
    pub fenced: bool,
    /// What is wrong and what to do; empty if nothing is.
    #[serde(default)]
    pub problem: String,
    /// What it wants and this node does not do, each with the reason and the remedy.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// One worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// The core it is pinned to.
    pub core: u32,
    /// Client connections now open.
    pub connections: u64,
}

/// One accelerator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorStatus {
    /// The bucket name that clients use.
    pub name: String,
    /// What stands behind it, without credentials.
    pub origin: String,
    /// The freshness of keys that no rule speaks of.
    pub freshness: String,
    /// Bytes of one piece (extent).
    pub extent_bytes: u64,
}

/// Memory lent to requests and the RAM tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// Held by reads that feed a socket, in bytes.
    pub reads_bytes: u64,
    /// Held by downloads from origins (fills), in bytes.
    pub fills_bytes: u64,
    /// Held by the RAM tier, in bytes.
    pub ram_bytes: u64,
    /// Whether the kernel has it registered with the rings.
    pub registered: bool,
}

/// One drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveStatus {
    /// Device or file.
    pub path: String,
    /// Room for segments, in bytes.
    pub capacity_bytes: u64,
    /// Bytes of segments in use.
    pub used_bytes: u64,
    /// In words: `serving`, or why not.
    pub state: String,
}

/// `POST /v1/purge`: forget one object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PurgeRequest {
    /// The bucket name that clients use.
    pub accelerator: String,
    /// The key, not percent-encoded.
    pub key: String,
}

/// What a purge removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PurgeReply {
    /// Whether the object was known.
    pub found: bool,
    /// Pieces (extents) that are in memory or on a drive.
    pub extents: u64,
    /// Bytes of those pieces.
    pub bytes: u64,
}

/// `POST /v1/drain` was accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReply {
    /// Always `true`: the node finishes what it has and takes nothing new.
    pub draining: bool,
}

/// The body of every reply that is not a success.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A word for programs, e.g. `forbidden`.
    pub error: String,
    /// A sentence for people: what is wrong and what to do.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_request_field_is_refused() {
        let refused = serde_json::from_str::<PurgeRequest>(r#"{"accelerator":"a","kee":"k"}"#);
        assert!(refused.expect_err("misspelt").to_string().contains("kee"));
    }

    #[test]
    fn a_reply_of_a_newer_node_is_still_read() {
        let reply: PurgeReply =
            serde_json::from_str(r#"{"found":true,"extents":3,"bytes":12,"holders":["b"]}"#)
                .expect("readable");
        assert_eq!(reply, PurgeReply { found: true, extents: 3, bytes: 12 });
    }

    #[test]
    fn status_goes_over_the_wire_whole() {
        let status = NodeStatus {
            version: "0.1.0".into(),
            workers: vec![WorkerStatus { core: 3, connections: 7 }],
            ..NodeStatus::default()
        };
        let text = serde_json::to_string(&status).expect("json");
        assert_eq!(serde_json::from_str::<NodeStatus>(&text).expect("read"), status);
    }
}
