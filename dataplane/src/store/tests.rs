//! The store as a whole, on real files: what it takes, keeps, drops and refuses.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc;

use super::body::{AlignedBytes, Body};
use super::*;

const MIB: u64 = 1 << 20;

pub(super) fn spec(path: &Path, size: impl Into<Option<u64>>) -> DriveSpec {
    DriveSpec { path: path.to_owned(), size: size.into() }
}

pub(super) fn options(engine: WriterEngine) -> StoreOptions {
    StoreOptions { engine, body_bytes_max: MIB as u32, queue_bytes: 8 * MIB, ..StoreOptions::default() }
}

/// A body whose every word tells which body it is and where in it.
pub(super) fn body(number: u64, bytes: usize) -> AlignedBytes {
    let mut body = AlignedBytes::zeroed(bytes);
    for (at, word) in (0_u64..).zip(body.chunks_exact_mut(8)) {
        word.copy_from_slice(&(number << 32 | at).to_le_bytes());
    }
    body
}

/// Sizes that do not divide a segment, from one block to a mebibyte.
fn length(number: u64) -> usize {
    4096 * (1 + (number * 97 % 256) as usize)
}

pub(super) type Answer = (u64, Result<Slot, WriteError>);

pub(super) fn teller(number: u64, answers: &mpsc::Sender<Answer>) -> WriteDone {
    let answers = answers.clone();
    Box::new(move |result| answers.send((number, result)).unwrap())
}

/// Offers until it is taken, waiting for an answer where the queue is full.
fn put(
    store: &Store,
    number: u64,
    sender: &mpsc::Sender<Answer>,
    receiver: &mpsc::Receiver<Answer>,
) -> Vec<Answer> {
    let mut answers = Vec::new();
    loop {
        match store.offer(body(number, length(number)), teller(number, sender)) {
            Ok(()) => return answers,
            Err(Refused::QueueFull) => answers.push(receiver.recv().unwrap()),
            Err(other) => panic!("{other}"),
        }
    }
}

fn put_many(store: &Store, numbers: std::ops::Range<u64>) -> Vec<(u64, Slot)> {
    let (sender, receiver) = mpsc::channel();
    let mut answers: Vec<Answer> =
        numbers.flat_map(|number| put(store, number, &sender, &receiver)).collect();
    drop(sender);
    answers.extend(receiver);
    answers.into_iter().map(|(number, result)| (number, result.unwrap())).collect()
}

/// Reads as a worker does: place, read, and ask again.
pub(super) fn read(store: &Store, slot: Slot, bytes: usize) -> Option<AlignedBytes> {
    let place = store.place(slot)?;
    let drive = store.lanes[usize::from(slot.drive)].writer.drive();
    assert_eq!(place.fd, drive.file().as_raw_fd());
    let mut buffer = AlignedBytes::zeroed(bytes);
    drive.file().read_exact_at(&mut buffer, place.offset).unwrap();
    store.holds(slot).then_some(buffer)
}

