//! Reads a generation as a stream. The reply is the whole text; its data has the chunks and whether they
//! concatenate to the text. For a text that begins with `drop`, the agent drops the stream after its first
//! chunk and replies with that chunk.

use skep_sdk::serde_json::json;
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Streams a generation.
#[agent]
async fn stream(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let drops = message.text.starts_with("drop");
    let mut stream = cx.conversation().user(message.text).temperature(0.0).max_tokens(24).stream().await?;
    let mut pieces = Vec::new();
    while let Some(piece) = stream.next().await {
        if drops {
            return Ok(Reply::text(piece));
        }
        pieces.push(piece);
    }
    let generation = stream.finish().await?;
    let same = pieces.concat() == generation.text;
    let (tokens, reasoning) = (generation.usage.completion_tokens, generation.reasoning);
    let data = json!({"pieces": pieces, "same": same, "completion_tokens": tokens, "reasoning": reasoning});
    Reply::json(generation.text, &data)
}
