//! `/v1/approvals`: tool calls that wait for a person's approval.

use super::page_limit;
use crate::{ApiError, Gateway, access::Details, body::JsonBody, caller::Caller};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::Approval;

#[derive(Deserialize)]
pub(crate) struct ListQuery {
    limit: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecisionBody {
    /// The required decision. It is optional here so that the error for a missing one lists the values.
    decision: Option<DecisionWord>,
    reason: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DecisionWord {
    Approve,
    Deny,
}

/// Lists the approvals of the caller's tenant. An admin sees those of all tenants, because admins decide.
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<Json<Value>, ApiError> {
    let tenant = (!caller.is_admin()).then_some(&caller.tenant);
    let approvals = gateway.host.approvals(tenant, page_limit(query.limit)?).await?;
    let approvals: Vec<Value> = approvals.iter().map(|one| approval_json(one, &caller)).collect();
    Ok(Json(json!({"object": "list", "data": approvals})))
}

/// Records a decision; 409 if a decision has already been made or the approval has expired.
pub(crate) async fn decide(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<DecisionBody>,
) -> Result<(Extension<Details>, Json<Value>), ApiError> {
    let missing =
        || ApiError::parameter("decision", "`decision` is missing; it must be \"approve\" or \"deny\"");
    let approve = body.decision.ok_or_else(missing)? == DecisionWord::Approve;
    let approval = gateway.host.decide(&id, approve, body.reason, &caller.name()).await?;
    let mut value = approval_json(&approval, &caller);
    let decision = if approve { "approve" } else { "deny" };
    value["decision"] = json!(decision);
    let Approval { agent, session, turn_id, tool, .. } = &approval;
    let details = format!("decision={decision} agent={agent} session={session} turn={turn_id} tool={tool}");
    Ok((Extension(Details(details)), Json(value)))
}

fn approval_json(approval: &Approval, caller: &Caller) -> Value {
    json!({
        "object": "approval",
        "id": approval.id,
        "agent": approval.agent,
        "session": caller.name_of(&approval.session),
        "turn_id": approval.turn_id,
        "tool": approval.tool,
        "arguments": approval.arguments,
        "created_at_ms": approval.created_at_ms,
        "expires_at_ms": approval.expires_at_ms,
    })
}
