//! Compares the integer operations of every tier with the portable ones, bit by bit.

use super::super::{Kernel, dispatch};
use super::*;
use crate::Isa;
use crate::random::Random;

/// Runs the operations on some bytes, and returns the lanes of all results, one after the other.
struct Operations<'a> {
    bytes: &'a [u8; 16 * 64],
    floats: &'a [f32; 16],
}

impl Kernel for Operations<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Vec<u32> {
        let mut results = Vec::new();
        let mut add = |register: S::I| {
            let mut lanes = [0u8; 64];
            // SAFETY: a register has 64 bytes.
            unsafe { S::store_i(lanes.as_mut_ptr(), register) };
            results.extend(lanes.as_chunks::<4>().0.iter().map(|lane| u32::from_le_bytes(*lane)));
        };
        // SAFETY: the arrays are as long as what is read.
        unsafe {
            let at = |row: usize| self.bytes.as_ptr().add(64 * row);
            let rows: [S::I; 16] = std::array::from_fn(|row| S::load_i(at(row)));
            S::transpose(rows).into_iter().for_each(&mut add);
            let [even, odd] = S::byte_pairs(rows[3]);
            let pairs = S::load_pairs(at(4).cast(), at(5).cast());
            let four = S::splat_4(at(6).add(1));
            [even, odd, pairs, four].into_iter().for_each(&mut add);
            let sum = S::dot_pairs(rows[7], S::load_pairs(at(8).cast(), at(9).cast()), even);
            let mut stored = [0i16; 32];
            S::store_i16(stored.as_mut_ptr(), S::load(self.floats.as_ptr()));
            let wide = S::dot_pairs(sum, odd, S::splat_4(stored.as_ptr().add(2).cast()));
            [sum, wide, S::load_i(stored.as_ptr().cast())].into_iter().for_each(&mut add);
        }
        results
    }
}

#[test]
fn every_tier_computes_the_same_integers() {
    let mut random = Random::fresh();
    for _ in 0..20 {
        let bytes: [u8; 16 * 64] = std::array::from_fn(|_| random.below(256) as u8);
        let floats: [f32; 16] = std::array::from_fn(|_| random.signed() * 32767.0);
        // SAFETY: the arrays are as long as the kernel reads.
        let of = |isa| unsafe { dispatch(isa, Operations { bytes: &bytes, floats: &floats }) };
        let expected = of(Isa::Portable);
        // Lane 1 of the first register is the second row's first word.
        assert_eq!(expected[1], u32::from_le_bytes([bytes[64], bytes[65], bytes[66], bytes[67]]));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            assert_eq!(of(isa), expected, "{isa}");
        }
    }
}
