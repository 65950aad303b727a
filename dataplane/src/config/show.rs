//! What the operator sees: the banner of a running node and the report of `check-config`.
//!
//! The banner's snippet is a program that runs as it is printed; secrets come from the environment and are never
//! shown.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use forebay_control_api::{ByteSize, Span};

use super::{Config, HOW_TO_LET_IN, Limits, NOBODY_MAY_READ};

/// What a node prints when it serves: its addresses, what it accelerates, and a client to try it with.
pub fn banner(config: &Config) -> String {
    let mut text = String::new();
    for address in &config.listen {
        let everywhere =
            if address.ip().is_unspecified() { "   (all addresses of this machine)" } else { "" };
        let _ = writeln!(text, "serving   {}{everywhere}", url(*address));
    }
    let _ = match &config.admin {
        super::AdminAddr::Tcp(address) => writeln!(text, "admin     {}", url(*address)),
        super::AdminAddr::Unix(path) => writeln!(text, "admin     unix:{}", path.display()),
    };
    for spec in &config.accelerators {
        let _ = writeln!(
            text,
            "bucket    {} -> {}, {}{}",
            spec.name,
            spec.origin,
            spec.freshness.unwrap_or_default(),
            spec.preset.map(|preset| format!(", preset {preset}")).unwrap_or_default()
        );
    }
    if let Some(control) = &config.control {
        let _ = writeln!(text, "control   {} as {}", control.url, control.node);
        if config.accelerators.is_empty() {
            return text;
        }
    }
    if config.keys.is_empty() && !config.anonymous && config.control.is_none() {
        let _ = write!(text, "\n{NOBODY_MAY_READ}\n{HOW_TO_LET_IN}\n");
        return text;
    }
    let how = if config.anonymous { "" } else { ", with FOREBAY_ACCESS_KEY and FOREBAY_SECRET_KEY set" };
    let _ = write!(text, "\ntry it: python3 this.py KEY{how}\n\n{}", boto3_snippet(config));
    text
}

/// A whole Python program that reads the object named by its first argument from the first accelerator through this
/// node and prints its length.
pub fn boto3_snippet(config: &Config) -> String {
    let endpoint = config.listen.first().map(|address| url(*address)).unwrap_or_default();
    let bucket = config.accelerators.first().map(|spec| spec.name.as_str()).unwrap_or_default();
    let region = config.accelerators.first().and_then(|spec| spec.region.as_deref()).unwrap_or("us-east-1");
    let (imports, keys, signature) = if config.anonymous {
        ("import sys\nimport boto3\nfrom botocore import UNSIGNED\n", "", ", signature_version=UNSIGNED")
    } else {
        (
            "import os\nimport sys\nimport boto3\n",
            "    aws_access_key_id=os.environ[\"FOREBAY_ACCESS_KEY\"],\n    \
             aws_secret_access_key=os.environ[\"FOREBAY_SECRET_KEY\"],\n",
            "",
        )
    };
    format!(
        "{imports}from botocore.config import Config\n\n\
         s3 = boto3.client(\n    \
             \"s3\",\n    \
             endpoint_url=\"{endpoint}\",\n    \
             region_name=\"{region}\",\n\
         {keys}    \
             config=Config(s3={{\"addressing_style\": \"path\"}}{signature}),\n\
         )\n\
         body = s3.get_object(Bucket=\"{bucket}\", Key=sys.argv[1])[\"Body\"].read()\n\
         print(len(body), \"bytes\")\n"
    )
}

