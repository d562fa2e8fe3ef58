//! Deliveries that failed permanently.

use skep_store::{Delivery, Target};

/// A delivery that failed permanently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// Increases over time.
    pub id: i64,
    pub event_id: String,
    pub topic: String,
    pub at_ms: u64,
    pub to: DeadLetterTarget,
    /// Number of attempts that were made.
    pub attempts: u32,
    /// The error of the last attempt.
    pub error: String,
}

/// The receiver that a delivery did not reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeadLetterTarget {
    /// A session of an agent. The session is `None` if the event does not determine one.
    Session { agent: String, session: Option<String> },
    /// A webhook, by id.
    Webhook(String),
}

impl DeadLetter {
    pub(crate) fn of(delivery: Delivery) -> Self {
        let Delivery { key, target, event_id, topic, at_ms, attempt, error, .. } = delivery;
        let to = match target {
            Target::Session { agent, session } => {
                DeadLetterTarget::Session { agent, session: Some(session).filter(|id| !id.is_empty()) }
            }
            Target::Webhook(id) => DeadLetterTarget::Webhook(id),
        };
        DeadLetter {
            id: key.0,
            event_id,
            topic,
            at_ms,
            to,
            attempts: attempt,
            error: error.unwrap_or_default(),
        }
    }
}
