//! The client that waits for a turn, if it can receive notifications and questions while the turn runs.

use serde_json::Value;
use std::{fmt, pin::Pin};

/// The answer that a client is asked for.
pub type Asked<'a> = Pin<Box<dyn Future<Output = Result<Value, ClientError>> + Send + 'a>>;

/// A client that waits for a turn over a connection in both directions. It is gone as soon as it no longer waits.
pub trait TurnClient: fmt::Debug + Send + Sync {
    /// Sends a line that the agent logged. The level is `debug`, `info`, `warn` or `error`.
    fn log(&self, level: &'static str, message: &str);

    /// Sends the progress of the call.
    fn progress(&self, progress: TurnProgress);

    /// Asks the client, and waits for the answer.
    fn ask(&self, question: ClientQuestion) -> Asked<'_>;
}

/// The progress of a call, by the agent's own count.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnProgress {
    pub progress: f64,
    /// The count at the end, if the agent knows it.
    pub total: Option<f64>,
    pub message: Option<String>,
}

/// A question to the client, with the parameters of the Model Context Protocol.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientQuestion {
    /// Asks the person at the client to fill in a form (`elicitation/create`).
    Elicit(Value),
    /// Asks for a completion by the client's model (`sampling/createMessage`).
    Sample(Value),
}

/// The reason why a client gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The question is not valid.
    #[error("{0}")]
    Invalid(String),
    /// The client cannot be asked such questions, or is gone.
    #[error("{0}")]
    Unavailable(String),
    /// The client answered with an error.
    #[error("{0}")]
    Failed(String),
}
