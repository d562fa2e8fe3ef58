//! The bounds of a step, and its plan.

use std::time::Duration;

use skep_model::ExecutorLimits;

use crate::draft::Draft;
use crate::sequence_id::SequenceId;
use crate::{EngineError, EngineOptions};

/// Bounds of a step, from the operator's options and the executor's limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepLimits {
    pub tokens: usize,
    pub sequences: usize,
    pub logit_rows: usize,
    pub page_count: usize,
    /// Maximum duration of a step that computes prompts alongside decodes; `None` derives it from the duration of
    /// decodes alone.
    pub target: Option<Duration>,
}

impl StepLimits {
    /// Derives the limits. Every running sequence can decode in every step, so there are no more of them than
    /// tokens or logit rows.
    pub fn new(options: &EngineOptions, limits: &ExecutorLimits) -> Result<Self, EngineError> {
        let tokens = options.step_tokens.unwrap_or(limits.step_tokens).min(limits.max_batch_tokens);
        let sequences =
            options.max_sequences.min(limits.max_sequences).min(tokens).min(limits.max_logit_rows);
        if sequences == 0 || limits.page_count == 0 {
            let message = format!(
                "max_sequences {}, step_tokens {:?} and the executor's limits {limits:?} leave no room for a sequence",
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

/// The next `tokens` pending tokens of a sequence, and a draft after the last of them. Pages are allocated for
/// all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedSequence {
    pub id: SequenceId,
    pub tokens: usize,
    pub draft: Draft,
}

impl PlannedSequence {
    /// Plans `tokens` tokens without a draft.
    pub fn new(id: SequenceId, tokens: usize) -> Self {
        PlannedSequence { id, tokens, draft: Draft::default() }
    }
}
