//! One generation: from the guest's options to a message that was validated and appended.
//!
//! The token loop runs here and in the engine; the guest is called once, with the result. Nothing is appended but a
//! complete message whose tool calls have valid arguments.

use super::{
    budget::{Reservation, Turn},
    conversation::{Conversation, Generating},
    text_stream::TextSink,
};
use crate::{
    RunEvent,
    bindings::{
        inference::{self, GenerateOptions, OutputFormat},
        types::{self, Error},
    },
};
use serde_json::Value;
use skep_engine::{
    Constraint, EngineError, FinishReason, GenerateRequest, Sampling, TokenEvent, Usage,
    chat::{ChatEvent, ChatFinish, ChatOptions, ChatOutcome, ChatStream, ToolCall, ToolChoice},
};
use skep_model::SpecialTokens;
use std::sync::Arc;

const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_CONSTRAINT_BYTES: usize = 256 << 10;

/// A generation of a conversation's next message that has begun.
pub(crate) struct Begun {
    turn: Arc<Turn>,
    generating: Generating,
    stream: ChatStream,
    reservation: Reservation,
    visible: bool,
}

/// Takes the conversation and submits the request; what is wrong with the request is known at once.
pub(crate) fn begin(
    turn: Arc<Turn>,
    conversation: &Conversation,
    options: GenerateOptions,
) -> Result<Begun, Error> {
    let visible = options.visible;
    let mut chat = chat_options(&turn, options)?;
    let (generating, transcript) = conversation.begin()?;
    let reservation = turn.reserve(asked(chat.max_tokens))?;
    chat.max_tokens = Some(reservation.max_tokens as usize);
    let stream = transcript.generate(&conversation.engine, chat).map_err(engine_error)?;
    Ok(Begun { turn, generating, stream, reservation, visible })
}

impl Begun {
    /// Generates the message and appends it. The text also goes to `sink` as it comes.
    pub(crate) async fn finish(self, sink: Option<TextSink>) -> Result<inference::Generation, Error> {
        let Begun { turn, generating, stream, reservation, visible } = self;
        let outcome = follow(&turn, stream, reservation, visible, sink).await?;
        if outcome.cut_off {
            return Err(Error::Truncated);
        }
        let calls = validate_calls(&turn, &outcome.tool_calls)?;
        generating.commit(&outcome)?;
        for (call, arguments) in outcome.tool_calls.iter().zip(calls) {
            turn.events.push(RunEvent::ToolCall { id: call.id.clone(), name: call.name.clone(), arguments });
        }
        Ok(inference::Generation {
            text: outcome.text,
            tool_calls: outcome.tool_calls.into_iter().map(tool_call).collect(),
            finish: match outcome.finish {
                ChatFinish::Stop => inference::FinishReason::Stop,
                ChatFinish::Length => inference::FinishReason::Length,
                ChatFinish::ToolCalls => inference::FinishReason::ToolCalls,
            },
            usage: usage(&outcome.usage),
            timing: timing(&outcome.timing),
        })
    }
}

/// Continues a text.
pub(crate) async fn complete(
    turn: Arc<Turn>,
    engine: skep_engine::Engine,
    prompt: String,
    options: GenerateOptions,
) -> Result<inference::Generation, Error> {
    if !options.tools.is_empty() {
        return Err(Error::InvalidArgument("tools: a completion calls none; use a conversation".into()));
    }
    let visible = options.visible;
    let chat = chat_options(&turn, options)?;
    let mut tokens =
        engine.tokenizer().encode(&prompt, SpecialTokens::Parse).map_err(|e| engine_error(e.into()))?;
    let info = engine.info();
    if info.add_bos
        && let Some(bos) = info.bos
    {
        tokens.insert(0, bos);
    }
    let mut reservation = turn.reserve(asked(chat.max_tokens))?;
    let mut request = GenerateRequest::new(tokens);
    request.sampling = chat.sampling;
    request.seed = chat.seed;
    request.max_tokens = Some(reservation.max_tokens as usize);
    request.stop = chat.stop;
    request.constraint = chat.output;
    request.affinity = chat.affinity;
    request.deadline = chat.deadline;
    let must_complete = request.constraint.is_some();

    let mut stream = engine.generate(request).map_err(engine_error)?;
    let mut text = String::new();
    while let Some(event) = stream.next().await {
        let finished = match event.map_err(engine_error)? {
            TokenEvent::Token(token) => {
                reservation.produced_one();
                append(&turn, visible, &mut text, &token.text);
                continue;
            }
            TokenEvent::Finished(finished) => finished,
            TokenEvent::Started { .. } | TokenEvent::PromptLogprobs(_) => continue,
        };
        append(&turn, visible, &mut text, &finished.text_rest);
        reservation.settle(&finished.usage);
        turn.events.push(RunEvent::Generation { usage: finished.usage, timing: finished.timing });
        if must_complete && finished.reason.cuts_off() {
            return Err(Error::Truncated);
        }
        let finish = match finished.reason {
            FinishReason::Length => inference::FinishReason::Length,
            _ => inference::FinishReason::Stop,
        };
        return Ok(inference::Generation {
            text,
            tool_calls: Vec::new(),
            finish,
            usage: usage(&finished.usage),
            timing: timing(&finished.timing),
        });
    }
    Err(Error::Internal("the generation ended without a result".into()))
}

