//! The ring in the memory of the helper.
//!
//! Invariant: nothing in this process makes a reference to the mapped bytes, because others change them at any time. Only
//! their addresses are used.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use rustix::mm::{MapFlags, ProtFlags, mmap};

/// The mapped ring. It stays mapped until the process ends, because transfers may write into it until then.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: usize,
    bytes: usize,
}

impl Mapping {
    /// Maps the first `bytes` bytes of a file, which must have as many.
    pub(crate) fn new(file: &File, bytes: u64) -> io::Result<Mapping> {
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        if bytes == 0 || file.metadata()?.len() < bytes as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the ring is smaller than its description",
            ));
        }
        let (read_write, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses an address that nothing else uses, and the file has these bytes. It cannot shrink, because
        // its size is sealed.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, read_write, shared, file, 0)? };
        Ok(Mapping { base: base as usize, bytes })
    }

    /// Returns the address of the first byte.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of a part of the ring, or `None` if the part is not inside.
    pub(crate) fn address(&self, offset: u64, bytes: u64) -> Option<usize> {
        let end = offset.checked_add(bytes)?;
        let offset = usize::try_from(offset).ok()?;
        (bytes > 0 && end <= self.bytes as u64).then(|| self.base + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parts_of_the_ring_have_an_address() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert!(Mapping::new(&file, 8193).is_err() && Mapping::new(&file, 0).is_err());
        let mapping = Mapping::new(&file, 8192).unwrap();
        assert_eq!(mapping.address(0, 8192), Some(mapping.base()));
        assert_eq!(mapping.address(4096, 4096), Some(mapping.base() + 4096));
        for (offset, bytes) in [(0, 8193), (4096, 4097), (8192, 1), (0, 0), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(mapping.address(offset, bytes), None, "{offset}, {bytes}");
        }
    }
}
