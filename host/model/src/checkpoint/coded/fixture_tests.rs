//! Compares every coding with the values that `tests/fixtures/coded-weights/make.py` computed from the same tensors, and
//! damages each of them.

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::tests::Stored;
use super::*;
use crate::digest;
use skep_kernels::WorkerPool;

/// A coding's configuration, its tensors without the part of their names before `:`, and the expected values.
struct Case {
    name: String,
    config: Value,
    tensors: BTreeMap<String, Stored>,
    expected: Vec<f32>,
}

fn config_of(name: &str) -> Value {
    let packed = |symmetric: bool, strategy: &str, group: Value| {
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": symmetric,
            "group_size": group, "strategy": strategy, "actorder": null}}}})
    };
    let floats = |weights: Value| {
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights,
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true}}}})
    };
    match name {
        "int4-32" => packed(true, "group", json!(32)),
        "int4-128" => packed(true, "group", json!(128)),
        "int4-128-zeros" => packed(false, "group", json!(128)),
        "int4-channel-zeros" => packed(false, "channel", json!(null)),
        "gptq-sym" => {
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true})
        }
        "gptq" => {
            json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": false, "sym": false})
        }
        "gptq-v2" => {
            json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"})
        }
        "awq" => {
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"})
        }
        "fp8-blocks" => json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
        "fp8-rows" => {
            floats(json!({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}))
        }
        "fp8-whole" => json!({"quant_method": "fp8", "activation_scheme": "static"}),
        "mxfp4" => json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
        other => panic!("{other} has no configuration"),
    }
}

fn cases() -> Vec<Case> {
    let bytes = include_bytes!("../../../../../tests/fixtures/coded-weights/weights.safetensors");
    let file = SafeTensors::deserialize(bytes).unwrap();
    let mut cases: BTreeMap<String, Case> = BTreeMap::new();
    for (full, view) in file.tensors() {
        let (name, tensor) = full.split_once(':').unwrap();
        let case = cases.entry(name.to_owned()).or_insert_with(|| Case {
            name: name.to_owned(),
            config: json!({"quantization_config": config_of(name)}),
            tensors: BTreeMap::new(),
            expected: Vec::new(),
        });
        match tensor {
            "expected" => {
                let values = view.data().as_chunks::<4>().0;
                case.expected = values.iter().map(|value| f32::from_le_bytes(*value)).collect();
            }
            _ => {
                let stored = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                case.tensors.insert(tensor.to_owned(), stored);
            }
        }
    }
    cases.into_values().collect()
}

/// Joins a case's tensors.
fn joined(case: &Case) -> Result<(BTreeMap<String, TensorLocation>, [Mapping; 1]), ModelError> {
    let mut content = Vec::new();
    let mut tensors = BTreeMap::new();
    for (name, (dtype, shape, data)) in &case.tensors {
        let format = match dtype {
            Dtype::F32 => Format::Weights(DType::F32),
            Dtype::F16 => Format::Weights(DType::F16),
            Dtype::BF16 => Format::Weights(DType::BF16),
            other => Format::Other(format!("{other:?}")),
        };
        let bytes = content.len()..content.len() + data.len();
        content.extend(data);
        let stored = StoredAs::Values;
        tensors.insert(name.clone(), TensorLocation { format, shape: shape.clone(), file: 0, bytes, stored });
    }
    let files = [Mapping::made("the case", content)];
    join(WeightCoding::read(&case.config)?.as_ref(), &mut tensors, &files)?;
    Ok((tensors, files))
}

/// Returns the format and the values of each weight of a case, joined in the order of names.
fn values(case: &Case) -> Result<(DType, Vec<f32>), ModelError> {
    let (tensors, files) = joined(case)?;
    let mut all = Vec::new();
    let mut format = DType::F32;
    for (name, location) in &tensors {
        // A tensor that is left over is an error of the model's layout.
        let dtype = match &location.format {
            Format::Weights(dtype) if !name.ends_with("scales") => *dtype,
            _ => return Err(ModelError::tensor(name, "is left over")),
        };
        let tensor = view(name, location, dtype, &files);
        let (dtype, content) = tensor.content()?;
        let mut values = vec![0.0; location.shape.iter().product()];
        dequantize(dtype, &content, &mut values).unwrap();
        all.extend(values);
        format = dtype;
    }
    Ok((format, all))
}

