//! Files of clients, such as the requests of a batch. A file has many parts, so it is written and removed in chunks.
//!
//! A file becomes visible when its last part is written, and a removal takes effect at once.

use crate::{
    BatchRoom, Queued, Store, StoreError,
    chunks::{Bind, Chunk, ChunkProgress, is_there},
    hosts::{HostNumber, is_left},
    rows,
    sql::{AssertSqlSafe, Connection, Row, query, query_as, query_scalar},
};
use std::sync::Arc;

/// Size of a part, except the last one.
const PART_BYTES: usize = 256 << 10;
/// Maximum number of old files removed at a time.
const MAX_FORGOTTEN: u32 = 16;

/// A file to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// The unique id by which clients know the file.
    pub id: String,
    pub principal: String,
    pub name: String,
    pub purpose: String,
    pub at_ms: u64,
    pub expires_at_ms: u64,
    pub body: Arc<[u8]>,
}

/// A stored file without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRow {
    pub id: String,
    pub principal: String,
    pub name: String,
    pub purpose: String,
    pub bytes: u64,
    pub at_ms: u64,
    pub expires_at_ms: u64,
}

impl Store {
    /// Stores a file durably, if there is room for it. `room` counts files instead of batches.
    pub async fn store_file(&self, file: NewFile, room: BatchRoom) -> Result<Queued, StoreError> {
        let store = self.clone();
        let storing = tokio::spawn(async move { store.store_in_chunks(file, room).await });
        storing.await.map_err(|_ended| StoreError::Closed)?
    }

    async fn store_in_chunks(&self, file: NewFile, room: BatchRoom) -> Result<Queued, StoreError> {
        let permit = self.chunked_write_permit().await?;
        let key = self
            .write_common((file.clone(), room, self.host), |connection, (file, room, maker)| {
                Box::pin(reserve(connection, file, *room, *maker))
            })
            .await?;
        let Some(key) = key else { return Ok(Queued::Full) };
        let written = async {
            for position in 0..file.body.len().div_ceil(PART_BYTES) {
                let part = (key, position, file.body.clone());
                self.write(part, |connection, (key, position, body)| {
                    Box::pin(insert_part(connection, *key, *position, body))
                })
                .await?;
            }
            self.write(key, |connection, key| Box::pin(set_complete(connection, *key, true))).await
        };
        let written = written.await;
        drop(permit);
        if let Err(error) = written {
            // If this removal fails too, `tidy` removes the rest.
            let _ = self.remove_file(key).await;
            return Err(error);
        }
        Ok(Queued::New)
    }

    /// Returns the files of this principal that have not expired, the oldest first.
    pub async fn files(&self, principal: &str, now_ms: u64) -> Result<Vec<FileRow>, StoreError> {
        let rows = query(
            "SELECT id, principal, name, purpose, bytes, at_ms, expires_at_ms FROM files
             WHERE principal = ? AND complete AND expires_at_ms > ? ORDER BY key",
        )
        .bind(principal)
        .bind(now_ms as i64)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed files"))?;
        rows.iter().map(|row| rows::one(row, "file", file_row)).collect()
    }

