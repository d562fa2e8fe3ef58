//! OpenCode edits a file through a host, whose model is one of a scripted upstream.

use crate::{
    harness::{Host, skipped},
    scripted_upstream::{Asked, ScriptedUpstream, answered},
    upstreams::options,
};
use axum::response::Response;
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The package with the binary, which takes about 180 MB.
pub(super) const VERSION: &str = "1.18.33";

/// Returns the program; `None` where it cannot be had, which skips the test.
fn program() -> Option<PathBuf> {
    let processor = match (std::env::consts::OS, std::env::consts::ARCH) {
        ("linux", "x86_64") => "x64",
        ("linux", "aarch64") => "arm64",
        (system, processor) => {
            skipped(&format!("OpenCode has no program for {system} on {processor}"));
            return None;
        }
    };
    let package = format!("opencode-linux-{processor}");
    let wanted = format!("{package}@{VERSION}");
    let folder = super::made("opencode", &[&wanted], |folder| super::npm(folder, &[&wanted]))?;
    Some(folder.join(format!("node_modules/{package}/bin/opencode")))
}

fn call(id: &str, name: &str, arguments: &Value) -> Response {
    let function = json!({"name": name, "arguments": arguments.to_string()});
    answered(&[
        json!({"role": "assistant", "tool_calls": [{"index": 0, "id": id, "type": "function", "function": function}]}),
    ])
}

/// Reads the file, edits it, and says so.
fn script(asked: &Asked, file: &Path) -> Response {
    let messages = asked.body["messages"].as_array().unwrap();
    let results = messages.iter().filter(|message| message["role"] == "tool").count();
    match (asked.body["tools"].is_array(), results) {
        // A title for the session.
        (false, _) => answered(&[json!({"content": "Counting bees"})]),
        (true, 0) => call("call_1", "read", &json!({"filePath": file})),
        (true, 1) => call(
            "call_2",
            "edit",
            &json!({"filePath": file, "oldString": "41000 bees", "newString": "42000 bees"}),
        ),
        (true, _) => answered(&[json!({"content": "I counted "}), json!({"content": "the bees again."})]),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn opencode_edits_a_file() {
    let Some(program) = tokio::task::block_in_place(program) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (home, project) = (folder.path().join("home"), folder.path().join("project"));
    std::fs::create_dir_all(&home).unwrap();
    std::fs::create_dir_all(&project).unwrap();
    let file = project.join("hive.txt");
    std::fs::write(&file, "Hive 7 has 41000 bees.\n").unwrap();
    let edited = file.clone();
    let upstream = ScriptedUpstream::start(move |asked| script(asked, &edited)).await;
    let host = Host::start_with(options(&format!(
        "[grants]\nmodels = [\"far/*\"]\n[[upstream]]\nname = \"far\"\nkind = \"openai\"\nurl = \"{}\"\n\
         [[upstream.models]]\nname = \"coder\"\ncontext_length = 65536\n",
        upstream.url
    )));
    let provider = json!({"npm": "@ai-sdk/openai-compatible", "name": "Skep",
                          "options": {"baseURL": host.at("/v1"), "apiKey": "unused"},
                          "models": {"far/coder": {"name": "Coder", "tool_call": true}}});
    let config = json!({"provider": {"skep": provider}, "model": "skep/far/coder", "autoupdate": false, "share": "disabled"});
    std::fs::write(project.join("opencode.json"), config.to_string()).unwrap();
    let run = tokio::task::spawn_blocking(move || {
        Command::new(program)
            .args(["run", "Count the bees in hive.txt again."])
            .current_dir(&project)
            .env_clear()
            .envs(["PATH", "LANG"].into_iter().filter_map(|name| Some((name, std::env::var(name).ok()?))))
            .env("HOME", &home)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    });
    let output = run.await.unwrap();
    let said =
        format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "Hive 7 has 42000 bees.\n", "{said}");
    assert!(said.contains("I counted the bees again."), "{said}");
    let asked = upstream.asked();
    let results: Vec<&Value> = asked
        .last()
        .into_iter()
        .flat_map(|asked| asked.body["messages"].as_array().unwrap())
        .filter(|message| message["role"] == "tool")
        .collect();
    assert_eq!(results.len(), 2, "the model saw the results of both calls: {said}");
    assert!(results[0]["content"].as_str().unwrap().contains("41000 bees"), "{}", results[0]);
}
