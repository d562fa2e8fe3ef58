//! From a name to addresses that were looked at.
//!
//! `reqwest` resolves through here and connects to what it is given, so between the look and the connection there is no
//! second lookup that could answer something else.

use crate::{AddressPolicy, OutboundError};
use futures::future::BoxFuture;
use reqwest::dns::{Addrs, Name, Resolving};
use std::{io, net::SocketAddr, sync::Arc};

/// Of one name. A resolver that gives more is not asked for the rest.
const MAX_ADDRESSES: usize = 64;

/// Looks a name up.
pub trait Resolve: Send + Sync + 'static {
    fn resolve(&self, host: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
}

/// The machine's own way.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, host: String, port: u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        Box::pin(
            async move { Ok(tokio::net::lookup_host((host, port)).await?.take(MAX_ADDRESSES).collect()) },
        )
    }
}

/// Gives out addresses only if all of a name are allowed: one that leads to both sides of the wall is an attack.
#[derive(Clone)]
pub(crate) struct Guarded {
    pub(crate) resolve: Arc<dyn Resolve>,
    pub(crate) policy: Arc<AddressPolicy>,
    /// `reqwest` does not tell it; there is a client for each port.
    pub(crate) port: u16,
}

impl Guarded {
    /// The addresses of a name, of which every one is allowed.
    pub(crate) async fn addresses(&self, host: String) -> Result<Vec<SocketAddr>, OutboundError> {
        let unresolved = |problem: String| OutboundError::Resolve { host: host.clone(), problem };
        let addresses = self.resolve.resolve(host.clone(), self.port).await;
        let addresses = addresses.map_err(|error| unresolved(error.to_string()))?;
        if addresses.is_empty() || addresses.len() > MAX_ADDRESSES {
            let count = addresses.len();
            return Err(unresolved(format!("it has {count} addresses; 1 to {MAX_ADDRESSES} are used")));
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
