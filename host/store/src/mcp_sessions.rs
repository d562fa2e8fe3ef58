//! The sessions of MCP clients in a cluster: which host has each of them, and what another one needs to continue it.
//!
//! A host that begins a session records it before the client knows its id. Another host takes it over only when that host is gone,
//! after which nothing more is written under its number; the session then has a later epoch, because epochs come from one
//! sequence. Every change names the epoch under which it is made. Without a cluster nothing is recorded: the sessions of the
//! only host end with it.

use crate::{
    Store, StoreError,
    hosts::{GONE, NOW_MS, is_left},
    sql::{AssertSqlSafe, query, query_as, query_scalar},
};

/// Time for which the record of a session is kept that nobody uses. Hosts record once a minute that a session is in use, and keep
/// one that is not for a shorter time than this.
const KEPT_MS: i64 = 24 * 3_600_000;

/// The identity of a session: its id, who began it, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpSessionKey {
    pub id: String,
    pub tenant: String,
    /// The API key; `None` where no key is required.
    pub key: Option<String>,
    /// The agent that the session is about; `None` means all agents.
    pub agent: Option<String>,
}

/// A session that this host has taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenMcpSession {
    /// The epoch of this host, which is larger than those of all earlier ones.
    pub epoch: u64,
    /// The state that the last host has recorded, which has no meaning here.
    pub state: String,
}

/// A change of a session that this host has under an epoch.
struct Change {
    id: String,
    host: i64,
    epoch: i64,
    state: String,
}

impl Store {
    /// Records a session that this host has begun. Returns its epoch; `None` without a cluster.
    pub async fn add_mcp_session(
        &self,
        key: McpSessionKey,
        state: String,
    ) -> Result<Option<u64>, StoreError> {
        let (Some(_), Some(host)) = (&self.membership, self.host) else { return Ok(None) };
        let epoch = self
            .write((key, state, host), |connection, (key, state, host)| {
                Box::pin(async move {
                    let McpSessionKey { id, tenant, key, agent } = key;
                    let insert = format!(
                        "INSERT INTO mcp_sessions (id, tenant, key, agent, state, host, used_at_ms)
                         VALUES (?, ?, ?, ?, ?, ?, {NOW_MS}) RETURNING epoch"
                    );
                    let epoch: Result<i64, _> = query_scalar(AssertSqlSafe(insert))
                        .bind(id)
                        .bind(tenant)
                        .bind(key)
                        .bind(agent)
                        .bind(state)
                        .bind(*host)
                        .fetch_one(connection)
                        .await;
                    epoch.map_err(StoreError::while_it("recorded a session of an MCP client"))
                })
            })
            .await?;
        Ok(Some(epoch as u64))
    }

    /// Returns the number of the live host that has a session, if any has it.
    pub async fn host_of_mcp_session(&self, id: &str) -> Result<Option<i64>, StoreError> {
        if self.membership.is_none() {
            return Ok(None);
        }
        query_scalar(
            "SELECT host FROM mcp_sessions JOIN hosts ON number = host WHERE id = ? AND hosts.state != ?",
        )
        .bind(id)
        .bind(GONE)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for the host of a session of an MCP client"))
    }

