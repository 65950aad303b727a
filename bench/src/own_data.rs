//! `try`: the user's own objects, read from their store, cold through a node, and warm, with the bytes compared.
//!
//! No pattern and no emulator here, so hashes of the three passes stand in for verification, and the store's own
//! weather is part of the figures. It reads only, asks nothing, and stops at its caps.
#![forbid(unsafe_code)]

use crate::children::{NodePlan, Running, sibling, start_node};
use crate::client::plain::{list_path, parse_page};
use crate::clock::now_ns;
use crate::recorder::Metric;
use crate::units::{MIB, grouped, parse_size, size_text};
use anyhow::{Context as _, Result, anyhow, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqsign_aws_v4::{Credential, DefaultCredentialProvider, RequestSigner};
use reqsign_core::{Context, HttpSend, OsEnv, Signer};
use reqsign_file_read_tokio::TokioFileRead;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use twox_hash::xxhash3_64::Hasher;

/// What of whose data is read.
#[derive(clap::Args, Clone, Debug)]
pub struct TryArgs {
    /// What to read: `s3://bucket` or `s3://bucket/prefix`
    #[arg(value_name = "S3_URL")]
    pub source: String,
    /// The store [default: AWS in the region], for example `http://127.0.0.1:9000`
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Its region
    #[arg(long, env = "AWS_REGION", default_value = "us-east-1")]
    pub region: String,
    /// A running node that serves this bucket, http://host:port/bucket; several may be given. Without one, a node
    /// is started for the time of the trial.
    #[arg(long, value_name = "URL")]
    pub accel: Vec<String>,
    /// Read at most this much
    #[arg(long, default_value = "1GiB", value_parser = parse_size)]
    pub max_bytes: u64,
    /// Read at most so many objects
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub max_objects: usize,
    /// Requests under way at once
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub concurrency: u16,
    /// How long the started node may serve without asking the store: strict, ttl:D or immutable
    #[arg(long, default_value = "ttl:600s")]
    pub freshness: String,
    /// How the started node does its I/O: auto, uring or portable
    #[arg(long, default_value = "auto", value_parser = ["auto", "uring", "portable"])]
    pub engine: String,
}

/// Runs the trial; the exit code.
///
/// # Errors
/// The store or the node cannot be reached, there is nothing to read, or no credentials are found.
pub fn try_own_data(args: &TryArgs, stop: &'static AtomicBool) -> Result<u8> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    let (bucket, prefix) = args
        .source
        .strip_prefix("s3://")
        .map(|rest| rest.split_once('/').unwrap_or((rest, "")))
        .filter(|(bucket, _)| !bucket.is_empty())
        .ok_or_else(|| anyhow!("`{}` is not s3://bucket or s3://bucket/prefix", args.source))?;
    let endpoint =
        args.endpoint.clone().unwrap_or_else(|| format!("https://s3.{}.amazonaws.com", args.region));
    let endpoint = endpoint.trim_end_matches('/').to_owned();
    let door = Door::new(&args.region)?;
    let plan = runtime.block_on(choose(&door, &endpoint, bucket, prefix, args, stop))?;
    if plan.objects.is_empty() {
        bail!(
            "nothing to read: {} objects under {}, {} of them above --max-bytes {}",
            plan.listed,
            args.source,
            plan.too_large,
            args.max_bytes
        );
    }
    let total: u64 = plan.objects.iter().map(|object| object.size).sum();
    println!(
        "{}: {} objects, {:.1} MiB, {} at once{}",
        args.source,
        grouped(plan.objects.len() as u64),
        total as f64 / MIB,
        args.concurrency,
        if plan.capped {
            format!(
                "   (capped at {} and {} objects)",
                size_text(args.max_bytes),
                grouped(args.max_objects as u64)
            )
        } else {
            String::new()
        },
    );
    let node =
        if args.accel.is_empty() { Some(trial_node(args, bucket, &endpoint, total, stop)?) } else { None };
    let mut sides = args.accel.clone();
    sides.extend(node.as_ref().map(|node| node.url.clone()));

    let plan = Arc::new(plan);
    let direct_url = format!("{endpoint}/{bucket}");
    let passes = runtime.block_on(async {
        let mut passes = Vec::new();
        passes.push(pass(&door, "direct", &direct_url, true, &plan, args.concurrency, stop).await?);
        for (at, side) in sides.iter().enumerate() {
            let number = if sides.len() > 1 { format!(" {}", at + 1) } else { String::new() };
            for state in ["cold", "warm"] {
                let name = format!("node{number}, {state}");
                passes.push(
                    pass(&door, &name, side.trim_end_matches('/'), false, &plan, args.concurrency, stop)
                        .await?,
                );
            }
        }
        anyhow::Ok(passes)
    })?;
    drop(node);
    print!("{}", table(&passes));
    Ok(judge(&plan, &passes))
}

struct Object {
    key: String,
    size: u64,
}

struct Plan {
    objects: Vec<Object>,
    listed: u64,
    too_large: u64,
    capped: bool,
}

// Objects in listing order until a cap; one that does not fit any more is passed over.
async fn choose(
    door: &Door,
    endpoint: &str,
    bucket: &str,
    prefix: &str,
    args: &TryArgs,
    stop: &AtomicBool,
) -> Result<Plan> {
    let mut plan = Plan { objects: Vec::new(), listed: 0, too_large: 0, capped: false };
    let (mut left, mut token) = (args.max_bytes, None::<String>);
    loop {
        let url = format!("{endpoint}{}", list_path(bucket, prefix, token.as_deref()));
        let answer = door.get(&url, true).await.with_context(|| format!("listing {}", args.source))?;
        if answer.status != 200 {
            let said = String::from_utf8_lossy(&answer.body[..answer.body.len().min(400)]).into_owned();
            bail!("listing {} at {endpoint} answered {}: {said}", args.source, answer.status);
        }
        let page = parse_page(&answer.body).map_err(|error| anyhow!("listing {}: {error}", args.source))?;
        for (key, size) in page.objects {
            plan.listed += 1;
            if size > left {
                plan.too_large += 1;
                plan.capped = true;
            } else if plan.objects.len() < args.max_objects {
                left -= size;
                plan.objects.push(Object { key, size });
            } else {
                plan.capped = true;
            }
        }
        token = page.next;
        // A bucket of millions is not listed to its end for a trial of a thousand.
        let enough =
            plan.objects.len() >= args.max_objects || plan.listed > 20 * args.max_objects as u64 + 1000;
        plan.capped |= enough && token.is_some();
        if token.is_none() || enough || stop.load(Ordering::Relaxed) {
            return Ok(plan);
        }
    }
}

struct Node {
    url: String,
    // In the order of dropping: the node ends before its files go.
    _running: Running,
    _folder: tempfile::TempDir,
}

fn trial_node(args: &TryArgs, bucket: &str, endpoint: &str, total: u64, stop: &AtomicBool) -> Result<Node> {
    let program = sibling("forebay-node", "forebay-dataplane", stop)?;
    let folder =
        tempfile::Builder::new().prefix("forebay-try-").tempdir().context("making a folder for the node")?;
    let plan = NodePlan {
        program: &program,
        cores: "auto".to_owned(),
        memory: "512MiB",
        // Twice the data, in whole segments: nothing is evicted between the passes.
        drive_bytes: (2 * total).div_ceil(64 << 20).max(8) * (64 << 20),
        serves: vec![
            "--accelerator".into(),
            format!(
                "{bucket}=s3://{bucket},endpoint={endpoint},region={},freshness={}",
                args.region, args.freshness
            )
            .into(),
        ],
        engine: &args.engine,
        folder: folder.path(),
    };
    let (running, url) = start_node(&plan, stop)?;
    Ok(Node { url: format!("{url}/{bucket}"), _running: running, _folder: folder })
}

struct Pass {
    name: String,
    latency: Metric,
    first_byte: Metric,
    bytes: u64,
    seconds: f64,
    answers: BTreeMap<String, u64>,
    // By object: hash of the body and ETag.
    seen: BTreeMap<usize, (u64, String)>,
    errors: BTreeMap<String, u64>,
}

async fn pass(
    door: &Door,
    name: &str,
    url: &str,
    signed: bool,
    plan: &Arc<Plan>,
    concurrency: u16,
    stop: &'static AtomicBool,
) -> Result<Pass> {
    let pass = Arc::new(Mutex::new(Pass {
        name: name.to_owned(),
        latency: Metric::default(),
        first_byte: Metric::default(),
        bytes: 0,
        seconds: 0.0,
        answers: BTreeMap::new(),
        seen: BTreeMap::new(),
        errors: BTreeMap::new(),
    }));
    let next = Arc::new(AtomicUsize::new(0));
    let start = now_ns();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..concurrency {
        let (door, plan, pass, next, url) =
            (door.clone(), Arc::clone(plan), Arc::clone(&pass), Arc::clone(&next), url.to_owned());
        workers.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(object) = plan.objects.get(at) else { return };
                let answer =
                    door.get(&format!("{url}/{}", utf8_percent_encode(&object.key, PATH)), signed).await;
                let mut pass = pass.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                match answer {
                    Ok(answer) if answer.status == 200 && answer.length == object.size => {
                        pass.latency.record(answer.latency_ns);
                        pass.first_byte.record(answer.first_byte_ns);
                        pass.bytes += answer.length;
                        *pass.answers.entry(answer.cache).or_default() += 1;
                        pass.seen.insert(at, (answer.hash, answer.etag));
                    }
                    Ok(answer) if answer.status == 200 => {
                        *pass
                            .errors
                            .entry(format!("{} bytes instead of {}", answer.length, object.size))
                            .or_default() += 1;
                    }
                    Ok(answer) => *pass.errors.entry(format!("status {}", answer.status)).or_default() += 1,
                    Err(error) => *pass.errors.entry(format!("{error:#}")).or_default() += 1,
                }
            }
        });
    }
    while let Some(done) = workers.join_next().await {
        done.context("a reader of the trial")?;
    }
    if stop.load(Ordering::Relaxed) {
        bail!("stopped by a signal");
    }
    let mut pass = Arc::into_inner(pass)
        .ok_or_else(|| anyhow!("a reader of the trial is still there"))?
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    pass.seconds = (now_ns() - start) as f64 / 1e9;
    Ok(pass)
}

