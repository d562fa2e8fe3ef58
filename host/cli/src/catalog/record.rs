//! Records of what references meant: the path of the model and the files that belong to it.
//!
//! A record makes later use of its reference independent of the network. Each source has a folder in the cache, with
//! its records below `resolved`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::reference::Reference;
use crate::paths;

/// A model that was pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The reference as it is written, without a digest.
    pub reference: String,
    /// The model's file, the first file of a split model, or the folder of a model in shards.
    pub path: PathBuf,
    pub files: Vec<StoredFile>,
}

/// A file of a model in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoredFile {
    #[serde(rename = "file")]
    pub path: PathBuf,
    pub bytes: u64,
    /// Digest that the file was checked against, or that it had when it was stored.
    pub sha256: Option<String>,
}

/// A source of models, which has a folder in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Hub,
    Package,
}

impl Source {
    /// All sources.
    pub const ALL: [Source; 2] = [Source::Hub, Source::Package];

    /// Returns the source that a reference points to.
    pub fn of(reference: &Reference) -> Source {
        match reference {
            Reference::Hub(_) => Source::Hub,
            Reference::Package(_) => Source::Package,
        }
    }

    /// Returns the name of the source's folder in the cache.
    pub fn folder_name(self) -> &'static str {
        match self {
            Source::Hub => "hub",
            Source::Package => "pip",
        }
    }

    /// Returns the source's folder, which may not exist.
    pub fn folder(self) -> Result<PathBuf> {
        Ok(paths::cache_dir()?.join(self.folder_name()))
    }
}

/// Name of the folder of records.
pub const RECORDS: &str = "resolved";

/// Returns the text that identifies a reference in a record: the reference without a digest.
pub fn key(reference: &Reference) -> String {
    match reference {
        Reference::Package(package) => format!("pip:{}/{}", package.requirement, package.member),
        Reference::Hub(_) => reference.to_string(),
    }
}

/// Returns the record of a reference, if its model is in the cache.
pub fn find(reference: &Reference) -> Result<Option<Record>> {
    let record = read(&path_of(reference)?);
    Ok(record.filter(|record| record.path.exists() && record.files.iter().all(|file| file.path.exists())))
}

/// Stores a record durably.
pub fn write(reference: &Reference, record: &Record) -> Result<()> {
    let path = path_of(reference)?;
    let folder = path.parent().context("a record is in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // Relative paths stay right when the cache is moved or mounted elsewhere.
    let root = Source::of(reference).folder()?;
    let relative = |path: &Path| path.strip_prefix(&root).unwrap_or(path).display().to_string();
    let mut text = format!("{}\n{}\n", record.reference, relative(&record.path));
    for file in &record.files {
        let digest = file.sha256.as_deref().unwrap_or("-");
        writeln!(text, "{digest} {} {}", file.bytes, relative(&file.path))?;
    }
    let partial = tempfile::NamedTempFile::new_in(folder)?;
    std::fs::write(partial.path(), text).with_context(|| format!("cannot write {}", path.display()))?;
    partial.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

/// Returns the records of a source with the paths of their files, also those whose model is gone.
pub fn all(source: Source) -> Result<Vec<(PathBuf, Option<Record>)>> {
    let Ok(entries) = std::fs::read_dir(source.folder()?.join(RECORDS)) else { return Ok(Vec::new()) };
    let mut records: Vec<_> = entries
        .flatten()
        .map(|entry| {
            let record = read(&entry.path()).filter(|record| record.path.exists());
            (entry.path(), record)
        })
        .collect();
    records.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(records)
}

fn path_of(reference: &Reference) -> Result<PathBuf> {
    let key = key(reference);
    let (_, name) = key.split_once(':').unwrap_or(("", &key));
    Ok(Source::of(reference).folder()?.join(RECORDS).join(name.replace(['/', ':'], "--")))
}

fn read(path: &Path) -> Option<Record> {
    let root = path.parent()?.parent()?;
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines();
    // Earlier versions wrote absolute paths, which stay as they are.
    let (reference, path) = (lines.next()?.to_owned(), root.join(lines.next()?));
    let files: Option<Vec<_>> = lines.map(|line| stored_file(root, line)).collect();
    let files = files.filter(|files| !files.is_empty()).unwrap_or_else(|| files_below(&path));
    Some(Record { reference, path, files })
}

fn stored_file(root: &Path, line: &str) -> Option<StoredFile> {
    let mut words = line.splitn(3, ' ');
    let (digest, bytes, path) = (words.next()?, words.next()?, words.next()?);
    let sha256 = (digest != "-").then(|| digest.to_owned());
    Some(StoredFile { path: root.join(path), bytes: bytes.parse().ok()?, sha256 })
}

/// Returns the files of a model whose record does not list them, as earlier versions wrote it.
fn files_below(path: &Path) -> Vec<StoredFile> {
    let Ok(metadata) = std::fs::metadata(path) else { return Vec::new() };
    if metadata.is_file() {
        return vec![StoredFile { path: path.to_owned(), bytes: metadata.len(), sha256: None }];
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| !super::is_unfinished(path))
        .flat_map(|path| files_below(&path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_an_earlier_version_has_the_files_at_its_path() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let (model, record) = (dir.path().join("a--b"), dir.path().join("record"));
        std::fs::create_dir(&model).expect("folder");
        std::fs::write(model.join("config.json"), b"{}").expect("file");
        std::fs::write(model.join("model.safetensors.part"), b"12345").expect("file");
        std::fs::write(&record, format!("hf:a/b\n{}\n", model.display())).expect("record");
        let read = read(&record).expect("a record");
        assert_eq!((read.reference.as_str(), &read.path), ("hf:a/b", &model));
        let files = [StoredFile { path: model.join("config.json"), bytes: 2, sha256: None }];
        assert_eq!(read.files, files);
    }
}
