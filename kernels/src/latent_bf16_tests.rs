//! Compares attention with latents with double precision and the operands that a tier rounds, and its bits across
//! groups of rows.

use super::*;
use crate::random::Random;

const SCALE: f32 = 0.15;
const BLOCK: usize = 128;

/// A layer with the latents of one sequence.
struct Stored {
    layer: LatentLayer,
    pages: Vec<u32>,
    /// For each position, the latent and the padded rotated key that the layer holds.
    positions: Vec<Vec<f32>>,
}

impl Stored {
    /// Stores random latents in shuffled pages. Slots after the last position hold what another sequence has left
    /// there.
    fn new(random: &mut Random, format: KvFormat, [latent, rotated]: [usize; 2], length: usize) -> Self {
        let count = length.div_ceil(16);
        let layer = LatentLayer::new(format, count + 2, latent, rotated).unwrap();
        let mut pages: Vec<u32> = (0..count as u32 + 2).collect();
        pages.sort_by_cached_key(|_| random.next_u64());
        pages.truncate(count);
        let mut positions = Vec::new();
        for at in 0..count * 16 {
            let (values, key) = (random.floats(latent), random.floats(rotated));
            // SAFETY: the page exists, and the slices have the lengths of the layer.
            unsafe { layer.store(Isa::Portable, pages[at / 16], at % 16, &values, &key) };
            let kept = |x: &f32| match format {
                KvFormat::F16 => half::f16::from_f32(*x).to_f32(),
                _ => *x,
            };
            let mut row: Vec<f32> = values.iter().chain(&key).map(kept).collect();
            row.resize(layer.query_width(), 0.0);
            positions.push(row);
        }
        positions.truncate(length);
        Stored { layer, pages, positions }
    }

    /// Computes the last `tokens` positions with queries `[head][tokens][width]`. Returns `[head][tokens][latent]`.
    fn attend(&self, isa: Isa, threads: usize, tokens: usize, queries: &[f32]) -> Vec<f32> {
        let pool = WorkerPool::new(threads).unwrap();
        let heads = queries.len() / (tokens * self.layer.query_width());
        let (start, pages) = (self.positions.len() - tokens, self.pages.clone());
        let batch = AttentionBatch::new(vec![AttentionSequence { row: 0, tokens, start, pages }], heads);
        let mut out = vec![f32::NAN; heads * tokens * self.layer.page.latent];
        pool.scratch(1).fill(f32::NAN);
        latent_attention(&pool, isa, heads, SCALE, &self.layer, queries, &batch, &mut out).unwrap();
        out
    }

    /// Returns the smallest and the largest values that a query of the position at `end - 1` may have. A weight next to
    /// the middle of two BF16 numbers may be rounded to either of them. Weights have the relative error `error` before that.
    fn bounds(&self, end: usize, query: &[f32], operand: impl Fn(f32) -> f32, error: f64) -> Vec<[f64; 2]> {
        let product = |(q, k): (&f32, &f32)| f64::from(operand(SCALE * *q)) * f64::from(operand(*k));
        let score = |row: &Vec<f32>| query.iter().zip(row).map(product).sum::<f64>();
        let scores: Vec<f64> = self.positions[..end].iter().map(score).collect();
        let largest = |scores: &[f64]| scores.iter().copied().fold(f64::MIN, f64::max);
        let all = largest(&scores);
        let total: f64 = scores.iter().map(|score| (score - all).exp()).sum();
        let mut bounds = vec![[0.0; 2]; self.layer.page.latent];
        for (scores, rows) in scores.chunks(BLOCK).zip(self.positions.chunks(BLOCK)) {
            let own = largest(scores);
            let factor = (own - all).exp() / total;
            for (score, row) in scores.iter().zip(rows) {
                let weights = [1.0 - error, 1.0 + error].map(|near| {
                    let weight = ((score - own).exp() * near) as f32;
                    factor * f64::from(operand(weight))
                });
                for ([low, high], value) in bounds.iter_mut().zip(row) {
                    let terms = weights.map(|weight| weight * f64::from(operand(*value)));
                    *low += terms[0].min(terms[1]);
                    *high += terms[0].max(terms[1]);
                }
            }
        }
        bounds
    }
}

