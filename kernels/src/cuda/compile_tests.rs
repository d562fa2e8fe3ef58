//! Tests that every kernel compiles with both supported versions of NVRTC, and uses no more local memory than its allowance.
//!
//! One architecture is compiled for, because all of them take a core ten minutes. With `SKEP_ALL_ARCHITECTURES`
//! set, as before a release, every architecture is compiled for.
//!
//! NVRTC comes from Python packages that pip installs into the target folder once. Compiled modules are cached there as well,
//! so that a later run compiles only changed sources.

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

/// A Python package with NVRTC. Drivers for CUDA 12 run what its NVRTC compiles, but not what that of CUDA 13 does.
struct Package {
    requirement: &'static str,
    /// The name of its folder in the target folder.
    folder: &'static str,
    /// The path of the library in the package.
    library: &'static str,
    found: OnceLock<Result<PathBuf, String>>,
}

/// A download of 58 MB on x86-64, and 141 MiB in the target folder.
static NVRTC_13: Package = Package {
    requirement: "nvidia-cuda-nvrtc>=13,<14",
    folder: "package",
    library: "nvidia/cu13/lib/libnvrtc.so.13",
    found: OnceLock::new(),
};
/// A download of 90 MB on x86-64. Older versions do not know all architectures.
static NVRTC_12: Package = Package {
    requirement: "nvidia-cuda-nvrtc-cu12>=12.9,<13",
    folder: "package-cu12",
    library: "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    found: OnceLock::new(),
};

/// The local memory that a thread of some kernels may use, in bytes.
struct Allowance {
    /// The prefix of the kernels' names.
    kernels: &'static str,
    /// `None` means every architecture.
    architecture: Option<Architecture>,
    spilled_bytes: u32,
    stack_bytes: u32,
}

/// The kernels that may use local memory, as NVRTC 13 compiles them. All others keep everything in registers.
static ALLOWANCES: [Allowance; 13] = [
    // The words of 2/π that reduce an angle of more than 105615 radians, of which an index selects some.
    allowance("qkv_", None, 0, 32),
    allowance("gemv_qkv_", None, 0, 32),
    allowance("gemv_normed_qkv_", None, 0, 32),
    allowance("attention_prefill_16_", Some(Architecture::Sm120), 4, 8),
    // Products of 32 rows with weights that have a scale and an offset.
    allowance("products_", None, 20, 20),
    // The search of a cut, once for each drawn row.
    allowance("sample_cut", Some(Architecture::Sm100), 20, 32),
    // The sums of a wide head are more than registers hold beside everything else.
    allowance("attention_prefill_256_", None, 0, 512),
    // Values of a split that are spilled while its total is joined, once per several hundred keys. Wide heads spill most.
    allowance("attention_ordered_", Some(Architecture::Sm80), 166, 512),
    allowance("attention_ordered_", Some(Architecture::Sm86), 166, 512),
    allowance("attention_ordered_", Some(Architecture::Sm89), 166, 512),
    allowance("attention_ordered_", Some(Architecture::Sm90a), 8, 512),
    allowance("attention_ordered_", Some(Architecture::Sm100), 212, 656),
    allowance("attention_ordered_", Some(Architecture::Sm120), 276, 720),
];
/// The prefix of the kernels that exist only for one architecture and are not emulated on the CPU.
const HOPPER: &str = "attention_hopper_";
/// The architecture of the default run, which is the only one that has every kernel.
const SELECTED: Architecture = Architecture::Sm90a;
/// The bytes of local memory that a thread of any kernel may use as NVRTC 12 compiles it, which allocates other registers.
const MAX_STACK_BYTES_OF_12: u32 = 1024;

const fn allowance(
    kernels: &'static str,
    architecture: Option<Architecture>,
    spilled_bytes: u32,
    stack_bytes: u32,
) -> Allowance {
    Allowance { kernels, architecture, spilled_bytes, stack_bytes }
}

impl Allowance {
    fn covers(&self, architecture: Architecture, usage: &Usage) -> bool {
        usage.kernel.starts_with(self.kernels) && self.architecture.is_none_or(|of| of == architecture)
    }
}

#[test]
fn every_kernel_compiles_and_stays_in_registers() {
    let usages = every_kernel(&Compiler::new(nvrtc(), Some(folder().join("cubins"))));
    let exceeds = |(architecture, usage): &&(Architecture, Usage)| {
        let allowance = ALLOWANCES.iter().find(|allowance| allowance.covers(*architecture, usage));
        let [spilled, stack] =
            allowance.map_or([0, 0], |allowance| [allowance.spilled_bytes, allowance.stack_bytes]);
        usage.spilled_bytes > spilled || usage.stack_bytes > stack
    };
    let faults: Vec<_> = usages.iter().filter(exceeds).collect();
    assert!(faults.is_empty(), "kernels use more local memory than they may: {faults:#?}");
}

