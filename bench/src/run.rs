//! One workload from the first declaration to the last block: cold pass, then A B B A … with every pair kept.
//!
//! A is the store itself, B goes through the accelerator. What the origin's counters say is read around each warm
//! transfer, so "warm" is the origin's word and not only the node's.
#![forbid(unsafe_code)]

use crate::client::lanes::{self, EtagLedger, Job, Part};
use crate::client::plain::{OriginDoor, ProfileText, list_path, parse_page, request};
use crate::client::signing::KeySigner;
use crate::client::{Target, Verify};
use crate::clock::{SECOND_NS, now_ns};
use crate::origin::stats::{Counts, Lateness};
use crate::recorder::Block;
use crate::workloads::Workload;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What state the accelerator must be in for its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CacheState {
    /// One pass before, reported as its own row; then no request may reach the origin.
    Warm,
    /// Whatever it is; nothing is demanded of it.
    AsIs,
}

/// Who is measured and how.
pub struct Setup<'a> {
    /// Side A.
    pub direct: Target,
    /// Side B.
    pub accel: Target,
    /// The emulator's own door, if the origin is emulated.
    pub door: Option<OriginDoor>,
    /// Pairs.
    pub rounds: u32,
    /// How much of each answer is checked.
    pub verify: Verify,
    /// What is demanded of B.
    pub cache: CacheState,
    /// Signs requests, if wanted.
    pub signer: Option<KeySigner>,
    /// The longest a request may take.
    pub timeout: Duration,
    /// Set by a signal.
    pub stop: &'a AtomicBool,
    /// Whether lines are written to standard error.
    pub progress: bool,
}

/// What a workload gave.
pub struct Outcome {
    /// What was asked for.
    pub workload: Workload,
    /// The pass through a cold accelerator.
    pub cold: Option<Block>,
    /// Blocks by side, in the order they ran.
    pub direct: Vec<Block>,
    /// The same of B; as many.
    pub accel: Vec<Block>,
    /// What reached the origin during the transfers of B; known when it is emulated.
    pub warm_origin: Option<OriginUse>,
    /// The emulator's lateness over all blocks.
    pub lateness: Option<Lateness>,
    /// Responses that the origin's cap or request limit delayed, over all blocks.
    pub qos_delayed: Option<u64>,
    /// Body bytes that the origin sent, over everything.
    pub origin_bytes: Option<u64>,
    /// The profile in force.
    pub profile: Option<ProfileText>,
    /// Whether B answered listings itself.
    pub accel_lists: bool,
    /// What was demanded of B.
    pub cache: CacheState,
    /// How much was checked.
    pub verify: Verify,
}

/// Requests that reached the origin in some span.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OriginUse {
    /// By method.
    pub requests: BTreeMap<String, u64>,
    /// Body bytes.
    pub bytes: u64,
}

impl OriginUse {
    /// All methods.
    pub fn total(&self) -> u64 {
        self.requests.values().sum()
    }

    fn add(&mut self, before: &Counts, after: &Counts) {
        for (method, statuses) in &after.by_method {
            let earlier: u64 = before.by_method.get(method).map_or(0, |statuses| statuses.values().sum());
            let more = statuses.values().sum::<u64>() - earlier;
            if more > 0 {
                *self.requests.entry(method.clone()).or_default() += more;
            }
        }
        self.bytes += after.bytes_served - before.bytes_served;
    }
}

impl Outcome {
    /// All blocks of A.
    pub fn merged_direct(&self) -> Block {
        merged(&self.direct)
    }

    /// All blocks of B.
    pub fn merged_accel(&self) -> Block {
        merged(&self.accel)
    }

    /// Verification failures, the cold pass included.
    pub fn verify_failures(&self) -> u64 {
        self.all_blocks().map(|block| block.verify_failures).sum()
    }

    /// Errors, the cold pass included.
    pub fn errors(&self) -> u64 {
        self.all_blocks().map(Block::error_count).sum()
    }

    /// Every block there is.
    pub fn all_blocks(&self) -> impl Iterator<Item = &Block> {
        self.cold.iter().chain(&self.direct).chain(&self.accel)
    }

