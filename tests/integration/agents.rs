//! Agents over HTTP: deployment, turns, state, conversations, tools, triggers, and restarts.

use crate::harness::{Host, guest, shared};
use serde_json::{Value, json};

#[tokio::test]
async fn an_agent_is_deployed_listed_invoked_and_deleted() {
    let host = shared();
    let (status, deployed) = host.deploy_guest("noop", "life-cycle", "").await;
    assert_eq!(status, 201, "{deployed}");
    assert_eq!(deployed["name"], "life-cycle");
    let (_, listed) = host.get("/v1/agents").await;
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().filter_map(|a| a["name"].as_str()).collect();
    assert!(names.contains(&"life-cycle"), "{listed}");
    let (status, answer) = host.message("life-cycle", "s", "echo this").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["text"], "echo this");
    assert_eq!(answer["turn"], 1);
    assert_eq!(host.message("life-cycle", "s", "again").await.1["turn"], 2);
    let (_, sessions) = host.get("/v1/agents/life-cycle/sessions").await;
    assert_eq!(sessions["data"][0]["id"], "s", "{sessions}");
    assert_eq!(host.delete("/v1/agents/life-cycle/sessions/s").await.0, 204);
    assert_eq!(host.message("life-cycle", "s", "new").await.1["turn"], 1, "a deleted session starts over");
    assert_eq!(host.delete("/v1/agents/life-cycle").await.0, 204);
    let (status, gone) = host.message("life-cycle", "s", "hello").await;
    assert_eq!((status, gone["error"]["code"].as_str()), (404, Some("agent_not_found")), "{gone}");
}

#[tokio::test]
async fn state_is_committed_only_with_its_turn() {
    let host = shared();
    assert_eq!(host.deploy_guest("state", "stateful", "").await.0, 201);
    let say = async |session: &str, text: &str| host.message("stateful", session, text).await;
    assert_eq!(say("a", "set color blue").await.0, 200);
    assert_eq!(say("a", "get color").await.1["text"], "blue");
    assert_eq!(say("b", "get color").await.1["text"], "", "sessions do not share state");
    let (status, failed) = say("a", "set-and-fail color red").await;
    assert_eq!(status, 500, "{failed}");
    assert_eq!(say("a", "get color").await.1["text"], "blue", "a failed turn changes nothing");
    assert_eq!(say("a", "cas color blue green").await.1["text"], "true");
    assert_eq!(say("a", "cas color blue black").await.1["text"], "false");
    assert_eq!(say("a", "get color").await.1["text"], "green");
    assert_eq!(say("a", "keys").await.1["text"], "color");
    assert_eq!(say("a", "delete color").await.1["text"], "true");
    assert_eq!(say("a", "get color").await.1["text"], "");
}

#[tokio::test]
async fn one_session_runs_one_turn_at_a_time_and_loses_none() {
    let host = shared();
    assert_eq!(host.deploy_guest("state", "counter", "").await.0, 201);
    let turns = futures::future::join_all((0..16).map(|_| host.message("counter", "s", "increment n"))).await;
    let mut seen: Vec<u64> = turns.iter().map(|(_, answer)| answer["turn"].as_u64().unwrap()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (1..=16).collect::<Vec<_>>());
    assert_eq!(host.message("counter", "s", "get n").await.1["text"], "16");
}

#[tokio::test]
async fn a_session_survives_a_restart_with_its_exact_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let ask = |text: &str| json!({"text": text, "data": {"max_tokens": 12}});
    let path = "/v1/agents/talker/sessions/s/messages";
    let host = Host::start(Some(folder.path()));
    assert_eq!(host.deploy_guest("generate", "talker", "").await.0, 201);
    let first = host.ok(path, ask("My name is Ada. Remember it.")).await;
    let (_, before) = host.get("/v1/agents/talker/sessions/s").await;
    host.stop();

    let host = Host::start(Some(folder.path()));
    let (_, after) = host.get("/v1/agents/talker/sessions/s").await;
    assert_eq!(before["messages"], after["messages"]);
    let second = host.ok(path, ask("What is my name?")).await;
    assert_eq!(second["turn"], 2);
    // The second prompt starts with the first prompt and its answer, token for token.
    let usage = |answer: &Value, key: &str| answer["usage"][key].as_u64().unwrap();
    assert!(
        usage(&second, "prompt_tokens") > usage(&first, "prompt_tokens") + usage(&first, "completion_tokens")
    );
    let third = host.ok(path, ask("And again?")).await;
    let cached = third["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let whole_pages = |tokens: u64| tokens / 16 * 16;
    let seen = usage(&second, "prompt_tokens") + usage(&second, "completion_tokens");
    assert!(cached + 16 >= whole_pages(seen), "{cached} tokens cached of {seen} seen");
}

