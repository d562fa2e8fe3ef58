//! The metadata and the tensors of a file, under the names that GGUF files of the family have.
//!
//! Invariant: the file has every key and tensor that this crate and llama.cpp require of the family, and no others.

use skep_kernels::DType;

use super::shape::{Attention, Gating, Latent, Shape};
use crate::gguf::header::{NewTensor, boolean, float, string, unsigned};

/// Files have the weight of YaRN's magnitude multiplied by this.
const LOG_MULTIPLIER: f32 = 0.1;

/// A shape, cut to its first layers.
#[derive(Clone, Copy)]
pub(super) struct Content<'a> {
    pub(super) shape: &'a Shape,
    pub(super) layers: usize,
    /// Number of tokens that a sequence may have.
    pub(super) context: usize,
    /// Number of tokens.
    pub(super) vocabulary: usize,
    /// Format of the matrices.
    pub(super) weights: DType,
}

/// A tensor of random values.
pub(super) struct Tensor {
    pub(super) name: String,
    /// Innermost dimension first, as in the file.
    pub(super) dimensions: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) values: Values,
}

/// The distribution of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    /// Small numbers of either sign.
    Weights,
    /// Numbers close to 1.
    Norm,
}

impl Tensor {
    pub(super) fn entry(&self) -> NewTensor<'_> {
        NewTensor { name: &self.name, dimensions: &self.dimensions, dtype: self.dtype }
    }
}

impl Content<'_> {
    /// Returns the name of the family in GGUF files.
    pub(super) fn family(&self) -> &'static str {
        match self.shape.attention {
            Attention::Grouped { .. } => "qwen3moe",
            Attention::Latent(_) => "deepseek2",
        }
    }

    /// Returns the keys of the metadata except for those of the vocabulary, each with its type and value.
    pub(super) fn keys(&self) -> Vec<(String, Vec<u8>)> {
        let Shape { name, hidden, heads, theta, norm_epsilon, experts, .. } = *self.shape;
        let family = self.family();
        let title = format!("{name}, {} layers of random weights", self.layers);
        let mut keys = vec![
            ("general.architecture".to_owned(), string(family)),
            ("general.name".to_owned(), string(&title)),
        ];
        let mut add = |key: &str, value: Vec<u8>| keys.push((format!("{family}.{key}"), value));
        let size = |size: usize| unsigned(size as u32);
        add("vocab_size", size(self.vocabulary));
        add("context_length", size(self.context));
        add("embedding_length", size(hidden));
        add("block_count", size(self.layers));
        add("feed_forward_length", size(self.shape.dense_size));
        add("attention.head_count", size(heads));
        add("attention.layer_norm_rms_epsilon", float(norm_epsilon));
        add("rope.freq_base", float(theta));
        add("expert_count", size(experts.count));
        add("expert_used_count", size(experts.used));
        add("expert_feed_forward_length", size(experts.size));
        match self.shape.attention {
            Attention::Grouped { kv_heads, head_size } => {
                add("attention.head_count_kv", size(kv_heads));
                add("attention.key_length", size(head_size));
                add("attention.value_length", size(head_size));
            }
            Attention::Latent(latent) => {
                add("leading_dense_block_count", size(experts.dense_layers));
                add("expert_shared_count", size(experts.shared));
                add("expert_gating_func", unsigned(if experts.gating == Gating::Softmax { 1 } else { 2 }));
                add("expert_weights_norm", boolean(experts.normalized));
                add("expert_weights_scale", float(experts.scale));
                // All heads share one latent, which files count as one KV head.
                add("attention.head_count_kv", size(1));
                add("attention.key_length", size(latent.rank + latent.rotated));
                add("attention.value_length", size(latent.rank));
                add("attention.key_length_mla", size(latent.unrotated + latent.rotated));
                add("attention.value_length_mla", size(latent.value));
                add("attention.kv_lora_rank", size(latent.rank));
                // llama.cpp requires the key of models that have not as many layers as DeepSeek-V2-Lite.
                add("attention.q_lora_rank", size(latent.query_rank.unwrap_or(0)));
                add("rope.dimension_count", size(latent.rotated));
                if let Some(yarn) = latent.yarn {
                    add("rope.scaling.type", string("yarn"));
                    add("rope.scaling.factor", float(yarn.factor));
                    add("rope.scaling.original_context_length", size(yarn.original_context));
                    let multiplier = LOG_MULTIPLIER * yarn.all_dimensions;
                    add("rope.scaling.yarn_log_multiplier", float(multiplier));
                }
            }
        }
        keys
    }

    /// Returns the tensors in the order of the file.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let hidden = self.shape.hidden;
        let mut tensors = Tensors { weights: self.weights, prefix: String::new(), all: Vec::new() };
        tensors.matrix("token_embd", &[hidden, self.vocabulary]);
        for layer in 0..self.layers {
            tensors.prefix = format!("blk.{layer}.");
            tensors.norm("attn_norm", hidden);
            match self.shape.attention {
                Attention::Grouped { kv_heads, head_size } => {
                    tensors.grouped(self.shape, kv_heads, head_size);
                }
                Attention::Latent(latent) => tensors.latent(self.shape, latent),
            }
            tensors.norm("ffn_norm", hidden);
            match layer < self.shape.experts.dense_layers {
                true => tensors.gated("", hidden, self.shape.dense_size, None),
                false => tensors.experts(self.shape),
            }
        }
        tensors.prefix.clear();
        tensors.norm("output_norm", hidden);
        tensors.matrix("output", &[hidden, self.vocabulary]);
        tensors.all
    }
}

