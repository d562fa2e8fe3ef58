//! Compares the operations of every tier that have one right result with the portable ones, bit by bit.

use std::marker::PhantomData;

use super::super::{Kernel, dispatch};
use super::*;
use crate::Isa;
use crate::random::Random;

/// Runs the operations on some bytes, and returns the lanes of all results, one after the other.
struct Operations<'a> {
    bytes: &'a [u8; 16 * 64],
    /// Numbers between -32767 and 32767.
    floats: &'a [f32; 16],
}

/// The results of one tier: a name for each register of 16 lanes.
type Results = Vec<(&'static str, [u32; 16])>;

/// Returns the lanes of a register of integers.
#[inline(always)]
fn lanes<S: Simd>(register: S::I) -> [u32; 16] {
    let mut lanes = [0; 16];
    // SAFETY: a register has 64 bytes; the tests run this inside a dispatched kernel.
    unsafe { S::store_i(lanes.as_mut_ptr().cast(), register) };
    lanes
}

/// Returns the bits of the lanes of a register of floats.
#[inline(always)]
fn bits<S: Simd>(register: S::F) -> [u32; 16] {
    let mut lanes = [0f32; 16];
    // SAFETY: a register has 16 lanes; the tests run this inside a dispatched kernel.
    unsafe { S::store(lanes.as_mut_ptr(), register) };
    lanes.map(f32::to_bits)
}

impl Kernel for Operations<'_> {
    type Output = Results;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Results {
        let mut results = Results::new();
        // SAFETY: the arrays are as long as what is read.
        unsafe {
            let at = |row: usize| self.bytes.as_ptr().add(64 * row);
            let mut rows = [S::zero_i(); 16];
            for (row, loaded) in rows.iter_mut().enumerate() {
                *loaded = S::load_i(at(row));
            }
            for row in S::transpose(rows) {
                results.push(("transpose", lanes::<S>(row)));
            }
            let [even, odd] = S::byte_pairs(rows[3]);
            let pairs = S::load_pairs(at(4).cast(), at(5).cast());
            let sum = S::dot_pairs(rows[7], S::load_pairs(at(8).cast(), at(9).cast()), even);
            let mut stored = [0i16; 32];
            S::store_i16(stored.as_mut_ptr(), S::load(self.floats.as_ptr()));
            let wide = S::dot_pairs(sum, odd, S::splat_4(stored.as_ptr().add(2).cast()));
            let table = self.bytes.first_chunk().expect("16 bytes");
            let nibbles = S::and(rows[5], S::splat_i8(15));
            // Activations are never -128.
            let four = self.bytes[900..904].iter().map(|byte| (*byte as i8).max(-127)).collect::<Vec<i8>>();
            results.extend([
                ("even byte_pairs", lanes::<S>(even)),
                ("odd byte_pairs", lanes::<S>(odd)),
                ("load_pairs", lanes::<S>(pairs)),
                ("splat_4", lanes::<S>(S::splat_4(at(6).add(1)))),
                ("dot_pairs", lanes::<S>(sum)),
                ("dot_pairs of stored", lanes::<S>(wide)),
                ("store_i16", lanes::<S>(S::load_i(stored.as_ptr().cast()))),
                ("lookup", lanes::<S>(S::lookup(table, nibbles))),
                ("dot", lanes::<S>(S::dot(rows[11], rows[12], four.as_ptr()))),
                ("or", lanes::<S>(S::or(rows[1], rows[2]))),
                ("shr", lanes::<S>(S::shr::<3>(rows[1]))),
                ("shl", lanes::<S>(S::shl::<5>(rows[1]))),
                ("add_i", lanes::<S>(S::add_i(rows[1], rows[2]))),
                ("sub_i", lanes::<S>(S::sub_i(rows[1], rows[2]))),
                ("to_f32", bits::<S>(S::to_f32(rows[1]))),
            ]);

            let floats = S::load(self.floats.as_ptr());
            let tenth = S::mul(floats, S::splat(1.0 / 259.0));
            let mut bytes = [0i8; 64];
            S::store_i8(bytes.as_mut_ptr(), tenth);
            let mut halves = [0u16; 32];
            S::store_f16(halves.as_mut_ptr(), floats);
            // Exponents below the largest one are those of numbers.
            let numbers: [u16; 16] = std::array::from_fn(|i| {
                u16::from_le_bytes([self.bytes[2 * i], self.bytes[2 * i + 1] & 0xbf])
            });
            let [first, second] = S::load_bf16_pairs(halves.as_ptr());
            let [low, high] = S::load_f8_pair(at(13));
            results.extend([
                ("store_i8", lanes::<S>(S::load_i(bytes.as_ptr().cast()))),
                ("store_f16", lanes::<S>(S::load_i(halves.as_ptr().cast()))),
                ("load_f16", bits::<S>(S::load_f16(numbers.as_ptr()))),
                ("load_bf16", bits::<S>(S::load_bf16(numbers.as_ptr()))),
                ("first load_bf16_pairs", bits::<S>(first)),
                ("second load_bf16_pairs", bits::<S>(second)),
                ("first load_f8_pair", bits::<S>(low)),
                ("second load_f8_pair", bits::<S>(high)),
                ("load_i8", bits::<S>(S::load_i8(at(14).cast()))),
                ("round", bits::<S>(S::round(tenth))),
                ("exp2_whole", bits::<S>(S::exp2_whole(S::round(S::mul(tenth, S::splat(0.99)))))),
                ("mul_exp2", bits::<S>(S::mul_exp2(S::splat(1.7), S::round(S::mul(tenth, S::splat(0.98)))))),
                ("div", bits::<S>(S::div(tenth, floats))),
                ("max", bits::<S>(S::max(tenth, S::splat(3.0)))),
                ("min", bits::<S>(S::min(tenth, S::splat(3.0)))),
                ("sub", bits::<S>(S::sub(floats, S::add(tenth, floats)))),
                ("max_lane", [S::max_lane(tenth).to_bits(); 16]),
            ]);
        }
        results
    }
}

