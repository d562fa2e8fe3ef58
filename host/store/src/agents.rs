//! Deployed agents, their versions and their components.
//!
//! Each deployment is a separate version, and one version of an agent is active. A component is stored once
//! under its digest, even if several versions share it, and is removed with the last of them.

use crate::{
    NewSchedule, Store, StoreError,
    chunks::{Bind, Chunk, ChunkProgress, remove_content, remove_turns},
    hosts::HostNumber,
    notices::{self, NoticeKind},
    page_erasures::{self, PageErasure},
    rows, schedules,
    sql::{Connection, Row, query, query_scalar},
    sqlite::CHUNK_TIME,
    usage,
};

/// Number of versions kept per agent. New versions push out the oldest ones.
pub(crate) const VERSIONS_PER_AGENT: i64 = 20;

/// A deployed agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentRow {
    pub name: String,
    /// The text of its `agent.toml`.
    pub manifest: String,
    /// SHA-256 of the component, in hexadecimal.
    pub digest: String,
    pub deployed_at_ms: u64,
    pub deployed_by: String,
}

/// A deployment, with its version number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRow {
    /// The version number; 1 is the agent's first version.
    pub version: u64,
    pub is_active: bool,
    pub agent: AgentRow,
}

impl Store {
    /// Stores a deployment as the agent's next version and activates it. The agent's sessions are kept.
    /// `schedules` replace those of the previous version.
    pub async fn put_agent(
        &self,
        agent: &AgentRow,
        component: &[u8],
        schedules: &[NewSchedule],
    ) -> Result<u64, StoreError> {
        loop {
            // A deleted agent with this name must be gone completely first.
            self.finish_deleting(&agent.name).await?;
            let version = self
                .write_common(
                    (agent.clone(), component.to_vec(), schedules.to_vec()),
                    |connection, (agent, component, schedules)| {
                        Box::pin(put(connection, agent, component, schedules))
                    },
                )
                .await?;
            if let Some(version) = version {
                return Ok(version);
            }
        }
    }

    /// Activates a stored version, with its schedules. Returns whether the version exists.
    pub async fn activate_version(
        &self,
        agent: &str,
        version: u64,
        schedules: &[NewSchedule],
    ) -> Result<bool, StoreError> {
        self.write_common(
            (agent.to_owned(), version, schedules.to_vec()),
            |connection, (agent, version, schedules)| {
                Box::pin(activate_version(connection, agent, *version, schedules))
            },
        )
        .await
    }

    /// Returns the active version of every agent, by name.
    pub async fn agents(&self) -> Result<Vec<VersionRow>, StoreError> {
        let rows = query(
            "SELECT agents.name, deployments.version, manifest, digest, deployed_at_ms, deployed_by, TRUE
             FROM agents JOIN deployments ON agent = name AND deployments.version = agents.version
             WHERE NOT deleted ORDER BY name",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed agents"))?;
        Ok(rows::readable(&rows, "agent", version_row))
    }

    /// Returns the stored versions of an agent, the newest first.
    pub async fn versions(&self, agent: &str) -> Result<Vec<VersionRow>, StoreError> {
        let rows = query(
            "SELECT name, deployments.version, manifest, digest, deployed_at_ms, deployed_by,
                 deployments.version = agents.version
             FROM agents JOIN deployments ON agent = name WHERE name = ? AND NOT deleted
             ORDER BY deployments.version DESC",
        )
        .bind(agent)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed the versions of an agent"))?;
        Ok(rows::readable(&rows, "agent", version_row))
    }

    /// Returns the component with this digest.
    pub async fn component(&self, digest: &str) -> Result<Vec<u8>, StoreError> {
        let row = query("SELECT bytes FROM components WHERE digest = ?")
            .bind(digest)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a component"))?;
        row.map(|row| row.get(0)).ok_or_else(|| StoreError::ComponentMissing { digest: digest.to_owned() })
    }

    /// Removes an agent with its secrets, versions, sessions, logs and the components that no other agent
    /// shares. Returns whether it existed. The agent disappears at once; if an error occurs after that, the
    /// rest is left to [`Store::tidy`] or to the next deployment under the same name.
    pub async fn delete_agent(&self, agent: &str) -> Result<bool, StoreError> {
        let (store, agent) = (self.clone(), agent.to_owned());
        // The deletion continues even if the caller stops waiting.
        let deleting = tokio::spawn(async move {
            let mark = store.write_common((agent.clone(), store.host), |connection, (agent, host)| {
                Box::pin(mark_deleted(connection, agent, *host))
            });
            let was_there = mark.await?;
            store.finish_deleting(&agent).await?;
            Ok(was_there)
        });
        deleting.await.map_err(|_ended| StoreError::Closed)?
    }

    /// Removes everything that is left of a deleted agent, if there is one.
    pub(crate) async fn finish_deleting(&self, agent: &str) -> Result<(), StoreError> {
        let deleted: Option<i64> = query_scalar("SELECT 1 FROM agents WHERE name = ? AND deleted")
            .bind(agent)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for a deleted agent"))?;
        if deleted.is_none() {
            return Ok(());
        }
        let _permit = self.chunked_write_permit().await?;
        loop {
            let progress = self
                .write_common((agent.to_owned(), self.chunk_time), |connection, (agent, time)| {
                    Box::pin(async move { delete(connection, agent, Chunk::new(*time)).await })
                })
                .await?;
            if let ChunkProgress::Done { .. } = progress {
                self.forget_line_count(agent);
                return Ok(());
            }
        }
    }
}

