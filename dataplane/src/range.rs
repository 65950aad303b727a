//! Byte ranges, and the fixed grid that cuts an object into Extents and Blocks.
//!
//! Ranges are half-open and never empty, so `last()` is always there and no sum below can go under zero.
//! A `Range` header that cannot be read is no error: S3 answers such a request with the whole object, and a
//! cache must not be stricter than what stands behind it. This file knows nothing of sockets or headers
//! beyond the value of that one; who answers 416 and how is left to the caller.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;

/// Bytes of an object, from `start` up to and without `end`. Never empty.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

#[expect(clippy::len_without_is_empty, reason = "there is no empty ByteRange")]
impl ByteRange {
    /// `start..end`; `None` when that would be empty or turned round.
    pub fn new(start: u64, end: u64) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    /// All bytes of an object of `size` bytes; `None` for an empty object.
    pub fn whole(size: u64) -> Option<Self> {
        Self::new(0, size)
    }

    /// First byte.
    pub fn start(self) -> u64 {
        self.start
    }

    /// One past the last byte.
    pub fn end(self) -> u64 {
        self.end
    }

    /// The last byte, as `Content-Range` writes it.
    pub fn last(self) -> u64 {
        self.end - 1
    }

    /// Bytes in the range, at least 1.
    pub fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether the byte at `offset` belongs to the range.
    pub fn contains(self, offset: u64) -> bool {
        self.start <= offset && offset < self.end
    }

    /// What both have in common.
    pub fn intersect(self, other: Self) -> Option<Self> {
        Self::new(self.start.max(other.start), self.end.min(other.end))
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What a `Range` header asks for, before the size of the object is known. Numbers too large for 64 bits
/// stand as the largest one, which is beyond every object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RangeAsk {
    /// `bytes=first-last`, both included, `first <= last`.
    FirstLast {
        /// First byte asked for.
        first: u64,
        /// Last byte asked for; may lie beyond the object.
        last: u64,
    },
    /// `bytes=first-`.
    From {
        /// First byte asked for.
        first: u64,
    },
    /// `bytes=-length`: the last bytes of the object.
    Suffix {
        /// How many bytes; 0 can never be satisfied.
        length: u64,
    },
}

impl RangeAsk {
    /// The bytes meant in an object of `size` bytes.
    ///
    /// # Errors
    /// [`Unsatisfiable`] when no byte of the object is meant: it begins at or after the end, the suffix is 0
    /// bytes long, or the object is empty.
    pub fn resolve(self, size: u64) -> Result<ByteRange, Unsatisfiable> {
        let range = match self {
            // `last + 1` cannot overflow: after `min` it is at most `size`.
            Self::FirstLast { first, last } => match size.checked_sub(1) {
                Some(size_last) => ByteRange::new(first, last.min(size_last) + 1),
                None => None,
            },
            Self::From { first } => ByteRange::new(first, size),
            Self::Suffix { length } => ByteRange::new(size.saturating_sub(length), size),
        };
        range.ok_or(Unsatisfiable { size })
    }
}

/// No byte of the object is meant; the answer is 416 with `Content-Range: bytes */size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the range lies outside the object of {size} bytes")]
pub struct Unsatisfiable {
    /// Size of the object in bytes.
    pub size: u64,
}

/// Reads the value of a `Range` header. `None` means that the header is to be ignored and the whole object
/// answered: another unit than bytes, an empty set, several ranges, or anything malformed.
pub fn parse_range(value: &[u8]) -> Option<RangeAsk> {
    let (unit, set) = value.trim_ascii().split_at_checked(6)?;
    if !unit.eq_ignore_ascii_case(b"bytes=") {
        return None;
    }
    let dash = set.iter().position(|&byte| byte == b'-')?;
    let (first, last) = (&set[..dash], &set[dash + 1..]);
    match (first.is_empty(), last.is_empty()) {
        (true, true) => None,
        (true, false) => Some(RangeAsk::Suffix { length: parse_number(last)? }),
        (false, true) => Some(RangeAsk::From { first: parse_number(first)? }),
        (false, false) => {
            let (first, last) = (parse_number(first)?, parse_number(last)?);
            (first <= last).then_some(RangeAsk::FirstLast { first, last })
        }
    }
}

/// Digits only; what does not fit is beyond every object and becomes the largest number.
fn parse_number(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |number, byte| {
        byte.is_ascii_digit().then(|| number.saturating_mul(10).saturating_add(u64::from(byte - b'0')))
    })
}

