//! Tests of copies and deletions that run beside the turns of others, and that crash between two chunks.
use crate::sql::query_scalar;

use crate::*;
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const AGENT: &str = "a";
/// Maximum number of keys that one turn changes.
const PER_TURN: usize = 30_000;

async fn open(folder: &Path) -> Store {
    Store::open_for_tests(&folder.join("skep.db")).await.unwrap()
}

/// Creates the agent, and a session with `keys` keys, three conversations, an outcome, a log line, a
/// schedule, a delivery and a finished turn.
async fn with_session(folder: &Path, keys: usize) -> Store {
    let store = open(folder).await;
    let agent = AgentRow {
        name: AGENT.into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
    let turn = NewTurn {
        id: "t".into(),
        agent: AGENT.into(),
        session: "s".into(),
        idempotency_key: None,
        digest: "d".into(),
        input: Vec::new(),
        seed: Vec::new(),
        accepted_at_ms: 1,
        number: Some(1),
    };
    let Acceptance::New(key) = store.accept_turn(turn).await.unwrap() else { panic!("it is new") };
    let target = Target::Session { agent: AGENT.into(), session: "s".into() };
    let event = NewEvent {
        source: "shop".into(),
        id: "1".into(),
        topic: "t".into(),
        data: None,
        principal: "p".into(),
        hops: 0,
        at_ms: 1,
        deliveries: vec![NewDelivery { target, undeliverable: None }],
    };
    let schedule = NewSchedule {
        id: "wake".into(),
        name: "wake".into(),
        target: "s".into(),
        principal: "p".into(),
        timing: String::new(),
        repeats: false,
        data: None,
        tries: 1,
        due_ms: 5,
    };
    let conversation = |name: &str| ConversationRow {
        name: name.into(),
        body: name.repeat(100).into_bytes(),
        ..ConversationRow::default()
    };
    store
        .commit_turn(TurnCommit {
            agent: AGENT.into(),
            session: "s".into(),
            key: Some(key),
            turn: 1,
            at_ms: 7,
            state: changes(0..keys.min(PER_TURN)),
            conversations: ["main", "second", "third"].map(conversation).to_vec(),
            logs: vec![LogEntry { at_ms: 1, level: "info".into(), message: "hello".into() }],
            outcome: Some(Outcome {
                idempotency_key: Some("k".into()),
                body: b"answer".to_vec(),
                ..Default::default()
            }),
            events: vec![event],
            schedules: vec![ScheduleChange::Set(schedule)],
            ..Default::default()
        })
        .await
        .unwrap();
    for (turn, first) in (2..).zip((PER_TURN..keys).step_by(PER_TURN)) {
        let state = changes(first..keys.min(first + PER_TURN));
        let (agent, session) = (AGENT.into(), "s".into());
        let more = TurnCommit { agent, session, turn, at_ms: 7, state, ..Default::default() };
        store.commit_turn(more).await.unwrap();
    }
    store
}

fn changes(keys: std::ops::Range<usize>) -> Vec<StateChange> {
    let set = |index: usize| StateChange {
        key: format!("key {index:07}"),
        value: Some(index.to_le_bytes().to_vec()),
    };
    keys.map(set).collect()
}

fn turn(session: &str, turn: u64) -> TurnCommit {
    let set = StateChange { key: "n".into(), value: Some(turn.to_le_bytes().to_vec()) };
    TurnCommit {
        agent: AGENT.into(),
        session: session.into(),
        turn,
        at_ms: turn,
        state: vec![set],
        ..Default::default()
    }
}

/// Commits turns of another session while `work` runs. Returns their number and the longest wait among them.
async fn beside<T>(
    store: &Store,
    session: &'static str,
    work: impl Future<Output = T>,
) -> (T, u64, Duration) {
    let (is_running, longest_us) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    let others = {
        let (store, is_running, longest_us) = (store.clone(), is_running.clone(), longest_us.clone());
        tokio::spawn(async move {
            let mut turns = 0;
            while is_running.load(Ordering::Relaxed) {
                let asked = Instant::now();
                store.commit_turn(turn(session, turns + 1)).await.expect("the commit of another session");
                longest_us.fetch_max(asked.elapsed().as_micros() as u64, Ordering::Relaxed);
                turns += 1;
            }
            turns
        })
    };
    let result = work.await;
    is_running.store(false, Ordering::Relaxed);
    let turns = others.await.unwrap();
    (result, turns, Duration::from_micros(longest_us.load(Ordering::Relaxed)))
}

/// Copies, imports and deletes the session of a store, which has `keys` keys, and checks the results. Returns the measurements.
async fn copied_and_deleted_beside_others(store: Store, keys: usize) -> Vec<(&'static str, u64, Duration)> {
    let source = store.session(AGENT, "s").await.unwrap().unwrap();
    assert_eq!(source.state.len(), keys);

    let (fork, turns, waited) = beside(&store, "x", store.fork_session(AGENT, "s", "copy", 9)).await;
    assert!(matches!(fork, Ok(Fork::Done(_))), "{fork:?}");
    let mut seen = vec![("fork", turns, waited)];
    let copy = store.session(AGENT, "copy").await.unwrap().unwrap();
    assert_eq!((copy.state, &copy.conversations), (source.state.clone(), &source.conversations));

    let mut exported = source.clone();
    exported.row.session = "copy".into();
    exported.row.turns = 5;
    let import = store.import_session(AGENT, exported.clone(), Existing::Replace);
    let (imported, turns, waited) = beside(&store, "y", import).await;
    assert!(imported.unwrap());
    seen.push(("import", turns, waited));
    assert_eq!(store.session(AGENT, "copy").await.unwrap(), Some(exported));

    let (deleted, turns, waited) = beside(&store, "z", store.delete_session(AGENT, "s")).await;
    assert!(deleted.unwrap());
    seen.push(("delete", turns, waited));
    let (deleted, turns, waited) = beside(&store, "v", store.delete_session(AGENT, "copy")).await;
    assert!(deleted.unwrap());
    seen.push(("delete", turns, waited));
    assert_eq!(leftovers(&store).await, (4, 0), "the four other sessions have a key each");
    println!("{keys} keys; the longest transaction: {:?}", store.longest_hold());
    seen
}

/// Counts the keys of all sessions, and the rows of invisible sessions.
async fn leftovers(store: &Store) -> (i64, i64) {
    let count = async |sql: &'static str| -> i64 {
        query_scalar(sql).fetch_one(&store.readers).await.expect("a count")
    };
    let hidden =
        "SELECT (SELECT COUNT(*) FROM erasures) + (SELECT COUNT(*) FROM sessions WHERE session IS NULL)";
    (count("SELECT COUNT(*) FROM state").await, count(hidden).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_are_committed_while_a_large_session_is_copied_and_deleted() {
    const KEYS: usize = 20_000;
    let folder = tempfile::tempdir().unwrap();
    let store = with_session(folder.path(), KEYS).await.in_small_chunks();
    // However fast the database is, each transaction takes long enough for another turn to ask for the next one.
    let slow = |moment| (moment == Moment::Commit).then_some(Fault::Slow(Duration::from_millis(2)));
    store.faults().choose(slow);
    for (what, turns, _) in copied_and_deleted_beside_others(store, KEYS).await {
        assert!(turns >= 5, "{what}: {turns} commits of another session came between the chunks");
    }
}

/// Prints measurements: `cargo test -p skep-store figures -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints measurements"]
async fn figures_of_a_session_with_a_hundred_thousand_keys() {
    const KEYS: usize = 100_000;
    let folder = tempfile::tempdir().unwrap();
    let store = with_session(folder.path(), KEYS).await;
    for (what, turns, waited) in copied_and_deleted_beside_others(store, KEYS).await {
        println!("{what}: {turns} commits of another session, the longest waited {waited:?}");
    }
}

/// Everything that can be observed of a session.
type Seen = (Option<SessionSnapshot>, Option<KeptOutcome>, usize, usize, usize);

async fn seen(store: &Store, session: &str) -> Seen {
    let of_session = LogFilter { session: Some(session.into()), ..Default::default() };
    let logs = store.logs(&of_session, None, 100);
    (
        store.session(AGENT, session).await.unwrap(),
        store.outcome(AGENT, session, "k").await.unwrap(),
        logs.await.unwrap().len(),
        store.schedules_of(AGENT, session).await.unwrap().len(),
        store.due_deliveries(1_000, 100).await.unwrap().len(),
    )
}

/// Crashes the store before its transaction number 0, 1, 2 … of an operation, until the operation needs no
/// more transactions. Inspects `session` after each crash. Returns the number of crashes.
async fn crashed_everywhere(
    session: &str,
    operation: impl AsyncFn(&Store) -> Result<(), StoreError>,
    check: impl Fn(Seen, bool),
) -> u64 {
    for crash_at in 0.. {
        let folder = tempfile::tempdir().unwrap();
        // Every statement is a chunk.
        let store = with_session(folder.path(), 1_200).await.in_small_chunks();
        let mut transactions = 0;
        store.faults().choose(move |moment| {
            transactions += u64::from(moment == Moment::Begin);
            (transactions > crash_at).then_some(Fault::Fails(10))
        });
        let result = operation(&store).await;
        drop(store);
        let store = open(folder.path()).await;
        store.tidy().await.expect("tidying succeeds");
        let seen = seen(&store, session).await;
        let keys = store.session(AGENT, "s").await.unwrap().map_or(0, |session| session.state.len());
        let of_copy = match session {
            "s" => 0,
            other => store.session(AGENT, other).await.unwrap().map_or(0, |session| session.state.len()),
        };
        assert_eq!(leftovers(&store).await, ((keys + of_copy) as i64, 0), "crash {crash_at} leaves rows");
        check(seen, result.is_ok());
        if result.is_ok() {
            return crash_at;
        }
    }
    unreachable!("the loop ends when the operation succeeds")
}

#[tokio::test]
async fn a_copy_cut_off_by_a_crash_does_not_exist() {
    let crashes = crashed_everywhere(
        "copy",
        async |store| match store.fork_session(AGENT, "s", "copy", 9).await? {
            Fork::Done(_) => Ok(()),
            other => panic!("{other:?}"),
        },
        |(copy, ..), is_done| {
            assert_eq!(copy.map(|copy| copy.state.len()), is_done.then_some(1_200));
        },
    )
    .await;
    assert!(crashes >= 3, "a copy of {crashes} transactions has no middle");
}

#[tokio::test]
async fn an_import_cut_off_by_a_crash_replaces_all_or_nothing() {
    let crashes = crashed_everywhere(
        "s",
        async |store| {
            let mut exported = store.session(AGENT, "s").await?.unwrap();
            exported.row.turns = 77;
            exported.conversations.truncate(1);
            assert!(store.import_session(AGENT, exported, Existing::Replace).await?);
            Ok(())
        },
        |(session, outcome, logs, schedules, deliveries), is_done| {
            let session = session.expect("one of the two is there");
            let is_new = session.row.turns == 77;
            assert!(is_new || !is_done);
            assert_eq!(
                (session.state.len(), session.conversations.len()),
                (1_200, if is_new { 1 } else { 3 })
            );
            let rest = (outcome.is_some(), logs, schedules, deliveries);
            assert_eq!(rest, if is_new { (false, 0, 0, 0) } else { (true, 1, 1, 1) });
        },
    )
    .await;
    // Once the copy has the name, it exists, whatever happens to the session that had the name before.
    assert!(crashes >= 3, "a copy of {crashes} transactions has no middle");
}

#[tokio::test]
async fn a_deletion_cut_off_by_a_crash_completes_or_never_started() {
    let crashes = crashed_everywhere(
        "s",
        async |store| {
            assert!(store.delete_session(AGENT, "s").await?);
            Ok(())
        },
        |(session, outcome, logs, schedules, deliveries), is_done| {
            let is_there = session.is_some();
            assert!(!(is_there && is_done));
            let rest = (outcome.is_some(), logs, schedules, deliveries);
            assert_eq!(rest, if is_there { (true, 1, 1, 1) } else { (false, 0, 0, 0) });
        },
    )
    .await;
    assert!(crashes >= 8, "{crashes}");
}

#[tokio::test]
async fn an_agent_whose_deletion_was_interrupted_is_deleted_and_can_be_redeployed() {
    for crash_at in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let store = with_session(folder.path(), 600).await.in_small_chunks();
        let mut transactions = 0;
        store.faults().choose(move |moment| {
            transactions += u64::from(moment == Moment::Begin);
            (transactions > crash_at).then_some(Fault::Fails(10))
        });
        let is_done = store.delete_agent(AGENT).await.is_ok();
        drop(store);
        let store = open(folder.path()).await;
        if crash_at == 0 {
            assert_eq!(store.agents().await.unwrap().len(), 1, "the deletion never started");
            continue;
        }
        assert!(store.agents().await.unwrap().is_empty() && store.versions(AGENT).await.unwrap().is_empty());
        let agent = AgentRow {
            name: AGENT.into(),
            manifest: String::new(),
            digest: "e".into(),
            deployed_at_ms: 1,
            deployed_by: "ann".into(),
        };
        assert_eq!(store.put_agent(&agent, b"other", &[]).await.unwrap(), 1, "its first version");
        assert_eq!(seen(&store, "s").await, (None, None, 0, 0, 0));
        assert_eq!(leftovers(&store).await, (0, 0));
        assert!(matches!(store.component("d").await, Err(StoreError::ComponentMissing { .. })));
        if is_done {
            assert!(crash_at >= 8, "{crash_at}");
            return;
        }
    }
}

#[tokio::test]
async fn a_batch_cut_off_by_a_crash_does_not_exist_and_uses_no_space() {
    let room = BatchRoom { bytes: 1 << 20, batches: 1, share: None };
    for crash_at in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path()).await;
        let mut transactions = 0;
        store.faults().choose(move |moment| {
            transactions += u64::from(moment == Moment::Begin);
            (transactions > crash_at).then_some(Fault::Fails(10))
        });
        let item = NewItem { request: b"{}".to_vec(), reference: None };
        let batch = NewBatch {
            id: "b".into(),
            principal: "p".into(),
            model: "m".into(),
            at_ms: 1,
            items: vec![item; 1_100],
            terms: BatchTerms::default(),
        };
        let queued = store.queue_batch(batch.clone(), room, None).await;
        drop(store);
        let store = open(folder.path()).await;
        let is_there = store.batch("b").await.unwrap().is_some();
        assert_eq!(is_there, queued.is_ok(), "crash {crash_at}");
        let taken = store.take_item(&["m".into()], &[], 5).await.unwrap();
        assert_eq!(matches!(taken, Take::Item(_)), is_there, "items of an incomplete batch are never taken");
        store.tidy().await.unwrap();
        if queued.is_ok() {
            assert!(crash_at >= 4, "{crash_at}");
            assert_eq!(store.batch("b").await.unwrap().unwrap().items.total(), 1_100);
            return;
        }
        assert_eq!(store.queue_batch(batch, room, None).await.unwrap(), Queued::New);
    }
}
