//! One of the threads that copy weights to a device. Each of them fills host buffers of its own, and the device copies from
//! one while another is filled.
//!
//! Invariant: a buffer is filled only after the device has copied what it held before.

use std::borrow::Cow;
use std::ops::Range;

use half::{bf16, f16};
use skep_kernels::cuda::Activation;
use skep_kernels::cuda::device::{Device, DeviceBuffer, Event, HostBuffer};
use skep_kernels::cuda::operation::ACTIVATION_BYTES;
use skep_kernels::cuda::tiles::{TILE_OUTPUTS, Tiles};
use skep_kernels::{DType, dequantize};

use super::layout::{Form, Load};
use crate::checkpoint::{Checkpoint, Coding, Tensor};
use crate::error::ModelError;
use crate::shard::ShardPlan;
use crate::weights::part;

/// Number of host buffers of a thread.
const STAGES: usize = 2;

/// The part of a load that a thread copies at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of the load.
    pub(super) load: usize,
    /// The rows of the rank's part; `None` means the whole of a tensor that has to be decoded first, or of a vector.
    pub(super) rows: Option<Range<usize>>,
}

impl Piece {
    /// Returns the rows of the tensor that the piece reads; none means the whole tensor.
    pub(super) fn reads(&self, load: &Load) -> Vec<Range<usize>> {
        match (&self.rows, &load.plan) {
            (None, _) => Vec::new(),
            (Some(rows), ShardPlan::Rows(ranges)) => within(ranges, rows).collect(),
            (Some(rows), ShardPlan::Replicated | ShardPlan::Columns(_)) => vec![rows.clone()],
        }
    }
}

/// Returns the pieces of all loads, of about `stage_bytes` each, in order, and the size of the largest row on the device.
pub(super) fn pieces(
    checkpoint: &Checkpoint,
    loads: &[Load],
    activation: Activation,
    stage_bytes: usize,
) -> Result<(Vec<Piece>, usize), ModelError> {
    let (mut pieces, mut widest) = (Vec::new(), 0);
    for (index, load) in loads.iter().enumerate() {
        let tensor = checkpoint.expect(&load.name, &load.shape)?;
        let [rows, columns] = load.shape[..] else {
            widest = widest.max(load.shape[0] * ACTIVATION_BYTES);
            pieces.push(Piece { load: index, rows: None });
            continue;
        };
        let (rows, columns) = match &load.plan {
            ShardPlan::Replicated => (rows, columns),
            ShardPlan::Rows(ranges) => (ranges.iter().map(Range::len).sum(), columns),
            ShardPlan::Columns(range) => (rows, range.len()),
        };
        let unit = Change::of(load, &tensor, activation, columns)?.unit(columns);
        widest = widest.max(unit.bytes).max(columns * ACTIVATION_BYTES);
        if !matches!(tensor.coding, Coding::Values) {
            pieces.push(Piece { load: index, rows: None });
            continue;
        }
        let at_once = (stage_bytes / unit.bytes.max(1)).max(1) * unit.rows;
        let starts = (0..rows).step_by(at_once);
        pieces.extend(
            starts.map(|start| Piece { load: index, rows: Some(start..(start + at_once).min(rows)) }),
        );
    }
    Ok((pieces, widest))
}

/// Host buffers, from which the device copies in turn.
pub(super) struct Staging<'a> {
    device: &'a Device,
    to: &'a DeviceBuffer,
    activation: Activation,
    stages: Vec<(HostBuffer, Event)>,
    next: usize,
    values: Vec<f32>,
}

/// The change of rows of a matrix on their way to the device.
#[derive(Clone, Copy)]
enum Change {
    /// They keep their format, which has this many bytes per row.
    Nothing { row_bytes: usize },
    /// Rows of this format become activations.
    Activations { from: DType },
    /// Blocks of this format become tiles of another one, which have this many bytes for all inputs.
    Tiles { from: DType, dtype: DType, tiles: Tiles, line_bytes: usize },
}

/// Rows that are changed together, and their size on the device.
#[derive(Clone, Copy)]
struct Unit {
    rows: usize,
    bytes: usize,
}

impl Unit {
    /// Returns the size of some rows, of which the last ones may be fewer than a unit.
    fn bytes_of(self, rows: usize) -> usize {
        rows.div_ceil(self.rows) * self.bytes
    }
}

