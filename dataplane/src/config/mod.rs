//! What the operator says, checked once at the door.
//!
//! Flags and the file hold the same names; a flag wins over the file, the file over the default. Out comes a
//! [`Config`] that is whole: every default filled in, every core allowed, every drive's size known. What can be
//! refused is refused here, before a socket is bound or a drive is touched, with the name of the setting and the
//! remedy. [`Limits`] are derived from it and nothing else, so that `check-config` shows what `serve` will do.
//!
//! ```text
//!   cli    the command line            file   the same names in TOML
//!   control  which control plane, and as whom
//!   value  their small languages       host   what this machine allows
//!   limits everything that may grow    show   banner, check-config
//! ```
#![forbid(unsafe_code)]

mod cli;
mod control;
mod file;
mod host;
mod limits;
mod show;
mod value;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_control_api::{AcceleratorSpec, ByteSize, Span};

pub(crate) use cli::chain;
pub use cli::{Cli, Command, DrivePath, FormatArgs, Settings};
pub use control::ControlConfig;
pub use file::FileError;
pub use host::{CoreMap, HostFacts, raise_descriptor_limit};
pub use limits::{Limits, QUIC_WINDOW_BYTES_MIN};
pub use show::{banner, boto3_snippet, check_report};
pub use value::{AdminAddr, AltSvc, ClientKey, CoreChoice, DriveArg, EngineChoice, Secret, ValueError};

use crate::engine::Sends;
use crate::policy::{Policy, PolicyError};
use crate::tls::TlsFiles;

/// Where clients connect when nothing is said: this machine only.
pub const LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7070);
/// Where the admin door is when nothing is said.
pub const ADMIN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7071);
/// Memory when nothing is said.
pub const MEMORY_DEFAULT: ByteSize = ByteSize::mib(512);
/// A send that has not moved for this long ends its connection.
pub const SEND_STALL_DEFAULT: Span = Span::from_secs(30);
/// How long a drain waits for requests under way.
pub const DRAIN_DEFAULT: Span = Span::from_secs(30);

/// Everything `serve` needs to know, whole and checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect by plain HTTP. No two addresses of all doors are the same, and there is at least one.
    pub listen: Vec<SocketAddr>,
    /// Where clients connect by HTTPS.
    pub listen_tls: Vec<SocketAddr>,
    /// Certificate and key of the HTTPS door; without them it is served with one of its own.
    pub tls_files: Option<TlsFiles>,
    /// Where clients of HTTP/3 connect (UDP); none means that it is not spoken.
    pub listen_quic: Vec<SocketAddr>,
    /// Which answers over HTTP/1.1 say that there is HTTP/3.
    pub alt_svc: AltSvc,
    /// The admin door.
    pub admin: AdminAddr,
    /// Secret of the admin door's changing verbs over TCP.
    pub admin_token: Option<Secret>,
    /// Which core does what.
    pub cores: CoreMap,
    /// Memory lent to requests and the RAM tier.
    pub memory: ByteSize,
    /// Drives; none means RAM only.
    pub drives: Vec<Drive>,
    /// Accelerators; at least one unless there is a control plane, no two of a name.
    pub accelerators: Vec<AcceleratorSpec>,
    /// Whether requests without a signature are answered.
    pub anonymous: bool,
    /// Keys that clients sign with.
    pub keys: Vec<ClientKey>,
    /// How sockets and drives are driven.
    pub engine: EngineChoice,
    /// How bodies leave.
    pub send: Sends,
    /// A send that has not moved for this long ends its connection.
    pub send_stall: Duration,
    /// How long a drain waits for requests under way.
    pub drain: Duration,
    /// Connections to all origins together, if the operator said so.
    pub origin_connections: Option<u32>,
    /// Client connections, if the operator said so.
    pub connections: Option<u32>,
    /// File descriptors this process may have (the hard limit).
    pub descriptors_max: u64,
    /// The control plane, if there is one.
    pub control: Option<ControlConfig>,
    /// What is allowed but probably not meant.
    pub warnings: Vec<String>,
}

/// One drive: a device, an existing file, or a file that `serve` will make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Device or file.
    pub path: PathBuf,
    /// The size the operator gave.
    pub size: Option<ByteSize>,
    /// Bytes it has, or will have when it is made.
    pub bytes: u64,
    /// Whether it is there already.
    pub exists: bool,
}

