//! Prewarms and purges: given out, followed, remembered for a while.

use std::collections::HashMap;

use forebay_control_api::{
    Accelerator, Contact, KEY_BYTES_MAX, Node, NodeId, Prewarm, PrewarmBody, PrewarmProgress, PrewarmState,
    Progress, Purge, PurgeBody, PurgeStatus, PurgeTarget,
};

use super::configure::unknown_accelerator;
use super::{Edit, Service, clock};
use crate::error::ApiError;
use crate::store::{Look, Number, StoreError};

/// Prewarms that have not ended.
const PREWARMS_OPEN_MAX: usize = 1_000;
/// Prewarms that have ended and are still shown.
const PREWARMS_KEPT: usize = 1_000;
/// Purges that are remembered. A node that missed more forgets everything.
const PURGES_KEPT: usize = 10_000;
/// The sequence of the newest purge that is no longer remembered.
pub(super) const PURGES_AFTER: &str = "purges_after";

impl Service {
    /// Newest first.
    pub(crate) fn prewarms(&self) -> Result<Vec<Prewarm>, ApiError> {
        let mut jobs = self.view()?.all::<Prewarm>()?;
        jobs.reverse();
        Ok(jobs)
    }

    pub(crate) fn prewarm(&self, id: u64) -> Result<Prewarm, ApiError> {
        self.view()?.get(&Number(id).to_string())?.ok_or_else(|| unknown_prewarm(id))
    }

    /// Gives a prefix to a node to be read.
    pub(crate) fn ask_prewarm(&self, body: PrewarmBody) -> Result<Prewarm, ApiError> {
        check_key("prefix", &body.prefix)?;
        let id = self.edit(|edit| {
            if edit.change.get::<Accelerator>(body.accelerator.as_str())?.is_none() {
                return Err(unknown_accelerator(&body.accelerator));
            }
            let jobs = edit.change.all::<Prewarm>()?;
            let (over, open): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.state.is_over());
            if open.len() >= PREWARMS_OPEN_MAX {
                return Err(ApiError::conflict(
                    "too_many",
                    format!("{PREWARMS_OPEN_MAX} prewarms have not ended yet"),
                    "wait, or cancel some; one prewarm of a shorter prefix does the work of many",
                ));
            }
            for old in over.iter().rev().skip(PREWARMS_KEPT - 1) {
                edit.change.delete::<Prewarm>(&Number(old.id).to_string())?;
            }
            let id = edit.news()?;
            edit.change.put(&Prewarm {
                id,
                accelerator: body.accelerator,
                prefix: body.prefix,
                state: PrewarmState::Waiting,
                node: None,
                attempt: 0,
                progress: Progress::default(),
                message: String::new(),
                asked: clock(),
                ended: None,
            })?;
            assign(edit)?;
            Ok(id)
        })?;
        self.prewarm(id)
    }

    /// Ends a prewarm; what was read stays cached.
    pub(crate) fn cancel_prewarm(&self, id: u64) -> Result<(), ApiError> {
        self.edit(|edit| {
            let key = Number(id).to_string();
            let mut job = edit.change.get::<Prewarm>(&key)?.ok_or_else(|| unknown_prewarm(id))?;
            if !job.state.is_over() {
                job.state = PrewarmState::Cancelled;
                job.ended = Some(clock());
                edit.change.put(&job)?;
                edit.news()?;
            }
            Ok(())
        })
    }

    /// Newest first.
    pub(crate) fn purges(&self) -> Result<Vec<PurgeStatus>, ApiError> {
        let view = self.view()?;
        let nodes = view.all::<Node>()?;
        Ok(view.all::<Purge>()?.into_iter().rev().map(|purge| purge_status(purge, &nodes)).collect())
    }

    pub(crate) fn purge(&self, sequence: u64) -> Result<PurgeStatus, ApiError> {
        let view = self.view()?;
        let purge = view.get::<Purge>(&Number(sequence).to_string())?.ok_or_else(|| {
            ApiError::unknown(
                "unknown_purge",
                format!("there is no purge {sequence}, or it is older than the {PURGES_KEPT} remembered"),
                "`forebay-control purge list` shows those there are",
            )
        })?;
        Ok(purge_status(purge, &view.all()?))
    }

    /// Has every node forget a key or a prefix.
    pub(crate) fn ask_purge(&self, body: PurgeBody) -> Result<PurgeStatus, ApiError> {
        match body.target() {
            Ok(PurgeTarget::Key(key)) if !key.is_empty() => check_key("key", key)?,
            Ok(PurgeTarget::Prefix(prefix)) => check_key("prefix", prefix)?,
            Ok(PurgeTarget::Key(_)) => {
                return Err(ApiError::invalid(
                    "bad_key",
                    "the key is empty",
                    "name one, or the prefix \"\" for all",
                ));
            }
            Err(unclear) => {
                return Err(ApiError::invalid(
                    "bad_purge",
                    unclear.to_string(),
                    "send {\"accelerator\":..., \"key\":...} or {\"accelerator\":..., \"prefix\":...}",
                ));
            }
        }
        let sequence = self.edit(|edit| {
            if edit.change.get::<Accelerator>(body.accelerator.as_str())?.is_none() {
                return Err(unknown_accelerator(&body.accelerator));
            }
            let held = edit.change.all::<Purge>()?;
            for old in held.iter().rev().skip(PURGES_KEPT - 1) {
                edit.change.delete::<Purge>(&Number(old.sequence).to_string())?;
                edit.change.raise(PURGES_AFTER, edit.change.number(PURGES_AFTER)?.max(old.sequence))?;
            }
            let sequence = edit.news()?;
            edit.change.put(&Purge {
                sequence,
                accelerator: body.accelerator,
                key: body.key,
                prefix: body.prefix,
                asked: clock(),
            })?;
            Ok(sequence)
        })?;
        self.purge(sequence)
    }
}

