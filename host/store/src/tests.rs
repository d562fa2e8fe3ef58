//! Tests of the tables, on a real file.

use crate::*;

const AGENT: &str = "concierge";

fn agent(name: &str, digest: &str) -> AgentRow {
    AgentRow {
        name: name.into(),
        manifest: "name = \"x\"".into(),
        digest: digest.into(),
        deployed_at_ms: 7,
        deployed_by: "ann".into(),
    }
}

fn turn(turn: u64) -> TurnCommit {
    TurnCommit { agent: AGENT.into(), session: "s".into(), turn, at_ms: 100 + turn, ..Default::default() }
}

fn answer_to(key: &str, message_digest: Option<&[u8]>) -> Outcome {
    let message_digest = message_digest.map(<[u8]>::to_vec);
    Outcome { idempotency_key: Some(key.into()), message_digest, body: b"answer".to_vec() }
}

async fn open(folder: &tempfile::TempDir) -> Store {
    Store::open_for_tests(&folder.path().join("skep.db")).await.unwrap()
}

async fn with_agent(folder: &tempfile::TempDir) -> Store {
    let store = open(folder).await;
    store.put_agent(&agent(AGENT, "d1"), b"component", &[]).await.unwrap();
    store
}

#[tokio::test]
async fn a_turn_survives_reopening() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let set = StateChange { key: "name".into(), value: Some(b"Ada".to_vec()) };
    let body = ConversationRow {
        name: "main".into(),
        model: Some("m".into()),
        digest: Some("d".into()),
        body: b"tokens".to_vec(),
    };
    let commit = TurnCommit { state: vec![set], conversations: vec![body.clone()], ..turn(1) };
    store.commit_turn(commit).await.unwrap();
    store.close().await;

    let snapshot = open(&folder).await.session(AGENT, "s").await.unwrap().unwrap();
    assert_eq!(snapshot.row.turns, 1);
    assert_eq!(snapshot.state, vec![("name".to_owned(), b"Ada".to_vec())]);
    assert_eq!(snapshot.conversations, vec![body]);
}

#[tokio::test]
async fn sessions_are_counted_by_the_model_of_their_conversations() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let conversation = |name: &str, digest: Option<&str>| ConversationRow {
        name: name.into(),
        model: Some("m".into()),
        digest: digest.map(str::to_owned),
        body: vec![1, 2, 3],
    };
    for (session, digests) in
        [("a", [Some("1"), Some("1")]), ("b", [Some("1"), Some("2")]), ("c", [None, None])]
    {
        let conversations = vec![conversation("main", digests[0]), conversation("other", digests[1])];
        let commit = TurnCommit { session: session.into(), conversations, ..turn(1) };
        store.commit_turn(commit).await.unwrap();
    }
    let used = store.models_in_use().await.unwrap();
    let used: Vec<_> = used.iter().map(|used| (used.digest.as_deref(), used.sessions)).collect();
    assert_eq!(used, [(None, 1), (Some("1"), 2), (Some("2"), 1)]);

    let outline = store.session_outline(AGENT, "b").await.unwrap().unwrap();
    let outlined = |name: &str| ConversationOutline { name: name.into(), model: Some("m".into()), bytes: 3 };
    assert_eq!(outline.conversations, [outlined("main"), outlined("other")]);
    store.delete_session(AGENT, "b").await.unwrap();
    assert_eq!(store.session_outline(AGENT, "b").await.unwrap(), None);
    assert_eq!(store.models_in_use().await.unwrap().len(), 2, "a deleted session does not count");
}

#[tokio::test]
async fn conversations_of_many_sessions_are_read_at_once_and_not_those_of_deleted_ones() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let conversation = |name: &str, body: &str| ConversationRow {
        name: name.into(),
        body: body.as_bytes().to_vec(),
        ..ConversationRow::default()
    };
    for (session, conversations) in
        [("a", vec![conversation("side", "a2"), conversation("main", "a1")]), ("b", Vec::new())]
    {
        let commit = TurnCommit { session: session.into(), conversations, ..turn(1) };
        store.commit_turn(commit).await.unwrap();
    }
    // More than one statement reads.
    let many = (0..120).map(|number| conversation(&format!("{number:03}"), &number.to_string()));
    let commit = TurnCommit { session: "c".into(), conversations: many.collect(), ..turn(1) };
    store.commit_turn(commit).await.unwrap();
    let listed = store.recent_sessions(&SessionSearch::default(), 9).await.unwrap();
    let key = |id: &str| listed.iter().find(|listed| listed.session == id).unwrap().cursor.key;
    assert!(store.conversation_places(&[]).await.unwrap().is_empty());
    assert!(store.conversation_places(&[key("b")]).await.unwrap().is_empty());
    let places = store.conversation_places(&[key("c"), key("a")]).await.unwrap();
    let named: Vec<_> = places.iter().take(3).map(|place| (place.session, place.name.as_str())).collect();
    assert_eq!(named, [(key("a"), "main"), (key("a"), "side"), (key("c"), "000")]);
    assert_eq!((places.len(), places[0].bytes, places[121].bytes), (122, 2, 3));
    let read = async || {
        let bodies = store.conversation_bodies(&places).await.unwrap();
        bodies.into_iter().map(|(_, row)| String::from_utf8(row.body).unwrap()).collect::<Vec<_>>()
    };
    let bodies = read().await;
    assert_eq!((bodies.len(), bodies[0].as_str(), bodies[121].as_str()), (122, "a1", "119"));
    // Its rows may still be there; nobody reads them.
    store.delete_session(AGENT, "c").await.unwrap();
    assert_eq!(read().await, ["a1", "a2"]);
}

