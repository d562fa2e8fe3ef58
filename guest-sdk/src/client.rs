//! The client that waits for a turn: progress, forms for its user, and completions by its model.
//!
//! These are calls of host tools, so a turn that is resumed after a restart gets the answers that it got before.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::error::HostToolError;
use crate::host::Host;
use crate::host_tools::HostTools;
use crate::schema::input_schema;

/// The client that waits for the turn. See [`Context::client`](crate::Context::client).
#[derive(Clone, Copy)]
pub struct Client<'a> {
    pub(crate) host: &'a dyn Host,
}

/// The answer of a person to a form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Elicited<T> {
    /// The person filled in the form.
    Accepted(T),
    /// The person declined.
    Declined,
    /// The person closed the form without an answer.
    Cancelled,
}

/// A question to the client's model.
///
/// ```
/// # use skep_sdk::SampleRequest;
/// let request = SampleRequest::new("Name a city.", 20).system("Answer in one word.").temperature(0.0);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRequest(Map<String, Value>);

/// An answer of the client's model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sampled {
    /// The text of the answer.
    pub text: String,
    /// The name of the model.
    pub model: String,
    /// The reason why the model stopped, such as `endTurn`.
    pub stop_reason: Option<String>,
}

impl SampleRequest {
    /// Creates a question that is answered with at most `max_tokens` tokens.
    pub fn new(text: impl Into<String>, max_tokens: u32) -> Self {
        let mut request = Map::new();
        request.insert("messages".to_owned(), json!([]));
        request.insert("maxTokens".to_owned(), max_tokens.into());
        Self(request).user(text)
    }

    /// Adds a message of the user.
    pub fn user(self, text: impl Into<String>) -> Self {
        self.message("user", text.into())
    }

    /// Adds a message of the model.
    pub fn assistant(self, text: impl Into<String>) -> Self {
        self.message("assistant", text.into())
    }

    /// Sets the system prompt.
    pub fn system(mut self, text: impl Into<String>) -> Self {
        self.0.insert("systemPrompt".to_owned(), text.into().into());
        self
    }

    /// Sets the temperature.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.0.insert("temperature".to_owned(), temperature.into());
        self
    }

    fn message(mut self, role: &str, text: String) -> Self {
        if let Some(Value::Array(messages)) = self.0.get_mut("messages") {
            messages.push(json!({"role": role, "content": {"type": "text", "text": text}}));
        }
        self
    }
}

impl Client<'_> {
    /// Reports the progress of the call to the client, as any count that grows. `total` is the count at the end, if it
    /// is known. Where no client wants to know, this does nothing.
    pub async fn progress(
        &self,
        progress: f64,
        total: Option<f64>,
        message: Option<&str>,
    ) -> Result<(), HostToolError> {
        let mut arguments = json!({"progress": progress});
        if let Some(total) = total {
            arguments["total"] = total.into();
        }
        if let Some(message) = message {
            arguments["message"] = message.into();
        }
        self.call("client/progress", &arguments).await.map(drop)
    }

    /// Asks the person at the client to fill in a form with the fields of `T`, which are texts, numbers, booleans or
    /// choices. `agent.toml` must grant `client/elicit`.
    pub async fn elicit<T: JsonSchema + DeserializeOwned>(
        &self,
        message: &str,
    ) -> Result<Elicited<T>, HostToolError> {
        Ok(match self.elicit_form(message, &form::<T>()).await? {
            Elicited::Accepted(filled) => {
                let wrong = |error| HostToolError::Json(format!("the form does not fit its type: {error}"));
                Elicited::Accepted(serde_json::from_value(filled).map_err(wrong)?)
            }
            Elicited::Declined => Elicited::Declined,
            Elicited::Cancelled => Elicited::Cancelled,
        })
    }

    /// Asks the person at the client to fill in the form that a JSON Schema describes, as the Model Context Protocol
    /// allows it.
    pub async fn elicit_form(&self, message: &str, schema: &Value) -> Result<Elicited<Value>, HostToolError> {
        let arguments = json!({"message": message, "requestedSchema": schema});
        let mut answer = self.call("client/elicit", &arguments).await?;
        Ok(match answer["action"].as_str() {
            Some("accept") => Elicited::Accepted(match answer["content"].take() {
                Value::Null => json!({}),
                filled => filled,
            }),
            Some("decline") => Elicited::Declined,
            _ => Elicited::Cancelled,
        })
    }

    /// Asks the client's model for a completion. `agent.toml` must grant `client/sample`.
    pub async fn sample(&self, request: SampleRequest) -> Result<Sampled, HostToolError> {
        let answer = self.call("client/sample", &Value::Object(request.0)).await?;
        let content = &answer["content"];
        let blocks = content.as_array().map_or_else(|| std::slice::from_ref(content), Vec::as_slice);
        let texts: Vec<&str> = blocks.iter().filter_map(|block| block["text"].as_str()).collect();
        Ok(Sampled {
            text: texts.join("\n"),
            model: answer["model"].as_str().unwrap_or_default().to_owned(),
            stop_reason: answer["stopReason"].as_str().map(str::to_owned),
        })
    }

    async fn call(&self, name: &str, arguments: &Value) -> Result<Value, HostToolError> {
        HostTools { host: self.host, timeout_ms: None }.call(name, arguments).await
    }
}