/// Tensors under construction.
struct Tensors {
    weights: DType,
    /// The part of names that those of a layer share.
    prefix: String,
    all: Vec<Tensor>,
}

impl Tensors {
    fn add(&mut self, name: &str, dimensions: &[usize], dtype: DType, values: Values) {
        let name = format!("{}{name}", self.prefix);
        self.all.push(Tensor { name, dimensions: dimensions.to_vec(), dtype, values });
    }

    fn matrix(&mut self, name: &str, dimensions: &[usize]) {
        let dtype = fitting(self.weights, dimensions[0]);
        self.add(&format!("{name}.weight"), dimensions, dtype, Values::Weights);
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.add(&format!("{name}.weight"), &[width], DType::F32, Values::Norm);
    }

    fn grouped(&mut self, shape: &Shape, kv_heads: usize, head_size: usize) {
        let Shape { hidden, heads, .. } = *shape;
        self.matrix("attn_q", &[hidden, heads * head_size]);
        self.matrix("attn_k", &[hidden, kv_heads * head_size]);
        self.matrix("attn_v", &[hidden, kv_heads * head_size]);
        self.norm("attn_q_norm", head_size);
        self.norm("attn_k_norm", head_size);
        self.matrix("attn_output", &[heads * head_size, hidden]);
    }

    fn latent(&mut self, shape: &Shape, latent: Latent) {
        let Shape { hidden, heads, .. } = *shape;
        let Latent { query_rank, rank, unrotated, rotated, value, .. } = latent;
        let queries = heads * (unrotated + rotated);
        match query_rank {
            Some(narrow) => {
                self.matrix("attn_q_a", &[hidden, narrow]);
                self.norm("attn_q_a_norm", narrow);
                self.matrix("attn_q_b", &[narrow, queries]);
            }
            None => self.matrix("attn_q", &[hidden, queries]),
        }
        self.matrix("attn_kv_a_mqa", &[hidden, rank + rotated]);
        self.norm("attn_kv_a_norm", rank);
        self.matrix("attn_k_b", &[unrotated, rank, heads]);
        self.matrix("attn_v_b", &[rank, value, heads]);
        self.matrix("attn_output", &[heads * value, hidden]);
    }

    /// Adds a feed-forward block, or those of all experts.
    fn gated(&mut self, kind: &str, hidden: usize, width: usize, count: Option<usize>) {
        let parts = [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)];
        for (part, rows, columns) in parts {
            let dimensions: Vec<usize> = [columns, rows].into_iter().chain(count).collect();
            self.matrix(&format!("ffn_{part}{kind}"), &dimensions);
        }
    }

    fn experts(&mut self, shape: &Shape) {
        let Shape { hidden, experts, .. } = *shape;
        // Routers are exact in every format.
        self.add("ffn_gate_inp.weight", &[hidden, experts.count], DType::F32, Values::Weights);
        if experts.gating == Gating::Sigmoid {
            self.add("exp_probs_b.bias", &[experts.count], DType::F32, Values::Weights);
        }
        self.gated("_exps", hidden, experts.size, Some(experts.count));
        if experts.shared > 0 {
            self.gated("_shexp", hidden, experts.shared * experts.size, None);
        }
    }
}

/// Returns the format of a matrix: where rows are not whole blocks of 256 values, the format with blocks of 32 that llama.cpp takes
/// there when it quantizes, and else half precision.
fn fitting(wanted: DType, columns: usize) -> DType {
    let smaller = match wanted {
        DType::Q2K | DType::Q3K | DType::Iq4Xs => DType::Iq4Nl,
        DType::Q4K => DType::Q5_0,
        DType::Q5K => DType::Q5_1,
        DType::Q6K => DType::Q8_0,
        other => other,
    };
    let fits = |dtype: &DType| columns.is_multiple_of(dtype.block_len());
    [wanted, smaller].into_iter().find(fits).unwrap_or(DType::F16)
}
