//! What the node serves, whole: accelerators, keys, and with whom. Never edited; replaced by the next.
//!
//! An accelerator's index is part of the key of every object, so within a process an index never means two things: a
//! removed accelerator leaves its place empty, and one that gets another origin or another extent size comes back under
//! a new index, without the objects of the old. A changed policy keeps the index, because rules are asked when a byte is
//! read.
//!
//! Each worker holds a snapshot of its own and is given the next one by an order, so that a hit takes no lock and counts
//! on nothing that another core writes. Turned down: a pointer that all workers load and that is swapped under them; it
//! would save the order, but origins belong to one worker and have to be opened there anyway.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use forebay_control_api::{AcceleratorSpec, OriginSpec};

use crate::auth::Keys;
use crate::origin::{OriginKind, OriginTarget};
use crate::peer::Cluster;
use crate::policy::{Policy, PolicyError};
use crate::range::{EXTENT_BYTES_MAX, Grid};

/// What clients may ask for, and who may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// By index; `None` where one was removed.
    places: Vec<Option<Arc<Accelerator>>>,
    names: HashMap<Box<str>, u16, RandomState>,
    /// Who may ask.
    pub keys: Arc<Keys>,
    /// The other nodes, if there is a control plane that names them.
    pub cluster: Option<Arc<Cluster>>,
}

/// A bucket name or alias that clients use, bound to an origin and a policy.
#[derive(Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// The bucket name that clients use.
    pub name: Box<str>,
    /// The store behind it.
    pub target: OriginTarget,
    /// Freshness and admission.
    pub policy: Policy,
    /// The grid of its objects; an extent of more than a page is filled at once and kept in pieces.
    pub grid: Grid,
    /// Bytes that one miss asks the origin for at least; the configured extent.
    pub extent_bytes: u32,
}

/// Why an accelerator cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AcceleratorError {
    /// Its endpoint or origin is no URL.
    #[error("{what}: `{text}` is not a URL; write http://HOST[:PORT] or https://HOST[:PORT]")]
    Url {
        /// Which of the two.
        what: &'static str,
        /// What was written.
        text: String,
    },
    /// A rule that cannot be one.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// What is served after something else.
#[derive(Debug)]
pub struct Next {
    /// What is served.
    pub served: Served,
    /// Indices that mean nothing from now on: their objects are to be forgotten once no worker serves from the old.
    pub gone: Vec<u16>,
    /// Those for which there was no index any more.
    pub left_out: Vec<IndicesUsedUp>,
}

/// Every index has been used: no accelerator can be added until the node starts again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "accelerator `{0}` is not served: this process has numbered {most} of them, counting changed origins anew, and can \
     number no more; restart the node",
    most = INDICES_MAX
)]
pub struct IndicesUsedUp(Box<str>);

const INDICES_MAX: usize = 1 << 16;

impl Served {
    /// These accelerators, numbered in their order; no two of one name.
    ///
    /// # Panics
    /// For more than 65,536 of them.
    pub fn new(accelerators: impl IntoIterator<Item = Accelerator>, keys: Keys) -> Self {
        let nothing = Self {
            places: Vec::new(),
            names: HashMap::default(),
            keys: Arc::new(Keys::new(false)),
            cluster: None,
        };
        let Next { served, left_out, .. } = nothing.next(accelerators, Arc::new(keys), None);
        assert!(left_out.is_empty(), "more accelerators than indices");
        served
    }

    /// What is served next.
    pub fn next(
        &self,
        wanted: impl IntoIterator<Item = Accelerator>,
        keys: Arc<Keys>,
        cluster: Option<Arc<Cluster>>,
    ) -> Next {
        let mut places = vec![None; self.places.len()];
        let mut left_out = Vec::new();
        let mut names = HashMap::default();
        for accelerator in wanted {
            let kept = self.find(&accelerator.name).filter(|(_, held)| held.has_objects_of(&accelerator));
            let index = match kept {
                Some((index, _)) => index,
                None if places.len() == INDICES_MAX => {
                    left_out.push(IndicesUsedUp(accelerator.name));
                    continue;
                }
                None => {
                    places.push(None);
                    (places.len() - 1) as u16
                }
            };
            names.insert(accelerator.name.clone(), index);
            places[usize::from(index)] = Some(Arc::new(accelerator));
        }
        let gone = self.all().map(|(index, _)| index).filter(|index| places[usize::from(*index)].is_none());
        let gone = gone.collect();
        Next { served: Self { places, names, keys, cluster }, gone, left_out }
    }

    /// The accelerator of a bucket name, and its index.
    pub fn find(&self, name: &str) -> Option<(u16, &Arc<Accelerator>)> {
        let index = *self.names.get(name)?;
        Some((index, self.at(index).expect("a name has a place")))
    }

    /// The accelerator of an index, unless it was removed.
    pub fn at(&self, index: u16) -> Option<&Arc<Accelerator>> {
        self.places.get(usize::from(index))?.as_ref()
    }

    /// Every accelerator with its index.
    pub fn all(&self) -> impl Iterator<Item = (u16, &Arc<Accelerator>)> {
        let places = self.places.iter().enumerate();
        places.filter_map(|(index, place)| Some((index as u16, place.as_ref()?)))
    }

    /// How many accelerators there are.
    pub fn count(&self) -> usize {
        self.names.len()
    }
}

