//! Examples that the author of an agent shows its model before the first message of a conversation.
//!
//! They are plain values. They cross to the host inside the JSON Schema that they belong to, as its
//! annotation `x-examples`.

use serde_json::{Value, json};

const ANNOTATION: &str = "x-examples";

/// An example of a tool, as written in `#[tool(example(…))]`.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Example {
    pub user: &'static str,
    /// The arguments and the result, as JSON.
    pub call: Option<(&'static str, &'static str)>,
    pub answer: &'static str,
}

/// A short conversation that shows a model how a tool is used.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolExample {
    /// The user's message.
    pub user: String,
    /// The call that the model makes next; `None` if the tool is not called.
    pub call: Option<ExampleCall>,
    /// The model's final answer.
    pub answer: String,
}

/// The call of an example.
#[derive(Debug, Clone, PartialEq)]
pub struct ExampleCall {
    /// The arguments, which validate against the tool's input schema.
    pub arguments: Value,
    /// The result, which validates against the tool's output schema.
    pub result: Value,
}

/// An example of structured output: a user message, and the answer as JSON. See
/// [`Conversation::example`](crate::Conversation::example).
#[derive(Debug, Clone, PartialEq)]
pub struct OutputExample {
    /// The user's message.
    pub user: String,
    /// The answer, which validates against the schema of the output.
    pub answer: Value,
}

impl Example {
    pub(crate) fn parsed(&self) -> ToolExample {
        let value = |text| serde_json::from_str(text).expect("`#[tool]` writes JSON");
        let call = |(arguments, result)| ExampleCall { arguments: value(arguments), result: value(result) };
        ToolExample { user: self.user.to_owned(), call: self.call.map(call), answer: self.answer.to_owned() }
    }
}

/// Adds the examples of a tool to its input schema.
#[cfg_attr(not(target_arch = "wasm32"), allow(dead_code))]
pub(crate) fn annotate_input(schema: &mut Value, examples: &[ToolExample]) {
    let written = |ToolExample { user, call, answer }: &ToolExample| match call {
        Some(ExampleCall { arguments, result }) => {
            json!({"user": user, "call": arguments, "result": result, "answer": answer})
        }
        None => json!({"user": user, "answer": answer}),
    };
    annotate(schema, examples.iter().map(written).collect());
}

/// Adds the examples of an output to its schema.
#[cfg_attr(not(target_arch = "wasm32"), allow(dead_code))]
pub(crate) fn annotate_output(schema: &mut Value, examples: &[OutputExample]) {
    let written = |OutputExample { user, answer }: &OutputExample| json!({"user": user, "answer": answer});
    annotate(schema, examples.iter().map(written).collect());
}

fn annotate(schema: &mut Value, examples: Vec<Value>) {
    if let Some(schema) = schema.as_object_mut().filter(|_| !examples.is_empty()) {
        schema.insert(ANNOTATION.to_owned(), examples.into());
    }
}
