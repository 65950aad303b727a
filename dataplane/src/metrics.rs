//! Every number the node shows, in one table.
//!
//! A hit must not touch memory that another core writes, so a counter is not one number but one *cell per writer*:
//! a worker owns a [`WorkerCounters`], adds to its cells with a plain load and store, and nobody else writes there.
//! Whoever asks for the numbers adds the cells up and pays for it. The sums go through the `metrics` facade into a
//! Prometheus recorder of our own, which renders them; a scrape is local and does no I/O.
//!
//! A new number is one line in [`Counter`] or [`Gauge`] below; its name is `forebay_room_noun_unit`. Labels are
//! closed enums of known size: no label takes its values from a client, so nobody outside can grow this table.
//! `docs/metrics.md` is printed from it.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::fmt::Write as _;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

macro_rules! labels {
    ($( $(#[$doc:meta])* $name:ident as $label:literal { $( $variant:ident = $word:expr, )+ } )+) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[expect(missing_docs, reason = "each variant is documented by its word, which is what people see")]
        pub enum $name { $( $variant, )+ }

        impl $name {
            /// The name of the label.
            pub const LABEL: &'static str = $label;
            /// Every value, in order.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];
            /// The words of every value, in order.
            pub const WORDS: &'static [&'static str] = &[ $( $word, )+ ];

            /// The word that stands in the label.
            pub const fn word(self) -> &'static str {
                Self::WORDS[self as usize]
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    )+ };
}

macro_rules! table {
    (
        $(#[$doc:meta])*
        $table:ident
        $( $variant:ident $( { $( $label:ident: $type:ident ),+ } )? = $name:literal, $help:literal; )+
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $table {
            $( #[doc = concat!("`", $name, "`")] $variant $( ( $( $type ),+ ) )?, )+
        }

        impl $table {
            /// The table as text: what is documented and rendered.
            pub const ROWS: &'static [Row] = &[ $( Row {
                name: $name,
                help: $help,
                labels: &[ $( $( ($type::LABEL, $type::WORDS) ),+ )? ],
            }, )+ ];
            const BASES: [usize; Self::ROWS.len()] = bases(Self::ROWS);
            /// One cell for every combination of label values of every row.
            pub const CELLS: usize = cells(Self::ROWS);

            /// Which cell holds this number.
            #[inline]
            const fn cell(self) -> usize {
                enum Order { $( $variant, )+ }
                match self { $(
                    Self::$variant $( ( $( $label ),+ ) )? => {
                        Self::BASES[Order::$variant as usize]
                            + place(&[ $( $( ($label as usize, $type::WORDS.len()) ),+ )? ])
                    }
                )+ }
            }
        }
    };
}

