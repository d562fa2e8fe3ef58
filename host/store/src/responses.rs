//! Stored responses of models and agents, which clients read again and later requests continue.
//!
//! A response that is produced in the background has a batch with the same id, whose end writes the answer here in
//! the same transaction.

use crate::{
    Store, StoreError, rows,
    sql::{AssertSqlSafe, Connection, Row, query, query_as},
    work_states::{CANCELLED, DONE, FAILED},
};

/// Number of old responses removed at a time.
const MAX_FORGOTTEN: i64 = 100;

/// Limits on the storage of all responses together.
#[derive(Clone, Copy, Debug)]
pub struct ResponseRoom {
    /// Maximum number of bytes of requests and answers.
    pub bytes: u64,
    /// A tenant may hold at most this many times the free bytes; `None` if there is only one tenant.
    pub share: Option<u64>,
}

/// A response to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewResponse {
    /// The unique id by which clients know the response.
    pub id: String,
    pub principal: String,
    /// Id of the response that this one continues.
    pub previous: Option<String>,
    /// The name that all responses of a chain share.
    pub thread: String,
    /// The turn of the agent that responds.
    pub turn: Option<ResponseTurn>,
    pub at_ms: u64,
    pub request: Vec<u8>,
    /// The answer; `None` while it is being produced.
    pub answer: Option<Vec<u8>>,
}

/// The turn of an agent that responds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseTurn {
    pub agent: String,
    pub session: String,
    pub turn: String,
}

/// A stored response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseRow {
    pub id: String,
    pub previous: Option<String>,
    pub thread: String,
    pub turn: Option<ResponseTurn>,
    pub created_at_ms: u64,
    pub ended_at_ms: Option<u64>,
    pub request: Vec<u8>,
    pub state: ResponseState,
}

/// The state of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseState {
    /// The answer is being produced: by the turn, or by the batch with the same id.
    Open,
    /// The response ended with this encoded answer.
    Done(Vec<u8>),
    /// The response failed with this encoded error.
    Failed(Vec<u8>),
    /// The response was cancelled before it ended.
    Cancelled,
}

/// The size of a chain of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSize {
    pub responses: u64,
    pub bytes: u64,
}

const OPEN: i64 = 0;

/// The columns that [`response`] reads.
const COLUMNS: &str = "responses.id, responses.previous, thread, agent, session, turn, created_at_ms, ended_at_ms, \
                       state, request, answer";

/// The bytes of all responses, and those of the tenant `?1`.
const SIZES: &str = "SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT),
    CAST(COALESCE(SUM(bytes) FILTER (WHERE principal = ?1), 0) AS BIGINT) FROM response_sizes";

/// A response and those that it continues, numbered from the response backwards. `?3` bounds their number.
const CHAIN: &str = "WITH RECURSIVE chain(key, previous, depth) AS (
         SELECT key, previous, 1 FROM responses WHERE id = ?1 AND principal = ?2
         UNION ALL
         SELECT before.key, before.previous, depth + 1 FROM chain JOIN responses AS before
             ON before.id = chain.previous AND before.principal = ?2 WHERE depth < ?3)";

impl ResponseRoom {
    /// Returns whether so many more bytes of a tenant fit beside what is stored, of all tenants and of this one.
    fn fits(&self, (stored, own): (i64, i64), bytes: u64) -> bool {
        let all = stored as u64 + bytes;
        let exceeds_share =
            |share: u64| own as u64 + bytes > share.saturating_mul(self.bytes.saturating_sub(all));
        all <= self.bytes && !self.share.is_some_and(exceeds_share)
    }
}

impl Store {
    /// Stores a response durably, if there is room for it. Returns whether there was.
    pub async fn put_response(&self, response: NewResponse, room: ResponseRoom) -> Result<bool, StoreError> {
        self.write_common((response, room), |connection, (response, room)| {
            Box::pin(put(connection, response, *room))
        })
        .await
    }

    /// Returns whether there is room for a response with a request of this size, which other responses may take meanwhile.
    pub async fn has_response_room(
        &self,
        principal: &str,
        bytes: u64,
        room: ResponseRoom,
    ) -> Result<bool, StoreError> {
        let sizes = query_as(SIZES)
            .bind(principal)
            .fetch_one(&self.readers)
            .await
            .map_err(StoreError::while_it("measured the responses"))?;
        Ok(room.fits(sizes, bytes))
    }

