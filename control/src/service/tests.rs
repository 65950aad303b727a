//! The verbs without sockets, over a real store, with a clock that the tests turn.

use std::path::Path;

use forebay_control_api::{
    Accelerator, FleetState, Heartbeat, PrewarmBody, PrewarmProgress, PrewarmState, Progress, PurgeBody,
    Registration, Role, TokenBody,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

const PATIENCE: Patience =
    Patience { fence_after: Duration::from_secs(30), forget_after: Duration::from_mins(5) };

struct Bed {
    service: Service,
    now: Instant,
}

impl Bed {
    fn open(path: &Path) -> Self {
        let now = Instant::now();
        let store = Store::open(path).expect("store");
        Self { service: Service::new(store, PATIENCE, Vec::new(), now).expect("service"), now }
    }

    fn pass(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.service.tick(self.now).expect("tick");
    }

    fn register(&self, id: &str, more: &Value) -> Result<FleetState, ApiError> {
        let mut body = json!({"instance": format!("{id}-start-1")});
        body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        self.service.register(&id.parse().expect("id"), words::<Registration>(body), self.now)
    }

    fn beat(&self, id: &str, held: &FleetState) -> Option<FleetState> {
        self.try_beat(id, &heartbeat(id, held)).expect("heard")
    }

    fn try_beat(&self, id: &str, said: &Heartbeat) -> Result<Option<FleetState>, ApiError> {
        self.service.heartbeat(&id.parse().expect("id"), said, self.now)
    }

    fn contact(&self, id: &str) -> Contact {
        self.service.node(&id.parse().expect("id")).expect("node").contact
    }

    fn members(&self) -> Vec<String> {
        let placement = self.service.placement().expect("placement");
        placement.members.iter().map(|member| member.id.to_string()).collect()
    }

    fn add(&self, name: &str) {
        self.service.put_accelerator(&accelerator(name)).expect("put");
    }

    fn ask_purge(&self, key: &str) -> u64 {
        let body = words::<PurgeBody>(json!({"accelerator": "data", "key": key}));
        self.service.ask_purge(body).expect("purge").purge.sequence
    }
}

fn words<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("words")
}

fn accelerator(name: &str) -> Accelerator {
    words(json!({"name": name, "origin": "s3://bucket"}))
}

fn heartbeat(id: &str, held: &FleetState) -> Heartbeat {
    Heartbeat {
        instance: format!("{id}-start-1"),
        revision: held.revision,
        epoch: held.placement.epoch,
        purges_applied: held.purges_through,
        ..Heartbeat::default()
    }
}

fn bed() -> (tempfile::TempDir, Bed) {
    let room = tempfile::tempdir().expect("room");
    let bed = Bed::open(&room.path().join("store"));
    (room, bed)
}

