//! Compaction: a conversation that no longer fits into the model's context continues from its system message, a summary of
//! the older messages, and its most recent messages unchanged.
//!
//! Invariant: a tool call and its results are kept or dropped together, and so are a question and the tool calls that answer
//! it. The summary is a separate generation in the turn's journal, hidden from the caller. The position of the cut depends
//! only on the conversation and the model, so a replayed turn cuts at the same position.

use crate::{
    RunEvent,
    bindings::{
        inference::{CompactOptions, Compaction},
        types::Error,
    },
    capability::{
        inference::{
            answer::{Prompt, Request},
            attempts::{bill, count_lost},
            conversation::{Conversation, Generating},
            conversion::generation_of,
            generation::{check_model, end, refuse, repeat, tool_bytes},
            options::tokens_to_reserve,
            record::{GenerationRecord, WrittenUsage, written},
        },
        turn::{AskedTokens, GenerationStart, Reservation, Turn},
    },
    journal::{Call, Identity, ReplayPosition, SUMMARIZE, Stopped},
};
use skep_engine::{
    Cancel, Engine, EngineError, Model, Sampling,
    chat::{ChatMessage, ChatOptions, ChatStream, Opening, Role, ToolChoice, ToolSpec, Transcript},
};
use skep_model::SpecialTokens;
use std::{iter, sync::Arc};

/// Number of recent messages that are kept unchanged, unless there is no room for them.
const KEEP_RECENT: usize = 8;
const SUMMARY_TOKENS: usize = 256;
/// A summary takes at most the context divided by this number, because a longer one leaves too little room.
const SUMMARY_SHARE: usize = 8;
/// Maximum size of a summary that the agent provides.
const MAX_SUMMARY_BYTES: usize = 64 << 10;
/// The request for a summary. It stays in the conversation as a user message before the summary, so that user and
/// assistant messages keep alternating.
const REQUEST: &str = "Summarise our conversation so far in a few sentences. Keep names, numbers, what was decided, and what \
                       is still to be done.";

/// The summary that is used if no part of the dropped messages fits into the context.
const TOO_LONG: &str = "It was too long to be summarised.";

/// A conversation, and the index of the first message that is kept.
pub(in crate::capability) struct Cut {
    before: Arc<Transcript>,
    pub(in crate::capability) at: usize,
}

/// A started compaction.
pub(in crate::capability) struct Compacting {
    turn: Arc<Turn>,
    cut: Cut,
    source: Source,
}

/// The source of the summary.
enum Source {
    Agent(String),
    Model {
        call: Call,
        stream: Box<ChatStream>,
        reservation: Reservation,
        /// The request, which may be repeated.
        prompt: Prompt,
        options: Box<ChatOptions>,
    },
    /// The model generated the summary before a restart.
    Recorded {
        record: GenerationRecord,
        position: ReplayPosition,
        reservation: Reservation,
    },
}

/// A compaction that the agent requested. `None`: there is nothing to summarize.
pub(crate) struct RequestedCompaction(Option<RequestedCut>);

struct RequestedCut {
    turn: Arc<Turn>,
    generating: Generating,
    model: Model,
    cut: Cut,
    summary: Option<String>,
    max_tokens: Option<u32>,
}

/// A started compaction that the agent requested.
struct StartedCompaction(Option<(Generating, Model, Compacting)>);

impl Cut {
    /// Returns the cut that keeps at most `messages` messages in addition to the system message. `None`: there is nothing to
    /// summarize.
    pub(in crate::capability) fn keeping(before: &Arc<Transcript>, messages: usize) -> Option<Cut> {
        let from = before.messages().len().saturating_sub(messages);
        let mut at = None;
        for boundary in boundaries(before.messages()) {
            at = Some(boundary);
            if boundary >= from {
                break;
            }
        }
        let at = at?;
        Some(Cut { before: before.clone(), at })
    }

