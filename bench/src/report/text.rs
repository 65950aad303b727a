//! The report for people: what it is worth first, then the document's tables with our columns beside them.
//!
//! Rows and columns have the document's names, order and precision. A figure that cannot be said is `-`.
#![forbid(unsafe_code)]

use super::{Ratios, Run, delta_pct, notes};
use crate::client::Verify;
use crate::document::{self, ACCEL_ROW, BulkRow, DIRECT_ROW};
use crate::recorder::{Block, CacheAnswer, Metric};
use crate::run::{CacheState, Outcome};
use crate::statistics::{PAIRS_MIN, Ratio, bins};
use crate::units::{grouped, size_text};
use crate::workloads::Row;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// The whole report.
pub fn render(run: &Run) -> String {
    let mut out = String::new();
    head(&mut out, run);
    for outcome in &run.outcomes {
        out.push('\n');
        section(&mut out, run, outcome);
    }
    foot(&mut out, run);
    out
}

/// The download table's figures of one side, ms: average, P50, P90, P95, P99.
pub fn download_figures(latency: &Metric) -> [Option<f64>; 5] {
    let [p50, p90, p95, p99] = [0.5, 0.9, 0.95, 0.99].map(|q| latency.percentile_ms(q));
    [latency.mean_ms(), p50, p90, p95, p99]
}

fn head(out: &mut String, run: &Run) {
    let environment = &run.environment;
    let reasons = run.invalid_reasons();
    let gib =
        environment.mem_bytes.map_or("? GB".to_owned(), |bytes| format!("{:.0} GB", bytes as f64 / 1e9));
    let _ = writeln!(
        out,
        "forebay-bench {}  {} cores, {gib}, kernel {}    run {} seed {}   {}",
        env!("CARGO_PKG_VERSION"),
        environment.cores,
        environment.kernel.as_deref().unwrap_or("?"),
        run.started,
        run.seed,
        if reasons.is_empty() { "VALID" } else { "INVALID" },
    );
    for reason in &reasons {
        let _ = writeln!(out, "INVALID: {reason}");
    }
    match run.outcomes.iter().find_map(|outcome| outcome.profile.as_ref()) {
        Some(profile) => {
            let cap = if profile.params.cap_mib_s > 0.0 {
                format!("cap {} MiB/s", profile.params.cap_mib_s)
            } else {
                "no cap".to_owned()
            };
            let late = run
                .outcomes
                .iter()
                .filter_map(|outcome| outcome.lateness.as_ref().and_then(|late| late.p99))
                .max();
            let late = late.map_or("-".to_owned(), |us| format!("{:.2} ms", us as f64 / 1000.0));
            let _ = writeln!(
                out,
                "ORIGIN: EMULATED profile={} sha256={}…   {cap}   lateness P99 {late}",
                profile.name,
                &profile.sha256[..12],
            );
            let params = serde_json::to_string(&profile.params).unwrap_or_default();
            let _ = writeln!(out, "        {params}");
        }
        None => {
            let _ = writeln!(
                out,
                "ORIGIN: {} (no emulator's door was named, so it is taken for a real store)",
                run.direct_url
            );
        }
    }
    let verify = match run.outcomes.first().map(|outcome| outcome.verify) {
        Some(Verify::Length) => "verify=length: BYTES NOT VERIFIED",
        _ => "verify=full, every byte",
    };
    let _ = writeln!(
        out,
        "CLIENT: closed loop; latency = service time, not corrected for coordinated omission; {verify}"
    );
    let rtt = environment.loopback_rtt_us.map_or("-".to_owned(), |(p50, _)| format!("{p50:.0} us"));
    let _ = writeln!(
        out,
        "LOOPBACK round trip {rtt}: not a network, which adds 300 to 1,000 us to every request of both sides"
    );
}

