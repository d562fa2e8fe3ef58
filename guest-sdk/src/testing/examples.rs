//! Examples in a test: checked in the same way as in a host, and included in the prompts that the model
//! receives.

use serde_json::Value;

use super::validate::validate;
use crate::{
    Entry, ExampleCall, GenerateOptions, Output, OutputExample, ToolCall, ToolDefinition, ToolExample,
};

/// Returns an error if an example of the tool is invalid.
pub fn check(tool: &ToolDefinition) -> Result<(), String> {
    for (index, ToolExample { user, call, .. }) in tool.examples.iter().enumerate() {
        let Some(ExampleCall { arguments, result }) = call else { continue };
        let wrong = |what, why| {
            format!("tool `{}`: invalid {what} in its example {} ({user:?}): {why}", tool.name, index + 1)
        };
        validate(&tool.input_schema, arguments).map_err(|why| wrong("arguments", why))?;
        validate(&tool.output_schema, result).map_err(|why| wrong("result", why))?;
    }
    Ok(())
}

/// Returns the prompt with the examples before the first real message.
pub fn shown(
    prompt: Vec<Entry>,
    tools: &[ToolDefinition],
    options: &GenerateOptions,
) -> Result<Vec<Entry>, String> {
    let offered = options.tools.iter().filter_map(|name| tools.iter().find(|tool| tool.name == *name));
    let offered: Vec<&ToolDefinition> = offered.collect();
    let rounds = offered.iter().map(|tool| tool.examples.len()).max().unwrap_or(0);
    let mut examples = Vec::new();
    for index in 0..rounds {
        for tool in &offered {
            let example = tool.examples.get(index);
            examples.extend(example.into_iter().flat_map(|example| of_tool(tool, index, example)));
        }
    }
    if let Output::JsonSchema(schema) = &options.output {
        for OutputExample { user, answer } in &options.examples {
            validate(schema, answer)
                .map_err(|why| format!("invalid answer in the example {user:?}: {why}"))?;
            examples.extend([Entry::User(user.clone()), assistant(answer.to_string(), Vec::new())]);
        }
    }
    let system = usize::from(matches!(prompt.first(), Some(Entry::System(_))));
    let mut shown = prompt;
    shown.splice(system..system, examples);
    Ok(shown)
}

fn of_tool(tool: &ToolDefinition, index: usize, example: &ToolExample) -> Vec<Entry> {
    let ToolExample { user, call, answer } = example;
    let mut entries = vec![Entry::User(user.clone())];
    if let Some(ExampleCall { arguments, result }) = call {
        let (id, name) = (format!("example_{}_{}", index + 1, tool.name), tool.name.clone());
        let call = ToolCall { id: id.clone(), name, arguments: arguments.clone() };
        entries.push(assistant(String::new(), vec![call]));
        entries.push(Entry::Tool { call_id: id, outcome: Ok::<Value, String>(result.clone()) });
    }
    entries.push(assistant(answer.clone(), Vec::new()));
    entries
}

fn assistant(text: String, tool_calls: Vec<ToolCall>) -> Entry {
    Entry::Assistant { text, tool_calls }
}
