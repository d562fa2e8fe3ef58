//! Tests of the journal on a real store: which results it replays, in which order, and what it
//! rejects.

use super::*;
use skep_store::{Acceptance, AgentRow, NewSchedule, NewTurn};

struct Turn {
    store: Store,
    key: TurnKey,
}

/// Stores the agent of these tests with the schedules of its manifest.
pub(crate) async fn put_agent(store: &Store, schedules: &[NewSchedule]) {
    let agent = AgentRow {
        name: "a".into(),
        manifest: String::new(),
        digest: "d".into(),
        deployed_at_ms: 1,
        deployed_by: "tester".into(),
    };
    store.put_agent(&agent, b"component", schedules).await.expect("stored");
}

/// Stores the first turn of the agent.
pub(crate) async fn first_turn(store: &Store) -> TurnKey {
    let turn = NewTurn {
        id: "t".into(),
        agent: "a".into(),
        session: "s".into(),
        idempotency_key: None,
        digest: "d".into(),
        input: Vec::new(),
        seed: vec![1; 32],
        accepted_at_ms: 1,
        number: Some(1),
    };
    match store.accept_turn(turn).await.expect("stored") {
        Acceptance::New(key) => key,
        Acceptance::Known(_) => panic!("the turn is the first"),
    }
}

impl Turn {
    async fn new() -> Turn {
        let store = Store::for_tests().await.expect("a database");
        put_agent(&store, &[]).await;
        let key = first_turn(&store).await;
        Turn { store, key }
    }

    /// Opens the journal as a host does when it starts.
    async fn open(&self) -> (Arc<Journal>, Arc<Feed>) {
        let feed = Feed::new("t".into());
        let records = self.store.records(self.key).await.expect("read");
        let journal =
            Journal::open(self.store.clone(), Clock::default(), self.key, vec![1; 32], feed.clone(), records);
        (journal.expect("readable"), feed)
    }
}

fn identity(name: &str, argument: u32) -> Identity {
    Identity::new(name, &argument)
}

fn divergence(result: Result<u64, RuntimeError>) -> String {
    let error = result.expect_err("the rerun diverges");
    assert_eq!(error.code(), "divergence");
    error.to_string()
}

#[tokio::test]
async fn results_are_replayed_before_the_turn_is_live() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    for value in [7, 8] {
        assert_eq!(journal.immediate(identity("clock", 0), || value).expect("live"), value);
    }
    let begun = journal.call(identity("generate", 1)).expect("live");
    journal.tokens(&begun, &ModelDigest::default(), &[10, 11], RolledBack::default(), "ab");
    journal.tokens(&begun, &ModelDigest::default(), &[12], RolledBack { times: 1, tokens: 4 }, "c");
    journal.close().await.expect("stored");

    let (journal, feed) = turn.open().await;
    for value in [7, 8] {
        assert_eq!(journal.immediate(identity("clock", 0), || 99).expect("recorded"), value);
    }
    let begun = journal.call(identity("generate", 1)).expect("recorded");
    assert_eq!((begun.tokens(), begun.shown_bytes()), (&[10, 11, 12][..], 3));
    assert_eq!(begun.taken_back(), RolledBack { times: 1, tokens: 4 });
    journal.tokens(&begun, &ModelDigest::default(), &[13], RolledBack::default(), "d");
    journal.ended(&begun, &"result", vec![RunEvent::Delta { text: "!".into() }]);
    assert_eq!(journal.immediate(identity("clock", 0), || 9).expect("live again"), 9);
    journal.close().await.expect("stored");
    journal.check_replayed().expect("every call was repeated");

    let (journal, again) = turn.open().await;
    let mut texts = Vec::new();
    for feed in [feed, again] {
        feed.end(100, Err(RuntimeError::Cancelled));
        let (mut handle, mut text) = (feed.follow(crate::feed::Hold::Watches), String::new());
        while let Some(Ok(RunEvent::Delta { text: delta })) = handle.next().await {
            text.push_str(&delta);
        }
        texts.push(text);
    }
    assert_eq!(texts, ["abcd!", "abcd!"]);
    for _ in 0..2 {
        journal.immediate(identity("clock", 0), || 0).expect("recorded");
    }
    let mut ended = journal.call(identity("generate", 1)).expect("recorded");
    let (result, _place) =
        journal.recorded::<String>(&mut ended).expect("readable").expect("the call has a result");
    assert_eq!(result, "result");
}

