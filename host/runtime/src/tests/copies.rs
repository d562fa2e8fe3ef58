//! Tests of operations on whole sessions: forks, exports and imports, message pages, and expiry.

use super::{
    fixture::{Host, Setup, invocation, until},
    guest::{counter, spinner},
    inference::chatter,
    waker::waker,
};
use crate::{Clock, Invocation, PortableSession, RuntimeOptions, Tenant};
use std::time::Duration;

const HOUR_MS: u64 = 3_600_000;
/// Fills more than one page of the KV cache.
const QUESTION: &str = "a message that fills more than a page";

/// Starts a host with the session `s` of the agent `chat`, which can continue from its tokens.
async fn chatting() -> Host {
    let host = Host::start().await;
    host.deploy("chat", "", chatter()).await.expect("valid");
    for _ in 0..50 {
        host.ask("chat", "s", QUESTION).await.expect("the turn succeeds");
        if host.have_text(export(&host, "s").await.conversations[0].transcript.tokens()) {
            return host;
        }
        host.agents.delete_session("chat", "s").await.expect("the session exists");
    }
    panic!("the model produces no tokens that have a text");
}

async fn export(host: &Host, session: &str) -> PortableSession {
    host.agents.export_session("chat", session).await.expect("the session exists")
}

async fn unloaded(host: &Host) {
    while host.agents.loaded_sessions() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_fork_continues_from_the_cached_pages_of_its_source() {
    let host = chatting().await;
    let fork = host.agents.fork_session("chat", "s", "copy").await.expect("the copy does not exist yet");
    assert_eq!((fork.id.as_str(), fork.turns), ("copy", 1));
    let first = host.ask("chat", "copy", "go on").await.expect("the turn succeeds");
    assert_eq!(first.turn, 2);
    let before = export(&host, "s").await.conversations.remove(0).transcript;
    assert!(
        first.usage.cached_tokens as usize >= before.tokens().len() / 16 * 16 - 16,
        "{first:?} after {} tokens",
        before.tokens().len()
    );
    let after = export(&host, "copy").await.conversations.remove(0).transcript;
    assert!(after.tokens().starts_with(before.tokens()), "the tokens are kept");
    assert_eq!(host.agents.session("chat", "s").await.expect("the session exists").messages.len(), 2);
}

#[tokio::test]
async fn a_fork_copies_committed_state_and_never_overwrites_a_session() {
    let host = Host::start().await;
    host.deploy("spin", "[limits]\ncpu_ms = 30000", spinner()).await.expect("valid");
    host.answer("spin", "s", "hello").await;
    host.answer("spin", "other", "hello").await;
    let mut runs = host.invoke("spin", "s", "spin").await.expect("taken");
    runs.next().await.expect("the turn starts").expect("the turn starts");
    let fork =
        host.agents.fork_session("spin", "s", "copy").await.expect("a running turn does not prevent a fork");
    assert_eq!(fork.turns, 1);
    drop(runs);
    for (from, to, code) in [
        ("s", "other", "session_exists"),
        ("s", "s", "session_exists"),
        ("nobody", "new", "session_not_found"),
        ("s", "a b", "invalid_name"),
        ("s", "rival/copy", "session_not_found"),
    ] {
        let error = host.agents.fork_session("spin", from, to).await.expect_err(to);
        assert_eq!(error.code(), code, "{from} to {to}: {error}");
    }
    assert_eq!(host.ask("spin", "copy", "hello").await.expect("the turn succeeds").turn, 2);
}

#[tokio::test]
async fn the_first_turn_after_a_fork_sees_the_copied_state() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    // The target's actor has read that the session does not exist, and remembers that.
    host.ask("count", "copy", "!").await.expect_err("the guest traps");
    host.agents.fork_session("count", "s", "copy").await.expect("no turn of the target was committed");
    assert_eq!(host.answer("count", "copy", "go").await, "xx");
}

