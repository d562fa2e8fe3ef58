//! Files of compiled code that this host wrote, with their checksums.
//!
//! The code lies in files beside the database. A row vouches for one file: a file whose bytes have another
//! checksum was not written by this host.

use crate::{
    Store, StoreError, rows,
    sql::{Row, query},
};

/// One file of compiled code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtifactRow {
    /// Identifies the component and everything that its code depends on.
    pub key: String,
    /// SHA-256 of the file, in hexadecimal.
    pub checksum: String,
    pub bytes: u64,
    pub used_at_ms: u64,
}

impl Store {
    /// Records a file, replacing one with the same key.
    pub async fn put_artifact(&self, artifact: &ArtifactRow) -> Result<(), StoreError> {
        self.write_common(artifact.clone(), |connection, artifact| {
            Box::pin(async move {
                query(
                    "INSERT INTO artifacts (key, checksum, bytes, used_at_ms) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (key) DO UPDATE SET checksum = ?2, bytes = ?3, used_at_ms = ?4",
                )
                .bind(&artifact.key)
                .bind(&artifact.checksum)
                .bind(artifact.bytes as i64)
                .bind(artifact.used_at_ms as i64)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("recorded compiled code"))?;
                Ok(())
            })
        })
        .await
    }

    /// Returns all files, the least recently used first.
    pub async fn artifacts(&self) -> Result<Vec<ArtifactRow>, StoreError> {
        let rows = query("SELECT key, checksum, bytes, used_at_ms FROM artifacts ORDER BY used_at_ms, key")
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed compiled code"))?;
        Ok(rows::readable(&rows, "file of compiled code", artifact_row))
    }

    /// Returns the file with this key and marks it as used at `at_ms`.
    pub async fn use_artifact(&self, key: &str, at_ms: u64) -> Result<Option<ArtifactRow>, StoreError> {
        self.write_common((key.to_owned(), at_ms), |connection, (key, at_ms)| {
            Box::pin(async move {
                let at_ms = *at_ms;
                let row =
                    query("UPDATE artifacts SET used_at_ms = ?2 WHERE key = ?1 RETURNING checksum, bytes")
                        .bind(key)
                        .bind(at_ms as i64)
                        .fetch_optional(connection)
                        .await
                        .map_err(StoreError::while_it("looked for compiled code"))?;
                let artifact = |row: Row| {
                    Ok::<_, sqlx::Error>(ArtifactRow {
                        key: key.to_owned(),
                        checksum: row.try_get(0)?,
                        bytes: row.try_get::<i64>(1)? as u64,
                        used_at_ms: at_ms,
                    })
                };
                let artifact = row.map(artifact).transpose();
                artifact.map_err(StoreError::while_it("looked for compiled code"))
            })
        })
        .await
    }

    /// Removes the row with this key, if there is one. The caller removes the file.
    pub async fn delete_artifact(&self, key: &str) -> Result<(), StoreError> {
        self.write_common(key.to_owned(), |connection, key| {
            Box::pin(async move {
                query("DELETE FROM artifacts WHERE key = ?")
                    .bind(key)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("removed compiled code"))?;
                Ok(())
            })
        })
        .await
    }
}

fn artifact_row(row: &Row) -> Result<ArtifactRow, sqlx::Error> {
    Ok(ArtifactRow {
        key: row.try_get(0)?,
        checksum: row.try_get(1)?,
        bytes: row.try_get::<i64>(2)? as u64,
        used_at_ms: row.try_get::<i64>(3)? as u64,
    })
}
