//! The contents of the cache: models with their size on the disk, and files that no model needs anymore.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::record::{self, Record, Source};
use super::reference::Reference;
use super::{entries, entry_of, lock_path, locked, package, usage};
use crate::paths;

/// A model in the cache.
#[derive(Debug, Serialize)]
pub struct CachedModel {
    /// Name that requests use for the model.
    pub name: String,
    pub reference: String,
    pub path: PathBuf,
    /// Size of the model's files.
    pub bytes: u64,
    #[serde(skip)]
    files: Vec<PathBuf>,
    /// `None` for a model of the catalog that came from a package.
    #[serde(skip)]
    record: Option<PathBuf>,
}

impl CachedModel {
    fn of(record: Record, path: Option<PathBuf>) -> Self {
        let reference: Option<Reference> = record.reference.parse().ok();
        let name = reference.as_ref().map(|reference| match entry_of(reference) {
            Some(entry) => entry.name.clone(),
            None => reference.model_name().to_owned(),
        });
        CachedModel {
            name: name.unwrap_or_else(|| record.reference.clone()),
            bytes: record.files.iter().map(|file| file.bytes).sum(),
            files: record.files.into_iter().map(|file| file.path).collect(),
            reference: record.reference,
            path: record.path,
            record: path,
        }
    }

    /// Returns whether a user means this model: by the name that requests use, its reference, or a name of the catalog.
    pub fn is_called(&self, name: &str) -> bool {
        let is_alias = super::entry(name).is_some_and(|entry| record::key(&entry.source) == self.reference);
        is_alias || self.name == name || self.reference == name
    }
}

/// Things in the cache that belong to no model.
#[derive(Debug, Default)]
pub struct Leftovers {
    /// Files and folders with their sizes.
    pub found: Vec<(PathBuf, u64)>,
    /// Folders that a running pull uses, which were kept.
    pub busy: Vec<PathBuf>,
}

