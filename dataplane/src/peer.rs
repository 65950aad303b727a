//! Another node's copy: who is asked for it, how, and what is believed of the answer.
//!
//! ```text
//!   node-b                                       node-a, which owns the group
//!     GET /data/key  Range, If-Match        ->
//!       x-forebay-cluster-token: ...               shows that a node asks; in the place of a signature
//!       x-forebay-peer: IDENTITY                   which store `data` is: a name may mean two on two nodes;
//!                                                  whoever is asked so asks the origin and no third node
//!       x-forebay-revision: N                      the state of the control plane that the asker has taken
//!                                           <-   bytes, 421 if the name is not that store here, or 503 while node-a
//!                                                has not taken that state: it may still hold what was purged
//!     POST /data/key  x-forebay-forget: object|all
//!                                           <-   204 once it is forgotten
//! ```
//!
//! An owner is a shorter way to the bytes, never the only one: it has a short deadline, and whatever it says but bytes of
//! the right version sends the asker to the origin. What it sent is kept in memory and not written to a drive, since the
//! owner has it on its own. A node that just failed is left alone for a moment.
//!
//! What is written through a node is forgotten on all others before the write is acknowledged, as far as they are
//! reachable; one that is not believes what it has for as long as its freshness says. Where there are more than two nodes
//! they are told twice: one that has forgotten may get the old bytes again from an owner that has not, but an owner asks
//! the origin only, so after the first round none has them to give.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_control_api::{AcceleratorName, GROUP_BYTES, KeySecret, Member, NodeId, Placement, group_of};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

use crate::engine::task;
use crate::http1::RequestHead;
use crate::metrics::{Counter, ForgetOutcome, OriginAsk, PeerOutcome};
use crate::origin::{Answer, Ask, Connections, Forward, Origin, OriginError, OriginLimits, OriginTarget};
use crate::range::Grid;
use crate::serve::Worker;
use crate::served::Accelerator;

/// Shows that a node asks. Never sent to anybody but members of the placement.
const TOKEN: &str = "x-forebay-cluster-token";
/// Which store is meant; its presence says that this is the second node on the way.
const PEER: &str = "x-forebay-peer";
/// The state of the control plane that the asker has taken, or is taking.
const REVISION: &str = "x-forebay-revision";
/// What is to be forgotten.
const FORGET: &str = "x-forebay-forget";
/// What all of these begin with: no such header goes on to an origin.
pub const OURS: &str = "x-forebay-";

/// A node that could not be reached is not asked, nor waited for, for so long, one that does not serve the store for so long.
const REST_OF_FAILED: Duration = Duration::from_secs(1);
const REST_OF_STRANGER: Duration = Duration::from_secs(30);
/// Objects of one write that are named to the others one by one; of more, they forget the whole bucket.
const NAMED_MAX: usize = 16;

/// The bounds of a question to another node: in one zone a round trip is below a millisecond, so who has not begun to
/// answer by then is slower than the origin.
const LIMITS: OriginLimits = OriginLimits {
    connect: Duration::from_millis(250),
    first_byte: Duration::from_secs(2),
    idle: Duration::from_secs(5),
    queue: Duration::from_millis(250),
    keep_alive: Duration::from_secs(45),
};

/// The fleet as one of its nodes sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    own: NodeId,
    token: KeySecret,
    placement: Placement,
}

/// Who may still be asked for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The owner, then the origin.
    Fleet,
    /// The origin alone: another node asks, or the owner has failed.
    Origin,
}

/// Who sends a request, by its headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A client, who has to sign.
    Client,
    /// A node of this fleet, and which store it means.
    Node {
        /// The store.
        identity: Box<[u8]>,
        /// Whoever answers must have taken this state of the control plane.
        revision: u64,
        /// What it wants to be forgotten, if that is what it wants.
        forget: Option<Forget>,
    },
    /// Somebody who shows a token that is not this fleet's.
    Stranger,
}

/// How much is to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forget {
    /// The object of the path.
    Object,
    /// Every object of the store.
    All,
}

impl Cluster {
    /// The fleet as `own` sees it. `token` is what its nodes show each other.
    pub fn new(own: NodeId, token: KeySecret, placement: Placement) -> Self {
        Self { own, token, placement }
    }

