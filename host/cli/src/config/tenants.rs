//! `[tenants.NAME]` of `skep.toml`: how much of the host a tenant may have. `[tenants.default]` is for those that have
//! no section of their own, and for what such a section does not say.

use std::num::NonZeroU32;

use serde::Deserialize;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantConfig {
    /// Requests that invoke something: messages, generations, an agent's own routes. Where no key is asked for, each
    /// client address has as many as the tenant `local`.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens that models compute for it: those it gets, and those of prompts that were not cached.
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Its share of the model beside other tenants that want it too.
    pub weight: Option<NonZeroU32>,
}
