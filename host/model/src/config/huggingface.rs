//! Reads a [`ModelConfig`] from config.json and the files next to it.
//!
//! Invariant: a key that changes the arithmetic but is not implemented causes an error that names it. Both the old
//! and the new spelling of the rotary parameters are read.

use serde_json::{Map, Value};

use super::family::{Family, Presence, Windows, usual_size};
use super::rope::yarn_magnitude;
use super::{Architecture, ModelConfig, Rope, RopePairing, RopeScaling};
use crate::error::ModelError;

/// The parsed files of a checkpoint folder that determine the configuration.
pub(crate) struct HuggingFaceFiles<'a> {
    pub(crate) config: &'a Value,
    pub(crate) generation: Option<&'a Value>,
    pub(crate) tokenizer_config: Option<&'a Value>,
    pub(crate) tokenizer: Option<&'a Value>,
    /// Whether the weights contain `lm_head.weight`. This decides whether the head is tied if config.json does not.
    pub(crate) has_head: bool,
}

/// Returns the checked configuration of a Hugging Face checkpoint.
pub(crate) fn from_huggingface(files: &HuggingFaceFiles<'_>) -> Result<ModelConfig, ModelError> {
    let (config, prefix) = text_config(files.config);
    let keys = Keys::of(config, prefix)?;
    let architecture = architecture(&keys)?;
    let family = architecture.family();
    refuse_unsupported(&keys, family)?;
    let hidden_size = keys.required("hidden_size")?;
    let layer_count = keys.required("num_hidden_layers")?;
    let head_count = keys.required_or_usual("num_attention_heads")?;
    let style = (family.huggingface.style)(&keys, layer_count, hidden_size)?;
    let head_size = match (style.latent, keys.size_or_usual("head_dim")?) {
        (Some(latent), _) => latent.head_size(),
        (None, Some(size)) => size,
        (None, None) => hidden_size.checked_div(head_count).unwrap_or(0),
    };
    let attention_bias = keys.boolean("attention_bias")?;
    let [qkv_bias, output_bias] = family.huggingface.biases.map(|bias| bias.with(attention_bias));
    let mlp_bias = keys.boolean("mlp_bias")?.unwrap_or(false) && family.huggingface.mlp_bias;
    let qk_norm = match family.huggingface.head_norms {
        norms @ Presence::Configured(_) => norms.with(keys.boolean("use_qk_norm")?),
        norms => norms.with(None),
    };
    ModelConfig {
        architecture,
        hidden_size,
        layer_count,
        head_count,
        kv_head_count: match style.latent {
            Some(_) => head_count,
            None => keys.size_or_usual("num_key_value_heads")?.unwrap_or(head_count),
        },
        head_size,
        feed_forward_size: keys.required("intermediate_size")?,
        vocabulary_size: keys.required_or_usual("vocab_size")?,
        context_length: keys.required_or_usual("max_position_embeddings")?,
        norm_epsilon: keys.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope: rope(&keys, family, style.latent.is_some())?,
        windows: windows(&keys, family.huggingface.windows, layer_count)?,
        qkv_bias,
        output_bias,
        mlp_bias,
        qk_norm,
        style,
        tied_head: keys.boolean("tie_word_embeddings")?.unwrap_or(!files.has_head),
        bos: begin_token(files, &keys)?,
        eos: end_tokens(files, &keys)?,
        add_bos: adds_bos(files)?,
    }
    .check()
}

/// A JSON object, and its path for error messages.
pub(crate) struct Keys<'a> {
    object: &'a Map<String, Value>,
    prefix: &'a str,
}

