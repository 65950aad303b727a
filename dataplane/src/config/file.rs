//! The configuration file.
//!
//! ```toml
//! listen = ["0.0.0.0:7070"]
//! listen-tls = ["0.0.0.0:7443"]
//! cert = "/etc/forebay/node.pem"
//! key = "/etc/forebay/node.key"
//! memory = "8GiB"
//! drive = ["/dev/nvme0n1", { path = "/var/cache/forebay", size = "100GiB" }]
//!
//! [[accelerator]]
//! name = "lake"
//! origin = "s3://lake-prod"
//! freshness = "ttl:60s"
//! rule = [{ match = "**/_tmp/**", cache = false }]
//!
//! [[keys]]
//! access-key = "AKEXAMPLE"
//! secret-key = "..."
//! ```
//!
//! The tables are walked by hand: every refusal names its place in the file, and a name that is not ours is answered
//! with the nearest that is.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::str::FromStr;

use forebay_control_api::{AcceleratorSpec, ByteSize, Rule, suggestion};
use toml::{Table, Value};

use super::cli::{Settings, chain, said};
use super::value::{ClientKey, DriveArg, parse_listen};

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// It is not TOML.
    #[error("it is not TOML: {0}")]
    Toml(#[from] toml::de::Error),
    /// A name that is not ours.
    #[error("there is no `{name}`{at}; {help}")]
    Unknown {
        /// The name.
        name: String,
        /// In which table.
        at: String,
        /// What may have been meant.
        help: String,
    },
    /// A value of the wrong kind.
    #[error("`{name}`: expected {expected}, found {found}")]
    Kind {
        /// The name.
        name: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// A value that does not parse.
    #[error("`{name}`: {why}")]
    Value {
        /// The name.
        name: String,
        /// Why not.
        why: String,
    },
    /// A table without something it must have.
    #[error("`{name}` needs `{missing}`")]
    Missing {
        /// The table.
        name: String,
        /// What it lacks.
        missing: &'static str,
    },
}

/// Reads a file; what it does not speak of stays unsaid.
///
/// # Errors
/// The first thing in it that cannot be.
pub(super) fn read(path: &Path) -> Result<Settings, FileError> {
    parse(&std::fs::read_to_string(path)?)
}

/// Whether users other than the owner may read the file.
pub(super) fn others_may_read(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| about.permissions().mode() & 0o044 != 0)
}

fn parse(text: &str) -> Result<Settings, FileError> {
    let mut table: Table = text.parse()?;
    known(&table, "", &Settings::NAMES)?;
    let mut settings = Settings::default();
    for text in texts(&mut table, "listen")? {
        let address = parse_listen(&text).map_err(|error| bad("listen", chain(&error)))?;
        settings.listen.push(address);
    }
    for text in texts(&mut table, "listen-tls")? {
        let address = parse_listen(&text).map_err(|error| bad("listen-tls", chain(&error)))?;
        settings.listen_tls.push(address);
    }
    settings.cert = text_of(&mut table, "", "cert")?.map(Into::into);
    settings.key = text_of(&mut table, "", "key")?.map(Into::into);
    for text in texts(&mut table, "listen-quic")? {
        let address = parse_listen(&text).map_err(|error| bad("listen-quic", chain(&error)))?;
        settings.listen_quic.push(address);
    }
    settings.alt_svc = parsed(&mut table, "", "alt-svc")?;
    settings.admin = parsed(&mut table, "", "admin")?;
    settings.cores = parsed(&mut table, "", "cores")?;
    settings.memory = size(&mut table, "", "memory")?;
    for (name, value) in list(&mut table, "drive")? {
        settings.drive.push(drive(&name, value)?);
    }
    for (name, value) in list(&mut table, "accelerator")? {
        settings.accelerator.push(accelerator(&name, value)?);
    }
    settings.anonymous = boolean(&mut table, "", "anonymous")?.unwrap_or(false);
    settings.engine = parsed(&mut table, "", "engine")?;
    settings.send = parsed(&mut table, "", "send")?;
    settings.admin_token_file = text_of(&mut table, "", "admin-token-file")?.map(Into::into);
    settings.send_stall = parsed(&mut table, "", "send-stall")?;
    settings.drain = parsed(&mut table, "", "drain")?;
    settings.origin_connections = count(&mut table, "origin-connections")?;
    settings.connections = count(&mut table, "connections")?;
    settings.control = text_of(&mut table, "", "control")?;
    settings.token_file = text_of(&mut table, "", "token-file")?.map(Into::into);
    settings.node_id = parsed(&mut table, "", "node-id")?;
    settings.zone = parsed(&mut table, "", "zone")?;
    settings.weight = count(&mut table, "weight")?;
    settings.advertise = text_of(&mut table, "", "advertise")?;
    settings.state_dir = text_of(&mut table, "", "state-dir")?.map(Into::into);
    for (name, value) in list(&mut table, "keys")? {
        let mut key = table_of(&name, value)?;
        known(&key, &name, &["access-key", "secret-key"])?;
        let access = needed(&mut key, &name, "access-key")?;
        let secret = needed(&mut key, &name, "secret-key")?;
        settings.keys.push(ClientKey::new(&access, &secret).map_err(|why| bad(&name, why.to_owned()))?);
    }
    Ok(settings)
}

