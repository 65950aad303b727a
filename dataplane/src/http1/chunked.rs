//! The chunked coding of request bodies, taken off strictly, and put on where a relayed body has no length.
//!
//! The decoder holds no bytes: it says which part of what was pushed is body, and the caller passes that on.
//! Sizes are checked sums; extensions and trailers are read over but limited, because a body of one-byte chunks
//! with long extensions would cost a hundred times what it carries.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::grammar::{TOKEN, VALUE, is};

/// Ends a chunked body that has no trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Appends the line before a chunk of `length` bytes, which is not 0; after the chunk comes `\r\n`.
pub fn write_chunk_head(out: &mut Vec<u8>, length: usize) {
    assert!(length > 0, "a chunk of no bytes would end the body");
    let nibbles = (usize::BITS - length.leading_zeros()).div_ceil(4);
    for nibble in (0..nibbles).rev() {
        out.push(b"0123456789abcdef"[(length >> (4 * nibble)) & 15]);
    }
    out.extend_from_slice(b"\r\n");
}

/// Takes the chunked coding off a body that arrives in pieces.
#[derive(Clone, Debug)]
pub struct ChunkedDecoder {
    state: State,
    /// Size being read, then bytes of the chunk still to come.
    size: u64,
    extension_bytes: u32,
    trailer_bytes: u32,
}

/// What a push brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Which bytes of the input are body; may be empty.
    pub data: Range<usize>,
    /// How many bytes of the input were taken. While this is less than all and the body has not finished,
    /// push the rest.
    pub used: usize,
    /// The body is over; bytes after `used` belong to the next request.
    pub finished: bool,
}

/// Why a chunked body cannot be read on. The connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The bytes break the grammar.
    #[error("malformed chunked body: {0}")]
    Malformed(&'static str),
    /// A chunk size that does not fit 64 bits.
    #[error("a chunk is larger than 2^64 bytes")]
    Size,
    /// Too many bytes of chunk extensions.
    #[error("more than {EXTENSION_BYTES_MAX} bytes of chunk extensions")]
    Extensions,
    /// Too many bytes of trailers.
    #[error("more than {TRAILER_BYTES_MAX} bytes of trailers")]
    Trailers,
}

const EXTENSION_BYTES_MAX: u32 = 4096;
const TRAILER_BYTES_MAX: u32 = 8192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the first digit of a size.
    SizeStart,
    /// After this many digits.
    Size(u8),
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// At the start of a line after the last chunk.
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLf,
    EndLf,
    Finished,
}

impl Default for ChunkedDecoder {
    fn default() -> Self {
        Self::new()
    }
}

impl ChunkedDecoder {
    /// A decoder at the start of a body.
    pub fn new() -> Self {
        Self { state: State::SizeStart, size: 0, extension_bytes: 0, trailer_bytes: 0 }
    }

    /// Whether the body has ended.
    pub fn is_finished(&self) -> bool {
        self.state == State::Finished
    }

    /// Reads on; returns after the first run of body bytes, or when the input or the body ends.
    ///
    /// # Errors
    /// [`ChunkError`]; the decoder must not be used afterwards.
    pub fn push(&mut self, input: &[u8]) -> Result<Decoded, ChunkError> {
        let mut at = 0;
        while at < input.len() && self.state != State::Finished {
            if self.state == State::Data {
                let length = (input.len() - at).min(usize::try_from(self.size).unwrap_or(usize::MAX));
                self.size -= length as u64;
                if self.size == 0 {
                    self.state = State::DataCr;
                }
                let data = at..at + length;
                return Ok(Decoded { used: data.end, data, finished: false });
            }
            self.state = self.step(input[at])?;
            at += 1;
        }
        Ok(Decoded { data: at..at, used: at, finished: self.is_finished() })
    }

