//! `[http]` in `skep.toml`: bounds of the server, trusted proxies, and web pages that may use the host.

use super::{MAX_BLOCK_BYTES, number};
use anyhow::{Context as _, Result, bail};
use ipnet::IpNet;
use serde::Deserialize;
use skep_gateway::{ConsoleOptions, GatewayOptions};
use std::net::IpAddr;
use std::time::Duration;

/// The section as written in the file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    #[serde(deserialize_with = "number::<1024, MAX_BLOCK_BYTES, _, _>")]
    pub max_body_bytes: Option<usize>,
    /// Time that running requests may continue after a signal to stop.
    #[serde(deserialize_with = "number::<0, 86_400, _, _>")]
    pub drain_s: Option<u64>,
    /// Time from the opening of a connection, or from the first byte of a further request, to the end of the
    /// request's head.
    #[serde(deserialize_with = "number::<1, 3_600, _, _>")]
    pub header_timeout_s: Option<u64>,
    /// Time that a connection may stay open between requests.
    #[serde(deserialize_with = "number::<1, 86_400, _, _>")]
    pub idle_timeout_s: Option<u64>,
    /// Time that a client may read next to nothing while an answer waits to be sent.
    #[serde(deserialize_with = "number::<1, 86_400, _, _>")]
    pub send_timeout_s: Option<u64>,
    /// Maximum number of connections at the same time.
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub max_connections: Option<usize>,
    /// Maximum number of connections of one client address at the same time.
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub max_connections_per_address: Option<usize>,
    /// Addresses and networks of proxies whose `X-Forwarded-For` is trusted.
    pub trusted_proxies: Option<Vec<String>>,
    /// Web pages that may use the host, such as `https://app.example.com`.
    pub origins: Option<Vec<String>>,
    /// Whether the console is served at `/ui`.
    pub console: Option<bool>,
}

impl HttpConfig {
    /// Sets the options that the section has, and rejects an invalid origin.
    pub(super) fn apply(&self, options: &mut GatewayOptions) -> Result<()> {
        for origin in self.origins.iter().flatten() {
            check_origin(origin)?;
        }
        options.max_body_bytes = self.max_body_bytes.unwrap_or(options.max_body_bytes);
        let connections = &mut options.connections;
        connections.header_timeout =
            self.header_timeout_s.map_or(connections.header_timeout, Duration::from_secs);
        connections.idle_timeout = self.idle_timeout_s.map_or(connections.idle_timeout, Duration::from_secs);
        connections.send_timeout = self.send_timeout_s.map_or(connections.send_timeout, Duration::from_secs);
        connections.max = self.max_connections.unwrap_or(connections.max);
        connections.max_per_address = self.max_connections_per_address.unwrap_or(connections.max_per_address);
        if let Some(proxies) = &self.trusted_proxies {
            options.trusted_proxies = proxies.iter().map(|proxy| network(proxy)).collect::<Result<_>>()?;
        }
        options.drain = self.drain_s.map_or(options.drain, Duration::from_secs);
        if let Some(origins) = &self.origins {
            options.origins.clone_from(origins);
        }
        if self.console == Some(false) {
            options.console = ConsoleOptions::Off;
        }
        Ok(())
    }
}

/// Parses a network; an address is a network of one.
fn network(text: &str) -> Result<IpNet> {
    let parsed = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from));
    parsed.with_context(|| {
        format!(
            "[http] trusted_proxies: {text:?} is not an IP address or network; write it as \"10.0.0.7\" or \"10.0.0.0/8\""
        )
    })
}

/// Checks that a browser could send `origin` as its `Origin`: a scheme, a host and an optional port, or `*`
/// for any port.
fn check_origin(origin: &str) -> Result<()> {
    let authority = ["http://", "https://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
    let host = authority.map(|authority| authority.strip_suffix(":*").unwrap_or(authority));
    match host {
        Some(host) if !host.is_empty() && !host.contains(['/', '?', '#', '@', '*']) => Ok(()),
        _ => bail!("[http] origins: {origin:?} is not a valid origin; write it as https://app.example.com"),
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

    #[test]
    fn bounds_of_connections_come_from_the_file() {
        let config: HttpConfig = skep_runtime::parse_toml(
            "header_timeout_s = 1\nidle_timeout_s = 2\nsend_timeout_s = 3\nmax_connections = 4\n\
             max_connections_per_address = 5\ntrusted_proxies = [\"10.0.0.7\", \"fd00::/8\"]\n",
        )
        .expect("valid");
        let mut options = GatewayOptions::default();
        config.apply(&mut options).expect("valid");
        let connections = &options.connections;
        let times = [connections.header_timeout, connections.idle_timeout, connections.send_timeout];
        assert_eq!(times.map(|time| time.as_secs()), [1, 2, 3]);
        assert_eq!((connections.max, connections.max_per_address), (4, 5));
        let proxies: Vec<String> = options.trusted_proxies.iter().map(IpNet::to_string).collect();
        assert_eq!(proxies, ["10.0.0.7/32", "fd00::/8"]);
    }

    #[test]
    fn a_proxy_that_is_not_an_address_is_an_error() {
        for proxy in ["proxy.example", "10.0.0.0/33", "", "10.0.0.7:80"] {
            let config =
                HttpConfig { trusted_proxies: Some(vec![proxy.to_owned()]), ..HttpConfig::default() };
            let error = config.apply(&mut GatewayOptions::default()).expect_err(proxy).to_string();
            assert!(error.contains("trusted_proxies") && error.contains("10.0.0.0/8"), "{error}");
        }
    }
}