fn section(out: &mut String, run: &Run, outcome: &Outcome) {
    let plan = &outcome.workload;
    let ratios = Ratios::of(outcome, run.seed);
    let (direct, accel) = (outcome.merged_direct(), outcome.merged_accel());
    let _ = writeln!(
        out,
        "{}     {} x {}{}, {} at once, {} pairs A B B A",
        plan.row.section(),
        grouped(plan.count),
        size_text(plan.size),
        if plan.objects == plan.count {
            String::new()
        } else {
            format!(" from {} object(s)", grouped(plan.objects))
        },
        plan.concurrency,
        outcome.accel.len(),
    );
    match plan.row {
        Row::Bulk => bulk_table(out, &direct, &accel, &ratios),
        Row::Download => download_table(out, &direct, &accel, &ratios),
    }
    for (name, block) in [("direct", &direct), ("accel", &accel)] {
        let _ = writeln!(
            out,
            "  {name:<6}  mean {}  P50 {}  P90 {}  P95 {}  P99 {}  max {} ms (n={})   L {}/{}   client {} % of a core",
            ms(block.latency.mean_ms()),
            ms(block.latency.percentile_ms(0.5)),
            ms(block.latency.percentile_ms(0.9)),
            ms(block.latency.percentile_ms(0.95)),
            ms(block.latency.percentile_ms(0.99)),
            ms((block.latency.n() > 0).then(|| block.latency.histogram().max() as f64 / 1000.0)),
            grouped(block.latency.n()),
            figure(block.little(), 2),
            plan.concurrency,
            figure(block.client_cpu().map(|share| share * 100.0), 0),
        );
    }
    let _ = writeln!(
        out,
        "  windows op/s, direct: tool {} transfer {} steady {}; accel: tool {} transfer {} steady {}",
        figure(direct.tool_window().qps(), 1),
        figure(direct.transfer_window.qps(), 1),
        figure(direct.steady_window.qps(), 1),
        figure(accel.tool_window().qps(), 1),
        figure(accel.transfer_window.qps(), 1),
        figure(accel.steady_window.qps(), 1),
    );
    if let Some(cold) = &outcome.cold {
        let _ = writeln!(
            out,
            "  cold pass through the accelerator: {} op/s, mean {} ms, first body byte {} ms ({})",
            figure(cold.transfer_window.qps(), 1),
            ms(cold.latency.mean_ms()),
            ms(cold.ttfb.mean_ms()),
            cache_text(cold),
        );
    }
    let origin = match &outcome.warm_origin {
        Some(origin) => {
            format!("{} requests, {} bytes reached the origin", origin.total(), grouped(origin.bytes))
        }
        None => "origin not asked (real)".to_owned(),
    };
    let state = match outcome.cache {
        CacheState::Warm => "warm",
        CacheState::AsIs => "as it was",
    };
    let _ = writeln!(out, "  CACHE during B: {state}: {}; {origin}", cache_text(&accel));
    if plan.row == Row::Download {
        histogram(out, "direct", &direct.latency);
        histogram(out, "accel", &accel.latency);
    }
    if accel.client_cpu().is_some_and(|share| share >= 0.85) {
        let _ =
            writeln!(out, "  The client was the limit of the accelerated side: its ratio is a lower bound.");
    }
    if !outcome.accel_lists {
        let _ = writeln!(
            out,
            "  The accelerator does not answer listings: the listing in B's QPS window was read from the store."
        );
    }
    if outcome.qos_delayed.is_some_and(|delayed| delayed > 0) {
        let _ = writeln!(
            out,
            "  The origin's cap or request limit delayed {} responses.",
            outcome.qos_delayed.unwrap_or(0)
        );
    }
    if direct.is_steady() == Some(false)
        || outcome.direct.iter().any(|block| block.is_steady() == Some(false))
    {
        let _ = writeln!(
            out,
            "  Not every direct block was steady to 20 % by the second (few requests a second look like this too)."
        );
    }
    for block in outcome.all_blocks() {
        for failure in &block.failures {
            let _ = writeln!(out, "  WRONG: {failure}");
        }
        for (kind, count) in &block.errors {
            let _ = writeln!(out, "  ERROR: {count} x {kind}");
        }
    }
    let _ = writeln!(out, "  notes {}", notes(outcome).join(" "));
}

