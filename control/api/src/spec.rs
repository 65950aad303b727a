//! What an operator says about one accelerator: `NAME=ORIGIN[,key=value...]`.
//!
//! The name is the bucket that clients ask for, so it obeys the rules of bucket names. The origin is one place; what
//! this version cannot reach (`tos://`, `file://`, wildcard names) is refused by name rather than as a spelling
//! mistake. Credentials have no place in this text: command lines are seen by every user of a machine.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::rule::{Freshness, FreshnessError, Preset, PresetError, Rule};
use crate::size::{ByteSize, SizeError};
use crate::word::suggestion;

/// Smallest extent: one block of checksum and drive read.
pub const EXTENT_BYTES_MIN: u64 = 64 << 10;
/// Largest extent.
pub const EXTENT_BYTES_MAX: u64 = 4 << 20;
/// Extent where nothing is said.
pub const EXTENT_BYTES_DEFAULT: u64 = 1 << 20;

/// A bucket name or alias that clients use: 3 to 63 of `a-z`, `0-9`, `.` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AcceleratorName(Box<str>);

impl AcceleratorName {
    /// The name as clients write it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AcceleratorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for AcceleratorName {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        if text.contains('*') {
            return Err(SpecError::Wildcard(text.to_owned()));
        }
        check_bucket_name(text)
            .map_err(|why| SpecError::Name { name: text.to_owned(), why })
            .map(|()| Self(text.into()))
    }
}

impl Serialize for AcceleratorName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AcceleratorName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

crate::travels_as_text!(AcceleratorName, "data");

/// How an HTTP origin is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// In the clear.
    Http,
    /// With TLS.
    Https,
}

impl Scheme {
    /// `http` or `https`.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    /// 80 or 443.
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// The store behind an accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum OriginSpec {
    /// A bucket of an S3 service, with signed requests.
    S3 {
        /// The bucket's own name.
        bucket: Box<str>,
    },
    /// A plain web server: the key is appended to the prefix, requests are not signed.
    Http {
        /// With or without TLS.
        scheme: Scheme,
        /// Host name, IPv4 address or IPv6 address in brackets.
        host: Box<str>,
        /// 1 to 65535.
        port: u16,
        /// Percent-encoded path that keys are appended to: begins with `/`, does not end with one unless it is `/`.
        prefix: Box<str>,
    },
}

impl OriginSpec {
    /// `host`, or `host:port` where the port is not the scheme's own; the bucket of an S3 origin has none.
    pub fn authority(&self) -> Option<String> {
        match self {
            Self::S3 { .. } => None,
            Self::Http { scheme, host, port, .. } if *port == scheme.default_port() => Some(host.to_string()),
            Self::Http { host, port, .. } => Some(format!("{host}:{port}")),
        }
    }
}

impl fmt::Display for OriginSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::S3 { bucket } => write!(f, "s3://{bucket}"),
            Self::Http { scheme, prefix, .. } => {
                let authority = self.authority().expect("an HTTP origin has a host");
                let prefix = if &**prefix == "/" { "" } else { prefix };
                write!(f, "{}://{authority}{prefix}", scheme.word())
            }
        }
    }
}

impl FromStr for OriginSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(SpecError::Origin { text: text.to_owned(), why: "it has no scheme" });
        };
        match scheme {
            "s3" => {
                let bucket = rest.strip_suffix('/').unwrap_or(rest);
                if bucket.contains('*') {
                    return Err(SpecError::Wildcard(text.to_owned()));
                }
                if bucket.contains('/') {
                    let why = "an S3 origin is a whole bucket, without a prefix";
                    return Err(SpecError::Origin { text: text.to_owned(), why });
                }
                check_bucket_name(bucket).map_err(|why| SpecError::Origin { text: text.to_owned(), why })?;
                Ok(Self::S3 { bucket: bucket.into() })
            }
            "http" => parse_http(Scheme::Http, text, rest),
            "https" => parse_http(Scheme::Https, text, rest),
            "tos" | "file" => Err(SpecError::NotYet { text: text.to_owned(), scheme: scheme.to_owned() }),
            _ => Err(SpecError::Origin { text: text.to_owned(), why: "its scheme is none of these" }),
        }
    }
}

