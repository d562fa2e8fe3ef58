//! Tests `/v1/responses`: whole and streamed responses, chains of them, the background, and agents.

use super::{
    access,
    choices::Together,
    fixture::{Server, TestResponse},
    turns,
};
use crate::GatewayOptions;
use axum::{
    body::Body,
    http::{Method, Request},
};
use futures::future::join_all;
use serde_json::{Value, json};
use skep_runtime::{ResponseOptions, Role, RuntimeOptions, TurnPhase};
use std::{sync::Arc, time::Duration};
use tokio::sync::Barrier;

const RESPONSES: &str = "/v1/responses";

fn hello(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "max_output_tokens": 8, "temperature": 0,
                          "instructions": "You are here to help.", "input": "hello, is it you? and the user"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns the events, after checking their names and that their numbers follow `from`.
fn events(answer: &TestResponse, from: u64) -> Vec<Value> {
    let field =
        |event: &str, name: &str| event.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
    let events = answer.text.split("\n\n").filter(|event| event.contains("event: "));
    let read = |(index, event): (usize, &str)| {
        let data: Value = serde_json::from_str(&field(event, "data: ").unwrap()).unwrap();
        assert_eq!(field(event, "event: ").as_deref(), data["type"].as_str(), "{event}");
        assert_eq!(data["sequence_number"], from + index as u64, "{event}");
        data
    };
    events.enumerate().map(read).collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap().strip_prefix("response.").unwrap())
        .collect();
    names.dedup();
    names
}

fn text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap();
    let parts = items.iter().flat_map(|item| item["content"].as_array().into_iter().flatten());
    parts.filter(|part| part["type"] == "output_text").map(|part| part["text"].as_str().unwrap()).collect()
}

