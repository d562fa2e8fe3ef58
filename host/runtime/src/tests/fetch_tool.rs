//! Tests of `http/fetch`, called as a tool against a server run by the test: grants, limits and
//! restarts.

use super::{
    fixture::{Host, invocation},
    guest::Guest,
    tools,
    web::{self, Server},
};
use crate::{Invocation, Limits, RuntimeOptions};
use serde_json::{Value, json};

/// Calls `http/fetch` with the message as its arguments, and replies with the result or the error.
pub(super) fn fetcher() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/tools@0.1.1" "call" (func $call (param i32 i32 i32 i32 i32 i32 i32)))
            (data (i32.const 512) "http/fetch")"#,
        on_message: FETCH,
        ..Guest::default()
    }
}

const FETCH: &str = r#"
    (call $call (i32.const 512) (i32.const 10) (local.get $text) (local.get $length)
        (i32.const 0) (i32.const 0) (i32.const 600))
    (local.set $a (i32.add (i32.const 604) (i32.mul (i32.const 4) (i32.load8_u (i32.const 600)))))
    (local.set $text (i32.load (local.get $a)))
    (local.set $length (i32.load offset=4 (local.get $a)))"#;

/// Calls it twice, and replies with the result of the second call.
pub(super) fn fetch_twice() -> Guest {
    let again = "(local.set $text (i32.load (local.get $message)))
                 (local.set $length (i32.load offset=4 (local.get $message)))";
    Guest { on_message: format!("{FETCH} {again} {FETCH}").leak(), ..fetcher() }
}

/// Returns options of an operator who grants these tools and hosts.
fn granting(tools: &[&str], hosts: &[&str]) -> RuntimeOptions {
    RuntimeOptions { granted_tools: tools::granting(tools).granted_tools, ..web::granting(hosts) }
}

pub(super) fn everything() -> RuntimeOptions {
    granting(&["http/fetch"], &["*"])
}

pub(super) const GRANTS: &str = "[grants]\ntools = [\"http/fetch\"]\nhosts = [\"*\"]";

async fn start(options: RuntimeOptions, manifest: &str) -> Host {
    let host = Host::with(options).await;
    host.deploy("web", manifest, fetcher()).await.expect("valid");
    host
}

async fn fetch(host: &Host, arguments: &Value) -> String {
    host.answer("web", "s", &arguments.to_string()).await
}

#[tokio::test]
async fn the_result_has_the_status_and_the_text_of_the_response() {
    let mut server = Server::start().await;
    let host = start(everything(), GRANTS).await;
    let arguments = json!({
        "method": "POST", "url": format!("http://{}/orders", server.address), "headers": {"x-kind": "soup"},
        "body": "one",
    });
    let asking = host.invoke("web", "s", &arguments.to_string()).await.expect("taken");
    let asked = server.next().await;
    assert!(asked.head.starts_with("POST /orders HTTP/1.1\r\n"), "{}", asked.head);
    assert!(asked.head.contains("x-kind: soup"), "{}", asked.head);
    assert_eq!(asked.body, "one");
    asked.answer("taken").await;
    let answer: Value =
        serde_json::from_str(&asking.outcome().await.expect("the turn succeeds").text).expect("JSON");
    assert_eq!(answer, json!({"status": 200, "url": arguments["url"], "bytes": 5, "text": "taken"}));
}

