//! Model grants, in the manifest and in the operator's settings.

use serde::{Deserialize, Serialize};

const MAX_BYTES: usize = 256;

/// An entry of `models` under `[grants]`: the name of a model, or `*` for all models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelGrant(String);

impl ModelGrant {
    /// Grants one model by name.
    pub(crate) fn of(model: String) -> Self {
        ModelGrant(model)
    }

    /// Returns the name of the one model that is granted; `None` if all are.
    pub(crate) fn name(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|name| *name != "*")
    }

    /// Returns whether the grant allows a model.
    pub(crate) fn covers(&self, model: &str) -> bool {
        self.0 == "*" || self.0 == model
    }
}

impl TryFrom<String> for ModelGrant {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if (1..=MAX_BYTES).contains(&name.len()) {
            return Ok(ModelGrant(name));
        }
        Err(format!(
            "a model's name has 1 to {MAX_BYTES} bytes, not {}; `*` stands for all models",
            name.len()
        ))
    }
}

impl From<ModelGrant> for String {
    fn from(grant: ModelGrant) -> Self {
        grant.0
    }
}
