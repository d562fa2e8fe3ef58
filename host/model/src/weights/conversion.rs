//! Converts matrices to another format while they are loaded.
//!
//! Invariant: a plan and a load choose the same format for the same matrix. Norms, biases and the weights of routers are never
//! converted.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use skep_kernels::{DType, WorkerPool, dequantize};

use crate::error::ModelError;

/// Number of values that share a scale in Q8_0.
const BLOCK: usize = 32;
/// Number of values that a thread converts at once.
const VALUES_AT_ONCE: usize = 1 << 18;

/// The format that matrices get when they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightConversion {
    /// The format that they have in the model's files.
    #[default]
    Keep,
    /// Integers of 8 bits with a scale for every 32 of them. A matrix whose rows are not whole blocks keeps its format.
    Q8_0,
    Bf16,
}

impl WeightConversion {
    const ALL: [WeightConversion; 3] =
        [WeightConversion::Q8_0, WeightConversion::Bf16, WeightConversion::Keep];

    /// Returns the format in memory of a matrix with this format and number of columns in the files.
    pub(crate) fn format_of(self, dtype: DType, columns: usize) -> DType {
        match self {
            WeightConversion::Q8_0 if columns.is_multiple_of(BLOCK) => DType::Q8_0,
            WeightConversion::Keep | WeightConversion::Q8_0 => dtype,
            WeightConversion::Bf16 => DType::BF16,
        }
    }
}

impl fmt::Display for WeightConversion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            WeightConversion::Keep => "keep",
            WeightConversion::Q8_0 => "q8_0",
            WeightConversion::Bf16 => "bf16",
        })
    }
}

impl FromStr for WeightConversion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|conversion| conversion.to_string() == text)
            .ok_or_else(|| format!("unknown format of weights {text:?}; expected one of q8_0, bf16, keep"))
    }
}

/// Returns a matrix of `columns` columns in another format: F32, BF16 or Q8_0. The threads of `pool` share the rows.
pub(super) fn converted(
    pool: &WorkerPool,
    name: &str,
    [from, to]: [DType; 2],
    [rows, columns]: [usize; 2],
    data: &[u8],
) -> Result<Vec<u8>, ModelError> {
    let wrong = |problem: String| ModelError::tensor(name, problem);
    let row_bytes = |dtype: DType| {
        let bytes = dtype.row_bytes(columns).filter(|bytes| *bytes > 0);
        bytes.ok_or_else(|| wrong(format!("rows of {columns} values are not whole blocks of {dtype}")))
    };
    let (from_row, to_row) = (row_bytes(from)?, row_bytes(to)?);
    let length = rows.checked_mul(to_row).ok_or_else(|| wrong("its size overflows".to_owned()))?;
    if data.len() != rows * from_row {
        return Err(wrong(format!("has {} bytes instead of {}", data.len(), rows * from_row)));
    }
    let mut all = vec![0u8; length];
    let rows_at_once = (VALUES_AT_ONCE / columns).max(1);
    let parts = data.chunks(rows_at_once * from_row).zip(all.chunks_mut(rows_at_once * to_row));
    let parts: Vec<_> = parts.map(Mutex::new).collect();
    let failed = Mutex::new(None);
    pool.run(parts.len(), |part| {
        let mut part = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
        let (source, target) = &mut *part;
        if let Err(problem) = convert([from, to], source, target) {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(problem);
        }
    });
    drop(parts);
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(problem) => Err(wrong(problem)),
        None => Ok(all),
    }
}

/// Returns whether BF16 holds all of these F16 numbers exactly. The threads of `pool` share them.
pub(super) fn bf16_holds(pool: &WorkerPool, numbers: &[u8]) -> bool {
    let parts: Vec<&[u8]> = numbers.chunks(2 * VALUES_AT_ONCE).collect();
    let all = AtomicBool::new(true);
    pool.run(parts.len(), |part| {
        if all.load(Ordering::Relaxed) && !parts[part].as_chunks().0.iter().all(|number| is_bf16(*number)) {
            all.store(false, Ordering::Relaxed);
        }
    });
    all.into_inner()
}

