//! The arena: reserves, eviction by page, watermarks, and memory that the network may still read.

use std::sync::Arc;

use super::*;

struct Keeper(Mutex<Vec<Option<Lease>>>);

impl Resident for Keeper {
    fn evict(&self, extent: u32, lease: LeaseId) {
        let gone = {
            let mut kept = self.0.lock().unwrap();
            assert_eq!(kept[extent as usize].as_ref().map(Lease::id), Some(lease));
            kept[extent as usize].take()
        };
        drop(gone);
    }
}

fn small() -> &'static Arena {
    Arena::build(ArenaOptions { bytes: 64 << 20, reads_bytes: 4 << 20, fills_bytes: 4 << 20 }).unwrap()
}

fn fill_ram(arena: &'static Arena, keeper: &Arc<Keeper>, len: usize, total: usize) {
    for _ in 0..total / len {
        let mut lease = arena.grant(Purpose::Fill, len).expect("the RAM tier yields");
        lease.advance(len);
        let lease = lease.freeze();
        let extent = {
            let mut kept = keeper.0.lock().unwrap();
            kept.push(Some(lease.clone()));
            kept.len() as u32 - 1
        };
        let resident: Weak<dyn Resident> = Arc::downgrade(keeper) as _;
        arena.keep(&lease, resident, extent);
    }
}

#[test]
fn a_turned_mix_keeps_85_percent_usable() {
    let arena = small();
    let keeper = Arc::new(Keeper(Mutex::new(Vec::new())));
    for turn in 0..5 {
        for len in [100_000, 1 << 20, 120 << 10] {
            fill_ram(arena, &keeper, len, 3 * (64 << 20));
            let kept: usize = {
                let kept = keeper.0.lock().unwrap();
                kept.iter().flatten().map(Lease::filled).filter(|filled| *filled == len).sum()
            };
            let usable = arena.status().ram_bytes_max as usize;
            assert!(kept * 100 >= usable * 85, "turn {turn}: {kept} of {usable} usable with {len}");
        }
    }
    drop(keeper);
    assert_eq!(arena.status().ram_bytes, 0);
    assert_eq!(arena.status().pages_free, 32);
}

#[test]
fn a_pinned_lease_survives_its_eviction_and_returns_later() {
    let arena = small();
    let keeper = Arc::new(Keeper(Mutex::new(Vec::new())));
    fill_ram(arena, &keeper, 1 << 20, 1 << 20);
    let pinned = keeper.0.lock().unwrap()[0].clone().unwrap();
    fill_ram(arena, &keeper, 1 << 20, 200 << 20);
    assert!(keeper.0.lock().unwrap()[0].is_none(), "the tier has let it go");
    assert_eq!(pinned.filled(), 1 << 20);
    drop(pinned);
    drop(keeper);
    assert_eq!(arena.status().pages_free, 32);
}

#[test]
fn returned_bytes_are_poisoned_in_test_builds() {
    let arena = small();
    let mut lease = arena.grant(Purpose::Read, 8192).unwrap();
    lease.append(&[7; 8192]);
    let address = lease.lease().as_ptr() as usize;
    drop(lease);
    let mut again = arena.grant(Purpose::Read, 8192).unwrap();
    assert_eq!(again.lease().as_ptr() as usize, address, "the slot is lent again");
    again.advance(8192);
    assert!(again.freeze().bytes(0..8192).iter().all(|byte| *byte == POISON));
}