#[tokio::test]
async fn an_imported_session_continues_with_the_same_tokens() {
    let host = chatting().await;
    host.deploy("count", "", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    let counted = host.agents.export_session("count", "s").await.expect("the session exists");
    assert_eq!(counted.state.get("n").map(Vec::as_slice), Some(&b"x"[..]));

    let exported = export(&host, "s").await;
    host.agents.delete_session("chat", "s").await.expect("the session exists");
    assert_eq!(host.agents.export_session("chat", "s").await.expect_err("gone").code(), "session_not_found");
    let imported =
        host.agents.import_session("chat", exported.clone(), false).await.expect("the export is valid");
    assert_eq!((imported.turns, imported.created_at_ms), (1, exported.summary.created_at_ms));
    let again = export(&host, "s").await;
    assert_eq!((again.state, again.conversations), (exported.state.clone(), exported.conversations.clone()));
    let next = host.ask("chat", "s", "go on").await.expect("the turn succeeds");
    assert_eq!(next.turn, 2);
    let before = &exported.conversations[0].transcript;
    let after = export(&host, "s").await.conversations.remove(0).transcript;
    assert!(after.tokens().starts_with(before.tokens()), "the tokens are kept");

    let refused =
        host.agents.import_session("chat", exported.clone(), false).await.expect_err("the session exists");
    assert_eq!(refused.code(), "session_exists");
    host.agents.import_session("chat", exported.clone(), true).await.expect("the session may be replaced");
    assert_eq!(export(&host, "s").await.conversations, exported.conversations);
}

#[tokio::test]
async fn an_invalid_import_is_refused_with_the_reason_and_writes_nothing() {
    let host = chatting().await;
    let right = export(&host, "s").await;
    host.agents.delete_session("chat", "s").await.expect("the session exists");
    type Change = fn(&mut PortableSession);
    let wrong: [(Change, &str, &str); 7] = [
        (|s| s.summary.id = "a/b/c".into(), "invalid_name", "session id"),
        (|s| s.summary.turns = 0, "invalid_session", "turns is 0"),
        (
            |s| s.conversations[0].model = "nobody".into(),
            "invalid_session",
            "\"main\": no model is called `nobody`",
        ),
        (|s| s.conversations.push(s.conversations[0].clone()), "invalid_session", "the name is used twice"),
        (|s| s.conversations[0].name.clear(), "invalid_session", "1 to 128 bytes"),
        (|s| s.state = [("k".repeat(300), vec![])].into(), "invalid_session", "300 bytes"),
        (
            |s| s.state = (0..8).map(|n| (format!("{n}"), vec![0; 200_000])).collect(),
            "invalid_session",
            "`state_kb`",
        ),
    ];
    for (change, code, expected) in wrong {
        let mut session = right.clone();
        change(&mut session);
        let error = host.agents.import_session("chat", session, true).await.expect_err(expected);
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(host.agents.sessions(&Tenant::local(), "chat", None, 10).await.expect("known").is_empty());
    host.agents.import_session("chat", right, false).await.expect("the export is valid");
}

#[tokio::test]
async fn messages_are_read_page_by_page() {
    let host = chatting().await;
    host.ask("chat", "s", "and another").await.expect("the turn succeeds");
    let page = async |after, limit| {
        let page = host.agents.messages("chat", "s", "main", after, limit).await.expect("the session exists");
        (page.total, page.messages.into_iter().map(|(number, _)| number).collect::<Vec<_>>())
    };
    assert_eq!(page(0, 3).await, (4, vec![1, 2, 3]));
    assert_eq!(page(3, 3).await, (4, vec![4]));
    assert_eq!(page(4, 3).await, (4, vec![]));
    let first = host.agents.messages("chat", "s", "main", 0, 1).await.expect("the session exists");
    assert_eq!(first.messages[0].1.content, QUESTION);
    let missing = host.agents.messages("chat", "s", "side", 0, 1).await.expect_err("no such conversation");
    assert_eq!(missing.code(), "conversation_not_found");
    assert!(missing.to_string().contains("it has: main"), "{missing}");
    let missing = host.agents.messages("chat", "nobody", "main", 0, 1).await.expect_err("no such session");
    assert_eq!(missing.code(), "session_not_found");
}

#[tokio::test]
async fn a_deleted_session_leaves_nothing_in_memory_or_in_the_log() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    host.ask("count", "s", "!").await.expect_err("the guest traps");
    host.agents.delete_session("count", "s").await.expect("the session exists");
    unloaded(&host).await;
    // A session whose turns all failed has something to delete too.
    let failed = Invocation { detached: true, ..invocation("count", "only-failed", "!") };
    let handle = host.agents.invoke(failed).await.expect("taken");
    let turn = handle.turn_id().to_owned();
    handle.outcome().await.expect_err("the guest traps");
    host.agents.delete_session("count", "only-failed").await.expect("the session's turn exists");
    let missing = host.agents.turn("count", "only-failed", &turn).await.expect_err("the turn is deleted");
    assert_eq!(missing.code(), "turn_not_found");
}

#[tokio::test]
async fn sessions_expire_by_the_shorter_ttl_but_not_during_turns_or_before_alarms() {
    let clock = Clock::at(1_800_000_000_000);
    let options = RuntimeOptions {
        session_ttl: Some(Duration::from_millis(10 * HOUR_MS)),
        ..RuntimeOptions::default()
    };
    let host = Host::with(Setup::at(&clock, options)).await;
    host.deploy("short", "[sessions]\nttl_h = 2", counter()).await.expect("valid");
    host.deploy("long", "[sessions]\nttl_h = 20\n[limits]\ncpu_ms = 30000", spinner()).await.expect("valid");
    host.deploy("wakes", "[sessions]\nttl_h = 2", waker()).await.expect("valid");
    for (agent, session) in [("short", "a"), ("short", "b"), ("long", "a"), ("long", "busy"), ("wakes", "a")]
    {
        host.answer(agent, session, "a").await;
    }
    let now_ms = host.agents.session("long", "busy").await.expect("the session exists").summary.updated_at_ms;
    let left = async |hours: u64| {
        host.agents.expire_sessions(now_ms + hours * HOUR_MS).await.expect("the call succeeds");
        let mut left = Vec::new();
        for agent in ["short", "long", "wakes"] {
            let sessions = host.agents.sessions(&Tenant::local(), agent, None, 10).await.expect("known");
            left.extend(sessions.into_iter().map(|session| format!("{agent}/{}", session.id)));
        }
        left
    };
    assert_eq!(left(1).await.len(), 5);
    assert_eq!(left(3).await, ["long/a", "long/busy", "wakes/a"]);
    let mut runs = host.invoke("long", "busy", "spin").await.expect("taken");
    runs.next().await.expect("the turn starts").expect("the turn starts");
    let kept = left(11).await;
    assert_eq!(
        kept,
        ["long/busy", "wakes/a"],
        "the operator's 10 hours apply, a turn is running, and an alarm is set"
    );
    clock.advance(1_000);
    until(async || (left(11).await.len() == 1).then_some(())).await;
    drop(runs);
    assert_eq!(host.ask("long", "busy", "hello").await.expect("the turn succeeds").turn, 2);
    assert_eq!(host.answer("short", "a", "go").await, "x", "the session starts over");
}

#[tokio::test]
async fn setting_the_clock_forward_expires_no_session_early() {
    const TEN_YEARS_MS: i64 = 10 * 366 * 24 * HOUR_MS as i64;
    let clock = Clock::at(Clock::default().now_ms());
    let setup = || Setup::at(&clock, RuntimeOptions::default());
    let host = Host::with(setup()).await;
    host.deploy("count", "[sessions]\nttl_h = 2", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    let expire =
        async |host: &Host| host.agents.expire_sessions(clock.now_ms()).await.expect("the call succeeds");
    clock.advance(HOUR_MS);
    assert_eq!(expire(&host).await, 0);
    clock.jump(TEN_YEARS_MS);
    assert_eq!(expire(&host).await, 0);
    clock.advance(HOUR_MS / 2);
    let host = host.restart_with(setup()).await;
    assert_eq!(expire(&host).await, 0, "skipped time is remembered across a restart");
    clock.advance(HOUR_MS);
    assert_eq!(expire(&host).await, 1, "two and a half hours have passed");
}

#[tokio::test]
async fn a_session_used_before_the_clock_was_set_back_still_expires() {
    const YEAR_MS: u64 = 365 * 24 * HOUR_MS;
    let clock = Clock::at(Clock::default().now_ms());
    let setup = || Setup::at(&clock, RuntimeOptions::default());
    let host = Host::with(setup()).await;
    host.deploy("count", "[sessions]\nttl_h = 2", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    let expire = async || host.agents.expire_sessions(clock.now_ms()).await.expect("the call succeeds");
    assert_eq!(expire().await, 0);
    clock.jump(-(YEAR_MS as i64));
    assert_eq!(expire().await, 0);
    clock.advance(3 * HOUR_MS);
    assert_eq!(expire().await, 1);
}
