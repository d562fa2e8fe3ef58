//! Runs kernels that are compiled for each number of query rows.
//!
//! Each number of rows is a function of its own, in each tier with vector registers. A function for all numbers would keep the compiler
//! busy for minutes, on one core, and with AVX2 took up to a third more time. The portable tier gains nothing from constants, so it
//! has one function for all numbers.

use super::attention::{MAX_ROWS, QueryRow};
use super::simd::Simd;
use super::{Kernel, dispatch};
use crate::Isa;

/// A computation for up to 8 query rows, or [`MAX_ROWS`].
pub(crate) trait RowKernel {
    /// It has the meaning of [`Kernel::USES_BF16_DOTS`].
    const USES_BF16_DOTS: bool = false;
    /// It has the meaning of [`Kernel::NEEDS_BF16_DOTS`].
    const NEEDS_BF16_DOTS: bool = false;

    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Runs the computation.
    ///
    /// # Safety
    /// There are `N` rows, or with [`Simd::HAS_VECTORS`] false up to `N`. The conditions of [`Kernel::run`] hold.
    unsafe fn run_rows<S: Simd, const N: usize>(self);
}

/// Returns the number of rows, which is the constant `N` with vector registers and otherwise at most `N`.
#[inline(always)]
pub(super) fn count<S: Simd, const N: usize>(rows: &[QueryRow]) -> usize {
    if S::HAS_VECTORS { N } else { rows.len().min(N) }
}

/// A kernel that has `N` rows, or without vector registers up to [`MAX_ROWS`].
struct Exactly<K, const N: usize>(K);

impl<K: RowKernel, const N: usize> Kernel for Exactly<K, N> {
    type Output = ();
    const USES_BF16_DOTS: bool = K::USES_BF16_DOTS;
    const NEEDS_BF16_DOTS: bool = K::NEEDS_BF16_DOTS;
    const NEEDS_VECTORS: bool = N < MAX_ROWS;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.run_rows::<S, N>() }
    }
}

/// Runs a kernel in the given tier, or in portable code if the machine does not support the tier.
///
/// # Safety
/// The conditions of [`dispatch`] hold.
pub(crate) unsafe fn dispatch_rows<K: RowKernel>(isa: Isa, kernel: K) {
    let has_vectors = isa != Isa::Portable && isa.supported();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match if has_vectors { kernel.rows() } else { MAX_ROWS } {
            0 => {}
            1 => dispatch(isa, Exactly::<K, 1>(kernel)),
            2 => dispatch(isa, Exactly::<K, 2>(kernel)),
            3 => dispatch(isa, Exactly::<K, 3>(kernel)),
            4 => dispatch(isa, Exactly::<K, 4>(kernel)),
            5 => dispatch(isa, Exactly::<K, 5>(kernel)),
            6 => dispatch(isa, Exactly::<K, 6>(kernel)),
            7 => dispatch(isa, Exactly::<K, 7>(kernel)),
            8 => dispatch(isa, Exactly::<K, 8>(kernel)),
            _ => dispatch(isa, Exactly::<K, MAX_ROWS>(kernel)),
        }
    }
}
