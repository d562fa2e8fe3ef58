//! Causal attention of prompt rows over paged keys and values, with tensor cores.

use super::kv_pages::{FP8_CHUNK, PAGE_SCALE_BYTES};
use super::{Activation, Address, Family, Kernel, Launch, PAGE_POSITIONS, PageFormat, WARP, WIDE_HEAD};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Maximum number of query rows per tile.
pub const QUERY_TILE_ROWS: u32 = device_constant!("attention_tiles.cuh", "QUERY_TILE_ROWS");
/// Number of query rows per block.
const TILE_ROWS: u32 = device_constant!("attention_prefill.cuh", "TILE_ROWS");
const PAD: u32 = device_constant!("attention_prefill.cuh", "PAD");
/// Maximum number of keys per tile.
pub const TILE_KEYS: u32 = device_constant!("attention_prefill.cuh", "MAX_TILE_KEYS");
const HEAD_SIZES: [u32; 6] = [16, 32, 64, 96, 128, 256];

/// The parameters of the kernel, whose blocks each handle one tile of queries and one head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionPrefillParams {
    /// `[rows, q_stride]`. Each row starts with the queries.
    pub q: Address,
    /// `[pages, PAGE_POSITIONS, kv_heads, head_size]`
    pub keys: Address,
    /// `[pages, PAGE_POSITIONS, kv_heads, head_size]`
    pub values: Address,
    /// f32 `[pages, kv_heads, 2, PAGE_POSITIONS]`: the scales of FP8 keys and of FP8 values.
    pub scales: Address,
    /// `[rows, heads, head_size]`
    pub out: Address,
    /// u32 `[sequences, table_stride]`.
    pub page_tables: Address,
    /// An array of [`QueryTile`].
    pub tiles: Address,
    /// f32 `[states, heads, head_size + 2]`. It may be [`Address::NONE`] without splits.
    pub states: Address,
    pub q_stride: u32,
    pub table_stride: u32,
    pub heads: u32,
    pub kv_heads: u32,
    /// Number of positions that a row sees, including its own. 0 means all positions up to its own.
    pub window: u32,
    /// Number of keys per split, a multiple of [`TILE_KEYS`]. 0 means that contexts are not split.
    pub split_keys: u32,
    pub scale: f32,
}

/// The parameters of the kernel that joins the splits of long contexts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionJoinParams {
    /// f32 `[states, heads, head_size + 2]`.
    pub states: Address,
    /// An array of [`Join`].
    pub joins: Address,
    /// `[rows, heads, head_size]`
    pub out: Address,
    pub heads: u32,
    pub head_size: u32,
}

/// Up to 128 consecutive rows of one sequence, and the range of keys that they attend to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryTile {
    /// Index of the first row in the batch.
    pub first_row: u32,
    /// Number of rows. 0 means that there is nothing to do.
    pub rows: u32,
    /// Position of the first row.
    pub first_position: u32,
    /// Index of the sequence's page table.
    pub sequence: u32,
    /// First key, which starts a split.
    pub first_key: u32,
    /// End of the keys, exclusive. Keys that a row does not see are skipped.
    pub last_key: u32,
    /// Index of the state of the first row. The states of the other rows follow.
    pub first_state: u32,
    /// 1 if its states are joined with those of other keys, by a [`Join`] for each row.
    pub is_part: u32,
}

/// The splits of one row, in the order of their keys.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// Index of the row in the batch.
    pub row: u32,
    /// Index of the state of the first split. The states of the other splits follow.
    pub first_state: u32,
    /// Number of splits. 0 means that there is nothing to do.
    pub parts: u32,
}

impl QueryTile {
    /// Returns the tiles for `rows` rows of a sequence, of which the first is row `first_row` of the batch. With splits,
    /// each row has a separate state, starting at index `first_state`.
    pub fn cover(
        sequence: u32,
        first_row: u32,
        rows: u32,
        first_position: u32,
        first_state: u32,
    ) -> impl Iterator<Item = Self> {
        (0..rows).step_by(QUERY_TILE_ROWS as usize).map(move |begun| QueryTile {
            first_row: first_row + begun,
            rows: (rows - begun).min(QUERY_TILE_ROWS),
            first_position: first_position + begun,
            sequence,
            first_key: 0,
            last_key: u32::MAX,
            first_state: first_state + begun,
            is_part: 0,
        })
    }

