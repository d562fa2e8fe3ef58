//! Replies with the message's text. No inference, no state.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Replies with what it is told.
#[agent]
async fn noop(_cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    Ok(Reply { text: message.text, data: message.data })
}
