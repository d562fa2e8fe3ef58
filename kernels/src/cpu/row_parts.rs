//! The division of the query rows of a call into parts whose sums stay in registers.
//!
//! Invariant: a part changes the order of no sum; each row is summed alone.

/// Calls `$part!(first, rows, at_once)`, whose last two arguments are constants, for parts that make up all `$count` rows. A part has
/// `rows * at_once` independent sums, which hide the latency of additions.
///
/// With vector registers, `$count` is the constant `$rows`. With many, all rows are one part and `at_once` is `$at_once`. With few, a
/// sum takes two of 16 registers, so a part has at most six sums beside its operands. If it had more, each addition would load and
/// store its sum.
macro_rules! row_parts {
    ($simd:ident, $count:ident, $rows:ident, $at_once:tt, $part:ident) => {
        if $simd::MANY_REGISTERS {
            $part!(0, $rows, $at_once);
        } else if $simd::HAS_VECTORS {
            match $rows {
                1 => $part!(0, 1, 4),
                2 => $part!(0, 2, 2),
                3 => $part!(0, 3, 2),
                4 => $part!(0, 4, 1),
                5 => $part!(0, 5, 1),
                6 => $part!(0, 6, 1),
                7 => {
                    $part!(0, 4, 1);
                    $part!(4, 3, 2);
                }
                8 => {
                    $part!(0, 4, 1);
                    $part!(4, 4, 1);
                }
                _ => {
                    $part!(0, 6, 1);
                    $part!(6, 6, 1);
                }
            }
        } else {
            let mut first = 0;
            while first < $count {
                let rows = match $count - first {
                    7 | 8 => 4,
                    left => left.min(6),
                };
                match rows {
                    1 => $part!(first, 1, 4),
                    2 => $part!(first, 2, 2),
                    3 => $part!(first, 3, 2),
                    4 => $part!(first, 4, 1),
                    5 => $part!(first, 5, 1),
                    _ => $part!(first, 6, 1),
                }
                first += rows;
            }
        }
    };
}
pub(super) use row_parts;
