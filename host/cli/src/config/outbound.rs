//! `[outbound]` in `skep.toml`: HTTP requests of agents.

use serde::Deserialize;
use skep_outbound::AddressRange;
use skep_runtime::RuntimeOptions;

use crate::number::number;

/// The section `[outbound]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutboundConfig {
    /// Addresses that may be connected to although they are not public.
    pub allow_private: Vec<AddressRange>,
    /// Maximum number of requests in flight at the same time.
    #[serde(deserialize_with = "number::<1, 100_000, _, _>")]
    pub max_running: Option<usize>,
}

impl OutboundConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut RuntimeOptions) {
        options.outbound.addresses.allow_private.clone_from(&self.allow_private);
        options.outbound.max_running = self.max_running.unwrap_or(options.outbound.max_running);
    }
}

#[cfg(test)]
mod tests {
    use crate::{config::Config, server_options::ServerOptions};

    #[test]
    fn allowed_addresses_come_from_the_file_and_default_to_none() {
        let applied = |text: &str| {
            let mut options = ServerOptions::default();
            Config::parse(text).expect("valid").apply(&mut options).expect("in range");
            options.runtime.outbound
        };
        assert!(applied("").addresses.allow_private.is_empty());
        let text = "[outbound]\nallow_private = [\"127.0.0.0/8\", \"10.1.2.3:8080\"]\nmax_running = 7\n";
        let said = applied(text);
        let ranges = said.addresses.allow_private.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!((ranges, said.max_running), (vec!["127.0.0.0/8".into(), "10.1.2.3:8080".into()], 7));
        let error = Config::parse("[outbound]\nallow_private = [\"localhost\"]\n").expect_err("not a range");
        assert!(error.to_string().contains("\"localhost\" is not a valid address range"), "{error}");
    }
}
