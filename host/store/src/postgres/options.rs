//! The address of a PostgreSQL database, and the settings of connections to it.

use crate::StoreError;
use sqlx::{
    ConnectOptions as _, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use std::{str::FromStr, sync::Arc, time::Duration};

/// Settings of every connection. The server ends a transaction in which a host was stopped before the lease of that host is over, so a
/// host that is replaced holds no row.
/// A commit waits for the server's disk, because after a crash of the server, a running host would continue from commits
/// that the server has lost. The server probes a silent connection, so that the lock of a host whose machine lost its
/// power or its network is free after seconds; without that it would be held for hours.
const SETTINGS: [(&str, &str); 9] = [
    ("synchronous_commit", "on"),
    ("statement_timeout", "60s"),
    ("lock_timeout", "10s"),
    ("idle_in_transaction_session_timeout", "8s"),
    ("client_min_messages", "warning"),
    ("tcp_keepalives_idle", "5"),
    ("tcp_keepalives_interval", "2"),
    ("tcp_keepalives_count", "3"),
    ("tcp_user_timeout", "10s"),
];

const HINT: &str = "check the address, that the server runs, and the password, which may also be in PGPASSWORD or in the \
                    file that PGPASSFILE names";

/// A database on a server.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    options: PgConnectOptions,
}

impl Server {
    pub(crate) fn new(url: &str) -> Result<Self, StoreError> {
        let options = PgConnectOptions::from_str(url).map_err(|source| StoreError::Connect {
            database: "with this address".into(),
            source: Arc::new(source),
            hint: "an address has the form postgres://USER@HOST:5432/DATABASE",
        })?;
        let options = options.application_name("skep").statement_cache_capacity(256).options(SETTINGS);
        Ok(Server { options })
    }

    /// Returns the same database, whose commits are answered before the server's disk has them. It is for measurements only.
    pub(crate) fn without_waiting(self) -> Self {
        Server { options: self.options.options([("synchronous_commit", "off")]) }
    }

    /// Returns the same database with another schema for its tables.
    #[cfg(any(test, feature = "faults"))]
    pub(crate) fn in_schema(self, schema: &str) -> Self {
        Server { options: self.options.options([("search_path", schema)]) }
    }

    /// Returns the address of the server.
    #[cfg(test)]
    pub(crate) fn address(&self) -> (String, u16) {
        (self.options.get_host().to_owned(), self.options.get_port())
    }

    /// Returns the same database, reached through a port of this machine.
    #[cfg(test)]
    pub(crate) fn through(self, port: u16) -> Self {
        Server { options: self.options.host("127.0.0.1").port(port) }
    }

    /// Returns the name of the database, without a password.
    pub(crate) fn name(&self) -> String {
        let database = self.options.get_database().unwrap_or_else(|| self.options.get_username());
        format!("{database} on {}:{}", self.options.get_host(), self.options.get_port())
    }

    pub(crate) async fn connect(&self) -> Result<PgConnection, StoreError> {
        let connecting = tokio::time::timeout(super::CONNECT_TIME * 2, self.connect_once()).await;
        connecting.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(|source| StoreError::Connect {
            database: self.name(),
            source: Arc::new(source),
            hint: HINT,
        })
    }

    pub(crate) async fn connect_once(&self) -> Result<PgConnection, sqlx::Error> {
        self.options.connect().await
    }

    /// Returns connections that are made when they are needed.
    pub(crate) fn pool(&self, connections: u32) -> PgPool {
        PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(10))
            // A connection that was lost is noticed by the statement, whose caller tries again.
            .test_before_acquire(true)
            .connect_lazy_with(self.options.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::STATEMENT_LIMIT;

    #[test]
    fn the_server_ends_a_statement_before_the_host_gives_its_connection_up() {
        let limit = SETTINGS.iter().find(|(name, _)| *name == "statement_timeout").map(|(_, value)| *value);
        assert_eq!(limit, Some("60s"));
        assert!(STATEMENT_LIMIT > Duration::from_secs(60));
    }

    #[test]
    fn the_name_of_a_database_does_not_contain_its_password() {
        let server = Server::new("postgres://ann:hunter2@db.example:6543/skep").unwrap();
        assert_eq!(server.name(), "skep on db.example:6543");
        let error = Server::new("mysql://ann:hunter2@db/skep");
        let said = error.map(|server| server.name()).unwrap_or_else(|error| error.to_string());
        assert!(!said.contains("hunter2"), "{said}");
    }
}