impl Leftovers {
    /// Returns the size of everything that was found.
    pub fn bytes(&self) -> u64 {
        self.found.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Returns the models in the cache, the catalog's first.
pub fn models() -> Result<Vec<CachedModel>> {
    let mut models = Vec::new();
    for entry in entries().iter().filter(|entry| matches!(entry.source, Reference::Package(_))) {
        models.extend(package::stored_entry(entry)?.map(|record| CachedModel::of(record, None)));
    }
    for source in Source::ALL {
        let records = record::all(source)?.into_iter();
        models.extend(records.filter_map(|(path, record)| Some(CachedModel::of(record?, Some(path)))));
    }
    Ok(models)
}

/// Deletes a model, except for files that other models share, and returns the bytes that were freed. A model that a host
/// uses is not deleted.
pub fn remove(model: &CachedModel) -> Result<u64> {
    let folder = folder_of(model)?;
    let _lock = locked(&folder, &model.name)?;
    if usage::is_held(&model.path) {
        bail!(
            "{} is in use by a running host\n  hint: stop the `skep up` that serves it, and try again",
            model.name
        );
    }
    let shared: BTreeSet<PathBuf> = models()?
        .into_iter()
        .filter(|other| other.reference != model.reference)
        .flat_map(|other| other.files)
        .collect();
    // The record goes first: what it names must be complete.
    if let Some(record) = &model.record {
        std::fs::remove_file(record).with_context(|| format!("cannot remove {}", record.display()))?;
    }
    let mut freed = 0;
    for file in model.files.iter().filter(|file| !shared.contains(*file)) {
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        std::fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
        freed += bytes;
    }
    if model.record.is_some() {
        remove_empty_folders(&folder);
    }
    Ok(freed)
}

/// Returns the path whose lock a pull of this model takes: the folder of a repository, or the model's own path.
fn folder_of(model: &CachedModel) -> Result<PathBuf> {
    let root = Source::Hub.folder()?;
    let below = model.path.strip_prefix(&root).ok().and_then(|path| path.components().next());
    Ok(match below {
        Some(repository) => root.join(repository),
        None => model.path.with_extension(""),
    })
}

/// Finds what belongs to no model: partial downloads, files that no record names, and records of models that are gone.
/// Removes it unless this is a dry run.
pub fn leftovers(dry_run: bool) -> Result<Leftovers> {
    let mut leftovers = Leftovers::default();
    for source in Source::ALL {
        let root = source.folder()?;
        for folder in folders_in(&root).into_iter().filter(|folder| !folder.ends_with(record::RECORDS)) {
            let Some(_locks) = locks_of(&folder, source == Source::Hub, dry_run)? else {
                leftovers.busy.push(folder);
                continue;
            };
            // Read under the lock, so that a pull that has just ended is seen.
            let used: BTreeSet<PathBuf> = record::all(source)?
                .into_iter()
                .filter_map(|(_, record)| Some(record?.files))
                .flatten()
                .map(|file| file.path)
                .collect();
            let mut files = Vec::new();
            files_below(&folder, &mut files);
            let unused = files.into_iter().filter(|(path, _)| !used.contains(path) && !is_lock(path));
            let before = leftovers.found.len();
            leftovers.found.extend(unused);
            if !dry_run {
                remove_files(&leftovers.found[before..])?;
                remove_empty_folders(&folder);
            }
        }
        for (path, _) in record::all(source)?.into_iter().filter(|(_, record)| record.is_none()) {
            let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
            if !dry_run {
                remove_files(&[(path.clone(), bytes)])?;
            }
            leftovers.found.push((path, bytes));
        }
    }
    let models = paths::cache_dir()?.join(package::ENTRIES);
    let work = |folder: &PathBuf| {
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(package::WORK_PREFIX))
    };
    let work: Vec<PathBuf> = folders_in(&models).into_iter().filter(work).collect();
    if !work.is_empty() {
        match locks_of(&models, false, dry_run)? {
            None => leftovers.busy.push(models),
            Some(_locks) => {
                for folder in work {
                    let mut files = Vec::new();
                    files_below(&folder, &mut files);
                    if !dry_run {
                        std::fs::remove_dir_all(&folder)
                            .with_context(|| format!("cannot remove {}", folder.display()))?;
                    }
                    leftovers.found.push((folder, files.iter().map(|(_, bytes)| bytes).sum()));
                }
            }
        }
    }
    Ok(leftovers)
}

/// Takes the locks of all pulls into a folder: the folder's own, or those inside it. `None` means that a pull is running.
/// A dry run creates nothing, and a folder without a lock, or one that cannot be written to, counts as free.
fn locks_of(folder: &Path, own: bool, dry_run: bool) -> Result<Option<Vec<File>>> {
    let mut paths = Vec::new();
    match own {
        true => paths.push(lock_path(folder)),
        false => {
            let mut files = Vec::new();
            files_below(folder, &mut files);
            paths.extend(files.into_iter().map(|(path, _)| path).filter(|path| is_lock(path)));
        }
    }
    let mut locks = Vec::new();
    for path in paths {
        let lock = match File::options().create(!dry_run).truncate(false).write(true).open(&path) {
            Ok(lock) => lock,
            Err(_) if dry_run => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot open {}", path.display())),
        };
        if lock.try_lock().is_err() {
            return Ok(None);
        }
        locks.push(lock);
    }
    Ok(Some(locks))
}

fn is_lock(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "lock")
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut folders: Vec<_> = folders.map(|entry| entry.path()).collect();
    folders.sort();
    folders
}

/// Collects all files in a folder and below with their sizes. A link counts as a file.
fn files_below(folder: &Path, found: &mut Vec<(PathBuf, u64)>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => files_below(&entry.path(), found),
            Ok(metadata) => found.push((entry.path(), metadata.len())),
            Err(_) => {}
        }
    }
}

fn remove_files(files: &[(PathBuf, u64)]) -> Result<()> {
    for (path, _) in files {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// Removes a folder and those below it, as far as they are empty.
fn remove_empty_folders(folder: &Path) {
    for below in folders_in(folder) {
        remove_empty_folders(&below);
    }
    // A folder that is not empty stays.
    let _ = std::fs::remove_dir(folder);
}
