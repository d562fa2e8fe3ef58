//! Files of both families load, compute and repeat; published widths; and what is refused.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use serde_json::Value;
use skep_kernels::DType;

use super::shape::{Attention, Gating, SHAPES};
use super::{Synthesis, SynthesisOptions, names, weight_format};
use crate::batch::{Batch, BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::fixtures::fixture;
use crate::config::Architecture;
use crate::error::ModelError;
use crate::executor::{ExecutorOptions, ModelWeights};
use crate::gguf::writer::tiny_llama;
use crate::tokenizer::SpecialTokens;

const TINY: [&str; 2] = ["tiny-qwen3-moe", "tiny-deepseek"];

fn options(like: &str) -> SynthesisOptions<'_> {
    SynthesisOptions { like, layers: None, context: None, weights: DType::Q4_0, seed: 0 }
}

/// Writes a model with a vocabulary of 262 tokens.
fn vocabulary(folder: &Path) -> Checkpoint {
    let path = folder.join("vocabulary.gguf");
    std::fs::write(&path, tiny_llama().build()).unwrap();
    Checkpoint::open(&path).unwrap()
}

fn synthesized(folder: &Path, name: &str, options: &SynthesisOptions<'_>) -> Result<PathBuf, ModelError> {
    let plan = Synthesis::plan(&vocabulary(folder), options)?;
    let path = folder.join(name);
    let written = Cell::new(0);
    plan.write(&path, &|bytes| written.set(bytes))?;
    let found = std::fs::metadata(&path).unwrap().len();
    assert_eq!((written.get(), found), (plan.bytes(), plan.bytes()), "the planned size is that of the file");
    Ok(path)
}

/// Generates the likeliest tokens behind a prompt. The logits have to be numbers that differ.
fn generated(checkpoint: &Checkpoint, [tensor_parallel, pipeline_parallel]: [usize; 2]) -> Vec<u32> {
    let options = ExecutorOptions {
        threads: Some(2),
        kv_tokens: Some(64),
        max_batch_tokens: 32,
        max_logit_rows: 1,
        max_sequences: 1,
        tensor_parallel,
        pipeline_parallel,
        ..ExecutorOptions::default()
    };
    let mut executor = ModelWeights::load(checkpoint, &options).unwrap().executor(options).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap().unwrap();
    let mut tokens = tokenizer.encode("hello, hell", SpecialTokens::Parse).unwrap();
    let (prompt, mut computed) = (tokens.len(), 0);
    for _ in 0..8 {
        let sequence = BatchSequence {
            tokens: tokens[computed..].to_vec(),
            start: computed,
            pages: (0..tokens.len().div_ceil(PAGE_TOKENS) as u32).map(PageId).collect(),
            logits: LogitsWanted::Last,
        };
        executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
        let logits = executor.logits(0).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()));
        assert!(logits.iter().any(|logit| *logit != logits[0]));
        let likeliest = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        computed = tokens.len();
        tokens.push(likeliest as u32);
    }
    tokens.split_off(prompt)
}

#[test]
fn files_of_both_families_load_and_generate_in_every_format_and_on_several_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for (like, family) in [(TINY[0], Architecture::Qwen3Moe), (TINY[1], Architecture::DeepSeekV3)] {
        for weights in crate::gguf::formats() {
            let name = format!("{like}-{weights}.gguf");
            let options = SynthesisOptions { weights, ..options(like) };
            let checkpoint = Checkpoint::open(&synthesized(folder.path(), &name, &options).unwrap()).unwrap();
            let config = checkpoint.config();
            assert_eq!((config.architecture, config.vocabulary_size), (family, 262), "{name}");
            assert_eq!(config.style.latent.is_some(), family == Architecture::DeepSeekV3);
            let template = checkpoint.chat_template().unwrap();
            assert!(template.is_some(), "the template is that of the vocabulary");
            assert_eq!(generated(&checkpoint, [1, 1]).len(), 8, "{name}");
            if weights == DType::Q4_0 {
                let divided = [[2, 1], [1, 2]].map(|ranks| generated(&checkpoint, ranks).len());
                assert_eq!(divided, [8, 8], "{name}");
            }
        }
    }
}

