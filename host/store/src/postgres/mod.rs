//! PostgreSQL: connections that come back after they were lost, and the number of a transaction, by which its outcome
//! can be asked for.

mod options;
mod schema;
mod suitability;

pub(crate) use options::Server;

use crate::{
    Store, StoreError,
    error::sql_state,
    sql::{Connection, Pool, query_scalar},
    sqlite::{CHUNK_TIME, MAX_CHUNKED_WRITES},
    writer::{WriteConnection, Writer},
};
use sqlx::{PgConnection, Row as _};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};

/// Time limit of an attempt to connect.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Number of connections that read, besides the one that writes and the one that reads API keys.
const READERS: u32 = 6;
/// The class of the lock of a host.
const LOCK_CLASS: i32 = 0x736b_6570;
/// Time for which a host that starts waits for the lock.
const LOCK_TIME: Duration = Duration::from_secs(5);

impl Store {
    /// Connects to a PostgreSQL database as its only host, and creates or migrates its tables. Every write is made on
    /// a connection that holds the lock of the host, so that a host that lost it writes nothing.
    pub async fn connect(url: &str) -> Result<Store, StoreError> {
        Self::connect_to(Server::new(url)?).await
    }

    pub(crate) async fn connect_to(server: Server) -> Result<Store, StoreError> {
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        let begun = Instant::now();
        // The connection of a host that was killed may live a little longer than the host.
        while !take_lock(&mut connection).await.map_err(StoreError::while_it("took the lock of the host"))? {
            if begun.elapsed() >= LOCK_TIME {
                return Err(StoreError::InUse { database: server.name() });
            }
            sleep(Duration::from_millis(50)).await;
        }
        schema::migrate(&mut connection).await?;
        Self::on(server, connection, Role::Host).await
    }

    /// Connects to a database that hosts may be using. Tables of another version are refused and stay as they are.
    pub async fn connect_beside(url: &str) -> Result<Store, StoreError> {
        Self::connect_beside_to(Server::new(url)?).await
    }

    pub(crate) async fn connect_beside_to(server: Server) -> Result<Store, StoreError> {
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        schema::check(&mut connection).await?;
        Self::on(server, connection, Role::Beside).await
    }

    async fn on(server: Server, connection: PgConnection, role: Role) -> Result<Store, StoreError> {
        let readers = server.pool(READERS);
        let key_reader = server.pool(1);
        let connection = Reconnecting { server, role, connection: Some(Connection::postgres(connection)) };
        Ok(Store {
            readers: Pool::Postgres(readers),
            key_reader: Pool::Postgres(key_reader),
            writer: Writer::start(WriteConnection::Postgres(connection)),
            chunked_writes: Arc::new(Semaphore::new(MAX_CHUNKED_WRITES)),
            chunk_time: CHUNK_TIME,
            path: None,
        })
    }
}

/// The part that a process plays for a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The only host.
    Host,
    /// A command that a host may be running beside.
    Beside,
}

/// Takes the lock that one host at a time has, until its connection ends. Returns whether it was free.
async fn take_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let take = "SELECT pg_try_advisory_lock($1, CAST(CAST(to_regnamespace(current_schema()) AS oid) AS int))";
    sqlx::query_scalar(take).bind(LOCK_CLASS).fetch_one(connection).await
}

/// A connection that is made again when it is needed.
pub(crate) struct Reconnecting {
    server: Server,
    role: Role,
    connection: Option<Connection>,
}

impl Reconnecting {
    pub(crate) async fn get(&mut self) -> Result<&mut Connection, StoreError> {
        if self.connection.is_none() {
            let connection = timeout(CONNECT_TIME, self.server.connect_once()).await;
            let connection = connection.unwrap_or(Err(sqlx::Error::PoolTimedOut));
            let mut connection = connection.map_err(StoreError::while_it("connected"))?;
            let taking = StoreError::while_it("took the lock of the host");
            if self.role == Role::Host && !take_lock(&mut connection).await.map_err(taking)? {
                return Err(StoreError::InUse { database: self.server.name() });
            }
            self.connection = Some(Connection::postgres(connection));
        }
        self.connection.as_mut().ok_or(StoreError::Closed)
    }

    /// Drops a connection that may be unusable.
    pub(crate) fn drop_connection(&mut self) {
        self.connection = None;
    }

    /// Returns whether a transaction was committed; `None` if it is still open.
    pub(crate) async fn outcome(
        &mut self,
        TransactionId(id): TransactionId,
    ) -> Result<Option<bool>, StoreError> {
        let status = query_scalar("SELECT pg_xact_status(CAST(CAST(? AS TEXT) AS xid8))")
            .bind(id)
            .fetch_one(self.get().await?)
            .await;
        let status: Option<String> = match status {
            // The server forgot the number in a crash, so nothing of the transaction reached its disk.
            Err(error) if sql_state(&error) == Some("22023") => return Ok(Some(false)),
            status => status.map_err(StoreError::while_it("asked for the outcome of a transaction"))?,
        };
        Ok(match status.as_deref() {
            Some("committed") => Some(true),
            Some("aborted") => Some(false),
            _ => None,
        })
    }

    pub(crate) async fn close(self) {
        if let Some(connection) = self.connection {
            connection.close().await;
        }
    }
}

/// The number of a transaction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransactionId(i64);

impl TransactionId {
    /// Begins a transaction.
    pub(crate) async fn begin(connection: &mut PgConnection) -> Result<TransactionId, sqlx::Error> {
        // Both statements go in one message.
        let begin = "BEGIN; SELECT CAST(CAST(pg_current_xact_id() AS TEXT) AS BIGINT)";
        let row = sqlx::raw_sql(begin).fetch_one(connection).await?;
        Ok(TransactionId(row.try_get(0)?))
    }
}
