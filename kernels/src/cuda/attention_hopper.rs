//! Causal attention of prompt rows over paged keys and values, with the asynchronous tensor cores and copies of Hopper. It computes
//! what `attention_prefill` computes without splits, from the same parameters and tensor maps of the keys and values, which have the
//! format of the activations: its tensor cores read them from shared memory as they are in the pages.

use super::attention_prefill::{self, AttentionPrefillParams, QUERY_TILE_ROWS};
use super::device::{Device, TensorMap};
use super::operation::ACTIVATION_BYTES;
use super::{Activation, Family, Kernel, Launch, PAGE_POSITIONS, PageFormat, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

const TILE_KEYS: u32 = device_constant!("attention_hopper.cu", "TILE_KEYS");
const TILE_STAGES: u32 = device_constant!("attention_hopper.cu", "TILE_STAGES");
const GROUP_ROWS: u32 = device_constant!("attention_hopper.cu", "GROUP_ROWS");
const COLUMN_VALUES: u32 = device_constant!("attention_hopper.cu", "COLUMN_VALUES");
const HEAD_SIZES: [u32; 2] = [64, 128];
/// The space that the kernel needs to align its shared memory, in bytes.
const ALIGNMENT: u32 = 1024;
/// Maximum number of blocks in the second direction of a grid.
const MAX_TILES: u32 = 65_535;

/// The parameters of the kernel, whose blocks each handle one tile of queries and one head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionHopperParams {
    /// Its keys and values are read through the maps.
    pub of: AttentionPrefillParams,
    pub keys: TensorMap,
    pub values: TensorMap,
}

impl AttentionHopperParams {
    /// Adds tensor maps to parameters with addresses of this device. The keys take at least `page_bytes` bytes, and so do the
    /// values; pages that do not lie within these are not read.
    pub(super) fn new(
        device: &Device,
        of: AttentionPrefillParams,
        head_size: u32,
        page_bytes: usize,
    ) -> Result<Self, KernelError> {
        let (sizes, of_box) = page_sizes(of.kv_heads, head_size, page_bytes)?;
        let keys = device.tensor_map(of.keys, sizes, of_box)?;
        let values = device.tensor_map(of.values, sizes, of_box)?;
        Ok(AttentionHopperParams { of, keys, values })
    }
}

/// Returns the sizes of the keys or the values in this many bytes, and those of the box that one copy reads, from the innermost
/// dimension. Fails if the bytes do not hold a whole page.
fn page_sizes(kv_heads: u32, head_size: u32, page_bytes: usize) -> Result<([u64; 4], [u32; 4]), KernelError> {
    let values_per_page = PAGE_POSITIONS as usize * kv_heads as usize * head_size as usize;
    let pages = page_bytes / (values_per_page * ACTIVATION_BYTES).max(1);
    super::require(pages > 0, "attention_hopper", "pages", 0, || "at least 1".to_owned())?;
    let sizes = [head_size.into(), kv_heads.into(), PAGE_POSITIONS.into(), pages as u64];
    Ok((sizes, [COLUMN_VALUES, 1, PAGE_POSITIONS, 1]))
}

