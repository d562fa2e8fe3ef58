//! The scheduler decides what the next step computes.
//!
//! - Decodes go first, one token each. Prefill chunks fill the rest of the token budget, interactive before
//!   background, divided by weight among those that want more than their share. Alongside decodes, the chunks are
//!   only as large as keeps the step short; as long as there are enough tokens, each prefill gets at least one.
//! - A sequence is admitted only if there are pages for its tokens, for the tokens that admitted sequences
//!   still have to compute, and for a reserve. Admission is in order, so small requests cannot overtake a large
//!   one forever. Only requests that gain by waiting for another's prefill are passed over. While pages are scarce,
//!   sessions whose prompt is cached come before others of their agent, a bounded number of times.
//! - Pages of sequences that wait for the result of a tool are evicted after others, for a bounded time.
//! - Background work is admitted only with room to spare, and makes room for waiting interactive work. Beside
//!   interactive work, it gets only as many tokens of a step as keep the step nearly as short, in turns.
//! - When pages run out, the youngest sequence is preempted: its pages go into the prefix tree, so it finds
//!   them again unless they were needed, and it is the next to be admitted. The oldest sequence can always take
//!   all pages, and no request that would need more is accepted, so there is always progress.
//!
//! The scheduler computes nothing, and only the engine loop's thread touches it.

mod accounts;
mod admission_order;
#[cfg(test)]
mod agent_tests;
mod ahead;
mod continuations;
mod disk;
mod drafts;
mod eviction_order;
mod head_start;
mod lost_pages;
mod prefill_shares;
mod shared_prefill;
mod step_pace;
mod step_plan;
#[cfg(test)]
mod tests;
mod waiting;
#[cfg(test)]
mod weight_tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use skep_model::{PageId, WindowChange, WindowLimits};

use crate::kv::{KvCache, PrefixOwner, SequencePages, pages_for};
use crate::router::ReplicaView;
use crate::sequence::Sequence;
use crate::sequence_id::SequenceId;
use crate::telemetry::Telemetry;
use crate::{Affinity, EngineError, FinishReason, LiveSetting, PageOwner, Priority, TokenMeter, Weights};

use continuations::Continuations;
use disk::DiskView;
pub(crate) use disk::EndedPrefix;
pub(crate) use head_start::HeadStart;
use step_pace::{MIN_CHUNK_TOKENS, StepPace, StepShape};
pub(crate) use step_plan::{PlannedSequence, StepLimits};
use waiting::Waiting;

/// Output tokens that admission reserves pages for, so that a sequence is not admitted only to be preempted.
const RESERVE_TOKENS: usize = 64;
/// The fraction of the pages, as a divisor, that background work leaves to interactive work.
pub(crate) const BACKGROUND_HEADROOM: usize = 8;
/// Maximum rounding error of a sum of shares.
const ROUNDING: f64 = 1e-6;

pub(crate) struct Scheduler {
    limits: StepLimits,
    kv: KvCache,
    waiting: Waiting,
    /// Running sequences in the order of admission.
    running: Vec<Sequence>,
    pace: StepPace,
    /// The position of the next background decode, for when not all of them fit into a step.
    background_turn: usize,
    weights: LiveSetting<Weights>,
    meter: Option<Arc<dyn TokenMeter>>,
    telemetry: Arc<Telemetry>,
    disk: DiskView,
    continuations: Continuations,
    /// Whether requests came or pages were given back since `order_evictions`.
    is_eviction_order_old: bool,
    /// Whether requests came or were admitted, or pages were given back, since `order_admissions`.
    is_admission_order_old: bool,
}

/// A running sequence with tokens to compute before it draws one.
struct Prefill {
    at: usize,
    pending: usize,
    /// Share of the budget of the sequence's class.
    share: f64,
}

impl Prefill {
    /// Returns the number of steps that the prefill would take if it got its share of each, in an arbitrary
    /// unit.
    fn steps(&self) -> f64 {
        self.pending as f64 / self.share
    }
}

/// The result of a sequence.
pub(crate) type Ending = Result<FinishReason, EngineError>;

