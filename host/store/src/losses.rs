//! Losses: how often a host died during a turn.
//!
//! A turn says whether a host runs it, or ran it when it died. A host that ends in order takes that back for all its turns, and
//! the host that resumes a turn says it again. A turn whose hosts die again and again may be the cause.

use crate::{
    Store, StoreError, TurnKey,
    hosts::{DRAINS, is_owned},
    sql::{AssertSqlSafe, Connection, query},
    turns::RUNNING,
};

impl Store {
    /// Counts a loss for each turn that was running when the last process died, unless that process shut down
    /// in an orderly way. The count restarts for a turn that has made progress since its last loss. Turns
    /// that wait for a person, or for a turn that they called, are not counted, because they did nothing. The
    /// idempotency key of such a call begins with `called`, the id of the calling turn, and a space. Records that
    /// match one of the `LIKE` patterns `aside` are no progress.
    ///
    /// In a cluster, a turn is lost when its session is taken from a host that is gone. Then this call only says how losses are
    /// counted.
    pub async fn count_losses(&self, called: &str, aside: &[&str]) -> Result<(), StoreError> {
        if let Some(membership) = &self.membership {
            membership.count_losses_by(called, aside);
            return Ok(());
        }
        let aside: Vec<String> = aside.iter().map(|pattern| (*pattern).to_owned()).collect();
        self.write((called.to_owned(), aside), |connection, (called, aside)| {
            Box::pin(async move {
                let ended = query("DELETE FROM ended_in_order").execute(&mut *connection).await;
                let ended = ended.map_err(StoreError::while_it("counted the turns that were lost"))?;
                if ended.rows_affected() == 0 {
                    count(connection, called, aside, "TRUE").await?;
                }
                leave(connection, "TRUE").await
            })
        })
        .await
    }

    /// Marks a turn that another process left as running in this process, so that it counts as lost if this
    /// process dies.
    pub async fn mark_turn_running_here(&self, turn: TurnKey) -> Result<(), StoreError> {
        self.write(turn, |connection, turn| {
            Box::pin(async move {
                query("UPDATE turns SET runs = TRUE WHERE key = ?")
                    .bind(turn.0)
                    .execute(connection)
                    .await
                    .map(drop)
                    .map_err(StoreError::while_it("resumed a turn"))
            })
        })
        .await
    }

    /// Records that the process shuts down in an orderly way, so that running turns do not count as lost. A host of a cluster
    /// releases all its sessions with this.
    pub async fn end_in_order(&self, at_ms: u64) -> Result<(), StoreError> {
        if let (Some(_), Some(host)) = (&self.membership, self.host) {
            return self
                .write_common(host, |connection, host| Box::pin(release_all(connection, *host)))
                .await;
        }
        self.write(at_ms, |connection, at_ms| {
            Box::pin(async move {
                query("INSERT INTO ended_in_order (at_ms) VALUES (?)")
                    .bind(*at_ms as i64)
                    .execute(connection)
                    .await
                    .map(drop)
                    .map_err(StoreError::while_it("recorded the shutdown of the host"))
            })
        })
        .await
    }
}

/// Number of the first parameter that is a pattern, in the statement below.
const FIRST_PATTERN: usize = 3;

/// Counts a loss for the turns that were running and whose host was lost. `which` is a condition on the row of the turn.
pub(crate) async fn count(
    connection: &mut Connection,
    called: &str,
    aside: &[String],
    which: &str,
) -> Result<(), StoreError> {
    let text = connection.dialect().pick("CAST(body AS TEXT)", "encode(body, 'escape')");
    let is_progress: String =
        (0..aside.len()).map(|index| format!(" AND {text} NOT LIKE ?{}", FIRST_PATTERN + index)).collect();
    let sql = format!(
        "UPDATE turns SET losses = CASE WHEN lost_at = reached.position THEN losses + 1 ELSE 1 END,
             lost_at = reached.position
         FROM (SELECT key AS turn, COALESCE((SELECT position FROM turn_records
                   WHERE turn_records.turn = turns.key{is_progress}
                   ORDER BY position DESC LIMIT 1), 0) AS position FROM turns
               WHERE ended_at_ms IS NULL AND {which}) AS reached
         WHERE turns.key = reached.turn AND state = ?1 AND runs
             AND NOT EXISTS (SELECT 1 FROM approvals WHERE approvals.turn = turns.key AND verdict IS NULL)
             AND NOT EXISTS (SELECT 1 FROM turns AS called WHERE called.ended_at_ms IS NULL
                 AND substr(called.idempotency_key, 1, length(?2 || turns.id) + 1) = ?2 || turns.id || ' ')",
    );
    let lost = query(AssertSqlSafe(sql)).bind(RUNNING).bind(called);
    let lost = aside.iter().fold(lost, |lost, pattern| lost.bind(pattern));
    let counted = lost.execute(connection).await;
    counted.map(drop).map_err(StoreError::while_it("counted the turns that were lost"))
}

/// Records that no host runs the open turns that meet a condition, until one resumes them.
pub(crate) async fn leave(connection: &mut Connection, which: &str) -> Result<(), StoreError> {
    let leave = format!("UPDATE turns SET runs = FALSE WHERE ended_at_ms IS NULL AND {which}");
    let left = query(AssertSqlSafe(leave)).execute(connection).await;
    left.map(drop).map_err(StoreError::while_it("left turns to other hosts"))
}

/// Releases the sessions of a host that ends.
async fn release_all(connection: &mut Connection, host: i64) -> Result<(), StoreError> {
    leave(connection, &is_owned("turns", host)).await?;
    let failed = || StoreError::while_it("recorded the shutdown of the host");
    let release = query("DELETE FROM session_owners WHERE host = ?").bind(host);
    release.execute(&mut *connection).await.map_err(failed())?;
    let drains = query("UPDATE hosts SET state = ? WHERE number = ?").bind(DRAINS).bind(host);
    drains.execute(connection).await.map(drop).map_err(failed())
}
