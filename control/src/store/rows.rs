//! Which types are rows, in which table, under which key.

use forebay_control_api::{
    Accelerator, AccessKey, KeySecret, Node, Placement, Policy, Prewarm, Purge, Role, TokenInfo,
};
use redb::TableDefinition;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A document with a key of its own.
pub(crate) trait Row: Serialize + DeserializeOwned {
    /// The table, and what a row of it is called.
    const NAME: &'static str;
    /// The table.
    const TABLE: TableDefinition<'static, &'static str, &'static [u8]> = TableDefinition::new(Self::NAME);
    /// Its key within the table.
    fn key(&self) -> String;
}

/// A number as a key whose order as text is its order as a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number(pub(crate) u64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:020}", self.0)
    }
}

/// What nodes of this fleet show each other; made once, at the first start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ClusterRow {
    /// The token.
    pub(crate) token: KeySecret,
}

/// What is kept of a token: never the token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TokenRow {
    /// What operators see.
    #[serde(flatten)]
    pub(crate) info: TokenInfo,
    /// SHA-256 of the token, in hexadecimal.
    pub(crate) hash: String,
}

impl TokenRow {
    /// What its bearer may do.
    pub(crate) fn role(&self) -> Role {
        self.info.role
    }
}

macro_rules! rows {
    ($($type:ty, $name:literal, $row:ident => $key:expr;)+) => {
        $(impl Row for $type {
            const NAME: &'static str = $name;
            fn key(&self) -> String {
                let $row = self;
                $key
            }
        })+
    };
}

rows! {
    Accelerator, "accelerator", row => row.name.to_string();
    Policy, "policy", row => row.name.to_string();
    AccessKey, "key", row => row.access_key.to_string();
    Node, "node", row => row.id.to_string();
    TokenRow, "token", row => row.info.id.clone();
    Prewarm, "prewarm", row => Number(row.id).to_string();
    Purge, "purge", row => Number(row.sequence).to_string();
    Placement, "placement", _row => "current".to_owned();
    ClusterRow, "cluster", _row => "current".to_owned();
}
