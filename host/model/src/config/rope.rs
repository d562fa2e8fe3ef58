//! Rotary position embedding: which values form a pair, and how fast each pair rotates.
//!
//! Invariant: a checked `Rope` produces finite frequencies for its head size. Sources: Su et al. 2021 (RoFormer) for
//! the rotation; the Llama 3.1 reference for the smooth blend of scaled and unscaled frequencies.

use std::f64::consts::PI;

use crate::error::ModelError;

/// The two values of a head that rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// Pairs `i` with `i + head_size / 2`: Hugging Face checkpoints, and GGUF files of the Qwen families.
    Halves,
    /// Pairs `2i` with `2i + 1`: GGUF llama files, whose q and k rows are permuted for this pairing.
    Interleaved,
}

/// The scaling of frequencies for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Divides every frequency by `factor`.
    Linear {
        factor: f32,
    },
    /// Divides the frequencies of long wavelengths by `factor`, keeps those of short wavelengths, and blends in
    /// between.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: usize,
    },
    /// Divides slow frequencies by `factor`, keeps fast ones, and blends linearly in between; the bounds are the pairs
    /// that turn `beta_fast` and `beta_slow` times within the original context. Source: Peng et al. 2023 (YaRN).
    Yarn {
        factor: f32,
        beta_fast: f32,
        beta_slow: f32,
        original_context: usize,
        /// Whether the bounds are rounded to whole pairs.
        truncated: bool,
        /// The factor of cosines and sines.
        magnitude: f32,
    },
    /// Divides each frequency by a separate factor: `rope_freqs.weight` of a GGUF file, `head_size / 2` values.
    Factors(Vec<f32>),
}

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f32,
    pub pairing: RopePairing,
    pub scaling: RopeScaling,
}

impl Rope {
    /// Returns the rotation per position of each of the `head_size / 2` pairs, in radians, with scaling applied.
    pub fn inverse_frequencies(&self, head_size: usize) -> Vec<f32> {
        (0..head_size / 2)
            .map(|pair| {
                let base = f64::from(self.theta).powf(-((2 * pair) as f64) / head_size as f64);
                self.scaled(base, pair, head_size) as f32
            })
            .collect()
    }

    /// Returns the factor of all cosines and sines.
    pub fn magnitude(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { magnitude, .. } => magnitude,
            _ => 1.0,
        }
    }

    pub(crate) fn check(&self, head_size: usize) -> Result<(), ModelError> {
        if !(self.theta.is_finite() && self.theta >= 1.0) {
            return Err(ModelError::config(
                "rope_theta",
                format!("{} is not a finite number of at least 1", self.theta),
            ));
        }
        let positive = |key: &str, value: f32| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(ModelError::config(key, format!("{value} is not a finite positive number"))),
        };
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope_scaling.factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope_scaling.factor", *factor)?;
                positive("rope_scaling.low_freq_factor", *low_freq_factor)?;
                positive("rope_scaling.high_freq_factor", *high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(ModelError::config(
                        "rope_scaling.high_freq_factor",
                        format!("{high_freq_factor} is not greater than low_freq_factor {low_freq_factor}"),
                    ));
                }
                match original_context {
                    0 => Err(ModelError::config("rope_scaling.original_max_position_embeddings", "is zero")),
                    _ => Ok(()),
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, magnitude, .. } => {
                positive("rope_scaling.factor", *factor)?;
                positive("rope_scaling.beta_fast", *beta_fast)?;
                positive("rope_scaling.beta_slow", *beta_slow)?;
                positive("rope_scaling.attention_factor", *magnitude)?;
                match (original_context, self.theta > 1.0) {
                    (0, _) => {
                        Err(ModelError::config("rope_scaling.original_max_position_embeddings", "is zero"))
                    }
                    (_, false) => Err(ModelError::config("rope_theta", "must be above 1 for YaRN")),
                    _ => Ok(()),
                }
            }
            RopeScaling::Factors(factors) => {
                if factors.len() != head_size / 2 {
                    return Err(ModelError::tensor(
                        "rope_freqs.weight",
                        format!(
                            "has {} values, but a head of {head_size} needs {}",
                            factors.len(),
                            head_size / 2
                        ),
                    ));
                }
                factors.iter().try_for_each(|factor| positive("rope_freqs.weight", *factor))
            }
        }
    }

    fn scaled(&self, frequency: f64, pair: usize, head_size: usize) -> f64 {
        match &self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / f64::from(*factor),
            RopeScaling::Factors(factors) => frequency / factors.get(pair).copied().map_or(1.0, f64::from),
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncated, .. } => {
                let bound = |turns: f32| {
                    let positions = *original_context as f64 / (f64::from(turns) * 2.0 * PI);
                    head_size as f64 * positions.ln() / (2.0 * f64::from(self.theta).ln())
                };
                let (mut low, mut high) = (bound(*beta_fast), bound(*beta_slow));
                if *truncated {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(head_size as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / f64::from(*factor) * divided + frequency * (1.0 - divided)
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (factor, low, high) =
                    (f64::from(*factor), f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                // Full rotations of this pair within the context that the model was originally trained on.
                let turns = *original_context as f64 * frequency / (2.0 * PI);
                if turns < low {
                    frequency / factor
                } else if turns > high {
                    frequency
                } else {
                    let keep = (turns - low) / (high - low);
                    (1.0 - keep) * frequency / factor + keep * frequency
                }
            }
        }
    }
}

