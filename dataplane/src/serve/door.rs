//! The node as its side door sees it.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay_control_api::{
    AcceleratorStatus, DriveStatus, MemoryStatus, NodeStatus, PurgeReply, WorkerStatus,
};
use serde_json::json;
use tokio::sync::mpsc;

use super::worker::Peer;
use crate::admin::{DoorError, NodeDoor, Readiness};
use crate::agent::Standing;
use crate::metrics::{Counter, EngineKind, Gauge, Reserve};
use crate::node::Node;
use crate::store::Store;
use crate::table::Whereabouts;

/// Extents listed on the explain page.
const EXPLAINED_MAX: u32 = 64;

/// What the door needs to answer.
#[derive(Debug)]
pub(super) struct Door {
    pub(super) node: Arc<Node>,
    pub(super) peers: Box<[Peer]>,
    pub(super) cores: Vec<usize>,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) tls_addresses: Vec<SocketAddr>,
    pub(super) engine: EngineKind,
    pub(super) is_registered: bool,
    pub(super) store: Option<Arc<Store>>,
    pub(super) standing: Option<Arc<Standing>>,
    pub(super) drain: mpsc::UnboundedSender<()>,
    pub(super) started: Instant,
}

impl NodeDoor for Door {
    fn ready(&self) -> Readiness {
        if self.node.is_draining() {
            Readiness::NotReady("draining")
        } else if self.standing.as_ref().is_some_and(|standing| !standing.has_state()) {
            Readiness::NotReady("the control plane has not said yet what to serve; see /v1/status")
        } else {
            Readiness::Ready
        }
    }

