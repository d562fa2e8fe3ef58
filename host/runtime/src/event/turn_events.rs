//! `skep.turn.done` and `skep.turn.failed`: the events that announce the end of a turn.

use super::{HOST_SOURCE, MAX_DATA_BYTES, MAX_HOPS, Outbox, encode_data};
use crate::{
    Invocation, Json, Origin, Outcome, RuntimeError,
    name::{plain_session, tenant_of},
};
use serde_json::{Value, json};
use skep_store::{DeliveryKey, NewEvent, TurnTrigger};

const DONE: &str = "skep.turn.done";
const FAILED: &str = "skep.turn.failed";
const ALL: &str = "skep.turn.";
/// Maximum size of a reply's text and data in an event; the other fields are small.
const MAX_REPLY_BYTES: usize = MAX_DATA_BYTES / 2;
/// Maximum length of an error message in an event.
const MAX_MESSAGE_CHARS: usize = 4_096;

/// The information about a turn's end that is known in advance.
pub(crate) struct TurnEnding {
    turn_id: String,
    agent: String,
    session: String,
    principal: String,
    hops: u32,
    /// Whether the turn's end is announced. A turn that was started by such an announcement
    /// announces nothing, because that would never end.
    is_published: bool,
    is_called: bool,
    trigger: Option<TurnTrigger>,
}

/// Returns how many events led to a turn.
pub(crate) fn hops(origin: &Origin) -> u32 {
    match origin {
        Origin::Event(event) => event.hops,
        Origin::Tool(tool) => tool.hops,
        // An alarm resets the count: it fires at least one second later, so a loop through alarms
        // is a schedule rather than a storm.
        Origin::Direct | Origin::Chat | Origin::Http(_) | Origin::Alarm(_) => 0,
    }
}

impl TurnEnding {
    pub(crate) fn of(invocation: &Invocation, turn_id: &str) -> Self {
        let origin = &invocation.origin;
        TurnEnding {
            turn_id: turn_id.to_owned(),
            agent: invocation.agent.clone(),
            session: invocation.session.clone(),
            principal: invocation.principal.clone(),
            hops: hops(origin),
            is_published: !matches!(origin, Origin::Event(event) if event.topic.starts_with(ALL)),
            is_called: matches!(origin, Origin::Tool(tool) if !tool.callers.is_empty()),
            trigger: match origin {
                Origin::Alarm(alarm) => {
                    Some(TurnTrigger::Alarm { schedule: alarm.id.clone(), due_ms: alarm.due_at_ms })
                }
                Origin::Event(event) => Some(TurnTrigger::Event(DeliveryKey(event.delivery))),
                Origin::Direct | Origin::Chat | Origin::Http(_) | Origin::Tool(_) => None,
            },
        }
    }

    /// Returns whether a turn of another agent waits for this one.
    pub(crate) fn is_of_another_agents_call(&self) -> bool {
        self.is_called
    }

    /// Returns the alarm or the event that started the turn and is settled by its commit.
    pub(crate) fn trigger(&self) -> Option<TurnTrigger> {
        self.trigger.clone()
    }

    pub(crate) fn done(&self, outbox: &Outbox, outcome: &Outcome, at_ms: u64) -> Option<NewEvent> {
        if !self.is_published(outbox, DONE) {
            return None;
        }
        let mut payload = json!({
            "tenant": tenant_of(&self.session), "agent": self.agent, "session": plain_session(&self.session),
            "turn_id": self.turn_id, "turn": outcome.turn,
            "usage": {
                "prompt_tokens": outcome.usage.prompt_tokens,
                "completion_tokens": outcome.usage.completion_tokens,
            },
        });
        let data_bytes = outcome.data.as_ref().map_or(0, |data| data.get().len());
        // JSON encoding makes text at most six times as long. A reply that may not fit can be
        // fetched by its turn id.
        if outcome.text.len() * 6 + data_bytes <= MAX_REPLY_BYTES {
            payload["text"] = json!(outcome.text);
            payload["data"] = json!(outcome.data);
        }
        self.event(outbox, DONE, &payload, at_ms)
    }

    pub(crate) fn failed(&self, outbox: &Outbox, error: &RuntimeError, at_ms: u64) -> Option<NewEvent> {
        if !self.is_published(outbox, FAILED) {
            return None;
        }
        let message: String = error.to_string().chars().take(MAX_MESSAGE_CHARS).collect();
        let payload = json!({
            "tenant": tenant_of(&self.session), "agent": self.agent, "session": plain_session(&self.session),
            "turn_id": self.turn_id,
            "error": {"code": error.code(), "message": message},
        });
        self.event(outbox, FAILED, &payload, at_ms)
    }

    fn is_published(&self, outbox: &Outbox, topic: &str) -> bool {
        self.is_published && self.hops < MAX_HOPS && outbox.router.takes(topic)
    }

    fn event(&self, outbox: &Outbox, topic: &str, payload: &Value, at_ms: u64) -> Option<NewEvent> {
        let payload = Json::from(payload);
        let deliveries = outbox.router.route(&self.principal, &self.turn_id, topic, Some(&payload));
        Some(NewEvent {
            source: HOST_SOURCE.to_owned(),
            id: self.turn_id.clone(),
            topic: topic.to_owned(),
            data: encode_data(Some(&payload)).ok()?,
            principal: self.principal.clone(),
            hops: self.hops + 1,
            at_ms,
            deliveries,
        })
    }
}
