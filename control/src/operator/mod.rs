//! The operator's commands over the REST door: each is one request, or one asked again until it is done.
//!
//! What comes back is shown in words and tables, or with `--json` as it came. Where a command line can be wrong
//! without asking anybody, it is refused before a request is made, by the same types that the control plane uses.

mod words;

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::{Args, Subcommand};
use forebay_control_api::{
    Accelerator, AcceleratorName, AcceleratorSpec, AccessKeyBody, AccessKeyId, AccessKeyInfo, Node, NodeId,
    Placement, Policy, PolicyName, PolicyRule, Prewarm, PrewarmBody, PurgeBody, PurgeStatus, Role, SpecError,
    TokenBody, TokenInfo, TokenIssued, group_of,
};
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::client::{ControlAddress, ask};
use crate::node::{encoded, read_token};

/// What can be asked of the control plane.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Buckets and aliases that clients use
    #[command(subcommand)]
    Accelerator(AcceleratorCommand),
    /// Ordered rules that accelerators follow
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Keys that clients sign with
    #[command(subcommand)]
    Key(KeyCommand),
    /// Nodes: list them, take their share away, give it back, forget them
    Nodes(NodesCommand),
    /// Who owns what
    Placement(PlacementCommand),
    /// Read a prefix ahead of its readers
    #[command(subcommand)]
    Prewarm(PrewarmCommand),
    /// Have every node forget a key or a prefix
    #[command(subcommand)]
    Purge(PurgeCommand),
    /// Tokens of the control plane
    #[command(subcommand)]
    Token(TokenCommand),
    /// What the control plane is and holds
    Status(Door),
}

/// Which control plane, as whom, and how to show its reply.
#[derive(Args, Debug)]
pub(crate) struct Door {
    /// The control plane
    #[arg(long, value_name = "URL", env = "FOREBAY_CONTROL_URL", default_value = "http://127.0.0.1:7080")]
    url: ControlAddress,

    /// File with the token to show
    #[arg(long, value_name = "FILE", env = "FOREBAY_CONTROL_TOKEN_FILE")]
    token_file: Option<PathBuf>,

