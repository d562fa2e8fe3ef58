//! Attention with latents (multi-head latent attention): all heads share one latent and one rotated key for each token.
//!
//! Invariant: all stored values are finite. A layer keeps `[page][16 tokens][latent]` and, behind it in each page,
//! `[16 tokens][rotated]`; the latents are the keys without position and the values at once. Queries are absorbed: they
//! are already multiplied by the matrix that would expand latents to keys. Source: DeepSeek-V2 (2024), section 2.1.

use std::marker::PhantomData;

use crate::attention::{AttentionBatch, AttentionSequence, Strides, run_plan};
use crate::buffer::{AlignedBytes, Backing};
use crate::cpu::dispatch;
use crate::cpu::elementwise::{RmsNorm, Rotate};
use crate::cpu::kv::{KvF16, KvF32, KvI8};
use crate::cpu::latent::{AttendLatents, LatentPage, StoreLatent};
use crate::cpu::latent_bytes::AttendBytes;
use crate::cpu::rows::dispatch_rows;
use crate::error::{expect_len, product};
use crate::kv::{KvFormat, MAX_LATENT, read_parts, write_parts};
use crate::pool::{SharedSlice, by_rows};
use crate::qkv::runs;
use crate::residual::Norm;
use crate::rope::Pairing;
use crate::{Isa, KernelError, WorkerPool};

/// The latents and rotated keys of one layer.
pub struct LatentLayer {
    format: KvFormat,
    page_count: usize,
    page: LatentPage,
    /// Number of values of a rotated key, without padding.
    rotated: usize,
    bytes: AlignedBytes,
}

impl LatentLayer {
    /// Creates a layer of `page_count` pages. `latent` is a multiple of 16. Latents of 16 bits are kept in F16 in all tiers.
    pub fn new(
        format: KvFormat,
        page_count: usize,
        latent: usize,
        rotated: usize,
    ) -> Result<Self, KernelError> {
        const OP: &str = "latent pages";
        if latent == 0 || latent > MAX_LATENT {
            return Err(KernelError::OutOfRange { op: OP, what: "latent", index: latent, count: MAX_LATENT });
        }
        expect_len(OP, "the remainder of the latent divided by 16", 0, latent % 16)?;
        if rotated > MAX_LATENT || !rotated.is_multiple_of(2) {
            let (index, count) = (rotated, MAX_LATENT);
            return Err(KernelError::OutOfRange { op: OP, what: "rotated key", index, count });
        }
        let page = layout(format, latent, rotated);
        let bytes = AlignedBytes::zeroed(product(OP, "the pool", &[page_count, page.bytes()])?)?;
        Ok(LatentLayer { format, page_count, page, rotated, bytes })
    }

    /// Returns the size in bytes of a layer of this shape, or `None` if it overflows.
    pub fn byte_len(format: KvFormat, page_count: usize, latent: usize, rotated: usize) -> Option<usize> {
        if latent > MAX_LATENT || rotated > MAX_LATENT {
            return None;
        }
        page_count.checked_mul(layout(format, latent, rotated).bytes())
    }

    /// Returns the number of bytes of one page.
    pub fn page_bytes(&self) -> usize {
        self.page.bytes()
    }

    /// Returns the address range of the pool.
    pub fn backing(&self) -> Backing {
        self.bytes.backing()
    }

    /// Copies a page to `out`, which has [`LatentLayer::page_bytes`] bytes.
    pub fn read_page(&self, page: u32, out: &mut [u8]) -> Result<(), KernelError> {
        read_parts([&self.bytes], self.page_count, page, out)
    }

    /// Replaces a page with bytes that [`LatentLayer::read_page`] copied from a layer of the same format and shape.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), KernelError> {
        write_parts([&mut self.bytes], self.page_count, page, bytes)
    }

    /// Returns the number of values of a query: those of a latent and of a padded rotated key.
    pub fn query_width(&self) -> usize {
        self.page.latent + self.page.rotated
    }
}

/// Returns the number of values of an absorbed query.
pub fn query_width(latent: usize, rotated: usize) -> usize {
    latent + rotated.next_multiple_of(16)
}

