//! One node of Forebay. (The map of its rooms follows as they are built.)
#![deny(unsafe_code)]

pub mod admin;
#[expect(unsafe_code, reason = "the room that lends memory")]
pub mod arena;
pub mod auth;
pub mod config;
pub mod dialect;
pub mod http1;
pub mod logs;
pub mod metrics;
pub mod object;
pub mod origin;
pub mod policy;
pub mod range;
pub mod store;
