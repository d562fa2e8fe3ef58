//! Tests every limit with a guest that exceeds it: the refusal has the right code and names the
//! setting.

use super::{
    approvals,
    fixture::Host,
    guest::{Guest, spinner},
    inference::relayer,
    web::{self, EVERYWHERE, Server, fetcher},
};
use crate::{Limits, LogFilter, Manifest, RuntimeError};

const LOG: &str = r#"(import "skep:agent/log@0.1.1" "write" (func $log (param i32 i32 i32)))"#;
const STATE_GET: &str = r#"(import "skep:agent/state@0.1.1" "get" (func $get (param i32 i32 i32)))
    (data (i32.const 512) "key")"#;

/// The code and the message with which a guest that exceeded a limit was stopped.
struct Stopped(&'static str, String);

impl From<RuntimeError> for Stopped {
    fn from(error: RuntimeError) -> Self {
        match &error {
            RuntimeError::LimitExceeded { limit, .. } => Stopped(limit, error.to_string()),
            other => Stopped(other.code(), error.to_string()),
        }
    }
}

/// Exceeds the limit, and returns the result with the expected code.
async fn go_over(limit: &str) -> (Stopped, &'static str) {
    match limit {
        "memory_mb" => {
            let grow = r#"(loop $again
                (if (i32.eq (memory.grow (i32.const 16)) (i32.const -1)) (then unreachable)) (br $again))"#;
            (turn("memory_mb = 4", Guest { on_message: grow, ..Guest::default() }).await, "memory_mb")
        }
        "tables" => {
            let module = "(table 1 funcref) (table 1 funcref) (table 1 funcref)";
            (deployment("tables = 2", Guest { module, ..Guest::default() }).await, "invalid_component")
        }
        "table_elements" => {
            let guest = Guest {
                module: "(table $t 1 funcref)",
                on_message: r#"(loop $again
                    (if (i32.eq (table.grow $t (ref.null func) (i32.const 10)) (i32.const -1)) (then unreachable))
                    (br $again))"#,
                ..Guest::default()
            };
            (turn("table_elements = 1000", guest).await, "table_elements")
        }
        // Its imports are passed to the component through additional instances.
        "instances" => (deployment("instances = 1", logging("")).await, "invalid_component"),
        "cpu_ms" => (turn("cpu_ms = 50", endless()).await, "cpu_ms"),
        "turn_ms" => (turn("cpu_ms = 30000\nturn_ms = 50", endless()).await, "deadline_exceeded"),
        "approval_ms" => {
            let host = approvals::start("[limits]\napproval_ms = 1").await;
            (Stopped("refused", host.answer("desk", "s", "agent:orders/find").await), "refused")
        }
        "tokens_per_turn" => (turn("tokens_per_turn = 3", relayer()).await, "tokens_per_turn or context"),
        "tokens_per_day" => (turn("tokens_per_day = 3", relayer()).await, "tokens_used_up"),
        "state_kb" => {
            let import = r#"(import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))"#;
            let set =
                "(call $set (i32.const 512) (i32.const 3) (i32.const 0) (i32.const 2000) (i32.const 640))";
            (quota("state_kb = 1", import, set, 1).await, "quota-exceeded")
        }
        "session_kb" => {
            let import = r#"
                (import "skep:agent/inference@0.1.1" "[static]conversation.open"
                    (func $open (param i32 i32 i32 i32 i32 i32)))
                (import "skep:agent/inference@0.1.1" "[method]conversation.append-user"
                    (func $append (param i32 i32 i32 i32)))"#;
            let append = r#"
                (call $open (i32.const 512) (i32.const 3)
                    (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 600))
                (if (i32.load8_u (i32.const 600)) (then unreachable))
                (call $append (i32.load offset=4 (i32.const 600)) (i32.const 0) (i32.const 2000) (i32.const 640))"#;
            (quota("session_kb = 1", import, append, 6).await, "quota-exceeded")
        }
        "host_calls" => {
            let guest = Guest {
                module: STATE_GET,
                on_message: "(loop $again (call $get (i32.const 512) (i32.const 3) (i32.const 600)) (br $again))",
                ..Guest::default()
            };
            (turn("host_calls = 49", guest).await, "host_calls")
        }
        "host_call_kb" => {
            let log =
                "(loop $again (call $log (i32.const 1) (i32.const 16384) (i32.const 10240)) (br $again))";
            (turn("host_call_kb = 64", logging(log)).await, "host_call_kb")
        }
        "fetches" | "fetch_kb" => {
            let url = format!("http://{}/", Server::start().await.answering("pong"));
            let host = Host::with(web::granting(&["*"])).await;
            let manifest = format!("{EVERYWHERE}\n[limits]\n{limit} = 0");
            host.deploy("web", &manifest, fetcher()).await.expect("valid");
            (Stopped("denied", host.answer("web", "s", &url).await), "denied")
        }
        "log_kb" => (flood().await, "dropped"),
        "concurrent_turns" => {
            let host = Host::start().await;
            let limits = "[limits]\ncpu_ms = 30000\nconcurrent_turns = 1";
            host.deploy("busy", limits, spinner()).await.expect("valid");
            let _first = host.invoke("busy", "a", "spin").await.expect("one");
            let second = host.invoke("busy", "b", "hello").await.expect_err("one too many");
            (second.into(), "too_many_turns")
        }
        "schedules" => {
            let import = r#"(import "skep:agent/schedule@0.1.1" "after"
                (func $after (param i32 i32 i64 i32 i32 i32 i32 i32 i32)))"#;
            let after = r#"(call $after (i32.const 512) (i32.const 3) (i64.const 1000)
                (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 640))"#;
            (quota("schedules = 0", import, after, 1).await, "quota-exceeded")
        }
        "events" => {
            let import =
                r#"(import "skep:agent/events@0.1.1" "emit" (func $emit (param i32 i32 i32 i32 i32 i32)))"#;
            let emit = r#"(call $emit (i32.const 512) (i32.const 3)
                (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 640))"#;
            let limits = "events = 0\n[grants]\nevents = [\"key\"]";
            (quota(limits, import, emit, 2).await, "quota-exceeded")
        }
        other => panic!("no test exceeds {other} under [limits]; add one"),
    }
}

