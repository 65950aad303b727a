//! Which objects the emulated store has.
//!
//! Declared datasets cost a line each however many objects they name; what clients PUT or DELETE is kept as
//! exceptions to them. Bodies of PUTs are kept whole, within a fixed amount of memory, so that what was written
//! is what is read. It knows nothing of HTTP or time.
#![forbid(unsafe_code)]

use super::model::Class;
use crate::content::{Content, splitmix64};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use twox_hash::xxhash3_64::Hasher;

/// All PUT bodies together, bytes; a PUT beyond it is refused with 507.
pub const PUT_BYTES_MAX: u64 = 64 << 20;
/// The most objects in one dataset: what eight digits can name.
pub const DATASET_COUNT_MAX: u64 = 100_000_000;
const DIGITS: usize = 8;

/// `count` objects of one size, named `prefix` + eight digits, with generated content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dataset {
    /// The bucket they are in.
    pub bucket: String,
    /// What their names begin with, such as `bulk/`.
    pub prefix: String,
    /// How many, from number 0 on.
    pub count: u64,
    /// Bytes of each.
    pub size: u64,
    /// Which first byte they get.
    #[serde(default)]
    pub class: Class,
    /// The version of their content, from 1 on.
    #[serde(default = "first_version")]
    pub version: u32,
}

fn first_version() -> u32 {
    1
}

/// The name of object `index` of a dataset.
pub fn object_name(prefix: &str, index: u64) -> String {
    format!("{prefix}{index:0DIGITS$}")
}

/// One object as it is now.
#[derive(Clone, Debug)]
pub struct Found {
    /// Bytes.
    pub size: u64,
    /// Counts the versions of this key, from 1 on.
    pub version: u32,
    /// Which first byte it gets.
    pub class: Class,
    /// Strong, with its quotes.
    pub etag: String,
    /// Where its bytes come from.
    pub source: Source,
}

/// Where an object's bytes come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Computed.
    Generated(Content),
    /// Kept from a PUT.
    Kept(Arc<[u8]>),
}

/// One line of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The object's name.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// Strong, with its quotes.
    pub etag: String,
    /// Counts the versions of this key.
    pub version: u32,
}

enum Exception {
    Kept { version: u32, body: Arc<[u8]> },
    Deleted { version: u32 },
}

/// All buckets.
#[derive(Default)]
pub struct Catalog {
    datasets: Vec<Dataset>,
    // By bucket, then key: a listing walks it in order.
    exceptions: BTreeMap<(String, String), Exception>,
    put_bytes: u64,
}

impl Catalog {
    /// Adds a dataset, or replaces the one with the same bucket and prefix.
    ///
    /// # Errors
    /// Says which figure cannot be.
    pub fn declare(&mut self, dataset: Dataset) -> Result<(), String> {
        if dataset.bucket.is_empty() || dataset.bucket.contains('/') || dataset.bucket == "_emu" {
            return Err(format!("`{}` cannot be a bucket's name", dataset.bucket));
        }
        if dataset.count > DATASET_COUNT_MAX {
            return Err(format!("count: at most {DATASET_COUNT_MAX} objects have a name of eight digits"));
        }
        if dataset.version == 0 {
            return Err("version: counts from 1 on".to_owned());
        }
        let known = |d: &&mut Dataset| d.bucket == dataset.bucket && d.prefix == dataset.prefix;
        match self.datasets.iter_mut().find(known) {
            Some(place) => *place = dataset,
            None => self.datasets.push(dataset),
        }
        Ok(())
    }

    /// What was declared.
    pub fn datasets(&self) -> &[Dataset] {
        &self.datasets
    }

    /// Whether anything is, was or can be in it.
    pub fn has_bucket(&self, bucket: &str) -> bool {
        self.datasets.iter().any(|dataset| dataset.bucket == bucket)
    }

    /// One object, if it is there.
    pub fn find(&self, bucket: &str, key: &str) -> Option<Found> {
        match self.exceptions.get(&(bucket.to_owned(), key.to_owned())) {
            Some(Exception::Deleted { .. }) => None,
            Some(Exception::Kept { version, body }) => Some(Found {
                size: body.len() as u64,
                version: *version,
                class: Class::Hot,
                etag: kept_etag(body, *version),
                source: Source::Kept(Arc::clone(body)),
            }),
            None => {
                let dataset = self.dataset_of(bucket, key)?;
                let name = format!("{bucket}/{key}");
                Some(Found {
                    size: dataset.size,
                    version: dataset.version,
                    class: dataset.class,
                    etag: generated_etag(name.as_bytes(), dataset.version, dataset.size),
                    source: Source::Generated(Content::new(name.as_bytes(), dataset.version)),
                })
            }
        }
    }

