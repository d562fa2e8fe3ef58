//! Rust types of the WIT package `skep:agent`, generated from the one source in `wit/`. They stay in this crate.

wasmtime::component::bindgen!({
    path: "../../wit/skep-agent",
    world: "full-agent",
    imports: {
        // They are read from the store when a turn first asks.
        "skep:agent/schedule": async | trappable,
        default: trappable,
    },
    exports: { default: async | store },
    // What the guest asks for and what it gets is written into the turn's journal.
    additional_derives: [PartialEq, serde::Serialize, serde::Deserialize],
    with: {
        "skep:agent/inference.conversation": crate::capability::inference::Conversation,
    },
});

pub(crate) use exports::skep::agent::{alarm_handler, event_handler, handler, tool_handler};
pub(crate) use skep::agent::{events, http, inference, log, schedule, state, timer, tools, types};
