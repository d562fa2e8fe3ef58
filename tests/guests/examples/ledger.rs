//! Keeps a list of all messages of its session in the state, then generates aloud; the reply's data is the list. The text
//! `entries` is not kept and only gives the list.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Writes down what it is told.
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