fn layout(format: KvFormat, latent: usize, rotated: usize) -> LatentPage {
    let scaled = format == KvFormat::I8;
    let element = format.element_bytes();
    let rotated_element = if scaled { 2 } else { element };
    LatentPage { latent, rotated: rotated.next_multiple_of(16), element, rotated_element, scaled }
}

/// Normalizes the latent of each row, rotates its key and stores both. A row of `rows` holds a latent and a key;
/// `rotary_table` is the table from [`crate::rope::rotary_table`].
#[allow(clippy::too_many_arguments)] // The operands of `rotate_and_store`, with a norm.
pub fn store_latents(
    pool: &WorkerPool,
    isa: Isa,
    norm: Norm<'_>,
    pairing: Pairing,
    rows: &mut [f32],
    rotary_table: &[f32],
    sequences: &[AttentionSequence],
    layer: &mut LatentLayer,
) -> Result<(), KernelError> {
    const OP: &str = "store latents";
    let (latent, rotated) = (layer.page.latent, layer.rotated);
    let stride = latent + rotated;
    let count = rows.len() / stride;
    expect_len(OP, "the length", product(OP, "the rows", &[count, stride])?, rows.len())?;
    expect_len(OP, "the length of the norm", latent, norm.weight.len())?;
    expect_len(OP, "the length of the rotary table", count * rotated, rotary_table.len())?;
    let runs = runs(sequences, count, layer.page_count)?;
    let rows = SharedSlice::new(rows);
    let layer = &*layer;
    by_rows(pool, runs.len(), (count * stride).div_ceil(runs.len().max(1)), |index| {
        let run = &runs[index];
        for token in 0..run.tokens {
            let at = run.row + token;
            // SAFETY: `runs` ensured that each row and each page is in only one run, and each run belongs to one task.
            let row = unsafe { rows.part(at * stride, stride) };
            let (raw, head) = row.split_at_mut(latent);
            let mut normed = [0f32; MAX_LATENT];
            let out = &mut normed[..latent];
            let table = &rotary_table[at * rotated..][..rotated];
            let interleaved = pairing == Pairing::Interleaved;
            // SAFETY: safe slices of the lengths that the kernels require.
            unsafe {
                dispatch(isa, RmsNorm { input: raw, weight: norm.weight, epsilon: norm.epsilon, out });
                dispatch(isa, Rotate { head: &mut *head, table, interleaved });
            }
            // SAFETY: the page exists, the slot is below the size of a page, and no other task has the page.
            unsafe { layer.store(isa, run.page, run.slot + token, &normed[..latent], head) };
        }
    });
    Ok(())
}

impl LatentLayer {
    /// # Safety
    /// The page exists, `slot` is below its number of tokens, and no other thread reads or writes the page.
    unsafe fn store(&self, isa: Isa, page: u32, slot: usize, latent: &[f32], rotated: &[f32]) {
        // SAFETY: the page is inside the pool, as guaranteed by the caller.
        let to = unsafe { self.bytes.as_ptr().cast_mut().add(page as usize * self.page.bytes()) };
        macro_rules! store {
            ($latent:ty, $rotated:ty) => {{
                let (page, formats) = (self.page, PhantomData::<($latent, $rotated)>);
                // SAFETY: as above; the latent has the page's length.
                unsafe { dispatch(isa, StoreLatent { latent, rotated, page, to, slot, formats }) }
            }};
        }
        match self.format {
            KvFormat::F32 => store!(KvF32, KvF32),
            KvFormat::F16 | KvFormat::Bf16 => store!(KvF16, KvF16),
            KvFormat::I8 => store!(KvI8, KvF16),
        }
    }
}

/// The shape of the queries of one call, before they are absorbed.
#[derive(Clone, Copy, Debug)]
pub struct QueryShape {
    pub heads: usize,
    /// Number of values of a head without position; a rotated key follows them.
    pub unrotated: usize,
    pub rotated: usize,
    pub pairing: Pairing,
}