fn three_times_over(engine: WriterEngine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive");
    let store = Store::open(&[spec(&path, 16 * MIB)], options(engine)).unwrap();
    assert!(matches!(store.notes(), [DriveNote::Created { .. }]));
    let slots = put_many(&store, 0..100);
    assert_eq!(slots.len(), 100);

    let status = store.status().drives.remove(0);
    assert_eq!(status.is_uring, engine != WriterEngine::Portable);
    assert!(status.written_bytes > 3 * store.capacity_bytes(), "{status:?}");
    assert_eq!(
        (status.written_jobs, status.failed_jobs, status.queued_bytes, status.queued_jobs),
        (100, 0, 0, 0)
    );
    assert!(status.segments_reclaimed >= 30, "{status:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 16 * MIB, "capacity is a bound");

    let mut kept_bytes = 0;
    for &(number, slot) in &slots {
        match read(&store, slot, length(number)) {
            Some(bytes) => {
                assert!(bytes[..] == body(number, length(number))[..], "body {number} at {slot:?}");
                kept_bytes += length(number) as u64;
            }
            None => assert_eq!(store.place(slot), None),
        }
    }
    // Fifteen segments, of which each wastes less than one body at its end.
    assert!(kept_bytes > store.capacity_bytes() / 4 && kept_bytes <= store.capacity_bytes(), "{kept_bytes}");
    let oldest_kept =
        slots.iter().filter(|(_, slot)| store.holds(*slot)).map(|(_, slot)| slot.sequence).min().unwrap();
    assert!(
        slots.iter().all(|(_, slot)| store.holds(*slot) == (slot.sequence >= oldest_kept)),
        "the oldest go first"
    );
}

#[test]
fn what_is_held_reads_back_right_and_the_rest_is_absent_on_uring() {
    three_times_over(WriterEngine::Uring);
}

#[test]
fn what_is_held_reads_back_right_and_the_rest_is_absent_on_portable() {
    three_times_over(WriterEngine::Portable);
}

#[test]
fn readers_beside_a_turning_ring_never_see_another_body() {
    let folder = tempfile::tempdir().unwrap();
    let store =
        Store::open(&[spec(&folder.path().join("drive"), 16 * MIB)], options(WriterEngine::Auto)).unwrap();
    let (sender, receiver) = mpsc::channel::<(u64, Slot)>();
    let reader = {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            let (mut held, mut kept) = (0, Vec::new());
            for (number, slot) in receiver {
                // Each slot is read when new and again when its segment is about to come round.
                kept.push((number, slot));
                let old = kept.len().saturating_sub(25);
                for &(number, slot) in [kept.last().unwrap(), &kept[old]] {
                    if let Some(bytes) = read(&store, slot, length(number)) {
                        assert!(bytes[..] == body(number, length(number))[..], "body {number} at {slot:?}");
                        held += 1;
                    }
                }
            }
            held
        })
    };
    let (answers, answered) = mpsc::channel();
    let pass_on = |answers: Vec<Answer>| {
        for (number, result) in answers {
            sender.send((number, result.unwrap())).unwrap();
        }
    };
    for number in 0..300 {
        pass_on(put(&store, number, &answers, &answered));
    }
    drop(answers);
    pass_on(answered.into_iter().collect());
    drop(sender);
    assert!(reader.join().unwrap() > 0);
}

#[test]
fn the_queue_is_bounded_in_bytes_and_in_jobs() {
    let folder = tempfile::tempdir().unwrap();
    let limits =
        StoreOptions { queue_bytes: 2 * MIB, queue_jobs: 4, depth: 1, ..options(WriterEngine::Auto) };
    let store = Store::open(&[spec(&folder.path().join("drive"), 16 * MIB)], limits).unwrap();
    // The first job's `done` keeps the writer from going on until it is let go.
    let (let_go, held) = mpsc::channel::<()>();
    let (entered, wait_entered) = mpsc::channel();
    let block: WriteDone = Box::new(move |result| {
        entered.send(result.is_ok()).unwrap();
        held.recv().unwrap();
    });
    store.offer(body(0, 4096), block).unwrap();
    assert!(wait_entered.recv().unwrap());
    let (answers, answered) = mpsc::channel();

    store.offer(body(1, MIB as usize), teller(1, &answers)).unwrap();
    store.offer(body(2, MIB as usize), teller(2, &answers)).unwrap();
    assert_eq!(store.offer(body(3, 4096), teller(3, &answers)), Err(Refused::QueueFull), "bytes");
    let status = store.status();
    assert_eq!((status.drives[0].queued_bytes, status.drives[0].queued_jobs), (2 * MIB, 2));
    assert_eq!(status.refused_queue_full, 1);
    let_go.send(()).unwrap();
    assert_eq!(answered.iter().take(2).filter(|(_, result)| result.is_ok()).count(), 2);

    let (let_go, held) = mpsc::channel::<()>();
    let (entered, wait_entered) = mpsc::channel();
    let block: WriteDone = Box::new(move |_| {
        entered.send(()).unwrap();
        held.recv().unwrap();
    });
    store.offer(body(0, 4096), block).unwrap();
    wait_entered.recv().unwrap();
    for number in 0..4 {
        store.offer(body(number, 4096), teller(number, &answers)).unwrap();
    }
    assert_eq!(store.offer(body(4, 4096), teller(4, &answers)), Err(Refused::QueueFull), "jobs");
    let_go.send(()).unwrap();
    assert_eq!(answered.iter().take(4).filter(|(_, result)| result.is_ok()).count(), 4);
}

