//! Model files: opened, and read as far as a host reads them before it computes.

use serde_json::{Value, json};
use skep_model::planner::{Description, Request};
use skep_model::upcycle::{Upcycle, UpcycleFormat, UpcycleOptions, UpcycleRouter};
use skep_model::{Checkpoint, KvDtype, SpecialTokens, Tokenizer};
use std::{path::Path, sync::OnceLock};
use tempfile::TempDir;

pub(crate) const GGUF_WORDS: &[&str] = &[
    "GGUF",
    "general.architecture",
    "general.alignment",
    "llama",
    "qwen2",
    "llama.block_count",
    "llama.expert_count",
    "llama.rope.scaling.type",
    "split.count",
    "split.tensors.count",
    "yarn",
    "llama.attention.key_length",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.scores",
    "tokenizer.chat_template",
    "tokenizer.ggml.model",
    "blk.0.attn_q.weight",
    "blk.0.ffn_gate_exps.weight",
    "blk.0.ffn_down_exps.bias",
    "blk.0.post_ffw_norm.weight",
    "gpt-oss",
    "gemma3",
    "glm4moe",
    "qwen3moe",
    "deepseek2",
    "deepseek2.attention.kv_lora_rank",
    "deepseek2.attention.key_length_mla",
    "deepseek2.leading_dense_block_count",
    "deepseek2.expert_group_count",
    "deepseek2.rope.scaling.yarn_log_multiplier",
    "blk.0.attn_k_b.weight",
    "blk.0.attn_kv_b.weight",
    "blk.0.ffn_gate_up_exps.weight",
    "blk.0.exp_probs_b.bias",
    "nextn_predict_layers",
    "output.weight",
    "{% for i in range(1000) %}",
    "{{ x }}",
];
pub(crate) const SAFETENSORS_WORDS: &[&str] = &[
    "\"dtype\":\"F32\"",
    "\"BF16\"",
    "\"shape\":[",
    "\"data_offsets\":[",
    "__metadata__",
    "model.norm.weight",
    "\"num_hidden_layers\":",
    "\"hidden_size\":",
    "\"head_dim\":",
    "\"rope_scaling\":{\"rope_type\":\"llama3\"}",
    "\"model_type\":\"qwen3\"",
    "\"vocab_size\":",
    "null",
    "1e999",
    "\"group_size\": -1",
    "\"quant_method\": \"awq\"",
    "\"desc_act\": true",
    "\"F8_E4M3\"",
    "\"I32\"",
    "\"U8\"",
    ".qzeros",
    ".weight_zero_point",
    "_scales",
];

pub(crate) const INDEX_WORDS: &[&str] = &[
    "\"weight_map\":{",
    "\"metadata\":{\"total_size\":",
    "model-00001-of-00002.safetensors",
    "model-00003-of-00002.safetensors",
    "../model.safetensors",
    "\"model.norm.weight\":\"",
    "\"dtype\":\"F8_E4M3\"",
    "\"data_offsets\":[",
    "null",
    "{}",
];

/// The names of the shards of a seed.
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

pub(crate) const TIKTOKEN_WORDS: &[&str] = &[
    "aGVsbG8= 259",
    "=",
    " 256\n",
    "4294967295",
    "\"added_tokens_decoder\":",
    "\"special\":true",
    "\"263\":",
    "\"content\":\"<|reserved_token_5|>\"",
    "TikTokenTokenizer",
    "null",
];

/// Uses the whole input as the file.
pub(crate) fn gguf(input: &[u8]) {
    let path = folder().join("model.gguf");
    write(&path, input);
    look_at(&path);
}

/// Uses the first four bytes as the length of the first of two parts, which follows. The rest is the second part.
pub(crate) fn gguf_split(input: &[u8]) {
    let Some((length, rest)) = input.split_first_chunk() else { return };
    let (first, second) = rest.split_at((u32::from_le_bytes(*length) as usize).min(rest.len()));
    let folder = folder().join("split");
    std::fs::create_dir_all(&folder).expect("the temporary folder takes files");
    let parts = [1, 2].map(|number| folder.join(format!("model-0000{number}-of-00002.gguf")));
    write(&parts[0], first);
    write(&parts[1], second);
    look_at(&parts[0]);
}

/// Uses the first two bytes as the length of `config.json`, which follows. The rest is the weights file.
pub(crate) fn safetensors(input: &[u8]) {
    let Some((length, rest)) = input.split_first_chunk() else { return };
    let (config, weights) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
    let folder = folder().join("folder");
    std::fs::create_dir_all(&folder).expect("the temporary folder takes files");
    write(&folder.join("config.json"), config);
    write(&folder.join("model.safetensors"), weights);
    look_at(&folder);
}