/// The fixed grid of one accelerator: extents of equal size, the last one of an object shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    extent: u32,
}

/// Unit of checksum and of drive reads, in bytes.
pub const BLOCK_BYTES: u32 = 65536;

/// Smallest extent, in bytes.
pub const EXTENT_BYTES_MIN: u32 = BLOCK_BYTES;

/// Largest extent, in bytes: one page of the arena.
pub const EXTENT_BYTES_MAX: u32 = 2 << 20;

/// Objects above this many bytes are never cached, whatever the grid: the number of an extent has 32 bits.
/// 256 TiB less one block; the largest objects of today's stores have 50 TB.
pub const OBJECT_BYTES_MAX: u64 = EXTENT_BYTES_MIN as u64 * u32::MAX as u64;

const _: () = assert!(EXTENT_BYTES_MIN.is_power_of_two() && EXTENT_BYTES_MAX.is_power_of_two());
const _: () = assert!(EXTENT_BYTES_MIN.is_multiple_of(BLOCK_BYTES));

impl Grid {
    /// A grid of `extent` bytes: a power of two from 64 KiB to 2 MiB, else `None`.
    pub fn new(extent: u32) -> Option<Self> {
        let fits = extent.is_power_of_two() && (EXTENT_BYTES_MIN..=EXTENT_BYTES_MAX).contains(&extent);
        fits.then_some(Self { extent })
    }

    /// Bytes of a full extent.
    pub fn extent_bytes(self) -> u32 {
        self.extent
    }

    /// Number of the extent in which the byte at `offset` lies. `offset` is below [`OBJECT_BYTES_MAX`].
    pub fn extent_of(self, offset: u64) -> u32 {
        // A wrapped number would name another extent and so serve wrong bytes: this must not go on.
        u32::try_from(offset >> self.shift()).expect("objects beyond OBJECT_BYTES_MAX are not cacheable")
    }

    /// The bytes of the object that `extent` holds; `None` when it begins at or after `size`.
    pub fn extent_range(self, extent: u32, size: u64) -> Option<ByteRange> {
        let start = u64::from(extent) << self.shift();
        ByteRange::new(start, size.min(start + u64::from(self.extent)))
    }

    /// How many extents an object of `size` bytes has; 0 when it is empty. `size` is at most
    /// [`OBJECT_BYTES_MAX`].
    pub fn extent_count(self, size: u64) -> u32 {
        size.checked_sub(1).map_or(0, |last| self.extent_of(last) + 1)
    }

    /// The parts of `range`, one an extent, in order and without a gap. `range` ends at or before
    /// [`OBJECT_BYTES_MAX`].
    pub fn pieces(self, range: ByteRange) -> impl Iterator<Item = Piece> {
        (self.extent_of(range.start)..=self.extent_of(range.last())).map(move |extent| {
            let base = u64::from(extent) << self.shift();
            let start = range.start.max(base) - base;
            let end = (range.end - base).min(u64::from(self.extent));
            Piece { extent, within: start as u32..end as u32 }
        })
    }

    fn shift(self) -> u32 {
        self.extent.trailing_zeros()
    }
}

/// The part of a range that lies in one extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the extent in its object.
    pub extent: u32,
    /// The bytes wanted, counted from the extent's own start; never empty.
    pub within: Range<u32>,
}

