//! Names of agents.

use super::invalid;
use crate::RuntimeError;
use serde::{Deserialize, Serialize};
use std::fmt;

const RULE: &str = "an agent's name has 1 to 64 of the characters a-z, 0-9 and -, and starts with a letter";

/// The name of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AgentName(String);

impl AgentName {
    /// Checks a name: 1 to 64 of the characters `a-z`, `0-9` and `-`, the first one a letter.
    pub fn new(name: &str) -> Result<Self, RuntimeError> {
        let valid = (1..=64).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if valid { Ok(Self(name.to_owned())) } else { Err(invalid("agent name", name, RULE)) }
    }

    /// Returns the name as it was written.
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
}
