//! Sums over all ranks, alone and together with the residual sum and the norm that follow.

use super::{ACTIVATION_BYTES, AllReduce, Meeting, RmsNorm, holds, norm_params};
use crate::KernelError;
use crate::cuda::all_reduce::{self, AllReduceParams, MAX_RANKS, MeetingParams, SIGNAL_BYTES, Shots};
use crate::cuda::all_reduce_norm::{self, AllReduceNormParams};
use crate::cuda::device::{Device, Slice};
use crate::cuda::{Activation, Address, at_most, multiple_of_8};
use crate::error::{expect_len, product};

impl Device {
    /// Queues this rank's part of a sum over all ranks. Every rank has to queue its part.
    pub fn all_reduce(&self, of: &AllReduce<'_>, activation: Activation) -> Result<(), KernelError> {
        const OP: &str = "all_reduce";
        let AllReduce { meeting, shares, out, values } = *of;
        crate::cuda::require(values.is_multiple_of(8), OP, "values", values as u32, || {
            "a multiple of 8".to_owned()
        })?;
        let ranks = meeting.input.len();
        let params = meeting_params(OP, &meeting, values)?;
        expect_len(OP, "shares", ranks, shares.len())?;
        let share = (values / 8).div_ceil(ranks.max(1)) * 8;
        for shares in shares {
            holds(OP, "shares", *shares, &[share, ACTIVATION_BYTES])?;
        }
        holds(OP, "out", out, &[values, ACTIVATION_BYTES])?;
        let params = AllReduceParams {
            meeting: params,
            shares: addresses(shares),
            out: out.address(),
            chunks: (values / 8) as u64,
        };
        let shots = Shots::for_size((values * ACTIVATION_BYTES) as u64, ranks as u32);
        let launch = all_reduce::launch(&params, shots, activation, meeting.most_blocks)?;
        // SAFETY: the slices match the shapes.
        unsafe { self.launch(&launch, &params) }
    }

    /// Queues this rank's part of a sum over all ranks, which is added to the residual, and of the norm of that. Every rank has to
    /// queue its part. The input of a rank must not change before the next sum of these ranks has ended.
    pub fn all_reduce_norm(
        &self,
        meeting: &Meeting<'_>,
        norm: &RmsNorm<'_>,
        activation: Activation,
    ) -> Result<(), KernelError> {
        const OP: &str = "all_reduce_norm";
        multiple_of_8(OP, "width", norm.width)?;
        let values = product(OP, "values", &[norm.rows as usize, norm.width as usize])?;
        let params = AllReduceNormParams {
            meeting: meeting_params(OP, meeting, values)?,
            norm: norm_params(&RmsNorm { x: None, ..*norm })?,
            rows: norm.rows,
        };
        let launch = all_reduce_norm::launch(&params, activation, meeting.most_blocks)?;
        // SAFETY: the slices match the shapes.
        unsafe { self.launch(&launch, &params) }
    }
}

/// Checks the slices of a sum of this many values, and returns the parameters.
fn meeting_params(op: &'static str, of: &Meeting<'_>, values: usize) -> Result<MeetingParams, KernelError> {
    let Meeting { input, signals, failure, report, max_polls, rank, .. } = *of;
    let ranks = input.len();
    at_most(op, "ranks", ranks as u32, MAX_RANKS as u32)?;
    expect_len(op, "signals", ranks, signals.len())?;
    for (input, signals) in input.iter().zip(signals) {
        holds(op, "input", *input, &[values, ACTIVATION_BYTES])?;
        holds(op, "signals", *signals, &[SIGNAL_BYTES])?;
    }
    holds(op, "failure", failure, &[4])?;
    expect_len(op, "report", 4, report.bytes().len())?;
    Ok(MeetingParams {
        input: addresses(input),
        signals: addresses(signals),
        failure: failure.address(),
        report: report.address(),
        max_polls,
        rank: rank as u32,
        ranks: ranks as u32,
    })
}

fn addresses(of: &[Slice<'_>]) -> [Address; MAX_RANKS] {
    let mut addresses = [Address::NONE; MAX_RANKS];
    addresses.iter_mut().zip(of).for_each(|(address, slice)| *address = slice.address());
    addresses
}