labels! {
    /// What a request turned out to be.
    Outcome as "outcome" {
        Ram = "ram", Drive = "drive", Miss = "miss", Partial = "partial", Bypass = "bypass", Error = "error",
    }
    /// First digit of the status.
    StatusClass as "status" { Success = "2xx", Redirect = "3xx", Caller = "4xx", Ours = "5xx", }
    /// What was asked of an origin.
    OriginAsk as "kind" { Get = "get", Head = "head", Conditional = "conditional", Forward = "forward", }
    /// Why a download from an origin came to nothing.
    FillFailure as "reason" {
        Connect = "connect", Status = "status", Changed = "changed", Short = "short", Timeout = "timeout",
        Memory = "memory", Other = "other",
    }
    /// Where a block was when its sum was checked.
    Where as "where" { Ram = "ram", Drive = "drive", }
    /// Why a write to a drive was not taken.
    WriteRefusal as "reason" { QueueFull = "queue_full", NoDrive = "no_drive", Failed = "failed", Closed = "closed", }
    /// What memory is held for.
    Reserve as "reserve" { Reads = "reads", Fills = "fills", Ram = "ram", }
    /// Why a connection ended.
    CloseReason as "reason" {
        Client = "client", Finished = "finished", Idle = "idle", HeadTimeout = "head_timeout",
        BadRequest = "bad_request", Limit = "limit", SendStalled = "send_stalled", SendFailed = "send_failed",
        Receive = "receive_failed", BodyCut = "body_cut", Drain = "drain", Handshake = "handshake_failed",
    }
    /// Which door a client came through.
    Door as "door" { Http = "http", Https = "https", Http3 = "http3", }
    /// What became of a TLS handshake.
    Handshake as "outcome" {
        Full = "full", Resumed = "resumed", Failed = "failed", TimedOut = "timed_out", PlainHttp = "plain_http",
        Gone = "gone",
    }
    /// What became of a certificate that was read again.
    Reload as "outcome" { Loaded = "loaded", Refused = "refused", }
    /// Which limit a request or connection met; the names are those of `check-config`.
    Limit as "limit" {
        Connections = "connections_max", Head = "head_bytes_max", Reads = "reads_reserve_bytes",
        FillMemory = "fills_reserve_bytes", Pinned = "send_pinned_bytes_max", Deadline = "request_deadline",
        TlsHeld = "tls_held_bytes_max",
        QuicSend = "quic_send_bytes_max", QuicHandshakes = "quic_handshakes_max",
    }
    /// What came of a question to the control plane.
    ControlOutcome as "outcome" {
        Good = "good", Refused = "refused", Unreachable = "unreachable", Strange = "strange", Older = "older",
    }
    /// What came of a question to the node that owns an object; stranger: it does not serve the store.
    PeerOutcome as "outcome" {
        Good = "good", Other = "other", Slow = "slow", Failed = "failed", Stranger = "stranger",
    }
    /// Whether another node forgot what was written here.
    ForgetOutcome as "outcome" { Good = "good", Failed = "failed", }
    /// What became of an object of a prewarm.
    PrewarmOutcome as "outcome" { Done = "done", Failed = "failed", }
    /// The engine in use.
    EngineKind as "engine" { Uring = "uring", Portable = "portable", Scripted = "scripted", }
    /// The version of this build.
    Version as "version" { This = env!("CARGO_PKG_VERSION"), }
}

