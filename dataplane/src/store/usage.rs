//! Is anybody using this device or file right now?
//!
//! What the kernel tells in `/proc` and `/sys`, read before `format` or `wipe` write. `--force` does not reach
//! here. For devices the exclusive open that follows is the last word: it also sees mounts of other namespaces;
//! this file exists because "busy" names neither the mount nor the remedy.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// A device number, major and minor.
type Number = (u32, u32);

/// Who uses a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Usage {
    /// A file system of it, or of one of its partitions, is mounted here.
    Mounted(String),
    /// The system swaps to it.
    Swap(String),
    /// A device of this name is built on it: device mapper, RAID, a loop device.
    Held(String),
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mounted(at) => write!(f, "mounted at {at}: unmount it first"),
            Self::Swap(name) => write!(f, "swap space in use ({name}): swapoff first"),
            Self::Held(by) => write!(f, "part of the device {by}: take that one down first"),
        }
    }
}

/// Who uses the device or file with this metadata, if anybody does.
pub(super) fn of(path: &Path, metadata: &fs::Metadata) -> Option<Usage> {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    if metadata.file_type().is_block_device() {
        let numbers = numbers_of(metadata.rdev());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let swap = || {
            swap_where(&swaps, |swap| {
                swap.file_type().is_block_device() && numbers.contains(&number(swap.rdev()))
            })
        };
        mount_of(&mounts, &numbers).or_else(swap).or_else(|| holder_of(&numbers))
    } else {
        let swap = || swap_where(&swaps, |swap| (swap.dev(), swap.ino()) == (metadata.dev(), metadata.ino()));
        swap().or_else(|| loop_device_of(path))
    }
}

fn number(device: u64) -> Number {
    (libc::major(device), libc::minor(device))
}

fn sys_folder((major, minor): Number) -> std::path::PathBuf {
    Path::new("/sys/dev/block").join(format!("{major}:{minor}"))
}

/// The device's own number and those of its partitions.
fn numbers_of(device: u64) -> Vec<Number> {
    let own = number(device);
    let mut numbers = vec![own];
    for entry in fs::read_dir(sys_folder(own)).into_iter().flatten().flatten() {
        if entry.path().join("partition").exists()
            && let Ok(text) = fs::read_to_string(entry.path().join("dev"))
        {
            numbers.extend(parse_number(text.trim()));
        }
    }
    numbers
}

fn parse_number(text: &str) -> Option<Number> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A mount of one of these devices. Some file systems (Btrfs) show a number of their own: then the source tells.
fn mount_of(mountinfo: &str, numbers: &[Number]) -> Option<Usage> {
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(2);
        let (shown, at) = (parse_number(fields.next()?)?, fields.nth(1)?);
        let source = after.split(' ').nth(1)?;
        let of_source = || {
            let metadata = source.starts_with('/').then(|| fs::metadata(unescape(source)).ok()).flatten()?;
            metadata.file_type().is_block_device().then(|| number(metadata.rdev()))
        };
        let ours = numbers.contains(&shown) || of_source().is_some_and(|source| numbers.contains(&source));
        ours.then(|| Usage::Mounted(unescape(at)))
    })
}

fn swap_where(swaps: &str, is_ours: impl Fn(&fs::Metadata) -> bool) -> Option<Usage> {
    swaps.lines().skip(1).find_map(|line| {
        let name = unescape(line.split_whitespace().next()?);
        let metadata = fs::metadata(&name).ok()?;
        is_ours(&metadata).then_some(Usage::Swap(name))
    })
}

fn holder_of(numbers: &[Number]) -> Option<Usage> {
    numbers.iter().find_map(|&number| {
        let mut holders = fs::read_dir(sys_folder(number).join("holders")).ok()?;
        Some(Usage::Held(holders.next()?.ok()?.file_name().to_string_lossy().into_owned()))
    })
}

fn loop_device_of(path: &Path) -> Option<Usage> {
    let ours = fs::canonicalize(path).ok()?;
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        (Path::new(file.trim_end_matches('\n')) == ours)
            .then(|| Usage::Held(device.file_name().to_string_lossy().into_owned()))
    })
}

/// The kernel writes blanks, tabs, newlines and backslashes of names as three octal digits.
fn unescape(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after
            .get(..3)
            .filter(|_| first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        out.push(code.unwrap_or(first));
        rest = if code.is_some() { &after[3..] } else { after };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 28 0:21 / /proc rw,nosuid - proc proc rw
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 28 259:7 /sub /mnt/hot\\040data rw - xfs /dev/nvme1n1p3 rw
41 28 0:45 / /srv rw - btrfs /dev/none rw
";

    #[test]
    fn a_mounted_partition_is_found_by_its_number() {
        assert_eq!(mount_of(MOUNTS, &[(259, 4), (259, 7)]), Some(Usage::Mounted("/mnt/hot data".to_owned())));
        assert_eq!(mount_of(MOUNTS, &[(259, 2)]), Some(Usage::Mounted("/".to_owned())));
        assert_eq!(mount_of(MOUNTS, &[(259, 9)]), None);
    }

    #[test]
    fn names_are_unescaped() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
        assert_eq!(unescape("/a\\04"), "/a\\04");
        assert_eq!(unescape("/a\\9zzb"), "/a\\9zzb");
    }

    #[test]
    fn the_device_under_the_root_file_system_is_in_use() {
        // Only read, never written: where the root lies on a real device, that device must be found.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let root = fs::metadata("/").unwrap().dev();
        let numbers = numbers_of(root);
        assert_eq!(numbers[0], number(root));
        if number(root).0 != 0 {
            assert!(matches!(mount_of(&mounts, &numbers), Some(Usage::Mounted(_))));
        }
    }

    #[test]
    fn a_swap_file_is_found_by_what_it_is_and_not_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&file, b"x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let swaps = format!("Filename\tType\tSize\tUsed\tPriority\n{} file 1 0 -2\n", link.display());
        let inode = fs::metadata(&file).unwrap().ino();
        assert_eq!(
            swap_where(&swaps, |swap| swap.ino() == inode),
            Some(Usage::Swap(link.display().to_string()))
        );
    }

    #[test]
    fn an_ordinary_file_is_not_in_use() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(of(file.path(), &file.as_file().metadata().unwrap()), None);
    }
}
