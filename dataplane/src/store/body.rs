//! Memory that a drive writer may hand to the kernel.
//!
//! A body is lent to the writer as a whole: it moves into the write job, from there into the operation, and
//! comes out again with the completion. While the kernel has it nobody else can free it. How much of it is
//! already on the drive is kept beside the memory, so that the rest of a short write is the same body, a little
//! further on.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::segment::UNIT_BYTES;
use crate::arena::Lease;

/// Bytes that can be written to a drive as they lie in memory.
///
/// They should not change any more: what is on the drive otherwise is some mixture of old and new.
///
/// # Safety
/// `as_ptr()` is always the same, also after the value has moved, and is a multiple of 4,096. Whatever
/// `padded_len()` has once returned, a multiple of 4,096, so many bytes at `as_ptr()` are initialised and can be
/// read from any thread until the value is dropped.
pub unsafe trait WriteBody: Send + 'static {
    /// Where the bytes begin.
    fn as_ptr(&self) -> *const u8;
    /// How many there are, padding included.
    fn padded_len(&self) -> usize;
}

// SAFETY: a lease is a counted hold on a slot of the arena, which lies at a multiple of 4,096, does not move, and is
// neither lent to another nor unmapped while any hold exists. Its memory was initialised when it was mapped. Its
// padded length only grows, and never beyond the slot, whose capacity is a multiple of 4,096.
unsafe impl WriteBody for Lease {
    fn as_ptr(&self) -> *const u8 {
        self.as_ptr()
    }

    fn padded_len(&self) -> usize {
        self.padded_len()
    }
}

/// A body on its way to the drive, from byte `from` to the length that it had when it was offered.
pub(super) struct Body {
    memory: Box<dyn WriteBody>,
    /// Asked once, so that every attempt at a write means the same bytes.
    length: usize,
    from: usize,
}

impl Body {
    pub(super) fn new(memory: impl WriteBody) -> Self {
        let length = memory.padded_len();
        assert!(
            length.is_multiple_of(UNIT_BYTES as usize)
                && memory.as_ptr().addr().is_multiple_of(UNIT_BYTES as usize)
        );
        Self { memory: Box::new(memory), length, from: 0 }
    }

    /// Bytes of the whole body, padding included.
    pub(super) fn len(&self) -> usize {
        self.length
    }

    /// Where the next attempt begins.
    pub(super) fn from(&self) -> usize {
        self.from
    }

    pub(super) fn set_from(&mut self, from: usize) {
        assert!(from <= self.length);
        self.from = from;
    }

    /// Tries to write the rest at byte `at` of the file, and returns how much of it was written.
    pub(super) fn write_at(&self, file: &File, at: u64) -> io::Result<usize> {
        let offset = libc::off64_t::try_from(at).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let (pointer, count) = (self.pointer(), self.length - self.from);
        // SAFETY: the descriptor is open while `file` is borrowed. The body promises `length` readable bytes, of
        // which these are the last `length - from`; it lives until after the call, and no reference to the bytes is made.
        let written = unsafe { libc::pwrite64(file.as_raw_fd(), pointer.cast(), count, offset) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    fn pointer(&self) -> *const u8 {
        self.memory.as_ptr().wrapping_add(self.from)
    }
}

// SAFETY: the memory belongs to the boxed body, which the runtime owns together with this value until the
// operation completes; by the promise of `WriteBody` its address does not change meanwhile, also when the
// box moves, and `length` bytes of it stay readable. `from` is changed only between operations, while the writer
// holds the value.
unsafe impl tokio_uring::buf::IoBuf for Body {
    fn stable_ptr(&self) -> *const u8 {
        self.pointer()
    }

    fn bytes_init(&self) -> usize {
        self.length - self.from
    }

    fn bytes_total(&self) -> usize {
        self.length - self.from
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
            Err(error) if is_passing(&error) => 0,
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

/// Errors that say "not now" rather than "no". Some kernels cancel an operation when a signal comes.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ECANCELED))
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

// SAFETY: the vector is never resized, so its heap memory stays where it is when the value moves, and it is zeroed
// when made. `zeroed` sees to both multiples.
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
        io::Error::from_raw_os_error(libc::EINTR)
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
    fn the_kernel_is_shown_the_rest_of_a_body_wherever_the_body_moves() {
        use tokio_uring::buf::IoBuf;
        let memory = AlignedBytes::zeroed(8192);
        let start = memory.as_ptr();
        let mut body = Body::new(memory);
        body.set_from(4096);
        let moved = [body];
        assert_eq!(moved[0].stable_ptr(), start.wrapping_add(4096));
        assert_eq!((moved[0].bytes_init(), moved[0].bytes_total()), (4096, 4096));
    }

    #[test]
    fn the_rest_of_a_body_is_written_where_it_belongs() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::tempfile().unwrap();
        let mut memory = AlignedBytes::zeroed(8192);
        memory[..4096].fill(1);
        memory[4096..].fill(2);
        let mut body = Body::new(memory);
        assert_eq!(body.write_at(&file, 0).unwrap(), 8192);
        body.set_from(4096);
        assert_eq!(body.write_at(&file, 8192).unwrap(), 4096);
        let mut bytes = vec![0; 12_288];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes[..4096].iter().all(|&byte| byte == 1) && bytes[4096..].iter().all(|&byte| byte == 2));
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
