//! How each server is started: the settings with which it is fastest here and still does the same work.
//!
//! One worker thread on one core each, keep-alive without end, no access log, no revalidation; a cache larger than the
//! set. What is searched per cell is a kind of its own.
#![forbid(unsafe_code)]

use super::{Cell, Room, State};
use crate::children::{NodeCommand, Running, free_ports};
use crate::client::lanes::Part;
use crate::client::{Target, plain};
use crate::processors::on_core;
use anyhow::{Context, Result, bail};
use rustix::process::{Resource, getrlimit};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long a server may take until it answers.
const PATIENCE: Duration = Duration::from_mins(1);
/// Requests on one connection; no run makes as many.
const REQUESTS_MAX: u32 = 1_000_000_000;
/// What direct reads are aligned to.
const DIRECT_BYTES: u64 = 4096;
/// The longest range that cachey keeps as it is.
const CACHEY_EXACT_MAX: u64 = 16 << 20;

/// Whom the node is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Peer {
    /// nginx, in whatever of its ways is best in the cell.
    Nginx,
    /// Varnish.
    Varnish,
    /// Apache Traffic Server.
    TrafficServer,
    /// Caddy's file server.
    Caddy,
    /// cachey, the S3 range cache.
    Cachey,
    /// fio, for what a drive gives; it serves nobody.
    Fio,
}

/// A server and the way in which it is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Node,
    /// Files by sendfile, at most so many bytes a call; 0 is no bound.
    NginxStatic {
        chunk_bytes: u32,
    },
    NginxCache,
    /// `proxy_cache` of slices of 1 MiB.
    NginxSlice,
    /// Files by direct reads, through so many buffers of so many bytes.
    NginxDirect {
        buffers: u32,
        buffer_bytes: u64,
    },
    Varnish,
    TrafficServer,
    Caddy,
    Cachey {
        /// Whether it reads its drive by io_uring.
        has_ring: bool,
    },
    Fio,
}

impl Peer {
    /// As reports write it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Varnish => "Varnish",
            Self::TrafficServer => "Traffic Server",
            Self::Caddy => "Caddy",
            Self::Cachey => "cachey",
            Self::Fio => "fio",
        }
    }

    /// Whether it has a way to do what the cell is about: Varnish and Caddy leave drives to the kernel's cache, Caddy keeps
    /// nothing of an origin, fio knows drives only, and none but aligned pieces of them.
    pub(super) fn is_in(self, cell: &Cell) -> bool {
        match (self, cell.state) {
            (Self::Fio, state) => state == State::Drive && !matches!(cell.part, Part::Anywhere(_)),
            (Self::Varnish, state) => state != State::Drive,
            (Self::Caddy, state) => state == State::Hot,
            _ => true,
        }
    }

    /// What is tried before anything is compared; the best of them is the peer.
    pub(super) fn kinds(self, cell: &Cell) -> Vec<Kind> {
        match self {
            Self::Nginx if cell.state == State::Drive => {
                // Larger than an answer, and it reads through the kernel's cache after all.
                let buffer_bytes = cell.answer_bytes().min(1 << 20) / DIRECT_BYTES * DIRECT_BYTES;
                [1, 2].map(|buffers| Kind::NginxDirect { buffers, buffer_bytes }).to_vec()
            }
            Self::Nginx => {
                let mut kinds = vec![Kind::NginxCache];
                if cell.state == State::Hot {
                    kinds.insert(0, Kind::NginxStatic { chunk_bytes: 0 });
                }
                if cell.size > 1 << 20 {
                    if cell.state == State::Hot {
                        kinds.extend(
                            [512 << 10, 2 << 20].map(|chunk_bytes| Kind::NginxStatic { chunk_bytes }),
                        );
                    }
                    kinds.push(Kind::NginxSlice);
                }
                kinds
            }
            Self::Varnish => vec![Kind::Varnish],
            Self::TrafficServer => vec![Kind::TrafficServer],
            Self::Caddy => vec![Kind::Caddy],
            Self::Cachey if cell.state == State::Drive => {
                [false, true].map(|has_ring| Kind::Cachey { has_ring }).to_vec()
            }
            Self::Cachey => vec![Kind::Cachey { has_ring: false }],
            Self::Fio => Vec::new(),
        }
    }

    /// How many times less processor time a byte than it the node must take; `None` where nothing was set.
    pub(super) fn cpu_must(self, state: State) -> Option<f64> {
        match (self, state) {
            (Self::Nginx, State::Hot) => Some(1.0),
            (Self::Nginx, State::Drive) => Some(1.4),
            (Self::Fio, _) => None,
            (_, State::Hot) => Some(1.5),
            _ => None,
        }
    }
}

