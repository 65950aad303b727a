//! Where things lie on a drive, and who may still read them.
//!
//! The drive is a ring of segments. One of them is open and grows at its end; when the next body does not fit,
//! the ring turns by one: the oldest segment becomes the open one and what it held is gone. Nothing is ever
//! moved or freed singly, so the space in use is bounded by the number of segments and nothing can leak.
//!
//! Readers hold no lock. Each segment has a `sequence`, and a [`Slot`](super::Slot) remembers the one under
//! which it was written. Before the first byte of a reclaimed segment is overwritten its sequence is raised;
//! a reader asks `holds` before *and after* its read. If both answers are yes, the raise had not happened by the
//! second question, so no overwrite had been submitted while the read was under way, and the bytes are those of
//! the slot. If an answer is no, the read is a miss.
//!
//! A sequence is used for one filling of one segment of one drive, ever. Within a run the next one is one higher;
//! between runs the superblock keeps them apart: a number is used only after both copies with a floor *above* it
//! are durable, and a run begins at the floor that it finds. So neither a crash nor a lost superblock copy can make two
//! fillings share a number. 32 bits do not wrap: at 64 MiB a segment they last for 256 EiB of writes, and when
//! they end the drive takes no more writes until it is formatted anew. 0 stands for "never filled in this run".
//!
//! This file thinks; it neither reads nor writes.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const MIB: u64 = 1 << 20;

/// Alignment of everything on a drive, in bytes: the largest logical block size in use.
pub const UNIT_BYTES: u32 = 4096;
/// Where the first segment begins. The space before it holds the superblocks and zeros, so that any other
/// owner's signature found there is really another owner's.
pub(super) const DATA_OFFSET: u64 = MIB;
/// The smallest drive, in bytes.
pub const CAPACITY_MIN: u64 = 16 * MIB;
/// The largest drive, in bytes: 4 Mi segments, whose sequences take 16 MiB of memory.
pub const CAPACITY_MAX: u64 = (SEGMENT_BYTES_MAX as u64) << 22;

const SEGMENT_BYTES_MAX: u32 = 64 << 20;
const SEGMENT_BYTES_MIN: u32 = 1 << 20;
// Turning the ring drops one part in eight at the most, and eight segments leave the writes in flight room
// to finish before their segment comes round again.
const SEGMENTS_MIN: u64 = 8;

const _: () = assert!(DATA_OFFSET.is_multiple_of(UNIT_BYTES as u64));
const _: () = assert!((CAPACITY_MIN - DATA_OFFSET) / SEGMENTS_MIN >= SEGMENT_BYTES_MIN as u64);

/// How a drive is divided. Every value of this type fits its drive.
///
/// ```text
///   0        8 KiB        1 MiB                                              capacity
///   | superblocks | zeros | segment 0 | segment 1 | … | segment n-1 | rest < 1 segment |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    capacity: u64,
    segment_bytes: u32,
    segments: u32,
}

/// Why a drive cannot be divided so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// Below [`CAPACITY_MIN`].
    #[error("{capacity} bytes are too few: a drive has at least {CAPACITY_MIN} bytes (16 MiB)")]
    TooSmall {
        /// Bytes.
        capacity: u64,
    },
    /// Above [`CAPACITY_MAX`].
    #[error(
        "{capacity} bytes are too many: a drive has at most {CAPACITY_MAX} bytes (256 TiB); give a smaller size"
    )]
    TooLarge {
        /// Bytes.
        capacity: u64,
    },
    /// Numbers read from a drive contradict each other.
    #[error(
        "{segments} segments of {segment_bytes} bytes from byte {data_offset} do not fit a drive of {capacity} bytes"
    )]
    Misfit {
        /// Bytes of the drive.
        capacity: u64,
        /// Where the first segment begins, bytes.
        data_offset: u64,
        /// Bytes of a segment.
        segment_bytes: u32,
        /// How many.
        segments: u32,
    },
}

