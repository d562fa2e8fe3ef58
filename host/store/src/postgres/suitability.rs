//! Checks whether a host can use a database: version, encoding, user privileges, and that no transaction pooler is in
//! between.

use super::Server;
use crate::StoreError;
use sqlx::{Connection as _, PgConnection, query_as, query_scalar};
use std::time::Duration;

/// The oldest server that has everything that statements use.
const OLDEST: i32 = 140_000;
/// Time for which the check for a pooler waits for a second connection.
const PROBE_TIME: Duration = Duration::from_secs(3);

/// Checks everything that could make a host fail later.
pub(crate) async fn check(server: &Server, connection: &mut PgConnection) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("checked the database");
    let unfit = |reason: String, hint| Err(StoreError::Unsuitable { database: server.name(), reason, hint });
    let (number, version, encoding, is_standby, may_create, max_connections, is_encrypted): (
        i32,
        String,
        String,
        bool,
        bool,
        i32,
        bool,
    ) = query_as(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'),
             current_setting('server_encoding'), pg_is_in_recovery(),
             COALESCE(has_schema_privilege(current_schema(), 'CREATE'), FALSE),
             current_setting('max_connections')::int,
             COALESCE((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), FALSE)",
    )
    // Behind a pooler, another connection may have prepared a statement with the same name.
    .persistent(false)
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    if let Some(reason) = too_old(number, &version) {
        return unfit(reason, "upgrade the server");
    }
    if encoding != "UTF8" {
        return unfit(format!("its encoding is {encoding}"), "create the database with ENCODING 'UTF8'");
    }
    if is_standby {
        return unfit("it is a standby, which only reads".into(), "use the address of the primary server");
    }
    if !may_create {
        return unfit(
            "its user may not create tables".into(),
            "run GRANT CREATE ON SCHEMA public TO the user, or make the user the owner of the database",
        );
    }
    if is_pooled(server, connection).await.map_err(failed())? {
        return unfit(
            "a pooler gives each transaction another connection of the server".into(),
            "use the address of the server itself, or a pooler in session mode",
        );
    }
    tracing::info!(
        database = server.name(),
        version,
        max_connections,
        is_encrypted,
        "connected to PostgreSQL"
    );
    Ok(())
}

/// Returns why a server of this version cannot be used, if it is too old.
fn too_old(number: i32, version: &str) -> Option<String> {
    (number < OLDEST)
        .then(|| format!("its server has version {version}, and version 14 is the oldest that will do"))
}

/// Returns whether the connection is not always with the same process of the server. While another connection keeps a
/// transaction open, a pooler for transactions has to answer from another process, or lets one of the two wait.
async fn is_pooled(server: &Server, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let process = async |connection: &mut PgConnection| {
        query_scalar::<_, i32>("SELECT pg_backend_pid()").persistent(false).fetch_one(connection).await
    };
    let before = process(connection).await?;
    let probe = async {
        let mut other = server.connect_once().await?;
        let mut transaction = other.begin().await?;
        process(&mut transaction).await?;
        let after = process(connection).await?;
        transaction.rollback().await?;
        other.close().await?;
        Ok::<_, sqlx::Error>(before != after)
    };
    match tokio::time::timeout(PROBE_TIME, probe).await {
        Ok(result) => result,
        Err(_waited) => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_before_version_14_are_refused() {
        let refused = too_old(130_021, "13.21 (Debian 13.21-1)").expect("it is too old");
        assert!(
            refused.contains("version 13.21") && refused.contains("version 14 is the oldest"),
            "{refused}"
        );
        assert_eq!((too_old(140_000, "14.0"), too_old(180_004, "18.4")), (None, None));
    }
}
