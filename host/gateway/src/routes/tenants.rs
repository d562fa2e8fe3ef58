//! `/v1/tenants`: lists tenants, and deletes one with everything that belongs to it.

use crate::{ApiError, Gateway, access::Details};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use skep_api::{TenantList, marker};
use skep_runtime::{DeletedTenant, Tenant, TenantRow, TenantRows, TenantUsage};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeleteQuery {
    /// Removes what the tenant has used of models, too. By default it is kept for bills, without the names of sessions.
    #[serde(default)]
    forget_usage: bool,
}

/// Lists the tenants that have valid API keys or sessions.
#[utoipa::path(get, path = "/v1/tenants", tag = "keys", operation_id = "list_tenants", responses(
    (status = 200, description = "The tenants, by name.", body = TenantList),
))]
pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<TenantList>, ApiError> {
    let described = |TenantRow { name, keys, sessions }: TenantRow| skep_api::Tenant {
        object: marker::Tenant,
        name,
        keys,
        sessions,
    };
    Ok(Json(TenantList::new(gateway.host.tenants().await?.into_iter().map(described))))
}

/// Deletes a tenant: its API keys, sessions, batches, files, responses, events, the log of its requests with what was said in
/// them, and its KV pages. Running turns are cancelled. Its limits in `skep.toml` stay, and so does its usage, unless the
/// request says otherwise. The tenant `local` cannot be deleted.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}", tag = "keys", operation_id = "delete_tenant",
    params(("tenant" = String, Path, description = "Name of the tenant"), DeleteQuery),
    responses(
        (status = 200, description = "What was deleted.", body = skep_api::DeletedTenant),
        (status = 404, description = "`tenant_not_found`"),
        (status = 409, description = "Something of it is still in use, or held since a restore: `tenant_in_use`, `held_since_restore`"),
    ))]
pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    Path(tenant): Path<String>,
    Query(query): Query<DeleteQuery>,
) -> Result<(Extension<Details>, Json<skep_api::DeletedTenant>), ApiError> {
    let tenant = Tenant::new(&tenant)?;
    let usage = if query.forget_usage { TenantUsage::Forget } else { TenantUsage::Keep };
    let host = gateway.host.clone();
    let name = tenant.to_string();
    // The deletion continues even if the client disconnects.
    let deleting = tokio::spawn(async move { host.delete_tenant(&tenant, usage).await });
    let deleted = deleting.await.map_err(|error| {
        ApiError::from(skep_runtime::RuntimeError::Internal {
            message: format!("the deletion ended: {error}"),
        })
    })??;
    let DeletedTenant { keys, sessions, rows, kv_pages, usage } = deleted;
    let TenantRows { batches, files, responses, requests, events } = rows;
    let kept = if query.forget_usage { "forgotten" } else { "kept" };
    let details = Details(format!("keys={keys} sessions={sessions} usage={kept}"));
    let deleted = skep_api::DeletedTenant {
        object: marker::DeletedTenant,
        name,
        keys,
        sessions,
        batches,
        files,
        responses,
        events,
        requests,
        kv_pages,
        usage,
    };
    Ok((Extension(details), Json(deleted)))
}
