//! Loads and stores of keys and values in each storage format.
//!
//! Invariant: all stored values are finite, because values that one sequence leaves in a page must not turn the masked
//! weights of another sequence into NaN.

use super::Kernel;
use super::simd::Simd;

/// Maximum head size.
pub(crate) const MAX_HEAD: usize = 256;
/// Maximum number of values of a latent.
pub(crate) const MAX_LATENT: usize = 512;
/// Number of tokens per page.
pub(crate) const PAGE: usize = 16;

/// A storage format of keys and values.
pub(crate) trait KvFormat: Copy {
    type Element: Copy + Default;
    /// The largest magnitude that can be stored.
    const LIMIT: f32;
    /// Whether each head of each token has a scale by which stored values are multiplied.
    const SCALED: bool;
    /// If true, tiers with dot products of BF16 numbers round the operands of attention to BF16.
    const ROUNDED: bool;
    /// If true, the pages hold pairs of BF16 numbers: two dimensions of a key lie side by side, and so do the values of two tokens.
    /// Only tiers with dot products of BF16 numbers have kernels for them.
    const PAIRED: bool = false;
    /// Distance between two columns of a token's value in elements.
    const COLUMN: usize = if Self::PAIRED { 2 } else { 1 };

    /// Loads 16 values as floats. Pairs are not loaded like this.
    ///
    /// # Safety
    /// `from` is valid for 16 values; call inside a dispatched kernel.
    unsafe fn load<S: Simd>(from: *const Self::Element) -> S::F;

    /// Loads 16 pairs of BF16 numbers, rounding what is stored in another format. Stored pairs begin at `first`.
    ///
    /// # Safety
    /// Both pointers are valid for 16 values; call inside a dispatched kernel of a tier with dot products of BF16 numbers.
    #[inline(always)]
    unsafe fn load_pairs<S: Simd>(first: *const Self::Element, second: *const Self::Element) -> S::I {
        // SAFETY: guaranteed by the caller.
        unsafe { S::bf16_pairs(Self::load::<S>(first), Self::load::<S>(second)) }
    }

    /// Stores 16 values. Pairs are not stored like this.
    ///
    /// # Safety
    /// `to` has room for 16 values; call inside a dispatched kernel.
    unsafe fn store<S: Simd>(to: *mut Self::Element, values: S::F);
}

#[derive(Clone, Copy)]
pub(crate) struct KvF32;
#[derive(Clone, Copy)]
pub(crate) struct KvF16;
#[derive(Clone, Copy)]
pub(crate) struct KvBf16;
#[derive(Clone, Copy)]
pub(crate) struct KvI8;

impl KvFormat for KvF32 {
    type Element = f32;
    const LIMIT: f32 = f32::MAX;
    const SCALED: bool = false;
    const ROUNDED: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const f32) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut f32, values: S::F) {
        // SAFETY: guaranteed by the caller.
        unsafe { S::store(to, values) }
    }
}

impl KvFormat for KvF16 {
    type Element = u16;
    const LIMIT: f32 = 65504.0;
    const SCALED: bool = false;
    const ROUNDED: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u16) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_f16(from) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut u16, values: S::F) {
        // SAFETY: guaranteed by the caller.
        unsafe { S::store_f16(to, values) }
    }
}

impl KvFormat for KvBf16 {
    type Element = u16;
    const LIMIT: f32 = f32::from_bits(0x7f7f_0000);
    const SCALED: bool = false;
    const ROUNDED: bool = true;
    const PAIRED: bool = true;

    unsafe fn load<S: Simd>(_from: *const u16) -> S::F {
        unreachable!("pairs are loaded together")
    }

    #[inline(always)]
    unsafe fn load_pairs<S: Simd>(first: *const u16, _second: *const u16) -> S::I {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_i(first.cast()) }
    }

    unsafe fn store<S: Simd>(_to: *mut u16, _values: S::F) {
        unreachable!("the halves of pairs are stored one by one")
    }
}

impl KvFormat for KvI8 {
    type Element = i8;
    const LIMIT: f32 = 127.0;
    const SCALED: bool = true;
    const ROUNDED: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const i8) -> S::F {
        // SAFETY: guaranteed by the caller.
        unsafe { S::load_i8(from) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut i8, values: S::F) {
        // SAFETY: guaranteed by the caller.
        unsafe { S::store_i8(to, values) }
    }
}

/// Stores one head's key and value of one position.
pub(crate) struct StoreHead<'a, Kv: KvFormat> {
    /// The key. It and the value have at most `MAX_HEAD` values each.
    pub key: &'a [f32],
    pub value: &'a [f32],
    /// Destination of the key's first dimension. Dimensions are `PAGE` elements apart.
    pub keys: *mut Kv::Element,
    /// Destination of the value, which is contiguous and padded to a multiple of 16.
    pub values: *mut Kv::Element,
    /// Destinations of the two scales. They are written only if the format is scaled.
    pub key_scale: *mut f32,
    pub value_scale: *mut f32,
}