    /// Why these figures prove nothing, if they do not.
    pub fn invalid_reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        let name = self.workload.row.name();
        let direct = self.merged_direct();
        if let (Some(lateness), Some(p50_ms)) = (&self.lateness, direct.latency.percentile_ms(0.5))
            && let Some(p99_us) = lateness.p99
            && p99_us as f64 > (p50_ms * 1000.0 * 0.02).max(500.0)
        {
            reasons.push(format!(
                "{name}: the emulator was late (P99 {p99_us} us), so the direct column is slower than its model; \
                 give it a quieter core"
            ));
        }
        if self.cache == CacheState::Warm {
            if let Some(origin) = &self.warm_origin
                && origin.total() > 0
            {
                reasons.push(format!(
                    "{name}: not warm: {} requests reached the origin during B ({:?})",
                    origin.total(),
                    origin.requests
                ));
            }
            if let Some(share) = self.merged_accel().hit_share()
                && share < 0.99
            {
                reasons
                    .push(format!("{name}: not warm: the node says that {:.1} % were hits", share * 100.0));
            }
        }
        if let Some(cpu) = direct.client_cpu()
            && cpu >= 0.85
        {
            reasons.push(format!(
                "{name}: the client was the limit of the direct side ({:.0} % of its core)",
                cpu * 100.0
            ));
        }
        reasons
    }
}

/// Runs a workload.
///
/// # Errors
/// The emulator or a side cannot be reached, or a signal asked to stop. What goes wrong inside a block is counted
/// in the outcome.
pub fn run(setup: &Setup, workload: Workload) -> Result<Outcome> {
    let mut etags = EtagLedger::default();
    let profile = match &setup.door {
        Some(door) => {
            door.declare(&[workload.dataset(&setup.direct.bucket)])
                .context("declaring the dataset to the emulator")?;
            Some(door.profile().context("reading the emulator's profile")?)
        }
        None => None,
    };
    let mut outcome = Outcome {
        cold: None,
        direct: Vec::new(),
        accel: Vec::new(),
        warm_origin: setup.door.as_ref().map(|_| OriginUse::default()),
        lateness: None,
        qos_delayed: None,
        origin_bytes: None,
        profile,
        accel_lists: true,
        cache: setup.cache,
        verify: setup.verify,
        workload,
    };
    let workload = outcome.workload.clone();
    let signatures = match &setup.signer {
        Some(signer) => Some((
            signer.sign_objects(&setup.direct, &workload.prefix, workload.objects)?,
            signer.sign_objects(&setup.accel, &workload.prefix, workload.objects)?,
        )),
        None => None,
    };
    let job = |accel: bool, count: u64| Job {
        target: if accel { &setup.accel } else { &setup.direct },
        content_bucket: &setup.direct.bucket,
        prefix: &workload.prefix,
        objects: workload.objects,
        count,
        size: workload.size,
        version: 1,
        concurrency: workload.concurrency,
        verify: setup.verify,
        part: Part::Whole,
        first: 0,
        is_drawn: false,
        discard: false,
        needs_etag: true,
        headers: b"",
        signatures: signatures
            .as_ref()
            .map(|(direct, accel_lines)| if accel { accel_lines.as_slice() } else { direct.as_slice() }),
        timeout: setup.timeout,
    };
    if let Some(door) = &setup.door {
        door.reset()?;
    }
    if setup.cache == CacheState::Warm {
        let block = lanes::run(&job(true, workload.objects), &mut etags, setup.stop)
            .with_context(|| format!("asking {}", setup.accel.url))?;
        tell(setup, &workload, "B cold", 0, &block);
        let failed = block.error_count() + block.verify_failures > 0;
        outcome.cold = Some(block);
        if failed {
            return Ok(outcome); // what came after would not mean anything
        }
    }
    for round in 0..setup.rounds {
        // A B, B A, A B, …: a drift over the run falls on both sides alike.
        for accel in if round % 2 == 0 { [false, true] } else { [true, false] } {
            let target = if accel { &setup.accel } else { &setup.direct };
            let (list_seconds, list_pages) = if workload.lists() {
                list_names(setup, &workload, target, &mut outcome.accel_lists)?
            } else {
                (0.0, 0)
            };
            if let Some(door) = &setup.door {
                door.begin_round(round + 1).context("beginning a round at the emulator")?;
            }
            let before = counts(setup)?;
            let mut block = lanes::run(&job(accel, workload.count), &mut etags, setup.stop)
                .with_context(|| format!("asking {}", target.url))?;
            let after = counts(setup)?;
            block.list_seconds = list_seconds;
            block.list_pages = list_pages;
            tell(setup, &workload, if accel { "B" } else { "A" }, round + 1, &block);
            if accel {
                if let (Some(used), Some(before), Some(after)) = (&mut outcome.warm_origin, before, after) {
                    used.add(&before, &after);
                }
                outcome.accel.push(block);
            } else {
                outcome.direct.push(block);
            }
        }
    }
    if let Some(door) = &setup.door {
        let report = door.stats()?;
        outcome.lateness = Some(report.lateness_us);
        outcome.qos_delayed = Some(report.counts.qos_delayed);
        outcome.origin_bytes = Some(report.counts.bytes_served);
    }
    Ok(outcome)
}