    /// Returns a response of this tenant.
    pub async fn response(&self, principal: &str, id: &str) -> Result<Option<ResponseRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM responses WHERE id = ? AND principal = ?");
        let row = query(AssertSqlSafe(sql))
            .bind(id)
            .bind(principal)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read a response"))?;
        row.map(|row| rows::one(&row, "response", response)).transpose()
    }

    /// Returns the size of a response and at most `most` responses in all that it continues.
    pub async fn response_chain_size(
        &self,
        principal: &str,
        id: &str,
        most: u64,
    ) -> Result<ChainSize, StoreError> {
        let sql = format!(
            "{CHAIN} SELECT COUNT(*), CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM chain JOIN responses USING (key)"
        );
        let (responses, bytes): (i64, i64) = query_as(AssertSqlSafe(sql))
            .bind(id)
            .bind(principal)
            .bind(i64::try_from(most).unwrap_or(i64::MAX))
            .fetch_one(&self.readers)
            .await
            .map_err(StoreError::while_it("measured a chain of responses"))?;
        Ok(ChainSize { responses: responses as u64, bytes: bytes as u64 })
    }

    /// Returns a response after those that it continues, at most `most` in all. If the first one continues another,
    /// that one is gone or beyond the limit.
    pub async fn response_chain(
        &self,
        principal: &str,
        id: &str,
        most: u64,
    ) -> Result<Vec<ResponseRow>, StoreError> {
        let sql =
            format!("{CHAIN} SELECT {COLUMNS} FROM chain JOIN responses USING (key) ORDER BY depth DESC");
        let rows = query(AssertSqlSafe(sql))
            .bind(id)
            .bind(principal)
            .bind(i64::try_from(most).unwrap_or(i64::MAX))
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("read a chain of responses"))?;
        rows.iter().map(|row| rows::one(row, "response", response)).collect()
    }

    /// Returns the responses that turns of agents are producing.
    pub async fn open_responses_of_turns(&self) -> Result<Vec<ResponseRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM responses WHERE state = 0 AND agent IS NOT NULL");
        let rows = query(AssertSqlSafe(sql))
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for open responses"))?;
        Ok(rows::readable(&rows, "response", response))
    }

    /// Writes the end of an open response. A response that has ended is left unchanged.
    pub async fn end_response(&self, id: &str, state: ResponseState, at_ms: u64) -> Result<(), StoreError> {
        self.write_common((id.to_owned(), state, at_ms), |connection, (id, state, at_ms)| {
            Box::pin(async move {
                let (state, answer) = match state {
                    ResponseState::Open => return Ok(()),
                    ResponseState::Done(answer) => (DONE, Some(answer)),
                    ResponseState::Failed(error) => (FAILED, Some(error)),
                    ResponseState::Cancelled => (CANCELLED, None),
                };
                query(
                    "UPDATE responses SET state = ?2, answer = ?3, ended_at_ms = ?4,
                         bytes = LENGTH(request) + COALESCE(LENGTH(?3), 0) WHERE id = ?1 AND state = 0",
                )
                .bind(&*id)
                .bind(state)
                .bind(answer)
                .bind(*at_ms as i64)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("ended a response"))?;
                Ok(())
            })
        })
        .await
    }

    /// Removes a response of this tenant. Returns whether there was one.
    pub async fn delete_response(&self, principal: &str, id: &str) -> Result<bool, StoreError> {
        self.write_common((principal.to_owned(), id.to_owned()), |connection, (principal, id)| {
            Box::pin(async move {
                let gone = query("DELETE FROM responses WHERE id = ? AND principal = ?")
                    .bind(&*id)
                    .bind(&*principal)
                    .execute(connection)
                    .await
                    .map_err(StoreError::while_it("deleted a response"))?;
                Ok(gone.rows_affected() > 0)
            })
        })
        .await
    }

    /// Removes the responses that were created before `before_ms` and are not being produced. Returns their number.
    pub async fn forget_responses(&self, before_ms: u64) -> Result<u64, StoreError> {
        self.in_chunks(before_ms, |connection, before_ms| {
            Box::pin(async move {
                let gone = query(
                    "DELETE FROM responses WHERE key IN (SELECT key FROM responses WHERE created_at_ms < ?
                     AND NOT EXISTS (SELECT 1 FROM batches WHERE batches.id = responses.id AND ended_at_ms IS NULL)
                     LIMIT ?)",
                )
                .bind(*before_ms as i64)
                .bind(MAX_FORGOTTEN)
                .execute(connection)
                .await
                .map_err(StoreError::while_it("removed old responses"))?;
                Ok(gone.rows_affected())
            })
        })
        .await
    }
}

