//! A single generation: from the guest's options to a validated and appended message.
//!
//! The token loop runs here and in the engine; the guest is called once, with the result. Only a complete message whose tool
//! calls have valid arguments is appended. Tokens are journaled as they are produced: a generation that a crash interrupted
//! continues after the last journaled token, and a finished one is answered from the journal. What happens to an answer of
//! another server that is cut off is in `remote`.

use crate::{
    CompactionMode, Json, QUICK_BYTES, RunEvent,
    bindings::{
        inference::{self, CompactionPolicy, GenerateOptions},
        types::Error,
    },
    capability::{
        inference::{
            answer::{Prompt, Request},
            attempts::{bill, count_lost, passed_refusal},
            compaction::{Compacting, Cut},
            conversation::{Conversation, Generating, ModelChange},
            conversion::generation_of,
            options::{chat_options, tokens_to_reserve},
            record::{GenerationRecord, Message, WrittenUsage, written},
            remote,
            text_stream::{CollectingSink, TextSink, TextSource, text_stream},
        },
        turn::{AskedTokens, GenerationStart, Reservation, Turn},
    },
    journal::{Call, Identity, Made, Reads, ReplayPosition, Stopped},
};
use skep_engine::{
    Cancel, EngineError, Model, Timing, Usage,
    chat::{ChatMessage, ChatOptions, ChatStream, ToolCall, ToolSpec, Transcript},
};
use std::sync::Arc;

/// Number of bytes that are hashed in about a millisecond.
pub(in crate::capability) const QUICK_HASH_BYTES: usize = 256 << 10;

/// Maximum size of the reasoning that is kept of one generation.
const MAX_REASONING_BYTES: usize = 256 << 10;

/// A requested generation, with its position among the guest's calls.
pub(crate) struct RequestedGeneration {
    turn: Arc<Turn>,
    generating: Generating,
    /// The conversation's transcript at the time of the request.
    before: Arc<Transcript>,
    model: Model,
    policy: CompactionPolicy,
    options: GenerateOptions,
    chat: ChatOptions,
    made: Made,
}

/// A started generation of a conversation's next message.
pub(crate) struct StartedGeneration {
    turn: Arc<Turn>,
    generating: Generating,
    /// The conversation's transcript before the generation.
    before: Arc<Transcript>,
    reservation: Reservation,
    work: Work,
    /// The journaled reads of the text, until it is known whether the guest streams it.
    reads: Option<Reads>,
}

enum Work {
    Live {
        call: Call,
        stream: Box<ChatStream>,
        chat: Box<ChatOptions>,
        visible: bool,
    },
    /// The conversation must be compacted first to make room for an answer.
    Compacting {
        call: Call,
        compacting: Compacting,
        model: Model,
        chat: Box<ChatOptions>,
        visible: bool,
    },
    /// The generation finished before a restart.
    Recorded {
        record: GenerationRecord,
        position: ReplayPosition,
        compacting: Option<(Compacting, Model)>,
    },
}

/// A running generation, with the transcript that it continues.
struct RunningGeneration {
    call: Call,
    stream: Box<ChatStream>,
    /// The options of the request, with which it may be repeated.
    chat: Box<ChatOptions>,
    visible: bool,
    before: Arc<Transcript>,
    /// Index at which the conversation was cut to make room, if it was.
    compacted_at: Option<usize>,
}

pub(in crate::capability) type Generated = Result<Result<inference::Generation, Error>, Stopped>;

/// Locks the conversation for a generation. Errors in the options are returned at once.
pub(crate) fn ask(
    turn: Arc<Turn>,
    conversation: &Conversation,
    options: GenerateOptions,
) -> Result<Result<RequestedGeneration, Error>, Stopped> {
    let taken =
        chat_options(&turn, &conversation.model, &options).and_then(|chat| Ok((chat, conversation.begin()?)));
    let (chat, (generating, before)) = match taken {
        Ok(taken) => taken,
        Err(error) => return Ok(Err(error)),
    };
    let made = turn.journal.make()?;
    let (before, model) = (Arc::new(before), conversation.model.clone());
    let policy = policy(&turn, conversation);
    Ok(Ok(RequestedGeneration { turn, generating, before, model, policy, options, chat, made }))
}

