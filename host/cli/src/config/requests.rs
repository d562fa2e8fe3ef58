//! `[requests]` in `skep.toml`: the log of requests to models.

use std::time::Duration;

use serde::Deserialize;
use skep_runtime::{RequestLogMode, RequestLogOptions};

use crate::number::number;

/// The section `[requests]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RequestsConfig {
    /// How much is logged: off, metadata, or full, which is the messages and answers as well.
    pub log: Option<RequestLogMode>,
    /// Days for which a record is kept.
    #[serde(deserialize_with = "number::<1, 3_650, _, _>")]
    pub retention_days: Option<u32>,
    /// Maximum size of all records; the oldest are removed first.
    #[serde(deserialize_with = "number::<1, 1_048_576, _, _>")]
    pub max_mb: Option<u64>,
    /// Size of the messages of one request, and of its answer, that is kept.
    #[serde(deserialize_with = "number::<1, 1_024, _, _>")]
    pub body_kb: Option<usize>,
}

impl RequestsConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut RequestLogOptions) {
        let days = |days: u32| Duration::from_secs(u64::from(days) * 24 * 3_600);
        options.mode = self.log.unwrap_or(options.mode);
        options.retention = self.retention_days.map_or(options.retention, days);
        options.max_bytes = self.max_mb.map_or(options.max_bytes, |mb| mb << 20);
        options.body_bytes = self.body_kb.map_or(options.body_bytes, |kb| kb << 10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::server_options::ServerOptions;

    #[test]
    fn requests_are_logged_as_the_file_says_and_by_default_not_at_all() {
        let applied = |text: &str| -> anyhow::Result<RequestLogOptions> {
            let mut options = ServerOptions::default();
            Config::parse(text)?.apply(&mut options)?;
            Ok(options.runtime.requests)
        };
        assert_eq!(applied("").expect("no setting"), RequestLogOptions::default());
        assert_eq!(RequestLogOptions::default().mode, RequestLogMode::Off);
        let text = "[requests]\nlog = \"metadata\"\nretention_days = 2\nmax_mb = 3\nbody_kb = 4\n\
                    [tenants.acme]\nrequests = \"full\"\n[tenants.default]\nrequests = \"off\"\n[tenants.x]\n";
        let options = applied(text).expect("valid");
        assert_eq!((options.mode, options.retention.as_secs()), (RequestLogMode::Metadata, 172_800));
        assert_eq!((options.max_bytes, options.body_bytes), (3 << 20, 4 << 10));
        let tenants: Vec<_> = options.tenants.iter().map(|(name, mode)| (name.as_str(), *mode)).collect();
        assert_eq!(tenants, [("acme", RequestLogMode::Full), ("default", RequestLogMode::Off)]);
        for (text, expected) in [
            ("[requests]\nlog = \"all\"\n", "expected one of `off`, `metadata`, `full`"),
            ("[requests]\nretention_days = 0\n", "must be between 1 and 3650"),
            ("[requests]\nmax_mb = 0\n", "must be between 1 and"),
            ("[requests]\nbody_kb = 1025\n", "must be between 1 and 1024"),
            ("[requests]\nretention = 1\n", "did you mean `retention_days`?"),
        ] {
            let error = format!("{:#}", applied(text).expect_err(text));
            assert!(error.contains(expected), "{error}");
        }
    }
}