#[tokio::test]
async fn a_call_that_is_numbered_only_if_it_fails_is_found_where_it_failed() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let open = || identity("open", 1);
    let before = |journal: &Arc<Journal>| journal.failed_before::<String>(&open()).expect("readable");
    assert_eq!(before(&journal), None);
    assert_eq!(journal.immediate(identity("clock", 0), || 7).expect("live"), 7);
    assert!(!journal.is_replaying());
    let call = journal.call(open()).expect("live");
    journal.ended(&call, &"busy", Vec::new());
    assert_eq!(before(&journal), None, "the second one succeeds, and has no number");
    assert_eq!(journal.immediate(identity("clock", 0), || 8).expect("live"), 8);
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    assert!(journal.is_replaying());
    assert_eq!(before(&journal), None);
    assert_eq!(journal.immediate(identity("clock", 0), || 99).expect("recorded"), 7);
    assert_eq!(journal.failed_before::<String>(&identity("open", 2)).expect("readable"), None);
    assert_eq!(before(&journal).as_deref(), Some("busy"));
    assert_eq!(before(&journal), None);
    assert_eq!(journal.immediate(identity("clock", 0), || 99).expect("recorded"), 8);
    assert!(!journal.is_replaying());
    journal.close().await.expect("stored");
    journal.check_replayed().expect("every call was repeated");
}

#[tokio::test]
async fn a_host_call_is_found_again_in_either_order() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let made = journal.make().expect("live");
    let generate = journal.identify(made, identity("generate", 1)).expect("live");
    let summary = journal.call_of_host(identity(SUMMARIZE, 1), Some(1)).expect("live");
    assert_eq!((generate.number(), summary.number()), (1, 2));
    journal.tokens(&summary, &ModelDigest::default(), &[5], RolledBack::default(), "");
    assert_eq!(journal.immediate(identity("clock", 0), || 7).expect("live"), 7);
    journal.close().await.expect("stored");
    for guest_is_first in [true, false] {
        let (journal, _) = turn.open().await;
        let made = journal.make().expect("recorded");
        let clock = || journal.immediate(identity("clock", 0), || 9).expect("recorded");
        if guest_is_first {
            assert_eq!(clock(), 7);
        }
        let summary = journal.call_of_host(identity(SUMMARIZE, 1), Some(1)).expect("recorded");
        assert_eq!((summary.number(), summary.tokens()), (2, &[5][..]));
        if !guest_is_first {
            assert_eq!(clock(), 7);
        }
        journal.identify(made, identity("generate", 1)).expect("recorded");
        journal.check_replayed().expect("every call was repeated");
    }
}

#[tokio::test]
async fn different_or_missing_calls_are_a_divergence() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    journal.immediate(identity("models", 1), || 1).expect("live");
    journal.immediate(identity("clock", 1), || 2).expect("live");
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    assert!(journal.immediate(identity("clock", 1), || 3).is_err());
    assert!(journal.call(identity("models", 1)).is_err(), "the turn is over");
    assert!(divergence(journal.close().await).contains("call 1 was models before the restart"));

    let (journal, _) = turn.open().await;
    assert!(journal.immediate(identity("models", 2), || 3).is_err());
    assert!(divergence(journal.close().await).contains("models with other arguments"));

    let (journal, _) = turn.open().await;
    journal.immediate(identity("models", 1), || 3).expect("recorded");
    journal.close().await.expect("no divergence so far");
    assert!(divergence(journal.check_replayed().map(|()| 0)).contains("no further call"));
}

#[tokio::test]
async fn results_keep_their_order_and_a_dropped_one_does_not_block_others() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let calls: Vec<Call> =
        (0..3).map(|index| journal.call(identity("generate", index)).expect("live")).collect();
    for index in [2, 0, 1] {
        journal.ended(&calls[index], &index, Vec::new());
    }
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    let mut positions = Vec::new();
    for index in 0..3 {
        let mut call = journal.call(identity("generate", index)).expect("recorded");
        let (value, position) = journal.recorded::<u32>(&mut call).expect("readable").expect("ended");
        assert_eq!(value, index);
        positions.push(position);
    }
    let second = positions.remove(0);
    let third = positions.remove(0);
    let first = positions.remove(0);
    let waits = tokio::spawn(async move {
        second.reached().await;
        drop(second);
        third.reached().await;
    });
    tokio::task::yield_now().await;
    assert!(!waits.is_finished());
    drop(first);
    waits.await.expect("both were reached");
}

