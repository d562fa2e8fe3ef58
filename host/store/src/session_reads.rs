//! Reads of sessions: complete, in outline, and as lists.

use crate::{
    ConversationOutline, ConversationPlace, ConversationRow, KeptOutcome, ModelUse, SessionFolder,
    SessionOutline, SessionRow, SessionSnapshot, Store, StoreError,
    sessions::session_row,
    sql::{Connection, QueryBuilder, Row, query},
};

/// Number of conversations that one statement reads.
const CONVERSATIONS_AT_ONCE: usize = 100;

impl Store {
    /// Returns a session with its state and conversations, or `None` if none of its turns was committed.
    pub async fn session(&self, agent: &str, session: &str) -> Result<Option<SessionSnapshot>, StoreError> {
        // A single transaction, so that all reads see the same turn.
        let mut reading = self.readers.begin().await.map_err(reading_failed())?;
        let Some((key, row)) = find(&mut reading, agent, session).await? else { return Ok(None) };
        let state = state_of(&mut reading, key).await?;
        let conversations =
            query("SELECT name, model, digest, body FROM conversations WHERE session = ? ORDER BY name")
                .bind(key)
                .fetch_all(&mut reading)
                .await
                .map_err(reading_failed())?;
        let conversations = conversations.iter().map(conversation_row).collect();
        Ok(Some(SessionSnapshot { row, state, conversations }))
    }

    /// Returns a session with its state, and the names and sizes of its conversations, or `None` if none of
    /// its turns was committed.
    pub async fn session_outline(
        &self,
        agent: &str,
        session: &str,
    ) -> Result<Option<SessionOutline>, StoreError> {
        let mut reading = self.readers.begin().await.map_err(reading_failed())?;
        let Some((key, row)) = find(&mut reading, agent, session).await? else { return Ok(None) };
        let state = state_of(&mut reading, key).await?;
        let conversations =
            query("SELECT name, model, LENGTH(body) FROM conversations WHERE session = ? ORDER BY name")
                .bind(key)
                .fetch_all(&mut reading)
                .await
                .map_err(reading_failed())?;
        let conversations = conversations.iter().map(|row| ConversationOutline {
            name: row.get(0),
            model: row.get(1),
            bytes: row.get::<i64>(2) as usize,
        });
        Ok(Some(SessionOutline { row, state, conversations: conversations.collect() }))
    }

