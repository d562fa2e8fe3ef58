//! Models of safetensors, written as GGUF with the experts of a layer in one tensor, whole and split.

use std::collections::BTreeMap;

use half::f16;
use safetensors::{Dtype, SafeTensors};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::coded::tests::fixture;
use crate::gguf::writer::GgufWriter;
use crate::verify::{Verification, VerifyOptions, verify};

/// Returns the tensors of a fixture in F32, under the names that GGUF files give them.
fn gguf_tensors(name: &str, split_expansion: bool) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored: BTreeMap<String, (Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let data = match view.dtype() {
                Dtype::F16 => {
                    let halves = view.data().as_chunks::<2>().0.iter();
                    halves.flat_map(|half| f16::from_le_bytes(*half).to_f32().to_le_bytes()).collect()
                }
                _ => view.data().to_vec(),
            };
            (name, (view.shape().to_vec(), data))
        })
        .collect();
    let mut tensors = BTreeMap::new();
    let adds_one = name == "gemma3";
    let has_post_norms = ["gemma3", "gpt-oss", "gpt-oss-mxfp4", "glm4-moe"].contains(&name);
    for (name, (shape, data)) in &stored {
        let (layer, part) = match name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => (layer, part),
            None => {
                let name = match name.as_str() {
                    "model.embed_tokens.weight" => "token_embd.weight",
                    "model.norm.weight" => "output_norm.weight",
                    _ => "output.weight",
                };
                let mut data = data.clone();
                if adds_one && name == "output_norm.weight" {
                    let values = data.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value) + 1.0);
                    data = values.flat_map(f32::to_le_bytes).collect();
                }
                tensors.insert(name.to_owned(), (shape.clone(), data));
                continue;
            }
        };
        let numbered = part.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.'));
        if let Some((expert, part)) = numbered {
            // Experts come in the order of their names, so each is put in its place.
            let expert: usize = expert.parse().unwrap();
            let part = part.strip_suffix("_proj.weight").unwrap();
            let all = tensors
                .entry(format!("blk.{layer}.ffn_{part}_exps.weight"))
                .or_insert_with(|| (vec![0, shape[0], shape[1]], Vec::new()));
            all.0[0] = all.0[0].max(expert + 1);
            all.1.resize(all.1.len().max((expert + 1) * data.len()), 0);
            all.1[expert * data.len()..][..data.len()].copy_from_slice(data);
            continue;
        }
        // Norms of this family are stored without their 1, but not in GGUF files.
        let plus_one: Vec<u8>;
        let data = match adds_one && part.contains("norm") {
            true => {
                let values = data.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value) + 1.0);
                plus_one = values.flat_map(f32::to_le_bytes).collect();
                &plus_one
            }
            false => data,
        };
        let kind = if part.ends_with(".bias") { "bias" } else { "weight" };
        let name = match part.trim_end_matches(".weight").trim_end_matches(".bias") {
            "input_layernorm" => "attn_norm",
            "post_attention_layernorm" if has_post_norms => "post_attention_norm",
            "post_attention_layernorm" => "ffn_norm",
            "pre_feedforward_layernorm" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "self_attn.sinks" => "attn_sinks",
            "mlp.router" => "ffn_gate_inp",
            "mlp.experts.gate_up_proj" | "mlp.experts.gate_up_proj_bias" => {
                interleaved_experts(&mut tensors, layer, part, shape, data);
                continue;
            }
            "mlp.experts.down_proj_bias" => {
                tensors.insert(format!("blk.{layer}.ffn_down_exps.bias"), (shape.clone(), data.clone()));
                continue;
            }
            "mlp.experts.down_proj" => {
                let transposed = transposed(data, shape, 0, 1);
                let shape = vec![shape[0], shape[2], shape[1]];
                tensors.insert(format!("blk.{layer}.ffn_down_exps.weight"), (shape, transposed));
                continue;
            }
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "self_attn.q_a_proj" => "attn_q_a",
            "self_attn.q_a_layernorm" => "attn_q_a_norm",
            "self_attn.q_b_proj" => "attn_q_b",
            "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
            "self_attn.kv_b_proj" => "attn_kv_b",
            "mlp.gate" => "ffn_gate_inp",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "mlp.shared_experts.gate_proj" => "ffn_gate_shexp",
            "mlp.shared_experts.up_proj" => "ffn_up_shexp",
            "mlp.shared_experts.down_proj" => "ffn_down_shexp",
            "mlp.gate.e_score_correction_bias" => {
                tensors.insert(format!("blk.{layer}.exp_probs_b.bias"), (shape.clone(), data.clone()));
                continue;
            }
            // Quantized experts are written by the test that has them.
            part if part.ends_with("_blocks") || part.ends_with("_scales") => continue,
            other => panic!("{other}"),
        };
        if name == "attn_kv_b" && split_expansion {
            // Four heads with 16 rows of keys, transposed, and 16 of values.
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for head in data.chunks(data.len() / 4) {
                let (key, value) = head.split_at(head.len() / 2);
                let at = |row: usize, column: usize| &key[(row * 32 + column) * 4..][..4];
                (0..32).for_each(|column| (0..16).for_each(|row| keys.extend(at(row, column))));
                values.extend(value);
            }
            tensors.insert(format!("blk.{layer}.attn_k_b.weight"), (vec![4, 32, 16], keys));
            tensors.insert(format!("blk.{layer}.attn_v_b.weight"), (vec![4, 16, 32], values));
            continue;
        }
        tensors.insert(format!("blk.{layer}.{name}.{kind}"), (shape.clone(), data.clone()));
    }
    tensors
}

