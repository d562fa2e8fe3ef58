//! Translates GGUF tensor names to Hugging Face names, so that one transformer definition reads both
//! formats.
//!
//! Invariant: the mapping is one-to-one. An unknown name is kept as it is.

/// Translates `blk.0.attn_q.weight` to `model.layers.0.self_attn.q_proj.weight`, for example.
///
/// `four_norms` says whether layers have norms after their parts too: then the norm before the feed-forward part has
/// another name.
pub(crate) fn hugging_face_name(name: &str, four_norms: bool) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".to_owned(),
        "output.weight" => return "lm_head.weight".to_owned(),
        "output_norm.weight" => return "model.norm.weight".to_owned(),
        _ => {}
    }
    let mapped = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let layer = layer.parse::<u32>().ok().filter(|number| number.to_string() == layer)?;
        let (part, kind) = rest.rsplit_once('.')?;
        let part = match (part, kind) {
            ("attn_norm", "weight") => "input_layernorm",
            ("ffn_norm", "weight") if four_norms => "pre_feedforward_layernorm",
            ("ffn_norm" | "post_attention_norm", "weight") => "post_attention_layernorm",
            ("post_ffw_norm", "weight") => "post_feedforward_layernorm",
            ("attn_sinks", "weight") => return Some(format!("model.layers.{layer}.self_attn.sinks")),
            ("attn_q", "weight" | "bias") => "self_attn.q_proj",
            ("attn_k", "weight" | "bias") => "self_attn.k_proj",
            ("attn_v", "weight" | "bias") => "self_attn.v_proj",
            ("attn_output", "weight" | "bias") => "self_attn.o_proj",
            ("attn_q_norm", "weight") => "self_attn.q_norm",
            ("attn_k_norm", "weight") => "self_attn.k_norm",
            ("ffn_gate", "weight" | "bias") => "mlp.gate_proj",
            ("ffn_up", "weight" | "bias") => "mlp.up_proj",
            ("ffn_down", "weight" | "bias") => "mlp.down_proj",
            ("attn_q_a", "weight") => "self_attn.q_a_proj",
            ("attn_q_a_norm", "weight") => "self_attn.q_a_layernorm",
            ("attn_q_b", "weight") => "self_attn.q_b_proj",
            ("attn_kv_a_mqa", "weight") => "self_attn.kv_a_proj_with_mqa",
            ("attn_kv_a_norm", "weight") => "self_attn.kv_a_layernorm",
            ("attn_kv_b", "weight") => "self_attn.kv_b_proj",
            // Two tensors in place of the one before, with the heads outermost.
            ("attn_k_b", "weight") => "self_attn.k_b_proj",
            ("attn_v_b", "weight") => "self_attn.v_b_proj",
            ("ffn_gate_inp", "weight" | "bias") => "mlp.gate",
            ("exp_probs_b", "bias") => {
                return Some(format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"));
            }
            ("ffn_gate_shexp", "weight") => "mlp.shared_experts.gate_proj",
            ("ffn_up_shexp", "weight") => "mlp.shared_experts.up_proj",
            ("ffn_down_shexp", "weight") => "mlp.shared_experts.down_proj",
            _ => return None,
        };
        Some(format!("model.layers.{layer}.{part}.{kind}"))
    };
    mapped().unwrap_or_else(|| name.to_owned())
}

/// Returns the names of the projections in a tensor of all experts of a layer, `blk.N.ffn_*_exps.weight` or `.bias`, as the
/// part before and the parts after an expert's number.
pub(crate) fn expert_names(name: &str) -> Option<(String, &'static [&'static str])> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer = layer.parse::<u32>().ok().filter(|number| number.to_string() == layer)?;
    let parts: &[&str] = match rest {
        "ffn_gate_exps.weight" => &["gate_proj.weight"],
        "ffn_up_exps.weight" => &["up_proj.weight"],
        "ffn_down_exps.weight" => &["down_proj.weight"],
        "ffn_gate_up_exps.weight" => &["gate_proj.weight", "up_proj.weight"],
        "ffn_gate_exps.bias" => &["gate_proj.bias"],
        "ffn_up_exps.bias" => &["up_proj.bias"],
        "ffn_down_exps.bias" => &["down_proj.bias"],
        _ => return None,
    };
    Some((format!("model.layers.{layer}.mlp.experts."), parts))
}

#[cfg(test)]
mod tests {
    use super::hugging_face_name;

    #[test]
    fn maps_known_tensor_names_and_keeps_others() {
        let cases = [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("blk.11.attn_q.bias", "model.layers.11.self_attn.q_proj.bias"),
            ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
            ("blk.2.attn_k_norm.weight", "model.layers.2.self_attn.k_norm.weight"),
            ("blk.00.attn_q.weight", "blk.00.attn_q.weight"),
            ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
            ("rope_freqs.weight", "rope_freqs.weight"),
        ];
        for (gguf, expected) in cases {
            assert_eq!(hugging_face_name(gguf, false), expected);
        }
        let norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
            .map(|norm| hugging_face_name(&format!("blk.3.{norm}.weight"), true));
        let expected = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
            .map(|norm| format!("model.layers.3.{norm}_layernorm.weight"));
        assert_eq!(norms, expected);
    }
}
