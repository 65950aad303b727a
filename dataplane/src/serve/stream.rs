//! The bytes of a range, slice by slice: from memory, from a drive, or behind a fill's watermark.
//!
//! A stream holds an offset and, while its reader pauses, no lease. It reads every block it takes from a drive
//! against its sum before the slice exists, and one in some thousand of those it takes from memory: a block
//! that is wrong is as good as absent.
//!
//! Of a drive it asks for what comes next while it waits: one reader alone keeps it at depth. What that holds is bounded for
//! each stream, and for all together by what nobody else needs.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::timeout;

use super::Worker;
use super::reading::{Bounds, DRIVE_PATIENCE, Reading, Wanted};
use crate::arena::{Lease, Purpose};
use crate::engine::Slice;
use crate::fill::{Claim, Interest, RUN_BYTES_MAX, Right};
use crate::http1::CacheOutcome;
use crate::metrics::{Counter, Where};
use crate::origin::Origin;
use crate::peer::{self, Reach};
use crate::range::{BLOCK_BYTES, ByteRange, Piece};
use crate::store::Slot;
use crate::sums::BlockSums;
use crate::table::{Fill, FillFailure, ObjectEntry, Survey, Whereabouts};

/// Bytes of a fill that are worth a send of their own, once the first have left.
const FOLLOW_BYTES: usize = 32 << 10;
/// One RAM hit in so many is verified.
pub(super) const RAM_SAMPLE: u64 = 1024;
/// How often a lost fill is begun again for one stream.
const LOST_MAX: u32 = 8;
/// What a stream asks of a drive beyond the piece that it waits for, at most: so many pieces, and bytes. It begins with one
/// piece, and twice as much with each that has come; whose reader pauses begins with none.
const AHEAD_READS: usize = 16;
const AHEAD_BYTES: usize = 4 << 20;
/// Why a stream cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamFailure {
    /// The fill said so.
    Fill(FillFailure),
    /// Nothing came within the request's deadline.
    Deadline,
    /// No memory came back within it.
    Memory,
}

/// A range of one version on its way out.
#[derive(Debug)]
pub(crate) struct ObjectStream {
    worker: Rc<Worker>,
    entry: Arc<ObjectEntry>,
    range: ByteRange,
    cursor: u64,
    /// Reads of what comes next, in order and without a gap.
    reads: VecDeque<Reading>,
    /// Bytes that they may have.
    ahead_bytes: usize,
    interest: Option<Interest>,
    ahead: Option<Interest>,
    lost: u32,
    reach: Reach,
    /// Keeps it: should the accelerator be removed meanwhile, what is under way needs it to its end.
    _origin: Option<Rc<Origin>>,
}

impl ObjectStream {
    pub(crate) fn new(worker: &Rc<Worker>, entry: Arc<ObjectEntry>, range: ByteRange, reach: Reach) -> Self {
        let (worker, origin) = (Rc::clone(worker), worker.origin(entry.key.accelerator));
        let cursor = range.start();
        let reads = VecDeque::new();
        Self {
            ahead_bytes: entry.grid.extent_bytes() as usize,
            worker,
            entry,
            range,
            cursor,
            reads,
            interest: None,
            ahead: None,
            lost: 0,
            reach,
            _origin: origin,
        }
    }

    /// Where the bytes of the range are now, as the client is told.
    pub(crate) fn outcome(&self) -> CacheOutcome {
        let grid = self.entry.grid;
        let survey = self.entry.survey(grid.extent_of(self.range.start()), grid.extent_of(self.range.last()));
        match survey {
            Survey::Ram => CacheOutcome::Ram,
            Survey::Drive => CacheOutcome::Drive,
            Survey::Nothing => CacheOutcome::Miss,
            Survey::Some => CacheOutcome::Partial,
        }
    }

    pub(crate) fn range(&self) -> ByteRange {
        self.range
    }

    /// First byte that has not been sliced.
    pub(crate) fn position(&self) -> u64 {
        self.cursor
    }

    /// Whether all of the range has been sliced.
    pub(crate) fn is_at_end(&self) -> bool {
        self.cursor == self.range.end()
    }

    /// Largest slice there can be, bytes.
    pub(crate) fn extent_bytes(&self) -> usize {
        self.entry.grid.extent_bytes() as usize
    }

    /// Goes back (or forth) to a byte of the range: what was sliced behind it has not left.
    pub(crate) fn seek(&mut self, offset: u64) {
        assert!((self.range.start()..=self.range.end()).contains(&offset), "inside the range");
        if self.cursor != offset {
            self.rest();
        }
        self.cursor = offset;
    }

    /// The reader pauses: nothing is held for it.
    pub(crate) fn rest(&mut self) {
        self.reads.clear();
        // What a slow reader does not come to is read for nothing, every time.
        self.ahead_bytes = 0;
    }

