//! Reads a [`ModelConfig`] from GGUF metadata.
//!
//! Invariant: a key that changes the arithmetic but is not implemented causes an error that names it.

use super::family::{Family, GgufWindows};
use super::{Architecture, LayerStyle, ModelConfig, Rope, RopeScaling, gguf_style};
use crate::error::ModelError;
use crate::gguf::{GgufFile, GgufTensor};

const EMBEDDING: &str = "token_embd.weight";
const ROPE_FACTORS: &str = "rope_freqs.weight";
const DEFAULT_THETA: f64 = 10000.0;
/// The value of control tokens in `tokenizer.ggml.token_type`.
const CONTROL: u64 = 3;

/// Returns the checked configuration of a GGUF model. `bytes` is the content of the file that `file` was
/// parsed from.
pub(crate) fn from_gguf(file: &GgufFile, bytes: &[u8]) -> Result<ModelConfig, ModelError> {
    let name = file
        .string("general.architecture")?
        .ok_or_else(|| ModelError::config("general.architecture", "is missing"))?;
    let mut family = Architecture::from_gguf(name)?.family();
    let keys = Keys { file, prefix: name };
    if let Some(mixture) = family.gguf.with_experts
        && keys.size("expert_count")?.is_some_and(|count| count > 0)
    {
        family = mixture.family();
    }
    let hidden_size = keys.required("embedding_length")?;
    // Layers behind the last one predict further tokens and are not run.
    let drafts = keys.size("nextn_predict_layers")?.unwrap_or(0);
    let layer_count = keys.required("block_count")?.saturating_sub(drafts);
    let head_count = keys.required("attention.head_count")?;
    let kv_head_count = keys.size("attention.head_count_kv")?.unwrap_or(head_count);
    let style = (family.gguf.style)(&keys, layer_count, hidden_size)?;
    let head_size = match (style.latent, keys.size("attention.key_length")?) {
        (Some(latent), _) => latent.head_size(),
        (None, Some(size)) => size,
        (None, None) => hidden_size.checked_div(head_count).unwrap_or(0),
    };
    // All heads share one latent, which files count as one KV head.
    let kv_head_count = if style.latent.is_some() { head_count } else { kv_head_count };
    keys.refuse_unsupported(head_size, &style)?;
    let context_length = keys.required("context_length")?;
    let window =
        keys.size("attention.sliding_window")?.filter(|window| *window > 0 && *window < context_length);
    let windows = gguf_style::windows(&keys, family.gguf.windows, layer_count, window)?;
    match (family.gguf.windows, window) {
        (_, None) | (GgufWindows::Always | GgufWindows::Runs(_), _) => {}
        (GgufWindows::Family(windowed), Some(_)) => family = windowed.family(),
        (GgufWindows::Refused, Some(window)) => {
            return Err(ModelError::unsupported(
                keys.name("attention.sliding_window"),
                window,
                "sliding windows in GGUF files of the architectures llama, gpt-oss and gemma3",
            ));
        }
    }
    let epsilon = keys.name("attention.layer_norm_rms_epsilon");
    let norm_epsilon = file.float(&epsilon)?.ok_or_else(|| ModelError::config(epsilon, "is missing"))?;
    let vocabulary_size = vocabulary_size(file, &keys)?;
    let has = |name: &str| tensor(file, name).is_some();
    ModelConfig {
        architecture: family.architecture,
        hidden_size,
        layer_count,
        head_count,
        kv_head_count,
        head_size,
        feed_forward_size: match keys.size("feed_forward_length")? {
            // Files of models whose layers all have experts may leave it out.
            None if style.experts.is_some() => hidden_size,
            Some(0) if style.experts.is_some() => hidden_size,
            Some(size) => size,
            None => keys.required("feed_forward_length")?,
        },
        vocabulary_size,
        context_length,
        norm_epsilon: norm_epsilon as f32,
        rope: rope(file, bytes, &keys, family, style.latent.is_some())?,
        windows,
        qkv_bias: has("blk.0.attn_q.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_up.bias"),
        qk_norm: has("blk.0.attn_q_norm.weight"),
        style,
        tied_head: !has("output.weight"),
        bos: token(file, "tokenizer.ggml.bos_token_id")?,
        eos: end_tokens(file, bytes)?,
        add_bos: adds_bos(file)?,
    }
    .check()
}

