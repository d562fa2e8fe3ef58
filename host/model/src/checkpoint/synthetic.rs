//! A checkpoint of random weights. It runs as fast as a trained model of the same shape and needs no file.
//!
//! Invariant: every block is valid and holds small numbers, so each step has finite logits. All matrices are views of
//! the same bytes, as many as the largest matrix has, so a shape with billions of parameters takes little memory on
//! this machine.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use skep_kernels::DType;

use super::coded::StoredAs;
use super::{Checkpoint, Format, Source, TensorLocation, layout};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::mapping::Mapping;

/// Shown in errors in place of a file path.
const NAME: &str = "random weights";
/// Maximum size of one matrix in bytes.
const MAX_MATRIX_BYTES: usize = 8 << 30;

impl Checkpoint {
    /// Creates random weights of the given shape and format. Vectors (norms and biases) are in F32, as in GGUF files.
    pub fn synthetic(config: ModelConfig, dtype: DType) -> Result<Self, ModelError> {
        let config = config.check()?;
        let required: Vec<_> = layout::required(&config).collect();
        let (mut matrix_bytes, mut vector_bytes) = (0, 0);
        for (name, shape) in &required {
            match shape[..] {
                [rows, columns] => matrix_bytes = matrix_bytes.max(matrix_size(name, dtype, rows, columns)?),
                _ => vector_bytes = vector_bytes.max(shape.iter().product::<usize>() * 4),
            }
        }
        // The bytes hold matrices first, then norms, then biases.
        let norms = matrix_bytes;
        let biases = norms + vector_bytes;
        let mut bytes = vec![0; biases + vector_bytes];
        let mut random = Random(0);
        random.fill(dtype, &mut bytes[..norms]);
        random.fill_norms(&mut bytes[norms..biases]);
        random.fill(DType::F32, &mut bytes[biases..]);
        let located = |(name, shape): (String, Vec<usize>)| {
            let (dtype, start) = match shape.len() {
                2 => (dtype, 0),
                _ if name.ends_with(".bias") => (DType::F32, biases),
                _ => (DType::F32, norms),
            };
            let values: usize = shape.iter().product();
            let bytes: Range<usize> = start..start + values / dtype.block_len() * dtype.block_bytes();
            let (format, stored) = (Format::Weights(dtype), StoredAs::Values);
            (name, TensorLocation { format, shape, file: 0, bytes, stored })
        };
        let tensors: BTreeMap<String, TensorLocation> = required.into_iter().map(located).collect();
        let files = vec![Mapping::made(NAME, bytes)];
        Self { path: PathBuf::from(NAME), source: Source::Synthetic, files, tensors, config }.checked()
    }
}

fn matrix_size(name: &str, dtype: DType, rows: usize, columns: usize) -> Result<usize, ModelError> {
    let row_bytes = dtype.row_bytes(columns).ok_or_else(|| {
        let block = dtype.block_len();
        let problem = format!(
            "rows of {columns} values do not divide into whole blocks of {block} in {dtype}; use a format with smaller blocks, such as \
             BF16, F16, Q8_0 or Q4_0"
        );
        ModelError::tensor(name, problem)
    })?;
    rows.checked_mul(row_bytes).filter(|bytes| *bytes <= MAX_MATRIX_BYTES).ok_or_else(|| {
        ModelError::tensor(
            name,
            format!("{rows} rows of {row_bytes} bytes exceed the limit of {MAX_MATRIX_BYTES} bytes"),
        )
    })
}

