//! A node never writes to what is not its own, and says how to make it its own.
//!
//! One mistyped device name must not cost anybody a file system. `serve` writes only behind a Forebay superblock;
//! `format` refuses what carries another owner's mark or is mounted, names what it found, and leaves it as it was.

use forebay_tests::node::{run, words};
use forebay_tests::{Content, Engine, Node, NodeSpec, http, on_each_engine, origin::Origin};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: usize = 1 << 20;

on_each_engine!(serve_refuses_a_foreign_file_and_names_format, a_formatted_file_is_served_from);

fn serve_refuses_a_foreign_file_and_names_format(engine: Engine) {
    let room = tempfile::tempdir().expect("a temporary directory");
    let origin = Origin::start();
    for (name, bytes) in [("zeros", vec![0; 256 * MIB]), ("letters", Content::new(1).bytes(0, 256 * MIB))] {
        let file = room.path().join(name);
        std::fs::write(&file, &bytes).expect("a foreign file");
        let spec = NodeSpec::new(engine).drive_as_is(&file).accelerator(format!("data={}", origin.url()));
        let output = spec.run_to_the_end();
        assert!(!output.status.success(), "{}", words(&output));
        assert!(words(&output).contains("forebay-node format"), "{}", words(&output));
        assert!(std::fs::read(&file).expect("the file") == bytes, "{name} was written to");
    }
}

fn a_formatted_file_is_served_from(engine: Engine) {
    let room = tempfile::tempdir().expect("a temporary directory");
    let file = sparse_file(room.path(), "drive", 256);
    let output = run(&["format", &file]);
    assert!(output.status.success(), "{}", words(&output));
    let origin = Origin::start();
    origin.put("object", Content::new(3).bytes(0, MIB));
    let node = Node::start(
        &NodeSpec::new(engine).drive_as_is(Path::new(&file)).accelerator(format!("data={}", origin.url())),
    );
    Content::new(3).must_equal(0, MIB as u64, &http::get(node.data(), "/data/object").body);
}

#[test]
fn format_refuses_a_file_system_and_leaves_it_whole() {
    let room = tempfile::tempdir().expect("a temporary directory");
    let image = ext4_image(room.path());
    let before = std::fs::read(&image).expect("the image");
    let output = run(&["format", &image]);
    assert!(!output.status.success(), "{}", words(&output));
    assert!(words(&output).contains("ext4"), "what was found is not named: {}", words(&output));
    assert!(std::fs::read(&image).expect("the image") == before, "the image was written to");
}

#[test]
fn format_refuses_what_is_already_ours() {
    let room = tempfile::tempdir().expect("a temporary directory");
    let file = sparse_file(room.path(), "drive", 256);
    assert!(run(&["format", &file]).status.success());
    let before = std::fs::read(&file).expect("the drive");
    let output = run(&["format", &file]);
    assert!(!output.status.success(), "{}", words(&output));
    assert!(words(&output).to_lowercase().contains("forebay"), "{}", words(&output));
    assert!(std::fs::read(&file).expect("the drive") == before, "the drive was written to");
}

#[test]
fn wipe_takes_only_what_is_ours() {
    let room = tempfile::tempdir().expect("a temporary directory");
    let foreign = room.path().join("letters").display().to_string();
    let bytes = Content::new(5).bytes(0, 32 * MIB);
    std::fs::write(&foreign, &bytes).expect("a foreign file");
    let output = run(&["wipe", &foreign]);
    assert!(words(&output).contains("nothing was written"), "{}", words(&output));
    assert!(std::fs::read(&foreign).expect("the file") == bytes, "a foreign file was written to");

    let ours = sparse_file(room.path(), "drive", 256);
    assert!(run(&["format", &ours]).status.success());
    let output = run(&["wipe", &ours]);
    assert!(output.status.success(), "{}", words(&output));
    // What was wiped is nobody's again: formatting it needs no force.
    let output = run(&["format", &ours]);
    assert!(output.status.success(), "{}", words(&output));
}

/// A real file system on a real block device, mounted: needs root and loop devices.
#[test]
fn format_refuses_a_mounted_device() {
    let room = tempfile::tempdir().expect("a temporary directory");
    let image = ext4_image(room.path());
    let device = match said(Command::new("losetup").args(["--find", "--show", &image])) {
        Ok(device) => Loop(device),
        Err(why) => return skipped(&format!("a loop device cannot be set up here: {why}")),
    };
    let place = room.path().join("mounted");
    std::fs::create_dir(&place).expect("a directory");
    if let Err(why) = said(Command::new("mount").arg(&device.0).arg(&place)) {
        return skipped(&format!("a loop device cannot be mounted here: {why}"));
    }
    let _mount = Mount(place.clone());
    let output = run(&["format", "--force", &device.0]);
    assert!(!output.status.success(), "{}", words(&output));
    assert!(words(&output).contains("mounted"), "{}", words(&output));
    assert!(
        std::fs::read_dir(&place).is_ok_and(|mut entries| entries.next().is_some()),
        "the file system is gone"
    );
}

struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        drop(said(Command::new("losetup").args(["--detach", &self.0])));
    }
}

struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        drop(said(Command::new("umount").arg(&self.0)));
    }
}

/// Its standard output, trimmed, or why there is none.
fn said(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// Tells tests/run, which counts and prints it; the file is there only when it runs us.
fn skipped(reason: &str) {
    use std::io::Write;
    eprintln!("SKIPPED {reason}");
    if let Some(path) = std::env::var_os("FOREBAY_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).open(path);
        file.and_then(|mut file| writeln!(file, "{reason}")).expect("the list of skips can be written");
    }
}

fn sparse_file(room: &Path, name: &str, mebibytes: u64) -> String {
    let path = room.join(name);
    std::fs::File::create(&path).and_then(|file| file.set_len(mebibytes << 20)).expect("a sparse file");
    path.display().to_string()
}

fn ext4_image(room: &Path) -> String {
    let image = sparse_file(room, "image", 256);
    // mkfs lives in sbin, which an ordinary user's path may lack.
    let mkfs = ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"].into_iter().find(|path| Path::new(path).exists());
    let made = said(Command::new(mkfs.unwrap_or("mkfs.ext4")).args(["-q", "-F", &image]));
    assert!(made.is_ok(), "mkfs.ext4 is needed (package e2fsprogs): {made:?}");
    image
}
