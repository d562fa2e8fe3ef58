//! A model of every family with its weights in every coding has the logits of the values that the codes stand for. The guide's
//! table of families and codings is what these tests ran.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};
use skep_kernels::dequantize::f8_e4m3;

use super::tests::{Stored, fixture, le, tensors, write};
use crate::batch::{Batch, BatchSequence, LogitsWanted, PageId};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::mixtral_tests::cut_into_experts;
use crate::executor::{ExecutorOptions, KvDtype, ModelWeights};

/// Number of values with a common scale.
const GROUP: usize = 32;
const TOKENS: usize = 24;

/// A model, by its fixture, and the changes that make it one of another family.
struct Model {
    fixture: &'static str,
    keys: Value,
    tensors: BTreeMap<String, Stored>,
}

fn models() -> Vec<Model> {
    let plain = |fixture: &'static str| Model { fixture, keys: json!({}), tensors: floats(tensors(fixture)) };
    let (keys, cut) = cut_into_experts(2);
    // In the order of the guide.
    let mut models: Vec<Model> =
        ["llama-gqa", "mistral-window", "qwen2-bias", "qwen3-qknorm", "gemma3", "qwen3-moe"]
            .map(plain)
            .into();
    models.push(Model { fixture: "llama-gqa", keys, tensors: floats(cut) });
    models.extend(["deepseek-v3", "glm4-moe", "glm4-moe-lite"].map(plain));
    // The experts of this model score so alike that 1 % of noise in the weights changes the choice for 10 of 24 tokens.
    models.push(Model { keys: json!({"num_experts_per_tok": 8}), ..plain("gpt-oss") });
    models
}

/// Returns the tensors with all values in F32.
fn floats(tensors: BTreeMap<String, Stored>) -> BTreeMap<String, Stored> {
    let convert = |(name, (dtype, shape, data)): (String, Stored)| match dtype {
        Dtype::F16 => {
            let halves = data.as_chunks::<2>().0.iter();
            let values: Vec<f32> = halves.map(|half| f16::from_le_bytes(*half).to_f32()).collect();
            (name, (Dtype::F32, shape, le(&values)))
        }
        _ => (name, (dtype, shape, data)),
    };
    tensors.into_iter().map(convert).collect()
}

/// A coding of weights, as config.json names it and as tensors hold it.
struct Coding {
    /// The title of its column in the guide.
    title: &'static str,
    config: Value,
    encode: fn(&[f32], [usize; 2]) -> Coded,
}

/// The parts of a weight, by the end of their names, and the values that they stand for.
struct Coded {
    parts: Vec<(&'static str, Stored)>,
    values: Vec<f32>,
}

fn codings() -> [Coding; 5] {
    let group = json!({"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": GROUP,
    }});
    [
        Coding {
            title: "INT4",
            config: json!({
                "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            }),
            encode: compressed_tensors,
        },
        Coding {
            title: "GPTQ",
            config: json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": false}),
            encode: gptq,
        },
        Coding {
            title: "AWQ",
            config: json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
            encode: awq,
        },
        Coding {
            title: "FP8 in blocks",
            config: json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]}),
            encode: |values, shape| eight_bits(values, shape, [GROUP, GROUP], ".weight_scale_inv"),
        },
        Coding {
            title: "FP8 by row",
            config: json!({"quant_method": "fbgemm_fp8"}),
            encode: |values, shape| eight_bits(values, shape, [1, shape[1]], ".weight_scale"),
        },
    ]
}

