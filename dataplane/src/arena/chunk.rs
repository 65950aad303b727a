//! The memory behind the arena: huge pages of a file in memory where the kernel grants them, anonymous ones else.
//!
//! Only a file has a descriptor from which the kernel can send pages *by reference*. Bytes that left that way are
//! still read when a slow peer asks for them, long after the send has returned, so memory that was lent to the
//! network is never written again: its whole 2 MiB page is punched out of the file (the network keeps the old one)
//! and the next tenant finds a new page in its place. Punching less than a whole huge page would zero it in place.
//!
//! A ring's table of registered buffers keeps pointing to the old page. [`Chunk::renewal`] says since when the page
//! is another one, so that nobody reads from a drive into memory that is no longer ours.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use memmap2::{Advice, MmapMut, MmapOptions};

use super::{PAGE_BYTES, POISON, UNIT_BYTES};

/// Makes a huge page of what is mapped, whatever the host's settings for shared memory say (Linux 6.1). Not yet
/// among the names of the crate.
const MADV_COLLAPSE: libc::c_int = 25;

pub(super) struct Chunk {
    pub(super) base: NonNull<u8>,
    pub(super) bytes: usize,
    pub(super) slots: Box<[SlotMeta]>,
    /// For each page the arena's count of renewals when it was last renewed.
    renewals: Box<[AtomicU64]>,
    /// For each page of the file whether it is one huge page. To send from small ones costs half as much again.
    huge: Box<[AtomicBool]>,
    /// The file in memory that is mapped at `base`.
    file: Option<File>,
    /// Owns the addresses; `base` points into it.
    _map: MmapMut,
}

// SAFETY: `base` points into the mapping that the chunk owns for ever; all access to the bytes behind it goes
// through leases, which keep one writer and readers apart by the watermark in `SlotMeta`.
unsafe impl Send for Chunk {}
// SAFETY: as above; the shared parts of `Chunk` itself are atomics.
unsafe impl Sync for Chunk {}

/// One per 4 KiB unit; a slot uses that of its first unit.
#[derive(Default)]
pub(super) struct SlotMeta {
    pub(super) holds: AtomicU32,
    pub(super) filled: AtomicU32,
    pub(super) touched: AtomicU8,
    /// Whether the network may still read these bytes after the last hold is gone.
    pub(super) lent: AtomicBool,
}

