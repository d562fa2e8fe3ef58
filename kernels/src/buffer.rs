//! Zeroed, cache-line-aligned memory with fallible allocation, on huge pages where the system supports them.
//!
//! Invariant: memory is aligned to 64 bytes, sizes are checked before anything is allocated, and each buffer of an arena
//! has exactly one owner. Weights stream through the cores once per token, and with 4 KiB pages the address translation
//! costs as much as the data. The matrices of a model therefore share large regions instead of being scattered on the
//! heap.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::KernelError;

const ALIGN: usize = 64;
/// Size of a huge page, in which large buffers take memory where the system has them.
pub const HUGE_PAGE: usize = 2 << 20;
/// Address space that an arena reserves at a time. Only pages that are written take memory.
const REGION: usize = 64 << 20;

/// Memory for packed weights and KV pages.
pub struct AlignedBytes {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl AlignedBytes {
    /// Allocates `len` zero bytes in a separate region.
    pub fn zeroed(len: usize) -> Result<Self, KernelError> {
        Ok(AlignedBytes { region: Arc::new(Region::map(len)?), offset: 0, len })
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the memory has no bytes, as in a matrix that is only described.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns all bytes; those that were never written are 0.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the bytes are inside the region and initialized, and only this owner has them.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// Returns all bytes for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast_mut(), self.len) }
    }

