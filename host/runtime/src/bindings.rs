//! Rust types of the WIT package `skep:agent`, generated from the one source in `wit/`. They stay in this crate.

wasmtime::component::bindgen!({
    path: "../../wit/skep-agent",
    inline: "
        package skep:host;
        world host {
            include skep:agent/full-agent@0.1.0;
            include skep:agent/agent-sync@0.1.0;
        }
    ",
    world: "skep:host/host",
    imports: {
        // They are read from the store when a turn first asks.
        "skep:agent/schedule": async | trappable,
        // A conversation is read from the store when a turn first asks.
        "skep:agent/inference.[static]conversation.open": async | trappable,
        "skep:agent/inference.[method]conversation.fork": async | trappable,
        "skep:agent/inference-sync.[static]conversation.open": async | trappable,
        "skep:agent/inference-sync.[method]conversation.fork": async | trappable,
        // The guest stands still during these, the host does not.
        "skep:agent/inference-sync.[method]conversation.compact": async | trappable,
        "skep:agent/inference-sync.[method]conversation.generate": async | trappable,
        "skep:agent/inference-sync.complete": async | trappable,
        default: trappable,
    },
    exports: { default: async | store },
    // What the guest asks for and what it gets is written into the turn's journal.
    additional_derives: [PartialEq, serde::Serialize, serde::Deserialize],
    with: {
        "skep:agent/inference.conversation": crate::capability::inference::Conversation,
        "skep:agent/inference-sync.conversation": crate::capability::inference::Conversation,
    },
});

pub(crate) use exports::skep::agent::{alarm_handler, event_handler, handler, handler_sync, tool_handler};
pub(crate) use skep::agent::{
    events, http, inference, inference_sync, log, schedule, state, timer, tools, types,
};
