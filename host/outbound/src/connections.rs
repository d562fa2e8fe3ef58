//! `reqwest` clients that connect only to addresses that have been checked.
//!
//! There is one client for each port, because an address may be allowed for one port and not for another. The
//! clients follow no redirects, use no proxy from the environment, keep no cookies, decompress nothing and
//! retry nothing.

use crate::{AddressPolicy, Origin, OutboundError, Resolve, resolve::Guarded, tls::Tls};
use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

/// Maximum number of ports that have a client. At the limit, all clients are dropped with their idle
/// connections.
const MAX_PORTS: usize = 64;
const IDLE: Duration = Duration::from_secs(15);
const IDLE_PER_HOST: usize = 8;

pub(crate) struct Connections {
    resolve: Arc<dyn Resolve>,
    policy: Arc<AddressPolicy>,
    /// Loaded on first use, because many hosts never make an outbound connection.
    tls: OnceLock<Tls>,
    by_port: Mutex<HashMap<u16, reqwest::Client>>,
}

impl Connections {
    pub(crate) fn new(resolve: Arc<dyn Resolve>, policy: AddressPolicy) -> Self {
        Connections { resolve, policy: Arc::new(policy), tls: OnceLock::new(), by_port: Mutex::default() }
    }

    /// Returns a client that may be used for this origin.
    pub(crate) fn to(&self, origin: &Origin) -> Result<reqwest::Client, OutboundError> {
        // An IP address is connected to directly, without the resolver that would check it.
        if let Some(address) = literal(origin) {
            self.policy.check(origin.host(), address)?;
        }
        if origin.is_https()
            && let Some(problem) = &self.tls().problem
        {
            let problem = format!("no certificate authority is trusted: {problem}");
            return Err(OutboundError::Connect { origin: origin.clone(), problem });
        }
        let mut by_port = self.by_port.lock().unwrap_or_else(PoisonError::into_inner);
        if by_port.len() >= MAX_PORTS && !by_port.contains_key(&origin.port()) {
            by_port.clear();
        }
        Ok(by_port.entry(origin.port()).or_insert_with(|| self.client(origin.port())).clone())
    }

    /// Checks the addresses that a request to this origin would connect to.
    pub(crate) async fn check_addresses(&self, origin: &Origin) -> Result<(), OutboundError> {
        match literal(origin) {
            Some(address) => self.policy.check(origin.host(), address),
            None => {
                self.guarded(origin.port()).addresses(origin.host().to_owned()).await?;
                Ok(())
            }
        }
    }

    fn guarded(&self, port: u16) -> Guarded {
        Guarded { resolve: self.resolve.clone(), policy: self.policy.clone(), port }
    }

    fn tls(&self) -> &Tls {
        self.tls.get_or_init(Tls::of_the_machine)
    }

    fn client(&self, port: u16) -> reqwest::Client {
        self.tls()
            .client()
            .dns_resolver(self.guarded(port))
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_PER_HOST)
            .build()
            .expect("the TLS configuration is a rustls one and all other settings are constants")
    }
}

/// Returns the address of an origin whose host is an IP address.
fn literal(origin: &Origin) -> Option<SocketAddr> {
    let address = origin.host().trim_matches(['[', ']']).parse::<IpAddr>().ok()?;
    Some(SocketAddr::new(address, origin.port()))
}
