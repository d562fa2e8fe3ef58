//! Tests of the transitions that need no guest.

use super::{Ended, Run, State, failing::Failing, opening::Opening, resuming::Resuming};
use crate::{
    AgentHost, HostParts, Invocation, Outcome, RunEvent, RuntimeError, RuntimeOptions,
    cluster::Owned,
    event::turn_events::TurnEnding,
    feed::{Feed, Hold, Live, TurnEnd},
    name::SessionKey,
    session::{Accepted, Input, Registration, Settlement, StoredFailure, StoredState, actor::Actor},
    tests::fixture::{invocation, tiny_engine},
};
use skep_engine::ModelSet;
use skep_store::{
    Acceptance, AgentRow, NewTurn, Outcome as StoredOutcome, Record, Store, TurnCommit, TurnKey, TurnRow,
    TurnState,
};
use std::{
    sync::{Arc, Weak},
    time::Instant,
};
use tokio::sync::watch;

const TURN: &str = "t1";

/// The actor of a session whose agent is stored, but cannot be called.
struct Stage {
    host: AgentHost,
    actor: Actor,
    end: TurnEnd,
    live: Arc<Live>,
    /// `None` once nobody wants the session anymore.
    alive: Option<watch::Sender<()>>,
}

impl Stage {
    async fn new() -> Self {
        let store = Store::for_tests().await.expect("a database in memory");
        let options = RuntimeOptions { max_instances: 1, ..RuntimeOptions::default() };
        let models = ModelSet::new(tiny_engine("tiny"));
        let agents =
            AgentHost::start(HostParts::new(store.clone(), models), options).await.expect("the host starts");
        let row = AgentRow {
            name: "a".into(),
            manifest: "name = \"a\"".into(),
            digest: "d".into(),
            deployed_at_ms: 1,
            deployed_by: "tester".into(),
        };
        store.put_agent(&row, b"", &[]).await.expect("stored");
        let host = agents.host().clone();
        let feed = Feed::new(TURN.into());
        let live = host.live.enter(&feed, Owned::default()).expect("the turn is new");
        let (alive, gone) = watch::channel(());
        let key = SessionKey { agent: "a".into(), session: "s".into() };
        let registration = Registration { sessions: Weak::new(), key, number: 1 };
        let actor = Actor::new(host, registration, gone, watch::Sender::new(None));
        Stage { host: agents, actor, end: TurnEnd::new(feed), live, alive: Some(alive) }
    }

    fn run(&mut self) -> Run<'_> {
        Run { actor: &mut self.actor, end: &self.end, live: &self.live }
    }

    fn store(&self) -> &Store {
        &self.host.host().store
    }

    /// Stores a turn that waits.
    async fn stored(&self, input: Vec<u8>) -> TurnKey {
        let row = NewTurn {
            id: TURN.into(),
            agent: "a".into(),
            session: "s".into(),
            idempotency_key: None,
            digest: String::new(),
            input,
            seed: vec![7; 32],
            accepted_at_ms: 5,
            number: None,
        };
        match self.store().accept_turn(row).await.expect("stored") {
            Acceptance::New(key) => key,
            Acceptance::Known(key) => panic!("{key:?} is known"),
        }
    }

    async fn readable(&self) -> TurnKey {
        self.stored(Input::encode(&message())).await
    }

    async fn row(&self, key: TurnKey) -> TurnRow {
        self.store().turn_by_key(key).await.expect("readable").expect("kept")
    }

    async fn resume(&mut self, key: TurnKey) -> State {
        Resuming { key }.resume(&mut self.run()).await
    }
}

fn message() -> Invocation {
    invocation("a", "s", "hi")
}

fn opening(state: StoredState) -> Opening {
    let accepted = Accepted { invocation: Box::new(message()), received_at_ms: 5, state };
    Opening::new(accepted, TURN, Instant::now())
}

fn waiting(key: TurnKey) -> StoredState {
    StoredState::Waiting { key, seed: vec![7; 32] }
}

fn outcome() -> Outcome {
    Outcome { text: "hi".into(), data: None, turn: 1, usage: Default::default(), elapsed_us: 1 }
}

fn ended(state: State) -> Ended {
    match state {
        State::Ended(ended) => ended,
        _ => panic!("the turn must have ended"),
    }
}

fn failing(state: State) -> Failing {
    match state {
        State::Failing(failing) => failing,
        _ => panic!("the turn must fail"),
    }
}

fn stored_code(row: TurnRow) -> String {
    match row.state {
        TurnState::Failed { error, .. } => StoredFailure::decode(&error).expect("readable").code,
        state => panic!("the turn must have failed: {state:?}"),
    }
}

#[tokio::test]
async fn resuming_reads_the_message_and_goes_to_opening() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    let State::Opening(Opening { assignment, state }) = stage.resume(key).await else {
        panic!("the turn must be opened")
    };
    assert_eq!((assignment.invocation.text.as_str(), assignment.received_at_ms), ("hi", 5));
    assert_eq!(assignment.hold, Hold::Watches);
    assert!(matches!(state, StoredState::Waiting { key: stored, .. } if stored == key));
    assert!(stage.actor.resuming.is_some(), "the permit is held until the turn is opened");
}

