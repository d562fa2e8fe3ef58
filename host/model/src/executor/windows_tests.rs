//! Models whose layers with a window have few pages, beside the same models with all pages.

use super::super::fixture::{expected, load, options, relative_error};
use super::super::{Executor, ExecutorOptions, ModelWeights};
use super::*;
use crate::batch::LogitsWanted;
use crate::checkpoint::Checkpoint;
use skep_kernels::{DType, Isa};

/// Tokens of a step.
const STEP: usize = 32;
/// Window of the models, in tokens and in whole pages.
const WINDOW: usize = 16;
/// Pages of layers with a window: a window, a step and what is partial.
const PAGES: usize = (WINDOW + STEP) / PAGE_TOKENS + PARTIAL_PAGES;

fn few_pages() -> ExecutorOptions {
    ExecutorOptions {
        window_tokens: Some(PAGES * PAGE_TOKENS),
        max_batch_tokens: STEP,
        ..options(Isa::detect())
    }
}

fn sequence(tokens: &[u32], start: usize) -> BatchSequence {
    let pages = (start + tokens.len()).div_ceil(PAGE_TOKENS) as u32;
    BatchSequence {
        tokens: tokens.to_vec(),
        start,
        // Pages of other numbers than their place in the sequence.
        pages: (0..pages).map(|page| PageId(20 - page)).collect(),
        logits: LogitsWanted::All,
    }
}

#[test]
fn released_pages_change_no_logit_on_any_number_of_ranks() {
    for name in ["gemma3", "gpt-oss", "mistral-window"] {
        let (ids, exact) = expected(name);
        let width = exact.len() / ids.len();
        for (tensor_parallel, pipeline_parallel) in [(1, 1), (2, 1), (1, 2)] {
            let options = ExecutorOptions { tensor_parallel, pipeline_parallel, ..few_pages() };
            let checkpoint = Checkpoint::open(&super::super::fixture::folder(name)).unwrap();
            let weights = ModelWeights::load(&checkpoint, &options).unwrap();
            let mut executor = weights.executor(options).unwrap();
            assert_eq!(executor.windows(), Some(WindowLimits { window: WINDOW, pages: PAGES }));
            assert!(executor.page_form().is_none(), "pages without windows cannot leave");
            let mut released = 0;
            for (index, tokens) in ids.chunks(STEP).enumerate() {
                let start = index * STEP;
                let unseen = (start + 1).saturating_sub(WINDOW) / PAGE_TOKENS;
                let changes: Vec<_> =
                    (released..unseen).map(|page| WindowChange::Release(PageId(20 - page as u32))).collect();
                executor.change_windows(&changes).unwrap();
                released = unseen;
                executor.forward(&Batch { sequences: vec![sequence(tokens, start)] }).unwrap();
                for row in 0..tokens.len() {
                    let exact = &exact[(start + row) * width..][..width];
                    let error = relative_error(executor.logits(row).unwrap(), exact);
                    assert!(error < 1e-3, "{name}, {tensor_parallel} × {pipeline_parallel}: {error}");
                }
            }
            assert!(released > 3, "{name}");
        }
    }
}

#[test]
fn a_step_that_sees_a_released_page_is_refused() {
    let (ids, exact) = expected("gemma3");
    let mut executor = load("gemma3", few_pages()).unwrap();
    executor.forward(&Batch { sequences: vec![sequence(&ids[..32], 0)] }).unwrap();
    executor.change_windows(&[WindowChange::Release(PageId(19))]).unwrap();
    let error = executor.forward(&Batch { sequences: vec![sequence(&ids[32..33], 32)] }).unwrap_err();
    assert!(error.to_string().contains("page 19 was released, but a window still covers it"), "{error}");
    // Computed again, it is there again.
    executor.forward(&Batch { sequences: vec![sequence(&ids[16..32], 16)] }).unwrap();
    executor.forward(&Batch { sequences: vec![sequence(&ids[32..33], 32)] }).unwrap();
    let exact = &exact[32 * 320..][..320];
    assert!(relative_error(executor.logits(0).unwrap(), exact) < 1e-3);
}

#[test]
fn pages_move_and_run_out() {
    let limits = WindowLimits { window: WINDOW, pages: 2 };
    let mut pages = WindowPages::new(limits, 30);
    let first = pages.of_sequence(&sequence(&[1; 32], 0)).unwrap();
    assert_ne!(first[0], first[1]);
    let error = pages.of_sequence(&sequence(&[1; 16], 32)).unwrap_err().to_string();
    assert!(error.contains("have no page left for page 18"), "{error}");
    pages.apply(&[WindowChange::Move { from: PageId(20), to: PageId(5) }]);
    assert_eq!(pages.places[5], Some(first[0]));
    assert_eq!(pages.places[20], None);
    // The place that the target had before is free.
    pages.apply(&[WindowChange::Move { from: PageId(5), to: PageId(19) }]);
    assert_eq!((pages.places[19], pages.free.len()), (Some(first[0]), 1));
    pages.apply(&[WindowChange::Release(PageId(19)), WindowChange::Release(PageId(19))]);
    assert_eq!(pages.free.len(), 2);
}

