//! Write agents for Skep in Rust.
//!
//! An agent handles the turns of its sessions: it receives a message, talks to a model, calls its tools,
//! changes the session's state, and replies. It compiles to a sandboxed WebAssembly component. The model, the
//! conversation's KV cache and the state live in the host and survive a restart. The changes of a turn are
//! kept if it succeeds, and dropped if it fails.
//!
//! An agent that only answers needs instructions and tools:
//!
//! ```
//! use schemars::JsonSchema;
//! use serde::{Deserialize, Serialize};
//! use skep_sdk::{Context, ToolError, agent, tool};
//!
//! #[derive(Serialize, Deserialize, JsonSchema)]
//! struct Order {
//!     id: u32,
//!     shipped: bool,
//! }
//!
//! /// Looks up an order by its number.
//! #[tool]
//! async fn find_order(cx: &Context, id: u32) -> Result<Order, ToolError> {
//!     let shipped: bool = cx.state().get_or_default(&format!("shipped/{id}"))?;
//!     Ok(Order { id, shipped })
//! }
//!
//! /// Answers questions about orders.
//! #[agent(instructions = "You answer questions about orders.", tools = [find_order])]
//! struct Orders;
//!
//! // In a test, no host is needed: the model's answers are scripted.
//! use skep_sdk::testing::{Harness, ScriptedModel};
//! let model = ScriptedModel::new().call("find_order", serde_json::json!({"id": 7})).text("Not yet.");
//! let mut harness = Harness::new(Orders).model(model);
//! let outcome = harness.send("Is order 7 on its way?").unwrap();
//! assert_eq!(outcome.reply.text, "Not yet.");
//! assert_eq!(outcome.tool_calls[0].outcome.as_ref().unwrap()["shipped"], false);
//! ```
//!
//! An agent that does more has a function that handles a turn:
//!
//! ```
//! use skep_sdk::{AgentError, Context, Message, Reply, agent};
//!
//! /// Greets you and remembers how often you visited.
//! #[agent]
//! async fn hello(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
//!     let visits: u32 = cx.state().get_or_default("visits")?;
//!     cx.state().set("visits", &(visits + 1))?;
//!     let reply = cx.conversation().system("You are a friendly host.").user(message.text).run().await?;
//!     Ok(Reply::text(format!("{} (visit {})", reply.text, visits + 1)))
//! }
//! ```
//!
//! - [`agent`](macro@agent) and [`tool`](macro@tool) are the two macros. A crate has one agent and any number of
//!   tools.
//! - [`Context`] gives a turn access to [`Conversation`], [`Completion`], [`State`], [`Http`], [`HostTools`],
//!   [`Random`] and [`Log`].
//! - [`HostTool`] is a typed reference to a tool of another agent or of an MCP server.
//! - [`Client`] reaches the client that waits for the turn, and [`Content`] is a result with images and other parts.
//! - `#[tool(example(…))]` and [`Conversation::example`] give the model examples, which small models need.
//! - [`AgentError`], [`InferenceError`], [`StateError`], [`HttpError`], [`HostToolError`] and [`ToolError`] say
//!   what went wrong and who can fix it. An [`AgentError`] keeps its cause.
//! - [`testing`] runs an agent in a plain `#[test]`.
//!
//! Types of arguments, results and structured output derive `JsonSchema` from `schemars` 1. The host enforces
//! the schema while the model decodes, so the model always satisfies `#[schemars(length(max = 40))]` or an
//! enum.

// The generated bindings need unsafe code to call the host through the component ABI; no other code may use it.
#![deny(unsafe_code)]
#![cfg_attr(not(target_arch = "wasm32"), forbid(unsafe_code))]

mod agent;
mod client;
mod content;
mod context;
mod conversation;
mod instructions;

mod compaction;
mod completion;
mod generation;
mod options;

mod host_tool;
mod host_tools;
mod http;
mod message;
mod random;
mod schedule;
mod state;
mod tool;
mod trigger;

mod example;
mod schema;

mod error;

mod attempt;
mod host;
mod join;

#[cfg(target_arch = "wasm32")]
#[allow(unsafe_code)]
mod component;

#[cfg(not(target_arch = "wasm32"))]
pub mod testing;

#[doc(hidden)]
#[path = "private.rs"]
pub mod __private;

pub use agent::Agent;
pub use client::{Client, Elicited, SampleRequest, Sampled};
pub use compaction::{CompactOptions, Compaction, CompactionPolicy};
pub use completion::Completion;
pub use content::Content;
pub use context::{Context, Log};
pub use conversation::{Conversation, TextStream};
pub use error::{
    AgentError, EmitError, HostToolError, HttpError, InferenceError, ScheduleError, StateError, ToolError,
};
pub use example::{ExampleCall, OutputExample, ToolExample};
pub use generation::{
    Entry, Finish, GenerateOptions, Generation, ModelInfo, Output, Sampling, Timing, ToolCall, ToolChoice,
    Usage,
};
pub use host::{FetchRequest, HostToolInfo, HttpResponse, Level, ScheduleTiming, Scheduled, ToolHints};
pub use host_tool::HostTool;
pub use host_tools::{HostTools, OfferedTool};
pub use http::{Fetch, Http};
pub use join::{join, join_all};
pub use message::{HttpRequest, Message, Origin, Reply};
pub use random::Random;
pub use schedule::Schedule;
pub use skep_sdk_macros::{agent, tool};
pub use state::State;
pub use tool::ToolDefinition;
pub use trigger::{Alarm, Event};

/// Re-export of `serde_json`, for `json!` and `Value`.
pub use serde_json;
