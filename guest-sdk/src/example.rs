//! Examples: turns that the author of an agent shows its model before a conversation's first message.
//!
//! Plain values, and how they cross to the host: in the JSON Schema that they are for, as its annotation `x-examples`.

use serde_json::{Value, json};

const ANNOTATION: &str = "x-examples";

/// An example of a tool, as `#[tool(example(…))]` writes it.
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
    /// What the user says.
    pub user: String,
    /// The call that the model makes then; `None` if the tool is not called.
    pub call: Option<ExampleCall>,
    /// What the model answers in the end.
    pub answer: String,
}

/// The call of an example.
#[derive(Debug, Clone, PartialEq)]
pub struct ExampleCall {
    /// Validate against the tool's input schema.
    pub arguments: Value,
    /// Validates against the tool's output schema.
    pub result: Value,
}

/// An example of an answer that has a form: what the user says, and the answer as JSON. See
/// [`Conversation::example`](crate::Conversation::example).
#[derive(Debug, Clone, PartialEq)]
pub struct OutputExample {
    /// What the user says.
    pub user: String,
    /// Validates against the schema of the output.
    pub answer: Value,
}

impl Example {
    pub(crate) fn parsed(&self) -> ToolExample {
        let value = |text| serde_json::from_str(text).expect("`#[tool]` writes JSON");
        let call = |(arguments, result)| ExampleCall { arguments: value(arguments), result: value(result) };
        ToolExample { user: self.user.to_owned(), call: self.call.map(call), answer: self.answer.to_owned() }
    }
}

/// The input schema of a tool with its examples.
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

/// The schema of an output with its examples.
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