fn view<'a>(name: &'a str, location: &'a TensorLocation, dtype: DType, files: &'a [Mapping]) -> Tensor<'a> {
    let data = &files[0][location.bytes.clone()];
    Tensor { name, dtype, shape: &location.shape, data, coding: location.stored.coding(files) }
}

/// Returns the digest of a case's weights.
fn digest(case: &Case) -> String {
    let (tensors, files) = joined(case).unwrap();
    let views: Vec<Tensor<'_>> = tensors
        .iter()
        .map(|(name, location)| match &location.format {
            Format::Weights(dtype) => view(name, location, *dtype, &files),
            Format::Other(format) => panic!("{name} has the type {format}"),
        })
        .collect();
    digest::weights(&views)
}

#[test]
fn models_that_differ_only_in_scales_or_zero_points_have_different_digests() {
    let mut found = std::collections::BTreeSet::new();
    for case in cases() {
        let before = digest(&case);
        assert!(found.insert(before.clone()), "{} has the digest of another coding", case.name);
        assert_eq!(digest(&case), before, "{}", case.name);
        for tensor in case.tensors.keys() {
            // Neither the order of columns that is checked nor the shape is a part of the values.
            if tensor.ends_with("g_idx") || tensor.ends_with("weight_shape") {
                continue;
            }
            let mut tensors = case.tensors.clone();
            tensors.get_mut(tensor).unwrap().2[0] ^= 1;
            let (name, config) = (case.name.clone(), case.config.clone());
            let changed = digest(&Case { name, config, tensors, expected: Vec::new() });
            assert_ne!(changed, before, "{}: no digest covers {tensor}", case.name);
        }
    }
}

#[test]
fn every_coding_has_the_values_of_the_reference_and_stays_packed() {
    let formats = BTreeMap::from([
        ("int4-32", DType::Q4_0),
        ("int4-128", DType::Q4_0),
        ("int4-128-zeros", DType::Int4),
        ("int4-channel-zeros", DType::Int4),
        ("gptq-sym", DType::Q4_0),
        ("gptq", DType::Int4),
        ("gptq-v2", DType::Int4),
        ("awq", DType::Int4),
        ("fp8-blocks", DType::F8E4M3),
        ("fp8-rows", DType::F8E4M3),
        ("fp8-whole", DType::F8E4M3),
        ("mxfp4", DType::Mxfp4),
    ]);
    let cases = cases();
    assert_eq!(cases.len(), formats.len());
    for case in cases {
        let (format, found) = values(&case).unwrap();
        assert_eq!(format, formats[case.name.as_str()], "{}", case.name);
        assert_eq!(found.len(), case.expected.len(), "{}", case.name);
        for (at, (found, expected)) in found.iter().zip(&case.expected).enumerate() {
            assert_eq!(found, expected, "{} {at}", case.name);
        }
    }
}