impl RequestedGeneration {
    /// Submits the request.
    pub(crate) async fn begin(self) -> Result<Result<StartedGeneration, Error>, Stopped> {
        let RequestedGeneration { turn, generating, before, model, policy, options, mut chat, made } = self;
        let visible = options.visible;
        let bytes = bytes(&before, &chat);
        let is_quick = bytes <= QUICK_BYTES && chat.tools.is_empty() && chat.output.is_none();
        let requested = before.clone();
        let identify = move |_: &Cancel| Identity::new("generate", &(&options, requested.messages()));
        let identity = turn.compute(bytes <= QUICK_HASH_BYTES, identify).await;
        let mut call = turn.journal.identify(made, identity)?;
        if call.shown() > 0 {
            // The caller was notified before a restart.
            generating.take_model_change();
        }
        let parent = Some(call.number());
        let was_read = call.was_read();
        let reads = Some(Reads::of(&turn.journal, &mut call));
        let recorded = turn.journal.recorded(&mut call)?;
        count_lost(&turn, &call, &model, &recorded);
        let recorded = match passed_refusal(&turn, recorded).await {
            Ok(recorded) => recorded,
            Err(error) => return Ok(Err(error)),
        };
        let (messages, max_tokens) = (before.messages().len(), tokens_to_reserve(chat.max_tokens));
        let (most_bytes, asks) = (bytes + tool_bytes(&chat.tools), model.most_asks(&chat));
        let asked = AskedTokens::new(&call, &model, most_bytes, messages, max_tokens, asks);
        let mut reservation = match turn.reserve(asked, GenerationStart::of(&call, &recorded)) {
            Ok(reservation) => reservation,
            Err(error) => return Ok(Err(refuse(&turn, &call, error))),
        };
        if let Some((record, position)) = recorded {
            bill(&call, &mut reservation);
            let cut = record.compacted_at().map(|at| Cut::again(&before, at));
            let compacting = match cut {
                None => None,
                Some(cut) => {
                    match Compacting::begin(&turn, &model, cut, &chat.tools, policy.summary(), None, parent)
                        .await?
                    {
                        Ok(compacting) => Some((compacting, model)),
                        Err(error) => return Ok(Err(error)),
                    }
                }
            };
            let work = Work::Recorded { record, position, compacting };
            return Ok(Ok(StartedGeneration { turn, generating, before, reservation, work, reads }));
        }
        if let Err(error) = check_model(&call, &model) {
            return Ok(Err(refuse(&turn, &call, error)));
        }
        if (model.engine().is_none() || call.was_shown_by_remote())
            && let Err(error) = remote::make_again(&turn, &call, was_read).await?
        {
            return Ok(Err(refuse(&turn, &call, error)));
        }
        tell_model_change(&turn, &call, &generating);
        chat.max_tokens = Some(reservation.max_tokens as usize);
        chat.seed = Some(chat.seed.unwrap_or_else(|| turn.journal.seed_for(&call)));
        chat.unreported = reservation.unreported();
        chat.resume = call.tokens().to_vec();
        chat.resume_rolled_back = call.taken_back();
        let prompt = Prompt::Conversation(before.clone());
        let request = Request { turn: &turn, call: &call, model: &model, prompt, visible };
        let overflow = match request.submit(is_quick, chat.clone()).await {
            Ok(stream) => {
                turn.journal.forget_children(call.number());
                let (stream, chat) = (Box::new(stream), Box::new(chat));
                let work = Work::Live { call, stream, chat, visible };
                return Ok(Ok(StartedGeneration { turn, generating, before, reservation, work, reads }));
            }
            Err(error @ EngineError::ContextOverflow { .. }) if policy.is_on() => Error::from(error),
            Err(error) => return Ok(Err(refuse(&turn, &call, Error::from(error)))),
        };
        let (summary, answer_tokens) = (policy.summary(), reservation.max_tokens as usize);
        let cut = {
            let (before, model, chat, summary) =
                (before.clone(), model.clone(), chat.clone(), summary.clone());
            let find = move |cancel: &Cancel| {
                Cut::fitting(&before, &model, chat.opening(), summary.as_deref(), answer_tokens, cancel)
            };
            turn.compute(false, find).await
        };
        let cut = match cut {
            Ok(Some(cut)) => cut,
            Ok(None) => return Ok(Err(refuse(&turn, &call, overflow))),
            Err(error) => return Ok(Err(refuse(&turn, &call, Error::from(error)))),
        };
        let at = cut.at;
        Ok(match Compacting::begin(&turn, &model, cut, &chat.tools, summary, None, parent).await? {
            Ok(compacting) => {
                let work = Work::Compacting { call, compacting, model, chat: Box::new(chat), visible };
                Ok(StartedGeneration { turn, generating, before, reservation, work, reads })
            }
            Err(error) => Err(end(&turn, &call, error, None, Some(at))),
        })
    }
}

/// Returns the size of the text that is rendered.
fn bytes(before: &Transcript, chat: &ChatOptions) -> usize {
    let text = |message: &ChatMessage| message.text_bytes() + message.raw.as_ref().map_or(0, String::len);
    let (said, shown) = (before.messages().iter().map(text), chat.examples.iter().map(text));
    said.chain(shown).sum()
}

