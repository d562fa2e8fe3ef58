//! Cheap checks of project rules: every file has a header, stays readable, and respects the limits of its
//! crate.

use crate::{
    harness::{repository, rust_sources},
    structure::{plain, without_tests},
    workspace::{metadata, packages},
};
use std::{fs, path::PathBuf};

const LONGEST_FILE_LINES: usize = 520;

#[test]
fn every_source_file_has_a_header_and_is_not_too_long() {
    let mut faults = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        if !text.starts_with("//!") {
            faults.push(format!("{}: does not start with a //! header", path.display()));
        }
        let lines = text.lines().count();
        if lines > LONGEST_FILE_LINES {
            faults.push(format!("{}: {lines} lines; split it by topic", path.display()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn unfinished_code_and_catch_all_names_stay_out() {
    let mut faults = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        // Concatenated so that this file does not match itself.
        for unfinished in [concat!("todo", "!("), concat!("unimplemented", "!(")] {
            if text.contains(unfinished) {
                faults.push(format!("{}: {unfinished}", path.display()));
            }
        }
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if ["utils", "util", "helpers", "common", "misc", "manager"].contains(&stem) {
            faults.push(format!("{}: name it after its content", path.display()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Crates whose subject is unsafe code.
const UNSAFE_CRATES: [&str; 2] = ["kernels", "kernels/cuda/host"];
/// The files of other crates that may have some.
const UNSAFE_FILES: [&str; 8] = [
    "host/model/src/mapping.rs",
    "host/mooncake/src/arena.rs",
    "host/mooncake/src/client.rs",
    "host/mooncake/src/library.rs",
    "host/runtime/src/component/artifact.rs",
    "host/transfer/src/mapping.rs",
    "host/transfer/src/network.rs",
    "host/transfer/src/nixl.rs",
];
/// The files of the SDK with modules of bindings that are generated for WebAssembly.
const BINDINGS: [&str; 2] = ["guest-sdk/src/lib.rs", "guest-sdk/src/random/mod.rs"];

#[test]
fn only_the_kernels_and_the_named_files_contain_unsafe_code() {
    let mut faults = Vec::new();
    for package in packages().iter().filter(|package| !UNSAFE_CRATES.contains(&&*package.folder)) {
        let library = fs::read_to_string(&package.library).unwrap();
        let has_exception =
            UNSAFE_FILES.iter().any(|file| file.starts_with(&format!("{}/src/", package.folder)));
        let wanted = if has_exception { "#![deny(unsafe_code)]" } else { "#![forbid(unsafe_code)]" };
        // In an agent, what the macro writes for WebAssembly is unsafe.
        if package.folder.starts_with("host/") && !library.contains(wanted) {
            faults.push(format!("{}: write {wanted}", package.library.display()));
        }
        for path in rust_sources(package.sources()) {
            let name = path.strip_prefix(repository()).unwrap().to_str().unwrap().to_owned();
            let text = without_tests(&plain(&fs::read_to_string(&path).unwrap()));
            let has_unsafe = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "unsafe trait"];
            if has_unsafe.iter().any(|code| text.contains(code)) && !UNSAFE_FILES.contains(&&*name) {
                faults.push(format!("{name}: unsafe code"));
            }
            if text.contains("allow(unsafe_code)")
                && ![&UNSAFE_FILES[..], &BINDINGS].concat().contains(&&*name)
            {
                faults.push(format!("{name}: allows unsafe code"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let architecture = fs::read_to_string(repository().join("ARCHITECTURE.md")).unwrap();
    for file in UNSAFE_FILES.iter().filter_map(|file| file.strip_prefix("host/")) {
        assert!(architecture.contains(&format!("`{file}`")), "ARCHITECTURE.md does not name {file}");
    }
}

/// The files that pass strings to C libraries. Whether C's `char` has a sign depends on the processor, and is nothing to a pointer to a
/// `CStr`.
const C_STRING_FILES: [&str; 3] =
    ["host/mooncake/src/client.rs", "host/mooncake/src/library.rs", "host/transfer/src/nixl.rs"];

/// `.ci/run` compiles only the kernels and the models for another processor, because all other crates are the same on each.
#[test]
fn only_the_kernels_contain_code_for_one_processor() {
    let is_of_a_processor = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        let has = |word: &str| text.contains(word);
        let is_listed = C_STRING_FILES.iter().any(|listed| path.ends_with(listed));
        ["target_arch", "target_feature", "core::arch", "std::arch"].into_iter().any(has)
            || (has("c_char") && !is_listed)
    };
    let found: Vec<PathBuf> =
        rust_sources(&repository().join("host")).into_iter().filter(is_of_a_processor).collect();
    assert_eq!(found, Vec::<PathBuf>::new(), "move it to kernels, or let .ci/run check these crates, too");
    assert!(rust_sources(&repository().join("kernels/src")).iter().any(is_of_a_processor));
}

/// A metric that is recorded under a name of its own is in no list, so neither the exporter nor METRICS.md knows it.
#[test]
fn every_recorded_metric_is_in_the_list() {
    let listed = fs::read_to_string(repository().join("host/gateway/METRICS.md")).unwrap();
    let (mut faults, mut names) = (Vec::new(), 0);
    for path in rust_sources(&repository().join("host")) {
        let text = fs::read_to_string(&path).unwrap();
        for call in ["counter!(", "gauge!(", "histogram!("] {
            let literal = text.split(call).skip(1).find(|after| after.trim_start().starts_with('"'));
            if literal.is_some() {
                faults.push(format!("{}: {call} gets a text; use a constant of the list", path.display()));
            }
        }
        for line in text.lines().filter(|line| line.contains("const ") && line.contains(": &str = \"skep_")) {
            let name = line.split('"').nth(1).unwrap();
            names += usize::from(name != "skep_");
            if name != "skep_" && !listed.contains(&format!("| `{name}` |")) {
                faults.push(format!("{}: METRICS.md does not describe {name}", path.display()));
            }
        }
    }
    assert!(names > 30, "found only {names} names");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A host has one injectable clock, so that a test can move the time of everything that the host does.
#[test]
fn the_runtime_reads_the_wall_clock_in_one_place() {
    let runtime = repository().join("host/runtime/src");
    let clock = runtime.join("clock.rs");
    let mut faults = Vec::new();
    for path in rust_sources(&runtime) {
        if path == clock || path.starts_with(runtime.join("tests")) || path.ends_with("tests.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        // Unit tests are at the end of a file.
        let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        for (index, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap();
            let reads_system = ["SystemTime::now", "Timestamp::now", "Zoned::now", "UNIX_EPOCH"];
            let mut reads = reads_system.into_iter().any(|call| code.contains(call));
            reads |= code.match_indices("now_ms()").any(|(at, _)| !code[..at].ends_with('.'));
            if reads {
                faults.push(format!("{}:{}: use the host's clock", path.display(), index + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// A second program in the workspace would make `cargo run -- demo` ambiguous.
#[test]
fn skep_is_the_only_program_in_the_workspace() {
    let metadata = metadata();
    let targets = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|package| package["targets"].as_array().unwrap());
    let programs: Vec<&str> = targets
        .filter(|target| target["kind"] == serde_json::json!(["bin"]))
        .map(|target| target["name"].as_str().unwrap())
        .collect();
    assert_eq!(programs, ["skep"]);
}

/// Returns all Rust sources.
pub fn sources() -> Vec<PathBuf> {
    let folders = ["host", "kernels", "guest-sdk", "examples", "tests"];
    let found: Vec<PathBuf> =
        folders.iter().flat_map(|folder| rust_sources(&repository().join(folder))).collect();
    assert!(found.len() > 50, "found only {} files", found.len());
    found
}
