//! Checks a converted model against the expected logits that come with it.
//!
//! A model folder's `expected.safetensors` holds `input_ids` [n] (i64) and `logits` [n, vocabulary] (f32) of an
//! independent float32 implementation, or those of some `positions` [k] (i64) alone, `logits` [k, vocabulary]. The check runs the ids
//! through the same executor that serves requests, with float32 keys and values and in chunks, so paging and chunking are checked too.

use std::ops::Range;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::executor::{ExecutorOptions, KvDtype, ModelWeights};
use skep_kernels::Isa;

/// The largest relative error that a correct float32 implementation may have.
pub const TOLERANCE: f64 = 1e-3;
const EXPECTED_FILE: &str = "expected.safetensors";
const POSITIONS: &str = "positions";
const MAX_EXPECTED_BYTES: u64 = 4 << 30;

/// Options of the check.
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    pub threads: Option<usize>,
    pub isa: Option<Isa>,
    pub tensor_parallel: usize,
    pub pipeline_parallel: usize,
    /// Number of tokens computed at once.
    pub chunk: usize,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        VerifyOptions { threads: None, isa: None, tensor_parallel: 1, pipeline_parallel: 1, chunk: 32 }
    }
}

/// The result of the check.
#[derive(Clone, Debug, PartialEq)]
pub struct Verification {
    pub tokens: usize,
    /// Number of tokens whose logits were compared.
    pub compared: usize,
    /// The largest absolute difference, divided by the largest expected magnitude.
    pub max_relative_error: f64,
    pub mean_abs_error: f64,
    /// Fraction of the compared positions whose most likely token is the expected one.
    pub argmax_agreement: f64,
    /// Whether the largest relative error is within [`TOLERANCE`].
    pub passed: bool,
}

/// Checks the model in the folder `path`.
pub fn verify(path: &Path, options: VerifyOptions) -> Result<Verification, ModelError> {
    let checkpoint = Checkpoint::open(path)?;
    let expected = Expected::read(path, checkpoint.config().vocabulary_size)?;
    let tokens = expected.ids.len();
    if tokens > checkpoint.config().context_length {
        let problem =
            format!("has {tokens} ids, but the model's context is {}", checkpoint.config().context_length);
        return Err(ModelError::tensor("input_ids", problem));
    }
    if options.chunk == 0 {
        return Err(ModelError::Option { option: "chunk".into(), problem: "must be at least 1".into() });
    }
    let chunk = options.chunk.min(tokens);
    let options = ExecutorOptions {
        threads: options.threads,
        isa: options.isa,
        kv: KvDtype::F32,
        // Quantized weights count as the values that they stand for.
        exact_weights: true,
        kv_tokens: Some(tokens),
        max_batch_tokens: chunk,
        max_logit_rows: chunk,
        max_sequences: 1,
        tensor_parallel: options.tensor_parallel,
        pipeline_parallel: options.pipeline_parallel,
        ..ExecutorOptions::default()
    };
    let mut executor = ModelWeights::load(&checkpoint, &options)?.executor(options)?;
    let mut comparison = Comparison::default();
    let mut start = 0;
    while start < expected.end() {
        let step = expected.step(start, chunk);
        executor.forward(&Batch {
            sequences: vec![BatchSequence {
                tokens: expected.ids[start..step.end].to_vec(),
                start,
                pages: (0..step.end.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect(),
                logits: step.wanted,
            }],
        })?;
        for (row, number) in step.rows.enumerate() {
            comparison.add(executor.logits(row)?, expected.row(number));
        }
        start = step.end;
    }
    Ok(comparison.result(tokens))
}

struct Expected {
    ids: Vec<u32>,
    /// The positions whose logits are there, in order. Without them, those of all are.
    positions: Option<Vec<usize>>,
    logits: Vec<f32>,
    vocabulary_size: usize,
}

/// A step of the check.
struct Step {
    /// The end of its tokens.
    end: usize,
    wanted: LogitsWanted,
    /// The expected rows that it computes, in order.
    rows: Range<usize>,
}

impl Expected {
    /// Returns the number of tokens that have to be computed.
    fn end(&self) -> usize {
        match &self.positions {
            Some(positions) => positions.last().map_or(0, |last| last + 1),
            None => self.ids.len(),
        }
    }

    /// Returns the step of up to `chunk` tokens from `start` on. It ends with the next position whose logits are there.
    fn step(&self, start: usize, chunk: usize) -> Step {
        let end = self.end().min(start + chunk);
        let Some(positions) = &self.positions else {
            return Step { end, wanted: LogitsWanted::All, rows: start..end };
        };
        let number = positions.partition_point(|position| *position < start);
        match positions.get(number) {
            Some(position) if *position < end => {
                Step { end: position + 1, wanted: LogitsWanted::Last, rows: number..number + 1 }
            }
            _ => Step { end, wanted: LogitsWanted::None, rows: number..number },
        }
    }

    fn read(folder: &Path, vocabulary_size: usize) -> Result<Self, ModelError> {
        let path = folder.join(EXPECTED_FILE);
        let io = |source| ModelError::Io { path: path.clone(), source };
        let length = std::fs::metadata(&path).map_err(io)?.len();
        if length > MAX_EXPECTED_BYTES {
            let problem = format!("it has {length} bytes; the limit is {MAX_EXPECTED_BYTES}");
            return Err(ModelError::Malformed { path, problem });
        }
        let bytes = std::fs::read(&path).map_err(io)?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|error| ModelError::Malformed { path: path.clone(), problem: error.to_string() })?;
        let tensor = |name: &str, dtype: Dtype| {
            let missing = |_| ModelError::TensorMissing { name: name.to_owned(), path: path.clone() };
            let tensor = file.tensor(name).map_err(missing)?;
            match tensor.dtype() == dtype {
                true => Ok(tensor),
                false => Err(ModelError::tensor(
                    name,
                    format!("has the type {:?}; expected {dtype:?}", tensor.dtype()),
                )),
            }
        };
        let (ids, logits) = (tensor("input_ids", Dtype::I64)?, tensor("logits", Dtype::F32)?);
        let has_positions = file.names().contains(&POSITIONS);
        let positions = has_positions.then(|| tensor(POSITIONS, Dtype::I64)).transpose()?;
        if ids.shape().len() != 1 || ids.shape()[0] == 0 {
            return Err(ModelError::tensor(
                "input_ids",
                format!("has the shape {:?}; expected [n]", ids.shape()),
            ));
        }
        let positions = positions.map(|positions| read_positions(&positions, ids.shape()[0])).transpose()?;
        let rows = positions.as_ref().map_or(ids.shape()[0], Vec::len);
        let wanted = [rows, vocabulary_size];
        if logits.shape() != wanted {
            let problem = format!("has the shape {:?}; expected {wanted:?}", logits.shape());
            return Err(ModelError::tensor("logits", problem));
        }
        let ids = ids.data().chunks_exact(8).map(|bytes| {
            let id = i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            u32::try_from(id).ok().filter(|id| (*id as usize) < vocabulary_size).ok_or_else(|| {
                ModelError::tensor(
                    "input_ids",
                    format!("contains the id {id}, but the vocabulary has {vocabulary_size} ids"),
                )
            })
        });
        let logits = logits.data().chunks_exact(4);
        Ok(Expected {
            ids: ids.collect::<Result<_, _>>()?,
            positions,
            logits: logits.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes"))).collect(),
            vocabulary_size,
        })
    }

    fn row(&self, number: usize) -> &[f32] {
        &self.logits[number * self.vocabulary_size..][..self.vocabulary_size]
    }
}

