//! `skep:agent/events`: events that a turn emits. They are published when the turn is committed.

use crate::{
    Json, TopicPattern,
    bindings::events::{EmitError, Host},
    capability::TurnContext,
    event::{AGENT_SOURCE, MAX_HOPS, Outbox, check_data, topic},
    limits::Counted,
};
use skep_store::NewEvent;

/// Maximum total size of the topics and data of a turn's events.
const MAX_BYTES: usize = 4 << 20;

/// The events of one turn.
pub(crate) struct TurnEvents {
    pub(crate) agent: String,
    pub(crate) principal: String,
    pub(crate) turn_id: String,
    /// Number of events in the chain that led to the turn.
    pub(crate) hops: u32,
    pub(crate) grants: Vec<TopicPattern>,
    /// Number of events that the turn may emit.
    pub(crate) limit: u32,
    pub(crate) emitted: Vec<Emitted>,
    /// Total size of the emitted events.
    pub(crate) bytes: usize,
}

pub(crate) struct Emitted {
    topic: String,
    data: Option<Json>,
}

impl Host for TurnContext {
    fn emit(&mut self, topic: String, data: Option<String>) -> wasmtime::Result<Result<(), EmitError>> {
        self.charge(topic.len() + data.as_ref().map_or(0, String::len))?;
        let Some(events) = &mut self.events else {
            let message = "events can be emitted only in a turn, not while the agent describes itself";
            return Ok(Err(EmitError::Denied(message.to_owned())));
        };
        let emitted = events.emit(topic, data);
        if emitted.is_ok() {
            self.used().add(Counted::Events, 1);
        }
        Ok(emitted)
    }
}

impl TurnEvents {
    fn emit(&mut self, topic: String, data: Option<String>) -> Result<(), EmitError> {
        let invalid = EmitError::InvalidArgument;
        topic::check(&topic).map_err(invalid)?;
        if topic::is_reserved(&topic) {
            let message = format!(
                "topic {topic:?}: topics that start with `skep.` or `cf.workersAi.` are reserved for the host"
            );
            return Err(EmitError::Denied(message));
        }
        if !self.grants.iter().any(|pattern| pattern.matches(&topic)) {
            return Err(EmitError::Denied(format!(
                "topic {topic:?} is not granted; add it to `events = [\"{topic}\"]` under [grants] in agent.toml"
            )));
        }
        if self.hops >= MAX_HOPS {
            return Err(EmitError::TooManyHops(MAX_HOPS));
        }
        if self.emitted.len() >= self.limit as usize {
            return Err(EmitError::QuotaExceeded(format!(
                "the turn has emitted {} events, which is its limit; raise `events` under [limits] in agent.toml, up to the \
                 operator's ceiling in skep.toml",
                self.limit
            )));
        }
        let size = topic.len() + data.as_ref().map_or(0, String::len);
        if self.bytes + size > MAX_BYTES {
            return Err(EmitError::QuotaExceeded(format!(
                "the turn has emitted {} bytes of events, and {size} more would exceed the maximum of {MAX_BYTES}; put large \
                 data into the state and emit a reference to it",
                self.bytes
            )));
        }
        let data = data.map(Json::from_text).transpose();
        let data = data.map_err(|error| invalid(format!("the data is not JSON: {error}")))?;
        check_data(data.as_ref()).map_err(invalid)?;
        self.bytes += size;
        self.emitted.push(Emitted { topic, data });
        Ok(())
    }

    /// Returns the events to be written with the turn.
    pub(crate) fn into_rows(self, outbox: &Outbox, at_ms: u64) -> Vec<NewEvent> {
        let TurnEvents { agent, principal, turn_id, hops, emitted, .. } = self;
        let row = |(index, Emitted { topic, data })| {
            let id = format!("{turn_id}-{}", index + 1);
            let deliveries = outbox.router.route(&principal, &id, &topic, data.as_ref());
            NewEvent {
                source: format!("{AGENT_SOURCE}{agent}"),
                id,
                topic,
                data: data.map(|data| data.get().to_owned().into_bytes()),
                principal: principal.clone(),
                hops: hops + 1,
                at_ms,
                deliveries,
            }
        };
        emitted.into_iter().enumerate().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(hops: u32, limit: u32) -> TurnEvents {
        TurnEvents {
            agent: "a".into(),
            principal: "p".into(),
            turn_id: "t".into(),
            hops,
            grants: vec![TopicPattern::new("order.*").expect("a pattern")],
            limit,
            emitted: Vec::new(),
            bytes: 0,
        }
    }

    fn emit(events: &mut TurnEvents, topic: &str, data: &str) -> Result<(), EmitError> {
        events.emit(topic.to_owned(), Some(data.to_owned()))
    }

    #[test]
    fn only_granted_topics_are_emitted_and_a_denial_names_the_setting() {
        let mut events = events(0, 9);
        emit(&mut events, "order.paid", "{}").expect("granted");
        let denied = emit(&mut events, "bill.sent", "{}").expect_err("not granted");
        assert!(
            matches!(&denied, EmitError::Denied(why) if why.contains("`events = [\"bill.sent\"]` under [grants]"))
        );
        events.grants = vec![TopicPattern::new("skep.*").expect("a pattern")];
        let denied = emit(&mut events, "skep.turn.done", "{}").expect_err("the topic is reserved");
        assert!(matches!(&denied, EmitError::Denied(why) if why.contains("reserved for the host")));
        assert_eq!(events.emitted.len(), 1);
    }

    #[test]
    fn count_size_topics_data_and_hops_are_checked() {
        let mut one = events(0, 1);
        emit(&mut one, "order.paid", "{}").expect("the first");
        let over = emit(&mut one, "order.paid", "{}").expect_err("the second");
        assert!(matches!(&over, EmitError::QuotaExceeded(why) if why.contains("`events` under [limits]")));
        let mut fresh = events(0, 9);
        let long = format!("\"{}\"", "x".repeat(crate::event::MAX_DATA_BYTES));
        for (topic, data, why) in [
            ("order.", "{}", "is not a valid topic"),
            ("order.paid", "{", "not JSON"),
            ("order.paid", &long, "allowed"),
        ] {
            let refused = emit(&mut fresh, topic, data).expect_err(why);
            assert!(
                matches!(&refused, EmitError::InvalidArgument(text) if text.contains(why)),
                "{refused:?}"
            );
        }
        let deep = emit(&mut events(MAX_HOPS, 9), "order.paid", "{}").expect_err("too deep");
        assert_eq!(deep, EmitError::TooManyHops(MAX_HOPS));
        emit(&mut events(MAX_HOPS - 1, 9), "order.paid", "{}").expect("the last hop");
    }

    #[test]
    fn the_total_bytes_of_a_turns_events_are_bounded() {
        let mut many = events(0, 1_000);
        let data = format!("\"{}\"", "x".repeat(200 << 10));
        let refused = (0..1_000).find_map(|_| emit(&mut many, "order.paid", &data).err()).expect("a bound");
        assert!(matches!(&refused, EmitError::QuotaExceeded(why) if why.contains("bytes")), "{refused:?}");
        let held: usize =
            many.emitted.iter().filter_map(|one| one.data.as_ref()).map(|data| data.get().len()).sum();
        assert!(held <= MAX_BYTES && held > MAX_BYTES / 2, "{held}");
        emit(&mut many, "order.paid", "{}").expect("a small event still fits");
    }
}
