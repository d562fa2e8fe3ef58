//! Chooses tokens from logits on the device.
//!
//! The choice is the same as that of `sampling.rs` in the crate `model`. Weights are summed as integers, so that a row's
//! draw is the same in every batch, for every order of threads, and for every number of blocks.

use super::{Activation, Address, Family, Kernel, Launch, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of warps per block.
const WARPS: u32 = device_constant!("sample.cuh", "SAMPLE_WARPS");
/// Stands for no token, or no row of masks.
pub const NONE: u32 = device_constant!("sample.cuh", "NO_TOKEN");
/// Maximum vocabulary, up to which sums of weights fit in 58 bits.
const MAX_VOCABULARY: u32 = CHUNK * BINS;
/// Number of tokens that a warp reads at once.
const CHUNK: u32 = device_constant!("sample.cuh", "CHUNK");
/// Maximum number of chunks per row.
const BINS: u32 = device_constant!("sample.cuh", "BINS");
const MAX_ROW_BLOCKS: u32 = device_constant!("sample.cuh", "MAX_ROW_BLOCKS");
/// Maximum number of rows per launch, each of which has a state. As many rows fill a device.
pub const MAX_ROWS: u32 = 64;
/// Number of blocks per multiprocessor among which the rows are divided.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 3;
/// Size of the state of a row in bytes. It must be zeros before the first launch.
pub const STATE_BYTES: usize = device_constant!("sample.cuh", "SAMPLE_STATE_BYTES") as usize;

/// The parameters of the kernel. A length `..` covers the indices that the rows name.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SampleParams {
    /// `[.., logits_stride]`. Each row starts with the vocabulary.
    pub logits: Address,
    /// An array of [`SampleRow`], `[rows]`.
    pub rows: Address,
    /// An array of [`Adjustment`].
    pub adjustments: Address,
    /// u32 `[.., mask_words]`: bit `t % 32` of word `t / 32` allows token `t`.
    pub masks: Address,
    /// u32: the tokens drawn in the previous step.
    pub drawn: Address,
    /// f32 `[rows, vocabulary]`: workspace for the adjusted logits.
    pub adjusted: Address,
    /// `[rows]` states of [`STATE_BYTES`].
    pub states: Address,
    /// u32 `[rows]`, the results. [`NONE`] where no token is allowed.
    pub tokens: Address,
    pub vocabulary: u32,
    pub logits_stride: u32,
    pub mask_words: u32,
}

/// The sampling parameters of one row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    pub seed: u64,
    pub step: u64,
    /// Row index in the logits.
    pub logits: u32,
    /// Row index in the masks, or [`NONE`].
    pub mask: u32,
    pub first_adjustment: u32,
    /// Exclusive.
    pub last_adjustment: u32,
    /// Index into `drawn` of an output token that the adjustments do not include yet, or [`NONE`]. The host plans a step
    /// before it knows the tokens of the previous one.
    pub pending: u32,
    /// 0 turns it off.
    pub top_k: u32,
    /// 1 turns it off.
    pub top_p: f32,
    /// 0 turns it off.
    pub min_p: f32,
    /// 0 means greedy.
    pub temperature: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// 1 turns it off.
    pub repetition_penalty: f32,
}

/// The effect of a row's history, bias and bans on one token. A token occurs at most once in a row's list.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjustment {
    pub token: u32,
    /// Number of occurrences in the output.
    pub occurrences: u32,
    pub bias: f32,
    /// [`SEEN`] (in the prompt or the output), [`BANNED`], both or neither.
    pub kind: u32,
}

/// Bit of [`Adjustment::kind`] for a token in the prompt or the output, to which the repetition penalty applies.
pub const SEEN: u32 = device_constant!("sample.cuh", "SEEN");
/// Bit of [`Adjustment::kind`] for a token that must not be drawn.
pub const BANNED: u32 = device_constant!("sample.cuh", "BANNED");

impl SampleRow {
    /// A greedy choice from the first row of logits.
    pub const GREEDY: SampleRow = SampleRow {
        seed: 0,
        step: 0,
        logits: 0,
        mask: NONE,
        first_adjustment: 0,
        last_adjustment: 0,
        pending: NONE,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        temperature: 0.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        repetition_penalty: 1.0,
    };

    /// Returns the row in its memory layout.
    pub fn words(&self) -> [u32; 16] {
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        let ([a, b], [c, d]) = (halves(self.seed), halves(self.step));
        let (logits, mask, first, last) =
            (self.logits, self.mask, self.first_adjustment, self.last_adjustment);
        let floats = [
            self.top_p,
            self.min_p,
            self.temperature,
            self.frequency_penalty,
            self.presence_penalty,
            self.repetition_penalty,
        ]
        .map(f32::to_bits);
        let [e, f, g, h, i, j] = floats;
        [a, b, c, d, logits, mask, first, last, self.pending, self.top_k, e, f, g, h, i, j]
    }
}

/// The number format of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    F32,
    Bf16,
    F16,
}

/// The part of the work that a row needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Choice {
    /// The token with the highest logit is chosen.
    #[default]
    Highest,
    /// A token is drawn among all of them, or those that min-p keeps.
    Drawn,
    /// A token is drawn among those that top-k or top-p keep.
    Truncated,
}

impl SampleRow {
    /// Returns the part of the work that the row needs.
    pub fn choice(&self) -> Choice {
        match self {
            _ if self.temperature == 0.0 || self.top_k == 1 => Choice::Highest,
            _ if self.top_k > 0 || self.top_p < 1.0 => Choice::Truncated,
            _ => Choice::Drawn,
        }
    }
}

/// Returns the launches, in order, for at most [`MAX_ROWS`] rows. `choice` is the greatest of the rows' choices.
pub fn launches(
    params: &SampleParams,
    rows: u32,
    choice: Choice,
    logits: Logits,
    multiprocessors: u32,
) -> Result<[Option<Launch>; 3], KernelError> {
    let vocabulary = params.vocabulary;
    super::require(vocabulary > 0, "sample", "vocabulary", 0, || "at least 1".to_owned())?;
    super::at_most("sample", "vocabulary", vocabulary, MAX_VOCABULARY)?;
    super::at_most("sample", "rows", rows, MAX_ROWS)?;
    let stride = params.logits_stride;
    super::require(stride >= vocabulary, "sample", "logits_stride", stride, || {
        format!("at least the vocabulary of {vocabulary}")
    })?;
    let best = match logits {
        Logits::F32 => Kernel::of(Family::SampleBestF32),
        Logits::Bf16 => Kernel::of(Family::SampleBest).activation(Activation::Bf16),
        Logits::F16 => Kernel::of(Family::SampleBest).activation(Activation::F16),
    };
    let grid = [blocks_per_row(rows, vocabulary, multiprocessors), rows, 1];
    // Each kernel is for rows of at least this choice.
    let [cut, draw] = [Family::SampleCut, Family::SampleDraw].map(Kernel::of);
    let kernels = [(best, Choice::Highest), (cut, Choice::Truncated), (draw, Choice::Drawn)];
    Ok(kernels.map(|(kernel, least)| (choice >= least).then(|| Launch::new(kernel, grid, WARPS * WARP))))
}

/// Returns the number of blocks that share a row: as many as fill the device, as long as each warp has a chunk.
fn blocks_per_row(rows: u32, vocabulary: u32, multiprocessors: u32) -> u32 {
    let most = vocabulary.div_ceil(CHUNK).div_ceil(WARPS).min(MAX_ROW_BLOCKS);
    (multiprocessors.saturating_mul(BLOCKS_PER_MULTIPROCESSOR) / rows.max(1)).clamp(1, most)
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
