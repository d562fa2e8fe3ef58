//! Which cryptography outgoing connections use: ring, the one that needs no other compiler than ours.

/// Makes ring the provider of this process, unless there is one. Every client of HTTPS needs it before it is built.
pub fn install_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have been first; then its choice is this one.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
