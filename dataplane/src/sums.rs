//! Block sums: CRC32C of each 64 KiB, bound to the place where the bytes belong.
//!
//! The sum of the bytes is mixed with object version, extent and block, so that a block which is whole but
//! belongs elsewhere fails as surely as a damaged one. The polynomial is the one that processors compute in
//! hardware (Castagnoli, RFC 3720 appendix B.4).
#![forbid(unsafe_code)]

use crate::object::VersionId;
use crate::range::BLOCK_BYTES;

/// The sums of one extent, a word a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSums(Box<[u32]>);

impl BlockSums {
    /// Sums of an extent's bytes, from its first block on.
    pub fn of(bytes: &[u8], version: VersionId, extent: u32) -> Self {
        let blocks = bytes.chunks(BLOCK_BYTES as usize).enumerate();
        Self(blocks.map(|(block, bytes)| sum(bytes, version, extent, block as u32)).collect())
    }

    /// The first block, counted from `first`, whose bytes are not the ones that were summed. `bytes` begin
    /// with block `first` and end with a block, or with the extent.
    pub fn first_bad(&self, bytes: &[u8], version: VersionId, extent: u32, first: u32) -> Option<u32> {
        bytes.chunks(BLOCK_BYTES as usize).zip(first..).find_map(|(bytes, block)| {
            let known = self.0.get(block as usize);
            (known != Some(&sum(bytes, version, extent, block))).then_some(block)
        })
    }

    /// Size in memory, for the metadata budget.
    pub fn memory_bytes(&self) -> usize {
        self.0.len() * size_of::<u32>()
    }
}

fn sum(bytes: &[u8], version: VersionId, extent: u32, block: u32) -> u32 {
    crc32c::crc32c(bytes) ^ place(version, extent, block)
}

/// A word that differs from place to place; splitmix64's finaliser (Steele, Lea, Flood 2014) over the three.
fn place(version: VersionId, extent: u32, block: u32) -> u32 {
    let mut word =
        version.0 ^ (u64::from(extent) << 32 | u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ (word >> 31)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: VersionId = VersionId(0x1234_5678_9abc_def0);

    #[test]
    fn whole_blocks_in_the_wrong_place_fail() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
        let sums = BlockSums::of(&bytes, VERSION, 3);
        assert_eq!(sums.first_bad(&bytes, VERSION, 3, 0), None);
        assert_eq!(sums.first_bad(&bytes[65536..], VERSION, 3, 1), None);
        assert_eq!(sums.first_bad(&bytes[65536..], VERSION, 3, 2), Some(2));
        assert_eq!(sums.first_bad(&bytes, VERSION, 4, 0), Some(0));
        assert_eq!(sums.first_bad(&bytes, VersionId(1), 3, 0), Some(0));
    }

    #[test]
    fn any_flipped_bit_fails_its_block() {
        let mut bytes = vec![0xa5; 150_000];
        let sums = BlockSums::of(&bytes, VERSION, 0);
        for at in [0, 65_535, 65_536, 131_071, 131_072, 149_999] {
            bytes[at] ^= 0x10;
            assert_eq!(sums.first_bad(&bytes, VERSION, 0, 0), Some(at as u32 / BLOCK_BYTES));
            bytes[at] ^= 0x10;
        }
    }

    #[test]
    fn a_short_or_long_extent_fails() {
        let sums = BlockSums::of(&vec![1; 70_000], VERSION, 0);
        assert!(sums.first_bad(&vec![1; 69_999], VERSION, 0, 0).is_some());
        assert!(sums.first_bad(&vec![1; 140_000], VERSION, 0, 0).is_some());
    }
}
