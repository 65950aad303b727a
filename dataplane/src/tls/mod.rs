//! Who we are to clients that ask for proof: certificates, and the configurations made of them.
//!
//! One [`Certificates`] serves every door of a node and every worker: TCP and QUIC show the same certificate, and a
//! session that began on one worker is resumed on another, because they share the keys of its ticket. A handshake
//! takes the pair that is there at that moment; replacing it ([`Certificates::reload`]) disturbs no connection.
//!
//! How bytes are encrypted is rustls's business, and how they reach a socket that of `serve`.
#![forbid(unsafe_code)]

mod own;
mod pair;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::crypto::ring;
use rustls::server::{ClientHello, ProducesTickets, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{ServerConfig, crypto::CryptoProvider};
use sha2::{Digest, Sha256};

pub use self::pair::PairError;

/// Where the operator keeps certificate and key, in PEM. One file may hold both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and behind it those that lead to a root that clients trust.
    pub cert: PathBuf,
    /// Its private key, not encrypted: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
}

/// The certificate of a node. Shared by all its doors and workers.
#[derive(Debug)]
pub struct Certificates {
    /// `None` if the certificate was made here.
    files: Option<TlsFiles>,
    shown: Arc<Shown>,
    tickets: Arc<dyn ProducesTickets>,
    provider: Arc<CryptoProvider>,
}

/// Answers every handshake with the pair that is there now.
#[derive(Debug)]
struct Shown(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Shown {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.now())
    }
}

impl Shown {
    fn now(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Certificates {
    /// Reads the operator's pair.
    ///
    /// # Errors
    /// Which file cannot be used, why, and what to do.
    pub fn open(files: &TlsFiles) -> Result<Arc<Self>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let pair = pair::read(files, &provider)?;
        Self::new(Some(files.clone()), pair, provider)
    }

    /// Makes a certificate of its own, for this machine by all its usual names and for the addresses in `listen`. It
    /// is a new one with every start, and no client trusts it until it is told to.
    ///
    /// # Errors
    /// The system gives no randomness.
    pub fn self_signed(listen: &[SocketAddr]) -> Result<Arc<Self>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let pair = own::make(own::names(listen), &provider)?;
        Self::new(None, pair, provider)
    }

    fn new(
        files: Option<TlsFiles>,
        pair: CertifiedKey,
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<Self>, TlsError> {
        let shown = Arc::new(Shown(RwLock::new(Arc::new(pair))));
        let tickets = ring::Ticketer::new().map_err(TlsError::Tickets)?;
        Ok(Arc::new(Self { files, shown, tickets, provider }))
    }

    /// A configuration for a door that speaks the protocols `alpn`, the preferred first; TLS 1.2 and 1.3. Make one for
    /// a door, not one for a worker or a connection. It shows whatever certificate is there when a client comes.
    pub fn server_config(&self, alpn: &[&[u8]]) -> Arc<ServerConfig> {
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13, &TLS12])
            .expect("ring has suites for both versions")
            .with_no_client_auth()
            .with_cert_resolver(self.resolver());
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        config.ticketer = Arc::clone(&self.tickets);
        Arc::new(config)
    }

    /// What shows the certificate, for a configuration that is made elsewhere.
    pub fn resolver(&self) -> Arc<dyn ResolvesServerCert> {
        Arc::clone(&self.shown) as Arc<dyn ResolvesServerCert>
    }

    /// Reads the operator's files again. New handshakes use what they hold now; connections that are open go on. A pair
    /// that cannot be used changes nothing. False if there are no files, because the certificate was made here.
    ///
    /// # Errors
    /// As [`Certificates::open`].
    pub fn reload(&self) -> Result<bool, TlsError> {
        let Some(files) = &self.files else { return Ok(false) };
        let pair = Arc::new(pair::read(files, &self.provider)?);
        *self.shown.0.write().unwrap_or_else(PoisonError::into_inner) = pair;
        Ok(true)
    }

    /// Where the pair was read from; `None` if it was made here.
    pub fn files(&self) -> Option<&TlsFiles> {
        self.files.as_ref()
    }

    /// SHA-256 of the certificate shown now, as `openssl x509 -fingerprint -sha256` prints it.
    pub fn fingerprint(&self) -> String {
        let pair = self.shown.now();
        let digest = Sha256::digest(pair.cert.first().map_or(&[][..], AsRef::as_ref));
        digest.iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":")
    }
}

