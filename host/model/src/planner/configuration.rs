//! Reads a [`Description`] from the text of a config.json.
//!
//! Invariant: a family, a quantization or a size that is not understood is an error that names the key. The weights
//! are listed by the names that they have in checkpoints, because quantizations select them by name.

use serde_json::Value;
use skep_kernels::DType;

use super::description::{AttentionShape, Description, LayerShape, ModelPart, Split, Weight};
use super::experts::{Moe, is_windowed};
use super::family::Family;
use super::quantization::{Module, Quantization};
use super::storage::Storage;
use super::vision;
use crate::checkpoint::{Checkpoint, fp8_format};
use crate::config::{HuggingFaceFiles, Keys, WeightCoding, from_huggingface, usual_size};
use crate::error::ModelError;

/// Maximum size of a config.json in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1024;
const MAX_HEADS: usize = 1 << 12;
const MAX_VOCABULARY: usize = 1 << 22;
const MAX_CONTEXT: usize = 1 << 26;
/// Ranks divide rows in runs of this many values at least, because kernels load that many at once.
const RUN: u64 = 8;

impl Description {
    /// Reads the description of a model from its config.json.
    pub fn from_config(text: &[u8]) -> Result<Self, ModelError> {
        let config: Value = serde_json::from_slice(text)
            .map_err(|error| ModelError::config("config.json", format!("is not JSON: {error}")))?;
        let outer = Keys::of(&config, "")?;
        let (language, prefix) = match outer.get("text_config") {
            Some(text) => (text, "text_config."),
            None => (&config, ""),
        };
        let keys = Keys::of(language, prefix)?;
        let missing = || ModelError::config("model_type", "is missing");
        let outer_type = outer.string("model_type")?;
        let inner_type = keys.string("model_type")?;
        // A wrapper has a name of its own; the family is that of the text part, unless only the wrapper is known.
        let family = match (inner_type, outer_type) {
            (Some(inner), Some(outer)) => Family::find(inner).or_else(|_| Family::find(outer))?,
            (Some(name), None) | (None, Some(name)) => Family::find(name)?,
            (None, None) => return Err(missing()),
        };
        let shape = Shape::read(&keys, &outer, family)?;
        let mut reader = Reader {
            shape,
            // Quantizers write names inside the part of the model that their key is in.
            prefix: match (prefix, keys.get("quantization_config")) {
                ("", _) | (_, Some(_)) => "",
                (_, None) => "language_model.",
            },
            quantization: keys
                .get("quantization_config")
                .or(outer.get("quantization_config"))
                .or(keys.get("compression_config"))
                .map(Quantization::read)
                .transpose()?,
            plain: plain(&keys, &outer)?,
            family,
            keys,
            weights: Vec::new(),
            layers: Vec::new(),
        };
        reader.text()?;
        let runnable = reader.runnable(&config);
        let mut notes = Vec::new();
        let mut parts = reader.parts();
        let vision = outer.get("vision_config").filter(|vision| vision.is_object());
        if let Some(vision) = vision {
            let tower = vision::tower(&Keys::of(vision, "vision_config.")?, reader.shape.hidden as u64)?;
            let weight = Weight::matrices(
                ModelPart::Vision,
                [tower.parameters, 1],
                [1, 0],
                reader.plain.0,
                Split::Replicated,
            );
            reader.weights.push(weight);
            parts.push("a vision tower".to_owned());
            let estimated = if tower.is_known { "" } else { ", estimated from its sizes" };
            let tower = format!(
                "the vision tower ({:.2} billion parameters{estimated})",
                tower.parameters as f64 / 1e9
            );
            notes.push(match &runnable {
                Ok(_) => format!(
                    "Skep runs the text part: {tower} is not loaded. A plan by estimate counts it whole on every rank of the \
                     first stage"
                ),
                Err(_) => format!("{tower} is whole on every rank of the first stage"),
            });
        }
        if !reader.plain.1 {
            notes.push("config.json names no format; 16 bits are assumed".to_owned());
        }
        let format = reader.quantization.as_ref().map(|quantization| quantization.name.clone());
        let Shape { hidden, heads, vocabulary, context, .. } = reader.shape;
        let (experts, experts_per_token) =
            reader.shape.moe.as_ref().map_or((0, 0), |moe| (moe.experts, moe.per_token));
        Description {
            family: outer_type.or(inner_type).unwrap_or_default().to_owned(),
            context_length: context,
            vocabulary_size: vocabulary,
            format: format.unwrap_or_else(|| reader.plain.0.to_string()),
            notes,
            hidden_size: hidden,
            head_count: heads,
            layers: reader.layers,
            weights: reader.weights,
            experts,
            experts_per_token,
            parts,
            runnable,
        }
        .checked()
    }
}

