//! Files that appear under their names only when they are complete.
//!
//! Invariant: a path that exists is never written to, and what a failure leaves under a temporary name is removed.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use crate::error::ModelError;

/// Number of bytes that are buffered.
const BUFFER_BYTES: usize = 1 << 20;

/// A file or folder under a temporary name, beside the path that it will have.
pub(crate) struct Staged {
    path: PathBuf,
    target: PathBuf,
}

impl Staged {
    /// Reserves the temporary name of an output. Its folder has to exist.
    pub(crate) fn beside(target: &Path) -> Result<Self, ModelError> {
        refuse_existing(target)?;
        let Some(name) = target.file_name() else {
            return Err(refused(format!("{} has no name for a new file", target.display())));
        };
        let mut staged = name.to_owned();
        staged.push(format!(".{}.part", std::process::id()));
        Ok(Staged { path: target.with_file_name(staged), target: target.to_owned() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the output its name.
    pub(crate) fn publish(self) -> Result<(), ModelError> {
        refuse_existing(&self.target)?;
        std::fs::rename(&self.path, &self.target).map_err(|source| failed(&self.target, source))
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // After a successful end, there is nothing under the temporary name.
        let _ = match self.path.is_dir() {
            true => std::fs::remove_dir_all(&self.path),
            false => std::fs::remove_file(&self.path),
        };
    }
}

fn refuse_existing(target: &Path) -> Result<(), ModelError> {
    match target.symlink_metadata() {
        Ok(_) => {
            let problem = format!(
                "{} exists and is not overwritten; delete it or choose another path",
                target.display()
            );
            Err(refused(problem))
        }
        Err(_) => Ok(()),
    }
}

fn refused(problem: String) -> ModelError {
    ModelError::Option { option: "output".to_owned(), problem }
}

/// A file that is being written, whose bytes are counted.
pub(crate) struct Sink<'a> {
    file: BufWriter<File>,
    path: PathBuf,
    written: u64,
    watch: &'a dyn Fn(u64),
}

impl<'a> Sink<'a> {
    pub(crate) fn create(path: PathBuf, watch: &'a dyn Fn(u64)) -> Result<Self, ModelError> {
        let file = File::create_new(&path).map_err(|source| failed(&path, source))?;
        Ok(Sink { file: BufWriter::with_capacity(BUFFER_BYTES, file), path, written: 0, watch })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        self.file.write_all(bytes).map_err(|source| failed(&self.path, source))?;
        self.written += bytes.len() as u64;
        (self.watch)(self.written);
        Ok(())
    }

    /// Writes zeros up to a multiple of `alignment`.
    pub(crate) fn pad(&mut self, alignment: usize) -> Result<(), ModelError> {
        let missing = self.written.next_multiple_of(alignment.max(1) as u64) - self.written;
        self.write(&vec![0; missing as usize])
    }

    pub(crate) fn finish(mut self) -> Result<(), ModelError> {
        self.file.flush().map_err(|source| failed(&self.path, source))
    }
}

pub(crate) fn failed(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::Write { path: path.to_owned(), source }
}
