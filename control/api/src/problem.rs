//! What the control plane answers when it does not do what was asked.
//!
//! Three parts for three readers: a word for programs, a sentence that says what is wrong, a sentence that says what
//! to do about it.

use serde::{Deserialize, Serialize};

/// The body of every reply of the control plane that is not a success.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// A word for programs, e.g. `unknown_policy`. It does not change between versions.
    pub code: String,
    /// What is wrong, for people.
    pub message: String,
    /// What to do about it, for people.
    pub remedy: String,
}

impl Problem {
    /// The three parts.
    pub fn new(code: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), remedy: remedy.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.message, self.remedy)
    }
}
