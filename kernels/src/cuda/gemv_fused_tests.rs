//! Compares the fused kernels with the separate ones, bit for bit.

use super::*;
use crate::cuda::host::{self, Buffer};
use crate::cuda::qkv::Pairing;
use crate::cuda::{PageFormat, gemv, qkv as qkv_kernel, rms_norm, swiglu, swiglu::SwigluParams};
use crate::random::Random;

/// Rows, their norm, and a matrix.
struct Case {
    activation: Activation,
    rows: usize,
    width: usize,
    outputs: usize,
    x: Buffer,
    residual: Buffer,
    norm_weight: Buffer,
    weights: Buffer,
    matrix_bias: Buffer,
}

/// The results of the norm: the sums, and the normed rows.
struct Normed {
    sum: Buffer,
    out: Buffer,
}

impl Case {
    fn random(activation: Activation, rows: usize, width: usize, outputs: usize) -> Self {
        let mut random = Random::fresh();
        let mut values = |count| activation.random(&mut random, count);
        Case {
            activation,
            rows,
            width,
            outputs,
            x: values(rows * width),
            residual: values(rows * width),
            norm_weight: values(width),
            weights: values(outputs * width),
            matrix_bias: values(outputs),
        }
    }

    fn norm_params(&self, adds: bool, to: &Normed) -> RmsNormParams {
        RmsNormParams {
            x: if adds { self.x.address() } else { Address::NONE },
            residual: self.residual.address(),
            sum: to.sum.address(),
            weight: self.norm_weight.address(),
            out: to.out.address(),
            width: self.width as u32,
            epsilon: 1e-5,
        }
    }

    fn empty(&self) -> Normed {
        let [sum, out] = [0; 2].map(|_| self.activation.zeros(self.rows * self.width));
        Normed { sum, out }
    }

    fn normed(&self, adds: bool) -> Normed {
        let mut normed = self.empty();
        let params = self.norm_params(adds, &normed);
        let launch = rms_norm::launch(&params, self.rows as u32, self.activation).expect("good shapes");
        host::run(&launch, &params, &mut [normed.sum.values_mut(), normed.out.values_mut()]);
        normed
    }

    fn product(&self, x: Address, y: Address) -> MatmulParams {
        let sizes = [self.rows, self.width, self.outputs].map(|size| size as u32);
        let bias = self.matrix_bias.address();
        MatmulParams { bias, ..MatmulParams::dense([x, self.weights.address(), y], sizes) }
    }

    /// Returns the products of the normed rows.
    fn products(&self, normed: &Normed) -> Buffer {
        let mut y = self.activation.zeros(self.rows * self.outputs);
        let params = self.product(normed.out.address(), y.address());
        let launch = gemv::launch(&params, self.activation).expect("good shapes");
        host::run(&launch, &params, &mut [y.values_mut()]);
        y
    }
}

#[test]
fn norms_and_gated_products_have_the_bits_of_separate_kernels() {
    for activation in Activation::ALL {
        for (rows, width, pairs) in [(1, 576, 50), (8, 72, 9), (3, 1000, 4), (4, 2048, 6)] {
            for adds in [true, false] {
                let case = Case::random(activation, rows, width, 2 * pairs);
                let normed = case.normed(adds);
                let gate_up = case.products(&normed);
                let mut expected = activation.zeros(rows * pairs);
                let swiglu = SwigluParams {
                    gate_up: gate_up.address(),
                    out: expected.address(),
                    rows: rows as u32,
                    width: pairs as u32,
                };
                // The kernel takes eight values at a time.
                let gated = pairs.is_multiple_of(8);
                if gated {
                    let launch = swiglu::launch(&swiglu, activation).expect("good shapes");
                    host::run(&launch, &swiglu, &mut [expected.values_mut()]);
                } else {
                    let params = case.product(normed.out.address(), expected.address());
                    let params = MatmulParams { y_stride: pairs as u32, ..params };
                    let launch = gemv::gated(&params, activation).expect("good shapes");
                    host::run(&launch, &params, &mut [expected.values_mut()]);
                }
                let mut found = activation.zeros(rows * pairs);
                let mut sums = case.empty();
                let params = FusedGemvParams {
                    product: MatmulParams {
                        y_stride: pairs as u32,
                        ..case.product(Address::NONE, found.address())
                    },
                    norm: case.norm_params(adds, &sums),
                    qkv: QkvParams::NONE,
                };
                let launch = normed_gated(&params, activation).expect("good shapes");
                host::run(&launch, &params, &mut [found.values_mut(), sums.sum.values_mut()]);
                assert!(found.values() == expected.values(), "{activation} [{rows}, {width}]");
                assert!(sums.sum.values() == normed.sum.values(), "{activation} [{rows}, {width}]: sums");
            }
        }
    }
}

