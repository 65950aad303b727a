//! From nothing to a control plane, two nodes, an accelerator, a key, a prewarmed prefix of 500 objects, purges, a node
//! that was away, a control plane that was killed: with the real programs, by the commands of `docs/cluster.md`.

use std::collections::HashSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use forebay_control_api::{NodeStatus, PurgeStatus};
use forebay_dataplane::origin::{
    Connections, Credentials, Forward, Origin, OriginKind, OriginLimits, OriginTarget, upload,
};
use forebay_dataplane::peer;
use forebay_tests::fleet::{Fleet, Page, Server};
use forebay_tests::http::{self, Response};
use forebay_tests::s3::S3Origin;
use forebay_tests::wait::until;
use serde::de::DeserializeOwned;

const OBJECTS: usize = 500;
const OBJECT_BYTES: usize = 20_000;
/// One object of several groups of 16 MiB, and so of both nodes.
const LARGE_BYTES: usize = 40 << 20;
const ORIGIN_KEYS: (&str, &str) = ("AKORIGIN", "origin-secret-words");

/// The page's fleet, and the S3 service behind it.
struct World {
    fleet: Fleet,
    origin: S3Origin,
    endpoint: SocketAddr,
    bucket: std::path::PathBuf,
    room: tempfile::TempDir,
    control: SocketAddr,
    nodes: [SocketAddr; 2],
    admins: [SocketAddr; 2],
}

impl World {
    fn new(fence_after: &str) -> Self {
        let room = tempfile::tempdir().expect("a folder");
        let root = room.path().join("s3");
        let bucket = root.join("bucket");
        std::fs::create_dir_all(bucket.join("train")).expect("a bucket");
        let origin = S3Origin::new(&root, ORIGIN_KEYS.0, ORIGIN_KEYS.1).expect("an S3 service");
        let endpoint = serve(origin.clone());
        let [control, node_a, admin_a, node_b, admin_b] = [(); 5].map(|()| free_address());
        let place = |name: &str| room.path().join(name).display().to_string();
        let settings = [
            ("ROOM", room.path().display().to_string()),
            ("CONTROL", control.to_string()),
            ("NODE_A", node_a.to_string()),
            ("ADMIN_A", admin_a.to_string()),
            ("NODE_B", node_b.to_string()),
            ("ADMIN_B", admin_b.to_string()),
            ("ENDPOINT", format!("http://{endpoint}")),
            ("BUCKET", "bucket".into()),
            ("FOREBAY_CONTROL_URL", format!("http://{control}")),
            ("FOREBAY_CONTROL_TOKEN_FILE", place("store.admin-token")),
            ("AWS_ACCESS_KEY_ID", ORIGIN_KEYS.0.into()),
            ("AWS_SECRET_ACCESS_KEY", ORIGIN_KEYS.1.into()),
            ("FENCE_AFTER", fence_after.into()),
        ];
        let fleet = Fleet::new(Page::read("cluster.md"), room.path(), &settings);
        Self {
            fleet,
            origin,
            endpoint,
            bucket,
            room,
            control,
            nodes: [node_a, node_b],
            admins: [admin_a, admin_b],
        }
    }

    fn put(&self, key: &str, seed: u64, bytes: usize) {
        std::fs::write(self.bucket.join(key), content(seed, bytes)).expect("an object");
    }

    fn fill(&self) {
        for number in 0..OBJECTS {
            self.put(&key(number), number as u64, OBJECT_BYTES);
        }
    }

    fn start_control(&self) -> Server {
        let server = self.fleet.start("control", &[]);
        until("the control plane to answer", || {
            http::ask(self.control, "GET", "/healthz", &[], None)
                .is_ok_and(|it| it.status == 200)
                .then_some(())
        });
        server
    }

    fn start_node(&self, which: usize) -> Server {
        let server = self.fleet.start(["node-a", "node-b"][which], &[]);
        until("the node to be ready", || {
            http::ask(self.admins[which], "GET", "/readyz", &[], None)
                .is_ok_and(|it| it.status == 200)
                .then_some(())
        });
        server
    }

