//! Checks what is stored in FP8 pages against the twin on the CPU.

use super::twin::{Fp8Head, decoded};
use super::*;
use crate::cuda::host::{self, Buffer};
use crate::cuda::qkv::{self, Pairing, QkvParams};
use crate::cuda::{Activation, Address};
use crate::random::Random;

const PAGES: usize = 2;
const EPSILON: f32 = 1e-6;

/// Queries, keys and values of some rows, and pages that get the keys and values.
struct Case {
    activation: Activation,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    qkv: Buffer,
    slots: Vec<u64>,
    positions: Vec<u32>,
}

/// The pages after a launch.
struct Stored {
    keys: Buffer,
    values: Buffer,
    scales: Buffer,
}

impl Case {
    fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_size
    }

    /// Stores these rows of the case in empty pages.
    fn stored(&self, rows: std::ops::Range<usize>, norm: Option<&Buffer>) -> Stored {
        let Case { activation, heads, kv_heads, head_size, .. } = *self;
        let row = self.row();
        let mut qkv = Buffer::new(self.qkv.values()[rows.start * row..rows.end * row].to_vec());
        let (slots, positions) = (self.slots[rows.clone()].to_vec(), self.positions[rows.clone()].to_vec());
        let frequencies: Vec<f32> = (0..head_size / 2).map(|pair| 0.9f32.powi(pair as i32)).collect();
        let half = PageFormat::Fp8.half_bytes(kv_heads, head_size) * PAGES;
        let scale_bytes = PageFormat::Fp8.scale_bytes(kv_heads) * PAGES;
        let empty = |bytes: usize| Buffer::new(vec![0; bytes / 2]);
        let mut stored = Stored { keys: empty(half), values: empty(half), scales: empty(scale_bytes) };
        let params = QkvParams {
            qkv: qkv.address(),
            k_norm: norm.map_or(Address::NONE, Buffer::address),
            positions: host::address(&positions),
            slots: host::address(&slots),
            frequencies: host::address(&frequencies),
            keys: stored.keys.address(),
            values: stored.values.address(),
            scales: stored.scales.address(),
            rows: rows.len() as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_size: head_size as u32,
            pairing: Pairing::Halves,
            epsilon: EPSILON,
            ..QkvParams::NONE
        };
        let launch = qkv::launch(&params, activation, PageFormat::Fp8).expect("good shapes");
        let Stored { keys, values, scales } = &mut stored;
        let written = &mut [qkv.values_mut(), keys.values_mut(), values.values_mut(), scales.values_mut()];
        host::run(&launch, &params, written);
        stored
    }

    /// Returns the codes and the scale of a key (0) or a value (1).
    fn head(&self, stored: &Stored, slot: u64, kv_head: usize, which: usize) -> Fp8Head {
        let slot = slot as usize;
        let at = (slot * self.kv_heads + kv_head) * self.head_size;
        let half = if which == 0 { &stored.keys } else { &stored.values };
        let bytes: Vec<u8> = half.values().iter().flat_map(|pair| pair.to_le_bytes()).collect();
        let scale = ((slot / POSITIONS * self.kv_heads + kv_head) * 2 + which) * POSITIONS + slot % POSITIONS;
        let words = &stored.scales.values()[2 * scale..][..2];
        let bits = u32::from(words[0]) | u32::from(words[1]) << 16;
        Fp8Head { codes: bytes[at..at + self.head_size].to_vec(), scale: f32::from_bits(bits) }
    }
}

/// Returns rows of random values. A shape is the numbers of query heads and of heads of keys, and the head size.
fn case(activation: Activation, shape: (usize, usize, usize), value: impl FnMut() -> f32) -> Case {
    let (heads, kv_heads, head_size) = shape;
    let slots = vec![5, 0, 17, 31];
    let mut value = value;
    let count = slots.len() * (heads + 2 * kv_heads) * head_size;
    let qkv = Buffer::new((0..count).map(|_| activation.encode(value())).collect());
    // At position 0 nothing is rotated.
    let positions = vec![0; slots.len()];
    Case { activation, heads, kv_heads, head_size, qkv, slots, positions }
}

const SHAPES: [(usize, usize, usize); 5] = [(9, 3, 64), (4, 4, 128), (5, 1, 16), (2, 1, 256), (3, 2, 96)];

