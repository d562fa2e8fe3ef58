//! The operations of a transformer step on a device. Each one checks that its slices are long enough for its shapes, and
//! launches its kernel.
//!
//! Invariant: no shape lets a kernel access memory outside its slices. Tokens, positions, page numbers and state indices
//! are in device memory and are not checked here; the caller that writes them must check them.

mod fused;
mod operands;
mod products;
mod sums;

use super::attention_decode::{self, AttentionDecodeParams, Split};
use super::attention_hopper::{self, AttentionHopperParams};
use super::attention_prefill::{self, AttentionJoinParams, AttentionPrefillParams, Join, QueryTile};
use super::device::{Device, Slice};
use super::embedding::{self, EmbeddingParams, Table};
use super::matmul::Weights;
use super::qkv::{self, QkvParams};
use super::rms_norm::{self, RmsNormParams};
use super::sample::{self, Adjustment, Logits, SampleParams, SampleRow};
use super::swiglu::{self, SwigluParams};
use super::{Activation, Address, PageAddresses, PageFormat};
use crate::KernelError;
use crate::error::product;
pub use operands::{
    ACTIVATION_BYTES, AllReduce, Decode, Embedding, GatedProduct, Matrix, Meeting, Pages, Prefill, Product,
    ProductRows, Products, Qkv, RmsNorm, Sample, Splits,
};
pub use products::MOST_UNEXPANDED_ROWS;

impl Device {
    /// Looks up the rows of the step's tokens in the embedding table.
    pub fn embedding(&self, of: &Embedding<'_>, activation: Activation) -> Result<(), KernelError> {
        const OP: &str = "embedding";
        let Embedding { tokens, table, format, out, rows, width, first, count } = *of;
        let weights = match format {
            Table::Plain => Weights::Plain,
            Table::Tiles(dtype, _) => Weights::Tiles(dtype),
        };
        let table_bytes =
            Matrix { weights, data: table, bias: None, outputs: count, inputs: width }.bytes()?;
        holds(OP, "tokens", tokens, &[rows as usize, 4])?;
        holds(OP, "table", table, &[table_bytes])?;
        holds(OP, "out", out, &[rows as usize, width as usize, ACTIVATION_BYTES])?;
        let params = EmbeddingParams {
            tokens: tokens.address(),
            table: table.address(),
            out: out.address(),
            width,
            vocabulary: count,
            first,
        };
        debug_assert!(matches!(format, Table::Plain) || format_of(format) == Some(activation));
        let launch = embedding::launch(&params, rows, format)?;
        // SAFETY: the slices match the shapes; the kernel does not read the table for tokens that are not in it.
        unsafe { self.launch(&launch, &params) }
    }

    /// Adds rows to the residual and normalizes the sums.
    pub fn rms_norm(&self, of: &RmsNorm<'_>, activation: Activation) -> Result<(), KernelError> {
        let params = norm_params(of)?;
        let launch = rms_norm::launch(&params, of.rows, activation)?;
        // SAFETY: the slices match the shapes.
        unsafe { self.launch(&launch, &params) }
    }

    /// Computes the norm of a product's rows, if it is not computed yet.
    pub fn norm_rows(&self, rows: &ProductRows<'_>, activation: Activation) -> Result<(), KernelError> {
        match rows {
            ProductRows::Norm(norm) => self.rms_norm(norm, activation),
            ProductRows::Normed { .. } => Ok(()),
        }
    }

    /// Applies bias, norms and rotation to the rows, and writes keys and values into their pages.
    pub fn qkv(&self, of: &Qkv<'_>, pages: &Pages<'_>, activation: Activation) -> Result<(), KernelError> {
        let params = qkv_params(of, pages)?;
        let launch = qkv::launch(&params, activation, pages.format())?;
        // SAFETY: the slices match the shapes; the caller guarantees the slots.
        unsafe { self.launch(&launch, &params) }
    }

    /// Returns the number of blocks of attention with splits that the device runs at once.
    pub fn attention_blocks(
        &self,
        head_size: u32,
        activation: Activation,
        pages: PageFormat,
    ) -> Result<u32, KernelError> {
        self.blocks_at_once(&attention_decode::block(head_size, activation, pages)?)
    }

