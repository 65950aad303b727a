//! One node of Forebay: the rooms in the order in which a byte meets them.
//!
//! ```text
//!  socket -> http1 -> auth -> resolve -> range -> table: lease | slot -> engine read -> sums -> engine send -> socket
//!                                |                  | absent                                        ^
//!                                +------------------+--> fill <- peer | origin ---------------------+--> store
//! ```
//!
//! Rooms that think take values and return values; three rooms touch the kernel (`engine`, `arena`, `store`) and are
//! the only ones with unsafe code. One worker is one thread, one runtime, one engine; what the workers share is
//! `node`.
#![deny(unsafe_code)]

// Think.
pub mod auth;
pub mod dialect;
pub mod http1;
pub mod object;
pub mod policy;
pub mod range;
pub mod sums;

// Keep.
#[expect(unsafe_code, reason = "the room that lends memory")]
pub mod arena;
pub mod store;
pub mod table;

// Move.
#[expect(unsafe_code, reason = "the room that asks the kernel")]
pub mod engine;
pub mod fill;
pub mod node;
pub mod origin;
pub mod peer;
pub mod resolve;
pub mod serve;
pub mod served;
pub mod tls;

// Show.
pub mod admin;
pub mod agent;
pub mod config;
pub mod logs;
pub mod metrics;
