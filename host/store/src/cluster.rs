//! The hosts of a cluster: which ones exist, and which ones are dead.
//!
//! A host counts as dead when the others have not heard from it for a while: soon if its connection is gone too, later if it hangs.
//! Any host that notices this marks its row as gone, after which it writes nothing more (see `postgres`). A row whose host
//! has a transaction open is locked, and left alone until the transaction has ended. A host that has itself been away
//! declares no other one dead (see `membership`): after a restart of the server all hosts have lost their connections, and each of them finds
//! the others silent.

use crate::{
    HostVersions, Store, StoreError,
    hosts::{DRAINS, GONE, NOW_MS, SERVES},
    membership::{Membership, SignOfLife},
    notices::{NoticeKind, Notices},
    postgres::{CONNECT_TIME, LEASE, SILENCE, holder_of_member},
    sql::{AssertSqlSafe, Connection, Dialect, Pool, Row, query, query_as, query_scalar},
};
use std::time::Instant;

/// Age of this host's connection from which on it may declare others dead, which may have lost theirs at the same time. It
/// is longer than an attempt to connect takes.
const SETTLED: &str = "interval '6 seconds'";
const _: () = assert!(CONNECT_TIME.as_secs() < 6, "others have had the time to connect again");

/// The state of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostState {
    Serving,
    /// The host gives its sessions to others, and ends after that.
    Draining,
    Gone,
}

/// A host of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRow {
    /// Its number, which no later host gets.
    pub number: i64,
    /// The address at which other hosts reach it.
    pub url: String,
    pub version: String,
    pub state: HostState,
    /// The host's account of itself, as JSON that has no meaning here.
    pub facts: String,
    pub started_at_ms: u64,
    /// Time since it was last heard from.
    pub seen_ms_ago: u64,
    /// Number of sessions that it owns.
    pub sessions: u64,
    pub versions: HostVersions,
}

impl HostRow {
    /// Returns the time for which the host may still work without a sign of life, after which others take over what it has.
    pub fn lease_left_ms(&self) -> u64 {
        u64::try_from(LEASE.as_millis()).unwrap_or(u64::MAX).saturating_sub(self.seen_ms_ago)
    }
}

impl Store {
    /// Returns whether this is one of several hosts that use the database.
    pub fn is_clustered(&self) -> bool {
        self.membership.is_some()
    }

    /// Returns the number of this host, which no other one gets. The only host of a file has none.
    pub fn host_number(&self) -> Option<i64> {
        self.host
    }

    /// Renews the lease of this host, stores its facts and its state, and marks dead hosts as gone. Returns the numbers of those
    /// that this call has marked. It is called every half second; a host that calls it less often than every second marks
    /// only hosts that hang, and one that calls it less often than every five seconds marks none. Without a cluster it does nothing.
    pub async fn meet_hosts(&self, facts: &str, is_draining: bool) -> Result<Vec<i64>, StoreError> {
        let (Some(membership), Some(host)) = (&self.membership, self.host) else { return Ok(Vec::new()) };
        let begun = Instant::now();
        let dead = membership.judge(begun, other_hosts(membership, host).await?);
        let state = if is_draining { DRAINS } else { SERVES };
        let data = (host, state, facts.to_owned(), dead);
        let gone = self
            .write(data, |connection, (host, state, facts, dead)| {
                Box::pin(meet(connection, *host, *state, facts, dead))
            })
            .await?;
        membership.has_met();
        Ok(gone)
    }

    /// Returns all hosts that are not gone, by number, this one included. A file lists none.
    pub async fn live_hosts(&self) -> Result<Vec<HostRow>, StoreError> {
        let sessions = "(SELECT COUNT(*) FROM session_owners WHERE host = number)";
        hosts_from(&self.readers, sessions).await
    }

    /// Returns the same hosts without the numbers of their sessions, which take long to count. In a cluster, this does not wait for
    /// other reads.
    pub async fn members(&self) -> Result<Vec<HostRow>, StoreError> {
        let from = self.membership.as_ref().map_or(&self.readers, |membership| &membership.meeting);
        hosts_from(from, "CAST(0 AS BIGINT)").await
    }

    /// Returns the notices of changes that other hosts made; `None` without a cluster.
    pub fn notices(&self) -> Option<Notices> {
        let membership = self.membership.as_ref()?;
        Some(Notices::new(membership.meeting.clone(), membership.listening.clone()))
    }

    /// Returns the version of what a kind of notices is about, which grows with every change. Without a cluster it may be any.
    pub async fn notice_version(&self, kind: NoticeKind) -> Result<i64, StoreError> {
        let version: Option<i64> = query_scalar("SELECT version FROM notices WHERE kind = ?")
            .bind(kind.as_str())
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read whether something was changed"))?;
        Ok(version.unwrap_or(0))
    }
}