/// Reads positions below `tokens`, which have to be in order.
fn read_positions(tensor: &TensorView<'_>, tokens: usize) -> Result<Vec<usize>, ModelError> {
    let positions = tensor.data().chunks_exact(8).map(|bytes| {
        let position = i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        usize::try_from(position).ok().filter(|position| *position < tokens)
    });
    let positions: Option<Vec<usize>> = positions.collect();
    let is_ordered = |positions: &Vec<usize>| positions.is_sorted_by(|a, b| a < b) && !positions.is_empty();
    positions.filter(is_ordered).ok_or_else(|| {
        ModelError::tensor(
            POSITIONS,
            format!("is not a list of different positions below {tokens} in their order"),
        )
    })
}

#[derive(Default)]
struct Comparison {
    largest_error: f64,
    largest_expected: f64,
    error_sum: f64,
    values: usize,
    rows: usize,
    agreements: usize,
    not_a_number: bool,
}

impl Comparison {
    fn add(&mut self, ours: &[f32], expected: &[f32]) {
        for (ours, expected) in ours.iter().zip(expected) {
            let error = (f64::from(*ours) - f64::from(*expected)).abs();
            self.not_a_number |= error.is_nan();
            self.largest_error = self.largest_error.max(error);
            self.largest_expected = self.largest_expected.max(f64::from(expected.abs()));
            self.error_sum += error;
            self.values += 1;
        }
        self.rows += 1;
        self.agreements += usize::from(likeliest(ours) == likeliest(expected));
    }

    fn result(&self, tokens: usize) -> Verification {
        let relative = self.largest_error / self.largest_expected.max(f64::MIN_POSITIVE);
        let max_relative_error = if self.not_a_number { f64::INFINITY } else { relative };
        let compared = self.rows;
        Verification {
            tokens,
            compared,
            max_relative_error,
            mean_abs_error: self.error_sum / self.values.max(1) as f64,
            argmax_agreement: self.agreements as f64 / compared.max(1) as f64,
            passed: max_relative_error <= TOLERANCE,
        }
    }
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::fixtures::{fixture, tiny_models};

