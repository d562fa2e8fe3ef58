//! One answer of an upstream's model: attempts until one begins to answer, and repeated requests until the answer
//! matches its schema.
//!
//! Invariant: once any text, reasoning or call has reached the caller, nothing is retried that could repeat it.

use std::sync::Arc;

use skep_engine::{
    EngineError, Timing, UnreportedEntry, Usage,
    chat::{ChatEvent, ChatFinish, ChatOptions, ChatOutcome, Input},
};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::Instrument as _;

use crate::{
    assembly::{AssembledAnswer, Assembly, TOKEN_BYTES},
    attempt::{Arrived, Attempt, Listener},
    delta::Delta,
    event_sink::EventSink,
    failure::{Again, Failure},
    metric,
    options::UpstreamModelOptions,
    question::{AnswerTool, Form, Question},
    retry,
    shared::Shared,
    span,
    structured::{Checked, Checks, Misfit, complaint},
    wire,
};

/// The answer's expected length where the request does not bound it, for the limit on tokens.
const EXPECTED_OUTPUT: usize = 512;

/// One request to a model of an upstream.
pub(crate) struct Asking {
    shared: Arc<Shared>,
    index: usize,
    name: String,
    input: Input,
    options: Arc<ChatOptions>,
    started: Instant,
    until: Instant,
}

/// A request in its wire format.
struct Prepared {
    body: Vec<u8>,
    streams: bool,
    max_tokens: Option<u64>,
    answer_tool: Option<AnswerTool>,
    prompt_tokens: usize,
}

/// Forwards the parts of an answer that need no validation as they arrive.
struct Live<'a> {
    sink: &'a mut EventSink,
    reasoning: bool,
    text: bool,
    prompt_tokens: usize,
    /// Size of the parts that were passed on.
    reported_bytes: usize,
    /// The use of the current attempt that no event reports.
    unreported: Option<UnreportedEntry>,
}

impl Listener for Live<'_> {
    async fn hear(&mut self, delta: Delta, assembly: &Assembly) {
        let event = match delta {
            Delta::Reasoning(delta) if self.reasoning => Some(ChatEvent::Reasoning { delta }),
            Delta::Text(delta) if self.text => Some(ChatEvent::Text { delta, logprobs: Vec::new() }),
            _ => None,
        };
        if let Some(ChatEvent::Reasoning { delta } | ChatEvent::Text { delta, .. }) = &event {
            self.reported_bytes += delta.len();
        }
        // A caller that leaves with an event must not find its tokens counted twice, so they are removed first.
        if let Some(unreported) = &self.unreported {
            unreported.estimate(self.rest(assembly.usage(self.prompt_tokens)));
        }
        let Some(event) = event else { return };
        let usage = assembly.usage(self.prompt_tokens);
        self.sink.start(&usage).await;
        self.sink.send(event).await;
    }
}

impl Live<'_> {
    /// Returns the part of an attempt's use that no event reports.
    fn rest(&self, total: Usage) -> Usage {
        if self.reported_bytes == 0 {
            return total;
        }
        let reported = u32::try_from(self.reported_bytes.div_ceil(TOKEN_BYTES)).unwrap_or(u32::MAX);
        Usage { completion_tokens: total.completion_tokens.saturating_sub(reported), ..Usage::default() }
    }
}

impl Asking {
    pub(crate) fn new(
        shared: Arc<Shared>,
        index: usize,
        name: &str,
        input: Input,
        options: ChatOptions,
    ) -> Self {
        let started = Instant::now();
        let longest = started + shared.options.timeouts.total;
        let until = options.deadline.map_or(longest, Instant::from_std);
        let (name, options) = (name.to_owned(), Arc::new(options));
        Asking { shared, index, name, input, options, started, until }
    }

    pub(crate) async fn run(self, sink: EventSink) -> Result<ChatOutcome, EngineError> {
        let span = span::open(self.shared.options.kind.as_str(), &self.name, &self.input, &self.options);
        let until = self.until;
        let answer = timeout_at(until, self.answer(sink)).instrument(span.clone()).await;
        let result = answer.unwrap_or(Err(EngineError::DeadlineExceeded));
        span::close(&span, &result);
        result
    }

