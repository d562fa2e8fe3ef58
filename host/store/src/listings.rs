//! Listings for people: sessions by their last turn, the turns of a session, and the values of its state.

use crate::{
    SessionFolder, Store, StoreError, TurnKey, rows,
    sql::{AssertSqlSafe, Row, query, query_scalar},
    turns,
};

/// A search for sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionSearch {
    /// The folder of the sessions; `None` is all folders.
    pub folder: Option<SessionFolder>,
    /// Names of the agents; `None` is all agents.
    pub agents: Option<Vec<String>>,
    /// A part of the id.
    pub id_part: Option<String>,
    /// Lists only sessions after this one in the listing.
    pub after: Option<SessionCursor>,
}

/// The place of a session in the listing, which moves with each turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionCursor {
    pub updated_at_ms: u64,
    pub key: i64,
}

/// A session in the listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedSession {
    pub agent: String,
    pub session: String,
    pub turns: u64,
    pub created_at_ms: u64,
    pub cursor: SessionCursor,
}

/// A turn in the listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedTurn {
    pub id: String,
    pub accepted_at_ms: u64,
    pub state: turns::TurnState,
}

impl Store {
    /// Returns at most `limit` sessions, beginning with the one whose last turn is the newest.
    pub async fn recent_sessions(
        &self,
        search: &SessionSearch,
        limit: u32,
    ) -> Result<Vec<ListedSession>, StoreError> {
        let SessionSearch { folder, agents, id_part, after } = search;
        // Only the number of agents varies in the text; values are bound.
        let mut sql = String::from(
            "SELECT agent, session, turns, created_at_ms, updated_at_ms, key FROM sessions WHERE session IS NOT NULL",
        );
        if folder.is_some() {
            sql += " AND session > ? AND session < ? AND (? OR instr(session, '/') = 0)";
        }
        if let Some(agents) = agents {
            // An empty list selects nothing.
            let places = vec!["?"; agents.len()].join(", ");
            sql += &if agents.is_empty() {
                " AND FALSE".to_owned()
            } else {
                format!(" AND agent IN ({places})")
            };
        }
        if id_part.is_some() {
            sql += " AND instr(session, ?) > 0";
        }
        if after.is_some() {
            sql += " AND (updated_at_ms, key) < (?, ?)";
        }
        sql += " ORDER BY updated_at_ms DESC, key DESC LIMIT ?";
        let mut sessions = query(AssertSqlSafe(sql));
        if let Some(SessionFolder { begin, end, has_slash }) = folder {
            sessions = sessions.bind(begin).bind(end).bind(has_slash);
        }
        for agent in agents.iter().flatten() {
            sessions = sessions.bind(agent);
        }
        if let Some(id_part) = id_part {
            sessions = sessions.bind(id_part);
        }
        if let Some(after) = after {
            sessions = sessions.bind(after.updated_at_ms as i64).bind(after.key);
        }
        let found = sessions.bind(limit).fetch_all(&self.readers).await;
        let found = found.map_err(StoreError::while_it("listed sessions"))?;
        let listed = |row: &Row| ListedSession {
            agent: row.get(0),
            session: row.get(1),
            turns: row.get::<i64>(2) as u64,
            created_at_ms: row.get::<i64>(3) as u64,
            cursor: SessionCursor { updated_at_ms: row.get::<i64>(4) as u64, key: row.get(5) },
        };
        Ok(found.iter().map(listed).collect())
    }

