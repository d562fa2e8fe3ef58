//! The operations and the bytes that a step needs at least; its figures are shares of these.

use skep_model::{ExecutorLimits, MemoryPlan, ModelConfig, PAGE_TOKENS};

/// Number of additions and multiplications.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Operations {
    /// In products with weights.
    pub weights: f64,
    /// In products of queries with keys, and of the resulting shares with values.
    pub attention: f64,
}

impl Operations {
    /// Returns all operations, with weights and of attention.
    pub(super) fn total(self) -> f64 {
        self.weights + self.attention
    }

    /// Counts the operations of `rows` tokens that see `seen` tokens together, `heads` of which get logits.
    fn of(config: &ModelConfig, rows: usize, seen: f64, heads: usize) -> Self {
        let (query, kv) = (config.head_count * config.head_size, config.kv_head_count * config.head_size);
        let layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.feed_forward_size);
        let layers = config.layer_count as f64;
        let head = (config.hidden_size * config.vocabulary_size) as f64;
        Operations {
            weights: 2.0 * (layers * layer as f64 * rows as f64 + head * heads as f64),
            attention: layers * 4.0 * query as f64 * seen,
        }
    }

    /// Counts the operations of one sequence's tokens behind `depth` others. Only the last token gets logits.
    pub(super) fn prefill(config: &ModelConfig, depth: usize, tokens: usize) -> Self {
        // Each token multiplies its queries with the keys up to its own.
        Self::of(config, tokens, (depth + 1..=depth + tokens).map(|seen| seen as f64).sum(), 1)
    }

    /// Counts the operations of the middle one of `tokens` decode steps, for `batch` sequences.
    pub(super) fn decode(config: &ModelConfig, depth: usize, tokens: usize, batch: usize) -> Self {
        Self::of(config, batch, batch as f64 * seen(depth, tokens), batch)
    }
}

/// Returns how many tokens a token sees on average, if `tokens` are decoded behind `depth` others.
fn seen(depth: usize, tokens: usize) -> f64 {
    depth as f64 + (tokens as f64 + 1.0) / 2.0
}

/// Returns the bytes that a decode step reads at least: all weights except those that are only looked up, and
/// the keys and values of every sequence, once where sequences share them.
pub(super) fn decode_bytes(
    config: &ModelConfig,
    (plan, limits): (&MemoryPlan, &ExecutorLimits),
    looked_up_bytes: u64,
    (depth, shared, tokens, batch): (usize, usize, usize, usize),
) -> f64 {
    let layer_token = plan.kv_bytes as f64 / (limits.page_count * PAGE_TOKENS * config.layer_count) as f64;
    let seen = seen(depth, tokens);
    let shared = shared.min(depth) as f64;
    let read = |window: &Option<usize>| match window {
        Some(window) => batch as f64 * seen.min(*window as f64),
        None => batch as f64 * (seen - shared) + shared,
    };
    let layers: f64 = config.windows.iter().map(read).sum();
    plan.weight_bytes.saturating_sub(looked_up_bytes) as f64 + layer_token * layers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> ModelConfig {
        ModelConfig::shape("tiny").expect("known")
    }

    #[test]
    fn operations_count_what_each_token_multiplies() {
        let config = tiny();
        let layer = 256 * (2 * 256 + 2 * 128 + 3 * 512);
        let head = 256 * 1024;
        let three = Operations::prefill(&config, 5, 3);
        assert_eq!(three.weights, 2.0 * (2 * layer * 3 + head) as f64);
        assert_eq!(three.attention, (2 * 4 * 256 * (6 + 7 + 8)) as f64);
        let step = Operations::decode(&config, 10, 3, 4);
        assert_eq!(step.weights, 2.0 * ((2 * layer + head) * 4) as f64);
        assert_eq!(step.attention, (2 * 4 * 256 * 4 * 12) as f64, "the middle one of three sees 12");
    }

    #[test]
    fn a_decode_step_reads_all_weights_but_the_embedding_and_the_tokens_in_the_windows() {
        let mut config = tiny();
        let plan = MemoryPlan { weight_bytes: 1000, kv_bytes: 2 * 64 * 16 * 100, ..MemoryPlan::default() };
        let limits = ExecutorLimits {
            max_batch_tokens: 1,
            step_tokens: 1,
            max_logit_rows: 1,
            max_sequences: 1,
            page_count: 64,
            context_length: 1024,
            vocabulary_size: 1024,
        };
        let bytes = |config: &ModelConfig| decode_bytes(config, (&plan, &limits), 400, (99, 0, 1, 3));
        assert_eq!(bytes(&config), 600.0 + 3.0 * 100.0 * (100 + 100) as f64);
        let shared = decode_bytes(&config, (&plan, &limits), 400, (99, 80, 1, 3));
        assert_eq!(shared, 600.0 + 100.0 * 2.0 * (3 * 20 + 80) as f64);
        config.windows[1] = Some(30);
        assert_eq!(bytes(&config), 600.0 + 3.0 * 100.0 * (100 + 30) as f64);
    }
}
