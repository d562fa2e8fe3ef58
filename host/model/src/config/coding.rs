//! Reads from the `quantization_config` of config.json how a checkpoint codes its weights.
//!
//! Invariant: a method or a variant of it that is not implemented is an error that names the key. Which weights are
//! quantized follows from the tensors themselves.

use serde_json::Value;

use super::huggingface::{Keys, brief};
use crate::error::ModelError;

const SUPPORTED: &str = "compressed-tensors (pack-quantized, 4-bit integers in symmetric groups of 32) and fp8 (blocks), \
                         besides unquantized safetensors (F32, F16, BF16) and GGUF files";
/// Maximum number of rows or columns of a block.
const MAX_BLOCK: usize = 1 << 16;

/// The coding of quantized weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WeightCoding {
    /// 4-bit integers in groups of 32 with a scale each.
    PackedInt4,
    /// 8-bit floats with a scale for each block of rows and columns.
    Fp8 { block: [usize; 2] },
}

impl WeightCoding {
    /// Reads the coding from a whole config.json, if its weights are quantized.
    pub(crate) fn read(config: &Value) -> Result<Option<Self>, ModelError> {
        let text = config.get("text_config");
        let keys = ["quantization_config", "compression_config"];
        let of = |config: &'_ Value| -> Option<Value> {
            keys.iter().find_map(|key| config.get(key).filter(|value| !value.is_null()).cloned())
        };
        let Some(value) = of(config).or_else(|| of(text?)) else { return Ok(None) };
        let keys = Keys::of(&value, "quantization_config.")?;
        match keys.string("quant_method")? {
            Some("compressed-tensors") => compressed_tensors(&value, &keys).map(Some),
            Some("fp8") => fp8(&keys).map(Some),
            _ => Err(ModelError::unsupported("quantization_config", brief(&value), SUPPORTED)),
        }
    }
}

fn compressed_tensors(value: &Value, keys: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    let unsupported = |key: &str, found: &Value| {
        Err(ModelError::unsupported(format!("quantization_config.{key}"), brief(found), SUPPORTED))
    };
    if let Some(format) = keys.get("format").filter(|format| **format != "pack-quantized") {
        return unsupported("format", format);
    }
    let groups = keys.get("config_groups").and_then(Value::as_object);
    let Some(groups) = groups.filter(|groups| !groups.is_empty()) else {
        return Err(ModelError::config("quantization_config.config_groups", "is missing"));
    };
    for group in groups.values() {
        for key in ["input_activations", "output_activations"] {
            if let Some(found) = group.get(key).filter(|found| !found.is_null()) {
                return unsupported(key, found);
            }
        }
        let Some(weights) = group.get("weights") else { return unsupported("config_groups", value) };
        let found = |key: &str| weights.get(key).cloned().unwrap_or_default();
        for (key, wanted) in [
            ("num_bits", Value::from(4)),
            ("type", Value::from("int")),
            ("symmetric", Value::from(true)),
            ("group_size", Value::from(32)),
            ("strategy", Value::from("group")),
        ] {
            if found(key) != wanted {
                return unsupported(&format!("config_groups.weights.{key}"), &found(key));
            }
        }
        if !matches!(found("actorder"), Value::Null | Value::Bool(false)) {
            return unsupported("config_groups.weights.actorder", &found("actorder"));
        }
    }
    Ok(WeightCoding::PackedInt4)
}

fn fp8(keys: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    let key = "quantization_config.weight_block_size";
    if let Some(format) = keys.string("fmt")?.filter(|format| *format != "e4m3") {
        return Err(ModelError::unsupported("quantization_config.fmt", format!("\"{format}\""), "e4m3"));
    }
    let Some(block) = keys.get("weight_block_size") else {
        return Err(ModelError::unsupported(key, "absent", "blocks such as [128, 128]"));
    };
    let sizes: Option<Vec<usize>> =
        block.as_array().map(|sizes| sizes.iter().map(|size| size.as_u64().unwrap_or(0) as usize).collect());
    match sizes.as_deref() {
        Some(&[rows, columns]) if (1..=MAX_BLOCK).contains(&rows) && (1..=MAX_BLOCK).contains(&columns) => {
            Ok(WeightCoding::Fp8 { block: [rows, columns] })
        }
        _ => Err(ModelError::config(key, format!("{} is not a pair of sizes", brief(block)))),
    }
}
