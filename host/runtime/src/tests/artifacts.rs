//! Tests of the cache of compiled code: a restart loads it, and only code that this host wrote is
//! ever loaded.

use super::{
    fixture::Host,
    guest::{Guest, counter, echo},
};
use crate::RuntimeOptions;
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

fn keeping(folder: &Path) -> RuntimeOptions {
    RuntimeOptions { artifact_dir: Some(folder.join("artifacts")), ..RuntimeOptions::default() }
}

/// Returns options with which an agent is available only if its code was loaded from the cache.
fn without_compiler(folder: &Path) -> RuntimeOptions {
    RuntimeOptions { compile_timeout: Duration::ZERO, ..keeping(folder) }
}

fn artifacts(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder.join("artifacts"))
        .expect("the folder exists")
        .map(|entry| entry.expect("readable").path())
        .collect();
    files.sort();
    files
}

#[tokio::test]
async fn a_restart_loads_the_code_and_does_not_compile() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let host = Host::with(keeping(folder.path())).await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    let host = host.restart_with(without_compiler(folder.path())).await;
    assert!(host.agents.failed_agents().is_empty(), "{:?}", host.agents.failed_agents());
    assert_eq!(host.answer("count", "s", "go").await, "xx");
}

#[tokio::test]
async fn damaged_or_missing_code_is_compiled_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut host = Host::with(keeping(folder.path())).await;
    host.deploy("other", "", counter()).await.expect("valid");
    let foreign = fs::read(&artifacts(folder.path())[0]).expect("readable");
    host.agents.delete("other").await.expect("the agent exists");
    fs::remove_file(&artifacts(folder.path())[0]).expect("the file exists");
    host.deploy("echo", "", echo()).await.expect("valid");
    let file = artifacts(folder.path()).pop().expect("one file is kept");
    let written = fs::read(&file).expect("readable");
    let mut changed = written.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    let damages = [Some(changed), Some(written[..middle].to_vec()), Some(foreign), Some(Vec::new()), None];
    for damage in damages {
        match &damage {
            Some(bytes) => fs::write(&file, bytes).expect("writable"),
            None => fs::remove_file(&file).expect("the file exists"),
        }
        host = host.restart_with(without_compiler(folder.path())).await;
        assert_eq!(host.agents.failed_agents().len(), 1, "damaged code was loaded");
        host = host.restart_with(keeping(folder.path())).await;
        assert_eq!(host.answer("echo", "s", "hello").await, "hello");
        host = host.restart_with(without_compiler(folder.path())).await;
        assert!(host.agents.failed_agents().is_empty(), "the code was not kept again");
    }
}

#[tokio::test]
async fn the_cache_is_bounded_and_evicts_the_least_recently_used_code() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let host = Host::with(keeping(folder.path())).await;
    host.deploy("one", "", echo()).await.expect("valid");
    let first = artifacts(folder.path());
    let bytes = fs::metadata(&first[0]).expect("the file exists").len();
    let room_for_two = RuntimeOptions { max_artifact_bytes: bytes * 5 / 2, ..keeping(folder.path()) };
    let host = host.restart_with(room_for_two).await;
    for describe in ["nop", "nop nop", "nop nop nop"] {
        host.deploy("two", "", Guest { describe, ..echo() }).await.expect("valid");
    }
    let kept = artifacts(folder.path());
    assert_eq!(kept.len(), 2, "{kept:?}");
    assert!(!kept.contains(&first[0]));
}

#[cfg(unix)]
#[tokio::test]
async fn cached_code_is_private_and_unknown_files_are_removed() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let host = Host::with(keeping(folder.path())).await;
    host.deploy("echo", "", echo()).await.expect("valid");
    let mode = |path: &Path| fs::metadata(path).expect("the file exists").permissions().mode() & 0o777;
    assert_eq!(mode(&artifacts(folder.path())[0]), 0o600);
    assert_eq!(mode(&folder.path().join("artifacts")), 0o700);
    fs::write(folder.path().join("artifacts/writing-abc"), "half").expect("writable");
    fs::write(folder.path().join("artifacts/0123.cwasm"), "from elsewhere").expect("writable");
    let host = host.restart_with(keeping(folder.path())).await;
    assert_eq!(artifacts(folder.path()).len(), 1);
    assert_eq!(host.answer("echo", "s", "hello").await, "hello");
}

#[tokio::test]
async fn a_small_component_that_expands_to_huge_code_is_rejected_early() {
    let host = Host::with(RuntimeOptions { max_component_bytes: 1 << 20, ..RuntimeOptions::default() }).await;
    let mut nested = "(component $c0 (core module $m) (core instance (instantiate $m)))".to_owned();
    for level in 1..=40 {
        let below = level - 1;
        let twice = format!("(instance (instantiate $c{below}))").repeat(2);
        nested = format!("(component $c{level} {nested} {twice})");
    }
    let instances = format!("(component {nested} (instance (instantiate $c40)))");
    let function = format!("(func (local {}))", "i64 ".repeat(50_000));
    let locals = format!("(component (core module {}))", function.repeat(3));
    for (text, expected) in [(instances, "instances"), (locals, "max_component_bytes")] {
        let bytes = wat::parse_str(&text).expect("the text is WebAssembly");
        assert!(bytes.len() < 8 << 10, "{} bytes are too many for this test", bytes.len());
        let manifest = crate::Manifest::from_toml("name = \"bomb\"").expect("valid");
        let error = host.agents.deploy(manifest, bytes, "tester").await.expect_err("it must not be compiled");
        assert_eq!(error.code(), "invalid_component");
        assert!(error.to_string().contains(expected), "{error}");
    }
    host.deploy("echo", "", echo()).await.expect("the host keeps working");
}

#[tokio::test]
async fn a_compilation_that_takes_too_long_is_aborted() {
    let host =
        Host::with(RuntimeOptions { compile_timeout: Duration::ZERO, ..RuntimeOptions::default() }).await;
    let error = host.deploy("slow", "", echo()).await.expect_err("the timeout is zero");
    assert_eq!(error.code(), "invalid_component");
    assert!(error.to_string().contains("compile_s"), "{error}");
    assert!(host.agents.agents().is_empty());
}
