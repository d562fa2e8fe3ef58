//! PostgreSQL: connections that come back after they were lost, and the number of a transaction, by which its outcome
//! can be asked for.

mod options;
mod schema;
mod suitability;

pub(crate) use options::Server;
pub(crate) use schema::Upgrade;

use crate::{
    StoreError,
    error::sql_state,
    sql::{Connection, query_scalar},
};
use sqlx::{PgConnection, PgPool, Row as _};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// Time limit of an attempt to connect.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// The class of the lock of a host.
const LOCK_CLASS: i32 = 0x736b_6570;
/// Time for which a host that starts waits for the lock.
const LOCK_TIME: Duration = Duration::from_secs(5);

/// The role of a process at a database.
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

/// Returns the statement that checks whether a host has its lock.
pub(crate) fn has_host() -> String {
    format!(
        "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
             AND classid = {LOCK_CLASS}
             AND objid = CAST(to_regnamespace(current_schema()) AS oid)
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
    )
}

/// Connects to a database only to look at it. A database that no host can use is an error.
pub(crate) async fn inspect(url: &str) -> Result<(PgConnection, schema::Found), StoreError> {
    let server = Server::new(url)?;
    let mut connection = server.connect().await?;
    suitability::check(&server, &mut connection).await?;
    let found = schema::find(&mut connection).await?;
    Ok((connection, found))
}

/// A connection that is opened again when it is needed.
pub(crate) struct Reconnecting {
    server: Server,
    role: Role,
    connection: Option<Connection>,
}

impl Reconnecting {
    /// Connects as the only host of a database, whose tables are created or migrated.
    pub(crate) async fn as_host(server: Server, upgrade: Upgrade) -> Result<Self, StoreError> {
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
        schema::migrate(&mut connection, upgrade).await?;
        Ok(Reconnecting { server, role: Role::Host, connection: Some(Connection::postgres(connection)) })
    }

    /// Connects to a database that hosts may be using.
    pub(crate) async fn beside(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        schema::check(&mut connection).await?;
        Ok(Reconnecting { server, role: Role::Beside, connection: Some(Connection::postgres(connection)) })
    }

    /// Returns connections to the same database for reads.
    pub(crate) fn pool(&self, connections: u32) -> PgPool {
        self.server.pool(connections)
    }

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