#[test]
fn what_cannot_be_is_refused_with_what_and_what_to_do() {
    let (_room, bed) = bed();
    bed.add("data");
    let service = &bed.service;
    let put_accelerator = |value| service.put_accelerator(&words(value)).expect_err("refused");
    let put_policy = |value| service.put_policy(&words(value)).expect_err("refused");
    let purge = |value| service.ask_purge(words(value)).expect_err("refused");
    let register = |more: Value| bed.register("n", &more).expect_err("refused");
    let rule = |rule: Value| put_policy(json!({"name": "p", "rules": [rule]}));
    let long = "k".repeat(1025);
    let table: Vec<(ApiError, u16, &str, &str, &str)> = vec![
        (
            put_accelerator(json!({"name": "abc", "origin": "s3://bucket", "policy": "p"})),
            400,
            "unknown_policy",
            "no policy `p`",
            "set the policy first",
        ),
        (
            put_accelerator(json!({"name": "abc", "origin": "s3://bucket", "extent": "3MiB"})),
            400,
            "bad_accelerator",
            "power of two",
            "NAME=ORIGIN",
        ),
        (
            put_accelerator(json!({"name": "abc", "origin": "http://h", "region": "eu"})),
            400,
            "bad_accelerator",
            "belongs to s3://",
            "NAME=ORIGIN",
        ),
        (put_policy(json!({"name": "p", "replicas": 9})), 400, "bad_policy", "9 replicas", "change the rule"),
        (rule(json!({"match": "/a", "freshness": "strict"})), 400, "bad_policy", "`/a`", "change the rule"),
        (rule(json!({"match": "a"})), 400, "bad_policy", "says nothing", "change the rule"),
        (rule(json!({"match": "a*", "extent": "1MiB"})), 400, "bad_policy", "rule `**`", "change the rule"),
        (
            service.delete_policy(&"p".parse().expect("name")).expect_err("none"),
            404,
            "unknown_policy",
            "`p`",
            "policy list",
        ),
        (
            service.delete_accelerator(&"none".parse().expect("name")).expect_err("none"),
            404,
            "unknown_accelerator",
            "`none`",
            "accelerator list",
        ),
        (
            service.delete_key(&"AKNONE".parse().expect("key")).expect_err("none"),
            404,
            "unknown_key",
            "`AKNONE`",
            "key list",
        ),
        (
            service.ask_prewarm(words(json!({"accelerator": "none"}))).expect_err("none"),
            404,
            "unknown_accelerator",
            "`none`",
            "accelerator add",
        ),
        (
            service.ask_prewarm(words(json!({"accelerator": "data", "prefix": "/a"}))).expect_err("slash"),
            400,
            "bad_prefix",
            "slash",
            "not percent-encoded",
        ),
        (service.prewarm(7).expect_err("none"), 404, "unknown_prewarm", "7", "prewarm list"),
        (purge(json!({"accelerator": "data"})), 400, "bad_purge", "either a key or a prefix", "\"prefix\":"),
        (
            purge(json!({"accelerator": "data", "key": "a", "prefix": "b"})),
            400,
            "bad_purge",
            "either",
            "\"key\":",
        ),
        (purge(json!({"accelerator": "data", "key": ""})), 400, "bad_key", "empty", "prefix"),
        (purge(json!({"accelerator": "data", "key": long})), 400, "bad_key", "1024", "percent"),
        (
            purge(json!({"accelerator": "none", "key": "a"})),
            404,
            "unknown_accelerator",
            "`none`",
            "accelerator list",
        ),
        (service.purge(9).expect_err("none"), 404, "unknown_purge", "9", "purge list"),
        (register(json!({"instance": "short"})), 400, "bad_registration", "instance", "random"),
        (register(json!({"weight": 0})), 400, "bad_registration", "weight 0", "GiB"),
        (register(json!({"listen": ["here:70"]})), 400, "bad_registration", "`here:70`", "http://HOST:PORT"),
        (register(json!({"epoch": 900})), 409, "control_is_older", "revision 900", "advance --past 900"),
        (
            bed.try_beat("none", &Heartbeat::default()).expect_err("none"),
            404,
            "unknown_node",
            "`none`",
            "registers before",
        ),
        (
            service.remove_node(&"none".parse().expect("id")).expect_err("none"),
            404,
            "unknown_node",
            "`none`",
            "registers",
        ),
        (service.revoke_token("none").expect_err("none"), 404, "unknown_token", "`none`", "token list"),
        (service.advance(u64::MAX).expect_err("no room"), 400, "bad_revision", "more than", "refusal"),
    ];
    for (error, status, code, message, remedy) in table {
        assert_eq!((error.status.as_u16(), error.problem.code.as_str()), (status, code), "{error:?}");
        assert!(error.problem.message.contains(message), "{code}: {} / {message}", error.problem.message);
        assert!(error.problem.remedy.contains(remedy), "{code}: {} / {remedy}", error.problem.remedy);
    }
}

#[test]
fn a_state_is_whole_and_only_news_make_a_new_one() {
    let (_room, bed) = bed();
    bed.add("data");
    let first = bed.register("node-a", &json!({"weight": 7})).expect("registered");
    assert_eq!(first.accelerators, [accelerator("data")]);
    assert_eq!(first.placement.members[0].weight, 7);
    assert_eq!(bed.beat("node-a", &first), None);
    bed.add("data"); // as it is already
    assert_eq!(bed.beat("node-a", &first), None);
    let secret = json!({"secret": "0123456789abcdef"});
    bed.service.put_key("AKONE".parse().expect("key"), words(secret)).expect("key");
    let second = bed.beat("node-a", &first).expect("news");
    assert!(second.revision > first.revision);
    assert_eq!(second.placement.epoch, first.placement.epoch, "a key moves no groups");
    assert_eq!(second.keys[0].secret.reveal(), "0123456789abcdef");
    let policy = json!({"name": "two", "replicas": 2});
    bed.service.put_policy(&words(policy)).expect("policy");
    let data = json!({"name": "data", "origin": "s3://bucket", "policy": "two"});
    bed.service.put_accelerator(&words(data)).expect("put");
    let third = bed.beat("node-a", &second).expect("news");
    assert!(third.placement.epoch > second.placement.epoch, "replicas do");
    assert_eq!(
        bed.service.delete_policy(&"two".parse().expect("name")).expect_err("used").problem.code,
        "policy_in_use"
    );
}

