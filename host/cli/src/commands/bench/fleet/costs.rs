//! The measured costs of a step of a host, as parameters.

use clap::value_parser;
use serde::Serialize;

/// The speed and the memory of each host.
#[derive(Debug, Clone, Serialize, clap::Args)]
pub(super) struct Costs {
    /// Prompt tokens that a host computes in a second (`skep bench engine`)
    #[arg(long, value_name = "TOKENS", default_value_t = 1_927.0, value_parser = positive)]
    pub(super) prefill_tokens_per_s: f64,
    /// Tokens that all sequences of a full host get in a second (`skep bench engine --batch 8`)
    #[arg(long, value_name = "TOKENS", default_value_t = 1_245.0, value_parser = positive)]
    pub(super) decode_tokens_per_s: f64,
    /// Sequences that a host computes at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(1..=65_536))]
    pub(super) sequences: u32,
    /// Tokens that the KV cache of a host holds
    #[arg(long, value_name = "TOKENS", default_value_t = 131_072, value_parser = value_parser!(u64).range(1_024..))]
    pub(super) kv_tokens: u64,
    /// Tokens at the beginning of each prompt that all sessions of an agent share
    #[arg(long, value_name = "TOKENS", default_value_t = 1_000, value_parser = value_parser!(u32).range(0..=1_000_000))]
    pub(super) prefix_tokens: u32,
}

impl Costs {
    /// Returns the time in which a host computes this number of prompt tokens.
    pub(super) fn prefill_us(&self, tokens: u32) -> u64 {
        (f64::from(tokens) / self.prefill_tokens_per_s * 1e6) as u64
    }

    /// Returns the time in which a sequence gets this number of tokens. Reading the weights takes most of a step, so the time does not
    /// depend on how many sequences run.
    pub(super) fn decode_us(&self, tokens: u32) -> u64 {
        (f64::from(tokens) * f64::from(self.sequences) / self.decode_tokens_per_s * 1e6) as u64
    }

    #[cfg(test)]
    pub(super) fn for_tests() -> Self {
        Costs {
            prefill_tokens_per_s: 2_000.0,
            decode_tokens_per_s: 1_000.0,
            sequences: 8,
            kv_tokens: 65_536,
            prefix_tokens: 1_000,
        }
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (1.0..=1e12).contains(&number) => Ok(number),
        _ => Err("it must be a number of at least 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_host_has_its_rates() {
        let costs = Costs::for_tests();
        assert_eq!(costs.prefill_us(2_000), 1_000_000);
        // Each of eight sequences gets 125 tokens in a second.
        assert_eq!(costs.decode_us(125), 1_000_000);
    }

    #[test]
    fn a_rate_is_a_positive_number() {
        assert!(positive("1245.5").is_ok_and(|rate| rate > 1_245.0));
        for wrong in ["0", "-1", "NaN", "many", "inf"] {
            assert!(positive(wrong).is_err(), "{wrong}");
        }
    }
}