impl Scheduler {
    /// Creates a scheduler without sequences, whose pages are all free. It reports to the replica's `view`.
    pub fn new(
        limits: StepLimits,
        weights: &LiveSetting<Weights>,
        meter: Option<Arc<dyn TokenMeter>>,
        view: &ReplicaView,
    ) -> Self {
        Scheduler {
            limits,
            kv: KvCache::new(limits.page_count, view.prefixes.clone()),
            waiting: Waiting::new(weights),
            running: Vec::new(),
            pace: StepPace::new(limits.target),
            background_turn: 0,
            weights: weights.clone(),
            meter,
            telemetry: view.telemetry.clone(),
            disk: DiskView::default(),
            continuations: Continuations::new(Instant::now()),
            is_eviction_order_old: false,
            is_admission_order_old: false,
        }
    }

    /// Bounds the pages that keep what layers with a window need, before there are sequences.
    pub fn limit_windows(&mut self, limits: WindowLimits) {
        self.kv.limit_windows(limits);
    }

    /// Returns what the executor has to know of pages before the next step.
    pub fn window_changes(&self) -> &[WindowChange] {
        self.kv.window_changes()
    }

    /// Forgets the changes, because the executor knows them.
    pub fn forget_window_changes(&mut self) {
        self.kv.forget_window_changes();
    }

    /// Adds a sequence to the queue. The bound of the queue was checked before.
    pub fn submit(&mut self, sequence: Sequence) {
        self.end_continuations(&sequence);
        self.waiting.push(sequence);
        self.outdate_orders();
    }

