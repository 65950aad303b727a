//! From a host name to a connected byte stream, plain or TLS.
//!
//! Hyper's connector does the look-up and races IPv4 and IPv6; `TCP_NODELAY` is set because requests are small and
//! whole. Trust roots are those of the system, or of `AWS_CA_BUNDLE` *instead* of them, as the AWS tools read it. They are
//! loaded once for the process, by whoever needs them first, so that a node with a plain-HTTP origin needs none and no
//! worker reads files while it serves.
#![forbid(unsafe_code)]

use super::error::BoxError;
use hyper::rt::{Read, Write};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower_service::Service;

/// A byte stream to an origin.
pub(crate) type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;
const _: fn() = || {
    fn is_usable<T: Read + Write + Send + Unpin>() {}
    is_usable::<Stream>();
};

/// Connects. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    http: HttpConnector,
    ca_bundle: Option<PathBuf>,
    limit: Duration,
}

#[derive(Debug)]
pub(crate) enum DialError {
    TimedOut,
    Failed(BoxError),
}

impl Dialer {
    /// `limit` is for look-up, TCP and TLS together. `ca_bundle` is a PEM file.
    pub(crate) fn new(limit: Duration, ca_bundle: Option<PathBuf>) -> Self {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(limit));
        Self { http, ca_bundle, limit }
    }

    /// Connects to the scheme, host and port of `uri`.
    pub(crate) async fn dial(&self, uri: http::Uri) -> Result<Stream, DialError> {
        match timeout(self.limit, self.connect(uri)).await {
            Ok(connected) => connected.map_err(DialError::Failed),
            Err(_) => Err(DialError::TimedOut),
        }
    }

    async fn connect(&self, uri: http::Uri) -> Result<Stream, BoxError> {
        if uri.scheme() == Some(&http::uri::Scheme::HTTPS) {
            let mut connector = HttpsConnector::from((self.http.clone(), tls(self.ca_bundle.as_deref())?));
            poll_fn(|cx| connector.poll_ready(cx)).await?;
            connector.call(uri).await
        } else {
            let mut connector = self.http.clone();
            poll_fn(|cx| connector.poll_ready(cx)).await?;
            Ok(MaybeHttpsStream::Http(connector.call(uri).await?))
        }
    }

    /// Reads the trust roots, unless this process has.
    ///
    /// # Errors
    /// When they cannot be read; the sentence names the file or the variable. The next call tries again.
    pub(super) fn prepare_tls(&self) -> io::Result<()> {
        tls(self.ca_bundle.as_deref()).map(drop)
    }
}

/// How this process speaks TLS, by the bundle that it trusts.
static SPEAKERS: Mutex<BTreeMap<Option<PathBuf>, Arc<ClientConfig>>> = Mutex::new(BTreeMap::new());

fn tls(ca_bundle: Option<&Path>) -> io::Result<Arc<ClientConfig>> {
    let mut speakers = SPEAKERS.lock().unwrap_or_else(PoisonError::into_inner);
    let ca_bundle = ca_bundle.map(Path::to_owned);
    if let Some(config) = speakers.get(&ca_bundle) {
        return Ok(Arc::clone(config));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let builder = match &ca_bundle {
        Some(bundle) => builder.with_root_certificates(roots_of(bundle)?),
        None => builder.with_native_roots()?,
    };
    let mut config = builder.with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let config = Arc::new(config);
    speakers.insert(ca_bundle, Arc::clone(&config));
    Ok(config)
}

fn roots_of(bundle: &Path) -> io::Result<RootCertStore> {
    let unusable = |why: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("AWS_CA_BUNDLE {}: {why}", bundle.display()))
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(bundle).map_err(|error| unusable(error.to_string()))? {
        let certificate = certificate.map_err(|error| unusable(error.to_string()))?;
        roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(unusable("no certificate in it".to_owned()));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("roots.pem");
        let tried = |path: &Path| {
            Dialer::new(Duration::from_secs(1), Some(path.to_owned())).prepare_tls().unwrap_err().to_string()
        };
        assert!(tried(&file).contains("AWS_CA_BUNDLE") && tried(&file).contains("roots.pem"));
        std::fs::write(&file, "no certificate here").unwrap();
        assert!(tried(&file).contains("no certificate in it"));
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(tried(&file).contains("roots.pem"));
    }

    #[test]
    fn trust_roots_are_read_once_for_the_process_and_again_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("roots.pem");
        assert!(tls(Some(&file)).is_err());
        let own = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(&file, own.cert.pem()).unwrap();
        let first = tls(Some(&file)).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(Arc::ptr_eq(&first, &tls(Some(&file)).unwrap()));
    }
}