    /// The control plane, the token, both nodes, the accelerator and the key, known to both.
    fn start(&self) -> (Server, [Server; 2]) {
        let control = self.start_control();
        self.fleet.say("token", &[]);
        let nodes = [self.start_node(0), self.start_node(1)];
        let words = self.fleet.say("nodes", &[]);
        assert_eq!(words.matches("live").count(), 2, "{words}");
        self.fleet.say("serve", &[]);
        for which in 0..2 {
            until("the node to serve the bucket", || {
                let status = self.status(which);
                (status.accelerators.iter().any(|it| it.name == "data")).then_some(())
            });
            // The key came in a state of its own.
            let client = self.client(which);
            until("the node to know the key", || (client.get("none").status != 403).then_some(()));
        }
        (control, nodes)
    }

    fn status(&self, which: usize) -> NodeStatus {
        json(&http::get(self.admins[which], "/v1/status"))
    }

    fn secret(&self) -> String {
        std::fs::read_to_string(self.room.path().join("team-a.secret")).expect("a secret").trim().to_owned()
    }

    /// A client of one node that signs with the page's key.
    fn client(&self, which: usize) -> Client {
        Client::new(self.nodes[which], "FBTEAMA", &self.secret())
    }

    fn purges(&self) -> Vec<PurgeStatus> {
        let token = std::fs::read_to_string(self.room.path().join("store.admin-token")).expect("a token");
        let header = format!("Bearer {}", token.trim());
        let answer = http::ask(self.control, "GET", "/v1/purges", &[("authorization", &header)], None);
        json(&answer.expect("the purges"))
    }

    fn said_of_peers(&self, which: usize) -> String {
        let text = http::get(self.admins[which], "/metrics").text();
        text.lines()
            .filter(|line| line.starts_with("forebay_peer_"))
            .fold(String::new(), |said, line| said + "\n" + line)
    }

