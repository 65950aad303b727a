//! Whose bytes are these? The marks that others leave on what they own.
//!
//! Looked for before anything of a drive is overwritten: by `format`, so that it takes nothing away from
//! anybody, and by `serve`, because some tools (`mkswap`, partitioners) overwrite one of our superblocks and
//! leave the other one whole. The table does not have to be complete: `format` also refuses what it does not know.

use super::segment::DATA_OFFSET;

/// Bytes that [`find_in_head`] looks at: those before the first segment, where we leave only zeros.
pub(super) const HEAD_BYTES: u64 = DATA_OFFSET;
/// Bytes at the end of a drive that [`find_in_tail`] looks at.
pub(super) const TAIL_BYTES: u64 = DATA_OFFSET;

struct Mark {
    owner: &'static str,
    at: usize,
    magic: &'static [u8],
}

const fn mark(owner: &'static str, at: usize, magic: &'static [u8]) -> Mark {
    Mark { owner, at, magic }
}

// From the special to the general: a FAT boot sector also ends like a partition table.
const MARKS: &[Mark] = &[
    mark("a LUKS volume", 0, b"LUKS\xba\xbe"),
    mark("an LVM2 physical volume", 0, b"LABELONE"),
    mark("an LVM2 physical volume", 512, b"LABELONE"),
    mark("an LVM2 physical volume", 1024, b"LABELONE"),
    mark("an LVM2 physical volume", 1536, b"LABELONE"),
    mark("a Linux RAID member", 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
    mark("a Linux RAID member", 4096, &[0xfc, 0x4e, 0x2b, 0xa9]),
    mark("a bcache device", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca]),
    mark("a bcachefs file system", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9]),
    mark("a Stratis pool member", 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    mark("a Stratis pool member", 4608 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
    mark("a VDO volume", 0, b"dmvdo001"),
    mark("a Ceph BlueStore device", 0, b"bluestore block device"),
    mark("an Oracle ASM disk", 32, b"ORCLDISK"),
    mark("an ext2, ext3 or ext4 file system", 1024 + 56, &[0x53, 0xef]),
    mark("an XFS file system", 0, b"XFSB"),
    mark("a Btrfs file system", 65_536 + 64, b"_BHRfS_M"),
    mark("an F2FS file system", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    mark("an EROFS file system", 1024, &[0xe2, 0xe1, 0xf5, 0xe0]),
    mark("a SquashFS file system", 0, b"hsqs"),
    mark("a ReiserFS file system", 65_536 + 52, b"ReIsEr"),
    mark("a JFS file system", 32_768, b"JFS1"),
    mark("a GFS2 file system", 65_536, &[0x01, 0x16, 0x19, 0x70]),
    mark("an OCFS2 file system", 8192, b"OCFSV2"),
    mark("a NILFS2 file system", 1024 + 6, &[0x34, 0x34]),
    mark("an HFS+ file system", 1024, b"H+"),
    mark("an APFS container", 32, b"NXSB"),
    mark("an ISO 9660 file system", 32_769, b"CD001"),
    mark("swap space", 4096 - 10, b"SWAPSPACE2"),
    mark("swap space", 4096 - 10, b"SWAP-SPACE"),
    mark("swap space", 16_384 - 10, b"SWAPSPACE2"),
    mark("swap space", 65_536 - 10, b"SWAPSPACE2"),
    mark("an NTFS file system", 3, b"NTFS    "),
    mark("an exFAT file system", 3, b"EXFAT   "),
    mark("a FAT file system", 54, b"FAT12   "),
    mark("a FAT file system", 54, b"FAT16   "),
    mark("a FAT file system", 82, b"FAT32   "),
    mark("a GPT partition table", 512, b"EFI PART"),
    mark("a GPT partition table", 4096, b"EFI PART"),
    mark("an MBR (DOS) partition table", 510, &[0x55, 0xaa]),
    mark("a qcow2 disk image", 0, b"QFI\xfb"),
    mark("a VMDK disk image", 0, b"KDMV"),
    mark("a program (ELF)", 0, b"\x7fELF"),
    mark("gzip data", 0, &[0x1f, 0x8b]),
    mark("xz data", 0, b"\xfd7zXZ\0"),
    mark("Zstandard data", 0, &[0x28, 0xb5, 0x2f, 0xfd]),
    mark("bzip2 data", 0, b"BZh"),
    mark("a ZIP archive", 0, b"PK\x03\x04"),
    mark("a tar archive", 257, b"ustar"),
    mark("an SQLite database", 0, b"SQLite format 3\0"),
    mark("a Parquet file", 0, b"PAR1"),
    mark("an HDF5 file", 0, b"\x89HDF\r\n\x1a\n"),
    mark("a PDF document", 0, b"%PDF"),
    mark("a script", 0, b"#!"),
];

const ZFS: &str = "a ZFS pool member";
const GPT_AT_END: &str = "a GPT partition table (its copy at the end)";
const RAID_AT_END: &str = "a Linux RAID member (its superblock at the end)";
const RAID_MAGIC: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];

/// The owner whose mark lies in the first bytes of a drive.
pub(super) fn find_in_head(head: &[u8]) -> Option<&'static str> {
    let marked = MARKS.iter().find(|mark| bears(head, mark.at, mark.magic)).map(|mark| mark.owner);
    marked.or_else(|| [0, ZFS_LABEL_BYTES].into_iter().any(|at| bears_uberblock(head, at)).then_some(ZFS))
}