impl Config {
    /// Puts flags over the file over the defaults and checks the whole. `environment` looks up a variable.
    ///
    /// Reads the configuration file, the token file and the sizes of drives; writes nothing.
    ///
    /// # Errors
    /// The first thing that cannot be, with its name and the remedy.
    pub fn load(
        flags: Settings,
        environment: &dyn Fn(&str) -> Option<String>,
        host: &HostFacts,
    ) -> Result<Self, ConfigError> {
        let mut warnings = Vec::new();
        let mut settings = match &flags.config {
            Some(path) => {
                let from_file =
                    file::read(path).map_err(|source| ConfigError::File { path: path.clone(), source })?;
                if !from_file.keys.is_empty() && file::others_may_read(path) {
                    warnings.push(format!(
                        "{} holds keys and other users may read it: chmod 600",
                        path.display()
                    ));
                }
                flags.over(from_file)
            }
            None => flags,
        };
        add_key_of_environment(&mut settings.keys, environment)?;

        let about_control = control::taken_from(&mut settings);
        let listen_tls = settings.listen_tls;
        let listen = match settings.listen {
            listen if listen.is_empty() && listen_tls.is_empty() => vec![LISTEN_DEFAULT],
            listen => listen,
        };
        let is_given = |address: &&SocketAddr| address.port() != 0;
        for (setting, addresses) in [("listen", &listen), ("listen-tls", &listen_tls)] {
            if let Some(twice) = first_twice(addresses.iter().filter(is_given)) {
                return Err(ConfigError::Twice { setting, value: twice.to_string() });
            }
        }
        if let Some(both) = listen.iter().filter(is_given).find(|address| listen_tls.contains(address)) {
            return Err(ConfigError::PlainOnTls(*both));
        }
        let listen_quic = settings.listen_quic;
        if let Some(twice) = first_twice(listen_quic.iter().filter(is_given)) {
            return Err(ConfigError::Twice { setting: "listen-quic", value: twice.to_string() });
        }
        let has_door = !listen_tls.is_empty() || !listen_quic.is_empty();
        let tls_files = tls_files(settings.cert, settings.key, has_door)?;
        warnings.extend(tls_files.as_ref().and_then(TlsFiles::warning));
        let admin = settings.admin.unwrap_or(AdminAddr::Tcp(ADMIN_DEFAULT));
        if let AdminAddr::Tcp(address) = &admin
            && address.port() != 0
            && (listen.contains(address) || listen_tls.contains(address))
        {
            return Err(ConfigError::AdminOnListen(*address));
        }
        let admin_token = settings.admin_token_file.as_deref().map(read_token).transpose()?;
        if let (AdminAddr::Tcp(address), None) = (&admin, &admin_token)
            && !address.ip().is_loopback()
        {
            return Err(ConfigError::AdminOpen(*address));
        }

        if settings.accelerator.is_empty() && about_control.control.is_none() {
            return Err(ConfigError::NoAccelerator);
        }
        if let Some(twice) = first_twice(settings.accelerator.iter().map(|spec| spec.name.as_str())) {
            return Err(ConfigError::Twice { setting: "accelerator", value: twice.to_owned() });
        }
        for spec in &settings.accelerator {
            Policy::new(spec)
                .map_err(|source| ConfigError::Rule { accelerator: spec.name.to_string(), source })?;
        }

        if let Some(twice) = first_twice(settings.drive.iter().map(|drive| &drive.path)) {
            return Err(ConfigError::Twice { setting: "drive", value: twice.display().to_string() });
        }
        let drives = settings.drive.into_iter().map(look_at).collect::<Result<Vec<_>, ConfigError>>()?;

        let send_stall = settings.send_stall.unwrap_or(SEND_STALL_DEFAULT);
        if send_stall.duration() < Duration::from_secs(1) {
            return Err(ConfigError::SendStall(send_stall));
        }
        for (setting, count) in
            [("connections", settings.connections), ("origin-connections", settings.origin_connections)]
        {
            if count == Some(0) {
                return Err(ConfigError::Zero(setting));
            }
        }

        let memory = settings.memory.unwrap_or(MEMORY_DEFAULT);
        let control = control::control_of(&about_control, &drives, memory, host.name.as_deref())?;
        control.as_ref().map(control::check_folder).transpose()?;
        if settings.keys.is_empty() && !settings.anonymous && control.is_none() {
            warnings.push(format!("{NOBODY_MAY_READ} {HOW_TO_LET_IN}"));
        }
        let mut doors = listen.iter().chain(&listen_tls);
        if settings.anonymous && doors.any(|address| !address.ip().is_loopback()) {
            warnings.push(
                "anonymous: everybody who reaches the listen address reads and writes with the node's own origin \
                 credentials"
                    .to_owned(),
            );
        }
        let cores = host.core_map(&settings.cores.unwrap_or(CoreChoice::Auto))?;
        if let Some(core) = first_twice(cores.workers.iter()) {
            warnings.push(format!(
                "cores: core {core} is named more than once: its workers take turns, which is slower than one of them alone"
            ));
        }
        Ok(Self {
            listen,
            listen_tls,
            tls_files,
            listen_quic,
            alt_svc: settings.alt_svc.unwrap_or(AltSvc::Https),
            admin,
            admin_token,
            cores,
            memory,
            drives,
            accelerators: settings.accelerator,
            anonymous: settings.anonymous,
            keys: settings.keys,
            engine: settings.engine.unwrap_or(EngineChoice::Auto),
            send: settings.send.unwrap_or_default(),
            send_stall: send_stall.duration(),
            drain: settings.drain.unwrap_or(DRAIN_DEFAULT).duration(),
            origin_connections: settings.origin_connections,
            connections: settings.connections,
            descriptors_max: host.descriptors_max,
            control,
            warnings,
        })
    }
}

