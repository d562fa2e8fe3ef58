//! Migration of a PostgreSQL database to the schema of this build.
//!
//! Schemas have the same numbers as in SQLite. The first one here has the number of the SQLite schema that it is equal
//! to, and later steps are taken one by one.

use crate::{StoreError, schema::KNOWN};
use sqlx::{Connection as _, PgConnection, query_as, query_scalar};

/// The tables of schema [`BASE`].
const TABLES: &str = include_str!("base.sql");
/// The number of the first schema.
pub(crate) const BASE: i64 = 24;
/// The steps from each later schema to the next.
const STEPS: &[&str] = &[];
const _: () = assert!(BASE + STEPS.len() as i64 == KNOWN, "both databases have the same schemas");
/// The oldest schema whose hosts can use this one too. A step adds tables, and columns with defaults; a later
/// version's step takes away what no host of the version before uses any more, and raises this number.
const OLDEST: i64 = 24;

/// How far the tables of an older version may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upgrade {
    /// Only if hosts of that version can use them afterwards: no copy is made on the server, so this is the way back.
    Reversible,
    /// In any case, because the operator asks for it.
    Any,
}

/// Makes hosts that start at the same time migrate one after another.
const LOCK: i64 = 0x736b_6570;

/// A schema that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its number; 0 if there are no tables.
    pub(crate) version: i64,
    /// The oldest schema whose hosts can use it.
    pub(crate) oldest: i64,
}

impl Found {
    /// Returns whether hosts of this build can use it, whether they are of the same version or an older one.
    pub(crate) fn is_usable(self) -> bool {
        self.version >= KNOWN && self.oldest <= KNOWN
    }

    /// Checks that tables may be changed so that hosts older than schema `oldest` cannot use them any more.
    fn check_upgrade(self, upgrade: Upgrade, oldest: i64) -> Result<(), StoreError> {
        let is_lost = self.version > 0 && self.version < oldest;
        match upgrade {
            Upgrade::Reversible if is_lost => {
                Err(StoreError::NoWayBack { found: self.version, known: KNOWN })
            }
            Upgrade::Reversible | Upgrade::Any => Ok(()),
        }
    }
}

/// Returns the schema of a database.
pub(crate) async fn find(connection: &mut PgConnection) -> Result<Found, StoreError> {
    let failed = || StoreError::while_it("read the version of the schema");
    let tables: i64 = query_scalar(
        "SELECT COUNT(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace(current_schema())",
    )
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    if tables == 0 {
        return Ok(Found { version: 0, oldest: 0 });
    }
    let ours: bool = query_scalar("SELECT to_regclass('skep_schema') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await
        .map_err(failed())?;
    if !ours {
        return Err(StoreError::Foreign);
    }
    let found = query_as("SELECT version, oldest FROM skep_schema").fetch_one(connection).await;
    let (version, oldest) = found.map_err(failed())?;
    Ok(Found { version, oldest })
}

/// Checks that this build can use the schema of a database as it is.
pub(crate) async fn check(connection: &mut PgConnection) -> Result<(), StoreError> {
    match find(connection).await? {
        found if found.is_usable() => Ok(()),
        Found { version, .. } if version > KNOWN => {
            Err(StoreError::NewerSchema { found: version, known: KNOWN })
        }
        Found { version, .. } => Err(StoreError::OlderSchema { found: version, known: KNOWN }),
    }
}

/// Creates the tables or brings them to the schema of this build, in one transaction. A newer schema that this build can
/// use stays as it is.
pub(crate) async fn migrate(connection: &mut PgConnection, upgrade: Upgrade) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("brought the schema up to date");
    let mut transaction = connection.begin().await.map_err(failed())?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
    let found = find(&mut transaction).await?;
    if found.is_usable() {
        return Ok(());
    }
    let Found { version, .. } = found;
    if version > KNOWN {
        return Err(StoreError::NewerSchema { found: version, known: KNOWN });
    }
    found.check_upgrade(upgrade, OLDEST)?;
    if version == 0 {
        let create = "CREATE TABLE skep_schema (version BIGINT NOT NULL, oldest BIGINT NOT NULL)";
        for script in [TABLES, create, "INSERT INTO skep_schema VALUES (0, 0)"] {
            sqlx::raw_sql(script).execute(&mut *transaction).await.map_err(failed())?;
        }
    }
    for step in &STEPS[(version.max(BASE) - BASE) as usize..] {
        sqlx::raw_sql(*step).execute(&mut *transaction).await.map_err(failed())?;
    }
    sqlx::query("UPDATE skep_schema SET version = $1, oldest = $2")
        .bind(KNOWN)
        .bind(OLDEST)
        .execute(&mut *transaction)
        .await
        .map_err(failed())?;
    transaction.commit().await.map_err(failed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_without_a_way_back_is_made_only_if_it_is_asked_for() {
        let checked = |version, oldest, upgrade| {
            Found { version, oldest: version }
                .check_upgrade(upgrade, oldest)
                .map_err(|error| error.to_string())
        };
        assert_eq!(checked(0, 26, Upgrade::Reversible), Ok(()), "there are no tables yet");
        assert_eq!(checked(25, 25, Upgrade::Reversible), Ok(()), "hosts of schema 25 can use the new tables");
        assert_eq!(checked(25, 26, Upgrade::Any), Ok(()));
        let refused = checked(25, 26, Upgrade::Reversible).expect_err("no way back");
        assert!(refused.contains("(schema 25") && refused.contains("`skep db migrate`"), "{refused}");
    }
}