/// The integers of a matrix from 0 to 15, `[row][column]`, with a zero point and a scale for each group of a row.
struct Integers {
    integers: Vec<u8>,
    zeros: Vec<u8>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

/// Rounds values to integers. `symmetric` zero points are 8; others are as near to the smallest value as they can be.
fn integers(values: &[f32], symmetric: bool) -> Integers {
    let mut all = Integers { integers: vec![], zeros: vec![], scales: vec![], values: vec![] };
    for group in values.chunks(GROUP) {
        let low = group.iter().fold(0.0, |low: f32, value| low.min(*value));
        let high = group.iter().fold(0.0, |high: f32, value| high.max(*value));
        let width = if symmetric { high.max(-low) / 7.5 } else { (high - low) / 15.0 };
        // BF16 scales of this size are exact in half precision, which the packings store.
        let scale = bf16::from_f32(width.max(1e-3)).to_f32();
        let zero = if symmetric { 8.0 } else { (-low / scale).round_ties_even().min(15.0) };
        all.zeros.push(zero as u8);
        all.scales.push(scale);
        for value in group {
            let integer = (value / scale + zero).round_ties_even().clamp(0.0, 15.0);
            all.integers.push(integer as u8);
            all.values.push((integer - zero) * scale);
        }
    }
    all
}

/// Packs eight integers into a word, the first one into the lowest bits.
fn word(integers: impl Iterator<Item = u8>) -> [u8; 4] {
    let word = integers.enumerate().fold(0u32, |word, (at, integer)| word | u32::from(integer) << (4 * at));
    word.to_le_bytes()
}

fn halves(scales: impl Iterator<Item = f32>) -> Vec<u8> {
    scales.flat_map(|scale| f16::from_f32(scale).to_le_bytes()).collect()
}

fn compressed_tensors(values: &[f32], [rows, columns]: [usize; 2]) -> Coded {
    let Integers { integers, scales, values, .. } = integers(values, true);
    let words = integers.chunks(8).flat_map(|eight| word(eight.iter().copied())).collect();
    let scales = halves(scales.into_iter());
    let parts = vec![
        (".weight_packed", (Dtype::I32, vec![rows, columns / 8], words)),
        (".weight_scale", (Dtype::F16, vec![rows, columns / GROUP], scales)),
    ];
    Coded { parts, values }
}

/// Packs eight inputs of an output into a word, and zero points less 1.
fn gptq(values: &[f32], [rows, columns]: [usize; 2]) -> Coded {
    let coded = integers(values, false);
    let groups = columns / GROUP;
    let words = |input: usize| {
        let integers = &coded.integers;
        (0..rows).flat_map(move |row| word((0..8).map(|at| integers[row * columns + 8 * input + at])))
    };
    let zeros = |group: usize| {
        let zero = move |row: usize, coded: &Integers| coded.zeros[row * groups + group].wrapping_sub(1) & 15;
        let coded = &coded;
        (0..rows / 8).flat_map(move |output| word((0..8).map(|at| zero(8 * output + at, coded))))
    };
    let scales = (0..groups).flat_map(|group| (0..rows).map(move |row| row * groups + group));
    let parts = vec![
        (".qweight", (Dtype::I32, vec![columns / 8, rows], (0..columns / 8).flat_map(words).collect())),
        (".qzeros", (Dtype::I32, vec![groups, rows / 8], (0..groups).flat_map(zeros).collect())),
        (".scales", (Dtype::F16, vec![groups, rows], halves(scales.map(|at| coded.scales[at])))),
    ];
    Coded { parts, values: coded.values }
}

/// Packs eight outputs of an input into a word, those with even numbers first.
fn awq(values: &[f32], [rows, columns]: [usize; 2]) -> Coded {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let coded = integers(values, false);
    let groups = columns / GROUP;
    let words = |input: usize| {
        let integers = &coded.integers;
        (0..rows / 8).flat_map(move |output| {
            word(ORDER.map(|at| integers[(8 * output + at) * columns + input]).into_iter())
        })
    };
    let zeros = |group: usize| {
        let zeros = &coded.zeros;
        (0..rows / 8).flat_map(move |output| {
            word(ORDER.map(|at| zeros[(8 * output + at) * groups + group]).into_iter())
        })
    };
    let scales = (0..groups).flat_map(|group| (0..rows).map(move |row| row * groups + group));
    let parts = vec![
        (".qweight", (Dtype::I32, vec![columns, rows / 8], (0..columns).flat_map(words).collect())),
        (".qzeros", (Dtype::I32, vec![groups, rows / 8], (0..groups).flat_map(zeros).collect())),
        (".scales", (Dtype::F16, vec![groups, rows], halves(scales.map(|at| coded.scales[at])))),
    ];
    Coded { parts, values: coded.values }
}

/// Rounds values to 8-bit floats with a scale for each block.
fn eight_bits(values: &[f32], [rows, columns]: [usize; 2], block: [usize; 2], suffix: &'static str) -> Coded {
    let across = columns.div_ceil(block[1]);
    let of = |at: usize| at / columns / block[0] * across + at % columns / block[1];
    let mut scales = vec![0f32; rows.div_ceil(block[0]) * across];
    for (at, value) in values.iter().enumerate() {
        scales[of(at)] = scales[of(at)].max(value.abs() / 448.0);
    }
    let numbers: Vec<(u8, f32)> =
        (0..=u8::MAX).filter(|code| code & 127 != 127).map(|code| (code, f8_e4m3(code))).collect();
    let nearest = |value: f32| {
        let distance = |(_, number): &&(u8, f32)| (number - value).abs();
        numbers.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
    };
    let codes: Vec<(u8, f32)> =
        values.iter().enumerate().map(|(at, value)| *nearest(value / scales[of(at)].max(1e-9))).collect();
    let stands_for = codes.iter().enumerate().map(|(at, (_, number))| number * scales[of(at)]).collect();
    let scale_shape = vec![rows.div_ceil(block[0]), across];
    let parts = vec![
        (".weight", (Dtype::F8_E4M3, vec![rows, columns], codes.iter().map(|(code, _)| *code).collect())),
        (suffix, (Dtype::F32, scale_shape, le(&scales))),
    ];
    Coded { parts, values: stands_for }
}

/// The weights of a model that a coding can hold, encoded, and those values in F32.
struct Encoded {
    coded: BTreeMap<String, Stored>,
    exact: BTreeMap<String, Stored>,
    /// The names of the encoded weights.
    names: Vec<String>,
}

fn encoded(model: &Model, coding: &Coding) -> Encoded {
    let (mut coded, mut exact, mut names) = (model.tensors.clone(), model.tensors.clone(), Vec::new());
    for (name, (_, shape, data)) in &model.tensors {
        let is_linear = name.ends_with(".weight") && (name.contains("_proj") || name.contains(".experts."));
        let [rows, columns] = shape[..] else { continue };
        // Weights that are not whole groups and words stay as they are, on each of two ranks if they divide the columns.
        let ranks = if name.contains("o_proj") || name.contains("down_proj") { 2 } else { 1 };
        if !is_linear || !columns.is_multiple_of(GROUP * ranks) || !rows.is_multiple_of(8) {
            continue;
        }
        let values: Vec<f32> =
            data.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let Coded { parts, values } = (coding.encode)(&values, [rows, columns]);
        let module = name.strip_suffix(".weight").unwrap();
        coded.remove(name);
        coded.extend(parts.into_iter().map(|(suffix, stored)| (format!("{module}{suffix}"), stored)));
        exact.insert(name.clone(), (Dtype::F32, shape.clone(), le(&values)));
        names.push(name.clone());
    }
    Encoded { coded, exact, names }
}

/// Returns the logits of some tokens. Quantized weights are multiplied packed, unless they are to be exact.
fn logits(folder: &Path, exact_weights: bool, tensor_parallel: usize) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let options = ExecutorOptions {
        threads: Some(1),
        kv: KvDtype::F32,
        exact_weights,
        kv_tokens: Some(TOKENS),
        max_batch_tokens: TOKENS,
        max_logit_rows: TOKENS,
        max_sequences: 1,
        tensor_parallel,
        ..ExecutorOptions::default()
    };
    let mut executor = ModelWeights::load(&checkpoint, &options).unwrap().executor(options).unwrap();
    let tokens = (0..TOKENS).map(|at| (at * 37 % 101) as u32).collect();
    let pages = (0..TOKENS.div_ceil(16) as u32).map(PageId).collect();
    let sequences = vec![BatchSequence { tokens, start: 0, pages, logits: LogitsWanted::All }];
    executor.forward(&Batch { sequences }).unwrap();
    (0..TOKENS).map(|row| executor.logits(row).unwrap().to_vec()).collect()
}