#[test]
fn what_no_segment_can_hold_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive");
    let large = StoreOptions { body_bytes_max: 2 << 20, ..options(WriterEngine::Auto) };
    let error = Store::open(&[spec(&path, 16 * MIB)], large).err().unwrap();
    assert!(error.to_string().contains(&(17 * MIB).to_string()), "{error}");
    assert!(!path.exists(), "told before the file was made");

    let store = Store::open(&[spec(&path, 16 * MIB)], options(WriterEngine::Auto)).unwrap();
    let never = || -> WriteDone { Box::new(|_| panic!("refused, so never called")) };
    assert_eq!(store.offer(body(0, 2 << 20), never()), Err(Refused::TooLarge));
    assert_eq!(store.offer(AlignedBytes::zeroed(0), never()), Err(Refused::Empty));
    assert_eq!(store.status().refused_unfit, 2);
    drop(store);
    let narrow = StoreOptions { body_bytes_max: 4096, queue_bytes: 8192, ..options(WriterEngine::Auto) };
    let store = Store::open(&[spec(&path, None)], narrow).unwrap();
    assert_eq!(
        store.offer(body(0, 12_288), never()),
        Err(Refused::TooLarge),
        "no queue would ever have room"
    );
}

#[test]
fn bounds_that_let_nothing_through_are_refused() {
    for (limits, name) in [
        (StoreOptions { depth: 0, ..StoreOptions::default() }, "depth"),
        (StoreOptions { queue_jobs: 0, ..StoreOptions::default() }, "queue_jobs"),
        (StoreOptions { queue_bytes: 1, ..StoreOptions::default() }, "queue_bytes"),
    ] {
        let error = Store::open(&[], limits).err().unwrap();
        assert!(error.to_string().starts_with(name), "{error}");
    }
}

#[test]
fn a_lease_is_written_as_it_was_frozen_and_given_back() {
    use crate::arena::{Arena, ArenaOptions, Purpose};
    let sizes = ArenaOptions { bytes: 8 << 20, reads_bytes: 2 << 20, fills_bytes: 4 << 20 };
    let arena = Arena::build(sizes).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for engine in [WriterEngine::Uring, WriterEngine::Portable] {
        let store = Store::open(&[spec(&folder.path().join("drive"), 16 * MIB)], options(engine)).unwrap();
        let mut lease = arena.grant(Purpose::Fill, 100_000).unwrap();
        lease.append(&body(1, 102_400)[..100_000]);
        let (sender, receiver) = mpsc::channel();
        store.offer(lease.freeze(), teller(1, &sender)).unwrap();
        let bytes = read(&store, receiver.recv().unwrap().1.unwrap(), 102_400).unwrap();
        assert!(bytes[..100_000] == body(1, 102_400)[..100_000]);
        assert!(bytes[100_000..].iter().all(|&byte| byte == 0), "padding is zeros");
        assert_eq!(arena.status().fills_bytes, 0, "nobody holds it any more");
    }
}

#[test]
fn without_drives_every_body_is_refused() {
    let store = Store::open(&[], StoreOptions::default()).unwrap();
    assert_eq!(store.offer(body(0, 4096), Box::new(|_| ())), Err(Refused::NoDrive));
    assert_eq!(store.place(Slot { drive: 0, segment: 0, offset: 0, sequence: 1 }), None);
}