/// Returns whether an F16 number has at most 8 significant bits. BF16 has all of its exponents.
fn is_bf16(number: [u8; 2]) -> bool {
    let bits = u16::from_le_bytes(number);
    let fraction = bits & 0x3ff;
    match bits & 0x7c00 {
        // The leading bit of a subnormal number is in the fraction.
        0 => fraction == 0 || fraction >> fraction.trailing_zeros() < 1 << 8,
        _ => fraction.is_multiple_of(1 << 3),
    }
}

fn convert([from, to]: [DType; 2], source: &[u8], target: &mut [u8]) -> Result<(), String> {
    let mut values = vec![0.0f32; target.len() / to.block_bytes() * to.block_len()];
    dequantize(from, source, &mut values).map_err(|error| error.to_string())?;
    match to {
        DType::F32 => {
            let bytes = target.chunks_exact_mut(4);
            bytes.zip(&values).for_each(|(bytes, value)| bytes.copy_from_slice(&value.to_le_bytes()));
        }
        DType::BF16 => {
            let bytes = target.chunks_exact_mut(2);
            let rounded = values.iter().map(|value| bf16::from_f32(*value).to_le_bytes());
            bytes.zip(rounded).for_each(|(bytes, value)| bytes.copy_from_slice(&value));
        }
        DType::Q8_0 => {
            let blocks = target.chunks_exact_mut(DType::Q8_0.block_bytes());
            for (block, values) in blocks.zip(values.chunks_exact(BLOCK)) {
                quantize(values, block)?;
            }
        }
        other => return Err(format!("cannot be converted to {other}")),
    }
    Ok(())
}