    /// Returns the tiles for one row of a sequence, one tile per split of its context. Their states start at index
    /// `first_state`.
    pub fn parts(
        sequence: u32,
        row: u32,
        position: u32,
        split_keys: u32,
        first_state: u32,
    ) -> impl Iterator<Item = Self> {
        (0..=position / split_keys).map(move |part| QueryTile {
            first_row: row,
            rows: 1,
            first_position: position,
            sequence,
            first_key: part * split_keys,
            last_key: (part + 1) * split_keys,
            first_state: first_state + part,
            is_part: 1,
        })
    }

    /// A tile for which the kernel does nothing.
    pub const NONE: QueryTile = QueryTile {
        first_row: 0,
        rows: 0,
        first_position: 0,
        sequence: 0,
        first_key: 0,
        last_key: 0,
        first_state: 0,
        is_part: 0,
    };

    /// Returns the tile in its memory layout.
    pub fn words(&self) -> [u32; 8] {
        let QueryTile {
            first_row,
            rows,
            first_position,
            sequence,
            first_key,
            last_key,
            first_state,
            is_part,
        } = *self;
        [first_row, rows, first_position, sequence, first_key, last_key, first_state, is_part]
    }
}

/// Returns the launch that joins the splits of rows.
pub fn join(params: &AttentionJoinParams, joins: u32, activation: Activation) -> Launch {
    let kernel = Kernel::of(Family::AttentionJoin).activation(activation);
    Launch::new(kernel, [joins, params.heads, 1], params.head_size.next_multiple_of(WARP).min(256))
}

