//! The host's record of its clock, and corrections of rows whose times lie in the future after the clock was
//! set back.

use crate::{
    ScheduleRow, Store, StoreError, rows, schedules,
    sql::{AssertSqlSafe, Row, query, query_scalar},
};

/// Number of rows that one statement changes.
const CHUNK_ROWS: i64 = 500;

/// The state of the clock that the previous host recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClockRow {
    /// The time of the last record.
    pub seen_ms: u64,
    /// Times of day that were skipped, each as a start and an exclusive end.
    pub skips: Vec<(u64, u64)>,
}

impl Store {
    /// Returns the record of the previous host, or `None` in a new database.
    pub async fn clock(&self) -> Result<Option<ClockRow>, StoreError> {
        let failed = || StoreError::while_it("read the clock's record");
        let seen: Option<i64> =
            query_scalar("SELECT MAX(seen_ms) FROM clock").fetch_one(&self.readers).await.map_err(failed())?;
        let Some(seen_ms) = seen else { return Ok(None) };
        let rows = query("SELECT from_ms, to_ms FROM clock_skips ORDER BY from_ms")
            .fetch_all(&self.readers)
            .await
            .map_err(failed())?;
        let skip = |row: &Row| (row.get::<i64>(0) as u64, row.get::<i64>(1) as u64);
        Ok(Some(ClockRow { seen_ms: seen_ms as u64, skips: rows.iter().map(skip).collect() }))
    }

    /// Replaces the record in one transaction.
    pub async fn put_clock(&self, clock: ClockRow) -> Result<(), StoreError> {
        self.write_common(clock, |connection, clock| {
            Box::pin(async move {
                let failed = || StoreError::while_it("wrote the clock's record");
                for sql in ["DELETE FROM clock", "DELETE FROM clock_skips"] {
                    query(sql).execute(&mut *connection).await.map_err(failed())?;
                }
                query("INSERT INTO clock (seen_ms) VALUES (?)")
                    .bind(clock.seen_ms as i64)
                    .execute(&mut *connection)
                    .await
                    .map_err(failed())?;
                for (from_ms, to_ms) in &clock.skips {
                    query(
                        "INSERT INTO clock_skips (from_ms, to_ms) VALUES (?, ?)
                         ON CONFLICT (from_ms) DO UPDATE SET to_ms = excluded.to_ms",
                    )
                    .bind(*from_ms as i64)
                    .bind(*to_ms as i64)
                    .execute(&mut *connection)
                    .await
                    .map_err(failed())?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Resets sessions of an agent that were used after `now_ms` to `now_ms`. Returns their number.
    pub async fn clamp_session_times(&self, agent: &str, now_ms: u64) -> Result<u64, StoreError> {
        let later: bool =
            query_scalar("SELECT EXISTS (SELECT 1 FROM sessions WHERE agent = ? AND updated_at_ms > ?)")
                .bind(agent)
                .bind(now_ms as i64)
                .fetch_one(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for sessions with a time in the future"))?;
        if !later {
            return Ok(0);
        }
        self.in_chunks((agent.to_owned(), now_ms), |connection, (agent, now_ms)| {
            Box::pin(async move {
                let moved = query(
                    "UPDATE sessions SET updated_at_ms = ?2 WHERE key IN
                         (SELECT key FROM sessions WHERE agent = ?1 AND updated_at_ms > ?2 LIMIT ?3)",
                )
                .bind(agent.as_str())
                .bind(*now_ms as i64)
                .bind(CHUNK_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("reset sessions with a time in the future"))?;
                Ok(moved.rows_affected())
            })
        })
        .await
    }

    /// Returns schedules that wait for a time after `now_ms`, ordered by id, from `after` on.
    pub async fn later_schedules(
        &self,
        now_ms: u64,
        after: &str,
        limit: u32,
    ) -> Result<Vec<ScheduleRow>, StoreError> {
        let sql = format!(
            "SELECT {} FROM schedules WHERE state = 0 AND wake_ms > ? AND id > ? ORDER BY id LIMIT ?",
            schedules::COLUMNS
        );
        let rows = query(AssertSqlSafe(sql))
            .bind(now_ms as i64)
            .bind(after)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for schedules with a time in the future"))?;
        Ok(rows::readable(&rows, "schedule", schedules::schedule_row))
    }

    /// Sets another due time for a schedule that waits and is due at `row.schedule.due_ms`.
    pub async fn move_schedule(
        &self,
        row: &ScheduleRow,
        due_ms: u64,
        wake_ms: u64,
    ) -> Result<(), StoreError> {
        let (id, from_ms) = (row.schedule.id.clone(), row.schedule.due_ms);
        self.write_common((id, from_ms, due_ms, wake_ms), |connection, (id, from_ms, due_ms, wake_ms)| {
            Box::pin(async move {
                query(
                    "UPDATE schedules SET due_ms = ?, wake_ms = ? WHERE id = ? AND due_ms = ? AND state = 0",
                )
                .bind(*due_ms as i64)
                .bind(*wake_ms as i64)
                .bind(id.as_str())
                .bind(*from_ms as i64)
                .execute(connection)
                .await
                .map(drop)
                .map_err(StoreError::while_it("moved a schedule"))
            })
        })
        .await
    }

    /// Resets approval requests that were created after `now_ms` to `now_ms`.
    pub async fn clamp_approval_times(&self, now_ms: u64) -> Result<(), StoreError> {
        self.in_chunks(now_ms, |connection, now_ms| {
            Box::pin(async move {
                let moved = query(
                    "UPDATE approvals SET created_at_ms = ?1, expires_at_ms = ?1 + expires_at_ms - created_at_ms
                     WHERE id IN (SELECT id FROM approvals WHERE verdict IS NULL AND created_at_ms > ?1 LIMIT ?2)",
                )
                .bind(*now_ms as i64)
                .bind(CHUNK_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("reset approvals with a time in the future"))?;
                Ok(moved.rows_affected())
            })
        })
        .await
        .map(drop)
    }

    /// Sets the next attempt of deliveries and batch items that wait until after `latest_ms` to `now_ms`.
    pub async fn clamp_retry_times(&self, latest_ms: u64, now_ms: u64) -> Result<(), StoreError> {
        for sql in [
            "UPDATE deliveries SET wake_ms = ?2 WHERE key IN
                 (SELECT key FROM deliveries WHERE state = 0 AND wake_ms > ?1 LIMIT ?3)",
            "UPDATE batch_items SET wake_ms = ?2 WHERE (batch, position) IN
                 (SELECT batch, position FROM batch_items WHERE state = 0 AND wake_ms > ?1 LIMIT ?3)",
        ] {
            self.in_chunks((sql, latest_ms, now_ms), |connection, (sql, latest_ms, now_ms)| {
                Box::pin(async move {
                    let moved = query(*sql)
                        .bind(*latest_ms as i64)
                        .bind(*now_ms as i64)
                        .bind(CHUNK_ROWS)
                        .execute(connection)
                        .await
                        .map_err(StoreError::while_it("reset attempts with a time in the future"))?;
                    Ok(moved.rows_affected())
                })
            })
            .await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_clock_record_is_read_back() {
        let store = Store::for_tests().await.expect("a database in memory");
        assert_eq!(store.clock().await.expect("read"), None);
        for clock in [
            ClockRow { seen_ms: 70, skips: vec![(10, 20), (30, 50)] },
            ClockRow { seen_ms: 60, skips: Vec::new() },
        ] {
            store.put_clock(clock.clone()).await.expect("written");
            assert_eq!(store.clock().await.expect("read"), Some(clock));
        }
    }
}
