//! `[ai]` in `skep.toml`: settings of the Workers AI routes.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::Deserialize;
use skep_runtime::{AGENT_MODEL, did_you_mean};

use crate::model_options::ModelOptions;
use crate::server_options::ServerOptions;
use crate::upstreams::{RemoteOptions, UpstreamConfig};

/// The section `[ai]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AiConfig {
    /// Aliases of models: the name that clients use → the name on this host.
    pub models: BTreeMap<String, String>,
}

impl AiConfig {
    /// Adds the aliases.
    pub(super) fn apply(&self, options: &mut ServerOptions) {
        options.model_names.extend(self.models.clone());
    }

    /// Checks that each name means something that a host with these options serves: a model or an alias of its own, a model
    /// of an upstream, a route, or an agent.
    pub fn check(&self, options: &ServerOptions) -> Result<()> {
        // Another host of the cluster may have the model.
        if options.cluster.enabled {
            return Ok(());
        }
        let local = options.local_models();
        // A model that cannot be found is reported when it is resolved.
        let names: Option<Vec<String>> = local.iter().map(ModelOptions::served_name).collect();
        let Some(mut served) = names else { return Ok(()) };
        let RemoteOptions { upstreams, routes } = &options.remote;
        served.extend(upstreams.iter().flat_map(UpstreamConfig::model_names));
        served.extend(routes.iter().map(|route| route.name.clone()));
        let is_served = |name: &str| {
            let mut aliases = local.iter().flat_map(|model| &model.aliases);
            served.iter().any(|served| served == name) || aliases.any(|alias| alias == name)
        };
        for (alias, name) in &self.models {
            let bare = name.strip_prefix('@').and_then(|name| name.rsplit('/').next()).unwrap_or(name);
            if !is_served(bare) && name != "default" && !name.starts_with(AGENT_MODEL) {
                bail!(
                    "[ai] models: {alias:?} is {name:?}, which this host does not serve{}; it serves {}, and agents as \
                     \"{AGENT_MODEL}NAME\"",
                    did_you_mean(name, served.iter().map(String::as_str)),
                    served.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::model_options::ModelOptions;
    use crate::server_options::ServerOptions;

    #[test]
    fn aliases_must_name_what_the_host_serves() {
        let far = "[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"https://far.example/v1\"\n[[upstream.models]]\n\
                   name = \"big\"\n[[route]]\nname = \"smart\"\n[[route.models]]\nmodel = \"far/big\"\n";
        let check = |models: &str, model: &str| {
            let config = Config::parse(&format!("[ai]\nmodels = {{ {models} }}\n{far}")).expect("valid TOML");
            let mut options = ServerOptions::default();
            config.apply(&mut options).expect("valid settings");
            options.models = vec![ModelOptions::of(model)];
            config.ai.check(&options)
        };
        let dir = tempfile::tempdir().expect("temporary folder");
        let file = dir.path().join("tiny.gguf");
        std::fs::write(&file, b"x").expect("file");
        let tiny = file.to_str().expect("UTF-8");
        for (models, model) in [
            ("\"@cf/a/b\" = \"smollm2-135m\"", "smollm2-135m"),
            ("a = \"@cf/meta/smollm2-135m\"", "smollm2-135m"),
            ("a = \"tiny\", b = \"default\", c = \"agent:echo\"", tiny),
            ("a = \"q4\"", "hf:owner/repo:dir/q4.gguf"),
            ("a = \"repo\"", "hf:owner/repo"),
            ("a = \"far/big\", b = \"smart\"", tiny),
        ] {
            check(models, model).unwrap_or_else(|error| panic!("{models} of {model}: {error}"));
        }
        let error = check("a = \"nope\"", tiny).expect_err("not served").to_string();
        assert!(
            error.starts_with("[ai] models: \"a\" is \"nope\", which this host does not serve"),
            "{error}"
        );
        assert!(error.contains("it serves \"tiny\", \"far/big\", \"smart\""), "{error}");
        let error = check("a = \"far/bug\"", tiny).expect_err("not served").to_string();
        assert!(error.contains("did you mean \"far/big\"?"), "{error}");
    }
}
