//! The memory that a host shares with its helper: an anonymous file of slots.
//!
//! The host reads and writes the file instead of mapping it. So no reference of this process points to memory that another
//! process changes, and copying costs the same.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::TransferError;
use crate::slots::{Run, Slots};

/// Number of bytes of a slot. An image takes as many slots as it needs.
pub(crate) const SLOT_BYTES: usize = 64 << 10;

/// The shared memory and the states of its slots.
#[derive(Debug)]
pub(crate) struct Ring {
    file: File,
    bytes: usize,
    slots: Mutex<Slots>,
}

impl Ring {
    /// Creates a ring of at most `bytes` bytes, and of two slots at least.
    pub(crate) fn create(bytes: u64) -> Result<Ring, TransferError> {
        let failed = |reason| TransferError::Ring { bytes, reason };
        let count = usize::try_from(bytes).unwrap_or(usize::MAX) / SLOT_BYTES;
        let count = count.max(2);
        let file = anonymous_file(count * SLOT_BYTES).map_err(failed)?;
        Ok(Ring { file, bytes: count * SLOT_BYTES, slots: Mutex::new(Slots::new(count)) })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn slots(&self) -> MutexGuard<'_, Slots> {
        // A panic in between leaves slots that are never used again, and nothing wrong.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes an image into its slots.
    pub(crate) fn write(&self, run: &Run, image: &[u8]) -> Result<(), TransferError> {
        let (offset, room) = run.bytes(SLOT_BYTES);
        if image.len() > room {
            return Err(TransferError::Image { found: image.len(), room });
        }
        self.file.write_all_at(image, offset as u64).map_err(TransferError::Memory)
    }

    /// Copies an image of this many bytes out of its slots.
    pub(crate) fn read(&self, run: &Run, bytes: usize) -> Result<Vec<u8>, TransferError> {
        let (offset, room) = run.bytes(SLOT_BYTES);
        if bytes > room {
            return Err(TransferError::Image { found: bytes, room });
        }
        let mut image = vec![0; bytes];
        self.file.read_exact_at(&mut image, offset as u64).map_err(TransferError::Memory)?;
        Ok(image)
    }
}

/// Returns the number of slots of an image.
pub(crate) fn slots_of(image_bytes: usize) -> usize {
    image_bytes.div_ceil(SLOT_BYTES)
}

/// Creates a file in memory whose size nobody can change anymore.
#[cfg(target_os = "linux")]
fn anonymous_file(bytes: usize) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    let file = File::from(memfd_create("skep-kv-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(bytes as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn anonymous_file(_bytes: usize) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "transfers through NIXL exist on Linux only"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_comes_out_as_it_was_written_and_stays_within_its_slots() {
        let ring = Ring::create(8 * SLOT_BYTES as u64).unwrap();
        let (one, two) = {
            let mut slots = ring.slots();
            (slots.lend(slots_of(SLOT_BYTES + 1)).unwrap(), slots.lend(slots_of(1)).unwrap())
        };
        let image: Vec<u8> = (0..=SLOT_BYTES).map(|at| at as u8).collect();
        ring.write(&one, &image).unwrap();
        ring.write(&two, &[7]).unwrap();
        assert_eq!(ring.read(&one, image.len()).unwrap(), image);
        assert_eq!(ring.read(&two, 1).unwrap(), [7]);
        let long = vec![0; SLOT_BYTES + 1];
        assert!(matches!(ring.write(&two, &long), Err(TransferError::Image { .. })));
        assert!(matches!(ring.read(&two, SLOT_BYTES + 1), Err(TransferError::Image { .. })));
    }

    #[test]
    fn the_size_of_the_ring_cannot_be_changed() {
        let ring = Ring::create(0).unwrap();
        assert_eq!(ring.bytes(), 2 * SLOT_BYTES);
        for bytes in [0, 1 << 30] {
            assert!(ring.file().set_len(bytes).is_err(), "{bytes}");
        }
    }
}
