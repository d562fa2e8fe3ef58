//! The keys and values of a layer, in pages of 16 tokens.
//!
//! Invariant: all stored values are finite. Pages take memory only once they are written. Keys are stored as
//! `[page][kv head][dimension][16 tokens]`, so that a register of scores covers 16 tokens; values are stored as
//! `[page][kv head][16 tokens][stride]`. In BF16 they are stored as the instructions take them, as
//! `[page][kv head][pair of dimensions][16 tokens][2]` and `[page][kv head][pair of tokens][stride][2]`.

use std::ops::Range;

use crate::buffer::{AlignedBytes, Backing};
use crate::cpu::dispatch;
use crate::cpu::kv::{KvF16, KvF32, KvI8, MAX_HEAD, StoreHead, StorePairs};
use crate::error::{expect_len, product};
use crate::{Isa, KernelError};

/// Number of tokens per page.
pub const PAGE_TOKENS: usize = 16;
/// Maximum head size that the kernels support.
pub const MAX_HEAD_SIZE: usize = MAX_HEAD;
/// Maximum number of values of a latent.
pub const MAX_LATENT: usize = crate::cpu::kv::MAX_LATENT;

/// The storage format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    F16,
    /// Pairs of BF16 numbers, only for the tier with dot products of them and for even head sizes.
    Bf16,
    /// 8-bit integers. Each head of each token has one scale for its key and one for its value.
    I8,
}

/// The keys and values of one layer.
pub struct KvLayer {
    pub(crate) format: KvFormat,
    page_count: usize,
    kv_heads: usize,
    head_size: usize,
    pub(crate) value_stride: usize,
    pub(crate) keys: AlignedBytes,
    pub(crate) values: AlignedBytes,
    /// Scales of the keys and of the values, `[page][kv head][16 tokens]`. Empty for formats without scales.
    key_scales: AlignedBytes,
    value_scales: AlignedBytes,
}

impl KvFormat {
    /// All formats.
    pub const ALL: [KvFormat; 4] = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16, KvFormat::I8];

    /// Returns the formats for whose pages the tier has kernels.
    pub fn of_tier(isa: Isa) -> impl Iterator<Item = KvFormat> {
        KvFormat::ALL.into_iter().filter(move |format| format.supported_by(isa))
    }

    /// Returns whether the tier has kernels for pages of the format.
    pub fn supported_by(self, isa: Isa) -> bool {
        self != KvFormat::Bf16 || isa == Isa::Avx512Bf16 && isa.supported()
    }

    /// Returns the format of as many bits that is the fastest for heads of that size in the tier.
    #[must_use]
    pub fn for_heads(self, isa: Isa, head_size: usize) -> Self {
        let pairs = KvFormat::Bf16.supported_by(isa) && head_size.is_multiple_of(2);
        if self == KvFormat::F16 && pairs { KvFormat::Bf16 } else { self }
    }

    /// Returns the size in bytes of one value of a key or a value vector, without scales.
    pub(crate) fn element_bytes(self) -> usize {
        match self {
            KvFormat::F32 => 4,
            KvFormat::F16 | KvFormat::Bf16 => 2,
            KvFormat::I8 => 1,
        }
    }

    /// Returns the size in bytes of the scales of one head's keys (or values) in a page.
    fn scale_bytes(self) -> usize {
        match self {
            KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 => 0,
            KvFormat::I8 => PAGE_TOKENS * size_of::<f32>(),
        }
    }
}

impl KvLayer {
    /// Creates the pages of one layer, all zero. Fails if the shape is not supported or there is not enough memory.
    pub fn new(
        format: KvFormat,
        page_count: usize,
        kv_heads: usize,
        head_size: usize,
    ) -> Result<Self, KernelError> {
        const OP: &str = "KV pages";
        if head_size == 0 || head_size > MAX_HEAD {
            return Err(KernelError::OutOfRange {
                op: OP,
                what: "head size",
                index: head_size,
                count: MAX_HEAD,
            });
        }
        if format == KvFormat::Bf16 {
            expect_len(OP, "the remainder of the head size divided by 2", 0, head_size % 2)?;
        }
        let size = format.element_bytes();
        let value_stride = head_size.next_multiple_of(16);
        let pages = product(OP, "the pool", &[page_count, kv_heads, PAGE_TOKENS, size])?;
        let bytes = |width| product(OP, "the pool", &[pages, width]);
        let scales = product(OP, "the pool", &[page_count, kv_heads, format.scale_bytes()])?;
        Ok(KvLayer {
            format,
            page_count,
            kv_heads,
            head_size,
            value_stride,
            keys: AlignedBytes::zeroed(bytes(head_size)?)?,
            values: AlignedBytes::zeroed(bytes(value_stride)?)?,
            key_scales: AlignedBytes::zeroed(scales)?,
            value_scales: AlignedBytes::zeroed(scales)?,
        })
    }

