//! One generation: from the guest's options to a message that was validated and appended.
//!
//! The token loop runs here and in the engine; the guest is called once, with the result. Nothing is appended but a
//! complete message whose tool calls have valid arguments. Tokens are journalled as they come: a generation that a crash
//! cut off goes on after the last one that was, and one that had ended is answered from the journal.

use super::{
    budget::{Reservation, Turn},
    conversation::{Conversation, Generating},
    generation_record::{GenerationRecord, Message, WrittenUsage},
    text_stream::TextSink,
};
use crate::{
    RunEvent,
    bindings::{
        inference::{self, GenerateOptions, OutputFormat},
        types::{self, Error},
    },
    journal::{Call, Identity, Place, Stopped},
};
use serde_json::Value;
use skep_engine::{
    Constraint, EngineError, FinishReason, Finished, GenerateRequest, Sampling, Timing, TokenEvent,
    TokenStream, Usage,
    chat::{ChatEvent, ChatFinish, ChatOptions, ChatOutcome, ChatStream, ToolCall, ToolChoice, Transcript},
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
    /// The conversation as it was.
    before: Transcript,
    reservation: Reservation,
    work: Work,
}

enum Work {
    Live {
        call: Call,
        stream: Box<ChatStream>,
        visible: bool,
    },
    /// It ended before a restart.
    Recorded {
        record: GenerationRecord,
        place: Place,
    },
}

type Generated = Result<Result<inference::Generation, Error>, Stopped>;

/// Takes the conversation and submits the request; what is wrong with the request is known at once.
pub(crate) fn begin(
    turn: Arc<Turn>,
    conversation: &Conversation,
    options: GenerateOptions,
) -> Result<Result<Begun, Error>, Stopped> {
    let visible = options.visible;
    let taken = chat_options(&turn, &options).and_then(|chat| Ok((chat, conversation.begin()?)));
    let (mut chat, (generating, before)) = match taken {
        Ok(taken) => taken,
        Err(error) => return Ok(Err(error)),
    };
    let mut call = turn.journal.call(Identity::new("generate", &(&options, before.messages())))?;
    let recorded = turn.journal.recorded(&mut call)?;
    if let Some((GenerationRecord::Refused(error), _place)) = recorded {
        return Ok(Err(error));
    }
    let reservation = match turn.reserve(asked(chat.max_tokens)) {
        Ok(reservation) => reservation,
        Err(error) => return Ok(Err(refuse(&turn, &call, error))),
    };
    if let Some((record, place)) = recorded {
        let work = Work::Recorded { record, place };
        return Ok(Ok(Begun { turn, generating, before, reservation, work }));
    }
    chat.max_tokens = Some(reservation.max_tokens as usize);
    chat.seed = Some(chat.seed.unwrap_or_else(|| turn.journal.seed_for(&call)));
    chat.resume = call.tokens().to_vec();
    Ok(match before.generate(&conversation.engine, chat).map_err(engine_error) {
        Ok(stream) => {
            let work = Work::Live { call, stream: Box::new(stream), visible };
            Ok(Begun { turn, generating, before, reservation, work })
        }
        Err(error) => Err(refuse(&turn, &call, error)),
    })
}

