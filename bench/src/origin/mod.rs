//! The origin emulator: an S3-flavoured store with computed content and a published timing model.
//!
//! ```text
//! socket ─► server ─► answer ─► catalog     which object, which version
//!              │         └────► model       how long it takes
//!              └─ deadlines, pacing, lateness ─► stats
//! ```
//!
//! It exists because a comparison needs a slow store whose slowness is written down. It is never called S3 or
//! TOS in a report. Signatures are not checked: any is accepted, and none.

pub mod answer;
pub mod catalog;
pub mod model;
pub mod server;
pub mod stats;
