//! `[sessions]` in `skep.toml`: how long the host keeps the sessions of its agents.

use std::time::Duration;

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::number::number;
use crate::server_options::ServerOptions;

/// The section `[sessions]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionsConfig {
    /// Hours after its last turn until a session is deleted; an agent may ask for fewer.
    #[serde(deserialize_with = "number::<0, 876_000, _, _>")]
    pub ttl_h: Option<u32>,
    /// Hours that the answer to an idempotency key is kept.
    #[serde(deserialize_with = "number::<1, 876_000, _, _>")]
    pub idempotency_h: Option<u32>,
    /// Days for which usage reports list sessions one by one; afterwards they are part of their agent's usage.
    #[serde(deserialize_with = "number::<1, 400, _, _>")]
    pub usage_days: Option<u32>,
}

impl SessionsConfig {
    /// Sets the options that the section has.
    pub fn apply(&self, options: &mut ServerOptions) -> Result<()> {
        if let Some(days) = self.usage_days {
            options.runtime.usage_session_days = days;
        }
        if let Some(hours) = self.idempotency_h {
            options.runtime.outcome_retention = Duration::from_secs(u64::from(hours) * 3_600);
        }
        match self.ttl_h {
            Some(0) => bail!("[sessions] ttl_h must be at least 1; leave it out to keep sessions forever"),
            Some(hours) => {
                options.runtime.session_ttl = Some(Duration::from_secs(u64::from(hours) * 3_600));
            }
            None => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn sessions_are_kept_for_the_configured_hours_and_forever_by_default() {
        let apply = |text: &str| {
            let mut options = ServerOptions::default();
            let config = Config::parse(text).expect("valid");
            config.apply(&mut options).map(|()| options.runtime.session_ttl)
        };
        assert_eq!(apply("").expect("no setting"), None);
        assert_eq!(apply("[sessions]\nttl_h = 2\n").expect("in range"), Some(Duration::from_secs(7_200)));
        let mut options = ServerOptions::default();
        Config::parse("[sessions]\nidempotency_h = 3\n")
            .expect("valid")
            .apply(&mut options)
            .expect("in range");
        assert_eq!(options.runtime.outcome_retention, Duration::from_secs(10_800));
        let error = apply("[sessions]\nttl_h = 0\n").expect_err("no time at all").to_string();
        assert!(error.contains("leave it out"), "{error}");
    }
}
