//! Modules that are shipped with the binary: compiled where it was built, so that machines need no compiler to run it.
//!
//! Invariant: a module that is read was compiled from the sources embedded in this binary; modules of another version and
//! damaged modules are treated as missing. The version of the compiler does not matter, since the machine that reads a
//! module may have no compiler.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::architecture::Architecture;
use super::compile::{self, Compiler, Module, Origin};
use super::cubin_cache::{self, Key};
use super::nvrtc::Compiled;
use super::source::{SOURCES, Source};
use crate::KernelError;

/// Replaces the compiler's version in keys.
const ANY_COMPILER: &str = "shipped";

/// A module that was added to a set.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    pub source: Source,
    pub architecture: Architecture,
    pub cubin_bytes: usize,
}

/// Compiles all sources for these architectures into a folder, on all CPUs of this machine, and reports each module to
/// `progress`. Other files in the folder are kept, so that sets for several architectures can share a folder.
pub fn ship(
    compiler: &Compiler,
    folder: &Path,
    architectures: &[Architecture],
    progress: impl Fn(Shipped) + Sync,
) -> Result<(), KernelError> {
    compiler.nvrtc()?;
    let jobs: Vec<_> = architectures
        .iter()
        .flat_map(|architecture| SOURCES.iter().map(|source| (*source, *architecture)))
        .collect();
    let left = Mutex::new(jobs.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((source, architecture)) = next() {
            let outcome = compiler.compiled(source, architecture).and_then(|(compiled, _)| {
                write(folder, source, architecture, &compiled)?;
                Ok(Shipped { source, architecture, cubin_bytes: compiled.cubin.len() })
            });
            match outcome {
                Ok(shipped) => progress(shipped),
                Err(error) => {
                    // Stops the other threads from starting further jobs.
                    *left.lock().unwrap_or_else(PoisonError::into_inner) = Vec::new().into_iter();
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running.into_iter().try_for_each(|thread| thread.join().expect("compiling does not panic"))
    })
}

/// Returns a module of the set in this folder, if it exists and was compiled from this binary's sources.
pub fn module(folder: &Path, source: Source, architecture: Architecture) -> Option<Module> {
    Some(compile::module(read(folder, source, architecture)?, Origin::Shipped))
}

/// Returns the architectures for which the set in this folder is complete.
pub fn complete(folder: &Path) -> Vec<Architecture> {
    Architecture::ALL.into_iter().filter(|architecture| is_complete(folder, *architecture)).collect()
}

/// Returns whether the set has all modules for an architecture.
pub(super) fn is_complete(folder: &Path, architecture: Architecture) -> bool {
    SOURCES.iter().all(|source| read(folder, *source, architecture).is_some())
}

pub(super) fn read(folder: &Path, source: Source, architecture: Architecture) -> Option<Compiled> {
    cubin_cache::read(folder, key(source, architecture))
}

pub(super) fn write(
    folder: &Path,
    source: Source,
    architecture: Architecture,
    compiled: &Compiled,
) -> Result<(), KernelError> {
    cubin_cache::write(folder, key(source, architecture), compiled).map_err(|error| KernelError::Shipping {
        folder: folder.display().to_string(),
        reason: error.to_string(),
    })
}

/// Returns the path of a module in a set.
#[cfg(test)]
pub(super) fn path(folder: &Path, source: Source, architecture: Architecture) -> std::path::PathBuf {
    folder.join(key(source, architecture).file_name())
}

fn key(source: Source, architecture: Architecture) -> Key {
    compile::key(source, architecture, ANY_COMPILER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::on_device;
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const SM90A: Architecture = Architecture::Sm90a;

    /// Ships a set of modules, which other tests have usually compiled and cached.
    fn set() -> tempfile::TempDir {
        // One test compiles what is not in the cache, and the others find it there.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let shipped_count = AtomicUsize::new(0);
        let count = |shipped: Shipped| {
            assert!(shipped.architecture == SM90A && shipped.cubin_bytes > 1000, "{shipped:?}");
            shipped_count.fetch_add(1, Ordering::Relaxed);
        };
        ship(&on_device::compiler(), folder.path(), &[SM90A], count).unwrap();
        assert_eq!(shipped_count.into_inner(), SOURCES.len());
        folder
    }

    fn without_nvrtc(shipped: &Path) -> Compiler {
        let nowhere = PathBuf::from("/nowhere/libnvrtc.so");
        Compiler::when_needed(Some(nowhere), None).with_shipped(Some(shipped.to_owned()))
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn shipped_modules_need_no_compiler_and_others_do() {
        let set = set();
        let compiler = without_nvrtc(set.path());
        for source in SOURCES {
            let module = compiler.module(*source, SM90A).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(module.origin, Origin::Shipped);
            let compiled = on_device::compiler().module(*source, SM90A).unwrap();
            assert_eq!((module.cubin, module.kernels), (compiled.cubin, compiled.kernels));
        }
        assert_eq!(compiler.check(SM90A), Ok(()));
        assert!(matches!(compiler.check(Architecture::Sm80), Err(KernelError::NoNvrtc { .. })));
        let error = compiler.module(SOURCES[0], Architecture::Sm80).expect_err("another architecture");
        assert!(matches!(&error, KernelError::NoNvrtc { tried } if tried.contains("/nowhere")), "{error}");
        // If there is a compiler, other modules are compiled.
        let both = on_device::compiler().with_shipped(Some(set.path().to_owned()));
        assert_eq!(both.module(SOURCES[0], SM90A).unwrap().origin, Origin::Shipped);
        assert_ne!(both.module(SOURCES[0], Architecture::Sm80).unwrap().origin, Origin::Shipped);
    }

    #[test]
    fn damaged_and_foreign_files_are_treated_as_missing() {
        let set = set();
        let compiler = without_nvrtc(set.path());
        let all = files(set.path());
        assert_eq!(all.len(), SOURCES.len());
        assert_eq!(complete(set.path()), [SM90A]);
        for file in &all {
            let mut bytes = fs::read(file).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::write(file, bytes).unwrap();
            assert_eq!(complete(set.path()), []);
        }
        for source in SOURCES {
            assert!(module(set.path(), *source, SM90A).is_none());
            assert!(matches!(compiler.module(*source, SM90A), Err(KernelError::NoNvrtc { .. })));
        }
        // Modules that are keyed by this machine's compiler form a cache, not a shipped set.
        let cache = tempfile::tempdir().unwrap();
        let compiled = on_device::compiler().compiled(SOURCES[0], SM90A).unwrap().0;
        cubin_cache::write(cache.path(), compile::key(SOURCES[0], SM90A, "13.0"), &compiled).unwrap();
        assert!(module(cache.path(), SOURCES[0], SM90A).is_none());
    }

    #[test]
    fn changed_sources_are_not_found_in_an_older_set() {
        let set = set();
        let changed = Source { text: "// Not the source that was compiled.", ..SOURCES[0] };
        assert!(module(set.path(), SOURCES[0], SM90A).is_some());
        assert!(module(set.path(), changed, SM90A).is_none());
        let renamed = Source { name: SOURCES[1].name, ..SOURCES[0] };
        assert!(module(set.path(), renamed, SM90A).is_none());
    }

    #[test]
    fn a_set_that_cannot_be_shipped_is_an_error_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let nobody = |_| panic!("nothing is compiled");
        let error = ship(&without_nvrtc(folder.path()), folder.path(), &[SM90A], nobody);
        assert!(matches!(error, Err(KernelError::NoNvrtc { .. })));
        let file = folder.path().join("a file");
        fs::write(&file, "").unwrap();
        let below = file.join("below");
        let error = ship(&on_device::compiler(), &below, &[SM90A], nobody).expect_err("not a folder");
        assert!(error.to_string().contains(below.to_str().unwrap()), "{error}");
    }
}