/// Gives every prewarm that nobody does to the live node with the fewest.
pub(super) fn assign(edit: &Edit<'_>) -> Result<(), StoreError> {
    let jobs = edit.change.all::<Prewarm>()?;
    if jobs.iter().all(|job| job.state.is_over()) {
        return Ok(());
    }
    let nodes = edit.change.all::<Node>()?;
    let live = |id: &NodeId| nodes.iter().any(|node| node.id == *id && node.contact == Contact::Live);
    let mut load: HashMap<&NodeId, usize> = nodes
        .iter()
        .filter(|node| node.contact == Contact::Live && !node.draining)
        .map(|node| (&node.id, 0))
        .collect();
    let mut orphans = Vec::new();
    for job in &jobs {
        match &job.node {
            _ if job.state.is_over() => {}
            Some(node) if live(node) => {
                if let Some(count) = load.get_mut(node) {
                    *count += 1;
                }
            }
            _ => orphans.push(job.clone()),
        }
    }
    for mut job in orphans {
        let heir = load.iter_mut().min_by(|a, b| (&*a.1, a.0).cmp(&(&*b.1, b.0)));
        match heir {
            Some((node, count)) => {
                *count += 1;
                job.node = Some((*node).clone());
                job.state = PrewarmState::Running;
                job.attempt += 1;
                job.progress = Progress::default();
            }
            None if job.node.is_some() => {
                job.node = None;
                job.state = PrewarmState::Waiting;
            }
            None => continue,
        }
        edit.change.put(&job)?;
        edit.news()?;
    }
    Ok(())
}

/// Takes what a node says of its prewarms. What it says of others' or of an earlier attempt is not heard.
pub(super) fn hear_of(edit: &Edit<'_>, node: &NodeId, said: &[PrewarmProgress]) -> Result<(), ApiError> {
    for said in said {
        if !matches!(said.state, PrewarmState::Running | PrewarmState::Done | PrewarmState::Failed) {
            return Err(ApiError::invalid(
                "bad_progress",
                format!("prewarm {} cannot be `{}` on a node", said.id, said.state.word()),
                "say running, done or failed",
            ));
        }
        let Some(mut job) = edit.change.get::<Prewarm>(&Number(said.id).to_string())? else { continue };
        if job.state.is_over() || job.attempt != said.attempt || job.node.as_ref() != Some(node) {
            continue;
        }
        let before = job.clone();
        job.progress = said.progress.clone();
        job.message = said.message.chars().filter(|c| !c.is_control()).take(500).collect();
        job.state = said.state;
        if job.state.is_over() {
            job.ended = Some(clock());
            edit.news()?;
        }
        if job != before {
            edit.change.put(&job)?;
        }
    }
    Ok(())
}

fn purge_status(purge: Purge, nodes: &[Node]) -> PurgeStatus {
    let (applied, open): (Vec<&Node>, Vec<&Node>) =
        nodes.iter().partition(|node| node.purges_applied >= purge.sequence);
    let (waiting, unreached): (Vec<&Node>, Vec<&Node>) =
        open.into_iter().partition(|node| node.contact == Contact::Live);
    let ids = |nodes: Vec<&Node>| nodes.into_iter().map(|node| node.id.clone()).collect::<Vec<_>>();
    PurgeStatus {
        purge,
        complete: waiting.is_empty(),
        applied: ids(applied),
        waiting: ids(waiting),
        unreached: ids(unreached),
    }
}

fn check_key(what: &str, text: &str) -> Result<(), ApiError> {
    if text.len() <= KEY_BYTES_MAX && !text.starts_with('/') {
        return Ok(());
    }
    Err(ApiError::invalid(
        &format!("bad_{what}"),
        format!("a {what} has at most {KEY_BYTES_MAX} bytes and does not begin with a slash"),
        format!("write the {what} as it is in the bucket, not percent-encoded"),
    ))
}

fn unknown_prewarm(id: u64) -> ApiError {
    ApiError::unknown(
        "unknown_prewarm",
        format!("there is no prewarm {id}"),
        "`forebay-control prewarm list` shows those there are",
    )
}
