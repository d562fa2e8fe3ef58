//! From a source to a module that a device loads: compiled once on a machine, then read from its cache.
//!
//! Invariant: a cached module was made of these very sources, with these options, by this version of the compiler. No module
//! is lost because it could not be cached.

use std::path::PathBuf;

use super::architecture::Architecture;
use super::cubin_cache::{self, Key};
use super::nvrtc::{Compiled, Nvrtc};
use super::source::Source;
use super::usage::{self, Usage};
use crate::KernelError;

/// Compiles, and remembers in a folder what it compiled.
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<PathBuf>,
}

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
        Compiler { nvrtc, cache }
    }

    /// The kernels of a source. Several threads may compile at once.
    pub fn module(&self, source: Source, architecture: Architecture) -> Result<Module, KernelError> {
        let options = options(architecture);
        let Some(folder) = &self.cache else {
            let compiled = self.compile(source, architecture, &options)?;
            return Ok(module(compiled, Origin::Uncached("no folder was given".to_owned())));
        };
        let key = self.key(source, &options);
        if let Some(compiled) = cubin_cache::read(folder, key) {
            return Ok(module(compiled, Origin::Cache));
        }
        let compiled = self.compile(source, architecture, &options)?;
        let origin = match cubin_cache::write(folder, key, &compiled) {
            Ok(()) => Origin::Compiler,
            Err(error) => Origin::Uncached(format!("{}: {error}", folder.display())),
        };
        Ok(module(compiled, origin))
    }

    fn compile(
        &self,
        source: Source,
        architecture: Architecture,
        options: &[String],
    ) -> Result<Compiled, KernelError> {
        self.nvrtc.check_architecture(architecture)?;
        self.nvrtc.compile(source, architecture, options)
    }

    fn key(&self, source: Source, options: &[String]) -> Key {
        let version = self.nvrtc.version().to_string();
        let headers = source.headers();
        let texts = std::iter::once(&source).chain(&headers).flat_map(|source| [source.name, source.text]);
        let options = options.iter().map(String::as_str);
        Key::of(texts.chain(options).chain([version.as_str()]).map(str::as_bytes))
    }
}

fn options(architecture: Architecture) -> Vec<String> {
    vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++20".to_owned(),
        // Registers and spills, which `Usage` is read from.
        "--ptxas-options=-v".to_owned(),
    ]
}

fn module(compiled: Compiled, origin: Origin) -> Module {
    Module { cubin: compiled.cubin, kernels: usage::of_log(&compiled.log), origin }
}