impl Geometry {
    /// Divides a drive of `capacity` bytes: segments of 64 MiB, or of the largest power of two
    /// of which there are at least eight.
    ///
    /// # Errors
    /// Below 16 MiB or above 256 TiB.
    pub fn for_capacity(capacity: u64) -> Result<Self, GeometryError> {
        if capacity < CAPACITY_MIN {
            return Err(GeometryError::TooSmall { capacity });
        }
        if capacity > CAPACITY_MAX {
            return Err(GeometryError::TooLarge { capacity });
        }
        let capacity = capacity - capacity % u64::from(UNIT_BYTES);
        let usable = capacity - DATA_OFFSET;
        let eighth = usable / SEGMENTS_MIN;
        let segment_bytes = (1 << eighth.ilog2()).min(u64::from(SEGMENT_BYTES_MAX));
        let segments = usable / segment_bytes;
        Ok(Self {
            capacity,
            segment_bytes: u32::try_from(segment_bytes).expect("at most 64 MiB"),
            segments: u32::try_from(segments).expect("at most 4 Mi"),
        })
    }

    /// Takes the numbers of a superblock, if they can be true.
    pub(super) fn of_drive(
        capacity: u64,
        data_offset: u64,
        segment_bytes: u32,
        segments: u32,
    ) -> Result<Self, GeometryError> {
        let fits = data_offset == DATA_OFFSET
            && capacity.is_multiple_of(u64::from(UNIT_BYTES))
            && (CAPACITY_MIN..=CAPACITY_MAX).contains(&capacity)
            && segment_bytes.is_power_of_two()
            && (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment_bytes)
            && u64::from(segments) >= SEGMENTS_MIN
            && data_offset + u64::from(segments) * u64::from(segment_bytes) <= capacity;
        if fits {
            Ok(Self { capacity, segment_bytes, segments })
        } else {
            Err(GeometryError::Misfit { capacity, data_offset, segment_bytes, segments })
        }
    }

    /// The smallest drive whose segments can hold a body of `body_bytes`, in bytes.
    pub fn capacity_for(body_bytes: u32) -> u64 {
        let segment = u64::from(body_bytes.next_multiple_of(UNIT_BYTES)).next_power_of_two();
        (DATA_OFFSET + SEGMENTS_MIN * segment).max(CAPACITY_MIN)
    }

    /// Bytes of the whole drive that are in our care, a multiple of 4,096.
    pub fn capacity(self) -> u64 {
        self.capacity
    }

    /// Where the first segment begins, in bytes.
    pub fn data_offset(self) -> u64 {
        DATA_OFFSET
    }

    /// Bytes of a segment: the largest body that the drive takes.
    pub fn segment_bytes(self) -> u32 {
        self.segment_bytes
    }

    /// How many segments there are, at least 8.
    pub fn segments(self) -> u32 {
        self.segments
    }

    /// Where a place in a segment lies on the drive, in bytes; `offset` is in units of 4 KiB.
    pub fn place(self, segment: u32, offset: u32) -> u64 {
        assert!(segment < self.segments && offset < self.segment_bytes / UNIT_BYTES);
        DATA_OFFSET
            + u64::from(segment) * u64::from(self.segment_bytes)
            + u64::from(offset) * u64::from(UNIT_BYTES)
    }
}

/// The sequence of every segment of a drive, read by all workers, raised by the drive's writer.
pub(super) struct Sequences(Box<[AtomicU32]>);

impl Sequences {
    pub(super) fn new(geometry: Geometry) -> Arc<Self> {
        Arc::new(Self((0..geometry.segments()).map(|_| AtomicU32::new(0)).collect()))
    }

    /// Whether the segment still holds what was written under `sequence`.
    pub(super) fn holds(&self, segment: u32, sequence: u32) -> bool {
        // SeqCst on both sides: the argument above leans on one order of raise, write, read and question, and
        // a look-up happens once or twice a drive read, where the cost cannot be seen.
        sequence != 0
            && self.0.get(segment as usize).is_some_and(|now| now.load(Ordering::SeqCst) == sequence)
    }

    fn raise(&self, segment: u32, sequence: u32) {
        let before = self.0[segment as usize].swap(sequence, Ordering::SeqCst);
        assert!(before < sequence, "segment {segment} had sequence {before} before {sequence}");
    }
}

/// A stretch of the open segment, given to one write. It goes back through [`Appender::settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) segment: u32,
    /// Units of 4 KiB from the start of the segment.
    pub(super) offset: u32,
    pub(super) sequence: u32,
}

/// What [`Appender::take`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Write here.
    Write(Spot),
    /// The next segment still has writes of its last filling in flight: ask again when one has ended.
    Wait,
    /// The sequences of this run are used up: reserve more, then ask again.
    Reserve,
}

