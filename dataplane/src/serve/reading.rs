//! A piece of an object on its way from a drive into memory.
//!
//! The read runs in a task of its own, which keeps lease and turn until the drive has answered: whoever wants the piece may
//! give up before. Its blocks are verified when they are asked for, just before they are sent, while the processor still
//! has them at hand for the copy.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::Worker;
use crate::arena::{Lease, LeaseMut, UNIT_BYTES};
use crate::engine::task;
use crate::metrics::Counter;
use crate::range::{BLOCK_BYTES, Piece};
use crate::store::Slot;
use crate::sums::BlockSums;
use crate::table::ObjectEntry;

/// How long a drive may take for one read.
pub(super) const DRIVE_PATIENCE: Duration = Duration::from_secs(5);

/// The blocks that a piece touches: where in its extent they begin and end, bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Bounds {
    /// Of a piece of `entry`; `None` if the object has no such extent.
    pub(super) fn of(entry: &ObjectEntry, piece: &Piece) -> Option<Self> {
        let extent = entry.grid.extent_range(piece.extent, entry.facts.size)?;
        let blocks = piece.blocks();
        let end = ((blocks.end * BLOCK_BYTES) as usize).min(extent.len() as usize);
        Some(Self { start: (blocks.start * BLOCK_BYTES) as usize, end })
    }

    /// Bytes between them.
    pub(super) fn len(self) -> usize {
        self.end - self.start
    }

    /// Bytes that a drive is asked for: whole units.
    pub(super) fn padded_len(self) -> usize {
        self.len().next_multiple_of(UNIT_BYTES)
    }
}

/// What is read: from where, and by what it is verified.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) piece: Piece,
    pub(super) bounds: Bounds,
    pub(super) slot: Slot,
    pub(super) sums: BlockSums,
    /// Whether the extent belongs in RAM.
    pub(super) is_frequent: bool,
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Reading {
    /// The byte of the object with which the piece begins.
    pub(super) at: u64,
    pub(super) wanted: Wanted,
    /// Until when the drive has to answer.
    until: Instant,
    done: JoinHandle<(io::Result<()>, LeaseMut)>,
}

impl Reading {
    /// Asks the drive: `file`, at the `offset` of the slot, into `lease`. `turn` is the right to.
    pub(super) fn begin(
        worker: &Worker,
        at: u64,
        wanted: Wanted,
        (file, offset): (RawFd, u64),
        lease: LeaseMut,
        turn: OwnedSemaphorePermit,
    ) -> Self {
        let len = wanted.bounds.padded_len();
        worker.counters.bump(Counter::DriveReads, 1);
        worker.counters.bump(Counter::DriveReadBytes, len as u64);
        let (engine, start) = (worker.engine.clone(), wanted.bounds.start as u64);
        let done = task::spawn(async move {
            let done = engine.read_at(file, offset + start, lease, len).await;
            drop(turn);
            done
        });
        Self { at, wanted, until: Instant::now() + DRIVE_PATIENCE, done }
    }

    /// What has come, not verified; `None` if that is nothing that can be used. A drive that does not answer, or fails, is
    /// noted.
    pub(super) async fn wait(self, worker: &Worker, entry: &Arc<ObjectEntry>) -> (Wanted, Option<Lease>) {
        let Self { wanted, until, done, .. } = self;
        let (node, drive, extent) = (&worker.node, wanted.slot.drive, wanted.piece.extent);
        let Ok(Ok((read, lease))) = timeout_at(until, done).await else {
            tracing::warn!(object = %entry.name(), extent, "drive read did not end in time");
            node.note_drive_read(drive, false);
            return (wanted, None);
        };
        node.note_drive_read(drive, read.is_ok());
        if let Err(error) = &read {
            tracing::warn!(%error, object = %entry.name(), extent, "drive read failed");
        }
        // A slot that was reused while we read has somebody else's bytes: no need to call them bad.
        let is_usable = read.is_ok() && node.drives.holds(wanted.slot);
        (wanted, is_usable.then(|| lease.freeze()))
    }
}
