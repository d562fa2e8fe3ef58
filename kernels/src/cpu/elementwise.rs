//! Kernels over single rows: normalization, gating, sums and rotation.
//!
//! Invariant: a row's result depends on that row alone. A sum over a row first adds up its full groups of 16 values lane
//! by lane in order, then the lanes in the tier's order, then the rest of the row in order. Alignment does not matter.

use super::Kernel;
use super::simd::{Simd, exp};

/// Computes `out = x / rms(x) * weight`.
pub(crate) struct RmsNorm<'a> {
    pub input: &'a [f32],
    pub weight: &'a [f32],
    pub epsilon: f32,
    pub out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let count = self.input.len();
        let whole = count / 16 * 16;
        let mut squares = 0.0;
        // SAFETY: accesses are below `whole`; the slices have equal lengths.
        unsafe {
            let mut sum = S::zero();
            for at in (0..whole).step_by(16) {
                let x = S::load(self.input.as_ptr().add(at));
                sum = S::fma(x, x, sum);
            }
            squares += S::sum(sum);
        }
        squares += self.input[whole..].iter().map(|x| x * x).sum::<f32>();
        let factor = 1.0 / (squares / count as f32 + self.epsilon).sqrt();
        // SAFETY: as above.
        unsafe {
            for at in (0..whole).step_by(16) {
                let x = S::mul(S::load(self.input.as_ptr().add(at)), S::splat(factor));
                S::store(self.out.as_mut_ptr().add(at), S::mul(x, S::load(self.weight.as_ptr().add(at))));
            }
        }
        for at in whole..count {
            self.out[at] = self.input[at] * factor * self.weight[at];
        }
    }
}

/// Computes `hidden += addend` and then `out = hidden / rms(hidden) * weight`.
pub(crate) struct AddNorm<'a> {
    pub hidden: &'a mut [f32],
    pub addend: &'a [f32],
    pub weight: &'a [f32],
    pub epsilon: f32,
    pub out: &'a mut [f32],
}

impl Kernel for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let AddNorm { hidden, addend, weight, epsilon, out } = self;
        // SAFETY: guaranteed by the caller.
        unsafe {
            Add { to: hidden, from: addend }.run::<S>();
            RmsNorm { input: hidden, weight, epsilon, out }.run::<S>();
        }
    }
}

/// Computes `gate = silu(gate) * up`.
pub(crate) struct SwiGlu<'a> {
    pub gate: &'a mut [f32],
    pub up: &'a [f32],
}

impl Kernel for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let whole = self.gate.len() / 16 * 16;
        // SAFETY: accesses are below `whole`; the slices have equal lengths.
        unsafe {
            let one = S::splat(1.0);
            for at in (0..whole).step_by(16) {
                let x = S::load(self.gate.as_ptr().add(at));
                let sigmoid = S::div(one, S::add(one, exp::<S>(S::sub(S::zero(), x))));
                let up = S::load(self.up.as_ptr().add(at));
                S::store(self.gate.as_mut_ptr().add(at), S::mul(S::mul(x, sigmoid), up));
            }
        }
        for at in whole..self.gate.len() {
            let x = self.gate[at];
            self.gate[at] = x / (1.0 + (-x).exp()) * self.up[at];
        }
    }
}

/// Computes `to += from`.
pub(crate) struct Add<'a> {
    pub to: &'a mut [f32],
    pub from: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let whole = self.to.len() / 16 * 16;
        // SAFETY: accesses are below `whole`; the slices have equal lengths.
        unsafe {
            for at in (0..whole).step_by(16) {
                let sum = S::add(S::load(self.to.as_ptr().add(at)), S::load(self.from.as_ptr().add(at)));
                S::store(self.to.as_mut_ptr().add(at), sum);
            }
        }
        for at in whole..self.to.len() {
            self.to[at] += self.from[at];
        }
    }
}

/// Computes `to += factor * from`.
pub(crate) struct AddScaled<'a> {
    pub to: &'a mut [f32],
    pub from: &'a [f32],
    pub factor: f32,
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let whole = self.to.len() / 16 * 16;
        // SAFETY: accesses are below `whole`; the slices have equal lengths.
        unsafe {
            let factor = S::splat(self.factor);
            for at in (0..whole).step_by(16) {
                let from = S::load(self.from.as_ptr().add(at));
                let sum = S::fma(from, factor, S::load(self.to.as_ptr().add(at)));
                S::store(self.to.as_mut_ptr().add(at), sum);
            }
        }
        for at in whole..self.to.len() {
            self.to[at] += self.from[at] * self.factor;
        }
    }
}

