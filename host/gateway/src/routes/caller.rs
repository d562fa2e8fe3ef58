//! `/v1/caller`: who the caller is, for a client that offers only what its key may do.

use crate::{Gateway, caller::Caller};
use axum::{Json, extract::State};
use skep_api::{CallerInfo, Role, marker};

/// Shows who the caller is and what its key may do.
#[utoipa::path(get, path = "/v1/caller", tag = "keys", operation_id = "get_caller", responses(
    (status = 200, description = "The caller.", body = CallerInfo),
))]
pub(crate) async fn show(State(gateway): State<Gateway>, caller: Caller) -> Json<CallerInfo> {
    Json(CallerInfo {
        object: marker::Caller,
        tenant: caller.tenant.to_string(),
        role: Role::from(caller.role()),
        agents: caller.agents().map(|agents| agents.iter().map(ToString::to_string).collect()),
        key: caller.key().map(str::to_owned),
        keys_required: gateway.options.access.keys_required,
        reads_bodies: caller.reads_bodies(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    })
}
