//! Making a drive ours, and giving it back.
//!
//! `format` is the only thing in the program that writes to what was not ours before, so it asks three times:
//! does anybody use it, does it bear anybody's mark, does it hold anything at all. `force` answers the second
//! and third question, never the first. `wipe` clears superblocks that are ours and touches nothing else.
//!
//! Everything here goes through the page cache and ends with a flush: these commands run once.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::drive::{self, DriveError};
use super::segment::{Geometry, GeometryError, UNIT_BYTES};
use super::superblock::{self, COPY_OFFSETS, Identity, SUPERBLOCK_BYTES, Superblock, SuperblockError};
use super::usage::{self, Usage};
use super::{signature, sys};

/// What to format.
#[derive(Clone, Debug)]
pub struct FormatOptions {
    /// A block device, a file, or a file that is to be made.
    pub path: PathBuf,
    /// Bytes. Needed for a new or empty file; on a device at most what it has, all of it if absent.
    pub size: Option<u64>,
    /// Overwrite what is there. Does not apply to what is mounted or otherwise in use.
    pub force: bool,
    /// The node that the drive belongs to; a new identity if absent.
    pub node: Option<Identity>,
}

/// What was formatted.
#[derive(Clone, Debug)]
pub struct FormatReport {
    /// As given.
    pub path: PathBuf,
    /// Whether it is a block device.
    pub is_device: bool,
    /// Whether the file was made.
    pub is_new: bool,
    /// What `force` overwrote, if it was more than nothing.
    pub overwritten: Option<&'static str>,
    /// What the drive now says of itself.
    pub superblock: Superblock,
}

/// What [`wipe`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WipeReport {
    /// Our superblocks are gone.
    Cleared {
        /// The drive that it was, if a copy could still be read.
        drive: Option<Identity>,
        /// How many copies were there.
        copies: u8,
    },
    /// There was none of ours; nothing was written.
    NoneFound,
}

/// What [`inspect`] sees.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Bytes of the device or file.
    pub bytes: u64,
    /// Both superblock copies.
    pub copies: [Result<Superblock, SuperblockError>; 2],
    /// Another owner whose mark was found.
    pub foreign: Option<&'static str>,
    /// Who uses it.
    pub usage: Option<Usage>,
}

/// Why nothing was formatted or wiped.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// There is nothing at the path and no size to make a file of.
    #[error("{path} does not exist: give a size to have a file made there")]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A new file in the folder of devices would lie in memory.
    #[error(
        "{path} does not exist, and a file made among the devices would lie in memory: is the device's name right?"
    )]
    NoSuchDevice {
        /// The path.
        path: PathBuf,
    },
    /// A link to nothing, or to an empty file.
    #[error(
        "{path} is a symbolic link without a drive behind it: name the place where the file is to be made"
    )]
    IsLink {
        /// The path.
        path: PathBuf,
    },
    /// A folder, a pipe, a character device.
    #[error("{path} is neither a file nor a block device")]
    NotADrive {
        /// The path.
        path: PathBuf,
    },
    /// Mounted, swapped to, part of another device.
    #[error("{path} is {usage} (--force does not change this)")]
    InUse {
        /// The path.
        path: PathBuf,
        /// By whom.
        usage: Usage,
    },
    /// The kernel says that it is in use, but not by whom.
    #[error(
        "{path} is in use by a mount, a device or a process that cannot be seen from here (--force does not change this)"
    )]
    Busy {
        /// The path.
        path: PathBuf,
    },
    /// A running node has it.
    #[error("{path} is in use by another Forebay process: stop it first")]
    Locked {
        /// The path.
        path: PathBuf,
    },
    /// It is a Forebay drive already.
    #[error("{path} already is a Forebay drive; --force formats it anew, and what it keeps is lost")]
    AlreadyForebay {
        /// The path.
        path: PathBuf,
    },
    /// Somebody's mark.
    #[error("{path} holds {found}; if that is not needed, --force overwrites it")]
    Foreign {
        /// The path.
        path: PathBuf,
        /// Whose.
        found: &'static str,
    },
    /// Bytes without a mark that we know.
    #[error(
        "{path} is not blank, and what it holds is not known to us; if it is not needed, --force overwrites it"
    )]
    NotBlank {
        /// The path.
        path: PathBuf,
    },
    /// A file has a size of its own.
    #[error("{path} is a file of {found} bytes, not {asked}: leave the size out, or remove the file first")]
    SizeDiffers {
        /// The path.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// Bytes there.
        found: u64,
    },
    /// A device has less than asked for.
    #[error("{path} has {found} bytes, which is less than the {asked} asked for")]
    DeviceTooSmall {
        /// The path.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// Bytes there.
        found: u64,
    },
    /// The size cannot be divided into segments.
    #[error("dividing {path} into segments")]
    Geometry {
        /// The path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: GeometryError,
    },
    /// The file system is too full.
    #[error(
        "{path} needs {needed} bytes, but {available} bytes are free in its file system: give a smaller size or make room"
    )]
    NoSpace {
        /// The path.
        path: PathBuf,
        /// Bytes.
        needed: u64,
        /// Bytes.
        available: u64,
    },
    /// The system did not let us.
    #[error("{doing} {path}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
}