    /// Keeps a body as the object's next version; its etag. `None` when the memory for bodies is used up.
    pub fn put(&mut self, bucket: &str, key: &str, body: &[u8]) -> Option<String> {
        let place = (bucket.to_owned(), key.to_owned());
        let replaced = match self.exceptions.get(&place) {
            Some(Exception::Kept { body, .. }) => body.len() as u64,
            _ => 0,
        };
        let put_bytes = self.put_bytes - replaced + body.len() as u64;
        if put_bytes > PUT_BYTES_MAX {
            return None;
        }
        let version = self.last_version(bucket, key) + 1;
        self.put_bytes = put_bytes;
        self.exceptions.insert(place, Exception::Kept { version, body: body.into() });
        Some(kept_etag(body, version))
    }

    /// Removes an object; removing what is not there is no error.
    pub fn delete(&mut self, bucket: &str, key: &str) {
        let version = self.last_version(bucket, key);
        let declared = self.dataset_of(bucket, key).is_some();
        let place = (bucket.to_owned(), key.to_owned());
        if let Some(Exception::Kept { body, .. }) = self.exceptions.get(&place) {
            self.put_bytes -= body.len() as u64;
        } else if !declared {
            return;
        }
        self.exceptions.insert(place, Exception::Deleted { version });
    }

    /// Bytes held for PUT bodies.
    pub fn put_bytes(&self) -> u64 {
        self.put_bytes
    }

    /// Up to `max` names that begin with `prefix` and sort after `after`, in order; and whether there are more.
    pub fn list(&self, bucket: &str, prefix: &str, after: &str, max: usize) -> (Vec<Listed>, bool) {
        let mut listed = Vec::new();
        for dataset in self.datasets.iter().filter(|dataset| dataset.bucket == bucket) {
            let mut taken = 0;
            for index in first_index_after(dataset, prefix, after)..dataset.count {
                let key = object_name(&dataset.prefix, index);
                if taken > max || !key.starts_with(prefix) {
                    break;
                }
                let exception = self.exceptions.contains_key(&(bucket.to_owned(), key.clone()));
                // Of two datasets that declare one key the first counts, here as in `find`.
                let owned = self.dataset_of(bucket, &key).is_some_and(|owner| std::ptr::eq(owner, dataset));
                if !exception && owned {
                    let name = format!("{bucket}/{key}");
                    let etag = generated_etag(name.as_bytes(), dataset.version, dataset.size);
                    listed.push(Listed { key, size: dataset.size, etag, version: dataset.version });
                    taken += 1;
                }
            }
        }
        let from = Bound::Excluded((bucket.to_owned(), after.to_owned()));
        let kept = self.exceptions.range((from, Bound::Unbounded)).take_while(|((b, _), _)| b == bucket);
        for ((_, key), exception) in kept.filter(|((_, key), _)| key.starts_with(prefix)) {
            if let Exception::Kept { version, body } = exception {
                let etag = kept_etag(body, *version);
                listed.push(Listed { key: key.clone(), size: body.len() as u64, etag, version: *version });
            }
        }
        listed.sort_by(|a, b| a.key.cmp(&b.key));
        let more = listed.len() > max;
        listed.truncate(max);
        (listed, more)
    }

    fn dataset_of(&self, bucket: &str, key: &str) -> Option<&Dataset> {
        self.datasets.iter().find(|dataset| {
            dataset.bucket == bucket
                && key
                    .strip_prefix(dataset.prefix.as_str())
                    .filter(|rest| rest.len() == DIGITS && rest.bytes().all(|b| b.is_ascii_digit()))
                    .and_then(|rest| rest.parse::<u64>().ok())
                    .is_some_and(|index| index < dataset.count)
        })
    }

    fn last_version(&self, bucket: &str, key: &str) -> u32 {
        match self.exceptions.get(&(bucket.to_owned(), key.to_owned())) {
            Some(Exception::Kept { version, .. } | Exception::Deleted { version }) => *version,
            None => self.dataset_of(bucket, key).map_or(0, |dataset| dataset.version),
        }
    }
}