/// Why a configuration cannot be served. The setting is named as in the file; a flag has `--` in front.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The configuration file.
    #[error("reading the configuration {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: FileError,
    },
    /// The same thing twice in a list.
    #[error("{setting}: `{value}` is given twice")]
    Twice {
        /// The setting.
        setting: &'static str,
        /// The value.
        value: String,
    },
    /// One address for HTTP and HTTPS.
    #[error("listen-tls: {0} is also a listen address; give HTTPS its own port")]
    PlainOnTls(SocketAddr),
    /// Only one of certificate and key.
    #[error("{given}: it is given without {missing}; give both, or neither for a self-signed certificate")]
    HalfAPair {
        /// The setting that is there.
        given: &'static str,
        /// The setting that is not.
        missing: &'static str,
    },
    /// A certificate for no door.
    #[error("cert: nothing would show it; say where with --listen-tls ADDR or --listen-quic ADDR")]
    CertWithoutDoor,
    /// One address for two doors.
    #[error("admin: {0} is also a listen address; give the admin door its own port")]
    AdminOnListen(SocketAddr),
    /// The admin door is open to the network.
    #[error(
        "admin: {0} can be reached from other machines, and without a token everybody there could read this node's \
         state: give --admin-token-file FILE, or keep the door on 127.0.0.1 or unix:PATH"
    )]
    AdminOpen(SocketAddr),
    /// The token file cannot be read.
    #[error("admin-token-file: reading {}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The token can be guessed.
    #[error(
        "admin-token-file: {} must hold one line of at least 16 visible characters, e.g. from \
         `head -c 24 /dev/urandom | base64`",
        .0.display()
    )]
    Token(PathBuf),
    /// Nothing to serve.
    #[error(
        "accelerator: there is none; give at least one, e.g. --accelerator data=s3://bucket, or --control URL of a \
         control plane that names them"
    )]
    NoAccelerator,
    /// A rule of an accelerator.
    #[error("accelerator {accelerator}")]
    Rule {
        /// The accelerator.
        accelerator: String,
        /// What is wrong with its rule.
        #[source]
        source: PolicyError,
    },
    /// A drive that cannot be looked at.
    #[error("drive {}", path.display())]
    Drive {
        /// The drive.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A new or empty file without a size.
    #[error("drive {path}: there is no such file, or it is empty; give its size to have it made: --drive path={path},size=100GiB", path = .0.display())]
    DriveSize(PathBuf),
    /// A core outside the cpuset.
    #[error("cores: {wanted:?} may not be used by this process; allowed are {allowed}")]
    Cores {
        /// Those asked for and not allowed.
        wanted: Vec<usize>,
        /// Those allowed, as a list.
        allowed: String,
    },
    /// The cpuset could not be read.
    #[error("cores: the kernel does not say which cores this process may use")]
    NoCores,
    /// Only one of the two variables.
    #[error("{0} is set but {1} is not: set both, or neither")]
    HalfAKey(&'static str, &'static str),
    /// A key that cannot be one.
    #[error("keys: {0}")]
    Key(&'static str),
    /// A stall time that kills healthy connections.
    #[error("send-stall: {0} is too short; at least 1s is needed to tell a slow reader from a dead one")]
    SendStall(Span),
    /// What is said of the control plane.
    #[error("{setting}: {why}")]
    Control {
        /// The setting.
        setting: &'static str,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// A count of nothing.
    #[error("{0}: must be at least 1")]
    Zero(&'static str),
    /// Too little memory for the workers.
    #[error(
        "memory: {has} is too little; {needed} are needed: {workers} workers x (4 reads + 4 downloads) x {extent} \
         pieces = {reserves}, and {ram} for the RAM tier; give more memory, fewer cores or smaller extents"
    )]
    Memory {
        /// What was given.
        has: ByteSize,
        /// The least.
        needed: ByteSize,
        /// Number of workers.
        workers: usize,
        /// The largest extent.
        extent: ByteSize,
        /// Both reserves.
        reserves: ByteSize,
        /// The least RAM tier.
        ram: ByteSize,
    },
    /// Too few file descriptors.
    #[error(
        "connections: {connections} need {needed} file descriptors with {outward} to origins and other nodes, \
         and the hard limit of this process is {has}; raise it (ulimit -Hn, LimitNOFILE=) or lower connections"
    )]
    Descriptors {
        /// Client connections.
        connections: u32,
        /// Connections to origins and to other nodes.
        outward: u64,
        /// Descriptors for all.
        needed: u64,
        /// The hard limit.
        has: u64,
    },
}

