//! `/v1/held`: the work that a restored host holds back, and the decision about it.

use crate::{ApiError, Gateway, access::Details, body::JsonBody};
use axum::{Extension, Json, extract::State};
use skep_api::{DecideHeld, Held, HeldDecision, marker};

/// Shows how much work a restored host holds.
#[utoipa::path(get, path = "/v1/held", tag = "host", operation_id = "get_held", responses(
    (status = 200, description = "The held work.", body = Held),
))]
pub(crate) async fn show(State(gateway): State<Gateway>) -> Result<Json<Held>, ApiError> {
    Ok(Json(held_work(gateway.host.held().await?, None)))
}

/// Decides about all held work at once.
#[utoipa::path(post, path = "/v1/held", tag = "host", operation_id = "decide_held", request_body = DecideHeld, responses(
    (status = 200, description = "The work that was held, and the decision.", body = Held),
    (status = 409, description = "`nothing_held`"),
))]
pub(crate) async fn decide(
    State(gateway): State<Gateway>,
    JsonBody(body): JsonBody<DecideHeld>,
) -> Result<(Extension<Details>, Json<Held>), ApiError> {
    let missing =
        || ApiError::parameter("decision", "`decision` is missing; it must be \"resume\" or \"drop\"");
    let decision = body.decision.ok_or_else(missing)?;
    let held = match decision {
        HeldDecision::Resume => gateway.host.resume_held().await?,
        HeldDecision::Drop => gateway.host.drop_held().await?,
    };
    let held = held_work(Some(held), Some(decision));
    let Held { turns, deliveries, schedules, batches, .. } = held;
    let details = format!(
        "decision={} turns={turns} deliveries={deliveries} schedules={schedules} batches={batches}",
        decision.as_str()
    );
    Ok((Extension(Details(details)), Json(held)))
}

fn held_work(held: Option<skep_runtime::Held>, decision: Option<HeldDecision>) -> Held {
    Held {
        object: marker::Held,
        is_restored: held.is_some(),
        backup_at_ms: held.map(|held| held.backup_at_ms),
        restored_at_ms: held.map(|held| held.restored_at_ms),
        turns: held.map_or(0, |held| held.turns),
        deliveries: held.map_or(0, |held| held.deliveries),
        schedules: held.map_or(0, |held| held.schedules),
        batches: held.map_or(0, |held| held.batches),
        decision,
    }
}
