//! One answer of a local model while it is generated: tokens from the engine become text, tool calls and an
//! outcome.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use skep_model::Tokenizer;

use super::answer::{ChatEvent, ChatFinish, ChatOutcome};
use super::message::{ToolCall, ToolSpec};
use super::options::ChatOptions;
use super::parsed::ParsedEvent;
use super::prompt::Prompt;
use super::reading::AnswerReader;
use super::{free_text, tool_grammar};
use crate::{
    Dialect, Engine, EngineError, FinishReason, Finished, GenerateRequest, Invalid, RolledBack,
    SchemaValidator, Token, TokenEvent, TokenLogprob, TokenStream, Usage,
};

/// The events of one answer of a local model. Dropping it cancels the generation.
pub(crate) struct LocalAnswer {
    tokens: TokenStream,
    tokenizer: Arc<Tokenizer>,
    end_tokens: Vec<u32>,
    /// The special tokens whose text is part of the text.
    kept_special: Arc<[u32]>,
    reader: AnswerReader,
    prompt: Prompt,
    ready: VecDeque<ChatEvent>,
    /// Log-probabilities of tokens whose text has not been reported yet.
    logprobs: Vec<TokenLogprob>,
    produced: Vec<u32>,
    rolled_back: RolledBack,
    reported: ReportedParts,
    /// Number of tokens up to the end of the reasoning.
    reasoning_tokens: usize,
    /// Whether the answer must match a schema or be a call.
    must_be_whole: bool,
    check: CallCheck,
    ended: bool,
}

/// The parts of an answer that events have reported.
#[derive(Default)]
struct ReportedParts {
    text: String,
    reasoning: String,
    /// All of it as the model wrote it.
    raw: String,
    tool_calls: Vec<ToolCall>,
}

/// The check of complete calls, where nothing follows their arguments while they are generated.
struct CallCheck {
    tools: Vec<ToolSpec>,
    /// The flaw of a call, which ends the answer after the events before it.
    flaw: Option<EngineError>,
}

impl CallCheck {
    /// Returns whether this call or an earlier one has arguments that do not satisfy the schema of its tool.
    fn fails(&mut self, call: &ToolCall) -> bool {
        self.flaw = self.flaw.take().or_else(|| self.flaw_of(call));
        self.flaw.is_some()
    }

    fn flaw_of(&self, call: &ToolCall) -> Option<EngineError> {
        let tool = self.tools.iter().find(|tool| tool.name == call.name)?;
        let validator = SchemaValidator::compile(&tool.parameters, Dialect::Backtracking).ok()?;
        let arguments = serde_json::from_str(&call.arguments).unwrap_or_default();
        let invalid = validator.check(&arguments).err()?;
        let (inside, reason) = match &invalid {
            Invalid::Errors(errors) => {
                let error = errors.first()?;
                let reason = format!("`{}`: {}", error.kind().keyword(), error.masked());
                (error.instance_path().to_string(), reason)
            }
            unknown => (String::new(), unknown.to_string()),
        };
        let inside = if inside.is_empty() { "the whole".to_owned() } else { format!("`{inside}`") };
        let place = format!("{inside} of the arguments of `{}`", call.name);
        Some(EngineError::SchemaUnsatisfied { place, reason, rolled_back: 0 })
    }
}

impl LocalAnswer {
    pub(super) fn start(
        engine: &Engine,
        prompt: Prompt,
        options: ChatOptions,
    ) -> Result<LocalAnswer, EngineError> {
        let tokenizer = engine.tokenizer().clone();
        let dialect = super::dialect::Dialect::of_engine(engine);
        let kept_special = dialect.kept_special(&options);
        let mut request = GenerateRequest::new(prompt.tokens.clone());
        if !options.unconstrained {
            let constraint = tool_grammar::constraint(&options, &dialect, &tokenizer)?;
            request.constraint = constraint.or_else(|| free_text::constraint(&options, &dialect));
        }
        request.markup.kept_special = kept_special.clone();
        request.markup.thinking = dialect.thinking(&prompt, &tokenizer, &options);
        request.sampling = options.sampling.clone();
        request.seed = options.seed;
        request.max_tokens = options.max_tokens;
        request.stop = options.stop.clone();
        request.ignore_eos = options.ignore_eos;
        request.top_logprobs = options.top_logprobs;
        request.resume = options.resume.clone();
        request.resume_rolled_back = options.resume_rolled_back;
        request.affinity = options.affinity.clone();
        request.priority = options.priority;
        request.deadline = options.deadline;
        let tokens =
            engine.generate(request).map_err(|error| tool_grammar::explain(error, engine, &options))?;
        let reader = AnswerReader::new(&dialect, &prompt, &tokenizer, &options);
        Ok(LocalAnswer {
            tokens,
            tokenizer,
            end_tokens: engine.info().eos.clone(),
            kept_special,
            reader,
            prompt,
            ready: VecDeque::new(),
            logprobs: Vec::new(),
            produced: Vec::new(),
            rolled_back: RolledBack::default(),
            reported: ReportedParts::default(),
            reasoning_tokens: 0,
            check: CallCheck {
                tools: match !options.unconstrained && dialect.markup.writes_parameters() {
                    true => options.tools.clone(),
                    false => Vec::new(),
                },
                flaw: None,
            },
            must_be_whole: !options.unconstrained && (options.output.is_some() || options.must_call()),
            ended: false,
        })
    }