#[test]
fn qkv_projections_have_the_bits_of_separate_kernels() {
    const SLOTS: [u64; 8] = [5, 0, 17, 3, 9, 11, 1, 2];
    const POSITIONS: [u32; 8] = [0, 7, 4095, 131_071, 1, 2, 3, 400];
    let shapes = [(1, 576, 3, 1, 64, false), (8, 72, 2, 2, 16, true), (3, 2056, 1, 1, 80, true)];
    for activation in Activation::ALL {
        for (rows, width, heads, kv_heads, head_size, has_bias) in shapes {
            for (pairing, adds) in [(Pairing::Halves, true), (Pairing::Interleaved, false)] {
                let all = heads + 2 * kv_heads;
                let case = Case::random(activation, rows, width, all * head_size);
                let bias = activation.random(&mut Random::fresh(), all * head_size);
                let frequencies: Vec<f32> = (0..head_size / 2).map(|i| 0.9f32.powi(i as i32)).collect();
                let of = |qkv: &Buffer, pages: &[Buffer; 2]| QkvParams {
                    qkv: qkv.address(),
                    bias: if has_bias { bias.address() } else { Address::NONE },
                    positions: host::address(&POSITIONS),
                    slots: host::address(&SLOTS),
                    frequencies: host::address(&frequencies),
                    keys: pages[0].address(),
                    values: pages[1].address(),
                    rows: rows as u32,
                    heads: heads as u32,
                    kv_heads: kv_heads as u32,
                    head_size: head_size as u32,
                    pairing,
                    ..QkvParams::NONE
                };
                let empty = || [0; 2].map(|_| activation.zeros(18 * kv_heads * head_size));
                let normed = case.normed(adds);
                let mut expected = (case.products(&normed), empty());
                let separate = of(&expected.0, &expected.1);
                let launch =
                    qkv_kernel::launch(&separate, activation, PageFormat::Activations).expect("good shapes");
                let [keys, values] = &mut expected.1;
                let written = &mut [expected.0.values_mut(), keys.values_mut(), values.values_mut()];
                host::run(&launch, &separate, written);

                for is_normed in [false, true] {
                    if is_normed && !norms(rows as u32, width as u32) {
                        continue;
                    }
                    let mut found = (activation.zeros(rows * all * head_size), empty());
                    let mut sums = case.empty();
                    let params = FusedGemvParams {
                        product: case.product(normed.out.address(), Address::NONE),
                        norm: if is_normed { case.norm_params(adds, &sums) } else { RmsNormParams::NONE },
                        qkv: of(&found.0, &found.1),
                    };
                    let launch = qkv(&params, activation).expect("good shapes");
                    let [keys, values] = &mut found.1;
                    let out = found.0.values_mut();
                    let written = &mut [out, keys.values_mut(), values.values_mut(), sums.sum.values_mut()];
                    host::run(&launch, &params, written);
                    let how = format!("{activation} [{rows}, {width}] {pairing:?} normed: {is_normed}");
                    for (found, expected) in found.1.iter().zip(&expected.1) {
                        assert!(found.values() == expected.values(), "{how}: pages");
                    }
                    let queries = |rows: &Buffer| -> Vec<u16> {
                        let rows = rows.values().chunks(all * head_size);
                        rows.flat_map(|row| row[..heads * head_size].to_vec()).collect()
                    };
                    assert!(queries(&found.0) == queries(&expected.0), "{how}: queries");
                    assert!(!is_normed || sums.sum.values() == normed.sum.values(), "{how}: sums");
                }
            }
        }
    }
}

#[test]
fn shapes_that_no_block_can_norm_are_rejected() {
    let product = MatmulParams::dense([Address::NONE; 3], [5, 2048, 64]);
    let norm = RmsNormParams { width: 2048, ..RmsNormParams::NONE };
    let params = FusedGemvParams { product, norm, qkv: QkvParams::NONE };
    let error = normed_gated(&params, Activation::F16).expect_err("too many values").to_string();
    assert!(error.contains("10240") && error.contains("8192"), "{error}");
    let error = qkv(&params, Activation::F16).expect_err("no heads").to_string();
    assert!(error.contains("head_size"), "{error}");
    let heads = QkvParams { heads: 1, kv_heads: 1, head_size: 16, ..QkvParams::NONE };
    let error =
        qkv(&FusedGemvParams { qkv: heads, ..params }, Activation::F16).expect_err("too many outputs");
    assert!(error.to_string().contains("48 values"), "{error}");
}
