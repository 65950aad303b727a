//! Where the origin is, and how an object's name becomes a path on its wire.
//!
//! A key is the bytes after one percent-decoding; here it is encoded once, the S3 way, for every request, so that two
//! spellings of one key make one path and the signature is computed over what is sent. Path style is the rule for
//! custom endpoints, because an address without wildcard DNS serves nothing else; the two providers that insist on, or
//! name certificates for, virtual hosts get those.
#![forbid(unsafe_code)]

use super::error::OriginError;
use super::{OriginKind, OriginTarget};
use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};

/// Scheme, host and the path before every key.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    scheme: Scheme,
    authority: Authority,
    /// Empty, or begins with a slash and does not end with one; already encoded.
    base: String,
    /// The signature that a client put into its query was for us, not for this origin.
    strips_query_auth: bool,
}

impl Endpoint {
    /// # Errors
    /// `Target`, when the URL is not one that we can or should use.
    pub(super) fn of(target: &OriginTarget) -> Result<Self, OriginError> {
        match &target.kind {
            OriginKind::Http { base } => {
                let (scheme, authority, base) = taken_apart(base)?;
                Ok(Self { scheme, authority, base, strips_query_auth: false })
            }
            OriginKind::S3 { bucket, endpoint, region } => {
                if bucket.is_empty() || bucket.contains('/') {
                    return Err(refused(format!("`{bucket}` is not a bucket name")));
                }
                let (scheme, authority, prefix) = if let Some(endpoint) = endpoint {
                    taken_apart(endpoint)?
                } else {
                    let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
                    let host = format!("s3.{region}.{domain}");
                    let authority = host.parse().map_err(|_| refused(format!("region `{region}`")))?;
                    (Scheme::HTTPS, authority, String::new())
                };
                if wants_virtual_host(authority.host()) && fits_in_a_host_name(bucket) {
                    let authority = format!("{bucket}.{authority}")
                        .parse()
                        .map_err(|_| refused(format!("bucket `{bucket}` in a host name")))?;
                    return Ok(Self { scheme, authority, base: prefix, strips_query_auth: true });
                }
                let bucket = encoded(bucket.as_bytes());
                Ok(Self { scheme, authority, base: format!("{prefix}/{bucket}"), strips_query_auth: true })
            }
        }
    }

    /// Host and port, for the Host header and for errors. A default port is left out, as every client does.
    pub(super) fn host(&self) -> &str {
        let default_port = if self.is_tls() { ":443" } else { ":80" };
        self.authority.as_str().strip_suffix(default_port).unwrap_or(self.authority.as_str())
    }

    pub(super) fn is_tls(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }

    /// What to connect to.
    pub(super) fn dial_uri(&self) -> Uri {
        self.absolute(&PathAndQuery::from_static("/"))
    }

    /// The full URL of a path, as a signer wants to see it.
    pub(super) fn absolute(&self, path: &PathAndQuery) -> Uri {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path.clone());
        Uri::from_parts(parts).expect("three valid parts make a URL")
    }

    /// For logs: scheme, host and base path.
    pub(super) fn describe(&self) -> String {
        format!("{}://{}{}", self.scheme, self.host(), self.base)
    }

    /// The path of one object. `key` is decoded.
    ///
    /// # Errors
    /// `Unsendable`, when the path is longer than a request line may be.
    pub(super) fn object_path(&self, key: &[u8]) -> Result<PathAndQuery, OriginError> {
        path_of(format!("{}/{}", self.base, encoded(key)))
    }

    /// The path of a forwarded request: `path` is what followed the bucket in the client's path, raw (empty, or with
    /// its leading slash). It is decoded and encoded again, so that it is sent and signed in one spelling.
    ///
    /// # Errors
    /// `Unsendable`, when path or query hold bytes that no request line may hold.
    pub(super) fn forward_path(
        &self,
        path: &[u8],
        query: Option<&[u8]>,
    ) -> Result<PathAndQuery, OriginError> {
        let decoded: Vec<u8> = percent_decode(path).collect();
        let mut line = format!("{}{}", self.base, encoded(&decoded));
        if !line.starts_with('/') {
            line.insert(0, '/');
        }
        if let Some(query) = query {
            let query = std::str::from_utf8(query)
                .map_err(|_| OriginError::unsendable("the query is not percent-encoded"))?;
            let query = if self.strips_query_auth { without_query_auth(query) } else { query.to_owned() };
            if !query.is_empty() {
                line.push('?');
                line.push_str(&query);
            }
        }
        path_of(line)
    }
}

