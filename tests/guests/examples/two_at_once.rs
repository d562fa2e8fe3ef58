//! Runs two generations concurrently, each in its own conversation. The reply's data has both texts. `same`
//! runs both in one conversation, which is an error for the second.

use skep_sdk::serde_json::json;
use skep_sdk::{AgentError, Context, Message, Reply, agent, join};

/// Generates twice concurrently.
#[agent]
async fn two_at_once(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let second = if message.text == "same" { "first" } else { "second" };
    let ask = |name: &str| {
        cx.conversation_named(name).user(&message.text).temperature(0.0).max_tokens(16).hidden().generate()
    };
    let (first, second) = join(ask("first"), ask(second)).await;
    Reply::json("both", &json!({"first": first?.text, "second": second?.text}))
}
