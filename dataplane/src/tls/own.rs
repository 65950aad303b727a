//! A certificate of our own, for whoever wants to try HTTPS before there is a real one.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::CertifiedKey;

use super::TlsError;

/// How long it is good for. It is made anew with every start, so this only has to outlast a process; some clients
/// refuse certificates of more than 825 days.
const GOOD_FOR: Duration = Duration::from_hours(824 * 24);
/// Clocks of clients may be late.
const LATE_CLOCKS: Duration = Duration::from_hours(24);

/// The names of this machine: those every machine has, its own, and the addresses at which it listens.
pub(super) fn names(listen: &[SocketAddr]) -> Vec<String> {
    let mut names: BTreeSet<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let is_name = |name: &str| {
        !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'))
    };
    if is_name(host) {
        names.insert(host.to_ascii_lowercase());
    }
    let addresses = listen.iter().map(SocketAddr::ip).filter(|ip| !ip.is_unspecified());
    names.extend(addresses.map(|ip| ip.to_string()));
    names.into_iter().collect()
}

/// A certificate for these names, signed by itself.
pub(super) fn make(names: Vec<String>, provider: &CryptoProvider) -> Result<CertifiedKey, TlsError> {
    let mut params = CertificateParams::new(names)?;
    let now = SystemTime::now();
    params.not_before = (now - LATE_CLOCKS).into();
    params.not_after = (now + GOOD_FOR).into();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "forebay-node (self-signed)");
    // It vouches for nothing but itself, also in a list of trusted roots.
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let cert = params.self_signed(&key)?;
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    CertifiedKey::from_der(vec![cert.der().clone()], key, provider).map_err(TlsError::OwnKey)
}
