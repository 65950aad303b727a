//! Speaks with the control plane, so that the node is what the fleet wants it to be.
//!
//! ```text
//!   kept state ──► what is served            (at start; the control plane may be away)
//!   register ──► heartbeats, each held back until there is news ──► state
//!                                                                     │
//!      kept on disk ◄── prewarms ◄── served anew ◄── purges ◄── refused if older
//! ```
//!
//! The node asks, and nobody asks it. It runs on the house thread and is on the way of no request: while the control
//! plane is away, the node serves on with the state it has; when that lasts for `fence_after`, `ttl` is treated as
//! `strict`, because a purge may have been missed. A whole state is taken or refused, never a part of it; what of it this
//! node cannot do (an accelerator of a name that its command line has) is left out and said.
#![forbid(unsafe_code)]

mod client;
mod errands;
mod kept;
mod standing;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_control_api::{
    AcceleratorName, AcceleratorSpec, FleetState, Heartbeat, NodeReport, OlderEpoch, Purge, PurgeTarget,
    Registration,
};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::auth::Keys;
use crate::config::{ClientKey, Config, ControlConfig, chain};
use crate::metrics::{ControlOutcome, Counter};
use crate::node::{Drives, Node};
use crate::origin::{Connections, Credentials, Origin, OriginLimits};
use crate::peer::Cluster;
use crate::serve::{Order, Peer, Unopened};
use crate::served::{Accelerator, IndicesUsedUp, Next, Served};

use client::{Client, Failure};
use errands::Errands;
pub use errands::Job;
use kept::Keeper;
pub use kept::KeptError;
pub use standing::Standing;

/// First pause after a failure; doubles up to the second.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often progress is told while a prewarm is under way.
const PROGRESS_PACE: Duration = Duration::from_millis(500);

/// The node's half of the protocol.
#[derive(Debug)]
pub struct Agent {
    said: ControlConfig,
    base: Base,
    standing: Arc<Standing>,
    /// The state in force; its purges and prewarms have been taken.
    held: Option<FleetState>,
    keeper: Keeper,
    /// Whether a worker serves less than it should.
    is_short: bool,
}

/// What the command line and the file say: it stands beside what the control plane says.
#[derive(Debug)]
struct Base {
    accelerators: Vec<AcceleratorSpec>,
    keys: Vec<ClientKey>,
    anonymous: bool,
}

/// What a running node gives its agent.
#[derive(Debug)]
pub struct House {
    /// The node.
    pub node: Arc<Node>,
    /// Its workers.
    pub workers: Box<[Peer]>,
    /// Whose keys sign to origins.
    pub credentials: Credentials,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
    /// Where it listens for HTTPS.
    pub tls_addresses: Vec<SocketAddr>,
}

impl Agent {
    /// Reads the state that was kept. Asks nobody yet.
    ///
    /// # Errors
    /// There is a kept state that cannot be used.
    pub fn new(config: &Config, said: &ControlConfig) -> Result<Self, KeptError> {
        let held = kept::read(&said.state, &said.node)?;
        let standing = Arc::new(Standing::new(said.url.to_string(), said.node.clone()));
        if let Some(held) = &held {
            let mut facts = standing.facts();
            facts.revision = held.revision;
            facts.epoch = held.placement.epoch;
            facts.purges_applied = held.purges_through;
        }
        let base = Base {
            accelerators: config.accelerators.clone(),
            keys: config.keys.clone(),
            anonymous: config.anonymous,
        };
        let keeper = Keeper::new(&said.state, &said.node, held.as_ref());
        Ok(Self { said: said.clone(), base, standing, held, keeper, is_short: false })
    }

    /// How it stands, for the side door.
    pub fn standing(&self) -> Arc<Standing> {
        Arc::clone(&self.standing)
    }