    /// Returns the size in bytes of a layer of this shape, or `None` if it overflows.
    pub fn byte_len(format: KvFormat, page_count: usize, kv_heads: usize, head_size: usize) -> Option<usize> {
        let widths = head_size.checked_add(head_size.checked_next_multiple_of(16)?)?;
        let head = widths.checked_mul(PAGE_TOKENS * format.element_bytes())?;
        page_count.checked_mul(kv_heads)?.checked_mul(head.checked_add(2 * format.scale_bytes())?)
    }

    /// Returns the number of key-value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Returns the number of values in a head's key, and in its value.
    pub fn head_size(&self) -> usize {
        self.head_size
    }

    /// Returns the number of pages of the pool.
    pub(crate) fn page_count(&self) -> usize {
        self.page_count
    }

    /// Returns the number of bytes of one page: its keys, its values and their scales.
    pub fn page_bytes(&self) -> usize {
        Self::byte_len(self.format, 1, self.kv_heads, self.head_size).unwrap_or(0)
    }

    /// Returns the address ranges of the pool, each with the number of bytes that it has of a page.
    pub fn backings(&self) -> impl Iterator<Item = (Backing, usize)> {
        let parts = [&self.keys, &self.values, &self.key_scales, &self.value_scales];
        let count = self.page_count.max(1);
        parts.into_iter().map(move |part| (part.backing(), part.len() / count))
    }

    /// Copies a page to `out`, which has [`KvLayer::page_bytes`] bytes.
    pub fn read_page(&self, page: u32, out: &mut [u8]) -> Result<(), KernelError> {
        let count = self.page_count;
        read_parts([&self.keys, &self.values, &self.key_scales, &self.value_scales], count, page, out)
    }

    /// Replaces a page with bytes that [`KvLayer::read_page`] copied from a layer of the same format and shape.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), KernelError> {
        let KvLayer { keys, values, key_scales, value_scales, page_count, .. } = self;
        write_parts([keys, values, key_scales, value_scales], *page_count, page, bytes)
    }

    /// Checks that the tier has kernels for the format.
    pub(crate) fn check_tier(&self, op: &'static str, isa: Isa) -> Result<(), KernelError> {
        if self.format.supported_by(isa) { Ok(()) } else { Err(KernelError::Tier { op, isa }) }
    }

    /// Stores the key and value heads of one position.
    ///
    /// # Safety
    /// The tier has kernels for the format, the page exists, `slot` is below [`PAGE_TOKENS`], keys and values each hold `kv_heads` heads, and no other thread
    /// reads or writes the page.
    pub(crate) unsafe fn store(&self, isa: Isa, page: u32, slot: usize, keys: &[f32], values: &[f32]) {
        let heads = keys.chunks_exact(self.head_size).zip(values.chunks_exact(self.head_size));
        for (head, (key, value)) in heads.enumerate() {
            let offset = page as usize * self.kv_heads + head;
            let key_at = offset * self.head_size * PAGE_TOKENS + slot;
            let value_at = (offset * PAGE_TOKENS + slot) * self.value_stride;
            let scale_at = offset * PAGE_TOKENS + slot;
            macro_rules! store {
                ($format:ty, $element:ty) => {{
                    // SAFETY: the offsets are inside the pool, as guaranteed by the caller.
                    unsafe {
                        let keys = self.keys.as_ptr().cast_mut().cast::<$element>().add(key_at);
                        let values = self.values.as_ptr().cast_mut().cast::<$element>().add(value_at);
                        let (key_scale, value_scale) = self.scales(scale_at);
                        dispatch(
                            isa,
                            StoreHead::<$format> { key, value, keys, values, key_scale, value_scale },
                        )
                    }
                }};
            }
            match self.format {
                KvFormat::F32 => store!(KvF32, f32),
                KvFormat::F16 => store!(KvF16, u16),
                KvFormat::I8 => store!(KvI8, i8),
                // SAFETY: the offsets are inside the pool, as guaranteed by the caller.
                KvFormat::Bf16 => unsafe {
                    // The slot's pair of columns or of tokens, and then its half.
                    let keys = self.keys.as_ptr().cast_mut().cast::<u32>();
                    let keys = keys.add(offset * self.head_size / 2 * PAGE_TOKENS + slot);
                    let values = self.values.as_ptr().cast_mut().cast::<u16>();
                    let values = values.add((value_at - slot % 2 * self.value_stride) + slot % 2);
                    dispatch(isa, StorePairs { key, value, keys, values });
                },
            }
        }
    }

    /// Returns pointers to the scale at index `at` of the keys and of the values. For formats without scales, the pointers
    /// must not be dereferenced.
    pub(crate) fn scales(&self, at: usize) -> (*mut f32, *mut f32) {
        let start = |scales: &AlignedBytes| scales.as_ptr().cast_mut().cast::<f32>().wrapping_add(at);
        (start(&self.key_scales), start(&self.value_scales))
    }
}