impl Serialize for OriginSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OriginSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

crate::travels_as_text!(OriginSpec, "s3://bucket");

/// One accelerator as the operator says it. `Display` gives the text form back, without the rules, which only a
/// file can hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceleratorSpec {
    /// The bucket name that clients use.
    pub name: AcceleratorName,
    /// The store behind it.
    pub origin: OriginSpec,
    /// `http(s)://host[:port]` of an S3 service that is not AWS's own; path style.
    pub endpoint: Option<Box<str>>,
    /// The region that S3 requests are signed for; without one, the standard AWS sources.
    pub region: Option<Box<str>>,
    /// Freshness of keys that no rule speaks of; `strict` where absent.
    pub freshness: Option<Freshness>,
    /// Rules that stand behind those of the file.
    pub preset: Option<Preset>,
    /// Unit of download and caching: a power of two, 64 KiB to 4 MiB.
    pub extent: Option<ByteSize>,
    /// Rules of the file, in order.
    pub rules: Vec<Rule>,
}

impl AcceleratorSpec {
    /// The keys that may stand behind the origin.
    pub const KEYS: [&'static str; 5] = ["endpoint", "region", "freshness", "preset", "extent"];

    /// An accelerator with nothing said but where the bytes are.
    pub fn new(name: AcceleratorName, origin: OriginSpec) -> Self {
        Self {
            name,
            origin,
            endpoint: None,
            region: None,
            freshness: None,
            preset: None,
            extent: None,
            rules: Vec::new(),
        }
    }

    /// Bytes of one extent.
    pub fn extent_bytes(&self) -> u64 {
        self.extent.map_or(EXTENT_BYTES_DEFAULT, ByteSize::bytes)
    }

    /// Takes one of [`Self::KEYS`].
    ///
    /// # Errors
    /// An unknown key, a key said twice, a value that does not parse, or a key that this origin has no use for.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        let already = match key {
            "endpoint" => self.endpoint.is_some(),
            "region" => self.region.is_some(),
            "freshness" => self.freshness.is_some(),
            "preset" => self.preset.is_some(),
            "extent" => self.extent.is_some(),
            _ => {
                let help = suggestion(key, &Self::KEYS);
                return Err(SpecError::Key { name: self.name.to_string(), key: key.to_owned(), help });
            }
        };
        if already {
            return Err(SpecError::Twice { name: self.name.to_string(), key: key.to_owned() });
        }
        if matches!(key, "endpoint" | "region") && matches!(self.origin, OriginSpec::Http { .. }) {
            return Err(SpecError::NotForHttp { name: self.name.to_string(), key: key.to_owned() });
        }
        let bad = |source| SpecError::Value { name: self.name.to_string(), key: key.to_owned(), source };
        match key {
            "endpoint" => self.endpoint = Some(parse_endpoint(value).map_err(bad)?),
            "region" => self.region = Some(parse_region(value).map_err(bad)?),
            "freshness" => {
                self.freshness = Some(value.parse().map_err(|error| bad(ValueError::Freshness(error)))?);
            }
            "preset" => self.preset = Some(value.parse().map_err(|error| bad(ValueError::Preset(error)))?),
            _ => self.extent = Some(parse_extent(value).map_err(bad)?),
        }
        Ok(())
    }
}

impl FromStr for AcceleratorSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut parts = text.split(',');
        let head = parts.next().unwrap_or_default();
        // `a=s3://b` has a name; `s3://b` takes the bucket's own.
        let named = head.split_once('=').filter(|(name, _)| !name.contains("://"));
        let (name, origin) = match named {
            Some((name, origin)) => (name.parse()?, origin.parse()?),
            None => match head.parse()? {
                OriginSpec::S3 { bucket } => (bucket.parse()?, OriginSpec::S3 { bucket }),
                OriginSpec::Http { .. } => return Err(SpecError::Nameless(head.to_owned())),
            },
        };
        let mut spec = Self::new(name, origin);
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(SpecError::Pair { name: spec.name.to_string(), part: part.to_owned() });
            };
            spec.set(key.trim(), value.trim())?;
        }
        Ok(spec)
    }
}