    /// Requests the answer again until it matches its schema, or the attempts are used up.
    async fn answer(mut self, mut sink: EventSink) -> Result<ChatOutcome, EngineError> {
        let options = self.options.clone();
        let checks = Arc::new(computed(move || Checks::compile(&options)).await??);
        let mut refused = Usage::default();
        let mut reasoning = None;
        let mut asked = 0;
        // The use of refused answers, until the outcome reports it.
        let mut unreported = Vec::new();
        loop {
            let prepared = self.prepare().await?;
            // Repeated requests forward nothing before validation, because their reasoning would repeat what the caller
            // has.
            let mut live = Live {
                reasoning: asked == 0,
                text: asked == 0 && !checks.holds_text(),
                prompt_tokens: prepared.prompt_tokens,
                sink: &mut sink,
                reported_bytes: 0,
                unreported: None,
            };
            let arrived = self.ask(&prepared, &mut live).await?;
            let text_is_sent = live.text;
            let is_counted = arrived.assembly.count().completion.is_some();
            let answer = arrived.assembly.answer(self.input.messages(), prepared.prompt_tokens);
            let entry = live.unreported.take();
            match (&entry, is_counted) {
                (Some(entry), true) => entry.count(live.rest(answer.usage)),
                (Some(entry), false) => entry.estimate(live.rest(answer.usage)),
                (None, _) => {}
            }
            self.count(&answer.usage);
            reasoning.get_or_insert_with(|| answer.reasoning.clone());
            let (checker, tool) = (checks.clone(), prepared.answer_tool);
            match computed(move || checker.check(answer, tool.as_ref())).await? {
                Ok(checked) => {
                    let timing = self.timing(arrived.first_token);
                    let reasoning = reasoning.unwrap_or_default();
                    entry.iter().for_each(UnreportedEntry::clear);
                    let outcome =
                        send_rest(&mut sink, checked, text_is_sent, reasoning, refused, timing).await;
                    unreported.iter().for_each(UnreportedEntry::clear);
                    return Ok(outcome);
                }
                Err(unfit) => {
                    let Misfit { place, reason } = &unfit.misfit;
                    self.counter(metric::FORM_ERRORS).increment(1);
                    tracing::info!(asked, "an answer does not match its schema: {place}: {reason}");
                    unreported.extend(entry);
                    refused.add(&Usage {
                        completion_tokens: 0,
                        refused_tokens: unfit.answer.usage.completion_tokens,
                        ..unfit.answer.usage
                    });
                    if asked == self.shared.options.retries.form_attempts || sink.has_sent_answer() {
                        return Err(EngineError::SchemaUnsatisfied {
                            place: place.clone(),
                            reason: reason.clone(),
                            rolled_back: refused.refused_tokens,
                        });
                    }
                    // Only answers to messages have a schema.
                    if let Input::Messages(messages) = &mut self.input {
                        messages.extend(complaint(&unfit));
                    }
                    asked += 1;
                }
            }
        }
    }

    /// Sends the request until an attempt brings an answer, or must not be repeated.
    async fn ask(&self, prepared: &Prepared, live: &mut Live<'_>) -> Result<Arrived, EngineError> {
        let mut failed = 0_u32;
        loop {
            self.options.cancel.check()?;
            // An attempt that could not be sent is one, too.
            let unsent = |error: &EngineError| {
                let attempts = &self.options.attempts;
                attempts.begin(Some(&self.shared.options.name), &self.name).ended(error.code(), None);
            };
            let failure = match self.attempt(prepared, live).await.inspect_err(unsent)? {
                Ok(arrived) => {
                    tracing::Span::current().record("skep.attempts", i64::from(failed) + 1);
                    return Ok(arrived);
                }
                Err(failure) => failure,
            };
            failed += 1;
            let has_output = live.reasoning && live.sink.has_sent_anything();
            let retries = &self.shared.options.retries;
            let wait = failure.again().and_then(|asked| retry::wait(retries, failed, asked));
            let wait = wait.filter(|wait| {
                !has_output && failed < retries.attempts && Instant::now() + *wait < self.until
            });
            let message = failure.message();
            tracing::info!(
                attempt = failed,
                fault = failure.outcome(),
                ?wait,
                "an attempt failed: {message}"
            );
            let Some(wait) = wait else {
                tracing::Span::current().record("skep.attempts", i64::from(failed));
                return Err(self.error(failure, live.sink, prepared.prompt_tokens));
            };
            sleep(wait).await;
        }
    }