    /// What the node begins with: the kept state, if there is one, beside what the command line says.
    pub fn served(&self, configured: Served) -> Served {
        let Some(held) = &self.held else { return configured };
        let mut wanted = self.base.wanted(held, &configured, &Credentials::anonymous());
        let Next { served, left_out, .. } =
            configured.next(wanted.accelerators, Arc::new(wanted.keys), self.cluster_of(held));
        wanted.refused.extend(left_out.iter().map(ToString::to_string));
        self.standing.facts().refused = wanted.refused;
        served
    }

    /// Lets a node that has cached nothing yet begin with the kept state, if there is one.
    pub fn prepare(&self, node: &Node) {
        if let Some(held) = &self.held {
            node.fence_after(Some(held.fence_after.duration()));
            node.end_revision(held.revision);
        }
    }

    /// Speaks with the control plane for as long as it is polled.
    pub async fn run(mut self, house: House) -> ! {
        let client = Client::new(self.said.url.clone(), self.said.token_file.clone());
        let instance = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let mut errands = Errands::default();
        let mut is_registered = false;
        // Since the last good answer the control plane's store was seen to be an older copy.
        let mut was_older = false;
        let mut pause = PAUSE_MIN;
        loop {
            let asked = Instant::now();
            let answer = if is_registered {
                let wait = self.held.as_ref().map_or(Duration::ZERO, |held| held.wait_max.duration());
                let wait = if errands.are_open() { wait.min(PROGRESS_PACE) } else { wait };
                client.heartbeat(&self.said.node, &self.heartbeat(&house, &errands, &instance), wait).await
            } else {
                client.register(&self.said.node, &self.registration(&house, &instance)).await.map(Some)
            };
            match answer {
                Ok(state) => {
                    is_registered = true;
                    let taken = if let Some(state) = state {
                        self.take(&house, &mut errands, state).await
                    } else {
                        self.take_again(&house).await;
                        Ok(())
                    };
                    match taken {
                        Ok(()) => self.note_contact(&house, asked),
                        Err(older) => self.note_problem(&house, ControlOutcome::Older, &older),
                    }
                    was_older = taken.is_err();
                    pause = if taken.is_ok() { PAUSE_MIN } else { PAUSE_MAX };
                    if taken.is_ok() {
                        continue;
                    }
                }
                Err(failure) => {
                    // Whoever removed this node may want it back under other terms: it introduces itself again.
                    is_registered &= failure.code() != "unknown_node";
                    // A copy of the store that was brought forward knows this process only if it is older than the
                    // copy. At any other time the word means what it says, and two processes must not take turns.
                    is_registered &= !(was_older && failure.code() == "node_replaced");
                    was_older |= failure.code() == "control_is_older";
                    self.note_problem(&house, outcome_of(&failure), &failure);
                    self.take_again(&house).await;
                }
            }
            tokio::time::sleep(pause.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// The other nodes, once the control plane says what nodes show each other.
    fn cluster_of(&self, state: &FleetState) -> Option<Arc<Cluster>> {
        let token = state.cluster_token.clone()?;
        Some(Arc::new(Cluster::new(self.said.node.clone(), token, state.placement.clone())))
    }

    fn registration(&self, house: &House, instance: &str) -> Registration {
        let held = self.held.as_ref();
        Registration {
            instance: instance.to_owned(),
            zone: self.said.zone.clone(),
            weight: self.said.weight,
            listen: [("http", &house.addresses), ("https", &house.tls_addresses)]
                .into_iter()
                .flat_map(|(scheme, all)| all.iter().map(move |address| format!("{scheme}://{address}")))
                .collect(),
            peer: self.said.advertise.clone().or_else(|| peer_url(&house.addresses)),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // Whoever began with a kept state may have cached bytes under it since.
            purges_applied: held.map(|held| held.purges_through),
            epoch: held.map(|held| held.placement.epoch).unwrap_or_default(),
        }
    }

    fn heartbeat(&self, house: &House, errands: &Errands, instance: &str) -> Heartbeat {
        let held = self.held.as_ref();
        let (arena, table) = (house.node.arena.status(), house.node.table.status());
        let drives = match &house.node.drives {
            Drives::Store(store) => store.status().drives,
            Drives::None | Drives::Scripted(_) => Vec::new(),
        };
        let used = |drive: &crate::store::DriveStatus| {
            drive.segments_opened.min(u64::from(drive.geometry.segments()))
                * u64::from(drive.geometry.segment_bytes())
        };
        Heartbeat {
            instance: instance.to_owned(),
            revision: held.map_or(0, |held| held.revision),
            epoch: held.map(|held| held.placement.epoch).unwrap_or_default(),
            purges_applied: held.map_or(0, |held| held.purges_through),
            serves: house.node.served().all().filter_map(|(_, bound)| bound.name.parse().ok()).collect(),
            report: NodeReport {
                ready: !house.node.is_draining(),
                objects: table.objects,
                connections: house.node.connections(),
                ram_bytes: arena.ram_bytes,
                drive_bytes: drives.iter().map(used).sum(),
                drive_capacity_bytes: drives.iter().map(|drive| drive.geometry.capacity()).sum(),
            },
            prewarms: errands.progress(),
        }
    }

    /// Takes a whole state, unless it is older than the one held. Its purges come first: nothing that they wait for may
    /// keep old bytes in the cache.
    async fn take(&mut self, house: &House, errands: &mut Errands, state: FleetState) -> Result<(), Older> {
        check_age(&state, self.held.as_ref())?;
        let applied = self.held.as_ref().map(|held| held.purges_through);
        house.node.begin_revision(state.revision);
        purge(house, applied, &state);
        self.serve(house, &state).await;
        house.node.end_revision(state.revision);
        house.node.fence_after(Some(state.fence_after.duration()));
        errands.take(&house.node, &house.workers, &state.prewarms);
        self.note_taken(&state);
        let held = self.held.insert(FleetState { purges: Vec::new(), prewarms: Vec::new(), ..state });
        self.keeper.keep(held).await;
        Ok(())
    }

    /// Tries again what of the state in force could not be done: what keeps an origin from being opened, or a file from
    /// being written, may pass.
    async fn take_again(&mut self, house: &House) {
        let Some(held) = self.held.take() else { return };
        let is_refused = !self.standing.facts().refused.is_empty();
        if is_refused || self.is_short {
            self.serve(house, &held).await;
        }
        self.keeper.keep(&held).await;
        self.held = Some(held);
    }

    /// Serves what a state wants, as far as it can be, and says what cannot.
    async fn serve(&mut self, house: &House, state: &FleetState) {
        let Wanted { accelerators, keys, mut refused } =
            self.base.wanted(state, &house.node.served(), &house.credentials);
        let Published { left_out, unopened } =
            publish(house, accelerators, keys, self.cluster_of(state), self.is_short).await;
        self.is_short = !unopened.is_empty();
        refused.extend(left_out.iter().map(ToString::to_string));
        for Unopened { accelerator, error } in unopened {
            let said =
                format!("accelerator `{accelerator}`: a worker cannot open its origin: {}", chain(&error));
            // All workers may say the same.
            if !refused.contains(&said) {
                refused.push(said);
            }
        }
        let mut facts = self.standing.facts();
        for refused in refused.iter().filter(|refused| !facts.refused.contains(refused)) {
            tracing::error!("{refused}");
        }
        facts.refused = refused;
    }

    fn note_taken(&self, state: &FleetState) {
        let mut facts = self.standing.facts();
        if facts.revision != state.revision {
            tracing::info!(revision = state.revision, epoch = %state.placement.epoch, "state taken");
        }
        facts.revision = state.revision;
        facts.epoch = state.placement.epoch;
        facts.purges_applied = state.purges_through;
    }

    fn note_contact(&self, house: &House, asked: Instant) {
        house.node.metrics.bump(Counter::ControlAnswers(ControlOutcome::Good), 1);
        // What was missed since the question was put is not in the answer.
        house.node.heard(asked);
        let mut facts = self.standing.facts();
        let trouble = self.keeper.trouble();
        if facts.contact.is_none() || facts.problem != trouble {
            tracing::info!(url = %self.said.url, "in contact with the control plane");
        }
        facts.contact = Some(Instant::now());
        trouble.clone_into(&mut facts.problem);
    }

    /// Says it once for as long as it is the same.
    fn note_problem(&self, house: &House, outcome: ControlOutcome, problem: &dyn std::fmt::Display) {
        house.node.metrics.bump(Counter::ControlAnswers(outcome), 1);
        let problem = problem.to_string();
        let mut facts = self.standing.facts();
        if facts.problem != problem {
            tracing::error!("{problem}");
            facts.problem = problem;
        }
    }
}

/// A state that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Older {
    #[error(
        "the control plane offers revision {offered}, and this node holds {held}: it is refused, because the control \
         plane's store is an older copy; bring back the newer store, or go on from this one: `forebay-control placement \
         advance --past {held}`"
    )]
    Revision { offered: u64, held: u64 },
    #[error("{0}; `forebay-control placement advance --past {past}` makes the control plane go on above it", past = .0.held)]
    Epoch(OlderEpoch),
}

