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

/// Computes the dot products of a block whose integers are at most `largest`.
struct Dots<'a, const T: usize> {
    weights: &'a [u8; 8 * 64],
    activations: &'a [i8; 32 * 8],
    largest: u8,
    halves: bool,
}

impl<const T: usize> Kernel for Dots<'_, T> {
    type Output = [[[i32; 16]; 2]; T];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        let mut lanes = [[[0i32; 16]; 2]; T];
        // SAFETY: the arrays are as long as what is read and written.
        unsafe {
            let weights = std::array::from_fn(|register| S::load_i(self.weights.as_ptr().add(64 * register)));
            let Dots { largest, halves, .. } = self;
            let block = Block { weights, largest, halves, zero: S::zero_i() };
            for (lanes, sums) in lanes.iter_mut().zip(S::dots::<T>(block, self.activations.as_ptr())) {
                for (lanes, sums) in lanes.iter_mut().zip(sums) {
                    S::store_i(lanes.as_mut_ptr().cast(), sums);
                }
            }
        }
        lanes
    }
}

/// Computes the dot products of `T` tokens as a block defines them.
fn expected<const T: usize>(dots: &Dots<'_, T>) -> [[[i32; 16]; 2]; T] {
    let mut sums = [[[0i32; 16]; 2]; T];
    for (token, sums) in sums.iter_mut().enumerate() {
        for (column, row) in (0..32).flat_map(|column| (0..16).map(move |row| (column, row))) {
            let weight = i32::from(dots.weights[64 * (column / 4) + 4 * row + column % 4]);
            let half = usize::from(dots.halves && column >= 16);
            sums[half][row] += weight * i32::from(dots.activations[32 * token + column]);
        }
    }
    sums
}

#[test]
fn dot_products_are_exact_up_to_the_largest_integers() {
    fn check<const T: usize>(random: &mut Random, largest: u8, halves: bool) {
        for extreme in [false, true] {
            let mut weight = || if extreme { largest } else { random.below(usize::from(largest) + 1) as u8 };
            let weights = std::array::from_fn(|_| weight());
            let sign = if random.below(2) == 0 { 127 } else { -127 };
            let mut activation = || if extreme { sign } else { random.below(255) as i8 };
            let activations = std::array::from_fn(|_| activation().max(-127));
            let dots = |weights, activations| Dots::<T> { weights, activations, largest, halves };
            let expected = expected(&dots(&weights, &activations));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
                // SAFETY: the arrays are as long as the kernel reads.
                let computed = unsafe { dispatch(isa, dots(&weights, &activations)) };
                assert_eq!(computed, expected, "{isa}, {T} tokens, up to {largest}, halves: {halves}");
            }
        }
    }
    let mut random = Random::fresh();
    for largest in [3, 7, 15, 24, 31, 63, 127, 128, 255] {
        for halves in [false, true] {
            check::<1>(&mut random, largest, halves);
            check::<2>(&mut random, largest, halves);
            check::<4>(&mut random, largest, halves);
            check::<8>(&mut random, largest, halves);
        }
    }
}

/// An intrinsic that is called instead of inlined, because the code that calls it was compiled without the features of its
/// tier, makes a kernel some twenty times slower.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn kernels_call_no_intrinsics() {
    use object::read::elf::ElfFile64;
    use object::{Endianness, Object, ObjectSymbol};

    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let program = ElfFile64::<Endianness>::parse(&*program).unwrap();
    let names: Vec<&str> = program.symbols().filter_map(|symbol| symbol.name().ok()).collect();
    assert!(names.iter().any(|name| name.contains("run_avx2")), "the program has no symbols");
    let calls: Vec<&&str> =
        names.iter().filter(|name| name.contains("core_arch") && name.contains("_mm")).collect();
    assert!(calls.is_empty(), "{calls:#?}");
}
