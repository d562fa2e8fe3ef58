//! A mixture as a GGUF file that is made from a dense one: its metadata, and its weights in their formats.
//!
//! Invariant: no value is rounded. Experts' gates and ups are the bytes of the dense matrices; the scales of down projections are
//! multiplied if half precision holds the products, and a matrix where it does not becomes F32.

use std::path::Path;

use half::{bf16, f16};
use skep_kernels::{DType, dequantize};

use super::family::Family;
use super::{Cut, refused};
use crate::checkpoint::{Checkpoint, block_scales};
use crate::config::RopePairing;
use crate::error::ModelError;
use crate::gguf::header::{NewTensor, boolean, float, header, string, unsigned};
use crate::gguf::{DEFAULT_ALIGNMENT, GgufFile, GgufTensor};
use crate::output::Sink;

/// The weights of a dense feed-forward block, without `blk.N.` and `.weight`.
const GATE: &str = "ffn_gate";
const UP: &str = "ffn_up";
const DOWN: &str = "ffn_down";

/// The contents of the file.
pub(super) struct GgufPlan<'a> {
    header: Vec<u8>,
    tensors: Vec<Placed<'a>>,
    alignment: usize,
    bytes: u64,
}

/// A tensor of the file.
struct Placed<'a> {
    name: String,
    /// Innermost dimension first, as in the file.
    dimensions: Vec<usize>,
    dtype: DType,
    content: Content<'a>,
}

enum Content<'a> {
    /// Bytes of the dense model.
    Same(&'a [u8]),
    /// A down projection, `[rows, columns]`, of which each expert gets some columns of all rows.
    Columns(Columns<'a>),
    /// Values that the dense model does not have.
    Made(Vec<f32>),
}

struct Columns<'a> {
    name: &'a str,
    data: &'a [u8],
    dtype: DType,
    rows: usize,
    columns: usize,
    experts: usize,
    factor: f32,
}

/// Returns the number of neighbors in a row of a down projection that its format keeps together.
pub(super) fn unit(checkpoint: &Checkpoint) -> Result<usize, ModelError> {
    let Some((file, _)) = checkpoint.gguf() else {
        let problem =
            "gguf needs a GGUF file as the source, whose vocabulary it takes over; the other formats do not";
        return Err(refused("format", problem.to_owned()));
    };
    let blocks = file.tensors().iter().filter(|tensor| feed_forward(&tensor.name) == Some(DOWN));
    Ok(blocks.map(|tensor| tensor.dtype.block_len()).max().unwrap_or(1))
}

impl<'a> GgufPlan<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, cut: &Cut) -> Result<Self, ModelError> {
        let Some((file, files)) = checkpoint.gguf() else {
            return Err(refused("format", "gguf needs a GGUF file as the source".to_owned()));
        };
        let is_interleaved = checkpoint.config().rope.pairing == RopePairing::Interleaved;
        if is_interleaved != cut.family.is_interleaved_in_gguf() {
            let problem = format!(
                "GGUF files of {:?} have the rows of rotated heads in another order than the source; the other formats reorder them",
                cut.family.architecture()
            );
            return Err(refused("format", problem));
        }
        let mut tensors = Vec::new();
        for tensor in file.tensors() {
            place(tensor, &files[tensor.file][tensor.bytes.clone()], cut, &mut tensors)?;
        }
        let alignment = file.unsigned("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT) as usize;
        let entries: Vec<NewTensor<'_>> = tensors.iter().map(Placed::entry).collect();
        let header = header(&keys(file, &files[0], cut)?, &entries, alignment)?;
        let padded = |length: usize| length.next_multiple_of(alignment) as u64;
        let bytes = padded(header.len()) + entries.iter().map(|entry| padded(entry.length())).sum::<u64>();
        Ok(GgufPlan { header, tensors, alignment, bytes })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Creates the file.
    pub(super) fn write(&self, path: &Path, watch: &dyn Fn(u64)) -> Result<(), ModelError> {
        let mut sink = Sink::create(path.to_owned(), watch)?;
        sink.write(&self.header)?;
        sink.pad(self.alignment)?;
        for tensor in &self.tensors {
            match &tensor.content {
                Content::Same(bytes) => sink.write(bytes)?,
                Content::Columns(columns) => columns.write(tensor.dtype, &mut sink)?,
                Content::Made(values) => sink.write(&bytes_of(values))?,
            }
            sink.pad(self.alignment)?;
        }
        sink.finish()
    }
}