impl Kind {
    /// As reports write it.
    pub(super) fn word(self) -> String {
        match self {
            Self::Node => "Forebay".to_owned(),
            Self::NginxStatic { chunk_bytes: 0 } => "nginx, files".to_owned(),
            Self::NginxStatic { chunk_bytes } => {
                format!("nginx, files, sendfile_max_chunk {}k", chunk_bytes >> 10)
            }
            Self::NginxCache => "nginx, proxy_cache".to_owned(),
            Self::NginxSlice => "nginx, proxy_cache, slice 1m".to_owned(),
            Self::Varnish => "Varnish".to_owned(),
            Self::TrafficServer => "Traffic Server".to_owned(),
            Self::Caddy => "Caddy, files".to_owned(),
            Self::NginxDirect { buffers, buffer_bytes } => {
                format!("nginx, directio, aio threads, {buffers} x {}k", buffer_bytes >> 10)
            }
            Self::Cachey { has_ring: false } => "cachey".to_owned(),
            Self::Cachey { has_ring: true } => "cachey, io_uring".to_owned(),
            Self::Fio => "fio, io_uring".to_owned(),
        }
    }

    /// The program, and the Debian package or crate that has it.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Node => ("forebay-node", "cargo build --release -p forebay-dataplane"),
            Self::NginxStatic { .. } | Self::NginxCache | Self::NginxSlice | Self::NginxDirect { .. } => {
                ("nginx", "apt-get install nginx")
            }
            Self::Varnish => ("varnishd", "apt-get install varnish gcc"),
            Self::TrafficServer => ("traffic_server", "apt-get install trafficserver"),
            Self::Caddy => ("caddy", "apt-get install caddy"),
            Self::Cachey { .. } => {
                ("cachey", "cargo install cachey, and name its program `server` cachey in PATH")
            }
            Self::Fio => ("fio", "apt-get install fio"),
        }
    }
}

/// A running server, and how it is asked.
pub(super) struct Server {
    pub(super) kind: Kind,
    /// The node's admin door.
    admin: Option<Target>,
    pub(super) running: Running,
    pub(super) target: Target,
    /// Sent with every request.
    pub(super) headers: Vec<u8>,
    /// Whether it answers nothing but ranges: whole objects are then asked for as the range of all bytes.
    pub(super) ranges_only: bool,
    /// The file that is the node's drive.
    pub(super) drive: Option<PathBuf>,
    /// Its configuration and what it keeps.
    _folder: tempfile::TempDir,
}

/// Where a program is; the error says what to install.
pub(super) fn find(kind: Kind) -> Result<PathBuf> {
    let (program, remedy) = kind.program();
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Where Debian keeps servers; an ordinary user's PATH may lack them.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    let found = folders.map(|folder| folder.join(program)).find(|path| path.is_file());
    found.with_context(|| format!("{program} is not installed: {remedy}"))
}

/// Starts a server on the server's core and waits until it answers.
///
/// # Errors
/// It is not installed, or does not answer; its last words are in the error.
pub(super) fn start(kind: Kind, cell: &Cell, room: &Room) -> Result<Server> {
    let folder =
        tempfile::Builder::new().prefix("server-").tempdir_in(&room.folder).context("making a folder")?;
    let base = folder.path();
    let [port, second_port] = free_ports()?;
    let drive = (kind == Kind::Node && cell.state != State::Hot).then(|| base.join("drive"));
    let (mut command, first) = match kind {
        Kind::Node => node(cell, room, drive.as_deref(), port, second_port),
        Kind::NginxStatic { .. } | Kind::NginxCache | Kind::NginxSlice | Kind::NginxDirect { .. } => {
            (nginx(kind, cell, room, base, port)?, room.ready_path())
        }
        Kind::Varnish => (varnish(cell, room, base, port)?, room.ready_path()),
        Kind::TrafficServer => (traffic_server(cell, room, base, port)?, room.ready_path()),
        Kind::Caddy => (caddy(room, base, port)?, room.ready_path()),
        Kind::Cachey { has_ring } => cachey(has_ring, cell, room, base, port)?,
        Kind::Fio => bail!("fio serves nobody"),
    };
    command.stdout(Stdio::null());
    let log = base.join("server.log");
    let name = kind.program().0;
    let mut running = on_core(room.server_core, || Running::start(name, &mut command, &log))?;
    let ready = if kind == Kind::Node { second_port } else { port };
    running.wait_ready(&format!("http://127.0.0.1:{ready}{first}"), PATIENCE, room.stop)?;
    let mut target =
        Target::parse(&format!("http://127.0.0.1:{port}/{}", room.bucket)).map_err(anyhow::Error::msg)?;
    let is_cachey = matches!(kind, Kind::Cachey { .. });
    let mut headers = Vec::new();
    if is_cachey {
        // Its own address of an object: kind, key; the bucket and the size are headers.
        target.bucket = format!("fetch/{}", room.bucket);
        headers =
            format!("C0-Bucket: {}\r\nC0-Config: fps=true\r\nC0-Object-Size: {}\r\n", room.bucket, cell.size)
                .into_bytes();
        // Without it every range costs and holds pages of 16 MiB.
        if cell.size <= CACHEY_EXACT_MAX {
            headers.extend_from_slice(b"C0-Exact: true\r\n");
        }
    }
    let admin = (kind == Kind::Node).then(|| Target::parse_host(&format!("http://127.0.0.1:{second_port}")));
    let admin = admin.transpose().map_err(anyhow::Error::msg)?;
    Ok(Server { kind, admin, running, target, headers, ranges_only: is_cachey, drive, _folder: folder })
}

