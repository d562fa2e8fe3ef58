//! The bytes that an operation has to move, its arithmetic operations, and what they are of a device's upper bounds.
//!
//! Invariant: only what any implementation has to move counts: each input once and each result once. A multiplication and an
//! addition count as two operations.

use super::list::{Contexts, Operation, Prompt, Role, Sizes};
use crate::cuda::matmul::Weights;
use crate::cuda::operation::ACTIVATION_BYTES;
use crate::cuda::tiles::Tiles;
use crate::cuda::{PAGE_POSITIONS, PageFormat};

/// The amounts of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counts {
    pub bytes: f64,
    /// 0 if only its bytes matter.
    pub operations: f64,
}

/// The upper bounds of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Both the bytes read and the bytes written count.
    pub copy_gb_per_s: f64,
    /// `None` without cuBLASLt.
    pub product_tflops: Option<f64>,
}

/// The upper bound that an operation is closest to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Copies,
    Products,
}

/// The rates that an operation achieves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub us: f64,
    pub gb_per_s: f64,
    /// Share of the rate of copies.
    pub copy_share: f64,
    pub tflops: f64,
    /// Share of the rate of products.
    pub product_share: Option<f64>,
    pub bound: Bound,
}

impl Counts {
    /// Returns the rates of an operation that takes this long.
    pub fn rate(&self, us: f64, peaks: &Peaks) -> Rate {
        let (gb_per_s, tflops) = (self.bytes / us / 1e3, self.operations / us / 1e6);
        let copy_share = gb_per_s / peaks.copy_gb_per_s;
        let product_share = peaks.product_tflops.map(|peak| tflops / peak);
        let bound = if product_share.is_some_and(|share| share > copy_share) {
            Bound::Products
        } else {
            Bound::Copies
        };
        Rate { us, gb_per_s, copy_share, tflops, product_share, bound }
    }
}

impl Operation {
    /// Returns the bytes and the operations.
    pub fn counts(&self, sizes: &Sizes) -> Counts {
        let Sizes { hidden, heads, head_size, wide, vocabulary, .. } = *sizes;
        let of = |factors: &[u32]| factors.iter().map(|factor| f64::from(*factor)).product::<f64>();
        let activation = ACTIVATION_BYTES as f64;
        let moved = |bytes: f64| Counts { bytes, operations: 0.0 };
        match *self {
            // The residual and the result are written; the sum, the residual and the weights are read.
            Operation::Launch => moved((4.0 + 1.0) * 8.0 * activation),
            Operation::RmsNorm { rows } => moved((4.0 * of(&[rows, hidden]) + of(&[hidden])) * activation),
            Operation::Product { role, weights, rows } => {
                let [inputs, outputs] = role.shape(sizes);
                // A gate leaves half of the outputs, and logits are f32.
                let results = match role {
                    Role::GateUp => of(&[rows, outputs]) / 2.0 * activation,
                    Role::Head => of(&[rows, outputs, 4]),
                    Role::Qkv | Role::Output | Role::Down => of(&[rows, outputs]) * activation,
                };
                let bytes =
                    weight_bytes(weights, inputs, outputs) + of(&[rows, inputs]) * activation + results;
                Counts { bytes, operations: 2.0 * of(&[rows, inputs, outputs]) }
            }
            // Queries are changed in place; keys and values are read there and written to pages.
            Operation::Qkv { rows } => moved(2.0 * of(&[rows, sizes.qkv_width()]) * activation),
            // Only the keys and values count, those of common pages once. Each pair of a query and a key has a product of `head_size` values with the
            // key and one with the value.
            Operation::AttentionDecode(contexts @ Contexts { sequences, context, rows, pages, .. }) => {
                Counts {
                    bytes: (of(&[sequences, context - contexts.shared()]) + f64::from(contexts.shared()))
                        * position_bytes(pages, sizes),
                    operations: 4.0
                        * of(&[sequences, rows, heads, head_size])
                        * (f64::from(context) - (f64::from(rows) - 1.0) / 2.0),
                }
            }
            // Queries, keys and values are read, and results written. A row sees the prefix and half of the rows on
            // average.
            Operation::AttentionPrefill(Prompt { rows, prefix, pages }) => Counts {
                bytes: 2.0 * of(&[rows, heads, head_size]) * activation
                    + of(&[rows + prefix]) * position_bytes(pages, sizes),
                operations: 4.0 * (of(&[rows, prefix]) + of(&[rows, rows]) / 2.0) * of(&[heads, head_size]),
            },
            Operation::Swiglu { rows } => moved(3.0 * of(&[rows, wide]) * activation),
            Operation::Embedding { rows } => moved(2.0 * of(&[rows, hidden]) * activation),
            // The logits are read; what is written is a token.
            Operation::Sample { rows, .. } => moved(of(&[rows, vocabulary, 4])),
        }
    }
}

/// Returns the size of the keys and values of a position in pages.
fn position_bytes(pages: PageFormat, sizes: &Sizes) -> f64 {
    pages.page_bytes(sizes.kv_heads as usize, sizes.head_size as usize) as f64 / f64::from(PAGE_POSITIONS)
}

