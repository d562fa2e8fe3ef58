//! One generation from submission to its end: its tokens, text, constraint and reported events.
//!
//! Invariant: whatever happens, the caller's stream ends with `Finished` or an error, exactly once. A sequence
//! knows how far it has been computed and which pages it holds, but does not decide when it is computed.

mod append;
mod continuation;
mod penalties;
mod state;
mod thinking;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skep_model::{Occurrences, PAGE_TOKENS, PageId, RowOutput, SeenTokens, Tokenizer};

use crate::constraint::OutputConstraint;
use crate::detokenize::Detokenizer;
use crate::draft::{Draft, DraftFilter, Proposal};
use crate::kv::SequencePages;
use crate::page_peers::Prefilled;
use crate::rollback::CheckedOutput;
use crate::sequence_id::SequenceId;
use crate::service::Service;
use crate::submission::Submission;
use crate::telemetry::{Outcome, RequestTelemetry, Telemetry, TokenKind};
use crate::{
    EngineError, FinishReason, Finished, GenerateRequest, PageSink, TokenEvent, TokenLogprob, Usage,
};

use thinking::ThinkingState;

pub(crate) use append::Draw;
use state::{Computed, Constrained, Delivery, Form, Reservation, Times, TokenCounts};

/// State shared by all sequences of an engine.
pub(crate) struct SequenceContext {
    pub tokenizer: Arc<Tokenizer>,
    pub eos: Vec<u32>,
    pub vocabulary_size: usize,
    pub telemetry: Arc<Telemetry>,
}

pub(crate) struct Sequence {
    pub id: SequenceId,
    /// The prompt has moved into `tokens`.
    pub request: GenerateRequest,
    /// Tokens of the prompt and the output.
    pub tokens: Vec<u32>,
    /// The distinct ones among the first of these tokens, from the first draw with a repetition penalty on.
    seen: Option<SeenTokens>,
    /// The counts of the output's first tokens, from the first draw with a frequency or presence penalty on.
    occurrences: Option<Occurrences>,
    pub computed: Computed,
    pub seed: u64,
    context: Arc<SequenceContext>,
    telemetry: RequestTelemetry,
    prompt_len: usize,
    max_tokens: usize,
    form: Form,
    delivery: Delivery,
    counts: TokenCounts,
    times: Times,
    reservation: Reservation,
}

impl Sequence {
    /// Creates a sequence of which nothing is computed. Its seed is drawn at random unless the request has one.
    pub fn new(id: SequenceId, submission: Submission, context: &Arc<SequenceContext>) -> Self {
        let Submission {
            mut request,
            max_tokens,
            matcher,
            drafter,
            checks,
            pages,
            events,
            spent,
            submitted,
            deadline,
            slot,
            load,
        } = submission;
        let checked = checks.map(|checks| {
            Box::new(CheckedOutput::new(checks, request.constraint.as_ref(), request.resume_rolled_back))
        });
        let tokens = std::mem::take(&mut request.prompt);
        let stop = std::mem::take(&mut request.stop);
        let thinking = request.markup.thinking.take();
        let thinking = thinking.and_then(|thinking| ThinkingState::new(thinking, matcher.is_some()));
        let constraint = matcher.map_or(Constrained::No, |matcher| Constrained::By(Box::new(matcher)));
        let delivery = Delivery {
            text: Detokenizer::new(&context.tokenizer, request.markup.kept_special.clone(), stop),
            events,
            spent,
            scores: request.prompt_logprobs.map(|_| vec![None]),
            given_pages: pages.as_ref().map_or(0, |sink| sink.first_page()),
            pages,
        };
        Sequence {
            id,
            prompt_len: tokens.len(),
            tokens,
            seen: None,
            occurrences: None,
            computed: Computed::default(),
            seed: request.seed.unwrap_or_else(rand::random),
            context: context.clone(),
            telemetry: context.telemetry.of_request(request.affinity.agent.as_deref()),
            max_tokens,
            form: Form { constraint, thinking, drafter, checked },
            delivery,
            counts: TokenCounts::default(),
            times: Times {
                submitted,
                deadline,
                admitted: None,
                first_token: None,
                last_token: None,
                prefill: Duration::ZERO,
            },
            reservation: Reservation { slot: Some(slot), load: Some(load) },
            request,
        }
    }

