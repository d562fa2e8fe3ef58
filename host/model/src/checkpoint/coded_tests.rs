//! Quantized safetensors: their values, the logits of whole models, and malformed ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::verify::{VerifyOptions, verify};

/// A tensor in memory.
pub(in crate::checkpoint) type Stored = (Dtype, Vec<usize>, Vec<u8>);

pub(in crate::checkpoint) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(name)
}

pub(in crate::checkpoint) fn tensors(name: &str) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    file.tensors().into_iter().map(|(name, view)| (name, stored(view))).collect()
}

/// Writes a model with the configuration of a fixture, some keys of which are replaced.
pub(in crate::checkpoint) fn write(
    name: &str,
    keys: Value,
    tensors: &BTreeMap<String, Stored>,
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

pub(in crate::checkpoint) fn le(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn floats_of_eight_bits_have_the_values_of_their_format() {
    let cases = [
        (0x00, 0.0),
        (0x01, 2f32.powi(-9)),
        (0x07, 7.0 * 2f32.powi(-9)),
        (0x08, 2f32.powi(-6)),
        (0x38, 1.0),
        (0x39, 1.125),
        (0xb8, -1.0),
        (0x7e, 448.0),
        (0xfe, -448.0),
    ];
    for (code, value) in cases {
        assert_eq!(fp8_value(code), value, "{code:#x}");
    }
    assert!(fp8_value(0x7f).is_nan() && fp8_value(0xff).is_nan());
    assert!((0..0x7e).all(|code| fp8_value(code) < fp8_value(code + 1)));
}

#[test]
fn packed_integers_become_blocks_of_the_same_values() {
    // Two groups: the nibbles 0 to 15 twice, then twice 15 down to 0; the lowest bits come first.
    let up: Vec<u8> = (0..8).map(|at| (2 * at) | (2 * at + 1) << 4).collect();
    let down: Vec<u8> = up.iter().rev().map(|byte| byte.rotate_left(4)).collect();
    let packed = [&up[..], &up, &down, &down].concat();
    let blocks = int4_blocks(&packed, &[0.5, -0.25]).unwrap();
    let mut values = vec![0.0; 64];
    dequantize(DType::Q4_0, &blocks, &mut values).unwrap();
    let expected = |at: usize| match at < 32 {
        true => (at as f32 % 16.0 - 8.0) * 0.5,
        false => (15.0 - at as f32 % 16.0 - 8.0) * -0.25,
    };
    assert_eq!(values, (0..64).map(expected).collect::<Vec<_>>());
    // A scale that half precision does not hold keeps its value in F32; that of a group of zeros does not matter.
    let small = 2f32.powi(-20) * 1.0078125;
    assert_eq!(int4_blocks(&packed, &[0.5, small]), None);
    let exact = int4_values(&packed, &[0.5, small]);
    assert_eq!(exact[4 * 33..][..4], ((14.0 - 8.0) * small).to_le_bytes());
    let zeros = int4_blocks(&[0x88; 16], &[small]).unwrap();
    dequantize(DType::Q4_0, &zeros, &mut values[..32]).unwrap();
    assert_eq!(values[..32], [0.0; 32]);
}

#[test]
fn experts_of_kimi_stay_packed_and_everything_else_stays_float() {
    let checkpoint = Checkpoint::open(&fixture("kimi-k2-int4")).unwrap();
    let dtype = |name: &str| checkpoint.tensor(&format!("model.layers.2.{name}.weight")).unwrap().dtype;
    assert_eq!(dtype("mlp.experts.15.down_proj"), DType::Q4_0);
    assert_eq!(dtype("mlp.shared_experts.down_proj"), DType::F32);
    assert_eq!(dtype("self_attn.kv_b_proj"), DType::F32);
    let tensor = checkpoint.tensor("model.layers.1.mlp.experts.0.up_proj.weight").unwrap();
    assert_eq!(tensor.content().unwrap().0, DType::Q4_0, "half precision holds the scales");
}

#[test]
fn blocks_of_eight_bit_floats_count_as_their_exact_values() {
    let block = [24, 40];
    let (mut coded, mut exact) = (tensors("deepseek-v3"), tensors("deepseek-v3"));
    let names: Vec<String> =
        coded.keys().filter(|name| name.contains("_proj") && name.ends_with(".weight")).cloned().collect();
    for name in names {
        let (_, shape, data) = coded.remove(&name).unwrap();
        let values: Vec<f32> =
            data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let (rows, columns) = (shape[0], shape[1]);
        let across = columns.div_ceil(block[1]);
        let scales: Vec<f32> =
            (0..rows.div_ceil(block[0]) * across).map(|at| 0.003 + 0.0001 * at as f32).collect();
        let mut codes = Vec::new();
        let mut stands_for = Vec::new();
        for (at, value) in values.iter().enumerate() {
            let scale = scales[at / columns / block[0] * across + at % columns / block[1]];
            let distance = |code: &u8| (fp8_value(*code) * scale - value).abs();
            let code = (0..=u8::MAX)
                .filter(|code| !fp8_value(*code).is_nan())
                .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                .unwrap();
            codes.push(code);
            stands_for.push(fp8_value(code) * scale);
        }
        exact.insert(name.clone(), (Dtype::F32, shape.clone(), le(&stands_for)));
        let scale_shape = vec![rows.div_ceil(block[0]), across];
        coded.insert(format!("{name}_scale_inv"), (Dtype::F32, scale_shape, le(&scales)));
        coded.insert(name, (Dtype::F8_E4M3, shape, codes));
    }
    let quantization = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}});
    let coded = write("deepseek-v3", quantization, &coded);
    let exact = write("deepseek-v3", json!({}), &exact);
    let (coded, exact) = (Checkpoint::open(coded.path()).unwrap(), Checkpoint::open(exact.path()).unwrap());
    assert_eq!(coded.tensors().count(), exact.tensors().count());
    for tensor in exact.tensors() {
        let (dtype, content) = coded.tensor(tensor.name).unwrap().content().unwrap();
        assert_eq!((dtype, &*content), (tensor.dtype, tensor.data), "{}", tensor.name);
    }
}