fn tiers() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.supported())
}

#[test]
fn only_the_tier_with_bf16_rounds_and_only_latents_in_16_bits() {
    let mut random = Random::fresh();
    let widths = [[16, 0], [16, 2], [48, 24], [96, 40], [144, 24], [512, 64]];
    for (isa, format) in tiers().flat_map(|isa| [(isa, KvFormat::F32), (isa, KvFormat::F16)]) {
        let rounds = isa == Isa::Avx512Bf16 && format == KvFormat::F16;
        let operand = |x: f32| if rounds { half::bf16::from_f32(x).to_f32() } else { x };
        let error = if rounds { 1.3e-4 } else { 2e-5 };
        for (shape, length) in widths.into_iter().flat_map(|shape| [1, 17, 45, 130, 300].map(|n| (shape, n)))
        {
            let stored = Stored::new(&mut random, format, shape, length);
            let (width, latent) = (stored.layer.query_width(), shape[0]);
            let (heads, tokens) = (1 + random.below(13), 1 + random.below(length.min(3)));
            let queries: Vec<f32> =
                random.floats(heads * tokens * width).into_iter().map(|x| 2.0 * x).collect();
            let out = stored.attend(isa, 1 + random.below(3), tokens, &queries);
            for (at, (query, out)) in queries.chunks(width).zip(out.chunks(latent)).enumerate() {
                let end = length - tokens + at % tokens + 1;
                for ([low, high], found) in stored.bounds(end, query, operand, error).into_iter().zip(out) {
                    let found = f64::from(*found);
                    // The sum of the weights has their error, too.
                    let slack = 2e-5 + error * found.abs();
                    assert!(
                        low - slack < found && found < high + slack,
                        "{isa} {format:?} {shape:?}, {heads} heads, position {}: {found} is not in {low}..{high}",
                        end - 1
                    );
                }
            }
        }
    }
}

/// Each number of rows up to that of a call is a function of its own. With few positions, rounded weights do not hide
/// scores of other sums.
#[test]
fn a_row_has_the_same_bits_with_every_number_of_heads_and_tokens() {
    const HEADS: usize = 13;
    let mut random = Random::fresh();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    for (isa, format) in tiers().flat_map(|isa| [(isa, KvFormat::F32), (isa, KvFormat::F16)]) {
        for (shape, length) in [([48, 0], 3), ([144, 24], 300), ([512, 64], 3), ([512, 64], 200)] {
            let stored = Stored::new(&mut random, format, shape, length);
            let (width, latent) = (stored.layer.query_width(), shape[0]);
            let queries: Vec<f32> = random.floats(HEADS * 3 * width).into_iter().map(|x| 3.0 * x).collect();
            let whole = stored.attend(isa, 1, 3, &queries);
            let last = |values: &[f32], width: usize| -> Vec<f32> {
                values.chunks(3 * width).flat_map(|head| head[2 * width..].to_vec()).collect()
            };
            let (last_queries, last_values) = (last(&queries, width), last(&whole, latent));
            for heads in 1..=HEADS {
                for threads in [1, 2, 7] {
                    let found = stored.attend(isa, threads, 3, &queries[..heads * 3 * width]);
                    let what = format!("{isa} {format:?} {shape:?}, {length} positions, {heads} heads");
                    assert!(bits(&found) == bits(&whole[..found.len()]), "{what}");
                    let found = stored.attend(isa, threads, 1, &last_queries[..heads * width]);
                    assert!(bits(&found) == bits(&last_values[..found.len()]), "{what}, one token");
                }
            }
        }
    }
}
