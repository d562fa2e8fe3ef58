//! The macros of `skep-sdk`, which re-exports them.
//!
//! Each macro is a plain function from tokens to tokens in a separate file, so that its errors can be tested.

use proc_macro::TokenStream;

mod agent;
mod agent_options;
mod documentation;
mod example;
mod json;
mod tool;
mod tool_options;

/// Declares the agent of a crate.
///
/// # An agent that answers
///
/// Most agents only need to tell the model what to do. Put the attribute on a unit struct:
///
/// ```
/// # use skep_sdk::{ToolError, agent, tool};
/// /// Looks up an order by its number.
/// #[tool(read_only)]
/// async fn find_order(id: u32) -> Result<String, ToolError> {
///     Ok(format!("order {id} is on its way"))
/// }
///
/// /// Answers questions about orders. (This comment is the agent's description.)
/// #[agent(
///     instructions = "You answer questions about orders. Look an order up before you answer.",
///     tools = [find_order],
/// )]
/// struct Orders;
///
/// // In a test, no host is needed: the model's answers are scripted.
/// use skep_sdk::testing::{Harness, ScriptedModel};
/// let arguments = skep_sdk::serde_json::json!({"id": 7});
/// let model = ScriptedModel::new().call("find_order", arguments).text("It is on its way.");
/// let mut harness = Harness::new(Orders).model(model);
/// assert_eq!(harness.send("Where is order 7?").unwrap().reply.text, "It is on its way.");
/// ```
///
/// Each session has one durable conversation. Each message is appended to it, the model calls tools until it
/// answers, and the answer is streamed to the caller while it is generated. JSON that came with the message
/// is appended to its text. An empty message is refused as invalid.
///
/// | Option | Meaning |
/// |---|---|
/// | `instructions = "…"` | The system message of the conversation. It may be a constant or `include_str!("system.md")`; white space around it is dropped. |
/// | `model = "…"` | The model of the agent's conversations and completions. Without it, the agent's own model answers: `model` in `agent.toml`, or the host's default. Another model has to be granted with `models` under `[grants]`. A session keeps the model that it started with. |
/// | `temperature = 0.5` | From 0 to 2; 0 always takes the most likely token. |
/// | `max_tokens = 200` | The maximum number of tokens of one generation. |
/// | `tools = [a, path::to::b]` | The functions under `#[tool]` that the model may call. |
/// | `host_tools = ["mcp:files/*", FIND_PARCEL]` | The tools of others that the model may call: names, patterns, or `HostTool` constants. Each has to be granted under `[grants] tools` in `agent.toml`. |
/// | `on_alarm = f`, `on_event = f` | The functions that handle schedules that are due, and events. |
///
/// # An agent with a function
///
/// An agent that does more than answer has a function that handles one turn:
///
/// ```
/// # use skep_sdk::{AgentError, Context, Message, Reply, agent};
/// /// Says how often it was called.
/// #[agent]
/// async fn counter(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     let count: u32 = cx.state().get_or_default("count")?;
///     cx.state().set("count", &(count + 1))?;
///     Ok(Reply::text(format!("{} times, {}", count + 1, message.text)))
/// }
/// ```
///
/// It takes the options `model`, `tools`, `on_alarm` and `on_event`. The function sets the others on the
/// conversation. The struct above is the same as this function:
///
/// ```
/// # use skep_sdk::{AgentError, Context, Message, Reply, agent, tool};
/// # /// Looks up an order by its number.
/// # #[tool]
/// # fn find_order(id: u32) -> u32 { id }
/// /// Answers questions about orders.
/// #[agent(tools = [find_order])]
/// async fn orders(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
///     let instructions = "You answer questions about orders. Look an order up before you answer.";
///     cx.conversation().system(instructions).user(message.text).run().await
/// }
/// ```
///
/// Compiled to WebAssembly, the crate exports the agent. In a native build the name becomes a function `fn()
/// -> Agent` for `skep_sdk::testing::Harness`. A crate has one agent.
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
