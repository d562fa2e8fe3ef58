//! Every limit, with a guest that goes over it: the refusal names the limit and the line that would allow more.

use super::{
    fixture::Host,
    guest::{Guest, spinner},
};
use crate::{LogFilter, Manifest, RuntimeError};

const LOG: &str = r#"(import "skep:agent/log@0.1.0" "write" (func $log (param i32 i32 i32)))"#;
const STATE_GET: &str = r#"(import "skep:agent/state@0.1.0" "get" (func $get (param i32 i32 i32)))
    (data (i32.const 512) "key")"#;

/// The limit that a turn exceeds, and what its caller is told.
async fn exceeded(limits: &str, guest: Guest) -> (&'static str, String) {
    let host = Host::start().await;
    host.deploy("hostile", limits, guest).await.expect("it can be deployed");
    match host.ask("hostile", "s", "go").await.expect_err("the turn must fail") {
        RuntimeError::LimitExceeded { limit, message } => (limit, message),
        other => panic!("no limit was exceeded: {other}"),
    }
}

#[tokio::test]
async fn calls_of_the_host_end_at_host_calls() {
    let asking = || Guest {
        module: STATE_GET,
        on_message: r#"(loop $again
            (call $get (i32.const 512) (i32.const 3) (i32.const 600))
            (local.set $a (i32.add (local.get $a) (i32.const 1)))
            (br_if $again (i32.lt_u (local.get $a) (i32.const 50))))"#,
        ..Guest::default()
    };
    let (limit, message) = exceeded("[limits]\nhost_calls = 49", asking()).await;
    assert_eq!(limit, "host_calls");
    assert!(message.contains("49 times") && message.contains("`host_calls` under [limits] in agent.toml"));
    let host = Host::start().await;
    host.deploy("asking", "[limits]\nhost_calls = 50", asking()).await.expect("valid");
    assert_eq!(host.answer("asking", "s", "go").await, "go");
}

#[tokio::test]
async fn what_calls_pass_ends_at_host_call_kb_and_one_call_at_its_own_bound() {
    let passing = Guest {
        module: LOG,
        on_message: "(loop $again (call $log (i32.const 1) (i32.const 16384) (i32.const 10240)) (br $again))",
        ..Guest::default()
    };
    let (limit, message) = exceeded("[limits]\nhost_call_kb = 64", passing).await;
    assert_eq!(limit, "host_call_kb");
    assert!(message.contains("64 KiB") && message.contains("skep.toml"), "{message}");
    let huge = Guest {
        module: LOG,
        on_message: "(call $log (i32.const 1) (i32.const 0) (i32.const 50000000))",
        pages: 800,
        ..Guest::default()
    };
    assert_eq!(exceeded("", huge).await.0, "call_bytes");
}

#[tokio::test]
async fn a_log_is_cut_at_log_kb_and_says_so() {
    let flood = Guest {
        module: LOG,
        on_message: r#"(loop $again
            (call $log (i32.const 1) (i32.const 64) (i32.const 300))
            (local.set $a (i32.add (local.get $a) (i32.const 1)))
            (br_if $again (i32.lt_u (local.get $a) (i32.const 10))))"#,
        ..Guest::default()
    };
    let host = Host::start().await;
    host.deploy("flood", "[limits]\nlog_kb = 1", flood).await.expect("valid");
    host.answer("flood", "s", "go").await;
    let lines = host.agents.logs(&LogFilter::of_agent("flood"), None, 100).await.expect("it is there");
    assert_eq!(lines.len(), 4, "three lines of 300 bytes, and what became of the others");
    assert!(lines[3].message.starts_with("7 more lines") && lines[3].message.contains("`log_kb`"));
}

#[tokio::test]
async fn a_table_that_grows_and_grows_ends_at_its_bound() {
    let grow = Guest {
        module: "(table $t 1 funcref)",
        on_message: r#"(loop $again
            (if (i32.eq (table.grow $t (ref.null func) (i32.const 10000)) (i32.const -1)) (then unreachable))
            (br $again))"#,
        ..Guest::default()
    };
    let (limit, message) = exceeded("", grow).await;
    assert_eq!(limit, "table_elements");
    assert!(message.contains("100000 entries") && message.contains("the host allows no more"), "{message}");
}

#[tokio::test]
async fn components_of_too_many_parts_are_refused_at_deployment() {
    let host = Host::start().await;
    let instances = format!("(component (core module $m) {})", "(core instance (instantiate $m))".repeat(17));
    let of = |part: &str| format!("(component (core module $m {part}) (core instance (instantiate $m)))");
    for (text, named) in [
        (instances, "instances"),
        (of("(table 200000 funcref)"), "table"),
        (of(&"(table 1 funcref)".repeat(17)), "tables"),
        (of(&"(memory 1)".repeat(5)), "memories"),
    ] {
        let manifest = Manifest::from_toml("name = \"crowded\"").expect("valid");
        let bytes = wat::parse_str(&text).expect("the text is WebAssembly");
        let error = host.agents.deploy(manifest, bytes, "tester").await.expect_err(named);
        assert_eq!(error.code(), "invalid_component");
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[tokio::test]
async fn an_agent_has_so_many_turns_at_once_and_others_have_theirs() {
    let host = Host::start().await;
    host.deploy("busy", "[limits]\ncpu_ms = 30000\nconcurrent_turns = 2", spinner()).await.expect("valid");
    host.deploy("other", "", spinner()).await.expect("valid");
    let first = host.invoke("busy", "a", "spin").await.expect("one");
    let _second = host.invoke("busy", "b", "spin").await.expect("two");
    let error = host.invoke("busy", "c", "hello").await.expect_err("three");
    assert_eq!(error.code(), "too_many_turns");
    assert!(error.to_string().contains("`concurrent_turns` under [limits] in agent.toml"), "{error}");
    assert_eq!(host.answer("other", "s", "hello").await, "hello");
    drop(first);
    let third = loop {
        match host.invoke("busy", "c", "hello").await {
            Ok(handle) => break handle,
            // The turn that was given up is on its way out.
            Err(_) => tokio::task::yield_now().await,
        }
    };
    assert_eq!(third.outcome().await.expect("there is room again").text, "hello");
}