fn table(passes: &[Pass]) -> String {
    let figure = |value: Option<f64>, decimals: usize| {
        value.map_or("-".to_owned(), |value| format!("{value:.decimals$}"))
    };
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<16}|{:>10} |{:>10} |{:>10} |{:>14} |{:>10} |{:>8} | answers",
        "Item", "mean (ms)", "P50", "P99", "first byte", "MiB/s", "ratio"
    );
    let direct = passes.first().and_then(|pass| pass.latency.mean_ms());
    for pass in passes {
        let mean = pass.latency.mean_ms();
        let ratio = match (direct, mean) {
            (Some(direct), Some(mean)) if mean > 0.0 => format!("{:.2}x", direct / mean),
            _ => "-".to_owned(),
        };
        let rate = (pass.seconds > 0.0).then(|| pass.bytes as f64 / MIB / pass.seconds);
        let answers: Vec<String> =
            pass.answers.iter().map(|(word, count)| format!("{word} {count}")).collect();
        let _ = writeln!(
            out,
            "{:<16}|{:>10} |{:>10} |{:>10} |{:>14} |{:>10} |{ratio:>8} | {}",
            pass.name,
            figure(mean, 3),
            figure(pass.latency.percentile_ms(0.5), 3),
            figure(pass.latency.percentile_ms(0.99), 3),
            figure(pass.first_byte.mean_ms(), 3),
            figure(rate, 1),
            answers.join(", "),
        );
        for (error, count) in &pass.errors {
            let _ = writeln!(out, "  ERROR: {count} x {error}");
        }
    }
    out
}

