//! The incarnation of a host: the row of the table `hosts` that one run of a host has, under a number that is never given
//! twice.
//!
//! Each transaction of the host begins with a change of this row, so it is fenced: once the row says that the host is gone,
//! nothing more is written under its number. The row also counts the transactions, which tells whether a commit whose answer
//! was lost was made, and has the time of the last one, which tells whether the host hangs.

use super::{
    lease::{LEASE, Lease},
    locks,
};
use crate::{
    HostVersions, StoreError,
    error::is_contention,
    hosts::{GONE, NOW_MS, SERVES, is_left},
};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _, query_as, query_scalar};
use std::time::Instant;

/// Number of hosts that are gone and stay listed.
const LISTED: i64 = 64;

/// The part of a host in a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member<'a> {
    /// The address at which the other hosts reach it.
    pub(super) url: &'a str,
    pub(super) versions: HostVersions,
}

/// A run of a host.
#[derive(Debug)]
pub(super) struct Incarnation {
    number: i64,
    /// Number of transactions that were begun.
    begun: i64,
    /// Time at which the last one was begun.
    begun_at: Instant,
    /// The last transaction that was committed.
    committed: i64,
    lease: Lease,
}

impl Incarnation {
    /// Registers a host that has the lock of the database for itself, at least for now. Unless it is a `member` of a cluster, every
    /// earlier host is gone from then on, and owns nothing. Beside a member, others that were heard from within a lease remain: all
    /// of them may have lost their connections, because the server was restarted.
    pub(super) async fn register(
        connection: &mut PgConnection,
        member: Option<Member<'_>>,
    ) -> Result<Self, StoreError> {
        let failed = || StoreError::while_it("registered the host");
        let mut transaction = connection.begin().await.map_err(failed())?;
        let mark = format!(
            "UPDATE hosts SET state = $1 WHERE state != $1 AND ($2 OR url = '' OR seen_at_ms < {NOW_MS} - $3)"
        );
        sqlx::query(AssertSqlSafe(mark))
            .bind(GONE)
            .bind(member.is_none())
            .bind(LEASE.as_millis() as i64)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        let forget = format!("DELETE FROM session_owners WHERE {}", is_left("host"));
        sqlx::query(AssertSqlSafe(forget)).execute(&mut *transaction).await.map_err(failed())?;
        if member.is_some() {
            // In a cluster, each turn says whether its host was lost.
            sqlx::raw_sql(
                "UPDATE turns SET runs = FALSE WHERE ended_at_ms IS NULL AND EXISTS (SELECT 1 FROM ended_in_order);
                 DELETE FROM ended_in_order",
            )
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        }
        let host = Self::add(&mut transaction, member).await?;
        transaction.commit().await.map_err(failed())?;
        Ok(host)
    }

    /// Registers a host beside those that there are. A member of a cluster is refused if it cannot work together with one that
    /// lives.
    pub(super) async fn add(
        connection: &mut PgConnection,
        member: Option<Member<'_>>,
    ) -> Result<Self, StoreError> {
        let failed = || StoreError::while_it("registered the host");
        let lease = if member.is_some() { Lease::of_member() } else { Lease::default() };
        let HostVersions { protocol, schema } = member.map_or(HostVersions::OWN, |member| member.versions);
        let begun = Instant::now();
        let insert = format!(
            "INSERT INTO hosts (version, state, written, seen_at_ms, backend, started_at_ms, url, protocol, knows)
             VALUES ($1, $2, 0, {NOW_MS}, pg_backend_pid(), {NOW_MS}, $3, $4, $5) RETURNING number"
        );
        let number: i64 = query_scalar(AssertSqlSafe(insert))
            .bind(env!("CARGO_PKG_VERSION"))
            .bind(SERVES)
            .bind(member.map_or("", |member| member.url))
            .bind(protocol)
            .bind(schema)
            .fetch_one(&mut *connection)
            .await
            .map_err(failed())?;
        // Two hosts that start at the same time both have their rows before they look, so at least one sees the other.
        if let Some(Member { versions, .. }) = member
            && let Err(refused) = check_versions(connection, versions, number).await
        {
            let remove = sqlx::query("DELETE FROM hosts WHERE number = $1").bind(number);
            remove.execute(connection).await.map_err(failed())?;
            return Err(refused);
        }
        sqlx::query("DELETE FROM hosts WHERE number <= $1 AND state = $2")
            .bind(number - LISTED)
            .bind(GONE)
            .execute(connection)
            .await
            .map_err(failed())?;
        lease.renewed(begun);
        Ok(Incarnation { number, begun: 0, begun_at: begun, committed: 0, lease })
    }

    /// Returns the number of the host.
    pub(super) fn number(&self) -> i64 {
        self.number
    }

    pub(super) fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Begins a transaction, and returns its number in the order of this host's transactions; `None` if the host is gone.
    pub(super) async fn begin(&mut self, connection: &mut PgConnection) -> Result<Option<i64>, sqlx::Error> {
        self.begun += 1;
        self.begun_at = Instant::now();
        // Both statements go in one message.
        let begin = format!("BEGIN; {}", self.renewal(self.begun));
        let row = sqlx::raw_sql(AssertSqlSafe(begin)).fetch_optional(&mut *connection).await;
        if row.as_ref().is_err_and(is_contention) {
            // The connection is used for the next attempt.
            sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await?;
        }
        let Some(row) = row? else {
            sqlx::raw_sql("ROLLBACK").execute(connection).await?;
            return Ok(None);
        };
        row.try_get(0).map(Some)
    }

