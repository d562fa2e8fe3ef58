//! Rate limits per minute of tenants, keys and anonymous addresses.
//!
//! Requests are counted when they are received, tokens when models have computed them. So a request is admitted while
//! its tenant has tokens left, and if it uses more, later requests are refused until the excess has been made up. A
//! tenant's limit applies to all its keys together; a key may have a lower limit. Without keys, each client address
//! is counted separately.

mod bucket;
mod limiter;
mod shared;
mod status;

#[cfg(test)]
pub(crate) use limiter::Clock;
pub use limiter::RateLimiter;
pub(crate) use limiter::RateUse;
pub(crate) use status::{RateStatus, Refusal};

use bucket::Rate;
use std::{collections::BTreeMap, num::NonZeroU32};

/// Limits of one tenant. `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantRates {
    /// Requests of all keys of the tenant together.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Requests that may be sent at once. `None` means the requests of one minute.
    pub request_burst: Option<NonZeroU32>,
    /// Prompt tokens that were not cached plus output tokens, of interactive requests.
    pub tokens_per_minute: Option<NonZeroU32>,
}

/// Limits of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateOptions {
    /// Limits of tenants by name.
    pub tenants: BTreeMap<String, TenantRates>,
    /// Limits of all other tenants.
    pub others: TenantRates,
}

impl TenantRates {
    fn requests(&self) -> Option<Rate> {
        let per_minute = self.requests_per_minute?;
        Some(Rate { per_minute, burst: self.request_burst.unwrap_or(per_minute) })
    }

    fn tokens(&self) -> Option<Rate> {
        self.tokens_per_minute.map(Rate::per_minute)
    }
}

impl RateOptions {
    fn of(&self, tenant: &str) -> TenantRates {
        self.tenants.get(tenant).copied().unwrap_or(self.others)
    }
}
