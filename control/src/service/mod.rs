//! The verbs of the control plane: receive, validate, store, plan, publish.
//!
//! A verb is one transaction. What nodes have to hear of takes a revision inside it ([`Edit::news`]); before the
//! commit the planner looks whether the placement has to follow, and after it the bell rings ([`Service::news`]), so
//! that waiting heartbeats are answered. Nothing is sent to anybody: a node that comes later gets the same state.
//!
//! Verbs wait for the drive, so they run on blocking threads. The only things that live in memory alone are when a
//! node was last heard of and how it was then.

mod configure;
mod errands;
mod nodes;
mod tokens;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use forebay_control_api::{
    Accelerator, AccessKey, Contact, ControlStatus, Epoch, Node, NodeCounts, NodeId, NodeReport, Placement,
    Policy, Prewarm, Purge, Span,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::ApiError;
use crate::store::{Change, ClusterRow, Look, Store, StoreError, View};

use tokens::KnownToken;
pub(crate) use tokens::{FileToken, new_token};

/// How patient the control plane is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// A node without contact for this long is away.
    pub(crate) fence_after: Duration,
    /// A node without contact for this long loses its groups. At least `fence_after`.
    pub(crate) forget_after: Duration,
}

impl Patience {
    /// The longest that a heartbeat is held back: three fit into `fence_after`.
    pub(crate) fn wait_max(self) -> Duration {
        self.fence_after / 3
    }
}

/// The control plane without its sockets.
#[derive(Debug)]
pub(crate) struct Service {
    store: Store,
    patience: Patience,
    started: Instant,
    heard: Mutex<HashMap<NodeId, Heard>>,
    tokens: RwLock<Vec<KnownToken>>,
    file_tokens: Vec<FileToken>,
    bell: watch::Sender<u64>,
}

/// When a node was last heard of, and how it was.
#[derive(Clone, Debug)]
struct Heard {
    at: Instant,
    clock: Option<String>,
    report: NodeReport,
}