impl Piece {
    /// Numbers of the blocks, counted in the extent, that must be read to have these bytes.
    pub fn blocks(&self) -> Range<u32> {
        self.within.start / BLOCK_BYTES..self.within.end.div_ceil(BLOCK_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const B: u64 = BLOCK_BYTES as u64;

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange::new(start, end).unwrap()
    }

    #[test]
    fn a_range_is_never_empty() {
        assert_eq!(ByteRange::new(5, 5), None);
        assert_eq!(ByteRange::new(6, 5), None);
        assert_eq!(ByteRange::whole(0), None);
        let all = range(0, u64::MAX);
        assert_eq!((all.len(), all.last()), (u64::MAX, u64::MAX - 1));
        assert!(all.contains(0) && all.contains(u64::MAX - 1) && !all.contains(u64::MAX));
        assert_eq!(range(0, 10).intersect(range(10, 20)), None);
        assert_eq!(range(0, 11).intersect(range(10, 20)), ByteRange::new(10, 11));
        assert_eq!(range(3, 9).to_string(), "3..9");
    }

    #[test]
    fn headers_are_read_or_ignored() {
        use RangeAsk::{FirstLast, From, Suffix};
        let table: &[(&str, Option<RangeAsk>)] = &[
            ("bytes=0-0", Some(FirstLast { first: 0, last: 0 })),
            ("bytes=0-499", Some(FirstLast { first: 0, last: 499 })),
            ("Bytes=7-9", Some(FirstLast { first: 7, last: 9 })),
            (" bytes=1-2\t", Some(FirstLast { first: 1, last: 2 })),
            ("bytes=00005-0009", Some(FirstLast { first: 5, last: 9 })),
            ("bytes=500-", Some(From { first: 500 })),
            ("bytes=-500", Some(Suffix { length: 500 })),
            ("bytes=-0", Some(Suffix { length: 0 })),
            ("bytes=0-18446744073709551615", Some(FirstLast { first: 0, last: u64::MAX })),
            ("bytes=0-99999999999999999999999", Some(FirstLast { first: 0, last: u64::MAX })),
            ("bytes=99999999999999999999999-", Some(From { first: u64::MAX })),
            ("bytes=-99999999999999999999999", Some(Suffix { length: u64::MAX })),
            // The empty set, and nothing at all.
            ("bytes=", None),
            ("bytes", None),
            ("", None),
            ("bytes=-", None),
            ("bytes=,", None),
            // What a careless client makes of an empty file.
            ("bytes=0--1", None),
            ("bytes=--1", None),
            ("bytes=5-4", None),
            ("bytes=1-2,5-6", None),
            ("bytes=0-,0-,0-", None),
            ("bytes=0-4,", None),
            ("bytes=a-b", None),
            ("bytes=0x0-0x5", None),
            ("bytes=+1-2", None),
            ("bytes= 1-2", None),
            ("bytes=1 -2", None),
            ("bytes 1-2", None),
            ("items=0-5", None),
            ("bytes=1-2/10", None),
            ("bytes=\u{0661}-\u{0662}", None),
        ];
        for (value, expected) in table {
            assert_eq!(parse_range(value.as_bytes()), *expected, "{value:?}");
        }
    }

    #[test]
    fn asks_resolve_at_the_edges() {
        use RangeAsk::{FirstLast, From, Suffix};
        let none = |size| Err(Unsatisfiable { size });
        let table = [
            (FirstLast { first: 0, last: 0 }, 1, Ok(range(0, 1))),
            (FirstLast { first: 0, last: 0 }, 0, none(0)),
            (FirstLast { first: 0, last: 999 }, 10, Ok(range(0, 10))),
            (FirstLast { first: 9, last: 9 }, 10, Ok(range(9, 10))),
            (FirstLast { first: 10, last: 20 }, 10, none(10)),
            (FirstLast { first: 0, last: u64::MAX }, u64::MAX, Ok(range(0, u64::MAX))),
            (FirstLast { first: u64::MAX, last: u64::MAX }, u64::MAX, none(u64::MAX)),
            (From { first: 0 }, 0, none(0)),
            (From { first: 0 }, 7, Ok(range(0, 7))),
            (From { first: 6 }, 7, Ok(range(6, 7))),
            (From { first: 7 }, 7, none(7)),
            (From { first: u64::MAX }, u64::MAX, none(u64::MAX)),
            (Suffix { length: 0 }, 10, none(10)),
            (Suffix { length: 1 }, 0, none(0)),
            (Suffix { length: 3 }, 10, Ok(range(7, 10))),
            (Suffix { length: 10 }, 10, Ok(range(0, 10))),
            (Suffix { length: 11 }, 10, Ok(range(0, 10))),
            (Suffix { length: u64::MAX }, 1, Ok(range(0, 1))),
        ];
        for (ask, size, expected) in table {
            assert_eq!(ask.resolve(size), expected, "{ask:?} of {size}");
        }
    }

    #[test]
    fn grids_are_powers_of_two_between_a_block_and_a_page() {
        for bytes in [65536, 131_072, 1 << 20, 2 << 20] {
            assert_eq!(Grid::new(bytes).unwrap().extent_bytes(), bytes);
        }
        for bytes in [0, 1, 32768, 65535, 65537, 3 << 16, 4 << 20, u32::MAX] {
            assert_eq!(Grid::new(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn extents_end_where_the_object_ends() {
        let grid = Grid::new(BLOCK_BYTES).unwrap();
        for k in 0..=3u64 {
            for size in [(k * B).saturating_sub(1), k * B, k * B + 1] {
                let count = grid.extent_count(size);
                assert_eq!(u64::from(count), size.div_ceil(B), "size {size}");
                assert_eq!(grid.extent_range(count, size), None, "size {size}");
                if let Some(last) = count.checked_sub(1) {
                    let last = grid.extent_range(last, size).unwrap();
                    assert_eq!(last.end(), size);
                    assert_eq!(last.start() % B, 0);
                }
            }
        }
        assert_eq!(grid.extent_count(OBJECT_BYTES_MAX), u32::MAX);
        assert_eq!(grid.extent_of(OBJECT_BYTES_MAX - 1), u32::MAX - 1);
        let widest = Grid::new(EXTENT_BYTES_MAX).unwrap();
        assert_eq!(widest.extent_range(u32::MAX, u64::MAX).unwrap().len(), u64::from(EXTENT_BYTES_MAX));
    }

    #[test]
    fn every_range_round_a_block_edge_is_cut_at_the_edge() {
        let grid = Grid::new(BLOCK_BYTES).unwrap();
        let edges: Vec<u64> =
            (0..=3u64).flat_map(|k| [(k * B).saturating_sub(1), k * B, k * B + 1]).collect();
        for &start in &edges {
            for &end in &edges {
                if let Some(wanted) = ByteRange::new(start, end) {
                    assert_covers(grid, wanted);
                }
            }
        }
        let piece = grid.pieces(range(65535, 65537)).collect::<Vec<_>>();
        assert_eq!(
            piece,
            [Piece { extent: 0, within: 65535..65536 }, Piece { extent: 1, within: 0..1 }],
            "one byte on each side"
        );
    }

    #[test]
    fn blocks_cover_the_piece_and_no_more() {
        let grid = Grid::new(1 << 20).unwrap();
        for (start, end, blocks) in
            [(0, 1, 0..1), (0, 65536, 0..1), (0, 65537, 0..2), (65535, 65537, 0..2), (65536, 1 << 20, 1..16)]
        {
            assert_eq!(grid.pieces(range(start, end)).next().unwrap().blocks(), blocks);
        }
    }

    fn assert_covers(grid: Grid, wanted: ByteRange) {
        let mut at = wanted.start();
        for piece in grid.pieces(wanted) {
            let base = u64::from(piece.extent) * u64::from(grid.extent_bytes());
            assert!(piece.within.start < piece.within.end && piece.within.end <= grid.extent_bytes());
            assert_eq!(base + u64::from(piece.within.start), at, "gap or overlap in {wanted}");
            at = base + u64::from(piece.within.end);
        }
        assert_eq!(at, wanted.end(), "{wanted}");
    }

    proptest! {
        #[test]
        fn pieces_cover_a_range_exactly(
            power in 16u32..=21,
            start in 0u64..OBJECT_BYTES_MAX,
            length in 1u64..40_000_000,
        ) {
            let wanted = range(start, (start + length).min(OBJECT_BYTES_MAX));
            assert_covers(Grid::new(1 << power).unwrap(), wanted);
        }

        #[test]
        fn what_resolves_lies_in_the_object(first: u64, last: u64, size: u64) {
            for ask in [
                RangeAsk::FirstLast { first: first.min(last), last: first.max(last) },
                RangeAsk::From { first },
                RangeAsk::Suffix { length: last },
            ] {
                if let Ok(range) = ask.resolve(size) {
                    prop_assert!(range.end() <= size && range.start() < range.end());
                }
            }
        }

        #[test]
        fn no_header_value_panics(value: Vec<u8>, tail in "[0-9, -]{0,30}") {
            let _ = parse_range(&value);
            let _ = parse_range(format!("bytes={tail}").as_bytes());
        }

        #[test]
        fn what_we_write_is_what_we_read(first: u64, more in 0u64..1_000_000) {
            let last = first.saturating_add(more);
            let value = format!("bytes={first}-{last}");
            prop_assert_eq!(parse_range(value.as_bytes()), Some(RangeAsk::FirstLast { first, last }));
        }
    }
}
