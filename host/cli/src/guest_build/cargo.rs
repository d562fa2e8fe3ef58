//! Runs cargo for a guest and finds the module that it built.
//!
//! The guest has its own target folder inside the workspace's, so that it neither waits for nor disturbs a
//! build of the host that may be running. It always has the same release profile, so that a component does
//! not depend on who built it.

use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::{GuestTarget, TARGET, Toolchain, bounded_command};
use crate::paths;
use crate::progress::Step;

/// The package that is built.
pub struct Package {
    pub name: String,
    /// The target folder of its workspace, which several workspaces may share.
    pub target_dir: PathBuf,
    manifest: PathBuf,
    /// Name of its library, if it has one.
    library: Option<String>,
}

/// Reads the package in `dir`.
pub fn describe(toolchain: &Toolchain, dir: &Path) -> Result<Package> {
    let mut command = toolchain.command("cargo");
    command.current_dir(dir).args(["metadata", "--no-deps", "--format-version", "1"]);
    let finished = bounded_command::run(command, Duration::from_secs(120))?;
    if !finished.status.success() {
        bail!("cargo cannot read {}:\n{}", dir.join("Cargo.toml").display(), finished.stderr.trim());
    }
    let metadata: Metadata =
        serde_json::from_str(&finished.stdout).context("`cargo metadata` printed unexpected JSON")?;
    let manifest = dir.join("Cargo.toml");
    let canonical = manifest.canonicalize().unwrap_or(manifest);
    let package = metadata
        .packages
        .into_iter()
        .find(|package| package.manifest_path.canonicalize().is_ok_and(|path| path == canonical));
    match package {
        Some(MetadataPackage { name, targets, .. }) => {
            let library = targets.into_iter().find(|target| {
                let is_module = target.crate_types.iter().any(|kind| kind == "cdylib");
                is_module && target.kind.iter().all(|kind| kind != "example")
            });
            let library = library.map(|target| target.name);
            Ok(Package { name, target_dir: metadata.target_directory, manifest: canonical, library })
        }
        None => bail!(
            "{} is a workspace, not a package; pass the folder of one of its packages",
            canonical.display()
        ),
    }
}

/// A core module, and the file that it was read from.
pub struct CoreModule {
    pub path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Builds `target` and returns its core module.
pub fn build(
    toolchain: &Toolchain,
    dir: &Path,
    package: &Package,
    target: &GuestTarget,
    step: &dyn Step,
) -> Result<CoreModule> {
    let folder = package.target_dir.join("skep-guest");
    let _lock = make_ours(&folder, package, target, step)?;
    let mut command = toolchain.command("cargo");
    command.current_dir(dir).args(["build", "--release", "--target", TARGET]);
    command.arg("--target-dir").arg(&folder);
    command.args(["--message-format", "json-render-diagnostics"]);
    command.args(["--color", if std::io::stderr().is_terminal() { "always" } else { "never" }]);
    for setting in
        ["opt-level=\"s\"", "lto=true", "codegen-units=1", "panic=\"abort\"", "strip=true", "debug=false"]
    {
        command.arg("--config").arg(format!("profile.release.{setting}"));
    }
    match target {
        GuestTarget::Library => command.arg("--lib"),
        GuestTarget::Example(name) => command.args(["--example", name]),
    };
    let (succeeded, messages, diagnostics) = watch(command, step)?;
    if !succeeded {
        bail!("cargo could not build {}:\n{}", package.name, diagnostics.trim_end());
    }
    let wanted = match target {
        GuestTarget::Library => None,
        GuestTarget::Example(name) => Some(name.as_str()),
    };
    match messages.lines().filter_map(|line| wasm_of(line, dir, wanted)).next_back() {
        Some(path) => {
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            Ok(CoreModule { path, bytes })
        }
        None => bail!(
            "{} builds, but produces no .wasm file; its Cargo.toml needs `crate-type = [\"cdylib\"]`",
            package.name
        ),
    }
}

/// Makes sure that cargo does not take the module of another package for this one's. Cargo writes the module of a library
/// to a file with the library's name alone, and trusts it as long as the sources are older. In a target folder that
/// workspaces share, the file may be that of a package of the same name, so it is removed, and cargo links it again.
/// The file belongs to this package until the result is dropped.
fn make_ours(folder: &Path, package: &Package, target: &GuestTarget, step: &dyn Step) -> Result<File> {
    let name = match target {
        GuestTarget::Library => package.library.as_ref().unwrap_or(&package.name),
        GuestTarget::Example(name) => name,
    };
    let file = format!("{}.wasm", name.replace('-', "_"));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let lock = paths::lock(&folder.join(format!("{file}.lock")), || step.note("waiting for another build"))?;
    let owner = folder.join(format!("{file}.owner"));
    let manifest = package.manifest.to_string_lossy();
    if std::fs::read_to_string(&owner).is_ok_and(|before| before == manifest) {
        return Ok(lock);
    }
    let built = folder.join(TARGET).join("release");
    for place in ["deps", "examples"] {
        let stale = built.join(place).join(&file);
        match std::fs::remove_file(&stale) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", stale.display()));
            }
            _ => {}
        }
    }
    std::fs::write(&owner, manifest.as_bytes())
        .with_context(|| format!("cannot write {}", owner.display()))?;
    Ok(lock)
}

