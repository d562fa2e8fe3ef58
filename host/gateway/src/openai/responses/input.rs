//! The items of an input, and the messages that a model gets for them.

use super::{
    carried,
    item_id::{self, Position},
};
use crate::{ApiError, openai::image};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use skep_engine::chat::{ChatMessage, Image, Role, ToolCall};
use skep_runtime::BatchAnswer;
use utoipa::ToSchema;

/// A text, which is a message of the user, or a list of items.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseInput)]
#[serde(untagged, expecting = "the input must be a string or a list of items")]
pub(crate) enum Input {
    Text(String),
    Items(Vec<Value>),
}

/// An item of an input, as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum InputItem {
    Message {
        role: String,
        content: Vec<Value>,
    },
    FunctionCall {
        call_id: String,
        name: String,
        arguments: String,
    },
    FunctionCallOutput {
        call_id: String,
        output: String,
    },
    Reasoning {
        text: String,
    },
    /// An item of a stored response, which replaces the reference before the input is stored.
    ItemReference {
        id: String,
    },
}

impl Input {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Input::Text(text) => text.len(),
            Input::Items(items) => items.iter().map(value_bytes).sum(),
        }
    }

    /// Returns the items, each at its position in the input.
    pub(crate) fn items(&self) -> Result<Vec<InputItem>, ApiError> {
        match self {
            Input::Text(text) => {
                let content = vec![json!({"type": "input_text", "text": text})];
                Ok(vec![InputItem::Message { role: "user".to_owned(), content }])
            }
            Input::Items(items) if items.is_empty() => {
                Err(ApiError::parameter("input", "input is empty; send at least one item"))
            }
            Input::Items(items) => items.iter().enumerate().map(|(index, item)| read(index, item)).collect(),
        }
    }
}

fn read(index: usize, item: &Value) -> Result<InputItem, ApiError> {
    let at = |field: &str| format!("input[{index}].{field}");
    let text = |field: &str| {
        let value = item[field].as_str().map(str::to_owned);
        value.ok_or_else(|| ApiError::parameter(at(field), format!("`{}` must be a string", at(field))))
    };
    let Value::Object(_) = item else {
        return Err(ApiError::parameter(format!("input[{index}]"), "an item must be an object"));
    };
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            let content = match &item["content"] {
                Value::String(text) => {
                    let kind = if item["role"] == "assistant" { "output_text" } else { "input_text" };
                    vec![json!({"type": kind, "text": text})]
                }
                Value::Array(parts) => parts.clone(),
                _ => {
                    let message = "the content must be a string or a list of parts";
                    return Err(ApiError::parameter(at("content"), message));
                }
            };
            let role = text("role")?;
            let item = InputItem::Message { role, content };
            // Errors name the part, so that they are found here and not when the messages are built.
            item.message(index)?;
            Ok(item)
        }
        "function_call" => Ok(InputItem::FunctionCall {
            call_id: text("call_id")?,
            name: text("name")?,
            arguments: text("arguments")?,
        }),
        "function_call_output" => {
            let output = match &item["output"] {
                Value::Array(parts) => {
                    let (text, images) = read_parts(parts, &at("output"))?;
                    if let Some(Image { part, .. }) = images.first() {
                        let message = "the output of a call can only be text";
                        return Err(ApiError::parameter(at(&format!("output[{part}]")), message));
                    }
                    text
                }
                _ => text("output")?,
            };
            Ok(InputItem::FunctionCallOutput { call_id: text("call_id")?, output })
        }
        "reasoning" => {
            let texts = |field: &str| {
                let parts = item[field].as_array().into_iter().flatten();
                parts.filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
            };
            let carried = item["encrypted_content"].as_str().and_then(carried::unpacked);
            let texts = [texts("content"), carried.unwrap_or_default(), texts("summary")];
            let text = texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
            Ok(InputItem::Reasoning { text })
        }
        "item_reference" => Ok(InputItem::ItemReference { id: text("id")? }),
        kind => {
            let message = format!(
                "an item of type {kind:?} is not supported; the types are message, function_call, \
                 function_call_output, reasoning and item_reference"
            );
            Err(ApiError::parameter(at("type"), message))
        }
    }
}

impl InputItem {
    /// Returns the item as clients see it, with its id.
    pub(crate) fn shown(&self, response: &str, index: usize) -> Value {
        let id = |prefix: &str| item_id::of(prefix, response, Position::Input(index));
        match self {
            InputItem::Message { role, content } => {
                json!({"id": id("msg"), "type": "message", "role": role, "status": "completed", "content": content})
            }
            InputItem::FunctionCall { call_id, name, arguments } => {
                json!({"id": id("fc"), "type": "function_call", "call_id": call_id, "name": name,
                       "arguments": arguments, "status": "completed"})
            }
            InputItem::FunctionCallOutput { call_id, output } => {
                json!({"id": id("fco"), "type": "function_call_output", "call_id": call_id, "output": output,
                       "status": "completed"})
            }
            InputItem::Reasoning { text } => {
                json!({"id": id("rs"), "type": "reasoning", "summary": [],
                       "content": [{"type": "reasoning_text", "text": text}]})
            }
            InputItem::ItemReference { id } => json!({"type": "item_reference", "id": id}),
        }
    }

