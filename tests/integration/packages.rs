//! Packages for users: a binary that needs no compiler, messages to the service manager, and the files of a release.
//! `.ci/release` builds a release; its steps that need no build (`.ci/package`) run here, over small programs and over the
//! binary of the tests.

use crate::{
    durability::tiny_model,
    harness::{repository, skipped, skipped_without},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Time within which the service manager has to hear something.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn package(file: &str) -> PathBuf {
    repository().join(".ci/package").join(file)
}

/// Starts a host with this environment and nothing else, and returns it with its URL.
fn host_alone(folder: &Path, environment: &[(&str, &str)]) -> (Child, String) {
    let model = folder.join("tiny");
    fs::create_dir(&model).unwrap();
    tiny_model(&model);
    let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(["up", "--listen", "127.0.0.1:0", "--threads", "1", "--log-level", "warn", "--model"])
        .arg(model)
        .env_clear()
        .env("HOME", folder)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let url =
        lines.find_map(|line| line.split_once("http://").map(|(_, url)| format!("http://{}", url.trim())));
    // The remaining output is discarded.
    std::thread::spawn(move || lines.for_each(drop));
    (child, url.expect("`skep up` prints its URL"))
}

/// Runs a command without any program in its reach, and returns what it prints.
fn alone(folder: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).env_clear().env("HOME", folder).env("PATH", "/nonexistent").stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}");
    said
}

fn stop(child: &mut Child) {
    let status = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert!(child.wait().unwrap().success(), "the host stops cleanly");
}

#[test]
fn a_machine_without_compilers_and_python_serves_deployed_components() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let component = repository().join("tests/fixtures/upgrade/0.1.0/hello.wasm");
    let manifest = repository().join("examples/hello/agent.toml");
    let (component, manifest) = (component.to_str().unwrap(), manifest.to_str().unwrap());
    let (mut host, url) = host_alone(at, &[("PATH", "/nonexistent")]);
    assert_eq!(alone(at, &["health", "--url", &url]), "ready\n");
    alone(at, &["deploy", component, "--manifest", manifest, "--url", &url]);
    let said = alone(at, &["invoke", "hello", "Hello.", "--url", &url]);
    assert!(said.contains("(visit 1)"), "{said}");
    stop(&mut host);
    // Compilers and Python are optional, and the command says what for.
    let said = alone(at, &["doctor"]);
    for hint in ["needed to build agents, not to deploy .wasm files", "install gcc or clang", "--model PATH"]
    {
        assert!(said.contains(hint), "{said}");
    }
}

#[test]
fn health_has_the_exit_code_of_a_host_that_does_not_answer() {
    let health = |url: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        // A container may have no certificate authorities, which plain HTTP does not need.
        command.env("SSL_CERT_FILE", "/nonexistent").env_remove("SSL_CERT_DIR");
        let output = command.args(["health", "--url", url]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = health("http://127.0.0.1:9");
    assert_eq!(code, Some(3), "{said}");
    let (code, said) = health("https://127.0.0.1:9");
    assert!(code == Some(1) && said.contains("hint: install ca-certificates"), "{said}");
}

/// Returns the lines of the next message.
fn notified(socket: &UnixDatagram) -> Vec<String> {
    let mut message = [0; 4096];
    let length = socket.recv(&mut message).expect("the host notifies the service manager in time");
    String::from_utf8(message[..length].to_vec()).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn systemd_is_notified_of_ready_watchdog_and_stopping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify").display().to_string();
    let abstract_name = format!("skep-test-{}", std::process::id());
    let addresses = [
        (path.clone(), SocketAddr::from_pathname(&path).unwrap()),
        (format!("@{abstract_name}"), SocketAddr::from_abstract_name(&abstract_name).unwrap()),
    ];
    for (number, (name, address)) in addresses.into_iter().enumerate() {
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let home = folder.path().join(number.to_string());
        fs::create_dir(&home).unwrap();
        let environment = [("NOTIFY_SOCKET", name.as_str()), ("WATCHDOG_USEC", "200000")];
        let (mut host, url) = host_alone(&home, &environment);
        assert_eq!(notified(&socket), ["READY=1".to_owned(), format!("STATUS=serving at {url}")]);
        assert_eq!(alone(&home, &["health", "--url", &url]), "ready\n");
        for _ in 0..3 {
            assert_eq!(notified(&socket), ["WATCHDOG=1"]);
        }
        stop(&mut host);
        let stopping =
            std::iter::repeat_with(|| notified(&socket)).find(|message| message[0] != "WATCHDOG=1");
        assert_eq!(stopping.unwrap()[0], "STOPPING=1");
    }
}

#[test]
fn a_watchdog_of_another_process_is_not_notified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify").display().to_string();
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let environment = [("NOTIFY_SOCKET", path.as_str()), ("WATCHDOG_USEC", "2000"), ("WATCHDOG_PID", "1")];
    let (mut host, _) = host_alone(folder.path(), &environment);
    assert_eq!(notified(&socket)[0], "READY=1");
    stop(&mut host);
    assert_eq!(notified(&socket)[0], "STOPPING=1", "nothing came in between");
}