impl fmt::Display for AcceleratorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.origin)?;
        if let Some(endpoint) = &self.endpoint {
            write!(f, ",endpoint={endpoint}")?;
        }
        if let Some(region) = &self.region {
            write!(f, ",region={region}")?;
        }
        if let Some(freshness) = &self.freshness {
            write!(f, ",freshness={freshness}")?;
        }
        if let Some(preset) = &self.preset {
            write!(f, ",preset={preset}")?;
        }
        if let Some(extent) = &self.extent {
            write!(f, ",extent={extent}")?;
        }
        Ok(())
    }
}

/// Why a text is not an accelerator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The name breaks the rules of bucket names.
    #[error("`{name}` cannot be a bucket name: {why}")]
    Name {
        /// The name.
        name: String,
        /// The rule.
        why: &'static str,
    },
    /// `*` or `prefix-*`.
    #[error("`{0}`: this version has no wildcard names; give one --accelerator for each bucket")]
    Wildcard(String),
    /// No origin.
    #[error(
        "`{text}` is not an origin: {why}; write s3://BUCKET, http://HOST[:PORT][/PREFIX] or https://..."
    )]
    Origin {
        /// The origin.
        text: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A scheme of the contract that this version does not speak.
    #[error("`{text}`: {scheme}:// origins are not in this version; s3://, http:// and https:// are")]
    NotYet {
        /// The origin.
        text: String,
        /// Its scheme.
        scheme: String,
    },
    /// Only a bucket gives an accelerator its name.
    #[error("`{0}` needs a name that clients use as the bucket: write NAME={0}")]
    Nameless(String),
    /// A part without `=`.
    #[error("accelerator {name}: `{part}` is not a key=value pair")]
    Pair {
        /// The accelerator.
        name: String,
        /// The part.
        part: String,
    },
    /// An unknown key.
    #[error("accelerator {name}: there is no key `{key}`; {help}")]
    Key {
        /// The accelerator.
        name: String,
        /// The key.
        key: String,
        /// What may have been meant.
        help: String,
    },
    /// A key said twice.
    #[error("accelerator {name}: `{key}` is given twice")]
    Twice {
        /// The accelerator.
        name: String,
        /// The key.
        key: String,
    },
    /// `endpoint` or `region` of a plain web server.
    #[error("accelerator {name}: `{key}` belongs to s3:// origins; an http(s):// origin names its own host")]
    NotForHttp {
        /// The accelerator.
        name: String,
        /// The key.
        key: String,
    },
    /// A value that does not parse.
    #[error("accelerator {name}: {key}")]
    Value {
        /// The accelerator.
        name: String,
        /// The key.
        key: String,
        /// What is wrong with its value.
        #[source]
        source: ValueError,
    },
}

/// Why a value is not good for its key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Of `freshness`.
    #[error(transparent)]
    Freshness(FreshnessError),
    /// Of `preset`.
    #[error(transparent)]
    Preset(PresetError),
    /// Of `extent`: no size.
    #[error(transparent)]
    Size(SizeError),
    /// Of `extent`: a size that cannot be one.
    #[error("{0} is not a power of two from 64KiB to 4MiB")]
    Extent(ByteSize),
    /// Of `endpoint`.
    #[error("`{0}` is not an endpoint: write http://HOST[:PORT] or https://HOST[:PORT], without a path")]
    Endpoint(String),
    /// Of `region`.
    #[error("`{0}` is not a region: write letters, digits and hyphens, e.g. eu-central-1")]
    Region(String),
}

fn parse_extent(value: &str) -> Result<ByteSize, ValueError> {
    let size: ByteSize = value.parse().map_err(ValueError::Size)?;
    let fits =
        (EXTENT_BYTES_MIN..=EXTENT_BYTES_MAX).contains(&size.bytes()) && size.bytes().is_power_of_two();
    if fits { Ok(size) } else { Err(ValueError::Extent(size)) }
}

fn parse_region(value: &str) -> Result<Box<str>, ValueError> {
    let good =
        (1..=64).contains(&value.len()) && value.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if good { Ok(value.into()) } else { Err(ValueError::Region(value.to_owned())) }
}