/// The metadata keys under the architecture's name.
pub(super) struct Keys<'a> {
    pub(super) file: &'a GgufFile,
    prefix: &'a str,
}

impl Keys<'_> {
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.file.float(&self.name(key))
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let key = self.name(key);
        let Some(value) = self.file.unsigned(&key)? else { return Ok(None) };
        match u32::try_from(value) {
            Ok(value) => Ok(Some(value as usize)),
            Err(_) => Err(ModelError::config(key, format!("{value} is out of range"))),
        }
    }

    pub(super) fn required(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| ModelError::config(self.name(key), "is missing"))
    }

    fn refuse_unsupported(&self, head_size: usize, style: &LayerStyle) -> Result<(), ModelError> {
        if let Some(experts) =
            self.size("expert_count")?.filter(|count| *count > 0 && style.experts.is_none())
        {
            return Err(ModelError::unsupported(self.name("expert_count"), experts, "dense models"));
        }
        // Queries behind the trained context would be scaled.
        if let Some(scale) = self.float("attention.temperature_scale")?.filter(|scale| *scale != 0.0) {
            return Err(ModelError::unsupported(self.name("attention.temperature_scale"), scale, "0"));
        }
        if style.latent.is_some() {
            return Ok(());
        }
        let rotated = style.rotated.unwrap_or(head_size);
        for (key, wanted) in [("attention.value_length", head_size), ("rope.dimension_count", rotated)] {
            if let Some(size) = self.size(key)?.filter(|size| *size != wanted) {
                return Err(ModelError::unsupported(
                    self.name(key),
                    size,
                    format!("the head size, {head_size}"),
                ));
            }
        }
        Ok(())
    }
}

pub(super) fn tensor<'a>(file: &'a GgufFile, name: &str) -> Option<&'a GgufTensor> {
    file.tensors().iter().find(|tensor| tensor.name == name)
}

fn vocabulary_size(file: &GgufFile, keys: &Keys<'_>) -> Result<usize, ModelError> {
    let rows = tensor(file, EMBEDDING)
        .ok_or_else(|| ModelError::TensorMissing {
            name: EMBEDDING.to_owned(),
            path: file.path().to_owned(),
        })?
        .shape[0];
    if let Some(claimed) = keys.size("vocab_size")?.filter(|claimed| *claimed != rows) {
        return Err(ModelError::config(
            keys.name("vocab_size"),
            format!("is {claimed}, but {EMBEDDING} has {rows} rows"),
        ));
    }
    if let Some(tokens) = file.array("tokenizer.ggml.tokens")?.filter(|tokens| tokens.count > rows) {
        return Err(ModelError::config(
            "tokenizer.ggml.tokens",
            format!("has {} entries, but {EMBEDDING} has {rows} rows", tokens.count),
        ));
    }
    Ok(rows)
}

