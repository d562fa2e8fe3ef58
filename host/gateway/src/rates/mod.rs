//! How much each tenant, key and anonymous address may ask for in a minute.
//!
//! Requests are counted when they come, tokens when models have computed them: so a request is let through while its tenant
//! has tokens left, and what it takes beyond them is waited for by the next ones. A tenant's limit is for all of its keys
//! together; a key may have a lower one of its own. Where no key is asked for, each client address is counted alone.

mod answer;
mod bucket;
mod limiter;

pub(crate) use answer::Standing;
#[cfg(test)]
pub(crate) use limiter::Clock;
pub use limiter::RateLimiter;

use std::{collections::BTreeMap, num::NonZeroU32};

/// Limits of one tenant. `None`: as many as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantRates {
    pub requests_per_minute: Option<NonZeroU32>,
    /// Requests that may come at once. `None`: all of a minute.
    pub request_burst: Option<NonZeroU32>,
    /// Prompt tokens that were not cached and tokens of outputs, of interactive work.
    pub tokens_per_minute: Option<NonZeroU32>,
}

/// Limits of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateOptions {
    pub tenants: BTreeMap<String, TenantRates>,
    /// Of tenants that are not named.
    pub others: TenantRates,
}

impl RateOptions {
    fn of(&self, tenant: &str) -> TenantRates {
        self.tenants.get(tenant).copied().unwrap_or(self.others)
    }
}