#[tokio::test]
async fn room_service_calls_a_tool_and_remembers() {
    let folder = tempfile::tempdir().unwrap();
    let host = Host::start(Some(folder.path()));
    host.deploy_example("room-service").await;
    let path = "/v1/agents/room-service/sessions/ada/messages";
    let events = host.events(path, json!({"text": "A salad and two teas, please."})).await;
    let of = |name: &str| {
        events.iter().filter(|(event, _)| event == name).map(|(_, data)| parse(data)).collect::<Vec<_>>()
    };
    let calls = of("tool_call");
    assert!(!calls.is_empty(), "{events:?}");
    assert!(calls[0]["arguments"].is_object());
    let results = of("tool_result");
    assert_eq!(results[0]["id"], calls[0]["id"]);
    let text: String = of("delta").iter().map(|delta| delta["text"].as_str().unwrap().to_owned()).collect();
    let done = &of("done")[0];
    assert!(!done["text"].as_str().unwrap().is_empty() && !text.is_empty());
    assert!(done["usage"]["total_tokens"].as_u64().unwrap() > 0);
    let (_, session) = host.get("/v1/agents/room-service/sessions/ada").await;
    assert!(session["state_keys"].as_array().is_some_and(|keys| !keys.is_empty()), "{session}");
    host.stop();
    let host = Host::start(Some(folder.path()));
    let (_, after) = host.get("/v1/agents/room-service/sessions/ada").await;
    assert_eq!(after["messages"], session["messages"]);
    let again = host.ok(path, json!({"text": "And a soup."})).await;
    assert_eq!(again["turn"], 2);
}

#[tokio::test]
async fn a_route_of_the_manifest_reaches_the_agent() {
    let host = shared();
    let route = "[[trigger.http]]\nroute = \"/shop/{session}/ask\"";
    assert_eq!(host.deploy_guest("noop", "routed", route).await.0, 201);
    let answer = host.ok("/shop/kim/ask", json!({"text": "by route"})).await;
    assert_eq!(
        (answer["text"].as_str(), answer["session"].as_str()),
        (Some("by route"), Some("kim")),
        "{answer}"
    );
    assert_eq!(host.get("/shop/kim/ask").await.0, 405);
    let (status, refused) = host.deploy_guest("noop", "routed-too", route).await;
    assert_eq!(status, 409, "two agents cannot have one route: {refused}");
}

#[tokio::test]
async fn versions_are_listed_and_rolled_back_over_http() {
    let host = shared();
    for (version, guest_name) in [(1, "noop"), (2, "chatty")] {
        let (status, deployed) = host.deploy_guest(guest_name, "versioned", "").await;
        assert_eq!((status, &deployed["version"]), (201, &json!(version)), "{deployed}");
    }
    assert_eq!(host.message("versioned", "s", "2").await.1["text"], "logged");
    let back = host.ok("/v1/agents/versioned/rollback", json!({})).await;
    assert_eq!(back["version"], 1, "{back}");
    assert_eq!(host.message("versioned", "s", "2").await.1["text"], "2");
    let (_, list) = host.get("/v1/agents/versioned/versions").await;
    let listed: Vec<_> = list["data"].as_array().unwrap().iter().collect();
    assert_eq!(listed.len(), 2, "{list}");
    assert_eq!((&listed[0]["version"], &listed[0]["in_force"]), (&json!(2), &json!(false)), "{list}");
    assert_eq!((&listed[1]["version"], &listed[1]["in_force"]), (&json!(1), &json!(true)), "{list}");
    assert_eq!(host.ok("/v1/agents/versioned/rollback", json!({"version": 2})).await["version"], 2);
    for (path, body, status) in [
        ("/v1/agents/versioned/rollback", json!({"version": 9}), 404),
        ("/v1/agents/versioned/rollback", json!({"to": 1}), 400),
        ("/v1/agents/nobody/rollback", json!({}), 404),
    ] {
        let (got, answer) = host.post(path, body).await;
        assert_eq!(got, status, "{path}: {answer}");
    }
    assert_eq!(host.get("/v1/agents/nobody/versions").await.0, 404);
}

