//! Models whose layers with a window have few pages, beside the same models with all pages.

use super::super::fixture::{expected, load, options, relative_error};
use super::super::{Executor as _, ExecutorOptions, ModelWeights};
use super::*;
use crate::batch::LogitsWanted;
use crate::checkpoint::Checkpoint;
use skep_kernels::Isa;

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
