//! Crash tests of messages, and of turns that use tools, servers, other agents and approvals.

use super::{
    super::{
        doer::{MANIFEST, did, doer, keyed},
        fetch_tool,
        fixture::{Host, invocation},
        inference::chatter,
        outside::Outside,
        tools::{caller, granted},
    },
    SWEEPS, Scenario, beside, cut_off_at_every_write, cut_off_during_effects, eventually,
};
use crate::{Clock, Invocation, Outcome, RunEvent, TurnPhase};
use serde_json::json;
use skep_store::{UsageBy, UsageCounts, UsageFilter};
use std::collections::BTreeSet;

/// Sends a message under its key, and waits for its outcome.
async fn ask(host: &Host, message: Invocation) -> Outcome {
    host.agents.invoke(message).await.expect("taken").outcome().await.expect("the turn succeeds")
}

/// A message whose turn acts outside of the host.
struct Message {
    outside: Outside,
    /// Without a key, a client that sends the message again causes the action again.
    has_key: bool,
}

impl Scenario for Message {
    type Observed = Option<Outcome>;

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("doer", MANIFEST, doer(&self.outside)).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Self::Observed) {
        let message = if self.has_key { keyed } else { invocation };
        *observed = Some(ask(host, message("doer", "s", "post")).await);
    }

    async fn check(&self, host: &Host, observed: &Self::Observed) -> usize {
        let interrupted = did(host, &self.outside, "s", "/message", 1).await;
        let session = host.agents.session("doer", "s").await.expect("the session exists");
        assert_eq!((session.summary.turns, observed.as_ref().map(|outcome| outcome.turn)), (1, Some(1)));
        interrupted
    }
}

#[test]
fn a_message_and_its_post_survive_every_crash() {
    cut_off_during_effects(&Message { outside: Outside::start(), has_key: true }, 9);
}

#[test]
#[should_panic(expected = "every action is committed once")]
fn repeated_actions_are_detected() {
    let scenario = Message { outside: Outside::start(), has_key: false };
    for _ in 0..SWEEPS {
        cut_off_at_every_write(&scenario);
    }
}

/// A message without a key, which a client that received no response does not send again.
struct Unsure {
    outside: Outside,
    detached: bool,
}

#[derive(Default)]
struct Sent {
    is_sent: bool,
    turn_id: Option<String>,
    is_done: bool,
}

impl Scenario for Unsure {
    type Observed = Sent;

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("doer", MANIFEST, doer(&self.outside)).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Sent) {
        let mut handle = match &observed.turn_id {
            _ if !observed.is_sent => {
                observed.is_sent = true;
                let message = Invocation { detached: self.detached, ..invocation("doer", "s", "post") };
                host.agents.invoke(message).await.expect("taken")
            }
            Some(id) => host.agents.follow("doer", "s", id).await.expect("a reported turn can be followed"),
            None => return,
        };
        if self.detached {
            observed.turn_id = Some(handle.turn_id().to_owned());
        }
        while let Some(event) = handle.next().await {
            let event = event.expect("the turn succeeds");
            // The turn is durable by the time anybody sees an event.
            observed.turn_id = Some(handle.turn_id().to_owned());
            observed.is_done = matches!(event, RunEvent::Done(_));
        }
    }

    async fn check(&self, host: &Host, observed: &Sent) -> usize {
        let Ok(session) = host.agents.session("doer", "s").await else {
            assert!(observed.turn_id.is_none(), "an accepted message is lost");
            assert_eq!(self.outside.count("/message"), 0, "a message that was not accepted has no effects");
            return 0;
        };
        assert!(observed.is_done || observed.turn_id.is_none());
        assert_eq!(session.summary.turns, 1);
        did(host, &self.outside, "s", "/message", 1).await
    }
}

#[test]
fn a_message_without_a_key_is_handled_once_or_never_reported() {
    let scenario = |detached| Unsure { outside: Outside::start(), detached };
    for detached in [false, true] {
        let tally = cut_off_at_every_write(&scenario(detached));
        assert!(tally.crashes > 9, "{tally:?}");
    }
}

/// A generation in a conversation whose events a client reads.
struct Generation(Outside);

impl Scenario for Generation {
    /// The events that the client received last, with their numbers.
    type Observed = Vec<(u64, RunEvent)>;

