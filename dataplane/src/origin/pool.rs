//! The connections to one origin: how many, which are free, and which may be used again.
//!
//! Our own and not hyper-util's, because we must know whether a connection was used before (only then is a silent death
//! the server's keep-alive running out, and worth one more try), must bound how many are open, and must close one at
//! once when its download is given up. One pool per worker, so nothing here locks.
//!
//! A free connection is used before a new one is opened, hence open connections, lent and idle together, never exceed
//! `connections_max`. The newest idle one goes first: the others age and are closed.
#![forbid(unsafe_code)]

use super::OriginLimits;
use super::body::Outgoing;
use super::dial::{DialError, Dialer};
use super::error::{OriginError, Stage};
use crate::engine::task;
use hyper::client::conn::http1::{self, SendRequest};
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

/// Connections to one host.
#[derive(Debug)]
pub(super) struct Pool {
    dialer: Dialer,
    uri: http::Uri,
    host: Rc<str>,
    limits: OriginLimits,
    /// Oldest first.
    idle: RefCell<Vec<(Link, Instant)>>,
    permits: Arc<Semaphore>,
}

/// One open connection. Dropping it closes it.
#[derive(Debug)]
struct Link {
    sender: SendRequest<Outgoing>,
    task: AbortHandle,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A connection in use. Dropped, it is closed; `give_back` keeps it for the next request.
#[derive(Debug)]
pub(super) struct Lent {
    link: Link,
    home: Weak<Pool>,
    was_used: bool,
    _permit: OwnedSemaphorePermit,
}

impl Pool {
    pub(super) fn new(dialer: Dialer, uri: http::Uri, host: Rc<str>, limits: OriginLimits) -> Rc<Self> {
        let permits = Arc::new(Semaphore::new(limits.connections_max.max(1) as usize));
        Rc::new(Self { dialer, uri, host, limits, idle: RefCell::default(), permits })
    }

    /// A connection ready for a request; a new one if `fresh`, since then every idle one is under suspicion.
    ///
    /// # Errors
    /// `TimedOut` (queue, connect) or `Unreachable`.
    pub(super) async fn lend(self: &Rc<Self>, fresh: bool) -> Result<Lent, OriginError> {
        let permit = match timeout(self.limits.queue, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(permit) => permit.expect("the semaphore is never closed"),
            Err(_) => return Err(self.timed_out(Stage::Queue, self.limits.queue)),
        };
        if fresh {
            self.idle.borrow_mut().clear();
        }
        let lent = |link, was_used| Lent { link, home: Rc::downgrade(self), was_used, _permit: permit };
        match self.take_idle().await {
            Some(link) => Ok(lent(link, true)),
            None => Ok(lent(self.open().await?, false)),
        }
    }

    async fn take_idle(&self) -> Option<Link> {
        loop {
            let (mut link, since) = self.idle.borrow_mut().pop()?;
            if since.elapsed() > self.limits.keep_alive {
                // The others are older still.
                self.idle.borrow_mut().clear();
                return None;
            }
            // Hyper says ready once it has seen the last answer's end and the server left the connection open.
            if matches!(timeout(self.limits.connect, link.sender.ready()).await, Ok(Ok(()))) {
                return Some(link);
            }
        }
    }

    async fn open(&self) -> Result<Link, OriginError> {
        let unreachable = |source| OriginError::Unreachable { host: self.host.as_ref().into(), source };
        let stream = self.dialer.dial(self.uri.clone()).await.map_err(|error| match error {
            DialError::TimedOut => self.timed_out(Stage::Connect, self.limits.connect),
            DialError::Failed(source) => unreachable(source),
        })?;
        let (sender, connection) =
            http1::handshake(stream).await.map_err(|error| unreachable(error.into()))?;
        // Its errors come back through the request or the body that they hit.
        let task = tokio::spawn(task::counted(async move { drop(connection.await) })).abort_handle();
        let mut link = Link { sender, task };
        link.sender.ready().await.map_err(|error| unreachable(error.into()))?;
        Ok(link)
    }

    fn keep(&self, link: Link) {
        let now = Instant::now();
        let mut idle = self.idle.borrow_mut();
        idle.retain(|(link, since)| !link.sender.is_closed() && now - *since <= self.limits.keep_alive);
        if idle.len() >= self.limits.idle_max as usize && !idle.is_empty() {
            idle.remove(0);
        }
        if self.limits.idle_max > 0 {
            idle.push((link, now));
        }
    }

    /// Idle connections, for status and tests.
    pub(super) fn idle_count(&self) -> usize {
        self.idle.borrow().len()
    }

    /// Connections in use.
    pub(super) fn lent_count(&self) -> usize {
        self.limits.connections_max.max(1) as usize - self.permits.available_permits()
    }

    pub(super) fn timed_out(&self, stage: Stage, limit: std::time::Duration) -> OriginError {
        OriginError::TimedOut { host: self.host.as_ref().into(), stage, limit }
    }
}

impl Lent {
    /// Whether an answer came over it before.
    pub(super) fn was_used(&self) -> bool {
        self.was_used
    }

    pub(super) fn sender(&mut self) -> &mut SendRequest<Outgoing> {
        &mut self.link.sender
    }

    pub(super) fn give_back(self) {
        let Self { link, home, .. } = self;
        if let Some(pool) = home.upgrade() {
            pool.keep(link);
        }
    }
}