#[test]
fn a_silent_node_keeps_its_groups_until_it_is_forgotten() {
    let (_room, mut bed) = bed();
    let state = bed.register("node-a", &json!({})).expect("registered");
    bed.register("node-b", &json!({})).expect("registered");
    let epoch = bed.service.placement().expect("placement").epoch;
    for _ in 0..4 {
        bed.pass(10);
        bed.beat("node-b", &state);
    }
    assert_eq!((bed.contact("node-a"), bed.contact("node-b")), (Contact::Away, Contact::Live));
    assert_eq!(bed.members(), ["node-a", "node-b"]);
    assert_eq!(bed.service.placement().expect("placement").epoch, epoch);
    for _ in 0..26 {
        bed.pass(10);
        bed.beat("node-b", &state);
    }
    assert_eq!(bed.contact("node-a"), Contact::Gone);
    assert_eq!(bed.members(), ["node-b"]);
    let gone = bed.service.placement().expect("placement").epoch;
    assert!(gone > epoch);
    bed.beat("node-a", &state).expect("news");
    assert_eq!(bed.contact("node-a"), Contact::Live);
    assert_eq!(bed.members(), ["node-a", "node-b"]);
    assert!(bed.service.placement().expect("placement").epoch > gone);
}

#[test]
fn a_restart_of_the_control_plane_makes_nobody_away_and_no_number_go_back() {
    let room = tempfile::tempdir().expect("room");
    let path = room.path().join("store");
    let (held, epoch, revision) = {
        let mut bed = Bed::open(&path);
        bed.add("data");
        let held = bed.register("node-a", &json!({})).expect("registered");
        bed.pass(29);
        bed.ask_purge("k");
        let status = bed.service.status(bed.now).expect("status");
        (held, status.epoch, status.revision)
    };
    let mut bed = Bed::open(&path);
    let status = bed.service.status(bed.now).expect("status");
    assert_eq!((status.epoch, status.revision), (epoch, revision));
    assert_eq!(*bed.service.news().borrow(), revision);
    bed.pass(29);
    assert_eq!(bed.contact("node-a"), Contact::Live);
    let next = bed.beat("node-a", &held).expect("news");
    assert_eq!(next.purges.len(), 1);
    bed.register("node-b", &json!({})).expect("registered");
    let status = bed.service.status(bed.now).expect("status");
    assert!(status.epoch > epoch && status.revision > revision);
}

#[test]
fn purges_reach_who_was_away_and_spare_who_has_an_empty_cache() {
    let (_room, mut bed) = bed();
    bed.add("data");
    let a = bed.register("node-a", &json!({})).expect("registered");
    let b = bed.register("node-b", &json!({})).expect("registered");
    assert!(a.purges.is_empty() && b.purges.is_empty());
    bed.pass(20);
    let b = bed.beat("node-b", &b).unwrap_or(b);
    bed.pass(15);
    let first = bed.ask_purge("k1");
    let second = bed.ask_purge("k2");
    let status = bed.service.purge(first).expect("status");
    assert_eq!((status.waiting.len(), status.unreached.len(), status.complete), (1, 1, false));
    let b2 = bed.beat("node-b", &b).expect("news");
    assert_eq!(b2.purges.iter().map(|purge| purge.sequence).collect::<Vec<_>>(), [first, second]);
    assert_eq!(bed.beat("node-b", &b2), None);
    let status = bed.service.purge(second).expect("status");
    assert!(status.complete && status.applied.len() == 1 && status.unreached.len() == 1, "{status:?}");
    // Back with its old cache: it gets both. Back with an empty one: neither.
    let kept = bed.register("node-a", &json!({"purges_applied": a.purges_through})).expect("registered");
    assert_eq!(kept.purges.len(), 2);
    assert!(!bed.service.purge(second).expect("status").complete);
    let empty = bed.register("node-a", &json!({})).expect("registered");
    assert!(empty.purges.is_empty());
    assert_eq!(bed.service.purge(second).expect("status").applied.len(), 2);
}

