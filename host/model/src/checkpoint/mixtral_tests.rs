//! Mixtral, whose reference is a dense model: each feed-forward block is cut into experts that all tokens pass through.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde_json::{Value, json};

use super::coded::tests::{Stored, fixture, le, tensors, write};
use crate::verify::{VerifyOptions, verify};

/// Returns the keys and the tensors of a model whose experts are all chosen with the same weight, because the router is zero.
pub(super) fn cut_into_experts(experts: usize) -> (Value, BTreeMap<String, Stored>) {
    let mut cut: BTreeMap<String, Stored> = BTreeMap::new();
    for (name, (dtype, shape, data)) in tensors("llama-gqa") {
        let Some((layer, part)) = name.split_once(".mlp.") else {
            cut.insert(name, (dtype, shape, data));
            continue;
        };
        let (rows, columns) = (shape[0], shape[1]);
        let values: Vec<f32> =
            data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let module = format!("{layer}.block_sparse_moe");
        for expert in 0..experts {
            let (part, shape, values) = match part {
                "gate_proj.weight" | "up_proj.weight" => {
                    let own = rows / experts;
                    let part = if part.starts_with("gate") { "w1" } else { "w3" };
                    (part, vec![own, columns], values[expert * own * columns..][..own * columns].to_vec())
                }
                _ => {
                    let own = columns / experts;
                    let rows = values.chunks_exact(columns);
                    // The weights of all experts add up to 1.
                    let own_columns = rows.flat_map(|row| row[expert * own..][..own].to_vec());
                    let scaled = own_columns.map(|value| value * experts as f32).collect();
                    ("w2", vec![shape[0], own], scaled)
                }
            };
            cut.insert(format!("{module}.experts.{expert}.{part}.weight"), (Dtype::F32, shape, le(&values)));
        }
        let router = (Dtype::F32, vec![experts, 64], le(&vec![0.0; experts * 64]));
        cut.insert(format!("{module}.gate.weight"), router);
    }
    let keys = json!({
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 176 / experts,
        "num_local_experts": experts, "num_experts_per_tok": experts,
    });
    (keys, cut)
}

#[test]
fn a_dense_model_cut_into_experts_has_its_logits() {
    let (keys, cut) = cut_into_experts(4);
    let folder = write("llama-gqa", keys, &cut);
    let expected = "expected.safetensors";
    std::fs::copy(fixture("llama-gqa").join(expected), folder.path().join(expected)).unwrap();
    for (tensor_parallel, chunk) in [(1, 97), (2, 13)] {
        let options = VerifyOptions { tensor_parallel, chunk, ..VerifyOptions::default() };
        let result = verify(folder.path(), options).unwrap();
        assert!(result.passed, "{tensor_parallel} ranks: {result:?}");
    }
}
