//! Compares attention with latents with double precision, and its bits across chunks, batches and threads.

use super::*;
use crate::random::Random;
use crate::rope::rotary_table;

/// Widths that are whole registers and those that are not, and the widths of DeepSeek-V3 and Kimi K2.
const SMALL: Widths = Widths { latent: 144, rotated: 24 };
const REAL: Widths = Widths { latent: 512, rotated: 64 };
const UNROTATED: usize = 20;
const SCALE: f32 = 0.2;

/// Number of values of a latent and of a rotated key.
#[derive(Clone, Copy)]
struct Widths {
    latent: usize,
    rotated: usize,
}

/// The rows of one sequence, from its first position on.
struct Rows {
    queries: Vec<f32>,
    keys: Vec<f32>,
    pages: Vec<u32>,
}

struct Case {
    pool: WorkerPool,
    isa: Isa,
    /// The tier that stores latents.
    store_isa: Isa,
    heads: usize,
    widths: Widths,
    layer: LatentLayer,
    weight: Vec<f32>,
}

/// Returns how much the values of a tier that rounds operands to BF16 may differ from those of others.
fn rounding(isa: Isa, format: KvFormat) -> f32 {
    if isa == Isa::Avx512Bf16 && format == KvFormat::F16 { 2e-2 } else { 0.0 }
}

fn table(positions: &[usize], rotated: usize) -> Vec<f32> {
    let frequencies: Vec<f32> = (0..rotated / 2).map(|at| 0.3f32.powi(at as i32)).collect();
    let mut table = Vec::new();
    rotary_table(positions, &frequencies, &mut table);
    table
}

impl Case {
    fn new(isa: Isa, threads: usize, format: KvFormat, heads: usize, widths: Widths) -> Self {
        let Widths { latent, rotated } = widths;
        let layer = LatentLayer::new(format, 64, latent, rotated).unwrap();
        assert_eq!(LatentLayer::byte_len(format, 64, latent, rotated), Some(layer.bytes.len()));
        let weight = (0..latent).map(|at| 0.5 + at as f32 / latent as f32).collect();
        Case { pool: WorkerPool::new(threads).unwrap(), isa, store_isa: isa, heads, widths, layer, weight }
    }

    /// Computes some chunks, `(sequence, start, tokens)`, in one call; the queries without position are also the absorbed
    /// ones, followed by zeros. Returns `[row][head][latent]`.
    fn attend(&mut self, sequences: &[Rows], chunks: &[(usize, usize, usize)]) -> Vec<f32> {
        let Widths { latent, rotated } = self.widths;
        let head = UNROTATED + rotated;
        let (mut queries, mut keys, mut positions, mut batch) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (index, start, tokens) in chunks.iter().copied() {
            let rows = &sequences[index];
            batch.push(AttentionSequence { row: positions.len(), tokens, start, pages: rows.pages.clone() });
            let part =
                |values: &[f32], width: usize| values[start * width..(start + tokens) * width].to_vec();
            queries.extend(part(&rows.queries, self.heads * head));
            keys.extend(part(&rows.keys, latent + rotated));
            positions.extend(start..start + tokens);
        }
        let (pool, isa, heads, count) = (&self.pool, self.isa, self.heads, positions.len());
        let norm = Norm { weight: &self.weight, epsilon: 1e-6 };
        let table = table(&positions, rotated);
        let batch = AttentionBatch::new(batch, heads);
        let sequences = batch.sequences();
        let layer = &mut self.layer;
        let store_isa = self.store_isa;
        store_latents(pool, store_isa, norm, Pairing::Interleaved, &mut keys, &table, sequences, layer)
            .unwrap();
        let width = query_width(latent, rotated);
        let mut plain = vec![f32::NAN; count * heads * UNROTATED];
        let mut absorbed = vec![f32::NAN; count * heads * width];
        let pairing = Pairing::Interleaved;
        let shape = QueryShape { heads, unrotated: UNROTATED, rotated, pairing };
        split_queries(pool, isa, shape, &queries, &table, &mut plain, &mut absorbed, width).unwrap();
        for (to, from) in absorbed.chunks_mut(width).zip(plain.chunks(UNROTATED)) {
            to[..latent].fill(0.0);
            to[..UNROTATED].copy_from_slice(from);
        }
        let mut out = vec![f32::NAN; count * heads * latent];
        latent_attention(pool, isa, heads, SCALE, &self.layer, &absorbed, &batch, &mut out).unwrap();
        // From `[head][row]` to `[row][head]`.
        (0..count * heads)
            .flat_map(|at| out[(at % heads * count + at / heads) * latent..][..latent].to_vec())
            .collect()
    }

    fn sequences(&self, random: &mut Random, lengths: &[usize]) -> Vec<Rows> {
        let mut page = 64;
        let rows = |length: &usize| {
            let pages = (0..length.div_ceil(16)).map(|_| {
                page -= 1;
                page
            });
            Rows {
                pages: pages.collect(),
                queries: random.floats(length * self.heads * (UNROTATED + self.widths.rotated)),
                keys: random.floats(length * (self.widths.latent + self.widths.rotated)),
            }
        };
        lengths.iter().map(rows).collect()
    }

