//! Replies with the message's text, without inference and state.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Echoes its message.
#[agent]
async fn noop(_cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    Ok(Reply { text: message.text, data: message.data })
}
