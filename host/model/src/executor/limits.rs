//! The limits of one step, derived from the options and checked before anything is computed.

use super::{CPU_KV_TOKENS, ExecutorLimits, ExecutorOptions, option};
use crate::batch::{Batch, PAGE_TOKENS};
use crate::config::ModelConfig;
use crate::error::ModelError;

/// On the CPU, matrix products are as fast with this many tokens as with more.
const CPU_STEP_TOKENS: usize = 256;

pub(super) fn limits(config: &ModelConfig, options: &ExecutorOptions) -> Result<ExecutorLimits, ModelError> {
    let kv_tokens = options.kv_tokens.unwrap_or(CPU_KV_TOKENS);
    for (name, value) in [
        ("kv_tokens", kv_tokens),
        ("max_batch_tokens", options.max_batch_tokens),
        ("max_logit_rows", options.max_logit_rows),
        ("max_sequences", options.max_sequences),
    ] {
        if value == 0 || value > u32::MAX as usize {
            return Err(option(name, format!("{value} is not between 1 and {}", u32::MAX)));
        }
    }
    Ok(ExecutorLimits {
        max_batch_tokens: options.max_batch_tokens,
        step_tokens: options.max_batch_tokens.min(CPU_STEP_TOKENS),
        max_logit_rows: options.max_logit_rows,
        max_sequences: options.max_sequences,
        page_count: kv_tokens.div_ceil(PAGE_TOKENS),
        context_length: config.context_length,
        vocabulary_size: config.vocabulary_size,
    })
}

/// Rejects a batch that exceeds the limits, before any of it is computed.
pub(super) fn check(batch: &Batch, limits: &ExecutorLimits) -> Result<(), ModelError> {
    for (what, count, limit) in [
        ("tokens", batch.token_count(), limits.max_batch_tokens),
        ("logit rows", batch.logit_rows(), limits.max_logit_rows),
        ("sequences", batch.sequences.len(), limits.max_sequences),
    ] {
        if count > limit {
            return Err(batch_error(format!("{count} {what} in one step; the limit is {limit}")));
        }
    }
    for (index, sequence) in batch.sequences.iter().enumerate() {
        let end = sequence.start.saturating_add(sequence.tokens.len());
        if end > limits.context_length {
            let limit = limits.context_length;
            return Err(batch_error(format!(
                "sequence {index} ends at position {end}, but the context is {limit} tokens"
            )));
        }
        if end > sequence.pages.len().saturating_mul(PAGE_TOKENS) {
            let pages = sequence.pages.len();
            return Err(batch_error(format!(
                "sequence {index} ends at position {end}, beyond its {pages} pages"
            )));
        }
        if let Some(page) = sequence.pages.iter().find(|page| page.0 as usize >= limits.page_count) {
            let count = limits.page_count;
            return Err(batch_error(format!(
                "sequence {index} uses page {}, but there are {count} pages",
                page.0
            )));
        }
        if let Some(token) = sequence.tokens.iter().find(|token| **token as usize >= limits.vocabulary_size) {
            let size = limits.vocabulary_size;
            return Err(batch_error(format!(
                "token {token} of sequence {index} is outside the vocabulary of {size}"
            )));
        }
    }
    Ok(())
}

fn batch_error(problem: String) -> ModelError {
    ModelError::Batch { problem }
}
