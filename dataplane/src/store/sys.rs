//! The four questions to the kernel that the standard library has no words for.
//!
//! One function a call, plain values in and out, no decisions: `drive` and `format` decide.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

// _IOR(0x12, 114, size_t): bytes of a block device. The libc crate does not carry it.
const BLKGETSIZE64: libc::Ioctl =
    (2 << 30 | (size_of::<usize>() as u32) << 16 | 0x12 << 8 | 0x72) as libc::Ioctl;

/// Allocates the first `bytes` of a file and makes it that long.
pub(super) fn fallocate(file: &File, bytes: u64) -> io::Result<()> {
    let length = libc::off64_t::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed; the call takes no pointers.
        if unsafe { libc::fallocate64(file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Bytes of a block device.
pub(super) fn block_device_bytes(file: &File) -> io::Result<u64> {
    let mut bytes: u64 = 0;
    // SAFETY: the request writes one u64 to the pointer, which is that of a live, exclusive u64.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) } == 0 {
        Ok(bytes)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Bytes that an ordinary writer may still allocate in the file system of this file; `None` where the file
/// system does not count (some report a size of 0).
pub(super) fn available_bytes(file: &File) -> io::Result<Option<u64>> {
    // SAFETY: the structure is plain integers, for which all zeros is a value.
    let mut stat: libc::statvfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open while `file` is borrowed, and the call fills the structure behind a
    // pointer to a live, exclusive value of the type that it expects.
    if unsafe { libc::fstatvfs64(file.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((stat.f_blocks != 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// What alignment direct I/O on this file wants: `(of memory, of offset and length)` in bytes, `(0, 0)` if the
/// file does not support it. `None` where the kernel (before 6.1) or the file system does not tell.
pub(super) fn direct_alignment(file: &File) -> io::Result<Option<(u32, u32)>> {
    // SAFETY: the structure is plain integers, for which all zeros is a value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, which with AT_EMPTY_PATH means the descriptor itself, open while
    // `file` is borrowed; the call fills the structure behind a pointer to a live, exclusive value of its type.
    let code = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut stat)
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    let told = stat.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(told.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align)))
}
