//! Decides which addresses a connection may use.
//!
//! A list of origins says nothing about the addresses that the owner of a name lets it resolve to, so every
//! address is checked. Connections are allowed only to addresses of the public internet and to those that the
//! operator allows in addition.

use crate::OutboundError;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

/// IPv4 networks that are not public, according to the IANA registries of special-purpose addresses.
const SPECIAL_V4: &[(Ipv4Net, &str)] = &[
    (v4([0, 0, 0, 0], 8), "an unspecified address"),
    (v4([10, 0, 0, 0], 8), "a private address"),
    (v4([100, 64, 0, 0], 10), "a carrier's private address"),
    (v4([127, 0, 0, 0], 8), "a loopback address"),
    (v4([169, 254, 0, 0], 16), "a link-local address, where clouds keep their metadata"),
    (v4([172, 16, 0, 0], 12), "a private address"),
    (v4([192, 0, 0, 0], 24), "a reserved address"),
    (v4([192, 0, 2, 0], 24), "a documentation address"),
    (v4([192, 88, 99, 0], 24), "a 6to4 relay address"),
    (v4([192, 168, 0, 0], 16), "a private address"),
    (v4([198, 18, 0, 0], 15), "a benchmarking address"),
    (v4([198, 51, 100, 0], 24), "a documentation address"),
    (v4([203, 0, 113, 0], 24), "a documentation address"),
    (v4([224, 0, 0, 0], 4), "a multicast address"),
    (v4([240, 0, 0, 0], 4), "a reserved address"),
];

/// Only global unicast can be public in IPv6. Special networks inside it include those that embed an IPv4
/// address, which would lead to any of the networks above.
const PUBLIC_V6: Ipv6Net = v6([0x2000, 0], 3);
const SPECIAL_V6: &[(Ipv6Net, &str)] = &[
    (v6([0x2001, 0], 32), "a Teredo address"),
    (v6([0x2001, 0], 23), "a reserved address"),
    (v6([0x2001, 0xdb8], 32), "a documentation address"),
    (v6([0x2002, 0], 16), "a 6to4 address"),
    (v6([0x3fff, 0], 20), "a documentation address"),
];

/// The addresses that the operator allows. `Default` allows public addresses only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressPolicy {
    /// Ranges that connections may use although they are not public.
    pub allow_private: Vec<AddressRange>,
}

/// A range such as `10.1.0.0/16`, `10.1.2.3` or `10.1.2.3:8080`. IPv6 works alike, with brackets before a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressRange {
    net: IpNet,
    /// `None` means every port.
    port: Option<u16>,
}

impl AddressPolicy {
    pub(crate) fn check(&self, host: &str, address: SocketAddr) -> Result<(), OutboundError> {
        match special(address.ip()) {
            Some(kind) if !self.allow_private.iter().any(|range| range.contains(address)) => {
                Err(OutboundError::AddressDenied { host: host.to_owned(), address: address.ip(), kind })
            }
            _ => Ok(()),
        }
    }
}

impl AddressRange {
    fn contains(&self, address: SocketAddr) -> bool {
        self.net.contains(&address.ip()) && self.port.is_none_or(|port| port == address.port())
    }
}

/// Returns the kind of an address that is not public, and `None` for a public one.
fn special(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => kind(SPECIAL_V4.iter().find(|(net, _)| net.contains(&address))),
        IpAddr::V6(address) if PUBLIC_V6.contains(&address) => {
            kind(SPECIAL_V6.iter().find(|(net, _)| net.contains(&address)))
        }
        IpAddr::V6(Ipv6Addr::LOCALHOST) => Some("a loopback address"),
        IpAddr::V6(address) if address.to_ipv4().is_some() => {
            Some("an IPv4 address embedded in an IPv6 address")
        }
        IpAddr::V6(_) => Some("not public"),
    }
}

fn kind<N>(entry: Option<&(N, &'static str)>) -> Option<&'static str> {
    entry.map(|(_, kind)| *kind)
}

const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6([a, b]: [u16; 2], prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, 0), prefix)
}

impl FromStr for AddressRange {
    type Err = OutboundError;

    fn from_str(text: &str) -> Result<Self, OutboundError> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(AddressRange { net: address.ip().into(), port: Some(address.port()) });
        }
        let net = text.parse::<IpAddr>().map(IpNet::from).or_else(|_| text.parse::<IpNet>());
        let net = net.map_err(|_| OutboundError::Range { range: text.to_owned() })?;
        Ok(AddressRange { net: net.trunc(), port: None })
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => SocketAddr::new(self.net.addr(), port).fmt(f),
            None => self.net.fmt(f),
        }
    }
}

impl TryFrom<String> for AddressRange {
    type Error = OutboundError;

    fn try_from(text: String) -> Result<Self, OutboundError> {
        text.parse()
    }
}

impl From<AddressRange> for String {
    fn from(range: AddressRange) -> String {
        range.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(policy: &AddressPolicy, address: &str, port: u16) -> Result<(), OutboundError> {
        policy.check("x.org", SocketAddr::new(address.parse().expect(address), port))
    }

    fn allowing(ranges: &[&str]) -> AddressPolicy {
        AddressPolicy { allow_private: ranges.iter().map(|range| range.parse().expect(range)).collect() }
    }

    #[test]
    fn allows_only_public_addresses_by_default() {
        let policy = AddressPolicy::default();
        for address in
            ["1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00::1"]
        {
            assert_eq!(check(&policy, address, 443), Ok(()), "{address}");
        }
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.168.1.1",
            "198.18.0.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001:0:4136:e378::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            let error = check(&policy, address, 443).expect_err(address).to_string();
            assert!(error.contains("allow_private = [\"") && error.contains("skep.toml"), "{error}");
        }
    }

    #[test]
    fn allow_private_accepts_a_range_an_address_or_one_port() {
        let policy = allowing(&["127.0.0.0/8", "10.1.2.3:8080", "fd00::/8", "[::1]:81"]);
        for (address, port, allowed) in [
            ("127.0.0.1", 80, true),
            ("127.9.9.9", 1, true),
            ("10.1.2.3", 8080, true),
            ("10.1.2.3", 80, false),
            ("10.1.2.4", 8080, false),
            ("fd12::1", 443, true),
            ("::1", 81, true),
            ("::1", 80, false),
            ("::ffff:127.0.0.1", 80, false),
            ("169.254.169.254", 80, false),
        ] {
            assert_eq!(check(&policy, address, port).is_ok(), allowed, "{address} {port}");
        }
    }

    #[test]
    fn ranges_are_normalized_and_invalid_ones_are_refused() {
        for (text, expected) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("10.1.2.3", "10.1.2.3/32"),
            ("10.1.2.3:8080", "10.1.2.3:8080"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(text.parse::<AddressRange>().expect(text).to_string(), expected);
        }
        for text in ["", "localhost", "10.0.0.0/33", "10.0.0.1:99999", "::1]:80"] {
            let error = text.parse::<AddressRange>().expect_err(text).to_string();
            assert!(error.contains("10.1.2.3:8080"), "{error}");
        }
    }
}