#[test]
fn systemd_accepts_the_unit() {
    if !has("systemd-analyze", &["--version"]) {
        return skipped_without("systemd-analyze");
    }
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("skep.service");
    let text = fs::read_to_string(package("skep.service")).unwrap();
    assert!(text.contains("Type=notify") && text.contains("WatchdogSec="));
    // The program has to exist.
    fs::write(&unit, text.replace("/usr/local/bin/skep", env!("CARGO_BIN_EXE_skep"))).unwrap();
    let verified = Command::new("systemd-analyze").arg("verify").arg(&unit).output().unwrap();
    let said = String::from_utf8_lossy(&verified.stderr);
    assert!(verified.status.success() && !said.contains("skep.service"), "{said}");
}

/// Returns whether a program is installed and works.
fn has(program: &str, arguments: &[&str]) -> bool {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn the_bill_of_materials_lists_every_crate_of_the_binary_with_its_license() {
    if !has("python3", &["--version"]) {
        return skipped("Python 3 is not installed, which writes the bill of materials");
    }
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let run = |command: &mut Command| {
        let output = command.current_dir(repository()).env("CARGO_NET_OFFLINE", "true").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let bill: Value =
        serde_json::from_str(&run(Command::new("python3").arg(package("sbom.py")).arg(&target))).unwrap();
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let listed: BTreeMap<String, &Value> = bill["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|component| {
            let field = |name: &str| component[name].as_str().unwrap();
            (format!("{} v{}", field("name"), field("version")), component)
        })
        .collect();
    for (name, component) in &listed {
        let license = &component["licenses"][0];
        let named = license["expression"].as_str().or(license["license"]["name"].as_str());
        assert!(named.is_some_and(|license| !license.is_empty()), "{name}: {component}");
        let is_ours = name.starts_with("skep-");
        assert_eq!(component["hashes"][0]["content"].is_string(), !is_ours, "{name}: {component}");
    }

    // Cargo's own list of the same.
    let tree =
        ["tree", "-p", "skep-cli", "-e", "normal", "--prefix", "none", "-f", "{p}", "--target", &target];
    let compiled_in: BTreeSet<String> = run(Command::new(env!("CARGO")).args(tree))
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some(format!("{} {}", words.next()?, words.next()?))
        })
        .filter(|name| !name.starts_with("skep-cli "))
        .collect();
    assert!(compiled_in.len() > 300, "{}", compiled_in.len());
    assert_eq!(listed.into_keys().collect::<BTreeSet<_>>(), compiled_in);

    // The licenses that a copy of the binary has to have are those of the same crates.
    let notices = run(Command::new("python3").arg(package("notices.py")).arg(&target));
    let heads: BTreeSet<&str> =
        notices.lines().filter_map(|line| line.rsplit_once(" (")).map(|(head, _)| head).collect();
    for name in compiled_in.iter().filter(|name| !name.starts_with("skep-")) {
        assert!(heads.contains(&*name.replacen(" v", " ", 1)), "{name} has no license in the notices");
    }
    for text in ["Permission is hereby granted, free of charge", "Apache License", "uPlot"] {
        assert!(notices.contains(text), "{text}");
    }
}

/// Runs steps of `.ci/package/parts.sh` with arguments, and returns whether they succeed and what they print.
pub fn release_steps(steps: &str, arguments: &[PathBuf]) -> (bool, String) {
    let (code, printed) = status_of_release_steps(steps, arguments);
    (code == Some(0), printed)
}

