//! Rotary position embedding: which values rotate together, and by which angle.

/// The pairs of a head's dimensions that rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Dimension `d` is paired with `d + head_size / 2`.
    Halves,
    /// Dimension `2 d` is paired with `2 d + 1`.
    Interleaved,
}

/// Fills `out` with the rotary table: the cosines and then the sines of every position, `[position][2][frequencies]`.
/// Angles are computed in double precision.
pub fn rotary_table(positions: &[usize], inverse_frequencies: &[f32], out: &mut Vec<f32>) {
    out.clear();
    // Memory plans count exactly this many values.
    out.reserve_exact(positions.len() * 2 * inverse_frequencies.len());
    for position in positions {
        let angle = |frequency: &f32| *position as f64 * f64::from(*frequency);
        out.extend(inverse_frequencies.iter().map(|frequency| angle(frequency).cos() as f32));
        out.extend(inverse_frequencies.iter().map(|frequency| angle(frequency).sin() as f32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_angle_is_the_position_times_the_frequency() {
        let mut table = vec![7.0];
        rotary_table(&[0, 700], &[1.0, 0.25], &mut table);
        let angles = [0.0, 0.0, 700.0, 175.0f64];
        let expected = [&angles[..2], &angles[2..]].map(|row| {
            [
                row.iter().map(|x| x.cos() as f32).collect(),
                row.iter().map(|x| x.sin() as f32).collect::<Vec<_>>(),
            ]
        });
        assert_eq!(table, expected.concat().concat());
    }
}
