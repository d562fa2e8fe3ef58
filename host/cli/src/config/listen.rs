//! The address that a host listens on, as it is written in `skep.toml` and after `--listen`.

use std::net::SocketAddr;

use serde::Deserialize as _;
use serde::de::{Deserializer, Error as _};

/// Parses an IP address and a port. Host names are not accepted, because one may resolve to several addresses.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!(
            "{text:?} is not an IP address with a port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080"
        )
    })
}

/// Reads the field; for `#[serde(deserialize_with)]`.
pub(super) fn field<'de, D: Deserializer<'de>>(reader: D) -> Result<Option<SocketAddr>, D::Error> {
    listen_address(&String::deserialize(reader)?).map(Some).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn an_address_has_an_ip_and_a_port() {
        for good in ["127.0.0.1:0", "0.0.0.0:8080", "[::1]:80"] {
            assert_eq!(listen_address(good).expect(good).to_string(), good);
        }
        for bad in ["localhost:8080", "127.0.0.1", ":8080", "8080", "127.0.0.1:99999", "::1:80", ""] {
            let error = listen_address(bad).expect_err(bad);
            assert!(error.contains(bad) && error.contains("such as 127.0.0.1:8080"), "{error}");
        }
    }

    #[test]
    fn a_bad_address_is_reported_with_its_line() {
        let error =
            Config::parse("threads = 2\nlisten = \"localhost:80\"\n").expect_err("a name").to_string();
        assert!(error.starts_with("line 2: listen: \"localhost:80\" is not an IP address"), "{error}");
    }
}