    /// Whether there is another owner than this node.
    pub fn is_shared(&self) -> bool {
        self.placement.members.iter().any(|member| member.id != self.own)
    }

    /// Those who own the group of an object's byte at `offset` and can be asked, the first one first; none if this node
    /// is one of them.
    pub fn owners(&self, accelerator: &str, key: &[u8], offset: u64) -> Vec<&Member> {
        let Ok(name) = accelerator.parse::<AcceleratorName>() else { return Vec::new() };
        let owners = self.placement.owners(&name, key, group_of(offset));
        if owners.iter().any(|owner| owner.id == self.own) {
            return Vec::new();
        }
        owners.into_iter().filter(|owner| owner.peer.is_some()).collect()
    }

    /// Every other member.
    pub fn others(&self) -> impl Iterator<Item = &Member> {
        self.placement.members.iter().filter(|member| member.id != self.own)
    }

    fn knows(&self, token: &[u8]) -> bool {
        token.ct_eq(self.token.reveal().as_bytes()).into()
    }
}

/// Who sends a request.
pub fn caller(head: &RequestHead, cluster: Option<&Cluster>) -> Caller {
    let Some(token) = head.header(TOKEN) else { return Caller::Client };
    match (cluster, head.header(PEER)) {
        (Some(cluster), Some(identity)) if cluster.knows(token) => Caller::Node {
            identity: identity.into(),
            // One that cannot be read is later than any.
            revision: head.header(REVISION).map_or(u64::MAX, revision),
            forget: head
                .header(FORGET)
                .map(|what| if what == b"object" { Forget::Object } else { Forget::All }),
        },
        _ => Caller::Stranger,
    }
}

fn revision(text: &[u8]) -> u64 {
    str::from_utf8(text).ok().and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}

/// A store's name among nodes. A hash, since a name on the wire is nobody's business.
pub fn identity(target: &OriginTarget) -> String {
    hex::encode(&Sha256::digest(target.kind.to_string())[..16])
}

/// The last extent up to which one request may go from `first`: with others in the fleet not beyond the group, since the
/// next has another owner.
pub fn end_of_run(worker: &Worker, grid: Grid, first: u32, last: u32) -> u32 {
    let border = border(worker, u64::from(first) * u64::from(grid.extent_bytes()));
    // Objects end long before that.
    if border == u64::MAX { last } else { last.min(grid.extent_of(border - 1)) }
}

/// Whether there are other nodes.
pub fn is_shared(worker: &Worker) -> bool {
    worker.served().cluster.as_deref().is_some_and(Cluster::is_shared)
}

/// Whether the group of an object's byte at `offset` is owned by another node, which can be asked.
pub fn has_other_owner(worker: &Worker, accelerator: &str, key: &[u8], offset: u64) -> bool {
    let here = worker.served();
    here.cluster.as_deref().is_some_and(|cluster| !cluster.owners(accelerator, key, offset).is_empty())
}

/// Where a request that begins at `start` has to end, in bytes.
pub fn border(worker: &Worker, start: u64) -> u64 {
    if is_shared(worker) { (group_of(start) + 1).saturating_mul(GROUP_BYTES) } else { u64::MAX }
}

/// An answer, and whom it is from.
#[derive(Debug)]
pub struct Got {
    /// The answer.
    pub answer: Answer,
    /// The age of a peer's belief in it; `None` if it is the origin's own.
    pub peer: Option<Duration>,
}

/// Asks the owner of the group at `offset` if that is another node and within `reach`, else, or if that comes to nothing,
/// the origin. Of an accelerator that was removed only the origin is asked.
///
/// # Errors
/// The origin's.
pub async fn get(
    worker: &Worker,
    accelerator: Option<&Accelerator>,
    origin: &Origin,
    key: &[u8],
    ask: &Ask,
    offset: u64,
    reach: Reach,
) -> Result<Got, OriginError> {
    if reach == Reach::Fleet
        && let Some(accelerator) = accelerator
        && let Some(got) = ask_owner(worker, accelerator, key, ask, offset).await
    {
        return Ok(got);
    }
    worker.counters.bump(Counter::OriginRequests(OriginAsk::Get), 1);
    let answer = origin.get(key, ask).await?;
    Ok(Got { answer, peer: None })
}