    /// Waits until the limits allow the request, and sends it once. The outer error is one that no further attempt
    /// changes.
    async fn attempt(
        &self,
        prepared: &Prepared,
        live: &mut Live<'_>,
    ) -> Result<Result<Arrived, Failure>, EngineError> {
        let Shared { options, base, http, limits, breaker } = &*self.shared;
        let refuse = |failure: Failure| self.error(failure, live.sink, prepared.prompt_tokens);
        let closed = |reason: String| Failure::Unavailable { message: reason, again: Again::Never };
        if let Some(problem) = breaker.problem(Instant::now()) {
            return Err(refuse(closed(problem)));
        }
        let expected = self.options.max_tokens.unwrap_or(EXPECTED_OUTPUT);
        let tokens = prepared.prompt_tokens.saturating_add(expected);
        let mut share = limits.admit(tokens, self.until).await.map_err(refuse)?;
        let key = match &options.key {
            Some(source) => Some(
                source.key().await.map_err(|why| refuse(closed(format!("its key cannot be read: {why}"))))?,
            ),
            None => None,
        };
        let admission = breaker.admit(Instant::now()).map_err(|broken| {
            let wait = broken.retry_in.as_secs_f64();
            refuse(closed(format!("its circuit breaker is open for another {wait:.1} s: {}", broken.reason)))
        })?;
        share.sent();
        let attempt = Attempt {
            http,
            kind: options.kind,
            upstream: &options.name,
            model: &self.model().name,
            url: wire::address(options.kind, base, self.model().remote_name(), &self.input),
            key: key.as_ref(),
            body: prepared.body.clone(),
            streams: prepared.streams,
            max_tokens: prepared.max_tokens,
            timeouts: options.timeouts,
            bounds: options.bounds,
            status: None,
        };
        live.unreported = Some(self.options.unreported.begin(&self.name));
        let noted = self.options.attempts.begin(Some(&options.name), &self.name);
        let (result, status) = attempt.run(admission, live).await;
        let outcome = result.as_ref().map_or_else(Failure::outcome, |_| "ok");
        noted.ended(outcome, status);
        let labels = [
            ("upstream", options.name.clone()),
            ("model", self.model().name.clone()),
            ("outcome", outcome.to_owned()),
        ];
        metrics::counter!(metric::ATTEMPTS, &labels).increment(1);
        match &result {
            Ok(arrived) => {
                let count = arrived.assembly.count();
                if let (Some(prompt), Some(completion)) = (count.prompt, count.completion) {
                    share.settle(prompt as usize + completion as usize);
                }
            }
            Err(_) if !live.sink.has_sent_anything() => share.settle(0),
            Err(_) => {}
        }
        Ok(result)
    }

