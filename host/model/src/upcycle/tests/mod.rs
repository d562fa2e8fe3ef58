//! Mixtures that are dense models, in every format and on several ranks; random routers; and what is refused.

mod reference;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Value, json};
use skep_kernels::{DType, Isa, dequantize};

use super::{Upcycle, UpcycleFormat, UpcycleOptions, UpcycleRouter};
use crate::batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::checkpoint::fixtures::{Stored, fixture, le, tensors, write};
use crate::checkpoint::{Checkpoint, Random};
use crate::config::{Architecture, RopePairing};
use crate::error::ModelError;
use crate::executor::{ExecutorOptions, KvDtype, ModelWeights};
use crate::gguf::writer::quantized_llama;
use crate::tokenizer::SpecialTokens;
use crate::verify::{VerifyOptions, verify};

const TOKENS: usize = 40;
/// Tensor-parallel ranks and pipeline stages.
const RANKS: [[usize; 2]; 3] = [[1, 1], [2, 1], [1, 2]];
/// The largest error of a log-probability, relative to the largest distance of one from the mean of its row.
const TOLERANCE: f64 = 1e-4;

fn options(experts: usize, format: UpcycleFormat) -> UpcycleOptions {
    UpcycleOptions { experts, used: None, router: UpcycleRouter::Uniform, format }
}

/// Cuts a model and writes it to a new path in a folder.
fn upcycled(
    source: &Path,
    options: &UpcycleOptions,
    folder: &Path,
    name: &str,
) -> Result<PathBuf, ModelError> {
    let checkpoint = Checkpoint::open(source).unwrap();
    let upcycle = Upcycle::plan(&checkpoint, options)?;
    let path = folder.join(name);
    let written = std::cell::Cell::new(0);
    upcycle.write(&path, &|bytes| written.set(bytes))?;
    assert_eq!(written.get(), upcycle.bytes(), "the planned size is that of the file");
    Ok(path)
}

fn ids(vocabulary: usize) -> Vec<u32> {
    (0..TOKENS).map(|at| ((at * at * 7 + at * 31 + 5) % vocabulary.min(250)) as u32).collect()
}

/// Returns the log-probabilities of all tokens behind each token of a text, with weights that count as their exact values.
fn log_probabilities(path: &Path, [tensor_parallel, pipeline_parallel]: [usize; 2]) -> Vec<Vec<f64>> {
    let checkpoint = Checkpoint::open(path).unwrap();
    // The fastest instructions would round activations beside weights in BF16.
    let isa = [Isa::Avx512, Isa::Avx2, Isa::Portable].into_iter().find(|isa| isa.supported());
    let options = ExecutorOptions {
        threads: Some(2),
        isa,
        kv: KvDtype::F32,
        exact_weights: true,
        kv_tokens: Some(TOKENS),
        max_batch_tokens: TOKENS,
        max_logit_rows: TOKENS,
        max_sequences: 1,
        tensor_parallel,
        pipeline_parallel,
        ..ExecutorOptions::default()
    };
    let mut executor = ModelWeights::load(&checkpoint, &options).unwrap().executor(options).unwrap();
    let sequence = BatchSequence {
        tokens: ids(checkpoint.config().vocabulary_size),
        start: 0,
        pages: (0..TOKENS.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect(),
        logits: LogitsWanted::All,
    };
    executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
    let row = |row: usize| log_softmax(executor.logits(row).unwrap().iter().map(|logit| f64::from(*logit)));
    (0..TOKENS).map(row).collect()
}

fn log_softmax(logits: impl Iterator<Item = f64>) -> Vec<f64> {
    let logits: Vec<f64> = logits.collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln() + largest;
    logits.into_iter().map(|logit| logit - sum).collect()
}

fn error(found: &[Vec<f64>], wanted: &[Vec<f64>]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let largest = |all: f64, value: f64| all.max(value.abs());
    let distances = wanted.iter().flat_map(|row| {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        row.iter().map(move |value| value - mean)
    });
    let differences = found.iter().flatten().zip(wanted.iter().flatten()).map(|(a, b)| a - b);
    differences.fold(0.0, largest) / distances.fold(0.0, largest)
}

fn check_all_ranks(path: &Path, wanted: &[Vec<f64>]) {
    for ranks in RANKS {
        let error = error(&log_probabilities(path, ranks), wanted);
        assert!(error < TOLERANCE, "{}, {ranks:?} ranks: {error}", path.display());
    }
}

/// Writes a dense llama whose widths are multiples of the blocks of all formats.
fn wide_llama() -> tempfile::TempDir {
    const HIDDEN: usize = 64;
    const WIDTH: usize = 256;
    let mut random = Random(7);
    let mut weights: BTreeMap<String, Stored> = BTreeMap::new();
    let mut add = |name: String, shape: &[usize], middle: f32| {
        let count: usize = shape.iter().product();
        let value = |bits: u64| middle + ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.25;
        let values: Vec<f32> = (0..count).map(|_| value(random.next())).collect();
        weights.insert(name, (Dtype::F32, shape.to_vec(), le(&values)));
    };
    add("model.embed_tokens.weight".into(), &[320, HIDDEN], 0.0);
    add("lm_head.weight".into(), &[320, HIDDEN], 0.0);
    add("model.norm.weight".into(), &[HIDDEN], 1.0);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize], middle: f32| {
            add(format!("model.layers.{layer}.{name}.weight"), shape, middle);
        };
        add("input_layernorm", &[HIDDEN], 1.0);
        add("post_attention_layernorm", &[HIDDEN], 1.0);
        add("self_attn.q_proj", &[128, HIDDEN], 0.0);
        add("self_attn.k_proj", &[64, HIDDEN], 0.0);
        add("self_attn.v_proj", &[64, HIDDEN], 0.0);
        add("self_attn.o_proj", &[HIDDEN, 128], 0.0);
        add("mlp.gate_proj", &[WIDTH, HIDDEN], 0.0);
        add("mlp.up_proj", &[WIDTH, HIDDEN], 0.0);
        add("mlp.down_proj", &[HIDDEN, WIDTH], 0.0);
    }
    write("llama-gqa", wide_keys(), &weights)
}

