//! Sockets in, bytes out: workers, connections, requests.
//!
//! [`worker`] is one core's world; [`connection`] speaks HTTP/1.1; [`request`] decides, for whatever door;
//! [`stream`] yields an object's bytes; [`forward`] hands on what is not ours to answer; [`prewarm`] reads ahead of
//! clients.
#![forbid(unsafe_code)]

mod body;
mod connection;
mod door;
pub(crate) mod forward;
mod prewarm;
mod reply;
mod request;
mod run;
mod stream;
mod worker;

pub use self::run::run;
pub use self::worker::{Here, OpenOrigin, Order, Peer, Worker};