impl Server {
    /// Of the node's memory, the pages of 2 MiB that are one huge page each, and all of them.
    pub(super) fn pages(&self) -> Result<Option<(u64, u64)>> {
        let of = |metrics: String| {
            (sum(&metrics, "forebay_arena_pages_huge "), sum(&metrics, "forebay_arena_reserve_bytes{") >> 21)
        };
        Ok(self.metrics()?.map(of))
    }

    /// What the node says that it has read from its drive, bytes.
    pub(super) fn drive_read_bytes(&self) -> Result<Option<u64>> {
        Ok(self.metrics()?.map(|metrics| sum(&metrics, "forebay_store_read_bytes_total")))
    }

    fn metrics(&self) -> Result<Option<String>> {
        let Some(admin) = &self.admin else { return Ok(None) };
        let answer =
            plain::request(admin, "GET", "/metrics", b"", b"").context("asking for the node's metrics")?;
        Ok(Some(String::from_utf8_lossy(&answer.body).into_owned()))
    }
}

/// Of all samples whose line begins so.
fn sum(metrics: &str, name: &str) -> u64 {
    let rows = metrics.lines().filter_map(|line| line.strip_prefix(name)?.rsplit(' ').next());
    rows.filter_map(|value| value.parse::<u64>().ok()).sum()
}

fn node(cell: &Cell, room: &Room, drive: Option<&Path>, port: u16, admin_port: u16) -> (Command, String) {
    let command = NodeCommand {
        program: &room.node,
        port,
        admin_port,
        cores: &room.server_core.to_string(),
        memory: &format!("{}MiB", cell.memory_bytes() >> 20),
        engine: &room.engine,
    };
    let mut command = command.build();
    if let Some(drive) = drive {
        command.arg("--drive");
        command.arg(format!("path={},size={}MiB", drive.display(), cell.drive_bytes() >> 20));
    }
    command.arg("--accelerator");
    command.arg(format!("{0}={1}/{0},freshness=immutable", room.bucket, room.origin_url));
    (command, "/readyz".to_owned())
}

