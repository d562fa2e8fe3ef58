//! Streams a generation that is cut off, waits a little after its first chunk, and then generates visibly.
//! The reply says whether a chunk was read and how the stream ended.

use skep_sdk::{AgentError, Context, Message, Output, Reply, agent};
use std::time::Duration;

/// Reads a truncated generation.
#[agent]
async fn partial(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let letters = cx.conversation_named("cut").user("Letters.").output(Output::Regex("[a-z]{200}".into()));
    let mut stream = letters.max_tokens(8).hidden().stream().await?;
    let has_read = stream.next().await.is_some();
    if has_read {
        cx.sleep(Duration::from_millis(20)).await;
    }
    let end = if stream.finish().await.is_err() { "cut off" } else { "whole" };
    cx.conversation().user(message.text).max_tokens(400).generate().await?;
    Ok(Reply::text(format!("{} and {end}", if has_read { "read" } else { "unread" })))
}