#[test]
fn the_text_part_of_a_wrapped_model_is_read() {
    let text = std::fs::read(fixture("kimi-k2-int4").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["model_type"] = json!("kimi_k2");
    let mut renamed: BTreeMap<String, Stored> = tensors("kimi-k2-int4")
        .into_iter()
        .map(|(name, stored)| (format!("language_model.{name}"), stored))
        .collect();
    renamed.insert("vision_tower.patch_embed.proj.bias".into(), (Dtype::F32, vec![1], vec![0; 4]));
    let keys = json!({
        "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": config,
    });
    let folder = write("kimi-k2-int4", keys, &renamed);
    let expected = "expected.safetensors";
    std::fs::copy(fixture("kimi-k2-int4").join(expected), folder.path().join(expected)).unwrap();
    let result = verify(folder.path(), VerifyOptions::default()).unwrap();
    assert!(result.passed, "{result:?}");
}

#[test]
fn malformed_and_unsupported_quantizations_are_named() {
    let module = "model.layers.1.mlp.experts.3.up_proj";
    let open = |keys: Value, change: &dyn Fn(&mut BTreeMap<String, Stored>)| {
        let mut tensors = tensors("kimi-k2-int4");
        change(&mut tensors);
        let folder = write("kimi-k2-int4", keys, &tensors);
        Checkpoint::open(folder.path()).map(|_| ()).expect_err("must be rejected").to_string()
    };
    let remove = |part: &str| {
        let name = format!("{module}.{part}");
        open(json!({}), &move |tensors| drop(tensors.remove(&name)))
    };
    assert!(remove("weight_scale").contains("weight_scale`: is missing"));
    assert!(remove("weight_packed").contains("up_proj.weight"));
    let replace = |part: &str, stored: Stored| {
        let name = format!("{module}.{part}");
        let error = open(json!({}), &|tensors| drop(tensors.insert(name.clone(), stored.clone())));
        assert!(error.contains(&name), "{error}");
        error
    };
    assert!(replace("weight_scale", (Dtype::BF16, vec![64, 1], vec![0; 128])).contains("[64, 2]"));
    assert!(replace("weight_scale", (Dtype::I32, vec![64, 2], vec![0; 512])).contains("I32"));
    assert!(replace("weight_packed", (Dtype::I32, vec![64, 7], vec![0; 64 * 28])).contains("groups of 32"));
    assert!(replace("weight_packed", (Dtype::F32, vec![64, 8], vec![0; 64 * 32])).contains("expected I32"));
    let shape: Vec<u8> = [64i64, 63].iter().flat_map(|size| size.to_le_bytes()).collect();
    assert!(replace("weight_shape", (Dtype::I64, vec![2], shape)).contains("states [64, 63]"));
    let name = format!("{module}.weight");
    let plain = (Dtype::F32, vec![64, 64], vec![0; 64 * 64 * 4]);
    let twice = open(json!({}), &|tensors| drop(tensors.insert(name.clone(), plain.clone())));
    assert!(twice.contains("packed and plain"), "{twice}");

    let text = std::fs::read(fixture("kimi-k2-int4").join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&text).unwrap();
    let group = "/quantization_config/config_groups/group_0/weights";
    for (key, value) in [
        ("num_bits", json!(8)),
        ("symmetric", json!(false)),
        ("group_size", json!(128)),
        ("strategy", json!("channel")),
        ("actorder", json!("group")),
    ] {
        let mut config = config.clone();
        config.pointer_mut(group).unwrap()[key] = value;
        let error = open(json!({"quantization_config": config["quantization_config"]}), &|_| {});
        assert!(error.contains(&format!("config_groups.weights.{key}")), "{error}");
    }
    for (value, words) in [
        (json!({"quant_method": "gptq"}), "gptq"),
        (json!({"quant_method": "fp8"}), "weight_block_size"),
        (json!({"quant_method": "fp8", "weight_block_size": [128, 0]}), "weight_block_size"),
        (json!({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}), "fmt"),
        (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "quantization_config.format"),
    ] {
        let error = open(json!({"quantization_config": value}), &|_| {});
        assert!(error.contains(words), "{words}: {error}");
    }
}
