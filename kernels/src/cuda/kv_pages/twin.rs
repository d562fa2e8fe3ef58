//! FP8 keys and values on the CPU, for tests: the rounding of a head, and random pages.
//!
//! Rounding searches all values of the format, so it shares no arithmetic with the kernels.

use crate::random::Random;

/// The largest value of the format.
const MOST: f32 = 448.0;

/// A key or a value of one head.
pub(in crate::cuda) struct Fp8Head {
    pub(in crate::cuda) codes: Vec<u8>,
    pub(in crate::cuda) scale: f32,
}

impl Fp8Head {
    /// Rounds the values of a head.
    pub(in crate::cuda) fn of(values: &[f32]) -> Self {
        let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        if values.iter().any(|value| !value.is_finite()) {
            return Fp8Head { codes: vec![0; values.len()], scale: f32::NAN };
        }
        if most < 1e-30 {
            return Fp8Head { codes: values.iter().map(|value| sign(*value)).collect(), scale: 0.0 };
        }
        let inverse = MOST / most;
        let codes = values.iter().map(|value| nearest(value * inverse)).collect();
        Fp8Head { codes, scale: most * (1.0 / MOST) }
    }

    /// Returns a head of random values, the largest of which are between 0.5 and 1.
    pub(in crate::cuda) fn random(random: &mut Random, size: usize) -> Self {
        Self::of(&(0..size).map(|_| random.signed()).collect::<Vec<_>>())
    }
}

/// Returns the value of a code.
pub(in crate::cuda) fn decoded(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Returns the code whose value is nearest, and of two such codes the even one.
fn nearest(value: f32) -> u8 {
    let distance = |code: &u8| ((decoded(*code) - f64::from(value.abs())).abs(), code % 2);
    let codes = 0..=0x7eu8;
    let code = codes.min_by(|a, b| distance(a).partial_cmp(&distance(b)).expect("values are numbers"));
    code.expect("there are codes") | sign(value)
}

fn sign(value: f32) -> u8 {
    if value.is_sign_negative() { 0x80 } else { 0 }
}