/// Transposes every matrix of a tensor `[matrices, rows, columns]` of F32 values, and keeps of its columns every `step`-th
/// from `first` on.
fn transposed(data: &[u8], shape: &[usize], first: usize, step: usize) -> Vec<u8> {
    let (rows, columns) = (shape[1], shape[2]);
    let mut out = Vec::new();
    for matrix in data.chunks_exact(rows * columns * 4) {
        for column in (first..columns).step_by(step) {
            (0..rows).for_each(|row| out.extend(&matrix[(row * columns + column) * 4..][..4]));
        }
    }
    out
}

/// Adds gates and ups, which alternate in a tensor of all experts, as two tensors.
fn interleaved_experts(
    tensors: &mut BTreeMap<String, (Vec<usize>, Vec<u8>)>,
    layer: &str,
    part: &str,
    shape: &[usize],
    data: &[u8],
) {
    for (first, name) in ["gate", "up"].into_iter().enumerate() {
        let (kind, shape, data) = match part.ends_with("_bias") {
            true => {
                let every_second = data.as_chunks::<4>().0.iter().skip(first).step_by(2);
                ("bias", vec![shape[0], shape[1] / 2], every_second.flatten().copied().collect())
            }
            false => ("weight", vec![shape[0], shape[2] / 2, shape[1]], transposed(data, shape, first, 2)),
        };
        tensors.insert(format!("blk.{layer}.ffn_{name}_exps.{kind}"), (shape, data));
    }
}

fn common(writer: GgufWriter, name: &str, layers: u32) -> GgufWriter {
    let key = |key: &str| format!("{name}.{key}");
    writer
        .string("general.architecture", name)
        .unsigned(&key("block_count"), layers)
        .unsigned(&key("context_length"), 512)
        .unsigned(&key("embedding_length"), 64)
        .unsigned(&key("attention.head_count"), 4)
        .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .float(&key("expert_weights_scale"), if name == "deepseek2" { 2.5 } else { 0.0 })
        .unsigned(&key("expert_feed_forward_length"), 48)
}

fn qwen3_moe() -> GgufWriter {
    common(GgufWriter::default(), "qwen3moe", 3)
        .unsigned("qwen3moe.feed_forward_length", 176)
        .unsigned("qwen3moe.attention.head_count_kv", 2)
        .unsigned("qwen3moe.attention.key_length", 16)
        .unsigned("qwen3moe.attention.value_length", 16)
        .float("qwen3moe.rope.freq_base", 10000.0)
        .unsigned("qwen3moe.expert_count", 8)
        .unsigned("qwen3moe.expert_used_count", 2)
}