/// Returns a dense llama as a GGUF file, in Q8_0 apart from its norms.
fn gguf_llama(width: usize) -> Vec<u8> {
    let mut writer = quantized_llama(width).string("general.name", "tiny");
    let layers = ["blk.0.attn_norm", "blk.0.ffn_norm", "blk.1.attn_norm", "blk.1.ffn_norm"];
    for norm in layers.into_iter().chain(["output_norm"]) {
        let name = format!("{norm}.weight");
        let data = (0..64u8).flat_map(|at| (1.0 + f32::from(at % 7) * 0.05).to_le_bytes()).collect();
        writer = writer.without(&name).tensor(&name, &[64], 0, data);
    }
    writer.build()
}

fn wide_keys() -> Value {
    json!({"hidden_size": 64, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2})
}

/// Returns a weight of a model as values.
fn values(checkpoint: &Checkpoint, name: &str) -> (Vec<usize>, Vec<f32>) {
    let tensor = checkpoint.tensor(name).unwrap();
    let (dtype, content) = tensor.content().unwrap();
    let mut values = vec![0.0; tensor.shape.iter().product()];
    dequantize(dtype, &content, &mut values).unwrap();
    (tensor.shape.to_vec(), values)
}

/// Joins the experts of a Mixtral with the uniform router to a dense llama again, with exactly their values.
fn joined(path: &Path, experts: usize) -> tempfile::TempDir {
    let mixture = Checkpoint::open(path).unwrap();
    let mut weights: BTreeMap<String, Stored> = BTreeMap::new();
    let names: Vec<String> = mixture.tensors().map(|tensor| tensor.name.to_owned()).collect();
    for name in names.iter().filter(|name| !name.contains("block_sparse_moe")) {
        let (shape, values) = values(&mixture, name);
        weights.insert(name.clone(), (Dtype::F32, shape, le(&values)));
    }
    for layer in 0..mixture.config().layer_count {
        let part = |expert: usize, name: &str| {
            let module = format!("model.layers.{layer}.block_sparse_moe.experts.{expert}");
            values(&mixture, &format!("{module}.{name}.weight"))
        };
        for (name, dense) in [("w1", "gate_proj"), ("w3", "up_proj")] {
            let all: Vec<f32> = (0..experts).flat_map(|expert| part(expert, name).1).collect();
            let shape = vec![all.len() / 64, 64];
            weights.insert(format!("model.layers.{layer}.mlp.{dense}.weight"), (Dtype::F32, shape, le(&all)));
        }
        let parts: Vec<(Vec<usize>, Vec<f32>)> = (0..experts).map(|expert| part(expert, "w2")).collect();
        let row =
            |row: usize| parts.iter().flat_map(move |(shape, values)| &values[row * shape[1]..][..shape[1]]);
        let all: Vec<f32> = (0..64).flat_map(row).map(|value| value / experts as f32).collect();
        let shape = vec![64, all.len() / 64];
        weights.insert(format!("model.layers.{layer}.mlp.down_proj.weight"), (Dtype::F32, shape, le(&all)));
    }
    write("llama-gqa", wide_keys(), &weights)
}

