//! The whole house under test: what the behaviours in `tests/` stand on.
//!
//! Every behaviour runs the real `forebay-node` program as a child process, on real sockets and a real drive
//! file, because what is promised to users is promised of the program and not of its parts. What a test needs
//! around it lives here:
//!
//! ```text
//!   content ──► origin (plain HTTP, faults on order) ──┐
//!          └──► s3      (s3s: checks every signature) ─┴─► node (the program) ──► http (a client that hides nothing)
//! ```
//!
//! Nothing here sleeps to make a test pass: readiness is asked for, counters are polled, and every wait is
//! bounded by [`PATIENCE`], after which the test fails with the node's log.

pub mod content;
pub mod fleet;
pub mod http;
pub mod node;
pub mod origin;
pub mod s3;
pub mod wait;

pub use content::Content;
pub use node::{Engine, Node, NodeSpec};
pub use wait::PATIENCE;

/// Makes each named function, `fn(Engine)`, a test on every engine that an operator can choose.
///
/// The engines must be indistinguishable from outside, so a behaviour is written once. The third engine,
/// `scripted`, has no sockets; it is exercised inside the dataplane crate.
#[macro_export]
macro_rules! on_each_engine {
    ($($story:ident),+ $(,)?) => {
        mod on_uring {
            $(#[test] fn $story() { super::$story($crate::Engine::Uring) })+
        }
        mod on_portable {
            $(#[test] fn $story() { super::$story($crate::Engine::Portable) })+
        }
    };
}
