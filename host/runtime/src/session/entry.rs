//! Which of the agent's exports a turn calls, with what, and what its answer means.

use crate::{
    AlarmOrigin, EventOrigin, HttpOrigin, Invocation, Json, Origin, RuntimeError, ToolOrigin,
    access::plain_session,
    approvals,
    bindings::{alarm_handler, event_handler, handler, tool_handler, types},
    capability::Turn,
    journal::{Identity, Stopped},
};
use skep_engine::EngineError;
use std::{sync::Arc, time::Instant};

/// Of the text and the data of a reply, each.
const MAX_REPLY_BYTES: usize = 8 << 20;

/// A call of the guest that takes one turn.
pub(crate) enum Entry {
    Message(handler::Message),
    Alarm(alarm_handler::Alarm),
    Event(event_handler::Event),
    Tool(tool_handler::Invocation),
}

/// What the guest gave back.
pub(crate) enum Reply {
    /// To a message.
    Said(handler::Reply),
    /// An alarm or an event was handled.
    Handled,
    /// The result of a tool, as JSON.
    Result(String),
    Refused(types::AgentError),
    /// By a tool, in words for who called it.
    ToolRefused(String),
}

impl Entry {
    pub(super) fn new(invocation: Invocation, turn: u64, received_at_ms: u64) -> Self {
        let Invocation { session, text, data, origin, .. } = invocation;
        // As its tenant calls it: an agent does the same for each of them.
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

    /// A person's word on a call of a tool that came from outside, if the tool needs it. About one that another agent makes,
    /// that agent's turn has asked.
    pub(super) async fn approved(&self, turn: &Arc<Turn>) -> Result<Result<(), String>, Stopped> {
        let Entry::Tool(tool_handler::Invocation { name, arguments, .. }) = self else { return Ok(Ok(())) };
        if !turn.tools.callers.is_empty() || !turn.needs_approval(name) {
            return Ok(Ok(()));
        }
        approvals::decision(turn, Identity::new("tool.entry", &(name, arguments)), name, arguments).await
    }
}

impl Reply {
    /// What a command printed.
    pub(crate) fn printed(text: String) -> Self {
        Reply::Said(handler::Reply { text, data: None })
    }

    /// The text and the data of the outcome, or what the agent's refusal means to its caller.
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
        let message = format!("the reply has {bytes} bytes; {MAX_REPLY_BYTES} are allowed");
        return Err(RuntimeError::LimitExceeded { limit: "reply_bytes", message });
    }
    let data = data.map(Json::from_text).transpose();
    let data = data.map_err(|error| RuntimeError::AgentFailed {
        message: format!("the data of its reply is not JSON: {error}"),
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