fn rope(
    file: &GgufFile,
    bytes: &[u8],
    keys: &Keys<'_>,
    family: &Family,
    is_latent: bool,
) -> Result<Rope, ModelError> {
    let pairing = family.gguf.pairing;
    let theta = file.float(&keys.name("rope.freq_base"))?.unwrap_or(DEFAULT_THETA) as f32;
    let kind = keys.name("rope.scaling.type");
    let factor = match file.float(&keys.name("rope.scaling.factor"))? {
        Some(factor) => Some(factor),
        None => file.float(&keys.name("rope.scale_linear"))?,
    };
    if file.string(&kind)? == Some("yarn") {
        let Some(factor) = factor else {
            return Err(ModelError::config(keys.name("rope.scaling.factor"), "is missing"));
        };
        if tensor(file, ROPE_FACTORS).is_some() {
            let found = "yarn together with rope_freqs.weight";
            return Err(ModelError::unsupported(kind, found, "one of the two"));
        }
        let scaling = gguf_style::yarn(keys, family.gguf.rounds_yarn, is_latent, factor as f32)?;
        return Ok(Rope { theta, pairing, scaling });
    }
    let linear = match (file.string(&kind)?, factor) {
        (Some("none"), _) | (None, None) => None,
        (Some("linear") | None, Some(factor)) => Some(factor as f32).filter(|factor| *factor != 1.0),
        (Some("linear"), None) => {
            return Err(ModelError::config(keys.name("rope.scaling.factor"), "is missing"));
        }
        (Some(other), _) => {
            return Err(ModelError::unsupported(kind, format!("\"{other}\""), "none, linear, yarn"));
        }
    };
    let factors = tensor(file, ROPE_FACTORS).map(|tensor| read_factors(tensor, bytes)).transpose()?;
    let scaling = match (linear, factors) {
        (None, None) => RopeScaling::None,
        (Some(factor), None) => RopeScaling::Linear { factor },
        (None, Some(factors)) => RopeScaling::Factors(factors),
        (Some(_), Some(_)) => {
            return Err(ModelError::unsupported(
                kind,
                "linear together with rope_freqs.weight",
                "one of the two",
            ));
        }
    };
    Ok(Rope { theta, pairing, scaling })
}

fn read_factors(tensor: &GgufTensor, bytes: &[u8]) -> Result<Vec<f32>, ModelError> {
    if tensor.dtype != skep_kernels::DType::F32 || tensor.shape.len() != 1 || tensor.file != 0 {
        return Err(ModelError::tensor(ROPE_FACTORS, "is not a vector of F32 values in the first file"));
    }
    let data = &bytes[tensor.bytes.clone()];
    Ok(data.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().expect("four bytes"))).collect())
}

fn token(file: &GgufFile, key: &str) -> Result<Option<u32>, ModelError> {
    let Some(value) = file.unsigned(key)? else { return Ok(None) };
    u32::try_from(value).map(Some).map_err(|_| ModelError::config(key, format!("{value} is not a token id")))
}

fn end_tokens(file: &GgufFile, bytes: &[u8]) -> Result<Vec<u32>, ModelError> {
    let mut named = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        named.extend(token(file, &format!("tokenizer.ggml.{key}"))?);
    }
    let texts = file.array("tokenizer.ggml.tokens")?.and_then(|array| array.strings(bytes));
    let types = file.array("tokenizer.ggml.token_type")?.and_then(|array| array.scalars(bytes));
    let control: Vec<(&str, u32)> = match (texts, types) {
        (Some(texts), Some(types)) => {
            let all = texts.zip(types).zip(0u32..);
            let control = all.filter(|((_, kind), _)| kind.as_u64() == Some(CONTROL));
            control.map(|((text, _), id)| (text, id)).collect()
        }
        _ => Vec::new(),
    };
    Ok(super::end_tokens(named, control.iter().copied()))
}

fn adds_bos(file: &GgufFile) -> Result<bool, ModelError> {
    if let Some(add) = file.boolean("tokenizer.ggml.add_bos_token")? {
        return Ok(add);
    }
    // Without the key, the vocabularies of SentencePiece, of Llama 3 and of Mistral put the token first; other byte-level
    // ones do not.
    let sentence_piece = file.string("tokenizer.ggml.model")? == Some("llama");
    let pre = file.string("tokenizer.ggml.pre")?;
    Ok(sentence_piece || matches!(pre, Some("llama-bpe" | "llama3" | "llama-v3" | "tekken")))
}
