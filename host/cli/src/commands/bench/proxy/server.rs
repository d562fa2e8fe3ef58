//! The server of a PostgreSQL database in the address of the database.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use reqwest::Url;

const POSTGRES_PORT: u16 = 5432;

/// Returns the server of a database as HOST:PORT. `None` if it is reached through a socket of the machine, or under a name that
/// its certificate has to have.
pub fn server_of(database: &str) -> Option<String> {
    let url = Url::parse(database).ok()?;
    let elsewhere = url.query_pairs().any(|(name, value)| {
        matches!(&*name, "host" | "hostaddr" | "port") || (name == "sslmode" && value == "verify-full")
    });
    let host = url.host_str().filter(|host| !elsewhere && !host.is_empty() && !host.contains(','))?;
    Some(format!("{host}:{}", url.port().unwrap_or(POSTGRES_PORT)))
}

/// Returns the address of the same database at another server.
pub fn at(database: &str, server: SocketAddr) -> Result<String> {
    let mut url = Url::parse(database).context("the address of the database is not valid")?;
    let host = server.ip().to_string();
    if url.set_host(Some(&host)).is_err() || url.set_port(Some(server.port())).is_err() {
        bail!("the address of the database has no host");
    }
    Ok(url.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_a_database_is_exchanged() {
        let server: SocketAddr = "127.0.0.1:7".parse().expect("an address");
        for (database, to, then) in [
            ("postgres://me:p%40@db.test/x?a=b", "db.test:5432", "postgres://me:p%40@127.0.0.1:7/x?a=b"),
            ("postgresql://127.0.0.1:5433/x", "127.0.0.1:5433", "postgresql://127.0.0.1:7/x"),
            ("postgres://me@[::1]:6000/x", "[::1]:6000", "postgres://me@127.0.0.1:7/x"),
        ] {
            assert_eq!(server_of(database).as_deref(), Some(to));
            assert_eq!(at(database, server).expect("it has a host"), then);
        }
    }

    #[test]
    fn a_database_behind_a_socket_or_under_a_checked_name_has_no_proxy() {
        for database in [
            "postgres://me@localhost:5432/x?host=/run/postgresql",
            "postgres:///x?host=/run/postgresql",
            "postgres://me@db.example/x?sslmode=verify-full",
        ] {
            assert_eq!(server_of(database), None, "{database}");
        }
    }
}
