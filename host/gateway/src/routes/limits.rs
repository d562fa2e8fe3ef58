//! `/v1/limits`: the limits of a tenant, and how far they are used.

use super::status::limit_status;
use crate::{ApiError, Gateway, caller::Caller, client_address::ClientAddress, rates::RateUse};
use axum::{
    Extension, Json,
    extract::{Query, State},
};
use serde::Deserialize;
use skep_api::{LimitStatus, MoneyLimit, TenantLimits, marker};
use skep_runtime::{ApiKey, Tenant, TenantLoad};
use std::num::NonZeroU32;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsQuery {
    /// The tenant; the default is the caller's own. Only an admin may name another one.
    tenant: Option<String>,
}

/// Shows the active limits of a tenant, and how far each is used on the host that answers.
///
/// `request_burst` takes the place of `requests_per_minute` where the operator has set it. A host that asks for no key counts the
/// requests of each client address separately, and shows those of the caller's. A limit whose `of` is a key is that key's own: the
/// caller's, and for an admin each key of the tenant that has one.
#[utoipa::path(get, path = "/v1/limits", tag = "usage", operation_id = "get_limits", params(LimitsQuery), responses(
    (status = 200, description = "The limits.", body = TenantLimits),
))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    address: Option<Extension<ClientAddress>>,
    Query(query): Query<LimitsQuery>,
) -> Result<Json<TenantLimits>, ApiError> {
    let tenant = caller.tenant(query.tenant.as_deref())?;
    let address = address.map(|Extension(ClientAddress(address))| address);
    let keys = if caller.is_admin() { keys_of(&gateway, &tenant).await? } else { Vec::new() };
    let rates = gateway.options.rates.used(tenant.as_str(), keys, &caller, address);
    let TenantLoad { limits, money } = gateway.host.tenant_load(&tenant);
    let money_per_day = money.map(|(used, limit)| MoneyLimit {
        currency: limit.currency.to_string(),
        used: used.to_string(),
        limit: limit.amount.to_string(),
    });
    Ok(Json(TenantLimits {
        object: marker::Limits,
        tenant: tenant.to_string(),
        data: rates.into_iter().map(rate_status).chain(limits.into_iter().map(limit_status)).collect(),
        money_per_day,
    }))
}

/// Returns the valid keys of a tenant that have a rate of their own.
async fn keys_of(gateway: &Gateway, tenant: &Tenant) -> Result<Vec<(String, NonZeroU32)>, ApiError> {
    let keys = gateway.host.keys().list().await?;
    let now = gateway.host.now_ms();
    let is_valid = |key: &ApiKey| key.revoked_at_ms.is_none() && key.expires_at_ms.is_none_or(|at| at > now);
    let valid = keys.into_iter().filter(|key| key.tenant == *tenant && is_valid(key));
    Ok(valid.filter_map(|key| Some((key.id, key.requests_per_minute?))).collect())
}

fn rate_status(RateUse { name, key, used, limit }: RateUse) -> LimitStatus {
    LimitStatus { name: name.to_owned(), of: key, used: used.into(), limit: limit.into() }
}
