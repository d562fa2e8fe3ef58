//! A Rust toolchain from Debian's packages, unpacked into the cache, for machines that reach a package mirror
//! but not rustup's server.
//!
//! The packages are downloaded and unpacked as the user, with separate apt lists and a separate apt cache;
//! nothing is installed and no file of the system changes. They contain no standard library for WebAssembly,
//! so it is built once from the packaged source and put into the unpacked sysroot, which makes every later
//! build an ordinary one. A toolchain appears under its final name only when all of that has worked.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::bounded_command::{self, Finished};
use super::{TARGET, environment, toolchain};
use crate::paths;
use crate::progress::Progress;

/// Has to change whenever the steps below change what they leave behind.
const RECIPE: &str = "debian-1";
/// The oldest compiler that builds the SDK.
const MINIMUM_VERSION: (u32, u32) = (1, 95);

/// Returns the newest toolchain that was unpacked before, with its version.
pub fn unpacked() -> Result<Option<(PathBuf, String)>> {
    let Ok(entries) = std::fs::read_dir(paths::cache_dir()?.join("toolchain")) else { return Ok(None) };
    let newest = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let named = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(RECIPE));
            named && toolchain::has_std(&path.join("usr"))
        })
        .max();
    let Some(root) = newest else { return Ok(None) };
    // A toolchain that no longer runs, for example because a system library was removed, is prepared again.
    Ok(compiler_version(&root).ok().map(|version| (root, version)))
}

/// Makes `command` use the toolchain in `root`.
pub fn select(command: &mut Command, root: &Path) {
    let mut libraries = library_dirs(root);
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH") {
        libraries.extend(std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty()));
    }
    if let Ok(joined) = std::env::join_paths(libraries) {
        command.env("LD_LIBRARY_PATH", joined);
    }
    command.env("RUSTC", root.join("usr/bin/rustc"));
}

/// Downloads, unpacks and completes the toolchain. Returns its folder and version. The caller holds the lock.
pub fn install(progress: &dyn Progress) -> Result<(PathBuf, String)> {
    let parent = paths::cache_subdir("toolchain")?;
    let work = tempfile::Builder::new().prefix("preparing-").tempdir_in(&parent)?;
    let apt = Apt::new(work.path())?;

    let step = progress.begin("reading the distribution's package lists", None);
    apt.update()?;
    let version = apt.candidate("rustc-web")?;
    require_minimum(&version)?;
    let packages = apt.compiler_packages()?;
    step.finish(&format!("rustc-web {version}"));

    let step = progress.begin("downloading the Rust compiler for WebAssembly", None);
    let root = work.path().join("root");
    apt.fetch(&packages, &root)?;
    if compiler_version(&root).is_err() || linker_version(&root).is_err() {
        apt.fetch(&apt.libraries(&packages)?, &root)?;
    }
    let compiler = compiler_version(&root)?;
    linker_version(&root)?;
    link_rust_lld(&root)?;
    step.finish(&compiler);

    let step = progress.begin("building the standard library for WebAssembly (once)", None);
    build_std(&root, work.path())?;
    step.finish("");

    let key: String =
        version.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
    let home = parent.join(format!("{RECIPE}-{key}"));
    if home.exists() {
        std::fs::remove_dir_all(&home).with_context(|| format!("cannot replace {}", home.display()))?;
    }
    std::fs::rename(&root, &home)
        .with_context(|| format!("cannot put the toolchain at {}", home.display()))?;
    Ok((home, compiler))
}

fn require_minimum(version: &str) -> Result<()> {
    let mut numbers =
        version.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found < MINIMUM_VERSION {
        let (major, minor) = MINIMUM_VERSION;
        bail!("the newest rustc-web available is {version}; agents need {major}.{minor} or newer");
    }
    Ok(())
}

fn library_dirs(root: &Path) -> Vec<PathBuf> {
    let mut dirs = vec![root.join("usr/lib")];
    for base in ["usr/lib", "lib"] {
        let entries = std::fs::read_dir(root.join(base)).into_iter().flatten().flatten();
        dirs.extend(
            entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().ends_with("-linux-gnu")),
        );
    }
    dirs
}

