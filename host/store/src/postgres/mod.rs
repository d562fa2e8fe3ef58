//! PostgreSQL: connections that come back after they were lost, the incarnation of a host, which fences its writes, and the
//! number of a transaction, by which its outcome can be asked for.

mod incarnation;
mod lease;
mod locks;
mod options;
mod schema;
mod suitability;

pub(crate) use incarnation::newest_host;
pub(crate) use lease::Lease;
pub(crate) use locks::{has_host, holder_of_member, take_common};
pub(crate) use options::Server;
pub(crate) use schema::Upgrade;

use crate::{
    HostVersions, StoreError,
    error::{is_passing, sql_state},
    hosts::HostNumber,
    sql::{Connection, missing, query_scalar},
};
use incarnation::{Incarnation, Member};
use sqlx::{PgConnection, PgPool, Row as _};
use std::time::{Duration, Instant};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

/// Time limit of an attempt to connect, and of what waits at most for the row of the host: a renewal and the begin of a transaction.
pub(crate) const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Time for which a host that starts waits for the lock, unless it stands by.
const LOCK_TIME: Duration = Duration::from_secs(5);
/// Time between two attempts to take the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// Time between two attempts of a host that stands by.
const STANDBY_PAUSE: Duration = Duration::from_millis(250);
/// Time between two attempts of a member to connect again, which others would soon count as dead.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// The settings of the writing connection of a member, or of a command. Others wait for the rows and for the common lock of one that
/// is stopped in the middle of a transaction, so the server ends it sooner than that of a host alone. And a member that waits for
/// a lock renews no lease, so it gives up, renews it and tries again.
const IMPATIENT: &str = "SET idle_in_transaction_session_timeout = '3s'; SET lock_timeout = '3s'";
/// Times after the last renewal by which others count a host as dead: one without a connection, and any.
pub(crate) const SILENCE: Duration = lease::SILENCE;
pub(crate) const LEASE: Duration = lease::LEASE;

/// The role of a process at a database.
#[derive(Debug)]
enum Role {
    /// The only host.
    Host(Incarnation),
    /// One of several hosts.
    Member(Incarnation),
    /// A command that a host may be running beside.
    Beside,
}

impl Role {
    fn incarnation(&self) -> Option<&Incarnation> {
        match self {
            Role::Host(incarnation) | Role::Member(incarnation) => Some(incarnation),
            Role::Beside => None,
        }
    }

