//! Nodes: how they come, are heard of, fall silent and go.
//!
//! ```text
//!   register, heartbeat ─► live ── silent for fence_after ─► away ── silent for forget_after ─► gone
//!                           ▲                                  │                                  │
//!                           └────────────── heartbeat ─────────┴──────────────────────────────────┘
//! ```
//!
//! A node that is away keeps its groups, so that a restart moves nothing; one that is gone loses them, and gets the
//! same ones back when it returns. Silence is counted from when this process began, so a restart of the control
//! plane makes nobody away.

use forebay_control_api::{
    Contact, FleetState, Heartbeat, Node, NodeId, NodeReport, Placement, Prewarm, PrewarmState, PrewarmTask,
    Purge, Registration, WEIGHT_MAX,
};
use tokio::time::Instant;

use super::configure::ROWS_MAX;
use super::errands::{PURGES_AFTER, assign, hear_of};
use super::{Heard, Service, clock, span};
use crate::error::ApiError;
use crate::store::{ClusterRow, Look, View};

const URLS_MAX: usize = 16;
const TEXT_BYTES_MAX: usize = 300;

impl Service {
    /// Every node, by id, with what was last heard of it.
    pub(crate) fn nodes(&self) -> Result<Vec<Node>, ApiError> {
        let mut nodes = self.view()?.all::<Node>()?;
        let heard = self.heard();
        for node in &mut nodes {
            freshen(node, heard.get(&node.id));
        }
        Ok(nodes)
    }

    pub(crate) fn node(&self, id: &NodeId) -> Result<Node, ApiError> {
        let mut node = self.view()?.get::<Node>(id.as_str())?.ok_or_else(|| unknown_node(id))?;
        freshen(&mut node, self.heard().get(id));
        Ok(node)
    }

    /// A node has started.
    pub(crate) fn register(
        &self,
        id: &NodeId,
        registration: Registration,
        now: Instant,
    ) -> Result<FleetState, ApiError> {
        check_registration(&registration)?;
        self.edit(|edit| {
            let revision = edit.change.revision()?;
            check_not_ahead(id, registration.epoch.0.max(registration.purges_applied.unwrap_or(0)), revision)?;
            let held = edit.change.get::<Node>(id.as_str())?;
            if held.is_none() && edit.change.all::<Node>()?.len() >= ROWS_MAX {
                return Err(ApiError::conflict(
                    "too_many",
                    format!("there are {ROWS_MAX} nodes already"),
                    "remove those that are gone for good: `forebay-control nodes remove ID`",
                ));
            }
            if let Some(held) = &held
                && held.instance != registration.instance
                && held.contact == Contact::Live
            {
                tracing::warn!(node = %id, "node registered again; whoever ran under this id before is not heard");
            }
            // An empty cache has nothing that a purge could hit: it begins behind the revision this may take.
            let news = edit.news()?;
            let node = Node {
                id: id.clone(),
                instance: registration.instance,
                zone: registration.zone,
                weight: registration.weight,
                listen: registration.listen,
                peer: registration.peer,
                version: registration.version,
                contact: Contact::Live,
                draining: held.is_some_and(|held| held.draining),
                last_heartbeat: clock(),
                revision: 0,
                epoch: registration.epoch,
                purges_applied: registration.purges_applied.unwrap_or(news),
                serves: Vec::new(),
                report: NodeReport::default(),
            };
            edit.change.put(&node)?;
            Ok(assign(edit)?)
        })?;
        self.hear(id, now, NodeReport::default());
        tracing::info!(node = %id, "node registered");
        self.state_for(id)
    }