/// Links `wasm-ld` to where the compiler looks for its own linker, so that builds need no setting.
fn link_rust_lld(root: &Path) -> Result<()> {
    let rustlib = root.join("usr/lib/rustlib");
    let hosts = std::fs::read_dir(&rustlib).with_context(|| format!("cannot read {}", rustlib.display()))?;
    for host in hosts.flatten().map(|entry| entry.path()).filter(|path| path.join("lib").is_dir()) {
        let bin = host.join("bin");
        std::fs::create_dir_all(&bin)?;
        let lld = lld_path(root)?;
        let relative = Path::new("../../../..").join(lld.strip_prefix(root.join("usr")).unwrap_or(&lld));
        let link = bin.join("rust-lld");
        std::fs::remove_file(&link).ok();
        #[cfg(unix)]
        std::os::unix::fs::symlink(&relative, &link)
            .with_context(|| format!("cannot link {} to {}", link.display(), relative.display()))?;
    }
    Ok(())
}

fn lld_path(root: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(root.join("usr/lib")).context("the packages have no usr/lib")?;
    entries
        .flatten()
        .map(|entry| entry.path().join("bin/lld"))
        .find(|path| path.exists())
        .context("the packages have no lld")
}

fn build_std(root: &Path, work: &Path) -> Result<()> {
    let stub = work.join("std");
    std::fs::create_dir_all(stub.join("src"))?;
    std::fs::write(stub.join("src/lib.rs"), "")?;
    let manifest = "[package]\nname = \"stub\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n";
    std::fs::write(stub.join("Cargo.toml"), manifest)?;
    let mut command = environment::command("cargo");
    select(&mut command, root);
    command.current_dir(&stub).args([
        "build",
        "--release",
        "--target",
        TARGET,
        "-Zbuild-std=std,panic_abort",
    ]);
    command.arg("--target-dir").arg(stub.join("target"));
    // Guests that link with LTO use the bitcode of the library.
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Cembed-bitcode=yes");
    let finished = bounded_command::run(command, Duration::from_secs(900))?;
    if !finished.status.success() {
        bail!("cannot build the standard library: {}", finished.stderr.trim());
    }
    let made = stub.join("target").join(TARGET).join("release/deps");
    let library = root.join("usr/lib/rustlib").join(TARGET).join("lib");
    std::fs::create_dir_all(&library)?;
    for entry in std::fs::read_dir(&made).with_context(|| format!("cannot read {}", made.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".rlib") && !name.starts_with("libstub-") {
            std::fs::copy(&path, library.join(&name))?;
        }
    }
    if !toolchain::has_std(&root.join("usr")) {
        bail!("building the standard library produced no libstd");
    }
    // The source is no longer needed, and is half of the folder.
    std::fs::remove_dir_all(root.join("usr/src")).ok();
    Ok(())
}

fn compiler_version(root: &Path) -> Result<String> {
    version_of(root, &root.join("usr/bin/rustc"))
}

fn linker_version(root: &Path) -> Result<String> {
    let wasm_ld = lld_path(root)?.with_file_name("wasm-ld");
    version_of(root, &wasm_ld)
}

fn version_of(root: &Path, program: &Path) -> Result<String> {
    let mut command = environment::command(program);
    select(&mut command, root);
    command.arg("--version");
    let finished = bounded_command::run(command, Duration::from_secs(30))?;
    if !finished.status.success() {
        bail!("{} does not run: {}", program.display(), finished.last_words());
    }
    Ok(finished.stdout.trim().to_owned())
}

/// apt with separate lists and a separate cache.
struct Apt {
    dir: PathBuf,
}

impl Apt {
    fn new(work: &Path) -> Result<Self> {
        let dir = work.join("apt");
        for part in ["lists/partial", "cache/archives/partial", "downloads"] {
            std::fs::create_dir_all(dir.join(part))?;
        }
        Ok(Self { dir })
    }

    fn run(&self, program: &str, arguments: &[&str], limit: Duration) -> Result<Finished> {
        let mut command = environment::command(program);
        command.current_dir(self.dir.join("downloads"));
        for (option, folder) in [("Dir::State::Lists", "lists"), ("Dir::Cache", "cache")] {
            command.arg("-o").arg(format!("{option}={}", self.dir.join(folder).display()));
        }
        // Locks are for the system's folders; the sandbox user could not write into ours.
        command.args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=2"]);
        command.args(arguments).env("LC_ALL", "C");
        bounded_command::run(command, limit)
    }

