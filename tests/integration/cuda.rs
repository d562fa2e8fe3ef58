//! The default model on a GPU, if there is one: its most likely tokens are those of the CPU, on one device
//! and divided among ranks, on as many devices as they can share evenly. `SKEP_REQUIRE_GPU=1` makes the
//! absence of a GPU a failure.

use std::path::PathBuf;

use skep_kernels::gpu;
use skep_model::{
    Batch, BatchSequence, ExecutorOptions, KernelFolders, LoadedModel, LogitsWanted, PAGE_TOKENS, PageId,
    SpecialTokens,
};

use crate::harness::model_path;

const PROMPT: &str = "The three laws of thermodynamics describe how heat, work and temperature behave. In short, energy is \
                      neither made nor lost, entropy never falls, and nothing gets as cold as";
/// Rounding bound for 8-bit activations, as a share of the largest logit.
const BOUND: f32 = 0.05;

#[test]
fn greedy_tokens_on_a_gpu_match_the_cpu_within_rounding() {
    let there = match gpu::probe() {
        Ok(devices) => devices.len(),
        Err(reason) => {
            assert!(std::env::var_os("SKEP_REQUIRE_GPU").is_none_or(|value| value != "1"), "{reason}");
            eprintln!("skipped: {reason}");
            return;
        }
    };
    let exact = logits("cpu", 1, 1);
    for (tensor, stages) in [(1, 1), (3, 1), (1, 2), (3, 2)] {
        let ranks = tensor * stages;
        let count = (1..=ranks.min(there)).rev().find(|count| ranks.is_multiple_of(*count)).unwrap_or(1);
        let ordinals: Vec<String> = (0..count).map(|ordinal| ordinal.to_string()).collect();
        let found = logits(&format!("cuda:{}", ordinals.join(",")), tensor, stages);
        for (row, (found, exact)) in found.iter().zip(&exact).enumerate() {
            let largest = exact.iter().fold(f32::MIN, |most, logit| most.max(*logit));
            let scale = exact.iter().fold(0f32, |most, logit| most.max(logit.abs()));
            let chosen = likeliest(found);
            let short = largest - exact[chosen];
            assert!(
                short < BOUND * scale,
                "{tensor} × {stages} ranks, row {row}: token {chosen} is {short} short"
            );
        }
    }
}

fn likeliest(logits: &[f32]) -> usize {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(token, _)| token)
}

/// Returns the logits of every token of the prompt. The first half is computed at once, the rest token by
/// token.
fn logits(device: &str, tensor_parallel: usize, pipeline_parallel: usize) -> Vec<Vec<f32>> {
    // The kernels are compiled once for all calls.
    let cache = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cubins");
    let options = ExecutorOptions {
        device: device.parse().unwrap(),
        kernels: KernelFolders { cache: Some(cache.into()), shipped: None },
        kv_tokens: Some(256),
        tensor_parallel,
        pipeline_parallel,
        ..ExecutorOptions::default()
    };
    let mut model = LoadedModel::open("default", model_path(), options).unwrap();
    let tokens = model.tokenizer.encode(PROMPT, SpecialTokens::Literal).unwrap();
    let (mut computed, mut rows) = (0, Vec::new());
    while computed < tokens.len() {
        let end = if computed == 0 { tokens.len() / 2 } else { computed + 1 };
        let sequence = BatchSequence {
            tokens: tokens[computed..end].to_vec(),
            start: computed,
            pages: (0..end.div_ceil(PAGE_TOKENS) as u32).map(PageId).collect(),
            logits: LogitsWanted::All,
        };
        model.executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
        rows.extend((0..end - computed).map(|row| model.executor.logits(row).unwrap().to_vec()));
        computed = end;
    }
    rows
}
