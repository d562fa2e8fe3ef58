//! Creation, cancellation and removal of batches. A batch has many rows, so all of these run in chunks.
//!
//! A batch becomes visible when its last item is written, and cancellation takes effect at once.

use crate::{
    BatchRoom, NewBatch, NewEvent, NewItem, NoticeKind, Queued, Store, StoreError,
    chunks::{Bind, Chunk, ChunkProgress, is_there},
    events,
    hosts::{HostNumber, is_left},
    notices,
    row_groups::bounded,
    sql::{AssertSqlSafe, Connection, QueryBuilder, query, query_as, query_scalar},
    work_states::{CANCELLED, WAITING},
};

/// Maximum number of finished batches removed at a time, so that no submission waits long for it.
const MAX_FORGOTTEN: u32 = 16;

/// Some items of a batch.
struct Items {
    batch: i64,
    first: i64,
    items: Vec<NewItem>,
}

impl Store {
    /// Stores a batch durably with the event that announces it, if there is room for it.
    pub async fn queue_batch(
        &self,
        batch: NewBatch,
        room: BatchRoom,
        event: Option<NewEvent>,
    ) -> Result<Queued, StoreError> {
        let store = self.clone();
        let queuing = tokio::spawn(async move { store.queue_in_chunks(batch, room, event).await });
        queuing.await.map_err(|_ended| StoreError::Closed)?
    }

    async fn queue_in_chunks(
        &self,
        batch: NewBatch,
        room: BatchRoom,
        event: Option<NewEvent>,
    ) -> Result<Queued, StoreError> {
        let permit = self.chunked_write_permit().await?;
        let bytes: u64 = batch.items.iter().map(NewItem::bytes).sum();
        let NewBatch { id, principal, model, at_ms, items, terms } = batch;
        let details = terms.details.as_ref().map_or(0, |details| details.len() as u64);
        let bytes = bytes + details;
        let head = NewBatch { id, principal, model, at_ms, items: Vec::new(), terms };
        let key = self
            .write_common((head, bytes, room, self.host), |connection, (head, bytes, room, maker)| {
                Box::pin(reserve(connection, head, *bytes, *room, *maker))
            })
            .await?;
        let Some(key) = key else { return Ok(Queued::Full) };
        let written = async {
            let mut first = 0;
            for items in bounded(&items, |item| item.bytes() as usize) {
                let chunk = Items { batch: key, first, items: items.to_vec() };
                first += items.len() as i64;
                self.write(chunk, |connection, chunk| Box::pin(insert(connection, chunk))).await?;
            }
            let data = (key, event, at_ms);
            if self.is_clustered() {
                return self
                    .write_common(data, |connection, (key, event, at_ms)| {
                        Box::pin(async move {
                            complete(connection, *key, event.as_ref(), *at_ms).await?;
                            notices::raise(connection, NoticeKind::Batches).await
                        })
                    })
                    .await;
            }
            self.write(data, |connection, (key, event, at_ms)| {
                Box::pin(complete(connection, *key, event.as_ref(), *at_ms))
            })
            .await
        };
        let written = written.await;
        drop(permit);
        if let Err(error) = written {
            // If this removal fails too, `tidy` removes the rest.
            let _ = self.remove_batch(key).await;
            return Err(error);
        }
        Ok(Queued::New)
    }

    /// Cancels the unfinished items of a batch. Running items count as cancelled, and their runner finds out
    /// when it finishes them.
    pub async fn cancel_batch(&self, id: &str) -> Result<(), StoreError> {
        self.cancel(id, false).await
    }

    /// Cancels the unfinished items of a batch because its time is over.
    pub async fn expire_batch(&self, id: &str) -> Result<(), StoreError> {
        self.cancel(id, true).await
    }

    async fn cancel(&self, id: &str, expires: bool) -> Result<(), StoreError> {
        let (store, id) = (self.clone(), id.to_owned());
        // The cancellation continues even if the caller stops waiting.
        let cancelling = tokio::spawn(async move {
            let key = store
                .write_common((id, expires), |connection, (id, expires)| {
                    Box::pin(mark_cancelled(connection, id, *expires))
                })
                .await?;
            match key {
                Some(key) => store.cancel_items(key).await,
                None => Ok(()),
            }
        });
        cancelling.await.map_err(|_ended| StoreError::Closed)?
    }