async fn ask_owner(
    worker: &Worker,
    accelerator: &Accelerator,
    key: &[u8],
    ask: &Ask,
    offset: u64,
) -> Option<Got> {
    let here = worker.served();
    let cluster = here.cluster.as_deref()?;
    for owner in cluster.owners(&accelerator.name, key, offset) {
        let Some(peer) = here.peers.find(owner, &accelerator.name, Instant::now()) else { continue };
        let headers = headers(worker, cluster, &accelerator.target, None);
        let path = path(&accelerator.name, key);
        let (outcome, rest) = match peer.get_of_peer(&path, ask, &headers).await {
            Ok((answer @ (Answer::Bytes { .. } | Answer::Empty { .. }), age)) => {
                worker.counters.bump(Counter::PeerRequests(PeerOutcome::Good), 1);
                return Some(Got { answer, peer: Some(age) });
            }
            Ok((Answer::Other(relay), _)) if relay.status == 421 => {
                (PeerOutcome::Stranger, Some((Some(&*accelerator.name), REST_OF_STRANGER)))
            }
            // It may be right, and only the origin can say so.
            Ok(_) => (PeerOutcome::Other, None),
            Err(error @ OriginError::TimedOut { .. }) => {
                tracing::debug!(%error, owner = %owner.id, "a node is slow");
                (PeerOutcome::Slow, Some((None, REST_OF_FAILED)))
            }
            Err(error) => {
                tracing::debug!(%error, owner = %owner.id, "a node cannot be asked");
                (PeerOutcome::Failed, Some((None, REST_OF_FAILED)))
            }
        };
        worker.counters.bump(Counter::PeerRequests(outcome), 1);
        if let Some((accelerator, rest)) = rest {
            here.peers.rest(owner, accelerator, Instant::now() + rest);
        }
    }
    None
}

/// What a write changed, for those who have to forget it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// These objects.
    Objects(Vec<Box<[u8]>>),
    /// Nobody knows which.
    Anything,
}

/// Has every other node of the fleet forget what was changed at a store; returns when each has, or could not be reached.
pub async fn forget(worker: &Rc<Worker>, target: &OriginTarget, changed: &Changed) {
    let here = worker.served();
    let Some(cluster) = here.cluster.as_deref().filter(|cluster| cluster.is_shared()) else { return };
    // Any of its names does: who is told forgets by the store.
    let Some((_, accelerator)) = here.all().find(|(_, accelerator)| accelerator.target == *target) else {
        return;
    };
    let (what, keys): (_, Vec<&[u8]>) = match changed {
        Changed::Objects(keys) if keys.len() <= NAMED_MAX => {
            ("object", keys.iter().map(|key| &**key).collect())
        }
        Changed::Objects(_) | Changed::Anything => ("all", vec![b""]),
    };
    let rounds = cluster.others().count().min(2);
    for _ in 0..rounds {
        tell(worker, cluster, accelerator, what, &keys).await;
    }
}

async fn tell(
    worker: &Rc<Worker>,
    cluster: &Cluster,
    accelerator: &Accelerator,
    what: &'static str,
    keys: &[&[u8]],
) {
    let here = worker.served();
    let mut telling = tokio::task::JoinSet::new();
    for member in cluster.others() {
        let Some(peer) = here.peers.open(member) else { continue };
        // Who was out of reach a moment ago is told all the same, since it may hold what was changed; but nobody waits.
        let is_away = here.peers.is_away(member, Instant::now());
        for key in keys {
            let request = Forward {
                method: Method::POST,
                path: format!("/{}", crate::origin::encoded(&path(&accelerator.name, key)))
                    .into_bytes()
                    .into(),
                query: None,
                headers: headers(worker, cluster, &accelerator.target, Some(what)),
                body: None,
            };
            let one = tell_one(Rc::clone(worker), Rc::clone(&peer), member.clone(), request);
            if is_away {
                task::spawn(one);
            } else {
                telling.spawn_local(task::counted(one));
            }
        }
    }
    while telling.join_next().await.is_some() {}
}