const NOBODY_MAY_READ: &str =
    "there are no keys and anonymous is off: every request will be refused with 403.";
const HOW_TO_LET_IN: &str = "Set FOREBAY_ACCESS_KEY and FOREBAY_SECRET_KEY, put [[keys]] into the file, or give \
     --anonymous.";

fn first_twice<T: Eq + std::hash::Hash + Copy>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let mut seen = HashSet::new();
    items.find(|item| !seen.insert(*item))
}

fn tls_files(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    has_door: bool,
) -> Result<Option<TlsFiles>, ConfigError> {
    match (cert, key) {
        (None, None) => Ok(None),
        (Some(_), None) => Err(ConfigError::HalfAPair { given: "cert", missing: "--key" }),
        (None, Some(_)) => Err(ConfigError::HalfAPair { given: "key", missing: "--cert" }),
        (Some(_), Some(_)) if !has_door => Err(ConfigError::CertWithoutDoor),
        (Some(cert), Some(key)) => Ok(Some(TlsFiles { cert, key })),
    }
}

fn add_key_of_environment(
    keys: &mut Vec<ClientKey>,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    let get = |name| environment(name).filter(|value| !value.is_empty());
    let (access, secret) = (get("FOREBAY_ACCESS_KEY"), get("FOREBAY_SECRET_KEY"));
    match (access, secret) {
        (None, None) => Ok(()),
        (Some(_), None) => Err(ConfigError::HalfAKey("FOREBAY_ACCESS_KEY", "FOREBAY_SECRET_KEY")),
        (None, Some(_)) => Err(ConfigError::HalfAKey("FOREBAY_SECRET_KEY", "FOREBAY_ACCESS_KEY")),
        (Some(access), Some(secret)) => {
            let key = ClientKey::new(&access, &secret).map_err(ConfigError::Key)?;
            keys.retain(|other| other.access_key != key.access_key);
            keys.insert(0, key);
            Ok(())
        }
    }
}

fn read_token(path: &Path) -> Result<Secret, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::TokenFile { path: path.to_owned(), source })?;
    let token = text.trim_end_matches(['\n', '\r']);
    let good = token.len() >= 16 && token.bytes().all(|byte| byte.is_ascii_graphic());
    if good { Ok(Secret::new(token)) } else { Err(ConfigError::Token(path.to_owned())) }
}

/// What is on a drive, and whether its size agrees, is the store's to judge when it opens it.
fn look_at(drive: DriveArg) -> Result<Drive, ConfigError> {
    let DriveArg { path, size } = drive;
    let found = host::bytes_of(&path).map_err(|source| ConfigError::Drive { path: path.clone(), source })?;
    match (found, size) {
        (Some(bytes), _) => Ok(Drive { path, size, bytes, exists: true }),
        (None, Some(made)) => Ok(Drive { path, size, bytes: made.bytes(), exists: false }),
        (None, None) => Err(ConfigError::DriveSize(path)),
    }
}

#[cfg(test)]
mod tests;