    /// Computes the attention of sequences with few rows, whose contexts are divided into splits.
    pub fn attention_decode(
        &self,
        of: &Decode<'_>,
        pages: &Pages<'_>,
        activation: Activation,
    ) -> Result<(), KernelError> {
        const OP: &str = "attention_decode";
        let Decode { q, page_tables, splits, shared_rows, states, arrivals, out, .. } = *of;
        let Decode { rows, sequences, split_count, state_count, table_stride, window, scale, .. } = *of;
        let Pages { keys, values, scales, heads, kv_heads, head_size } = *pages;
        let (count, size) = (rows as usize, head_size as usize);
        let q_stride = (heads + 2 * kv_heads) * head_size;
        holds(OP, "q", q, &[count, q_stride as usize, ACTIVATION_BYTES])?;
        holds(OP, "page tables", page_tables, &[sequences as usize, table_stride as usize, 4])?;
        holds(OP, "splits", splits, &[split_count as usize, size_of::<Split>()])?;
        holds(OP, "states", states, &[state_count as usize, heads as usize, size + 2, 4])?;
        holds(OP, "out", out, &[count, heads as usize, size, ACTIVATION_BYTES])?;
        let sums = state_count as usize * heads as usize * size * 4;
        let params = AttentionDecodeParams {
            q: q.address(),
            pages: PageAddresses { keys: keys.address(), values: values.address(), scales: address(scales) },
            out: out.address(),
            page_tables: page_tables.address(),
            splits: splits.address(),
            shared_rows: shared_rows.address(),
            sums: states.address(),
            weights: states.part(sums..states.bytes())?.address(),
            arrivals: arrivals.address(),
            q_stride,
            table_stride,
            heads,
            kv_heads,
            window,
            scale,
        };
        let launch = attention_decode::launch(&params, split_count, head_size, activation, pages.format())?;
        // SAFETY: the slices match the shapes; the caller guarantees the pages and the rows, shared rows, sequences, states and
        // arrivals of the splits.
        unsafe { self.launch(&launch, &params) }
    }

    /// Computes the attention of sequences with many rows.
    pub fn attention_prefill(
        &self,
        of: &Prefill<'_>,
        pages: &Pages<'_>,
        activation: Activation,
    ) -> Result<(), KernelError> {
        const OP: &str = "attention_prefill";
        let Prefill { q, out, page_tables, tiles, tile_count, table_stride, window, scale, splits } = *of;
        let Pages { keys, values, scales, heads, kv_heads, head_size } = *pages;
        holds(OP, "tiles", tiles, &[tile_count as usize, size_of::<QueryTile>()])?;
        if let Some(splits) = splits {
            holds(OP, "joins", splits.joins, &[splits.join_count as usize, size_of::<Join>()])?;
        }
        let params = AttentionPrefillParams {
            q: q.address(),
            keys: keys.address(),
            values: values.address(),
            scales: address(scales),
            out: out.address(),
            page_tables: page_tables.address(),
            tiles: tiles.address(),
            states: address(splits.map(|splits| splits.states)),
            q_stride: (heads + 2 * kv_heads) * head_size,
            table_stride,
            heads,
            kv_heads,
            window,
            split_keys: splits.map_or(0, |splits| splits.keys),
            scale,
        };
        // FP8 would have to be converted to 16 bits in memory first, because the tensor cores of Hopper read it there.
        let hopper = match self.is_hopper() && pages.format() == PageFormat::Activations {
            true => attention_hopper::launch(&params, tile_count, head_size, activation)?,
            false => None,
        };
        if let Some(launch) = hopper {
            let page_bytes = keys.bytes().min(values.bytes());
            let params = AttentionHopperParams::new(self, params, head_size, page_bytes)?;
            // SAFETY: the slice holds all tiles; the caller guarantees their rows, sequences, pages and state indices.
            unsafe { self.launch(&launch, &params) }?;
        } else {
            let launch =
                attention_prefill::launch(&params, tile_count, head_size, activation, pages.format())?;
            // SAFETY: as above.
            unsafe { self.launch(&launch, &params) }?;
        }
        let Some(splits) = splits.filter(|splits| splits.join_count > 0) else { return Ok(()) };
        let params = AttentionJoinParams {
            states: splits.states.address(),
            joins: splits.joins.address(),
            out: out.address(),
            heads,
            head_size,
        };
        let launch = attention_prefill::join(&params, splits.join_count, activation);
        // SAFETY: the slice holds all joins; the caller guarantees their rows and state indices.
        unsafe { self.launch(&launch, &params) }
    }

    /// Computes `silu(gate) · up` for rows that hold the gate first.
    pub fn swiglu(
        &self,
        gate_up: Slice<'_>,
        out: Slice<'_>,
        rows: u32,
        width: u32,
        activation: Activation,
    ) -> Result<(), KernelError> {
        const OP: &str = "swiglu";
        holds(OP, "gate and up", gate_up, &[rows as usize, 2 * width as usize, ACTIVATION_BYTES])?;
        holds(OP, "out", out, &[rows as usize, width as usize, ACTIVATION_BYTES])?;
        let params = SwigluParams { gate_up: gate_up.address(), out: out.address(), rows, width };
        let launch = swiglu::launch(&params, activation)?;
        // SAFETY: the slices match the shapes.
        unsafe { self.launch(&launch, &params) }
    }

