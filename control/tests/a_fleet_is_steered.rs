//! From nothing to a control plane, two nodes, an accelerator, a key, a policy, a prewarmed prefix with progress, a
//! purge that both applied, and a node that was away and gets what it missed. The nodes are the protocol and nothing
//! else: real requests over real sockets, no data path behind them.

mod house;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use forebay_control_api::{Epoch, FleetState, Heartbeat, PrewarmProgress, PrewarmState, Progress};
use house::{Control, ask, until};
use serde_json::json;

/// Objects that a prewarm finds.
const OBJECTS: u64 = 500;

/// Speaks the node's half of the protocol, as the agent on a real node does.
struct FakeNode {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What the node would have on its drive: it survives a stop.
#[derive(Default)]
struct Seen {
    state: Option<FleetState>,
    purged: Vec<u64>,
    epochs: Vec<Epoch>,
    states: usize,
}

impl FakeNode {
    fn start(control: &Control, id: &'static str, token: &str, seen: Arc<Mutex<Seen>>, start: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (url, token) = (control.url.clone(), token.to_owned());
        let (seen_there, stop_there) = (Arc::clone(&seen), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let instance = format!("{id}-start-{start}");
            let purges_applied =
                seen_there.lock().expect("sane").state.as_ref().map(|held| held.purges_through);
            let body = json!({
                "instance": instance, "zone": format!("zone-of-{id}"), "weight": 64, "version": "0.1.0",
                "listen": ["http://127.0.0.1:7070"], "peer": "http://127.0.0.1:7072",
                "purges_applied": purges_applied,
            });
            let (status, answer) =
                ask(&url, "PUT", &format!("/v1/nodes/{id}"), Some(&token), Some(body.to_string()));
            assert_eq!(status, 200, "{answer}");
            take(&seen_there, serde_json::from_value(answer).expect("a state"));
            let mut done = 0;
            while !stop_there.load(Ordering::Relaxed) {
                let (held, prewarms) = {
                    let seen = seen_there.lock().expect("sane");
                    let held = seen.state.clone().expect("registered");
                    // A hundred objects between two heartbeats.
                    let prewarms: Vec<_> = held
                        .prewarms
                        .iter()
                        .map(|task| {
                            done = (done + 100).min(OBJECTS);
                            let state =
                                if done == OBJECTS { PrewarmState::Done } else { PrewarmState::Running };
                            let progress = Progress {
                                listed: OBJECTS,
                                listed_all: true,
                                done,
                                failed: 0,
                                bytes: done << 20,
                            };
                            PrewarmProgress {
                                id: task.id,
                                attempt: task.attempt,
                                state,
                                progress,
                                message: String::new(),
                            }
                        })
                        .collect();
                    (held, prewarms)
                };
                let busy = !prewarms.is_empty();
                let said = Heartbeat {
                    instance: instance.clone(),
                    revision: held.revision,
                    epoch: held.placement.epoch,
                    purges_applied: held.purges_through,
                    serves: held.accelerators.iter().map(|it| it.name.clone()).collect(),
                    prewarms,
                    ..Heartbeat::default()
                };
                let wait = if busy { "0s" } else { "1s" };
                let path = format!("/v1/nodes/{id}/heartbeat?wait={wait}");
                let said = serde_json::to_string(&said).expect("json");
                match ask(&url, "POST", &path, Some(&token), Some(said)) {
                    (200, state) => take(&seen_there, serde_json::from_value(state).expect("a state")),
                    (204, _) => {}
                    other => panic!("{other:?}"),
                }
            }
        });
        Self { seen, stop, thread: Some(thread) }
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the node ends well");
        }
    }

    fn purged(&self) -> Vec<u64> {
        self.seen.lock().expect("sane").purged.clone()
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn take(seen: &Mutex<Seen>, state: FleetState) {
    let mut seen = seen.lock().expect("sane");
    if let Some(held) = &seen.state {
        state.placement.supersedes(held.placement.epoch).expect("no older placement");
        assert!(held.purges_through >= state.purges_after, "it would have to forget everything");
    }
    seen.purged.extend(state.purges.iter().map(|purge| purge.sequence));
    seen.epochs.push(state.placement.epoch);
    seen.states += 1;
    seen.state = Some(state);
}

#[test]
fn from_nothing_to_a_fleet_that_forgets_what_it_is_told_to() {
    let room = tempfile::tempdir().expect("room");
    let control = Control::start(room.path(), &["--fence-after", "3s", "--forget-after", "10m"]);
    let node_token = room.path().join("node-token");
    control.say(&["token", "add", "--role", "node", "--out", node_token.to_str().expect("utf-8")]);
    let token = std::fs::read_to_string(&node_token).expect("the token").trim().to_owned();

    // What the operator says, before any node is there.
    let secret = room.path().join("secret");
    std::fs::write(&secret, "a-secret-of-twenty-chars\n").expect("written");
    control.say(&[
        "key",
        "add",
        "FBTEAMA",
        "--secret-file",
        secret.to_str().expect("utf-8"),
        "--note",
        "team a",
    ]);
    control.say(&[
        "policy",
        "set",
        "tables",
        "--replicas",
        "2",
        "--rule",
        "**/_tmp/**,admission=never",
        "--rule",
        "**,freshness=ttl:60s,extent=256KiB",
    ]);
    control.say(&["accelerator", "add", "data=s3://bucket,region=eu-1", "--policy", "tables"]);

    let seen = [Arc::new(Mutex::new(Seen::default())), Arc::new(Mutex::new(Seen::default()))];
    let a = FakeNode::start(&control, "node-a", &token, Arc::clone(&seen[0]), 1);
    let mut b = FakeNode::start(&control, "node-b", &token, Arc::clone(&seen[1]), 1);
    until("both nodes to hold the newest state", || {
        let status = control.get("/v1/status");
        (status["nodes"]["live"] == 2 && status["nodes_behind"] == 0).then_some(())
    });
    {
        let held = a.seen.lock().expect("sane");
        let state = held.state.as_ref().expect("a state");
        assert_eq!(state.keys[0].secret.reveal(), "a-secret-of-twenty-chars");
        let spec = state.accelerators[0].spec(Some(&state.policies[0])).expect("a spec");
        assert_eq!((spec.extent_bytes(), spec.rules.len()), (256 << 10, 2));
        let owners = state.placement.owners(&state.accelerators[0].name, b"some/key", 3);
        assert_eq!(owners.len(), 2, "two replicas, in two zones");
    }
    assert!(control.say(&["nodes"]).contains("zone-of-node-b"));
    assert!(!control.say(&["key", "list", "--json"]).contains("a-secret"));

    // One node reads the prefix, and its progress is seen.
    let shown = control.say(&["prewarm", "start", "data", "train/", "--wait"]);
    assert!(shown.contains("done") && shown.contains("500MiB"), "{shown}");
    let job = &control.get("/v1/prewarms")[0];
    assert_eq!(
        (job["state"].as_str(), job["progress"]["done"].as_u64()),
        (Some("done"), Some(OBJECTS)),
        "{job}"
    );

    // Both forget.
    let shown = control.say(&["purge", "key", "data", "train/0", "--wait"]);
    assert!(shown.contains("complete") && shown.contains("node-a node-b"), "{shown}");
    let first = control.get("/v1/purges")[0]["purge"]["sequence"].as_u64().expect("a sequence");
    assert_eq!((a.purged(), b.purged()), (vec![first], vec![first]));

    // One is away: its groups stay, its purges wait for it.
    let epoch = control.get("/v1/placement")["epoch"].clone();
    b.stop();
    until("node-b to be away", || (control.get("/v1/nodes/node-b")["contact"] == "away").then_some(()));
    let shown = control.say(&["purge", "prefix", "data", "train/", "--wait"]);
    assert!(shown.contains("complete"), "{shown}");
    let second = control.get("/v1/purges")[0].clone();
    assert_eq!((&second["applied"], &second["unreached"]), (&json!(["node-a"]), &json!(["node-b"])));
    let second = second["purge"]["sequence"].as_u64().expect("a sequence");
    assert_eq!(control.get("/v1/placement")["epoch"], epoch, "a restart moves nothing");

    // It is back, with what it had.
    let b = FakeNode::start(&control, "node-b", &token, Arc::clone(&seen[1]), 2);
    until("node-b to have applied what it missed", || {
        let purge = control.get(&format!("/v1/purges/{second}"));
        (purge["applied"] == json!(["node-a", "node-b"])).then_some(())
    });
    assert_eq!(b.purged(), [first, second]);
    assert_eq!(control.get("/v1/placement")["epoch"], epoch);

    let epochs = a.seen.lock().expect("sane").epochs.clone();
    assert!(epochs.is_sorted(), "{epochs:?}");
}

#[test]
fn a_heartbeat_that_is_held_back_is_answered_when_there_is_news() {
    let room = tempfile::tempdir().expect("room");
    let mut control = Control::start(room.path(), &["--fence-after", "10m", "--forget-after", "10m"]);
    let registered = control.send("PUT", "/v1/nodes/node-a", &json!({"instance": "node-a-start"}));
    let held = registered["revision"].as_u64().expect("a revision");
    let hold = |objects: u64| {
        let (url, token) = (control.url.clone(), control.admin.clone());
        let said = json!({
            "instance": "node-a-start", "revision": held, "epoch": registered["placement"]["epoch"],
            "purges_applied": held, "report": {"objects": objects}});
        std::thread::spawn(move || {
            ask(&url, "POST", "/v1/nodes/node-a/heartbeat?wait=50s", Some(&token), Some(said.to_string()))
        })
    };
    let heard = |objects: u64| {
        until("the heartbeat to be heard", || {
            (control.get("/v1/nodes/node-a")["report"]["objects"] == objects).then_some(())
        });
    };
    // A wait that ran out would say 204; so 200 is the bell.
    let waiting = hold(1);
    heard(1);
    control.send("PUT", "/v1/accelerators/data", &json!({"name": "data", "origin": "s3://bucket"}));
    let (status, state) = waiting.join().expect("answered");
    assert_eq!(status, 200, "{state}");
    assert_eq!(state["accelerators"][0]["name"], "data");

    // One that is held back does not keep the process from stopping, and is answered.
    let held = state["revision"].as_u64().expect("a revision");
    let (url, token) = (control.url.clone(), control.admin.clone());
    let said = json!({"instance": "node-a-start", "revision": held, "epoch": 0, "purges_applied": held,
        "report": {"objects": 2}});
    let waiting = std::thread::spawn(move || {
        ask(&url, "POST", "/v1/nodes/node-a/heartbeat?wait=50s", Some(&token), Some(said.to_string()))
    });
    heard(2);
    assert!(control.terminate().success());
    assert_eq!(waiting.join().expect("answered").0, 204);
}

#[test]
fn epochs_and_all_that_was_said_survive_a_kill() {
    let room = tempfile::tempdir().expect("room");
    let mut control = Control::start(room.path(), &[]);
    control.send("PUT", "/v1/accelerators/data", &json!({"name": "data", "origin": "s3://bucket"}));
    control.send("PUT", "/v1/nodes/node-a", &json!({"instance": "node-a-start"}));
    let (mut epoch, mut revision) = (0, 0);
    for round in 0..5 {
        let purge =
            control.send("POST", "/v1/purges", &json!({"accelerator": "data", "key": format!("k{round}")}));
        control.send("PUT", &format!("/v1/nodes/more-{round}"), &json!({"instance": "more-start"}));
        let status = control.get("/v1/status");
        let now = (status["epoch"].as_u64().expect("epoch"), status["revision"].as_u64().expect("revision"));
        assert!(now.0 > epoch && now.1 > revision, "{now:?} follows {epoch}, {revision}");
        assert!(purge["purge"]["sequence"].as_u64().expect("sequence") > revision);
        (epoch, revision) = now;
        control.kill();
        drop(control);
        control = Control::start(room.path(), &[]);
        let status = control.get("/v1/status");
        assert_eq!((status["epoch"].as_u64(), status["revision"].as_u64()), (Some(epoch), Some(revision)));
        assert_eq!(control.get("/v1/purges").as_array().expect("purges").len(), round + 1);
    }
    assert_eq!(control.get("/v1/accelerators")[0]["name"], "data");
    assert_eq!(control.get("/v1/placement")["members"].as_array().expect("members").len(), 6);
}
