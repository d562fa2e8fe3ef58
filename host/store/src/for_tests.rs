//! Databases for tests.

use crate::{
    Durability, Store, StoreError,
    postgres::{Reconnecting, Server},
};
use std::{
    env,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// The variable with the address of a PostgreSQL server. Tests that need a database use it if it is set.
pub const TEST_SERVER: &str = "SKEP_TEST_POSTGRES";

impl Store {
    /// Opens an empty database: in memory, or, if [`TEST_SERVER`] is set, in a new schema on that server.
    pub async fn for_tests() -> Result<Store, StoreError> {
        match env::var(TEST_SERVER) {
            Ok(url) => Self::connect_to(schema(&url, &new_name()).await?).await,
            Err(_) => Self::in_memory().await,
        }
    }

    /// Opens the database that belongs to this path: the file, or, if [`TEST_SERVER`] is set, a schema on that
    /// server, whose name is in a file of its own, so that a copy of the folder has the same database.
    pub async fn open_for_tests(path: &Path) -> Result<Store, StoreError> {
        match env::var(TEST_SERVER) {
            Ok(url) => match Self::connect_to(schema_of(&url, path).await?).await {
                // A test that simulates a crash keeps the store of the host that crashed.
                Err(StoreError::InUse { .. }) => {
                    Ok(Self::on(Reconnecting::after_a_crash(schema_of(&url, path).await?).await?))
                }
                opened => opened,
            },
            Err(_) => Self::open(path, Durability::Process).await,
        }
    }

    /// Joins the cluster that uses the database that belongs to this path. Returns `None` without a server, because only a server
    /// has several hosts.
    pub async fn join_for_tests(path: &Path, host_url: &str) -> Result<Option<Store>, StoreError> {
        match env::var(TEST_SERVER) {
            Ok(url) => Self::join(schema_of(&url, path).await?, host_url).await.map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Opens a database that another store of [`Store::open_for_tests`] uses, as a command beside a host does.
    pub async fn open_beside_for_tests(path: &Path) -> Result<Store, StoreError> {
        match env::var(TEST_SERVER) {
            Ok(url) => Self::connect_beside_to(schema_of(&url, path).await?).await,
            Err(_) => Self::open_beside(path, Durability::Process).await,
        }
    }
}

fn new_name() -> String {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    format!("test_{}_{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed))
}

/// Returns the schema of the database with this path.
async fn schema_of(url: &str, path: &Path) -> Result<Server, StoreError> {
    let failed = |error: std::io::Error| StoreError::opening(path, error.into());
    let file = path.with_extension("schema");
    if !file.try_exists().map_err(failed)? {
        std::fs::write(&file, new_name()).map_err(failed)?;
    }
    schema(url, &std::fs::read_to_string(&file).map_err(failed)?).await
}

/// Returns a schema, which is created if it is not there.
async fn schema(url: &str, name: &str) -> Result<Server, StoreError> {
    let server = Server::new(url)?;
    let mut connection = server.connect().await?;
    let create = format!("CREATE SCHEMA IF NOT EXISTS {name}");
    let created = sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut connection).await;
    created.map_err(StoreError::while_it("created a schema for a test"))?;
    Ok(server.in_schema(name))
}
