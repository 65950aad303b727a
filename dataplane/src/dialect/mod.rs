//! The words of each protocol: how a request names an object, how an error is said.
//!
//! One module a dialect; what they share, the bytes of HTTP, is in `http1`.
#![forbid(unsafe_code)]

pub mod changes;
pub mod listing;
pub mod s3;
