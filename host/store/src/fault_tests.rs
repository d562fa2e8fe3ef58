//! Tests with a database whose statements and commits fail, are slow, or succeed without reporting it:
//! acknowledged writes exist, refused writes do not, and writes with an unknown outcome exist completely or
//! not at all.

use crate::*;
use std::time::Duration;

const AGENT: &str = "a";
/// Number of keys of the session that is copied: more than fit into one chunk.
const KEYS: usize = 700;
const OPERATIONS: u64 = 48;

/// A deterministic random number generator.
#[derive(Clone)]
struct Numbers(u64);

impl Numbers {
    /// Draws the next number of SplitMix64, by Steele, Lea and Flood.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The outcome that was reported to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reported {
    Done,
    Refused,
    Unknown,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Commit,
    Accept,
    Publish,
    Fork,
    Import,
    Delete,
    Batch,
}

const ALL: [Operation; 7] = [
    Operation::Commit,
    Operation::Accept,
    Operation::Publish,
    Operation::Fork,
    Operation::Import,
    Operation::Delete,
    Operation::Batch,
];

fn session(number: u64) -> String {
    format!("s{number}")
}

fn commit(number: u64, keys: usize) -> TurnCommit {
    let id = session(number);
    let state = (0..keys).map(|key| StateChange { key: format!("{key:05}"), value: Some(vec![1]) });
    TurnCommit {
        agent: AGENT.into(),
        session: id.clone(),
        turn: 1,
        at_ms: 1,
        state: state.collect(),
        conversations: vec![ConversationRow {
            name: "main".into(),
            body: vec![2],
            ..ConversationRow::default()
        }],
        logs: vec![LogEntry { at_ms: 1, level: "info".into(), message: id.clone() }],
        outcome: Some(Outcome { idempotency_key: Some("k".into()), body: vec![3], ..Default::default() }),
        events: vec![event(&format!("of {id}"), &id)],
        ..Default::default()
    }
}

fn event(id: &str, session: &str) -> NewEvent {
    let target = Target::Session { agent: AGENT.into(), session: session.into() };
    NewEvent {
        source: "shop".into(),
        id: id.into(),
        topic: "t".into(),
        data: None,
        principal: "p".into(),
        hops: 0,
        at_ms: 1,
        deliveries: vec![NewDelivery { target, undeliverable: None }; 2],
    }
}

async fn ask(store: &Store, number: u64, operation: Operation) -> Result<(), StoreError> {
    match operation {
        Operation::Commit => store.commit_turn(commit(number, 3)).await,
        Operation::Accept => {
            let turn = NewTurn {
                id: session(number),
                agent: AGENT.into(),
                session: session(number),
                idempotency_key: Some("k".into()),
                digest: "d".into(),
                input: vec![4],
                seed: vec![5],
                accepted_at_ms: 1,
                number: None,
            };
            store.accept_turn(turn).await.map(drop)
        }
        Operation::Publish => store.publish(&event(&session(number), "s"), 1).await.map(drop),
        Operation::Fork => store.fork_session(AGENT, "base", &session(number), 1).await.map(drop),
        Operation::Import => {
            let row = SessionRow { session: session(number), turns: 9, created_at_ms: 1, updated_at_ms: 1 };
            let state = (0..KEYS).map(|key| (format!("{key:05}"), vec![6])).collect();
            let snapshot = SessionSnapshot { row, state, conversations: Vec::new() };
            store.import_session(AGENT, snapshot, Existing::Refuse).await.map(drop)
        }
        // The session was created before faults were enabled.
        Operation::Delete => store.delete_session(AGENT, &session(number)).await.map(drop),
        Operation::Batch => {
            let item = NewItem { request: b"{}".to_vec(), reference: None };
            let (id, principal, model) = (session(number), "p".into(), "m".into());
            let batch = NewBatch {
                id,
                principal,
                model,
                at_ms: 1,
                items: vec![item; KEYS],
                terms: BatchTerms::default(),
            };
            store
                .queue_batch(batch, BatchRoom { bytes: 1 << 30, batches: 1_000, share: None }, None)
                .await
                .map(drop)
        }
    }
}

/// Returns whether the operation was done. Panics if it was done in part.
async fn is_done(store: &Store, number: u64, operation: Operation) -> bool {
    let id = session(number);
    let found = store.session(AGENT, &id).await.unwrap();
    let keys = found.as_ref().map(|session| session.state.len());
    let lines = LogFilter { session: Some(id.clone()), ..Default::default() };
    let lines = store.logs(&lines, None, 10).await.unwrap().len();
    let outcome = store.outcome(AGENT, &id, "k").await.unwrap().is_some();
    let events = store.events(None, 1_000).await.unwrap();
    let deliveries = |id: String| events.iter().find(|event| event.id == id).map(|event| event.pending);
    let whole_commit = |keys: Option<usize>, wanted: usize, deliveries: Option<u32>| {
        let seen = (keys, lines, outcome, deliveries.unwrap_or(0));
        match keys {
            Some(_) => assert_eq!(seen, (Some(wanted), 1, true, 2), "{id}"),
            None => assert_eq!(seen, (None, 0, false, 0), "{id}"),
        }
        keys.is_some()
    };
    match operation {
        Operation::Commit => whole_commit(keys, 3, deliveries(format!("of {id}"))),
        Operation::Delete => !whole_commit(keys, KEYS, deliveries(format!("of {id}"))),
        Operation::Accept => store.turn(AGENT, &id, &id).await.unwrap().is_some(),
        Operation::Publish => match deliveries(id) {
            Some(pending) => {
                assert_eq!(pending, 2);
                true
            }
            None => false,
        },
        Operation::Fork | Operation::Import => {
            assert!(keys.is_none_or(|keys| keys == KEYS), "{id} has {keys:?}");
            keys.is_some()
        }
        Operation::Batch => match store.batch(&id).await.unwrap() {
            Some(batch) => {
                assert_eq!(batch.items.total(), KEYS as u64);
                true
            }
            None => false,
        },
    }
}

