//! Pages that leave an executor on emulated devices and continue in another one, also while a step runs that was started ahead.

use super::super::tests::{BOUND, MODELS, cuda_options, load, open};
use super::super::{CudaExecutor, StepAhead};
use super::*;
use crate::batch::{Batch, LogitsWanted, PAGE_TOKENS};
use crate::executor::fixture::{expected, relative_error, sequence};
use crate::executor::{CpuExecutor, Executor, KvDtype};
use crate::sampling::{LogitRow, SampleRow, Sampling};

/// Number of tokens whose pages are moved.
const MOVED: usize = 3 * PAGE_TOKENS;
/// Number of tokens that are drawn after them.
const DRAWN: usize = 8;
/// The first pages of the sequences, whose pages count down from there.
const FROM: u32 = 9;
const TO: u32 = 20;

fn pages(first: u32) -> Vec<PageId> {
    (0..(MOVED / PAGE_TOKENS) as u32).map(|page| PageId(first - page)).collect()
}

fn read(executor: &mut CudaExecutor, pages: &[PageId]) -> Vec<u8> {
    let bytes = executor.page_form().unwrap().bytes;
    let mut image = vec![0; bytes * pages.len()];
    executor.read_pages(pages, &mut image).unwrap();
    image
}

fn prefill(executor: &mut CudaExecutor, ids: &[u32], first_page: u32) {
    let prompt = sequence(&ids[..MOVED], 0, first_page, LogitsWanted::None);
    executor.forward(&Batch { sequences: vec![prompt] }).unwrap();
}

/// Draws greedily behind the moved pages, and returns the tokens and the logits of each step.
fn greedy(executor: &mut CudaExecutor, next: u32, first_page: u32) -> (Vec<u32>, Vec<Vec<f32>>) {
    let (mut tokens, mut logits) = (vec![next], Vec::new());
    for at in 0..DRAWN {
        let step = sequence(&tokens[at..], MOVED + at, first_page, LogitsWanted::Last);
        executor.forward(&Batch { sequences: vec![step] }).unwrap();
        let row = executor.logits(0).unwrap();
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        logits.push(row.to_vec());
        tokens.push(best as u32);
    }
    (tokens, logits)
}

fn options_of(ranks: (usize, usize), activation: Activation, deterministic: bool) -> ExecutorOptions {
    let (tensor_parallel, pipeline_parallel) = ranks;
    let activations = Some(activation);
    ExecutorOptions { tensor_parallel, pipeline_parallel, activations, deterministic, ..cuda_options() }
}

#[test]
pub(in super::super) fn a_sequence_continues_from_imported_pages_with_the_same_tokens() {
    let divisions = [((1, 1), (1, 1)), ((1, 1), (1, 3)), ((2, 1), (2, 1)), ((2, 2), (2, 1))];
    for (number, name) in MODELS.into_iter().enumerate() {
        let (ids, _) = expected(name);
        for (activation, deterministic) in [(Activation::F16, false), (Activation::Bf16, true)] {
            // All divisions of one model, and those of one rank of the others.
            for (from, to) in divisions.into_iter().take(if number == 0 { 4 } else { 1 }) {
                let what = format!("{name} in {activation:?}, {deterministic}, {from:?} to {to:?}");
                let mut first = load(name, options_of(from, activation, deterministic), "0");
                prefill(&mut first, &ids, FROM);
                let image = read(&mut first, &pages(FROM));
                assert!(image.iter().any(|byte| *byte != 0), "{what}: the pages are empty");
                let mut second = load(name, options_of(to, activation, deterministic), "0");
                assert_eq!(first.page_form(), second.page_form(), "{what}");
                second.write_pages(&pages(TO), &image).unwrap();
                assert!(read(&mut second, &pages(TO)) == image, "{what}: a round trip");
                let (computed, exact) = greedy(&mut first, ids[MOVED], FROM);
                let (imported, found) = greedy(&mut second, ids[MOVED], TO);
                assert_eq!(imported, computed, "{what}");
                for (found, exact) in found.iter().zip(&exact) {
                    match deterministic {
                        true => assert_eq!(found, exact, "{what}"),
                        false => assert!(relative_error(found, exact) < BOUND, "{what}"),
                    }
                }
            }
        }
    }
}