/// Formats a block device or a file, which is made and preallocated if it is not there.
///
/// # Errors
/// See [`FormatError`]. All refusals come before the first write.
pub fn format(options: &FormatOptions) -> Result<FormatReport, FormatError> {
    let path = &options.path;
    let Some(held) = Held::take(path)? else {
        let size = options.size.ok_or_else(|| FormatError::Missing { path: path.clone() })?;
        let superblock = create_file(path, size, options.node)?;
        return Ok(FormatReport {
            path: path.clone(),
            is_device: false,
            is_new: true,
            overwritten: None,
            superblock,
        });
    };

    let capacity = match options.size {
        Some(asked) if held.is_device && asked > held.bytes => {
            return Err(FormatError::DeviceTooSmall { path: path.clone(), asked, found: held.bytes });
        }
        Some(asked) if !held.is_device && asked != held.bytes && held.bytes != 0 => {
            return Err(FormatError::SizeDiffers { path: path.clone(), asked, found: held.bytes });
        }
        Some(asked) => asked,
        None if held.bytes == 0 => return Err(FormatError::Missing { path: path.clone() }),
        None => held.bytes,
    };
    let geometry = divide(path, capacity)?;
    let (head, tail) = held.read_ends()?;
    let overwritten = occupant(&head, &tail, held.bytes);
    match overwritten {
        Some(found) if !options.force => {
            let path = path.clone();
            return Err(match found {
                OURS => FormatError::AlreadyForebay { path },
                UNKNOWN => FormatError::NotBlank { path },
                found => FormatError::Foreign { path, found },
            });
        }
        _ => {}
    }

    if !held.is_device {
        preallocate(&held.file, path, geometry.capacity())?;
    }
    let superblock = write_new(&held.file, path, geometry, options.node)?;
    Ok(FormatReport { path: path.clone(), is_device: held.is_device, is_new: false, overwritten, superblock })
}

/// Clears our superblocks, so that the drive can be formatted anew or given away.
///
/// # Errors
/// If the drive is in use, or bears another owner's mark beside ours.
pub fn wipe(path: &Path) -> Result<WipeReport, FormatError> {
    let held = Held::take(path)?.ok_or_else(|| FormatError::Missing { path: path.to_owned() })?;
    let (head, _) = held.read_ends()?;
    let is_ours = |offset: u64| head.get(offset as usize..).is_some_and(superblock::has_magic);
    if !COPY_OFFSETS.into_iter().any(is_ours) {
        return Ok(WipeReport::NoneFound);
    }
    if let Some(found) = signature::find_in_head(&head) {
        return Err(FormatError::Foreign { path: path.to_owned(), found });
    }
    let drive = drive::decode_head(&head).into_iter().find_map(Result::ok).map(|superblock| superblock.drive);
    let mut copies = 0;
    for offset in COPY_OFFSETS.into_iter().filter(|&offset| is_ours(offset)) {
        held.file.write_all_at(&[0; SUPERBLOCK_BYTES], offset).map_err(io_error("wiping", path))?;
        copies += 1;
    }
    held.file.sync_all().map_err(io_error("flushing", path))?;
    Ok(WipeReport::Cleared { drive, copies })
}

