//! The honest stopwatch of Forebay.
//!
//! ```text
//!  workloads ─► run (A B B A …) ─► client ══ HTTP ══► a node or a store
//!                  │                  │ every byte        └─ origin: the emulated store
//!                  │                  └─► recorder
//!                  └─► statistics ─► report (text, JSON), beside the document's figures
//!  ceilings: what the machine itself allows, before anything is compared
//!  peers: a node beside other servers, each at its best
//! ```
//!
//! A comparison is only as good as what it admits: the origin is named emulated when it is, every byte is
//! verified, errors never hide in a histogram, and a run that proves nothing exits with its own code.

#![forbid(unsafe_code)]

pub mod ceilings;
pub mod children;
pub mod client;
pub mod clock;
pub mod content;
pub mod control;
pub mod demo;
pub mod document;
pub mod environment;
pub mod origin;
pub mod own_data;
pub mod peers;
mod processors;
pub mod recorder;
pub mod report;
pub mod run;
pub mod statistics;
pub mod stop;
pub mod units;
pub mod workloads;