impl Begun {
    /// Generates the message and appends it. The text also goes to `sink` as it comes.
    pub(crate) async fn finish(self, sink: Option<TextSink>) -> Generated {
        let Begun { turn, generating, before, reservation, work } = self;
        let (call, stream, visible) = match work {
            Work::Live { call, stream, visible } => (call, stream, visible),
            Work::Recorded { record, place } => {
                place.reached().await;
                return Ok(repeat(record, reservation, Some((generating, &before)), sink));
            }
        };
        let followed = follow(&turn, &call, *stream, reservation, visible, sink).await;
        let outcome = match followed {
            Ok(outcome) => outcome,
            Err(error) => return Ok(Err(end(&turn, &call, error, None))),
        };
        let figures = Some((outcome.usage, outcome.timing));
        if outcome.cut_off {
            return Ok(Err(end(&turn, &call, Error::Truncated, figures)));
        }
        let arguments = match validate_calls(&turn, &outcome.tool_calls) {
            Ok(arguments) => arguments,
            Err(error) => return Ok(Err(end(&turn, &call, error, figures))),
        };
        if let Err(error) = generating.commit(&outcome) {
            return Ok(Err(end(&turn, &call, error, figures)));
        }
        let message = Message::of(&outcome, &before);
        let mut events = vec![RunEvent::Generation { usage: outcome.usage, timing: outcome.timing }];
        events.extend(outcome.tool_calls.iter().zip(arguments).map(|(call, arguments)| RunEvent::ToolCall {
            id: call.id.clone(),
            name: call.name.clone(),
            arguments,
        }));
        let generation = inference::Generation {
            text: outcome.text,
            tool_calls: outcome.tool_calls.into_iter().map(tool_call).collect(),
            finish: match outcome.finish {
                ChatFinish::Stop => inference::FinishReason::Stop,
                ChatFinish::Length => inference::FinishReason::Length,
                ChatFinish::ToolCalls => inference::FinishReason::ToolCalls,
            },
            usage: usage(&outcome.usage),
            timing: timing(&outcome.timing),
        };
        let record = GenerationRecord::Ended {
            result: Ok(generation.clone()),
            usage: Some(WrittenUsage(outcome.usage)),
            message: Some(message),
        };
        turn.journal.ended(&call, &record, events);
        Ok(Ok(generation))
    }
}

/// Continues a text.
pub(crate) async fn complete(
    turn: Arc<Turn>,
    engine: skep_engine::Engine,
    prompt: String,
    options: GenerateOptions,
) -> Generated {
    if !options.tools.is_empty() {
        let message = "tools: a completion calls none; use a conversation";
        return Ok(Err(Error::InvalidArgument(message.into())));
    }
    let visible = options.visible;
    let checked = chat_options(&turn, &options).and_then(|chat| {
        let tokens = engine.tokenizer().encode(&prompt, SpecialTokens::Parse);
        Ok((chat, tokens.map_err(|error| engine_error(error.into()))?))
    });
    let (chat, mut tokens) = match checked {
        Ok(checked) => checked,
        Err(error) => return Ok(Err(error)),
    };
    let info = engine.info();
    if info.add_bos
        && let Some(bos) = info.bos
    {
        tokens.insert(0, bos);
    }
    let mut call = turn.journal.call(Identity::new("complete", &(&info.name, &prompt, &options)))?;
    let recorded = turn.journal.recorded(&mut call)?;
    if let Some((GenerationRecord::Refused(error), _place)) = recorded {
        return Ok(Err(error));
    }
    let reservation = match turn.reserve(asked(chat.max_tokens)) {
        Ok(reservation) => reservation,
        Err(error) => return Ok(Err(refuse(&turn, &call, error))),
    };
    if let Some((record, place)) = recorded {
        place.reached().await;
        return Ok(repeat(record, reservation, None, None));
    }
    let mut request = GenerateRequest::new(tokens);
    request.sampling = chat.sampling;
    request.seed = Some(chat.seed.unwrap_or_else(|| turn.journal.seed_for(&call)));
    request.max_tokens = Some(reservation.max_tokens as usize);
    request.stop = chat.stop;
    request.constraint = chat.output;
    request.affinity = chat.affinity;
    request.deadline = chat.deadline;
    request.resume = call.tokens().to_vec();
    let must_complete = request.constraint.is_some();
    let stream = match engine.generate(request).map_err(engine_error) {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(refuse(&turn, &call, error))),
    };
    let (text, finished) = match follow_text(&turn, &call, stream, reservation, visible).await {
        Ok(followed) => followed,
        Err(error) => return Ok(Err(end(&turn, &call, error, None))),
    };
    let figures = Some((finished.usage, finished.timing));
    if must_complete && finished.reason.cuts_off() {
        return Ok(Err(end(&turn, &call, Error::Truncated, figures)));
    }
    let generation = inference::Generation {
        text,
        tool_calls: Vec::new(),
        finish: match finished.reason {
            FinishReason::Length => inference::FinishReason::Length,
            _ => inference::FinishReason::Stop,
        },
        usage: usage(&finished.usage),
        timing: timing(&finished.timing),
    };
    let record = GenerationRecord::Ended {
        result: Ok(generation.clone()),
        usage: Some(WrittenUsage(finished.usage)),
        message: None,
    };
    let event = RunEvent::Generation { usage: finished.usage, timing: finished.timing };
    turn.journal.ended(&call, &record, vec![event]);
    Ok(Ok(generation))
}

