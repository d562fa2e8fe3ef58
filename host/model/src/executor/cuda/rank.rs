//! One rank on its device: its weights, pages and buffers, and the launches of a step.
//!
//! Invariant: a rank only enqueues work and never waits for its queue. The only slices that other ranks write are
//! those of the `Peers` that it is given.

use std::ops::Range;
use std::sync::Arc;

use skep_kernels::KernelError;
use skep_kernels::cuda::PAGE_POSITIONS;
use skep_kernels::cuda::blas::Blas;
use skep_kernels::cuda::device::{Device, DeviceBuffer, Event, HostBuffer, Slice};
use skep_kernels::cuda::matmul::OutputFormat;
use skep_kernels::cuda::operation::{
    ACTIVATION_BYTES, Decode, Embedding, GatedProduct, Pages, Prefill, Product, ProductRows, Products, Qkv,
    RmsNorm, Splits,
};

use super::layout::{LayerOffsets, MatrixOffsets, TokenOffsets};
use super::shape::Shape;
use super::step::Step;
use super::sums::Reader;
use super::weights::{DeviceWeights, size, table_format};
use super::workspace::{LayerPages, Sizes, WorkspaceOffsets, logits_stride};
use crate::batch::PAGE_TOKENS;
use crate::error::ModelError;
use crate::models::parts::{Input, Part, parts};

const _: () = assert!(PAGE_TOKENS == PAGE_POSITIONS as usize, "kernels have pages of another size");

pub(super) struct Rank {
    pub(super) device: Device,
    /// The library for dense weights, if it is available and may be used.
    pub(super) blas: Option<Blas>,
    pub(super) weights: Arc<DeviceWeights>,
    pub(super) shape: Shape,
    pub(super) sizes: Sizes,
    pub(super) offsets: WorkspaceOffsets,
    pub(super) workspace: Arc<DeviceBuffer>,
    pub(super) pages: Arc<DeviceBuffer>,
    /// The logits, f32 `[logit rows, logits_stride]`, on the rank that draws.
    pub(super) logits: Option<Arc<DeviceBuffer>>,
    /// The failure word in the memory of the host.
    pub(super) report: HostBuffer,
    /// Marks the end of everything enqueued for this rank's part of a step.
    pub(super) done: Event,
    /// Marks that tokens are drawn; `known` marks that the host knows them.
    pub(super) drawn: Event,
    pub(super) known: Event,
    /// Marks that this rank has copied what it needs from the buffers of the previous stage.
    pub(super) handed_on: Event,
    /// Marks that the step's arrays have been copied, with one event per input buffer.
    pub(super) copied: [Event; 2],
}

