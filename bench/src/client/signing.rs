//! Signatures (AWS version 4) for the closed loop: every object's headers are signed before the clock runs.
//!
//! A signature holds for a quarter of an hour, a block lasts less; so signing costs nothing while measuring.
#![forbid(unsafe_code)]

use super::Target;
use crate::origin::catalog::object_name;
use anyhow::{Context as _, Result};
use reqsign_aws_v4::{Credential, EnvCredentialProvider, RequestSigner};
use reqsign_core::{Context, OsEnv, Signer};

/// Signs with the keys of the environment.
pub struct KeySigner {
    signer: Signer<Credential>,
    runtime: tokio::runtime::Runtime,
}

impl KeySigner {
    /// Keys from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`.
    ///
    /// # Errors
    /// No runtime can be built.
    pub fn from_env(region: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .context("starting a runtime to sign with")?;
        let context = Context::new().with_env(OsEnv);
        let signer = Signer::new(context, EnvCredentialProvider::new(), RequestSigner::new("s3", region));
        Ok(Self { signer, runtime })
    }

    /// The header lines of a signed request without a body.
    ///
    /// # Errors
    /// There are no keys, or the path is not one.
    pub fn sign(&self, target: &Target, method: &str, path: &str) -> Result<Box<[u8]>> {
        let uri = format!("http://{}{path}", target.host);
        let (mut parts, ()) = http::Request::builder().method(method).uri(uri).body(())?.into_parts();
        self.runtime
            .block_on(self.signer.sign(&mut parts, None))
            .context("signing; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use --sign none")?;
        let mut lines = Vec::new();
        for (name, value) in &parts.headers {
            if name == http::header::HOST {
                continue; // the request has it already
            }
            lines.extend_from_slice(name.as_str().as_bytes());
            lines.extend_from_slice(b": ");
            lines.extend_from_slice(value.as_bytes());
            lines.extend_from_slice(b"\r\n");
        }
        Ok(lines.into())
    }

    /// The headers for GETs of objects 0 to `count`, in order.
    ///
    /// # Errors
    /// As [`Self::sign`].
    pub fn sign_objects(&self, target: &Target, prefix: &str, count: u64) -> Result<Vec<Box<[u8]>>> {
        (0..count)
            .map(|index| {
                self.sign(target, "GET", &format!("/{}/{}", target.bucket, object_name(prefix, index)))
            })
            .collect()
    }
}
