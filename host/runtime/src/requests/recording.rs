//! The recording of one request while it runs: what the log needs to know of it, within bounds.

use super::{
    LoggedAttempt, LoggedBody, LoggedCall, LoggedCost, LoggedMessage, LoggedUsage, RequestDetails,
    RequestLog, RequestOrigin,
};
use crate::{
    UsageDay,
    usage::{Amount, ModelUse, RequestUse},
};
use skep_engine::{
    Attempt, Ending, Observation, Observer, PromptMessage, RequestObserver, SpentTokens, Timing, ToolCallRef,
};
use skep_store::{RequestBody, RequestRow, UsageCounts};
use std::{
    fmt,
    time::{Duration, Instant},
};
use uuid::Uuid;

/// Size that is recorded beyond the limit, so that a secret at the limit is recorded, and found, as a whole: no encoding
/// of a secret is longer.
pub(super) const MARGIN_BYTES: usize = 32 << 10;
/// Size of a message besides its texts.
const MESSAGE_BYTES: usize = 64;

/// Starts the recordings of requests from one origin.
pub(super) struct Watcher {
    log: RequestLog,
    origin: RequestOrigin,
    /// Size of the texts to keep; `None` keeps none.
    body_bytes: Option<usize>,
}

/// A request in progress.
struct Recording {
    log: RequestLog,
    origin: RequestOrigin,
    asked: String,
    model: String,
    at_ms: u64,
    began: Instant,
    first_token: Option<Duration>,
    used: RequestUse,
    body: Option<RawBody>,
}

/// The texts of a request before secrets are taken out.
#[derive(Default)]
pub(super) struct RawBody {
    pub(super) body: LoggedBody,
    /// Size of the messages, and of the answer, that is kept in the end.
    pub(super) limit: usize,
    /// Size that is left for the answer.
    room: usize,
    /// The part of the answer that was cut.
    pub(super) answer_cut: Option<AnswerPart>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerPart {
    Text,
    Reasoning,
    /// The call at this index.
    Call(usize),
}

/// The record of a request that has ended.
pub(super) struct Finished {
    /// The row, without details and body.
    pub(super) row: RequestRow,
    pub(super) details: RequestDetails,
    pub(super) body: Option<RawBody>,
    pub(super) began: Instant,
}

impl Watcher {
    pub(super) fn new(log: RequestLog, origin: RequestOrigin, body_bytes: Option<usize>) -> Self {
        Watcher { log, origin, body_bytes }
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watcher").field("origin", &self.origin).finish_non_exhaustive()
    }
}

impl Observer for Watcher {
    fn request_started(
        &self,
        model: &str,
        said: &mut dyn Iterator<Item = PromptMessage<'_>>,
    ) -> Box<dyn RequestObserver> {
        Box::new(Recording {
            log: self.log.clone(),
            origin: self.origin.clone(),
            asked: self.origin.asked.clone().unwrap_or_else(|| model.to_owned()),
            model: model.to_owned(),
            at_ms: self.log.inner.clock.now_ms(),
            began: Instant::now(),
            first_token: None,
            used: RequestUse::default(),
            body: self.body_bytes.map(|limit| RawBody::new(limit, said)),
        })
    }
}

impl RequestObserver for Recording {
    fn observe(&mut self, observation: Observation<'_>) {
        match observation {
            Observation::Routed(model) => model.clone_into(&mut self.model),
            Observation::Started { prompt_tokens, cached_tokens, cache_write_tokens } => {
                self.used.started(prompt_tokens, cached_tokens, cache_write_tokens);
            }
            Observation::Text(_) | Observation::Reasoning(_) | Observation::ToolCall(_) => {
                self.first_token.get_or_insert_with(|| self.began.elapsed());
                if let Some(body) = &mut self.body {
                    body.add(observation);
                }
            }
        }
    }

