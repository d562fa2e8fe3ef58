//! Databases for tests.

use crate::{Durability, Store, StoreError, postgres::Server};
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
        static STORES: AtomicU64 = AtomicU64::new(0);
        match env::var(TEST_SERVER) {
            Ok(url) => {
                let number = STORES.fetch_add(1, Ordering::Relaxed);
                Self::in_schema(&url, &format!("test_{}_{number}", std::process::id())).await
            }
            Err(_) => Self::in_memory().await,
        }
    }

    /// Opens the database that belongs to this path: the file, or, if [`TEST_SERVER`] is set, a schema on that
    /// server, which is the same for the same path.
    pub async fn open_for_tests(path: &Path) -> Result<Store, StoreError> {
        match env::var(TEST_SERVER) {
            Ok(url) => {
                let name =
                    path.to_string_lossy().replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
                let tail = &name[name.len().saturating_sub(40)..];
                Self::in_schema(&url, &format!("test_{}_{}", std::process::id(), tail.to_lowercase())).await
            }
            Err(_) => Self::open(path, Durability::Process).await,
        }
    }

    async fn in_schema(url: &str, schema: &str) -> Result<Store, StoreError> {
        let server = Server::new(url, Durability::Process)?;
        let mut connection = server.connect().await?;
        let create = format!("CREATE SCHEMA IF NOT EXISTS {schema}");
        let created = sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut connection).await;
        created.map_err(StoreError::while_it("created a schema for a test"))?;
        Self::connect_to(server.in_schema(schema)).await
    }
}