async fn tell_one(worker: Rc<Worker>, peer: Rc<Origin>, member: Member, request: Forward) {
    let outcome = match peer.forward(request).await {
        // One that answers 421 has no such store, and so nothing of it.
        Ok(relay) if matches!(relay.status, 204 | 421) => ForgetOutcome::Good,
        Ok(relay) => {
            tracing::warn!(node = %member.id, status = relay.status, "a node did not forget what was written");
            ForgetOutcome::Failed
        }
        Err(error) => {
            tracing::warn!(%error, node = %member.id, "a node was not told what was written");
            worker.served().peers.away(&member, Instant::now() + REST_OF_FAILED);
            ForgetOutcome::Failed
        }
    };
    worker.counters.bump(Counter::PeerForgets(outcome), 1);
}

fn headers(
    worker: &Worker,
    cluster: &Cluster,
    target: &OriginTarget,
    forget: Option<&'static str>,
) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut token = HeaderValue::from_str(cluster.token.reveal()).expect("a token has visible characters");
    token.set_sensitive(true);
    headers.insert(HeaderName::from_static(TOKEN), token);
    let identity = HeaderValue::from_str(&identity(target)).expect("a hash is hexadecimal");
    headers.insert(HeaderName::from_static(PEER), identity);
    headers.insert(HeaderName::from_static(REVISION), worker.node.revision_begun().into());
    if let Some(forget) = forget {
        headers.insert(HeaderName::from_static(FORGET), HeaderValue::from_static(forget));
    }
    headers
}

/// On another node an object's path begins with the name of its accelerator.
fn path(accelerator: &str, key: &[u8]) -> Vec<u8> {
    if key.is_empty() { accelerator.into() } else { [accelerator.as_bytes(), b"/", key].concat() }
}

/// A member, or a member where one accelerator is concerned.
type About = (NodeId, Option<Box<str>>);

/// A member's address, and the connections to it unless that cannot be used.
type Opened = (Box<str>, Option<Rc<Origin>>);

/// One worker's connections to the other nodes, and whom it leaves alone for a while. It outlives a placement: who stays
/// where it was keeps its connections.
#[derive(Debug)]
pub struct Peers {
    connections: Connections,
    open: RefCell<HashMap<NodeId, Opened>>,
    /// At most one for each member, and one for each member and accelerator.
    resting: RefCell<HashMap<About, Instant>>,
    /// Until when nobody waits for a member to have been told something. Apart from those who rest: one that is slow to
    /// bring bytes can be told all the same, and has to confirm.
    away: RefCell<HashMap<NodeId, Instant>>,
}

impl Peers {
    /// Connections to nobody yet; some of `connections`.
    pub fn new(connections: Connections) -> Self {
        Self { connections, open: RefCell::default(), resting: RefCell::default(), away: RefCell::default() }
    }

    /// The fleet is now this: forgets who is no longer in it, and who did not serve an accelerator, since it may now.
    pub fn renew(&self, cluster: Option<&Cluster>) {
        let is_member =
            |id: &NodeId| cluster.is_some_and(|fleet| fleet.others().any(|member| member.id == *id));
        self.open.borrow_mut().retain(|id, _| is_member(id));
        self.away.borrow_mut().retain(|id, _| is_member(id));
        self.resting.borrow_mut().retain(|(id, accelerator), _| accelerator.is_none() && is_member(id));
    }

    /// How to ask a member about an accelerator, unless it rests.
    fn find(&self, member: &Member, accelerator: &str, now: Instant) -> Option<Rc<Origin>> {
        let resting = self.resting.borrow();
        let rests = |about: &About| resting.get(about).is_some_and(|until| now < *until);
        if rests(&(member.id.clone(), None)) || rests(&(member.id.clone(), Some(accelerator.into()))) {
            return None;
        }
        drop(resting);
        self.open(member)
    }

    /// Whether a member could not be told something a moment ago.
    fn is_away(&self, member: &Member, now: Instant) -> bool {
        self.away.borrow().get(&member.id).is_some_and(|until| now < *until)
    }

