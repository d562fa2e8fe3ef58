//! Tests of plain WASI commands: the message is standard input, and standard output is the reply.

use super::{
    fixture::Host,
    guest::{Guest, component},
};
use crate::{AlarmOrigin, LogFilter, Manifest, Origin, RuntimeError};

/// The parts of WASI that the command below calls.
const IO: &str = "package wasi:io@0.2.3;
    interface error { resource error; }
    interface streams {
        use error.{error};
        variant stream-error { last-operation-failed(error), closed }
        resource input-stream { blocking-read: func(len: u64) -> result<list<u8>, stream-error>; }
        resource output-stream { blocking-write-and-flush: func(contents: list<u8>) -> result<_, stream-error>; }
    }";
const CLI: &str = "package wasi:cli@0.2.3;
    interface stdin { use wasi:io/streams@0.2.3.{input-stream}; get-stdin: func() -> input-stream; }
    interface stdout { use wasi:io/streams@0.2.3.{output-stream}; get-stdout: func() -> output-stream; }
    interface stderr { use wasi:io/streams@0.2.3.{output-stream}; get-stderr: func() -> output-stream; }
    interface exit { exit: func(status: result); }
    interface run { run: func() -> result; }";
const WORLD: &str = "import wasi:cli/stdin@0.2.3; import wasi:cli/stdout@0.2.3; import wasi:cli/stderr@0.2.3;
    import wasi:cli/exit@0.2.3; export wasi:cli/run@0.2.3;";

/// Prints its input, then acts by its first letter: `f` fails, `x` exits with 1, `q` exits with 0,
/// `m` prints forever, `t` prints to standard error too and traps. With `e` it prints to standard
/// error only, and fails.
const MODULE: &str = r#"(module
    (import "wasi:cli/stdin@0.2.3" "get-stdin" (func $stdin (result i32)))
    (import "wasi:cli/stdout@0.2.3" "get-stdout" (func $stdout (result i32)))
    (import "wasi:cli/stderr@0.2.3" "get-stderr" (func $stderr (result i32)))
    (import "wasi:cli/exit@0.2.3" "exit" (func $exit (param i32)))
    (import "wasi:io/streams@0.2.3" "[method]input-stream.blocking-read" (func $read (param i32 i64 i32)))
    (import "wasi:io/streams@0.2.3" "[method]output-stream.blocking-write-and-flush"
        (func $write (param i32 i32 i32 i32)))
    (memory (export "memory") 4)
    (global $free (mut i32) (i32.const 8192))
    (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
        (local $at i32)
        (local.set $at (i32.and (i32.add (global.get $free) (i32.const 7)) (i32.const -8)))
        (global.set $free (i32.add (local.get $at) (local.get 3)))
        (local.get $at))
    (func (export "wasi:cli/run@0.2.3#run") (result i32)
        (local $text i32) (local $length i32) (local $letter i32) (local $out i32)
        (call $read (call $stdin) (i64.const 4096) (i32.const 64))
        (if (i32.load8_u (i32.const 64)) (then (return (i32.const 0))))
        (local.set $text (i32.load (i32.const 68)))
        (local.set $length (i32.load (i32.const 72)))
        (local.set $letter (i32.load8_u (local.get $text)))
        (local.set $out (call $stdout))
        (if (i32.eq (local.get $letter) (i32.const 101)) (then
            (call $write (call $stderr) (local.get $text) (local.get $length) (i32.const 64))
            (return (i32.const 1))))
        (call $write (local.get $out) (local.get $text) (local.get $length) (i32.const 64))
        (if (i32.eq (local.get $letter) (i32.const 109)) (then
            (loop $again
                (call $write (local.get $out) (local.get $text) (local.get $length) (i32.const 64))
                (br_if $again (i32.eqz (i32.load8_u (i32.const 64)))))))
        (if (i32.eq (local.get $letter) (i32.const 102)) (then (return (i32.const 1))))
        (if (i32.eq (local.get $letter) (i32.const 120)) (then (call $exit (i32.const 1))))
        (if (i32.eq (local.get $letter) (i32.const 113)) (then (call $exit (i32.const 0))))
        (if (i32.eq (local.get $letter) (i32.const 116)) (then
            (call $write (call $stderr) (local.get $text) (local.get $length) (i32.const 64))
            unreachable))
        (i32.const 0)))"#;