/// The guest is told that its generation never began.
fn refuse(turn: &Turn, call: &Call, error: Error) -> Error {
    if !matches!(error, Error::Cancelled) {
        turn.journal.ended(call, &GenerationRecord::Refused(error.clone()), Vec::new());
    }
    error
}

/// The guest is told that its generation came to nothing. What only the end of the turn stopped is not journalled: when
/// the turn is run again, it goes on.
fn end(turn: &Turn, call: &Call, error: Error, figures: Option<(Usage, Timing)>) -> Error {
    if !matches!(error, Error::Cancelled) {
        let usage = figures.map(|(usage, _)| WrittenUsage(usage));
        let record = GenerationRecord::Ended { result: Err(error.clone()), usage, message: None };
        let event = figures.map(|(usage, timing)| RunEvent::Generation { usage, timing });
        turn.journal.ended(call, &record, event.into_iter().collect());
    }
    error
}

/// Tells the guest again what it was told before a restart.
fn repeat(
    record: GenerationRecord,
    reservation: Reservation,
    conversation: Option<(Generating, &Transcript)>,
    sink: Option<TextSink>,
) -> Result<inference::Generation, Error> {
    let (result, usage, message) = match record {
        GenerationRecord::Refused(error) => return Err(error),
        GenerationRecord::Ended { result, usage, message } => (result, usage, message),
    };
    let usage = usage.map(|WrittenUsage(usage)| usage).unwrap_or_default();
    reservation.settle(&usage);
    let generation = result?;
    if let (Some(message), Some((generating, before))) = (message, conversation) {
        message.append(generating, before, &generation, usage)?;
    }
    if let Some(sink) = sink {
        sink.push(&generation.text);
    }
    Ok(generation)
}

/// Journals the tokens of one generation as they come, and what the caller is shown with them.
struct Progress<'a> {
    turn: &'a Turn,
    call: &'a Call,
    visible: bool,
    /// Tokens that are in the journal.
    journalled: usize,
    /// Bytes of text that the caller was shown before a restart.
    shown_before: usize,
}

impl<'a> Progress<'a> {
    fn new(turn: &'a Turn, call: &'a Call, visible: bool) -> Self {
        let (journalled, shown_before) = (call.tokens().len(), call.shown_bytes());
        Progress { turn, call, visible, journalled, shown_before }
    }

    /// `produced` are all tokens so far, `delta` the text that the last ones gave.
    fn note(&mut self, produced: &[u32], delta: &str) {
        let known = self.shown_before.min(delta.len());
        let text = if self.visible { &delta[known..] } else { "" };
        if self.visible {
            self.shown_before -= known;
        }
        let new = produced.get(self.journalled..).unwrap_or_default();
        if new.is_empty() && text.is_empty() {
            return;
        }
        self.journalled += new.len();
        self.turn.journal.tokens(self.call, new, text);
    }
}

