//! The command line of `forebay-node`.
//!
//! clap parses, this crate's own types say what is wrong. Secrets have no flag: a command line is seen by every user
//! of the machine.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use forebay_control_api::{AcceleratorSpec, ByteSize, NodeId, Span, Zone};

use super::value::{AdminAddr, AltSvc, ClientKey, CoreChoice, DriveArg, EngineChoice, parse_listen};
use crate::engine::Sends;

/// The command line as a whole.
#[derive(Debug, Parser)]
#[command(name = "forebay-node", version, about = ABOUT, max_term_width = 110, subcommand_required = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `forebay-node` does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve: accelerate buckets until a signal or an order to drain
    Serve(Box<Settings>),
    /// Try what this host grants (rings, registered memory, limits) and say what to turn
    Doctor,
    /// Check a configuration and show what it comes to: cores, limits, problems. Takes what `serve` takes
    CheckConfig(Box<Settings>),
    /// Make a device or file ours. Refuses what is mounted, in use, or bears another owner's mark
    Format(FormatArgs),
    /// Clear our superblocks from a drive, so that it can be formatted anew or given away
    Wipe(DrivePath),
    /// Show what a drive says of itself; changes nothing, also while a node serves from it
    Inspect(DrivePath),
}

/// What `format` takes.
#[derive(Args, Clone, Debug)]
pub struct FormatArgs {
    /// Device or file; a file that is not there is made
    #[arg(value_name = "PATH")]
    pub path: PathBuf,

    /// Size of a new file, e.g. 100GiB; on a device, how much of it to use
    #[arg(long, value_name = "SIZE", value_parser = said::<ByteSize>)]
    pub size: Option<ByteSize>,

    /// Overwrite what is there; never what is mounted or in use
    #[arg(long)]
    pub force: bool,
}

/// One drive by its path.
#[derive(Args, Clone, Debug)]
pub struct DrivePath {
    /// Device or file
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
}

