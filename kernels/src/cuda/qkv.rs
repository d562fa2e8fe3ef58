//! Bias, head norms and rotation after the QKV projection, and the write of keys and values into their pages.

use super::{Activation, Address, Family, Kernel, Launch, PageFormat, WARP};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Number of heads per block, each processed by one warp.
const WARPS: u32 = 4;
const MAX_HEAD_SIZE: u32 = 2 * WARP * device_constant!("qkv.cu", "MAX_PAIRS");

/// The pairs of a head's values that rotate together.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// The n-th value of the first half with the n-th value of the second half.
    Halves = 0,
    /// Adjacent values.
    Interleaved = 1,
}

/// The parameters of the kernel. The rows may be of several sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QkvParams {
    /// `[rows, (heads + 2 · kv_heads) · head_size]`. The queries are changed in place.
    pub qkv: Address,
    /// One value per value of a row of `qkv`. It may be [`Address::NONE`].
    pub bias: Address,
    /// `[head_size]`. It may be [`Address::NONE`].
    pub q_norm: Address,
    /// `[head_size]`. It may be [`Address::NONE`].
    pub k_norm: Address,
    /// u32 `[rows]`.
    pub positions: Address,
    /// u64 `[rows]`: page · PAGE_POSITIONS + offset in the page.
    pub slots: Address,
    /// f32 `[head_size / 2]`: radians per position.
    pub frequencies: Address,
    /// `[pages · PAGE_POSITIONS, kv_heads, head_size]`.
    pub keys: Address,
    /// `[pages · PAGE_POSITIONS, kv_heads, head_size]`.
    pub values: Address,
    /// f32 `[pages, kv_heads, 2, PAGE_POSITIONS]`: the scales of FP8 keys and of FP8 values.
    pub scales: Address,
    pub rows: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_size: u32,
    pub pairing: Pairing,
    pub epsilon: f32,
}

impl QkvParams {
    /// Stands for rows that are no queries, keys and values.
    pub const NONE: Self = QkvParams {
        qkv: Address::NONE,
        bias: Address::NONE,
        q_norm: Address::NONE,
        k_norm: Address::NONE,
        positions: Address::NONE,
        slots: Address::NONE,
        frequencies: Address::NONE,
        keys: Address::NONE,
        values: Address::NONE,
        scales: Address::NONE,
        rows: 0,
        heads: 0,
        kv_heads: 0,
        head_size: 0,
        pairing: Pairing::Halves,
        epsilon: 0.0,
    };
}

