//! API keys: which caller may act as whom. The store never holds a key itself, only its SHA-256.

use crate::{
    Store, StoreError,
    notices::{self, NoticeKind},
    rows,
    sql::{AssertSqlSafe, Connection, Row, query, query_scalar},
};

/// Maximum number of keys. Revoked and expired keys count, because they stay listed.
const MAX_KEYS: i64 = 10_000;

/// The stored data of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKeyRow {
    /// The name by which people identify the key. It reveals nothing of the key itself.
    pub id: String,
    /// SHA-256 of the key.
    pub digest: [u8; 32],
    pub tenant: String,
    pub role: String,
    /// The agents that the key is valid for, separated by commas; `None` means all agents.
    pub agents: Option<String>,
    pub name: String,
    pub created_at_ms: u64,
    pub expires_at_ms: Option<u64>,
    pub revoked_at_ms: Option<u64>,
    /// The day of the last use, in days since 1970.
    pub last_used_day: Option<u32>,
    pub requests_per_minute: Option<u32>,
    /// Whether the key may read what was said in requests to models.
    pub bodies: bool,
}

const COLUMNS: &str = "id, digest, tenant, role, agents, name, created_at_ms, expires_at_ms, revoked_at_ms, last_used_day, \
     requests_per_minute, bodies";

impl Store {
    /// Adds a key.
    pub async fn put_api_key(&self, key: &ApiKeyRow) -> Result<(), StoreError> {
        self.write_common(key.clone(), |connection, key| Box::pin(put(connection, key))).await
    }

    /// Returns all keys, the oldest first.
    pub async fn api_keys(&self) -> Result<Vec<ApiKeyRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM api_keys ORDER BY created_at_ms, id");
        let rows = query(AssertSqlSafe(sql))
            .fetch_all(&self.key_reader)
            .await
            .map_err(StoreError::while_it("listed API keys"))?;
        Ok(rows::readable(&rows, "API key", api_key_row))
    }

    /// Returns a number that grows whenever any process creates or changes a key. Using a key does not change
    /// it.
    pub async fn api_key_changes(&self) -> Result<u64, StoreError> {
        let changes: i64 = query_scalar("SELECT changes FROM api_key_changes")
            .fetch_one(&self.key_reader)
            .await
            .map_err(StoreError::while_it("looked for changed API keys"))?;
        Ok(changes as u64)
    }

    /// Marks a key as revoked. A key that is already revoked stays unchanged. Returns `None` if the key does
    /// not exist.
    pub async fn revoke_api_key(&self, id: &str, at_ms: u64) -> Result<Option<ApiKeyRow>, StoreError> {
        self.write_common((id.to_owned(), at_ms), |connection, (id, at_ms)| {
            Box::pin(revoke(connection, id, *at_ms))
        })
        .await
    }

    /// Records that the key was used on this day.
    pub async fn use_api_key(&self, id: &str, day: u32) -> Result<(), StoreError> {
        self.write_common((id.to_owned(), day), |connection, (id, day)| {
            Box::pin(async move {
                let day = *day;
                query("UPDATE api_keys SET last_used_day = ?2 WHERE id = ?1")
                    .bind(id)
                    .bind(day)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("noted the use of an API key"))?;
                Ok(())
            })
        })
        .await
    }
}

async fn put(connection: &mut Connection, key: &ApiKeyRow) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("stored an API key");
    let known: i64 =
        query_scalar("SELECT COUNT(*) FROM api_keys").fetch_one(&mut *connection).await.map_err(failed())?;
    if known >= MAX_KEYS {
        return Err(StoreError::TooManyApiKeys { limit: MAX_KEYS });
    }
    let sql = format!("INSERT INTO api_keys ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
    query(AssertSqlSafe(sql))
        .bind(&key.id)
        .bind(key.digest.as_slice())
        .bind(&key.tenant)
        .bind(&key.role)
        .bind(&key.agents)
        .bind(&key.name)
        .bind(key.created_at_ms as i64)
        .bind(key.expires_at_ms.map(|at| at as i64))
        .bind(key.revoked_at_ms.map(|at| at as i64))
        .bind(key.last_used_day)
        .bind(key.requests_per_minute)
        .bind(key.bodies)
        .execute(&mut *connection)
        .await
        .map_err(failed())?;
    notices::raise(connection, NoticeKind::Keys).await
}

