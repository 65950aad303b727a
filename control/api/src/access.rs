//! Who may do what: clients' keys and the tokens of the control plane.
//!
//! A key's secret has to reach the nodes as it is, because `SigV4` cannot be checked with less. It therefore has a type
//! that writes itself out only to JSON, never to a log. Tokens are known to the control plane by their hash alone, so
//! the text of one appears in a single reply: the one that issues it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::name::AccessKeyId;
use crate::word::suggestion;

/// The secret half of an access key: 8 to 128 visible ASCII characters. `Debug` does not show it, and there is no
/// `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct KeySecret(Box<str>);

impl KeySecret {
    /// The secret itself, for signing.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Why a text is not a secret. It does not repeat the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key's secret has 8 to 128 visible characters and no blanks")]
pub struct SecretError;

impl FromStr for KeySecret {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        let good = (8..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
        if good { Ok(Self(text.into())) } else { Err(SecretError) }
    }
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySecret(..)")
    }
}

impl Serialize for KeySecret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for KeySecret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

crate::travels_as_text!(KeySecret, "0123456789abcdef");

/// A pair that clients sign with, as nodes get it. Every key opens every accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AccessKey {
    /// The public half.
    pub access_key: AccessKeyId,
    /// The secret half.
    pub secret: KeySecret,
    /// Whose it is, in the operator's words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// When it was added or replaced, RFC 3339.
    pub added: String,
}

/// A key as operators see it: without the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AccessKeyInfo {
    /// The public half.
    pub access_key: AccessKeyId,
    /// Whose it is, in the operator's words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// When it was added or replaced, RFC 3339.
    pub added: String,
}

impl From<AccessKey> for AccessKeyInfo {
    fn from(key: AccessKey) -> Self {
        Self { access_key: key.access_key, note: key.note, added: key.added }
    }
}

/// What is sent to add or replace a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AccessKeyBody {
    /// The secret half.
    pub secret: KeySecret,
    /// Whose it is, in the operator's words; at most 200 bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// What the bearer of a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Everything, tokens included.
    Admin,
    /// Reads all; changes accelerators, policies, keys and nodes; asks for prewarms and purges.
    Operator,
    /// Reads all but secrets.
    Reader,
    /// Registers, sends heartbeats, gets what a node needs, keys' secrets included.
    Node,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 4] = [Self::Admin, Self::Operator, Self::Reader, Self::Node];

    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Operator => "operator",
            Self::Reader => "reader",
            Self::Node => "node",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|role| role.word() == text).ok_or_else(|| {
            format!("`{text}` is not a role: {}", suggestion(text, &Self::ALL.map(Self::word)))
        })
    }
}

/// What is sent to have a token issued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenBody {
    /// What its bearer may do.
    pub role: Role,
    /// Whose it is, in the operator's words; at most 200 bytes.
    #[serde(default)]
    pub note: String,
}

/// A token as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenInfo {
    /// Its name, for `revoke`. Not secret, and not a part of the token.
    pub id: String,
    /// What its bearer may do.
    pub role: Role,
    /// Whose it is.
    pub note: String,
    /// When it was issued, RFC 3339.
    pub issued: String,
}

/// A new token: the only reply that holds its text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenIssued {
    /// What is known of it from now on.
    pub info: TokenInfo,
    /// The token. It cannot be shown again.
    pub token: String,
}

impl fmt::Debug for TokenIssued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenIssued").field("info", &self.info).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown_by_debug_but_travels_whole() {
        let key = AccessKey {
            access_key: "FBKEY".parse().expect("key"),
            secret: "very-secret-words".parse().expect("secret"),
            note: String::new(),
            added: "2026-01-01T00:00:00Z".into(),
        };
        assert!(!format!("{key:?}").contains("very-secret"));
        let text = serde_json::to_string(&key).expect("json");
        assert_eq!(serde_json::from_str::<AccessKey>(&text).expect("read"), key);
        let info = serde_json::to_string(&AccessKeyInfo::from(key)).expect("json");
        assert!(!info.contains("very-secret"), "{info}");
    }

    #[test]
    fn a_refused_secret_is_not_repeated() {
        let error =
            serde_json::from_str::<KeySecret>("\"with blank in it\"").expect_err("refused").to_string();
        assert!(!error.contains("with blank"), "{error}");
        assert!("short".parse::<KeySecret>().is_err());
    }

    #[test]
    fn a_misspelt_role_gets_the_nearest() {
        assert_eq!("reader".parse(), Ok(Role::Reader));
        assert!("raeder".parse::<Role>().expect_err("misspelt").contains("`reader`?"));
    }
}