#[test]
fn slots_of_an_earlier_run_are_held_by_no_later_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive");
    let mut earlier: Vec<Slot> = Vec::new();
    for run in 0..3 {
        let store = Store::open(&[spec(&path, 16 * MIB)], options(WriterEngine::Auto)).unwrap();
        assert!(earlier.iter().all(|slot| !store.holds(*slot)), "before anything is written");
        let now: Vec<Slot> = put_many(&store, 0..40).into_iter().map(|(_, slot)| slot).collect();
        assert!(earlier.iter().all(|slot| !store.holds(*slot) && store.place(*slot).is_none()), "run {run}");
        let highest = earlier.iter().map(|slot| slot.sequence).max().unwrap_or(0);
        assert!(now.iter().all(|slot| slot.sequence > highest));
        assert!(
            now.iter().all(|slot| slot.sequence < highest + 40),
            "an orderly close gives back what it did not use"
        );
        earlier.extend(now);
    }
}

#[test]
fn sequences_go_on_where_more_had_to_be_reserved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive");
    let opened = Drive::open_or_create(&spec(&path, 16 * MIB), None).unwrap();
    let scarce = Opened { sequences: opened.sequences.end - 2..opened.sequences.end, ..opened };
    let end = scarce.sequences.end;
    let lane = Lane::start(0, scarce, options(WriterEngine::Auto)).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..4 {
        lane.writer
            .offer(Body::new(body(number, MIB as usize)), teller(number, &sender))
            .map_err(|(why, ..)| why)
            .unwrap();
    }
    let mut sequences: Vec<u32> =
        receiver.iter().take(4).map(|(_, result)| result.unwrap().sequence).collect();
    sequences.sort_unstable();
    assert_eq!(sequences, [end - 2, end - 1, end, end + 1]);
    assert!(lane.writer.drive().superblock().sequence_floor > end + 1);
}

#[test]
fn where_the_kernel_refuses_a_ring_the_portable_writer_does_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive");
    // More entries than the kernel gives to a ring.
    let refused = |engine| StoreOptions { depth: 40_000, ..options(engine) };
    let error = Store::open(&[spec(&path, 16 * MIB)], refused(WriterEngine::Uring)).err().unwrap();
    assert!(error.to_string().contains("--engine auto"), "{error}");
    let store = Store::open(&[spec(&path, None)], refused(WriterEngine::Auto)).unwrap();
    assert!(!store.status().drives[0].is_uring);
    for (number, slot) in put_many(&store, 0..5) {
        assert!(read(&store, slot, length(number)).unwrap()[..] == body(number, length(number))[..]);
    }
}

#[test]
fn an_orderly_close_writes_what_is_queued_and_refuses_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let store =
        Store::open(&[spec(&folder.path().join("drive"), 16 * MIB)], options(WriterEngine::Auto)).unwrap();
    let (sender, receiver) = mpsc::channel();
    for number in 0..8 {
        store.offer(body(number, MIB as usize), teller(number, &sender)).unwrap();
    }
    store.close();
    store.close();
    assert_eq!(store.offer(body(9, 4096), teller(9, &sender)), Err(Refused::Closed));
    drop(sender);
    let answers: Vec<Answer> = receiver.into_iter().collect();
    assert_eq!(answers.len(), 8);
    for (number, result) in answers {
        let bytes = read(&store, result.unwrap(), MIB as usize).unwrap();
        assert!(bytes[..] == body(number, MIB as usize)[..]);
    }
}

#[test]
fn a_close_without_time_answers_every_body_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    for engine in [WriterEngine::Uring, WriterEngine::Portable] {
        let limits = StoreOptions { close_within: Duration::ZERO, depth: 2, ..options(engine) };
        let store = Store::open(&[spec(&folder.path().join("drive"), 16 * MIB)], limits).unwrap();
        let (sender, receiver) = mpsc::channel();
        for number in 0..8 {
            store.offer(body(number, MIB as usize), teller(number, &sender)).unwrap();
        }
        store.close();
        drop(sender);
        let mut numbers: Vec<u64> = receiver.iter().map(|(number, _)| number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(store.status().drives[0].queued_bytes, 0);
    }
}

