//! Finds NVIDIA's shared libraries and their functions on the system.
//!
//! Invariant: a missing library or function is an error that names it, never a panic. Functions are looked up here because
//! cudarc searches only for libraries of its own version, does not accept a path from the caller, and panics if the library
//! or a function is missing.

use std::error::Error as _;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::gpu;

/// Declares a struct `Functions` with function pointers of these symbols and types.
macro_rules! functions {
    ($($field:ident: $symbol:literal ($($argument:ty),* $(,)?) -> $result:ty),* $(,)?) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Looks up all functions.
            ///
            /// # Safety
            /// The library's functions have these types, and the library stays loaded as long as they are called.
            unsafe fn find(
                library: &libloading::Library,
                lacking: impl Fn(&'static str) -> KernelError,
            ) -> Result<Self, KernelError> {
                // SAFETY: the caller guarantees the types.
                unsafe { Ok(Functions { $($field: *library.get($symbol).map_err(|_| lacking($symbol))?,)* }) }
            }
        }
    };
}
pub(super) use functions;

/// Opens the library at `path`, or the first of `paths` that exists, and returns it with its path. On failure it returns
/// the paths that were tried. Names without a folder are searched by the system's loader. The caller must trust the file,
/// because its code is executed.
pub(super) fn open(path: Option<&Path>, paths: &[&str]) -> Result<(Library, PathBuf), String> {
    let paths: Vec<PathBuf> = match path {
        Some(path) => vec![path.to_owned()],
        None => for_driver(paths, gpu::driver_major()).iter().map(PathBuf::from).collect(),
    };
    let mut tried = Vec::new();
    for path in paths {
        // SAFETY: NVIDIA's libraries have no side effects when they are loaded.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok((library, path)),
            Err(error) => tried.push(reason(&path, &error)),
        }
    }
    Err(tried.join(", "))
}

/// Moves libraries that are newer than the driver to the end, because a driver supports libraries of its own major version
/// or an older one.
fn for_driver<'a>(paths: &[&'a str], driver: Option<i32>) -> Vec<&'a str> {
    let is_newer = |path: &&str| {
        let major = path.rsplit_once(".so.").and_then(|(_, major)| major.parse::<i32>().ok());
        major.zip(driver).is_some_and(|(major, driver)| major > driver)
    };
    let mut paths = paths.to_vec();
    paths.sort_by_key(is_newer);
    paths
}

/// Returns the file that was tried, followed by the loader's message unless that only says that the file does not exist.
fn reason(path: &Path, error: &libloading::Error) -> String {
    let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let name = path.display();
    if said.contains("No such file") { name.to_string() } else { format!("{name}: {said}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_newer_than_the_driver_are_tried_last() {
        let paths = ["libx.so.13", "libx.so.12", "libx.so"];
        assert_eq!(for_driver(&paths, None), paths);
        assert_eq!(for_driver(&paths, Some(13)), paths);
        assert_eq!(for_driver(&paths, Some(12)), ["libx.so.12", "libx.so", "libx.so.13"]);
    }
}