    /// Returns the tokens of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_len]
    }

    /// Returns the tokens generated so far, reported or not.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Returns the number of tokens that are known but not computed.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed.tokens
    }

    /// Returns the number of tokens that the sequence may still produce.
    pub fn tokens_left(&self) -> usize {
        self.max_tokens - self.output().len()
    }

    /// Returns the first position whose row must still be scored.
    pub fn next_scored_row(&self) -> Option<usize> {
        let scored = self.delivery.scores.as_ref()?.len();
        (scored < self.prompt_len).then_some(scored - 1)
    }

    /// Returns the tokens for which a cached prefix may be used: rows that must be scored have to be computed.
    pub fn reusable_tokens(&self) -> &[u32] {
        let unscored = self.next_scored_row().map_or(self.tokens.len(), |row| row + 1);
        &self.tokens[..unscored.min(self.held_from().unwrap_or(usize::MAX))]
    }

    /// Returns the number of computed tokens whose pages may be shared. If tokens are rolled back, the last
    /// token before them is computed again.
    pub fn settled(&self) -> usize {
        self.held_from().map_or(self.computed.tokens, |held| self.computed.tokens.min(held.saturating_sub(1)))
    }

    /// Returns the position of the first token that may be rolled back.
    fn held_from(&self) -> Option<usize> {
        Some(self.prompt_len + self.form.checked.as_ref()?.held_from()?)
    }

    /// Returns the ids that are never drawn.
    pub fn banned(&self) -> &[u32] {
        let may_not_end = self.form.thinking.as_ref().is_some_and(ThinkingState::holds_constraint);
        if self.request.ignore_eos || may_not_end { &self.context.eos } else { &[] }
    }

    /// Returns the reason that the sequence must end before its next step, if there is one.
    pub fn interruption(&self, now: Instant) -> Option<EngineError> {
        if self.delivery.events.is_closed() {
            return Some(EngineError::Cancelled);
        }
        (now >= self.times.deadline).then_some(EngineError::DeadlineExceeded)
    }

    /// Lets the sequence compute tokens before it is admitted, with `pages`, in which the first `computed` tokens are computed.
    pub fn begin_head_start(&mut self, pages: SequencePages, computed: usize) {
        let earlier = &self.counts.head_start;
        let start = if earlier.is_empty() { computed } else { earlier.start.min(computed) };
        self.counts.head_start = start..computed;
        self.computed.tokens = computed;
        self.computed.pages = pages;
        self.record_load();
    }

    /// Starts or resumes the sequence with `pages`, in which the first `computed` tokens are computed. The first time,
    /// `Started` is sent to the caller, and the known tokens of the output join the prompt's prefill.
    pub fn admit(
        &mut self,
        pages: SequencePages,
        computed: usize,
    ) -> Result<Option<FinishReason>, EngineError> {
        self.computed.tokens = computed;
        self.computed.pages = pages;
        self.record_load();
        let Range { start, end } = self.counts.head_start;
        let own = end.min(self.computed.tokens).saturating_sub(start);
        let found = self.computed.tokens - own;
        if self.times.admitted.is_some() {
            // Pages that were evicted since are computed after all.
            self.counts.cached = self.counts.cached.min(found);
            return Ok(None);
        }
        let now = Instant::now();
        self.times.admitted = Some(now);
        self.reservation.slot = None;
        self.counts.prefilled = self.counts.prefilled.min(found);
        self.counts.cached = found - self.counts.prefilled;
        let telemetry = &self.telemetry;
        telemetry.record_queue_time(self.times.since_submission(now));
        telemetry.record_tokens(TokenKind::Prompt, self.prompt_len);
        telemetry.record_tokens(TokenKind::Cached, self.counts.cached);
        self.emit(Ok(TokenEvent::Started {
            prompt_tokens: count(self.prompt_len),
            cached_tokens: count(self.counts.cached),
        }));
        self.report_scores_if_complete();
        if self.is_prefill_only() || self.next_scored_row().is_some() {
            Ok(None)
        } else {
            self.append_known()
        }
    }

    /// Records, before the sequence is admitted, what another host has computed of the prompt.
    pub fn record_prefilled(&mut self, prefilled: Prefilled) {
        self.counts.prefilled = prefilled.tokens;
        self.times.prefill = prefilled.spent;
    }

    /// Returns whether the sequence is computed for another host, which counts its tokens.
    pub fn is_for_other_host(&self) -> bool {
        self.delivery.pages.is_some()
    }

    /// Returns the pages of the prompt that were computed since the last call, if somebody gets them, with the number of the
    /// first one.
    pub fn take_given(&mut self) -> Option<(Arc<dyn PageSink>, usize, Vec<PageId>)> {
        let sink = self.delivery.pages.as_ref()?;
        let whole = self.settled().min(self.prompt_len) / PAGE_TOKENS;
        let first = self.delivery.given_pages;
        let pages = self.computed.pages.pages().get(first..whole).filter(|pages| !pages.is_empty())?;
        let given = (sink.clone(), first, pages.to_vec());
        self.delivery.given_pages = whole;
        Some(given)
    }

    /// Returns the service that the sequence got since the last call, counted from its admission on.
    pub fn take_service(&mut self) -> Service {
        let Some(_) = self.times.admitted else { return Service::default() };
        let total = Service {
            prompt: self.prompt_len - self.counts.cached,
            output: self.output().len() + self.rolled_back_tokens(),
        };
        total.since(std::mem::replace(&mut self.counts.billed, total))
    }

    /// Records that the next `tokens` pending tokens are in the pages.
    pub fn mark_computed(&mut self, tokens: usize) {
        self.computed.tokens += tokens;
        if let Some(known) = self.computed.recompute_from.take() {
            self.computed.tokens = self.computed.tokens.min(known);
        }
        self.record_load();
    }

    /// Takes the pages away. When the sequence is resumed, it computes again whatever is not cached then.
    pub fn give_up_pages(&mut self) -> SequencePages {
        if self.times.admitted.is_none() {
            self.counts.head_start.end = self.computed.tokens;
        }
        self.computed.tokens = 0;
        self.computed.released_pages = self.computed.pages.pages().len();
        std::mem::take(&mut self.computed.pages)
    }

    /// Returns whether the next token is constrained, which it is not within the reasoning.
    pub fn is_constrained(&self) -> bool {
        !matches!(self.form.constraint, Constrained::No) && !self.is_thinking()
    }

    /// Returns whether the answer has not begun.
    fn is_thinking(&self) -> bool {
        self.form.thinking.as_ref().is_some_and(ThinkingState::is_underway)
    }

    /// Returns the number of output tokens before the answer.
    fn thought_tokens(&self) -> usize {
        self.form.thinking.as_ref().map_or(0, ThinkingState::tokens)
    }

    /// Lends the constraint out, while no token is appended.
    pub fn lend_constraint(&mut self) -> Option<Box<OutputConstraint>> {
        if self.is_thinking() {
            return None;
        }
        match std::mem::replace(&mut self.form.constraint, Constrained::Lent) {
            Constrained::By(constraint) => Some(constraint),
            other => {
                self.form.constraint = other;
                None
            }
        }
    }

    /// Puts a lent constraint back.
    pub fn return_constraint(&mut self, constraint: Box<OutputConstraint>) {
        self.form.constraint = Constrained::By(constraint);
    }

    /// Returns whether a token was drawn. The first token never waits for a search of the prompt.
    pub fn has_begun(&self) -> bool {
        self.times.first_token.is_some()
    }

    /// Returns the tokens that the form of the output predicts next, at most `limit` of them.
    pub fn likely(&mut self, limit: usize) -> Vec<u32> {
        if self.is_thinking() {
            return Vec::new();
        }
        let answer = self.prompt_len + self.thought_tokens();
        let Constrained::By(constraint) = &mut self.form.constraint else { return Vec::new() };
        let output = &self.tokens[answer..];
        let strict = self.form.drafter.as_mut().map(|drafter| drafter.propose(output, limit));
        strict.filter(|likely| !likely.is_empty()).unwrap_or_else(|| {
            let mut forced = constraint.forced();
            forced.truncate(limit);
            forced
        })
    }

    /// Returns whether the form of the output predicts the next token, so that a draft is likely to save steps.
    pub fn expects_draft(&mut self) -> bool {
        self.is_constrained() && !self.likely(1).is_empty()
    }

    /// Returns the part of a proposal that can come true, at most `limit` tokens and within the sequence's own
    /// limits.
    pub fn admissible(&self, proposal: &Proposal, limit: usize) -> Draft {
        if proposal.tokens.is_empty() {
            return Draft::default();
        }
        // One token is drawn after the draft.
        let limit = limit.min(self.tokens_left().saturating_sub(1));
        if let Some(thinking) = self.form.thinking.as_ref().filter(|thinking| thinking.is_underway()) {
            let ends = proposal.tokens.iter().position(|id| thinking.ends_with(*id));
            let limit = limit.min(thinking.left()).min(ends.unwrap_or(usize::MAX));
            return DraftFilter { constraint: None, ends: &self.context.eos, limit }.admit(proposal);
        }
        let constraint = match &self.form.constraint {
            Constrained::No => None,
            Constrained::By(constraint) => Some(constraint.fork()),
            Constrained::Lent => return Draft::default(),
        };
        DraftFilter { constraint, ends: &self.context.eos, limit }.admit(proposal)
    }

    /// Returns the tokens that may not be drawn again after the output, each with its offset from the end of
    /// the output.
    pub fn excluded(&self) -> Vec<(usize, u32)> {
        self.form.checked.as_ref().map_or_else(Vec::new, |checked| checked.excluded_from(self.output().len()))
    }

    /// Counts draft tokens that were computed but not drawn.
    pub fn record_rejected(&mut self, rejected: usize) {
        self.counts.rejected += rejected;
        self.telemetry.record_tokens(TokenKind::Rejected, rejected);
    }

    /// Records the score of the next prompt token. Does nothing unless the request asks for scores.
    pub fn record_score(&mut self, row: RowOutput) {
        let Some(scores) = &mut self.delivery.scores else { return };
        scores.push(logprob(row));
        self.report_scores_if_complete();
    }

    /// Returns whether the sequence only computes its prompt and samples nothing.
    pub fn is_prefill_only(&self) -> bool {
        self.max_tokens == 0
    }

    /// Ends the sequence with `Finished` as its last event. A stop string in the held text takes precedence over
    /// `reason`.
    pub fn finish(mut self, reason: FinishReason) {
        self.report_held();
        let rest = self.delivery.text.finish();
        let reason = rest.stopped.map_or(reason, FinishReason::Stop);
        let now = Instant::now();
        let finished = Finished {
            text_rest: rest.text,
            usage: Usage {
                prompt_tokens: count(self.prompt_len),
                cached_tokens: count(self.counts.cached),
                completion_tokens: count(self.output().len()),
                // Only a chat separates reasoning from text.
                reasoning_tokens: 0,
                forced_tokens: count(self.counts.forced),
                accepted_tokens: count(self.counts.accepted),
                rejected_tokens: count(self.counts.rejected),
                rolled_back_tokens: count(self.rolled_back_tokens()),
                refused_tokens: 0,
                cache_write_tokens: 0,
                prefilled_tokens: count(self.counts.prefilled),
                prefill_ms: u32::try_from(self.times.prefill.as_millis()).unwrap_or(u32::MAX),
            },
            timing: self.times.timing(now),
            tokens: self.output().to_vec(),
            reason,
        };
        let outcome = match finished.reason {
            FinishReason::Eos => Outcome::Eos,
            FinishReason::Stop(_) => Outcome::Stop,
            FinishReason::Length => Outcome::Length,
            FinishReason::ConstraintDone => Outcome::ConstraintDone,
        };
        self.record_end(outcome);
        self.emit(Ok(TokenEvent::Finished(finished)));
    }

    /// Ends the sequence with an error as its last event.
    pub fn fail(mut self, error: EngineError) {
        let outcome = match error {
            EngineError::Cancelled => Outcome::Cancelled,
            EngineError::DeadlineExceeded => Outcome::Deadline,
            EngineError::ShuttingDown => Outcome::Shutdown,
            _ => Outcome::Failed,
        };
        self.record_end(outcome);
        self.emit(Err(error));
    }

    fn report_scores_if_complete(&self) {
        if let Some(scores) = self.delivery.scores.as_ref().filter(|scores| scores.len() == self.prompt_len) {
            self.emit(Ok(TokenEvent::PromptLogprobs(scores.clone())));
        }
    }

    fn rolled_back_tokens(&self) -> usize {
        self.form.checked.as_ref().map_or(0, |checked| checked.rolled_back().tokens as usize)
    }

    fn record_load(&mut self) {
        let pending = self.pending();
        if let Some(load) = &mut self.reservation.load {
            load.set(pending);
        }
    }

    /// Counts that the sequence lost its pages to others and has to be computed again.
    pub fn record_preemption(&self) {
        self.telemetry.record_preemption();
    }

    fn record_end(&mut self, outcome: Outcome) {
        // The load is released before the caller is notified, so that its next request does not meet the load
        // of this one.
        self.reservation.load = None;
        let service = self.times.admitted.map_or(Duration::ZERO, |at| at.elapsed());
        self.telemetry.record_end(outcome, service, self.computed.released_pages);
    }

    fn emit(&self, event: Result<TokenEvent, EngineError>) {
        // The channel has room for everything that a generation can produce. Sending therefore fails only if
        // the receiver is gone, which the next step's check for cancellation handles.
        let _ = self.delivery.events.try_send(event);
    }
}

fn logprob(row: RowOutput) -> Option<TokenLogprob> {
    Some(TokenLogprob { id: row.token, logprob: row.logprob?, top: row.top })
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
