//! Events: what happened, who takes it, and what it costs.
//!
//! Who takes an event is decided when it is written: its deliveries are rows of the same transaction as what made it happen
//! (a request, a turn's commit, a turn's failure). From there on `courier` brings it there, at least once.

mod outbox;
mod router;
mod session_template;
mod summary;
pub(crate) mod topic;
pub(crate) mod turn_events;
pub(crate) mod webhook;
mod webhook_test;

pub(crate) use outbox::Outbox;
pub(crate) use router::EventRouter;
pub use session_template::SessionTemplate;
pub use skep_store::WebhookTry;
pub use summary::EventSummary;
pub use topic::TopicPattern;
pub(crate) use webhook::Webhooks;
pub use webhook::{DeadLetter, DeadLetterTarget, NewWebhook, WebhookState, WebhookSummary};
pub use webhook_test::WebhookTest;

use crate::{Json, RuntimeError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Of the data of an event.
pub(crate) const MAX_DATA_BYTES: usize = 256 << 10;
/// Of an id and of a source.
const MAX_ID_BYTES: usize = 128;
/// How many events may lead from one to the next. More is a storm: agents that answer each other for ever.
pub(crate) const MAX_HOPS: u32 = 8;
/// Who publishes the topics that begin with `skep.`.
pub(crate) const HOST_SOURCE: &str = "skep";
/// Of an agent, before its name.
pub(crate) const AGENT_SOURCE: &str = "agent:";

/// An event trigger of a manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventTrigger {
    /// Such as `order.*`.
    pub topic: TopicPattern,
    /// Such as `{data.order_id}`.
    pub session: SessionTemplate,
}

/// Something that happened, as it is told to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Unique for its source. `None`: a new one.
    pub id: Option<String>,
    /// Who tells it.
    pub source: String,
    pub topic: String,
    pub data: Option<Json>,
    /// `None`: now.
    pub at_ms: Option<u64>,
    /// On whose behalf it is delivered.
    pub principal: String,
}

/// What became of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedEvent {
    pub id: String,
    /// The same event was published before, and nothing was done.
    pub is_known: bool,
    /// Sessions and webhooks that get it.
    pub deliveries: usize,
}

impl Event {
    /// One that the host tells itself: its topic begins with `skep.`.
    pub fn of_host(id: String, topic: &str, data: Value, principal: String) -> Self {
        let (source, topic) = (HOST_SOURCE.to_owned(), topic.to_owned());
        Event { id: Some(id), source, topic, data: Some(Json::from(data)), at_ms: None, principal }
    }

    pub(crate) fn check(&self) -> Result<(), RuntimeError> {
        let invalid = |message: String| Err(RuntimeError::InvalidEvent { message });
        topic::check(&self.topic).map_err(|message| RuntimeError::InvalidEvent { message })?;
        let is_host = self.source == HOST_SOURCE;
        if topic::is_reserved(&self.topic) != is_host {
            return invalid(format!(
                "topic {:?} of source {:?}: topics that begin with `skep.` or `cf.workersAi.` are the host's own; choose another",
                self.topic, self.source
            ));
        }
        if self.source.starts_with(AGENT_SOURCE) {
            return invalid(format!("source {:?}: those that begin with `agent:` are agents'", self.source));
        }
        for (name, value) in [("id", self.id.as_deref()), ("source", Some(self.source.as_str()))] {
            let Some(value) = value else { continue };
            if !(1..=MAX_ID_BYTES).contains(&value.len()) || value.chars().any(char::is_control) {
                return invalid(format!("the {name} of an event has 1 to {MAX_ID_BYTES} printable bytes"));
            }
        }
        Ok(())
    }
}

/// Milliseconds since 1970-01-01 UTC of a time in the form of RFC 3339.
pub fn unix_ms(time: &str) -> Option<u64> {
    let time: jiff::Timestamp = time.parse().ok()?;
    u64::try_from(time.as_millisecond()).ok()
}

/// Whether the data of an event is not too large.
pub(crate) fn check_data(data: Option<&Json>) -> Result<(), String> {
    match data.map_or(0, |data| data.get().len()) {
        size if size > MAX_DATA_BYTES => {
            Err(format!("the data of an event has {size} bytes; {MAX_DATA_BYTES} are allowed"))
        }
        _ => Ok(()),
    }
}

/// The data of an event as it is stored, if it is not too large.
pub(crate) fn encode_data(data: Option<&Json>) -> Result<Option<Vec<u8>>, String> {
    check_data(data)?;
    Ok(data.map(|data| data.get().to_owned().into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(topic: &str, source: &str) -> Event {
        Event {
            id: None,
            source: source.into(),
            topic: topic.into(),
            data: None,
            at_ms: None,
            principal: "p".into(),
        }
    }

    #[test]
    fn only_the_host_speaks_for_itself() {
        event("order.paid", "shop").check().expect("a client's");
        event("skep.batch.done", HOST_SOURCE).check().expect("the host's");
        let batch = "cf.workersAi.model.batch.queued";
        for (topic, source) in
            [("skep.turn.done", "shop"), (batch, "shop"), ("order.paid", HOST_SOURCE), ("a b", "shop")]
        {
            assert_eq!(event(topic, source).check().expect_err(topic).code(), "invalid_event");
        }
        let long = Event { id: Some("x".repeat(129)), ..event("a", "shop") };
        assert!(long.check().expect_err("too long").to_string().contains("1 to 128"));
    }

    #[test]
    fn data_is_bounded() {
        let large = Json::from(Value::String("x".repeat(MAX_DATA_BYTES)));
        assert!(encode_data(Some(&large)).expect_err("too large").contains("are allowed"));
        assert_eq!(encode_data(None), Ok(None));
    }
}
