//! An open drive: a block device or a preallocated file that bears our superblock and is locked to us.
//!
//! `serve` comes through [`Drive::open_or_create`]. It writes to nothing that does not already have a whole
//! superblock of ours, except to a path that did not exist before (or is an empty file) and was given a size.
//! Opening takes the lock, repairs a spoiled superblock copy, and reserves the sequences of this run.
//!
//! Direct I/O is asked for and, where a file system refuses it, done without, with a note for the operator. What
//! is read and written after opening is the business of `writer` and of the workers.

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::body::AlignedBytes;
use super::format::{self, FormatError};
use super::segment::{Geometry, UNIT_BYTES};
use super::superblock::{self, COPY_OFFSETS, Identity, SUPERBLOCK_BYTES, Superblock, SuperblockError};
use super::usage::{self, Usage};
use super::{signature, sys};

/// A drive as the operator names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveSpec {
    /// A block device, a file, or a file that is to be made.
    pub path: PathBuf,
    /// Bytes; needed to make a file, checked against what is there otherwise.
    pub size: Option<u64>,
}

impl DriveSpec {
    /// The size in bytes of the file that opening this drive will make, so that it can be told beforehand;
    /// `None` if nothing will be made.
    pub fn creates(&self) -> Option<u64> {
        let absent = match std::fs::metadata(&self.path) {
            Ok(metadata) => metadata.is_file() && metadata.len() == 0,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        self.size.filter(|_| absent)
    }
}

/// Something about an opened drive that the operator should read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriveNote {
    /// The path was new: a preallocated file of this many bytes was made and formatted.
    Created {
        /// The new file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
    /// Direct I/O is refused; reads and writes go through the page cache.
    Buffered {
        /// The drive.
        path: PathBuf,
        /// Who refused.
        reason: String,
    },
    /// One superblock copy was spoiled and has been written anew from the other one.
    Repaired {
        /// The drive.
        path: PathBuf,
        /// What was wrong with the copy.
        why: SuperblockError,
    },
}

impl fmt::Display for DriveNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Created { path, bytes } => {
                write!(f, "drive {}: made a file of {bytes} bytes", path.display())
            }
            Self::Buffered { path, reason } => write!(
                f,
                "drive {}: no direct I/O ({reason}): every byte passes through the page cache, which costs memory \
                 and speed; use a file on ext4 or XFS, or a device",
                path.display()
            ),
            Self::Repaired { path, why } => {
                write!(f, "drive {}: repaired from its other copy: {why}", path.display())
            }
        }
    }
}

