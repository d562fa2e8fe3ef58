//! The errors of a generation. Every variant implies what the caller can do next: wait, shorten the prompt,
//! correct a parameter, or abandon the request. The module knows nothing of HTTP statuses or WIT variants; the
//! crates that have them translate.

use skep_model::ModelError;

/// The reason that a generation was refused or broke off.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The queue is full. The estimate is the time until a slot is likely to be free.
    #[error("the engine's queue is full; try again in {retry_after_ms} ms")]
    Busy { retry_after_ms: u32 },
    /// The request could never run: it needs more tokens than the context (or the whole KV cache) holds.
    #[error(
        "{prompt} prompt tokens and {requested} more do not fit the context of {limit} tokens; shorten the prompt or lower max_tokens"
    )]
    ContextOverflow { limit: usize, prompt: usize, requested: usize },
    /// A parameter has an invalid value.
    #[error("`{parameter}`: {message}")]
    InvalidRequest { parameter: String, message: String },
    /// A schema, regular expression or grammar cannot be enforced. `parameter` is the parameter that carried
    /// it; the message names the keyword and its location.
    #[error("`{parameter}` cannot be enforced: {message}")]
    Constraint { parameter: String, message: String },
    /// No engine serves a model of this name.
    #[error("no model is called `{name}`; available models: {}", listed(known))]
    ModelUnknown { name: String, known: Vec<String> },
    /// The model is being loaded, and the request did not wait any longer.
    #[error("the model {name} is being loaded ({progress}); try again in {retry_after_ms} ms")]
    ModelLoading { name: String, retry_after_ms: u32, progress: String },
    /// The model is not loaded, and its last load failed or nobody has asked for one.
    #[error("the model {name} is not loaded: {why}")]
    ModelUnloaded { name: String, why: String },
    /// The masks allowed output that the schema does not, and generating it again did not help.
    #[error(
        "{place} does not satisfy its schema: {reason}; {rolled_back} tokens were rolled back and regenerated without \
         success. Loosen this keyword, or retry with another prompt or seed"
    )]
    SchemaUnsatisfied { place: String, reason: String, rolled_back: u32 },
    /// Constrained output was cut off before it was complete.
    #[error("the output was cut off before it was complete; raise max_tokens")]
    Truncated,
    #[error("the request was cancelled")]
    Cancelled,
    #[error("the deadline passed before the output was complete")]
    DeadlineExceeded,
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// Another server, which computes the model, did not answer as it should have.
    #[error("the upstream {upstream} {}: {message}", fault.verb())]
    Upstream { upstream: String, fault: UpstreamFault, message: String },
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine could not continue this request; later requests may work.
    #[error("the generation failed: {0}")]
    Failed(String),
}

/// The fault in an upstream's answer, which decides what may be tried next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamFault {
    /// It cannot be reached, fails, or takes too long to begin; another model may answer.
    Unavailable,
    /// It is busy at the moment; another model may answer.
    Busy { retry_after_ms: u32 },
    /// It refuses the request, which would be refused again.
    Refused,
    /// The answer was cut off after a part of it had been sent.
    CutOff,
    /// The answer does not follow the upstream's protocol.
    Malformed,
}

impl UpstreamFault {
    fn verb(self) -> &'static str {
        match self {
            UpstreamFault::Unavailable => "is not available",
            UpstreamFault::Busy { .. } => "is busy",
            UpstreamFault::Refused => "refused the request",
            UpstreamFault::CutOff => "broke off its answer",
            UpstreamFault::Malformed => "sent an answer that cannot be read",
        }
    }
}

impl EngineError {
    /// Returns the error's code, which is stable, for programs and traces.
    pub fn code(&self) -> &'static str {
        match self {
            EngineError::Busy { .. } => "busy",
            EngineError::ContextOverflow { .. } => "context_overflow",
            EngineError::InvalidRequest { .. } => "invalid_request",
            EngineError::Constraint { .. } => "schema_invalid",
            EngineError::SchemaUnsatisfied { .. } => "schema_unsatisfied",
            EngineError::ModelUnknown { .. } => "model_unknown",
            EngineError::ModelLoading { .. } => "model_loading",
            EngineError::ModelUnloaded { .. } => "model_unloaded",
            EngineError::Truncated => "truncated",
            EngineError::Cancelled => "cancelled",
            EngineError::DeadlineExceeded => "deadline_exceeded",
            EngineError::ShuttingDown => "shutting_down",
            EngineError::Upstream { fault, .. } => match fault {
                UpstreamFault::Unavailable => "upstream_unavailable",
                UpstreamFault::Busy { .. } => "busy",
                UpstreamFault::Refused => "upstream_refused",
                UpstreamFault::CutOff => "upstream_cut_off",
                UpstreamFault::Malformed => "upstream_malformed",
            },
            EngineError::Model(_) | EngineError::Failed(_) => "engine_failed",
        }
    }

    /// Returns the error of a request whose executor has failed and is started again: that of a load.
    pub(crate) fn restarting(model: &str, fault: &str, retry_after_ms: u32) -> Self {
        let progress = format!("again, because its device failed: {fault}");
        EngineError::ModelLoading { name: model.to_owned(), retry_after_ms, progress }
    }

    pub(crate) fn invalid(parameter: &str, message: impl Into<String>) -> Self {
        EngineError::InvalidRequest { parameter: parameter.to_string(), message: message.into() }
    }
}

/// Returns names for people.
fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
