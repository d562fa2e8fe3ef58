//! Zeroed, cache-line-aligned bytes whose allocation can fail.
//!
//! Invariant: aligned to 64 bytes; sizes are checked before anything is allocated.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::KernelError;

const ALIGN: usize = 64;

/// Memory for packed weights and KV pages.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: owns plain bytes.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Result<Self, KernelError> {
        let failed = KernelError::OutOfMemory { bytes: len };
        let layout = Layout::from_size_align(len.max(ALIGN), ALIGN).map_err(|_| failed.clone())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(failed)?;
        Ok(AlignedBytes { start, len })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: owns `len` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: owns `len` initialised bytes, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        // SAFETY: the layout is the one it was allocated with.
        unsafe {
            dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len.max(ALIGN), ALIGN));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_errors() {
        assert!(AlignedBytes::zeroed(usize::MAX).is_err());
        assert!(AlignedBytes::zeroed(isize::MAX as usize - 63).is_err());
        assert_eq!(AlignedBytes::zeroed(100).unwrap().as_slice(), [0; 100]);
    }
}
