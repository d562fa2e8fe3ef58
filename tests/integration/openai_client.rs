//! The official `openai` Python client against a host. The checks are in `openai_client.py` beside this file.

use crate::harness::{MODEL, repository, shared};
use std::{path::PathBuf, process::Command};

#[test]
fn the_official_python_client_works() {
    let python = environment();
    let script = repository().join("tests/integration/openai_client.py");
    let output = Command::new(python).arg(script).args([&shared().at("/v1"), MODEL]).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("all checks passed"), "{stdout}");
}

/// Creates a virtual environment with the client, once, in the target folder.
fn environment() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("openai-client");
    let python = folder.join("bin/python");
    let ready = folder.join("ready");
    if !ready.exists() {
        let _ = std::fs::remove_dir_all(&folder);
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder));
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "openai>=2,<3"]));
        std::fs::write(ready, "").unwrap();
    }
    python
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