/// Returns the launch for this number of tiles. Fails for head sizes, ratios of heads and strides that no kernel
/// supports.
pub fn launch(
    params: &AttentionPrefillParams,
    tiles: u32,
    head_size: u32,
    activation: Activation,
    pages: PageFormat,
) -> Result<Launch, KernelError> {
    const OP: &str = "attention_prefill";
    let sizes = || HEAD_SIZES.map(|size| size.to_string()).join(", ");
    super::require(HEAD_SIZES.contains(&head_size), OP, "head_size", head_size, sizes)?;
    let (heads, kv_heads) = (params.heads, params.kv_heads);
    super::require(kv_heads > 0 && heads % kv_heads.max(1) == 0, OP, "heads", heads, || {
        format!("a multiple of the {kv_heads} key-value heads")
    })?;
    super::multiple_of_8(OP, "q_stride", params.q_stride)?;
    let split = params.split_keys;
    super::require(split.is_multiple_of(TILE_KEYS), OP, "split_keys", split, || {
        format!("a multiple of {TILE_KEYS}")
    })?;
    let family = if split > 0 { Family::AttentionOrdered } else { Family::AttentionPrefill };
    let kernel = pages.of(Kernel::of(family)).size(head_size).activation(activation);
    let tile_keys = if head_size > WIDE_HEAD { TILE_KEYS / 2 } else { TILE_KEYS };
    let row = (head_size + PAD) * 2;
    let shared_bytes = match pages {
        PageFormat::Activations => (TILE_ROWS + 4 * tile_keys) * row,
        PageFormat::Fp8 => {
            let scales = tile_keys / PAGE_POSITIONS * PAGE_SCALE_BYTES;
            TILE_ROWS * row + 4 * tile_keys * (head_size + FP8_CHUNK) + 2 * scales
        }
    };
    let grid = [tiles, heads, QUERY_TILE_ROWS / TILE_ROWS];
    Ok(Launch { shared_bytes, ..Launch::new(kernel, grid, TILE_ROWS / 16 * WARP) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Buffer, Context},
        random::Random,
    };

    fn check(activation: Activation, shape: (usize, usize, usize), window: usize) {
        PageFormat::ALL.into_iter().for_each(|pages| check_pages(activation, pages, shape, window));
    }

    fn check_pages(activation: Activation, pages: PageFormat, shape: (usize, usize, usize), window: usize) {
        let (heads, kv_heads, head_size) = shape;
        let mut random = Random::fresh();
        // For each sequence, its length including the new rows, and the number of new rows.
        let sequences = [(70, 70), (200, 3), (130, 65), (1, 1), (150, 140)];
        let contexts = sequences.map(|(context, _)| context);
        let paged = Context::random(activation, pages, &mut random, &contexts, kv_heads, head_size);
        let rows: usize = sequences.iter().map(|(_, rows)| *rows).sum();
        let q_stride = (heads + 2 * kv_heads) * head_size;
        let q = activation.random(&mut random, rows * q_stride);
        let mut out = activation.zeros(rows * heads * head_size);
        let mut tiles = Vec::new();
        let mut positions = Vec::new();
        for (sequence, (context, new)) in sequences.into_iter().enumerate() {
            let first = context as usize - new;
            let first_row = positions.len() as u32;
            tiles.extend(QueryTile::cover(sequence as u32, first_row, new as u32, first as u32, 0));
            positions.extend((first..context as usize).map(|position| (sequence, position)));
        }
        let scale = 1.0 / (head_size as f32).sqrt();
        let params = AttentionPrefillParams {
            q: q.address(),
            keys: paged.keys.address(),
            values: paged.values.address(),
            scales: paged.scale_address(),
            out: out.address(),
            page_tables: host::address(&paged.page_tables),
            tiles: host::address(&tiles),
            states: Address::NONE,
            q_stride: q_stride as u32,
            table_stride: paged.table_stride as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            window: window as u32,
            split_keys: 0,
            scale,
        };
        let launch = launch(&params, tiles.len() as u32, head_size as u32, activation, pages);
        let launch = launch.expect("good shapes");
        host::run(&launch, &params, &mut [out.values_mut()]);
        let mut expected = Vec::new();
        for (row, (sequence, position)) in positions.into_iter().enumerate() {
            let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
            for head in 0..heads {
                let query = &q.values()[row * q_stride + head * head_size..][..head_size];
                let seen = first..position + 1;
                expected.extend(paged.attend(query, sequence, head / (heads / kv_heads), seen, scale.into()));
            }
        }
        // Weights are rounded before the second product.
        activation.assert_close(out.values(), &expected, 2.0 * paged.weight_rounding());
    }

    #[test]
    fn rows_attend_to_earlier_positions_within_their_window() {
        for activation in Activation::ALL {
            for window in [0, 16, 100] {
                check(activation, (3, 1, 64), window);
            }
            for (heads, kv_heads, head_size) in [(2, 2, 128), (1, 1, 16), (2, 1, 32), (1, 1, 96), (1, 1, 256)]
            {
                check(activation, (heads, kv_heads, head_size), 90);
            }
        }
    }

    /// The division of a test's rows into tiles.
    #[derive(Clone, Copy, Debug)]
    enum Tiling {
        Rows(usize),
        /// A tile for each split of each row.
        Parts,
    }

    struct Sequence<'a> {
        paged: &'a Context,
        q: &'a Buffer,
        context: usize,
        /// The number of rows at its end that attend.
        new: usize,
        shape: (usize, usize, usize),
        window: usize,
        split_keys: usize,
    }

    impl Sequence<'_> {
        fn attended(&self, activation: Activation, tiling: Tiling) -> Vec<u16> {
            let Sequence { paged, q, context, new, shape, window, split_keys } = *self;
            let (heads, kv_heads, head_size) = shape;
            let mut out = activation.zeros(new * heads * head_size);
            let (mut tiles, mut joins, mut states_used) = (Vec::new(), Vec::new(), 0);
            let rows_of_tile = if let Tiling::Rows(rows) = tiling { rows } else { 1 };
            for first in (0..new).step_by(rows_of_tile) {
                let (row, position) = (first as u32, (context - new + first) as u32);
                let rows = rows_of_tile.min(new - first) as u32;
                match tiling {
                    Tiling::Rows(_) => tiles.extend(QueryTile::cover(0, row, rows, position, states_used)),
                    Tiling::Parts => {
                        tiles.extend(QueryTile::parts(0, row, position, split_keys as u32, states_used));
                        let parts = position / split_keys as u32 + 1;
                        joins.push(Join { row, first_state: states_used, parts });
                    }
                }
                states_used = tiles.iter().map(|tile| tile.first_state + tile.rows).max().unwrap_or(0);
            }
            // A tile without rows changes nothing.
            tiles.push(QueryTile::NONE);
            let states = vec![f32::NAN; states_used as usize * heads * (head_size + 2)];
            let params = AttentionPrefillParams {
                q: q.address(),
                keys: paged.keys.address(),
                values: paged.values.address(),
                scales: paged.scale_address(),
                out: out.address(),
                page_tables: host::address(&paged.page_tables),
                tiles: host::address(&tiles),
                states: host::address(&states),
                q_stride: ((heads + 2 * kv_heads) * head_size) as u32,
                table_stride: paged.table_stride as u32,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                window: window as u32,
                split_keys: split_keys as u32,
                scale: 1.0 / (head_size as f32).sqrt(),
            };
            let launch = launch(&params, tiles.len() as u32, head_size as u32, activation, paged.format);
            let launch = launch.expect("good shapes");
            host::run(&launch, &params, &mut [out.values_mut()]);
            if !joins.is_empty() {
                let params = AttentionJoinParams {
                    states: host::address(&states),
                    joins: host::address(&joins),
                    out: out.address(),
                    heads: heads as u32,
                    head_size: head_size as u32,
                };
                host::run(&join(&params, joins.len() as u32, activation), &params, &mut [out.values_mut()]);
            }
            out.values().to_vec()
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_split_and_in_a_batch() {
        let mut random = Random::fresh();
        // The rows start in one tile of keys and end in another.
        let (context, new) = (131, 6);
        let every = [(0, 0), (40, 0), (0, 64), (0, 128), (90, 64)];
        let formats = Activation::ALL.into_iter().flat_map(|of| PageFormat::ALL.map(|pages| (of, pages)));
        for (activation, pages) in formats {
            for (shape, divided) in [((2, 1, 32), &every[..]), ((1, 1, 256), &every[4..])] {
                let (heads, kv_heads, head_size) = shape;
                let paged =
                    Context::random(activation, pages, &mut random, &[context as u32], kv_heads, head_size);
                let q = activation.random(&mut random, new * (heads + 2 * kv_heads) * head_size);
                for (window, split_keys) in divided.iter().copied() {
                    let sequence = Sequence { paged: &paged, q: &q, context, new, shape, window, split_keys };
                    let alone = sequence.attended(activation, Tiling::Rows(1));
                    for tiling in [Tiling::Rows(6), Tiling::Rows(4), Tiling::Parts] {
                        if split_keys == 0 && matches!(tiling, Tiling::Parts) {
                            continue;
                        }
                        let found = sequence.attended(activation, tiling);
                        assert!(found == alone, "{activation:?} {shape:?} {window} {split_keys}: {tiling:?}");
                    }
                    let mut expected = Vec::new();
                    for row in 0..new {
                        let position = context - new + row;
                        let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
                        for head in 0..heads {
                            let query =
                                &q.values()[(row * (heads + 2 * kv_heads) + head) * head_size..][..head_size];
                            let kv_head = head / (heads / kv_heads);
                            let scale = 1.0 / (head_size as f32).sqrt();
                            expected.extend(paged.attend(
                                query,
                                0,
                                kv_head,
                                first..position + 1,
                                scale.into(),
                            ));
                        }
                    }
                    activation.assert_close(&alone, &expected, 2.0 * paged.weight_rounding());
                }
            }
        }
    }

    #[test]
    fn every_head_size_fits_the_shared_memory_of_every_architecture() {
        // The shared memory per block of sm_86, sm_89 and sm_120, which have the least.
        const LEAST: u32 = 99 << 10;
        let none = Address::NONE;
        let params = AttentionPrefillParams {
            q: none,
            keys: none,
            values: none,
            scales: none,
            out: none,
            page_tables: none,
            tiles: none,
            states: none,
            q_stride: 8,
            table_stride: 1,
            heads: 1,
            kv_heads: 1,
            window: 0,
            split_keys: 0,
            scale: 1.0,
        };
        for head_size in HEAD_SIZES {
            for pages in PageFormat::ALL {
                let launch =
                    launch(&params, 1, head_size, Activation::Bf16, pages).expect("a size with a kernel");
                assert!(launch.shared_bytes <= LEAST, "{head_size}: {}", launch.shared_bytes);
            }
        }
        let refused = launch(&params, 1, 72, Activation::Bf16, PageFormat::Fp8)
            .expect_err("72 is unsupported")
            .to_string();
        assert!(refused.contains("96, 128, 256"), "{refused}");
    }
}