/// Computes `gate = gelu(gate) * up` with the approximation of GELU by a hyperbolic tangent.
pub(crate) struct GeluGate<'a> {
    pub gate: &'a mut [f32],
    pub up: &'a [f32],
}

impl Kernel for GeluGate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        /// Twice the square root of 2 / π: x / 2 * (1 + tanh(y)) is x / (1 + exp(-2 y)).
        const TWICE: f32 = 1.595_769;
        const CUBIC: f32 = 0.044_715;
        let whole = self.gate.len() / 16 * 16;
        // SAFETY: accesses are below `whole`; the slices have equal lengths.
        unsafe {
            let one = S::splat(1.0);
            for at in (0..whole).step_by(16) {
                let x = S::load(self.gate.as_ptr().add(at));
                let inner = S::mul(x, S::fma(S::mul(x, x), S::splat(CUBIC), one));
                let sigmoid = S::div(one, S::add(one, exp::<S>(S::mul(inner, S::splat(-TWICE)))));
                let up = S::load(self.up.as_ptr().add(at));
                S::store(self.gate.as_mut_ptr().add(at), S::mul(S::mul(x, sigmoid), up));
            }
        }
        for at in whole..self.gate.len() {
            let x = self.gate[at];
            self.gate[at] = x / (1.0 + (-TWICE * (x * (x * x * CUBIC + 1.0))).exp()) * self.up[at];
        }
    }
}

/// Computes `gate = (up + 1) * gate * sigmoid(1.702 * gate)` after the gate was bounded above by the limit, and the
/// up value on both sides.
pub(crate) struct ClampedGate<'a> {
    pub gate: &'a mut [f32],
    pub up: &'a [f32],
    pub limit: f32,
}

impl Kernel for ClampedGate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const ALPHA: f32 = 1.702;
        let ClampedGate { gate, up, limit } = self;
        let whole = gate.len() / 16 * 16;
        // SAFETY: accesses are below `whole`; the slices have equal lengths.
        unsafe {
            let one = S::splat(1.0);
            for at in (0..whole).step_by(16) {
                let x = S::min(S::load(gate.as_ptr().add(at)), S::splat(limit));
                let up = S::load(up.as_ptr().add(at));
                let up = S::max(S::min(up, S::splat(limit)), S::splat(-limit));
                let sigmoid = S::div(one, S::add(one, exp::<S>(S::mul(x, S::splat(-ALPHA)))));
                S::store(gate.as_mut_ptr().add(at), S::mul(S::mul(x, sigmoid), S::add(up, one)));
            }
        }
        for at in whole..gate.len() {
            let (x, up) = (gate[at].min(limit), up[at].clamp(-limit, limit));
            gate[at] = x / (1.0 + (-ALPHA * x).exp()) * (up + 1.0);
        }
    }
}

/// Rotates the pairs of one head. `table` holds the cosines and then the sines.
pub(crate) struct Rotate<'a> {
    pub head: &'a mut [f32],
    pub table: &'a [f32],
    pub interleaved: bool,
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let half = self.head.len() / 2;
        let (cosines, sines) = self.table.split_at(half);
        if self.interleaved {
            for ((pair, cos), sin) in self.head.chunks_exact_mut(2).zip(cosines).zip(sines) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * cos - b * sin;
                pair[1] = a * sin + b * cos;
            }
        } else {
            let (first, second) = self.head.split_at_mut(half);
            for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                let (x, y) = (*a, *b);
                *a = x * cos - y * sin;
                *b = x * sin + y * cos;
            }
        }
    }
}

/// Computes log(sum(exp(row))) from the largest value and the exponentials relative to it.
pub(crate) struct LogSumExp<'a> {
    pub row: &'a [f32],
}

impl Kernel for LogSumExp<'_> {
    /// log(sum(exp(row))).
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f32 {
        let whole = self.row.len() / 16 * 16;
        // SAFETY: accesses are below `whole`.
        unsafe {
            let mut peaks = S::splat(f32::NEG_INFINITY);
            for at in (0..whole).step_by(16) {
                peaks = S::max(peaks, S::load(self.row.as_ptr().add(at)));
            }
            let peak = self.row[whole..].iter().fold(S::max_lane(peaks), |all, x| all.max(*x));
            let mut sums = S::zero();
            for at in (0..whole).step_by(16) {
                sums = S::add(sums, exp::<S>(S::sub(S::load(self.row.as_ptr().add(at)), S::splat(peak))));
            }
            let rest: f32 = self.row[whole..].iter().map(|x| (x - peak).exp()).sum();
            peak + (S::sum(sums) + rest).ln()
        }
    }
}
