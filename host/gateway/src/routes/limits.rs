//! `/v1/limits`: the limits of a tenant, and how far they are used.

use super::status::limit_status;
use crate::{ApiError, Gateway, caller::Caller, client_address::ClientAddress, rates::RateUse};
use axum::{
    Extension, Json,
    extract::{Query, State},
};
use serde::Deserialize;
use skep_api::{LimitStatus, MoneyLimit, TenantLimits, marker};
use skep_runtime::TenantLoad;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsQuery {
    /// The tenant; the default is the caller's own. Only an admin may name another one.
    tenant: Option<String>,
}

/// Shows the limits of a tenant that are in force, and how far each is used on the host that answers.
///
/// `request_burst` takes the place of `requests_per_minute` where the operator has set it. A host that asks for no key counts the
/// requests of each client address separately, and shows those of the caller's. What `of` a limit names a key is that key's own.
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
    let rates = gateway.options.rates.used(tenant.as_str(), &caller, address);
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

fn rate_status(RateUse { name, key, used, limit }: RateUse) -> LimitStatus {
    LimitStatus { name: name.to_owned(), of: key, used: used.into(), limit: limit.into() }
}