/// Splits rows of query heads. The values without position go to `unrotated` as `[head][row][unrotated]`; the others are
/// rotated and go to the last columns of `queries`, which is `[head][row][width]`, followed by zeros.
#[allow(clippy::too_many_arguments)] // One input and two outputs with their shapes.
pub fn split_queries(
    pool: &WorkerPool,
    isa: Isa,
    shape: QueryShape,
    rows: &[f32],
    rotary_table: &[f32],
    unrotated: &mut [f32],
    queries: &mut [f32],
    width: usize,
) -> Result<(), KernelError> {
    const OP: &str = "split queries";
    let QueryShape { heads, unrotated: plain, rotated, pairing } = shape;
    let head = plain + rotated;
    let stride = product(OP, "a row", &[heads, head])?.max(1);
    let count = rows.len() / stride;
    expect_len(OP, "the length", count * stride, rows.len())?;
    expect_len(OP, "the length of the rotary table", count * rotated, rotary_table.len())?;
    expect_len(OP, "the length of the first output", count * heads * plain, unrotated.len())?;
    let wanted = product(OP, "the queries", &[count, heads, width])?;
    expect_len(OP, "the length of the queries", wanted, queries.len())?;
    let padded = rotated.next_multiple_of(16);
    if padded > width {
        return Err(KernelError::OutOfRange { op: OP, what: "rotated key", index: padded, count: width });
    }
    let (unrotated, queries) = (SharedSlice::new(unrotated), SharedSlice::new(queries));
    by_rows(pool, count, stride, |row| {
        let table = &rotary_table[row * rotated..][..rotated];
        for (index, from) in rows[row * stride..][..stride].chunks_exact(head).enumerate() {
            let at = index * count + row;
            // SAFETY: each row belongs to one task; the slices were measured above.
            unsafe {
                unrotated.part(at * plain, plain).copy_from_slice(&from[..plain]);
                let to = queries.part((at + 1) * width - padded, padded);
                to[rotated..].fill(0.0);
                to[..rotated].copy_from_slice(&from[plain..]);
                let interleaved = pairing == Pairing::Interleaved;
                dispatch(isa, Rotate { head: &mut to[..rotated], table, interleaved });
            }
        }
    });
    Ok(())
}

/// Computes attention of absorbed queries, `[head][rows][width]`, and writes `[head][rows][latent]` to `out`. The latents
/// of all tokens must already be in `layer`.
#[allow(clippy::too_many_arguments)] // The operands of `attention`.
pub fn latent_attention(
    pool: &WorkerPool,
    isa: Isa,
    heads: usize,
    scale: f32,
    layer: &LatentLayer,
    query: &[f32],
    batch: &AttentionBatch,
    out: &mut [f32],
) -> Result<(), KernelError> {
    const OP: &str = "latent attention";
    let (latent, width) = (layer.page.latent, layer.query_width());
    let rows = out.len() / (heads * latent).max(1);
    expect_len(OP, "the output length", product(OP, "the output", &[rows, heads, latent])?, out.len())?;
    expect_len(OP, "the query length", product(OP, "the query", &[rows, heads, width])?, query.len())?;
    let sequences = batch.sequences();
    sequences.iter().try_for_each(|sequence| sequence.check(OP, rows, layer.page_count))?;
    let strides = Strides {
        heads,
        kv_heads: 1,
        query: [width, rows * width],
        output: [latent, rows * latent],
        value_stride: latent,
        value_size: latent,
    };
    run_plan(pool, isa, &strides, None, &[], batch, out, |part, task, state, state_stride| {
        macro_rules! attend {
            ($kernel:ident $(, $format:ident: $of:ty)?) => {{
                let kernel = $kernel {
                    rows: part.rows,
                    query: query.as_ptr(),
                    scale,
                    page: layer.page,
                    latents: layer.bytes.as_ptr(),
                    pages: part.pages,
                    from: task.start,
                    to: task.end,
                    state,
                    state_stride,
                    $($format: PhantomData::<$of>)?
                };
                // SAFETY: the sequences were checked: their queries and pages exist.
                unsafe { dispatch_rows(isa, kernel) }
            }};
        }
        match layer.format {
            KvFormat::F32 => attend!(AttendLatents, format: KvF32),
            KvFormat::F16 | KvFormat::Bf16 => attend!(AttendLatents, format: KvF16),
            KvFormat::I8 => attend!(AttendBytes),
        }
    });
    Ok(())
}

#[cfg(test)]
#[path = "latent_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "latent_bf16_tests.rs"]
mod bf16_tests;