#[test]
fn every_dense_family_becomes_a_mixture_with_its_log_probabilities() {
    let folder = tempfile::tempdir().unwrap();
    for (name, family) in [
        ("llama-gqa", Architecture::Mixtral),
        ("llama-tied-rope3", Architecture::Mixtral),
        ("mistral-window", Architecture::Mixtral),
        ("qwen2-bias", Architecture::Glm4Moe),
        ("qwen3-qknorm", Architecture::Qwen3Moe),
    ] {
        let path = upcycled(&fixture(name), &options(4, UpcycleFormat::F32), folder.path(), name).unwrap();
        let (dense, mixture) = (Checkpoint::open(&fixture(name)).unwrap(), Checkpoint::open(&path).unwrap());
        let config = mixture.config();
        assert_eq!(config.architecture, family);
        let experts = config.style.experts.as_ref().unwrap();
        assert_eq!((experts.count, experts.used, experts.size), (4, 4, 44), "{name}");
        assert_eq!((&config.rope, &config.windows), (&dense.config().rope, &dense.config().windows));
        assert_eq!((config.bos, &config.eos), (dense.config().bos, &dense.config().eos));
        check_all_ranks(&path, &log_probabilities(&fixture(name), [1, 1]));
        // The logits are those of another implementation, too.
        let expected = "expected.safetensors";
        std::fs::copy(fixture(name).join(expected), path.join(expected)).unwrap();
        let result = verify(&path, VerifyOptions::default()).unwrap();
        assert!(result.passed, "{name}: {result:?}");
    }
}

#[test]
fn quantized_experts_are_the_dense_model_of_their_values() {
    let (dense, folder) = (wide_llama(), tempfile::tempdir().unwrap());
    let exact = log_probabilities(dense.path(), [1, 1]);
    for (format, dtype, tolerance) in [
        (UpcycleFormat::Bf16, DType::BF16, 0.02),
        (UpcycleFormat::Int4, DType::Q4_0, 0.5),
        (UpcycleFormat::Fp8, DType::F8E4M3, 0.3),
    ] {
        let path = upcycled(dense.path(), &options(4, format), folder.path(), &format.to_string()).unwrap();
        let mixture = Checkpoint::open(&path).unwrap();
        let experts = "model.layers.1.block_sparse_moe.experts.3";
        for part in ["w1", "w2", "w3"] {
            let weight = mixture.tensor(&format!("{experts}.{part}.weight")).unwrap();
            assert_eq!((weight.dtype, weight.content().unwrap().0), (dtype, dtype), "{format} {part}");
        }
        let attention = mixture.tensor("model.layers.1.self_attn.o_proj.weight").unwrap().dtype;
        assert_eq!(attention, if format == UpcycleFormat::Fp8 { dtype } else { DType::BF16 });
        let found = log_probabilities(&path, [1, 1]);
        check_all_ranks(&path, &log_probabilities(joined(&path, 4).path(), [1, 1]));
        // Rounded weights are another model than the source, but not a much different one.
        let distance = error(&found, &exact);
        assert!((TOLERANCE..tolerance).contains(&distance), "{format}: {distance}");
    }
}

