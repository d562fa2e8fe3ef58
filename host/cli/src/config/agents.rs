//! `[agents.NAME]` in `skep.toml`: the operator's settings for one agent.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use skep_engine::Weights;
use skep_runtime::AgentName;

use super::tenants::MAX_WEIGHT;
use crate::number::number;

/// A section `[agents.NAME]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentConfig {
    /// Share of the model, relative to other agents of the same tenant that want it at the same time.
    #[serde(deserialize_with = "number::<1, MAX_WEIGHT, _, _>")]
    pub weight: Option<NonZeroU32>,
    /// Whether tenants may share the pages of the agent's system message.
    pub public_prompt: Option<bool>,
}

/// Adds the settings of the agents, and rejects an invalid name.
pub(super) fn apply(
    agents: &BTreeMap<String, AgentConfig>,
    weights: &mut Weights,
    public_prompts: &mut BTreeSet<String>,
) -> Result<()> {
    for (name, AgentConfig { weight, public_prompt }) in agents {
        AgentName::new(name).with_context(|| format!("[agents.{name}]"))?;
        weights.agents.extend(weight.map(|weight| (name.clone(), weight)));
        if *public_prompt == Some(true) {
            public_prompts.insert(name.clone());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, server_options::ServerOptions};

    #[test]
    fn the_prompts_of_an_agent_are_public_only_if_the_file_says_so() {
        let text = "[agents.concierge]\npublic_prompt = true\n[agents.echo]\npublic_prompt = false\n[agents.clerk]\n";
        let mut options = ServerOptions::default();
        Config::parse(text).and_then(|config| config.apply(&mut options)).expect("valid");
        assert_eq!(options.runtime.public_prompts, ["concierge".to_owned()].into());
    }

    #[test]
    fn agent_weights_reach_the_engine() {
        let applied = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).and_then(|config| config.apply(&mut options)).map(|()| options.weights)
        };
        let weights = applied("[agents.concierge]\nweight = 4\n[agents.echo]\n").expect("in range");
        assert_eq!(weights.agents, [("concierge".to_owned(), NonZeroU32::new(4).unwrap())].into());
        for (text, expected) in [
            ("[agents.\"Not a name\"]\n", "[agents.Not a name]"),
            (
                "[agents.echo]\nweight = 2000\n",
                "[agents.echo] weight: 2000 is out of range; it must be between 1 and 1000",
            ),
            ("[agents.echo]\nwieght = 2\n", "did you mean `weight`?"),
        ] {
            let error = format!("{:#}", applied(text).expect_err(text));
            assert!(error.contains(expected), "{error}");
        }
    }
}
