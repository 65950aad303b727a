//! The connections to origins: how many, which are free, and which may be used again.
//!
//! Our own and not hyper-util's, because we must know whether a connection was used before (only then is a silent death
//! the server's keep-alive running out, and worth one more try), must bound how many are open, and must close one at
//! once when its download is given up. One set of connections per worker, so nothing here locks.
//!
//! The bound is one for all origins of a worker: a busy one uses what the others leave, and none has to be told when one
//! comes or goes. A free connection is used before a new one is opened, and the oldest free one of any origin makes room
//! for a new one, hence open connections, lent and idle together, never exceed it. The newest idle one goes first: the
//! others age and are closed.
#![forbid(unsafe_code)]

use super::OriginLimits;
use super::body::Outgoing;
use super::dial::{DialError, Dialer};
use super::error::{OriginError, Stage};
use crate::engine::task;
use hyper::client::conn::http1::{self, SendRequest};
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

/// The connections that one worker may have open to all of its origins together. Clones are the same.
#[derive(Clone, Debug)]
pub struct Connections(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    permits: Arc<Semaphore>,
    /// Oldest first.
    idle: RefCell<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    link: Link,
    since: Instant,
    /// Compared, and never followed.
    home: *const Pool,
}

/// Connections to one host.
#[derive(Debug)]
pub(super) struct Pool {
    dialer: Dialer,
    uri: http::Uri,
    host: Rc<str>,
    limits: OriginLimits,
    connections: Connections,
    lent: Cell<usize>,
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
    link: Option<Link>,
    home: Weak<Pool>,
    was_used: bool,
    _permit: OwnedSemaphorePermit,
}

impl Connections {
    /// At most so many, and at least 1.
    pub fn new(most: usize) -> Self {
        let most = most.max(1);
        Self(Rc::new(Shared { most, permits: Arc::new(Semaphore::new(most)), idle: RefCell::default() }))
    }

    /// Open connections: in use, and idle.
    pub fn open(&self) -> (usize, usize) {
        (self.0.most - self.0.permits.available_permits(), self.0.idle.borrow().len())
    }

    /// Closes the oldest idle ones until what is lent, the newest among it, has room.
    fn make_room(&self) {
        let (lent, idle) = self.open();
        drop(self.0.idle.borrow_mut().drain(..(lent + idle).saturating_sub(self.0.most).min(idle)));
    }

    fn take_idle(&self, home: *const Pool) -> Option<(Link, Instant)> {
        let mut idle = self.0.idle.borrow_mut();
        let newest = idle.iter().rposition(|one| one.home == home)?;
        let Idle { link, since, .. } = idle.remove(newest);
        Some((link, since))
    }

    fn keep(&self, link: Link, home: *const Pool, keep_alive: Duration) {
        let since = Instant::now();
        let mut idle = self.0.idle.borrow_mut();
        idle.retain(|one| !one.link.sender.is_closed() && since - one.since <= keep_alive);
        idle.push(Idle { link, since, home });
    }

    fn close_idle(&self, home: *const Pool) {
        self.0.idle.borrow_mut().retain(|one| one.home != home);
    }
}

impl Pool {
    pub(super) fn new(
        dialer: Dialer,
        uri: http::Uri,
        host: Rc<str>,
        limits: OriginLimits,
        connections: &Connections,
    ) -> Rc<Self> {
        Rc::new(Self { dialer, uri, host, limits, connections: connections.clone(), lent: Cell::new(0) })
    }

    /// A connection ready for a request; a new one if `fresh`, since then every idle one is under suspicion.
    ///
    /// # Errors
    /// `TimedOut` (queue, connect) or `Unreachable`.
    pub(super) async fn lend(self: &Rc<Self>, fresh: bool) -> Result<Lent, OriginError> {
        let permits = Arc::clone(&self.connections.0.permits);
        let permit = match timeout(self.limits.queue, permits.acquire_owned()).await {
            Ok(permit) => permit.expect("the semaphore is never closed"),
            Err(_) => return Err(self.timed_out(Stage::Queue, self.limits.queue)),
        };
        if fresh {
            self.connections.close_idle(self.name());
        }
        let (link, was_used) = if let Some(link) = self.take_idle().await {
            (link, true)
        } else {
            self.connections.make_room();
            (self.open().await?, false)
        };
        self.lent.set(self.lent.get() + 1);
        Ok(Lent { link: Some(link), home: Rc::downgrade(self), was_used, _permit: permit })
    }

    async fn take_idle(&self) -> Option<Link> {
        loop {
            let (mut link, since) = self.connections.take_idle(self.name())?;
            if since.elapsed() > self.limits.keep_alive {
                // The others are older still.
                self.connections.close_idle(self.name());
                return None;
            }
            // Hyper says ready once it has seen the last answer's end and the server left the connection open.
            if matches!(timeout(self.limits.connect, link.sender.ready()).await, Ok(Ok(()))) {
                return Some(link);
            }
        }
    }

    /// Which pool a connection belongs to.
    fn name(&self) -> *const Self {
        self
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

    /// Connections of this origin: in use, and idle.
    pub(super) fn connections(&self) -> (usize, usize) {
        let idle = self.connections.0.idle.borrow();
        (self.lent.get(), idle.iter().filter(|one| one.home == self.name()).count())
    }

    pub(super) fn timed_out(&self, stage: Stage, limit: Duration) -> OriginError {
        OriginError::TimedOut { host: self.host.as_ref().into(), stage, limit }
    }
}

impl Lent {
    /// Whether an answer came over it before.
    pub(super) fn was_used(&self) -> bool {
        self.was_used
    }

    pub(super) fn sender(&mut self) -> &mut SendRequest<Outgoing> {
        &mut self.link.as_mut().expect("until it is given back").sender
    }

    pub(super) fn give_back(mut self) {
        if let (Some(pool), Some(link)) = (self.home.upgrade(), self.link.take()) {
            pool.connections.keep(link, pool.name(), pool.limits.keep_alive);
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(pool) = self.home.upgrade() {
            pool.lent.set(pool.lent.get() - 1);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.connections.close_idle(self.name());
    }
}
