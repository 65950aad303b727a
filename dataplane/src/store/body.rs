//! Memory that a drive writer may hand to the kernel.
//!
//! A body is lent to the writer as a whole: it moves into the write job, from there into the operation, and
//! comes out again with the completion. While the kernel has it nobody else can free or change it. How much of
//! it is already on the drive is kept beside the body, so that the rest of a short write is the same body, a
//! little further on.

use std::io;

use super::segment::UNIT_BYTES;

/// Bytes that can be written to a drive as they lie in memory.
///
/// # Safety
/// From the moment that the value is given away until it is dropped, `as_ptr()` and `padded_len()` return the
/// same values, also after the value has moved; the `padded_len()` bytes at `as_ptr()` are initialised, can be
/// read from any thread, and are changed by nobody. Both numbers are multiples of 4,096.
pub unsafe trait WriteBody: Send + 'static {
    /// Where the bytes begin: a multiple of 4,096.
    fn as_ptr(&self) -> *const u8;
    /// How many there are, padding included: a multiple of 4,096.
    fn padded_len(&self) -> usize;
}

/// The bytes of a body, for writers that take a slice.
pub(super) fn bytes(body: &dyn WriteBody) -> &[u8] {
    // SAFETY: the trait promises `padded_len` initialised bytes at `as_ptr` that nobody changes while the body
    // lives, and the slice borrows the body.
    unsafe { std::slice::from_raw_parts(body.as_ptr(), body.padded_len()) }
}

/// A body on its way to the drive through tokio-uring, from byte `from` to its end.
pub(super) struct Flight {
    pub(super) body: Box<dyn WriteBody>,
    /// At most `padded_len`.
    pub(super) from: usize,
}

// SAFETY: the memory belongs to the boxed body, which the runtime owns together with this value until the
// operation completes; by the promise of `WriteBody` its address and contents do not change meanwhile, also when
// the box moves. `from` is changed only between operations, while the writer holds the value.
unsafe impl tokio_uring::buf::IoBuf for Flight {
    fn stable_ptr(&self) -> *const u8 {
        bytes(&*self.body)[self.from..].as_ptr()
    }

    fn bytes_init(&self) -> usize {
        self.body.padded_len() - self.from
    }

    fn bytes_total(&self) -> usize {
        self.bytes_init()
    }
}

/// How far a write has come. Both engines ask it what to do next, so both treat a short write alike.
#[derive(Debug)]
pub(super) struct Progress {
    from: usize,
    length: usize,
    stalls_left: u8,
}

/// What to do after one attempt.
#[derive(Debug)]
pub(super) enum Next {
    /// Write again, from this byte of the body.
    From(usize),
    /// All bytes are written.
    Done,
    /// It will not succeed.
    Failed(io::Error),
}

impl Progress {
    pub(super) fn new(length: usize) -> Self {
        // EINTR and EAGAIN are rare and short writes rarer; one that repeats without getting on is a fault.
        Self { from: 0, length, stalls_left: 8 }
    }

    /// Takes the result of an attempt that began where the last answer said.
    pub(super) fn took(&mut self, result: io::Result<usize>) -> Next {
        let written = match result {
            Ok(written) => written,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => 0,
            Err(error) => return Next::Failed(error),
        };
        assert!(written <= self.length - self.from, "the kernel wrote more than it was given");
        // Direct I/O must begin at a multiple of the block: the part of a block is written once more.
        let on = if self.from + written == self.length {
            written
        } else {
            written - written % UNIT_BYTES as usize
        };
        self.from += on;
        if self.from == self.length {
            return Next::Done;
        }
        if on == 0 {
            if self.stalls_left == 0 {
                return Next::Failed(io::Error::new(
                    io::ErrorKind::WriteZero,
                    "the drive takes no more bytes of a write",
                ));
            }
            self.stalls_left -= 1;
        }
        Next::From(self.from)
    }
}

/// Zeroed memory that begins at a multiple of 4,096: superblocks, heads of drives, test bodies.
pub(crate) struct AlignedBytes {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBytes {
    /// `length` bytes, a multiple of 4,096.
    pub(crate) fn zeroed(length: usize) -> Self {
        let unit = UNIT_BYTES as usize;
        assert!(length.is_multiple_of(unit));
        let memory = vec![0; length + unit];
        let start = memory.as_ptr().align_offset(unit);
        Self { memory, start, length }
    }
}

impl std::ops::Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }
}

impl std::ops::DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

// SAFETY: the vector is never resized, so its heap memory stays where it is when the value moves; it is zeroed
// when made and can be changed only through a unique reference, which nobody has once the value is given away.
// `zeroed` sees to both multiples.
unsafe impl WriteBody for AlignedBytes {
    fn as_ptr(&self) -> *const u8 {
        (**self).as_ptr()
    }

    fn padded_len(&self) -> usize {
        self.length
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn interrupted() -> io::Error {
        io::ErrorKind::Interrupted.into()
    }

    #[test]
    fn a_whole_write_is_done() {
        assert!(matches!(Progress::new(8192).took(Ok(8192)), Next::Done));
    }

    #[test]
    fn a_short_write_goes_on_at_the_block_where_it_stopped() {
        let mut progress = Progress::new(16_384);
        assert!(matches!(progress.took(Ok(4608)), Next::From(4096)));
        assert!(matches!(progress.took(Err(interrupted())), Next::From(4096)));
        assert!(matches!(progress.took(Ok(12_288)), Next::Done));
    }

    #[test]
    fn a_write_that_never_gets_on_fails() {
        let mut progress = Progress::new(8192);
        for _ in 0..8 {
            assert!(matches!(progress.took(Ok(512)), Next::From(0)));
        }
        let Next::Failed(error) = progress.took(Ok(0)) else { panic!() };
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn an_error_of_the_drive_fails_at_once() {
        let error = io::Error::from_raw_os_error(libc::EIO);
        assert!(matches!(Progress::new(8192).took(Err(error)), Next::Failed(_)));
    }

    #[test]
    fn a_flight_shows_the_kernel_the_rest_of_its_body() {
        use tokio_uring::buf::IoBuf;
        let mut body = AlignedBytes::zeroed(8192);
        body[4096] = 7;
        let whole = body.as_ptr();
        let flight = Flight { body: Box::new(body), from: 4096 };
        let moved = [flight];
        assert_eq!(moved[0].stable_ptr(), whole.wrapping_add(4096));
        assert_eq!((moved[0].bytes_init(), moved[0].bytes_total()), (4096, 4096));
        assert_eq!(bytes(&*moved[0].body)[4096], 7);
    }

    proptest! {
        /// Whatever counts come back, every byte is written, each attempt begins aligned, and it ends.
        #[test]
        fn any_short_counts_write_every_byte(units in 1usize..64, counts in prop::collection::vec(1usize..100_000, 0..40)) {
            let length = units * UNIT_BYTES as usize;
            let mut written = vec![false; length];
            let (mut progress, mut from) = (Progress::new(length), 0);
            let mut counts = counts.into_iter();
            for _ in 0..1000 {
                let count = counts.next().unwrap_or(length).min(length - from);
                written[from..from + count].fill(true);
                match progress.took(Ok(count)) {
                    Next::Done => {
                        prop_assert!(written.iter().all(|&byte| byte));
                        return Ok(());
                    }
                    Next::From(next) => {
                        prop_assert!(next.is_multiple_of(UNIT_BYTES as usize) && written[..next].iter().all(|&byte| byte));
                        from = next;
                    }
                    Next::Failed(_) => return Ok(()),
                }
            }
            prop_assert!(false, "did not end");
        }
    }
}
