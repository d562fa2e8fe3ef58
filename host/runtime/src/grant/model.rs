//! Model grants, in the manifest and in the operator's settings.

use serde::{Deserialize, Serialize};

const MAX_BYTES: usize = 256;

/// The entry that grants all models of this host, and none of an upstream.
const ALL_LOCAL: &str = "*";

/// An entry of `models` under `[grants]`: the name of a model, `*` for all models that this host computes, or
/// `NAME/*` for all models of the upstream `NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelGrant(String);

impl ModelGrant {
    /// Grants all models that this host computes.
    pub(crate) fn all_local() -> Self {
        ModelGrant(ALL_LOCAL.to_owned())
    }

    /// Grants one model by name.
    pub(crate) fn of(model: String) -> Self {
        ModelGrant(model)
    }

    /// Returns the name of the one model that is granted; `None` if several are.
    pub(crate) fn name(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|name| !name.ends_with('*'))
    }

    /// Returns whether the grant allows a model.
    pub fn covers(&self, model: &str) -> bool {
        match self.0.strip_suffix("/*") {
            Some(upstream) => model.split_once('/').is_some_and(|(of, _)| of == upstream),
            None if self.0 == ALL_LOCAL => !model.contains('/'),
            None => self.0 == model,
        }
    }
}

impl TryFrom<String> for ModelGrant {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if (1..=MAX_BYTES).contains(&name.len()) {
            return Ok(ModelGrant(name));
        }
        Err(format!(
            "a model's name has 1 to {MAX_BYTES} bytes, not {}; `*` means all local models, and `NAME/*` \
             those of an upstream",
            name.len()
        ))
    }
}

impl From<ModelGrant> for String {
    fn from(grant: ModelGrant) -> Self {
        grant.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_never_covers_a_model_of_an_upstream() {
        let grant = |text: &str| ModelGrant::try_from(text.to_owned()).expect("a grant");
        for (granted, model, covers) in [
            ("*", "small", true),
            ("*", "openai/gpt", false),
            ("openai/*", "openai/gpt", true),
            ("openai/*", "openai/org/gpt", true),
            ("openai/*", "other/gpt", false),
            ("openai/*", "openai", false),
            ("openai/gpt", "openai/gpt", true),
            ("openai/gpt", "openai/gpt-2", false),
        ] {
            assert_eq!(grant(granted).covers(model), covers, "{granted} {model}");
        }
    }
}
