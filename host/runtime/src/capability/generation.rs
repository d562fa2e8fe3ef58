//! One generation: from the guest's options to a message that was validated and appended.
//!
//! The token loop runs here and in the engine; the guest is called once, with the result. Nothing is appended but a
//! complete message whose tool calls have valid arguments. Tokens are journalled as they come: a generation that a crash
//! cut off goes on after the last one that was, and one that had ended is answered from the journal.

use super::{
    budget::{Beginning, Reservation, Turn},
    compaction::{Compacting, Cut},
    conversation::{Conversation, Generating, ModelChange},
    generation_options::{asked as asked_tokens, chat_options},
    generation_progress::{Progress, follow},
    generation_record::{GenerationRecord, Message, WrittenUsage},
    text_stream::{Telling, TextSink, TextSource, text_stream},
};
use crate::{
    CompactionMode, Json, QUICK_BYTES, RunEvent,
    bindings::{
        inference::{self, CompactionPolicy, GenerateOptions},
        types::{self, Error},
    },
    journal::{Call, Identity, Made, Place, Reads, Stopped},
};
use skep_engine::{
    Cancel, Engine, EngineError, Timing, Usage,
    chat::{ChatFinish, ChatMessage, ChatOptions, ChatOutcome, ChatStream, ToolCall, Transcript},
};
use std::sync::Arc;

/// What is hashed in about a millisecond.
pub(super) const QUICK_HASH_BYTES: usize = 256 << 10;

/// A generation that the guest asked for, and that has its place among the guest's calls.
pub(crate) struct Asked {
    turn: Arc<Turn>,
    generating: Generating,
    /// The conversation as it is.
    before: Arc<Transcript>,
    engine: Engine,
    policy: CompactionPolicy,
    options: GenerateOptions,
    chat: ChatOptions,
    made: Made,
}

/// A generation of a conversation's next message that has begun.
pub(crate) struct Begun {
    turn: Arc<Turn>,
    generating: Generating,
    /// The conversation as it was.
    before: Arc<Transcript>,
    reservation: Reservation,
    work: Work,
    /// Until it is known whether the guest reads the text as it comes.
    reads: Option<Reads>,
}

enum Work {
    Live {
        call: Call,
        stream: Box<ChatStream>,
        visible: bool,
    },
    /// There is no room for an answer before this has ended.
    Compacting {
        call: Call,
        compacting: Compacting,
        engine: Engine,
        chat: Box<ChatOptions>,
        visible: bool,
    },
    /// It ended before a restart.
    Recorded {
        record: GenerationRecord,
        place: Place,
        compacting: Option<(Compacting, Engine)>,
    },
}

/// A generation under way, with the conversation that it goes on from.
struct Started {
    call: Call,
    stream: Box<ChatStream>,
    visible: bool,
    before: Arc<Transcript>,
    /// Where the conversation was cut to make room, if it was.
    compacted_at: Option<usize>,
}

pub(super) type Generated = Result<Result<inference::Generation, Error>, Stopped>;

/// Takes the conversation; what is wrong with the options is known at once.
pub(crate) fn ask(
    turn: Arc<Turn>,
    conversation: &Conversation,
    options: GenerateOptions,
) -> Result<Result<Asked, Error>, Stopped> {
    let taken = chat_options(&turn, &options).and_then(|chat| Ok((chat, conversation.begin()?)));
    let (chat, (generating, before)) = match taken {
        Ok(taken) => taken,
        Err(error) => return Ok(Err(error)),
    };
    let made = turn.journal.make()?;
    let (before, engine) = (Arc::new(before), conversation.engine.clone());
    let policy = policy(&turn, conversation);
    Ok(Ok(Asked { turn, generating, before, engine, policy, options, chat, made }))
}

