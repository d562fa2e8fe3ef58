//! Attention of up to sixteen rows per sequence over its paged keys and values, split along the context.

mod plan;
mod shared;
#[cfg(test)]
mod shared_tests;

use super::kv_pages::{FP8_CHUNK, PAGE_SCALE_BYTES};
use super::{
    Activation, Address, Family, Kernel, Launch, PAGE_POSITIONS, PageAddresses, PageFormat, WARP, WIDE_HEAD,
};
use crate::KernelError;
use crate::device_constants::device_constant;
pub use crate::shared_prefix::SharedRange;
pub use plan::{Blocks, Plan, Rows, Split};
pub use shared::{SharedRow, shared_ranges};

/// Maximum number of rows of a sequence that are planned with splits. More rows have enough blocks without them.
pub const MAX_ROWS: u32 = 16;
/// Number of pairs of a row and a query head per block.
const PACKED_ROWS: u32 = device_constant!("attention_splits.cuh", "PACKED_ROWS");
/// Number of warps per block; half as many if heads are wide.
const MAX_WARPS: u32 = device_constant!("attention_splits.cuh", "MAX_DECODE_WARPS");
const STAGES: u32 = device_constant!("attention_decode.cuh", "DECODE_STAGES");
const FP8_STAGES: u32 = device_constant!("attention_decode.cuh", "FP8_DECODE_STAGES");
const PAD: u32 = device_constant!("attention_decode.cuh", "DECODE_PAD");
const OP: &str = "attention_decode";
const HEAD_SIZES: [u32; 6] = [16, 32, 64, 96, 128, 256];

/// The parameters of the kernel, whose blocks each attend within a split.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionDecodeParams {
    /// `[rows, q_stride]`. Each row starts with the queries.
    pub q: Address,
    pub pages: PageAddresses,
    /// `[rows, heads, head_size]`
    pub out: Address,
    /// u32 `[sequences, table_stride]`.
    pub page_tables: Address,
    /// An array of [`Split`].
    pub splits: Address,
    /// An array of [`SharedRow`].
    pub shared_rows: Address,
    /// f32 `[states, heads, head_size]`.
    pub sums: Address,
    /// f32 `[states, heads, 2]`.
    pub weights: Address,
    /// u32 `[arrivals, blocks per split]`. They must be zeros, and are zeros again afterwards.
    pub arrivals: Address,
    pub q_stride: u32,
    pub table_stride: u32,
    pub heads: u32,
    pub kv_heads: u32,
    /// Number of positions that a row sees, including its own. 0 means all positions up to its own.
    pub window: u32,
    pub scale: f32,
}

/// Returns the number of blocks per split, as in the kernel: for each key-value head, one block for as many of its query
/// heads as a tile has rows.
pub fn blocks_per_split(heads: u32, kv_heads: u32) -> u32 {
    kv_heads * (heads / kv_heads.max(1)).div_ceil(PACKED_ROWS)
}

/// Returns the number of rows of a sequence that a split may have, so that a block has no more pairs of a row and a query
/// head than a tile has rows.
pub fn rows_per_split(heads: u32, kv_heads: u32) -> u32 {
    (PACKED_ROWS / (heads / kv_heads.max(1)).max(1)).max(1)
}

/// Returns the number of rows of any sequences that may read a shared split together: as many as fill a tile for each warp,
/// or one tile if heads are wide.
pub fn rows_per_shared_split(heads: u32, kv_heads: u32, head_size: u32) -> u32 {
    let tiles = if head_size > WIDE_HEAD { 1 } else { MAX_WARPS };
    let heads_of_block = (heads / kv_heads.max(1)).clamp(1, PACKED_ROWS);
    tiles * PACKED_ROWS / heads_of_block
}