table! {
    /// A number that only grows. Written through [`WorkerCounters::bump`].
    Counter
    Requests { outcome: Outcome, status: StatusClass } = "forebay_serve_requests_total",
        "Requests ended, by what they turned out to be and the class of the status.";
    SentBytes = "forebay_serve_sent_bytes_total",
        "Bytes the kernel took for clients over TCP, heads and bodies; through TLS, encrypted.";
    SentByReferenceBytes = "forebay_serve_sent_by_reference_bytes_total",
        "Of these, bytes of hot pieces that left without a copy by this machine's kernel.";
    SentZeroCopyBytes = "forebay_serve_sent_zero_copy_bytes_total",
        "Of the bytes sent, those that the network was to read where they lie (SENDMSG_ZC).";
    ZeroCopyCopiedBytes = "forebay_serve_zero_copy_copied_bytes_total",
        "Of the bytes sent zero-copy, those that the kernel copied all the same; their peers are not asked again.";
    QuicSendBytes = "forebay_serve_quic_send_bytes_total",
        "Body bytes copied into the send buffers of QUIC, for clients over HTTP/3.";
    QuicRetries = "forebay_serve_quic_retries_total",
        "Clients of HTTP/3 that were asked to show that their address is their own, because many handshakes were under way.";
    SendsStalled = "forebay_serve_sends_stalled_total",
        "Sends that did not move for the time of --send-stall and ended their connection.";
    ConnectionsOpened { door: Door } = "forebay_serve_connections_opened_total",
        "Client connections accepted, by the door they came through.";
    ConnectionsClosed { reason: CloseReason } = "forebay_serve_connections_closed_total",
        "Client connections ended, by reason.";
    LimitRefusals { limit: Limit } = "forebay_serve_limit_refusals_total",
        "Requests or connections refused or held back because a limit was reached.";
    HitCopiedBytes = "forebay_serve_hit_copied_bytes_total",
        "Body bytes copied in user space on the way of a hit over TCP, encryption apart; stays 0.";
    TlsBytes = "forebay_serve_tls_bytes_total",
        "Bytes encrypted for clients of HTTPS, heads and bodies; one pass over each.";
    TlsHandshakes { outcome: Handshake } = "forebay_serve_tls_handshakes_total",
        "TLS handshakes with clients, by what became of them.";
    CertificateReloads { outcome: Reload } = "forebay_serve_certificate_reloads_total",
        "Times that certificate and key were read again; a pair that is refused leaves the old one in use.";
    FillCopiedBytes = "forebay_fill_copied_bytes_total",
        "Bytes copied in user space from the origin's connection into a buffer.";
    FillsStarted = "forebay_fill_started_total",
        "Downloads of one piece from an origin begun.";
    FillsJoined = "forebay_fill_joined_total",
        "Requests that waited for a download that was already under way.";
    FillsFailed { reason: FillFailure } = "forebay_fill_failed_total",
        "Downloads of one piece that came to nothing, by reason.";
    OriginRequests { kind: OriginAsk } = "forebay_origin_requests_total",
        "Requests sent to origins, by kind.";
    OriginBytes = "forebay_origin_received_bytes_total",
        "Body bytes received from origins.";
    BlocksVerified { place: Where } = "forebay_store_blocks_verified_total",
        "Blocks of 64 KiB whose sum was checked and right, by where they lay.";
    BlocksBad { place: Where } = "forebay_store_blocks_bad_total",
        "Blocks whose sum was wrong: dropped, never served, by where they lay.";
    DriveReads = "forebay_store_reads_total",
        "Reads from drives.";
    DriveReadBytes = "forebay_store_read_bytes_total",
        "Bytes read from drives.";
    WritesOffered = "forebay_store_writes_offered_total",
        "Pieces offered to the drives' writers.";
    WritesRefused { reason: WriteRefusal } = "forebay_store_writes_refused_total",
        "Times that a piece was not taken for writing to a drive, by reason; queue_full: it is offered again while it is in memory.";
    WrittenBytes = "forebay_store_written_bytes_total",
        "Bytes written to drives.";
    RenewedPages = "forebay_arena_renewed_pages_total",
        "Pages of memory put in the place of others that a slow client may still read.";
    RefusedGrants = "forebay_arena_refused_grants_total",
        "Times that a reserve was used up or all memory held; the request waited or was refused.";
    EvictedPages = "forebay_arena_pages_evicted_total",
        "Pages of 2 MiB that the RAM tier gave up.";
    EvictedObjects = "forebay_table_objects_evicted_total",
        "Objects forgotten because of objects_max or metadata_bytes_max.";
    ControlAnswers { outcome: ControlOutcome } = "forebay_control_answers_total",
        "Registrations and heartbeats, by what came of them; older: the control plane's state is older than the node's.";
    PeerRequests { outcome: PeerOutcome } = "forebay_peer_requests_total",
        "Questions to the node that owns an object; all but the good ones were put to the origin.";
    PeerBytes = "forebay_peer_received_bytes_total",
        "Body bytes received from other nodes.";
    PeerServed = "forebay_peer_served_total",
        "Requests of other nodes.";
    PeerForgets { outcome: ForgetOutcome } = "forebay_peer_forgets_total",
        "Other nodes told to forget what was written through this one; failed: they could not be reached.";
    PurgesApplied = "forebay_control_purges_applied_total",
        "Purges of the control plane that were carried out.";
    PrewarmedObjects { outcome: PrewarmOutcome } = "forebay_control_prewarmed_objects_total",
        "Objects of prewarms, by what became of them.";
    RingEnters = "forebay_engine_ring_enters_total",
        "System calls made for the rings.";
    RingOverflows = "forebay_engine_ring_overflows_total",
        "Completions the kernel had to hold back because the completion queue was full.";
}

