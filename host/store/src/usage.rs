//! The use of models by day, tenant, key, agent, session and model. Bills and daily budgets in money are based
//! on these counts.
//!
//! A turn's counts are written in the commit that ends the turn. The number of rows is bounded in time: the
//! rows of sessions become part of their agent's row after a while, or when the session is deleted, and all
//! rows are removed at last.

use crate::{
    Store, StoreError, TokenUse,
    chunks::Chunk,
    row_groups::bounded,
    rows,
    sql::{AssertSqlSafe, Connection, GivenRows, KeyPart, Row, query},
    token_use,
};
use std::collections::BTreeMap;

/// Number of rows that one statement merges or removes.
const CHUNK_ROWS: i64 = 200;

/// The use of one model by one source on one day.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageRow {
    /// The day, in UTC days since 1970.
    pub day: u32,
    pub tenant: String,
    /// Id of the key that sent the request; `None` if no key was needed or nobody sent a request.
    pub key: Option<String>,
    /// The agent; `None` if the tenant used a model directly.
    pub agent: Option<String>,
    /// The session of the agent; `None` without an agent, and for rows of sessions that were merged.
    pub session: Option<String>,
    pub model: String,
    pub counts: UsageCounts,
}

/// Sums over requests to models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageCounts {
    pub requests: u64,
    /// Tokens of prompts, cached ones included.
    pub input_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    /// Requests whose end is unknown, because they were cut off. Their tokens are estimates, which all other
    /// counts include.
    pub estimated_requests: u64,
    pub estimated_input_tokens: u64,
    pub estimated_output_tokens: u64,
    /// Tokens of prompts that another server wrote to its cache. `cached_tokens` does not include them.
    pub cache_write_tokens: u64,
}

/// The property by which rows are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageBy {
    Agent,
    Model,
    Tenant,
    Day,
    Key,
    Session,
}

/// The rows to be summed up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageFilter {
    pub tenant: Option<String>,
    pub first_day: u32,
    /// The last day, which is included.
    pub last_day: u32,
}

/// The use of one model by one group on one day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageSum {
    /// The agent of a session, if rows are grouped by session.
    pub agent: Option<String>,
    /// The value of the group; `None` for rows that have none.
    pub group: Option<String>,
    pub day: u32,
    pub model: String,
    pub counts: UsageCounts,
}

impl UsageCounts {
    /// Adds the counts of others; sums saturate instead of wrapping around.
    pub fn add(&mut self, other: &UsageCounts) {
        for (sum, more) in self.fields_mut().into_iter().zip(other.fields()) {
            *sum = sum.saturating_add(more);
        }
    }

    /// Returns the counts without a part of them.
    pub fn without(&self, part: &UsageCounts) -> Self {
        let mut rest = *self;
        for (count, less) in rest.fields_mut().into_iter().zip(part.fields()) {
            *count = count.saturating_sub(less);
        }
        rest
    }

    /// Returns the counts in the order of the table's columns.
    fn fields(&self) -> [u64; 8] {
        [
            self.requests,
            self.input_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.estimated_requests,
            self.estimated_input_tokens,
            self.estimated_output_tokens,
            self.cache_write_tokens,
        ]
    }

    /// Returns the counts as values of the table's columns.
    fn columns(&self) -> [i64; 8] {
        self.fields().map(|count| i64::try_from(count).unwrap_or(i64::MAX))
    }

    fn fields_mut(&mut self) -> [&mut u64; 8] {
        [
            &mut self.requests,
            &mut self.input_tokens,
            &mut self.cached_tokens,
            &mut self.output_tokens,
            &mut self.estimated_requests,
            &mut self.estimated_input_tokens,
            &mut self.estimated_output_tokens,
            &mut self.cache_write_tokens,
        ]
    }
}

impl UsageBy {
    /// Returns the columns of the agent and the group.
    fn columns(self) -> (&'static str, &'static str) {
        match self {
            UsageBy::Agent => ("''", "agent"),
            UsageBy::Model => ("''", "model"),
            UsageBy::Tenant => ("''", "tenant"),
            // Every row has its day in a column of its own.
            UsageBy::Day => ("''", "''"),
            UsageBy::Key => ("''", "key"),
            UsageBy::Session => ("agent", "session"),
        }
    }
}

/// The end of a statement that adds counts to a row.
macro_rules! on_conflict {
    () => {
        "ON CONFLICT (day, tenant, key, agent, session, model) DO UPDATE SET
         requests = usage.requests + excluded.requests, input = usage.input + excluded.input,
         cached = usage.cached + excluded.cached, output = usage.output + excluded.output,
         estimated_requests = usage.estimated_requests + excluded.estimated_requests,
         estimated_input = usage.estimated_input + excluded.estimated_input,
         estimated_output = usage.estimated_output + excluded.estimated_output,
         cache_write = usage.cache_write + excluded.cache_write"
    };
}