impl<Kv: KvFormat> Kernel for StoreHead<'_, Kv> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees room for the head and its scales; the array has 16 values.
        unsafe {
            let (key_factor, value_factor) = match Kv::SCALED {
                true => (scale(self.key, self.key_scale), scale(self.value, self.value_scale)),
                false => (1.0, 1.0),
            };
            for at in (0..self.key.len()).step_by(16) {
                let mut stored = [Kv::Element::default(); 16];
                Kv::store::<S>(stored.as_mut_ptr(), storable::<S, Kv>(&self.key[at..], key_factor));
                for (d, element) in stored.iter().take(self.key.len() - at).enumerate() {
                    self.keys.add((at + d) * PAGE).write(*element);
                }
                Kv::store::<S>(self.values.add(at), storable::<S, Kv>(&self.value[at..], value_factor));
            }
        }
    }
}

/// Stores one head's key and value of one position in pairs of BF16 numbers.
pub(crate) struct StorePairs<'a> {
    /// The key. It and the value have at most `MAX_HEAD` values each.
    pub key: &'a [f32],
    pub value: &'a [f32],
    /// Destination of the first pair of the key's dimensions. Pairs are `PAGE` apart.
    pub keys: *mut u32,
    /// Destination of the value's first column. Every second element belongs to the other token of the pair.
    pub values: *mut u16,
}

impl Kernel for StorePairs<'_> {
    type Output = ();
    const USES_BF16_DOTS: bool = true;
    const NEEDS_BF16_DOTS: bool = true;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller guarantees room for the head.
        unsafe {
            for at in (0..self.key.len()).step_by(32) {
                let pairs = (self.key.len() - at).div_ceil(2).min(16);
                let rounded = Rounded::new::<S>(&self.key[at..]).0;
                for (pair, halves) in rounded.as_chunks::<2>().0[..pairs].iter().enumerate() {
                    let pair_of_columns = u32::from(halves[0]) | u32::from(halves[1]) << 16;
                    self.keys.add((at / 2 + pair) * PAGE).write(pair_of_columns);
                }
            }
            for at in (0..self.value.len()).step_by(32) {
                let columns = (self.value.len() - at).min(32);
                let rounded = Rounded::new::<S>(&self.value[at..]).0;
                for (column, value) in rounded[..columns].iter().enumerate() {
                    self.values.add(2 * (at + column)).write(*value);
                }
            }
        }
    }
}

/// The BF16 numbers nearest to 32 values.
#[repr(align(64))]
struct Rounded([u16; 32]);

impl Rounded {
    /// Rounds the first 32 values, and zeros where there are fewer.
    ///
    /// # Safety
    /// Call inside a dispatched kernel of a tier with dot products of BF16 numbers.
    #[inline(always)]
    unsafe fn new<S: Simd>(values: &[f32]) -> Self {
        let mut rounded = Rounded([0; 32]);
        // SAFETY: the array has room for 32 numbers.
        unsafe {
            let low = storable::<S, KvBf16>(values, 1.0);
            let high = storable::<S, KvBf16>(values.get(16..).unwrap_or_default(), 1.0);
            S::store_i(rounded.0.as_mut_ptr().cast(), S::round_bf16(low, high));
        }
        rounded
    }
}

/// Writes the scale that maps the largest magnitude to 127, and returns its inverse. A head that is all zero or not
/// finite gets scale 0.
///
/// # Safety
/// `to` is valid for writes.
#[inline(always)]
pub(super) unsafe fn scale(values: &[f32], to: *mut f32) -> f32 {
    let largest = values.iter().fold(0f32, |all, x| if x.abs() > all { x.abs() } else { all });
    let (scale, inverse) =
        if largest > 1e-30 && largest < 1e30 { (largest / 127.0, 127.0 / largest) } else { (0.0, 0.0) };
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(scale) };
    inverse
}

/// Returns the first 16 values times `factor`, clamped to finite values and padded with zeros.
///
/// # Safety
/// Call inside a dispatched kernel.
#[inline(always)]
pub(super) unsafe fn storable<S: Simd, Kv: KvFormat>(values: &[f32], factor: f32) -> S::F {
    // SAFETY: every load reads 16 values that exist.
    unsafe {
        let values = if values.len() < 16 {
            let mut padded = [0f32; 16];
            padded[..values.len()].copy_from_slice(values);
            S::load(padded.as_ptr())
        } else {
            S::load(values.as_ptr())
        };
        let values = if Kv::SCALED { S::mul(values, S::splat(factor)) } else { values };
        // With the operand that is not NaN in second place, every tier returns that operand.
        S::max(S::min(values, S::splat(Kv::LIMIT)), S::splat(-Kv::LIMIT))
    }
}