/// Does the same, and returns their status and what they print.
pub fn status_of_release_steps(steps: &str, arguments: &[PathBuf]) -> (Option<i32>, String) {
    let script = format!("set -euo pipefail; . .ci/package/parts.sh; {steps}");
    let mut command = Command::new("bash");
    command.args(["-c", &script, "release"]).args(arguments).current_dir(repository());
    let output = command.env("SOURCE_DATE_EPOCH", "1750000000").stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Runs a command, and returns whether it succeeds and what it prints.
pub fn outcome(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    (output.status.success(), printed)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn archives_of_a_release_are_reproducible_and_have_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A small file stands for the binary, which takes long to compress.
    fs::write(at("program"), "#!/bin/sh\necho skep\n").unwrap();
    fs::write(at("roots"), "certificates\n").unwrap();
    fs::write(at("notices"), "licenses\n").unwrap();
    for out in ["first", "second"] {
        fs::create_dir(at(out)).unwrap();
        let steps = "archive \"$1\" \"$2\" skep-linux \"$4\"; \
                     CA_CERTIFICATES=$3 container \"$1\" \"$2\" skep-container \"$4\"; sums \"$4\"";
        let files = ["program", "notices", "roots", out].map(at);
        let (succeeds, printed) = release_steps(steps, &files);
        assert!(succeeds, "{printed}");
        assert_eq!(names(&at(out)), ["SHA256SUMS", "skep-container.tar.gz", "skep-linux.tar.gz"]);
    }
    let sums = fs::read_to_string(at("first/SHA256SUMS")).unwrap();
    assert_eq!(sums, fs::read_to_string(at("second/SHA256SUMS")).unwrap(), "the same files, the same bytes");
    for archive in ["skep-linux", "skep-container"] {
        let packed = at("first").join(format!("{archive}.tar.gz"));
        let unpack = outcome(Command::new("tar").arg("-C").arg(folder.path()).arg("-xzf").arg(packed));
        assert!(unpack.0, "{}", unpack.1);
        let program = outcome(&mut Command::new(at(archive).join("skep")));
        assert_eq!(program, (true, "skep\n".to_owned()), "the program can be executed");
    }
    assert_eq!(names(&at("skep-linux")), ["LICENSE", "THIRD-PARTY.txt", "skep", "skep.service"]);
    assert_eq!(
        names(&at("skep-container")),
        ["Containerfile", "LICENSE", "THIRD-PARTY.txt", "ca-certificates.crt", "empty", "skep"]
    );
    let container_file = fs::read_to_string(at("skep-container/Containerfile")).unwrap();
    for copied in container_file.lines().filter_map(|line| line.strip_prefix("COPY ")) {
        let source = copied.split(' ').find(|word| !word.starts_with("--")).unwrap();
        assert!(at("skep-container").join(source).exists(), "COPY {copied}");
    }

    let check = || {
        let mut check = Command::new("sha256sum");
        outcome(check.args(["--check", "--quiet", "SHA256SUMS"]).current_dir(at("first")))
    };
    assert_eq!(check(), (true, String::new()));
    fs::write(at("first/skep-linux.tar.gz"), "another file").unwrap();
    assert!(!check().0, "the digest is that of the archive");
}

#[test]
fn a_release_without_roots_of_trust_or_with_a_folder_inside_fails() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (succeeds, printed) = release_steps(
        "CA_CERTIFICATES=$1 container /bin/sh LICENSE skep-container \"$2\"; echo continued",
        &[at("missing"), folder.path().to_owned()],
    );
    assert!(!succeeds && printed.contains("install ca-certificates"), "{printed}");
    assert!(!printed.contains("continued"), "{printed}");

    fs::create_dir(at("folder")).unwrap();
    let (succeeds, printed) = release_steps("sums \"$1\"; echo continued", &[folder.path().to_owned()]);
    assert!(!succeeds && !printed.contains("continued"), "{printed}");
}

