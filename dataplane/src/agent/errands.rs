//! Prewarms that are this node's to do: given to workers, followed, reported until they are no longer named.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_control_api::{PrewarmProgress, PrewarmState, PrewarmTask, Progress};
use tokio::sync::watch;

use crate::node::Node;
use crate::serve::{Order, Peer};

/// Longest message of a prewarm.
const MESSAGE_BYTES_MAX: usize = 500;

/// One prewarm, shared by the agent and the worker that does it.
#[derive(Debug)]
pub struct Job {
    /// Index of the accelerator.
    pub accelerator: u16,
    /// Every key that begins with it.
    pub prefix: Box<str>,
    pub(crate) listed: AtomicU64,
    pub(crate) listed_all: AtomicBool,
    pub(crate) done: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) bytes: AtomicU64,
    unwanted: watch::Sender<bool>,
    ended: Mutex<Option<PrewarmState>>,
    message: Mutex<String>,
}

impl Job {
    pub(crate) fn new(accelerator: u16, prefix: &str) -> Self {
        Self {
            accelerator,
            prefix: prefix.into(),
            listed: AtomicU64::new(0),
            listed_all: AtomicBool::new(false),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            unwanted: watch::Sender::new(false),
            ended: Mutex::default(),
            message: Mutex::default(),
        }
    }

    fn refused(why: String) -> Self {
        let job = Self::new(0, "");
        job.end(Err(why));
        job
    }

    /// Nobody wants it any more.
    pub(crate) fn cancel(&self) {
        self.unwanted.send_replace(true);
    }

    /// Ends when nobody wants it any more.
    pub(crate) async fn unwanted(&self) {
        // The sender lives as long as this.
        let _ = self.unwanted.subscribe().wait_for(|unwanted| *unwanted).await;
    }

    /// What went wrong on the way; the first stands.
    pub(crate) fn note(&self, what: impl FnOnce() -> String) {
        let mut message = self.message.lock().unwrap_or_else(PoisonError::into_inner);
        if message.is_empty() {
            *message = cut(what());
        }
    }

    /// Nothing more comes. The first end stands.
    pub(crate) fn end(&self, how: Result<(), String>) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.is_some() {
            return;
        }
        *ended = Some(match how {
            Ok(()) => PrewarmState::Done,
            Err(why) => {
                *self.message.lock().unwrap_or_else(PoisonError::into_inner) = cut(why);
                PrewarmState::Failed
            }
        });
    }

    fn has_ended(&self) -> bool {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(crate) fn progress(&self, id: u64, attempt: u32) -> PrewarmProgress {
        // The end is looked at first: what is counted before it is then whole.
        let state =
            self.ended.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or(PrewarmState::Running);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PrewarmProgress {
            id,
            attempt,
            state,
            progress: Progress {
                listed: load(&self.listed),
                listed_all: self.listed_all.load(Ordering::Relaxed),
                done: load(&self.done),
                failed: load(&self.failed),
                bytes: load(&self.bytes),
            },
            message: self.message.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// All of them go into one heartbeat.
fn cut(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        message.push('…');
    }
    message
}

/// Those that the control plane names, by id and attempt.
#[derive(Debug, Default)]
pub(super) struct Errands {
    jobs: HashMap<(u64, u32), Arc<Job>>,
}

impl Errands {
    /// Begins what is new and stops what is no longer named.
    pub(super) fn take(&mut self, node: &Node, workers: &[Peer], tasks: &[PrewarmTask]) {
        self.jobs.retain(|(id, attempt), job| {
            let is_named = tasks.iter().any(|task| (task.id, task.attempt) == (*id, *attempt));
            if !is_named {
                job.cancel();
            }
            is_named
        });
        let served = node.served();
        for task in tasks {
            self.jobs.entry((task.id, task.attempt)).or_insert_with(|| {
                let Some((index, _)) = served.find(task.accelerator.as_str()) else {
                    return Arc::new(Job::refused(format!(
                        "this node does not serve `{}`; GET /v1/status on its admin door says why",
                        task.accelerator
                    )));
                };
                tracing::info!(id = task.id, accelerator = %task.accelerator, prefix = task.prefix, "prewarming");
                let job = Arc::new(Job::new(index, &task.prefix));
                let worker = &workers[task.id as usize % workers.len()];
                if worker.orders.send(Order::Prewarm(Arc::clone(&job))).is_err() {
                    job.end(Err("the node is stopping".into()));
                }
                job
            });
        }
    }

    /// Whether something is under way.
    pub(super) fn are_open(&self) -> bool {
        self.jobs.values().any(|job| !job.has_ended())
    }

    /// How all of them stand.
    pub(super) fn progress(&self) -> Vec<PrewarmProgress> {
        self.jobs.iter().map(|((id, attempt), job)| job.progress(*id, *attempt)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_a_prewarm_fits_into_a_heartbeat() {
        let job = Job::new(0, "");
        job.note(|| format!("{}: the origin failed", "ä".repeat(512)));
        let said = job.progress(1, 1).message;
        assert!(said.len() <= MESSAGE_BYTES_MAX + 4 && said.ends_with('…'), "{said}");
        job.end(Err("x".repeat(MESSAGE_BYTES_MAX)));
        assert_eq!(job.progress(1, 1).message.len(), MESSAGE_BYTES_MAX);
    }

    #[test]
    fn the_first_end_of_a_prewarm_stands() {
        let job = Job::new(0, "");
        assert_eq!(job.progress(1, 1).state, PrewarmState::Running);
        job.end(Ok(()));
        job.end(Err("too late".into()));
        let progress = job.progress(1, 1);
        assert_eq!((progress.state, progress.message.as_str()), (PrewarmState::Done, ""));
    }
}
