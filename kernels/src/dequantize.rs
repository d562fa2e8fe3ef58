//! Converts blocks of any weight format to `f32` in plain code. This is the reference for tests of the packed layouts.
//!
//! Invariant: the result is exact up to one rounding per value. Block layouts are those of GGUF.

use half::{bf16, f16};

use crate::error::expect_len;
use crate::{DType, KernelError};

/// Converts `bytes` to floats in `out`. The length of `out` determines how many blocks `bytes` must hold.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    const OP: &str = "dequantize";
    let expected =
        dtype.row_bytes(out.len()).ok_or(KernelError::PartialBlock { op: OP, dtype, values: out.len() })?;
    expect_len(OP, "the byte length", expected, bytes.len())?;
    let blocks = bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
    for (block, values) in blocks {
        match dtype {
            DType::F32 => values[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            DType::F16 => values[0] = half_at(block, 0),
            DType::BF16 => values[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            _ => {
                for part in 0..values.len() / 32 {
                    let integers = block_integers(dtype, block, part);
                    let halves = block_scales(dtype, block, part);
                    for (k, value) in values[part * 32..][..32].iter_mut().enumerate() {
                        let (scale, min) = halves[k / 16];
                        *value = scale * f32::from(integers[k]) + min;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns the unsigned integers of the `part`-th group of 32 values in a quantized block.
fn block_integers(dtype: DType, block: &[u8], part: usize) -> [u8; 32] {
    std::array::from_fn(|k| match dtype {
        DType::Q4_0 => nibble(&block[2..], k),
        DType::Q4_1 => nibble(&block[4..], k),
        DType::Q8_0 => block[2 + k] ^ 0x80,
        DType::Q4K => k_nibble(&block[16..], part, k),
        DType::Q5K => k_nibble(&block[48..], part, k) | (((block[16 + k] >> part) & 1) << 4),
        DType::Q6K => {
            // Two halves of 128 values; in each, four runs of 32 share the 64 low bytes and 32 high bytes.
            let (half, run) = (part / 4, part % 4);
            let low = block[half * 64 + (run % 2) * 32 + k] >> (4 * (run / 2));
            let high = block[128 + half * 32 + k] >> (2 * run);
            (low & 15) | ((high & 3) << 4)
        }
        DType::F32 | DType::F16 | DType::BF16 => 0,
    })
}

/// Returns `(scale, min)` for each half of the `part`-th group of 32 values, where value = scale * integer + min.
fn block_scales(dtype: DType, block: &[u8], part: usize) -> [(f32, f32); 2] {
    match dtype {
        DType::Q4_0 => [(half_at(block, 0), -8.0 * half_at(block, 0)); 2],
        DType::Q4_1 => [(half_at(block, 0), half_at(block, 2)); 2],
        DType::Q8_0 => [(half_at(block, 0), -128.0 * half_at(block, 0)); 2],
        DType::Q4K | DType::Q5K => {
            let (scale, min) = six_bit_pair(&block[4..16], part);
            [(half_at(block, 0) * f32::from(scale), -half_at(block, 2) * f32::from(min)); 2]
        }
        DType::Q6K => [0, 1].map(|half| {
            let scale = half_at(block, 208) * f32::from(block[192 + part * 2 + half] as i8);
            (scale, -32.0 * scale)
        }),
        DType::F32 | DType::F16 | DType::BF16 => [(0.0, 0.0); 2],
    }
}

fn nibble(bytes: &[u8], k: usize) -> u8 {
    (bytes[k % 16] >> (4 * (k / 16))) & 15
}

fn k_nibble(bytes: &[u8], part: usize, k: usize) -> u8 {
    (bytes[(part / 2) * 32 + k] >> (4 * (part % 2))) & 15
}

/// Extracts the 6-bit scale and min of one of eight groups from 12 packed bytes.
pub(crate) fn six_bit_pair(bytes: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        (bytes[part] & 63, bytes[part + 4] & 63)
    } else {
        let both = bytes[part + 4];
        ((both & 15) | ((bytes[part - 4] >> 6) << 4), (both >> 4) | ((bytes[part] >> 6) << 4))
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}