    /// Returns the message of an item of type `message`.
    fn message(&self, index: usize) -> Result<Option<ChatMessage>, ApiError> {
        let InputItem::Message { role, content } = self else { return Ok(None) };
        let at = |field: &str| format!("input[{index}].{field}");
        let (text, images) = read_parts(content, &at("content"))?;
        if let Some(Image { part, .. }) = images.first().filter(|_| role != "user") {
            let message = "only a message with the role user may have images";
            return Err(ApiError::parameter(at(&format!("content[{part}]")), message));
        }
        let message = match role.as_str() {
            "system" | "developer" => ChatMessage::system(text),
            "user" => ChatMessage::user(text),
            "assistant" => ChatMessage::assistant(text),
            role => {
                let message =
                    format!("{role:?} is not a role; the roles are system, developer, user and assistant");
                return Err(ApiError::parameter(at("role"), message));
            }
        };
        Ok(Some(ChatMessage { images, ..message }))
    }
}

/// Builds the messages of a chat from the items of inputs and the answers between them. Consecutive items of the
/// assistant are one message: its reasoning, its text and its calls.
#[derive(Default)]
pub(crate) struct Messages {
    messages: Vec<ChatMessage>,
    /// The assistant's message that items are added to.
    open: Option<ChatMessage>,
}

impl Messages {
    pub(crate) fn new(instructions: Option<&str>) -> Self {
        let messages = instructions.map(ChatMessage::system).into_iter().collect();
        Messages { messages, open: None }
    }

    pub(crate) fn input(&mut self, items: &[InputItem]) -> Result<(), ApiError> {
        for (index, item) in items.iter().enumerate() {
            self.item(index, item)?;
        }
        Ok(())
    }

    fn item(&mut self, index: usize, item: &InputItem) -> Result<(), ApiError> {
        match item {
            InputItem::Message { .. } => {
                let Some(message) = item.message(index)? else { return Ok(()) };
                if message.role != Role::Assistant {
                    self.push(message);
                    return Ok(());
                }
                let takes_text = |open: &ChatMessage| open.content.is_empty() && open.tool_calls.is_empty();
                match self.open.as_mut().filter(|open| takes_text(open)) {
                    Some(open) => open.content = message.content,
                    None => self.begin(message),
                }
            }
            InputItem::FunctionCall { call_id, name, arguments } => {
                if self.open.is_none() {
                    self.begin(ChatMessage::assistant(""));
                }
                let call = ToolCall { id: call_id.clone(), name: name.clone(), arguments: arguments.clone() };
                self.open.iter_mut().for_each(|open| open.tool_calls.push(call.clone()));
            }
            InputItem::FunctionCallOutput { call_id, output } => {
                self.push(ChatMessage::tool(call_id, output));
            }
            InputItem::Reasoning { text } => {
                let reasoning = Some(text.clone()).filter(|text| !text.is_empty());
                self.begin(ChatMessage { reasoning, ..ChatMessage::assistant("") });
            }
            InputItem::ItemReference { id } => {
                let message = format!("{id:?} refers to an item, which must be resolved before");
                return Err(ApiError::internal(&message));
            }
        }
        Ok(())
    }

    /// Adds the answer of a response. `is_own` says whether the model that is asked now has written it, so that it sees
    /// its own spelling again.
    pub(crate) fn answer(&mut self, answer: &BatchAnswer, is_own: bool) {
        let BatchAnswer { text, reasoning, raw, tool_calls, .. } = answer;
        let some = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        self.push(ChatMessage {
            tool_calls: tool_calls.clone(),
            reasoning: some(reasoning),
            raw: some(raw).filter(|_| is_own),
            ..ChatMessage::assistant(text.clone())
        });
    }

    pub(crate) fn finish(mut self) -> Result<Vec<ChatMessage>, ApiError> {
        self.close();
        image::check_all(&self.messages, 1)?;
        Ok(self.messages)
    }

    fn push(&mut self, message: ChatMessage) {
        self.close();
        self.messages.push(message);
    }

    fn begin(&mut self, message: ChatMessage) {
        self.close();
        self.open = Some(message);
    }

