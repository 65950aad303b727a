//! What the table forgets, when, and what it does not have to.

use super::uncacheable::{LIFE, RECORDS_MAX};
use super::*;
use http::{HeaderMap, HeaderValue, header};

const ROOMY: TableLimits =
    TableLimits { objects_max: 1 << 20, metadata_bytes_max: 1 << 30, ram_bytes: 16 << 20 };
const SECOND: std::time::Duration = std::time::Duration::from_secs(1);

fn resolve(table: &Table, path: &[u8], now: Instant) -> Option<Arc<Resolve>> {
    match table.find_or_resolve(0, path, false, None, now) {
        Lookup::Lead(resolve) => Some(resolve),
        _ => None,
    }
}

/// Publishes an object of 1 GiB whose header record has some `texts` bytes.
fn publish(table: &Table, name: &str, texts: usize) -> Arc<ObjectEntry> {
    let now = Instant::now();
    let resolve = resolve(table, name.as_bytes(), now).expect("it is not known yet");
    let mut headers = HeaderMap::new();
    headers.insert(header::ETAG, HeaderValue::from_static("\"v\""));
    let text = HeaderValue::from_str(&"x".repeat(texts)).expect("a text");
    headers.insert(header::CONTENT_TYPE, text);
    let grid = Grid::new(1 << 16).expect("a grid");
    let entry = table.entry(resolve.key.clone(), ObjectFacts::from_headers(&headers, 1 << 30), grid, now);
    table.publish(&resolve, &entry);
    table.settle(&resolve, Resolved::Known(Arc::clone(&entry)));
    entry
}

fn kept(table: &Table) -> (u64, u64) {
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    (load(&table.meter.kept_objects), load(&table.meter.kept_bytes))
}

#[test]
fn a_node_that_asks_joins_no_question_to_a_node() {
    let table = Table::new(ROOMY);
    let now = Instant::now();
    let ask = |asks_node: Option<&dyn Fn() -> bool>| table.find_or_resolve(0, b"k", false, asks_node, now);
    let Lookup::Lead(first) = ask(Some(&|| true)) else { panic!("nobody has asked") };
    assert!(first.asks_node);
    assert!(matches!(ask(Some(&|| false)), Lookup::Join(joined) if Arc::ptr_eq(&joined, &first)));
    let Lookup::Lead(second) = ask(None) else { panic!("it would wait for a node that may wait for it") };
    assert!(!second.asks_node);
    assert!(matches!(ask(None), Lookup::Join(joined) if Arc::ptr_eq(&joined, &second)));
}

#[test]
fn what_cannot_be_kept_is_remembered_for_a_while() {
    let table = Table::new(ROOMY);
    let now = Instant::now();
    let asked = resolve(&table, b"loose", now).expect("unknown");
    table.publish_uncacheable(&asked, now);
    table.settle(&asked, Resolved::Bypass);
    assert!(matches!(table.find_or_resolve(0, b"loose", false, None, now), Lookup::Uncacheable));
    assert!(matches!(
        table.find_or_resolve(0, b"loose", true, None, now + LIFE - SECOND),
        Lookup::Uncacheable
    ));
    assert!(resolve(&table, b"other", now).is_some() && table.find(0, b"loose").is_none());
    let again = resolve(&table, b"loose", now + LIFE).expect("the time is over");
    // What the question finds now counts.
    let entry = table.entry(
        again.key.clone(),
        ObjectFacts::from_headers(&HeaderMap::new(), 1),
        Grid::new(1 << 16).expect("a grid"),
        now,
    );
    table.publish(&again, &entry);
    table.settle(&again, Resolved::Known(entry));
    assert!(matches!(table.find_or_resolve(0, b"loose", false, None, now), Lookup::Known(_)));
    table.forget(0, b"loose");
    assert!(resolve(&table, b"loose", now).is_some(), "the record is gone with the publication");
}

