//! To be written.

pub mod object;
pub mod origin;
pub mod range;