    /// Ends the assistant's message. Reasoning that nothing follows is dropped, because templates show none by itself.
    fn close(&mut self) {
        let is_more = |open: &ChatMessage| !open.content.is_empty() || !open.tool_calls.is_empty();
        self.messages.extend(self.open.take().filter(is_more));
    }
}

fn read_parts(parts: &[Value], at: &str) -> Result<(String, Vec<Image>), ApiError> {
    let (mut text, mut images) = (String::new(), Vec::new());
    for (index, part) in parts.iter().enumerate() {
        let invalid = |message: String| ApiError::parameter(format!("{at}[{index}]"), message);
        let string = |name: &str| part[name].as_str();
        match (part["type"].as_str(), string("text").or_else(|| string("refusal"))) {
            (Some("input_text" | "output_text" | "text" | "refusal"), Some(part)) => text.push_str(part),
            (Some("input_image"), _) if part["file_id"].is_string() => {
                return Err(invalid("images of files are not supported; send image_url".to_owned()));
            }
            (Some("input_image"), _) => {
                images.push(image::read(&part["image_url"], text.len(), index).map_err(invalid)?);
            }
            (kind, _) => {
                let kind = kind.unwrap_or("?");
                return Err(invalid(format!(
                    "a part of type {kind:?} is not supported; send input_text, output_text or input_image"
                )));
            }
        }
    }
    Ok((text, images))
}

/// Returns the size of the texts in a value.
fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(members) => members.values().map(value_bytes).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(items: Value) -> Result<Vec<InputItem>, ApiError> {
        serde_json::from_value::<Input>(items).unwrap().items()
    }

    fn messages(input: Value) -> Vec<ChatMessage> {
        let mut messages = Messages::new(Some("be brief"));
        messages.input(&items(input).unwrap()).unwrap();
        messages.finish().unwrap()
    }

    #[test]
    fn consecutive_items_of_the_assistant_are_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "1"});
        let reasoning = json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]});
        let said = json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]});
        let parts = json!([{"type": "input_text", "text": "2"}]);
        let messages = messages(json!([
            {"role": "user", "content": "hi"}, reasoning, said, call("a"), call("b"), output("a"),
            {"type": "function_call_output", "call_id": "b", "output": parts},
            {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "lost"}]}]));
        let roles: Vec<_> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "assistant", "assistant"]);
        let turn = &messages[2];
        assert_eq!((turn.content.as_str(), turn.reasoning.as_deref()), ("Well.", Some("hm")));
        assert_eq!(turn.tool_calls.iter().map(|call| call.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((messages[4].content.as_str(), messages[4].tool_call_id.as_deref()), ("2", Some("b")));
        assert_eq!((messages[5].content.as_str(), messages[6].content.as_str()), ("one", "two"));
    }

    #[test]
    fn a_text_is_a_message_of_the_user_and_items_survive_storage() {
        let input = items(json!("hello")).unwrap();
        let mut of_text = Messages::new(None);
        of_text.input(&input).unwrap();
        assert_eq!(of_text.finish().unwrap(), [ChatMessage::user("hello")]);
        let stored = serde_json::to_string(&input).unwrap();
        assert_eq!(serde_json::from_str::<Vec<InputItem>>(&stored).unwrap(), input);
        let shown = input[0].shown("resp_0123456789abcdef0123456789abcdef", 0);
        assert_eq!(shown["id"], "msg_0123456789abcdef0123456789abcdefi0000");
        assert_eq!(shown["content"][0]["text"], "hello");
    }

    #[test]
    fn an_answer_keeps_its_spelling_only_for_its_own_model() {
        let outcome = skep_engine::chat::ChatOutcome {
            raw: "<think>hm</think>Yes".into(),
            reasoning: "hm".into(),
            ..skep_engine::chat::ChatOutcome::remote("Yes".into(), skep_engine::chat::ChatFinish::Stop)
        };
        let answer = BatchAnswer::of_chat(String::new(), &outcome);
        for (is_own, raw) in [(true, Some("<think>hm</think>Yes")), (false, None)] {
            let mut messages = Messages::new(None);
            messages.answer(&answer, is_own);
            let message = messages.finish().unwrap().remove(0);
            assert_eq!((message.raw.as_deref(), message.reasoning.as_deref()), (raw, Some("hm")));
        }
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (input, param) in [
            (json!([]), "input"),
            (json!([7]), "input[0]"),
            (json!([{"role": "wizard", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (json!([{"role": "user", "content": [{"type": "input_file"}]}]), "input[0].content[0]"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]),
                "input[0].content[0]",
            ),
            (json!([{"type": "function_call", "name": "f", "arguments": "{}"}]), "input[0].call_id"),
            (json!([{"type": "function_call_output", "call_id": "c"}]), "input[0].output"),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
        ] {
            let error = items(input.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{input}: {}", error.message);
        }
    }
}