    /// Writes the request in its wire format.
    async fn prepare(&self) -> Result<Prepared, EngineError> {
        let (shared, index) = (self.shared.clone(), self.index);
        let (input, options) = (self.input.clone(), self.options.clone());
        computed(move || {
            let model = &shared.options.models[index];
            let question = Question::new(shared.options.kind, model, &input, &options)?;
            let body = wire::body(shared.options.kind, &question, &shared.base);
            let most = body.get("max_tokens").or_else(|| body.get("max_completion_tokens"));
            let prepared = Prepared {
                streams: body["stream"] == true,
                max_tokens: most.and_then(serde_json::Value::as_u64),
                prompt_tokens: input.estimated_tokens(options.opening()),
                answer_tool: match question.form {
                    Form::Tool(tool) => Some(tool),
                    Form::Free | Form::Json | Form::Schema(_) => None,
                },
                body: body.to_string().into_bytes(),
            };
            let (bytes, limit) = (prepared.body.len(), shared.options.bounds.request);
            if bytes > limit {
                let parameter = if input.messages().is_empty() { "prompt" } else { "messages" };
                let message = format!("the request has {bytes} bytes; an upstream gets at most {limit}");
                return Err(EngineError::InvalidRequest { parameter: parameter.to_owned(), message });
            }
            Ok(prepared)
        })
        .await?
    }

    fn model(&self) -> &UpstreamModelOptions {
        &self.shared.options.models[self.index]
    }

    fn error(&self, failure: Failure, sink: &EventSink, prompt_tokens: usize) -> EngineError {
        match failure {
            Failure::TooLong { message } if !sink.has_sent_anything() => {
                let requested = self.options.max_tokens.unwrap_or(1);
                let reported = numbers(&message);
                let known = self.model().context_length.or(reported.get(1).or(reported.first()).copied());
                let limit = known.unwrap_or(prompt_tokens);
                let prompt = reported.first().copied().unwrap_or(0).max(prompt_tokens).max(limit);
                EngineError::ContextOverflow { limit, prompt, requested }
            }
            failure => failure.into_error(&self.shared.options.name, sink.has_sent_anything()),
        }
    }

    fn counter(&self, name: &'static str) -> metrics::Counter {
        let labels = [("upstream", self.shared.options.name.clone()), ("model", self.model().name.clone())];
        metrics::counter!(name, &labels)
    }

    fn count(&self, usage: &Usage) {
        for (kind, tokens) in [
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("cache_write", usage.cache_write_tokens),
            ("completion", usage.completion_tokens),
        ] {
            let labels = [
                ("upstream", self.shared.options.name.clone()),
                ("model", self.model().name.clone()),
                ("kind", kind.to_owned()),
            ];
            metrics::counter!(metric::TOKENS, &labels).increment(tokens.into());
        }
    }

    fn timing(&self, first_token: Instant) -> Timing {
        let since = |at: Instant| u64::try_from((at - self.started).as_micros()).unwrap_or(u64::MAX);
        Timing { queue_us: 0, first_token_us: since(first_token), total_us: since(Instant::now()) }
    }
}

/// Sends what was withheld, and returns the outcome.
async fn send_rest(
    sink: &mut EventSink,
    checked: Checked,
    text_is_sent: bool,
    reasoning: String,
    refused: Usage,
    timing: Timing,
) -> ChatOutcome {
    let Checked { answer, cut_off } = checked;
    let AssembledAnswer { text, calls, finish, stopped_by, mut usage, .. } = answer;
    sink.start(&usage).await;
    if !text_is_sent && !text.is_empty() {
        sink.send(ChatEvent::Text { delta: text.clone(), logprobs: Vec::new() }).await;
    }
    sink.send_calls(&calls).await;
    usage.add(&refused);
    let finish = if cut_off { ChatFinish::Length } else { finish };
    ChatOutcome {
        reasoning,
        tool_calls: calls,
        stopped_by,
        cut_off,
        usage,
        timing,
        ..ChatOutcome::remote(text, finish)
    }
}

/// Computes something that takes a while, away from the threads that serve others.
async fn computed<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, EngineError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| EngineError::Failed(error.to_string()))
}

/// Returns the numbers of a server's message that may count tokens, the largest first: the prompt's tokens, and the
/// limit that they exceed.
fn numbers(message: &str) -> Vec<usize> {
    let digits = message.split(|c: char| !c.is_ascii_digit()).filter(|digits| digits.len() >= 3);
    let mut numbers: Vec<usize> = digits.filter_map(|digits| digits.parse().ok()).collect();
    numbers.sort_unstable_by(|a, b| b.cmp(a));
    numbers.dedup();
    numbers
}