#[test]
pub(in super::super) fn pages_move_beside_a_step_that_was_started_ahead() {
    let name = "llama-gqa";
    let (ids, _) = expected(name);
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let row = LogitRow::Sample(SampleRow::plain(0, &sampling));
    for ranks in [(1, 1), (2, 2)] {
        let mut executor = load(name, options_of(ranks, Activation::F16, false), "0");
        prefill(&mut executor, &ids, FROM);
        let image = read(&mut executor, &pages(FROM));
        let bytes = executor.page_form().unwrap().bytes;
        let last = sequence(&ids[MOVED..=MOVED], MOVED, FROM, LogitsWanted::Last);
        executor.forward(&Batch { sequences: vec![last] }).unwrap();
        // The step that was started writes to the page after those that are read, and is not used.
        let next = sequence(&[0], MOVED + 1, FROM, LogitsWanted::Last);
        let next = StepAhead { batch: Batch { sequences: vec![next] }, drawn: vec![0] };
        assert!(executor.sample_and_begin(std::slice::from_ref(&row), &next).unwrap().has_begun);
        assert!(read(&mut executor, &pages(FROM)) == image, "{ranks:?}");
        // More pages than there is memory for copies, over the page that the discarded step writes.
        let written: Vec<u8> = (0..bytes * 2 * MAX_ENTERING).map(|at| (at * 7 % 251) as u8).collect();
        let targets = (0..2 * MAX_ENTERING as u32).map(PageId);
        let targets: Vec<PageId> = targets.filter(|page| !pages(FROM).contains(page)).collect();
        let written = &written[..bytes * targets.len()];
        assert!(targets.contains(&PageId(FROM - (MOVED / PAGE_TOKENS) as u32)));
        executor.write_pages(&targets, written).unwrap();
        assert!(read(&mut executor, &targets) == *written, "{ranks:?}: what was written is read at once");
        assert!(read(&mut executor, &pages(FROM)) == image, "{ranks:?}: other pages do not change");
        // Nor does it change later.
        executor.forward(&Batch { sequences: vec![sequence(&ids[..5], 0, 30, LogitsWanted::Last)] }).unwrap();
        executor.logits(0).unwrap();
        assert!(read(&mut executor, &targets) == *written, "{ranks:?}");
    }
}

#[test]
fn pages_of_another_computation_have_another_form() {
    let form = |name: &str, options: ExecutorOptions| load(name, options, "0").page_form().unwrap().clone();
    let plain = form("llama-gqa", cuda_options());
    assert_eq!(plain, form("llama-gqa", ExecutorOptions { kv_tokens: Some(64), ..cuda_options() }));
    let others = [
        ExecutorOptions { activations: Some(Activation::Bf16), ..cuda_options() },
        ExecutorOptions { deterministic: true, ..cuda_options() },
        ExecutorOptions { tensor_parallel: 2, ..cuda_options() },
    ];
    for (number, other) in others.into_iter().enumerate() {
        assert_ne!(plain, form("llama-gqa", other), "change {number}");
    }
    let cpu = CpuExecutor::load(&open("llama-gqa"), ExecutorOptions { kv: KvDtype::F16, ..cuda_options() });
    let cpu = cpu.unwrap().page_form().unwrap().clone();
    assert_ne!(plain.description, cpu.description, "another order of the same bytes");
}

#[test]
fn wrong_pages_lengths_and_failed_devices_are_errors() {
    for ranks in [(1, 1), (2, 1)] {
        let mut executor = load("llama-gqa", options_of(ranks, Activation::F16, false), "0");
        let bytes = executor.page_form().unwrap().bytes;
        let count = executor.limits().page_count as u32;
        let mut image = vec![0; bytes];
        assert!(executor.read_pages(&[PageId(count)], &mut image).is_err());
        assert!(executor.write_pages(&[PageId(count)], &image).is_err());
        assert!(executor.read_pages(&[PageId(0), PageId(1)], &mut image).is_err());
        assert!(executor.write_pages(&[PageId(0)], &image[1..]).is_err());
        executor.write_pages(&[PageId(count - 1)], &image).unwrap();
        let error = skep_kernels::KernelError::Driver { call: "cuTest", reason: "a test".to_owned() };
        executor.leader().device.fail(error);
        assert!(executor.read_pages(&[PageId(0)], &mut image).unwrap_err().to_string().contains("cuTest"));
    }
}
