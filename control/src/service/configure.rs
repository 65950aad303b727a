//! Accelerators, policies and keys.
//!
//! Whatever is put is checked as a node would check it, so that a node never gets what it cannot do. A put that
//! changes nothing takes no revision.

use forebay_control_api::{
    Accelerator, AcceleratorName, AccessKey, AccessKeyBody, AccessKeyId, AccessKeyInfo, Policy, PolicyName,
    Prewarm, PrewarmState,
};

use super::{Edit, Service, clock};
use crate::error::ApiError;
use crate::store::{Look, Row};

/// Rows of each kind: a state goes whole to every node.
pub(super) const ROWS_MAX: usize = 1_000;
const NOTE_BYTES_MAX: usize = 200;

impl Service {
    pub(crate) fn accelerators(&self) -> Result<Vec<Accelerator>, ApiError> {
        Ok(self.view()?.all()?)
    }

    pub(crate) fn accelerator(&self, name: &AcceleratorName) -> Result<Accelerator, ApiError> {
        self.view()?.get(name.as_str())?.ok_or_else(|| unknown_accelerator(name))
    }

    /// Adds or replaces.
    pub(crate) fn put_accelerator(&self, accelerator: &Accelerator) -> Result<(), ApiError> {
        self.edit(|edit| {
            let policy = match &accelerator.policy {
                Some(name) => Some(edit.change.get::<Policy>(name.as_str())?.ok_or_else(|| {
                    ApiError::invalid(
                        "unknown_policy",
                        format!("there is no policy `{name}`"),
                        "set the policy first, or leave it away",
                    )
                })?),
                None => None,
            };
            check_spec(accelerator, policy.as_ref())?;
            put(edit, accelerator)
        })
    }

    /// Removes it; its prewarms end.
    pub(crate) fn delete_accelerator(&self, name: &AcceleratorName) -> Result<(), ApiError> {
        self.edit(|edit| {
            if !edit.change.delete::<Accelerator>(name.as_str())? {
                return Err(unknown_accelerator(name));
            }
            for mut job in edit.change.all::<Prewarm>()? {
                if job.accelerator == *name && !job.state.is_over() {
                    job.state = PrewarmState::Failed;
                    "the accelerator was removed".clone_into(&mut job.message);
                    job.ended = Some(clock());
                    edit.change.put(&job)?;
                }
            }
            edit.news()?;
            Ok(())
        })
    }

    pub(crate) fn policies(&self) -> Result<Vec<Policy>, ApiError> {
        Ok(self.view()?.all()?)
    }

    pub(crate) fn policy(&self, name: &PolicyName) -> Result<Policy, ApiError> {
        self.view()?.get(name.as_str())?.ok_or_else(|| unknown_policy(name))
    }

    /// Adds or replaces.
    pub(crate) fn put_policy(&self, policy: &Policy) -> Result<(), ApiError> {
        policy.check().map_err(|problem| {
            ApiError::invalid(
                "bad_policy",
                format!("policy {}: {problem}", policy.name),
                "change the rule that is named; the first match per field decides",
            )
        })?;
        self.edit(|edit| {
            for accelerator in edit.change.all::<Accelerator>()? {
                if accelerator.policy.as_ref() == Some(&policy.name) {
                    check_spec(&accelerator, Some(policy))?;
                }
            }
            put(edit, policy)
        })
    }

    /// Removes one that no accelerator names.
    pub(crate) fn delete_policy(&self, name: &PolicyName) -> Result<(), ApiError> {
        self.edit(|edit| {
            let users: Vec<String> = edit
                .change
                .all::<Accelerator>()?
                .into_iter()
                .filter(|accelerator| accelerator.policy.as_ref() == Some(name))
                .map(|accelerator| accelerator.name.to_string())
                .collect();
            if !users.is_empty() {
                return Err(ApiError::conflict(
                    "policy_in_use",
                    format!("policy `{name}` is used by {}", users.join(", ")),
                    "give those accelerators another policy first",
                ));
            }
            if !edit.change.delete::<Policy>(name.as_str())? {
                return Err(unknown_policy(name));
            }
            edit.news()?;
            Ok(())
        })
    }

    pub(crate) fn keys(&self) -> Result<Vec<AccessKeyInfo>, ApiError> {
        Ok(self.view()?.all::<AccessKey>()?.into_iter().map(AccessKeyInfo::from).collect())
    }

    /// Adds or replaces.
    pub(crate) fn put_key(
        &self,
        access_key: AccessKeyId,
        body: AccessKeyBody,
    ) -> Result<AccessKeyInfo, ApiError> {
        check_note(&body.note)?;
        let key = AccessKey { access_key, secret: body.secret, note: body.note, added: clock() };
        let key = self.edit(|edit| {
            // When it was put is no news.
            let held = edit.change.get::<AccessKey>(key.access_key.as_str())?;
            if let Some(held) = held.filter(|held| held.secret == key.secret && held.note == key.note) {
                return Ok(held);
            }
            put(edit, &key)?;
            Ok(key)
        })?;
        Ok(key.into())
    }

    pub(crate) fn delete_key(&self, access_key: &AccessKeyId) -> Result<(), ApiError> {
        self.edit(|edit| {
            if !edit.change.delete::<AccessKey>(access_key.as_str())? {
                return Err(ApiError::unknown(
                    "unknown_key",
                    format!("there is no key `{access_key}`"),
                    "`forebay-control key list` shows those there are",
                ));
            }
            edit.news()?;
            Ok(())
        })
    }
}

pub(super) fn check_note(note: &str) -> Result<(), ApiError> {
    if note.len() <= NOTE_BYTES_MAX && !note.chars().any(char::is_control) {
        return Ok(());
    }
    Err(ApiError::invalid(
        "bad_note",
        "a note is one line of at most 200 bytes",
        "shorten it, and leave out line ends",
    ))
}

pub(super) fn unknown_accelerator(name: &AcceleratorName) -> ApiError {
    ApiError::unknown(
        "unknown_accelerator",
        format!("there is no accelerator `{name}`"),
        "`forebay-control accelerator list` shows those there are; `accelerator add` makes one",
    )
}

fn unknown_policy(name: &PolicyName) -> ApiError {
    ApiError::unknown(
        "unknown_policy",
        format!("there is no policy `{name}`"),
        "`forebay-control policy list` shows those there are",
    )
}

fn check_spec(accelerator: &Accelerator, policy: Option<&Policy>) -> Result<(), ApiError> {
    accelerator.spec(policy).map(drop).map_err(|error| {
        ApiError::invalid(
            "bad_accelerator",
            format!("{:#}", anyhow::Error::from(error)),
            "write it as on a node's command line: NAME=ORIGIN[,key=value...]",
        )
    })
}

/// Writes a row that nodes have to hear of, unless it is there as it is.
fn put<R: Row + PartialEq>(edit: &Edit<'_>, row: &R) -> Result<(), ApiError> {
    match edit.change.get::<R>(&row.key())? {
        Some(held) if held == *row => return Ok(()),
        Some(_) => {}
        None => check_room::<R>(edit)?,
    }
    edit.change.put(row)?;
    edit.news()?;
    Ok(())
}

fn check_room<R: Row>(edit: &Edit<'_>) -> Result<(), ApiError> {
    let held = edit.change.all::<R>()?.len();
    if held < ROWS_MAX {
        return Ok(());
    }
    Err(ApiError::conflict(
        "too_many",
        format!("there are {held} rows of `{}` already, and at most {ROWS_MAX}", R::NAME),
        "remove those that are not needed",
    ))
}