/// Runs cargo, and reports in `step` what it compiles. Returns whether it succeeded, its JSON messages, and
/// its output for people.
fn watch(mut command: Command, step: &dyn Step) -> Result<(bool, String, String)> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run `cargo`; is it installed?")?;
    let mut stdout = child.stdout.take().context("stdout was piped")?;
    let stderr = child.stderr.take().context("stderr was piped")?;
    let messages = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map(|_| text)
    });
    let mut diagnostics = String::new();
    for line in BufReader::new(stderr).lines() {
        let line = line?;
        match line.trim_start().strip_prefix("Compiling ") {
            Some(package) => step.note(package),
            None => {
                diagnostics.push_str(&line);
                diagnostics.push('\n');
            }
        }
    }
    let status = child.wait()?;
    let messages = messages.join().unwrap_or_else(|_| Ok(String::new()))?;
    Ok((status.success(), messages, diagnostics))
}

/// Returns the `.wasm` file in a message of cargo about the package in `dir`, if there is one.
fn wasm_of(line: &str, dir: &Path, example: Option<&str>) -> Option<PathBuf> {
    let message: Message = serde_json::from_str(line).ok()?;
    if message.reason != "compiler-artifact" {
        return None;
    }
    let target = message.target?;
    if example.is_some_and(|name| target.name != name) {
        return None;
    }
    let manifest = message.manifest_path?;
    if manifest.parent()?.canonicalize().ok()? != dir.canonicalize().ok()? {
        return None;
    }
    message.filenames.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "wasm"))
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<MetadataPackage>,
    target_directory: PathBuf,
}

#[derive(Deserialize)]
struct MetadataPackage {
    name: String,
    manifest_path: PathBuf,
    targets: Vec<MetadataTarget>,
}

#[derive(Deserialize)]
struct MetadataTarget {
    name: String,
    crate_types: Vec<String>,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<MessageTarget>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct MessageTarget {
    name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wasm_is_found_in_the_message_of_its_own_package() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let manifest = dir.path().join("Cargo.toml");
        let line = serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": manifest,
            "target": {"name": "hello"},
            "filenames": ["/t/libhello.rlib", "/t/hello.wasm"],
        })
        .to_string();
        assert_eq!(wasm_of(&line, dir.path(), None), Some(PathBuf::from("/t/hello.wasm")));
        assert_eq!(wasm_of(&line, dir.path(), Some("other")), None);
        assert_eq!(wasm_of(&line, Path::new("/elsewhere"), None), None);
        assert_eq!(wasm_of("not json", dir.path(), None), None);
    }
}