    fn step(&mut self, byte: u8) -> Result<State, ChunkError> {
        const LINE_END: ChunkError = ChunkError::Malformed("lines must end with CR LF");
        match (self.state, byte) {
            (State::SizeStart, _) => {
                self.size = u64::from(hex_digit(byte)?);
                Ok(State::Size(1))
            }
            (State::Size(_) | State::Extension, b'\r') => Ok(State::SizeLf),
            (State::Size(_), b';') => {
                self.count_extension()?;
                Ok(State::Extension)
            }
            (State::Size(digits), _) => {
                let digit = u64::from(hex_digit(byte)?);
                // Sixteen digits fill 64 bits; more, be they zeros, are no honest size.
                if digits == 16 {
                    return Err(ChunkError::Size);
                }
                self.size = self.size << 4 | digit;
                Ok(State::Size(digits + 1))
            }
            (State::Extension, _) => {
                if !is_text(byte) {
                    return Err(LINE_END);
                }
                self.count_extension()?;
                Ok(State::Extension)
            }
            (State::SizeLf, b'\n') if self.size == 0 => Ok(State::TrailerStart),
            (State::SizeLf, b'\n') => Ok(State::Data),
            (State::DataCr, b'\r') => Ok(State::DataLf),
            (State::DataLf, b'\n') => Ok(State::SizeStart),
            (State::DataCr | State::DataLf, _) => {
                Err(ChunkError::Malformed("a chunk is longer than its size says"))
            }
            (State::TrailerStart, b'\r') => Ok(State::EndLf),
            (State::TrailerStart | State::TrailerName, _) => {
                self.count_trailer()?;
                match byte {
                    b':' if self.state == State::TrailerName => Ok(State::TrailerValue),
                    _ if is(byte, TOKEN) => Ok(State::TrailerName),
                    _ => Err(ChunkError::Malformed("a trailer is a name, a colon at once, and a value")),
                }
            }
            (State::TrailerValue, b'\r') => Ok(State::TrailerLf),
            (State::TrailerValue, _) => {
                if !is_text(byte) {
                    return Err(LINE_END);
                }
                self.count_trailer()?;
                Ok(State::TrailerValue)
            }
            (State::TrailerLf, b'\n') => Ok(State::TrailerStart),
            (State::EndLf, b'\n') => Ok(State::Finished),
            (State::SizeLf | State::TrailerLf | State::EndLf, _) => Err(LINE_END),
            (State::Data | State::Finished, _) => unreachable!("push handles both"),
        }
    }

    fn count_extension(&mut self) -> Result<(), ChunkError> {
        self.extension_bytes += 1;
        if self.extension_bytes > EXTENSION_BYTES_MAX { Err(ChunkError::Extensions) } else { Ok(()) }
    }

    fn count_trailer(&mut self) -> Result<(), ChunkError> {
        self.trailer_bytes += 1;
        if self.trailer_bytes > TRAILER_BYTES_MAX { Err(ChunkError::Trailers) } else { Ok(()) }
    }
}

/// What may stand in an extension or a trailer value.
fn is_text(byte: u8) -> bool {
    is(byte, VALUE)
}