    fn metric(&self, which: usize, name: &str) -> u64 {
        let text = http::get(self.admins[which], "/metrics").text();
        let rows = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        rows.filter_map(|row| row.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
    }
}

#[test]
fn every_block_of_the_page_is_tried_here() {
    let tried = [
        "advance",
        "nodes",
        "prewarm",
        "purge",
        "serve",
        "server control",
        "server node-a",
        "server node-b",
        "settings",
        "token",
    ];
    assert_eq!(Page::read("cluster.md").names(), tried);
}

#[test]
fn from_nothing_to_a_fleet_that_forgets_what_it_is_told_to() {
    let world = World::new("5s");
    world.fill();
    let (_control, mut nodes) = world.start();

    let words = world.fleet.say("prewarm", &[]);
    assert!(words.contains("500"), "{words}");
    let bodies = world.origin.counts().body_bytes;
    assert_eq!(bodies, (OBJECTS * OBJECT_BYTES) as u64, "a prewarm reads each byte once");

    // Every byte through either node, and the S3 service has sent each of them once.
    let clients = [world.client(0), world.client(1)];
    let before = world.origin.counts();
    for client in &clients {
        for number in 0..OBJECTS {
            must_be(&client.get(&key(number)), number as u64, OBJECT_BYTES);
        }
    }
    let after = world.origin.counts();
    assert_eq!((after.gets, after.heads), (before.gets, before.heads), "all of them were hits");
    assert_eq!(
        after.body_bytes,
        bodies,
        "what one node lacks the other has: {}{}",
        world.said_of_peers(0),
        world.said_of_peers(1)
    );

    // Purges are seen on both.
    world.put(&key(0), 9_000, OBJECT_BYTES);
    world.put(&key(10), 9_010, OBJECT_BYTES);
    for client in &clients {
        must_be(&client.get(&key(0)), 0, OBJECT_BYTES);
    }
    let words = world.fleet.say("purge", &[]);
    assert!(words.contains("train/00000") && words.contains("train/0001"), "{words}");
    for client in &clients {
        must_be(&client.get(&key(0)), 9_000, OBJECT_BYTES);
        must_be(&client.get(&key(10)), 9_010, OBJECT_BYTES);
        must_be(&client.get(&key(20)), 20, OBJECT_BYTES);
    }

    // One is cut off with all its bytes, misses a purge, and comes back.
    nodes[1].signal("STOP");
    world.put(&key(0), 9_001, OBJECT_BYTES);
    let purge = || world.fleet.say("purge", &[]);
    until("the node to be away", || {
        let nodes = world.fleet.operate("forebay-control nodes");
        String::from_utf8_lossy(&nodes.stdout).contains("away").then_some(())
    });
    purge();
    let unreached = |status: &PurgeStatus| status.unreached.iter().any(|node| node.as_str() == "node-b");
    assert!(world.purges().iter().any(unreached), "{:?}", world.purges());
    must_be(&clients[0].get(&key(0)), 9_001, OBJECT_BYTES);
    nodes[1].signal("CONT");
    until("the purge to be applied", || {
        world.purges().iter().all(|it| it.unreached.is_empty() && it.waiting.is_empty()).then_some(())
    });
    must_be(&clients[1].get(&key(0)), 9_001, OBJECT_BYTES);

    // One is stopped and started: it begins empty, and is told what it missed.
    let [a, b] = nodes;
    b.terminate();
    world.put(&key(0), 9_002, OBJECT_BYTES);
    purge();
    nodes = [a, world.start_node(1)];
    until("the purge to be applied", || {
        world.purges().iter().all(|it| it.unreached.is_empty() && it.waiting.is_empty()).then_some(())
    });
    for client in &clients {
        must_be(&client.get(&key(0)), 9_002, OBJECT_BYTES);
    }
    drop(nodes);
}

#[test]
fn a_node_asks_the_owner_and_does_without_it() {
    let world = World::new("30s");
    world.fill();
    world.put("train/large", 7_000, LARGE_BYTES);
    let (_control, [a, b]) = world.start();
    let clients = [world.client(0), world.client(1)];
    // Groups of one object have owners of their own; each byte comes from the S3 service once.
    let before = world.origin.counts().body_bytes;
    for client in &clients {
        must_be(&client.get("train/large"), 7_000, LARGE_BYTES);
    }
    assert_eq!(world.origin.counts().body_bytes - before, LARGE_BYTES as u64, "through both nodes, once");
    let before = world.origin.counts().body_bytes;
    for client in &clients {
        for number in 0..50 {
            must_be(&client.get(&key(number)), number as u64, OBJECT_BYTES);
        }
    }
    assert_eq!(
        world.origin.counts().body_bytes - before,
        (50 * OBJECT_BYTES) as u64,
        "through both nodes, once"
    );
    for which in 0..2 {
        assert!(world.metric(which, "forebay_peer_received_bytes_total") > 0, "node {which} asked the other");
        assert!(world.metric(which, "forebay_peer_served_total") > 0, "node {which} was asked");
    }

    // What is written through one is seen through the other at once, `immutable` or not.
    for (writer, reader, seed) in [(0, 1, 8_000), (1, 0, 8_001), (0, 1, 8_002)] {
        for number in 0..4 {
            let written = clients[writer].put(&key(number), content(seed + number as u64, OBJECT_BYTES));
            assert_eq!(written.status, 200, "{}", written.text());
            for client in [&clients[reader], &clients[writer]] {
                must_be(&client.get(&key(number)), seed + number as u64, OBJECT_BYTES);
            }
        }
    }

    // A token that is not the fleet's opens nothing, and the headers of nodes mean nothing without it.
    let stranger = [("x-forebay-cluster-token", "0123456789abcdef"), ("x-forebay-peer", "00")];
    let path = format!("/data/{}", key(1));
    let refused = http::ask(world.nodes[0], "GET", &path, &stranger, None).expect("an answer");
    assert_eq!(refused.status, 403, "{}", refused.text());
    let refused = http::ask(world.nodes[0], "GET", &path, &stranger[1..], None).expect("an answer");
    assert_eq!(refused.status, 403, "{}", refused.text());

    // With it a node answers nodes: of the store that they mean, of no state that it has not taken, and bytes only.
    let kept = std::fs::read_to_string(world.room.path().join("forebay-node-a.state")).expect("a state");
    let kept: serde_json::Value =
        serde_json::from_str(kept.split_once('\n').expect("a head").1).expect("a state");
    let token = kept["state"]["cluster_token"].as_str().expect("a token");
    let endpoint = format!("http://{}", world.endpoint).parse().expect("a URL");
    let kind =
        OriginKind::S3 { bucket: "bucket".into(), endpoint: Some(endpoint), region: "us-east-1".into() };
    let identity = peer::identity(&OriginTarget { kind });
    let late = u64::MAX.to_string();
    let as_node = |method: &str, identity: &str, revision: &str| {
        let headers = [
            ("x-forebay-cluster-token", token),
            ("x-forebay-peer", identity),
            ("x-forebay-revision", revision),
        ];
        http::ask(world.nodes[0], method, &path, &headers, None).expect("an answer").status
    };
    assert_eq!(as_node("GET", &identity, "1"), 200);
    assert_eq!(as_node("GET", &identity, &late), 503, "what it has may have been purged where the asker is");
    assert_eq!(as_node("GET", "00", "1"), 421, "its `data` is another store");
    assert_eq!(as_node("DELETE", &identity, "1"), 421, "nodes write nothing to each other");

    // Without the other node, the S3 service is asked: for what is the other's, and no request fails.
    b.kill();
    for number in 0..OBJECTS {
        let seed = if number < 4 { 8_002 + number } else { number } as u64;
        must_be(&clients[0].get(&key(number)), seed, OBJECT_BYTES);
    }
    // One that hangs is left aside as well.
    let b = world.start_node(1);
    b.signal("STOP");
    world.put("train/new-1", 1, OBJECT_BYTES);
    for number in 0..20 {
        world.put(&format!("train/new-{number}"), number, OBJECT_BYTES);
        must_be(&clients[0].get(&format!("train/new-{number}")), number, OBJECT_BYTES);
    }
    // A write does not wait for it for ever, and is done.
    for number in 0..3 {
        let written = clients[0].put(&format!("train/new-{number}"), content(9_000, OBJECT_BYTES));
        assert_eq!(written.status, 200, "{}", written.text());
    }
    until("the node to have tried to tell it of all three", || {
        world.said_of_peers(0).contains("forgets_total{outcome=\"failed\"} 3").then_some(())
    });
    b.signal("CONT");
    drop((a, b));
}

#[test]
fn a_control_plane_that_is_killed_costs_no_request() {
    let world = World::new("5s");
    world.fill();
    let (control, nodes) = world.start();
    let older = world.room.path().join("store.older");

    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicU64::new(0));
    let load: Vec<_> = (0..2)
        .map(|which| {
            let (client, stop, answered) = (world.client(which), Arc::clone(&stop), Arc::clone(&answered));
            thread::spawn(move || {
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    must_be(&client.get(&key(number % OBJECTS)), (number % OBJECTS) as u64, OBJECT_BYTES);
                    answered.fetch_add(1, Ordering::Relaxed);
                    number += 1;
                }
            })
        })
        .collect();
    let more = |what: &str| {
        let before = answered.load(Ordering::Relaxed);
        until(what, || (answered.load(Ordering::Relaxed) > before + 300).then_some(()));
    };
    more("requests before");
    control.kill();
    std::fs::copy(world.room.path().join("store"), &older).expect("a copy of the store");
    more("requests without a control plane");
    // A node that is started meanwhile begins with what it kept.
    for which in 0..2 {
        until("the node to say that nobody answers", || {
            let link = world.status(which).control.expect("a control plane");
            link.problem.contains("cannot be reached").then_some(())
        });
        until("the node to be fenced", || world.status(which).control.expect("one").fenced.then_some(()));
    }
    more("requests while fenced");

    // It comes back, goes on, and is stopped; then an older copy of its store comes instead.
    let control = world.start_control();
    world.fleet.say("purge", &[]);
    more("requests after");
    let held = until("both nodes to hold the newest state", || {
        let links = [0, 1].map(|which| world.status(which).control.expect("one"));
        (links[0].revision == links[1].revision && !links[0].fenced && !links[1].fenced)
            .then(|| links[0].clone())
    });
    control.terminate();
    std::fs::copy(&older, world.room.path().join("store")).expect("the older store");
    let _older = world.start_control();
    for which in 0..2 {
        let link = until("the node to refuse what is older", || {
            Some(world.status(which).control.expect("one")).filter(|link| link.problem.contains("older copy"))
        });
        assert!(link.problem.contains(&format!("--past {}", held.revision)), "{}", link.problem);
        assert_eq!((link.revision, link.epoch), (held.revision, held.epoch));
        assert!(world.metric(which, "forebay_control_answers_total") > 0);
    }
    more("requests while refusing");
    world.fleet.say("advance", &[("REVISION", &held.revision.to_string())]);
    for which in 0..2 {
        until("the node to go on", || {
            let link = world.status(which).control.expect("one");
            (link.revision > held.revision && link.problem.is_empty()).then_some(())
        });
    }
    more("requests at the end");
    stop.store(true, Ordering::Relaxed);
    for reader in load {
        reader.join().expect("not one request fails");
    }
    drop(nodes);
}