// Says whether all passes saw the same bytes; the exit code.
fn judge(plan: &Plan, passes: &[Pass]) -> u8 {
    let errors: u64 = passes.iter().flat_map(|pass| pass.errors.values()).sum();
    let (mut compared, mut different) = (0, 0);
    for (at, object) in plan.objects.iter().enumerate() {
        let seen: Vec<&(u64, String)> = passes.iter().filter_map(|pass| pass.seen.get(&at)).collect();
        let [first, rest @ ..] = &seen[..] else { continue };
        compared += usize::from(seen.len() == passes.len());
        if rest.iter().any(|one| one.0 != first.0) {
            different += 1;
            let changed = rest.iter().any(|one| one.1 != first.1);
            let why = if changed {
                "its ETag differs too: it was changed meanwhile"
            } else {
                "under the same ETag"
            };
            println!("WRONG: {} has other bytes in another pass, {why}", object.key);
        }
    }
    println!(
        "{compared} of {} objects were read in every pass and compared by hash: {}",
        plan.objects.len(),
        if different == 0 { "all equal".to_owned() } else { format!("{different} DIFFERENT") }
    );
    if different > 0 { 3 } else { u8::from(errors > 0) }
}

const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

type Https = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

// An HTTP(S) client and the signer of the standard credential chain.
#[derive(Clone)]
struct Door {
    client: Https,
    signer: Signer<Credential>,
}

struct Got {
    status: u16,
    length: u64,
    hash: u64,
    etag: String,
    cache: String,
    latency_ns: u64,
    first_byte_ns: u64,
    // Kept only for answers that are read as text: listings and errors.
    body: Vec<u8>,
}

