//! Resolves a name to addresses that have been checked.
//!
//! `reqwest` resolves names here and connects to the addresses that it gets, so no second lookup that could
//! return something else happens between the check and the connection.

use crate::{AddressPolicy, OutboundError};
use futures::future::BoxFuture;
use reqwest::dns::{Addrs, Name, Resolving};
use std::{io, net::SocketAddr, sync::Arc};

/// Maximum number of addresses of one name. Further results of the system resolver are ignored.
const MAX_ADDRESSES: usize = 64;

/// Resolves host names.
pub trait Resolve: Send + Sync + 'static {
    /// Returns the addresses of `host`, each with `port`.
    fn resolve(&self, host: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
}

/// The resolver of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, host: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        Box::pin(
            async move { Ok(tokio::net::lookup_host((host, port)).await?.take(MAX_ADDRESSES).collect()) },
        )
    }
}

/// Returns addresses only if all addresses of a name are allowed. A name with both allowed and denied addresses
/// is treated as an attack.
#[derive(Clone)]
pub(crate) struct Guarded {
    pub(crate) resolve: Arc<dyn Resolve>,
    pub(crate) policy: Arc<AddressPolicy>,
    /// The port to connect to. `reqwest` does not pass it to the resolver, so there is a client for each port.
    pub(crate) port: u16,
}

impl Guarded {
    /// Resolves `host`, and fails unless every address is allowed.
    pub(crate) async fn addresses(&self, host: String) -> Result<Vec<SocketAddr>, OutboundError> {
        let unresolved = |problem: String| OutboundError::Resolve { host: host.clone(), problem };
        let addresses = self.resolve.resolve(host.clone(), self.port).await;
        let addresses = addresses.map_err(|error| unresolved(error.to_string()))?;
        if addresses.is_empty() || addresses.len() > MAX_ADDRESSES {
            let count = addresses.len();
            return Err(unresolved(format!("it has {count} addresses; 1 to {MAX_ADDRESSES} are supported")));
        }
        for address in &addresses {
            self.policy.check(&host, SocketAddr::new(address.ip(), self.port))?;
        }
        Ok(addresses)
    }
}

impl reqwest::dns::Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        let (guarded, host) = (self.clone(), name.as_str().to_owned());
        Box::pin(async move { Ok(Box::new(guarded.addresses(host).await?.into_iter()) as Addrs) })
    }
}
