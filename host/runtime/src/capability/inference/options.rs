//! Converts a guest's options for a generation to those of the engine, and reports errors in them.

use crate::{
    bindings::{
        inference::{self, GenerateOptions, OutputFormat},
        types::Error,
    },
    capability::Turn,
    tool::{Tool, examples},
};
use skep_engine::{
    Constraint, Model,
    chat::{ChatMessage, ChatOptions, SamplingOverrides, ToolChoice},
};
use std::sync::Arc;

const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_CONSTRAINT_BYTES: usize = 256 << 10;

pub(in crate::capability) fn chat_options(
    turn: &Turn,
    model: &Model,
    options: &GenerateOptions,
) -> Result<ChatOptions, Error> {
    let mut tools: Vec<Arc<Tool>> = Vec::with_capacity(options.tools.len().min(128));
    for name in &options.tools {
        let Some(tool) = turn.tool(name) else {
            let known = match turn.agent.tools.names() {
                names if names.is_empty() => "none".to_owned(),
                names => names.join(", "),
            };
            let message = format!(
                "tools: {name:?} is neither a tool that the agent describes nor one that it has listed; it describes: {known}"
            );
            return Err(Error::InvalidArgument(message));
        };
        if !tools.iter().any(|other| other.definition.name == tool.definition.name) {
            tools.push(tool.clone());
        }
    }
    let stop_bytes = options.stop.iter().map(String::len).max().unwrap_or(0);
    if options.stop.len() > MAX_STOP_STRINGS
        || stop_bytes > MAX_STOP_BYTES
        || options.stop.iter().any(String::is_empty)
    {
        let message =
            format!("stop: at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes are allowed");
        return Err(Error::InvalidArgument(message));
    }
    if options.max_tokens == Some(0) {
        return Err(Error::InvalidArgument("max-tokens: must be at least 1".into()));
    }
    let sampling_overrides = overrides(&options.sampling);
    let sampling = sampling_overrides.over(&model.sampling());
    sampling.validate().map_err(|why| Error::InvalidArgument(format!("sampling: {why}")))?;
    let (output, output_examples) = output(&options.output)?;
    let mut examples = examples::in_turn(&tools);
    examples.extend(output_examples);
    Ok(ChatOptions {
        tools: tools.iter().map(|tool| tool.spec()).collect(),
        examples,
        tool_choice: match &options.tool_choice {
            inference::ToolChoice::Auto => ToolChoice::Auto,
            inference::ToolChoice::None => ToolChoice::None,
            inference::ToolChoice::Required => ToolChoice::Required,
            inference::ToolChoice::Named(name) => ToolChoice::Named(
                turn.tool(name).map_or_else(|| name.clone(), |tool| tool.definition.name.clone()),
            ),
        },
        // A small model that may make several calls keeps calling up to its token limit. An agent that wants another call
        // generates again.
        parallel_tool_calls: false,
        output,
        sampling,
        sampling_overrides,
        seed: options.sampling.seed,
        max_tokens: options.max_tokens.map(|tokens| tokens as usize),
        stop: options.stop.clone(),
        affinity: turn.affinity.clone(),
        priority: turn.priority,
        deadline: Some(turn.deadline.at()),
        observer: turn.observer.clone(),
        ..ChatOptions::default()
    })
}

/// Returns the sampling parameters that the guest sets.
fn overrides(sampling: &inference::Sampling) -> SamplingOverrides {
    SamplingOverrides {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        repetition_penalty: sampling.repetition_penalty,
    }
}

/// Returns the constraint on the answer, and the examples in its schema.
fn output(output: &OutputFormat) -> Result<(Option<Constraint>, Vec<ChatMessage>), Error> {
    let bytes = match output {
        OutputFormat::Text => return Ok((None, Vec::new())),
        OutputFormat::JsonSchema(text) | OutputFormat::Regex(text) | OutputFormat::Grammar(text) => {
            text.len()
        }
    };
    if bytes > MAX_CONSTRAINT_BYTES {
        let message =
            format!("output: the schema has {bytes} bytes; at most {MAX_CONSTRAINT_BYTES} are allowed");
        return Err(Error::SchemaInvalid(message));
    }
    let mut examples = Vec::new();
    let constraint = match output {
        OutputFormat::Text => None,
        OutputFormat::JsonSchema(text) => {
            let mut schema = serde_json::from_str(text).map_err(|error| {
                Error::SchemaInvalid(format!("output: the JSON Schema is not JSON: {error}"))
            })?;
            if let Some(written) = examples::take(&mut schema) {
                let output_examples = examples::output_examples(&schema, written);
                examples = output_examples.map_err(|why| Error::SchemaInvalid(format!("output: {why}")))?;
            }
            Some(Constraint::JsonSchema(schema))
        }
        OutputFormat::Regex(text) => Some(Constraint::Regex(text.clone())),
        OutputFormat::Grammar(text) => Some(Constraint::Lark(text.clone())),
    };
    Ok((constraint, examples))
}

pub(in crate::capability) fn tokens_to_reserve(max_tokens: Option<usize>) -> Option<u32> {
    max_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX))
}