/// Without the last slash, so that a path can be appended.
fn parse_endpoint(value: &str) -> Result<Box<str>, ValueError> {
    let bad = || ValueError::Endpoint(value.to_owned());
    match value.parse() {
        Ok(OriginSpec::Http { prefix, .. }) if &*prefix == "/" => Ok(value.trim_end_matches('/').into()),
        _ => Err(bad()),
    }
}

fn parse_http(scheme: Scheme, text: &str, rest: &str) -> Result<OriginSpec, SpecError> {
    let bad = |why| SpecError::Origin { text: text.to_owned(), why };
    let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    if authority.contains('@') {
        return Err(bad("credentials do not belong into a URL"));
    }
    let (host, port) = match authority.rfind(':') {
        Some(colon) if !authority.ends_with(']') => {
            let port = authority[colon + 1..].parse().ok().filter(|port| *port != 0);
            (&authority[..colon], port.ok_or_else(|| bad("its port is not a number from 1 to 65535"))?)
        }
        _ => (authority, scheme.default_port()),
    };
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let good_host = match bracketed {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            (1..=253).contains(&host.len())
                && host.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
        }
    };
    if !good_host {
        return Err(bad("its host is not a name or an address"));
    }
    if !path.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'?' | b'#' | b'"' | b'<' | b'>' | b'\\')) {
        return Err(bad("its prefix must be a percent-encoded path without a query"));
    }
    let path = path.trim_end_matches('/');
    let prefix = if path.is_empty() { "/" } else { path };
    Ok(OriginSpec::Http { scheme, host: host.into(), port, prefix: prefix.into() })
}

