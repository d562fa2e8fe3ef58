//! The parts of the configuration that a rank's steps need.

use skep_kernels::cuda::Activation;
use skep_kernels::cuda::qkv::Pairing;

use crate::config::{ModelConfig, RopePairing};

/// The parts of the configuration that a step needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) hidden: usize,
    pub(super) head_size: usize,
    pub(super) vocabulary: usize,
    pub(super) epsilon: f32,
    pub(super) pairing: Pairing,
    pub(super) activation: Activation,
    /// Time that ranks wait for each other, in microseconds.
    pub(super) rank_deadline_us: u64,
    /// Maximum number of blocks in which a rank may wait for others. Waiting blocks take the device from what the
    /// other ranks still compute.
    pub(super) meeting_blocks: u32,
    /// Whether a row's products are computed in one order, however many rows there are.
    pub(super) deterministic: bool,
    /// Keeps the sums of ranks apart from the norms that follow, so that a test can compare both.
    #[cfg(test)]
    pub(super) sums_are_apart: bool,
}

impl Shape {
    pub(super) fn new(
        config: &ModelConfig,
        activation: Activation,
        rank_deadline_us: u64,
        meeting_blocks: u32,
        deterministic: bool,
    ) -> Self {
        Shape {
            hidden: config.hidden_size,
            head_size: config.head_size,
            vocabulary: config.vocabulary_size,
            epsilon: config.norm_epsilon,
            pairing: match config.rope.pairing {
                RopePairing::Halves => Pairing::Halves,
                RopePairing::Interleaved => Pairing::Interleaved,
            },
            activation,
            rank_deadline_us,
            meeting_blocks,
            deterministic,
            #[cfg(test)]
            sums_are_apart: false,
        }
    }
}
