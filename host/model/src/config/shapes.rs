//! Shapes of known models, for measurements without their weights.
//!
//! Invariant: every shape passes [`ModelConfig::check`].

use super::{Architecture, LayerStyle, ModelConfig, Rope, RopePairing, RopeScaling};

impl ModelConfig {
    /// The names that [`ModelConfig::shape`] knows. `tiny` is not a published model; it is small
    /// enough to run anywhere.
    pub const SHAPES: [&str; 4] = ["llama-3.1-8b", "qwen2.5-0.5b", "smollm2-135m", "tiny"];

    /// Returns the configuration of a known model by name.
    pub fn shape(name: &str) -> Option<ModelConfig> {
        Some(match name {
            "llama-3.1-8b" => llama_3_1_8b(),
            "qwen2.5-0.5b" => qwen2_5_0_5b(),
            "smollm2-135m" => smollm2_135m(),
            "tiny" => tiny(),
            _ => return None,
        })
    }
}

fn llama_3_1_8b() -> ModelConfig {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 4096,
        layer_count: 32,
        head_count: 32,
        kv_head_count: 8,
        head_size: 128,
        feed_forward_size: 14336,
        vocabulary_size: 128_256,
        context_length: 131_072,
        norm_epsilon: 1e-5,
        rope: Rope { theta: 500_000.0, pairing: RopePairing::Halves, scaling },
        windows: vec![None; 32],
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        style: LayerStyle::default(),
        tied_head: false,
        bos: Some(128_000),
        eos: vec![128_001, 128_008, 128_009],
        add_bos: true,
    }
}

fn qwen2_5_0_5b() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen2,
        hidden_size: 896,
        layer_count: 24,
        head_count: 14,
        kv_head_count: 2,
        head_size: 64,
        feed_forward_size: 4864,
        vocabulary_size: 151_936,
        context_length: 32768,
        norm_epsilon: 1e-6,
        rope: unscaled(1_000_000.0),
        windows: vec![None; 24],
        qkv_bias: true,
        tied_head: true,
        bos: None,
        eos: vec![151_645, 151_643],
        add_bos: false,
        ..llama_3_1_8b()
    }
}

fn smollm2_135m() -> ModelConfig {
    ModelConfig {
        hidden_size: 576,
        layer_count: 30,
        head_count: 9,
        kv_head_count: 3,
        head_size: 64,
        feed_forward_size: 1536,
        vocabulary_size: 49152,
        context_length: 8192,
        rope: unscaled(100_000.0),
        windows: vec![None; 30],
        tied_head: true,
        bos: Some(1),
        eos: vec![2],
        add_bos: false,
        ..llama_3_1_8b()
    }
}

fn tiny() -> ModelConfig {
    ModelConfig {
        hidden_size: 256,
        layer_count: 2,
        head_count: 4,
        kv_head_count: 2,
        head_size: 64,
        feed_forward_size: 512,
        vocabulary_size: 1024,
        context_length: 8192,
        rope: unscaled(10_000.0),
        windows: vec![None; 2],
        bos: Some(1),
        eos: vec![2],
        ..llama_3_1_8b()
    }
}

fn unscaled(theta: f32) -> Rope {
    Rope { theta, pairing: RopePairing::Halves, scaling: RopeScaling::None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_shape_is_a_valid_configuration() {
        for name in ModelConfig::SHAPES {
            let config = ModelConfig::shape(name).expect(name);
            assert_eq!(config.clone().check().expect(name), config);
        }
        assert_eq!(ModelConfig::shape("llama-9"), None);
    }
}
