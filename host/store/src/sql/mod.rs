//! One way to talk to both databases: SQLite and PostgreSQL.
//!
//! Statements are written once, in the SQL that both understand, with SQLite's placeholders (`?` and `?1`), which become
//! PostgreSQL's (`$1`) on the way. A statement that the two spell differently asks the connection for its
//! [`Dialect`]. The interface is that of `sqlx`, on values and rows of either database.

mod builder;
mod placeholders;
mod query;
mod row;
mod value;

pub(crate) use builder::QueryBuilder;
pub(crate) use query::{Query, query, query_as, query_scalar, raw_sql};
pub(crate) use row::Row;
pub(crate) use sqlx::AssertSqlSafe;
pub(crate) use value::Value;

use sqlx::{PgConnection, PgPool, SqliteConnection, SqlitePool};
use std::ops::DerefMut;

/// The database's variant of SQL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    Postgres,
}

impl Dialect {
    /// Returns the spelling of this database.
    pub(crate) fn pick<T>(self, sqlite: T, postgres: T) -> T {
        match self {
            Dialect::Sqlite => sqlite,
            Dialect::Postgres => postgres,
        }
    }
}

/// A connection, or a transaction on one.
pub(crate) enum Connection {
    Sqlite(Box<dyn DerefMut<Target = SqliteConnection> + Send>),
    Postgres(Box<dyn DerefMut<Target = PgConnection> + Send>),
}

/// Connections for reads.
#[derive(Clone, Debug)]
pub(crate) enum Pool {
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

/// The place where a statement runs.
pub(crate) enum Target<'c> {
    Sqlite(&'c mut SqliteConnection),
    Postgres(&'c mut PgConnection),
    SqlitePool(&'c SqlitePool),
    PostgresPool(&'c PgPool),
}

impl Connection {
    pub(crate) fn sqlite(connection: SqliteConnection) -> Self {
        Connection::Sqlite(Box::new(Box::new(connection)))
    }

    pub(crate) fn postgres(connection: PgConnection) -> Self {
        Connection::Postgres(Box::new(Box::new(connection)))
    }

    pub(crate) fn dialect(&self) -> Dialect {
        match self {
            Connection::Sqlite(_) => Dialect::Sqlite,
            Connection::Postgres(_) => Dialect::Postgres,
        }
    }

    /// Closes the connection, in the order that its database wants.
    pub(crate) async fn close(self) {
        // Dropping ends both: SQLite waits for its thread, and PostgreSQL notices the closed socket.
        drop(self);
    }
}

impl Pool {
    pub(crate) fn dialect(&self) -> Dialect {
        match self {
            Pool::Sqlite(_) => Dialect::Sqlite,
            Pool::Postgres(_) => Dialect::Postgres,
        }
    }

    pub(crate) async fn acquire(&self) -> Result<Connection, sqlx::Error> {
        Ok(match self {
            Pool::Sqlite(pool) => Connection::Sqlite(Box::new(pool.acquire().await?)),
            Pool::Postgres(pool) => Connection::Postgres(Box::new(pool.acquire().await?)),
        })
    }

    /// Begins a transaction whose reads all see the same commits. It ends when it is dropped.
    pub(crate) async fn begin(&self) -> Result<Connection, sqlx::Error> {
        Ok(match self {
            Pool::Sqlite(pool) => Connection::Sqlite(Box::new(pool.begin().await?)),
            Pool::Postgres(pool) => {
                let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
                Connection::Postgres(Box::new(pool.begin_with(begin).await?))
            }
        })
    }

    pub(crate) async fn close(&self) {
        match self {
            Pool::Sqlite(pool) => pool.close().await,
            Pool::Postgres(pool) => pool.close().await,
        }
    }
}

impl<'c> From<&'c mut Connection> for Target<'c> {
    fn from(connection: &'c mut Connection) -> Self {
        match connection {
            Connection::Sqlite(connection) => Target::Sqlite(connection),
            Connection::Postgres(connection) => Target::Postgres(connection),
        }
    }
}

impl<'c> From<&'c Pool> for Target<'c> {
    fn from(pool: &'c Pool) -> Self {
        match pool {
            Pool::Sqlite(pool) => Target::SqlitePool(pool),
            Pool::Postgres(pool) => Target::PostgresPool(pool),
        }
    }
}
