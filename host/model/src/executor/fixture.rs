//! Tiny models with exact logits, and helpers to run them.

use std::path::PathBuf;

use safetensors::SafeTensors;
use skep_kernels::Isa;

use super::{CpuExecutor, ExecutorOptions, KvDtype};
use crate::batch::{BatchSequence, LogitsWanted, PAGE_TOKENS, PageId};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// Models with grouped attention and dense feed-forward blocks.
pub(super) const DENSE: [&str; 5] =
    ["llama-gqa", "llama-tied-rope3", "qwen2-bias", "qwen3-qknorm", "mistral-window"];
/// A model whose experts are packed integers, beside which activations are rounded.
pub(super) const PACKED: &str = "kimi-k2-int4";
/// A model of one layer, whose latent attention has the widths of published models.
pub(super) const WIDE: &str = "../wide/deepseek-v3";
pub(super) const MODELS: [&str; 11] = [
    "llama-gqa",
    "llama-tied-rope3",
    "qwen2-bias",
    "qwen3-qknorm",
    "mistral-window",
    "qwen3-moe",
    "deepseek-v3",
    "glm4-moe",
    "glm4-moe-lite",
    "gpt-oss",
    "gemma3",
];

pub(super) fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(name)
}

pub(super) fn load(name: &str, options: ExecutorOptions) -> Result<CpuExecutor, ModelError> {
    CpuExecutor::load(&Checkpoint::open(&folder(name)).unwrap(), options)
}

pub(super) fn options(isa: Isa) -> ExecutorOptions {
    ExecutorOptions {
        isa: Some(isa),
        threads: Some(2),
        kv: KvDtype::F32,
        kv_tokens: Some(512),
        max_logit_rows: 128,
        ..ExecutorOptions::default()
    }
}

/// Returns options with which nothing rounds weights in F16, as one of the tiers does.
pub(super) fn exact(isa: Isa) -> ExecutorOptions {
    ExecutorOptions { exact_weights: true, ..options(isa) }
}

/// Returns the token ids and the exact logits of a fixture.
pub(super) fn expected(name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("input_ids").unwrap();
    let ids =
        ids.data().chunks_exact(8).map(|id| i64::from_le_bytes(id.try_into().unwrap()) as u32).collect();
    let logits = tensors.tensor("logits").unwrap();
    let logits = logits.data().chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
    (ids, logits)
}

/// Returns a sequence whose pages count down from `first_page`, so that their order matters.
pub(super) fn sequence(tokens: &[u32], start: usize, first_page: u32, logits: LogitsWanted) -> BatchSequence {
    let pages = (start + tokens.len()).div_ceil(PAGE_TOKENS) as u32;
    let pages = (0..pages).map(|page| PageId(first_page - page)).collect();
    BatchSequence { tokens: tokens.to_vec(), start, pages, logits }
}

pub(super) fn relative_error(found: &[f32], exact: &[f32]) -> f32 {
    let largest = exact.iter().fold(0f32, |all, x| all.max(x.abs()));
    found.iter().zip(exact).fold(0f32, |all, (a, b)| all.max((a - b).abs())) / largest
}

pub(super) fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.supported())
}