/// Gives out the open segment from front to end, then turns the ring. Belongs to the drive's writer alone.
pub(super) struct Appender {
    geometry: Geometry,
    sequences: Arc<Sequences>,
    open: Option<Open>,
    /// Numbers that may be used; empty means ask for more.
    reserved: Range<u32>,
    /// Writes in flight, by segment; only segments that have any.
    in_flight: HashMap<u32, u32>,
    turned: u64,
}

struct Open {
    segment: u32,
    sequence: u32,
    /// Units of 4 KiB given out.
    used: u32,
}

impl Appender {
    pub(super) fn new(geometry: Geometry, sequences: Arc<Sequences>, reserved: Range<u32>) -> Self {
        Self { geometry, sequences, open: None, reserved, in_flight: HashMap::new(), turned: 0 }
    }

    /// Room for `bytes`, a multiple of 4,096, not 0 and at most a segment.
    pub(super) fn take(&mut self, bytes: u32) -> Step {
        assert!(bytes > 0 && bytes.is_multiple_of(UNIT_BYTES) && bytes <= self.geometry.segment_bytes());
        let (units, units_max) = (bytes / UNIT_BYTES, self.geometry.segment_bytes() / UNIT_BYTES);
        let next = match &mut self.open {
            Some(open) if units_max - open.used >= units => {
                let spot = Spot { segment: open.segment, offset: open.used, sequence: open.sequence };
                open.used += units;
                *self.in_flight.entry(spot.segment).or_default() += 1;
                return Step::Write(spot);
            }
            Some(open) => (open.segment + 1) % self.geometry.segments(),
            None => 0,
        };
        if self.in_flight.contains_key(&next) {
            return Step::Wait;
        }
        let Some(sequence) = self.reserved.next() else { return Step::Reserve };
        // From here on nobody can begin or end a read of what the segment held.
        self.sequences.raise(next, sequence);
        self.turned += 1;
        self.open = Some(Open { segment: next, sequence, used: units });
        self.in_flight.insert(next, 1);
        Step::Write(Spot { segment: next, offset: 0, sequence })
    }

    /// The write at `spot` has ended, well or badly, and everybody who waits for it knows.
    pub(super) fn settle(&mut self, spot: Spot) {
        let left = self.in_flight.get_mut(&spot.segment).expect("settled once per take");
        *left -= 1;
        if *left == 0 {
            self.in_flight.remove(&spot.segment);
        }
    }

    pub(super) fn extend(&mut self, reserved: Range<u32>) {
        assert!(self.reserved.is_empty() && self.reserved.end <= reserved.start);
        self.reserved = reserved;
    }

    /// The first number not used yet.
    pub(super) fn sequence_next(&self) -> u32 {
        self.reserved.start
    }

