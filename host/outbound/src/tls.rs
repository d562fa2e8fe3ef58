//! TLS with ring, the cryptography provider that needs no additional compiler, and the certificate authorities
//! of the machine.

use rustls::{ClientConfig, RootCertStore, crypto::ring};
use rustls_platform_verifier::Verifier;
use std::sync::Arc;

const USER_AGENT: &str = concat!("skep/", env!("CARGO_PKG_VERSION"));

/// Installs ring as the provider of this process, unless one is installed. HTTPS clients of other crates need
/// it before they are built.
pub fn install_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have installed one first, which is then ring, too.
        let _ = ring::default_provider().install_default();
    }
}

/// A TLS configuration, and the problem if no certificate authority can be loaded.
pub struct Tls {
    pub config: ClientConfig,
    pub problem: Option<String>,
}

impl Tls {
    /// Returns the builder of a client that does exactly what was requested: it follows no redirects, uses no proxy
    /// from the environment, keeps no cookies, decompresses nothing and retries nothing.
    pub fn client(&self) -> reqwest::ClientBuilder {
        reqwest::Client::builder()
            .tls_backend_preconfigured(self.config.clone())
            .user_agent(USER_AGENT)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .no_gzip()
            .no_brotli()
            .no_deflate()
            .no_zstd()
            .referer(false)
            .http1_only()
    }

    /// Loads the certificate authorities of the machine. Without them, plain HTTP connections still work.
    pub fn of_the_machine() -> Self {
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
