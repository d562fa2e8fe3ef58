//! The sum over all ranks, the residual sum and its norm in one kernel, for few rows. The results have the same bits as those of
//! the separate kernels.

use super::all_reduce::{MAX_BLOCKS, MeetingParams, Shots};
use super::rms_norm::{CHUNKS, RmsNormParams};
use super::{Activation, Family, Kernel, Launch, WARP};
use crate::KernelError;

/// Maximum number of rows. Each one has a block of its own if the launch may have as many; with more rows, the sum and the norm
/// take much longer than the launch and the barrier that one kernel saves.
pub const MAX_ROWS: u32 = MAX_BLOCKS;
/// Maximum number of threads of a block, each of which holds the values of all ranks at once.
const MAX_THREADS: u32 = 512;
/// Maximum width of a row. The threads that add up squares as `rms_norm` does have to be in a block.
const MAX_WIDTH: u32 = MAX_THREADS * CHUNKS * 8;
const OP: &str = "all_reduce_norm";

/// The parameters of one rank's launch. The shapes are the same on all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllReduceNormParams {
    /// Its inputs are `[rows, width]`. No rank may change its input before the next sum of these ranks has ended, so the inputs of
    /// sums that follow each other are in different buffers.
    pub meeting: MeetingParams,
    /// `x` is not used. No other buffer may be the input of a rank.
    pub norm: RmsNormParams,
    pub rows: u32,
}

/// Returns whether one kernel sums and norms this many rows, rather than one kernel for each. It does if every rank would read the
/// whole rows of all others anyway.
pub fn fits(rows: u32, width: u32, ranks: u32) -> bool {
    let bytes = u64::from(rows) * u64::from(width) * 2;
    (1..=MAX_ROWS).contains(&rows) && width <= MAX_WIDTH && Shots::for_size(bytes, ranks) == Shots::One
}

/// Returns the launch of one rank. All ranks must launch it with the same `most_blocks`, for which the rules of
/// [`all_reduce::launch`](super::all_reduce::launch) hold.
pub fn launch(
    params: &AllReduceNormParams,
    activation: Activation,
    most_blocks: u32,
) -> Result<Launch, KernelError> {
    let AllReduceNormParams { meeting, norm, rows } = params;
    meeting.check(OP)?;
    super::multiple_of_8(OP, "width", norm.width)?;
    super::at_most(OP, "width", norm.width, MAX_WIDTH)?;
    super::at_most(OP, "rows", *rows, MAX_ROWS)?;
    let blocks = (*rows).clamp(1, most_blocks.clamp(1, MAX_BLOCKS));
    let threads = (norm.width / 8).next_multiple_of(WARP).min(MAX_THREADS);
    let kernel = Kernel::of(Family::AllReduceNorm).activation(activation);
    Ok(Launch { shared_bytes: norm.width * 2, ..Launch::new(kernel, [blocks, 1, 1], threads) })
}

#[cfg(test)]
#[path = "all_reduce_norm_tests.rs"]
mod tests;
