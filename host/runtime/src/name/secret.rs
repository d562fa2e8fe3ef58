//! Names of secrets.

use super::invalid;
use crate::RuntimeError;
use serde::{Deserialize, Serialize};
use std::fmt;

const RULE: &str = "a secret's name has 1 to 64 of the characters A-Z, 0-9 and _, and starts with a letter";

/// The name of a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SecretName(String);

impl SecretName {
    /// Checks a name: 1 to 64 of the characters `A-Z`, `0-9` and `_`, the first one a letter.
    pub fn new(name: &str) -> Result<Self, RuntimeError> {
        let valid = (1..=64).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
        if valid { Ok(Self(name.to_owned())) } else { Err(invalid("secret name", name, RULE)) }
    }

    /// Returns the name as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for SecretName {
    type Error = RuntimeError;

    fn try_from(name: String) -> Result<Self, RuntimeError> {
        Self::new(&name)
    }
}

impl From<SecretName> for String {
    fn from(name: SecretName) -> Self {
        name.0
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validates_secret_names() {
        for name in ["A", "STRIPE_KEY", "K2"] {
            assert!(SecretName::new(name).is_ok(), "{name}");
        }
        for name in ["", "key", "2K", "_K", "A-B", "A.B", "Ä", &"A".repeat(65)] {
            let error = SecretName::new(name).expect_err(name).to_string();
            assert!(error.contains("A-Z, 0-9 and _"), "{error}");
        }
    }
}