/// Why a drive could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// There is nothing at the path and no size to make a file of.
    #[error("drive {path} does not exist: give a size and it is made, as in path={path},size=100GiB")]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// An empty file and no size to fill it to.
    #[error(
        "drive {path} is an empty file: give a size and it is preallocated, as in path={path},size=100GiB"
    )]
    Empty {
        /// The path.
        path: PathBuf,
    },
    /// A folder, a pipe, a character device.
    #[error("drive {path} is neither a file nor a block device")]
    NotADrive {
        /// The path.
        path: PathBuf,
    },
    /// The file could not be made.
    #[error("making the drive file")]
    Create {
        /// Why.
        #[source]
        source: FormatError,
    },
    /// The system did not let us.
    #[error("{doing} drive {path}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The drive.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// A block device that is mounted, or that another device is built on.
    #[error("drive {path} is {usage}")]
    InUse {
        /// The device.
        path: PathBuf,
        /// By whom.
        usage: Usage,
    },
    /// A block device that somebody has for himself: another node, or a mount that cannot be seen from here.
    #[error("drive {path} is in use by another process or mount: each node needs devices of its own")]
    Busy {
        /// The device.
        path: PathBuf,
    },
    /// Another process has the lock.
    #[error("drive {path} is in use by another Forebay process: each node needs drives of its own")]
    Locked {
        /// The drive.
        path: PathBuf,
    },
    /// Somebody else's bytes.
    #[error("drive {path} has no Forebay superblock, so nothing was written to it{}; if what it holds is not needed, run: forebay-node format {}", holds(*.found), path.display())]
    NotForebay {
        /// The drive.
        path: PathBuf,
        /// Whose it seems to be.
        found: Option<&'static str>,
    },
    /// One of our superblocks beside another owner's mark.
    #[error("drive {path} was formatted for Forebay, but now bears {found}: nothing was written to it; if that is not needed, run: forebay-node format --force {}", path.display())]
    Foreign {
        /// The drive.
        path: PathBuf,
        /// Whose it seems to be.
        found: &'static str,
    },
    /// Our superblock, but not one that we can use.
    #[error("reading the superblock of drive {path}; if its contents are not needed, run: forebay-node format --force {}", path.display())]
    Superblock {
        /// The drive.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: SuperblockError,
    },
    /// The size asked for is not the size formatted.
    #[error("drive {path} was formatted with {found} bytes, not {asked}: leave the size out, or change it with: forebay-node wipe {0}, then format it anew", path.display())]
    SizeDiffers {
        /// The drive.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// Bytes formatted.
        found: u64,
    },
    /// The end of the drive is missing.
    #[error("drive {path} has {found} bytes, but was formatted with {formatted}: it was cut; restore its size, or run: forebay-node format --force {}", path.display())]
    Cut {
        /// The drive.
        path: PathBuf,
        /// Bytes there.
        found: u64,
        /// Bytes formatted.
        formatted: u64,
    },
    /// Every sequence has been used.
    #[error("drive {path} has used all its segment numbers: run: forebay-node format --force {}", path.display())]
    Exhausted {
        /// The drive.
        path: PathBuf,
    },
}

fn holds(found: Option<&'static str>) -> String {
    found.map(|owner| format!(" (it holds {owner})")).unwrap_or_default()
}

/// What [`Drive::open_or_create`] hands over.
#[derive(Debug)]
pub struct Opened {
    /// The drive, locked to this process.
    pub drive: Drive,
    /// The segment sequences that this run may use without asking again.
    pub(super) sequences: Range<u32>,
    /// What the operator should know.
    pub notes: Vec<DriveNote>,
}

/// An open, locked drive. Dropping it gives the lock back.
#[derive(Debug)]
pub struct Drive {
    path: PathBuf,
    file: File,
    is_direct: bool,
    superblock: Mutex<Superblock>,
}