    fn outside(&self) -> &Outside {
        &self.0
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("chat", "", chatter()).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Self::Observed) {
        let mut handle = host.agents.invoke(keyed("chat", "s", "hello")).await.expect("taken");
        for number in 0.. {
            let Some(event) = handle.next().await else { break };
            let event = (handle.last_id().expect("a number"), event.expect("the turn succeeds"));
            match observed.get(number) {
                Some(known) => assert_eq!(*known, event, "received events do not change"),
                None => observed.push(event),
            }
        }
    }

    async fn check(&self, host: &Host, observed: &Self::Observed) -> usize {
        let Some((_, RunEvent::Done(outcome))) = observed.last() else { panic!("{observed:?}") };
        let said: String = observed
            .iter()
            .filter_map(|(_, event)| match event {
                RunEvent::Delta { text } => Some(text.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(said, outcome.text);
        let session = host.agents.session("chat", "s").await.expect("the session exists");
        assert_eq!((session.summary.turns, session.messages.len()), (1, 2));
        assert_eq!(session.messages[1].content, outcome.text);
        let everything = UsageFilter { tenant: None, first_day: 0, last_day: u32::MAX };
        let used = host.store().usage(&everything, UsageBy::Session, 10).await.expect("readable");
        let counts = UsageCounts {
            requests: 1,
            input_tokens: outcome.usage.prompt_tokens.into(),
            cached_tokens: outcome.usage.cached_tokens.into(),
            output_tokens: outcome.usage.completion_tokens.into(),
            ..UsageCounts::default()
        };
        let used: Vec<_> = used.iter().map(|sum| (sum.group.as_deref(), &*sum.model, sum.counts)).collect();
        assert_eq!(used, [(Some("s"), "tiny", counts)], "what was used is counted once");
        0
    }
}

#[test]
fn a_generation_resumes_consistently_after_every_crash() {
    let tally = cut_off_at_every_write(&Generation(Outside::start()));
    assert!(tally.crashes > 9, "{tally:?}");
}

/// A tool call, after which the desk replies with the result or the error.
struct ToolCall {
    outside: Outside,
    tool: &'static str,
    /// Whether the call requires approval.
    asks: bool,
}

#[derive(Default)]
struct Called {
    outcome: Option<Outcome>,
    /// The approvals that people were asked for.
    asked: BTreeSet<String>,
}

impl ToolCall {
    fn test(tool: &'static str, asks: bool, crashes: u32) {
        cut_off_during_effects(&ToolCall { outside: Outside::start(), tool, asks }, crashes);
    }
}

impl Scenario for ToolCall {
    type Observed = Called;

    fn outside(&self) -> &Outside {
        &self.outside
    }

    async fn prepare(&self, host: &Host) {
        let asks = if self.asks { "[tools.find]\napproval = true" } else { "" };
        host.deploy("doer", &format!("{MANIFEST}\n{asks}"), doer(&self.outside)).await.expect("valid");
        let asks = if self.asks { "[tools.\"mcp:bank/pay\"]\napproval = true" } else { "" };
        let manifest = format!("{}\n{asks}", granted("\"agent:*/*\", \"mcp:*/*\""));
        host.deploy("desk", &manifest, caller()).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Called) {
        let asked = &mut observed.asked;
        let outcome = beside(ask(host, keyed("desk", "s", self.tool)), async || {
            for waiting in host.agents.approvals(None, 10).await.expect("listed") {
                assert!(self.asks, "{waiting:?}");
                asked.insert(waiting.id.clone());
                // The approval may have been decided by now, or removed with its turn.
                let _ = host.agents.decide(&waiting.id, true, None, "ann").await;
            }
        });
        observed.outcome = Some(outcome.await);
    }

    async fn check(&self, host: &Host, observed: &Called) -> usize {
        let outcome = observed.outcome.as_ref().expect("the client got an outcome");
        assert_eq!(observed.asked.len(), usize::from(self.asks), "{:?}", observed.asked);
        assert!(host.agents.approvals(None, 10).await.expect("listed").is_empty());
        let session = host.agents.session("desk", "s").await.expect("the session exists");
        assert_eq!(session.summary.turns, 1);
        if self.tool.starts_with("agent:") {
            assert_eq!(outcome.text, r#"{"id":1}"#);
            let session = host.agents.session("doer", "desk~s").await.expect("the session exists");
            assert_eq!(session.summary.turns, 1);
            return did(host, &self.outside, "desk~s", "/tool", 1).await;
        }
        let is_interrupted = outcome.text.contains("check whether the tool did its work");
        assert!(is_interrupted || outcome.text == r#"{"id":1}"#, "{outcome:?}");
        let paid = self.outside.paid();
        assert!(
            paid == 1 || paid == 0 && is_interrupted,
            "{paid} payments, and the reply {:?}",
            outcome.text
        );
        usize::from(is_interrupted)
    }
}

#[test]
fn a_call_of_another_agents_tool_survives_every_crash() {
    ToolCall::test("agent:doer/find", false, 15);
}

#[test]
fn a_call_of_a_tool_server_survives_every_crash() {
    ToolCall::test("mcp:bank/pay", false, 9);
}

#[test]
fn an_approved_call_of_a_server_survives_every_crash() {
    ToolCall::test("mcp:bank/pay", true, 15);
}

#[test]
fn an_approved_call_of_another_agent_survives_every_crash() {
    ToolCall::test("agent:doer/find", true, 20);
}

/// A request as a model makes it, through the tool `http/fetch`.
struct Fetch(Outside);

impl Scenario for Fetch {
    type Observed = Option<String>;

    fn outside(&self) -> &Outside {
        &self.0
    }

    async fn prepare(&self, host: &Host) {
        host.deploy("web", fetch_tool::GRANTS, fetch_tool::fetcher()).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Self::Observed) {
        let arguments = json!({"method": "POST", "url": self.0.url("/order")}).to_string();
        let message = Invocation { idempotency_key: Some("k".into()), ..invocation("web", "s", &arguments) };
        *observed = Some(ask(host, message).await.text);
    }

    async fn check(&self, _host: &Host, observed: &Self::Observed) -> usize {
        let (observed, came) =
            (observed.as_ref().expect("the client got an outcome"), self.0.count("/order"));
        let is_interrupted = observed.contains("it is unknown whether the server acted on it");
        assert!(is_interrupted || observed.contains("\"text\":\"well\""), "{observed}");
        assert!(
            came == 1 || came == 0 && is_interrupted,
            "{came} requests arrived, and the reply is {observed}"
        );
        usize::from(is_interrupted)
    }
}

#[test]
fn a_fetch_tool_call_survives_every_crash() {
    cut_off_during_effects(&Fetch(Outside::start()), 9);
}

/// A turn that is cancelled while it waits for a person. Afterwards nothing of it is left, and
/// nothing was done.
struct Cancelled(Outside);

impl Scenario for Cancelled {
    type Observed = Option<String>;

    fn outside(&self) -> &Outside {
        &self.0
    }

    async fn prepare(&self, host: &Host) {
        let manifest = format!("{MANIFEST}\n[tools.find]\napproval = true");
        host.deploy("doer", &manifest, doer(&self.0)).await.expect("valid");
        host.deploy("desk", &granted("\"agent:*/*\""), caller()).await.expect("valid");
    }

    async fn act(&self, host: &Host, _clock: &Clock, observed: &mut Self::Observed) {
        let id = match observed {
            Some(id) => id.clone(),
            None => {
                let handle = host.agents.invoke(keyed("desk", "s", "agent:doer/find")).await.expect("taken");
                observed.insert(handle.turn_id().to_owned()).clone()
            }
        };
        let is_over = async || {
            let phase = host.agents.turn("desk", "s", &id).await.expect("kept").phase;
            matches!(phase, TurnPhase::Failed { .. })
        };
        let asked = async || !host.agents.approvals(None, 10).await.expect("listed").is_empty();
        eventually(async || asked().await || is_over().await).await;
        host.agents.cancel_turn("desk", "s", &id).await.expect("the turn exists");
        eventually(is_over).await;
    }

    async fn check(&self, host: &Host, _observed: &Self::Observed) -> usize {
        for (agent, session) in [("desk", "s"), ("doer", "desk~s")] {
            host.agents.session(agent, session).await.expect_err("no turn of it was committed");
        }
        assert!(host.agents.approvals(None, 10).await.expect("listed").is_empty());
        assert_eq!(self.0.count("/tool"), 0);
        0
    }
}

#[test]
fn a_cancelled_turn_does_nothing_after_any_crash() {
    let tally = cut_off_at_every_write(&Cancelled(Outside::start()));
    assert!(tally.crashes > 9, "{tally:?}");
}