    fn incarnation_mut(&mut self) -> Option<&mut Incarnation> {
        match self {
            Role::Host(incarnation) | Role::Member(incarnation) => Some(incarnation),
            Role::Beside => None,
        }
    }
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
        while !take_alone(&mut connection).await? {
            end_hanging(&mut connection).await?;
            let Some(pause) = pause(begun.elapsed()) else {
                return Err(StoreError::InUse { database: server.name() });
            };
            sleep(pause).await;
        }
        schema::migrate(&mut connection, upgrade).await?;
        let incarnation = Incarnation::register(&mut connection, None).await?;
        Ok(Self::new(server, Role::Host(incarnation), connection))
    }

    /// Connects as one of several hosts, which is reached at `url`. The first one creates or migrates the tables. Others extend
    /// those of an older version if its hosts can use them afterwards; otherwise the tables must fit. A host whose `versions`
    /// are too far from those of one that lives is refused.
    pub(crate) async fn as_member(
        server: Server,
        url: &str,
        versions: HostVersions,
    ) -> Result<Self, StoreError> {
        let member = Member { url, versions };
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        let locking = || StoreError::while_it("took the lock of the host");
        let begun = Instant::now();
        let incarnation = loop {
            if let Some(incarnation) = join(&mut connection, member).await? {
                break incarnation;
            }
            end_hanging(&mut connection).await?;
            // Hosts that start together wait for the one that creates the tables.
            let is_late = begun.elapsed() >= LOCK_TIME;
            if is_late && !locks::is_migrating(&mut connection).await.map_err(locking())? {
                return Err(StoreError::InUse { database: server.name() });
            }
            sleep(LOCK_PAUSE).await;
        };
        locks::take_own(&mut connection, incarnation.number()).await.map_err(locking())?;
        be_impatient(&mut connection).await?;
        Ok(Self::new(server, Role::Member(incarnation), connection))
    }

    /// Connects to a database that hosts may be using.
    pub(crate) async fn beside(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        suitability::check(&server, &mut connection).await?;
        schema::check(&mut connection).await?;
        be_impatient(&mut connection).await?;
        Ok(Self::new(server, Role::Beside, connection))
    }

    /// Takes over a database from a host that counts as dead, although its connection lives.
    #[cfg(any(test, feature = "faults"))]
    pub(crate) async fn after_a_crash(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        let incarnation = Incarnation::register(&mut connection, None).await?;
        Ok(Self::new(server, Role::Host(incarnation), connection))
    }

    /// Connects as one more host.
    #[cfg(test)]
    pub(crate) async fn as_another_host(server: Server) -> Result<Self, StoreError> {
        let mut connection = server.connect().await?;
        let incarnation = Incarnation::add(&mut connection, None).await?;
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
        self.role.incarnation().map(Incarnation::number)
    }

    /// Returns whether the host is one of several.
    pub(crate) fn is_member(&self) -> bool {
        matches!(self.role, Role::Member(_))
    }

    /// Returns the lease of the host. A command has none.
    pub(crate) fn lease(&self) -> Lease {
        self.role.incarnation().map_or_else(Lease::default, |incarnation| incarnation.lease().clone())
    }

    /// Returns the time without a transaction after which [`Reconnecting::renew`] is to be called.
    pub(crate) fn renewal(&self) -> Duration {
        match &self.role {
            Role::Member(_) if self.connection.is_none() => RECONNECT_PAUSE,
            _ => self.lease().renewal(),
        }
    }

    /// Renews the lease of a host that has committed nothing for a while, and notices that another one has taken over.
    pub(crate) async fn renew(&mut self) -> Result<(), StoreError> {
        if !self.role.incarnation().is_some_and(|incarnation| incarnation.lease().is_due()) {
            return Ok(());
        }
        let renewed = timeout(CONNECT_TIME, self.renew_now()).await;
        match &renewed {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.is_contention() => {}
            _ => self.connection = None,
        }
        renewed.unwrap_or_else(|_elapsed| {
            Err(StoreError::while_it("renewed its lease")(sqlx::Error::PoolTimedOut))
        })
    }

    async fn renew_now(&mut self) -> Result<(), StoreError> {
        self.get().await?;
        let connection = self.connection.as_mut().and_then(Connection::postgres_mut);
        let (Some(incarnation), Some(connection)) = (self.role.incarnation(), connection) else {
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
        if !matches!(self.role, Role::Host(_)) {
            be_impatient(&mut connection).await?;
        }
        if let Some(incarnation) = self.role.incarnation() {
            let checking = || StoreError::while_it("took the lock of the host");
            let is_free = match self.is_member() {
                true => take_again(&mut connection, incarnation.number()).await.map_err(checking())?,
                false => locks::take(&mut connection).await.map_err(checking())?,
            };
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
        let Some(connection) = self.connection.as_mut().and_then(Connection::postgres_mut) else {
            return Err(StoreError::Closed);
        };
        let number = match self.role.incarnation_mut() {
            Some(incarnation) => {
                // A connection that was lost without a sign shows here.
                let begun = timeout(CONNECT_TIME, incarnation.begin(connection)).await;
                begun.unwrap_or_else(|_elapsed| Err(missing())).map_err(failed())?
            }
            None => {
                // Both statements go in one message.
                let begin = "BEGIN; SELECT CAST(CAST(pg_current_xact_id() AS TEXT) AS BIGINT)";
                let row = sqlx::raw_sql(begin).fetch_one(connection).await.map_err(failed())?;
                Some(row.try_get(0).map_err(failed())?)
            }
        };
        number.map(TransactionId).ok_or_else(|| self.fence())
    }

    /// Records that a transaction was committed.
    pub(crate) fn confirm(&mut self, TransactionId(number): TransactionId) {
        if let Some(incarnation) = self.role.incarnation_mut() {
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
        if let Some(incarnation) = self.role.incarnation() {
            let Some(connection) = connection.postgres_mut() else { return Err(StoreError::Closed) };
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
        if let Some(incarnation) = self.role.incarnation()
            && let Some(connection) = self.connection.as_mut().and_then(Connection::postgres_mut)
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

/// Takes the lock of the schema for a host alone. Returns `false` while another host has it, and while a member of a cluster may live
/// that has only lost its connection.
async fn take_alone(connection: &mut PgConnection) -> Result<bool, StoreError> {
    let locking = || StoreError::while_it("took the lock of the host");
    if !locks::take(connection).await.map_err(locking())? {
        return Ok(false);
    }
    let is_awaited = schema::find(connection).await?.is_usable()
        && incarnation::has_recent_member(connection).await.map_err(locking())?;
    if is_awaited {
        locks::stop_being_alone(connection).await.map_err(locking())?;
    }
    Ok(!is_awaited)
}

async fn be_impatient(connection: &mut PgConnection) -> Result<(), StoreError> {
    let set = sqlx::raw_sql(IMPATIENT).execute(connection).await;
    set.map(drop).map_err(StoreError::while_it("connected"))
}

/// Registers a member. Returns `None` while a host has the database for itself.
async fn join(connection: &mut PgConnection, member: Member<'_>) -> Result<Option<Incarnation>, StoreError> {
    let locking = || StoreError::while_it("took the lock of the host");
    if locks::take(connection).await.map_err(locking())? {
        // Nobody else is connected now. Members that have just lost their connections come back.
        schema::migrate(connection, Upgrade::Reversible).await?;
        let incarnation = Incarnation::register(connection, Some(member)).await?;
        // Its own exclusive lock is not in the way of its share, so the schema is locked without a gap.
        locks::share(connection).await.map_err(locking())?;
        locks::stop_being_alone(connection).await.map_err(locking())?;
        return Ok(Some(incarnation));
    }
    if !locks::share(connection).await.map_err(locking())? {
        return Ok(None);
    }
    let found = schema::find(connection).await?;
    if found.has_versions() {
        incarnation::check_versions(connection, member.versions, 0).await?;
    }
    if found.may_be_extended() {
        // Whoever waits behind the change of a table waits for what this waits for.
        be_impatient(connection).await?;
        tracing::info!("extending the tables of the database, which hosts of the version before use, too");
        schema::migrate(connection, Upgrade::Reversible).await?;
    }
    schema::check(connection).await?;
    Incarnation::add(connection, Some(member)).await.map(Some)
}

/// Takes the locks of a member on a new connection. Returns whether they were free. An earlier connection of this member that
/// still has one, although it is lost, is ended: nobody else has the lock of its number.
async fn take_again(connection: &mut PgConnection, number: i64) -> Result<bool, sqlx::Error> {
    if !locks::share(connection).await? {
        return Ok(false);
    }
    if locks::take_own(connection, number).await? {
        return Ok(true);
    }
    let end = format!("SELECT pg_terminate_backend(pid) FROM ({}) AS holder", holder_of_member("$1"));
    sqlx::query(sqlx::AssertSqlSafe(end)).bind(number).execute(connection).await?;
    Ok(false)
}

/// Ends hosts that hang, so that the lock of the database becomes free.
async fn end_hanging(connection: &mut PgConnection) -> Result<(), StoreError> {
    if !schema::find(connection).await?.is_usable() {
        return Ok(());
    }
    match incarnation::end_hanging(connection).await {
        // A host that hangs in the middle of a transaction is ended by the server.
        Err(error) if is_passing(&error) => Ok(()),
        ended => ended.map_err(StoreError::while_it("looked for a host that hangs")),
    }
}