table! {
    /// A number that goes up and down. Written through [`WorkerCounters::adjust`] by a worker, or through
    /// [`Metrics::set`] where there is one for the whole node.
    Gauge
    Connections = "forebay_serve_connections",
        "Client connections now open.";
    ZeroCopyBytes = "forebay_serve_zero_copy_bytes",
        "Bytes of memory that the network still reads, after zero-copy sends.";
    PagesFree = "forebay_arena_pages_free",
        "Pages of 2 MiB that nothing holds.";
    PagesHuge = "forebay_arena_pages_huge",
        "Pages of 2 MiB that are one huge page each; hot bytes cost half as much again to send from the others.";
    Objects = "forebay_table_objects",
        "Objects now known.";
    Extents = "forebay_table_extents",
        "Pieces (extents) now in memory or on a drive.";
    MetadataBytes = "forebay_table_metadata_bytes",
        "Memory now held for objects, their headers, pieces and sums.";
    ReserveBytes { reserve: Reserve } = "forebay_arena_reserve_bytes",
        "Memory set aside for each use, in bytes.";
    ReserveUsedBytes { reserve: Reserve } = "forebay_arena_reserve_used_bytes",
        "Memory now held for each use, in bytes.";
    WritesPending = "forebay_store_writes_pending",
        "Pieces in memory that are being written to a drive, or wait for room in its queue.";
    ControlRevision = "forebay_control_revision",
        "The control plane's state that the node holds; 0 for none.";
    ControlEpoch = "forebay_control_epoch",
        "The placement version (epoch) that the node holds; 0 for none.";
    ControlSilenceSeconds = "forebay_control_silence_seconds",
        "Seconds since the control plane last answered well; 0 without a control plane.";
    ControlFenced = "forebay_control_fenced",
        "1 while the control plane has been silent for so long that ttl is treated as strict.";
    Engine { engine: EngineKind } = "forebay_engine_info",
        "1 for the engine in use.";
    Build { version: Version } = "forebay_node_build_info",
        "1 for the version of this build.";
}

impl StatusClass {
    /// The class of a status of 100 to 599; what is below 300 counts as success.
    pub const fn of(status: u16) -> Self {
        match status {
            0..=299 => Self::Success,
            300..=399 => Self::Redirect,
            400..=499 => Self::Caller,
            _ => Self::Ours,
        }
    }
}

/// The cells of one writer. It may move to another thread, but no two threads can hold it, which is why adding
/// needs neither a lock nor a locked instruction.
#[derive(Debug)]
pub struct WorkerCounters {
    cells: Arc<CellBlock>,
    one_thread: PhantomData<Cell<()>>,
}

impl WorkerCounters {
    /// Adds `n` to a counter.
    #[inline]
    pub fn bump(&self, counter: Counter, n: u64) {
        let cell = &self.cells.counters[counter.cell()];
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Adds `change` to this writer's part of a gauge.
    #[inline]
    pub fn adjust(&self, gauge: Gauge, change: i64) {
        let cell = &self.cells.gauges[gauge.cell()];
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(change), Ordering::Relaxed);
    }

    /// Takes over this writer's part of a gauge that is kept elsewhere.
    #[inline]
    pub fn put(&self, gauge: Gauge, value: i64) {
        self.cells.gauges[gauge.cell()].store(value, Ordering::Relaxed);
    }

    /// Takes over a total that is counted elsewhere.
    #[inline]
    pub fn set(&self, counter: Counter, total: u64) {
        self.cells.counters[counter.cell()].store(total, Ordering::Relaxed);
    }

    /// What this writer alone has counted.
    pub fn counted(&self, counter: Counter) -> u64 {
        self.cells.counters[counter.cell()].load(Ordering::Relaxed)
    }
}

/// All numbers of one node: hands out cells and adds them up.
pub struct Metrics {
    /// For numbers of the node as a whole and for cold paths that belong to no worker.
    shared: CellBlock,
    writers: Mutex<Vec<Arc<CellBlock>>>,
    shown: Mutex<Shown>,
}