fn deepseek() -> GgufWriter {
    let yarn = GgufWriter::default()
        .float("deepseek2.rope.freq_base", 50000.0)
        .string("deepseek2.rope.scaling.type", "yarn")
        .float("deepseek2.rope.scaling.factor", 8.0)
        .unsigned("deepseek2.rope.scaling.original_context_length", 64)
        .float("deepseek2.rope.scaling.yarn_log_multiplier", 0.1);
    latent(yarn)
        .unsigned("deepseek2.expert_group_count", 4)
        .unsigned("deepseek2.expert_group_used_count", 2)
        .unsigned("deepseek2.expert_gating_func", 2)
        .boolean("deepseek2.expert_weights_norm", true)
}

/// Returns the keys of GLM-4.7-Flash, whose files do not say how scores become weights.
fn glm_flash() -> GgufWriter {
    latent(GgufWriter::default().float("deepseek2.rope.freq_base", 10000.0))
}

fn latent(writer: GgufWriter) -> GgufWriter {
    common(writer, "deepseek2", 4)
        .unsigned("deepseek2.rope.dimension_count", 8)
        .unsigned("deepseek2.feed_forward_length", 160)
        .unsigned("deepseek2.leading_dense_block_count", 1)
        .unsigned("deepseek2.attention.head_count_kv", 1)
        .unsigned("deepseek2.attention.q_lora_rank", 24)
        .unsigned("deepseek2.attention.kv_lora_rank", 32)
        .unsigned("deepseek2.attention.key_length", 40)
        .unsigned("deepseek2.attention.value_length", 32)
        .unsigned("deepseek2.attention.key_length_mla", 24)
        .unsigned("deepseek2.attention.value_length_mla", 16)
        .unsigned("deepseek2.expert_count", 16)
        .unsigned("deepseek2.expert_used_count", 4)
        .unsigned("deepseek2.expert_shared_count", 1)
}

fn gpt_oss() -> GgufWriter {
    let name = |key: &str| format!("gpt-oss.{key}");
    common(GgufWriter::default(), "gpt-oss", 4)
        .unsigned(&name("attention.head_count_kv"), 2)
        .unsigned(&name("attention.key_length"), 16)
        .unsigned(&name("attention.value_length"), 16)
        .unsigned(&name("attention.sliding_window"), 16)
        .float(&name("rope.freq_base"), 150000.0)
        .string(&name("rope.scaling.type"), "yarn")
        .float(&name("rope.scaling.factor"), 8.0)
        .unsigned(&name("rope.scaling.original_context_length"), 64)
        // The configuration of the fixture cancels the magnitude.
        .float(&name("rope.scaling.attn_factor"), 1.0 / (0.1 * 8f32.ln() + 1.0))
        .unsigned(&name("expert_count"), 8)
        .unsigned(&name("expert_used_count"), 2)
}

fn gemma3() -> GgufWriter {
    common(GgufWriter::default(), "gemma3", 6)
        .unsigned("gemma3.feed_forward_length", 176)
        .unsigned("gemma3.attention.head_count_kv", 2)
        .unsigned("gemma3.attention.key_length", 16)
        .unsigned("gemma3.attention.value_length", 16)
        .unsigned("gemma3.attention.sliding_window", 16)
        .float("gemma3.rope.freq_base", 1000000.0)
}

fn glm4_moe() -> GgufWriter {
    let name = |key: &str| format!("glm4moe.{key}");
    // One layer behind the last predicts further tokens.
    common(GgufWriter::default(), "glm4moe", 5)
        .unsigned(&name("nextn_predict_layers"), 1)
        .unsigned(&name("feed_forward_length"), 96)
        .unsigned(&name("expert_feed_forward_length"), 32)
        .unsigned(&name("leading_dense_block_count"), 1)
        .unsigned(&name("attention.head_count_kv"), 2)
        .unsigned(&name("attention.key_length"), 16)
        .unsigned(&name("attention.value_length"), 16)
        .unsigned(&name("rope.dimension_count"), 8)
        .float(&name("rope.freq_base"), 10000.0)
        .unsigned(&name("expert_count"), 4)
        .unsigned(&name("expert_used_count"), 2)
        .unsigned(&name("expert_shared_count"), 1)
        .unsigned(&name("expert_gating_func"), 2)
        .float(&name("expert_weights_scale"), 2.5)
        .boolean(&name("expert_weights_norm"), true)
        .weights("blk.4.nextn.eh_proj.weight", &[64, 128])
        .weights("blk.4.attn_norm.weight", &[64])
}

