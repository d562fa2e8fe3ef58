//! Sessions that begin as what another one is, or as what was exported.
//!
//! Invariant: a session is there as a whole or not at all, and one that is there is only replaced by who says so.

use crate::{
    SessionRow, SessionSnapshot, Store, StoreError, erasure,
    sessions::{is_foreign_key, session_row},
};
use sqlx::{Row, SqliteConnection, query};

/// What is to become of a session that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Refuse,
    Replace,
}

/// What came of a fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fork {
    Done(SessionRow),
    /// There is no session to copy.
    SourceMissing,
    /// The target is there already; nothing was written.
    TargetExists,
}

impl Store {
    /// Copies what is committed of a session to one that is not there: state, conversations and the number of turns. Its
    /// turns, outcomes and log stay what they are, the first one's own.
    pub async fn fork_session(
        &self,
        agent: &str,
        from: &str,
        to: &str,
        at_ms: u64,
    ) -> Result<Fork, StoreError> {
        let failed = || StoreError::while_it("forked a session");
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        if exists(&mut transaction, agent, to).await? {
            return Ok(Fork::TargetExists);
        }
        let copied = query(
            "INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms)
             SELECT agent, ?3, turns, ?4, ?4 FROM sessions WHERE agent = ?1 AND session = ?2
             RETURNING session, turns, created_at_ms, updated_at_ms",
        )
        .bind(agent)
        .bind(from)
        .bind(to)
        .bind(at_ms as i64)
        .fetch_optional(&mut *transaction)
        .await
        .map_err(failed())?;
        let Some(row) = copied else { return Ok(Fork::SourceMissing) };
        for copy in [
            "INSERT INTO state (agent, session, key, value)
             SELECT agent, ?3, key, value FROM state WHERE agent = ?1 AND session = ?2",
            "INSERT INTO conversations (agent, session, name, body)
             SELECT agent, ?3, name, body FROM conversations WHERE agent = ?1 AND session = ?2",
        ] {
            let copy = query(copy).bind(agent).bind(from).bind(to);
            copy.execute(&mut *transaction).await.map_err(failed())?;
        }
        transaction.commit().await.map_err(failed())?;
        Ok(Fork::Done(session_row(&row)))
    }

    /// Writes a whole session. Whether it was written: one that is there is refused, or replaced with everything that belongs
    /// to it.
    pub async fn import_session(
        &self,
        agent: &str,
        snapshot: &SessionSnapshot,
        existing: Existing,
    ) -> Result<bool, StoreError> {
        let failed = || StoreError::while_it("imported a session");
        let SessionRow { session, turns, created_at_ms, updated_at_ms } = &snapshot.row;
        let mut transaction = self.writer.begin().await.map_err(failed())?;
        match existing {
            Existing::Refuse if exists(&mut transaction, agent, session).await? => return Ok(false),
            Existing::Refuse => {}
            Existing::Replace => {
                erasure::erase(&mut transaction, agent, session).await?;
            }
        }
        let written = query(
            "INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms) VALUES (?, ?, ?, ?, ?)",
        )
        .bind(agent)
        .bind(session)
        .bind(*turns as i64)
        .bind(*created_at_ms as i64)
        .bind(*updated_at_ms as i64)
        .execute(&mut *transaction)
        .await;
        written.map_err(|error| match is_foreign_key(&error) {
            true => StoreError::AgentMissing { name: agent.to_owned() },
            false => failed()(error),
        })?;
        for (key, value) in &snapshot.state {
            query("INSERT INTO state (agent, session, key, value) VALUES (?, ?, ?, ?)")
                .bind(agent)
                .bind(session)
                .bind(key)
                .bind(value)
                .execute(&mut *transaction)
                .await
                .map_err(failed())?;
        }
        for conversation in &snapshot.conversations {
            query("INSERT INTO conversations (agent, session, name, body) VALUES (?, ?, ?, ?)")
                .bind(agent)
                .bind(session)
                .bind(&conversation.name)
                .bind(&conversation.body)
                .execute(&mut *transaction)
                .await
                .map_err(failed())?;
        }
        transaction.commit().await.map_err(failed())?;
        Ok(true)
    }
}

