//! Pages that leave one executor and continue in another: every kind of attention, format and division.

use skep_kernels::Isa;

use super::super::fixture::{MODELS, PACKED, expected, folder, options, sequence};
use super::super::{Executor, ExecutorOptions, KvDtype, ModelWeights, WeightConversion};
use crate::batch::{Batch, LogitsWanted, PAGE_TOKENS, PageId};
use crate::checkpoint::Checkpoint;

/// Number of tokens whose pages are moved.
const MOVED: usize = 3 * PAGE_TOKENS;
/// Number of tokens that are drawn after them.
const DRAWN: usize = 12;

fn executor(
    name: &str,
    (tensor_parallel, pipeline_parallel): (usize, usize),
    kv: KvDtype,
) -> Box<dyn Executor> {
    let options = ExecutorOptions { tensor_parallel, pipeline_parallel, kv, ..options(Isa::detect()) };
    let checkpoint = Checkpoint::open(&folder(name)).unwrap();
    ModelWeights::load(&checkpoint, &options).unwrap().executor(options).unwrap()
}

/// Returns pages as `sequence` numbers them.
fn pages(first_page: u32) -> Vec<PageId> {
    (0..(MOVED / PAGE_TOKENS) as u32).map(|page| PageId(first_page - page)).collect()
}

fn read(executor: &mut dyn Executor, first_page: u32) -> Vec<u8> {
    let bytes = executor.page_form().unwrap().bytes;
    let mut image = vec![0; bytes * MOVED / PAGE_TOKENS];
    executor.read_pages(&pages(first_page), &mut image).unwrap();
    image
}

/// Draws greedily behind the moved pages, and returns the tokens and all logits.
fn greedy(executor: &mut dyn Executor, next: u32, first_page: u32) -> (Vec<u32>, Vec<f32>) {
    let (mut tokens, mut logits) = (vec![next], Vec::new());
    for at in 0..DRAWN {
        let step = sequence(&tokens[at..], MOVED + at, first_page, LogitsWanted::Last);
        executor.forward(&Batch { sequences: vec![step] }).unwrap();
        let row = executor.logits(0).unwrap();
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        logits.extend_from_slice(row);
        tokens.push(best as u32);
    }
    (tokens, logits)
}

#[test]
fn a_sequence_continues_from_imported_pages_with_the_same_bits() {
    for name in MODELS.into_iter().chain([PACKED]) {
        let (ids, _) = expected(name);
        for kv in [KvDtype::F32, KvDtype::F16, KvDtype::I8] {
            for (from, to) in [((1, 1), (1, 1)), ((1, 1), (1, 3)), ((2, 1), (2, 1)), ((2, 2), (2, 1))] {
                let mut first = executor(name, from, kv);
                let prompt = sequence(&ids[..MOVED], 0, 9, LogitsWanted::None);
                first.forward(&Batch { sequences: vec![prompt] }).unwrap();
                let image = read(first.as_mut(), 9);
                let mut second = executor(name, to, kv);
                assert_eq!(first.page_form(), second.page_form(), "{name} {kv} {from:?} {to:?}");
                second.write_pages(&pages(20), &image).unwrap();
                assert_eq!(read(second.as_mut(), 20), image, "{name} {kv} {from:?} {to:?}: a round trip");
                let computed = greedy(first.as_mut(), ids[MOVED], 9);
                let imported = greedy(second.as_mut(), ids[MOVED], 20);
                assert_eq!(imported, computed, "{name} {kv} {from:?} {to:?}");
            }
        }
    }
}

#[test]
fn pages_of_another_computation_have_another_layout() {
    let form = |name: &str, change: &dyn Fn(&mut ExecutorOptions)| {
        let mut options = options(Isa::detect());
        change(&mut options);
        let checkpoint = Checkpoint::open(&folder(name)).unwrap();
        let executor = ModelWeights::load(&checkpoint, &options).unwrap().executor(options).unwrap();
        executor.page_form().unwrap().clone()
    };
    let plain = form("llama-gqa", &|_| {});
    assert_eq!(plain, form("llama-gqa", &|options| options.threads = Some(1)));
    assert_eq!(plain, form("llama-gqa", &|options| options.kv_tokens = Some(64)));
    let others: [&dyn Fn(&mut ExecutorOptions); 6] = [
        &|options| options.kv = KvDtype::F16,
        &|options| options.tensor_parallel = 2,
        &|options| options.exact_weights = true,
        &|options| options.weights = WeightConversion::Q8_0,
        &|options| options.weights = WeightConversion::Bf16,
        &|options| options.isa = Some(Isa::Portable),
    ];
    for (index, other) in others.into_iter().enumerate() {
        assert_ne!(plain, form("llama-gqa", other), "change {index}");
    }
    let models = MODELS.map(|name| form(name, &|_| {}).description);
    for (index, one) in models.iter().enumerate() {
        assert!(!models[..index].contains(one), "{} has the form of another model", MODELS[index]);
    }
}

#[test]
fn wrong_pages_and_lengths_are_errors() {
    for division in [(1, 1), (2, 1)] {
        let mut executor = executor("llama-gqa", division, KvDtype::F16);
        let bytes = executor.page_form().unwrap().bytes;
        let count = executor.limits().page_count as u32;
        let mut image = vec![0; bytes];
        assert!(executor.read_pages(&[PageId(count)], &mut image).is_err());
        assert!(executor.write_pages(&[PageId(count)], &image).is_err());
        assert!(executor.read_pages(&[PageId(0), PageId(1)], &mut image).is_err());
        assert!(executor.write_pages(&[PageId(0)], &image[1..]).is_err());
        executor.write_pages(&[PageId(0)], &image).unwrap();
    }
}
