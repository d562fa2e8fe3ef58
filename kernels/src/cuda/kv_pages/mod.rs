//! The formats of keys and values in pages on a device.

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) mod twin;

use super::operation::ACTIVATION_BYTES;
use super::{Address, Kernel, PAGE_POSITIONS};
use crate::DType;
use crate::device_constants::device_constant;

const POSITIONS: usize = PAGE_POSITIONS as usize;
/// Size in bytes of the FP8 scales of one head in a page: those of its keys, and those of its values, as f32.
pub(super) const PAGE_SCALE_BYTES: u32 =
    device_constant!("kv_pages.cuh", "SCALES_OF_POSITION") * PAGE_POSITIONS * 4;
/// Number of FP8 values that a lane copies at once. Rows in shared memory have as many bytes of padding.
pub(super) const FP8_CHUNK: u32 = 16;

/// The format of keys and values in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageFormat {
    /// The format of the activations, with 16 bits.
    Activations,
    /// FP8 (E4M3), with one scale for the key and one for the value of each head of each position.
    Fp8,
}

/// The keys and values of a layer, as parameters of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PageAddresses {
    /// `[pages, PAGE_POSITIONS, kv_heads, head_size]`
    pub keys: Address,
    /// `[pages, PAGE_POSITIONS, kv_heads, head_size]`
    pub values: Address,
    /// f32 `[pages, kv_heads, 2, PAGE_POSITIONS]`: the scales of FP8 keys and of FP8 values.
    pub scales: Address,
}

impl PageFormat {
    /// All formats.
    pub const ALL: [PageFormat; 2] = [PageFormat::Activations, PageFormat::Fp8];

    /// Returns the size in bytes of the keys of a page, or of its values, without their scales.
    pub fn half_bytes(self, kv_heads: usize, head_size: usize) -> usize {
        let values = POSITIONS * kv_heads * head_size;
        match self {
            PageFormat::Activations => values * ACTIVATION_BYTES,
            PageFormat::Fp8 => values,
        }
    }

    /// Returns the size in bytes of the scales of a page.
    pub fn scale_bytes(self, kv_heads: usize) -> usize {
        match self {
            PageFormat::Activations => 0,
            PageFormat::Fp8 => kv_heads * PAGE_SCALE_BYTES as usize,
        }
    }

    /// Returns the size in bytes of a page.
    pub fn page_bytes(self, kv_heads: usize, head_size: usize) -> usize {
        2 * self.half_bytes(kv_heads, head_size) + self.scale_bytes(kv_heads)
    }

    /// Returns the kernel of a family that reads or writes pages of this format.
    pub(super) const fn of(self, kernel: Kernel) -> Kernel {
        match self {
            PageFormat::Activations => kernel,
            PageFormat::Fp8 => kernel.format(DType::F8E4M3),
        }
    }
}