#[test]
fn a_node_that_was_restarted_since_the_copy_is_back_after_the_advance() {
    let world = World::new("5s");
    world.fill();
    let (control, [a, b]) = world.start();
    let (store, older) = (world.room.path().join("store"), world.room.path().join("store.older"));
    control.terminate();
    std::fs::copy(&store, &older).expect("a copy of the store");
    let control = world.start_control();
    a.terminate();
    let a = world.start_node(0);
    world.fleet.say("purge", &[]);
    let held = until("the node to hold the newest state", || {
        world.status(0).control.filter(|link| link.problem.is_empty() && link.contact_seconds_ago.is_some())
    });
    control.terminate();
    std::fs::copy(&older, &store).expect("the older store");
    let _older = world.start_control();
    until("the node to say what to do", || {
        let link = world.status(0).control.expect("one");
        link.problem.contains("advance --past").then_some(())
    });
    let past = held.revision + 100;
    world.fleet.say("advance", &[("REVISION", &past.to_string())]);
    until("the node to be back", || {
        let link = world.status(0).control.expect("one");
        (link.problem.is_empty() && link.revision > past).then_some(())
    });
    drop((a, b));
}

#[test]
fn a_node_begins_with_what_it_kept_and_refuses_what_is_torn() {
    let world = World::new("30s");
    world.fill();
    let (control, [a, b]) = world.start();
    let client = world.client(0);
    must_be(&client.get(&key(1)), 1, OBJECT_BYTES);
    control.kill();
    a.terminate();
    let a = world.start_node(0);
    must_be(&client.get(&key(2)), 2, OBJECT_BYTES);
    let link = world.status(0).control.expect("one");
    assert!(link.revision > 0 && link.contact_seconds_ago.is_none(), "{link:?}");
    a.terminate();

    let kept = world.room.path().join("forebay-node-a.state");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&kept).expect("kept").permissions());
    assert_eq!(mode & 0o777, 0o600, "it holds keys");
    let whole = std::fs::read(&kept).expect("kept");
    std::fs::write(&kept, &whole[..whole.len() / 2]).expect("torn");
    let torn = world.fleet.start("node-a", &[]);
    let log = torn.log();
    let status = torn.wait();
    let log = log + &std::fs::read_to_string(world.room.path().join("node-a.log")).expect("a log");
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("move it away"), "{log}");
    drop(b);
}