#[test]
fn every_tier_computes_the_same_integers_and_conversions() {
    let mut random = Random::fresh();
    for _ in 0..50 {
        let bytes: [u8; 16 * 64] = std::array::from_fn(|_| random.below(256) as u8);
        let floats: [f32; 16] = std::array::from_fn(|_| random.signed() * 32767.0);
        // SAFETY: the arrays are as long as the kernel reads.
        let of = |isa| unsafe { dispatch(isa, Operations { bytes: &bytes, floats: &floats }) };
        let expected = of(Isa::Portable);
        // Lane 1 of the first register is the second row's first word.
        assert_eq!(expected[0].1[1], u32::from_le_bytes([bytes[64], bytes[65], bytes[66], bytes[67]]));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
            for ((name, found), (_, expected)) in of(isa).iter().zip(&expected) {
                assert_eq!(found, expected, "{name} of {isa}");
            }
        }
    }
}

/// Adds the lanes of 16 registers at once, and those of each register alone.
struct Sums<'a>(&'a [[f32; 16]; 16]);

impl Kernel for Sums<'_> {
    type Output = [[u32; 16]; 2];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        // SAFETY: each array is a register.
        unsafe {
            let mut registers = [S::zero(); 16];
            let mut alone = [0; 16];
            for (at, lanes) in self.0.iter().enumerate() {
                registers[at] = S::load(lanes.as_ptr());
                alone[at] = S::sum(registers[at]).to_bits();
            }
            [bits::<S>(S::sum_each(registers)), alone]
        }
    }
}

#[test]
fn sums_of_several_registers_are_those_of_each_register() {
    let mut random = Random::fresh();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        for _ in 0..50 {
            let lanes: [[f32; 16]; 16] = std::array::from_fn(|_| std::array::from_fn(|_| random.signed()));
            // SAFETY: the kernel reads only its array.
            let [together, alone] = unsafe { dispatch(isa, Sums(&lanes)) };
            assert_eq!(together, alone, "{isa}");
        }
    }
}

/// Rounds 32 numbers to BF16, in order and in pairs, and adds to 1 the products of the pairs with the first pair.
struct Rounded<'a>(&'a [f32; 32]);