    fn away(&self, member: &Member, until: Instant) {
        self.away.borrow_mut().insert(member.id.clone(), until);
    }

    fn open(&self, member: &Member) -> Option<Rc<Origin>> {
        let base = member.peer.as_deref()?;
        let mut open = self.open.borrow_mut();
        if let Some((held, opened)) = open.get(&member.id)
            && **held == *base
        {
            return opened.clone();
        }
        let opened = match Origin::open_peer(base, LIMITS, &self.connections) {
            Ok(peer) => Some(Rc::new(peer)),
            Err(error) => {
                tracing::error!(%error, node = %member.id, base, "a node's address cannot be used: its --advertise");
                None
            }
        };
        open.insert(member.id.clone(), (base.into(), opened.clone()));
        opened
    }

    fn rest(&self, member: &Member, accelerator: Option<&str>, until: Instant) {
        self.resting.borrow_mut().insert((member.id.clone(), accelerator.map(Into::into)), until);
    }
}

#[cfg(test)]
mod tests {
    use forebay_control_api::Epoch;

    use super::*;
    use crate::http1::{HeadLimits, HeadProgress, parse_head};
    use crate::origin::OriginKind;

    fn cluster(members: &[(&str, Option<&str>)]) -> Cluster {
        let members = members
            .iter()
            .map(|(id, peer)| Member {
                id: id.parse().expect("an id"),
                zone: "zone".parse().expect("a zone"),
                weight: 1,
                peer: peer.map(Into::into),
            })
            .collect();
        let placement = Placement { epoch: Epoch(1), members, ..Placement::default() };
        Cluster::new("a".parse().expect("an id"), "cluster-token".parse().expect("a token"), placement)
    }

