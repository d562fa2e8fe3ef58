//! Moving everything that a host stores from one database to another, in one transaction of the new one.
//!
//! The rows are read in one snapshot, so a host may be writing to the old database meanwhile. They are streamed: no more
//! than a few megabytes of them are in memory, and one row where a row is larger.

mod catalog;
#[cfg(test)]
mod tests;

use crate::{
    Store, StoreError,
    sql::{AssertSqlSafe, Connection, Dialect, Query, Row, Target, Value, query, query_scalar, raw_sql},
};
use catalog::{Catalog, ColumnKind, Table};
use futures::{StreamExt as _, TryStreamExt as _, stream::BoxStream};
use std::{borrow::Cow, sync::Arc};

/// All tables. A table comes after those that its rows refer to, and after those whose triggers write to it.
const TABLES: [&str; 36] = [
    "components",
    "agents",
    "deployments",
    "artifacts",
    "logs",
    "sessions",
    "state",
    "conversations",
    "outcomes",
    "turns",
    "turn_records",
    "approvals",
    "schedules",
    "events",
    "webhooks",
    "deliveries",
    "batches",
    "batch_items",
    "secrets",
    "api_keys",
    "token_use",
    "api_key_changes",
    "erasures",
    "checks",
    "ended_in_order",
    "clock",
    "clock_skips",
    "restores",
    "event_pruning",
    "usage",
    "requests",
    "request_bodies",
    "responses",
    "response_sizes",
    "files",
    "file_parts",
];
/// Tables that have rows in a database that no host has used.
const NEVER_EMPTY: [&str; 2] = ["api_key_changes", "event_pruning"];
/// Tables that describe the hosts of one database, what they own, have chosen and have to read again. They stay with it: a
/// number of a host means another one in the next database.
const UNMOVED: [&str; 6] = ["choices", "hosts", "mcp_sessions", "notices", "page_erasures", "session_owners"];
/// Tables whose rows name the host that works on them. The host stays with the old database.
const WITH_A_HOST: [&str; 3] = ["schedules", "deliveries", "batch_items"];
/// Tables whose rows name the host that has begun to write or to remove what they belong to.
const WITH_A_MAKER: [&str; 4] = ["batches", "erasures", "files", "sessions"];
/// Maximum number of rows and of bytes in one statement.
const MAX_ROWS: usize = 250;
const MAX_BYTES: usize = 4 << 20;

/// Receives the number of rows that are written, and that there are.
pub type RowProgress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// A table and its number of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRows {
    pub table: String,
    pub rows: u64,
}

impl Store {
    /// Counts the rows of each table, all as of the same moment.
    pub async fn table_rows(&self) -> Result<Vec<TableRows>, StoreError> {
        let mut snapshot =
            self.readers.begin().await.map_err(StoreError::while_it("began to read all tables"))?;
        count_all(&mut snapshot).await
    }

    /// Writes all rows of another database to this one, which must be empty and the other kind of database. Returns the
    /// number of rows of each table. Either everything is written or nothing.
    pub async fn fill_from(
        &self,
        source: &Store,
        progress: RowProgress,
    ) -> Result<Vec<TableRows>, StoreError> {
        self.write((source.clone(), progress), |connection, (source, progress)| {
            Box::pin(fill(connection, source, progress))
        })
        .await
    }
}

