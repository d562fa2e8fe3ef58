//! Sums of rows: residual connections and biases.

use crate::cpu::dispatch;
use crate::cpu::elementwise::Add;
use crate::error::expect_len;
use crate::{Isa, KernelError};

/// to += from
pub fn add(isa: Isa, to: &mut [f32], from: &[f32]) -> Result<(), KernelError> {
    expect_len("add", "the length", to.len(), from.len())?;
    // SAFETY: safe slices of equal lengths.
    unsafe { dispatch(isa, Add { to, from }) };
    Ok(())
}

/// Adds `bias` to every row of `bias.len()` values.
pub fn add_bias(isa: Isa, rows: &mut [f32], bias: &[f32]) -> Result<(), KernelError> {
    let width = bias.len().max(1);
    expect_len("add_bias", "the rest of the input after whole rows", 0, rows.len() % width)?;
    rows.chunks_exact_mut(width).try_for_each(|row| add(isa, row, bias))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_tier_adds() {
        let mut random = Random::fresh();
        let (to, from) = (random.floats(74), random.floats(37));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            let mut out = to.clone();
            add_bias(isa, &mut out, &from).unwrap();
            for at in 0..74 {
                assert_eq!(out[at], to[at] + from[at % 37]);
            }
        }
        assert!(add(Isa::Portable, &mut [0.0; 2], &[0.0; 3]).is_err());
    }
}
