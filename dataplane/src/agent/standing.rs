//! How the node stands with its control plane, for those who look: status, metrics, readiness.
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_control_api::{ControlLink, Epoch, NodeId};
use tokio::time::Instant;

/// Written by the agent, read by the side door.
#[derive(Debug)]
pub struct Standing {
    url: String,
    node: NodeId,
    facts: Mutex<Facts>,
}

/// What is known of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// The state held; 0 for none.
    pub(super) revision: u64,
    /// The placement held; 0 for none.
    pub(super) epoch: Epoch,
    /// The last purge applied.
    pub(super) purges_applied: u64,
    /// When the control plane last answered well, in this process.
    pub(super) contact: Option<Instant>,
    /// Why it does not, or why something of what it says is not done.
    pub(super) problem: String,
    /// What it wants and this node does not do, each with the reason.
    pub(super) refused: Vec<String>,
}

impl Standing {
    pub(super) fn new(url: String, node: NodeId) -> Self {
        Self { url, node, facts: Mutex::default() }
    }

    pub(super) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the node knows what it is to serve.
    pub fn has_state(&self) -> bool {
        self.facts().revision > 0
    }

    /// Revision, epoch, and seconds since the last contact, or since `started`.
    pub fn numbers(&self, started: Instant) -> (u64, u64, u64) {
        let facts = self.facts();
        (facts.revision, facts.epoch.0, facts.contact.unwrap_or(started).elapsed().as_secs())
    }

    /// For the status page.
    pub fn link(&self, is_fenced: bool) -> ControlLink {
        let facts = self.facts().clone();
        ControlLink {
            url: self.url.clone(),
            node: self.node.to_string(),
            revision: facts.revision,
            epoch: facts.epoch.0,
            purges_applied: facts.purges_applied,
            contact_seconds_ago: facts.contact.map(|contact| contact.elapsed().as_secs()),
            fenced: is_fenced,
            problem: facts.problem,
            refused: facts.refused,
        }
    }
}
