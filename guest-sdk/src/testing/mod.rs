//! Tests of an agent in a plain `#[test]`, without a host, a model or an async runtime.
//!
//! A [`Harness`] runs turns of an agent. A [`ScriptedModel`] replaces the model, and a [`ScriptedWeb`] the
//! servers that the agent requests. State and conversations persist between turns and roll back when a turn
//! fails, as they do in a host. Something that a model could never do, such as a call of an unknown tool or
//! arguments that do not validate, is a mistake in the script, and panics with the reason.
//!
//! ```
//! use skep_sdk::testing::{Harness, ScriptedModel};
//! use skep_sdk::{AgentError, Context, Entry, InferenceError, Message, Reply, agent};
//!
//! /// Counts its turns.
//! #[agent]
//! async fn counter(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
//!     let turns: u32 = cx.state().get_or_default("turns")?;
//!     cx.state().set("turns", &(turns + 1))?;
//!     cx.conversation().user(message.text).run().await
//! }
//!
//! let model = ScriptedModel::new().text("Hello.").fail(InferenceError::Busy { retry_after_ms: 50 });
//! let mut harness = Harness::new(counter).model(model);
//! assert_eq!(harness.send("Hi").unwrap().reply.text, "Hello.");
//! assert!(harness.send("Hi again").is_err());
//! assert_eq!(harness.state::<u32>("turns"), Some(1), "the failed turn left nothing behind");
//! assert_eq!(harness.prompts()[1].last(), Some(&Entry::User("Hi again".into())));
//! ```

mod harness;
mod model;
mod web;

mod examples;
mod memory_conversation;
mod memory_host;
mod memory_stream;
mod schedule;
mod validate;

mod block_on;
mod compaction;

pub use block_on::block_on;
pub use harness::{Harness, Outcome, ToolCallRecord};
pub use model::ScriptedModel;
pub use schedule::Emitted;
pub use web::ScriptedWeb;