/// Returns the hosts besides this one that are not gone, with their last signs of life.
async fn other_hosts(membership: &Membership, host: i64) -> Result<Vec<SignOfLife>, StoreError> {
    let sql = format!(
        "SELECT number, seen_at_ms, seen_at_ms < {NOW_MS} - ?3,
             CASE WHEN seen_at_ms < {NOW_MS} - ?4 THEN NOT EXISTS ({}) ELSE FALSE END
         FROM hosts WHERE state != ?1 AND number != ?2",
        holder_of_member("hosts.number")
    );
    let hosts: Vec<(i64, i64, bool, bool)> = query_as(AssertSqlSafe(sql))
        .bind(GONE)
        .bind(host)
        .bind(LEASE.as_millis() as i64)
        .bind(SILENCE.as_millis() as i64)
        .fetch_all(&membership.meeting)
        .await
        .map_err(StoreError::while_it("looked for hosts that are dead"))?;
    let sign =
        |(number, at_ms, is_lease_over, is_cut_off)| SignOfLife { number, at_ms, is_lease_over, is_cut_off };
    Ok(hosts.into_iter().map(sign).collect())
}

/// Reads the hosts that are not gone. `sessions` is the expression for the number of sessions of each.
async fn hosts_from(from: &Pool, sessions: &str) -> Result<Vec<HostRow>, StoreError> {
    if from.dialect() == Dialect::Sqlite {
        return Ok(Vec::new());
    }
    let sql = format!(
        "SELECT number, url, version, state, facts, started_at_ms, {NOW_MS} - seen_at_ms, {sessions}, protocol, knows
         FROM hosts WHERE state != ? ORDER BY number"
    );
    let failed = || StoreError::while_it("listed the hosts of the cluster");
    let rows = query(AssertSqlSafe(sql)).bind(GONE).fetch_all(from).await.map_err(failed())?;
    rows.iter().map(host_row).collect::<Result<_, _>>().map_err(failed())
}

async fn meet(
    connection: &mut Connection,
    host: i64,
    state: i64,
    facts: &str,
    dead: &[SignOfLife],
) -> Result<Vec<i64>, StoreError> {
    // The transaction has renewed the lease, and has locked the row.
    query("UPDATE hosts SET state = ?, facts = ? WHERE number = ?")
        .bind(state)
        .bind(facts)
        .bind(host)
        .execute(&mut *connection)
        .await
        .map_err(StoreError::while_it("wrote the state of the host"))?;
    let failed = || StoreError::while_it("marked a host as gone");
    let mut gone = Vec::new();
    for SignOfLife { number, at_ms, .. } in dead {
        // A host that was heard from meanwhile has another time; one with an open transaction has locked its row.
        let mark = format!(
            "UPDATE hosts SET state = ?1 WHERE number = (SELECT number FROM hosts
                 WHERE number = ?2 AND seen_at_ms = ?3 AND state != ?1 FOR UPDATE SKIP LOCKED)
             AND EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = pg_backend_pid()
                 AND backend_start < clock_timestamp() - {SETTLED})
             RETURNING number"
        );
        let marked: Option<i64> = query_scalar(AssertSqlSafe(mark))
            .bind(GONE)
            .bind(*number)
            .bind(*at_ms)
            .fetch_optional(&mut *connection)
            .await
            .map_err(failed())?;
        let Some(number) = marked else { continue };
        tracing::warn!(host = number, "a host of the cluster has not answered and counts as gone");
        // One that hangs would keep the lock of the schema for as long as it does.
        let end = format!("SELECT pg_terminate_backend(pid) FROM ({}) AS holder", holder_of_member("?"));
        query(AssertSqlSafe(end)).bind(number).execute(&mut *connection).await.map_err(failed())?;
        gone.push(number);
    }
    Ok(gone)
}

fn host_row(row: &Row) -> Result<HostRow, sqlx::Error> {
    let number = |column: usize| Ok::<_, sqlx::Error>(row.try_get::<i64>(column)?.max(0) as u64);
    Ok(HostRow {
        number: row.try_get(0)?,
        url: row.try_get(1)?,
        version: row.try_get(2)?,
        state: match row.try_get::<i64>(3)? {
            SERVES => HostState::Serving,
            DRAINS => HostState::Draining,
            _ => HostState::Gone,
        },
        facts: row.try_get(4)?,
        started_at_ms: number(5)?,
        seen_ms_ago: number(6)?,
        sessions: number(7)?,
        versions: HostVersions { protocol: row.try_get(8)?, schema: row.try_get(9)? },
    })
}
