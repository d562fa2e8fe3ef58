//! From a source to a module that a device loads: shipped with the binary, or compiled once on a machine and then read from its
//! cache.
//!
//! Invariant: a module that is found was made of these very sources, with these options; a cached one by this version of the
//! compiler as well. No module is lost because it could not be cached, and no compiler is needed for what is found.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::architecture::Architecture;
use super::cubin_cache::{self, Key};
use super::nvrtc::{Compiled, Nvrtc};
use super::shipped;
use super::source::Source;
use super::usage::{self, Usage};
use crate::KernelError;

/// Finds modules, or compiles them and remembers in a folder what it compiled.
pub struct Compiler {
    /// Looked for when something has to be compiled.
    nvrtc: OnceLock<Result<Nvrtc, KernelError>>,
    nvrtc_place: Option<PathBuf>,
    cache: Option<PathBuf>,
    shipped: Option<PathBuf>,
    /// Found for a device of this process; the next one has the same.
    found: Mutex<HashMap<(&'static str, Architecture), Found>>,
}

type Found = Arc<OnceLock<Result<Module, KernelError>>>;

/// One source's kernels for one architecture.
#[derive(Clone, Debug)]
pub struct Module {
    pub cubin: Vec<u8>,
    pub kernels: Vec<Usage>,
    pub origin: Origin,
}

/// Where a module came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It came with the binary.
    Shipped,
    /// It had been compiled before.
    Cache,
    /// It was compiled now. The next time it is read from the cache.
    Compiler,
    /// It was compiled now, and will be again: the reason why it could not be cached.
    Uncached(String),
}

impl Compiler {
    /// `cache` is a folder of its own; it is made when it is needed.
    pub fn new(nvrtc: Nvrtc, cache: Option<PathBuf>) -> Self {
        Compiler { nvrtc: OnceLock::from(Ok(nvrtc)), ..Compiler::when_needed(None, cache) }
    }

    /// Opens NVRTC at this place, or where the system has it, when something has to be compiled; only then its absence is an
    /// error.
    pub fn when_needed(nvrtc_place: Option<PathBuf>, cache: Option<PathBuf>) -> Self {
        Compiler { nvrtc: OnceLock::new(), nvrtc_place, cache, shipped: None, found: Mutex::default() }
    }

    /// Takes what there is in this folder, which is only read. What is not is compiled.
    pub fn with_shipped(self, folder: Option<PathBuf>) -> Self {
        Compiler { shipped: folder, ..self }
    }

    /// That there is what the modules come from, so that its absence is known before anything else is done.
    pub fn check(&self, architecture: Architecture) -> Result<(), KernelError> {
        match self.shipped.as_deref().is_some_and(|folder| shipped::is_complete(folder, architecture)) {
            true => Ok(()),
            false => self.nvrtc()?.check_architecture(architecture),
        }
    }

    /// The kernels of a source. Several threads may compile at once.
    pub fn module(&self, source: Source, architecture: Architecture) -> Result<Module, KernelError> {
        // First, because the key of a cached module has the version of NVRTC, which is a library of a hundred megabytes.
        if let Some(folder) = &self.shipped
            && let Some(compiled) = shipped::read(folder, source, architecture)
        {
            return Ok(module(compiled, Origin::Shipped));
        }
        let (compiled, origin) = self.compiled(source, architecture)?;
        Ok(module(compiled, origin))
    }

    /// The same, found once for all devices of an architecture.
    pub(super) fn module_once(
        &self,
        source: Source,
        architecture: Architecture,
    ) -> Result<Module, KernelError> {
        let found = {
            let mut all = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry((source.name, architecture)).or_default().clone()
        };
        found.get_or_init(|| self.module(source, architecture)).clone()
    }

    /// By this machine's NVRTC, now or before.
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
            return Ok((compile()?, Origin::Uncached("no folder was given".to_owned())));
        };
        let key = key(source, architecture, &nvrtc.version().to_string());
        if let Some(compiled) = cubin_cache::read(folder, key) {
            return Ok((compiled, Origin::Cache));
        }
        let compiled = compile()?;
        let origin = match cubin_cache::write(folder, key, &compiled) {
            Ok(()) => Origin::Compiler,
            Err(error) => Origin::Uncached(format!("{}: {error}", folder.display())),
        };
        Ok((compiled, origin))
    }

    /// The compiler of this machine.
    pub fn nvrtc(&self) -> Result<&Nvrtc, KernelError> {
        let open = || Nvrtc::open(self.nvrtc_place.as_deref());
        self.nvrtc.get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

/// Of all that a module is made of, and who made it or for what.
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
        // Registers and spills, which `Usage` is read from.
        "--ptxas-options=-v".to_owned(),
    ]
}

pub(super) fn module(compiled: Compiled, origin: Origin) -> Module {
    Module { cubin: compiled.cubin, kernels: usage::of_log(&compiled.log), origin }
}