impl Chunk {
    /// Memory of `bytes`, a multiple of [`PAGE_BYTES`], all of it there.
    pub(super) fn map(bytes: usize) -> io::Result<Self> {
        // One page more than asked, so that the first page can be aligned for a huge page.
        let mut map = MmapOptions::new().len(bytes + PAGE_BYTES).map_anon()?;
        let skip = map.as_ptr().align_offset(PAGE_BYTES);
        let base = NonNull::new(map[skip..].as_mut_ptr()).expect("a mapping is not at address zero");
        let file = match map_file(base, bytes) {
            Ok(file) => Some(file),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "no huge pages in a file in memory (Linux 6.1): hot bytes are copied to the network"
                );
                None
            }
        };
        // Refused where the kernel has no huge pages: ordinary pages then.
        let _ = map.advise_range(Advice::HugePage, skip, bytes);
        // A child process gets no copy: pages that the kernel has pinned must not be duplicated on write.
        let _ = map.advise_range(Advice::DontFork, skip, bytes);
        let huge: Box<[_]> = (0..bytes / PAGE_BYTES).map(|_| AtomicBool::new(false)).collect();
        if file.is_some() {
            for (page, is_huge) in (skip..skip + bytes).step_by(PAGE_BYTES).zip(&huge) {
                is_huge.store(populate(NonNull::from(&mut map[page])), Ordering::Relaxed);
            }
        } else if map.advise_range(Advice::PopulateWrite, skip, bytes).is_err() {
            // Before 5.14: touch every page, so that no page fault meets the data path.
            for offset in (skip..skip + bytes).step_by(UNIT_BYTES) {
                map[offset] = 0;
            }
        }
        let slots = (0..bytes / UNIT_BYTES).map(|_| SlotMeta::default()).collect();
        let renewals = (0..bytes / PAGE_BYTES).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { base, bytes, slots, renewals, huge, file, _map: map })
    }

    /// Where the kernel finds the bytes of this chunk by their offset, if it does.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// When this page was last renewed, in the arena's count.
    pub(super) fn renewal(&self, page: usize) -> u64 {
        self.renewals[page].load(Ordering::Acquire)
    }

    /// Pages renewed after `renewal`.
    pub(super) fn renewed_since(&self, renewal: u64) -> usize {
        (0..self.renewals.len()).filter(|page| self.renewal(*page) > renewal).count()
    }

    /// How many pages of the file are huge ones.
    pub(super) fn pages_huge(&self) -> usize {
        self.huge.iter().filter(|is_huge| is_huge.load(Ordering::Relaxed)).count()
    }

    /// Notes that a page is another one; before anybody gets a piece of it.
    pub(super) fn note_renewal(&self, page: usize, renewal: u64) {
        self.renewals[page].store(renewal, Ordering::Release);
    }

    /// Puts new memory in the place of a page that nobody holds, and leaves the old one to the network. About
    /// half a millisecond.
    ///
    /// # Errors
    /// The kernel did not take the page away. It must not be used again.
    pub(super) fn renew(&self, page: usize) -> io::Result<()> {
        let file =
            self.file.as_ref().ok_or_else(|| io::Error::other("only a file's pages can be renewed"))?;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, len) = ((page * PAGE_BYTES) as libc::off_t, PAGE_BYTES as libc::off_t);
        // SAFETY: no pointers; the file is ours alone and nobody holds a lease on this page, so the bytes that
        // disappear from the mapping are nobody's.
        while unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } != 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        // SAFETY: the page lies inside the mapping.
        let base = unsafe { self.base.add(page * PAGE_BYTES) };
        self.huge[page].store(populate(base), Ordering::Relaxed);
        if cfg!(debug_assertions) {
            // SAFETY: a whole mapped page that nobody holds.
            unsafe { base.as_ptr().write_bytes(POISON, PAGE_BYTES) };
        }
        Ok(())
    }
}

/// Maps a new file in memory over the reserved addresses, if the kernel makes huge pages of it.
fn map_file(base: NonNull<u8>, bytes: usize) -> io::Result<File> {
    // SAFETY: the name is a constant; the result is checked before it is owned.
    let fd = unsafe { libc::memfd_create(c"forebay-arena".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes as u64)?;
    replace(base, bytes, libc::MAP_SHARED, fd)?;
    // SAFETY: the first page of the mapping just made.
    let collapsed = unsafe {
        base.as_ptr().write_volatile(0);
        libc::madvise(base.as_ptr().cast(), PAGE_BYTES, MADV_COLLAPSE)
    };
    let error = io::Error::last_os_error();
    // Any other refusal than of the request itself may pass: no huge page is free at this moment.
    if collapsed != 0 && error.raw_os_error() == Some(libc::EINVAL) {
        replace(base, bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        return Err(error);
    }
    Ok(file)
}

/// Puts another mapping in the place of reserved addresses that nobody uses yet.
fn replace(base: NonNull<u8>, bytes: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller reserved these addresses, holds no reference into them, and keeps the mapping that
    // owns them; replacing their pages by others of the same protection changes nothing for it.
    let mapped =
        unsafe { libc::mmap(base.as_ptr().cast(), bytes, protection, flags | libc::MAP_FIXED, fd, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Brings the memory of one page of a file: one huge page (true), or as many small ones as it takes.
fn populate(base: NonNull<u8>) -> bool {
    // SAFETY: the page is mapped, writable, and nobody else's: it is new, or was just renewed.
    unsafe {
        base.as_ptr().write_volatile(0);
        let is_huge = libc::madvise(base.as_ptr().cast(), PAGE_BYTES, MADV_COLLAPSE) == 0;
        if !is_huge {
            libc::madvise(base.as_ptr().cast(), PAGE_BYTES, libc::MADV_POPULATE_WRITE);
        }
        is_huge
    }
}
