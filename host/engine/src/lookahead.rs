//! The step that is expected next. An executor that supports it starts this step before the host knows the tokens of
//! the step under way.
//!
//! A row of the step is used if its sequence continues as expected, whatever happens to the others: sequences that end or
//! are cancelled leave rows behind that nobody asks for, and sequences that arrive join the step after. The masks of a row
//! are computed while the started step runs, as they are for any other step.
//!
//! Invariants:
//! - A guess changes no output. It allocates a page for each sequence that needs one, and the sequence keeps that page.
//! - A page that a started step writes to gets no other owner before the step has been collected (`kv`), even if its
//!   sequence has ended.
//! - No sequence misses two steps in a row: none is started while a sequence that could not join the one under way
//!   cannot join the next one either.

use std::collections::HashSet;

use skep_model::{BatchSequence, StepAhead};

use crate::scheduler::{PlannedSequence, Scheduler};
use crate::sequence_id::SequenceId;
use crate::step::{Course, RowUse, StepRows};
use crate::telemetry::{AheadUse, Telemetry};

/// Number of steps without a draft after which none is expected in the next step. As many steps later, the next step is
/// planned again, because only a plan finds drafts in earlier text.
const QUIET_STEPS: u32 = 8;
/// A step starts ahead without the sequences that have drafts if at least this many times as many others continue.
const CONTINUING_SHARE: usize = 8;

/// Predicts the next step from the current one, and keeps the one that was started.
#[derive(Debug, Default)]
pub(crate) struct Lookahead {
    quiet_steps: u32,
    started: Option<Expected>,
}

/// A step that is expected next, and the sequences of its rows.
#[derive(Debug, Default)]
pub(crate) struct Expected {
    pub step: StepAhead,
    ids: Vec<SequenceId>,
}

impl Expected {
    fn push(&mut self, id: SequenceId, row: BatchSequence) {
        self.ids.push(id);
        self.step.batch.sequences.push(row);
    }

    /// Returns the rows whose sequences have continued as expected, each with its index.
    fn kept<'a>(
        &'a self,
        scheduler: &'a Scheduler,
    ) -> impl Iterator<Item = (usize, SequenceId, &'a BatchSequence)> {
        let rows = self.ids.iter().zip(&self.step.batch.sequences).enumerate();
        rows.map(|(slot, (id, row))| (slot, *id, row))
            .filter(move |(_, id, row)| scheduler.continues_with(*id, row))
    }
}

impl Lookahead {
    /// Records what is planned: sequences with drafts may have drafts in the next step as well.
    pub fn record_plan(&mut self, plan: &[PlannedSequence]) {
        let quiet = plan.iter().all(|planned| planned.draft.tokens.is_empty());
        self.quiet_steps = if quiet { self.quiet_steps.saturating_add(1) } else { 0 };
    }

    /// Returns the step after the one with these `uses`, with placeholders for the tokens that it draws, or `None` if the
    /// next step must wait for a plan.
    pub fn expect(&self, scheduler: &mut Scheduler, uses: &[RowUse], speculates: bool) -> Option<Expected> {
        let is_quiet = self.quiet_steps >= QUIET_STEPS && !self.quiet_steps.is_multiple_of(QUIET_STEPS);
        if speculates && !is_quiet {
            return None;
        }
        let (mut next, mut known) = (Expected::default(), Vec::new());
        let (mut row, mut left_out) = (0, 0);
        for used in uses {
            let first_row = row;
            row += used.row_count();
            match used.course() {
                // The executor reads logits that the next step would overwrite.
                Course::Scores => return None,
                Course::Ends => {}
                Course::ChecksDraft => left_out += 1,
                Course::Computes(tokens) => known.push((used.id, tokens)),
                Course::DrawsOne => {
                    let sequence = scheduler.sequence_mut(used.id)?;
                    if sequence.request.top_logprobs.is_some() {
                        return None;
                    }
                    if sequence.tokens_left() <= 1 {
                        continue;
                    }
                    if sequence.expects_draft() {
                        left_out += 1;
                        continue;
                    }
                    next.push(used.id, scheduler.drawn_ahead(used.id)?);
                    next.step.drawn.push(first_row);
                }
            }
        }
        let decodes = next.ids.len();
        let are_too_few = decodes == 0 || left_out * CONTINUING_SHARE > decodes;
        if are_too_few || scheduler.has_too_much_background(&next.ids) {
            return None;
        }
        let in_step: HashSet<SequenceId> = uses.iter().map(|used| used.id).collect();
        let others = scheduler.running_ids().into_iter().filter(|id| !in_step.contains(id));
        known.extend(others.map(|id| (id, 0)));
        let mut room = scheduler.known_tokens_ahead(decodes);
        for (id, computing) in known {
            if scheduler.sequence_mut(id)?.expects_draft() {
                return None;
            }
            let row = scheduler.known_ahead(id, computing, room)?;
            room -= row.tokens.len();
            next.push(id, row);
        }
        Some(next)
    }

    /// Keeps the step that the executor has started, if it has started one, with the tokens of all rows that were drawn.
    pub fn begin(&mut self, started: Option<Expected>, tokens: &[u32], scheduler: &mut Scheduler) {
        self.started = started.map(|mut started| {
            started.step.fill_in(tokens);
            started
        });
        match &self.started {
            Some(started) => scheduler.begin_ahead(&started.step.batch),
            None => scheduler.end_ahead(),
        }
    }

    /// Discards the started step if none of its sequences has continued as expected.
    pub fn discard_useless(&mut self, scheduler: &mut Scheduler, telemetry: &Telemetry) {
        if let Some(started) = self.started.take_if(|started| started.kept(scheduler).next().is_none()) {
            telemetry.record_ahead(AheadUse { rows: started.ids.len(), kept: 0, is_whole: false });
            scheduler.end_ahead();
        }
    }

    /// Returns the started step as the next one, with the rows whose sequences have continued as expected. Its pages stay
    /// protected until its tokens are drawn.
    pub fn collect(&mut self, scheduler: &mut Scheduler, telemetry: &Telemetry) -> Option<StepRows> {
        let started = self.started.take()?;
        let kept = started.kept(scheduler);
        let (slots, plan): (Vec<_>, Vec<_>) =
            kept.map(|(slot, id, row)| (slot, PlannedSequence::new(id, row.tokens.len()))).unzip();
        let rows = started.ids.len();
        let is_whole = plan.len() == rows && scheduler.running_ids().len() == rows;
        telemetry.record_ahead(AheadUse { rows, kept: plan.len(), is_whole });
        scheduler.begin_step(&plan);
        let StepAhead { batch, .. } = started.step;
        Some(StepRows { plan, batch, slots })
    }
}
