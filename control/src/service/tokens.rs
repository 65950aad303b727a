//! Who is asking: bearer tokens and their roles.
//!
//! A token has 256 random bits, so a plain hash is as good a lock as a slow one. The hash is compared in constant
//! time with every token there is. Tokens of files (`--token-file`) live as long as the process and are not listed.

use std::sync::PoisonError;

use forebay_control_api::{Role, TokenBody, TokenInfo, TokenIssued};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::configure::{ROWS_MAX, check_note};
use super::{Service, clock};
use crate::error::ApiError;
use crate::store::{Look, TokenRow};

/// A token that was given in a file.
#[derive(Clone)]
pub(crate) struct FileToken {
    hash: [u8; 32],
    role: Role,
}

/// A token of the store.
#[derive(Clone)]
pub(crate) struct KnownToken {
    hash: [u8; 32],
    role: Role,
}

impl FileToken {
    /// Of its text: at least 16 visible characters.
    ///
    /// # Errors
    /// What is wrong with the text, without the text.
    pub(crate) fn new(role: Role, text: &str) -> Result<Self, &'static str> {
        if text.len() < 16 || text.len() > 256 || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a token has 16 to 256 visible characters");
        }
        Ok(Self { hash: hash(text), role })
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }
}

impl std::fmt::Debug for FileToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileToken({})", self.role)
    }
}

impl std::fmt::Debug for KnownToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KnownToken({})", self.role)
    }
}

impl Service {
    /// The role of a token's bearer.
    pub(crate) fn role_of(&self, token: &str) -> Option<Role> {
        let asked = hash(token);
        let known = self.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let all = known
            .iter()
            .map(|token| (&token.hash, token.role))
            .chain(self.file_tokens.iter().map(|token| (&token.hash, token.role)));
        // Every hash is looked at, and the one that fits is picked without a branch.
        let mut place = 0_u8;
        let mut found = Choice::from(0);
        for (hash, role) in all {
            let same = hash.ct_eq(&asked);
            place.conditional_assign(&(role as u8), same);
            found |= same;
        }
        if bool::from(found) { Role::ALL.into_iter().find(|role| *role as u8 == place) } else { None }
    }

    pub(crate) fn tokens(&self) -> Result<Vec<TokenInfo>, ApiError> {
        Ok(self.view()?.all::<TokenRow>()?.into_iter().map(|row| row.info).collect())
    }

    /// Whether somebody can issue tokens.
    pub(crate) fn has_admin(&self) -> Result<bool, ApiError> {
        let rows = self.view()?.all::<TokenRow>()?;
        Ok(rows.iter().any(|row| row.role() == Role::Admin)
            || self.file_tokens.iter().any(|token| token.role() == Role::Admin))
    }

    /// Makes a token. Its text is in the answer and nowhere else.
    pub(crate) fn issue_token(&self, body: TokenBody) -> Result<TokenIssued, ApiError> {
        let token = new_token().map_err(|error| ApiError::internal(format!("random bytes: {error}")))?;
        let info = self.keep_token(&token, body)?;
        Ok(TokenIssued { info, token })
    }

    /// Takes a token whose text is known to its bearer already.
    pub(crate) fn keep_token(&self, token: &str, body: TokenBody) -> Result<TokenInfo, ApiError> {
        check_note(&body.note)?;
        let mut id = [0; 6];
        getrandom::fill(&mut id).map_err(|error| ApiError::internal(format!("random bytes: {error}")))?;
        let info = TokenInfo { id: hex::encode(id), role: body.role, note: body.note, issued: clock() };
        let row = TokenRow { info: info.clone(), hash: hex::encode(hash(token)) };
        self.edit(|edit| {
            if edit.change.all::<TokenRow>()?.len() >= ROWS_MAX {
                return Err(ApiError::conflict(
                    "too_many",
                    format!("there are {ROWS_MAX} tokens already"),
                    "revoke those that are not needed",
                ));
            }
            Ok(edit.change.put(&row)?)
        })?;
        self.reload_tokens()?;
        Ok(info)
    }

    /// Ends a token, unless nobody could issue another after it.
    pub(crate) fn revoke_token(&self, id: &str) -> Result<(), ApiError> {
        let admin_in_file = self.file_tokens.iter().any(|token| token.role() == Role::Admin);
        self.edit(|edit| {
            let rows = edit.change.all::<TokenRow>()?;
            if !rows.iter().any(|row| row.info.id == id) {
                return Err(ApiError::unknown(
                    "unknown_token",
                    format!("there is no token `{id}`"),
                    "`forebay-control token list` shows those there are; the id is not the token",
                ));
            }
            let admins_left =
                rows.iter().any(|row| row.info.id != id && row.role() == Role::Admin) || admin_in_file;
            if !admins_left {
                return Err(ApiError::conflict(
                    "last_admin",
                    "this is the last token that may issue others",
                    "issue another admin token first",
                ));
            }
            edit.change.delete::<TokenRow>(id)?;
            Ok(())
        })?;
        self.reload_tokens()
    }

    pub(super) fn reload_tokens(&self) -> Result<(), ApiError> {
        let mut known = Vec::new();
        // Held over the read, so that of two reloads the later one is the one that stays.
        let mut held = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
        for row in self.view()?.all::<TokenRow>()? {
            let mut hash = [0; 32];
            hex::decode_to_slice(&row.hash, &mut hash)
                .map_err(|error| ApiError::internal(format!("token {}: {error}", row.info.id)))?;
            known.push(KnownToken { hash, role: row.role() });
        }
        *held = known;
        Ok(())
    }
}

/// A new token's text.
pub(crate) fn new_token() -> Result<String, getrandom::Error> {
    let mut random = [0; 32];
    getrandom::fill(&mut random)?;
    Ok(format!("fbc_{}", hex::encode(random)))
}

fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}
