//! Converts blocks of any weight format to `f32` in plain code. This is the reference for tests of the packed layouts.
//!
//! Invariant: the result is exact up to one rounding per value. Block layouts are those that [`DType`] describes.

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
            DType::F8E4M3 => {
                let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                values.iter_mut().zip(&block[4..]).for_each(|(value, code)| *value = f8_e4m3(*code) * scale);
            }
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
        DType::Int4 => nibble(&block[3..], k),
        DType::Mxfp4 => MXFP4_INTEGERS[usize::from(nibble(&block[1..], k))],
        DType::Q5_0 => nibble(&block[6..], k) | bit(&block[2..], k) << 4,
        DType::Q5_1 => nibble(&block[8..], k) | bit(&block[4..], k) << 4,
        DType::Q8_0 => block[2 + k] ^ 0x80,
        DType::Q2K => two_bits(&block[16..], part, k),
        DType::Q3K => two_bits(&block[32..], part, k) | ((block[k] >> part) & 1) << 2,
        DType::Iq4Nl => IQ4_INTEGERS[usize::from(nibble(&block[2..], k))],
        DType::Iq4Xs => IQ4_INTEGERS[usize::from(nibble(&block[8 + 16 * part..], k))],
        DType::Q4K => k_nibble(&block[16..], part, k),
        DType::Q5K => k_nibble(&block[48..], part, k) | (((block[16 + k] >> part) & 1) << 4),
        DType::Q6K => {
            // Two halves of 128 values; in each, four runs of 32 share the 64 low bytes and 32 high bytes.
            let (half, run) = (part / 4, part % 4);
            let low = block[half * 64 + (run % 2) * 32 + k] >> (4 * (run / 2));
            let high = block[128 + half * 32 + k] >> (2 * run);
            (low & 15) | ((high & 3) << 4)
        }
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => 0,
    })
}

/// Returns `(scale, min)` for each half of the `part`-th group of 32 values, where value = scale * integer + min.
fn block_scales(dtype: DType, block: &[u8], part: usize) -> [(f32, f32); 2] {
    match dtype {
        DType::Q4_0 => [(half_at(block, 0), -8.0 * half_at(block, 0)); 2],
        DType::Q4_1 | DType::Q5_1 => [(half_at(block, 0), half_at(block, 2)); 2],
        DType::Q5_0 => [(half_at(block, 0), -16.0 * half_at(block, 0)); 2],
        DType::Q8_0 | DType::Iq4Nl => [(half_at(block, 0), -128.0 * half_at(block, 0)); 2],
        DType::Int4 => [(half_at(block, 0), -half_at(block, 0) * f32::from(block[2])); 2],
        DType::Mxfp4 => {
            // Half of the block's power of two, because the integers count halves.
            let scale = 2f64.powi(i32::from(block[0]) - 128) as f32;
            [(scale, -f32::from(MXFP4_ZERO) * scale); 2]
        }
        DType::Q2K => [0, 1].map(|half| {
            let packed = block[2 * part + half];
            (half_at(block, 80) * f32::from(packed & 15), -half_at(block, 82) * f32::from(packed >> 4))
        }),
        DType::Q3K => [0, 1].map(|half| {
            let scale = half_at(block, 108) * (f32::from(q3_scale(&block[96..108], 2 * part + half)) - 32.0);
            (scale, -4.0 * scale)
        }),
        DType::Iq4Xs => {
            let scale = half_at(block, 0) * (f32::from(iq4_scale(&block[2..8], part)) - 32.0);
            [(scale, -128.0 * scale); 2]
        }
        DType::Q4K | DType::Q5K => {
            let (scale, min) = six_bit_pair(&block[4..16], part);
            [(half_at(block, 0) * f32::from(scale), -half_at(block, 2) * f32::from(min)); 2]
        }
        DType::Q6K => [0, 1].map(|half| {
            let scale = half_at(block, 208) * f32::from(block[192 + part * 2 + half] as i8);
            (scale, -32.0 * scale)
        }),
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => [(0.0, 0.0); 2],
    }
}

/// The integers that 4 bits select in IQ4_NL and IQ4_XS, each plus 128.
pub(crate) const IQ4_INTEGERS: [u8; 16] =
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The values that 4 bits select in MXFP4, in halves, each plus [`MXFP4_ZERO`].
pub(crate) const MXFP4_INTEGERS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// The entry of [`MXFP4_INTEGERS`] that stands for zero.
pub(crate) const MXFP4_ZERO: u8 = 12;

/// Returns the value of a float of 8 bits with 4 bits of exponent and 3 of fraction. It has no infinities.
pub fn f8_e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 128 != 0 { -magnitude } else { magnitude }
}

/// Extracts one of sixteen 6-bit scales of Q3_K from 12 packed bytes.
pub(crate) fn q3_scale(bytes: &[u8], index: usize) -> u8 {
    let low = bytes[index % 8] >> (4 * (index / 8)) & 15;
    low | (bytes[8 + index % 4] >> (2 * (index / 4)) & 3) << 4
}

/// Extracts one of eight 6-bit scales of IQ4_XS from 6 packed bytes: the high bits of all, then the low bits.
pub(crate) fn iq4_scale(bytes: &[u8], part: usize) -> u8 {
    let low = bytes[2 + part / 2] >> (4 * (part % 2)) & 15;
    let high = u16::from_le_bytes([bytes[0], bytes[1]]) >> (2 * part) & 3;
    low | (high as u8) << 4
}

/// Returns the bits of one of eight runs of 32 values: four runs share 32 bytes.
fn two_bits(bytes: &[u8], part: usize, k: usize) -> u8 {
    bytes[part / 4 * 32 + k] >> (2 * (part % 4)) & 3
}

fn bit(bytes: &[u8], k: usize) -> u8 {
    bytes[k / 8] >> (k % 8) & 1
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The fixture has a random block of each quantized format, as the `gguf` package reads it.
    #[test]
    fn blocks_have_the_values_that_another_implementation_reads() {
        let fixture = include_str!("../../tests/fixtures/quantized-blocks/blocks.txt");
        let mut formats = Vec::new();
        for line in fixture.lines() {
            let mut words = line.split(' ');
            let (name, block) = (words.next().unwrap(), words.next().unwrap());
            let dtype = DType::ALL.into_iter().find(|dtype| dtype.to_string() == name).unwrap();
            let byte = |at| u8::from_str_radix(&block[at..at + 2], 16).unwrap();
            let block: Vec<u8> = (0..block.len()).step_by(2).map(byte).collect();
            let expected: Vec<f32> = words.map(|word| word.parse().unwrap()).collect();
            let mut found = vec![0.0; expected.len()];
            dequantize(dtype, &block, &mut found).unwrap();
            let largest = expected.iter().fold(0f32, |all, value| all.max(value.abs()));
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!((found - expected).abs() <= largest * 1e-5, "{name} {at}: {found} for {expected}");
            }
            formats.push(dtype);
        }
        assert_eq!(formats.len(), DType::ALL.into_iter().filter(|dtype| dtype.is_quantized()).count());
    }
}