/// Returns the factor by which YaRN raises a magnitude that grows with the logarithm of the context.
pub(super) fn yarn_magnitude(factor: f32, weight: f32) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * f64::from(weight) * f64::from(factor).ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { theta: 10000.0, pairing: RopePairing::Halves, scaling }
    }

    #[test]
    fn unscaled_frequencies_fall_from_one_to_almost_the_inverse_of_theta() {
        let frequencies = rope(RopeScaling::None).inverse_frequencies(4);
        assert_eq!(frequencies, vec![1.0, 0.01]);
    }

    #[test]
    fn llama3_keeps_fast_pairs_divides_slow_ones_and_blends_between() {
        let scaling = RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        };
        let plain = rope(RopeScaling::None).inverse_frequencies(16);
        let scaled = rope(scaling).inverse_frequencies(16);
        let ratios: Vec<f32> = plain.iter().zip(&scaled).map(|(a, b)| a / b).collect();
        assert_eq!(ratios[0], 1.0);
        assert!(ratios[1] > 1.0 && ratios[1] < 4.0, "{ratios:?}");
        assert!((ratios[7] - 4.0).abs() < 1e-5, "{ratios:?}");
        assert!(ratios.is_sorted());
    }

    #[test]
    fn factors_must_be_positive_and_one_per_pair() {
        assert!(rope(RopeScaling::Factors(vec![1.0; 3])).check(8).is_err());
        assert!(rope(RopeScaling::Factors(vec![1.0, f32::NAN])).check(4).is_err());
        assert!(rope(RopeScaling::Factors(vec![1.0, 8.0])).check(4).is_ok());
        assert!(rope(RopeScaling::Linear { factor: 0.0 }).check(4).is_err());
    }

    #[test]
    fn yarn_has_the_frequencies_and_scale_of_kimi_k2_5() {
        let yarn = Rope {
            theta: 50000.0,
            pairing: RopePairing::Interleaved,
            scaling: RopeScaling::Yarn {
                factor: 64.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                original_context: 4096,
                truncated: true,
                magnitude: 1.0,
            },
        };
        let frequencies = yarn.inverse_frequencies(64);
        let expected = [
            (0, 1.0),
            (8, 6.687403e-2),
            (12, 1.161916e-2),
            (16, 1.537297e-3),
            (19, 1.58375e-4),
            (20, 1.807023e-5),
            (31, 4.382206e-7),
        ];
        for (pair, expected) in expected {
            let error: f32 = (frequencies[pair] - expected) / expected;
            assert!(error.abs() < 1e-5, "{pair}: {} instead of {expected}", frequencies[pair]);
        }
        let scale = |factor: f32| yarn_magnitude(factor, 1.0).powi(2) / 192f64.sqrt();
        for (factor, expected) in [(64.0, 0.1446796), (32.0, 0.1308608), (40.0, 0.1352338)] {
            assert!((scale(factor) - expected).abs() < 1e-6, "{factor}: {}", scale(factor));
        }
    }
}
