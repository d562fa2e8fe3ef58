//! Forces calls of tools. The first word of the text selects the tool: `good` adds numbers, `bad` returns a
//! result that breaks its output schema, `refuse` returns an error to the model, `boom` panics, `pay` needs
//! approval and sends a POST if the next word is a URL, `sneak` skips the approval. `auto` lets the model
//! choose, and `endless` never lets the model answer.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{AgentError, Context, Message, Reply, ToolChoice, ToolError, agent, tool};

#[derive(Serialize, Deserialize, JsonSchema)]
struct Sum {
    sum: i64,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct Small {
    #[schemars(range(min = 0, max = 9))]
    digit: u32,
}

#[derive(Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Colour {
    Red,
    Green,
}

/// Adds two numbers.
#[tool(idempotent)]
async fn add(
    cx: &Context,
    #[schemars(range(min = 0, max = 99))] a: i64,
    #[schemars(range(min = 0, max = 99))] b: i64,
) -> Result<Sum, ToolError> {
    cx.state().set("sum", &(a + b))?;
    Ok(Sum { sum: a + b })
}

/// Gives a digit of a colour.
#[tool(read_only)]
fn lie(colour: Colour, note: Option<bool>) -> Small {
    Small { digit: 1000 + colour as u32 + u32::from(note.unwrap_or_default()) }
}

/// Refuses a colour.
#[tool]
fn refuse(colours: Colour) -> Result<(), ToolError> {
    Err(format!("no {}", if matches!(colours, Colour::Red) { "red" } else { "green" }).into())
}

/// Breaks.
#[tool]
fn boom() {
    panic!("boom")
}

/// Pays.
#[tool(destructive, open_world, needs_approval)]
async fn pay(cx: &Context, #[schemars(range(min = 1, max = 99))] cents: u32) -> Result<u32, ToolError> {
    let paid: u32 = cx.state().get_or_default("paid")?;
    cx.state().set("paid", &(paid + 1))?;
    if let Some(till) = cx.state().get::<String>("till")? {
        cx.http().post(till).send().await?.error_for_status()?;
    }
    Ok(cents)
}

/// Calls the tool that the message names.
#[agent(tools = [add, lie, refuse, boom, pay])]
async fn toolcall(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let mut words = message.text.split(' ');
    let word = words.next().unwrap_or_default().to_owned();
    if let Some(till) = words.next().filter(|next| next.starts_with("http://")) {
        cx.state().set("till", &till)?;
    }
    let conversation =
        cx.conversation().system("You call tools.").user(message.text).temperature(0.0).max_tokens(48);
    match word.as_str() {
        "auto" => conversation.run().await,
        "good" => conversation.tools(["add"]).tool_choice(ToolChoice::named("add")).run().await,
        "bad" => conversation.tools(["lie"]).tool_choice(ToolChoice::named("lie")).run().await,
        "endless" => conversation.tools(["add"]).tool_choice(ToolChoice::Required).max_rounds(1).run().await,
        "sneak" => {
            let forced = conversation.tools(["pay"]).tool_choice(ToolChoice::named("pay"));
            let generation = forced.generate().await?;
            cx.conversation().tool_result(&generation.tool_calls[0].id, Ok(1.into())).generate().await?;
            Ok(Reply::text("it was taken"))
        }
        tool => conversation.tools([tool]).tool_choice(ToolChoice::named(tool)).run().await,
    }
}
