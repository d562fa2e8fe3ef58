//! Generates visibly, waits until the server answers that the message names, and generates again. The state counts the turns
//! under `turns` and the calls of the tool `note` under `notes`. The reply's data is the number of turns.

use skep_sdk::{AgentError, Context, Message, Reply, ToolError, agent, tool};
use std::time::Duration;

/// Counts its calls.
#[tool]
async fn note(cx: &Context, word: String) -> Result<String, ToolError> {
    let notes: u64 = cx.state().get_or_default("notes")?;
    cx.state().set("notes", &(notes + 1))?;
    Ok(format!("{word} {}", notes + 1))
}

/// Waits in the middle of a turn.
#[agent(tools = [note])]
async fn gate(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let turns: u64 = cx.state().get_or_default("turns")?;
    cx.state().set("turns", &(turns + 1))?;
    let before = cx.conversation().user("before").max_tokens(24).generate().await?;
    cx.http().get(message.text).timeout(Duration::from_secs(60)).send().await?.error_for_status()?;
    let after = cx.conversation().user("after").max_tokens(24).generate().await?;
    Reply::json(before.text + &after.text, &(turns + 1))
}
