//! Tests that every operation gives a row the same bits regardless of the other rows in the batch, its position among
//! them, and the number of threads.
//!
//! Each test computes every row alone on one thread, and then in random batches on pools of several sizes.

use crate::attention::{AttentionBatch, AttentionParams, AttentionSequence, attention};
use crate::buffer::Arena;
use crate::gather::gather;
use crate::kv::{KvFormat, KvLayer, PAGE_TOKENS};
use crate::matmul::{Activations, PackedMatrix, Projection, matmul, random_weights};
use crate::qkv::{HeadParams, rotate_and_store};
use crate::random::Random;
use crate::residual::{Norm, add_norm};
use crate::rms_norm::rms_norm;
use crate::rope::{Pairing, rotary_table};
use crate::softmax::log_sum_exp;
use crate::swiglu::swiglu;
use crate::{DType, Isa, WorkerPool};

const THREADS: [usize; 5] = [1, 2, 3, 4, 7];

fn tiers() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.supported())
}

fn pools() -> Vec<WorkerPool> {
    THREADS.iter().map(|threads| WorkerPool::new(*threads).unwrap()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the indices of rows to compute together, in random order and with repetitions.
fn company(random: &mut Random, rows: usize, count: usize) -> Vec<usize> {
    (0..count).map(|_| random.below(rows)).collect()
}

/// Checks an operation over rows of `width` values, whose output rows may have any width. `run` gets the rows side by
/// side.
fn check_rows(
    random: &mut Random,
    what: &str,
    width: usize,
    run: impl Fn(&WorkerPool, Isa, &[f32]) -> Vec<f32>,
) {
    const ROWS: usize = 70;
    let input = random.floats(ROWS * width);
    let pools = pools();
    for isa in tiers() {
        let row = |row: usize| &input[row * width..][..width];
        let alone: Vec<Vec<u32>> = (0..ROWS).map(|at| bits(&run(&pools[0], isa, row(at)))).collect();
        for (pool, threads) in pools.iter().zip(THREADS) {
            for count in [2, 3, 7, 8, 9, 33, 64, 130] {
                let picked = company(random, ROWS, count);
                // Misaligns the rows.
                let mut together = vec![0.0; count % 5];
                picked.iter().for_each(|at| together.extend_from_slice(row(*at)));
                let found = run(pool, isa, &together[count % 5..]);
                for (at, found) in picked.iter().zip(found.chunks_exact(found.len() / count)) {
                    assert!(bits(found) == alone[*at], "{what} {isa}, {count} rows, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn norms_gates_sums_and_log_sums_do_not_depend_on_other_rows() {
    let mut random = Random::fresh();
    for width in [24, 577, 1536] {
        let weight = random.floats(width);
        check_rows(&mut random, "rms_norm", width, |pool, isa, rows| {
            let mut out = vec![0.0; rows.len()];
            rms_norm(pool, isa, rows, &weight, 1e-5, &mut out).unwrap();
            out
        });
        let half = width / 2;
        let (whole, norm) = (half * 2, Norm { weight: &weight[..half], epsilon: 1e-5 });
        check_rows(&mut random, "add_norm", whole, |pool, isa, rows| {
            let mut hidden: Vec<f32> = rows.chunks(whole).flat_map(|row| row[..half].to_vec()).collect();
            let addend: Vec<f32> = rows.chunks(whole).flat_map(|row| row[half..].to_vec()).collect();
            let mut normed = vec![0.0; hidden.len()];
            add_norm(pool, isa, &mut hidden, &addend, norm, &mut normed).unwrap();
            let pairs = hidden.chunks(half).zip(normed.chunks(half));
            pairs.flat_map(|(hidden, normed)| [hidden, normed].concat()).collect()
        });
        check_rows(&mut random, "swiglu", whole, |pool, isa, rows| {
            let mut out = vec![0.0; rows.len() / 2];
            swiglu(pool, isa, rows, half, &mut out).unwrap();
            out
        });
        check_rows(&mut random, "log_sum_exp", width, |_, isa, rows| {
            rows.chunks(width).map(|row| log_sum_exp(isa, row)).collect()
        });
    }
}

/// A residual sum may be computed separately, as between pipeline stages, or in the same pass as the norm.
#[test]
fn add_norm_has_the_same_bits_as_a_sum_and_then_a_norm() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(2).unwrap();
    for isa in tiers() {
        for width in [24, 577] {
            let (hidden, addend) = (random.floats(3 * width), random.floats(3 * width));
            let weight = random.floats(width);
            let sums: Vec<f32> = hidden.iter().zip(&addend).map(|(a, b)| a + b).collect();
            let (mut apart, mut together) = (vec![0.0; 3 * width], vec![0.0; 3 * width]);
            rms_norm(&pool, isa, &sums, &weight, 1e-5, &mut apart).unwrap();
            let mut hidden = hidden;
            let norm = Norm { weight: &weight, epsilon: 1e-5 };
            add_norm(&pool, isa, &mut hidden, &addend, norm, &mut together).unwrap();
            assert_eq!((bits(&hidden), bits(&together)), (bits(&sums), bits(&apart)), "{isa} {width}");
        }
    }
}

#[test]
fn products_of_every_format_do_not_depend_on_other_rows() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(2).unwrap();
    for dtype in DType::ALL {
        // Covers partial tiles, two matrices with one input, and column counts that are not multiples of 4 for formats
        // without blocks.
        let columns = if dtype.is_quantized() { 256 } else { 99 };
        let mut pack = |rows: usize| {
            let data = random_weights(&mut random, dtype, rows, columns);
            PackedMatrix::pack(&pool, &mut Arena::default(), dtype, rows, columns, &data).unwrap()
        };
        let (first, second) = (pack(85), pack(16));
        let bias = random.floats(101);
        check_rows(&mut random, &format!("matmul of {dtype}"), columns, |pool, isa, rows| {
            let tokens = rows.len() / columns;
            let mut out = vec![0.0; tokens * 101];
            let projection = Projection { matrices: &[&first, &second], bias: &bias };
            matmul(pool, isa, projection, rows, tokens, &mut out, &mut Activations::default()).unwrap();
            out
        });
    }
}

#[test]
fn embeddings_do_not_depend_on_other_tokens() {
    let mut random = Random::fresh();
    let pools = pools();
    for dtype in DType::ALL {
        let data = random_weights(&mut random, dtype, 40, 256);
        let table = PackedMatrix::pack(&pools[0], &mut Arena::default(), dtype, 40, 256, &data).unwrap();
        for isa in tiers() {
            let rows = |pool: &WorkerPool, tokens: &[u32]| {
                let mut out = vec![0.0; tokens.len() * 256];
                gather(pool, isa, &table, tokens, &mut out).unwrap();
                out
            };
            let alone: Vec<Vec<f32>> = (0..40).map(|token| rows(&pools[0], &[token])).collect();
            for pool in &pools {
                let tokens: Vec<u32> =
                    company(&mut random, 40, 90).into_iter().map(|row| row as u32).collect();
                for (token, found) in tokens.iter().zip(rows(pool, &tokens).chunks(256)) {
                    assert_eq!(bits(found), bits(&alone[*token as usize]), "{dtype} {isa}");
                }
            }
        }
    }
}

/// The shape of an attention layer, and the window of its queries.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
}

/// A KV pool, and the pages of each sequence in it.
struct Pages {
    kv: KvLayer,
    own: Vec<Vec<u32>>,
}

impl Pages {
    /// Assigns shuffled pages to sequences of the given lengths. The pool has one page more than they need.
    fn new(random: &mut Random, format: KvFormat, shape: Shape, lengths: &[usize]) -> Self {
        let counts: Vec<usize> = lengths.iter().map(|tokens| tokens.div_ceil(PAGE_TOKENS)).collect();
        let total = counts.iter().sum::<usize>() + 1;
        let kv = KvLayer::new(format, total, shape.kv_heads, shape.head_size).unwrap();
        let mut free: Vec<u32> = (0..total as u32).collect();
        free.sort_by_cached_key(|_| random.next_u64());
        let own = counts.iter().map(|count| free.split_off(free.len() - count)).collect();
        Pages { kv, own }
    }

    /// Fills the pages with random values, as if another sequence had used them before.
    fn soil(&self, random: &mut Random, isa: Isa, shape: Shape) {
        let width = shape.kv_heads * shape.head_size;
        for page in self.own.iter().flatten() {
            for slot in 0..PAGE_TOKENS {
                let (key, value) = (random.floats(width), random.floats(width));
                // SAFETY: the page belongs to the pool, and the rows have the layer's width.
                unsafe { self.kv.store(isa, *page, slot, &key, &value) };
            }
        }
    }
}

/// Projected rows of several sequences, each in order of position.
struct Rows {
    values: Vec<Vec<Vec<f32>>>,
    lengths: Vec<usize>,
}

/// Consecutive positions of a sequence.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    sequence: usize,
    start: usize,
    tokens: usize,
}

impl Rows {
    fn random(random: &mut Random, shape: Shape, lengths: &[usize]) -> Self {
        let width = (shape.heads + 2 * shape.kv_heads) * shape.head_size;
        let mut row = || random.floats(width).iter().map(|x| x * 2.0).collect();
        let values = lengths.iter().map(|tokens| (0..*tokens).map(|_| row()).collect()).collect();
        Rows { values, lengths: lengths.to_vec() }
    }

    /// Rotates and stores the rows of the chunks in one call and computes their attention in another; returns the output of
    /// each row.
    fn step(
        &self,
        pool: &WorkerPool,
        isa: Isa,
        shape: Shape,
        pages: &mut Pages,
        chunks: &[Chunk],
    ) -> Vec<Vec<u32>> {
        let Shape { heads, head_size, window, .. } = shape;
        let rows_of = |chunk: &Chunk| &self.values[chunk.sequence][chunk.start..][..chunk.tokens];
        let mut rows: Vec<f32> = chunks.iter().flat_map(rows_of).flatten().copied().collect();
        let mut row = 0;
        let sequence = |chunk: &Chunk| {
            row += chunk.tokens;
            let pages = pages.own[chunk.sequence].clone();
            AttentionSequence { row: row - chunk.tokens, tokens: chunk.tokens, start: chunk.start, pages }
        };
        let sequences = chunks.iter().map(sequence).collect();
        let batch = AttentionBatch::new(sequences, heads / pages.kv.kv_heads());
        let count: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
        let positions: Vec<usize> =
            chunks.iter().flat_map(|chunk| chunk.start..chunk.start + chunk.tokens).collect();
        let frequencies: Vec<f32> = (0..head_size / 2).map(|at| 0.1f32.powi(at as i32 % 5)).collect();
        let mut table = Vec::new();
        rotary_table(&positions, &frequencies, &mut table);
        let weight = vec![0.75; head_size];
        let norm = Norm { weight: &weight, epsilon: 1e-5 };
        let params =
            HeadParams { heads, rotated: head_size, pairing: Pairing::Halves, norms: Some((norm, norm)) };
        rotate_and_store(pool, isa, params, &mut rows, &table, batch.sequences(), &mut pages.kv).unwrap();
        let query_stride = rows.len() / count;
        let params = AttentionParams { heads, query_stride, scale: 0.3, window, sinks: &[] };
        let mut out = vec![f32::NAN; count * heads * head_size];
        attention(pool, isa, params, &pages.kv, &rows, &batch, &mut out).unwrap();
        out.chunks(heads * head_size).map(bits).collect()
    }
}

/// Computes two sequences token by token on one thread, and then in random chunks of both, in different pages that were
/// written before, with draft rows at the ends of chunks that are computed again, on several pools.
fn check_attention(random: &mut Random, format: KvFormat, shape: Shape) {
    let lengths = [420, 150];
    let rows = Rows::random(random, shape, &lengths);
    let pools = pools();
    for isa in tiers().filter(|isa| format.supported_by(*isa)) {
        let mut pages = Pages::new(random, format, shape, &lengths);
        let mut alone: Vec<Vec<Vec<u32>>> = vec![Vec::new(); 2];
        for sequence in 0..2 {
            for start in 0..lengths[sequence] {
                let chunk = Chunk { sequence, start, tokens: 1 };
                alone[sequence].extend(rows.step(&pools[0], isa, shape, &mut pages, &[chunk]));
            }
        }
        for (pool, threads) in pools.iter().zip(THREADS) {
            let mut pages = Pages::new(random, format, shape, &lengths);
            pages.soil(random, isa, shape);
            let mut done = [0, 0];
            while done != lengths {
                let mut chunks = Vec::new();
                for sequence in [1, 0] {
                    let left = rows.lengths[sequence] - done[sequence];
                    let tokens = match random.below(4) {
                        0 => 1,
                        1 => 1 + random.below(4),
                        2 => 1 + random.below(40),
                        _ => 1 + random.below(250),
                    };
                    if left > 0 && random.below(5) > 0 {
                        chunks.push(Chunk { sequence, start: done[sequence], tokens: tokens.min(left) });
                    }
                }
                if chunks.is_empty() {
                    continue;
                }
                let found = rows.step(pool, isa, shape, &mut pages, &chunks);
                let mut found = found.into_iter();
                for Chunk { sequence, start, tokens } in chunks {
                    let expected = alone[sequence].iter().enumerate().skip(start).take(tokens);
                    for (position, expected) in expected {
                        assert!(
                            found.next().unwrap() == *expected,
                            "{isa} {format:?} {shape:?} position {position}, {threads} threads"
                        );
                    }
                    // The last rows may be drafts, which are computed again.
                    done[sequence] = start + tokens - random.below(tokens.min(5));
                }
            }
        }
    }
}

#[test]
fn attention_does_not_depend_on_chunks_neighbors_or_threads() {
    let mut random = Random::fresh();
    let shapes = [
        Shape { heads: 9, kv_heads: 3, head_size: 64, window: None },
        Shape { heads: 4, kv_heads: 4, head_size: 24, window: Some(150) },
        Shape { heads: 8, kv_heads: 1, head_size: 80, window: None },
        Shape { heads: 2, kv_heads: 1, head_size: 32, window: Some(20) },
    ];
    for format in KvFormat::ALL {
        for shape in shapes {
            check_attention(&mut random, format, shape);
        }
    }
}
