//! Drafts in a step that is otherwise planned.
//!
//! Drafts get only what no sequence needs otherwise: tokens and logit rows that are left of the step, and pages
//! that are free or evictable. Pages of rejected drafts are freed right after the step, so a draft never makes
//! a sequence wait or be preempted.

use skep_model::PAGE_TOKENS;

use super::{PlannedSequence, Scheduler};
use crate::kv::pages_for;
use crate::sequence::Sequence;
use crate::speculation::{Load, Speculator};

impl Scheduler {
    /// Adds drafts to the sequences that will draw a token in this step.
    pub fn plan_drafts(&mut self, plan: &mut [PlannedSequence], speculator: &mut Speculator) {
        let planned: usize = plan.iter().map(|planned| planned.tokens).sum();
        let mut tokens_left = self.limits.tokens.saturating_sub(planned);
        let mut rows_left = self.limits.logit_rows.saturating_sub(self.logit_rows(plan));
        let drawing =
            plan.iter().filter(|planned| self.sequence(planned.id).is_some_and(|s| draws(s, planned)));
        let prompts = plan.iter().filter(|planned| planned.tokens > 1).map(|planned| planned.tokens).sum();
        let mut load = Load { rows: planned, prompt_rows: prompts, tokens: drawing.count() as f64 };
        for planned in plan {
            let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == planned.id) else {
                continue;
            };
            if !draws(sequence, planned) || !(sequence.is_constrained() || speculator.looks_up()) {
                continue;
            }
            let room = (sequence.computed.pages.pages().len() + self.kv.growable_pages()) * PAGE_TOKENS
                - sequence.tokens.len();
            let draft = speculator.draft(sequence, room.min(tokens_left).min(rows_left), &mut load);
            let count = draft.tokens.len();
            let grown = self.kv.grow(&mut sequence.computed.pages, pages_for(sequence.tokens.len() + count));
            debug_assert!(grown, "a draft is no longer than the available pages allow");
            tokens_left -= count;
            rows_left -= count;
            planned.draft = draft;
        }
    }

    /// Returns the maximum number of logit rows that the step has without drafts.
    fn logit_rows(&self, plan: &[PlannedSequence]) -> usize {
        let scoring = |planned: &PlannedSequence| {
            self.sequence(planned.id).is_some_and(|sequence| sequence.next_scored_row().is_some())
        };
        plan.iter().map(|planned| if scoring(planned) { planned.tokens } else { 1 }).sum()
    }
}

/// Returns whether the step computes all known tokens of the sequence and then draws one.
fn draws(sequence: &Sequence, planned: &PlannedSequence) -> bool {
    planned.tokens == sequence.pending()
        && sequence.next_scored_row().is_none()
        && !sequence.is_prefill_only()
}
