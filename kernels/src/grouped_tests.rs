//! Compares grouped products with one product for each matrix, bit by bit, and checks what must be rejected.

use super::*;
use crate::DType;
use crate::buffer::Arena;
use crate::dequantize;
use crate::matmul::{Projection, matmul, random_weights};
use crate::random::Random;

const ROWS: usize = 40;
const COLUMNS: usize = 256;

fn matrices(pool: &WorkerPool, random: &mut Random, dtype: DType, count: usize) -> Vec<PackedMatrix> {
    let mut arena = Arena::default();
    (0..count)
        .map(|_| {
            let data = random_weights(random, dtype, ROWS, COLUMNS);
            PackedMatrix::pack(pool, &mut arena, dtype, ROWS, COLUMNS, &data).unwrap()
        })
        .collect()
}

#[test]
fn groups_have_the_bits_of_single_products_in_every_format_and_tier() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(2).unwrap();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for dtype in DType::ALL {
            let matrices = matrices(&pool, &mut random, dtype, 4);
            let counts = [1, 0, 11, 5];
            let total: usize = counts.iter().sum();
            let (input, bias) = (random.floats(total * COLUMNS), random.floats(ROWS));
            let stride = 2 * ROWS + 3;
            let mut first = 0;
            let mut products = Vec::new();
            for (matrix, count) in matrices.iter().zip(counts) {
                let rows = first..first + count;
                let bias = if count == 5 { &bias[..] } else { &[] };
                let whole = GroupedProduct { matrix, rows, out_row: first, out_column: 0, bias };
                // A second matrix for the same rows writes the columns beside those of the first.
                let other =
                    GroupedProduct { matrix: &matrices[0], out_column: ROWS + 3, bias: &[], ..whole.clone() };
                products.extend([other, whole]);
                first += count;
            }
            let mut out = vec![7.0; total * stride];
            let mut scratch = Activations::default();
            grouped_matmul(&pool, isa, &products, &input, COLUMNS, &mut out, stride, &mut scratch).unwrap();
            for each in &products {
                for row in each.rows.clone() {
                    let mut alone = vec![0.0; ROWS];
                    let projection = Projection { matrices: &[each.matrix], bias: each.bias };
                    let input = &input[row * COLUMNS..][..COLUMNS];
                    matmul(&pool, isa, projection, input, 1, &mut alone, &mut scratch).unwrap();
                    assert_eq!(
                        out[row * stride + each.out_column..][..ROWS],
                        alone,
                        "{isa} {dtype} row {row}"
                    );
                }
            }
            assert!(out.chunks(stride).all(|row| row[ROWS..ROWS + 3] == [7.0; 3]), "columns of no product");
        }
    }
}

/// With powers of two as scales, and integers as activations, all products and sums are numbers that F32 holds exactly, so every
/// tier has to find the same ones, whatever the order of its sums.
#[test]
fn experts_with_exact_products_are_equal_in_every_tier() {
    let (mut random, pool) = (Random::fresh(), WorkerPool::new(2).unwrap());
    for dtype in DType::ALL {
        let mut arena = Arena::default();
        let mut values = Vec::new();
        let matrices: Vec<PackedMatrix> = (0..3)
            .map(|_| {
                let data = exact_weights(&mut random, dtype, ROWS, COLUMNS);
                let mut expert = vec![0.0; ROWS * COLUMNS];
                dequantize(dtype, &data, &mut expert).unwrap();
                values.push(expert);
                PackedMatrix::pack(&pool, &mut arena, dtype, ROWS, COLUMNS, &data).unwrap()
            })
            .collect();
        let counts = [1, 9, 4];
        let total: usize = counts.iter().sum();
        // One activation of each block is 127, so the rounded ones are the integers themselves. The others are small, so that sums
        // have at most 24 bits.
        let mut input: Vec<f32> = (0..total * COLUMNS).map(|_| random.below(7) as f32 - 3.0).collect();
        input.chunks_mut(32).for_each(|block| block[random.below(32)] = 127.0);
        let mut first = 0;
        let products: Vec<GroupedProduct<'_>> = matrices
            .iter()
            .zip(counts)
            .map(|(matrix, count)| {
                let rows = first..first + count;
                first += count;
                GroupedProduct { matrix, out_row: rows.start, rows, out_column: 0, bias: &[] }
            })
            .collect();
        // One of the tiers rounds activations beside F16 to multiples of a number that is not a power of two.
        let is_exact = |isa: &Isa| (dtype, *isa) != (DType::F16, Isa::Avx512Bf16);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported() && is_exact(isa)) {
            let (mut out, mut scratch) = (vec![f32::NAN; total * ROWS], Activations::default());
            grouped_matmul(&pool, isa, &products, &input, COLUMNS, &mut out, ROWS, &mut scratch).unwrap();
            for (product, values) in products.iter().zip(&values) {
                for token in product.rows.clone() {
                    let input = &input[token * COLUMNS..][..COLUMNS];
                    for (row, found) in out[token * ROWS..][..ROWS].iter().enumerate() {
                        let weights = &values[row * COLUMNS..][..COLUMNS];
                        let terms = weights.iter().zip(input).map(|(w, x)| f64::from(*w) * f64::from(*x));
                        assert_eq!(f64::from(*found), terms.sum::<f64>(), "{dtype} {isa} [{token}, {row}]");
                    }
                }
            }
        }
    }
}

