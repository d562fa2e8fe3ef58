//! Quantized safetensors: their values, the logits of whole models, and malformed ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::verify::{VerifyOptions, verify};
use skep_kernels::dequantize::f8_e4m3;

/// A tensor in memory.
pub(crate) type Stored = (Dtype, Vec<usize>, Vec<u8>);

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(name)
}

/// Returns the names of all tiny models with a reference, so that no list has to name a new one.
pub(crate) fn tiny_models() -> Vec<String> {
    let entries = std::fs::read_dir(fixture("")).unwrap().map(Result::unwrap);
    let models = entries.filter(|entry| entry.path().join("expected.safetensors").is_file());
    let mut names: Vec<String> = models.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 15, "{names:?}");
    names
}

pub(crate) fn tensors(name: &str) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    file.tensors().into_iter().map(|(name, view)| (name, stored(view))).collect()
}

/// Writes a model with the configuration of a fixture, some keys of which are replaced.
pub(crate) fn write(name: &str, keys: Value, tensors: &BTreeMap<String, Stored>) -> tempfile::TempDir {
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

pub(crate) fn le(values: &[f32]) -> Vec<u8> {
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
        assert_eq!(f8_e4m3(code), value, "{code:#x}");
    }
    assert!(f8_e4m3(0x7f).is_nan() && f8_e4m3(0xff).is_nan());
    assert!((0..0x7e).all(|code| f8_e4m3(code) < f8_e4m3(code + 1)));
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
    // Only rows of up to 40 columns have one scale for every 32 of them.
    check_blocks_of_eight_bits([24, 40], DType::F32);
    check_blocks_of_eight_bits([32, 32], DType::F8E4M3);
}

fn check_blocks_of_eight_bits(block: [usize; 2], format: DType) {
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
            let distance = |code: &u8| (f8_e4m3(*code) * scale - value).abs();
            let code = (0..=u8::MAX)
                .filter(|code| !f8_e4m3(*code).is_nan())
                .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                .unwrap();
            codes.push(code);
            stands_for.push(f8_e4m3(code) * scale);
        }
        exact.insert(name.clone(), (Dtype::F32, shape.clone(), le(&stands_for)));
        let scale_shape = vec![rows.div_ceil(block[0]), across];
        coded.insert(format!("{name}_scale_inv"), (Dtype::F32, scale_shape, le(&scales)));
        coded.insert(name, (Dtype::F8_E4M3, shape, codes));
    }
    let quantization = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}});
    let coded = write("deepseek-v3", quantization, &coded);
    let exact = write("deepseek-v3", json!({}), &exact);
    let expected = "expected.safetensors";
    for folder in [&coded, &exact] {
        std::fs::copy(fixture("deepseek-v3").join(expected), folder.path().join(expected)).unwrap();
    }
    // The logits are those of the exact values to the last bit. Ranks cut packed blocks elsewhere, and so add up in
    // another order.
    let ranks = |tensor_parallel| VerifyOptions { tensor_parallel, ..VerifyOptions::default() };
    for tensor_parallel in [1, 2] {
        let verified = |folder: &Path| verify(folder, ranks(tensor_parallel)).unwrap();
        let (coded, exact) = (verified(coded.path()), verified(exact.path()));
        let (found, wanted) = (coded.mean_abs_error, exact.mean_abs_error);
        let allowed = if tensor_parallel == 1 { 0.0 } else { 1e-6 };
        assert!((found - wanted).abs() <= allowed, "{block:?}, {tensor_parallel} ranks: {found}, {wanted}");
    }
    let (coded, exact) = (Checkpoint::open(coded.path()).unwrap(), Checkpoint::open(exact.path()).unwrap());
    assert_eq!(coded.tensors().count(), exact.tensors().count());
    assert_eq!(coded.tensor("model.layers.0.mlp.down_proj.weight").unwrap().dtype, format);
    for tensor in exact.tensors() {
        let found = coded.tensor(tensor.name).unwrap();
        let (dtype, content) = found.content().unwrap();
        assert_eq!(dtype, found.dtype, "{}", tensor.name);
        let mut values = vec![0.0; tensor.shape.iter().product()];
        dequantize(dtype, &content, &mut values).unwrap();
        assert!(le(&values) == tensor.data, "{}", tensor.name);
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
        ("type", json!("float")),
        ("group_size", json!(24)),
        ("strategy", json!("tensor_group")),
        ("actorder", json!("group")),
    ] {
        let mut config = config.clone();
        config.pointer_mut(group).unwrap()[key] = value;
        let error = open(json!({"quantization_config": config["quantization_config"]}), &|_| {});
        assert!(error.contains(&format!("config_groups.weights.{key}")), "{error}");
    }
    for (value, words) in [
        (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
        (json!({"quant_method": "gptq", "bits": 8}), "quantization_config.bits"),
        (json!({"quant_method": "gptq", "bits": 4, "desc_act": true}), "act-order"),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 24}), "quantization_config.group_size"),
        (json!({"quant_method": "gptq", "checkpoint_format": "marlin"}), "checkpoint_format"),
        (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "quantization_config.version"),
        (json!({"quant_method": "fp8", "weight_block_size": [128, 0]}), "weight_block_size"),
        (json!({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}), "fmt"),
        (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "quantization_config.format"),
    ] {
        let error = open(json!({"quantization_config": value}), &|_| {});
        assert!(error.contains(words), "{words}: {error}");
    }
}