    /// Takes a session over if its host is gone, it is that of this caller and it was used within `unused_ms`. Returns `None` if
    /// there is none, or another host has it.
    pub async fn take_mcp_session(
        &self,
        key: McpSessionKey,
        unused_ms: u64,
    ) -> Result<Option<TakenMcpSession>, StoreError> {
        let (Some(_), Some(host)) = (&self.membership, self.host) else { return Ok(None) };
        // An id that nobody knows needs no transaction.
        let is_known: bool =
            query_scalar("SELECT EXISTS (SELECT 1 FROM mcp_sessions WHERE id = ? AND tenant = ?)")
                .bind(&key.id)
                .bind(&key.tenant)
                .fetch_one(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for a session of an MCP client"))?;
        if !is_known {
            return Ok(None);
        }
        let unused_ms = i64::try_from(unused_ms).unwrap_or(i64::MAX);
        let taken = self
            .write_common((key, unused_ms, host), |connection, (key, unused_ms, host)| {
                Box::pin(async move {
                    let McpSessionKey { id, tenant, key, agent } = key;
                    // The default of the epoch is the next one. A session that this host did not finish taking is still its own.
                    let take = format!(
                        "UPDATE mcp_sessions SET host = ?1, epoch = DEFAULT, used_at_ms = {NOW_MS}
                         WHERE id = ?2 AND tenant = ?3 AND key IS NOT DISTINCT FROM ?4 AND agent IS NOT DISTINCT FROM ?5
                             AND used_at_ms >= {NOW_MS} - ?6 AND (host = ?1 OR {})
                         RETURNING epoch, state",
                        is_left("host")
                    );
                    let taken: Result<Option<(i64, String)>, _> = query_as(AssertSqlSafe(take))
                        .bind(*host)
                        .bind(id)
                        .bind(tenant)
                        .bind(key)
                        .bind(agent)
                        .bind(*unused_ms)
                        .fetch_optional(connection)
                        .await;
                    taken.map_err(StoreError::while_it("took over a session of an MCP client"))
                })
            })
            .await?;
        Ok(taken.map(|(epoch, state)| TakenMcpSession { epoch: epoch as u64, state }))
    }

    /// Records the state of a session that this host has under this epoch, and that it is in use. Returns `false` if it has it no
    /// more.
    pub async fn note_mcp_session(&self, id: &str, epoch: u64, state: String) -> Result<bool, StoreError> {
        let Some(change) = self.mcp_change(id, epoch, state) else { return Ok(false) };
        self.write(change, |connection, Change { id, host, epoch, state }| {
            Box::pin(async move {
                let note = format!(
                    "UPDATE mcp_sessions SET state = ?, used_at_ms = {NOW_MS} WHERE id = ? AND host = ? AND epoch = ?"
                );
                let noted = query(AssertSqlSafe(note)).bind(state).bind(id).bind(*host).bind(*epoch);
                let noted = noted.execute(connection).await;
                let noted = noted.map_err(StoreError::while_it("recorded a session of an MCP client"))?;
                Ok(noted.rows_affected() > 0)
            })
        })
        .await
    }

    /// Removes a session that this host has under this epoch, because it has ended. `None` stands for a session that this host has
    /// begun and whose epoch it has not learned, because its client went away meanwhile.
    pub async fn end_mcp_session(&self, id: &str, epoch: Option<u64>) -> Result<(), StoreError> {
        let (Some(_), Some(host)) = (&self.membership, self.host) else { return Ok(()) };
        let epoch = epoch.map(|epoch| i64::try_from(epoch).unwrap_or(i64::MAX));
        self.write((id.to_owned(), host, epoch), |connection, (id, host, epoch)| {
            Box::pin(async move {
                let end =
                    "DELETE FROM mcp_sessions WHERE id = ?1 AND host = ?2 AND epoch = coalesce(?3, epoch)";
                let ended = query(end).bind(id).bind(*host).bind(*epoch).execute(connection).await;
                ended.map(drop).map_err(StoreError::while_it("ended a session of an MCP client"))
            })
        })
        .await
    }

    /// Removes the records of sessions that nobody has used for a day. Returns their number. A host that lives may have some of
    /// them: it could not remove them while the database was away, or had begun to take them over.
    pub async fn forget_mcp_sessions(&self) -> Result<u64, StoreError> {
        if self.membership.is_none() {
            return Ok(0);
        }
        self.in_chunks((), |connection, ()| {
            Box::pin(async move {
                let old = format!(
                    "DELETE FROM mcp_sessions WHERE id IN
                         (SELECT id FROM mcp_sessions WHERE used_at_ms < {NOW_MS} - ? LIMIT 200)"
                );
                let gone = query(AssertSqlSafe(old)).bind(KEPT_MS).execute(connection).await;
                let gone = gone.map_err(StoreError::while_it("removed old sessions of MCP clients"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }

    fn mcp_change(&self, id: &str, epoch: u64, state: String) -> Option<Change> {
        let host = self.membership.as_ref().and(self.host)?;
        Some(Change { id: id.to_owned(), host, epoch: i64::try_from(epoch).ok()?, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cluster_tests::member, host_tests::Database};

    #[tokio::test]
    async fn without_a_cluster_nothing_is_recorded() {
        let store = Store::for_tests().await.unwrap();
        let key = McpSessionKey { id: "m".into(), tenant: "t".into(), key: None, agent: None };
        assert_eq!(store.add_mcp_session(key.clone(), "s".into()).await.unwrap(), None);
        assert_eq!(store.host_of_mcp_session("m").await.unwrap(), None);
        assert_eq!(store.take_mcp_session(key, 1).await.unwrap(), None);
        assert!(!store.note_mcp_session("m", 1, "s".into()).await.unwrap());
        assert_eq!(store.forget_mcp_sessions().await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_session_of_an_mcp_client_goes_to_another_host_once_its_own_is_gone() {
        const UNUSED_MS: u64 = 60_000;
        let Some(mut database) = Database::new().await else { return };
        let (one, other) = (member(&database, "one").await, member(&database, "other").await);
        let key = |id: &str| McpSessionKey {
            id: id.into(),
            tenant: "acme".into(),
            key: Some("key-1".into()),
            agent: None,
        };
        let first = one.add_mcp_session(key("m"), "one".into()).await.unwrap().expect("it is a cluster");
        assert_eq!(other.host_of_mcp_session("m").await.unwrap(), one.host_number());
        assert_eq!(other.take_mcp_session(key("m"), UNUSED_MS).await.unwrap(), None, "its host lives");
        assert!(one.note_mcp_session("m", first, "two".into()).await.unwrap());
        assert!(
            !other.note_mcp_session("m", first, "x".into()).await.unwrap(),
            "it is not that of this host"
        );
        one.close().await;

        assert_eq!(other.host_of_mcp_session("m").await.unwrap(), None);
        let strangers = [
            McpSessionKey { tenant: "else".into(), ..key("m") },
            McpSessionKey { key: None, ..key("m") },
            McpSessionKey { agent: Some("a".into()), ..key("m") },
            key("unknown"),
        ];
        for stranger in strangers {
            assert_eq!(other.take_mcp_session(stranger, UNUSED_MS).await.unwrap(), None);
        }
        let taken = other.take_mcp_session(key("m"), UNUSED_MS).await.unwrap().expect("its host is gone");
        assert_eq!(taken.state, "two");
        assert!(taken.epoch > first, "{} after {first}", taken.epoch);
        assert!(!other.note_mcp_session("m", first, "x".into()).await.unwrap(), "the epoch is over");
        other.end_mcp_session("m", Some(first)).await.unwrap();
        assert!(other.note_mcp_session("m", taken.epoch, "three".into()).await.unwrap());
        other.end_mcp_session("m", Some(taken.epoch)).await.unwrap();
        assert_eq!(other.take_mcp_session(key("m"), UNUSED_MS).await.unwrap(), None, "it has ended");

        for id in ["unused", "kept", "unknown"] {
            other.add_mcp_session(key(id), String::new()).await.unwrap();
        }
        other.end_mcp_session("unknown", None).await.unwrap();
        assert_eq!(other.host_of_mcp_session("unknown").await.unwrap(), None, "its epoch was not learned");
        let third = member(&database, "third").await;
        third.end_mcp_session("kept", None).await.unwrap();
        assert!(other.host_of_mcp_session("kept").await.unwrap().is_some(), "another host cannot end it");
        other.close().await;
        third.add_mcp_session(key("left"), String::new()).await.unwrap();
        database
            .run(
                "UPDATE mcp_sessions SET used_at_ms = used_at_ms - 100000000 WHERE id IN ('unused', 'left')"
                    .into(),
            )
            .await;
        assert_eq!(
            third.take_mcp_session(key("unused"), UNUSED_MS).await.unwrap(),
            None,
            "it was unused for too long"
        );
        assert_eq!(third.forget_mcp_sessions().await.unwrap(), 2, "also of a host that lives");
        assert!(third.take_mcp_session(key("kept"), UNUSED_MS).await.unwrap().is_some());
    }
}
