//! The commit of turns: of one, or of several by the same statements.

use super::{Outcome, PendingCommit, StateChange, TurnCommit, TurnTrigger, put_conversations};
use crate::{
    StoreError, deliveries,
    error::is_foreign_key,
    events,
    line_counts::LineCounts,
    logs,
    row_groups::bounded,
    schedules,
    sql::{Connection, GivenRows, Row, query, query_scalar},
    token_use, turns, usage,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// A commit whose session has advanced to it.
struct Advanced<'c> {
    /// The key of the session.
    session: i64,
    commit: &'c TurnCommit,
}

/// Commits a turn that is the next one of its session.
pub(super) async fn commit_turn(
    connection: &mut Connection,
    PendingCommit { commit, line_counts }: &PendingCommit,
) -> Result<(), StoreError> {
    match advance(connection, commit).await? {
        Some(session) => write(connection, line_counts, &[Advanced { session, commit }]).await,
        None => Err(refusal(connection, commit).await?),
    }
}

/// Commits the turns that are open and the next ones of sessions that exist, and leaves the others.
pub(super) async fn commit_turns(
    connection: &mut Connection,
    pending: &[&PendingCommit],
) -> Result<Vec<Option<()>>, StoreError> {
    let [PendingCommit { line_counts, .. }, ..] = pending else { return Ok(Vec::new()) };
    let commits: Vec<&Arc<TurnCommit>> = pending.iter().map(|pending| &pending.commit).collect();
    let sessions = advance_all(connection, &commits).await?;
    let advanced: Vec<Advanced<'_>> = commits
        .iter()
        .zip(&sessions)
        .filter_map(|(commit, session)| session.map(|session| Advanced { session, commit }))
        .collect();
    write(connection, line_counts, &advanced).await?;
    Ok(sessions.into_iter().map(|session| session.map(drop)).collect())
}

/// Makes these the last turns of their sessions, if they are open and the next ones, and returns the keys of these sessions.
async fn advance_all(
    connection: &mut Connection,
    commits: &[&Arc<TurnCommit>],
) -> Result<Vec<Option<i64>>, StoreError> {
    let rows = GivenRows::new()
        .column("agent", commits.iter().map(|commit| &commit.agent))
        .column("session", commits.iter().map(|commit| &commit.session))
        .column("turn", commits.iter().map(|commit| commit.turn as i64))
        .column("at_ms", commits.iter().map(|commit| commit.at_ms as i64))
        .column("own", commits.iter().map(|commit| commit.key.map(|key| key.0)));
    // A commit that is refused writes nothing, so it costs the others nothing.
    let advance = rows.query(
        connection.dialect(),
        "UPDATE sessions SET turns = new.turn, updated_at_ms = new.at_ms FROM",
        "WHERE sessions.agent = new.agent AND sessions.session = new.session AND sessions.turns = new.turn - 1
             AND (new.own IS NULL OR EXISTS (SELECT 1 FROM turns WHERE turns.key = new.own AND turns.ended_at_ms IS NULL))
         RETURNING sessions.agent, sessions.session, sessions.turns, sessions.key",
    );
    let advanced = advance.fetch_all(connection).await.map_err(StoreError::while_it("committed turns"))?;
    let read =
        |row: &Row| ((row.get::<String>(0), row.get::<String>(1), row.get::<i64>(2)), row.get::<i64>(3));
    let mut keys: HashMap<_, i64> = advanced.iter().map(read).collect();
    let mut key_of = |commit: &TurnCommit| {
        // If two commits are of the same turn, one of them has made it.
        keys.remove(&(commit.agent.clone(), commit.session.clone(), commit.turn as i64))
    };
    Ok(commits.iter().map(|commit| key_of(commit)).collect())
}

/// Makes this the session's last turn, if it is open and the next one, and returns the session's key.
async fn advance(connection: &mut Connection, commit: &Arc<TurnCommit>) -> Result<Option<i64>, StoreError> {
    let advanced = advance_all(connection, &[commit]).await?.pop().flatten();
    let TurnCommit { agent, session, turn, at_ms, key, .. } = &**commit;
    if advanced.is_some() || *turn != 1 {
        return Ok(advanced);
    }
    query_scalar(
        "INSERT INTO sessions (agent, session, turns, created_at_ms, updated_at_ms)
         SELECT ?1, ?2, 1, ?3, ?3 WHERE EXISTS (SELECT 1 FROM agents WHERE name = ?1)
             AND (?4 IS NULL OR EXISTS (SELECT 1 FROM turns WHERE key = ?4 AND ended_at_ms IS NULL))
         ON CONFLICT DO NOTHING RETURNING key",
    )
    .bind(agent)
    .bind(session)
    .bind(*at_ms as i64)
    .bind(key.map(|key| key.0))
    .fetch_optional(connection)
    .await
    .map_err(|error| match is_foreign_key(&error) {
        true => StoreError::AgentMissing { name: agent.clone() },
        false => StoreError::while_it("committed a turn")(error),
    })
}

/// Returns why a commit was refused.
async fn refusal(connection: &mut Connection, commit: &TurnCommit) -> Result<StoreError, StoreError> {
    let TurnCommit { agent, session, turn, key, .. } = commit;
    let found = query(
        "SELECT EXISTS (SELECT 1 FROM agents WHERE name = ?1),
             EXISTS (SELECT 1 FROM turns WHERE key = ?3 AND ended_at_ms IS NULL),
             COALESCE((SELECT turns FROM sessions WHERE agent = ?1 AND session = ?2), 0)",
    )
    .bind(agent)
    .bind(session)
    .bind(key.map(|key| key.0))
    .fetch_one(connection)
    .await
    .map_err(StoreError::while_it("committed a turn"))?;
    let (is_agent_known, is_open, turns): (bool, bool, i64) = (found.get(0), found.get(1), found.get(2));
    let is_next = turns + 1 == *turn as i64;
    Ok(match key {
        _ if is_next && !is_agent_known => StoreError::AgentMissing { name: agent.clone() },
        Some(key) if is_next && !is_open => StoreError::TurnNotOpen { key: key.0 },
        _ => StoreError::TurnConflict { agent: agent.clone(), session: session.clone(), turn: *turn },
    })
}