#[test]
fn a_part_of_a_matrix_has_the_bytes_of_the_whole() {
    for case in cases() {
        let (tensors, files) = joined(&case).unwrap();
        for (name, location) in &tensors {
            let Format::Weights(dtype) = location.format else { panic!("{name} has no weights") };
            let tensor = view(name, location, dtype, &files);
            let (format, content) = tensor.content().unwrap();
            let [height, width] = location.shape[..] else { panic!("{name} is not a matrix") };
            let (row_bytes, block_bytes) = (format.row_bytes(width).unwrap(), format.block_bytes());
            let (all, upper, lower) = (0..height, 0..height / 3, height / 2..height);
            let middle = width / 64 * 32;
            for (rows, columns) in [
                (vec![all.clone()], 0..width),
                (vec![lower.clone()], 0..width),
                (vec![upper, lower], 0..width),
                (vec![all.clone()], 0..middle),
                (vec![all], middle..width),
            ] {
                let bytes = columns.start / BLOCK * block_bytes..columns.end / BLOCK * block_bytes;
                let row = |row: usize| &content[row * row_bytes..][bytes.clone()];
                let expected = rows.iter().cloned().flatten().map(row).collect::<Vec<_>>().concat();
                for threads in [1, 3] {
                    let pool = WorkerPool::new(threads).unwrap();
                    let found = tensor.part(&pool, &rows, &columns).unwrap();
                    let what = format!("{} {name} {rows:?} {columns:?}", case.name);
                    assert!(found == Some((format, expected.clone())), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_part_of_a_matrix_is_all_that_is_read() {
    let mut case = cases().into_iter().find(|case| case.name == "fp8-blocks").unwrap();
    // The first code of the second row is not a number.
    let (_, shape, data) = case.tensors.get_mut("m.weight").unwrap();
    let (height, width) = (shape[0], shape[1]);
    data[width] = 0xff;
    let (tensors, files) = joined(&case).unwrap();
    let location = &tensors["m.weight"];
    let tensor = view("m.weight", location, DType::F8E4M3, &files);
    let pool = WorkerPool::new(2).unwrap();
    let part = |rows: Range<usize>, columns: Range<usize>| tensor.part(&pool, &[rows], &columns);
    assert!(part(2..height, 0..width).unwrap().is_some());
    assert!(part(0..height, BLOCK..width).unwrap().is_some());
    let error = part(0..height, 0..BLOCK).unwrap_err().to_string();
    assert!(error.contains("m.weight") && error.contains("its value at [1, 0] is not a number"), "{error}");
    // A part has whole blocks, and lies inside of the matrix.
    assert_eq!(part(0..height, 0..BLOCK + 1).unwrap(), None);
    assert_eq!(part(0..height + 1, 0..BLOCK).unwrap(), None);
}

#[test]
fn damaged_codings_are_named_and_never_a_panic() {
    for case in cases() {
        for tensor in case.tensors.keys() {
            // A tensor of its own weight is missing, has another shape, or has another type.
            let change = |change: &dyn Fn(&mut BTreeMap<String, Stored>)| {
                let mut tensors = case.tensors.clone();
                change(&mut tensors);
                let config = case.config.clone();
                values(&Case { name: case.name.clone(), config, tensors, expected: Vec::new() })
            };
            let what = format!("{}: {tensor}", case.name);
            let optional = tensor.ends_with("weight_shape") || tensor.ends_with("g_idx");
            match change(&|tensors| drop(tensors.remove(tensor))).err().map(|error| error.to_string()) {
                Some(error) => {
                    let named = error.contains("is missing") || error.contains("is left over");
                    assert!(named && !optional, "{what}: {error}");
                }
                None => assert!(optional, "{what}"),
            }
            let longer = change(&|tensors| {
                let (_, shape, data) = tensors.get_mut(tensor).unwrap();
                data.extend(vec![0; data.len()]);
                match shape.first_mut() {
                    Some(first) => *first *= 2,
                    None => shape.push(2),
                }
            });
            // One scale serves any number of rows.
            if case.name == "fp8-whole" && tensor == "m.weight" {
                assert!(longer.is_ok());
                continue;
            }
            let Err(error) = longer else { panic!("{what}") };
            let error = error.to_string();
            assert!(error.contains("m.") || error.contains("experts"), "{what}: {error}");
            let typed = change(&|tensors| tensors.get_mut(tensor).unwrap().0 = Dtype::I8);
            let Err(error) = typed else { panic!("{what}") };
            let error = error.to_string();
            assert!(error.contains("has the type I8"), "{what}: {error}");
        }
    }
}

#[test]
fn reordered_columns_and_values_that_are_not_numbers_are_named() {
    let damaged = |name: &str, tensor: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut case = cases().into_iter().find(|case| case.name == name).unwrap();
        change(&mut case.tensors.get_mut(tensor).unwrap().2);
        values(&case).unwrap_err().to_string()
    };
    let error = damaged("gptq", "m.g_idx", &|data| data.swap(0, 4 * 200));
    assert!(error.contains("act-order") && error.contains("m.g_idx"), "{error}");
    let error = damaged("gptq", "m.scales", &|data| data[..2].copy_from_slice(&0x7c00u16.to_le_bytes()));
    assert!(error.contains("m.weight") && error.contains("not a finite number"), "{error}");
    let error = damaged("fp8-blocks", "m.weight", &|data| data[261] = 0xff);
    assert!(error.contains("its value at [1, 5] is not a number"), "{error}");
    let error =
        damaged("fp8-rows", "m.weight_scale", &|data| data[..4].copy_from_slice(&1e37f32.to_le_bytes()));
    assert!(error.contains("is too large"), "{error}");
    let error = damaged("mxfp4", "mlp.experts.down_proj_scales", &|data| data[3] = 255);
    assert!(error.contains("block [1, 1] is not a finite number"), "{error}");
}