/// `"path=P,size=S"`, `"P"` or a table.
fn drive(name: &str, value: Value) -> Result<DriveArg, FileError> {
    match value {
        Value::String(text) => said(&text).map_err(|why| bad(name, why)),
        value => {
            let mut table = table_of(name, value)?;
            known(&table, name, &["path", "size"])?;
            let path = needed(&mut table, name, "path")?.into();
            Ok(DriveArg { path, size: size(&mut table, name, "size")? })
        }
    }
}

/// The text of the command line or a table, which can also hold rules.
fn accelerator(name: &str, value: Value) -> Result<AcceleratorSpec, FileError> {
    const NAMES: [&str; 8] =
        ["name", "origin", "endpoint", "region", "freshness", "preset", "extent", "rule"];
    if let Value::String(text) = value {
        return said(&text).map_err(|why| bad(name, why));
    }
    let mut table = table_of(name, value)?;
    known(&table, name, &NAMES)?;
    let origin = needed(&mut table, name, "origin")?;
    let text = match text_of(&mut table, name, "name")? {
        Some(alias) => format!("{alias}={origin}"),
        None => origin,
    };
    // A comma would smuggle keys of the short form in.
    if text.contains(',') {
        return Err(bad(name, format!("`{text}` holds a comma")));
    }
    let mut spec: AcceleratorSpec = said(&text).map_err(|why| bad(name, why))?;
    for key in AcceleratorSpec::KEYS {
        if let Some(value) = text_of(&mut table, name, key)? {
            spec.set(key, &value).map_err(|error| bad(name, chain(&error)))?;
        }
    }
    for (name, value) in
        list(&mut table, "rule")?.into_iter().map(|(rule, value)| (format!("{name}.{rule}"), value))
    {
        let mut rule = table_of(&name, value)?;
        known(&rule, &name, &["match", "freshness", "cache"])?;
        spec.rules.push(Rule {
            pattern: needed(&mut rule, &name, "match")?,
            freshness: parsed(&mut rule, &name, "freshness")?,
            cache: boolean(&mut rule, &name, "cache")?,
        });
    }
    Ok(spec)
}

fn known(table: &Table, at: &str, names: &[&str]) -> Result<(), FileError> {
    match table.keys().find(|name| !names.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => Err(FileError::Unknown {
            name: name.clone(),
            at: if at.is_empty() { String::new() } else { format!(" in `{at}`") },
            help: suggestion(name, names),
        }),
    }
}

fn bad(name: &str, why: String) -> FileError {
    FileError::Value { name: name.to_owned(), why }
}

fn kind(name: String, expected: &'static str, value: &Value) -> FileError {
    FileError::Kind { name, expected, found: value.type_str() }
}

fn at(table: &str, name: &str) -> String {
    if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") }
}

fn table_of(name: &str, value: Value) -> Result<Table, FileError> {
    match value {
        Value::Table(table) => Ok(table),
        value => Err(kind(name.to_owned(), "a table", &value)),
    }
}

fn text_of(table: &mut Table, path: &str, name: &str) -> Result<Option<String>, FileError> {
    match table.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(value) => Err(kind(at(path, name), "a text in quotes", &value)),
    }
}

fn needed(table: &mut Table, path: &str, name: &'static str) -> Result<String, FileError> {
    text_of(table, path, name)?.ok_or_else(|| FileError::Missing { name: path.to_owned(), missing: name })
}

fn parsed<T>(table: &mut Table, path: &str, name: &str) -> Result<Option<T>, FileError>
where
    T: FromStr,
    T::Err: std::error::Error,
{
    let text = text_of(table, path, name)?;
    text.map(|text| said(&text)).transpose().map_err(|why| bad(&at(path, name), why))
}