/// Returns the largest difference of two rows, relative to the largest value.
fn error(found: &[f32], exact: &[f32]) -> f32 {
    let largest = exact.iter().fold(0f32, |all, value| all.max(value.abs()));
    found.iter().zip(exact).fold(0f32, |all, (a, b)| all.max((a - b).abs())) / largest
}

/// Runs a model in a coding, and returns which parts the coding holds.
fn check(model: &Model, coding: &Coding) -> &'static str {
    let Encoded { coded, exact, names } = encoded(model, coding);
    let mut keys = model.keys.clone();
    let exact = write(model.fixture, keys.clone(), &exact);
    keys["quantization_config"] = coding.config.clone();
    let coded = write(model.fixture, keys, &coded);
    let checkpoint = Checkpoint::open(coded.path()).unwrap();
    let what = format!("{} in {}", checkpoint.config().architecture.title(), coding.title);
    assert!(names.len() >= 4, "{what}: {names:?}");
    for name in &names {
        assert!(checkpoint.tensor(name).unwrap().dtype.is_quantized(), "{what}: {name} stays packed");
    }
    for tensor_parallel in [1, 2] {
        let [wanted, expanded, packed] = [(&exact, true), (&coded, true), (&coded, false)]
            .map(|(folder, exact_weights)| logits(folder.path(), exact_weights, tensor_parallel));
        let rows = || wanted.iter().zip(&expanded).zip(&packed);
        for ((wanted, expanded), _) in rows() {
            let error = error(expanded, wanted);
            assert!(error < 1e-5, "{what}, {tensor_parallel} ranks: {error}");
        }
        // If two experts score alike, rounded activations may choose the other one. gpt-oss uses all of its experts here.
        let far = rows().filter(|((wanted, _), packed)| error(packed, wanted) > 0.1).count();
        let most = if model.fixture == "gpt-oss" { 0 } else { TOKENS / 4 };
        assert!(far <= most, "{what}, {tensor_parallel} ranks: {far} rows differ");
    }
    let has_experts = checkpoint.tensors().any(|tensor| tensor.name.contains(".experts."));
    let experts_are_coded = names.iter().any(|name| name.contains(".experts."));
    if has_experts && !experts_are_coded { "attention" } else { "yes" }
}