/// Returns the format of weights that are not quantized, and whether the configuration names it.
fn plain(keys: &Keys<'_>, outer: &Keys<'_>) -> Result<(Storage, bool), ModelError> {
    for model_part in [keys, outer] {
        for key in ["dtype", "torch_dtype"] {
            let Some(name) = model_part.string(key)? else { continue };
            let bytes = match name.trim_start_matches("torch.") {
                "bfloat16" | "float16" => 2,
                "float32" => 4,
                "float8_e4m3fn" => 1,
                other => {
                    let supported = "bfloat16, float16, float32, float8_e4m3fn";
                    return Err(ModelError::unsupported(key, format!("\"{other}\""), supported));
                }
            };
            return Ok((Storage::Float { bytes }, true));
        }
    }
    Ok((Storage::BF16, false))
}

/// The sizes of the text part.
struct Shape {
    hidden: usize,
    layers: usize,
    heads: usize,
    attention: AttentionShape,
    intermediate: usize,
    vocabulary: usize,
    context: usize,
    tied: bool,
    moe: Option<Moe>,
}

impl Shape {
    fn read(keys: &Keys<'_>, outer: &Keys<'_>, family: &Family) -> Result<Self, ModelError> {
        let bounded = |key: &str, value: usize, most: usize| match value {
            0 => Err(ModelError::config(key, "is 0")),
            value if value > most => Err(ModelError::config(key, format!("{value} is above {most}"))),
            value => Ok(value),
        };
        // Small configurations leave out what the class of the model sets.
        let usual = |key: &str| usual_size(family.name, key);
        let required = |key: &str, most: usize| match (keys.size(key)?, usual(key)) {
            (Some(value), _) | (None, Some(value)) => bounded(key, value, most),
            (None, None) => bounded(key, keys.required(key)?, most),
        };
        let hidden = required("hidden_size", MAX_WIDTH)?;
        let heads = required("num_attention_heads", MAX_HEADS)?;
        let layers = required("num_hidden_layers", MAX_LAYERS)?;
        let attention = match keys.size("kv_lora_rank")? {
            Some(latent) => AttentionShape::Latent {
                query_rank: keys.size("q_lora_rank")?.unwrap_or(0).min(MAX_WIDTH),
                latent: bounded("kv_lora_rank", latent, MAX_WIDTH)?,
                rotated: required("qk_rope_head_dim", MAX_HEADS)?,
                unrotated: required("qk_nope_head_dim", MAX_HEADS)?,
                value: required("v_head_dim", MAX_HEADS)?,
            },
            None => {
                let kv_heads = keys.size("num_key_value_heads")?.or(usual("num_key_value_heads"));
                let kv_heads = bounded("num_key_value_heads", kv_heads.unwrap_or(heads), MAX_HEADS)?;
                if !heads.is_multiple_of(kv_heads) {
                    let problem = format!("{kv_heads} does not divide the {heads} attention heads");
                    return Err(ModelError::config("num_key_value_heads", problem));
                }
                let head_size = keys.size("head_dim")?.or(usual("head_dim")).unwrap_or(hidden / heads);
                AttentionShape::Grouped { kv_heads, head_size: bounded("head_dim", head_size, MAX_HEADS)? }
            }
        };
        let tied = keys.boolean("tie_word_embeddings")?.or(outer.boolean("tie_word_embeddings")?);
        Ok(Shape {
            hidden,
            layers,
            heads,
            attention,
            intermediate: required("intermediate_size", MAX_WIDTH)?,
            vocabulary: required("vocab_size", MAX_VOCABULARY)?,
            context: required("max_position_embeddings", MAX_CONTEXT)?,
            tied: tied.unwrap_or(family.name == "gemma3_text"),
            moe: Moe::read(keys, family)?,
        })
    }
}