#[test]
fn a_gguf_model_keeps_its_formats_its_vocabulary_and_its_log_probabilities() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("dense.gguf");
    std::fs::write(&source, gguf_llama(128)).unwrap();
    let exact = log_probabilities(&source, [1, 1]);
    let dense = Checkpoint::open(&source).unwrap();
    let (gguf, floats, integers) = (
        upcycled(&source, &options(2, UpcycleFormat::Gguf), folder.path(), "moe.gguf").unwrap(),
        upcycled(&source, &options(4, UpcycleFormat::F32), folder.path(), "f32").unwrap(),
        upcycled(&source, &options(2, UpcycleFormat::Int4), folder.path(), "int4").unwrap(),
    );
    check_all_ranks(&gguf, &exact);
    check_all_ranks(&floats, &exact);
    for (path, pairing) in
        [(&gguf, RopePairing::Interleaved), (&floats, RopePairing::Halves), (&integers, RopePairing::Halves)]
    {
        let mixture = Checkpoint::open(path).unwrap();
        let (found, wanted) = (mixture.config(), dense.config());
        assert_eq!((found.architecture, found.rope.pairing), (Architecture::Mixtral, pairing));
        assert_eq!(
            (found.bos, &found.eos, found.add_bos, found.tied_head, found.context_length),
            (wanted.bos, &wanted.eos, wanted.add_bos, wanted.tied_head, wanted.context_length)
        );
        let tokenizers = [mixture.tokenizer().unwrap().unwrap(), dense.tokenizer().unwrap().unwrap()];
        for special in [SpecialTokens::Parse, SpecialTokens::Literal] {
            let text = "hello hell, he said: 42<|im_end|>é";
            let [found, wanted] = tokenizers.each_ref().map(|one| one.encode(text, special).unwrap());
            assert_eq!(found, wanted);
        }
        let [found, wanted] = [&mixture, &dense].map(|model| {
            let messages = [json!({"role": "user", "content": "hello"})];
            model.chat_template().unwrap().unwrap().render(&messages, None, true).unwrap()
        });
        assert_eq!(found, wanted);
    }
    let mixture = Checkpoint::open(&gguf).unwrap();
    let dtype = |name: &str| mixture.tensor(&format!("model.layers.1.{name}.weight")).unwrap().dtype;
    let parts = ["gate_proj", "up_proj", "down_proj"].map(|part| dtype(&format!("mlp.experts.1.{part}")));
    assert_eq!((parts, dtype("mlp.gate")), ([DType::Q8_0; 3], DType::F32));
    let (file, _) = mixture.gguf().unwrap();
    assert_eq!(file.string("general.name").unwrap(), Some("tiny"));
}

/// Three times a scale of 2^-9 needs two bits, for which other scales have no room.
#[test]
fn down_projections_become_f32_where_their_scales_cannot_be_multiplied() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("dense.gguf");
    let mut bytes = gguf_llama(96);
    std::fs::write(&source, &bytes).unwrap();
    let first_scale = {
        let dense = Checkpoint::open(&source).unwrap();
        let (file, _) = dense.gguf().unwrap();
        file.tensors().iter().find(|tensor| tensor.name == "blk.1.ffn_down.weight").unwrap().bytes.start
    };
    // 2^-9 × (1 + 2^-10) has as many bits as half precision.
    bytes[first_scale] |= 1;
    std::fs::remove_file(&source).unwrap();
    std::fs::write(&source, &bytes).unwrap();
    let path = upcycled(&source, &options(3, UpcycleFormat::Gguf), folder.path(), "moe.gguf").unwrap();
    let mixture = Checkpoint::open(&path).unwrap();
    let dtype = |layer: usize| {
        let name = format!("model.layers.{layer}.mlp.experts.2.down_proj.weight");
        mixture.tensor(&name).unwrap().dtype
    };
    assert_eq!((dtype(0), dtype(1)), (DType::Q8_0, DType::F32));
    let error = error(&log_probabilities(&path, [1, 1]), &log_probabilities(&source, [1, 1]));
    assert!(error < TOLERANCE, "{error}");
}

#[test]
fn a_random_router_chooses_as_an_independent_computation_does() {
    let folder = tempfile::tempdir().unwrap();
    for (name, used) in [("llama-gqa", 2), ("qwen2-bias", 3), ("qwen3-qknorm", 1), ("llama-gqa", 8)] {
        let router = UpcycleRouter::Random { seed: 11 };
        let options = UpcycleOptions { experts: 8, used: Some(used), router, format: UpcycleFormat::F32 };
        let file = format!("{name}-{used}");
        let path = upcycled(&fixture(name), &options, folder.path(), &file).unwrap();
        let mixture = Checkpoint::open(&path).unwrap();
        let found = reference::run(&mixture, &ids(mixture.config().vocabulary_size));
        check_all_ranks(&path, &found.log_probabilities);
        let chosen = found.choices.iter().filter(|count| **count > 0).count();
        assert!(chosen > 4, "{file}: {:?}", found.choices);
        let dense = log_probabilities(&fixture(name), [1, 1]);
        let distance = error(&found.log_probabilities, &dense);
        assert!(distance > 100.0 * TOLERANCE, "{file} is another model than the dense one: {distance}");
    }
}

#[test]
fn the_independent_computation_agrees_with_the_dense_model() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama-gqa", "qwen2-bias", "qwen3-qknorm"] {
        let path = upcycled(&fixture(name), &options(8, UpcycleFormat::F32), folder.path(), name).unwrap();
        let mixture = Checkpoint::open(&path).unwrap();
        let found = reference::run(&mixture, &ids(mixture.config().vocabulary_size));
        let error = error(&found.log_probabilities, &log_probabilities(&fixture(name), [1, 1]));
        assert!(error < TOLERANCE, "{name}: {error}");
    }
}