async fn fill(
    to: &mut Connection,
    source: &Store,
    progress: &RowProgress,
) -> Result<Vec<TableRows>, StoreError> {
    let mut from = source.readers.begin().await.map_err(StoreError::while_it("began to read all tables"))?;
    for connection in [&mut from, &mut *to] {
        if connection.dialect() == Dialect::Postgres {
            // A table takes as long as it takes.
            connection.be_patient();
            let patient =
                "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = '10min'";
            raw_sql(patient, connection).await.map_err(StoreError::while_it("began to move all tables"))?;
        }
    }
    let found = count_all(to).await?;
    if let Some(filled) =
        found.into_iter().find(|found| found.rows > 0 && !NEVER_EMPTY.contains(&found.table.as_str()))
    {
        return Err(StoreError::NotEmpty { table: filled.table, rows: filled.rows });
    }
    let catalog = Catalog::of_both(&mut from, to).await?;
    let expected = count_all(&mut from).await?;
    let total = expected.iter().map(|table| table.rows).sum();
    let mut done = 0;
    for table in catalog.tables() {
        let clear = query(AssertSqlSafe(format!("DELETE FROM {}", table.name)));
        clear.execute(&mut *to).await.map_err(StoreError::while_it("cleared a table"))?;
        copy(table, &mut from, to, &mut |rows| {
            done += rows;
            progress(done, total);
        })
        .await?;
        continue_numbers(table, &mut from, to).await?;
    }
    let named = WITH_A_HOST.map(|table| (table, "host")).into_iter();
    for (table, column) in named.chain(WITH_A_MAKER.map(|table| (table, "maker"))) {
        let disown = format!("UPDATE {table} SET {column} = NULL WHERE {column} IS NOT NULL");
        let disowned = query(AssertSqlSafe(disown)).execute(&mut *to).await;
        disowned.map_err(StoreError::while_it("moved work in progress"))?;
    }
    let written = count_all(to).await?;
    match written.iter().zip(&expected).find(|(written, expected)| written != expected) {
        Some((written, expected)) => Err(StoreError::Unmovable {
            table: expected.table.clone(),
            row: "all rows".into(),
            reason: format!("{} of {} arrived", written.rows, expected.rows),
        }),
        None => Ok(written),
    }
}

async fn count_all(connection: &mut Connection) -> Result<Vec<TableRows>, StoreError> {
    let mut counts = Vec::with_capacity(TABLES.len());
    for table in TABLES {
        let rows: i64 = query_scalar(AssertSqlSafe(format!("SELECT COUNT(*) FROM {table}")))
            .fetch_one(&mut *connection)
            .await
            .map_err(StoreError::while_it("counted the rows of a table"))?;
        counts.push(TableRows { table: table.into(), rows: rows.max(0) as u64 });
    }
    Ok(counts)
}

/// Rows that are written with the next statement.
struct Batch<'t> {
    table: &'t Table,
    values: Vec<Value<'static>>,
    bytes: usize,
}

impl Batch<'_> {
    fn rows(&self) -> usize {
        self.values.len() / self.table.columns.len()
    }

    fn is_full(&self) -> bool {
        self.rows() >= MAX_ROWS || self.bytes >= MAX_BYTES
    }

    /// Writes the rows and returns their number.
    async fn write(&mut self, to: &mut Connection) -> Result<u64, StoreError> {
        let rows = self.rows();
        if rows == 0 {
            return Ok(0);
        }
        let row = format!("({})", vec!["?"; self.table.columns.len()].join(", "));
        let insert = format!(
            "INSERT INTO {} ({}) VALUES {}",
            self.table.name,
            self.table.column_list(),
            vec![row.as_str(); rows].join(", ")
        );
        self.bytes = 0;
        let insert = Query::with(insert, std::mem::take(&mut self.values));
        insert.execute(to).await.map_err(StoreError::while_it("wrote the rows of a table"))?;
        Ok(rows as u64)
    }
}

async fn copy(
    table: &Table,
    from: &mut Connection,
    to: &mut Connection,
    copied: &mut (dyn FnMut(u64) + Send),
) -> Result<(), StoreError> {
    let is_postgres = to.dialect() == Dialect::Postgres;
    let select = format!("SELECT {} FROM {}", table.column_list(), table.name);
    let mut rows = stream(AssertSqlSafe(select), from);
    let mut batch = Batch { table, values: Vec::new(), bytes: 0 };
    while let Some(row) = rows.next().await {
        let row = row.map_err(StoreError::while_it("read the rows of a table"))?;
        let begin = batch.values.len();
        for (index, column) in table.columns.iter().enumerate() {
            let value = read(&row, index, column.kind).map_err(StoreError::while_it("read a row"))?;
            batch.bytes += length(&value);
            batch.values.push(value);
        }
        if is_postgres && let Some(column) = batch.values[begin..].iter().position(has_nul) {
            return Err(StoreError::Unmovable {
                table: table.name.clone(),
                row: describe(&batch.values[begin]),
                reason: format!(
                    "its {} contains the character U+0000, which PostgreSQL cannot store",
                    table.columns[column].name
                ),
            });
        }
        if batch.is_full() {
            copied(batch.write(to).await?);
        }
    }
    copied(batch.write(to).await?);
    Ok(())
}

