//! Loads the modules of all sources into a device.
//!
//! Invariant: a shipped or cached module that the driver rejects, for instance because it was made for a newer driver or
//! damaged before it was shipped, is compiled on this machine instead. A device fails only if that is impossible or rejected
//! as well.

use super::architecture::Architecture;
use super::backend::Loaded;
use super::compile::{Compiler, Module, Origin};
use super::source::{SOURCES, Source};
use crate::KernelError;

/// A source and its module.
pub(super) type Sourced = (Source, Module);

/// Finds or compiles one module for each source.
pub(super) fn modules(compiler: &Compiler, architecture: Architecture) -> Result<Vec<Sourced>, KernelError> {
    std::thread::scope(|scope| {
        let compile = |source: Source| {
            let find = move || compiler.module_once(source, architecture).map(|module| (source, module));
            scope.spawn(find)
        };
        let running: Vec<_> = SOURCES.iter().copied().map(compile).collect();
        running.into_iter().map(|thread| thread.join().expect("compiling does not panic")).collect()
    })
}

/// Passes each module to `load`, which is the driver's. It may be called with a module of a source again, whose kernels then
/// take the place of those before.
pub(super) fn load(
    compiler: &Compiler,
    architecture: Architecture,
    modules: &[Sourced],
    mut load: impl FnMut(&Module) -> Result<(), KernelError>,
) -> Result<Loaded, KernelError> {
    let mut loaded = Loaded::default();
    for (source, module) in modules {
        let (count, found) = match module.origin {
            Origin::Shipped => (&mut loaded.shipped, Some("shipped")),
            Origin::Cache => (&mut loaded.cached, Some("cached")),
            Origin::Compiler | Origin::Uncached(_) => (&mut loaded.compiled, None),
        };
        match (load(module), found) {
            (Ok(()), _) => *count += 1,
            (Err(error), None) => return Err(error),
            (Err(rejection), Some(found)) => {
                let replacement = compiler.replacement_once(*source, architecture);
                replacement.and_then(|module| load(&module)).map_err(|error| KernelError::Rejected {
                    source_name: source.name,
                    found,
                    reason: rejection.to_string(),
                    then: error.to_string(),
                })?;
                loaded.compiled += 1;
                loaded.rejected += 1;
            }
        }
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::device::{Device, Emulation};
    use crate::cuda::nvrtc::Compiled;
    use crate::cuda::{compile, compile_tests, cubin_cache, on_device, shipped};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    const SM90A: Architecture = Architecture::Sm90a;

    /// Ships a set of modules, of which the first is replaced by one that is cut off.
    fn set_with_a_broken_module() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        shipped::ship(&on_device::compiler(), folder.path(), &[SM90A], |_| {}).unwrap();
        let (source, whole) = (SOURCES[0], shipped::read(folder.path(), SOURCES[0], SM90A).unwrap());
        let cubin = whole.cubin[..whole.cubin.len() / 2].to_vec();
        shipped::write(folder.path(), source, SM90A, &Compiled { cubin, log: whole.log }).unwrap();
        folder
    }

    fn open(compiler: Compiler) -> Device {
        Device::emulated_with(Emulation::default(), &Arc::new(compiler), SM90A)
    }

    fn without_nvrtc(shipped: &Path) -> Compiler {
        let nowhere = PathBuf::from("/nowhere/libnvrtc.so");
        Compiler::when_needed(Some(nowhere), None).with_shipped(Some(shipped.to_owned()))
    }

    #[test]
    fn a_shipped_module_that_the_driver_rejects_is_compiled() {
        let set = set_with_a_broken_module();
        let loaded = open(on_device::compiler().with_shipped(Some(set.path().to_owned()))).ready().unwrap();
        let shipped = SOURCES.len() - 1;
        assert_eq!(loaded, Loaded { shipped, cached: 0, compiled: 1, rejected: 1 });
    }

    #[test]
    fn a_cached_module_that_the_driver_rejects_is_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let compiler = |nvrtc| Compiler::new(nvrtc, Some(cache.path().to_owned()));
        let set = set_with_a_broken_module();
        // The broken module is the only one that the cache has.
        let broken = shipped::read(set.path(), SOURCES[0], SM90A).unwrap();
        let nvrtc = compile_tests::nvrtc();
        let key = compile::key(SOURCES[0], SM90A, &nvrtc.version().to_string());
        cubin_cache::write(cache.path(), key, &broken).unwrap();
        let found = compiler(nvrtc).module(SOURCES[0], SM90A).unwrap();
        assert_eq!(found.origin, Origin::Cache);
        let others = |compiler: Compiler| {
            // The other modules are shipped, so that only one is compiled.
            std::fs::remove_file(shipped::path(set.path(), SOURCES[0], SM90A)).ok();
            open(compiler.with_shipped(Some(set.path().to_owned()))).ready().unwrap()
        };
        let shipped = SOURCES.len() - 1;
        let loaded = others(compiler(compile_tests::nvrtc()));
        assert_eq!(loaded, Loaded { shipped, cached: 0, compiled: 1, rejected: 1 });
        let loaded = others(compiler(compile_tests::nvrtc()));
        assert_eq!(loaded, Loaded { shipped, cached: 1, compiled: 0, rejected: 0 });
    }

    #[test]
    fn the_error_says_what_the_driver_rejects_and_why_it_is_not_compiled() {
        let set = set_with_a_broken_module();
        let error = open(without_nvrtc(set.path())).ready().expect_err("there is no compiler").to_string();
        for part in [SOURCES[0].name, "shipped", "this is not a complete module", "/nowhere/libnvrtc.so"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
