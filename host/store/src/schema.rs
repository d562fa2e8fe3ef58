//! Migration of a database to the schema of this build.

use crate::{StoreError, schema_steps::STEPS};
use sqlx::{SqliteConnection, query, query_as, query_scalar};

/// Number of schema steps in this build.
pub(crate) const KNOWN: i64 = STEPS.len() as i64;

/// Returns the number of steps that a database has taken.
pub(crate) async fn version(connection: &mut SqliteConnection) -> Result<i64, StoreError> {
    let version = query_scalar("SELECT user_version FROM pragma_user_version").fetch_one(connection).await;
    version.map_err(StoreError::while_it("read the version of the schema"))
}

/// Checks that a database has the schema of this build.
pub(crate) async fn check(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    match version(connection).await? {
        KNOWN => Ok(()),
        0 => Err(StoreError::Foreign),
        found if found > KNOWN => Err(StoreError::NewerSchema { found, known: KNOWN }),
        found => Err(StoreError::OlderSchema { found, known: KNOWN }),
    }
}

/// Migrates a database to the schema of this build, in one transaction.
pub(crate) async fn migrate(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("brought the schema up to date");
    let known = KNOWN;
    let (found, tables): (i64, i64) =
        query_as("SELECT user_version, (SELECT COUNT(*) FROM sqlite_schema) FROM pragma_user_version")
            .fetch_one(&mut *connection)
            .await
            .map_err(failed())?;
    if found == 0 && tables > 0 {
        return Err(StoreError::Foreign);
    }
    if found > known {
        return Err(StoreError::NewerSchema { found, known });
    }
    if found < known {
        // A step that replaces a table must not delete the rows that refer to it.
        query("PRAGMA foreign_keys = OFF").execute(&mut *connection).await.map_err(failed())?;
        // In one transaction, because the backup from before has to fit to what is found after a crash.
        let steps = STEPS[found.max(0) as usize..].concat();
        let script = format!("BEGIN IMMEDIATE; {steps} PRAGMA user_version = {known}; COMMIT;");
        sqlx::raw_sql(sqlx::AssertSqlSafe(script)).execute(&mut *connection).await.map_err(failed())?;
        query("PRAGMA foreign_keys = ON").execute(&mut *connection).await.map_err(failed())?;
    }
    query("PRAGMA optimize").execute(connection).await.map_err(failed())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sqlx::Connection;

    #[tokio::test]
    async fn a_database_that_a_host_may_be_using_is_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        let store = crate::Store::open(&path, crate::Durability::Process).await.unwrap();
        store.close().await;
        let beside = || crate::Store::open_beside(&path, crate::Durability::Process);
        beside().await.expect("its schema is ours").close().await;
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
        for (version, expected) in [(KNOWN - 1, "older version"), (KNOWN + 1, "newer version")] {
            let mut connection = SqliteConnection::connect_with(&options).await.unwrap();
            let set = format!("PRAGMA user_version = {version}");
            sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&mut connection).await.unwrap();
            let error = beside().await.expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(super::version(&mut connection).await.unwrap(), version);
        }
    }

    #[tokio::test]
    async fn agents_of_the_first_schema_become_version_one_and_keep_their_sessions() {
        let mut connection =
            SqliteConnection::connect("sqlite::memory:").await.expect("a database in memory");
        let first = format!(
            "{} PRAGMA user_version = 1; PRAGMA foreign_keys = ON;
             INSERT INTO components VALUES ('d', x'00');
             INSERT INTO agents VALUES ('a', 'name = \"a\"', 'd', 7);
             INSERT INTO sessions VALUES ('a', 's', 3, 1, 2);
             INSERT INTO state VALUES ('a', 's', 'k', x'01');
             INSERT INTO outcomes VALUES ('a', 's', 'k', 3, x'02');
             INSERT INTO conversations VALUES ('a', 's', 'main', CAST('{{\"model\": \"m\"}}' AS BLOB)), ('a', 's', 'bad', x'ff');",
            STEPS[0]
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(first)).execute(&mut connection).await.expect("the first schema");
        migrate(&mut connection).await.expect("the later steps");
        let count = async |connection: &mut SqliteConnection, sql: &'static str| -> i64 {
            query_scalar(sql).fetch_one(connection).await.expect("a count")
        };
        let version =
            "SELECT deployments.version FROM agents JOIN deployments ON agent = name WHERE digest = 'd'";
        assert_eq!(count(&mut connection, version).await, 1);
        let state = "SELECT turns FROM sessions JOIN state ON state.session = sessions.key
             WHERE agent = 'a' AND sessions.session = 's' AND state.key = 'k' AND value = x'01'";
        assert_eq!(count(&mut connection, state).await, 3);
        let without_models = "SELECT COUNT(*) FROM conversations WHERE model IS NULL AND digest IS NULL";
        assert_eq!(count(&mut connection, without_models).await, 2, "including one that cannot be read");
        let without_digests = "SELECT COUNT(*) FROM outcomes WHERE body = x'02' AND message_digest IS NULL";
        assert_eq!(count(&mut connection, without_digests).await, 1);
        query("DELETE FROM agents").execute(&mut connection).await.expect("deletes");
        assert_eq!(
            count(&mut connection, "SELECT COUNT(*) FROM state").await,
            0,
            "the rows still belong together"
        );
        assert_eq!(count(&mut connection, "SELECT COUNT(*) FROM deployments").await, 0);
    }
}
