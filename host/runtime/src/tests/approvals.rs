//! Tests of calls that a person decides on: a request survives everything and is decided once.

use super::{
    doer::{MANIFEST, doer},
    fixture::{Host, Setup, invocation, until},
    guest::echo,
    outside::Outside,
    tools::{caller, echoing, granted, granting, relay},
};
use crate::{
    Approval, Invocation, Origin, Outcome, RunEvent, RunHandle, RuntimeError, RuntimeOptions, Tenant,
    ToolOrigin, TurnPhase, clock::Clock,
};
use serde_json::json;
use std::time::Duration;

pub(super) const ASKS: &str = "[tools.find]\napproval = true";
const HOUR_MS: u64 = 3_600_000;
const AN_HOUR: &str = "[limits]\napproval_ms = 3600000";
const TOOL: &str = "agent:orders/find";

/// Starts a host with the agent `desk`, which calls the tool that its message names; `find`
/// requires approval.
pub(super) async fn start(more: &str) -> Host {
    start_at(&Clock::default(), more).await
}

/// Does the same as [`start`], with a clock that the test moves.
async fn start_at(clock: &Clock, more: &str) -> Host {
    let host = Host::with(Setup::at(clock, granting(&["agent:*/*"]))).await;
    host.deploy("orders", ASKS, echoing()).await.expect("valid");
    host.deploy("desk", &format!("{}\n{more}", granted("\"agent:orders/find\"")), caller())
        .await
        .expect("valid");
    host
}

/// Starts a host with the agent `orders`, whose tool sends a request to the outside and requires
/// approval.
async fn start_outside(outside: &Outside) -> Host {
    let host = Host::with(outside.setup()).await;
    host.deploy("orders", &format!("{MANIFEST}\n{ASKS}"), doer(outside)).await.expect("valid");
    host
}

async fn detached(host: &Host) -> RunHandle {
    detached_in(host, "s").await
}

async fn detached_in(host: &Host, session: &str) -> RunHandle {
    let invocation = Invocation { detached: true, ..invocation("desk", session, TOOL) };
    host.agents.invoke(invocation).await.expect("taken")
}

/// Reads events until approval is requested.
async fn asked(handle: &mut RunHandle) -> String {
    loop {
        if let RunEvent::ApprovalRequired { id, .. } =
            handle.next().await.expect("the turn is still running").expect("the turn succeeds")
        {
            return id;
        }
    }
}

pub(super) async fn pending(host: &Host) -> Vec<Approval> {
    host.agents.approvals(None, 10).await.expect("listed")
}

pub(super) async fn decide(host: &Host, id: &str, approve: bool) -> Result<Approval, RuntimeError> {
    let reason = if approve { "a good customer" } else { "too dear" };
    host.agents.decide(id, approve, Some(reason.to_owned()), "tester").await
}

