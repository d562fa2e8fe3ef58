//! The ways to and from a host: proxies in front of it and between it and its database, whose connections can be cut.

use anyhow::Result;

use super::super::proxy::{Proxy, at, server_of};

/// A kind of connections of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The connections of the host to its database.
    Database,
    /// The connections of the other hosts to the host.
    Peers,
}

/// The proxies of one place in the cluster, which stay the same for all hosts that run there.
pub struct Ways {
    /// `None` if the database is not reached through TCP.
    database: Option<Proxy>,
    peers: Proxy,
}

impl Ways {
    /// Starts the proxies of a place, whose hosts use this database.
    pub async fn new(database: &str) -> Result<Self> {
        let database = match server_of(database) {
            Some(server) => Some(Proxy::start(server).await?),
            None => None,
        };
        // It is aimed at each host that starts.
        Ok(Self { database, peers: Proxy::start("127.0.0.1:9".to_owned()).await? })
    }

    /// Returns a proxy; `None` for that of a database that is not reached through TCP.
    pub fn get(&self, way: Way) -> Option<&Proxy> {
        match way {
            Way::Database => self.database.as_ref(),
            Way::Peers => Some(&self.peers),
        }
    }

    /// Returns the address of the database as the hosts of the place use it.
    pub fn to_database(&self, database: &str) -> Result<String> {
        match &self.database {
            Some(proxy) => at(database, proxy.address),
            None => Ok(database.to_owned()),
        }
    }

    /// Returns the address at which the other hosts reach a host that listens on this address.
    pub fn to_host(&self, listen: &str) -> String {
        self.peers.aim(listen.to_owned());
        format!("http://{}", self.peers.address)
    }
}