/// Returns the launch for this number of splits. Fails for head sizes, ratios of heads and strides that no kernel
/// supports.
pub fn launch(
    params: &AttentionDecodeParams,
    splits: u32,
    head_size: u32,
    activation: Activation,
    pages: PageFormat,
) -> Result<Launch, KernelError> {
    let block = block(head_size, activation, pages)?;
    let (heads, kv_heads) = (params.heads, params.kv_heads);
    super::require(kv_heads > 0 && heads % kv_heads.max(1) == 0, OP, "heads", heads, || {
        format!("a multiple of the {kv_heads} key-value heads")
    })?;
    super::multiple_of_8(OP, "q_stride", params.q_stride)?;
    let grid = [splits, blocks_per_split(heads, kv_heads), 1];
    Ok(Launch { grid, ..block })
}

/// Returns the maximum number of blocks that a multiprocessor of any architecture runs at once, for the size of buffers. A
/// device may run fewer: see [`Device::attention_blocks`](super::device::Device::attention_blocks).
pub fn max_blocks_per_multiprocessor(head_size: u32, pages: PageFormat) -> u32 {
    super::blocks_of_multiprocessor(warps(head_size) * WARP, shared_bytes(head_size, pages))
}

/// Returns the launch of one block. Fails for head sizes that no kernel supports.
pub(super) fn block(
    head_size: u32,
    activation: Activation,
    pages: PageFormat,
) -> Result<Launch, KernelError> {
    let sizes = || HEAD_SIZES.map(|size| size.to_string()).join(", ");
    super::require(HEAD_SIZES.contains(&head_size), OP, "head_size", head_size, sizes)?;
    let kernel = pages.of(Kernel::of(Family::AttentionDecode)).size(head_size).activation(activation);
    let shared_bytes = shared_bytes(head_size, pages);
    Ok(Launch { shared_bytes, ..Launch::new(kernel, [1, 1, 1], warps(head_size) * WARP) })
}

fn warps(head_size: u32) -> u32 {
    if head_size > WIDE_HEAD { MAX_WARPS / 2 } else { MAX_WARPS }
}

