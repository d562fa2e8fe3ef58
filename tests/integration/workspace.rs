//! The packages of the workspace as Cargo lists them, so that no test has a list of its own that lacks a new package.

use crate::harness::repository;
use serde_json::Value;
use std::{
    collections::BTreeMap,
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
    cargo(&["metadata", "--no-deps", "--format-version", "1"])
}

fn cargo(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .arg("--offline")
        // Without it, the released compiler prints no units.
        .env("RUSTC_BOOTSTRAP", "1")
        .current_dir(repository())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A library that is both in the program and in a procedural macro is compiled once if it has the same features in both, for which
/// `tests/fuzz-targets/Cargo.toml` is responsible.
#[test]
fn a_build_of_all_tests_compiles_no_version_of_a_library_twice() {
    /// Libraries that take less than a tenth of a second.
    const SMALL: [&str; 1] = ["fnv"];
    let graph = cargo(&["test", "--no-run", "-Zunstable-options", "--unit-graph"]);
    let units = graph["units"].as_array().unwrap();
    let mut features: BTreeMap<(&str, &str), Vec<&Value>> = BTreeMap::new();
    for unit in units.iter().filter(|unit| unit["mode"] == "build") {
        let (target, kind) = (&unit["target"], unit["target"]["kind"][0].as_str().unwrap());
        if matches!(kind, "lib" | "rlib" | "staticlib") {
            let name = (unit["pkg_id"].as_str().unwrap(), target["name"].as_str().unwrap());
            features.entry(name).or_default().push(&unit["features"]);
        }
    }
    assert!(features.len() > 300, "found only {} libraries", features.len());
    features.retain(|(_, name), features| features.len() > 1 && !SMALL.contains(name));
    assert!(features.is_empty(), "compiled with several sets of features: {features:#?}");
}
