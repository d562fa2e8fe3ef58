//! Compares attention with a double-precision reference, over sequences of different lengths with shuffled pages.

use super::*;
use crate::random::Random;

struct Case {
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
    /// (start, tokens) of each sequence.
    sequences: Vec<(usize, usize)>,
}

fn check_case(random: &mut Random, isa: Isa, format: KvFormat, case: &Case) {
    let pool = WorkerPool::new(2).unwrap();
    let (width, kv_width) = (case.heads * case.head_size, case.kv_heads * case.head_size);
    let rows: usize = case.sequences.iter().map(|(_, tokens)| tokens).sum();
    let page_count: usize = case.sequences.iter().map(|(start, tokens)| (start + tokens).div_ceil(16)).sum();
    let kv = KvLayer::new(format, page_count, case.kv_heads, case.head_size).unwrap();
    let mut free: Vec<u32> = (0..page_count as u32).collect();
    free.sort_by_cached_key(|_| random.next_u64());
    let rounds = isa == Isa::Avx512Bf16 && matches!(format, KvFormat::Bf16 | KvFormat::I8);
    let operand = |x: f32| if rounds { half::bf16::from_f32(x).to_f32() } else { x };
    // One head's key or value after rounding to the storage format, and to that of products. The latter holds stored integers.
    let round = |head: &[f32]| -> Vec<f32> {
        let largest = head.iter().fold(0f32, |all, x| all.max(x.abs()));
        let kept = |x: &f32| match format {
            KvFormat::F32 => *x,
            KvFormat::F16 => half::f16::from_f32(*x).to_f32(),
            KvFormat::Bf16 => operand(*x),
            KvFormat::I8 => (x * (127.0 / largest)).round_ties_even() * (largest / 127.0),
        };
        head.iter().map(kept).collect()
    };
    let mut pages = Vec::new();
    let mut contents = Vec::new();
    for (start, tokens) in &case.sequences {
        let own = free.split_off(free.len() - (start + tokens).div_ceil(16));
        let rows: Vec<(Vec<f32>, Vec<f32>)> =
            (0..start + tokens).map(|_| (random.floats(kv_width), random.floats(kv_width))).collect();
        for (position, (key, value)) in rows.iter().enumerate() {
            // SAFETY: the page belongs to this sequence only, and the rows have the layer's width.
            unsafe { kv.store(isa, own[position / 16], position % 16, key, value) };
        }
        pages.push(own);
        let kept = |row: &Vec<f32>| -> Vec<f32> { row.chunks(case.head_size).flat_map(round).collect() };
        contents.push(rows.iter().map(|(key, value)| (kept(key), kept(value))).collect::<Vec<_>>());
    }
    let stride = width + 3;
    let query: Vec<f32> = random.floats(rows * stride).iter().map(|x| x * 3.0).collect();
    let mut out = vec![f32::NAN; rows * width];
    let mut row = 0;
    let sequences: Vec<AttentionSequence> = case
        .sequences
        .iter()
        .zip(&pages)
        .map(|((start, tokens), pages)| {
            row += tokens;
            AttentionSequence { row: row - tokens, tokens: *tokens, start: *start, pages: pages.clone() }
        })
        .collect();
    let params = AttentionParams {
        heads: case.heads,
        query_stride: stride,
        scale: 0.3,
        window: case.window,
        sinks: &[],
    };
    let batch = AttentionBatch::new(sequences, case.heads / case.kv_heads);
    // The memory of states has what another operation left there.
    pool.scratch(1).fill(f32::NAN);
    attention(&pool, isa, params, &kv, &query, &batch, &mut out).unwrap();
    // The next layer reuses the plan.
    let mut again = vec![f32::NAN; rows * width];
    attention(&pool, isa, params, &kv, &query, &batch, &mut again).unwrap();
    assert!(again == out, "{isa} {format:?}");

    let share = case.heads / case.kv_heads;
    for (sequence, contents) in batch.sequences().iter().zip(&contents) {
        for token in 0..sequence.tokens {
            let position = sequence.start + token;
            let first = case.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..case.heads {
                let column = head / share * case.head_size;
                let query =
                    &query[(sequence.row + token) * stride + head * case.head_size..][..case.head_size];
                let weights: Vec<f64> = (first..=position)
                    .map(|at| {
                        let key = &contents[at].0[column..][..case.head_size];
                        let products = query
                            .iter()
                            .zip(key)
                            .map(|(q, k)| f64::from(operand(params.scale * *q)) * f64::from(*k));
                        products.sum::<f64>().exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                for d in 0..case.head_size {
                    let value = |at: usize| f64::from(contents[at].1[column + d]);
                    let sum: f64 = weights.iter().zip(first..).map(|(weight, at)| weight * value(at)).sum();
                    let terms = weights.iter().zip(first..).map(|(weight, at)| weight * value(at).abs());
                    // Rounding to 8 bits changes a weight by a 256th at most.
                    let rounding = if rounds { terms.sum::<f64>() / total / 256.0 } else { 0.0 };
                    let found = out[(sequence.row + token) * width + head * case.head_size + d];
                    let error = (sum / total - f64::from(found)).abs();
                    assert!(
                        error < 2e-4 + rounding,
                        "{isa} {format:?} position {position} head {head}: off by {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn prefill_decode_windows_and_long_ranges_agree_with_double_precision() {
    let mut random = Random::fresh();
    let cases = [
        Case {
            heads: 9,
            kv_heads: 3,
            head_size: 64,
            window: None,
            sequences: vec![(0, 37), (50, 1), (16, 16)],
        },
        Case { heads: 4, kv_heads: 2, head_size: 24, window: Some(16), sequences: vec![(0, 70), (69, 1)] },
        Case { heads: 2, kv_heads: 1, head_size: 80, window: Some(1), sequences: vec![(15, 3)] },
        Case { heads: 3, kv_heads: 1, head_size: 32, window: None, sequences: vec![(1030, 1), (700, 2)] },
    ];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for format in KvFormat::of_tier(isa) {
            for case in &cases {
                check_case(&mut random, isa, format, case);
            }
        }
    }
}

#[test]
fn pages_and_positions_out_of_range_are_errors() {
    let pool = WorkerPool::new(1).unwrap();
    let kv = KvLayer::new(KvFormat::F16, 2, 1, 16).unwrap();
    let run = |tokens, start, pages: &[u32]| {
        let sequence = AttentionSequence { row: 0, tokens, start, pages: pages.to_vec() };
        let batch = AttentionBatch::new(vec![sequence], 1);
        let params = AttentionParams { heads: 1, query_stride: 16, scale: 1.0, window: None, sinks: &[] };
        attention(&pool, Isa::detect(), params, &kv, &[0.0; 16], &batch, &mut [0.0; 16])
    };
    assert!(run(1, 15, &[1]).is_ok());
    assert!(run(1, 16, &[1]).is_err());
    assert!(run(1, 0, &[2]).is_err());
    assert!(run(2, 0, &[0]).is_err());
}

/// Sequences that share pages, as the letters of each one's blocks of 128 positions and its tokens. Queries are in the last
/// block.
type Shared = [(&'static str, usize)];

/// Computes sequences together and alone, on several numbers of threads and all tiers, and compares the bits. Returns the number
/// of ranges that were shared.
fn check_shared(
    random: &mut Random,
    kv: &KvLayer,
    heads: usize,
    cases: &[(&Shared, Option<usize>)],
) -> usize {
    let mut ranges = 0;
    for ((case, window), threads) in cases.iter().flat_map(|case| [(case, 1), (case, 2), (case, 3)]) {
        let mut row = 0;
        let sequence = |(blocks, tokens): &(&str, usize)| {
            let first = |letter: u8| u32::from(letter - b'a') * BLOCK_PAGES as u32;
            let pages: Vec<u32> = blocks
                .bytes()
                .flat_map(|b| (0..BLOCK_PAGES as u32).map(move |page| first(b) + page))
                .collect();
            row += tokens;
            let start = pages.len() * PAGE_TOKENS - tokens - 20;
            AttentionSequence { row: row - tokens, tokens: *tokens, start, pages }
        };
        let sequences: Vec<AttentionSequence> = case.iter().map(sequence).collect();
        let stride = heads * kv.head_size();
        let query: Vec<f32> = random.floats(row * stride).iter().map(|x| x * 3.0).collect();
        let params = AttentionParams { heads, query_stride: stride, scale: 0.3, window: *window, sinks: &[] };
        let pool = WorkerPool::new(threads).unwrap();
        let share = heads / kv.kv_heads();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported() && kv.format.supported_by(*isa)) {
            let run = |batch: &AttentionBatch| {
                let mut out = vec![f32::NAN; row * stride];
                attention(&pool, isa, params, kv, &query, batch, &mut out).unwrap();
                out
            };
            let batch = AttentionBatch::new(sequences.clone(), share);
            ranges += batch.ranges(share, *window).len();
            let together = run(&batch);
            // Pages before a window have any number if layers with a window keep fewer pages.
            let places = sequences.iter().map(|sequence| {
                let unseen = window.map_or(0, |window| (sequence.start + 1).saturating_sub(window));
                let mut pages = sequence.pages.clone();
                pages[..unseen / PAGE_TOKENS].fill(FOREIGN_PAGE);
                pages
            });
            let moved = run(&batch.with_pages(places.collect()));
            for sequence in &sequences {
                let alone = run(&AttentionBatch::new(vec![sequence.clone()], share));
                let own = sequence.row * stride..(sequence.row + sequence.tokens) * stride;
                let bits = |out: &[f32]| out[own.clone()].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let what = format!("{isa} {:?} {heads}/{} {window:?} {case:?}", kv.format, kv.kv_heads());
                assert!(bits(&together) == bits(&alone), "{what}");
                assert!(bits(&moved) == bits(&alone), "other places: {what}");
            }
        }
    }
    ranges
}

/// A page that no sequence has.
const FOREIGN_PAGE: u32 = 26 * BLOCK_PAGES as u32;

/// Returns pages for each letter's block, and one page more.
fn letters(random: &mut Random, format: KvFormat, kv_heads: usize, head_size: usize) -> KvLayer {
    let kv = KvLayer::new(format, FOREIGN_PAGE as usize + 1, kv_heads, head_size).unwrap();
    let width = kv_heads * head_size;
    for page in 0..=FOREIGN_PAGE {
        for slot in 0..PAGE_TOKENS {
            let (key, value) = (random.floats(width), random.floats(width));
            // SAFETY: nothing else uses the layer, and the rows have its width.
            unsafe { kv.store(Isa::detect(), page, slot, &key, &value) };
        }
    }
    kv
}

#[test]
fn sequences_that_share_pages_get_the_bits_that_they_get_alone() {
    let mut random = Random::fresh();
    let cases: [(&Shared, Option<usize>); 4] = [
        (&[("abcw", 1), ("abcx", 1), ("abcy", 2), ("abcz", 1)], None),
        (&[("abcdew", 1), ("abcdex", 1), ("abcy", 1), ("z", 3), ("abcdeffgu", 1), ("abcdeffgv", 1)], None),
        (&[("abw", 1), ("abx", 1), ("aby", 1), ("abz", 1), ("abu", 1), ("abv", 40)], None),
        (&[("aaaaaaaaaaaaaaaay", 1), ("aaaaaaaaaaaaaaaaz", 1)], None),
    ];
    for (heads, kv_heads, head_size) in [(9, 3, 64), (4, 2, 24), (8, 8, 80), (6, 1, 32)] {
        for format in KvFormat::of_tier(Isa::detect()) {
            let kv = letters(&mut random, format, kv_heads, head_size);
            assert!(check_shared(&mut random, &kv, heads, &cases) > 0);
        }
    }
}

#[test]
fn windows_that_begin_in_shared_pages_change_no_bits() {
    let mut random = Random::fresh();
    // Windows begin in different blocks, inside of pages and between them.
    let ends: &Shared = &[("abcdefw", 1), ("abcdefxx", 1), ("abcdefyyy", 2), ("abcdefzz", 3), ("abcdu", 1)];
    let branches: &Shared =
        &[("abcdefghw", 1), ("abcdefghijkx", 2), ("abcdy", 1), ("abcdefghv", 40), ("zz", 1)];
    let cases = [(ends, 700), (ends, 600), (branches, 896), (branches, 3000)];
    let cases = cases.map(|(case, window)| (case, Some(window)));
    for (heads, kv_heads, head_size) in [(2, 2, 64), (4, 2, 24), (3, 1, 80)] {
        for format in KvFormat::of_tier(Isa::detect()) {
            let kv = letters(&mut random, format, kv_heads, head_size);
            for case in cases {
                assert!(check_shared(&mut random, &kv, heads, &[case]) > 0, "{case:?} shares nothing");
            }
        }
    }
}