fn counts(setup: &Setup) -> Result<Option<Counts>> {
    setup
        .door
        .as_ref()
        .map(|door| door.stats().map(|report| report.counts))
        .transpose()
        .context("reading the emulator's counters")
}

// All pages of names, as the document's tool reads them before it copies. Where the accelerator does not answer
// listings the store is asked instead, on both sides alike, and the report says so.
fn list_names(
    setup: &Setup,
    workload: &Workload,
    target: &Target,
    accel_lists: &mut bool,
) -> Result<(f64, u64)> {
    let asked_accel = target == &setup.accel && setup.accel != setup.direct;
    let target = if asked_accel && !*accel_lists { &setup.direct } else { target };
    let start = now_ns();
    let (mut names, mut pages, mut token) = (0_u64, 0, None::<String>);
    loop {
        let path = list_path(&target.bucket, &workload.prefix, token.as_deref());
        let lines = match &setup.signer {
            Some(signer) => signer.sign(target, "GET", &path)?,
            None => Box::default(),
        };
        let answer =
            request(target, "GET", &path, &lines, b"").with_context(|| format!("listing {}", target.url))?;
        if answer.status != 200 && asked_accel && *accel_lists && pages == 0 {
            *accel_lists = false;
            return list_names(setup, workload, &setup.accel, accel_lists);
        }
        if answer.status != 200 {
            bail!("listing {} answered {}", target.url, answer.status);
        }
        let page =
            parse_page(&answer.body).map_err(|error| anyhow::anyhow!("listing {}: {error}", target.url))?;
        names += page.objects.len() as u64;
        pages += 1;
        match page.next {
            Some(next) => token = Some(next),
            None => break,
        }
    }
    if names < workload.objects {
        bail!("{} lists {names} of {} objects under {}", target.url, workload.objects, workload.prefix);
    }
    Ok(((now_ns() - start) as f64 / SECOND_NS as f64, pages))
}

fn merged(blocks: &[Block]) -> Block {
    let mut all = Block::default();
    for block in blocks {
        all.merge(block);
    }
    all
}

fn tell(setup: &Setup, workload: &Workload, side: &str, round: u32, block: &Block) {
    if !setup.progress {
        return;
    }
    let place = if round == 0 { String::new() } else { format!(" {round}/{}", setup.rounds) };
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    eprintln!(
        "[{}] {side}{place}  {} op/s  {} MiB/s  mean {} ms  errors {}  wrong {}",
        workload.row.name(),
        figure(block.transfer_window.qps()),
        figure(block.transfer_window.mib_s()),
        block.latency.mean_ms().map_or("-".to_owned(), |mean| format!("{mean:.3}")),
        block.error_count(),
        block.verify_failures,
    );
}