impl Drive {
    /// Opens the drive; makes and formats it first if the path is new and a size is given. A file that is made
    /// gets the identity `node`, or one of its own.
    ///
    /// # Errors
    /// See [`DriveError`]. Where one is returned nothing has been written to what was there before.
    pub fn open_or_create(spec: &DriveSpec, node: Option<Identity>) -> Result<Opened, DriveError> {
        let path = spec.path.clone();
        let mut notes = Vec::new();
        if let Some(bytes) = spec.creates() {
            let superblock =
                format::create_file(&path, bytes, node).map_err(|source| DriveError::Create { source })?;
            notes.push(DriveNote::Created { path: path.clone(), bytes: superblock.geometry.capacity() });
        }
        let metadata = match std::fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DriveError::Missing { path });
            }
            Err(source) => return Err(DriveError::Io { doing: "looking for", path, source }),
        };
        let is_device = metadata.file_type().is_block_device();
        if !is_device && !metadata.is_file() {
            return Err(DriveError::NotADrive { path });
        }
        if metadata.is_file() && metadata.len() == 0 {
            return Err(DriveError::Empty { path });
        }

        if is_device && let Some(usage) = usage::of(&path, &metadata) {
            return Err(DriveError::InUse { path, usage });
        }
        let opened = patiently(|| match open(&path, is_device) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => None,
            opened => Some(opened),
        });
        let Some(opened) = opened else { return Err(DriveError::Busy { path }) };
        let (file, refused) =
            opened.map_err(|source| DriveError::Io { doing: "opening", path: path.clone(), source })?;
        if let Some(reason) = &refused {
            notes.push(DriveNote::Buffered { path: path.clone(), reason: reason.clone() });
        }
        lock(&file, &path)?;

        let chosen = read_superblock(&file, &path)?;
        let superblock = chosen.superblock;
        let found = bytes_of(&file, is_device).map_err(|source| DriveError::Io {
            doing: "measuring",
            path: path.clone(),
            source,
        })?;
        check_size(spec, superblock.geometry, found)?;
        if let Some((_, why)) = chosen.spoiled {
            notes.push(DriveNote::Repaired { path: path.clone(), why });
        }

        let drive = Self { path, file, is_direct: refused.is_none(), superblock: Mutex::new(superblock) };
        let sequences = drive.reserve()?;
        Ok(Opened { drive, sequences, notes })
    }

    /// The path as the operator gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, opened for direct reads and writes if [`is_direct`](Self::is_direct).
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether reads and writes bypass the page cache and must be aligned to 4,096 bytes.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// How the drive is divided.
    pub fn geometry(&self) -> Geometry {
        self.superblock().geometry
    }

    /// What the drive says of itself at this moment.
    pub fn superblock(&self) -> Superblock {
        *self.superblock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the next sequences for this run. They may be used once this has returned: both copies
    /// of a superblock with a floor above them are on the drive by then.
    pub(super) fn reserve(&self) -> Result<Range<u32>, DriveError> {
        let floor = self.superblock().sequence_floor;
        let end = floor.saturating_add(SEQUENCES_RESERVED);
        if floor == end {
            return Err(DriveError::Exhausted { path: self.path.clone() });
        }
        self.set_floor(end)?;
        Ok(floor..end)
    }

    /// Puts another file under the drive, for tests of drives that fail.
    #[cfg(test)]
    pub(super) fn replace_file(&mut self, file: File) {
        self.file = file;
    }

    /// Gives back what was reserved from `floor` on and not used.
    pub(super) fn set_floor(&self, floor: u32) -> Result<(), DriveError> {
        let mut held = self.superblock.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Superblock { generation: held.generation + 1, sequence_floor: floor, ..*held };
        write_superblock(&self.file, &next).map_err(|source| DriveError::Io {
            doing: "writing the superblock of",
            path: self.path.clone(),
            source,
        })?;
        *held = next;
        Ok(())
    }
}

// A superblock write every 4,096 segments (256 GiB of writes at 64 MiB a segment); a run that is killed wastes at
// most so many of 2^32, so that a million of them are needed to use up a drive.
const SEQUENCES_RESERVED: u32 = 4096;

// A ring is torn down by the kernel a little after its process is gone, or its runtime dropped, and holds the drive
// until then.
const PATIENCE_TRIES: u32 = 40;
const PATIENCE_PAUSE: Duration = Duration::from_millis(50);

/// Asks again and again, for two seconds, for what an earlier holder may be about to let go.
pub(super) fn patiently<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..PATIENCE_TRIES {
        let answer = ask();
        if answer.is_some() {
            return answer;
        }
        std::thread::sleep(PATIENCE_PAUSE);
    }
    None
}

/// Takes the lock that keeps other Forebay processes away.
pub(super) fn lock(file: &File, path: &Path) -> Result<(), DriveError> {
    let answer = patiently(|| match file.try_lock() {
        Ok(()) => Some(Ok(())),
        Err(TryLockError::WouldBlock) => None,
        Err(TryLockError::Error(source)) => Some(Err(source)),
    });
    match answer {
        Some(Ok(())) => Ok(()),
        Some(Err(source)) => Err(DriveError::Io { doing: "locking", path: path.to_owned(), source }),
        None => Err(DriveError::Locked { path: path.to_owned() }),
    }
}

