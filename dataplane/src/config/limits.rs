//! Everything that can grow, with a name and a bound.
//!
//! The bounds follow from the configuration by the sums below and from nothing else; the node allocates by them at
//! start and never beyond. A limit that is reached is either back-pressure or a refusal that is counted under the
//! limit's name.

use std::time::Duration;

use forebay_control_api::{AcceleratorSpec, ByteSize};

use super::{Config, ConfigError};
use crate::arena;

/// The bounds of one node. Counts and bytes are for the whole node unless the name says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Client connections open at once.
    pub connections_max: u32,
    /// Bytes of one request head, all lines together.
    pub head_bytes_max: u32,
    /// Header lines of one request head.
    pub headers_max: u32,
    /// Downloads of one extent under way at once.
    pub fills_max: u32,
    /// Connections to all origins together; each worker may have its share of them.
    pub origin_connections_max: u32,
    /// Connections to other nodes of the fleet, likewise; 0 without a control plane.
    pub peer_connections_max: u32,
    /// The arena: `memory` rounded down to whole pages of 2 MiB; the three reserves below are parts of it.
    pub arena_bytes: u64,
    /// Buffers for reads that feed a socket.
    pub reads_reserve_bytes: u64,
    /// Buffers for downloads.
    pub fills_reserve_bytes: u64,
    /// The RAM tier: what the other two leave.
    pub ram_reserve_bytes: u64,
    /// Bytes of one connection that the kernel may hold for sending.
    pub send_pinned_bytes_per_connection_max: u64,
    /// The same for all connections together.
    pub send_pinned_bytes_max: u64,
    /// Unsent bytes in one connection's socket (`TCP_NOTSENT_LOWAT`): what the kernel keeps for a client that does not read.
    pub send_queue_bytes_per_connection_max: u64,
    /// Heap of all client connections over TCP together: their heads, both ways, and their state.
    pub connections_heap_bytes_max: u64,
    /// Bytes that the network holds of ours behind zero-copy sends, until its readers have acknowledged them; beyond it
    /// bodies go another way. A share for each worker, or one send where that is more.
    pub zero_copy_bytes_max: u64,
    /// Encrypted bytes that wait for clients of HTTPS who pause; what would be more ends their connection.
    pub tls_held_bytes_max: u64,
    /// Bytes that QUIC may hold until clients have acknowledged them, over all connections; beside the arena. 0 without
    /// a QUIC door.
    pub quic_send_bytes_max: u64,
    /// QUIC handshakes under way; from a quarter on, clients have to show that their address is their own. 0 without a QUIC
    /// door.
    pub quic_handshakes_max: u32,
    /// Of the bytes that QUIC may hold, those of one connection; with many connections each may hold less.
    pub quic_send_window_bytes: u64,
    /// Bytes that one QUIC connection may have received and not yet passed on.
    pub quic_receive_window_bytes: u64,
    /// Requests under way on one QUIC connection.
    pub quic_streams_max: u32,
    /// Bytes that wait for the drives' writers; 0 without drives.
    pub writer_queue_bytes: u64,
    /// Objects known.
    pub objects_max: u32,
    /// Memory for objects, their headers, extents and sums; beside the arena.
    pub metadata_bytes_max: u64,
    /// From a connection's first byte, or its opening, to a whole request head.
    pub header_timeout: Duration,
    /// An open connection without a request.
    pub idle_timeout: Duration,
    /// A send that has not moved.
    pub send_stall: Duration,
    /// How long a request waits for its next byte from drive or origin before it is answered 504 or cut.
    pub request_deadline: Duration,
    /// How long a drain waits for requests under way.
    pub drain: Duration,
}

const PAGE_BYTES: u64 = arena::PAGE_BYTES as u64;

/// Buffers of each kind that a worker must be able to hold: fewer, and two large requests wait for each other.
const LEASES_PER_WORKER_MIN: u64 = 4;
/// More buffers than this do not make a worker faster: at 1 MiB it is 128 MiB in flight on one core.
const LEASES_PER_WORKER_MAX: u64 = 128;
/// A RAM tier smaller than this holds nothing long enough to be hit.
const RAM_BYTES_MIN: u64 = 4 * PAGE_BYTES;

/// A QUIC connection that may hold less than this waits for acknowledgements most of the time.
pub const QUIC_WINDOW_BYTES_MIN: u64 = 64 << 10;
/// 2 MiB are 16 Gbit/s at a round trip of a millisecond.
const QUIC_WINDOW_BYTES_MAX: u64 = 2 << 20;

/// Enough for the time that a worker needs to come round to a socket at 10 GB/s, and a quarter of what the kernel keeps by
/// itself.
const SEND_QUEUE_BYTES: u64 = 1 << 20;
/// Room for a request's head and for an answer's, 16 KiB each, and as much for all else.
const CONNECTION_HEAP_BYTES: u64 = 48 << 10;

/// Far more than clients that all come back at once have under way; whoever is refused tries again.
const HANDSHAKES_MAX: u32 = 1024;

const CONNECTIONS_DEFAULT: u32 = 10_000;
const CONNECTIONS_MIN: u32 = 16;

