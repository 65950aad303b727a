//! What this machine allows: cores, file descriptors, drives' sizes.
//!
//! A container's cpuset and quota count, not the machine's number of cores: pinning to a core outside the set fails,
//! and more workers than the quota pays for make each other wait. The facts are values, so that the decision about
//! them is a plain function.

use std::io::{self, Seek, SeekFrom};
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};

use super::ConfigError;
use super::value::{CoreChoice, core_list};

/// What this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// Cores of the cpuset, ascending.
    pub cores_allowed: Vec<usize>,
    /// Cores' worth of time that cpuset and cgroup quota together grant; at least 1.
    pub parallelism: usize,
    /// Hard limit of file descriptors.
    pub descriptors_max: u64,
    /// What the host is called, if the kernel says it in text.
    pub name: Option<String>,
}

/// Which core does what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreMap {
    /// Cores with a pinned worker, in order; at least one.
    pub workers: Vec<usize>,
    /// The core of the house threads (writers, admin door); `None`: they share the workers' cores, niced.
    pub house: Option<usize>,
}

impl HostFacts {
    /// Asks the kernel.
    pub fn probe() -> Self {
        let mut cores_allowed: Vec<usize> =
            core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect();
        cores_allowed.sort_unstable();
        Self {
            parallelism: std::thread::available_parallelism().map_or(1, usize::from),
            cores_allowed,
            descriptors_max: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            name: std::fs::read_to_string("/proc/sys/kernel/hostname")
                .ok()
                .map(|name| name.trim().to_owned()),
        }
    }

    /// Gives workers and house threads their cores. From four cores on the house has one of its own: with `auto` the
    /// last, with a list the last that is not in it.
    ///
    /// # Errors
    /// A listed core that this process may not use.
    pub fn core_map(&self, choice: &CoreChoice) -> Result<CoreMap, ConfigError> {
        let allowed = &self.cores_allowed;
        if allowed.is_empty() {
            return Err(ConfigError::NoCores);
        }
        let house_has_room = allowed.len() >= 4;
        match choice {
            CoreChoice::Auto if house_has_room => {
                let (house, rest) = allowed.split_last().expect("four and more");
                let workers = rest.iter().copied().take(self.parallelism.max(1)).collect();
                Ok(CoreMap { workers, house: Some(*house) })
            }
            CoreChoice::Auto => Ok(CoreMap {
                workers: allowed.iter().copied().take(self.parallelism.max(1)).collect(),
                house: None,
            }),
            CoreChoice::These(cores) => {
                let wanted: Vec<usize> =
                    cores.iter().copied().filter(|core| !allowed.contains(core)).collect();
                if !wanted.is_empty() {
                    return Err(ConfigError::Cores { wanted, allowed: core_list(allowed) });
                }
                let free = allowed.iter().rev().copied().find(|core| !cores.contains(core));
                Ok(CoreMap { workers: cores.clone(), house: free.filter(|_| house_has_room) })
            }
        }
    }
}

impl CoreMap {
    /// Puts the calling thread where house threads belong: pinned to their core, or niced where they share one with
    /// workers. A refusal of the kernel costs speed, not correctness, and is not an error.
    pub fn settle_house_thread(&self) {
        match self.house {
            Some(id) => {
                core_affinity::set_for_current(core_affinity::CoreId { id });
            }
            // On Linux this is the calling thread alone.
            None => drop(setpriority_process(None, HOUSE_NICENESS)),
        }
    }
}

const HOUSE_NICENESS: i32 = 10;

/// Raises this process's limit of file descriptors to its hard limit and returns it.
///
/// # Errors
/// The kernel's, which then leaves the limit as it was.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    }
    Ok(maximum.unwrap_or(u64::MAX))
}

/// Bytes of a file or device; `None` when there is nothing of that name, or an empty file, which is as good.
pub(super) fn bytes_of(path: &Path) -> io::Result<Option<u64>> {
    match std::fs::metadata(path) {
        Ok(about) if about.is_file() => Ok(Some(about.len()).filter(|bytes| *bytes != 0)),
        Ok(about) if about.is_dir() => {
            Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder; name a file in it, with a size"))
        }
        // A device says 0 there; its end is where its bytes end.
        Ok(_) => Ok(Some(std::fs::File::open(path)?.seek(SeekFrom::End(0))?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(cores: &[usize], parallelism: usize) -> HostFacts {
        HostFacts { cores_allowed: cores.to_vec(), parallelism, descriptors_max: 1 << 20, name: None }
    }

    #[test]
    fn the_house_has_a_core_of_its_own_from_four_on() {
        let map = |cores: &[usize], parallelism, choice: &str| {
            host(cores, parallelism).core_map(&choice.parse().expect("a choice")).expect("a map")
        };
        for (cores, parallelism, choice, workers, house) in [
            (&[0][..], 1, "auto", &[0][..], None),
            (&[0, 1], 2, "auto", &[0, 1], None),
            (&[0, 1, 2, 3], 4, "auto", &[0, 1, 2], Some(3)),
            (&[4, 5, 6, 7], 4, "auto", &[4, 5, 6], Some(7)),
            // A quota of two cores on a machine of eight.
            (&[0, 1, 2, 3, 4, 5, 6, 7], 2, "auto", &[0, 1], Some(7)),
            (&[0, 1, 2, 3], 4, "0-2", &[0, 1, 2], Some(3)),
            (&[0, 1, 2, 3], 4, "3", &[3], Some(2)),
            (&[0, 1, 2, 3], 4, "0-3", &[0, 1, 2, 3], None),
            (&[0, 1], 2, "1", &[1], None),
        ] {
            let expected = CoreMap { workers: workers.to_vec(), house };
            assert_eq!(map(cores, parallelism, choice), expected, "{cores:?} {choice}");
        }
    }

    #[test]
    fn a_core_outside_the_cpuset_is_refused_with_the_allowed_ones() {
        let error = host(&[2, 3, 4, 9], 4).core_map(&CoreChoice::These(vec![0, 3, 5])).expect_err("outside");
        let text = error.to_string();
        assert!(text.contains("[0, 5]") && text.contains("2-4,9"), "{text}");
        assert!(matches!(host(&[], 1).core_map(&CoreChoice::Auto), Err(ConfigError::NoCores)));
    }

    #[test]
    fn house_threads_are_pinned_or_niced() {
        let settled = |map: CoreMap| {
            let thread = std::thread::spawn(move || {
                map.settle_house_thread();
                let cores = core_affinity::get_core_ids().unwrap_or_default();
                (cores.len(), rustix::process::getpriority_process(None).expect("a niceness"))
            });
            thread.join().expect("joined")
        };
        let here = rustix::process::getpriority_process(None).expect("a niceness");
        let cores = HostFacts::probe().cores_allowed;
        assert_eq!(settled(CoreMap { workers: vec![cores[0]], house: Some(cores[0]) }), (1, here));
        assert_eq!(
            settled(CoreMap { workers: vec![cores[0]], house: None }),
            (cores.len(), HOUSE_NICENESS.max(here))
        );
    }

    #[test]
    fn this_machine_has_facts() {
        let facts = HostFacts::probe();
        assert!(facts.parallelism >= 1 && facts.parallelism <= facts.cores_allowed.len());
        assert!(facts.core_map(&CoreChoice::Auto).is_ok());
        assert_eq!(raise_descriptor_limit().expect("raised"), facts.descriptors_max);
        assert_eq!(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), facts.descriptors_max);
    }
}
