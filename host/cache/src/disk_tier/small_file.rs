//! Small files beside the pages, such as the list of pins. They are replaced as a whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Maximum number of bytes that are read of a file.
const MAX_BYTES: u64 = 1 << 20;

/// Reads a file, with a replacement character for what is not text. Returns an empty text if it is missing.
pub(super) fn read(folder: &Path, name: &str) -> io::Result<String> {
    let mut bytes = Vec::new();
    match OpenOptions::new().read(true).open(folder.join(name)) {
        Ok(file) => file.take(MAX_BYTES).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(error),
    };
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Replaces a file at once, so that a crash leaves the old or the new one. Only its user can read it.
pub(super) fn replace(folder: &Path, name: &str, text: &str) -> io::Result<()> {
    let new = folder.join(format!("{name}.new"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_data()?;
    std::fs::rename(new, folder.join(name))?;
    // The new name is on the disk only with the folder.
    File::open(folder)?.sync_data()
}
