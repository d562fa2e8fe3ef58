//! Notices: they tell the hosts of a cluster that something which they hold in memory was changed, by another host or by a
//! command.
//!
//! Each kind of thing has a version in the database, which grows in the transaction of the change. A notification of the
//! server is only the bell: it says that a version should be read now. A host also reads the versions every second, so a bell that
//! was not heard costs a second and no change.

use crate::{
    StoreError,
    sql::{AssertSqlSafe, Connection, Dialect, Pool, query, query_as},
};
use sqlx::{PgPool, postgres::PgListener};
use std::{collections::BTreeMap, time::Duration};
use tokio::time::{sleep, timeout};

/// Interval at which the versions are read, and time for which a host waits for the server.
const POLL: Duration = Duration::from_secs(1);
/// The name of the channel, which is that of the schema: channels belong to a whole database.
const CHANNEL: &str = "'skep_' || CAST(CAST(to_regnamespace(current_schema()) AS oid) AS TEXT)";

/// The things that hosts hold in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NoticeKind {
    /// Agents and their active versions.
    Agents,
    /// API keys, except the day of their last use.
    Keys,
    /// Tenants and what they have used.
    Tenants,
    /// Webhooks, except the outcome of their last attempt.
    Webhooks,
    Secrets,
    /// Work that is held since a restore.
    Held,
    /// Many events and schedules that became due at once. Those of a turn or a request are not announced, because the host that
    /// has written them delivers them.
    Deliveries,
    /// New batches, which a host without room leaves to others.
    Batches,
    /// KV pages that every host erases.
    Pages,
}

impl NoticeKind {
    /// All kinds.
    pub const ALL: [NoticeKind; 9] = [
        NoticeKind::Agents,
        NoticeKind::Keys,
        NoticeKind::Tenants,
        NoticeKind::Webhooks,
        NoticeKind::Secrets,
        NoticeKind::Held,
        NoticeKind::Deliveries,
        NoticeKind::Batches,
        NoticeKind::Pages,
    ];

    /// Returns the name of the kind.
    pub fn as_str(self) -> &'static str {
        match self {
            NoticeKind::Agents => "agents",
            NoticeKind::Keys => "keys",
            NoticeKind::Tenants => "tenants",
            NoticeKind::Webhooks => "webhooks",
            NoticeKind::Secrets => "secrets",
            NoticeKind::Held => "held",
            NoticeKind::Deliveries => "deliveries",
            NoticeKind::Batches => "batches",
            NoticeKind::Pages => "pages",
        }
    }
}

/// Announces a change of the transaction to all hosts. Its write must be a common one, because other hosts raise the same
/// version. An SQLite file has one host, which knows what it changes.
pub(crate) async fn raise(connection: &mut Connection, kind: NoticeKind) -> Result<(), StoreError> {
    if connection.dialect() == Dialect::Sqlite {
        return Ok(());
    }
    let failed = || StoreError::while_it("announced a change to other hosts");
    query(
        "INSERT INTO notices (kind, version) VALUES (?, 1)
         ON CONFLICT (kind) DO UPDATE SET version = notices.version + 1",
    )
    .bind(kind.as_str())
    .execute(&mut *connection)
    .await
    .map_err(failed())?;
    // The server sends it when the transaction is committed.
    let ring = format!("SELECT pg_notify({CHANNEL}, ?)");
    let rung = query(AssertSqlSafe(ring)).bind(kind.as_str()).execute(connection).await;
    rung.map(drop).map_err(failed())
}

/// Notifies a host of changes that others made.
#[derive(Debug)]
pub struct Notices {
    /// The connection on which the versions are read, so that a notice does not wait for long reads.
    meeting: Pool,
    listening: PgPool,
    listener: Option<PgListener>,
    /// The versions that were announced; `None` before they were read for the first time.
    seen: Option<BTreeMap<NoticeKind, i64>>,
}

impl Notices {
    pub(crate) fn new(meeting: Pool, listening: PgPool) -> Self {
        Notices { meeting, listening, listener: None, seen: None }
    }

    /// Resolves when something was changed, by any host or command. The first call names everything at once. Later ones may
    /// name what did not change, and never miss what did. Nothing is lost if the caller stops waiting.
    pub async fn next(&mut self) -> Vec<NoticeKind> {
        loop {
            match self.changed().await {
                Ok(changed) if !changed.is_empty() => return changed,
                Ok(_) => {}
                // The store is closed.
                Err(sqlx::Error::PoolClosed) => std::future::pending::<()>().await,
                Err(error) => tracing::warn!(%error, "cannot look for changes that other hosts made"),
            }
            self.rung().await;
        }
    }

    /// Reads the versions, and returns the kinds whose versions have changed.
    async fn changed(&mut self) -> Result<Vec<NoticeKind>, sqlx::Error> {
        let rows: Vec<(String, i64)> =
            query_as("SELECT kind, version FROM notices").fetch_all(&self.meeting).await?;
        let known = |(name, version): (String, i64)| {
            let kind = NoticeKind::ALL.into_iter().find(|kind| kind.as_str() == name);
            kind.map(|kind| (kind, version))
        };
        let now: BTreeMap<NoticeKind, i64> = rows.into_iter().filter_map(known).collect();
        let Some(before) = self.seen.replace(now.clone()) else { return Ok(NoticeKind::ALL.into()) };
        Ok(NoticeKind::ALL.into_iter().filter(|kind| before.get(kind) != now.get(kind)).collect())
    }

    /// Waits for the bell or for the time to look. The first call begins to listen, after which the versions have to be read
    /// again, because a bell may have rung before.
    async fn rung(&mut self) {
        let Some(listener) = &mut self.listener else {
            match timeout(POLL, listen(&self.listening)).await {
                Ok(Ok(listener)) => self.listener = Some(listener),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot listen for changes; looking for them every second");
                    sleep(POLL).await;
                }
                Err(_elapsed) => {}
            }
            return;
        };
        let heard = timeout(POLL, listener.recv()).await;
        if let Ok(Err(error)) = heard {
            tracing::debug!(%error, "the connection that listens for changes was lost");
            self.listener = None;
        }
    }
}

async fn listen(pool: &PgPool) -> Result<PgListener, sqlx::Error> {
    let channel = sqlx::query_scalar(AssertSqlSafe(format!("SELECT {CHANNEL}")));
    let channel: String = channel.fetch_one(pool).await?;
    let mut listener = PgListener::connect_with(pool).await?;
    listener.listen(&channel).await?;
    Ok(listener)
}
