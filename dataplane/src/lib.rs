//! To be written.

pub mod object;
pub mod range;
