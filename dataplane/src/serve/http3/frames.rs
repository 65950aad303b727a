//! A bound on what has to be held of a stream before it can be understood.
//!
//! h3 collects a frame until it is whole, however long it says it is, and QUIC's flow control does not help, because
//! what has been taken is credited. So the lengths are looked at on their way: only DATA may be long, since only DATA
//! is handed on piece by piece (RFC 9114, 7.1 and 7.2).
#![forbid(unsafe_code)]

/// The type of DATA.
const DATA: u64 = 0;
/// The type of a unidirectional stream that holds frames (RFC 9114, 6.2.1).
const CONTROL: u64 = 0;

/// A frame that is longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLong;

/// Walks over the frames of one stream.
#[derive(Debug)]
pub(super) struct FrameGuard {
    next: Next,
    /// The number under way, and how many of its bytes are still to come.
    number: u64,
    missing: u32,
    longest: u64,
}

#[derive(Clone, Copy, Debug)]
enum Next {
    /// The type of the stream.
    StreamType,
    /// The type of a frame.
    Type,
    /// Its length; whether it is of a frame that may be long.
    Length { is_data: bool },
    /// So many bytes of a payload.
    Payload(u64),
    /// Nothing that is held.
    Anything,
}

impl FrameGuard {
    /// For a stream of requests; frames other than DATA have at most `longest` bytes.
    pub(super) fn of_request(longest: u64) -> Self {
        Self { next: Next::Type, number: 0, missing: 0, longest }
    }

    /// For a unidirectional stream.
    pub(super) fn of_unidirectional(longest: u64) -> Self {
        Self { next: Next::StreamType, ..Self::of_request(longest) }
    }

    /// The next bytes of the stream.
    ///
    /// # Errors
    /// A frame says that it is too long.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) -> Result<(), TooLong> {
        while !bytes.is_empty() {
            match self.next {
                Next::Anything => return Ok(()),
                Next::Payload(left) => {
                    let count = left.min(bytes.len() as u64);
                    bytes = &bytes[count as usize..];
                    self.next = if left == count { Next::Type } else { Next::Payload(left - count) };
                }
                _ => {
                    if let Some(number) = self.number(bytes[0]) {
                        self.next = self.after(number)?;
                    }
                    bytes = &bytes[1..];
                }
            }
        }
        Ok(())
    }

    /// One more byte of a number of variable length (RFC 9000, 16).
    fn number(&mut self, byte: u8) -> Option<u64> {
        if self.missing == 0 {
            self.missing = 1 << (byte >> 6);
            self.number = u64::from(byte & 0x3f);
        } else {
            self.number = self.number << 8 | u64::from(byte);
        }
        self.missing -= 1;
        (self.missing == 0).then_some(self.number)
    }

    fn after(&self, number: u64) -> Result<Next, TooLong> {
        match self.next {
            Next::StreamType if number == CONTROL => Ok(Next::Type),
            Next::Type => Ok(Next::Length { is_data: number == DATA }),
            Next::Length { is_data } if !is_data && number > self.longest => Err(TooLong),
            Next::Length { .. } if number == 0 => Ok(Next::Type),
            Next::Length { .. } => Ok(Next::Payload(number)),
            // QPACK's streams say nothing without a dynamic table, which is not offered, and others are not read.
            Next::StreamType | Next::Payload(_) | Next::Anything => Ok(Next::Anything),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number in its shortest form.
    fn number(value: u64) -> Vec<u8> {
        match value {
            0..0x40 => vec![value as u8],
            0x40..0x4000 => (value as u16 | 0x4000).to_be_bytes().to_vec(),
            0x4000..0x4000_0000 => (value as u32 | 0x8000_0000).to_be_bytes().to_vec(),
            _ => (value | 0xc000_0000_0000_0000).to_be_bytes().to_vec(),
        }
    }

    fn frame(kind: u64, length: u64) -> Vec<u8> {
        let mut bytes = number(kind);
        bytes.extend(number(length));
        bytes.resize(bytes.len() + length.min(200_000) as usize, 0xee);
        bytes
    }

    #[test]
    fn only_data_may_be_long_however_the_bytes_come() {
        let good =
            [frame(1, 1000), frame(DATA, 100_000), frame(DATA, 0), frame(0x21, 0), frame(1, 1000)].concat();
        let bad = [good.clone(), frame(1, 1001)].concat();
        let huge = [frame(0x21, 3), frame(0x40, u64::MAX >> 2)].concat();
        for piece in [1, 2, 7, 1200, usize::MAX] {
            let pass = |bytes: &[u8]| {
                let mut guard = FrameGuard::of_request(1000);
                bytes.chunks(piece.min(bytes.len())).try_for_each(|piece| guard.pass(piece))
            };
            assert_eq!(pass(&good), Ok(()), "in pieces of {piece}");
            assert_eq!(pass(&bad), Err(TooLong), "in pieces of {piece}");
            assert_eq!(pass(&huge), Err(TooLong), "in pieces of {piece}");
        }
    }

    #[test]
    fn a_length_is_refused_before_its_payload_has_come() {
        let mut guard = FrameGuard::of_request(1000);
        assert_eq!(guard.pass(&number(1)), Ok(()));
        assert_eq!(guard.pass(&number(1 << 20)), Err(TooLong));
    }

    #[test]
    fn of_unidirectional_streams_the_control_stream_has_frames() {
        let control = [number(CONTROL), frame(4, 10), frame(7, 2000)].concat();
        assert_eq!(FrameGuard::of_unidirectional(1000).pass(&control), Err(TooLong));
        let encoder = [number(2), vec![0x3f; 5000]].concat();
        assert_eq!(FrameGuard::of_unidirectional(1000).pass(&encoder), Ok(()));
    }
}