    /// Returns the models used by the conversations of all sessions.
    pub async fn models_in_use(&self) -> Result<Vec<ModelUse>, StoreError> {
        let rows = query(
            "SELECT model, digest, COUNT(DISTINCT conversations.session) FROM conversations
             JOIN sessions ON sessions.key = conversations.session AND sessions.session IS NOT NULL
             WHERE model IS NOT NULL GROUP BY model, digest ORDER BY model, digest NULLS FIRST",
        )
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("counted the sessions of each model"))?;
        let model_use = |row: &Row| ModelUse {
            model: row.get(0),
            digest: row.get(1),
            sessions: row.get::<i64>(2) as u64,
        };
        Ok(rows.iter().map(model_use).collect())
    }

    /// Returns at most `limit` sessions of an agent in a folder, ordered by id. If `after` is given, returns
    /// only those after it.
    pub async fn sessions(
        &self,
        agent: &str,
        folder: &SessionFolder,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<SessionRow>, StoreError> {
        let SessionFolder { begin, end, has_slash } = folder;
        let rows = query(
            "SELECT session, turns, created_at_ms, updated_at_ms FROM sessions
             WHERE agent = ? AND session > ? AND session < ? AND (? OR instr(session, '/') = 0)
             ORDER BY session LIMIT ?",
        )
        .bind(agent)
        .bind(after.map_or(begin.as_str(), |after| after.max(begin.as_str())))
        .bind(end)
        .bind(has_slash)
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed sessions"))?;
        Ok(rows.iter().map(session_row).collect())
    }

    /// Returns one conversation of a session, or `None` if it does not exist.
    pub async fn conversation(
        &self,
        agent: &str,
        session: &str,
        name: &str,
    ) -> Result<Option<ConversationRow>, StoreError> {
        let row = query(
            "SELECT name, model, digest, body FROM conversations
             WHERE session = (SELECT key FROM sessions WHERE agent = ? AND session = ?) AND name = ?",
        )
        .bind(agent)
        .bind(session)
        .bind(name)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("read a conversation"))?;
        Ok(row.as_ref().map(conversation_row))
    }

    /// Returns the names of a session's conversations, in order, or `None` if none of its turns was
    /// committed.
    pub async fn conversation_names(
        &self,
        agent: &str,
        session: &str,
    ) -> Result<Option<Vec<String>>, StoreError> {
        let rows = query(
            "SELECT name FROM sessions LEFT JOIN conversations ON conversations.session = sessions.key
             WHERE agent = ? AND sessions.session = ? ORDER BY name",
        )
        .bind(agent)
        .bind(session)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("listed conversations"))?;
        let names = rows.iter().filter_map(|row| row.get(0)).collect();
        Ok((!rows.is_empty()).then_some(names))
    }

    /// Returns the places of all conversations of sessions, which are given by their keys
    /// ([`SessionCursor::key`](crate::SessionCursor::key)), in the order of sessions and names.
    pub async fn conversation_places(&self, sessions: &[i64]) -> Result<Vec<ConversationPlace>, StoreError> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let mut select =
            QueryBuilder::new("SELECT session, name, LENGTH(body) FROM conversations WHERE session IN (");
        let mut keys = select.separated(", ");
        sessions.iter().for_each(|key| _ = keys.push_bind(*key));
        select.push(") ORDER BY session, name");
        let rows = select.build().fetch_all(&self.readers).await;
        let rows = rows.map_err(StoreError::while_it("listed the conversations of sessions"))?;
        let place = |row: &Row| ConversationPlace {
            session: row.get(0),
            name: row.get(1),
            bytes: row.get::<i64>(2) as usize,
        };
        Ok(rows.iter().map(place).collect())
    }

    /// Returns the bodies of conversations with the keys of their sessions, in the order of `places`. Those of sessions that
    /// were deleted meanwhile are left out.
    pub async fn conversation_bodies(
        &self,
        places: &[ConversationPlace],
    ) -> Result<Vec<(i64, ConversationRow)>, StoreError> {
        let mut bodies = Vec::with_capacity(places.len());
        for places in places.chunks(CONVERSATIONS_AT_ONCE) {
            let mut select = QueryBuilder::new(
                "SELECT name, model, digest, body, conversations.session FROM conversations
                 JOIN sessions ON sessions.key = conversations.session AND sessions.session IS NOT NULL
                 WHERE ",
            );
            for (index, ConversationPlace { session, name, .. }) in places.iter().enumerate() {
                select.push(if index == 0 { "(" } else { " OR (" });
                select.push("conversations.session = ").push_bind(*session);
                select.push(" AND name = ").push_bind(name).push(")");
            }
            let rows = select.build().fetch_all(&self.readers).await;
            let rows = rows.map_err(StoreError::while_it("read the conversations of sessions"))?;
            let mut read: Vec<(i64, ConversationRow)> =
                rows.iter().map(|row| (row.get(4), conversation_row(row))).collect();
            read.sort_by_key(|(session, row)| {
                places.iter().position(|place| place.session == *session && place.name == row.name)
            });
            bodies.append(&mut read);
        }
        Ok(bodies)
    }

    /// Returns the size of a session: the bytes of its keys, values and conversations. Returns `None` if none
    /// of its turns was committed.
    pub async fn session_bytes(&self, agent: &str, session: &str) -> Result<Option<u64>, StoreError> {
        let row = query(
            "SELECT (SELECT CAST(COALESCE(SUM(OCTET_LENGTH(state.key) + LENGTH(value)), 0) AS BIGINT) FROM state
                     WHERE state.session = sessions.key)
                  + (SELECT CAST(COALESCE(SUM(LENGTH(body)), 0) AS BIGINT) FROM conversations
                     WHERE conversations.session = sessions.key)
             FROM sessions WHERE agent = ? AND session = ?",
        )
        .bind(agent)
        .bind(session)
        .fetch_optional(&self.readers)
        .await
        .map_err(StoreError::while_it("measured a session"))?;
        Ok(row.map(|row| row.get::<i64>(0) as u64))
    }

    /// Returns the outcome of the turn with this idempotency key, if it was committed.
    pub async fn outcome(
        &self,
        agent: &str,
        session: &str,
        idempotency_key: &str,
    ) -> Result<Option<KeptOutcome>, StoreError> {
        let row = query(
            "SELECT body, message_digest FROM outcomes
             WHERE session = (SELECT key FROM sessions WHERE agent = ? AND session = ?) AND idempotency_key = ?",
        )
            .bind(agent)
            .bind(session)
            .bind(idempotency_key)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("looked for the outcome of a turn"))?;
        Ok(row.map(|row| KeptOutcome { body: row.get(0), message_digest: row.get(1) }))
    }
}

/// Returns the key of a session, with its row.
async fn find(
    reading: &mut Connection,
    agent: &str,
    session: &str,
) -> Result<Option<(i64, SessionRow)>, StoreError> {
    let row = query(
        "SELECT session, turns, created_at_ms, updated_at_ms, key FROM sessions WHERE agent = ? AND session = ?",
    )
    .bind(agent)
    .bind(session)
    .fetch_optional(reading)
    .await
    .map_err(reading_failed())?;
    Ok(row.map(|row| (row.get(4), session_row(&row))))
}

async fn state_of(reading: &mut Connection, session: i64) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let rows = query("SELECT key, value FROM state WHERE session = ? ORDER BY key")
        .bind(session)
        .fetch_all(reading)
        .await
        .map_err(reading_failed())?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

fn reading_failed() -> impl FnOnce(sqlx::Error) -> StoreError {
    StoreError::while_it("read a session")
}

/// Decodes a conversation from the columns name, model, digest and body.
pub(crate) fn conversation_row(row: &Row) -> ConversationRow {
    ConversationRow { name: row.get(0), model: row.get(1), digest: row.get(2), body: row.get(3) }
}
