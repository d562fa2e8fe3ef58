//! Looks for data of others: `look KEY` replies with everything that it can see of a key, of all keys, and of
//! a conversation with that name; `hide KEY` writes there first.

use skep_sdk::serde_json::{Value, json};
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Looks for data of others.
#[agent]
async fn peek(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let (what, key) = message.text.split_once(' ').unwrap_or((&message.text, "secret"));
    if what == "hide" {
        cx.state().set(key, &"mine")?;
        cx.conversation_named(key).user("mine").messages()?;
        return Ok(Reply::text("hidden"));
    }
    let value: Option<Value> = cx.state().get(key)?;
    let keys = cx.state().keys("");
    let messages = cx.conversation_named(key).messages()?.len();
    Reply::json("looked", &json!({"value": value, "keys": keys, "messages": messages}))
}
