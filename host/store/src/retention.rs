//! What is forgotten after a while, a few rows at once.

use crate::{Store, StoreError, events};
use sqlx::query;

/// Rows that one statement removes.
const PIECE_ROWS: i64 = 200;

impl Store {
    /// Forgets what was answered to idempotency keys before `before_ms`. How many there were. Of those that an early version
    /// wrote nobody knows the time: they count as written now.
    pub async fn forget_outcomes(&self, before_ms: u64, now_ms: u64) -> Result<u64, StoreError> {
        self.in_pieces(now_ms, |connection, now_ms| {
            Box::pin(async move {
                let dated = query(
                    "UPDATE outcomes SET at_ms = ? WHERE rowid IN (SELECT rowid FROM outcomes WHERE at_ms = 0 LIMIT ?)",
                )
                .bind((*now_ms).max(1) as i64)
                .bind(PIECE_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("dated what was answered"))?;
                Ok(dated.rows_affected())
            })
        })
        .await?;
        self.in_pieces(before_ms, |connection, before_ms| {
            Box::pin(async move {
                let gone = query(
                    "DELETE FROM outcomes WHERE rowid IN (SELECT rowid FROM outcomes WHERE at_ms < ? LIMIT ?)",
                )
                .bind(*before_ms as i64)
                .bind(PIECE_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("forgot what was answered long ago"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }

    /// Forgets events whose deliveries are over, and dead letters, when they are old enough. Writing an event does the same
    /// from time to time; this is for a host on which nothing happens. `before` is the time from which on so many
    /// milliseconds went by.
    pub async fn forget_events(&self, before: impl Fn(u64) -> u64) -> Result<u64, StoreError> {
        let bounds = events::Bounds::of(before);
        let mut gone = 0;
        loop {
            let _permit = self.piecework().await?;
            let pruned =
                self.write(bounds, |connection, bounds| Box::pin(events::prune(connection, *bounds))).await?;
            gone += pruned.gone;
            if pruned.is_through {
                return Ok(gone);
            }
        }
    }
}