/// Writes everything in these commits but the number of turns of their sessions.
async fn write(
    connection: &mut Connection,
    line_counts: &LineCounts,
    commits: &[Advanced<'_>],
) -> Result<(), StoreError> {
    change_state(connection, commits).await?;
    let mut conversations = Vec::new();
    for Advanced { session, commit } in commits {
        conversations.extend(commit.conversations.iter().map(|conversation| (*session, conversation)));
    }
    put_conversations(connection, &conversations).await?;
    put_outcomes(connection, commits).await?;
    let ended: Vec<_> = commits.iter().filter_map(|advanced| ended_turn(advanced.commit)).collect();
    turns::finish(connection, &ended).await?;
    for Advanced { commit, .. } in commits {
        let TurnCommit { agent, session, at_ms, .. } = commit;
        match &commit.trigger {
            Some(TurnTrigger::Alarm { schedule, due_ms }) => {
                schedules::settle(connection, schedule, *due_ms).await?
            }
            Some(TurnTrigger::Event(delivery)) => deliveries::settle(connection, *delivery).await?,
            None => {}
        }
        schedules::change(connection, agent, session, &commit.schedules).await?;
        for event in &commit.events {
            events::insert(connection, event, *at_ms).await?;
        }
    }
    let (mut tokens, mut models, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    for Advanced { commit, .. } in commits {
        let TurnCommit { agent, session, turn, .. } = commit;
        tokens.extend(&commit.token_use);
        models.extend(&commit.usage);
        lines.push(logs::TurnLines { agent, session, turn: *turn, lines: &commit.logs });
    }
    token_use::add(connection, &tokens);
    usage::add(connection, &models).await?;
    logs::insert(connection, line_counts, &lines).await
}

fn ended_turn(commit: &TurnCommit) -> Option<turns::EndedTurn<'_>> {
    Some(turns::EndedTurn {
        key: commit.key?,
        agent: &commit.agent,
        session: &commit.session,
        number: commit.turn,
        outcome: commit.outcome.as_ref().map_or(&[][..], |outcome| &outcome.body),
        timeline: &commit.timeline,
        at_ms: commit.at_ms,
    })
}

/// Applies the last change of each key.
async fn change_state(connection: &mut Connection, commits: &[Advanced<'_>]) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("committed the state of a session");
    let dialect = connection.dialect();
    let mut last = BTreeMap::new();
    for Advanced { session, commit } in commits {
        for StateChange { key, value } in &commit.state {
            last.insert((*session, key), value.as_deref());
        }
    }
    let (mut set, mut removed) = (Vec::new(), Vec::new());
    for ((session, key), value) in last {
        match value {
            Some(value) => set.push((session, key, value)),
            None => removed.push((session, key)),
        }
    }
    for rows in bounded(&set, |(_, _, value)| value.len()) {
        let rows = GivenRows::new()
            .column("session", rows.iter().map(|(session, ..)| *session))
            .column("key", rows.iter().map(|(_, key, _)| *key))
            .column("value", rows.iter().map(|(.., value)| *value));
        let insert = rows.query(
            dialect,
            "INSERT INTO state (session, key, value) SELECT session, key, value FROM",
            "WHERE TRUE ON CONFLICT (session, key) DO UPDATE SET value = excluded.value",
        );
        insert.execute(&mut *connection).await.map_err(failed())?;
    }
    for rows in bounded(&removed, |_| 0) {
        let rows = GivenRows::new()
            .column("session", rows.iter().map(|(session, _)| *session))
            .column("key", rows.iter().map(|(_, key)| *key));
        let delete =
            rows.query(dialect, "DELETE FROM state WHERE (session, key) IN (SELECT session, key FROM", ")");
        delete.execute(&mut *connection).await.map_err(failed())?;
    }
    Ok(())
}

async fn put_outcomes(connection: &mut Connection, commits: &[Advanced<'_>]) -> Result<(), StoreError> {
    let dialect = connection.dialect();
    let outcomes: Vec<_> = commits
        .iter()
        .filter_map(|Advanced { session, commit }| match &commit.outcome {
            Some(outcome @ Outcome { idempotency_key: Some(key), .. }) => {
                Some((*session, key, outcome, *commit))
            }
            _ => None,
        })
        .collect();
    for rows in bounded(&outcomes, |(_, _, outcome, _)| outcome.body.len()) {
        let rows = GivenRows::new()
            .column("session", rows.iter().map(|(session, ..)| *session))
            .column("idempotency_key", rows.iter().map(|(_, key, ..)| *key))
            .column("turn", rows.iter().map(|(.., commit)| commit.turn as i64))
            .column("body", rows.iter().map(|(_, _, outcome, _)| &outcome.body))
            .column("at_ms", rows.iter().map(|(.., commit)| commit.at_ms as i64))
            .column("message_digest", rows.iter().map(|(_, _, outcome, _)| &outcome.message_digest));
        let columns = "session, idempotency_key, turn, body, at_ms, message_digest";
        let insert = format!("INSERT INTO outcomes ({columns}) SELECT {columns} FROM");
        let insert = rows.query(dialect, &insert, "");
        insert.execute(&mut *connection).await.map_err(StoreError::while_it("committed a turn"))?;
    }
    Ok(())
}
