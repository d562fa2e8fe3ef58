//! The abilities of a model, for callers that choose one.

/// The abilities of a model. Requests that need one that it lacks are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// Whether the model calls tools.
    pub tools: bool,
    /// Whether answers are held to a JSON Schema.
    pub json_schema: bool,
    /// Whether the model sees images.
    pub images: bool,
    /// Whether the model writes its reasoning apart from its answer, if it is known: of other servers' models and of
    /// one that is not loaded it is not.
    pub reasoning: Option<bool>,
    /// Whether the model reports log-probabilities, and takes biases and ids of tokens.
    pub tokens: bool,
    /// Maximum number of tokens of an answer, if it is less than the context.
    pub max_output: Option<usize>,
}

impl Abilities {
    /// Returns the abilities of a model of this process: constraints make any model follow a schema.
    pub(crate) fn local(reasoning: Option<bool>) -> Self {
        Abilities { tools: true, json_schema: true, images: false, reasoning, tokens: true, max_output: None }
    }

    /// Returns the abilities of a model about which nothing is known.
    pub(crate) fn unknown() -> Self {
        Abilities {
            tools: false,
            json_schema: false,
            images: false,
            reasoning: None,
            tokens: false,
            max_output: None,
        }
    }

    /// Returns the abilities of a choice between two models: those that either has.
    #[must_use]
    pub fn or(self, other: Abilities) -> Self {
        let either = |one: Option<bool>, other: Option<bool>| match (one, other) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        };
        Abilities {
            tools: self.tools || other.tools,
            json_schema: self.json_schema || other.json_schema,
            images: self.images || other.images,
            reasoning: either(self.reasoning, other.reasoning),
            tokens: self.tokens && other.tokens,
            // Known only if both have a bound.
            max_output: self.max_output.zip(other.max_output).map(|(one, other)| one.max(other)),
        }
    }
}
