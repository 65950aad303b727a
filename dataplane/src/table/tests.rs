//! What the table forgets, when, and what it does not have to.

use super::*;
use http::{HeaderMap, HeaderValue, header};

const ROOMY: TableLimits = TableLimits { objects_max: 1 << 20, metadata_bytes_max: 1 << 30 };

fn resolve(table: &Table, path: &[u8]) -> Option<Arc<Resolve>> {
    match table.find_or_resolve(0, path, false) {
        Lookup::Lead(resolve) => Some(resolve),
        _ => None,
    }
}

/// Publishes an object of 1 GiB whose header record has some `texts` bytes.
fn publish(table: &Table, name: &str, texts: usize) -> Arc<ObjectEntry> {
    let now = Instant::now();
    let resolve = resolve(table, name.as_bytes()).expect("it is not known yet");
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
