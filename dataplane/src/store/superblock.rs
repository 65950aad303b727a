//! The 4 KiB that make a drive ours, kept twice.
//!
//! Two copies, because a write of 4 KiB may tear and because a drive may lose a sector: the copies are
//! written one after the other with a flush between, so at every moment at least one of them is whole.
//! Each carries a checksum over all of itself; a copy that fails it is as good as absent.
//!
//! This file turns bytes into a [`Superblock`] and back and decides between two copies. It reads and writes
//! no drive: `drive` and `format` do.
//!
//! ```text
//! One copy, 4,096 bytes, little-endian. Copy 0 lies at byte 0 of the drive, copy 1 at byte 4,096.
//!
//!     0         8        12      16           24          40           56         64            72
//!     | magic   | format | copy  | generation | node (16) | drive (16) | capacity | data offset |
//!     72              76         80                84      88             96            4092   4096
//!     | segment bytes | segments | sequence floor  | zeros | formatted at | zeros …     | CRC32C |
//!
//! magic, format and the checksum keep their places in every format to come, so that an older node can
//! always tell "newer than I am" from "damaged".
//! ```

use std::fmt;

use super::segment::{Geometry, GeometryError};

/// What the first eight bytes of a copy say.
pub(super) const MAGIC: [u8; 8] = *b"Forebay\x1a";
/// The newest format this node reads and the one that it writes.
pub(super) const FORMAT: u32 = 1;
/// Bytes of one copy.
pub(super) const SUPERBLOCK_BYTES: usize = 4096;
/// Where the copies lie, in bytes from the start of the drive.
pub(super) const COPY_OFFSETS: [u64; 2] = [0, SUPERBLOCK_BYTES as u64];

const CHECKSUM_AT: usize = SUPERBLOCK_BYTES - 4;

/// Sixteen random bytes that name a drive, or the node that formatted it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity(pub [u8; 16]);

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a drive says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Counts the writes of the superblock; the copy with the higher number is the newer one.
    pub generation: u64,
    /// The node that formatted the drive.
    pub node: Identity,
    /// This drive; a new one at each format.
    pub drive: Identity,
    /// Where the segments lie and how many there are.
    pub geometry: Geometry,
    /// The first segment sequence that the next run may use: every number below may already stand for bytes
    /// on the drive. Never 0.
    pub sequence_floor: u32,
    /// Seconds since 1970 at which the drive was formatted.
    pub formatted_at: u64,
}

/// Why 4 KiB are not a superblock that we can use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// The magic is missing: somebody else's bytes, or nobody's.
    #[error("there is no Forebay superblock")]
    NotForebay,
    /// The magic is there, the checksum disagrees: torn, rotten, or overwritten in part.
    #[error("superblock copy {copy} is damaged: its checksum is {stored:08x}, its bytes give {computed:08x}")]
    Damaged {
        /// 0 or 1.
        copy: u8,
        /// What the copy says.
        stored: u32,
        /// What its bytes give.
        computed: u32,
    },
    /// A whole superblock of a format that we do not know.
    #[error(
        "the drive has format {found}, this node knows format {FORMAT}: use a newer node, or format the drive anew"
    )]
    FormatNewer {
        /// The format on the drive.
        found: u32,
    },
    /// A whole copy, but not at its own place.
    #[error("superblock copy {copy} says that it is copy {found}: it was copied from elsewhere")]
    Misplaced {
        /// Where it lies.
        copy: u8,
        /// Where it says it belongs.
        found: u32,
    },
    /// A whole copy with numbers that cannot be.
    #[error("superblock copy {copy} is whole, but its numbers do not fit each other")]
    Geometry {
        /// 0 or 1.
        copy: u8,
        /// Which do not.
        #[source]
        source: GeometryError,
    },
    /// A whole copy whose sequence floor is 0.
    #[error("superblock copy {copy} is whole, but has no sequence floor")]
    NoFloor {
        /// 0 or 1.
        copy: u8,
    },
    /// Both copies are whole, but belong to different drives.
    #[error(
        "the two superblock copies are of different drives ({first} and {second}): format the drive anew"
    )]
    Disagree {
        /// The drive that copy 0 names.
        first: Identity,
        /// The drive that copy 1 names.
        second: Identity,
    },
}

