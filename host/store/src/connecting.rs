//! Stores in PostgreSQL.

use crate::{
    Store, StoreError,
    postgres::{Reconnecting, Server, Upgrade},
    sql::Pool,
    sqlite::{CHUNK_TIME, MAX_CHUNKED_WRITES},
    writer::{WriteConnection, Writer},
};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Number of connections that read, besides the one that writes and the one that reads API keys.
const READERS: u32 = 6;
/// Maximum number of connections that a host opens to a PostgreSQL server.
pub const MAX_CONNECTIONS: u32 = READERS + 2;

impl Store {
    /// Connects to a PostgreSQL database as its only host, and creates or migrates its tables. Every write is made on
    /// a connection that holds the lock of the host, so that a host that lost it writes nothing.
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

    /// Connects to a database that hosts may be using. Tables of another version are refused and stay as they are.
    pub async fn connect_beside(url: &str) -> Result<Store, StoreError> {
        Self::connect_beside_to(Server::new(url)?).await
    }

    pub(crate) async fn connect_to(server: Server) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::as_host(server, Upgrade::Reversible).await?))
    }

    pub(crate) async fn connect_beside_to(server: Server) -> Result<Store, StoreError> {
        Ok(Self::on(Reconnecting::beside(server).await?))
    }

    fn on(connection: Reconnecting) -> Store {
        Store {
            readers: Pool::Postgres(connection.pool(READERS)),
            key_reader: Pool::Postgres(connection.pool(1)),
            writer: Writer::start(WriteConnection::Postgres(Box::new(connection))),
            chunked_writes: Arc::new(Semaphore::new(MAX_CHUNKED_WRITES)),
            chunk_time: CHUNK_TIME,
            path: None,
        }
    }
}
