//! Tests of turns that wait together, which PostgreSQL writes by the same statements: each has the outcome that it would have
//! alone.

use crate::{host_tests::agent, *};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

const TURNS: u64 = 200;

async fn with_agent() -> Store {
    let store = Store::for_tests().await.unwrap();
    store.put_agent(&agent(), b"component", &[]).await.unwrap();
    store
}

/// Requests writes before any of them is made, and returns their results in order.
async fn together<F>(writes: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let writing: Vec<_> = writes.map(tokio::spawn).collect();
    let mut results = Vec::with_capacity(writing.len());
    for write in writing {
        results.push(write.await.unwrap());
    }
    results
}

fn message(number: u64) -> NewTurn {
    NewTurn {
        id: format!("t{number}"),
        agent: "a".into(),
        session: format!("s{number}"),
        idempotency_key: None,
        digest: "d".into(),
        input: b"hello".to_vec(),
        seed: vec![7; 32],
        accepted_at_ms: 100,
        number: Some(1),
    }
}

/// Accepts messages together, of which every tenth repeats an idempotency key, and checks the outcome of each.
async fn accept_all(store: &Store, first: u64, change: fn(u64, NewTurn) -> NewTurn) {
    let messages: Vec<NewTurn> = (first..first + TURNS)
        .map(|number| match number % 10 {
            0 => NewTurn {
                session: format!("same {first}"),
                idempotency_key: Some("key".into()),
                ..message(number)
            },
            _ => change(number, message(number)),
        })
        .collect();
    let accepted = together(messages.iter().cloned().map(|message| {
        let store = store.clone();
        async move { store.accept_turn(message).await }
    }))
    .await;
    let (mut new, mut known) = (Vec::new(), Vec::new());
    for (message, accepted) in messages.iter().zip(accepted) {
        let id = &message.id;
        if message.session.contains('\0') {
            let is_refused = matches!(accepted, Err(StoreError::Query { .. }));
            assert_eq!(is_refused, store.place() == DataPlace::Postgres, "{id}: {accepted:?}");
        } else if message.agent == "nobody" {
            assert!(matches!(accepted, Err(StoreError::AgentMissing { .. })), "{id}: {accepted:?}");
        } else {
            match (accepted.unwrap(), &message.idempotency_key) {
                (Acceptance::New(key), None) => {
                    assert_eq!(&store.turn_by_key(key).await.unwrap().unwrap().id, id);
                }
                (Acceptance::New(key), Some(_)) => new.push(key),
                (Acceptance::Known(key), Some(_)) => known.push(key),
                (Acceptance::Known(key), None) => panic!("{id} has no idempotency key, and is {key:?}"),
            }
        }
    }
    assert_eq!((new.len(), known.len()), (1, TURNS as usize / 10 - 1));
    assert!(known.iter().all(|key| *key == new[0]), "{new:?} {known:?}");
}

#[tokio::test]
async fn messages_that_wait_together_have_their_own_outcomes() {
    let store = with_agent().await;
    accept_all(&store, 0, |_, message| message).await;
    accept_all(&store, TURNS, |number, message| match number % 10 {
        1 => NewTurn { agent: "nobody".into(), ..message },
        2 => NewTurn { session: format!("s{number}\0"), ..message },
        _ => message,
    })
    .await;
    assert_eq!(store.writer.retries(), 0);
}

fn record(position: u64, shown: bool) -> Record {
    Record { position, call: 1, shown, body: vec![7; 3] }
}

fn line(turn: u64, position: u64) -> LogEntry {
    LogEntry { at_ms: turn, level: "info".into(), message: format!("{turn}.{position}") }
}