    /// Returns all tokens reported by an event so far, in the order of their production.
    pub fn produced(&self) -> &[u32] {
        &self.produced
    }

    /// Returns likely mistakes in the schemas of the output or the tools, for their author.
    pub fn warnings(&self) -> &std::sync::Arc<[String]> {
        self.tokens.warnings()
    }

    /// Returns what [`TokenStream::spent_tokens`] does.
    pub fn spent_tokens(&self) -> usize {
        self.tokens.spent_tokens()
    }

    /// Returns the output that had been rolled back when the last of these tokens was settled.
    pub fn rolled_back(&self) -> RolledBack {
        self.rolled_back
    }

    pub(super) fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ChatEvent, EngineError>>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if let Some(flaw) = self.check.flaw.take() {
                self.ended = true;
                return Poll::Ready(Some(Err(flaw)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match Pin::new(&mut self.tokens).poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(event))) => self.take(event),
                Poll::Ready(Some(Err(error))) => {
                    self.ended = true;
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Ready(None) => self.ended = true,
            }
        }
    }

    fn take(&mut self, event: TokenEvent) {
        match event {
            TokenEvent::Started { prompt_tokens, cached_tokens } => {
                let cache_write_tokens = 0;
                self.ready.push_back(ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens });
            }
            TokenEvent::PromptLogprobs(_) => {}
            TokenEvent::Token(Token { id, text, logprob, rolled_back, .. }) => {
                self.produced.push(id);
                self.rolled_back = rolled_back;
                let ends = text.is_empty() && self.end_tokens.contains(&id);
                self.logprobs.extend(logprob.filter(|_| !ends));
                self.say(&text);
                if self.is_in_reasoning() {
                    self.reasoning_tokens = self.produced.len();
                }
            }
            TokenEvent::Finished(finished) => self.finish(finished),
        }
    }

    /// Returns whether everything so far is reasoning.
    fn is_in_reasoning(&self) -> bool {
        let ReportedParts { text, reasoning, tool_calls, .. } = &self.reported;
        !reasoning.is_empty() && text.is_empty() && tool_calls.is_empty() && !self.reader.is_in_call()
    }

    fn say(&mut self, delta: &str) {
        if delta.is_empty() {
            return;
        }
        self.reported.raw.push_str(delta);
        let parsed = self.reader.push(delta);
        self.tell(parsed);
    }

    fn tell(&mut self, parsed: Vec<ParsedEvent>) {
        for event in parsed {
            self.ready.push_back(match event {
                ParsedEvent::Text(delta) => {
                    self.reported.text.push_str(&delta);
                    ChatEvent::Text { delta, logprobs: std::mem::take(&mut self.logprobs) }
                }
                ParsedEvent::Reasoning(delta) => {
                    // The log-probabilities of reasoning belong to no text either.
                    self.logprobs.clear();
                    self.reported.reasoning.push_str(&delta);
                    ChatEvent::Reasoning { delta }
                }
                ParsedEvent::CallStarted { index, id, name } => {
                    ChatEvent::ToolCallStarted { index, id, name }
                }
                ParsedEvent::Arguments { index, delta } => ChatEvent::ToolCallArguments { index, delta },
                ParsedEvent::CallFinished { index, call } => {
                    if self.check.fails(&call) {
                        return;
                    }
                    // The log-probabilities of the call's own tokens belong to no text.
                    self.logprobs.clear();
                    self.reported.tool_calls.push(call.clone());
                    ChatEvent::ToolCallFinished { index, call }
                }
            });
        }
    }

    fn finish(&mut self, finished: Finished) {
        let cut = finished.reason.cuts_off();
        self.say(&finished.text_rest);
        let in_call = self.reader.is_in_call();
        let rest = self.reader.finish(cut);
        self.tell(rest);
        if self.check.flaw.is_some() {
            return;
        }
        if self.reader.is_plain() && !self.logprobs.is_empty() {
            let logprobs = std::mem::take(&mut self.logprobs);
            self.ready.push_back(ChatEvent::Text { delta: String::new(), logprobs });
        }
        // A stop string after a whole call cuts nothing off.
        let has_calls = !self.reported.tool_calls.is_empty() && finished.reason != FinishReason::Length;
        let cut_off = cut && (in_call || self.must_be_whole && !has_calls);
        let finish = match finished.reason {
            FinishReason::Length => ChatFinish::Length,
            _ if cut_off => ChatFinish::Length,
            _ if !self.reported.tool_calls.is_empty() => ChatFinish::ToolCalls,
            _ => ChatFinish::Stop,
        };
        let ReportedParts { text, reasoning, raw, tool_calls } = std::mem::take(&mut self.reported);
        let tokens = self.history_tokens(finished.tokens, &finished.reason, &raw);
        let stopped_by = match finished.reason {
            FinishReason::Stop(stop) => Some(stop),
            _ => None,
        };
        self.ready.push_back(ChatEvent::Finished(ChatOutcome {
            text,
            reasoning,
            tool_calls,
            finish,
            stopped_by,
            cut_off,
            usage: Usage {
                reasoning_tokens: u32::try_from(self.reasoning_tokens).unwrap_or(u32::MAX),
                ..finished.usage
            },
            timing: finished.timing,
            prompt: std::mem::take(&mut self.prompt.tokens),
            tokens,
            raw,
            rendered: std::mem::take(&mut self.prompt.text),
        }));
        self.ended = true;
    }

    /// Returns the produced tokens without those that are not part of the message: the end-of-turn token, which
    /// the template writes itself, and the stop string.
    fn history_tokens(&self, mut tokens: Vec<u32>, reason: &FinishReason, raw: &str) -> Vec<u32> {
        match reason {
            FinishReason::Stop(_) => self.cut_at_text(tokens, raw),
            FinishReason::Length => tokens,
            FinishReason::Eos | FinishReason::ConstraintDone => {
                if tokens.last().is_some_and(|last| self.end_tokens.contains(last)) {
                    tokens.pop();
                }
                tokens
            }
        }
    }

    /// Returns the longest prefix of `tokens` whose text is within `raw`, followed by the rest of `raw`,
    /// encoded again.
    fn cut_at_text(&self, mut tokens: Vec<u32>, raw: &str) -> Vec<u32> {
        let (mut kept, mut kept_bytes, mut bytes) = (0, 0, 0);
        for (index, &id) in tokens.iter().enumerate() {
            let hidden = self.tokenizer.is_special(id) && !self.kept_special.contains(&id);
            let piece = if hidden { &[][..] } else { self.tokenizer.token_bytes(id).unwrap_or_default() };
            if !raw.as_bytes()[bytes..].starts_with(piece) {
                break;
            }
            bytes += piece.len();
            if raw.is_char_boundary(bytes) {
                (kept, kept_bytes) = (index + 1, bytes);
            }
        }
        match self.tokenizer.encode_inside(&raw[kept_bytes..]) {
            Ok(rest) => {
                tokens.truncate(kept);
                tokens.extend(rest);
                tokens
            }
            // The produced tokens are still what the model saw, only with the stop string.
            Err(_) => tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use skep_model::{ChatTemplate, SpecialTokens};

    use crate::EngineOptions;
    use crate::chat::{ChatMessage, ChatOptions, Transcript, fixture};

    #[tokio::test]
    async fn the_rest_of_a_token_before_a_stop_string_gets_no_space() {
        let template =
            "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}</s>{% endfor %}<s>[assistant]";
        for space in fixture::spaces() {
            let engine = fixture::engine_of(
                fixture::spaced_tokenizer(&space, &["<s>", "</s>"]),
                SpecialTokens::Literal,
                ChatTemplate::new(template, None, None).unwrap(),
                &["the ohe STOP"],
                EngineOptions::default(),
            );
            let mut transcript = Transcript::new();
            transcript.push(ChatMessage::user("go"));
            let options = ChatOptions { stop: vec!["e S".into()], ..ChatOptions::default() };
            let outcome = transcript.generate(&engine, options).unwrap().outcome().await.unwrap();
            assert_eq!(outcome.raw, " the oh");
            assert_eq!(engine.tokenizer().decode(&outcome.tokens, false), outcome.raw, "{space}");
        }
    }
}