impl Superblock {
    /// The bytes of copy `copy` (0 or 1).
    pub fn encode(&self, copy: u8) -> [u8; SUPERBLOCK_BYTES] {
        assert!(usize::from(copy) < COPY_OFFSETS.len());
        assert_ne!(self.sequence_floor, 0);
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &FORMAT.to_le_bytes());
        put(12, &u32::from(copy).to_le_bytes());
        put(16, &self.generation.to_le_bytes());
        put(24, &self.node.0);
        put(40, &self.drive.0);
        put(56, &self.geometry.capacity().to_le_bytes());
        put(64, &self.geometry.data_offset().to_le_bytes());
        put(72, &self.geometry.segment_bytes().to_le_bytes());
        put(76, &self.geometry.segments().to_le_bytes());
        put(80, &self.sequence_floor.to_le_bytes());
        put(88, &self.formatted_at.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads copy `copy` from its 4 KiB.
    ///
    /// # Errors
    /// See [`SuperblockError`]; nothing of a copy is believed before its checksum holds.
    pub fn decode(bytes: &[u8; SUPERBLOCK_BYTES], copy: u8) -> Result<Self, SuperblockError> {
        if !has_magic(bytes) {
            return Err(SuperblockError::NotForebay);
        }
        let (stored, computed) = (read_u32(bytes, CHECKSUM_AT), crc32c::crc32c(&bytes[..CHECKSUM_AT]));
        if stored != computed {
            return Err(SuperblockError::Damaged { copy, stored, computed });
        }
        let found = read_u32(bytes, 8);
        if found != FORMAT {
            return Err(SuperblockError::FormatNewer { found });
        }
        let found = read_u32(bytes, 12);
        if found != u32::from(copy) {
            return Err(SuperblockError::Misplaced { copy, found });
        }
        let geometry = Geometry::of_drive(
            read_u64(bytes, 56),
            read_u64(bytes, 64),
            read_u32(bytes, 72),
            read_u32(bytes, 76),
        )
        .map_err(|source| SuperblockError::Geometry { copy, source })?;
        let sequence_floor = read_u32(bytes, 80);
        if sequence_floor == 0 {
            return Err(SuperblockError::NoFloor { copy });
        }
        Ok(Self {
            generation: read_u64(bytes, 16),
            node: Identity(read_16(bytes, 24)),
            drive: Identity(read_16(bytes, 40)),
            geometry,
            sequence_floor,
            formatted_at: read_u64(bytes, 88),
        })
    }
}

/// The copy to believe, and what was wrong with the other one, if anything was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    /// What the drive says.
    pub superblock: Superblock,
    /// The copy that has to be repaired, and why.
    pub spoiled: Option<(u8, SuperblockError)>,
}

/// Decides between the two copies of a drive.
///
/// # Errors
/// If no copy can be used, the error of the one that came closer to being ours. A newer format wins over
/// everything: this node must not touch such a drive, even where the other copy is one that it could read.
pub(super) fn choose(
    first: Result<Superblock, SuperblockError>,
    second: Result<Superblock, SuperblockError>,
) -> Result<Chosen, SuperblockError> {
    match (first, second) {
        (Err(newer @ SuperblockError::FormatNewer { .. }), _)
        | (_, Err(newer @ SuperblockError::FormatNewer { .. })) => Err(newer),
        (Ok(first), Ok(second)) if first.drive != second.drive => {
            Err(SuperblockError::Disagree { first: first.drive, second: second.drive })
        }
        (Ok(first), Ok(second)) => {
            let superblock = if second.generation > first.generation { second } else { first };
            Ok(Chosen { superblock, spoiled: None })
        }
        (Ok(superblock), Err(why)) => Ok(Chosen { superblock, spoiled: Some((1, why)) }),
        (Err(why), Ok(superblock)) => Ok(Chosen { superblock, spoiled: Some((0, why)) }),
        (Err(SuperblockError::NotForebay), Err(why)) | (Err(why), Err(_)) => Err(why),
    }
}