    /// The next slice; `None` at the end of the range.
    pub(crate) async fn next(&mut self) -> Result<Option<Slice>, StreamFailure> {
        loop {
            if let Some(reading) = self.reads.pop_front() {
                if reading.at != self.cursor {
                    self.rest();
                } else if let Some(slice) = self.finish(reading).await {
                    return Ok(Some(slice));
                }
                continue;
            }
            let Some(piece) = self.piece() else { return Ok(None) };
            let fill = match self.entry.locate(piece.extent) {
                Whereabouts::Ram(lease) => match self.take_from_ram(lease, &piece) {
                    Some(slice) => return Ok(Some(slice)),
                    None => continue,
                },
                Whereabouts::Drive(slot, sums, is_frequent) => {
                    if let Some(reading) = self.ask_drive(piece, slot, sums, is_frequent).await?
                        && let Some(slice) = self.finish(reading).await
                    {
                        return Ok(Some(slice));
                    }
                    continue;
                }
                Whereabouts::Filling(fill) => fill,
                Whereabouts::Absent => {
                    self.begin(piece.extent);
                    continue;
                }
            };
            match self.follow(&fill, &piece).await {
                Ok(slice) => return Ok(Some(slice)),
                // The run ended early for want of readers just when we came.
                Err(StreamFailure::Fill(FillFailure::Lost)) if self.lost < LOST_MAX => self.lost += 1,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The next slice, if it is in memory.
    pub(crate) fn next_in_ram(&mut self) -> Option<Slice> {
        let piece = self.piece()?;
        match self.entry.peek(piece.extent) {
            Whereabouts::Ram(lease) => {
                lease.touch();
                self.take_from_ram(lease, &piece)
            }
            _ => None,
        }
    }

    fn piece(&self) -> Option<Piece> {
        self.piece_at(self.cursor)
    }

    fn piece_at(&self, offset: u64) -> Option<Piece> {
        self.entry.grid.pieces(ByteRange::new(offset, self.range.end())?).next()
    }

    fn advance(&mut self, slice: Slice) -> Slice {
        self.cursor += slice.len() as u64;
        slice
    }

    fn take_from_ram(&mut self, lease: Lease, piece: &Piece) -> Option<Slice> {
        if self.worker.is_sampled() && !self.is_right_in_ram(&lease, piece) {
            self.entry.lose_extent(piece.extent);
            return None;
        }
        let slice = Slice::new(lease, piece.within.start as usize..piece.within.end as usize);
        Some(self.advance(slice))
    }

    /// Whether the blocks that a piece touches are what they were. No more than these: who asks for little would wait
    /// for a whole extent, and everybody behind it.
    fn is_right_in_ram(&self, lease: &Lease, piece: &Piece) -> bool {
        let Some(sums) = self.entry.sums(piece.extent) else { return true };
        let Some(Bounds { start, end }) = Bounds::of(&self.entry, piece) else { return false };
        self.check(lease.bytes(start..end), &sums, piece.extent, piece.blocks().start, Where::Ram)
    }

    fn check(&self, bytes: &[u8], sums: &BlockSums, extent: u32, first: u32, place: Where) -> bool {
        let counters = &self.worker.counters;
        match sums.first_bad(bytes, self.entry.version, extent, first) {
            None => {
                counters
                    .bump(Counter::BlocksVerified(place), bytes.len().div_ceil(BLOCK_BYTES as usize) as u64);
                true
            }
            Some(block) => {
                counters.bump(Counter::BlocksBad(place), 1);
                tracing::warn!(object = %self.entry.name(), extent, block, %place, "bad block dropped");
                false
            }
        }
    }

    /// Asks a drive for a piece; `None` if it does not have it any more, or does not answer.
    async fn ask_drive(
        &mut self,
        piece: Piece,
        slot: Slot,
        sums: BlockSums,
        is_frequent: bool,
    ) -> Result<Option<Reading>, StreamFailure> {
        let node = Arc::clone(&self.worker.node);
        let bounds = Bounds::of(&self.entry, &piece).expect("a piece is inside the object");
        // A drive that hangs keeps what its reads hold; it must not be all that there is for the others.
        let turn = timeout(DRIVE_PATIENCE, node.drive_turn(slot.drive)).await;
        let (Some(place), Ok(turn)) = (node.place(slot), turn) else {
            self.entry.lose_slot(piece.extent, slot);
            return Ok(None);
        };
        let deadline = node.limits.request_deadline;
        let lease = node.arena.grant_within(Purpose::Read, bounds.padded_len(), deadline).await;
        let lease = lease.map_err(|_| StreamFailure::Memory)?;
        let wanted = Wanted { piece, bounds, slot, sums, is_frequent };
        Ok(Some(Reading::begin(&self.worker, self.cursor, wanted, place, lease, turn)))
    }

    /// Asks for what comes behind `offset`, while it is on a drive too, and memory is there that nobody waits for.
    fn ask_ahead(&mut self, offset: u64) {
        let end_of = |reading: &Reading| reading.at + reading.wanted.piece.within.len() as u64;
        let mut at = self.reads.back().map_or(offset, end_of);
        if at == self.range.end() {
            return;
        }
        let node = Arc::clone(&self.worker.node);
        let mut bytes: usize = self.reads.iter().map(|reading| reading.wanted.bounds.padded_len()).sum();
        while self.reads.len() < AHEAD_READS
            && let Some(piece) = self.piece_at(at)
            && let Whereabouts::Drive(slot, ..) = self.entry.peek(piece.extent)
            && let Some(bounds) = Bounds::of(&self.entry, &piece)
            && bytes + bounds.padded_len() <= self.ahead_bytes
            && let Some(turn) = node.spare_drive_turn(slot.drive)
            && let Some(lease) = node.arena.grant_spare(Purpose::Read, bounds.padded_len())
            // Only now: it counts as a use.
            && let Whereabouts::Drive(slot, sums, is_frequent) = self.entry.locate(piece.extent)
            && let Some(place) = node.place(slot)
        {
            bytes += bounds.padded_len();
            let next = at + piece.within.len() as u64;
            let wanted = Wanted { piece, bounds, slot, sums, is_frequent };
            self.reads.push_back(Reading::begin(&self.worker, at, wanted, place, lease, turn));
            at = next;
        }
    }

    /// The piece of a read, if it came and is right. What is not is as good as absent.
    async fn finish(&mut self, reading: Reading) -> Option<Slice> {
        self.ask_ahead(reading.at + reading.wanted.piece.within.len() as u64);
        let (wanted, lease) = reading.wait(&self.worker, &self.entry).await;
        let Wanted { piece, bounds, slot, sums, is_frequent } = wanted;
        let right = lease.filter(|lease| {
            let bytes = lease.bytes(0..bounds.len());
            self.check(bytes, &sums, piece.extent, piece.blocks().start, Where::Drive)
        });
        let Some(lease) = right else {
            self.entry.lose_slot(piece.extent, slot);
            return None;
        };
        let extent = self.entry.grid.extent_range(piece.extent, self.entry.facts.size);
        if is_frequent && extent.is_some_and(|extent| extent.len() == bounds.len() as u64) {
            self.entry.promote(piece.extent, &lease);
        }
        self.ahead_bytes = (2 * self.ahead_bytes).clamp(self.extent_bytes(), AHEAD_BYTES);
        let within = piece.within.start as usize - bounds.start..piece.within.end as usize - bounds.start;
        Some(self.advance(Slice::new(lease, within)))
    }

    fn begin(&mut self, extent: u32) {
        // An extent of more than a page is kept in pieces, and downloaded as one.
        let pieces = self.worker.served().at(self.entry.key.accelerator).map_or(1, |bound| bound.pieces());
        let last = self.entry.grid.extent_of(self.range.last()) / pieces * pieces + (pieces - 1);
        let last = peer::end_of_run(&self.worker, self.entry.grid, extent, last);
        let claim = Claim::make(&self.entry, extent / pieces * pieces, last)
            .or_else(|| Claim::make(&self.entry, extent, last));
        if let Some(claim) = claim {
            self.interest = Some(claim.start(&self.worker, &self.entry, None, self.reach));
        }
    }

    async fn follow(&mut self, fill: &Arc<Fill>, piece: &Piece) -> Result<Slice, StreamFailure> {
        if self.interest.is_none() {
            self.worker.counters.bump(Counter::FillsJoined, 1);
        }
        // Before the wait: the run must not end while the first bytes are on their way to us.
        self.interest = Interest::join(fill).or(self.interest.take());
        let (start, end) = (piece.within.start as usize, piece.within.end as usize);
        let wanted =
            if self.cursor == self.range.start() { start + 1 } else { end.min(start + FOLLOW_BYTES) };
        let deadline = self.worker.node.limits.request_deadline;
        let lease = match timeout(deadline, fill.wait_for(wanted)).await {
            Ok(waited) => waited.map_err(StreamFailure::Fill)?,
            Err(_) => return Err(StreamFailure::Deadline),
        };
        self.begin_ahead(piece.extent);
        let have = lease.filled().min(end);
        Ok(self.advance(Slice::new(lease, start..have)))
    }

    /// When half of a run's length is left before the next absent extent, the next run is begun.
    fn begin_ahead(&mut self, extent: u32) {
        let ahead = (RUN_BYTES_MAX / 2 / u64::from(self.entry.grid.extent_bytes())).max(1) as u32;
        let last = self.entry.grid.extent_of(self.range.last());
        let next = extent.saturating_add(ahead);
        // What nobody waits for yet takes no right to fill from those who wait.
        if next <= last
            && Right::all(&self.worker, self.reach).available_permits() > 0
            && matches!(self.entry.peek(next), Whereabouts::Absent)
            && let Some(claim) =
                Claim::make(&self.entry, next, peer::end_of_run(&self.worker, self.entry.grid, next, last))
        {
            // Held until the stream gets there: without it the run would end at the edge of an extent.
            self.ahead = Some(claim.start(&self.worker, &self.entry, None, self.reach));
        }
    }
}