/// The SplitMix64 generator (Steele, Lea and Flood 2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Fills `bytes` with blocks of numbers of either sign, most of them between 2^-7 and 2^-3.
    pub(crate) fn fill(&mut self, dtype: DType, bytes: &mut [u8]) {
        match dtype {
            // The sign, the two low bits of the exponent and the fraction are random; the other bits of the exponent
            // are fixed.
            DType::F32 => self.fill_words(bytes, 0x81ff_ffff_81ff_ffff, 0x3c00_0000_3c00_0000),
            DType::BF16 => self.fill_words(bytes, 0x81ff_81ff_81ff_81ff, 0x3c00_3c00_3c00_3c00),
            DType::F16 => self.fill_words(bytes, 0x8fff_8fff_8fff_8fff, 0x2000_2000_2000_2000),
            _ => {
                self.fill_words(bytes, u64::MAX, 0);
                let (offsets, exponent) = scales(dtype);
                for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                    for &offset in offsets {
                        // Any bytes are valid integers of a block, but its scales have to be numbers of a moderate
                        // size.
                        let fraction = u16::from_le_bytes([block[offset], block[offset + 1]]) & 0x83ff;
                        block[offset..offset + 2].copy_from_slice(&(fraction | exponent << 10).to_le_bytes());
                    }
                    bound(dtype, block);
                }
            }
        }
    }

    /// Fills `bytes` with numbers between 1 and 1.125.
    pub(crate) fn fill_norms(&mut self, bytes: &mut [u8]) {
        self.fill_words(bytes, 0x000f_ffff_000f_ffff, 0x3f80_0000_3f80_0000);
    }

    /// Takes random bits where `mask` has ones, and the bits of `fixed` elsewhere.
    fn fill_words(&mut self, bytes: &mut [u8], mask: u64, fixed: u64) {
        for chunk in bytes.chunks_mut(8) {
            let word = (self.next() & mask | fixed).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// Makes a block of random bytes valid in the formats whose scales are not in half precision, and bounds zero points.
fn bound(dtype: DType, block: &mut [u8]) {
    match dtype {
        DType::Mxfp4 => block[0] = 119 + block[0] % 4,
        // The scale's sign is random, so it does not matter that all zero points are 8.
        DType::Int4 => block[2] = 8,
        DType::F8E4M3 => {
            let fraction = u32::from_le_bytes([block[0], block[1], block[2], 0]) & 0x007f_ffff;
            block[..4].copy_from_slice(&(fraction | 113 << 23).to_le_bytes());
            // Two codes are not numbers.
            block[4..].iter_mut().filter(|code| **code & 127 == 127).for_each(|code| *code ^= 1);
        }
        _ => {}
    }
}

/// Returns the offsets of the half-precision scales in a block, and the biased exponent that keeps the block's values
/// small.
pub(crate) fn scales(dtype: DType) -> (&'static [usize], u16) {
    match dtype {
        DType::Q4_0 | DType::Int4 => (&[0], 7),
        DType::Q4_1 => (&[0, 2], 7),
        DType::Q5_0 => (&[0], 6),
        DType::Q5_1 => (&[0, 2], 6),
        DType::Q8_0 | DType::Iq4Nl => (&[0], 3),
        DType::Q2K => (&[80, 82], 6),
        DType::Q3K => (&[108], 4),
        DType::Iq4Xs => (&[0], 0),
        DType::Q4K | DType::Q5K => (&[0, 2], 1),
        // The scale is multiplied by two integers of up to 7 and 5 bits, so it is subnormal, as in real files.
        DType::Q6K => (&[208], 0),
        DType::F32 | DType::F16 | DType::BF16 | DType::Mxfp4 | DType::F8E4M3 => (&[], 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Batch, BatchSequence, LogitsWanted, PageId};
    use crate::executor::{CpuExecutor, Executor as _, ExecutorOptions};
    use skep_kernels::dequantize;

    fn tiny() -> ModelConfig {
        ModelConfig::shape("tiny").expect("the shape is known")
    }

    #[test]
    fn random_weights_run_in_every_format_and_have_finite_logits() {
        for dtype in DType::ALL {
            let config = ModelConfig { qkv_bias: true, qk_norm: true, ..tiny() };
            let checkpoint = Checkpoint::synthetic(config, dtype).unwrap();
            let options = ExecutorOptions { threads: Some(1), kv_tokens: Some(64), ..Default::default() };
            let mut executor = CpuExecutor::load(&checkpoint, options).unwrap();
            let tokens = vec![5, 600, 7, 1023];
            let rows = BatchSequence { tokens, start: 0, pages: vec![PageId(1)], logits: LogitsWanted::Last };
            executor.forward(&Batch { sequences: vec![rows] }).unwrap();
            let logits = executor.logits(0).unwrap();
            assert!(logits.iter().all(|logit| logit.is_finite()), "{dtype}");
            assert!(logits.iter().any(|logit| *logit != logits[0]), "{dtype}");
        }
    }

    #[test]
    fn weights_are_small_numbers_of_either_sign_and_norms_are_close_to_one() {
        for dtype in DType::ALL {
            let checkpoint = Checkpoint::synthetic(tiny(), dtype).unwrap();
            let tensor = checkpoint.tensor("model.layers.1.mlp.down_proj.weight").unwrap();
            let mut values = vec![0.0; 256 * 512];
            dequantize(dtype, tensor.data, &mut values).unwrap();
            let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64;
            let deviation = (values.iter().map(|value| f64::from(value * value)).sum::<f64>()
                / values.len() as f64)
                .sqrt();
            assert!((0.005..0.2).contains(&deviation), "{dtype}: {deviation}");
            assert!(mean.abs() < deviation / 8.0, "{dtype}: mean {mean}, deviation {deviation}");
            let norm = checkpoint.tensor("model.norm.weight").unwrap();
            let mut values = vec![0.0; 256];
            dequantize(norm.dtype, norm.data, &mut values).unwrap();
            assert!(values.iter().all(|value| (1.0..1.125).contains(value)));
        }
    }

    #[test]
    fn all_matrices_share_the_bytes_of_the_largest_one() {
        let checkpoint = Checkpoint::synthetic(tiny(), DType::BF16).unwrap();
        let largest = 1024 * 256 * 2;
        assert!((largest..largest + 8192).contains(&checkpoint.bytes()), "{}", checkpoint.bytes());
        assert!(checkpoint.tensors().map(|tensor| tensor.data.len() as u64).sum::<u64>() > 2 * largest);
        // The bytes exist only in memory, so releasing them must not lose them.
        checkpoint.release("lm_head.weight");
        assert!(checkpoint.tensor("lm_head.weight").unwrap().data.iter().any(|byte| *byte != 0));
        assert!(checkpoint.tokenizer().unwrap().is_none() && checkpoint.chat_template().unwrap().is_none());
    }

    #[test]
    fn rejects_a_width_that_is_not_a_whole_number_of_blocks() {
        let config = ModelConfig::shape("smollm2-135m").expect("the shape is known");
        let error = Checkpoint::synthetic(config, DType::Q4K).unwrap_err().to_string();
        assert!(error.contains("rows of 576 values") && error.contains("blocks of 256 in Q4_K"), "{error}");
        let huge = ModelConfig { vocabulary_size: 1 << 22, hidden_size: 1 << 20, ..tiny() };
        let error = Checkpoint::synthetic(huge, DType::F32).unwrap_err().to_string();
        assert!(error.contains("exceed the limit"), "{error}");
        let wrong = ModelConfig { kv_head_count: 3, ..tiny() };
        assert!(Checkpoint::synthetic(wrong, DType::F32).is_err());
    }
}