/// Reads a chat to its end.
async fn follow(
    turn: &Turn,
    mut stream: ChatStream,
    mut reservation: Reservation,
    visible: bool,
    sink: Option<TextSink>,
) -> Result<ChatOutcome, Error> {
    while let Some(event) = stream.next().await {
        match event.map_err(engine_error)? {
            ChatEvent::Text { delta, .. } => {
                reservation.produced_one();
                if visible && !delta.is_empty() {
                    turn.events.push(RunEvent::Delta { text: delta.clone() });
                }
                if let Some(sink) = &sink {
                    sink.push(&delta);
                }
            }
            ChatEvent::ToolCallArguments { .. } => reservation.produced_one(),
            ChatEvent::Started { .. }
            | ChatEvent::ToolCallStarted { .. }
            | ChatEvent::ToolCallFinished { .. } => {}
            ChatEvent::Finished(outcome) => {
                reservation.settle(&outcome.usage);
                turn.events.push(RunEvent::Generation { usage: outcome.usage, timing: outcome.timing });
                return Ok(outcome);
            }
        }
    }
    Err(Error::Internal("the generation ended without a result".into()))
}

fn append(turn: &Turn, visible: bool, text: &mut String, delta: &str) {
    text.push_str(delta);
    if visible && !delta.is_empty() {
        turn.events.push(RunEvent::Delta { text: delta.to_owned() });
    }
}

/// Decoding was constrained by the schema; this is the second enforcement, by another implementation.
fn validate_calls(turn: &Turn, calls: &[ToolCall]) -> Result<Vec<Value>, Error> {
    let arguments = calls.iter().map(|call| {
        let tool = turn.agent.tools.get(&call.name);
        let tool = tool.ok_or_else(|| {
            Error::SchemaInvalid(format!("the model called {:?}, which is no tool", call.name))
        })?;
        tool.arguments(&call.arguments).map_err(Error::SchemaInvalid)
    });
    arguments.collect()
}

fn chat_options(turn: &Turn, options: GenerateOptions) -> Result<ChatOptions, Error> {
    let mut tools = Vec::with_capacity(options.tools.len().min(128));
    for name in &options.tools {
        let Some(tool) = turn.agent.tools.get(name) else {
            let known = turn.agent.tools.names().join(", ");
            let message = format!("tools: the agent describes no tool {name:?}; it describes: {known}");
            return Err(Error::InvalidArgument(message));
        };
        if !tools.iter().any(|other: &skep_engine::chat::ToolSpec| other.name == *name) {
            tools.push(tool.spec());
        }
    }
    let stop_bytes = options.stop.iter().map(String::len).max().unwrap_or(0);
    if options.stop.len() > MAX_STOP_STRINGS
        || stop_bytes > MAX_STOP_BYTES
        || options.stop.iter().any(String::is_empty)
    {
        let message = format!("stop: at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes");
        return Err(Error::InvalidArgument(message));
    }
    if options.max_tokens == Some(0) {
        return Err(Error::InvalidArgument("max-tokens: at least 1".into()));
    }
    let (sampling, seed) = sampling(&options.sampling)?;
    Ok(ChatOptions {
        tools,
        tool_choice: match options.tool_choice {
            inference::ToolChoice::Auto => ToolChoice::Auto,
            inference::ToolChoice::None => ToolChoice::None,
            inference::ToolChoice::Required => ToolChoice::Required,
            inference::ToolChoice::Named(name) => ToolChoice::Named(name),
        },
        // A small model that may go on calling does, to its limit. An agent that wants another call generates again.
        parallel_tool_calls: false,
        output: constraint(options.output)?,
        sampling,
        seed,
        max_tokens: options.max_tokens.map(|tokens| tokens as usize),
        stop: options.stop,
        affinity: turn.affinity.clone(),
        deadline: Some(turn.deadline),
        ..ChatOptions::default()
    })
}

