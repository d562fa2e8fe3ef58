//! Selects the Rust compiler that builds agents, and prepares one if there is none.
//!
//! In this order: the active toolchain, if it has the target; a toolchain that was unpacked earlier; `rustup
//! target add`; the distribution's packages, unpacked into the user's cache. Nothing outside rustup's folder
//! and the cache changes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{TARGET, bounded_command, distribution, environment};
use crate::paths;
use crate::progress::Progress;

/// Environment variable that skips the options before the distribution's packages, to try these on a machine
/// that has a better option. Its only value is `distribution`.
const WAY_VARIABLE: &str = "SKEP_GUEST_TOOLCHAIN";

/// A compiler that can build agents.
#[derive(Debug, Clone)]
pub struct Toolchain {
    pub way: ToolchainWay,
    /// Version, as `rustc -V` prints it.
    pub version: String,
}

/// Source of the compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolchainWay {
    /// The active `rustc` has the target.
    Active,
    /// The distribution's packages, unpacked into this folder.
    Distribution(PathBuf),
}

impl Toolchain {
    /// Returns a command for `program` that uses this toolchain.
    pub fn command(&self, program: &str) -> Command {
        let mut command = environment::command(program);
        if let ToolchainWay::Distribution(root) = &self.way {
            distribution::select(&mut command, root);
        }
        command
    }

    /// Describes the toolchain in one line, for people.
    pub fn describe(&self) -> String {
        match &self.way {
            ToolchainWay::Active => format!("{} with {TARGET}", self.version),
            ToolchainWay::Distribution(root) => {
                format!("{} from the distribution's packages in {}", self.version, root.display())
            }
        }
    }
}

/// Returns the toolchain that is ready for the crate in `dir`, if there is one. Changes nothing.
pub fn probe(dir: &Path) -> Result<Option<Toolchain>> {
    if !only_distribution()
        && let Some(toolchain) = active(dir)?
    {
        return Ok(Some(toolchain));
    }
    Ok(distribution::unpacked()?
        .map(|(root, version)| Toolchain { way: ToolchainWay::Distribution(root), version }))
}

/// Returns the toolchain for the crate in `dir`, and prepares one if none is ready.
pub fn prepare(dir: &Path, progress: &dyn Progress) -> Result<Toolchain> {
    if let Some(toolchain) = probe(dir)? {
        return Ok(toolchain);
    }
    let lock_path = paths::cache_subdir("toolchain")?.join("prepare.lock");
    let waiting = || eprintln!("  - another process is preparing the toolchain; waiting for it");
    let _lock = paths::lock(&lock_path, waiting)?;
    if let Some(toolchain) = probe(dir)? {
        return Ok(toolchain);
    }
    let mut tried = Vec::new();
    if !only_distribution() {
        match add_with_rustup(dir, progress) {
            Ok(toolchain) => return Ok(toolchain),
            Err(error) => tried.push(format!("rustup target add {TARGET}: {error:#}")),
        }
    }
    match distribution::install(progress) {
        Ok((root, version)) => Ok(Toolchain { way: ToolchainWay::Distribution(root), version }),
        Err(error) => {
            tried.push(format!("the distribution's packages: {error:#}"));
            bail!(
                "no Rust toolchain on this machine can build for {TARGET}\n  tried {}\n  hint: with a network, run \
                 `rustup target add {TARGET}`; or install your distribution's Rust with that target",
                tried.join("\n  tried ")
            )
        }
    }
}

fn only_distribution() -> bool {
    std::env::var_os(WAY_VARIABLE).is_some_and(|way| way == "distribution")
}

/// Returns the toolchain that `rustc` uses in `dir`, if its sysroot has the target's standard library.
fn active(dir: &Path) -> Result<Option<Toolchain>> {
    let ask = |argument: &[&str]| -> Result<Option<String>> {
        let mut command = environment::command("rustc");
        command.current_dir(dir).args(argument);
        let Ok(finished) = bounded_command::run(command, Duration::from_secs(60)) else { return Ok(None) };
        Ok(finished.status.success().then(|| finished.stdout.trim().to_owned()))
    };
    let Some(sysroot) = ask(&["--print", "sysroot"])? else { return Ok(None) };
    if !has_std(Path::new(&sysroot)) {
        return Ok(None);
    }
    let version = ask(&["-V"])?.context("`rustc -V` failed although `rustc --print sysroot` did not")?;
    Ok(Some(Toolchain { way: ToolchainWay::Active, version }))
}

/// Returns whether `sysroot` has the target's standard library.
pub fn has_std(sysroot: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(sysroot.join("lib/rustlib").join(TARGET).join("lib")) else {
        return false;
    };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".rlib")
    })
}

fn add_with_rustup(dir: &Path, progress: &dyn Progress) -> Result<Toolchain> {
    let step = progress.begin(&format!("adding the Rust target {TARGET} with rustup"), None);
    let mut command = environment::command("rustup");
    command.current_dir(dir).args(["target", "add", TARGET]);
    // One attempt is enough: a machine that cannot reach rustup's server has another option.
    command.env("RUSTUP_MAX_RETRIES", "1");
    let finished = bounded_command::run(command, Duration::from_secs(60))?;
    if !finished.status.success() {
        bail!("{}", finished.last_words());
    }
    let toolchain =
        active(dir)?.context("rustup added the target, but the active `rustc` does not have it")?;
    step.finish("");
    Ok(toolchain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysroot_without_the_std_library_is_not_enough() {
        let sysroot = tempfile::tempdir().expect("temporary folder");
        let lib = sysroot.path().join("lib/rustlib").join(TARGET).join("lib");
        assert!(!has_std(sysroot.path()));
        std::fs::create_dir_all(&lib).expect("folder");
        std::fs::write(lib.join("libcore-0.rlib"), b"").expect("file");
        assert!(!has_std(sysroot.path()));
        std::fs::write(lib.join("libstd-0.rlib"), b"").expect("file");
        assert!(has_std(sysroot.path()));
    }
}
