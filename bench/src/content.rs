//! Generated, verifiable object bytes.
//!
//! Any range of any version of any object can be computed without state, so the emulator serves terabytes it
//! does not store and the client checks every byte without a reference copy. A wrong object, a stale version,
//! a shifted, short or repeated range and any flipped bit all show. The bytes neither compress nor repeat, so
//! no cache can cheat.
//!
//! ```text
//! key id  K = xxh3_64(bucket '/' key) ^ rotl(version, 32)
//! block b s = splitmix64(K ^ b * 0xD6E8FEB86659FD93)                 4 KiB each
//! word  i   = s + i * 0x9E3779B97F4A7C15  (mod 2^64), little-endian  512 in a block
//! ```
#![forbid(unsafe_code)]

use twox_hash::xxhash3_64::Hasher;

/// Bytes of one pattern block.
pub const BLOCK_BYTES: usize = 4096;
const BLOCK_STEP: u64 = 0xD6E8_FEB8_6659_FD93;
const WORD_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The content of one version of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    key_id: u64,
}

impl Content {
    /// The content of `name`, which is `bucket/key`, in its `version`.
    pub fn new(name: &[u8], version: u32) -> Self {
        Self { key_id: Hasher::oneshot(name) ^ u64::from(version).rotate_left(32) }
    }

    /// Writes the object's bytes from `offset` on into `out`, all of it.
    pub fn fill(self, offset: u64, out: &mut [u8]) {
        let mut block = offset / BLOCK_BYTES as u64;
        let within = (offset % BLOCK_BYTES as u64) as usize;
        let mut rest = out;
        if within != 0 {
            let (head, tail) = rest.split_at_mut(rest.len().min(BLOCK_BYTES - within));
            let whole = self.whole_block(block);
            head.copy_from_slice(&whole[within..within + head.len()]);
            rest = tail;
            block += 1;
        }
        let (blocks, tail) = rest.as_chunks_mut::<BLOCK_BYTES>();
        for out_block in blocks {
            fill_block(self.first_word(block), out_block);
            block += 1;
        }
        if !tail.is_empty() {
            tail.copy_from_slice(&self.whole_block(block)[..tail.len()]);
        }
    }

    /// Compares bytes that claim to lie at `offset`; the absolute offset of the first wrong one, if any.
    pub fn first_difference(self, offset: u64, seen: &[u8]) -> Option<u64> {
        let mut block = offset / BLOCK_BYTES as u64;
        let within = (offset % BLOCK_BYTES as u64) as usize;
        let mut rest = seen;
        if within != 0 {
            let (head, tail) = rest.split_at(rest.len().min(BLOCK_BYTES - within));
            let whole = self.whole_block(block);
            if let Some(at) = first_unequal(head, &whole[within..within + head.len()]) {
                return Some(offset + at as u64);
            }
            rest = tail;
            block += 1;
        }
        let (blocks, tail) = rest.as_chunks::<BLOCK_BYTES>();
        for seen_block in blocks {
            if !block_equals(self.first_word(block), seen_block) {
                let at = first_unequal(seen_block, &self.whole_block(block)).unwrap_or(0);
                return Some(block * BLOCK_BYTES as u64 + at as u64);
            }
            block += 1;
        }
        let at = first_unequal(tail, &self.whole_block(block)[..tail.len()])?;
        Some(block * BLOCK_BYTES as u64 + at as u64)
    }

    fn first_word(self, block: u64) -> u64 {
        splitmix64(self.key_id ^ block.wrapping_mul(BLOCK_STEP))
    }

    fn whole_block(self, block: u64) -> [u8; BLOCK_BYTES] {
        let mut out = [0; BLOCK_BYTES];
        fill_block(self.first_word(block), &mut out);
        out
    }
}

/// The finaliser of the splitmix64 generator: a bijection that spreads every input bit.
pub fn splitmix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(WORD_STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

// Straight loops over words without an early exit: the compiler turns both into vector code.
fn fill_block(first: u64, out: &mut [u8; BLOCK_BYTES]) {
    let mut word = first;
    for slot in out.as_chunks_mut::<8>().0 {
        *slot = word.to_le_bytes();
        word = word.wrapping_add(WORD_STEP);
    }
}

fn block_equals(first: u64, seen: &[u8; BLOCK_BYTES]) -> bool {
    let mut word = first;
    let mut differing = 0;
    for slot in seen.as_chunks::<8>().0 {
        differing |= u64::from_le_bytes(*slot) ^ word;
        word = word.wrapping_add(WORD_STEP);
    }
    differing == 0
}

fn first_unequal(seen: &[u8], wanted: &[u8]) -> Option<usize> {
    if seen == wanted {
        return None;
    }
    seen.iter().zip(wanted).position(|(a, b)| a != b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(content: Content, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        content.fill(offset, &mut out);
        out
    }

    #[test]
    fn the_pattern_is_the_one_written_down() {
        // Computed from the formula of the module's head by an independent implementation of its three lines.
        let content = Content { key_id: 0 };
        let first = splitmix64(0);
        assert_eq!(first, 0xE220_A839_7B1D_CDAF, "splitmix64's published first output for seed 0");
        let seen = bytes(content, 0, BLOCK_BYTES + 16);
        assert_eq!(seen[..8], first.to_le_bytes());
        assert_eq!(seen[8..16], first.wrapping_add(WORD_STEP).to_le_bytes());
        assert_eq!(seen[4088..4096], first.wrapping_add(WORD_STEP.wrapping_mul(511)).to_le_bytes());
        assert_eq!(seen[4096..4104], splitmix64(BLOCK_STEP).to_le_bytes());
        assert_eq!(
            Content::new(b"", 0).key_id,
            0x2D06_8005_38D3_94C2,
            "xxh3_64's published value for no input"
        );
        assert_eq!(Content::new(b"b/k", 3).key_id, Content::new(b"b/k", 0).key_id ^ (3 << 32));
    }

    #[test]
    fn every_kind_of_wrong_byte_shows() {
        let content = Content::new(b"bucket/key", 1);
        let good = bytes(content, 0, 100_000);
        assert_eq!(content.first_difference(0, &good), None);
        for at in [0, 1, 4095, 4096, 65_535, 99_999] {
            let mut flipped = good.clone();
            flipped[at] ^= 0x10;
            assert_eq!(content.first_difference(0, &flipped), Some(at as u64));
        }
        assert!(content.first_difference(0, &good[1..]).is_some(), "shifted by one byte");
        assert!(content.first_difference(0, &good[4096..]).is_some(), "shifted by one block");
        assert!(Content::new(b"bucket/key", 2).first_difference(0, &good).is_some(), "stale version");
        assert!(Content::new(b"bucket/kez", 1).first_difference(0, &good).is_some(), "another object");
    }

    proptest! {
        #[test]
        fn any_range_equals_the_same_part_of_the_whole(start in 0_usize..20_000, len in 0_usize..20_000) {
            let content = Content::new(b"b/whole", 7);
            let whole = bytes(content, 0, 40_000);
            prop_assert_eq!(&bytes(content, start as u64, len)[..], &whole[start..start + len]);
            prop_assert_eq!(content.first_difference(start as u64, &whole[start..start + len]), None);
        }
    }
}
