//! Rust bindings for the WIT package `skep:agent`, generated from `wit/`. The generated types are not exported from this
//! crate.

wasmtime::component::bindgen!({
    path: "../../wit/skep-agent",
    inline: "
        package skep:host;
        world host {
            include skep:agent/full-agent@0.1.1;
            include skep:agent/agent-sync@0.1.1;
        }
    ",
    world: "skep:host/host",
    imports: {
        // Schedules are read from the store when a turn first asks for them.
        "skep:agent/schedule": async | trappable,
        // A conversation is read from the store when a turn first opens it.
        "skep:agent/inference.[static]conversation.open": async | trappable,
        "skep:agent/inference.[method]conversation.fork": async | trappable,
        "skep:agent/inference-sync.[static]conversation.open": async | trappable,
        "skep:agent/inference-sync.[method]conversation.fork": async | trappable,
        // These block the guest, but not the host.
        "skep:agent/inference-sync.[method]conversation.compact": async | trappable,
        "skep:agent/inference-sync.[method]conversation.generate": async | trappable,
        "skep:agent/inference-sync.complete": async | trappable,
        default: trappable,
    },
    exports: { default: async | store },
    // Requests of the guest and the host's answers are written to the turn's journal.
    additional_derives: [PartialEq, serde::Serialize, serde::Deserialize],
    with: {
        "skep:agent/inference.conversation": crate::bindings::ConversationHandle,
        "skep:agent/inference-sync.conversation": crate::bindings::ConversationHandle,
    },
});

/// The type of a guest's handle to a conversation. The `capability` module has the conversation itself.
pub enum ConversationHandle {}

pub(crate) use exports::skep::agent::{alarm_handler, event_handler, handler, handler_sync, tool_handler};
pub(crate) use skep::agent::{
    events, http, inference, inference_sync, log, schedule, state, timer, tools, types,
};

impl From<skep_engine::EngineError> for types::Error {
    fn from(error: skep_engine::EngineError) -> Self {
        use skep_engine::{EngineError, UpstreamFault};
        use types::Error;
        match error {
            EngineError::Busy { retry_after_ms } | EngineError::ModelLoading { retry_after_ms, .. } => {
                Error::Busy(retry_after_ms)
            }
            EngineError::ContextOverflow { limit, .. } => {
                Error::ContextOverflow(u32::try_from(limit).unwrap_or(u32::MAX))
            }
            EngineError::InvalidRequest { .. } => Error::InvalidArgument(error.to_string()),
            EngineError::Constraint { .. } | EngineError::SchemaUnsatisfied { .. } => {
                Error::SchemaInvalid(error.to_string())
            }
            EngineError::ModelUnknown { .. } => Error::ModelUnknown(error.to_string()),
            EngineError::Truncated => Error::Truncated,
            EngineError::Upstream { fault: UpstreamFault::Busy { retry_after_ms }, .. } => {
                Error::Busy(retry_after_ms)
            }
            EngineError::Cancelled | EngineError::DeadlineExceeded | EngineError::ShuttingDown => {
                Error::Cancelled
            }
            other => Error::Internal(other.to_string()),
        }
    }
}
