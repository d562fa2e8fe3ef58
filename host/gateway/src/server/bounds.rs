//! Bounds the number of connections, in total and for each client.

use crate::client_address::network;
use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The connection counts of one server. Dropping a [`Slot`] frees its slot.
#[derive(Debug)]
pub(super) struct Bounds {
    max: usize,
    max_per_address: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    connections: usize,
    /// Counts by client network. Entries that reach 0 are removed, so there are no more entries than connections and
    /// requests.
    by_client: HashMap<IpAddr, usize>,
}

/// The bound that is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exceeded {
    All,
    Address,
}

/// The slot of a connection, or of a request that a proxy forwards.
#[derive(Debug)]
pub(crate) struct Slot {
    bounds: Arc<Bounds>,
    is_connection: bool,
    client: Mutex<Option<IpAddr>>,
}

impl Bounds {
    pub(super) fn new(max: usize, max_per_address: usize) -> Self {
        Bounds { max, max_per_address, open: Mutex::default() }
    }

    /// Reserves a slot for a connection, counted for `client` unless it comes from a proxy.
    pub(super) fn admit_connection(self: &Arc<Self>, client: Option<IpAddr>) -> Result<Slot, Exceeded> {
        self.admit(true, client)
    }

    /// Reserves a slot for a request that a proxy forwards for `client`.
    pub(super) fn admit_request(self: &Arc<Self>, client: IpAddr) -> Result<Slot, Exceeded> {
        self.admit(false, Some(client))
    }

    fn admit(self: &Arc<Self>, is_connection: bool, client: Option<IpAddr>) -> Result<Slot, Exceeded> {
        let client = client.map(network);
        let mut open = self.open();
        let of_client = client.and_then(|client| open.by_client.get(&client)).copied().unwrap_or(0);
        if client.is_some() && of_client >= self.max_per_address {
            return Err(Exceeded::Address);
        }
        if is_connection && open.connections >= self.max {
            return Err(Exceeded::All);
        }
        open.connections += usize::from(is_connection);
        if let Some(client) = client {
            *open.by_client.entry(client).or_default() += 1;
        }
        drop(open);
        Ok(Slot { bounds: self.clone(), is_connection, client: Mutex::new(client) })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Stops counting the connection for its client, because it is one of a host that sends the requests of many clients.
    pub(crate) fn leave_address(&self) {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(client) = client {
            self.bounds.open().forget(client);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.leave_address();
        self.bounds.open().connections -= usize::from(self.is_connection);
    }
}

impl Open {
    fn forget(&mut self, client: IpAddr) {
        if let Some(count) = self.by_client.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                self.by_client.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Option<IpAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn dropping_a_slot_frees_it() {
        let bounds = Arc::new(Bounds::new(2, 1));
        let first = bounds.admit_connection(address("192.0.2.1")).unwrap();
        assert_eq!(bounds.admit_connection(address("192.0.2.1")).unwrap_err(), Exceeded::Address);
        let second = bounds.admit_connection(address("192.0.2.2")).unwrap();
        assert_eq!(bounds.admit_connection(address("192.0.2.3")).unwrap_err(), Exceeded::All);
        drop(first);
        let third = bounds.admit_connection(address("192.0.2.1")).unwrap();
        drop((second, third));
        assert!(bounds.open().by_client.is_empty() && bounds.open().connections == 0);
    }

    #[test]
    fn ipv6_clients_are_counted_by_network() {
        let bounds = Arc::new(Bounds::new(9, 1));
        let _first = bounds.admit_connection(address("2001:db8::1")).unwrap();
        assert_eq!(bounds.admit_connection(address("2001:db8::2")).unwrap_err(), Exceeded::Address);
        let _other = bounds.admit_connection(address("2001:db8:0:1::1")).unwrap();
    }

    #[test]
    fn a_connection_of_a_host_counts_for_no_client() {
        let bounds = Arc::new(Bounds::new(2, 1));
        let first = bounds.admit_connection(address("192.0.2.1")).unwrap();
        first.leave_address();
        first.leave_address();
        let second = bounds.admit_connection(address("192.0.2.1")).unwrap();
        assert_eq!(bounds.admit_connection(address("192.0.2.2")).unwrap_err(), Exceeded::All);
        drop(first);
        assert_eq!(bounds.admit_connection(address("192.0.2.1")).unwrap_err(), Exceeded::Address);
        drop(second);
        assert!(bounds.open().by_client.is_empty() && bounds.open().connections == 0);
    }

    #[test]
    fn forwarded_requests_count_for_their_client_and_not_as_connections() {
        let bounds = Arc::new(Bounds::new(1, 1));
        let _proxy = bounds.admit_connection(None).unwrap();
        let client: IpAddr = "192.0.2.1".parse().unwrap();
        let request = bounds.admit_request(client).unwrap();
        assert_eq!(bounds.admit_request(client).unwrap_err(), Exceeded::Address);
        drop(request);
        bounds.admit_request(client).unwrap();
    }
}
