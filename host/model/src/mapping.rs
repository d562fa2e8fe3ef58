//! The bytes of a model: a file mapped into memory read-only, or bytes generated in memory.
//!
//! Invariant: the mapping is private to this crate and is never written through. Mapping a file is the only unsafe
//! operation in this crate: no operating system kernel prevents another process from truncating a mapped file, and a
//! read past the new end faults. Model files must therefore be replaced by renaming, never rewritten in place.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::ModelError;

#[derive(Debug)]
pub(crate) struct Mapping {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    File(Mmap),
    /// Bytes without a file, which stay in memory.
    Made(Vec<u8>),
}

impl Mapping {
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(ModelError::NotAModel {
                path: path.to_owned(),
                problem: "it is not a regular file".into(),
            });
        }
        if metadata.len() == 0 {
            return Err(ModelError::Malformed { path: path.to_owned(), problem: "the file is empty".into() });
        }
        // SAFETY: the mapping is read-only and lives as long as `Mapping`. Truncation by another process is excluded
        // by the contract in the module's header.
        #[allow(unsafe_code)]
        let bytes = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.to_owned(), bytes: Bytes::File(bytes) })
    }

    /// Wraps bytes that are in no file. Errors show `name` in place of a path.
    pub(crate) fn made(name: &str, bytes: Vec<u8>) -> Self {
        Self { path: PathBuf::from(name), bytes: Bytes::Made(bytes) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Lets the operating system read `bytes` from the file in the background.
    pub(crate) fn will_read(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::File(mapped) = &self.bytes
            && let Err(error) = mapped.advise_range(memmap2::Advice::WillNeed, bytes.start, bytes.len())
        {
            tracing::debug!(path = %self.path.display(), %error, "cannot read the mapped file ahead");
        }
    }

    /// Lets the operating system drop the pages of `bytes`. A later read loads them from the file again.
    pub(crate) fn release(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::File(mapped) = &self.bytes {
            // SAFETY: the mapping is file-backed and never written, so dropped pages come back with the same bytes.
            #[allow(unsafe_code)]
            let advised = unsafe {
                mapped.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, bytes.start, bytes.len())
            };
            if let Err(error) = advised {
                tracing::debug!(path = %self.path.display(), %error, "cannot release pages of the mapped file");
            }
        }
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::File(mapped) => mapped,
            Bytes::Made(bytes) => bytes,
        }
    }
}