#[test]
fn a_reserve_bounds_its_purpose_and_leaves_the_others_alone() {
    let arena = small();
    let held: Vec<_> = std::iter::from_fn(|| arena.grant(Purpose::Read, 1 << 20)).collect();
    assert_eq!(held.len(), 4);
    assert!(arena.grant(Purpose::Fill, 1 << 20).is_some());
    assert_eq!(arena.status().grants_refused, 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_what_comes_back() {
    let arena = small();
    let mut held: Vec<_> = std::iter::from_fn(|| arena.grant(Purpose::Read, 2 << 20)).collect();
    let waiter = tokio::spawn(arena.grant_within(Purpose::Read, 1 << 20, Duration::from_secs(1)));
    tokio::task::yield_now().await;
    held.pop();
    assert!(waiter.await.unwrap().is_ok());
    held.push(arena.grant(Purpose::Read, 2 << 20).unwrap());
    assert!(arena.grant_within(Purpose::Read, 1 << 20, Duration::from_secs(1)).await.is_err());
    assert!(!arena.is_awaited());
    // A waiter whose client has gone is dropped in the middle of its wait.
    let dropped = arena.grant_within(Purpose::Read, 1 << 20, Duration::from_secs(9));
    assert!(tokio::time::timeout(Duration::from_secs(1), dropped).await.is_err());
    assert!(!arena.is_awaited(), "nobody waits any more");
}

#[test]
fn readers_see_only_what_was_written() {
    let arena = small();
    let mut writer = arena.grant(Purpose::Fill, 100).unwrap();
    let reader = writer.share();
    writer.append(b"abc");
    assert_eq!(reader.bytes(0..3), b"abc");
    assert!(std::panic::catch_unwind(|| reader.bytes(0..4).len()).is_err());
    let frozen = writer.freeze();
    assert_eq!(frozen.padded_len(), UNIT_BYTES);
    drop(frozen);
    assert_eq!(reader.bytes(1..3), b"bc");
}

#[test]
fn classes_cover_every_length() {
    for len in [1, 4096, 4097, 65536, 65537, 100_000, 102_400, 1 << 20, (1 << 20) + 1, 2 << 20] {
        assert!(slot_bytes(class_of(len)) >= len);
    }
    assert!(CLASS_UNITS.is_sorted());
    assert_eq!(usize::from(CLASS_UNITS[CLASS_UNITS.len() - 1]), PAGE_UNITS);
}

fn lent(arena: &'static Arena, len: usize) -> Lease {
    let mut lease = arena.grant(Purpose::Read, len).unwrap();
    lease.append(&vec![7; len]);
    let lease = lease.freeze();
    for _ in 0..3 {
        assert!(!lease.is_lendable());
        lease.touch();
    }
    assert!(lease.is_lendable());
    lease
}

#[test]
fn a_lent_slot_is_out_of_use_until_its_page_is_renewed() {
    use std::os::unix::fs::FileExt;

    let arena = small();
    let lease = lent(arena, 100_000);
    let neighbour = arena.grant(Purpose::Read, 100_000).unwrap();
    let (file, offset) = lease.lend().unwrap();
    let file = std::fs::File::from(file.try_clone_to_owned().unwrap());
    let mut seen = vec![0; 100_000];
    file.read_exact_at(&mut seen, offset).unwrap();
    assert!(seen == lease.bytes(0..100_000), "it is where the kernel is told to look");
    let (id, address) = (lease.id(), lease.as_ptr() as usize);
    drop(lease);
    assert_eq!(arena.status().reads_bytes, neighbour.capacity() as u64, "nobody is charged for it");
    file.read_exact_at(&mut seen, offset).unwrap();
    assert!(seen.iter().all(|byte| *byte == 7), "the network may still read it");
    let others: Vec<_> = std::iter::from_fn(|| arena.grant(Purpose::Read, 100_000)).collect();
    assert!(others.len() > 20 && others.iter().all(|other| other.lease().id() != id));
    drop(others);
    assert_eq!((arena.renewals(), arena.status().pages_free), (0, 31));
    assert_eq!(neighbour.lease().renewal(), 0);
    drop(neighbour);
    assert_eq!((arena.renewals(), arena.status().pages_free), (0, 31));
    assert!(arena.renew_spent() && !arena.renew_spent());
    assert_eq!((arena.renewals(), arena.status().pages_free), (1, 32));
    assert_eq!(arena.renewed_since(0, 0), (1, 32));
    assert_eq!(arena.renewed_since(0, 1), (0, 32));
    let again = arena.grant(Purpose::Read, 100_000).unwrap();
    assert_eq!((again.lease().id(), again.lease().as_ptr() as usize), (id, address));
    assert_eq!(again.lease().renewal(), 1);
    assert!(!again.lease().is_lendable(), "a new tenant begins cold");
}

#[test]
fn a_page_that_is_mostly_out_of_use_goes_before_hot_ones() {
    let arena = small();
    let keeper = Arc::new(Keeper(Mutex::new(Vec::new())));
    // Every page of the tier is hot; of the first only one slot is still kept, the others were lent and given back.
    fill_ram(arena, &keeper, 1 << 20, arena.status().ram_bytes_max as usize);
    let gone = {
        let mut kept = keeper.0.lock().unwrap();
        kept.iter().flatten().for_each(|lease| (0..3).for_each(|_| lease.touch()));
        kept[0].as_ref().unwrap().lend().unwrap();
        kept[0].take()
    };
    drop(gone);
    assert!(!arena.renew_spent(), "its neighbour is still kept");
    fill_ram(arena, &keeper, 1 << 20, 2 << 20);
    assert!(keeper.0.lock().unwrap()[1].is_none(), "the neighbour went first");
    assert_eq!(arena.status().pages_evicted, 1);
    assert_eq!(arena.renewals(), 0, "it waits for whoever keeps the memory");
    assert!(arena.renew_spent());
    assert_eq!(arena.renewals(), 1);
}

#[test]
fn one_waits_for_pages_to_renew() {
    let arena = small();
    let waiter = std::thread::spawn(|| {
        arena.wait_spent(Duration::from_hours(1));
        assert!(arena.renew_spent());
    });
    lent(arena, 2 << 20).lend().unwrap();
    waiter.join().unwrap();
    assert_eq!(arena.renewals(), 1);
    arena.wait_spent(Duration::ZERO);
}

#[test]
fn nothing_is_lent_while_slow_readers_hold_too_much() {
    let arena = small();
    let lease = lent(arena, 1 << 20);
    arena.set_lending(false);
    assert!(!lease.is_lendable());
    arena.set_lending(true);
    assert!(lease.is_lendable());
}
