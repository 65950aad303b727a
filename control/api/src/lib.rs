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
//!
//!   name       NodeId, Zone, PolicyName, AccessKeyId
//!   fleet      Accelerator, Policy: what the operator wants
//!   access     keys of clients, tokens and roles of the control plane
//!   member     a node: registration, heartbeat, the state it is told
//!   placement  who owns what: Placement, Epoch, the planner and the hash
//!   errand     prewarms and purges
//!   problem    why the control plane did not do it
//! ```
//!
//! Bodies tolerate fields that they do not know: a node and a control plane of different versions must understand
//! each other. The control plane refuses such fields where a person may have misspelt them.
#![forbid(unsafe_code)]

/// Tells the `OpenAPI` document that a type travels as text.
macro_rules! travels_as_text {
    ($type:ty, $example:literal) => {
        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .examples([$example])
                    .into()
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $type {}
    };
}
use travels_as_text;

mod access;
mod errand;
mod fleet;
mod member;
mod name;
mod node;
mod placement;
mod problem;
mod rule;
mod size;
mod span;
mod spec;
mod word;

pub use access::{
    AccessKey, AccessKeyBody, AccessKeyInfo, KeySecret, Role, SecretError, TokenBody, TokenInfo, TokenIssued,
};
pub use errand::{
    KEY_BYTES_MAX, Prewarm, PrewarmBody, PrewarmProgress, PrewarmState, PrewarmTask, Progress, Purge,
    PurgeBody, PurgeStatus, PurgeTarget, PurgeUnclear,
};
pub use fleet::{Accelerator, Admission, Policy, PolicyProblem, PolicyRule, REPLICAS_MAX, RULES_MAX};
pub use member::{
    Contact, ControlStatus, FleetState, Heartbeat, Node, NodeCounts, NodeReport, Registration,
    WEIGHT_DEFAULT, WEIGHT_MAX,
};
pub use name::{AccessKeyError, AccessKeyId, NameError, NodeId, PolicyName, Zone};
pub use node::{
    AcceleratorStatus, ControlLink, DrainReply, DriveStatus, ErrorBody, MemoryStatus, NodeStatus, PurgeReply,
    PurgeRequest, WorkerStatus,
};
pub use placement::{Epoch, GROUP_BYTES, Member, OlderEpoch, Placement, group_of};
pub use problem::Problem;
pub use rule::{Freshness, FreshnessError, Preset, PresetError, Rule};
pub use size::{ByteSize, SizeError};
pub use span::{Span, SpanError};
pub use spec::{
    AcceleratorName, AcceleratorSpec, EXTENT_BYTES_DEFAULT, EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, OriginSpec,
    Scheme, SpecError, ValueError,
};
pub use word::{nearest, suggestion};
