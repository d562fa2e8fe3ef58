//! The conformance suite of the Model Context Protocol: its server scenarios against an agent, and its client scenarios
//! against the tools that agents use.

use crate::{
    clients::{made, npm},
    config_host::Up,
    harness::{Host, repository},
};
use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

pub const SUITE: &str = "@modelcontextprotocol/conformance@0.1.16";
/// The release of Node.js that runs the suite.
const NODE: &str = "22.23.3";
/// Number of server scenarios that the suite regards as finished.
const SERVER_SCENARIOS: usize = 30;
/// The calls that scenarios for clients wait for. Any other scenario only waits for a connection.
const CALLS: [(&str, &str); 3] = [
    ("tools_call", "add_numbers {\"a\": 5, \"b\": 3}"),
    ("elicitation-sep1034-client-defaults", "test_client_elicitation_defaults {}"),
    ("sse-retry", "test_reconnection {}"),
];
/// The scenarios for clients that fail, for the suite.
const FAILING: &str = "tests/integration/mcp_conformance.yml";
/// The host that the suite talks to.
pub const HOST: &str = "[[model]]\nname = \"small\"\nsource = \".\"\n[grants]\n\
                    tools = [\"client/elicit\", \"client/sample\", \"mcp:conformance/*\"]\n";

/// The manifest: what the suite needs of an agent beside its tools.
pub const OFFER: &str = r#"
[grants]
tools = ["client/elicit", "client/sample"]
[mcp.prompts]
test_simple_prompt = { tool = "simple_prompt" }
test_prompt_with_arguments = { tool = "prompt_with_arguments" }
test_prompt_with_embedded_resource = { tool = "prompt_with_resource" }
test_prompt_with_image = { tool = "prompt_with_image" }
[mcp.resources]
static-text = { uri = "test://static-text", tool = "read_text", mime_type = "text/plain" }
static-binary = { uri = "test://static-binary", tool = "read_binary", mime_type = "image/png" }
template = { uri = "test://template/{id}/data", tool = "read_template", mime_type = "application/json" }
watched = { uri = "test://watched-resource", tool = "read_text" }
"#;

/// The folder into which the suite was installed.
struct Suite(PathBuf);

impl Suite {
    /// Installs the suite. Returns `None` where it cannot be had, which skips the test.
    fn install() -> Option<Suite> {
        // The package of Node.js for this machine needs no script to be installed.
        let node = format!("{}@{NODE}", node_package());
        let folder = made("mcp-conformance", &[SUITE, &node], |folder| npm(folder, &[SUITE, &node]))?;
        Some(Suite(folder))
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let modules = self.0.join("node_modules");
        Command::new(modules.join(node_package()).join("bin/node"))
            .arg(modules.join("@modelcontextprotocol/conformance/dist/index.js"))
            .args(arguments)
            .current_dir(&self.0)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }
}

fn node_package() -> String {
    let system = if cfg!(target_os = "macos") { "darwin" } else { "linux" };
    let processor = if cfg!(target_arch = "aarch64") { "arm64" } else { "x64" };
    format!("node-{system}-{processor}")
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|part| String::from_utf8_lossy(part).into_owned()).join("\n")
}

pub async fn deploy(host: &Host, guest: &str, name: &str, extra: &str) {
    let (status, answer) = host.deploy_guest(guest, name, extra).await;
    assert_eq!(status, 201, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_passes_all_active_server_scenarios() {
    let Some(suite) = tokio::task::block_in_place(Suite::install) else { return };
    let up = Up::start(HOST);
    deploy(&up.host, "mcp_conformance", "conformance", OFFER).await;
    let url = up.host.at("/mcp/conformance");
    let output = tokio::task::spawn_blocking(move || suite.run(&["server", "--url", &url])).await.unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains(&format!("({SERVER_SCENARIOS} scenarios)")), "{said}");
    let failed: Vec<&str> = said.lines().filter(|line| line.contains('✗')).collect();
    assert!(failed.is_empty(), "{failed:?}\n{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tools_of_agents_pass_all_client_scenarios_but_those_of_the_list() {
    let Some(suite) = tokio::task::block_in_place(Suite::install) else { return };
    let up = Up::start(HOST);
    deploy(&up.host, "relay", "relay", "[grants]\ntools = [\"mcp:conformance/*\"]").await;
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("client.sh");
    std::fs::write(&script, client(&up, &folder.path().join("busy"))).unwrap();
    let command = format!("sh {}", script.display());
    let failing = repository().join(FAILING);
    let failing = ["--expected-failures", failing.to_str().unwrap()];
    let scenarios = ["client", "--command", &command, "--suite", "all", "--timeout", "240000"];
    let output = tokio::task::block_in_place(|| suite.run(&[&scenarios[..], &failing].concat()));
    assert!(output.status.success(), "{}\n{}", text(&output), up.log());
    let passed = text(&output).lines().filter(|line| line.starts_with('✓')).count();
    assert!(passed > CALLS.len(), "{}", text(&output));
}

#[test]
fn the_guide_lists_the_client_scenarios_that_fail() {
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let (failing, guide) = (read(FAILING), read("host/guide/mcp.md"));
    let listed: Vec<&str> = failing.lines().filter_map(|line| line.trim().strip_prefix("- ")).collect();
    assert!(listed.len() > 10, "{failing}");
    for scenario in listed {
        assert!(guide.contains(&format!("`{scenario}`")), "the guide does not name {scenario}");
    }
}

/// Returns a script that makes the server at its last argument the host's, and lets an agent call the tool that the
/// scenario waits for. The server ends only when its clients have left, so the host forgets it again. The suite starts
/// all scenarios at once, and the host's file belongs to one of them at a time: to the one that made the folder `busy`.
fn client(up: &Up, busy: &Path) -> String {
    let (skep, url, file) = (Path::new(env!("CARGO_BIN_EXE_skep")).display(), &up.host.url, up.file());
    let (file, busy) = (file.display(), busy.display());
    let calls: String = CALLS
        .iter()
        .map(|(scenario, call)| {
            format!("{scenario}) {skep} invoke relay 'mcp:conformance/{call}' --url {url} ;;\n")
        })
        .collect();
    format!(
        "set -e\nreload() {{ cat > {file}; {skep} config reload --url {url}; }}\n\
         until mkdir {busy} 2> /dev/null; do sleep 0.1; done\n\
         trap 'reload <<END\n{HOST}END\nrmdir {busy}' EXIT\n\
         reload <<END\n{HOST}[mcp.conformance]\nurl = \"$1\"\nelicitation = \"defaults\"\nEND\n\
         case \"$MCP_CONFORMANCE_SCENARIO\" in\n{calls}*) {skep} mcp list --url {url} ;;\nesac\n"
    )
}
