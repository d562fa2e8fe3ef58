//! A hotel concierge: three typed tools with examples, structured output, and a memory that outlives turns
//! and restarts.
//!
//! It is written for a very small model. The examples in `tools.rs` teach the model to fill in the arguments.
//! Where it would still be unsure, the code steers it: words of the message select the topic and therefore
//! the tool, and the form of the answer is built from the result of the tool.

mod folio;
mod order;
mod tools;
mod topic;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use skep_sdk::{AgentError, Context, InferenceError, Message, Reply, agent};

use folio::Folio;
use tools::{call_service, order_food, read_folio};
use topic::{Topic, mentions, small_talk};

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
    let guest = Folio::update(cx, |folio| {
        folio.visits += 1;
        folio.guest.clone()
    })?;

    let topic = Topic::of(&message.text);
    let guest = guest.unwrap_or_default();
    let answer = cx
        .conversation()
        .system(include_str!("system.md").trim())
        .user(&message.text)
        .tool_choice(topic.tool())
        .output(small_talk(&message.text, &guest))
        .answer_format(|results| topic.answer(&guest, results))
        .temperature(0.0)
        .max_tokens(MAX_TOKENS)
        .run()
        .await?;
    Reply::json(answer.text.trim(), &Folio::load(cx)?)
}

/// Reads the guest's name as structured output, in a separate conversation that the caller does not see.
async fn guest_name(cx: &Context, text: &str) -> Result<String, InferenceError> {
    let introduction: Introduction = cx
        .conversation_named("introduction")
        .clear()
        .system("Reply with the name of the person who speaks, as JSON.")
        .example("Hello, I am Bob Miller.", &Introduction { name: "Bob Miller".to_owned() })
        .example("Good morning! My name is Grace.", &Introduction { name: "Grace".to_owned() })
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

#[cfg(test)]
mod tests;
