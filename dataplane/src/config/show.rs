//! What the operator sees: the banner of a running node and the report of `check-config`.
//!
//! The banner's snippet is a program that runs as it is printed; secrets come from the environment and are never
//! shown.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use forebay_control_api::{ByteSize, Span};

use super::{Config, HOW_TO_LET_IN, Limits, NOBODY_MAY_READ};
use crate::tls::Certificates;

/// What a node prints when it serves: its addresses, what it accelerates, and a client to try it with. `certificates`
/// are those of the HTTPS door, if there is one.
pub fn banner(config: &Config, certificates: Option<&Certificates>) -> String {
    let mut text = String::new();
    for (scheme, address) in doors(config) {
        let everywhere =
            if address.ip().is_unspecified() { "   (all addresses of this machine)" } else { "" };
        let _ = writeln!(text, "serving   {}{everywhere}", url(scheme, address));
    }
    if let (Some(certificates), Some(address)) = (certificates, config.listen_tls.first()) {
        let _ = writeln!(text, "          certificate SHA-256 {}", certificates.fingerprint());
        if certificates.files().is_none() {
            let (address, url) = (reachable(*address), url("https", *address));
            let _ = write!(
                text,
                "          self-signed; to trust it, fetch it once and compare the SHA-256:\n          \
                 python3 -c 'import ssl; print(ssl.get_server_certificate((\"{}\", {})))' >{TRUSTED}\n          \
                 then boto3.client(..., endpoint_url=\"{url}\", verify=\"{TRUSTED}\")\n",
                address.ip(),
                address.port()
            );
        }
    }
    for address in &config.listen_quic {
        let _ = writeln!(text, "HTTP/3    {}", url("https", *address));
    }
    let _ = match &config.admin {
        super::AdminAddr::Tcp(address) => writeln!(text, "admin     {}", url("http", *address)),
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

/// Where the operator puts a self-signed certificate in the lines that we print.
const TRUSTED: &str = "forebay.pem";

/// Every door for requests, with the scheme of its URL.
fn doors(config: &Config) -> impl Iterator<Item = (&'static str, SocketAddr)> {
    let plain = config.listen.iter().map(|address| ("http", *address));
    plain.chain(config.listen_tls.iter().map(|address| ("https", *address)))
}

/// A whole Python program that reads the object named by its first argument from the first accelerator through this
/// node and prints its length.
pub fn boto3_snippet(config: &Config) -> String {
    let endpoint = doors(config).next().map(|(scheme, address)| url(scheme, address)).unwrap_or_default();
    let is_unknown = config.listen.is_empty() && config.tls_files.is_none();
    let verify = if is_unknown { format!("    verify=\"{TRUSTED}\",\n") } else { String::new() };
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
         {verify}{keys}    \
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
    for address in &config.listen_tls {
        row("listen-tls", address);
    }
    for address in &config.listen_quic {
        row("listen-quic", address);
    }
    if !config.listen_quic.is_empty() {
        row("alt-svc", &config.alt_svc);
    }
    match &config.tls_files {
        Some(files) => {
            row("cert", &files.cert.display());
            row("key", &files.key.display());
        }
        None if config.listen_tls.is_empty() && config.listen_quic.is_empty() => {}
        None => row("cert", &"none: self-signed, made anew with every start"),
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
    row("send", &config.send);
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
        "\nmemory in all: {:#} for buffers and the RAM tier, and at most {:#} for metadata and for QUIC",
        ByteSize::new(limits.arena_bytes),
        ByteSize::new(limits.metadata_bytes_max + limits.quic_send_bytes_max)
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
        peer_connections_max,
        arena_bytes,
        reads_reserve_bytes,
        fills_reserve_bytes,
        ram_reserve_bytes,
        send_pinned_bytes_per_connection_max,
        send_pinned_bytes_max,
        send_queue_bytes_per_connection_max,
        connections_heap_bytes_max,
        zero_copy_bytes_max,
        tls_held_bytes_max,
        quic_send_bytes_max,
        quic_handshakes_max,
        quic_send_window_bytes,
        quic_receive_window_bytes,
        quic_streams_max,
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
        ("peer_connections_max", peer_connections_max.to_string()),
        ("arena_bytes", bytes(arena_bytes)),
        ("reads_reserve_bytes", bytes(reads_reserve_bytes)),
        ("fills_reserve_bytes", bytes(fills_reserve_bytes)),
        ("ram_reserve_bytes", bytes(ram_reserve_bytes)),
        ("send_pinned_bytes_per_connection_max", bytes(send_pinned_bytes_per_connection_max)),
        ("send_pinned_bytes_max", bytes(send_pinned_bytes_max)),
        ("send_queue_bytes_per_connection_max", bytes(send_queue_bytes_per_connection_max)),
        ("connections_heap_bytes_max", bytes(connections_heap_bytes_max)),
        ("zero_copy_bytes_max", bytes(zero_copy_bytes_max)),
        ("tls_held_bytes_max", bytes(tls_held_bytes_max)),
        ("quic_send_bytes_max", bytes(quic_send_bytes_max)),
        ("quic_handshakes_max", quic_handshakes_max.to_string()),
        ("quic_send_window_bytes", bytes(quic_send_window_bytes)),
        ("quic_receive_window_bytes", bytes(quic_receive_window_bytes)),
        ("quic_streams_max", quic_streams_max.to_string()),
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
fn url(scheme: &str, address: SocketAddr) -> String {
    format!("{scheme}://{}", reachable(address))
}

/// An address at which a client on this machine can reach a door that listens on `address`.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
