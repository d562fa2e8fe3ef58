//! Starts a stream and never reads all of it. `reply` replies while the stream is still open, `trap` reads
//! one chunk and panics, `wait` waits for another generation in the meantime.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Keeps streams open.
#[agent]
async fn hoard(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let start = cx.conversation_named("kept").user("Count to a hundred.").temperature(0.0).max_tokens(200);
    let mut kept = start.stream().await?;
    match message.text.as_str() {
        "trap" => {
            let piece = kept.next().await;
            panic!("broke after {piece:?}");
        }
        "wait" => {
            let said = cx.conversation().user("Say yes.").temperature(0.0).max_tokens(4).generate().await?;
            Ok(Reply::text(said.text))
        }
        _ => Ok(Reply::text("kept")),
    }
}
