//! The parts of layers that several families share, read from config.json.
//!
//! Invariant: a key that changes the arithmetic but is not implemented causes an error that names it.

use serde_json::Value;

use crate::config::huggingface::{Keys, brief};
use crate::config::style::{LayerStyle, Routing, Score};
use crate::config::{MAX_LAYERS, gguf};
use crate::error::ModelError;

/// Returns the style of dense layers.
pub(super) fn dense(
    keys: &Keys<'_>,
    _layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    refuse(keys, "hidden_act", &["silu", "swish"])?;
    Ok(LayerStyle::default())
}

/// Returns the style of dense layers in GGUF files.
pub(super) fn dense_in_gguf(
    _keys: &gguf::Keys<'_>,
    _layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    Ok(LayerStyle::default())
}

/// Returns the routing by the softmax over all experts.
pub(super) fn softmax(normalized: bool) -> Routing {
    Routing { score: Score::Softmax, groups: 1, used_groups: 1, corrected: false, normalized, scale: 1.0 }
}

/// Returns which layers have experts.
pub(super) fn layers(count: usize, sparse: impl Fn(usize) -> bool) -> Vec<bool> {
    // The length is bounded here because `check` reports the key only later.
    (0..count.min(MAX_LAYERS)).map(sparse).collect()
}

/// Reads a list of layer numbers.
pub(super) fn layer_list(keys: &Keys<'_>, key: &str) -> Result<Vec<usize>, ModelError> {
    match keys.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(layers)) => {
            let numbers = layers.iter().map(|layer| layer.as_u64().map(|layer| layer as usize));
            numbers
                .collect::<Option<_>>()
                .ok_or_else(|| ModelError::config(key, "is not a list of layer numbers"))
        }
        Some(value) => Err(ModelError::config(key, format!("{} is not a list", brief(value)))),
    }
}

/// Reads a list with one of two names for each layer. Returns whether each is the second.
pub(super) fn layer_types(
    keys: &Keys<'_>,
    key: &str,
    names: [&str; 2],
) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    let types = value.as_array().map(Vec::as_slice).unwrap_or_default();
    types
        .iter()
        .take(MAX_LAYERS + 1)
        .map(|kind| match kind.as_str() {
            Some(name) if name == names[0] => Ok(false),
            Some(name) if name == names[1] => Ok(true),
            _ => Err(ModelError::unsupported(key, brief(kind), names.join(", "))),
        })
        .collect::<Result<Vec<_>, _>>()
        .map(Some)
}

/// Refuses a value of a key that is not among the supported ones.
pub(super) fn refuse(keys: &Keys<'_>, key: &str, supported: &[&str]) -> Result<(), ModelError> {
    match keys.string(key)? {
        Some(value) if !supported.contains(&value) => {
            Err(ModelError::unsupported(key, format!("\"{value}\""), supported.join(", ")))
        }
        _ => Ok(()),
    }
}