/// A size may also stand as a plain number of bytes.
fn size(table: &mut Table, path: &str, name: &str) -> Result<Option<ByteSize>, FileError> {
    if let Some(Value::Integer(bytes)) = table.get(name) {
        let bytes =
            u64::try_from(*bytes).map_err(|_| bad(&at(path, name), "a size is not negative".to_owned()))?;
        return Ok(Some(ByteSize::new(bytes)));
    }
    parsed(table, path, name)
}

fn boolean(table: &mut Table, path: &str, name: &str) -> Result<Option<bool>, FileError> {
    match table.remove(name) {
        None => Ok(None),
        Some(Value::Boolean(value)) => Ok(Some(value)),
        Some(value) => Err(kind(at(path, name), "true or false", &value)),
    }
}

fn count(table: &mut Table, name: &str) -> Result<Option<u32>, FileError> {
    match table.remove(name) {
        None => Ok(None),
        Some(Value::Integer(value)) => {
            let value = u32::try_from(value).map_err(|_| bad(name, format!("{value} is not a count")))?;
            Ok(Some(value))
        }
        Some(value) => Err(kind(name.to_owned(), "a number", &value)),
    }
}

/// A list, or one thing for a list of one; each with its name for refusals.
fn list(table: &mut Table, name: &str) -> Result<Vec<(String, Value)>, FileError> {
    match table.remove(name) {
        None => Ok(Vec::new()),
        Some(Value::Array(values)) => {
            Ok(values.into_iter().enumerate().map(|(at, value)| (format!("{name}[{at}]"), value)).collect())
        }
        Some(value @ (Value::String(_) | Value::Table(_))) => Ok(vec![(name.to_owned(), value)]),
        Some(value) => Err(kind(name.to_owned(), "a list", &value)),
    }
}

