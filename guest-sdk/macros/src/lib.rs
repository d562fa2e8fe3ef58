//! The macros of `skep-sdk`. Use them from there.
//!
//! Each macro is a plain function from tokens to tokens in its own file, so that its errors can be tested.

use proc_macro::TokenStream;

mod agent;
mod documentation;
mod tool;
mod tool_options;

/// Makes an agent of a function that takes one turn.
///
/// ```
/// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
/// /// Says how often it was called. (This comment is the agent's description.)
/// #[agent]
/// async fn counter(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     let count: u32 = cx.state().get_or_default("count")?;
///     cx.state().set("count", &(count + 1))?;
///     Ok(Reply::text(format!("{} times, {}", count + 1, message.text)))
/// }
/// ```
///
/// `tools = [a, path::to::b]` names the functions under `#[tool]` that its model may call. Built to WebAssembly the
/// crate exports the agent; natively the name becomes a function `fn() -> Agent` for `skep_sdk::testing::Harness`.
/// A crate has one agent.
#[proc_macro_attribute]
pub fn agent(attributes: TokenStream, item: TokenStream) -> TokenStream {
    agent::expand(attributes.into(), item.into()).unwrap_or_else(|error| error.into_compile_error()).into()
}

/// Makes a tool of a function: its name, its doc comment and its parameters are what the model reads.
///
/// ```
/// # use skep_sdk::{Context, ToolError, tool};
/// /// Notes a wish of the guest.
/// #[tool]
/// fn note_wish(
///     cx: &Context,
///     /// What the guest wants, in a few words.
///     #[schemars(length(max = 80))]
///     wish: String,
///     urgent: Option<bool>,
/// ) -> Result<u32, ToolError> {
///     let mut wishes: Vec<(String, bool)> = cx.state().get_or_default("wishes")?;
///     wishes.push((wish, urgent.unwrap_or(false)));
///     cx.state().set("wishes", &wishes)?;
///     Ok(wishes.len() as u32)
/// }
/// ```
///
/// The function may be async or not, and may take `&Context` first. Every other parameter is an argument: a type that
/// is `Deserialize + JsonSchema`, owned. It returns a `Serialize + JsonSchema` type, or a `Result` of one with an error
/// that becomes a `ToolError`. The function itself stays as it is and can be called.
///
/// Options say what it does to the world, `#[tool(read_only)]`, `destructive`, `idempotent`, `open_world`, which other agents
/// and MCP clients are told; how long a call may take, `timeout_ms = 500`; and how often one that failed is made again,
/// `retries = 2`, for tools that are `read_only` or `idempotent`. With `needs_approval` a person decides about each call.
#[proc_macro_attribute]
pub fn tool(attributes: TokenStream, item: TokenStream) -> TokenStream {
    tool::expand(attributes.into(), item.into()).unwrap_or_else(|error| error.into_compile_error()).into()
}
