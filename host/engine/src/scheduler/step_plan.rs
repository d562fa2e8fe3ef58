//! What one step may hold and what it will hold.

use std::time::Duration;

use skep_model::ExecutorLimits;

use crate::sequence::SequenceId;
use crate::speculation::Draft;
use crate::{EngineError, EngineOptions};

/// Bounds of a step, from the operator's options and the executor's limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLimits {
    pub tokens: usize,
    pub sequences: usize,
    pub logit_rows: usize,
    pub page_count: usize,
    /// The longest step in which prompts are computed beside decodes; `None`: by what decodes alone take.
    pub target: Option<Duration>,
}

impl StepLimits {
    /// Every running sequence can decode in every step, so there are no more of them than tokens or logit rows.
    pub fn new(options: &EngineOptions, limits: &ExecutorLimits) -> Result<Self, EngineError> {
        let tokens = options.step_tokens.unwrap_or(limits.step_tokens).min(limits.max_batch_tokens);
        let sequences =
            options.max_sequences.min(limits.max_sequences).min(tokens).min(limits.max_logit_rows);
        if sequences == 0 || limits.page_count == 0 {
            let message = format!(
                "max_sequences {}, step_tokens {:?} and the executor's limits {limits:?} leave room for no sequence",
                options.max_sequences, options.step_tokens
            );
            return Err(EngineError::invalid("max_sequences", message));
        }
        Ok(StepLimits {
            tokens,
            sequences,
            logit_rows: limits.max_logit_rows,
            page_count: limits.page_count,
            target: options.step_target,
        })
    }
}

/// The next `tokens` pending tokens of a sequence and a draft behind the last of them. Pages have been allocated for
/// all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedSequence {
    pub id: SequenceId,
    pub tokens: usize,
    pub draft: Draft,
}

impl PlannedSequence {
    pub fn new(id: SequenceId, tokens: usize) -> Self {
        PlannedSequence { id, tokens, draft: Draft::default() }
    }
}