#[tokio::test]
async fn developer_and_operator_must_both_grant_the_tool_and_the_host() {
    let address = Server::start().await.answering("pong");
    let (origin, arguments) = (format!("http://{address}"), json!({"url": format!("http://{address}/")}));
    let manifest = |tools: &str, hosts: &str| format!("[grants]\ntools = [{tools}]\nhosts = [{hosts}]");
    let both = manifest("\"http/fetch\"", "\"*\"");
    for (operator, developer, expected) in [
        (granting(&["http/fetch"], &[origin.as_str()]), both.clone(), "\"text\":\"pong\""),
        (everything(), manifest("", "\"*\""), "add \"http/fetch\" to `tools` under [grants] in agent.toml"),
        (granting(&["mcp:*/*"], &["*"]), both.clone(), "to `tools` under [grants] in skep.toml"),
        (
            everything(),
            manifest("\"http/fetch\"", "\"https://x.org\""),
            "to hosts under [grants] in agent.toml",
        ),
        (granting(&["http/fetch"], &[]), both, "to hosts under [grants] in skep.toml"),
    ] {
        let host = start(operator, &developer).await;
        let answer = fetch(&host, &arguments).await;
        assert!(answer.contains(expected), "{developer}: {answer}");
    }
}

#[tokio::test]
async fn its_requests_count_toward_the_limits_on_requests() {
    let address = Server::start().await.answering("pong");
    let arguments = json!({"url": format!("http://{address}/")});
    for (limits, expected) in [
        ("fetches = 0", "`fetches` under [limits] in agent.toml"),
        ("fetch_kb = 0", "`fetch_kb` under [limits] in agent.toml"),
        ("fetches = 1", "pong"),
    ] {
        let host = start(everything(), &format!("{GRANTS}\n[limits]\n{limits}")).await;
        let answer = fetch(&host, &arguments).await;
        assert!(answer.contains(expected), "{limits}: {answer}");
    }
    let operator = RuntimeOptions { ceilings: Limits { fetches: 0, ..Limits::default() }, ..everything() };
    let host = start(operator, GRANTS).await;
    assert!(fetch(&host, &arguments).await.contains("made 0 requests"));
}

#[tokio::test]
async fn non_public_addresses_are_denied_to_models_too() {
    let host = start(RuntimeOptions { outbound: Default::default(), ..everything() }, GRANTS).await;
    for url in ["http://169.254.169.254/latest/meta-data/", "http://127.0.0.1:1/"] {
        let answer = fetch(&host, &json!({ "url": url })).await;
        assert!(answer.contains("allow_private = [") && answer.contains("skep.toml"), "{url}: {answer}");
    }
}

#[tokio::test]
async fn invalid_requests_are_rejected_before_anything_is_sent() {
    let host = start(everything(), &format!("{GRANTS}\n[limits]\nfetches = 0")).await;
    for (arguments, why) in [
        (json!({"method": "GET"}), "\"url\" is a required property"),
        (json!({"url": "https://x.org/", "method": "get"}), "at \"/method\""),
        (json!({"url": "ftp://x.org/"}), "at \"/url\""),
        (json!({"url": "https://x.org/", "verb": "GET"}), "'verb' was unexpected"),
        (json!({"url": "https://x.org/", "headers": {"host": "y.org"}}), "belongs to the connection"),
    ] {
        let answer = fetch(&host, &arguments).await;
        assert!(answer.contains(why), "{arguments}: {answer}");
    }
}

#[tokio::test]
async fn a_long_response_is_truncated_with_a_note() {
    let address = Server::start().await.answering("x".repeat(100_000).leak());
    let host = start(everything(), GRANTS).await;
    let answer = fetch(&host, &json!({"url": format!("http://{address}/")})).await;
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(
        (answer["bytes"].as_u64(), answer["text"].as_str().map(str::len)),
        (Some(100_000), Some(16_384))
    );
    assert_eq!(answer["note"], "the text was cut after 16384 of 100000 bytes");
}

