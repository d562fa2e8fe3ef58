//! The tensors that a configuration requires, and their shapes.
//!
//! Invariant: after [`check`] succeeds, loading the model finds every weight present, with the right shape,
//! and leaves none unused.

use super::Checkpoint;
use crate::config::{Expansion, ExpertForm, Experts, Latent, ModelConfig};
use crate::error::ModelError;

/// Maximum number of layers that predict further tokens, behind the layers of a model with experts.
const MAX_DRAFT_LAYERS: usize = 8;

/// Checks that every weight exists with the right shape, and that no weight of a layer would be left unused.
pub(super) fn check(checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let config = checkpoint.config();
    // A configuration may describe far more weights than the files have, so they are looked for one layer after another.
    let mut names = std::collections::HashSet::new();
    for (name, shape) in required(config) {
        checkpoint.expect(&name, &shape)?;
        names.insert(name);
    }
    let layers = config.layer_count;
    let drafts = match config.style.experts {
        Some(_) => layers..layers + MAX_DRAFT_LAYERS,
        None => 0..0,
    };
    let is_draft = |rest: &str| {
        let layer = rest.split_once('.').and_then(|(layer, _)| layer.parse::<usize>().ok());
        layer.is_some_and(|layer| drafts.contains(&layer))
    };
    for name in checkpoint.tensors.keys() {
        let of_a_layer = match name.strip_prefix("model.layers.") {
            // Layers behind the last one predict further tokens and are not loaded.
            Some(rest) => !is_draft(rest),
            None => name.strip_prefix("blk.").is_some_and(|rest| !is_draft(rest)),
        };
        // Some old checkpoints include the rotary frequencies, which the configuration also determines.
        if of_a_layer && !names.contains(name) && !name.ends_with("rotary_emb.inv_freq") {
            return Err(ModelError::tensor(
                name,
                "is not part of this architecture; the configuration and the weights do not match",
            ));
        }
    }
    Ok(())
}

/// A name and a shape.
pub(super) type Weight = (String, Vec<usize>);

/// Returns the names and shapes of the required weights, which are made layer by layer.
pub(super) fn required(config: &ModelConfig) -> impl Iterator<Item = Weight> {
    let layers = (0..config.layer_count).flat_map(|layer| of_layer(config, layer));
    outside_layers(config).into_iter().chain(layers)
}

fn outside_layers(config: &ModelConfig) -> Vec<Weight> {
    let hidden = config.hidden_size;
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![config.vocabulary_size, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !config.tied_head {
        tensors.push(("lm_head.weight".to_owned(), vec![config.vocabulary_size, hidden]));
    }
    tensors
}

fn of_layer(config: &ModelConfig, layer: usize) -> Vec<Weight> {
    let (hidden, mut tensors) = (config.hidden_size, Vec::new());
    let mut weights = Required { prefix: format!("model.layers.{layer}"), tensors: &mut tensors };
    weights.norms(config);
    match &config.style.latent {
        Some(latent) => weights.latent_attention(config, latent),
        None => weights.attention(config),
    }
    match config.style.experts_of(layer) {
        Some(experts) => weights.experts(hidden, experts),
        None => weights.gated("mlp", config.feed_forward_size, hidden, config.mlp_bias),
    }
    tensors
}

/// The weights of one layer.
struct Required<'a> {
    prefix: String,
    tensors: &'a mut Vec<Weight>,
}

