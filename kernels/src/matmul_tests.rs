//! Compares every format and tier with double-precision products, with fresh random inputs.

use super::*;
use crate::buffer::Arena;
use crate::dequantize;
use crate::random::Random;

/// Returns random blocks with scales of moderate size.
pub(crate) fn random_weights(random: &mut Random, dtype: DType, rows: usize, columns: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..dtype.row_bytes(columns).unwrap() * rows).map(|_| random.next_u64() as u8).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        let mut put = |at: usize, value: f32| {
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        };
        match dtype {
            DType::F32 => {
                let value = random.signed();
                block.copy_from_slice(&value.to_le_bytes());
            }
            DType::F16 => put(0, random.signed()),
            DType::BF16 => block.copy_from_slice(&half::bf16::from_f32(random.signed()).to_le_bytes()),
            DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => put(0, random.signed() * 0.1),
            DType::Int4 => {
                put(0, random.signed() * 0.1);
                block[2] &= 15;
            }
            DType::Mxfp4 => block[0] = 118 + block[0] % 8,
            DType::F8E4M3 => {
                block[..4].copy_from_slice(&(random.signed() * 0.01).to_le_bytes());
                block[4..].iter_mut().filter(|code| **code & 127 == 127).for_each(|code| *code ^= 1);
            }
            DType::Iq4Nl => put(0, random.signed() * 0.01),
            DType::Iq4Xs => put(0, random.signed() * 0.001),
            DType::Q2K => {
                put(80, random.signed() * 0.03);
                put(82, random.signed() * 0.03);
            }
            DType::Q3K => put(108, random.signed() * 0.01),
            DType::Q4_1 | DType::Q5_1 => {
                put(0, random.signed() * 0.1);
                put(2, random.signed());
            }
            DType::Q4K | DType::Q5K => {
                put(0, random.signed() * 0.01);
                put(2, random.signed() * 0.01);
            }
            DType::Q6K => put(208, random.signed() * 0.001),
        }
    }
    bytes
}

/// Returns rows of activations as the kernels round them.
fn rounded(dtype: DType, isa: Isa, input: &[f32], columns: usize) -> Vec<f64> {
    let most = match (dtype, isa) {
        (DType::BF16, Isa::Avx512Bf16) => {
            return input.iter().map(|x| half::bf16::from_f32(*x).to_f64()).collect();
        }
        (DType::F16, Isa::Avx512Bf16) => 8191.0,
        _ if dtype.rounds_activations() => 127.0,
        _ => return input.iter().map(|x| f64::from(*x)).collect(),
    };
    let blocks = input.chunks(columns).flat_map(|row| row.chunks(32));
    blocks
        .flat_map(|block| {
            let largest = block.iter().fold(0f32, |all, x| all.max(x.abs()));
            block.iter().map(move |x| {
                f64::from((x * (most / largest)).round_ties_even()) * f64::from(largest) / f64::from(most)
            })
        })
        .collect()
}

/// Rounds rows of weights as the kernels do: the integer of the largest one of a block has 13 bits.
fn round_weights(dtype: DType, isa: Isa, weights: &mut [f32], columns: usize) {
    if (dtype, isa) != (DType::F16, Isa::Avx512Bf16) {
        return;
    }
    for block in weights.chunks_mut(columns).flat_map(|row| row.chunks_mut(32)) {
        let largest = block.iter().fold(0f32, |all, weight| all.max(weight.abs()));
        let step = 2f32.powi((largest.log2().floor() as i32).max(-14) - 12);
        block.iter_mut().for_each(|weight| *weight = (*weight / step).round_ties_even() * step);
    }
}