#[test]
fn the_guide_lists_the_families_and_codings_that_run() {
    let codings = codings();
    let titles: Vec<&str> = codings.iter().map(|coding| coding.title).collect();
    let mut table = format!("| Family | {} | MXFP4 | GGUF |\n|---|", titles.join(" | "));
    table += &"---|".repeat(codings.len() + 2);
    for model in models() {
        let folder = write(model.fixture, model.keys.clone(), &model.tensors);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let cells = codings.each_ref().map(|coding| check(&model, coding));
        // The experts of gpt-oss are published in this format, and other families have none of it in safetensors.
        let mxfp4 = if model.fixture == "gpt-oss" { published_mxfp4() } else { "–" };
        let title = checkpoint.config().architecture.title();
        table += &format!("\n| {title} | {} | {mxfp4} | yes |", cells.join(" | "));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guide/models.md");
    let guide = std::fs::read_to_string(path).unwrap();
    assert!(guide.contains(&table), "host/guide/models.md must contain:\n\n{table}");
}

/// Opens the model whose experts are 4-bit floats, and returns which parts are.
fn published_mxfp4() -> &'static str {
    let checkpoint = Checkpoint::open(&fixture("gpt-oss-mxfp4")).unwrap();
    let all_packed = |part: &str| {
        let mut tensors = checkpoint.tensors().filter(|tensor| tensor.name.contains(part));
        tensors.all(|tensor| tensor.dtype == skep_kernels::DType::Mxfp4 || tensor.name.ends_with("bias"))
    };
    assert!(all_packed(".experts.") && !all_packed("self_attn.q_proj"));
    "experts"
}
