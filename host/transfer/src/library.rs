//! Finds the library of NIXL in the folder that the operator names.

use std::path::{Path, PathBuf};

use crate::error::TransferError;

/// The file that has the C functions of NIXL.
const FILE: &str = "libnixl_capi.so";
/// Folders in an unpacked package that have the file.
const FOLDERS: [&str; 3] = ["", ".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"];

/// Returns the library in a folder, which may be that of an unpacked package.
pub fn find(folder: &Path) -> Result<PathBuf, TransferError> {
    let files = FOLDERS.iter().map(|inner| folder.join(inner).join(FILE));
    // The loader takes a name without a folder for one to search for.
    let found = files.into_iter().find(|file| file.is_file()).and_then(|file| std::path::absolute(file).ok());
    found.ok_or_else(|| TransferError::NoLibrary { folder: folder.display().to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_in_the_folder_and_in_an_unpacked_package() {
        let folder = tempfile::tempdir().unwrap();
        let error = find(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains(&*folder.path().to_string_lossy()) && error.contains("hint: `pip download"),
            "{error}"
        );
        let package = folder.path().join(".nixl_cu12.mesonpy.libs");
        std::fs::create_dir(&package).unwrap();
        std::fs::write(package.join(FILE), "").unwrap();
        assert_eq!(find(folder.path()).unwrap(), package.join(FILE));
        assert_eq!(find(&package).unwrap(), package.join(FILE));
    }
}
