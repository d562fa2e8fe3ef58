//! A hotel concierge: three typed tools, structured output, and a memory that outlives turns and restarts.
//!
//! Made for a very small model, so the code steers where a large model would not need it: it picks the tool by a word of
//! the message, and leaves the arguments and the answer to the model.

mod folio;
mod tools;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{AgentError, Context, InferenceError, Message, Reply, ToolChoice, agent};

use folio::Folio;
use tools::{call_service, order_food, read_folio};

const MAX_TOKENS: u32 = 120;

/// How a guest introduced themselves.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Introduction {
    #[schemars(length(min = 1, max = 24))]
    name: String,
}

/// The concierge of a small hotel: orders food, calls services, and remembers its guests.
#[agent(tools = [order_food, call_service, read_folio])]
async fn concierge(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    if introduces(&message.text) {
        let name = guest_name(cx, &message.text).await?;
        cx.log().info(format!("the guest is {name}"));
        Folio::update(cx, |folio| folio.guest = Some(name))?;
    }
    Folio::update(cx, |folio| folio.visits += 1)?;

    let answer = cx
        .conversation()
        .system(include_str!("system.md").trim())
        .user(&message.text)
        .tool_choice(choose_tool(&message.text))
        .temperature(0.0)
        .max_tokens(MAX_TOKENS)
        .run()
        .await?;
    Reply::json(answer.text.trim(), &Folio::load(cx)?)
}

/// The guest's name as structured output, in a conversation of its own that the caller does not see.
async fn guest_name(cx: &Context, text: &str) -> Result<String, InferenceError> {
    let introduction: Introduction = cx
        .conversation_named("introduction")
        .clear()
        .system("Reply with the name of the person who speaks, as JSON.")
        .user(text)
        .temperature(0.0)
        .max_tokens(40)
        .hidden()
        .extract()
        .await?;
    Ok(introduction.name)
}

fn introduces(text: &str) -> bool {
    mentions(text, &["my name is", "call me"])
}

/// The tool that the message is about. After it has run the model answers freely; see `Conversation::tool_choice`.
fn choose_tool(text: &str) -> ToolChoice {
    const WORDS: [(&str, &[&str]); 3] = [
        ("read_folio", &["so far", "my order", "my bill", "remember", "did i"]),
        ("call_service", &["taxi", "towel", "clean", "wake"]),
        ("order_food", &["order", "eat", "drink", "soup", "pizza", "salad", "coffee", "tea"]),
    ];
    let tool = WORDS.iter().find(|(_, words)| mentions(text, words));
    tool.map_or(ToolChoice::None, |(name, _)| ToolChoice::named(*name))
}

/// Whether a word of the text begins with one of these.
fn mentions(text: &str, beginnings: &[&str]) -> bool {
    let words: Vec<&str> =
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let text = format!(" {}", words.join(" ").to_lowercase());
    beginnings.iter().any(|beginning| text.contains(&format!(" {beginning}")))
}

#[cfg(test)]
mod tests;
