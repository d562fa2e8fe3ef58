//! The instruction-set tiers that the CPU kernels are compiled for.
//!
//! Invariant: code of a tier that the machine does not support is never executed; dispatch falls back to portable code.

use std::fmt;
use std::str::FromStr;

/// A tier of CPU instructions, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// The same with BF16: what BF16 weights are multiplied with, and the products of attention with keys and values in
    /// less than 32 bits, or with latents in 16 bits, are rounded to BF16. F16 weights and their activations are rounded to 14
    /// bits per block of 32.
    Avx512Bf16,
}

impl Isa {
    /// All tiers, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// Returns the fastest tier that this machine supports.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.supported()).unwrap_or(Isa::Portable)
    }

    /// Returns whether this machine can run the tier.
    #[cfg(target_arch = "x86_64")]
    pub fn supported(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Isa::Avx512 => {
                Isa::Avx2.supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            Isa::Avx512Bf16 => Isa::Avx512.supported() && is_x86_feature_detected!("avx512bf16"),
        }
    }

    /// Returns whether this machine can run the tier.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn supported(self) -> bool {
        self == Isa::Portable
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
        })
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Isa::ALL.into_iter().find(|isa| isa.to_string() == text).ok_or_else(|| {
            format!("unknown instruction set {text:?}; expected portable, avx2, avx512 or avx512-bf16")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_portable_always_runs() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!("sse9".parse::<Isa>().is_err());
        assert!(Isa::Portable.supported() && Isa::detect().supported());
    }
}
