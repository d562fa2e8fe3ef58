//! The turn of an agent without a function: the model answers each message, as `#[agent(instructions = …)]`
//! says.

use serde_json::Value;

use crate::context::Context;
use crate::error::AgentError;
use crate::host_tools::OfferedTool;
use crate::message::{Message, Reply};

/// The settings with which the model of an agent without a function answers.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Instructions {
    /// The system message.
    pub text: &'static str,
    pub temperature: Option<f32>,
    pub max_tokens: Option<u32>,
    /// The tools of others that the model may call.
    pub host_tools: fn() -> Vec<OfferedTool>,
}

impl Instructions {
    pub(crate) async fn answer(&self, cx: &Context, message: &Message) -> Result<Reply, AgentError> {
        let prompt = prompt(message).ok_or_else(|| {
            AgentError::InvalidMessage("it is empty; send a text, or a JSON value as `data`".to_owned())
        })?;
        let mut conversation = cx.conversation().system(self.text.trim()).user(prompt);
        if let Some(temperature) = self.temperature {
            conversation = conversation.temperature(temperature);
        }
        if let Some(max_tokens) = self.max_tokens {
            conversation = conversation.max_tokens(max_tokens);
        }
        conversation.host_tools((self.host_tools)()).run().await
    }
}

/// Returns the message as the model reads it: its text, and its data as JSON. Returns `None` if there is
/// neither.
fn prompt(Message { text, data, .. }: &Message) -> Option<String> {
    let mut data = data.clone().unwrap_or_default();
    // The body of an HTTP route is the data, and one of these members of it is the text.
    if let Value::Object(members) = &mut data {
        members.retain(|name, value| !(matches!(name.as_str(), "text" | "message") && value == text));
    }
    let has_data = match &data {
        Value::Null => false,
        Value::Object(members) => !members.is_empty(),
        _ => true,
    };
    match (text.is_empty(), has_data) {
        (false, false) => Some(text.clone()),
        (false, true) => Some(format!("{text}\n\n{data}")),
        (true, true) => Some(data.to_string()),
        (true, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Origin;
    use serde_json::json;

    #[test]
    fn the_model_reads_the_text_once_and_the_data() {
        for (text, data, expected) in [
            ("Hi", Value::Null, Some("Hi")),
            ("Hi", json!({"text": "Hi"}), Some("Hi")),
            ("Hi", json!({"message": "Hi", "from": "Ada"}), Some("Hi\n\n{\"from\":\"Ada\"}")),
            ("Hi", json!({"text": "other"}), Some("Hi\n\n{\"text\":\"other\"}")),
            ("Sum up", json!([1, 2]), Some("Sum up\n\n[1,2]")),
            ("", json!({"paid": true}), Some("{\"paid\":true}")),
            ("", json!(0), Some("0")),
            ("", json!({}), None),
            ("", Value::Null, None),
        ] {
            let message = Message {
                text: text.to_owned(),
                data: Some(data.clone()),
                session: "s".to_owned(),
                turn: 1,
                received_at_ms: 0,
                origin: Origin::Direct,
            };
            assert_eq!(prompt(&message).as_deref(), expected, "{text:?} {data}");
        }
    }
}