impl Placed<'_> {
    fn entry(&self) -> NewTensor<'_> {
        NewTensor { name: &self.name, dimensions: &self.dimensions, dtype: self.dtype }
    }
}

/// Adds what a tensor of the dense model becomes.
fn place<'a>(
    tensor: &'a GgufTensor,
    data: &'a [u8],
    cut: &Cut,
    tensors: &mut Vec<Placed<'a>>,
) -> Result<(), ModelError> {
    let (dtype, experts) = (tensor.dtype, cut.experts);
    let (part, [rows, columns]) = match (feed_forward(&tensor.name), &tensor.shape[..]) {
        (Some(part), &[rows, columns]) => (part, [rows, columns]),
        _ => {
            let name = match cut.family {
                // This family gives the norm before the feed-forward block another name.
                Family::Glm4Moe => tensor.name.replace(".ffn_norm.", ".post_attention_norm."),
                Family::Mixtral | Family::Qwen3Moe => tensor.name.clone(),
            };
            let dimensions = tensor.shape.iter().rev().copied().collect();
            tensors.push(Placed { name, dimensions, dtype, content: Content::Same(data) });
            return Ok(());
        }
    };
    let name = tensor.name.replace(".weight", "_exps.weight");
    if part != DOWN {
        // The rows of an expert are neighbors, so the bytes stay the same.
        let dimensions = vec![columns, rows / experts, experts];
        tensors.push(Placed { name, dimensions, dtype, content: Content::Same(data) });
        if part == GATE {
            routers(&tensor.name, columns, cut, tensors);
        }
        return Ok(());
    }
    let factor = cut.down_factor();
    let is_exact = factor == 1.0 || scale(dtype, factor, &mut data.to_vec());
    let dtype = if is_exact { dtype } else { DType::F32 };
    let content = Columns { name: &tensor.name, data, dtype: tensor.dtype, rows, columns, experts, factor };
    let dimensions = vec![columns / experts, rows, experts];
    tensors.push(Placed { name, dimensions, dtype, content: Content::Columns(content) });
    Ok(())
}

/// Adds the router of the layer whose gates have this name.
fn routers(gate: &str, hidden: usize, cut: &Cut, tensors: &mut Vec<Placed<'_>>) {
    let layer = gate.split('.').nth(1).and_then(|layer| layer.parse().ok()).unwrap_or(0);
    let mut add = |name: &str, dimensions: Vec<usize>, values: Vec<f32>| {
        let name = format!("blk.{layer}.{name}");
        tensors.push(Placed { name, dimensions, dtype: DType::F32, content: Content::Made(values) });
    };
    add("ffn_gate_inp.weight", vec![hidden, cut.experts], cut.router(layer, hidden));
    if cut.family.has_factor() {
        add("exp_probs_b.bias", vec![cut.experts], vec![0.0; cut.experts]);
    }
}

impl Columns<'_> {
    /// Writes the columns of each expert in a format, which is that of the source or F32.
    fn write(&self, to: DType, sink: &mut Sink<'_>) -> Result<(), ModelError> {
        let wrong = |problem: String| ModelError::tensor(self.name, problem);
        let whole = || wrong(format!("its rows are not whole blocks of {}", self.dtype));
        let width = self.columns / self.experts;
        let row_bytes = self.dtype.row_bytes(self.columns).ok_or_else(whole)?;
        let own_bytes = self.dtype.row_bytes(width).ok_or_else(whole)?;
        for expert in 0..self.experts {
            let rows = self.data.chunks_exact(row_bytes);
            let mut own: Vec<u8> =
                rows.flat_map(|row| &row[expert * own_bytes..(expert + 1) * own_bytes]).copied().collect();
            if to == self.dtype {
                scale(to, self.factor, &mut own);
            } else {
                let mut values = vec![0.0; self.rows * width];
                dequantize(self.dtype, &own, &mut values).map_err(|error| wrong(error.to_string()))?;
                values.iter_mut().for_each(|value| *value *= self.factor);
                own = bytes_of(&values);
            }
            sink.write(&own)?;
        }
        Ok(())
    }
}

