//! Measures how fast this machine multiplies, which is the upper bound for prefill.
//!
//! Invariant: operands stay in registers and the L1 cache, so that the result measures arithmetic and not memory. The
//! result is the best of several short runs, so that other programs on the machine do not lower it.

use std::time::{Duration, Instant};

use crate::Isa;
use crate::cpu::Kernel;
#[cfg(target_arch = "x86_64")]
use crate::cpu::bf16_tiles;
use crate::cpu::dispatch;
use crate::cpu::simd::{Blocks, Simd};

const MEASURE: Duration = Duration::from_millis(100);
/// Passes over the operands in one run. A run takes some tens of microseconds.
const PASSES: usize = 128;
const OPERANDS: usize = 240;

/// Additions and multiplications per second, summed over all threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArithmeticRate {
    /// Rate for 8-bit integers summed in 32 bits, as in products with quantized weights.
    pub int8_per_s: f64,
    /// Rate for `f32`, as in attention.
    pub f32_per_s: f64,
    /// Rate for products with BF16 weights, in BF16 if the tier has it.
    pub bf16_per_s: f64,
}

/// Measures all rates. It takes up to a third of a second.
pub fn measure(isa: Isa, threads: usize) -> ArithmeticRate {
    let threads = threads.clamp(1, 1024);
    let rates = std::thread::scope(|scope| {
        let runners: Vec<_> = (0..threads).map(|_| scope.spawn(move || one_thread(isa))).collect();
        runners.into_iter().filter_map(|runner| runner.join().ok()).collect::<Vec<_>>()
    });
    let total = |of: fn(&ArithmeticRate) -> f64| rates.iter().map(of).sum();
    ArithmeticRate {
        int8_per_s: total(|rate| rate.int8_per_s),
        f32_per_s: total(|rate| rate.f32_per_s),
        bf16_per_s: total(|rate| rate.bf16_per_s),
    }
}

fn one_thread(isa: Isa) -> ArithmeticRate {
    // Independent sums hide the latency of an instruction; more sums than registers would spill to memory.
    match isa {
        Isa::Avx512 | Isa::Avx512Bf16 => rates::<6>(isa),
        Isa::Avx2 | Isa::Portable => rates::<3>(isa),
    }
}

fn rates<const N: usize>(isa: Isa) -> ArithmeticRate {
    let bytes = [3i8; 4 * OPERANDS];
    let floats = [0.5f32; OPERANDS];
    // Each operand is combined with two registers of 64 bytes or 16 floats, with one multiplication and one addition
    // per element.
    let operations = |lanes: usize| (PASSES * OPERANDS * 2 * lanes * 2) as f64;
    // SAFETY: the arrays hold every operand that the kernels read.
    let int8_per_s = operations(64) / best_s(|| unsafe { dispatch(isa, Dots::<N>(&bytes)) });
    // SAFETY: as above.
    let f32_per_s = operations(16) / best_s(|| unsafe { dispatch(isa, MultiplyAdds::<N>(&floats)) });
    let bf16_per_s = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if isa.supported() => {
            let pairs = [0x3f00_3f00; OPERANDS];
            // SAFETY: the machine supports the tier.
            operations(32) / best_s(|| unsafe { bf16_tiles::many_products(&pairs, PASSES) })
        }
        _ => f32_per_s,
    };
    ArithmeticRate { int8_per_s, f32_per_s, bf16_per_s }
}

fn best_s(mut run: impl FnMut() -> f32) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while start.elapsed() < MEASURE {
        let begun = Instant::now();
        std::hint::black_box(run());
        best = best.min(begun.elapsed().as_secs_f64());
    }
    best
}

/// Multiplies eight registers of 4-bit integers with groups of `N` tokens, or two registers where the instructions that multiply
/// also add.
struct Dots<'a, const N: usize>(&'a [i8; 4 * OPERANDS]);

impl<const N: usize> Kernel for Dots<'_, N> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: operands are read inside the array.
        unsafe {
            let mut sums = [[S::zero_i(); N]; 2];
            for _ in 0..PASSES {
                let operands = std::hint::black_box(self.0).as_ptr();
                if S::MANY_REGISTERS {
                    let weights = [S::splat_i8(1), S::splat_i8(2)];
                    for group in 0..OPERANDS / N {
                        for (sums, weight) in sums.iter_mut().zip(weights) {
                            for (at, sum) in sums.iter_mut().enumerate() {
                                *sum = S::dot(*sum, weight, operands.add(4 * (group * N + at)));
                            }
                        }
                    }
                    continue;
                }
                let registers = std::hint::black_box(&[3u8; 128]).as_ptr();
                // Each operand is combined with one register here, and counts as combined with two.
                for _ in 0..2 {
                    let operands = std::hint::black_box(operands);
                    for group in 0..OPERANDS / 8 / N {
                        let dots = S::dots::<TwoRegisters, N>(registers, 0, operands.add(32 * N * group));
                        for (sum, [dot, _]) in sums[0].iter_mut().zip(dots) {
                            *sum = S::add_i(*sum, dot);
                        }
                    }
                }
            }
            let mut total = 0.0;
            for sum in sums.as_flattened() {
                total += S::sum(S::to_f32(*sum));
            }
            total
        }
    }
}

/// A block of 4-bit integers that repeats two registers.
struct TwoRegisters;

impl Blocks for TwoRegisters {
    const LARGEST: u8 = 15;
    const HALVES: bool = false;

    #[inline(always)]
    unsafe fn integers<S: Simd>(registers: *const u8, _: usize) -> [S::I; 8] {
        // SAFETY: the caller guarantees that there are two.
        let [a, b] = unsafe { [S::load_i(registers), S::load_i(registers.add(64))] };
        [a, b, a, b, b, a, b, a]
    }
}

/// Multiplies two registers with groups of `N` floats and adds up the products.
struct MultiplyAdds<'a, const N: usize>(&'a [f32; OPERANDS]);

impl<const N: usize> Kernel for MultiplyAdds<'_, N> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        // SAFETY: operands are read inside the array.
        unsafe {
            let mut sums = [[S::zero(); N]; 2];
            let weights = [S::splat(0.5), S::splat(0.25)];
            for _ in 0..PASSES {
                let operands = std::hint::black_box(self.0).as_ptr();
                for group in 0..OPERANDS / N {
                    for (sums, weight) in sums.iter_mut().zip(weights) {
                        for (at, sum) in sums.iter_mut().enumerate() {
                            *sum = S::fma(weight, S::splat(*operands.add(group * N + at)), *sum);
                        }
                    }
                }
            }
            let mut total = 0.0;
            for sum in sums.as_flattened() {
                total += S::sum(*sum);
            }
            total
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tier_has_a_rate() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            let rate = measure(isa, 1);
            assert!(rate.int8_per_s.is_finite() && rate.int8_per_s > 1e6, "{isa} {rate:?}");
            assert!(rate.bf16_per_s.is_finite() && rate.bf16_per_s > 1e6, "{isa} {rate:?}");
            assert!(rate.f32_per_s.is_finite() && rate.f32_per_s > 1e6, "{isa} {rate:?}");
        }
    }
}
