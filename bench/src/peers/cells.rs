//! What is asked for: how much, of how many objects, and where they are when they are asked for.
#![forbid(unsafe_code)]

use crate::client::lanes::Part;
use crate::content::Content;
use crate::origin::catalog::{Dataset, object_name};
use crate::origin::model::Class;
use anyhow::{Context, Result};
use std::fs;
use std::io::Write as _;
use std::path::Path;

/// The bucket that all servers serve.
pub(super) const BUCKET: &str = "peers";
/// Written at a time.
const WRITE_BYTES: usize = 1 << 20;
/// Memory of the servers that keep the objects on a drive, bytes: an eighth of their sets.
const DRIVE_MEMORY_BYTES: u64 = 256 << 20;
/// Memory of those who download everything anew, bytes.
const MISS_MEMORY_BYTES: u64 = 1 << 30;

/// Where the objects are when they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In each server's memory.
    Hot,
    /// On its drive, in a set of at least four times its memory.
    Drive,
    /// Nowhere but at the origin; no object is asked for twice.
    Miss,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// How it is named on the command line and in reports.
    pub name: &'static str,
    /// Where the objects are.
    pub state: State,
    /// Bytes of each object.
    pub size: u64,
    /// How many there are.
    pub objects: u64,
    /// What of them is asked for.
    pub part: Part,
    /// Connections, each with one request under way.
    pub connections: usize,
    /// Most bytes that the node may read from its drive per byte served.
    pub device_max: Option<f64>,
}

const fn hot(name: &'static str, size: u64, objects: u64, part: Part, connections: usize) -> Cell {
    Cell { name, state: State::Hot, size, objects, part, connections, device_max: None }
}

const fn drive(
    name: &'static str,
    size: u64,
    objects: u64,
    part: Part,
    connections: usize,
    device_max: Option<f64>,
) -> Cell {
    Cell { name, state: State::Drive, size, objects, part, connections, device_max }
}

