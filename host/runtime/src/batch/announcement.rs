//! `cf.workersAi.model.batch.*`: the events that announce the start and the end of a batch.

use super::queue::is_response;
use crate::{
    Json,
    event::{HOST_SOURCE, Outbox, encode_data},
};
use serde_json::{Value, json};
use skep_store::NewEvent;

/// The state of a batch that an event announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Announcement {
    Queued,
    /// At least one of the items was answered.
    Succeeded,
    Failed {
        cancelled: bool,
    },
}

/// Identifies a batch.
pub(super) struct BatchName<'a> {
    pub(super) id: &'a str,
    pub(super) model: &'a str,
    pub(super) principal: &'a str,
}

impl Announcement {
    fn name(self) -> &'static str {
        match self {
            Announcement::Queued => "queued",
            Announcement::Succeeded => "succeeded",
            Announcement::Failed { .. } => "failed",
        }
    }

    /// Returns the event, if anyone subscribes to it.
    pub(super) fn event(self, outbox: &Outbox, batch: &BatchName<'_>, at_ms: u64) -> Option<NewEvent> {
        let topic = format!("cf.workersAi.model.batch.{}", self.name());
        if is_response(batch.id) || !outbox.router.takes(&topic) {
            return None;
        }
        let mut payload = json!({"requestId": batch.id});
        if let Announcement::Failed { cancelled } = self {
            let (message, internal, http) = match cancelled {
                true => ("the batch was cancelled", 3008, 408),
                false => ("no request of the batch succeeded; the results give the reasons", 500, 500),
            };
            payload["message"] = json!(message);
            payload["internalCode"] = json!(internal);
            payload["httpCode"] = json!(http);
        }
        let data = json!({
            "type": topic,
            "source": {"type": "workersAi.model", "modelName": batch.model},
            "payload": payload,
            "metadata": {"eventSchemaVersion": 1, "eventTimestamp": timestamp(at_ms)},
        });
        let data = Json::from(data);
        // Each state of a batch is announced once.
        let id = format!("{}-{}", batch.id, self.name());
        let deliveries = outbox.router.route(batch.principal, &id, &topic, Some(&data));
        Some(NewEvent {
            source: HOST_SOURCE.to_owned(),
            id,
            topic,
            data: encode_data(Some(&data)).ok()?,
            principal: batch.principal.to_owned(),
            hops: 1,
            at_ms,
            deliveries,
        })
    }
}

fn timestamp(at_ms: u64) -> Value {
    let time = i64::try_from(at_ms).ok().and_then(|at_ms| jiff::Timestamp::from_millisecond(at_ms).ok());
    time.map_or(Value::Null, |time| Value::from(time.to_string()))
}
