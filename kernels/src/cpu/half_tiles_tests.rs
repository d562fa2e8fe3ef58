//! Compares products of F16 weights with the same sums of integers, computed one after the other, bit by bit.

use half::f16;

use crate::buffer::Arena;
use crate::matmul::{Activations, PackedMatrix, Projection, matmul};
use crate::random::Random;
use crate::{DType, Isa, WorkerPool};

const TIER: Isa = Isa::Avx512Bf16;

/// Returns `[token][row]` outputs.
fn product(pool: &WorkerPool, weights: &[f16], input: &[f32], columns: usize) -> Vec<f32> {
    let rows = weights.len() / columns;
    let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    let matrix = PackedMatrix::pack(pool, &mut Arena::default(), DType::F16, rows, columns, &bytes).unwrap();
    let tokens = input.len() / columns;
    let mut out = vec![f32::INFINITY; tokens * rows];
    let projection = Projection { matrices: &[&matrix], bias: &[] };
    matmul(pool, TIER, projection, input, tokens, &mut out, &mut Activations::default()).unwrap();
    out
}

/// The output of finite numbers, and how far rounding to integers may have moved it.
struct Reference {
    sum: f32,
    exact: f64,
    bound: f64,
}

fn reference(weights: &[f16], input: &[f32]) -> Reference {
    let (mut sum, mut exact, mut bound) = (0f32, 0.0, 0.0);
    for (weights, x) in weights.chunks(32).zip(input.chunks(32)) {
        let exponent = weights.iter().map(|w| w.to_bits() >> 10 & 31).max().unwrap();
        let step = 2f32.powi(i32::from(exponent) - 27);
        let largest = x.iter().fold(0f32, |all, x| all.max(x.abs()));
        let scale = largest / 8191.0;
        let dots = weights.iter().zip(x).map(|(w, x)| {
            let (w, x) = (w.to_f32() / step, x * (8191.0 / largest));
            w.round_ties_even() as i64 * x.round_ties_even() as i64
        });
        let dot = dots.sum::<i64>();
        assert!(i32::try_from(dot).is_ok(), "{dot}");
        sum = (dot as f32).mul_add(step * scale, sum);
        for (w, x) in weights.iter().map(|w| f64::from(w.to_f32())).zip(x.iter().map(|x| f64::from(*x))) {
            let (step, scale) = (f64::from(step), f64::from(scale));
            exact += w * x;
            bound += 0.5 * (step * x.abs() + scale * w.abs()) + 0.25 * step * scale + 1e-6 * (w * x).abs();
        }
    }
    Reference { sum, exact, bound }
}

/// Returns any finite numbers, small ones beside large ones.
fn halves(random: &mut Random, count: usize) -> Vec<f16> {
    let any = std::iter::repeat_with(|| f16::from_bits(random.next_u64() as u16));
    any.filter(|number| number.is_finite()).take(count).collect()
}

#[test]
fn every_number_of_tokens_has_the_bits_of_sums_one_after_the_other() {
    if !TIER.supported() {
        return;
    }
    let mut random = Random::fresh();
    let pools = [1, 3].map(|threads| WorkerPool::new(threads).unwrap());
    for columns in [1, 31, 32, 99, 256, 257, 600] {
        for rows in [5, 16, 37, 48] {
            let mut weights = halves(&mut random, rows * columns);
            // Weights of a model resemble each other more than random bits.
            for weight in &mut weights[..rows / 2 * columns] {
                *weight = f16::from_f32(random.signed());
            }
            let input = random.floats(130 * columns);
            let expected: Vec<Reference> = input
                .chunks(columns)
                .flat_map(|x| weights.chunks(columns).map(|weights| reference(weights, x)))
                .collect();
            for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 9, 23, 130] {
                let first = random.below(131 - tokens);
                let input = &input[first * columns..][..tokens * columns];
                for pool in &pools {
                    let found = product(pool, &weights, input, columns);
                    for (at, (found, expected)) in found.iter().zip(&expected[first * rows..]).enumerate() {
                        let Reference { sum, exact, bound } = expected;
                        let place = format!("{tokens} x {columns} x {rows}, output {at}");
                        assert_eq!(found.to_bits(), sum.to_bits(), "{place}: {found} for {sum}");
                        assert!((f64::from(*found) - exact).abs() <= *bound, "{place}: {found} for {exact}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_number_of_half_precision_is_exact_beside_smaller_ones() {
    if !TIER.supported() {
        return;
    }
    let pool = WorkerPool::new(2).unwrap();
    // The first activation makes the scale 1, and so the others integers. It is multiplied with 0.
    let input: Vec<f32> = (0..9 * 32).map(|at| if at % 32 == 0 { 8191.0 } else { 1.0 }).collect();
    let mut weights = vec![f16::ZERO; 32 << 16];
    for bits in 0..=u16::MAX {
        weights[32 * usize::from(bits) + 1 + usize::from(bits) % 31] = f16::from_bits(bits);
    }
    for tokens in [1, 9] {
        let out = product(&pool, &weights, &input[..tokens * 32], 32);
        for (at, found) in out.iter().enumerate() {
            let weight = f16::from_bits(at as u16);
            if weight.is_finite() {
                assert_eq!(*found, weight.to_f32());
            } else {
                assert!(found.is_nan(), "{found} for the bits {:x}", at as u16);
            }
        }
    }
}

#[test]
fn the_largest_products_of_a_block_fit() {
    if !TIER.supported() {
        return;
    }
    let pool = WorkerPool::new(1).unwrap();
    for (weight, x) in [(f16::MAX, 3.0), (f16::MIN, 3.0), (f16::MAX, -1e20), (f16::MIN, -0.001)] {
        let (weights, input) = ([weight; 64], [x; 64]);
        let Reference { sum, exact, .. } = reference(&weights, &input);
        assert!((f64::from(sum) / exact - 1.0).abs() < 1e-6, "{sum} for {exact}");
        assert_eq!(product(&pool, &weights, &input, 64), [sum]);
    }
}

#[test]
fn only_rows_and_tokens_with_numbers_that_are_not_finite_have_none() {
    if !TIER.supported() {
        return;
    }
    let mut random = Random::fresh();
    let pool = WorkerPool::new(2).unwrap();
    let (rows, columns) = (40, 70);
    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for tokens in [3, 11] {
            let mut weights: Vec<f16> =
                random.floats(rows * columns).into_iter().map(f16::from_f32).collect();
            let mut input = random.floats(tokens * columns);
            let (row, token) = (random.below(rows), random.below(tokens));
            weights[row * columns + random.below(columns)] = f16::from_f32(number);
            input[token * columns + random.below(columns)] = number;
            let zero = (token + 1) % tokens;
            input[zero * columns..][..columns].fill(0.0);
            for (at, found) in product(&pool, &weights, &input, columns).iter().enumerate() {
                let (of_token, of_row) = (at / rows, at % rows);
                assert_eq!(found.is_nan(), of_row == row || of_token == token, "{of_token} {of_row}");
                assert!(of_token != zero || of_row == row || *found == 0.0, "{found}");
            }
        }
    }
}
