//! Adds a message to the main conversation, forks it, and generates in both. The reply's data has both texts
//! and the number of the fork's prompt tokens that came from the cache. `taken` forks under a name that is in
//! use.

use skep_sdk::serde_json::json;
use skep_sdk::{AgentError, Context, Message, Reply, agent};

/// Forks its conversation.
#[agent]
async fn fork(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let name = if message.text == "taken" { "main".to_owned() } else { format!("fork-{}", cx.turn()) };
    let ask = |text: &str| cx.conversation().user(text).temperature(0.0).max_tokens(12).hidden().generate();
    ask(&message.text).await?;
    let forked = cx.conversation().fork(&name)?;
    let forked = forked.user("And why?").temperature(0.0).max_tokens(12).hidden().generate().await?;
    let main = ask("And why?").await?;
    let data = json!({
        "main": main.text,
        "fork": forked.text,
        "prompt_tokens": forked.usage.prompt_tokens,
        "cached_tokens": forked.usage.cached_tokens,
    });
    Reply::json("forked", &data)
}
