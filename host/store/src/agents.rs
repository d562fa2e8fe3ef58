//! Deployed agents and their components.
//!
//! A component is stored once under its digest, however many agents share it, and goes with the last of them.

use crate::{Store, StoreError};
use sqlx::{Row, query};

/// One deployed agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentRow {
    pub name: String,
    /// The text of its `agent.toml`.
    pub manifest: String,
    /// SHA-256 of the component, in hex.
    pub digest: String,
    pub deployed_at_ms: u64,
}

impl Store {
    /// Stores an agent with its component. An agent of this name is replaced and keeps its sessions.
    pub async fn put_agent(&self, agent: &AgentRow, component: &[u8]) -> Result<(), StoreError> {
        let failed = || StoreError::while_it("stored an agent");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        query("INSERT INTO components (digest, bytes) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING")
            .bind(&agent.digest)
            .bind(component)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?;
        query(
            "INSERT INTO agents (name, manifest, digest, deployed_at_ms) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (name) DO UPDATE SET manifest = ?2, digest = ?3, deployed_at_ms = ?4",
        )
        .bind(&agent.name)
        .bind(&agent.manifest)
        .bind(&agent.digest)
        .bind(agent.deployed_at_ms as i64)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
        drop_orphans(&mut transaction).await?;
        transaction.commit().await.map_err(failed())
    }

    /// All agents, by name.
    pub async fn agents(&self) -> Result<Vec<AgentRow>, StoreError> {
        let rows = query("SELECT name, manifest, digest, deployed_at_ms FROM agents ORDER BY name")
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed agents"))?;
        Ok(rows
            .into_iter()
            .map(|row| AgentRow {
                name: row.get(0),
                manifest: row.get(1),
                digest: row.get(2),
                deployed_at_ms: row.get::<i64, _>(3) as u64,
            })
            .collect())
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

    /// Removes an agent with its sessions, logs and, if no other agent shares it, its component. Whether it was there.
    pub async fn delete_agent(&self, agent: &str) -> Result<bool, StoreError> {
        let failed = || StoreError::while_it("deleted an agent");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        let deleted = query("DELETE FROM agents WHERE name = ?")
            .bind(agent)
            .execute(&mut *transaction)
            .await
            .map_err(failed())?
            .rows_affected();
        drop_orphans(&mut transaction).await?;
        transaction.commit().await.map_err(failed())?;
        Ok(deleted > 0)
    }
}

async fn drop_orphans(transaction: &mut sqlx::SqliteConnection) -> Result<(), StoreError> {
    query("DELETE FROM components WHERE digest NOT IN (SELECT digest FROM agents)")
        .execute(transaction)
        .await
        .map_err(StoreError::while_it("removed components that no agent uses"))?;
    Ok(())
}