#[test]
fn each_wrong_thing_is_said_in_words_that_say_what_to_do() {
    let world = World::new("30s");
    world.fill();
    let control = world.start_control();
    world.fleet.say("token", &[]);
    let token = world.room.path().join("node.token");
    let good = std::fs::read_to_string(&token).expect("a token");

    // A token that nobody issued, one of another role, none: the node waits, and takes the right one when it is there.
    std::fs::write(&token, "0123456789abcdef0123456789abcdef\n").expect("written");
    let node = world.fleet.start("node-a", &[]);
    let problem = |words: &str| {
        until(&format!("the node to say `{words}`"), || {
            let status = http::ask(world.admins[0], "GET", "/v1/status", &[], None).ok()?;
            let status: NodeStatus = json(&status);
            Some(status.control?.problem).filter(|problem| problem.contains(words))
        })
    };
    let words = problem("not known here");
    assert!(words.contains("token add --role") && words.contains("--token-file"), "{words}");
    let ready = http::get(world.admins[0], "/readyz");
    assert_eq!(ready.status, 503);
    assert!(ready.text().contains("/v1/status"), "{}", ready.text());
    let reader = world.fleet.operate("forebay-control token add --role reader --out $ROOM/reader.token");
    assert!(reader.status.success());
    std::fs::copy(world.room.path().join("reader.token"), &token).expect("written");
    let words = problem("role reader may not");
    assert!(words.contains("admin or node"), "{words}");
    std::fs::write(&token, "two words\n").expect("written");
    problem("one line of visible characters");
    std::fs::write(&token, good).expect("written");
    until("the node to be ready", || (http::get(world.admins[0], "/readyz").status == 200).then_some(()));
    let log = node.log();
    for words in ["not known here", "role reader may not", "one line of visible characters"] {
        assert!(log.contains(words), "the log does not say `{words}`:\n{log}");
    }

    // Clients: a bucket that nobody named, a key that nobody knows.
    world.fleet.say("serve", &[]);
    until("the bucket", || (!world.status(0).accelerators.is_empty()).then_some(()));
    let client = world.client(0);
    must_be(&until("the key", || Some(client.get(&key(1))).filter(|it| it.status == 200)), 1, OBJECT_BYTES);
    let unknown = client.get_of("nothing", "k");
    assert_eq!(unknown.status, 404);
    assert!(unknown.text().contains("NoSuchBucket") && unknown.text().contains("accelerator add nothing="));
    let stranger = Client::new(world.nodes[0], "FBSTRANGER", "0123456789abcdef").get(&key(1));
    assert_eq!(stranger.status, 403);
    assert!(stranger.text().contains("InvalidAccessKeyId") && stranger.text().contains("key add"));

    // What is taken away is gone within a moment, and comes back empty.
    let bodies = world.origin.counts().body_bytes;
    must_be(&client.get(&key(1)), 1, OBJECT_BYTES);
    assert_eq!(world.origin.counts().body_bytes, bodies);
    let removed = world.fleet.operate("forebay-control accelerator remove data");
    assert!(removed.status.success(), "{}", forebay_tests::node::words(&removed));
    until("the bucket to go", || (client.get(&key(1)).status == 404).then_some(()));
    world.fleet.say("serve", &[]);
    let client = world.client(0);
    must_be(
        &until("the bucket to be back", || Some(client.get(&key(1))).filter(|it| it.status == 200)),
        1,
        OBJECT_BYTES,
    );
    assert_eq!(world.origin.counts().body_bytes, bodies + OBJECT_BYTES as u64);

    // A node that an operator removed introduces itself again.
    let removed = world.fleet.operate("forebay-control nodes remove node-a");
    assert!(removed.status.success());
    until("the node to be back", || world.fleet.say("nodes", &[]).contains("live").then_some(()));
    drop((control, node));
}

