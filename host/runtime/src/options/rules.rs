//! The operator's settings that can be replaced while the host runs.

use crate::{Limits, ModelGrant, Money, PriceList, RuntimeOptions, ToolGrant};
use skep_engine::PublicPart;
use skep_outbound::Origins;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// The part of [`RuntimeOptions`] that says what agents and tenants may do and what it costs. A turn or a request keeps the
/// rules with which it began.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) granted_models: Option<Vec<ModelGrant>>,
    pub(crate) tenant_models: BTreeMap<String, Vec<ModelGrant>>,
    pub(crate) granted_hosts: Arc<Origins>,
    pub(crate) granted_tools: Vec<ToolGrant>,
    pub(crate) tenant_tokens_per_day: BTreeMap<String, u32>,
    pub(crate) tenant_money_per_day: BTreeMap<String, Money>,
    pub(crate) prices: Arc<PriceList>,
    pub(crate) ceilings: Limits,
    pub(crate) public_prompts: BTreeSet<String>,
}

impl Rules {
    /// Returns the part of an agent's prompts that tenants may share.
    pub(crate) fn public_part(&self, agent: &str) -> PublicPart {
        match self.public_prompts.contains(agent) {
            true => PublicPart::SystemMessage,
            false => PublicPart::Nothing,
        }
    }
}

impl From<&RuntimeOptions> for Rules {
    fn from(options: &RuntimeOptions) -> Self {
        Rules {
            granted_models: options.granted_models.clone(),
            tenant_models: options.tenant_models.clone(),
            granted_hosts: Arc::new(options.granted_hosts.clone()),
            granted_tools: options.granted_tools.clone(),
            tenant_tokens_per_day: options.tenant_tokens_per_day.clone(),
            tenant_money_per_day: options.tenant_money_per_day.clone(),
            prices: Arc::new(options.prices.clone()),
            ceilings: options.ceilings,
            public_prompts: options.public_prompts.clone(),
        }
    }
}