    /// Returns the cut that keeps as many messages as possible while leaving room for `answer_tokens` and for the summary.
    /// `None`: no compaction makes enough room.
    pub(in crate::capability) fn fitting(
        before: &Arc<Transcript>,
        model: &Model,
        opening: Opening<'_>,
        summary: Option<&str>,
        answer_tokens: usize,
        cancel: &Cancel,
    ) -> Result<Option<Cut>, EngineError> {
        let messages = before.messages();
        let room = summary.map_or_else(|| summary_tokens(model), |_| 0) + answer_tokens;
        let from = messages.len().saturating_sub(KEEP_RECENT);
        for at in boundaries(messages).filter(|at| (from..messages.len()).contains(at)) {
            let cut = Cut { before: before.clone(), at };
            match model.prompt_tokens(&cut.apply(summary.unwrap_or_default()), opening, cancel) {
                Ok(tokens) if tokens + room <= model.sequence_limit() => return Ok(Some(cut)),
                Ok(_) | Err(EngineError::ContextOverflow { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    pub(in crate::capability) fn again(before: &Arc<Transcript>, at: usize) -> Cut {
        Cut { before: before.clone(), at: at.min(before.messages().len()) }
    }

    /// Returns the number of messages that are summarized.
    fn dropped(&self) -> usize {
        self.at - first(self.before.messages())
    }

    /// Returns the conversation with the dropped messages replaced by this summary.
    fn apply(&self, summary: &str) -> Transcript {
        let messages = self.before.messages();
        let (dropped, kept) = messages.split_at(self.at);
        let mut compacted = dropped[..first(messages)].to_vec();
        compacted.extend([ChatMessage::user(REQUEST), ChatMessage::assistant(summary)]);
        // The question that the kept messages answer.
        if kept.first().is_some_and(|message| message.role == Role::Assistant) {
            compacted.extend(dropped.iter().rfind(|message| message.role == Role::User).cloned());
        }
        compacted.extend_from_slice(kept);
        self.before.rewritten(compacted)
    }

    /// Returns the conversation whose next answer is the summary: the dropped messages, or the last part of them that fits.
    /// `None`: no part fits.
    fn to_summarize(
        &self,
        model: &Model,
        tools: &[ToolSpec],
        summary_tokens: usize,
        cancel: &Cancel,
    ) -> Result<Option<Transcript>, EngineError> {
        let messages = &self.before.messages()[..self.at];
        let (system, mut rest) = messages.split_at(first(messages));
        // The last question is kept, so it is not summarized.
        if let Some((last, before)) = rest.split_last()
            && last.role == Role::User
        {
            rest = before;
        }
        // The examples are left out, because they are not part of the conversation.
        let opening = Opening { tools, ..Opening::default() };
        // Candidates: all messages, or those after any question except the first message.
        let questions = rest.iter().enumerate().skip(1).filter(|(_, message)| message.role == Role::User);
        let starts: Vec<usize> = iter::once(0).chain(questions.map(|(at, _)| at + 1)).collect();
        let asking = |start: usize| {
            let request = [ChatMessage::user(REQUEST)];
            self.before.rewritten([system, &rest[start..], &request].concat())
        };
        let fits = |start: usize| match model.prompt_tokens(&asking(start), opening, cancel) {
            Ok(tokens) => Ok(tokens + summary_tokens <= model.sequence_limit()),
            Err(EngineError::ContextOverflow { .. }) => Ok(false),
            Err(error) => Err(error),
        };
        Ok(first_that_fits(&starts, fits)?.map(asking))
    }
}

/// Returns the first start from which the rest fits. The rest shrinks with later starts, so this is a binary search.
fn first_that_fits<E>(starts: &[usize], fits: impl Fn(usize) -> Result<bool, E>) -> Result<Option<usize>, E> {
    if let Some(first) = starts.first()
        && fits(*first)?
    {
        return Ok(Some(*first));
    }
    // Starts before `low` do not fit. The one at `high` fits, or `high` is past the end.
    let (mut low, mut high) = (starts.len().min(1), starts.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match fits(starts[middle])? {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    Ok(starts.get(high).copied())
}

impl Compacting {
    /// Starts to summarize with the model, or takes the agent's summary. The prompt starts with the same text and `tools` as
    /// the conversation, so that its prefix is in the model's cache.
    pub(in crate::capability) async fn begin(
        turn: &Arc<Turn>,
        model: &Model,
        cut: Cut,
        tools: &[ToolSpec],
        summary: Option<String>,
        max_tokens: Option<u32>,
        parent: Option<u32>,
    ) -> Result<Result<Compacting, Error>, Stopped> {
        if let Some(summary) = summary {
            return Ok(Ok(Compacting { turn: turn.clone(), cut, source: Source::Agent(summary) }));
        }
        let most = max_tokens.map_or_else(|| summary_tokens(model), |tokens| tokens as usize);
        let (finds, described) = (model.clone(), tools.to_vec());
        let find = move |cancel: &Cancel| {
            let asking = cut.to_summarize(&finds, &described, most, cancel);
            let identity = Identity::new(SUMMARIZE, &(cut.before.messages(), cut.at, most));
            (cut, asking, identity)
        };
        let (cut, asking, identity) = turn.compute(false, find).await;
        let asking = match asking {
            Ok(Some(asking)) => Arc::new(asking),
            Ok(None) => {
                parent.into_iter().for_each(|parent| turn.journal.forget_children(parent));
                let source = Source::Agent(TOO_LONG.to_owned());
                return Ok(Ok(Compacting { turn: turn.clone(), cut, source }));
            }
            Err(error) => return Ok(Err(Error::from(error))),
        };
        let mut call = turn.journal.call_of_host(identity, parent)?;
        let recorded = turn.journal.recorded(&mut call)?;
        count_lost(turn, &call, model, &recorded);
        let texts = asking.messages().iter().map(ChatMessage::text_bytes).sum::<usize>();
        let (bytes, messages) = (texts + tool_bytes(tools), asking.messages().len());
        let asked = AskedTokens::new(&call, model, bytes, messages, tokens_to_reserve(Some(most)), 1);
        let mut reservation = match turn.reserve(asked, GenerationStart::of(&call, &recorded)) {
            Ok(reservation) => reservation,
            Err(error) => return Ok(Err(refuse(turn, &call, error))),
        };
        if let Some((record, position)) = recorded {
            bill(&call, &mut reservation);
            let source = Source::Recorded { record, position, reservation };
            return Ok(Ok(Compacting { turn: turn.clone(), cut, source }));
        }
        if let Err(error) = check_model(&call, model) {
            return Ok(Err(refuse(turn, &call, error)));
        }
        let max_tokens = reservation.max_tokens as usize;
        let options = Box::new(ChatOptions {
            tools: tools.to_vec(),
            tool_choice: ToolChoice::None,
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            seed: Some(turn.journal.seed_for(&call)),
            max_tokens: Some(max_tokens),
            affinity: turn.affinity.clone(),
            priority: turn.priority,
            deadline: Some(turn.deadline.at()),
            observer: turn.observer.clone(),
            unreported: reservation.unreported(),
            resume: call.tokens().to_vec(),
            resume_rolled_back: call.taken_back(),
            ..ChatOptions::default()
        });
        let prompt = Prompt::Conversation(asking);
        let request = Request { turn, call: &call, model, prompt: prompt.clone(), visible: false };
        Ok(match request.submit(false, (*options).clone()).await.map_err(Error::from) {
            Ok(stream) => {
                let stream = Box::new(stream);
                let source = Source::Model { call, stream, reservation, prompt, options };
                Ok(Compacting { turn: turn.clone(), cut, source })
            }
            Err(error) => Err(refuse(turn, &call, error)),
        })
    }

    pub(in crate::capability) fn at(&self) -> usize {
        self.cut.at
    }

    /// Waits for the summary, and returns the compacted conversation and the summary.
    pub(in crate::capability) async fn finish(self, model: &Model) -> Result<(Transcript, String), Error> {
        let Compacting { turn, cut, source } = self;
        let (mut summary, usage) = match source {
            Source::Agent(summary) => (summary, None),
            Source::Recorded { record, position, reservation } => {
                position.reached().await;
                let usage = record.usage();
                (repeat(record, reservation, None)?.text, Some(usage))
            }
            Source::Model { call, stream, reservation, prompt, options } => {
                let request = Request { turn: &turn, call: &call, model, prompt, visible: false };
                let followed = request.follow(*stream, options, reservation, None).await;
                turn.journal.caught_up().await;
                let outcome = match followed {
                    Ok(outcome) => outcome,
                    Err(error) => return Err(end(&turn, &call, error, None, None)),
                };
                let (usage, timing) = (outcome.usage, outcome.timing);
                let generation = generation_of(outcome);
                let record = GenerationRecord::Ended {
                    result: Ok(generation.clone()),
                    usage: Some(WrittenUsage(usage)),
                    message: None,
                    compacted_at: None,
                    read: String::new(),
                    cut: None,
                    unreported: written(turn.take_unreported(&call)),
                };
                turn.journal.ended(&call, &record, vec![RunEvent::Generation { usage, timing }]);
                (generation.text, Some(usage))
            }
        };
        if let Some(usage) = &usage {
            summary = within(model, summary.trim(), usage.completion_tokens as usize)?;
        }
        let mut compacted = cut.apply(&summary);
        if let Some(usage) = usage {
            compacted.add_usage(&usage);
        }
        tracing::debug!(dropped = cut.dropped(), "a conversation was compacted");
        Ok((compacted, summary))
    }
}

/// Locks the conversation for a compaction. Errors in the options are returned at once.
pub(crate) fn ask(
    turn: &Arc<Turn>,
    conversation: &Conversation,
    options: CompactOptions,
) -> Result<RequestedCompaction, Error> {
    let CompactOptions { keep_recent, summary, max_tokens } = options;
    if max_tokens == Some(0) {
        return Err(Error::InvalidArgument("max-tokens: must be at least 1".into()));
    }
    if let Some(size) = summary.as_ref().map(String::len).filter(|size| *size > MAX_SUMMARY_BYTES) {
        let message = format!("summary: it has {size} bytes; at most {MAX_SUMMARY_BYTES} are allowed");
        return Err(Error::InvalidArgument(message));
    }
    let (generating, before) = conversation.begin()?;
    let keep = keep_recent.map_or(KEEP_RECENT, |keep| keep as usize);
    let cut = Cut::keeping(&Arc::new(before), keep);
    let (turn, model) = (turn.clone(), conversation.model.clone());
    Ok(RequestedCompaction(cut.map(|cut| RequestedCut { turn, generating, model, cut, summary, max_tokens })))
}

impl RequestedCompaction {
    pub(crate) async fn finish(self) -> Result<Result<Compaction, Error>, Stopped> {
        let Some(RequestedCut { turn, generating, model, cut, summary, max_tokens }) = self.0 else {
            return Ok(StartedCompaction(None).finish().await);
        };
        Ok(match Compacting::begin(&turn, &model, cut, &[], summary, max_tokens, None).await? {
            Ok(compacting) => StartedCompaction(Some((generating, model, compacting))).finish().await,
            Err(error) => Err(error),
        })
    }
}

impl StartedCompaction {
    async fn finish(self) -> Result<Compaction, Error> {
        let Some((generating, model, compacting)) = self.0 else {
            return Ok(Compaction { dropped: 0, summary: String::new() });
        };
        let dropped = u32::try_from(compacting.cut.dropped()).unwrap_or(u32::MAX);
        let (compacted, summary) = compacting.finish(&model).await?;
        generating.rewrite(&compacted)?;
        Ok(Compaction { dropped, summary })
    }
}

/// Returns the positions at which a conversation may be cut, in order: before a user or assistant message, after at least
/// one answer, and never between a call and its result.
fn boundaries(messages: &[ChatMessage]) -> impl Iterator<Item = usize> {
    let answered = messages.iter().position(|message| message.role == Role::Assistant);
    let start = answered.map_or(usize::MAX, |answer| answer + 1);
    // The last answer, if one of its calls is waiting for a result.
    let last = messages.iter().rposition(|message| message.role == Role::Assistant).filter(|last| {
        let results =
            |id: &str| messages[last + 1..].iter().any(|message| message.tool_call_id.as_deref() == Some(id));
        messages[*last].tool_calls.iter().any(|call| !results(&call.id))
    });
    let end = last.unwrap_or(messages.len());
    (start..=end).filter(|at| match messages.get(*at) {
        None => true,
        Some(message) => matches!(message.role, Role::User | Role::Assistant),
    })
}

/// Returns the index of the first message that may be dropped.
fn first(messages: &[ChatMessage]) -> usize {
    usize::from(messages.first().is_some_and(|message| message.role == Role::System))
}

/// Truncates a text to at most `tokens` tokens. Text that a model produced may have more tokens when it is encoded again.
fn within(model: &Model, text: &str, tokens: usize) -> Result<String, Error> {
    let Some(tokenizer) = model.engine().map(Engine::tokenizer) else { return Ok(text.to_owned()) };
    let encoded = tokenizer.encode(text, SpecialTokens::Literal);
    let encoded = encoded.map_err(|error| Error::from(skep_engine::EngineError::from(error)))?;
    if encoded.len() <= tokens {
        return Ok(text.to_owned());
    }
    let kept = tokenizer.decode(&encoded[..tokens], false);
    Ok(kept.trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned())
}

fn summary_tokens(model: &Model) -> usize {
    (model.sequence_limit() / SUMMARY_SHARE).clamp(1, SUMMARY_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::chat::ToolCall;
    use std::cell::Cell;

    /// Builds a conversation from letters: `s` system, `u` user, `a` answer, `c` a call, `r` its result. The text of each
    /// message is its letter and its index.
    fn conversation(roles: &str) -> Transcript {
        let message = |(at, role): (usize, char)| {
            let text = format!("{role}{at}");
            match role {
                's' => ChatMessage::system(text),
                'u' => ChatMessage::user(text),
                'r' => ChatMessage::tool(format!("call{}", at - 1), text),
                'c' => {
                    let (id, name, arguments) = (format!("call{at}"), "tool".into(), "{}".into());
                    ChatMessage {
                        tool_calls: vec![ToolCall { id, name, arguments }],
                        ..ChatMessage::assistant(text)
                    }
                }
                _ => ChatMessage::assistant(text),
            }
        };
        Transcript::new().rewritten(roles.chars().enumerate().map(message).collect())
    }

    fn compacted(roles: &str, keep: usize) -> Option<String> {
        let cut = Cut::keeping(&Arc::new(conversation(roles)), keep)?;
        let after = cut.apply("SUM");
        let texts = after.messages().iter().map(|message| match message.content.as_str() {
            REQUEST => "ASK",
            text => text,
        });
        Some(texts.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn keeps_the_system_message_and_the_most_recent_messages() {
        for (roles, keep, expected) in [
            ("suauau", 1, "s0 ASK SUM u5"),
            ("suauau", 3, "s0 ASK SUM u3 a4 u5"),
            ("uauau", 3, "ASK SUM u2 a3 u4"),
            // Speakers alternate, so an answer that is kept has its question.
            ("suauau", 2, "s0 ASK SUM u3 a4 u5"),
            ("suaua", 0, "s0 ASK SUM"),
        ] {
            assert_eq!(compacted(roles, keep).as_deref(), Some(expected), "{roles} keeps {keep}");
        }
    }

    #[test]
    fn finds_the_first_start_that_fits_in_few_tries() {
        let starts: Vec<usize> = (0..5_000).map(|start| start * 2).collect();
        for first in [0, 1, 2, 777, 9_998, 9_999, 20_000] {
            let tries = Cell::new(0);
            let fits = |start: usize| {
                tries.set(tries.get() + 1);
                Ok::<bool, ()>(start >= first)
            };
            let expected = starts.iter().copied().find(|start| *start >= first);
            assert_eq!(first_that_fits(&starts, fits), Ok(expected), "{first}");
            assert!(tries.get() <= 15, "{} tries", tries.get());
        }
        assert_eq!(first_that_fits(&[], |_| Ok::<bool, ()>(true)), Ok(None));
        assert_eq!(first_that_fits(&[0], |_| Err::<bool, _>("broken")), Err("broken"));
    }

    #[test]
    fn a_call_is_never_separated_from_its_result() {
        for (roles, keep, expected) in [
            // Only the result would be kept, so neither is.
            ("suacrau", 3, Some("s0 ASK SUM u1 a5 u6")),
            ("suaucrau", 4, Some("s0 ASK SUM u3 c4 r5 a6 u7")),
            ("suaucrcra", 3, Some("s0 ASK SUM u3 c6 r7 a8")),
            // A call that is waiting for its result is kept.
            ("suauc", 0, Some("s0 ASK SUM u3 c4")),
        ] {
            assert_eq!(compacted(roles, keep).as_deref(), expected, "{roles} keeps {keep}");
        }
    }

    #[test]
    fn nothing_is_summarized_without_an_answer() {
        for (roles, keep) in [("", 0), ("su", 0), ("suc", 0), ("suu", 1)] {
            assert_eq!(compacted(roles, keep), None, "{roles} keeps {keep}");
        }
    }
}