async fn put(
    connection: &mut Connection,
    agent: &AgentRow,
    component: &[u8],
    schedules: &[NewSchedule],
) -> Result<Option<u64>, StoreError> {
    let failed = || StoreError::while_it("stored an agent");
    if is_deleted(connection, &agent.name).await? {
        return Ok(None);
    }
    query("INSERT INTO components (digest, bytes) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING")
        .bind(&agent.digest)
        .bind(component)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    // Another host that deploys the same agent waits, and then gets the next version.
    query("INSERT INTO agents (name, version) VALUES (?, 0) ON CONFLICT (name) DO UPDATE SET version = agents.version")
        .bind(&agent.name)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    // The newest version is never removed, so no version number is used twice.
    let version: i64 = query_scalar("SELECT COALESCE(MAX(version), 0) + 1 FROM deployments WHERE agent = ?")
        .bind(&agent.name)
        .fetch_one(&mut *connection)
        .await
        .map_err(failed())?;
    query("UPDATE agents SET version = ? WHERE name = ?")
        .bind(version)
        .bind(&agent.name)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    query(
        "INSERT INTO deployments (agent, version, manifest, digest, deployed_at_ms, deployed_by)
         VALUES (?, ?, ?, ?, ?, ?)",
    )
    .bind(&agent.name)
    .bind(version)
    .bind(&agent.manifest)
    .bind(&agent.digest)
    .bind(agent.deployed_at_ms as i64)
    .bind(&agent.deployed_by)
    .execute(&mut *connection)
    .await
    .map_err(failed())?;
    query("DELETE FROM deployments WHERE agent = ? AND version <= ?")
        .bind(&agent.name)
        .bind(version - VERSIONS_PER_AGENT)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    // At most one component: that of the version that was pushed out.
    drop_orphans(connection, &mut Chunk::new(CHUNK_TIME)).await?;
    schedules::replace_of_manifest(connection, &agent.name, schedules).await?;
    notices::raise(connection, NoticeKind::Agents).await?;
    Ok(Some(version as u64))
}

/// Returns whether an agent was deleted but is not gone completely.
async fn is_deleted(connection: &mut Connection, agent: &str) -> Result<bool, StoreError> {
    let found = query("SELECT 1 FROM agents WHERE name = ? AND deleted").bind(agent);
    let found = found.fetch_optional(connection).await;
    Ok(found.map_err(StoreError::while_it("looked for a deleted agent"))?.is_some())
}

async fn activate_version(
    connection: &mut Connection,
    agent: &str,
    version: u64,
    schedules: &[NewSchedule],
) -> Result<bool, StoreError> {
    let failed = || StoreError::while_it("activated a version");
    let put = query(
        "UPDATE agents SET version = ?2 WHERE name = ?1 AND NOT deleted
         AND EXISTS (SELECT 1 FROM deployments WHERE agent = ?1 AND version = ?2)",
    )
    .bind(agent)
    .bind(version as i64)
    .execute(&mut *connection)
    .await
    .map_err(failed())?;
    if put.rows_affected() == 0 {
        return Ok(false);
    }
    schedules::replace_of_manifest(connection, agent, schedules).await?;
    notices::raise(connection, NoticeKind::Agents).await?;
    Ok(true)
}