impl Metrics {
    /// A table of zeros, but for the version of this build.
    pub fn new() -> Arc<Self> {
        let metrics = Arc::new(Self {
            shared: CellBlock::default(),
            writers: Mutex::new(Vec::new()),
            shown: Mutex::new(Shown::new()),
        });
        metrics.set(Gauge::Build(Version::This), 1);
        metrics
    }

    /// Cells for one more writer: a worker or a house thread. What it counted stays when it is gone.
    pub fn writer(&self) -> WorkerCounters {
        let cells = Arc::new(CellBlock::default());
        self.writers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&cells));
        WorkerCounters { cells, one_thread: PhantomData }
    }

    /// Adds `n` to a counter from any thread, with a locked instruction: for cold paths only.
    pub fn bump(&self, counter: Counter, n: u64) {
        self.shared.counters[counter.cell()].fetch_add(n, Ordering::Relaxed);
    }

    /// Takes over a total that is counted elsewhere, for the node as a whole.
    pub fn set_total(&self, counter: Counter, total: u64) {
        self.shared.counters[counter.cell()].store(total, Ordering::Relaxed);
    }

    /// Moves a gauge from any thread, with a locked instruction: for cold paths only.
    pub fn adjust(&self, gauge: Gauge, change: i64) {
        self.shared.gauges[gauge.cell()].fetch_add(change, Ordering::Relaxed);
    }

    /// Sets a gauge that the node has one of. Parts that workers adjusted are added to it.
    pub fn set(&self, gauge: Gauge, value: i64) {
        self.shared.gauges[gauge.cell()].store(value, Ordering::Relaxed);
    }

    /// The sum of one counter.
    pub fn total(&self, counter: Counter) -> u64 {
        self.counter_sum(counter.cell())
    }

    /// The sum of one gauge.
    pub fn level(&self, gauge: Gauge) -> i64 {
        self.gauge_sum(gauge.cell())
    }

    /// The sums of all numbers in Prometheus text format 0.0.4, rows in order of their names.
    pub fn render(&self) -> String {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        for (cell, counter) in shown.counters.iter().enumerate() {
            counter.absolute(self.counter_sum(cell));
        }
        for (cell, gauge) in shown.gauges.iter().enumerate() {
            gauge.set(self.gauge_sum(cell) as f64);
        }
        let text = shown.handle.render();
        // The recorder keeps its rows in hash maps; an order that stays is kinder to people and to diffs.
        let mut rows: Vec<&str> = text.split("\n\n").map(str::trim).filter(|row| !row.is_empty()).collect();
        rows.sort_unstable();
        let mut sorted = String::with_capacity(text.len());
        for row in rows {
            let mut lines: Vec<&str> = row.lines().collect();
            let series = lines.iter().take_while(|line| line.starts_with('#')).count();
            lines[series..].sort_unstable();
            for line in lines {
                sorted.push_str(line);
                sorted.push('\n');
            }
        }
        sorted
    }

    fn counter_sum(&self, cell: usize) -> u64 {
        let writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        writers.iter().fold(self.shared.counters[cell].load(Ordering::Relaxed), |sum, writer| {
            sum.wrapping_add(writer.counters[cell].load(Ordering::Relaxed))
        })
    }

    fn gauge_sum(&self, cell: usize) -> i64 {
        let writers = self.writers.lock().unwrap_or_else(PoisonError::into_inner);
        writers.iter().fold(self.shared.gauges[cell].load(Ordering::Relaxed), |sum, writer| {
            sum.wrapping_add(writer.gauges[cell].load(Ordering::Relaxed))
        })
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// As it is scraped.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Name of each label and its possible words.
    pub labels: &'static [(&'static str, &'static [&'static str])],
}

impl Row {
    /// How many numbers this row holds.
    const fn width(&self) -> usize {
        let (mut width, mut at) = (1, 0);
        while at < self.labels.len() {
            width *= self.labels[at].1.len();
            at += 1;
        }
        width
    }

    /// The label values of the `within`th number of this row; the last label turns fastest.
    fn labels_of(&self, mut within: usize) -> Vec<Label> {
        let mut labels = Vec::with_capacity(self.labels.len());
        for (name, words) in self.labels.iter().rev() {
            labels.push(Label::from_static_parts(name, words[within % words.len()]));
            within /= words.len();
        }
        labels.reverse();
        labels
    }
}