impl Asked {
    /// Submits the request.
    pub(crate) async fn begin(self) -> Result<Result<Begun, Error>, Stopped> {
        let Asked { turn, generating, before, engine, policy, options, mut chat, made } = self;
        let visible = options.visible;
        let bytes = bytes(&before, &chat);
        let is_quick = bytes <= QUICK_BYTES && chat.tools.is_empty() && chat.output.is_none();
        let asked = before.clone();
        let identify = move |_: &Cancel| Identity::new("generate", &(&options, asked.messages()));
        let identity = turn.compute(bytes <= QUICK_HASH_BYTES, identify).await;
        let mut call = turn.journal.identify(made, identity)?;
        if call.shown() > 0 {
            // The caller was told that before a restart.
            generating.take_model_change();
        }
        let parent = Some(call.number());
        let reads = Some(Reads::of(&turn.journal, &mut call));
        let recorded = turn.journal.recorded(&mut call)?;
        if let Some((GenerationRecord::Refused(error), place)) = recorded {
            place.reached().await;
            return Ok(Err(error));
        }
        let reservation = match turn.reserve(asked_tokens(chat.max_tokens), Beginning::of(&call, &recorded)) {
            Ok(reservation) => reservation,
            Err(error) => return Ok(Err(refuse(&turn, &call, error))),
        };
        if let Some((record, place)) = recorded {
            let cut = record.compacted_at().map(|at| Cut::again(&before, at));
            let compacting = match cut {
                None => None,
                Some(cut) => {
                    match Compacting::begin(&turn, &engine, cut, &chat.tools, policy.summary(), None, parent)
                        .await?
                    {
                        Ok(compacting) => Some((compacting, engine)),
                        Err(error) => return Ok(Err(error)),
                    }
                }
            };
            let work = Work::Recorded { record, place, compacting };
            return Ok(Ok(Begun { turn, generating, before, reservation, work, reads }));
        }
        if let Err(error) = check_model(&call, &engine) {
            return Ok(Err(refuse(&turn, &call, error)));
        }
        tell_model_change(&turn, &call, &generating);
        chat.max_tokens = Some(reservation.max_tokens as usize);
        chat.seed = Some(chat.seed.unwrap_or_else(|| turn.journal.seed_for(&call)));
        chat.resume = call.tokens().to_vec();
        chat.resume_taken_back = call.taken_back();
        let overflow = match generate(&turn, is_quick, &before, &engine, chat.clone()).await {
            Ok(stream) => {
                turn.journal.forget_children(call.number());
                let work = Work::Live { call, stream: Box::new(stream), visible };
                return Ok(Ok(Begun { turn, generating, before, reservation, work, reads }));
            }
            Err(error @ EngineError::ContextOverflow { .. }) if policy.is_on() => engine_error(error),
            Err(error) => return Ok(Err(refuse(&turn, &call, engine_error(error)))),
        };
        let (summary, answer_tokens) = (policy.summary(), reservation.max_tokens as usize);
        let cut = {
            let (before, engine, chat, summary) =
                (before.clone(), engine.clone(), chat.clone(), summary.clone());
            let find = move |cancel: &Cancel| {
                Cut::fitting(&before, &engine, chat.opening(), summary.as_deref(), answer_tokens, cancel)
            };
            turn.compute(false, find).await
        };
        let cut = match cut {
            Ok(Some(cut)) => cut,
            Ok(None) => return Ok(Err(refuse(&turn, &call, overflow))),
            Err(error) => return Ok(Err(refuse(&turn, &call, engine_error(error)))),
        };
        let at = cut.at;
        Ok(match Compacting::begin(&turn, &engine, cut, &chat.tools, summary, None, parent).await? {
            Ok(compacting) => {
                let work = Work::Compacting { call, compacting, engine, chat: Box::new(chat), visible };
                Ok(Begun { turn, generating, before, reservation, work, reads })
            }
            Err(error) => Err(end(&turn, &call, error, None, Some(at))),
        })
    }
}

/// Bytes of the text that is rendered.
fn bytes(before: &Transcript, chat: &ChatOptions) -> usize {
    let text = |message: &ChatMessage| message.text_bytes() + message.raw.as_ref().map_or(0, String::len);
    let (said, shown) = (before.messages().iter().map(text), chat.examples.iter().map(text));
    said.chain(shown).sum()
}

/// Renders and encodes what the model has not seen, and submits it.
pub(super) async fn generate(
    turn: &Turn,
    is_quick: bool,
    before: &Arc<Transcript>,
    engine: &Engine,
    chat: ChatOptions,
) -> Result<ChatStream, EngineError> {
    let (before, engine) = (before.clone(), engine.clone());
    let begin =
        move |cancel: &Cancel| before.generate(&engine, ChatOptions { cancel: cancel.clone(), ..chat });
    turn.compute(is_quick, begin).await
}

/// That the model did not change while the generation was cut off: its tokens would be another text.
pub(super) fn check_model(call: &Call, engine: &Engine) -> Result<(), Error> {
    if !call.is_of_another(&engine.info().digest) {
        return Ok(());
    }
    let name = &engine.info().name;
    let message =
        format!("interrupted: the model {name} was exchanged for another one meanwhile; generate again");
    Err(Error::Internal(message))
}

/// The caller hears once that the conversation goes on with another model.
fn tell_model_change(turn: &Turn, call: &Call, generating: &Generating) {
    if let Some(ModelChange { conversation, from, to }) = generating.take_model_change()
        && call.shown() == 0
    {
        turn.journal.shown(call, RunEvent::ModelChanged { conversation, from, to });
    }
}

