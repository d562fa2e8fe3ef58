//! Stores all messages of its session as a list in the state, then generates visibly. The reply's data is the
//! list. The text `entries` is not stored and only returns the list.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Stores its messages.
#[agent]
async fn ledger(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let mut entries: Vec<String> = cx.state().get_or_default("entries")?;
    if message.text == "entries" {
        return Reply::json("", &entries);
    }
    entries.push(message.text.clone());
    cx.state().set("entries", &entries)?;
    let generation = cx.conversation().user(message.text).max_tokens(64).generate().await?;
    Reply::json(generation.text, &entries)
}
