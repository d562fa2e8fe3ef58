//! Names of agents and sessions, as callers give them.
//!
//! A value of these types has been validated, so code that receives one does not validate it again.

use crate::{RuntimeError, access};
use serde::{Deserialize, Serialize};
use std::fmt;

const AGENT_NAME_RULE: &str =
    "an agent's name has 1 to 64 of the characters a-z, 0-9 and -, and starts with a letter";
const SESSION_ID_RULE: &str =
    "a session's id has 1 to 128 visible ASCII characters without /, and is neither . nor ..";

/// The name of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AgentName(String);

/// The host's id of a session, unique within its agent. It may be prefixed with the owning tenant and a slash.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(String);

impl AgentName {
    pub fn new(name: &str) -> Result<Self, RuntimeError> {
        let valid = (1..=64).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if valid { Ok(Self(name.to_owned())) } else { Err(invalid("agent name", name, AGENT_NAME_RULE)) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SessionId {
    pub fn new(id: &str) -> Result<Self, RuntimeError> {
        let (tenant, plain) = id.split_once('/').map_or((None, id), |(tenant, plain)| (Some(tenant), plain));
        let valid = tenant.is_none_or(access::is_prefix)
            && (1..=128).contains(&plain.len())
            && plain.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
            // In a URL path these have a special meaning, and most clients normalize them away.
            && !matches!(plain, "." | "..");
        if valid { Ok(Self(id.to_owned())) } else { Err(invalid_session(id)) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for AgentName {
    type Error = RuntimeError;
    fn try_from(name: String) -> Result<Self, RuntimeError> {
        Self::new(&name)
    }
}

impl From<AgentName> for String {
    fn from(name: AgentName) -> Self {
        name.0
    }
}

impl fmt::Display for AgentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl SessionId {
    /// Parses an id without a tenant, as clients and manifests write it.
    pub(crate) fn plain(id: &str) -> Result<Self, RuntimeError> {
        if id.contains('/') { Err(invalid_session(id)) } else { Self::new(id) }
    }
}

pub(crate) fn invalid_session(id: &str) -> RuntimeError {
    invalid("session id", id, SESSION_ID_RULE)
}

/// Builds the error for an invalid name. The value is truncated so that a hostile name cannot fill a log.
fn invalid(kind: &'static str, value: &str, rule: &'static str) -> RuntimeError {
    RuntimeError::InvalidName { kind, value: value.chars().take(80).collect(), rule }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validates_agent_names() {
        for good in ["a", "concierge", "a-1", &"a".repeat(64)] {
            assert_eq!(AgentName::new(good).expect(good).as_str(), good);
        }
        for bad in ["", "A", "1a", "-a", "a_b", "a b", "a/b", "ä", &"a".repeat(65)] {
            assert_eq!(AgentName::new(bad).expect_err(bad).code(), "invalid_name");
        }
    }

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