struct Question {
    bucket: String,
    key: String,
    /// What is put there; a GET without.
    put: Option<Vec<u8>>,
    answer: mpsc::Sender<Response>,
}

/// A client of a node that signs, over a runtime of its own.
struct Client {
    asks: mpsc::Sender<Question>,
}

impl Client {
    fn new(node: SocketAddr, access_key: &str, secret: &str) -> Self {
        let (asks, asked) = mpsc::channel::<Question>();
        let credentials = Credentials::given(access_key, secret);
        thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, async {
                while let Ok(Question { bucket, key, put, answer }) = asked.recv() {
                    let endpoint = format!("http://{node}").parse().expect("a URL");
                    let kind =
                        OriginKind::S3 { bucket, endpoint: Some(endpoint), region: "us-east-1".into() };
                    let origin = Origin::open(
                        &OriginTarget { kind },
                        &credentials,
                        OriginLimits::default(),
                        &Connections::new(4),
                    );
                    let origin = origin.expect("a client");
                    let (method, body) = match put {
                        None => (::http::Method::GET, None),
                        Some(bytes) => {
                            let (uploader, body) = upload(Some(bytes.len() as u64));
                            tokio::task::spawn_local(async move {
                                let _ = uploader.send(bytes.into()).await;
                                uploader.finish().await;
                            });
                            (::http::Method::PUT, Some(body))
                        }
                    };
                    let request = Forward {
                        method,
                        path: format!("/{key}").into_bytes().into(),
                        query: None,
                        headers: ::http::HeaderMap::new(),
                        body,
                    };
                    let mut relay = origin.forward(request).await.expect("an answer");
                    let mut body = Vec::new();
                    while let Some(piece) = relay.body.chunk().await.expect("a whole body") {
                        body.extend_from_slice(&piece);
                    }
                    let text =
                        |value: &::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
                    let headers =
                        relay.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
                    let _ = answer.send(Response { status: relay.status, headers, body });
                }
            });
        });
        Self { asks }
    }

    fn get(&self, key: &str) -> Response {
        self.get_of("data", key)
    }

    fn get_of(&self, bucket: &str, key: &str) -> Response {
        self.ask(bucket, key, None)
    }

    fn put(&self, key: &str, body: Vec<u8>) -> Response {
        self.ask("data", key, Some(body))
    }

    fn ask(&self, bucket: &str, key: &str, put: Option<Vec<u8>>) -> Response {
        let (answer, answered) = mpsc::channel();
        let question = Question { bucket: bucket.into(), key: key.into(), put, answer };
        self.asks.send(question).expect("the client's thread");
        answered.recv().expect("an answer")
    }
}

fn key(number: usize) -> String {
    format!("train/{number:05}")
}

fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(bytes).collect()
}

#[track_caller]
fn must_be(response: &Response, seed: u64, bytes: usize) {
    assert_eq!(response.status, 200, "{}", response.text());
    assert!(response.body == content(seed, bytes), "wrong bytes: {} of them", response.body.len());
}

#[track_caller]
fn json<T: DeserializeOwned>(response: &Response) -> T {
    serde_json::from_slice(&response.body).unwrap_or_else(|error| panic!("{error}: {}", response.text()))
}

fn serve(origin: S3Origin) -> SocketAddr {
    let (bound, address) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        runtime
            .block_on(origin.serve(any, |address| bound.send(address).expect("the test waits")))
            .expect("served");
    });
    address.recv().expect("an address")
}

/// A port that nobody has, never the same one twice.
fn free_address() -> SocketAddr {
    static TAKEN: std::sync::Mutex<Option<HashSet<SocketAddr>>> = std::sync::Mutex::new(None);
    loop {
        let port = fastrand::u16(10_000..30_000);
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut taken = TAKEN.lock().expect("sane");
        if TcpListener::bind(address).is_ok() && taken.get_or_insert_default().insert(address) {
            return address;
        }
    }
}
