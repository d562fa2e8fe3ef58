//! Builds the source of an agent to a component: finds a toolchain, runs cargo and wraps the result.
//!
//! Agents are `wasm32-unknown-unknown` core modules whose imports are exactly those of the WIT package:
//! nothing of WASI is linked, so nothing has to be denied. `toolchain` finds or prepares a compiler, `cargo`
//! runs it separately from the host's own build, and `component` wraps and validates the module.

pub(crate) mod bounded_command;
mod cargo;
mod component;
mod distribution;
mod environment;
mod toolchain;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::progress::Progress;
pub use component::encode;
pub use toolchain::{Toolchain, ToolchainWay, prepare, probe};

/// The one target that agents are built for.
pub const TARGET: &str = "wasm32-unknown-unknown";

/// A build to run.
pub struct BuildRequest {
    /// The package's folder, the one with `Cargo.toml`.
    pub dir: PathBuf,
    pub target: GuestTarget,
}

/// The target of the package that is the agent.
pub enum GuestTarget {
    /// The package's library.
    Library,
    /// An example of the package, with `crate-type = ["cdylib"]`.
    Example(String),
}

/// A finished agent.
pub struct BuiltGuest {
    pub component: Vec<u8>,
    /// Path of a file with the same bytes: `target/skep/NAME.wasm` in the package's workspace.
    pub path: PathBuf,
    pub seconds: f64,
}

/// Builds the agent of `request`, and prepares a toolchain first if there is none.
pub fn build(request: &BuildRequest, progress: &dyn Progress) -> Result<BuiltGuest> {
    let started = Instant::now();
    let dir = std::path::absolute(&request.dir)?;
    if !dir.join("Cargo.toml").is_file() {
        bail!(
            "{} has no Cargo.toml, so there is no crate to build\n  hint: pass the folder of a crate; `skep new NAME` creates one",
            dir.display()
        );
    }
    let toolchain = prepare(&dir, progress)?;
    let package = cargo::describe(&toolchain, &dir)?;
    let name = match &request.target {
        GuestTarget::Library => package.name.clone(),
        GuestTarget::Example(example) => example.clone(),
    };
    let step = progress.begin(&format!("building {name} for WebAssembly"), None);
    let module = cargo::build(&toolchain, &dir, &package, &request.target, step.as_ref())?;
    let component = component::encode(&module.bytes)
        .with_context(|| format!("cannot turn {} into a component", module.path.display()))?;
    let path = package.target_dir.join("skep").join(format!("{name}.wasm"));
    write_atomically(&path, &component)?;
    step.finish(&indicatif::HumanBytes(component.len() as u64).to_string());
    Ok(BuiltGuest { component, path, seconds: started.elapsed().as_secs_f64() })
}

fn write_atomically(path: &std::path::Path, bytes: &[u8]) -> Result<()> {
    let dir = path.parent().context("a path inside a folder")?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    // A temporary file of the system's kind would be readable by its owner alone.
    let beside = path.with_extension(format!("wasm.{}", std::process::id()));
    std::fs::write(&beside, bytes).with_context(|| format!("cannot write {}", beside.display()))?;
    std::fs::rename(&beside, path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}