fn check_age(state: &FleetState, held: Option<&FleetState>) -> Result<(), Older> {
    let Some(held) = held else { return Ok(()) };
    state.placement.supersedes(held.placement.epoch).map_err(Older::Epoch)?;
    if state.revision < held.revision {
        return Err(Older::Revision { offered: state.revision, held: held.revision });
    }
    Ok(())
}

fn outcome_of(failure: &Failure) -> ControlOutcome {
    match failure {
        Failure::Unreachable { .. } => ControlOutcome::Unreachable,
        Failure::Refused(problem) if problem.code == "control_is_older" => ControlOutcome::Older,
        Failure::Refused(_) | Failure::Token { .. } => ControlOutcome::Refused,
        Failure::Strange { .. } => ControlOutcome::Strange,
    }
}

/// Where other nodes reach this one, if its first address says it.
fn peer_url(addresses: &[SocketAddr]) -> Option<String> {
    let address = addresses.iter().find(|address| !address.ip().is_unspecified())?;
    Some(format!("http://{address}"))
}

/// Forgets what purges that were missed speak of.
fn purge(house: &House, applied: Option<u64>, state: &FleetState) {
    let node = &house.node;
    let served = node.served();
    // Without a state before, nothing of the control plane's accelerators has been cached.
    let applied = applied.unwrap_or(state.purges_after);
    if applied < state.purges_after {
        tracing::warn!(
            applied,
            after = state.purges_after,
            "more purges were missed than are remembered: forgetting everything"
        );
        for (index, _) in served.all() {
            node.table.forget_all(index);
        }
    }
    for purge in state.purges.iter().filter(|purge| purge.sequence > applied) {
        let Some(index) = index_of(&served, &purge.accelerator) else { continue };
        node.metrics.bump(Counter::PurgesApplied, 1);
        apply(node, index, purge);
    }
}