/// Bytes of an open file or block device.
pub(super) fn bytes_of(file: &File, is_device: bool) -> io::Result<u64> {
    if is_device { sys::block_device_bytes(file) } else { Ok(file.metadata()?.len()) }
}

/// Writes both copies, each flushed before the other is touched.
pub(super) fn write_superblock(file: &File, superblock: &Superblock) -> io::Result<()> {
    let mut block = AlignedBytes::zeroed(SUPERBLOCK_BYTES);
    for (copy, offset) in (0..).zip(COPY_OFFSETS) {
        block.copy_from_slice(&superblock.encode(copy));
        file.write_all_at(&block, offset)?;
        file.sync_data()?;
    }
    Ok(())
}

/// Both copies as they lie in the head of a drive.
pub(super) fn decode_head(head: &[u8]) -> [Result<Superblock, SuperblockError>; 2] {
    [0u8, 1].map(|copy| {
        let at = COPY_OFFSETS[usize::from(copy)] as usize;
        let bytes = head.get(at..at + SUPERBLOCK_BYTES).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(Err(SuperblockError::NotForebay), |bytes| Superblock::decode(bytes, copy))
    })
}

/// Opens for reading and writing, direct if that works; otherwise also returns why it does not.
fn open(path: &Path, is_device: bool) -> io::Result<(File, Option<String>)> {
    // On a block device O_EXCL means: not mounted, not part of another device, nobody else so.
    let exclusive = if is_device { libc::O_EXCL } else { 0 };
    let with = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    let reason = match with(libc::O_DIRECT | exclusive) {
        Ok(file) => match refuses_direct(&file)? {
            None => return Ok((file, None)),
            Some(reason) => reason,
        },
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            "the file system does not open files so".to_owned()
        }
        Err(error) => return Err(error),
    };
    Ok((with(exclusive)?, Some(reason)))
}

fn refuses_direct(file: &File) -> io::Result<Option<String>> {
    if let Some((memory, offset)) = sys::direct_alignment(file)? {
        if (memory, offset) == (0, 0) {
            return Ok(Some("the file system says that this file cannot".to_owned()));
        }
        if memory.max(offset) > UNIT_BYTES {
            return Ok(Some(format!(
                "it wants alignment to {} bytes, we align to {UNIT_BYTES}",
                memory.max(offset)
            )));
        }
    }
    match file.read_at(&mut AlignedBytes::zeroed(UNIT_BYTES as usize), 0) {
        Ok(_) => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Ok(Some("an aligned read is refused".to_owned()))
        }
        Err(error) => Err(error),
    }
}

/// Reads the head and decides whether the drive is ours.
fn read_superblock(file: &File, path: &Path) -> Result<superblock::Chosen, DriveError> {
    let head = read_head(file).map_err(|source| DriveError::Io {
        doing: "reading",
        path: path.to_owned(),
        source,
    })?;
    let [first, second] = decode_head(&head);
    // Looked for even where both copies are whole: before the first segment there is nothing of ours but
    // superblocks and zeros, so a mark there means that somebody else came after us.
    let found = signature::find_in_head(&head);
    match (superblock::choose(first, second), found) {
        (Err(SuperblockError::NotForebay), found) => {
            Err(DriveError::NotForebay { path: path.to_owned(), found })
        }
        (_, Some(found)) => Err(DriveError::Foreign { path: path.to_owned(), found }),
        (Err(source), None) => Err(DriveError::Superblock { path: path.to_owned(), source }),
        (Ok(chosen), None) => Ok(chosen),
    }
}