async fn ended(server: &Server, id: &str) -> Value {
    loop {
        let response = server.get(&format!("{RESPONSES}/{id}")).await.json();
        if !["queued", "in_progress"].contains(&response["status"].as_str().unwrap()) {
            return response;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_response_is_the_answer_of_the_other_apis_and_is_stored() {
    let server = Server::start().await;
    let answer = server.ok(RESPONSES, &hello(json!({"unheard_of": 1, "metadata": {"a": "b"}}))).await;
    assert_eq!(
        (&answer.headers["x-skep-model"], &answer.headers["x-skep-ignored"]),
        (&"tiny".parse().unwrap(), &"unheard_of".parse().unwrap())
    );
    let response = answer.json();
    let chat = json!({"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [
        {"role": "system", "content": "You are here to help."},
        {"role": "user", "content": "hello, is it you? and the user"}]});
    let chat = server.ok("/v1/chat/completions", &chat).await.json();
    assert_eq!(text(&response), chat["choices"][0]["message"]["content"]);
    assert_eq!((&response["status"], &response["object"]), (&json!("incomplete"), &json!("response")));
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!((&response["metadata"], &response["temperature"]), (&json!({"a": "b"}), &json!(0.0)));
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    let id = response["id"].as_str().unwrap();
    let stored = server.get(&format!("{RESPONSES}/{id}")).await.json();
    for field in ["output", "usage", "status", "metadata", "model", "instructions"] {
        assert_eq!(stored[field], response[field], "{field}");
    }
    let items = server.get(&format!("{RESPONSES}/{id}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "hello, is it you? and the user");
    let deleted =
        server.send(Request::delete(format!("{RESPONSES}/{id}")).body(Body::empty()).unwrap()).await;
    assert_eq!(deleted.json(), json!({"id": id, "object": "response", "deleted": true}));
    assert_eq!(server.get(&format!("{RESPONSES}/{id}")).await.error()["code"], "response_not_found");
}

#[tokio::test]
async fn events_are_numbered_and_join_to_the_response() {
    let server = Server::start().await;
    let streamed = server.ok(RESPONSES, &hello(json!({"stream": true}))).await;
    let events = events(&streamed, 0);
    assert_eq!(
        names(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "incomplete"
        ]
    );
    let last = &events.last().unwrap()["response"];
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!((deltas.as_str(), last["status"].as_str()), (text(last).as_str(), Some("incomplete")));
    let whole = server.ok(RESPONSES, &hello(json!({}))).await.json();
    assert_eq!(text(&whole), deltas);
    let id = last["id"].as_str().unwrap();
    assert_eq!(server.get(&format!("{RESPONSES}/{id}")).await.json()["output"], last["output"]);
    let refused = server.get(&format!("{RESPONSES}/{id}?stream=true")).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!("stream")));
}

#[tokio::test]
async fn a_call_is_an_item_and_its_output_continues_the_response() {
    let server = Server::start().await;
    let tools = json!([{"type": "function", "name": "weather", "strict": true, "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
                       "additionalProperties": false}}]);
    let body = hello(json!({"tools": tools, "tool_choice": "required", "max_output_tokens": 200}));
    let first = server.ok(RESPONSES, &body).await.json();
    let call = &first["output"][0];
    assert_eq!(
        (&call["type"], &call["name"], &first["status"]),
        (&json!("function_call"), &json!("weather"), &json!("completed"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let streamed = events(&server.ok(RESPONSES, &streamed).await, 0);
    assert!(names(&streamed).contains(&"function_call_arguments.done"));
    let output = json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]);
    let next = hello(json!({"input": output, "tools": tools, "tool_choice": "none",
                            "previous_response_id": first["id"]}));
    let second = server.ok(RESPONSES, &next).await.json();
    assert!(second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap() > 100);
    // The client may send the history instead, also by reference.
    let user = json!({"role": "user", "content": "hello, is it you? and the user"});
    let reference = json!({"type": "item_reference", "id": call["id"]});
    let mut answers = Vec::new();
    for item in [call, &reference] {
        let history = json!([user, item, output[0]]);
        let again = hello(json!({"input": history, "tools": tools, "tool_choice": "none"}));
        let again = server.ok(RESPONSES, &again).await.json();
        answers.push((text(&again), again["usage"]["input_tokens"].clone()));
    }
    assert_eq!(answers[0], answers[1]);
    let strange = json!([{"type": "item_reference", "id": "msg_1"}]);
    assert_eq!(
        server.post(RESPONSES, &hello(json!({"input": strange}))).await.error()["code"],
        "item_not_found"
    );
}

#[tokio::test]
async fn a_chain_has_the_prompt_of_its_whole_history_and_breaks_where_one_was_deleted() {
    let server = Server::start().await;
    let first = server.ok(RESPONSES, &hello(json!({"max_output_tokens": 24}))).await.json();
    let next =
        |previous: &Value, input: &str| hello(json!({"previous_response_id": previous, "input": input}));
    let second = server.ok(RESPONSES, &next(&first["id"], "go on")).await.json();
    assert_eq!(second["previous_response_id"], first["id"]);
    let messages = json!([{"role": "user", "content": "hello, is it you? and the user"},
                          {"role": "assistant", "content": text(&first)}, {"role": "user", "content": "go on"}]);
    let whole = server.ok(RESPONSES, &hello(json!({"input": messages}))).await.json();
    assert_eq!(text(&whole), text(&second));
    assert!(second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 48);
    let third = server.ok(RESPONSES, &next(&second["id"], "and on")).await.json();
    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    server.send(Request::delete(path).body(Body::empty()).unwrap()).await;
    let broken = server.post(RESPONSES, &next(&third["id"], "x")).await;
    assert_eq!((broken.status.as_u16(), &broken.error()["code"]), (404, &json!("response_not_found")));
    assert!(broken.text.contains(first["id"].as_str().unwrap()), "{}", broken.text);
    let unstored = server.ok(RESPONSES, &hello(json!({"store": false}))).await.json();
    let lost = server.post(RESPONSES, &next(&unstored["id"], "x")).await;
    assert_eq!(lost.error()["code"], "response_not_found");
}

#[tokio::test]
async fn a_response_for_which_there_is_no_room_is_refused_unless_it_is_not_stored() {
    let responses = ResponseOptions { max_stored_bytes: 100, ..ResponseOptions::default() };
    let runtime = RuntimeOptions { responses, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), runtime).await;
    for extra in [json!({}), json!({"background": true})] {
        let full = server.post(RESPONSES, &hello(extra)).await;
        assert_eq!((full.status.as_u16(), &full.error()["code"]), (409, &json!("responses_full")));
        assert!(full.text.contains("max_stored_mb"), "{}", full.text);
        assert_eq!(full.headers["x-should-retry"], "false");
        assert!(!full.headers.contains_key("retry-after"));
    }
    let streamed = events(&server.ok(RESPONSES, &hello(json!({"stream": true}))).await, 0);
    let last = &streamed.last().unwrap()["response"];
    assert_eq!((&last["status"], &last["error"]["code"]), (&json!("failed"), &json!("responses_full")));
    server.ok(RESPONSES, &hello(json!({"store": false}))).await;
}

#[tokio::test]
async fn responses_expire() {
    let responses = ResponseOptions { retention: Duration::from_secs(60), ..ResponseOptions::default() };
    let runtime = RuntimeOptions { responses, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), runtime).await;
    let response = server.ok(RESPONSES, &hello(json!({}))).await.json();
    let path = format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    let now_ms = response["created_at"].as_u64().unwrap() * 1000;
    server.host.expire_sessions(now_ms + 50_000).await.unwrap();
    assert_eq!(server.get(&path).await.status, 200);
    server.host.expire_sessions(now_ms + 62_000).await.unwrap();
    assert_eq!(server.get(&path).await.error()["code"], "response_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_in_the_background_can_be_followed_from_any_event() {
    let server = Server::start().await;
    let body = hello(json!({"background": true, "max_output_tokens": 40}));
    let queued = server.ok(RESPONSES, &body).await.json();
    assert!(queued["status"] == "queued" || queued["status"] == "in_progress", "{queued}");
    let id = queued["id"].as_str().unwrap();
    let path = format!("{RESPONSES}/{id}");
    let live = events(&server.get(&format!("{path}?stream=true")).await, 0);
    assert_eq!(names(&live)[..4], ["created", "queued", "in_progress", "output_item.added"]);
    let response = ended(&server, id).await;
    assert_eq!(live.last().unwrap()["response"]["output"], response["output"]);
    let later = events(&server.get(&format!("{path}?stream=true")).await, 0);
    assert_eq!(live, later, "events are the same whenever they are read");
    let rest = events(&server.get(&format!("{path}?stream=true&starting_after=5")).await, 6);
    assert_eq!(rest, later[6..]);
    let foreground = server.ok(RESPONSES, &hello(json!({"max_output_tokens": 40}))).await.json();
    assert_eq!(text(&foreground), text(&response));
    let again = server.ok(RESPONSES, &hello(json!({"previous_response_id": id}))).await.json();
    assert_eq!(again["previous_response_id"], id);
    // Nobody else gets to see the batch, and the response has no event of its own kind.
    let streamed = server.ok(RESPONSES, &hello(json!({"background": true, "stream": true}))).await;
    assert!(names(&events(&streamed, 0)).ends_with(&["incomplete"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_in_the_background_is_cancelled() {
    let server = Server::start().await;
    // The only answer of this model waits for a second one.
    let _ = server.host.models().clone().with(Together::model(&Arc::new(Barrier::new(2))));
    let body = hello(json!({"model": "far/model", "background": true}));
    let queued = server.ok(RESPONSES, &body).await.json();
    let path = format!("{RESPONSES}/{}", queued["id"].as_str().unwrap());
    let unended = server.post(RESPONSES, &hello(json!({"previous_response_id": queued["id"]}))).await;
    assert_eq!((unended.status.as_u16(), &unended.error()["param"]), (400, &json!("previous_response_id")));
    let cancelled = server.ok(&format!("{path}/cancel"), &json!({})).await.json();
    assert_eq!(cancelled["status"], "cancelled");
    assert_eq!(server.get(&path).await.json()["status"], "cancelled");
    let stream = events(&server.get(&format!("{path}?stream=true")).await, 0);
    assert_eq!(stream.last().unwrap()["response"]["status"], "cancelled");
    let foreground = server.ok(RESPONSES, &hello(json!({}))).await.json();
    let refused =
        server.post(&format!("{RESPONSES}/{}/cancel", foreground["id"].as_str().unwrap()), &json!({})).await;
    assert_eq!(refused.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_responds_in_the_session_that_is_continued() {
    let server = turns::server().await;
    let ask = |extra: Value| {
        let mut body = json!({"model": "agent:echo", "input": "one"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let first = server.ok(RESPONSES, &ask(json!({"user": "s"}))).await.json();
    assert_eq!(
        (text(&first).as_str(), &first["model"], &first["status"]),
        ("one", &json!("agent:echo"), &json!("completed"))
    );
    let next = ask(json!({"previous_response_id": first["id"], "input": "two", "stream": true}));
    let streamed = events(&server.ok(RESPONSES, &next).await, 0);
    let second = &streamed.last().unwrap()["response"];
    assert_eq!((text(second).as_str(), names(&streamed).last()), ("two", Some(&"completed")));
    assert_eq!(server.get("/v1/agents/echo/sessions/s").await.json()["turns"], 2);
    let background = ask(json!({"previous_response_id": second["id"], "input": "three", "background": true}));
    let background = server.ok(RESPONSES, &background).await.json();
    let id = background["id"].as_str().unwrap();
    assert_eq!(text(&ended(&server, id).await), "three");
    let live = events(&server.get(&format!("{RESPONSES}/{id}?stream=true")).await, 0);
    assert_eq!(text(&live.last().unwrap()["response"]), "three");
    assert_eq!(server.get("/v1/agents/echo/sessions/s").await.json()["turns"], 3);
    for (extra, param) in [
        (json!({"instructions": "x"}), "instructions"),
        (json!({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}), "input"),
    ] {
        assert_eq!(server.post(RESPONSES, &ask(extra)).await.error()["param"], param);
    }
    let of_model = server.ok(RESPONSES, &hello(json!({}))).await.json();
    let refused = server.post(RESPONSES, &ask(json!({"previous_response_id": of_model["id"]}))).await;
    assert_eq!(refused.error()["param"], "previous_response_id");
    let failed = ask(json!({"input": "!", "background": true}));
    let failed = server.ok(RESPONSES, &failed).await.json();
    let failed = ended(&server, failed["id"].as_str().unwrap()).await;
    assert_eq!((&failed["status"], &failed["error"]["code"]), (&json!("failed"), &json!("agent_trapped")));
    // The responses of an agent are deleted with its session.
    server.send(Request::delete("/v1/agents/echo/sessions/s").body(Body::empty()).unwrap()).await;
    assert_eq!(server.get(&format!("{RESPONSES}/{id}")).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_turn_runs_on_whose_response_could_not_be_stored() {
    // One response has room.
    let responses = ResponseOptions { max_stored_bytes: 15_000, ..ResponseOptions::default() };
    let runtime = RuntimeOptions { responses, ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), runtime).await;
    turns::deploy_with_time(&server).await;
    let create = async |user: &str| {
        let input = format!("~{}", "x".repeat(10_000));
        let body = json!({"model": "agent:echo", "user": user, "background": true, "input": input});
        server.post(RESPONSES, &body).await
    };
    // All of them may find that there is room before the first one takes it.
    let users = ["a", "b", "c", "d"];
    let answers = join_all(users.map(&create)).await;
    let (kept, refused): (Vec<_>, Vec<_>) =
        users.iter().zip(answers).partition(|(_, answer)| answer.status == 200);
    assert_eq!(kept.len(), 1, "{:?}", refused[0].1.text);
    for (user, answer) in refused {
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (409, &json!("responses_full")));
        while let Ok([turn]) = server.host.turns("echo", user, None, 10).await.as_deref() {
            match &turn.phase {
                TurnPhase::Waiting | TurnPhase::Running { .. } => {}
                TurnPhase::Failed { code, .. } if code == "cancelled" => break,
                ended => panic!("{ended:?}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let late = create("late").await;
    assert_eq!((late.status.as_u16(), &late.error()["code"]), (409, &json!("responses_full")));
    let begun = server.host.turns("echo", "late", None, 10).await.unwrap();
    assert!(begun.is_empty(), "no turn begins without room for its response: {begun:?}");
    let path = format!("{RESPONSES}/{}/cancel", kept[0].1.json()["id"].as_str().unwrap());
    server.ok(&path, &json!({})).await;
}

#[tokio::test]
async fn responses_belong_to_tenants_and_keys_for_agents_reach_only_theirs() {
    let server = access::guarded().await;
    let (ann, bob) = (
        access::key(&server, "ann", Role::Invoke, None).await,
        access::key(&server, "bob", Role::Invoke, None).await,
    );
    let narrow = access::key(&server, "ann", Role::Invoke, Some("echo")).await;
    let create =
        async |key: &str, body: Value| access::ask(&server, key, Method::POST, RESPONSES, body).await;
    let of_model = create(&ann, hello(json!({}))).await.json();
    let ask = json!({"model": "agent:echo", "input": "one"});
    let of_agent = create(&narrow, ask.clone()).await.json();
    let path = |response: &Value| format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    for (key, response, status) in [
        (&ann, &of_model, 200),
        (&ann, &of_agent, 200),
        (&narrow, &of_agent, 200),
        (&narrow, &of_model, 403),
        (&bob, &of_model, 404),
        (&bob, &of_agent, 404),
    ] {
        let shown = access::ask(&server, key, Method::GET, &path(response), Value::Null).await;
        assert_eq!(shown.status, status, "{}", shown.text);
        let items = format!("{}/input_items", path(response));
        assert_eq!(access::ask(&server, key, Method::GET, &items, Value::Null).await.status, status);
    }
    let reference = json!([{"type": "item_reference", "id": of_model["output"][0]["id"]},
                           {"role": "user", "content": "x"}]);
    let mut referring = ask.clone();
    referring["input"] = reference;
    assert_eq!(create(&narrow, referring).await.status, 403);
    assert_eq!(create(&bob, hello(json!({"previous_response_id": of_model["id"]}))).await.status, 404);
    assert_eq!(create(&narrow, hello(json!({}))).await.status, 403);
    let deleted = access::ask(&server, &bob, Method::DELETE, &path(&of_model), Value::Null).await;
    assert_eq!(deleted.status, 404);
}
