//! A folder of compiled kernels, each stored under the digest of everything that it was made of.
//!
//! Invariant: a read returns exactly what was written under the key, in full; any other file is treated as missing. A file
//! is written under a temporary name and then renamed, so that other processes see all of it or nothing.
//!
//! ```text
//! magic[8] · digest[32] of (key · log length · log · cubin) · log length: u64, little-endian · log · cubin
//! ```

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::nvrtc::Compiled;

const MAGIC: &[u8; 8] = b"skepcub1";
const HEADER_BYTES: usize = 8 + 32 + 8;
/// Maximum size of a file. Longer files were not written by this module.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The digest of everything that a cubin was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// Computes the digest of these parts in this order. The boundaries between parts are part of the digest.
    pub(super) fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        Key(digest.finalize().into())
    }

    pub(super) fn file_name(self) -> String {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}.cubin")
    }
}

/// Returns what is stored under the key, or `None` if it is missing or damaged.
pub(super) fn read(folder: &Path, key: Key) -> Option<Compiled> {
    let file = File::open(folder.join(key.file_name())).ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return None;
    }
    let (magic, rest) = bytes.split_at_checked(8)?;
    let (digest, body) = rest.split_at_checked(32)?;
    if magic != MAGIC || digest != digest_of(key, body) {
        return None;
    }
    let (log_bytes, rest) = body.split_first_chunk::<8>()?;
    let (log, cubin) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*log_bytes)).ok()?)?;
    Some(Compiled { cubin: cubin.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

/// The number of modules in a cache, and their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSize {
    pub modules: usize,
    pub bytes: u64,
}

/// Returns the size of a cache. A folder that does not exist has no modules.
pub fn size(folder: &Path) -> io::Result<CacheSize> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(CacheSize::default()),
        Err(error) => return Err(error),
    };
    let mut size = CacheSize::default();
    for entry in entries {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "cubin") {
            size.modules += 1;
            size.bytes += entry.metadata()?.len();
        }
    }
    Ok(size)
}

pub(super) fn write(folder: &Path, key: Key, compiled: &Compiled) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let Compiled { cubin, log } = compiled;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + log.len() + cubin.len());
    bytes.extend((log.len() as u64).to_le_bytes());
    bytes.extend(log.as_bytes());
    bytes.extend(cubin);
    let digest = digest_of(key, &bytes);
    let (file, path) = new_file(folder, key)?;
    let written = write_all(file, &[MAGIC, &digest, &bytes])
        .and_then(|()| fs::rename(&path, folder.join(key.file_name())));
    if written.is_err() {
        // No other code removes the file.
        let _ = fs::remove_file(&path);
    }
    written
}

fn write_all(mut file: File, parts: &[&[u8]]) -> io::Result<()> {
    parts.iter().try_for_each(|part| file.write_all(part))?;
    // Without this, the rename could become durable before the contents.
    file.sync_all()
}

/// Creates a temporary file for this process and thread, in the folder of the final file.
fn new_file(folder: &Path, key: Key) -> io::Result<(File, PathBuf)> {
    let thread = format!("{:?}", std::thread::current().id());
    let number: String = thread.chars().filter(char::is_ascii_digit).collect();
    let path = folder.join(format!("{}.{}-{number}.new", key.file_name(), std::process::id()));
    Ok((File::create(&path)?, path))
}

fn digest_of(key: Key, body: &[u8]) -> [u8; 32] {
    let mut digest = Sha256::new();
    digest.update(key.0);
    digest.update(body);
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled() -> Compiled {
        Compiled { cubin: vec![7; 1000], log: "Used 40 registers".to_owned() }
    }

    fn key(name: &str) -> Key {
        Key::of([name.as_bytes()])
    }

    #[test]
    fn a_cubin_is_read_back_under_its_own_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("made/when/needed");
        write(&inner, key("a"), &compiled()).unwrap();
        let read_back = read(&inner, key("a")).expect("written");
        assert_eq!((read_back.cubin, read_back.log), (compiled().cubin, compiled().log));
        assert!(read(&inner, key("b")).is_none());
        let file_bytes = fs::metadata(inner.join(key("a").file_name())).unwrap().len();
        assert_eq!(size(&inner).unwrap(), CacheSize { modules: 1, bytes: file_bytes });
        assert_eq!(size(&inner.join("missing")).unwrap(), CacheSize::default());
        let files: Vec<_> = fs::read_dir(&inner).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(files, [key("a").file_name().as_str()], "no temporary file is left");
    }

    #[test]
    fn torn_changed_and_foreign_files_are_treated_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        write(folder, key("a"), &compiled()).unwrap();
        let path = folder.join(key("a").file_name());
        let whole = fs::read(&path).unwrap();
        for end in [0, 7, 20, HEADER_BYTES - 1, HEADER_BYTES, whole.len() - 1] {
            fs::write(&path, &whole[..end]).unwrap();
            assert!(read(folder, key("a")).is_none(), "cut off after {end} bytes");
        }
        for changed in [0, 9, 41, HEADER_BYTES + 3, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[changed] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert!(read(folder, key("a")).is_none(), "changed at {changed}");
        }
        // An intact file that belongs to another key.
        write(folder, key("b"), &compiled()).unwrap();
        fs::rename(folder.join(key("b").file_name()), &path).unwrap();
        assert!(read(folder, key("a")).is_none());
        File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(read(folder, key("a")).is_none());
        write(folder, key("a"), &compiled()).unwrap();
        assert!(read(folder, key("a")).is_some(), "a bad file is replaced");
    }

    #[test]
    fn part_boundaries_change_the_key() {
        assert_ne!(Key::of([&b"ab"[..], b"c"]), Key::of([&b"a"[..], b"bc"]));
    }
}
