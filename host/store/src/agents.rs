//! Deployed agents, their versions and their components.
//!
//! Every deployment is a version of its own, and one version of an agent is in force. A component is stored once under
//! its digest, however many versions share it, and goes with the last of them.

use crate::{NewSchedule, Store, StoreError, schedules};
use sqlx::{Row, query, query_scalar, sqlite::SqliteRow};

/// Versions kept for each agent; older ones go when newer ones come.
pub(crate) const VERSIONS_PER_AGENT: i64 = 20;

/// What was deployed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentRow {
    pub name: String,
    /// The text of its `agent.toml`.
    pub manifest: String,
    /// SHA-256 of the component, in hex.
    pub digest: String,
    pub deployed_at_ms: u64,
    pub deployed_by: String,
}

/// A deployment and its place among those of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRow {
    /// 1 is the agent's first.
    pub version: u64,
    pub is_in_force: bool,
    pub agent: AgentRow,
}

impl Store {
    /// Stores a deployment as the agent's next version and puts it into force. The agent's sessions stay.
    /// `schedules` take the place of those of the version before.
    pub async fn put_agent(
        &self,
        agent: &AgentRow,
        component: &[u8],
        schedules: &[NewSchedule],
    ) -> Result<u64, StoreError> {
        let failed = || StoreError::while_it("stored an agent");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        query("INSERT INTO components (digest, bytes) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING")
            .bind(&agent.digest)
            .bind(component)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        // The newest version is never removed, so that no number is given twice.
        let version: i64 =
            query_scalar("SELECT COALESCE(MAX(version), 0) + 1 FROM deployments WHERE agent = ?")
                .bind(&agent.name)
                .fetch_one(&mut *transaction)
                .await
                .map_err(failed())?;
        query("INSERT INTO agents (name, version) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET version = ?2")
            .bind(&agent.name)
            .bind(version)
            .execute(&mut *transaction)
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
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        query("DELETE FROM deployments WHERE agent = ? AND version <= ?")
            .bind(&agent.name)
            .bind(version - VERSIONS_PER_AGENT)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        drop_orphans(&mut transaction).await?;
        schedules::replace_of_manifest(&mut transaction, &agent.name, schedules).await?;
        transaction.commit().await.map_err(failed())?;
        Ok(version as u64)
    }

    /// Puts a kept version into force, with its schedules. Whether there is such a version.
    pub async fn put_in_force(
        &self,
        agent: &str,
        version: u64,
        schedules: &[NewSchedule],
    ) -> Result<bool, StoreError> {
        let failed = || StoreError::while_it("put a version into force");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let put = query(
            "UPDATE agents SET version = ?2 WHERE name = ?1
             AND EXISTS (SELECT 1 FROM deployments WHERE agent = ?1 AND version = ?2)",
        )
        .bind(agent)
        .bind(version as i64)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        if put.rows_affected() == 0 {
            return Ok(false);
        }
        schedules::replace_of_manifest(&mut transaction, agent, schedules).await?;
        transaction.commit().await.map_err(failed())?;
        Ok(true)
    }

    /// The version in force of every agent, by name.
    pub async fn agents(&self) -> Result<Vec<VersionRow>, StoreError> {
        let rows = query(
            "SELECT agents.name, deployments.version, manifest, digest, deployed_at_ms, deployed_by, TRUE
             FROM agents JOIN deployments ON agent = name AND deployments.version = agents.version ORDER BY name",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed agents"))?;
        Ok(rows.iter().map(version_row).collect())
    }

    /// The kept versions of an agent, the newest first.
    pub async fn versions(&self, agent: &str) -> Result<Vec<VersionRow>, StoreError> {
        let rows = query(
            "SELECT name, deployments.version, manifest, digest, deployed_at_ms, deployed_by,
                 deployments.version = agents.version
             FROM agents JOIN deployments ON agent = name WHERE name = ? ORDER BY deployments.version DESC",
        )
        .bind(agent)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed the versions of an agent"))?;
        Ok(rows.iter().map(version_row).collect())
    }

    /// The component with this digest.
    pub async fn component(&self, digest: &str) -> Result<Vec<u8>, StoreError> {
        let row = query("SELECT bytes FROM components WHERE digest = ?")
            .bind(digest)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a component"))?;
        row.map(|row| row.get(0)).ok_or_else(|| StoreError::ComponentMissing { digest: digest.to_owned() })
    }

    /// Removes an agent with its secrets, versions, sessions, logs and the components that no other agent shares. Whether it was
    /// there.
    pub async fn delete_agent(&self, agent: &str) -> Result<bool, StoreError> {
        let failed = || StoreError::while_it("deleted an agent");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let deleted = query("DELETE FROM agents WHERE name = ?")
            .bind(agent)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?
            .rows_affected();
        // They may be set before there is an agent, so no row refers to another.
        query("DELETE FROM secrets WHERE agent = ?")
            .bind(agent)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        drop_orphans(&mut transaction).await?;
        transaction.commit().await.map_err(failed())?;
        Ok(deleted > 0)
    }
}

fn version_row(row: &SqliteRow) -> VersionRow {
    VersionRow {
        version: row.get::<i64, _>(1) as u64,
        is_in_force: row.get(6),
        agent: AgentRow {
            name: row.get(0),
            manifest: row.get(2),
            digest: row.get(3),
            deployed_at_ms: row.get::<i64, _>(4) as u64,
            deployed_by: row.get(5),
        },
    }
}

async fn drop_orphans(transaction: &mut sqlx::SqliteConnection) -> Result<(), StoreError> {
    query("DELETE FROM components WHERE digest NOT IN (SELECT digest FROM deployments)")
        .execute(transaction)
        .await
        .map_err(StoreError::while_it("removed components that no version uses"))?;
    Ok(())
}
