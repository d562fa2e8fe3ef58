//! Tests of the checks at deployment.

use super::{
    fixture::Host,
    guest::{Guest, component, counter, echo},
};
use crate::Manifest;

const CLOCKS: &str =
    "package wasi:clocks@0.2.0; interface monotonic-clock { type instant = u64; now: func() -> instant; }";

fn clock_reader() -> Guest {
    Guest {
        world: "import wasi:clocks/monotonic-clock@0.2.0;",
        packages: &[CLOCKS],
        module: r#"(import "wasi:clocks/monotonic-clock@0.2.0" "now" (func $now (result i64)))"#,
        on_message: "(if (i64.eqz (call $now)) (then unreachable))",
        ..Guest::default()
    }
}

async fn refused(host: &Host, more: &str, guest: Guest) -> String {
    host.deploy("refused", more, guest).await.expect_err("it must not be deployed").to_string()
}

#[tokio::test]
async fn a_component_is_described_and_replies() {
    let host = Host::start().await;
    let summary = host.deploy("echo", "", echo()).await.expect("valid");
    assert_eq!((summary.description.as_str(), summary.model.as_str()), ("described", "tiny"));
    assert_eq!(summary.digest.len(), 64);
    assert_eq!(host.agents.agents(), [summary]);
    assert_eq!(host.answer("echo", "s", "hello").await, "hello");
}

#[tokio::test]
async fn a_synchronous_component_is_described_and_replies() {
    let host = Host::start().await;
    let text = echo().text().replace("skep:agent/handler@", "skep:agent/handler-sync@");
    let bytes = component(&text, &[], "include skep:agent/agent-sync@0.1.1;");
    let manifest = Manifest::from_toml("name = \"echo\"").expect("valid");
    let summary =
        host.agents.deploy(manifest, bytes, "tester").await.expect("the component has the same functions");
    assert_eq!(summary.description, "described");
    assert_eq!(host.answer("echo", "s", "hello").await, "hello");
}

#[tokio::test]
async fn a_clock_is_available_only_if_granted_and_a_denial_names_the_setting() {
    let host = Host::start().await;
    let denial = refused(&host, "", clock_reader()).await;
    assert!(
        denial.contains("wasi:clocks/monotonic-clock") && denial.contains("`clocks = true` under [grants]"),
        "{denial}"
    );
    host.deploy("clock", "[grants]\nclocks = true", clock_reader()).await.expect("granted");
    assert_eq!(host.answer("clock", "s", "tick").await, "tick");
}

#[tokio::test]
async fn an_unknown_import_is_named() {
    let guest = Guest {
        world: "import other:thing/door@0.1.0;",
        packages: &["package other:thing@0.1.0; interface door { open: func(); }"],
        module: r#"(import "other:thing/door@0.1.0" "open" (func $open))"#,
        on_message: "(call $open)",
        ..Guest::default()
    };
    let denial = refused(&Host::start().await, "", guest).await;
    assert!(denial.contains("other:thing/door@0.1.0"), "{denial}");
}

#[tokio::test]
async fn a_component_for_another_version_of_the_interface_is_refused_by_its_version() {
    let host = Host::start().await;
    let imports = "(component (import \"skep:agent/log@9.9.0\" (instance)))";
    let exports = "(component (instance $h) (export \"skep:agent/handler@0.2.0\" (instance $h)))";
    // A compatible version, with a function that this host lacks.
    let newer = "(component (import \"skep:agent/log@0.1.9\" (instance (export \"flush\" (func)))))";
    for (text, version) in [(imports, "9.9.0"), (exports, "0.2.0"), (newer, "0.1.9")] {
        let manifest = Manifest::from_toml("name = \"x\"").expect("valid");
        let bytes = wat::parse_str(text).expect("valid");
        let message = host.agents.deploy(manifest, bytes, "tester").await.expect_err(version).to_string();
        let expected =
            format!("it was built for skep:agent {version}, and this host has 0.1.0, 0.1.1; upgrade Skep");
        assert!(message.contains(&expected), "{message}");
    }
}

#[tokio::test]
async fn invalid_components_are_rejected_with_the_reason() {
    let host = Host::start().await;
    let empty = wat::parse_str("(component)").expect("valid");
    let core = wat::parse_str("(module)").expect("valid");
    let cut = echo().component()[..100].to_vec();
    for (bytes, why) in [
        (empty, "it exports neither skep:agent/handler"),
        (core, "core WebAssembly module"),
        (cut, "unexpected end"),
        (Vec::new(), "component"),
    ] {
        let manifest = Manifest::from_toml("name = \"x\"").expect("valid");
        let message = host.agents.deploy(manifest, bytes, "tester").await.expect_err(why).to_string();
        assert!(message.contains(why), "{message}");
    }
    let message = refused(&host, "model = \"gpt-9\"", echo()).await;
    assert!(message.contains("gpt-9") && message.contains("tiny"), "{message}");
}

#[tokio::test]
async fn a_route_belongs_to_one_agent() {
    let host = Host::start().await;
    host.deploy("one", "[[trigger.http]]\nroute = \"/door/{session}\"", echo())
        .await
        .expect("the route is free");
    let message = refused(&host, "[[trigger.http]]\nroute = \"/door/{id}\"", echo()).await;
    assert!(message.contains("/door/{id}") && message.contains("agent one"), "{message}");
    let found = host.agents.match_route("POST", "/door/ann").expect("the route matches");
    assert_eq!((found.agent.as_str(), found.session.as_str()), ("one", "ann"));
    assert_eq!(host.agents.match_route("GET", "/door/ann"), None);
}

#[tokio::test]
async fn a_new_version_keeps_the_sessions_and_a_failed_one_changes_nothing() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    let spinning = Guest { describe: "(loop $again (br $again))", ..Guest::default() };
    host.deploy("count", "[limits]\ncpu_ms = 20", spinning)
        .await
        .expect_err("the guest never describes itself");
    assert_eq!(host.answer("count", "s", "go").await, "xx");
    host.deploy("count", "[limits]\nmemory_mb = 8", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "xxx");
    assert_eq!(host.agents.agent("count").expect("the agent exists").limits.memory_mb, 8);
}