fn read_head(file: &File) -> io::Result<AlignedBytes> {
    let mut head = AlignedBytes::zeroed(signature::HEAD_BYTES as usize);
    let mut filled = 0;
    while filled < head.len() {
        match file.read_at(&mut head[filled..], filled as u64) {
            // The end of a short file. A read that ends inside a block was the last one before it.
            Ok(0) => break,
            Ok(count) if !count.is_multiple_of(UNIT_BYTES as usize) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(head)
}

fn check_size(spec: &DriveSpec, geometry: Geometry, found: u64) -> Result<(), DriveError> {
    let (path, formatted) = (spec.path.clone(), geometry.capacity());
    if found < formatted {
        return Err(DriveError::Cut { path, found, formatted });
    }
    match spec.size {
        Some(asked) if asked - asked % u64::from(UNIT_BYTES) != formatted => {
            Err(DriveError::SizeDiffers { path, asked, found: formatted })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn spec(path: &Path, size: impl Into<Option<u64>>) -> DriveSpec {
        DriveSpec { path: path.to_owned(), size: size.into() }
    }

    fn open(path: &Path, size: impl Into<Option<u64>>) -> Result<Opened, DriveError> {
        Drive::open_or_create(&spec(path, size), None)
    }

    fn poke(path: &Path, at: u64, bytes: &[u8]) {
        OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
    }

    /// The whole chain, as an operator reads it.
    fn told(error: &DriveError) -> String {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(next) = cause {
            text = format!("{text}: {next}");
            cause = next.source();
        }
        text
    }

    #[test]
    fn a_new_path_becomes_a_preallocated_drive_and_opens_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        assert_eq!(spec(&path, 16 * MIB).creates(), Some(16 * MIB));
        let opened = open(&path, 16 * MIB).unwrap();
        assert!(matches!(opened.notes[0], DriveNote::Created { bytes, .. } if bytes == 16 * MIB));
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 16 * MIB);
        assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 >= 16 * MIB, "allocated, not sparse");
        let identity = opened.drive.superblock().drive;
        drop(opened);

        assert_eq!(spec(&path, 16 * MIB).creates(), None);
        let again = open(&path, None).unwrap();
        assert_eq!(again.drive.superblock().drive, identity);
        assert!(!again.notes.iter().any(|note| matches!(note, DriveNote::Created { .. })));
    }

    #[test]
    fn an_empty_file_is_filled_if_a_size_is_given() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(open(file.path(), None), Err(DriveError::Empty { .. })));
        assert_eq!(spec(file.path(), 16 * MIB).creates(), Some(16 * MIB));
        assert!(open(file.path(), 16 * MIB).is_ok());
    }

    #[test]
    fn what_is_not_ours_is_refused_untouched_and_format_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("theirs");
        let theirs = vec![b'x'; 20 << 20];
        std::fs::write(&path, &theirs).unwrap();
        let error = open(&path, 20 * MIB).unwrap_err();
        assert!(matches!(error, DriveError::NotForebay { found: None, .. }));
        assert!(told(&error).contains("forebay-node format"), "{}", told(&error));
        poke(&path, 0, b"XFSB");
        let error = open(&path, None).unwrap_err();
        assert!(told(&error).contains("an XFS file system"), "{}", told(&error));
        assert_eq!(std::fs::read(&path).unwrap()[4..], theirs[4..]);
        std::fs::write(&path, b"short").unwrap();
        assert!(matches!(open(&path, None), Err(DriveError::NotForebay { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
    }

    #[test]
    fn a_missing_path_a_folder_and_a_pipe_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = open(&folder.path().join("none"), None).unwrap_err();
        assert!(told(&error).contains("size="), "{}", told(&error));
        assert!(matches!(open(folder.path(), None), Err(DriveError::NotADrive { .. })));
        assert!(matches!(open(Path::new("/dev/null"), None), Err(DriveError::NotADrive { .. })));
    }

    #[test]
    fn a_second_opening_is_refused_while_the_first_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        let first = open(&path, 16 * MIB).unwrap();
        let before = first.drive.superblock();
        assert!(matches!(open(&path, None), Err(DriveError::Locked { .. })));
        drop(first);
        let second = open(&path, None).unwrap();
        assert_eq!(
            second.drive.superblock().generation,
            before.generation + 1,
            "the refused one wrote nothing"
        );
    }

    #[test]
    fn runs_never_share_a_sequence_even_where_one_copy_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        let mut used_below = open(&path, 16 * MIB).unwrap().sequences.end;
        for round in 0..6_u64 {
            if round > 0 {
                poke(&path, COPY_OFFSETS[(round % 2) as usize] + 100 * round, b"rot");
            }
            let opened = open(&path, None).unwrap();
            assert!(opened.sequences.start >= used_below && !opened.sequences.is_empty());
            let more = opened.drive.reserve().unwrap();
            assert_eq!(more.start, opened.sequences.end);
            used_below = more.end;
        }
    }

    #[test]
    fn a_spoiled_copy_is_repaired_from_the_other_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        let identity = open(&path, 16 * MIB).unwrap().drive.superblock().drive;
        for copy in [0u8, 1] {
            poke(&path, COPY_OFFSETS[usize::from(copy)] + 60, &[0xaa; 9]);
            let opened = open(&path, None).unwrap();
            assert_eq!(opened.drive.superblock().drive, identity);
            let repaired = opened.notes.iter().find_map(|note| match note {
                DriveNote::Repaired { why, .. } => Some(why.clone()),
                _ => None,
            });
            assert!(matches!(repaired, Some(SuperblockError::Damaged { copy: found, .. }) if found == copy));
            drop(opened);
            let whole = decode_head(&std::fs::read(&path).unwrap());
            assert!(whole.iter().all(Result::is_ok), "{whole:?}");
        }
    }

    #[test]
    fn two_spoiled_copies_are_an_error_that_names_the_damage() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        drop(open(&path, 16 * MIB).unwrap());
        poke(&path, 60, &[0xaa]);
        poke(&path, 4096 + 60, &[0xaa]);
        let error = open(&path, None).unwrap_err();
        assert!(told(&error).contains("copy 0 is damaged"), "{}", told(&error));
    }

    #[test]
    fn swap_made_over_a_drive_is_not_repaired_away() {
        // What mkswap leaves: its signature in our first copy, our second copy whole.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        drop(open(&path, 16 * MIB).unwrap());
        poke(&path, 0, &[0; 4096]);
        poke(&path, 4086, b"SWAPSPACE2");
        let before = std::fs::read(&path).unwrap();
        assert!(matches!(open(&path, None), Err(DriveError::Foreign { found: "swap space", .. })));
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[test]
    fn sizes_that_disagree_are_told_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        drop(open(&path, 16 * MIB + 1).unwrap());
        assert!(open(&path, 16 * MIB + 1).is_ok(), "the size it was made with, though rounded");
        let error = open(&path, 32 * MIB).unwrap_err();
        assert!(told(&error).contains("16777216") && told(&error).contains("wipe"), "{}", told(&error));
        OpenOptions::new().write(true).open(&path).unwrap().set_len(15 * MIB).unwrap();
        assert!(matches!(open(&path, None), Err(DriveError::Cut { .. })));
    }

    #[test]
    fn what_cannot_be_made_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        let error = open(&path, MIB).unwrap_err();
        assert!(told(&error).contains("16 MiB"), "{}", told(&error));
        let error = open(&path, 200 << 40).unwrap_err();
        assert!(told(&error).contains("bytes are free"), "{}", told(&error));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_drive_without_sequences_left_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("drive");
        let opened = open(&path, 16 * MIB).unwrap();
        opened.drive.set_floor(u32::MAX - 1).unwrap();
        assert_eq!(opened.drive.reserve().unwrap(), u32::MAX - 1..u32::MAX);
        assert!(matches!(opened.drive.reserve(), Err(DriveError::Exhausted { .. })));
        drop(opened);
        assert!(matches!(open(&path, None), Err(DriveError::Exhausted { .. })));
    }
}
