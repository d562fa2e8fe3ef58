//! Log lines of agents. Each agent keeps [`LINES_PER_AGENT`] lines, and up to [`SPARE_LINES`] more until they
//! are trimmed. Trimming removes the oldest lines of the tenant that has the most, so that a tenant whose
//! turns log a lot does not push out the lines of others.
//!
//! A commit counts only the lines that came after the last count of all lines of its agent, whichever host has written them.

use crate::{
    SessionFolder, Store, StoreError,
    line_counts::{LineCount, LineCounts},
    row_groups::bounded,
    sql::{AssertSqlSafe, Connection, Dialect, GivenRows, QueryBuilder, Row, query, query_as, query_scalar},
};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BinaryHeap},
};

/// Number of lines kept per agent.
pub(crate) const LINES_PER_AGENT: i64 = 10_000;
/// Number of additional lines before all lines are counted again, which takes milliseconds.
pub(crate) const SPARE_LINES: i64 = 200;

/// A new log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    pub at_ms: u64,
    pub level: String,
    pub message: String,
}

/// A stored log line. Ids grow, so a reader can ask for lines after the last one that it saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRow {
    pub id: i64,
    pub agent: String,
    pub session: String,
    pub turn: u64,
    pub entry: LogEntry,
}

/// A selection of log lines; `default` selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFilter {
    pub agent: Option<String>,
    pub session: Option<String>,
    /// Selects the sessions in this folder. Lines without a session belong to the folder of ids without a
    /// slash.
    pub folder: Option<SessionFolder>,
    /// Selects lines that were logged at this time or later.
    pub since_ms: Option<u64>,
    /// Selects lines with one of these levels; an empty list selects all levels.
    pub levels: Vec<&'static str>,
}

impl LogFilter {
    /// Selects all lines of an agent.
    pub fn of_agent(agent: &str) -> Self {
        LogFilter { agent: Some(agent.to_owned()), ..LogFilter::default() }
    }
}

impl Store {
    /// Stores lines outside a commit: lines of a turn that failed, or of no turn (0).
    pub async fn append_logs(
        &self,
        agent: &str,
        session: &str,
        turn: u64,
        entries: &[LogEntry],
    ) -> Result<(), StoreError> {
        self.write(
            (agent.to_owned(), session.to_owned(), turn, entries.to_vec(), self.line_counts.clone()),
            |connection, (agent, session, turn, entries, counts)| {
                Box::pin(async move {
                    let lines = TurnLines { agent, session, turn: *turn, lines: entries };
                    insert(connection, counts, &[lines]).await
                })
            },
        )
        .await
    }

    /// Forgets how many lines a deleted agent had. The host that deletes it needs no further call.
    pub fn forget_line_count(&self, agent: &str) {
        self.line_counts.forget(agent);
    }

    /// Returns at most `limit` lines with an id greater than `after_id`, the oldest first. Without
    /// `after_id`, returns the newest lines.
    pub async fn logs(
        &self,
        filter: &LogFilter,
        after_id: Option<i64>,
        limit: u32,
    ) -> Result<Vec<LogRow>, StoreError> {
        let mut select =
            QueryBuilder::new("SELECT id, agent, session, turn, at_ms, level, message FROM logs WHERE id > ");
        select.push_bind(after_id.unwrap_or(0));
        if let Some(agent) = &filter.agent {
            select.push(" AND agent = ").push_bind(agent);
        }
        if let Some(session) = &filter.session {
            select.push(" AND session = ").push_bind(session);
        }
        if let Some(SessionFolder { begin, end, has_slash }) = &filter.folder {
            select.push(" AND session >= ").push_bind(begin).push(" AND session < ").push_bind(end);
            select.push(if *has_slash { "" } else { " AND instr(session, '/') = 0" });
        }
        if let Some(since_ms) = filter.since_ms {
            select.push(" AND at_ms >= ").push_bind(since_ms as i64);
        }
        if !filter.levels.is_empty() {
            select.push(" AND level IN (");
            let mut levels = select.separated(", ");
            for level in &filter.levels {
                levels.push_bind(level);
            }
            select.push(")");
        }
        select.push(if after_id.is_some() { " ORDER BY id LIMIT " } else { " ORDER BY id DESC LIMIT " });
        select.push_bind(limit);
        let rows = select.build().fetch_all(&self.readers).await;
        let rows = rows.map_err(StoreError::while_it("read log lines"))?;
        let mut lines: Vec<LogRow> = rows.into_iter().map(log_row).collect();
        if after_id.is_none() {
            lines.reverse();
        }
        Ok(lines)
    }

