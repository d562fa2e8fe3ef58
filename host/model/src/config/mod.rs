//! The configuration of a model: the one description that the forward pass, the KV cache and the memory planner
//! share.
//!
//! Invariant: every `ModelConfig` that this module returns is checked: sizes are non-zero and bounded, head counts
//! divide, floats are finite. Apart from its rotary pairing, it does not depend on the file format that it came from.

mod architecture;
mod coding;
mod family;
mod gguf;
mod gguf_style;
mod huggingface;
#[cfg(test)]
mod published_tests;
mod rope;
mod shapes;
mod style;

pub use architecture::Architecture;
#[cfg(test)]
pub(crate) use coding::CODINGS;
pub(crate) use coding::{Fp8Coding, Int4Coding, IntegerPacking, WeightCoding};
pub(crate) use family::usual_size;
pub(crate) use gguf::from_gguf;
pub(crate) use huggingface::{HuggingFaceFiles, Keys, brief, from_huggingface, token_text};
pub use rope::{Rope, RopePairing, RopeScaling};
pub use style::{Expansion, ExpertForm, Experts, GateKind, Latent, LayerStyle, Norms, Routing, Score};
pub(crate) use style::{MAX_EXPERTS, MAX_USED};

use crate::error::ModelError;

/// A checked description of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: Architecture,
    pub hidden_size: usize,
    pub layer_count: usize,
    pub head_count: usize,
    pub kv_head_count: usize,
    /// Width of one attention head, which may differ from `hidden_size / head_count`.
    pub head_size: usize,
    pub feed_forward_size: usize,
    pub vocabulary_size: usize,
    /// Maximum number of tokens that the model is designed for.
    pub context_length: usize,
    pub norm_epsilon: f32,
    pub rope: Rope,
    /// The sliding window of each layer: position `p` attends to `(p - window, p]`. With `None`, it attends to
    /// everything before it.
    pub windows: Vec<Option<usize>>,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// Whether an RMS norm is applied to each head of q and k before the rotation.
    pub qk_norm: bool,
    /// The parts in which the layers differ from Llama's.
    pub style: LayerStyle,
    /// Whether the output head is the embedding.
    pub tied_head: bool,
    pub bos: Option<u32>,
    /// Every token id that ends a generation, including end-of-turn tokens.
    pub eos: Vec<u32>,
    /// Whether the tokenizer puts `bos` before a plain prompt.
    pub add_bos: bool,
}

const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1024;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_SIZE: usize = 1 << 12;
const MAX_VOCABULARY: usize = 1 << 22;
pub(crate) const MAX_CONTEXT: usize = 1 << 24;

impl ModelConfig {
    /// Returns the number of values of each head that rotate.
    pub fn rotated(&self) -> usize {
        match &self.style.latent {
            Some(latent) => latent.rotated,
            None => self.style.rotated.unwrap_or(self.head_size),
        }
    }

    /// Returns the factor of the attention scores.
    pub(crate) fn attention_scale(&self) -> f32 {
        self.style.attention_scale.unwrap_or(1.0 / (self.head_size as f32).sqrt())
    }

    /// Checks every size against its limits and against the other sizes.
    pub(crate) fn check(self) -> Result<Self, ModelError> {
        let bounds = [
            ("hidden_size", self.hidden_size, MAX_WIDTH),
            ("num_hidden_layers", self.layer_count, MAX_LAYERS),
            ("num_attention_heads", self.head_count, MAX_HEADS),
            ("num_key_value_heads", self.kv_head_count, MAX_HEADS),
            ("head_dim", self.head_size, MAX_HEAD_SIZE),
            ("intermediate_size", self.feed_forward_size, MAX_WIDTH),
            ("vocab_size", self.vocabulary_size, MAX_VOCABULARY),
            ("max_position_embeddings", self.context_length, MAX_CONTEXT),
        ];
        for (key, value, limit) in bounds {
            if value == 0 || value > limit {
                return Err(ModelError::config(key, format!("{value} is outside 1..={limit}")));
            }
        }
        if !self.head_count.is_multiple_of(self.kv_head_count) {
            return Err(ModelError::config(
                "num_key_value_heads",
                format!("{} does not divide the {} attention heads", self.kv_head_count, self.head_count),
            ));
        }
        if !self.head_size.is_multiple_of(2) {
            return Err(ModelError::config(
                "head_dim",
                format!("{} is odd; rotation needs pairs of values", self.head_size),
            ));
        }
        if !(self.norm_epsilon.is_finite() && (0.0..=1.0).contains(&self.norm_epsilon)) {
            return Err(ModelError::config(
                "rms_norm_eps",
                format!("{} is outside 0..=1", self.norm_epsilon),
            ));
        }
        self.style.check(self.head_size, self.layer_count)?;
        self.rope.check(self.rotated())?;
        if self.windows.len() != self.layer_count || self.windows.contains(&Some(0)) {
            return Err(ModelError::config(
                "sliding_window",
                "must be positive, with one entry for each layer",
            ));
        }
        for id in self.bos.iter().chain(&self.eos) {
            if *id as usize >= self.vocabulary_size {
                return Err(ModelError::config(
                    "eos_token_id / bos_token_id",
                    format!("token id {id} is not below vocab_size {}", self.vocabulary_size),
                ));
            }
        }
        Ok(self)
    }
}

/// Texts of control tokens that end a turn or a document in the chat formats of the supported families. A token ends
/// a generation only if its vocabulary also marks it as a control token.
const END_OF_GENERATION: [&str; 8] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
];

/// Texts of the control tokens that end a generation in harmony, the format of gpt-oss. There, `<|end|>` ends a message,
/// and an answer has several: the message with the reasoning comes before the message with the text.
const END_IN_HARMONY: [&str; 3] = ["<|return|>", "<|call|>", "<|endoftext|>"];
const END_OF_HARMONY_MESSAGE: &str = "<|end|>";

/// Returns the tokens that end a generation, sorted: those that the model's files name, and those of the `control` tokens
/// of its vocabulary (each a text with its id) whose texts are known.
pub(crate) fn end_tokens<'a>(
    mut named: Vec<u32>,
    control: impl Iterator<Item = (&'a str, u32)> + Clone,
) -> Vec<u32> {
    let has = |wanted: &str| control.clone().any(|(text, _)| text == wanted);
    let is_harmony = ["<|return|>", "<|channel|>", "<|message|>"].into_iter().all(has);
    let known = if is_harmony { &END_IN_HARMONY[..] } else { &END_OF_GENERATION[..] };
    named.extend(control.clone().filter(|(text, _)| known.contains(text)).map(|(_, id)| id));
    if is_harmony {
        // Some converters of files name it as the end of a turn.
        named.retain(|end| !control.clone().any(|(text, id)| id == *end && text == END_OF_HARMONY_MESSAGE));
    }
    named.sort_unstable();
    named.dedup();
    named
}