fn nginx(kind: Kind, cell: &Cell, room: &Room, base: &Path, port: u16) -> Result<Command> {
    let origin = room.origin_address();
    let cached = |slice: &str, key: &str| {
        format!(
            "proxy_pass http://origin; proxy_http_version 1.1; proxy_set_header Connection \"\"; {slice}
             proxy_cache z; proxy_cache_key {key}; proxy_cache_valid 200 206 1d; proxy_cache_lock on;
             proxy_ignore_headers Cache-Control Expires Set-Cookie Vary;
             proxy_buffers 16 256k; proxy_buffer_size 256k; proxy_busy_buffers_size 512k;"
        )
    };
    let (location, chunk_bytes) = match kind {
        Kind::NginxSlice => (cached("slice 1m; proxy_set_header Range $slice_range;", "$uri$slice_range"), 0),
        Kind::NginxCache => (cached("", "$uri"), 0),
        Kind::NginxStatic { chunk_bytes } => (format!("root {};", room.files.display()), chunk_bytes),
        Kind::NginxDirect { buffers, buffer_bytes } => {
            let text = format!(
                "root {}; directio {DIRECT_BYTES}; directio_alignment {DIRECT_BYTES}; aio threads=readers;
                 output_buffers {buffers} {buffer_bytes};",
                room.files.display()
            );
            (text, 0)
        }
        _ => bail!("not nginx: {kind:?}"),
    };
    // As many open files as it may have; connections need some of them.
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let descriptors = most.min(65536);
    let open_files = descriptors.saturating_sub(1000).max(100);
    // A read that is not aligned switches direct reads off for the descriptor, and spoils those of others who share it
    // (EINVAL, and the connection ends).
    let open_file_cache = match (kind, cell.part) {
        (Kind::NginxDirect { .. }, Part::Anywhere(_)) => "open_file_cache off;".to_owned(),
        _ => format!("open_file_cache max={open_files} inactive=1d;"),
    };
    let cache_mib = cell.drive_bytes() >> 20;
    let base_text = base.display();
    let mut temporary = String::new();
    for (number, name) in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].iter().enumerate() {
        let _ = write!(temporary, "{name}_temp_path {base_text}/t{number}; ");
    }
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let text = format!(
        "{user} worker_processes 1; daemon off; worker_rlimit_nofile {descriptors}; pid {base_text}/pid;
         error_log stderr error; thread_pool readers threads=32;
         events {{ worker_connections 4096; use epoll; multi_accept on; }}
         http {{
             access_log off; default_type application/octet-stream;
             sendfile on; sendfile_max_chunk {chunk_bytes}; tcp_nopush off; tcp_nodelay on;
             keepalive_requests {REQUESTS_MAX}; keepalive_timeout 3600s;
             {open_file_cache} open_file_cache_valid 1d;
             {temporary}
             proxy_cache_path {base_text}/cache levels=1:2 keys_zone=z:64m max_size={cache_mib}m inactive=1d
                 use_temp_path=off;
             upstream origin {{ server {origin}; keepalive 64; }}
             server {{ listen 127.0.0.1:{port} reuseport; location / {{ {location} }} }}
         }}"
    );
    let path = base.join("nginx.conf");
    fs::write(&path, text).context("writing nginx's configuration")?;
    let mut command = Command::new(find(kind)?);
    command.arg("-p").arg(base).arg("-c").arg(&path).arg("-e").arg("stderr");
    Ok(command)
}