const TEXT_BYTES_MAX: usize = 16 << 20;
const ANSWER_TIMEOUT: Duration = Duration::from_mins(2);
const CREDENTIALS_TIMEOUT: Duration = Duration::from_secs(15);

impl Door {
    fn new(region: &str) -> Result<Self> {
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_native_roots()
            .context("reading this system's certificate authorities")?
            .https_or_http()
            .enable_http1()
            .build();
        let client: Https = Client::builder(TokioExecutor::new()).build(connector);
        let context = Context::new()
            .with_file_read(TokioFileRead)
            .with_http_send(CredentialHttp { client: client.clone() })
            .with_env(OsEnv);
        let signer = Signer::new(context, DefaultCredentialProvider::new(), RequestSigner::new("s3", region));
        Ok(Self { client, signer })
    }

    async fn get(&self, url: &str, signed: bool) -> Result<Got> {
        let (mut parts, ()) =
            http::Request::get(url).body(()).with_context(|| format!("`{url}`"))?.into_parts();
        if signed {
            let signing = tokio::time::timeout(CREDENTIALS_TIMEOUT, self.signer.sign(&mut parts, None)).await;
            let remedy =
                "finding AWS credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE";
            signing.context(remedy)?.context(remedy)?;
        }
        let request = http::Request::from_parts(parts, Full::new(Bytes::new()));
        tokio::time::timeout(ANSWER_TIMEOUT, self.read(request))
            .await
            .context("no whole answer in two minutes")?
    }

    async fn read(&self, request: http::Request<Full<Bytes>>) -> Result<Got> {
        let start = now_ns();
        let response = self.client.request(request).await.context("asking")?;
        let header = |name: &str| {
            response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let mut got = Got {
            status: response.status().as_u16(),
            length: 0,
            hash: 0,
            etag: header("etag"),
            cache: Some(header("x-forebay-cache"))
                .filter(|word| !word.is_empty())
                .unwrap_or("unsaid".to_owned()),
            latency_ns: 0,
            first_byte_ns: 0,
            body: Vec::new(),
        };
        let text = got.status != 200 || header("content-type").contains("xml");
        let mut body = response.into_body();
        let mut hasher = Hasher::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.context("reading a body")?.into_data() else { continue };
            if got.first_byte_ns == 0 {
                got.first_byte_ns = now_ns() - start;
            }
            got.length += data.len() as u64;
            std::hash::Hasher::write(&mut hasher, &data);
            if text && got.body.len() < TEXT_BYTES_MAX {
                got.body.extend_from_slice(&data);
            }
        }
        got.latency_ns = now_ns() - start;
        if got.first_byte_ns == 0 {
            got.first_byte_ns = got.latency_ns;
        }
        got.hash = std::hash::Hasher::finish(&hasher);
        Ok(got)
    }
}

// What the credential chain needs to ask instance metadata and token services.
#[derive(Clone, Debug)]
struct CredentialHttp {
    client: Https,
}

impl HttpSend for CredentialHttp {
    async fn http_send(&self, request: http::Request<Bytes>) -> reqsign_core::Result<http::Response<Bytes>> {
        let failed = |error: &dyn std::fmt::Display| {
            reqsign_core::Error::unexpected(format!("asking for credentials: {error}"))
        };
        let response = self.client.request(request.map(Full::new)).await.map_err(|error| failed(&error))?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| failed(&error))?.to_bytes();
        Ok(http::Response::from_parts(parts, body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass_with(bodies: &[(u64, &str)]) -> Pass {
        Pass {
            name: "p".into(),
            latency: Metric::default(),
            first_byte: Metric::default(),
            bytes: 0,
            seconds: 0.0,
            answers: BTreeMap::new(),
            seen: bodies
                .iter()
                .enumerate()
                .map(|(at, (hash, etag))| (at, (*hash, (*etag).to_owned())))
                .collect(),
            errors: BTreeMap::new(),
        }
    }

    #[test]
    fn other_bytes_in_any_pass_are_exit_code_3() {
        let objects = vec![Object { key: "a".into(), size: 1 }, Object { key: "b".into(), size: 1 }];
        let plan = Plan { objects, listed: 2, too_large: 0, capped: false };
        let same = || pass_with(&[(1, "x"), (2, "y")]);
        assert_eq!(judge(&plan, &[same(), same(), same()]), 0);
        assert_eq!(judge(&plan, &[same(), same(), pass_with(&[(1, "x"), (3, "y")])]), 3);
        let mut failing = same();
        failing.errors.insert("status 503".into(), 1);
        assert_eq!(judge(&plan, &[same(), failing]), 1);
        assert!(!table(&[same(), same()]).contains("NaN"));
    }
}
