//! Secrets of agents. They are sealed by the caller; this crate cannot read them.

use crate::{
    Store, StoreError, WebhookRow,
    notices::{self, NoticeKind},
    rows,
    sql::{Connection, Row, query},
    webhooks,
};

/// A secret of one agent, or of all agents that are granted it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretRow {
    pub agent: Option<String>,
    pub name: String,
    /// The hosts that the secret may be sent to, as text.
    pub hosts: String,
    pub sealed: Vec<u8>,
    pub updated_at_ms: u64,
}

impl Store {
    /// Stores a secret, replacing one with the same agent and name.
    pub async fn put_secret(&self, secret: &SecretRow) -> Result<(), StoreError> {
        self.write_common(secret.clone(), |connection, secret| Box::pin(put(connection, secret))).await
    }

    /// Replaces secrets and webhooks, whose sealed values have changed, all together.
    pub async fn put_resealed(
        &self,
        secrets: Vec<SecretRow>,
        webhooks: Vec<WebhookRow>,
    ) -> Result<(), StoreError> {
        self.write_common((secrets, webhooks), |connection, (secrets, webhooks)| {
            Box::pin(async move {
                for secret in secrets {
                    put(connection, secret).await?;
                }
                for webhook in webhooks {
                    webhooks::put(connection, webhook).await?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Returns all secrets, by name.
    pub async fn secrets(&self) -> Result<Vec<SecretRow>, StoreError> {
        let rows =
            query("SELECT agent, name, hosts, sealed, updated_at_ms FROM secrets ORDER BY name, agent")
                .fetch_all(&self.readers)
                .await
                .map_err(StoreError::while_it("listed secrets"))?;
        Ok(rows::readable(&rows, "secret", secret_row))
    }

    /// Returns the secrets that an agent may use: those for all agents, except where it has its own with the
    /// same name.
    pub async fn secrets_for(&self, agent: &str) -> Result<Vec<SecretRow>, StoreError> {
        let rows = query(
            "SELECT agent, name, hosts, sealed, updated_at_ms FROM secrets WHERE agent = ?1
             UNION ALL
             SELECT agent, name, hosts, sealed, updated_at_ms FROM secrets WHERE agent = ''
                 AND name NOT IN (SELECT name FROM secrets WHERE agent = ?1)
             ORDER BY name",
        )
        .bind(agent)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("read the secrets of an agent"))?;
        Ok(rows::readable(&rows, "secret", secret_row))
    }

    /// Deletes a secret. Returns whether it existed.
    pub async fn delete_secret(&self, agent: Option<&str>, name: &str) -> Result<bool, StoreError> {
        self.write_common((agent.map(str::to_owned), name.to_owned()), |connection, (agent, name)| {
            Box::pin(async move {
                let deleted = query("DELETE FROM secrets WHERE agent = ? AND name = ?")
                    .bind(agent.as_deref().unwrap_or_default())
                    .bind(name)
                    .execute(&mut *connection)
                    .await
                    .map_err(StoreError::while_it("deleted a secret"))?;
                if deleted.rows_affected() == 0 {
                    return Ok(false);
                }
                notices::raise(connection, NoticeKind::Secrets).await?;
                Ok(true)
            })
        })
        .await
    }
}

fn secret_row(row: &Row) -> Result<SecretRow, sqlx::Error> {
    let agent: String = row.try_get(0)?;
    Ok(SecretRow {
        agent: (!agent.is_empty()).then_some(agent),
        name: row.try_get(1)?,
        hosts: row.try_get(2)?,
        sealed: row.try_get(3)?,
        updated_at_ms: row.try_get::<i64>(4)? as u64,
    })
}

async fn put(connection: &mut Connection, secret: &SecretRow) -> Result<(), StoreError> {
    let put = query(
        "INSERT INTO secrets (agent, name, hosts, sealed, updated_at_ms) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (agent, name) DO UPDATE SET hosts = ?3, sealed = ?4, updated_at_ms = ?5",
    )
    .bind(secret.agent.as_deref().unwrap_or_default())
    .bind(&secret.name)
    .bind(&secret.hosts)
    .bind(&secret.sealed)
    .bind(secret.updated_at_ms as i64)
    .execute(&mut *connection)
    .await;
    put.map_err(StoreError::while_it("stored a secret"))?;
    notices::raise(connection, NoticeKind::Secrets).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AgentRow;

    fn row(agent: Option<&str>, name: &str, sealed: &[u8]) -> SecretRow {
        let (agent, name) = (agent.map(str::to_owned), name.to_owned());
        SecretRow { agent, name, hosts: "[]".into(), sealed: sealed.to_vec(), updated_at_ms: 7 }
    }

    #[tokio::test]
    async fn an_agents_own_secret_overrides_the_shared_one() {
        let store = Store::for_tests().await.expect("a database");
        for secret in [
            row(None, "A", b"all"),
            row(None, "B", b"all"),
            row(Some("x"), "A", b"own"),
            row(Some("y"), "C", b"other"),
        ] {
            store.put_secret(&secret).await.expect("stored");
        }
        assert_eq!(
            store.secrets_for("x").await.expect("read"),
            [row(Some("x"), "A", b"own"), row(None, "B", b"all")]
        );
        store.put_secret(&row(None, "B", b"anew")).await.expect("stored");
        assert_eq!(
            store.secrets_for("z").await.expect("read"),
            [row(None, "A", b"all"), row(None, "B", b"anew")]
        );
        assert!(store.delete_secret(Some("x"), "A").await.expect("deletes"));
        assert!(!store.delete_secret(Some("x"), "A").await.expect("deletes"));
        assert_eq!(store.secrets_for("x").await.expect("read")[0], row(None, "A", b"all"));
        assert_eq!(store.secrets().await.expect("read").len(), 3);
    }

    #[tokio::test]
    async fn deleting_an_agent_deletes_its_secrets() {
        let store = Store::for_tests().await.expect("a database");
        let agent = AgentRow {
            name: "x".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "tester".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.expect("stored");
        for secret in [row(Some("x"), "A", b"own"), row(None, "A", b"all")] {
            store.put_secret(&secret).await.expect("stored");
        }
        store.delete_agent("x").await.expect("deletes");
        assert_eq!(store.secrets().await.expect("read"), [row(None, "A", b"all")]);
    }
}