/// The rules that S3 and TOS share.
fn check_bucket_name(name: &str) -> Result<(), &'static str> {
    let alphanumeric = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    if !(3..=63).contains(&bytes.len()) {
        return Err("it must have 3 to 63 characters");
    }
    if !bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.')) {
        return Err("only a-z, 0-9, `-` and `.` may stand in it");
    }
    if !alphanumeric(bytes.first()) || !alphanumeric(bytes.last()) {
        return Err("it must begin and end with a letter or digit");
    }
    if name.contains("..") {
        return Err("two dots may not follow each other");
    }
    if name.parse::<std::net::Ipv4Addr>().is_ok() {
        return Err("it may not look like an IP address");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> AcceleratorSpec {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn refused(text: &str) -> String {
        let error = text.parse::<AcceleratorSpec>().expect_err(text);
        match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn an_accelerator_is_a_name_an_origin_and_keys() {
        let spec = parsed(
            "data=s3://real-bucket,endpoint=http://10.0.0.1:9000/,region=eu-1,freshness=ttl:60s,preset=lakehouse,extent=64KiB",
        );
        assert_eq!(spec.name.as_str(), "data");
        assert_eq!(spec.origin, OriginSpec::S3 { bucket: "real-bucket".into() });
        assert_eq!(spec.endpoint.as_deref(), Some("http://10.0.0.1:9000"));
        assert_eq!(spec.region.as_deref(), Some("eu-1"));
        assert_eq!(spec.freshness, Some(Freshness::Ttl(Duration::from_mins(1))));
        assert_eq!(spec.preset, Some(Preset::Lakehouse));
        assert_eq!(spec.extent_bytes(), EXTENT_BYTES_MIN);
        assert_eq!(parsed("data=s3://real-bucket").extent_bytes(), EXTENT_BYTES_DEFAULT);
    }

    #[test]
    fn a_bucket_gives_its_own_name_where_none_is_said() {
        let spec = parsed("s3://real-bucket/,extent=1MiB");
        assert_eq!(spec.name.as_str(), "real-bucket");
        assert!(refused("http://host:9000").contains("NAME=http://host:9000"));
    }

    #[test]
    fn http_origins_have_host_port_and_prefix() {
        for (text, scheme, host, port, prefix, shown) in [
            ("http://h:9000/a/b/", Scheme::Http, "h", 9000, "/a/b", "http://h:9000/a/b"),
            ("https://h.example", Scheme::Https, "h.example", 443, "/", "https://h.example"),
            ("http://h:80/", Scheme::Http, "h", 80, "/", "http://h"),
            ("http://[::1]:81/x", Scheme::Http, "[::1]", 81, "/x", "http://[::1]:81/x"),
            ("http://[::1]", Scheme::Http, "[::1]", 80, "/", "http://[::1]"),
        ] {
            let origin: OriginSpec = text.parse().expect(text);
            let expected = OriginSpec::Http { scheme, host: host.into(), port, prefix: prefix.into() };
            assert_eq!(origin, expected, "{text}");
            assert_eq!(origin.to_string(), shown);
        }
    }

    #[test]
    fn what_cannot_be_reached_is_refused_by_name() {
        assert!(refused("a-b=tos://bucket").contains("tos:// origins are not in this version"));
        assert!(refused("a-b=file:///dir").contains("file:// origins are not in this version"));
        assert!(refused("*=s3://bucket").contains("wildcard"));
        assert!(refused("team-*=s3://bucket").contains("wildcard"));
        assert!(refused("abc=s3://*").contains("wildcard"));
        assert!(refused("abc=ftp://h").contains("s3://BUCKET"));
        assert!(refused("abc=bucket").contains("no scheme"));
        assert!(refused("abc=s3://bucket/prefix").contains("whole bucket"));
        assert!(refused("abc=http://user:secret@h/").contains("credentials"));
        assert!(refused("abc=http://h:0/").contains("port"));
        assert!(refused("abc=http://h:99999").contains("port"));
        assert!(refused("abc=http:///x").contains("host"));
        assert!(refused("abc=http://h/a?b=c").contains("query"));
    }

    #[test]
    fn keys_are_checked_and_the_nearest_is_named() {
        assert!(refused("abc=s3://bucket,frehsness=strict").contains("`freshness`?"));
        assert!(refused("abc=s3://bucket,extent").contains("key=value"));
        assert!(refused("abc=s3://bucket,extent=1MiB,extent=1MiB").contains("twice"));
        assert!(refused("abc=s3://bucket,extent=3MiB").contains("power of two"));
        assert!(refused("abc=s3://bucket,extent=32KiB").contains("64KiB to 4MiB"));
        assert!(refused("abc=s3://bucket,extent=8MiB").contains("64KiB to 4MiB"));
        assert!(refused("abc=s3://bucket,preset=checkpoints").contains("this version"));
        assert!(refused("abc=s3://bucket,endpoint=h:9000").contains("endpoint"));
        assert!(refused("abc=s3://bucket,endpoint=http://h/path").contains("without a path"));
        assert!(refused("abc=http://h,region=eu").contains("belongs to s3://"));
        assert!(refused("abc=s3://bucket,region=").contains("region"));
    }

    #[test]
    fn names_obey_the_rules_of_bucket_names() {
        for name in ["abc", "a.b-c", "0ab", "a23456789012345678901234567890123456789012345678901234567890123"]
        {
            assert!(name.parse::<AcceleratorName>().is_ok(), "{name}");
        }
        for name in ["", "ab", "Abc", "a_b", "-abc", "abc-", "a..b", "1.2.3.4", "a/b", "ab c"] {
            assert!(name.parse::<AcceleratorName>().is_err(), "{name}");
        }
        assert!("a".repeat(64).parse::<AcceleratorName>().is_err());
    }

    proptest! {
        #[test]
        fn what_is_shown_parses_back(
            name in "[a-z][a-z0-9-]{1,20}[a-z0-9]",
            bucket in "[a-z][a-z0-9-]{1,20}[a-z0-9]",
            region in proptest::option::of("[a-z]{2}-[0-9]"),
            shift in 16u32..=22,
            ttl in 1u64..1_000_000_000,
        ) {
            let mut spec = AcceleratorSpec::new(
                name.parse().expect("a name"),
                OriginSpec::S3 { bucket: bucket.into() },
            );
            spec.region = region.map(Into::into);
            spec.extent = Some(ByteSize::new(1 << shift));
            spec.freshness = Some(Freshness::Ttl(Duration::from_millis(ttl)));
            prop_assert_eq!(spec.to_string().parse(), Ok(spec));
        }

        #[test]
        fn no_text_panics(text in "[a-z*]{0,6}=?(s3|http|tos)?(://)?[a-z0-9:/@\\[\\]*]{0,12}(,[a-z]{0,8}=?.{0,6})?") {
            let _ = text.parse::<AcceleratorSpec>();
        }
    }
}
