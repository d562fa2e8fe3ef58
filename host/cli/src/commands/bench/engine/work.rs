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
        let (attention, of_seen) = attention(config);
        let layers: usize =
            (0..config.layer_count).map(|layer| attention + feed_forward(config, layer)).sum();
        let head = (config.hidden_size * config.vocabulary_size) as f64;
        Operations {
            weights: 2.0 * (layers as f64 * rows as f64 + head * heads as f64),
            attention: config.layer_count as f64 * 2.0 * of_seen as f64 * seen,
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

/// Returns how many values a token is multiplied with in the attention of a layer: weights, and those of each token that it sees.
fn attention(config: &ModelConfig) -> (usize, usize) {
    let (hidden, heads) = (config.hidden_size, config.head_count);
    let Some(latent) = &config.style.latent else {
        let (query, kv) = (heads * config.head_size, config.kv_head_count * config.head_size);
        return (hidden * (2 * query + 2 * kv), 2 * query);
    };
    let queries = heads * (latent.unrotated + latent.rotated);
    let queries = latent.query_rank.map_or(hidden * queries, |rank| rank * (hidden + queries));
    let latents = hidden * (latent.rank + latent.rotated);
    // Queries are multiplied by the key matrix of their head, and what they attend to by its value matrix.
    let expansion = heads * latent.rank * (latent.unrotated + latent.value);
    let output = hidden * heads * latent.value;
    (queries + latents + expansion + output, heads * (2 * latent.rank + latent.rotated))
}

/// Returns how many weights a token is multiplied with in the feed-forward block of a layer.
fn feed_forward(config: &ModelConfig, layer: usize) -> usize {
    let hidden = config.hidden_size;
    match &config.style.experts {
        Some(experts) if experts.layers.get(layer) == Some(&true) => {
            hidden * (experts.count + 3 * (experts.used * experts.size + experts.shared_size))
        }
        _ => hidden * 3 * config.feed_forward_size,
    }
}

/// Returns the share of the experts that a step of `batch` tokens reads, if tokens are spread evenly over experts.
fn experts_read(config: &ModelConfig, batch: usize) -> f64 {
    config.style.experts.as_ref().map_or(1.0, |experts| {
        let unused_by_one = 1.0 - experts.used as f64 / experts.count as f64;
        1.0 - unused_by_one.powf(batch as f64)
    })
}

/// Returns how many tokens a token sees on average, if `tokens` are decoded behind `depth` others.
fn seen(depth: usize, tokens: usize) -> f64 {
    depth as f64 + (tokens as f64 + 1.0) / 2.0
}

/// Returns the bytes that a decode step reads: all weights except those that are only looked up and those of experts that no
/// token chooses, and the keys and values of every sequence, once where sequences share them.
pub(super) fn decode_bytes(
    config: &ModelConfig,
    (plan, limits): (&MemoryPlan, &ExecutorLimits),
    (looked_up_bytes, expert_bytes): (u64, u64),
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
    let unread = expert_bytes as f64 * (1.0 - experts_read(config, batch));
    let weights = (plan.weight_bytes.saturating_sub(looked_up_bytes) as f64 - unread).max(0.0);
    weights + layer_token * layers
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_model::LayerStyle;
    use skep_model::config::{Expansion, ExpertForm, Experts, Latent, Routing, Score};

    const LIMITS: ExecutorLimits = ExecutorLimits {
        max_batch_tokens: 1,
        step_tokens: 1,
        max_logit_rows: 1,
        max_sequences: 1,
        page_count: 64,
        context_length: 1024,
        vocabulary_size: 1024,
    };

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

    /// Returns a shape whose second layer has 8 experts of width 64, of which a token chooses 2, and one of width 32 for all.
    fn mixture() -> ModelConfig {
        let routing = Routing {
            score: Score::Softmax,
            groups: 1,
            used_groups: 1,
            corrected: false,
            normalized: true,
            scale: 1.0,
        };
        let experts = Experts {
            count: 8,
            used: 2,
            size: 64,
            shared_size: 32,
            layers: vec![false, true],
            routing,
            biased: false,
            form: ExpertForm::Separate,
        };
        ModelConfig { style: LayerStyle { experts: Some(experts), ..LayerStyle::default() }, ..tiny() }
    }

    #[test]
    fn a_token_is_multiplied_with_the_experts_that_it_chooses() {
        let attention = 256 * (2 * 256 + 2 * 128);
        let layers = 2 * attention + 256 * 3 * 512 + 256 * (8 + 3 * (2 * 64 + 32));
        let found = Operations::prefill(&mixture(), 0, 3);
        assert_eq!(found.weights, 2.0 * (layers * 3 + 256 * 1024) as f64);
    }

    #[test]
    fn a_token_is_multiplied_with_latents() {
        let latent = Latent {
            query_rank: Some(48),
            rank: 64,
            unrotated: 32,
            rotated: 16,
            value: 24,
            norm_epsilon: 1e-6,
            expansion: Expansion::Split,
        };
        let mut config = tiny();
        config.style.latent = Some(latent);
        let queries = 48 * (256 + 4 * 48);
        let attention = queries + 256 * 80 + 4 * 64 * (32 + 24) + 256 * 4 * 24;
        let found = Operations::prefill(&config, 5, 1);
        assert_eq!(found.weights, 2.0 * (2 * (attention + 256 * 3 * 512) + 256 * 1024) as f64);
        assert_eq!(found.attention, (2 * 2 * 4 * (2 * 64 + 16) * 6) as f64);
        config.style.latent = Some(Latent { query_rank: None, ..latent });
        let wide = Operations::prefill(&config, 5, 1).weights - found.weights;
        assert_eq!(wide, 2.0 * 2.0 * (256.0 * 192.0 - queries as f64));
    }

    #[test]
    fn a_decode_step_reads_the_experts_that_its_tokens_choose() {
        let config = mixture();
        let plan = MemoryPlan { weight_bytes: 1000, kv_bytes: 2 * 64 * 16, ..MemoryPlan::default() };
        let bytes = |batch: usize| decode_bytes(&config, (&plan, &LIMITS), (400, 320), (0, 0, 1, batch));
        assert_eq!(bytes(1), 600.0 - 320.0 * 6.0 / 8.0 + 2.0);
        assert_eq!(bytes(2), 600.0 - 320.0 * 36.0 / 64.0 + 4.0);
    }

    #[test]
    fn a_decode_step_reads_all_weights_but_the_embedding_and_the_tokens_in_the_windows() {
        let mut config = tiny();
        let plan = MemoryPlan { weight_bytes: 1000, kv_bytes: 2 * 64 * 16 * 100, ..MemoryPlan::default() };
        let bytes = |config: &ModelConfig| decode_bytes(config, (&plan, &LIMITS), (400, 0), (99, 0, 1, 3));
        assert_eq!(bytes(&config), 600.0 + 3.0 * 100.0 * (100 + 100) as f64);
        let shared = decode_bytes(&config, (&plan, &LIMITS), (400, 0), (99, 80, 1, 3));
        assert_eq!(shared, 600.0 + 100.0 * 2.0 * (3 * 20 + 80) as f64);
        config.windows[1] = Some(30);
        assert_eq!(bytes(&config), 600.0 + 3.0 * 100.0 * (100 + 30) as f64);
    }
}