fn bulk_table(out: &mut String, direct: &Block, accel: &Block, ratios: &Ratios) {
    let _ = writeln!(out, "{:<30}| {:<26}| {:<26}| Bandwidth (MB/s)", "Item", "Average latency (ms)", "QPS");
    let columns = format!("{:>8} {:>9} {:>7} ", "doc", "run", "Δ%");
    let _ = writeln!(out, "{:<30}|{columns}|{columns}|{columns}", "");
    for (name, row, block) in
        [(DIRECT_ROW, document::BULK_DIRECT, direct), (ACCEL_ROW, document::BULK_ACCEL, accel)]
    {
        let BulkRow { latency_ms, qps, bandwidth } = row;
        let tool = block.latency.mean_tool_ms();
        // Below a millisecond the tool's whole milliseconds would read 0.00.
        let latency = if tool.is_some_and(|tool| tool < 0.1) { block.latency.mean_ms() } else { tool };
        let decimals = if latency.is_some_and(|latency| latency < 0.1) { 3 } else { 2 };
        let _ = writeln!(
            out,
            "{name:<30}|{}|{}|{}",
            cell(latency_ms, 2, latency, decimals),
            cell(qps, 0, block.tool_window().qps(), 1),
            cell(bandwidth, 2, block.transfer_window.mib_s(), 2),
        );
    }
    let doc = |a: f64, b: f64| format!("{:>7.2}x", a / b);
    let (a, b) = (document::BULK_DIRECT, document::BULK_ACCEL);
    let _ = writeln!(
        out,
        "{:<30}|{} {:<18}|{} {:<18}|{} {:<18}",
        "acceleration ratio",
        doc(a.latency_ms, b.latency_ms),
        ratio_text(&ratios.latency_mean),
        doc(b.qps, a.qps),
        ratio_text(&ratios.qps),
        doc(b.bandwidth, a.bandwidth),
        ratio_text(&ratios.bandwidth),
    );
    few_pairs(out, &ratios.qps);
    let _ = writeln!(
        out,
        "  latency column: mean of whole ms as the tool gives it (exact mean where that would be 0); its ratio: exact means"
    );
}

fn download_table(out: &mut String, direct: &Block, accel: &Block, ratios: &Ratios) {
    let _ = write!(out, "{:<32}", "Item                       (ms)");
    for column in document::DOWNLOAD_COLUMNS {
        let _ = write!(out, "|{column:>18} ");
    }
    out.push('\n');
    let sides = [
        (DIRECT_ROW, document::DOWNLOAD_DIRECT_MS, &direct.latency),
        (ACCEL_ROW, document::DOWNLOAD_ACCEL_MS, &accel.latency),
    ];
    for (name, doc, latency) in sides {
        let run = download_figures(latency);
        let mut line = |label: &str, values: [String; 5]| {
            let _ = write!(out, "{label:<32}");
            for value in values {
                let _ = write!(out, "|{value:>18} ");
            }
            out.push('\n');
        };
        line(&format!("{name:<28}doc"), doc.map(|value| format!("{value:.3}")));
        line(&format!("{:<28}run", ""), run.map(|value| figure(value, 3)));
        let mut deltas = [const { String::new() }; 5];
        for ((delta, run), doc) in deltas.iter_mut().zip(run).zip(doc) {
            *delta = signed(delta_pct(run, doc));
        }
        line(&format!("{:<28}Δ%", ""), deltas);
    }
    let columns =
        [ratios.latency_mean, ratios.latency_p50, ratios.latency_p90, ratios.latency_p95, ratios.latency_p99];
    let _ = write!(out, "{:<32}", "acceleration ratio          doc");
    for (a, b) in document::DOWNLOAD_DIRECT_MS.iter().zip(document::DOWNLOAD_ACCEL_MS) {
        let _ = write!(out, "|{:>17.2}x ", a / b);
    }
    let _ = write!(out, "\n{:<32}", "                            run");
    for ratio in &columns {
        let _ = write!(out, "|{:>18} ", ratio_text(ratio).trim());
    }
    out.push('\n');
    few_pairs(out, &ratios.latency_mean);
    let n = direct.latency.n().min(accel.latency.n());
    if n < 1000 {
        let _ = writeln!(
            out,
            "  P99 needs 1,000 downloads a side to have ten above it; this run has {n}, so it is left out"
        );
    }
}

