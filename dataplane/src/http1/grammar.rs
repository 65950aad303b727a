//! The bytes of which HTTP/1.1 is made, and a walk over them.
//!
//! One table look-up a byte decides; the walk only goes forward and knows when the bytes at hand end too early.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::HeadError;

pub(super) const LINE_END: &str = "a line must end with CR LF and hold no control characters";

// Classes of bytes, one bit each.
/// Names: methods, header names.
pub(super) const TOKEN: u8 = 1;
/// Request targets.
pub(super) const TARGET: u8 = 2;
/// Header values.
pub(super) const VALUE: u8 = 4;
/// Hosts with their ports.
pub(super) const HOST: u8 = 8;

const CLASS: [u8; 256] = {
    let mut class = [0u8; 256];
    let mut byte = 0usize;
    while byte < 256 {
        let ascii = byte as u8;
        if ascii.is_ascii_alphanumeric() {
            class[byte] = TOKEN | TARGET | VALUE | HOST;
        } else if ascii.is_ascii_graphic() {
            class[byte] = VALUE;
            if ascii != b'#' {
                class[byte] |= TARGET;
            }
        } else if ascii == b' ' || ascii == b'\t' {
            class[byte] = VALUE;
        } else if byte >= 0x80 {
            // Not in the grammar of a target, but people type such keys, and S3 takes them.
            class[byte] = VALUE | TARGET;
        }
        byte += 1;
    }
    let tokens = b"!#$%&'*+-.^_`|~";
    let mut at = 0;
    while at < tokens.len() {
        class[tokens[at] as usize] |= TOKEN;
        at += 1;
    }
    let hosts = b"-._~!$&'()*+,;=%:[]";
    at = 0;
    while at < hosts.len() {
        class[hosts[at] as usize] |= HOST;
        at += 1;
    }
    class
};

/// Whether `byte` belongs to `class`.
pub(super) fn is(byte: u8, class: u8) -> bool {
    CLASS[usize::from(byte)] & class != 0
}

/// A walk over the bytes at hand. `None` means that they end too early.
pub(super) struct Cursor<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

impl Cursor<'_> {
    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    /// Goes over all bytes of `class`; stops before the first other one.
    pub(super) fn run(&mut self, class: u8) -> Option<Range<usize>> {
        let start = self.at;
        if class == VALUE {
            // Most bytes of a head are values, an Authorization alone has 250: eight at a time.
            while self.bytes[self.at..].first_chunk().is_some_and(|eight| is_plain_text(*eight)) {
                self.at += 8;
            }
        }
        let length = self.bytes[self.at..].iter().position(|&byte| !is(byte, class));
        self.at = length.map_or(self.bytes.len(), |length| self.at + length);
        length.map(|_| start..self.at)
    }

    /// Goes over `\r\n`, which must be next.
    pub(super) fn crlf(&mut self, otherwise: &'static str) -> Result<Option<()>, HeadError> {
        for wanted in *b"\r\n" {
            match self.peek() {
                None => return Ok(None),
                Some(byte) if byte == wanted => self.at += 1,
                Some(_) => return Err(HeadError::Malformed(otherwise)),
            }
        }
        Ok(Some(()))
    }
}

/// Whether none of eight bytes is a control character. (A tab is one here; the table knows better.)
fn is_plain_text(eight: [u8; 8]) -> bool {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGH: u64 = ONES << 7;
    let word = u64::from_le_bytes(eight);
    // Subtracting borrows into the high bit of a byte that is too small; bytes that had it set are no controls.
    let below_space = word.wrapping_sub(ONES * 0x20) & !word;
    let delete = word ^ (ONES * 0x7f);
    let is_delete = delete.wrapping_sub(ONES) & !delete;
    (below_space | is_delete) & HIGH == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_byte_is_seen_in_each_place() {
        for byte in 0..=255u8 {
            for place in 0..8 {
                for other in [b'a', b' ', b'~', 0x80, 0xff] {
                    let mut eight = [other; 8];
                    eight[place] = byte;
                    let plain = is(byte, VALUE) && byte != b'\t';
                    assert_eq!(is_plain_text(eight), plain, "{byte:#x} at {place} among {other:#x}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn a_run_of_values_ends_where_the_table_says(bytes: Vec<u8>) {
            let end = bytes.iter().position(|&byte| !is(byte, VALUE));
            let mut cursor = Cursor { bytes: &bytes, at: 0 };
            prop_assert_eq!(cursor.run(VALUE), end.map(|end| 0..end));
            prop_assert_eq!(cursor.at, end.unwrap_or(bytes.len()));
        }
    }
}
