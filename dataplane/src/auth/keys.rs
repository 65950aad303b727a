//! The access keys that clients may sign with, and the signing keys derived from them.
//!
//! A derived key is good for a day, a region and a service, and costs four of the five HMACs of a check; each
//! thread remembers the last few, so that a hit shares nothing with another core. Secrets have no `Debug`.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Access keys with their secrets, and whether they are asked for at all.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Keys {
    pairs: Vec<Pair>,
    anonymous: bool,
}

#[derive(Clone, PartialEq, Eq)]
struct Pair {
    access_key: Box<str>,
    secret: Secret,
}

/// Why a key cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Empty, or with characters that cannot stand in an Authorization header.
    #[error("access key {0:?}: 1 to 128 letters, digits or one of '-', '_', '.', '~', '+', '=' are needed")]
    AccessKey(Box<str>),
    /// The secret is empty.
    #[error("the secret of access key {0:?} is empty")]
    Secret(Box<str>),
    /// Two secrets for one access key.
    #[error("access key {0:?} is given twice")]
    Twice(Box<str>),
}

impl Keys {
    /// No keys yet; with `anonymous` none are needed.
    pub fn new(anonymous: bool) -> Self {
        Self { pairs: Vec::new(), anonymous }
    }

    /// Adds one pair.
    ///
    /// # Errors
    /// [`KeyError`] when the pair could never sign a request, or its access key is there already.
    pub fn add(&mut self, access_key: &str, secret: &str) -> Result<(), KeyError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~+=".contains(&byte);
        if !(1..=128).contains(&access_key.len()) || !access_key.bytes().all(allowed) {
            return Err(KeyError::AccessKey(access_key.into()));
        }
        if secret.is_empty() {
            return Err(KeyError::Secret(access_key.into()));
        }
        if self.secret(access_key.as_bytes()).is_some() {
            return Err(KeyError::Twice(access_key.into()));
        }
        self.pairs.push(Pair { access_key: access_key.into(), secret: Secret::new(secret) });
        Ok(())
    }

    /// Whether every request may pass, signed or not.
    pub fn is_anonymous(&self) -> bool {
        self.anonymous
    }

    /// Whether there is no key at all.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// The access keys, for `check-config`.
    pub fn access_keys(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|pair| &*pair.access_key)
    }

    pub(super) fn secret(&self, access_key: &[u8]) -> Option<&Secret> {
        let pair = self.pairs.iter().find(|pair| pair.access_key.as_bytes() == access_key)?;
        Some(&pair.secret)
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys")
            .field("access_keys", &self.access_keys().collect::<Vec<_>>())
            .field("anonymous", &self.anonymous)
            .finish_non_exhaustive()
    }
}

/// One secret key.
#[derive(Clone)]
pub(super) struct Secret {
    /// Names this secret in the threads' memories; clones hold the same secret and share it.
    id: u64,
    text: Box<str>,
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Secret {}

impl Secret {
    fn new(text: &str) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), text: text.into() }
    }

    /// Signs `message` with the key derived for `date` (`yyyymmdd`), `region` and S3.
    pub(super) fn sign_v4(&self, date: [u8; 8], region: &[u8], message: &[u8]) -> [u8; 32] {
        DERIVED.with_borrow_mut(|derived| {
            let known = derived
                .iter()
                .find(|known| known.secret == self.id && known.date == date && *known.region == *region);
            let mac = if let Some(known) = known {
                known.mac.clone()
            } else {
                let mac = self.derive_v4(date, region);
                if derived.len() == DERIVED_MAX {
                    derived.remove(0);
                }
                derived.push(Derived { secret: self.id, date, region: region.into(), mac: mac.clone() });
                mac
            };
            mac.chain_update(message).finalize().into_bytes().into()
        })
    }

    fn derive_v4(&self, date: [u8; 8], region: &[u8]) -> Hmac<Sha256> {
        let mut start = Vec::with_capacity(4 + self.text.len());
        start.extend_from_slice(b"AWS4");
        start.extend_from_slice(self.text.as_bytes());
        [&date[..], region, b"s3", b"aws4_request"].iter().fold(keyed(&start), |mac, step| {
            let next: [u8; 32] = mac.chain_update(step).finalize().into_bytes().into();
            keyed(&next)
        })
    }
}

/// Regions come from clients, so the memory of them is short.
const DERIVED_MAX: usize = 8;

struct Derived {
    secret: u64,
    date: [u8; 8],
    region: Box<[u8]>,
    mac: Hmac<Sha256>,
}

thread_local! {
    static DERIVED: RefCell<Vec<Derived>> = const { RefCell::new(Vec::new()) };
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_names_and_no_secrets() {
        let mut keys = Keys::new(false);
        keys.add("AKTEST", "wJalrXUtnFEMI").unwrap();
        let text = format!("{keys:?}");
        assert!(text.contains("AKTEST") && !text.contains("wJalr"), "{text}");
        let error = keys.add("AKTEST", "wJalrOther").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("wJalr"), "{error}");
    }

    #[test]
    fn keys_that_could_never_sign_are_refused() {
        let mut keys = Keys::new(false);
        for access_key in ["", "a/b", "a b", "a,b", "caf\u{e9}", &"a".repeat(129)] {
            assert_eq!(keys.add(access_key, "s"), Err(KeyError::AccessKey(access_key.into())));
        }
        assert_eq!(keys.add("a", ""), Err(KeyError::Secret("a".into())));
        assert_eq!(keys.add("a", "s"), Ok(()));
        assert_eq!(keys.add("a", "t"), Err(KeyError::Twice("a".into())));
        assert_eq!(keys.access_keys().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn what_a_thread_remembers_does_not_change_what_it_signs() {
        let (one, two) = (Secret::new("one"), Secret::new("two"));
        let fresh = |secret: &Secret, date, region: &[u8]| -> [u8; 32] {
            secret.derive_v4(date, region).chain_update(b"message").finalize().into_bytes().into()
        };
        for round in 0..3 {
            for number in 0..2 * DERIVED_MAX as u8 {
                for (secret, date) in [(&one, *b"20261130"), (&two, *b"20261130"), (&one, *b"20261201")] {
                    let region = [b'r', number];
                    let signed = secret.sign_v4(date, &region, b"message");
                    assert_eq!(signed, fresh(secret, date, &region), "round {round}");
                    assert_eq!(signed, secret.clone().sign_v4(date, &region, b"message"));
                }
            }
        }
        assert_ne!(fresh(&one, *b"20261130", b"r"), fresh(&two, *b"20261130", b"r"));
        DERIVED.with_borrow(|derived| assert_eq!(derived.len(), DERIVED_MAX));
    }
}