    fn request(headers: &str) -> RequestHead {
        let text = format!("GET /b/k HTTP/1.1\r\nHost: h\r\n{headers}\r\n");
        match parse_head(text.as_bytes(), &HeadLimits::default()) {
            Ok(HeadProgress::Whole { head, .. }) => head,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn who_owns_a_group_asks_nobody() {
        let two = cluster(&[("a", Some("http://a")), ("b", Some("http://b"))]);
        let (mut own, mut others) = (0, 0);
        for number in 0..1000 {
            match two.owners("data", format!("key-{number}").as_bytes(), 0)[..] {
                [] => own += 1,
                [owner] if owner.id.as_str() == "b" => others += 1,
                ref odd => panic!("{odd:?}"),
            }
        }
        assert!(own > 400 && others > 400, "{own} {others}");
        let alone = cluster(&[("a", Some("http://a"))]);
        assert!(alone.owners("data", b"k", 0).is_empty() && !alone.is_shared());
        // One without an address cannot be asked; a node that owns nothing asks whoever does.
        assert!(cluster(&[("b", None)]).owners("data", b"k", 0).is_empty());
        assert_eq!(cluster(&[("b", Some("http://b"))]).owners("data", b"k", 0).len(), 1);
    }

    #[test]
    fn the_groups_of_a_large_object_have_owners_of_their_own() {
        let two = cluster(&[("a", Some("http://a")), ("b", Some("http://b"))]);
        let is_own = |offset| two.owners("data", b"large", offset).is_empty();
        let groups: Vec<bool> = (0..64).map(|group| is_own(group * GROUP_BYTES)).collect();
        assert!(groups.contains(&true) && groups.contains(&false));
        for (group, own) in (0..64).zip(groups) {
            assert_eq!(is_own((group + 1) * GROUP_BYTES - 1), own, "one group has one owner");
        }
    }

    #[test]
    fn only_the_fleets_token_makes_a_node() {
        let two = cluster(&[("a", None), ("b", None)]);
        let said = |headers: &str, cluster| caller(&request(headers), cluster);
        assert_eq!(said("", Some(&two)), Caller::Client);
        assert_eq!(said("x-forebay-peer: id\r\n", Some(&two)), Caller::Client);
        let good =
            "x-forebay-cluster-token: cluster-token\r\nx-forebay-peer: id\r\nx-forebay-revision: 7\r\n";
        let node = |forget| Caller::Node { identity: (*b"id").into(), revision: 7, forget };
        assert_eq!(said(good, Some(&two)), node(None));
        assert_eq!(
            said(&format!("{good}x-forebay-forget: object\r\n"), Some(&two)),
            node(Some(Forget::Object))
        );
        assert_eq!(said(&format!("{good}x-forebay-forget: all\r\n"), Some(&two)), node(Some(Forget::All)));
        for odd in ["", "x-forebay-revision: seven\r\n"] {
            let odd = said(&good.replace("x-forebay-revision: 7\r\n", odd), Some(&two));
            assert!(matches!(odd, Caller::Node { revision: u64::MAX, .. }), "{odd:?}");
        }
        assert_eq!(said(good, None), Caller::Stranger);
        assert_eq!(said(&good.replace("cluster-token\r", "cluster-tokem\r"), Some(&two)), Caller::Stranger);
        assert_eq!(said("x-forebay-cluster-token: cluster-token\r\n", Some(&two)), Caller::Stranger);
    }

    #[test]
    fn a_name_that_means_another_store_has_another_identity() {
        let target = |bucket: &str, endpoint: Option<&str>| OriginTarget {
            kind: OriginKind::S3 {
                bucket: bucket.into(),
                endpoint: endpoint.map(|url| url.parse().expect("a URL")),
                region: "eu-1".into(),
            },
        };
        let one = identity(&target("bucket", None));
        assert_eq!(one.len(), 32);
        assert_eq!(one, identity(&target("bucket", None)));
        assert_ne!(one, identity(&target("other", None)));
        assert_ne!(one, identity(&target("bucket", Some("http://h"))));
    }

    #[test]
    fn a_node_that_failed_is_left_alone_for_a_moment() {
        let peers = Peers::new(Connections::new(4));
        let two = cluster(&[("a", None), ("b", Some("http://127.0.0.1:1"))]);
        let b = two.others().next().expect("b");
        let now = Instant::now();
        assert!(peers.find(b, "data", now).is_some());
        peers.rest(b, Some("data"), now + REST_OF_STRANGER);
        assert!(peers.find(b, "data", now).is_none() && peers.find(b, "other", now).is_some());
        peers.rest(b, None, now + REST_OF_FAILED);
        assert!(peers.find(b, "other", now).is_none());
        assert!(peers.find(b, "other", now + REST_OF_FAILED).is_some());
    }

    #[test]
    fn a_new_placement_keeps_the_connections_of_who_stays_where_it_was() {
        let peers = Peers::new(Connections::new(4));
        let at = |address| cluster(&[("a", None), ("b", Some(address)), ("c", Some("http://127.0.0.1:3"))]);
        let old = at("http://127.0.0.1:1");
        let now = Instant::now();
        let open = |fleet: &Cluster, id: &str| {
            let member = fleet.others().find(|member| member.id.as_str() == id).expect("a member");
            peers.find(member, "data", now)
        };
        let (b, c) = (open(&old, "b").expect("b"), open(&old, "c").expect("c"));
        let members: Vec<Member> = old.others().cloned().collect();
        peers.rest(&members[0], Some("data"), now + REST_OF_STRANGER);
        peers.rest(&members[1], None, now + REST_OF_FAILED);
        assert!(open(&old, "b").is_none() && open(&old, "c").is_none());

        // It may serve the accelerator now; that it did not answer a moment ago is as true as before.
        let new = at("http://127.0.0.1:2");
        peers.renew(Some(&new));
        let moved = open(&new, "b").expect("asked again");
        assert!(!Rc::ptr_eq(&b, &moved), "at its new address");
        assert!(open(&new, "c").is_none());
        let later = now + REST_OF_FAILED;
        assert!(Rc::ptr_eq(&c, &peers.find(&members[1], "data", later).expect("c")), "the same connections");

        peers.renew(Some(&cluster(&[("a", None), ("c", Some("http://127.0.0.1:3"))])));
        assert_eq!(peers.open.borrow().len(), 1);
        peers.renew(None);
        assert!(peers.open.borrow().is_empty() && peers.resting.borrow().is_empty());
    }
}