#[test]
fn the_last_owner_may_let_go_inside_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("drive");
    let store = Store::open(&[spec(&path, 16 * MIB)], options(WriterEngine::Auto)).unwrap();
    let (give, take) = mpsc::channel::<Arc<Store>>();
    let (sender, receiver) = mpsc::channel();
    let done = Box::new(move |result: Result<Slot, WriteError>| {
        drop(take.recv().unwrap());
        sender.send(result.is_ok()).unwrap();
    });
    store.offer(body(0, 4096), done).unwrap();
    give.send(store).unwrap();
    assert!(receiver.recv().unwrap());
    // The thread ends by itself and lets the drive go.
    assert!(Store::open(&[spec(&path, None)], options(WriterEngine::Auto)).is_ok());
}

/// A drive of which every write fails: its superblocks are real, its file is then opened for reading only.
fn failing_lane(folder: &Path, engine: WriterEngine) -> Lane {
    let mut opened = Drive::open_or_create(&spec(&folder.join("drive"), 16 * MIB), None).unwrap();
    opened.drive.replace_file(std::fs::File::open(folder.join("drive")).unwrap());
    Lane::start(0, opened, options(engine)).unwrap()
}

#[test]
fn a_drive_that_keeps_failing_is_given_up_and_says_so() {
    for engine in [WriterEngine::Uring, WriterEngine::Portable] {
        let folder = tempfile::tempdir().unwrap();
        let lane = failing_lane(folder.path(), engine);
        let (sender, receiver) = mpsc::channel();
        let (mut answered, mut number) = (0, 0);
        let refused = loop {
            match lane.writer.offer(Body::new(body(number, 4096)), teller(number, &sender)) {
                Ok(()) => {
                    answered += 1;
                    assert!(matches!(receiver.recv().unwrap().1, Err(WriteError::Drive { .. })));
                }
                Err((why, ..)) => break why,
            }
            number += 1;
        };
        assert_eq!((refused, answered), (Refused::DriveDead, 8));
        let status = lane.status();
        assert!(status.is_dead);
        assert_eq!((status.failed_jobs, status.written_jobs, status.queued_bytes), (8, 0, 0));
    }
}

#[test]
fn drives_are_filled_at_the_same_pace_and_a_dead_one_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let specs = [spec(&folder.path().join("small"), 16 * MIB), spec(&folder.path().join("large"), 48 * MIB)];
    // Room for all of them: a drive whose queue is full is passed over, however little it has taken.
    let roomy = StoreOptions { queue_bytes: 256 * MIB, ..options(WriterEngine::Auto) };
    let store = Store::open(&specs, roomy).unwrap();
    let nodes: Vec<Identity> = store.lanes.iter().map(|lane| lane.writer.drive().superblock().node).collect();
    assert_eq!(nodes[0], nodes[1], "drives made together belong to one node");
    for (number, slot) in put_many(&store, 0..120) {
        if let Some(bytes) = read(&store, slot, length(number)) {
            assert!(bytes[..] == body(number, length(number))[..]);
        }
    }
    let taken = |at: usize| store.lanes[at].taken_bytes.load(Ordering::Relaxed);
    assert!(taken(0) > 0 && taken(1) > 2 * taken(0), "{} and {}", taken(0), taken(1));

    store.lanes[0].writer.counts().is_dead.store(true, Ordering::Relaxed);
    assert!(put_many(&store, 0..20).iter().all(|(_, slot)| slot.drive == 1));
    store.lanes[1].writer.counts().is_dead.store(true, Ordering::Relaxed);
    assert_eq!(store.offer(body(0, 4096), Box::new(|_| ())), Err(Refused::DriveDead));
}

#[test]
fn the_same_drive_under_two_names_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    drop(Store::open(&[spec(&first, 16 * MIB)], options(WriterEngine::Auto)).unwrap());
    std::fs::copy(&first, &second).unwrap();
    let error =
        Store::open(&[spec(&first, None), spec(&second, None)], options(WriterEngine::Auto)).err().unwrap();
    assert!(matches!(error, StoreError::Twice { .. }), "{error}");
    std::os::unix::fs::symlink(&first, folder.path().join("link")).unwrap();
    let link = folder.path().join("link");
    let error =
        Store::open(&[spec(&first, None), spec(&link, None)], options(WriterEngine::Auto)).err().unwrap();
    assert!(matches!(error, StoreError::Drive { source: DriveError::Locked { .. } }), "{error}");
}