struct Reader<'a> {
    shape: Shape,
    family: &'static Family,
    keys: Keys<'a>,
    quantization: Option<Quantization>,
    prefix: &'static str,
    /// The format of weights that are not quantized, and whether the configuration names it.
    plain: (Storage, bool),
    weights: Vec<Weight>,
    layers: Vec<LayerShape>,
}

impl Reader<'_> {
    /// Returns what the executors plan with, or why they cannot run a model with this configuration. Of a model with several
    /// parts, they run the text part.
    fn runnable(&self, config: &Value) -> Result<Checkpoint, String> {
        let files = HuggingFaceFiles {
            config,
            generation: None,
            tokenizer_config: None,
            tokenizer: None,
            has_head: !self.shape.tied,
        };
        let plain = match self.plain.0 {
            Storage::Float { bytes: 4 } => DType::F32,
            _ => DType::BF16,
        };
        let dtype = |name: &str, columns: usize| {
            let Some(quantization) = self.quantization.as_ref().filter(|_| name.ends_with(".weight")) else {
                return plain;
            };
            let name = name.trim_end_matches(".weight");
            // Only projections and the head are modules of this class.
            let last = name.rsplit('.').next().unwrap_or_default();
            let is_linear = last.contains("_proj") || ["w1", "w2", "w3", "lm_head"].contains(&last);
            let class = if is_linear { "Linear" } else { "" };
            let is_expert = name.contains(".experts.");
            let format = match quantization.storage(&Module { name, prefix: self.prefix, class, is_expert }) {
                // The forms in which the executors keep these weights.
                Ok(Some(Storage::MXFP4)) => DType::Mxfp4,
                Ok(Some(Storage::Blocks8 { columns: of_scale, .. })) => {
                    fp8_format(columns, of_scale as usize)
                }
                Ok(Some(Storage::Grouped { bits: 8, .. })) => fp8_format(columns, columns),
                Ok(Some(Storage::Grouped { has_zero_points: true, .. })) => DType::Int4,
                Ok(Some(Storage::Grouped { .. })) => DType::Q4_0,
                _ => plain,
            };
            // Rows that are not whole blocks are expanded.
            if columns.is_multiple_of(format.block_len()) { format } else { DType::F32 }
        };
        WeightCoding::read(config)
            .and_then(|_| from_huggingface(&files))
            .and_then(|config| Checkpoint::described(config, dtype))
            .map_err(|error| error.to_string())
    }

    fn text(&mut self) -> Result<(), ModelError> {
        let (hidden, vocabulary) = (self.shape.hidden as u64, self.shape.vocabulary as u64);
        let table = ModelPart::Table { is_tied: self.shape.tied };
        let split = Split::Parts(vocabulary);
        self.matrix(table, "model.embed_tokens", "Embedding", [vocabulary, hidden], split)?;
        for layer in 0..self.shape.layers {
            let shape = LayerShape {
                attention: self.shape.attention,
                window: is_windowed(&self.keys, self.family, layer, self.shape.layers)?,
                dense_width: 0,
                expert_width: 0,
            };
            self.layers.push(shape);
            self.layer(ModelPart::Layer(layer), layer)?;
        }
        self.vector(ModelPart::Exit, hidden, Split::Replicated);
        if !self.shape.tied {
            self.matrix(ModelPart::Exit, "lm_head", "Linear", [vocabulary, hidden], split)?;
        }
        for draft in 0..self.keys.size("num_nextn_predict_layers")?.unwrap_or(0).min(8) {
            // The layer joins two rows into one and has a norm for each, besides the parts of an ordinary layer.
            self.matrix(ModelPart::Draft, "eh_proj", "Linear", [hidden, 2 * hidden], Split::Replicated)?;
            self.vector(ModelPart::Draft, 3 * hidden, Split::Replicated);
            self.layer(ModelPart::Draft, self.shape.layers + draft)?;
        }
        Ok(())
    }

    fn layer(&mut self, model_part: ModelPart, layer: usize) -> Result<(), ModelError> {
        let hidden = self.shape.hidden as u64;
        self.vector(model_part, self.family.layer_norms * hidden, Split::Replicated);
        self.attention(model_part, layer)?;
        self.feed_forward(model_part, layer)
    }

    fn attention(&mut self, model_part: ModelPart, layer: usize) -> Result<(), ModelError> {
        let (hidden, heads) = (self.shape.hidden as u64, self.shape.heads as u64);
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let by_heads = Split::Parts(heads);
        match self.shape.attention {
            AttentionShape::Grouped { kv_heads, head_size } => {
                let (query, kv) = (heads * head_size as u64, (kv_heads * head_size) as u64);
                self.matrix(model_part, &name("q_proj"), "Linear", [query, hidden], by_heads)?;
                for part in ["k_proj", "v_proj"] {
                    self.matrix(model_part, &name(part), "Linear", [kv, hidden], Split::KvHeads)?;
                }
                self.matrix(model_part, &name("o_proj"), "Linear", [hidden, query], by_heads)?;
                if self.family.qkv_bias.are_present(&self.keys)? {
                    self.vector(model_part, query, by_heads);
                    self.vector(model_part, 2 * kv, Split::KvHeads);
                }
                if self.family.output_bias.are_present(&self.keys)? {
                    self.vector(model_part, hidden, Split::Replicated);
                }
                if self.family.head_norms.are_present(&self.keys)? {
                    self.vector(model_part, 2 * head_size as u64, Split::Replicated);
                }
                if self.family.parts.contains(&"attention sinks") {
                    self.vector(model_part, heads, by_heads);
                }
            }
            AttentionShape::Latent { query_rank, latent, rotated, unrotated, value } => {
                let (query_rank, latent) = (query_rank as u64, latent as u64);
                let query = heads * (unrotated + rotated) as u64;
                if query_rank > 0 {
                    let whole = Split::Replicated;
                    self.matrix(model_part, &name("q_a_proj"), "Linear", [query_rank, hidden], whole)?;
                    self.vector(model_part, query_rank, whole);
                    self.matrix(model_part, &name("q_b_proj"), "Linear", [query, query_rank], by_heads)?;
                } else {
                    self.matrix(model_part, &name("q_proj"), "Linear", [query, hidden], by_heads)?;
                }
                let rows = latent + rotated as u64;
                let down = name("kv_a_proj_with_mqa");
                self.matrix(model_part, &down, "Linear", [rows, hidden], Split::Replicated)?;
                self.vector(model_part, latent, Split::Replicated);
                let expanded = heads * (unrotated + value) as u64;
                self.matrix(model_part, &name("kv_b_proj"), "Linear", [expanded, latent], by_heads)?;
                let attended = heads * value as u64;
                self.matrix(model_part, &name("o_proj"), "Linear", [hidden, attended], by_heads)?;
            }
        }
        Ok(())
    }

    fn feed_forward(&mut self, model_part: ModelPart, layer: usize) -> Result<(), ModelError> {
        let hidden = self.shape.hidden as u64;
        let moe = self.shape.moe.as_ref().filter(|moe| moe.is_in(layer)).cloned();
        let Some(moe) = moe else {
            let width = match &self.shape.moe {
                Some(moe) => moe.dense_width.unwrap_or(self.shape.intermediate),
                None => self.shape.intermediate,
            };
            let block = self.shape.moe.as_ref().map_or("mlp", |moe| moe.block);
            self.gated(model_part, &format!("model.layers.{layer}.{block}"), width as u64)?;
            if self.keys.boolean("mlp_bias")?.unwrap_or(false) {
                self.vector(model_part, 2 * width as u64 + hidden, Split::Replicated);
            }
            if let (ModelPart::Layer(_), Some(shape)) = (model_part, self.layers.last_mut()) {
                shape.dense_width = width;
            }
            return Ok(());
        };
        let prefix = format!("model.layers.{layer}.{}", moe.block);
        let experts = moe.experts as u64;
        let router = format!("{prefix}.{}", moe.router);
        self.matrix(model_part, &router, moe.router_class, [experts, hidden], Split::Replicated)?;
        if moe.router_has_bias {
            self.vector(model_part, experts, Split::Replicated);
        }
        let width = moe.width as u64;
        let copies = [experts, moe.per_token as u64];
        for (part, shape) in moe.names.into_iter().zip([[width, hidden], [width, hidden], [hidden, width]]) {
            // One expert stands for all of the layer.
            let name = format!("{prefix}.experts.0.{part}");
            let module = Module { name: &name, prefix: self.prefix, class: "Linear", is_expert: true };
            let storage = self.storage(&module)?;
            let parts = width.div_ceil(storage.run().max(RUN));
            self.weights.push(Weight::matrices(model_part, shape, copies, storage, Split::Experts { parts }));
        }
        if moe.experts_have_bias {
            let biases = Split::Experts { parts: 1 };
            self.weights.push(Weight::matrices(
                model_part,
                [2 * width + hidden, 1],
                copies,
                self.plain.0,
                biases,
            ));
        }
        if moe.shared_width > 0 {
            self.gated(model_part, &format!("{prefix}.{}", moe.shared), moe.shared_width as u64)?;
            if moe.shared_has_gate {
                self.vector(model_part, hidden, Split::Replicated);
            }
        }
        if let (ModelPart::Layer(_), Some(shape)) = (model_part, self.layers.last_mut()) {
            (shape.dense_width, shape.expert_width) = (moe.shared_width, moe.width);
        }
        Ok(())
    }

    /// Adds a gated block: gate, up and down.
    fn gated(&mut self, model_part: ModelPart, prefix: &str, width: u64) -> Result<(), ModelError> {
        let hidden = self.shape.hidden as u64;
        for (part, shape) in
            [("gate_proj", [width, hidden]), ("up_proj", [width, hidden]), ("down_proj", [hidden, width])]
        {
            let name = format!("{prefix}.{part}");
            let module = Module { name: &name, prefix: self.prefix, class: "Linear", is_expert: false };
            let storage = self.storage(&module)?;
            let split = Split::Parts(width.div_ceil(storage.run().max(RUN)));
            self.weights.push(Weight::matrices(model_part, shape, [1, 1], storage, split));
        }
        Ok(())
    }

    fn matrix(
        &mut self,
        model_part: ModelPart,
        name: &str,
        class: &'static str,
        shape: [u64; 2],
        split: Split,
    ) -> Result<(), ModelError> {
        let storage = self.storage(&Module { name, prefix: self.prefix, class, is_expert: false })?;
        self.weights.push(Weight::matrices(model_part, shape, [1, 1], storage, split));
        Ok(())
    }

    /// Adds a norm or a bias, which no quantization changes.
    fn vector(&mut self, model_part: ModelPart, length: u64, split: Split) {
        self.weights.push(Weight::matrices(model_part, [length, 1], [1, 1], self.plain.0, split));
    }

    fn storage(&self, module: &Module<'_>) -> Result<Storage, ModelError> {
        match &self.quantization {
            Some(quantization) => Ok(quantization.storage(module)?.unwrap_or(self.plain.0)),
            None => Ok(self.plain.0),
        }
    }

    /// Names the parts that a dense model with grouped attention does not have.
    fn parts(&self) -> Vec<String> {
        let mut parts = Vec::new();
        if let AttentionShape::Latent { latent, rotated, .. } = self.shape.attention {
            parts.push(format!("latent attention ({latent} + {rotated} values a token)"));
        }
        if let Some(moe) = &self.shape.moe {
            let shared = if moe.shared_width > 0 { " and shared ones" } else { "" };
            parts.push(format!("{} routed experts{shared}", moe.experts));
        }
        if self.layers.iter().any(|layer| layer.window.is_some()) {
            let kind =
                if self.family.name == "llama4_text" { "attention in chunks" } else { "sliding windows" };
            parts.push(kind.to_owned());
        }
        if let Some(quantization) = &self.quantization {
            parts.push(format!("weights in {}", quantization.name));
        }
        parts.extend(self.family.parts.iter().map(|part| (*part).to_owned()));
        parts
    }
}