/// The text of `docs/metrics.md`.
pub fn documentation() -> String {
    let mut text = String::from(
        "# Metrics\n\n\
         `GET /metrics` of the admin door, Prometheus text format. This page is printed from the table in\n\
         `dataplane/src/metrics.rs`; a test fails when it is out of date, and `FOREBAY_REFRESH=1 cargo test -p\n\
         forebay-dataplane metrics` writes it anew. Every label has the closed list of values shown here.\n",
    );
    for (title, rows) in [("Counters", Counter::ROWS), ("Gauges", Gauge::ROWS)] {
        let _ = write!(text, "\n## {title}\n\n| name | labels | meaning |\n|---|---|---|\n");
        for row in rows {
            let labels: Vec<String> = row
                .labels
                .iter()
                .map(|(name, words)| {
                    // The version would make this page stale with every release.
                    let words = if *name == "version" { "of the build".to_owned() } else { words.join(", ") };
                    format!("`{name}`: {words}")
                })
                .collect();
            let _ = writeln!(text, "| `{}` | {} | {} |", row.name, labels.join("; "), row.help);
        }
    }
    text
}

/// Handles into the recorder, by cell.
struct Shown {
    handle: PrometheusHandle,
    counters: Vec<metrics::Counter>,
    gauges: Vec<metrics::Gauge>,
}

impl Shown {
    fn new() -> Self {
        const METADATA: Metadata<'static> = Metadata::new("forebay", Level::INFO, None);
        let recorder = PrometheusBuilder::new().build_recorder();
        let mut counters = Vec::with_capacity(Counter::CELLS);
        for row in Counter::ROWS {
            recorder.describe_counter(row.name.into(), None, row.help.into());
            counters.extend((0..row.width()).map(|within| {
                recorder.register_counter(&Key::from_parts(row.name, row.labels_of(within)), &METADATA)
            }));
        }
        let mut gauges = Vec::with_capacity(Gauge::CELLS);
        for row in Gauge::ROWS {
            recorder.describe_gauge(row.name.into(), None, row.help.into());
            gauges.extend((0..row.width()).map(|within| {
                recorder.register_gauge(&Key::from_parts(row.name, row.labels_of(within)), &METADATA)
            }));
        }
        Self { handle: recorder.handle(), counters, gauges }
    }
}

/// Aligned to two cache lines, because processors fetch lines in pairs: no two writers share one.
#[derive(Debug)]
#[repr(align(128))]
struct CellBlock {
    counters: [AtomicU64; Counter::CELLS],
    gauges: [AtomicI64; Gauge::CELLS],
}

impl Default for CellBlock {
    fn default() -> Self {
        Self {
            counters: [const { AtomicU64::new(0) }; Counter::CELLS],
            gauges: [const { AtomicI64::new(0) }; Gauge::CELLS],
        }
    }
}

/// Where each row's cells begin.
const fn bases<const N: usize>(rows: &[Row]) -> [usize; N] {
    let mut bases = [0; N];
    let mut at = 1;
    while at < N {
        bases[at] = bases[at - 1] + rows[at - 1].width();
        at += 1;
    }
    bases
}

const fn cells(rows: &[Row]) -> usize {
    let (mut cells, mut at) = (0, 0);
    while at < rows.len() {
        cells += rows[at].width();
        at += 1;
    }
    cells
}

