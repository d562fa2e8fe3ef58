//! Translates GGUF tensor names to Hugging Face names, so that one transformer definition reads both
//! formats.
//!
//! Invariant: the mapping is one-to-one. An unknown name is kept as it is.

/// Translates `blk.0.attn_q.weight` to `model.layers.0.self_attn.q_proj.weight`, for example.
pub(crate) fn hugging_face_name(name: &str) -> String {
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
            ("ffn_norm", "weight") => "post_attention_layernorm",
            ("attn_q", "weight" | "bias") => "self_attn.q_proj",
            ("attn_k", "weight" | "bias") => "self_attn.k_proj",
            ("attn_v", "weight" | "bias") => "self_attn.v_proj",
            ("attn_output", "weight" | "bias") => "self_attn.o_proj",
            ("attn_q_norm", "weight") => "self_attn.q_norm",
            ("attn_k_norm", "weight") => "self_attn.k_norm",
            ("ffn_gate", "weight" | "bias") => "mlp.gate_proj",
            ("ffn_up", "weight" | "bias") => "mlp.up_proj",
            ("ffn_down", "weight" | "bias") => "mlp.down_proj",
            _ => return None,
        };
        Some(format!("model.layers.{layer}.{part}.{kind}"))
    };
    mapped().unwrap_or_else(|| name.to_owned())
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
            assert_eq!(hugging_face_name(gguf), expected);
        }
    }
}
