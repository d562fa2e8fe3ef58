//! Calls a tool of others. `NAME ARGUMENTS` is called directly; with `model NAME …` the model has to make the
//! call. The reply is the result, or the error.

use skep_sdk::serde_json::{self, Value};
use skep_sdk::{AgentError, Context, Message, Reply, ToolChoice, agent};

/// Calls the given tool.
#[agent]
async fn relay(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let (name, rest) = message.text.split_once(' ').unwrap_or((&message.text, "{}"));
    if name == "model" {
        let name = rest.split(' ').next().unwrap_or_default();
        let listed = cx.host_tools().list().await;
        let known = listed.iter().find(|tool| tool.name == name).and_then(|tool| tool.model_name.as_deref());
        let choice = ToolChoice::named(known.unwrap_or("nothing"));
        let asking = cx.conversation().system("You call tools.").user(rest).temperature(0.0).max_tokens(64);
        return asking.host_tools([name]).tool_choice(choice).run().await;
    }
    let arguments: Value =
        serde_json::from_str(rest).map_err(|error| AgentError::InvalidMessage(error.to_string()))?;
    Ok(match cx.host_tools().call::<Value>(name, &arguments).await {
        Ok(result) => Reply::text(result.to_string()),
        Err(error) => Reply::text(error.to_string()),
    })
}
