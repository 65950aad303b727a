//! One extent on its way from the origin, and those who wait for it.
//!
//! A fill is a watermark that moves and a place to wait at. Who brings the bytes, and what becomes of them, is
//! decided elsewhere.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{OnceLock, Weak};

use tokio::sync::Notify;

use crate::arena::Lease;

/// Bringing one absent extent from the origin, once for all who wait.
#[derive(Debug)]
pub struct Fill {
    /// Which extent of its object.
    pub extent: u32,
    /// Its bytes.
    pub len: u32,
    /// The run it belongs to; who holds it keeps the run going.
    pub run: Weak<()>,
    lease: OnceLock<Lease>,
    failure: OnceLock<FillFailure>,
    moved: Notify,
    waiting: AtomicUsize,
}

/// Why a fill ended without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FillFailure {
    /// The origin has another version now.
    #[error("the object was replaced at the origin while it was being read")]
    Gone,
    /// The origin failed beyond the retries.
    #[error("the origin did not deliver the object")]
    Origin,
    /// The origin said no, with this status.
    #[error("the origin refused the object with status {0}")]
    Refused(u16),
    /// No memory came back in time.
    #[error("no memory was free to receive the object")]
    Memory,
    /// The task that filled was lost.
    #[error("the download was lost")]
    Lost,
}

impl Fill {
    pub(super) fn new(extent: u32, len: u32, run: Weak<()>) -> Self {
        Self {
            extent,
            len,
            run,
            lease: OnceLock::new(),
            failure: OnceLock::new(),
            moved: Notify::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// The writer has memory: readers can follow its watermark.
    pub fn begin(&self, lease: Lease) {
        assert!(self.lease.set(lease).is_ok(), "a fill begins once");
        self.advanced();
    }

    /// Whether somebody waits for it now.
    pub fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// More bytes are there.
    pub fn advanced(&self) {
        // Pairs with the fence in `wait_for`: either we see the waiter, or it sees the moved watermark.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.moved.notify_waiters();
        }
    }

    /// It ends without its bytes; the first reason stands.
    pub fn fail(&self, failure: FillFailure) {
        let _ = self.failure.set(failure);
        self.moved.notify_waiters();
    }

    /// Waits until at least `wanted` bytes (at most [`Fill::len`]) of the extent are there.
    ///
    /// # Errors
    /// The fill failed before.
    pub async fn wait_for(&self, wanted: usize) -> Result<Lease, FillFailure> {
        debug_assert!(wanted <= self.len as usize);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        fence(Ordering::SeqCst);
        loop {
            let moved = self.moved.notified();
            if let Some(lease) = self.lease.get()
                && lease.filled() >= wanted
            {
                return Ok(lease.clone());
            }
            if let Some(failure) = self.failure.get() {
                return Err(*failure);
            }
            moved.await;
        }
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