impl Service {
    /// Over an open store. Nodes that it knows are given the whole of `fence_after` to be heard of.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn new(
        store: Store,
        patience: Patience,
        file_tokens: Vec<FileToken>,
        now: Instant,
    ) -> Result<Self, ApiError> {
        store.change(|change| {
            if change.get::<ClusterRow>("current")?.is_none() {
                let token =
                    new_token().map_err(|error| ApiError::internal(format!("random bytes: {error}")))?;
                let token = token.parse().expect("a token has visible characters");
                change.put(&ClusterRow { token })?;
            }
            Ok::<(), ApiError>(())
        })?;
        let revision = store.view()?.revision()?;
        let service = Self {
            store,
            patience,
            started: now,
            heard: Mutex::default(),
            tokens: RwLock::default(),
            file_tokens,
            bell: watch::Sender::new(revision),
        };
        service.reload_tokens()?;
        Ok(service)
    }

    /// The bell: the newest revision, and word when it grows.
    pub(crate) fn news(&self) -> watch::Receiver<u64> {
        self.bell.subscribe()
    }

    /// The longest that a request is held back.
    pub(crate) fn wait_max(&self) -> Duration {
        self.patience.wait_max()
    }

    /// The placement in force.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn placement(&self) -> Result<Placement, ApiError> {
        Ok(self.view()?.get::<Placement>("current")?.unwrap_or_default())
    }

    /// Gives the placement and all that follows higher numbers than `past`, for a control plane that was restored
    /// from an older copy and whose nodes have seen more.
    ///
    /// # Errors
    /// A number that leaves no room, or the store's.
    pub(crate) fn advance(&self, past: u64) -> Result<Placement, ApiError> {
        if past > REVISION_MAX {
            return Err(ApiError::invalid(
                "bad_revision",
                format!("{past} is more than revisions are given room for ({REVISION_MAX})"),
                "take the revision from the refusal in a node's log",
            ));
        }
        self.edit(|edit| {
            edit.change.raise("revision", edit.change.revision()?.max(past))?;
            let revision = edit.news()?;
            let placement = edit.change.get::<Placement>("current")?.unwrap_or_default();
            edit.change.put(&Placement { epoch: Epoch(revision), ..placement })?;
            Ok(())
        })?;
        self.placement()
    }

    /// What the control plane is and holds.
    ///
    /// # Errors
    /// The store's.
    pub(crate) fn status(&self, now: Instant) -> Result<ControlStatus, ApiError> {
        let view = self.view()?;
        let revision = view.revision()?;
        let nodes = view.all::<Node>()?;
        let count = |contact| nodes.iter().filter(|node| node.contact == contact).count() as u64;
        let slowest = nodes.iter().map(|node| node.purges_applied).min().unwrap_or(u64::MAX);
        Ok(ControlStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: now.saturating_duration_since(self.started).as_secs(),
            revision,
            epoch: view.get::<Placement>("current")?.unwrap_or_default().epoch,
            accelerators: view.all::<Accelerator>()?.len() as u64,
            policies: view.all::<Policy>()?.len() as u64,
            keys: view.all::<AccessKey>()?.len() as u64,
            nodes: NodeCounts {
                live: count(Contact::Live),
                away: count(Contact::Away),
                gone: count(Contact::Gone),
                draining: nodes.iter().filter(|node| node.draining).count() as u64,
            },
            nodes_behind: nodes
                .iter()
                .filter(|node| node.contact == Contact::Live && node.revision < revision)
                .count() as u64,
            purges_open: view.all::<Purge>()?.iter().filter(|purge| purge.sequence > slowest).count() as u64,
            prewarms_open: view.all::<Prewarm>()?.iter().filter(|job| !job.state.is_over()).count() as u64,
            fence_after: span(self.patience.fence_after),
            forget_after: span(self.patience.forget_after),
        })
    }

    fn view(&self) -> Result<View, StoreError> {
        self.store.view()
    }

    /// One transaction of `work`; plans and rings the bell if it has news.
    fn edit<T>(&self, work: impl FnOnce(&Edit<'_>) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let mut revision = None;
        let done = self.store.change(|change| {
            let edit = Edit { change, revision: Cell::new(None) };
            let done = work(&edit)?;
            revision = edit.revision.get();
            if let Some(revision) = revision {
                plan(change, revision)?;
            }
            Ok::<T, ApiError>(done)
        })?;
        if let Some(revision) = revision {
            // Two changes may ring in the wrong order; the bell only ever says the highest.
            self.bell.send_if_modified(|held| {
                let newer = revision > *held;
                *held = revision.max(*held);
                newer
            });
        }
        Ok(done)
    }

    fn heard(&self) -> std::sync::MutexGuard<'_, HashMap<NodeId, Heard>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers of JSON are exact up to here.
const REVISION_MAX: u64 = 1 << 52;

/// One transaction of a verb.
struct Edit<'a> {
    change: &'a Change,
    revision: Cell<Option<u64>>,
}

impl Edit<'_> {
    /// Nodes have to hear of this transaction: the revision that it gets.
    fn news(&self) -> Result<u64, StoreError> {
        if let Some(revision) = self.revision.get() {
            return Ok(revision);
        }
        let revision = self.change.next_revision()?;
        self.revision.set(Some(revision));
        Ok(revision)
    }
}

/// Puts the next placement into the transaction, if the fleet asks for another.
fn plan(change: &Change, revision: u64) -> Result<(), StoreError> {
    let current = change.get::<Placement>("current")?.unwrap_or_default();
    if current.epoch == Epoch(revision) {
        return Ok(());
    }
    let (nodes, accelerators, policies) = (change.all()?, change.all()?, change.all()?);
    if let Some(next) = current.next(&nodes, &accelerators, &policies, Epoch(revision)) {
        let members: Vec<&str> = next.members.iter().map(|member| member.id.as_str()).collect();
        tracing::info!(epoch = revision, members = members.join(","), "placement planned");
        change.put(&next)?;
    }
    Ok(())
}

fn span(duration: Duration) -> Span {
    Span::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

/// The wall clock, RFC 3339, in whole seconds.
fn clock() -> String {
    let now = time::OffsetDateTime::now_utc().replace_nanosecond(0).expect("zero is a nanosecond");
    now.format(&time::format_description::well_known::Rfc3339).expect("the year has four digits")
}

#[cfg(test)]
mod tests;
