//! The ways to and from a host: proxies in front of it and between it and its database, whose connections can be cut.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use reqwest::Url;

use super::proxy::Proxy;

const POSTGRES_PORT: u16 = 5432;

/// The connections of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Those of the host to its database.
    Database,
    /// Those of the other hosts to it.
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

/// Returns the server of a database as HOST:PORT. `None` if it is reached through a socket of the machine, or under a name that
/// its certificate has to have.
fn server_of(database: &str) -> Option<String> {
    let url = Url::parse(database).ok()?;
    let elsewhere = url.query_pairs().any(|(name, value)| {
        matches!(&*name, "host" | "hostaddr" | "port") || (name == "sslmode" && value == "verify-full")
    });
    let host = url.host_str().filter(|host| !elsewhere && !host.is_empty() && !host.contains(','))?;
    Some(format!("{host}:{}", url.port().unwrap_or(POSTGRES_PORT)))
}

/// Returns the address of the same database at another server.
fn at(database: &str, server: SocketAddr) -> Result<String> {
    let mut url = Url::parse(database).context("the address of the database is not valid")?;
    let host = server.ip().to_string();
    if url.set_host(Some(&host)).is_err() || url.set_port(Some(server.port())).is_err() {
        bail!("the address of the database has no host");
    }
    Ok(url.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_a_database_is_exchanged() {
        let server: SocketAddr = "127.0.0.1:7".parse().expect("an address");
        for (database, to, then) in [
            ("postgres://me:p%40@db.test/x?a=b", "db.test:5432", "postgres://me:p%40@127.0.0.1:7/x?a=b"),
            ("postgresql://127.0.0.1:5433/x", "127.0.0.1:5433", "postgresql://127.0.0.1:7/x"),
            ("postgres://me@[::1]:6000/x", "[::1]:6000", "postgres://me@127.0.0.1:7/x"),
        ] {
            assert_eq!(server_of(database).as_deref(), Some(to));
            assert_eq!(at(database, server).expect("it has a host"), then);
        }
    }

    #[test]
    fn a_database_behind_a_socket_or_under_a_checked_name_has_no_proxy() {
        for database in [
            "postgres://me@localhost:5432/x?host=/run/postgresql",
            "postgres:///x?host=/run/postgresql",
            "postgres://me@db.example/x?sslmode=verify-full",
        ] {
            assert_eq!(server_of(database), None, "{database}");
        }
    }
}