    /// Returns the id of the newest line of any agent, or 0 if there are none.
    pub async fn newest_log_id(&self) -> Result<i64, StoreError> {
        let row = query("SELECT coalesce(max(id), 0) FROM logs").fetch_one(&self.readers).await;
        Ok(row.map_err(StoreError::while_it("read the newest log line"))?.get(0))
    }
}

fn log_row(row: Row) -> LogRow {
    LogRow {
        id: row.get(0),
        agent: row.get(1),
        session: row.get(2),
        turn: row.get::<i64>(3) as u64,
        entry: LogEntry { at_ms: row.get::<i64>(4) as u64, level: row.get(5), message: row.get(6) },
    }
}

/// The lines of one turn.
pub(crate) struct TurnLines<'l> {
    pub(crate) agent: &'l str,
    pub(crate) session: &'l str,
    pub(crate) turn: u64,
    pub(crate) lines: &'l [LogEntry],
}

pub(crate) async fn insert(
    connection: &mut Connection,
    counts: &LineCounts,
    turns: &[TurnLines<'_>],
) -> Result<(), StoreError> {
    let dialect = connection.dialect();
    let mut lines = Vec::new();
    for TurnLines { agent, session, turn, lines: of_turn } in turns {
        lines.extend(of_turn.iter().map(|line| (*agent, *session, *turn as i64, line)));
    }
    for rows in bounded(&lines, |(.., line)| line.message.len()) {
        let rows = GivenRows::new()
            .column("agent", rows.iter().map(|(agent, ..)| *agent))
            .column("session", rows.iter().map(|(_, session, ..)| *session))
            .column("turn", rows.iter().map(|(_, _, turn, _)| *turn))
            .column("at_ms", rows.iter().map(|(.., line)| line.at_ms as i64))
            .column("level", rows.iter().map(|(.., line)| &line.level))
            .column("message", rows.iter().map(|(.., line)| stored(&line.message, dialect)));
        let columns = "agent, session, turn, at_ms, level, message";
        let insert = format!("INSERT INTO logs ({columns}) SELECT {columns} FROM");
        let insert = rows.query(dialect, &insert, "ORDER BY place");
        insert.execute(&mut *connection).await.map_err(StoreError::while_it("stored log lines"))?;
    }
    let mut written: BTreeMap<&str, i64> = BTreeMap::new();
    lines.iter().for_each(|(agent, ..)| *written.entry(*agent).or_default() += 1);
    for (agent, written) in written {
        if has_surplus(connection, counts, agent, written).await? {
            trim(connection, agent).await?;
        }
    }
    Ok(())
}

/// Returns the text that the database stores.
fn stored(message: &str, dialect: Dialect) -> Cow<'_, str> {
    match dialect {
        // PostgreSQL has no texts with this character, and a log line is worth more than its exact bytes.
        Dialect::Postgres if message.contains('\0') => Cow::Owned(message.replace('\0', "\u{fffd}")),
        _ => Cow::Borrowed(message),
    }
}

