//! What is written is read again: in the next transaction, after a reopen, and after a copy taken at any moment.

use std::os::unix::fs::PermissionsExt;

use forebay_control_api::{Accelerator, Epoch, Placement, Policy, Purge};

use super::*;

fn accelerator(name: &str) -> Accelerator {
    serde_json::from_value(serde_json::json!({"name": name, "origin": "s3://bucket"})).expect("words")
}

fn purge(sequence: u64) -> Purge {
    let body = serde_json::json!({"sequence": sequence, "accelerator": "data", "key": "k", "asked": "now"});
    serde_json::from_value(body).expect("words")
}

fn put<R: Row>(store: &Store, row: &R) {
    store.change(|change| change.put(row)).expect("written");
}

#[test]
fn rows_are_there_after_a_reopen_and_in_order() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    {
        let store = Store::open(&path).expect("new");
        for name in ["data-b", "data-a", "data-c"] {
            put(&store, &accelerator(name));
        }
        for sequence in [10, 9, 100] {
            put(&store, &purge(sequence));
        }
        put(&store, &Placement { epoch: Epoch(7), ..Placement::default() });
        assert!(store.change(|change| change.delete::<Accelerator>("data-b")).expect("deleted"));
        assert!(!store.change(|change| change.delete::<Accelerator>("data-b")).expect("again"));
    }
    let opened = Store::open(&path).expect("again");
    let view = opened.view().expect("view");
    let names: Vec<_> = view.all::<Accelerator>().expect("rows").into_iter().map(|row| row.key()).collect();
    assert_eq!(names, ["data-a", "data-c"]);
    let purges: Vec<_> = view.all::<Purge>().expect("rows").into_iter().map(|row| row.sequence).collect();
    assert_eq!(purges, [9, 10, 100]);
    assert_eq!(view.get::<Placement>("current").expect("read").expect("row").epoch, Epoch(7));
    assert_eq!(view.get::<Policy>("none").expect("no table"), None);
}

#[test]
fn a_change_that_fails_leaves_nothing() {
    let room = tempfile::tempdir().expect("room");
    let store = Store::open(&room.path().join("store")).expect("new");
    put(&store, &accelerator("data-a"));
    let failed = store.change(|change| {
        change.put(&accelerator("data-b"))?;
        change.delete::<Accelerator>("data-a")?;
        change.next_revision()?;
        Err::<(), _>(StoreError::InUse(PathBuf::new()))
    });
    assert!(failed.is_err());
    let view = store.view().expect("view");
    assert_eq!(view.revision().expect("number"), 0);
    assert_eq!(view.all::<Accelerator>().expect("rows"), [accelerator("data-a")]);
}

/// The file as it lies on the drive between two commits is what a killed process leaves.
#[test]
fn a_copy_taken_while_the_store_is_open_holds_every_commit() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    let store = Store::open(&path).expect("new");
    for round in 1..=40 {
        store
            .change(|change| {
                assert_eq!(change.next_revision()?, round);
                change.put(&purge(round))
            })
            .expect("written");
        if round % 8 == 0 {
            let copy = room.path().join(format!("copy-{round}"));
            std::fs::copy(&path, &copy).expect("copied");
            let opened = Store::open(&copy).expect("repaired");
            let view = opened.view().expect("view");
            assert_eq!(view.revision().expect("number"), round);
            assert_eq!(view.all::<Purge>().expect("rows").len() as u64, round);
        }
    }
}

/// A commit that was under way when the power went leaves the one before it: whatever the tail of the file became.
#[test]
fn a_torn_copy_is_the_whole_state_before() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    let store = Store::open(&path).expect("new");
    for round in 1..=5 {
        store
            .change(|change| {
                change.next_revision()?;
                change.put(&purge(round))
            })
            .expect("written");
    }
    let before = std::fs::read(&path).expect("bytes");
    store
        .change(|change| {
            change.next_revision()?;
            change.put(&purge(6))
        })
        .expect("written");
    let after = std::fs::read(&path).expect("bytes");
    drop(store);
    let pages: Vec<usize> = (0..after.len().div_ceil(4096))
        .filter(|page| {
            before.get(page * 4096..(page + 1) * 4096) != after.get(page * 4096..(page + 1) * 4096)
        })
        .collect();
    assert!(pages.len() > 1, "a commit writes its data and its header");
    // Every order in which the header (page 0) came last, as the two phases promise.
    for landed in 0..pages.len() {
        let mut torn = before.clone();
        torn.resize(after.len(), 0);
        for page in pages.iter().filter(|page| **page != 0).take(landed) {
            let range = page * 4096..(page + 1) * 4096;
            torn[range.clone()].copy_from_slice(&after[range]);
        }
        let copy = room.path().join(format!("torn-{landed}"));
        std::fs::write(&copy, &torn).expect("written");
        let opened = Store::open(&copy).expect("the commit before");
        let view = opened.view().expect("view");
        assert_eq!(view.revision().expect("number"), 5, "{landed} of {} pages landed", pages.len());
        assert_eq!(view.all::<Purge>().expect("rows").len(), 5);
    }
}

#[test]
fn the_revision_only_grows() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    {
        let store = Store::open(&path).expect("new");
        let taken: Vec<u64> = (0..3).map(|_| store.change(Change::next_revision).expect("number")).collect();
        assert_eq!(taken, [1, 2, 3]);
        store.change(|change| change.raise("revision", 90)).expect("raised");
    }
    let store = Store::open(&path).expect("again");
    assert_eq!(store.change(Change::next_revision).expect("number"), 91);
    let back = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        store.change(|change| change.raise("revision", 5))
    }));
    assert!(back.is_err());
}

#[test]
fn the_file_is_its_owners_and_has_one_user() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    let _store = Store::open(&path).expect("new");
    let mode = std::fs::metadata(&path).expect("file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let error = Store::open(&path).expect_err("in use").to_string();
    assert!(error.contains("another process"), "{error}");
}

#[test]
fn a_newer_schema_and_a_foreign_file_are_refused_by_name() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    {
        let store = Store::open(&path).expect("new");
        store.change(|change| change.raise("schema", SCHEMA + 1)).expect("raised");
    }
    let error = Store::open(&path).expect_err("newer").to_string();
    assert!(error.contains("schema 2") && error.contains("newer program"), "{error}");

    let foreign = room.path().join("foreign");
    std::fs::write(&foreign, b"something that is no store, and longer than a header".repeat(200))
        .expect("written");
    let error = Store::open(&foreign).expect_err("foreign").to_string();
    assert!(error.contains("foreign"), "{error}");
}