impl Rank {
    pub(super) fn workspace_slice(
        &self,
        range: &Range<usize>,
        bytes: usize,
    ) -> Result<Slice<'_>, ModelError> {
        let start = range.start;
        let fits = bytes <= range.len();
        let wide =
            || KernelError::Shape { op: "step", what: "a buffer", expected: bytes, found: range.len() };
        if fits { Ok(self.workspace.slice().part(start..start + bytes)?) } else { Err(wide().into()) }
    }

    /// Returns the buffer for rows of activations.
    fn rows(&self, range: &Range<usize>, rows: usize, width: usize) -> Result<Slice<'_>, ModelError> {
        self.workspace_slice(range, rows * width * ACTIVATION_BYTES)
    }

    /// Returns an array of the step.
    fn array(&self, of: &Range<usize>) -> Result<Slice<'_>, ModelError> {
        let start = self.offsets.inputs.start;
        Ok(self.workspace.slice().part(start + of.start..start + of.end)?)
    }

    /// Returns the buffers that its launches use.
    pub(super) fn buffers(&self) -> impl Iterator<Item = Arc<DeviceBuffer>> {
        let always = [&self.workspace, &self.pages, &self.weights.buffer];
        always.into_iter().chain(&self.logits).cloned()
    }

    /// Returns the failure word, which the device reads while it waits: 1 + the rank that this one waited for without success, or 0.
    pub(super) fn failure(&self) -> Result<Slice<'_>, ModelError> {
        self.workspace_slice(&self.offsets.meeting.failure, 4)
    }

    /// Returns the rank that this one waited for without success, if the device has finished the step.
    pub(super) fn missing_peer(&self) -> Option<usize> {
        self.report.word(0).checked_sub(1).map(|rank| rank as usize)
    }

    /// Resets the signals and the failure words, so that no rank counts as waiting or as arrived. The queue must have been
    /// waited for.
    pub(super) fn forget_meetings(&self) -> Result<(), ModelError> {
        self.report.set_word(0, 0);
        let signals =
            self.workspace_slice(&self.offsets.meeting.signals, self.offsets.meeting.signals.len())?;
        self.device.clear(signals)?;
        Ok(self.device.clear(self.failure()?)?)
    }

    /// Returns the buffers for drawing the tokens at these positions: the inputs, the adjusted logits, the states of
    /// rows, the tokens, and all logits.
    pub(super) fn draw_workspace(
        &self,
        input_bytes: usize,
        tokens: Range<usize>,
    ) -> Result<[Slice<'_>; 5], ModelError> {
        let (Some(draw), Some(logits)) = (&self.offsets.draw, &self.logits) else {
            return Err(ModelError::Batch { problem: "this rank has no logits".to_owned() });
        };
        let vocabulary = self.shape.vocabulary;
        Ok([
            self.workspace_slice(&draw.inputs, input_bytes)?,
            self.workspace_slice(&draw.adjusted, tokens.len() * vocabulary * 4)?,
            self.workspace_slice(&draw.states, draw.states.len())?,
            self.drawn_tokens(tokens.end)?.part(tokens.start * 4..tokens.end * 4)?,
            logits.slice(),
        ])
    }

    /// Returns the tokens that were drawn last.
    pub(super) fn drawn_tokens(&self, count: usize) -> Result<Slice<'_>, ModelError> {
        let draw = self.offsets.draw.as_ref().map(|draw| &draw.tokens);
        self.workspace_slice(draw.unwrap_or(&(0..0)), count * 4)
    }

    /// Returns the first tokens of a step.
    pub(super) fn tokens(&self, step: &Step, count: usize) -> Result<Slice<'_>, ModelError> {
        Ok(self.array(&step.tokens)?.part(0..count * 4)?)
    }

    /// Returns the destination of the step's arrays.
    pub(super) fn inputs(&self, bytes: usize) -> Result<Slice<'_>, ModelError> {
        self.workspace_slice(&self.offsets.inputs, bytes)
    }

    pub(super) fn hidden(&self, rows: usize) -> Result<Slice<'_>, ModelError> {
        self.rows(&self.offsets.hidden, rows, self.shape.hidden)
    }

    pub(super) fn hidden_between(&self, rows: usize) -> Result<Slice<'_>, ModelError> {
        self.rows(&self.offsets.hidden_between, rows, self.shape.hidden)
    }

    pub(super) fn projected(&self, rows: usize) -> Result<Slice<'_>, ModelError> {
        self.rows(&self.offsets.projected, rows, self.shape.hidden)
    }

    /// Multiplies rows in one buffer by a matrix and writes the products to another buffer.
    fn multiply(
        &self,
        matrix: &MatrixOffsets,
        x: Slice<'_>,
        rows: usize,
        y: Slice<'_>,
        y_stride: usize,
        output_format: OutputFormat,
    ) -> Result<(), ModelError> {
        let product = Product { x, rows: size(rows)?, y, y_stride: size(y_stride)?, output_format };
        let matrix = self.weights.matrix(matrix)?;
        Ok(self.device.matmul(&matrix, &product, self.shape.activation, self.products()?)?)
    }

    /// Returns the kernels that may compute products.
    fn products(&self) -> Result<Products<'_>, ModelError> {
        if self.shape.deterministic {
            return Ok(Products::FixedOrder);
        }
        let range = &self.offsets.expanded;
        let expanded = if range.is_empty() { None } else { Some(self.workspace_slice(range, range.len())?) };
        Ok(Products::Fastest { library: self.blas.as_ref(), expanded })
    }

    /// Returns the norm of the sum of two buffers, which replaces the second or goes to a buffer of its own.
    pub(super) fn norm<'a>(
        &'a self,
        adds: Option<Slice<'a>>,
        [residual, sum]: [Slice<'a>; 2],
        weight: &Range<usize>,
        rows: usize,
    ) -> Result<RmsNorm<'a>, ModelError> {
        let Shape { hidden, epsilon, .. } = self.shape;
        let out = self.rows(&self.offsets.normed, rows, hidden)?;
        let weight = self.weights.slice(weight)?;
        let (rows, width) = (size(rows)?, size(hidden)?);
        Ok(RmsNorm { x: adds, residual, sum, weight, out, rows, width, epsilon })
    }
}