/// What `check-config` prints: the configuration as it will be used, which core does what, every limit, and what is
/// probably not meant.
pub fn check_report(config: &Config, limits: &Limits) -> String {
    let mut text = String::from("configuration\n");
    let mut row = |name: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "  {name:<38} {value}");
    };
    for address in &config.listen {
        row("listen", address);
    }
    row("admin", &config.admin);
    row("admin-token-file", &if config.admin_token.is_some() { "read" } else { "none" });
    row("memory", &config.memory);
    for drive in &config.drives {
        let state = if drive.exists { "there" } else { "will be made" };
        row("drive", &format_args!("{} {:#}, {state}", drive.path.display(), ByteSize::new(drive.bytes)));
    }
    if config.drives.is_empty() {
        row("drive", &"none: memory only");
    }
    for spec in &config.accelerators {
        row("accelerator", spec);
        for rule in &spec.rules {
            let freshness =
                rule.freshness.map(|freshness| format!(" freshness={freshness}")).unwrap_or_default();
            let cache = rule.cache.map(|cache| format!(" cache={cache}")).unwrap_or_default();
            row("  rule", &format_args!("{}{freshness}{cache}", rule.pattern));
        }
    }
    row("anonymous", &config.anonymous);
    row("keys", &config.keys.len());
    for key in &config.keys {
        row("  access-key", &key.access_key);
    }
    row("engine", &config.engine);
    if let Some(control) = &config.control {
        row("control", &control.url);
        row("token-file", &control.token_file.display());
        row("node-id", &control.node);
        row("zone", &control.zone);
        row("weight", &control.weight);
        row("advertise", &control.advertise.as_deref().unwrap_or("the first listen address"));
        row("state kept in", &control.state.display());
    }

    text.push_str("\ncores\n");
    for (worker, core) in config.cores.workers.iter().enumerate() {
        let _ = writeln!(text, "  core {core:<4} worker {worker}");
    }
    let _ = match config.cores.house {
        Some(core) => writeln!(text, "  core {core:<4} house threads (drive writers, admin door)"),
        None => writeln!(text, "  house threads (drive writers, admin door) share the workers' cores, niced"),
    };

    text.push_str("\nlimits\n");
    for (name, value) in rows(limits) {
        let _ = writeln!(text, "  {name:<38} {value}");
    }
    let _ = writeln!(
        text,
        "\nmemory in all: {:#} for buffers and the RAM tier, and at most {:#} for metadata",
        ByteSize::new(limits.arena_bytes),
        ByteSize::new(limits.metadata_bytes_max)
    );
    for warning in &config.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}

/// Every field of [`Limits`] by its name. Taken apart without `..`, so that a new limit cannot be left out.
fn rows(limits: &Limits) -> Vec<(&'static str, String)> {
    let &Limits {
        connections_max,
        head_bytes_max,
        headers_max,
        fills_max,
        origin_connections_max,
        arena_bytes,
        reads_reserve_bytes,
        fills_reserve_bytes,
        ram_reserve_bytes,
        send_pinned_bytes_per_connection_max,
        send_pinned_bytes_max,
        writer_queue_bytes,
        objects_max,
        metadata_bytes_max,
        header_timeout,
        idle_timeout,
        send_stall,
        request_deadline,
        drain,
    } = limits;
    let bytes = |bytes: u64| format!("{:#}", ByteSize::new(bytes));
    let time = |time: std::time::Duration| Span::from_millis(time.as_millis() as u64).to_string();
    vec![
        ("connections_max", connections_max.to_string()),
        ("head_bytes_max", bytes(head_bytes_max.into())),
        ("headers_max", headers_max.to_string()),
        ("fills_max", fills_max.to_string()),
        ("origin_connections_max", origin_connections_max.to_string()),
        ("arena_bytes", bytes(arena_bytes)),
        ("reads_reserve_bytes", bytes(reads_reserve_bytes)),
        ("fills_reserve_bytes", bytes(fills_reserve_bytes)),
        ("ram_reserve_bytes", bytes(ram_reserve_bytes)),
        ("send_pinned_bytes_per_connection_max", bytes(send_pinned_bytes_per_connection_max)),
        ("send_pinned_bytes_max", bytes(send_pinned_bytes_max)),
        ("writer_queue_bytes", bytes(writer_queue_bytes)),
        ("objects_max", objects_max.to_string()),
        ("metadata_bytes_max", bytes(metadata_bytes_max)),
        ("header_timeout", time(header_timeout)),
        ("idle_timeout", time(idle_timeout)),
        ("send_stall", time(send_stall)),
        ("request_deadline", time(request_deadline)),
        ("drain", time(drain)),
    ]
}

/// An address as a URL that a client on this machine can use.
fn url(address: SocketAddr) -> String {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}
