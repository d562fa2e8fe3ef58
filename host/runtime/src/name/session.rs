//! Ids of sessions.

use super::{invalid, tenant::is_prefix};
use crate::RuntimeError;
use std::fmt;

const RULE: &str = "a session's id has 1 to 128 visible ASCII characters without /, and is neither . nor ..";

/// The host's id of a session, unique within its agent. It may be prefixed with the owning tenant and a slash.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(String);

/// A session of the host.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionKey {
    pub(crate) agent: String,
    pub(crate) session: String,
}

impl SessionId {
    /// Checks an id: 1 to 128 visible ASCII characters, after a tenant and a slash if it has one.
    pub fn new(id: &str) -> Result<Self, RuntimeError> {
        let (tenant, plain) = id.split_once('/').map_or((None, id), |(tenant, plain)| (Some(tenant), plain));
        let valid = tenant.is_none_or(is_prefix)
            && (1..=128).contains(&plain.len())
            && plain.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
            // In a URL path these have a special meaning, and most clients normalize them away.
            && !matches!(plain, "." | "..");
        if valid { Ok(Self(id.to_owned())) } else { Err(invalid_session(id)) }
    }

    /// Returns the id, including its tenant.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Parses an id without a tenant, as clients and manifests write it.
    pub(crate) fn plain(id: &str) -> Result<Self, RuntimeError> {
        if id.contains('/') { Err(invalid_session(id)) } else { Self::new(id) }
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) fn invalid_session(id: &str) -> RuntimeError {
    invalid("session id", id, RULE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validates_session_ids() {
        for good in ["a", "user:42@example.com", "~", "acme/a", "...", ".a", &"x".repeat(128)] {
            assert_eq!(SessionId::new(good).expect(good).as_str(), good);
        }
        for bad in [
            "",
            "A/b",
            "local/b",
            "a/b/c",
            "a/",
            "/b",
            ".",
            "..",
            "acme/..",
            "a b",
            "a\n",
            "é",
            &"x".repeat(129),
        ] {
            assert_eq!(SessionId::new(bad).expect_err(bad).code(), "invalid_name");
        }
    }
}
