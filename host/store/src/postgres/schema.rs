//! Migration of a PostgreSQL database to the schema of this build.
//!
//! Schemas have the same numbers as in SQLite. The first one here has the number of the SQLite schema that it is equal
//! to, and later steps are taken one by one.

use crate::{StoreError, schema::KNOWN};
use sqlx::{Connection as _, PgConnection, query_scalar};

/// The tables of schema [`BASE`].
const TABLES: &str = include_str!("base.sql");
/// The number of the first schema.
pub(crate) const BASE: i64 = 24;
/// The steps from each later schema to the next.
const STEPS: &[&str] = &[];
const _: () = assert!(BASE + STEPS.len() as i64 == KNOWN, "both databases have the same schemas");

/// Makes hosts that start at the same time migrate one after another.
const LOCK: i64 = 0x736b_6570;

/// Returns the number of the schema; 0 if there are no tables.
pub(crate) async fn version(connection: &mut PgConnection) -> Result<i64, StoreError> {
    let failed = || StoreError::while_it("read the version of the schema");
    let tables: i64 = query_scalar(
        "SELECT COUNT(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace(current_schema())",
    )
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    if tables == 0 {
        return Ok(0);
    }
    let ours: bool = query_scalar("SELECT to_regclass('skep_schema') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await
        .map_err(failed())?;
    if !ours {
        return Err(StoreError::Foreign);
    }
    query_scalar("SELECT version FROM skep_schema").fetch_one(connection).await.map_err(failed())
}

/// Checks that a database has the schema of this build.
pub(crate) async fn check(connection: &mut PgConnection) -> Result<(), StoreError> {
    match version(connection).await? {
        KNOWN => Ok(()),
        found if found > KNOWN => Err(StoreError::NewerSchema { found, known: KNOWN }),
        found => Err(StoreError::OlderSchema { found, known: KNOWN }),
    }
}

/// Creates the tables or brings them to the schema of this build, in one transaction.
pub(crate) async fn migrate(connection: &mut PgConnection) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("brought the schema up to date");
    let mut transaction = connection.begin().await.map_err(failed())?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
    let found = version(&mut transaction).await?;
    if found > KNOWN {
        return Err(StoreError::NewerSchema { found, known: KNOWN });
    }
    if found == KNOWN {
        return Ok(());
    }
    if found == 0 {
        let create = "CREATE TABLE skep_schema (version BIGINT NOT NULL)";
        for script in [TABLES, create, "INSERT INTO skep_schema VALUES (0)"] {
            sqlx::raw_sql(script).execute(&mut *transaction).await.map_err(failed())?;
        }
    }
    for step in &STEPS[(found.max(BASE) - BASE) as usize..] {
        sqlx::raw_sql(*step).execute(&mut *transaction).await.map_err(failed())?;
    }
    sqlx::query("UPDATE skep_schema SET version = $1")
        .bind(KNOWN)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
    transaction.commit().await.map_err(failed())
}
