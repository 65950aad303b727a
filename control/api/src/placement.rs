//! Who owns what: the placement, how it is planned, and how a node reads it.
//!
//! An object is owned in groups of 16 MiB. A group's owners follow from the placement and the group's name alone, by
//! weighted rendezvous hashing: every member draws a number for the group, and the best draws win. So nodes need no
//! table and no word between them; a member that joins takes groups from all others evenly, and one that leaves gives
//! its own groups to all others and moves nothing else. The version of an object has no part in it: an overwritten
//! object stays where it was.
//!
//! A draw is an exponential variable of rate `weight`, `-ln(u) / weight`, and the least wins; a member's chance is then
//! its share of all weights. The logarithm is taken in whole numbers, and draws are compared by cross
//! multiplication: nodes on different processors must agree on every bit of it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::fleet::{Accelerator, Policy};
use crate::member::Node;
use crate::name::{NodeId, Zone};
use crate::spec::AcceleratorName;

/// Bytes of one extent group.
pub const GROUP_BYTES: u64 = 16 << 20;

/// The group that holds the byte at `offset` of an object.
pub const fn group_of(offset: u64) -> u64 {
    offset / GROUP_BYTES
}

/// The age of a placement. Grows; 0 is older than every placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who owns what: whole, never edited, replaced by one with a higher epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Placement {
    /// Its age.
    pub epoch: Epoch,
    /// Bytes of one extent group.
    pub group_bytes: u64,
    /// Owners of a group where `accelerators` does not say otherwise.
    pub replicas: u8,
    /// Owners of a group of these accelerators.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = BTreeMap<String, u8>))]
    pub accelerators: BTreeMap<AcceleratorName, u8>,
    /// Every owner, by id.
    pub members: Vec<Member>,
}

/// One owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Member {
    /// Which node.
    pub id: NodeId,
    /// Nodes of one zone fail together.
    pub zone: Zone,
    /// Its share beside the others' weights, 1 and more.
    pub weight: u32,
    /// URL that other nodes ask for what it owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
}

/// A placement that is older than the one held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("placement {offered} is older than {held}, which is held; it is refused")]
pub struct OlderEpoch {
    /// Of the placement that was offered.
    pub offered: Epoch,
    /// Of the placement that is held.
    pub held: Epoch,
}

impl Default for Placement {
    fn default() -> Self {
        Self {
            epoch: Epoch(0),
            group_bytes: GROUP_BYTES,
            replicas: 1,
            accelerators: BTreeMap::new(),
            members: Vec::new(),
        }
    }
}

impl Placement {
    /// What a holder of `held` says to this one.
    ///
    /// # Errors
    /// This one is older.
    pub fn supersedes(&self, held: Epoch) -> Result<(), OlderEpoch> {
        if self.epoch < held { Err(OlderEpoch { offered: self.epoch, held }) } else { Ok(()) }
    }

    /// The owners of a group, the first one first: as many as the accelerator's replicas, on distinct nodes, in
    /// distinct zones as far as there are. Empty when there are no members.
    pub fn owners(&self, accelerator: &AcceleratorName, key: &[u8], group: u64) -> Vec<&Member> {
        let wanted = usize::from(self.accelerators.get(accelerator).copied().unwrap_or(self.replicas));
        let group = group_hash(accelerator.as_str(), key, group);
        let mut draws: Vec<Draw<'_>> = self.members.iter().map(|member| Draw::new(group, member)).collect();
        if wanted <= 1 {
            return draws.into_iter().min().map(|draw| draw.member).into_iter().collect();
        }
        draws.sort_unstable();
        let mut owners: Vec<&Member> = Vec::with_capacity(wanted.min(draws.len()));
        for draw in &draws {
            if owners.len() < wanted && owners.iter().all(|owner| owner.zone != draw.member.zone) {
                owners.push(draw.member);
            }
        }
        for draw in &draws {
            if owners.len() < wanted && owners.iter().all(|owner| owner.id != draw.member.id) {
                owners.push(draw.member);
            }
        }
        owners
    }

