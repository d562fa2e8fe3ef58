//! The step that comes next if nothing comes between: every sequence of a step goes on with the one token that it draws.
//! An executor that can begins it before the tokens are known to the host.
//!
//! Invariant: a guess changes no output. It takes a page for each sequence that needs one, which the sequence then has.

use skep_model::{Batch, BatchSequence, LogitsWanted};

use crate::scheduler::{PlannedSequence, Scheduler};
use crate::step::RowUse;

/// Steps without a draft after which none is expected in the next.
const QUIET_STEPS: u32 = 8;

/// Whether the next step can be told from this one.
#[derive(Debug, Default)]
pub(crate) struct Lookahead {
    quiet_steps: u32,
}

impl Lookahead {
    /// Notes what is planned: sequences with drafts may have some in the next step as well.
    pub fn record_plan(&mut self, plan: &[PlannedSequence]) {
        let quiet = plan.iter().all(|planned| planned.draft.tokens.is_empty());
        self.quiet_steps = if quiet { self.quiet_steps.saturating_add(1) } else { 0 };
    }

    /// The step after `batch`, with any tokens.
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
            let pages = scheduler.pages_ahead(used.id).filter(|_| used.draws_freely())?;
            Some(BatchSequence { tokens: vec![0], start, pages, logits: LogitsWanted::Tail(1) })
        });
        Some(Batch { sequences: sequences.collect::<Option<_>>()? })
    }
}
