//! Decides what the next step computes.
//!
//! - Decodes go first, one token each; prefill chunks fill the rest of the token budget, interactive before background,
//!   in equal shares among those that want more than their share.
//! - A sequence is admitted only if there are pages for its tokens, for what those already admitted still have to
//!   compute, and a reserve. Admission is in order: a large request is not overtaken for ever by small ones.
//! - When pages run out, the youngest sequence is preempted: its pages go into the prefix tree, so it finds them again
//!   unless they were needed, and it is the next to be admitted. The oldest sequence can always take all pages, and no
//!   request is accepted that would need more, so there is always progress.
//!
//! It computes nothing, and only the engine loop's thread touches it.

mod drafts;
mod step_plan;
mod waiting;

use std::sync::Arc;
use std::time::Instant;

use skep_model::PageId;

use crate::kv::{KvCache, SequencePages, pages_for};
use crate::router::ReplicaView;
use crate::sequence::{Sequence, SequenceId};
use crate::telemetry::Telemetry;
use crate::{EngineError, FinishReason, Priority};

pub(crate) use step_plan::{PlannedSequence, StepLimits};
use waiting::Waiting;

/// Output tokens that admission keeps room for, so that a sequence is not admitted only to be preempted.
const RESERVE_TOKENS: usize = 64;
/// A prefill chunk is not cut smaller than this to share the budget.
const MIN_CHUNK_TOKENS: usize = 16;

pub(crate) struct Scheduler {
    limits: StepLimits,
    kv: KvCache,
    waiting: Waiting,
    /// In the order of admission.
    running: Vec<Sequence>,
    telemetry: Arc<Telemetry>,
}

/// How a sequence ended.
pub(crate) type Ending = Result<FinishReason, EngineError>;

impl Scheduler {
    pub fn new(limits: StepLimits, view: &ReplicaView) -> Self {
        let kv = KvCache::new(limits.page_count, view.prefixes.clone());
        let telemetry = view.telemetry.clone();
        Scheduler { limits, kv, waiting: Waiting::default(), running: Vec::new(), telemetry }
    }