#[tokio::test]
async fn only_the_next_turn_commits_and_a_conflict_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    for wrong in [0, 2, 5] {
        let refused = store.commit_turn(turn(wrong)).await;
        assert!(matches!(refused, Err(StoreError::TurnConflict { .. })), "turn {wrong}: {refused:?}");
    }
    store.commit_turn(turn(1)).await.unwrap();
    let set = StateChange { key: "k".into(), value: Some(vec![1]) };
    let again = TurnCommit { state: vec![set], ..turn(1) };
    assert!(matches!(store.commit_turn(again).await, Err(StoreError::TurnConflict { turn: 1, .. })));
    store.commit_turn(turn(2)).await.unwrap();
    let snapshot = store.session(AGENT, "s").await.unwrap().unwrap();
    assert_eq!((snapshot.row.turns, snapshot.row.created_at_ms, snapshot.row.updated_at_ms), (2, 101, 102));
    assert!(snapshot.state.is_empty());
}

#[tokio::test]
async fn a_turn_of_an_unknown_agent_is_refused() {
    let store = Store::for_tests().await.unwrap();
    assert!(matches!(store.commit_turn(turn(1)).await, Err(StoreError::AgentMissing { .. })));
}

#[tokio::test]
async fn compiled_code_is_listed_least_recently_used_first() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder).await;
    let row =
        |key: &str, used_at_ms| ArtifactRow { key: key.into(), checksum: "c".into(), bytes: 3, used_at_ms };
    for (key, at_ms) in [("a", 1), ("b", 2), ("c", 3)] {
        store.put_artifact(&row(key, at_ms)).await.unwrap();
    }
    assert_eq!(store.use_artifact("a", 4).await.unwrap(), Some(row("a", 4)));
    assert_eq!(store.use_artifact("z", 4).await.unwrap(), None);
    store.delete_artifact("c").await.unwrap();
    assert_eq!(store.artifacts().await.unwrap(), [row("b", 2), row("a", 4)]);
}

#[tokio::test]
async fn deleting_an_agent_removes_its_sessions_logs_and_unshared_component() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    store.put_agent(&agent("other", "d1"), b"component", &[]).await.unwrap();
    let line = LogEntry { at_ms: 1, level: "info".into(), message: "hello".into() };
    store.commit_turn(TurnCommit { logs: vec![line], ..turn(1) }).await.unwrap();

    assert!(store.delete_agent(AGENT).await.unwrap());
    assert!(!store.delete_agent(AGENT).await.unwrap());
    assert!(store.session(AGENT, "s").await.unwrap().is_none());
    assert!(store.logs(&LogFilter::of_agent(AGENT), None, 10).await.unwrap().is_empty());
    assert_eq!(store.component("d1").await.unwrap(), b"component");
    assert!(store.delete_agent("other").await.unwrap());
    assert!(matches!(store.component("d1").await, Err(StoreError::ComponentMissing { .. })));
}

#[tokio::test]
async fn every_deployment_is_a_version_and_the_newest_are_kept_with_their_components() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    store.commit_turn(turn(1)).await.unwrap();
    let kept = crate::agents::VERSIONS_PER_AGENT as u64;
    for version in 2..=kept + 1 {
        let digest = format!("d{version}");
        assert_eq!(store.put_agent(&agent(AGENT, &digest), digest.as_bytes(), &[]).await.unwrap(), version);
    }
    let versions = store.versions(AGENT).await.unwrap();
    assert_eq!(versions.len() as u64, kept);
    assert_eq!((versions[0].version, versions[0].is_active), (kept + 1, true));
    assert!(versions[1..].iter().all(|row| !row.is_active));
    assert!(matches!(store.component("d1").await, Err(StoreError::ComponentMissing { .. })));
    assert_eq!(store.component("d2").await.unwrap(), b"d2");

    assert!(store.activate_version(AGENT, 2, &[]).await.unwrap());
    assert!(!store.activate_version(AGENT, 1, &[]).await.unwrap());
    assert!(!store.activate_version("nobody", 2, &[]).await.unwrap());
    store.close().await;
    let store = open(&folder).await;
    let agents = store.agents().await.unwrap();
    assert_eq!((agents.len(), agents[0].version, agents[0].agent.digest.as_str()), (1, 2, "d2"));
    assert_eq!(store.put_agent(&agent(AGENT, "d2"), b"d2", &[]).await.unwrap(), kept + 2);
    assert!(store.session(AGENT, "s").await.unwrap().is_some(), "its sessions stay");
}

