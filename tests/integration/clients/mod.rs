//! The official clients of the APIs that the host speaks. The checks of each are in a script beside this file.

mod mcp;
mod opencode;

use crate::harness::{MODEL, repository, shared, skipped};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
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

/// Why the clients in JavaScript are not tested.
const NO_NODE: &str = "node and npm, for the clients in JavaScript, are not installed";

/// Tests that need the same folder wait for the one that makes it.
static MADE: Mutex<()> = Mutex::new(());

#[test]
fn openai_for_python_works() {
    check(python().arg(script("openai_python.py")).args([&shared().at("/v1"), MODEL]));
}

#[test]
fn openai_for_python_works_with_responses() {
    check(python().arg(script("openai_responses.py")).args([&shared().at("/v1"), MODEL]));
}

#[test]
fn openai_for_node_works() {
    let Some(mut node) = node("openai_node.mjs") else { return skipped(NO_NODE) };
    check(node.args([&shared().at(""), MODEL]));
}

#[test]
fn the_ai_sdk_works_with_its_providers() {
    let Some(mut node) = node("ai_sdk_node.mjs") else { return skipped(NO_NODE) };
    check(node.args([&shared().at(""), MODEL]));
}

#[test]
fn the_agents_sdk_of_openai_works() {
    check(python().arg(script("agents_python.py")).args([&shared().at("/v1"), MODEL]));
}

#[test]
fn anthropic_for_python_works() {
    check(python().arg(script("anthropic_python.py")).args([&shared().at(""), MODEL]));
}

#[test]
fn anthropic_for_node_works() {
    let Some(mut node) = node("anthropic_node.mjs") else { return skipped(NO_NODE) };
    check(node.args([&shared().at(""), MODEL]));
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

/// Returns Python with the clients.
fn python() -> Command {
    let folder = made("python-clients", &PYTHON, |folder| {
        run(Command::new("python3").args(["-m", "venv"]).arg(folder));
        run(Command::new(folder.join("bin/python")).args(["-m", "pip", "install", "--quiet"]).args(PYTHON));
    });
    Command::new(folder.join("bin/python"))
}

/// Returns Node.js with a script beside the clients, where it finds them. Returns `None` where there is no Node.js.
fn node(name: &str) -> Option<Command> {
    for program in ["node", "npm"] {
        Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    }
    let folder = made("node-clients", &NODE, |folder| {
        npm(folder, &NODE);
    });
    std::fs::copy(script(name), folder.join(name)).unwrap();
    let mut node = Command::new("node");
    node.arg(folder.join(name));
    Some(node)
}

/// Installs packages of npm into a folder, without running their scripts.
pub fn npm(folder: &Path, packages: &[&str]) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("package.json"), "{\"private\": true}").unwrap();
    let install = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"];
    run(Command::new("npm").args(install).args(packages).current_dir(folder));
}

/// Returns a folder that `make` made for these packages, in this run or an earlier one.
pub fn made(name: &str, packages: &[&str], make: impl FnOnce(&Path)) -> PathBuf {
    let _one = MADE.lock().unwrap();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let (ready, packages) = (folder.join("ready"), packages.join("\n"));
    if std::fs::read_to_string(&ready).is_ok_and(|made| made == packages) {
        return folder;
    }
    let _ = std::fs::remove_dir_all(&folder);
    make(&folder);
    std::fs::write(ready, packages).unwrap();
    folder
}

pub fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