    /// Show the reply as it came
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AcceleratorCommand {
    /// Add or replace one, written as on a node's command line
    Add {
        /// NAME=ORIGIN[,endpoint=URL][,region=R][,freshness=F][,preset=P][,extent=SIZE]
        #[arg(value_name = "NAME=ORIGIN[,key=value...]", value_parser = accelerator_spec)]
        accelerator: AcceleratorSpec,
        /// The policy that its keys follow
        #[arg(long, value_name = "NAME")]
        policy: Option<PolicyName>,
        #[command(flatten)]
        door: Door,
    },
    /// List them
    List(Door),
    /// Remove one
    Remove {
        name: AcceleratorName,
        #[command(flatten)]
        door: Door,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Add or replace one: rules in order, the first match per field decides
    Set {
        name: PolicyName,
        /// GLOB,key=value... with freshness, extent, admission; in quotes, because of the shell; may be repeated
        #[arg(long, value_name = "RULE", conflicts_with = "file")]
        rule: Vec<PolicyRule>,
        /// Nodes that hold each part of an object
        #[arg(long, value_name = "COUNT", default_value_t = 1, conflicts_with = "file")]
        replicas: u8,
        /// The whole policy as JSON, as `policy list --json` shows it
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
        #[command(flatten)]
        door: Door,
    },
    /// List them
    List(Door),
    /// Remove one that no accelerator names
    Remove {
        name: PolicyName,
        #[command(flatten)]
        door: Door,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Add or replace one
    Add {
        /// The public half
        access_key: AccessKeyId,
        /// File with the secret half, one line
        #[arg(long, value_name = "FILE")]
        secret_file: PathBuf,
        /// Whose it is
        #[arg(long, value_name = "TEXT", default_value = "")]
        note: String,
        #[command(flatten)]
        door: Door,
    },
    /// List them, without secrets
    List(Door),
    /// Remove one
    Remove {
        access_key: AccessKeyId,
        #[command(flatten)]
        door: Door,
    },
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct NodesCommand {
    #[command(subcommand)]
    verb: Option<NodesVerb>,
    #[command(flatten)]
    door: Door,
}

#[derive(Debug, Subcommand)]
enum NodesVerb {
    /// Take a node's share away; it serves on
    Drain(OneNode),
    /// Give a drained node its share back
    Resume(OneNode),
    /// Forget a node that is gone for good
    Remove(OneNode),
}

#[derive(Args, Debug)]
struct OneNode {
    id: NodeId,
    #[command(flatten)]
    door: Door,
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct PlacementCommand {
    #[command(subcommand)]
    verb: Option<PlacementVerb>,
    #[command(flatten)]
    door: Door,
}

#[derive(Debug, Subcommand)]
enum PlacementVerb {
    /// Who owns a byte of an object
    Owners {
        accelerator: AcceleratorName,
        /// The key, as it is, not percent-encoded
        key: String,
        /// Which byte
        #[arg(long, value_name = "BYTES", default_value_t = 0)]
        offset: u64,
        #[command(flatten)]
        door: Door,
    },
    /// Go on from a store that is an older copy
    Advance {
        /// The highest revision that a node has seen, from its refusal
        #[arg(long, value_name = "REVISION")]
        past: u64,
        #[command(flatten)]
        door: Door,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PrewarmCommand {
    /// Have one node read everything under a prefix
    Start {
        accelerator: AcceleratorName,
        /// Every key that begins with it; without it, the whole bucket
        #[arg(default_value = "")]
        prefix: String,
        /// Come back when it has ended
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        door: Door,
    },
    /// List them, newest first
    List(Door),
    /// Show one
    Show {
        id: u64,
        #[command(flatten)]
        door: Door,
    },
    /// End one; what was read stays cached
    Cancel {
        id: u64,
        #[command(flatten)]
        door: Door,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum PurgeCommand {
    /// Forget one object
    Key {
        accelerator: AcceleratorName,
        /// The key, as it is, not percent-encoded
        key: String,
        /// Come back when every node in contact has done it
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        door: Door,
    },
    /// Forget every object under a prefix
    Prefix {
        accelerator: AcceleratorName,
        /// Every key that begins with it; '' for the whole bucket
        prefix: String,
        /// Come back when every node in contact has done it
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        door: Door,
    },
    /// List them, newest first
    List(Door),
    /// Show one, and who has done it
    Show {
        sequence: u64,
        #[command(flatten)]
        door: Door,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Issue one; its text goes to a new file, readable by its owner alone, or is printed once
    Add {
        /// admin, operator, reader or node
        #[arg(long)]
        role: Role,
        /// Whose it is
        #[arg(long, value_name = "TEXT", default_value = "")]
        note: String,
        /// The file to make
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        #[command(flatten)]
        door: Door,
    },
    /// List them, without their text
    List(Door),
    /// End one
    Revoke {
        /// As `token list` shows it
        id: String,
        #[command(flatten)]
        door: Door,
    },
}

/// Between two looks at something that is waited for.
const LOOK_AGAIN: Duration = Duration::from_millis(300);

/// Does it and returns what is to be printed.
///
/// # Errors
/// The control plane cannot be reached or refuses, or a file cannot be read.
pub(crate) async fn run(command: Command) -> Result<String> {
    match command {
        Command::Accelerator(command) => accelerator(command).await,
        Command::Policy(command) => policy(command).await,
        Command::Key(command) => key(command).await,
        Command::Nodes(command) => nodes(command).await,
        Command::Placement(command) => placement(command).await,
        Command::Prewarm(command) => prewarm(command).await,
        Command::Purge(command) => purge(command).await,
        Command::Token(command) => token(command).await,
        Command::Status(door) => door.show(&door.get("/v1/status").await?, words::status),
    }
}

async fn accelerator(command: AcceleratorCommand) -> Result<String> {
    match command {
        AcceleratorCommand::Add { accelerator, policy, door } => {
            let accelerator = Accelerator::from_spec(&accelerator, policy);
            let path = format!("/v1/accelerators/{}", accelerator.name);
            let reply = door.send(Method::PUT, &path, &accelerator).await?;
            door.show(&reply, |it: &Accelerator| words::accelerators(std::slice::from_ref(it)))
        }
        AcceleratorCommand::List(door) => {
            door.show(&door.get("/v1/accelerators").await?, |all: &Vec<_>| words::accelerators(all))
        }
        AcceleratorCommand::Remove { name, door } => door.delete(&format!("/v1/accelerators/{name}")).await,
    }
}

async fn policy(command: PolicyCommand) -> Result<String> {
    match command {
        PolicyCommand::Set { name, rule, replicas, file, door } => {
            let policy = match file {
                Some(file) => {
                    let text = std::fs::read_to_string(&file)
                        .with_context(|| format!("--file: reading {}", file.display()))?;
                    let value: Value =
                        serde_json::from_str(&text).with_context(|| format!("--file: {}", file.display()))?;
                    let named = value.get("name").and_then(Value::as_str);
                    if named.is_some_and(|named| named != name.as_str()) {
                        bail!("--file: {} holds another policy than `{name}`", file.display());
                    }
                    value
                }
                None => serde_json::to_value(Policy { name: name.clone(), replicas, rules: rule })?,
            };
            let reply = door.send(Method::PUT, &format!("/v1/policies/{name}"), &policy).await?;
            door.show(&reply, |it: &Policy| words::policies(std::slice::from_ref(it)))
        }
        PolicyCommand::List(door) => {
            door.show(&door.get("/v1/policies").await?, |all: &Vec<_>| words::policies(all))
        }
        PolicyCommand::Remove { name, door } => door.delete(&format!("/v1/policies/{name}")).await,
    }
}

async fn key(command: KeyCommand) -> Result<String> {
    match command {
        KeyCommand::Add { access_key, secret_file, note, door } => {
            let text = std::fs::read_to_string(&secret_file)
                .with_context(|| format!("--secret-file: reading {}", secret_file.display()))?;
            let secret = text
                .trim_end_matches(['\n', '\r'])
                .parse()
                .with_context(|| format!("--secret-file: {}", secret_file.display()))?;
            let body = AccessKeyBody { secret, note };
            let reply = door.send(Method::PUT, &format!("/v1/keys/{access_key}"), &body).await?;
            door.show(&reply, |it: &AccessKeyInfo| words::keys(std::slice::from_ref(it)))
        }
        KeyCommand::List(door) => door.show(&door.get("/v1/keys").await?, |all: &Vec<_>| words::keys(all)),
        KeyCommand::Remove { access_key, door } => door.delete(&format!("/v1/keys/{access_key}")).await,
    }
}

async fn nodes(command: NodesCommand) -> Result<String> {
    let (verb, OneNode { id, door }) = match command.verb {
        None => {
            let door = command.door;
            return door.show(&door.get("/v1/nodes").await?, |all: &Vec<_>| words::nodes(all));
        }
        Some(NodesVerb::Remove(OneNode { id, door })) => {
            return door.delete(&format!("/v1/nodes/{id}")).await;
        }
        Some(NodesVerb::Drain(one)) => ("drain", one),
        Some(NodesVerb::Resume(one)) => ("resume", one),
    };
    let reply = door.send(Method::POST, &format!("/v1/nodes/{id}/{verb}"), &json!({})).await?;
    door.show(&reply, |it: &Node| words::nodes(std::slice::from_ref(it)))
}

async fn placement(command: PlacementCommand) -> Result<String> {
    match command.verb {
        None => {
            let door = command.door;
            door.show(&door.get("/v1/placement").await?, words::placement)
        }
        Some(PlacementVerb::Owners { accelerator, key, offset, door }) => {
            let placement: Placement = door.read(&door.get("/v1/placement").await?)?;
            let owners = placement.owners(&accelerator, key.as_bytes(), group_of(offset));
            if door.json {
                return Ok(format!("{:#}\n", json!({"epoch": placement.epoch, "owners": owners})));
            }
            Ok(words::owners(&placement, &owners, group_of(offset)))
        }
        Some(PlacementVerb::Advance { past, door }) => {
            let reply = door.send(Method::POST, "/v1/placement/advance", &json!({"past": past})).await?;
            door.show(&reply, words::placement)
        }
    }
}

async fn prewarm(command: PrewarmCommand) -> Result<String> {
    match command {
        PrewarmCommand::Start { accelerator, prefix, wait, door } => {
            let body = PrewarmBody { accelerator, prefix };
            let mut reply = door.send(Method::POST, "/v1/prewarms", &body).await?;
            let mut job: Prewarm = door.read(&reply)?;
            while wait && !job.state.is_over() {
                tokio::time::sleep(LOOK_AGAIN).await;
                reply = door.get(&format!("/v1/prewarms/{}", job.id)).await?;
                job = door.read(&reply)?;
            }
            door.show(&reply, |it: &Prewarm| words::prewarms(std::slice::from_ref(it)))
        }
        PrewarmCommand::List(door) => {
            door.show(&door.get("/v1/prewarms").await?, |all: &Vec<_>| words::prewarms(all))
        }
        PrewarmCommand::Show { id, door } => {
            let reply = door.get(&format!("/v1/prewarms/{id}")).await?;
            door.show(&reply, |it: &Prewarm| words::prewarms(std::slice::from_ref(it)))
        }
        PrewarmCommand::Cancel { id, door } => door.delete(&format!("/v1/prewarms/{id}")).await,
    }
}

async fn purge(command: PurgeCommand) -> Result<String> {
    let (body, wait, door) = match command {
        PurgeCommand::Key { accelerator, key, wait, door } => {
            (PurgeBody { accelerator, key: Some(key), prefix: None }, wait, door)
        }
        PurgeCommand::Prefix { accelerator, prefix, wait, door } => {
            (PurgeBody { accelerator, key: None, prefix: Some(prefix) }, wait, door)
        }
        PurgeCommand::List(door) => {
            return door.show(&door.get("/v1/purges").await?, |all: &Vec<_>| words::purges(all));
        }
        PurgeCommand::Show { sequence, door } => {
            let reply = door.get(&format!("/v1/purges/{sequence}")).await?;
            return door.show(&reply, |it: &PurgeStatus| words::purges(std::slice::from_ref(it)));
        }
    };
    let mut reply = door.send(Method::POST, "/v1/purges", &body).await?;
    let mut status: PurgeStatus = door.read(&reply)?;
    while wait && !status.complete {
        tokio::time::sleep(LOOK_AGAIN).await;
        reply = door.get(&format!("/v1/purges/{}", status.purge.sequence)).await?;
        status = door.read(&reply)?;
    }
    door.show(&reply, |it: &PurgeStatus| words::purges(std::slice::from_ref(it)))
}

async fn token(command: TokenCommand) -> Result<String> {
    match command {
        TokenCommand::Add { role, note, out, door } => {
            // Made before the token is, so that no token is issued for a file that cannot be.
            let file = out.as_deref().map(new_private).transpose()?;
            let issued = async {
                let reply = door.send(Method::POST, "/v1/tokens", &TokenBody { role, note }).await?;
                door.read::<TokenIssued>(&reply)
            };
            let (issued, out) = match (issued.await, out) {
                (Ok(issued), out) => (issued, out),
                (Err(error), out) => {
                    if let Some(out) = out {
                        let _ = std::fs::remove_file(out);
                    }
                    return Err(error);
                }
            };
            let Some((mut file, path)) = file.zip(out) else {
                return door
                    .show(&serde_json::to_vec(&issued)?, |it: &TokenIssued| format!("{}\n", it.token));
            };
            writeln!(file, "{}", issued.token)
                .and_then(|()| file.sync_all())
                .with_context(|| format!("--out: writing {}", path.display()))?;
            door.show(&serde_json::to_vec(&issued.info)?, |it: &TokenInfo| {
                format!("{}written to {}\n", words::tokens(std::slice::from_ref(it)), path.display())
            })
        }
        TokenCommand::List(door) => {
            door.show(&door.get("/v1/tokens").await?, |all: &Vec<_>| words::tokens(all))
        }
        TokenCommand::Revoke { id, door } => door.delete(&format!("/v1/tokens/{}", encoded(&id))).await,
    }
}

/// With every cause in one line: clap shows the first sentence alone.
fn accelerator_spec(text: &str) -> Result<AcceleratorSpec, String> {
    text.parse().map_err(|error| format!("{:#}", anyhow::Error::new::<SpecError>(error)))
}

fn new_private(path: &Path) -> Result<std::fs::File> {
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("--out: making {}", path.display()))
}

impl Door {
    async fn get(&self, path: &str) -> Result<Bytes> {
        self.ask(Method::GET, path, None).await
    }

    async fn send(&self, method: Method, path: &str, body: &impl Serialize) -> Result<Bytes> {
        self.ask(method, path, Some(serde_json::to_string(body)?)).await
    }

    async fn delete(&self, path: &str) -> Result<String> {
        self.ask(Method::DELETE, path, None).await?;
        Ok(if self.json { "{}\n".to_owned() } else { "done\n".to_owned() })
    }

    async fn ask(&self, method: Method, path: &str, body: Option<String>) -> Result<Bytes> {
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        ask(&self.url.0, token.as_deref(), method, path, body).await
    }

    fn read<T: DeserializeOwned>(&self, reply: &[u8]) -> Result<T> {
        serde_json::from_slice(reply)
            .with_context(|| format!("{} answered something that a control plane does not say", self.url.0))
    }

    fn show<T: DeserializeOwned>(&self, reply: &[u8], words: impl Fn(&T) -> String) -> Result<String> {
        if self.json {
            return Ok(format!("{:#}\n", self.read::<Value>(reply)?));
        }
        Ok(words(&self.read(reply)?))
    }
}