impl Required<'_> {
    fn tensor(&mut self, name: &str, shape: &[usize]) {
        self.tensors.push((format!("{}.{name}", self.prefix), shape.to_vec()));
    }

    fn matrix(&mut self, part: &str, shape: [usize; 2], bias: bool) {
        self.tensor(&format!("{part}.weight"), &shape);
        if bias {
            self.tensor(&format!("{part}.bias"), &shape[..1]);
        }
    }

    fn norms(&mut self, config: &ModelConfig) {
        self.tensor("input_layernorm.weight", &[config.hidden_size]);
        self.tensor("post_attention_layernorm.weight", &[config.hidden_size]);
        if config.style.norms.follow_parts() {
            self.tensor("pre_feedforward_layernorm.weight", &[config.hidden_size]);
            self.tensor("post_feedforward_layernorm.weight", &[config.hidden_size]);
        }
    }

    fn attention(&mut self, config: &ModelConfig) {
        let (hidden, size) = (config.hidden_size, config.head_size);
        let (query, kv) = (config.head_count * size, config.kv_head_count * size);
        if config.qk_norm {
            self.tensor("self_attn.q_norm.weight", &[size]);
            self.tensor("self_attn.k_norm.weight", &[size]);
        }
        if config.style.sinks {
            self.tensor("self_attn.sinks", &[config.head_count]);
        }
        self.matrix("self_attn.q_proj", [query, hidden], config.qkv_bias);
        self.matrix("self_attn.k_proj", [kv, hidden], config.qkv_bias);
        self.matrix("self_attn.v_proj", [kv, hidden], config.qkv_bias);
        self.matrix("self_attn.o_proj", [hidden, query], config.output_bias);
    }

    fn latent_attention(&mut self, config: &ModelConfig, latent: &Latent) {
        let (hidden, heads) = (config.hidden_size, config.head_count);
        let queries = heads * latent.head_size();
        match latent.query_rank {
            Some(rank) => {
                self.matrix("self_attn.q_a_proj", [rank, hidden], false);
                self.tensor("self_attn.q_a_layernorm.weight", &[rank]);
                self.matrix("self_attn.q_b_proj", [queries, rank], false);
            }
            None => self.matrix("self_attn.q_proj", [queries, hidden], false),
        }
        self.matrix("self_attn.kv_a_proj_with_mqa", [latent.rank + latent.rotated, hidden], false);
        self.tensor("self_attn.kv_a_layernorm.weight", &[latent.rank]);
        match latent.expansion {
            Expansion::Joined => {
                let expanded = heads * (latent.unrotated + latent.value);
                self.matrix("self_attn.kv_b_proj", [expanded, latent.rank], false);
            }
            Expansion::Split => {
                self.tensor("self_attn.k_b_proj.weight", &[heads, latent.rank, latent.unrotated]);
                self.tensor("self_attn.v_b_proj.weight", &[heads, latent.value, latent.rank]);
            }
        }
        self.matrix("self_attn.o_proj", [hidden, heads * latent.value], false);
    }

    fn gated(&mut self, module: &str, width: usize, hidden: usize, bias: bool) {
        self.matrix(&format!("{module}.gate_proj"), [width, hidden], bias);
        self.matrix(&format!("{module}.up_proj"), [width, hidden], bias);
        self.matrix(&format!("{module}.down_proj"), [hidden, width], bias);
    }

    fn experts(&mut self, hidden: usize, experts: &Experts) {
        let Experts { count, size, shared_size, routing, biased, form, .. } = experts;
        let (count, size, module) = (*count, *size, form.module());
        let router = format!("{module}.{}", form.router());
        self.matrix(&router, [count, hidden], *biased);
        if routing.corrected {
            self.tensor(&format!("{router}.e_score_correction_bias"), &[count]);
        }
        if *form == ExpertForm::Interleaved {
            let experts = format!("{module}.experts");
            self.tensor(&format!("{experts}.gate_up_proj"), &[count, hidden, 2 * size]);
            self.tensor(&format!("{experts}.gate_up_proj_bias"), &[count, 2 * size]);
            self.tensor(&format!("{experts}.down_proj"), &[count, size, hidden]);
            self.tensor(&format!("{experts}.down_proj_bias"), &[count, hidden]);
        } else {
            let [gate, up, down] = form.projections();
            for expert in 0..count {
                let name = |part: &str| format!("{module}.experts.{expert}.{part}");
                let own_bias = *biased && *form != ExpertForm::InterleavedRows;
                self.matrix(&name(gate), [size, hidden], own_bias);
                self.matrix(&name(up), [size, hidden], own_bias);
                self.matrix(&name(down), [hidden, size], own_bias);
            }
            if *form == ExpertForm::InterleavedRows {
                let experts = format!("{module}.experts");
                self.tensor(&format!("{experts}.gate_up_proj_bias"), &[count, 2 * size]);
                self.tensor(&format!("{experts}.down_proj_bias"), &[count, hidden]);
            }
        }
        if *shared_size > 0 {
            self.gated(&format!("{module}.shared_experts"), *shared_size, hidden, false);
        }
    }
}