#[tokio::test]
async fn every_limit_is_enforced_and_its_refusal_names_the_setting() {
    for (name, _) in Limits::default().named() {
        let (Stopped(code, message), expected) = go_over(name).await;
        assert_eq!(code, expected, "{name}: {message}");
        let line = format!("`{name}` under [limits]");
        assert!(message.replace('\n', " ").contains(&line), "{name} is not named: {message}");
    }
}

/// Returns how a turn of an agent with these limits ends.
async fn turn(limits: &str, guest: Guest) -> Stopped {
    let host = Host::start().await;
    host.deploy("hostile", &format!("[limits]\n{limits}"), guest).await.expect("the guest can be deployed");
    host.ask("hostile", "s", "go").await.expect_err("the turn must fail").into()
}

/// Returns how its deployment ends.
async fn deployment(limits: &str, guest: Guest) -> Stopped {
    let host = Host::start().await;
    let error = host.deploy("hostile", &format!("[limits]\n{limits}"), guest).await;
    error.expect_err("it must not be deployed").into()
}

/// Returns the text of a refused call, which must fail with this case of the interface's error.
async fn quota(limits: &str, import: &str, call: &str, case: u32) -> Stopped {
    let on_message = format!(
        r#"{call}
        (if (i32.ne (i32.load8_u (i32.const 640)) (i32.const 1)) (then unreachable))
        (if (i32.ne (i32.load8_u (i32.const 644)) (i32.const {case})) (then unreachable))
        (local.set $text (i32.load (i32.const 648)))
        (local.set $length (i32.load (i32.const 652)))"#
    );
    let alarm = r#"(func (export "skep:agent/alarm-handler@0.1.1#on-alarm")
        (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i64 i64 i64 i32 i32) (result i32) unreachable)"#;
    let guest = Guest {
        world: "export skep:agent/alarm-handler@0.1.1;",
        module: format!("{import} {alarm} (data (i32.const 512) \"key\")").leak(),
        on_message: on_message.leak(),
        ..Guest::default()
    };
    let host = Host::start().await;
    host.deploy("hostile", &format!("[limits]\n{limits}"), guest).await.expect("the guest can be deployed");
    Stopped("quota-exceeded", host.answer("hostile", "s", "go").await)
}

fn logging(on_message: &'static str) -> Guest {
    Guest { module: LOG, on_message, ..Guest::default() }
}

fn endless() -> Guest {
    Guest { on_message: "(loop $again (br $again))", ..Guest::default() }
}

/// Returns the log line that reports the dropped ones.
async fn flood() -> Stopped {
    let host = Host::start().await;
    let ten_lines = r#"(loop $again
        (call $log (i32.const 1) (i32.const 64) (i32.const 300))
        (local.set $a (i32.add (local.get $a) (i32.const 1)))
        (br_if $again (i32.lt_u (local.get $a) (i32.const 10))))"#;
    host.deploy("flood", "[limits]\nlog_kb = 1", logging(ten_lines)).await.expect("valid");
    host.answer("flood", "s", "go").await;
    let lines = host.agents.logs(&LogFilter::of_agent("flood"), None, 100).await.expect("the agent exists");
    assert_eq!(lines.len(), 4, "three lines of 300 bytes, and the report of the dropped ones");
    assert!(lines[3].message.starts_with("7 more lines were dropped"), "{lines:?}");
    Stopped("dropped", lines[3].message.clone())
}

/// Makes fifty host calls.
pub(super) fn fifty_calls() -> Guest {
    Guest {
        module: STATE_GET,
        on_message: r#"(loop $again
            (call $get (i32.const 512) (i32.const 3) (i32.const 600))
            (local.set $a (i32.add (local.get $a) (i32.const 1)))
            (br_if $again (i32.lt_u (local.get $a) (i32.const 50))))"#,
        ..Guest::default()
    }
}

#[tokio::test]
async fn the_last_allowed_host_call_succeeds() {
    let host = Host::start().await;
    host.deploy("asking", "[limits]\nhost_calls = 50", fifty_calls()).await.expect("valid");
    assert_eq!(host.answer("asking", "s", "go").await, "go");
}

#[tokio::test]
async fn components_over_the_operators_ceilings_are_rejected_at_deployment() {
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
        assert!(error.to_string().contains("under [limits] in skep.toml"), "{named}: {error}");
    }
}

#[tokio::test]
async fn concurrent_turns_are_limited_per_agent() {
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
            // The cancelled turn is still ending.
            Err(_) => tokio::task::yield_now().await,
        }
    };
    assert_eq!(third.outcome().await.expect("a turn has ended").text, "hello");
}