fn add<'a>(
    writer: GgufWriter,
    tensors: impl Iterator<Item = (&'a String, &'a (Vec<usize>, Vec<u8>))>,
) -> GgufWriter {
    tensors.fold(writer, |writer, (name, (shape, data))| {
        let dimensions: Vec<u64> = shape.iter().rev().map(|size| *size as u64).collect();
        writer.tensor(name, &dimensions, 0, data.clone())
    })
}

/// Writes the files, with the expected logits of the fixture beside them, and verifies the folder.
fn verified(name: &str, files: &[(&str, Vec<u8>)]) -> Result<Verification, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    for (file, bytes) in files {
        std::fs::write(folder.path().join(file), bytes).unwrap();
    }
    std::fs::copy(fixture(name).join("expected.safetensors"), folder.path().join("expected.safetensors"))
        .unwrap();
    verify(folder.path(), VerifyOptions::default())
}

#[test]
fn files_of_every_family_give_the_logits_of_the_reference() {
    for (name, writer, split_expansion) in [
        ("qwen3-moe", qwen3_moe(), false),
        ("deepseek-v3", deepseek(), false),
        ("deepseek-v3", deepseek(), true),
        ("glm4-moe-lite", glm_flash(), true),
        ("gpt-oss", gpt_oss(), false),
        ("gemma3", gemma3(), false),
        ("glm4-moe", glm4_moe(), false),
    ] {
        let tensors = gguf_tensors(name, split_expansion);
        let file = add(writer, tensors.iter()).build();
        let result = verified(name, &[("model.gguf", file)]).unwrap();
        assert!(result.passed, "{name}, split expansion {split_expansion}: {result:?}");
    }
}