impl<'a> Keys<'a> {
    pub(crate) fn of(value: &'a Value, prefix: &'a str) -> Result<Self, ModelError> {
        match value {
            Value::Object(object) => Ok(Self { object, prefix }),
            _ => Err(ModelError::config(prefix.trim_end_matches('.'), "is not an object")),
        }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(ModelError::config(
                format!("{}{key}", self.prefix),
                format!("{} is not {wanted}", brief(value)),
            )),
        }
    }

    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number below 2^32", |value| {
            value.as_u64().and_then(|value| u32::try_from(value).ok()).map(|value| value as usize)
        })
    }

    pub(crate) fn required(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// Reads a size that some families' configurations leave out where it is the usual one.
    pub(crate) fn size_or_usual(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let usual = || usual_size(self.string("model_type").ok()??, key);
        Ok(self.size(key)?.or_else(usual))
    }

    pub(crate) fn required_or_usual(&self, key: &str) -> Result<usize, ModelError> {
        self.size_or_usual(key)?.ok_or_else(|| self.missing(key))
    }

    fn missing(&self, key: &str) -> ModelError {
        ModelError::config(format!("{}{key}", self.prefix), "is missing")
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.typed(key, "a number", |value| value.as_f64().map(|value| value as f32))
    }

    fn required_float(&self, key: &str) -> Result<f32, ModelError> {
        self.float(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "a boolean", Value::as_bool)
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// Reads one token id or a list of token ids.
    fn tokens(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let read = |value: &Value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            value => id(value).map(|id| vec![id]),
        };
        Ok(self.typed(key, "a token id or a list of them", read)?.unwrap_or_default())
    }
}

/// Formats a value for a message, truncated after 80 characters.
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn architecture(keys: &Keys<'_>) -> Result<Architecture, ModelError> {
    let name = keys.string("model_type")?.ok_or_else(|| ModelError::config("model_type", "is missing"))?;
    let architecture = Architecture::from_model_type(name)?;
    let class = keys.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
    match class {
        Some(class) if class != architecture.class_name() => {
            Err(ModelError::unsupported("architectures", format!("\"{class}\""), architecture.class_name()))
        }
        _ => Ok(architecture),
    }
}

fn refuse_unsupported(keys: &Keys<'_>, family: &Family) -> Result<(), ModelError> {
    if family.huggingface.rotates_parts {
        return Ok(());
    }
    match keys.float("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(other) => Err(ModelError::unsupported("partial_rotary_factor", other, "1")),
    }
}

impl<'a> Keys<'a> {
    /// Returns the parameters of the rotation, under their new or their old name. Where kinds of layers have
    /// parameters of their own, those of layers without a window.
    pub(super) fn rope_parameters(&self) -> Result<Option<Keys<'a>>, ModelError> {
        if let Some(full) = self.nested_rope("full_attention")? {
            return Ok(Some(full));
        }
        match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(parameters), _) => Keys::of(parameters, "rope_parameters.").map(Some),
            (None, Some(scaling)) => Keys::of(scaling, "rope_scaling.").map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Returns the parameters of the rotation of a kind of layers, if the kinds are distinguished.
    pub(super) fn nested_rope(&self, kind: &str) -> Result<Option<Keys<'a>>, ModelError> {
        let nested = self.get("rope_parameters").and_then(|parameters| parameters.get(kind));
        nested.map(|nested| Keys::of(nested, "rope_parameters.")).transpose()
    }

    fn rope_type(&self) -> Result<Option<&'a str>, ModelError> {
        match self.string("rope_type")? {
            Some(kind) => Ok(Some(kind)),
            None => self.string("type"),
        }
    }

    pub(super) fn is_yarn(&self) -> bool {
        matches!(self.rope_type(), Ok(Some("yarn")))
    }
}

/// Returns the configuration of the text part of a model with several parts, and its path.
fn text_config(config: &Value) -> (&Value, &'static str) {
    match config.get("text_config").filter(|text| text.is_object()) {
        Some(text) => (text, "text_config."),
        None => (config, ""),
    }
}

fn rope(keys: &Keys<'_>, family: &Family, interleaved: bool) -> Result<Rope, ModelError> {
    let parameters = keys.rope_parameters()?;
    let outer_theta = keys.float("rope_theta")?;
    let theta = match &parameters {
        Some(parameters) => parameters.float("rope_theta")?.or(outer_theta),
        None => outer_theta,
    };
    let scaling = match &parameters {
        Some(parameters) => scaling(parameters, keys)?,
        None => RopeScaling::None,
    };
    let pairing = if interleaved { RopePairing::Interleaved } else { RopePairing::Halves };
    Ok(Rope { theta: theta.unwrap_or(family.huggingface.theta), pairing, scaling })
}

