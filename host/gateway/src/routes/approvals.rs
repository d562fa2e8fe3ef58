//! `/v1/approvals`: tool calls that wait for a person's approval.

use super::page_limit;
use crate::{ApiError, Gateway, access::Details, body::JsonBody, caller::Caller};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use skep_api::{Approval, ApprovalList, Decide, Decision, marker};
use skep_runtime::Json as RawJson;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Lists the calls of the caller's tenant that wait for approval, oldest first.
///
/// An admin sees those of all tenants, because admins decide.
#[utoipa::path(get, path = "/v1/approvals", tag = "approvals", operation_id = "list_approvals", params(ListQuery), responses(
    (status = 200, description = "The calls that wait.", body = ApprovalList),
))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<Json<ApprovalList<RawJson>>, ApiError> {
    let tenant = (!caller.is_admin()).then_some(&caller.tenant);
    let approvals = gateway.host.approvals(tenant, page_limit(query.limit)?).await?;
    Ok(Json(ApprovalList::new(approvals.into_iter().map(|one| described(one, &caller, None)))))
}

/// Records a decision about a call.
#[utoipa::path(post, path = "/v1/approvals/{id}", tag = "approvals", operation_id = "decide_approval",
    params(("id" = String, Path, description = "Id of the call")),
    request_body = Decide,
    responses(
        (status = 200, description = "The call with the decision.", body = Approval),
        (status = 404, description = "`approval_not_found`"),
        (status = 409, description = "A decision has already been made, or the time for it is over: `approval_decided`."),
    ))]
pub(crate) async fn decide(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
    JsonBody(body): JsonBody<Decide>,
) -> Result<(Extension<Details>, Json<Approval<RawJson>>), ApiError> {
    let missing =
        || ApiError::parameter("decision", "`decision` is missing; it must be \"approve\" or \"deny\"");
    let decision = body.decision.ok_or_else(missing)?;
    let approve = decision == Decision::Approve;
    let approval = gateway.host.decide(&id, approve, body.reason, &caller.name()).await?;
    let skep_runtime::Approval { agent, session, turn_id, tool, .. } = &approval;
    let details =
        format!("decision={} agent={agent} session={session} turn={turn_id} tool={tool}", decision.as_str());
    Ok((Extension(Details(details)), Json(described(approval, &caller, Some(decision)))))
}

fn described(
    approval: skep_runtime::Approval,
    caller: &Caller,
    decision: Option<Decision>,
) -> Approval<RawJson> {
    Approval {
        object: marker::Approval,
        id: approval.id,
        agent: approval.agent,
        session: caller.name_of(&approval.session),
        turn_id: approval.turn_id,
        tool: approval.tool,
        arguments: approval.arguments,
        created_at_ms: approval.created_at_ms,
        expires_at_ms: approval.expires_at_ms,
        decision,
    }
}
