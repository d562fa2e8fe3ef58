//! The formats in which checkpoints store weights, and the bytes that a matrix takes in each of them.
//!
//! Invariant: sizes saturate instead of overflowing, so an absurd shape becomes a size that fits nowhere.

use std::fmt;

/// The format of one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// Values of this many bytes.
    Float { bytes: u64 },
    /// Integers or small floats of some bits, each row with scales for groups of values.
    Grouped { bits: u64, group: Group, scale_bytes: u64, has_zero_points: bool },
    /// Values of 8 bits with an f32 scale for each block of rows and columns.
    Blocks8 { rows: u64, columns: u64 },
}

/// The values that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    /// This number of values of a row.
    Values(u64),
    Row,
    Tensor,
}

impl Storage {
    pub(super) const BF16: Storage = Storage::Float { bytes: 2 };
    /// Values of 8 bits with an f32 scale for each row.
    pub(super) const FP8_ROWS: Storage =
        Storage::Grouped { bits: 8, group: Group::Row, scale_bytes: 4, has_zero_points: false };
    /// 32 values of 4 bits with a shared exponent of 8.
    pub(super) const MXFP4: Storage =
        Storage::Grouped { bits: 4, group: Group::Values(32), scale_bytes: 1, has_zero_points: false };

    /// Returns the size of a matrix in bytes.
    pub(super) fn bytes(self, rows: u64, columns: u64) -> u64 {
        match self {
            Storage::Float { bytes } => rows.saturating_mul(columns).saturating_mul(bytes),
            Storage::Grouped { bits, group, scale_bytes, has_zero_points } => {
                // Rows are packed into whole words of 32 bits.
                let words = columns.saturating_mul(bits).div_ceil(32);
                let values = rows.saturating_mul(words).saturating_mul(4);
                let groups = match group {
                    Group::Values(values) => rows.saturating_mul(columns.div_ceil(values.max(1))),
                    Group::Row => rows,
                    Group::Tensor => 1,
                };
                let scales = groups.saturating_mul(scale_bytes);
                let zeros = if has_zero_points { groups.saturating_mul(bits).div_ceil(8) } else { 0 };
                values.saturating_add(scales).saturating_add(zeros)
            }
            Storage::Blocks8 { rows: block_rows, columns: block_columns } => {
                let blocks =
                    rows.div_ceil(block_rows.max(1)).saturating_mul(columns.div_ceil(block_columns.max(1)));
                rows.saturating_mul(columns).saturating_add(blocks.saturating_mul(4))
            }
        }
    }

    /// Returns the number of values of a row that cannot be separated.
    pub(super) fn run(self) -> u64 {
        match self {
            Storage::Grouped { group: Group::Values(values), .. } => values,
            Storage::Blocks8 { columns, .. } => columns,
            Storage::Float { .. } | Storage::Grouped { .. } => 1,
        }
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Storage::Float { bytes } => write!(f, "{} bits", bytes * 8),
            Storage::MXFP4 => f.write_str("MXFP4"),
            Storage::Grouped { bits, group: Group::Values(values), .. } => {
                write!(f, "{bits} bits in groups of {values}")
            }
            Storage::Grouped { bits, .. } => write!(f, "{bits} bits"),
            Storage::Blocks8 { rows, columns } => write!(f, "FP8 in blocks of {rows}×{columns}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_takes_its_values_and_scales() {
        let int4 = |has_zero_points| Storage::Grouped {
            bits: 4,
            group: Group::Values(32),
            scale_bytes: 2,
            has_zero_points,
        };
        // One expert of Kimi K2.5: 44.04 M parameters in 24.8 MB.
        let expert = 3 * int4(false).bytes(2048, 7168);
        assert_eq!(expert, 3 * (2048 * 7168 / 2 + 2048 * 224 * 2));
        assert!((24.7e6..24.9e6).contains(&(expert as f64)));
        assert_eq!(int4(true).bytes(8, 64), 8 * 32 + 16 * 2 + 8);
        assert_eq!(Storage::MXFP4.bytes(2, 64), 2 * 32 + 4);
        assert_eq!(Storage::Blocks8 { rows: 128, columns: 128 }.bytes(576, 7168), 576 * 7168 + 5 * 56 * 4);
        assert_eq!(Storage::BF16.bytes(u64::MAX, 2), u64::MAX);
    }
}
