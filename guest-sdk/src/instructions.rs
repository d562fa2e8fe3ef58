//! The turn of an agent without a function: the model answers each message, as `#[agent(instructions = …)]`
//! says.

use serde_json::Value;

use crate::{AgentError, Context, Message, OfferedTool, Reply};

/// How the model of an agent without a function answers.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Instructions {
    /// The system message.
    pub text: &'static str,
    /// The tools of others that the model may call.
    pub host_tools: fn() -> Vec<OfferedTool>,
}

impl Instructions {
    pub(crate) async fn answer(&self, cx: &Context, message: &Message) -> Result<Reply, AgentError> {
        let conversation = cx.conversation().system(self.text).user(prompt(message));
        conversation.host_tools((self.host_tools)()).run().await
    }
}

/// Returns the message as the model reads it: its text, and its data as JSON.
fn prompt(message: &Message) -> String {
    match &message.data {
        None | Some(Value::Null) => message.text.clone(),
        Some(data) if message.text.is_empty() => data.to_string(),
        Some(data) => format!("{}\n\n{data}", message.text),
    }
}