    /// A node is there. The state, if it holds an older one.
    pub(crate) fn heartbeat(
        &self,
        id: &NodeId,
        said: &Heartbeat,
        now: Instant,
    ) -> Result<Option<FleetState>, ApiError> {
        let view = self.view()?;
        let held = view.get::<Node>(id.as_str())?.ok_or_else(|| unknown_node(id))?;
        // Before the instance: an older copy of the store does not know who has been restarted since.
        check_not_ahead(id, said.revision.max(said.epoch.0).max(said.purges_applied), view.revision()?)?;
        if held.instance != said.instance {
            return Err(ApiError::conflict(
                "node_replaced",
                format!("another process has registered as `{id}` since"),
                "give each node an id of its own; a node that was restarted registers again",
            ));
        }
        drop(view);
        self.hear(id, now, said.report.clone());
        let said_of_it = |node: &Node| Node {
            contact: Contact::Live,
            revision: said.revision,
            epoch: said.epoch,
            purges_applied: said.purges_applied.max(node.purges_applied),
            serves: said.serves.clone(),
            ..node.clone()
        };
        // Most heartbeats change nothing that is kept, and then nothing is written.
        if said_of_it(&held) != held || !said.prewarms.is_empty() {
            self.edit(|edit| {
                let Some(held) = edit.change.get::<Node>(id.as_str())? else { return Err(unknown_node(id)) };
                let mut node = said_of_it(&held);
                if node != held {
                    node.last_heartbeat = clock();
                    node.report = said.report.clone();
                    edit.change.put(&node)?;
                }
                if held.contact != Contact::Live {
                    tracing::info!(node = %id, was = held.contact.word(), "node is back");
                    assign(edit)?;
                }
                if held.contact == Contact::Gone {
                    edit.news()?;
                }
                hear_of(edit, id, &said.prewarms)
            })?;
        }
        if *self.bell.borrow() == said.revision { Ok(None) } else { self.state_for(id).map(Some) }
    }

    /// Takes a node's groups away, or gives them back.
    pub(crate) fn set_draining(&self, id: &NodeId, draining: bool) -> Result<Node, ApiError> {
        self.edit(|edit| {
            let mut node = edit.change.get::<Node>(id.as_str())?.ok_or_else(|| unknown_node(id))?;
            if node.draining != draining {
                node.draining = draining;
                edit.change.put(&node)?;
                edit.news()?;
                assign(edit)?;
            }
            Ok(())
        })?;
        self.node(id)
    }

    /// Forgets a node. One that runs on is told to register again.
    pub(crate) fn remove_node(&self, id: &NodeId) -> Result<(), ApiError> {
        self.edit(|edit| {
            if !edit.change.delete::<Node>(id.as_str())? {
                return Err(unknown_node(id));
            }
            edit.news()?;
            Ok(assign(edit)?)
        })?;
        self.heard().remove(id);
        Ok(())
    }

    /// Looks who has fallen silent.
    pub(crate) fn tick(&self, now: Instant) -> Result<(), ApiError> {
        let due = |node: &Node| {
            let heard = self.heard();
            let since = heard.get(&node.id).map_or(self.started, |heard| heard.at);
            let silent = now.saturating_duration_since(since);
            match node.contact {
                Contact::Live | Contact::Away if silent >= self.patience.forget_after => Some(Contact::Gone),
                Contact::Live if silent >= self.patience.fence_after => Some(Contact::Away),
                _ => None,
            }
        };
        if self.view()?.all::<Node>()?.iter().all(|node| due(node).is_none()) {
            return Ok(());
        }
        self.edit(|edit| {
            for mut node in edit.change.all::<Node>()? {
                let Some(contact) = due(&node) else { continue };
                tracing::warn!(node = %node.id, contact = contact.word(), "node is not heard of");
                let heard = self.heard().get(&node.id).cloned();
                freshen(&mut node, heard.as_ref());
                node.contact = contact;
                edit.change.put(&node)?;
                if contact == Contact::Gone {
                    edit.news()?;
                }
            }
            Ok(assign(edit)?)
        })
    }

