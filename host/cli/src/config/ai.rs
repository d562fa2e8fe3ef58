//! `[ai]` in `skep.toml`: settings of the Workers AI routes.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::Deserialize;
use skep_runtime::AGENT_MODEL;

use crate::model_options::ModelOptions;
use crate::server_options::ServerOptions;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AiConfig {
    /// Aliases of models: the name that clients use → the name on this host.
    pub models: BTreeMap<String, String>,
}

impl AiConfig {
    pub(super) fn apply(&self, options: &mut ServerOptions) {
        options.model_names.extend(self.models.clone());
    }

    /// Checks that each alias names something that the host serves, once its models are known.
    pub fn check(&self, models: &[ModelOptions]) -> Result<()> {
        // A model that cannot be found is reported when it is resolved.
        let names: Option<Vec<String>> = models.iter().map(ModelOptions::served_name).collect();
        let Some(served) = names else { return Ok(()) };
        let is_served = |name: &str| {
            let mut aliases = models.iter().flat_map(|model| &model.aliases);
            served.iter().any(|served| served == name) || aliases.any(|alias| alias == name)
        };
        for (alias, name) in &self.models {
            let bare = name.strip_prefix('@').and_then(|name| name.rsplit('/').next()).unwrap_or(name);
            if !is_served(bare) && name != "default" && !name.starts_with(AGENT_MODEL) {
                bail!(
                    "[ai] models: {alias:?} is {name:?}, which this host does not serve; it serves {}, and agents as \
                     \"{AGENT_MODEL}NAME\"",
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

    #[test]
    fn aliases_must_name_what_the_host_serves() {
        let check = |models: &str, model: &str| {
            Config::parse(&format!("[ai]\nmodels = {{ {models} }}\n"))
                .expect("a table")
                .ai
                .check(&[ModelOptions::of(model)])
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
        ] {
            check(models, model).unwrap_or_else(|error| panic!("{models} of {model}: {error}"));
        }
        let error = check("a = \"nope\"", tiny).expect_err("not served").to_string();
        assert!(
            error.starts_with("[ai] models: \"a\" is \"nope\", which this host does not serve"),
            "{error}"
        );
        assert!(error.contains("it serves \"tiny\""), "{error}");
    }
}
