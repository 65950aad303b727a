//! Bytes that know where they belong.
//!
//! A body is a function of its seed and the offset, so that any range of any object can be checked without
//! keeping a copy, and a byte from the wrong place, the wrong object or the wrong version is never the right
//! byte by luck for longer than a word.

/// The bytes of one version of one object; two seeds never share a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    seed: u64,
}

impl Content {
    /// The content named by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The bytes `[start, start + length)`.
    pub fn bytes(self, start: u64, length: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(length + 16);
        let mut word = start / 8;
        out.extend_from_slice(&self.word(word)[(start % 8) as usize..]);
        while out.len() < length {
            word += 1;
            out.extend_from_slice(&self.word(word));
        }
        out.truncate(length);
        out
    }

    /// Where `body`, claimed to start at `start`, first differs from the truth; `None` if nowhere.
    pub fn first_wrong_byte(self, start: u64, body: &[u8]) -> Option<u64> {
        let truth = self.bytes(start, body.len());
        if truth == body {
            return None;
        }
        body.iter().zip(&truth).position(|(ours, theirs)| ours != theirs).map(|index| start + index as u64)
    }

    /// Panics, naming the first wrong byte, unless `body` is exactly `[start, start + length)`.
    #[track_caller]
    pub fn must_equal(self, start: u64, length: u64, body: &[u8]) {
        assert_eq!(length, body.len() as u64, "length of the body that starts at {start}");
        if let Some(place) = self.first_wrong_byte(start, body) {
            panic!("wrong bytes from offset {place} in a body of {length} bytes that starts at {start}");
        }
    }

    /// One step of splitmix64 keyed by seed and position: cheap, and without structure that a torn read keeps.
    fn word(self, index: u64) -> [u8; 8] {
        let mut z =
            (self.seed ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_is_a_slice_of_the_whole() {
        let content = Content::new(7);
        let whole = content.bytes(0, 1000);
        for (start, length) in [(0, 0), (0, 1), (1, 7), (7, 2), (8, 8), (13, 500), (999, 1)] {
            assert_eq!(whole[start..start + length], content.bytes(start as u64, length));
        }
    }

    #[test]
    fn a_shifted_or_foreign_body_is_noticed_at_its_first_byte() {
        let content = Content::new(7);
        assert_eq!(content.first_wrong_byte(64, &content.bytes(64, 100)), None);
        assert!(content.first_wrong_byte(64, &content.bytes(72, 100)).is_some_and(|place| place < 72));
        assert!(content.first_wrong_byte(0, &Content::new(8).bytes(0, 100)).is_some_and(|place| place < 8));
        let mut one_bit = content.bytes(0, 100);
        one_bit[50] ^= 4;
        assert_eq!(content.first_wrong_byte(0, &one_bit), Some(50));
    }
}
