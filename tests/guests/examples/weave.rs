//! Reads a generation as a stream and waits again and again meanwhile. After each piece and after each wait it makes a call that
//! says which of them it was, so that another order is another turn; then it generates aloud.

use skep_sdk::{AgentError, Context, Message, Reply, agent, join};
use std::time::Duration;

/// Reads and waits.
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
        // It may be cut off in the middle of a character.
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