impl Kernel for Rounded<'_> {
    type Output = Option<([u32; 16], [u32; 16], [u32; 16])>;
    const USES_BF16_DOTS: bool = true;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        if !S::BF16_DOTS {
            return None;
        }
        // SAFETY: the array has two registers.
        unsafe {
            let (low, high) = (S::load(self.0.as_ptr()), S::load(self.0.as_ptr().add(16)));
            let (ordered, pairs) = (S::round_bf16(low, high), S::bf16_pairs(low, high));
            let mut first = [0u8; 64];
            S::store_i(first.as_mut_ptr(), pairs);
            let dots = S::dot_bf16(S::splat(1.0), pairs, S::splat_4(first.as_ptr()));
            Some((lanes::<S>(ordered), lanes::<S>(pairs), bits::<S>(dots)))
        }
    }
}

#[test]
fn numbers_are_rounded_to_bf16_and_multiplied_in_pairs() {
    let mut random = Random::fresh();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        // Products and sums of small integers are exact.
        let floats: [f32; 32] = std::array::from_fn(|_| random.below(200) as f32 - 100.0);
        let fine: [f32; 32] = std::array::from_fn(|_| random.signed() * 1e3);
        // SAFETY: the kernels read only their array.
        let (found, found_fine) = unsafe { (dispatch(isa, Rounded(&floats)), dispatch(isa, Rounded(&fine))) };
        assert_eq!(found.is_some(), isa == Isa::Avx512Bf16, "{isa}");
        let (Some((_, _, dots)), Some((ordered, pairs, _))) = (found, found_fine) else { continue };
        let rounded = fine.map(|x| u32::from(half::bf16::from_f32(x).to_bits()));
        assert_eq!(ordered, std::array::from_fn(|i| rounded[2 * i] | rounded[2 * i + 1] << 16));
        assert_eq!(pairs, std::array::from_fn(|i| rounded[i] | rounded[i + 16] << 16));
        let dot = |i: usize| 1.0 + floats[i] * floats[0] + floats[i + 16] * floats[16];
        assert_eq!(dots, std::array::from_fn(|i| dot(i).to_bits()));
    }
}

/// Computes [`exp_for_bf16`] of 16 numbers.
struct ExpForBf16<'a>(&'a [f32; 16]);

impl Kernel for ExpForBf16<'_> {
    type Output = [u32; 16];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        // SAFETY: the array is a register.
        unsafe { bits::<S>(exp_for_bf16::<S>(S::load(self.0.as_ptr()))) }
    }
}

#[test]
fn powers_for_bf16_are_closer_than_bf16_and_nan_stays() {
    let mut random = Random::fresh();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
        // SAFETY: the kernel reads only its array.
        let of = |numbers: &[f32; 16]| unsafe { dispatch(isa, ExpForBf16(numbers)) }.map(f32::from_bits);
        for span in [0.0, 0.01, 1.0, 10.0, 80.0] {
            let numbers: [f32; 16] = std::array::from_fn(|_| -random.signed().abs() * span);
            for (x, found) in numbers.iter().zip(of(&numbers)) {
                let error = (f64::from(found) / f64::from(*x).exp() - 1.0).abs();
                assert!(error < 1.1e-4 && (span > 0.0 || found == 1.0), "{isa}: {found} for {x}");
            }
        }
        assert!(of(&[f32::MIN; 16]).iter().all(|x| (0.0..1e-37).contains(x)), "{isa}");
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16) {
            assert!(of(&[f32::NAN; 16]).iter().all(|x| x.is_nan()), "{isa}");
        }
    }
}

/// Integers up to a bound, in the order of a block.
struct Integers<const LARGEST: u8, const HALVES: bool>;

impl<const LARGEST: u8, const HALVES: bool> Blocks for Integers<LARGEST, HALVES> {
    const LARGEST: u8 = LARGEST;
    const HALVES: bool = HALVES;

    #[inline(always)]
    unsafe fn integers<S: Simd>(blocks: *const u8, index: usize) -> [S::I; 8] {
        let mut weights = [unsafe { S::zero_i() }; 8];
        for (register, weights) in weights.iter_mut().enumerate() {
            *weights = unsafe { S::load_i(blocks.add(64 * (8 * index + register))) };
        }
        weights
    }
}

/// Computes the dot products of the second of two blocks.
struct Dots<'a, B, const T: usize> {
    blocks: &'a [[u8; 8 * 64]; 2],
    activations: &'a [i8; 32 * 8],
    kind: PhantomData<B>,
}

