//! Reads from the `quantization_config` of config.json how a checkpoint codes its weights.
//!
//! Invariant: a method or a variant of it that is not implemented is an error that names the key. Which weights are
//! quantized follows from the tensors themselves.

use serde_json::Value;

use super::huggingface::{Keys, brief};
use crate::error::ModelError;

const SUPPORTED: &str = "compressed-tensors (pack-quantized 4-bit integers, float-quantized FP8), fp8, mxfp4, gptq and awq (4-bit integers), \
                         besides unquantized safetensors (F32, F16, BF16) and GGUF files";
/// The codings of safetensors, and what becomes of them in memory, for the guide.
#[cfg(test)]
pub(crate) const CODINGS: [(&str, &str); 7] = [
    ("F32, F16, BF16", "as they are"),
    (
        "compressed-tensors `pack-quantized`: 4-bit integers in groups of 32, 64, 128 or a row, symmetric",
        "Q4_0",
    ),
    ("the same with zero points", "INT4: Q4_0 with a zero point"),
    ("GPTQ and AWQ (`gemm`): 4-bit integers, without act-order", "Q4_0 if all zero points are 8, else INT4"),
    (
        "FP8 (E4M3) with a scale for each block: `fp8`, compressed-tensors `float-quantized`",
        "F8_E4M3: codes, and a scale for every 32",
    ),
    ("FP8 with a scale for each row or matrix: the same and `fbgemm_fp8`", "F8_E4M3"),
    ("MXFP4: the experts of gpt-oss", "MXFP4"),
];
/// Maximum number of rows or columns of a block.
const MAX_BLOCK: usize = 1 << 16;

/// The coding of quantized weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WeightCoding {
    Int4(Int4Coding),
    Fp8(Fp8Coding),
    /// 4-bit floats with a power of two for every 32 of them, in the experts alone.
    Mxfp4,
}

/// 4-bit integers with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int4Coding {
    pub(crate) packing: IntegerPacking,
    /// Number of values of a row that share a scale. `None` means all.
    pub(crate) group: Option<usize>,
    /// Whether all zero points are 8.
    pub(crate) symmetric: bool,
}

/// The order of packed integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntegerPacking {
    /// Words hold eight neighbors of a row of the weight.
    Rows,
    /// Words hold eight inputs of an output; zero points are stored less `zero_offset`.
    Gptq { zero_offset: u8 },
    /// Words hold eight outputs of an input, those with even numbers first.
    Awq,
}

/// 8-bit floats with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fp8Coding {
    /// A scale for each block of rows and columns. `inverse_name` says whether the tensors are called
    /// `weight_scale_inv`, as those of DeepSeek.
    Blocks { block: [usize; 2], inverse_name: bool },
    /// A scale for each row or for the whole matrix, as the tensors show.
    RowsOrWhole,
}

impl WeightCoding {
    /// Reads the coding from a whole config.json, if its weights are quantized.
    pub(crate) fn read(config: &Value) -> Result<Option<Self>, ModelError> {
        let text = config.get("text_config");
        match Self::read_from(&Keys::of(config, "")?)? {
            None if text.is_some_and(Value::is_object) => {
                Self::read_from(&Keys::of(text.unwrap_or(config), "text_config.")?)
            }
            found => Ok(found),
        }
    }

    /// Reads the coding from the object that states it.
    pub(super) fn read_from(keys: &Keys<'_>) -> Result<Option<Self>, ModelError> {
        let names = ["quantization_config", "compression_config"];
        let Some(value) = names.into_iter().find_map(|name| keys.get(name)) else { return Ok(None) };
        let keys = Keys::of(value, "quantization_config.")?;
        match keys.string("quant_method")? {
            Some("compressed-tensors") => compressed_tensors(value, &keys).map(Some),
            Some("fp8") => fp8(&keys).map(Some),
            Some("fbgemm_fp8") => Ok(Some(WeightCoding::Fp8(Fp8Coding::RowsOrWhole))),
            Some("mxfp4") => Ok(Some(WeightCoding::Mxfp4)),
            Some("gptq") => gptq(&keys).map(Some),
            Some("awq") => awq(&keys).map(Some),
            _ => Err(ModelError::unsupported("quantization_config", brief(value), SUPPORTED)),
        }
    }
}