// The first number whose name sorts after `after` and not before `prefix`. Names of one dataset sort as their
// numbers do, so a binary search finds it.
fn first_index_after(dataset: &Dataset, prefix: &str, after: &str) -> u64 {
    let (mut low, mut high) = (0, dataset.count);
    while low < high {
        let middle = low + (high - low) / 2;
        let name = object_name(&dataset.prefix, middle);
        if name.as_str() <= after || name.as_str() < prefix {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

fn generated_etag(name: &[u8], version: u32, size: u64) -> String {
    let high = splitmix64(Hasher::oneshot(name) ^ u64::from(version));
    format!("\"{high:016x}{:016x}\"", splitmix64(high ^ size))
}

fn kept_etag(body: &[u8], version: u32) -> String {
    let high = Hasher::oneshot(body);
    format!("\"{high:016x}{:016x}\"", splitmix64(high ^ u64::from(version)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dataset(prefix: &str, count: u64) -> Dataset {
        Dataset { bucket: "b".into(), prefix: prefix.into(), count, size: 10, class: Class::Hot, version: 1 }
    }

    fn catalog(datasets: &[Dataset]) -> Catalog {
        let mut catalog = Catalog::default();
        for one in datasets {
            catalog.declare(one.clone()).expect("valid");
        }
        catalog
    }

    fn list_all(catalog: &Catalog, prefix: &str, page: usize) -> (Vec<String>, usize) {
        let (mut names, mut pages, mut after) = (Vec::new(), 0, String::new());
        loop {
            let (listed, more) = catalog.list("b", prefix, &after, page);
            pages += 1;
            assert!(listed.len() <= page);
            names.extend(listed.into_iter().map(|one| one.key));
            if !more {
                return (names, pages);
            }
            after = names.last().expect("a page with more to come is not empty").clone();
        }
    }

    #[test]
    fn exactly_the_declared_names_exist() {
        let catalog = catalog(&[dataset("bulk/", 100)]);
        assert!(catalog.find("b", "bulk/00000000").is_some());
        assert!(catalog.find("b", "bulk/00000099").is_some());
        for absent in ["bulk/00000100", "bulk/0000001", "bulk/+0000001", "bulk/", "other/00000001"] {
            assert!(catalog.find("b", absent).is_none(), "{absent}");
        }
        assert!(catalog.find("c", "bulk/00000000").is_none());
    }

    #[test]
    fn listings_page_in_order_without_gap_or_repeat() {
        let mut catalog = catalog(&[dataset("z/", 30), dataset("a/", 2500), dataset("m", 10)]);
        catalog.put("b", "a/00000500x", b"between").expect("fits");
        catalog.put("b", "a/00000003", b"replaced").expect("fits");
        catalog.delete("b", "a/00000007");
        let (names, pages) = list_all(&catalog, "", 1000);
        assert_eq!((names.len(), pages), (30 + 2500 + 10 + 1 - 1, 3));
        assert!(names.is_sorted_by(|x, y| x < y));
        assert!(!names.contains(&"a/00000007".to_owned()) && names.contains(&"a/00000500x".to_owned()));
        assert_eq!(list_all(&catalog, "a/0000000", 3).0.len(), 9);
        assert_eq!(list_all(&catalog, "none", 3), (vec![], 1));
        assert_eq!(list_all(&catalog, "z/", 30).1, 1, "a full last page is the last");
    }

    #[test]
    fn writes_make_versions_and_are_read_back() {
        let mut catalog = catalog(&[dataset("d/", 2)]);
        let declared = catalog.find("b", "d/00000000").expect("declared");
        let etag = catalog.put("b", "d/00000000", b"mine").expect("fits");
        let found = catalog.find("b", "d/00000000").expect("put");
        assert_eq!((found.size, found.version, &found.etag), (4, 2, &etag));
        assert_ne!(etag, declared.etag);
        assert!(matches!(found.source, Source::Kept(body) if *body == *b"mine"));
        catalog.delete("b", "d/00000000");
        assert!(catalog.find("b", "d/00000000").is_none());
        assert_eq!(catalog.put_bytes(), 0);
        assert_ne!(catalog.put("b", "d/00000000", b"mine"), Some(etag), "same bytes, later version");
        catalog.delete("b", "never-there");
    }

    #[test]
    fn put_bodies_have_a_limit() {
        let mut catalog = catalog(&[dataset("d/", 0)]);
        let big = vec![1; PUT_BYTES_MAX as usize];
        assert!(catalog.put("b", "one", &big).is_some());
        assert!(catalog.put("b", "two", b"x").is_none());
        assert!(catalog.put("b", "one", b"small").is_some(), "what is replaced makes room");
        assert!(catalog.put("b", "two", b"x").is_some());
    }

    #[test]
    fn a_new_version_of_a_dataset_has_other_etags() {
        let mut catalog = catalog(&[dataset("d/", 2)]);
        let first = catalog.find("b", "d/00000001").expect("there").etag;
        catalog.declare(Dataset { version: 2, ..dataset("d/", 2) }).expect("valid");
        assert_eq!(catalog.datasets().len(), 1);
        assert_ne!(catalog.find("b", "d/00000001").expect("there").etag, first);
        assert!(catalog.declare(Dataset { version: 0, ..dataset("d/", 2) }).is_err());
    }
}