/// Ends the response that is produced by the batch with this id, if there is one.
pub(crate) async fn end(connection: &mut Connection, id: &str, now_ms: u64) -> Result<(), StoreError> {
    query(
        "UPDATE responses SET ended_at_ms = ?2, (state, answer, bytes) =
             (SELECT item.state, item.result, LENGTH(responses.request) + COALESCE(LENGTH(item.result), 0)
              FROM batch_items AS item JOIN batches ON item.batch = batches.key
              WHERE batches.id = ?1 AND item.position = 0)
         WHERE id = ?1 AND state = 0",
    )
    .bind(id)
    .bind(now_ms as i64)
    .execute(connection)
    .await
    .map_err(StoreError::while_it("ended a response"))?;
    Ok(())
}

async fn put(connection: &mut Connection, new: &NewResponse, room: ResponseRoom) -> Result<bool, StoreError> {
    let failed = || StoreError::while_it("stored a response");
    let sizes = query_as(SIZES).bind(&new.principal).fetch_one(&mut *connection).await.map_err(failed())?;
    let bytes = (new.request.len() + new.answer.as_ref().map_or(0, Vec::len)) as u64;
    if !room.fits(sizes, bytes) {
        return Ok(false);
    }
    let turn = new.turn.as_ref();
    query(
        "INSERT INTO responses (id, principal, previous, thread, agent, session, turn, created_at_ms, ended_at_ms,
             state, request, answer, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(&new.id)
    .bind(&new.principal)
    .bind(&new.previous)
    .bind(&new.thread)
    .bind(turn.map(|turn| &turn.agent))
    .bind(turn.map(|turn| &turn.session))
    .bind(turn.map(|turn| &turn.turn))
    .bind(new.at_ms as i64)
    .bind(new.answer.as_ref().map(|_| new.at_ms as i64))
    .bind(if new.answer.is_some() { DONE } else { OPEN })
    .bind(&new.request)
    .bind(&new.answer)
    .bind(bytes as i64)
    .execute(connection)
    .await
    .map_err(failed())?;
    Ok(true)
}

fn response(row: &Row) -> Result<ResponseRow, sqlx::Error> {
    let turn = match (row.try_get(3)?, row.try_get(4)?, row.try_get(5)?) {
        (Some(agent), Some(session), Some(turn)) => Some(ResponseTurn { agent, session, turn }),
        _ => None,
    };
    let answer = || Ok::<_, sqlx::Error>(row.try_get::<Option<Vec<u8>>>(10)?.unwrap_or_default());
    Ok(ResponseRow {
        id: row.try_get(0)?,
        previous: row.try_get(1)?,
        thread: row.try_get(2)?,
        turn,
        created_at_ms: row.try_get::<i64>(6)? as u64,
        ended_at_ms: row.try_get::<Option<i64>>(7)?.map(|at| at as u64),
        state: match row.try_get(8)? {
            DONE => ResponseState::Done(answer()?),
            FAILED => ResponseState::Failed(answer()?),
            CANCELLED => ResponseState::Cancelled,
            _ => ResponseState::Open,
        },
        request: row.try_get(9)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchRoom, BatchTerms, BusyTenant, ItemEnd, NewBatch, NewItem, Queued, Take};

    const ROOM: ResponseRoom = ResponseRoom { bytes: 1_000, share: None };

    fn new(id: &str, previous: Option<&str>, answer: Option<&[u8]>) -> NewResponse {
        NewResponse {
            id: id.into(),
            principal: "p".into(),
            previous: previous.map(str::to_owned),
            thread: "one".into(),
            turn: None,
            at_ms: 7,
            request: b"request".to_vec(),
            answer: answer.map(<[u8]>::to_vec),
        }
    }

    #[tokio::test]
    async fn a_chain_is_read_from_its_beginning_and_only_by_its_tenant() {
        let store = Store::for_tests().await.unwrap();
        for (id, previous) in [("a", None), ("b", Some("a")), ("c", Some("b")), ("d", Some("b"))] {
            assert!(store.put_response(new(id, previous, Some(b"answer")), ROOM).await.unwrap());
        }
        let ids = async |id: &str, principal: &str, most| {
            let chain = store.response_chain(principal, id, most).await.unwrap();
            chain.into_iter().map(|row| row.id).collect::<Vec<_>>().join("")
        };
        assert_eq!(ids("d", "p", 9).await, "abd");
        assert_eq!(ids("d", "p", 2).await, "bd");
        assert_eq!(ids("d", "q", 9).await, "");
        let size = store.response_chain_size("p", "d", 9).await.unwrap();
        assert_eq!(size, ChainSize { responses: 3, bytes: 3 * 13 });
        assert!(!store.delete_response("q", "b").await.unwrap());
        assert!(store.delete_response("p", "b").await.unwrap());
        assert_eq!(ids("d", "p", 9).await, "d");
        assert_eq!(store.response("p", "d").await.unwrap().unwrap().previous.as_deref(), Some("b"));
        assert_eq!(store.forget_responses(7).await.unwrap(), 0);
        assert_eq!(store.forget_responses(8).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn data_over_the_limit_is_not_stored() {
        let store = Store::for_tests().await.unwrap();
        let room = |bytes, share| ResponseRoom { bytes, share };
        assert!(!store.put_response(new("a", None, Some(b"answer")), room(12, None)).await.unwrap());
        assert!(store.put_response(new("a", None, Some(b"answer")), room(13, None)).await.unwrap());
        assert!(!store.put_response(new("b", None, Some(b"answer")), room(40, Some(1))).await.unwrap());
        assert!(store.put_response(new("b", None, Some(b"answer")), room(52, Some(1))).await.unwrap());
    }

    #[tokio::test]
    async fn the_end_of_its_batch_ends_a_response() {
        let store = Store::for_tests().await.unwrap();
        for (id, end, state) in [
            ("done", ItemEnd::Done(b"fine".to_vec()), ResponseState::Done(b"fine".to_vec())),
            ("failed", ItemEnd::Failed(b"bad".to_vec()), ResponseState::Failed(b"bad".to_vec())),
        ] {
            store.put_response(new(id, None, None), ROOM).await.unwrap();
            let items = vec![NewItem { request: b"r".to_vec(), reference: None }];
            let batch = NewBatch {
                id: id.into(),
                principal: "p".into(),
                model: "m".into(),
                at_ms: 1,
                items,
                terms: BatchTerms::default(),
            };
            let room = BatchRoom { bytes: 100, batches: 9, share: None };
            assert_eq!(store.queue_batch(batch, room, None).await.unwrap(), Queued::New);
            store.forget_responses(100).await.unwrap();
            assert!(store.response("p", id).await.unwrap().is_some(), "it is being produced");
            let busy: [BusyTenant; 0] = [];
            let Take::Item(item) = store.take_item(&["m".to_owned()], &busy, 2).await.unwrap() else {
                panic!("an item waits");
            };
            store.end_item(item.key, &end).await.unwrap();
            assert_eq!(store.response("p", id).await.unwrap().unwrap().state, ResponseState::Open);
            assert!(store.end_batch(id, 5, None).await.unwrap());
            let row = store.response("p", id).await.unwrap().unwrap();
            assert_eq!((row.state, row.ended_at_ms), (state, Some(5)));
        }
        let size = store.response_chain_size("p", "failed", 1).await.unwrap();
        assert_eq!(size.bytes, 10);
        let summed = async || {
            let sizes = "SELECT (SELECT CAST(SUM(bytes) AS BIGINT) FROM response_sizes),
                (SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM responses)";
            query_as::<(i64, i64)>(sizes).fetch_one(&store.readers).await.unwrap()
        };
        assert_eq!(summed().await, (10, 10), "the answer is counted");
        assert!(store.delete_response("p", "failed").await.unwrap());
        assert_eq!(summed().await, (0, 0));
    }
}
