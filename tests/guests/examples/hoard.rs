//! Starts a stream and never reads it. `reply` answers with the stream in its hands, `trap` reads one piece and breaks, `wait`
//! waits for another generation meanwhile.

use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Keeps streams.
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