fn yarn(parameters: &Keys<'_>, config: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    let factor = parameters.required_float("factor")?;
    let weights = (parameters.float("mscale")?, parameters.float("mscale_all_dim")?);
    let magnitude = match (parameters.float("attention_factor")?, weights) {
        (Some(magnitude), _) => magnitude,
        (None, (Some(weight), Some(all))) if weight != 0.0 && all != 0.0 => {
            (yarn_magnitude(factor, weight) / yarn_magnitude(factor, all)) as f32
        }
        (None, _) => yarn_magnitude(factor, 1.0) as f32,
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: parameters.float("beta_fast")?.unwrap_or(32.0),
        beta_slow: parameters.float("beta_slow")?.unwrap_or(1.0),
        original_context: match parameters.size("original_max_position_embeddings")? {
            Some(context) => context,
            None => config.required("max_position_embeddings")?,
        },
        truncated: parameters.boolean("truncate")?.unwrap_or(true),
        magnitude,
    })
}

fn scaling(parameters: &Keys<'_>, config: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    match parameters.rope_type()? {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: parameters.required_float("factor")? }),
        Some("yarn") => yarn(parameters, config),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: parameters.required_float("factor")?,
            low_freq_factor: parameters.required_float("low_freq_factor")?,
            high_freq_factor: parameters.required_float("high_freq_factor")?,
            original_context: match parameters.size("original_max_position_embeddings")? {
                Some(context) => context,
                None => config.required("original_max_position_embeddings")?,
            },
        }),
        Some(other) => Err(ModelError::unsupported(
            format!("{}rope_type", parameters.prefix),
            format!("\"{other}\""),
            "default, linear, llama3, yarn",
        )),
    }
}

fn windows(keys: &Keys<'_>, rule: Windows, layer_count: usize) -> Result<Vec<Option<usize>>, ModelError> {
    let layers = 0..layer_count.min(super::MAX_LAYERS); // `check` rejects a larger count.
    let window = keys.size_or_usual("sliding_window")?;
    let window = match rule {
        Windows::Never => None,
        Windows::Always | Windows::Runs(_) | Windows::EverySecond => window,
        Windows::Optional => window.filter(|_| matches!(keys.boolean("use_sliding_window"), Ok(Some(true)))),
    };
    if let Some(Value::Array(types)) = keys.get("layer_types") {
        return layer_windows(types, layer_count, window);
    }
    let first = match rule {
        Windows::Runs(usual) if window.is_some() => {
            let pattern = keys.size("sliding_window_pattern")?.or(keys.size("_sliding_window_pattern")?);
            let pattern = pattern.unwrap_or(usual).max(1);
            let is_last = |layer: usize| (layer + 1).is_multiple_of(pattern);
            return Ok(layers.map(|layer| window.filter(|_| !is_last(layer))).collect());
        }
        Windows::EverySecond => {
            return Ok(layers.map(|layer| window.filter(|_| layer % 2 == 0)).collect());
        }
        Windows::Optional => keys.size("max_window_layers")?.unwrap_or(28),
        Windows::Never | Windows::Always | Windows::Runs(_) => 0,
    };
    Ok(layers.map(|layer| window.filter(|_| layer >= first)).collect())
}

fn layer_windows(
    types: &[Value],
    layer_count: usize,
    window: Option<usize>,
) -> Result<Vec<Option<usize>>, ModelError> {
    if types.len() != layer_count {
        return Err(ModelError::config(
            "layer_types",
            format!("has {} entries for {layer_count} layers", types.len()),
        ));
    }
    types
        .iter()
        .map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => match window {
                Some(window) => Ok(Some(window)),
                None => Err(ModelError::config("sliding_window", "is missing, but layer_types requires it")),
            },
            _ => {
                Err(ModelError::unsupported("layer_types", brief(kind), "full_attention, sliding_attention"))
            }
        })
        .collect()
}

