//! TLS with ring, the cryptography that needs no other compiler than ours, and the certificate authorities of the machine.

use rustls::{ClientConfig, RootCertStore, crypto::ring};
use rustls_platform_verifier::Verifier;
use std::sync::Arc;

/// Makes ring the provider of this process, unless there is one. Clients of HTTPS that are not ours need it before they
/// are built.
pub fn install_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have been first; then its choice is this one.
        let _ = ring::default_provider().install_default();
    }
}

/// How TLS is spoken, or why nobody can be trusted.
pub(crate) struct Tls {
    pub(crate) config: ClientConfig,
    pub(crate) problem: Option<String>,
}

impl Tls {
    /// A machine without authorities still makes plain connections.
    pub(crate) fn of_the_machine() -> Self {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("ring has cipher suites for TLS 1.2 and 1.3");
        match Verifier::new(provider) {
            Ok(verifier) => {
                let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
                Tls { config: builder.with_no_client_auth(), problem: None }
            }
            Err(error) => {
                let config = builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
                Tls { config, problem: Some(error.to_string()) }
            }
        }
    }
}