    /// Computes one row of a sequence in double precision.
    fn exact(&self, rows: &Rows, row: usize, head: usize) -> Vec<f64> {
        let Widths { latent: width, rotated } = self.widths;
        let rotate = |values: &[f32], position: usize| -> Vec<f64> {
            let table = table(&[position], rotated);
            let pair = |at: usize| {
                let (a, b) = (f64::from(values[2 * at]), f64::from(values[2 * at + 1]));
                let (cos, sin) = (f64::from(table[at]), f64::from(table[rotated / 2 + at]));
                [a * cos - b * sin, a * sin + b * cos]
            };
            (0..rotated / 2).flat_map(pair).collect()
        };
        let size = UNROTATED + rotated;
        let query = &rows.queries[(row * self.heads + head) * size..][..size];
        let turned_query = rotate(&query[UNROTATED..], row);
        let latents: Vec<Vec<f64>> = (0..=row)
            .map(|at| {
                let latent = &rows.keys[at * (width + rotated)..][..width];
                let squares: f64 = latent.iter().map(|x| f64::from(*x).powi(2)).sum();
                let rms = (squares / width as f64 + 1e-6).sqrt();
                latent.iter().zip(&self.weight).map(|(x, w)| f64::from(*x) / rms * f64::from(*w)).collect()
            })
            .collect();
        let scores: Vec<f64> = (0..=row)
            .map(|at| {
                let key = rotate(&rows.keys[at * (width + rotated) + width..][..rotated], at);
                let plain: f64 =
                    query[..UNROTATED].iter().zip(&latents[at]).map(|(q, k)| f64::from(*q) * k).sum();
                let turned: f64 = turned_query.iter().zip(&key).map(|(q, k)| q * k).sum();
                f64::from(SCALE) * (plain + turned)
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..width).map(|d| weights.iter().zip(&latents).map(|(w, c)| w * c[d]).sum::<f64>() / total).collect()
    }
}

#[test]
fn every_format_and_tier_agrees_with_double_precision() {
    let mut random = Random::fresh();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for (format, bound) in [(KvFormat::F32, 1e-5), (KvFormat::F16, 4e-3), (KvFormat::I8, 4e-2)] {
            for (heads, widths) in [(1, SMALL), (3, SMALL), (13, SMALL), (8, REAL)] {
                let mut case = Case::new(isa, 2, format, heads, widths);
                let latent = widths.latent;
                let rows = case.sequences(&mut random, &[150]);
                let out = case.attend(&rows, &[(0, 0, 150)]);
                for row in [0, 1, 15, 16, 127, 128, 149] {
                    for head in 0..heads {
                        let exact = case.exact(&rows[0], row, head);
                        let found = &out[(row * heads + head) * latent..][..latent];
                        for (exact, found) in exact.iter().zip(found) {
                            let error = (exact - f64::from(*found)).abs();
                            let bound = bound + f64::from(rounding(isa, format));
                            assert!(error < bound, "{isa} {format:?} {heads} heads, row {row}: {error}");
                        }
                    }
                }
            }
        }
    }
}

/// The pages are stored by one tier, because a latent between two integers may be rounded to either of them.
#[test]
fn tiers_agree_on_the_same_latents() {
    let mut random = Random::fresh();
    // Between tiers, a weight that is rounded to 15 bits differs by one of them at most.
    for (format, bound) in [(KvFormat::F32, 2e-5), (KvFormat::F16, 2e-5), (KvFormat::I8, 2e-4)] {
        for (heads, widths) in [(1, SMALL), (2, SMALL), (5, REAL), (7, SMALL), (8, REAL), (20, SMALL)] {
            let mut case = Case::new(Isa::Portable, 2, format, heads, widths);
            let rows = case.sequences(&mut random, &[150]);
            let expected = case.attend(&rows, &[(0, 0, 150)]);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
                case.isa = isa;
                let found = case.attend(&rows, &[(0, 0, 150)]);
                let errors = expected.iter().zip(&found).map(|(a, b)| (a - b).abs());
                let largest = errors.fold(0.0, f32::max);
                let bound = bound + rounding(isa, format);
                assert!(largest < bound, "{isa} {format:?} {heads} heads: {largest}");
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_chunk_batch_and_number_of_threads() {
    let mut random = Random::fresh();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::I8] {
            let mut case = Case::new(isa, 1, format, 5, SMALL);
            let rows = case.sequences(&mut random, &[300, 140]);
            let whole = case.attend(&rows, &[(0, 0, 300)]);
            let other = case.attend(&rows, &[(1, 0, 140)]);
            let width = 5 * SMALL.latent;
            let mut case = Case::new(isa, 3, format, 5, SMALL);
            let first = case.attend(&rows, &[(1, 0, 37), (0, 0, 130)]);
            assert_eq!(first[..37 * width], other[..37 * width]);
            assert_eq!(first[37 * width..], whole[..130 * width], "{isa} {format:?}");
            let rest = case.attend(&rows, &[(0, 130, 169), (1, 37, 103)]);
            assert_eq!(rest[..169 * width], whole[130 * width..299 * width]);
            assert_eq!(rest[169 * width..], other[37 * width..]);
            // The states of blocks do not depend on what another operation left in their memory.
            case.pool.scratch(1 << 16).fill(f32::NAN);
            let last = case.attend(&rows, &[(0, 299, 1)]);
            assert_eq!(last, whole[299 * width..], "{isa} {format:?}");
        }
    }
}

#[test]
fn invalid_shapes_are_errors() {
    assert!(LatentLayer::new(KvFormat::F16, 1, 24, 8).is_err(), "not a multiple of 16");
    assert!(LatentLayer::new(KvFormat::F16, 1, MAX_LATENT + 16, 8).is_err());
    assert!(LatentLayer::new(KvFormat::F16, usize::MAX, 32, 8).is_err());
    assert_eq!(LatentLayer::byte_len(KvFormat::F16, usize::MAX, 32, 8), None);
    // 512 + 64 values in 16 bits; in 8 bits, four scales and a key in 16 bits.
    assert_eq!(LatentLayer::byte_len(KvFormat::F16, 1, 512, 64), Some(16 * 576 * 2));
    assert_eq!(LatentLayer::byte_len(KvFormat::I8, 1, 512, 64), Some(16 * (512 + 4 * 4 + 64 * 2)));
}