/// Returns the size of a matrix with its scales.
fn weight_bytes(weights: Weights, inputs: u32, outputs: u32) -> f64 {
    match weights {
        Weights::Plain => f64::from(inputs) * f64::from(outputs) * ACTIVATION_BYTES as f64,
        Weights::Tiles(dtype) => Tiles::of(dtype)
            .and_then(|tiles| tiles.matrix_bytes(outputs as usize, inputs as usize))
            .map_or(0.0, |bytes| bytes as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::cuda::rates::Prefix;

    const LLAMA: Sizes =
        Sizes { hidden: 4096, heads: 32, kv_heads: 8, head_size: 128, wide: 14336, vocabulary: 128_256 };

    fn counts(operation: Operation) -> (f64, f64) {
        let Counts { bytes, operations } = operation.counts(&LLAMA);
        (bytes, operations)
    }

    #[test]
    fn bytes_of_operations_on_rows() {
        assert_eq!(counts(Operation::RmsNorm { rows: 64 }), (64.0 * 32768.0 + 8192.0, 0.0));
        assert_eq!(counts(Operation::Qkv { rows: 2 }), (2.0 * 6144.0 * 4.0, 0.0));
        assert_eq!(counts(Operation::Swiglu { rows: 3 }), (3.0 * 14336.0 * 6.0, 0.0));
        assert_eq!(counts(Operation::Embedding { rows: 3 }), (3.0 * 4096.0 * 4.0, 0.0));
        assert_eq!(counts(Operation::Sample { rows: 8, is_greedy: true }), (8.0 * 513_024.0, 0.0));
        assert_eq!(counts(Operation::Launch), (80.0, 0.0));
    }

    #[test]
    fn bytes_and_operations_of_products() {
        let product = |role, weights, rows| counts(Operation::Product { role, weights, rows });
        let values = 4096.0 * 4096.0;
        let x_and_y = 8.0 * (4096.0 + 4096.0) * 2.0;
        for (weights, per_value) in [
            (Weights::Plain, 2.0),
            (Weights::Tiles(DType::Q4_0), 18.0 / 32.0),
            (Weights::Tiles(DType::Q8_0), 34.0 / 32.0),
        ] {
            let expected = (per_value * values + x_and_y, 16.0 * values);
            assert_eq!(product(Role::Output, weights, 8), expected, "{weights:?}");
        }
        let gated = 4096.0 * 28672.0;
        let expected = (gated * 2.0 + 2.0 * (4096.0 + 14336.0) * 2.0, 4.0 * gated);
        assert_eq!(product(Role::GateUp, Weights::Plain, 2), expected);
        let head = 4096.0 * 128_256.0;
        let expected = (head * 2.0 + 4096.0 * 2.0 + 128_256.0 * 4.0, 2.0 * head);
        assert_eq!(product(Role::Head, Weights::Plain, 1), expected);
    }

    #[test]
    fn bytes_and_operations_of_attention() {
        let decode = |sequences, context, rows| {
            let prefix = Prefix::Own;
            let pages = PageFormat::Activations;
            counts(Operation::AttentionDecode(Contexts { sequences, context, rows, prefix, pages }))
        };
        for prefix in [Prefix::Together(1024), Prefix::Apart(1024)] {
            for (pages, position) in [(PageFormat::Activations, 4096.0), (PageFormat::Fp8, 2112.0)] {
                let contexts = Contexts { sequences: 64, context: 1152, rows: 1, prefix, pages };
                let expected = ((64.0 * 128.0 + 1024.0) * position, 4.0 * 64.0 * 1152.0 * 4096.0);
                assert_eq!(counts(Operation::AttentionDecode(contexts)), expected);
            }
        }
        // 4 KiB a position.
        assert_eq!(decode(1, 8192, 1), (8192.0 * 4096.0, 4.0 * 8192.0 * 4096.0));
        assert_eq!(decode(64, 1024, 1), (65536.0 * 4096.0, 4.0 * 65536.0 * 4096.0));
        // Two rows see 9 and 10 positions.
        assert_eq!(decode(1, 10, 2).1, 4.0 * 19.0 * 4096.0);
        let pages = PageFormat::Activations;
        let prefill = |rows, prefix| counts(Operation::AttentionPrefill(Prompt { rows, prefix, pages }));
        assert_eq!(prefill(1024, 0), (1024.0 * (2.0 * 8192.0 + 4096.0), 2.0 * 1024.0 * 1024.0 * 4096.0));
        assert_eq!(prefill(512, 8192).1, 4.0 * 512.0 * (8192.0 + 256.0) * 4096.0);
    }

    #[test]
    fn the_bound_is_the_one_that_is_closer() {
        let peaks = Peaks { copy_gb_per_s: 3000.0, product_tflops: Some(600.0) };
        // 30 MB in 20 microseconds are 1,500 GB/s.
        let rate = Counts { bytes: 3e7, operations: 3e9 }.rate(20.0, &peaks);
        assert_eq!(
            (rate.gb_per_s, rate.tflops, rate.bound, rate.copy_share),
            (1500.0, 150.0, Bound::Copies, 0.5)
        );
        let rate = Counts { bytes: 3e7, operations: 9e9 }.rate(20.0, &peaks);
        assert_eq!((rate.bound, rate.product_share), (Bound::Products, Some(0.75)));
        let rate =
            Counts { bytes: 3e7, operations: 9e9 }.rate(20.0, &Peaks { product_tflops: None, ..peaks });
        assert_eq!((rate.bound, rate.product_share), (Bound::Copies, None));
    }
}