/// Reads a chat to its end.
async fn follow(
    turn: &Turn,
    call: &Call,
    mut stream: ChatStream,
    mut reservation: Reservation,
    visible: bool,
    sink: Option<TextSink>,
) -> Result<ChatOutcome, Error> {
    let mut progress = Progress::new(turn, call, visible);
    while let Some(event) = stream.next().await {
        match event.map_err(engine_error)? {
            ChatEvent::Text { delta, .. } => {
                reservation.produced_one();
                progress.note(stream.produced(), &delta);
                if let Some(sink) = &sink {
                    sink.push(&delta);
                }
            }
            ChatEvent::ToolCallArguments { .. } => {
                reservation.produced_one();
                progress.note(stream.produced(), "");
            }
            ChatEvent::Started { .. }
            | ChatEvent::ToolCallStarted { .. }
            | ChatEvent::ToolCallFinished { .. } => {}
            ChatEvent::Finished(outcome) => {
                reservation.settle(&outcome.usage);
                return Ok(outcome);
            }
        }
    }
    Err(Error::Internal("the generation ended without a result".into()))
}

/// Reads a completion to its end.
async fn follow_text(
    turn: &Turn,
    call: &Call,
    mut stream: TokenStream,
    mut reservation: Reservation,
    visible: bool,
) -> Result<(String, Finished), Error> {
    let mut progress = Progress::new(turn, call, visible);
    let (mut text, mut produced) = (String::new(), Vec::new());
    while let Some(event) = stream.next().await {
        match event.map_err(engine_error)? {
            TokenEvent::Token(token) => {
                reservation.produced_one();
                produced.push(token.id);
                text.push_str(&token.text);
                progress.note(&produced, &token.text);
            }
            TokenEvent::Finished(finished) => {
                text.push_str(&finished.text_rest);
                progress.note(&produced, &finished.text_rest);
                reservation.settle(&finished.usage);
                return Ok((text, finished));
            }
            TokenEvent::Started { .. } | TokenEvent::PromptLogprobs(_) => {}
        }
    }
    Err(Error::Internal("the generation ended without a result".into()))
}

/// Decoding was constrained by the schema; this is the second enforcement, by another implementation.
fn validate_calls(turn: &Turn, calls: &[ToolCall]) -> Result<Vec<Value>, Error> {
    let arguments = calls.iter().map(|call| {
        let tool = turn.tool(&call.name);
        let tool = tool.ok_or_else(|| {
            Error::SchemaInvalid(format!("the model called {:?}, which is no tool", call.name))
        })?;
        tool.arguments(&call.arguments).map_err(Error::SchemaInvalid)
    });
    arguments.collect()
}

fn chat_options(turn: &Turn, options: &GenerateOptions) -> Result<ChatOptions, Error> {
    let mut tools = Vec::with_capacity(options.tools.len().min(128));
    for name in &options.tools {
        let Some(tool) = turn.tool(name) else {
            let known = turn.agent.tools.names().join(", ");
            let message = format!(
                "tools: the agent describes no tool {name:?} and has not listed one of this name; it describes: {known}"
            );
            return Err(Error::InvalidArgument(message));
        };
        if !tools.iter().any(|other: &skep_engine::chat::ToolSpec| other.name == tool.definition.name) {
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
        tool_choice: match &options.tool_choice {
            inference::ToolChoice::Auto => ToolChoice::Auto,
            inference::ToolChoice::None => ToolChoice::None,
            inference::ToolChoice::Required => ToolChoice::Required,
            inference::ToolChoice::Named(name) => ToolChoice::Named(
                turn.tool(name).map_or_else(|| name.clone(), |tool| tool.definition.name.clone()),
            ),
        },
        // A small model that may go on calling does, to its limit. An agent that wants another call generates again.
        parallel_tool_calls: false,
        output: constraint(&options.output)?,
        sampling,
        seed,
        max_tokens: options.max_tokens.map(|tokens| tokens as usize),
        stop: options.stop.clone(),
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

fn constraint(output: &OutputFormat) -> Result<Option<Constraint>, Error> {
    let bytes = match output {
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
        OutputFormat::JsonSchema(text) => match serde_json::from_str(text) {
            Ok(schema) => Constraint::JsonSchema(schema),
            Err(error) => {
                return Err(Error::SchemaInvalid(format!("output: the JSON Schema is not JSON: {error}")));
            }
        },
        OutputFormat::Regex(text) => Constraint::Regex(text.clone()),
        OutputFormat::Grammar(text) => Constraint::Lark(text.clone()),
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