fn unsupported(key: &str, found: &Value) -> ModelError {
    ModelError::unsupported(format!("quantization_config.{key}"), brief(found), SUPPORTED)
}

fn compressed_tensors(value: &Value, keys: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    let format = keys.string("format")?.unwrap_or("pack-quantized");
    if !["pack-quantized", "float-quantized"].contains(&format) {
        return Err(unsupported("format", &Value::from(format)));
    }
    let groups = keys.get("config_groups").and_then(Value::as_object);
    let Some(groups) = groups.filter(|groups| !groups.is_empty()) else {
        return Err(ModelError::config("quantization_config.config_groups", "is missing"));
    };
    let mut coding = None;
    for group in groups.values() {
        let Some(weights) = group.get("weights") else { return Err(unsupported("config_groups", value)) };
        let weights = Keys::of(weights, "quantization_config.config_groups.weights.")?;
        let read = match format {
            "pack-quantized" => packed_integers(group, &weights)?,
            _ => quantized_floats(group, &weights)?,
        };
        if coding.replace(read.clone()).is_some_and(|other| other != read) {
            let problem = "has groups with different codings";
            return Err(ModelError::config("quantization_config.config_groups", problem));
        }
    }
    coding.ok_or_else(|| ModelError::config("quantization_config.config_groups", "is missing"))
}

/// Refuses activations that are rounded in a way that the file fixes.
fn refuse_activations(group: &Value, refused: impl Fn(&Value) -> bool) -> Result<(), ModelError> {
    for key in ["input_activations", "output_activations"] {
        if let Some(found) = group.get(key).filter(|found| !found.is_null() && refused(found)) {
            return Err(unsupported(key, found));
        }
    }
    Ok(())
}

fn expect(weights: &Keys<'_>, wanted: &[(&str, Value)]) -> Result<(), ModelError> {
    for (key, wanted) in wanted {
        let found = weights.get(key).cloned().unwrap_or_default();
        if found != *wanted {
            return Err(unsupported(&format!("config_groups.weights.{key}"), &found));
        }
    }
    Ok(())
}

fn packed_integers(group: &Value, weights: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    refuse_activations(group, |_| true)?;
    expect(weights, &[("num_bits", Value::from(4)), ("type", Value::from("int"))])?;
    let refuse = |key: &str| {
        let found = weights.get(key).cloned().unwrap_or_default();
        Err(unsupported(&format!("config_groups.weights.{key}"), &found))
    };
    let group = match weights.string("strategy")? {
        Some("group") => match weights.size("group_size")? {
            Some(size) if size > 0 && size.is_multiple_of(32) => Some(size),
            _ => return refuse("group_size"),
        },
        Some("channel") => None,
        _ => return refuse("strategy"),
    };
    // The columns of a weight keep their places, unless groups were made by their order.
    let kept = [Value::Null, Value::Bool(false), Value::from("weight"), Value::from("static")];
    if weights.get("actorder").is_some_and(|order| !kept.contains(order)) {
        return refuse("actorder");
    }
    let symmetric = weights.boolean("symmetric")?.unwrap_or(true);
    Ok(WeightCoding::Int4(Int4Coding { packing: IntegerPacking::Rows, group, symmetric }))
}

fn quantized_floats(group: &Value, weights: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    // Weights stand for the same values, whether or not another executor would round activations beside them.
    refuse_activations(group, |found| found.get("type") != Some(&Value::from("float")))?;
    expect(weights, &[("num_bits", Value::from(8)), ("type", Value::from("float"))])?;
    if let Some(found) = weights.get("symmetric").filter(|found| **found != Value::Bool(true)) {
        return Err(unsupported("config_groups.weights.symmetric", found));
    }
    match weights.string("strategy")? {
        Some("channel" | "tensor") => Ok(WeightCoding::Fp8(Fp8Coding::RowsOrWhole)),
        Some("block") => {
            let key = "quantization_config.config_groups.weights.block_structure";
            let block = block(key, weights.get("block_structure").unwrap_or(&Value::Null))?;
            Ok(WeightCoding::Fp8(Fp8Coding::Blocks { block, inverse_name: false }))
        }
        _ => {
            let found = weights.get("strategy").cloned().unwrap_or_default();
            Err(unsupported("config_groups.weights.strategy", &found))
        }
    }
}