impl Change {
    /// Returns what happens to a tensor of which the rank has this many columns.
    fn of(
        load: &Load,
        tensor: &Tensor<'_>,
        activation: Activation,
        columns: usize,
    ) -> Result<Self, ModelError> {
        let from = tensor.dtype;
        if let Form::Tiles(dtype) = load.form {
            if from != dtype && (from, dtype) != (DType::Q4_0, DType::Int4) {
                let problem = "half precision does not hold one of its scales; use `--device cpu`";
                return Err(ModelError::tensor(tensor.name, problem.to_owned()));
            }
            let sized = Tiles::of(dtype).and_then(|tiles| Some((tiles, tiles.line_bytes(columns)?)));
            let (tiles, line_bytes) = sized.ok_or_else(|| not_whole_blocks(tensor, columns))?;
            return Ok(Change::Tiles { from, dtype, tiles, line_bytes });
        }
        let is_activation =
            matches!((from, activation), (DType::BF16, Activation::Bf16) | (DType::F16, Activation::F16));
        Ok(match is_activation {
            true => Change::Nothing { row_bytes: row_bytes(tensor, columns)? },
            false => Change::Activations { from },
        })
    }

    fn unit(self, columns: usize) -> Unit {
        match self {
            Change::Nothing { row_bytes } => Unit { rows: 1, bytes: row_bytes },
            Change::Activations { .. } => Unit { rows: 1, bytes: columns * ACTIVATION_BYTES },
            Change::Tiles { line_bytes, .. } => Unit { rows: TILE_OUTPUTS, bytes: line_bytes },
        }
    }
}

impl<'a> Staging<'a> {
    /// Creates buffers of `bytes` each, which hold at least the widest row.
    pub(super) fn new(
        device: &'a Device,
        to: &'a DeviceBuffer,
        activation: Activation,
        bytes: usize,
    ) -> Result<Self, ModelError> {
        let stage = |_| Ok((device.host_buffer(bytes)?, device.event()?));
        let stages = (0..STAGES).map(stage).collect::<Result<_, ModelError>>()?;
        Ok(Staging { device, to, activation, stages, next: 0, values: Vec::new() })
    }

    /// Copies a piece of a load, and returns the number of bytes on the device.
    pub(super) fn copy(
        &mut self,
        load: &Load,
        piece: &Piece,
        tensor: &Tensor<'_>,
    ) -> Result<usize, ModelError> {
        match &piece.rows {
            Some(rows) => self.copy_rows(load, rows, tensor),
            None => self.copy_whole(load, tensor),
        }
    }

    /// Copies some rows of a tensor whose bytes are its values.
    fn copy_rows(
        &mut self,
        load: &Load,
        rows: &Range<usize>,
        tensor: &Tensor<'_>,
    ) -> Result<usize, ModelError> {
        let bytes_of = |columns: usize| row_bytes(tensor, columns);
        let (whole, all) = (bytes_of(load.shape[1])?, load.shape[1]);
        let (parts, columns) = match &load.plan {
            ShardPlan::Columns(range) if range.len() < all => {
                let bytes = bytes_of(range.start)?..bytes_of(range.end)?;
                let row = |row: usize| &tensor.data[row * whole..][bytes.clone()];
                (rows.clone().map(row).collect(), range.len())
            }
            ShardPlan::Rows(ranges) => {
                let of = |rows: Range<usize>| &tensor.data[rows.start * whole..rows.end * whole];
                (within(ranges, rows).map(of).collect(), all)
            }
            ShardPlan::Replicated | ShardPlan::Columns(_) => {
                (vec![&tensor.data[rows.start * whole..rows.end * whole]], all)
            }
        };
        let change = Change::of(load, tensor, self.activation, columns)?;
        let unit = change.unit(columns);
        let (at, bytes) = (load.offsets.start + unit.bytes_of(rows.start), unit.bytes_of(rows.len()));
        self.put(&parts, change, columns, at, bytes)?;
        Ok(bytes)
    }

