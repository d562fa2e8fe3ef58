//! The macros of `skep-sdk`, which re-exports them.
//!
//! Each macro is a plain function from tokens to tokens in a separate file, so that its errors can be tested.

use proc_macro::TokenStream;

mod agent;
mod documentation;
mod example;
mod json;
mod tool;
mod tool_options;

/// Turns a function that handles one turn into an agent.
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
/// `tools = [a, path::to::b]` names the functions under `#[tool]` that the agent's model may call. Compiled
/// to WebAssembly, the crate exports the agent. In a native build the name becomes a function `fn() -> Agent`
/// for `skep_sdk::testing::Harness`. A crate has one agent.
#[proc_macro_attribute]
pub fn agent(attributes: TokenStream, item: TokenStream) -> TokenStream {
    agent::expand(attributes.into(), item.into()).unwrap_or_else(|error| error.into_compile_error()).into()
}

/// Turns a function into a tool. The model reads its name, its doc comment and its parameters.
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
/// The function may be async, and may take `&Context` as its first parameter. Every other parameter is an
/// argument of an owned type that is `Deserialize + JsonSchema`. The function returns a `Serialize +
/// JsonSchema` type, or a `Result` with such a type and an error that converts into `ToolError`. The function
/// itself stays unchanged and can be called.
///
/// Options declare the effects of the tool, which other agents and MCP clients see: `#[tool(read_only)]`,
/// `destructive`, `idempotent`, `open_world`. `timeout_ms = 500` sets the timeout of a call. `retries = 2`
/// sets how many times a failed call is retried, for tools that are `read_only` or `idempotent`. With
/// `needs_approval`, a person decides about each call.
///
/// # Examples for the model
///
/// `example(…)` shows the model a short conversation: a user message, the call that answers it with its
/// arguments and its result as JSON, and the answer. Without `call` and `result` it shows when the tool is
/// not called. A small model learns more from three examples than from a page of instructions.
///
/// ```
/// # use skep_sdk::{ToolError, tool};
/// /// Converts an amount of money into euros.
/// #[tool(
///     read_only,
///     example(
///         user = "How much is 20 dollars?",
///         call = {"amount": 20, "currency": "USD"},
///         result = 18.4,
///         answer = "20 dollars are 18.40 euros.",
///     ),
///     example(user = "Good morning!", answer = "Good morning! Which amount shall I convert?")
/// )]
/// async fn to_euros(amount: f64, currency: String) -> Result<f64, ToolError> {
///     match currency.as_str() {
///         "USD" => Ok(amount * 0.92),
///         other => Err(format!("I know no rate for {other}").into()),
///     }
/// }
/// ```
///
/// A model that is offered the tool sees its examples after the system message and before the first message
/// of the conversation, in its own markup. Examples of several tools alternate. They are the same in every
/// session, so they are computed once and then come from the cache. They are visible only to the model: they
/// are not part of a session's messages, and their calls are not calls of the session.
///
/// The names of the arguments are checked when the agent is compiled. The values are checked against the
/// tool's schemas when a test creates a `Harness` and when the agent is deployed. The error names the tool
/// and the example.
#[proc_macro_attribute]
pub fn tool(attributes: TokenStream, item: TokenStream) -> TokenStream {
    tool::expand(attributes.into(), item.into()).unwrap_or_else(|error| error.into_compile_error()).into()
}