    /// Returns a file that has not expired.
    pub async fn file(&self, id: &str, now_ms: u64) -> Result<Option<FileRow>, StoreError> {
        let row = query(
            "SELECT id, principal, name, purpose, bytes, at_ms, expires_at_ms FROM files
             WHERE id = ? AND complete AND expires_at_ms > ?",
        )
        .bind(id)
        .bind(now_ms as i64)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("looked for a file"))?;
        row.map(|row| rows::one(&row, "file", file_row)).transpose()
    }

    /// Returns the content of a file, or `None` if there is no such file.
    pub async fn file_content(&self, id: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let failed = || StoreError::while_it("read a file");
        let known: Option<(i64, i64)> = query_as("SELECT key, bytes FROM files WHERE id = ? AND complete")
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(failed())?;
        let Some((key, bytes)) = known else { return Ok(None) };
        let mut content = Vec::with_capacity(bytes as usize);
        for position in 0..(bytes as usize).div_ceil(PART_BYTES) {
            let part: Option<Vec<u8>> =
                query_scalar("SELECT body FROM file_parts WHERE file = ? AND position = ?")
                    .bind(key)
                    .bind(position as i64)
                    .fetch_optional(&self.readers)
                    .await
                    .map_err(failed())?;
            // The file was deleted meanwhile.
            let Some(part) = part else { return Ok(None) };
            content.extend(part);
        }
        Ok(Some(content))
    }

    /// Deletes a file. Returns `false` if there is none.
    pub async fn delete_file(&self, id: &str) -> Result<bool, StoreError> {
        let key: Option<i64> = query_scalar("SELECT key FROM files WHERE id = ? AND complete")
            .bind(id)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for a file"))?;
        let Some(key) = key else { return Ok(false) };
        let store = self.clone();
        // The removal continues even if the caller stops waiting.
        let removing = tokio::spawn(async move {
            let data = (key, store.host);
            store
                .write_common(data, |connection, (key, host)| Box::pin(hide(connection, *key, *host)))
                .await?;
            store.remove_file(key).await
        });
        removing.await.map_err(|_ended| StoreError::Closed)??;
        Ok(true)
    }

    /// Removes files that have expired, a few at a time. Returns their number.
    pub async fn forget_files(&self, now_ms: u64) -> Result<u64, StoreError> {
        let old: Vec<String> =
            query_scalar("SELECT id FROM files WHERE expires_at_ms <= ? AND complete LIMIT ?")
                .bind(now_ms as i64)
                .bind(MAX_FORGOTTEN)
                .fetch_all(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for old files"))?;
        for id in &old {
            self.delete_file(id).await?;
        }
        Ok(old.len() as u64)
    }

    /// Removes files that are not complete, and those whose removal was begun.
    pub(crate) async fn tidy_files(&self) -> Result<(), StoreError> {
        let left = format!("SELECT key FROM files WHERE NOT complete AND {}", is_left("maker"));
        let left: Vec<i64> = query_scalar(AssertSqlSafe(left))
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for incomplete files"))?;
        for key in left {
            self.remove_file(key).await?;
        }
        Ok(())
    }

    /// Removes a file that is not complete.
    async fn remove_file(&self, file: i64) -> Result<(), StoreError> {
        let _permit = self.chunked_write_permit().await?;
        loop {
            let progress = self
                .write_common((file, self.chunk_time), |connection, (file, time)| {
                    Box::pin(async move {
                        let mut chunk = Chunk::new(*time);
                        let removable = "SELECT 1 FROM files WHERE key = ? AND NOT complete";
                        if !is_there(connection, removable, *file).await? {
                            return Ok(chunk.done());
                        }
                        let sql = "DELETE FROM file_parts WHERE (file, position) IN
                             (SELECT file, position FROM file_parts WHERE file = ?1 LIMIT 4)";
                        if !chunk.remove(connection, sql, &[Bind::Key(*file)]).await? {
                            return Ok(chunk.more());
                        }
                        query("DELETE FROM files WHERE key = ?")
                            .bind(file)
                            .execute(connection)
                            .await
                            .map_err(StoreError::while_it("removed a file"))?;
                        Ok(chunk.done())
                    })
                })
                .await?;
            if let ChunkProgress::Done { .. } = progress {
                return Ok(());
            }
        }
    }
}

/// Creates a file without parts that is not visible yet, if there is room for it.
async fn reserve(
    connection: &mut Connection,
    file: &NewFile,
    room: BatchRoom,
    maker: HostNumber,
) -> Result<Option<i64>, StoreError> {
    let failed = || StoreError::while_it("stored a file");
    let stored: (i64, i64, i64, i64) = query_as(
        "SELECT COUNT(*), CAST(COALESCE(SUM(bytes), 0) AS BIGINT), COUNT(*) FILTER (WHERE principal = ?1),
             CAST(COALESCE(SUM(bytes) FILTER (WHERE principal = ?1), 0) AS BIGINT) FROM files",
    )
    .bind(&file.principal)
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    let own = (stored.2 as u64, stored.3 as u64);
    let bytes = file.body.len() as u64;
    if !room.admits((stored.0 as u64, stored.1 as u64), own, bytes) {
        return Ok(None);
    }
    let key = query_scalar(
        "INSERT INTO files (id, principal, name, purpose, bytes, at_ms, expires_at_ms, complete, maker)
         VALUES (?, ?, ?, ?, ?, ?, ?, FALSE, ?) RETURNING key",
    )
    .bind(&file.id)
    .bind(&file.principal)
    .bind(&file.name)
    .bind(&file.purpose)
    .bind(bytes as i64)
    .bind(file.at_ms as i64)
    .bind(file.expires_at_ms as i64)
    .bind(maker)
    .fetch_one(connection)
    .await
    .map_err(failed())?;
    Ok(Some(key))
}

async fn insert_part(
    connection: &mut Connection,
    file: i64,
    position: usize,
    body: &[u8],
) -> Result<(), StoreError> {
    let begin = position * PART_BYTES;
    let part = &body[begin..body.len().min(begin + PART_BYTES)];
    query("INSERT INTO file_parts (file, position, body) VALUES (?, ?, ?)")
        .bind(file)
        .bind(position as i64)
        .bind(part)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("stored a part of a file"))?;
    Ok(())
}