fn varnish(cell: &Cell, room: &Room, base: &Path, port: u16) -> Result<Command> {
    let (host, origin_port) =
        room.origin_address().split_once(':').context("the origin's address has no port")?;
    let path = base.join("peers.vcl");
    let text = format!(
        "vcl 4.1;
         backend default {{ .host = \"{host}\"; .port = \"{origin_port}\"; }}
         sub vcl_recv {{ return (hash); }}
         sub vcl_backend_response {{ set beresp.ttl = 1d; set beresp.do_stream = true; }}"
    );
    fs::write(&path, text).context("writing Varnish's configuration")?;
    let mut command = Command::new(find(Kind::Varnish)?);
    // Without a jail its worker stays the same user, who may read this folder.
    command.args(["-F", "-j", "none", "-T", "none"]).arg("-n").arg(base.join("work"));
    command.arg("-a").arg(format!("127.0.0.1:{port}")).arg("-f").arg(&path);
    command.arg("-s").arg(format!("malloc,{}M", cell.memory_bytes() >> 20));
    for setting in ["thread_pools=1", "thread_pool_min=100", "thread_pool_max=1000", "http_range_support=on"]
    {
        command.args(["-p", setting]);
    }
    Ok(command)
}

fn traffic_server(cell: &Cell, room: &Room, base: &Path, port: u16) -> Result<Command> {
    let etc = base.join("etc");
    for folder in ["etc", "run", "log", "cache"] {
        fs::create_dir(base.join(folder)).context("making Traffic Server's folders")?;
    }
    let (cache_bytes, drive_mib) = (cell.memory_bytes(), cell.drive_bytes() >> 20);
    let settings: [(&str, &str, String); 21] = [
        ("http.server_ports", "STRING", format!("{port}:ip-in=127.0.0.1")),
        ("admin.user_id", "STRING", "#-1".to_owned()),
        ("exec_thread.autoconfig", "INT", "0".to_owned()),
        ("exec_thread.limit", "INT", "1".to_owned()),
        ("exec_thread.affinity", "INT", "0".to_owned()),
        ("accept_threads", "INT", "0".to_owned()),
        ("cache.threads_per_disk", "INT", "8".to_owned()),
        ("cache.ram_cache.size", "INT", cache_bytes.to_string()),
        ("cache.ram_cache.algorithm", "INT", "1".to_owned()),
        ("cache.ram_cache.use_seen_filter", "INT", "0".to_owned()),
        ("cache.ram_cache_cutoff", "INT", cache_bytes.to_string()),
        ("cache.target_fragment_size", "INT", (1 << 20).to_string()),
        ("cache.min_average_object_size", "INT", "65536".to_owned()),
        ("cache.max_doc_size", "INT", "0".to_owned()),
        ("http.cache.required_headers", "INT", "0".to_owned()),
        ("http.cache.when_to_revalidate", "INT", "3".to_owned()),
        ("http.cache.range.write", "INT", "0".to_owned()),
        ("http.cache.heuristic_min_lifetime", "INT", "86400".to_owned()),
        ("http.insert_response_via_str", "INT", "0".to_owned()),
        ("log.logging_enabled", "INT", "0".to_owned()),
        ("http.keep_alive_no_activity_timeout_in", "INT", "3600".to_owned()),
    ];
    let mut records = String::new();
    for (name, of, value) in settings {
        let _ = writeln!(records, "CONFIG proxy.config.{name} {of} {value}");
    }
    fs::write(etc.join("records.config"), records)?;
    fs::write(etc.join("remap.config"), format!("map / {}/\n", room.origin_url))?;
    fs::write(etc.join("storage.config"), format!("{} {drive_mib}M\n", base.join("cache").display()))?;
    fs::write(etc.join("plugin.config"), "")?;
    fs::write(
        etc.join("ip_allow.yaml"),
        "ip_allow:\n  - apply: in\n    ip_addrs: 127.0.0.1\n    action: allow\n    methods: ALL\n",
    )?;
    let base_text = base.display();
    let root = base.join("runroot.yaml");
    fs::write(
        &root,
        format!(
            "prefix: {base_text}\nexec_prefix: /usr\nbindir: /usr/bin\nsbindir: /usr/bin\nsysconfdir: {base_text}/etc\n\
             datadir: {base_text}\nlibdir: /usr/lib/trafficserver\nlibexecdir: /usr/lib/trafficserver/modules\n\
             localstatedir: {base_text}/run\nruntimedir: {base_text}/run\nlogdir: {base_text}/log\n\
             cachedir: {base_text}/cache\n"
        ),
    )?;
    let mut command = Command::new(find(Kind::TrafficServer)?);
    command.arg(format!("--run-root={}", root.display()));
    Ok(command)
}

fn caddy(room: &Room, base: &Path, port: u16) -> Result<Command> {
    let path = base.join("Caddyfile");
    let text = format!(
        "{{\n\tadmin off\n\tauto_https off\n}}\nhttp://127.0.0.1:{port} {{\n\troot * {}\n\
         \tfile_server\n}}\n",
        room.files.display()
    );
    fs::write(&path, text).context("writing Caddy's configuration")?;
    let mut command = Command::new(find(Kind::Caddy)?);
    command.args(["run", "--adapter", "caddyfile", "--config"]).arg(&path);
    command.env("GOMAXPROCS", "1").env("XDG_DATA_HOME", base).env("XDG_CONFIG_HOME", base);
    Ok(command)
}

fn cachey(has_ring: bool, cell: &Cell, room: &Room, base: &Path, port: u16) -> Result<(Command, String)> {
    let mut command = Command::new(find(Kind::Cachey { has_ring })?);
    command.args(["--port", &port.to_string(), "--hedge-budget-percent", "0"]);
    command.arg("--memory").arg(format!("{}MiB", cell.memory_bytes() >> 20));
    if cell.state == State::Drive {
        let folder = base.join("cachey");
        fs::create_dir(&folder).context("making cachey's folder")?;
        command.args(["--disk-kind", "fs", "--disk-path"]).arg(folder);
        command.arg("--disk-capacity").arg(format!("{}MiB", cell.drive_bytes() >> 20));
        if has_ring {
            command.arg("--iouring");
        }
    }
    command.env("AWS_ENDPOINT_URL", &room.origin_url).env("AWS_REGION", "us-east-1");
    command.env("AWS_ACCESS_KEY_ID", "bench").env("AWS_SECRET_ACCESS_KEY", "bench").env("RUST_LOG", "error");
    Ok((command, "/metrics".to_owned()))
}