/// The ranks that share each weight of one stage, as seen by one of them.
#[derive(Clone, Copy)]
pub(super) struct Peers<'a> {
    pub(super) ranks: &'a [Rank],
    pub(super) own: usize,
}

impl<'a> Peers<'a> {
    pub(super) fn rank(self) -> &'a Rank {
        &self.ranks[self.own]
    }

    /// Writes the vectors of the step's tokens to the hidden rows. If ranks add up their parts, writes only the
    /// vectors of its part of the vocabulary.
    fn enter(self, table: &TokenOffsets, step: &Step) -> Result<(), ModelError> {
        let rank = self.rank();
        let Shape { hidden, activation, .. } = rank.shape;
        let embedding = Embedding {
            tokens: rank.array(&step.tokens)?,
            table: rank.weights.slice(&table.matrix.data)?,
            format: table_format(table.matrix.weights, activation),
            out: self.share(Part::Embedding, step.rows)?,
            rows: size(step.rows)?,
            width: size(hidden)?,
            first: size(table.first)?,
            count: size(table.matrix.outputs)?,
        };
        Ok(rank.device.embedding(&embedding, activation)?)
    }

    /// Copies the rows of the previous stage.
    pub(super) fn take_over(self, from: &Rank, rows: usize) -> Result<(), ModelError> {
        let rank = self.rank();
        rank.device.wait(&from.done)?;
        rank.device.copy(from.hidden(rows)?, rank.hidden(rows)?)?;
        rank.device.copy(from.projected(rows)?, rank.projected(rows)?)?;
        Ok(rank.handed_on.record()?)
    }

    /// Returns the parts of a step in order. `follows` says whether the stage follows another.
    pub(super) fn parts(self, follows: bool) -> impl Iterator<Item = Part> {
        let layout = &self.rank().weights.layout;
        parts(layout.entry.is_some(), layout.layers.len(), follows)
    }

    /// Computes this rank's products of a part.
    pub(super) fn compute(self, part: Part, step: &Step) -> Result<(), ModelError> {
        let rank = self.rank();
        let layout = &rank.weights.layout;
        let adds = part.input() == Input::Sum;
        let (matrix, values) = match part {
            Part::Embedding => {
                return layout.entry.as_ref().map_or(Ok(()), |table| self.enter(table, step));
            }
            Part::Attention { layer: index, .. } => {
                let layer = &layout.layers[index];
                let normed = self.normed(Reader::Attention(index), adds, step)?;
                (&layer.output, rank.attend(index, layer, step, &normed)?)
            }
            Part::FeedForward { layer: index } => {
                let layer = &layout.layers[index];
                let normed = self.normed(Reader::FeedForward(index), adds, step)?;
                (&layer.down, rank.gate(layer, &normed)?)
            }
        };
        let out = self.share(part, step.rows)?;
        rank.multiply(matrix, values, step.rows, out, rank.shape.hidden, OutputFormat::Activations)
    }

    /// Computes the logits of the requested rows, or this rank's part of each, and writes them from row `first` of
    /// the leader's logits.
    pub(super) fn exit(self, step: &Step, logits: Slice<'_>, first: usize) -> Result<(), ModelError> {
        let rank = self.rank();
        let Some(exit) = &rank.weights.layout.exit else { return Ok(()) };
        // A small vocabulary has fewer parts than there are ranks.
        if step.logit_rows == 0 || exit.head.matrix.outputs == 0 {
            return Ok(());
        }
        let Shape { hidden, vocabulary, activation, .. } = rank.shape;
        // A step with a shape has its logits in the order of its rows, including the padding rows.
        let (normed, rows) = match &step.wanted {
            None => (self.normed(Reader::Head, true, step)?, step.rows),
            Some(wanted) => {
                let rows = step.logit_rows;
                let gathered = |from: Slice<'_>, range: &Range<usize>| {
                    let out = rank.rows(range, rows, hidden)?;
                    let embedding = Embedding {
                        tokens: rank.array(wanted)?,
                        table: from,
                        format: skep_kernels::cuda::embedding::Table::Plain,
                        out,
                        rows: size(rows)?,
                        width: size(hidden)?,
                        first: 0,
                        count: size(step.rows)?,
                    };
                    rank.device.embedding(&embedding, activation)?;
                    Ok::<_, ModelError>(out)
                };
                let residual = gathered(rank.hidden(step.rows)?, &rank.offsets.wanted[0])?;
                let adds = gathered(rank.projected(step.rows)?, &rank.offsets.wanted[1])?;
                let norm = rank.norm(Some(adds), [residual; 2], &exit.norm, rows)?;
                (ProductRows::Norm(norm), rows)
            }
        };
        rank.device.norm_rows(&normed, activation)?;
        let stride = logits_stride(vocabulary);
        let begin = (first * stride + exit.head.first) * 4;
        let length = ((rows - 1) * stride + exit.head.matrix.outputs) * 4;
        let y = logits.part(begin..begin + length)?;
        rank.multiply(&exit.head.matrix, normed.x(), rows, y, stride, OutputFormat::F32)
    }
}