#[test]
fn memory_is_that_of_the_pages_that_are_kept() {
    for name in ["gemma3", "gpt-oss"] {
        let all = *load(name, ExecutorOptions { window_tokens: None, ..few_pages() }).unwrap().plan();
        let few = *load(name, few_pages()).unwrap().plan();
        let windows = Checkpoint::open(&super::super::fixture::folder(name)).unwrap();
        let windows = &windows.config().windows;
        let windowed = windows.iter().flatten().count() as u64;
        let layer_page = all.kv_bytes / windows.len() as u64 / 32;
        assert_eq!(all.kv_bytes - few.kv_bytes, windowed * layer_page * (32 - PAGES as u64), "{name}");
        assert_eq!(all.weight_bytes, few.weight_bytes);
    }
}

#[test]
fn too_few_pages_for_a_step_are_refused_and_models_without_windows_keep_all() {
    let error = load("gemma3", ExecutorOptions { window_tokens: Some(64), ..few_pages() }).err().unwrap();
    let words =
        "window_tokens: 64 tokens do not hold a window of 16 tokens and a step of 32; set at least 96";
    assert_eq!(error.to_string(), words);
    assert_eq!(load("llama-gqa", few_pages()).unwrap().windows(), None);
    let many = ExecutorOptions { window_tokens: Some(512), ..few_pages() };
    assert_eq!(load("gemma3", many).unwrap().windows(), None, "as many as other layers have");
}

/// Tokens of a prompt that sequences have in common.
const PROMPT: usize = 640;

/// Computes a step, and returns the bits of the logits of each sequence's last token.
fn run(executor: &mut dyn Executor, sequences: Vec<BatchSequence>) -> Vec<Vec<u32>> {
    let count = sequences.len();
    executor.forward(&Batch { sequences }).unwrap();
    let bits = |row| executor.logits(row).unwrap().iter().map(|logit| logit.to_bits()).collect();
    (0..count).map(bits).collect()
}

#[test]
fn sequences_whose_windows_begin_in_a_common_prompt_get_the_bits_that_they_get_alone() {
    let config = ModelConfig { windows: vec![Some(600), None], ..ModelConfig::shape("tiny").unwrap() };
    let options = ExecutorOptions {
        window_tokens: Some(72 * PAGE_TOKENS),
        kv_tokens: Some(128 * PAGE_TOKENS),
        max_batch_tokens: 128,
        ..options(Isa::detect())
    };
    let weights = ModelWeights::load(&Checkpoint::synthetic(config, DType::Q8_0).unwrap(), &options).unwrap();
    let mut executor = weights.executor(options).unwrap();
    // The tokens of each sequence after the prompt. Windows then begin in three different blocks of the prompt.
    let tails = [20, 150, 290];
    let rows = |own: usize, from: usize, to: usize| {
        let of_prompt = (PROMPT / PAGE_TOKENS) as u32;
        let page = |at: u32| {
            if at < of_prompt { PageId(127 - at) } else { PageId(30 * own as u32 + at - of_prompt) }
        };
        BatchSequence {
            tokens: (from..to).map(|at| (at * 7 + own * 31 + 3) as u32 % 1000).collect(),
            start: from,
            pages: (0..to.div_ceil(PAGE_TOKENS) as u32).map(page).collect(),
            logits: LogitsWanted::Last,
        }
    };
    for from in (0..PROMPT).step_by(128) {
        run(&mut *executor, vec![rows(0, from, from + 128)]);
    }
    // No window covers these pages anymore, so they give theirs away.
    let unseen = (PROMPT + 1 - 600) as u32 / PAGE_TOKENS as u32;
    let released: Vec<_> = (0..unseen).map(|page| WindowChange::Release(PageId(127 - page))).collect();
    executor.change_windows(&released).unwrap();
    let mut alone = Vec::new();
    for (own, tail) in tails.into_iter().enumerate() {
        for from in (PROMPT..PROMPT + tail).step_by(100) {
            run(&mut *executor, vec![rows(own, from, (from + 100).min(PROMPT + tail))]);
        }
        alone.extend(run(&mut *executor, vec![rows(own, PROMPT + tail, PROMPT + tail + 1)]));
    }
    let next = tails.iter().enumerate().map(|(own, tail)| rows(own, PROMPT + tail, PROMPT + tail + 1));
    let together = run(&mut *executor, next.collect());
    assert!(together == alone, "sequences that share reads have other logits");
}