fn hex_digit(byte: u8) -> Result<u8, ChunkError> {
    match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        b'A'..=b'F' => Ok(byte - b'A' + 10),
        _ => Err(ChunkError::Malformed("a chunk size is hexadecimal digits only")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes pieces one after another: the body, and what was left over when it ended.
    fn decode<'a>(
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(Vec<u8>, Vec<u8>, bool), ChunkError> {
        let mut decoder = ChunkedDecoder::new();
        let (mut body, mut left) = (Vec::new(), Vec::new());
        for mut piece in pieces {
            while !piece.is_empty() && !decoder.is_finished() {
                let decoded = decoder.push(piece)?;
                assert!(decoded.used > 0 && decoded.data.end <= decoded.used);
                assert_eq!(decoded.finished, decoder.is_finished());
                body.extend_from_slice(&piece[decoded.data]);
                piece = &piece[decoded.used..];
            }
            left.extend_from_slice(piece);
        }
        Ok((body, left, decoder.is_finished()))
    }

    #[test]
    fn bodies_are_taken_out_of_their_chunks() {
        for (wire, body, left, finished) in [
            (&b"0\r\n\r\n"[..], &b""[..], &b""[..], true),
            (b"5\r\nhello\r\n0\r\n\r\n", b"hello", b"", true),
            (b"5\r\nhello\r\n00\r\n\r\nGET /", b"hello", b"GET /", true),
            (b"A\r\n0123456789\r\n1\r\nx\r\n0\r\n\r\n", b"0123456789x", b"", true),
            (b"0000000000000003\r\nabc\r\n0\r\n\r\n", b"abc", b"", true),
            (b"3;name=value\r\nabc\r\n0;q=\"x\"\r\n\r\n", b"abc", b"", true),
            (b"3\r\nabc\r\n0\r\nx-sum: 1\r\nb:\r\n\r\nrest", b"abc", b"rest", true),
            (b"3\r\nab", b"ab", b"", false),
            (b"3\r\nabc\r\n0\r\n", b"abc", b"", false),
        ] {
            let expected = Ok((body.to_vec(), left.to_vec(), finished));
            assert_eq!(decode([wire]), expected, "{:?}", String::from_utf8_lossy(wire));
        }
    }

    #[test]
    fn loose_framing_is_refused() {
        for wire in [
            &b"\r\n"[..],
            b"5\nhello\r\n0\r\n\r\n",
            b"5\r\nhello\n0\r\n\r\n",
            b"5\r\nhello0\r\n\r\n",
            b"5\r\nhello!\r\n0\r\n\r\n",
            b"5 \r\nhello\r\n0\r\n\r\n",
            b" 5\r\nhello\r\n0\r\n\r\n",
            b"+5\r\nhello\r\n0\r\n\r\n",
            b"-1\r\n",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"5\r\rhello",
            b"5;a\nhello\r\n",
            b"5;a\rb\r\nhello\r\n",
            b"5;\0\r\nhello\r\n",
            b"0\r\n\n",
            b"0\r\nname value\r\n\r\n",
            b"0\r\nname : value\r\n\r\n",
            b"0\r\n folded: 1\r\n\r\n",
            b"0\r\n: 1\r\n\r\n",
            b"0\r\na: 1\n\r\n",
            b"0\r\na: \x01\r\n\r\n",
        ] {
            let result = decode([wire]);
            assert!(matches!(result, Err(ChunkError::Malformed(_))), "{wire:?}: {result:?}");
        }
    }

    #[test]
    fn sizes_do_not_wrap() {
        assert_eq!(decode([&b"ffffffffffffffff\r\nab"[..]]), Ok((b"ab".to_vec(), vec![], false)));
        assert_eq!(decode([&b"10000000000000000\r\n"[..]]), Err(ChunkError::Size));
        assert_eq!(decode([&b"00000000000000005\r\n"[..]]), Err(ChunkError::Size));
    }

    #[test]
    fn extensions_and_trailers_are_limited() {
        let mut wire = Vec::new();
        for _ in 0..EXTENSION_BYTES_MAX {
            wire.extend_from_slice(b"1;x\r\na\r\n");
        }
        assert_eq!(decode([&wire[..]]), Err(ChunkError::Extensions));
        let mut wire = b"0\r\n".to_vec();
        for _ in 0..TRAILER_BYTES_MAX {
            wire.extend_from_slice(b"a:\r\n");
        }
        assert_eq!(decode([&wire[..]]), Err(ChunkError::Trailers));
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            trailer in any::<bool>(),
            damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let mut wire = Vec::new();
            for chunk in &chunks {
                write_chunk_head(&mut wire, chunk.len());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(if trailer { b"0\r\nx-sum: 1\r\n\r\n" } else { LAST_CHUNK });
            wire.extend_from_slice(b"next");
            if let Some((at, byte)) = &damage {
                let at = at.index(wire.len());
                wire[at] = *byte;
            }
            let whole = decode([&wire[..]]);
            if damage.is_none() {
                prop_assert_eq!(&whole, &Ok((chunks.concat(), b"next".to_vec(), true)));
            }
            prop_assert_eq!(&whole, &decode(wire.chunks(1)));
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(wire.len())).collect();
            at.extend([0, wire.len()]);
            at.sort_unstable();
            prop_assert_eq!(&whole, &decode(at.windows(2).map(|pair| &wire[pair[0]..pair[1]])));
        }

        #[test]
        fn chunk_heads_are_hexadecimal(length in 1usize..) {
            let mut out = Vec::new();
            write_chunk_head(&mut out, length);
            prop_assert_eq!(out, format!("{length:x}\r\n").into_bytes());
        }
    }
}