/// Returns the size of the tools' descriptions, which are part of the prompt.
pub(in crate::capability) fn tool_bytes(tools: &[ToolSpec]) -> usize {
    let bytes = |tool: &ToolSpec| {
        // A template may spread a schema over lines.
        tool.name.len() + tool.description.len() + 2 * tool.parameters.to_string().len()
    };
    tools.iter().map(bytes).sum()
}

/// Checks that the model did not change while the generation was interrupted, because the tokens so far mean a different
/// text to another model.
pub(in crate::capability) fn check_model(call: &Call, model: &Model) -> Result<(), Error> {
    if !call.is_of_another(model.digest()) {
        return Ok(());
    }
    let name = model.name();
    let message =
        format!("interrupted: the model {name} was replaced by another one in the meantime; generate again");
    Err(Error::Internal(message))
}

/// Notifies the caller once that the conversation continues with another model.
fn tell_model_change(turn: &Turn, call: &Call, generating: &Generating) {
    if let Some(ModelChange { conversation, from, to }) = generating.take_model_change()
        && call.shown() == 0
    {
        turn.journal.shown(call, RunEvent::ModelChanged { conversation, from, to });
    }
}

/// Returns the agent's compaction policy for this conversation, or for all of its conversations.
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

impl StartedGeneration {
    /// Returns a sink for [`StartedGeneration::finish`], and the source from which a streaming guest reads the text.
    pub(crate) fn text(&mut self) -> (TextSink, TextSource) {
        text_stream(self.reads.take().expect("the text is streamed only once"))
    }

    /// Generates the message and appends it. The text is also written to `sink` as it is produced.
    pub(crate) async fn finish(self, sink: Option<TextSink>) -> Generated {
        let StartedGeneration { turn, generating, before, reservation, work, reads } = self;
        drop(reads);
        let started = match work {
            Work::Live { call, stream, chat, visible } => {
                RunningGeneration { call, stream, chat, visible, before, compacted_at: None }
            }
            Work::Compacting { call, compacting, model, chat, visible } => {
                match compact(&turn, call, compacting, &model, chat, visible).await {
                    Ok(started) => started,
                    Err(error) => return Ok(Err(error)),
                }
            }
            Work::Recorded { record, position, compacting } => {
                return Ok(recall(record, position, compacting, generating, before, reservation, sink).await);
            }
        };
        let RunningGeneration { call, stream, chat, visible, before, compacted_at } = started;
        let mut collecting = sink.map(CollectingSink::new);
        let prompt = Prompt::Conversation(before.clone());
        let request = Request { turn: &turn, call: &call, model: generating.model(), prompt, visible };
        let followed = request.follow(*stream, chat, reservation, collecting.as_mut()).await;
        turn.journal.caught_up().await;
        let read = collecting.map(CollectingSink::end).unwrap_or_default();
        let end = |error, figures| end_read(&turn, &call, error, figures, compacted_at, read.clone());
        let mut outcome = match followed {
            Ok(outcome) => outcome,
            Err(error) => return Ok(Err(end(error, None))),
        };
        // Recorded reasoning is never cut again, so that a replayed turn has the same messages.
        outcome.reasoning.truncate(outcome.reasoning.floor_char_boundary(MAX_REASONING_BYTES));
        let figures = Some((outcome.usage, outcome.timing));
        if outcome.cut_off {
            return Ok(Err(end(Error::Truncated, figures)));
        }
        let arguments = match validate_calls(&turn, &outcome.tool_calls) {
            Ok(arguments) => arguments,
            Err(error) => return Ok(Err(end(error, figures))),
        };
        let generating_model = generating.model().digest().clone();
        // Only a complete answer replaces the conversation by its compacted form.
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
        let generation = generation_of(outcome);
        let record = GenerationRecord::Ended {
            result: Ok(generation.clone()),
            usage: Some(WrittenUsage(usage)),
            message: Some(Box::new(message)),
            compacted_at,
            read: String::new(),
            cut: None,
            unreported: written(turn.take_unreported(&call)),
        };
        turn.journal.ended(&call, &record, events);
        Ok(Ok(generation))
    }
}

