//! `[http]`: bounds of the server, and the web pages that may use it.

use super::{PIECE_BYTES, number};
use anyhow::{Result, bail};
use serde::Deserialize;
use skep_gateway::GatewayOptions;
use std::time::Duration;

/// The section as it is written.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    #[serde(deserialize_with = "number::<1024, PIECE_BYTES, _, _>")]
    pub max_body_bytes: Option<usize>,
    /// How long running requests may go on after a signal to stop.
    #[serde(deserialize_with = "number::<0, 86_400, _, _>")]
    pub drain_s: Option<u64>,
    /// Web pages that may use the host, such as `https://app.example.com`.
    pub origins: Option<Vec<String>>,
}

impl HttpConfig {
    pub(super) fn apply(&self, options: &mut GatewayOptions) -> Result<()> {
        for origin in self.origins.iter().flatten() {
            check_origin(origin)?;
        }
        options.max_body_bytes = self.max_body_bytes.unwrap_or(options.max_body_bytes);
        options.drain = self.drain_s.map_or(options.drain, Duration::from_secs);
        if let Some(origins) = &self.origins {
            options.origins.clone_from(origins);
        }
        Ok(())
    }
}

/// That a browser could send it as its `Origin`: a scheme, a host and perhaps a port, or `*` for any.
fn check_origin(origin: &str) -> Result<()> {
    let authority = ["http://", "https://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
    let host = authority.map(|authority| authority.strip_suffix(":*").unwrap_or(authority));
    match host {
        Some(host) if !host.is_empty() && !host.contains(['/', '?', '#', '@', '*']) => Ok(()),
        _ => bail!("[http] origins: {origin:?} is no origin; write it as https://app.example.com"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(origin: &str) -> Result<Vec<String>> {
        let config: HttpConfig = toml::from_str(&format!("origins = [\"{origin}\"]")).expect("a list");
        let mut options = GatewayOptions::default();
        config.apply(&mut options).map(|()| options.origins)
    }

    #[test]
    fn an_origin_that_no_browser_sends_is_an_error() {
        for origin in
            ["app.example", "https://", "https://app.example/", "ftp://app.example", "https://*", "*"]
        {
            let error = apply(origin).expect_err(origin).to_string();
            assert!(error.contains("write it as https://app.example.com"), "{error}");
        }
        for origin in ["https://app.example", "http://localhost:3000", "http://localhost:*"] {
            assert_eq!(apply(origin).expect("an origin"), [origin]);
        }
    }
}