/// The place of one combination of label values, given as (index, number of values).
#[inline]
const fn place(labels: &[(usize, usize)]) -> usize {
    let (mut place, mut at) = (0, 0);
    while at < labels.len() {
        place = place * labels[at].1 + labels[at].0;
        at += 1;
    }
    place
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_number_has_its_own_cell_and_shows_where_it_is_bumped() {
        let metrics = Metrics::new();
        let worker = metrics.writer();
        worker.bump(Counter::Requests(Outcome::Miss, StatusClass::Caller), 2);
        worker.bump(Counter::Requests(Outcome::Ram, StatusClass::Success), 3);
        worker.bump(Counter::RingOverflows, 5);
        worker.bump(Counter::LimitRefusals(Limit::Deadline), 7);
        let text = metrics.render();
        for line in [
            "forebay_serve_requests_total{outcome=\"miss\",status=\"4xx\"} 2",
            "forebay_serve_requests_total{outcome=\"ram\",status=\"2xx\"} 3",
            "forebay_serve_requests_total{outcome=\"error\",status=\"5xx\"} 0",
            "forebay_engine_ring_overflows_total 5",
            "forebay_serve_limit_refusals_total{limit=\"request_deadline\"} 7",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is not in\n{text}");
        }
        let moved = text.lines().filter(|line| !line.starts_with('#') && !line.ends_with(" 0")).count();
        assert_eq!(moved, 5, "four bumped and the build\n{text}");
    }

    #[test]
    fn every_cell_is_shown_once_with_its_own_labels() {
        let metrics = Metrics::new();
        for cell in 0..Counter::CELLS {
            metrics.shared.counters[cell].store(1_000 + cell as u64, Ordering::Relaxed);
        }
        let text = metrics.render();
        let series: HashSet<&str> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(series.len(), Counter::CELLS + Gauge::CELLS);
        for cell in 0..Counter::CELLS {
            let value = format!(" {}", 1_000 + cell);
            assert_eq!(text.lines().filter(|line| line.ends_with(&value)).count(), 1, "cell {cell}");
        }
    }

    #[test]
    fn cells_of_all_writers_add_up_and_outlive_them() {
        let metrics = Metrics::new();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let writer = metrics.writer();
                std::thread::spawn(move || {
                    for _ in 0..1_000 {
                        writer.bump(Counter::SentBytes, 3);
                        writer.adjust(Gauge::Connections, 1);
                    }
                    writer.adjust(Gauge::Connections, -400);
                    writer.counted(Counter::SentBytes)
                })
            })
            .collect();
        let alone: Vec<u64> = threads.into_iter().map(|thread| thread.join().expect("joined")).collect();
        assert_eq!(alone, [3_000; 4]);
        metrics.bump(Counter::SentBytes, 1);
        metrics.set(Gauge::Connections, 5);
        assert_eq!(metrics.total(Counter::SentBytes), 12_001);
        assert_eq!(metrics.level(Gauge::Connections), 2_405);
        assert!(metrics.render().contains("forebay_serve_connections 2405\n"));
    }

    #[test]
    fn names_are_well_formed_and_unique() {
        let rows = || Counter::ROWS.iter().chain(Gauge::ROWS);
        let names: HashSet<&str> = rows().map(|row| row.name).collect();
        assert_eq!(names.len(), rows().count());
        for row in rows() {
            assert!(row.name.starts_with("forebay_") && row.name.split('_').count() >= 3, "{}", row.name);
            assert!(row.help.ends_with('.') || row.help.ends_with(';'), "{}", row.help);
        }
        assert!(Counter::ROWS.iter().all(|row| row.name.ends_with("_total")));
        assert!(Gauge::ROWS.iter().all(|row| !row.name.ends_with("_total")));
    }

    #[test]
    fn classes_hold_what_they_say() {
        assert_eq!(StatusClass::of(206), StatusClass::Success);
        assert_eq!(StatusClass::of(304), StatusClass::Redirect);
        assert_eq!(StatusClass::of(416), StatusClass::Caller);
        assert_eq!(StatusClass::of(503), StatusClass::Ours);
    }

    #[test]
    fn the_page_in_docs_is_up_to_date() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
        if std::env::var_os("FOREBAY_REFRESH").is_some() {
            std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")).expect("docs/");
            std::fs::write(page, documentation()).expect("docs/metrics.md");
        }
        let written = std::fs::read_to_string(page).unwrap_or_default();
        assert!(written == documentation(), "docs/metrics.md is stale: run this test with FOREBAY_REFRESH=1");
    }
}