    /// Returns the address range, for a thread that has memory put behind it before its owner writes to it.
    pub fn backing(&self) -> Backing {
        Backing { region: self.region.clone(), offset: self.offset, len: self.len }
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        // SAFETY: the offset is inside the region.
        unsafe { self.region.start.as_ptr().add(self.offset) }
    }
}

/// The address range of a buffer. Memory is put behind an address when it is first written to, which takes far longer than
/// the write, above all in a virtual machine that has to get the memory from its host.
pub struct Backing {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl Backing {
    /// Puts memory behind a range of the buffer, whose bytes stay what they are. Fails if the system has no such call or not
    /// enough memory.
    #[cfg(target_os = "linux")]
    pub fn populate(&self, bytes: Range<usize>) -> std::io::Result<()> {
        let Some((start, len)) = self.system_pages(bytes) else { return Ok(()) };
        // SAFETY: the pages are inside the mapping, which this owner keeps, and the call changes none of their bytes.
        match unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Fails, because this operating system has no such call.
    #[cfg(not(target_os = "linux"))]
    pub fn populate(&self, _bytes: Range<usize>) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Returns the number of bytes of a range that are on pages of the system with memory behind them.
    #[cfg(target_os = "linux")]
    pub fn populated(&self, bytes: Range<usize>) -> std::io::Result<usize> {
        let Some((start, len)) = self.system_pages(bytes) else { return Ok(0) };
        let page = system_page();
        let mut states = vec![0u8; len.div_ceil(page)];
        // SAFETY: the pages are inside the mapping, and the call writes one byte for each of them.
        match unsafe { libc::mincore(start.cast(), len, states.as_mut_ptr()) } {
            0 => Ok(states.iter().filter(|state| **state & 1 == 1).count() * page),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Returns the system's pages that hold a range of the buffer, which is cut to the buffer's length.
    #[cfg(target_os = "linux")]
    fn system_pages(&self, bytes: Range<usize>) -> Option<(*mut u8, usize)> {
        let (start, end) = (bytes.start.min(self.len), bytes.end.min(self.len));
        if start >= end {
            return None;
        }
        // SAFETY: the offset is inside the region.
        let start = unsafe { self.region.start.as_ptr().add(self.offset + start) };
        let before = start as usize % system_page();
        Some((start.wrapping_sub(before), end - bytes.start + before))
    }
}

#[cfg(target_os = "linux")]
fn system_page() -> usize {
    // SAFETY: the call has no operands in memory.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Allocates buffers from large regions. A region is freed with its last buffer.
#[derive(Default)]
pub struct Arena {
    region: Option<Arc<Region>>,
    used: usize,
}

impl Arena {
    /// Allocates `len` zero bytes next to the previous buffer.
    pub fn zeroed(&mut self, len: usize) -> Result<AlignedBytes, KernelError> {
        let failed = KernelError::OutOfMemory { bytes: len };
        let padded = len.checked_next_multiple_of(ALIGN).ok_or(failed)?;
        let region = match &self.region {
            Some(region) if padded <= region.len - self.used => region.clone(),
            _ => {
                let region = Arc::new(Region::map(padded.max(REGION))?);
                self.used = 0;
                self.region.insert(region).clone()
            }
        };
        let offset = self.used;
        self.used += padded;
        Ok(AlignedBytes { region, offset, len })
    }
}

/// Zeroed memory from the operating system.
struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Releases the memory when dropped.
    _mapping: Mapping,
}

/// The memory to release, which may start before the aligned address.
struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: owns plain bytes; buffers are disjoint and each has one owner.
unsafe impl Send for Region {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Region {}

#[cfg(unix)]
impl Region {
    fn map(len: usize) -> Result<Self, KernelError> {
        let failed = KernelError::OutOfMemory { bytes: len };
        let len = len.max(ALIGN);
        // Leaves room to align the start to a huge page.
        let mapped = if len >= HUGE_PAGE { len.checked_add(HUGE_PAGE) } else { Some(len) };
        let mapped = mapped.filter(|mapped| *mapped <= isize::MAX as usize).ok_or_else(|| failed.clone())?;
        // SAFETY: a fresh private mapping.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(failed);
        }
        let mapping = Mapping { start: start.cast(), len: mapped };
        let skip = if len >= HUGE_PAGE { mapping.start.align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: the mapping is longer than `len` by at least `skip`.
        let start = unsafe { mapping.start.add(skip) };
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            // SAFETY: inside the mapping. A system without huge pages rejects the call, which costs only speed.
            unsafe { libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE) };
        }
        let start = NonNull::new(start).ok_or(failed)?;
        Ok(Region { start, len, _mapping: mapping })
    }
}

#[cfg(unix)]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this owner created the mapping, and no borrow of it remains.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(not(unix))]
impl Region {
    fn map(len: usize) -> Result<Self, KernelError> {
        let failed = KernelError::OutOfMemory { bytes: len };
        let len = len.max(ALIGN);
        let layout = std::alloc::Layout::from_size_align(len, ALIGN).map_err(|_| failed.clone())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(failed)?;
        Ok(Region { start, len, _mapping: Mapping { start: start.as_ptr(), len } })
    }
}

#[cfg(not(unix))]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe {
            std::alloc::dealloc(self.start, std::alloc::Layout::from_size_align_unchecked(self.len, ALIGN));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_sizes_are_errors() {
        for len in [usize::MAX, isize::MAX as usize - 63] {
            assert!(AlignedBytes::zeroed(len).is_err());
            assert!(Arena::default().zeroed(len).is_err());
        }
        assert_eq!(AlignedBytes::zeroed(100).unwrap().as_slice(), [0; 100]);
    }

    #[test]
    fn arena_buffers_are_aligned_disjoint_and_outlive_the_arena() {
        let mut arena = Arena::default();
        let mut buffers: Vec<AlignedBytes> =
            [1, 64, 0, 65, REGION, 7].map(|len| arena.zeroed(len).unwrap()).into();
        drop(arena);
        for (value, buffer) in buffers.iter_mut().enumerate() {
            assert!(buffer.as_slice().iter().all(|byte| *byte == 0));
            buffer.as_mut_slice().fill(value as u8 + 1);
            assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
        }
        for (value, buffer) in buffers.iter().enumerate() {
            assert!(buffer.as_slice().iter().all(|byte| *byte == value as u8 + 1));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_is_put_behind_the_asked_range_and_changes_no_byte() {
        let (begin, end, len) = (4 * HUGE_PAGE, 8 * HUGE_PAGE, 12 * HUGE_PAGE);
        let mut buffer = AlignedBytes::zeroed(len + 100).unwrap();
        buffer.as_mut_slice()[begin + 5] = 7;
        let backing = buffer.backing();
        assert_eq!(backing.populated(end..len).unwrap(), 0, "nothing was written there");
        backing.populate(begin..end).unwrap();
        assert_eq!(backing.populated(begin..end).unwrap(), end - begin);
        assert_eq!(backing.populated(end..len).unwrap(), 0);
        backing.populate(len + 50..usize::MAX).unwrap();
        backing.populate(usize::MAX - 1..usize::MAX).unwrap();
        assert!(backing.populated(len..len + 100).unwrap() > 0);
        let nonzero: Vec<usize> = (0..len + 100).filter(|at| buffer.as_slice()[*at] != 0).collect();
        assert_eq!(nonzero, [begin + 5]);
        drop(buffer);
        backing.populate(0..begin).unwrap();
    }
}
