//! To be written.

pub mod range;