    /// Chooses a token for each row of logits.
    pub fn sample(&self, of: &Sample<'_>) -> Result<(), KernelError> {
        const OP: &str = "sample";
        let Sample { logits, rows, adjustments, masks, drawn, adjusted, tokens, row_count, .. } = *of;
        let Sample { states, choice, vocabulary, logits_stride, .. } = *of;
        let count = row_count as usize;
        holds(OP, "rows", rows, &[count, size_of::<SampleRow>()])?;
        holds(OP, "adjusted", adjusted, &[count, vocabulary as usize, 4])?;
        holds(OP, "states", states, &[count.min(1), sample::STATE_BYTES])?;
        holds(OP, "tokens", tokens, &[count, 4])?;
        debug_assert!(adjustments.bytes().is_multiple_of(size_of::<Adjustment>()));
        let params = SampleParams {
            logits: logits.address(),
            rows: rows.address(),
            adjustments: adjustments.address(),
            masks: masks.address(),
            drawn: drawn.address(),
            adjusted: adjusted.address(),
            states: states.address(),
            tokens: tokens.address(),
            vocabulary,
            logits_stride,
            mask_words: vocabulary.div_ceil(32),
        };
        let multiprocessors = self.multiprocessors();
        // Groups of rows take the states in turn.
        let most = (states.bytes() / sample::STATE_BYTES).clamp(1, sample::MAX_ROWS as usize);
        for first in (0..row_count).step_by(most) {
            let group = (row_count - first).min(most as u32);
            let from =
                |of: Slice<'_>, size: usize| of.part(first as usize * size..of.bytes()).map(Slice::address);
            let params = SampleParams {
                rows: from(rows, size_of::<SampleRow>())?,
                adjusted: from(adjusted, vocabulary as usize * 4)?,
                tokens: from(tokens, 4)?,
                ..params
            };
            let launches = sample::launches(&params, group, choice, Logits::F32, multiprocessors)?;
            for launch in launches.into_iter().flatten() {
                // SAFETY: the slices match the shapes; the caller guarantees the indices in the rows.
                unsafe { self.launch(&launch, &params) }?;
            }
        }
        Ok(())
    }
}

/// Checks the slices of a norm, and returns its parameters.
fn norm_params(of: &RmsNorm<'_>) -> Result<RmsNormParams, KernelError> {
    const OP: &str = "rms_norm";
    let RmsNorm { x, residual, sum, weight, out, rows, width, epsilon } = *of;
    let sizes = [rows as usize, width as usize, ACTIVATION_BYTES];
    if let Some(x) = x {
        holds(OP, "x", x, &sizes)?;
    }
    holds(OP, "residual", residual, &sizes)?;
    holds(OP, "sum", sum, &sizes)?;
    holds(OP, "weight", weight, &sizes[1..])?;
    holds(OP, "out", out, &sizes)?;
    Ok(RmsNormParams {
        x: address(x),
        residual: residual.address(),
        sum: sum.address(),
        weight: weight.address(),
        out: out.address(),
        width,
        epsilon,
    })
}

/// Checks the slices of queries, keys and values, and returns the parameters.
fn qkv_params(of: &Qkv<'_>, pages: &Pages<'_>) -> Result<QkvParams, KernelError> {
    const OP: &str = "qkv";
    let Qkv { qkv, bias, q_norm, k_norm, positions, slots, frequencies, rows, pairing, epsilon } = *of;
    let Pages { keys, values, scales, heads, kv_heads, head_size } = *pages;
    let width = (heads as usize + 2 * kv_heads as usize) * head_size as usize;
    let count = rows as usize;
    holds(OP, "qkv", qkv, &[count, width, ACTIVATION_BYTES])?;
    for (what, slice, length) in [
        ("bias", bias, width),
        ("q_norm", q_norm, head_size as usize),
        ("k_norm", k_norm, head_size as usize),
    ] {
        if let Some(slice) = slice {
            holds(OP, what, slice, &[length, ACTIVATION_BYTES])?;
        }
    }
    holds(OP, "positions", positions, &[count, 4])?;
    holds(OP, "slots", slots, &[count, 8])?;
    holds(OP, "frequencies", frequencies, &[head_size as usize / 2, 4])?;
    Ok(QkvParams {
        qkv: qkv.address(),
        bias: address(bias),
        q_norm: address(q_norm),
        k_norm: address(k_norm),
        positions: positions.address(),
        slots: slots.address(),
        frequencies: frequencies.address(),
        keys: keys.address(),
        values: values.address(),
        scales: address(scales),
        rows,
        heads,
        kv_heads,
        head_size,
        pairing,
        epsilon,
    })
}

fn address(slice: Option<Slice<'_>>) -> Address {
    slice.map_or(Address::NONE, Slice::address)
}

fn format_of(table: Table) -> Option<Activation> {
    match table {
        Table::Plain => None,
        Table::Tiles(_, activation) => Some(activation),
    }
}

/// Checks that a slice has room for as many bytes as the product of the sizes.
fn holds(op: &'static str, what: &'static str, slice: Slice<'_>, sizes: &[usize]) -> Result<(), KernelError> {
    let bytes = product(op, what, sizes)?;
    match bytes <= slice.bytes() {
        true => Ok(()),
        false => Err(KernelError::Shape { op, what, expected: bytes, found: slice.bytes() }),
    }
}