/// Copies a page out of buffers that each hold `page_count` pages.
pub(crate) fn read_parts<const N: usize>(
    parts: [&AlignedBytes; N],
    page_count: usize,
    page: u32,
    out: &mut [u8],
) -> Result<(), KernelError> {
    let lengths = parts.map(AlignedBytes::len);
    let mut rest = out;
    for (part, at) in parts.iter().zip(page_ranges(lengths, page_count, page, rest.len())?) {
        let (own, after) = rest.split_at_mut(at.len());
        own.copy_from_slice(&part.as_slice()[at]);
        rest = after;
    }
    Ok(())
}

/// Replaces a page in buffers that each hold `page_count` pages.
pub(crate) fn write_parts<const N: usize>(
    mut parts: [&mut AlignedBytes; N],
    page_count: usize,
    page: u32,
    bytes: &[u8],
) -> Result<(), KernelError> {
    let mut lengths = [0; N];
    for (length, part) in lengths.iter_mut().zip(&parts) {
        *length = part.len();
    }
    let mut rest = bytes;
    for (part, at) in parts.iter_mut().zip(page_ranges(lengths, page_count, page, bytes.len())?) {
        let (own, after) = rest.split_at(at.len());
        part.as_mut_slice()[at].copy_from_slice(own);
        rest = after;
    }
    Ok(())
}

/// Returns the bytes of a page in each of the buffers, whose lengths are `lengths`.
fn page_ranges<const N: usize>(
    lengths: [usize; N],
    page_count: usize,
    page: u32,
    bytes: usize,
) -> Result<[Range<usize>; N], KernelError> {
    const OP: &str = "a page";
    let page = page as usize;
    if page >= page_count {
        return Err(KernelError::OutOfRange { op: OP, what: "page", index: page, count: page_count });
    }
    let mut ranges = [const { 0..0 }; N];
    let mut all = 0;
    for (range, length) in ranges.iter_mut().zip(lengths) {
        let own = length / page_count;
        *range = page * own..(page + 1) * own;
        all += own;
    }
    expect_len(OP, "the length", all, bytes)?;
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_page_has_all_bytes_of_the_page_and_changes_no_other() {
        let isa = Isa::detect();
        for format in KvFormat::of_tier(isa) {
            let from = KvLayer::new(format, 3, 2, 24).unwrap();
            let mut to = KvLayer::new(format, 5, 2, 24).unwrap();
            let keys: Vec<f32> = (0..48).map(|at| at as f32 - 20.0).collect();
            let values: Vec<f32> = keys.iter().map(|key| key * 0.5).collect();
            for slot in 0..PAGE_TOKENS {
                // SAFETY: page 2 of 3, and only this thread.
                unsafe { from.store(isa, 2, slot, &keys, &values) };
            }
            let mut page = vec![0; from.page_bytes()];
            from.read_page(2, &mut page).unwrap();
            assert!(page.iter().any(|byte| *byte != 0));
            to.write_page(1, &page).unwrap();
            let mut copied = vec![0; page.len()];
            to.read_page(1, &mut copied).unwrap();
            assert_eq!(copied, page, "{format:?}");
            for other in [0, 2, 3, 4] {
                to.read_page(other, &mut copied).unwrap();
                assert!(copied.iter().all(|byte| *byte == 0), "{format:?}: page {other} must stay empty");
            }
            assert!(to.write_page(5, &page).is_err());
            assert!(to.write_page(0, &page[1..]).is_err());
            assert!(from.read_page(3, &mut page).is_err());
        }
    }

    #[test]
    fn invalid_sizes_are_errors() {
        assert!(KvLayer::new(KvFormat::F32, usize::MAX, 8, 64).is_err());
        assert!(KvLayer::new(KvFormat::F32, 1, 1, MAX_HEAD_SIZE + 1).is_err());
        assert!(KvLayer::new(KvFormat::F32, 1, 1, 0).is_err());
        assert!(KvLayer::new(KvFormat::Bf16, 1, 1, 15).is_err());
        assert_eq!(KvLayer::byte_len(KvFormat::F32, usize::MAX, 8, 64), None);
    }
}