    /// How often a segment became the open one.
    pub(super) fn turned(&self) -> u64 {
        self.turned
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn small() -> (Geometry, Arc<Sequences>) {
        let geometry = Geometry::for_capacity(CAPACITY_MIN).unwrap();
        (geometry, Sequences::new(geometry))
    }

    fn write(step: Step) -> Spot {
        let Step::Write(spot) = step else { panic!("{step:?}") };
        spot
    }

    #[test]
    fn usual_sizes_divide_as_said() {
        let cases = [
            (16 * MIB, MIB, 15),
            (64 * MIB, 4 * MIB, 15),
            (1 << 30, 64 * MIB, 15),
            (1 << 40, 64 * MIB, 16_383),
        ];
        for (capacity, segment_bytes, segments) in cases {
            let geometry = Geometry::for_capacity(capacity).unwrap();
            assert_eq!(
                (u64::from(geometry.segment_bytes()), geometry.segments()),
                (segment_bytes, segments),
                "{capacity}"
            );
        }
    }

    #[test]
    fn too_small_and_too_large_are_refused_with_the_bound() {
        let small = Geometry::for_capacity(CAPACITY_MIN - 1).unwrap_err();
        assert!(small.to_string().contains("16777216"), "{small}");
        assert_eq!(
            Geometry::for_capacity(CAPACITY_MAX + 1),
            Err(GeometryError::TooLarge { capacity: CAPACITY_MAX + 1 })
        );
        assert!(Geometry::for_capacity(CAPACITY_MAX).is_ok());
    }

    #[test]
    fn the_open_segment_fills_up_and_the_ring_turns() {
        let (geometry, sequences) = small();
        let mut appender = Appender::new(geometry, Arc::clone(&sequences), 10..1000);
        let half = geometry.segment_bytes() / 2;
        let spots: Vec<Spot> = (0..4).map(|_| write(appender.take(half))).collect();
        assert_eq!(spots[0], Spot { segment: 0, offset: 0, sequence: 10 });
        assert_eq!(spots[1], Spot { segment: 0, offset: half / UNIT_BYTES, sequence: 10 });
        assert_eq!(spots[2], Spot { segment: 1, offset: 0, sequence: 11 });
        assert!(sequences.holds(0, 10) && sequences.holds(1, 11));
        assert!(!sequences.holds(2, 0), "a segment never filled holds nothing");
        assert_eq!(appender.sequence_next(), 12);
    }

    #[test]
    fn a_segment_with_writes_in_flight_is_not_reused() {
        let (geometry, sequences) = small();
        let mut appender = Appender::new(geometry, Arc::clone(&sequences), 1..1000);
        let whole = geometry.segment_bytes();
        let slow = write(appender.take(whole));
        for _ in 1..geometry.segments() {
            let spot = write(appender.take(whole));
            appender.settle(spot);
        }
        assert_eq!(appender.take(whole), Step::Wait);
        assert!(sequences.holds(slow.segment, slow.sequence), "still readable while we wait");
        appender.settle(slow);
        let next = write(appender.take(whole));
        assert_eq!(next.segment, slow.segment);
        assert!(!sequences.holds(slow.segment, slow.sequence));
    }

    #[test]
    fn reserved_sequences_are_never_passed() {
        let (geometry, sequences) = small();
        let mut appender = Appender::new(geometry, sequences, 1..3);
        for expected in 1..3 {
            assert_eq!(write(appender.take(geometry.segment_bytes())).sequence, expected);
        }
        assert_eq!(appender.take(UNIT_BYTES), Step::Reserve);
        appender.extend(3..4);
        assert_eq!(write(appender.take(UNIT_BYTES)).sequence, 3);
    }

    proptest! {
        #[test]
        fn odd_capacities_are_divided_without_overlap_or_overhang(capacity in CAPACITY_MIN..(1u64 << 42)) {
            let geometry = Geometry::for_capacity(capacity).unwrap();
            let last = geometry.place(geometry.segments() - 1, geometry.segment_bytes() / UNIT_BYTES - 1);
            prop_assert!(last + u64::from(UNIT_BYTES) <= geometry.capacity() && geometry.capacity() <= capacity);
            prop_assert!(geometry.segments() >= 8);
            prop_assert!(capacity - last - u64::from(UNIT_BYTES) < u64::from(geometry.segment_bytes()) + u64::from(UNIT_BYTES));
            let again = Geometry::of_drive(geometry.capacity(), geometry.data_offset(), geometry.segment_bytes(), geometry.segments());
            prop_assert_eq!(again, Ok(geometry));
        }

        #[test]
        fn a_drive_of_the_size_we_recommend_takes_the_body(body in 1u32..=64 << 20) {
            let geometry = Geometry::for_capacity(Geometry::capacity_for(body)).unwrap();
            prop_assert!(geometry.segment_bytes() >= body);
        }

        #[test]
        fn live_spots_never_overlap(sizes in prop::collection::vec(1u32..=256, 1..400)) {
            let (geometry, sequences) = small();
            let mut appender = Appender::new(geometry, Arc::clone(&sequences), 1..u32::MAX);
            let mut given: Vec<(Spot, u32)> = Vec::new();
            for units in sizes {
                let spot = write(appender.take(units * UNIT_BYTES));
                appender.settle(spot);
                given.push((spot, units));
            }
            let mut live: Vec<Range<u64>> = given
                .iter()
                .filter(|(spot, _)| sequences.holds(spot.segment, spot.sequence))
                .map(|(spot, units)| {
                    let start = geometry.place(spot.segment, spot.offset);
                    start..start + u64::from(units * UNIT_BYTES)
                })
                .collect();
            live.sort_by_key(|range| range.start);
            prop_assert!(live.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(live.last().unwrap().end <= geometry.capacity());
        }
    }
}