#[tokio::test]
async fn an_approved_call_is_made_and_all_followers_see_the_same_events() {
    let host = start("").await;
    let mut handle = detached(&host).await;
    let id = asked(&mut handle).await;
    let [waiting] = pending(&host).await.try_into().expect("one");
    assert_eq!((waiting.id.as_str(), waiting.agent.as_str(), waiting.tool.as_str()), (&*id, "desk", TOOL));
    assert_eq!(
        (waiting.arguments.value()["id"].as_u64(), waiting.turn_id.as_str()),
        (Some(1), handle.turn_id())
    );
    assert!(waiting.expires_at_ms > waiting.created_at_ms);
    let callee = host.agents.session("orders", "desk~s").await.expect_err("nothing was called yet");
    assert_eq!(callee.code(), "session_not_found");

    decide(&host, &id, true).await.expect("the approval is still open");
    let turn = handle.turn_id().to_owned();
    let mut all = host.agents.follow("desk", "s", &turn).await.expect("there");
    let (mut events, mut ids) = (Vec::new(), Vec::new());
    while let Some(event) = all.next().await {
        events.push(event.expect("the turn succeeds"));
        ids.extend(all.last_id());
    }
    assert!(ids.is_sorted_by(|one, other| one < other), "{ids:?}");
    let [
        RunEvent::Started { turn: 1 },
        RunEvent::ApprovalRequired { .. },
        RunEvent::ApprovalDecided { approved: true, reason: Some(reason), .. },
        RunEvent::Done(outcome),
    ] = events.as_slice()
    else {
        panic!("{events:?}")
    };
    assert_eq!(reason, "a good customer");
    assert_eq!(outcome.text, r#"{"id":1}"#);
    assert!(pending(&host).await.is_empty());
}

#[tokio::test]
async fn a_denied_call_is_not_made_and_the_agent_gets_the_reason() {
    let host = start("").await;
    let mut handle = detached(&host).await;
    decide(&host, &asked(&mut handle).await, false).await.expect("the approval is still open");
    let outcome = handle.outcome().await.expect("a refusal does not fail the turn");
    assert_eq!(outcome.text, "a person refused this call: too dear");
    host.agents.session("orders", "desk~s").await.expect_err("nothing was called");
}

#[tokio::test]
async fn a_call_is_decided_only_once() {
    let host = start("").await;
    let mut handle = detached(&host).await;
    let id = asked(&mut handle).await;
    decide(&host, &id, true).await.expect("the first");
    for approve in [true, false] {
        let error = decide(&host, &id, approve).await.expect_err("the second");
        assert_eq!(error.code(), "approval_decided");
        assert!(error.to_string().contains("was already approved"), "{error}");
    }
    assert_eq!(handle.outcome().await.expect("the turn succeeds").text, r#"{"id":1}"#);
    assert_eq!(
        decide(&host, "another", true).await.expect_err("no such approval exists").code(),
        "approval_not_found"
    );
}

#[tokio::test]
async fn an_undecided_call_is_refused_and_the_wait_does_not_count_as_turn_time() {
    let host = start("[limits]\nturn_ms = 6000\napproval_ms = 6500").await;
    let mut handle = detached(&host).await;
    let id = asked(&mut handle).await;
    let outcome = handle.outcome().await.expect("the turn's time was not used up");
    assert!(outcome.text.starts_with("nobody approved this call in time"), "{outcome:?}");
    let late = decide(&host, &id, true).await.expect_err("too late");
    assert!(late.to_string().contains("expired before anyone decided"), "{late}");
}

#[tokio::test]
async fn setting_the_clock_forward_does_not_shorten_the_time_to_decide() {
    let clock = Clock::at(1_800_000_000_000);
    clock.times_set_back();
    let host = start_at(&clock, AN_HOUR).await;
    let (mut late, mut in_time) = (detached(&host).await, detached_in(&host, "t").await);
    let (_, second) = (asked(&mut late).await, asked(&mut in_time).await);
    let year_ms = 365 * 24 * HOUR_MS;
    clock.jump(year_ms as i64);
    clock.advance(HOUR_MS / 2);
    let waiting = pending(&host).await;
    assert_eq!(waiting.len(), 2);
    assert!(waiting.iter().all(|one| one.expires_at_ms == clock.now_ms() + HOUR_MS / 2), "{waiting:?}");
    decide(&host, &second, true).await.expect("half an hour is left");
    in_time.outcome().await.expect("approved");
    clock.advance(HOUR_MS / 2);
    let outcome = late.outcome().await.expect("the turn succeeds");
    assert!(outcome.text.starts_with("nobody approved this call in time"), "{outcome:?}");
}

#[tokio::test]
async fn setting_the_clock_back_does_not_prolong_the_time_to_decide() {
    let clock = Clock::at(1_800_000_000_000);
    clock.times_set_back();
    let host = start_at(&clock, AN_HOUR).await;
    let mut handle = detached(&host).await;
    asked(&mut handle).await;
    clock.jump(-(365 * 24 * HOUR_MS as i64));
    until(async || {
        let waiting = pending(&host).await;
        waiting.iter().all(|one| one.created_at_ms == clock.now_ms()).then_some(())
    })
    .await;
    // The waiting turn may have read the row before it was moved; it then checks again an hour
    // later.
    clock.advance(HOUR_MS);
    clock.advance(HOUR_MS);
    let outcome = handle.outcome().await.expect("the turn succeeds");
    assert!(outcome.text.starts_with("nobody approved this call in time"), "{outcome:?}");
}

#[tokio::test]
async fn a_waiting_turn_survives_a_restart_and_does_not_block_the_drain() {
    let outside = Outside::start();
    let host = start_outside(&outside).await;
    host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    let mut handle = detached(&host).await;
    let id = asked(&mut handle).await;
    let turn = handle.turn_id().to_owned();
    // Nobody decides before the drain, so a drain that waited for the turn would never end.
    host.agents.drain(Duration::from_secs(86_400)).await;
    let host = host.restart_with(outside.setup()).await;
    assert_eq!(pending(&host).await.into_iter().map(|one| one.id).collect::<Vec<_>>(), [id.as_str()]);
    let phase = host.agents.turn("desk", "s", &turn).await.expect("kept").phase;
    assert!(matches!(phase, TurnPhase::Running { .. }), "{phase:?}");

    let mut handle = host.agents.follow("desk", "s", &turn).await.expect("the turn is resumed");
    assert_eq!(asked(&mut handle).await, id, "followers see the same approval");
    decide(&host, &id, true).await.expect("the approval is still open");
    let decided = handle.next().await.expect("the turn is still running").expect("the turn succeeds");
    assert!(matches!(decided, RunEvent::ApprovalDecided { approved: true, .. }), "{decided:?}");
    assert_eq!(handle.outcome().await.expect("the turn succeeds").text, r#"{"id":1}"#);
    assert_eq!(host.agents.session("orders", "desk~s").await.expect("called").state_bytes, 2, "once");
    assert_eq!(outside.count("/tool"), 1);
}

#[tokio::test]
async fn a_held_session_returns_earlier_results_and_accepts_nothing_new() {
    let host = start("").await;
    let keyed = |key: &str| Invocation { idempotency_key: Some(key.into()), ..invocation("desk", "s", TOOL) };
    let mut answered = host.agents.invoke(keyed("answered")).await.expect("taken");
    let id = asked(&mut answered).await;
    decide(&host, &id, true).await.expect("the approval is still open");
    let outcome = answered.outcome().await.expect("the turn succeeds");
    asked(&mut host.agents.invoke(keyed("open")).await.expect("taken")).await;
    host.store().hold_all(1, 2).await.expect("stored");
    let host = host.restart_with(granting(&["agent:*/*"])).await;
    let again = host.agents.invoke(keyed("answered")).await.expect("known");
    assert_eq!(again.outcome().await.expect("the result is unchanged"), outcome);
    for refused in [keyed("open"), keyed("new"), invocation("desk", "s", TOOL)] {
        let error = host.agents.invoke(refused).await.expect_err("the session is held");
        assert_eq!(error.code(), "held_since_restore");
    }
}

/// Returns a tool call that no agent makes.
fn from_outside() -> Invocation {
    let origin = Origin::Tool(ToolOrigin { name: "find".into(), callers: Vec::new(), hops: 0 });
    Invocation {
        origin,
        data: Some(json!({"id": 7}).into()),
        detached: true,
        ..invocation("orders", "s", "")
    }
}

#[tokio::test]
async fn an_external_call_requires_approval_and_is_made_once() {
    let outside = Outside::start();
    let host = start_outside(&outside).await;
    let mut handle = host.agents.invoke(from_outside()).await.expect("taken");
    let (id, turn) = (asked(&mut handle).await, handle.turn_id().to_owned());
    let [waiting] = pending(&host).await.try_into().expect("one");
    assert_eq!((waiting.agent.as_str(), waiting.tool.as_str()), ("orders", "find"));
    assert_eq!(waiting.arguments, json!({"id": 7}).into());
    host.agents.session("orders", "s").await.expect_err("nothing has run yet");
    assert_eq!(outside.count("/tool"), 0);

    let host = host.restart_with(outside.setup()).await;
    decide(&host, &id, true).await.expect("the approval is still open");
    let outcome = host.agents.follow("orders", "s", &turn).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("the turn succeeds").data, Some(json!({"id": 7}).into()));
    let session = host.agents.session("orders", "s").await.expect("there");
    assert_eq!((session.summary.turns, session.state_bytes), (1, 2), "once");
    assert_eq!(outside.count("/tool"), 1);
}

#[tokio::test]
async fn a_denied_external_call_runs_nothing() {
    let outside = Outside::start();
    let host = start_outside(&outside).await;
    let mut handle = host.agents.invoke(from_outside()).await.expect("taken");
    decide(&host, &asked(&mut handle).await, false).await.expect("the approval is still open");
    let refused = handle.outcome().await.expect_err("the call was refused");
    assert_eq!(
        (refused.code(), refused.to_string().as_str()),
        ("call_refused", "a person refused this call: too dear")
    );
    host.agents.session("orders", "s").await.expect_err("nothing has run");
    assert_eq!(outside.count("/tool"), 0);
}

/// Starts a host with an agent that calls a second one, which calls a third; the last call requires
/// approval.
async fn start_chain(outside: &Outside, desk: &str, broker: &str) -> Host {
    let host = start_outside(outside).await;
    let broker = format!("{}\n{broker}", granted("\"agent:orders/find\""));
    host.deploy("broker", &broker, relay("orders")).await.expect("valid");
    let desk = format!("{}\n{desk}", granted("\"agent:broker/find\""));
    host.deploy("desk", &desk, caller()).await.expect("valid");
    host
}

/// Starts a turn, and follows the turn that it calls until approval is requested there.
async fn asked_below(host: &Host) -> (RunHandle, String) {
    let detached = Invocation { detached: true, ..invocation("desk", "s", "agent:broker/find") };
    let handle = host.agents.invoke(detached).await.expect("taken");
    let asked = until(async || pending(host).await.pop()).await;
    assert_eq!((asked.agent.as_str(), asked.tool.as_str()), ("broker", TOOL));
    (handle, asked.id)
}

#[tokio::test]
async fn waiting_for_a_suspended_turn_does_not_count_as_turn_time() {
    let outside = Outside::start();
    let host = start_chain(&outside, "[limits]\nturn_ms = 6000", "[limits]\napproval_ms = 6500").await;
    let (handle, _) = asked_below(&host).await;
    let outcome = handle.outcome().await.expect("the turn's time was not used up");
    let refusal =
        "nobody approved this call in time; it was not made (`approval_ms` under [limits] in agent.toml";
    assert!(outcome.text.starts_with(refusal), "{}", outcome.text);
}

#[tokio::test]
async fn a_caller_of_a_suspended_turn_resumes_with_it_and_calls_once() {
    let outside = Outside::start();
    let host = start_chain(&outside, "", "").await;
    let (handle, id) = asked_below(&host).await;
    decide(&host, &id, true).await.expect("the approval is still open");
    assert_eq!(handle.outcome().await.expect("the turn succeeds").text, r#"{"id":1}"#);
    for (agent, session) in [("broker", "desk~s"), ("orders", "broker~desk~s")] {
        assert_eq!(host.agents.session(agent, session).await.expect("called").summary.turns, 1, "{agent}");
    }
    assert_eq!(host.agents.session("orders", "broker~desk~s").await.expect("called").state_bytes, 2);
    assert_eq!(outside.count("/tool"), 1);
}

#[tokio::test]
async fn a_chain_of_suspended_turns_survives_a_restart_and_ends_together() {
    let outside = Outside::start();
    let host = start_chain(&outside, "", "").await;
    let (handle, id) = asked_below(&host).await;
    let turn = handle.turn_id().to_owned();
    let host = host.restart_with(outside.setup()).await;
    decide(&host, &id, true).await.expect("the approval is still open");
    let outcome = host.agents.follow("desk", "s", &turn).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("the turn succeeds").text, r#"{"id":1}"#);

    let (handle, id) = asked_below(&host).await;
    host.agents.cancel_turn("desk", "s", handle.turn_id()).await.expect("the turn exists");
    assert_eq!(handle.outcome().await.expect_err("the turn was cancelled").code(), "cancelled");
    until(async || pending(&host).await.is_empty().then_some(())).await;
    let late = decide(&host, &id, true).await.expect_err("the approval is closed");
    assert!(late.to_string().contains("belongs to a turn that has ended"), "{late}");
    assert_eq!(outside.count("/tool"), 1, "only the first was approved");
}

#[tokio::test]
async fn a_decision_just_before_the_host_stops_is_kept() {
    let host = start("").await;
    let mut handle = detached(&host).await;
    let id = asked(&mut handle).await;
    let turn = handle.turn_id().to_owned();
    decide(&host, &id, true).await.expect("the approval is still open");
    let host = host.restart_with(granting(&["agent:*/*"])).await;
    let outcome = host.agents.follow("desk", "s", &turn).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("the turn succeeds").text, r#"{"id":1}"#);
}

#[tokio::test]
async fn a_tenant_sees_its_own_approvals_and_the_operator_all_of_them() {
    let host = start("").await;
    let of_tenant =
        Invocation { principal: "acme".into(), detached: true, ..invocation("desk", "acme/s", TOOL) };
    asked(&mut host.agents.invoke(of_tenant).await.expect("taken")).await;
    asked(&mut detached(&host).await).await;
    let sessions = async |tenant: Option<Tenant>| {
        let listed = host.agents.approvals(tenant.as_ref(), 10).await.expect("listed");
        listed.into_iter().map(|one| one.session).collect::<Vec<_>>()
    };
    let tenant = |name| Some(Tenant::new(name).expect("a name"));
    assert_eq!(sessions(tenant("acme")).await, ["acme/s"]);
    assert_eq!(sessions(Some(Tenant::local())).await, ["s"]);
    assert!(sessions(tenant("rival")).await.is_empty());
    assert_eq!(sessions(None).await, ["acme/s", "s"]);
}

/// Returns the result of a message whose caller waits for it.
pub(super) async fn attached(host: &Host, session: &str) -> Result<Outcome, RuntimeError> {
    host.agents.invoke(invocation("desk", session, "")).await?.outcome().await
}

#[tokio::test]
async fn only_durable_messages_wait_behind_a_suspended_turn() {
    let host = start("").await;
    let mut in_front = detached(&host).await;
    // The pause may start before or after this message is sent.
    let early = attached(&host, "s").await.expect_err("nobody decided");
    assert_eq!(early.code(), "waiting_for_approval");
    let id = asked(&mut in_front).await;
    assert!(early.to_string().contains(&format!("approval {id}:")), "{early}");
    // Sends more messages than the mailbox holds; none of them stays in it.
    for _ in 0..2 * RuntimeOptions::default().mailbox {
        assert_eq!(attached(&host, "s").await.expect_err("nobody decided").code(), "waiting_for_approval");
    }
    let deleted = host.agents.delete_session("desk", "s").await.expect_err("a turn waits in it");
    assert_eq!(deleted.code(), "waiting_for_approval");
    attached(&host, "another").await.expect("another session is not blocked");
    let behind = detached(&host).await;
    let keyed = Invocation { idempotency_key: Some("k".into()), ..invocation("desk", "s", "") };
    let keyed = host.agents.invoke(keyed).await.expect("taken");

    decide(&host, &id, true).await.expect("the approval is still open");
    assert_eq!(in_front.outcome().await.expect("the turn succeeds").turn, 1);
    let mut behind = behind;
    decide(&host, &asked(&mut behind).await, false).await.expect("the approval is still open");
    assert_eq!(behind.outcome().await.expect("the turn succeeds").turn, 2);
    assert_eq!(keyed.outcome().await.expect("the turn succeeds").turn, 3, "refused messages are not turns");
    assert_eq!(attached(&host, "s").await.expect("no more approval is needed").turn, 4);
}

#[tokio::test]
async fn a_message_behind_a_chain_reports_the_approval_at_its_end() {
    let outside = Outside::start();
    let host = start_chain(&outside, "", "").await;
    let (_handle, id) = asked_below(&host).await;
    let error = attached(&host, "s").await.expect_err("nobody decided");
    assert_eq!(error.code(), "waiting_for_approval");
    assert!(error.to_string().contains(&format!("approval {id}:")), "{error}");
}

#[tokio::test]
async fn cancelling_a_turn_closes_its_approvals() {
    let host = start("").await;
    let mut handle = detached(&host).await;
    let id = asked(&mut handle).await;
    host.agents.cancel_turn("desk", "s", handle.turn_id()).await.expect("the turn exists");
    assert_eq!(handle.outcome().await.expect_err("the turn was cancelled").code(), "cancelled");
    assert!(pending(&host).await.is_empty());
    let error = decide(&host, &id, true).await.expect_err("the approval is closed");
    assert!(error.to_string().contains("belongs to a turn that has ended"), "{error}");
}

#[tokio::test]
async fn settings_for_an_unknown_tool_are_an_error() {
    let host = Host::start().await;
    let error =
        host.deploy("orders", "[tools.lose]\napproval = true", echoing()).await.expect_err("no such tool");
    assert!(
        error.to_string().contains("[tools.lose] in agent.toml does not name a tool; it describes: find"),
        "{error}"
    );
    let error =
        host.deploy("mute", "[tools.lose]\napproval = true", echo()).await.expect_err("no tools at all");
    let expected =
        "[tools.lose] in agent.toml does not name a tool; it has no tools of its own; external tools";
    assert!(error.to_string().contains(expected), "{error}");
}