/// Returns random blocks whose scales are powers of two, and whose values have few bits.
fn exact_weights(random: &mut Random, dtype: DType, rows: usize, columns: usize) -> Vec<u8> {
    let mut bytes = random_weights(random, dtype, rows, columns);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        let small = random.below(15) as f32 - 7.0;
        let mut put = |at: usize, value: f32| {
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        };
        match dtype {
            DType::F32 => block.copy_from_slice(&small.to_le_bytes()),
            DType::F16 => put(0, small),
            DType::BF16 => block.copy_from_slice(&half::bf16::from_f32(small).to_le_bytes()),
            DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::Int4 | DType::Iq4Nl | DType::Iq4Xs => {
                put(0, 0.25)
            }
            DType::Q4_1 | DType::Q5_1 => {
                put(0, 0.5);
                put(2, small);
            }
            DType::Mxfp4 => block[0] = 126 + block[0] % 3,
            DType::F8E4M3 => {
                block[..4].copy_from_slice(&0.5f32.to_le_bytes());
                // Numbers of at least 1/8 and below 16 are multiples of 1/64.
                block[4..]
                    .iter_mut()
                    .for_each(|code| *code = *code & 0x87 | (4 + random.below(7) as u8) << 3);
            }
            DType::Q2K => {
                put(80, 0.5);
                put(82, 0.5);
            }
            DType::Q3K => put(108, 0.5),
            DType::Q4K | DType::Q5K => {
                put(0, 0.5);
                put(2, 0.5);
            }
            DType::Q6K => put(208, 0.0625),
        }
    }
    bytes
}

#[test]
fn one_row_is_the_input_of_many_matrices() {
    let (mut random, pool) = (Random::fresh(), WorkerPool::new(2).unwrap());
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for dtype in [DType::Q4_0, DType::Int4, DType::Q6K, DType::BF16, DType::F8E4M3] {
            let matrices = matrices(&pool, &mut random, dtype, 8);
            let input = random.floats(COLUMNS);
            let mut products = Vec::new();
            for (number, matrix) in matrices.iter().enumerate() {
                // The outputs are in another order than the matrices.
                let out_row = (3 * number) % 8;
                products.push(GroupedProduct { matrix, rows: 0..1, out_row, out_column: 0, bias: &[] });
            }
            let (mut out, mut scratch) = (vec![0.0; 8 * ROWS], Activations::default());
            grouped_matmul(&pool, isa, &products, &input, COLUMNS, &mut out, ROWS, &mut scratch).unwrap();
            for each in &products {
                let mut alone = vec![0.0; ROWS];
                let projection = Projection { matrices: &[each.matrix], bias: &[] };
                matmul(&pool, isa, projection, &input, 1, &mut alone, &mut scratch).unwrap();
                assert_eq!(out[each.out_row * ROWS..][..ROWS], alone, "{isa} {dtype} row {}", each.out_row);
            }
        }
    }
}

