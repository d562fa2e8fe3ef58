//! The encodings of weights in safetensors: plain floats, 4-bit integers in groups, and 8-bit floats in blocks.
//!
//! Invariant: each value becomes the nearest one that its scale allows, with ties to even. Names, shapes and the order of bits are
//! those that `checkpoint/coded` reads: compressed-tensors' for integers and DeepSeek's for floats.

use half::bf16;

use super::GROUP;

/// Number of rows, and of columns, that share a scale of 8-bit floats.
const BLOCK: usize = 128;
/// The largest value of an 8-bit float.
const LARGEST_F8: f32 = 448.0;
/// The smallest scale of integers, which half precision holds exactly with all bits of BF16.
const SMALLEST_SCALE: f32 = 1.0 / 16384.0;
/// The range of integers is -8 to 7; half of it is the multiple of the scale that the largest value gets.
const HALF_RANGE: f32 = 7.5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    Bf16,
    Int4,
    Fp8,
}

/// A tensor of a file of safetensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) name: String,
    /// The name of its type.
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

impl Stored {
    fn new(name: String, dtype: &'static str, value_bytes: usize, shape: Vec<usize>) -> Self {
        let values: usize = shape.iter().product();
        Stored { name, dtype, shape, bytes: (values * value_bytes) as u64 }
    }
}

impl Encoding {
    /// Returns whether rows can be encoded one after the other.
    pub(super) fn is_plain(self) -> bool {
        matches!(self, Encoding::F32 | Encoding::Bf16)
    }

    /// Returns the tensors that a weight is stored as, in the order of their bytes. Only matrices have scales.
    pub(super) fn stored(self, name: &str, shape: &[usize]) -> Vec<Stored> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        match (self, shape) {
            (Encoding::Int4, &[rows, columns]) => vec![
                Stored::new(format!("{module}.weight_packed"), "I32", 4, vec![rows, columns / 8]),
                Stored::new(format!("{module}.weight_scale"), "BF16", 2, vec![rows, columns / GROUP]),
                Stored::new(format!("{module}.weight_shape"), "I64", 8, vec![2]),
            ],
            (Encoding::Fp8, &[rows, columns]) => vec![
                Stored::new(name.to_owned(), "F8_E4M3", 1, vec![rows, columns]),
                Stored::new(
                    format!("{module}.weight_scale_inv"),
                    "F32",
                    4,
                    vec![rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)],
                ),
            ],
            (Encoding::F32, _) => vec![Stored::new(name.to_owned(), "F32", 4, shape.to_vec())],
            _ => vec![Stored::new(name.to_owned(), "BF16", 2, shape.to_vec())],
        }
    }

    /// Encodes rows of `columns` values: all rows of the weight, unless the encoding is plain.
    pub(super) fn encode(self, values: &[f32], columns: usize) -> Vec<u8> {
        match self {
            Encoding::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Encoding::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
            Encoding::Int4 => integers(values, columns),
            Encoding::Fp8 => floats(values, columns),
        }
    }
}

/// Returns packed integers, then the scales of all groups, then the shape.
fn integers(values: &[f32], columns: usize) -> Vec<u8> {
    let mut packed = Vec::with_capacity(values.len() / 2);
    let mut scales = Vec::with_capacity(values.len() / GROUP * 2);
    for group in values.chunks_exact(GROUP) {
        let scale = bf16::from_f32((largest(group) / HALF_RANGE).max(SMALLEST_SCALE));
        scales.extend(scale.to_le_bytes());
        let scale = scale.to_f32();
        let integer = |value: f32| ((value / scale).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
        // The lowest bits of a word of eight integers hold the first one.
        packed.extend(group.chunks_exact(2).map(|pair| integer(pair[0]) | integer(pair[1]) << 4));
    }
    packed.extend(scales);
    let rows = values.len() / columns.max(1);
    packed.extend([rows, columns].into_iter().flat_map(|size| (size as i64).to_le_bytes()));
    packed
}

/// Returns the codes of all values, then the scales of all blocks.
fn floats(values: &[f32], columns: usize) -> Vec<u8> {
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::new();
    for rows in values.chunks(BLOCK * columns) {
        let blocks = (0..columns).step_by(BLOCK).map(|first| {
            let block = first..(first + BLOCK).min(columns);
            let largest =
                rows.chunks_exact(columns).map(|row| largest(&row[block.clone()])).fold(0.0, f32::max);
            let scale = largest / LARGEST_F8;
            // The scale of a block of zeros does not matter.
            if scale > 0.0 { scale } else { 1.0 }
        });
        let blocks: Vec<f32> = blocks.collect();
        for row in rows.chunks_exact(columns) {
            codes.extend(row.iter().enumerate().map(|(at, value)| f8_code(value / blocks[at / BLOCK])));
        }
        scales.extend(blocks.iter().flat_map(|scale| scale.to_le_bytes()));
    }
    codes.extend(scales);
    codes
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0f32, |all, value| all.max(value.abs()))
}

