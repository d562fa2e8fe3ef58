//! One way to talk to both databases: SQLite and PostgreSQL.
//!
//! Statements are written once, in the SQL that both understand, with SQLite's placeholders (`?` and `?1`), which become
//! PostgreSQL's (`$1`) on the way. A statement that the two spell differently asks the connection for its
//! [`Dialect`]. The interface is that of `sqlx`, on values and rows of either database.

mod answer;
mod builder;
mod counts;
mod given_rows;
mod placeholders;
mod query;
mod row;
mod value;

#[cfg(test)]
pub(crate) use answer::LIMIT as STATEMENT_LIMIT;
pub(crate) use answer::missing;
pub(crate) use builder::QueryBuilder;
pub(crate) use counts::KeyPart;
pub(crate) use given_rows::GivenRows;
pub(crate) use query::{Query, query, query_as, query_scalar, raw_sql};
pub(crate) use row::Row;
pub(crate) use sqlx::AssertSqlSafe;
pub(crate) use value::Value;

use counts::Counts;
use futures::future::BoxFuture;
use sqlx::{PgConnection, PgPool, SqliteConnection, SqlitePool};
use std::{
    ops::{Deref, DerefMut},
    time::Duration,
};

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

    /// Returns the end of a query that locks the rows that it finds, except those that another transaction has locked. An
    /// SQLite file has one transaction at a time.
    pub(crate) fn skip_locked(self) -> &'static str {
        self.pick("", "FOR UPDATE SKIP LOCKED")
    }
}

/// A connection, or a transaction on one.
pub(crate) struct Connection {
    driver: Driver,
    /// The counts of the transaction that are not written yet.
    counts: Counts,
    /// Time for which a statement waits for its answer; `None` if it may take any time.
    limit: Option<Duration>,
}

enum Driver {
    Sqlite(Box<dyn OpenFile>),
    Postgres(Box<dyn DerefMut<Target = PgConnection> + Send>),
}

/// A connection to an SQLite file, which may belong to a pool.
pub(crate) trait OpenFile: DerefMut<Target = SqliteConnection> + Send {
    /// Returns once the file is closed, if the connection belongs to nobody else.
    fn close(self: Box<Self>) -> BoxFuture<'static, ()>;
}

impl OpenFile for Box<SqliteConnection> {
    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            // The file is closed either way; what was committed is in its log.
            if let Err(error) = sqlx::Connection::close(**self).await {
                tracing::warn!(%error, "cannot close the database in order");
            }
        })
    }
}

/// A transaction, or a connection of a pool.
struct Lent<T>(T);

impl<T: DerefMut<Target = SqliteConnection>> Deref for Lent<T> {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.0
    }
}

impl<T: DerefMut<Target = SqliteConnection>> DerefMut for Lent<T> {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.0
    }
}

impl<T: DerefMut<Target = SqliteConnection> + Send + 'static> OpenFile for Lent<T> {
    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        drop(self);
        Box::pin(async {})
    }
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
    /// With the time for which a statement waits for its answer.
    Postgres(&'c mut PgConnection, Option<Duration>),
    SqlitePool(&'c SqlitePool),
    PostgresPool(&'c PgPool),
}

impl Connection {
    pub(crate) fn sqlite(connection: SqliteConnection) -> Self {
        Driver::Sqlite(Box::new(Box::new(connection))).into()
    }

    pub(crate) fn postgres(connection: PgConnection) -> Self {
        Driver::Postgres(Box::new(Box::new(connection))).into()
    }

    pub(crate) fn dialect(&self) -> Dialect {
        match self.driver {
            Driver::Sqlite(_) => Dialect::Sqlite,
            Driver::Postgres(_) => Dialect::Postgres,
        }
    }

    /// Returns the connection to an SQLite file; `None` if the database is another one.
    #[cfg(any(test, feature = "faults"))]
    pub(crate) fn sqlite_mut(&mut self) -> Option<&mut SqliteConnection> {
        match &mut self.driver {
            Driver::Sqlite(connection) => Some(&mut ***connection),
            Driver::Postgres(_) => None,
        }
    }

    /// Returns the connection to a PostgreSQL server; `None` if the database is another one.
    pub(crate) fn postgres_mut(&mut self) -> Option<&mut PgConnection> {
        match &mut self.driver {
            Driver::Sqlite(_) => None,
            Driver::Postgres(connection) => Some(&mut ***connection),
        }
    }

    /// Lets statements take any time, if the server does so, too.
    pub(crate) fn be_patient(&mut self) {
        self.limit = None;
    }

    /// Adds amounts to a row of counters when the transaction ends (see `counts`). `add` is a statement that adds the
    /// amounts, which are its last parameters, to the row whose key its first parameters are.
    pub(crate) fn count(&mut self, add: &'static str, key: Vec<KeyPart>, amounts: &[i64]) {
        self.counts.add(add, key, amounts);
    }

    /// Removes the counts of the transaction, and returns the statements that write them.
    pub(crate) fn take_counts(&mut self) -> Vec<Query<'static>> {
        self.counts.take()
    }

    /// Closes the connection, in the order that its database wants.
    pub(crate) async fn close(self) {
        match self.driver {
            Driver::Sqlite(connection) => connection.close().await,
            // The server notices the closed socket.
            Driver::Postgres(connection) => drop(connection),
        }
    }
}

impl From<Driver> for Connection {
    fn from(driver: Driver) -> Self {
        Connection { driver, counts: Counts::default(), limit: Some(answer::LIMIT) }
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
        let driver = match self {
            Pool::Sqlite(pool) => Driver::Sqlite(Box::new(Lent(pool.acquire().await?))),
            Pool::Postgres(pool) => Driver::Postgres(Box::new(pool.acquire().await?)),
        };
        Ok(driver.into())
    }

    /// Begins a transaction whose reads all see the same commits. It ends when it is dropped.
    pub(crate) async fn begin(&self) -> Result<Connection, sqlx::Error> {
        let driver = match self {
            Pool::Sqlite(pool) => Driver::Sqlite(Box::new(Lent(pool.begin().await?))),
            Pool::Postgres(pool) => {
                let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
                Driver::Postgres(Box::new(pool.begin_with(begin).await?))
            }
        };
        Ok(driver.into())
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
        let limit = connection.limit;
        match &mut connection.driver {
            Driver::Sqlite(connection) => Target::Sqlite(connection),
            Driver::Postgres(connection) => Target::Postgres(connection, limit),
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
