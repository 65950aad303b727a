//! A worker's tasks, counted as they run.
//!
//! The ring may put the thread to sleep only when nobody else wants it, and a runtime does not say whether its queue
//! is empty. So whoever runs on a worker leaves a mark when it does: a task that finds no new mark since it last
//! went to the end of the queue was alone in it.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::future::{Future, poll_fn};

use tokio::task::{JoinHandle, coop, spawn_local};

thread_local! {
    static RUNS: Cell<u64> = const { Cell::new(0) };
    static YIELDED: Cell<bool> = const { Cell::new(false) };
}

/// Spawns a task of this worker.
///
/// # Panics
/// Outside a local runtime.
pub fn spawn<F: Future<Output: 'static> + 'static>(future: F) -> JoinHandle<F::Output> {
    spawn_local(counted(future))
}

/// The same future, for a task that is spawned by somebody else.
pub async fn counted<F: Future>(future: F) -> F::Output {
    // Not in here: a future that is moved into another one is in it twice.
    let mut future = Box::pin(future);
    poll_fn(|context| {
        RUNS.set(RUNS.get().wrapping_add(1));
        let polled = future.as_mut().poll(context);
        if polled.is_pending() && !coop::has_budget_remaining() {
            // The runtime has taken it out of the queue until it has looked for events.
            YIELDED.set(true);
        }
        polled
    })
    .await
}

/// How often tasks of this thread have run.
pub(super) fn runs() -> u64 {
    RUNS.get()
}

/// Whether a task had to make room for others since this was last asked, and waits for its turn outside the queue.
pub(super) fn take_yielded() -> bool {
    YIELDED.take()
}
