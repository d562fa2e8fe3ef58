//! The step that is expected next: every sequence of a step continues with the one token that it draws. An
//! executor that supports it starts this step before the host knows the tokens.
//!
//! Invariant: a guess changes no output. It allocates a page for each sequence that needs one, and the sequence
//! keeps that page.

use skep_model::{Batch, BatchSequence, LogitsWanted};

use crate::scheduler::{PlannedSequence, Scheduler};
use crate::step::RowUse;

/// Number of steps without a draft after which none is expected in the next step.
const QUIET_STEPS: u32 = 8;

/// Predicts the next step from the current one.
#[derive(Debug, Default)]
pub(crate) struct Lookahead {
    quiet_steps: u32,
}

impl Lookahead {
    /// Records what is planned: sequences with drafts may have drafts in the next step as well.
    pub fn record_plan(&mut self, plan: &[PlannedSequence]) {
        let quiet = plan.iter().all(|planned| planned.draft.tokens.is_empty());
        self.quiet_steps = if quiet { self.quiet_steps.saturating_add(1) } else { 0 };
    }

    /// Returns the step after `batch`, with placeholder tokens, or `None` if it cannot be predicted.
    pub fn next(
        &self,
        scheduler: &mut Scheduler,
        batch: &Batch,
        uses: &[RowUse],
        speculates: bool,
    ) -> Option<Batch> {
        if speculates && self.quiet_steps < QUIET_STEPS || uses.len() != batch.sequences.len() {
            return None;
        }
        let sequences = uses.iter().zip(&batch.sequences).map(|(used, rows)| {
            let start = rows.start + rows.tokens.len();
            let pages = scheduler.pages_ahead(used.id).filter(|_| used.draws_one_unmasked())?;
            Some(BatchSequence { tokens: vec![0], start, pages, logits: LogitsWanted::Tail(1) })
        });
        Some(Batch { sequences: sequences.collect::<Option<_>>()? })
    }
}
