//! The operator's certificate and key, out of their files.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls::InconsistentKeys;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::TlsFiles;

impl TlsFiles {
    /// What is allowed but probably not meant: a key that is no secret. A group that may read it is often meant.
    pub fn warning(&self) -> Option<String> {
        let is_open = fs::metadata(&self.key).is_ok_and(|about| about.permissions().mode() & 0o004 != 0);
        is_open.then(|| {
            let key = self.key.display();
            format!("key: every user of this machine may read the private key in {key}: chmod 600 {key}")
        })
    }
}

/// Why a pair of files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// A file cannot be read.
    #[error("{flag}: reading {}", path.display())]
    Read {
        /// The flag that names the file.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file is not PEM.
    #[error("{flag}: {} is not PEM; DER becomes PEM with `openssl x509` or `openssl pkey`", path.display())]
    NotPem {
        /// The flag that names the file.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// Where it breaks.
        #[source]
        source: pem::Error,
    },
    /// No certificate in the file.
    #[error("--cert: there is no certificate in {}; give the file that begins with BEGIN CERTIFICATE", .0.display())]
    NoCertificate(PathBuf),
    /// No key in the file.
    #[error("--key: there is no private key in {}; give the file with BEGIN PRIVATE KEY", .0.display())]
    NoKey(PathBuf),
    /// The key is encrypted.
    #[error(
        "--key: the key in {path} is encrypted, and nobody is there to ask for its password; decrypt it: openssl pkey \
         -in {path} -out plain.key", path = .0.display()
    )]
    Encrypted(PathBuf),
    /// Two that do not belong together.
    #[error("--key: {} is not the key of the certificate in {}; give the two that were made together", key.display(), cert.display())]
    Mismatch {
        /// The file of the certificate.
        cert: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
    /// Nothing we could show: an algorithm we do not speak, or a broken certificate.
    #[error(
        "the pair of {} and {} cannot be used; RSA of 2048 to 8192 bits, ECDSA P-256, P-384 and P-521, and Ed25519 can",
        cert.display(), key.display()
    )]
    Unusable {
        /// The file of the certificate.
        cert: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// What is wrong.
        #[source]
        source: rustls::Error,
    },
}

/// Reads both files and checks that they belong together.
pub(super) fn read(files: &TlsFiles, provider: &CryptoProvider) -> Result<CertifiedKey, PairError> {
    let TlsFiles { cert, key } = files;
    let text = read_file("--cert", cert)?;
    let chain = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| PairError::NotPem { flag: "--cert", path: cert.clone(), source })?;
    if chain.is_empty() {
        return Err(PairError::NoCertificate(cert.clone()));
    }
    let private = read_key(key)?;
    CertifiedKey::from_der(chain, private, provider).map_err(|source| match source {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            PairError::Mismatch { cert: cert.clone(), key: key.clone() }
        }
        source => PairError::Unusable { cert: cert.clone(), key: key.clone(), source },
    })
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, PairError> {
    let text = read_file("--key", path)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|source| match source {
        pem::Error::NoItemsFound if holds(&text, b"ENCRYPTED") => PairError::Encrypted(path.to_owned()),
        pem::Error::NoItemsFound => PairError::NoKey(path.to_owned()),
        source => PairError::NotPem { flag: "--key", path: path.to_owned(), source },
    })
}

fn read_file(flag: &'static str, path: &Path) -> Result<Vec<u8>, PairError> {
    fs::read(path).map_err(|source| PairError::Read { flag, path: path.to_owned(), source })
}

fn holds(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|window| window == word)
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use rustls::crypto::ring;

    use super::*;

    #[test]
    fn a_file_that_will_not_do_is_named_with_the_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let made = |name: &str| rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("made");
        let (one, other) = (made("one.example"), made("other.example"));
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).expect("written");
            path
        };
        let cert = write("cert.pem", &one.cert.pem());
        let key = write("key.pem", &one.signing_key.serialize_pem());
        let both = write("both.pem", &format!("{}{}", one.cert.pem(), one.signing_key.serialize_pem()));
        let stranger = write("stranger.pem", &other.signing_key.serialize_pem());
        let empty = write("empty.pem", "");
        let secret = write(
            "secret.pem",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
        );
        let torn = write("torn.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n");
        let broken = write("broken.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        let absent = folder.path().join("absent.pem");

        let provider = ring::default_provider();
        let read =
            |cert: &Path, key: &Path| read(&TlsFiles { cert: cert.into(), key: key.into() }, &provider);
        read(&cert, &key).expect("a pair");
        read(&both, &both).expect("one file for both");
        for (cert, key, words) in [
            (&absent, &key, "--cert: reading"),
            (&cert, &absent, "--key: reading"),
            (&empty, &key, "no certificate in"),
            (&key, &key, "no certificate in"),
            (&cert, &empty, "no private key in"),
            (&cert, &cert, "no private key in"),
            (&cert, &secret, "openssl pkey"),
            (&torn, &key, "is not PEM"),
            (&cert, &stranger, "is not the key of"),
            (&broken, &key, "cannot be used"),
        ] {
            let error = read(cert, key).expect_err(words);
            assert!(error.to_string().contains(words), "{words}: {error}");
            assert!(!error.to_string().contains("  "), "{error}");
        }
        let error = read(&broken, &key).expect_err("a broken certificate");
        assert!(error.source().is_some());
    }

    #[test]
    fn only_a_key_that_everybody_may_read_is_worth_a_warning() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = folder.path().join("key.pem");
        fs::write(&key, "").expect("written");
        for (mode, open) in [(0o600, false), (0o640, false), (0o644, true)] {
            fs::set_permissions(&key, fs::Permissions::from_mode(mode)).expect("changed");
            let warning = TlsFiles { cert: key.clone(), key: key.clone() }.warning();
            assert_eq!(warning.is_some_and(|words| words.contains("chmod 600")), open, "{mode:o}");
        }
    }
}