/// Looks at a drive without taking or changing anything; also at one that a node is serving from.
///
/// # Errors
/// If it cannot be read.
pub fn inspect(path: &Path) -> Result<Inspection, FormatError> {
    let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => FormatError::Missing { path: path.to_owned() },
        _ => FormatError::Io { doing: "looking for", path: path.to_owned(), source },
    })?;
    let is_device = metadata.file_type().is_block_device();
    if !is_device && !metadata.is_file() {
        return Err(FormatError::NotADrive { path: path.to_owned() });
    }
    let file = File::open(path).map_err(io_error("opening", path))?;
    let bytes = drive::bytes_of(&file, is_device).map_err(io_error("measuring", path))?;
    let (head, tail) = read_ends(&file, bytes).map_err(io_error("reading", path))?;
    let copies = drive::decode_head(&head);
    // The end of a drive that is ours holds cached bytes, which may look like anything.
    let in_tail =
        || copies.iter().all(Result::is_err).then(|| signature::find_in_tail(&tail, bytes)).flatten();
    let foreign = signature::find_in_head(&head).or_else(in_tail);
    Ok(Inspection { bytes, foreign, usage: usage::of(path, &metadata), copies })
}

/// Makes, preallocates and formats a file at a path where there is none, or where there is an empty one. The
/// file gets its name only when it is complete, so a creation that is cut short leaves no half-made drive.
pub(super) fn create_file(path: &Path, size: u64, node: Option<Identity>) -> Result<Superblock, FormatError> {
    let geometry = divide(path, size)?;
    if path.starts_with("/dev") && !path.starts_with("/dev/shm") {
        return Err(FormatError::NoSuchDevice { path: path.to_owned() });
    }
    if std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        return Err(FormatError::IsLink { path: path.to_owned() });
    }
    let mut name =
        path.file_name().ok_or_else(|| FormatError::NotADrive { path: path.to_owned() })?.to_owned();
    name.push(".unfinished");
    let unfinished = path.with_file_name(name);

    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&unfinished);
    let file = file.map_err(io_error("making", &unfinished))?;
    // What lies there under this name is left over from a creation that was cut short, unless it is going on.
    lock(&file, path)?;
    let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let held = file.metadata().map_err(io_error("making", &unfinished))?;
    if std::fs::metadata(&unfinished).map(inode).ok() != Some(inode(held)) {
        // Whoever had the lock has finished the file and given it its name.
        return Err(FormatError::Locked { path: path.to_owned() });
    }
    let made = file
        .set_len(0)
        .map_err(io_error("making", &unfinished))
        .and_then(|()| preallocate(&file, path, geometry.capacity()))
        .and_then(|()| write_new(&file, path, geometry, node))
        .and_then(|superblock| publish(&unfinished, path).map(|()| superblock));
    if made.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(&unfinished);
    }
    made
}

/// Gives the finished file its name and makes that durable.
fn publish(unfinished: &Path, path: &Path) -> Result<(), FormatError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() != 0 => {
            return Err(FormatError::NotBlank { path: path.to_owned() });
        }
        _ => {}
    }
    std::fs::rename(unfinished, path).map_err(io_error("naming", path))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("flushing the folder of", path))
}

/// A device or file that is ours to write to, as far as other users go.
struct Held {
    path: PathBuf,
    file: File,
    bytes: u64,
    is_device: bool,
}

impl Held {
    /// `None` if there is nothing at the path.
    fn take(path: &Path) -> Result<Option<Self>, FormatError> {
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(FormatError::Io { doing: "looking for", path: path.to_owned(), source });
            }
        };
        let is_device = metadata.file_type().is_block_device();
        if !is_device && !metadata.is_file() {
            return Err(FormatError::NotADrive { path: path.to_owned() });
        }
        if let Some(usage) = usage::of(path, &metadata) {
            return Err(FormatError::InUse { path: path.to_owned(), usage });
        }
        let exclusive = if is_device { libc::O_EXCL } else { 0 };
        let opened = drive::patiently(|| {
            match OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(path) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => None,
                opened => Some(opened),
            }
        });
        let file = opened.ok_or_else(|| FormatError::Busy { path: path.to_owned() })?;
        let file = file.map_err(io_error("opening", path))?;
        lock(&file, path)?;
        let bytes = drive::bytes_of(&file, is_device).map_err(io_error("measuring", path))?;
        Ok(Some(Self { path: path.to_owned(), file, bytes, is_device }))
    }

    fn read_ends(&self) -> Result<(Vec<u8>, Vec<u8>), FormatError> {
        read_ends(&self.file, self.bytes).map_err(io_error("reading", &self.path))
    }
}

