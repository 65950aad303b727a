//! Sockets in, bytes out: workers, connections, requests.
//!
//! [`worker`] is one core's world; [`link`] is a connection's bare socket, or TLS over it; [`connection`] speaks
//! HTTP/1.1, [`http3`] HTTP/3; [`request`] decides, for whatever door; [`stream`] yields an object's bytes, with [`reading`]
//! from a drive; [`forward`] hands on what is not ours to answer; [`prewarm`] reads ahead of clients.
#![forbid(unsafe_code)]

mod body;
mod connection;
mod door;
pub(crate) mod forward;
pub mod http3;
mod link;
mod prewarm;
mod reading;
mod reply;
mod request;
mod run;
mod spares;
mod stream;
mod worker;

pub use self::link::Wire;
pub use self::run::run;
pub use self::worker::{Here, OpenOrigin, Order, Peer, Unopened, Worker};
