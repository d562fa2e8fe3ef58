//! PostgreSQL: connections that come back after they were lost, the incarnation of a host, which fences its writes, and the
//! number of a transaction, by which its outcome can be asked for.

mod incarnation;
mod lease;
mod options;
mod schema;
mod suitability;

pub(crate) use incarnation::newest_host;
pub(crate) use lease::{Lease, RENEWAL};
pub(crate) use options::Server;
pub(crate) use schema::Upgrade;

use crate::{
    StoreError,
    error::{is_passing, sql_state},
    hosts::HostNumber,
    sql::{Connection, query_scalar},
};
use incarnation::Incarnation;
use sqlx::{PgConnection, PgPool, Row as _};
use std::time::{Duration, Instant};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

/// Time limit of an attempt to connect.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// The class of the lock of a host.
const LOCK_CLASS: i32 = 0x736b_6570;
/// Time for which a host that starts waits for the lock, unless it stands by.
const LOCK_TIME: Duration = Duration::from_secs(5);
/// Time between two attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// Time between two attempts of a host that stands by.
const STANDBY_PAUSE: Duration = Duration::from_millis(250);

/// The role of a process at a database.
#[derive(Debug)]
enum Role {
    /// The only host.
    Host(Incarnation),
    /// A command that a host may be running beside.
    Beside,
}

/// Takes the lock that one host at a time has, until its connection ends. Returns whether it was free.
async fn take_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let take = "SELECT pg_try_advisory_lock($1, CAST(CAST(to_regnamespace(current_schema()) AS oid) AS int))";
    sqlx::query_scalar(take).bind(LOCK_CLASS).fetch_one(connection).await
}