fn lock(file: &File, path: &Path) -> Result<(), FormatError> {
    drive::lock(file, path).map_err(|error| match error {
        DriveError::Io { doing, path, source } => FormatError::Io { doing, path, source },
        _ => FormatError::Locked { path: path.to_owned() },
    })
}

fn divide(path: &Path, capacity: u64) -> Result<Geometry, FormatError> {
    Geometry::for_capacity(capacity).map_err(|source| FormatError::Geometry { path: path.to_owned(), source })
}

const OURS: &str = "a Forebay drive";
const UNKNOWN: &str = "bytes of an unknown kind";

/// Whose drive it is, judged by its ends; `None` if it is blank.
fn occupant(head: &[u8], tail: &[u8], bytes: u64) -> Option<&'static str> {
    let foreign = signature::find_in_head(head);
    let is_ours =
        drive::decode_head(head).iter().any(|copy| !matches!(copy, Err(SuperblockError::NotForebay)));
    let unknown = (!signature::is_blank(head)).then_some(UNKNOWN);
    foreign.or(is_ours.then_some(OURS)).or_else(|| signature::find_in_tail(tail, bytes)).or(unknown)
}

fn read_ends(file: &File, bytes: u64) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let read = |from: u64, count: u64| {
        let mut buffer = vec![0; count as usize];
        file.read_exact_at(&mut buffer, from).map(|()| buffer)
    };
    let (head, tail) = (bytes.min(signature::HEAD_BYTES), bytes.min(signature::TAIL_BYTES));
    Ok((read(0, head)?, read(bytes - tail, tail)?))
}

/// Clears both ends, so that no other owner's mark survives, and writes the first superblock.
fn write_new(
    file: &File,
    path: &Path,
    geometry: Geometry,
    node: Option<Identity>,
) -> Result<Superblock, FormatError> {
    let fresh = || random_identity().map_err(io_error("naming", path));
    let superblock = Superblock {
        generation: 1,
        node: node.map_or_else(fresh, Ok)?,
        drive: fresh()?,
        geometry,
        sequence_floor: 1,
        formatted_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    };
    let tail_at = geometry.capacity() - signature::TAIL_BYTES;
    file.write_all_at(&vec![0; signature::HEAD_BYTES as usize], 0)
        .and_then(|()| file.write_all_at(&vec![0; signature::TAIL_BYTES as usize], tail_at))
        .and_then(|()| file.sync_all())
        .and_then(|()| drive::write_superblock(file, &superblock))
        .and_then(|()| file.sync_all())
        .map_err(io_error("formatting", path))?;
    Ok(superblock)
}

/// Allocates the file's blocks now, so that a full file system is found out here and not while serving.
fn preallocate(file: &File, path: &Path, bytes: u64) -> Result<(), FormatError> {
    let no_space = |available| FormatError::NoSpace { path: path.to_owned(), needed: bytes, available };
    let metadata = file.metadata().map_err(io_error("measuring", path))?;
    let allocated = metadata.blocks() * 512;
    let available = sys::available_bytes(file).map_err(io_error("measuring the file system of", path))?;
    if let Some(available) = available.filter(|&available| available < bytes.saturating_sub(allocated)) {
        return Err(no_space(available));
    }
    let done = match sys::fallocate(file, bytes) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            write_zeros(file, metadata.len(), bytes)
        }
        done => done,
    };
    done.map_err(|source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => no_space(available.unwrap_or(0)),
        _ => FormatError::Io { doing: "preallocating", path: path.to_owned(), source },
    })
}

/// What preallocation is where the file system has none: the bytes after `from` are written.
fn write_zeros(file: &File, from: u64, to: u64) -> io::Result<()> {
    let zeros = vec![0; 1 << 20];
    let mut at = from - from % u64::from(UNIT_BYTES);
    // The part of a block before `from` is the file's own.
    if at < from {
        let count = (at + u64::from(UNIT_BYTES)).min(to) - from;
        file.write_all_at(&zeros[..count as usize], from)?;
        at = from + count;
    }
    while at < to {
        let count = (to - at).min(zeros.len() as u64);
        file.write_all_at(&zeros[..count as usize], at)?;
        at += count;
    }
    Ok(())
}