/// Multiplies values by a factor in place. Returns whether the format holds the products as exactly as the values; otherwise, some
/// bytes may have changed.
fn scale(dtype: DType, factor: f32, bytes: &mut [u8]) -> bool {
    let half = |bytes: &mut [u8]| {
        let product = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32() * factor;
        let rounded = f16::from_f32(product);
        bytes.copy_from_slice(&rounded.to_le_bytes());
        rounded.to_f32() == product
    };
    match dtype {
        DType::F32 => {
            let (values, _) = bytes.as_chunks_mut::<4>();
            values.iter_mut().for_each(|value| *value = (f32::from_le_bytes(*value) * factor).to_le_bytes());
            true
        }
        DType::F16 => bytes.chunks_exact_mut(2).all(half),
        DType::BF16 => bytes.chunks_exact_mut(2).all(|bytes| {
            let product = bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32() * factor;
            let rounded = bf16::from_f32(product);
            bytes.copy_from_slice(&rounded.to_le_bytes());
            rounded.to_f32() == product
        }),
        _ => {
            let (offsets, _) = block_scales(dtype);
            // Formats without scales in half precision are not multiplied.
            !offsets.is_empty()
                && bytes
                    .chunks_exact_mut(dtype.block_bytes())
                    .all(|block| offsets.iter().all(|offset| half(&mut block[*offset..*offset + 2])))
        }
    }
}

/// Returns the part of a weight of a dense feed-forward block: [`GATE`], [`UP`] or [`DOWN`].
fn feed_forward(name: &str) -> Option<&'static str> {
    let (_, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let part = part.strip_suffix(".weight")?;
    [GATE, UP, DOWN].into_iter().find(|known| *known == part)
}

/// Returns the metadata: the keys of the source under the name of the family, and those of the experts.
fn keys(file: &GgufFile, bytes: &[u8], cut: &Cut) -> Result<Vec<(String, Vec<u8>)>, ModelError> {
    let old = file.string("general.architecture")?.unwrap_or_default();
    let new = cut.family.gguf_name();
    let size = |size: usize| unsigned(size as u32);
    let mut keys = vec![("general.architecture".to_owned(), string(new))];
    let mut add = |key: &str, value: Vec<u8>| keys.push((format!("{new}.{key}"), value));
    add("expert_count", size(cut.experts));
    add("expert_used_count", size(cut.used));
    match cut.family {
        Family::Mixtral => add("feed_forward_length", size(cut.width)),
        Family::Qwen3Moe => add("expert_feed_forward_length", size(cut.width)),
        Family::Glm4Moe => {
            add("expert_feed_forward_length", size(cut.width));
            add("expert_shared_count", size(0));
            add("leading_dense_block_count", size(0));
            // The logistic function.
            add("expert_gating_func", size(2));
            add("expert_weights_norm", boolean(true));
            add("expert_weights_scale", float(cut.experts as f32));
        }
    }
    for (key, value) in file.raw_keys(bytes)? {
        let name = match key.strip_prefix(old).filter(|rest| rest.starts_with('.')) {
            Some(rest) => format!("{new}{rest}"),
            None => key.to_owned(),
        };
        let is_split = key.starts_with("split.");
        if !is_split && keys.iter().all(|(known, _)| *known != name) {
            keys.push((name, value.to_vec()));
        }
    }
    Ok(keys)
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_multiplied_only_if_their_format_holds_the_products() {
        let block = |half: u16| [&half.to_le_bytes()[..], &[7; 32]].concat();
        let mut ordinary = block(0x1801);
        assert!(scale(DType::Q8_0, 4.0, &mut ordinary));
        assert_eq!(ordinary, block(0x2001));
        assert!(!scale(DType::Q8_0, 3.0, &mut block(0x1801)), "1025 × 3 needs a bit more");
        assert!(!scale(DType::Q8_0, 4.0, &mut block(0x7801)), "infinity");
        let mut subnormal = block(1);
        assert!(scale(DType::Q8_0, 4.0, &mut subnormal));
        assert_eq!(subnormal, block(4));
        let mut single = 0.1f32.to_le_bytes().to_vec();
        assert!(scale(DType::F32, 3.0, &mut single));
        assert_eq!(single, (0.1f32 * 3.0).to_le_bytes());
        assert!(scale(DType::BF16, 8.0, &mut bf16::from_f32(0.3).to_le_bytes()));
        assert!(!scale(DType::F16, 3.0, &mut 0x3c01u16.to_le_bytes()));
        assert!(!scale(DType::Mxfp4, 2.0, &mut [120; 17]));
    }
}
