//! What a placement promises: shares by weight, few moves, distinct zones, and the same answer everywhere.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const GROUPS: u64 = 100_000;

fn member(id: &str, zone: &str, weight: u32) -> Member {
    Member { id: id.parse().expect("id"), zone: zone.parse().expect("zone"), weight, peer: None }
}

fn placement(members: Vec<Member>, replicas: u8) -> Placement {
    Placement { epoch: Epoch(1), replicas, members, ..Placement::default() }
}

fn data() -> AcceleratorName {
    "data".parse().expect("name")
}

/// Groups of 5,000 objects of 20 groups each.
fn owners(placement: &Placement) -> Vec<Vec<String>> {
    let name = data();
    (0..GROUPS)
        .map(|index| {
            let key = format!("train/shard-{:05}.tar", index / 20);
            let owners = placement.owners(&name, key.as_bytes(), index % 20);
            owners.iter().map(|owner| owner.id.to_string()).collect()
        })
        .collect()
}

const WEIGHTS: [u32; 7] = [100, 100, 150, 200, 300, 50, 400];

fn seven() -> Vec<Member> {
    WEIGHTS.iter().enumerate().map(|(i, weight)| member(&format!("node-{i}"), "z", *weight)).collect()
}

#[test]
fn a_hundred_thousand_groups_over_seven_weighted_nodes_are_within_three_percent() {
    let mut counts = BTreeMap::new();
    for owner in owners(&placement(seven(), 1)) {
        *counts.entry(owner[0].clone()).or_insert(0u64) += 1;
    }
    let total: u32 = WEIGHTS.iter().sum();
    for (i, weight) in WEIGHTS.iter().enumerate() {
        let ideal = GROUPS as f64 * f64::from(*weight) / f64::from(total);
        let got = counts[&format!("node-{i}")] as f64;
        println!("node-{i}: {got} of ideal {ideal:.0}, {:+.2} %", (got / ideal - 1.0) * 100.0);
        assert!((got / ideal - 1.0).abs() < 0.03, "node-{i} has {got}, ideal {ideal}");
    }
}

#[test]
fn a_join_moves_its_share_and_only_towards_itself() {
    let before = owners(&placement(seven(), 1));
    let mut members = seven();
    let share_of: u32 = 186; // the mean weight, so that it is one of eight alike
    members.push(member("node-new", "z", share_of));
    let after = owners(&placement(members, 1));
    let moved: Vec<_> = before.iter().zip(&after).filter(|(before, after)| before != after).collect();
    assert!(moved.iter().all(|(_, after)| after[0] == "node-new"));
    let moved = moved.len() as f64 / GROUPS as f64;
    println!("moved {:.2} %, 1/8 is 12.50 %", moved * 100.0);
    assert!(moved <= 1.0 / 8.0 + 0.01, "{moved}");
    assert!(moved >= 1.0 / 8.0 - 0.01, "{moved}");
}

#[test]
fn a_removal_moves_only_what_the_removed_node_owned() {
    for replicas in [1, 2, 3] {
        let zoned = || {
            let zones = ["a", "a", "b", "b", "b", "c", "c"];
            seven().into_iter().zip(zones).map(|(m, zone)| member(m.id.as_str(), zone, m.weight)).collect()
        };
        let before = owners(&placement(zoned(), replicas));
        let mut members: Vec<Member> = zoned();
        let removed = members.remove(3).id.to_string();
        let after = owners(&placement(members, replicas));
        for (before, after) in before.iter().zip(&after) {
            if before.contains(&removed) {
                // The others of the set stay.
                let stayed: BTreeSet<_> = before.iter().filter(|id| **id != removed).collect();
                assert!(stayed.is_subset(&after.iter().collect()), "{before:?} {after:?}");
            } else {
                assert_eq!(before, after);
            }
        }
    }
}

#[test]
fn the_hash_is_the_same_in_every_version_of_this_program() {
    // Computed by another implementation, with decimal logarithms. A change here moves the groups of every fleet.
    assert_eq!(group_hash("data", b"train/shard-00000.tar", 0), 9_208_844_440_279_591_059);
    assert_eq!(group_hash("data", "数据/ü".as_bytes(), 7), 2_870_025_843_483_958_806);
    let placement = placement(seven(), 3);
    let golden: [(&[u8], u64, [&str; 3]); 4] = [
        (b"train/shard-00000.tar", 0, ["node-6", "node-3", "node-2"]),
        (b"train/shard-00000.tar", 1, ["node-0", "node-6", "node-2"]),
        ("数据/ü".as_bytes(), 7, ["node-4", "node-3", "node-6"]),
        (b"", u64::MAX, ["node-6", "node-4", "node-1"]),
    ];
    for (key, group, expected) in golden {
        let owners = placement.owners(&data(), key, group);
        let owners: Vec<&str> = owners.iter().map(|owner| owner.id.as_str()).collect();
        assert_eq!(owners, expected, "{key:?} {group}");
    }
}

#[test]
fn names_do_not_run_into_each_other() {
    assert_ne!(group_hash("data", b"x", 0), group_hash("dat", b"ax", 0));
    assert_ne!(group_hash("data", b"x", 0), group_hash("data", b"x", 1));
}