#[test]
fn a_write_or_purge_forgets_what_cannot_be_kept() {
    let table = Table::new(ROOMY);
    let now = Instant::now();
    for forget in [|table: &Table| assert!(!table.forget(0, b"loose")), |table: &Table| table.forget_all(0)] {
        let before = resolve(&table, b"loose", now).expect("unknown");
        table.publish_uncacheable(&before, now);
        table.settle(&before, Resolved::Bypass);
        assert!(table.status().metadata_bytes > 0, "it counts");
        forget(&table);
        assert_eq!((table.status().metadata_bytes, kept(&table)), (0, (0, 0)));
        let asked = resolve(&table, b"loose", now).expect("unknown again");
        // What was asked before a write says nothing about what is there after it.
        forget(&table);
        table.publish_uncacheable(&asked, now);
        table.settle(&asked, Resolved::Bypass);
        let next = resolve(&table, b"loose", now).expect("a late answer is not believed");
        table.settle(&next, Resolved::Lost);
    }
}

#[test]
fn the_records_of_what_cannot_be_kept_are_few() {
    let table = Table::new(TableLimits { metadata_bytes_max: 20_000, ..ROOMY });
    let now = Instant::now();
    for number in 0..3 * SHARDS * RECORDS_MAX {
        let asked = resolve(&table, format!("loose-{number}").as_bytes(), now).expect("unknown");
        table.publish_uncacheable(&asked, now);
        table.settle(&asked, Resolved::Bypass);
        assert!(kept(&table).1 <= 20_000);
    }
    let roomy = Table::new(ROOMY);
    for number in 0..2 * SHARDS * RECORDS_MAX {
        let asked = resolve(&roomy, format!("loose-{number}").as_bytes(), now).expect("unknown");
        roomy.publish_uncacheable(&asked, now);
        roomy.settle(&asked, Resolved::Bypass);
    }
    let last = format!("loose-{}", 2 * SHARDS * RECORDS_MAX - 1);
    assert!(matches!(roomy.find_or_resolve(0, last.as_bytes(), false, None, now), Lookup::Uncacheable));
    assert!(roomy.status().metadata_bytes < (SHARDS * RECORDS_MAX * 200) as u64);
}

/// A walk through one shard only would drop what has just come, and stay above the bound all the same.
#[test]
fn room_for_one_is_made_by_all_shards() {
    const BUDGET: u64 = 200_000;
    let table = Table::new(TableLimits { metadata_bytes_max: BUDGET, ..ROOMY });
    for number in 0..1000 {
        publish(&table, &format!("small-{number}"), 10);
        assert!(kept(&table).1 <= BUDGET);
    }
    let large = publish(&table, "large", 150_000);
    assert!(large.is_current() && table.find(0, b"large").is_some(), "what has come stays");
    assert!(kept(&table).1 <= BUDGET);
    assert!(kept(&table).0 > 1, "and not everything else went");
    assert_eq!(table.status().metadata_bytes, kept(&table).1, "nobody holds what was dropped");
}

/// Entries that were forgotten and are still read cost memory, which no eviction brings back.
#[test]
fn readers_of_dropped_entries_cost_nobody_else_his_entry() {
    let table = Table::new(TableLimits { objects_max: 100, ..ROOMY });
    let mut readers = Vec::new();
    for number in 0..200 {
        let name = format!("read-{number}");
        readers.push(publish(&table, &name, 10));
        assert!(table.forget(0, name.as_bytes()));
    }
    let wanted: Vec<_> = (0..100).map(|number| format!("wanted-{number}")).collect();
    for name in &wanted {
        publish(&table, name, 10);
    }
    assert!(wanted.iter().all(|name| table.find(0, name.as_bytes()).is_some()));
    let status = table.status();
    assert_eq!((status.objects, status.objects_evicted, kept(&table).0), (300, 0, 100));
    drop(readers);
    assert_eq!(table.status().objects, 100);
    // And the bound itself holds; what is used gets a second chance.
    table.find(0, b"wanted-7");
    for number in 0..50 {
        publish(&table, &format!("more-{number}"), 10);
        table.find(0, b"wanted-7");
    }
    assert_eq!(kept(&table).0, 100);
    assert!(table.find(0, b"wanted-7").is_some());
}

