//! The words that the node and the control plane share.
//!
//! An operator writes `64KiB`, `ttl:60s` or `a=s3://bucket,extent=1MiB` on a command line, in a file and, later,
//! in a request to the control plane; all three must mean the same, so text becomes a type here and nowhere else.
//! Nothing in this crate does I/O or needs a runtime: what cannot be decided from the text alone (whether a bucket
//! exists, whether a core may be used) is left to the planes.
//!
//! ```text
//!   size     ByteSize                      64KiB  100MB  100000
//!   span     Span                          500ms  60s  5m  1h
//!   rule     Freshness, Preset, Rule       strict  ttl:60s  immutable;  lakehouse
//!   spec     AcceleratorSpec, OriginSpec   NAME=ORIGIN[,key=value...]
//!   node     the bodies of a node's admin door
//!   word     the nearest valid word to a misspelt one
//! ```
#![forbid(unsafe_code)]

mod node;
mod rule;
mod size;
mod span;
mod spec;
mod word;

pub use node::{
    AcceleratorStatus, DrainReply, DriveStatus, ErrorBody, MemoryStatus, NodeStatus, PurgeReply,
    PurgeRequest, WorkerStatus,
};
pub use rule::{Freshness, FreshnessError, Preset, PresetError, Rule};
pub use size::{ByteSize, SizeError};
pub use span::{Span, SpanError};
pub use spec::{
    AcceleratorName, AcceleratorSpec, EXTENT_BYTES_DEFAULT, EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, OriginSpec,
    Scheme, SpecError, ValueError,
};
pub use word::{nearest, suggestion};