    /// Returns at most `limit` stored turns of a session, the newest first. If `before` is given, returns only those
    /// before the turn with this id.
    pub async fn turns_of_session(
        &self,
        agent: &str,
        session: &str,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<ListedTurn>, StoreError> {
        let sql = format!(
            "SELECT {} FROM turns WHERE agent = ?1 AND session = ?2
                 AND (?3 IS NULL OR key < (SELECT key FROM turns WHERE agent = ?1 AND session = ?2 AND id = ?3))
             ORDER BY key DESC LIMIT ?4",
            turns::COLUMNS
        );
        let found = query(AssertSqlSafe(sql))
            .bind(agent)
            .bind(session)
            .bind(before)
            .bind(limit)
            .fetch_all(&self.readers)
            .await
            .map_err(StoreError::while_it("listed the turns of a session"))?;
        let found = rows::readable(&found, "turn", turns::turn_row);
        let listed = found.into_iter().map(|row| ListedTurn {
            id: row.id,
            accepted_at_ms: row.accepted_at_ms,
            state: row.state,
        });
        Ok(listed.collect())
    }

    /// Returns the stored timeline of a turn that has ended, if it has one.
    pub async fn turn_timeline(&self, turn: TurnKey) -> Result<Option<Vec<u8>>, StoreError> {
        let timeline = query_scalar::<Option<Vec<u8>>>("SELECT timeline FROM turns WHERE key = ?")
            .bind(turn.0)
            .fetch_optional(&self.readers)
            .await
            .map_err(StoreError::while_it("read the timeline of a turn"))?;
        Ok(timeline.flatten().filter(|timeline| !timeline.is_empty()))
    }

    /// Returns at most `limit` values of a session's state in the order of their keys, only those after the key `after`.
    /// A session that does not exist has none.
    pub async fn session_state(
        &self,
        agent: &str,
        session: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let found = query(
            "SELECT key, value FROM state
             WHERE session = (SELECT key FROM sessions WHERE agent = ? AND session = ?) AND key > ?
             ORDER BY key LIMIT ?",
        )
        .bind(agent)
        .bind(session)
        .bind(after.unwrap_or_default())
        .bind(limit)
        .fetch_all(&self.readers)
        .await
        .map_err(StoreError::while_it("read the state of a session"))?;
        Ok(found.iter().map(|row| (row.get(0), row.get(1))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentRow, StateChange, TurnCommit};

    async fn store(folder: &tempfile::TempDir) -> Store {
        let store = Store::open_for_tests(&folder.path().join("skep.db")).await.unwrap();
        let agent = AgentRow {
            name: "a".into(),
            manifest: String::new(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: String::new(),
        };
        store.put_agent(&agent, b"component", &[]).await.unwrap();
        store
    }

    fn commit(session: &str, turn: u64, at_ms: u64) -> TurnCommit {
        let state = vec![StateChange { key: format!("k{turn}"), value: Some(vec![turn as u8]) }];
        TurnCommit { agent: "a".into(), session: session.into(), turn, at_ms, state, ..TurnCommit::default() }
    }

    #[tokio::test]
    async fn sessions_are_listed_by_their_last_turn_and_in_pages() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        for (session, at_ms) in [("one", 5), ("two", 5), ("acme/one", 9), ("three", 1)] {
            store.commit_turn(commit(session, 1, at_ms)).await.unwrap();
        }
        let all = SessionSearch::default();
        let ids = |found: &[ListedSession]| found.iter().map(|one| one.session.clone()).collect::<Vec<_>>();
        let first = store.recent_sessions(&all, 2).await.unwrap();
        assert_eq!(ids(&first), ["acme/one", "two"]);
        let next = SessionSearch { after: Some(first[1].cursor), ..all.clone() };
        assert_eq!(ids(&store.recent_sessions(&next, 9).await.unwrap()), ["one", "three"]);
        let (folder, id_part) = (Some(SessionFolder::of(None)), Some("one".into()));
        let local = SessionSearch { folder, id_part, ..all.clone() };
        assert_eq!(ids(&store.recent_sessions(&local, 9).await.unwrap()), ["one"]);
        for (agents, count) in [(vec![], 0), (vec!["b"], 0), (vec!["b", "a"], 4)] {
            let agents = Some(agents.into_iter().map(str::to_owned).collect());
            let search = SessionSearch { agents, ..all.clone() };
            assert_eq!(store.recent_sessions(&search, 9).await.unwrap().len(), count);
        }
    }

    #[tokio::test]
    async fn state_is_read_in_pages() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder).await;
        for turn in 1..=3 {
            store.commit_turn(commit("s", turn, turn)).await.unwrap();
        }
        let page = store.session_state("a", "s", Some("k1"), 1).await.unwrap();
        assert_eq!(page, [("k2".to_owned(), vec![2])]);
        assert!(store.session_state("a", "none", None, 9).await.unwrap().is_empty());
    }
}