async fn exists(connection: &mut SqliteConnection, agent: &str, session: &str) -> Result<bool, StoreError> {
    let row = query("SELECT EXISTS (SELECT 1 FROM sessions WHERE agent = ? AND session = ?)")
        .bind(agent)
        .bind(session)
        .fetch_one(connection)
        .await
        .map_err(StoreError::while_it("looked for a session"))?;
    Ok(row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentRow, ConversationRow, LogEntry, LogFilter, Outcome, StateChange, TurnCommit};

    async fn with_a_session() -> Store {
        let store = Store::in_memory().await.unwrap();
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        store.put_agent(&agent, b"component", &[]).await.unwrap();
        let commit = TurnCommit {
            agent: "a".into(),
            session: "s".into(),
            turn: 1,
            at_ms: 7,
            state: vec![StateChange { key: "k".into(), value: Some(b"v".to_vec()) }],
            conversations: vec![ConversationRow { name: "main".into(), body: b"said".to_vec() }],
            logs: vec![LogEntry { at_ms: 7, level: "info".into(), message: "hello".into() }],
            outcome: Some(Outcome { idempotency_key: Some("key".into()), body: b"answer".to_vec() }),
            ..Default::default()
        };
        store.commit_turn(commit).await.unwrap();
        store
    }

    #[tokio::test]
    async fn a_fork_has_state_and_conversations_and_goes_its_own_way() {
        let store = with_a_session().await;
        let done = store.fork_session("a", "s", "copy", 99).await.unwrap();
        let row = SessionRow { session: "copy".into(), turns: 1, created_at_ms: 99, updated_at_ms: 99 };
        assert_eq!(done, Fork::Done(row.clone()));
        let source = store.session("a", "s").await.unwrap().unwrap();
        let copy = store.session("a", "copy").await.unwrap().unwrap();
        assert_eq!(copy, SessionSnapshot { row, ..source });
        assert_eq!(store.outcome("a", "copy", "key").await.unwrap(), None, "a key belongs to its session");
        let next = TurnCommit { agent: "a".into(), session: "copy".into(), turn: 2, ..Default::default() };
        store.commit_turn(next).await.unwrap();
        assert_eq!(store.session("a", "s").await.unwrap().unwrap().row.turns, 1);
        assert_eq!(store.fork_session("a", "s", "copy", 1).await.unwrap(), Fork::TargetExists);
        assert_eq!(store.fork_session("a", "s", "s", 1).await.unwrap(), Fork::TargetExists);
        assert_eq!(store.fork_session("a", "nobody", "new", 1).await.unwrap(), Fork::SourceMissing);
        assert_eq!(store.session_bytes("a", "s").await.unwrap(), Some(6));
        assert_eq!(store.session_bytes("a", "nobody").await.unwrap(), None);
    }

    #[tokio::test]
    async fn an_import_is_refused_or_replaces_everything() {
        let store = with_a_session().await;
        let exported = store.session("a", "s").await.unwrap().unwrap();
        assert!(!store.import_session("a", &exported, Existing::Refuse).await.unwrap());
        let mut other = exported.clone();
        other.state = vec![("other".into(), b"w".to_vec())];
        other.row.turns = 5;
        assert!(store.import_session("a", &other, Existing::Replace).await.unwrap());
        assert_eq!(store.session("a", "s").await.unwrap(), Some(other));
        assert!(
            store.logs(&LogFilter::of_agent("a"), None, 10).await.unwrap().is_empty(),
            "what was there is gone"
        );
        assert!(store.delete_session("a", "s").await.unwrap());
        assert!(store.import_session("a", &exported, Existing::Refuse).await.unwrap());
        assert_eq!(store.session("a", "s").await.unwrap(), Some(exported.clone()));
        let lost = store.import_session("nobody", &exported, Existing::Refuse).await;
        assert!(matches!(lost, Err(StoreError::AgentMissing { .. })), "{lost:?}");
    }

    #[tokio::test]
    async fn an_import_that_fails_leaves_what_was_there() {
        let store = with_a_session().await;
        let before = store.session("a", "s").await.unwrap();
        let mut twice = before.clone().unwrap();
        twice.state.push(twice.state[0].clone());
        store.import_session("a", &twice, Existing::Replace).await.expect_err("one key has two values");
        assert_eq!(store.session("a", "s").await.unwrap(), before);
    }
}
