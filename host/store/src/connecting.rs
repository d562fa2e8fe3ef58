//! Stores in PostgreSQL.

use crate::{
    HostVersions, Store, StoreError,
    line_counts::LineCounts,
    membership::Membership,
    postgres::{Reconnecting, Server, Upgrade},
    sql::Pool,
    sqlite::{CHUNK_TIME, Durability, MAX_CHUNKED_WRITES},
    writer::{WriteConnection, Writer},
};
use std::{sync::Arc, time::Duration};
use tokio::sync::Semaphore;

/// Number of connections that read, besides the one that writes and the one that reads API keys.
const READERS: u32 = 6;
/// Maximum number of connections that a host opens to a PostgreSQL server. Two of them are those of a host of a cluster: one listens,
/// and one reads which hosts there are and what was changed.
pub const MAX_CONNECTIONS: u32 = READERS + 4;

/// Interval at which a host that is not certain of its lease looks at it.
const CERTAINTY_INTERVAL: Duration = Duration::from_millis(100);

impl Store {
    /// Connects to a PostgreSQL database as its only host, and creates or migrates its tables. Every write is made on
    /// a connection that holds the lock of the host, and in a transaction that checks that no other host has had it
    /// in the meantime.
    ///
    /// Tables of an older version, whose hosts could not use them after the change, are refused with
    /// [`StoreError::NoWayBack`]; [`Store::connect_to_migrate`] changes them.
    pub async fn connect(url: &str) -> Result<Store, StoreError> {
        Self::connect_to(Server::new(url)?).await
    }

    /// Connects like [`Store::connect`], and migrates tables of every older version.
    pub async fn connect_to_migrate(url: &str) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::as_host(Server::new(url)?, Upgrade::Any).await?))
    }

    /// Connects like [`Store::connect`], but waits as long as another host uses the database, and takes over from one that hangs.
    pub async fn connect_as_standby(url: &str) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::as_standby(Server::new(url)?).await?))
    }

    /// Connects to a PostgreSQL database as one of several hosts, which the others reach at `host_url`. The first of them creates
    /// or migrates the tables as [`Store::connect`] does; later ones check that they can use the tables. A host that has the
    /// database for itself, and a migration, exclude the hosts of a cluster and are excluded by them. Tables of the version before
    /// are extended while its hosts use them. A host whose version is too far from that of one that lives is refused with
    /// [`StoreError::VersionsApart`].
    pub async fn connect_to_cluster(url: &str, host_url: &str) -> Result<Store, StoreError> {
        Self::join(Server::new(url)?, host_url).await
    }

    /// Connects like [`Store::connect`], or with an address of this host like [`Store::connect_to_cluster`], to measure how much time
    /// the server's disk takes. With [`Durability::Process`], commits do not wait for it, so after a crash of the server a running
    /// host would continue from commits that are lost.
    pub async fn connect_to_measure(
        url: &str,
        host_url: Option<&str>,
        durability: Durability,
    ) -> Result<Store, StoreError> {
        Self::measured(Server::new(url)?, host_url, durability).await
    }

    pub(crate) async fn measured(
        server: Server,
        host_url: Option<&str>,
        durability: Durability,
    ) -> Result<Store, StoreError> {
        let server = match durability {
            Durability::Process => server.without_waiting(),
            Durability::Power => server,
        };
        match host_url {
            Some(host_url) => Self::join(server, host_url).await,
            None => Self::connect_to(server).await,
        }
    }

    /// Connects to a database that hosts may be using. Tables of another version are refused and stay as they are.
    pub async fn connect_beside(url: &str) -> Result<Store, StoreError> {
        Self::connect_beside_to(Server::new(url)?).await
    }

    /// Resolves when another host has taken over the database. What this host remembers is no longer true then, and none of
    /// its writes succeeds.
    pub async fn until_fenced(&self) {
        if let Some(fenced) = &self.fenced
            && fenced.clone().wait_for(|fenced| *fenced).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }

    /// Waits until no other host can have taken over the database, which is so at once unless this host hung or was cut off.
    /// What has an effect outside and is not written first has to wait for this. If another host has taken over, it never
    /// resolves.
    pub async fn until_certain(&self) {
        while self.lease.as_ref().is_some_and(|lease| !lease.is_certain()) {
            tokio::time::sleep(CERTAINTY_INTERVAL).await;
        }
    }

    pub(crate) async fn connect_to(server: Server) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::as_host(server, Upgrade::Reversible).await?))
    }

    pub(crate) async fn join(server: Server, host_url: &str) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::as_member(server, host_url, HostVersions::OWN).await?))
    }

    pub(crate) async fn connect_beside_to(server: Server) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::beside(server).await?))
    }

    pub(crate) fn on(connection: Reconnecting) -> Store {
        Store {
            fenced: Some(connection.fenced()),
            lease: connection.host().is_some().then(|| connection.lease()),
            host: connection.host(),
            membership: connection
                .is_member()
                .then(|| Arc::new(Membership::new(connection.pool(1), connection.pool(1)))),
            readers: Pool::Postgres(connection.pool(READERS)),
            key_reader: Pool::Postgres(connection.pool(1)),
            writer: Writer::start(WriteConnection::Postgres(Box::new(connection))),
            chunked_writes: Arc::new(Semaphore::new(MAX_CHUNKED_WRITES)),
            chunk_time: CHUNK_TIME,
            line_counts: LineCounts::default(),
            path: None,
        }
    }
}
