//! Webhooks: addresses that events are sent to.

use crate::{Store, StoreError, rows};
use sqlx::{Row, SqliteConnection, query, sqlite::SqliteRow};

/// A subscription of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookRow {
    pub id: String,
    pub url: String,
    /// Patterns, one a line.
    pub topics: String,
    /// What its messages are signed with, as only the host can read it.
    pub sealed_secret: String,
    /// The operator's configuration names it; otherwise it was added while the host ran.
    pub configured: bool,
    pub created_at_ms: u64,
    /// Why nothing is sent to it any more.
    pub disabled: Option<String>,
}

impl Store {
    /// Adds a webhook, or puts it in the place of the one with its id, which keeps the deliveries on their way to it.
    pub async fn put_webhook(&self, webhook: &WebhookRow) -> Result<(), StoreError> {
        self.write(webhook.clone(), |connection, webhook| Box::pin(put(connection, webhook))).await
    }

    /// All of them, the oldest first.
    pub async fn webhooks(&self) -> Result<Vec<WebhookRow>, StoreError> {
        let rows = query(
            "SELECT id, url, topics, secret, configured, created_at_ms, disabled FROM webhooks
             ORDER BY created_at_ms, id",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed webhooks"))?;
        Ok(rows::readable(&rows, "webhook", webhook_row))
    }

    /// Removes a webhook with all deliveries to it. Whether it was there.
    pub async fn delete_webhook(&self, id: &str) -> Result<bool, StoreError> {
        self.write(id.to_owned(), |connection, id| {
            Box::pin(async move {
                let deleted = query("DELETE FROM webhooks WHERE id = ?")
                    .bind(id)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("deleted a webhook"))?;
                Ok(deleted.rows_affected() > 0)
            })
        })
        .await
    }
}

async fn put(connection: &mut SqliteConnection, webhook: &WebhookRow) -> Result<(), StoreError> {
    let WebhookRow { id, url, topics, sealed_secret, configured, created_at_ms, disabled } = webhook;
    query(
        "INSERT INTO webhooks (id, url, topics, secret, configured, created_at_ms, disabled)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO UPDATE
         SET url = ?2, topics = ?3, secret = ?4, configured = ?5, disabled = ?7",
    )
    .bind(id)
    .bind(url)
    .bind(topics)
    .bind(sealed_secret)
    .bind(configured)
    .bind(*created_at_ms as i64)
    .bind(disabled)
    .execute(connection)
    .await
    .map_err(StoreError::while_it("stored a webhook"))?;
    Ok(())
}

fn webhook_row(row: &SqliteRow) -> Result<WebhookRow, sqlx::Error> {
    Ok(WebhookRow {
        id: row.try_get(0)?,
        url: row.try_get(1)?,
        topics: row.try_get(2)?,
        sealed_secret: row.try_get(3)?,
        configured: row.try_get(4)?,
        created_at_ms: row.try_get::<i64, _>(5)? as u64,
        disabled: row.try_get(6)?,
    })
}