    /// Removes batches that finished before `before_ms`, and those that finished longer than their own time before
    /// `now_ms`, a few at a time. Returns their number.
    pub async fn forget_batches(&self, before_ms: u64, now_ms: u64) -> Result<u64, StoreError> {
        let old: Vec<i64> =
            query_scalar("SELECT key FROM batches WHERE ended_at_ms < COALESCE(?2 - keep_ms, ?1) ORDER BY ended_at_ms LIMIT ?3")
                .bind(before_ms as i64)
                .bind(now_ms as i64)
                .bind(MAX_FORGOTTEN)
                .fetch_all(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for old batches"))?;
        for key in &old {
            self.remove_batch(*key).await?;
        }
        Ok(old.len() as u64)
    }

    /// Removes the requests and results of a batch that has finished, and gives back their room. The batch and the states of
    /// its items stay.
    pub async fn empty_batch(&self, id: &str) -> Result<(), StoreError> {
        let _permit = self.chunked_write_permit().await?;
        loop {
            let progress = self
                .write_common((id.to_owned(), self.chunk_time), |connection, (id, time)| {
                    Box::pin(async move {
                        let mut chunk = Chunk::new(*time);
                        let ended = "SELECT key FROM batches WHERE id = ? AND ended_at_ms IS NOT NULL";
                        let key: Option<i64> = query_scalar(ended)
                            .bind(id.as_str())
                            .fetch_optional(&mut *connection)
                            .await
                            .map_err(StoreError::while_it("emptied a batch"))?;
                        let Some(key) = key else { return Ok(chunk.done()) };
                        let sql = "UPDATE batch_items SET request = substr(request, 1, 0), result = NULL
                             WHERE (batch, position) IN (SELECT batch, position FROM batch_items WHERE batch = ?1
                              AND (LENGTH(request) > 0 OR result IS NOT NULL) LIMIT 100)";
                        if !chunk.remove(connection, sql, &[Bind::Key(key)]).await? {
                            return Ok(chunk.more());
                        }
                        query("UPDATE batches SET bytes = COALESCE(LENGTH(details), 0) WHERE key = ?")
                            .bind(key)
                            .execute(connection)
                            .await
                            .map_err(StoreError::while_it("emptied a batch"))?;
                        Ok(chunk.done())
                    })
                })
                .await?;
            if let ChunkProgress::Done { .. } = progress {
                return Ok(());
            }
        }
    }

    /// Removes batches that are not complete, and cancels the items of batches that were cancelled.
    pub(crate) async fn tidy_batches(&self) -> Result<(), StoreError> {
        let left = format!("SELECT key FROM batches WHERE NOT complete AND {}", is_left("maker"));
        let left: Vec<i64> = query_scalar(AssertSqlSafe(left))
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for incomplete batches"))?;
        for key in left {
            self.remove_batch(key).await?;
        }
        self.finish_cancellations().await
    }

    /// Cancels the items of batches that are cancelled or whose time is over, in case an error has interrupted that.
    pub async fn finish_cancellations(&self) -> Result<(), StoreError> {
        let cancelled: Vec<i64> =
            query_scalar("SELECT key FROM batches WHERE complete AND cancelled AND ended_at_ms IS NULL")
                .fetch_all(&self.readers)
                .await
                .map_err(StoreError::while_it("looked for cancelled batches"))?;
        for key in cancelled {
            self.cancel_items(key).await?;
        }
        Ok(())
    }

    async fn cancel_items(&self, batch: i64) -> Result<(), StoreError> {
        let _permit = self.chunked_write_permit().await?;
        loop {
            let progress = self
                .write_common((batch, self.chunk_time), |connection, (batch, time)| {
                    Box::pin(async move {
                        let mut chunk = Chunk::new(*time);
                        let sql = "UPDATE batch_items SET state = ?2 WHERE (batch, position) IN
                             (SELECT batch, position FROM batch_items WHERE batch = ?1 AND state IN (0, 1) LIMIT 200)";
                        let bind = [Bind::Key(*batch), Bind::Key(CANCELLED)];
                        let all = chunk.remove(connection, sql, &bind).await?;
                        Ok(if all { chunk.done() } else { chunk.more() })
                    })
                })
                .await?;
            if let ChunkProgress::Done { .. } = progress {
                return Ok(());
            }
        }
    }

    /// Removes a batch that has finished, is not complete, or was cancelled while it was held. The check is needed because it may be unknown
    /// whether the last chunk of the batch was written.
    pub(crate) async fn remove_batch(&self, batch: i64) -> Result<(), StoreError> {
        let _permit = self.chunked_write_permit().await?;
        loop {
            let progress = self
                .write_common((batch, self.chunk_time), |connection, (batch, time)| {
                    Box::pin(async move {
                        let mut chunk = Chunk::new(*time);
                        let removable = "SELECT 1 FROM batches WHERE key = ?
                             AND (NOT complete OR ended_at_ms IS NOT NULL OR (held AND cancelled))";
                        if !is_there(connection, removable, *batch).await? {
                            return Ok(chunk.done());
                        }
                        let sql = "DELETE FROM batch_items WHERE (batch, position) IN
                             (SELECT batch, position FROM batch_items WHERE batch = ?1 LIMIT 100)";
                        if !chunk.remove(connection, sql, &[Bind::Key(*batch)]).await? {
                            return Ok(chunk.more());
                        }
                        query("DELETE FROM batches WHERE key = ?")
                            .bind(batch)
                            .execute(connection)
                            .await
                            .map_err(StoreError::while_it("removed a batch"))?;
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

async fn mark_cancelled(
    connection: &mut Connection,
    id: &str,
    expires: bool,
) -> Result<Option<i64>, StoreError> {
    query_scalar(
        "UPDATE batches SET expired = expired OR (?2 AND NOT cancelled), cancelled = TRUE, running = 0
         WHERE id = ?1 AND ended_at_ms IS NULL RETURNING key",
    )
    .bind(id)
    .bind(expires)
    .fetch_optional(connection)
    .await
    .map_err(StoreError::while_it("cancelled a batch"))
}

/// Creates a batch without items that is not visible yet, if there is room for it.
async fn reserve(
    connection: &mut Connection,
    head: &NewBatch,
    bytes: u64,
    room: BatchRoom,
    maker: HostNumber,
) -> Result<Option<i64>, StoreError> {
    let failed = || StoreError::while_it("stored a batch");
    let stored: (i64, i64, i64, i64) = query_as(
        "SELECT COUNT(*), CAST(COALESCE(SUM(bytes), 0) AS BIGINT), COUNT(*) FILTER (WHERE principal = ?1),
             CAST(COALESCE(SUM(bytes) FILTER (WHERE principal = ?1), 0) AS BIGINT) FROM batches",
    )
    .bind(&head.principal)
    .fetch_one(&mut *connection)
    .await
    .map_err(failed())?;
    let (batches, stored_bytes) = (stored.0 as u64, stored.1 as u64);
    let (own_batches, own_bytes) = (stored.2 as u64, stored.3 as u64);
    if !room.admits((batches, stored_bytes), (own_batches, own_bytes), bytes) {
        return Ok(None);
    }
    let key = query_scalar(
        "INSERT INTO batches (id, principal, model, created_at_ms, bytes, running, cancelled, complete, details,
             expires_at_ms, keep_ms, maker)
         VALUES (?, ?, ?, ?, ?, 0, FALSE, FALSE, ?, ?, ?, ?) RETURNING key",
    )
    .bind(&head.id)
    .bind(&head.principal)
    .bind(&head.model)
    .bind(head.at_ms as i64)
    .bind(bytes as i64)
    .bind(head.terms.details.as_deref())
    .bind(head.terms.expires_at_ms.map(|at_ms| at_ms as i64))
    .bind(head.terms.keep_ms.map(|ms| ms.min(i64::MAX as u64) as i64))
    .bind(maker)
    .fetch_one(connection)
    .await
    .map_err(failed())?;
    Ok(Some(key))
}

async fn insert(connection: &mut Connection, chunk: &Items) -> Result<(), StoreError> {
    let Items { batch, first, items } = chunk;
    let mut insert = QueryBuilder::new(
        "INSERT INTO batch_items (batch, position, reference, request, state, failures, losses, wake_ms) ",
    );
    insert.push_values((*first..).zip(items), |mut row, (position, item)| {
        row.push_bind(*batch)
            .push_bind(position)
            .push_bind(&item.reference)
            .push_bind(&item.request)
            .push_bind(WAITING)
            .push_bind(0)
            .push_bind(0)
            .push_bind(0);
    });
    insert.build().execute(connection).await.map_err(StoreError::while_it("stored a batch"))?;
    Ok(())
}

async fn complete(
    connection: &mut Connection,
    batch: i64,
    event: Option<&NewEvent>,
    at_ms: u64,
) -> Result<(), StoreError> {
    query("UPDATE batches SET complete = TRUE WHERE key = ?")
        .bind(batch)
        .execute(&mut *connection)
        .await
        .map_err(StoreError::while_it("stored a batch"))?;
    if let Some(event) = event {
        events::insert(connection, event, at_ms).await?;
    }
    Ok(())
}