#[test]
fn gates_and_ups_may_share_a_tensor() {
    let mut tensors = gguf_tensors("qwen3-moe", false);
    for layer in 0..3 {
        let (shape, gate) = tensors.remove(&format!("blk.{layer}.ffn_gate_exps.weight")).unwrap();
        let (_, up) = tensors.remove(&format!("blk.{layer}.ffn_up_exps.weight")).unwrap();
        let length = gate.len() / shape[0];
        let both: Vec<u8> =
            gate.chunks(length).zip(up.chunks(length)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let shape = vec![shape[0], 2 * shape[1], shape[2]];
        tensors.insert(format!("blk.{layer}.ffn_gate_up_exps.weight"), (shape, both));
    }
    let file = add(qwen3_moe(), tensors.iter()).build();
    let result = verified("qwen3-moe", &[("model.gguf", file)]).unwrap();
    assert!(result.passed, "{result:?}");
}

#[test]
fn experts_of_gpt_oss_in_blocks_of_gguf_give_the_logits_of_the_reference() {
    // The experts of the reference are 4-bit floats, whose bytes hold two neighbors; those of GGUF hold values 16 apart.
    let bytes = std::fs::read(fixture("gpt-oss-mxfp4").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut writer = gpt_oss()
        .unsigned("gpt-oss.block_count", 3)
        .unsigned("gpt-oss.expert_count", 4)
        .unsigned("gpt-oss.expert_feed_forward_length", 64)
        .float("gpt-oss.rope.scaling.attn_factor", 1.0);
    for (name, view) in file.tensors() {
        let Some((layer, part)) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
        else {
            continue;
        };
        let Some(stem) = part.strip_prefix("mlp.experts.").and_then(|part| part.strip_suffix("_blocks"))
        else {
            continue;
        };
        let scales = file.tensor(&name.replace("_blocks", "_scales")).unwrap();
        let (shape, across) = (view.shape(), view.shape()[2]);
        let names: &[&str] = if stem == "down_proj" { &["down"] } else { &["gate", "up"] };
        for (first, part) in names.iter().enumerate() {
            let mut data = Vec::new();
            let rows = view.data().chunks_exact(16 * across).zip(scales.data().chunks_exact(across));
            for (blocks, scales) in rows.skip(first).step_by(names.len()) {
                for (block, scale) in blocks.chunks_exact(16).zip(scales) {
                    let value = |at: usize| block[at / 2] >> (4 * (at % 2)) & 15;
                    data.push(*scale);
                    data.extend((0..16).map(|at| value(at) | value(at + 16) << 4));
                }
            }
            let dimensions = [32 * across as u64, (shape[1] / names.len()) as u64, shape[0] as u64];
            writer = writer.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"), &dimensions, 39, data);
        }
    }
    let plain = gguf_tensors("gpt-oss-mxfp4", false);
    let file = add(writer, plain.iter()).build();
    let result = verified("gpt-oss-mxfp4", &[("model.gguf", file)]).unwrap();
    assert!(result.passed, "{result:?}");
}

#[test]
fn parts_of_a_split_file_are_one_model() {
    let tensors = gguf_tensors("qwen3-moe", false);
    let count = tensors.len();
    let part = |writer: GgufWriter, number: u32, range: std::ops::Range<usize>| {
        let writer = writer
            .unsigned("split.no", number)
            .unsigned("split.count", 3)
            .unsigned("split.tensors.count", count as u32);
        add(writer, tensors.iter().skip(range.start).take(range.len())).build()
    };
    let empty = GgufWriter::default;
    let (first, second) = ("tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf");
    let third = "tiny-00003-of-00003.gguf";
    let files = [
        (first, part(qwen3_moe(), 0, 0..0)),
        (second, part(empty(), 1, 0..20)),
        (third, part(empty(), 2, 20..count)),
    ];
    let result = verified("qwen3-moe", &files).unwrap();
    assert!(result.passed, "{result:?}");
    let error = |files: &[(&str, Vec<u8>)]| verified("qwen3-moe", files).unwrap_err().to_string();
    let missing = error(&[files[0].clone(), files[2].clone()]);
    assert!(missing.contains(second), "{missing}");
    let wrong = error(&[files[0].clone(), (second, files[2].1.clone()), files[2].clone()]);
    assert!(wrong.contains("split.no") && wrong.contains(second), "{wrong}");
    let twice = error(&[files[0].clone(), files[1].clone(), (third, part(empty(), 2, 19..count))]);
    assert!(twice.contains("appears again in"), "{twice}");
    let few = error(&[files[0].clone(), files[1].clone(), (third, part(empty(), 2, 21..count))]);
    assert!(few.contains("split.tensors.count"), "{few}");
    let unnamed = error(&[("model.gguf", files[0].1.clone())]);
    assert!(unnamed.contains("is not named"), "{unnamed}");
}

#[test]
fn malformed_experts_are_named() {
    let open = |writer: GgufWriter| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, writer.build()).unwrap();
        Checkpoint::open(&path).map(|_| ()).expect_err("must be rejected").to_string()
    };
    let tensors = gguf_tensors("qwen3-moe", false);
    let with = |name: &str, shape: &[usize]| {
        let others = tensors.iter().filter(|(other, _)| *other != name);
        add(qwen3_moe(), others).weights(name, shape)
    };
    let flat = open(with("blk.1.ffn_up_exps.weight", &[8, 48 * 64]));
    assert!(flat.contains("expected [experts, rows, columns]"), "{flat}");
    let few = open(with("blk.1.ffn_up_exps.weight", &[7, 48, 64]));
    assert!(few.contains("experts.7.up_proj"), "{few}");
    let odd = open(with("blk.1.ffn_gate_up_exps.weight", &[8, 47, 64]));
    assert!(odd.contains("projections of equal size"), "{odd}");
    let whole = || add(qwen3_moe(), tensors.iter());
    let error = open(whole().unsigned("qwen3moe.expert_gating_func", 4));
    assert!(error.contains("expert_gating_func"), "{error}");
    let error = open(whole().unsigned("qwen3moe.expert_used_count", 9));
    assert!(error.contains("num_experts_per_tok"), "{error}");
    let error = open(whole().unsigned("qwen3moe.expert_count", 5000));
    assert!(error.contains("num_experts"), "{error}");
}