fn few_pairs(out: &mut String, ratio: &Ratio) {
    if ratio.interval.is_none() {
        let _ = writeln!(out, "  {} pairs are too few for an interval (at least {PAIRS_MIN})", ratio.pairs);
    }
}

// The distribution as bars: modes that percentiles hide.
fn histogram(out: &mut String, name: &str, latency: &Metric) {
    let bins = bins(latency.histogram());
    let Some(most) = bins.iter().map(|bin| bin.1).max() else { return };
    let _ = write!(out, "  {name:<6}  histogram, ms:");
    for (upper_us, count) in bins.iter().filter(|bin| bin.1 * 50 >= most) {
        let level = (count * 8).div_ceil(most).clamp(1, 8) as usize;
        let bar = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][level];
        let _ = write!(out, " {}{bar}", short_ms(*upper_us));
    }
    out.push('\n');
}

fn short_ms(us: u64) -> String {
    if us < 10_000 { format!("{:.1}", us as f64 / 1000.0) } else { format!("{}", us / 1000) }
}

fn foot(out: &mut String, run: &Run) {
    let numbers: BTreeSet<&str> = run.outcomes.iter().flat_map(notes).collect();
    let mut numbers: Vec<&str> = numbers.into_iter().collect();
    numbers.sort_by_key(|number| number[1..].parse::<u32>().unwrap_or(0));
    out.push_str("\nNotes\n");
    for number in numbers {
        let _ = writeln!(out, "  {number}: {}", document::footnote(number));
    }
}

fn cache_text(block: &Block) -> String {
    let all: u64 = block.cache.values().sum();
    match block.hit_share() {
        Some(share) if all > 0 => {
            let mut out = format!("hit {:.1} %", share * 100.0);
            for word in [
                CacheAnswer::Ram,
                CacheAnswer::Drive,
                CacheAnswer::Miss,
                CacheAnswer::Partial,
                CacheAnswer::Bypass,
                CacheAnswer::Unsaid,
                CacheAnswer::Other,
            ] {
                let count = block.cache_count(word);
                if count > 0 {
                    let _ = write!(out, ", {} {:.1} %", word.word(), count as f64 * 100.0 / all as f64);
                }
            }
            out
        }
        _ => "hits unknown (no x-forebay-cache in the answers)".to_owned(),
    }
}

fn cell(doc: f64, doc_decimals: usize, run: Option<f64>, run_decimals: usize) -> String {
    format!("{doc:>8.doc_decimals$} {:>9} {:>7} ", figure(run, run_decimals), signed(delta_pct(run, doc)))
}

fn ratio_text(ratio: &Ratio) -> String {
    match (ratio.estimate, ratio.interval) {
        (Some(estimate), Some([low, high])) => {
            let decimals = if high < 10.0 { 2 } else { usize::from(high < 100.0) };
            format!("{estimate:.decimals$}x [{low:.decimals$}, {high:.decimals$}]")
        }
        (Some(estimate), None) => format!("{estimate:.2}x"),
        (None, _) => "-".to_owned(),
    }
}

fn ms(value: Option<f64>) -> String {
    figure(value, 3)
}

