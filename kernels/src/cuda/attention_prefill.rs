//! Causal attention of prompt rows over paged keys and values, with tensor cores.

use super::{Activation, Address, Launch, WARP};
use crate::KernelError;

/// As in the kernel.
const TILE_ROWS: u32 = 64;
const PAD: u32 = 8;
const HEAD_SIZES: [u32; 6] = [16, 32, 64, 96, 128, 256];

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionPrefillParams {
    /// `[rows, q_stride]`: of each row the queries first
    pub q: Address,
    /// `[pages, page_size, kv_heads, head_size]`
    pub keys: Address,
    pub values: Address,
    /// `[rows, heads, head_size]`
    pub out: Address,
    /// u32 `[sequences, table_stride]`
    pub page_tables: Address,
    /// [`QueryTile`]s
    pub tiles: Address,
    pub q_stride: u32,
    pub table_stride: u32,
    pub page_size: u32,
    pub heads: u32,
    pub kv_heads: u32,
    /// Positions that a row sees, itself included; 0: all before it
    pub window: u32,
    pub scale: f32,
}

/// Up to 64 neighbouring rows of one sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryTile {
    /// In the batch.
    pub first_row: u32,
    pub rows: u32,
    /// Of its first row.
    pub first_position: u32,
    /// Whose page table.
    pub sequence: u32,
}

impl QueryTile {
    /// The tiles of `rows` rows of a sequence, of which the first is row `first_row` of the batch.
    pub fn cover(
        sequence: u32,
        first_row: u32,
        rows: u32,
        first_position: u32,
    ) -> impl Iterator<Item = Self> {
        (0..rows).step_by(TILE_ROWS as usize).map(move |begun| QueryTile {
            first_row: first_row + begun,
            rows: (rows - begun).min(TILE_ROWS),
            first_position: first_position + begun,
            sequence,
        })
    }
}

pub fn launch(
    params: &AttentionPrefillParams,
    tiles: u32,
    head_size: u32,
    activation: Activation,
) -> Result<Launch, KernelError> {
    const OP: &str = "attention_prefill";
    let sizes = || HEAD_SIZES.map(|size| size.to_string()).join(", ");
    super::supported(HEAD_SIZES.contains(&head_size), OP, "head_size", head_size, sizes)?;
    let (heads, kv_heads) = (params.heads, params.kv_heads);
    super::supported(kv_heads > 0 && heads % kv_heads.max(1) == 0, OP, "heads", heads, || {
        format!("a multiple of the {kv_heads} key-value heads")
    })?;
    super::multiple_of_8(OP, "q_stride", params.q_stride)?;
    let name = format!("attention_prefill_{head_size}_{}", activation.suffix());
    let tile_keys = if head_size > 128 { 32 } else { 64 };
    let shared_bytes = (TILE_ROWS + 4 * tile_keys) * (head_size + PAD) * 2;
    Ok(Launch { shared_bytes, ..Launch::new(name, [tiles, heads, 1], TILE_ROWS / 16 * WARP) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Context},
        random::Random,
    };

    fn check(activation: Activation, heads: usize, kv_heads: usize, head_size: usize, window: usize) {
        let mut random = Random::fresh();
        // Of each sequence, how long it is with its new rows, and how many those are.
        let sequences = [(70, 70), (200, 3), (130, 65), (1, 1)];
        let contexts = sequences.map(|(context, _)| context);
        let paged = Context::random(activation, &mut random, &contexts, kv_heads, head_size);
        let rows: usize = sequences.iter().map(|(_, rows)| *rows).sum();
        let q_stride = (heads + 2 * kv_heads) * head_size;
        let q = activation.random(&mut random, rows * q_stride);
        let mut out = activation.zeros(rows * heads * head_size);
        let mut tiles = Vec::new();
        let mut places = Vec::new();
        for (sequence, (context, new)) in sequences.into_iter().enumerate() {
            let first = context as usize - new;
            tiles.extend(QueryTile::cover(sequence as u32, places.len() as u32, new as u32, first as u32));
            places.extend((first..context as usize).map(|position| (sequence, position)));
        }
        let scale = 1.0 / (head_size as f32).sqrt();
        let params = AttentionPrefillParams {
            q: q.address(),
            keys: paged.keys.address(),
            values: paged.values.address(),
            out: out.address(),
            page_tables: host::address(&paged.page_tables),
            tiles: host::address(&tiles),
            q_stride: q_stride as u32,
            table_stride: paged.table_stride as u32,
            page_size: paged.page_size as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            window: window as u32,
            scale,
        };
        let launch = launch(&params, tiles.len() as u32, head_size as u32, activation).expect("good shapes");
        host::run(&launch, &params, &mut [out.values_mut()]);
        let mut expected = Vec::new();
        for (row, (sequence, position)) in places.into_iter().enumerate() {
            let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
            for head in 0..heads {
                let query = &q.values()[row * q_stride + head * head_size..][..head_size];
                let seen = first..position + 1;
                expected.extend(paged.attend(query, sequence, head / (heads / kv_heads), seen, scale.into()));
            }
        }
        // Weights are rounded to the format of the activations before the second product.
        activation.assert_close(out.values(), &expected, 2.0 * activation.rounding());
    }

    #[test]
    fn rows_see_what_is_before_them_and_within_their_window() {
        for activation in Activation::ALL {
            for window in [0, 16, 100] {
                check(activation, 3, 1, 64, window);
            }
            for (heads, kv_heads, head_size) in [(2, 2, 128), (1, 1, 16), (2, 1, 32), (1, 1, 96), (1, 1, 256)]
            {
                check(activation, heads, kv_heads, head_size, 90);
            }
        }
    }
    #[test]
    fn heads_of_every_size_fit_into_what_a_block_has_on_every_architecture() {
        // Of sm_86, sm_89 and sm_120, which have the least.
        const LEAST: u32 = 99 << 10;
        let none = Address::NONE;
        let params = AttentionPrefillParams {
            q: none,
            keys: none,
            values: none,
            out: none,
            page_tables: none,
            tiles: none,
            q_stride: 8,
            table_stride: 1,
            page_size: 16,
            heads: 1,
            kv_heads: 1,
            window: 0,
            scale: 1.0,
        };
        for head_size in HEAD_SIZES {
            let launch = launch(&params, 1, head_size, Activation::Bf16).expect("a size with a kernel");
            assert!(launch.shared_bytes <= LEAST, "{head_size}: {}", launch.shared_bytes);
        }
        let refused = launch(&params, 1, 72, Activation::Bf16).expect_err("72").to_string();
        assert!(refused.contains("96, 128, 256"), "{refused}");
    }
}