impl Limits {
    /// The bounds for this configuration.
    ///
    /// # Errors
    /// Too little memory or too few file descriptors, with the sum.
    pub fn derive(config: &Config) -> Result<Self, ConfigError> {
        let workers = config.cores.workers.len();
        let extents = config.accelerators.iter().map(AcceleratorSpec::extent_bytes);
        // A control plane may name any. An extent of more than a page is kept in pages.
        let any = (config.control.is_some() || config.accelerators.is_empty()).then_some(PAGE_BYTES);
        let extent = extents.chain(any).max().unwrap_or(PAGE_BYTES).min(PAGE_BYTES);

        // Memory. A page holds buffers of one size only, so each reserve is whole pages.
        let arena_bytes = floor_to_page(config.memory.bytes());
        let reserve_min = ceil_to_page(workers as u64 * LEASES_PER_WORKER_MIN * extent);
        let reserve_max = ceil_to_page(workers as u64 * LEASES_PER_WORKER_MAX * extent);
        let needed = 2 * reserve_min + RAM_BYTES_MIN;
        if arena_bytes < needed {
            return Err(ConfigError::Memory {
                has: config.memory,
                needed: ByteSize::new(needed),
                workers,
                extent: ByteSize::new(extent),
                reserves: ByteSize::new(2 * reserve_min),
                ram: ByteSize::new(RAM_BYTES_MIN),
            });
        }
        let reserve = floor_to_page(arena_bytes / 8).clamp(reserve_min, reserve_max);
        let fills_max = u32::try_from(reserve / extent).unwrap_or(u32::MAX);

        // Descriptors: what the house needs itself, origins, then clients.
        let drives = config.drives.len() as u64;
        let chunks = arena_bytes.div_ceil(arena::CHUNK_BYTES_MAX as u64);
        let own = 64
            + chunks
            + workers as u64
                * (16 + (config.listen.len() + config.listen_tls.len() + config.listen_quic.len()) as u64)
            + 8 * drives;
        // One for each worker at least.
        let for_fills = |fills: u32| fills.saturating_add(8 * workers as u32).clamp(32, 512);
        let origin_connections_max =
            config.origin_connections.unwrap_or_else(|| for_fills(fills_max)).max(workers as u32);
        let peer_connections_max =
            if config.control.is_some() { for_fills(fills_max / 2).max(workers as u32) } else { 0 };
        let outward = u64::from(origin_connections_max) + u64::from(peer_connections_max);
        let left = config.descriptors_max.saturating_sub(own + outward);
        let connections_max = config.connections.unwrap_or_else(|| {
            CONNECTIONS_DEFAULT.min(u32::try_from(left).unwrap_or(u32::MAX)).max(CONNECTIONS_MIN)
        });
        if u64::from(connections_max) > left {
            return Err(ConfigError::Descriptors {
                connections: connections_max,
                outward,
                needed: own + outward + u64::from(connections_max),
                has: config.descriptors_max,
            });
        }

        // Metadata. An object of 100 KB costs some 500 bytes of key, headers and sums, 0.5 % of its bytes; larger
        // ones far less. 1/256 of all room holds that, and beyond a quarter of the memory it would crowd the machine.
        let room = config.drives.iter().map(|drive| drive.bytes).fold(arena_bytes, u64::saturating_add);
        let metadata_bytes_max = (room / 256).clamp(16 << 20, (arena_bytes / 4).max(64 << 20));

        Ok(Self {
            connections_max,
            head_bytes_max: 16 << 10,
            headers_max: 100,
            fills_max,
            origin_connections_max,
            peer_connections_max,
            arena_bytes,
            reads_reserve_bytes: reserve,
            fills_reserve_bytes: reserve,
            ram_reserve_bytes: arena_bytes - 2 * reserve,
            send_pinned_bytes_per_connection_max: (arena_bytes / 64).clamp(2 * extent, 16 << 20),
            send_pinned_bytes_max: arena_bytes / 2,
            send_queue_bytes_per_connection_max: SEND_QUEUE_BYTES,
            connections_heap_bytes_max: u64::from(connections_max) * CONNECTION_HEAP_BYTES,
            // Readers who stop keep it until they go, and what is left of the reserves has to do for the others.
            zero_copy_bytes_max: reserve / 2,
            tls_held_bytes_max: arena_bytes / 4,
            quic_send_bytes_max: if config.listen_quic.is_empty() {
                0
            } else {
                (arena_bytes / 8).max(64 << 20)
            },
            quic_handshakes_max: if config.listen_quic.is_empty() { 0 } else { HANDSHAKES_MAX },
            quic_send_window_bytes: QUIC_WINDOW_BYTES_MAX,
            quic_receive_window_bytes: 256 << 10,
            quic_streams_max: 100,
            writer_queue_bytes: (arena_bytes / 8).max(4 * extent).min(drives * (64 << 20)),
            objects_max: u32::try_from(metadata_bytes_max / 512).unwrap_or(u32::MAX),
            metadata_bytes_max,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            send_stall: config.send_stall,
            request_deadline: Duration::from_mins(1),
            drain: config.drain,
        })
    }
}

fn floor_to_page(bytes: u64) -> u64 {
    bytes / PAGE_BYTES * PAGE_BYTES
}

fn ceil_to_page(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES) * PAGE_BYTES
}