#[tokio::test]
async fn a_new_version_of_an_agent_keeps_its_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    store.commit_turn(turn(1)).await.unwrap();
    store.put_agent(&agent(AGENT, "d2"), b"newer", &[]).await.unwrap();
    assert_eq!(store.session(AGENT, "s").await.unwrap().unwrap().row.turns, 1);
    let agents: Vec<AgentRow> = store.agents().await.unwrap().into_iter().map(|row| row.agent).collect();
    assert_eq!(agents, vec![agent(AGENT, "d2")]);
}

#[tokio::test]
async fn an_outcome_is_found_by_its_key_and_a_key_commits_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let outcome = answer_to("k", Some(b"digest"));
    store.commit_turn(TurnCommit { outcome: Some(outcome.clone()), ..turn(1) }).await.unwrap();
    let kept = KeptOutcome { body: b"answer".to_vec(), message_digest: Some(b"digest".to_vec()) };
    assert_eq!(store.outcome(AGENT, "s", "k").await.unwrap(), Some(kept));
    assert_eq!(store.outcome(AGENT, "s", "other").await.unwrap(), None);
    assert!(store.commit_turn(TurnCommit { outcome: Some(outcome), ..turn(2) }).await.is_err());
    assert_eq!(store.session(AGENT, "s").await.unwrap().unwrap().row.turns, 1);
    store.commit_turn(TurnCommit { outcome: Some(answer_to("own", None)), ..turn(2) }).await.unwrap();
    let kept = store.outcome(AGENT, "s", "own").await.unwrap().expect("committed");
    assert_eq!(kept.message_digest, None);
}

#[tokio::test]
async fn logs_are_read_from_the_readers_position_and_old_lines_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let lines: Vec<LogEntry> = (0..(logs::LINES_PER_AGENT + logs::SPARE_LINES) as u64 + 5)
        .map(|n| LogEntry { at_ms: n, level: "info".into(), message: format!("line {n}") })
        .collect();
    store.append_logs(AGENT, "s", 1, &lines).await.unwrap();
    let newest = store.logs(&LogFilter::of_agent(AGENT), None, 2).await.unwrap();
    assert_eq!(newest.iter().map(|row| row.entry.at_ms).collect::<Vec<_>>(), [10_203, 10_204]);
    let after = store.logs(&LogFilter::of_agent(AGENT), Some(newest[0].id), 10).await.unwrap();
    assert_eq!(after, newest[1..]);
    let oldest = store.logs(&LogFilter::of_agent(AGENT), Some(0), 1).await.unwrap();
    assert_eq!(oldest[0].entry.message, "line 205");
}

#[tokio::test]
async fn a_tenant_that_logs_a_lot_does_not_push_out_lines_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let lines = |count: u64| -> Vec<LogEntry> {
        (0..count).map(|n| LogEntry { at_ms: n, level: "info".into(), message: "line".into() }).collect()
    };
    let count = async |tenant: &str| {
        let folder = SessionFolder::of((!tenant.is_empty()).then_some(tenant));
        let filter = LogFilter { folder: Some(folder), ..LogFilter::of_agent(AGENT) };
        store.logs(&filter, Some(0), 100_000).await.unwrap().len() as i64
    };
    store.append_logs(AGENT, "small/s", 1, &lines(5)).await.unwrap();
    store.append_logs(AGENT, "s", 1, &lines(7)).await.unwrap();
    for _ in 0..3 {
        store.append_logs(AGENT, "greedy/s", 1, &lines(5_000)).await.unwrap();
    }
    assert_eq!((count("small").await, count("").await), (5, 7));
    assert_eq!(count("greedy").await, logs::LINES_PER_AGENT - 12);
    store.append_logs(AGENT, "small/s", 2, &lines(6_000)).await.unwrap();
    let half = logs::LINES_PER_AGENT / 2;
    assert!((half - 10..half).contains(&count("greedy").await), "{}", count("greedy").await);
    assert_eq!(count("").await, 7);
}