fn texts(table: &mut Table, name: &str) -> Result<Vec<String>, FileError> {
    list(table, name)?
        .into_iter()
        .map(|(name, value)| match value {
            Value::String(text) => Ok(text),
            value => Err(kind(name, "a text in quotes", &value)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use forebay_control_api::{Freshness, Preset, Span};

    use super::super::value::{AdminAddr, AltSvc, CoreChoice, EngineChoice};
    use super::*;

    #[test]
    fn every_name_of_the_file_reaches_its_setting() {
        let settings = parse(
            r#"
            listen = ["0.0.0.0:7070", ":7072"]
            listen-tls = "0.0.0.0:7443"
            cert = "/etc/forebay/node.pem"
            key = "/etc/forebay/node.key"
            listen-quic = "0.0.0.0:7070"
            alt-svc = "all"
            admin = "unix:/run/forebay.sock"
            cores = "0-1"
            memory = "8GiB"
            drive = ["/dev/nvme0n1", { path = "/c/f", size = 1073741824 }]
            anonymous = true
            engine = "portable"
            send = "copy"
            admin-token-file = "/etc/forebay/token"
            send-stall = "5s"
            drain = "1m"
            origin-connections = 32
            connections = 1000
            control = "http://10.0.0.1:7080"
            token-file = "/etc/forebay/node-token"
            node-id = "node-a"
            zone = "zone-1"
            weight = 64
            advertise = "http://10.0.0.11:7070"
            state-dir = "/var/lib/forebay"

            [[accelerator]]
            name = "lake"
            origin = "s3://lake-prod"
            endpoint = "http://10.0.0.1:9000"
            region = "eu-1"
            freshness = "ttl:60s"
            preset = "lakehouse"
            extent = "64KiB"
            rule = [{ match = "tmp/**", cache = false }, { match = "**", freshness = "immutable" }]

            [[keys]]
            access-key = "AK"
            secret-key = "SK"
            "#,
        )
        .expect("a file");
        assert_eq!(settings.listen.len(), 2);
        assert_eq!(settings.listen_tls, ["0.0.0.0:7443".parse().expect("an address")]);
        assert_eq!(settings.cert, Some("/etc/forebay/node.pem".into()));
        assert_eq!(settings.key, Some("/etc/forebay/node.key".into()));
        assert_eq!(settings.listen_quic, ["0.0.0.0:7070".parse().expect("an address")]);
        assert_eq!(settings.alt_svc, Some(AltSvc::All));
        assert_eq!(settings.admin, Some(AdminAddr::Unix("/run/forebay.sock".into())));
        assert_eq!(settings.cores, Some(CoreChoice::These(vec![0, 1])));
        assert_eq!(settings.memory, Some(ByteSize::gib(8)));
        assert_eq!(settings.drive[0], DriveArg { path: "/dev/nvme0n1".into(), size: None });
        assert_eq!(settings.drive[1], DriveArg { path: "/c/f".into(), size: Some(ByteSize::gib(1)) });
        assert!(settings.anonymous);
        assert_eq!(settings.engine, Some(EngineChoice::Portable));
        assert_eq!(settings.send, Some(crate::engine::Sends::Copy));
        assert_eq!(settings.admin_token_file, Some("/etc/forebay/token".into()));
        assert_eq!(settings.send_stall, Some(Span::from_secs(5)));
        assert_eq!(settings.drain, Some(Span::from_secs(60)));
        assert_eq!(settings.origin_connections, Some(32));
        assert_eq!(settings.connections, Some(1000));
        assert_eq!(settings.control.as_deref(), Some("http://10.0.0.1:7080"));
        assert_eq!(settings.token_file, Some("/etc/forebay/node-token".into()));
        assert_eq!(settings.node_id, Some("node-a".parse().expect("an id")));
        assert_eq!(settings.zone, Some("zone-1".parse().expect("a zone")));
        assert_eq!(settings.weight, Some(64));
        assert_eq!(settings.advertise.as_deref(), Some("http://10.0.0.11:7070"));
        assert_eq!(settings.state_dir, Some("/var/lib/forebay".into()));
        assert_eq!(&*settings.keys[0].access_key, "AK");
        let lake = &settings.accelerator[0];
        assert_eq!(
            lake.to_string(),
            "lake=s3://lake-prod,endpoint=http://10.0.0.1:9000,region=eu-1,freshness=ttl:1m,preset=lakehouse,extent=64KiB"
        );
        assert_eq!(lake.preset, Some(Preset::Lakehouse));
        assert_eq!(lake.rules[0].cache, Some(false));
        assert_eq!(lake.rules[1].freshness, Some(Freshness::Immutable));
    }

    #[test]
    fn one_thing_does_for_a_list_of_one() {
        let settings = parse("listen = \"127.0.0.1:1\"\naccelerator = \"abc=s3://bucket\"\ndrive = \"/d\"")
            .expect("a file");
        assert_eq!((settings.listen.len(), settings.accelerator.len(), settings.drive.len()), (1, 1, 1));
        assert!(parse("").expect("an empty file").listen.is_empty());
    }

    #[test]
    fn a_refusal_names_the_place_and_the_nearest_name() {
        for (text, words) in [
            ("memroy = \"8GiB\"", "`memory`?"),
            ("admin_token_file = \"x\"", "`admin-token-file`?"),
            ("config = \"x\"", "there is no `config`"),
            ("memory = \"8G\"", "`memory`: `8G` is ambiguous"),
            ("memory = -5", "not negative"),
            ("memory = true", "found boolean"),
            ("connections = \"5\"", "expected a number"),
            ("connections = -5", "not a count"),
            ("listen = [7070]", "`listen[0]`: expected a text"),
            ("anonymous = \"yes\"", "true or false"),
            ("[[accelerator]]\nname = \"abc\"", "`accelerator[0]` needs `origin`"),
            (
                "[[accelerator]]\norigin = \"s3://bucket\"\nfreshnes = \"strict\"",
                "in `accelerator[0]`; did you mean `freshness`?",
            ),
            ("[[accelerator]]\norigin = \"s3://bucket,extent=64KiB\"", "comma"),
            ("[[accelerator]]\norigin = \"s3://bucket\"\nrule = [{ mach = \"a\" }]", "`match`?"),
            (
                "[[accelerator]]\norigin = \"s3://bucket\"\nrule = [{ match = \"a\", freshness = \"never\" }]",
                "`accelerator[0].rule[0].freshness`",
            ),
            ("[[accelerator]]\norigin = \"s3://bucket\"\nextent = \"3MiB\"", "power of two"),
            ("drive = [{ path = \"/a\", sise = \"1GiB\" }]", "`size`?"),
            ("[[keys]]\naccess-key = \"AK\"", "needs `secret-key`"),
            ("[[keys]]\naccess-key = \"AK\"\nsecret = \"x\"", "in `keys[0]`"),
            ("memory = ", "not TOML"),
        ] {
            let error = chain(&parse(text).expect_err(text));
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_refusal_never_shows_a_secret() {
        let error = parse("[[keys]]\naccess-key = \"AK\"\nsecret-key = \"hush hush\"").expect_err("a space");
        assert!(!chain(&error).contains("hush"), "{error}");
    }
}