impl<B: Blocks, const T: usize> Kernel for Dots<'_, B, T> {
    /// The sums, and whether they are those of the integers less 128.
    type Output = ([[[i32; 16]; 2]; T], bool);

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Self::Output {
        let mut lanes = [[[0i32; 16]; 2]; T];
        // SAFETY: the arrays are as long as what is read and written.
        unsafe {
            let dots = S::dots::<B, T>(self.blocks.as_ptr().cast(), 1, self.activations.as_ptr());
            for (lanes, sums) in lanes.iter_mut().zip(dots) {
                for (lanes, sums) in lanes.iter_mut().zip(sums) {
                    S::store_i(lanes.as_mut_ptr().cast(), sums);
                }
            }
        }
        (lanes, S::CENTERED_DOTS && B::LARGEST > 127)
    }
}

/// Computes the dot products of `T` tokens as a block defines them.
fn expected<B: Blocks, const T: usize>(dots: &Dots<'_, B, T>, centered: bool) -> [[[i32; 16]; 2]; T] {
    let mut sums = [[[0i32; 16]; 2]; T];
    for (token, sums) in sums.iter_mut().enumerate() {
        for (column, row) in (0..32).flat_map(|column| (0..16).map(move |row| (column, row))) {
            let weight = i32::from(dots.blocks[1][64 * (column / 4) + 4 * row + column % 4]);
            let weight = if centered { weight - 128 } else { weight };
            let half = usize::from(B::HALVES && column >= 16);
            sums[half][row] += weight * i32::from(dots.activations[32 * token + column]);
        }
    }
    sums
}

#[test]
fn dot_products_are_exact_up_to_the_largest_integers() {
    fn check<B: Blocks, const T: usize>(random: &mut Random) {
        let (largest, halves) = (B::LARGEST, B::HALVES);
        // Random integers, the largest, and the smallest.
        for extreme in [None, Some(largest), Some(0)] {
            let mut weight = || extreme.unwrap_or_else(|| random.below(usize::from(largest) + 1) as u8);
            let blocks: [[u8; 8 * 64]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| weight()));
            let sign = if random.below(2) == 0 { 127 } else { -127 };
            let mut activation = || if extreme.is_some() { sign } else { random.below(255) as i8 };
            let activations: [i8; 32 * 8] = std::array::from_fn(|_| activation().max(-127));
            let dots = || Dots::<B, T> { blocks: &blocks, activations: &activations, kind: PhantomData };
            for isa in Isa::ALL.into_iter().filter(|isa| isa.supported()) {
                // SAFETY: the arrays are as long as the kernel reads.
                let (computed, centered) = unsafe { dispatch(isa, dots()) };
                let expected = expected(&dots(), centered);
                assert_eq!(computed, expected, "{isa}, {T} tokens, up to {largest}, halves: {halves}");
            }
        }
    }
    let mut random = Random::fresh();
    macro_rules! check {
        ($($largest:literal, $halves:literal;)*) => {$(
            check::<Integers<$largest, $halves>, 1>(&mut random);
            check::<Integers<$largest, $halves>, 4>(&mut random);
        )*};
    }
    check! {
        3, false; 3, true; 7, true; 15, false; 15, true; 16, false; 24, false; 31, false; 63, true; 63, false; 64, false;
        127, false; 127, true; 255, false; 255, true;
    }
    check::<Integers<15, false>, 3>(&mut random);
    check::<Integers<63, true>, 8>(&mut random);
}

/// An intrinsic that is called instead of inlined, because the code that calls it was compiled without the features of its
/// tier, made products ten times slower.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn kernels_call_no_intrinsics() {
    use object::read::elf::ElfFile64;
    use object::{Endianness, Object, ObjectSymbol};

    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let program = ElfFile64::<Endianness>::parse(&*program).unwrap();
    let names: Vec<&str> = program.symbols().filter_map(|symbol| symbol.name().ok()).collect();
    assert!(names.iter().any(|name| name.contains("run_avx2")), "the program has no symbols");
    // Searches for bytes in other crates, which are not optimized in tests, call these.
    let others = ["load", "or_si", "set1_epi8", "cmpeq_epi8", "movemask_epi8"];
    let is_call = |name: &&&str| {
        let is_intrinsic = name.contains("core_arch") && name.contains("_mm");
        is_intrinsic && !others.iter().any(|other| name.contains(other))
    };
    let calls: Vec<&&str> = names.iter().filter(is_call).collect();
    assert!(calls.is_empty(), "{calls:#?}");
}
