//! The settings of the log of requests.

use crate::name::setting_of;
use serde::Deserialize;
use std::{collections::BTreeMap, time::Duration};

/// How much is logged of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestLogMode {
    #[default]
    Off,
    /// Everything but prompts and answers.
    Metadata,
    /// The messages and the answer as well, without secrets.
    Full,
}

/// The settings of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLogOptions {
    pub mode: RequestLogMode,
    /// The modes of tenants, by name; `default` applies to all others.
    pub tenants: BTreeMap<String, RequestLogMode>,
    /// Time for which a record is kept.
    pub retention: Duration,
    /// Size of all records. The oldest ones of the tenant that has the most are removed first.
    pub max_bytes: u64,
    /// Size of the messages of one request, and of its answer, that is kept.
    pub body_bytes: usize,
}

impl Default for RequestLogOptions {
    fn default() -> Self {
        RequestLogOptions {
            mode: RequestLogMode::Off,
            tenants: BTreeMap::new(),
            retention: Duration::from_secs(7 * 24 * 3_600),
            max_bytes: 256 << 20,
            body_bytes: 64 << 10,
        }
    }
}

impl RequestLogOptions {
    /// Returns how much is logged of a tenant's requests.
    pub(super) fn mode_of(&self, tenant: &str) -> RequestLogMode {
        setting_of(&self.tenants, tenant).copied().unwrap_or(self.mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_its_own_mode_or_the_default_tenants_or_the_hosts() {
        let mut options = RequestLogOptions { mode: RequestLogMode::Metadata, ..Default::default() };
        options.tenants.insert("acme".into(), RequestLogMode::Off);
        assert_eq!(options.mode_of("acme"), RequestLogMode::Off);
        assert_eq!(options.mode_of("globex"), RequestLogMode::Metadata);
        options.tenants.insert("default".into(), RequestLogMode::Full);
        assert_eq!(options.mode_of("globex"), RequestLogMode::Full);
    }
}