    /// What a node is to be, whole, as of one moment.
    pub(crate) fn state_for(&self, id: &NodeId) -> Result<FleetState, ApiError> {
        let view = self.view()?;
        let node = view.get::<Node>(id.as_str())?.ok_or_else(|| unknown_node(id))?;
        let revision = view.revision()?;
        Ok(FleetState {
            revision,
            accelerators: view.all()?,
            policies: view.all()?,
            keys: view.all()?,
            cluster_token: view.get::<ClusterRow>("current")?.map(|row| row.token),
            placement: view.get::<Placement>("current")?.unwrap_or_default(),
            purges: purges_since(&view, node.purges_applied)?,
            purges_after: view.number(PURGES_AFTER)?,
            purges_through: revision,
            prewarms: tasks_of(&view, id)?,
            draining: node.draining,
            fence_after: span(self.patience.fence_after),
            wait_max: span(self.patience.wait_max()),
        })
    }

    fn hear(&self, id: &NodeId, now: Instant, report: NodeReport) {
        self.heard().insert(id.clone(), Heard { at: now, clock: Some(clock()), report });
    }
}

fn freshen(node: &mut Node, heard: Option<&Heard>) {
    if let Some(Heard { clock: Some(clock), report, .. }) = heard {
        node.last_heartbeat.clone_from(clock);
        node.report = report.clone();
    }
}

fn purges_since(view: &View, applied: u64) -> Result<Vec<Purge>, ApiError> {
    Ok(view.all::<Purge>()?.into_iter().filter(|purge| purge.sequence > applied).collect())
}

fn tasks_of(view: &View, id: &NodeId) -> Result<Vec<PrewarmTask>, ApiError> {
    let mine = |job: &Prewarm| job.state == PrewarmState::Running && job.node.as_ref() == Some(id);
    Ok(view
        .all::<Prewarm>()?
        .into_iter()
        .filter(mine)
        .map(|job| PrewarmTask {
            id: job.id,
            attempt: job.attempt,
            accelerator: job.accelerator,
            prefix: job.prefix,
        })
        .collect())
}

fn check_registration(registration: &Registration) -> Result<(), ApiError> {
    let bad = |message: String, remedy: &str| Err(ApiError::invalid("bad_registration", message, remedy));
    let Registration { instance, weight, listen, peer, version, .. } = registration;
    if !(8..=64).contains(&instance.len()) || !instance.bytes().all(|byte| byte.is_ascii_graphic()) {
        return bad(
            "the instance is not 8 to 64 visible characters".into(),
            "send a random text, new at each start",
        );
    }
    if !(1..=WEIGHT_MAX).contains(weight) {
        return bad(format!("weight {weight} is not 1 to {WEIGHT_MAX}"), "send the GiB of the node's cache");
    }
    if listen.len() > URLS_MAX || version.len() > TEXT_BYTES_MAX {
        return bad(format!("more than {URLS_MAX} addresses, or a version too long"), "send less");
    }
    for url in listen.iter().chain(peer) {
        let parsed = url.parse::<http::Uri>().ok();
        let good = url.len() <= TEXT_BYTES_MAX
            && parsed.is_some_and(|uri| {
                matches!(uri.scheme_str(), Some("http" | "https"))
                    && uri.host().is_some_and(|host| !host.is_empty())
            });
        if !good {
            return bad(format!("`{url}` is not an address"), "send http://HOST:PORT or https://HOST:PORT");
        }
    }
    Ok(())
}

/// A node that has seen more than the store: the store is an older copy.
fn check_not_ahead(id: &NodeId, seen: u64, revision: u64) -> Result<(), ApiError> {
    if seen <= revision {
        return Ok(());
    }
    tracing::error!(node = %id, seen, revision, "a node has seen a newer state; is the store an older copy?");
    Err(ApiError::conflict(
        "control_is_older",
        format!(
            "node `{id}` has seen revision {seen}, and this control plane is at {revision}: its store is an older copy"
        ),
        format!(
            "bring back the newer store, or go on from this one: `forebay-control placement advance --past {seen}`"
        ),
    ))
}

fn unknown_node(id: &NodeId) -> ApiError {
    ApiError::unknown(
        "unknown_node",
        format!("there is no node `{id}`"),
        "a node registers before its heartbeats",
    )
}