/// Returns the token before a text: that of the text part, or else that of another file.
fn begin_token(files: &HuggingFaceFiles<'_>, config: &Keys<'_>) -> Result<Option<u32>, ModelError> {
    let mut ids = config.tokens("bos_token_id")?;
    ids.extend(Keys::of(files.config, "")?.tokens("bos_token_id")?);
    if let Some(generation) = files.generation {
        ids.extend(Keys::of(generation, "generation_config.")?.tokens("bos_token_id")?);
    }
    if let Some(text) = files.tokenizer_config.and_then(|config| token_text(config.get("bos_token")?)) {
        ids.extend(added_tokens(files).into_iter().filter(|token| token.text == text).map(|token| token.id));
    }
    Ok(ids.first().copied())
}

/// Returns the tokens that end a generation. Each file may name other ones, and all of them count.
fn end_tokens(files: &HuggingFaceFiles<'_>, config: &Keys<'_>) -> Result<Vec<u32>, ModelError> {
    let mut named = config.tokens("eos_token_id")?;
    named.extend(Keys::of(files.config, "")?.tokens("eos_token_id")?);
    if let Some(generation) = files.generation {
        named.extend(Keys::of(generation, "generation_config.")?.tokens("eos_token_id")?);
    }
    let eos_text = files.tokenizer_config.and_then(|config| token_text(config.get("eos_token")?));
    let added = added_tokens(files);
    named.extend(added.iter().filter(|token| eos_text == Some(token.text)).map(|token| token.id));
    let control = added.iter().filter(|token| token.special).map(|token| (token.text, token.id));
    Ok(super::end_tokens(named, control))
}

/// A token of a tokenizer that is not a part of text.
struct AddedToken<'a> {
    id: u32,
    text: &'a str,
    special: bool,
}

/// Returns the added tokens that tokenizer.json lists, and those that tokenizer_config.json lists by their ids.
fn added_tokens<'a>(files: &HuggingFaceFiles<'a>) -> Vec<AddedToken<'a>> {
    let read = |id: Option<u64>, token: &'a Value| {
        Some(AddedToken {
            id: u32::try_from(id?).ok()?,
            text: token.get("content")?.as_str()?,
            special: token.get("special").and_then(Value::as_bool).unwrap_or(false),
        })
    };
    let listed = files.tokenizer.and_then(|tokenizer| tokenizer.get("added_tokens")?.as_array());
    let listed =
        listed.into_iter().flatten().filter_map(|token| read(token.get("id").and_then(Value::as_u64), token));
    let by_id = files.tokenizer_config.and_then(|config| config.get("added_tokens_decoder")?.as_object());
    let by_id = by_id.into_iter().flatten().filter_map(|(id, token)| read(id.parse().ok(), token));
    listed.chain(by_id).collect()
}

/// Returns the text of a special token of tokenizer_config.json, which is a string or an object with the text in
/// `content`.
pub(crate) fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn adds_bos(files: &HuggingFaceFiles<'_>) -> Result<bool, ModelError> {
    if let Some(config) = files.tokenizer_config
        && let Some(add) = Keys::of(config, "tokenizer_config.")?.boolean("add_bos_token")?
    {
        return Ok(add);
    }
    // Otherwise, the token is added if the template in tokenizer.json begins with a special token.
    let post_processor = files.tokenizer.and_then(|tokenizer| tokenizer.get("post_processor"));
    Ok(post_processor.is_some_and(|processor| begins_with_special_token(processor, 4)))
}

fn begins_with_special_token(processor: &Value, depth: usize) -> bool {
    let first = processor.get("single").and_then(|single| single.get(0));
    if first.is_some_and(|first| first.get("SpecialToken").is_some()) {
        return true;
    }
    let parts = processor.get("processors").and_then(Value::as_array);
    depth > 0 && parts.into_iter().flatten().any(|part| begins_with_special_token(part, depth - 1))
}