/// Waits for the compaction, and starts to generate the answer.
async fn compact(
    turn: &Turn,
    call: Call,
    compacting: Compacting,
    model: &Model,
    chat: Box<ChatOptions>,
    visible: bool,
) -> Result<RunningGeneration, Error> {
    let compacted_at = Some(compacting.at());
    let started = match compacting.finish(model).await {
        Ok((before, _summary)) => {
            let before = Arc::new(before);
            let prompt = Prompt::Conversation(before.clone());
            let request = Request { turn, call: &call, model, prompt, visible };
            let stream = request.submit(false, (*chat).clone()).await;
            stream.map(|stream| (before, stream)).map_err(Error::from)
        }
        Err(error) => Err(error),
    };
    match started {
        Ok((before, stream)) => {
            let stream = Box::new(stream);
            Ok(RunningGeneration { call, stream, chat, visible, before, compacted_at })
        }
        Err(error) => Err(end(turn, &call, error, None, compacted_at)),
    }
}

/// Repeats the recorded effect of a generation on its conversation.
async fn recall(
    record: GenerationRecord,
    position: ReplayPosition,
    compacting: Option<(Compacting, Model)>,
    generating: Generating,
    mut before: Arc<Transcript>,
    reservation: Reservation,
    sink: Option<TextSink>,
) -> Result<inference::Generation, Error> {
    // The text is sent first, because the guest may make calls in response to it, and the result may come after theirs in the
    // journal.
    if let (Some(sink), GenerationRecord::Ended { result, read, .. }) = (sink, &record) {
        sink.push(result.as_ref().map_or(read, |generation| &generation.text));
    }
    // If the summary failed, the recorded generation failed too.
    if let Some((compacting, model)) = compacting
        && let Ok((compacted, _summary)) = compacting.finish(&model).await
    {
        before = Arc::new(compacted);
    }
    // The result is not available without yielding once, as in the original run.
    tokio::task::yield_now().await;
    position.reached().await;
    if record.compacted_at().is_some() && record.is_ok() {
        generating.rewrite(&before)?;
    }
    repeat(record, reservation, Some((generating, &before)))
}

/// Records that a generation was refused before its first event, and returns the error for the guest.
pub(in crate::capability) fn refuse(turn: &Turn, call: &Call, error: Error) -> Error {
    if !matches!(error, Error::Cancelled) {
        let record = GenerationRecord::refused(error.clone(), turn.take_unreported(call));
        turn.journal.ended(call, &record, Vec::new());
    }
    error
}

/// Records that a generation failed, and returns the error for the guest. A generation that only the end of the turn stopped
/// is not recorded, so a replayed turn continues it.
pub(in crate::capability) fn end(
    turn: &Turn,
    call: &Call,
    error: Error,
    figures: Option<(Usage, Timing)>,
    compacted_at: Option<usize>,
) -> Error {
    end_read(turn, call, error, figures, compacted_at, String::new())
}

/// Does the same as [`end`], for a generation whose text up to `read` the guest was given.
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
        let cut = turn.take_cut(call).map(|estimate| Box::new(WrittenUsage(estimate)));
        let unreported = written(turn.take_unreported(call));
        let record =
            GenerationRecord::Ended { result, usage, message: None, compacted_at, read, cut, unreported };
        let event = figures.map(|(usage, timing)| RunEvent::Generation { usage, timing });
        turn.journal.ended(call, &record, event.into_iter().collect());
    }
    error
}

/// Returns the recorded result of a generation, and appends its message to the conversation again.
pub(in crate::capability) fn repeat(
    record: GenerationRecord,
    mut reservation: Reservation,
    conversation: Option<(Generating, &Transcript)>,
) -> Result<inference::Generation, Error> {
    reservation.repeat_unreported(record.unreported());
    let (result, usage, message, cut) = match record {
        GenerationRecord::Refused(error) | GenerationRecord::RefusedAfter { error, .. } => return Err(error),
        GenerationRecord::Ended { result, usage, message, cut, .. } => (result, usage, message, cut),
    };
    match (&usage, cut.as_deref()) {
        (Some(WrittenUsage(usage)), _) => reservation.settle(usage),
        (None, Some(WrittenUsage(estimate))) => reservation.settle_cut(estimate),
        (None, None) => {}
    }
    let usage = usage.map(|WrittenUsage(usage)| usage).unwrap_or_default();
    let generation = result?;
    if let (Some(message), Some((generating, before))) = (message, conversation) {
        message.append(generating, before, &generation, usage)?;
    }
    Ok(generation)
}

/// Validates the arguments of tool calls. Decoding was already constrained by the schemas; this second check uses an
/// independent implementation.
fn validate_calls(turn: &Turn, calls: &[ToolCall]) -> Result<Vec<Json>, Error> {
    let arguments = calls.iter().map(|call| {
        let tool = turn.tool(&call.name);
        let tool = tool.ok_or_else(|| {
            Error::SchemaInvalid(format!("the model called {:?}, which is not a tool", call.name))
        })?;
        tool.arguments(&call.arguments).map_err(Error::SchemaInvalid)
    });
    arguments.collect()
}