/// Returns the schema of a type as a form may have it: a field that may be missing has the type of its value.
fn form<T: JsonSchema>() -> Value {
    let mut schema = input_schema::<T>();
    if let Some(fields) = schema["properties"].as_object_mut() {
        fields.values_mut().filter_map(Value::as_object_mut).for_each(remove_null);
    }
    schema
}

/// Removes null from the values of a field.
fn remove_null(field: &mut Map<String, Value>) {
    if let Some(mut value) = only_alternative(field) {
        field.remove("anyOf");
        // The description of the field says more than the description of its type.
        value.append(field);
        *field = value;
    }
    let kinds = field.get("type").and_then(Value::as_array);
    if let Some(kind) = kinds.and_then(|kinds| kinds.iter().find(|kind| *kind != "null")).cloned() {
        field.insert("type".to_owned(), kind);
    }
    if let Some(Value::Array(choices)) = field.get_mut("enum") {
        choices.retain(|choice| !choice.is_null());
    }
}

/// Returns the only alternative to null. An optional choice whose variants have doc comments has one.
fn only_alternative(field: &Map<String, Value>) -> Option<Map<String, Value>> {
    let alternatives = field.get("anyOf")?.as_array()?;
    let mut values = alternatives.iter().filter(|alternative| alternative["type"] != "null");
    let only = values.next()?.as_object()?;
    values.next().is_none().then(|| only.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Contact {
        /// The name.
        name: String,
        age: Option<u32>,
    }

    #[test]
    fn a_form_has_plain_types() {
        let schema = form::<Contact>();
        assert_eq!(schema["properties"]["name"], json!({"type": "string", "description": "The name."}));
        assert_eq!(schema["properties"]["age"]["type"], "integer");
        assert_eq!(schema["required"], json!(["name"]));
    }

    #[derive(Deserialize, JsonSchema)]
    enum Size {
        Small,
        Large,
    }

    /// A color.
    #[derive(Deserialize, JsonSchema)]
    enum Color {
        /// Like fire.
        Red,
        /// Like the sea.
        Blue,
    }

    #[derive(Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Shirt {
        size: Option<Size>,
        /// The color of the cloth.
        cloth: Option<Color>,
        seams: Option<Color>,
    }

    #[test]
    fn an_optional_choice_has_no_null() {
        let fields = form::<Shirt>()["properties"].take();
        let color = |about: &str| json!({"type": "string", "enum": ["Red", "Blue"], "description": about});
        assert_eq!(fields["size"], json!({"type": "string", "enum": ["Small", "Large"]}));
        assert_eq!(fields["cloth"], color("The color of the cloth."));
        assert_eq!(fields["seams"], color("A color."));
    }

    #[test]
    fn a_question_holds_its_messages_in_order() {
        let request = SampleRequest::new("a", 5).assistant("b").user("c").system("s");
        let request = Value::Object(request.0);
        let texts: Vec<&Value> =
            request["messages"].as_array().unwrap().iter().map(|m| &m["content"]["text"]).collect();
        assert_eq!(texts, ["a", "b", "c"]);
        assert_eq!((&request["maxTokens"], &request["systemPrompt"]), (&json!(5), &json!("s")));
    }
}
