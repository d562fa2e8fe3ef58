//! Tests of turns and their journals, on a real file.

use crate::*;

const AGENT: &str = "concierge";

async fn store(folder: &tempfile::TempDir) -> Store {
    Store::open_for_tests(&folder.path().join("skep.db")).await.unwrap()
}

async fn with_agent(folder: &tempfile::TempDir) -> Store {
    let store = store(folder).await;
    let agent = AgentRow {
        name: AGENT.into(),
        manifest: "name = \"x\"".into(),
        digest: "d1".into(),
        deployed_at_ms: 7,
        deployed_by: "tester".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
    store
}

fn message(id: &str, idempotency_key: Option<&str>, number: Option<u64>) -> NewTurn {
    NewTurn {
        id: id.into(),
        agent: AGENT.into(),
        session: "s".into(),
        idempotency_key: idempotency_key.map(str::to_owned),
        digest: "d1".into(),
        input: b"hello".to_vec(),
        seed: vec![7; 32],
        accepted_at_ms: 100,
        number,
    }
}

async fn accept(store: &Store, turn: NewTurn) -> TurnKey {
    match store.accept_turn(turn).await.unwrap() {
        Acceptance::New(key) => key,
        Acceptance::Known(key) => panic!("{key:?} is known"),
    }
}

fn record(position: u64, shown: bool, body: &[u8]) -> Record {
    Record { position, call: 1, shown, body: body.to_vec() }
}

fn commit(key: TurnKey, turn: u64, idempotency_key: Option<&str>) -> TurnCommit {
    let idempotency_key = idempotency_key.map(str::to_owned);
    TurnCommit {
        agent: AGENT.into(),
        session: "s".into(),
        key: Some(key),
        turn,
        at_ms: 200,
        outcome: Some(Outcome { idempotency_key, body: b"answer".to_vec(), ..Default::default() }),
        ..Default::default()
    }
}

fn failure(key: TurnKey) -> TurnFailure {
    TurnFailure {
        key,
        agent: AGENT.into(),
        session: "s".into(),
        number: 1,
        at_ms: 300,
        error: b"why".to_vec(),
        keeps_key: false,
        logs: vec![LogEntry { at_ms: 1, level: "error".into(), message: "oh no".into() }],
        events: Vec::new(),
        token_use: None,
        usage: Vec::new(),
        timeline: b"[]".to_vec(),
    }
}

#[tokio::test]
async fn an_open_turn_and_its_journal_survive_reopening() {
    let folder = tempfile::tempdir().unwrap();
    let before = with_agent(&folder).await;
    let waits = accept(&before, message("waits", Some("k"), None)).await;
    let runs = accept(&before, message("runs", None, Some(1))).await;
    let records = vec![record(1, true, b"shown"), record(2, false, b"hidden")];
    before.append_records(runs, records.clone()).await.unwrap();
    before.close().await;

    let after = store(&folder).await;
    let open = after.open_turns().await.unwrap();
    assert_eq!(open.iter().map(|row| row.key).collect::<Vec<_>>(), [runs, waits]);
    assert_eq!(open.iter().map(|row| row.is_running).collect::<Vec<_>>(), [true, false]);
    let (runs_row, waits_row) =
        (after.turn_by_key(runs).await.unwrap().unwrap(), after.turn_by_key(waits).await.unwrap().unwrap());
    assert_eq!(runs_row.state, TurnState::Running { number: 1 });
    assert_eq!((waits_row.state, waits_row.idempotency_key.as_deref()), (TurnState::Waiting, Some("k")));
    assert_eq!((runs_row.input.as_slice(), runs_row.seed.len()), (&b"hello"[..], 32));
    assert_eq!(after.records(runs).await.unwrap(), records);
}

#[tokio::test]
async fn a_commit_finishes_its_turn_and_keeps_shown_records() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let key = accept(&store, message("t", Some("k"), None)).await;
    store.start_turn(key, 1, "d1".into()).await.unwrap();
    let records = vec![record(1, true, b"shown"), record(2, false, b"hidden")];
    store.append_records(key, records.clone()).await.unwrap();
    store.commit_turn(commit(key, 1, Some("k"))).await.unwrap();
    assert!(store.open_turns().await.unwrap().is_empty());
    assert_eq!(store.records(key).await.unwrap(), records[..1]);
    let row = store.turn(AGENT, "s", "t").await.unwrap().unwrap();
    assert_eq!(row.state, TurnState::Done { number: 1, outcome: b"answer".to_vec(), ended_at_ms: 200 });
    assert_eq!(store.turn_with_idempotency_key(AGENT, "s", "k").await.unwrap(), Some(row));
    assert!(store.turn(AGENT, "other", "t").await.unwrap().is_none());
}

#[tokio::test]
async fn an_idempotency_key_names_one_turn_until_that_turn_fails() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let key = accept(&store, message("one", Some("k"), None)).await;
    let again = store.accept_turn(message("two", Some("k"), None)).await.unwrap();
    assert_eq!(again, Acceptance::Known(key));
    accept(&store, message("three", Some("other"), None)).await;
    accept(&store, message("four", None, None)).await;
    accept(&store, message("five", None, None)).await;
    store.fail_turn(failure(key)).await.unwrap();
    let row = store.turn(AGENT, "s", "one").await.unwrap().unwrap();
    assert_eq!(row.state, TurnState::Failed { error: b"why".to_vec(), ended_at_ms: 300 });
    assert_eq!(store.logs(&LogFilter::of_agent(AGENT), None, 10).await.unwrap()[0].entry.message, "oh no");
    accept(&store, message("six", Some("k"), None)).await;
}