    fn status(&self) -> NodeStatus {
        let arena = self.node.arena.status();
        let table = self.node.table.status();
        NodeStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            ready: self.ready() == Readiness::Ready,
            draining: self.node.is_draining(),
            engine: self.engine.word().to_owned(),
            listen: self
                .addresses
                .iter()
                .map(ToString::to_string)
                .chain(self.tls_addresses.iter().map(|address| format!("https://{address}")))
                .collect(),
            workers: self.cores.iter().zip(&self.peers).map(worker).collect(),
            accelerators: self
                .node
                .served()
                .all()
                .map(|(_, accelerator)| AcceleratorStatus {
                    name: accelerator.name.to_string(),
                    origin: accelerator.target.kind.to_string(),
                    freshness: accelerator.policy.freshness().to_string(),
                    extent_bytes: u64::from(accelerator.extent_bytes),
                })
                .collect(),
            memory: MemoryStatus {
                total_bytes: arena.bytes,
                reads_bytes: arena.reads_bytes,
                fills_bytes: arena.fills_bytes,
                ram_bytes: arena.ram_bytes,
                registered: self.is_registered,
            },
            drives: self
                .store
                .as_ref()
                .map(|store| store.status().drives)
                .unwrap_or_default()
                .iter()
                .enumerate()
                .map(|(index, status)| drive(status, self.node.is_retired(index as u8)))
                .collect(),
            objects: table.objects,
            extents: table.extents,
            connections: self.node.connections(),
            control: self
                .standing
                .as_ref()
                .map(|standing| standing.link(self.node.is_fenced(tokio::time::Instant::now()))),
        }
    }

    fn explain(&self, accelerator: &str, key: &[u8]) -> Option<serde_json::Value> {
        let served = self.node.served();
        let (index, accelerator) = served.find(accelerator)?;
        let decision = self.node.decide(accelerator, key, tokio::time::Instant::now());
        let known = self.node.table.find(index, key).map(|entry| {
            let count = entry.grid.extent_count(entry.facts.size);
            let extents: Vec<_> = (0..count.min(EXPLAINED_MAX))
                .map(|extent| match entry.peek(extent) {
                    Whereabouts::Ram(_) => "ram",
                    Whereabouts::Drive(..) => "drive",
                    Whereabouts::Filling(_) => "filling",
                    Whereabouts::Absent => "absent",
                })
                .collect();
            json!({
                "etag": entry.facts.etag,
                "size": entry.facts.size,
                "version": format!("{:?}", entry.version),
                "validated_seconds_ago": entry.validated().elapsed().as_secs(),
                "extent_bytes": entry.grid.extent_bytes(),
                "extent_count": count,
                "extents": extents,
            })
        });
        Some(json!({
            "accelerator": &*accelerator.name,
            "origin": accelerator.target.kind.to_string(),
            "cache": decision.cache,
            "freshness": decision.freshness.to_string(),
            "known": known,
        }))
    }

    fn purge(&self, accelerator: &str, key: &[u8]) -> Result<PurgeReply, DoorError> {
        let Some(index) = self.node.served().find(accelerator).map(|(index, _)| index) else {
            return Err(DoorError::NoAccelerator(accelerator.to_owned()));
        };
        let known = self.node.table.find(index, key);
        let (extents, bytes) = known.map_or((0, 0), |entry| entry.kept());
        let found = self.node.table.forget(index, key);
        Ok(PurgeReply { found, extents, bytes })
    }

    fn drain(&self) {
        // A second order while the first is carried out changes nothing.
        let _ = self.drain.send(());
    }

    fn metrics(&self) -> String {
        let metrics = &self.node.metrics;
        let arena = self.node.arena.status();
        let limits = &self.node.limits;
        let reserves = [
            (Reserve::Reads, limits.reads_reserve_bytes, arena.reads_bytes),
            (Reserve::Fills, limits.fills_reserve_bytes, arena.fills_bytes),
            (Reserve::Ram, limits.ram_reserve_bytes, arena.ram_bytes),
        ];
        for (reserve, most, used) in reserves {
            metrics.set(Gauge::ReserveBytes(reserve), most.cast_signed());
            metrics.set(Gauge::ReserveUsedBytes(reserve), used.cast_signed());
        }
        let table = self.node.table.status();
        if let Some(standing) = &self.standing {
            let (revision, epoch, silence) = standing.numbers(self.node.started);
            metrics.set(Gauge::ControlRevision, revision.cast_signed());
            metrics.set(Gauge::ControlEpoch, epoch.cast_signed());
            metrics.set(Gauge::ControlSilenceSeconds, silence.cast_signed());
            let is_fenced = self.node.is_fenced(tokio::time::Instant::now());
            metrics.set(Gauge::ControlFenced, i64::from(is_fenced));
        }
        metrics.set(Gauge::PagesFree, arena.pages_free.cast_signed());
        metrics.set(Gauge::PagesHuge, arena.pages_huge.unwrap_or(0).cast_signed());
        metrics.set(Gauge::Objects, table.objects.cast_signed());
        metrics.set(Gauge::Extents, table.extents.cast_signed());
        metrics.set(Gauge::MetadataBytes, table.metadata_bytes.cast_signed());
        metrics.set_total(Counter::EvictedPages, arena.pages_evicted);
        metrics.set_total(Counter::RenewedPages, arena.pages_renewed);
        metrics.set_total(Counter::RefusedGrants, arena.grants_refused);
        metrics.set_total(Counter::EvictedObjects, table.objects_evicted);
        metrics.render()
    }
}

fn worker((core, peer): (&usize, &Peer)) -> WorkerStatus {
    WorkerStatus { core: *core as u32, connections: peer.load.load(Ordering::Relaxed) as u64 }
}

fn drive(drive: &crate::store::DriveStatus, is_retired: bool) -> DriveStatus {
    let geometry = &drive.geometry;
    // What was begun and not yet taken back; the open segment counts as a whole.
    let begun = drive.segments_opened.min(u64::from(geometry.segments()));
    DriveStatus {
        path: drive.path.display().to_string(),
        capacity_bytes: geometry.capacity(),
        used_bytes: begun * u64::from(geometry.segment_bytes()),
        state: match (is_retired, drive.is_dead) {
            (true, _) => "retired: reads failed",
            (false, true) => "read only: writes failed",
            (false, false) => "in use",
        }
        .to_owned(),
    }
}
