//! `[tenants.NAME]` of `skep.toml`: how much of the host a tenant may have. `[tenants.default]` is for those that have
//! no section of their own, and for what such a section does not say.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use skep_runtime::{RuntimeOptions, Tenant};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantConfig {
    /// Tokens that models produce for it on one day of UTC, for its turns and for requests that name a model.
    pub tokens_per_day: Option<NonZeroU32>,
}

/// The section of all tenants without one.
const DEFAULT: &str = "default";

pub(super) fn apply(tenants: &BTreeMap<String, TenantConfig>, options: &mut RuntimeOptions) -> Result<()> {
    for (name, own) in tenants {
        if name != DEFAULT {
            Tenant::new(name).with_context(|| format!("[tenants.{name}]"))?;
        }
        let tokens = own.tokens_per_day.map(|tokens| (name.clone(), tokens.get()));
        options.tenant_tokens_per_day.extend(tokens);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{config::Config, server::ServerOptions};

    #[test]
    fn tenants_have_the_tokens_that_the_file_gives_them() {
        let text =
            "[tenants.default]\ntokens_per_day = 7\n[tenants.acme]\ntokens_per_day = 9\n[tenants.big]\n";
        let mut options = ServerOptions::default();
        Config::parse(text).expect("valid").apply(&mut options).expect("in range");
        let budgets: Vec<_> = options.runtime.tenant_tokens_per_day.into_iter().collect();
        assert_eq!(budgets, [("acme".to_owned(), 9), ("default".to_owned(), 7)]);
    }

    #[test]
    fn what_no_tenant_can_have_is_an_error_that_says_why() {
        for (text, expected) in [
            ("[tenants.Acme]\ntokens_per_day = 1\n", "a tenant's name has 1 to 64"),
            ("[tenants.acme]\ntokens_per_day = 0\n", "nonzero"),
            ("[tenants.acme]\ntoken_per_day = 1\n", "token_per_day"),
        ] {
            let applied = Config::parse(text).and_then(|config| config.apply(&mut ServerOptions::default()));
            let error = format!("{:#}", applied.expect_err(text));
            assert!(error.contains(expected), "{error}");
        }
    }
}
