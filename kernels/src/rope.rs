//! Rotary position embedding.

use crate::cpu::dispatch;
use crate::cpu::elementwise::Rotate;
use crate::error::{expect_len, product};
use crate::pool::SharedSlice;
use crate::{Isa, KernelError, WorkerPool};

/// Which dimensions of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `d` with `d + head_size / 2`.
    Halves,
    /// `2 d` with `2 d + 1`.
    Interleaved,
}

/// Cosines, then sines, of every position: `[position][2][frequencies]`. Angles are formed in double precision.
pub fn turns(positions: &[usize], inverse_frequencies: &[f32], out: &mut Vec<f32>) {
    out.clear();
    for position in positions {
        let angle = |frequency: &f32| *position as f64 * f64::from(*frequency);
        out.extend(inverse_frequencies.iter().map(|frequency| angle(frequency).cos() as f32));
        out.extend(inverse_frequencies.iter().map(|frequency| angle(frequency).sin() as f32));
    }
}

/// Where the heads are in a row, and how they turn.
#[derive(Clone, Copy, Debug)]
pub struct RopeParams {
    /// Values per row.
    pub stride: usize,
    /// The first so many heads of a row turn.
    pub heads: usize,
    pub head_size: usize,
    pub pairing: Pairing,
}

/// Rotates heads of each row in place, by the row's `turns`.
pub fn rope(
    pool: &WorkerPool,
    isa: Isa,
    params: RopeParams,
    rows: &mut [f32],
    turns: &[f32],
) -> Result<(), KernelError> {
    const OP: &str = "rope";
    let RopeParams { stride, heads, head_size, pairing } = params;
    let count = rows.len() / stride.max(1);
    let width = product(OP, "the heads", &[heads, head_size])?;
    expect_len(OP, "the length", product(OP, "the rows", &[count, stride])?, rows.len())?;
    expect_len(OP, "the length of the turns", product(OP, "the turns", &[count, head_size])?, turns.len())?;
    expect_len(OP, "the rest of the head size after pairs", 0, head_size % 2)?;
    if width > stride || head_size == 0 {
        return Err(KernelError::OutOfRange { op: OP, what: "column", index: width, count: stride });
    }
    let rows = SharedSlice::new(rows);
    crate::pool::by_rows(pool, count, width, |row| {
        // SAFETY: each row is one task's.
        let values = unsafe { rows.part(row * stride, width) };
        let turns = &turns[row * head_size..][..head_size];
        for head in values.chunks_exact_mut(head_size) {
            let kernel = Rotate { head, turns, interleaved: pairing == Pairing::Interleaved };
            // SAFETY: safe slices.
            unsafe { dispatch(isa, kernel) };
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn pairs_rotate_by_position_times_frequency_and_other_columns_stay() {
        let mut random = Random::fresh();
        let pool = WorkerPool::new(2).unwrap();
        let frequencies: Vec<f32> = (0..12).map(|at| 10_000f32.powf(-(at as f32) / 12.0)).collect();
        let (positions, mut table) = ([0, 1, 700], Vec::new());
        turns(&positions, &frequencies, &mut table);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for pairing in [Pairing::Halves, Pairing::Interleaved] {
                let input = random.floats(3 * 53);
                let mut rows = input.clone();
                let params = RopeParams { stride: 53, heads: 2, head_size: 24, pairing };
                rope(&pool, isa, params, &mut rows, &table).unwrap();
                for (row, position) in positions.into_iter().enumerate() {
                    assert_eq!(rows[row * 53 + 48..][..5], input[row * 53 + 48..][..5]);
                    for (head, at) in [(0, 0), (0, 5), (1, 11)] {
                        let (a, b) = match pairing {
                            Pairing::Halves => (at, at + 12),
                            Pairing::Interleaved => (2 * at, 2 * at + 1),
                        };
                        let base = row * 53 + head * 24;
                        let (x, y) = (f64::from(input[base + a]), f64::from(input[base + b]));
                        let angle = position as f64 * f64::from(frequencies[at]);
                        let expected = x * angle.cos() - y * angle.sin();
                        assert!((expected - f64::from(rows[base + a])).abs() < 1e-5, "{isa} {pairing:?}");
                        let expected = x * angle.sin() + y * angle.cos();
                        assert!((expected - f64::from(rows[base + b])).abs() < 1e-5, "{isa} {pairing:?}");
                    }
                }
            }
        }
        let params = RopeParams { stride: 8, heads: 2, head_size: 8, pairing: Pairing::Halves };
        assert!(rope(&pool, Isa::Portable, params, &mut [0.0; 8], &[0.0; 8]).is_err());
    }
}
