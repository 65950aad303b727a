//! Block devices, as loop devices over image files. They need root, loop devices and `mkfs.ext4`; where one of these is
//! missing each test says so and passes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

use super::format::{FormatError, FormatOptions, WipeReport, format, inspect, wipe};
use super::tests::{body, options, read, spec, teller};
use super::*;

const MIB: u64 = 1 << 20;

fn run(tool: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(tool).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A loop device over a file of its own; detached when dropped.
struct LoopDevice {
    folder: tempfile::TempDir,
    device: PathBuf,
}

impl LoopDevice {
    fn attach() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(64 * MIB).unwrap();
        let device = run("losetup", &["--find", "--show", image.to_str().unwrap()]).map(PathBuf::from);
        if device.is_none() {
            eprintln!("skipped: no loop device to be had (needs root)");
        }
        Some(Self { folder, device: device? })
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn options(&self, force: bool) -> FormatOptions {
        FormatOptions { path: self.device.clone(), size: None, force, node: None }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.device.to_str().unwrap()]);
    }
}

/// A mounted file system; unmounted when dropped.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn mount(device: &Path) -> Option<Self> {
        let at = tempfile::tempdir().unwrap();
        let device = device.to_str().unwrap();
        let done =
            run("mkfs.ext4", &["-q", "-F", device]).and(run("mount", &[device, at.path().to_str().unwrap()]));
        if done.is_none() {
            eprintln!("skipped: {device} cannot be given a file system and mounted");
        }
        done.map(|_| Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &[self.0.path().to_str().unwrap()]);
    }
}

#[test]
fn a_device_is_formatted_served_from_and_wiped() {
    let Some(drive) = LoopDevice::attach() else { return };
    let too_large = FormatOptions { size: Some(65 * MIB), ..drive.options(true) };
    assert!(
        matches!(format(&too_large), Err(FormatError::DeviceTooSmall { found, .. }) if found == 64 * MIB)
    );
    let error = Store::open(&[spec(&drive.device, None)], options(WriterEngine::Auto)).err().unwrap();
    assert!(matches!(error, StoreError::Drive { source: DriveError::NotForebay { .. } }), "{error}");

    let report = format(&drive.options(false)).unwrap();
    assert!(report.is_device && report.superblock.geometry.capacity() == 64 * MIB);
    {
        let store = Store::open(&[spec(&drive.device, None)], options(WriterEngine::Auto)).unwrap();
        assert!(store.notes().is_empty(), "{:?}", store.notes());
        let (sender, receiver) = mpsc::channel();
        store.offer(body(3, 1 << 20), teller(3, &sender)).unwrap();
        let slot = receiver.recv().unwrap().1.unwrap();
        assert!(read(&store, slot, 1 << 20).unwrap()[..] == body(3, 1 << 20)[..]);

        let error = format(&drive.options(true)).unwrap_err();
        assert!(matches!(error, FormatError::Busy { .. }), "{error}");
        let second = Drive::open_or_create(&spec(&drive.device, None), None).unwrap_err();
        assert!(matches!(second, DriveError::Busy { .. }), "{second}");
    }
    let cleared = WipeReport::Cleared { drive: Some(report.superblock.drive), copies: 2 };
    assert_eq!(wipe(&drive.device).unwrap(), cleared);
}

#[test]
fn a_mounted_device_is_refused_even_by_force_and_named() {
    let Some(drive) = LoopDevice::attach() else { return };
    {
        let Some(mounted) = Mounted::mount(&drive.device) else { return };
        let at = Usage::Mounted(mounted.0.path().to_str().unwrap().to_owned());
        for force in [false, true] {
            let error = format(&drive.options(force)).unwrap_err();
            assert!(matches!(&error, FormatError::InUse { usage, .. } if *usage == at), "{error}");
        }
        assert!(matches!(wipe(&drive.device), Err(FormatError::InUse { .. })));
        assert_eq!(inspect(&drive.device).unwrap().usage, Some(at));
        let error = Drive::open_or_create(&spec(&drive.device, None), None).unwrap_err();
        assert!(matches!(error, DriveError::InUse { usage: Usage::Mounted(_), .. }), "{error}");
    }
    let error = format(&drive.options(false)).unwrap_err();
    assert!(error.to_string().contains("ext4"), "{error}");
    assert_eq!(format(&drive.options(true)).unwrap().overwritten, Some("an ext2, ext3 or ext4 file system"));
}

#[test]
fn a_device_with_a_mounted_partition_is_refused() {
    let Some(drive) = LoopDevice::attach() else { return };
    let sectors = (32 * MIB / 512).to_string();
    let partition = PathBuf::from(format!("{}p1", drive.device.display()));
    if run("addpart", &[drive.device.to_str().unwrap(), "1", "2048", &sectors]).is_none()
        || !partition.exists()
    {
        eprintln!("skipped: loop devices have no partitions here");
        return;
    }
    let Some(_mounted) = Mounted::mount(&partition) else { return };
    let error = format(&drive.options(true)).unwrap_err();
    assert!(matches!(error, FormatError::InUse { usage: Usage::Mounted(_), .. }), "{error}");
}

#[test]
fn a_file_under_a_loop_device_is_in_use() {
    let Some(drive) = LoopDevice::attach() else { return };
    let options = FormatOptions { path: drive.image(), ..drive.options(true) };
    let error = format(&options).unwrap_err();
    let name = drive.device.file_name().unwrap().to_str().unwrap();
    assert!(matches!(&error, FormatError::InUse { usage: Usage::Held(by), .. } if by == name), "{error}");
}

#[test]
fn a_file_system_without_preallocation_and_direct_reads_will_do_with_a_note() {
    // ramfs has neither, and does not count its blocks.
    let at = tempfile::tempdir().unwrap();
    if run("mount", &["-t", "ramfs", "none", at.path().to_str().unwrap()]).is_none() {
        eprintln!("skipped: ramfs cannot be mounted (needs root)");
        return;
    }
    let mounted = Mounted(at);
    let path = mounted.0.path().join("drive");
    for engine in [WriterEngine::Uring, WriterEngine::Portable] {
        let store = Store::open(&[spec(&path, 16 * MIB)], options(engine)).unwrap();
        assert!(
            store.notes().iter().any(|note| matches!(note, DriveNote::Buffered { .. })),
            "{:?}",
            store.notes()
        );
        assert!(!store.status().drives[0].is_direct);
        let (sender, receiver) = mpsc::channel();
        store.offer(body(3, 1 << 20), teller(3, &sender)).unwrap();
        let slot = receiver.recv().unwrap().1.unwrap();
        assert!(read(&store, slot, 1 << 20).unwrap()[..] == body(3, 1 << 20)[..]);
    }
}
