//! The client: a closed loop over HTTP/1.1 that verifies every byte, and the small one for listings and doors.

pub mod lanes;
pub mod plain;
pub mod signing;

use std::net::{SocketAddr, ToSocketAddrs};

/// Where one side's requests go: `http://host:port/bucket`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The URL as given, for reports.
    pub url: String,
    /// Where it leads.
    pub address: SocketAddr,
    /// The Host header.
    pub host: String,
    /// The bucket; empty for an origin's own door.
    pub bucket: String,
}

impl Target {
    /// Parses a URL with a bucket.
    ///
    /// # Errors
    /// Says what is missing.
    pub fn parse(url: &str) -> Result<Self, String> {
        let target = Self::parse_host(url)?;
        if target.bucket.is_empty() || target.bucket.contains(['/', '?', '#']) {
            return Err(format!("`{url}` names no bucket; write http://host:port/bucket"));
        }
        Ok(target)
    }

    /// Parses a URL whose bucket may be missing.
    ///
    /// # Errors
    /// Says what is missing.
    pub fn parse_host(url: &str) -> Result<Self, String> {
        let Some(rest) = url.strip_prefix("http://") else {
            return Err(format!("`{url}` is not an http:// URL; this client speaks HTTP/1.1 without TLS"));
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let with_port = if host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
            host.to_owned()
        } else {
            format!("{host}:80")
        };
        let mut addresses = with_port
            .to_socket_addrs()
            .map_err(|error| format!("`{host}` of `{url}` is not known: {error}"))?;
        let address = addresses.next().ok_or_else(|| format!("`{host}` of `{url}` has no address"))?;
        let bucket = path.trim_end_matches('/').to_owned();
        Ok(Self { url: url.to_owned(), address, host: host.to_owned(), bucket })
    }
}

/// How much of an answer is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Verify {
    /// Every byte against the pattern, and all facts.
    Full,
    /// Status, lengths and the `ETag`, but no bytes: for data that has not the pattern.
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_say_what_they_lack() {
        let target = Target::parse("http://127.0.0.1:7070/demo/").expect("whole");
        assert_eq!((target.address.port(), target.bucket.as_str()), (7070, "demo"));
        assert_eq!(Target::parse("http://127.0.0.1/demo").expect("whole").address.port(), 80);
        assert!(Target::parse("https://127.0.0.1/demo").unwrap_err().contains("http://"));
        assert!(Target::parse("http://127.0.0.1:7070").unwrap_err().contains("bucket"));
        assert!(Target::parse("http://127.0.0.1:7070/a/b").unwrap_err().contains("bucket"));
        assert!(Target::parse_host("http://127.0.0.1:7070").is_ok());
    }
}