    /// The placement that follows this one, if the fleet asks for another. Pure: it is a function of what is given,
    /// and `next` must be above this epoch.
    pub fn next(
        &self,
        nodes: &[Node],
        accelerators: &[Accelerator],
        policies: &[Policy],
        next: Epoch,
    ) -> Option<Self> {
        let mut members: Vec<Member> = nodes
            .iter()
            .filter(|node| node.owns())
            .map(|node| Member {
                id: node.id.clone(),
                zone: node.zone.clone(),
                weight: node.weight,
                peer: node.peer.clone(),
            })
            .collect();
        members.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        let accelerators = accelerators
            .iter()
            .filter_map(|accelerator| {
                let name = accelerator.policy.as_ref()?;
                let policy = policies.iter().find(|policy| policy.name == *name)?;
                (policy.replicas != 1).then(|| (accelerator.name.clone(), policy.replicas))
            })
            .collect();
        let planned = Self { epoch: self.epoch, accelerators, members, ..Self::default() };
        if planned == *self {
            return None;
        }
        assert!(next > self.epoch, "epoch {next} does not follow {}", self.epoch);
        Some(Self { epoch: next, ..planned })
    }
}

/// One member's draw for one group. The least is the best; ties, which need equal hashes, go by id.
struct Draw<'a> {
    /// `-log2(u)`, in units of 2^-[`LOG_BITS`].
    cost: u64,
    member: &'a Member,
}

impl<'a> Draw<'a> {
    fn new(group: u64, member: &'a Member) -> Self {
        let mut seed = [0; 16];
        seed[..8].copy_from_slice(&group.to_le_bytes());
        seed[8..].copy_from_slice(&XxHash3_64::oneshot(member.id.as_str().as_bytes()).to_le_bytes());
        Self { cost: negative_log2(XxHash3_64::oneshot(&seed)), member }
    }
}

impl Ord for Draw<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let ours = u128::from(self.cost) * u128::from(other.member.weight);
        let theirs = u128::from(other.cost) * u128::from(self.member.weight);
        ours.cmp(&theirs).then_with(|| self.member.id.cmp(&other.member.id))
    }
}

impl PartialOrd for Draw<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Draw<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Draw<'_> {}

/// The name of a group as a number. The lengths keep `a` + `bc` apart from `ab` + `c`.
fn group_hash(accelerator: &str, key: &[u8], group: u64) -> u64 {
    let mut name = Vec::with_capacity(16 + accelerator.len() + key.len());
    name.extend_from_slice(&group.to_le_bytes());
    name.extend_from_slice(&(accelerator.len() as u64).to_le_bytes());
    name.extend_from_slice(accelerator.as_bytes());
    name.extend_from_slice(key);
    XxHash3_64::oneshot(&name)
}

/// Bits behind the point of a logarithm: 2^-40 tells a million members of one weight apart.
const LOG_BITS: u32 = 40;

/// `-log2((hash + 1) / 2^64)`, rounded up, by repeated squaring: each squaring of a number in [1, 2) yields one bit of
/// its logarithm.
fn negative_log2(hash: u64) -> u64 {
    let Some(hash) = hash.checked_add(1) else { return 0 };
    let whole = hash.ilog2();
    // The number in [1, 2), with 63 bits behind the point.
    let mut mantissa = hash << hash.leading_zeros();
    let mut log = u64::from(whole) << LOG_BITS;
    for bit in (0..LOG_BITS).rev() {
        let square = (u128::from(mantissa) * u128::from(mantissa)) >> 63;
        if square >> 64 == 0 {
            mantissa = square as u64;
        } else {
            log |= 1 << bit;
            mantissa = (square >> 1) as u64;
        }
    }
    (64 << LOG_BITS) - log
}

#[cfg(test)]
mod tests;