#[tokio::test]
async fn a_turn_finishes_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let key = accept(&store, message("t", None, Some(1))).await;
    store.commit_turn(commit(key, 1, None)).await.unwrap();
    assert!(matches!(store.fail_turn(failure(key)).await, Err(StoreError::TurnNotOpen { .. })));
    let again = store.commit_turn(commit(key, 2, None)).await;
    assert!(matches!(again, Err(StoreError::TurnNotOpen { .. })), "{again:?}");
    assert_eq!(store.session(AGENT, "s").await.unwrap().unwrap().row.turns, 1, "none of it was written");
    assert!(store.logs(&LogFilter::of_agent(AGENT), None, 10).await.unwrap().is_empty());
}

#[tokio::test]
async fn writes_of_one_group_do_not_fail_together() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let ended = accept(&store, message("ended", None, Some(1))).await;
    store.fail_turn(failure(ended)).await.unwrap();
    let writes = (0..64).map(|index| {
        let store = store.clone();
        tokio::spawn(async move {
            match index % 4 {
                0 => store.fail_turn(failure(ended)).await.is_err(),
                1 => {
                    let nobody = NewTurn { agent: "nobody".into(), ..message("lost", None, None) };
                    matches!(store.accept_turn(nobody).await, Err(StoreError::AgentMissing { .. }))
                }
                2 => {
                    let early = TurnCommit { turn: 9, key: None, ..commit(ended, 9, None) };
                    matches!(store.commit_turn(early).await, Err(StoreError::TurnConflict { .. }))
                }
                _ => store.accept_turn(message(&index.to_string(), None, None)).await.is_ok(),
            }
        })
    });
    for (index, write) in writes.collect::<Vec<_>>().into_iter().enumerate() {
        assert!(write.await.unwrap(), "write {index}");
    }
    assert_eq!(store.open_turns().await.unwrap().len(), 16);
}

#[tokio::test]
async fn an_oversized_record_is_refused_with_its_whole_append() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let key = accept(&store, message("t", None, Some(1))).await;
    let large = vec![record(1, true, b"small"), record(2, true, &vec![0; MAX_RECORD_BYTES + 1])];
    let refused = store.append_records(key, large).await;
    assert!(matches!(refused, Err(StoreError::RowTooLarge { .. })), "{refused:?}");
    assert!(store.records(key).await.unwrap().is_empty());
    store.append_records(key, vec![record(1, true, &vec![0; MAX_RECORD_BYTES])]).await.unwrap();
}

#[tokio::test]
async fn finished_turns_are_kept_up_to_a_number_and_age_and_open_turns_always() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let waits = accept(&store, message("waits", None, None)).await;
    for number in 1..=u64::from(TURNS_KEPT) * 2 {
        let key = accept(&store, message(&number.to_string(), None, Some(number))).await;
        store.append_records(key, vec![record(1, true, b"shown")]).await.unwrap();
        store.commit_turn(commit(key, number, None)).await.unwrap();
    }
    assert!(store.turn(AGENT, "s", &(TURNS_KEPT + 1).to_string()).await.unwrap().is_some());
    assert!(store.turn(AGENT, "s", &TURNS_KEPT.to_string()).await.unwrap().is_none());
    let records: i64 = crate::sql::query_scalar("SELECT count(*) FROM turn_records")
        .fetch_one(&store.readers)
        .await
        .unwrap();
    assert_eq!(records, i64::from(TURNS_KEPT));
    let later = accept(&store, NewTurn { session: "other".into(), ..message("later", None, None) }).await;
    let at_ms = 7 * 24 * 3600 * 1000;
    store.fail_turn(TurnFailure { session: "other".into(), at_ms, ..failure(later) }).await.unwrap();
    assert_eq!(store.forget_turns(at_ms).await.unwrap(), u64::from(TURNS_KEPT));
    let left: i64 =
        crate::sql::query_scalar("SELECT count(*) FROM turns").fetch_one(&store.readers).await.unwrap();
    assert_eq!(left, 2, "the waiting turn, and the one that just failed");
    assert_eq!(store.open_turns().await.unwrap()[0].key, waits);
}

#[tokio::test]
async fn deleting_a_session_removes_its_finished_turns_but_not_waiting_ones() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let done = accept(&store, message("done", None, Some(1))).await;
    store.commit_turn(commit(done, 1, None)).await.unwrap();
    accept(&store, message("waits", None, None)).await;
    assert!(store.delete_session(AGENT, "s").await.unwrap());
    assert!(store.turn(AGENT, "s", "done").await.unwrap().is_none());
    assert!(store.turn(AGENT, "s", "waits").await.unwrap().is_some());
    assert!(store.delete_agent(AGENT).await.unwrap());
    assert!(store.open_turns().await.unwrap().is_empty());
}

#[tokio::test]
async fn nothing_is_appended_to_the_journal_of_a_turn_that_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let store = with_agent(&folder).await;
    let key = accept(&store, message("t", Some("k"), Some(1))).await;
    store.append_records(key, vec![record(1, true, b"one"), record(2, false, b"two")]).await.unwrap();
    store.commit_turn(commit(key, 1, Some("k"))).await.unwrap();
    let late = store.append_records(key, vec![record(3, true, b"late")]).await;
    assert!(matches!(late, Err(StoreError::TurnNotOpen { .. })), "{late:?}");
    assert_eq!(store.records(key).await.unwrap().len(), 1, "only what was shown is kept");
}
