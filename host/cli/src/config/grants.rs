//! `[grants]` in `skep.toml`: the maximum that agents may be granted.

use serde::Deserialize;
use skep_outbound::Origins;
use skep_runtime::{ModelGrant, RuntimeOptions, ToolGrant};

/// The operator's part of what agents are granted. Anything left out is granted to no agent, except the
/// default model.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrantsConfig {
    /// Models that agents may use, by name; `*` is all. Defaults to the default model.
    pub models: Option<Vec<ModelGrant>>,
    /// Origins that agents may send requests to, such as `https://api.example.com`; `*` is everywhere.
    pub hosts: Origins,
    /// Tools of other agents and of servers that agents may call, such as `agent:orders/find_order`,
    /// `mcp:files/*` or `agent:*/*`.
    pub tools: Vec<ToolGrant>,
}

impl GrantsConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut RuntimeOptions) {
        options.granted_models.clone_from(&self.models);
        options.granted_hosts.clone_from(&self.hosts);
        options.granted_tools.clone_from(&self.tools);
    }
}

#[cfg(test)]
mod tests {
    use crate::{config::Config, server_options::ServerOptions};

    #[test]
    fn granted_hosts_come_from_the_file_and_default_to_none() {
        let applied = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).expect("valid").apply(&mut options).expect("in range");
            options.runtime.granted_hosts.patterns().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(applied("").is_empty());
        assert_eq!(applied("[grants]\nhosts = [\"https://*.Example.com\"]\n"), ["https://*.example.com"]);
        for (text, expected) in [
            ("[grants]\nhosts = [\"example.com\"]\n", "\"example.com\" is not a valid origin"),
            ("[grants]\nhost = []\n", "did you mean `hosts`?"),
        ] {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn granted_models_come_from_the_file_and_default_to_the_default_model() {
        let applied = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).expect("valid").apply(&mut options).expect("in range");
            let granted = options.runtime.granted_models?;
            Some(granted.into_iter().map(String::from).collect::<Vec<_>>())
        };
        assert_eq!(applied(""), None);
        assert_eq!(applied("[grants]\nmodels = []\n"), Some(Vec::new()));
        assert_eq!(applied("[grants]\nmodels = [\"a\", \"*\"]\n"), Some(vec!["a".into(), "*".into()]));
        let error = Config::parse("[grants]\nmodels = [\"\"]\n").expect_err("no name").to_string();
        assert!(error.contains("a model's name has 1 to 256 bytes"), "{error}");
    }

    #[test]
    fn granted_tools_come_from_the_file_and_default_to_none() {
        let applied = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).expect("valid").apply(&mut options).expect("in range");
            options.runtime.granted_tools.into_iter().map(String::from).collect::<Vec<_>>()
        };
        assert!(applied("").is_empty());
        assert_eq!(
            applied("[grants]\ntools = [\"agent:*/*\", \"mcp:files/read\"]\n"),
            ["agent:*/*", "mcp:files/read"]
        );
        let error = Config::parse("[grants]\ntools = [\"orders\"]\n").expect_err("no tool").to_string();
        assert!(error.contains("\"orders\" is not a valid tool name"), "{error}");
    }
}