#[test]
fn a_file_depends_on_its_options_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, options: SynthesisOptions<'_>| {
        std::fs::read(synthesized(folder.path(), name, &options).unwrap()).unwrap()
    };
    let first = file("first", options(TINY[1]));
    assert_eq!(file("again", options(TINY[1])), first);
    let other = file("other", SynthesisOptions { seed: 1, ..options(TINY[1]) });
    assert_eq!(other.len(), first.len());
    let differing = other.iter().zip(&first).filter(|(a, b)| a != b).count();
    assert!(differing > first.len() / 2, "{differing} bytes of {}", first.len());
    let one_layer_less = file("shorter", SynthesisOptions { layers: Some(2), ..options(TINY[1]) });
    assert!(one_layer_less.len() < first.len());
}

#[test]
fn a_file_may_have_a_longer_context_than_its_model() {
    let folder = tempfile::tempdir().unwrap();
    for (context, expected) in [(None, 512), (Some(262_144), 262_144)] {
        let options = SynthesisOptions { context, ..options(TINY[1]) };
        let path = synthesized(folder.path(), &format!("{expected}.gguf"), &options).unwrap();
        assert_eq!(Checkpoint::open(&path).unwrap().config().context_length, expected);
    }
}

#[test]
fn rows_that_are_not_whole_blocks_have_a_format_with_smaller_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let options = SynthesisOptions { weights: DType::Q4K, layers: Some(2), ..options("deepseek-v2-lite") };
    let plan = Synthesis::plan(&vocabulary(folder.path()), &options).unwrap();
    let format = |name: &str| plan.tensors.iter().find(|tensor| tensor.name == name).unwrap().dtype;
    assert_eq!(format("blk.1.ffn_gate_exps.weight"), DType::Q4K, "rows of 2048");
    assert_eq!(format("blk.1.ffn_down_exps.weight"), DType::Q5_0, "rows of 1408");
    assert_eq!(format("blk.1.attn_k_b.weight"), DType::Q5_0, "rows of 128");
    assert_eq!(format("blk.1.ffn_gate_inp.weight"), DType::F32);
    assert_eq!(format("blk.0.ffn_norm.weight"), DType::F32);
}

#[test]
fn widths_are_those_of_the_published_configurations() {
    for (name, file) in [
        ("qwen3-30b-a3b", "qwen3-30b-a3b.json"),
        ("deepseek-v2-lite", "deepseek-v2-lite.json"),
        ("glm-4.7-flash", "glm-4.7-flash.json"),
        ("kimi-k2", "kimi-k2.5.json"),
    ] {
        let text = std::fs::read(fixture("../configs").join(file)).unwrap();
        let config: Value = serde_json::from_slice(&text).unwrap();
        let config = config.get("text_config").unwrap_or(&config);
        let number = |key: &str| config[key].as_u64().unwrap_or_else(|| panic!("{name}: {key}")) as usize;
        let real = |key: &str| config[key].as_f64().unwrap_or_else(|| panic!("{name}: {key}")) as f32;
        let shape = SHAPES.iter().find(|shape| shape.name == name).unwrap();
        let sizes = [shape.layers, shape.hidden, shape.heads, shape.context, shape.dense_size];
        let keys = [
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
            "intermediate_size",
        ];
        assert_eq!(sizes, keys.map(number), "{name}");
        let experts = shape.experts;
        let count = if name == "qwen3-30b-a3b" { "num_experts" } else { "n_routed_experts" };
        let keys = [count, "num_experts_per_tok", "moe_intermediate_size"];
        assert_eq!([experts.count, experts.used, experts.size], keys.map(number), "{name}");
        assert_eq!((shape.theta, shape.norm_epsilon), (real("rope_theta"), real("rms_norm_eps")), "{name}");
        match shape.attention {
            Attention::Grouped { kv_heads, head_size } => {
                assert_eq!([kv_heads, head_size], ["num_key_value_heads", "head_dim"].map(number));
            }
            Attention::Latent(latent) => {
                let keys = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"];
                let sizes = [latent.rank, latent.unrotated, latent.rotated, latent.value];
                assert_eq!(sizes, keys.map(number), "{name}");
                let rank = config["q_lora_rank"].as_u64().map(|rank| rank as usize);
                assert_eq!(latent.query_rank, rank, "{name}");
                let yarn = &config["rope_scaling"];
                let keys = ["factor", "original_max_position_embeddings", "mscale_all_dim"];
                let stated = yarn.is_object().then(|| keys.map(|key| yarn[key].as_f64().unwrap() as f32));
                let found =
                    latent.yarn.map(|yarn| [yarn.factor, yarn.original_context as f32, yarn.all_dimensions]);
                assert_eq!(found, stated, "{name}");
                let by_softmax = config["scoring_func"] == "softmax";
                assert_eq!(experts.gating == Gating::Softmax, by_softmax, "{name}");
                assert_eq!(Some(experts.normalized), config["norm_topk_prob"].as_bool(), "{name}");
                assert_eq!(experts.scale, real("routed_scaling_factor"));
                let (shared, dense) = (number("n_shared_experts"), number("first_k_dense_replace"));
                assert_eq!((experts.shared, experts.dense_layers), (shared, dense));
            }
        }
    }
}

