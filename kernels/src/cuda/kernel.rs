//! The key of a kernel: what chooses it among the kernels of its family.
//!
//! Invariant: making, copying and comparing a key neither allocates nor formats. A device looks up a kernel by its name once,
//! and by its key from then on.

use std::fmt;

use super::Activation;
use super::tiles::Tiles;
use crate::DType;

/// A kernel. Its name is that of the family, followed by each part that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    family: Family,
    /// The format of quantized weights, or of keys and values that are not activations.
    format: Option<DType>,
    /// The head size or the number of rows of a block that the kernel is compiled for. 0 means any.
    size: u32,
    activation: Option<Activation>,
}

/// The kernels that differ only in formats and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    AllReduceNorm,
    AllReduceOneShot,
    AllReduceTwoShot,
    AttentionDecode,
    AttentionHopper,
    AttentionJoin,
    AttentionOrdered,
    AttentionPrefill,
    Embedding,
    Expand,
    Gemm,
    Gemv,
    GemvGated,
    GemvNormedGated,
    GemvNormedQkv,
    GemvQkv,
    Products,
    ProductsGated,
    Qkv,
    RmsNorm,
    SampleBest,
    SampleBestF32,
    SampleCut,
    SampleDraw,
    Swiglu,
}

impl Kernel {
    /// Returns the kernel of a family that has neither formats nor sizes.
    pub(super) const fn of(family: Family) -> Self {
        Kernel { family, format: None, size: 0, activation: None }
    }

    pub(super) const fn format(self, dtype: DType) -> Self {
        Kernel { format: Some(dtype), ..self }
    }

    pub(super) const fn size(self, size: u32) -> Self {
        Kernel { size, ..self }
    }

    pub(super) const fn activation(self, activation: Activation) -> Self {
        Kernel { activation: Some(activation), ..self }
    }
}

impl Family {
    /// Returns the first part of the names of the family's kernels, which is also the name of the operation in errors.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Family::AllReduceNorm => "all_reduce_norm",
            Family::AllReduceOneShot => "all_reduce_one_shot",
            Family::AllReduceTwoShot => "all_reduce_two_shot",
            Family::AttentionDecode => "attention_decode",
            Family::AttentionHopper => "attention_hopper",
            Family::AttentionJoin => "attention_join",
            Family::AttentionOrdered => "attention_ordered",
            Family::AttentionPrefill => "attention_prefill",
            Family::Embedding => "embedding",
            Family::Expand => "expand",
            Family::Gemm => "gemm",
            Family::Gemv => "gemv",
            Family::GemvGated => "gemv_gated",
            Family::GemvNormedGated => "gemv_normed_gated",
            Family::GemvNormedQkv => "gemv_normed_qkv",
            Family::GemvQkv => "gemv_qkv",
            Family::Products => "products",
            Family::ProductsGated => "products_gated",
            Family::Qkv => "qkv",
            Family::RmsNorm => "rms_norm",
            Family::SampleBest => "sample_best",
            Family::SampleBestF32 => "sample_best_f32",
            Family::SampleCut => "sample_cut",
            Family::SampleDraw => "sample_draw",
            Family::Swiglu => "swiglu",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.family.name())?;
        if let Some(tiles) = self.format.and_then(Tiles::of) {
            write!(f, "_{}", tiles.name)?;
        }
        if self.size > 0 {
            write!(f, "_{}", self.size)?;
        }
        match self.activation {
            Some(activation) => write!(f, "_{}", activation.suffix()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::qkv::{self, QkvParams};
    use crate::cuda::rms_norm::{self, RmsNormParams};
    use crate::cuda::{Address, PageFormat, matmul::MatmulParams, matmul::OutputFormat};
    use crate::cuda::{allocations, attention_decode, products};

    const BF16: Activation = Activation::Bf16;

    #[test]
    fn a_launch_is_chosen_without_an_allocation() {
        let none = Address::NONE;
        let norm = RmsNormParams { width: 64, ..RmsNormParams::NONE };
        let heads = QkvParams { rows: 1, heads: 1, kv_heads: 1, head_size: 64, ..QkvParams::NONE };
        let product = MatmulParams {
            x: none,
            weights: none,
            bias: none,
            y: none,
            rows: 1,
            inputs: 256,
            outputs: 16,
            y_stride: 16,
            output_format: OutputFormat::Activations,
        };
        let (count, launches) = allocations::during(|| {
            [
                rms_norm::launch(&norm, 1, BF16),
                qkv::launch(&heads, BF16, PageFormat::Fp8),
                attention_decode::block(64, BF16, PageFormat::Activations),
                products::launch(&product, DType::Q4K, BF16),
            ]
        });
        assert_eq!(count, 0);
        let names = launches.map(|launch| launch.expect("good shapes").kernel.to_string());
        assert_eq!(
            names,
            ["rms_norm_bf16", "qkv_f8_bf16", "attention_decode_64_bf16", "products_q4_k_8_bf16"]
        );
        assert!(allocations::during(|| names.clone()).0 > 0, "allocations are counted");
    }

    #[test]
    fn a_name_has_the_parts_of_its_key_in_order() {
        let names = [
            (Kernel::of(Family::SampleDraw), "sample_draw"),
            (Kernel::of(Family::Gemm).size(128).activation(Activation::F16), "gemm_128_f16"),
            (
                Kernel::of(Family::Products).format(DType::Q4K).size(8).activation(Activation::Bf16),
                "products_q4_k_8_bf16",
            ),
        ];
        for (kernel, name) in names {
            assert_eq!(kernel.to_string(), name);
        }
    }
}
