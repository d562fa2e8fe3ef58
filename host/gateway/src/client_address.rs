//! Determines the client address of a request: the address of its connection, or the one that a trusted proxy
//! reports.
//!
//! `X-Forwarded-For` is read from its end, where the nearest proxy wrote, and only as long as the writer of an entry
//! is trusted. So a client cannot choose the address that limits and logs use for it.

use axum::{
    extract::ConnectInfo,
    http::{Extensions, HeaderMap},
};
use ipnet::IpNet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

const FORWARDED_FOR: &str = "x-forwarded-for";
/// Maximum number of header entries that are read; no chain of proxies is longer.
const MAX_HOPS: usize = 32;

/// The client's address, in a request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientAddress(pub(crate) IpAddr);

impl ClientAddress {
    /// Returns the client of a request that was received over a connection from `peer`.
    pub(crate) fn of(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> Self {
        let mut client = peer.to_canonical();
        for entry in entries(headers).take(MAX_HOPS) {
            if !is_trusted(client, trusted) {
                break;
            }
            let Some(address) = entry.and_then(parse) else { break };
            client = address;
        }
        ClientAddress(client)
    }

    /// Returns the client of a request whose server stored the address of the connection in its extensions.
    pub(crate) fn of_request(
        extensions: &Extensions,
        headers: &HeaderMap,
        trusted: &[IpNet],
    ) -> Option<Self> {
        let ConnectInfo(peer) = extensions.get::<ConnectInfo<SocketAddr>>()?;
        Some(ClientAddress::of(peer.ip(), headers, trusted))
    }
}

/// Returns whether an address belongs to a trusted proxy.
pub(crate) fn is_trusted(address: IpAddr, trusted: &[IpNet]) -> bool {
    trusted.iter().any(|network| network.contains(&address.to_canonical()))
}

/// Returns the network that counts as one client: an IPv4 address, or the /64 network of an IPv6 address.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    }
}

/// Returns the header's entries, the last one first. An entry is `None` if its line is not text.
fn entries(headers: &HeaderMap) -> impl Iterator<Item = Option<&str>> {
    headers.get_all(FORWARDED_FOR).iter().rev().flat_map(|line| {
        let text = line.to_str().ok();
        let parts = text.into_iter().flat_map(|text| text.rsplit(',').map(|part| Some(part.trim())));
        parts.chain(text.is_none().then_some(None))
    })
}

/// Parses an address as proxies write it: alone, with a port, or in brackets.
fn parse(entry: &str) -> Option<IpAddr> {
    let bare = entry.strip_prefix('[').and_then(|entry| entry.strip_suffix(']')).unwrap_or(entry);
    let address = bare.parse::<IpAddr>().or_else(|_| entry.parse::<SocketAddr>().map(|address| address.ip()));
    address.ok().map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_trusted_only_as_far_as_trusted_proxies_wrote_it() {
        let trusted: Vec<IpNet> = ["10.0.0.0/8", "fd00::/8"].map(|net| net.parse().unwrap()).to_vec();
        for (peer, lines, expected) in [
            // The header of a client that connects directly is ignored.
            ("203.0.113.5", vec!["198.51.100.1"], "203.0.113.5"),
            ("10.0.0.1", vec![], "10.0.0.1"),
            ("10.0.0.1", vec!["198.51.100.1"], "198.51.100.1"),
            // Entries that the client sent come before those that the proxy wrote.
            ("10.0.0.1", vec!["6.6.6.6, 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", vec!["6.6.6.6", "198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", vec!["198.51.100.1, 10.0.0.2"], "198.51.100.1"),
            ("10.0.0.1", vec!["198.51.100.1, 10.0.0.2, 10.0.0.3"], "198.51.100.1"),
            ("10.0.0.1", vec!["6.6.6.6, 203.0.113.9, 10.0.0.2"], "203.0.113.9"),
            // Entries before one that is not an address are ignored.
            ("10.0.0.1", vec!["198.51.100.1, unknown"], "10.0.0.1"),
            ("10.0.0.1", vec!["198.51.100.1, , 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", vec!["198.51.100.1:4711"], "198.51.100.1"),
            ("10.0.0.1", vec!["[2001:db8::1]:4711"], "2001:db8::1"),
            ("10.0.0.1", vec!["[2001:db8::1]"], "2001:db8::1"),
            ("::ffff:10.0.0.1", vec!["::ffff:198.51.100.1"], "198.51.100.1"),
            ("fd00::1", vec!["2001:db8::1"], "2001:db8::1"),
        ] {
            let mut headers = HeaderMap::new();
            for line in &lines {
                headers.append(FORWARDED_FOR, line.parse().unwrap());
            }
            let found = ClientAddress::of(peer.parse().unwrap(), &headers, &trusted);
            assert_eq!(found, ClientAddress(expected.parse().unwrap()), "{peer} {lines:?}");
        }
    }

    #[test]
    fn the_length_of_a_proxy_chain_is_bounded() {
        let trusted = ["10.0.0.0/8".parse().unwrap()];
        let chain = vec!["10.0.0.7"; MAX_HOPS + 1].join(", ");
        let mut headers = HeaderMap::new();
        headers.insert(FORWARDED_FOR, format!("198.51.100.1, {chain}").parse().unwrap());
        let found = ClientAddress::of("10.0.0.1".parse().unwrap(), &headers, &trusted);
        assert_eq!(found, ClientAddress("10.0.0.7".parse().unwrap()));
    }

    #[test]
    fn an_ipv6_client_is_identified_by_its_network() {
        for (address, expected) in [
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            assert_eq!(network(address.parse().unwrap()), expected.parse::<IpAddr>().unwrap());
        }
    }
}
