//! The limits of a tenant.

use crate::{LimitStatus, marker};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The active limits of a tenant, and how far each is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantLimits {
    #[schema(inline)]
    pub object: marker::Limits,
    pub tenant: String,
    pub data: Vec<LimitStatus>,
    /// The tenant's budget for this day in UTC; `null` if it has none.
    #[schema(required)]
    pub money_per_day: Option<MoneyLimit>,
}

/// A budget in money, and how much of it is spent. Amounts are exact decimal numbers, as strings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoneyLimit {
    /// The currency's code, such as `USD`.
    pub currency: String,
    pub used: String,
    pub limit: String,
}
