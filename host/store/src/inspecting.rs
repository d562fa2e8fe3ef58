//! A look at a database that a host may be using, without changing it.

use crate::{StoreError, postgres, schema};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, SqliteConnection, query, query_as, query_scalar,
    sqlite::SqliteConnectOptions,
};
use std::path::Path;

/// The state of a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatabaseReport {
    /// The program that keeps it, with its version.
    pub product: String,
    /// Number of the schema, which [`known_schema`](crate::known_schema) is compared with; 0 if there are no tables.
    pub schema: i64,
    /// Whether this build can use the tables as they are.
    pub is_current: bool,
    pub bytes: u64,
    /// The server, if there is one.
    pub server: Option<ServerReport>,
}

/// The state of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReport {
    pub is_encrypted: bool,
    /// Number of connections that may be open, and that are, without this one.
    pub max_connections: u32,
    pub connections: u32,
    /// Whether a host uses the database now.
    pub has_host: bool,
    /// The host that uses it, unless its version has no table of hosts.
    pub host: Option<HostReport>,
}

/// A host that uses a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Its number, which no later host gets.
    pub number: i64,
    pub version: String,
    /// Time since it was last heard from. A host that is silent for too long can be replaced.
    pub silent_ms: u64,
}

/// Looks at the file of an SQLite database, and reads all of it to find damage.
pub async fn inspect_file(path: &Path) -> Result<DatabaseReport, StoreError> {
    let failed = || StoreError::while_it("checked the database");
    let options = SqliteConnectOptions::new().filename(path).read_only(true);
    let mut connection = options.connect().await.map_err(|error| StoreError::opening(path, error))?;
    let look = async |connection: &mut SqliteConnection| {
        let (version, bytes): (String, i64) = query_as(
            "SELECT sqlite_version(), page_count * page_size FROM pragma_page_count, pragma_page_size",
        )
        .fetch_one(&mut *connection)
        .await
        .map_err(failed())?;
        let schema = schema::version(&mut *connection).await?;
        if schema == 0 {
            return Err(StoreError::Foreign);
        }
        let damage: String =
            query_scalar("PRAGMA quick_check(1)").fetch_one(&mut *connection).await.map_err(failed())?;
        let orphan =
            query("PRAGMA foreign_key_check").fetch_optional(connection).await.map_err(failed())?.is_some();
        let damage = (damage != "ok").then_some(damage);
        let damage = damage.or(orphan.then(|| "a row refers to one that does not exist".to_owned()));
        Ok((version, bytes, schema, damage))
    };
    let looked = look(&mut connection).await.map_err(|error| error.of_file(path))?;
    connection.close().await.map_err(failed())?;
    let (version, bytes, schema, damage) = looked;
    if let Some(reason) = damage {
        let name = path.display().to_string();
        return Err(StoreError::Unreadable { what: "the database", name, reason });
    }
    Ok(DatabaseReport {
        product: format!("SQLite {version}"),
        schema,
        is_current: schema == schema::KNOWN,
        bytes: bytes.max(0) as u64,
        server: None,
    })
}

/// Looks at a PostgreSQL database, and checks that a host can use it.
pub async fn inspect_server(url: &str) -> Result<DatabaseReport, StoreError> {
    let failed = || StoreError::while_it("checked the database");
    let (mut connection, found) = postgres::inspect(url).await?;
    let (version, bytes, max_connections, connections, is_encrypted): (String, i64, i32, i64, bool) = query_as(
        "SELECT current_setting('server_version'), pg_database_size(current_database()),
             current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
             (SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid != pg_backend_pid()),
             COALESCE((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), FALSE)",
    )
    .fetch_one(&mut connection)
    .await
    .map_err(failed())?;
    let has_host = query_scalar(AssertSqlSafe(postgres::has_host())).fetch_one(&mut connection).await;
    let has_host: bool = has_host.map_err(failed())?;
    let host = match has_host && found.is_usable() {
        true => postgres::newest_host(&mut connection).await.map_err(failed())?,
        false => None,
    };
    connection.close().await.map_err(failed())?;
    Ok(DatabaseReport {
        product: format!("PostgreSQL {version}"),
        schema: found.version,
        is_current: found.is_usable(),
        bytes: bytes.max(0) as u64,
        server: Some(ServerReport {
            is_encrypted,
            max_connections: u32::try_from(max_connections).unwrap_or(0),
            connections: u32::try_from(connections).unwrap_or(u32::MAX),
            has_host,
            host: host.map(|(number, version, silent_ms)| HostReport {
                number,
                version,
                silent_ms: u64::try_from(silent_ms).unwrap_or(0),
            }),
        }),
    })
}
