//! Tenants: which ones have rows, and the deletion of everything of a tenant that belongs to no session.
//!
//! Invariant: every table that has a tenant or a principal is named here; a test compares this file with the schema. Sessions are deleted one
//! by one (`erasure`), with what belongs to them.

use crate::{
    SessionFolder, Store, StoreError,
    notices::{self, NoticeKind},
    page_erasures::{self, PageErasure},
    sql::{AssertSqlSafe, Connection, query, query_as, query_scalar},
};

/// Number of rows that one transaction removes.
const CHUNK_ROWS: i64 = 50;

/// A tenant that has API keys or sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRow {
    pub name: String,
    pub keys: u64,
    pub sessions: u64,
}

/// Numbers of rows that were removed of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantRows {
    pub batches: u64,
    pub files: u64,
    pub responses: u64,
    /// Records in the log of requests.
    pub requests: u64,
    pub events: u64,
}

/// The tables with a session and an agent, in which a session may have rows without being stored itself.
const SESSION_TABLES: [&str; 8] =
    ["sessions", "turns", "schedules", "deliveries", "logs", "requests", "responses", "usage"];

impl Store {
    /// Returns the tenants that have API keys or sessions, by name. `unnamed` is the name of the tenant whose sessions are in
    /// no folder.
    pub async fn tenants(&self, unnamed: &str) -> Result<Vec<TenantRow>, StoreError> {
        let rows: Vec<(String, i64, i64)> = query_as(
            "SELECT name, CAST(SUM(keys) AS BIGINT), CAST(SUM(sessions) AS BIGINT) FROM (
                 SELECT tenant AS name, COUNT(*) AS keys, 0 AS sessions FROM api_keys WHERE revoked_at_ms IS NULL
                     GROUP BY tenant
                 UNION ALL
                 SELECT CASE instr(session, '/') WHEN 0 THEN ?1 ELSE substr(session, 1, instr(session, '/') - 1) END,
                     0, COUNT(*) FROM sessions WHERE session IS NOT NULL GROUP BY 1
             ) AS parts GROUP BY name ORDER BY name",
        )
        .bind(unnamed)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed the tenants"))?;
        let tenant = |(name, keys, sessions): (String, i64, i64)| TenantRow {
            name,
            keys: keys as u64,
            sessions: sessions as u64,
        };
        Ok(rows.into_iter().map(tenant).collect())
    }

    /// Removes the API keys of a tenant, which are refused from then on. Returns their number.
    pub async fn remove_api_keys(&self, tenant: &str) -> Result<u64, StoreError> {
        self.write_common(tenant.to_owned(), |connection, tenant| {
            Box::pin(async move {
                let gone = query("DELETE FROM api_keys WHERE tenant = ?").bind(tenant.as_str());
                let gone = gone.execute(&mut *connection).await.map_err(failed())?.rows_affected();
                notices::raise(connection, NoticeKind::Keys).await?;
                notices::raise(connection, NoticeKind::Tenants).await?;
                Ok(gone)
            })
        })
        .await
    }

    /// Returns the open turns of an agent's sessions in a folder, as pairs of session and id.
    pub async fn open_turns_in(
        &self,
        agent: &str,
        SessionFolder { begin, end, .. }: &SessionFolder,
    ) -> Result<Vec<(String, String)>, StoreError> {
        query_as(
            "SELECT session, id FROM turns WHERE agent = ? AND session > ? AND session < ? AND ended_at_ms IS NULL",
        )
        .bind(agent)
        .bind(begin)
        .bind(end)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for the open turns of a tenant"))
    }

    /// Returns at most `limit` sessions of an agent in a folder of which any table has a row.
    pub async fn sessions_with_rows(
        &self,
        agent: &str,
        SessionFolder { begin, end, .. }: &SessionFolder,
        limit: u32,
    ) -> Result<Vec<String>, StoreError> {
        let of_table = |table: &str| {
            format!("SELECT session FROM {table} WHERE agent = ?1 AND session > ?2 AND session < ?3")
        };
        let tables = SESSION_TABLES.map(of_table).join(" UNION ");
        query_scalar(AssertSqlSafe(format!("{tables} LIMIT ?4")))
            .bind(agent)
            .bind(begin)
            .bind(end)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for the sessions of a tenant"))
    }

    /// Returns the ids of all batches of a principal.
    pub async fn batches_of(&self, principal: &str) -> Result<Vec<String>, StoreError> {
        query_scalar("SELECT id FROM batches WHERE principal = ? AND complete ORDER BY key")
            .bind(principal)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed the batches of a tenant"))
    }

    /// Removes what a tenant has besides keys, sessions and usage. Batches have to be cancelled before.
    pub async fn remove_rows_of_tenant(&self, tenant: &str) -> Result<TenantRows, StoreError> {
        let (mut batches, mut files) = (0, 0);
        for key in
            self.keys_of("SELECT key FROM batches WHERE principal = ? LIMIT ?", tenant, i64::MAX).await?
        {
            self.remove_batch(key).await?;
            batches += 1;
        }
        let ids: Vec<String> = query_scalar("SELECT id FROM files WHERE principal = ? AND complete")
            .bind(tenant)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed the files of a tenant"))?;
        for id in ids {
            files += u64::from(self.delete_file(&id).await?);
        }
        let responses = self
            .remove_by_key(
                "SELECT key FROM responses WHERE principal = ? LIMIT ?",
                "DELETE FROM responses WHERE key = ?",
                tenant,
            )
            .await?;
        let requests = self
            .remove_by_key(
                "SELECT key FROM requests WHERE tenant = ? LIMIT ?",
                "DELETE FROM requests WHERE key = ?",
                tenant,
            )
            .await?;
        let events = self
            .remove_by_key(
                "SELECT key FROM events WHERE principal = ? LIMIT ?",
                "DELETE FROM events WHERE key = ?",
                tenant,
            )
            .await?;
        self.write_common((tenant.to_owned(), self.host), |connection, (tenant, host)| {
            Box::pin(async move {
                let size = query("DELETE FROM response_sizes WHERE principal = ?").bind(tenant.as_str());
                size.execute(&mut *connection).await.map_err(failed())?;
                let clients = query("DELETE FROM mcp_sessions WHERE tenant = ?").bind(tenant.as_str());
                clients.execute(&mut *connection).await.map_err(failed())?;
                notices::raise(connection, NoticeKind::Tenants).await?;
                let erased = PageErasure::Tenant { tenant: tenant.clone() };
                page_erasures::record(connection, &erased, *host).await
            })
        })
        .await?;
        Ok(TenantRows { batches, files, responses, requests, events })
    }

    /// Removes what a tenant has used of models. Returns the number of rows.
    pub async fn forget_usage_of(&self, tenant: &str) -> Result<u64, StoreError> {
        self.in_chunks(tenant.to_owned(), |connection, tenant| Box::pin(forget_usage(connection, tenant)))
            .await
    }

    /// Removes rows by their keys, some at a time, with the writes of others between them. The search for them holds up no write.
    async fn remove_by_key(
        &self,
        select: &'static str,
        delete: &'static str,
        tenant: &str,
    ) -> Result<u64, StoreError> {
        let mut removed = 0;
        loop {
            let keys = self.keys_of(select, tenant, CHUNK_ROWS).await?;
            if keys.is_empty() {
                return Ok(removed);
            }
            removed += keys.len() as u64;
            let _permit = self.chunked_write_permit().await?;
            self.write_common((delete, keys), |connection, (delete, keys)| {
                Box::pin(async move {
                    for key in keys.iter() {
                        query(*delete).bind(*key).execute(&mut *connection).await.map_err(failed())?;
                    }
                    Ok(())
                })
            })
            .await?;
        }
    }

    async fn keys_of(&self, select: &'static str, tenant: &str, limit: i64) -> Result<Vec<i64>, StoreError> {
        let keys = query_scalar(select).bind(tenant).bind(limit).fetch_all(&self.readers).await;
        keys.map_err(StoreError::while_it("looked for the rows of a tenant"))
    }
}