#[test]
fn every_kernel_compiles_with_the_nvrtc_of_older_drivers() {
    let nvrtc = nvrtc_12();
    assert_eq!(nvrtc.version().major, 12, "{}", nvrtc.path().display());
    let usages = every_kernel(&Compiler::new(nvrtc, Some(folder().join("cubins"))));
    let exceeds = |(_, usage): &&(Architecture, Usage)| usage.stack_bytes > MAX_STACK_BYTES_OF_12;
    let faults: Vec<_> = usages.iter().filter(exceeds).collect();
    assert!(faults.is_empty(), "kernels use more local memory than they may: {faults:#?}");
}

/// Compiles all kernels for the selected architecture, or for all if `SKEP_ALL_ARCHITECTURES` is set, and returns what each
/// uses.
fn every_kernel(compiler: &Compiler) -> Vec<(Architecture, Usage)> {
    let architectures: &[Architecture] = match std::env::var_os("SKEP_ALL_ARCHITECTURES") {
        Some(_) => &Architecture::ALL,
        None => &[SELECTED],
    };
    let jobs: Vec<_> = SOURCES
        .iter()
        .flat_map(|source| architectures.iter().map(|architecture| (*source, *architecture)))
        .collect();
    let left = Mutex::new(jobs.into_iter());
    let usages = Mutex::new(Vec::new());
    let work = || {
        loop {
            let Some((source, architecture)) = left.lock().unwrap().next() else { return };
            let module = compiler.module(source, architecture).unwrap_or_else(|error| panic!("{error}"));
            let is_empty =
                source.name.starts_with(HOPPER.trim_end_matches('_')) && architecture != Architecture::Sm90a;
            assert_eq!(module.kernels.is_empty(), is_empty, "kernels of {} for {architecture}", source.name);
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
    compiled.retain(|kernel| !kernel.starts_with(HOPPER));
    let mut known = skep_cuda_host::kernels();
    known.sort_unstable();
    assert_eq!(compiled, known, "the kernels tested on the CPU are those that devices run");
    match std::env::var_os("SKEP_SHOW_KERNELS") {
        // Written directly, because the test harness captures `println!` in tests that pass.
        Some(_) => writeln!(std::io::stderr(), "{}", usage::table(&usages)).unwrap(),
        None => println!("{}", usage::table(&usages)),
    }
    usages
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

/// Returns the NVRTC that most tests compile with.
pub(super) fn nvrtc() -> Nvrtc {
    let path = NVRTC_13.installed().or_else(|why| {
        // A machine without access to a package index may have a CUDA toolkit.
        Nvrtc::open(None).map(|nvrtc| nvrtc.path().to_owned()).map_err(|error| format!("{why}\n{error}"))
    });
    open(path)
}

fn nvrtc_12() -> Nvrtc {
    open(NVRTC_12.installed().or_else(|why| {
        let path = PathBuf::from("libnvrtc.so.12");
        Nvrtc::open(Some(&path)).map(|_| path).map_err(|error| format!("{why}\n{error}"))
    }))
}

fn open(path: Result<PathBuf, String>) -> Nvrtc {
    let path = path.unwrap_or_else(|why| panic!("this test compiles with NVRTC, which was not found: {why}"));
    Nvrtc::open(Some(&path)).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a folder in the target folder from which this test runs.
pub(super) fn folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).expect("target/profile/deps/test").join("nvrtc")
}

impl Package {
    /// Returns the library of the package, which is installed on first use. The result is kept for the process.
    fn installed(&self) -> Result<PathBuf, String> {
        self.found.get_or_init(|| self.install()).clone()
    }

    fn install(&self) -> Result<PathBuf, String> {
        let ready = folder().join(self.folder);
        if !ready.exists() {
            let unfinished = folder().join(format!("{}.{}", self.folder, std::process::id()));
            let output = Command::new("python3")
                .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
                .args(["--retries", "1", "--no-deps", "--only-binary", ":all:", "--target"])
                .arg(&unfinished)
                .arg(self.requirement)
                .output()
                .map_err(|error| format!("cannot start python3: {error}"))?;
            if !output.status.success() {
                return Err(format!(
                    "pip could not install {}: {}",
                    self.requirement,
                    String::from_utf8_lossy(&output.stderr)
                ));
            }
            // If another process was faster, its package is used.
            if fs::rename(&unfinished, &ready).is_err() {
                let _ = fs::remove_dir_all(&unfinished);
            }
        }
        let library = ready.join(self.library);
        if library.exists() { Ok(library) } else { Err(format!("{} does not exist", library.display())) }
    }
}