/// Percent-encodes decoded bytes as S3 does: unreserved characters and `/` stay, all else becomes upper-case `%XX`.
pub(crate) fn encoded(bytes: &[u8]) -> String {
    percent_encode(bytes, &S3_PATH).to_string()
}

const S3_PATH: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');

fn path_of(line: String) -> Result<PathAndQuery, OriginError> {
    PathAndQuery::try_from(line)
        .map_err(|_| OriginError::unsendable("its path or query is too long or not percent-encoded"))
}

fn taken_apart(url: &Uri) -> Result<(Scheme, Authority, String), OriginError> {
    let scheme = match url.scheme() {
        Some(scheme) if *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS => scheme.clone(),
        Some(scheme) => return Err(refused(format!("scheme `{scheme}`; write http:// or https://"))),
        None => return Err(refused("its URL has no scheme; write http:// or https://".to_owned())),
    };
    let authority = url.authority().ok_or_else(|| refused("its URL names no host".to_owned()))?.clone();
    if authority.as_str().contains('@') {
        return Err(refused(
            "its URL holds a user or password; credentials belong in the environment".to_owned(),
        ));
    }
    if url.query().is_some() {
        return Err(refused("its URL has a query; give scheme, host and path only".to_owned()));
    }
    Ok((scheme, authority, url.path().trim_end_matches('/').to_owned()))
}

fn refused(reason: String) -> OriginError {
    OriginError::Target { reason }
}

/// AWS is moving away from path style; the S3 door of TOS never had it.
fn wants_virtual_host(host: &str) -> bool {
    let is_aws = host.ends_with(".amazonaws.com") || host.ends_with(".amazonaws.com.cn");
    is_aws || host.starts_with("tos-s3-")
}