async fn forget_usage(connection: &mut Connection, tenant: &str) -> Result<u64, StoreError> {
    let tokens = query("DELETE FROM token_use WHERE tenant = ?").bind(tenant).execute(&mut *connection).await;
    tokens.map_err(failed())?;
    let key = "day, tenant, key, agent, session, model";
    let usage = format!(
        "DELETE FROM usage WHERE ({key}) IN (SELECT {key} FROM usage WHERE tenant = ? LIMIT {CHUNK_ROWS})"
    );
    let gone = query(AssertSqlSafe(usage)).bind(tenant).execute(&mut *connection).await;
    let gone = gone.map_err(failed())?.rows_affected();
    notices::raise(connection, NoticeKind::Tenants).await?;
    Ok(gone)
}

fn failed() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("deleted a tenant")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table_rows::{insert_one, tables_with};

    async fn count(store: &Store, table: &str, column: &str) -> i64 {
        let sql = format!("SELECT COUNT(*) FROM {table} WHERE {column} = 'acme'");
        query_scalar(AssertSqlSafe(sql)).fetch_one(&store.readers).await.unwrap()
    }

    #[tokio::test]
    async fn every_table_in_which_a_session_has_rows_is_searched() {
        for table in tables_with(&Store::for_tests().await.unwrap(), "session").await {
            let (name, columns) = &table;
            // The other tables refer to a session's row, or say who runs it and not what it has.
            if ["erasures", "session_owners"].contains(&name.as_str())
                || !columns.iter().any(|(column, kind)| column == "session" && kind == "TEXT")
            {
                continue;
            }
            let store = Store::for_tests().await.unwrap();
            insert_one(&store, &table, &[("agent", "'a'"), ("session", "'acme/s'")]).await;
            let found = store.sessions_with_rows("a", &SessionFolder::of(Some("acme")), 10).await.unwrap();
            assert_eq!(found, ["acme/s"], "{name} is not searched");
            let others = store.sessions_with_rows("a", &SessionFolder::of(Some("acm")), 10).await.unwrap();
            assert!(others.is_empty(), "{name}");
        }
    }

    #[tokio::test]
    async fn a_deleted_tenant_leaves_no_row_in_any_table_that_has_tenants() {
        let store = Store::for_tests().await.unwrap();
        let mut filled: Vec<(String, &str)> = Vec::new();
        for column in ["tenant", "principal"] {
            for table in tables_with(&store, column).await {
                // The schedules of a tenant belong to its sessions.
                if table.0 != "schedules" {
                    insert_one(&store, &table, &[(column, "'acme'")]).await;
                    filled.push((table.0, column));
                }
            }
        }
        assert!(filled.len() >= 8, "{filled:?}");
        assert_eq!(store.remove_api_keys("acme").await.unwrap(), 1);
        let expected = TenantRows { batches: 1, files: 1, responses: 1, requests: 1, events: 1 };
        assert_eq!(store.remove_rows_of_tenant("acme").await.unwrap(), expected);
        for (table, column) in &filled {
            let kept = i64::from(["usage", "token_use"].contains(&table.as_str()));
            assert_eq!(count(&store, table, column).await, kept, "{table}; remove its rows in tenants.rs");
        }
        assert_eq!(store.forget_usage_of("acme").await.unwrap(), 1);
        for (table, column) in &filled {
            assert_eq!(count(&store, table, column).await, 0, "{table}");
        }
        assert_eq!(store.remove_rows_of_tenant("acme").await.unwrap(), TenantRows::default());
    }

    #[tokio::test]
    async fn tenants_are_listed_with_their_keys_and_sessions() {
        let store = Store::for_tests().await.unwrap();
        let sessions = tables_with(&store, "session").await;
        let table = sessions.iter().find(|(table, _)| table == "sessions").unwrap();
        for (key, session) in [("1", "'acme/s'"), ("2", "'acme/t'"), ("3", "'plain'")] {
            insert_one(&store, table, &[("key", key), ("agent", "'a'"), ("session", session)]).await;
        }
        let keys = tables_with(&store, "tenant").await;
        let table = keys.iter().find(|(table, _)| table == "api_keys").unwrap();
        for (id, tenant, revoked) in
            [("'k1'", "'acme'", "NULL"), ("'k2'", "'new'", "NULL"), ("'k3'", "'old'", "1")]
        {
            let digest = store.readers.dialect().pick("randomblob(32)", "sha256(random()::text::bytea)");
            let values = [("id", id), ("tenant", tenant), ("digest", digest), ("revoked_at_ms", revoked)];
            insert_one(&store, table, &values).await;
        }
        let row = |name: &str, keys, sessions| TenantRow { name: name.into(), keys, sessions };
        assert_eq!(
            store.tenants("local").await.unwrap(),
            [row("acme", 1, 2), row("local", 0, 1), row("new", 1, 0)]
        );
    }
}
