//! What the machine itself allows: no server can be measured faster than this.
//!
//! ```text
//!   disk    one thread, our engines ══ direct reads ══ a drive: what is left for a node to lose
//!   net     null server (core A) ══ loopback ══ our own client (core B): what is left for a server to lose
//!   engines the node's ring, tokio-uring, glommio (core A) ══ loopback ══ our own client (core B): what a runtime costs
//! ```
//!
//! Run before any comparison. A figure near a ceiling says something of the ceiling, not of the server.
#![forbid(unsafe_code)]

#[cfg(feature = "engines")]
pub mod disk;
#[cfg(feature = "engines")]
pub mod engines;
mod figures;
pub mod net;
mod null;