#[test]
fn a_cut_has_the_size_of_its_layers() {
    let folder = tempfile::tempdir().unwrap();
    let options = SynthesisOptions { layers: Some(4), ..options("qwen3-30b-a3b") };
    let plan = Synthesis::plan(&vocabulary(folder.path()), &options).unwrap();
    assert_eq!((plan.family(), plan.layers()), ("qwen3moe", 4));
    // Experts, attention and the router of a layer, and both tables of 262 tokens; norms are small.
    let matrices: u64 = 128 * 3 * 2048 * 768 + 2048 * (2 * 4096 + 2 * 512);
    let (router, tables): (u64, u64) = (2048 * 128, 2 * 262 * 2048);
    let norms = 4 * (2 * 2048 + 2 * 128) + 2048;
    assert_eq!(plan.parameters(), 4 * (matrices + router) + tables + norms);
    let bytes = (4 * matrices + tables) / 32 * 18 + 4 * (4 * router + norms);
    assert!((bytes..bytes + 65_536).contains(&plan.bytes()), "{bytes}, {}", plan.bytes());
}

#[test]
fn wrong_options_are_refused_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |options: SynthesisOptions<'_>| {
        synthesized(folder.path(), "new.gguf", &options).unwrap_err().to_string()
    };
    let error = refused(options("qwen4"));
    assert!(error.starts_with("like: \"qwen4\" is unknown; possible values: qwen3-30b-a3b, "), "{error}");
    for (like, layers, words) in [
        ("qwen3-30b-a3b", 0, "layers: 0 is outside 1..=48"),
        ("qwen3-30b-a3b", 49, "layers: 49 is outside 1..=48"),
        ("deepseek-v2-lite", 1, "layers: 1 is outside 2..=27"),
        ("glm-4.7-flash", 27, "layers: llama.cpp reads a file with 27 layers as DeepSeek-V2-Lite"),
    ] {
        let error = refused(SynthesisOptions { layers: Some(layers), ..options(like) });
        assert!(error.starts_with(words), "{error}");
    }
    for context in [0, 1 << 25] {
        let error = refused(SynthesisOptions { context: Some(context), ..options(TINY[1]) });
        assert_eq!(error, format!("context: {context} is outside 1..=16777216"));
    }
    let error = refused(SynthesisOptions { weights: DType::Int4, ..options(TINY[0]) });
    assert!(error.contains("GGUF files have no format INT4"), "{error}");
    let safetensors = Checkpoint::open(&fixture("llama-gqa")).unwrap();
    let error = Synthesis::plan(&safetensors, &options(TINY[0])).err().unwrap().to_string();
    assert!(error.contains("tokenizer: the model with the vocabulary has to be a GGUF file"), "{error}");
    let plan = Synthesis::plan(&vocabulary(folder.path()), &options(TINY[0])).unwrap();
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "mine").unwrap();
    let error = plan.write(&taken, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("exists and is not overwritten"), "{error}");
    let mut left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["taken", "vocabulary.gguf"]);
}

#[test]
fn formats_are_named_in_letters_of_either_case() {
    assert_eq!(weight_format("q4_0"), Ok(DType::Q4_0));
    assert_eq!(weight_format("Q4_K"), Ok(DType::Q4K));
    assert!(weight_format("int4").unwrap_err().contains("q4_0, q4_1"));
    assert_eq!(names().count(), SHAPES.len());
}
