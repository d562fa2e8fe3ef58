//! Errors on the way from a model file to a row of logits.
//!
//! Invariant: every message names the file, key or tensor at fault and, where there is one, the fix.
//! This module knows nothing of requests or HTTP; callers map its errors.

use std::path::PathBuf;
use std::time::Duration;

use skep_kernels::KernelError;

/// The reason why a model could not be read, understood or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system reported an error for a file.
    #[error("cannot read {path}: {source}", path = path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The operating system refused to write a file.
    #[error("cannot write {path}: {source}", path = path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The path does not hold a model.
    #[error("{path} is not a model: {problem}", path = path.display())]
    NotAModel { path: PathBuf, problem: String },
    /// The structure of the file is broken: it is truncated, out of range or contradictory.
    #[error("{path} is damaged: {problem}", path = path.display())]
    Malformed { path: PathBuf, problem: String },
    /// A key of the configuration or metadata is missing or has an impossible value.
    #[error("config key `{key}`: {problem}")]
    Config { key: String, problem: String },
    /// A key asks for a feature that exists but is not implemented here.
    #[error("config key `{key}` is {value}, which is not supported; supported: {supported}")]
    Unsupported { key: String, value: String, supported: String },
    /// A tensor exists but cannot be used.
    #[error("tensor `{name}`: {problem}")]
    Tensor { name: String, problem: String },
    /// A tensor that the configuration requires is not in the file.
    #[error("tensor `{name}` is missing from {path}", path = path.display())]
    TensorMissing { name: String, path: PathBuf },
    /// The model has no tokenizer, but one is needed.
    #[error(
        "{path} has no tokenizer; put tokenizer.json or tiktoken.model beside the weights or use a GGUF file that contains one"
    )]
    TokenizerMissing { path: String },
    /// The tokenizer's definition is broken, or the tokenizer rejected a text.
    #[error("tokenizer: {problem}")]
    Tokenizer { problem: String },
    /// The chat template is broken, rejected the messages, or exceeded its limits.
    #[error("chat template: {problem}")]
    Template { problem: String },
    /// The executor cannot run a batch, page table or row.
    #[error("batch: {problem}")]
    Batch { problem: String },
    /// A sequence's logits are not numbers.
    #[error(
        "the logit of token {token} in row {row} is not a number\nhint: the weights hold values that are not finite, or the \
         activations exceed their format; `skep model verify` compares a model with its reference"
    )]
    NotNumbers { row: usize, token: usize },
    /// An option cannot be satisfied, such as a shard count that does not divide the heads.
    #[error("{option}: {problem}")]
    Option { option: String, problem: String },
    /// A rank of a sharded model could not finish a step with the other ranks.
    #[error("rank {rank} {fault}")]
    Rank { rank: usize, fault: RankFault },
    /// A kernel rejected its arguments.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// The reason why the ranks of a model could not finish a step together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RankFault {
    #[error("made no progress for {} ms while others waited for it", .deadline.as_millis())]
    TimedOut { deadline: Duration },
    #[error("is at {found} where rank {other} is at {expected}; all ranks must make the same calls")]
    CallMismatch { other: usize, expected: String, found: String },
    #[error("failed: {reason}")]
    Failed { reason: String },
    #[error("has terminated, but the other ranks need it")]
    Terminated,
    #[error("is not one of the {ranks} ranks of the group")]
    NoSuchRank { ranks: usize },
}

impl ModelError {
    /// Returns whether the executor that reported this has to be replaced: its device, or its device's memory, is lost to it.
    pub fn is_fault(&self) -> bool {
        matches!(self, ModelError::Kernel(error) if error.fault().is_some())
    }

    pub(crate) fn config(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Config { key: key.into(), problem: problem.into() }
    }

    pub(crate) fn unsupported(
        key: impl Into<String>,
        value: impl std::fmt::Display,
        supported: impl Into<String>,
    ) -> Self {
        Self::Unsupported { key: key.into(), value: value.to_string(), supported: supported.into() }
    }

    pub(crate) fn tensor(name: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Tensor { name: name.into(), problem: problem.into() }
    }
}
