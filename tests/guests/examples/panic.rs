//! Panics with the message's text. `index` panics with an index out of bounds; `echo TEXT` replies with the
//! text.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Panics.
#[agent]
async fn panic(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    if let Some(text) = message.text.strip_prefix("echo ") {
        return Ok(Reply::text(text));
    }
    cx.state().set("before", &true)?;
    let bytes = message.text.as_bytes();
    if message.text == "index" {
        return Ok(Reply::text(bytes[bytes.len()].to_string()));
    }
    panic!("{}", message.text)
}