#[tokio::test]
async fn old_outcomes_are_removed_in_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    for number in 1..=500 {
        let outcome = answer_to(&format!("key {number}"), None);
        store.commit_turn(TurnCommit { outcome: Some(outcome), ..turn(number) }).await.unwrap();
    }
    // Turn n is committed at 100 + n.
    assert_eq!(store.forget_outcomes(550, 2_000).await.unwrap(), 449);
    assert_eq!(store.outcome(AGENT, "s", "key 449").await.unwrap(), None);
    assert!(store.outcome(AGENT, "s", "key 450").await.unwrap().is_some());
    assert_eq!(store.forget_outcomes(550, 2_000).await.unwrap(), 0);
}

#[tokio::test]
async fn logs_are_read_by_session_level_and_time_and_over_all_agents() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    assert_eq!(store.newest_log_id().await.unwrap(), 0);
    let line =
        |at_ms, level: &str| LogEntry { at_ms, level: level.into(), message: format!("{level} {at_ms}") };
    store.append_logs(AGENT, "ada", 1, &[line(1, "info"), line(2, "error")]).await.unwrap();
    store.append_logs(AGENT, "bob", 1, &[line(3, "warn"), line(4, "info")]).await.unwrap();
    let all = LogFilter::default();
    for (filter, expected) in [
        (all.clone(), vec!["info 1", "error 2", "warn 3", "info 4"]),
        (LogFilter { session: Some("ada".into()), ..all.clone() }, vec!["info 1", "error 2"]),
        (LogFilter { levels: vec!["warn", "error"], ..all.clone() }, vec!["error 2", "warn 3"]),
        (LogFilter { since_ms: Some(3), ..all.clone() }, vec!["warn 3", "info 4"]),
        (LogFilter { levels: vec!["info"], since_ms: Some(2), ..LogFilter::of_agent(AGENT) }, vec!["info 4"]),
        (LogFilter::of_agent("another"), vec![]),
    ] {
        let lines = store.logs(&filter, None, 10).await.unwrap();
        assert!(lines.iter().all(|line| line.agent == AGENT));
        assert_eq!(lines.iter().map(|line| &*line.entry.message).collect::<Vec<_>>(), expected, "{filter:?}");
    }
    assert_eq!(store.newest_log_id().await.unwrap(), 4);
}

#[tokio::test]
async fn sessions_are_listed_page_by_page() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    for session in ["b", "a", "c"] {
        store.commit_turn(TurnCommit { session: session.into(), ..turn(1) }).await.unwrap();
    }
    let first = store.sessions(AGENT, &SessionFolder::of(None), None, 2).await.unwrap();
    assert_eq!(first.iter().map(|row| row.session.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let rest = store.sessions(AGENT, &SessionFolder::of(None), Some("b"), 2).await.unwrap();
    assert_eq!(rest.iter().map(|row| row.session.as_str()).collect::<Vec<_>>(), ["c"]);
    assert!(store.delete_session(AGENT, "b").await.unwrap());
    assert!(!store.delete_session(AGENT, "b").await.unwrap());
}

#[tokio::test]
async fn a_database_of_a_newer_skep_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(&folder).await;
    let dialect = store.readers.dialect();
    let set = store.write(dialect, |connection, dialect| {
        Box::pin(async move {
            let set =
                dialect.pick("PRAGMA user_version = 99", "UPDATE skep_schema SET version = 99, oldest = 99");
            let set = crate::sql::query(set).execute(connection).await;
            set.map(drop).map_err(StoreError::while_it("set the version"))
        })
    });
    set.await.unwrap();
    store.close().await;
    let refused = Store::open_for_tests(&folder.path().join("skep.db")).await;
    assert!(matches!(refused, Err(StoreError::NewerSchema { found: 99, .. })));
}

#[tokio::test]
async fn foreign_files_and_unwritable_folders_have_different_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("skep.db");
    let refused = async || Store::open(&path, Durability::Process).await.unwrap_err().to_string();
    std::fs::write(&path, "not a database, but longer than the header of one is".repeat(100)).unwrap();
    let error = refused().await;
    assert!(error.contains("skep.db is damaged or was not written by skep"), "{error}");
    assert!(error.contains("backup") && !error.contains("writable"), "{error}");

    std::fs::remove_file(&path).unwrap();
    let other = sqlx::sqlite::SqliteConnectOptions::new().filename(&path).create_if_missing(true);
    let mut other = sqlx::ConnectOptions::connect(&other).await.unwrap();
    sqlx::query("CREATE TABLE agents (number INTEGER)").execute(&mut other).await.unwrap();
    sqlx::Connection::close(other).await.unwrap();
    let error = refused().await;
    assert!(error.contains("tables of another program"), "{error}");

    let missing = folder.path().join("nowhere").join("skep.db");
    let error = Store::open(&missing, Durability::Process).await.unwrap_err().to_string();
    assert!(error.contains("exists and is writable"), "{error}");
}