async fn revoke(connection: &mut Connection, id: &str, at_ms: u64) -> Result<Option<ApiKeyRow>, StoreError> {
    let sql = format!(
        "UPDATE api_keys SET revoked_at_ms = COALESCE(revoked_at_ms, ?2) WHERE id = ?1 RETURNING {COLUMNS}"
    );
    let row = query(AssertSqlSafe(sql))
        .bind(id)
        .bind(at_ms as i64)
        .fetch_optional(&mut *connection)
        .await
        .map_err(StoreError::while_it("revoked an API key"))?;
    let Some(row) = row else { return Ok(None) };
    notices::raise(connection, NoticeKind::Keys).await?;
    rows::one(&row, "API key", api_key_row).map(Some)
}

fn api_key_row(row: &Row) -> Result<ApiKeyRow, sqlx::Error> {
    let at_ms = |column: usize| -> Result<Option<u64>, sqlx::Error> {
        Ok(row.try_get::<Option<i64>>(column)?.map(|at| at as u64))
    };
    Ok(ApiKeyRow {
        id: row.try_get(0)?,
        // A CHECK of the table guarantees 32 bytes.
        digest: row.try_get::<Vec<u8>>(1)?.try_into().unwrap_or_default(),
        tenant: row.try_get(2)?,
        role: row.try_get(3)?,
        agents: row.try_get(4)?,
        name: row.try_get(5)?,
        created_at_ms: row.try_get::<i64>(6)? as u64,
        expires_at_ms: at_ms(7)?,
        revoked_at_ms: at_ms(8)?,
        last_used_day: row.try_get(9)?,
        requests_per_minute: row.try_get(10)?,
        bodies: row.try_get(11)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str, digest: u8) -> ApiKeyRow {
        ApiKeyRow {
            id: id.into(),
            digest: [digest; 32],
            tenant: "acme".into(),
            role: "invoke".into(),
            agents: Some("a,b".into()),
            name: "ci".into(),
            created_at_ms: 5,
            expires_at_ms: Some(9),
            revoked_at_ms: None,
            last_used_day: None,
            requests_per_minute: Some(u32::MAX),
            bodies: digest == 1,
        }
    }

    #[tokio::test]
    async fn a_key_is_listed_and_keeps_its_first_revocation_time() {
        let store = Store::for_tests().await.expect("a database in memory");
        store.put_api_key(&key("k1", 1)).await.expect("a new key");
        store.put_api_key(&key("k2", 2)).await.expect("a new key");
        assert_eq!(store.api_keys().await.expect("reads"), [key("k1", 1), key("k2", 2)]);
        store.put_api_key(&key("k3", 1)).await.expect_err("the digest is taken");

        for at_ms in [7, 8] {
            let revoked = store.revoke_api_key("k1", at_ms).await.expect("writes").expect("there");
            assert_eq!(revoked.revoked_at_ms, Some(7));
        }
        assert_eq!(store.revoke_api_key("k9", 7).await.expect("writes"), None);
        store.use_api_key("k2", 20_000).await.expect("writes");
        let used: Vec<_> =
            store.api_keys().await.expect("reads").iter().map(|key| key.last_used_day).collect();
        assert_eq!(used, [None, Some(20_000)]);
    }

    #[tokio::test]
    async fn key_changes_count_creations_and_revocations_by_other_processes_but_not_uses() {
        let dir = tempfile::tempdir().expect("a folder");
        let open = async || Store::open_for_tests(&dir.path().join("skep.db")).await.expect("a database");
        let (host, other) = (open().await, open().await);
        let before = host.api_key_changes().await.expect("reads");
        other.put_api_key(&key("k1", 1)).await.expect("a new key");
        let made = host.api_key_changes().await.expect("reads");
        other.use_api_key("k1", 20_000).await.expect("writes");
        let used = host.api_key_changes().await.expect("reads");
        other.revoke_api_key("k1", 7).await.expect("writes");
        let revoked = host.api_key_changes().await.expect("reads");
        assert!(before < made && made == used && used < revoked, "{before} {made} {used} {revoked}");
    }
}