    /// Returns whether there is nothing to compute and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.len() == 0
    }

    /// Returns a running sequence. Waiting ones are not found.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.running.iter().find(|sequence| sequence.id == id)
    }

    /// Returns a running sequence for a change. Waiting ones are not found.
    pub fn sequence_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.running.iter_mut().find(|sequence| sequence.id == id)
    }

    /// Publishes the number of sequences and pages for the router and the metrics.
    pub fn record_load(&self) {
        let (free, cached) = (self.kv.free_in_proportion(), self.kv.cached_pages());
        self.telemetry.record_load(self.running.len(), self.waiting.len(), free, cached);
    }

    /// Returns the owners of the pages: the cached prefixes of each session, and what running sequences hold beside them.
    pub fn page_owners(&self) -> Vec<PageOwner> {
        let cached = self.kv.cached_pages_by_owner().into_iter();
        let cached = cached.map(|(PrefixOwner { tenant, agent, session }, pages)| PageOwner {
            tenant,
            agent,
            session,
            is_running: false,
            pages,
        });
        let running = self.running.iter().map(|sequence| {
            let Affinity { tenant, agent, session, .. } = sequence.request.affinity.clone();
            PageOwner { tenant, agent, session, is_running: true, pages: sequence.computed.pages.own_pages() }
        });
        cached.chain(running).filter(|owner| owner.pages > 0).collect()
    }

    /// Ends sequences whose caller is gone or whose deadline has passed, and gives up waiting for continuations that are
    /// overdue.
    pub fn end_interrupted(&mut self, now: Instant) {
        self.expire_continuations(now);
        for sequence in self.waiting.remove_if(|sequence| sequence.interruption(now).is_some()) {
            let error = sequence.interruption(now).unwrap_or(EngineError::Cancelled);
            self.disk.prefilled.remove(&sequence.id);
            sequence.fail(error);
        }
        let interrupted: Vec<_> =
            self.running.iter().filter_map(|s| Some((s.id, s.interruption(now)?))).collect();
        for (id, error) in interrupted {
            self.end(id, Err(error));
        }
    }

    /// Ends all sequences with an error.
    pub fn abort(&mut self, error: impl Fn() -> EngineError) {
        self.disk.prefilled.clear();
        for sequence in self.waiting.remove_if(|_| true) {
            sequence.fail(error());
        }
        while let Some(id) = self.running.first().map(|sequence| sequence.id) {
            self.end(id, Err(error()));
        }
    }

    /// Admits waiting sequences while there is room.
    pub fn admit(&mut self) {
        loop {
            self.order_admissions();
            let decodes = self.running.iter().filter(|sequence| is_decode(sequence)).count();
            let step_tokens = self.pace.prefill_tokens(decodes, self.limits.tokens - decodes);
            let is_held = |waiting: &Sequence| {
                let mut leaders = self.running.iter();
                self.disk.held.contains(&waiting.id)
                    || leaders.any(|leader| shared_prefill::is_worth_waiting(waiting, leader, step_tokens))
            };
            let Some(next) = self.waiting.next(is_held) else { return };
            let tenant = next.request.affinity.tenant.as_str();
            let mut pages = self.kv.borrow_prefix(tenant, next.reusable_tokens());
            if !self.has_room(next, &pages) {
                self.kv.release(tenant, pages, &[]);
                let makes_room = next.request.priority == Priority::Interactive;
                match self.youngest().filter(|at| makes_room && is_background(&self.running[*at])) {
                    Some(background) => self.preempt(background),
                    None => return,
                }
                continue;
            }
            let id = next.id;
            let Some(mut sequence) = self.waiting.take(id) else { return };
            let computed = self.kv.continue_partial(&mut pages, sequence.reusable_tokens());
            let admitted = self.begin(&mut sequence, pages, computed);
            charge_tokens(&mut sequence, &mut self.waiting, self.meter.as_deref());
            self.running.push(sequence);
            self.is_admission_order_old = true;
            match admitted {
                Ok(None) => {}
                Ok(Some(reason)) => self.end(id, Ok(reason)),
                Err(error) => self.end(id, Err(error)),
            }
        }
    }

    /// Records the duration of the step that was planned last.
    pub fn record_step_time(&mut self, took: Duration) {
        self.pace.end(took);
    }

    /// Plans the next step. The plan is empty only if no sequence runs.
    pub fn plan(&mut self) -> Vec<PlannedSequence> {
        self.order_evictions();
        loop {
            let mut plan = Vec::new();
            let has_interactive = self.running.iter().any(|sequence| !is_background(sequence));
            let mut background = if has_interactive { self.pace.background_tokens() } else { usize::MAX };
            self.plan_decodes(&mut plan, &mut background);
            let decodes = plan.len();
            self.plan_prefills(&mut plan, background);
            if !plan.is_empty() || self.running.is_empty() {
                let prefill_tokens = plan[decodes..].iter().map(|planned| planned.tokens).sum();
                self.pace.begin(StepShape { decodes, prefill_tokens });
                return plan;
            }
            // Only prefills are left, and none of them gets a page.
            self.preempt_youngest(&mut plan);
        }
    }

    /// Marks tokens as computed, shares the pages that they filled, and frees the pages of rejected drafts.
    pub fn computed(&mut self, id: SequenceId, tokens: usize) {
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let sequence = &mut self.running[at];
        sequence.mark_computed(tokens);
        let (settled, next) = (&sequence.tokens[..sequence.settled()], sequence.computed.tokens);
        self.kv.share(&sequence.request.affinity.tenant, &mut sequence.computed.pages, settled, next);
        self.kv.shrink(&mut sequence.computed.pages, pages_for(sequence.tokens.len()));
        charge_tokens(sequence, &mut self.waiting, self.meter.as_deref());
    }

    /// Preempts a sequence that continues before pages that its windows have left, because its end was rolled back: they
    /// are computed again.
    pub fn give_up_left(&mut self, id: SequenceId) {
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let computed = &self.running[at].computed;
        if self.kv.has_left(&computed.pages, computed.tokens) {
            self.preempt(at);
        }
    }

    /// Removes a running sequence, keeps its computed pages for the next turn, and sends its caller the ending.
    pub fn end(&mut self, id: SequenceId, ending: Ending) {
        let Some(at) = self.running.iter().position(|sequence| sequence.id == id) else { return };
        let mut sequence = self.running.remove(at);
        charge_tokens(&mut sequence, &mut self.waiting, self.meter.as_deref());
        self.disk.record_end(&sequence);
        self.expect_continuation(&sequence, &ending);
        self.release_pages(&mut sequence);
        self.disk.forgotten.remove(&id);
        match ending {
            Ok(reason) => sequence.finish(reason),
            Err(error) => sequence.fail(error),
        }
    }

    /// Returns a page whose contents no sequence needs, until the next step.
    pub fn unused_page(&mut self) -> Option<PageId> {
        let mut pages = SequencePages::default();
        let page = self.kv.grow(&mut pages, 1).then(|| pages.pages()[0]);
        self.kv.release("", pages, &[]);
        page
    }

    /// Panics unless every page has exactly one owner. `held` contains the pages that are held for sequences that wait.
    pub fn check_integrity<'a>(&'a self, held: impl Iterator<Item = &'a SequencePages>) {
        self.kv.check_integrity(self.running.iter().map(|sequence| &sequence.computed.pages).chain(held));
    }

    /// Plans the decodes. `background` is the number of tokens for background work; it is reduced by those that
    /// are used.
    fn plan_decodes(&mut self, plan: &mut Vec<PlannedSequence>, background: &mut usize) {
        let decodes = self.running.iter().filter(|sequence| is_decode(sequence));
        let (mut later, mut decodes): (Vec<_>, Vec<_>) =
            decodes.partition(|sequence| is_background(sequence));
        if later.len() > *background {
            let first = self.background_turn % later.len();
            later.rotate_left(first);
            later.truncate(*background);
            self.background_turn = self.background_turn.wrapping_add(later.len());
        }
        *background -= later.len();
        decodes.append(&mut later);
        let decodes: Vec<SequenceId> = decodes.into_iter().map(|sequence| sequence.id).collect();
        for id in decodes {
            // An earlier decode may have preempted this one.
            while let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
                let sequence = &mut self.running[at];
                if self.kv.grow(&mut sequence.computed.pages, pages_for(sequence.tokens.len())) {
                    plan.push(PlannedSequence::new(id, 1));
                    break;
                }
                self.preempt_youngest(plan);
            }
        }
    }

    fn plan_prefills(&mut self, plan: &mut Vec<PlannedSequence>, background: usize) {
        let room = self.limits.tokens - plan.len();
        let mut budget = self.pace.prefill_tokens(plan.len(), room);
        // The tokens that the step may have if they complete a prompt.
        let mut completing = self.pace.completing_tokens(budget, room);
        // Each running sequence has one row for its next token; scored rows come from what is left.
        let mut score_rows = self.limits.logit_rows - self.running.len();
        for class in [Priority::Interactive, Priority::Background] {
            if class == Priority::Background {
                budget = budget.min(background);
                completing = budget;
            }
            let mut prefills = self.prefills(class);
            // Sequences that want less than their share come first and leave the rest of it to the others.
            prefills.sort_by(|one, other| one.steps().total_cmp(&other.steps()));
            let mut unserved = prefills.iter().map(|prefill| prefill.share).sum::<f64>();
            let mut others = prefills.len();
            for Prefill { at, pending, share } in prefills {
                others -= 1;
                let part = (budget as f64 * share / unserved + ROUNDING) as usize;
                let completes = pending <= self.pace.completing_tokens(part, completing);
                let part = if completes { pending } else { part };
                let most = if completes { completing } else { budget };
                let most = most.saturating_sub(others).max(1).min(most);
                unserved -= share;
                let head_start = self.head_start_step(self.running[at].id).unwrap_or(pending);
                let sequence = &mut self.running[at];
                let scoring = sequence.next_scored_row().is_some();
                let mut tokens = pending.min(part.max(MIN_CHUNK_TOKENS)).min(most).min(head_start);
                if scoring {
                    tokens = tokens.min(score_rows + 1);
                }
                let room = sequence.computed.pages.capacity_tokens() - sequence.computed.tokens
                    + self.kv.growable_pages() * skep_model::PAGE_TOKENS;
                tokens = tokens.min(room);
                if tokens == 0
                    || !self
                        .kv
                        .grow(&mut sequence.computed.pages, pages_for(sequence.computed.tokens + tokens))
                {
                    continue;
                }
                completing -= tokens;
                budget = budget.saturating_sub(tokens).max(others.min(completing));
                score_rows -= if scoring { tokens - 1 } else { 0 };
                plan.push(PlannedSequence::new(sequence.id, tokens));
            }
        }
    }

    /// Returns the sequences of one class that have tokens to prefill.
    fn prefills(&self, class: Priority) -> Vec<Prefill> {
        let wanted = |sequence: &Sequence| !is_decode(sequence) && sequence.request.priority == class;
        let sequences = self.running.iter().enumerate().filter(|(_, sequence)| wanted(sequence));
        let shares =
            prefill_shares::shares(&self.weights.now(), sequences.clone().map(|(_, sequence)| sequence));
        let prefills = sequences.zip(shares);
        prefills.map(|((at, sequence), share)| Prefill { at, pending: sequence.pending(), share }).collect()
    }

    fn preempt_youngest(&mut self, plan: &mut Vec<PlannedSequence>) {
        let Some(at) = self.youngest() else { return };
        let id = self.running[at].id;
        if self.running.len() == 1 {
            // Requests that need more than all pages are refused, so this is a defect and not a result of load.
            let message = "the KV cache has no room for the only running sequence".to_string();
            self.end(id, Err(EngineError::Failed(message)));
            return;
        }
        plan.retain(|planned| planned.id != id);
        self.preempt(at);
    }

    /// Returns the sequence to preempt: background before interactive, and the youngest within the class.
    fn youngest(&self) -> Option<usize> {
        (0..self.running.len()).max_by_key(|at| (is_background(&self.running[*at]), self.running[*at].id))
    }

    /// Takes the pages of a running sequence; it is resumed later.
    fn preempt(&mut self, at: usize) {
        let mut sequence = self.running.remove(at);
        tracing::debug!(sequence = sequence.id.0, tokens = sequence.tokens.len(), "preempted");
        sequence.record_preemption();
        self.disk.record_end(&sequence);
        self.release_pages(&mut sequence);
        self.waiting.push_preempted(sequence);
    }

    /// Returns whether a sequence that begins with these pages may run alongside the others.
    fn has_room(&self, next: &Sequence, pages: &SequencePages) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let (kept_slots, kept_pages) = match next.request.priority {
            Priority::Interactive => (0, 0),
            Priority::Background => (1, self.limits.page_count / BACKGROUND_HEADROOM),
        };
        let missing = pages_for(next.tokens.len()) - pages.pages().len();
        let reserve = pages_for(next.tokens_left().min(RESERVE_TOKENS)) + self.running.len();
        let known = pages_for(next.tokens.len() + RESERVE_TOKENS);
        let in_windows = self.kv.pages_in_windows(self.limits.tokens).min(known);
        let in_windows = in_windows.saturating_sub(pages.seen_pages());
        self.running.len() + kept_slots < self.limits.sequences
            && self.kv.has_window_room(in_windows + self.promised_to_windows())
            && missing + reserve + self.promised_pages() + kept_pages <= self.kv.available_pages()
    }

    fn release_pages(&mut self, sequence: &mut Sequence) {
        let computed = sequence.settled();
        let mut pages = sequence.give_up_pages();
        if !self.disk.forgotten.contains(&sequence.id) {
            let owner = PrefixOwner::of(&sequence.request.affinity);
            self.kv.keep_partial(&owner, &mut pages, &sequence.tokens[..computed]);
        }
        self.kv.release(&sequence.request.affinity.tenant, pages, &sequence.tokens[..computed]);
        self.outdate_orders();
        self.settle_owner(sequence.id, &sequence.request.affinity, &sequence.tokens[..computed]);
    }

    /// Records that requests came or pages were given back.
    fn outdate_orders(&mut self) {
        self.is_eviction_order_old = true;
        self.is_admission_order_old = true;
    }

    /// Returns the number of pages that running sequences will still allocate for tokens that are already
    /// known.
    fn promised_pages(&self) -> usize {
        let missing = |s: &Sequence| pages_for(s.tokens.len()).saturating_sub(s.computed.pages.pages().len());
        self.running.iter().map(missing).sum()
    }

    /// Returns the number of pages that windows of running sequences will cover beside those that they cover now.
    fn promised_to_windows(&self) -> usize {
        let most = self.kv.pages_in_windows(1);
        let missing = |s: &Sequence| {
            let known = pages_for(s.tokens.len() + RESERVE_TOKENS);
            most.min(known).saturating_sub(s.computed.pages.seen_pages())
        };
        self.running.iter().map(missing).sum()
    }
}

/// Reports the service that a sequence got since the last report.
fn charge_tokens(sequence: &mut Sequence, waiting: &mut Waiting, meter: Option<&dyn TokenMeter>) {
    let service = sequence.take_service();
    if service.tokens() == 0 {
        return;
    }
    waiting.charge(sequence, service);
    // The host that has asked counts what is computed for it.
    if let Some(meter) = meter.filter(|_| !is_background(sequence) && !sequence.is_for_other_host()) {
        meter.count(&sequence.request.affinity.tenant, service.tokens());
    }
}

fn is_background(sequence: &Sequence) -> bool {
    sequence.request.priority == Priority::Background
}

fn is_decode(sequence: &Sequence) -> bool {
    sequence.pending() == 1 && sequence.next_scored_row().is_none()
}
