//! Chooses the agent's export that a turn calls and its arguments, and interprets the result.

use crate::{
    AlarmOrigin, EventOrigin, HttpOrigin, Invocation, Json, Origin, RuntimeError, ToolOrigin, approvals,
    bindings::{alarm_handler, event_handler, handler, tool_handler, types},
    capability::Turn,
    journal::{Identity, Stopped},
    name::plain_session,
};
use skep_engine::EngineError;
use std::{sync::Arc, time::Instant};

/// Maximum size of a reply's text, and separately of its data.
const MAX_REPLY_BYTES: usize = 8 << 20;

/// A call into the guest that runs one turn.
pub(crate) enum Entry {
    Message(handler::Message),
    Alarm(alarm_handler::Alarm),
    Event(event_handler::Event),
    Tool(tool_handler::Invocation),
}

/// The guest's result.
pub(crate) enum Reply {
    /// A reply to a message.
    Said(handler::Reply),
    /// An alarm or an event was handled.
    Handled,
    /// The result of a tool, as JSON.
    Result(String),
    Refused(types::AgentError),
    /// An error from a tool, as text for its caller.
    ToolRefused(String),
}

impl Entry {
    pub(super) fn new(invocation: Invocation, turn: u64, received_at_ms: u64) -> Self {
        let Invocation { session, text, data, origin, .. } = invocation;
        // Uses the session name as its tenant knows it: an agent behaves the same for every tenant.
        let session = plain_session(&session).to_owned();
        let data = data.map(|data| data.get().to_owned());
        let message = |text, data, session, origin| {
            Entry::Message(handler::Message { text, data, session, turn, received_at_ms, origin })
        };
        match origin {
            Origin::Direct => message(text, data, session, handler::Origin::Direct),
            Origin::Chat => message(text, data, session, handler::Origin::Chat),
            Origin::Http(HttpOrigin { method, path, query, parameters, content_type }) => {
                let request = handler::HttpRequest { method, path, query, parameters, content_type };
                message(text, data, session, handler::Origin::Http(request))
            }
            Origin::Alarm(AlarmOrigin { id, name, due_at_ms, attempt, missed }) => {
                Entry::Alarm(alarm_handler::Alarm {
                    id,
                    name,
                    data,
                    session,
                    turn,
                    due_at_ms,
                    received_at_ms,
                    attempt,
                    missed,
                })
            }
            Origin::Event(EventOrigin { id, topic, at_ms, attempt, .. }) => {
                Entry::Event(event_handler::Event {
                    id,
                    topic,
                    data,
                    session,
                    turn,
                    at_ms,
                    received_at_ms,
                    attempt,
                })
            }
            Origin::Tool(ToolOrigin { name, .. }) => Entry::Tool(tool_handler::Invocation {
                name,
                arguments: data.unwrap_or_else(|| "{}".to_owned()),
                session,
                turn,
                received_at_ms,
            }),
        }
    }

    /// Obtains a person's decision on an external tool call, if the tool requires approval. A call
    /// made by another agent has already been approved in that agent's turn.
    pub(super) async fn approved(&self, turn: &Arc<Turn>) -> Result<Result<(), String>, Stopped> {
        let Entry::Tool(tool_handler::Invocation { name, arguments, .. }) = self else { return Ok(Ok(())) };
        if !turn.tools.callers.is_empty() || !turn.needs_approval(name) {
            return Ok(Ok(()));
        }
        approvals::decision(turn, Identity::new("tool.entry", &(name, arguments)), name, arguments).await
    }
}

impl Reply {
    /// Creates the reply of a command from its output.
    pub(crate) fn printed(text: String) -> Self {
        Reply::Said(handler::Reply { text, data: None })
    }

    /// Returns the text and the data of the outcome, or the error that the agent's refusal means
    /// for the caller.
    pub(crate) fn into_outcome(self, deadline: Instant) -> Result<(String, Option<Json>), RuntimeError> {
        match self {
            Reply::Said(reply) => said(reply.text, reply.data),
            Reply::Handled => Ok((String::new(), None)),
            Reply::Result(json) => said(String::new(), Some(json)),
            Reply::Refused(error) => Err(refused(error, deadline)),
            Reply::ToolRefused(message) => Err(RuntimeError::ToolFailed { message }),
        }
    }
}

impl From<Result<handler::Reply, types::AgentError>> for Reply {
    fn from(result: Result<handler::Reply, types::AgentError>) -> Self {
        result.map_or_else(Reply::Refused, Reply::Said)
    }
}

impl From<Result<(), types::AgentError>> for Reply {
    fn from(result: Result<(), types::AgentError>) -> Self {
        result.map_or_else(Reply::Refused, |()| Reply::Handled)
    }
}

impl From<Result<String, String>> for Reply {
    fn from(result: Result<String, String>) -> Self {
        result.map_or_else(Reply::ToolRefused, Reply::Result)
    }
}

fn said(text: String, data: Option<String>) -> Result<(String, Option<Json>), RuntimeError> {
    let bytes = text.len().max(data.as_ref().map_or(0, String::len));
    if bytes > MAX_REPLY_BYTES {
        let message = format!("the reply has {bytes} bytes; at most {MAX_REPLY_BYTES} are allowed");
        return Err(RuntimeError::LimitExceeded { limit: "reply_bytes", message });
    }
    let data = data.map(Json::from_text).transpose();
    let data = data.map_err(|error| RuntimeError::AgentFailed {
        message: format!("the data of the agent's reply is not JSON: {error}"),
    })?;
    Ok((text, data))
}

fn refused(error: types::AgentError, deadline: Instant) -> RuntimeError {
    let failed = |message| RuntimeError::AgentFailed { message };
    match error {
        types::AgentError::InvalidMessage(message) => RuntimeError::InvalidMessage { message },
        types::AgentError::Failed(message) => failed(message),
        types::AgentError::Inference(error) => match error {
            types::Error::Busy(retry_after_ms) => EngineError::Busy { retry_after_ms }.into(),
            types::Error::Truncated => EngineError::Truncated.into(),
            types::Error::ContextOverflow(limit) => RuntimeError::LimitExceeded {
                limit: "tokens_per_turn or context",
                message: format!(
                    "prompt and output do not fit into {limit} tokens, which are the model's context or the agent's \
                     `tokens_per_turn` under [limits] in agent.toml"
                ),
            },
            types::Error::Cancelled if Instant::now() >= deadline => RuntimeError::DeadlineExceeded,
            types::Error::Cancelled => RuntimeError::Cancelled,
            types::Error::SchemaInvalid(message)
            | types::Error::ModelUnknown(message)
            | types::Error::Denied(message)
            | types::Error::InvalidArgument(message)
            | types::Error::Internal(message) => failed(message),
        },
    }
}