fn random_identity() -> io::Result<Identity> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(Identity(bytes))
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FormatError {
    let path = path.to_owned();
    move |source| FormatError::Io { doing, path, source }
}
#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::store::drive::{Drive, DriveSpec};

    const MIB: u64 = 1 << 20;

    fn options(path: &Path, size: impl Into<Option<u64>>, force: bool) -> FormatOptions {
        FormatOptions { path: path.to_owned(), size: size.into(), force, node: None }
    }

    fn image(bytes: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    /// Runs a tool of the system on the image; false where there is none.
    fn run(tool: &str, arguments: &[&str], image: &Path) -> bool {
        let tool = ["/usr/sbin", "/sbin", "/usr/bin"].map(|folder| Path::new(folder).join(tool));
        let Some(tool) = tool.iter().find(|tool| tool.exists()) else { return false };
        let output = Command::new(tool).args(arguments).arg(image).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        true
    }

    fn refused_as(path: &Path) -> &'static str {
        let before = std::fs::read(path).unwrap();
        let error = format(&options(path, None, false)).unwrap_err();
        assert_eq!(std::fs::read(path).unwrap(), before, "a refusal writes nothing");
        assert!(error.to_string().contains("--force"), "{error}");
        match error {
            FormatError::Foreign { found, .. } => found,
            FormatError::NotBlank { .. } => UNKNOWN,
            FormatError::AlreadyForebay { .. } => OURS,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_blank_file_of_any_size_is_formatted_and_opens() {
        for bytes in [16 * MIB, 17 * MIB + 12_345] {
            let file = image(bytes);
            let report = format(&options(file.path(), None, false)).unwrap();
            assert!(!report.is_device && !report.is_new && report.overwritten.is_none());
            assert_eq!(report.superblock.geometry.capacity(), bytes - bytes % 4096);
            let spec = DriveSpec { path: file.path().to_owned(), size: None };
            let opened = Drive::open_or_create(&spec, None).unwrap();
            assert_eq!(opened.drive.superblock().drive, report.superblock.drive);
            assert_eq!(opened.sequences.start, 1);
        }
    }

    #[test]
    fn a_new_file_is_made_with_the_given_size_and_node() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        assert!(matches!(format(&options(&path, None, false)), Err(FormatError::Missing { .. })));
        let node = Some(Identity([5; 16]));
        let report = format(&FormatOptions { node, ..options(&path, 16 * MIB, false) }).unwrap();
        assert!(report.is_new);
        assert_eq!(
            (report.superblock.node, report.superblock.drive == Identity([5; 16])),
            (Identity([5; 16]), false)
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no unfinished file left");
    }

    #[test]
    fn what_a_creation_that_was_cut_short_left_is_used_up() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("drive.unfinished"), b"half").unwrap();
        let path = folder.path().join("drive");
        assert!(format(&options(&path, 16 * MIB, false)).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_systems_made_by_their_own_tools_are_named() {
        let file = image(32 * MIB);
        if run("mkfs.ext4", &["-q", "-F"], file.path()) {
            assert_eq!(refused_as(file.path()), "an ext2, ext3 or ext4 file system");
        }
        let file = image(32 * MIB);
        if run("mkswap", &[], file.path()) {
            assert_eq!(refused_as(file.path()), "swap space");
        }
    }

    #[test]
    fn marks_at_both_ends_and_unknown_bytes_are_refused() {
        for (at, bytes, found) in [
            (0, &b"XFSB"[..], "an XFS file system"),
            (512, b"EFI PART", "a GPT partition table"),
            (20 * MIB - 512, b"EFI PART", "a GPT partition table (its copy at the end)"),
            (510, b"\x55\xaa", "an MBR (DOS) partition table"),
            (0, b"\x7fELF", "a program (ELF)"),
            (777_777, b"?", UNKNOWN),
        ] {
            let file = image(20 * MIB);
            file.as_file().write_all_at(bytes, at).unwrap();
            assert_eq!(refused_as(file.path()), found);
        }
    }

    #[test]
    fn force_overwrites_every_mark() {
        let file = image(20 * MIB);
        for (at, bytes) in [(65_536 + 64, &b"_BHRfS_M"[..]), (20 * MIB - 512, b"EFI PART")] {
            file.as_file().write_all_at(bytes, at).unwrap();
        }
        let report = format(&options(file.path(), None, true)).unwrap();
        assert_eq!(report.overwritten, Some("a Btrfs file system"));
        let inspection = inspect(file.path()).unwrap();
        assert_eq!(inspection.copies[1], Ok(report.superblock));
        assert_eq!((inspection.foreign, inspection.usage, inspection.bytes), (None, None, 20 * MIB));
        let (head, tail) = read_ends(file.as_file(), 20 * MIB).unwrap();
        assert_eq!((signature::find_in_head(&head), signature::find_in_tail(&tail, 20 * MIB)), (None, None));
    }

    #[test]
    fn a_forebay_drive_is_formatted_anew_only_by_force_and_as_another_drive() {
        let file = image(16 * MIB);
        let first = format(&options(file.path(), None, false)).unwrap().superblock.drive;
        assert_eq!(refused_as(file.path()), OURS);
        file.as_file().write_all_at(b"rot", 100).unwrap();
        assert_eq!(refused_as(file.path()), OURS, "one copy is enough");
        assert_ne!(format(&options(file.path(), None, true)).unwrap().superblock.drive, first);
    }

    #[test]
    fn sizes_have_to_fit() {
        let file = image(20 * MIB);
        assert!(matches!(
            format(&options(file.path(), 16 * MIB, true)),
            Err(FormatError::SizeDiffers { .. })
        ));
        let file = image(15 * MIB);
        assert!(matches!(format(&options(file.path(), None, true)), Err(FormatError::Geometry { .. })));
        let file = image(0);
        assert!(matches!(format(&options(file.path(), None, false)), Err(FormatError::Missing { .. })));
        assert!(format(&options(file.path(), 16 * MIB, false)).is_ok());
    }

    #[test]
    fn a_drive_that_a_node_holds_is_neither_formatted_nor_wiped() {
        let file = image(16 * MIB);
        format(&options(file.path(), None, false)).unwrap();
        let spec = DriveSpec { path: file.path().to_owned(), size: None };
        let opened = Drive::open_or_create(&spec, None).unwrap();
        assert!(matches!(format(&options(file.path(), None, true)), Err(FormatError::Locked { .. })));
        assert!(matches!(wipe(file.path()), Err(FormatError::Locked { .. })));
        assert_eq!(
            inspect(file.path()).unwrap().copies,
            [Ok(opened.drive.superblock()), Ok(opened.drive.superblock())]
        );
    }

    #[test]
    fn wipe_clears_ours_and_only_ours() {
        let file = image(16 * MIB);
        assert_eq!(wipe(file.path()).unwrap(), WipeReport::NoneFound);
        let drive = format(&options(file.path(), None, false)).unwrap().superblock.drive;
        assert_eq!(wipe(file.path()).unwrap(), WipeReport::Cleared { drive: Some(drive), copies: 2 });
        assert_eq!(wipe(file.path()).unwrap(), WipeReport::NoneFound);
        assert!(format(&options(file.path(), None, false)).is_ok(), "blank again");

        file.as_file().write_all_at(b"SWAPSPACE2", 4086).unwrap();
        assert!(matches!(wipe(file.path()), Err(FormatError::Foreign { found: "swap space", .. })));
    }

    #[test]
    fn odd_targets_are_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(format(&options(folder.path(), None, true)), Err(FormatError::NotADrive { .. })));
        assert!(matches!(
            format(&options(Path::new("/dev/null"), None, true)),
            Err(FormatError::NotADrive { .. })
        ));
        let typo = Path::new("/dev/nvme99n99");
        assert!(matches!(format(&options(typo, 16 * MIB, false)), Err(FormatError::NoSuchDevice { .. })));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path().join("nowhere"), &link).unwrap();
        assert!(matches!(format(&options(&link, 16 * MIB, false)), Err(FormatError::IsLink { .. })));
    }

    #[test]
    fn zeros_are_written_where_nothing_can_be_preallocated() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(b"abc", 5000).unwrap();
        write_zeros(file.as_file(), 5003, 3 * MIB + 1).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(bytes.len() as u64, 3 * MIB + 1);
        assert_eq!(&bytes[5000..5003], b"abc");
        assert!(bytes[5003..].iter().all(|&byte| byte == 0));
    }
}
