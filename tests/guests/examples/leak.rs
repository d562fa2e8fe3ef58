//! Opens as many conversations as the text says, keeps them all open, and replies with their number.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Opens many conversations.
#[agent]
async fn leak(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let count: usize = message.text.parse().map_err(|_| AgentError::InvalidMessage("say how many".into()))?;
    let mut kept = Vec::new();
    for index in 0..count {
        let conversation = cx.conversation_named(&format!("c{index}"));
        conversation.messages()?;
        kept.push(conversation);
    }
    Ok(Reply::text(kept.len().to_string()))
}