    pub fn submit(&mut self, sequence: Sequence) {
        self.waiting.push(sequence);
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.len() == 0
    }

    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.running.iter().find(|sequence| sequence.id == id)
    }

    pub fn sequence_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.running.iter_mut().find(|sequence| sequence.id == id)
    }

    pub fn record_load(&self) {
        let (free, cached) = (self.kv.available_pages(), self.kv.cached_pages());
        self.telemetry.record_load(self.running.len(), self.waiting.len(), free, cached);
    }

    /// Ends sequences whose caller is gone or whose deadline has passed.
    pub fn end_interrupted(&mut self, now: Instant) {
        for sequence in self.waiting.remove_if(|sequence| sequence.interruption(now).is_some()) {
            let error = sequence.interruption(now).unwrap_or(EngineError::Cancelled);
            sequence.fail(error);
        }
        let interrupted: Vec<_> =
            self.running.iter().filter_map(|s| Some((s.id, s.interruption(now)?))).collect();
        for (id, error) in interrupted {
            self.end(id, Err(error));
        }
    }

    /// Ends everything.
    pub fn abort(&mut self, error: impl Fn() -> EngineError) {
        for sequence in self.waiting.remove_if(|_| true) {
            sequence.fail(error());
        }
        while let Some(id) = self.running.first().map(|sequence| sequence.id) {
            self.end(id, Err(error()));
        }
    }

    /// Lets waiting sequences run while there is room.
    pub fn admit(&mut self) {
        while self.running.len() < self.limits.sequences {
            let Some(next) = self.waiting.peek() else { return };
            let tenant = next.request.affinity.tenant.as_str();
            let pages = self.kv.borrow_prefix(tenant, next.reusable_tokens());
            let missing = pages_for(next.tokens.len()) - pages.pages().len();
            let reserve = pages_for(next.tokens_left().min(RESERVE_TOKENS)) + self.running.len();
            if !self.running.is_empty()
                && missing + reserve + self.promised_pages() > self.kv.available_pages()
            {
                self.kv.release(tenant, pages, &[]);
                return;
            }
            let Some(mut sequence) = self.waiting.pop() else { return };
            let admitted = sequence.admit(pages);
            let id = sequence.id;
            self.running.push(sequence);
            match admitted {
                Ok(None) => {}
                Ok(Some(reason)) => self.end(id, Ok(reason)),
                Err(error) => self.end(id, Err(error)),
            }
        }
    }

    /// The next step. Empty only if nothing runs.
    pub fn plan(&mut self) -> Vec<PlannedSequence> {
        loop {
            let mut plan = Vec::new();
            self.plan_decodes(&mut plan);
            self.plan_prefills(&mut plan);
            if !plan.is_empty() || self.running.is_empty() {
                return plan;
            }
            // Only prefills are left and none gets a page.
            self.preempt_youngest(&mut plan);
        }
    }

    /// Marks tokens as computed, shares the pages that they filled and takes back those of drafts that came to nothing.
    pub fn computed(&mut self, id: SequenceId, tokens: usize) {
        let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == id) else { return };
        sequence.mark_computed(tokens);
        let computed = &sequence.tokens[..sequence.computed];
        self.kv.share(&sequence.request.affinity.tenant, &mut sequence.pages, computed);
        self.kv.shrink(&mut sequence.pages, pages_for(sequence.tokens.len()));
    }

    /// Takes a running sequence out, keeps its computed pages for the next turn, and tells its caller.
    pub fn end(&mut self, id: SequenceId, ending: Ending) {
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.running.remove(at);
        self.release_pages(&mut sequence);
        match ending {
            Ok(reason) => sequence.finish(reason),
            Err(error) => sequence.fail(error),
        }
    }

    /// A page whose contents nobody needs, until the next step.
    pub fn unused_page(&mut self) -> Option<PageId> {
        let mut pages = SequencePages::default();
        let page = self.kv.grow(&mut pages, 1).then(|| pages.pages()[0]);
        self.kv.release("", pages, &[]);
        page
    }

    /// Panics unless every page has exactly one owner.
    pub fn check_integrity(&self) {
        self.kv.check_integrity(self.running.iter().map(|sequence| &sequence.pages));
    }

    fn plan_decodes(&mut self, plan: &mut Vec<PlannedSequence>) {
        let decodes: Vec<SequenceId> =
            self.running.iter().filter(|s| is_decode(s)).map(|sequence| sequence.id).collect();
        for id in decodes {
            // An earlier decode may have preempted this one.
            while let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
                let sequence = &mut self.running[at];
                if self.kv.grow(&mut sequence.pages, pages_for(sequence.tokens.len())) {
                    plan.push(PlannedSequence::new(id, 1));
                    break;
                }
                self.preempt_youngest(plan);
            }
        }
    }

    fn plan_prefills(&mut self, plan: &mut Vec<PlannedSequence>) {
        let mut budget = self.limits.tokens - plan.len();
        // Each running sequence has one row for its next token; scored rows come from what is left.
        let mut score_rows = self.limits.logit_rows - self.running.len();
        for class in [Priority::Interactive, Priority::Background] {
            let mut prefills: Vec<(usize, usize)> = (0..self.running.len())
                .filter(|at| !is_decode(&self.running[*at]))
                .filter(|at| self.running[*at].request.priority == class)
                .map(|at| (self.running[at].pending(), at))
                .collect();
            prefills.sort_unstable();
            let mut left = prefills.len();
            for (pending, at) in prefills {
                let share = (budget / left).max(MIN_CHUNK_TOKENS).min(budget);
                left -= 1;
                let sequence = &mut self.running[at];
                let scoring = sequence.next_scored_row().is_some();
                let mut tokens = pending.min(share);
                if scoring {
                    tokens = tokens.min(score_rows + 1);
                }
                let room = sequence.pages.capacity_tokens() - sequence.computed
                    + self.kv.available_pages() * skep_model::PAGE_TOKENS;
                tokens = tokens.min(room);
                if tokens == 0 || !self.kv.grow(&mut sequence.pages, pages_for(sequence.computed + tokens)) {
                    continue;
                }
                budget -= tokens;
                score_rows -= if scoring { tokens - 1 } else { 0 };
                plan.push(PlannedSequence::new(sequence.id, tokens));
            }
        }
    }

    /// Background before interactive, the youngest of them.
    fn preempt_youngest(&mut self, plan: &mut Vec<PlannedSequence>) {
        let youngest = (0..self.running.len()).max_by_key(|at| {
            (self.running[*at].request.priority == Priority::Background, self.running[*at].id)
        });
        let Some(at) = youngest else { return };
        if self.running.len() == 1 {
            // Requests that need more than all pages are refused, so this is a defect, not load.
            let message = "the KV cache has no room for the only sequence that runs".to_string();
            self.end(self.running[at].id, Err(EngineError::Failed(message)));
            return;
        }
        let mut sequence = self.running.remove(at);
        tracing::debug!(sequence = sequence.id.0, tokens = sequence.tokens.len(), "preempted");
        sequence.record_preemption();
        plan.retain(|planned| planned.id != sequence.id);
        self.release_pages(&mut sequence);
        self.waiting.push_preempted(sequence);
    }

    fn release_pages(&mut self, sequence: &mut Sequence) {
        let computed = sequence.computed;
        let pages = sequence.give_up_pages();
        self.kv.release(&sequence.request.affinity.tenant, pages, &sequence.tokens[..computed]);
    }

    /// Pages that running sequences will still allocate for tokens which are known already.
    fn promised_pages(&self) -> usize {
        let missing = |s: &Sequence| pages_for(s.tokens.len()).saturating_sub(s.pages.pages().len());
        self.running.iter().map(missing).sum()
    }
}

fn is_decode(sequence: &Sequence) -> bool {
    sequence.pending() == 1 && sequence.next_scored_row().is_none()
}
