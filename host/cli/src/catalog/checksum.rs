//! Checks that a file is the expected one, by its length and its SHA-256.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

/// Returns an error unless the file has exactly `bytes` bytes with the digest `sha256` (lower-case
/// hexadecimal).
pub fn verify(path: &Path, bytes: u64, sha256: &str) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let length = file.metadata()?.len();
    if length != bytes {
        bail!(
            "{} has {length} bytes instead of {bytes}; the download is incomplete, or the file was replaced",
            path.display()
        );
    }
    let found = digest(&mut file).with_context(|| format!("cannot read {}", path.display()))?;
    if found != sha256 {
        bail!("{} has the SHA-256 {found} instead of {sha256}; it is not the expected file", path.display());
    }
    Ok(())
}

/// Returns the SHA-256 of what is left of a file, in lower-case hexadecimal.
pub fn digest(file: &mut File) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn only_the_expected_bytes_pass() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("file");
        std::fs::write(&path, b"abc").expect("file");
        verify(&path, 3, ABC).expect("the expected bytes");
        std::fs::write(&path, b"abd").expect("file");
        let error = verify(&path, 3, ABC).expect_err("another byte").to_string();
        assert!(error.contains("SHA-256") && error.contains(ABC), "{error}");
        std::fs::write(&path, b"ab").expect("file");
        let error = verify(&path, 3, ABC).expect_err("a byte less").to_string();
        assert!(error.contains("2 bytes instead of 3"), "{error}");
    }
}