const fn miss(name: &'static str, size: u64, connections: usize) -> Cell {
    Cell {
        name,
        state: State::Miss,
        size,
        objects: 10_000_000,
        part: Part::Whole,
        connections,
        device_max: None,
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// All cells. A hot set is some 250 MB: beyond what any processor caches, and soon verified. A set on a drive is 2 GiB.
pub const CELLS: [Cell; 15] = [
    hot("100KB", 100_000, 2500, Part::Whole, 32),
    hot("1MiB", MIB, 250, Part::Whole, 32),
    hot("10MB", 10_000_000, 25, Part::Whole, 8),
    hot("100MB", 100_000_000, 3, Part::Whole, 4),
    hot("64KiB-ranges", 100_000_000, 3, Part::Aligned(64 * KIB), 32),
    hot("1MiB-ranges", 100_000_000, 3, Part::Aligned(MIB), 32),
    drive("drive-100KiB", 100 * KIB, 20_000, Part::Whole, 16, Some(1.02)),
    drive("drive-1MiB", MIB, 2048, Part::Whole, 16, Some(1.02)),
    drive("drive-64MiB", 64 * MIB, 32, Part::Whole, 4, Some(1.02)),
    drive("drive-64KiB-ranges", 64 * MIB, 32, Part::Aligned(64 * KIB), 16, Some(1.02)),
    drive("drive-64KiB-anywhere", 64 * MIB, 32, Part::Anywhere(64 * KIB), 16, Some(2.05)),
    drive("drive-1MiB-anywhere", 64 * MIB, 32, Part::Anywhere(MIB), 16, Some(1.10)),
    miss("miss-100KB", 100_000, 32),
    miss("miss-1MiB", MIB, 16),
    miss("miss-10MB", 10_000_000, 8),
];

/// What a server is asked for until it answers.
pub(super) const READY: Cell = hot("ready", 1, 1, Part::Whole, 1);

impl Cell {
    /// Bytes of an answer.
    pub(super) fn answer_bytes(&self) -> u64 {
        match self.part {
            Part::Whole => self.size,
            Part::Aligned(bytes) | Part::Anywhere(bytes) => bytes,
        }
    }

    /// Bytes of all objects.
    pub(super) fn set_bytes(&self) -> u64 {
        self.size * self.objects
    }

    /// Memory that a server may use to keep objects, bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        match self.state {
            // Twice the set, and what a server needs beside it.
            State::Hot => (2 * self.set_bytes()).max(1 << 30),
            State::Drive => DRIVE_MEMORY_BYTES,
            State::Miss => MISS_MEMORY_BYTES,
        }
    }

    /// Room that a server may use on a drive, bytes.
    pub(super) fn drive_bytes(&self) -> u64 {
        match self.state {
            State::Hot | State::Drive => 2 * self.set_bytes().max(1 << 30),
            State::Miss => 4 << 30,
        }
    }

    /// Objects of one size have one set, whatever is asked of it; those that are asked for once have another.
    pub(super) fn prefix(&self) -> String {
        match self.state {
            State::Hot | State::Drive => format!("{}/", self.size),
            State::Miss => format!("once-{}/", self.size),
        }
    }

    /// As the origin is told.
    pub(super) fn dataset(&self) -> Dataset {
        Dataset {
            bucket: BUCKET.to_owned(),
            prefix: self.prefix(),
            count: self.objects,
            size: self.size,
            class: Class::Hot,
            version: 1,
        }
    }

    /// The same bytes as the origin's, for those who serve files; on the drive when this returns.
    ///
    /// # Errors
    /// No room, or no right.
    pub(super) fn write_files(&self, files: &Path) -> Result<()> {
        let prefix = self.prefix();
        let folder = files.join(BUCKET).join(&prefix);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let mut buffer = vec![0; WRITE_BYTES];
        for number in 0..self.objects {
            let key = object_name(&prefix, number);
            let path = files.join(BUCKET).join(&key);
            let content = Content::new(format!("{BUCKET}/{key}").as_bytes(), 1);
            let written = (|| {
                let mut file = fs::File::create(&path)?;
                let mut at = 0;
                while at < self.size {
                    let length = (self.size - at).min(WRITE_BYTES as u64) as usize;
                    content.fill(at, &mut buffer[..length]);
                    file.write_all(&buffer[..length])?;
                    at += length as u64;
                }
                Ok::<_, std::io::Error>(())
            })();
            written.with_context(|| format!("writing {}", path.display()))?;
        }
        // What is still to be written would be written while others are measured.
        rustix::fs::syncfs(fs::File::open(&folder)?).context("writing to the drive")
    }
}

/// What must be there for these cells: for each set the largest that one of them asks for.
pub(super) fn sets(cells: &[Cell]) -> Vec<Cell> {
    let mut sets: Vec<Cell> = cells.iter().copied().chain([READY]).collect();
    sets.sort_by_key(|cell| (cell.prefix(), std::cmp::Reverse(cell.objects)));
    sets.dedup_by_key(|cell| cell.prefix());
    sets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_as_large_as_the_largest_that_is_asked_for() {
        let of = |name| CELLS.into_iter().find(|cell| cell.name == name).expect("a cell");
        let sets = sets(&[of("1MiB"), of("drive-1MiB"), of("miss-1MiB")]);
        let found: Vec<_> = sets.iter().map(|set| (set.prefix(), set.objects)).collect();
        assert!(found.contains(&("1048576/".to_owned(), 2048)), "{found:?}");
        assert!(found.contains(&("once-1048576/".to_owned(), 10_000_000)), "{found:?}");
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn a_set_on_a_drive_is_four_times_what_memory_may_hold() {
        for cell in CELLS.iter().filter(|cell| cell.state == State::Drive) {
            assert!(cell.set_bytes() >= 4 * cell.memory_bytes(), "{cell:?}");
        }
    }
}