/// The agent's word for this conversation, or for all of them.
fn policy(turn: &Turn, conversation: &Conversation) -> CompactionPolicy {
    conversation.compaction().unwrap_or(match turn.agent.manifest.sessions.compaction() {
        CompactionMode::Auto => CompactionPolicy::Auto,
        CompactionMode::Off => CompactionPolicy::Off,
    })
}

impl CompactionPolicy {
    fn is_on(&self) -> bool {
        !matches!(self, CompactionPolicy::Off)
    }

    fn summary(&self) -> Option<String> {
        match self {
            CompactionPolicy::Summary(text) => Some(text.clone()),
            CompactionPolicy::Auto | CompactionPolicy::Off => None,
        }
    }
}

impl Begun {
    /// For [`Begun::finish`], and what a guest reads that reads the text as it comes.
    pub(crate) fn text(&mut self) -> (TextSink, TextSource) {
        text_stream(self.reads.take().expect("one guest reads it"))
    }

    /// Generates the message and appends it. The text also goes to `sink` as it comes.
    pub(crate) async fn finish(self, sink: Option<TextSink>) -> Generated {
        let Begun { turn, generating, before, reservation, work, reads } = self;
        drop(reads);
        let started = match work {
            Work::Live { call, stream, visible } => {
                Started { call, stream, visible, before, compacted_at: None }
            }
            Work::Compacting { call, compacting, engine, chat, visible } => {
                match compact(&turn, call, compacting, &engine, *chat, visible).await {
                    Ok(started) => started,
                    Err(error) => return Ok(Err(error)),
                }
            }
            Work::Recorded { record, place, compacting } => {
                return Ok(recall(record, place, compacting, generating, before, reservation, sink).await);
            }
        };
        let Started { call, stream, visible, before, compacted_at } = started;
        let mut telling = sink.map(Telling::new);
        let progress = Progress::new(&turn, &call, generating.engine(), visible);
        let followed = follow(progress, *stream, reservation, telling.as_mut()).await;
        turn.journal.caught_up().await;
        let read = telling.map(Telling::end).unwrap_or_default();
        let end = |error, figures| end_read(&turn, &call, error, figures, compacted_at, read.clone());
        let outcome = match followed {
            Ok(outcome) => outcome,
            Err(error) => return Ok(Err(end(error, None))),
        };
        let figures = Some((outcome.usage, outcome.timing));
        if outcome.cut_off {
            return Ok(Err(end(Error::Truncated, figures)));
        }
        let arguments = match validate_calls(&turn, &outcome.tool_calls) {
            Ok(arguments) => arguments,
            Err(error) => return Ok(Err(end(error, figures))),
        };
        let generating_model = generating.engine().info().digest.clone();
        // Only an answer puts the compacted form in the conversation's place.
        let rewritten = compacted_at.map_or(Ok(()), |_| generating.rewrite(&before));
        if let Err(error) = rewritten.and_then(|()| generating.commit(&outcome)) {
            return Ok(Err(end(error, figures)));
        }
        let message = Message::of(&outcome, &before, &generating_model);
        let mut events = vec![RunEvent::Generation { usage: outcome.usage, timing: outcome.timing }];
        events.extend(outcome.tool_calls.iter().zip(arguments).map(|(call, arguments)| RunEvent::ToolCall {
            id: call.id.clone(),
            name: call.name.clone(),
            arguments,
        }));
        let usage = outcome.usage;
        let generation = told(outcome);
        let record = GenerationRecord::Ended {
            result: Ok(generation.clone()),
            usage: Some(WrittenUsage(usage)),
            message: Some(Box::new(message)),
            compacted_at,
            read: String::new(),
        };
        turn.journal.ended(&call, &record, events);
        Ok(Ok(generation))
    }
}

/// Waits for the compaction, and begins with the answer.
async fn compact(
    turn: &Turn,
    call: Call,
    compacting: Compacting,
    engine: &Engine,
    chat: ChatOptions,
    visible: bool,
) -> Result<Started, Error> {
    let compacted_at = Some(compacting.at());
    let begun = match compacting.finish(engine).await {
        Ok((before, _summary)) => {
            let before = Arc::new(before);
            let stream = generate(turn, false, &before, engine, chat).await;
            stream.map(|stream| (before, stream)).map_err(engine_error)
        }
        Err(error) => Err(error),
    };
    match begun {
        Ok((before, stream)) => Ok(Started { call, stream: Box::new(stream), visible, before, compacted_at }),
        Err(error) => Err(end(turn, &call, error, None, compacted_at)),
    }
}