#[test]
fn what_is_remembered_of_purges_is_bounded_and_says_so() {
    let (_room, bed) = bed();
    bed.add("data");
    let state = bed.register("node-a", &json!({})).expect("registered");
    assert_eq!(state.purges_after, 0);
    let first = bed.ask_purge("k0");
    // As if ten thousand had followed, without ten thousand commits.
    bed.service
        .edit(|edit| {
            for i in 0..10_000 {
                let sequence = first + 1 + i;
                let row = json!({"sequence": sequence, "accelerator": "data", "key": "k", "asked": "now"});
                edit.change.put(&words::<Purge>(row))?;
            }
            Ok(edit.change.raise("revision", first + 10_000)?)
        })
        .expect("written");
    let last = bed.ask_purge("k-last");
    let state = bed.service.state_for(&"node-a".parse().expect("id")).expect("state");
    assert_eq!(state.purges.len(), 10_000);
    assert_eq!(state.purges_after, first + 1, "two are forgotten: a node before them has to forget all");
    assert_eq!(state.purges.last().map(|purge| purge.sequence), Some(last));
    assert_eq!(bed.service.purge(first).expect_err("forgotten").problem.code, "unknown_purge");
}

#[test]
fn a_prewarm_is_one_nodes_and_moves_on_when_that_falls_silent() {
    let (_room, mut bed) = bed();
    bed.add("data");
    let ask = |prefix: &str| {
        let body = words::<PrewarmBody>(json!({"accelerator": "data", "prefix": prefix}));
        bed.service.ask_prewarm(body).expect("asked").id
    };
    let id = ask("a/");
    assert_eq!(bed.service.prewarm(id).expect("job").state, PrewarmState::Waiting);
    let a = bed.register("node-a", &json!({})).expect("registered");
    assert_eq!(a.prewarms.len(), 1, "who comes first gets what waits");
    let b = bed.register("node-b", &json!({})).expect("registered");
    let other = ask("b/");
    assert_eq!(bed.service.prewarm(other).expect("job").node.expect("given").as_str(), "node-b");

    let said = |node: &str, held: &FleetState, id, attempt, state, done| {
        let progress = Progress { listed: 500, listed_all: true, done, failed: 0, bytes: done * 10 };
        Heartbeat {
            prewarms: vec![PrewarmProgress { id, attempt, state, progress, message: String::new() }],
            ..heartbeat(node, held)
        }
    };
    bed.try_beat("node-a", &said("node-a", &a, id, 1, PrewarmState::Running, 120)).expect("heard");
    assert_eq!(bed.service.prewarm(id).expect("job").progress.done, 120);
    // Another's word, and an earlier attempt's, are not heard.
    bed.try_beat("node-b", &said("node-b", &b, id, 1, PrewarmState::Done, 500)).expect("heard");
    assert_eq!(bed.service.prewarm(id).expect("job").state, PrewarmState::Running);
    let nonsense = bed.try_beat("node-a", &said("node-a", &a, id, 1, PrewarmState::Cancelled, 1));
    assert_eq!(nonsense.expect_err("refused").problem.code, "bad_progress");

    bed.now += Duration::from_secs(31);
    bed.beat("node-b", &b);
    bed.service.tick(bed.now).expect("tick");
    let job = bed.service.prewarm(id).expect("job");
    assert_eq!((job.node.expect("given").as_str(), job.attempt, job.progress.done), ("node-b", 2, 0));
    bed.try_beat("node-a", &said("node-a", &a, id, 1, PrewarmState::Done, 500)).expect("heard");
    let tasks = bed.beat("node-b", &b).expect("news").prewarms;
    assert_eq!(tasks.iter().map(|task| (task.id, task.attempt)).collect::<Vec<_>>(), [(id, 2), (other, 1)]);
    bed.try_beat("node-b", &said("node-b", &b, id, 2, PrewarmState::Done, 500)).expect("heard");
    let job = bed.service.prewarm(id).expect("job");
    assert_eq!((job.state, job.progress.bytes, job.ended.is_some()), (PrewarmState::Done, 5000, true));
    bed.service.cancel_prewarm(other).expect("cancelled");
    assert!(bed.beat("node-b", &b).expect("news").prewarms.is_empty());
}

#[test]
fn the_newest_process_under_an_id_is_the_node() {
    let (_room, bed) = bed();
    let old = bed.register("node-a", &json!({})).expect("registered");
    bed.register("node-a", &json!({"instance": "node-a-start-2"})).expect("registered");
    let error = bed.try_beat("node-a", &heartbeat("node-a", &old)).expect_err("replaced");
    assert_eq!(error.problem.code, "node_replaced");
    assert!(error.problem.remedy.contains("id of its own"));
}