fn fault(moment: Moment, numbers: &mut Numbers) -> Option<Fault> {
    let code = [5, 10, 13][numbers.below(3) as usize];
    match (moment, numbers.below(100)) {
        (Moment::Begin, 0..4) => Some(Fault::Fails(5)),
        (Moment::Write, 0..6) => Some(Fault::Fails(code)),
        (Moment::Write, 6..16) => Some(Fault::Interrupted(1 + numbers.below(400) as i32)),
        (Moment::Commit, 0..8) => Some(Fault::Fails(code)),
        (Moment::Committed, 0..8) => Some(Fault::Fails(code)),
        (_, 96..98) => Some(Fault::Slow(Duration::from_millis(1))),
        _ => None,
    }
}

/// Runs all operations. Returns what was reported for each of them, and whether it was done.
async fn run(seed: u64) -> Vec<(Operation, Reported, bool)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("skep.db");
    let mut store = Store::open(&path, Durability::Process).await.unwrap();
    store.chunk_time = Duration::ZERO;
    let agent = AgentRow {
        name: AGENT.into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
    store
        .commit_turn(TurnCommit { session: "base".into(), events: vec![], ..commit(0, KEYS) })
        .await
        .unwrap();
    let mut numbers = Numbers(seed);
    let operations: Vec<Operation> =
        (0..OPERATIONS).map(|_| ALL[numbers.below(ALL.len() as u64) as usize]).collect();
    for (number, operation) in (0..).zip(&operations) {
        if let Operation::Delete = operation {
            store.commit_turn(commit(number, KEYS)).await.unwrap();
        }
    }

    let mut of_faults = numbers.clone();
    store.faults().choose(move |moment| fault(moment, &mut of_faults));
    let mut reported = Vec::new();
    // Run some concurrently, so that they share transactions.
    for some in (0..).zip(operations.iter().copied()).collect::<Vec<_>>().chunks(8) {
        let asked: Vec<_> = some
            .iter()
            .map(|(number, operation)| {
                let (store, number, operation) = (store.clone(), *number, *operation);
                tokio::spawn(async move { ask(&store, number, operation).await })
            })
            .collect();
        for asked in asked {
            reported.push(match asked.await.unwrap() {
                Ok(()) => Reported::Done,
                Err(StoreError::Unconfirmed { .. }) => Reported::Unknown,
                Err(_) => Reported::Refused,
            });
        }
    }

    store.faults().end();
    store.check().await.expect("it works again without being reopened");
    store.close().await;
    let store = Store::open(&path, Durability::Process).await.unwrap();
    store.tidy().await.unwrap();
    let mut seen = Vec::new();
    for ((number, operation), reported) in (0..).zip(operations).zip(reported) {
        seen.push((operation, reported, is_done(&store, number, operation).await));
    }
    let left: i64 = crate::sql::query_scalar(
        "SELECT (SELECT COUNT(*) FROM erasures) + (SELECT COUNT(*) FROM sessions WHERE session IS NULL)
             + (SELECT COUNT(*) FROM batches WHERE NOT complete)",
    )
    .fetch_one(&store.readers)
    .await
    .unwrap();
    assert_eq!(left, 0, "seed {seed} leaves invisible rows");
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_writes_exist_and_refused_ones_do_not() {
    let mut counts = [0; 3];
    for seed in 0..12 {
        for (number, (operation, reported, is_done)) in run(seed).await.into_iter().enumerate() {
            counts[reported as usize] += 1;
            match reported {
                Reported::Done => {
                    assert!(is_done, "seed {seed}: {operation:?} {number} was acknowledged but is lost")
                }
                // A deletion that failed after it started is completed later.
                Reported::Refused => assert!(
                    !is_done || matches!(operation, Operation::Delete),
                    "seed {seed}: {operation:?} {number} was refused but exists"
                ),
                Reported::Unknown => {}
            }
        }
    }
    assert!(counts.iter().all(|count| *count >= 10), "done, refused and unknown: {counts:?}");
}

#[tokio::test]
async fn a_slow_commit_delays_other_writes_without_failing_them() {
    let store = Store::for_tests().await.unwrap();
    let agent = AgentRow {
        name: AGENT.into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "ann".into(),
    };
    store.put_agent(&agent, b"component", &[]).await.unwrap();
    let mut slow = 1;
    store.faults().choose(move |moment| {
        let is_slow = moment == Moment::Commit && slow > 0;
        slow -= i32::from(is_slow);
        is_slow.then_some(Fault::Slow(Duration::from_millis(300)))
    });
    let commits = (0..50).map(|number| {
        let store = store.clone();
        tokio::spawn(async move { store.commit_turn(commit(number, 1)).await })
    });
    for commit in commits.collect::<Vec<_>>() {
        commit.await.unwrap().expect("it waits");
    }
    assert!(store.longest_hold() >= Duration::from_millis(300));
}