const SUMS: &str = "CAST(SUM(requests) AS BIGINT), CAST(SUM(input) AS BIGINT), CAST(SUM(cached) AS BIGINT),
    CAST(SUM(output) AS BIGINT), CAST(SUM(estimated_requests) AS BIGINT), CAST(SUM(estimated_input) AS BIGINT),
    CAST(SUM(estimated_output) AS BIGINT), CAST(SUM(cache_write) AS BIGINT)";
const ADD: &str =
    concat!("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ", on_conflict!());
const ON_CONFLICT: &str = on_conflict!();
const COUNTS: &str =
    "requests, input, cached, output, estimated_requests, estimated_input, estimated_output, cache_write";
const PRIMARY_KEY: &str = "day, tenant, key, agent, session, model";

impl Store {
    /// Returns at most `limit` sums of the rows by group, day and model.
    pub async fn usage(
        &self,
        filter: &UsageFilter,
        by: UsageBy,
        limit: u32,
    ) -> Result<Vec<UsageSum>, StoreError> {
        let (agent, group) = by.columns();
        let rows = query(AssertSqlSafe(format!(
            "SELECT {agent} AS of_agent, {group} AS of_group, day, model, {SUMS} FROM usage
             WHERE day BETWEEN ?1 AND ?2 AND (?3 IS NULL OR tenant = ?3)
             GROUP BY of_agent, of_group, day, model ORDER BY of_agent, of_group, day, model LIMIT ?4"
        )))
        .bind(filter.first_day)
        .bind(filter.last_day)
        .bind(filter.tenant.as_deref())
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("read the use of models"))?;
        Ok(rows::readable(&rows, "use of a model", usage_sum))
    }

    /// Counts what does not belong to the commit of a turn.
    pub async fn count_use(
        &self,
        tokens: impl IntoIterator<Item = TokenUse>,
        usage: Vec<UsageRow>,
    ) -> Result<(), StoreError> {
        let tokens: Vec<TokenUse> = tokens.into_iter().collect();
        self.write((tokens, usage), |connection, (tokens, usage)| {
            Box::pin(async move {
                token_use::add(connection, &Vec::from_iter(tokens));
                add(connection, &Vec::from_iter(usage)).await
            })
        })
        .await
    }

    /// Makes the rows of sessions from before `before_day` part of their agents' rows. Returns their number.
    pub async fn merge_usage_of_sessions(&self, before_day: u32) -> Result<u64, StoreError> {
        self.in_chunks(before_day, |connection, before_day| {
            Box::pin(async move {
                let which = "day < ?1 AND session != ''";
                merge(connection, which, &[Value::Day(*before_day)]).await
            })
        })
        .await
    }

    /// Removes the rows from before `before_day`. Returns their number.
    pub async fn forget_usage(&self, before_day: u32) -> Result<u64, StoreError> {
        self.in_chunks(before_day, |connection, before_day| {
            Box::pin(async move {
                let gone = query(AssertSqlSafe(format!(
                    "DELETE FROM usage WHERE ({PRIMARY_KEY}) IN
                         (SELECT {PRIMARY_KEY} FROM usage WHERE day < ?1 LIMIT ?2)"
                )))
                .bind(*before_day)
                .bind(CHUNK_ROWS)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("removed the use of models of old days"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }
}

/// Adds counts to the rows of their day.
pub(crate) async fn add(connection: &mut Connection, usage: &[&UsageRow]) -> Result<(), StoreError> {
    let mut of_sessions: BTreeMap<_, UsageCounts> = BTreeMap::new();
    for row in usage {
        match row.session.as_deref().filter(|session| !session.is_empty()) {
            Some(session) => {
                let of_model = (row.agent.as_deref().unwrap_or_default(), session, &row.model);
                let key = (row.day, &row.tenant, row.key.as_deref().unwrap_or_default(), of_model);
                of_sessions.entry(key).or_default().add(&row.counts);
            }
            // Every host adds to this row.
            None => connection.count(ADD, common_key(row), &row.counts.columns()),
        }
    }
    let rows: Vec<_> = of_sessions.into_iter().map(|(key, counts)| (key, counts.columns())).collect();
    for rows in bounded(&rows, |_| 0) {
        let count = |index: usize| rows.iter().map(move |(_, counts)| counts[index]);
        let rows = GivenRows::new()
            .column("day", rows.iter().map(|((day, ..), _)| *day))
            .column("tenant", rows.iter().map(|((_, tenant, ..), _)| *tenant))
            .column("key", rows.iter().map(|((_, _, key, _), _)| *key))
            .column("agent", rows.iter().map(|((.., (agent, ..)), _)| *agent))
            .column("session", rows.iter().map(|((.., (_, session, _)), _)| *session))
            .column("model", rows.iter().map(|((.., (.., model)), _)| *model))
            .column("requests", count(0))
            .column("input", count(1))
            .column("cached", count(2))
            .column("output", count(3))
            .column("estimated_requests", count(4))
            .column("estimated_input", count(5))
            .column("estimated_output", count(6))
            .column("cache_write", count(7));
        let columns = format!("{PRIMARY_KEY}, {COUNTS}");
        let insert = format!("INSERT INTO usage ({columns}) SELECT {columns} FROM");
        let add = rows.query(connection.dialect(), &insert, &format!("WHERE TRUE {ON_CONFLICT}"));
        add.execute(&mut *connection).await.map_err(StoreError::while_it("counted the use of a model"))?;
    }
    Ok(())
}

/// Returns the key of the row without a session.
fn common_key(row: &UsageRow) -> Vec<KeyPart> {
    vec![
        KeyPart::Number(i64::from(row.day)),
        KeyPart::Text(row.tenant.clone()),
        KeyPart::Text(row.key.clone().unwrap_or_default()),
        KeyPart::Text(row.agent.clone().unwrap_or_default()),
        KeyPart::Text(String::new()),
        KeyPart::Text(row.model.clone()),
    ]
}

/// Makes the rows of a deleted session part of its agent's rows; without a session, those of all sessions of
/// the agent. Returns `false` if the time is over before that.
pub(crate) async fn forget_session(
    connection: &mut Connection,
    chunk: &Chunk,
    agent: &str,
    session: Option<&str>,
) -> Result<bool, StoreError> {
    loop {
        let merged = match session {
            Some(session) => {
                let which = "agent = ?1 AND session = ?2 AND session != ''";
                merge(connection, which, &[Value::Text(agent), Value::Text(session)]).await?
            }
            None => merge(connection, "agent = ?1 AND session != ''", &[Value::Text(agent)]).await?,
        };
        if merged == 0 {
            return Ok(true);
        }
        if chunk.is_over() {
            return Ok(false);
        }
    }
}

#[derive(Clone, Copy)]
enum Value<'a> {
    Day(u32),
    Text(&'a str),
}

/// Makes some of these rows of sessions part of their agents' rows. Returns their number. A row is counted by the transaction
/// that removes it.
async fn merge(
    connection: &mut Connection,
    which: &'static str,
    values: &[Value<'_>],
) -> Result<u64, StoreError> {
    let failed = || StoreError::while_it("merged the use of models of sessions");
    let sql = format!(
        "DELETE FROM usage WHERE ({PRIMARY_KEY}) IN (SELECT {PRIMARY_KEY} FROM usage WHERE {which}
             ORDER BY {PRIMARY_KEY} LIMIT {CHUNK_ROWS})
         RETURNING day, tenant, key, agent, model, requests, input, cached, output, estimated_requests, estimated_input,
             estimated_output, cache_write"
    );
    let mut statement = query(AssertSqlSafe(sql));
    for value in values {
        statement = match value {
            Value::Day(day) => statement.bind(*day),
            Value::Text(text) => statement.bind(*text),
        };
    }
    let removed = statement.fetch_all(&mut *connection).await.map_err(failed())?;
    let rows = removed.iter().map(removed_row).collect::<Result<Vec<_>, _>>().map_err(failed())?;
    add(connection, &Vec::from_iter(&rows)).await?;
    Ok(rows.len() as u64)
}

/// Reads the row of a session as one of its agent.
fn removed_row(row: &Row) -> Result<UsageRow, sqlx::Error> {
    let text =
        |column: usize| row.try_get::<String>(column).map(|text| Some(text).filter(|text| !text.is_empty()));
    let mut counts = UsageCounts::default();
    for (column, count) in (5..).zip(counts.fields_mut()) {
        *count = row.try_get::<i64>(column)? as u64;
    }
    let (day, tenant, model) = (row.try_get(0)?, row.try_get(1)?, row.try_get(4)?);
    Ok(UsageRow { day, tenant, key: text(2)?, agent: text(3)?, session: None, model, counts })
}

fn usage_sum(row: &Row) -> Result<UsageSum, sqlx::Error> {
    let text =
        |column: usize| row.try_get(column).map(|text: String| Some(text).filter(|text| !text.is_empty()));
    let mut counts = UsageCounts::default();
    for (column, count) in (4..).zip(counts.fields_mut()) {
        *count = row.try_get::<i64>(column)? as u64;
    }
    Ok(UsageSum { agent: text(0)?, group: text(1)?, day: row.try_get(2)?, model: row.try_get(3)?, counts })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(requests: u64, input: u64, cached: u64, output: u64) -> UsageCounts {
        let (input_tokens, cached_tokens, output_tokens) = (input, cached, output);
        UsageCounts { requests, input_tokens, cached_tokens, output_tokens, ..UsageCounts::default() }
    }

    fn row(day: u32, session: &str, counts: UsageCounts) -> UsageRow {
        UsageRow {
            day,
            tenant: "acme".into(),
            key: Some("key-1".into()),
            agent: Some("a".into()),
            session: Some(session.into()),
            model: "m".into(),
            counts,
        }
    }

    fn direct(day: u32, counts: UsageCounts) -> UsageRow {
        UsageRow { tenant: "globex".into(), key: None, agent: None, session: None, ..row(day, "", counts) }
    }

    async fn by(store: &Store, by: UsageBy, filter: UsageFilter) -> Vec<(Option<String>, u32, UsageCounts)> {
        let sums = store.usage(&filter, by, 100).await.expect("readable");
        sums.into_iter().map(|sum| (sum.group, sum.day, sum.counts)).collect()
    }

    fn all() -> UsageFilter {
        UsageFilter { tenant: None, first_day: 0, last_day: 1_000 }
    }

    async fn filled() -> Store {
        let store = Store::for_tests().await.expect("a database in memory");
        let estimated = UsageCounts {
            estimated_requests: 1,
            estimated_input_tokens: 5,
            estimated_output_tokens: 2,
            cache_write_tokens: 4,
            ..counts(1, 5, 0, 2)
        };
        for rows in [
            vec![row(7, "acme/s", counts(1, 10, 4, 3)), row(7, "acme/t", counts(1, 20, 0, 1))],
            vec![row(7, "acme/s", estimated)],
            vec![row(8, "acme/s", counts(2, 1, 1, 1)), direct(8, counts(1, 9, 0, 9))],
        ] {
            store.count_use(None, rows).await.expect("written");
        }
        store
    }

    #[tokio::test]
    async fn counts_add_up_by_each_property() {
        let store = filled().await;
        let some = |name: &str| Some(name.to_owned());
        let day_7 = UsageCounts {
            estimated_requests: 1,
            estimated_input_tokens: 5,
            estimated_output_tokens: 2,
            cache_write_tokens: 4,
            ..counts(3, 35, 4, 6)
        };
        assert_eq!(
            by(&store, UsageBy::Agent, all()).await,
            [(None, 8, counts(1, 9, 0, 9)), (some("a"), 7, day_7), (some("a"), 8, counts(2, 1, 1, 1))]
        );
        assert_eq!(
            by(&store, UsageBy::Day, all()).await,
            [(None, 7, day_7), (None, 8, counts(3, 10, 1, 10))]
        );
        let of_acme = UsageFilter { tenant: some("acme"), first_day: 8, last_day: 8 };
        for (grouped, name) in [
            (UsageBy::Tenant, "acme"),
            (UsageBy::Key, "key-1"),
            (UsageBy::Session, "acme/s"),
            (UsageBy::Model, "m"),
        ] {
            let expected = [(some(name), 8, counts(2, 1, 1, 1))];
            assert_eq!(by(&store, grouped, of_acme.clone()).await, expected, "{grouped:?}");
        }
        assert_eq!(store.usage(&all(), UsageBy::Session, 3).await.expect("readable").len(), 3);
    }

    #[tokio::test]
    async fn rows_of_sessions_are_merged_and_old_days_are_removed() {
        let store = filled().await;
        let before = by(&store, UsageBy::Agent, all()).await;
        assert_eq!(store.merge_usage_of_sessions(8).await.expect("merged"), 2);
        assert_eq!(store.merge_usage_of_sessions(8).await.expect("merged"), 0);
        assert_eq!(by(&store, UsageBy::Agent, all()).await, before, "no count is lost");
        let sessions = by(&store, UsageBy::Session, all()).await;
        let named: Vec<_> =
            sessions.iter().filter_map(|(name, day, _)| Some((name.as_deref()?, *day))).collect();
        assert_eq!(named, [("acme/s", 8)]);
        assert_eq!(store.forget_usage(8).await.expect("removed"), 1);
        assert_eq!(by(&store, UsageBy::Day, all()).await, [(None, 8, counts(3, 10, 1, 10))]);
    }

    #[tokio::test]
    async fn usage_of_a_deleted_session_stays_with_its_agent() {
        let store = filled().await;
        let before = by(&store, UsageBy::Agent, all()).await;
        store.delete_session("a", "acme/s").await.expect("deleted");
        assert_eq!(by(&store, UsageBy::Agent, all()).await, before);
        let sessions = by(&store, UsageBy::Session, all()).await;
        let named: Vec<_> = sessions.iter().filter_map(|(name, ..)| name.as_deref()).collect();
        assert_eq!(named, ["acme/t"]);
    }
}
