//! Statements with parameters.

use super::{
    Row, Target, answer, placeholders,
    row::{Column, FromRow},
    value::{IntoValue, Value, postgres_arguments, sqlite_arguments},
};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};
use std::marker::PhantomData;

/// A statement that returns rows or changes them.
pub(crate) struct Query<'q> {
    sql: SqlStr,
    values: Vec<Value<'q>>,
}

/// A statement of which each row is read as a `T`.
pub(crate) struct Typed<'q, T> {
    query: Query<'q>,
    read: fn(&Row) -> Result<T, sqlx::Error>,
    of: PhantomData<T>,
}

/// The result of a statement that changes rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    rows: u64,
}

impl Done {
    pub(crate) fn rows_affected(self) -> u64 {
        self.rows
    }
}

pub(crate) fn query<'q>(sql: impl SqlSafeStr) -> Query<'q> {
    Query { sql: sql.into_sql_str(), values: Vec::new() }
}

/// Begins a statement whose rows have one column, which is read as a `T`.
pub(crate) fn query_scalar<'q, T: Column>(sql: impl SqlSafeStr) -> Typed<'q, T> {
    Query::typed(query(sql), |row| T::read(row, 0))
}

/// Begins a statement whose rows are read as tuples.
pub(crate) fn query_as<'q, T: FromRow>(sql: impl SqlSafeStr) -> Typed<'q, T> {
    Query::typed(query(sql), T::from_row)
}

/// Runs a statement on its target with the driver of its database.
macro_rules! run {
    ($query:expr, $on:expr, $method:ident, $row:expr, $postgres_row:expr) => {{
        let Query { sql, values } = $query;
        match $on {
            Target::Sqlite(connection) => {
                let arguments = sqlite_arguments(&values)?;
                drop(values);
                sqlx::query_with(sql, arguments).$method(connection).await.map($row)
            }
            Target::SqlitePool(pool) => {
                let arguments = sqlite_arguments(&values)?;
                drop(values);
                sqlx::query_with(sql, arguments).$method(pool).await.map($row)
            }
            Target::Postgres(connection, limit) => {
                let arguments = postgres_arguments(&values)?;
                drop(values);
                let sql = AssertSqlSafe(placeholders::to_postgres(sql.as_str()));
                let running = sqlx::query_with(sql, arguments).$method(connection);
                answer::within(limit, running).await.map($postgres_row)
            }
            Target::PostgresPool(pool) => {
                let arguments = postgres_arguments(&values)?;
                drop(values);
                let sql = AssertSqlSafe(placeholders::to_postgres(sql.as_str()));
                let mut connection = pool.acquire().await?;
                let running = sqlx::query_with(sql, arguments).$method(&mut *connection);
                let answered = answer::within(Some(answer::LIMIT), running).await;
                if answered.as_ref().is_err_and(answer::is_missing) {
                    // The pool would wait for the answer before it opens another connection.
                    connection.close_on_drop();
                }
                answered.map($postgres_row)
            }
        }
    }};
}

impl<'q> Query<'q> {
    pub(crate) fn with(sql: String, values: Vec<Value<'q>>) -> Self {
        Query { sql: AssertSqlSafe(sql).into_sql_str(), values }
    }

    pub(super) fn typed<T>(query: Query<'q>, read: fn(&Row) -> Result<T, sqlx::Error>) -> Typed<'q, T> {
        Typed { query, read, of: PhantomData }
    }

    pub(crate) fn bind(mut self, value: impl IntoValue<'q>) -> Self {
        self.values.push(value.into_value());
        self
    }

    pub(crate) async fn execute<'c>(self, on: impl Into<Target<'c>>) -> Result<Done, sqlx::Error> {
        run!(self, on.into(), execute, |done| Done { rows: done.rows_affected() }, |done| Done {
            rows: done.rows_affected()
        })
    }

    pub(crate) async fn fetch_all<'c>(self, on: impl Into<Target<'c>>) -> Result<Vec<Row>, sqlx::Error> {
        run!(self, on.into(), fetch_all, |rows| rows.into_iter().map(Row::Sqlite).collect(), |rows| rows
            .into_iter()
            .map(Row::Postgres)
            .collect())
    }

    pub(crate) async fn fetch_one<'c>(self, on: impl Into<Target<'c>>) -> Result<Row, sqlx::Error> {
        run!(self, on.into(), fetch_one, Row::Sqlite, Row::Postgres)
    }

    pub(crate) async fn fetch_optional<'c>(
        self,
        on: impl Into<Target<'c>>,
    ) -> Result<Option<Row>, sqlx::Error> {
        run!(self, on.into(), fetch_optional, |row| row.map(Row::Sqlite), |row| row.map(Row::Postgres))
    }
}

impl<'q, T> Typed<'q, T> {
    pub(crate) fn bind(mut self, value: impl IntoValue<'q>) -> Self {
        self.query = self.query.bind(value);
        self
    }

    pub(crate) async fn fetch_all<'c>(self, on: impl Into<Target<'c>>) -> Result<Vec<T>, sqlx::Error> {
        self.query.fetch_all(on).await?.iter().map(self.read).collect()
    }

    pub(crate) async fn fetch_one<'c>(self, on: impl Into<Target<'c>>) -> Result<T, sqlx::Error> {
        (self.read)(&self.query.fetch_one(on).await?)
    }

    pub(crate) async fn fetch_optional<'c>(
        self,
        on: impl Into<Target<'c>>,
    ) -> Result<Option<T>, sqlx::Error> {
        self.query.fetch_optional(on).await?.as_ref().map(self.read).transpose()
    }
}

/// Runs statements without parameters, separated by semicolons.
pub(crate) async fn raw_sql<'c>(sql: impl SqlSafeStr, on: impl Into<Target<'c>>) -> Result<(), sqlx::Error> {
    let script = sqlx::raw_sql(sql);
    match on.into() {
        Target::Sqlite(connection) => script.execute(connection).await.map(drop),
        Target::SqlitePool(pool) => script.execute(pool).await.map(drop),
        Target::Postgres(connection, limit) => {
            answer::within(limit, script.execute(connection)).await.map(drop)
        }
        Target::PostgresPool(pool) => script.execute(pool).await.map(drop),
    }
}