/// Uses the first four bytes three times as the length of `config.json`, of the index and of the first shard, which follow. The
/// rest is the second shard.
pub(crate) fn safetensors_index(input: &[u8]) {
    let Some((lengths, mut rest)) = input.split_first_chunk::<12>() else { return };
    let folder = folder().join("shards");
    std::fs::create_dir_all(&folder).expect("the temporary folder takes files");
    let names = ["config.json", "model.safetensors.index.json", SHARDS[0]];
    for (name, length) in names.into_iter().zip(lengths.as_chunks::<4>().0) {
        let (file, others) = rest.split_at((u32::from_le_bytes(*length) as usize).min(rest.len()));
        write(&folder.join(name), file);
        rest = others;
    }
    write(&folder.join(SHARDS[1]), rest);
    look_at(&folder);
}

/// Uses the first two bytes as the length of `tokenizer_config.json`, which follows. The rest is `tiktoken.model`.
pub(crate) fn tiktoken(input: &[u8]) {
    let Some((length, rest)) = input.split_first_chunk() else { return };
    let (config, ranks) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
    let config: Value = serde_json::from_slice(config).unwrap_or_default();
    if let Ok(tokenizer) = Tokenizer::from_tiktoken(ranks, &config) {
        convert(&tokenizer);
    }
}

/// Returns the vocabulary of all bytes and of some merged ones, with special tokens as those of Kimi.
pub(crate) fn tiktoken_seeds() -> Vec<Vec<u8>> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let letter = |bits: u8| char::from(LETTERS[usize::from(bits & 63)]);
    let line = |byte: u8| format!("{}{}== {byte}\n", letter(byte >> 2), letter((byte & 3) << 4));
    let mut ranks: String = (0..=u8::MAX).map(line).collect();
    // The tokens "he", "ll" and "hell".
    ranks += "aGU= 256\nbGw= 257\naGVsbA== 258\n";
    let config = json!({
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "added_tokens_decoder": {
            "259": {"content": "[BOS]", "special": true}, "260": {"content": "[EOS]", "special": true},
            "261": {"content": "<|im_end|>", "special": true}, "262": {"content": "<think>", "special": false},
        },
    });
    let config = config.to_string();
    let length = (config.len() as u16).to_le_bytes();
    vec![[&length[..], config.as_bytes(), ranks.as_bytes()].concat()]
}

/// Returns the configurations of published models.
pub(crate) fn configuration_seeds() -> Vec<Vec<u8>> {
    crate::files(&crate::folder("../fixtures/configs"))
}

/// Plans the memory of a model from the input as its config.json.
pub(crate) fn configuration(input: &[u8]) {
    let Ok(description) = Description::from_config(input) else { return };
    let _ = format!("{:?} {:?} {:?}", description.totals(), description.obstacle(), description.parts());
    let context = description.context_length;
    let _ = description.decode_bytes_per_token(context, KvDtype::I8);
    for devices in ["8xH200", "6xL4", "cpu:64"] {
        let devices = devices.parse().expect("the devices are known");
        let request = Request { devices, context, sequences: 3, kv: KvDtype::F16 };
        let _ = format!("{:?}", description.plan(&request));
    }
}

fn look_at(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path) else { return };
    let _ = format!("{:?} {} {}", checkpoint.config(), checkpoint.format(), checkpoint.bytes());
    for tensor in checkpoint.tensors() {
        // Every byte must be readable.
        std::hint::black_box(tensor.data.iter().fold(0_u8, |sum, byte| sum ^ byte));
        let _ = tensor.content();
    }
    if let Ok(Some(tokenizer)) = checkpoint.tokenizer() {
        convert(&tokenizer);
    }
    if let Ok(Some(template)) = checkpoint.chat_template() {
        let messages = [json!({"role": "user", "content": "hello"})];
        let tools = json!([{"name": "f", "parameters": {}}]);
        let _ = template.render(&messages, Some(&tools), true);
    }
    let router = UpcycleRouter::Random { seed: 1 };
    for format in [UpcycleFormat::Int4, UpcycleFormat::Gguf] {
        let options = UpcycleOptions { experts: 2, used: Some(1), router, format };
        let _ = Upcycle::plan(&checkpoint, &options).map(|upcycle| upcycle.bytes());
    }
}

/// Converts text to tokens and back.
fn convert(tokenizer: &Tokenizer) {
    if let Ok(ids) = tokenizer.encode("hello <|im_end|> é🐝", SpecialTokens::Parse) {
        let _ = tokenizer.decode(&ids, false);
        let _ = tokenizer.decode(&[0, 5, u32::MAX], true);
    }
}

fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().expect("there is room for a folder")).path()
}

/// Writes a new file, because the previous one may still be mapped.
fn write(path: &Path, bytes: &[u8]) {
    let _ = std::fs::remove_file(path);
    std::fs::write(path, bytes).expect("the temporary folder takes files");
}