#[tokio::test]
async fn an_oversized_record_fails_the_turn_and_is_not_shown() {
    let turn = Turn::new().await;
    let (journal, feed) = turn.open().await;
    let call = journal.call(identity("generate", 0)).expect("live");
    let text = "x".repeat(skep_store::MAX_RECORD_BYTES);
    journal.ended(&call, &(), vec![RunEvent::Delta { text }]);
    assert_eq!(journal.close().await.expect_err("too large").code(), "store_failed");
    assert!(journal.call(identity("generate", 1)).is_err());
    feed.end(1, Err(RuntimeError::Cancelled));
    let mut handle = feed.follow(crate::feed::Hold::Watches);
    assert!(handle.next().await.expect("the end").is_err());
}

#[tokio::test]
async fn derived_bytes_depend_on_the_seed_and_the_purpose() {
    let turn = Turn::new().await;
    let (one, _) = turn.open().await;
    let (two, _) = turn.open().await;
    assert_eq!(one.derive("a"), two.derive("a"));
    assert_ne!(one.derive("a"), one.derive("b"));
    let calls = [0, 1].map(|index| one.call(identity("generate", index)).expect("live"));
    assert_ne!(one.seed_for(&calls[0]), one.seed_for(&calls[1]));
}

#[tokio::test]
async fn a_call_without_a_result_waits_for_all_recorded_results() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let given_up = journal.call(identity("tools.call", 1)).expect("live");
    journal.caught_up().await;
    journal.dispatched(&given_up).await.expect("stored");
    journal.immediate(identity("sleep", 500), || ()).expect("live");
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    let again = journal.call(identity("tools.call", 1)).expect("recorded");
    assert!(again.was_dispatched());
    let mut caught_up = std::pin::pin!(journal.caught_up());
    assert!(polled_once(caught_up.as_mut()).is_pending(), "the wait that ended the call comes first");
    journal.immediate(identity("sleep", 500), || ()).expect("recorded");
    caught_up.await;
}

fn polled_once<F: Future>(future: std::pin::Pin<&mut F>) -> std::task::Poll<F::Output> {
    future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
}

#[tokio::test]
async fn a_result_waits_for_the_calls_that_were_made_before_it() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    // A race: the first of two calls finishes while the second is in flight, and the second is
    // abandoned.
    let post = journal.begin(identity("fetch", 1)).await.expect("live");
    let sleep = journal.begin(identity("sleep", 2)).await.expect("live");
    journal.ended(&post, &"posted", Vec::new());
    drop((post, sleep));
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    let mut post = journal.begin(identity("fetch", 1)).await.expect("recorded");
    let (result, position) =
        journal.recorded::<String>(&mut post).expect("readable").expect("the call has a result");
    assert_eq!(result, "posted");
    let pending = tokio::time::timeout(std::time::Duration::from_millis(50), position.reached()).await;
    assert!(pending.is_err(), "the second call has not been made yet");
    let sleep = journal.begin(identity("sleep", 2)).await.expect("recorded");
    position.reached().await;
    // The second call continues only after the first has its result.
    let pending = tokio::time::timeout(std::time::Duration::from_millis(50), journal.caught_up()).await;
    assert!(pending.is_err(), "the guest has no result yet");
    drop((position, post));
    journal.caught_up().await;
    drop(sleep);
    assert_eq!(journal.immediate(identity("clock", 0), || 9).expect("live again"), 9);
}

fn next(reads: &mut Reads) -> std::task::Poll<NextRead> {
    reads.poll_next(&mut std::task::Context::from_waker(std::task::Waker::noop()))
}