    fn request_ended(mut self: Box<Self>, ending: Ending<'_>, spent: SpentTokens, attempts: Vec<Attempt>) {
        self.used.produced(u32::try_from(spent.output).unwrap_or(u32::MAX));
        let (status, error) = match ending {
            Ending::Finished { .. } => ("ok", None),
            Ending::Failed(error) => ("failed", Some(error)),
            Ending::Cancelled => ("cancelled", None),
        };
        let mut times = (None, self.first_token.map(ms), ms(self.began.elapsed()));
        let mut finish_reason = None;
        if let Ending::Finished { reason, usage, timing } = ending {
            self.used.finished(usage);
            finish_reason = Some(reason.to_owned());
            // An engine knows its times better than the reader of its answer, who may be slow. Those of an upstream do
            // not include failed attempts.
            if attempts.is_empty() {
                times = of_engine(timing);
            }
        }
        if let (Some(body), Some(error)) = (&mut self.body, error) {
            body.body.error = Some(error.to_string());
        }
        let (queue_ms, first_token_ms, total_ms) = times;
        let models = ModelUse::of_request(&self.model, &self.used, &spent.unreported);
        let mut counts = UsageCounts::default();
        models.iter().for_each(|(_, used)| counts.add(used));
        let details = RequestDetails {
            surface: self.origin.surface.as_str().to_owned(),
            turn: self.origin.turn.clone(),
            streamed: self.origin.streamed,
            finish_reason,
            queue_ms,
            first_token_ms,
            total_ms,
            usage: (counts.requests > 0).then(|| usage(&counts)),
            cost: self.cost(&models),
            attempts: attempts.into_iter().map(attempt).collect(),
        };
        let source = &self.origin.source;
        let row = RequestRow {
            key: 0,
            id: format!("req_{}", Uuid::now_v7().simple()),
            at_ms: self.at_ms,
            tenant: source.tenant.clone(),
            api_key: source.key.clone(),
            agent: source.agent.clone(),
            session: source.session.clone(),
            asked: self.asked,
            model: self.model,
            status: status.to_owned(),
            error: error.map(|error| error.code().to_owned()),
            details: String::new(),
            body: RequestBody::None,
        };
        self.log.submit(Finished { row, details, body: self.body, began: self.began });
    }
}

impl Recording {
    /// Returns the cost, if all models that used something have a price for it in one currency.
    fn cost(&self, models: &ModelUse) -> Option<LoggedCost> {
        let prices = self.log.inner.prices.now();
        let day = UsageDay::of_ms(self.at_ms);
        let currency =
            prices.price(models.iter().next().map_or(&*self.model, |(model, _)| model), day)?.currency;
        let mut amount = Amount::ZERO;
        for (model, counts) in models.iter() {
            let price = prices.price(model, day).filter(|price| price.currency == currency)?;
            if price.unpriced(counts).is_some() {
                return None;
            }
            amount += price.cost(counts);
        }
        Some(LoggedCost { amount: amount.to_string(), currency: currency.to_string() })
    }
}

impl Finished {
    /// Returns the size of the texts.
    pub(super) fn bytes(&self) -> usize {
        self.body.as_ref().map_or(0, RawBody::bytes)
    }
}

impl RawBody {
    /// Keeps the newest messages that fit. The text that does not fit is cut.
    pub(super) fn new(limit: usize, said: &mut dyn Iterator<Item = PromptMessage<'_>>) -> Self {
        let mut raw = RawBody { room: limit + MARGIN_BYTES, limit, ..RawBody::default() };
        raw.body.answer.role = "assistant".to_owned();
        let mut room = limit + MARGIN_BYTES + MESSAGE_BYTES;
        for said in said {
            if room <= MESSAGE_BYTES {
                raw.body.omitted_messages += 1;
                continue;
            }
            room -= MESSAGE_BYTES;
            let mut keep = |text: &str| kept(text, &mut room, &mut raw.body.request_truncated);
            let message = LoggedMessage {
                role: said.role.to_owned(),
                text: keep(&said.text),
                reasoning: said.reasoning.map(&mut keep),
                name: said.name.map(&mut keep),
                call_id: said.call_id.map(&mut keep),
                calls: said.calls.iter().map(|call| logged(call, keep(call.arguments))).collect(),
            };
            raw.body.messages.push(message);
        }
        raw.body.messages.reverse();
        raw
    }

    /// Adds a part of the answer.
    pub(super) fn add(&mut self, part: Observation<'_>) {
        let RawBody { body: LoggedBody { answer, answer_truncated, .. }, room, answer_cut, .. } = self;
        let mut is_cut = false;
        let mut keep = |text: &str| kept(text, room, &mut is_cut);
        let part = match part {
            Observation::Text(delta) => {
                answer.text.push_str(&keep(delta));
                AnswerPart::Text
            }
            Observation::Reasoning(delta) => {
                answer.reasoning.get_or_insert_default().push_str(&keep(delta));
                AnswerPart::Reasoning
            }
            Observation::ToolCall(call) => {
                answer.calls.push(logged(&call, keep(call.arguments)));
                AnswerPart::Call(answer.calls.len() - 1)
            }
            Observation::Routed(_) | Observation::Started { .. } => return,
        };
        if is_cut {
            *answer_truncated = true;
            answer_cut.get_or_insert(part);
        }
    }

    /// Returns the approximate size in memory.
    fn bytes(&self) -> usize {
        let texts = |message: &LoggedMessage| {
            let calls: usize = message.calls.iter().map(|call| call.arguments.len()).sum();
            MESSAGE_BYTES + message.text.len() + message.reasoning.as_ref().map_or(0, String::len) + calls
        };
        self.body.messages.iter().map(texts).sum::<usize>() + texts(&self.body.answer)
    }
}

/// Returns as much of a text as there is room for. After a text that was cut, there is no more room.
fn kept(text: &str, room: &mut usize, is_cut: &mut bool) -> String {
    let end = floor(text, *room);
    let was_cut = end < text.len();
    *room = if was_cut { 0 } else { *room - end };
    *is_cut |= was_cut;
    text[..end].to_owned()
}

/// Returns the last boundary between characters that is not after `at`.
pub(super) fn floor(text: &str, at: usize) -> usize {
    if at >= text.len() { text.len() } else { (0..=at).rfind(|at| text.is_char_boundary(*at)).unwrap_or(0) }
}

fn logged(call: &ToolCallRef<'_>, arguments: String) -> LoggedCall {
    LoggedCall { id: call.id.to_owned(), name: call.name.to_owned(), arguments }
}

fn attempt(attempt: Attempt) -> LoggedAttempt {
    let Attempt { upstream, model, outcome, status, time } = attempt;
    LoggedAttempt { upstream, model, outcome: outcome.to_owned(), status, ms: ms(time) }
}

fn usage(counts: &UsageCounts) -> LoggedUsage {
    LoggedUsage {
        prompt_tokens: counts.input_tokens,
        cached_tokens: counts.cached_tokens,
        cache_write_tokens: counts.cache_write_tokens,
        completion_tokens: counts.output_tokens,
        estimated: counts.estimated_requests > 0,
    }
}

fn of_engine(timing: &Timing) -> (Option<u64>, Option<u64>, u64) {
    let ms = |us: u64| us / 1_000;
    (Some(ms(timing.queue_us)), Some(ms(timing.first_token_us)), ms(timing.total_us))
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
