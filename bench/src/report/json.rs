//! The result as JSON, schema `forebay-bench.result/1`: additive changes only.
//!
//! Integers in microseconds and bytes, units in names, `null` for what cannot be said and no key for what was not
//! looked at. Histograms are always there, so that anything can be recomputed and merged.
#![forbid(unsafe_code)]

use super::{Ratios, Run, delta_pct, notes};
use crate::document;
use crate::recorder::{Block, Metric, Window};
use crate::run::{CacheState, Outcome};
use crate::statistics::{Ratio, bins};
use crate::workloads::Row;
use base64::Engine as _;
use hdrhistogram::serialization::{Serializer, V2DeflateSerializer};
use serde_json::{Map, Value, json};

/// The schema's name.
pub const SCHEMA: &str = "forebay-bench.result/1";

/// The whole run.
pub fn render(run: &Run) -> Value {
    let reasons = run.invalid_reasons();
    let mut environment = run.environment.to_json();
    if let Some(core) = run.client_core {
        environment.insert("pinning".to_owned(), json!({ "client": [core] }));
    }
    json!({
        "schema": SCHEMA,
        "tool": { "name": "forebay-bench", "version": env!("CARGO_PKG_VERSION") },
        "argv": run.argv,
        "started": run.started,
        "finished": run.finished,
        "seed": run.seed,
        "valid": reasons.is_empty(),
        "invalid_reasons": reasons,
        "environment": environment,
        "origin": origin(run),
        "direct_url": run.direct_url,
        "accel_url": run.accel_url,
        "workloads": run.outcomes.iter().map(|outcome| workload(run, outcome)).collect::<Vec<_>>(),
    })
}

fn origin(run: &Run) -> Value {
    let Some(profile) = run.outcomes.iter().find_map(|outcome| outcome.profile.as_ref()) else {
        return json!({ "kind": "real" });
    };
    json!({
        "kind": "emulated",
        "profile": profile.name,
        "sha256": profile.sha256,
        "seed": profile.seed,
        "params": profile.params,
    })
}

fn workload(run: &Run, outcome: &Outcome) -> Value {
    let plan = &outcome.workload;
    let ratios = Ratios::of(outcome, run.seed);
    let side = |blocks: &[Block], merged: &Block| {
        json!({
            "blocks": blocks.iter().enumerate().map(|(at, one)| block(outcome, at, one)).collect::<Vec<_>>(),
            "merged": block(outcome, 0, merged),
        })
    };
    let (direct, accel) = (outcome.merged_direct(), outcome.merged_accel());
    let mut value = json!({
        "name": plan.row.name(),
        "doc_section": plan.row.section(),
        "scale": number(Some(plan.scale)),
        "params": {
            "objects": plan.objects, "count": plan.count, "size": plan.size, "size_dist": "fixed",
            "concurrency": plan.concurrency, "loop": "closed", "rate": null,
            "list": if plan.lists() { "before" } else { "none" },
            "sink": "null",
            "verify": match outcome.verify { crate::client::Verify::Full => "full", crate::client::Verify::Length => "length" },
            "cache": match outcome.cache { CacheState::Warm => "warm", CacheState::AsIs => "as-is" },
        },
        "sides": { "direct": side(&outcome.direct, &direct), "accel": side(&outcome.accel, &accel) },
        "ratio": {
            "latency_mean": ratio(&ratios.latency_mean), "latency_mean_tool": ratio(&ratios.latency_tool),
            "latency_p50": ratio(&ratios.latency_p50), "latency_p90": ratio(&ratios.latency_p90),
            "latency_p95": ratio(&ratios.latency_p95), "latency_p99": ratio(&ratios.latency_p99),
            "qps": ratio(&ratios.qps), "bandwidth": ratio(&ratios.bandwidth),
        },
        "doc": doc(outcome, &direct),
        "notes": notes(outcome),
    });
    if let Some(cold) = &outcome.cold {
        value["cold"] = block(outcome, 0, cold);
    }
    if let Some(warm) = &outcome.warm_origin {
        value["origin_during_accel"] =
            json!({ "requests": warm.requests, "requests_total": warm.total(), "bytes": warm.bytes });
    }
    if let Some(lateness) = &outcome.lateness {
        value["origin_lateness_us"] = json!(lateness);
    }
    if let Some(delayed) = outcome.qos_delayed {
        value["origin_qos_delayed"] = json!(delayed);
    }
    if let Some(bytes) = outcome.origin_bytes {
        value["origin_bytes_served"] = json!(bytes);
    }
    if plan.lists() {
        value["accel_answers_listings"] = json!(outcome.accel_lists);
    }
    value
}

