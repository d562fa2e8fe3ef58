//! Mooncake Store's library and the functions of its C interface (`store_c.h`) that are used.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

/// The file of the library.
const FILE: &str = "libmooncake_store.so";

/// A client of a store, as the library returns it.
pub(crate) type Handle = *mut c_void;

type Create = unsafe extern "C" fn() -> Handle;
type Destroy = unsafe extern "C" fn(Handle);
type Setup = unsafe extern "C" fn(
    Handle,
    *const c_char,
    *const c_char,
    u64,
    u64,
    *const c_char,
    *const c_char,
    *const c_char,
) -> c_int;
type RegisterBuffer = unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;
type BatchIsExist = unsafe extern "C" fn(Handle, *const *const c_char, usize, *mut c_int) -> c_int;
type BatchPutFrom = unsafe extern "C" fn(
    Handle,
    *const *const c_char,
    *const *mut c_void,
    *const usize,
    usize,
    *const c_void,
    *mut c_int,
) -> c_int;
type BatchGetInto = unsafe extern "C" fn(
    Handle,
    *const *const c_char,
    *const *mut c_void,
    *const usize,
    usize,
    *mut i64,
) -> c_int;
type Remove = unsafe extern "C" fn(Handle, *const c_char, c_int) -> c_int;
type RemoveByRegex = unsafe extern "C" fn(Handle, *const c_char, c_int) -> i64;

/// The functions of the library.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    pub create: Create,
    pub destroy: Destroy,
    pub setup: Setup,
    pub register_buffer: RegisterBuffer,
    pub batch_is_exist: BatchIsExist,
    pub batch_put_from: BatchPutFrom,
    pub batch_get_into: BatchGetInto,
    pub remove: Remove,
    pub remove_by_regex: RemoveByRegex,
}

/// The loaded library. It stays loaded until the process ends, because its threads do.
#[derive(Clone)]
pub struct Library {
    path: PathBuf,
    pub(crate) functions: Functions,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The reason that the library cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot use Mooncake's library {path}: {why}\n  hint: name the folder of {file} with library under [kv.cluster]; \
     `ldd` shows which libraries it needs that this machine lacks (libibverbs, a CUDA runtime)",
    path = path.display(),
    file = FILE
)]
pub struct LibraryError {
    path: PathBuf,
    why: String,
}

impl Library {
    /// Loads the library from a folder, or from where the system looks for libraries.
    pub fn open(folder: Option<&Path>) -> Result<Library, LibraryError> {
        let path = folder.map_or_else(|| PathBuf::from(FILE), |folder| folder.join(FILE));
        match load(&path) {
            Ok(functions) => Ok(Library { path, functions }),
            Err(error) => Err(LibraryError { path, why: error.to_string() }),
        }
    }

    /// Returns the path that the library was loaded from, or its name if the system has found it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn load(path: &Path) -> Result<Functions, libloading::Error> {
    // SAFETY: loading runs the initializers of a library that the operator has named, which are trusted like the program. It
    // is leaked, so no function outlives its code. The types are those of `store_c.h`.
    unsafe {
        let library: &'static libloading::Library = Box::leak(Box::new(libloading::Library::new(path)?));
        macro_rules! function {
            ($name:literal) => {
                *library.get(concat!("mooncake_store_", $name, "\0"))?
            };
        }
        Ok(Functions {
            create: function!("create"),
            destroy: function!("destroy"),
            setup: function!("setup"),
            register_buffer: function!("register_buffer"),
            batch_is_exist: function!("batch_is_exist"),
            batch_put_from: function!("batch_put_from"),
            batch_get_into: function!("batch_get_into"),
            remove: function!("remove"),
            remove_by_regex: function!("remove_by_regex"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_with_a_hint() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Library::open(Some(folder.path())).expect_err("there is none").to_string();
        assert!(error.contains("libmooncake_store.so") && error.contains("hint: name the folder"), "{error}");
        std::fs::write(folder.path().join(FILE), "no library").expect("a file");
        let error = Library::open(Some(folder.path())).expect_err("it is not one").to_string();
        assert!(error.contains("[kv.cluster]"), "{error}");
    }
}