#[test]
fn an_older_store_is_noticed_and_can_be_gone_on_from() {
    let (_room, bed) = bed();
    let held = bed.register("node-a", &json!({})).expect("registered");
    let ahead = Heartbeat { revision: 700, ..heartbeat("node-a", &held) };
    let error = bed.try_beat("node-a", &ahead).expect_err("older");
    assert!(error.problem.remedy.contains("advance --past 700"), "{error:?}");
    let placement = bed.service.advance(700).expect("advanced");
    assert!(placement.epoch > Epoch(700));
    let state = bed.try_beat("node-a", &ahead).expect("heard").expect("news");
    assert_eq!(state.placement.supersedes(Epoch(700)), Ok(()));
}

/// A node that was restarted since the copy is told that the store is older, not that somebody else has its id: the first
/// has a remedy, and after that it may register again.
#[test]
fn an_older_store_is_noticed_by_a_node_that_was_restarted_since() {
    let (_room, bed) = bed();
    let held = bed.register("node-a", &json!({})).expect("registered");
    let ahead = Heartbeat { revision: 700, instance: "node-a-start-2".into(), ..heartbeat("node-a", &held) };
    assert_eq!(bed.try_beat("node-a", &ahead).expect_err("older").problem.code, "control_is_older");
    bed.service.advance(700).expect("advanced");
    assert_eq!(bed.try_beat("node-a", &ahead).expect_err("unheard").problem.code, "node_replaced");
    bed.register("node-a", &json!({"instance": "node-a-start-2"})).expect("registered");
    bed.try_beat("node-a", &ahead).expect("heard");
}

#[test]
fn a_drained_node_owns_nothing_and_gets_the_same_back() {
    let (_room, bed) = bed();
    bed.register("node-a", &json!({})).expect("registered");
    bed.register("node-b", &json!({})).expect("registered");
    let before = bed.service.placement().expect("placement");
    let id = "node-a".parse().expect("id");
    assert!(bed.service.set_draining(&id, true).expect("drained").draining);
    assert_eq!(bed.members(), ["node-b"]);
    bed.register("node-a", &json!({})).expect("a restart ends no drain");
    assert_eq!(bed.members(), ["node-b"]);
    bed.service.set_draining(&id, false).expect("resumed");
    assert_eq!(bed.service.placement().expect("placement").members, before.members);
    bed.service.remove_node(&id).expect("removed");
    assert_eq!(bed.members(), ["node-b"]);
}

#[test]
fn tokens_are_known_by_hash_and_the_last_admin_stays() {
    let (_room, bed) = bed();
    let service = &bed.service;
    let issue = |role| service.issue_token(TokenBody { role, note: String::new() }).expect("issued");
    assert!(!service.has_admin().expect("asked"));
    let (admin, reader) = (issue(Role::Admin), issue(Role::Reader));
    assert_eq!(service.role_of(&admin.token), Some(Role::Admin));
    assert_eq!(service.role_of(&reader.token), Some(Role::Reader));
    assert_eq!(service.role_of(&reader.token[..reader.token.len() - 1]), None);
    assert_eq!(service.role_of(""), None);
    let kept =
        serde_json::to_string(&service.view().expect("view").all::<crate::store::TokenRow>().expect("rows"));
    assert!(!kept.expect("json").contains(&admin.token[4..]));
    assert_eq!(service.revoke_token(&admin.info.id).expect_err("last").problem.code, "last_admin");
    service.revoke_token(&reader.info.id).expect("revoked");
    assert_eq!(service.role_of(&reader.token), None);
}

#[test]
fn the_same_key_put_again_is_no_news() {
    let folder = tempfile::tempdir().expect("a folder");
    let bed = Bed::open(&folder.path().join("store"));
    let put = |secret: &str, note: &str| {
        let body = words(json!({"secret": secret, "note": note}));
        bed.service.put_key("AKONE".parse().expect("a name"), body).expect("put");
        bed.service.view().expect("view").revision().expect("revision")
    };
    let first = put("a-secret-of-it", "team a");
    assert_eq!(put("a-secret-of-it", "team a"), first);
    let renamed = put("a-secret-of-it", "team b");
    let replaced = put("another-secret", "team b");
    assert!(first < renamed && renamed < replaced);
}