/// Returns whether an agent has too many lines after this number was written. Counts all of them only if those that came after
/// the last count may be too many.
async fn has_surplus(
    connection: &mut Connection,
    counts: &LineCounts,
    agent: &str,
    written: i64,
) -> Result<bool, StoreError> {
    let failed = || StoreError::while_it("counted log lines");
    if let Some(last) = counts.last(agent) {
        let later: i64 = query_scalar("SELECT COUNT(*) FROM logs WHERE agent = ? AND id > ?")
            .bind(agent)
            .bind(last.newest)
            .fetch_one(&mut *connection)
            .await
            .map_err(failed())?;
        // SQLite gives the ids of lines that were rolled back to others, which the count of later lines misses.
        let has_all = later >= written;
        if has_all && later < SPARE_LINES && last.lines + later <= LINES_PER_AGENT + SPARE_LINES {
            return Ok(false);
        }
    }
    let (lines, newest): (i64, i64) =
        query_as("SELECT COUNT(*), COALESCE(MAX(id), 0) FROM logs WHERE agent = ?")
            .bind(agent)
            .fetch_one(connection)
            .await
            .map_err(failed())?;
    if lines <= LINES_PER_AGENT + SPARE_LINES {
        counts.record(agent, LineCount { lines, newest });
        return Ok(false);
    }
    // The next commit counts again, because this one may be rolled back, and other hosts may have locked some lines.
    counts.forget(agent);
    Ok(true)
}

/// Removes the lines of an agent that are more than it keeps.
async fn trim(connection: &mut Connection, agent: &str) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("trimmed log lines");
    let rows = query(
        "SELECT substr(session, 1, instr(session, '/')) AS folder, COUNT(*) FROM logs WHERE agent = ? GROUP BY folder",
    )
    .bind(agent)
    .fetch_all(&mut *connection)
    .await
    .map_err(failed())?;
    let folders: Vec<(String, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let lines: Vec<i64> = folders.iter().map(|(_, lines)| *lines).collect();
    // Another host that trims the same lines is not waited for, and not joined by removing younger ones.
    let trim = format!(
        "DELETE FROM logs WHERE id IN (SELECT id FROM logs WHERE id IN (SELECT id FROM logs WHERE agent = ?1
             AND substr(session, 1, instr(session, '/')) = ?2 ORDER BY id LIMIT ?3) {})",
        connection.dialect().skip_locked()
    );
    for ((folder, _), surplus) in folders.iter().zip(surplus_of_each(&lines)) {
        if surplus > 0 {
            query(AssertSqlSafe(trim.clone()))
                .bind(agent)
                .bind(folder)
                .bind(surplus)
                .execute(&mut *connection)
                .await
                .map_err(failed())?;
        }
    }
    Ok(())
}

/// Returns the number of lines that each tenant with these numbers of lines loses. Those that have the most lose lines until they
/// have no more than the others.
fn surplus_of_each(lines: &[i64]) -> Vec<i64> {
    let mut surplus = lines.iter().sum::<i64>() - LINES_PER_AGENT;
    let mut gone = vec![0; lines.len()];
    let mut tenants: BinaryHeap<(i64, usize)> = lines.iter().copied().zip(0..).collect();
    while surplus > 0
        && let Some((lines, tenant)) = tenants.pop()
    {
        let next = tenants.peek().map_or(0, |(lines, _)| *lines);
        // Remove just enough lines that this tenant no longer has the most.
        let fewer = surplus.min((lines - next).max(1));
        gone[tenant] += fewer;
        surplus -= fewer;
        tenants.push((lines - fewer, tenant));
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tenants_with_the_most_lines_lose_the_surplus() {
        for (lines, expected) in [
            (vec![LINES_PER_AGENT], vec![0]),
            (vec![LINES_PER_AGENT + 300], vec![300]),
            (vec![6_000, 3_000, 2_000], vec![1_000, 0, 0]),
            (vec![2_000, 8_000, 4_000], vec![0, 4_000, 0]),
            (vec![2_000, 5_000, 4_002], vec![0, 1_000, 2]),
            (vec![], vec![]),
        ] {
            assert_eq!(surplus_of_each(&lines), expected, "{lines:?}");
        }
    }
}
