//! CPU kernels. Each kernel is written once over [`simd::Simd`] and compiled for every instruction-set tier.
//!
//! Invariant: a tier runs only on machines that support it. The caller has already checked the shapes.

pub(crate) mod attention;
mod attention_bf16;
pub(crate) mod elementwise;
pub(crate) mod float_tiles;
pub(crate) mod integer_tiles;
pub(crate) mod kv;
pub(crate) mod latent;
pub(crate) mod latent_bf16;
pub(crate) mod latent_bytes;
pub(crate) mod pack;
mod pack_words;
mod portable;
pub(crate) mod quantize;
mod row_parts;
pub(crate) mod rows;
pub(crate) mod simd;
pub(crate) mod softmax_state;
pub(crate) mod tile_format;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_dots;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16_tiles;
#[cfg(target_arch = "x86_64")]
pub(crate) mod half_tiles;

use crate::Isa;
use simd::Simd;

/// A computation that is compiled once per tier.
pub(crate) trait Kernel {
    type Output;
    /// If true, the computation is also compiled for the tier with dot products of BF16 numbers. Otherwise, that tier runs the
    /// code of the tier without them.
    const USES_BF16_DOTS: bool = false;
    /// If true, the computation is compiled for no other tier, and no other tier may be asked for.
    const NEEDS_BF16_DOTS: bool = false;
    /// If true, the computation is not compiled for the portable tier, which may not be asked for.
    const NEEDS_VECTORS: bool = false;

    /// Runs the computation with the vectors of tier `S`.
    ///
    /// # Safety
    /// The machine supports the instructions of `S`, and the kernel's pointers are valid.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// Runs a kernel in the given tier, or in portable code if the machine does not support the tier.
///
/// # Safety
/// The pointers in the kernel are valid for everything that it reads and writes.
pub(crate) unsafe fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    // SAFETY: support for the tier is checked here; the caller guarantees that the pointers are valid.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if K::USES_BF16_DOTS && isa.supported() => run_avx512_bf16(kernel),
            _ if K::NEEDS_BF16_DOTS => unreachable!("the tier was checked"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 if isa.supported() => run_avx512(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if isa.supported() => run_avx2(kernel),
            _ if K::NEEDS_VECTORS => unreachable!("the tier was checked"),
            _ => kernel.run::<portable::Portable>(),
        }
    }
}

/// Returns the number of tokens that the tier's kernels process at once.
pub(crate) fn group_tokens(isa: Isa) -> usize {
    match isa {
        // These tiers have `Simd::MANY_REGISTERS`.
        Isa::Avx512 | Isa::Avx512Bf16 if isa.supported() => 8,
        _ => 4,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<avx512::Avx512<false>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<avx512::Avx512<true>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<avx2::Avx2>() }
}
