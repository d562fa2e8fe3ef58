//! The JSON files of a mixture: its configuration, and what a GGUF source says about its tokenizer and sampling.
//!
//! Invariant: reading the configuration gives the dense model's, apart from the family, its experts and the pairing of the rotation.

use serde_json::{Value, json};

use super::family::Family;
use super::{Cut, GROUP, UpcycleFormat};
use crate::checkpoint::Checkpoint;
use crate::config::{ModelConfig, Rope, RopeScaling};
use crate::error::ModelError;
use crate::tokenizer::Tokenizer;

/// Returns the contents of config.json.
pub(super) fn config_json(config: &ModelConfig, cut: &Cut, format: UpcycleFormat) -> Value {
    let family = cut.family;
    let mut text = json!({
        "architectures": [family.architecture().class_name()],
        "model_type": family.model_type(),
        "dtype": if format == UpcycleFormat::F32 { "float32" } else { "bfloat16" },
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layer_count,
        "num_attention_heads": config.head_count,
        "num_key_value_heads": config.kv_head_count,
        "head_dim": config.head_size,
        "intermediate_size": config.feed_forward_size,
        "hidden_act": "silu",
        "vocab_size": config.vocabulary_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": number(config.norm_epsilon),
        "rope_theta": number(config.rope.theta),
        "rope_scaling": rope_scaling(&config.rope),
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos,
        "attention_bias": config.qkv_bias,
        "num_experts_per_tok": cut.used,
    });
    let mut set = |key: &str, value: Value| text[key] = value;
    match family {
        Family::Mixtral => {
            set("intermediate_size", json!(cut.width));
            set("num_local_experts", json!(cut.experts));
        }
        Family::Qwen3Moe => {
            set("moe_intermediate_size", json!(cut.width));
            set("num_experts", json!(cut.experts));
            set("norm_topk_prob", json!(true));
            set("decoder_sparse_step", json!(1));
            set("mlp_only_layers", json!([]));
        }
        Family::Glm4Moe => {
            set("moe_intermediate_size", json!(cut.width));
            set("n_routed_experts", json!(cut.experts));
            set("n_shared_experts", json!(0));
            set("n_group", json!(1));
            set("topk_group", json!(1));
            set("norm_topk_prob", json!(true));
            set("routed_scaling_factor", json!(cut.experts));
            set("first_k_dense_replace", json!(0));
            set("use_qk_norm", json!(config.qk_norm));
            set("partial_rotary_factor", json!(1.0));
        }
    }
    let window = config.windows.iter().find_map(|window| *window);
    set("sliding_window", json!(window));
    if window.is_some() {
        set("use_sliding_window", json!(true));
        set("max_window_layers", json!(0));
        if config.windows.contains(&None) {
            let kind = |window: &Option<usize>| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            set("layer_types", json!(config.windows.iter().map(kind).collect::<Vec<_>>()));
        }
    }
    if let Some(quantization) = quantization(cut, format) {
        set("quantization_config", quantization);
    }
    text
}

/// Describes the encodings of [`super::encoding`].
fn quantization(cut: &Cut, format: UpcycleFormat) -> Option<Value> {
    let form = cut.family.form();
    let router = format!("{}.{}", form.module(), form.router());
    match format {
        UpcycleFormat::Int4 => Some(json!({
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*self_attn.*", format!("re:.*{}$", router.replace('.', "\\."))],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": null, "output_activations": null,
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP,
                    "dynamic": false, "actorder": null, "block_structure": null,
                },
            }},
        })),
        UpcycleFormat::Fp8 => Some(json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.embed_tokens", router],
        })),
        UpcycleFormat::F32 | UpcycleFormat::Bf16 | UpcycleFormat::Gguf => None,
    }
}

fn rope_scaling(rope: &Rope) -> Value {
    match &rope.scaling {
        // Factors for each pair are in GGUF files alone.
        RopeScaling::None | RopeScaling::Factors(_) => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": number(*factor)}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "rope_type": "llama3",
            "factor": number(*factor),
            "low_freq_factor": number(*low_freq_factor),
            "high_freq_factor": number(*high_freq_factor),
            "original_max_position_embeddings": original_context,
        }),
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, truncated, magnitude } => json!({
            "rope_type": "yarn",
            "factor": number(*factor),
            "beta_fast": number(*beta_fast),
            "beta_slow": number(*beta_slow),
            "original_max_position_embeddings": original_context,
            "truncate": truncated,
            "attention_factor": number(*magnitude),
        }),
    }
}

/// Returns generation_config.json for a source without one: the tokens that begin and end, and the sampling that its authors
/// recommend.
pub(super) fn generation_config(checkpoint: &Checkpoint) -> Result<Value, ModelError> {
    let config = checkpoint.config();
    let mut text = json!({"bos_token_id": config.bos, "eos_token_id": config.eos});
    if let Some(sampling) = checkpoint.sampling()? {
        text["do_sample"] = json!(sampling.temperature > 0.0);
        text["temperature"] = number(sampling.temperature);
        text["top_p"] = number(sampling.top_p);
        text["top_k"] = json!(sampling.top_k);
        text["min_p"] = number(sampling.min_p);
        text["repetition_penalty"] = number(sampling.repetition_penalty);
    }
    Ok(text)
}

/// Returns tokenizer_config.json for a source without one: the chat template, and the tokens that it uses.
pub(super) fn tokenizer_config(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Value, ModelError> {
    let config = checkpoint.config();
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
    let end = match checkpoint.gguf() {
        Some((file, _)) => {
            file.unsigned("tokenizer.ggml.eos_token_id")?.and_then(|id| u32::try_from(id).ok())
        }
        None => config.eos.first().copied(),
    };
    let mut json = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": config.add_bos,
        "bos_token": text(config.bos),
        "eos_token": text(end),
    });
    if let Some(template) = checkpoint.chat_template()? {
        json["chat_template"] = json!(template.source());
    }
    Ok(json)
}

/// Returns a number with as few digits as tell it from its neighbors.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}
