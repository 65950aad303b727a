//! Replies in words: one row a thing, columns as wide as they have to be, nothing that a pipe would stumble over.

use std::fmt::Write as _;

use forebay_control_api::{
    Accelerator, AccessKeyInfo, ByteSize, Contact, ControlStatus, EXTENT_BYTES_DEFAULT, Member, Node, NodeId,
    Placement, Policy, Prewarm, PurgeStatus, TokenInfo,
};

/// Columns under their heads; the last one is not padded.
fn table<const N: usize>(heads: [&str; N], rows: Vec<[String; N]>) -> String {
    if rows.is_empty() {
        return "none\n".to_owned();
    }
    let mut widths = heads.map(|head| head.chars().count());
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in std::iter::once(heads.map(str::to_owned)).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn or_dash<T: std::fmt::Display>(value: Option<&T>) -> String {
    value.map_or_else(|| "-".to_owned(), T::to_string)
}

pub(super) fn accelerators(all: &[Accelerator]) -> String {
    let rows = all.iter().map(|it| {
        [
            it.name.to_string(),
            it.origin.to_string(),
            it.freshness.unwrap_or_default().to_string(),
            it.extent.unwrap_or(ByteSize::new(EXTENT_BYTES_DEFAULT)).to_string(),
            or_dash(it.policy.as_ref()),
            or_dash(it.preset.as_ref()),
            or_dash(it.endpoint.as_ref()),
        ]
    });
    table(["NAME", "ORIGIN", "FRESHNESS", "EXTENT", "POLICY", "PRESET", "ENDPOINT"], rows.collect())
}

pub(super) fn policies(all: &[Policy]) -> String {
    let mut rows = Vec::new();
    for policy in all {
        let head = [policy.name.to_string(), policy.replicas.to_string()];
        if policy.rules.is_empty() {
            rows.push([head[0].clone(), head[1].clone(), "-".into()]);
        }
        for (place, rule) in policy.rules.iter().enumerate() {
            let [name, replicas] = if place == 0 { head.clone() } else { [String::new(), String::new()] };
            rows.push([name, replicas, rule.to_string()]);
        }
    }
    table(["NAME", "REPLICAS", "RULES"], rows)
}

pub(super) fn keys(all: &[AccessKeyInfo]) -> String {
    let rows = all.iter().map(|it| [it.access_key.to_string(), it.added.clone(), it.note.clone()]);
    table(["ACCESS KEY", "ADDED", "NOTE"], rows.collect())
}

pub(super) fn nodes(all: &[Node]) -> String {
    let rows = all.iter().map(|it| {
        let state = match (it.contact, it.draining) {
            (Contact::Live, true) => "draining".to_owned(),
            (contact, true) => format!("{}, draining", contact.word()),
            (contact, false) => contact.word().to_owned(),
        };
        let serves: Vec<&str> = it.serves.iter().map(forebay_control_api::AcceleratorName::as_str).collect();
        [
            it.id.to_string(),
            state,
            it.zone.to_string(),
            it.weight.to_string(),
            it.epoch.to_string(),
            it.last_heartbeat.clone(),
            it.listen.join(" "),
            serves.join(" "),
        ]
    });
    table(["ID", "STATE", "ZONE", "WEIGHT", "EPOCH", "LAST HEARTBEAT", "LISTENS", "SERVES"], rows.collect())
}

pub(super) fn placement(placement: &Placement) -> String {
    let total: u64 = placement.members.iter().map(|member| u64::from(member.weight)).sum();
    let rows = placement.members.iter().map(|it| {
        let share = f64::from(it.weight) * 100.0 / total as f64;
        [
            it.id.to_string(),
            it.zone.to_string(),
            it.weight.to_string(),
            format!("{share:.1} %"),
            or_dash(it.peer.as_ref()),
        ]
    });
    let mut text = format!(
        "epoch {}, groups of {}, {} owner(s) a group\n",
        placement.epoch,
        ByteSize::new(placement.group_bytes),
        placement.replicas
    );
    for (accelerator, replicas) in &placement.accelerators {
        let _ = writeln!(text, "of {accelerator}: {replicas} owner(s) a group");
    }
    text + &table(["NODE", "ZONE", "WEIGHT", "SHARE", "PEER"], rows.collect())
}

pub(super) fn owners(placement: &Placement, owners: &[&Member], group: u64) -> String {
    let rows = owners.iter().map(|it| [it.id.to_string(), it.zone.to_string(), or_dash(it.peer.as_ref())]);
    format!("epoch {}, group {group}\n", placement.epoch) + &table(["OWNER", "ZONE", "PEER"], rows.collect())
}

pub(super) fn prewarms(all: &[Prewarm]) -> String {
    let rows = all.iter().map(|it| {
        let more = if it.progress.listed_all || it.state.is_over() { "" } else { "+" };
        [
            it.id.to_string(),
            it.state.word().to_owned(),
            format!("{}/{}", it.accelerator, it.prefix),
            or_dash(it.node.as_ref()),
            format!("{}{more}", it.progress.listed),
            it.progress.done.to_string(),
            it.progress.failed.to_string(),
            format!("{:#}", ByteSize::new(it.progress.bytes)),
            it.message.clone(),
        ]
    });
    table(["ID", "STATE", "PREFIX", "NODE", "LISTED", "DONE", "FAILED", "BYTES", "MESSAGE"], rows.collect())
}

pub(super) fn purges(all: &[PurgeStatus]) -> String {
    let ids = |ids: &[NodeId]| {
        let ids: Vec<&str> = ids.iter().map(NodeId::as_str).collect();
        if ids.is_empty() { "-".to_owned() } else { ids.join(" ") }
    };
    let rows = all.iter().map(|it| {
        let what = match (&it.purge.key, &it.purge.prefix) {
            (Some(key), _) => format!("{}/{key}", it.purge.accelerator),
            (None, prefix) => format!("{}/{}*", it.purge.accelerator, prefix.as_deref().unwrap_or_default()),
        };
        let state = if it.complete { "complete" } else { "waiting" };
        [
            it.purge.sequence.to_string(),
            state.to_owned(),
            what,
            ids(&it.applied),
            ids(&it.waiting),
            ids(&it.unreached),
        ]
    });
    table(["SEQUENCE", "STATE", "WHAT", "APPLIED", "WAITING", "UNREACHED"], rows.collect())
}

pub(super) fn tokens(all: &[TokenInfo]) -> String {
    let rows = all.iter().map(|it| [it.id.clone(), it.role.to_string(), it.issued.clone(), it.note.clone()]);
    table(["ID", "ROLE", "ISSUED", "NOTE"], rows.collect())
}

pub(super) fn status(status: &ControlStatus) -> String {
    let nodes = &status.nodes;
    let uptime = forebay_control_api::Span::from_secs(status.uptime_seconds);
    format!(
        "version {}, up {uptime}, revision {}, placement {}\n\
         nodes        {} live, {} away, {} gone, {} draining; {} behind\n\
         holds        {} accelerators, {} policies, {} keys\n\
         open         {} purges, {} prewarms\n\
         patience     away after {}, share moves after {}\n",
        status.version,
        status.revision,
        status.epoch,
        nodes.live,
        nodes.away,
        nodes.gone,
        nodes.draining,
        status.nodes_behind,
        status.accelerators,
        status.policies,
        status.keys,
        status.purges_open,
        status.prewarms_open,
        status.fence_after,
        status.forget_after,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_as_wide_as_it_has_to_be() {
        let rows = vec![["ü".to_owned(), "1".to_owned()], ["long-name".to_owned(), String::new()]];
        assert_eq!(table(["NAME", "N"], rows), "NAME       N\nü          1\nlong-name\n");
        assert_eq!(table(["NAME"], Vec::new()), "none\n");
    }

    #[test]
    fn an_unfinished_listing_says_that_there_is_more() {
        let job = |state: &str, all: bool| {
            let text = serde_json::json!({
                "id": 4, "accelerator": "data", "prefix": "a/", "state": state, "node": "n1", "attempt": 1,
                "progress": {"listed": 20, "listed_all": all, "done": 10, "bytes": 1024}, "asked": "now"});
            prewarms(&[serde_json::from_value(text).expect("a prewarm")])
        };
        assert!(job("running", false).contains("20+"), "{}", job("running", false));
        assert!(!job("running", true).contains("20+"));
        assert!(job("done", true).contains("data/a/") && job("done", true).contains("1KiB"));
    }
}