fn fp8(keys: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    let key = "quantization_config.weight_block_size";
    if let Some(format) = keys.string("fmt")?.filter(|format| *format != "e4m3") {
        return Err(ModelError::unsupported("quantization_config.fmt", format!("\"{format}\""), "e4m3"));
    }
    match keys.get("weight_block_size") {
        None => Ok(WeightCoding::Fp8(Fp8Coding::RowsOrWhole)),
        Some(value) => {
            let block = block(key, value)?;
            Ok(WeightCoding::Fp8(Fp8Coding::Blocks { block, inverse_name: true }))
        }
    }
}

fn block(key: &str, value: &Value) -> Result<[usize; 2], ModelError> {
    let sizes: Option<Vec<usize>> =
        value.as_array().map(|sizes| sizes.iter().map(|size| size.as_u64().unwrap_or(0) as usize).collect());
    match sizes.as_deref() {
        Some(&[rows, columns]) if (1..=MAX_BLOCK).contains(&rows) && (1..=MAX_BLOCK).contains(&columns) => {
            Ok([rows, columns])
        }
        _ => Err(ModelError::config(key, format!("{} is not a pair of sizes", brief(value)))),
    }
}

/// Returns the size of groups of GPTQ and AWQ, for which -1 is a whole row.
fn group_size(keys: &Keys<'_>) -> Result<Option<usize>, ModelError> {
    match keys.get("group_size").map_or(Some(128), Value::as_i64) {
        Some(-1) => Ok(None),
        Some(size) if size > 0 && size <= MAX_BLOCK as i64 && size % 32 == 0 => Ok(Some(size as usize)),
        _ => {
            let found = keys.get("group_size").cloned().unwrap_or_default();
            Err(ModelError::unsupported(
                "quantization_config.group_size",
                brief(&found),
                "multiples of 32, -1",
            ))
        }
    }
}

fn four_bits(keys: &Keys<'_>) -> Result<(), ModelError> {
    for key in ["bits", "w_bit"] {
        if let Some(bits) = keys.size(key)?.filter(|bits| *bits != 4) {
            return Err(ModelError::unsupported(format!("quantization_config.{key}"), bits, "4"));
        }
    }
    Ok(())
}

fn gptq(keys: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    four_bits(keys)?;
    if keys.boolean("desc_act")? == Some(true) {
        return Err(ModelError::unsupported(
            "quantization_config.desc_act",
            true,
            "false: columns that were reordered by activation (act-order) are not supported",
        ));
    }
    let zero_offset = match keys.string("checkpoint_format")?.unwrap_or("gptq") {
        "gptq" => 1,
        "gptq_v2" => 0,
        other => {
            let found = format!("\"{other}\"");
            return Err(ModelError::unsupported(
                "quantization_config.checkpoint_format",
                found,
                "gptq, gptq_v2",
            ));
        }
    };
    let symmetric = keys.boolean("sym")?.unwrap_or(false);
    let packing = IntegerPacking::Gptq { zero_offset };
    Ok(WeightCoding::Int4(Int4Coding { packing, group: group_size(keys)?, symmetric }))
}

fn awq(keys: &Keys<'_>) -> Result<WeightCoding, ModelError> {
    four_bits(keys)?;
    match keys.string("version")?.unwrap_or("gemm") {
        version if version.eq_ignore_ascii_case("gemm") => {}
        other => {
            let found = format!("\"{other}\"");
            return Err(ModelError::unsupported("quantization_config.version", found, "gemm"));
        }
    }
    let symmetric = keys.boolean("zero_point")? == Some(false);
    Ok(WeightCoding::Int4(Int4Coding { packing: IntegerPacking::Awq, group: group_size(keys)?, symmetric }))
}