#[test]
fn a_survey_says_where_extents_are_without_looking_at_all() {
    let table = Table::new(ROOMY);
    let entry = publish(&table, "long", 10);
    let most = SURVEY_EXTENTS_MAX as u32;
    let hold = |extents: std::ops::Range<u32>| {
        for extent in extents {
            let slot = Slot { drive: 0, segment: 0, offset: extent, sequence: 1 };
            lock(&entry.extents).insert(extent, Extent { slot: Some(slot), ..Extent::default() });
        }
    };
    assert_eq!(entry.survey(0, 16_383), Survey::Nothing);
    hold(10..20);
    assert_eq!(entry.survey(10, 19), Survey::Drive);
    assert_eq!(entry.survey(9, 19), Survey::Some);
    assert_eq!(entry.survey(10, 20), Survey::Some);
    assert_eq!(entry.survey(20, 29), Survey::Nothing);
    hold(0..10);
    hold(20..16_384);
    assert_eq!(entry.survey(0, most - 1), Survey::Drive);
    // They are all there; nobody has looked.
    assert_eq!(entry.survey(0, most), Survey::Some);
    let run = Arc::new(());
    lock(&entry.extents).remove(&15);
    assert!(entry.locate_or_fill(15, 1, &run).is_err());
    assert_eq!(entry.survey(10, 19), Survey::Some);
    assert_eq!(entry.survey(15, 15), Survey::Nothing, "what is on its way is not here");
}

#[test]
fn a_prefix_is_forgotten_and_nothing_else() {
    let table = Table::new(TableLimits { objects_max: 100, metadata_bytes_max: 1 << 20, ..ROOMY });
    for name in ["a/1", "a/2", "ab", "b/1"] {
        publish(&table, name, 0);
    }
    let under_way = resolve(&table, b"a/3", Instant::now()).expect("nobody asks yet");
    table.forget_prefix(0, b"a/");
    for (name, is_known) in [("a/1", false), ("a/2", false), ("ab", true), ("b/1", true)] {
        assert_eq!(table.find(0, name.as_bytes()).is_some(), is_known, "{name}");
    }
    // What was asked before the purge serves those who asked, and nobody after.
    assert!(resolve(&table, b"a/3", Instant::now()).is_some(), "the question is put anew");
    drop(under_way);
    table.forget_prefix(1, b"");
    assert!(table.find(0, b"ab").is_some(), "another accelerator's objects stay");
}

/// A set read again and again in order, eight times the memory: each extent was read before, so each was taken into RAM,
/// and put out what would have been no use either. It cost a fifth of the processor time of a drive hit, and the cache.
#[test]
fn what_comes_round_too_late_for_ram_stays_on_the_drive() {
    let table = Table::new(TableLimits { ram_bytes: 1 << 20, ..ROOMY });
    let entry = publish(&table, "long", 0);
    let slot = |offset| Slot { drive: 0, segment: 0, offset, sequence: 1 };
    let sums = BlockSums::of(&[1; 10], entry.version, 0);
    for extent in 0..128 {
        let state = Extent { slot: Some(slot(extent)), sums: Some(sums.clone()), ..Extent::default() };
        lock(&entry.extents).insert(extent, state);
    }
    let is_frequent = |extent| match entry.locate(extent) {
        Whereabouts::Drive(_, _, is_frequent) => is_frequent,
        other => panic!("{other:?}"),
    };
    for round in 0..3 {
        for extent in 0..128 {
            assert!(!is_frequent(extent), "extent {extent}, round {round}");
        }
    }
    // RAM holds 16 extents of 64 KiB.
    for (others, would_have_stayed) in [(10, true), (15, true), (17, false), (100, false)] {
        is_frequent(127);
        (0..others).for_each(|extent| _ = is_frequent(extent));
        assert_eq!(is_frequent(127), would_have_stayed, "after {others} others");
    }
}