/// Returns the shared memory of a block in bytes: the queries, and the pages of each warp.
fn shared_bytes(head_size: u32, pages: PageFormat) -> u32 {
    let rows = PACKED_ROWS * (head_size + PAD) * 2;
    match pages {
        PageFormat::Activations => (1 + 2 * STAGES * warps(head_size)) * rows,
        PageFormat::Fp8 => {
            let page = 2 * PAGE_POSITIONS * (head_size + FP8_CHUNK) + PAGE_SCALE_BYTES;
            rows + FP8_STAGES * warps(head_size) * page
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Buffer, Context},
        random::Random,
    };

    /// The shape of a test.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Shape {
        pub(super) heads: usize,
        pub(super) kv_heads: usize,
        pub(super) head_size: usize,
        pub(super) window: u32,
        pub(super) pages: PageFormat,
        /// Number of blocks that the device runs at once.
        pub(super) blocks: u32,
    }

    impl Shape {
        pub(super) fn new(heads: usize, kv_heads: usize, head_size: usize) -> Self {
            Shape { heads, kv_heads, head_size, window: 0, pages: PageFormat::Activations, blocks: 60 }
        }

        pub(super) fn blocks(&self) -> Blocks {
            let (heads, kv_heads) = (self.heads as u32, self.kv_heads as u32);
            Blocks {
                at_once: self.blocks,
                per_split: blocks_per_split(heads, kv_heads),
                rows: rows_per_split(heads, kv_heads),
                shared_rows: rows_per_shared_split(heads, kv_heads, self.head_size as u32),
            }
        }

        fn scale(&self) -> f32 {
            1.0 / (self.head_size as f32).sqrt()
        }
    }

    /// The rows of a test, and what they see.
    pub(super) struct Case {
        pub(super) activation: Activation,
        shape: Shape,
        pub(super) paged: Context,
        q: Buffer,
        q_stride: usize,
        pub(super) rows: Vec<Rows>,
        count: usize,
    }

    impl Case {
        /// Creates sequences with these contexts, each with the number of rows at its end that attend.
        pub(super) fn new(activation: Activation, shape: Shape, sequences: &[(u32, u32)]) -> Self {
            let mut random = Random::fresh();
            let Shape { heads, kv_heads, head_size, pages, .. } = shape;
            let contexts: Vec<u32> = sequences.iter().map(|(context, _)| *context).collect();
            let paged = Context::random(activation, pages, &mut random, &contexts, kv_heads, head_size);
            let (mut rows, mut first_row) = (Vec::new(), 0);
            for (sequence, (context, count)) in sequences.iter().copied().enumerate() {
                let sequence = sequence as u32;
                rows.push(Rows { sequence, first_row, count, first_position: context - count });
                first_row += count;
            }
            let q_stride = (heads + 2 * kv_heads) * head_size;
            let count = first_row as usize;
            let q = activation.random(&mut random, count * q_stride);
            Case { activation, shape, paged, q, q_stride, rows, count }
        }

        pub(super) fn attended(&self, plan: &Plan) -> Vec<u16> {
            let Shape { heads, kv_heads, head_size, window, pages, .. } = self.shape;
            // All values of the states are NaN at first.
            let nans = |count: usize| Buffer::new(vec![0xffff; 2 * count]);
            let states = plan.states as usize * heads;
            let (sums, weights) = (nans(states * head_size), nans(states * 2));
            let max_arrivals = self.shape.blocks().max_arrivals(self.count as u32) as usize;
            let mut arrivals = Buffer::new(vec![0; 2 * max_arrivals]);
            let mut out = self.activation.zeros(self.count * heads * head_size);
            let params = AttentionDecodeParams {
                q: self.q.address(),
                pages: PageAddresses {
                    keys: self.paged.keys.address(),
                    values: self.paged.values.address(),
                    scales: self.paged.scale_address(),
                },
                out: out.address(),
                page_tables: host::address(&self.paged.page_tables),
                splits: host::address(&plan.splits),
                shared_rows: host::address(&plan.shared_rows),
                sums: sums.address(),
                weights: weights.address(),
                arrivals: arrivals.address(),
                q_stride: self.q_stride as u32,
                table_stride: self.paged.table_stride as u32,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                window,
                scale: self.shape.scale(),
            };
            let splits = plan.splits.len() as u32;
            let launch = launch(&params, splits, head_size as u32, self.activation, pages);
            let written = &mut [out.values_mut(), arrivals.values_mut()];
            host::run(&launch.expect("good shapes"), &params, written);
            assert!(arrivals.values().iter().all(|half| *half == 0), "the next launch counts from zero");
            out.values().to_vec()
        }

        pub(super) fn expected(&self) -> Vec<f64> {
            let Shape { heads, kv_heads, head_size, window, .. } = self.shape;
            let each = |rows: &Rows| (0..rows.count).map(|row| (*rows, row)).collect::<Vec<_>>();
            let attend = |(rows, row): (Rows, u32), head: usize| {
                let position = rows.first_position + row;
                let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
                let at = (rows.first_row + row) as usize * self.q_stride + head * head_size;
                let query = &self.q.values()[at..][..head_size];
                let seen = first as usize..position as usize + 1;
                let (sequence, kv_head) = (rows.sequence as usize, head / (heads / kv_heads));
                self.paged.attend(query, sequence, kv_head, seen, self.shape.scale().into())
            };
            let rows = self.rows.iter().flat_map(each);
            rows.flat_map(|row| (0..heads).flat_map(move |head| attend(row, head))).collect()
        }
    }

    fn check(activation: Activation, shape: Shape) {
        let case = Case::new(activation, shape, &[(1, 1), (300, 1), (37, 3), (150, 16), (16, 2)]);
        let mut plan = Plan::new(&case.rows, &[], shape.window, &shape.blocks());
        let found = case.attended(&plan);
        // Weights are rounded before the second product.
        activation.assert_close(&found, &case.expected(), 2.0 * case.paged.weight_rounding());
        // Neither spare splits nor the order in which splits arrive change anything.
        plan.splits.reverse();
        plan.splits.extend([Split::SPARE; 2]);
        assert!(case.attended(&plan) == found, "{activation:?} {shape:?}");
    }

    #[test]
    fn divided_contexts_match_the_reference() {
        for activation in Activation::ALL {
            for (heads, kv_heads, head_size) in
                [(9, 3, 64), (8, 1, 128), (2, 2, 16), (4, 2, 96), (9, 1, 32), (38, 2, 16), (5, 1, 256)]
            {
                for pages in PageFormat::ALL {
                    check(activation, Shape { pages, ..Shape::new(heads, kv_heads, head_size) });
                }
            }
        }
    }

    #[test]
    fn undivided_contexts_match_the_reference() {
        for activation in Activation::ALL {
            for pages in PageFormat::ALL {
                check(activation, Shape { blocks: 1, pages, ..Shape::new(9, 3, 64) });
            }
        }
    }

    #[test]
    fn rows_see_only_their_window() {
        for window in [1, 16, 100, 200] {
            for pages in PageFormat::ALL {
                check(Activation::Bf16, Shape { window, pages, ..Shape::new(4, 2, 32) });
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_beside_drafts() {
        for (activation, pages) in
            Activation::ALL.into_iter().flat_map(|of| PageFormat::ALL.map(|pages| (of, pages)))
        {
            let shape = Shape { blocks: 1, pages, ..Shape::new(4, 1, 64) };
            let case = Case::new(activation, shape, &[(200, 4)]);
            let together = Plan::new(&case.rows, &[], 0, &shape.blocks());
            assert_eq!(together.splits.len(), 1);
            let alone = Plan::new(&case.rows, &[], 0, &Blocks { rows: 1, ..shape.blocks() });
            assert_eq!(alone.splits.len(), 4);
            assert!(case.attended(&alone) == case.attended(&together), "{activation:?}");
        }
    }

    #[test]
    fn a_block_has_no_more_pairs_of_row_and_head_than_a_tile() {
        for (group, rows, blocks) in [(1, 16, 1), (3, 5, 1), (4, 4, 1), (8, 2, 1), (16, 1, 1), (19, 1, 2)] {
            assert_eq!((rows_per_split(2 * group, 2), blocks_per_split(2 * group, 2)), (rows, 2 * blocks));
        }
    }

    #[test]
    fn every_head_size_fits_the_shared_memory_of_every_architecture() {
        // The shared memory per block of sm_86, sm_89 and sm_120, which have the least.
        let wide = [PageFormat::Activations, PageFormat::Fp8].map(|pages| {
            assert!(HEAD_SIZES.iter().all(|size| shared_bytes(*size, pages) <= 99 << 10));
            [64, 128, 256].map(|size| (shared_bytes(size, pages), max_blocks_per_multiprocessor(size, pages)))
        });
        assert_eq!(wide[0], [(39_168, 5), (73_984, 3), (76_032, 3)]);
        assert_eq!(wide[1], [(34_560, 6), (61_184, 3), (61_440, 3)]);
    }

    #[test]
    fn unsupported_heads_are_rejected() {
        let none = Address::NONE;
        let params = AttentionDecodeParams {
            q: none,
            pages: PageAddresses { keys: none, values: none, scales: none },
            out: none,
            page_tables: none,
            splits: none,
            shared_rows: none,
            sums: none,
            weights: none,
            arrivals: none,
            q_stride: 0,
            table_stride: 0,
            heads: 9,
            kv_heads: 2,
            window: 0,
            scale: 1.0,
        };
        let refused = |head_size| {
            launch(&params, 1, head_size, Activation::F16, PageFormat::Fp8)
                .expect_err("9 is not a multiple of 2")
                .to_string()
        };
        assert!(refused(64).contains("multiple of the 2"), "{}", refused(64));
        assert!(refused(72).contains("16, 32, 64"), "{}", refused(72));
    }
}