/// Returns the code of the nearest 8-bit float with 4 bits of exponent and 3 of fraction.
fn f8_code(value: f32) -> u8 {
    let magnitude = value.abs().min(LARGEST_F8);
    // Values below 2^-6 have the steps of those with this exponent.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    let steps = (magnitude / step).round_ties_even() as i32;
    // Sixteen steps are the first value of the next exponent.
    let code = ((exponent + 6) * 8 + steps) as u8;
    if value.is_sign_negative() { code | 128 } else { code }
}

#[cfg(test)]
mod tests {
    use skep_kernels::dequantize::f8_e4m3;

    use super::*;

    #[test]
    fn each_value_becomes_the_nearest_eight_bit_float() {
        for code in 0..=0x7e_u8 {
            let value = f8_e4m3(code);
            assert_eq!((f8_code(value), f8_code(-value)), (code, code | 128));
            if code < 0x7e {
                let next = f8_e4m3(code + 1);
                let middle = (value + next) / 2.0;
                let even = if code % 2 == 0 { code } else { code + 1 };
                assert_eq!(f8_code(middle), even, "{middle} is a tie");
                assert_eq!(f8_code(middle - (next - value) / 64.0), code);
                assert_eq!(f8_code(middle + (next - value) / 64.0), code + 1);
            }
        }
        assert_eq!((f8_code(1e9), f8_code(-1e9)), (0x7e, 0xfe), "larger values become the largest");
    }

    #[test]
    fn integers_are_as_near_as_their_scale_allows() {
        let values: Vec<f32> = (0..128).map(|at| ((at * 37 % 101) as f32 - 50.0) * 0.013).collect();
        let bytes = integers(&values, 64);
        assert_eq!(bytes.len(), 64 + 4 * 2 + 16);
        let scale = |group: usize| {
            let at = 64 + 2 * group;
            bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
        };
        for (at, value) in values.iter().enumerate() {
            let integer = f32::from(bytes[at / 2] >> (4 * (at % 2)) & 15) - 8.0;
            let scale = scale(at / GROUP);
            // The largest positive value is half a step above the largest integer, and the scale is rounded by up to 2^-8.
            assert!((integer * scale - value).abs() <= scale * 0.53, "{at}: {value}, {integer} × {scale}");
        }
        assert_eq!(bytes[bytes.len() - 16..], [2i64.to_le_bytes(), 64i64.to_le_bytes()].concat());
        let zeros = integers(&[0.0; 32], 32);
        assert_eq!(zeros[..16], [0x88; 16]);
    }

    #[test]
    fn blocks_of_floats_have_scales_of_their_own() {
        // Two blocks of columns and two of rows, of which the second ones are partial.
        let (rows, columns) = (130, 160);
        let value = |row: usize, column: usize| {
            let size = if row < BLOCK && column < BLOCK { 1.0 } else { 100.0 };
            ((row * 31 + column * 17) % 89) as f32 / 89.0 * size
        };
        let values: Vec<f32> = (0..rows * columns).map(|at| value(at / columns, at % columns)).collect();
        let bytes = floats(&values, columns);
        let shapes: Vec<u64> =
            Encoding::Fp8.stored("w.weight", &[rows, columns]).iter().map(|stored| stored.bytes).collect();
        assert_eq!(shapes, [(rows * columns) as u64, 4 * 4]);
        assert_eq!(bytes.len() as u64, shapes.iter().sum::<u64>());
        let (codes, scales) = bytes.split_at(rows * columns);
        for (at, value) in values.iter().enumerate() {
            let block = at / columns / BLOCK * 2 + at % columns / BLOCK;
            let scale = f32::from_le_bytes(scales[4 * block..][..4].try_into().unwrap());
            let found = f8_e4m3(codes[at]) * scale;
            assert!((found - value).abs() <= value.abs() / 16.0 + scale / 512.0, "{at}: {found}, {value}");
        }
    }
}