/// Interrupts a turn while the server has not answered. Returns the reply of the resumed turn, and
/// how often the server was called.
async fn after_a_restart(method: &str) -> (String, usize) {
    let mut server = Server::start().await;
    let host = start(everything(), GRANTS).await;
    let text = json!({"method": method, "url": format!("http://{}/order", server.address)}).to_string();
    let detached = Invocation { detached: true, ..invocation("web", "s", &text) };
    let id = host.agents.invoke(detached).await.expect("taken").turn_id().to_owned();
    let first = server.next().await;
    let host = host.restart_with(everything()).await;
    drop(first);
    let outcome = host.agents.follow("web", "s", &id).await.expect("kept").outcome();
    tokio::pin!(outcome);
    let mut times = 1;
    loop {
        tokio::select! {
            outcome = &mut outcome => return (outcome.expect("the turn succeeds").text, times),
            asked = server.next() => {
                times += 1;
                asked.answer("done").await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_a_get_is_repeated_and_a_post_is_not() {
    let (answer, times) = after_a_restart("GET").await;
    assert!(answer.contains("\"text\":\"done\"") && times == 2, "{times}: {answer}");
    let (answer, times) = after_a_restart("POST").await;
    assert!(
        answer.contains("it is unknown whether the server acted on it") && times == 1,
        "{times}: {answer}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journaled_response_is_not_requested_again_and_still_counts() {
    let mut server = Server::start().await;
    let manifest = format!("{GRANTS}\n[limits]\nfetches = 2");
    let host = Host::with(everything()).await;
    host.deploy("web", &manifest, fetch_twice()).await.expect("valid");
    let text = json!({"url": format!("http://{}/", server.address)}).to_string();
    let detached = Invocation { detached: true, ..invocation("web", "s", &text) };
    let id = host.agents.invoke(detached).await.expect("taken").turn_id().to_owned();
    server.next().await.answer("first").await;
    let cut_off = server.next().await;
    let stricter = RuntimeOptions { ceilings: Limits { fetches: 1, ..Limits::default() }, ..everything() };
    let host = host.restart_with(stricter).await;
    drop(cut_off);
    let outcome = host.agents.follow("web", "s", &id).await.expect("kept").outcome().await;
    let text = outcome.expect("the turn succeeds").text;
    assert!(text.contains("made 1 requests"), "the first request counts and is not repeated: {text}");
    assert!(server.asked.is_empty());
}

#[tokio::test]
async fn a_call_can_require_approval() {
    let address = Server::start().await.answering("pong");
    let host = start(everything(), &format!("{GRANTS}\n[tools.\"http/fetch\"]\napproval = true")).await;
    let text = json!({"url": format!("http://{address}/")}).to_string();
    let asking = host.invoke("web", "s", &text).await.expect("taken");
    let asked =
        super::fixture::until(async || host.agents.approvals(None, 1).await.expect("listed").pop()).await;
    assert_eq!((asked.tool.as_str(), asked.arguments.get().to_owned()), ("http/fetch", text));
    host.agents.decide(&asked.id, true, None, "tester").await.expect("the approval is still open");
    assert!(asking.outcome().await.expect("the turn succeeds").text.contains("pong"));
}

/// Replies with the name under which a model sees the first tool that it is granted.
fn lister() -> Guest {
    Guest {
        module: r#"(import "skep:agent/tools@0.1.1" "list" (func $list (param i32)))"#,
        on_message: r#"
            (call $list (i32.const 600))
            (local.set $length (i32.const 0))
            (if (i32.load (i32.const 604)) (then
                (local.set $a (i32.load (i32.const 600)))
                (local.set $text (i32.load offset=12 (local.get $a)))
                (local.set $length (i32.load offset=16 (local.get $a)))))"#,
        ..Guest::default()
    }
}

#[tokio::test]
async fn it_is_listed_for_models_only_if_it_can_reach_a_host() {
    for (operator, manifest, expected) in [
        (everything(), GRANTS, "host_fetch"),
        (everything(), "[grants]\ntools = [\"http/fetch\"]", ""),
        (granting(&["http/fetch"], &[]), GRANTS, ""),
        (everything(), "[grants]\nhosts = [\"*\"]", ""),
    ] {
        let host = Host::with(operator).await;
        host.deploy("web", manifest, lister()).await.expect("valid");
        assert_eq!(host.answer("web", "s", "list").await, expected, "{manifest}");
    }
}
