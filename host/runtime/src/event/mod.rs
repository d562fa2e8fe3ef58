//! Events: topics, subscriptions, limits and deliveries.
//!
//! The recipients of an event are determined when it is written: its deliveries are rows in the
//! same transaction as its cause (a request, a turn's commit, a turn's failure). From then on
//! `courier` delivers it at least once.

mod dead_letter;
mod outbox;
mod router;
mod session_template;
mod subscription;
mod summary;
pub(crate) mod topic;
pub(crate) mod turn_events;

pub use dead_letter::{DeadLetter, DeadLetterTarget};
pub(crate) use outbox::{MAX_WAITING_DELIVERIES, Outbox};
pub(crate) use router::EventRouter;
pub use session_template::SessionTemplate;
pub use skep_store::WebhookTry;
pub use subscription::NewWebhook;
pub use summary::EventSummary;
pub use topic::TopicPattern;

use crate::{Json, RuntimeError, Tenant};
use serde::{Deserialize, Serialize};

/// Maximum size of an event's data.
pub(crate) const MAX_DATA_BYTES: usize = 256 << 10;
/// Maximum size of an event's id, and of its source.
const MAX_ID_BYTES: usize = 128;
/// Maximum length of a chain of events in which each causes the next. A longer chain is a storm of
/// agents that answer each other forever.
pub(crate) const MAX_HOPS: u32 = 8;
/// Source of the topics that start with `skep.`. Only the host writes such events, in the transactions of their causes.
pub const HOST_SOURCE: &str = "skep";
/// Prefix of a source that is an agent, followed by the agent's name.
pub(crate) const AGENT_SOURCE: &str = "agent:";

/// An event trigger of a manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventTrigger {
    /// The topics that trigger, such as `order.*`.
    pub topic: TopicPattern,
    /// The session that handles the event, such as `{data.order_id}`.
    pub session: SessionTemplate,
}

/// An event as it is published to the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The id, unique for the source. `None` generates one.
    pub id: Option<String>,
    /// The publisher. A source that starts with the name of a tenant and `/` belongs to that tenant.
    pub source: String,
    pub topic: String,
    pub data: Option<Json>,
    /// When the event happened. `None` means now.
    pub at_ms: Option<u64>,
    /// The tenant on whose behalf the event is delivered.
    pub principal: String,
}

/// The result of publishing an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedEvent {
    pub id: String,
    /// Whether the same event was published before, so that nothing was done.
    pub is_known: bool,
    /// Number of sessions and webhooks that receive the event.
    pub deliveries: usize,
}

impl Event {
    pub(crate) fn check(&self) -> Result<(), RuntimeError> {
        let invalid = |message: String| Err(RuntimeError::InvalidEvent { message });
        topic::check(&self.topic).map_err(|message| RuntimeError::InvalidEvent { message })?;
        if self.source == HOST_SOURCE {
            return invalid(format!("source {:?}: it is reserved for the host; choose another", self.source));
        }
        if topic::is_reserved(&self.topic) {
            return invalid(format!(
                "topic {:?} of source {:?}: topics that start with `skep.` or `cf.workersAi.` are reserved for the host; \
                 choose another",
                self.topic, self.source
            ));
        }
        if self.source.starts_with(AGENT_SOURCE) {
            return invalid(format!(
                "source {:?}: sources that start with `agent:` are reserved for agents",
                self.source
            ));
        }
        // Ids are unique within a source, and a tenant must not be able to use up those of another one.
        if let Some((tenant, _)) = self.source.split_once('/')
            && tenant != self.principal
            && Tenant::new(tenant).is_ok()
        {
            return invalid(format!(
                "source {:?}: sources that start with `{tenant}/` are reserved for the tenant of that name; choose another, \
                 such as \"/{}\"",
                self.source, self.source
            ));
        }
        for (name, value) in [("id", self.id.as_deref()), ("source", Some(self.source.as_str()))] {
            let Some(value) = value else { continue };
            if !(1..=MAX_ID_BYTES).contains(&value.len()) || value.chars().any(char::is_control) {
                return invalid(format!(
                    "the {name} of an event must have 1 to {MAX_ID_BYTES} bytes without control characters"
                ));
            }
        }
        Ok(())
    }
}

/// Parses an RFC 3339 time into milliseconds since 1970-01-01 UTC.
pub fn unix_ms(time: &str) -> Option<u64> {
    let time: jiff::Timestamp = time.parse().ok()?;
    u64::try_from(time.as_millisecond()).ok()
}

/// Checks the size of an event's data.
pub(crate) fn check_data(data: Option<&Json>) -> Result<(), String> {
    match data.map_or(0, |data| data.get().len()) {
        size if size > MAX_DATA_BYTES => {
            Err(format!("the data of an event has {size} bytes; at most {MAX_DATA_BYTES} are allowed"))
        }
        _ => Ok(()),
    }
}

/// Encodes the data of an event for the store, after checking its size.
pub(crate) fn encode_data(data: Option<&Json>) -> Result<Option<Vec<u8>>, String> {
    check_data(data)?;
    Ok(data.map(|data| data.get().to_owned().into_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

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
    fn the_topics_and_the_source_of_the_host_are_reserved() {
        event("order.paid", "shop").check().expect("a client's");
        let batch = "cf.workersAi.model.batch.queued";
        for (topic, source) in [
            ("skep.turn.done", "shop"),
            (batch, "shop"),
            ("order.paid", HOST_SOURCE),
            ("skep.turn.done", HOST_SOURCE),
            (batch, HOST_SOURCE),
            ("a b", "shop"),
        ] {
            assert_eq!(event(topic, source).check().expect_err(topic).code(), "invalid_event");
        }
        let long = Event { id: Some("x".repeat(129)), ..event("a", "shop") };
        assert!(long.check().expect_err("too long").to_string().contains("1 to 128"));
    }

    #[test]
    fn no_tenant_publishes_under_a_source_of_another_one() {
        let of = |principal: &str, source: &str| Event { principal: principal.into(), ..event("a", source) };
        for (principal, source) in [("local", "acme/http"), ("rival", "acme/http"), ("acme", "local/http")] {
            let refused = of(principal, source).check().expect_err(source);
            assert_eq!(refused.code(), "invalid_event");
            assert!(refused.to_string().contains("reserved for the tenant"), "{refused}");
        }
        for (principal, source) in [
            ("acme", "acme/http"),
            ("local", "local/http"),
            ("local", "acme"),
            ("local", "/acme/http"),
            ("local", "https://acme.example/orders"),
            ("local", "Acme/http"),
        ] {
            of(principal, source).check().expect(source);
        }
    }

    #[test]
    fn data_is_bounded() {
        let large = Json::from(Value::String("x".repeat(MAX_DATA_BYTES)));
        assert!(encode_data(Some(&large)).expect_err("too large").contains("are allowed"));
        assert_eq!(encode_data(None), Ok(None));
    }
}