#[test]
fn every_format_and_tier_agrees_with_double_precision() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(2).unwrap();
    for dtype in DType::ALL {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for (tokens, rows) in [(1, 37), (3, 16), (8, 32), (13, 5), (130, 33)] {
                let columns = 512;
                let data = random_weights(&mut random, dtype, rows, columns);
                let other = random_weights(&mut random, dtype, 7, columns);
                let input: Vec<f32> = (0..tokens * columns).map(|_| random.signed()).collect();
                let matrices = [
                    &PackedMatrix::pack(&pool, &mut Arena::default(), dtype, rows, columns, &data).unwrap(),
                    &PackedMatrix::pack(&pool, &mut Arena::default(), dtype, 7, columns, &other).unwrap(),
                ];
                let stride = rows + 7;
                let bias = random.floats(stride);
                let projection = Projection { matrices: &matrices, bias: &bias };
                let mut out = vec![f32::NAN; tokens * stride];
                matmul(&pool, isa, projection, &input, tokens, &mut out, &mut Activations::default())
                    .unwrap();

                let mut weights = vec![0f32; stride * columns];
                let (first, second) = weights.split_at_mut(rows * columns);
                dequantize(dtype, &data, first).unwrap();
                dequantize(dtype, &other, second).unwrap();
                let input = rounded(dtype, isa, &input, columns);
                round_weights(dtype, isa, &mut weights, columns);
                for token in 0..tokens {
                    for row in 0..stride {
                        let pairs = weights[row * columns..][..columns]
                            .iter()
                            .zip(&input[token * columns..][..columns])
                            .map(|(w, x)| f64::from(*w) * x);
                        let (sum, size) = pairs.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                        let sum = sum + f64::from(bias[row]);
                        let found = f64::from(out[token * stride + row]);
                        // Allows one rounding step of the activations at a tie, plus the rounding of float sums.
                        let bound = size * 1e-4 + 1e-6;
                        assert!(
                            (found - sum).abs() < bound,
                            "{dtype} {isa} [{token}, {row}]: {found} for {sum}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn unpacked_rows_match_dequantized_rows() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(3).unwrap();
    for dtype in DType::ALL {
        let data = random_weights(&mut random, dtype, 85, 512);
        let matrix = PackedMatrix::pack(&pool, &mut Arena::default(), dtype, 85, 512, &data).unwrap();
        let mut expected = vec![0.0; 85 * 512];
        dequantize(dtype, &data, &mut expected).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for row in [0, 15, 16, 79, 80, 84] {
                let mut found = vec![0.0; 512];
                matrix.unpack_row(isa, row, &mut found);
                for (found, expected) in found.iter().zip(&expected[row * 512..]) {
                    assert!((found - expected).abs() <= expected.abs() * 1e-5 + 1e-5, "{dtype} {isa}");
                }
            }
        }
    }
}

#[test]
fn packing_does_not_increase_the_size() {
    let pool = WorkerPool::new(1).unwrap();
    for dtype in DType::ALL {
        let bytes = dtype.row_bytes(256).unwrap() * 32;
        let matrix = PackedMatrix::pack(&pool, &mut Arena::default(), dtype, 32, 256, &vec![0; bytes]);
        assert_eq!(matrix.unwrap().byte_len(), bytes);
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let pool = WorkerPool::new(1).unwrap();
    let matrix = PackedMatrix::pack(&pool, &mut Arena::default(), DType::F32, 2, 4, &[0; 32]).unwrap();
    let mut scratch = Activations::default();
    let mut run = |input: usize, out: usize, bias: usize| {
        let projection = Projection { matrices: &[&matrix], bias: &vec![0.0; bias] };
        matmul(&pool, Isa::detect(), projection, &vec![0.0; input], 1, &mut vec![0.0; out], &mut scratch)
    };
    assert!(run(4, 2, 0).is_ok() && run(4, 2, 2).is_ok());
    assert!(run(5, 2, 0).is_err());
    assert!(run(4, 3, 0).is_err());
    assert!(run(4, 2, 1).is_err());
    assert!(PackedMatrix::pack(&pool, &mut Arena::default(), DType::Q4_1, 1, 33, &[0; 20]).is_err());
    assert!(PackedMatrix::pack(&pool, &mut Arena::default(), DType::F32, usize::MAX, 4, &[0; 20]).is_err());
}

#[test]
fn any_number_of_columns_of_floats_is_multiplied() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(1).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for columns in 1..=9 {
            let (rows, tokens) = (21, 10);
            let data = random_weights(&mut random, dtype, rows, columns);
            let matrix =
                PackedMatrix::pack(&pool, &mut Arena::default(), dtype, rows, columns, &data).unwrap();
            let mut weights = vec![0f32; rows * columns];
            dequantize(dtype, &data, &mut weights).unwrap();
            let input = random.floats(tokens * columns);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
                let mut out = vec![f32::NAN; tokens * rows];
                let projection = Projection { matrices: &[&matrix], bias: &[] };
                matmul(&pool, isa, projection, &input, tokens, &mut out, &mut Activations::default())
                    .unwrap();
                let input = rounded(dtype, isa, &input, columns);
                let mut rounded = weights.clone();
                round_weights(dtype, isa, &mut rounded, columns);
                for (index, found) in out.iter().enumerate() {
                    let (token, row) = (index / rows, index % rows);
                    let sum: f64 = (0..columns)
                        .map(|k| f64::from(rounded[row * columns + k]) * input[token * columns + k])
                        .sum();
                    let found = f64::from(*found);
                    assert!(
                        (found - sum).abs() < 1e-5,
                        "{dtype} {isa} {columns} [{token}, {row}]: {found} for {sum}"
                    );
                }
                let mut row = vec![0.0; columns];
                matrix.unpack_row(isa, 17, &mut row);
                assert_eq!(row, weights[17 * columns..18 * columns], "{dtype} {columns}");
            }
        }
    }
}

#[test]
fn eight_bit_floats_have_the_bits_of_the_values_that_they_encode() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(2).unwrap();
    let (rows, columns, tokens) = (37, 160, 11);
    let mut data = random_weights(&mut random, DType::F8E4M3, rows, columns);
    // The first block has every code that is a number, the subnormal ones included.
    let numbers: Vec<u8> = (0..=u8::MAX).filter(|code| code & 127 != 127).collect();
    let codes = data.chunks_exact_mut(36).flat_map(|block| &mut block[4..]);
    codes.zip(&numbers).for_each(|(to, code)| *to = *code);
    let mut values = vec![0f32; rows * columns];
    dequantize(DType::F8E4M3, &data, &mut values).unwrap();
    assert!(values.iter().all(|value| value.is_finite()));
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let input = random.floats(tokens * columns);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        let [coded, exact] = [(DType::F8E4M3, &data), (DType::F32, &bytes)].map(|(dtype, data)| {
            let matrix =
                PackedMatrix::pack(&pool, &mut Arena::default(), dtype, rows, columns, data).unwrap();
            let mut row = vec![0.0; columns];
            matrix.unpack_row(isa, 5, &mut row);
            assert_eq!(row, values[5 * columns..6 * columns], "{dtype}");
            let mut out = vec![f32::NAN; tokens * rows];
            let projection = Projection { matrices: &[&matrix], bias: &[] };
            matmul(&pool, isa, projection, &input, tokens, &mut out, &mut Activations::default()).unwrap();
            out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        });
        assert!(coded == exact, "{isa}");
    }
}
