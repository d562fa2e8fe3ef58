//! Tests that every kernel compiles for every architecture and does not spill registers beyond its allowance.
//!
//! NVRTC comes from a Python package that pip installs into the target folder once. Compiled modules are cached there as
//! well, so that a later run compiles only changed sources.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use super::architecture::Architecture;
use super::compile::{Compiler, Origin};
use super::nvrtc::Nvrtc;
use super::source::SOURCES;
use super::usage::{self, Usage};

const PACKAGE: &str = "nvidia-cuda-nvrtc>=13,<14";

/// The bytes that a thread of these kernels may spill, by prefix of the kernel's name. Other kernels may not spill at all.
const MAY_SPILL: [(&str, Architecture, u32); 11] = [
    ("attention_decode_32_", Architecture::Sm100, 4),
    ("attention_decode_32_", Architecture::Sm120, 4),
    ("attention_prefill_16_", Architecture::Sm120, 4),
    // Values of a split that are spilled while its total is joined, once per several hundred keys. Wide heads spill most.
    ("attention_ordered_", Architecture::Sm80, 166),
    ("attention_ordered_", Architecture::Sm86, 166),
    ("attention_ordered_", Architecture::Sm89, 166),
    ("attention_ordered_", Architecture::Sm90a, 8),
    ("attention_ordered_", Architecture::Sm100, 212),
    ("attention_ordered_", Architecture::Sm120, 276),
    // Values that are spilled outside of all loops.
    ("sample_", Architecture::Sm80, 28),
    ("sample_", Architecture::Sm120, 40),
];

#[test]
fn every_kernel_compiles_for_every_architecture_without_spilling() {
    let compiler = Compiler::new(nvrtc(), Some(folder().join("cubins")));
    let jobs: Vec<_> = SOURCES
        .iter()
        .flat_map(|source| Architecture::ALL.map(|architecture| (*source, architecture)))
        .collect();
    let left = Mutex::new(jobs.into_iter());
    let usages = Mutex::new(Vec::new());
    let work = || {
        loop {
            let Some((source, architecture)) = left.lock().unwrap().next() else { return };
            let module = compiler.module(source, architecture).unwrap_or_else(|error| panic!("{error}"));
            assert!(!module.kernels.is_empty(), "{} for {architecture} has no kernels", source.name);
            let found = module.kernels.into_iter().map(|usage| (architecture, usage));
            usages.lock().unwrap().extend(found);
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    let usages = usages.into_inner().unwrap();
    let mut compiled: Vec<String> = usages.iter().map(|(_, usage)| usage.kernel.clone()).collect();
    compiled.sort_unstable();
    compiled.dedup();
    let mut known = skep_cuda_host::kernels();
    known.sort_unstable();
    assert_eq!(compiled, known, "the kernels tested on the CPU are those that devices run");
    match std::env::var_os("SKEP_SHOW_KERNELS") {
        // Written directly, because the test harness captures `println!` in tests that pass.
        Some(_) => writeln!(std::io::stderr(), "{}", usage::table(&usages)).unwrap(),
        None => println!("{}", usage::table(&usages)),
    }
    let faults: Vec<_> = usages
        .iter()
        .filter(|(architecture, usage)| usage.spilled_bytes > may_spill(*architecture, usage))
        .collect();
    assert!(faults.is_empty(), "kernels spill more than they may: {faults:#?}");
}

#[test]
fn cached_modules_are_reused_and_damaged_ones_are_recompiled() {
    let cache = tempfile::tempdir().unwrap();
    let source = SOURCES[0];
    let compile = |path: &Path| {
        let compiler = Compiler::new(nvrtc(), Some(path.to_owned()));
        compiler.module(source, Architecture::Sm80).unwrap_or_else(|error| panic!("{error}"))
    };
    let first = compile(cache.path());
    assert_eq!(first.origin, Origin::Compiler);
    assert_eq!(&first.cubin[..4], b"\x7fELF");
    let second = compile(cache.path());
    assert_eq!(
        (second.origin, &second.cubin, &second.kernels),
        (Origin::Cache, &first.cubin, &first.kernels)
    );
    let file = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
    fs::write(&file, &fs::read(&file).unwrap()[..100]).unwrap();
    assert_eq!(compile(cache.path()).origin, Origin::Compiler);
    assert_eq!(compile(cache.path()).origin, Origin::Cache);
    // A folder that cannot be created is reported, and costs nothing but time.
    let compiled = compile(&file.join("below a file"));
    assert!(matches!(&compiled.origin, Origin::Uncached(reason) if reason.contains("below a file")));
    assert_eq!(compiled.kernels, first.kernels);
}

fn may_spill(architecture: Architecture, usage: &Usage) -> u32 {
    let fits =
        |(name, of, _): &&(&str, Architecture, u32)| usage.kernel.starts_with(name) && *of == architecture;
    MAY_SPILL.iter().find(fits).map_or(0, |(_, _, bytes)| *bytes)
}

pub(super) fn nvrtc() -> Nvrtc {
    let path = installed().or_else(|why| {
        // A machine without access to a package index may have a CUDA toolkit.
        Nvrtc::open(None).map(|nvrtc| nvrtc.path().to_owned()).map_err(|error| format!("{why}\n{error}"))
    });
    let path = path.unwrap_or_else(|why| panic!("this test compiles with NVRTC, which was not found: {why}"));
    Nvrtc::open(Some(&path)).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a folder in the target folder from which this test runs.
pub(super) fn folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).expect("target/profile/deps/test").join("nvrtc")
}

/// Returns the library of the Python package, which is installed on first use. The result is kept for the process.
fn installed() -> Result<PathBuf, String> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    FOUND.get_or_init(install).clone()
}

fn install() -> Result<PathBuf, String> {
    let ready = folder().join("package");
    if !ready.exists() {
        let unfinished = folder().join(format!("package.{}", std::process::id()));
        let output = Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
            .args(["--retries", "1", "--no-deps", "--only-binary", ":all:", "--target"])
            .arg(&unfinished)
            .arg(PACKAGE)
            .output()
            .map_err(|error| format!("cannot start python3: {error}"))?;
        if !output.status.success() {
            return Err(format!(
                "pip could not install {PACKAGE}: {}",
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        // If another process was faster, its package is used.
        if fs::rename(&unfinished, &ready).is_err() {
            let _ = fs::remove_dir_all(&unfinished);
        }
    }
    let library = ready.join("nvidia/cu13/lib/libnvrtc.so.13");
    if library.exists() { Ok(library) } else { Err(format!("{} does not exist", library.display())) }
}
