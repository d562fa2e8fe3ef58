//! The portable tier, where vectors are plain arrays. It runs on any machine.
//!
//! Invariant: no instruction beyond the target's baseline is used.
//!
//! On x86-64, where this tier serves old machines and tests, an operation that takes many instructions is a call. Each is used in
//! dozens of kernels and numbers of rows, and inlined there it was more than half of the code of all tiers.

use half::f16;

use super::simd::Simd;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

type Floats = [f32; 16];
type Words = [u32; 16];

#[inline(always)]
fn zip(a: Floats, b: Floats, op: impl Fn(f32, f32) -> f32) -> Floats {
    std::array::from_fn(|lane| op(a[lane], b[lane]))
}

#[inline(always)]
fn zip_words(a: Words, b: Words, op: impl Fn(u32, u32) -> u32) -> Words {
    std::array::from_fn(|lane| op(a[lane], b[lane]))
}

/// Returns two bytes as a pair of signed 16-bit integers.
#[inline(always)]
fn pair_of(first: i8, second: i8) -> u32 {
    u32::from(i16::from(first) as u16) | u32::from(i16::from(second) as u16) << 16
}

// SAFETY: plain code; the caller guarantees that pointers are valid.
#[allow(clippy::missing_safety_doc)]
unsafe impl Simd for Portable {
    const HAS_VECTORS: bool = false;
    const MANY_REGISTERS: bool = false;
    const CENTERED_DOTS: bool = false;

    type F = Floats;
    type I = Words;

    #[inline(always)]
    unsafe fn zero() -> Floats {
        [0.0; 16]
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Floats {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Floats {
        unsafe { from.cast::<Floats>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Floats) {
        unsafe { to.cast::<Floats>().write_unaligned(value) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_f16(from: *const u16) -> Floats {
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Floats {
        let bits = unsafe { from.cast::<[u16; 16]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> [Floats; 2] {
        let pairs = unsafe { from.cast::<Words>().read_unaligned() };
        [pairs.map(|pair| f32::from_bits(pair << 16)), pairs.map(|pair| f32::from_bits(pair & !0xffff))]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_f8_pair(from: *const u8) -> [Floats; 2] {
        unsafe { [from, from.add(16)] }.map(|from| {
            unsafe { from.cast::<[u8; 16]>().read_unaligned() }.map(|code| {
                let magnitude = f32::from_bits(u32::from(code & 127) << 20) * 2f32.powi(112);
                f32::from_bits(magnitude.to_bits() | u32::from(code & 128) << 24)
            })
        })
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Floats {
        unsafe { from.cast::<[i8; 16]>().read_unaligned() }.map(f32::from)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store_f16(to: *mut u16, value: Floats) {
        let bits = value.map(|value| f16::from_f32(value).to_bits());
        unsafe { to.cast::<[u16; 16]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn add(a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Floats, b: Floats) -> Floats {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn fma(a: Floats, b: Floats, c: Floats) -> Floats {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn round(a: Floats) -> Floats {
        a.map(f32::round_ties_even)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn exp2_whole(a: Floats) -> Floats {
        a.map(|a| f32::from_bits(((a as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn sum(a: Floats) -> f32 {
        a.iter().sum()
    }
    #[inline(always)]
    unsafe fn max_lane(a: Floats) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |all, lane| all.max(*lane))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store_i8(to: *mut i8, value: Floats) {
        let bytes = value.map(|value| value.round_ties_even() as i8);
        unsafe { to.cast::<[i8; 16]>().write_unaligned(bytes) }
    }

    #[inline(always)]
    unsafe fn zero_i() -> Words {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> Words {
        unsafe { from.cast::<Words>().read_unaligned() }.map(u32::from_le)
    }
    #[inline(always)]
    unsafe fn splat_i8(value: u8) -> Words {
        [u32::from_ne_bytes([value; 4]); 16]
    }
    #[inline(always)]
    unsafe fn and(a: Words, b: Words) -> Words {
        zip_words(a, b, |a, b| a & b)
    }
    #[inline(always)]
    unsafe fn or(a: Words, b: Words) -> Words {
        zip_words(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(a: Words) -> Words {
        a.map(|a| a >> N)
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(a: Words) -> Words {
        a.map(|a| a << N)
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn lookup(table: &[u8; 16], bytes: Words) -> Words {
        bytes.map(|word| u32::from_le_bytes(word.to_le_bytes().map(|byte| table[usize::from(byte & 15)])))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn dot(sum: Words, bytes: Words, four: *const i8) -> Words {
        let four = unsafe { four.cast::<[i8; 4]>().read_unaligned() }.map(i32::from);
        std::array::from_fn(|lane| {
            let word = bytes[lane] as i32;
            let byte = |at: u32| (word >> (8 * at)) & 255;
            let dot = byte(0) * four[0] + byte(1) * four[1] + byte(2) * four[2] + byte(3) * four[3];
            (sum[lane] as i32 + dot) as u32
        })
    }
    #[inline(always)]
    unsafe fn splat_4(from: *const u8) -> Words {
        [u32::from_le_bytes(unsafe { from.cast::<[u8; 4]>().read_unaligned() }); 16]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn dot_pairs(sum: Words, a: Words, b: Words) -> Words {
        let product = |a: u32, b: u32| {
            let low = i32::from(a as i16) * i32::from(b as i16);
            let high = i32::from((a >> 16) as i16) * i32::from((b >> 16) as i16);
            low.wrapping_add(high) as u32
        };
        std::array::from_fn(|lane| sum[lane].wrapping_add(product(a[lane], b[lane])))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn byte_pairs(a: Words) -> [Words; 2] {
        let pair = |first: u8, second: u8| pair_of(first as i8, second as i8);
        let bytes = |word: u32| word.to_le_bytes();
        [a.map(|a| pair(bytes(a)[0], bytes(a)[2])), a.map(|a| pair(bytes(a)[1], bytes(a)[3]))]
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn load_pairs(a: *const i8, b: *const i8) -> Words {
        let [a, b] = [a, b].map(|from| unsafe { from.cast::<[i8; 16]>().read_unaligned() });
        std::array::from_fn(|lane| pair_of(a[lane], b[lane]))
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn store_i16(to: *mut i16, value: Floats) {
        let integers = value.map(|value| value.round_ties_even() as i16);
        unsafe { to.cast::<[i16; 16]>().write_unaligned(integers) }
    }
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn transpose(rows: [Words; 16]) -> [Words; 16] {
        std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
    }
    #[inline(always)]
    unsafe fn store_i(to: *mut u8, value: Words) {
        unsafe { to.cast::<Words>().write_unaligned(value.map(u32::to_le)) }
    }
    #[inline(always)]
    unsafe fn to_f32(a: Words) -> Floats {
        a.map(|a| a as i32 as f32)
    }
    #[inline(always)]
    unsafe fn add_i(a: Words, b: Words) -> Words {
        zip_words(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn sub_i(a: Words, b: Words) -> Words {
        zip_words(a, b, u32::wrapping_sub)
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
}