#[tokio::test]
async fn reads_are_replayed_in_order_with_results_and_new_text_comes_last() {
    use std::task::Poll::{Pending, Ready};
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let mut generation = journal.call(identity("generate", 1)).expect("live");
    let mut reads = Reads::of(&journal, &mut generation);
    assert_eq!(next(&mut reads), Ready(NextRead::New));
    reads.made(3);
    assert_eq!(journal.immediate(identity("clock", 0), || 7).expect("live"), 7);
    reads.made(2);
    let sleep = journal.begin(identity("sleep", 1)).await.expect("live");
    journal.ended(&sleep, &(), Vec::new());
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    let mut generation = journal.call(identity("generate", 1)).expect("recorded");
    let mut reads = Reads::of(&journal, &mut generation);
    assert_eq!(next(&mut reads), Ready(NextRead::Again(3)));
    reads.made(3);
    assert_eq!(next(&mut reads), Pending, "the clock was read before");
    assert_eq!(journal.immediate(identity("clock", 0), || 9).expect("recorded"), 7);
    assert_eq!(next(&mut reads), Ready(NextRead::Again(2)));
    reads.made(2);
    assert_eq!(next(&mut reads), Pending, "new text is read after everything that was recorded");
    let mut sleep = journal.begin(identity("sleep", 1)).await.expect("recorded");
    drop(journal.recorded::<()>(&mut sleep).expect("readable").expect("the call has a result"));
    assert_eq!(next(&mut reads), Ready(NextRead::New));
    reads.made(1);
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    let mut generation = journal.call(identity("generate", 1)).expect("recorded");
    drop(Reads::of(&journal, &mut generation));
    journal.immediate(identity("clock", 0), || 0).expect("recorded");
    drop(journal.begin(identity("sleep", 1)).await.expect("recorded"));
    journal.caught_up().await;
}

/// Repeats the recorded sleep and checks that the journal has nothing else left.
async fn sleeps_on_replay(journal: &Arc<Journal>) {
    let mut sleep = journal.begin(identity("sleep", 1)).await.expect("recorded");
    let ((), position) = journal.recorded(&mut sleep).expect("readable").expect("the call has a result");
    position.reached().await;
    drop(position);
    journal.caught_up().await;
    journal.check_replayed().expect("nothing is left");
}

#[tokio::test]
async fn a_call_abandoned_before_its_identity_is_known_blocks_nothing() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let generate = journal.call(identity("generate", 1)).expect("live");
    journal.tokens(&generate, &ModelDigest::default(), &[5], RolledBack::default(), "");
    let mut reads = Reads::of(&journal, &mut journal.call(identity("generate", 2)).expect("live"));
    reads.made(3);
    journal.ended(&generate, &"said", Vec::new());
    let sleep = journal.begin(identity("sleep", 1)).await.expect("live");
    journal.ended(&sleep, &(), Vec::new());
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    drop(journal.make().expect("recorded"));
    drop(journal.make().expect("recorded"));
    sleeps_on_replay(&journal).await;
}

#[tokio::test]
async fn an_unrepeated_host_call_blocks_nothing_and_keeps_its_number() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let generate = journal.call(identity("generate", 1)).expect("live");
    let summary = journal.call_of_host(identity(SUMMARIZE, 1), Some(1)).expect("live");
    journal.ended(&summary, &"summary", Vec::new());
    let sleep = journal.begin(identity("sleep", 1)).await.expect("live");
    assert_eq!((generate.number(), summary.number(), sleep.number()), (1, 2, 3));
    journal.ended(&sleep, &(), Vec::new());
    journal.close().await.expect("stored");

    for is_another in [false, true] {
        let (journal, _) = turn.open().await;
        let generate = journal.call(identity("generate", 1)).expect("recorded");
        let another =
            is_another.then(|| journal.call_of_host(identity(SUMMARIZE, 2), Some(1)).expect("live"));
        assert_eq!(another.map(|another| another.number()), is_another.then_some(4));
        // The parent is over.
        drop(generate);
        sleeps_on_replay(&journal).await;
    }
}

#[tokio::test]
async fn reads_that_an_early_version_did_not_record_are_free() {
    let turn = Turn::new().await;
    let (journal, _) = turn.open().await;
    let generate = journal.call(identity("generate", 1)).expect("live");
    let call = identity("generate", 1);
    let record = Record::Tokens {
        call,
        ids: vec![5],
        text: String::new(),
        taken_back: RolledBack::default(),
        model: None,
    };
    journal.append(&mut journal.lock(), generate.number(), [record]);
    assert_eq!(journal.immediate(identity("clock", 0), || 7).expect("live"), 7);
    journal.close().await.expect("stored");

    let (journal, _) = turn.open().await;
    let mut generate = journal.call(identity("generate", 1)).expect("recorded");
    let mut reads = Reads::of(&journal, &mut generate);
    assert_eq!(next(&mut reads), std::task::Poll::Ready(NextRead::New), "the clock was read after that");
    reads.made(2);
    assert_eq!(journal.immediate(identity("clock", 0), || 9).expect("recorded"), 7);
}
