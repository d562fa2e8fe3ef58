//! Reads a generation as a stream and sleeps repeatedly in the meantime. Each chunk and each sleep leads to a
//! different call, so that a different order of events is a different turn. Then the agent generates visibly.

use skep_sdk::{AgentError, Context, Message, Reply, agent, join};
use std::time::Duration;

/// Interleaves reads and sleeps.
#[agent]
async fn weave(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let reading = async {
        let long = cx.conversation_named("read").user("Go on.").max_tokens(64).hidden();
        let mut stream = long.stream().await?;
        let mut pieces = 0;
        while stream.next().await.is_some() {
            pieces += 1;
            cx.sleep(Duration::from_millis(1)).await;
        }
        // The stream may be cut off in the middle of a character.
        let _ = stream.finish().await;
        Ok::<_, AgentError>(pieces)
    };
    let waiting = async {
        for _ in 0..12 {
            cx.sleep(Duration::from_millis(3)).await;
            cx.sleep(Duration::from_millis(2)).await;
        }
    };
    let (pieces, ()) = join(reading, waiting).await;
    let pieces = pieces?;
    cx.conversation().user(message.text).max_tokens(400).generate().await?;
    Ok(Reply::text(format!("read and waited, {pieces} pieces")))
}