fn stream<'c>(
    sql: AssertSqlSafe<String>,
    connection: &'c mut Connection,
) -> BoxStream<'c, Result<Row, sqlx::Error>> {
    match Target::from(connection) {
        Target::Sqlite(connection) => sqlx::query(sql).fetch(connection).map_ok(Row::Sqlite).boxed(),
        Target::Postgres(connection, _) => sqlx::query(sql).fetch(connection).map_ok(Row::Postgres).boxed(),
        Target::SqlitePool(pool) => sqlx::query(sql).fetch(pool).map_ok(Row::Sqlite).boxed(),
        Target::PostgresPool(pool) => sqlx::query(sql).fetch(pool).map_ok(Row::Postgres).boxed(),
    }
}

fn read(row: &Row, index: usize, kind: ColumnKind) -> Result<Value<'static>, sqlx::Error> {
    Ok(match kind {
        ColumnKind::Bool => Value::Bool(row.try_get(index)?),
        ColumnKind::Integer => Value::Integer(row.try_get(index)?),
        ColumnKind::Text => Value::Text(row.try_get::<Option<String>>(index)?.map(Cow::Owned)),
        ColumnKind::Bytes => Value::Bytes(row.try_get::<Option<Vec<u8>>>(index)?.map(Cow::Owned)),
    })
}

fn length(value: &Value<'_>) -> usize {
    match value {
        Value::Text(Some(text)) => text.len(),
        Value::Bytes(Some(bytes)) => bytes.len(),
        _ => size_of::<i64>(),
    }
}

fn has_nul(value: &Value<'_>) -> bool {
    matches!(value, Value::Text(Some(text)) if text.contains('\0'))
}

/// Names a row by its first column.
fn describe(first: &Value<'_>) -> String {
    match first {
        Value::Integer(Some(number)) => number.to_string(),
        Value::Text(Some(text)) => format!("{text:?}"),
        _ => "a row".into(),
    }
}

/// Makes the numbers of a table's next rows continue after those that the old database has given, even if the rows are
/// gone: a number must never mean something else later.
async fn continue_numbers(
    table: &Table,
    from: &mut Connection,
    to: &mut Connection,
) -> Result<(), StoreError> {
    let Some(column) = &table.numbered_by else { return Ok(()) };
    let failed = || StoreError::while_it("continued the numbers of a table");
    let last = match from.dialect() {
        Dialect::Sqlite => {
            query_scalar("SELECT MAX(seq) FROM sqlite_sequence WHERE name = ?").bind(&table.name)
        }
        Dialect::Postgres => {
            query_scalar("SELECT pg_sequence_last_value(CAST(pg_get_serial_sequence(?, ?) AS regclass))")
                .bind(&table.name)
                .bind(column)
        }
    };
    let last: Option<i64> = last.fetch_one(&mut *from).await.map_err(failed())?;
    let highest = format!("SELECT MAX({column}) FROM {}", table.name);
    let highest: Option<i64> =
        query_scalar(AssertSqlSafe(highest)).fetch_one(&mut *to).await.map_err(failed())?;
    let Some(last) = last.max(highest) else { return Ok(()) };
    match to.dialect() {
        Dialect::Sqlite => {
            // Without rows, SQLite has no number of the table yet.
            query("DELETE FROM sqlite_sequence WHERE name = ?")
                .bind(&table.name)
                .execute(&mut *to)
                .await
                .map_err(failed())?;
            query("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)")
                .bind(&table.name)
                .bind(last)
                .execute(to)
                .await
                .map_err(failed())?;
        }
        Dialect::Postgres => {
            query("SELECT setval(CAST(pg_get_serial_sequence(?, ?) AS regclass), ?)")
                .bind(&table.name)
                .bind(column)
                .bind(last)
                .execute(to)
                .await
                .map_err(failed())?;
        }
    }
    Ok(())
}