/// The owner whose mark lies in the last bytes of a drive of `capacity` bytes.
pub(super) fn find_in_tail(tail: &[u8], capacity: u64) -> Option<&'static str> {
    let start = capacity - tail.len() as u64;
    let within = |at: u64| at.checked_sub(start).and_then(|at| usize::try_from(at).ok());
    let bears_at =
        |at: Option<u64>, magic: &[u8]| at.and_then(within).is_some_and(|at| bears(tail, at, magic));

    if bears_at(capacity.checked_sub(512), b"EFI PART") || bears_at(capacity.checked_sub(4096), b"EFI PART") {
        return Some(GPT_AT_END);
    }
    // Version 0.90: the last whole 64 KiB. Version 1.0: 8 KiB before the end, rounded down to 4 KiB.
    let oldest = (capacity & !0xffff).checked_sub(0x1_0000);
    let older = capacity.checked_sub(8192).map(|at| at & !4095);
    if bears_at(oldest, &RAID_MAGIC) || bears_at(older, &RAID_MAGIC) {
        return Some(RAID_AT_END);
    }
    let labels_end = capacity - capacity % ZFS_LABEL_BYTES as u64;
    [2, 1].into_iter().find_map(|labels| {
        let at = within(labels_end.checked_sub(labels * ZFS_LABEL_BYTES as u64)?)?;
        bears_uberblock(tail, at).then_some(ZFS)
    })
}

/// True if nobody wrote here: all zeros, or all ones as some drives answer for what was erased.
pub(super) fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0) || bytes.iter().all(|&byte| byte == 0xff)
}

fn bears(bytes: &[u8], at: usize, magic: &[u8]) -> bool {
    bytes.get(at..).is_some_and(|rest| rest.starts_with(magic))
}

const ZFS_LABEL_BYTES: usize = 256 << 10;

/// The second half of a ZFS label is a ring of uberblocks of at least 1 KiB, in the byte order of their writer.
fn bears_uberblock(bytes: &[u8], label: usize) -> bool {
    const MAGIC: u64 = 0x00ba_b10c;
    (ZFS_LABEL_BYTES / 2..ZFS_LABEL_BYTES).step_by(1024).any(|at| {
        bears(bytes, label + at, &MAGIC.to_le_bytes()) || bears(bytes, label + at, &MAGIC.to_be_bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::superblock::{self, SUPERBLOCK_BYTES};

    fn head_with(at: usize, magic: &[u8]) -> Vec<u8> {
        let mut head = vec![0; HEAD_BYTES as usize];
        head[at..at + magic.len()].copy_from_slice(magic);
        head
    }

    #[test]
    fn every_mark_in_the_table_is_found_by_its_name() {
        for mark in MARKS {
            assert_eq!(find_in_head(&head_with(mark.at, mark.magic)), Some(mark.owner));
        }
    }

    #[test]
    fn a_boot_sector_is_named_by_its_file_system() {
        let mut head = head_with(82, b"FAT32   ");
        head[510..512].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(find_in_head(&head), Some("a FAT file system"));
    }

    #[test]
    fn uberblocks_are_found_in_all_four_labels() {
        let magic = 0x00ba_b10c_u64.to_le_bytes();
        assert_eq!(find_in_head(&head_with((128 << 10) + 5 * 1024, &magic)), Some(ZFS));
        assert_eq!(find_in_head(&head_with((256 + 128 + 127) << 10, &magic)), Some(ZFS));
        for from_end in [512 << 10, 256 << 10] {
            let capacity = (100 << 20) + 4096_u64;
            let mut tail = vec![0; TAIL_BYTES as usize];
            let at = tail.len() - 4096 - from_end + (128 << 10);
            tail[at..at + 8].copy_from_slice(&magic);
            assert_eq!(find_in_tail(&tail, capacity), Some(ZFS));
        }
    }

    #[test]
    fn marks_at_the_end_are_found_for_odd_sizes() {
        let capacity = (100 << 20) + 12_800_u64; // 25 sectors over
        let start = capacity - TAIL_BYTES;
        let cases: [(u64, &[u8], &str); 4] = [
            (capacity - 512, b"EFI PART", GPT_AT_END),
            (capacity - 4096, b"EFI PART", GPT_AT_END),
            ((capacity & !0xffff) - 0x1_0000, &RAID_MAGIC, RAID_AT_END),
            ((capacity - 8192) & !4095, &RAID_MAGIC, RAID_AT_END),
        ];
        for (at, magic, owner) in cases {
            let mut tail = vec![0; TAIL_BYTES as usize];
            assert_eq!(find_in_tail(&tail, capacity), None);
            let at = (at - start) as usize;
            tail[at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(find_in_tail(&tail, capacity), Some(owner));
        }
    }

    #[test]
    fn our_own_head_bears_no_mark() {
        let mut head = vec![0; HEAD_BYTES as usize];
        let example = superblock::tests::example();
        head[..SUPERBLOCK_BYTES].copy_from_slice(&example.encode(0));
        head[SUPERBLOCK_BYTES..2 * SUPERBLOCK_BYTES].copy_from_slice(&example.encode(1));
        assert_eq!(find_in_head(&head), None);
        assert!(!is_blank(&head));
        assert!(is_blank(&[0; 64]) && is_blank(&[0xff; 64]) && !is_blank(&[0, 0xff]));
    }
}