    #[test]
    fn tiny_models_of_every_architecture_match_their_reference() {
        for name in tiny_models() {
            let name = name.as_str();
            for (threads, chunk) in [(1, 97), (2, 16), (2, 1), (1, 7)] {
                let options = VerifyOptions { threads: Some(threads), chunk, ..VerifyOptions::default() };
                let result = verify(&fixture(name), options).unwrap();
                assert!(result.passed, "{name}, {threads} threads, chunks of {chunk}: {result:?}");
                assert_eq!((result.tokens, result.compared), (97, 97));
            }
            for (tensor_parallel, pipeline_parallel) in [(2, 1), (4, 1), (1, 3), (2, 2)] {
                // Some of their rows have two blocks of 32 values, which are never cut.
                let packed = ["kimi-k2-int4", "gpt-oss-mxfp4", "deepseek-v3-fp8"];
                if packed.contains(&name) && tensor_parallel > 2 {
                    let options = VerifyOptions { tensor_parallel, ..VerifyOptions::default() };
                    let error = verify(&fixture(name), options).unwrap_err().to_string();
                    assert!(error.contains("possible values: 1, 2"), "{error}");
                    continue;
                }
                let options =
                    VerifyOptions { tensor_parallel, pipeline_parallel, ..VerifyOptions::default() };
                let result = verify(&fixture(name), options).unwrap();
                assert!(result.passed, "{name}, {tensor_parallel} × {pipeline_parallel} ranks: {result:?}");
            }
        }
    }

    #[test]
    fn latent_attention_of_published_widths_matches_its_reference() {
        let check = |options: VerifyOptions| {
            let found = verify(&fixture("../wide/deepseek-v3"), options.clone()).unwrap();
            assert!(found.passed && found.tokens == 224, "{options:?}: {found:?}");
        };
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for (threads, chunk) in [(1, 224), (2, 33), (2, 1)] {
                let (threads, isa) = (Some(threads), Some(isa));
                check(VerifyOptions { threads, isa, chunk, ..VerifyOptions::default() });
            }
        }
        for tensor_parallel in [2, 4, 8] {
            check(VerifyOptions { tensor_parallel, ..VerifyOptions::default() });
        }
        let options = VerifyOptions { pipeline_parallel: 2, ..VerifyOptions::default() };
        let error = verify(&fixture("../wide/deepseek-v3"), options).unwrap_err().to_string();
        assert!(error.starts_with("pipeline_parallel"), "one layer is one stage: {error}");
    }

    /// Writes a model of the fixtures whose expected logits are those of some positions.
    fn at_positions(name: &str, positions: &[i64]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture(name).join(file), folder.path().join(file)).unwrap();
        }
        let bytes = std::fs::read(fixture(name).join(EXPECTED_FILE)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let (ids, logits) = (file.tensor("input_ids").unwrap(), file.tensor("logits").unwrap());
        let width = logits.shape()[1];
        let row = |position: &i64| &logits.data()[*position as usize % 97 * width * 4..][..width * 4];
        let rows: Vec<u8> = positions.iter().flat_map(row).copied().collect();
        let places: Vec<u8> = positions.iter().flat_map(|position| position.to_le_bytes()).collect();
        let count = positions.len();
        let tensors = [
            ("input_ids", ids),
            ("logits", TensorView::new(Dtype::F32, vec![count, width], &rows).unwrap()),
            (POSITIONS, TensorView::new(Dtype::I64, vec![count], &places).unwrap()),
        ];
        let bytes = safetensors::serialize(tensors, None).unwrap();
        std::fs::write(folder.path().join(EXPECTED_FILE), bytes).unwrap();
        folder
    }

    #[test]
    fn logits_of_some_positions_are_enough() {
        for (positions, compared) in [(&[0, 31, 32, 90][..], 4), (&[96][..], 1), (&[5, 6, 7][..], 3)] {
            let folder = at_positions("deepseek-v3", positions);
            for chunk in [1, 32, 97] {
                let options = VerifyOptions { chunk, ..VerifyOptions::default() };
                let found = verify(folder.path(), options).unwrap();
                assert!(found.passed, "{positions:?}, chunks of {chunk}: {found:?}");
                assert_eq!((found.tokens, found.compared), (97, compared));
            }
        }
        // The logits of another position are not those of this one.
        let folder = at_positions("deepseek-v3", &[3, 40]);
        let path = folder.path().join(EXPECTED_FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        let place = bytes.windows(8).rposition(|bytes| bytes == 40i64.to_le_bytes()).unwrap();
        bytes[place..place + 8].copy_from_slice(&41i64.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        assert!(!verify(folder.path(), VerifyOptions::default()).unwrap().passed);
        for positions in [&[][..], &[97], &[-1], &[5, 5], &[6, 5]] {
            let folder = at_positions("deepseek-v3", positions);
            let error = verify(folder.path(), VerifyOptions::default()).unwrap_err().to_string();
            assert!(error.contains("positions") && error.contains("below 97"), "{positions:?}: {error}");
        }
    }

    #[test]
    fn rejects_a_folder_without_usable_expectations() {
        let folder = std::env::temp_dir().join(format!("skep-verify-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture("llama-gqa").join(file), folder.join(file)).unwrap();
        }
        assert!(matches!(verify(&folder, VerifyOptions::default()), Err(ModelError::Io { .. })));
        std::fs::copy(folder.join("model.safetensors"), folder.join(EXPECTED_FILE)).unwrap();
        assert!(matches!(verify(&folder, VerifyOptions::default()), Err(ModelError::TensorMissing { .. })));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