impl Rank {
    /// Computes the attention of a layer, from the norm of its rows to the outputs of the heads.
    fn attend(
        &self,
        index: usize,
        layer: &LayerOffsets,
        step: &Step,
        normed: &ProductRows<'_>,
    ) -> Result<Slice<'_>, ModelError> {
        let Shape { head_size, epsilon, pairing, activation, .. } = self.shape;
        let rows = step.rows;
        let width = (layer.heads + 2 * layer.kv_heads) * head_size;
        let qkv = self.rows(&self.offsets.qkv, rows, width)?;
        let pages = self.pages_of(index, layer)?;
        let [q_norm, k_norm] = match &layer.head_norms {
            Some([q, k]) => [Some(self.weights.slice(q)?), Some(self.weights.slice(k)?)],
            None => [None, None],
        };
        let turned = Qkv {
            qkv,
            bias: self.weights.optional(layer.qkv_bias.as_ref())?,
            q_norm,
            k_norm,
            positions: self.array(&step.positions)?,
            slots: self.array(&step.slots)?,
            frequencies: self.weights.slice(&self.weights.layout.frequencies)?,
            rows: size(rows)?,
            pairing,
            epsilon,
        };
        if let [matrix] = &layer.qkv[..] {
            let matrix = self.weights.matrix(matrix)?;
            self.device.normed_qkv(&matrix, normed, &turned, &pages, activation, self.products()?)?;
        } else {
            self.device.norm_rows(normed, activation)?;
            let mut first = 0;
            for matrix in &layer.qkv {
                let y = qkv.part(first * ACTIVATION_BYTES..qkv.bytes())?;
                self.multiply(matrix, normed.x(), rows, y, width, OutputFormat::Activations)?;
                first += matrix.outputs;
            }
            self.device.qkv(&turned, &pages, activation)?;
        }
        let attended = self.rows(&self.offsets.attended, rows, layer.heads * head_size)?;
        let page_tables = self.array(&step.page_tables)?;
        let (table_stride, scale) = (size(step.stride)?, 1.0 / (head_size as f32).sqrt());
        let (states, window) = (&self.offsets.states, size(layer.window.unwrap_or(0))?);
        if step.decoded > 0 {
            let plan = self.sizes.windows.iter().position(|window| *window == layer.window);
            let plan = &step.plans[plan.unwrap_or(0)];
            let decode = Decode {
                q: qkv,
                page_tables,
                splits: self.array(&plan.splits)?,
                shared_rows: self.array(&plan.shared_rows)?,
                states: self.workspace_slice(&states.values, states.values.len())?,
                arrivals: self.workspace_slice(&states.arrivals, states.arrivals.len())?,
                out: attended,
                rows: size(step.decoded)?,
                sequences: size(step.sequences)?,
                split_count: size(plan.split_count)?,
                state_count: size(states.count)?,
                table_stride,
                window,
                scale,
            };
            self.device.attention_decode(&decode, &pages, activation)?;
        }
        if step.tile_count > 0 {
            let splits = match &step.splits {
                Some(splits) => Some(Splits {
                    keys: splits.keys,
                    states: self.workspace_slice(&states.values, states.values.len())?,
                    joins: self.array(&splits.joins)?,
                    join_count: size(splits.join_count)?,
                }),
                None => None,
            };
            let prefill = Prefill {
                q: qkv,
                out: attended,
                page_tables,
                tiles: self.array(&step.tiles)?,
                tile_count: size(step.tile_count)?,
                table_stride,
                window,
                scale,
                splits,
            };
            self.device.attention_prefill(&prefill, &pages, activation)?;
        }
        Ok(attended)
    }

    /// Computes the values of the feed-forward part's gate, from the norm of its rows.
    fn gate(&self, layer: &LayerOffsets, normed: &ProductRows<'_>) -> Result<Slice<'_>, ModelError> {
        let (width, rows) = (layer.down.inputs, normed.count() as usize);
        let gate_up = self.rows(&self.offsets.gate_up, rows, 2 * width)?;
        let out = self.rows(&self.offsets.gated, rows, width)?;
        if let [matrix] = &layer.gate_up[..] {
            let product = GatedProduct { x: normed.x(), rows: normed.count(), gate_up, out };
            let matrix = self.weights.matrix(matrix)?;
            self.device.normed_gated(&matrix, normed, &product, self.shape.activation, self.products()?)?;
            return Ok(out);
        }
        self.device.norm_rows(normed, self.shape.activation)?;
        let mut first = 0;
        for matrix in &layer.gate_up {
            let y = gate_up.part(first * ACTIVATION_BYTES..gate_up.bytes())?;
            self.multiply(matrix, normed.x(), rows, y, 2 * width, OutputFormat::Activations)?;
            first += matrix.outputs;
        }
        self.device.swiglu(gate_up, out, size(rows)?, size(width)?, self.shape.activation)?;
        Ok(out)
    }

    fn pages_of(&self, index: usize, layer: &LayerOffsets) -> Result<Pages<'_>, ModelError> {
        let LayerPages { keys, values, scales } = self.sizes.pages_of(index);
        let part = |range| self.pages.slice().part(range);
        Ok(Pages {
            keys: part(keys)?,
            values: part(values)?,
            scales: scales.map(part).transpose()?,
            heads: size(layer.heads)?,
            kv_heads: size(layer.kv_heads)?,
            head_size: size(self.shape.head_size)?,
        })
    }
}