#[test]
fn a_seed_makes_the_same_router_again() {
    let folder = tempfile::tempdir().unwrap();
    let router = |seed: u64, name: &str, format: UpcycleFormat| {
        let router = UpcycleRouter::Random { seed };
        let options = UpcycleOptions { experts: 4, used: Some(2), router, format };
        let path = upcycled(&fixture("llama-gqa"), &options, folder.path(), name).unwrap();
        let mixture = Checkpoint::open(&path).unwrap();
        [0, 1].map(|layer| values(&mixture, &format!("model.layers.{layer}.block_sparse_moe.gate.weight")).1)
    };
    let [first, second] = router(1, "a", UpcycleFormat::F32);
    assert_ne!(first, second, "layers have different routers");
    assert_eq!(router(1, "b", UpcycleFormat::F32)[0], first);
    assert_ne!(router(2, "c", UpcycleFormat::F32)[0], first);
    let rounded = router(1, "d", UpcycleFormat::Bf16);
    assert!(rounded[0].iter().zip(&first).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0));
}

#[test]
fn rejects_models_that_cannot_be_cut_and_says_what_would_help() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("dense.gguf");
    std::fs::write(&source, gguf_llama(128)).unwrap();
    let wide = wide_llama();
    let (llama, wide, bf16) = (fixture("llama-gqa"), wide.path().to_owned(), UpcycleFormat::Bf16);
    let uniform = |experts: usize, used: usize| UpcycleOptions { used: Some(used), ..options(experts, bf16) };
    let random = |experts: usize, used: usize| UpcycleOptions {
        router: UpcycleRouter::Random { seed: 0 },
        ..uniform(experts, used)
    };
    for (source, options, words) in [
        (&fixture("qwen3-moe"), options(4, bf16), "it has experts already"),
        (&fixture("deepseek-v3"), options(4, bf16), "it has experts already"),
        (&fixture("gemma3"), options(4, bf16), "Llama, Mistral, Qwen2 and Qwen3"),
        (&llama, options(5, bf16), "possible numbers: 2, 4, 8, 11, 16, 22, 44"),
        (&llama, options(1, bf16), "experts: 1 cannot"),
        (&llama, options(0, bf16), "experts: 0 cannot"),
        (&llama, options(usize::MAX, bf16), "possible numbers"),
        (
            &llama,
            options(2, UpcycleFormat::Int4),
            "in units of 32, which int4 keeps together; possible numbers: none",
        ),
        (&wide, options(16, UpcycleFormat::Fp8), "possible numbers: 2, 4, 8"),
        (&source, options(8, UpcycleFormat::Gguf), "possible numbers: 2, 4"),
        (&llama, options(4, UpcycleFormat::Gguf), "gguf needs a GGUF file"),
        (&llama, uniform(4, 2), "top_k: the uniform router chooses all 4 experts, not 2"),
        (&llama, random(4, 0), "top_k: 0 is outside 1..=4"),
        (&llama, random(4, 5), "top_k: 5 is outside 1..=4"),
        (&llama, options(88, bf16), "top_k: 88 is outside 1..=64"),
    ] {
        let error = upcycled(source, &options, folder.path(), "out").unwrap_err().to_string();
        assert!(error.contains(words), "{options:?}: {error}");
        assert!(!folder.path().join("out").exists());
    }
}

#[test]
fn existing_files_are_kept_and_a_failure_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let llama = fixture("llama-gqa");
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "mine").unwrap();
    let error = upcycled(&llama, &options(4, UpcycleFormat::F32), folder.path(), "taken").unwrap_err();
    assert!(error.to_string().contains("taken exists and is not overwritten"), "{error}");
    assert_eq!(std::fs::read(&taken).unwrap(), b"mine");
    let error = upcycled(&llama, &options(4, UpcycleFormat::F32), folder.path(), "no/such").unwrap_err();
    assert!(matches!(error, ModelError::Write { .. }), "{error}");
    // A weight that no format can hold is found while the files are being written.
    let mut weights = tensors("llama-gqa");
    let name = "model.layers.2.mlp.down_proj.weight";
    weights.get_mut(name).unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let broken = write("llama-gqa", json!({}), &weights);
    let error =
        upcycled(broken.path(), &options(4, UpcycleFormat::Bf16), folder.path(), "broken").unwrap_err();
    assert!(error.to_string().contains(name) && error.to_string().contains("not finite"), "{error}");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [taken]);
}