/// Returns the launch for this number of tiles, or `None` if only `attention_prefill` supports it. Fails for shapes that no
/// kernel supports.
pub fn launch(
    params: &AttentionPrefillParams,
    tiles: u32,
    head_size: u32,
    activation: Activation,
) -> Result<Option<Launch>, KernelError> {
    attention_prefill::launch(params, tiles, head_size, activation, PageFormat::Activations)?;
    if !HEAD_SIZES.contains(&head_size) || params.split_keys > 0 || tiles > MAX_TILES {
        return Ok(None);
    }
    let kernel = Kernel::of(Family::AttentionHopper).size(head_size).activation(activation);
    let rows = QUERY_TILE_ROWS + 2 * TILE_STAGES * TILE_KEYS;
    let shared_bytes = ALIGNMENT + rows * head_size * 2;
    // One more warpgroup copies keys and values.
    let threads = (QUERY_TILE_ROWS / GROUP_ROWS + 1) * 4 * WARP;
    Ok(Some(Launch { shared_bytes, ..Launch::new(kernel, [params.heads, tiles, 1], threads) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::attention_prefill::QueryTile;
    use crate::cuda::device::Emulation;
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
        let mut paged =
            Context::random(activation, PageFormat::Activations, &mut random, &contexts, kv_heads, head_size);
        spoil_ends(&mut paged, &contexts, kv_heads * head_size);
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
            scales: Address::NONE,
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
            let page_bytes = paged.keys.values().len() * ACTIVATION_BYTES;
            on_device::run_as(device, &launch, &params, |params| {
                AttentionHopperParams::new(device, params, head_size as u32, page_bytes).expect("tensor maps")
            });
            // The device wrote through the address.
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

    /// Replaces what the last page of each sequence holds behind its context by what is not a number.
    fn spoil_ends(paged: &mut Context, contexts: &[u32], values_per_position: usize) {
        const NOT_A_NUMBER: u16 = 0x7fff;
        for (sequence, context) in contexts.iter().map(|context| *context as usize).enumerate() {
            for position in context..context.next_multiple_of(paged.page_size) {
                let page = paged.page_tables[sequence * paged.table_stride + position / paged.page_size];
                let slot = page as usize * paged.page_size + position % paged.page_size;
                for buffer in [&mut paged.keys, &mut paged.values] {
                    buffer.values_mut()[slot * values_per_position..][..values_per_position]
                        .fill(NOT_A_NUMBER);
                }
            }
        }
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

    /// Parameters for eight query heads and two of keys and values, without addresses.
    fn params() -> AttentionPrefillParams {
        let none = Address::NONE;
        AttentionPrefillParams {
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
            heads: 8,
            kv_heads: 2,
            window: 0,
            split_keys: 0,
            scale: 1.0,
        }
    }

    #[test]
    fn a_block_has_three_warpgroups_and_fits_into_a_multiprocessor() {
        for (head_size, shared_bytes) in [(64, 82_944), (128, 164_864)] {
            let launch = launch(&params(), 5, head_size, Activation::F16).expect("good shapes");
            let launch = launch.expect("a size with a kernel");
            assert_eq!(launch.kernel.to_string(), format!("attention_hopper_{head_size}_f16"));
            assert_eq!((launch.grid, launch.block), ([8, 5, 1], [384, 1, 1]));
            assert_eq!(launch.shared_bytes, shared_bytes);
            // The shared memory per block of sm_90, of which the barriers take some.
            assert!(launch.shared_bytes + 1024 <= 227 << 10);
        }
    }

    #[test]
    fn other_head_sizes_splits_and_longer_grids_are_left_to_the_other_kernel() {
        let at = |params: &AttentionPrefillParams, tiles, head_size| {
            launch(params, tiles, head_size, Activation::Bf16)
        };
        for head_size in HEAD_SIZES {
            let split = AttentionPrefillParams { split_keys: 512, ..params() };
            assert_eq!(at(&split, 1, head_size), Ok(None));
            assert_eq!(at(&params(), MAX_TILES + 1, head_size), Ok(None));
        }
        assert_eq!(at(&params(), 1, 96), Ok(None));
        at(&params(), 1, 72).expect_err("no kernel supports 72");
    }

    #[test]
    fn boxes_are_columns_of_a_page_and_the_last_page_is_whole() {
        let page = 16 * 2 * 128 * ACTIVATION_BYTES;
        let sizes = |bytes| page_sizes(2, 128, bytes).map(|(sizes, _)| sizes);
        assert_eq!(page_sizes(2, 128, 7 * page), Ok(([128, 2, 16, 7], [64, 1, 16, 1])));
        assert_eq!(sizes(8 * page - 1), Ok([128, 2, 16, 7]));
        let error = sizes(page - 1).expect_err("no page").to_string();
        assert_eq!(error, "attention_hopper: pages is 0; supported: at least 1");
    }

    #[test]
    fn the_maps_are_where_the_kernel_and_the_driver_expect_them() {
        use std::mem::{align_of, offset_of, size_of};
        let places = [offset_of!(AttentionHopperParams, keys), offset_of!(AttentionHopperParams, values)];
        assert_eq!(places, [128, 256]);
        let params = [size_of::<AttentionHopperParams>(), align_of::<AttentionHopperParams>()];
        assert_eq!(params, [384, 64]);
    }

    #[test]
    fn a_device_without_tensor_maps_has_an_error_for_them() {
        let device = Device::emulated(Emulation::default());
        let error = AttentionHopperParams::new(&device, params(), 64, 1 << 20).expect_err("no maps");
        assert!(error.to_string().contains("no tensor maps"), "{error}");
    }
}