async fn mark_deleted(
    connection: &mut Connection,
    agent: &str,
    host: HostNumber,
) -> Result<bool, StoreError> {
    let failed = || StoreError::while_it("deleted an agent");
    let marked = query("UPDATE agents SET deleted = TRUE WHERE name = ? AND NOT deleted")
        .bind(agent)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    // Secrets may be set before their agent exists, so no foreign key deletes them.
    let secrets = query("DELETE FROM secrets WHERE agent = ?").bind(agent).execute(&mut *connection).await;
    if secrets.map_err(failed())?.rows_affected() > 0 {
        notices::raise(connection, NoticeKind::Secrets).await?;
    }
    if marked.rows_affected() == 0 {
        return Ok(false);
    }
    notices::raise(connection, NoticeKind::Agents).await?;
    page_erasures::record(connection, &PageErasure::Agent { agent: agent.to_owned() }, host).await?;
    Ok(true)
}

async fn delete(
    connection: &mut Connection,
    agent: &str,
    mut chunk: Chunk,
) -> Result<ChunkProgress, StoreError> {
    let failed = || StoreError::while_it("deleted an agent");
    // Another caller may have finished the deletion, and the agent may have been deployed again.
    if !is_deleted(connection, agent).await? {
        return Ok(chunk.done());
    }
    let bind = [Bind::Text(agent)];
    let turns = "SELECT key FROM turns WHERE agent = ?1 LIMIT 1";
    for sql in [
        "DELETE FROM schedules WHERE key IN (SELECT key FROM schedules WHERE agent = ?1 LIMIT 50)",
        "DELETE FROM deliveries WHERE key IN (SELECT key FROM deliveries WHERE agent = ?1 LIMIT 500)",
        "DELETE FROM logs WHERE id IN (SELECT id FROM logs WHERE agent = ?1 LIMIT 500)",
        "DELETE FROM requests WHERE key IN (SELECT key FROM requests WHERE agent = ?1 LIMIT 50)",
        "DELETE FROM responses WHERE key IN (SELECT key FROM responses WHERE agent = ?1 LIMIT 50)",
    ] {
        if !chunk.remove(connection, sql, &bind).await? {
            return Ok(chunk.more());
        }
    }
    if !remove_turns(connection, &mut chunk, turns, &bind).await? {
        return Ok(chunk.more());
    }
    loop {
        let session: Option<i64> = query_scalar("SELECT key FROM sessions WHERE agent = ? LIMIT 1")
            .bind(agent)
            .fetch_optional(&mut *connection)
            .await
            .map_err(failed())?;
        let Some(session) = session else { break };
        if !remove_content(connection, &mut chunk, session).await? || chunk.is_over() {
            return Ok(chunk.more());
        }
    }
    if !usage::forget_session(connection, &chunk, agent, None).await? {
        return Ok(chunk.more());
    }
    for sql in ["DELETE FROM erasures WHERE agent = ?1", "DELETE FROM deployments WHERE agent = ?1"] {
        query(sql).bind(agent).execute(&mut *connection).await.map_err(failed())?;
    }
    if !drop_orphans(connection, &mut chunk).await? {
        return Ok(chunk.more());
    }
    query("DELETE FROM agents WHERE name = ?").bind(agent).execute(connection).await.map_err(failed())?;
    Ok(chunk.done())
}

fn version_row(row: &Row) -> Result<VersionRow, sqlx::Error> {
    Ok(VersionRow {
        version: row.try_get::<i64>(1)? as u64,
        is_active: row.try_get(6)?,
        agent: AgentRow {
            name: row.try_get(0)?,
            manifest: row.try_get(2)?,
            digest: row.try_get(3)?,
            deployed_at_ms: row.try_get::<i64>(4)? as u64,
            deployed_by: row.try_get(5)?,
        },
    })
}

/// Removes components that no version uses, one at a time because they are large. Returns `false` if the time
/// is over before all are removed.
async fn drop_orphans(connection: &mut Connection, chunk: &mut Chunk) -> Result<bool, StoreError> {
    let sql = "DELETE FROM components WHERE digest =
         (SELECT digest FROM components WHERE digest NOT IN (SELECT digest FROM deployments) LIMIT 1)";
    chunk.remove(connection, sql, &[]).await
}
