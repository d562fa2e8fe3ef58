//! The number formats of weights and their block geometry.
//!
//! Invariant: `block_bytes` holds exactly `block_len` values. Nothing here reads data.

use std::fmt;

/// A block of values that share scales.
#[derive(Clone, Copy)]
struct Block {
    values: usize,
    bytes: usize,
}

/// The storage format of a tensor's values. Quantized formats follow the GGUF block layouts, except for [`DType::Int4`] and
/// [`DType::F8E4M3`], which no GGUF file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    /// 4 bits that select one of 16 unevenly spaced integers.
    Iq4Nl,
    /// The integers of [`DType::Iq4Nl`] in large blocks.
    Iq4Xs,
    /// 4-bit floats with a power of two.
    Mxfp4,
    /// 4-bit integers with a zero point: a half-precision scale, a byte with the zero point, and the integers as in
    /// [`DType::Q4_0`].
    Int4,
    /// 8-bit floats of 4 exponent bits and 3 fraction bits, behind a scale in `f32`.
    F8E4M3,
}

impl DType {
    /// Every format, in a fixed order.
    pub const ALL: [DType; 18] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Iq4Nl,
        DType::Iq4Xs,
        DType::Mxfp4,
        DType::Int4,
        DType::F8E4M3,
    ];

    fn block(self) -> Block {
        let (values, bytes) = match self {
            DType::F32 => (1, 4),
            DType::F16 | DType::BF16 => (1, 2),
            DType::Mxfp4 => (32, 17),
            DType::Q4_0 | DType::Iq4Nl => (32, 18),
            DType::Int4 => (32, 19),
            DType::Q4_1 => (32, 20),
            DType::Q5_0 => (32, 22),
            DType::Q5_1 => (32, 24),
            DType::Q8_0 => (32, 34),
            DType::F8E4M3 => (32, 36),
            DType::Q2K => (256, 84),
            DType::Q3K => (256, 110),
            DType::Iq4Xs => (256, 136),
            DType::Q4K => (256, 144),
            DType::Q5K => (256, 176),
            DType::Q6K => (256, 210),
        };
        Block { values, bytes }
    }

    /// Returns the number of values per block.
    pub fn block_len(self) -> usize {
        self.block().values
    }

    /// Returns the number of bytes per block.
    pub fn block_bytes(self) -> usize {
        self.block().bytes
    }

    /// Returns the size in bytes of a row of `values` values, or `None` if the row is not a whole number of blocks or the
    /// size overflows.
    pub fn row_bytes(self, values: usize) -> Option<usize> {
        if !values.is_multiple_of(self.block_len()) {
            return None;
        }
        (values / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Returns whether the format stores blocks of values that share scales.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Returns whether products round the activations to 8 bits beside weights of this format. They do so beside integers;
    /// 8-bit floats are multiplied with unrounded activations.
    pub fn rounds_activations(self) -> bool {
        self.is_quantized() && self != DType::F8E4M3
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q5_0 => "Q5_0",
            DType::Q5_1 => "Q5_1",
            DType::Q8_0 => "Q8_0",
            DType::Q2K => "Q2_K",
            DType::Q3K => "Q3_K",
            DType::Q4K => "Q4_K",
            DType::Q5K => "Q5_K",
            DType::Q6K => "Q6_K",
            DType::Iq4Nl => "IQ4_NL",
            DType::Iq4Xs => "IQ4_XS",
            DType::Mxfp4 => "MXFP4",
            DType::Int4 => "INT4",
            DType::F8E4M3 => "F8_E4M3",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_sizes_of_gguf_files() {
        let sizes = |dtype: DType| (dtype.block_len(), dtype.block_bytes());
        assert_eq!([DType::Q4_0, DType::Q4_1, DType::Q8_0].map(sizes), [(32, 18), (32, 20), (32, 34)]);
        assert_eq!([DType::Q4K, DType::Q6K].map(sizes), [(256, 144), (256, 210)]);
    }

    #[test]
    fn partial_blocks_and_overflow_have_no_size() {
        assert_eq!(DType::Q4_1.row_bytes(576), Some(360));
        assert_eq!(DType::Q4_1.row_bytes(577), None);
        assert_eq!(DType::Q6K.row_bytes(128), None);
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }
}
