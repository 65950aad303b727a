//! The names that an operator gives: nodes, zones, policies, access keys.
//!
//! A name stands in paths, in tables on a terminal and in metrics, so it holds nothing that has to be escaped there.
//! A name that breaks the rule cannot be made, also not by reading JSON.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` cannot be {what}: write 1 to 63 of a-z, 0-9, `-`, `_` and `.`, a letter or digit at both ends"
)]
pub struct NameError {
    /// What was written.
    pub text: String,
    /// What it was to name, e.g. `a node's id`.
    pub what: &'static str,
}

/// Why a text is not an access key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` cannot be an access key: write 3 to 128 of A-Z, a-z, 0-9, `-`, `_` and `.`")]
pub struct AccessKeyError(pub String);

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $error:ty, $check:expr, $example:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<str>);

        impl $name {
            /// The name as it was given.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                $check(text).map(|()| Self(text.into()))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }

        crate::travels_as_text!($name, $example);
    };
}

name! {
    /// Which node: unique in a fleet, the same after a restart.
    NodeId, NameError, |text| check_name(text, "a node's id"), "node-a"
}

name! {
    /// Nodes of one zone fail together and reach each other fast.
    Zone, NameError, |text| check_name(text, "a zone"), "zone-1"
}

name! {
    /// A policy that accelerators refer to.
    PolicyName, NameError, |text| check_name(text, "a policy's name"), "tables"
}

name! {
    /// The public half of a pair that clients sign with.
    AccessKeyId, AccessKeyError, check_access_key, "FBTEAMA"
}

impl Default for Zone {
    fn default() -> Self {
        Self("default".into())
    }
}

fn check_name(text: &str, what: &'static str) -> Result<(), NameError> {
    let outer = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let bytes = text.as_bytes();
    let good = (1..=63).contains(&bytes.len())
        && bytes
            .iter()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.'))
        && outer(bytes.first())
        && outer(bytes.last());
    if good { Ok(()) } else { Err(NameError { text: text.to_owned(), what }) }
}

fn check_access_key(text: &str) -> Result<(), AccessKeyError> {
    let good = (3..=128).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if good { Ok(()) } else { Err(AccessKeyError(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hold_nothing_that_needs_an_escape() {
        for good in ["a", "node-1", "rack_3.node-1", "0"] {
            assert_eq!(good.parse::<NodeId>().expect(good).as_str(), good);
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "A", "a b", "a/b", "ü", "a%", long.as_str()] {
            let error = bad.parse::<NodeId>().expect_err(bad).to_string();
            assert!(error.contains("a node's id") && error.contains("1 to 63"), "{error}");
        }
    }

    #[test]
    fn a_bad_name_cannot_be_read_from_json() {
        assert!(serde_json::from_str::<Zone>("\"a/b\"").is_err());
        assert!(serde_json::from_str::<AccessKeyId>("\"ab\"").is_err());
        assert_eq!(serde_json::from_str::<AccessKeyId>("\"AK_1\"").expect("good").as_str(), "AK_1");
    }
}