#[tokio::test]
async fn an_agent_is_a_model_of_the_chat_route() {
    let host = shared();
    assert_eq!(host.deploy_guest("noop", "as-model", "").await.0, 201);
    let request =
        json!({"model": "agent:as-model", "messages": [{"role": "user", "content": "through chat"}]});
    let answer = host.ok("/v1/chat/completions", request).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "through chat");
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
}

#[tokio::test]
async fn two_generations_of_one_turn_run_concurrently_and_a_stream_equals_its_text() {
    let host = shared();
    assert_eq!(host.deploy_guest("two_at_once", "two", "").await.0, 201);
    let (status, answer) = host.message("two", "s", "go").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(host.deploy_guest("stream", "streamer", "").await.0, 201);
    let (status, answer) = host.message("streamer", "s", "Say hello.").await;
    assert_eq!(status, 200, "{answer}");
    assert!(!answer["text"].as_str().unwrap().is_empty());
    assert_eq!(answer["data"]["same"], true, "the chunks of the stream add up to the text: {answer}");
}

#[tokio::test]
async fn a_tool_result_that_breaks_its_schema_is_refused() {
    let host = shared();
    assert_eq!(host.deploy_guest("toolcall", "tooled", "").await.0, 201);
    let (status, good) = host.message("tooled", "s", "good").await;
    assert_eq!(status, 200, "{good}");
    assert!(good["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty()), "{good}");
    let (status, bad) = host.message("tooled", "s2", "bad").await;
    assert_ne!(status, 200, "{bad}");
    assert!(bad["error"]["message"].as_str().unwrap().contains("not valid"), "{bad}");
}

#[tokio::test]
async fn an_agents_log_is_read_over_http() {
    let host = shared();
    assert_eq!(host.deploy_guest("chatty", "chatty", "").await.0, 201);
    host.message("chatty", "s", "3").await;
    let (status, logs) = host.get("/v1/agents/chatty/logs?limit=10").await;
    assert_eq!(status, 200, "{logs}");
    let lines = logs["data"].as_array().unwrap();
    assert_eq!(lines.len(), 3, "{logs}");
    assert!(lines.iter().all(|line| line["session"] == "s" && line["message"].is_string()));
}

#[tokio::test]
async fn a_repeated_idempotency_key_answers_the_same_turn() {
    let host = shared();
    assert_eq!(host.deploy_guest("state", "once", "").await.0, 201);
    let send = async || {
        let url = host.at("/v1/agents/once/sessions/s/messages");
        let request = crate::harness::client().post(url).header("idempotency-key", "k1");
        request.json(&json!({"text": "increment n"})).send().await.unwrap().json::<Value>().await.unwrap()
    };
    let (first, second) = (send().await, send().await);
    assert_eq!((&first["turn"], &first["text"]), (&second["turn"], &second["text"]));
    assert_eq!(host.message("once", "s", "get n").await.1["text"], "1");
}

#[test]
fn guests_are_components_without_wasi() {
    let component = guest("noop");
    let text = String::from_utf8_lossy(&component);
    assert!(text.contains("skep:agent/handler@0.1.1"));
    assert!(!text.contains("wasi:"), "a guest imports nothing that it was not granted");
}

fn parse(data: &str) -> Value {
    serde_json::from_str(data).unwrap()
}
