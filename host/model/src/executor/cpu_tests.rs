//! Compares tiny models with exact logits, however a sequence is split into steps and whatever shares its batch.

use super::super::fixture::{
    DENSE, MODELS, PACKED, WIDE, exact, expected, folder, load, options, relative_error, sequence, supported,
};
use super::*;
use crate::batch::{BatchSequence, LogitsWanted, PageId};
use crate::executor::{CpuAffinity, KvDtype};
use crate::sampling::ScoreRow;

#[test]
fn every_architecture_tier_and_chunking_gives_the_exact_logits() {
    for name in MODELS {
        let (ids, logits) = expected(name);
        let width = logits.len() / ids.len();
        for isa in supported() {
            let mut executor = load(name, exact(isa)).unwrap();
            for chunk in [ids.len(), 23, 1] {
                for (index, tokens) in ids.chunks(chunk).enumerate() {
                    let start = index * chunk;
                    let rows = sequence(tokens, start, 9, LogitsWanted::All);
                    executor.forward(&Batch { sequences: vec![rows] }).unwrap();
                    for row in 0..tokens.len() {
                        let exact = &logits[(start + row) * width..][..width];
                        let error = relative_error(executor.logits(row).unwrap(), exact);
                        assert!(
                            error < 1e-3,
                            "{name} {isa} chunks of {chunk}, token {}: {error}",
                            start + row
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn keys_and_values_with_fewer_bits_stay_close_to_the_exact_logits() {
    for name in MODELS {
        let (ids, exact) = expected(name);
        for (kv, bound) in [(KvDtype::F16, 2e-2), (KvDtype::I8, 5e-2)] {
            for isa in supported() {
                let mut executor = load(name, ExecutorOptions { kv, ..options(isa) }).unwrap();
                let rows = sequence(&ids, 0, 20, LogitsWanted::All);
                executor.forward(&Batch { sequences: vec![rows] }).unwrap();
                let found: Vec<f32> =
                    (0..ids.len()).flat_map(|row| executor.logits(row).unwrap().to_vec()).collect();
                let rows = found.chunks(found.len() / ids.len()).zip(exact.chunks(exact.len() / ids.len()));
                let largest = exact.iter().fold(0f32, |all, x| all.max(x.abs()));
                let furthest = |(found, exact): (&[f32], &[f32])| {
                    found.iter().zip(exact).fold(0f32, |all, (a, b)| all.max((a - b).abs()))
                };
                let errors: Vec<f32> = rows.map(|rows| furthest(rows) / largest).collect();
                // Twice as many layers, each of which normalizes its outputs again, carry twice the rounding.
                let bound = if name == "gemma3" { 2.0 * bound } else { bound };
                // If two experts of a random router score alike, a small difference chooses the other one, which also changes what
                // later rows attend to.
                let has_router = !DENSE.contains(&name) && name != "gemma3";
                // The operands of attention have 8 bits of precision.
                let rounding = if has_router { 4.0 } else { 2.0 };
                let bound = if isa == Isa::Avx512Bf16 { rounding * bound } else { bound };
                let outliers = errors.iter().filter(|error| **error >= bound).count();
                let allowed = if has_router { ids.len() / 4 } else { 0 };
                assert!(outliers <= allowed, "{name} {kv} {isa}: {outliers} rows of {errors:?}");
            }
        }
    }
}

#[test]
fn latents_of_published_widths_with_fewer_bits_stay_close_to_the_exact_logits() {
    let (ids, exact) = expected(WIDE);
    let width = exact.len() / ids.len();
    for (kv, bound) in [(KvDtype::F16, 2e-2), (KvDtype::I8, 5e-2)] {
        for isa in supported() {
            let options = ExecutorOptions { kv, max_logit_rows: 256, ..options(isa) };
            let mut executor = load(WIDE, options).unwrap();
            let rows = sequence(&ids, 0, 20, LogitsWanted::All);
            executor.forward(&Batch { sequences: vec![rows] }).unwrap();
            let error =
                |row: usize| relative_error(executor.logits(row).unwrap(), &exact[row * width..][..width]);
            let outliers = (0..ids.len()).filter(|row| error(*row) >= bound).count();
            // If two experts score alike, a small difference chooses the other one.
            assert!(outliers <= ids.len() / 4, "{kv} {isa}: {outliers} rows");
        }
    }
}

#[test]
fn packed_experts_stay_close_to_the_exact_logits_and_expanded_ones_are_exact() {
    let (ids, exact) = expected(PACKED);
    let width = exact.len() / ids.len();
    for isa in supported() {
        for (exact_weights, bound, allowed) in [(true, 1e-3, 0), (false, 5e-2, ids.len() / 4)] {
            let mut executor = load(PACKED, ExecutorOptions { exact_weights, ..options(isa) }).unwrap();
            let rows = sequence(&ids, 0, 9, LogitsWanted::All);
            executor.forward(&Batch { sequences: vec![rows] }).unwrap();
            let errors: Vec<f32> = (0..ids.len())
                .map(|row| relative_error(executor.logits(row).unwrap(), &exact[row * width..][..width]))
                .collect();
            let outliers = errors.iter().filter(|error| **error >= bound).count();
            assert!(outliers <= allowed, "{isa} exact {exact_weights}: {outliers} rows of {errors:?}");
        }
    }
}

#[test]
fn a_sequence_gets_the_same_logits_in_any_batch() {
    for name in MODELS {
        let (ids, logits) = expected(name);
        let width = logits.len() / ids.len();
        for isa in supported() {
            let mut executor = load(name, exact(isa)).unwrap();
            let reversed: Vec<u32> = ids.iter().rev().copied().collect();
            // A decode of one sequence between prefill chunks of two others.
            let first = vec![sequence(&ids[..50], 0, 9, LogitsWanted::None)];
            executor.forward(&Batch { sequences: first }).unwrap();
            let mixed = vec![
                sequence(&reversed[..33], 0, 19, LogitsWanted::Last),
                sequence(&ids[50..51], 50, 9, LogitsWanted::Last),
                sequence(&reversed[..20], 0, 29, LogitsWanted::None),
            ];
            executor.forward(&Batch { sequences: mixed }).unwrap();
            let error = relative_error(executor.logits(1).unwrap(), &logits[50 * width..][..width]);
            assert!(error < 1e-3, "{name} {isa}: {error}");
            let rest = vec![
                sequence(&reversed[33..60], 33, 19, LogitsWanted::All),
                sequence(&ids[51..], 51, 9, LogitsWanted::All),
            ];
            executor.forward(&Batch { sequences: rest }).unwrap();
            for (row, token) in (51..ids.len()).enumerate() {
                let exact = &logits[token * width..][..width];
                let error = relative_error(executor.logits(27 + row).unwrap(), exact);
                assert!(error < 1e-3, "{name} {isa} token {token}: {error}");
            }
        }
    }
}

#[test]
fn rejects_batches_that_do_not_fit_and_stays_usable() {
    let mut executor = load("llama-gqa", options(Isa::detect())).unwrap();
    let good = sequence(&[5, 6, 7], 0, 9, LogitsWanted::Last);
    let with = |change: fn(&mut BatchSequence)| {
        let mut changed = good.clone();
        change(&mut changed);
        Batch { sequences: vec![changed] }
    };
    for (bad, word) in [
        (with(|rows| rows.tokens[1] = 320), "vocabulary"),
        (with(|rows| rows.pages[0] = PageId(32)), "page"),
        (with(|rows| rows.pages.clear()), "pages"),
        (with(|rows| rows.start = 510), "context"),
        (with(|rows| rows.start = usize::MAX), "context"),
        (with(|rows| rows.tokens = vec![1; 513]), "tokens"),
        (Batch { sequences: vec![good.clone(); 65] }, "sequences"),
    ] {
        let error = executor.forward(&bad).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert!(executor.logits(0).is_err());
    }
    executor.forward(&Batch { sequences: vec![good] }).unwrap();
    assert!(executor.logits(0).is_ok() && executor.logits(1).is_err());
    let score = LogitRow::Score(ScoreRow { row: 0, target: 3, top: 2 });
    let scored = executor.sample(&[score]).unwrap();
    assert!(scored[0].logprob.unwrap() < 0.0 && scored[0].top.len() == 2);
    assert!(executor.sample(&[LogitRow::Score(ScoreRow { row: 1, target: 3, top: 2 })]).is_err());
    executor.forward(&Batch::default()).unwrap();
}

#[test]
fn rejects_invalid_options_by_name() {
    let base = options(Isa::detect());
    for (options, name) in [
        (ExecutorOptions { threads: Some(0), ..base.clone() }, "threads"),
        (ExecutorOptions { kv_tokens: Some(0), ..base.clone() }, "kv_tokens"),
        (ExecutorOptions { max_batch_tokens: 0, ..base.clone() }, "max_batch_tokens"),
        (ExecutorOptions { tensor_parallel: 0, ..base.clone() }, "tensor_parallel"),
        (ExecutorOptions { tensor_parallel: 3, ..base.clone() }, "tensor_parallel: 3 does not divide the 4"),
        (ExecutorOptions { pipeline_parallel: 0, ..base.clone() }, "pipeline_parallel"),
        (
            ExecutorOptions { pipeline_parallel: 4, ..base.clone() },
            "pipeline_parallel: 3 layers cannot be divided into 4",
        ),
        (ExecutorOptions { rank_deadline: std::time::Duration::ZERO, ..base.clone() }, "rank_deadline"),
        // A CPU executor is one rank.
        (ExecutorOptions { tensor_parallel: 2, ..base.clone() }, "tensor_parallel: is 1"),
    ] {
        let error = load("llama-gqa", options).err().unwrap().to_string();
        assert!(error.starts_with(name), "{error}");
    }
}

#[test]
fn replicas_share_weights_and_nothing_else() {
    let (ids, exact) = expected("llama-gqa");
    let width = exact.len() / ids.len();
    let checkpoint = Checkpoint::open(&folder("llama-gqa")).unwrap();
    let options = options(Isa::detect());
    let weights = ModelWeights::load(&checkpoint, &options).unwrap();
    let mut replicas: Vec<CpuExecutor> =
        (0..3).map(|_| CpuExecutor::new(&weights, options.clone()).unwrap()).collect();
    drop(weights);
    // Each replica first computes a different half of the sequence, in the same pages.
    let halves = [&ids[..40], &ids[40..], &ids[20..60]];
    for (replica, tokens) in replicas.iter_mut().zip(halves) {
        let rows = sequence(tokens, 0, 9, LogitsWanted::None);
        replica.forward(&Batch { sequences: vec![rows] }).unwrap();
    }
    let rest = Batch { sequences: vec![sequence(&ids[40..], 40, 9, LogitsWanted::Last)] };
    let mut errors = replicas.iter_mut().map(|replica| {
        replica.forward(&rest).unwrap();
        relative_error(replica.logits(0).unwrap(), &exact[(ids.len() - 1) * width..])
    });
    assert!(errors.next().unwrap() < 1e-3, "the replica with the first half must match");
    assert!(errors.all(|error| error > 1e-2), "the others have a different history");
}

#[test]
fn pinned_executors_compute_the_same_and_need_a_cpu_for_each_thread() {
    let (ids, exact) = expected("llama-gqa");
    let pinned = |threads: usize| {
        let affinity = CpuAffinity::Pinned(0);
        load("llama-gqa", ExecutorOptions { affinity, threads: Some(threads), ..options(Isa::detect()) })
    };
    let mut executor = pinned(skep_kernels::affinity::cpus().len()).unwrap();
    let rows = sequence(&ids, 0, 9, LogitsWanted::Last);
    executor.forward(&Batch { sequences: vec![rows] }).unwrap();
    let exact = &exact[exact.len() - executor.limits.vocabulary_size..];
    assert!(relative_error(executor.logits(0).unwrap(), exact) < 1e-3);
    let error = pinned(skep_kernels::pool::MAX_THREADS).err().map(|error| error.to_string());
    if skep_kernels::affinity::cpus().len() < skep_kernels::pool::MAX_THREADS {
        assert!(error.is_some_and(|error| error.contains("need a CPU each")));
    }
}

#[test]
fn the_plan_counts_weights_and_pages() {
    let executor = load("llama-gqa", options(Isa::detect())).unwrap();
    // 3 layers, keys and values, 2 KV heads of size 16, 512 tokens, 4 bytes.
    assert_eq!(executor.plan().kv_bytes, 3 * 2 * 2 * 16 * 512 * 4);
    let small = load("llama-gqa", ExecutorOptions { kv: KvDtype::I8, ..options(Isa::detect()) }).unwrap();
    // One byte instead of 4, and a scale for each 16 values.
    assert_eq!(small.plan().kv_bytes, 3 * 2 * 2 * 512 * (16 + 4));
    let file = std::fs::metadata(folder("llama-gqa").join("model.safetensors")).unwrap().len();
    assert!(executor.plan().weight_bytes <= file && executor.plan().weight_bytes > file / 2);
}

/// Threads wait for each other between two operations that they share. In a decode, this waiting is most of the cost
/// of the operations beside reading the weights. The operations are: queries with keys and values, attention, its
/// output, gate with up, down.
#[test]
fn a_decode_step_has_five_barriers_per_layer_and_one_for_the_head() {
    for name in DENSE {
        let (ids, _) = expected(name);
        let mut executor =
            load(name, ExecutorOptions { threads: Some(2), ..options(Isa::detect()) }).unwrap();
        let mut barriers = |start: usize, tokens: &[u32]| {
            let before = executor.rank.compute.pool.barriers();
            let rows = sequence(tokens, start, 9, LogitsWanted::Last);
            executor.forward(&Batch { sequences: vec![rows] }).unwrap();
            executor.rank.compute.pool.barriers() - before
        };
        barriers(0, &ids[..40]);
        let layers = Checkpoint::open(&folder(name)).unwrap().config().layer_count as u64;
        assert_eq!(barriers(40, &ids[40..41]), 5 * layers + 1, "{name}");
    }
}

#[test]
fn fp8_keys_and_values_are_refused_with_the_format_to_use_instead() {
    for tensor_parallel in [1, 2] {
        let options = ExecutorOptions { kv: KvDtype::Fp8, tensor_parallel, ..options(Isa::detect()) };
        let checkpoint = Checkpoint::open(&folder("llama-gqa")).unwrap();
        let error = ModelWeights::load(&checkpoint, &options).err().expect("it must be refused").to_string();
        assert!(error.contains("kv") && error.contains("use i8 on the CPU"), "{error}");
    }
}
