//! Log-softmax of logits.

use crate::Isa;
use crate::cpu::dispatch;
use crate::cpu::elementwise::LogSumExp;

/// Returns log(sum(exp(row))). Subtracting it from a logit gives the log-probability. The result is not finite if the
/// row is not.
pub fn log_sum_exp(isa: Isa, row: &[f32]) -> f32 {
    // SAFETY: the row is a safe slice.
    unsafe { dispatch(isa, LogSumExp { row }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_tier_agrees_with_double_precision() {
        let mut random = Random::fresh();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            let row: Vec<f32> = random.floats(1003).iter().map(|x| x * 30.0).collect();
            let expected = row.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
            assert!((expected - f64::from(log_sum_exp(isa, &row))).abs() < 1e-4, "{isa}");
        }
    }
}