#[test]
fn a_head_is_rounded_to_nearest_with_the_scale_of_its_largest_value() {
    let mut random = Random::fresh();
    for activation in Activation::ALL {
        for shape in SHAPES {
            // Values down to those below the smallest of the format.
            let case =
                case(activation, shape, || random.signed() * 2f32.powi(-(random.next_u64() as i32 & 15)));
            let stored = case.stored(0..case.slots.len(), None);
            for (row, slot) in case.slots.iter().copied().enumerate() {
                for head in 0..2 * case.kv_heads {
                    let at = row * case.row() + (case.heads + head) * case.head_size;
                    let values = &case.qkv.values()[at..at + case.head_size];
                    let values: Vec<f32> =
                        values.iter().map(|bits| activation.decode(*bits) as f32).collect();
                    let expected = Fp8Head::of(&values);
                    let found = case.head(&stored, slot, head % case.kv_heads, head / case.kv_heads);
                    assert_eq!(found.scale, expected.scale, "{activation} {shape:?} row {row} head {head}");
                    // They are compared as values, because a rotation by nothing may change the sign of zero.
                    let [found, expected] = [found, expected].map(|head| head.codes.into_iter().map(decoded));
                    assert!(found.eq(expected), "{activation} {shape:?} row {row} head {head}");
                }
            }
        }
    }
}

#[test]
fn a_normed_and_rotated_head_is_stored_within_half_a_step() {
    let mut random = Random::fresh();
    let mut case = case(Activation::F16, (3, 2, 64), || random.signed());
    case.positions = vec![0, 7, 300, 4095];
    let norm = Activation::F16.random(&mut random, case.head_size);
    let stored = case.stored(0..case.slots.len(), Some(&norm));
    for (row, slot) in case.slots.iter().copied().enumerate() {
        for kv_head in 0..case.kv_heads {
            let at = row * case.row() + (case.heads + kv_head) * case.head_size;
            let key = case.qkv.values()[at..at + case.head_size].iter();
            let mut key: Vec<f64> = key.map(|bits| case.activation.decode(*bits)).collect();
            let mean = key.iter().map(|value| value * value).sum::<f64>() / key.len() as f64;
            for (value, weight) in key.iter_mut().zip(norm.values()) {
                *value *= case.activation.decode(*weight) / (mean + f64::from(EPSILON)).sqrt();
            }
            let half = case.head_size / 2;
            for pair in 0..half {
                let angle = f64::from(case.positions[row]) * f64::from(0.9f32.powi(pair as i32));
                let (x, y) = (key[pair], key[pair + half]);
                key[pair] = x * angle.cos() - y * angle.sin();
                key[pair + half] = x * angle.sin() + y * angle.cos();
            }
            let found = case.head(&stored, slot, kv_head, 0);
            let scale = f64::from(found.scale);
            for (code, value) in found.codes.iter().zip(&key) {
                // Half a step of three bits, or of the smallest values. Angles are float32.
                let bound = (value.abs() / 16.0).max(scale * 2f64.powi(-10)) + 4e-3;
                let stored = decoded(*code) * scale;
                assert!((stored - value).abs() <= bound, "{stored} for {value}");
            }
        }
    }
}

#[test]
fn what_is_stored_depends_on_no_other_row() {
    let mut random = Random::fresh();
    for activation in Activation::ALL {
        let mut case = case(activation, (4, 2, 64), || random.signed());
        case.positions = vec![21, 16, 33, 47];
        let together = case.stored(0..4, None);
        for row in 0..4 {
            let alone = case.stored(row..row + 1, None);
            for head in 0..2 * case.kv_heads {
                let (kv_head, which) = (head % case.kv_heads, head / case.kv_heads);
                let [found, expected] =
                    [&together, &alone].map(|stored| case.head(stored, case.slots[row], kv_head, which));
                assert_eq!((found.codes, found.scale), (expected.codes, expected.scale));
            }
        }
    }
}

#[test]
fn zeros_are_stored_and_what_is_not_a_number_stays_so() {
    for (special, is_number) in [(0.0, true), (f32::NAN, false), (f32::INFINITY, false)] {
        let mut index = 0;
        let case = case(Activation::Bf16, (2, 1, 16), || {
            index += 1;
            // All values are zeros, but one of each head.
            if index % 16 == 3 { special } else { 0.0 }
        });
        let stored = case.stored(0..1, None);
        for which in 0..2 {
            let found = case.head(&stored, case.slots[0], 0, which);
            assert_eq!(found.scale.is_nan(), !is_number, "{special}");
            let values = found.codes.iter().map(|code| decoded(*code) * f64::from(found.scale));
            assert!(values.into_iter().all(|value| value.is_nan() != is_number), "{special}");
        }
    }
}

#[test]
fn an_fp8_page_takes_little_more_than_half() {
    let bytes = PageFormat::ALL.map(|format| format.page_bytes(8, 128));
    assert_eq!(bytes, [65_536, 33_792]);
    assert_eq!(PageFormat::Fp8.page_bytes(3, 64), 2 * 16 * 3 * (64 + 4));
}