impl Accelerator {
    /// What a command line, a file or the control plane says, with the region of the environment where none is said.
    ///
    /// # Errors
    /// A URL or a rule that cannot be one.
    pub fn of(spec: &AcceleratorSpec) -> Result<Self, AcceleratorError> {
        let region = || std::env::var("AWS_REGION").or_else(|_| std::env::var("AWS_DEFAULT_REGION")).ok();
        let url = |what, text: &str| {
            text.parse().map_err(|_| AcceleratorError::Url { what, text: text.to_owned() })
        };
        let kind = match &spec.origin {
            OriginSpec::S3 { bucket } => OriginKind::S3 {
                bucket: bucket.to_string(),
                endpoint: spec.endpoint.as_deref().map(|text| url("endpoint", text)).transpose()?,
                region: spec
                    .region
                    .as_deref()
                    .map(str::to_owned)
                    .or_else(region)
                    .unwrap_or_else(|| "us-east-1".to_owned()),
            },
            http @ OriginSpec::Http { .. } => OriginKind::Http { base: url("origin", &http.to_string())? },
        };
        let extent_bytes = spec.extent_bytes() as u32;
        Ok(Self {
            name: spec.name.as_str().into(),
            target: OriginTarget { kind },
            policy: Policy::new(spec)?,
            grid: Self::grid(extent_bytes),
            extent_bytes,
        })
    }

    /// In how many extents of its grid a configured extent is kept: 1, or 2 for 4 MiB.
    pub fn pieces(&self) -> u32 {
        (self.extent_bytes / self.grid.extent_bytes()).max(1)
    }

    /// The grid for a configured extent of 64 KiB to 4 MiB, a power of two.
    ///
    /// # Panics
    /// For any other number; the configuration has refused it before.
    pub fn grid(extent_bytes: u32) -> Grid {
        Grid::new(extent_bytes.min(EXTENT_BYTES_MAX))
            .expect("a configured extent is a power of two from 64 KiB")
    }

    /// Whether the objects of one are those of the other: the same store, cut alike.
    pub fn has_objects_of(&self, other: &Self) -> bool {
        self.target == other.target && self.extent_bytes == other.extent_bytes
    }
}

#[cfg(test)]
mod tests {
    use forebay_control_api::Freshness;

    use super::*;

    fn accelerators(specs: &[&str]) -> Vec<Accelerator> {
        specs
            .iter()
            .map(|text| Accelerator::of(&text.parse().expect("a spec")).expect("an accelerator"))
            .collect()
    }

    fn next(served: &Served, specs: &[&str]) -> (Served, Vec<u16>) {
        let Next { served, gone, left_out } =
            served.next(accelerators(specs), Arc::clone(&served.keys), None);
        assert_eq!(left_out, []);
        (served, gone)
    }

    fn index(served: &Served, name: &str) -> Option<u16> {
        served.find(name).map(|(index, _)| index)
    }

    #[test]
    fn an_index_never_means_two_things() {
        let served = Served::new(accelerators(&["one=s3://bucket", "two=s3://other"]), Keys::new(true));
        assert_eq!((index(&served, "one"), index(&served, "two")), (Some(0), Some(1)));

        let (served, gone) = next(&served, &["two=s3://other", "six=s3://third"]);
        assert_eq!(gone, [0]);
        assert_eq!((index(&served, "two"), index(&served, "six")), (Some(1), Some(2)));
        assert!(served.at(0).is_none() && served.find("one").is_none());

        // It comes back, and its old objects do not.
        let (served, gone) = next(&served, &["one=s3://bucket", "two=s3://other", "six=s3://third"]);
        assert_eq!((index(&served, "one"), gone), (Some(3), vec![]));
        assert_eq!(served.count(), 3);
    }

    #[test]
    fn another_store_or_another_cut_is_another_index_and_another_policy_is_not() {
        let served = Served::new(accelerators(&["one=s3://bucket"]), Keys::new(true));
        let (served, gone) = next(&served, &["one=s3://bucket,freshness=immutable"]);
        assert_eq!((index(&served, "one"), gone), (Some(0), vec![]));
        let (_, held) = served.find("one").expect("there");
        assert_eq!(held.policy.freshness(), Freshness::Immutable);

        for changed in
            ["one=s3://bucket,extent=64KiB", "one=s3://bucket,endpoint=http://h:1", "one=http://h/x"]
        {
            let (changed, gone) = next(&served, &[changed]);
            assert_eq!((index(&changed, "one"), gone), (Some(1), vec![0]));
        }
    }

    #[test]
    fn when_indices_are_used_up_the_rest_is_served_all_the_same() {
        let mut served = Served::new(accelerators(&["one=s3://bucket"]), Keys::new(true));
        served.places.resize(INDICES_MAX, None);
        let keys = Arc::new(Keys::new(false));
        let both = accelerators(&["two=s3://bucket", "one=s3://bucket"]);
        let Next { served, gone, left_out } = served.next(both, Arc::clone(&keys), None);
        assert_eq!((index(&served, "one"), index(&served, "two"), gone), (Some(0), None, vec![]));
        assert!(Arc::ptr_eq(&served.keys, &keys), "a revoked key is not held back");
        let said: Vec<String> = left_out.iter().map(ToString::to_string).collect();
        assert!(said[0].contains("`two`") && said[0].contains("restart the node"), "{said:?}");
    }
}