/// What `serve` and `check-config` take; the file holds the same names, and a flag wins over it.
#[derive(Args, Clone, Debug, Default)]
pub struct Settings {
    /// TOML file with the same names as these flags, without the dashes in front
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Where clients connect; may be given several times [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDR", value_parser = said_by(parse_listen))]
    pub listen: Vec<std::net::SocketAddr>,

    /// Where clients connect by HTTPS; may be given several times. Without --listen there is no plain door then
    #[arg(long, value_name = "ADDR", value_parser = said_by(parse_listen))]
    pub listen_tls: Vec<std::net::SocketAddr>,

    /// PEM file with the certificate of HTTPS and HTTP/3 and its chain; SIGHUP reads it again [default: self-signed]
    #[arg(long, value_name = "PEM")]
    pub cert: Option<PathBuf>,

    /// PEM file with its private key; readable for this process only, if you can
    #[arg(long, value_name = "PEM")]
    pub key: Option<PathBuf>,
    /// Where clients of HTTP/3 connect, over UDP; needs a certificate; may be given several times
    #[arg(long, value_name = "ADDR", value_parser = said_by(parse_listen))]
    pub listen_quic: Vec<std::net::SocketAddr>,

    /// Which answers over HTTP/1.1 name the HTTP/3 port in Alt-Svc: https, all or none [default: https]
    #[arg(long, value_name = "WHICH", value_parser = said::<AltSvc>)]
    pub alt_svc: Option<AltSvc>,

    /// Health, metrics and the operator's verbs: an address, or unix:PATH [default: 127.0.0.1:7071]
    #[arg(long, value_name = "ADDR", value_parser = said::<AdminAddr>)]
    pub admin: Option<AdminAddr>,

    /// Cores with a pinned worker: auto, or numbers and ranges such as 0,1,4-7; one named twice has two [default: auto]
    #[arg(long, value_name = "CORES", value_parser = said::<CoreChoice>)]
    pub cores: Option<CoreChoice>,

    /// Memory for buffers and the RAM tier, e.g. 8GiB; object metadata comes on top [default: 512MiB]
    #[arg(long, value_name = "SIZE", value_parser = said::<ByteSize>)]
    pub memory: Option<ByteSize>,

    /// A formatted device, or a file: PATH, or path=PATH,size=SIZE to have it made; may be given several times
    #[arg(long, value_name = "DRIVE", value_parser = said::<DriveArg>)]
    pub drive: Vec<DriveArg>,

    /// A bucket name that clients use and the store behind it.
    #[arg(long, value_name = "NAME=ORIGIN[,KEY=VALUE...]", help = ACCELERATOR_HELP, value_parser = said::<AcceleratorSpec>)]
    pub accelerator: Vec<AcceleratorSpec>,

    /// Answer requests that carry no signature
    #[arg(long)]
    pub anonymous: bool,

    /// How sockets and drives are driven: auto, uring or portable [default: auto]
    #[arg(long, value_name = "ENGINE", value_parser = said::<EngineChoice>)]
    pub engine: Option<EngineChoice>,

    /// How bodies leave: auto (no copy where the kernel makes none, hot ones by reference), copy, zero-copy or
    /// reference [default: auto]
    #[arg(long, value_name = "WAY", value_parser = said::<Sends>)]
    pub send: Option<Sends>,

    /// File with the token that purge and drain need over TCP
    #[arg(long, value_name = "FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// A send that has not moved for this long ends its connection [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = said::<Span>)]
    pub send_stall: Option<Span>,

    /// How long a drain waits for requests under way [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = said::<Span>)]
    pub drain: Option<Span>,

    /// Connections to all origins together [default: from memory and cores]
    #[arg(long, value_name = "COUNT")]
    pub origin_connections: Option<u32>,

    /// Client connections [default: 10000, or what the limit of open files allows]
    #[arg(long, value_name = "COUNT")]
    pub connections: Option<u32>,

    /// Control plane to take accelerators, keys and placement from, beside those said here: http(s)://HOST[:PORT]
    #[arg(long, value_name = "URL")]
    pub control: Option<String>,

    /// File with this node's token for the control plane, of role node
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// What the control plane calls this node: unique, the same after a restart [default: the host's name]
    #[arg(long, value_name = "NAME", value_parser = said::<NodeId>)]
    pub node_id: Option<NodeId>,

    /// Nodes of one zone fail together [default: default]
    #[arg(long, value_name = "ZONE", value_parser = said::<Zone>)]
    pub zone: Option<Zone>,

    /// This node's share of the objects beside the others' weights [default: GiB of memory and drives]
    #[arg(long, value_name = "WEIGHT")]
    pub weight: Option<u32>,

    /// URL by which other nodes reach this one [default: the first listen address]
    #[arg(long, value_name = "URL")]
    pub advertise: Option<String>,

    /// Where the control plane's last state is kept, keys included [default: beside the first drive file]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// Keys that clients sign with: from the file or the environment, never a flag.
    #[arg(skip)]
    pub keys: Vec<ClientKey>,
}

const ABOUT: &str =
    "A node that keeps hot object ranges in memory and on NVMe, beside the compute that reads them";

const ACCELERATOR_HELP: &str = "A bucket name that clients use and the store behind it; may be given several times. \
    ORIGIN is s3://BUCKET or http(s)://HOST[:PORT]/PREFIX; keys are endpoint, region, freshness (strict, ttl:60s, \
    immutable), preset (training-data, model-weights, lakehouse) and extent (64KiB to 4MiB)";

impl Settings {
    /// The names that a file may hold, `keys` among them.
    pub(super) const NAMES: [&str; 27] = [
        "listen",
        "listen-tls",
        "cert",
        "key",
        "listen-quic",
        "alt-svc",
        "admin",
        "cores",
        "memory",
        "drive",
        "accelerator",
        "anonymous",
        "engine",
        "send",
        "admin-token-file",
        "send-stall",
        "drain",
        "origin-connections",
        "connections",
        "control",
        "token-file",
        "node-id",
        "zone",
        "weight",
        "advertise",
        "state-dir",
        "keys",
    ];

