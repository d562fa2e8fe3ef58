//! The packages of the workspace as Cargo lists them, so that no test has a list of its own that lacks a new package.

use crate::harness::repository;
use serde_json::Value;
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// A package that has a library.
pub struct Package {
    /// Its folder in the repository, such as `host/cli`.
    pub folder: String,
    /// The file of its library.
    pub library: PathBuf,
    /// Whether Cargo looks for doc tests.
    pub has_doc_tests: bool,
}

impl Package {
    /// Returns the folder with the sources of the library.
    pub fn sources(&self) -> &Path {
        self.library.parent().unwrap()
    }
}

/// Returns the packages that have a library, in the order of their folders.
pub fn packages() -> Vec<Package> {
    let repository = repository();
    let metadata = metadata();
    let listed = metadata["packages"].as_array().unwrap().iter();
    let mut packages: Vec<Package> = listed
        .filter_map(|package| {
            let targets = package["targets"].as_array().unwrap();
            let library = targets.iter().find(|target| {
                let kinds = target["kind"].as_array().unwrap();
                kinds.iter().any(|kind| kind == "lib" || kind == "proc-macro" || kind == "cdylib")
            })?;
            let manifest = Path::new(package["manifest_path"].as_str().unwrap());
            let folder = manifest.parent().unwrap().strip_prefix(&repository).unwrap();
            Some(Package {
                folder: folder.to_str().unwrap().to_owned(),
                library: library["src_path"].as_str().unwrap().into(),
                has_doc_tests: library["doctest"].as_bool().unwrap(),
            })
        })
        .collect();
    packages.sort_by(|a, b| a.folder.cmp(&b.folder));
    assert!(packages.len() > 20, "found only {} packages", packages.len());
    packages
}

/// Returns what Cargo says about the workspace.
pub fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(repository())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}