fn sampling(options: &inference::Sampling) -> Result<(Sampling, Option<u64>), Error> {
    let default = Sampling::default();
    let sampling = Sampling {
        temperature: options.temperature.unwrap_or(default.temperature),
        top_k: options.top_k.unwrap_or(default.top_k),
        top_p: options.top_p.unwrap_or(default.top_p),
        min_p: options.min_p.unwrap_or(default.min_p),
        frequency_penalty: options.frequency_penalty.unwrap_or(default.frequency_penalty),
        presence_penalty: options.presence_penalty.unwrap_or(default.presence_penalty),
        repetition_penalty: options.repetition_penalty.unwrap_or(default.repetition_penalty),
        ..default
    };
    sampling.validate().map_err(|why| Error::InvalidArgument(format!("sampling: {why}")))?;
    Ok((sampling, options.seed))
}

fn constraint(output: OutputFormat) -> Result<Option<Constraint>, Error> {
    let bytes = match &output {
        OutputFormat::Text => return Ok(None),
        OutputFormat::JsonSchema(text) | OutputFormat::Regex(text) | OutputFormat::Grammar(text) => {
            text.len()
        }
    };
    if bytes > MAX_CONSTRAINT_BYTES {
        let message = format!("output: {bytes} bytes of schema; {MAX_CONSTRAINT_BYTES} are allowed");
        return Err(Error::SchemaInvalid(message));
    }
    Ok(Some(match output {
        OutputFormat::Text => return Ok(None),
        OutputFormat::JsonSchema(text) => match serde_json::from_str(&text) {
            Ok(schema) => Constraint::JsonSchema(schema),
            Err(error) => {
                return Err(Error::SchemaInvalid(format!("output: the JSON Schema is not JSON: {error}")));
            }
        },
        OutputFormat::Regex(text) => Constraint::Regex(text),
        OutputFormat::Grammar(text) => Constraint::Lark(text),
    }))
}

/// What an engine error means to a guest.
pub(crate) fn engine_error(error: EngineError) -> Error {
    match error {
        EngineError::Busy { retry_after_ms } => Error::Busy(retry_after_ms),
        EngineError::ContextOverflow { limit, .. } => {
            Error::ContextOverflow(u32::try_from(limit).unwrap_or(u32::MAX))
        }
        EngineError::InvalidRequest { .. } => Error::InvalidArgument(error.to_string()),
        EngineError::Constraint { .. } => Error::SchemaInvalid(error.to_string()),
        EngineError::ModelUnknown { .. } => Error::ModelUnknown(error.to_string()),
        EngineError::Truncated => Error::Truncated,
        EngineError::Cancelled | EngineError::DeadlineExceeded | EngineError::ShuttingDown => {
            Error::Cancelled
        }
        other => Error::Internal(other.to_string()),
    }
}

pub(crate) fn usage(usage: &Usage) -> types::Usage {
    types::Usage {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        completion_tokens: usage.completion_tokens,
    }
}

pub(crate) fn tool_call(call: ToolCall) -> types::ToolCall {
    types::ToolCall { id: call.id, name: call.name, arguments: call.arguments }
}

fn timing(timing: &skep_engine::Timing) -> types::Timing {
    types::Timing {
        queue_us: timing.queue_us,
        first_token_us: timing.first_token_us,
        total_us: timing.total_us,
    }
}

fn asked(max_tokens: Option<usize>) -> Option<u32> {
    max_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX))
}