    /// Copies all of the rank's part of a tensor.
    fn copy_whole(&mut self, load: &Load, tensor: &Tensor<'_>) -> Result<usize, ModelError> {
        let (dtype, content) = tensor.content()?;
        let tensor = &tensor.with_content(dtype, &content);
        if let [rows] = load.shape[..] {
            let mut values = vec![0.0; rows];
            dequantize(tensor.dtype, tensor.data, &mut values)
                .map_err(|error| ModelError::tensor(tensor.name, error.to_string()))?;
            if let ShardPlan::Rows(ranges) = &load.plan {
                values = ranges.iter().flat_map(|range| &values[range.clone()]).copied().collect();
            }
            let mut bytes = vec![0; values.len() * ACTIVATION_BYTES];
            encode(self.activation, &values, &mut bytes);
            let change = Change::Nothing { row_bytes: bytes.len() };
            self.put(&[&bytes], change, values.len(), load.offsets.start, bytes.len())?;
            return Ok(bytes.len());
        }
        let (data, columns): (Cow<'_, [u8]>, usize) = part(tensor, load.shape[1], &load.plan)?;
        let change = Change::of(load, tensor, self.activation, columns)?;
        let unit = change.unit(columns);
        let row_bytes = row_bytes(tensor, columns)?.max(1);
        let at_once = (self.stages[0].0.bytes().len() / unit.bytes.max(1)).max(1) * unit.rows;
        let mut at = load.offsets.start;
        for rows in data.chunks(at_once * row_bytes) {
            let bytes = unit.bytes_of(rows.len() / row_bytes);
            self.put(&[rows], change, columns, at, bytes)?;
            at += bytes;
        }
        Ok(at - load.offsets.start)
    }

    /// Fills the next buffer with whole rows of this many columns, which take `bytes` on the device, and has the device copy it
    /// to `at`.
    fn put(
        &mut self,
        rows: &[&[u8]],
        change: Change,
        columns: usize,
        at: usize,
        bytes: usize,
    ) -> Result<(), ModelError> {
        let (stage, free) = &mut self.stages[self.next];
        // An event that was never recorded is not waited for.
        free.synchronize()?;
        let mut out = &mut stage.bytes_mut()[..bytes];
        match change {
            Change::Nothing { .. } => {
                for part in rows {
                    out[..part.len()].copy_from_slice(part);
                    out = &mut out[part.len()..];
                }
            }
            Change::Activations { from } => {
                for part in rows {
                    let row_bytes = from.row_bytes(columns).unwrap_or(part.len()).max(1);
                    self.values.resize(part.len() / row_bytes * columns, 0.0);
                    dequantize(from, part, &mut self.values)?;
                    let bytes = self.values.len() * ACTIVATION_BYTES;
                    encode(self.activation, &self.values, &mut out[..bytes]);
                    out = &mut out[bytes..];
                }
            }
            // The rows of a tile may be in several parts.
            Change::Tiles { from, dtype, tiles, .. } => {
                let blocks = match rows {
                    [part] => Cow::Borrowed(*part),
                    parts => Cow::Owned(parts.concat()),
                };
                let blocks = if from == dtype { blocks } else { Cow::Owned(with_zero_points(&blocks)) };
                tiles.pack(&blocks, columns, out)?;
            }
        }
        let to = self.to.slice().part(at..at + bytes)?;
        self.device.upload(stage, 0, to)?;
        free.record()?;
        self.next = (self.next + 1) % STAGES;
        Ok(())
    }
}

/// Returns the blocks of Q4_0 as those of INT4, whose zero points are 8.
fn with_zero_points(blocks: &[u8]) -> Vec<u8> {
    let blocks = blocks.chunks_exact(DType::Q4_0.block_bytes());
    blocks.flat_map(|block| [&block[..2], &[8], &block[2..]].concat()).collect()
}

fn row_bytes(tensor: &Tensor<'_>, columns: usize) -> Result<usize, ModelError> {
    tensor.dtype.row_bytes(columns).ok_or_else(|| not_whole_blocks(tensor, columns))
}

fn not_whole_blocks(tensor: &Tensor<'_>, columns: usize) -> ModelError {
    let problem = format!("{columns} columns are not a whole number of {} blocks", tensor.dtype);
    ModelError::tensor(tensor.name, problem)
}

/// Returns the parts of `ranges` that the positions `wanted` of all their elements, one after the other, stand for.
fn within(ranges: &[Range<usize>], wanted: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    ranges
        .iter()
        .scan(0, |before, range| {
            let first = *before;
            *before += range.len();
            let local = |position: usize| range.start + position.clamp(first, first + range.len()) - first;
            Some(local(wanted.start)..local(wanted.end))
        })
        .filter(|range| !range.is_empty())
}

fn encode(activation: Activation, values: &[f32], out: &mut [u8]) {
    let pairs = values.iter().zip(out.chunks_exact_mut(ACTIVATION_BYTES));
    match activation {
        Activation::Bf16 => pairs
            .for_each(|(value, out)| out.copy_from_slice(&bf16::from_f32(*value).to_bits().to_le_bytes())),
        Activation::F16 => {
            pairs.for_each(|(value, out)| out.copy_from_slice(&f16::from_f32(*value).to_bits().to_le_bytes()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_in_several_ranges_are_found_in_each() {
        let ranges = [10..14, 20..21, 30..35];
        for (wanted, expected) in [
            (0..10, "[10..14, 20..21, 30..35]"),
            (0..4, "[10..14]"),
            (3..6, "[13..14, 20..21, 30..31]"),
            (5..5, "[]"),
            (9..10, "[34..35]"),
        ] {
            let found: Vec<_> = within(&ranges, &wanted).collect();
            assert_eq!(format!("{found:?}"), expected, "{wanted:?}");
        }
    }
}