async fn host() -> Host {
    let host = Host::start().await;
    let manifest = Manifest::from_toml("name = \"command\"").expect("valid");
    let summary = host.agents.deploy(manifest, component(MODULE, &[IO, CLI], WORLD), "tester").await;
    let summary = summary.expect("the command needs no grant");
    assert!(summary.tools.is_empty() && summary.description.contains("WASI command"), "{summary:?}");
    host
}

async fn error(host: &Host, text: &str) -> RuntimeError {
    host.ask("command", "s", text).await.expect_err("the turn must fail")
}

#[tokio::test]
async fn a_command_reads_the_message_and_its_output_is_the_reply() {
    let host = host().await;
    assert_eq!(host.answer("command", "s", "hello\nthere\n").await, "hello\nthere\n");
    assert_eq!(host.answer("command", "s", "quits in good order").await, "quits in good order");
    assert_eq!(host.answer("command", "s", "").await, "");
    let logs = host.agents.logs(&LogFilter::of_agent("command"), None, 10).await.expect("the agent exists");
    assert!(logs.is_empty(), "the reply is not logged: {logs:?}");
}

#[tokio::test]
async fn a_nonzero_exit_status_fails_with_the_text_from_standard_error() {
    let host = host().await;
    let said = error(&host, "errors are reported\n").await;
    assert_eq!(said.code(), "agent_failed");
    assert_eq!(said.to_string(), "the agent failed: it exited with status 1: errors are reported");
    let logs = host.agents.logs(&LogFilter::of_agent("command"), None, 10).await.expect("the agent exists");
    assert_eq!(
        (logs.len(), logs[0].level.as_str(), logs[0].message.as_str()),
        (1, "warn", "errors are reported")
    );
    for text in ["fails", "x is an exit"] {
        let silent = error(&host, text).await;
        assert_eq!(silent.code(), "agent_failed");
        assert!(silent.to_string().contains("status 1 and printed no reason"), "{silent}");
    }
}

#[tokio::test]
async fn a_command_has_the_limits_of_an_agent_and_an_output_limit() {
    let host = host().await;
    let trap = error(&host, "traps with these words").await;
    assert_eq!(trap.code(), "agent_trapped");
    assert!(trap.to_string().ends_with("it last printed: traps with these words"), "{trap}");
    let flood = error(&host, &"more ".repeat(800)).await;
    assert!(matches!(flood, RuntimeError::LimitExceeded { limit: "reply_bytes", .. }), "{flood}");
    assert_eq!(host.answer("command", "s", "hello").await, "hello");
}

#[tokio::test]
async fn only_messages_reach_a_command() {
    let host = host().await;
    let mut alarm = super::fixture::invocation("command", "s", "");
    alarm.origin = Origin::Alarm(AlarmOrigin {
        id: "1".into(),
        name: "tick".into(),
        due_at_ms: 1,
        attempt: 1,
        missed: 0,
    });
    let handle = host.agents.invoke(alarm).await.expect("taken");
    let message = handle.outcome().await.expect_err("the command has no such export").to_string();
    assert!(message.contains("does not export skep:agent/alarm-handler"), "{message}");
}

#[tokio::test]
async fn a_component_that_is_neither_agent_nor_command_is_rejected() {
    let host = Host::start().await;
    let bytes = component("(module)", &[], "");
    let manifest = Manifest::from_toml("name = \"nothing\"").expect("valid");
    let message =
        host.agents.deploy(manifest, bytes, "tester").await.expect_err("nothing to call").to_string();
    assert!(message.contains("skep:agent/handler") && message.contains("wasi:cli/run"), "{message}");
    host.deploy("agent", "", Guest::default()).await.expect("an agent is accepted");
}