/// A dot in the bucket would step outside the wildcard certificate; the rest is what a host label may be.
fn fits_in_a_host_name(bucket: &str) -> bool {
    (3..=63).contains(&bucket.len())
        && !bucket.starts_with('-')
        && !bucket.ends_with('-')
        && bucket.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Takes a presigned URL's authentication out of its query and leaves every other pair as it was written.
fn without_query_auth(query: &str) -> String {
    let name_of = |pair: &str| pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
    let is_version_two = query.split('&').any(|pair| name_of(pair) == "awsaccesskeyid");
    let keep = |pair: &&str| {
        let name = name_of(pair);
        !(VERSION_FOUR.contains(&name.as_str()) || (is_version_two && VERSION_TWO.contains(&name.as_str())))
    };
    query.split('&').filter(keep).collect::<Vec<_>>().join("&")
}

const VERSION_FOUR: [&str; 8] = [
    "x-amz-algorithm",
    "x-amz-credential",
    "x-amz-date",
    "x-amz-expires",
    "x-amz-signedheaders",
    "x-amz-signature",
    "x-amz-security-token",
    "x-amz-content-sha256",
];
const VERSION_TWO: [&str; 3] = ["awsaccesskeyid", "signature", "expires"];

#[cfg(test)]
mod tests {
    use super::*;

    fn s3(bucket: &str, endpoint: Option<&str>, region: &str) -> Result<Endpoint, OriginError> {
        let endpoint = endpoint.map(|url| url.parse().unwrap());
        Endpoint::of(&OriginTarget {
            kind: OriginKind::S3 { bucket: bucket.into(), endpoint, region: region.into() },
        })
    }

    fn http(base: &str) -> Result<Endpoint, OriginError> {
        Endpoint::of(&OriginTarget { kind: OriginKind::Http { base: base.parse().unwrap() } })
    }

    fn url(endpoint: &Endpoint, key: &[u8]) -> String {
        endpoint.absolute(&endpoint.object_path(key).unwrap()).to_string()
    }

    #[test]
    fn addresses_follow_the_style_of_the_provider() {
        let cases = [
            (s3("data", None, "eu-west-1"), "https://data.s3.eu-west-1.amazonaws.com/k"),
            (s3("data", None, "cn-north-1"), "https://data.s3.cn-north-1.amazonaws.com.cn/k"),
            (s3("a.b.c", None, "eu-west-1"), "https://s3.eu-west-1.amazonaws.com/a.b.c/k"),
            (s3("Old_Name", None, "us-east-1"), "https://s3.us-east-1.amazonaws.com/Old_Name/k"),
            (s3("data", Some("http://127.0.0.1:9000"), "r"), "http://127.0.0.1:9000/data/k"),
            (s3("data", Some("http://127.0.0.1:9000/"), "r"), "http://127.0.0.1:9000/data/k"),
            (s3("data", Some("https://store.lan/s3/v1/"), "r"), "https://store.lan/s3/v1/data/k"),
            (s3("data", Some("http://[::1]:9000/s3"), "r"), "http://[::1]:9000/s3/data/k"),
            (
                s3("data", Some("https://tos-s3-cn-beijing.ivolces.com"), "r"),
                "https://data.tos-s3-cn-beijing.ivolces.com/k",
            ),
            (http("http://files.lan:8080"), "http://files.lan:8080/k"),
            (http("http://files.lan/pub/"), "http://files.lan/pub/k"),
        ];
        for (endpoint, expected) in cases {
            assert_eq!(url(&endpoint.unwrap(), b"k"), expected);
        }
    }

    #[test]
    fn urls_that_should_not_be_used_are_refused() {
        for endpoint in [
            http("ftp://host/x"),
            http("/only/a/path"),
            http("http://user:secret@host/"),
            http("http://host/p?token=abc"),
            s3("", None, "r"),
            s3("a/b", None, "r"),
        ] {
            let error = endpoint.unwrap_err();
            assert!(matches!(error, OriginError::Target { .. }));
            assert!(!error.to_string().contains("secret") && !error.to_string().contains("abc"), "{error}");
        }
    }

    #[test]
    fn the_host_header_leaves_out_default_ports_only() {
        assert_eq!(http("http://h:80/").unwrap().host(), "h");
        assert_eq!(http("https://h:443/").unwrap().host(), "h");
        assert_eq!(http("https://h:80/").unwrap().host(), "h:80");
        assert_eq!(http("http://h:8080/").unwrap().host(), "h:8080");
    }

    /// Decoded key, and the only spelling in which we send it.
    const KEYS: [(&[u8], &str); 36] = [
        (b"plain.txt", "plain.txt"),
        (b"a/b/c", "a/b/c"),
        (b"a//b", "a//b"),
        (b"/leading", "/leading"),
        (b"trailing/", "trailing/"),
        (b"a b", "a%20b"),
        (b"a+b", "a%2Bb"),
        (b"a%b", "a%25b"),
        (b"a%20b", "a%2520b"),
        (b"a%2Fb", "a%252Fb"),
        (b"~user_-.", "~user_-."),
        (b"!x", "%21x"),
        (b"'q'", "%27q%27"),
        (b"(1)", "%281%29"),
        (b"*", "%2A"),
        (b"a:b", "a%3Ab"),
        (b"a;b", "a%3Bb"),
        (b"a,b", "a%2Cb"),
        (b"a=b", "a%3Db"),
        (b"a&b", "a%26b"),
        (b"a?b", "a%3Fb"),
        (b"a#b", "a%23b"),
        (b"a@b", "a%40b"),
        (b"$x", "%24x"),
        (b"a\"b", "a%22b"),
        (b"a<b>", "a%3Cb%3E"),
        (b"a\\b", "a%5Cb"),
        (b"a^b`c", "a%5Eb%60c"),
        (b"{a|b}", "%7Ba%7Cb%7D"),
        (b"[1]", "%5B1%5D"),
        (b"tab\tnl\n", "tab%09nl%0A"),
        (b"\x00\x7f", "%00%7F"),
        ("ключ".as_bytes(), "%D0%BA%D0%BB%D1%8E%D1%87"),
        ("数据/0.bin".as_bytes(), "%E6%95%B0%E6%8D%AE/0.bin"),
        (b"\xff\xfe", "%FF%FE"),
        (b"..", ".."),
    ];

    #[test]
    fn a_key_has_one_spelling_on_the_wire() {
        let endpoint = s3("b", Some("http://h"), "r").unwrap();
        for (key, spelling) in KEYS {
            assert_eq!(endpoint.object_path(key).unwrap().as_str(), format!("/b/{spelling}"), "{key:?}");
        }
    }

    #[test]
    fn a_forwarded_path_takes_the_same_spelling() {
        let endpoint = s3("b", Some("http://h"), "r").unwrap();
        for (key, spelling) in KEYS {
            let raw = format!("/{spelling}");
            let got = endpoint.forward_path(raw.as_bytes(), None).unwrap();
            assert_eq!(got, endpoint.object_path(key).unwrap(), "{key:?}");
        }
        let odd: [(&str, &str); 5] = [
            ("/a%2fb", "/b/a/b"),
            ("/a%7Eb", "/b/a~b"),
            ("/a+b", "/b/a%2Bb"),
            ("/a!b", "/b/a%21b"),
            ("/%zz", "/b/%25zz"),
        ];
        for (raw, spelling) in odd {
            assert_eq!(endpoint.forward_path(raw.as_bytes(), None).unwrap().as_str(), spelling);
        }
        assert_eq!(endpoint.forward_path(b"", None).unwrap().as_str(), "/b");
        assert_eq!(
            endpoint.forward_path(b"/", Some(b"list-type=2&prefix=a%2Fb")).unwrap().as_str(),
            "/b/?list-type=2&prefix=a%2Fb"
        );
        assert_eq!(http("http://h").unwrap().forward_path(b"", Some(b"x")).unwrap().as_str(), "/?x");
        assert!(endpoint.forward_path(b"/k", Some(b"a b")).is_err());
        assert!(endpoint.forward_path(b"/k", Some(b"\xff")).is_err());
    }

    #[test]
    fn a_presigned_query_loses_its_signature_and_nothing_else() {
        let endpoint = s3("b", Some("http://h"), "r").unwrap();
        let four = b"versionId=7&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=A%2Fx&X-Amz-Date=1&X-Amz-Expires=9&\
                     X-Amz-SignedHeaders=host&X-Amz-Signature=dead&X-Amz-Security-Token=t&response-content-type=a%2Fb";
        let kept = endpoint.forward_path(b"/k", Some(four)).unwrap();
        assert_eq!(kept.as_str(), "/b/k?versionId=7&response-content-type=a%2Fb");
        let two = b"AWSAccessKeyId=A&Signature=s%3D&Expires=1";
        assert_eq!(endpoint.forward_path(b"/k", Some(two)).unwrap().as_str(), "/b/k");
        // Without the key id these are somebody's own words.
        assert_eq!(endpoint.forward_path(b"/k", Some(b"Expires=1")).unwrap().as_str(), "/b/k?Expires=1");
        assert_eq!(
            http("http://h").unwrap().forward_path(b"/k", Some(two)).unwrap().query(),
            Some("AWSAccessKeyId=A&Signature=s%3D&Expires=1")
        );
    }
}