/// Does with the conversation again what was done before a restart.
async fn recall(
    record: GenerationRecord,
    place: Place,
    compacting: Option<(Compacting, Engine)>,
    generating: Generating,
    mut before: Arc<Transcript>,
    reservation: Reservation,
    sink: Option<TextSink>,
) -> Result<inference::Generation, Error> {
    // The guest may make calls because of what it reads, and the result may be behind theirs.
    if let (Some(sink), GenerationRecord::Ended { result, read, .. }) = (sink, &record) {
        sink.push(result.as_ref().map_or(read, |generation| &generation.text));
    }
    // If the summary failed, so did what was recorded.
    if let Some((compacting, engine)) = compacting
        && let Ok((compacted, _summary)) = compacting.finish(&engine).await
    {
        before = Arc::new(compacted);
    }
    // As the first time, it is not there at once.
    tokio::task::yield_now().await;
    place.reached().await;
    if record.compacted_at().is_some() && record.is_ok() {
        generating.rewrite(&before)?;
    }
    repeat(record, reservation, Some((generating, &before)))
}

/// What the guest is told of a message that was generated.
pub(super) fn told(outcome: ChatOutcome) -> inference::Generation {
    inference::Generation {
        text: outcome.text,
        tool_calls: outcome.tool_calls.into_iter().map(tool_call).collect(),
        finish: match outcome.finish {
            ChatFinish::Stop => inference::FinishReason::Stop,
            ChatFinish::Length => inference::FinishReason::Length,
            ChatFinish::ToolCalls => inference::FinishReason::ToolCalls,
        },
        usage: usage(&outcome.usage),
        timing: timing(&outcome.timing),
    }
}

/// The guest is told that its generation never began.
pub(super) fn refuse(turn: &Turn, call: &Call, error: Error) -> Error {
    if !matches!(error, Error::Cancelled) {
        turn.journal.ended(call, &GenerationRecord::Refused(error.clone()), Vec::new());
    }
    error
}

/// The guest is told that its generation came to nothing. What only the end of the turn stopped is not journalled: when
/// the turn is run again, it goes on.
pub(super) fn end(
    turn: &Turn,
    call: &Call,
    error: Error,
    figures: Option<(Usage, Timing)>,
    compacted_at: Option<usize>,
) -> Error {
    end_read(turn, call, error, figures, compacted_at, String::new())
}

/// The same, of a generation of which the guest had read so much.
fn end_read(
    turn: &Turn,
    call: &Call,
    error: Error,
    figures: Option<(Usage, Timing)>,
    compacted_at: Option<usize>,
    read: String,
) -> Error {
    if !matches!(error, Error::Cancelled) {
        let usage = figures.map(|(usage, _)| WrittenUsage(usage));
        let result = Err(error.clone());
        let record = GenerationRecord::Ended { result, usage, message: None, compacted_at, read };
        let event = figures.map(|(usage, timing)| RunEvent::Generation { usage, timing });
        turn.journal.ended(call, &record, event.into_iter().collect());
    }
    error
}

/// Tells the guest again what it was told before a restart.
pub(super) fn repeat(
    record: GenerationRecord,
    reservation: Reservation,
    conversation: Option<(Generating, &Transcript)>,
) -> Result<inference::Generation, Error> {
    let (result, usage, message) = match record {
        GenerationRecord::Refused(error) => return Err(error),
        GenerationRecord::Ended { result, usage, message, .. } => (result, usage, message),
    };
    let usage = usage.map(|WrittenUsage(usage)| usage).unwrap_or_default();
    reservation.settle(&usage);
    let generation = result?;
    if let (Some(message), Some((generating, before))) = (message, conversation) {
        message.append(generating, before, &generation, usage)?;
    }
    Ok(generation)
}

/// Decoding was constrained by the schema; this is the second enforcement, by another implementation.
fn validate_calls(turn: &Turn, calls: &[ToolCall]) -> Result<Vec<Json>, Error> {
    let arguments = calls.iter().map(|call| {
        let tool = turn.tool(&call.name);
        let tool = tool.ok_or_else(|| {
            Error::SchemaInvalid(format!("the model called {:?}, which is no tool", call.name))
        })?;
        tool.arguments(&call.arguments).map_err(Error::SchemaInvalid)
    });
    arguments.collect()
}

/// What an engine error means to a guest.
pub(crate) fn engine_error(error: EngineError) -> Error {
    match error {
        EngineError::Busy { retry_after_ms } => Error::Busy(retry_after_ms),
        EngineError::ContextOverflow { limit, .. } => {
            Error::ContextOverflow(u32::try_from(limit).unwrap_or(u32::MAX))
        }
        EngineError::InvalidRequest { .. } => Error::InvalidArgument(error.to_string()),
        EngineError::Constraint { .. } | EngineError::SchemaUnsatisfied { .. } => {
            Error::SchemaInvalid(error.to_string())
        }
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

pub(super) fn timing(timing: &skep_engine::Timing) -> types::Timing {
    types::Timing {
        queue_us: timing.queue_us,
        first_token_us: timing.first_token_us,
        total_us: timing.total_us,
    }
}
