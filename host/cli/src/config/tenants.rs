//! `[tenants.NAME]` in `skep.toml`: the limits of a tenant. `[tenants.default]` covers tenants without a
//! section, and settings that a section leaves out.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use skep_gateway::{RateOptions, TenantRates};
use skep_runtime::{ModelGrant, Money, RequestLogMode, Tenant};

use super::parsed;
use crate::number::number;
use crate::server_options::ServerOptions;

/// A section `[tenants.NAME]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantConfig {
    /// Models that may be used for the tenant, by its agents too; `*` is all models of this host. Without it, agents
    /// have their grants, and keys other than an operator's have the models of this host.
    pub models: Option<Vec<ModelGrant>>,
    /// Requests that invoke something: messages, generations, an agent's own routes. If the host requires no
    /// keys, each client address has the limit of the tenant `local`.
    #[serde(deserialize_with = "number::<1, MAX_RATE, _, _>")]
    pub requests_per_minute: Option<NonZeroU32>,
    /// Number of these requests that may come at once; all of them by default.
    #[serde(deserialize_with = "number::<1, MAX_RATE, _, _>")]
    pub request_burst: Option<NonZeroU32>,
    /// Tokens that models compute for the tenant: output tokens, and prompt tokens that were not cached.
    #[serde(deserialize_with = "number::<1, MAX_RATE, _, _>")]
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Tokens that models produce for the tenant in one UTC day, in its turns and for requests that name a
    /// model.
    #[serde(deserialize_with = "number::<1, MAX_RATE, _, _>")]
    pub tokens_per_day: Option<NonZeroU32>,
    /// Money that models may cost for the tenant in one UTC day, such as `1.50 USD`.
    #[serde(deserialize_with = "parsed")]
    pub money_per_day: Option<Money>,
    /// Share of the model, relative to other tenants that want it at the same time.
    #[serde(deserialize_with = "number::<1, MAX_WEIGHT, _, _>")]
    pub weight: Option<NonZeroU32>,
    /// How much of the tenant's requests to models is logged.
    pub requests: Option<RequestLogMode>,
    /// Percentage of the KV pages on disk that the tenant's pages may take.
    #[serde(deserialize_with = "number::<1, 100, _, _>")]
    pub kv_disk_percent: Option<u8>,
}

/// The section of all tenants that have none.
const DEFAULT: &str = "default";
/// Limit of a tenant, or of an address, without a setting, if others than this machine can connect.
const OPEN_REQUESTS_PER_MINUTE: NonZeroU32 = NonZeroU32::new(6_000).unwrap();
/// A larger weight would leave almost nothing to the others.
pub(super) const MAX_WEIGHT: u64 = 1_000;
const MAX_RATE: u64 = u32::MAX as u64;

/// Sets the rates, weights and limits of the tenants.
pub(super) fn apply(tenants: &BTreeMap<String, TenantConfig>, options: &mut ServerOptions) -> Result<()> {
    let default = tenants.get(DEFAULT).cloned().unwrap_or_default();
    let mut rates = RateOptions { others: default.rates(), ..RateOptions::default() };
    let weights = &mut options.weights;
    weights.other_tenants = default.weight;
    options.kv_disk.other_tenants_percent = default.kv_disk_percent;
    for (name, own) in tenants {
        let tokens = own.tokens_per_day.map(|tokens| (name.clone(), tokens.get()));
        options.runtime.tenant_tokens_per_day.extend(tokens);
        let models = own.models.clone().map(|models| (name.clone(), models));
        options.runtime.tenant_models.extend(models);
        let money = own.money_per_day.map(|money| (name.clone(), money));
        options.runtime.tenant_money_per_day.extend(money);
        let requests = own.requests.map(|mode| (name.clone(), mode));
        options.runtime.requests.tenants.extend(requests);
        if name == DEFAULT {
            continue;
        }
        Tenant::new(name).with_context(|| format!("[tenants.{name}]"))?;
        let kv_disk = own.kv_disk_percent.map(|percent| (name.clone(), percent));
        options.kv_disk.tenant_percent.extend(kv_disk);
        rates.tenants.insert(name.clone(), own.or(&default).rates());
        weights.tenants.extend(own.or(&default).weight.map(|weight| (name.clone(), weight)));
    }
    options.rates = rates;
    Ok(())
}

/// Returns the limits of a host that others than this machine can connect to: none of them is unlimited in
/// requests.
pub fn rates_of_open_host(mut rates: RateOptions) -> RateOptions {
    for rates in rates.tenants.values_mut().chain([&mut rates.others]) {
        rates.requests_per_minute.get_or_insert(OPEN_REQUESTS_PER_MINUTE);
    }
    rates
}

impl TenantConfig {
    /// Returns the limits, with those that the section leaves out from the default.
    fn or(&self, default: &TenantConfig) -> Self {
        TenantConfig {
            models: None,
            requests_per_minute: self.requests_per_minute.or(default.requests_per_minute),
            request_burst: self.request_burst.or(default.request_burst),
            tokens_per_minute: self.tokens_per_minute.or(default.tokens_per_minute),
            tokens_per_day: self.tokens_per_day.or(default.tokens_per_day),
            money_per_day: self.money_per_day.or(default.money_per_day),
            weight: self.weight.or(default.weight),
            requests: None,
            kv_disk_percent: None,
        }
    }

