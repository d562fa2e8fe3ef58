//! The certificate authorities that the HTTP clients of commands trust: those of the machine.
//!
//! Invariant: on a machine without any, as a container may be, addresses with plain HTTP can still be reached.

use anyhow::{Error, Result, anyhow};
use reqwest::Url;
use skep_outbound::tls::Tls;

/// Returns what a client of this address needs for TLS. Fails if the address needs HTTPS and no authority is trusted.
pub(crate) fn tls_for(address: &Url) -> Result<Tls> {
    let tls = Tls::of_the_machine();
    match &tls.problem {
        Some(problem) if address.scheme() == "https" => {
            Err(none_trusted(&format!("{address} needs HTTPS"), problem))
        }
        _ => Ok(tls),
    }
}

/// Fails if no authority is trusted. `user` is a client that cannot be set up without any, even for plain HTTP.
pub(crate) fn require_any(user: &str) -> Result<()> {
    let needs_any = format!("{user} needs certificate authorities even for plain HTTP");
    Tls::of_the_machine().problem.map_or(Ok(()), |problem| Err(none_trusted(&needs_any, &problem)))
}

fn none_trusted(what: &str, problem: &str) -> Error {
    anyhow!(
        "{what}, and no certificate authority is trusted: {problem}\n  hint: install ca-certificates, or set \
         SSL_CERT_FILE to a file of certificates"
    )
}