/// True if these bytes begin as a superblock of any format begins, whole or damaged.
pub(super) fn has_magic(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn read_16(bytes: &[u8], at: usize) -> [u8; 16] {
    bytes[at..at + 16].try_into().expect("sixteen bytes")
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn example() -> Superblock {
        Superblock {
            generation: 7,
            node: Identity([1; 16]),
            drive: Identity(*b"0123456789abcdef"),
            geometry: Geometry::for_capacity(64 << 20).unwrap(),
            sequence_floor: 4097,
            formatted_at: 1_790_000_000,
        }
    }

    /// The same copy with some bytes replaced and the checksum put right again.
    fn forged(copy: u8, at: usize, field: &[u8]) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = example().encode(copy);
        bytes[at..at + field.len()].copy_from_slice(field);
        let checksum = crc32c::crc32c(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn both_copies_come_back_as_they_went() {
        for copy in [0, 1] {
            assert_eq!(Superblock::decode(&example().encode(copy), copy), Ok(example()));
        }
    }

    #[test]
    fn the_drawing_holds() {
        let bytes = example().encode(1);
        assert_eq!(&bytes[..16], b"Forebay\x1a\x01\0\0\0\x01\0\0\0");
        assert_eq!(bytes[16], 7);
        assert_eq!(
            &bytes[24..56],
            b"\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x01\x010123456789abcdef"
        );
        assert_eq!(read_u64(&bytes, 56), 64 << 20);
        assert_eq!(read_u64(&bytes, 64), 1 << 20);
        assert_eq!((read_u32(&bytes, 72), read_u32(&bytes, 76)), (4 << 20, 15));
        assert_eq!(read_u32(&bytes, 80), 4097);
        assert!(bytes[84..88].iter().chain(&bytes[96..CHECKSUM_AT]).all(|&byte| byte == 0));
    }

    #[test]
    fn each_kind_of_wrong_has_its_name() {
        assert_eq!(Superblock::decode(&[0; SUPERBLOCK_BYTES], 0), Err(SuperblockError::NotForebay));
        assert_eq!(
            Superblock::decode(&forged(0, 8, &[2, 0, 0, 0]), 0),
            Err(SuperblockError::FormatNewer { found: 2 })
        );
        assert_eq!(
            Superblock::decode(&example().encode(1), 0),
            Err(SuperblockError::Misplaced { copy: 0, found: 1 })
        );
        assert_eq!(Superblock::decode(&forged(0, 80, &[0; 4]), 0), Err(SuperblockError::NoFloor { copy: 0 }));
        for (at, field) in [
            (56, 4096u64.to_le_bytes().to_vec()),      // too small for anything
            (64, 8192u64.to_le_bytes().to_vec()),      // data where none may be
            (72, (3u32 << 20).to_le_bytes().to_vec()), // not a power of two
            (72, 0u32.to_le_bytes().to_vec()),
            (76, 16u32.to_le_bytes().to_vec()), // one segment over the end
        ] {
            let found = Superblock::decode(&forged(0, at, &field), 0);
            assert!(matches!(found, Err(SuperblockError::Geometry { copy: 0, .. })), "{at}: {found:?}");
        }
    }

    #[test]
    fn the_newer_of_two_whole_copies_is_believed() {
        let newer = Superblock { generation: 8, sequence_floor: 9000, ..example() };
        for pair in [(example(), newer), (newer, example())] {
            let chosen = choose(Ok(pair.0), Ok(pair.1)).unwrap();
            assert_eq!(chosen, Chosen { superblock: newer, spoiled: None });
        }
    }

    #[test]
    fn one_whole_copy_is_enough_and_the_other_is_named() {
        let damage = SuperblockError::Damaged { copy: 1, stored: 1, computed: 2 };
        assert_eq!(choose(Ok(example()), Err(damage.clone())).unwrap().spoiled, Some((1, damage)));
        assert_eq!(
            choose(Err(SuperblockError::NotForebay), Ok(example())).unwrap().spoiled,
            Some((0, SuperblockError::NotForebay))
        );
    }

    #[test]
    fn damage_is_reported_rather_than_absence_and_newer_rather_than_either() {
        let damage = SuperblockError::Damaged { copy: 1, stored: 1, computed: 2 };
        let newer = SuperblockError::FormatNewer { found: 9 };
        assert_eq!(choose(Err(SuperblockError::NotForebay), Err(damage.clone())), Err(damage.clone()));
        assert_eq!(choose(Err(damage.clone()), Err(SuperblockError::NotForebay)), Err(damage));
        assert_eq!(choose(Err(newer.clone()), Ok(example())), Err(newer.clone()));
        assert_eq!(choose(Ok(example()), Err(newer.clone())), Err(newer));
        let other = Superblock { drive: Identity([9; 16]), ..example() };
        assert!(matches!(choose(Ok(example()), Ok(other)), Err(SuperblockError::Disagree { .. })));
    }

    proptest! {
        #[test]
        fn no_flipped_bits_are_believed(bits in prop::collection::btree_set(0..SUPERBLOCK_BYTES * 8, 1..4), copy in 0u8..2) {
            let mut bytes = example().encode(copy);
            for bit in &bits {
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            let magic_hit = bits.iter().any(|bit| bit / 8 < MAGIC.len());
            match Superblock::decode(&bytes, copy) {
                Err(SuperblockError::NotForebay) => prop_assert!(magic_hit),
                Err(SuperblockError::Damaged { .. }) => prop_assert!(!magic_hit),
                other => prop_assert!(false, "{other:?}"),
            }
        }

        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), SUPERBLOCK_BYTES), ours in any::<bool>()) {
            let mut bytes: [u8; SUPERBLOCK_BYTES] = bytes.try_into().unwrap();
            if ours {
                bytes[..8].copy_from_slice(&MAGIC);
            }
            prop_assert!(Superblock::decode(&bytes, 0).is_err());
        }
    }
}
