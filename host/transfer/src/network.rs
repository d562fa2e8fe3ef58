//! The addresses on which NIXL's network stack (UCX) listens, and which of them machines other than the operator's may
//! reach.
//!
//! UCX listens on all devices unless the variable UCX_NET_DEVICES names some, and it requires no key.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The variable that names the devices on which UCX listens.
pub const DEVICES_VARIABLE: &str = "UCX_NET_DEVICES";

/// An address beyond private networks on which UCX may listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    pub device: String,
    pub address: IpAddr,
}

/// Returns the addresses beyond private networks on which UCX may listen. `devices` is the value of [`DEVICES_VARIABLE`].
pub fn exposed(devices: Option<&str>) -> io::Result<Vec<Exposed>> {
    let mut found = addresses()?;
    found.retain(|Exposed { device, address }| may_listen(devices, device) && !is_private(*address));
    Ok(found)
}

/// Returns whether UCX may listen on a device.
fn may_listen(devices: Option<&str>, device: &str) -> bool {
    let Some(listed) = devices.map(str::trim).filter(|listed| !listed.is_empty() && *listed != "all") else {
        return true;
    };
    let has = |listed: &str| listed.split(',').any(|name| name.trim() == device);
    match listed.strip_prefix('^') {
        Some(excluded) => !has(excluded),
        None => has(listed),
    }
}

/// Returns whether an address is reached only from the own machine, or from networks that are not part of the internet.
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let [first, second, ..] = address.octets();
            let is_shared = first == 100 && (64..128).contains(&second);
            address.is_loopback() || address.is_private() || address.is_link_local() || is_shared
        }
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => is_private(IpAddr::V4(address)),
            None => address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local(),
        },
    }
}

/// Returns the addresses of this machine with their devices.
fn addresses() -> io::Result<Vec<Exposed>> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the function writes the address of a list, which is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut found, mut at) = (Vec::new(), first);
    // SAFETY: the list is alive; each entry is followed by the next one, and the last by null.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        // SAFETY: the address of an entry is null, or one of the family that it names.
        let Some(address) = (unsafe { ip_address(entry.ifa_addr) }) else { continue };
        // SAFETY: the name of an entry is a string that lives as long as the list.
        let device = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.push(Exposed { device, address });
    }
    // SAFETY: the list came from `getifaddrs`, and nothing refers to it anymore.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// Returns the address, if it is one of IP.
///
/// # Safety
/// The pointer is null, or points to an address of the family that it names.
unsafe fn ip_address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller guarantees that a pointer that is not null can be read as what its family says.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let address = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let address = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_names_or_excludes_devices() {
        for (devices, device, expected) in [
            (None, "eth0", true),
            (Some(""), "eth0", true),
            (Some("all"), "eth0", true),
            (Some("lo, eth1"), "eth1", true),
            (Some("lo,eth1"), "eth0", false),
            (Some("mlx5_0:1"), "eth0", false),
            (Some("^eth0"), "eth0", false),
            (Some("^eth0"), "eth1", true),
        ] {
            assert_eq!(may_listen(devices, device), expected, "{devices:?}, {device}");
        }
    }

    #[test]
    fn internet_addresses_are_distinguished_from_private_ones() {
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "169.254.1.1",
            "100.64.0.1",
            "::1",
            "fe80::1",
            "fd00::1",
            "::ffff:10.0.0.1",
        ] {
            assert!(is_private(private.parse().unwrap()), "{private}");
        }
        for public in ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2001:db8::1", "::ffff:8.8.8.8"] {
            assert!(!is_private(public.parse().unwrap()), "{public}");
        }
    }

    #[test]
    fn the_addresses_of_this_machine_are_listed() {
        let loopback = Exposed { device: "lo".to_owned(), address: Ipv4Addr::LOCALHOST.into() };
        let found = addresses().unwrap();
        assert!(!cfg!(target_os = "linux") || found.contains(&loopback), "{found:?}");
        assert!(exposed(Some("no-such-device")).unwrap().is_empty());
    }
}
