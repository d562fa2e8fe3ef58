//! Fails in the way that the text names: `invalid`, `failed`, `busy`, `overflow`, `truncated`, `cancelled`,
//! `model` (uses a model that does not exist), `state` (an empty key), `schema` (a schema that cannot be
//! compiled). Any other text is echoed. The agent writes state first, so that a test can check the rollback;
//! `peek` replies with the stored value.

use skep_sdk::serde_json::json;
use skep_sdk::{AgentError, Context, InferenceError, Message, Output, Reply, agent};

/// Fails.
#[agent]
async fn fail(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    if message.text == "peek" {
        return Ok(Reply::text(cx.state().get_or_default::<String>("last")?));
    }
    cx.state().set("last", &message.text)?;
    Err(match message.text.as_str() {
        "invalid" => AgentError::InvalidMessage("as told".into()),
        "failed" => AgentError::Failed("as told".into()),
        "busy" => InferenceError::Busy { retry_after_ms: 1234 }.into(),
        "overflow" => InferenceError::ContextOverflow { limit_tokens: 77 }.into(),
        "truncated" => InferenceError::Truncated.into(),
        "cancelled" => InferenceError::Cancelled.into(),
        "model" => return cx.conversation_with_model("other", "no-such-model").user("hi").run().await,
        "state" => {
            cx.state().set("", &1)?;
            AgentError::Failed("an empty key was taken".into())
        }
        "schema" => {
            let schema = Output::JsonSchema(json!({"type": "nonsense"}));
            return cx.conversation().user("hi").output(schema).run().await;
        }
        _ => return Ok(Reply::text(message.text)),
    })
}