#[test]
fn the_logarithm_agrees_with_the_real_one() {
    assert_eq!(negative_log2(u64::MAX), 0);
    assert_eq!(negative_log2(0), 64 << LOG_BITS);
    assert_eq!(negative_log2((1 << 63) - 1), 1 << LOG_BITS);
    for shift in 0..64 {
        let hash = 0x9e37_79b9_7f4a_7c15_u64 >> shift;
        let real = 64.0 - ((hash as f64) + 1.0).log2();
        let ours = negative_log2(hash) as f64 / (1_u64 << LOG_BITS) as f64;
        assert!((real - ours).abs() < 1e-9, "{hash}: {real} {ours}");
    }
}

#[test]
fn an_older_placement_is_refused() {
    let nine = Placement { epoch: Epoch(9), ..Placement::default() };
    assert_eq!(nine.supersedes(Epoch(8)), Ok(()));
    assert_eq!(nine.supersedes(Epoch(9)), Ok(()));
    let refused = nine.supersedes(Epoch(10)).expect_err("older");
    assert!(refused.to_string().contains("placement 9 is older than 10"));
}

fn node(id: &str, contact: crate::Contact, draining: bool) -> Node {
    Node {
        id: id.parse().expect("id"),
        instance: "i".into(),
        zone: Zone::default(),
        weight: 100,
        listen: Vec::new(),
        peer: None,
        version: String::new(),
        contact,
        draining,
        last_heartbeat: String::new(),
        revision: 0,
        epoch: Epoch(0),
        purges_applied: 0,
        serves: Vec::new(),
        report: crate::NodeReport::default(),
    }
}

#[test]
fn the_planner_takes_those_who_may_own_and_says_nothing_new_twice() {
    use crate::Contact::{Away, Gone, Live};
    let nodes =
        [node("d", Live, true), node("c", Gone, false), node("b", Away, false), node("a", Live, false)];
    let policy = Policy { name: "p".parse().expect("name"), replicas: 2, rules: Vec::new() };
    let accelerator: Accelerator =
        serde_json::from_str(r#"{"name":"data","origin":"s3://bucket","policy":"p"}"#).expect("words");
    let (accelerators, policies) = ([accelerator], [policy]);
    let first = Placement::default().next(&nodes, &accelerators, &policies, Epoch(4)).expect("new");
    assert_eq!(first.epoch, Epoch(4));
    let ids: Vec<_> = first.members.iter().map(|member| member.id.as_str()).collect();
    assert_eq!(ids, ["a", "b"]);
    assert_eq!(first.owners(&data(), b"k", 0).len(), 2);
    assert_eq!(first.owners(&"other".parse().expect("name"), b"k", 0).len(), 1);
    assert_eq!(first.next(&nodes, &accelerators, &policies, Epoch(5)), None);
    let fewer = first.next(&nodes[3..], &accelerators, &policies, Epoch(5)).expect("changed");
    assert_eq!((fewer.epoch, fewer.members.len()), (Epoch(5), 1));
    let none = fewer.next(&[], &accelerators, &policies, Epoch(6)).expect("changed");
    assert!(none.owners(&data(), b"k", 0).is_empty());
}

proptest! {
    #[test]
    fn owners_are_distinct_and_so_are_their_zones_as_far_as_there_are(
        zones in proptest::collection::vec(0u8..4, 1..12),
        weights in proptest::collection::vec(1u32..1000, 12),
        replicas in 1u8..=8,
        key in proptest::collection::vec(any::<u8>(), 0..40),
        group in any::<u64>(),
    ) {
        let members: Vec<Member> = zones
            .iter()
            .zip(&weights)
            .enumerate()
            .map(|(i, (zone, weight))| member(&format!("n{i}"), &format!("z{zone}"), *weight))
            .collect();
        let placement = placement(members, replicas);
        let owners = placement.owners(&data(), &key, group);
        let ids: BTreeSet<_> = owners.iter().map(|owner| &owner.id).collect();
        let seen: BTreeSet<_> = owners.iter().map(|owner| &owner.zone).collect();
        let there: BTreeSet<_> = placement.members.iter().map(|member| &member.zone).collect();
        let wanted = usize::from(replicas).min(zones.len());
        prop_assert_eq!(owners.len(), wanted);
        prop_assert_eq!(ids.len(), wanted);
        prop_assert_eq!(seen.len(), wanted.min(there.len()));
        // More replicas leave the first ones where they are only if zones do not speak; the very first always stays.
        let one = Placement { replicas: 1, ..placement.clone() };
        prop_assert_eq!(&one.owners(&data(), &key, group)[0].id, &owners[0].id);
        // The order in which members are listed is of no account.
        let mut shuffled = placement.clone();
        shuffled.members.reverse();
        let again: Vec<_> = shuffled.owners(&data(), &key, group).iter().map(|owner| owner.id.clone()).collect();
        prop_assert_eq!(again, owners.iter().map(|owner| owner.id.clone()).collect::<Vec<_>>());
    }
}
