//! Connection ids that carry their worker, for the filter in [`crate::engine::steer`].
//!
//! RFC 9000, 5.1 asks that nobody can tell by two ids that they are of one connection. All that these tell is the
//! worker, by one byte that is otherwise random; with two workers that is one bit.
#![forbid(unsafe_code)]

use std::time::Duration;

use quinn::{ConnectionId, ConnectionIdGenerator};
use quinn_proto::InvalidCid;

/// Bytes of an id: as many as keep guessing hopeless, few beside a packet.
const ID_BYTES: usize = 8;

/// Makes the ids of one worker.
#[derive(Debug)]
pub(super) struct WorkerIds {
    worker: u8,
    workers: u16,
}

impl WorkerIds {
    /// For `worker` of `workers`.
    ///
    /// # Panics
    /// If there is no such worker, or more than a byte can tell apart.
    pub(super) fn new(worker: usize, workers: usize) -> Self {
        assert!(worker < workers && workers <= crate::engine::steer::STEERED_MAX, "{worker} of {workers}");
        Self { worker: worker as u8, workers: workers as u16 }
    }

    /// The byte nearest to `random` that means this worker.
    fn first_byte(&self, random: u8) -> u8 {
        let first = u16::from(random) / self.workers * self.workers + u16::from(self.worker);
        u8::try_from(first).unwrap_or_else(|_| (first - self.workers) as u8)
    }
}

impl ConnectionIdGenerator for WorkerIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id = [0; ID_BYTES];
        getrandom::fill(&mut id).expect("the kernel gives randomness");
        id[0] = self.first_byte(id[0]);
        ConnectionId::new(&id)
    }

    /// An id of another worker: should a datagram ever come here that is not for us, its connection is not unknown, and
    /// must not be ended by a stateless reset.
    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        let is_ours =
            id.first().is_some_and(|first| u16::from(*first) % self.workers == u16::from(self.worker));
        if is_ours { Ok(()) } else { Err(InvalidCid) }
    }

    fn cid_len(&self) -> usize {
        ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_id_means_its_worker_and_no_two_are_the_same() {
        for workers in [1, 2, 3, 7, 100, 255, 256] {
            let mut seen = HashSet::new();
            for worker in [0, workers / 2, workers - 1] {
                let mut ids = WorkerIds::new(worker, workers);
                for _ in 0..500 {
                    let id = ids.generate_cid();
                    assert_eq!(id.len(), ids.cid_len());
                    assert_eq!(usize::from(id[0]) % workers, worker, "{workers} workers");
                    ids.validate(&id).expect("ours");
                    seen.insert(id);
                }
                for random in 0..=u8::MAX {
                    assert_eq!(usize::from(ids.first_byte(random)) % workers, worker);
                }
            }
            assert!(seen.len() >= 500, "random behind the first byte");
        }
    }

    #[test]
    fn an_id_of_another_worker_is_not_ours() {
        let id = WorkerIds::new(1, 3).generate_cid();
        WorkerIds::new(2, 3).validate(&id).expect_err("of worker 1");
        WorkerIds::new(1, 3).validate(&ConnectionId::new(&[])).expect_err("empty");
    }
}
