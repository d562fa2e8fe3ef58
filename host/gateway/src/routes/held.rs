//! `/v1/held`: the work that a restored host holds back, and the decision about it.

use crate::{ApiError, Gateway, access::Details, body::JsonBody};
use axum::{Extension, Json, extract::State};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::Held;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecisionBody {
    /// The required decision. It is optional here so that the error for a missing one lists the values.
    decision: Option<Decision>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Decision {
    Resume,
    Drop,
}

pub(crate) async fn show(State(gateway): State<Gateway>) -> Result<Json<Value>, ApiError> {
    Ok(Json(held_json(gateway.host.held().await?)))
}

/// Decides about all held work at once; 409 if nothing is held.
pub(crate) async fn decide(
    State(gateway): State<Gateway>,
    JsonBody(body): JsonBody<DecisionBody>,
) -> Result<(Extension<Details>, Json<Value>), ApiError> {
    let missing =
        || ApiError::parameter("decision", "`decision` is missing; it must be \"resume\" or \"drop\"");
    let (word, held) = match body.decision.ok_or_else(missing)? {
        Decision::Resume => ("resume", gateway.host.resume_held().await?),
        Decision::Drop => ("drop", gateway.host.drop_held().await?),
    };
    let mut value = held_json(Some(held));
    value["decision"] = json!(word);
    let Held { turns, deliveries, schedules, batches, .. } = held;
    let details = format!(
        "decision={word} turns={turns} deliveries={deliveries} schedules={schedules} batches={batches}"
    );
    Ok((Extension(Details(details)), Json(value)))
}

fn held_json(held: Option<Held>) -> Value {
    json!({
        "object": "held",
        "is_restored": held.is_some(),
        "backup_at_ms": held.map(|held| held.backup_at_ms),
        "restored_at_ms": held.map(|held| held.restored_at_ms),
        "turns": held.map_or(0, |held| held.turns),
        "deliveries": held.map_or(0, |held| held.deliveries),
        "schedules": held.map_or(0, |held| held.schedules),
        "batches": held.map_or(0, |held| held.batches),
    })
}