/// Writes a block of Q8_0: a scale in half precision, and for each value the nearest multiple of it.
fn quantize(values: &[f32], block: &mut [u8]) -> Result<(), String> {
    let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = f16::from_f32(largest / 127.0);
    if !scale.is_finite() || values.iter().any(|value| !value.is_finite()) {
        return Err("has values that Q8_0 cannot hold".to_owned());
    }
    block[..2].copy_from_slice(&scale.to_le_bytes());
    let scale = scale.to_f32();
    for (byte, value) in block[2..].iter_mut().zip(values) {
        let multiple = if scale == 0.0 { 0.0 } else { (value / scale).round().clamp(-127.0, 127.0) };
        *byte = (multiple as i8) as u8;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use skep_kernels::matmul::PackedMatrix;

    use super::super::WeightLoader;
    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::config::ModelConfig;
    use crate::shard::Shard;

    fn matrix(rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns).map(|at| ((at * 37 % 101) as f32 - 50.0) * 0.01).collect()
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn conversions_are_as_near_as_their_format_allows() {
        let pool = WorkerPool::new(2).unwrap();
        // More rows than one thread converts at once.
        let (rows, columns) = (9000, 64);
        let values = matrix(rows, columns);
        for (to, step) in [(DType::F32, 0.0), (DType::BF16, 1.0 / 256.0), (DType::Q8_0, 0.51 / 127.0)] {
            let data = converted(&pool, "m", [DType::F32, to], [rows, columns], &bytes(&values)).unwrap();
            let mut found = vec![0.0; values.len()];
            dequantize(to, &data, &mut found).unwrap();
            for (row, (found, wanted)) in found.chunks(BLOCK).zip(values.chunks(BLOCK)).enumerate() {
                let largest = wanted.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                for (found, wanted) in found.iter().zip(wanted) {
                    assert!((found - wanted).abs() <= largest * step, "{to}, block {row}: {found} {wanted}");
                }
            }
        }
    }

    #[test]
    fn numbers_that_bf16_holds_are_recognized() {
        for bits in 0..=u16::MAX {
            let number = f16::from_bits(bits);
            if number.is_nan() {
                continue;
            }
            let rounded = bf16::from_f32(number.to_f32()).to_f32();
            assert_eq!(is_bf16(bits.to_le_bytes()), rounded == number.to_f32(), "{number}");
        }
        let pool = WorkerPool::new(2).unwrap();
        let mut numbers: Vec<u8> =
            (0..3 * VALUES_AT_ONCE).flat_map(|at| f16::from_f32((at % 200) as f32).to_le_bytes()).collect();
        assert!(bf16_holds(&pool, &numbers));
        let last = numbers.len() - 2;
        numbers[last..].copy_from_slice(&f16::from_f32(1.001).to_le_bytes());
        assert!(!bf16_holds(&pool, &numbers));
    }

    #[test]
    fn matrices_in_f16_become_bf16_only_where_that_changes_nothing() {
        let pool = WorkerPool::new(1).unwrap();
        let checkpoint = Checkpoint::synthetic(ModelConfig::shape("tiny").unwrap(), DType::F16).unwrap();
        let format = |exact, narrows, [first, rest]: [f32; 2]| {
            let mut numbers = vec![f16::from_f32(rest); 40 * 32];
            numbers[0] = f16::from_f32(first);
            let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let mut loader = WeightLoader::new(&pool, &checkpoint, Shard { rank: 0, ranks: 1 });
            loader = loader.with_format(exact, WeightConversion::Keep).narrowing_f16(narrows);
            let matrix = loader.packed("m", DType::F16, [40, 32], || Ok(Cow::Owned(numbers))).unwrap();
            let format = if exact { DType::F32 } else { DType::F16 };
            assert_eq!(loader.bytes(), PackedMatrix::packed_len(format, 40, 32).unwrap() as u64);
            matrix.dtype()
        };
        assert_eq!(format(false, true, [0.75, -3.0]), DType::BF16);
        assert_eq!(format(false, true, [1.001, -3.0]), DType::F16);
        assert_eq!(format(false, false, [0.75, -3.0]), DType::F16);
        assert_eq!(format(true, false, [1.001, -3.0]), DType::F32);
    }

    #[test]
    fn formats_are_chosen_by_the_length_of_rows_and_read_by_name() {
        let (q8_0, bf16) =
            ("q8_0".parse::<WeightConversion>().unwrap(), "bf16".parse::<WeightConversion>().unwrap());
        assert_eq!(
            (q8_0.format_of(DType::F32, 64), q8_0.format_of(DType::F32, 40)),
            (DType::Q8_0, DType::F32)
        );
        assert_eq!(
            (bf16.format_of(DType::Q4_0, 64), bf16.format_of(DType::F32, 40)),
            (DType::BF16, DType::BF16)
        );
        assert_eq!(WeightConversion::default().format_of(DType::Q4K, 256), DType::Q4K);
        for conversion in WeightConversion::ALL {
            assert_eq!(conversion.to_string().parse(), Ok(conversion));
        }
        assert!("q4_0".parse::<WeightConversion>().unwrap_err().contains("q8_0, bf16, keep"));
    }

    #[test]
    fn values_that_a_format_cannot_hold_are_an_error_that_names_the_weight() {
        let pool = WorkerPool::new(1).unwrap();
        for value in [f32::NAN, f32::INFINITY, 1e9] {
            let mut values = matrix(1, 32);
            values[7] = value;
            let error = converted(&pool, "the weight", [DType::F32, DType::Q8_0], [1, 32], &bytes(&values));
            let error = error.unwrap_err().to_string();
            assert!(error.contains("the weight") && error.contains("Q8_0 cannot hold"), "{error}");
        }
        let zeros = converted(&pool, "m", [DType::F32, DType::Q8_0], [1, 32], &bytes(&[0.0; 32])).unwrap();
        assert!(zeros.iter().all(|byte| *byte == 0));
    }
}