fn commit(key: TurnKey, session: &str, turn: u64) -> TurnCommit {
    let counts = UsageCounts { requests: 1, ..UsageCounts::default() };
    TurnCommit {
        agent: "a".into(),
        session: session.into(),
        key: Some(key),
        turn,
        at_ms: 200,
        state: vec![
            StateChange { key: "turn".into(), value: Some(b"early".to_vec()) },
            StateChange { key: "gone".into(), value: None },
            StateChange { key: "turn".into(), value: Some(turn.to_string().into_bytes()) },
        ],
        conversations: vec![ConversationRow { name: "main".into(), body: vec![1], ..Default::default() }],
        logs: vec![line(turn, 1), line(turn, 2)],
        outcome: Some(Outcome {
            idempotency_key: Some(format!("k{turn}")),
            body: b"answer".to_vec(),
            ..Default::default()
        }),
        token_use: Some(TokenUse { day: 7, tenant: "acme".into(), agent: Some("a".into()), tokens: 1 }),
        usage: vec![UsageRow {
            day: 7,
            tenant: "acme".into(),
            agent: Some("a".into()),
            session: Some(session.into()),
            model: "m".into(),
            counts,
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// The results of an append and of the commit of the same turn.
type Ended = (TurnKey, Result<(), StoreError>, Result<(), StoreError>);

/// Runs a turn of a session. Its records and its commit are requested without waiting in between. If turns are
/// `odd`, every tenth is not the next one of its session, and every tenth has failed before.
async fn run(store: Store, number: u64, turn: u64, odd: bool) -> Ended {
    let session = format!("s{number}");
    let message = NewTurn { id: format!("{number} {turn}"), number: Some(turn), ..message(number) };
    let Acceptance::New(key) = store.accept_turn(message).await.unwrap() else { panic!("it is known") };
    let mut commit = commit(key, &session, turn);
    match number % 10 {
        0 if odd => commit.turn = 9,
        1 if odd => store.fail_turn(failure(key, &session, turn)).await.unwrap(),
        _ => {}
    }
    let records = vec![record(1, true), record(2, false)];
    let (appended, committed) = tokio::join!(store.append_records(key, records), store.commit_turn(commit));
    (key, appended, committed)
}

fn failure(key: TurnKey, session: &str, number: u64) -> TurnFailure {
    TurnFailure {
        key,
        agent: "a".into(),
        session: session.into(),
        number,
        at_ms: 300,
        error: b"why".to_vec(),
        keeps_key: false,
        logs: Vec::new(),
        events: Vec::new(),
        token_use: None,
        usage: Vec::new(),
        timeline: b"[]".to_vec(),
    }
}

#[tokio::test]
async fn records_and_commits_that_wait_together_are_written_once_and_in_order() {
    const SESSIONS: u64 = 60;
    let store = with_agent().await;
    for turn in 1..=4 {
        let odd = turn == 4;
        let ended = together((0..SESSIONS).map(|number| run(store.clone(), number, turn, odd))).await;
        for (number, (key, appended, committed)) in (0..SESSIONS).zip(ended) {
            match number % 10 {
                0 if odd => {
                    appended.unwrap();
                    assert!(matches!(committed, Err(StoreError::TurnConflict { .. })), "{committed:?}");
                }
                1 if odd => {
                    assert!(matches!(appended, Err(StoreError::TurnNotOpen { .. })), "{appended:?}");
                    assert!(matches!(committed, Err(StoreError::TurnNotOpen { .. })), "{committed:?}");
                }
                _ => {
                    appended.unwrap();
                    committed.unwrap();
                    assert_eq!(store.records(key).await.unwrap(), [record(1, true)]);
                }
            }
        }
    }
    let mut turns = 0;
    for number in 0..SESSIONS {
        let session = format!("s{number}");
        let stored = store.session("a", &session).await.unwrap().unwrap();
        let last = if number % 10 < 2 { 3 } else { 4 };
        assert_eq!(stored.row.turns, last, "{session}");
        assert_eq!(stored.state, [("turn".to_owned(), last.to_string().into_bytes())]);
        assert_eq!(stored.conversations.len(), 1);
        let filter = LogFilter { session: Some(session), ..LogFilter::of_agent("a") };
        let lines = store.logs(&filter, None, 100).await.unwrap();
        let expected: Vec<LogEntry> = (1..=last).flat_map(|turn| [line(turn, 1), line(turn, 2)]).collect();
        assert_eq!(lines.into_iter().map(|line| line.entry).collect::<Vec<_>>(), expected);
        turns += last;
    }
    let tokens: u64 = store.token_use(7).await.unwrap().iter().map(|used| used.tokens).sum();
    let all = UsageFilter { tenant: None, first_day: 0, last_day: 9 };
    let usage = store.usage(&all, UsageBy::Session, 999).await.unwrap();
    let requests: u64 = usage.iter().map(|sum| sum.counts.requests).sum();
    assert_eq!((tokens, requests, usage.len() as u64), (turns, turns, SESSIONS));
    assert_eq!(store.writer.retries(), 0);
}

/// Counts how often the writer begins a transaction and makes a write.
fn counted(store: &Store) -> (Arc<AtomicU64>, Arc<AtomicU64>) {
    let (transactions, writes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counters = (transactions.clone(), writes.clone());
    store.faults().choose(move |moment| {
        match moment {
            Moment::Begin => _ = transactions.fetch_add(1, Ordering::Relaxed),
            Moment::Write => _ = writes.fetch_add(1, Ordering::Relaxed),
            Moment::Commit | Moment::Committed => {}
        }
        None
    });
    counters
}

#[tokio::test]
async fn a_refusal_does_not_repeat_the_writes_beside_it() {
    const TURNS: u64 = 100;
    let store = with_agent().await;
    let accepted = together((0..TURNS).map(|number| {
        let store = store.clone();
        async move { store.accept_turn(message(number)).await.unwrap() }
    }));
    let keys: Vec<TurnKey> = accepted
        .await
        .into_iter()
        .map(|accepted| match accepted {
            Acceptance::New(key) => key,
            Acceptance::Known(key) => panic!("{key:?} is known"),
        })
        .collect();
    for number in (1..TURNS).step_by(10) {
        let failure = failure(keys[number as usize], &format!("s{number}"), 1);
        store.fail_turn(failure).await.unwrap();
    }
    for turn in 1..=2 {
        let (transactions, writes) = counted(&store);
        let ended = together((0..TURNS).map(|number| {
            let (store, key) = (store.clone(), keys[number as usize]);
            async move {
                if turn == 2 && number % 10 > 2 {
                    let second =
                        NewTurn { id: format!("second {number}"), number: Some(2), ..message(number) };
                    let Acceptance::New(key) = store.accept_turn(second).await.unwrap() else { panic!() };
                    return store.commit_turn(commit(key, &format!("s{number}"), 2)).await;
                }
                let mut commit = commit(key, &format!("s{number}"), 1);
                match number % 10 {
                    0 => commit.turn = 9,
                    2 => commit.agent = "nobody".into(),
                    _ => {}
                }
                store.commit_turn(commit).await
            }
        }))
        .await;
        for (number, ended) in (0..TURNS).zip(ended) {
            match number % 10 {
                0 => assert!(matches!(ended, Err(StoreError::TurnConflict { .. })), "{number}: {ended:?}"),
                1 => assert!(matches!(ended, Err(StoreError::TurnNotOpen { .. })), "{number}: {ended:?}"),
                2 => assert!(matches!(ended, Err(StoreError::AgentMissing { .. })), "{number}: {ended:?}"),
                _ => ended.unwrap(),
            }
        }
        let (transactions, writes) = (transactions.load(Ordering::Relaxed), writes.load(Ordering::Relaxed));
        let expected = if turn == 1 { TURNS } else { TURNS + 70 };
        assert_eq!(writes, expected, "each write was made once");
        assert!(transactions < TURNS, "{transactions} transactions for {writes} writes");
    }
    store.faults().end();
    for number in 0..TURNS {
        let session = store.session("a", &format!("s{number}")).await.unwrap();
        let turns = session.map_or(0, |session| session.row.turns);
        assert_eq!(turns, if number % 10 > 2 { 2 } else { 0 }, "session {number}");
    }
    assert_eq!(store.turn_by_key(keys[0]).await.unwrap().map(|row| row.is_open()), Some(true));
    let tokens: u64 = store.token_use(7).await.unwrap().iter().map(|used| used.tokens).sum();
    assert_eq!(tokens, 140, "nothing of the others was counted");
    assert_eq!(store.writer.retries(), 0);
}

#[tokio::test]
async fn records_of_a_turn_that_has_ended_are_refused_beside_others() {
    let store = with_agent().await;
    let mut keys = Vec::new();
    for number in 0..20 {
        let Acceptance::New(key) = store.accept_turn(message(number)).await.unwrap() else { panic!() };
        keys.push(key);
        if number % 2 == 0 {
            store.fail_turn(failure(key, &format!("s{number}"), 1)).await.unwrap();
        }
    }
    let (_, writes) = counted(&store);
    let appended = together(keys.iter().map(|key| {
        let (store, key) = (store.clone(), *key);
        async move { store.append_records(key, vec![record(1, true)]).await }
    }))
    .await;
    for (number, appended) in appended.into_iter().enumerate() {
        match number % 2 {
            0 => assert!(matches!(appended, Err(StoreError::TurnNotOpen { .. })), "{appended:?}"),
            _ => appended.unwrap(),
        }
        let records = store.records(keys[number]).await.unwrap();
        assert_eq!(records.len(), number % 2);
    }
    assert_eq!(writes.load(Ordering::Relaxed), 20, "each write was made once");
}
