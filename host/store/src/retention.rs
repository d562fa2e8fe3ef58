//! Removal of rows that are kept only for a while, a few rows at a time.

use crate::{
    Store, StoreError, events,
    sql::{AssertSqlSafe, query},
};

/// Number of rows that one statement removes.
const CHUNK_ROWS: i64 = 200;

impl Store {
    /// Removes the outcomes of idempotency keys from before `before_ms`. Returns their number. Outcomes
    /// written by an early version have no time and are dated `now_ms`.
    pub async fn forget_outcomes(&self, before_ms: u64, now_ms: u64) -> Result<u64, StoreError> {
        self.in_chunks(now_ms, |connection, now_ms| {
            Box::pin(async move {
                let dated = query(
                    "UPDATE outcomes SET at_ms = ? WHERE (session, idempotency_key) IN
                         (SELECT session, idempotency_key FROM outcomes WHERE at_ms = 0 LIMIT ?)",
                )
                .bind((*now_ms).max(1) as i64)
                .bind(CHUNK_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("set the time of outcomes without one"))?;
                Ok(dated.rows_affected())
            })
        })
        .await?;
        self.in_chunks(before_ms, |connection, before_ms| {
            Box::pin(async move {
                let gone = query(
                    "DELETE FROM outcomes WHERE (session, idempotency_key) IN
                         (SELECT session, idempotency_key FROM outcomes WHERE at_ms < ? LIMIT ?)",
                )
                .bind(*before_ms as i64)
                .bind(CHUNK_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("removed old outcomes"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }

    /// Removes turns that ended before `before_ms`, with what was shown of them. Returns their number.
    pub async fn forget_turns(&self, before_ms: u64) -> Result<u64, StoreError> {
        self.in_chunks(before_ms, |connection, before_ms| {
            Box::pin(async move {
                // Other hosts remove old turns, too.
                let old = format!(
                    "DELETE FROM turns WHERE key IN (SELECT key FROM turns WHERE ended_at_ms < ? LIMIT ? {})",
                    connection.dialect().skip_locked()
                );
                let old = query(AssertSqlSafe(old)).bind(*before_ms as i64).bind(CHUNK_ROWS);
                let gone =
                    old.execute(connection).await.map_err(StoreError::while_it("removed old turns"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }

    /// Removes the tokens of days before `before_day`, a day in UTC since 1970. Returns the number of counts.
    pub async fn forget_token_use(&self, before_day: u32) -> Result<u64, StoreError> {
        self.in_chunks(before_day, |connection, before_day| {
            Box::pin(async move {
                let old = format!(
                    "DELETE FROM token_use WHERE (day, tenant, agent) IN
                         (SELECT day, tenant, agent FROM token_use WHERE day < ? LIMIT ? {})",
                    connection.dialect().skip_locked()
                );
                let old = query(AssertSqlSafe(old)).bind(*before_day).bind(CHUNK_ROWS);
                let gone = old.execute(connection).await;
                let gone = gone.map_err(StoreError::while_it("removed the tokens of old days"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }

    /// Removes events whose deliveries are finished, and dead letters, when they are old enough. `before` returns
    /// the time of day that lies this many milliseconds in the past.
    pub async fn forget_events(&self, before: impl Fn(u64) -> u64) -> Result<u64, StoreError> {
        let bounds = events::Bounds::of(before);
        let mut gone = 0;
        loop {
            let _permit = self.chunked_write_permit().await?;
            let pruned = self
                .write_common(bounds, |connection, bounds| Box::pin(events::prune(connection, *bounds)))
                .await?;
            gone += pruned.gone;
            if pruned.is_through {
                return Ok(gone);
            }
        }
    }
}