#[test]
fn overlapping_outputs_and_rows_outside_are_errors() {
    let mut random = Random::fresh();
    let pool = WorkerPool::new(1).unwrap();
    let matrices = matrices(&pool, &mut random, DType::F32, 1);
    let input = random.floats(4 * COLUMNS);
    let run = |products: &[(Range<usize>, usize, usize)]| {
        let products: Vec<_> = products
            .iter()
            .map(|(rows, out_row, out_column)| GroupedProduct {
                matrix: &matrices[0],
                rows: rows.clone(),
                out_row: *out_row,
                out_column: *out_column,
                bias: &[],
            })
            .collect();
        let mut out = vec![0.0; 4 * 2 * ROWS];
        let scratch = &mut Activations::default();
        grouped_matmul(&pool, Isa::Portable, &products, &input, COLUMNS, &mut out, 2 * ROWS, scratch)
    };
    assert!(run(&[(0..2, 0, 0), (2..4, 2, 0), (0..2, 0, ROWS)]).is_ok());
    assert!(run(&[(0..2, 0, 0), (2..4, 1, 0)]).is_err(), "output rows overlap");
    assert!(run(&[(0..2, 0, 0), (2..4, 0, ROWS - 1)]).is_err(), "output columns overlap");
    assert!(run(&[(0..2, 0, 0), (1..3, 2, 0)]).is_err(), "input rows overlap");
    assert!(
        run(&[(3..5, 0, 0)]).is_err()
            && run(&[(0..2, 3, 0)]).is_err()
            && run(&[(0..1, 0, ROWS + 1)]).is_err()
    );
    let described = PackedMatrix::described(DType::F32, ROWS, COLUMNS).unwrap();
    let product = GroupedProduct { matrix: &described, rows: 0..1, out_row: 0, out_column: 0, bias: &[] };
    let (mut out, scratch) = (vec![0.0; ROWS], &mut Activations::default());
    assert!(
        grouped_matmul(&pool, Isa::Portable, &[product], &input, COLUMNS, &mut out, ROWS, scratch).is_err()
    );
}

#[test]
fn a_step_of_eight_sequences_reads_each_active_matrix_once() {
    let pool = WorkerPool::new(2).unwrap();
    let mut random = Random::fresh();
    let (rows, columns) = (85, 64);
    let data = random_weights(&mut random, DType::Q4_0, rows, columns);
    let matrices: Vec<PackedMatrix> = (0..16)
        .map(|_| PackedMatrix::pack(&pool, &mut Arena::default(), DType::Q4_0, rows, columns, &data).unwrap())
        .collect();
    // Eight sequences with four of sixteen experts each: their rows in the order of experts, some of which have none.
    for _ in 0..20 {
        let mut counts = [0; 16];
        for _ in 0..8 {
            let first = random.next_u64() as usize % 16;
            (0..4).for_each(|step| counts[(first + 3 * step) % 16] += 1);
        }
        let mut start = 0;
        let products: Vec<GroupedProduct<'_>> = matrices
            .iter()
            .zip(counts)
            .filter(|(_, count)| *count > 0)
            .map(|(matrix, count)| {
                let rows = start..start + count;
                start += count;
                GroupedProduct { matrix, out_row: rows.start, rows, out_column: 0, bias: &[] }
            })
            .collect();
        for threads in [1, 2, 16] {
            let mut read = std::collections::BTreeMap::new();
            for task in tasks(threads, &products, rows) {
                for tile in task.first_tile..task.first_tile + task.tiles {
                    *read.entry((std::ptr::from_ref(task.matrix), tile)).or_insert(0) += 1;
                }
            }
            assert_eq!(read.len(), products.len() * rows.div_ceil(16), "every tile of the active experts");
            assert!(read.values().all(|times| *times == 1), "{threads} threads: {counts:?}");
        }
    }
}
