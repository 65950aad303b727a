//! From a host name to a connected byte stream, plain or TLS.
//!
//! Hyper's connector does the look-up and races IPv4 and IPv6; `TCP_NODELAY` is set because requests are small and
//! whole. Trust roots are those of the system, or of `AWS_CA_BUNDLE` *instead* of them, as the AWS tools read it. They are
//! loaded at the first TLS connection, so that a node with a plain-HTTP origin needs none.
#![forbid(unsafe_code)]

use super::error::BoxError;
use hyper::rt::{Read, Write};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
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

/// Connects. Cheap to clone; clones share their trust roots.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    http: HttpConnector,
    tls: Arc<OnceLock<Arc<ClientConfig>>>,
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
        Self { http, tls: Arc::default(), ca_bundle, limit }
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
            let mut connector = HttpsConnector::from((self.http.clone(), self.tls()?));
            poll_fn(|cx| connector.poll_ready(cx)).await?;
            connector.call(uri).await
        } else {
            let mut connector = self.http.clone();
            poll_fn(|cx| connector.poll_ready(cx)).await?;
            Ok(MaybeHttpsStream::Http(connector.call(uri).await?))
        }
    }

    /// # Errors
    /// When the trust roots cannot be read; the sentence names the file or the variable.
    pub(super) fn tls(&self) -> io::Result<Arc<ClientConfig>> {
        if let Some(config) = self.tls.get() {
            return Ok(Arc::clone(config));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let builder = match &self.ca_bundle {
            Some(bundle) => builder.with_root_certificates(roots_of(bundle)?),
            None => builder.with_native_roots()?,
        };
        let mut config = builder.with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::clone(self.tls.get_or_init(|| Arc::new(config))))
    }
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
            Dialer::new(Duration::from_secs(1), Some(path.to_owned())).tls().unwrap_err().to_string()
        };
        assert!(tried(&file).contains("AWS_CA_BUNDLE") && tried(&file).contains("roots.pem"));
        std::fs::write(&file, "no certificate here").unwrap();
        assert!(tried(&file).contains("no certificate in it"));
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(tried(&file).contains("roots.pem"));
    }
}
