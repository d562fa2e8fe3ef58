//! The macros of `skep-sdk`. Use them from there.
//!
//! Each macro is a plain function from tokens to tokens in its own file, so that its errors can be tested.

use proc_macro::TokenStream;

mod agent;
mod documentation;
mod example;
mod json;
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
///
/// # Examples for the model
///
/// `example(…)` shows the model a short conversation: what a user says, the call that answers it with its arguments and its
/// result as JSON, and the answer. Without `call` and `result` it shows when the tool is not called. A small model learns more
/// from three examples than from a page of instructions.
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
/// The model that is offered the tool sees its examples after the system message and before the first message of the
/// conversation, in its own markup, one of each tool in turn. They are the same in every session, so that they are computed
/// once and then come from the cache. Nobody else sees them: no example is in the messages of a session, and none is a call.
///
/// The names of the arguments are checked when the agent is compiled; the values against the tool's schemas when a test
/// makes a `Harness` and when the agent is deployed. The error names the tool and the example.
#[proc_macro_attribute]
pub fn tool(attributes: TokenStream, item: TokenStream) -> TokenStream {
    tool::expand(attributes.into(), item.into()).unwrap_or_else(|error| error.into_compile_error()).into()
}