    fn update(&self) -> Result<()> {
        let finished = self.run("apt-get", &["update"], Duration::from_secs(180))?;
        // A package source of the user that fails does not matter, as long as the packages are found.
        tracing::debug!(status = %finished.status, output = finished.stderr, "apt-get update");
        Ok(())
    }

    /// Returns the version of `package` that would be downloaded.
    fn candidate(&self, package: &str) -> Result<String> {
        let finished = self.run("apt-cache", &["policy", package], Duration::from_secs(60))?;
        match finished.stdout.lines().find_map(|line| line.trim().strip_prefix("Candidate: ")) {
            Some(version) if version != "(none)" => Ok(version.to_owned()),
            _ => bail!("the distribution offers no package {package}"),
        }
    }

    fn depends(&self, package: &str) -> Result<Vec<String>> {
        let finished = self.run("apt-cache", &["depends", package], Duration::from_secs(60))?;
        let lines = finished.stdout.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(lines.filter(|name| !name.starts_with('<')).map(str::to_owned).collect())
    }

    /// Returns the compiler, its libraries, the source of the standard library, and the linker of the same
    /// LLVM.
    fn compiler_packages(&self) -> Result<Vec<String>> {
        let find = |package: &str, prefix: &str| -> Result<String> {
            let found = self.depends(package)?.into_iter().find(|name| name.starts_with(prefix));
            found
                .with_context(|| format!("{package} does not depend on {prefix}…; its packaging has changed"))
        };
        let runtime = find("libstd-rust-web-dev", "libstd-rust-web-")?;
        let llvm = find(&runtime, "libllvm")?;
        let lld = llvm.replace("libllvm", "lld-");
        let fixed = ["rustc-web", "libstd-rust-web-dev", "rust-web-src"].map(str::to_owned);
        Ok(fixed.into_iter().chain([runtime, llvm, lld]).collect())
    }

    /// Returns what `packages` need beyond the C and C++ runtimes that every machine with a compiler has.
    fn libraries(&self, packages: &[String]) -> Result<Vec<String>> {
        const PRESENT: [&str; 5] = ["libc6", "libgcc-s1", "libstdc++6", "libc-dev", "gcc-12-base"];
        let mut found = BTreeSet::new();
        let mut open: Vec<String> = packages.to_vec();
        while let Some(package) = open.pop() {
            for name in self.depends(&package)? {
                let is_library = name.starts_with("lib") || name.starts_with("zlib");
                let wanted = is_library && !PRESENT.contains(&name.as_str()) && !packages.contains(&name);
                if wanted && found.insert(name.clone()) {
                    open.push(name);
                }
            }
        }
        Ok(found.into_iter().collect())
    }

    /// Downloads `packages` and unpacks them into `root`.
    fn fetch(&self, packages: &[String], root: &Path) -> Result<()> {
        let mut arguments = vec!["download"];
        arguments.extend(packages.iter().map(String::as_str));
        let finished = self.run("apt-get", &arguments, Duration::from_secs(900))?;
        if !finished.status.success() {
            bail!("cannot download {}: {}", packages.join(" "), finished.last_words());
        }
        std::fs::create_dir_all(root)?;
        let downloads = self.dir.join("downloads");
        for entry in std::fs::read_dir(&downloads)?.flatten() {
            let mut command = environment::command("dpkg");
            command.arg("-x").arg(entry.path()).arg(root);
            let unpacked = bounded_command::run(command, Duration::from_secs(300))?;
            if !unpacked.status.success() {
                bail!("cannot unpack {}: {}", entry.path().display(), unpacked.last_words());
            }
            std::fs::remove_file(entry.path()).ok();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_older_than_the_sdk_is_refused() {
        assert!(require_minimum("1.96.0+dfsg1-1~deb12u2").is_ok());
        assert!(require_minimum("1.95.0").is_ok());
        let error = require_minimum("1.85.0+dfsg3-1").expect_err("too old").to_string();
        assert!(error.contains("1.85.0+dfsg3-1") && error.contains("1.95"), "{error}");
    }
}
