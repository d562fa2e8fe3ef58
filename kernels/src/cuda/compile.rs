//! Turns a source into a module that a device loads. The module is either shipped with the binary, or compiled once on the
//! machine and then read from its cache.
//!
//! Invariant: a module that is found was compiled from exactly these sources with these options, and a cached module also
//! by this version of the compiler. A module that cannot be cached is still used, and no compiler is needed for modules
//! that are found.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::architecture::Architecture;
use super::cubin_cache::{self, Key};
use super::nvrtc::{Compiled, Nvrtc};
use super::shipped;
use super::source::Source;
use super::usage::{self, Usage};
use crate::KernelError;

const NO_CACHE: &str = "no cache folder was given";

/// Finds modules, or compiles them and caches the results in a folder.
pub struct Compiler {
    /// Opened when something has to be compiled.
    nvrtc: OnceLock<Result<Nvrtc, KernelError>>,
    nvrtc_path: Option<PathBuf>,
    cache: Option<PathBuf>,
    shipped: Option<PathBuf>,
    /// Modules that were found for a device of this process, shared with other devices of the same architecture.
    found: Shared,
    /// Modules that were compiled because a driver rejected the ones that were found.
    replaced: Shared,
}

type Shared = Mutex<HashMap<(&'static str, Architecture), Found>>;
type Found = Arc<OnceLock<Result<Module, KernelError>>>;

/// The kernels of one source for one architecture.
#[derive(Clone, Debug)]
pub struct Module {
    pub cubin: Vec<u8>,
    pub kernels: Vec<Usage>,
    pub origin: Origin,
}

/// The origin of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The module was shipped with the binary.
    Shipped,
    /// The module was read from the cache.
    Cache,
    /// The module was compiled by this process and cached for the next start.
    Compiler,
    /// The module was compiled by this process and could not be cached, for the given reason.
    Uncached(String),
}

impl Compiler {
    /// Creates a compiler from an open NVRTC. `cache` must be a folder for this purpose only; it is created when needed.
    pub fn new(nvrtc: Nvrtc, cache: Option<PathBuf>) -> Self {
        Compiler { nvrtc: OnceLock::from(Ok(nvrtc)), ..Compiler::when_needed(None, cache) }
    }

    /// Creates a compiler that opens NVRTC at this path, or where the system finds it, when something has to be compiled.
    /// The absence of NVRTC is an error only then.
    pub fn when_needed(nvrtc_path: Option<PathBuf>, cache: Option<PathBuf>) -> Self {
        let (found, replaced) = (Mutex::default(), Mutex::default());
        Compiler { nvrtc: OnceLock::new(), nvrtc_path, cache, shipped: None, found, replaced }
    }

    /// Uses the modules in this folder, which is only read. Other modules are compiled.
    pub fn with_shipped(self, folder: Option<PathBuf>) -> Self {
        Compiler { shipped: folder, ..self }
    }

    /// Checks that modules for the architecture are available: a complete shipped set, or a compiler that supports it. It
    /// reports a missing compiler before any other work starts.
    pub fn check(&self, architecture: Architecture) -> Result<(), KernelError> {
        match self.shipped.as_deref().is_some_and(|folder| shipped::is_complete(folder, architecture)) {
            true => Ok(()),
            false => self.nvrtc()?.check_architecture(architecture),
        }
    }

    /// Returns the kernels of a source. Several threads may compile at once.
    pub fn module(&self, source: Source, architecture: Architecture) -> Result<Module, KernelError> {
        // The shipped set comes first, because the key of a cached module contains the version of NVRTC, which is a library of
        // a hundred megabytes.
        if let Some(folder) = &self.shipped
            && let Some(compiled) = shipped::read(folder, source, architecture)
        {
            return Ok(module(compiled, Origin::Shipped));
        }
        let (compiled, origin) = self.compiled(source, architecture)?;
        Ok(module(compiled, origin))
    }

    /// Does the same as `module`, but only once for all devices of an architecture.
    pub(super) fn module_once(
        &self,
        source: Source,
        architecture: Architecture,
    ) -> Result<Module, KernelError> {
        once(&self.found, source, architecture, || self.module(source, architecture))
    }

    /// Compiles a module whose shipped or cached version the driver rejects, and caches the result in its place. It does
    /// so only once for all devices of an architecture.
    pub(super) fn replacement_once(
        &self,
        source: Source,
        architecture: Architecture,
    ) -> Result<Module, KernelError> {
        once(&self.replaced, source, architecture, || {
            let nvrtc = self.nvrtc()?;
            nvrtc.check_architecture(architecture)?;
            let compiled = nvrtc.compile(source, architecture, &options(architecture))?;
            let origin = match &self.cache {
                Some(folder) => {
                    cached(folder, key(source, architecture, &nvrtc.version().to_string()), &compiled)
                }
                None => Origin::Uncached(NO_CACHE.to_owned()),
            };
            Ok(module(compiled, origin))
        })
    }

    /// Returns a module that this machine's NVRTC compiled, now or before.
    pub(super) fn compiled(
        &self,
        source: Source,
        architecture: Architecture,
    ) -> Result<(Compiled, Origin), KernelError> {
        let nvrtc = self.nvrtc()?;
        let compile = || {
            nvrtc.check_architecture(architecture)?;
            nvrtc.compile(source, architecture, &options(architecture))
        };
        let Some(folder) = &self.cache else {
            return Ok((compile()?, Origin::Uncached(NO_CACHE.to_owned())));
        };
        let key = key(source, architecture, &nvrtc.version().to_string());
        if let Some(compiled) = cubin_cache::read(folder, key) {
            return Ok((compiled, Origin::Cache));
        }
        let compiled = compile()?;
        let origin = cached(folder, key, &compiled);
        Ok((compiled, origin))
    }

    /// Returns the NVRTC of this machine.
    pub fn nvrtc(&self) -> Result<&Nvrtc, KernelError> {
        let open = || Nvrtc::open(self.nvrtc_path.as_deref());
        self.nvrtc.get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

/// Returns what `make` returns for a source and an architecture, and calls it only once for them.
fn once(
    shared: &Shared,
    source: Source,
    architecture: Architecture,
    make: impl FnOnce() -> Result<Module, KernelError>,
) -> Result<Module, KernelError> {
    let found = {
        let mut all = shared.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry((source.name, architecture)).or_default().clone()
    };
    found.get_or_init(make).clone()
}

/// Caches what was just compiled, and returns its origin.
fn cached(folder: &Path, key: Key, compiled: &Compiled) -> Origin {
    match cubin_cache::write(folder, key, compiled) {
        Ok(()) => Origin::Compiler,
        Err(error) => Origin::Uncached(format!("{}: {error}", folder.display())),
    }
}

/// Returns the digest of everything that a module is made of: the sources, the options, and `maker`, which is the version
/// of the compiler or stands for any version.
pub(super) fn key(source: Source, architecture: Architecture, maker: &str) -> Key {
    let (headers, options) = (source.headers(), options(architecture));
    let texts = std::iter::once(&source).chain(&headers).flat_map(|source| [source.name, source.text]);
    let options = options.iter().map(String::as_str);
    Key::of(texts.chain(options).chain([maker]).map(str::as_bytes))
}

fn options(architecture: Architecture) -> Vec<String> {
    vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++20".to_owned(),
        // Prints registers and spills to the log, from which `Usage` is read.
        "--ptxas-options=-v".to_owned(),
    ]
}

pub(super) fn module(compiled: Compiled, origin: Origin) -> Module {
    Module { cubin: compiled.cubin, kernels: usage::of_log(&compiled.log), origin }
}
