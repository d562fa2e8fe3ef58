//! Webhooks: URLs that events are sent to.

use crate::{
    Store, StoreError,
    notices::{self, NoticeKind},
    rows,
    sql::{Connection, Row, query},
};

/// A webhook and its subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookRow {
    pub id: String,
    pub url: String,
    /// The topic patterns, one per line.
    pub topics: String,
    /// The key that its messages are signed with, sealed so that only the host can read it.
    pub sealed_secret: String,
    /// Whether it comes from the operator's configuration; otherwise it was added while the host was running.
    pub configured: bool,
    pub created_at_ms: u64,
    /// Why events are no longer sent to it.
    pub disabled: Option<String>,
    /// The outcome of the last attempt, as stored by [`Store::note_webhook_try`].
    pub last_try: Option<WebhookTry>,
}

/// The outcome of an attempt to send something to a webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookTry {
    pub at_ms: u64,
    /// Status of the HTTP response, if there was one.
    pub status: Option<u16>,
    /// The error; `None` if the webhook accepted the message.
    pub error: Option<String>,
}

/// The events in flight to a webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookQueue {
    pub webhook: String,
    /// Number of events that wait or are being sent.
    pub waiting: u64,
    /// The time of the next attempt.
    pub next_try_at_ms: u64,
}

impl Store {
    /// Adds a webhook, or replaces the one with the same id, which keeps its last attempt and its deliveries
    /// in flight.
    pub async fn put_webhook(&self, webhook: &WebhookRow) -> Result<(), StoreError> {
        self.write_common(webhook.clone(), |connection, webhook| Box::pin(put(connection, webhook))).await
    }

    /// Returns all webhooks, the oldest first.
    pub async fn webhooks(&self) -> Result<Vec<WebhookRow>, StoreError> {
        let rows = query(
            "SELECT id, url, topics, secret, configured, created_at_ms, disabled, tried_at_ms, last_status, last_error
             FROM webhooks ORDER BY created_at_ms, id",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed webhooks"))?;
        Ok(rows::readable(&rows, "webhook", webhook_row))
    }

    /// Stores the outcome of the last attempt. Does nothing if the webhook no longer exists.
    pub async fn note_webhook_try(&self, id: &str, last: &WebhookTry) -> Result<(), StoreError> {
        self.write((id.to_owned(), last.clone()), |connection, (id, last)| {
            Box::pin(async move {
                let WebhookTry { at_ms, status, error } = last;
                query("UPDATE webhooks SET tried_at_ms = ?2, last_status = ?3, last_error = ?4 WHERE id = ?1")
                    .bind(id)
                    .bind(*at_ms as i64)
                    .bind(status)
                    .bind(error)
                    .execute(connection)
                    .await
                    .map(drop)
                    .map_err(StoreError::while_it("recorded an attempt of a webhook"))
            })
        })
        .await
    }

    /// Returns the queues of the webhooks that have events in flight.
    pub async fn webhook_queues(&self) -> Result<Vec<WebhookQueue>, StoreError> {
        let rows = query(
            "SELECT webhook, COUNT(*), MIN(wake_ms) FROM deliveries WHERE webhook IS NOT NULL AND state IN (0, 1)
             GROUP BY webhook",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("counted events in flight to webhooks"))?;
        let queue = |row: &Row| WebhookQueue {
            webhook: row.get(0),
            waiting: row.get::<i64>(1) as u64,
            next_try_at_ms: row.get::<i64>(2) as u64,
        };
        Ok(rows.iter().map(queue).collect())
    }

    /// Removes a webhook with all its deliveries. Returns whether it existed.
    pub async fn delete_webhook(&self, id: &str) -> Result<bool, StoreError> {
        self.write_common(id.to_owned(), |connection, id| {
            Box::pin(async move {
                let deleted = query("DELETE FROM webhooks WHERE id = ?")
                    .bind(id)
                    .execute(&mut *connection)
                    .await
                    .map_err(StoreError::while_it("deleted a webhook"))?;
                if deleted.rows_affected() == 0 {
                    return Ok(false);
                }
                notices::raise(connection, NoticeKind::Webhooks).await?;
                Ok(true)
            })
        })
        .await
    }
}

pub(crate) async fn put(connection: &mut Connection, webhook: &WebhookRow) -> Result<(), StoreError> {
    let WebhookRow { id, url, topics, sealed_secret, configured, created_at_ms, disabled, last_try: _ } =
        webhook;
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
    .execute(&mut *connection)
    .await
    .map_err(StoreError::while_it("stored a webhook"))?;
    notices::raise(connection, NoticeKind::Webhooks).await
}

fn webhook_row(row: &Row) -> Result<WebhookRow, sqlx::Error> {
    Ok(WebhookRow {
        id: row.try_get(0)?,
        url: row.try_get(1)?,
        topics: row.try_get(2)?,
        sealed_secret: row.try_get(3)?,
        configured: row.try_get(4)?,
        created_at_ms: row.try_get::<i64>(5)? as u64,
        disabled: row.try_get(6)?,
        last_try: match row.try_get::<Option<i64>>(7)? {
            Some(at_ms) => {
                Some(WebhookTry { at_ms: at_ms as u64, status: row.try_get(8)?, error: row.try_get(9)? })
            }
            None => None,
        },
    })
}
