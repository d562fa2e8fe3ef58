//! Erasures of KV pages that all hosts of a cluster make: of deleted sessions, agents and tenants.
//!
//! A host may have pages of a session that another one owns and deletes, in memory and in its data folder, and it may be down
//! when that happens. So an erasure is a row, which is written in the transaction of the deletion, and each host knows the last
//! one that it has made. The number of an erasure is the version of its notice: the row of the notice orders the
//! transactions, so a number is never seen before a smaller one, and none is left out.
//!
//! Invariant: a host either gets all erasures since the last one that it made, or learns that it cannot.

use crate::{
    Store, StoreError,
    hosts::{HostNumber, NOW_MS},
    notices::{self, NoticeKind},
    sql::{AssertSqlSafe, Connection, Dialect, Row, query},
};

/// Time for which an erasure is kept, and with it the name of what was deleted.
const KEPT_MS: u64 = 7 * 24 * 3_600_000;
/// Maximum number of erasures that are kept.
const MAX_KEPT: u64 = 65_536;

/// The pages of something that was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageErasure {
    Session { agent: String, session: String },
    Agent { agent: String },
    Tenant { tenant: String },
}

/// The erasures that a host has not made yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageErasures {
    /// The number of the last one.
    pub until: u64,
    /// The erasures of other hosts in order; `None` if some of them are not known anymore, so that everything has to be
    /// erased.
    pub erased: Option<Vec<PageErasure>>,
}

impl Store {
    /// Returns the erasures after the one with this number; without a number, only that of the last one.
    pub async fn page_erasures(&self, since: Option<u64>) -> Result<PageErasures, StoreError> {
        // One statement sees one moment.
        let rows = query(
            "SELECT version, number, of_tenant, of_agent, of_session, host
             FROM notices LEFT JOIN page_erasures ON number > ? WHERE kind = ? ORDER BY number LIMIT ?",
        )
        .bind(since.map_or(i64::MAX, |since| i64::try_from(since).unwrap_or(i64::MAX)))
        .bind(NoticeKind::Pages.as_str())
        .bind(MAX_KEPT as i64 + 1)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("read which KV pages other hosts have erased"))?;
        let until = rows.first().map_or(0, |row| row.get::<i64>(0)) as u64;
        let found: Vec<&Row> = rows.iter().filter(|row| row.get::<Option<i64>>(1).is_some()).collect();
        if since.and_then(|since| until.checked_sub(since)) != Some(found.len() as u64) {
            return Ok(PageErasures { until, erased: None });
        }
        let of_others = found.into_iter().filter(|row| {
            let host: HostNumber = row.get(5);
            host.is_none() || host != self.host
        });
        // A row of a later version may name something that is not known here.
        Ok(PageErasures { until, erased: of_others.map(erasure).collect() })
    }

    /// Removes erasures that are older than a week. A host that was away for longer erases everything.
    pub async fn forget_page_erasures(&self) -> Result<u64, StoreError> {
        if self.readers.dialect() == Dialect::Sqlite {
            return Ok(0);
        }
        self.in_chunks((), |connection, ()| {
            Box::pin(async move {
                let old = format!(
                    "DELETE FROM page_erasures WHERE number IN
                         (SELECT number FROM page_erasures WHERE at_ms < {NOW_MS} - ? ORDER BY number LIMIT 200)"
                );
                let gone = query(AssertSqlSafe(old)).bind(KEPT_MS as i64).execute(connection).await;
                Ok(gone.map_err(StoreError::while_it("removed old erasures of KV pages"))?.rows_affected())
            })
        })
        .await
    }
}

/// Announces an erasure of the transaction, which `host` makes itself, to all other hosts. An SQLite file has no others.
pub(crate) async fn record(
    connection: &mut Connection,
    erased: &PageErasure,
    host: HostNumber,
) -> Result<(), StoreError> {
    if connection.dialect() == Dialect::Sqlite {
        return Ok(());
    }
    let failed = || StoreError::while_it("announced an erasure of KV pages");
    notices::raise(connection, NoticeKind::Pages).await?;
    let (tenant, agent, session) = match erased {
        PageErasure::Tenant { tenant } => (Some(tenant), None, None),
        PageErasure::Agent { agent } => (None, Some(agent), None),
        PageErasure::Session { agent, session } => (None, Some(agent), Some(session)),
    };
    let insert = format!(
        "INSERT INTO page_erasures (number, of_tenant, of_agent, of_session, host, at_ms)
         SELECT version, ?, ?, ?, ?, {NOW_MS} FROM notices WHERE kind = ?"
    );
    query(AssertSqlSafe(insert))
        .bind(tenant)
        .bind(agent)
        .bind(session)
        .bind(host)
        .bind(NoticeKind::Pages.as_str())
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    query("DELETE FROM page_erasures WHERE number <= (SELECT version FROM notices WHERE kind = ?) - ?")
        .bind(NoticeKind::Pages.as_str())
        .bind(MAX_KEPT as i64)
        .execute(connection)
        .await
        .map(drop)
        .map_err(failed())
}

fn erasure(row: &Row) -> Option<PageErasure> {
    Some(match (row.get(2), row.get(3), row.get(4)) {
        (Some(tenant), None, None) => PageErasure::Tenant { tenant },
        (None, Some(agent), None) => PageErasure::Agent { agent },
        (None, Some(agent), Some(session)) => PageErasure::Session { agent, session },
        _ => return None,
    })
}
