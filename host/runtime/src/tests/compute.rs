//! Tests that guests and sessions with long host computations do not delay others.

use super::{
    durability::talker,
    fixture::{Host, invocation},
    guest::{Guest, echo},
};
use crate::{Invocation, PortableConversation, PortableSession, RuntimeError, SessionSummary};
use skep_engine::{
    Cancel,
    chat::{ChatMessage, Transcript},
};
use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Maximum time that others may wait. A busy machine may stop everything for as long, so there are
/// several attempts.
const BOUND: Duration = Duration::from_secs(1);
const TRIES: usize = 5;
/// More attackers than threads that serve turns.
const ATTACKERS: usize = 4;

/// Completes the message's text, and replies with `o`, or with `e` if that fails.
pub(super) fn completer() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/inference@0.1.1" "complete" (func $complete (param i32 i32)))
            (data (i32.const 512) "eo")"#,
        on_message: r#"
            (i32.store offset=12 (i32.const 1024) (local.get $text))
            (i32.store offset=16 (i32.const 1024) (local.get $length))
            (i32.store8 offset=96 (i32.const 1024) (i32.const 1))
            (i32.store offset=100 (i32.const 1024) (i32.const 4))
            (call $complete (i32.const 1024) (i32.const 2048))
            (local.set $text (i32.const 513))
            (local.set $length (i32.const 1))
            (if (i32.load8_u (i32.const 2048)) (then (local.set $text (i32.const 512))))"#,
        pages: 300,
        ..Guest::default()
    }
}

/// Returns the longest duration of a turn of another session while the attack is running.
async fn slowest_beside(host: &Host, mut attack: JoinSet<Result<String, RuntimeError>>) -> Duration {
    let mut slowest = Duration::ZERO;
    while !attack.is_empty() {
        while let Some(ended) = attack.try_join_next() {
            ended.expect("no panic").expect("the turn succeeds");
        }
        let began = Instant::now();
        assert_eq!(host.answer("echo", "well-behaved", "hello").await, "hello");
        slowest = slowest.max(began.elapsed());
    }
    slowest
}

/// Checks that others are served while `attack` runs, with several attempts.
async fn others_make_progress(host: &Host, attack: impl AsyncFn() -> JoinSet<Result<String, RuntimeError>>) {
    host.deploy("echo", "", echo()).await.expect("valid");
    host.answer("echo", "well-behaved", "hello").await;
    let mut slowest = Vec::new();
    for _ in 0..TRIES {
        slowest.push(slowest_beside(host, attack().await).await);
        if slowest.last().is_some_and(|slowest| *slowest < BOUND) {
            return;
        }
    }
    panic!("others waited too long: {slowest:?}");
}

/// Sends the same message to several sessions at once.
async fn sent(host: &Host, agent: &str, text: &str) -> JoinSet<Result<String, RuntimeError>> {
    let mut turns = JoinSet::new();
    for number in 0..ATTACKERS {
        let message = invocation(agent, &format!("attack-{number}"), text);
        let handle = host.agents.invoke(Invocation { detached: true, ..message }).await.expect("taken");
        turns.spawn(async move { handle.outcome().await.map(|outcome| outcome.text) });
    }
    turns
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_are_served_while_guests_complete_huge_prompts() {
    let host = Host::start().await;
    host.deploy("completes", "", completer()).await.expect("valid");
    let prompt = "the user said hello. ".repeat(300 << 10);
    others_make_progress(&host, async || sent(&host, "completes", &prompt).await).await;
    assert_eq!(host.answer("completes", "s", &prompt).await, "e", "the prompt does not fit into the context");
    assert_eq!(host.answer("completes", "s", "hello").await, "o");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_are_served_while_a_huge_session_is_compacted() {
    let host = Host::start().await;
    host.deploy("talk", "[limits]\nturn_ms = 600000", talker()).await.expect("valid");
    let import = async |session: &str| {
        let mut transcript = Transcript::new();
        for number in 0..4_999 {
            transcript.push(ChatMessage::user(format!("question {number} of many, about nothing at all")));
            transcript.push(ChatMessage::assistant(format!("answer {number}, which says as little")));
        }
        let session = PortableSession {
            summary: SessionSummary { id: session.into(), turns: 1, created_at_ms: 1, updated_at_ms: 1 },
            state: Default::default(),
            conversations: vec![PortableConversation {
                name: "main".into(),
                digest: None,
                model: "tiny".into(),
                transcript,
            }],
        };
        host.agents.import_session("talk", session, true).await.expect("imported");
    };
    others_make_progress(&host, async || {
        for number in 0..ATTACKERS {
            import(&format!("attack-{number}")).await;
        }
        sent(&host, "talk", "hi").await
    })
    .await;
    let page = host.agents.messages("talk", "attack-0", "main", 0, 10).await.expect("there");
    assert!(page.total < 20, "{} messages are left", page.total);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_computing_turn_ends_at_its_deadline_or_cancellation() {
    let host = Host::start().await;
    host.deploy("completes", "[limits]\nturn_ms = 50", completer()).await.expect("valid");
    let prompt = "the user said hello. ".repeat(300 << 10);
    // All compute permits of the tenant are taken until the test releases them.
    let (release, wait) = mpsc::channel::<()>();
    let services = host.agents.host().clone();
    let slots = thread::available_parallelism().map_or(2, usize::from).max(2) - 1;
    let wait = Arc::new(Mutex::new(wait));
    let mut busy = JoinSet::new();
    for _ in 0..slots {
        let (services, wait) = (services.clone(), wait.clone());
        busy.spawn(async move {
            let held = move |_: &Cancel| drop(wait.lock().map(|wait| wait.recv()));
            services.reach.compute.run("local", held).await;
        });
    }
    let late = host.ask("completes", "s", &prompt).await.expect_err("50 ms");
    assert_eq!(late.code(), "deadline_exceeded");
    host.deploy("completes", "", completer()).await.expect("valid");
    let message = Invocation { detached: true, ..invocation("completes", "t", &prompt) };
    let handle = host.agents.invoke(message).await.expect("taken");
    host.agents.cancel_turn("completes", "t", handle.turn_id()).await.expect("open");
    assert_eq!(handle.outcome().await.expect_err("cancelled").code(), "cancelled");
    drop(release);
    busy.join_all().await;
    assert_eq!(host.answer("completes", "s", "hello").await, "o");
}