/// A release promises what its binaries need: nothing, or one version of glibc.
#[test]
fn a_binary_that_needs_more_than_a_release_promises_is_refused() {
    if !has("cc", &["--version"]) || !has("python3", &["--version"]) {
        return skipped("a C compiler makes the programs of this test, and Python 3 checks them");
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("main.c"), "int main(void) { return 0; }\n").unwrap();
    fs::write(at("alone.c"), "void _start(void) { for (;;); }\n").unwrap();
    fs::write(at("empty.c"), "typedef int nothing;\n").unwrap();
    for arguments in [
        "main.c -o dynamic",
        "alone.c -static -nostdlib -o static",
        "empty.c -shared -fPIC -nostdlib -o libother.so",
        "main.c -Wl,--no-as-needed ./libother.so -o other",
    ] {
        let mut compiler = Command::new("cc");
        let (succeeds, printed) = outcome(compiler.args(arguments.split(' ')).current_dir(folder.path()));
        assert!(succeeds, "cc {arguments}: {printed}");
    }
    let check = |promise: &str, program: PathBuf| {
        outcome(Command::new("python3").arg(package("linkage.py")).arg(promise).arg(program))
    };
    assert_eq!(check("static", at("static")), (true, String::new()));
    assert_eq!(check("glibc-9.99", at("dynamic")), (true, String::new()));
    for (promise, program, reason) in [
        ("static", at("dynamic"), "is not static: it needs a loader and libc.so"),
        ("static", env!("CARGO_BIN_EXE_skep").into(), "is not static"),
        ("static", at("main.c"), "is not a 64-bit ELF file"),
        ("glibc-2.1", at("dynamic"), "and releases promise glibc 2.1"),
        ("glibc-9.99", at("other"), "libother.so, and releases promise to need only glibc"),
        ("glibc-9.99", at("static"), "is static"),
    ] {
        let (succeeds, printed) = check(promise, program);
        assert!(
            !succeeds && printed.starts_with("error: ") && printed.contains(reason),
            "{promise}: {printed}"
        );
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_binary_whose_kernels_call_vector_instructions_is_refused() {
    if !has("cc", &["--version"]) || !has("objdump", &["--version"]) {
        return skipped("a C compiler makes the programs of this test, and objdump of binutils reads them");
    }
    let folder = tempfile::tempdir().unwrap();
    let program = |name: &str, source: &str| {
        let file = folder.path().join(name).with_extension("c");
        fs::write(&file, format!("{source}\nint main(void) {{ return 0; }}\n")).unwrap();
        let program = folder.path().join(name);
        let (succeeds, printed) = outcome(Command::new("cc").arg("-O0").arg(&file).arg("-o").arg(&program));
        assert!(succeeds, "{printed}");
        program
    };
    let inlined = |program: PathBuf| outcome(Command::new("python3").arg(package("inlined.py")).arg(program));
    let wrapper = "void core_arch_x86_avx_mm256_mul_ps(void) {}\n";
    let between = "void between(void) { core_arch_x86_avx_mm256_mul_ps(); }\n";
    let elsewhere = format!("{wrapper}{between}void run_avx2(void) {{}}");
    assert_eq!(inlined(program("elsewhere", &elsewhere)), (true, String::new()));
    let called = "instructions instead of having them: _mm256_mul_ps";
    let direct = format!("{wrapper}void run_avx512(void) {{ core_arch_x86_avx_mm256_mul_ps(); }}");
    let indirect = format!("{wrapper}{between}void run_avx2(void) {{ between(); }}");
    for (program, reason) in [
        (program("direct", &direct), called),
        (program("indirect", &indirect), called),
        (program("others", ""), "has no symbols of kernels"),
    ] {
        let (succeeds, printed) = inlined(program);
        assert!(!succeeds && printed.starts_with("error: ") && printed.contains(reason), "{printed}");
    }
}

#[test]
fn a_binary_of_a_release_is_tried_in_an_empty_environment() {
    let (succeeds, printed) =
        release_steps("try_binary \"$1\"; echo continued", &[env!("CARGO_BIN_EXE_skep").into()]);
    assert!(succeeds && printed.contains("ready\n") && printed.contains("continued"), "{printed}");

    let (succeeds, printed) = release_steps("try_binary \"$1\"; echo continued", &["/bin/false".into()]);
    assert!(!succeeds && printed.contains("/bin/false does not start a host"), "{printed}");
    assert!(!printed.contains("continued"), "{printed}");
}

#[test]
fn the_scripts_of_ci_can_be_parsed() {
    for script in ["run", "release", "cross-cc", "with-podman", "package/parts.sh", "package/try-image"] {
        let (succeeds, printed) =
            outcome(Command::new("bash").arg("-n").arg(repository().join(".ci").join(script)));
        assert!(succeeds, "{script}: {printed}");
    }
}