/// Returns the launch. Fails unless `head_size` is a multiple of 8 and within the kernel's bound.
pub fn launch(params: &QkvParams, activation: Activation, pages: PageFormat) -> Result<Launch, KernelError> {
    super::multiple_of_8("qkv", "head_size", params.head_size)?;
    super::at_most("qkv", "head_size", params.head_size, MAX_HEAD_SIZE)?;
    let heads = u64::from(params.heads) + 2 * u64::from(params.kv_heads);
    let blocks = super::blocks("qkv", (u64::from(params.rows) * heads).div_ceil(WARPS.into()))?;
    let kernel = pages.of(Kernel::of(Family::Qkv)).activation(activation);
    Ok(Launch::new(kernel, [blocks, 1, 1], WARPS * WARP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuda::host, random::Random};

    const ROWS: usize = 3;
    const SLOTS: [u64; ROWS] = [5, 0, 17];
    const POSITIONS: [u32; ROWS] = [0, 7, 4095];
    const EPSILON: f64 = 1e-6;

    struct Case {
        heads: usize,
        kv_heads: usize,
        head_size: usize,
        pairing: Pairing,
        /// Whether there are a bias and norms for queries and keys.
        dressed: bool,
    }

    impl Case {
        fn check(&self, activation: Activation) {
            let Case { heads, kv_heads, head_size, pairing, dressed } = *self;
            let all = heads + 2 * kv_heads;
            let mut random = Random::fresh();
            let mut qkv = activation.random(&mut random, ROWS * all * head_size);
            let bias = activation.random(&mut random, all * head_size);
            let norms = [0, 1].map(|_| activation.random(&mut random, head_size));
            let frequencies: Vec<f32> =
                (0..head_size / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / head_size as f32)).collect();
            let mut pages = [0, 1].map(|_| activation.random(&mut random, 18 * kv_heads * head_size));
            let before = (qkv.values().to_vec(), pages.each_ref().map(|pages| pages.values().to_vec()));
            let given = |address| if dressed { address } else { Address::NONE };
            let params = QkvParams {
                qkv: qkv.address(),
                bias: given(bias.address()),
                q_norm: given(norms[0].address()),
                k_norm: given(norms[1].address()),
                positions: host::address(&POSITIONS),
                slots: host::address(&SLOTS),
                frequencies: host::address(&frequencies),
                keys: pages[0].address(),
                values: pages[1].address(),
                scales: Address::NONE,
                rows: ROWS as u32,
                heads: heads as u32,
                kv_heads: kv_heads as u32,
                head_size: head_size as u32,
                pairing,
                epsilon: EPSILON as f32,
            };
            let launch = launch(&params, activation, PageFormat::Activations).expect("good shapes");
            let [keys, values] = &mut pages;
            host::run(&launch, &params, &mut [qkv.values_mut(), keys.values_mut(), values.values_mut()]);

            let mut expected_pages = before.1.each_ref().map(|pages| decoded(activation, pages));
            let mut expected_qkv = decoded(activation, &before.0);
            for row in 0..ROWS {
                for head in 0..all {
                    let at = (row * all + head) * head_size;
                    let mut value: Vec<f64> = (0..head_size)
                        .map(|i| activation.decode(before.0[at + i]))
                        .zip(bias.values()[head * head_size..].iter())
                        .map(|(value, bias)| value + if dressed { activation.decode(*bias) } else { 0.0 })
                        .collect();
                    let norm = norms.get(usize::from(head >= heads)).filter(|_| head < heads + kv_heads);
                    if let Some(norm) = norm {
                        if dressed {
                            let mean = value.iter().map(|v| v * v).sum::<f64>() / head_size as f64;
                            for (value, weight) in value.iter_mut().zip(norm.values()) {
                                *value *= activation.decode(*weight) / (mean + EPSILON).sqrt();
                            }
                        }
                        rotate(&mut value, pairing, POSITIONS[row], &frequencies);
                    }
                    if head < heads {
                        expected_qkv[at..at + head_size].copy_from_slice(&value);
                    } else {
                        let (which, kv_head) = ((head - heads) / kv_heads, (head - heads) % kv_heads);
                        let slot = (SLOTS[row] as usize * kv_heads + kv_head) * head_size;
                        expected_pages[which][slot..slot + head_size].copy_from_slice(&value);
                    }
                }
            }
            // Angles are float32; at position 4095 their last bit is 0.0002 radians.
            activation.assert_close(qkv.values(), &expected_qkv, 4e-3);
            for (pages, expected) in pages.iter().zip(&expected_pages) {
                activation.assert_close(pages.values(), expected, 4e-3);
            }
        }
    }

    fn decoded(activation: Activation, values: &[u16]) -> Vec<f64> {
        values.iter().map(|value| activation.decode(*value)).collect()
    }

    fn rotate(value: &mut [f64], pairing: Pairing, position: u32, frequencies: &[f32]) {
        let half = value.len() / 2;
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (first, second) = match pairing {
                Pairing::Halves => (pair, pair + half),
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
            };
            let (sine, cosine) = (f64::from(position) * f64::from(*frequency)).sin_cos();
            let (x, y) = (value[first], value[second]);
            (value[first], value[second]) = (x * cosine - y * sine, x * sine + y * cosine);
        }
    }

    #[test]
    fn heads_are_biased_normalized_rotated_and_stored() {
        for activation in Activation::ALL {
            for (heads, kv_heads, head_size) in [(9, 3, 64), (4, 4, 128), (5, 1, 16), (2, 1, 256), (3, 1, 80)]
            {
                for pairing in [Pairing::Halves, Pairing::Interleaved] {
                    for dressed in [false, true] {
                        Case { heads, kv_heads, head_size, pairing, dressed }.check(activation);
                    }
                }
            }
        }
    }
}
