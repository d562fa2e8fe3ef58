//! The tensors that a configuration requires, and their shapes.
//!
//! Invariant: after [`check`] succeeds, loading the model finds every weight present, with the right shape,
//! and leaves none unused.

use super::Checkpoint;
use crate::config::ModelConfig;
use crate::error::ModelError;

/// Checks that every weight exists with the right shape, and that no weight of a layer would be left unused.
pub(super) fn check(checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let required = required(checkpoint.config());
    for (name, shape) in &required {
        checkpoint.expect(name, shape)?;
    }
    let names: std::collections::HashSet<&str> = required.iter().map(|(name, _)| name.as_str()).collect();
    for name in checkpoint.tensors.keys() {
        let of_a_layer = name.starts_with("model.layers.") || name.starts_with("blk.");
        // Some old checkpoints include the rotary frequencies, which the configuration also determines.
        if of_a_layer && !names.contains(name.as_str()) && !name.ends_with("rotary_emb.inv_freq") {
            return Err(ModelError::tensor(
                name,
                "is not part of this architecture; the configuration and the weights do not match",
            ));
        }
    }
    Ok(())
}

/// Returns the names and shapes of the required weights.
pub(super) fn required(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let hidden = config.hidden_size;
    let q = config.head_count * config.head_size;
    let kv = config.kv_head_count * config.head_size;
    let wide = config.feed_forward_size;
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![config.vocabulary_size, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !config.tied_head {
        tensors.push(("lm_head.weight".to_owned(), vec![config.vocabulary_size, hidden]));
    }
    let projections = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", wide, hidden, config.mlp_bias),
        ("mlp.up_proj", wide, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, wide, config.mlp_bias),
    ];
    for layer in 0..config.layer_count {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        tensors.push((name("input_layernorm.weight"), vec![hidden]));
        tensors.push((name("post_attention_layernorm.weight"), vec![hidden]));
        if config.qk_norm {
            tensors.push((name("self_attn.q_norm.weight"), vec![config.head_size]));
            tensors.push((name("self_attn.k_norm.weight"), vec![config.head_size]));
        }
        for (part, output, input, bias) in projections {
            tensors.push((name(&format!("{part}.weight")), vec![output, input]));
            if bias {
                tensors.push((name(&format!("{part}.bias")), vec![output]));
            }
        }
    }
    tensors
}