async fn set_complete(connection: &mut Connection, file: i64, complete: bool) -> Result<(), StoreError> {
    query("UPDATE files SET complete = ? WHERE key = ?")
        .bind(complete)
        .bind(file)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("completed or deleted a file"))?;
    Ok(())
}

/// Begins the removal of a file, which this host finishes unless it is gone before.
async fn hide(connection: &mut Connection, file: i64, host: HostNumber) -> Result<(), StoreError> {
    query("UPDATE files SET complete = FALSE, maker = ? WHERE key = ?")
        .bind(host)
        .bind(file)
        .execute(connection)
        .await
        .map_err(StoreError::while_it("deleted a file"))?;
    Ok(())
}

fn file_row(row: &Row) -> Result<FileRow, sqlx::Error> {
    let number = |column: usize| Ok::<_, sqlx::Error>(row.try_get::<i64>(column)? as u64);
    Ok(FileRow {
        id: row.try_get(0)?,
        principal: row.try_get(1)?,
        name: row.try_get(2)?,
        purpose: row.try_get(3)?,
        bytes: number(4)?,
        at_ms: number(5)?,
        expires_at_ms: number(6)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: BatchRoom = BatchRoom { bytes: 2 << 20, batches: 3, share: None };

    fn file(id: &str, bytes: usize) -> NewFile {
        let body: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        NewFile {
            id: id.into(),
            principal: "p".into(),
            name: "requests.jsonl".into(),
            purpose: "batch".into(),
            at_ms: 100,
            expires_at_ms: 200,
            body: body.into(),
        }
    }

    async fn parts(store: &Store) -> i64 {
        query_scalar("SELECT COUNT(*) FROM file_parts").fetch_one(&store.readers).await.unwrap()
    }

    #[tokio::test]
    async fn a_file_is_read_as_it_was_stored_and_not_found_after_deletion() {
        let store = Store::for_tests().await.unwrap();
        for (id, bytes) in [("large", PART_BYTES * 2 + 1), ("empty", 0)] {
            let file = file(id, bytes);
            assert_eq!(store.store_file(file.clone(), ROOM).await.unwrap(), Queued::New);
            assert_eq!(store.file_content(id).await.unwrap().as_deref(), Some(&*file.body));
        }
        assert_eq!(parts(&store).await, 3);
        let row = store.file("large", 150).await.unwrap().unwrap();
        assert_eq!((row.bytes, row.name.as_str()), (PART_BYTES as u64 * 2 + 1, "requests.jsonl"));
        let ids = |rows: Vec<FileRow>| rows.into_iter().map(|row| row.id).collect::<Vec<_>>();
        assert_eq!(ids(store.files("p", 150).await.unwrap()), ["large", "empty"]);
        assert!(store.files("other", 150).await.unwrap().is_empty());
        assert!(store.delete_file("large").await.unwrap());
        assert!(!store.delete_file("large").await.unwrap());
        assert_eq!((store.file_content("large").await.unwrap(), parts(&store).await), (None, 0));
    }

    #[tokio::test]
    async fn room_is_bounded_and_expired_files_give_it_back() {
        let store = Store::for_tests().await.unwrap();
        assert_eq!(store.store_file(file("a", 2 << 20), ROOM).await.unwrap(), Queued::New);
        assert_eq!(store.store_file(file("b", 1), ROOM).await.unwrap(), Queued::Full);
        assert_eq!(store.forget_files(199).await.unwrap(), 0);
        assert!(store.file("a", 200).await.unwrap().is_none(), "it has expired");
        assert_eq!(store.forget_files(200).await.unwrap(), 1);
        for id in ["b", "c", "d"] {
            assert_eq!(store.store_file(file(id, 1), ROOM).await.unwrap(), Queued::New);
        }
        assert_eq!(store.store_file(file("e", 1), ROOM).await.unwrap(), Queued::Full);
    }

    #[tokio::test]
    async fn a_partial_file_after_a_crash_is_invisible_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skep.db");
        let store = Store::open_for_tests(&path).await.unwrap();
        for id in ["whole", "half"] {
            store.store_file(file(id, PART_BYTES + 1), ROOM).await.unwrap();
        }
        let key: i64 =
            query_scalar("SELECT key FROM files WHERE id = 'half'").fetch_one(&store.readers).await.unwrap();
        store.write(key, |connection, key| Box::pin(set_complete(connection, *key, false))).await.unwrap();
        assert_eq!(store.file_content("half").await.unwrap(), None);
        store.close().await;
        let store = Store::open_for_tests(&path).await.unwrap();
        store.tidy().await.unwrap();
        assert_eq!(parts(&store).await, 2);
        assert!(store.file("whole", 150).await.unwrap().is_some());
    }
}