fn index_of(served: &Served, name: &AcceleratorName) -> Option<u16> {
    served.find(name.as_str()).map(|(index, _)| index)
}

fn apply(node: &Node, index: u16, purge: &Purge) {
    match purge.target() {
        Ok(PurgeTarget::Key(key)) => {
            node.table.forget(index, key.as_bytes());
        }
        Ok(PurgeTarget::Prefix(prefix)) => node.table.forget_prefix(index, prefix.as_bytes()),
        // Too much forgotten costs time, too little serves old bytes.
        Err(_) => node.table.forget_all(index),
    }
    tracing::info!(sequence = purge.sequence, accelerator = %purge.accelerator, "purged");
}

/// What is to be served.
struct Wanted {
    accelerators: Vec<Accelerator>,
    keys: Keys,
    refused: Vec<String>,
}

impl Base {
    /// What the command line says, and beside it what the control plane says; where both say a name, the command line's
    /// holds and the other is refused. What is served already need not be tried.
    fn wanted(&self, state: &FleetState, served: &Served, credentials: &Credentials) -> Wanted {
        let mut refused = Vec::new();
        let mut accelerators: Vec<Accelerator> = Vec::new();
        for spec in &self.accelerators {
            accelerators.push(Accelerator::of(spec).expect("the node has begun with it"));
        }
        for offered in &state.accelerators {
            let name = &offered.name;
            if self.accelerators.iter().any(|spec| spec.name == *name) {
                refused.push(format!(
                    "accelerator `{name}` of the control plane is not served: this node's command line or file has one of \
                     that name, which holds; take it away there, or give one of them another name"
                ));
                continue;
            }
            let policy = offered.policy.as_ref();
            let policy = policy.and_then(|name| state.policies.iter().find(|policy| policy.name == *name));
            let made = offered.spec(policy).map_err(anyhow::Error::from).and_then(|spec| {
                let accelerator = Accelerator::of(&spec)?;
                let held = served.find(name.as_str());
                if !held.is_some_and(|(_, held)| held.has_objects_of(&accelerator)) {
                    // Connects to nothing; finds what no origin could be opened with.
                    let (limits, one) = (OriginLimits::default(), Connections::new(1));
                    Origin::open(&accelerator.target, credentials, limits, &one)?;
                }
                Ok(accelerator)
            });
            match made {
                Ok(accelerator) => accelerators.push(accelerator),
                Err(error) => {
                    refused
                        .push(format!("accelerator `{name}` of the control plane is not served: {error:#}"));
                }
            }
        }
        let mut keys = Keys::new(self.anonymous);
        for key in &self.keys {
            keys.add(&key.access_key, key.secret_key.reveal()).expect("the node has begun with it");
        }
        for key in &state.keys {
            let held = self.keys.iter().find(|held| *held.access_key == *key.access_key.as_str());
            match held {
                Some(held) if held.secret_key.reveal() == key.secret.reveal() => {}
                Some(_) => refused.push(format!(
                    "key `{}` of the control plane is not taken: this node's file or environment has one of that name \
                     with another secret, which holds; take it away there, or give the key another name",
                    key.access_key
                )),
                None => {
                    if let Err(error) = keys.add(key.access_key.as_str(), key.secret.reveal()) {
                        refused.push(format!("a key of the control plane is not taken: {error}"));
                    }
                }
            }
        }
        Wanted { accelerators, keys, refused }
    }
}