    /// Renews the lease without a transaction. Returns `false` if the host is gone.
    pub(super) async fn renew(&self, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
        let begun = Instant::now();
        let row = sqlx::raw_sql(AssertSqlSafe(self.renewal(self.begun))).fetch_optional(connection).await?;
        if row.is_some() {
            self.lease.renewed(begun);
        }
        Ok(row.is_some())
    }

    fn renewal(&self, written: i64) -> String {
        format!(
            "UPDATE hosts SET written = {written}, seen_at_ms = {NOW_MS}, backend = pg_backend_pid()
             WHERE number = {} AND state != {GONE} RETURNING written",
            self.number
        )
    }

    /// Records that the last transaction was committed, which renewed the lease.
    pub(super) fn confirm(&mut self, transaction: i64) {
        self.committed = self.committed.max(transaction);
        self.lease.renewed(self.begun_at);
    }

    /// Returns the last transaction that the database has; `None` if the host is gone. Waits for a transaction that an
    /// earlier connection of the host has open. A server that lacks a transaction that it has confirmed, such as a standby
    /// that was behind when it became the primary, contradicts what the host remembers, so the host counts as gone.
    pub(super) async fn last_written(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Option<i64>, sqlx::Error> {
        let row: Option<(i64, i64)> =
            query_as("SELECT written, state FROM hosts WHERE number = $1 FOR UPDATE")
                .bind(self.number)
                .fetch_optional(connection)
                .await?;
        let is_known = |(written, state): &(i64, i64)| *state != GONE && *written >= self.committed;
        Ok(row.filter(is_known).map(|(written, _)| written))
    }

    /// Records that the host has ended.
    pub(super) async fn end(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        self.lease.end();
        let end = sqlx::query("UPDATE hosts SET state = $1 WHERE number = $2");
        end.bind(GONE).bind(self.number).execute(connection).await.map(drop)
    }
}

/// Ends the hosts that have not renewed their leases, and their connections, so that the lock of the database becomes free.
/// Waits for the transaction of such a host.
pub(super) async fn end_hanging(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let end = format!(
        "UPDATE hosts SET state = $1 WHERE state != $1 AND seen_at_ms < {NOW_MS} - $2 RETURNING number, backend"
    );
    let ended: Vec<(i64, i64)> = query_as(AssertSqlSafe(end))
        .bind(GONE)
        .bind(LEASE.as_millis() as i64)
        .fetch_all(&mut *connection)
        .await?;
    for (host, backend) in &ended {
        tracing::warn!(host, "a host has not answered for {} s and is replaced", LEASE.as_secs());
        // The process of the server may belong to somebody else by now, unless it has the lock.
        let terminate =
            format!("SELECT pg_terminate_backend(pid) FROM ({}) AS holder WHERE pid = $1", locks::holder());
        sqlx::query(AssertSqlSafe(terminate)).bind(*backend as i32).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Checks that a host of these versions works together with all members of the cluster that may live, besides `own`.
pub(super) async fn check_versions(
    connection: &mut PgConnection,
    versions: HostVersions,
    own: i64,
) -> Result<(), StoreError> {
    let members = format!(
        "SELECT number, version, protocol, knows FROM hosts
         WHERE state != $1 AND url != '' AND seen_at_ms > {NOW_MS} - $2 AND number != $3 ORDER BY number"
    );
    let members: Vec<(i64, String, i64, i64)> = query_as(AssertSqlSafe(members))
        .bind(GONE)
        .bind(LEASE.as_millis() as i64)
        .bind(own)
        .fetch_all(connection)
        .await
        .map_err(StoreError::while_it("read the versions of the other hosts"))?;
    for (host, release, protocol, schema) in members {
        let other = HostVersions { protocol, schema };
        if !versions.work_with(other) {
            let (found, own) = (protocol, versions.protocol);
            return Err(StoreError::VersionsApart { host, release, found, own });
        }
    }
    Ok(())
}

/// Returns whether a member of a cluster was heard from so recently that it may live, even if it has lost its connection.
pub(super) async fn has_recent_member(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let recent = format!(
        "SELECT EXISTS (SELECT 1 FROM hosts WHERE state != $1 AND url != '' AND seen_at_ms > {NOW_MS} - $2)"
    );
    query_scalar(AssertSqlSafe(recent)).bind(GONE).bind(LEASE.as_millis() as i64).fetch_one(connection).await
}

/// Returns the number and the version of the host that started last and is not gone, and the milliseconds since it was last
/// heard from.
pub(crate) async fn newest_host(
    connection: &mut PgConnection,
) -> Result<Option<(i64, String, i64)>, sqlx::Error> {
    let newest = format!(
        "SELECT number, version, {NOW_MS} - seen_at_ms FROM hosts WHERE state != $1 ORDER BY number DESC LIMIT 1"
    );
    query_as(AssertSqlSafe(newest)).bind(GONE).fetch_optional(connection).await
}
