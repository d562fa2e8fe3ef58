//! Creates large values: `reply N`, `data N`, `state N`, `key N`, `user N`, `system N`, `error N`, each with
//! N bytes, or 1 MiB without a number.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Creates large values.
#[agent]
async fn big(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let (what, size) = message.text.split_once(' ').unwrap_or((&message.text, "1048576"));
    let size = size.parse().map_err(|_| AgentError::InvalidMessage("say what and how large".into()))?;
    let large = "x".repeat(size);
    match what {
        "reply" => return Ok(Reply::text(large)),
        "data" => return Reply::json("large", &large),
        "error" => return Err(AgentError::Failed(large)),
        "state" => cx.state().set("large", &large)?,
        "key" => cx.state().set(&large, &1)?,
        "user" => drop(cx.conversation().user(large).messages()?),
        "system" => drop(cx.conversation().system(large).messages()?),
        _ => return Err(AgentError::InvalidMessage(format!("cannot make a large {what}"))),
    }
    Ok(Reply::text("made"))
}