    fn rates(&self) -> TenantRates {
        TenantRates {
            requests_per_minute: self.requests_per_minute,
            request_burst: self.request_burst,
            tokens_per_minute: self.tokens_per_minute,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn applied(text: &str) -> Result<ServerOptions> {
        let mut options = ServerOptions::default();
        Config::parse(text)?.apply(&mut options)?;
        Ok(options)
    }

    fn number(number: u32) -> Option<NonZeroU32> {
        NonZeroU32::new(number)
    }

    #[test]
    fn a_tenant_gets_its_own_section_and_the_rest_from_the_default() {
        let text = "[tenants.default]\nrequests_per_minute = 60\nweight = 2\n[tenants.acme]\nweight = 3\n\
                    request_burst = 5\ntokens_per_minute = 9000\n[tenants.big]\nrequests_per_minute = 600\n";
        let ServerOptions { rates, weights, .. } = applied(text).expect("in range");
        assert_eq!(rates.others, TenantRates { requests_per_minute: number(60), ..TenantRates::default() });
        assert_eq!(
            rates.tenants["acme"],
            TenantRates {
                requests_per_minute: number(60),
                request_burst: number(5),
                tokens_per_minute: number(9000)
            }
        );
        assert_eq!(rates.tenants["big"].requests_per_minute, number(600));
        assert_eq!(
            (weights.other_tenants, weights.tenants["acme"], weights.tenants["big"]),
            (number(2), NonZeroU32::new(3).unwrap(), NonZeroU32::new(2).unwrap())
        );
    }

    #[test]
    fn daily_tokens_of_tenants_come_from_the_file() {
        let text =
            "[tenants.default]\ntokens_per_day = 7\n[tenants.acme]\ntokens_per_day = 9\n[tenants.big]\n";
        let budgets = applied(text).expect("in range").runtime.tenant_tokens_per_day;
        let budgets: Vec<_> = budgets.into_iter().collect();
        assert_eq!(budgets, [("acme".to_owned(), 9), ("default".to_owned(), 7)]);
    }

    #[test]
    fn models_of_tenants_come_from_the_file_and_default_to_no_bound() {
        let text = "[tenants.acme]\nmodels = [\"*\"]\n[tenants.big]\nmodels = [\"*\", \"openai/*\"]\n[tenants.other]\n";
        let models = applied(text).expect("in range").runtime.tenant_models;
        let models: Vec<_> = models.into_iter().map(|(name, models)| (name, models.len())).collect();
        assert_eq!(models, [("acme".to_owned(), 1), ("big".to_owned(), 2)]);
    }

    #[test]
    fn daily_money_of_tenants_comes_from_the_file() {
        let text =
            "[tenants.default]\nmoney_per_day = \"1 EUR\"\n[tenants.acme]\nmoney_per_day = \"1.50 USD\"\n";
        let budgets = applied(text).expect("valid").runtime.tenant_money_per_day;
        let budgets: Vec<_> =
            budgets.iter().map(|(name, money)| (name.as_str(), money.to_string())).collect();
        assert_eq!(budgets, [("acme", "1.50 USD".to_owned()), ("default", "1.00 EUR".to_owned())]);
    }

    #[test]
    fn requests_are_unlimited_by_default_unless_others_can_connect() {
        let rates = applied("[tenants.acme]\nweight = 1\n").expect("in range").rates;
        assert_eq!((rates.others, rates.tenants["acme"]), Default::default());
        let open = rates_of_open_host(rates);
        assert_eq!(
            (open.others.requests_per_minute, open.tenants["acme"].requests_per_minute),
            (number(6_000), number(6_000))
        );
        let said = applied("[tenants.default]\nrequests_per_minute = 7\n").expect("in range").rates;
        assert_eq!(rates_of_open_host(said.clone()), said);
    }

    #[test]
    fn invalid_settings_of_a_tenant_are_errors_that_say_why() {
        for (text, expected) in [
            ("[tenants.Acme]\nweight = 1\n", "a tenant's name has 1 to 64"),
            (
                "[tenants.acme]\nweight = 1001\n",
                "[tenants.acme] weight: 1001 is out of range; it must be between 1 and 1000",
            ),
            ("[tenants.acme]\nweight = 0\n", "0 is out of range; it must be between 1 and"),
            ("[tenants.acme]\nrequests_per_minute = 0\n", "0 is out of range; it must be between 1 and"),
            ("[tenants.acme]\ntokens_per_day = 0\n", "0 is out of range; it must be between 1 and"),
            ("[tenants.acme]\nmoney_per_day = \"1.50\"\n", "such as \"1.50 USD\""),
            ("[tenants.acme]\nmoney_per_day = \"0 USD\"\n", "must be more than 0"),
            ("[tenants.acme]\nrequest_per_minute = 1\n", "did you mean `requests_per_minute`?"),
        ] {
            let error = format!("{:#}", applied(text).expect_err(text));
            assert!(error.contains(expected), "{error}");
        }
    }
}
