//! The official clients of the APIs that the host speaks. The checks of each are in a script beside this file.

mod mcp;
mod opencode;

use crate::harness::{MODEL, repository, shared, skipped};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Clients in Python, in one virtual environment, which takes about 130 MB.
const PYTHON: [&str; 4] = ["openai==3.54.0", "openai-agents==0.24.0", "anthropic==2.12.0", "mcp==2.3.0"];
/// Clients in JavaScript, in one folder, which takes about 140 MB.
const NODE: [&str; 9] = [
    "@anthropic-ai/sdk@1.12.0",
    "@modelcontextprotocol/sdk@1.32.2",
    "openai@7.57.0",
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@ai-sdk/anthropic@4.0.105",
    "workers-ai-provider@4.0.0",
    "zod@4.6.7",
];

#[test]
fn openai_for_python_works() {
    let Some(mut python) = python() else { return };
    check(python.arg(script("openai_python.py")).args([&shared().at("/v1"), MODEL]));
}

#[test]
fn openai_for_python_works_with_responses() {
    let Some(mut python) = python() else { return };
    let guide = repository().join("host/guide/responses.md");
    check(python.arg(script("openai_responses.py")).args([&shared().at("/v1"), MODEL]).arg(guide));
}

#[test]
fn openai_for_node_works() {
    let Some(mut node) = node("openai_node.mjs") else { return };
    check(node.args([&shared().at(""), MODEL]));
}

#[test]
fn the_ai_sdk_works_with_its_providers() {
    let Some(mut node) = node("ai_sdk_node.mjs") else { return };
    check(node.args([&shared().at(""), MODEL]));
}

#[test]
fn the_agents_sdk_of_openai_works() {
    let Some(mut python) = python() else { return };
    check(python.arg(script("agents_python.py")).args([&shared().at("/v1"), MODEL]));
}

#[test]
fn anthropic_for_python_works() {
    let Some(mut python) = python() else { return };
    check(python.arg(script("anthropic_python.py")).args([&shared().at(""), MODEL]));
}

#[test]
fn anthropic_for_node_works() {
    let Some(mut node) = node("anthropic_node.mjs") else { return };
    check(node.args([&shared().at(""), MODEL]));
}

#[test]
fn the_guide_lists_the_clients_in_their_versions() {
    let guide = std::fs::read_to_string(repository().join("host/guide/clients.md")).unwrap();
    let table =
        guide.split("\n## ").find(|section| section.starts_with("Tested clients")).expect("a section");
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let listed: BTreeSet<String> = rows
        .map(|row| {
            let mut cells = row.split(" | ");
            let name = cells.next().and_then(|name| name.split('`').nth(1)).expect("a name");
            format!("{name}@{}", cells.next().expect("a version").trim())
        })
        .collect();
    let opencode = format!("opencode-linux-x64@{}", opencode::VERSION);
    let python = PYTHON.iter().map(|package| package.replace("==", "@"));
    // The schemas of the tests, not a client.
    let node =
        NODE.iter().filter(|package| !package.starts_with("zod@")).map(|package| (*package).to_owned());
    let others = [opencode, crate::mcp_conformance::SUITE.to_owned()];
    assert_eq!(listed, python.chain(node).chain(others).collect());
}

fn check(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("all checks passed"), "{stdout}");
}

fn script(name: &str) -> PathBuf {
    repository().join("tests/integration/clients").join(name)
}

/// Returns Python with the clients; `None` where they cannot be had, which skips the test.
fn python() -> Option<Command> {
    let folder = made("python-clients", &PYTHON, |folder| {
        installed(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
        installed(
            Command::new(folder.join("bin/python")).args(["-m", "pip", "install", "--quiet"]).args(PYTHON),
        )
    })?;
    Some(Command::new(folder.join("bin/python")))
}

/// Returns Node.js with a script beside the clients, where it finds them; `None` where they cannot be had, which skips the
/// test.
fn node(name: &str) -> Option<Command> {
    let folder = made("node-clients", &NODE, |folder| {
        installed(Command::new("node").arg("--version"))?;
        npm(folder, &NODE)
    })?;
    std::fs::copy(script(name), folder.join(name)).unwrap();
    let mut node = Command::new("node");
    node.arg(folder.join(name));
    Some(node)
}

/// Installs packages of npm into a folder, without running their scripts. Returns why that is not possible.
pub fn npm(folder: &Path, packages: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("package.json"), "{\"private\": true}").unwrap();
    let install = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"];
    installed(Command::new("npm").args(install).args(packages).current_dir(folder))
}

/// Returns a folder that `make` made for these packages, in this run or an earlier one. Where the packages cannot be had, the
/// test is skipped.
pub fn made(
    name: &str,
    packages: &[&str],
    make: impl FnOnce(&Path) -> Result<(), String>,
) -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    // Tests of this process or another one may make the same folder at this moment. One that failed while it made the folder has
    // left it without the file that says that it is ready.
    let lock = std::fs::File::create(folder.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let (ready, wanted) = (folder.join("ready"), packages.join("\n"));
    if std::fs::read_to_string(&ready).is_ok_and(|made| made == wanted) {
        return Some(folder);
    }
    let _ = std::fs::remove_dir_all(&folder);
    match make(&folder) {
        Ok(()) => {
            std::fs::write(ready, wanted).unwrap();
            Some(folder)
        }
        Err(why) => {
            skipped(&format!("{} cannot be installed: {why}", packages.join(", ")));
            None
        }
    }
}

/// Runs a program that must succeed.
pub fn run(command: &mut Command) {
    installed(command).unwrap_or_else(|why| panic!("{command:?}: {why}"));
}

/// Runs a program of an installation. Returns its first error message if it is missing or fails, as it does without a
/// network.
pub fn installed(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let error = said.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if output.status.success() { Ok(()) } else { Err(format!("{program}: {}: {error}", output.status)) }
}
