//! Causal attention of prompt rows over paged keys and values, with the asynchronous tensor cores of Hopper. It computes what
//! `attention_prefill` computes without splits, from the same parameters.

use super::attention_prefill::{self, AttentionPrefillParams, QUERY_TILE_ROWS};
use super::{Activation, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

const TILE_KEYS: u32 = device_constant!("attention_hopper.cu", "TILE_KEYS");
const TILE_STAGES: u32 = device_constant!("attention_hopper.cu", "TILE_STAGES");
const GROUP_ROWS: u32 = device_constant!("attention_hopper.cu", "GROUP_ROWS");
const HEAD_SIZES: [u32; 2] = [64, 128];
/// The space that the kernel needs to align its shared memory, in bytes.
const ALIGNMENT: u32 = 1024;
/// Maximum number of blocks in the second direction of a grid.
const MAX_TILES: u32 = 65_535;

/// Returns the launch for this number of tiles, or `None` if only `attention_prefill` supports it. Fails for shapes that no
/// kernel supports.
pub fn launch(
    params: &AttentionPrefillParams,
    tiles: u32,
    head_size: u32,
    activation: Activation,
) -> Result<Option<Launch>, KernelError> {
    attention_prefill::launch(params, tiles, head_size, activation)?;
    if !HEAD_SIZES.contains(&head_size) || params.split_keys > 0 || tiles > MAX_TILES {
        return Ok(None);
    }
    let name = format!("attention_hopper_{head_size}_{}", activation.suffix());
    let rows = QUERY_TILE_ROWS + 2 * TILE_STAGES * TILE_KEYS;
    let shared_bytes = ALIGNMENT + rows * head_size * 2;
    // One more warpgroup copies keys and values.
    let threads = (QUERY_TILE_ROWS / GROUP_ROWS + 1) * 4 * WARP;
    Ok(Some(Launch { shared_bytes, ..Launch::new(name, [params.heads, tiles, 1], threads) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::attention_prefill::QueryTile;
    use crate::cuda::host::{self, Context};
    use crate::cuda::{Address, on_device};
    use crate::random::Random;

    /// Compares the attention of several sequences with a plain reference. Each sequence has a length including its new rows,
    /// and a number of new rows.
    fn check(
        activation: Activation,
        sequences: &[(usize, usize)],
        shape: (usize, usize, usize),
        window: usize,
    ) {
        let (heads, kv_heads, head_size) = shape;
        let mut random = Random::fresh();
        let contexts: Vec<_> = sequences.iter().map(|(context, _)| *context as u32).collect();
        let paged = Context::random(activation, &mut random, &contexts, kv_heads, head_size);
        let rows: usize = sequences.iter().map(|(_, rows)| *rows).sum();
        let q_stride = (heads + 2 * kv_heads) * head_size;
        let q = activation.random(&mut random, rows * q_stride);
        let mut out = activation.zeros(rows * heads * head_size);
        let (mut tiles, mut positions) = (Vec::new(), Vec::new());
        for (sequence, (context, new)) in sequences.iter().copied().enumerate() {
            let first = context - new;
            let first_row = positions.len() as u32;
            tiles.extend(QueryTile::cover(sequence as u32, first_row, new as u32, first as u32, 0));
            positions.extend((first..context).map(|position| (sequence, position)));
        }
        tiles.push(QueryTile::NONE);
        let scale = 1.0 / (head_size as f32).sqrt();
        let params = AttentionPrefillParams {
            q: q.address(),
            keys: paged.keys.address(),
            values: paged.values.address(),
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
        let launch = launch(&params, tiles.len() as u32, head_size as u32, activation).expect("good shapes");
        let launch = launch.expect("a shape of the kernel");
        on_device::with(|device| {
            if !device.is_hopper() {
                return;
            }
            on_device::run(device, &launch, &params);
            // What the device wrote is read through the address.
            let found = out.values_mut().to_vec();
            let mut expected = Vec::new();
            for (row, (sequence, position)) in positions.iter().copied().enumerate() {
                let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
                for head in 0..heads {
                    let query = &q.values()[row * q_stride + head * head_size..][..head_size];
                    let seen = first..position + 1;
                    expected.extend(paged.attend(
                        query,
                        sequence,
                        head / (heads / kv_heads),
                        seen,
                        scale.into(),
                    ));
                }
            }
            activation.assert_close(&found, &expected, 2.0 * activation.rounding());
        });
    }

    #[test]
    fn rows_attend_to_earlier_positions_within_their_window_on_hopper() {
        let ragged = [(70, 70), (200, 3), (130, 65), (1, 1), (400, 290)];
        for activation in Activation::ALL {
            for head_size in HEAD_SIZES {
                for window in [0, 16, 100, 300] {
                    check(activation, &ragged, (3, 1, head_size as usize), window);
                }
                check(activation, &[(700, 257)], (4, 2, head_size as usize), 0);
            }
        }
    }

    #[test]
    fn other_head_sizes_and_splits_are_left_to_the_other_kernel() {
        let none = Address::NONE;
        let params = AttentionPrefillParams {
            q: none,
            keys: none,
            values: none,
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
        let at = |params: &AttentionPrefillParams, head_size| launch(params, 1, head_size, Activation::Bf16);
        for head_size in HEAD_SIZES {
            let launch = at(&params, head_size).expect("good shapes").expect("a size with a kernel");
            // The shared memory per block of sm_90.
            assert!(launch.shared_bytes + 1024 <= 227 << 10, "{head_size}: {}", launch.shared_bytes);
            let split = AttentionPrefillParams { split_keys: 512, ..params };
            assert_eq!(at(&split, head_size), Ok(None));
        }
        assert_eq!(at(&params, 96), Ok(None));
        at(&params, 72).expect_err("no kernel supports 72");
    }
}