/// Why there is no certificate to show.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The operator's pair cannot be used.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// No certificate could be made.
    #[error("making a self-signed certificate; give one with --cert and --key")]
    Own(#[from] rcgen::Error),
    /// The certificate that was made here is not accepted here.
    #[error("using the self-signed certificate; give one with --cert and --key")]
    OwnKey(#[source] rustls::Error),
    /// No keys for session tickets.
    #[error("making the keys of session tickets")]
    Tickets(#[source] rustls::Error),
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, HandshakeKind, RootCertStore, ServerConnection};

    use super::*;

    /// A pair in files of its own.
    fn files(folder: &std::path::Path, name: &str) -> TlsFiles {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
        let files =
            TlsFiles { cert: folder.join(format!("{name}.pem")), key: folder.join(format!("{name}.key")) };
        fs::write(&files.cert, made.cert.pem()).expect("written");
        fs::write(&files.key, made.signing_key.serialize_pem()).expect("written");
        fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).expect("changed");
        files
    }

    fn client(certificates: &Certificates, alpn: &[&[u8]]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(certificates.shown.now().cert[0].clone()).expect("a root");
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }

    /// A handshake in memory; the server's side and what the client saw.
    fn shake(
        server: &Arc<ServerConfig>,
        client: &Arc<ClientConfig>,
        name: &str,
    ) -> Result<(ServerConnection, CertificateDer<'static>), rustls::Error> {
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        let mut client = ClientConnection::new(Arc::clone(client), name)?;
        let mut server = ServerConnection::new(Arc::clone(server))?;
        for _ in 0..8 {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).expect("written");
            }
            server.read_tls(&mut bytes.as_slice()).expect("read");
            server.process_new_packets()?;
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).expect("written");
            }
            client.read_tls(&mut bytes.as_slice()).expect("read");
            client.process_new_packets()?;
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        let seen = client.peer_certificates().expect("shown")[0].clone().into_owned();
        Ok((server, seen))
    }

    #[test]
    fn a_certificate_of_our_own_is_good_for_this_machine_and_its_addresses() {
        let listen: SocketAddr = "192.0.2.7:7443".parse().expect("an address");
        let certificates = Certificates::self_signed(&[listen]).expect("made");
        let server = certificates.server_config(&[b"http/1.1"]);
        let client = client(&certificates, &[b"h2", b"http/1.1"]);
        for name in ["localhost", "127.0.0.1", "::1", "192.0.2.7"] {
            let (server, _) = shake(&server, &client, name).expect(name);
            assert_eq!(server.alpn_protocol(), Some(&b"http/1.1"[..]));
        }
        shake(&server, &client, "elsewhere.example").expect_err("not our name");
        assert!(!certificates.reload().expect("nothing to read"));
        assert!(certificates.files().is_none());
        let fingerprint = certificates.fingerprint();
        assert!(fingerprint.len() == 95 && fingerprint.split(':').count() == 32, "{fingerprint}");
        let again = Certificates::self_signed(&[listen]).expect("made");
        assert_ne!(again.fingerprint(), fingerprint, "every start has its own");
    }

    #[test]
    fn a_client_that_speaks_nothing_of_ours_is_refused() {
        let certificates = Certificates::self_signed(&[]).expect("made");
        let server = certificates.server_config(&[b"http/1.1"]);
        let error = shake(&server, &client(&certificates, &[b"h2"]), "localhost").expect_err("refused");
        assert_eq!(error, rustls::Error::NoApplicationProtocol);
        shake(&server, &client(&certificates, &[]), "localhost").expect("ALPN is not asked for");
    }

    #[test]
    fn doors_share_tickets() {
        let certificates = Certificates::self_signed(&[]).expect("made");
        let client = client(&certificates, &[]);
        let (one, other) = (certificates.server_config(&[]), certificates.server_config(&[]));
        let (first, _) = shake(&one, &client, "localhost").expect("a handshake");
        assert_eq!(first.handshake_kind(), Some(HandshakeKind::Full));
        let (second, _) = shake(&other, &client, "localhost").expect("a handshake");
        assert_eq!(second.handshake_kind(), Some(HandshakeKind::Resumed));
    }

    #[test]
    fn a_new_pair_is_shown_to_new_handshakes_and_a_bad_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let used = files(folder.path(), "used");
        let certificates = Certificates::open(&used).expect("a pair");
        let server = certificates.server_config(&[]);
        let before = certificates.fingerprint();
        let trusting_old = client(&certificates, &[]);
        let (_, seen) = shake(&server, &trusting_old, "localhost").expect("a handshake");

        let next = files(folder.path(), "next");
        fs::copy(&next.cert, &used.cert).expect("copied");
        let error = certificates.reload().expect_err("the key is the old one");
        assert!(error.to_string().contains("used.key"), "{error}");
        assert_eq!(certificates.fingerprint(), before, "nothing has changed");

        fs::copy(&next.key, &used.key).expect("copied");
        assert!(certificates.reload().expect("a pair"));
        assert_ne!(certificates.fingerprint(), before);
        let (_, now) = shake(&server, &client(&certificates, &[]), "localhost").expect("a handshake");
        assert_ne!(now, seen, "the same configuration shows the new certificate");
    }
}