    /// These settings, and those of `file` where nothing is said here. A list replaces the file's list whole.
    pub(super) fn over(self, file: Self) -> Self {
        fn list<T>(here: Vec<T>, there: Vec<T>) -> Vec<T> {
            if here.is_empty() { there } else { here }
        }
        Self {
            config: self.config,
            listen: list(self.listen, file.listen),
            listen_tls: list(self.listen_tls, file.listen_tls),
            cert: self.cert.or(file.cert),
            key: self.key.or(file.key),
            listen_quic: list(self.listen_quic, file.listen_quic),
            alt_svc: self.alt_svc.or(file.alt_svc),
            admin: self.admin.or(file.admin),
            cores: self.cores.or(file.cores),
            memory: self.memory.or(file.memory),
            drive: list(self.drive, file.drive),
            accelerator: list(self.accelerator, file.accelerator),
            anonymous: self.anonymous || file.anonymous,
            engine: self.engine.or(file.engine),
            send: self.send.or(file.send),
            admin_token_file: self.admin_token_file.or(file.admin_token_file),
            send_stall: self.send_stall.or(file.send_stall),
            drain: self.drain.or(file.drain),
            origin_connections: self.origin_connections.or(file.origin_connections),
            connections: self.connections.or(file.connections),
            control: self.control.or(file.control),
            token_file: self.token_file.or(file.token_file),
            node_id: self.node_id.or(file.node_id),
            zone: self.zone.or(file.zone),
            weight: self.weight.or(file.weight),
            advertise: self.advertise.or(file.advertise),
            state_dir: self.state_dir.or(file.state_dir),
            keys: list(self.keys, file.keys),
        }
    }
}

/// Parses a value; the sentence holds the causes as well, because clap shows only the first.
pub(super) fn said<T>(text: &str) -> Result<T, String>
where
    T: FromStr,
    T::Err: std::error::Error,
{
    text.parse().map_err(|error| chain(&error))
}

fn said_by<T, E: std::error::Error>(
    parse: impl Fn(&str) -> Result<T, E> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| parse(text).map_err(|error| chain(&error))
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn check_config(arguments: &[&str]) -> Result<Settings, String> {
        let line = ["forebay-node", "check-config"].iter().chain(arguments);
        match Cli::try_parse_from(line).map_err(|error| error.to_string())?.command {
            Command::CheckConfig(settings) => Ok(*settings),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_but_config_is_a_name_of_the_file() {
        let command = Cli::command();
        let command = command.find_subcommand("check-config").expect("the command");
        let mut flags: Vec<_> = command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        flags.retain(|flag| !["config", "help", "version"].contains(flag));
        flags.push("keys");
        assert_eq!(flags, Settings::NAMES.to_vec());
    }

    #[test]
    fn flags_become_settings() {
        let settings = check_config(&[
            "--listen",
            "127.0.0.1:1",
            "--listen",
            ":2",
            "--admin",
            "unix:/run/f",
            "--cores",
            "0-1",
            "--memory",
            "1GiB",
            "--drive",
            "path=/a,size=1GiB",
            "--accelerator",
            "abc=s3://bucket,extent=64KiB",
            "--accelerator",
            "s3://other",
            "--anonymous",
            "--engine",
            "portable",
            "--send",
            "reference",
            "--send-stall",
            "5s",
            "--connections",
            "9",
        ])
        .expect("parsed");
        assert_eq!(settings.listen.len(), 2);
        assert_eq!(settings.accelerator.len(), 2);
        assert_eq!(settings.memory, Some(ByteSize::gib(1)));
        assert!(settings.anonymous);
        assert_eq!(settings.send, Some(Sends::Reference));
        assert_eq!(settings.connections, Some(9));
    }

    #[test]
    fn format_takes_a_path_a_size_and_force() {
        let line = ["forebay-node", "format", "/c/f", "--size", "1GiB", "--force"];
        let Ok(Cli { command: Command::Format(args) }) = Cli::try_parse_from(line) else {
            panic!("not parsed as format");
        };
        assert_eq!((args.path, args.size, args.force), ("/c/f".into(), Some(ByteSize::gib(1)), true));
        assert!(Cli::try_parse_from(["forebay-node", "format"]).is_err());
        assert!(Cli::try_parse_from(["forebay-node", "wipe", "/c/f", "--force"]).is_err());
    }

    #[test]
    fn a_bad_value_is_said_to_the_last_cause() {
        for (arguments, words) in [
            (["--accelerator", "abc=s3://bucket,extent=5"], "power of two"),
            (["--accelerator", "abc=s3://bucket,freshness=ttl:5"], "500ms"),
            (["--memory", "8G"], "8GiB"),
            (["--listen", "7070"], "127.0.0.1:7070"),
            (["--cores", "x"], "0,1,4-7"),
        ] {
            let error = check_config(&arguments).expect_err(arguments[1]);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_flag_wins_over_the_file() {
        let flags = Settings { memory: Some(ByteSize::gib(1)), ..Settings::default() };
        let file = Settings {
            memory: Some(ByteSize::gib(2)),
            connections: Some(7),
            anonymous: true,
            ..Settings::default()
        };
        let both = flags.over(file);
        assert_eq!(both.memory, Some(ByteSize::gib(1)));
        assert_eq!(both.connections, Some(7));
        assert!(both.anonymous);
    }
}
