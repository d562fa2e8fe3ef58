//! The widths of published mixtures, and two tiny ones of the same families.
//!
//! Invariant: the numbers are those of the configurations that the models were published with.

/// A mixture whose widths are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) name: &'static str,
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) context: usize,
    pub(super) theta: f32,
    pub(super) norm_epsilon: f32,
    /// Width of a dense feed-forward block.
    pub(super) dense_size: usize,
    pub(super) attention: Attention,
    pub(super) experts: Experts,
}

/// The attention of a family.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attention {
    /// The layers of Qwen3-MoE: queries share keys and values, and heads have norms.
    Grouped { kv_heads: usize, head_size: usize },
    /// The layers of DeepSeek.
    Latent(Latent),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Latent {
    /// Width of the narrow query row, if queries have one.
    pub(super) query_rank: Option<usize>,
    pub(super) rank: usize,
    pub(super) unrotated: usize,
    pub(super) rotated: usize,
    pub(super) value: usize,
    pub(super) yarn: Option<Yarn>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Yarn {
    pub(super) factor: f32,
    pub(super) original_context: usize,
    /// The weight of the magnitude of all dimensions, `mscale_all_dim`.
    pub(super) all_dimensions: f32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    pub(super) count: usize,
    /// Number of experts that each token passes through.
    pub(super) used: usize,
    /// Width of one expert.
    pub(super) size: usize,
    /// Number of experts that every token passes through.
    pub(super) shared: usize,
    /// Number of layers without experts, from the first on.
    pub(super) dense_layers: usize,
    pub(super) gating: Gating,
    /// Whether the weights of a token add up to 1.
    pub(super) normalized: bool,
    pub(super) scale: f32,
}

/// The function that turns the products of a router into scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gating {
    Softmax,
    /// The logistic function; a correction is added for the choice.
    Sigmoid,
}

/// The shapes that files can have.
pub(super) static SHAPES: [Shape; 6] =
    [QWEN3_30B_A3B, DEEPSEEK_V2_LITE, GLM_4_7_FLASH, KIMI_K2, TINY_QWEN3_MOE, TINY_DEEPSEEK];

const QWEN3_30B_A3B: Shape = Shape {
    name: "qwen3-30b-a3b",
    layers: 48,
    hidden: 2048,
    heads: 32,
    context: 40_960,
    theta: 1e6,
    norm_epsilon: 1e-6,
    dense_size: 6144,
    attention: Attention::Grouped { kv_heads: 4, head_size: 128 },
    experts: Experts {
        count: 128,
        used: 8,
        size: 768,
        shared: 0,
        dense_layers: 0,
        gating: Gating::Softmax,
        normalized: true,
        scale: 1.0,
    },
};

const DEEPSEEK_V2_LITE: Shape = Shape {
    name: "deepseek-v2-lite",
    layers: 27,
    hidden: 2048,
    heads: 16,
    context: 163_840,
    theta: 1e4,
    norm_epsilon: 1e-6,
    dense_size: 10_944,
    attention: Attention::Latent(Latent {
        query_rank: None,
        rank: 512,
        unrotated: 128,
        rotated: 64,
        value: 128,
        yarn: Some(Yarn { factor: 40.0, original_context: 4096, all_dimensions: 0.707 }),
    }),
    experts: Experts {
        count: 64,
        used: 6,
        size: 1408,
        shared: 2,
        dense_layers: 1,
        gating: Gating::Softmax,
        normalized: false,
        scale: 1.0,
    },
};

const GLM_4_7_FLASH: Shape = Shape {
    name: "glm-4.7-flash",
    layers: 47,
    hidden: 2048,
    heads: 20,
    context: 202_752,
    theta: 1e6,
    norm_epsilon: 1e-5,
    dense_size: 10_240,
    attention: Attention::Latent(Latent {
        query_rank: Some(768),
        rank: 512,
        unrotated: 192,
        rotated: 64,
        value: 256,
        yarn: None,
    }),
    experts: Experts {
        count: 64,
        used: 4,
        size: 1536,
        shared: 1,
        dense_layers: 1,
        gating: Gating::Sigmoid,
        normalized: true,
        scale: 1.8,
    },
};

const KIMI_K2: Shape = Shape {
    name: "kimi-k2",
    layers: 61,
    hidden: 7168,
    heads: 64,
    context: 262_144,
    theta: 5e4,
    norm_epsilon: 1e-5,
    dense_size: 18_432,
    attention: Attention::Latent(Latent {
        query_rank: Some(1536),
        rank: 512,
        unrotated: 128,
        rotated: 64,
        value: 128,
        yarn: Some(Yarn { factor: 64.0, original_context: 4096, all_dimensions: 1.0 }),
    }),
    experts: Experts {
        count: 384,
        used: 8,
        size: 2048,
        shared: 1,
        dense_layers: 1,
        gating: Gating::Sigmoid,
        normalized: true,
        scale: 2.827,
    },
};

const TINY_QWEN3_MOE: Shape = Shape {
    name: "tiny-qwen3-moe",
    layers: 2,
    hidden: 64,
    heads: 4,
    context: 512,
    dense_size: 128,
    attention: Attention::Grouped { kv_heads: 2, head_size: 32 },
    experts: Experts { count: 8, used: 2, size: 64, ..QWEN3_30B_A3B.experts },
    ..QWEN3_30B_A3B
};

const TINY_DEEPSEEK: Shape = Shape {
    name: "tiny-deepseek",
    layers: 3,
    hidden: 64,
    heads: 4,
    context: 512,
    dense_size: 128,
    attention: Attention::Latent(Latent {
        query_rank: None,
        rank: 32,
        unrotated: 32,
        rotated: 16,
        value: 32,
        yarn: Some(Yarn { factor: 8.0, original_context: 64, all_dimensions: 0.707 }),
    }),
    experts: Experts { count: 8, used: 2, size: 64, ..DEEPSEEK_V2_LITE.experts },
    ..DEEPSEEK_V2_LITE
};