fn block(outcome: &Outcome, at: usize, block: &Block) -> Value {
    let mut metrics = Map::new();
    for (name, one) in [
        ("latency_us", &block.latency),
        ("ttfb_us", &block.ttfb),
        ("ttfh_us", &block.ttfh),
        ("transfer_us", &block.transfer),
        ("connect_us", &block.connect),
    ] {
        metrics.insert(name.to_owned(), metric(one));
    }
    let expected = outcome.workload.concurrency as f64;
    let mut http = json!({ "GET": block.statuses });
    if block.list_pages > 0 {
        http["LIST"] = json!({ "200": block.list_pages });
    }
    json!({
        "idx": at,
        "dur_s": number(Some(block.transfer_window.seconds)),
        "ops": block.ops,
        "bytes": block.bytes,
        "errors": block.errors,
        "verify_failures": block.verify_failures,
        "failures": block.failures,
        "http": http,
        "new_connections": block.connections,
        "windows": {
            "tool": window(&block.tool_window()),
            "xfer": window(&block.transfer_window),
            "steady": window(&block.steady_window),
        },
        "metrics": metrics,
        "little": {
            "L": number(block.little()), "expected": expected,
            "ok": block.little().map(|little| (little / expected - 1.0).abs() <= 0.05),
        },
        "series_1s": block.series.iter().enumerate().map(|(t, second)| json!({
            "t": t, "ops": second.ops, "mib": number(Some(second.bytes as f64 / crate::units::MIB)),
            "p50_us": second.p50_us, "p99_us": second.p99_us, "err": second.errors,
        })).collect::<Vec<_>>(),
        "client": {
            "cpu_pct": number(block.client_cpu().map(|share| share * 100.0)),
            "run_delay_ms": number(Some(block.client_wait_seconds * 1000.0)),
            "bound": block.client_cpu().map(|share| share >= 0.85),
        },
        "cache": {
            "hit_ratio": number(block.hit_share()),
            "answers": block.cache.iter().map(|(word, count)| (word.word().to_owned(), json!(count))).collect::<Map<_, _>>(),
        },
        "qos_delayed": block.qos_delayed,
        "steady": { "ok": block.is_steady() },
    })
}

fn window(window: &Window) -> Value {
    json!({ "s": number(Some(window.seconds)), "qps": number(window.qps()), "mib_s": number(window.mib_s()) })
}

fn metric(metric: &Metric) -> Value {
    let mut out = Map::new();
    out.insert("n".to_owned(), json!(metric.n()));
    if metric.n() == 0 {
        return Value::Object(out);
    }
    let us = |ms: Option<f64>| number(ms.map(|ms| (ms * 1e4).round() / 10.0));
    let histogram = metric.histogram();
    out.insert("mean".to_owned(), us(metric.mean_ms()));
    out.insert("mean_tool_ms".to_owned(), number(metric.mean_tool_ms()));
    out.insert("sd".to_owned(), us(metric.deviation_ms()));
    out.insert("min".to_owned(), json!(histogram.min()));
    out.insert("max".to_owned(), json!(histogram.max()));
    for (name, q) in [
        ("p25", 0.25),
        ("p50", 0.5),
        ("p75", 0.75),
        ("p90", 0.9),
        ("p95", 0.95),
        ("p99", 0.99),
        ("p99_9", 0.999),
    ] {
        if metric.percentile_ms(q).is_some() {
            out.insert(name.to_owned(), json!(histogram.value_at_quantile(q)));
        }
    }
    let mut raw = Vec::new();
    if V2DeflateSerializer::new().serialize(histogram, &mut raw).is_ok() {
        out.insert("hdr_v2_deflate".to_owned(), json!(base64::engine::general_purpose::STANDARD.encode(raw)));
    }
    out.insert(
        "bins".to_owned(),
        json!(bins(histogram).iter().map(|(upper, count)| [*upper, *count]).collect::<Vec<_>>()),
    );
    Value::Object(out)
}

fn ratio(ratio: &Ratio) -> Value {
    json!({
        "est": number(ratio.estimate),
        "ci95": ratio.interval.map(|[low, high]| [number(Some(low)), number(Some(high))]),
        "pairs": ratio.pairs,
    })
}

fn doc(outcome: &Outcome, direct: &Block) -> Value {
    match outcome.workload.row {
        Row::Bulk => {
            let row = |row: document::BulkRow| json!({ "latency_ms": row.latency_ms, "qps": row.qps, "bw_mb_s": row.bandwidth });
            let (a, b) = (document::BULK_DIRECT, document::BULK_ACCEL);
            json!({
                "direct": row(a),
                "accel": row(b),
                "ratio": { "latency": number(Some(a.latency_ms / b.latency_ms)), "qps": number(Some(b.qps / a.qps)),
                           "bandwidth": number(Some(b.bandwidth / a.bandwidth)) },
                "delta_direct_pct": {
                    "latency": number(delta_pct(direct.latency.mean_tool_ms(), a.latency_ms)),
                    "qps": number(delta_pct(direct.tool_window().qps(), a.qps)),
                    "bandwidth": number(delta_pct(direct.transfer_window.mib_s(), a.bandwidth)),
                },
            })
        }
        Row::Download => {
            let names = ["mean", "p50", "p90", "p95", "p99"];
            let row = |values: [f64; 5]| {
                names
                    .iter()
                    .zip(values)
                    .map(|(name, value)| ((*name).to_owned(), json!(value)))
                    .collect::<Map<_, _>>()
            };
            let figures = super::text::download_figures(&direct.latency);
            let deltas = names.iter().zip(figures).zip(document::DOWNLOAD_DIRECT_MS);
            json!({
                "direct_ms": row(document::DOWNLOAD_DIRECT_MS),
                "accel_ms": row(document::DOWNLOAD_ACCEL_MS),
                "delta_direct_pct": deltas.map(|((name, run), doc)| ((*name).to_owned(), number(delta_pct(run, doc)))).collect::<Map<_, _>>(),
            })
        }
    }
}

// Four significant decimals are more than any figure here is worth; what is no number is null.
fn number(value: Option<f64>) -> Value {
    match value {
        Some(value) if value.is_finite() => json!((value * 1e6).round() / 1e6),
        _ => Value::Null,
    }
}