#[tokio::test]
async fn resuming_a_turn_that_failed_meanwhile_returns_its_failure() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    let session = stage.actor.key.clone();
    let error = RuntimeError::DeadlineExceeded;
    let live = stage.live.clone();
    let host = stage.host.host().clone();
    Settlement::for_unstarted_turn(&host, key, session, &error, false, live).write(&host).await;
    match ended(stage.resume(key).await) {
        Ended::Failed(RuntimeError::TurnFailed { code, .. }) => assert_eq!(code, error.code()),
        ended => panic!("{ended:?}"),
    }
}

#[tokio::test]
async fn resuming_a_turn_that_succeeded_meanwhile_returns_its_outcome() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    stage.store().start_turn(key, 1, "d".into()).await.expect("started");
    let delta = RunEvent::Delta { text: "hi".into() };
    let body = serde_json::to_vec(&serde_json::json!({"event": delta})).expect("JSON");
    let record = Record { position: 7, call: 1, shown: true, body };
    stage.store().append_records(key, vec![record]).await.expect("stored");
    let commit = TurnCommit {
        agent: "a".into(),
        session: "s".into(),
        key: Some(key),
        turn: 1,
        at_ms: 6,
        outcome: Some(StoredOutcome {
            body: serde_json::to_vec(&outcome()).expect("JSON"),
            ..StoredOutcome::default()
        }),
        ..TurnCommit::default()
    };
    stage.store().commit_turn(commit).await.expect("committed");
    match ended(stage.resume(key).await) {
        Ended::Done { last_id, outcome: stored } => assert_eq!((last_id, stored), (7, outcome())),
        ended => panic!("{ended:?}"),
    }
    let mut follower = stage.end.feed().follow(Hold::Watches);
    assert_eq!(follower.next().await.expect("told").expect("well"), RunEvent::Started { turn: 1 });
    assert_eq!(follower.next().await.expect("told").expect("well"), delta);
}

#[tokio::test]
async fn resuming_a_turn_that_was_deleted_with_its_agent_cancels_it() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    assert!(stage.store().delete_agent("a").await.expect("deleted"));
    let ended = ended(stage.resume(key).await);
    assert!(matches!(ended, Ended::Failed(RuntimeError::Cancelled)), "{ended:?}");
}

#[tokio::test]
async fn a_turn_with_an_unreadable_message_fails_permanently() {
    let mut stage = Stage::new().await;
    let key = stage.stored(b"{\"text\":".to_vec()).await;
    let failing = failing(stage.resume(key).await);
    assert_eq!((failing.key, failing.number, failing.ending.is_none()), (key, 0, true));
    assert!(stage.row(key).await.is_open(), "only settling ends the turn");
    let ended = ended(failing.settle(&stage.run()).await);
    assert!(matches!(&ended, Ended::Failed(error) if error.to_string().contains("unreadable")), "{ended:?}");
    assert_eq!(stored_code(stage.row(key).await), ended.label());
}

#[tokio::test]
async fn failing_does_not_replace_an_earlier_end() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    let fail = |error| Failing::unopened(key, Some(TurnEnding::of(&message(), TURN)), error);
    ended(fail(RuntimeError::DeadlineExceeded).settle(&stage.run()).await);
    let second = ended(fail(RuntimeError::Cancelled).settle(&stage.run()).await);
    assert!(matches!(second, Ended::Failed(RuntimeError::Cancelled)), "{second:?}");
    assert_eq!(stored_code(stage.row(key).await), "deadline_exceeded");
}

#[tokio::test]
async fn a_cancelled_turn_fails_if_it_is_stored_and_otherwise_leaves_nothing() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    stage.end.feed().cancel();
    let failing = failing(opening(waiting(key)).open(&mut stage.run()).await);
    assert!(matches!(failing.error, RuntimeError::Cancelled));
    assert!(failing.ending.is_some(), "the failure of a readable turn is announced");

    let opening = opening(StoredState::Attached);
    assert_eq!(opening.assignment.hold, Hold::Cancels);
    let ended = ended(opening.open(&mut stage.run()).await);
    assert!(matches!(ended, Ended::Failed(RuntimeError::Cancelled)), "{ended:?}");
    assert_eq!(stage.store().open_turns().await.expect("readable").len(), 1);
}

#[tokio::test]
async fn a_turn_whose_agent_cannot_be_called_stays_open() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    let left = ended(opening(waiting(key)).open(&mut stage.run()).await);
    assert!(matches!(left, Ended::LeftOpen(RuntimeError::AgentNotFound { .. })), "{left:?}");
    assert_eq!(stage.row(key).await.state, TurnState::Waiting);
    let never_stored = ended(opening(StoredState::Attached).open(&mut stage.run()).await);
    assert!(matches!(never_stored, Ended::Failed(RuntimeError::AgentNotFound { .. })), "{never_stored:?}");
}

#[tokio::test]
async fn a_turn_stays_open_when_its_session_is_dropped_before_it_starts() {
    let mut stage = Stage::new().await;
    let key = stage.readable().await;
    stage.end.feed().cancel();
    stage.alive = None;
    let left = ended(opening(waiting(key)).open(&mut stage.run()).await);
    assert!(matches!(left, Ended::LeftOpen(RuntimeError::Cancelled)), "{left:?}");
    assert!(stage.row(key).await.is_open());
}