fn figure(value: Option<f64>, decimals: usize) -> String {
    match value {
        Some(value) if value.is_finite() => format!("{value:.decimals$}"),
        _ => "-".to_owned(),
    }
}

fn signed(value: Option<f64>) -> String {
    match value {
        Some(value) if value.is_finite() && value.abs() >= 1000.0 => format!("{value:+.0}"),
        Some(value) if value.is_finite() => format!("{value:+.1}"),
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Environment;
    use crate::recorder::Window;
    use crate::report::json;
    use crate::units::Scale;
    use crate::workloads::{Changes, Workload};

    fn run(row: Row, ops: u64) -> Run {
        let block = || {
            let mut block = Block { ops, bytes: ops * 102_400, ..Block::default() };
            for _ in 0..ops {
                block.latency.record(5_000_000);
                block.ttfb.record(4_000_000);
            }
            block.transfer_window = Window { seconds: ops as f64 * 0.005, ops, bytes: ops * 102_400 };
            block
        };
        let outcome = Outcome {
            workload: Workload::new(row, Scale::Small, Changes::default()).expect("valid"),
            cold: Some(block()),
            direct: vec![block()],
            accel: vec![block()],
            warm_origin: None,
            lateness: None,
            qos_delayed: None,
            origin_bytes: None,
            profile: None,
            accel_lists: true,
            cache: CacheState::Warm,
            verify: Verify::Full,
        };
        Run {
            argv: vec![],
            started: "then".into(),
            finished: "later".into(),
            seed: 1,
            environment: Environment::default(),
            client_core: None,
            direct_url: "http://a/b".into(),
            accel_url: "http://c/b".into(),
            outcomes: vec![outcome],
        }
    }

    #[test]
    fn nothing_one_or_two_requests_print_no_nan_and_no_infinity() {
        for row in [Row::Bulk, Row::Download] {
            for ops in [0, 1, 2, 50] {
                let run = run(row, ops);
                let text = render(&run);
                let written = json::render(&run).to_string();
                for bad in ["NaN", "nan", "inf", "Infinity"] {
                    assert!(!text.contains(bad), "{bad} in {text}");
                    assert!(!written.replace("null", "").contains(&format!(":{bad}")), "{bad} in {written}");
                }
                assert!(text.contains(DIRECT_ROW) && text.contains(ACCEL_ROW));
            }
        }
    }

    #[test]
    fn empty_runs_have_a_report_too() {
        let mut run = run(Row::Bulk, 3);
        run.outcomes[0].direct.clear();
        run.outcomes[0].accel.clear();
        assert!(render(&run).contains("acceleration ratio"));
        run.outcomes.clear();
        assert!(render(&run).contains("forebay-bench"));
        assert_eq!(run.exit_code(), 0);
    }

    #[test]
    fn the_exit_code_names_the_worst() {
        let mut run = run(Row::Bulk, 3);
        assert_eq!(run.exit_code(), 0);
        run.outcomes[0].accel[0].cache = [(CacheAnswer::Miss, 3)].into();
        assert_eq!(run.exit_code(), 4, "not warm");
        run.outcomes[0].direct[0].errors = [("status 503".to_owned(), 1)].into();
        assert_eq!(run.exit_code(), 1);
        run.outcomes[0].cold.as_mut().expect("there").verify_failures = 1;
        assert_eq!(run.exit_code(), 3);
        assert!(render(&run).contains("INVALID"));
    }

    #[test]
    fn percentiles_without_support_are_absent_from_json() {
        let written = json::render(&run(Row::Download, 50));
        let latency = &written["workloads"][0]["sides"]["direct"]["merged"]["metrics"]["latency_us"];
        assert_eq!(latency["n"], 50);
        assert!(latency.get("p75").is_some() && latency.get("p99").is_none());
        assert!(latency["hdr_v2_deflate"].as_str().is_some_and(|text| !text.is_empty()));
    }
}