/// What is not served of what was published.
#[derive(Default)]
struct Published {
    left_out: Vec<IndicesUsedUp>,
    unopened: Vec<Unopened>,
}

/// Gives all workers what is served from now on, and forgets what is served no more once none of them serves it.
/// `is_short`: also if it is the same as before.
async fn publish(
    house: &House,
    accelerators: Vec<Accelerator>,
    keys: Keys,
    cluster: Option<Arc<Cluster>>,
    is_short: bool,
) -> Published {
    let held = house.node.served();
    // The same keys are the same memory: what workers have derived from them stays good.
    let keys = if *held.keys == keys { Arc::clone(&held.keys) } else { Arc::new(keys) };
    let Next { served, gone, left_out } = held.next(accelerators, keys, cluster);
    if served == *held && !is_short {
        return Published { left_out, ..Published::default() };
    }
    let served = Arc::new(served);
    house.node.serve(Arc::clone(&served));
    let (done, mut all_done) = mpsc::unbounded_channel();
    for worker in &house.workers {
        // A worker that is gone serves nothing.
        let _ = worker.orders.send(Order::Serve(Arc::clone(&served), done.clone()));
    }
    drop(done);
    let mut unopened = Vec::new();
    while let Some(one) = all_done.recv().await {
        unopened.push(one);
    }
    for index in gone {
        house.node.table.forget_all(index);
    }
    Published { left_out, unopened }
}