/// Returns the query for the server's process that has the lock of a host.
fn holder() -> String {
    format!(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
             AND classid = {LOCK_CLASS}
             AND objid = CAST(to_regnamespace(current_schema()) AS oid)
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
}

/// Returns the statement that tells whether a host has its lock.
pub(crate) fn has_host() -> String {
    format!("SELECT EXISTS ({})", holder())
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
    fenced: watch::Sender<bool>,
}

impl Reconnecting {
    /// Connects as the only host of a database, whose tables are created or migrated. A database that another host uses is
    /// an error.
    pub(crate) async fn as_host(server: Server, upgrade: Upgrade) -> Result<Self, StoreError> {
        Self::as_host_when(server, upgrade, |waited| (waited < LOCK_TIME).then_some(LOCK_PAUSE)).await
    }

    /// Connects as the only host of a database once no other host uses it.
    pub(crate) async fn as_standby(server: Server) -> Result<Self, StoreError> {
        let mut stands_by = false;
        loop {
            let connecting = Self::as_host_when(server.clone(), Upgrade::Reversible, |_waited| {
                if !std::mem::replace(&mut stands_by, true) {
                    tracing::info!(database = server.name(), "another host uses the database; standing by");
                }
                Some(STANDBY_PAUSE)
            });
            let connected = connecting.await;
            match connected {
                // The server is away, for example because it is restarted.
                Err(error)
                    if stands_by && (error.is_passing() || matches!(error, StoreError::Connect { .. })) =>
                {
                    tracing::warn!(%error, "the host stands by for a database that is away");
                    sleep(STANDBY_PAUSE * 4).await;
                }
                connected => return connected,
            }
        }
    }

    /// Connects as the only host. `pause` says how long to wait for the next attempt to take the lock, after the time that
    /// the host has waited; `None` gives up.
    async fn as_host_when(
        server: Server,
        upgrade: Upgrade,
        mut pause: impl FnMut(Duration) -> Option<Duration> + Send,
    ) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        let begun = Instant::now();
        // The connection of a host that was killed may live a little longer than the host.
        while !take_lock(&mut connection).await.map_err(StoreError::while_it("took the lock of the host"))? {
            if schema::find(&mut connection).await?.is_usable() {
                match incarnation::end_hanging(&mut connection).await {
                    // A host that hangs in the middle of a transaction is ended by the server.
                    Err(error) if is_passing(&error) => {}
                    ended => ended.map_err(StoreError::while_it("looked for a host that hangs"))?,
                }
            }
            let Some(pause) = pause(begun.elapsed()) else {
                return Err(StoreError::InUse { database: server.name() });
            };
            sleep(pause).await;
        }
        schema::migrate(&mut connection, upgrade).await?;
        let incarnation = Incarnation::register(&mut connection).await?;
        Ok(Self::new(server, Role::Host(incarnation), connection))
    }

    /// Connects to a database that hosts may be using.
    pub(crate) async fn beside(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        schema::check(&mut connection).await?;
        Ok(Self::new(server, Role::Beside, connection))
    }

    /// Takes over a database from a host that counts as dead, although its connection lives.
    #[cfg(any(test, feature = "faults"))]
    pub(crate) async fn after_a_crash(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        let incarnation = Incarnation::register(&mut connection).await?;
        Ok(Self::new(server, Role::Host(incarnation), connection))
    }

    /// Connects as one more host.
    #[cfg(test)]
    pub(crate) async fn as_another_host(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        let incarnation = Incarnation::add(&mut connection).await?;
        Ok(Self::new(server, Role::Host(incarnation), connection))
    }

    fn new(server: Server, role: Role, connection: PgConnection) -> Self {
        let connection = Some(Connection::postgres(connection));
        Reconnecting { server, role, connection, fenced: watch::Sender::new(false) }
    }

    /// Returns connections to the same database for reads.
    pub(crate) fn pool(&self, connections: u32) -> PgPool {
        self.server.pool(connections)
    }

    /// Returns the number of the host; `None` for a command.
    pub(crate) fn host(&self) -> HostNumber {
        match &self.role {
            Role::Host(incarnation) => Some(incarnation.number()),
            Role::Beside => None,
        }
    }

    /// Returns the lease of the host. A command has none.
    pub(crate) fn lease(&self) -> Lease {
        match &self.role {
            Role::Host(incarnation) => incarnation.lease().clone(),
            Role::Beside => Lease::default(),
        }
    }

    /// Renews the lease of a host that has committed nothing for a while, and notices that another one has taken over.
    pub(crate) async fn renew(&mut self) -> Result<(), StoreError> {
        if !matches!(&self.role, Role::Host(incarnation) if incarnation.lease().is_due()) {
            return Ok(());
        }
        let renewed = timeout(CONNECT_TIME, self.renew_now()).await;
        if !matches!(renewed, Ok(Ok(()))) {
            self.connection = None;
        }
        renewed.unwrap_or_else(|_elapsed| {
            Err(StoreError::while_it("renewed its lease")(sqlx::Error::PoolTimedOut))
        })
    }

    async fn renew_now(&mut self) -> Result<(), StoreError> {
        self.get().await?;
        let (Role::Host(incarnation), Some(Connection::Postgres(connection))) =
            (&self.role, &mut self.connection)
        else {
            return Err(StoreError::Closed);
        };
        let renewed =
            incarnation.renew(connection).await.map_err(StoreError::while_it("renewed its lease"))?;
        if renewed { Ok(()) } else { Err(self.fence()) }
    }

    /// Returns a receiver that becomes `true` when another host has taken over the database.
    pub(crate) fn fenced(&self) -> watch::Receiver<bool> {
        self.fenced.subscribe()
    }

    pub(crate) async fn get(&mut self) -> Result<&mut Connection, StoreError> {
        if *self.fenced.borrow() {
            return Err(self.fenced_error());
        }
        if self.connection.is_none() {
            let connection = timeout(CONNECT_TIME, self.reconnect()).await;
            self.connection = Some(connection.unwrap_or_else(|_elapsed| {
                Err(StoreError::while_it("connected")(sqlx::Error::PoolTimedOut))
            })?);
        }
        self.connection.as_mut().ok_or(StoreError::Closed)
    }

    /// Connects again. A host checks that nobody has taken over the database meanwhile.
    async fn reconnect(&mut self) -> Result<Connection, StoreError> {
        let mut connection = self.server.connect_once().await.map_err(StoreError::while_it("connected"))?;
        if let Role::Host(incarnation) = &self.role {
            let checking = || StoreError::while_it("took the lock of the host");
            let is_free = take_lock(&mut connection).await.map_err(checking())?;
            if incarnation.last_written(&mut connection).await.map_err(checking())?.is_none() {
                return Err(self.fence());
            }
            if !is_free {
                // The server has not noticed yet that an earlier connection of this host is gone.
                return Err(StoreError::InUse { database: self.server.name() });
            }
        }
        Ok(Connection::postgres(connection))
    }

    fn fenced_error(&self) -> StoreError {
        StoreError::Fenced { database: self.server.name() }
    }

    /// Ends all writes of this host for good.
    fn fence(&self) -> StoreError {
        self.lease().end();
        self.fenced.send_replace(true);
        self.fenced_error()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Drops a connection that may be unusable.
    pub(crate) fn drop_connection(&mut self) {
        self.connection = None;
    }

    /// Begins a transaction. Fails for good once another host has taken over the database.
    pub(crate) async fn begin(&mut self) -> Result<TransactionId, StoreError> {
        let failed = || StoreError::while_it("started a transaction");
        self.get().await?;
        let Some(Connection::Postgres(connection)) = &mut self.connection else {
            return Err(StoreError::Closed);
        };
        let number = match &mut self.role {
            Role::Host(incarnation) => incarnation.begin(connection).await.map_err(failed())?,
            Role::Beside => {
                // Both statements go in one message.
                let begin = "BEGIN; SELECT CAST(CAST(pg_current_xact_id() AS TEXT) AS BIGINT)";
                let row = sqlx::raw_sql(begin).fetch_one(&mut ***connection).await.map_err(failed())?;
                Some(row.try_get(0).map_err(failed())?)
            }
        };
        number.map(TransactionId).ok_or_else(|| self.fence())
    }

    /// Records that a transaction was committed.
    pub(crate) fn confirm(&mut self, TransactionId(number): TransactionId) {
        if let Role::Host(incarnation) = &mut self.role {
            incarnation.confirm(number);
        }
    }

    /// Returns whether a transaction was committed; `None` if it is still open.
    pub(crate) async fn outcome(
        &mut self,
        TransactionId(number): TransactionId,
    ) -> Result<Option<bool>, StoreError> {
        let failed = || StoreError::while_it("asked for the outcome of a transaction");
        self.get().await?;
        let Some(connection) = &mut self.connection else { return Err(StoreError::Closed) };
        if let Role::Host(incarnation) = &self.role {
            let Connection::Postgres(connection) = connection else { return Err(StoreError::Closed) };
            let written = incarnation.last_written(connection).await.map_err(failed())?;
            return written.map(|written| Some(written >= number)).ok_or_else(|| self.fence());
        }
        let status = query_scalar("SELECT pg_xact_status(CAST(CAST(? AS TEXT) AS xid8))")
            .bind(number)
            .fetch_one(connection)
            .await;
        let status: Option<String> = match status {
            // The server forgot the number in a crash, so nothing of the transaction reached its disk.
            Err(error) if sql_state(&error) == Some("22023") => return Ok(Some(false)),
            status => status.map_err(failed())?,
        };
        Ok(match status.as_deref() {
            Some("committed") => Some(true),
            Some("aborted") => Some(false),
            _ => None,
        })
    }

    /// Closes the connection. A host is gone from then on.
    pub(crate) async fn close(mut self) {
        if let (Role::Host(incarnation), Some(Connection::Postgres(connection))) =
            (&self.role, &mut self.connection)
            && let Err(error) = incarnation.end(connection).await
        {
            tracing::warn!(%error, "cannot record that the host has ended; the next one does it");
        }
        if let Some(connection) = self.connection {
            connection.close().await;
        }
    }
}

/// The number of a transaction: of a host, in the order of its own transactions; of a command, in the order of the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransactionId(i64);