#[cfg(test)]
mod tests {
    use forebay_control_api::{AccessKey, Epoch, Placement};

    use super::*;

    fn state(revision: u64, epoch: u64) -> FleetState {
        let placement = Placement { epoch: Epoch(epoch), ..Placement::default() };
        FleetState { placement, ..kept::tests::state(revision) }
    }

    /// What a base wants beside a node that serves nothing yet.
    fn wanted_of(state: &FleetState) -> Wanted {
        base().wanted(state, &Served::new([], Keys::new(false)), &Credentials::anonymous())
    }

    #[test]
    fn a_node_keeps_epoch_9_when_offered_8() {
        let held = state(12, 9);
        assert_eq!(check_age(&state(12, 9), Some(&held)), Ok(()));
        assert_eq!(check_age(&state(13, 9), Some(&held)), Ok(()));
        assert_eq!(check_age(&state(1, 1), None), Ok(()));
        let older = check_age(&state(20, 8), Some(&held)).expect_err("an older placement").to_string();
        assert!(older.contains("placement 8 is older than 9") && older.contains("--past 9"), "{older}");
        let older = check_age(&state(11, 9), Some(&held)).expect_err("an older state").to_string();
        assert!(older.contains("--past 12"), "{older}");
    }

    fn base() -> Base {
        Base {
            accelerators: vec!["mine=s3://bucket".parse().expect("a spec")],
            keys: vec![ClientKey::new("AKMINE", "my-own-secret").expect("a key")],
            anonymous: false,
        }
    }

    fn offered(json: &str) -> forebay_control_api::Accelerator {
        serde_json::from_str(json).expect("an accelerator")
    }

    fn key(name: &str, secret: &str) -> AccessKey {
        AccessKey {
            access_key: name.parse().expect("a name"),
            secret: secret.parse().expect("a secret"),
            note: String::new(),
            added: String::new(),
        }
    }

    #[test]
    fn the_command_line_holds_where_both_say_a_name() {
        let mut state = state(1, 1);
        state.accelerators = vec![
            offered(r#"{"name":"mine","origin":"s3://other"}"#),
            offered(r#"{"name":"theirs","origin":"s3://theirs","policy":"p"}"#),
        ];
        state.policies = vec![
            serde_json::from_str(r#"{"name":"p","rules":[{"match":"**","extent":"64KiB"}]}"#).expect("one"),
        ];
        state.keys = vec![key("AKMINE", "another-secret"), key("AKTHEIRS", "their-secret")];
        let wanted = wanted_of(&state);
        let names: Vec<_> = wanted.accelerators.iter().map(|it| (&*it.name, it.extent_bytes)).collect();
        assert_eq!(names, [("mine", 1 << 20), ("theirs", 64 << 10)]);
        assert_eq!(wanted.keys.access_keys().collect::<Vec<_>>(), ["AKMINE", "AKTHEIRS"]);
        assert_eq!(wanted.refused.len(), 2, "{:?}", wanted.refused);
        assert!(
            wanted.refused.iter().all(|words| words.contains("take it away there")),
            "{:?}",
            wanted.refused
        );
        assert!(!format!("{:?}", wanted.refused).contains("secret-"), "{:?}", wanted.refused);

        // The same key from both sides is no quarrel.
        state.accelerators.clear();
        state.keys = vec![key("AKMINE", "my-own-secret")];
        assert!(wanted_of(&state).refused.is_empty());
    }

    #[test]
    fn an_accelerator_that_cannot_be_is_left_out_and_said() {
        let mut state = state(1, 1);
        state.accelerators = vec![
            offered(r#"{"name":"odd","origin":"s3://bucket","endpoint":"http://u:p@host"}"#),
            offered(r#"{"name":"good","origin":"http://host/tree"}"#),
        ];
        let wanted = wanted_of(&state);
        assert_eq!(wanted.accelerators.len(), 2);
        assert!(wanted.refused[0].contains("`odd`"), "{:?}", wanted.refused);
    }
}
